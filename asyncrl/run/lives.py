"""Keeps one member of a run up, in one life after another: start, watch, fence, back off, count.

`Member` (rollout_fleet.member) decides, and has no clock, task or process. `Lives` drives it: it carries out what the
state of the member asks for, through a `Body`, and reports the result to the member.

    Lives.watch ──▶ Body.watch ──raises──▶ declare ──▶ Body.end ──▶ pause ──▶ Body.begin ──▶ Body.watch …
                         any other call that fails ──▲

One task does all of this (`_keep`). It waits for `Body.watch` or `declare`, whichever comes first. `until` waits for a
change of the member; `notify` wakes it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, Protocol, TypeVar

from asyncrl.core.errors import ClusterDiedError, WorkerDiedError
from asyncrl.core.remote import raised_in_worker
from rollout_fleet.member import Member

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Body(Protocol):
    """What lives: a worker with its engine, for example. `Lives` calls one method at a time."""

    async def begin(self) -> None:
        """Start another life; returns when the member serves. Any error but `ClusterDiedError` ends this life."""
        ...

    async def watch(self) -> NoReturn:
        """Wait for the end of the life; raises its cause."""
        ...

    async def end(self, failure: Exception) -> None:
        """Clean up after a life that ``failure`` has ended."""
        ...


class Lives:
    """The lives of one member.

    Args:
        member: Decides how often and when the body is started again.
        body: What is started, watched and ended.
        run_errors: Errors that a new life would raise again; they are raised to the caller of `tried`.
        say: Shows people a line.
        on_change: Called when the state of the member may have changed.

    Attributes:
        member: As given.
        failure: The error that the member failed of for good; None before that.
    """

    def __init__(
        self,
        member: Member,
        body: Body,
        *,
        run_errors: tuple[type[Exception], ...] = (),
        say: Callable[[str], None],
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.member = member
        self.failure: Exception | None = None
        self._body = body
        self._run_errors = run_errors
        self._say = say
        self._on_change = on_change
        self._end_of_life: Exception | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._changed = asyncio.Condition()

    def watch(self) -> None:
        """Watch the life that has begun; start others after it."""
        self._keeping = asyncio.create_task(self._keep())

    async def close(self) -> None:
        """Watch no more: the end of this life is expected."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)

    async def notify(self) -> None:
        """Report that the state of the member may have changed."""
        self._on_change()
        async with self._changed:
            self._changed.notify_all()

    async def until(self, is_true: Callable[[Member], bool]) -> None:
        """Wait for a state of the member."""
        async with self._changed:
            await self._changed.wait_for(lambda: is_true(self.member))

    async def declare(self, epoch: int, error: Exception) -> None:
        """Declare that ``error`` has ended the life of ``epoch``; a second call has no effect. Needs `watch`."""
        if self._keeping is not None and self.member.fault(epoch, str(raised_in_worker(error)), time.monotonic()):
            self._end_of_life = error
            await self.notify()

    async def tried(self, epoch: int, pending: Awaitable[T]) -> tuple[T] | None:
        """Await a call to the body in the life of ``epoch``; returns the answer in a tuple.

        Returns None if the life ends before the answer, or if the call fails, which ends the life. Raises errors of
        ``run_errors``, and every error before `watch`.
        """
        call = asyncio.ensure_future(pending)
        ending = asyncio.create_task(self.until(lambda member: member.epoch > epoch))
        try:
            await asyncio.wait({call, ending}, return_when=asyncio.FIRST_COMPLETED)
            if ending.done():
                return None
            if (error := _failure_of(call, self.member.name)) is None:
                return (call.result(),)
            if self._keeping is None or isinstance(raised_in_worker(error), self._run_errors):
                raise error
            await self.declare(epoch, error)
            return None
        finally:
            await _cancel(call, ending)

    async def _keep(self) -> None:
        while not self.member.has_ended:
            failure = await self._next_end()
            if failure is None:  # the member has left
                return
            try:
                await self._replace(failure)
            except Exception as error:  # noqa: BLE001 - `failure` reports it to the callers that wait for this member
                self.member.fail(str(raised_in_worker(error)))
                self.failure = error
                await self.notify()

    async def _next_end(self) -> Exception | None:
        """Wait for the end of this life and return its cause: an error of `Body.watch`, or what `declare` was given."""
        watching = asyncio.ensure_future(self._body.watch())
        declared = asyncio.create_task(self.until(lambda member: self._end_of_life is not None or member.has_ended))
        try:
            await asyncio.wait({watching, declared}, return_when=asyncio.FIRST_COMPLETED)
            if not declared.done() and (error := _failure_of(watching, self.member.name)) is not None:
                await self.declare(self.member.epoch, error)
        finally:
            await _cancel(watching, declared)
        failure, self._end_of_life = self._end_of_life, None
        return failure

    async def _replace(self, error: Exception) -> None:
        """End the life that ``error`` has ended; begin others until one serves or the member has failed."""
        member, died_s = self.member, time.monotonic()
        failure: Exception | None = error
        while failure is not None:
            words = str(raised_in_worker(failure))
            member.fault(member.epoch, words, time.monotonic())
            await self.notify()
            words = f"{member.name} has ended, epoch {member.epoch} begins: {words}"
            logger.warning(words)
            self._say(words.partition("\n")[0])  # the rest is the end of a log, which ours holds
            await self._body.end(failure)
            member.stopped(time.monotonic())
            if member.has_ended:
                self.failure = failure
                break
            await asyncio.sleep(member.seconds_left(time.monotonic()) or 0.0)
            member.due(member.deadline)
            try:
                failure = await self._body.begin()
            except ClusterDiedError:
                raise
            except Exception as next_failure:  # noqa: BLE001 - the next life may succeed
                failure = next_failure
        else:
            self._say(f"{member.name} is back after {time.monotonic() - died_s:.1f} s")
        await self.notify()


def _failure_of(call: asyncio.Future[Any], name: str) -> Exception | None:
    """The error of a call that is done; None if the call was answered."""
    if call.cancelled():
        return WorkerDiedError(f"a call of {name} was cancelled by Ray")
    error = call.exception()
    return error if error is None or isinstance(error, Exception) else WorkerDiedError(f"{name}: {error!r}")


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
