"""The metrics of a run: their records and files, alarms, trackers such as MLflow, and the view on the terminal."""

from .alarms import Alarm, Alarms, RunLimits, read_alarms
from .estimates import Estimate, Evaluation, evaluation_of
from .history import History, history_folder, read_history
from .life_record import LifeRecord, LifeState, life_records, lives_until, read_life, read_options, write_life
from .run_records import (
    BUSY,
    MetricsWriter,
    PoolUse,
    RunUse,
    StepRecord,
    TrainingResult,
    counted,
    in_words,
    json_object,
    plot_reward,
    read_json,
    summary_document,
    write_json,
)
from .terminal import TerminalView
from .trackers import TrackedRun, Trackers, check_trackers

__all__ = [
    "BUSY", "Alarm", "Alarms", "Estimate", "Evaluation", "History", "LifeRecord", "LifeState", "MetricsWriter",
    "PoolUse", "RunLimits", "RunUse", "StepRecord", "TerminalView", "TrackedRun", "Trackers", "TrainingResult",
    "check_trackers", "counted", "evaluation_of", "history_folder", "in_words", "json_object", "life_records",
    "lives_until", "plot_reward", "read_alarms", "read_history", "read_json", "read_life", "read_options",
    "summary_document", "write_json", "write_life",
]  # fmt: skip
