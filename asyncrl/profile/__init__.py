"""Reads the record of a run and explains its idle time."""

from __future__ import annotations

from asyncrl.profile.attribution import Attribution, FleetCause, LearnerCause, PoolTime, Stretch
from asyncrl.profile.trace import GroupLife, Level, Process, Span, Stamp, StepWindow, Trace, TraceReader

__all__ = [
    "Attribution",
    "FleetCause",
    "GroupLife",
    "LearnerCause",
    "Level",
    "PoolTime",
    "Process",
    "Span",
    "Stamp",
    "StepWindow",
    "Stretch",
    "Trace",
    "TraceReader",
]
