"""Alarms report conditions of a run that stop or bias learning, waste devices, or will end the run.

`Alarms` reads only the metrics of a run. An alarm on learner steps begins after `WINDOW` consecutive steps that meet
its condition, because a single step may meet the condition by chance.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .estimates import Estimate, Evaluation
from .history import History, read_records
from .run_records import StepRecord

WINDOW = 5
"""Number of consecutive steps that must meet a condition before an alarm begins."""
COLLAPSED = 0.01
"""The policy's entropy has collapsed if it is below this fraction of its mean over the first `WINDOW` steps."""
ALL_BUT_EQUAL = 0.9
"""Collapsed entropy is an alarm only if at least this fraction of the groups have equal rewards in the group."""
MAX_ENGINE_GAP = 0.1
"""Largest normal difference between log-probs of engine and learner with the same weights, in nats per token."""
MAX_TRUNCATED = 0.2
"""Largest normal fraction of samples that reach the length limit."""
MAX_LENGTH_BIAS = 0.25
"""Largest normal difference between the mean lengths of dropped and trained samples, as a fraction of the latter."""
MIN_DROPPED_GROUPS = 20
"""The alarm on the length of dropped samples needs at least this number of dropped groups."""
FULL = 0.95
"""The buffer counts as full if `StepRecord.buffer_fill` is at least this value."""
SLOW_ENGINE = 0.5
"""An engine is slow if it generates less than this fraction of the median engine's tokens per second."""


@dataclass(frozen=True, kw_only=True)
class RunLimits:
    """Options of a run that `Alarms` compares with the run's metrics.

    Attributes:
        total_steps: Configured number of learner steps.
        max_lag: ``buffer.max_lag``, in learner steps.
        compares_groups: True if all advantages compare the samples of a prompt group. A group then teaches nothing if
            all its rewards are equal. If False, a batch teaches nothing if all its rewards are equal.
    """

    total_steps: int
    max_lag: int
    compares_groups: bool = True


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """A problem of a run, with its first and last step.

    Attributes:
        name: Name of the alarm in the metrics. Example: ``equal_rewards``.
        first_step: First learner step, or first evaluated policy version.
        message: What was found, with numbers, and what to do.
        last_step: Last learner step (or evaluated version) before the alarm ended; None while it lasts.
    """

    name: str
    first_step: int
    message: str
    last_step: int | None = None

    def __str__(self) -> str:
        since = f"since step {self.first_step}"
        when = since if self.last_step is None else f"steps {self.first_step} to {self.last_step}"
        return f"{self.name.replace('_', ' ')} ({when}): {self.message}"


class Alarms:
    """Finds the alarms of one run from its metrics.

    Attributes:
        history: All alarms in the order of their first steps.
        num_steps: Number of records that `step` has received, including repeated steps.
    """

    def __init__(self, limits: RunLimits) -> None:
        self.history: list[Alarm] = []
        self.num_steps = 0
        self._limits = limits
        self._window: deque[StepRecord] = deque(maxlen=WINDOW)
        self._first_entropies: list[float] = []
        self._best: tuple[int, Estimate] | None = None
        self._seen: set[str] = set()

    @property
    def current(self) -> list[Alarm]:
        """The alarms that have begun and not ended yet."""
        return [alarm for alarm in self.history if alarm.last_step is None]

    def step(self, record: StepRecord) -> list[Alarm]:
        """Check the metrics of one learner step. Return the alarms that begin or end with this step."""
        if self._window and record.step <= self._window[-1].step:
            self._window.clear()  # begin a new window, because the learner has returned to a checkpoint
        self._window.append(record)
        self.num_steps += 1
        found = dict.fromkeys(_CONDITIONS, "") | {"entropy": self._entropy(record)}
        if len(self._window) == WINDOW:
            found |= {name: condition(self._window, self._limits) for name, condition in _CONDITIONS.items()}
        return self._update(found, record.step)

    def evaluation(self, evaluation: Evaluation) -> list[Alarm]:
        """Check an evaluation on held-out prompts for a fall of the reward.

        Returns a list with one alarm if the alarm begins or ends with this evaluation, else an empty list. The alarm
        lasts while the 95% interval of the greedy reward lies below the interval of the best evaluation so far.
        """
        now = evaluation.interval("greedy")
        if self._best is None or now.mean >= self._best[1].mean:
            self._best = evaluation.policy_version, now
        version, best = self._best
        message = (
            f"the greedy reward on held-out prompts fell from {best.mean:.3f} at version {version} to {now.mean:.3f}; "
            "continue from a checkpoint near that version with a lower learner.optimizer.lr, or stop there"
        )
        return self._update({"evaluation": message if now.high < best.low else ""}, evaluation.policy_version)

    def go_on(self, records: History) -> None:
        """Check the steps and evaluations of the run so far, in the order of their versions."""
        evaluations = deque(records.evaluations)
        for record in records.steps:
            while evaluations and evaluations[0].policy_version <= record.step:
                self.evaluation(evaluations.popleft())
            self.step(record)
        for evaluation in evaluations:
            self.evaluation(evaluation)

    def metrics(self) -> dict[str, float]:
        """Return a metric ``alarm.NAME`` for each alarm that has ever begun: 1.0 if the alarm lasts now, else 0.0."""
        current = {alarm.name for alarm in self.current}
        return {f"alarm.{name}": float(name in current) for name in sorted(self._seen)}

    def _update(self, found: Mapping[str, str], step: int) -> list[Alarm]:
        """Begin and end alarms at a step.

        ``found`` maps the name of each condition to a message. The message is empty if the condition does not hold.
        """
        lasting = {alarm.name: alarm for alarm in self.current}
        ended = {
            name: replace(lasting[name], last_step=max(lasting[name].first_step, step - 1))
            for name in lasting.keys() & found
            if not found[name]
        }
        self.history = [ended[a.name] if a.last_step is None and a.name in ended else a for a in self.history]
        began = [
            Alarm(name=name, first_step=step, message=message)
            for name, message in found.items()
            if message and name not in lasting
        ]
        self.history += began
        self._seen |= {alarm.name for alarm in began}
        return [*began, *ended.values()]

    def _entropy(self, record: StepRecord) -> str:
        entropy = record.learner.get("entropy")
        if entropy is None:
            return ""
        if len(self._first_entropies) < WINDOW:
            self._first_entropies.append(entropy)
            return ""
        first = sum(self._first_entropies) / WINDOW
        recent = [record.learner.get("entropy", first) for record in self._window]
        is_varied = min(_equal_share(record, self._limits) for record in self._window) < ALL_BUT_EQUAL
        if max(recent) >= COLLAPSED * first or is_varied:
            return ""
        return (
            f"the policy explores too little: its entropy fell from {first:.3g} to {entropy:.3g} nats per token, at "
            f"reward {record.reward:.3g}; if this is not intended, lower learner.optimizer.lr, raise "
            "algorithm.clip_high or algorithm.entropy_coef, and restart from an earlier checkpoint"
        )


# Each function below checks one condition in the records of the newest `WINDOW` steps.
# Each function returns the message of the alarm, or an empty text if there is no alarm.


def _equal_share(record: StepRecord, limits: RunLimits) -> float:
    """Return the fraction of the batch, from 0 to 1, from which the policy learns nothing because rewards are equal.

    If advantages compare the rewards within a group, this is the fraction of the groups whose rewards are all equal.
    Otherwise the fraction is 1 if all rewards of the batch are equal, and 0 if not.
    """
    return record.equal_reward_groups if limits.compares_groups else float(record.reward_std == 0)


def _equal_rewards(window: Sequence[StepRecord], limits: RunLimits) -> str:
    if any(_equal_share(record, limits) < 1 for record in window):
        return ""
    rewards = [record.reward for record in window]
    which = f"all are {rewards[-1]:g}" if min(rewards) == max(rewards) else f"on average {rewards[-1]:.3g}"
    return (
        f"nothing to learn from: in the last {WINDOW} steps the rewards were equal within every group ({which}), "
        "so advantages are 0; check the reward on samples/ or choose prompts that the policy solves sometimes"
    )


def _no_update(window: Sequence[StepRecord], limits: RunLimits) -> str:
    for role, prefix in (("policy", ""), ("critic", "critic.")):
        # ``grad_norm`` is a mean over a step's updates. The policy has no ``grad_norm`` while only the critic trains.
        norms = [record.learner.get(f"{prefix}grad_norm", 1.0) for record in window]
        if not any(map(math.isfinite, norms)):
            return (
                f"the {role} skips updates: in the last {WINDOW} steps its gradients were not finite; check your own "
                "loss and advantage, look for very large rewards, or set learner.dtype=float32"
            )
        if role == "policy" and not any(norms) and all(_equal_share(record, limits) < 1 for record in window):
            return (
                f"the policy does not change: in the last {WINDOW} steps its gradients were 0 although rewards differ; "
                "look at learner.masked_fraction and learner.num_tokens, and widen the bounds of algorithm.masks, or "
                "raise rollout_fleet.sampling.max_new_tokens with algorithm.mask_truncated"
            )
    return ""


def _engine_gap(window: Sequence[StepRecord], _: RunLimits) -> str:
    gaps = [record.learner["engine_gap"] for record in window if "engine_gap" in record.learner]
    if not gaps or min(gaps) <= MAX_ENGINE_GAP:
        return ""
    return (
        f"engine and learner disagree about the same weights: the log-probs of tokens of lag 0 differ by "
        f"{gaps[-1]:.3g} nats per token on average, at most {MAX_ENGINE_GAP:g} is normal; compare dtype, "
        "quantization and rollout_fleet.sglang options of the engines with the learner's, keep the fp32 output layer "
        "on, and run asyncrl check-gpu"
    )


def _truncation(window: Sequence[StepRecord], _: RunLimits) -> str:
    if min(record.truncated_samples for record in window) <= MAX_TRUNCATED:
        return ""
    return (
        f"{window[-1].truncated_samples:.0%} of the samples reach the length limit; raise "
        "rollout_fleet.sampling.max_new_tokens; algorithm.mask_truncated=true leaves them out of the loss"
    )


def _length_bias(window: Sequence[StepRecord], _: RunLimits) -> str:
    last = window[-1]
    if min(record.dropped_groups for record in window) < MIN_DROPPED_GROUPS or not all(r.kept_length for r in window):
        return ""
    if min(abs(record.dropped_length / record.kept_length - 1) for record in window) <= MAX_LENGTH_BIAS:
        return ""
    return (
        f"dropping selects by length: the {last.dropped_groups} dropped groups have {last.dropped_length:.0f} tokens "
        f"per sample, the trained ones {last.kept_length:.0f}; use buffer.on_stale=wait, or check buffer.filters"
    )


def _lag(window: Sequence[StepRecord], limits: RunLimits) -> str:
    if limits.max_lag == 0 or any(r.lag_mean < limits.max_lag or r.reused_groups for r in window):
        return ""
    return (
        f"every trained group has the largest lag that buffer.max_lag={limits.max_lag} allows: the learner is the "
        "slower pool, and its data waits; give it more devices, or lower buffer.max_lag at no loss of speed"
    )


def _buffer_full(window: Sequence[StepRecord], _: RunLimits) -> str:
    if min(record.buffer_fill for record in window) < FULL:
        return ""
    return (
        f"the buffer is full: its groups take {window[-1].buffer_fill:.0%} of buffer.max_stored_bytes, and engines "
        "wait for room; raise the option, or lower buffer.max_lag"
    )


def _slow_engine(window: Sequence[StepRecord], _: RunLimits) -> str:
    if max(record.slowest_engine for record in window) >= SLOW_ENGINE:
        return ""
    return (
        f"one engine generates {window[-1].slowest_engine:.0%} of the median engine's tokens per second; the report "
        "shows which one; look for another process on its device, or remove it with asyncrl leave"
    )


def _disk(window: Sequence[StepRecord], limits: RunLimits) -> str:
    first, last = window[0], window[-1]
    per_step = (first.free_disk_bytes - last.free_disk_bytes) / (len(window) - 1)
    missing_steps = limits.total_steps - last.step - 1
    if per_step <= 0 or not missing_steps or last.free_disk_bytes >= per_step * missing_steps:
        return ""
    return (
        f"the disk of output_dir will be full in {last.free_disk_bytes / per_step:.0f} steps, {missing_steps} are "
        f"left: {last.free_disk_bytes / 2**30:.1f} GiB are free, and {per_step / 2**20:.1f} MiB are used per step; "
        "free space, keep fewer checkpoints, or log fewer samples"
    )


_CONDITIONS: dict[str, Callable[[Sequence[StepRecord], RunLimits], str]] = {
    "equal_rewards": _equal_rewards,
    "no_update": _no_update,
    "engine_gap": _engine_gap,
    "truncation": _truncation,
    "length_bias": _length_bias,
    "lag": _lag,
    "buffer_full": _buffer_full,
    "slow_engine": _slow_engine,
    "disk": _disk,
}


def read_alarms(run_dir: Path, limits: RunLimits) -> Alarms:
    """Read ``metrics.jsonl`` and ``evaluations.jsonl`` in a run's folder, and compute the alarms of the run.

    Raises:
        ValueError: a line is not a record. The message names the line.
    """
    alarms = Alarms(limits)
    alarms.go_on(read_records(run_dir))
    return alarms
