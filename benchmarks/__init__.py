"""Benchmarks of asyncrl against alternatives. Each module prints a table, and its figures as JSON on the last line."""
