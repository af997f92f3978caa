"""Stores on disk what a restarted server needs: the ledger's latest snapshot, all later commands, and frames.

Frames are the encoded bytes of prompts, saved prefixes and trajectories. ``PATH.N.log`` holds the commands and their
outcomes in order, with small frames. The journal writes a command before the server replies to any client. One write
stores all puts (finished groups) that arrive together. ``PATH.N.frames`` holds large frames. A thread writes large
frames before the journal writes the command that refers to these frames.

Written records survive the death of the process, but a power failure may lose the latest writes. So every record has a
checksum, and a reader stops at the first broken record. When the files have grown, the server calls `Journal.compact`,
which begins a new log and a new file of frames.
"""

import asyncio
import fcntl
import logging
import mmap
import os
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial, reduce
from operator import or_
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import msgspec
import xxhash

from asyncrl.core.errors import ReplayBufferError

from .commands import Put
from .frames import Frames, FramesOnDisk, LoggedFrames, Written, frames_at
from .records import Command, LedgerOutcome, Row, leaves

logger = logging.getLogger(__name__)

FORMAT = 11
"""Increase this number when records change, except when a record gets a new last field with a default value."""
_MAGIC = b"asyncrl buffer journal %d\n" % FORMAT
_COMPACT_BYTES = 16 * 1024**2
_GROW_BYTES = 4 * 1024**2
_MAX_PUT_BYTES = 4096
"""Bytes reserved in the file for a put (a finished group) without its frames. A larger put reserves more later."""
_MAX_PARTS = 1024
_HEADER = struct.Struct("<QIQ")
"""The start of a record: checksum (xxh3) of head and frames, bytes of the head, and bytes of the frames."""

AnyCommand: TypeAlias = reduce(or_, leaves(Command))  # type: ignore
AnyOutcome: TypeAlias = reduce(or_, leaves(LedgerOutcome))  # type: ignore
Reference = tuple[str, int, int, tuple[int, ...]]
"""Kind of frames, key, place (the number of the frames in the journal), and length of each frame. The lengths are empty
if another record has the frames. Place 0 drops the frames of this kind and key. `Journal` describes the keys."""


class Head(Row, frozen=True, tag=True):
    """The head of a record. The frames whose lengths are in ``references`` follow the head."""

    references: tuple[Reference, ...] = ()


class Begin(Head, frozen=True, kw_only=True):
    """The first record of a log.

    The record has the values that `Journal.write` stored, the ledger's snapshot, and references to all frames of the
    server.
    """

    values: dict[str, Any]
    snapshot: dict[str, Any] | None


class Value(Head, frozen=True, kw_only=True):
    """A value that `Journal.write` stored."""

    name: str
    value: Any


class Decided(Head, frozen=True, kw_only=True):
    """A record of commands and their outcomes. An outcome is the ledger's decision about a command."""

    decided: tuple[tuple[AnyCommand, AnyOutcome], ...]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Head | Begin | Value | Decided).decode


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovered:
    """The contents of a journal when a server opens it.

    Attributes:
        snapshot: The ledger's latest snapshot; None in a new journal.
        commands: The commands after the snapshot, in order, with their outcomes.
        frames: Frames on disk by kind (``prompt``, ``payload``, ``progress``) and key.
        num_lost_prompts: Number of groups whose prompt is lost, because a file is damaged or missing.
    """

    snapshot: dict[str, Any] | None = None
    commands: Sequence[tuple[Command[Any, Any], LedgerOutcome]] = ()
    frames: Mapping[str, dict[int, FramesOnDisk]] = field(default_factory=dict)
    num_lost_prompts: int = 0


class AppendOnlyFile:
    """A file of records with checksums. A record is a head (plain values) and frames."""

    def __init__(self, path: Path, *, is_read_only: bool = False) -> None:
        self.path = path
        self._is_read_only = is_read_only
        self._descriptor = os.open(path, os.O_RDONLY if is_read_only else os.O_CREAT | os.O_RDWR, 0o600)
        self.num_bytes = 0
        self._num_reserved = os.fstat(self._descriptor).st_size

    def read(self) -> Iterator[tuple[Any, int]]:
        """Yield a pair for each record: its `Head`, and the offset of its frames in bytes.

        Stop at the first record that is incomplete or has a wrong checksum, and truncate a writable file there. Raises
        `ValueError` if the file is not a journal of this format.
        """
        end = 0
        if os.fstat(self._descriptor).st_size:
            with mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ) as data:
                magic = data[: len(_MAGIC)]
                if not _MAGIC.startswith(magic.rstrip(b"\0")):  # reserved bytes are zero until a record is written
                    raise ValueError(
                        f"{self.path} is not a journal of format {FORMAT}: it begins with {magic!r}; use the release "
                        "that wrote the file, or another buffer.directory"
                    )
                end = len(_MAGIC) if magic == _MAGIC else 0
                while end and (record := self._record_at(data, end)) is not None:
                    head, start, end = record
                    yield head, start
                if end and end + _HEADER.size <= len(data):
                    _, head_bytes, frames_bytes = _HEADER.unpack_from(data, end)
                    if self._record_at(data, end + _HEADER.size + head_bytes + frames_bytes) is not None:
                        logger.warning("%s is damaged at byte %d; later records are lost", self.path, end)
        self.cut(end)

    def _record_at(self, data: mmap.mmap, start: int) -> tuple[Any, int, int] | None:
        """Return a record's (head, start of frames, end) tuple, or None if the record is incomplete or damaged."""
        if start + _HEADER.size > len(data):
            return None
        checksum, head_bytes, frames_bytes = _HEADER.unpack_from(data, start)
        body = start + _HEADER.size
        end = body + head_bytes + frames_bytes
        if end > len(data):
            return None
        with memoryview(data) as whole, whole[body:end] as found:
            if xxhash.xxh3_64_intdigest(found) != checksum:
                return None
        return _decode(data[body : body + head_bytes]), body + head_bytes, end

    def frames_at(self, start: int, lengths: Sequence[int]) -> Frames:
        """Return consecutive frames of the file, from byte ``start`` on, as a list of bytes.

        ``lengths`` holds the size of each frame. Raises `OSError` if the file cannot be read.
        """
        return frames_at(self._descriptor, start, lengths, self.path)

    def append(self, records: Iterable[tuple[Any, Frames]]) -> list[Written]:
        """Write (head, frames) records at the end of the file. Returns the position of each record's frames.

        Raises `OSError` if the write fails. The next write then begins at the old end of the file.
        """
        parts: list[Any] = [] if self.num_bytes else [_MAGIC]
        size = sum(map(len, parts))
        written: list[Written] = []
        for head, frames in records:
            packed = _encode(head)
            checksum, num_bytes = xxhash.xxh3_64(packed), 0
            for frame in frames:
                checksum.update(frame)
                num_bytes += len(frame)
            parts += (_HEADER.pack(checksum.intdigest(), len(packed), num_bytes), packed, *frames)
            start = self.num_bytes + size + _HEADER.size + len(packed)
            written.append(Written(start, len(packed), checksum.intdigest()))
            size += _HEADER.size + len(packed) + num_bytes
        self.reserve(size)
        write_all(self._descriptor, parts, self.num_bytes)
        self.num_bytes += size
        return written

    def reserve(self, num_bytes: int) -> None:
        """Reserve at least ``num_bytes`` bytes on the disk for the next records. Raises `OSError` on failure."""
        needed = self.num_bytes + num_bytes - self._num_reserved
        if needed <= 0:
            return
        more = max(needed, min(self.num_bytes // 2, _GROW_BYTES))
        try:
            os.posix_fallocate(self._descriptor, self._num_reserved, more)
        except OSError:
            more = needed
            os.posix_fallocate(self._descriptor, self._num_reserved, more)
        self._num_reserved += more

    def cut(self, num_bytes: int) -> None:
        """Truncate the file after ``num_bytes`` bytes. A read-only file stays unchanged."""
        if not self._is_read_only:
            os.ftruncate(self._descriptor, num_bytes)
        self.num_bytes = self._num_reserved = num_bytes

    def sync(self) -> None:
        """Wait until all writes are on the disk."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file, and free its reserved bytes."""
        with suppress(OSError):
            self.cut(self.num_bytes)
        os.close(self._descriptor)

    def delete(self) -> None:
        """Remove and close the file."""
        self.path.unlink(missing_ok=True)
        self.close()


def write_all(descriptor: int, parts: list[Any], offset: int) -> None:
    """Write the buffers ``parts`` one after the other, from byte ``offset`` of an open file.

    Raises `OSError` if a write fails, possibly after some bytes.
    """
    first = 0
    while first < len(parts):
        written = os.pwritev(descriptor, parts[first : first + _MAX_PARTS], offset)
        offset += written
        while first < len(parts) and written >= len(parts[first]):
            written -= len(parts[first])
            first += 1
        if written:
            parts[first] = memoryview(parts[first])[written:]


class _FramesInFile(NamedTuple):
    file: AppendOnlyFile
    start: int
    lengths: Sequence[int]

    def held(self, place: int) -> FramesOnDisk:
        read = self.file.frames_at(self.start, self.lengths)
        return FramesOnDisk(self.file.path, Written.without_head(self.start, read), self.lengths, place=place)


class Contents:
    """The state that the records of a log describe.

    Attributes:
        values: The values that `Journal.write` stored.
        places: Maps (kind, key) to the place of the frames (their number in the journal). The kinds are those of
            `Recovered.frames`.
        next_place: The place of the next frames: the largest place so far plus 1.
        recovered: The state that a server continues from.
    """

    def __init__(self, heads: Iterable[Head], by_place: Mapping[int, _FramesInFile]) -> None:
        self.values: dict[str, Any] = {}
        self.places: dict[tuple[str, int], int] = {}
        snapshot, done, used = None, [], [0, *by_place]
        for head in heads:
            match head:
                case Begin():
                    self.values, snapshot, done = head.values, head.snapshot, []
                case Value():
                    self.values[head.name] = head.value
                case Decided():
                    done += head.decided
            used += refer(self.places, head.references)
        self.next_place = max(used) + 1
        frames: dict[str, dict[int, FramesOnDisk]] = {}
        for (name, key), place in self.places.items():
            if place in by_place:
                frames.setdefault(name, {})[key] = by_place[place].held(place)
        num_lost = sum(name == "prompt" and place not in by_place for (name, _), place in self.places.items())
        self.recovered = Recovered(snapshot=snapshot, commands=done, frames=frames, num_lost_prompts=num_lost)


def refer(places: dict[tuple[str, int], int], references: Iterable[Reference]) -> list[int]:
    """Apply ``references`` to ``places``, a map from (kind, key) to the frames' place (number in the journal).

    A reference with place 0 removes its (kind, key) from ``places``. Returns the place of each reference.
    """
    for name, key, place, _ in references:
        if place:
            places[name, key] = place
        else:
            places.pop((name, key), None)
    return [place for _, _, place, _ in references]


def numbers_of(path: Path) -> list[int]:
    """Return the numbers N of the files ``PATH.N.log``, ascending."""
    return sorted(int(log.name.split(".")[-2]) for log in path.parent.glob(f"{path.name}.*.log"))


def read_values(path: Path) -> dict[str, Any]:
    """Return the named values that `Journal.write` stored in the files ``PATH.N.log``, as a dict.

    Raises the errors of `read_contents`.
    """
    return _read(path, with_frames=False).values


def read_contents(path: Path) -> Contents:
    """Return the state in the files ``PATH.N.log`` of an ended server or of a checkpoint. The files stay unchanged.

    Raises:
        ReplayBufferError: The files cannot be read, or hold no complete log.
        ValueError: A file has another format.
    """
    return _read(path, with_frames=True)


def _read(path: Path, *, with_frames: bool) -> Contents:
    by_place: dict[int, _FramesInFile] = {}
    heads: list[Head] = []
    files: list[AppendOnlyFile] = []
    try:
        for number in numbers_of(path):
            files.append(AppendOnlyFile(Path(f"{path}.{number}.log"), is_read_only=True))
            found = [*_read_records(files[-1], by_place)]
            # ``PATH.N.frames`` may be missing, because the server has copied the needed frames to a later file.
            if with_frames and (payloads := Path(f"{path}.{number}.frames")).exists():
                files.append(AppendOnlyFile(payloads, is_read_only=True))
                deque(_read_records(files[-1], by_place), maxlen=0)
            heads = found if found and isinstance(found[0], Begin) else heads
        if not heads:
            raise ReplayBufferError(
                f"{path} holds no complete log: {path.name}.NUMBER.log is missing or damaged; use another checkpoint, "
                "or the folder of a buffer"
            )
        return Contents(heads, by_place if with_frames else {})
    except OSError as error:
        raise ReplayBufferError(f"{error.filename or path} cannot be read: {error.strerror}") from error
    finally:
        for file in files:
            file.close()


@dataclass(kw_only=True, slots=True)
class _Write:
    """Frames that the journal's thread must write, each with its place (number in the journal).

    After the write, the event loop calls ``then``: with ``written``, or with the error if the write failed.
    """

    frames: Sequence[tuple[int, Frames]]
    then: Callable[[Sequence[FramesOnDisk] | ReplayBufferError], None]
    written: list[FramesOnDisk] = field(default_factory=list)


def lock_journal(path: Path) -> int:
    """Lock the journal at ``path``, and return a file descriptor. Closing the descriptor releases the lock.

    Raises `ReplayBufferError` if another process holds the lock.
    """
    lock = os.open(f"{path}.lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise ReplayBufferError(
            f"{path} is held by another server; stop that server, or give this run another buffer.directory"
        ) from error
    return lock


class Journal:
    """The journal of one server: the files ``PATH.N.log`` and ``PATH.N.frames``.

    A command refers to frames by their *place*, a number that is unique in the journal. Frames also have a *key*: a
    group id, or in a store server's journal an integer that `number_of` makes from a group id and an attempt number.

    Raises:
        ReplayBufferError: The files cannot be opened, or another server has them open.
        ValueError: The files are not a journal, or have another format.

    Attributes:
        on_written: Called after each write of the journal's thread, and after the callbacks of the written frames.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.on_written: Callable[[], None] = lambda: None
        self._values: dict[str, Any] = {}
        self._places: dict[tuple[str, int], int] = {}
        self._next_place = 1
        self._pending: list[_Write] = []
        self._writing: list[_Write] = []
        self._start_handle: asyncio.Handle | None = None
        self._retiring: threading.Thread | None = None
        self._base_bytes = self._retry_above = 0
        self._is_compacting = self._closed = False
        self._later: list[tuple[Command[Any, Any], LedgerOutcome, LoggedFrames]] = []
        self._num_later_bytes = 0
        try:
            self._lock = lock_journal(path)
            try:
                self._recovered = self._open()
            except BaseException:
                os.close(self._lock)
                raise
        except OSError as error:
            raise self._error("opened", error) from error
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="journal")

    # The state of an earlier server

    def _open(self) -> Recovered:
        """Open all files, and return their state. Continue the newest valid log. If there is none, begin a new log."""
        numbers = numbers_of(self._path)
        by_place: dict[int, _FramesInFile] = {}
        heads: list[Head] = []
        self._former: list[AppendOnlyFile] = []
        self._number = max(numbers, default=0)
        for number in numbers:
            log, payloads = self._pair(number)
            found = [*_read_records(log, by_place)]
            deque(_read_records(payloads, by_place), maxlen=0)
            if found and isinstance(found[0], Begin):
                self._former += [self._log, self._frames] if heads else []
                self._log, self._frames, heads = log, payloads, found
            else:
                self._former += [log, payloads]
        if not heads:
            self._number += 1
            self._log, self._frames = self._pair(self._number)
            self._log.append([(Begin(values={}, snapshot=None), ())])
        contents = Contents(heads, by_place)
        self._values, self._places, self._next_place = contents.values, contents.places, contents.next_place
        return contents.recovered

    def _pair(self, number: int) -> tuple[AppendOnlyFile, AppendOnlyFile]:
        log, frames = (Path(f"{self._path}.{number}.{kind}") for kind in ("log", "frames"))
        return AppendOnlyFile(log), AppendOnlyFile(frames)

    def recover(self) -> Recovered:
        """Return the state of an earlier server that the journal's files contained when the journal was opened.

        Call this method only once, because it drops the state from memory. A later call returns an empty state.
        """
        recovered, self._recovered = self._recovered, Recovered()
        return recovered

    def begin_anew(self) -> None:
        """Drop the whole state of an earlier server: its values, snapshot, commands and frames.

        Raises `ReplayBufferError` if the write fails.
        """
        self._recovered, self._values = Recovered(), {}
        self.compact(None, ())

    def begin_from(self, recovered: Recovered) -> None:
        """Begin this new journal with a copy of ``recovered``, the contents of another journal.

        The call waits until the copy is on the disk, and logs unreadable frames as lost. Raises `ReplayBufferError` if
        the copy cannot be written.
        """
        references: list[Reference] = []
        self._places = {}
        try:
            for kind, table in recovered.frames.items():
                for key, frames in table.items():
                    place = self._places[kind, key] = self._place()
                    references.append((kind, key, place, ()))
                    _copy(self._frames, frames, place)
            self._frames.sync()
            begin = Begin(references=tuple(references), values=self._values, snapshot=recovered.snapshot)
            self._log.append([(begin, ()), (Decided(decided=tuple(recovered.commands)), ())])
            self._log.sync()
        except OSError as error:
            raise self._error("written", error) from error

    # What a running server writes: values, commands and frames

    def read(self, name: str) -> Any:
        """Return the value that `write` stored with the name ``name``, or None."""
        return self._values.get(name)

    def write(self, name: str, value: Any) -> None:
        """Store a value with a name. Raises `ReplayBufferError` if the write fails."""
        self._write_log([(Value(name=name, value=value), ())])
        self._values[name] = value

    def claim(self, owner: Mapping[str, Any]) -> None:
        """Record the owner (run and options) of a new journal. Check that an existing journal has the same owner.

        ``owner`` maps names to plain values. Example: ``{"run": "4f1c", "max_lag": 2}``.

        Raises:
            ValueError: An existing journal has another value.
            ReplayBufferError: The write fails.
        """
        found = self.read("owner")
        if found is None:
            self.write("owner", dict(owner))
            return
        for name, expected in owner.items():
            if found.get(name) != expected:
                raise ValueError(
                    f"{self._path} was written with {name}={found.get(name)!r}, but this server has {expected!r}; "
                    "start with the options of the journal, or give a new run another buffer.directory"
                )

    def record(self, command: Command[Any, Any], outcome: LedgerOutcome, frames: LoggedFrames) -> None:
        """Write a command, its outcome and its frames. Delay the write of a put (the command for a finished group).

        For a put, this call only reserves bytes in the file. `flush` or the next write to the log then writes the put.
        Raises `ReplayBufferError` if a write or the reservation fails.
        """
        num_bytes = self._num_later_bytes + _MAX_PUT_BYTES
        for parts in frames.values():
            num_bytes += 0 if isinstance(parts, int | FramesOnDisk) else sum(map(len, parts))
        self._later.append((command, outcome, frames))
        try:
            if type(command) is not Put:
                self._write_log([])
            else:
                self._log.reserve(num_bytes)
                self._num_later_bytes = num_bytes
        except (OSError, ReplayBufferError) as error:
            self._later.pop()
            raise self._error("written", error) if isinstance(error, OSError) else error from error

    def flush(self) -> None:
        """Write the puts that `record` delayed. Raises `ReplayBufferError` if the write fails."""
        if self._later:
            self._write_log([])

    def note(self, frames: LoggedFrames) -> None:
        """Record which frames the server now holds, and which frames it has dropped.

        ``frames`` maps (kind, key) to frames that the server holds, or to 0 for dropped frames. Raises
        `ReplayBufferError` if the write fails.
        """
        references, inline = self._references(frames.items())
        self._write_log([(Head(references=references), inline)])
        refer(self._places, references)

    def adopt(self, kind: str, key: int, frames: FramesOnDisk) -> FramesOnDisk:
        """Copy frames of another journal into this journal, and return the copy.

        ``kind`` and ``key`` identify the frames in this journal. Raises `OSError` if the frames cannot be read, and
        `ReplayBufferError` if the write fails.
        """
        read = frames.read()
        references, inline = self._references([((kind, key), read)])
        written = self._write_log([(Head(references=references), inline)])
        refer(self._places, references)
        return FramesOnDisk(self._log.path, written, map(len, read), place=self._places[kind, key])

    def _write_log(self, records: list[tuple[Head, Frames]]) -> Written:
        """Write one record with all commands that `record` delayed. Then write ``records``.

        Returns the position of the frames of the last record.
        """
        references: tuple[Reference, ...] = ()
        if self._later:
            references, inline = self._references(item for *_, frames in self._later for item in frames.items())
            decided = tuple((command, outcome) for command, outcome, _ in self._later)
            records.insert(0, (Decided(references=references, decided=decided), inline))
        try:
            *_, last = self._log.append(records)
        except OSError as error:
            raise self._error("written", error) from error
        refer(self._places, references)
        self._later, self._num_later_bytes = [], 0
        return last

    def _references(
        self, frames: Iterable[tuple[tuple[str, int], Frames | int]]
    ) -> tuple[tuple[Reference, ...], list[Any]]:
        references: list[Reference] = []
        inline: list[Any] = []
        for (name, key), parts in frames:
            if isinstance(parts, FramesOnDisk):
                place, written = parts.place, ()
            else:
                place, written = (parts, ()) if isinstance(parts, int) else (self._place(), parts)
            references.append((name, key, place, tuple(map(len, written))))
            inline += written
        return tuple(references), inline

    def _place(self) -> int:
        self._next_place += 1
        return self._next_place - 1

    def keep(self, frames: Frames, then: Callable[[FramesOnDisk | ReplayBufferError], None]) -> None:
        """Let the journal's thread write frames to the file of large frames.

        The thread reads the memory of the frames later, so do not change the frames before ``then`` is called. The
        event loop calls ``then`` after the write: with a `FramesOnDisk`, or with the error if the write failed.
        """
        views = [memoryview(frame) for frame in frames]

        def finish(kept: Sequence[FramesOnDisk] | ReplayBufferError) -> None:
            then(kept if isinstance(kept, ReplayBufferError) else kept[0])

        self._pending.append(_Write(frames=[(self._place(), views)], then=finish))
        self._schedule()

    def _schedule(self) -> None:
        if self._start_handle is None and not self._writing:
            self._start_handle = asyncio.get_running_loop().call_soon(self._start)

    def _start(self) -> None:
        self._start_handle = None
        if self._pending and not self._closed:
            self._writing, self._pending = self._pending, []
            written = asyncio.get_running_loop().run_in_executor(self._pool, _write, self._frames, self._writing)
            written.add_done_callback(self._finish)

    def _finish(self, written: asyncio.Future[list[OSError | None]]) -> None:
        writes, self._writing = self._writing, []
        if self._closed:
            return
        self._start()
        for write, error in zip(writes, written.result(), strict=True):
            write.then(write.written if error is None else self._error("written", error))
        self.on_written()

    def _error(self, what: str, error: OSError) -> ReplayBufferError:
        return ReplayBufferError(f"{self._path} cannot be {what}: {error.strerror}; check the disk and its permissions")

    # A copy for a checkpoint

    def link_to(self, path: Path) -> tuple[int, tuple[Reference, ...]]:
        """Make hard links ``PATH.N.log`` and ``PATH.N.frames`` to the journal's files, for a checkpoint.

        Each link keeps the number N of its file. Returns the largest of these numbers plus 1, and references to the
        frames that the server holds. The caller writes a log with the returned number and these references.

        Raises:
            OSError: A link fails, for example on another disk.
            ReplayBufferError: A write fails.
        """
        self.flush()
        for file in (*self._former, self._log, self._frames):
            os.link(file.path, f"{path}{file.path.name.removeprefix(self._path.name)}")
        return self._number + 1, tuple((*key, place, ()) for key, place in self._places.items())

    # A new pair of files

    def is_grown(self, *, is_urgent: bool = True) -> bool:
        """Return whether the files are so large that `compact` should be called. Returns False during compaction.

        ``is_urgent=False`` halves the size limit. Use False when compaction is cheap.
        """
        num_bytes = self._log.num_bytes + self._frames.num_bytes
        is_busy = self._is_compacting or (self._retiring is not None and self._retiring.is_alive())
        limit = (1 + is_urgent) * (2 * self._base_bytes + _COMPACT_BYTES)
        return num_bytes > max(limit, self._retry_above) and not is_busy

    def compact(self, snapshot: dict[str, Any] | None, frames: Iterable[tuple[str, int, Frames]]) -> None:
        """Begin a new pair of files, with a snapshot (plain values) instead of all commands.

        ``frames`` yields (kind, key, frames) for all frames that the server holds. The journal's thread copies the
        frames later. The old files stay until the copy is complete. Raises `ReplayBufferError` if the snapshot cannot
        be written. The journal then continues with the old files.
        """
        self.flush()
        held = {
            (kind, key): parts if isinstance(parts, FramesOnDisk) else [*map(memoryview, parts)]
            for kind, key, parts in frames
        }
        pair: Sequence[AppendOnlyFile] = ()
        try:
            pair = self._pair(self._number + 1)
            references = tuple((*key, self._places[key], ()) for key in held)
            pair[0].append([(Begin(references=references, values=self._values, snapshot=snapshot), ())])
        except OSError as error:
            self._retry_above = self._log.num_bytes + self._frames.num_bytes + _COMPACT_BYTES // 4
            for file in pair:
                file.delete()
            raise self._error("written", error) from error
        self._retry_above = 0
        base = [(self._places[key], parts) for key, parts in held.items()]
        # Copy also the frames that the journal's thread is still writing to the old file.
        base += [kept for write in self._writing for kept in write.frames]
        self._former += [self._log, self._frames]
        self._log, self._frames = pair
        self._number += 1
        self._places = {key: self._places[key] for key in held}
        self._is_compacting = True
        self._pending.insert(0, _Write(frames=base, then=partial(self._retire, self._writing)))
        self._schedule()

    def _retire(self, meanwhile: Sequence[_Write], kept: Sequence[FramesOnDisk] | ReplayBufferError) -> None:
        """Start a thread that deletes the old files.

        ``kept`` holds the copies of all frames in the new files, or the error if copying failed. After an error, the
        old files stay. ``meanwhile`` holds the writes to the old files that were incomplete when `compact` was called.
        The new files have copies of the frames of these writes. From now on, readers use the copies.
        """
        self._is_compacting = False
        self._base_bytes = self._log.num_bytes + self._frames.num_bytes
        if isinstance(kept, ReplayBufferError):
            logger.warning("the old files of the journal were not deleted: %s", kept)
            return
        copies = {frames.place: frames for frames in kept}
        for frames in (frames for write in meanwhile for frames in write.written):
            frames.move_to(copies[frames.place])
        old, new = [*self._former], (self._log, self._frames)
        self._retiring = threading.Thread(target=self._replace, args=(old, new), daemon=True)
        self._retiring.start()

    def _replace(self, old: Sequence[AppendOnlyFile], new: Sequence[AppendOnlyFile]) -> None:
        """Delete the old files when the new files are on the disk.

        A later server finds a file of frames only if the log with the same number exists. So each file of frames is
        deleted before its log. If this process dies between the two deletions, the later server deletes the log.
        """
        try:
            for file in new:
                file.sync()
            descriptor = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(descriptor)  # without this call, a power failure may remove the names of the new files
            finally:
                os.close(descriptor)
            for file in reversed(old):
                file.delete()
                self._former.remove(file)
        except OSError as error:
            logger.warning("the old files of the journal were not deleted yet: %s", error)

    def close(self) -> None:
        """Write the puts that `record` delayed, and close the files.

        Large frames are dropped if the journal's thread has not begun their write. No callback of `keep` is called.
        """
        with suppress(ReplayBufferError):
            self.flush()
        self._closed = True
        self._pool.shutdown()
        if self._retiring is not None:
            self._retiring.join()
        for file in (*self._former, self._log, self._frames):
            file.close()
        os.close(self._lock)


def _read_records(file: AppendOnlyFile, by_place: dict[int, _FramesInFile]) -> Iterator[Any]:
    for head, start in file.read():
        for _, _, place, lengths in head.references:
            if lengths:
                by_place[place] = _FramesInFile(file, start, lengths)
                start += sum(lengths)
        yield head


def _write(file: AppendOnlyFile, writes: Sequence[_Write]) -> list[OSError | None]:
    """Add the frames of all ``writes`` to the file. Return one error per write, or None for a successful write.

    One call of `AppendOnlyFile.append` adds all frames that are in memory. If this call fails, one call per write
    follows. Frames on disk are copied one at a time, to save memory.
    """
    new = [(write, place, frames) for write in writes for place, frames in write.frames if not _is_on_disk(frames)]
    try:
        written = file.append((_record(place, frames), frames) for _, place, frames in new)
    except OSError as error:
        return [error] if len(writes) == 1 else [result for write in writes for result in _write(file, [write])]
    for (write, place, frames), where in zip(new, written, strict=True):
        write.written.append(FramesOnDisk(file.path, where, map(len, frames), place=place))
    return [_copied(file, write) for write in writes]


def _copied(file: AppendOnlyFile, write: _Write) -> OSError | None:
    try:
        for place, frames in write.frames:
            if _is_on_disk(frames):
                _copy(file, frames, place)
    except OSError as error:
        return error
    return None


def _is_on_disk(frames: Frames) -> TypeGuard[FramesOnDisk]:
    return isinstance(frames, FramesOnDisk)


def _copy(file: AppendOnlyFile, frames: FramesOnDisk, place: int) -> None:
    """Copy ``frames`` to ``file``. Later reads use the copy. Unreadable frames are logged as lost."""
    try:
        read = frames.read()
    except OSError as error:
        logger.error("a group's trajectories or saved prefix are lost: %s", error)
        return
    (written,) = file.append([(_record(place, read), read)])
    frames.move(file.path, written, place=place)


def _record(place: int, frames: Frames) -> Head:
    return Head(references=(("", 0, place, tuple(map(len, frames))),))
