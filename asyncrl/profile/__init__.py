"""Reads what the processes of a run recorded, and explains why learner ranks and engines were idle."""

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
