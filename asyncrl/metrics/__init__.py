"""Metrics: typed records, the files they go to, and the view on the terminal."""

from .overlap import Overlap
from .records import (
    Evaluation,
    MetricsWriter,
    StepRecord,
    TrainingResult,
    plot_reward,
    summary_document,
    write_json,
)
from .terminal import TerminalView
from .trackers import TrackedRun, Trackers, check_trackers
from .use import BUSY, PoolUse, RunUse

__all__ = [
    "BUSY",
    "Evaluation",
    "MetricsWriter",
    "Overlap",
    "PoolUse",
    "RunUse",
    "StepRecord",
    "TerminalView",
    "TrackedRun",
    "Trackers",
    "TrainingResult",
    "check_trackers",
    "plot_reward",
    "summary_document",
    "write_json",
]
