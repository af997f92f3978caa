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

__all__ = [
    "Evaluation",
    "MetricsWriter",
    "Overlap",
    "StepRecord",
    "TerminalView",
    "TrainingResult",
    "plot_reward",
    "summary_document",
    "write_json",
]
