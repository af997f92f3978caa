"""Attributes the idle time of each pool to causes; the causes sum exactly to the idle time.

A *place* is the unit that can be busy: a learner rank, or room for one sample on an engine. At any time, a place is
either busy or idle for exactly one cause. If several causes apply, the first one in the order of docs/profiling.md
counts. All sums are integer nanoseconds times places.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from heapq import merge
from itertools import pairwise
from typing import Self

from asyncrl.core.record import LevelName, Pool, SpanKind
from asyncrl.metrics import BUSY
from asyncrl.profile.trace import BUFFER_LANE, CONTROLLER_LANE, Span, StepWindow, Trace


class FleetCause(StrEnum):
    """Why a place on an engine was idle. The first member that applies is the cause."""

    engine_down = "engine_down"
    start = "start"
    released = "released"
    publish_pause = "publish_pause"
    re_prefill = "re_prefill"
    evaluation = "evaluation"
    reward = "reward"
    group_tail = "group_tail"
    no_prompts = "no_prompts"
    buffer_full = "buffer_full"
    staleness_gate = "staleness_gate"
    publish_wait = "publish_wait"
    lease = "lease"


class LearnerCause(StrEnum):
    """Why a learner rank was idle. The first member that applies is the cause.

    From ``batch_tail`` on, the rank waits for a batch.
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
    engine_down = "engine_down"
    start = "start"
    no_prompts = "no_prompts"
    buffer_full = "buffer_full"
    staleness_gate = "staleness_gate"
    lease = "lease"


OWN_CAUSES: Mapping[str, frozenset[str]] = {
    Pool.learner: frozenset({LearnerCause.fetch, LearnerCause.rank_skew}),
    Pool.fleet: frozenset({FleetCause.reward, FleetCause.group_tail}),
}
"""Idle causes that a pool has even if the other pool is infinitely fast."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """A period in which some places of a lane were in the same state.

    Attributes:
        lane: The lane of the rank or engine.
        start: Start of the period, in nanoseconds.
        end: End of the period, in nanoseconds.
        state: ``busy``, or a `FleetCause` or `LearnerCause`.
        places: Number of places in this state.
    """

    lane: str
    start: int
    end: int
    state: str
    places: int

    @property
    def total(self) -> int:
        """Nanoseconds times places."""
        return self.places * (self.end - self.start)


@dataclass(frozen=True, kw_only=True)
class PoolTime:
    """The time of a pool's places, in nanoseconds times places.

    Attributes:
        capacity: The total: the busy time plus the idle time of all causes.
        busy: The busy time.
        idle: The idle time by cause, largest first.
    """

    capacity: int = 0
    busy: int = 0
    idle: Mapping[str, int] = field(default_factory=dict)

    @property
    def idle_total(self) -> int:
        """The idle time of all causes."""
        return sum(self.idle.values())

    @property
    def utilisation(self) -> float:
        """Busy share, 0 to 1; 0 if the pool had no places."""
        return self.busy / self.capacity if self.capacity else 0.0

    def alone(self, pool: str, duration: int) -> float:
        """The part of ``duration`` (nanoseconds) that the pool needs alone: busy time plus `OWN_CAUSES`."""
        own = self.busy + sum(self.idle.get(cause, 0) for cause in OWN_CAUSES[pool])
        return duration * own / self.capacity if self.capacity else 0.0


@dataclass(frozen=True, kw_only=True)
class Attribution:
    """What every place of a run did in a window of time.

    Attributes:
        window: Start and end, in nanoseconds.
        stretches: By pool (``learner``, ``fleet``), sorted by lane and then by time. They fill the window.
    """

    window: tuple[int, int]
    stretches: Mapping[str, tuple[Stretch, ...]]

    @classmethod
    def of(cls, trace: Trace, window: tuple[int, int] | None = None) -> Self:
        """Attribute the time of a trace in ``window``; the default window is the finished steps."""
        window = trace.window if window is None else window
        fleet = _merged(_fleet_stretches(trace, window))
        learner = _merged(_learner_stretches(trace, window, fleet))
        return cls(window=window, stretches={Pool.learner.value: learner, Pool.fleet.value: fleet})

    def total(self, pool: str) -> PoolTime:
        """A pool's time in the whole window."""
        return _pool_time(self.stretches[pool])

    def per_step(self, pool: str, steps: Sequence[StepWindow]) -> list[PoolTime]:
        """A pool's time in each of ``steps``, which must be consecutive."""
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
        """Number of engines or ranks that had a place in the window."""
        return len({stretch.lane for stretch in self.stretches[pool]})


class Series:
    """An integer that changes over time; it is 0 before the first change."""

    def __init__(self, changes: Iterable[tuple[int, int]] = ()) -> None:
        """Take (time, new value) pairs in any order; if several have the same time, the last one counts."""
        self.changes = sorted(changes, key=lambda change: change[0])

    @classmethod
    def covering(cls, intervals: Iterable[tuple[int, int]]) -> Self:
        """The number of intervals that cover each time."""
        deltas: Counter[int] = Counter()
        for start, end in intervals:
            deltas[start] += 1
            deltas[end] -= 1
        return cls(_summed(deltas))

    def flag(self) -> Series:
        """A series that is 1 where this series is not 0."""
        flags = [(time, int(value != 0)) for time, value in self.changes]
        kept = [change for before, change in pairwise([(0, 0), *flags]) if before[1] != change[1]]
        return Series(kept)

    def at(self, time: int) -> int:
        """The value at a time."""
        index = bisect_right(self.changes, time, key=lambda change: change[0])
        return self.changes[index - 1][1] if index else 0


def swept(window: tuple[int, int], series: Mapping[str, Series]) -> Iterator[tuple[int, int, dict[str, int]]]:
    """Split the window where a series changes; yield start, end and the values by name of each part.

    All parts share one mapping: the generator updates it in place for the next part.
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
    LevelName.capacity,
    LevelName.running,
    LevelName.tail,
    LevelName.settling,
    LevelName.parked,
    LevelName.version,
)
_ENGINE_SPANS = (
    SpanKind.down,
    SpanKind.start,
    SpanKind.released,
    SpanKind.pause,
    SpanKind.re_prefill,
    SpanKind.evaluation,
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
        spans = {kind: [*_edges(trace.spans_of(kind, lane))] for kind in _ENGINE_SPANS}
        spans[SpanKind.down] += _gaps(trace, lane)
        series = {f"span.{kind}": Series.covering(edges) for kind, edges in spans.items()}
        series |= {str(name): _level(trace, name, lane) for name in _ENGINE_LEVELS}
        for start, end, now in swept(window, {**series, **buffer}):
            for state, places in _engine_states(now):
                yield Stretch(lane=lane, start=start, end=end, state=str(state), places=places)


def _engine_states(now: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """The states of an engine's places, each with its number of places; the numbers sum to the engine's capacity."""
    left = now[LevelName.capacity]
    for kind, cause in _WHOLE_ENGINE:
        if now[f"span.{kind}"]:
            yield cause, left
            return
    running_state = FleetCause.re_prefill if now[f"span.{SpanKind.re_prefill}"] else BUSY
    held = [(running_state, now[LevelName.running])]
    if now[f"span.{SpanKind.evaluation}"]:
        held.append((FleetCause.evaluation, left))
    held += [
        (FleetCause.reward, now[LevelName.settling]),
        (FleetCause.publish_pause, now[LevelName.parked]),
        (FleetCause.group_tail, now[LevelName.tail]),
        (_why_free(now), left),
    ]
    for state, wanted in held:
        places = min(left, max(0, wanted))
        left -= places
        if places:
            yield state, places


def _why_free(now: Mapping[str, int]) -> FleetCause:
    """Why no sample starts in a free place."""
    if not now["buffer.queued"]:
        return FleetCause.no_prompts
    if now["buffer.full"]:
        return FleetCause.buffer_full
    if not now["buffer.budget"]:
        return FleetCause.staleness_gate
    has_newest = now[LevelName.version] >= now["buffer.version"]
    return FleetCause.lease if has_newest else FleetCause.publish_wait


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
    (FleetCause.engine_down, LearnerCause.engine_down),
    (FleetCause.start, LearnerCause.start),
    (FleetCause.no_prompts, LearnerCause.no_prompts),
    (FleetCause.buffer_full, LearnerCause.buffer_full),
    (FleetCause.staleness_gate, LearnerCause.staleness_gate),
    (FleetCause.lease, LearnerCause.lease),
)


def _learner_stretches(trace: Trace, window: tuple[int, int], fleet: Sequence[Stretch]) -> Iterator[Stretch]:
    lanes = trace.lanes(Pool.learner)
    working = Series.covering(edge for kind in _WORK for edge in _edges(trace.spans_of(kind)))
    shared = {
        "working": working,
        "dispatched": Series.covering(_edges(trace.spans_of(SpanKind.dispatched))),
        "plan_wait": Series.covering(_edges(trace.spans_of(SpanKind.plan_wait))),
        "evaluation": Series.covering(_edges(_of_controller(trace, SpanKind.evaluation))),
        "checkpoint": Series.covering(_edges(_of_controller(trace, SpanKind.checkpoint))),
    }
    fleet_states = _waits(trace, window, fleet)
    for lane in lanes:
        own = {f"span.{kind}": Series.covering(_edges(trace.spans_of(kind, lane))) for kind, _ in _BLOCKED}
        own["work"] = Series.covering(edge for kind in _WORK for edge in _edges(trace.spans_of(kind, lane)))
        own["down"] = Series.covering(_gaps(trace, lane))
        for start, end, now in swept(window, {**shared, **own, **fleet_states.series}):
            state = _rank_state(now)
            if state is None:
                state = fleet_states.causes[now["fleet"]]
            yield Stretch(lane=lane, start=start, end=end, state=str(state), places=1)


def _rank_state(now: Mapping[str, int]) -> str | None:
    """The state of a rank; None if the rank waits for a batch. Then the state of the fleet tells the cause."""
    if now["down"]:
        return LearnerCause.rank_down
    for kind, cause in _BLOCKED:
        if now[f"span.{kind}"]:
            return cause
    if now["work"]:
        return BUSY
    if now["working"]:
        return LearnerCause.rank_skew
    if now["plan_wait"] and not now["dispatched"]:
        return None
    for name, cause in (("checkpoint", LearnerCause.checkpoint), ("evaluation", LearnerCause.evaluation)):
        if now[name] and not now["dispatched"]:
            return cause
    return LearnerCause.dispatch


@dataclass(frozen=True)
class _FleetStates:
    """Why a batch was missing, over time: ``series["fleet"]`` holds an index into ``causes``."""

    series: Mapping[str, Series]
    causes: Sequence[str] = tuple(LearnerCause)


def _waits(trace: Trace, window: tuple[int, int], fleet: Sequence[Stretch]) -> _FleetStates:
    """The cause of a missing batch at each time.

    The cause is ``batch_tail`` if the staleness bound stops free places from starting a group, and at most half
    of the step's peak number of samples still run.
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
        changes.append((start, causes.index(_why_no_batch(now, running, peak))))
    return _FleetStates({"fleet": Series(changes)}, causes)


def _why_no_batch(now: Mapping[str, int], running: int, peak: int) -> LearnerCause:
    if running:
        is_closed = now.get(FleetCause.staleness_gate, 0) > 0
        return LearnerCause.batch_tail if is_closed and 2 * running <= peak else LearnerCause.slow_generation
    causes = (cause for state, cause in _WAITS_FOR if now.get(state, 0))
    return next(causes, LearnerCause.dispatch)


# Spans and stretches


def _edges(spans: Iterable[Span]) -> Iterator[tuple[int, int]]:
    return ((span.start, span.end) for span in spans if span.start < span.end)


def _of_controller(trace: Trace, kind: SpanKind) -> list[Span]:
    return [span for span in trace.spans_of(kind) if span.lane.partition("/")[0] == CONTROLLER_LANE]


def _level(trace: Trace, name: str, lane: str) -> Series:
    return Series((level.time, level.value) for level in trace.levels_of(name, lane))


def _gaps(trace: Trace, lane: str) -> list[tuple[int, int]]:
    """The periods after a process of a lane died and before its replacement started."""
    pairs = pairwise(trace.processes_of(lane))
    return [(left.end, right.start) for left, right in pairs if left.end < right.start]


def _summed(deltas: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    value = 0
    for time in sorted(deltas):
        if deltas[time]:
            value += deltas[time]
            yield time, value


def _merged(stretches: Iterable[Stretch]) -> tuple[Stretch, ...]:
    """Sort the stretches by lane and time; join adjacent stretches of the same lane, state and number of places."""
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
