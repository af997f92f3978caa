"""One rollout worker of the fleet, over all its lives: one that dies or hangs is buried, and another takes its place.

What waits here waits for the worker, which answers other calls meanwhile or is taken for dead; Ray wakes it when the
worker answers or dies. A worker replaces its engine by itself (`rollout_fleet.engine_supervisor`). One whose engine has
failed for good has failed too, unless the engine lives in the worker's own process.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from ray.exceptions import RayTaskError

from asyncrl.config import RunConfig
from asyncrl.protocol.errors import AsyncRLError, ClusterDiedError, DeadlineError, EngineLost, WorkerDiedError
from asyncrl.protocol.remote import within
from asyncrl.protocol.types import AnsweredPrompt, Prompt
from rollout_fleet.config import EngineKind
from rollout_fleet.engine_supervisor import engine_limits
from rollout_fleet.member import Member, MemberState
from rollout_fleet.metrics import FleetCounters, MemberNotes

logger = logging.getLogger(__name__)
T = TypeVar("T")

START_MARGIN_S = 30.0
"""How much longer than its engine a worker may take to start: it keeps that deadline itself, with a better message."""


class WorkerPlace(Protocol):
    """Where one worker of a group lives: what a member asks of `RayWorkerGroup`."""

    def execute_rank_async(self, rank: int, method_name: str, *args: Any) -> Awaitable[Any]:
        """Call a method of the worker of a rank."""
        ...

    def replace_worker(self, rank: int) -> None:
        """Kill the worker of a rank, and start another in its place."""
        ...


class FleetMember:
    """One worker; `start` it, then `load_first`.

    ``bury`` is `ControlBuffer.bury`. ``on_change`` is called when `is_serving` may have changed; ``say`` tells people.

    Attributes:
        rank: Its place in the group.
        member: What the state of the worker is.
    """

    def __init__(
        self,
        rank: int,
        config: RunConfig,
        *,
        group: WorkerPlace,
        bury: Callable[[str], Awaitable[int]],
        on_change: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        fleet = config.rollout_fleet
        self.rank = rank
        restarts = 0 if config.placement.colocated else fleet.restarts
        limits = replace(engine_limits(fleet), restarts=restarts)
        self.member = Member(f"rollout worker {rank}", limits, time.monotonic())
        MemberNotes(f"engine-{rank}/worker").follow(self.member)
        self._group = group
        self._bury = bury
        self._on_change = on_change
        self._say = say
        self._engine_serves = True
        self._answer_s = config.buffer.request_timeout_s
        self._start_s = fleet.start_timeout_s + START_MARGIN_S
        self._stop_s = fleet.worker_stop_timeout_s
        self._is_in_process = fleet.engine is EngineKind.transformers
        self._worker = ""
        self._before: list[FleetCounters] = []
        self._last = FleetCounters()
        self._watching: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        self._changed = asyncio.Condition()

    @property
    def is_serving(self) -> bool:
        """Whether its engine can generate."""
        return self.member.may_lease and self._engine_serves

    async def start(self) -> None:
        """Bring up the worker and its engine. Raises `DeadlineError`, or `WorkerDiedError` with the dead one's log."""
        option = "rollout_fleet.start_timeout_s"
        self._worker = await within(self._call("start"), self._start_s, "the rollout engines", option)
        self.member.started(self.member.epoch)
        self._engine_serves = True

    async def load_first(self) -> None:
        """Wait for the weights that the learner offers first; from then on the worker is replaced when it dies."""
        await self._catch_up()
        self._watching = asyncio.create_task(self._watch())

    async def run(self) -> None:
        """Roll out until `drain`, in one life after another. Raises `EngineLost` when it is replaced no more."""
        while True:
            epoch = await self._ready()
            if await self._tried(epoch, self._call("run")):
                return

    async def answer(self, prompts: Sequence[Prompt], *, version: int, num_samples: int) -> list[AnsweredPrompt]:
        """See `RolloutWorker.answer`. Raises `AsyncRLError` if the worker is lost over it."""
        await self._ready()
        call = self._call("answer", list(prompts), version, num_samples)
        return await self._while_answering(call, f"rollout worker {self.rank}, which answers held-out prompts")

    async def counters(self) -> FleetCounters:
        """What this member has done in all its lives."""
        if self.member.state is MemberState.ready:
            epoch = self.member.epoch
            found = await self._tried(epoch, self._answer("counters", "the fleet's counters"))
            self._last = found[0] if found else self._last
        return FleetCounters.total([*self._before, self._last])

    async def drain(self) -> FleetCounters:
        """End `run`, give all leases back; the worker stays for `answer`. Returns the final counters."""
        while self.member.state is not MemberState.failed:
            epoch = await self._ready()
            if found := await self._tried(epoch, self._call("drain")):
                self._last = found[0]
                break
        return FleetCounters.total([*self._before, self._last])

    def stop(self) -> None:
        """Watch no more: whatever dies now is meant to."""
        if self._watching is not None:
            self._watching.cancel()

    # One life

    def _call(self, method: str, *arguments: Any) -> Awaitable[Any]:
        return self._group.execute_rank_async(self.rank, method, *arguments)

    async def _answer(self, method: str, what: str) -> Any:
        """A call that is answered at once, or the worker hangs."""
        return await within(self._call(method), self._answer_s, what, "buffer.request_timeout_s")

    async def _while_answering(self, pending: Awaitable[T], what: str) -> T:
        """Await a call in which the worker keeps the deadlines. Raises `DeadlineError` if it answers no other calls."""
        call = asyncio.ensure_future(pending)
        try:
            while not call.done():
                await asyncio.wait({call}, timeout=self._answer_s)
                if not call.done():
                    self._last = await self._answer("counters", what)
            return call.result()
        finally:
            call.cancel()

    async def _catch_up(self) -> None:
        epoch = self.member.epoch
        await self._while_answering(self._call("load_first"), "the rollout workers, which wait for the first weights")
        self.member.verified(epoch, 0)

    async def _ready(self) -> int:
        """Wait for a worker that serves weights; its epoch. Raises `EngineLost` if there will be none."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.member.may_lease or self.member.has_ended)
        if self._failure is not None:
            raise EngineLost(f"{self.member.name}: {self._failure}") from self._failure
        return self.member.epoch

    async def _tried(self, epoch: int, pending: Awaitable[T]) -> tuple[T] | None:
        """The answer of a call; None where the worker's life ends over it, which `_watch` finds."""
        call, ending = asyncio.ensure_future(pending), asyncio.create_task(self._until_after(epoch))
        try:
            await asyncio.wait({call, ending}, return_when=asyncio.FIRST_COMPLETED)
            if ending.done():
                return None
            try:
                return (call.result(),)
            except AsyncRLError as error:
                if self._watching is None or not _is_end_of_life(error):
                    raise
            await ending
            return None
        finally:
            for task in (call, ending):
                task.cancel()
            await asyncio.gather(call, ending, return_exceptions=True)

    async def _until_after(self, epoch: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.member.epoch > epoch)

    # From one life to the next

    async def _watch(self) -> None:
        while not self.member.has_ended:
            try:
                await self._hear()
            except AsyncRLError as error:
                try:
                    await self._replace(error)
                except Exception as failure:  # noqa: BLE001 - told to whoever waits for this member
                    self.member.fail(str(failure))
                    self._failure = failure
                    await self._notify()

    async def _hear(self) -> None:
        """Pass on what the worker says of its engine, until the worker's life ends."""
        num_heard = 0
        while True:
            noting = self._call("next_note", num_heard)
            serves, note = await self._while_answering(noting, "the rollout workers, which generate")
            num_heard += 1
            self._tell(note)
            self._engine_serves = serves
            self._on_change()

    async def _replace(self, error: Exception) -> None:
        """Bury a worker, and start another until one is ready or this member has failed for good."""
        member, died_s = self.member, time.monotonic()
        failure: Exception | None = error
        while failure is not None:
            is_final = isinstance(failure, EngineLost) and not self._is_in_process
            member.fault(member.epoch, str(failure), time.monotonic())
            await self._notify()
            self._tell(f"{member.name} has ended, epoch {member.epoch} begins: {failure}")
            await self._settle(failure)
            if is_final:
                member.fail(str(failure))
            member.stopped(time.monotonic())
            if member.has_ended:
                self._failure = failure
                break
            await asyncio.sleep(member.seconds_left(time.monotonic()) or 0.0)
            member.due(member.deadline)
            failure = await self._next_life()
        else:
            self._say(f"{member.name} is back after {time.monotonic() - died_s:.1f} s")
        await self._notify()

    async def _settle(self, failure: Exception) -> None:
        """Get the last counters of a worker that still answers; bury one that does not."""
        if isinstance(failure, EngineLost):
            try:
                last = await within(self._call("stop"), self._stop_s, self.member.name, "rollout_fleet.stop_timeout_s")
            except AsyncRLError as error:
                logger.warning("%s did not stop: %s", self.member.name, error)
            else:
                self._before.append(last or FleetCounters())
                self._last, self._worker = FleetCounters(), ""
                return
        if self._worker:
            num_tokens = await self._buried(self._worker)
            self._before.append(replace(self._last, tokens_generated=num_tokens, tokens_in_flight=0))
        self._last, self._worker = FleetCounters(), ""

    async def _buried(self, worker: str) -> int:
        """See `ControlBuffer.bury`; asks until the buffer answers."""
        while True:
            try:
                return await self._bury(worker)
            except DeadlineError as error:
                logger.warning("%s is not buried yet: %s", self.member.name, error)

    async def _next_life(self) -> Exception | None:
        """Start another worker and let it catch up; what became of it if it fails at that."""
        try:
            await asyncio.to_thread(self._group.replace_worker, self.rank)
            await self.start()
            await self._catch_up()
        except AsyncRLError as error:
            if isinstance(error, ClusterDiedError):
                raise
            return error
        return None

    def _tell(self, words: str) -> None:
        """Log what happened, and tell people the first line: the end of a dead process's log is in ours."""
        logger.warning(words)
        self._say(words.partition("\n")[0])

    async def _notify(self) -> None:
        self._on_change()
        async with self._changed:
            self._changed.notify_all()


def _is_end_of_life(error: AsyncRLError) -> bool:
    """Whether the worker died, hangs or has lost its engine; other errors are the run's own and end it."""
    if isinstance(error, RayTaskError):  # raised in a worker that lives
        return isinstance(error, EngineLost)
    return isinstance(error, EngineLost | WorkerDiedError | DeadlineError)
