"""Metrics: typed records, the files they go to, and the view on the terminal."""

from .records import (
    Evaluation,
    MetricsWriter,
    Overlap,
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
