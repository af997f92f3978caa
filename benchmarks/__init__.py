"""Benchmarks that compare asyncrl with alternatives.

Each benchmark prints a table, and its figures as JSON on the last line.
"""
