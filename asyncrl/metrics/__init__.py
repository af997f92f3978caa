"""Metrics: typed records, the files they go to, and the view on the terminal."""

from .estimates import Estimate, Evaluation, evaluation_of
from .overlap import Overlap
from .records import (
    MetricsWriter,
    StepRecord,
    TrainingResult,
    plot_reward,
    summary_document,
    write_json,
)
from .terminal import TerminalView

__all__ = [
    "Estimate",
    "Evaluation",
    "MetricsWriter",
    "Overlap",
    "StepRecord",
    "TerminalView",
    "TrainingResult",
    "evaluation_of",
    "plot_reward",
    "summary_document",
    "write_json",
]
