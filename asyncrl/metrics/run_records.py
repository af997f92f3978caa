"""The metrics of a run as dataclasses, and their files: ``metrics.jsonl``, TensorBoard events, ``reward.png``."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl.core.errors import AsyncRLError
from asyncrl.core.types import TokenAccount

from .estimates import Evaluation

PREFIXES = {"episodes": "episode", "learner": "learner"}
"""The dicts in `StepRecord` by field, with the first part of their entries' dotted names, such as ``learner.loss``."""
FOR_TRACKERS = ("groups", "lags", "tokens_dropped_by_reason", "groups_dropped_by_reason")
"""Fields of `StepRecord` that only trackers read. ``metrics.jsonl`` does not have them."""


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """The metrics of one learner step. Policy tokens are tokens that the policy sampled.

    Attributes:
        step: Number of the learner step, from 0.
        time_s: Seconds from the start of training to the end of the update.
        reward: Mean reward over the batch's samples.
        reward_std: Standard deviation of the rewards over the batch's samples.
        equal_reward_groups: Share of groups in which all samples have the same reward, and the same rewards of turns if
            turns have rewards. The group-relative advantages of these groups are zero.
        truncated_samples: Share of samples that reached the length limit.
        samples_per_group: Mean number of samples per group of the batch. It is below ``samples_per_prompt`` if
            samples are missing because their rewards failed.
        response_length: Mean response length, in tokens.
        lag_mean: Mean lag of the batch's groups: learner steps between the sampling policy and the trained policy.
        lag_max: Largest lag of the batch's groups, in learner steps.
        generated_tokens: Policy tokens that the fleet has generated since the start of training.
        rollout_tokens_per_s: Policy tokens generated since the previous record, per second of ``time_s``.
        learner_tokens_per_s: Policy tokens of the batch per second of the update.
        buffer_groups: Number of finished groups that wait for a batch.
        leased_groups: Number of groups that the fleet is generating.
        dropped_groups: Number of groups that ``buffer.filters`` or ``buffer.on_stale`` have dropped since the start of
            training.
        failed_groups: Number of failed attempts to generate a group since the start of training: the reward failed, or
            the engine aborted the group.
        unscored_groups: Number of groups left out of the batch because a reward is not finite.
        reused_groups: Number of groups in the batch that an earlier step also trained on (``buffer.max_uses``).
        kept_length: Mean response length of all trained samples so far, in tokens.
        dropped_length: Mean response length of all dropped samples so far. The difference from ``kept_length`` is the
            length bias.
        engine_version: Every engine serves this policy version or a newer one.
        plan_wait_s: Seconds that the controller waited for the batch.
        update_s: Seconds of the update on the slowest rank.
        publish_s: Seconds until the slowest engine had the latest published weights.
        buffer_fill: Bytes of the stored groups, as a fraction of the limit of all stores.
        buffer_on_disk: Share of the stored groups' bytes that are only on disk; 0 without ``buffer.max_memory_bytes``.
        slowest_engine: Policy tokens of the slowest engine in the latest steps, as a fraction of the median engine's; 1
            with fewer than two engines.
        free_disk_bytes: Free bytes on the disk of the run's folder.
        learner: Metrics of the learner by name (loss, grad_norm, clip_fraction, …).
        metrics: Metrics of the trajectories by name, as means over the batch's groups. Example: ``reward.NAME``.
        episodes: Counts of environments and their requests by name, summed over the engines since training began.
            Example: ``unknown_keys``. Empty without environments.
        groups: Number of groups by state after the step, such as ``stored``. This field and the next three are for
            trackers, not in ``metrics.jsonl``.
        lags: Number of the batch's groups by lag.
        tokens_dropped_by_reason: Number of dropped tokens, including those of earlier processes of the run.
        groups_dropped_by_reason: Number of dropped groups, including those of earlier processes of the run.
    """

    step: int
    time_s: float
    reward: float
    reward_std: float
    equal_reward_groups: float
    truncated_samples: float
    samples_per_group: float
    response_length: float
    lag_mean: float
    lag_max: int
    generated_tokens: int
    rollout_tokens_per_s: float
    learner_tokens_per_s: float
    buffer_groups: int
    leased_groups: int
    dropped_groups: int = 0
    failed_groups: int = 0
    unscored_groups: int = 0
    reused_groups: int = 0
    kept_length: float = 0.0
    dropped_length: float = 0.0
    engine_version: int
    plan_wait_s: float
    update_s: float
    publish_s: float
    buffer_fill: float = 0.0
    buffer_on_disk: float = 0.0
    slowest_engine: float = 1.0
    free_disk_bytes: int = 0
    learner: Mapping[str, float]
    metrics: Mapping[str, float] = field(default_factory=dict)
    episodes: Mapping[str, int] = field(default_factory=dict)
    groups: Mapping[str, int] = field(default_factory=dict)
    lags: Mapping[int, int] = field(default_factory=dict)
    tokens_dropped_by_reason: Mapping[str, int] = field(default_factory=dict)
    groups_dropped_by_reason: Mapping[str, int] = field(default_factory=dict)

    def flat(self) -> dict[str, float]:
        """Return the numbers of this step by dotted name, without the fields in `FOR_TRACKERS`.

        Example of a name: ``learner.loss``. `MetricsWriter` writes the numbers as one line of ``metrics.jsonl``.
        """
        numbers = asdict(self)
        for name in FOR_TRACKERS:
            del numbers[name]
        numbers |= numbers.pop("metrics")
        for part, prefix in PREFIXES.items():
            numbers |= {f"{prefix}.{name}": value for name, value in numbers.pop(part).items()}
        return numbers


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """The result of the learner steps of a run, before the final evaluation.

    Attributes:
        policy_version: Version of the trained policy: its number of learner steps.
        train_wall_s: Seconds from the start of training to the last update.
        tokens: Counts of generated, trained and dropped tokens after the fleet has stopped.
        max_lag_realised: Largest lag of a group that this process trained on, in learner steps.
        max_lag_before: Largest lag before the checkpoint that this process continued from; 0 for a new run.
        lag_histogram: Number of trained groups by lag in learner steps.
        tokens_dropped: Number of dropped tokens by reason.
        groups_failed: Number of failed attempts to generate a group, by reason.
        samples_per_group: Mean number of samples per trained group, over all steps of this process; 0 without steps.
    """

    policy_version: int
    train_wall_s: float
    tokens: TokenAccount
    max_lag_realised: int
    max_lag_before: int = 0
    lag_histogram: Mapping[int, int]
    tokens_dropped: Mapping[str, int]
    groups_failed: Mapping[str, int] = field(default_factory=dict)
    samples_per_group: float = 0.0


@dataclass(frozen=True, kw_only=True)
class PoolUse:
    """Busy and idle time of the learner's ranks, or of the fleet of engines, since the start of training.

    Attributes:
        name: ``learner`` or ``fleet``.
        capacity: Number of learner ranks, or of samples that the fleet can generate at the same time.
        busy_s: Busy seconds, summed over the ranks or samples in ``capacity``.
        idle_s: Idle seconds by cause, summed like ``busy_s``. Busy and idle seconds sum to ``capacity`` times the time.
        recent: Shares of the time of the latest learner steps: busy time (key `BUSY`), and idle time by cause.
    """

    name: str
    capacity: int
    busy_s: float
    idle_s: Mapping[str, float]
    recent: Mapping[str, float] = field(default_factory=dict)

    @property
    def utilisation(self) -> float:
        """Busy time divided by all time since the start of training, from 0 to 1. The value is 0 before the start."""
        total = self.busy_s + sum(self.idle_s.values())
        return self.busy_s / total if total > 0 else 0.0

    @property
    def top_cause(self) -> tuple[str, float] | None:
        """The cause of the most idle time in the latest steps, as a pair (name, fraction of the time).

        None if there was no idle time.
        """
        causes = {cause: share for cause, share in self.recent.items() if cause != BUSY and share > 0}
        return max(causes.items(), key=lambda item: item[1], default=None)


BUSY = "busy"
"""Key of the busy time in `PoolUse.recent`. The other keys are causes of idle time."""


def in_words(cause: str) -> str:
    """Return the name of a cause of idle time as words. Example: ``publish_pause`` gives ``publish pause``."""
    return cause.replace("re_prefill", "re-prefill").replace("_", " ")


def counted(number: float, noun: str) -> str:
    """Return a text with a number and a noun, in singular or plural. Example: ``1 rank``, ``2 ranks``."""
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number if isinstance(number, int) else f'{number:g}'} {noun if number == 1 else plural}"


@dataclass(frozen=True, kw_only=True)
class RunUse:
    """How busy the learner's ranks and the fleet of engines have been since the start of training."""

    learner: PoolUse
    fleet: PoolUse


def summary_document(
    *,
    experiment: str,
    seed: int,
    total_steps: int,
    max_lag: int,
    result: TrainingResult,
    before: Evaluation | None,
    after: Evaluation | None,
    evaluations: Sequence[Evaluation] = (),
    restarts: Mapping[str, int] | None = None,
    wall_s: Mapping[str, float],
    overlap: Mapping[str, Any] | None = None,
    advice: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the contents of a run's ``summary.json``, as a dict of JSON values.

    - ``total_steps`` is the configured number of steps; a stopped run has fewer.
    - ``before`` and ``after`` are the evaluations of version 0 and of the final version.
    - ``restarts`` has the number of restarts by component, and the number of batches planned again (key ``batches``).
    - ``wall_s`` has two durations in seconds: ``total``, and ``start`` until the first step could begin.
    - ``overlap`` is the report on busy and idle times, from the profile; None without a profile.
    - ``advice`` is an option that would have made the run faster; None if there is none.
    """
    return {
        "experiment": experiment,
        "seed": seed,
        "policy_version": result.policy_version,
        "total_steps": total_steps,
        "wall_s": wall_s["total"],
        "start_wall_s": wall_s["start"],
        "train_wall_s": result.train_wall_s,
        "eval": {"before": before and asdict(before), "after": after and asdict(after)}
        | {"all": [asdict(evaluation) for evaluation in evaluations]},
        "max_lag": {
            "bound": max_lag,
            "realised": result.max_lag_realised,
            "before_resume": result.max_lag_before,
            "histogram": {str(lag): count for lag, count in sorted(result.lag_histogram.items())},
        },
        "tokens": asdict(result.tokens) | {"dropped_by_reason": dict(result.tokens_dropped)},
        "groups_failed": dict(result.groups_failed),
        "samples_per_group": result.samples_per_group,
        "restarts": dict(restarts or {}),
        "overlap": overlap,
        "advice": advice,
    }


class DiskError(AsyncRLError):
    """A file of the run cannot be written, for example because the disk is full."""


class MetricsWriter:
    """Writes the metrics of a run to ``metrics.jsonl``, ``evaluations.jsonl`` and TensorBoard.

    If the learner returns to a checkpoint, it repeats the steps after the checkpoint. The old lines of these steps are
    then moved to ``metrics.lost.jsonl``, and the lines of later evaluations to ``evaluations.lost.jsonl``.

    Attributes:
        steps: The written records of learner steps, without lost steps.
        evaluations: The written evaluations.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "metrics.jsonl"
        self._file = self._path.open("w", buffering=1)
        self._events = ScalarEvents(run_dir / "tensorboard")
        self.steps: list[StepRecord] = []
        self.evaluations: list[Evaluation] = []

    def write(self, record: StepRecord) -> None:
        """Write the metrics of one learner step to ``metrics.jsonl`` and to TensorBoard.

        If the step is not later than the previous record's step, the learner has returned to a checkpoint. In this
        case, the method first moves the lines of the lost steps to ``metrics.lost.jsonl``.

        Raises:
            DiskError: the file cannot be written; the message names the process and the path.
        """
        numbers = record.flat()
        with writing(self._path):
            # Move the lines of the lost steps if the learner has returned to a checkpoint.
            if self.steps and record.step <= self.steps[-1].step:
                self._file.close()
                _move_lost(self._path, lambda line: line["step"] >= record.step)
                evaluations = self._path.with_name("evaluations.jsonl")
                _move_lost(evaluations, lambda line: line["policy_version"] > record.step)
                self._file = self._path.open("a", buffering=1)
                self._events.go_back(record.step)
                self.steps = [kept for kept in self.steps if kept.step < record.step]
                self.evaluations = [kept for kept in self.evaluations if kept.policy_version <= record.step]
            self.steps.append(record)
            self._file.write(json.dumps(numbers) + "\n")
        self._events.add({name.replace(".", "/"): value for name, value in numbers.items()}, record.step)

    def evaluation(self, evaluation: Evaluation) -> None:
        """Write an evaluation as a line of ``evaluations.jsonl`` and as TensorBoard scalars.

        Raises the errors of `write`.
        """
        self.evaluations.append(evaluation)
        numbers = asdict(evaluation)
        path = self._path.with_name("evaluations.jsonl")
        with writing(path), path.open("a") as file:
            file.write(json.dumps(numbers) + "\n")
        scalars = {f"evaluation/{name}": value for name, value in evaluation.scalars().items()}
        self._events.add(scalars, evaluation.policy_version)

    def go_on(self, steps: Sequence[StepRecord], evaluations: Sequence[Evaluation]) -> None:
        """Write the metrics of earlier runs, up to the checkpoint that this run resumed, into this run's files.

        This method must be called before the first new step is written. It raises the same errors as `write`.
        """
        for evaluation in evaluations:
            self.evaluation(evaluation)
        for record in steps:
            self.write(record)

    def profile(self, step: int, figures: Mapping[str, float]) -> None:
        """Write numbers from the profile of a step as TensorBoard scalars under ``profile/``.

        ``figures`` maps dotted names to these numbers.
        """
        self._events.add({f"profile/{name.replace('.', '/')}": value for name, value in figures.items()}, step)

    def close(self) -> None:
        """Flush and close ``metrics.jsonl`` and the TensorBoard file."""
        with suppress(OSError):  # ignore the error, because an earlier `write` has raised it already
            self._file.close()
        self._events.close()


class ScalarEvents:
    """Writes scalars for TensorBoard without loading torch."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._open = partial(EventFileWriter, str(folder), flush_secs=10)
        events: Any = event_pb2  # `event_pb2` creates its classes at import, so type checkers do not know them
        summaries: Any = summary_pb2
        self._event, self._summary, self._log = events.Event, summaries.Summary, events.SessionLog
        self._file = self._open()

    def add(self, scalars: Mapping[str, float], step: int) -> None:
        """Queue the scalars of one step, by TensorBoard tag. A thread writes them to the file within about 10 s."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._file.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))

    def go_back(self, step: int) -> None:
        """Continue in a new event file. TensorBoard then ignores scalars of ``step`` and later steps in older files."""
        self._file.close()
        self._file = self._open()
        start = self._log(status=self._log.START)
        self._file.add_event(self._event(wall_time=time.time(), step=step, file_version="brain.Event:2"))
        self._file.add_event(self._event(wall_time=time.time(), step=step, session_log=start))

    def close(self) -> None:
        """Write the queued scalars and close the event file."""
        self._file.close()


def _move_lost(path: Path, is_lost: Callable[[dict[str, Any]], bool]) -> None:
    """Move lines of a JSONL file to a file with ``.lost`` in its name. If ``path`` does not exist, do nothing.

    The function calls ``is_lost`` with the JSON object of each line, and moves the line if the result is True.
    """
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    lost = [line for line in lines if is_lost(json.loads(line))]
    if lost:
        with path.with_suffix(f".lost{path.suffix}").open("a") as file:
            file.writelines(lost)
        partial_path = path.with_suffix(f"{path.suffix}.partial")
        partial_path.write_text("".join(line for line in lines if line not in lost))
        os.replace(partial_path, path)


def read_json(path: Path, *keys: str) -> dict[str, Any] | None:
    """Return the object in a JSON file of a run; None if there is no file.

    The object must have the given ``keys``. Raises the errors of `json_object`.
    """
    return json_object(path.read_text(errors="replace"), str(path), *keys) if path.is_file() else None


def json_object(text: str, place: str, *keys: str) -> dict[str, Any]:
    """Parse a text as a JSON object that has the given ``keys``, and return the object.

    ``place`` names the text in messages. Example: ``line 3 of RUN/metrics.jsonl``.

    Raises:
        ValueError: the text is not an object with these keys. The message has ``place``.
    """
    try:
        document = json.loads(text)
        got = f"one with {', '.join(document) or 'nothing'}" if isinstance(document, dict) else f"{document!r:.80}"
    except ValueError as error:
        document, got = None, f"invalid JSON: {error}"
    if isinstance(document, dict) and document.keys() >= set(keys):
        return document
    raise ValueError(
        f"{place} must hold a JSON object with {', '.join(keys)}, got {got}; restore the file, or delete the file"
    )


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write a JSON file atomically: readers see the old or the new content. Raises `DiskError`."""
    partial = path.with_suffix(path.suffix + ".partial")
    with writing(path):
        partial.write_text(json.dumps(document, indent=2) + "\n")
        os.replace(partial, path)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Convert an `OSError` in the ``with`` block to a `DiskError` that names the process and ``path``."""
    try:
        yield
    except OSError as error:
        raise DiskError(
            f"the controller cannot write {path}: {error.strerror}; free space there, or choose another output_dir"
        ) from error


def plot_reward(path: Path, records: Sequence[StepRecord], evaluations: Sequence[Evaluation]) -> None:
    """Draw reward and lag per learner step, with the held-out evaluations as marks, to the image file ``path``."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, height_ratios=(3, 1), layout="constrained")
    steps = [record.step for record in records]
    top.plot(steps, [record.reward for record in records], linewidth=0.8, alpha=0.45, label="training batch")
    windows = [records[max(0, end - 10) : end] for end in range(1, len(records) + 1)]
    means = [sum(record.reward for record in window) / len(window) for window in windows]
    top.plot(steps, means, label="training batch, mean of 10")
    versions = [evaluation.policy_version for evaluation in evaluations]
    for kind, marks, color in (("sampled", "o--", "tab:green"), ("greedy", "^--", "tab:red")):
        rewards = [getattr(evaluation, kind) for evaluation in evaluations]
        found = [one.interval(kind) for one in evaluations]
        ends = [[one.mean - one.low for one in found], [one.high - one.mean for one in found]]
        top.errorbar(versions, rewards, ends, fmt=marks, color=color, linewidth=0.8, label=f"held out, {kind}")
    top.set(ylabel="reward")
    top.grid(alpha=0.3)
    top.legend(loc="lower right")
    bottom.step(steps, [record.lag_max for record in records], where="mid", label="largest")
    bottom.plot(steps, [record.lag_mean for record in records], label="mean")
    bottom.set(xlabel="learner step", ylabel="lag (steps)")
    bottom.grid(alpha=0.3)
    bottom.legend(loc="upper right")
    figure.savefig(path, dpi=120)
    plt.close(figure)
