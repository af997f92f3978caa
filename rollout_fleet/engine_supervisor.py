"""Keeps the engine of one worker up: fences one that has failed, stops it, and starts another on the newest weights.

    rollout worker ──▶ EngineSupervisor ──▶ Member (decides)
                              │
                              ├──▶ engine of epoch 0, 1, …   (one at a time)
                              └──▶ rollout loop              (runs once per engine)

`_watch` waits for the engine's failure, which the engine's own watches bring about: its death, silence, a load that
fails. Everything after that has a deadline of the member's. `ready` waits for an engine that may be used, and is woken
by `_watch`. The prompt groups of an engine that fails are the loop's business: they have left it when `run` raises.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from asyncrl.core import record
from asyncrl.core.errors import DeadlineError, EngineError, EngineLost
from asyncrl.core.ports import RolloutBuffer

from .config import EngineKind, RolloutFleetConfig
from .engines.engine import Engine
from .loop import RolloutLoop
from .member import Member, MemberLimits
from .metrics import MemberNotes

logger = logging.getLogger(__name__)

LONGEST_BACKOFF_S = 60.0
STOP_AGAIN_S = 0.5
STOP_MARGIN_S = 5.0
"""How much longer than its own deadlines a start or a stop may take before it is given up."""


def engine_limits(config: RolloutFleetConfig) -> MemberLimits:
    """The limits of an engine. One that lives in the worker's own process ends with it, and is not started again."""
    return MemberLimits(
        start_s=config.start_timeout_s + config.server_stop_timeout_s + STOP_MARGIN_S,
        stop_s=config.server_stop_timeout_s + STOP_MARGIN_S,
        drain_s=config.drain_timeout_s,
        restarts=0 if config.engine is EngineKind.transformers else config.restarts,
        window_s=config.restart_window_s,
        backoff_s=config.restart_backoff_s,
        longest_backoff_s=LONGEST_BACKOFF_S,
    )


class EngineSupervisor:
    """Supervises one engine; `start` it, then `load_first`. ``make`` makes an engine, once per epoch.

    Attributes:
        engine: The engine now; another after each failure.
        member: What the state of the engine is.
    """

    def __init__(self, name: str, config: RolloutFleetConfig, *, make: Callable[[], Engine]) -> None:
        self.engine = make()
        self.member = Member(name, engine_limits(config), time.monotonic())
        MemberNotes("/member").follow(self.member)
        self._make = make
        self._loop: RolloutLoop | None = None
        self._buffer: RolloutBuffer | None = None
        self._watching: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        self._notes: list[tuple[bool, str]] = []
        self._changed = asyncio.Condition()

    async def start(self) -> None:
        """Bring the first engine up. Raises as `Engine.start`: what fails at once is more likely wrong than broken."""
        await self.engine.start()
        self.member.started(self.member.epoch)

    async def load_first(self, loop: RolloutLoop, buffer: RolloutBuffer) -> None:
        """Wait for the first weights and load them; from then on the engine is replaced when it fails.

        Raises as `RolloutLoop.load_next`.
        """
        self._loop, self._buffer = loop, buffer
        await loop.load_next(-1)
        self._watching = asyncio.create_task(self._watch(loop, buffer))

    async def ready(self, unless: Callable[[], bool] = lambda: False) -> Engine:
        """Wait for an engine that serves verified weights, or until ``unless``, after `wake`.

        Raises `EngineLost`, with what it failed of, if it has failed for good.
        """
        await self._until(lambda: unless() or self._failure is not None or self._is_serving)
        if self._failure is not None and not unless():
            raise EngineLost(str(self._failure)) from self._failure
        return self.engine

    async def next_note(self, num_heard: int) -> tuple[bool, str]:
        """Wait for what happens to the engine after ``num_heard`` notes: whether it serves then, and words for people.

        Raises `EngineLost` if it has failed for good.
        """
        await self._until(lambda: self._failure is not None or len(self._notes) > num_heard)
        if len(self._notes) > num_heard:
            return self._notes[num_heard]
        raise EngineLost(str(self._failure))

    async def wake(self) -> None:
        """Let `ready` look at its ``unless`` again."""
        async with self._changed:
            self._changed.notify_all()

    async def stop(self) -> None:
        """Stop whatever engine there is, also one that is being started."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await self.engine.stop()

    @property
    def _is_serving(self) -> bool:
        return self.member.may_lease and not self.engine.has_failed

    async def _until(self, is_true: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(is_true)

    async def _watch(self, loop: RolloutLoop, buffer: RolloutBuffer) -> None:
        while not self.member.has_ended:
            failure: Exception = EngineError(f"{self.member.name} stopped being watched")
            try:
                await self.engine.wait_failed()
            except Exception as error:  # noqa: BLE001 - whatever it failed of
                failure = error
            try:
                await self._replace(failure, loop, buffer)
            except Exception as error:
                logger.exception("%s cannot be replaced", self.member.name)
                self.member.fail(str(error))
                self._failure = error
                await self.wake()

    async def _replace(self, error: Exception, loop: RolloutLoop, buffer: RolloutBuffer) -> None:
        """Take a failed engine out of service until another is ready, or this one has failed for good."""
        with record.span(record.SpanKind.down, cause=type(error).__name__):
            await self._replace_fenced(error, loop, buffer)

    async def _replace_fenced(self, error: Exception, loop: RolloutLoop, buffer: RolloutBuffer) -> None:
        member, failed_s = self.member, time.monotonic()
        failure: Exception | None = error
        while failure is not None:
            member.fault(member.epoch, str(failure), time.monotonic())
            await self._note(f"{member.name} is fenced, epoch {member.epoch} begins: {failure}", is_serving=False)
            await asyncio.gather(self._report_fenced(buffer), self._stop_engine())
            if member.has_ended:
                self._failure = failure
                break
            await asyncio.sleep(member.seconds_left(time.monotonic()) or 0.0)
            member.due(member.deadline)
            failure = await self._next_life(loop)
        else:
            took_s = time.monotonic() - failed_s
            await self._note(f"{member.name} serves version {member.version} after {took_s:.1f} s", is_serving=True)
        await self.wake()

    async def _note(self, text: str, *, is_serving: bool) -> None:
        logger.warning(text)
        self._notes.append((is_serving, text))
        await self.wake()

    async def _report_fenced(self, buffer: RolloutBuffer) -> None:
        try:
            await buffer.fenced()
        except Exception as error:  # noqa: BLE001 - a buffer that is gone has its own watch
            logger.warning("the buffer was not told that %s is fenced: %s", self.member.name, error)

    async def _stop_engine(self) -> None:
        """Stop the engine. A stop that raises is repeated until the member's deadline; then the member has failed."""
        member = self.member
        try:
            async with asyncio.timeout(member.seconds_left(time.monotonic())):
                while (error := await self._stop_error()) is not None:
                    logger.warning("%s was not stopped, which is tried again: %r", member.name, error)
                    await asyncio.sleep(STOP_AGAIN_S)
        except TimeoutError:
            logger.error("%s could not be stopped; it is not started again", member.name)
            member.due(member.deadline)
        member.stopped(time.monotonic())

    async def _stop_error(self) -> Exception | None:
        try:
            await self.engine.stop()
        except Exception as error:  # noqa: BLE001 - whatever it is, the engine may still be there
            return error
        return None

    async def _next_life(self, loop: RolloutLoop) -> Exception | None:
        """Start another engine and let it catch up; what became of it if it fails at that."""
        member = self.member
        try:
            async with asyncio.timeout(member.seconds_left(time.monotonic())):
                self.engine = self._make()
                await self.engine.start()
        except TimeoutError:
            return DeadlineError(f"{member.name} was {member.state} for longer than it may be")
        except Exception as error:  # noqa: BLE001 - the next life may do better
            return error
        member.started(member.epoch)
        await loop.use(self.engine)
        try:
            await _while_alive(self.engine, loop.load_next(-1))
        except Exception as error:  # noqa: BLE001 - as above
            return error
        return None


async def _while_alive(engine: Engine, work: Coroutine[Any, Any, None]) -> None:
    """Await ``work``; the engine's failure cancels it and is raised instead."""
    doing, failing = asyncio.create_task(work), asyncio.create_task(engine.wait_failed())
    try:
        done, _ = await asyncio.wait({doing, failing}, return_when=asyncio.FIRST_COMPLETED)
        await (doing if doing in done else failing)
    finally:
        for task in (doing, failing):
            task.cancel()
        await asyncio.gather(doing, failing, return_exceptions=True)
