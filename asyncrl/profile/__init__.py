"""Reads and explains what a run recorded of itself; see docs/profiling.md."""

from __future__ import annotations

from .trace import GroupLife, Level, Process, Span, Stamp, StepWindow, Trace, TraceReader

__all__ = ["GroupLife", "Level", "Process", "Span", "Stamp", "StepWindow", "Trace", "TraceReader"]
