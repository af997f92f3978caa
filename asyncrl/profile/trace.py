"""Reads what the processes of a run recorded, as spans, levels and group stamps on one clock.

A file may still be written, or end in the middle of a record, as that of a killed process does: what is whole is read.
All times are integer nanoseconds of the buffer server's monotonic clock. A process that shares it, as all on its host
do, is shown as it noted; the clock of another host is moved by the offsets that the process measured against it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

import msgpack

from asyncrl.core.record import NONE, SCHEMA, GroupEvent, Pool, SpanKind, Tag

FOLDER = "profile"
"""Where a run's processes write, in its folder."""
CONTROLLER_LANE, BUFFER_LANE = "controller", "buffer"
UNMEASURED_ERROR_NS = 1_000_000_000
"""Error of a clock that was never measured: it is placed by the hosts' wall clocks."""
_CHUNK_BYTES = 1 << 20
_WORST_OF_BEST = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """One process of a run; one that was restarted is another, of the same name.

    Attributes:
        name: In the run. Example: ``learner-0``.
        pool: See `Pool`.
        host: Of its machine; ``pid``: there.
        start: When it began to record; ``end``: its last note.
        wall_ns: Nanoseconds since the epoch at ``start``.
        offset_ns: What was last added to its clock; ``error_ns``: how far that may be off, either way.
        num_dropped: Records that it had no room for.
        is_whole: False where its file ends in the middle of a record.
        lanes: On which it noted spans or levels.
    """

    name: str
    pool: str
    host: str
    pid: int
    start: int
    end: int
    wall_ns: int
    offset_ns: int = 0
    error_ns: int = 0
    num_dropped: int = 0
    is_whole: bool = True
    lanes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """What a lane did from ``start`` to ``end``.

    Attributes:
        lane: Who did it. Example: ``engine-0``.
        kind: See `SpanKind`.
        start: Nanoseconds; ``end``: of one that is open, the end of the trace.
        version: Policy version that it was about, or -1; ``step`` and ``group`` likewise.
        cause: Says more, where the kind does not suffice.
        process: Name of the process that noted it.
        is_open: It had not ended when the trace was read, or never did.
    """

    lane: str
    kind: str
    start: int
    end: int
    version: int = NONE
    step: int = NONE
    group: int = NONE
    cause: str = ""
    process: str = ""
    is_open: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """From ``time`` to the next one of its name and lane, a count was at ``value``."""

    name: str
    lane: str
    time: int
    value: int
    process: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stamp:
    """A moment of a prompt group; what ``version`` and ``details`` hold is said at `asyncrl.core.record.stamp`."""

    event: str
    group: int
    attempt: int
    lane: str
    time: int
    version: int = NONE
    details: Mapping[str, Any] = field(default_factory=dict)
    process: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupLife:
    """The stamps of a prompt group, in order of time."""

    group: int
    stamps: tuple[Stamp, ...]

    def last(self, event: str) -> Stamp | None:
        """The last stamp of an event; an earlier one belongs to an attempt that was given up."""
        return next((stamp for stamp in reversed(self.stamps) if stamp.event == event), None)

    def time(self, event: str) -> int | None:
        """When an event came, for the last time."""
        stamp = self.last(event)
        return None if stamp is None else stamp.time

    @property
    def num_attempts(self) -> int:
        """Leases that it took."""
        return sum(stamp.event == GroupEvent.lease for stamp in self.stamps)

    @property
    def lag(self) -> int:
        """Learner steps between its oldest token and the step that consumed it; -1 where none did."""
        return NONE if self.step == NONE else self.lag_before_queue + self.lag_in_queue

    @property
    def lag_before_queue(self) -> int:
        """The part of its lag that it had when it was stored: slow generation, or an engine with old weights."""
        stored = self.last(GroupEvent.stored)
        return NONE if stored is None else stored.details["learner"] - stored.version

    @property
    def lag_in_queue(self) -> int:
        """The part of its lag for which it was stored, or in a batch that waited; -1 where no step consumed it."""
        stored = self.last(GroupEvent.stored)
        return NONE if stored is None or self.step == NONE else self.step - stored.details["learner"]

    @property
    def step(self) -> int:
        """The learner step that consumed it; -1 where none did."""
        trained = self.last(GroupEvent.trained)
        return NONE if trained is None else trained.version


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWindow:
    """The time of a learner step: from the end of the one before to its own.

    So what lies between them, a restart of the learner for one, belongs to the later. The first begins with training.
    """

    version: int
    start: int
    end: int
    is_open: bool = False

    @property
    def duration(self) -> int:
        """Nanoseconds."""
        return self.end - self.start


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What a run recorded.

    Attributes:
        processes: By their begin.
        spans: By their begin; ``levels`` and ``stamps``: by their time.
        start: The first note of any process, in nanoseconds; ``end``: the last one.
    """

    processes: tuple[Process, ...] = ()
    spans: tuple[Span, ...] = ()
    levels: tuple[Level, ...] = ()
    stamps: tuple[Stamp, ...] = ()
    start: int = 0
    end: int = 0

    @classmethod
    def load(cls, run_folder: Path | str) -> Self:
        """Read the trace of a run, which may still go on; to read it again and again, keep a `TraceReader`.

        Raises:
            FileNotFoundError: the run recorded nothing.
        """
        return TraceReader(run_folder).read(cls)

    @property
    def num_dropped(self) -> int:
        """Records lost, over all processes."""
        return sum(process.num_dropped for process in self.processes)

    @cached_property
    def steps(self) -> tuple[StepWindow, ...]:
        """The learner steps, which follow one another without a gap; the last may be open.

        One that was broken off, because the learner went back to a checkpoint, is among them; its version comes again.
        """
        noted = self.spans_of(SpanKind.step, CONTROLLER_LANE)
        taken = [span for span in noted if not span.is_open or span is noted[-1]]
        ends = list(accumulate((span.end for span in taken), max))  # clocks of two hosts may disagree a little
        starts = [span.start for span in taken[:1]] + ends
        return tuple(
            StepWindow(version=span.step, start=start, end=end, is_open=span.is_open)
            for span, start, end in zip(taken, starts, ends, strict=False)
        )

    @property
    def window(self) -> tuple[int, int]:
        """From the begin of the first step to the end of the last, the open one left out; empty without steps.

        It is the time of all finished steps: start-up comes before it, the last evaluation and shutdown after it.
        """
        done = [step for step in self.steps if not step.is_open]
        return (done[0].start, done[-1].end) if done else (self.start, self.start)

    @cached_property
    def groups(self) -> Mapping[int, GroupLife]:
        """Every prompt group that was leased, by id."""
        stamps: dict[int, list[Stamp]] = defaultdict(list)
        for stamp in self.stamps:
            stamps[stamp.group].append(stamp)
        return {group: GroupLife(group=group, stamps=tuple(own)) for group, own in stamps.items()}

    def lanes(self, pool: str) -> tuple[str, ...]:
        """The lanes of engines or ranks: those that are no part of another, such as ``learner-0/publish``."""
        names = {process.name for process in self.processes if process.pool == pool}
        found = (lane for lane, noted_by in self._names_by_lane.items() if "/" not in lane and noted_by & names)
        return tuple(sorted(found, key=_by_number))

    def processes_of(self, lane: str) -> tuple[Process, ...]:
        """The processes that noted what a lane did, by their begin: more than one where one was replaced."""
        return tuple(process for process in self.processes if process.name in self._names_by_lane.get(lane, ()))

    def spans_of(self, kind: str, lane: str | None = None) -> tuple[Span, ...]:
        """The spans of a kind, of one lane or of all, by their begin."""
        return self._spans_by_kind.get((kind, lane), ())

    def levels_of(self, name: str, lane: str) -> tuple[Level, ...]:
        """The changes of a count, by their time."""
        return self._levels_by_name.get((name, lane), ())

    def level_at(self, name: str, lane: str, time: int) -> int:
        """Where a count stood at a time; 0 before its first note."""
        changes = self.levels_of(name, lane)
        index = bisect_right(changes, time, key=lambda change: change.time)
        return changes[index - 1].value if index else 0

    @cached_property
    def _names_by_lane(self) -> Mapping[str, set[str]]:
        found: dict[str, set[str]] = defaultdict(set)
        for process in self.processes:
            for lane in process.lanes:
                found[lane].add(process.name)
        for notes in (self.spans, self.levels):
            for note in notes:
                found[note.lane].add(note.process)
        return found

    @cached_property
    def _spans_by_kind(self) -> Mapping[tuple[str, str | None], tuple[Span, ...]]:
        found: dict[tuple[str, str | None], list[Span]] = defaultdict(list)
        for span in self.spans:
            found[span.kind, span.lane].append(span)
            found[span.kind, None].append(span)
        return {key: tuple(spans) for key, spans in found.items()}

    @cached_property
    def _levels_by_name(self) -> Mapping[tuple[str, str], tuple[Level, ...]]:
        found: dict[tuple[str, str], list[Level]] = defaultdict(list)
        for level in self.levels:
            found[level.name, level.lane].append(level)
        return {key: tuple(levels) for key, levels in found.items()}


class TraceReader:
    """Reads the files of a run; every `read` takes up what was added since the one before."""

    def __init__(self, run_folder: Path | str) -> None:
        self._folder = Path(run_folder) / FOLDER
        self._files: dict[Path, _ProcessFile] = {}

    def read(self, kind: type[Trace] = Trace) -> Any:
        """The trace up to now. Raises `FileNotFoundError` if the run has recorded nothing."""
        for path in sorted(self._folder.glob("*.msgpack")):
            self._files.setdefault(path, _ProcessFile(path)).read_on()
        files = [file for file in self._files.values() if file.header]
        if not files:
            raise FileNotFoundError(
                f"{self._folder} holds no record; name the folder of a run that was started with profile.enabled=true"
            )
        reference = min(files, key=lambda file: file.rank).header
        for file in files:
            file.set_reference(reference)
        end = max(file.end for file in files)
        ends = _ends_of_open_spans(files, end)
        return kind(
            processes=tuple(sorted((file.process() for file in files), key=lambda process: process.start)),
            spans=tuple(sorted((s for file in files for s in file.spans(ends[file])), key=lambda span: span.start)),
            levels=tuple(sorted((level for file in files for level in file.levels()), key=lambda level: level.time)),
            stamps=tuple(sorted((stamp for file in files for stamp in file.stamps()), key=lambda stamp: stamp.time)),
            start=min(file.start for file in files),
            end=end,
        )

    def forget(self, before: int) -> None:
        """Drop what was over before a time of the last trace, so that reading a long run on stays cheap.

        The next trace has the spans that ended, and the stamps, from then on, and where each level stood.
        """
        for file in self._files.values():
            file.forget(before)


def _levels_from(levels: Iterable[list[Any]], before: int) -> list[list[Any]]:
    """Levels from a time on, and before them where each count stood."""
    stood: dict[tuple[str, str], list[Any]] = {}
    kept = []
    for level in levels:
        if level[2] < before:
            stood[level[0], level[1]] = level
        else:
            kept.append(level)
    return [*stood.values(), *kept]


def _ends_of_open_spans(files: Sequence[_ProcessFile], end: int) -> Mapping[_ProcessFile, int]:
    """When a process ended at the latest: where one of its name came after it, and else with the trace."""
    ends, next_start = {}, dict[str, int]()
    for file in sorted(files, key=lambda file: file.start, reverse=True):
        name = file.header["process"]
        ends[file] = next_start.get(name, end)
        next_start[name] = file.start
    return ends


_REFERENCE_ORDER = (Pool.buffer, Pool.controller, Pool.fleet, Pool.learner)


class _ProcessFile:
    """What one process wrote, on its own clock until it is asked for."""

    def __init__(self, path: Path) -> None:
        self.header: dict[str, Any] = {}
        self._path = path
        self._unpacker = msgpack.Unpacker(strict_map_key=False, max_buffer_size=0)
        self._num_read = self._num_whole = 0
        self._is_broken = False
        self._opened: dict[int, list[Any]] = {}
        self._closed: list[tuple[list[Any], int]] = []
        self._levels: list[list[Any]] = []
        self._stamps: list[list[Any]] = []
        self._clocks: list[list[Any]] = []
        self._lanes: set[str] = set()
        self._num_dropped = 0
        self._last = 0
        self._offsets = ClockOffsets()

    def read_on(self) -> None:
        """Take up what was written since the last time."""
        with self._path.open("rb") as file:
            file.seek(self._num_read)
            while not self._is_broken and (data := file.read(_CHUNK_BYTES)):
                self._num_read += len(data)
                self._unpacker.feed(data)
                try:
                    for record in self._unpacker:
                        self._take(record)
                        self._num_whole = self._unpacker.tell()
                except (ValueError, TypeError, IndexError, KeyError, AttributeError, msgpack.UnpackException):
                    self._is_broken = True  # what was read before stands
        if self.header and self.header["schema"] != SCHEMA:
            raise ValueError(
                f"{self._path} has records of schema {self.header['schema']}, this version reads {SCHEMA}; read them "
                "with the version of asyncrl that wrote them"
            )

    def _take(self, record: list[Any]) -> None:
        tag, *items = record
        match tag:
            case Tag.header:
                self.header = items[0]
                self._last = self.header["started_ns"]
            case Tag.open:
                self._opened[items[0]] = items
                self._lanes.add(items[1])
                self._last = max(self._last, items[3])
            case Tag.close:
                opened = self._opened.pop(items[0], None)
                if opened is not None:
                    self._closed.append((opened, items[1]))
                self._last = max(self._last, items[1])
            case Tag.level:
                self._levels.append(items)
                self._lanes.add(items[1])
                self._last = max(self._last, items[2])
            case Tag.stamp:
                self._stamps.append(items)
                self._last = max(self._last, items[4])
            case Tag.clock:
                self._clocks.append(items)
            case Tag.dropped:
                self._num_dropped += items[0]

    @property
    def rank(self) -> tuple[int, bool, int]:
        """The smallest is the process whose clock all others are shown on: the buffer's, before its store servers'."""
        is_other = self.header["process"] != BUFFER_LANE
        return _REFERENCE_ORDER.index(self.header["pool"]), is_other, self.header["started_ns"]

    def set_reference(self, reference: Mapping[str, Any]) -> None:
        """Show times on the clock of another process from now on."""
        own = self.header
        measured = [(time, offset, error) for clock, time, offset, error in self._clocks if clock == reference["clock"]]
        if own["clock"] == reference["clock"]:
            measured = []
        elif not measured:
            by_wall = (own["wall_ns"] - own["started_ns"]) - (reference["wall_ns"] - reference["started_ns"])
            measured = [(own["started_ns"], by_wall, UNMEASURED_ERROR_NS)]
        self._offsets = ClockOffsets(measured)

    @property
    def start(self) -> int:
        """Its first note."""
        return self._offsets.shown(self.header["started_ns"])

    @property
    def end(self) -> int:
        """Its last note."""
        return self._offsets.shown(self._last)

    def forget(self, before: int) -> None:
        """Drop what was over before a time."""
        before -= self._offsets.at(self._last)[0]
        self._closed = [(opened, end) for opened, end in self._closed if end >= before]
        self._stamps = [stamp for stamp in self._stamps if stamp[4] >= before]
        self._levels = _levels_from(self._levels, before)

    def process(self) -> Process:
        """The process."""
        offset, error = self._offsets.at(self._last)
        return Process(
            name=self.header["process"],
            pool=self.header["pool"],
            host=self.header["host"],
            pid=self.header["pid"],
            start=self.start,
            end=self.end,
            wall_ns=self.header["wall_ns"],
            offset_ns=offset,
            error_ns=error,
            num_dropped=self._num_dropped,
            lanes=tuple(sorted(self._lanes)),
            is_whole=not self._is_broken and self._num_whole == self._num_read,
        )

    def spans(self, end_of_open: int) -> Iterator[Span]:
        """Its spans; those that are open end at ``end_of_open``."""
        shown, process = self._offsets.shown, self.header["process"]
        for items, end in self._closed:
            yield _span(items, shown(items[3]), shown(end), process)
        for items in self._opened.values():
            yield replace(_span(items, shown(items[3]), end_of_open, process), is_open=True)

    def levels(self) -> Iterator[Level]:
        """Its levels."""
        shown, process = self._offsets.shown, self.header["process"]
        for name, lane, time, value in self._levels:
            yield Level(name=name, lane=lane, time=shown(time), value=value, process=process)

    def stamps(self) -> Iterator[Stamp]:
        """Its stamps."""
        shown, process = self._offsets.shown, self.header["process"]
        for event, group, attempt, lane, time, version, details in self._stamps:
            yield Stamp(
                event=event,
                group=group,
                attempt=attempt,
                lane=lane,
                time=shown(time),
                version=version,
                details=details,
                process=process,
            )


class ClockOffsets:
    """How one clock stands against another: measurements (time, offset, error), and between them a straight line.

    Two quartz clocks drift apart by some tens of microseconds a second, so that one offset does not last an hour.
    A measurement that is much less exact than the best one, because a reply was late, is left out. Without any both are
    the same clock.
    """

    def __init__(self, measured: Iterable[tuple[int, int, int]] = ()) -> None:
        rows = sorted(measured)
        best = min((error for _, _, error in rows), default=0)
        self._measured = [row for row in rows if row[2] <= _WORST_OF_BEST * best]

    def at(self, time: int) -> tuple[int, int]:
        """Offset and error at a time of the measuring clock, both in nanoseconds."""
        measured = self._measured
        if not measured:
            return 0, 0
        index = bisect_right(measured, time, key=lambda entry: entry[0])
        if index in (0, len(measured)):
            _, offset, error = measured[min(index, len(measured) - 1)]
            return offset, error
        (left, before, left_error), (right, after, right_error) = measured[index - 1 : index + 1]
        return before + (after - before) * (time - left) // max(1, right - left), max(left_error, right_error)

    def shown(self, time: int) -> int:
        """A time of the measuring clock on the other one."""
        return time + self.at(time)[0] if self._measured else time


def _span(items: Sequence[Any], start: int, end: int, process: str) -> Span:
    _, lane, kind, _, version, step, group, cause = items
    return Span(
        lane=lane,
        kind=kind,
        start=start,
        end=max(start, end),
        version=version,
        step=step,
        group=group,
        cause=cause,
        process=process,
    )


def _by_number(lane: str) -> tuple[str, int, str]:
    """Sorts ``engine-10`` after ``engine-9``."""
    name, _, number = lane.rpartition("-")
    return (name, int(number), lane) if number.isdigit() else (lane, 0, lane)
