"""What each process of a run notes of its time: spans, levels and group stamps, one append-only file per process.

A process calls `start` once; from then on `span`, `level` and `stamp` write to its file, from any thread. In a process
that never called `start` they do nothing. The caller never waits: a thread of its own writes what was noted, at once
and at most every 50 ms, woken by the first note. What a process noted more than that before it was killed is in its
file. `asyncrl.profile.trace` reads the files of a run. Here, at the bottom of the layers, is the half that every
package may import.

The file ``<process>@<host>-<pid>.msgpack`` is a stream of msgpack arrays, each of which begins with its `Tag`. Times
are integer nanoseconds of the process's own monotonic clock; `clock` notes how it stands against the buffer server's.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import msgpack

logger = logging.getLogger(__name__)

NONE = -1
"""Stands for no version, step or group."""
SCHEMA = 1
_WRITE_EVERY_S = 0.05
_MAX_UNWRITTEN_BYTES = 8 << 20
_CLOSE_TIMEOUT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """What a run records of itself; see docs/profiling.md.

    Attributes:
        enabled: Record spans, levels and group stamps in the run's ``profile/``.
        advice: Replay the record after the last step, to find the option that would have made the run faster.
        torch_steps: Learner steps of which each rank also writes a trace of torch.profiler. Example: ``[10, 11]``.
        max_file_bytes: Largest file of a process; what would go beyond is dropped, and counted.
        directory: Where processes write; the run sets it: its folder's ``profile/``. Empty records nothing.
    """

    enabled: bool = True
    advice: bool = True
    torch_steps: list[int] = field(default_factory=list)
    max_file_bytes: int = 1 << 30
    directory: str = ""

    def __post_init__(self) -> None:
        if negative := [step for step in self.torch_steps if step < 0]:
            raise ValueError(f"profile.torch_steps must be learner steps >= 0, got {negative}; the first step is 0")
        if self.max_file_bytes < 1 << 20:
            raise ValueError(f"profile.max_file_bytes must be >= 1048576, got {self.max_file_bytes}; 1 GiB is usual")
        if self.torch_steps and not self.enabled:
            raise ValueError("profile.torch_steps needs profile.enabled=true, got false; enable it, or name no steps")


class Pool(StrEnum):
    """What a process works for."""

    controller = "controller"
    buffer = "buffer"
    fleet = "fleet"
    learner = "learner"


class SpanKind(StrEnum):
    """What a lane does for a while. A lane's spans nest; `asyncrl.profile.attribution` says which of them count."""

    # Controller: lanes ``controller``, ``controller/plan``, ``controller/complete``, ``controller/publish``
    step = "step"  # from the commit of the step before, or the begin of training, to the step's own
    plan_wait = "plan_wait"  # the plan loop waits for a batch
    dispatched = "dispatched"  # a planned step is with the ranks
    evaluation = "evaluation"  # also on an engine's lane, while it answers held-out prompts
    checkpoint = "checkpoint"  # also on a rank's lane, while it is blocked
    # Engines: lane ``engine-0``
    start = "start"  # until the first weights are verified
    down = "down"  # failed, fenced or restarting
    stage = "stage"  # weights are brought near while generation goes on
    pause = "pause"  # generation stands still for new weights
    load_stage = "load_stage"  # a part of a load, on lane ``engine-0/load``; ``cause`` names it
    re_prefill = "re_prefill"  # from the end of a pause to the next token of what runs
    released = "released"  # the device is the learner's (colocated)
    # Members: lane ``engine-0/member``, and of its worker, by the controller, ``engine-0/worker``
    member = "member"  # one state of it; ``cause`` names the state
    # Rollout workers: lane ``engine-0/reward``
    reward = "reward"
    # Learner: lane ``learner-0`` per rank, ``learner-0/publish`` of its publisher thread
    update = "update"  # a rank's whole step
    score = "score"
    fetch = "fetch"
    forward = "forward"
    backward = "backward"
    optimizer = "optimizer"
    offload = "offload"
    wait_ranks = "wait_ranks"  # done, and waits for the other ranks
    publish_copy = "publish_copy"  # the rank is blocked
    publish = "publish"  # in the background, from the copy to the offer
    publish_stage = "publish_stage"  # a part of `publish`, or of making the next one's file ready; ``cause`` names it


class LevelName(StrEnum):
    """A count that stays until its next change."""

    # Per engine, in places for samples: running + tail + settling + parked + free = capacity
    capacity = "capacity"
    running = "running"  # the engine has the sample
    tail = "tail"  # the sample is finished, others of its group run
    settling = "settling"  # free, and a finished group is still with its reward, its environment, or on its way
    parked = "parked"  # cut off for new weights
    asking = "asking"  # 1 while the worker waits for admission
    version = "version"  # served by the engine; on the buffer's lane: the learner's committed version
    # Buffer: lane ``buffer``, in groups unless said otherwise
    queued = "queued"
    leased = "leased"
    stored = "stored"
    planned = "planned"
    budget = "budget"  # groups that may begin now at the learner's version
    full = "full"  # 1 while bytes keep a group from beginning
    bytes = "bytes"  # held trajectories and prefixes
    # Per member, on its lane
    epoch = "epoch"  # its faults so far
    # Per process, on its own lane, once per step
    cpu = "cpu"  # microseconds of processor time since it began


class GroupEvent(StrEnum):
    """A moment in the life of a prompt group; see `stamp` for what comes with each."""

    lease = "lease"
    first_token = "first_token"
    last_token = "last_token"
    reward = "reward"
    stored = "stored"
    planned = "planned"
    trained = "trained"
    requeued = "requeued"
    dropped = "dropped"


class Tag(IntEnum):
    """First item of a record, and what follows it."""

    header = 0  # a map: schema, process, pool, host, pid, clock, started_ns, wall_ns
    open = 1  # id, lane, kind, start, version, step, group, cause
    close = 2  # id, end
    level = 3  # name, lane, time, value
    stamp = 4  # event, group, attempt, lane, time, version, details
    clock = 5  # reference clock, time, offset, error
    dropped = 6  # records lost since the last record


class OpenSpan:
    """A span that has begun; `close` ends it, as leaving its block does. Closed more than once, it ended first."""

    __slots__ = ("_number", "_recorder")

    def __init__(self, recorder: Recorder | None, number: int) -> None:
        self._recorder = recorder
        self._number = number

    def close(self) -> None:
        """The span ends now."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.end_span(self._number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()


NO_SPAN = OpenSpan(None, 0)
"""Already closed."""


class RecordFile:
    """Appends packed records to a file, on a thread of its own, which `add` wakes.

    Holds at most 8 MiB that is not written yet, and writes at most ``max_bytes`` in all; what does not fit is dropped,
    and counted. A file that cannot be written is left as it is, and said once in the process's log.
    """

    def __init__(self, path: Path, *, max_bytes: int) -> None:
        """Make the file. Raises `OSError` where that is not possible."""
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_EXCL, 0o644)
        self._left_bytes = max_bytes
        self._unwritten: deque[bytes] = deque()
        self._num_bytes = 0
        self._num_dropped = 0
        self._is_closing = self._has_failed = False
        self._lock = threading.Lock()
        self._wakes = threading.Event()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._write_until_closed, name="record", daemon=True)
        self._thread.start()

    @property
    def num_dropped(self) -> int:
        """Records that were not taken."""
        return self._num_dropped

    def add(self, record: bytes) -> bool:
        """Take a record to be written; returns whether it was taken."""
        with self._lock:
            if self._has_failed or self._is_closing or self._num_bytes + len(record) > self._room():
                self._num_dropped += 1
                return False
            self._unwritten.append(record)
            self._num_bytes += len(record)
        if not self._wakes.is_set():
            self._wakes.set()
        return True

    def close(self) -> None:
        """Write what is left and close the file; may be called more than once."""
        with self._lock:
            self._is_closing = True
        self._ends.set()
        self._wakes.set()
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _room(self) -> int:
        return min(_MAX_UNWRITTEN_BYTES, self._left_bytes)

    def _write_until_closed(self) -> None:
        num_reported = 0
        while not (self._is_closing and not self._unwritten):
            self._wakes.wait()
            self._wakes.clear()
            records, num_dropped = self._taken()
            if num_dropped > num_reported:
                records.append(_packed(Tag.dropped, num_dropped - num_reported))
                num_reported = num_dropped
            try:
                _write_all(self._file, b"".join(records))
            except OSError as error:
                logger.warning("nothing more is recorded: cannot write %s: %s", self._path, error.strerror)
                with self._lock:
                    self._has_failed = True
                break
            self._ends.wait(_WRITE_EVERY_S)
        os.close(self._file)

    def _taken(self) -> tuple[list[bytes], int]:
        with self._lock:
            records = list(self._unwritten)
            self._unwritten.clear()
            self._left_bytes -= self._num_bytes
            self._num_bytes = 0
            return records, self._num_dropped


class Recorder:
    """Notes what one process does, in the order it is told.

    Args:
        directory: Gets the file; made where it is missing.
        process: Name in the run, and the lane where none is given. Example: ``learner-0``.
        pool: What it works for.
        max_file_bytes: See `ProfileConfig`.
        clock: Nanoseconds; monotonic.
        host: Of the machine.
    """

    def __init__(
        self,
        directory: Path,
        *,
        process: str,
        pool: Pool,
        max_file_bytes: int = ProfileConfig.max_file_bytes,
        clock: Callable[[], int] = time.monotonic_ns,
        host: str = "",
    ) -> None:
        self.process = process
        self._clock = clock
        self._levels: dict[tuple[str, str], int] = {}
        self._num_spans = 0
        self._lock = threading.Lock()
        host = host or socket.gethostname()
        directory.mkdir(parents=True, exist_ok=True)
        self._file = RecordFile(_free_path(directory, f"{process}@{host}-{os.getpid()}"), max_bytes=max_file_bytes)
        header = {
            "schema": SCHEMA,
            "process": process,
            "pool": pool.value,
            "host": host,
            "pid": os.getpid(),
            "clock": clock_id(),
            "started_ns": clock(),
            "wall_ns": time.time_ns(),
        }
        self._add(Tag.header, header)

    @property
    def num_dropped(self) -> int:
        """Records for which there was no room."""
        return self._file.num_dropped

    def span(
        self,
        kind: str,
        *,
        lane: str = "",
        version: int = NONE,
        step: int = NONE,
        group: int = NONE,
        cause: str = "",
        start: int | None = None,
    ) -> OpenSpan:
        """Begin a span now, or at ``start``; it is written at once, so that one that never ends is seen."""
        with self._lock:
            self._num_spans += 1
            number = self._num_spans
        start = self._clock() if start is None else start
        is_kept = self._add(Tag.open, number, self._whole(lane), kind, start, version, step, group, cause)
        return OpenSpan(self if is_kept else None, number)

    def end_span(self, number: int, end: int | None = None) -> None:
        """End a span by its number; `OpenSpan.close` does."""
        self._add(Tag.close, number, self._clock() if end is None else end)

    def level(self, name: str, value: int, *, lane: str = "") -> None:
        """Note that a count is at ``value`` from now on; written where that is a change."""
        lane = self._whole(lane)
        if self._levels.get((name, lane)) != value and self._add(Tag.level, name, lane, self._clock(), value):
            self._levels[name, lane] = value

    def stamp(
        self, event: str, group: int, *, attempt: int = 0, version: int = NONE, lane: str = "", **details: Any
    ) -> None:
        """Note a moment of a prompt group; see the function `stamp`."""
        self._add(Tag.stamp, event, group, attempt, self._whole(lane), self._clock(), version, details)

    def clock(self, reference: str, *, offset_ns: int, error_ns: int) -> None:
        """Note that the clock ``reference`` now shows this process's time plus ``offset_ns``, within ``error_ns``."""
        self._add(Tag.clock, reference, self._clock(), offset_ns, error_ns)

    def close(self) -> None:
        """Write what is left; what is noted afterwards is lost. May be called more than once."""
        self._file.close()

    def _whole(self, lane: str) -> str:
        return self.process + lane if not lane or lane[0] == "/" else lane

    def _add(self, tag: Tag, *items: Any) -> bool:
        return self._file.add(_packed(tag, *items))


_recorder: Recorder | None = None


def start(config: ProfileConfig, *, process: str, pool: Pool) -> None:
    """Record this process from now on, as the options say; a process that records already goes on with that.

    A folder that cannot be written is no reason for a run to end: it is said in the log, and nothing is recorded.
    """
    global _recorder
    if _recorder is not None or not config.enabled or not config.directory:
        return
    try:
        directory = Path(config.directory)
        _recorder = Recorder(directory, process=process, pool=pool, max_file_bytes=config.max_file_bytes)
    except OSError as error:
        logger.warning("%s is not recorded: cannot write to %s: %s", process, config.directory, error.strerror)


def stop() -> None:
    """Write what is left, and record no more; may be called in a process that never recorded."""
    global _recorder
    recorder, _recorder = _recorder, None
    if recorder is not None:
        recorder.close()


def current() -> Recorder | None:
    """This process's recorder; None where it does not record: ask before gathering what only a record needs."""
    return _recorder


def span(
    kind: str,
    *,
    lane: str = "",
    version: int = NONE,
    step: int = NONE,
    group: int = NONE,
    cause: str = "",
) -> OpenSpan:
    """Begin a span on a lane, the process's own unless named; its block, or `OpenSpan.close`, ends it.

    Args:
        kind: See `SpanKind`.
        lane: What does it; one that begins with a slash is a part of the process's own. Example: ``/reward``.
        version: Policy version that it is about.
        step: Learner step that it is part of.
        group: Prompt group that it is about.
        cause: Says more where the kind does not suffice.
    """
    if _recorder is None:
        return NO_SPAN
    return _recorder.span(kind, lane=lane, version=version, step=step, group=group, cause=cause)


def level(name: str, value: int, *, lane: str = "") -> None:
    """Note that a count of a lane is at ``value`` from now on; see `LevelName`."""
    if _recorder is not None:
        _recorder.level(name, value, lane=lane)


def cpu() -> None:
    """Note the processor time of this process; see `LevelName.cpu`."""
    level(LevelName.cpu, time.process_time_ns() // 1000)


def stamp(event: str, group: int, *, attempt: int = 0, version: int = NONE, lane: str = "", **details: Any) -> None:
    """Note a moment in the life of a prompt group; ``details`` are whatever msgpack takes.

    What comes with each `GroupEvent`:

    - lease: ``version`` at which it is admitted, ``deadline`` the last one that may consume it, ``inherited`` tokens of
      a saved prefix.
    - first_token, last_token, reward: ``version`` of the engine then; they are on the engine's lane. A
      group that is continued from a saved prefix has its first_token of this attempt.
    - stored: ``version`` of the oldest token, ``newest``, ``learner`` the learner's then, ``tokens`` of the policy,
      ``prompt_tokens``, ``lengths`` [G] of the responses, ``rewards`` [G], ``bytes``.
    - planned, trained: ``version`` the step that takes it.
    - requeued, dropped: ``reason``; of a finished group also what ``stored`` has, of a released one ``tokens``.

    ``attempt`` is -1 where the event is the group's, whatever its attempt.
    """
    if _recorder is not None:
        _recorder.stamp(event, group, attempt=attempt, version=version, lane=lane, **details)


def clock(reference: str, *, offset_ns: int, error_ns: int) -> None:
    """Note how this process's clock stands against the one of ``reference``; see `Recorder.clock`."""
    if _recorder is not None:
        _recorder.clock(reference, offset_ns=offset_ns, error_ns=error_ns)


def torch_trace_name(step: int, role: str, rank: int | str) -> str:
    """The file beside the records with torch.profiler's trace of a role's step on a rank."""
    return f"torch-step{step}-{role}-{rank}.json.gz"


@cache
def clock_id() -> str:
    """Names the monotonic clock of this process: all processes of a boot of a machine share one."""
    parts = []
    with suppress(OSError):
        parts = [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/time")]
    return " ".join(parts) or f"{socket.gethostname()} {os.getpid()}"


def _packed(tag: Tag, *items: Any) -> bytes:
    return cast("bytes", msgpack.packb([int(tag), *items]))


def _free_path(directory: Path, name: str) -> Path:
    """A path that no file has: a process may be recorded twice, one time after the other."""
    paths = (directory / f"{name}{suffix}.msgpack" for suffix in ("", *(f"-{count}" for count in range(2, 10_000))))
    return next(path for path in paths if not path.exists())


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
