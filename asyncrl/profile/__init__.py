"""Reads and explains what a run recorded of itself, and predicts what other options would do."""
