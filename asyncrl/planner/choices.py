"""Simulates a run with many choices of its options, and recommends a fast choice with a small lag.

The lag is the number of learner steps between the first token of a group and the training on the group. `advise` finds
the best change of one option of a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np

from asyncrl.core.errors import ReplayBufferError
from asyncrl.planner.scenario import Scenario, overrides
from asyncrl.planner.simulator import SimulatedRun, simulate
from asyncrl.profile.report import Advice
from buffer.config import OnStale

NUM_REPLICATES = 8
"""Number of simulations of one choice. Their results give the interval of the step time."""
AS_FAST = 0.02
"""Two choices count as equally fast if their step times differ by at most this fraction."""
MIN_GAIN = 0.03
"""Smallest predicted gain that is worth a change, as a fraction of the step time."""
MAX_REPLAY_ERROR = 0.2
"""Largest error of the simulated step time, as a fraction of the measured time. Above it, `advise` returns None."""
_REPLICATES = 3
"""Number of simulations of one choice in `advise`."""


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The values of options that the planner tries. An empty list means only the present value.

    Attributes:
        splits: Pairs (number of engines, number of ranks). Example: ``[(6, 2), (4, 4)]``.
        groups_per_step: Batch sizes in prompt groups.
    """

    splits: Sequence[tuple[int, int]] = ()
    max_lag: Sequence[int] = (0, 1, 2, 4)
    groups_per_step: Sequence[int] = ()
    publish_every: Sequence[int] = (1, 2)
    on_stale: Sequence[OnStale] = (OnStale.wait, OnStale.requeue)

    def of(self, base: Scenario) -> Iterator[Scenario]:
        """Yield a copy of ``base`` for each valid combination of the values.

        In a valid combination, ``publish_every`` and ``max_uses`` are at most ``max_lag`` + 1. The values of ``base``
        for ``max_lag``, ``publish_every`` and ``on_stale`` are always tried too.
        """
        values = {
            "split": dict.fromkeys(self.splits or [(base.num_engines, base.num_ranks)]),
            "max_lag": sorted({*self.max_lag, base.max_lag}),
            "groups_per_step": dict.fromkeys(self.groups_per_step or [base.groups_per_step]),
            "publish_every": sorted({*self.publish_every, base.publish_every}),
            "on_stale": dict.fromkeys([base.on_stale, *self.on_stale]),
        }
        for (engines, ranks), *chosen in product(*values.values()):
            options = dict(zip([*values][1:], chosen, strict=True))
            if max(options["publish_every"], base.max_uses) <= options["max_lag"] + 1:
                yield replace(base, num_engines=engines, num_ranks=ranks, **options)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The predicted result of a choice.

    Attributes:
        outcome: The result with the scenario's own response lengths.
        step_s: 5th and 95th percentile of the step time over resampled lengths. The interval includes
            ``outcome.step_s``.
        lag_mean: 5th and 95th percentile of the mean lag, in learner steps, computed like ``step_s``.
    """

    scenario: Scenario
    outcome: SimulatedRun
    step_s: tuple[float, float]
    lag_mean: tuple[float, float]

    @property
    def groups_per_s(self) -> float:
        """Number of trained prompt groups per second. This number is comparable between different batch sizes."""
        return self.scenario.groups_per_step / self.outcome.step_s

    def to_dict(self, base: Scenario) -> dict[str, Any]:
        """Return the options, the simulated results and their intervals as a dict for JSON.

        The key ``overrides`` has the options that differ from the scenario ``base``, such as ``buffer.max_lag=1``.
        """
        options = {name: getattr(self.scenario, name) for name in _SHOWN_OPTIONS}
        outcome = {name: getattr(self.outcome, name) for name in _SHOWN_FIGURES}
        return {
            "overrides": overrides(self.scenario, base),
            **options,
            "on_stale": str(self.scenario.on_stale),
            **outcome,
            "step_s_interval": list(self.step_s),
            "lag_mean_interval": list(self.lag_mean),
            "lag_histogram": {str(lag): share for lag, share in self.outcome.lag_histogram.items()},
        }


_SHOWN_OPTIONS = ("num_engines", "num_ranks", "groups_per_step", "max_lag", "publish_every")
_SHOWN_FIGURES = (*("step_s", "tokens_per_s", "lag_mean", "learner_idle", "fleet_idle", "stored_bytes", "dropped"),)


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """The predictions for all choices, and the recommended prediction.

    Attributes:
        base: The scenario with the present options.
        predictions: One prediction per choice; the first one is for ``base``.
        notes: Assumptions of the predictions, as sentences.
    """

    base: Scenario
    predictions: Sequence[Prediction]
    recommended: Prediction
    notes: Sequence[str] = field(default_factory=tuple)

    @property
    def current(self) -> Prediction:
        """The prediction for the present options."""
        return self.predictions[0]

    def curves(self) -> list[dict[str, Any]]:
        """Return curves of step time over mean lag for a chart. Each curve is a dict with a name and a list of points.

        A curve is for one division of the devices between engines and ranks. Each point of a curve is for one value of
        ``max_lag``. Predictions that change other options of the base scenario are left out.
        """
        points: dict[str, list[dict[str, Any]]] = {}
        for one in sorted(self.predictions, key=lambda one: (one.scenario.num_engines, one.scenario.max_lag)):
            scenario, base = one.scenario, self.base
            same = (base.publish_every, base.on_stale, base.groups_per_step)
            if (scenario.publish_every, scenario.on_stale, scenario.groups_per_step) == same:
                name = f"{scenario.num_engines} engines, {scenario.num_ranks} ranks"
                point = {"lag": one.outcome.lag_mean, "step_s": one.outcome.step_s, "max_lag": scenario.max_lag}
                points.setdefault(name, []).append({**point, "interval": list(one.step_s)})
        return [{"name": name, "points": found} for name, found in points.items()]

    def to_dict(self) -> dict[str, Any]:
        """Return the predictions and the recommendation as a dict, the content of ``plan.json``."""
        return {
            "curves": self.curves(),
            "scenario": self.base.to_dict(),
            "notes": list(self.notes),
            "current": self.current.to_dict(self.base),
            "recommended": self.recommended.to_dict(self.base),
            "predictions": [prediction.to_dict(self.base) for prediction in self.predictions],
        }


def predict(scenario: Scenario, *, replicates: int = NUM_REPLICATES, seed: int = 0) -> Prediction:
    """Simulate a scenario ``replicates`` times, and return the first result with intervals from all results.

    Each simulation after the first one has another seed, and response lengths that are drawn from the recorded lengths.

    Raises:
        ReplayBufferError: the scenario cannot run. The simulated buffer refuses a request, as the buffer of a real run
            would. For example, a batch does not fit into the buffer.
    """
    outcome = simulate(scenario, seed=seed)
    outcomes = [outcome]
    for replicate in range(1, replicates):
        lengths = scenario.lengths.resampled(np.random.default_rng([seed, replicate]))
        outcomes.append(simulate(replace(scenario, lengths=lengths), seed=seed + replicate))
    return Prediction(
        scenario=scenario,
        outcome=outcome,
        step_s=_interval([each.step_s for each in outcomes]),
        lag_mean=_interval([each.lag_mean for each in outcomes]),
    )


def make_plan(
    base: Scenario,
    choices: Choices,
    *,
    replicates: int = NUM_REPLICATES,
    seed: int = 0,
    notes: Sequence[str] = (),
    on_progress: Callable[[str], None] = lambda _: None,
) -> RunPlan:
    """Simulate the scenario ``base`` and every combination of ``choices`` that can run, and recommend one of them.

    Only the base and the fastest combinations are simulated ``replicates`` times; all others are simulated once.
    ``on_progress`` is called with a description of each simulation before the simulation starts. ``notes`` are
    sentences for the reader of the result.

    Raises:
        ReplayBufferError: the scenario ``base`` cannot run.
    """
    on_progress(f"the present options, {replicates} times")
    current = predict(base, replicates=replicates, seed=seed)
    found = [current]
    others = [scenario for scenario in choices.of(base) if scenario != base]
    for number, scenario in enumerate(others, start=1):
        on_progress(f"choice {number} of {len(others)}")
        with suppress(ReplayBufferError):  # leave out a choice that cannot run (see `predict`)
            found.append(predict(scenario, replicates=1, seed=seed))
    fast = [one for one in _as_fast(found) if one is not current]
    for number, one in enumerate(fast, start=1):
        on_progress(f"fast choice {number} of {len(fast)}, {replicates} times")
        found[found.index(one)] = predict(one.scenario, replicates=replicates, seed=seed)
    return RunPlan(base=base, predictions=found, recommended=recommend(found), notes=notes)


def recommend(predictions: Sequence[Prediction]) -> Prediction:
    """Return the prediction with the smallest lag among the fastest predictions.

    These are the predictions whose step takes at most the fraction `AS_FAST` longer than the fastest step. The first
    prediction is for the present options; it wins a tie. A prediction for other options is left out in three cases:

    - It has another batch size.
    - It uses more devices.
    - It drops stale groups, and the present options do not.
    """
    fast = _as_fast(predictions)
    return min(fast, key=lambda one: (round(one.outcome.lag_mean, 2), one.scenario.max_lag, one is not predictions[0]))


def _as_fast(predictions: Sequence[Prediction]) -> list[Prediction]:
    present = predictions[0].scenario
    comparable = [
        one
        for one in predictions
        if one.scenario.groups_per_step == present.groups_per_step
        and one.scenario.num_devices <= present.num_devices
        and (one.scenario.on_stale is not OnStale.drop or present.on_stale is OnStale.drop)
    ]
    fastest = min(one.outcome.step_s for one in comparable)
    return [one for one in comparable if one.outcome.step_s <= fastest * (1 + AS_FAST)]


def splits_of(base: Scenario) -> list[tuple[int, int]]:
    """Return (number of engines, number of ranks) pairs that use all devices of ``base``, sorted.

    There are at most nine evenly spaced pairs, plus the present pair.
    """
    total, size = base.num_devices, base.devices_per_engine
    candidates = ((engines, total - engines * size) for engines in range(1, (total - 1) // size + 1))
    possible = [split for split in candidates if _can_have_ranks(base, split[1])]
    if len(possible) > 9:
        possible = [possible[round(place * (len(possible) - 1) / 8)] for place in range(9)]
    return sorted({*possible, (base.num_engines, base.num_ranks)})


def _can_have_ranks(base: Scenario, num_ranks: int) -> bool:
    return 1 <= num_ranks <= base.groups_per_step and num_ranks % base.ranks_at_once == 0


def _interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 5th and 95th percentile of ``values``, widened so that the interval includes ``values[0]``."""
    return min(values[0], float(np.quantile(values, 0.05))), max(values[0], float(np.quantile(values, 0.95)))


# Advice


def advise(
    scenario: Scenario, *, measured_step_s: float, num_faults: int = 0, seed: int = 0, keep_split: bool = False
) -> Advice | None:
    """Find the change of one option that makes the run fastest; return None if no change is good enough.

    Args:
        scenario: The run, as `asyncrl.planner.calibration.calibrate` derives it from a record.
        measured_step_s: Measured seconds per step.
        num_faults: Number of failures in the record. If it is not 0, the result is None.
        seed: Seed of the response lengths.
        keep_split: If true, keep the number of engines and the number of ranks.
    """
    if num_faults:
        return None
    now = predict(scenario, replicates=_REPLICATES, seed=seed)
    if misses(now, measured_step_s):
        return None
    paying = []
    for changed in _changes(scenario, keep_split=keep_split):
        with suppress(ReplayBufferError):  # leave out a change that cannot run (see `predict`)
            # Simulate once to find the gain. If the gain is large enough, simulate more often to find the interval.
            if predict(changed, replicates=1, seed=seed).outcome.step_s < now.outcome.step_s * (1 - MIN_GAIN):
                found = predict(changed, replicates=_REPLICATES, seed=seed)
                paying += [found] if found.step_s[1] < now.step_s[0] else []
    best = min(paying, key=lambda found: found.outcome.step_s, default=None)
    # The predicted step must also be faster than the measured step by the fraction `MIN_GAIN`.
    if best is None or best.outcome.step_s > measured_step_s * (1 - MIN_GAIN):
        return None
    idle = max((now.outcome.learner_idle, now.outcome.fleet_idle), key=lambda causes: sum(causes.values()))
    cause = max(idle, key=lambda name: idle[name])
    return Advice(
        change=" ".join(overrides(best.scenario, scenario)),
        why=f"{_REASONS[cause]} ({idle[cause]:.0%} of the time)",
        predicted_step_s=best.outcome.step_s,
        interval=best.step_s,
        predicted_lag=best.outcome.lag_mean,
    )


def misses(replayed: Prediction, measured_step_s: float) -> bool:
    """Return whether the simulated and the measured step time of a run differ by more than `MAX_REPLAY_ERROR`.

    If they do, the simulation cannot predict the effect of changes. ``measured_step_s`` is in seconds.
    """
    return abs(replayed.outcome.step_s / measured_step_s - 1) > MAX_REPLAY_ERROR


def _changes(scenario: Scenario, *, keep_split: bool) -> Iterator[Scenario]:
    """Yield copies of ``scenario``. Each copy has another value of one option, and the same number of devices."""
    for max_lag in {scenario.max_lag + 1, max(2, 2 * scenario.max_lag)}:
        yield replace(scenario, max_lag=max_lag)
    for groups in {scenario.groups_in_flight // 2, scenario.groups_in_flight * 2} - {0}:
        yield replace(scenario, groups_in_flight=groups)
    for publish_every in (scenario.publish_every - 1, scenario.publish_every + 1):
        if 1 <= publish_every <= scenario.max_lag + 1:
            yield replace(scenario, publish_every=publish_every)
    # Decrease or increase the number of engines by `moved`, and give the other devices to learner ranks.
    # `moved` is the smallest change of the number of engines that `ranks_at_once` permits.
    moved = scenario.ranks_at_once // math.gcd(scenario.ranks_at_once, scenario.devices_per_engine)
    for engines in () if keep_split else (scenario.num_engines - moved, scenario.num_engines + moved):
        ranks = scenario.num_devices - engines * scenario.devices_per_engine
        if engines >= 1 and _can_have_ranks(scenario, ranks):
            yield replace(scenario, num_engines=engines, num_ranks=ranks)


_REASONS = {
    "batch_tail": "the ranks wait for the last groups of a batch, and the engines must not start other groups",
    "publish": "the ranks wait until the engines have the new weights",
    "slow_generation": "the ranks wait for generation",
    "staleness_gate": "the engines wait for admission",
    "buffer_full": "the engines wait for room in the buffer",
    "publish_pause": "the engines pause to load weights",
    "re_prefill": "the engines recompute KV caches after each update",
    "reward": "finished groups occupy their slots while they are scored",
    "lease": "the engines wait for leases",
}
