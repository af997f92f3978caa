"""Where a run's numbers go: ``metrics.jsonl``, TensorBoard events, and ``reward.png``."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from asyncrl.protocol.errors import AsyncRLError

from .records import Evaluation, StepRecord


class DiskError(AsyncRLError):
    """A file of the run cannot be written."""


class MetricsWriter:
    """Writes each record as a line of ``metrics.jsonl`` and as TensorBoard scalars."""

    def __init__(self, run_dir: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes a second: only where a run begins

        self._path = run_dir / "metrics.jsonl"
        self._file = self._path.open("w", buffering=1)
        self._events = SummaryWriter(log_dir=str(run_dir / "tensorboard"), flush_secs=10)

    def write(self, record: StepRecord) -> None:
        """Write one step.

        Raises:
            DiskError: the file cannot be written; the message names the process and the path.
        """
        numbers = record.flat()
        with writing(self._path):
            self._file.write(json.dumps(numbers) + "\n")
        for name, value in numbers.items():
            self._events.add_scalar(name.replace(".", "/"), value, record.step)

    def close(self) -> None:
        """Flush and close both files."""
        with suppress(OSError):  # `write` has said so before
            self._file.close()
        self._events.close()


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write a JSON file whole or not at all."""
    partial = path.with_suffix(path.suffix + ".partial")
    with writing(path):
        partial.write_text(json.dumps(document, indent=2) + "\n")
        os.replace(partial, path)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name the process and the path where the controller cannot write a file.

    Raises:
        DiskError: in place of the OSError.
    """
    try:
        yield
    except OSError as error:
        raise DiskError(
            f"the controller cannot write {path}: {error.strerror}; free space there, or name another output_dir"
        ) from error


def plot_reward(path: Path, records: Sequence[StepRecord], before: Evaluation | None, after: Evaluation | None) -> None:
    """Draw reward and lag over the learner steps, with the held-out evaluations as marks."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, height_ratios=(3, 1), layout="constrained")
    steps = [record.step for record in records]
    top.plot(steps, [record.reward for record in records], linewidth=0.8, alpha=0.45, label="training batch")
    top.plot(steps, _running_mean([record.reward for record in records], 10), label="training batch, mean of 10")
    last = steps[-1] + 1 if steps else 0
    for evaluation, step in ((before, 0), (after, last)):
        if evaluation is not None:
            top.plot(step, evaluation.sampled, "o", color="tab:green", label="held out, sampled" if step == 0 else None)
            top.plot(step, evaluation.greedy, "^", color="tab:red", label="held out, greedy" if step == 0 else None)
    top.set(ylabel="reward", ylim=(-0.02, 1.02))
    top.grid(alpha=0.3)
    top.legend(loc="lower right")
    bottom.step(steps, [record.lag_max for record in records], where="mid", label="largest")
    bottom.plot(steps, [record.lag_mean for record in records], label="mean")
    bottom.set(xlabel="learner step", ylabel="lag (steps)")
    bottom.grid(alpha=0.3)
    bottom.legend(loc="upper right")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _running_mean(values: Sequence[float], width: int) -> list[float]:
    means = []
    for end in range(1, len(values) + 1):
        window = values[max(0, end - width) : end]
        means.append(sum(window) / len(window))
    return means
