"""Benchmarks that compare asyncrl with alternatives.

Each module prints a table, and its figures as JSON on the last line.
"""
