"""One rollout worker of the fleet, over all its lives: one that dies or hangs is buried, and another takes its place.

A life begins with a place in the cluster, for which it waits as long as the cluster takes; Ray moves the place of a
node that died. Then the node is given what the worker reads, the worker is made, its engine started, and the newest
weights are loaded.

Every call waits for the worker. Ray wakes the call when the worker answers or dies. A worker that misses
``buffer.request_timeout_s`` for a call that it answers at once is taken for dead. The first call that sees the end of a
life declares it (`FleetMember._declare`), and `FleetMember._watch` then begins the next life. Any error ends a life,
except for the errors that every worker would raise (`RUN_ERRORS`): they end the run.

A worker replaces its engine by itself (`rollout_fleet.engine_supervisor`). A worker whose engine has failed for good
has failed too, unless the engine lives in the worker's own process.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn, Protocol, TypeVar

from ray.exceptions import RayError, RayTaskError

from asyncrl.config import RunConfig
from asyncrl.core.errors import (
    AccountError,
    AsyncRLError,
    ClusterDiedError,
    DeadlineError,
    EngineLost,
    RequestRefused,
    RewardError,
    WorkerDiedError,
    WrongEpoch,
)
from asyncrl.core.remote import raised_in_worker, within
from asyncrl.core.types import AnsweredPrompt, Prompt
from asyncrl.run.cluster import finished_in_thread
from rollout_fleet.config import EngineKind
from rollout_fleet.engine_supervisor import engine_limits
from rollout_fleet.member import Member, MemberState
from rollout_fleet.metrics import FleetCounters, MemberNotes

logger = logging.getLogger(__name__)
T = TypeVar("T")

PLACE_NOTICE_S = 5.0
"""After so many seconds without a place people are told."""
START_MARGIN_S = 30.0
"""How much longer than its engine a worker may take to start: it keeps that deadline itself, with a better message."""
COUNTERS_S = 1.0
"""How long `FleetMember.counters` waits for an answer before it returns the last known one."""
RUN_ERRORS = (RewardError, RequestRefused, AccountError, WrongEpoch, ClusterDiedError)
"""What every worker would raise: the reward's configuration, a request, the account or the run's epoch is wrong."""


class WorkerPlaces(Protocol):
    """Where workers live, by rank: what a member asks of `EnginePlaces`."""

    def execute_rank_async(self, rank: int, method_name: str, *args: Any) -> Awaitable[Any]:
        """Call a method of the worker of a rank."""
        ...

    def node_of(self, rank: int, wanted: str = "") -> Awaitable[str]:
        """Wait until the cluster has a place for a rank; the id of its node, which may be ``wanted`` for a new one."""
        ...

    def replace_worker(self, rank: int, **changed: Any) -> None:
        """Start a worker in the place of a rank, with these arguments of its class; kill one that is there."""
        ...

    def close(self, rank: int) -> None:
        """Kill the worker of a rank, and give its place back."""
        ...


@dataclass(frozen=True, kw_only=True)
class MemberParts:
    """What all members work with.

    Attributes:
        places: Where their workers live.
        bury: See `ControlBuffer.bury`.
        supply: Has a node, named by its id, hold what a worker reads; the path of the model there.
        on_change: Called when `FleetMember.is_serving` may have changed.
        say: Tells people.
    """

    places: WorkerPlaces
    bury: Callable[[str, int], Awaitable[int]]
    supply: Callable[[str], Awaitable[str]]
    on_change: Callable[[], None]
    say: Callable[[str], None]


class FleetMember:
    """One worker; `start` it, then `load_first`; or `join`, where the fleet runs already.

    Attributes:
        rank: Its place in the fleet.
        member: What the state of the worker is.
    """

    def __init__(
        self,
        rank: int,
        config: RunConfig,
        parts: MemberParts,
    ) -> None:
        fleet = config.rollout_fleet
        self.rank = rank
        restarts = 0 if config.placement.colocated else fleet.restarts
        limits = replace(engine_limits(fleet), restarts=restarts)
        self.member = Member(f"rollout worker {rank}", limits, time.monotonic())
        MemberNotes(f"engine-{rank}/worker").follow(self.member)
        self._places = parts.places
        self._bury = parts.bury
        self._supply = parts.supply
        self._on_change = parts.on_change
        self._say = parts.say
        self._engine_serves = True
        self._has_served = False
        self._answer_s = config.buffer.request_timeout_s
        self._start_s = fleet.start_timeout_s + START_MARGIN_S
        self._stop_s = fleet.worker_stop_timeout_s
        self._leave_s = fleet.drain_timeout_s + fleet.worker_stop_timeout_s
        self._is_in_process = fleet.engine is EngineKind.transformers
        self._has_process = True
        self._worker = ""
        self._before: list[FleetCounters] = []
        self._last = FleetCounters()
        self._watching: asyncio.Task[None] | None = None
        self._counting: asyncio.Task[None] | None = None
        self._end_of_life: Exception | None = None
        self._failure: Exception | None = None
        self._changed = asyncio.Condition()

    @property
    def is_serving(self) -> bool:
        """Whether its engine can generate."""
        return self.member.may_lease and self._engine_serves

    @property
    def is_there(self) -> bool:
        """Whether it serves, or is expected back: it has served, has a place, and neither leaves nor has ended."""
        away = (MemberState.pending, MemberState.draining)
        return self._has_served and not self.member.has_ended and self.member.state not in away

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

    async def join(self, *, node: str = "", place_timeout_s: float = math.inf) -> str:
        """Come up in a fleet that runs, on the newest weights; from then on the worker is replaced when it dies.

        Args:
            node: Id of the node to be on; empty for any.
            place_timeout_s: How long to wait for a place there.

        Returns:
            The id of its node.

        Raises:
            AsyncRLError, ValueError: it has no place in time, its node cannot have what it reads, or it does not start.
        """
        self._has_process = False
        try:
            found = await self._come_up(node, place_timeout_s)
        except BaseException as error:
            self.member.fail(str(raised_in_worker(error)))
            if isinstance(error, Exception):
                await self._settle(error)
            await asyncio.to_thread(self._places.close, self.rank)
            raise
        self._watching = asyncio.create_task(self._watch())
        await self._notify()
        return found

    async def run(self) -> None:
        """Roll out until `drain` or `leave`, in one life after another. Raises `EngineLost` when no other follows."""
        while (epoch := await self._ready()) is not None:
            if await self._tried(epoch, self._call("run")):
                return

    async def answer(self, prompts: Sequence[Prompt], *, version: int, num_samples: int) -> list[AnsweredPrompt]:
        """See `RolloutWorker.answer`. Raises `AsyncRLError` if the worker does not answer them, for any reason."""
        if not await self._is_up():
            why = "it cannot answer" if self._failure is None else raised_in_worker(self._failure)
            raise EngineLost(f"{self.member.name} is {self.member.state}: {why}")
        epoch, call = self.member.epoch, self._call("answer", list(prompts), version, num_samples)
        try:
            return await self._while_answering(call, f"rollout worker {self.rank}, which answers held-out prompts")
        except Exception as error:
            if not isinstance(error, RayTaskError) and self._watching is not None:
                await self._declare(epoch, error)
            if isinstance(error, AsyncRLError):
                raise
            raise EngineLost(
                f"{self.member.name} did not answer held-out prompts: {raised_in_worker(error)}"
            ) from error

    async def counters(self) -> FleetCounters:
        """What this member has done in all its lives, by its last known answer if it does not answer at once."""
        if self.member.state is MemberState.ready and (self._counting is None or self._counting.done()):
            self._counting = asyncio.create_task(self._count(self.member.epoch))
        if self._counting is not None:
            done, _ = await asyncio.wait({self._counting}, timeout=COUNTERS_S)
            for counting in done:
                if not counting.cancelled():  # by `leave`
                    counting.result()
        return self.total

    async def _count(self, epoch: int) -> None:
        worker = self._worker
        found = await self._tried(epoch, self._answer("counters", "the fleet's counters"))
        if found and self._worker == worker:  # else its last counters are known
            self._last = found[0]

    @property
    def total(self) -> FleetCounters:
        """What this member is known to have done in all its lives."""
        return FleetCounters.total([*self._before, self._last])

    async def drain(self) -> FleetCounters:
        """End `run`, give all leases back; the worker stays for `answer`. Returns the final counters."""
        while await self._is_up():
            if found := await self._tried(self.member.epoch, self._call("drain")):
                self._last = await self._closed(found[0])
                break
        return self.total

    async def _is_up(self) -> bool:
        """Wait for a worker that holds work, or until there is none: it has ended, or waits for a place."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: self.member.may_lease or self.member.has_ended or self.member.state is MemberState.pending
            )
        return self.member.may_lease

    async def leave(self) -> None:
        """Take no more work, hand on what runs, and end for good; returns when nothing is left of it.

        One that dies over it has left too. What it has done counts in `counters`.
        """
        member, epoch = self.member, self.member.epoch
        member.drain(time.monotonic())
        await self._notify()
        if member.state is MemberState.draining:
            leaving = self._while_answering(self._call("leave"), f"{member.name}, which leaves")
            try:
                async with asyncio.timeout(self._leave_s):
                    if found := await self._tried(epoch, leaving):
                        self._before.append(await self._closed(found[0] or FleetCounters()))
                        self._last, self._worker = FleetCounters(), ""
                        member.drained(epoch)
                    else:
                        await self._ready()
            except (TimeoutError, AsyncRLError, RayError) as error:
                logger.warning("%s is killed, since it did not leave by itself: %r", member.name, error)
                member.due(member.deadline)
        await asyncio.gather(*self._cancel_tasks(), return_exceptions=True)
        await self._settle(DeadlineError(f"{member.name} was asked to leave, and did not end"))
        await asyncio.to_thread(self._places.close, self.rank)
        self._has_process = False
        await self._notify()

    async def stop(self) -> None:
        """End the worker, if there is one. It is not watched any more: its death is expected."""
        self._cancel_tasks()
        if self._has_process:
            await self._call("stop")

    def _cancel_tasks(self) -> list[asyncio.Task[None]]:
        tasks = [task for task in (self._watching, self._counting) if task is not None]
        for task in tasks:
            task.cancel()
        return tasks

    # One life

    def _call(self, method: str, *arguments: Any) -> Awaitable[Any]:
        return self._places.execute_rank_async(self.rank, method, *arguments)

    async def _answer(self, method: str, what: str) -> Any:
        """A call that is answered at once, or the worker hangs."""
        return await within(self._call(method), self._answer_s, what, "buffer.request_timeout_s")

    async def _while_answering(self, pending: Awaitable[T], what: str) -> T:
        """Await a call in which the worker keeps the deadlines. Raises `DeadlineError` if it answers no other calls."""
        call, worker = asyncio.ensure_future(pending), self._worker
        try:
            while not call.done():
                await asyncio.wait({call}, timeout=self._answer_s)
                if not call.done():
                    counters = await self._answer("counters", what)
                    if self._worker == worker:  # else its last counters are known
                        self._last = counters
            return call.result()
        finally:
            call.cancel()

    async def _catch_up(self) -> None:
        epoch = self.member.epoch
        await self._while_answering(self._call("load_first"), "the rollout workers, which wait for the first weights")
        self.member.verified(epoch, 0)
        self._has_served = True

    async def _ready(self) -> int | None:
        """Wait for a worker that serves weights; its epoch, None if it has left. Raises `EngineLost` if it failed."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.member.may_lease or self.member.has_ended)
        if self.member.state is MemberState.left:
            return None
        if self._failure is not None:
            raise EngineLost(f"{self.member.name}: {raised_in_worker(self._failure)}") from self._failure
        return self.member.epoch

    async def _tried(self, epoch: int, pending: Awaitable[T]) -> tuple[T] | None:
        """The answer of a call; None where the worker's life ends first, or by this call. Raises errors of the run."""
        call, ending = asyncio.ensure_future(pending), asyncio.create_task(self._until_after(epoch))
        try:
            await asyncio.wait({call, ending}, return_when=asyncio.FIRST_COMPLETED)
            if ending.done():
                return None
            if (error := _failure_of(call, self.member.name)) is None:
                return (call.result(),)
            if self._watching is None or isinstance(raised_in_worker(error), RUN_ERRORS):
                raise error
            await self._declare(epoch, error)
            return None
        finally:
            for task in (call, ending):
                task.cancel()
            await asyncio.gather(call, ending, return_exceptions=True)

    async def _declare(self, epoch: int, error: Exception) -> None:
        """Declare that ``error`` has ended the life of ``epoch``. A second call does nothing. `_watch` goes on."""
        if self.member.fault(epoch, str(raised_in_worker(error)), time.monotonic()):
            self._end_of_life = error
            await self._notify()

    async def _until_after(self, epoch: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.member.epoch > epoch)

    # From one life to the next

    async def _watch(self) -> None:
        while not self.member.has_ended:
            await self._hear_until_declared()
            if (failure := self._end_of_life) is None:  # it has left
                return
            self._end_of_life = None
            try:
                await self._replace(failure)
            except Exception as error:  # noqa: BLE001 - told to whoever waits for this member
                self.member.fail(str(raised_in_worker(error)))
                self._failure = error
                await self._notify()

    async def _hear_until_declared(self) -> None:
        """Hear the worker until the end of its life is declared: by another call, or here for what `_hear` raises."""
        hearing, declared = asyncio.ensure_future(self._hear()), asyncio.create_task(self._until_declared())
        try:
            await asyncio.wait({hearing, declared}, return_when=asyncio.FIRST_COMPLETED)
            if not declared.done() and (error := _failure_of(hearing, self.member.name)) is not None:
                await self._declare(self.member.epoch, error)
        finally:
            for task in (hearing, declared):
                task.cancel()
            await asyncio.gather(hearing, declared, return_exceptions=True)

    async def _until_declared(self) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._end_of_life is not None or self.member.has_ended)

    async def _hear(self) -> NoReturn:
        """Pass on what the worker says of its engine. Raises what the worker's life ends of."""
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
            words = str(raised_in_worker(failure))
            member.fault(member.epoch, words, time.monotonic())
            await self._notify()
            self._tell(f"{member.name} has ended, epoch {member.epoch} begins: {words}")
            await self._settle(failure)
            member.stopped(time.monotonic())
            if is_final:
                member.fail(words)
            if member.has_ended:
                self._failure = failure
                break
            await asyncio.sleep(member.seconds_left(time.monotonic()) or 0.0)
            member.due(member.deadline)
            failure = await self._next_life()
        else:
            self._say(f"{member.name} is back after {time.monotonic() - died_s:.1f} s")
        await self._notify()

    async def _settle(self, failure: BaseException) -> None:
        """Get the last counters of a worker that still answers; bury one that does not, where there is one."""
        if isinstance(failure, EngineLost | RayTaskError):  # raised in a worker that lives
            try:
                last = await within(self._call("stop"), self._stop_s, self.member.name, "rollout_fleet.stop_timeout_s")
            except Exception as error:  # noqa: BLE001 - it is buried, whatever it failed of
                logger.warning("%s did not stop: %s", self.member.name, error)
            else:
                self._before.append(await self._closed(last or FleetCounters()))
                self._last, self._worker = FleetCounters(), ""
                return
        if self._worker:
            self._before.append(await self._buried(self._last))
        self._last, self._worker = FleetCounters(), ""

    async def _closed(self, last: FleetCounters) -> FleetCounters:
        """The final counters of a worker that ended by itself. It is buried if it could not give everything back."""
        return await self._buried(last) if last.tokens_in_flight and self._worker else last

    async def _buried(self, last: FleetCounters) -> FleetCounters:
        """Bury the worker with what it is known to have done; its counters by the account of the buffer.

        Asks until the buffer answers; see `ControlBuffer.bury`.
        """
        while True:
            try:
                num_tokens = await self._bury(self._worker, last.tokens_generated)
                return replace(last, tokens_generated=num_tokens, tokens_in_flight=0)
            except DeadlineError as error:
                logger.warning("%s is not buried yet: %s", self.member.name, error)

    async def _next_life(self) -> Exception | None:
        """Start another worker and let it catch up; what became of it if it fails at that."""
        try:
            await self._come_up()
        except ClusterDiedError:
            raise
        except Exception as error:  # noqa: BLE001 - the next life may do better
            return error
        return None

    async def _come_up(self, node: str = "", place_timeout_s: float = math.inf) -> str:
        """Take a place, start a worker there, and let it catch up; the id of its node."""
        found = await self._place(node, place_timeout_s)
        model_path = await self._supply(found)
        make = partial(self._places.replace_worker, self.rank, model_path=model_path)
        await finished_in_thread(make, self._start_s)
        self._has_process = True
        await self.start()
        await self._catch_up()
        return found

    async def _place(self, wanted: str, timeout_s: float) -> str:
        """Wait for a place; the id of its node. People hear of it where it takes a while."""
        self.member.unplaced(self.member.epoch)
        await self._notify()
        placing = asyncio.ensure_future(self._places.node_of(self.rank, wanted))
        try:
            await asyncio.wait({placing}, timeout=min(PLACE_NOTICE_S, timeout_s))
            if not placing.done() and timeout_s > PLACE_NOTICE_S:
                self._say(f"{self.member.name} waits for a place: no node has room for it")
            async with asyncio.timeout(None if math.isinf(timeout_s) else max(0.0, timeout_s - PLACE_NOTICE_S)):
                node = await placing
        except TimeoutError:
            raise DeadlineError(
                f"no node had room for {self.member.name} within ray.start_timeout_s={timeout_s:g} s; start Ray on "
                "another node, or free what an engine takes"
            ) from None
        finally:
            placing.cancel()
        self.member.placed(self.member.epoch, time.monotonic())
        return node

    def _tell(self, words: str) -> None:
        """Log what happened, and tell people the first line: the end of a dead process's log is in ours."""
        logger.warning(words)
        self._say(words.partition("\n")[0])

    async def _notify(self) -> None:
        self._on_change()
        async with self._changed:
            self._changed.notify_all()


def _failure_of(call: asyncio.Future[Any], name: str) -> Exception | None:
    """What a call that is done failed of; None where it was answered."""
    if call.cancelled():
        return WorkerDiedError(f"a call of {name} was cancelled by Ray")
    error = call.exception()
    return error if error is None or isinstance(error, Exception) else WorkerDiedError(f"{name}: {error!r}")
