"""Finds one line of advice: the change of one option with the largest predicted gain, or none.

Removing one cause of waiting exposes the next one. Therefore the planner does not add up idle times; it simulates the
whole run for each change. There is no advice if the run has faults, or if the replay does not match the measured run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from asyncrl.core.errors import ReplayBufferError
from asyncrl.planner.choices import Prediction, can_have_ranks, engines_at_once, predict
from asyncrl.planner.scenario import Scenario, overrides
from asyncrl.profile.report import Advice

MIN_GAIN = 0.03
"""Smallest predicted gain that is worth a change, as a share of the step time."""
MAX_REPLAY_ERROR = 0.2
"""Largest error of the replay, as a share of the measured step time. There is no advice above it."""
_REPLICATES = 3


@dataclass(frozen=True, kw_only=True)
class Health:
    """The faults of a run. There is advice only if all counts are 0: repair a run before you tune it.

    Attributes:
        num_errors: Number of failed attempts and failed publishes.
        num_fenced: Number of engines that are down.
        num_dropped: Number of lost records. The replay of an incomplete record is not reliable.
    """

    num_errors: int = 0
    num_fenced: int = 0
    num_dropped: int = 0

    @property
    def is_sound(self) -> bool:
        """Whether the run has no faults."""
        return not (self.num_errors or self.num_fenced or self.num_dropped)


def advise(
    scenario: Scenario, *, measured_step_s: float, health: Health, seed: int = 0, keep_split: bool = False
) -> Advice | None:
    """Find the best change of one option; return None if no change is good enough.

    Args:
        scenario: The run, from `asyncrl.planner.calibration`.
        measured_step_s: Measured seconds per step.
        health: The faults of the run.
        seed: Seed of the response lengths.
        keep_split: Keep the numbers of engines and ranks.
    """
    if not health.is_sound:
        return None
    now = predict(scenario, replicates=_REPLICATES, seed=seed)
    if misses(now, measured_step_s):
        return None
    changes = (
        changed for changed in _changes(scenario) if not (keep_split and changed.num_ranks != scenario.num_ranks)
    )
    paying = [found for changed in changes if (found := _paying(changed, now, seed)) is not None]
    best = min(paying, key=lambda found: found.outcome.step_s, default=None)
    if best is None or best.outcome.step_s > measured_step_s * (1 - MIN_GAIN):  # the replay error exceeds the gain
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
    """Whether the replay differs too much from the run to predict changes."""
    return abs(replayed.outcome.step_s / measured_step_s - 1) > MAX_REPLAY_ERROR


def _changes(scenario: Scenario) -> Iterator[Scenario]:
    """Change one option at a time to a neighboring value, on the same devices."""
    for max_lag in {scenario.max_lag + 1, max(2, 2 * scenario.max_lag)}:
        yield replace(scenario, max_lag=max_lag)
    for groups in {scenario.groups_in_flight // 2, scenario.groups_in_flight * 2} - {0}:
        yield replace(scenario, groups_in_flight=groups)
    if scenario.publish_every <= scenario.max_lag:
        yield replace(scenario, publish_every=scenario.publish_every + 1)
    if scenario.publish_every > 1:
        yield replace(scenario, publish_every=scenario.publish_every - 1)
    for engines in (scenario.num_engines - engines_at_once(scenario), scenario.num_engines + engines_at_once(scenario)):
        ranks = scenario.num_devices - engines * scenario.devices_per_engine
        if engines >= 1 and can_have_ranks(scenario, ranks):
            yield replace(scenario, num_engines=engines, num_ranks=ranks)


def _paying(changed: Scenario, now: Prediction, seed: int) -> Prediction | None:
    """The prediction if it gains more than `MIN_GAIN` and more than chance; None otherwise.

    The first simulation decides whether the simulations for the interval are worthwhile.
    """
    try:
        if predict(changed, replicates=1, seed=seed).outcome.step_s >= now.outcome.step_s * (1 - MIN_GAIN):
            return None
        found = predict(changed, replicates=_REPLICATES, seed=seed)
    except ReplayBufferError:  # the changed run is not possible
        return None
    return found if found.step_s[1] < now.step_s[0] else None


_REASONS = {
    "batch_tail": "the ranks wait for the last groups of a batch, and the engines may not start others",
    "publish": "the ranks wait until the engines have the new weights",
    "slow_generation": "the ranks wait for generation",
    "staleness_gate": "the engines wait for admission",
    "buffer_full": "the engines wait for room in the buffer",
    "publish_pause": "the engines pause to load weights",
    "re_prefill": "the engines recompute KV caches after each update",
    "reward": "finished groups occupy their places while they are scored",
    "lease": "the engines wait for leases",
}
