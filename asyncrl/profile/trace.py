"""Reads what the processes of a run recorded: spans (activities), levels (counts) and stamps (events of groups).

The processes may still write their files, or may have been killed. All times are integer nanoseconds of one clock, the
monotonic clock of the buffer server. For processes on other hosts, the reader adds the measured clock offset.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import msgpack

from asyncrl.core.record import NONE, SCHEMA, GroupEvent, Pool, SpanKind, Tag

FOLDER = "profile"
"""Subfolder of the run's folder for the records of the processes."""
CONTROLLER_LANE, BUFFER_LANE = "controller", "buffer"
UNMEASURED_ERROR_NS = 1_000_000_000
"""Assumed error, in nanoseconds, of a clock offset that is computed from wall clocks because it was not measured."""
_CHUNK_BYTES = 1 << 20
_WORST_OF_BEST = 8
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """One process of a run. A restarted process is a new `Process` with the same name.

    Attributes:
        name: Name in the run. Example: ``learner-0``.
        pool: Part of the run, a value of `Pool`. Example: ``learner``.
        start: Time when the process began to record.
        end: Time of the newest record.
        wall_ns: Nanoseconds since the Unix epoch at ``start``.
        offset_ns: Nanoseconds that the reader added to convert ``end`` from the clock of the process.
        error_ns: Largest possible error of ``offset_ns``.
        num_dropped: Number of records that the process dropped because its queue was full.
        is_whole: False if the file has a damaged record, or ends in the middle of a record.
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


@dataclass(frozen=True, slots=True)
class Span:
    """An activity of a lane (a process or a part of a process) from ``start`` to ``end``.

    Attributes:
        lane: Name of the rank, engine or other part. Example: ``engine-0``.
        kind: Name of the activity, a `SpanKind`. Example: ``update``.
        start: Nanoseconds.
        end: Nanoseconds; for an open span, the end of its process or of the trace.
        version: Policy version that the activity concerns, or -1 if none.
        step: Learner step that the activity concerns, or -1 if none.
        group: Id of the group that the activity concerns, or -1 if none.
        cause: Detail of the activity, such as the name of a phase; empty if none.
        is_open: True if the end of the span is not recorded.
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


@dataclass(frozen=True, slots=True)
class Level:
    """A recorded value of a count. The count has this value from ``time`` until its next `Level`.

    The count is identified by ``name`` and ``lane`` (a process or a part of a process).
    """

    name: str
    lane: str
    time: int
    value: int
    process: str = ""


@dataclass(frozen=True, slots=True)
class Stamp:
    """An event of a prompt group. `asyncrl.core.record.Recorder.stamp` explains ``version`` and ``details``."""

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
    """The stamps (recorded events) of a prompt group, in order of time."""

    group: int
    stamps: tuple[Stamp, ...]

    def last(self, event: str) -> Stamp | None:
        """Return the latest stamp (recorded event) with the name ``event``; None if the group has no such event.

        Earlier stamps of the same event belong to abandoned attempts, or to earlier steps that trained on the group.
        """
        return next((stamp for stamp in reversed(self.stamps) if stamp.event == event), None)

    def time(self, event: str) -> int | None:
        """Return the time of the latest event with the name ``event``, in nanoseconds; None without such an event."""
        stamp = self.last(event)
        return None if stamp is None else stamp.time

    def uses(self) -> list[GroupLife]:
        """Return one `GroupLife` for each learner step that trained on the group, with the events up to that step.

        Steps before the group's latest ``stored`` event are left out. A group may be stored again after the learner
        returned to a checkpoint, for example. If the learner repeated a step, the first attempt is left out.
        """
        found: list[GroupLife] = []
        for number, stamp in enumerate(self.stamps, start=1):
            if stamp.event == GroupEvent.stored:
                found.clear()
            elif stamp.event == GroupEvent.trained:
                found = [use for use in found if use.step < stamp.version]
                found.append(GroupLife(group=self.group, stamps=self.stamps[:number]))
        return found

    @property
    def lag(self) -> int:
        """Number of learner steps from the group's oldest token to the step that trained on the group.

        The lag is -1 if no step trained on the group, or if the group has no ``stored`` event.
        """
        lags = self.lag_before_queue, self.lag_in_queue
        return NONE if NONE in lags else sum(lags)

    @property
    def lag_before_queue(self) -> int:
        """Number of learner steps from the group's oldest token until the buffer stored the group; -1 if it did not."""
        stored = self.last(GroupEvent.stored)
        return NONE if stored is None else stored.details["learner"] - stored.version

    @property
    def lag_in_queue(self) -> int:
        """Number of learner steps from the time when the buffer stored the group until a step trained on the group.

        The value is -1 if the group was not stored or not trained on.
        """
        stored = self.last(GroupEvent.stored)
        return NONE if stored is None or self.step == NONE else self.step - stored.details["learner"]

    @property
    def step(self) -> int:
        """Number of the latest learner step that trained on the group; -1 if there is none."""
        trained = self.last(GroupEvent.trained)
        return NONE if trained is None else trained.version


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWindow:
    """The time of a learner step, from the end of the previous step to the end of this step.

    The first step begins when training begins.
    """

    version: int
    start: int
    end: int
    is_open: bool = False

    @property
    def duration(self) -> int:
        """Length of the step in nanoseconds."""
        return self.end - self.start


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The record of a run.

    Attributes:
        processes: All processes, sorted by start.
        spans: All activities, sorted by start.
        levels: All changes of counts, sorted by time.
        stamps: All events of prompt groups, sorted by time.
        start: Time of the first record, in nanoseconds.
        end: Time of the last record, in nanoseconds.
    """

    processes: tuple[Process, ...] = ()
    spans: tuple[Span, ...] = ()
    levels: tuple[Level, ...] = ()
    stamps: tuple[Stamp, ...] = ()
    start: int = 0
    end: int = 0

    @staticmethod
    def load(run_folder: Path | str) -> Trace:
        """Read the record in the folder of a run, which may be in progress. Raises the errors of `TraceReader.read`."""
        return TraceReader(run_folder).read()

    @property
    def num_dropped(self) -> int:
        """Number of records that the processes of the run dropped because their queues were full."""
        return sum(process.num_dropped for process in self.processes)

    @cached_property
    def steps(self) -> tuple[StepWindow, ...]:
        """The learner steps in order of time. Each step begins at the end of the previous step.

        The last step may be unfinished. If the learner returned to a checkpoint, a repeated step appears twice.
        """
        step_spans = self.spans_of(SpanKind.step, CONTROLLER_LANE)
        taken = [span for span in step_spans if not span.is_open or span is step_spans[-1]]
        # Converted times have small errors. Therefore ensure that no step ends before the end of the previous step.
        ends = list(accumulate((span.end for span in taken), max))
        starts = [span.start for span in taken[:1]] + ends
        return tuple(
            StepWindow(version=span.step, start=start, end=end, is_open=span.is_open)
            for span, start, end in zip(taken, starts, ends, strict=False)
        )

    @property
    def window(self) -> tuple[int, int]:
        """Start of the first step and end of the latest finished step, in nanoseconds.

        If no step is finished, both values are the start of the record.
        """
        done = [step for step in self.steps if not step.is_open]
        return (done[0].start, done[-1].end) if done else (self.start, self.start)

    @cached_property
    def groups(self) -> Mapping[int, GroupLife]:
        """The recorded events of every prompt group, by group id."""
        stamps: dict[int, list[Stamp]] = defaultdict(list)
        for stamp in self.stamps:
            stamps[stamp.group].append(stamp)
        return {group: GroupLife(group=group, stamps=tuple(own)) for group, own in stamps.items()}

    @cached_property
    def trained_groups(self) -> tuple[GroupLife, ...]:
        """The trained groups: one entry for each step that trained on a group.

        Groups without a recorded ``stored`` event are left out, because their lag is unknown. The buffer may have
        stored them before the run was resumed.
        """
        uses = (use for life in self.groups.values() for use in life.uses())
        return tuple(use for use in uses if use.last(GroupEvent.stored) is not None)

    def lanes(self, pool: str) -> tuple[str, ...]:
        """Return the names of the engines or ranks of a pool, sorted by number. Example: ``learner-0``.

        The names of an engine's or rank's activities, such as ``learner-0/publish``, are left out.
        """

        def by_number(lane: str) -> tuple[str, int, str]:
            """Sort ``engine-10`` after ``engine-9``."""
            name, _, number = lane.rpartition("-")
            return (name, int(number), lane) if number.isdigit() else (lane, 0, lane)

        names = {process.name for process in self.processes if process.pool == pool}
        found = (lane for lane, recorded_by in self._names_by_lane.items() if "/" not in lane and recorded_by & names)
        return tuple(sorted(found, key=by_number))

    def processes_of(self, lane: str) -> tuple[Process, ...]:
        """Return the processes that recorded ``lane`` (the name of a rank, engine or other part), by start time.

        The result has several processes if a process was replaced.
        """
        return tuple(process for process in self.processes if process.name in self._names_by_lane.get(lane, ()))

    def spans_of(self, kind: str, lane: str | None = None) -> tuple[Span, ...]:
        """Return the activities of one kind, sorted by start.

        ``lane`` is the name of a rank, engine or other component; None selects all components.
        """
        return self._spans_by_kind.get((kind, lane), ())

    def levels_of(self, name: str, lane: str) -> tuple[Level, ...]:
        """Return the recorded values of a count, such as ``running``, sorted by time.

        ``lane`` is the name of a rank, engine or other component.
        """
        return self._levels_by_name.get((name, lane), ())

    def level_at(self, name: str, lane: str, time: int) -> int:
        """Return the value of the count ``name`` of ``lane`` at a time in nanoseconds; 0 before the first record.

        ``lane`` is the name of a rank, engine or other component.
        """
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
        return _grouped([*((s.kind, s.lane, s) for s in self.spans), *((s.kind, None, s) for s in self.spans)])

    @cached_property
    def _levels_by_name(self) -> Mapping[tuple[str, str | None], tuple[Level, ...]]:
        return _grouped((level.name, level.lane, level) for level in self.levels)


def _grouped(rows: Iterable[tuple[str, str | None, _T]]) -> Mapping[tuple[str, str | None], tuple[_T, ...]]:
    found: dict[tuple[str, str | None], list[_T]] = defaultdict(list)
    for name, lane, row in rows:
        found[name, lane].append(row)
    return {key: tuple(rows) for key, rows in found.items()}


class TraceReader:
    """Reads the record files of a run. Each call of `read` reads only the new bytes of the files."""

    def __init__(self, run_folder: Path | str) -> None:
        self._folder = Path(run_folder) / FOLDER
        self._files: dict[Path, _ProcessFile] = {}

    def read(self) -> Trace:
        """Read what was recorded since the previous call, and return the whole record so far.

        Raises:
            FileNotFoundError: the run recorded nothing.
            ValueError: another version of asyncrl wrote the record.
        """
        for path in sorted(self._folder.glob("*.msgpack")):
            self._files.setdefault(path, _ProcessFile(path)).read_on()
        files = [file for file in self._files.values() if file.header]
        if not files:
            problem = "holds no record" if self._folder.parent.is_dir() else "does not exist"
            raise FileNotFoundError(
                f"{self._folder} {problem}; pass the folder of a run that was started with profile.enabled=true"
            )
        reference = min(files, key=lambda file: file.rank).header
        for file in files:
            file.set_reference(reference)
        end = max(file.end for file in files)
        ends, next_start = {}, dict[str, int]()
        # End the open spans (unfinished activities) of a restarted process when the new process starts.
        for file in sorted(files, key=lambda file: file.start, reverse=True):
            ends[file] = next_start.get(file.header["process"], end)
            next_start[file.header["process"]] = file.start
        return Trace(
            processes=tuple(sorted((file.process() for file in files), key=lambda process: process.start)),
            spans=tuple(sorted((s for file in files for s in file.spans(ends[file])), key=lambda span: span.start)),
            levels=tuple(sorted((level for file in files for level in file.levels()), key=lambda level: level.time)),
            stamps=tuple(sorted((stamp for file in files for stamp in file.stamps()), key=lambda stamp: stamp.time)),
            start=min(file.start for file in files),
            end=end,
        )

    def forget(self, before: int) -> None:
        """Drop the records of all times before ``before``, in nanoseconds. Keep the spans that end after this time.

        Later calls of `read` then have less work. The next trace still has the value of each count at ``before``.
        """
        for file in self._files.values():
            file.forget(before)


_REFERENCE_ORDER = (Pool.buffer, Pool.controller, Pool.fleet, Pool.learner)


class _ProcessFile:
    """The records of one process. All returned times are converted to the clock that `set_reference` sets."""

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
                    self._is_broken = True  # stop reading, and keep the records before the damaged record
        if self.header and self.header["schema"] != SCHEMA:
            raise ValueError(
                f"{self._path} has records of schema {self.header['schema']}, but this version reads schema {SCHEMA}; "
                "use the version of asyncrl that wrote the file"
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
        """Sort key of the process. The clock of the process with the smallest key is the reference clock."""
        is_other = self.header["process"] != BUFFER_LANE
        return _REFERENCE_ORDER.index(self.header["pool"]), is_other, self.header["started_ns"]

    def set_reference(self, reference: Mapping[str, Any]) -> None:
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
        return self._offsets.shown(self.header["started_ns"])

    @property
    def end(self) -> int:
        return self._offsets.shown(self._last)

    def forget(self, before: int) -> None:
        before -= self._offsets.at(self._last)[0]
        self._closed = [(opened, end) for opened, end in self._closed if end >= before]
        self._stamps = [stamp for stamp in self._stamps if stamp[4] >= before]
        last_before = {(level[0], level[1]): level for level in self._levels if level[2] < before}
        self._levels = [*last_before.values(), *(level for level in self._levels if level[2] >= before)]

    def process(self) -> Process:
        offset, error = self._offsets.at(self._last)
        header = self.header
        return Process(
            name=header["process"],
            **{name: header[name] for name in ("pool", "host", "pid", "wall_ns")},
            start=self.start,
            end=self.end,
            offset_ns=offset,
            error_ns=error,
            num_dropped=self._num_dropped,
            lanes=tuple(sorted(self._lanes)),
            is_whole=not self._is_broken and self._num_whole == self._num_read,
        )

    def spans(self, end_of_open: int) -> Iterator[Span]:
        shown, process = self._offsets.shown, self.header["process"]
        ended = [*((items, shown(end), False) for items, end in self._closed)]
        for items, end, is_open in [*ended, *((items, end_of_open, True) for items in self._opened.values())]:
            _, lane, kind, start, version, step, group, cause = items
            end = max(shown(start), end)
            yield Span(lane, kind, shown(start), end, version, step, group, cause, process, is_open)

    def levels(self) -> Iterator[Level]:
        for name, lane, time, value in self._levels:
            yield Level(name, lane, self._offsets.shown(time), value, self.header["process"])

    def stamps(self) -> Iterator[Stamp]:
        shown, process = self._offsets.shown, self.header["process"]
        for event, group, attempt, lane, time, version, details in self._stamps:
            yield Stamp(event, group, attempt, lane, shown(time), version, details, process)


class ClockOffsets:
    """Converts times of a first clock to times of a second clock. All values are in nanoseconds.

    A measurement is a triple: a time of the first clock, the offset to the second clock at this time, and the largest
    error of the offset. Between two measurements, the offset is interpolated. A measurement is ignored if its error is
    larger than `_WORST_OF_BEST` times the smallest error. Without measurements, the offset is 0.
    """

    def __init__(self, measured: Iterable[tuple[int, int, int]] = ()) -> None:
        rows = sorted(measured)
        best = min((error for _, _, error in rows), default=0)
        self._measured = [row for row in rows if row[2] <= _WORST_OF_BEST * best]

    def at(self, time: int) -> tuple[int, int]:
        """Return a pair: the offset between the clocks at ``time``, and the largest error of this offset.

        Both are in nanoseconds. ``time`` is a time of the first clock.
        """
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
        """Convert a time of the first clock, in nanoseconds, to a time of the second clock."""
        return time + self.at(time)[0] if self._measured else time
