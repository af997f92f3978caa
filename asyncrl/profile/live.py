"""Computes the use of the pools of a running run from its record, which `LiveUse` reads incrementally."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace
from pathlib import Path

from asyncrl.core.record import Pool
from asyncrl.metrics import BUSY, PoolUse, RunUse
from asyncrl.profile.attribution import Attribution, PoolTime
from asyncrl.profile.trace import Trace, TraceReader

RECENT_STEPS = 10
_SECOND = 1_000_000_000


class LiveUse:
    """Adds up the finished steps of a run; each step is read once.

    Args:
        run_dir: The run's folder.
    """

    def __init__(self, run_dir: Path) -> None:
        self._reader = TraceReader(run_dir)
        self._upto: int | None = None
        self._busy: Counter[str] = Counter()
        self._idle: dict[str, Counter[str]] = {Pool.learner: Counter(), Pool.fleet: Counter()}
        self._recent: dict[str, deque[PoolTime]] = {pool: deque(maxlen=RECENT_STEPS) for pool in self._idle}
        self._capacity: dict[str, int] = {}

    def read(self) -> RunUse | None:
        """The use up to the last finished step, or None before the first. Raises the errors of `TraceReader.read`."""
        trace: Trace = self._reader.read()
        # Compare times, not versions: a learner that returns to a checkpoint repeats steps.
        new = [step for step in trace.steps if not step.is_open and (self._upto is None or step.end > self._upto)]
        if new:
            new[0] = replace(new[0], start=new[0].start if self._upto is None else self._upto)
            self._upto = new[-1].end
            attribution = Attribution.of(trace, (new[0].start, new[-1].end))
            for pool in self._idle:
                for window, time in zip(new, attribution.per_step(pool, new), strict=True):
                    self._recent[pool].append(time)
                    self._busy[pool] += time.busy
                    self._idle[pool].update(time.idle)
                    self._capacity[pool] = round(time.capacity / window.duration) if window.duration else 0
            self._reader.forget(before=new[-1].end)
        if self._upto is None:
            return None
        return RunUse(learner=self._use(Pool.learner), fleet=self._use(Pool.fleet))

    def _use(self, pool: str) -> PoolUse:
        recent: Counter[str] = Counter()
        for time in self._recent[pool]:
            recent.update(time.idle)
            recent[BUSY] += time.busy
        total = recent.total() or 1
        return PoolUse(
            name=pool,
            capacity=self._capacity[pool],
            busy_s=self._busy[pool] / _SECOND,
            idle_s={cause: time / _SECOND for cause, time in self._idle[pool].items()},
            recent={cause: time / total for cause, time in recent.items()},
        )
