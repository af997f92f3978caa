"""Traces of small simulated runs. Fleet, learner and controller are simulated. The ledger and the recorder are real.

`record_run` simulates a run in simulated time, and writes the profile of each process.
`trace_of` makes a trace from explicit values.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path

from asyncrl.core.record import GroupEvent, LevelName, OpenSpan, Pool, Recorder, SpanKind
from asyncrl.core.types import GroupSummary
from asyncrl.profile.trace import FOLDER, Level, Process, Span, Trace
from buffer.commands import Commit, Enqueue, GrantedLease, LeaseGroups, PlanBatch, Put
from buffer.description import LedgerNotes
from buffer.ledger import Ledger
from buffer.rule import StalenessRule

MS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class RunShape:
    """The parameters of a simulated run. Times are in nanoseconds."""

    num_steps: int = 6
    groups_per_step: int = 4
    max_lag: int = 1
    num_engines: int = 2
    num_ranks: int = 2
    groups_in_flight: int = 4
    samples_per_prompt: int = 2
    start: int = 500 * MS
    first_token: int = 5 * MS
    token: int = 1 * MS
    lengths: tuple[int, ...] = (80, 100, 120, 90, 300, 110, 70)
    reward: int = 10 * MS
    fetch: int = 5 * MS
    forward: int = 60 * MS
    backward: int = 100 * MS
    optimizer: int = 20 * MS
    rank_skew: int = 4 * MS
    publish_copy: int = 6 * MS
    publish: int = 20 * MS
    pause: int = 15 * MS
    re_prefill: int = 5 * MS


@dataclass(eq=False)
class _Engine:
    lane: str
    notes: Recorder
    groups: dict[int, _Group] = field(default_factory=dict)
    version: int = 0
    pause_total: int = 0
    counts: dict[str, int] = field(default_factory=dict)

    def change(self, **changes: int) -> None:
        for name, change in changes.items():
            self.counts[name] = self.counts.get(name, 0) + change
            self.notes.level(name, self.counts[name], lane=self.lane)


@dataclass(eq=False)
class _Group:
    lease: GrantedLease
    lengths: tuple[int, ...]
    num_running: int


class RecordedRun:
    """Simulates a run and records it, for `record_run`."""

    def __init__(self, folder: Path, shape: RunShape) -> None:
        self.shape = shape
        self.now = 0
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._order, self._ids = count(), count()
        self._recorders: list[Recorder] = []
        self._folder = folder / FOLDER
        self._controller = self._recorder("controller", Pool.controller)
        self._buffer = self._recorder("buffer", Pool.buffer)
        self._ranks = [self._recorder(f"learner-{rank}", Pool.learner) for rank in range(shape.num_ranks)]
        self._engines = [
            _Engine(f"engine-{rank}", self._recorder(f"rollout-{rank}", Pool.fleet))
            for rank in range(shape.num_engines)
        ]
        rule = StalenessRule(max_lag=shape.max_lag, groups_per_step=shape.groups_per_step)
        self.ledger = Ledger(rule)
        self._notes = LedgerNotes(self.ledger, self._buffer)
        self.ledger.on_applied = self._notes.note
        self._next_plan = 0
        self._waiting: OpenSpan | None = None
        self._step: OpenSpan | None = None
        self._queued: list[tuple[int, OpenSpan]] = []
        self._is_updating = False

    def _recorder(self, process: str, pool: Pool) -> Recorder:
        self._recorders.append(Recorder(self._folder, process=process, pool=pool, clock=lambda: self.now, host="h"))
        return self._recorders[-1]

    def play(self) -> None:
        """Simulate the run to its end, and close the files of its records."""
        shape = self.shape
        for engine in self._engines:
            engine.change(capacity=shape.groups_in_flight * shape.samples_per_prompt, running=0)
            start = engine.notes.span(SpanKind.start, lane=engine.lane)
            self._later(shape.start, start.close)
        self._later(shape.start, self._begin)
        while self._events:
            self.now, _, act = heapq.heappop(self._events)
            act()
            self._notes.levels(held_bytes=100 * self.ledger.groups.num_stored)
        for recorder in self._recorders:
            recorder.close()

    def _later(self, delay: int, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay, next(self._order), act))

    def _begin(self) -> None:
        self._step = self._controller.span(SpanKind.step, step=0)
        self._plan()
        self._fill()

    # The methods below simulate the fleet.

    def _fill(self) -> None:
        if self.ledger.groups.num_queued < 100:
            self.ledger.apply(Enqueue(group_ids=tuple(next(self._ids) for _ in range(100))))
        if self.ledger.learner_version == self.shape.num_steps:
            return
        for engine in self._engines:
            num_free = self.shape.groups_in_flight - len(engine.groups)
            command = LeaseGroups(engine_version=engine.version, max_groups=num_free)
            for lease in self.ledger.apply(command).leases if num_free else ():
                self._start(engine, lease)
            is_free = len(engine.groups) < self.shape.groups_in_flight
            engine.notes.level(LevelName.asking, int(is_free), lane=engine.lane)

    def _start(self, engine: _Engine, lease: GrantedLease) -> None:
        shape, place = self.shape, lease.group_id * self.shape.samples_per_prompt
        lengths = tuple(shape.lengths[(place + i) % len(shape.lengths)] for i in range(shape.samples_per_prompt))
        group = _Group(lease, lengths, num_running=len(lengths))
        engine.groups[lease.group_id] = group
        engine.change(running=len(lengths))
        self._later(shape.first_token, lambda: self._stamp(GroupEvent.first_token, engine, group))
        for length in lengths:
            self._sample(engine, group, shape.first_token + length * shape.token)

    def _sample(self, engine: _Engine, group: _Group, left: int) -> None:
        paused = engine.pause_total

        def end() -> None:
            if engine.pause_total > paused:
                self._sample(engine, group, engine.pause_total - paused)
                return
            group.num_running -= 1
            engine.change(running=-1, tail=1)
            if group.num_running == 0:
                engine.change(tail=-len(group.lengths), settling=len(group.lengths))
                self._stamp(GroupEvent.last_token, engine, group)
                reward = engine.notes.span(SpanKind.reward, lane=f"{engine.lane}/reward", group=group.lease.group_id)
                self._later(self.shape.reward, lambda: self._settle(engine, group, reward))

        self._later(left, end)

    def _settle(self, engine: _Engine, group: _Group, reward: OpenSpan) -> None:
        reward.close()
        self._stamp(GroupEvent.reward, engine, group)
        lease, lengths = group.lease, group.lengths
        summary = GroupSummary(
            group_id=lease.group_id,
            attempt=lease.attempt,
            num_prompt_tokens=16,
            response_lengths=lengths,
            num_tokens=sum(lengths),
            oldest_version=lease.engine_version,
            newest_version=engine.version,
            rewards=tuple(float(length < 100) for length in lengths),
        )
        self.ledger.apply(Put(summary=summary, num_bytes=100))
        del engine.groups[lease.group_id]
        engine.change(settling=-len(lengths))
        self._plan()
        self._fill()

    def _stamp(self, event: GroupEvent, engine: _Engine, group: _Group) -> None:
        engine.notes.stamp(
            event, group.lease.group_id, attempt=group.lease.attempt, version=engine.version, lane=engine.lane
        )

    def _load(self, engine: _Engine, version: int) -> None:
        pause = engine.notes.span(SpanKind.pause, lane=engine.lane, version=version)
        engine.pause_total += self.shape.pause + self.shape.re_prefill

        def loaded() -> None:
            pause.close()
            engine.version = version
            engine.notes.level(LevelName.version, version, lane=engine.lane)
            if any(group.num_running for group in engine.groups.values()):
                again = engine.notes.span(SpanKind.re_prefill, lane=engine.lane, version=version)
                self._later(self.shape.re_prefill, again.close)
            self._fill()

        self._later(self.shape.pause, loaded)

    # The methods below simulate controller and learner.

    def _plan(self) -> None:
        version = self._next_plan
        if version >= self.shape.num_steps or version > self.ledger.learner_version + 1:
            return
        if self._waiting is None:
            self._waiting = self._controller.span(SpanKind.plan_wait, lane="controller/plan", step=version)
        if not self.ledger.apply(PlanBatch(version=version)).group_ids:
            return
        self._waiting.close()
        self._waiting = None
        self._next_plan += 1
        self._queued.append(
            (version, self._controller.span(SpanKind.dispatched, lane="controller/complete", step=version))
        )
        if not self._is_updating:
            self._update()
        self._plan()

    def _update(self) -> None:
        self._is_updating = True
        shape, (version, queued) = self.shape, self._queued.pop(0)
        updates = [notes.span(SpanKind.update, step=version) for notes in self._ranks]
        parts = ((SpanKind.fetch, shape.fetch), (SpanKind.forward, shape.forward), (SpanKind.backward, shape.backward))
        for rank, notes in enumerate(self._ranks):
            begin = 0
            for kind, length in (*parts, (SpanKind.optimizer, shape.optimizer)):
                length += shape.rank_skew * rank if kind is SpanKind.fetch else 0
                self._during(notes, kind, begin, length, step=version)
                begin += length
            wait = shape.rank_skew * (shape.num_ranks - 1 - rank)
            self._during(notes, SpanKind.wait_ranks, begin, wait, step=version)
        self._later(begin, lambda: self._end_update(version, queued, updates))

    def _during(self, notes: Recorder, kind: SpanKind, delay: int, length: int, **about: int) -> None:
        def begin() -> None:
            self._later(length, notes.span(kind, **about).close)

        if length:
            self._later(delay, begin)

    def _end_update(self, version: int, queued: OpenSpan, updates: Iterable[OpenSpan]) -> None:
        for span in (queued, *updates):
            span.close()
        self.ledger.apply(Commit(version=version))
        if self._step is not None:
            self._step.close()
        self._step = None
        if version + 1 < self.shape.num_steps:
            self._step = self._controller.span(SpanKind.step, step=version + 1)
        copies = [notes.span(SpanKind.publish_copy, version=version + 1) for notes in self._ranks]
        self._later(self.shape.publish_copy, lambda: self._published(version + 1, copies))
        self._plan()
        self._fill()

    def _published(self, version: int, copies: Iterable[OpenSpan]) -> None:
        for copy in copies:
            copy.close()
        self._is_updating = False
        publish = self._ranks[0].span(SpanKind.publish, lane="learner-0/publish", version=version)

        def offered() -> None:
            publish.close()
            for engine in self._engines:
                self._load(engine, version)

        self._later(self.shape.publish, offered)
        if self._queued:
            self._update()


def record_run(folder: Path, **shape: object) -> Trace:
    """Simulate a run, record it in ``folder``, and return its trace. ``shape`` sets fields of `RunShape`."""
    RecordedRun(folder, RunShape(**shape)).play()
    return Trace.load(folder)


def trace_of(
    *,
    fleet: Iterable[tuple[str, str, int, int]] = (),
    learner: Iterable[tuple[str, str, int, int]] = (),
    controller: Iterable[tuple[str, str, int, int]] = (),
    buffer: Iterable[tuple[str, int, int]] = (),
    steps: Iterable[int] = (),
) -> Trace:
    """Make a trace from explicit values.

    A tuple for a span is (row of the timeline, kind, start, end). A tuple for a measured value is (row, name, time,
    value), without the row for the buffer. ``steps`` has the start of the first step and the end of each step.
    """
    spans, levels = [], []
    for process, noted in (("rollout-0", fleet), ("learner-0", learner), ("controller", controller)):
        for lane, name, first, second in noted:
            if name in set(LevelName):
                levels.append(Level(name=name, lane=lane, time=first, value=second, process=process))
            else:
                spans.append(Span(lane=lane, kind=name, start=first, end=second, process=process))
    levels += [Level(name=n, lane="buffer", time=time, value=value, process="buffer") for n, time, value in buffer]
    for number, (start, end) in enumerate(pairwise(steps)):
        spans.append(Span(lane="controller", kind="step", start=start, end=end, step=number, process="controller"))
    pools = {"rollout-0": Pool.fleet, "learner-0": Pool.learner, "controller": Pool.controller, "buffer": Pool.buffer}
    last = max([span.end for span in spans] + [level.time for level in levels], default=0)
    return Trace(
        processes=tuple(
            Process(name=name, pool=pool.value, host="h", pid=1, start=0, end=last, wall_ns=0)
            for name, pool in pools.items()
        ),
        spans=tuple(sorted(spans, key=lambda span: span.start)),
        levels=tuple(sorted(levels, key=lambda level: level.time)),
        end=last,
    )
