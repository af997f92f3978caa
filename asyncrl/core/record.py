"""Records what a process does, for the profile of a run: spans (intervals), levels (counts), stamps (group events).

Each record has a *lane*: the name of the process, or of a part of it such as ``learner-0/publish``. `span`, `level` and
`stamp` are thread-safe. A separate thread writes the records every 50 ms.

The file ``<process>@<host>-<pid>.msgpack`` is a stream of msgpack arrays. The first item of each array is its `Tag`.
Times are integer nanoseconds of the process's monotonic clock. `clock` records the offset to the buffer server's clock.
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

from asyncrl.core import receipts, stacks

logger = logging.getLogger(__name__)

NONE = -1
"""Number in a record that has no policy version, learner step or prompt group."""
SCHEMA = 1
_WRITE_EVERY_S = 0.05
_MAX_UNWRITTEN_BYTES = 8 << 20
_CLOSE_TIMEOUT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Options of the profile, which shows what each process of a run does over time.

    Attributes:
        enabled: Record activities (spans), changing counts (levels) and events of prompt groups (stamps) in the run's
            ``profile/``.
        advice: After the final step, simulate the run to find one option that would have made the run faster.
        torch_steps: Learner steps with a torch.profiler trace per rank. Example: ``[10, 11]``.
        max_file_bytes: Maximum size of the profile of one process. Further records are dropped and counted.
        directory: Folder of the profile; the run sets this option to its folder ``profile/``. If empty, nothing is
            recorded.
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
            raise ValueError(
                "profile.torch_steps needs profile.enabled=true, got false; enable it, or leave torch_steps empty"
            )


class Pool(StrEnum):
    """Groups of processes of a run. The records of a process name its group."""

    controller = "controller"
    buffer = "buffer"
    fleet = "fleet"
    learner = "learner"


class SpanKind(StrEnum):
    """The activity of a lane during an interval. A lane is a process or a part of a process.

    Spans of a lane may overlap. `asyncrl.profile.attribution` then chooses one of the spans for each point in time.
    """

    # Controller: lanes ``controller``, ``controller/plan``, ``controller/complete``, ``controller/publish``
    step = "step"  # from the end of the previous step, or the start of training, until the controller commits the step
    plan_wait = "plan_wait"  # the controller waits until the buffer has enough groups for a batch
    dispatched = "dispatched"  # from sending a batch to the learner's ranks until they have finished the step
    evaluation = "evaluation"  # a held-out evaluation; also on the lanes of the engines that answer its prompts
    checkpoint = "checkpoint"  # a checkpoint is saved; also on the lanes of ranks that are blocked by it
    # Engines: lane ``engine-0``
    start = "start"  # from the start of the engine until its first weights are verified
    down = "down"  # the engine has failed, is restarting, or is not allowed to serve
    stage = "stage"  # new weights are copied to the engine's host while the engine generates
    pause = "pause"  # generation is paused for new weights
    load_stage = "load_stage"  # a phase of loading weights, on lane ``engine-0/load``; ``cause`` names the phase
    re_prefill = "re_prefill"  # from the end of a pause to the next token of a running sample
    released = "released"  # the learner uses the GPU that it shares with the engine
    # Members: lane ``engine-0/worker``; the controller records them
    member = "member"  # the member is in the `MemberState` that ``cause`` names
    # Rollout workers: lane ``engine-0/reward``
    reward = "reward"
    # Learner: lane ``learner-0`` per rank, ``learner-0/publish`` for its publisher thread
    update = "update"  # a rank's whole step
    score = "score"
    fetch = "fetch"  # the rank waits for its batch; on ``learner-0/prepare``: the download of the batch
    prepare = "prepare"  # on lane ``learner-0/prepare``: the batch of the next step is fetched and packed
    forward = "forward"
    backward = "backward"
    optimizer = "optimizer"
    offload = "offload"
    wait_ranks = "wait_ranks"  # the rank waits for slower ranks
    publish_copy = "publish_copy"  # the rank copies its weights and is blocked
    publish = "publish"  # in the background: the copied weights are written or sent, until engines can load them
    publish_stage = "publish_stage"  # a phase of a publish or of its preparation; ``cause`` names the phase


class LevelName(StrEnum):
    """The name of a count that changes over time. A recorded value is valid until the next value."""

    # Per engine, in samples. ``capacity`` is the worker's current limit of samples on the engine.
    # Samples in ``running`` and ``parked`` use capacity, and so do single answers in ``tail``.
    # The used capacity may exceed the limit after the limit has shrunk, or if many environments request turns at once.
    # Samples in ``settling``, ``tool`` and ``environment`` use no capacity, and neither do episodes in ``tail``.
    # The worker counts samples that use no capacity only up to the unused capacity.
    capacity = "capacity"
    running = "running"  # requests that the engine has not answered; each request samples one turn
    tail = "tail"  # finished samples of groups with unfinished samples
    settling = "settling"  # samples of groups that the worker scores, stores or gives back
    tool = "tool"  # episodes without a running turn, in which a tool runs
    environment = "environment"  # episodes without a running turn, in which no tool runs
    parked = "parked"  # unfinished turns without a request: their group waits for new weights, or leaves the worker
    asking = "asking"  # 1 while the worker waits for permission to generate further groups
    version = "version"  # policy version of the engine; on the buffer's lane, the learner's policy version
    # Buffer: lane ``buffer``, in groups unless another unit is given
    queued = "queued"
    leased = "leased"
    stored = "stored"
    planned = "planned"
    budget = "budget"  # number of groups that workers may start now
    full = "full"  # 1 while workers may not start groups, because one more group may exceed the buffer's limit on bytes
    bytes = "bytes"  # bytes of stored trajectories and of saved unfinished groups
    # Per member, on the lanes of `SpanKind.member`
    epoch = "epoch"  # number of faults so far
    # Per process, on its own lane, once per step
    cpu = "cpu"  # microseconds of processor time since the start


class GroupEvent(StrEnum):
    """An event of a prompt group. `Recorder.stamp` lists the details of each event."""

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
    """The type of a record: first item of its msgpack array. Each comment lists the items after the tag."""

    header = 0  # a map: schema, process, pool, host, pid, clock, started_ns, wall_ns
    open = 1  # id, lane, kind, start, version, step, group, cause
    close = 2  # id, end
    level = 3  # name, lane, time, value
    stamp = 4  # event, group, attempt, lane, time, version, details
    clock = 5  # reference clock, time, offset, error
    dropped = 6  # number of records lost since the previous record of this type


class OpenSpan:
    """An interval that has begun. `close` or the end of a ``with`` block ends the interval.

    Further calls of `close` have no effect.
    """

    __slots__ = ("_number", "_recorder")

    def __init__(self, recorder: Recorder | None, number: int) -> None:
        self._recorder = recorder
        self._number = number

    def close(self) -> None:
        """Record the end of the interval: now."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.end_span(self._number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()


NO_SPAN = OpenSpan(None, 0)
"""An `OpenSpan` that records nothing, for processes without a profile."""


class Recorder:
    """Records the spans, levels and stamps of one process in its own file.

    The queue of unwritten records holds at most 8 MiB, and the file at most ``max_file_bytes``. The recorder drops and
    counts records above these limits. After a write error, the recorder logs one warning and stops.

    Args:
        directory: Folder of the file; created if it is missing.
        process: Name of the process, and the default lane. Example: ``learner-0``.
        pool: The part of the run to which the process belongs.
        max_file_bytes: Maximum size of the file, in bytes.
        clock: A function that returns monotonic nanoseconds.

    Raises:
        OSError: the file cannot be created.
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
        self.num_dropped = 0
        self._clock = clock
        self._levels: dict[tuple[str, str], int] = {}
        self._num_spans = 0
        self._left_bytes = max_file_bytes
        self._unwritten: deque[bytes] = deque()
        self._num_bytes = 0
        self._is_closing = self._has_failed = False
        self._lock = threading.Lock()
        self._wakes, self._ends = threading.Event(), threading.Event()
        host = host or socket.gethostname()
        directory.mkdir(parents=True, exist_ok=True)
        # Do not overwrite the file of an earlier recorder of this process.
        names = (f"{process}@{host}-{os.getpid()}{suffix}" for suffix in ("", *(f"-{n}" for n in range(2, 10_000))))
        self._path = next(path for name in names if not (path := directory / f"{name}.msgpack").exists())
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_EXCL, 0o644)
        self._thread = threading.Thread(target=self._write_until_closed, name="record", daemon=True)
        self._thread.start()
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
        """Record the begin of a span, an interval of one activity, and return an object that ends the span.

        Args:
            kind: The activity, a `SpanKind`.
            lane: Name of the lane; empty for the process's lane. A name with a leading slash is appended to the
                process's lane. Example: ``/reward``.
            version: Related policy version.
            step: Related learner step.
            group: Id of the related prompt group.
            cause: Further detail of the activity. Example: the name of a phase.
            start: When the span began, in monotonic nanoseconds; None for now.
        """
        with self._lock:
            self._num_spans += 1
            number = self._num_spans
        start = self._clock() if start is None else start
        is_kept = self._add(Tag.open, number, self._whole(lane), kind, start, version, step, group, cause)
        return OpenSpan(self if is_kept else None, number)

    def end_span(self, number: int, end: int | None = None) -> None:
        """Record the end of a span. Callers use `OpenSpan.close`.

        ``number`` identifies the span. The spans of a process are numbered from 1, in the order in which the process
        opens them. ``end`` is in monotonic nanoseconds. None means now.
        """
        self._add(Tag.close, number, self._clock() if end is None else end)

    def level(self, name: str, value: int, *, lane: str = "") -> None:
        """Record the new value of a count, such as the number of stored groups. An unchanged value is ignored.

        ``name`` is a `LevelName`. ``lane`` names the part of the run, as in `span`.
        """
        lane = self._whole(lane)
        if self._levels.get((name, lane)) != value and self._add(Tag.level, name, lane, self._clock(), value):
            self._levels[name, lane] = value

    def stamp(
        self, event: str, group: int, *, attempt: int = 0, version: int = NONE, lane: str = "", **details: Any
    ) -> None:
        """Record that something happened to a prompt group now; ``details`` are values that msgpack can encode.

        ``attempt`` counts the times that a worker began to generate the group; it is -1 if the event does not belong
        to one attempt. ``event`` is a `GroupEvent`. Each event has its own details:

        - lease: ``version`` of the engine when the worker may start, ``deadline``: the latest learner version that may
          train on the group, ``inherited``: number of tokens that an earlier attempt has saved.
        - first_token, last_token, reward: ``version`` of the engine, on the engine's lane. For a continued group,
          first_token is the first token of this attempt.
        - stored: ``version`` of the oldest token, ``newest`` of the newest, and ``learner``: the learner's version.
          Also ``tokens`` of the policy, ``prompt_tokens``, ``lengths`` [G] of the responses, ``rewards`` [G],
          ``bytes``.
        - planned, trained: ``version`` of the step.
        - requeued, dropped: ``reason``; for a finished group also the details of ``stored``, for a released group
          ``tokens``.
        """
        self._add(Tag.stamp, event, group, attempt, self._whole(lane), self._clock(), version, details)

    def clock(self, reference: str, *, offset_ns: int, error_ns: int) -> None:
        """Record that another clock is ``offset_ns`` nanoseconds ahead of this process's clock.

        ``reference`` is the other clock's name, from `clock_id`. The true offset differs by at most ``error_ns``.
        """
        self._add(Tag.clock, reference, self._clock(), offset_ns, error_ns)

    def close(self) -> None:
        """Write the queued records and close the file; later records are dropped. Further calls have no effect."""
        with self._lock:
            self._is_closing = True
        self._ends.set()
        self._wakes.set()
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _whole(self, lane: str) -> str:
        return self.process + lane if not lane or lane[0] == "/" else lane

    def _add(self, tag: Tag, *items: Any) -> bool:
        record = _packed(tag, *items)
        with self._lock:
            room = min(_MAX_UNWRITTEN_BYTES, self._left_bytes)
            if self._has_failed or self._is_closing or self._num_bytes + len(record) > room:
                self.num_dropped += 1
                return False
            self._unwritten.append(record)
            self._num_bytes += len(record)
        if not self._wakes.is_set():
            self._wakes.set()
        return True

    def _write_until_closed(self) -> None:
        num_reported = 0
        while not (self._is_closing and not self._unwritten):
            self._wakes.wait()
            self._wakes.clear()
            with self._lock:
                records, num_dropped = list(self._unwritten), self.num_dropped
                self._unwritten.clear()
                self._left_bytes -= self._num_bytes
                self._num_bytes = 0
            if num_dropped > num_reported:
                records.append(_packed(Tag.dropped, num_dropped - num_reported))
                num_reported = num_dropped
            try:
                unwritten = memoryview(b"".join(records))
                while unwritten:
                    unwritten = unwritten[os.write(self._file, unwritten) :]
            except OSError as error:
                logger.warning("cannot write %s: %s; recording stops", self._path, error.strerror)
                with self._lock:
                    self._has_failed = True
                break
            self._ends.wait(_WRITE_EVERY_S)
        os.close(self._file)


_recorder: Recorder | None = None


def start(config: ProfileConfig, *, process: str, pool: Pool) -> None:
    """Start to record spans, counts and events of this process to a file in ``config.directory``.

    Record nothing if the options disable recording. If this process records already, go on with that recording. If the
    folder is not writable, log a warning and record nothing. In each case, if ``config.directory`` is set, also enable
    the receipts and the stack files of this process (modules `receipts` and `stacks`).
    """
    global _recorder
    if config.directory:
        run_dir = Path(config.directory).parent
        stacks.listen(run_dir, process)
        receipts.start(run_dir, process)
    if _recorder is not None or not config.enabled or not config.directory:
        return
    try:
        directory = Path(config.directory)
        _recorder = Recorder(directory, process=process, pool=pool, max_file_bytes=config.max_file_bytes)
    except OSError as error:
        logger.warning("%s is not recorded: cannot write to %s: %s", process, config.directory, error.strerror)


def stop() -> None:
    """Write the queued records and stop recording. Also stop the receipts and the stack files of this process."""
    global _recorder
    recorder, _recorder = _recorder, None
    if recorder is not None:
        recorder.close()
    stacks.stop()
    receipts.stop()


def current() -> Recorder | None:
    """Return this process's recorder, or None if the process does not record."""
    return _recorder


def span(kind: str, **of: Any) -> OpenSpan:
    """Record the begin of a span, an interval of one activity, and return an object that ends the span.

    ``kind`` is a `SpanKind`. ``of`` has the keyword arguments of `Recorder.span`. If this process does not record, the
    returned object records nothing.
    """
    return NO_SPAN if _recorder is None else _recorder.span(kind, **of)


def level(name: str, value: int, *, lane: str = "") -> None:
    """Record the new value of a count, such as the number of stored groups, if this process records.

    ``name`` is a `LevelName`. ``lane`` names the part of the run; empty for this process.
    """
    if _recorder is not None:
        _recorder.level(name, value, lane=lane)


def cpu() -> None:
    """Record the processor time that this process has used so far, in microseconds, if this process records."""
    level(LevelName.cpu, time.process_time_ns() // 1000)


def stamp(event: str, group: int, **of: Any) -> None:
    """Record that something happened to a prompt group now. Do nothing if this process has no recorder.

    ``event`` is a `GroupEvent`. ``group`` is the group's id. ``of`` are further arguments of `Recorder.stamp`.
    """
    if _recorder is not None:
        _recorder.stamp(event, group, **of)


def clock(reference: str, *, offset_ns: int, error_ns: int) -> None:
    """Record that another clock is ``offset_ns`` nanoseconds ahead of this process's clock, if this process records.

    ``reference`` is the other clock's name, from `clock_id`. The true offset differs by at most ``error_ns``.
    """
    if _recorder is not None:
        _recorder.clock(reference, offset_ns=offset_ns, error_ns=error_ns)


def torch_trace_name(step: int, role: str, rank: int | str) -> str:
    """Return the file name of the trace that torch.profiler writes of one learner step in one process.

    ``role`` is the process's role, such as ``actor``. Example: ``torch-step10-actor-0.json.gz``.
    """
    return f"torch-step{step}-{role}-{rank}.json.gz"


@cache
def clock_id() -> str:
    """Return the name of this process's monotonic clock. Processes with the same name share one clock."""
    parts = []
    with suppress(OSError):
        parts = [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/time")]
    return " ".join(parts) or f"{socket.gethostname()} {os.getpid()}"


def _packed(tag: Tag, *items: Any) -> bytes:
    return cast("bytes", msgpack.packb([int(tag), *items]))
