"""Waits for the results of Ray workers with a deadline, and for the end of processes on this machine.

Importing this module does not import Ray. The functions that need Ray import it when they are called.
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

from asyncrl.core.errors import WorkerDiedError
from asyncrl.core.stacks import missed

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerIdentity:
    """Describes a worker (a Ray actor) in error messages.

    Attributes:
        group: Name of the worker group.
        rank: Rank of the worker in its group.
        node: Address of the worker's node.
        last_words: Function that returns a text with the path and the last lines of the worker's log; None if there is
            no log.
    """

    group: str
    rank: int
    node: str
    last_words: Callable[[], str] | None = None

    def __str__(self) -> str:
        return f"group {self.group!r}, rank {self.rank}, on node {self.node}"

    def log_tail(self) -> str:
        """Return the last lines of the worker's log as a text that begins with a line break; empty without a log."""
        return "" if self.last_words is None else f"\nLast lines of {self.last_words()}"


identities: dict[str, WorkerIdentity] = {}
"""All workers that this process has started or attached to, by actor id, including dead workers."""


def fetch(refs: Sequence[Any], timeout_s: float | None = None, what: str = "results") -> list[Any]:
    """Return the values of Ray object references, as ``ray.get`` does. ``what`` names the results in the error message.

    Raises:
        DeadlineError: a result is missing after ``timeout_s`` seconds. The message names the late workers.
        WorkerDiedError: a worker died before it computed a result or an input of a result.
    """
    import ray
    from ray.exceptions import GetTimeoutError, RayError

    try:
        return ray.get(list(refs), timeout=timeout_s)
    except GetTimeoutError as error:
        raise missed(f"{what} did not arrive within {timeout_s:g} s", f": {late_workers(refs)}") from error
    except RayError as error:
        raise translated(error) from None


async def fetch_async(refs: Sequence[Any]) -> list[Any]:
    """Await the values of Ray object references, without a deadline. Use `within` for a deadline.

    Raises `WorkerDiedError` if a worker died before it computed a result.
    """
    from ray.exceptions import RayError

    try:
        return list(await asyncio.gather(*refs))
    except RayError as error:
        raise (await asyncio.to_thread(translated, error)) from None


async def within(pending: Awaitable[T], timeout_s: float, what: str, option: str) -> T:
    """Await the result of a worker group's call for at most ``timeout_s`` seconds, and return the result.

    ``option`` names the option that sets this deadline, for the message. While this process is suspended (SIGSTOP), the
    deadline's time does not run.

    Raises:
        DeadlineError: at the deadline. The message contains ``what``, such as ``"the update of step 7"``. If
            ``pending`` has Ray references (`refs_of`), the message also names the late workers, and ends with the last
            lines of the first late worker's log.
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
    raise missed(message, f"; {late}")


def refs_of(pending: Any) -> list[Any]:
    """Return the Ray object references of a worker group's pending call; an empty list if there are none.

    ``pending`` is a list of references, or an object with the references in its attribute ``futures``.
    """
    return pending if isinstance(pending, list) else getattr(pending, "futures", [])


def death_among(refs: Sequence[Any], timeout_s: float) -> WorkerDiedError | None:
    """Wait up to ``timeout_s`` seconds for Ray results, to find out whether a worker has died.

    If so, returns a `WorkerDiedError` for the first result that is lost because of a death. Otherwise returns None.
    """
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
    """The deadlines of repeated calls, such as learner steps. Each kind of call has its own deadline.

    The first call of a kind may take ``limit_s``. Each later call may take ``factor`` times as long as the longest call
    of this kind so far, but at least ``floor_s`` and at most ``limit_s``. This rule detects a hanging rank earlier than
    a fixed deadline.
    """

    def __init__(self, limit_s: float, *, floor_s: float = 120.0, factor: float = 10.0) -> None:
        self._limit_s = limit_s
        self._floor_s = floor_s
        self._factor = factor
        self._longest_s: dict[str, float] = {}

    def seconds(self, kind: str) -> float:
        """Return the deadline for the next call of this kind, in seconds. Example: 200 after calls of 9 s and 20 s."""
        if kind not in self._longest_s:
            return self._limit_s
        return min(self._limit_s, max(self._floor_s, self._factor * self._longest_s[kind]))

    async def within(self, pending: Awaitable[T], kind: str, what: str, option: str) -> T:
        """Await and return the result of a call, with the deadline for calls of this kind. Measure the call's duration.

        The duration begins when the call was queued (``pending.queued_s``), because callers may await the call much
        later. If ``pending`` has no such time, the duration begins now. See the function `within` for ``what``,
        ``option`` and the `DeadlineError`.
        """
        began_s = getattr(pending, "queued_s", time.monotonic())
        timeout_s = self.seconds(kind)
        if timeout_s < self._limit_s:
            option = f"{option} (at most {self._limit_s:g} s; here {self._factor:g} x the longest of its kind so far)"
        result = await within(pending, timeout_s, what, option)
        self._longest_s[kind] = max(time.monotonic() - began_s, self._longest_s.get(kind, 0.0))
        return result


def translated(error: Exception) -> Exception:
    """If the death of a worker or of a node caused ``error``, return a `WorkerDiedError`. Otherwise return ``error``.

    Also return ``error`` unchanged if it is about a worker that this process does not know.
    """
    from ray.exceptions import ObjectLostError, RayActorError, RayTaskError

    cause: Any = error
    while isinstance(cause, RayTaskError):
        cause = cause.cause
    if isinstance(cause, ObjectLostError):
        return WorkerDiedError(f"a worker's node died, and its result is lost. {cause}")
    identity = identities.get(str(cause.actor_id)) if isinstance(cause, RayActorError) else None
    return error if identity is None else death_of(identity, str(cause))


def raised_in_worker(error: BaseException) -> BaseException:
    """Return the exception that a worker's method raised, without Ray's wrapper. Return other errors unchanged."""
    while isinstance(inside := getattr(error, "cause", None), BaseException):  # unwrap Ray's RayTaskError
        error = inside
    return error


def death_of(identity: WorkerIdentity, reason: str) -> WorkerDiedError:
    """Return the exception for a worker's death. The message has the reason and the end of the worker's log."""
    return WorkerDiedError(f"worker of {identity} died. {reason.strip()}{identity.log_tail()}")


def late_workers(refs: Sequence[Any]) -> str:
    """Return a text for an error message. It names the workers whose results are missing.

    The text ends with the last lines of the log of the first such worker. ``refs`` are Ray object references.
    """
    import ray

    late = set(ray.wait(list(refs), num_returns=len(refs), timeout=0, fetch_local=False)[1])
    workers = {index: identities.get(ref.task_id().actor_id().hex()) for index, ref in enumerate(refs) if ref in late}
    names = [f"group {who.group!r} rank {who.rank}" if who else f"result {index}" for index, who in workers.items()]
    known = [who for who in workers.values() if who is not None]
    tail = known[0].log_tail() if known else ""
    return f"{len(names)} of {len(refs)} are late: {', '.join(names)}{tail}"


_TICK_S = 0.5
"""`within` counts time in ticks of this many seconds. If the process is suspended, this time counts as one tick."""
NUM_TAIL_LINES = 20
_TAIL_BYTES = 16_384


async def process_end(pid: int) -> None:
    """Wait until the process with the id ``pid`` on this machine has ended. A zombie process counts as ended."""
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
    """Block until one of the processes with the ids ``pids`` has ended. Return the id of the ended process."""
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
    """Return the last ``num_lines`` lines of a log file as one text. If the file cannot be read, the text says so.

    The function reads only the last 16 KiB of the file.
    """
    try:
        with open(path, "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - _TAIL_BYTES))
            text = log.read().decode("utf-8", "backslashreplace")
    except OSError as error:
        return f"(no log at {path}: {error.strerror})"
    return "\n".join(text.splitlines()[-num_lines:]) or "(empty)"


def on_own_thread(work: Callable[[], T]) -> Future[T]:
    """Run ``work`` on a daemon thread, which does not delay the end of the process. Return a future of the result."""
    future: Future[T] = Future()

    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(work())
        except Exception as error:  # noqa: BLE001 - the task that awaits the future gets the error
            future.set_exception(error)

    threading.Thread(target=run, name="abandonable", daemon=True).start()
    return future
