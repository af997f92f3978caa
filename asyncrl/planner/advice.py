"""One line of advice: the change of one option that the replay of a run predicts to pay most, or none.

Removing one cause of waiting exposes the next, so nothing is added up here: each change is simulated whole. Advice is
silent while something is broken, and where the replay does not reproduce what was measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from asyncrl.core.errors import ReplayBufferError
from asyncrl.planner.choices import Prediction, can_have_ranks, engines_at_once, predict
from asyncrl.planner.scenario import Scenario, overrides
from asyncrl.profile.run_advice import Advice

MIN_GAIN = 0.03
"""A predicted gain below this share of the step time is not worth a change."""
MAX_REPLAY_ERROR = 0.2
"""A replay that misses the measured step time by more than this share says nothing about changes either."""
_REPLICATES = 3


@dataclass(frozen=True, kw_only=True)
class Health:
    """What must be 0 for advice to be given: a broken run has nothing to be tuned.

    Attributes:
        num_errors: Failed attempts and failed publishes.
        num_fenced: Engines that are down.
        num_dropped: Records lost, so that the replay would not know the run.
    """

    num_errors: int = 0
    num_fenced: int = 0
    num_dropped: int = 0

    @property
    def is_sound(self) -> bool:
        """Whether nothing is broken."""
        return not (self.num_errors or self.num_fenced or self.num_dropped)


def advise(
    scenario: Scenario, *, measured_step_s: float, health: Health, seed: int = 0, keep_split: bool = False
) -> Advice | None:
    """The best single change, or None.

    Args:
        scenario: The run, as `asyncrl.planner.calibration` read it.
        measured_step_s: What it took per step.
        health: Whether it is sound.
        seed: Of the lengths.
        keep_split: Share the devices out between engines and ranks as they are.
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
    if best is None or best.outcome.step_s > measured_step_s * (1 - MIN_GAIN):  # it gains less than the replay misses
        return None
    return Advice(
        change=" ".join(overrides(best.scenario, scenario)),
        why=_reason(now),
        predicted_step_s=best.outcome.step_s,
        interval=best.step_s,
        predicted_lag=best.outcome.lag_mean,
    )


def misses(replayed: Prediction, measured_step_s: float) -> bool:
    """Whether a replay is too far from the run to say anything about changes."""
    return abs(replayed.outcome.step_s / measured_step_s - 1) > MAX_REPLAY_ERROR


def _changes(scenario: Scenario) -> Iterator[Scenario]:
    """One option at a time, to a neighbouring value, on the same devices."""
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
    """The prediction, where it is faster by more than chance and `MIN_GAIN`; its interval only where it may be."""
    try:
        if predict(changed, replicates=1, seed=seed).outcome.step_s >= now.outcome.step_s * (1 - MIN_GAIN):
            return None
        found = predict(changed, replicates=_REPLICATES, seed=seed)
    except ReplayBufferError:  # it could not run
        return None
    return found if found.step_s[1] < now.step_s[0] else None


_REASONS = {
    "batch_tail": "the ranks wait for the last groups of a batch while nothing else may run",
    "publish": "the ranks wait for weights on their way to the engines",
    "slow_generation": "the ranks wait for generation",
    "staleness_gate": "the engines wait for admission",
    "buffer_full": "the engines wait for room in the buffer",
    "publish_pause": "the engines stand still for weights",
    "re_prefill": "the engines compute KV caches again after each update",
    "reward": "finished groups hold their places while they are scored",
    "lease": "the engines wait to be given work",
}


def _reason(now: Prediction) -> str:
    """The largest cause of idle time, of whichever pool stands still more."""
    idle = max((now.outcome.learner_idle, now.outcome.fleet_idle), key=lambda causes: sum(causes.values()))
    cause = max(idle, key=lambda name: idle[name])
    return f"{_REASONS[cause]} ({idle[cause]:.0%} of the time)"
