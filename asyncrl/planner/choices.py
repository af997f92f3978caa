"""Which options a system should run with: every choice is simulated, and what they give is laid side by side.

The fastest choice is not the best one: staleness costs learning. `recommend` takes the least stale choice among those
that are as fast as the fastest, at the batch that the scenario trains on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np

from asyncrl.core.errors import ReplayBufferError
from asyncrl.planner.scenario import Scenario, overrides
from asyncrl.planner.simulator import Outcome, simulate
from buffer.config import OnStale

NUM_REPLICATES = 8
"""Simulations of one choice, each with lengths drawn anew, for its interval."""
AS_FAST = 0.02
"""Choices whose step time is within this share of the fastest are as fast."""
_LOW, _HIGH = 0.05, 0.95


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What a plan varies; an empty list keeps the scenario's own value.

    Attributes:
        splits: Pairs of engines and ranks. Example: ``[(6, 2), (4, 4)]``.
        max_lag: Bounds.
        groups_per_step: Batches.
        publish_every: Steps between two published versions.
        on_stale: What becomes of a straggler at its deadline.
    """

    splits: Sequence[tuple[int, int]] = ()
    max_lag: Sequence[int] = (0, 1, 2, 4)
    groups_per_step: Sequence[int] = ()
    publish_every: Sequence[int] = (1, 2)
    on_stale: Sequence[OnStale] = (OnStale.wait, OnStale.requeue)

    def of(self, base: Scenario) -> Iterator[Scenario]:
        """Every choice that makes sense, the scenario's own among them."""
        seen = set()
        for (engines, ranks), max_lag, batch, publish_every, on_stale in product(
            self.splits or [(base.num_engines, base.num_ranks)],
            sorted({*self.max_lag, base.max_lag}),
            self.groups_per_step or [base.groups_per_step],
            sorted({*self.publish_every, base.publish_every}),
            dict.fromkeys([base.on_stale, *self.on_stale]),
        ):
            key = engines, ranks, max_lag, batch, publish_every, on_stale
            if publish_every > max_lag + 1 or key in seen:
                continue
            seen.add(key)
            yield replace(
                base,
                num_engines=engines,
                num_ranks=ranks,
                max_lag=max_lag,
                groups_per_step=batch,
                publish_every=publish_every,
                on_stale=on_stale,
            )


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a choice is predicted to give.

    Attributes:
        scenario: The choice.
        outcome: Of the scenario's own lengths.
        step_s: 5th and 95th percentile of the step time over lengths drawn anew, or the outcome's own beyond them.
        lag_mean: The same of the mean lag.
    """

    scenario: Scenario
    outcome: Outcome
    step_s: tuple[float, float]
    lag_mean: tuple[float, float]

    @property
    def groups_per_s(self) -> float:
        """Prompt groups trained on per second: what to compare where batches differ."""
        return self.scenario.groups_per_step / self.outcome.step_s

    def to_dict(self, base: Scenario) -> dict[str, Any]:
        """As plain values, for JSON."""
        scenario, outcome = self.scenario, self.outcome
        return {
            "overrides": overrides(scenario, base),
            "num_engines": scenario.num_engines,
            "num_ranks": scenario.num_ranks,
            "groups_per_step": scenario.groups_per_step,
            "max_lag": scenario.max_lag,
            "publish_every": scenario.publish_every,
            "on_stale": str(scenario.on_stale),
            "step_s": outcome.step_s,
            "step_s_interval": list(self.step_s),
            "tokens_per_s": outcome.tokens_per_s,
            "lag_mean": outcome.lag_mean,
            "lag_mean_interval": list(self.lag_mean),
            "lag_histogram": {str(lag): share for lag, share in outcome.lag_histogram.items()},
            "learner_idle": dict(outcome.learner_idle),
            "fleet_idle": dict(outcome.fleet_idle),
            "stored_bytes": outcome.stored_bytes,
            "dropped": outcome.dropped,
        }


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """Every prediction, and the one to take.

    Attributes:
        base: What was planned from.
        predictions: One per choice; the first is the base's own.
        recommended: The one to take.
        notes: What the predictions rest on, in words.
    """

    base: Scenario
    predictions: Sequence[Prediction]
    recommended: Prediction
    notes: Sequence[str] = field(default_factory=tuple)

    @property
    def current(self) -> Prediction:
        """The prediction for the scenario as it is."""
        return self.predictions[0]

    def curves(self) -> list[dict[str, Any]]:
        """Step time against mean lag, for a chart: a curve per split, a point per bound, all else as it is."""
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
        """As plain values, for ``plan.json`` and the report."""
        return {
            "curves": self.curves(),
            "scenario": self.base.to_dict(),
            "notes": list(self.notes),
            "current": self.current.to_dict(self.base),
            "recommended": self.recommended.to_dict(self.base),
            "predictions": [prediction.to_dict(self.base) for prediction in self.predictions],
        }


def predict(scenario: Scenario, *, replicates: int = NUM_REPLICATES, seed: int = 0) -> Prediction:
    """Simulate one choice, and again with lengths drawn anew for its intervals.

    Raises:
        ReplayBufferError: the buffer refuses, as it would in a run.
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
    """Predict every choice; intervals only for the base and those that may be recommended.

    ``on_progress`` is told in words what is about to be simulated.

    Raises:
        ReplayBufferError: the base cannot run. A choice that cannot is left out.
    """
    on_progress(f"the options as they are, {replicates} times")
    current = predict(base, replicates=replicates, seed=seed)
    found = [current]
    others = [scenario for scenario in choices.of(base) if scenario != base]
    for number, scenario in enumerate(others, start=1):
        on_progress(f"choice {number} of {len(others)}")
        found.extend(_if_possible(scenario, seed))
    fast = [one for one in _as_fast(found) if one is not current]
    for number, one in enumerate(fast, start=1):
        on_progress(f"fast choice {number} of {len(fast)}, {replicates} times")
        found[found.index(one)] = predict(one.scenario, replicates=replicates, seed=seed)
    return RunPlan(base=base, predictions=found, recommended=recommend(found), notes=notes)


def recommend(predictions: Sequence[Prediction]) -> Prediction:
    """The least stale of those that are as fast as the fastest; the first is the present one, and wins a draw.

    Compared are choices that train on the same batch as the present one, on no more devices, and drop nothing: other
    batches and dropped prompts change what is learned, which no simulation of time can weigh.
    """
    fast = _as_fast(predictions)
    return min(fast, key=lambda one: (round(one.outcome.lag_mean, 2), one.scenario.max_lag, one is not predictions[0]))


def _as_fast(predictions: Sequence[Prediction]) -> list[Prediction]:
    present = predictions[0].scenario
    comparable = [one for one in predictions if _is_comparable(one.scenario, present)]
    fastest = min(one.outcome.step_s for one in comparable)
    return [one for one in comparable if one.outcome.step_s <= fastest * (1 + AS_FAST)]


def _is_comparable(scenario: Scenario, present: Scenario) -> bool:
    return (
        scenario.groups_per_step == present.groups_per_step
        and scenario.num_devices <= present.num_devices
        and (scenario.on_stale is not OnStale.drop or present.on_stale is OnStale.drop)
    )


def _if_possible(scenario: Scenario, seed: int) -> Iterable[Prediction]:
    try:
        yield predict(scenario, replicates=1, seed=seed)
    except ReplayBufferError:  # it could not run: no room for a batch, for one
        return


def splits_of(base: Scenario) -> list[tuple[int, int]]:
    """Ways to share the scenario's devices out between engines and ranks, the present one among them."""
    total, size = base.num_devices, base.devices_per_engine
    candidates = ((engines, total - engines * size) for engines in range(1, (total - 1) // size + 1))
    possible = [split for split in candidates if can_have_ranks(base, split[1])]
    if len(possible) > 9:  # as many as tell the shape of the curve
        possible = [possible[round(place * (len(possible) - 1) / 8)] for place in range(9)]
    return sorted({*possible, (base.num_engines, base.num_ranks)})


def can_have_ranks(base: Scenario, num_ranks: int) -> bool:
    """Whether a run like this can be started with so many ranks."""
    return 1 <= num_ranks <= base.groups_per_step and num_ranks % base.ranks_at_once == 0


def engines_at_once(base: Scenario) -> int:
    """By how many engines a neighbouring split differs, so that the devices make up whole ranks again."""
    return base.ranks_at_once // math.gcd(base.ranks_at_once, base.devices_per_engine)


def _interval(values: Sequence[float]) -> tuple[float, float]:
    """Of few values a percentile may lie on the other side of the first, which is the prediction."""
    return min(values[0], float(np.quantile(values, _LOW))), max(values[0], float(np.quantile(values, _HIGH)))
