"""Predicts the effect of options on the speed of a run, by simulation (docs/planning.md)."""
