"""Explains why learner ranks and engines were idle: divides their idle time among causes.

An engine has one *slot* for each sample that it may run at once. A learner rank is one slot. At any time, a slot is
either busy or idle, and an idle slot has exactly one cause. If several causes apply, the first one in the order of
docs/profiling.md is used. All sums are integers, in nanoseconds times slots.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from heapq import merge
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from asyncrl.core.record import LevelName, Pool, SpanKind
from asyncrl.metrics import BUSY, PoolUse, RunUse
from asyncrl.profile.trace import BUFFER_LANE, CONTROLLER_LANE, Span, StepWindow, Trace, TraceReader
from rollout_fleet.member import NOT_UP, MemberState

POOLS = (Pool.learner.value, Pool.fleet.value)
_S = 1e-9
_RECENT_STEPS = 10


class FleetCause(StrEnum):
    """Why an engine's slot (room for one sample) was idle. If several causes apply, the first listed is used."""

    engine_down = "engine_down"
    start = "start"
    released = "released"
    publish_pause = "publish_pause"
    re_prefill = "re_prefill"
    evaluation = "evaluation"
    reward = "reward"
    tool = "tool"
    environment = "environment"
    group_tail = "group_tail"
    no_prompts = "no_prompts"
    buffer_full = "buffer_full"
    staleness_gate = "staleness_gate"
    publish_wait = "publish_wait"
    lease = "lease"


class LearnerCause(StrEnum):
    """Why a learner rank was idle. If several causes apply, the first listed is used.

    For ``batch_tail`` and all later causes, the rank waits for a batch.
    """

    rank_down = "rank_down"
    checkpoint = "checkpoint"
    publish = "publish"
    offload = "offload"
    fetch = "fetch"
    rank_skew = "rank_skew"
    dispatch = "dispatch"
    evaluation = "evaluation"
    batch_tail = "batch_tail"
    slow_generation = "slow_generation"
    reward = "reward"
    tool = "tool"
    environment = "environment"
    engine_down = "engine_down"
    start = "start"
    no_prompts = "no_prompts"
    buffer_full = "buffer_full"
    staleness_gate = "staleness_gate"
    lease = "lease"


OWN_CAUSES: Mapping[str, frozenset[str]] = {
    Pool.learner: frozenset({LearnerCause.fetch, LearnerCause.rank_skew}),
    Pool.fleet: frozenset({FleetCause.reward, FleetCause.tool, FleetCause.environment, FleetCause.group_tail}),
}
"""For each pool, the causes of idle time that the pool would also have if it never waited for the other pool."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """A period in which the state of one rank, or of some sample slots of one engine, does not change.

    Attributes:
        lane: Name of the rank or engine in the record. Example: ``engine-0``.
        start: Nanoseconds.
        end: Nanoseconds.
        state: ``busy``, or a `FleetCause` or `LearnerCause`.
        places: Number of sample slots of the engine that have this state; 1 for a rank.
    """

    lane: str
    start: int
    end: int
    state: str
    places: int

    @property
    def total(self) -> int:
        """The length of the period in nanoseconds, multiplied by the number of slots that have this state."""
        return self.places * (self.end - self.start)


@dataclass(frozen=True, kw_only=True)
class PoolTime:
    """The busy and idle time of a pool (the learner's ranks, or the engines), in nanoseconds.

    Each time is a sum over all ranks, or over all sample slots of the engines.

    Attributes:
        capacity: The busy time plus all idle time.
        idle: A dict from cause to idle time, largest time first.
    """

    capacity: int = 0
    busy: int = 0
    idle: Mapping[str, int] = field(default_factory=dict)

    @property
    def utilisation(self) -> float:
        """Busy time divided by the sum of busy and idle time, from 0 to 1. The value is 0 if this sum is 0."""
        return self.busy / self.capacity if self.capacity else 0.0

    def alone(self, pool: str, duration: int) -> float:
        """Return how much of ``duration`` the pool ``pool`` would need if it never waited for the other pool.

        The pool needs its busy time and the idle time with a cause in `OWN_CAUSES`. It does not need other idle time.
        """
        own = self.busy + sum(self.idle.get(cause, 0) for cause in OWN_CAUSES[pool])
        return duration * own / self.capacity if self.capacity else 0.0


@dataclass(frozen=True, kw_only=True)
class Attribution:
    """The states of all ranks and sample slots of a run in a window of time.

    Attributes:
        window: Start and end, in nanoseconds.
        stretches: For each pool (``learner``, ``fleet``), periods that have one state each. They are sorted by rank or
            engine, then by time.
    """

    window: tuple[int, int]
    stretches: Mapping[str, tuple[Stretch, ...]]

    @classmethod
    def of(cls, trace: Trace, window: tuple[int, int] | None = None) -> Self:
        """Compute the state of every rank and engine in ``window``, a pair (start, end) in nanoseconds.

        The default window is the time of the finished steps.
        """
        window = trace.window if window is None else window
        fleet = _merged(_fleet_stretches(trace, window))
        learner = _merged(_learner_stretches(trace, window, fleet))
        return cls(window=window, stretches={Pool.learner.value: learner, Pool.fleet.value: fleet})

    def total(self, pool: str) -> PoolTime:
        """Return the busy and idle time of a pool (``learner`` or ``fleet``) in the whole window."""
        return _pool_time(self.stretches[pool])

    def per_step(self, pool: str, steps: Sequence[StepWindow]) -> list[PoolTime]:
        """Return the busy and idle time of a pool in each of ``steps``, which must be consecutive."""
        starts = [step.start for step in steps]
        parts: list[list[Stretch]] = [[] for _ in steps]
        for stretch in self.stretches[pool]:
            for index in range(max(0, bisect_right(starts, stretch.start) - 1), len(steps)):
                step = steps[index]
                if step.start >= stretch.end:
                    break
                start, end = max(stretch.start, step.start), min(stretch.end, step.end)
                if start < end:
                    parts[index].append(replace(stretch, start=start, end=end))
        return [_pool_time(part) for part in parts]

    def num_lanes(self, pool: str) -> int:
        """Return the number of engines or ranks of a pool that existed in the window."""
        return len({stretch.lane for stretch in self.stretches[pool]})


class Series:
    """The values of an integer over time. The integer is 0 before its first change."""

    def __init__(self, changes: Iterable[tuple[int, int]] = ()) -> None:
        """Take (time, new value) pairs in any order. If several pairs have the same time, the last one is used."""
        self.changes = sorted(changes, key=lambda change: change[0])

    @classmethod
    def covering(cls, intervals: Iterable[tuple[int, int]]) -> Self:
        """Return a series whose value at each time is the number of intervals that contain this time.

        An interval is a pair (start, end).
        """
        deltas: Counter[int] = Counter()
        for start, end in intervals:
            deltas[start] += 1
            deltas[end] -= 1
        return cls(_summed(deltas))

    def flag(self) -> Series:
        """Return a series that is 0 at all times at which this series is 0, and 1 at all other times."""
        flags = [(time, int(value != 0)) for time, value in self.changes]
        kept = [change for before, change in pairwise([(0, 0), *flags]) if before[1] != change[1]]
        return Series(kept)

    def at(self, time: int) -> int:
        """Return the value of the series at a time; 0 before the first change."""
        index = bisect_right(self.changes, time, key=lambda change: change[0])
        return self.changes[index - 1][1] if index else 0


def swept(window: tuple[int, int], series: Mapping[str, Series]) -> Iterator[tuple[int, int, dict[str, int]]]:
    """Split ``window``, a pair (start, end), at each time at which one of the series changes.

    Yield a triple (start, end, values) per interval. The dict ``values`` maps the name of each series to its value in
    the interval. All triples share one dict, which the generator changes in place.
    """
    start, end = window

    def changes_within(name: str, one: Series) -> Iterator[tuple[int, str, int]]:
        first = bisect_right(one.changes, window[0], key=lambda change: change[0])
        for time, value in one.changes[first:]:
            if time >= window[1]:
                return
            yield time, name, value

    values = {name: one.at(start) for name, one in series.items()}
    changes = merge(*(changes_within(name, one) for name, one in series.items()))
    for time, name, value in changes:
        if time > start:
            yield start, time, values
            start = time
        values[name] = value
    if start < end:
        yield start, end, values


# Fleet

_ENGINE_LEVELS = (
    *(LevelName.capacity, LevelName.running, LevelName.tail, LevelName.settling, LevelName.parked, LevelName.version),
    *(LevelName.tool, LevelName.environment),
)
_ENGINE_SPANS = (
    *(SpanKind.down, SpanKind.start, SpanKind.released, SpanKind.pause, SpanKind.re_prefill, SpanKind.evaluation),
)
_WHOLE_ENGINE = (
    (SpanKind.down, FleetCause.engine_down),
    (SpanKind.start, FleetCause.start),
    (SpanKind.released, FleetCause.released),
    (SpanKind.pause, FleetCause.publish_pause),
)


def _fleet_stretches(trace: Trace, window: tuple[int, int]) -> Iterator[Stretch]:
    flags = (LevelName.queued, LevelName.full, LevelName.budget)
    buffer = {f"buffer.{name}": _level(trace, name, BUFFER_LANE).flag() for name in flags}
    buffer["buffer.version"] = _level(trace, LevelName.version, BUFFER_LANE)
    for lane in trace.lanes(Pool.fleet):
        spans: dict[str, list[tuple[int, int]]] = {
            kind: [*_edges(trace.spans_of(kind, lane))] for kind in _ENGINE_SPANS
        }
        members = trace.spans_of(SpanKind.member, f"{lane}/worker")
        spans[SpanKind.down] += [*_gaps(trace, lane), *_edges(span for span in members if span.cause in NOT_UP)]
        spans[MemberState.left] = [*_edges(span for span in members if span.cause == MemberState.left)]
        series = {f"span.{kind}": Series.covering(edges) for kind, edges in spans.items()}
        series |= {str(name): _level(trace, name, lane) for name in _ENGINE_LEVELS}
        for start, end, now in swept(window, {**series, **buffer}):
            for state, places in _engine_states(now):
                yield Stretch(lane=lane, start=start, end=end, state=str(state), places=places)


def _engine_states(now: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """Yield pairs: a state (busy, or a cause of idle time), and how many slots of the engine have this state.

    A slot is the capacity for one sample. The numbers of slots sum to the engine's capacity, or to 0 after the engine
    has left the fleet.
    """
    left = 0 if now[f"span.{MemberState.left}"] else now[LevelName.capacity]
    for kind, cause in _WHOLE_ENGINE:
        if now[f"span.{kind}"]:
            yield cause, left
            return
    if not now["buffer.queued"]:
        why_free = FleetCause.no_prompts
    elif now["buffer.full"]:
        why_free = FleetCause.buffer_full
    elif not now["buffer.budget"]:
        why_free = FleetCause.staleness_gate
    else:
        has_newest = now[LevelName.version] >= now["buffer.version"]
        why_free = FleetCause.lease if has_newest else FleetCause.publish_wait
    held = (
        (FleetCause.re_prefill if now[f"span.{SpanKind.re_prefill}"] else BUSY, now[LevelName.running]),
        (FleetCause.evaluation, left if now[f"span.{SpanKind.evaluation}"] else 0),
        (FleetCause.reward, now[LevelName.settling]),
        (FleetCause.publish_pause, now[LevelName.parked]),
        (FleetCause.tool, now[LevelName.tool]),
        (FleetCause.environment, now[LevelName.environment]),
        (FleetCause.group_tail, now[LevelName.tail]),
        (why_free, left),
    )
    for state, wanted in held:
        if places := min(left, max(0, wanted)):
            left -= places
            yield state, places


# Learner

_WORK = (SpanKind.update, SpanKind.score)
_BLOCKED = (
    (SpanKind.checkpoint, LearnerCause.checkpoint),
    (SpanKind.publish_copy, LearnerCause.publish),
    (SpanKind.offload, LearnerCause.offload),
    (SpanKind.fetch, LearnerCause.fetch),
    (SpanKind.wait_ranks, LearnerCause.rank_skew),
)
_WAITS_FOR = (
    (FleetCause.evaluation, LearnerCause.evaluation),
    (FleetCause.publish_pause, LearnerCause.publish),
    (FleetCause.re_prefill, LearnerCause.publish),
    (FleetCause.publish_wait, LearnerCause.publish),
    (FleetCause.reward, LearnerCause.reward),
    (FleetCause.tool, LearnerCause.tool),
    (FleetCause.environment, LearnerCause.environment),
    (FleetCause.engine_down, LearnerCause.engine_down),
    (FleetCause.start, LearnerCause.start),
    (FleetCause.no_prompts, LearnerCause.no_prompts),
    (FleetCause.buffer_full, LearnerCause.buffer_full),
    (FleetCause.staleness_gate, LearnerCause.staleness_gate),
    (FleetCause.lease, LearnerCause.lease),
)


def _learner_stretches(trace: Trace, window: tuple[int, int], fleet: Sequence[Stretch]) -> Iterator[Stretch]:
    shared = {
        "working": Series.covering(edge for kind in _WORK for edge in _edges(trace.spans_of(kind))),
        "dispatched": Series.covering(_edges(trace.spans_of(SpanKind.dispatched))),
        "plan_wait": Series.covering(_edges(trace.spans_of(SpanKind.plan_wait))),
        "no_batch": _no_batch(trace, window, fleet),
    }
    for kind in (SpanKind.evaluation, SpanKind.checkpoint):
        own = [span for span in trace.spans_of(kind) if span.lane.partition("/")[0] == CONTROLLER_LANE]
        shared[kind.value] = Series.covering(_edges(own))
    causes = list(LearnerCause)
    for lane in trace.lanes(Pool.learner):
        series = {f"span.{kind}": Series.covering(_edges(trace.spans_of(kind, lane))) for kind, _ in _BLOCKED}
        series["work"] = Series.covering(edge for kind in _WORK for edge in _edges(trace.spans_of(kind, lane)))
        series["down"] = Series.covering(_gaps(trace, lane))
        for start, end, now in swept(window, {**shared, **series}):
            state = _rank_state(now) or causes[now["no_batch"]]
            yield Stretch(lane=lane, start=start, end=end, state=str(state), places=1)


def _rank_state(now: Mapping[str, int]) -> str | None:
    """Return the state of a rank; None if the rank waits for a batch."""
    if now["down"]:
        return LearnerCause.rank_down
    for kind, cause in _BLOCKED:
        if now[f"span.{kind}"]:
            return cause
    if now["work"]:
        return BUSY
    if now["working"]:
        return LearnerCause.rank_skew
    if now["dispatched"]:
        return LearnerCause.dispatch
    if now["plan_wait"]:
        return None
    found = (cause for cause in (LearnerCause.checkpoint, LearnerCause.evaluation) if now[cause])
    return next(found, LearnerCause.dispatch)


def _no_batch(trace: Trace, window: tuple[int, int], fleet: Sequence[Stretch]) -> Series:
    """Return a series over time: the cause why the learner has no batch, as an index into `LearnerCause`.

    The cause is ``batch_tail`` if two conditions hold:

    - The engines generate samples, but at most half of the largest number since the current learner step began.
    - The staleness bound keeps some sample slots of the engines idle.
    """
    deltas: dict[str, Counter[int]] = defaultdict(Counter)
    for stretch in fleet:
        deltas[stretch.state][stretch.start] += stretch.places
        deltas[stretch.state][stretch.end] -= stretch.places
    totals = {state: Series(_summed(changes)) for state, changes in deltas.items()}
    steps = Series((step.start, index) for index, step in enumerate(trace.steps))
    changes, causes, peak, step = [], list(LearnerCause), 0, -1
    for start, _, now in swept(window, {**totals, "step": steps}):
        running = now.get(BUSY, 0)
        peak = max(peak, running) if now["step"] == step else running
        step = now["step"]
        if running:
            is_tail = now.get(FleetCause.staleness_gate, 0) > 0 and 2 * running <= peak
            cause = LearnerCause.batch_tail if is_tail else LearnerCause.slow_generation
        else:
            waits = (cause for state, cause in _WAITS_FOR if now.get(state, 0))
            cause = next(waits, LearnerCause.dispatch)
        changes.append((start, causes.index(cause)))
    return Series(changes)


# Functions for `Span`, `Level` and `Stretch`


def _edges(spans: Iterable[Span]) -> Iterator[tuple[int, int]]:
    return ((span.start, span.end) for span in spans if span.start < span.end)


def _level(trace: Trace, name: str, lane: str) -> Series:
    return Series((level.time, level.value) for level in trace.levels_of(name, lane))


def _gaps(trace: Trace, lane: str) -> list[tuple[int, int]]:
    pairs = pairwise(trace.processes_of(lane))
    return [(left.end, right.start) for left, right in pairs if left.end < right.start]


def _summed(deltas: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    value = 0
    for time in sorted(deltas):
        if deltas[time]:
            value += deltas[time]
            yield time, value


def _merged(stretches: Iterable[Stretch]) -> tuple[Stretch, ...]:
    """Join periods that follow each other and differ only in time. Sort the result by rank or engine, then by start."""
    found: list[Stretch] = []
    last: dict[tuple[str, str, int], int] = {}
    for stretch in stretches:
        key = stretch.lane, stretch.state, stretch.places
        place = last.get(key)
        if place is not None and found[place].end == stretch.start:
            found[place] = replace(found[place], end=stretch.end)
        else:
            last[key] = len(found)
            found.append(stretch)
    return tuple(sorted(found, key=lambda stretch: (stretch.lane, stretch.start)))


def _pool_time(stretches: Iterable[Stretch]) -> PoolTime:
    counts: Counter[str] = Counter()
    for stretch in stretches:
        counts[stretch.state] += stretch.total
    idle = {state: total for state, total in counts.most_common() if state != BUSY and total}
    return PoolTime(capacity=counts.total(), busy=counts[BUSY], idle=idle)


# The report of a run


@dataclass(frozen=True)
class LagSplit:
    """Mean lag of the trained groups, in learner steps.

    Attributes:
        mean: The whole lag, which is the sum of the two other values.
        before_queue: The part of the lag that arose before the buffer stored the group.
        in_queue: The part of the lag that arose while the stored group waited for its training.
    """

    mean: float = 0.0
    before_queue: float = 0.0
    in_queue: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Figures:
    """How the learner and the fleet used the time of one step, or of all steps of the run.

    Attributes:
        duration: Nanoseconds from start to end.
        pools: Busy and idle time of each pool, ``learner`` and ``fleet``.
        num_lanes: Number of ranks or engines of each pool.
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
        """Return the seconds per step that a pool would need if it never waited for the other pool."""
        return self.pools[pool].alone(pool, self.duration) * _S / self.num_steps if self.num_steps else 0.0

    @property
    def ideal_step_s(self) -> float:
        """Seconds per step if the slower pool never waited for the other pool, as with perfect overlap."""
        return max(self.alone_s(pool) for pool in POOLS)

    @property
    def efficiency(self) -> float:
        """Ideal seconds per step divided by measured seconds per step. 1 is perfect overlap."""
        return self.ideal_step_s / self.step_s if self.duration else 0.0

    @property
    def utilisation(self) -> float:
        """Mean fraction of time, from 0 to 1, in which ranks and engines were busy.

        This is the mean of `PoolTime.utilisation` over both pools, weighted by the number of ranks or engines.
        """
        num_lanes = sum(self.num_lanes.values())
        weighted = sum(self.pools[pool].utilisation * self.num_lanes[pool] for pool in POOLS)
        return weighted / num_lanes if num_lanes else 0.0

    def idle_s(self, pool: str) -> dict[str, float]:
        """Return a dict from each cause to its idle seconds, largest first.

        The seconds are a mean over all ranks, or over all sample slots of the engines.
        """
        time = self.pools[pool]
        return {c: self.duration * _S * total / time.capacity for c, total in time.idle.items()}

    def to_dict(self) -> dict[str, Any]:
        """Return the measured numbers as nested dicts for JSON.

        Values whose names end in ``_ns`` are sums over all ranks, or over all sample slots of the engines.
        """
        pools = {
            pool: {
                "lanes": self.num_lanes[pool],
                "utilisation": time.utilisation,
                "alone_s": self.alone_s(pool),
                "idle_s": self.idle_s(pool),
                "capacity_ns": time.capacity,
                "busy_ns": time.busy,
                "idle_ns": dict(time.idle),
            }
            for pool, time in self.pools.items()
        }
        figures = {name: getattr(self, name) for name in ("step_s", "ideal_step_s", "efficiency", "utilisation")}
        head = {"num_steps": self.num_steps, "duration_s": self.duration * _S}
        return {**head, **figures, "lag": asdict(self.lag), **pools}

    def flat(self) -> dict[str, float]:
        """Return the main numbers as a dict. Its keys are dotted names. Example: ``learner.idle_s.fetch``."""
        found = {"step_s": self.step_s, "ideal_step_s": self.ideal_step_s, "utilisation": self.utilisation}
        found |= {f"lag.{name}": value for name, value in asdict(self.lag).items()}
        for pool in POOLS:
            found[f"{pool}.utilisation"] = self.pools[pool].utilisation
            found |= {f"{pool}.idle_s.{cause}": seconds for cause, seconds in self.idle_s(pool).items()}
        return found


@dataclass(frozen=True, kw_only=True)
class OverlapReport:
    """How far generation and training overlapped in a run, for the file ``overlap.json``.

    Attributes:
        run: Times and lag from the start of the first step to the end of the last finished step.
        steps: Policy version, times and lag of each step, in order of time. A repeated step appears twice.
        recorded: Facts about the record: ``processes`` (number per pool), ``dropped_records`` (number of lost records),
            ``torn_files`` (number of damaged files), ``clock_error_ns`` (largest clock error of a process).
    """

    run: Figures
    steps: Sequence[tuple[int, Figures]]
    attribution: Attribution
    recorded: Mapping[str, Any]

    @classmethod
    def of(cls, trace: Trace) -> Self:
        """Compute the report from the record of a run, which may be in progress."""
        attribution = Attribution.of(trace)
        steps = [step for step in trace.steps if not step.is_open]
        lags: dict[int, list[tuple[int, int, int]]] = {step.version: [] for step in steps}
        for group in trace.trained_groups:
            if group.step in lags:
                lags[group.step].append((group.lag, group.lag_before_queue, group.lag_in_queue))
        num_lanes = {pool: attribution.num_lanes(pool) for pool in POOLS}

        def figures(
            duration: int, num_steps: int, pools: Iterable[PoolTime], lags: Sequence[tuple[int, int, int]]
        ) -> Figures:
            return Figures(
                duration=duration,
                num_steps=num_steps,
                pools=dict(zip(POOLS, pools, strict=True)),
                num_lanes=num_lanes,
                lag=LagSplit(*(fmean(column) for column in zip(*lags, strict=True))),
            )

        per_step = zip(steps, *(attribution.per_step(pool, steps) for pool in POOLS), strict=True)
        start, end = attribution.window
        totals, all_lags = map(attribution.total, POOLS), [lag for of_step in lags.values() for lag in of_step]
        return cls(
            run=figures(end - start, len(steps), totals, all_lags),
            steps=[(step.version, figures(step.duration, 1, time, lags[step.version])) for step, *time in per_step],
            attribution=attribution,
            recorded={
                "processes": dict(Counter(process.pool for process in trace.processes)),
                "dropped_records": trace.num_dropped,
                "torn_files": sum(not process.is_whole for process in trace.processes),
                "clock_error_ns": max((process.error_ns for process in trace.processes), default=0),
            },
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the content of ``overlap.json`` as a dict: times and lag of the run and of each step."""
        steps = [{"step": version, **figures.to_dict()} for version, figures in self.steps]
        return {"run": self.run.to_dict(), "steps": steps, "recorded": dict(self.recorded)}

    def summary(self) -> dict[str, Any]:
        """Return the main numbers of the run as a dict for ``summary.json``.

        ``idle_s`` is a mean over all ranks, or over all sample slots of the engines.
        """
        run = self.run
        return {
            "step_s": run.step_s,
            "ideal_step_s": run.ideal_step_s,
            "efficiency": run.efficiency,
            "utilisation": {"both": run.utilisation, **{pool: run.pools[pool].utilisation for pool in POOLS}},
            "idle_s": {pool: run.idle_s(pool) for pool in POOLS},
            "lag": asdict(run.lag),
        }


class LiveUse:
    """Adds up the busy and idle time of the learner and the fleet while a run is in progress.

    Each finished step is counted once.
    """

    def __init__(self, run_dir: Path) -> None:
        self._reader = TraceReader(run_dir)
        self._upto: int | None = None
        self._total: dict[str, Counter[str]] = {pool: Counter() for pool in POOLS}
        self._recent: dict[str, deque[Counter[str]]] = {pool: deque(maxlen=_RECENT_STEPS) for pool in POOLS}
        self._capacity: dict[str, int] = {}

    def read(self) -> RunUse | None:
        """Return the busy and idle time of learner and fleet in all finished steps; None if no step is finished.

        Raises the errors of `TraceReader.read`.
        """
        trace = self._reader.read()
        # Find new steps by their end times: step numbers repeat after the learner has returned to a checkpoint.
        new = [step for step in trace.steps if not step.is_open and (self._upto is None or step.end > self._upto)]
        if new:
            new[0] = replace(new[0], start=new[0].start if self._upto is None else self._upto)
            self._upto = new[-1].end
            attribution = Attribution.of(trace, (new[0].start, new[-1].end))
            for pool in POOLS:
                for window, time in zip(new, attribution.per_step(pool, new), strict=True):
                    self._recent[pool].append(Counter({BUSY: time.busy, **time.idle}))
                    self._total[pool].update(self._recent[pool][-1])
                    self._capacity[pool] = round(time.capacity / window.duration) if window.duration else 0
            self._reader.forget(before=new[-1].end)
        return None if self._upto is None else RunUse(learner=self._use(Pool.learner), fleet=self._use(Pool.fleet))

    def _use(self, pool: str) -> PoolUse:
        recent = sum(self._recent[pool], Counter[str]())
        return PoolUse(
            name=pool,
            capacity=self._capacity[pool],
            busy_s=self._total[pool][BUSY] * _S,
            idle_s={cause: time * _S for cause, time in self._total[pool].items() if cause != BUSY},
            recent={cause: time / (recent.total() or 1) for cause, time in recent.items()},
        )
