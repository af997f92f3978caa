"""Predicts the effect of other options: scenarios, the simulation of a run, and advice (docs/planning.md)."""
