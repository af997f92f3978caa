"""Records what a process does, for the profile of a run.

A *span* is an interval of one activity. A *level* is a count that changes over time. A *stamp* is an event of a prompt
group. Each record belongs to a *lane*, a row of the profile's timeline. A lane has the name of a process, or of a part
of a process such as ``learner-0/publish``. `span`, `level` and `stamp` are thread-safe. A separate thread writes the
records every 50 ms.

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
"""Value of a record's policy version, learner step or prompt group if the record does not have one."""
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
        advice: After the final step, simulate the run to find an option that would have made the run faster.
        torch_steps: Learner steps that each rank traces with torch.profiler. Example: ``[10, 11]``.
        max_file_bytes: Maximum size of the profile of one process. Records above this size are dropped and counted.
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
            raise ValueError(f"profile.torch_steps must list learner steps >= 0, got {negative}; the first step is 0")
        if self.max_file_bytes < 1 << 20:
            raise ValueError(f"profile.max_file_bytes must be >= 1048576, got {self.max_file_bytes}; 1 GiB is usual")
        if self.torch_steps and not self.enabled:
            raise ValueError(
                "profile.torch_steps needs profile.enabled=true, got false; enable it, or leave torch_steps empty"
            )


class Pool(StrEnum):
    """The groups of processes of a run. The first record of a process names the group of this process."""

    controller = "controller"
    buffer = "buffer"
    fleet = "fleet"
    learner = "learner"


class SpanKind(StrEnum):
    """The activity of a lane (a row of the timeline) during an interval. A lane is a process or a part of a process.

    Spans of a lane can overlap. `asyncrl.profile.attribution` then chooses one of the spans for each point in time.
    """

    # The controller records these activities on the rows ``controller``, ``controller/plan``, ``controller/complete``.
    step = "step"  # one learner step, from the commit of the previous step (or the start) to the commit of this step
    plan_wait = "plan_wait"  # the controller waits until the buffer has enough groups for a batch
    dispatched = "dispatched"  # the learner's ranks work on a batch that the controller has sent
    evaluation = "evaluation"  # a held-out evaluation runs; engines record this span too, while they answer its prompts
    checkpoint = "checkpoint"  # the run saves a checkpoint; ranks record this span too, if the save interrupts them
    # An engine records these activities on its row of the timeline, such as ``engine-0``.
    start = "start"  # the engine starts; the span ends after the engine has verified its first weights
    down = "down"  # the engine has failed, is restarting, or is not allowed to serve
    stage = "stage"  # new weights are copied to the engine's host while the engine generates
    pause = "pause"  # the engine does not generate, because it loads new weights
    load_stage = "load_stage"  # one phase of loading weights, on a row ``engine-0/load``; ``cause`` names the phase
    re_prefill = "re_prefill"  # from the end of a pause of the engine until a running sample gets its next token
    released = "released"  # the engine has released its GPU to the learner, which shares this GPU
    # The controller records the state of a member on the member's row of the timeline, such as ``engine-0/worker``.
    member = "member"  # the member is in the `MemberState` that ``cause`` names
    # A rollout worker records this activity on a row of the timeline such as ``engine-0/reward``.
    reward = "reward"
    # A learner rank records its activities on a row of the timeline such as ``learner-0``.
    # The rank's publisher thread records its activities on a row such as ``learner-0/publish``.
    update = "update"  # the rank computes a learner step
    score = "score"
    fetch = "fetch"  # the rank waits for its batch; on the row ``learner-0/prepare``: a thread downloads the batch
    prepare = "prepare"  # on the row ``learner-0/prepare``: a thread fetches and packs the batch of the next step
    forward = "forward"
    backward = "backward"
    optimizer = "optimizer"
    offload = "offload"
    wait_ranks = "wait_ranks"  # the rank waits for slower ranks
    publish_copy = "publish_copy"  # the rank copies its weights for a publish, and cannot compute during the copy
    publish = "publish"  # the publisher thread writes or sends the copied weights, until engines can load them
    publish_stage = "publish_stage"  # one phase of preparing or executing a publish; ``cause`` names the phase


class LevelName(StrEnum):
    """The name of a count that changes over time. A recorded value is valid until the next value."""

    # The counts from ``capacity`` to ``parked`` are numbers of samples, and are recorded per engine.
    # ``capacity`` is the limit on the samples that the worker gives to the engine at the same time.
    # Samples in ``running`` and ``parked`` count against ``capacity``, and so do single-turn samples in ``tail``.
    # These samples can exceed ``capacity`` after it is lowered, or if many environments request turns together.
    # Samples in ``settling``, ``tool`` and ``environment`` do not count against ``capacity``.
    # Episodes of several turns in ``tail`` do not count against ``capacity`` either.
    # The counts of samples outside ``capacity`` are reduced until their sum is at most the unused capacity.
    capacity = "capacity"  # the largest number of samples that the worker currently gives to the engine
    running = "running"  # number of requests that the engine has not answered yet; each request samples one turn
    tail = "tail"  # number of finished samples whose group has unfinished samples
    settling = "settling"  # number of samples whose group the worker scores, stores or releases
    tool = "tool"  # number of episodes that wait for a tool
    environment = "environment"  # number of episodes that wait for their environment while no tool runs
    parked = "parked"  # number of turns without a request, because their group waits for weights or leaves the worker
    asking = "asking"  # 1 while the worker waits for permission to generate further groups, else 0
    version = "version"  # policy version of the engine; on the timeline's row ``buffer``, policy version of the learner
    # The timeline's row ``buffer`` shows these counts. They are numbers of groups, except ``full`` and ``bytes``.
    queued = "queued"
    leased = "leased"
    stored = "stored"
    planned = "planned"
    budget = "budget"  # number of groups that workers are allowed to start now
    full = "full"  # 1 while workers must not start groups, because the buffer has too few free bytes; else 0
    bytes = "bytes"  # number of bytes of stored trajectories and of saved unfinished groups
    # The rows of the timeline that show a member's state (`SpanKind.member`) also show this count.
    epoch = "epoch"  # number of faults of the member so far
    # Each process records its processor time on its own row of the timeline, once per step.
    cpu = "cpu"  # microseconds of processor time since the start of the process


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
    """The type of a record, which is the first item of the record's array. Each comment lists the other items."""

    header = 0  # item: a dict with the keys schema, process, pool, host, pid, clock, started_ns and wall_ns
    open = 1  # a span begins; items: id of the span, lane, kind, start time, version, step, group, cause
    close = 2  # a span ends; items: id of the span, end time
    level = 3  # items: name of the count, lane, time, value
    stamp = 4  # items: event, group id, attempt, lane, time, version, details
    clock = 5  # items: name of another clock, time, offset of that clock, largest error of the offset
    dropped = 6  # item: number of records lost since the previous record of this type


class OpenSpan:
    """A span (an interval of one activity) that has begun. `close` or the end of a ``with`` block ends the span.

    After the span has ended, `close` has no effect.
    """

    __slots__ = ("_number", "_recorder")

    def __init__(self, recorder: Recorder | None, number: int) -> None:
        self._recorder = recorder
        self._number = number

    def close(self) -> None:
        """Record that the span ends now."""
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
        pool: The group of processes to which the process belongs.
        max_file_bytes: Maximum size of the file, in bytes.
        clock: Function that returns the time in monotonic nanoseconds.

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
        """Record the start of a span (an interval of one activity), and return an object that ends the span.

        Args:
            kind: The activity, a `SpanKind`.
            lane: Name of the lane; empty for the process's lane. A name with a leading slash is appended to the
                name of the process's lane. Example: ``/reward``.
            version: Policy version of the activity; -1 for none.
            step: Learner step of the activity; -1 for none.
            group: Id of the prompt group of the activity; -1 for none.
            cause: Further detail of the activity. Example: the name of a phase.
            start: Start of the span in monotonic nanoseconds; None for now.
        """
        with self._lock:
            self._num_spans += 1
            number = self._num_spans
        start = self._clock() if start is None else start
        is_kept = self._add(Tag.open, number, self._whole(lane), kind, start, version, step, group, cause)
        return OpenSpan(self if is_kept else None, number)

    def end_span(self, number: int, end: int | None = None) -> None:
        """Record the end of a span. Users of the recorder call `OpenSpan.close` instead.

        ``number`` identifies the span. A process numbers its spans from 1, in the order of their starts. ``end`` is the
        end time in monotonic nanoseconds; None means now.
        """
        self._add(Tag.close, number, self._clock() if end is None else end)

    def level(self, name: str, value: int, *, lane: str = "") -> None:
        """Record the new value of a count, such as the number of stored groups. An unchanged value is ignored.

        ``name`` is a `LevelName`. ``lane`` names the process or the part of a process that has this count (see `span`).
        """
        lane = self._whole(lane)
        if self._levels.get((name, lane)) != value and self._add(Tag.level, name, lane, self._clock(), value):
            self._levels[name, lane] = value

    def stamp(
        self, event: str, group: int, *, attempt: int = 0, version: int = NONE, lane: str = "", **details: Any
    ) -> None:
        """Record an event of a prompt group that happens now.

        ``event`` is a `GroupEvent`. ``attempt`` is the number of earlier attempts to generate the group, or -1 for an
        event that belongs to no attempt. ``details`` are values that msgpack can encode. They depend on the event:

        - lease: ``version`` of the engine when the worker gets the lease; ``deadline``, the latest learner version that
          can train on the group; ``inherited``, the number of tokens that an earlier attempt has saved.
        - first_token, last_token, reward: ``version`` of the engine, on the engine's lane. If the group continues an
          earlier attempt, first_token is the first token of this attempt.
        - stored: ``version`` of the oldest token, ``newest``: version of the newest token, ``learner``: version of the
          learner, ``tokens``: number of sampled tokens, ``prompt_tokens``, ``lengths`` [G] of the responses,
          ``rewards`` [G], ``bytes``.
        - planned, trained: ``version`` of the step.
        - requeued, dropped: ``reason``; for a finished group also the details of ``stored``, for a released group
          ``tokens``.
        """
        self._add(Tag.stamp, event, group, attempt, self._whole(lane), self._clock(), version, details)

    def clock(self, reference: str, *, offset_ns: int, error_ns: int) -> None:
        """Record that the clock ``reference`` is ``offset_ns`` nanoseconds ahead of this process's clock.

        ``reference`` is a name that `clock_id` returned. The true offset differs by at most ``error_ns``.
        """
        self._add(Tag.clock, reference, self._clock(), offset_ns, error_ns)

    def close(self) -> None:
        """Write the queued records and close the file. Later records are dropped. Further calls have no effect."""
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

    If the options disable recording, or the folder is not writable, the process records nothing. If the process
    already records, its recorder continues. If ``config.directory`` is set, the function always enables the receipts
    and the stack files of this process too (modules `receipts` and `stacks`).
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
    """Write the queued records, and stop recording. Also stop the receipts and the stack files of this process."""
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
    """Record the start of a span (an interval of one activity), and return an object that ends the span.

    ``kind`` is a `SpanKind`. ``of`` has the keyword arguments of `Recorder.span`. If this process does not record, the
    returned object records nothing.
    """
    return NO_SPAN if _recorder is None else _recorder.span(kind, **of)


def level(name: str, value: int, *, lane: str = "") -> None:
    """Record the new value of a count, such as the number of stored groups, if this process records.

    ``name`` is a `LevelName`. ``lane`` names a process or a part of a process; empty for this process.
    """
    if _recorder is not None:
        _recorder.level(name, value, lane=lane)


def cpu() -> None:
    """Record the processor time that this process has used so far, in microseconds, if this process records."""
    level(LevelName.cpu, time.process_time_ns() // 1000)


def stamp(event: str, group: int, **of: Any) -> None:
    """Record an event of a prompt group that happens now. Do nothing if this process has no recorder.

    ``event`` is a `GroupEvent`. ``group`` is the group's id. ``of`` has further arguments of `Recorder.stamp`.
    """
    if _recorder is not None:
        _recorder.stamp(event, group, **of)


def clock(reference: str, *, offset_ns: int, error_ns: int) -> None:
    """Record that the clock ``reference`` is ``offset_ns`` nanoseconds ahead of this process's clock.

    ``reference`` is a name that `clock_id` returned. The true offset differs by at most ``error_ns``. Do nothing if
    this process has no recorder.
    """
    if _recorder is not None:
        _recorder.clock(reference, offset_ns=offset_ns, error_ns=error_ns)


def torch_trace_name(step: int, role: str, rank: int | str) -> str:
    """Return the file name of a trace of torch.profiler. The trace shows one learner step of one process.

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
