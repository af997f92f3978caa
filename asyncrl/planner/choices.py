"""Simulates every choice of options and recommends one.

The fastest choice is not always the best one, because staleness slows learning. `recommend` takes the choice with the
smallest lag among the choices that are as fast as the fastest one and train on the same batch size.
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
from asyncrl.planner.simulator import Outcome, simulate
from buffer.config import OnStale

NUM_REPLICATES = 8
"""Number of simulations for the interval of one choice, each with resampled response lengths."""
AS_FAST = 0.02
"""A choice counts as fast as the fastest one if its step time is at most this share longer."""
_LOW, _HIGH = 0.05, 0.95


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The values that a plan tries; an empty list keeps the value of the scenario.

    Attributes:
        splits: Pairs (number of engines, number of ranks). Example: ``[(6, 2), (4, 4)]``.
        max_lag: Staleness bounds.
        groups_per_step: Batch sizes in prompt groups.
        publish_every: Learner steps between two published versions.
        on_stale: What the buffer does with a straggler at its deadline.
    """

    splits: Sequence[tuple[int, int]] = ()
    max_lag: Sequence[int] = (0, 1, 2, 4)
    groups_per_step: Sequence[int] = ()
    publish_every: Sequence[int] = (1, 2)
    on_stale: Sequence[OnStale] = (OnStale.wait, OnStale.requeue)

    def of(self, base: Scenario) -> Iterator[Scenario]:
        """Every valid choice, including the scenario itself."""
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
    """The predicted result of a choice.

    Attributes:
        scenario: The choice.
        outcome: The result with the scenario's own response lengths.
        step_s: 5th and 95th percentile of the step time over resampled lengths, widened to include ``outcome.step_s``.
        lag_mean: The same interval for the mean lag.
    """

    scenario: Scenario
    outcome: Outcome
    step_s: tuple[float, float]
    lag_mean: tuple[float, float]

    @property
    def groups_per_s(self) -> float:
        """Trained prompt groups per second. Use it to compare choices with different batch sizes."""
        return self.scenario.groups_per_step / self.outcome.step_s

    def to_dict(self, base: Scenario) -> dict[str, Any]:
        """The prediction as plain values for JSON."""
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
    """All predictions and the recommended one.

    Attributes:
        base: The scenario with the present options.
        predictions: One prediction per choice; the first one is for ``base``.
        recommended: The recommended prediction.
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
        """Step time over mean lag for a chart: one curve per split, one point per bound, other options unchanged."""
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
        """The plan as plain values for ``plan.json`` and the report."""
        return {
            "curves": self.curves(),
            "scenario": self.base.to_dict(),
            "notes": list(self.notes),
            "current": self.current.to_dict(self.base),
            "recommended": self.recommended.to_dict(self.base),
            "predictions": [prediction.to_dict(self.base) for prediction in self.predictions],
        }


def predict(scenario: Scenario, *, replicates: int = NUM_REPLICATES, seed: int = 0) -> Prediction:
    """Simulate one choice, and repeat it with resampled lengths for the intervals.

    Raises:
        ReplayBufferError: the buffer refuses a request, as it would in a real run.
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
    """Predict every choice; compute intervals only for the base and the fastest choices.

    The plan leaves out a choice that cannot run. Before each simulation, ``on_progress`` gets a description of it.

    Raises:
        ReplayBufferError: the base cannot run.
    """
    on_progress(f"the present options, {replicates} times")
    current = predict(base, replicates=replicates, seed=seed)
    found = [current]
    others = [scenario for scenario in choices.of(base) if scenario != base]
    for number, scenario in enumerate(others, start=1):
        on_progress(f"choice {number} of {len(others)}")
        with suppress(ReplayBufferError):  # the choice cannot run, for example because a batch does not fit
            found.append(predict(scenario, replicates=1, seed=seed))
    fast = [one for one in _as_fast(found) if one is not current]
    for number, one in enumerate(fast, start=1):
        on_progress(f"fast choice {number} of {len(fast)}, {replicates} times")
        found[found.index(one)] = predict(one.scenario, replicates=replicates, seed=seed)
    return RunPlan(base=base, predictions=found, recommended=recommend(found), notes=notes)


def recommend(predictions: Sequence[Prediction]) -> Prediction:
    """The prediction with the smallest lag among those that are as fast as the fastest one.

    The first prediction is for the present options; it wins a tie. Other choices compete only if they train on the same
    batch size, use at most as many devices and do not drop prompts. Another batch size and dropped prompts change what
    the model learns, and the simulation cannot predict that.
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
    """Ways to divide the devices between engines and ranks, including the present way."""
    total, size = base.num_devices, base.devices_per_engine
    candidates = ((engines, total - engines * size) for engines in range(1, (total - 1) // size + 1))
    possible = [split for split in candidates if can_have_ranks(base, split[1])]
    if len(possible) > 9:  # nine points show the shape of the curve
        possible = [possible[round(place * (len(possible) - 1) / 8)] for place in range(9)]
    return sorted({*possible, (base.num_engines, base.num_ranks)})


def can_have_ranks(base: Scenario, num_ranks: int) -> bool:
    """Whether a run with the options of ``base`` can start with this number of ranks."""
    return 1 <= num_ranks <= base.groups_per_step and num_ranks % base.ranks_at_once == 0


def engines_at_once(base: Scenario) -> int:
    """Smallest number of engines to add or remove so that the number of ranks stays a multiple of ``ranks_at_once``."""
    return base.ranks_at_once // math.gcd(base.ranks_at_once, base.devices_per_engine)


def _interval(values: Sequence[float]) -> tuple[float, float]:
    """5th and 95th percentile, widened to include the first value: with few values it may be outside."""
    return min(values[0], float(np.quantile(values, _LOW))), max(values[0], float(np.quantile(values, _HIGH)))
