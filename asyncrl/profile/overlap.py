"""Computes how well generation and training overlapped, per step and for the run (``overlap.json``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Self

from asyncrl.core.record import GroupEvent, Pool
from asyncrl.profile.attribution import Attribution, PoolTime
from asyncrl.profile.trace import StepWindow, Trace

POOLS = (Pool.learner.value, Pool.fleet.value)
_S = 1e-9


@dataclass(frozen=True, kw_only=True)
class LagSplit:
    """Mean lag of a step's groups in learner steps, split into the lag before storage and the lag in the queue."""

    mean: float = 0.0
    before_queue: float = 0.0
    in_queue: float = 0.0

    def to_dict(self) -> dict[str, float]:
        """The fields as plain values."""
        return {"mean": self.mean, "before_queue": self.before_queue, "in_queue": self.in_queue}


@dataclass(frozen=True, kw_only=True)
class Figures:
    """How one step, or all steps of the run, used its time.

    Attributes:
        duration: Nanoseconds from start to end.
        num_steps: Number of learner steps.
        pools: The time of the places of each pool, ``learner`` and ``fleet``.
        num_lanes: Number of ranks or engines of each pool.
        lag: Lag of the trained groups.
    """

    duration: int
    num_steps: int
    pools: Mapping[str, PoolTime]
    num_lanes: Mapping[str, int]
    lag: LagSplit

    @property
    def step_s(self) -> float:
        """Measured seconds per step."""
        return self.duration * _S / self.num_steps if self.num_steps else 0.0

    def alone_s(self, pool: str) -> float:
        """Seconds per step that a pool needs alone (`PoolTime.alone`)."""
        return self.pools[pool].alone(pool, self.duration) * _S / self.num_steps if self.num_steps else 0.0

    @property
    def ideal_step_s(self) -> float:
        """Seconds per step of the slower pool alone. Perfect overlap reaches this value."""
        return max(self.alone_s(pool) for pool in POOLS)

    @property
    def efficiency(self) -> float:
        """Ideal seconds per step divided by measured seconds per step; 1 is perfect overlap."""
        return self.ideal_step_s / self.step_s if self.duration else 0.0

    @property
    def utilisation(self) -> float:
        """Busy share of both pools, weighted by their number of ranks or engines."""
        num_lanes = sum(self.num_lanes.values())
        weighted = sum(self.pools[pool].utilisation * self.num_lanes[pool] for pool in POOLS)
        return weighted / num_lanes if num_lanes else 0.0

    def idle_s(self, pool: str) -> dict[str, float]:
        """Idle seconds of the pool's average place by cause, largest first."""
        time = self.pools[pool]
        return {c: self.duration * _S * total / time.capacity for c, total in time.idle.items()}

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain values. The integers are nanoseconds times places and add up exactly."""
        return {
            "num_steps": self.num_steps,
            "duration_s": self.duration * _S,
            "step_s": self.step_s,
            "ideal_step_s": self.ideal_step_s,
            "efficiency": self.efficiency,
            "utilisation": self.utilisation,
            "lag": self.lag.to_dict(),
            **{pool: self._pool(pool) for pool in POOLS},
        }

    def flat(self) -> dict[str, float]:
        """The figures of a step under dotted names. Example: ``learner.idle_s.fetch``."""
        found = {"step_s": self.step_s, "ideal_step_s": self.ideal_step_s, "utilisation": self.utilisation}
        found |= {f"lag.{name}": value for name, value in self.lag.to_dict().items()}
        for pool in POOLS:
            found[f"{pool}.utilisation"] = self.pools[pool].utilisation
            found |= {f"{pool}.idle_s.{cause}": seconds for cause, seconds in self.idle_s(pool).items()}
        return found

    def _pool(self, pool: str) -> dict[str, Any]:
        time = self.pools[pool]
        return {
            "lanes": self.num_lanes[pool],
            "utilisation": time.utilisation,
            "alone_s": self.alone_s(pool),
            "idle_s": self.idle_s(pool),
            "capacity_ns": time.capacity,
            "busy_ns": time.busy,
            "idle_ns": dict(time.idle),
        }


@dataclass(frozen=True, kw_only=True)
class OverlapReport:
    """The figures of a run and of its finished steps. The figures of the steps add up to the figures of the run.

    Attributes:
        run: Figures from the start of the first step to the end of the last finished step.
        steps: Version and figures of each step, in order of time. The version of a repeated step appears twice.
        attribution: The idle time behind the figures.
        recorded: How complete the record is.
    """

    run: Figures
    steps: Sequence[tuple[int, Figures]]
    attribution: Attribution
    recorded: Mapping[str, Any]

    @classmethod
    def of(cls, trace: Trace) -> Self:
        """Compute the report of the record so far."""
        attribution = Attribution.of(trace)
        steps = [step for step in trace.steps if not step.is_open]
        lags = _lags(trace, steps)
        per_step = {pool: attribution.per_step(pool, steps) for pool in POOLS}
        num_lanes = {pool: attribution.num_lanes(pool) for pool in POOLS}
        figures = [
            Figures(
                duration=step.duration,
                num_steps=1,
                pools={pool: per_step[pool][index] for pool in POOLS},
                num_lanes=num_lanes,
                lag=_mean_lag(lags[step.version]),
            )
            for index, step in enumerate(steps)
        ]
        run = Figures(
            duration=attribution.window[1] - attribution.window[0],
            num_steps=len(steps),
            pools={pool: attribution.total(pool) for pool in POOLS},
            num_lanes=num_lanes,
            lag=_mean_lag(lag for of_step in lags.values() for lag in of_step),
        )
        versions = [step.version for step in steps]
        by_time = tuple(zip(versions, figures, strict=True))
        return cls(run=run, steps=by_time, attribution=attribution, recorded=_recorded(trace))

    def to_dict(self) -> dict[str, Any]:
        """The content of ``overlap.json``."""
        steps = [{"step": version, **figures.to_dict()} for version, figures in self.steps]
        return {"run": self.run.to_dict(), "steps": steps, "recorded": dict(self.recorded)}

    def summary(self) -> dict[str, Any]:
        """The part for ``summary.json``; idle seconds are those of an average place over the whole run."""
        run = self.run
        return {
            "step_s": run.step_s,
            "ideal_step_s": run.ideal_step_s,
            "efficiency": run.efficiency,
            "utilisation": {"both": run.utilisation, **{pool: run.pools[pool].utilisation for pool in POOLS}},
            "idle_s": {pool: run.idle_s(pool) for pool in POOLS},
            "lag": run.lag.to_dict(),
        }


def _lags(trace: Trace, steps: Iterable[StepWindow]) -> dict[int, list[tuple[int, int, int]]]:
    """(lag before the queue, lag in the queue, whole lag) of each step's groups, by version.

    Groups that a process of an earlier run stored are left out.
    """
    found: dict[int, list[tuple[int, int, int]]] = {step.version: [] for step in steps}
    for group in trace.groups.values():
        if group.step in found and group.last(GroupEvent.stored) is not None:
            found[group.step].append((group.lag_before_queue, group.lag_in_queue, group.lag))
    return found


def _mean_lag(lags: Iterable[tuple[int, int, int]]) -> LagSplit:
    rows = list(lags)
    if not rows:
        return LagSplit()
    before, after, whole = (fmean(column) for column in zip(*rows, strict=True))
    return LagSplit(mean=whole, before_queue=before, in_queue=after)


def _recorded(trace: Trace) -> dict[str, Any]:
    """How much of the run was recorded, and the largest error of the clocks."""
    kinds = Counter(process.pool for process in trace.processes)
    return {
        "processes": dict(kinds),
        "dropped_records": trace.num_dropped,
        "torn_files": sum(not process.is_whole for process in trace.processes),
        "clock_error_ns": max((process.error_ns for process in trace.processes), default=0),
    }
