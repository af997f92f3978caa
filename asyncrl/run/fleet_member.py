"""One member of the fleet: a rollout worker with its engine. If the worker dies or hangs, the member starts a new one.

A member has one worker process at a time. A call to the worker ends when the worker answers or dies. After the first
failed call (a *fault*), the member stops the worker and starts a new one. Short calls have the deadline
``buffer.request_timeout_s``. An error that every worker would raise (`RUN_ERRORS`) is not a fault: it ends the run. A
restart waits for free resources without a deadline. The *epoch* of a member is its number of faults so far.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn, TypeVar

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
from asyncrl.core.lives import answered, keep_up
from asyncrl.core.remote import raised_in_worker, within
from asyncrl.core.stacks import missed
from asyncrl.core.types import AnsweredPrompt, Prompt
from asyncrl.run.cluster import EnginePlaces, finished_in_thread
from rollout_fleet.engines.engine import cancel, engine_seed
from rollout_fleet.member import Member, MemberState, member_faults
from rollout_fleet.metrics import FleetCounters, note_member

logger = logging.getLogger(__name__)
T = TypeVar("T")

PLACE_NOTICE_S = 5.0
"""If no node has had room for a worker for this many seconds, the user gets a message."""
START_MARGIN_S = 30.0
"""Seconds added to the engine's start deadline, so that the worker itself reports an engine that starts too slowly."""
COUNTERS_S = 1.0
"""`FleetMember.counters` waits at most this many seconds for new counters from the worker."""
RUN_ERRORS = (RewardError, RequestRefused, AccountError, WrongEpoch, ClusterDiedError)
"""Errors that a new worker would raise too, so a restart cannot help.

Causes: a failed reward, a refused request, a wrong token account, a wrong epoch of the buffer, or a dead Ray cluster.
"""


@dataclass(frozen=True, kw_only=True)
class MemberParts:
    """Objects that all members of a fleet share.

    Attributes:
        places: The reserved CPUs and GPUs of the workers.
        bury: Function (`ControlBuffer.bury`) that tells the buffer that a worker is dead.
        supply: Function that takes the id of a node, copies a worker's files to the node, and returns the path of the
            model on the node.
        version: Number of committed learner steps when the run's process began.
        on_change: Function that is called when `FleetMember.is_serving` may have changed.
        may_use_devices: Event that is set while no learner rank uses the devices of the engines. A worker starts only
            while the event is set.
    """

    places: EnginePlaces
    bury: Callable[[str, int], Awaitable[int]]
    supply: Callable[[str], Awaitable[str]]
    version: int
    on_change: Callable[[], None]
    may_use_devices: asyncio.Event
    say: Callable[[str], None]


class FleetMember:
    """One rollout worker and its restarts.

    At the start of a run, call `start` and then `load_first`. To add a member to a running fleet, call `join` instead.
    """

    def __init__(self, rank: int, config: RunConfig, parts: MemberParts) -> None:
        fleet = config.rollout_fleet
        self.rank = rank
        self.member = Member(f"rollout worker {rank}", member_faults(fleet))
        note_member(self.member, f"engine-{rank}/worker")
        self._record_state, self.member.on_enter = self.member.on_enter, self._on_enter
        self._parts = parts
        self._call = partial(parts.places.execute_rank_async, rank)
        self._fleet = fleet
        self._seed = config.seed
        self._failure: Exception | None = None
        self._declared: asyncio.Queue[Exception] = asyncio.Queue()
        self._died_s = math.nan
        self._keeping: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._has_served = False
        self._answer_s = config.buffer.request_timeout_s
        self._start_s = fleet.start_timeout_s + START_MARGIN_S
        self._has_process = True
        self._shares_device = config.placement.colocated
        self._may_use_device = True
        self._worker = ""
        self._before: list[FleetCounters] = []
        self._last = FleetCounters()
        self._counting: asyncio.Task[None] | None = None

    @property
    def is_serving(self) -> bool:
        """True if the engine serves verified weights. If False, the worker does not generate groups."""
        return self.member.is_serving

    @property
    def is_there(self) -> bool:
        """True if the member takes part in training: it has begun to serve, and has not left or failed.

        The value is False while the member leaves, and while a restart of the worker waits for free resources.
        """
        away = (MemberState.pending, MemberState.draining)
        return self._has_served and not self.member.has_ended and self.member.state not in away

    async def start(self) -> None:
        """Start the worker and its engine.

        Raises `DeadlineError` if the engine starts too slowly, or `WorkerDiedError` with the log of a dead worker.
        """
        option = "rollout_fleet.start_timeout_s"
        self._worker = await within(self._call("start"), self._start_s, "the rollout engines", option)
        self.member.started(self.member.epoch)

    async def load_first(self) -> None:
        """Wait until the worker has loaded the first published weights. After this call, a dead worker is replaced."""
        await self._catch_up()
        self._keeping = asyncio.create_task(self._keep())

    async def join(self, *, node: str = "", place_timeout_s: float = math.inf) -> str:
        """Start the worker in a running fleet, with the newest weights. After this call, a dead worker is replaced.

        Args:
            node: Id of the node; empty for any node.
            place_timeout_s: Longest wait, in seconds, for free CPUs and GPUs.

        Returns:
            The id of the worker's node.

        Raises:
            AsyncRLError, ValueError: no node has free resources in time, or the worker does not start.
        """
        self._has_process = False
        try:
            found = await self._come_up(node, place_timeout_s)
        except BaseException as error:
            self.member.fail()
            if isinstance(error, Exception):
                await self._end_worker(error)
            await asyncio.to_thread(self._parts.places.close, self.rank)
            raise
        self._keeping = asyncio.create_task(self._keep())
        self._notify()
        return found

    async def run(self) -> None:
        """Let the worker generate rollouts until `drain` or `leave` is called. A restarted worker continues.

        Raises `EngineLost` if the worker has failed and no restart is allowed.
        """
        while (epoch := await self._ready()) is not None:
            if await self._tried(epoch, self._call("run")):
                return

    async def answer(self, prompts: Sequence[Prompt], *, version: int, num_samples: int) -> list[AnsweredPrompt]:
        """Let the worker sample and score answers to held-out prompts, under policy version ``version``.

        Returns one object per prompt. Prompts whose answers have tokens of other versions are left out. Raises
        `AsyncRLError` for any failure.
        """
        if not await self._is_up():
            failure = self._failure
            why = "it cannot answer" if failure is None else raised_in_worker(failure)
            raise EngineLost(f"{self.member.name} is {self.member.state}: {why}")
        epoch, call = self.member.epoch, self._call("answer", list(prompts), version, num_samples)
        try:
            return await self._while_answering(call, f"rollout worker {self.rank}, which answers held-out prompts")
        except Exception as error:
            if not isinstance(error, RayTaskError):
                await self._declare(epoch, error)
            if isinstance(error, AsyncRLError):
                raise
            raise EngineLost(
                f"{self.member.name} did not answer held-out prompts: {raised_in_worker(error)}"
            ) from error

    async def counters(self) -> FleetCounters:
        """Return the sums of the counters of all worker processes that this member has had.

        If the worker does not answer within `COUNTERS_S` seconds, the sums include the worker's newest known counters.
        """
        if self.member.state is MemberState.ready and (self._counting is None or self._counting.done()):
            self._counting = asyncio.create_task(self._count(self.member.epoch))
        if self._counting is not None:
            done, _ = await asyncio.wait({self._counting}, timeout=COUNTERS_S)
            for counting in done:
                if not counting.cancelled():  # a task that `leave` or `stop` cancelled has no result
                    counting.result()
        return self.total

    async def _count(self, epoch: int) -> None:
        worker = self._worker
        found = await self._tried(epoch, self._answer("counters", "the fleet's counters"))
        if found and self._worker == worker:  # ignore a replaced worker: `_before` already has its final counters
            self._last = found[0]

    @property
    def total(self) -> FleetCounters:
        """The newest known sums of the counters of all worker processes that this member has had."""
        return FleetCounters.total([*self._before, self._last])

    async def release_device(self, incarnation: int | None = None) -> None:
        """Wait until running groups have finished. Then free the engine's GPU memory.

        If the worker is starting, first wait until it has started. A worker that does not free its GPU memory is
        killed. No new worker starts before `MemberParts.may_use_devices` is set. ``incarnation`` is the number of
        restarts of the learner so far. If ``incarnation`` is not None, the engine refuses weights of earlier
        incarnations from now on.
        """
        what, option = "the engines to release their devices", "rollout_fleet.drain_timeout_s"
        timeout_s = self._fleet.drain_timeout_s + 2 * self._fleet.load_timeout_s + 10
        await self._until(lambda member: member.may_release or not self._may_use_device)
        if not self._may_use_device:
            return
        is_watched = self.member.is_serving
        releasing = within(self._call("release_device", incarnation), timeout_s, what, option)
        if not await self._tried(self.member.epoch, releasing):
            if not is_watched:  # `watch` did not run while the worker started, so `end` will not free the device
                await self._free_device()
            await self._until(lambda _: not self._may_use_device)

    async def _free_device(self) -> None:
        if not self._may_use_device:
            return
        await asyncio.to_thread(self._parts.places.close, self.rank)
        self._may_use_device = False
        self._notify()

    async def drain(self) -> FleetCounters:
        """End `run`, and give all groups of the worker back to the buffer. Returns the final counters.

        The worker process stays alive, so it can still sample answers to held-out prompts (`answer`).
        """
        while await self._is_up():
            if found := await self._tried(self.member.epoch, self._call("drain")):
                self._last = await self._closed(found[0])
                break
        return self.total

    async def _is_up(self) -> bool:
        """Wait until the worker has started, and return whether it serves.

        If the start waits for free resources, return False immediately.
        """
        await self._until(lambda member: member.is_serving or member.has_ended or member.state is MemberState.pending)
        return self.member.is_serving

    async def leave(self) -> None:
        """Ask the worker to give its running groups back to the buffer, and to end. Wait until the worker has ended.

        `counters` still includes the worker's tokens. A worker that dies during this call has left too.
        """
        member, epoch = self.member, self.member.epoch
        member.drain()
        if member.state is MemberState.draining:
            leaving = self._while_answering(self._call("leave"), f"{member.name}, which leaves")
            try:
                async with asyncio.timeout(self._fleet.drain_timeout_s + self._fleet.worker_stop_timeout_s):
                    if found := await self._tried(epoch, leaving):
                        self._before.append(await self._closed(found[0] or FleetCounters()))
                        self._last, self._worker = FleetCounters(), ""
                    else:
                        await self._ready()
            except (TimeoutError, AsyncRLError, RayError) as error:
                logger.warning("%s is killed, because it did not leave in time: %r", member.name, error)
            member.drained()
        await cancel([task for task in (self._keeping, self._counting) if task is not None])
        await self._end_worker(missed(f"{member.name} did not leave in time"))
        await asyncio.to_thread(self._parts.places.close, self.rank)
        self._has_process = False
        self._notify()

    async def stop(self) -> None:
        """End the worker, and do not restart it."""
        await cancel([task for task in (self._keeping, self._counting) if task is not None])
        if self._has_process:
            await self._call("stop")

    # Calls to the worker

    async def _answer(self, method: str, what: str) -> Any:
        return await within(self._call(method), self._answer_s, what, "buffer.request_timeout_s")

    async def _while_answering(self, pending: Awaitable[T], what: str) -> T:
        """Await the long call ``pending`` to the worker. Meanwhile, poll the worker's counters.

        Raises `DeadlineError` if the worker does not answer a poll in time.
        """
        call, worker = asyncio.ensure_future(pending), self._worker
        try:
            while not call.done():
                await asyncio.wait({call}, timeout=self._answer_s)
                if not call.done():
                    counters = await self._answer("counters", what)
                    if self._worker == worker:  # ignore a replaced worker: `_before` already has its final counters
                        self._last = counters
            return call.result()
        finally:
            call.cancel()

    async def _catch_up(self) -> None:
        epoch = self.member.epoch
        await self._while_answering(self._call("load_first"), "the rollout workers, which wait for the first weights")
        self.member.verified(epoch)
        self._has_served = True

    async def _ready(self) -> int | None:
        """Wait until the worker serves. Return the epoch (the member's number of faults so far).

        Returns None if the member has left. Raises `EngineLost` if the member has failed.
        """
        await self._until(lambda member: member.is_serving or member.has_ended)
        if self.member.state is MemberState.left:
            return None
        if (failure := self._failure) is not None:
            raise EngineLost(f"{self.member.name}: {raised_in_worker(failure)}") from failure
        return self.member.epoch

    # Watch and restart the worker

    async def _keep(self) -> None:
        try:
            await keep_up(self)
        except Exception as error:  # noqa: BLE001 - the callers that wait for this member get the error
            self.member.fail()
            self._failure = error
            if self._shares_device:
                await self._free_device()
            self._notify()

    def _on_enter(self, state: MemberState, epoch: int) -> None:
        self._record_state(state, epoch)
        self._notify()

    def _notify(self) -> None:
        """Wake every `_until`. Each new state of the member calls this method."""
        self._parts.on_change()
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until(self, is_true: Callable[[Member], bool]) -> None:
        """Wait until ``is_true`` returns True for the member."""
        while not is_true(self.member):
            await self._changed.wait()

    async def _declare(self, epoch: int, error: Exception) -> None:
        """Report ``error`` to `watch`, but only if the member's number of faults is still ``epoch``."""
        if self._keeping is not None and self.member.fault(epoch, time.monotonic()):
            self._declared.put_nowait(error)

    async def _tried(self, epoch: int, pending: Awaitable[T]) -> tuple[T] | None:
        """Await a call to the worker, and return the answer as a 1-tuple. Return None if the worker or the call fails.

        ``epoch`` is the member's number of faults at the start of the call. If the call fails, `watch` gets the error.
        But this method raises errors of `RUN_ERRORS`. It raises every error while the first weights are not loaded.
        """
        call = asyncio.ensure_future(pending)
        ending = asyncio.create_task(self._until(lambda member: member.epoch > epoch))
        try:
            await asyncio.wait({call, ending}, return_when=asyncio.FIRST_COMPLETED)
            return None if ending.done() else (await answered(call),)
        except Exception as error:
            if self._keeping is None or isinstance(raised_in_worker(error), RUN_ERRORS):
                raise
            await self._declare(epoch, error)
            return None
        finally:
            await cancel((call, ending))

    async def watch(self) -> NoReturn:
        """Wait until the engine or a call to the worker fails, and raise the cause."""
        failing = self._while_answering(self._call("wait_failed"), "the rollout workers, which generate")
        watching, declared = asyncio.ensure_future(failing), asyncio.create_task(self._declared.get())
        try:
            await asyncio.wait({watching, declared}, return_when=asyncio.FIRST_COMPLETED)
            if declared.done():
                raise declared.result()
            await watching
        finally:
            await cancel((watching, declared))
        raise EngineLost(f"the engine of {self.member.name} has ended")

    async def end(self, fault: Exception) -> float:
        """End the failed worker, and return the seconds to wait before a new worker starts.

        Raises ``fault`` if no other worker is allowed to start, or if the Ray cluster has died.
        """
        if isinstance(fault, ClusterDiedError):
            raise fault
        member = self.member
        member.fault(member.epoch, time.monotonic())
        self._declared = asyncio.Queue()
        self._died_s = time.monotonic() if math.isnan(self._died_s) else self._died_s
        words = f"{member.name} has ended, epoch {member.epoch} begins: {raised_in_worker(fault)}"
        logger.warning(words)
        self._parts.say(words.partition("\n")[0])  # show only the first line: the other lines quote the worker's log
        await self._end_worker(fault)
        if self._shares_device:
            await self._free_device()
        if (pause_s := member.stopped()) is None:
            raise fault
        return pause_s

    async def begin(self) -> None:
        """Start a new worker after the death of the old one, and let it load the newest weights."""
        self.member.restart()
        await self._come_up()
        self._parts.say(f"{self.member.name} is back after {time.monotonic() - self._died_s:.1f} s")
        self._died_s = math.nan
        self._notify()

    async def _end_worker(self, failure: Exception) -> None:
        """Stop the worker and take its final counters. If the worker does not answer, declare it dead in the buffer."""
        if isinstance(failure, EngineLost | RayTaskError):  # the worker raised the error itself, so it still runs
            try:
                timeout_s, option = self._fleet.worker_stop_timeout_s, "rollout_fleet.stop_timeout_s"
                last = await within(self._call("stop"), timeout_s, self.member.name, option)
            except Exception as error:  # noqa: BLE001 - the code below declares the worker dead after any error
                logger.warning("%s did not stop: %s", self.member.name, error)
            else:
                self._before.append(await self._closed(last or FleetCounters()))
                self._last, self._worker = FleetCounters(), ""
                return
        if self._worker:
            self._before.append(await self._buried(self._last))
        self._last, self._worker = FleetCounters(), ""

    async def _closed(self, last: FleetCounters) -> FleetCounters:
        """Return the final counters of a stopped worker. ``last`` are the counters that the worker sent last.

        If the worker has generated tokens that it has neither stored in the buffer nor given back to the buffer, this
        method first declares the worker dead in the buffer. Then the buffer counts these tokens as lost.
        """
        return await self._buried(last) if last.tokens_in_flight and self._worker else last

    async def _buried(self, last: FleetCounters) -> FleetCounters:
        """Declare the worker dead in the buffer. If the buffer does not answer in time, repeat the request.

        Returns a copy of the counters ``last``, with two changes. The number of generated tokens is the buffer's,
        because the buffer may have received a later heartbeat of the worker. The number of tokens in flight is 0.
        """
        while True:
            try:
                num_tokens = await self._parts.bury(self._worker, last.tokens_generated)
                return replace(last, tokens_generated=num_tokens, tokens_in_flight=0)
            except DeadlineError as error:
                logger.warning("the buffer has not yet recorded that %s is dead: %s", self.member.name, error)

    async def _come_up(self, node: str = "", place_timeout_s: float = math.inf) -> str:
        found = await self._place(node, place_timeout_s)
        model_path = await self._parts.supply(found)
        seed = engine_seed(self._seed, self._parts.version, self.member.epoch)
        make = partial(self._parts.places.replace_worker, self.rank, model_path=model_path, engine_seed=seed)
        await self._parts.may_use_devices.wait()
        self._may_use_device = True
        await finished_in_thread(make, self._start_s)
        self._has_process = True
        await self.start()
        await self._catch_up()
        return found

    async def _place(self, wanted: str, timeout_s: float) -> str:
        self.member.unplaced(self.member.epoch)
        placing = asyncio.ensure_future(self._parts.places.node_of(self.rank, wanted))
        try:
            await asyncio.wait({placing}, timeout=min(PLACE_NOTICE_S, timeout_s))
            if not placing.done() and timeout_s > PLACE_NOTICE_S:
                self._parts.say(f"{self.member.name} waits for a place: Ray has not found a node with room yet")
            async with asyncio.timeout(None if math.isinf(timeout_s) else max(0.0, timeout_s - PLACE_NOTICE_S)):
                node = await placing
        except TimeoutError:
            raise missed(
                f"no node had room for {self.member.name} within ray.start_timeout_s={timeout_s:g} s; start Ray on "
                "another node, or free the resources of one engine"
            ) from None
        finally:
            placing.cancel()
        self.member.placed(self.member.epoch)
        return node
