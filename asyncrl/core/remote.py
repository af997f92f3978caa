"""Waiting for other processes: for remote results under a deadline, and for the end of a process on this machine.

Errors name the worker and show the end of its log. Ray is imported only where there is a result to wait for.
"""

from __future__ import annotations

import asyncio
import os
import select
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

from asyncrl.core.errors import DeadlineError, WorkerDiedError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerIdentity:
    """What an error says about a worker.

    Attributes:
        node: Address of the node that it was placed on.
        last_words: Reads the path and the end of its log; None if there is no log.
    """

    group: str
    rank: int
    node: str
    last_words: Callable[[], str] | None = None

    def __str__(self) -> str:
        return f"group {self.group!r}, rank {self.rank}, on node {self.node}"

    def log_tail(self) -> str:
        """A line break and the end of the worker's log; empty if there is no log."""
        return "" if self.last_words is None else f"\nLast lines of {self.last_words()}"


identities: dict[str, WorkerIdentity] = {}
"""The workers that this process ever started or attached to, by actor id: calls may still be under way at their end."""


def fetch(refs: Sequence[Any], timeout_s: float | None = None, what: str = "results") -> list[Any]:
    """Wait for all references to results; the first failure ends the wait.

    Raises `DeadlineError`, naming the late workers, if they do not all arrive within ``timeout_s`` seconds, and
    `WorkerDiedError` if a worker died that was to compute one, or something that one waits for.
    """
    import ray
    from ray.exceptions import GetTimeoutError, RayError

    try:
        return ray.get(list(refs), timeout=timeout_s)
    except GetTimeoutError as error:
        raise DeadlineError(f"{what} did not arrive within {timeout_s:g} s: {late_workers(refs)}") from error
    except RayError as error:
        raise translated(error) from None


async def fetch_async(refs: Sequence[Any]) -> list[Any]:
    """As `fetch`, in a coroutine and without a deadline of its own; `within` sets one."""
    from ray.exceptions import RayError

    try:
        return list(await asyncio.gather(*refs))
    except RayError as error:
        raise (await asyncio.to_thread(translated, error)) from None


async def within(pending: Awaitable[T], timeout_s: float, what: str, option: str) -> T:
    """Await what a group's call returned, for at most ``timeout_s`` seconds, which ``option`` sets.

    Seconds in which this process itself stood still do not count: the answers wait then, and nobody is late.
    Raises `DeadlineError` after that, which says ``what`` was awaited. Example: ``"the update of step 7"``. For lists
    of references and futures it names the late workers, and ends with the log of the first.
    """
    call, left_s = asyncio.ensure_future(pending), timeout_s
    try:
        while left_s > 0 and not call.done():
            await asyncio.wait({call}, timeout=min(_TICK_S, left_s))
            left_s -= _TICK_S
        if call.done():
            return call.result()
    finally:
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    message = f"waited {timeout_s:g} s for {what}; raise {option} if it is only slow"
    refs = refs_of(pending)
    late = await asyncio.to_thread(late_workers, refs) if refs else "look into the logs"
    raise DeadlineError(f"{message}; {late}")


def refs_of(pending: Any) -> list[Any]:
    """The references that a group's call returned, where it returned any."""
    return pending if isinstance(pending, list) else getattr(pending, "futures", [])


def death_among(refs: Sequence[Any], timeout_s: float) -> WorkerDiedError | None:
    """The death of a worker that was to compute one of the references; waits for their results for ``timeout_s``."""
    import ray
    from ray.exceptions import RayError

    done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s, fetch_local=False) if refs else ([], [])
    for ref in done:
        try:
            ray.get(ref)
        except RayError as error:
            cause = translated(error)
            if isinstance(cause, WorkerDiedError):
                return cause
    return None


class StepDeadline:
    """A deadline for calls that repeat: ``limit_s`` at first, then a multiple of the longest call of its kind so far.

    So a rank that hangs is noticed sooner than after a limit that must fit the largest model. No call gets more than
    ``limit_s``; each gets ``floor_s`` unless the limit is lower. ``factor`` is the multiple.
    """

    def __init__(self, limit_s: float, *, floor_s: float = 120.0, factor: float = 10.0) -> None:
        self._limit_s = limit_s
        self._floor_s = floor_s
        self._factor = factor
        self._longest_s: dict[str, float] = {}

    def seconds(self, kind: str) -> float:
        """What a call of this kind may take now. Example: after calls of 9 s and 20 s, 200 s."""
        if kind not in self._longest_s:
            return self._limit_s
        return min(self._limit_s, max(self._floor_s, self._factor * self._longest_s[kind]))

    async def within(self, pending: Awaitable[T], kind: str, what: str, option: str) -> T:
        """As `within`, under the deadline of this kind of call.

        The recorded duration begins when the call was queued, if ``pending`` knows that: who starts to wait late must
        not shorten the deadline of the next call.
        """
        began_s = getattr(pending, "queued_s", time.monotonic())
        timeout_s = self.seconds(kind)
        if timeout_s < self._limit_s:
            option = f"{option} (at most {self._limit_s:g} s; here {self._factor:g} x the longest of its kind so far)"
        result = await within(pending, timeout_s, what, option)
        self._longest_s[kind] = max(time.monotonic() - began_s, self._longest_s.get(kind, 0.0))
        return result


def translated(error: Exception) -> Exception:
    """`WorkerDiedError` if a known worker's death is the cause, directly or through a call that waited for it.

    So it is where a result was lost with the node that held it.
    """
    from ray.exceptions import ObjectLostError, RayActorError, RayTaskError

    cause: Any = error
    while isinstance(cause, RayTaskError):
        cause = cause.cause
    if isinstance(cause, ObjectLostError):
        return WorkerDiedError(f"a worker's node died, and with it a result that had not come. {cause}")
    identity = identities.get(str(cause.actor_id)) if isinstance(cause, RayActorError) else None
    return error if identity is None else death_of(identity, str(cause))


def raised_in_worker(error: BaseException) -> BaseException:
    """What a worker's method raised, for a message: without Ray's account of where. Any other error as it is."""
    while isinstance(inside := getattr(error, "cause", None), BaseException):  # of a RayTaskError
        error = inside
    return error


def death_of(identity: WorkerIdentity, reason: str) -> WorkerDiedError:
    """The error for a worker's death."""
    return WorkerDiedError(f"worker of {identity} died. {reason.strip()}{identity.log_tail()}")


def late_workers(refs: Sequence[Any]) -> str:
    """Names the workers whose results have not arrived, and shows the end of the first one's log."""
    import ray

    late = set(ray.wait(list(refs), num_returns=len(refs), timeout=0, fetch_local=False)[1])
    workers = {index: identities.get(ref.task_id().actor_id().hex()) for index, ref in enumerate(refs) if ref in late}
    names = [f"group {who.group!r} rank {who.rank}" if who else f"result {index}" for index, who in workers.items()]
    known = [who for who in workers.values() if who is not None]
    tail = known[0].log_tail() if known else ""
    return f"{len(names)} of {len(refs)} are late: {', '.join(names)}{tail}"


_TICK_S = 0.5
"""A wait counts its seconds in ticks, so that a process that stands still loses one tick of its deadlines."""
NUM_TAIL_LINES = 20
_TAIL_BYTES = 16_384


async def process_end(pid: int) -> None:
    """Wait until a process of this machine, child or not, has ended; a zombie counts as ended, and is not reaped."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def wait_for_first_end(pids: Sequence[int]) -> int:
    """Block until one of these processes of this machine, children or not, has ended; return its id."""
    with ExitStack() as opened:
        waiting = select.poll()
        pid_of = {}
        for pid in pids:
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                return pid
            opened.callback(os.close, descriptor)
            waiting.register(descriptor, select.POLLIN)
            pid_of[descriptor] = pid
        return pid_of[waiting.poll()[0][0]]


def last_lines(path: str, num_lines: int = NUM_TAIL_LINES) -> str:
    """The end of a log file, or a remark if the file cannot be read."""
    try:
        with open(path, "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - _TAIL_BYTES))
            text = log.read().decode("utf-8", "backslashreplace")
    except OSError as error:
        return f"(no log at {path}: {error.strerror})"
    return "\n".join(text.splitlines()[-num_lines:]) or "(empty)"


def on_own_thread(work: Callable[[], T]) -> Future[T]:
    """Run on a thread that nobody has to wait for, not even the end of the process."""
    future: Future[T] = Future()

    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(work())
        except Exception as error:  # noqa: BLE001 - raised by whoever awaits it
            future.set_exception(error)

    threading.Thread(target=run, name="abandonable", daemon=True).start()
    return future
