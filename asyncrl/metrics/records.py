"""What a run measures, as typed records, and where they go: ``metrics.jsonl``, TensorBoard events, ``reward.png``."""

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


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One learner step, as it stands in ``metrics.jsonl``.

    Attributes:
        step: Learner version that consumed the batch; the weights are at ``step + 1`` afterwards.
        time_s: Seconds since training began, at the end of the update.
        reward: Mean reward over the batch's samples.
        reward_std: Standard deviation of the rewards over the batch's samples.
        equal_reward_groups: Share of groups with equal rewards, which carry no signal for a group advantage.
        truncated_samples: Share of samples that hit the length limit.
        samples_per_group: Mean number of samples that a group of the batch holds: below ``samples_per_prompt`` where
            samples were dropped because their reward failed.
        response_length: Mean response length, in tokens.
        lag_mean: Mean lag of the batch's groups, in learner steps.
        lag_max: Largest lag of the batch.
        generated_tokens: Policy tokens the fleet has generated since training began.
        rollout_tokens_per_s: Policy tokens generated per second since the last record.
        learner_tokens_per_s: Policy tokens trained per second of update.
        buffer_groups: Groups stored, waiting for a batch.
        leased_groups: Groups being generated.
        dropped_groups: Groups dropped since training began, by ``buffer.filters`` or ``buffer.on_stale``.
        failed_groups: Attempts that failed since training began: the reward failed, or the engine aborted the group.
        unscored_groups: Groups of the batch that were left out because a reward of theirs is not finite.
        kept_length: Mean response length of all samples trained on so far, in tokens.
        dropped_length: The same of all samples dropped so far; against ``kept_length`` it is the length bias.
        engine_version: Oldest policy version that an engine serves.
        plan_wait_s: Time the controller waited for the batch.
        update_s: Time of the update on the slowest rank.
        publish_s: Time of the last weight publish, on the slowest engine.
        learner: The learner's own metrics, by name (loss, grad_norm, clip_fraction, …).
        metrics: Mean over the batch's groups of what their trajectories carry, such as ``reward.NAME`` of each of
            several rewards.
        groups: Groups by state after the step's commit; for trackers, not in ``metrics.jsonl``.
        lags: Number of the batch's groups by lag; likewise.
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
    kept_length: float = 0.0
    dropped_length: float = 0.0
    engine_version: int
    plan_wait_s: float
    update_s: float
    publish_s: float
    learner: Mapping[str, float]
    metrics: Mapping[str, float] = field(default_factory=dict)
    groups: Mapping[str, int] = field(default_factory=dict)
    lags: Mapping[int, int] = field(default_factory=dict)

    def flat(self) -> dict[str, float]:
        """Return every number under a dotted name. Example: ``learner.loss``."""
        numbers = asdict(self)
        learner, metrics = numbers.pop("learner"), numbers.pop("metrics")
        del numbers["groups"], numbers["lags"]
        return numbers | metrics | {f"learner.{name}": value for name, value in learner.items()}


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """What training left behind, before the final evaluation.

    Attributes:
        policy_version: Learner version at the end.
        train_wall_s: Seconds from the first admission to the last update.
        tokens: The token account, after the fleet has put down its work.
        max_lag_realised: Largest lag of any group that this run consumed.
        max_lag_before: The same of the runs that it resumes; they may have had another bound. 0 where there were none.
        lag_histogram: Lag in learner steps to number of consumed groups.
        tokens_dropped: Dropped tokens by reason.
        groups_failed: Failed attempts of this run by reason; see `StepRecord`.
        samples_per_group: See `StepRecord`; over all steps that this run took, 0 where it took none.
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
    """The time of a pool since training began.

    Attributes:
        name: ``learner`` or ``fleet``.
        capacity: Ranks of the learner, places for samples of the fleet.
        busy_s: Rank-seconds or place-seconds of work.
        idle_s: The others, by cause; with ``busy_s`` they make up capacity x time.
        recent: Share of the last steps' time by cause; work under ``busy``.
    """

    name: str
    capacity: int
    busy_s: float
    idle_s: Mapping[str, float]
    recent: Mapping[str, float] = field(default_factory=dict)

    @property
    def utilisation(self) -> float:
        """Share of work since training began, from 0 to 1."""
        total = self.busy_s + sum(self.idle_s.values())
        return self.busy_s / total if total > 0 else 0.0

    @property
    def top_cause(self) -> tuple[str, float] | None:
        """What cost most of late, and its share of the time; None where nothing did."""
        causes = {cause: share for cause, share in self.recent.items() if cause != BUSY and share > 0}
        return max(causes.items(), key=lambda item: item[1], default=None)


BUSY = "busy"
"""Stands for work among the causes of `PoolUse.recent`, and of `asyncrl.profile.attribution`."""


def in_words(cause: str) -> str:
    """A cause as it is shown. Example: ``publish_pause`` gives ``publish pause``."""
    return cause.replace("re_prefill", "re-prefill").replace("_", " ")


def counted(number: float, noun: str) -> str:
    """A number with its noun, which is plural unless it is one: "1 rank", "2 ranks"."""
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number if isinstance(number, int) else f'{number:g}'} {noun if number == 1 else plural}"


@dataclass(frozen=True, kw_only=True)
class RunUse:
    """The use of both pools."""

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
    """Return ``summary.json``.

    Args:
        experiment: Name of the run.
        seed: Its seed.
        total_steps: Steps that it was to take; a run that a signal stopped has fewer.
        max_lag: The bound.
        result: What training left behind.
        before: Evaluation at version 0; None where evaluation is off.
        after: Evaluation at the final version.
        evaluations: All, in their order.
        restarts: How often a part was started again, by name; ``batches`` that were planned anew.
        wall_s: Seconds by part of the run: ``total``, ``start`` (until the first step could begin), …
        overlap: How well generation and training overlapped; None where the run was not recorded.
        advice: The change of one option that would have made it faster; None where none is known.
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
        "max_lag": {"bound": max_lag, **_lags(result)},
        "tokens": asdict(result.tokens) | {"dropped_by_reason": dict(result.tokens_dropped)},
        "groups_failed": dict(result.groups_failed),
        "samples_per_group": result.samples_per_group,
        "restarts": dict(restarts or {}),
        "overlap": overlap,
        "advice": advice,
    }


def _lags(result: TrainingResult) -> dict[str, Any]:
    """The largest lags, and how many groups had each."""
    return {
        "realised": result.max_lag_realised,
        "before_resume": result.max_lag_before,
        "histogram": {str(lag): count for lag, count in sorted(result.lag_histogram.items())},
    }


class DiskError(AsyncRLError):
    """A file of the run cannot be written."""


class MetricsWriter:
    """Writes each record as a line of ``metrics.jsonl`` and as TensorBoard scalars.

    Each step stands there once. Where the learner goes back to a checkpoint, the lines of the steps that are lost move
    to ``metrics.lost.jsonl``, and evaluations of lost versions to ``evaluations.lost.jsonl``.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "metrics.jsonl"
        self._file = self._path.open("w", buffering=1)
        self._events = ScalarEvents(run_dir / "tensorboard")
        self._next_step = 0

    def write(self, record: StepRecord) -> None:
        """Write one step.

        Raises:
            DiskError: the file cannot be written; the message names the process and the path.
        """
        numbers = record.flat()
        with writing(self._path):
            if record.step < self._next_step:
                self._go_back(record.step)
            self._next_step = record.step + 1
            self._file.write(json.dumps(numbers) + "\n")
        self._events.add({name.replace(".", "/"): value for name, value in numbers.items()}, record.step)

    def _go_back(self, step: int) -> None:
        """The learner is at version ``step`` again."""
        self._file.close()
        _move_lost(self._path, lambda line: line["step"] >= step)
        _move_lost(self._path.with_name("evaluations.jsonl"), lambda line: line["policy_version"] > step)
        self._file = self._path.open("a", buffering=1)
        self._events.go_back(step)

    def evaluation(self, evaluation: Evaluation) -> None:
        """Write an evaluation as a line of ``evaluations.jsonl``, and as scalars at its version; raises as `write`."""
        numbers = asdict(evaluation)
        path = self._path.with_name("evaluations.jsonl")
        with writing(path), path.open("a") as file:
            file.write(json.dumps(numbers) + "\n")
        scalars = {f"evaluation/{name}": value for name, value in evaluation.scalars().items()}
        self._events.add(scalars, evaluation.policy_version)

    def profile(self, step: int, figures: Mapping[str, float]) -> None:
        """Write what a step did with its time as scalars under ``profile/``."""
        self._events.add({f"profile/{name.replace('.', '/')}": value for name, value in figures.items()}, step)

    def close(self) -> None:
        """Flush and close both files."""
        with suppress(OSError):  # `write` has said so before
            self._file.close()
        self._events.close()


class ScalarEvents:
    """Scalars for TensorBoard, through the writer that torch's ``SummaryWriter`` uses, which would load torch."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._open = partial(EventFileWriter, str(folder), flush_secs=10)
        events: Any = event_pb2  # made when it is imported, so that its classes are known to no type checker
        summaries: Any = summary_pb2
        self._event, self._summary, self._log = events.Event, summaries.Summary, events.SessionLog
        self._file = self._open()

    def add(self, scalars: Mapping[str, float], step: int) -> None:
        """Add scalars of a step."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._file.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))

    def go_back(self, step: int) -> None:
        """Go on in a new file, for which TensorBoard forgets what older ones have from this step on."""
        self._file.close()
        self._file = self._open()
        start = self._log(status=self._log.START)
        self._file.add_event(self._event(wall_time=time.time(), step=step, file_version="brain.Event:2"))
        self._file.add_event(self._event(wall_time=time.time(), step=step, session_log=start))

    def close(self) -> None:
        """Flush and close."""
        self._file.close()


def _move_lost(path: Path, is_lost: Callable[[dict[str, Any]], bool]) -> None:
    """Move lines of a file of JSON lines, if there is one, to one with ``.lost`` in its name."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    lost = [line for line in lines if is_lost(json.loads(line))]
    if lost:
        with path.with_suffix(f".lost{path.suffix}").open("a") as file:
            file.writelines(lost)
        partial_path = path.with_suffix(f"{path.suffix}.partial")
        partial_path.write_text("".join(line for line in lines if line not in lost))
        os.replace(partial_path, path)


def read_json(path: Path, *keys: str) -> dict[str, Any] | None:
    """The object in a JSON file of a run; None where there is no file. Raises as `json_object`."""
    return json_object(path.read_text(errors="replace"), str(path), *keys) if path.is_file() else None


def json_object(text: str, place: str, *keys: str) -> dict[str, Any]:
    """The JSON object that stands in a place of a run's folder.

    Args:
        text: What stands there.
        place: Named by the error. Example: ``line 3 of RUN/metrics.jsonl``.
        keys: That it must have.

    Raises:
        ValueError: it is no JSON object with these keys.
    """
    try:
        document = json.loads(text)
        got = f"one with {', '.join(document) or 'nothing'}" if isinstance(document, dict) else f"{document!r:.80}"
    except ValueError as error:
        document, got = None, f"no JSON: {error}"
    if isinstance(document, dict) and document.keys() >= set(keys):
        return document
    raise ValueError(
        f"{place} must hold a JSON object with {', '.join(keys)}, got {got}; restore it from a copy, or "
        "delete it to go without"
    )


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


def plot_reward(path: Path, records: Sequence[StepRecord], evaluations: Sequence[Evaluation]) -> None:
    """Draw reward and lag over the learner steps, with the held-out evaluations as marks."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, height_ratios=(3, 1), layout="constrained")
    steps = [record.step for record in records]
    top.plot(steps, [record.reward for record in records], linewidth=0.8, alpha=0.45, label="training batch")
    top.plot(steps, _running_mean([record.reward for record in records], 10), label="training batch, mean of 10")
    versions = [evaluation.policy_version for evaluation in evaluations]
    for kind, marks, color in (("sampled", "o--", "tab:green"), ("greedy", "^--", "tab:red")):
        rewards = [getattr(evaluation, kind) for evaluation in evaluations]
        ends = _whiskers(evaluations, kind)
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


def _whiskers(evaluations: Sequence[Evaluation], kind: str) -> list[list[float]]:
    """How far the 95% interval of each evaluation reaches below and above its mean."""
    found = [one.interval(kind) for one in evaluations]
    return [[one.mean - one.low for one in found], [one.high - one.mean for one in found]]


def _running_mean(values: Sequence[float], width: int) -> list[float]:
    means = []
    for end in range(1, len(values) + 1):
        window = values[max(0, end - width) : end]
        means.append(sum(window) / len(window))
    return means
