"""Measurements against the alternatives. Each prints a table, and its figures as JSON on the last line."""
