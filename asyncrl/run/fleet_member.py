"""One rollout worker of the fleet, over all its lives: a worker that dies or hangs is replaced.

A life begins with a place in the cluster. The member waits for the place as long as the cluster takes; Ray moves the
place of a node that died. The node then gets what the worker reads, the worker starts its engine, and the engine loads
the newest weights. A worker whose engine fails gives its groups back with what is written of them, and ends too.

Every call waits for the worker. Ray wakes the call when the worker answers or dies. A worker that misses
``buffer.request_timeout_s`` for a call that it answers at once counts as dead. The first call that fails ends the life
(`Lives.declare`), and the next life begins. Errors that every worker would raise (`RUN_ERRORS`) end the run instead.
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
    WrongEpoch,
)
from asyncrl.core.remote import raised_in_worker, within
from asyncrl.core.types import AnsweredPrompt, Prompt
from asyncrl.run.cluster import finished_in_thread
from asyncrl.run.lives import Lives
from rollout_fleet.member import Member, MemberState, member_limits
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
"""Errors that every worker would raise: the reward's configuration, a request, the account or the epoch is wrong."""


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
        member: The state of the worker.
    """

    def __init__(self, rank: int, config: RunConfig, parts: MemberParts) -> None:
        fleet = config.rollout_fleet
        self.rank = rank
        restarts = 0 if config.placement.colocated else fleet.restarts
        limits = replace(member_limits(fleet), restarts=restarts)
        self.member = Member(f"rollout worker {rank}", limits, time.monotonic())
        MemberNotes(f"engine-{rank}/worker").follow(self.member)
        self._lives = Lives(self.member, self, run_errors=RUN_ERRORS, say=parts.say, on_change=parts.on_change)
        self._places = parts.places
        self._bury = parts.bury
        self._supply = parts.supply
        self._say = parts.say
        self._has_served = False
        self._answer_s = config.buffer.request_timeout_s
        self._start_s = fleet.start_timeout_s + START_MARGIN_S
        self._stop_s = fleet.worker_stop_timeout_s
        self._leave_s = fleet.drain_timeout_s + fleet.worker_stop_timeout_s
        self._has_process = True
        self._worker = ""
        self._before: list[FleetCounters] = []
        self._last = FleetCounters()
        self._counting: asyncio.Task[None] | None = None

    @property
    def is_serving(self) -> bool:
        """Whether its engine can generate."""
        return self.member.may_lease

    @property
    def is_there(self) -> bool:
        """Whether it serves or is expected back: it has served, has a place, and neither leaves nor has ended."""
        away = (MemberState.pending, MemberState.draining)
        return self._has_served and not self.member.has_ended and self.member.state not in away

    async def start(self) -> None:
        """Bring up the worker and its engine. Raises `DeadlineError`, or `WorkerDiedError` with the dead one's log."""
        option = "rollout_fleet.start_timeout_s"
        self._worker = await within(self._call("start"), self._start_s, "the rollout engines", option)
        self.member.started(self.member.epoch)

    async def load_first(self) -> None:
        """Wait for the weights that the learner offers first; from then on the worker is replaced when it dies."""
        await self._catch_up()
        self._lives.watch()

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
                await self.end(error)
            await asyncio.to_thread(self._places.close, self.rank)
            raise
        self._lives.watch()
        await self._lives.notify()
        return found

    async def run(self) -> None:
        """Roll out until `drain` or `leave`, in one life after another. Raises `EngineLost` when no other follows."""
        while (epoch := await self._ready()) is not None:
            if await self._lives.tried(epoch, self._call("run")):
                return

    async def answer(self, prompts: Sequence[Prompt], *, version: int, num_samples: int) -> list[AnsweredPrompt]:
        """See `RolloutWorker.answer`. Raises `AsyncRLError` if the worker does not answer them, for any reason."""
        if not await self._is_up():
            failure = self._lives.failure
            why = "it cannot answer" if failure is None else raised_in_worker(failure)
            raise EngineLost(f"{self.member.name} is {self.member.state}: {why}")
        epoch, call = self.member.epoch, self._call("answer", list(prompts), version, num_samples)
        try:
            return await self._while_answering(call, f"rollout worker {self.rank}, which answers held-out prompts")
        except Exception as error:
            if not isinstance(error, RayTaskError):
                await self._lives.declare(epoch, error)
            if isinstance(error, AsyncRLError):
                raise
            raise EngineLost(
                f"{self.member.name} did not answer held-out prompts: {raised_in_worker(error)}"
            ) from error

    async def counters(self) -> FleetCounters:
        """What this member has done in all its lives; the last known answer if the worker does not answer at once."""
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
        found = await self._lives.tried(epoch, self._answer("counters", "the fleet's counters"))
        if found and self._worker == worker:  # else its last counters are known
            self._last = found[0]

    @property
    def total(self) -> FleetCounters:
        """What this member is known to have done in all its lives."""
        return FleetCounters.total([*self._before, self._last])

    async def drain(self) -> FleetCounters:
        """End `run`, give all leases back; the worker stays for `answer`. Returns the final counters."""
        while await self._is_up():
            if found := await self._lives.tried(self.member.epoch, self._call("drain")):
                self._last = await self._closed(found[0])
                break
        return self.total

    async def _is_up(self) -> bool:
        """Wait until a worker holds work, or until there is none: the member has ended or waits for a place."""
        await self._lives.until(
            lambda member: member.may_lease or member.has_ended or member.state is MemberState.pending
        )
        return self.member.may_lease

    async def leave(self) -> None:
        """Take no more work, hand on what runs, and end for good; returns when nothing is left of the worker.

        A worker that dies meanwhile has left too. `counters` includes its work.
        """
        member, epoch = self.member, self.member.epoch
        member.drain(time.monotonic())
        await self._lives.notify()
        if member.state is MemberState.draining:
            leaving = self._while_answering(self._call("leave"), f"{member.name}, which leaves")
            try:
                async with asyncio.timeout(self._leave_s):
                    if found := await self._lives.tried(epoch, leaving):
                        self._before.append(await self._closed(found[0] or FleetCounters()))
                        self._last, self._worker = FleetCounters(), ""
                        member.drained(epoch)
                    else:
                        await self._ready()
            except (TimeoutError, AsyncRLError, RayError) as error:
                logger.warning("%s is killed, since it did not leave by itself: %r", member.name, error)
                member.due(member.deadline)
        await self._close()
        await self.end(DeadlineError(f"{member.name} was asked to leave, and did not end"))
        await asyncio.to_thread(self._places.close, self.rank)
        self._has_process = False
        await self._lives.notify()

    async def stop(self) -> None:
        """End the worker, if there is one; its end is expected."""
        await self._close()
        if self._has_process:
            await self._call("stop")

    async def _close(self) -> None:
        await self._lives.close()
        if self._counting is not None:
            self._counting.cancel()
            await asyncio.gather(self._counting, return_exceptions=True)

    # One life

    def _call(self, method: str, *arguments: Any) -> Awaitable[Any]:
        return self._places.execute_rank_async(self.rank, method, *arguments)

    async def _answer(self, method: str, what: str) -> Any:
        """Await a call that a worker answers at once unless it hangs."""
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
        await self._lives.until(lambda member: member.may_lease or member.has_ended)
        if self.member.state is MemberState.left:
            return None
        if (failure := self._lives.failure) is not None:
            raise EngineLost(f"{self.member.name}: {raised_in_worker(failure)}") from failure
        return self.member.epoch

    # From one life to the next, driven by `Lives`

    async def begin(self) -> None:
        """Start another worker and let it load the newest weights."""
        await self._come_up()

    async def watch(self) -> NoReturn:
        """Wait for the failure of the engine; raises what the worker's life ends of."""
        failing = self._call("wait_failed")
        await self._while_answering(failing, "the rollout workers, which generate")
        raise EngineLost(f"the engine of {self.member.name} has ended")

    async def end(self, failure: Exception) -> None:
        """Get the last counters of a worker that still answers; bury a worker that does not."""
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

    async def _come_up(self, node: str = "", place_timeout_s: float = math.inf) -> str:
        """Take a place, start a worker there, and let it load the newest weights; returns the id of its node."""
        found = await self._place(node, place_timeout_s)
        model_path = await self._supply(found)
        make = partial(self._places.replace_worker, self.rank, model_path=model_path)
        await finished_in_thread(make, self._start_s)
        self._has_process = True
        await self.start()
        await self._catch_up()
        return found

    async def _place(self, wanted: str, timeout_s: float) -> str:
        """Wait for a place and return the id of its node; a long wait is shown to people."""
        self.member.unplaced(self.member.epoch)
        await self._lives.notify()
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
