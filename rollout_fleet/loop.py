"""The rollout loop of one worker: lease, generate, score, put, until it is stopped.

    lease ──groups──▶ engine ──samples──▶ score ──▶ put / release
      ▲                                                 │
      └──────────────── a free place ◀──────────────────┘

Each task, what it waits for, and who wakes it. There is one condition, ``_changed``; whoever changes a phase, a group
or the loop's state notifies it.

- `_keep_leasing`: a free place, then the buffer's grant. Woken by a group that leaves the engine, then by the buffer. A
  new version, a released device or a member that leaves withdraws the request.
- `_generate`, one per batch of leases: the next finished sample. Woken by the engine.
- `_settle`, one per finished group: its turn, the reward, then the buffer's acknowledgement. Woken by the groups
  before it, the scoring process and the buffer.
- `_keep_loading`: the next weights. Woken by the buffer, when a version that is committed is offered.
- `_keep_fitting`, where the engine's load sets how many groups it holds, and `_keep_renewing`: their timers.
- `_obey_revocations`: the next revoked lease; woken by the buffer.
- `_hand_on`: a faster worker, or one that has nothing to do; woken by the buffer.
- the engine's `wait_failed`: the engine's failure, which ends `run`.
- `run`: a stop, or the first failure of any task. Woken by `stop` or the failed task.
- `load_weights`, `release_device`, `stop`: groups that leave the engine or the loop. Woken by `_generate`, `_settle`.

When a stop, an update or a failure of the engine cuts a group off, its tokens are saved with its lease. The next holder
of the lease continues the group; after an update that is this worker. The loop knows neither Ray, sockets nor engines.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from enum import Enum, auto
from typing import Any

from asyncrl.core import record
from asyncrl.core.errors import AsyncRLError, DeadlineError, EngineError, WeightsGone
from asyncrl.core.ports import RolloutBuffer
from asyncrl.core.record import GroupEvent, LevelName, SpanKind
from asyncrl.core.types import Lease, WeightOffer

from .concurrency import GroupLimit
from .config import RolloutFleetConfig, SaveProgress
from .engines.engine import Engine, SampleOutput, SampleRequest
from .engines.model_files import Decode
from .inflight import ON_ENGINE, GroupEnd, GroupPhase, InflightGroup, to_prefixes
from .member import Member
from .metrics import FleetCounters, FleetMeter, note_places
from .rewards import WeightedRewards
from .sample_log import SampleLog
from .settlement import Settlement

logger = logging.getLogger(__name__)

MAX_RENEWAL_FAILURES = 3
READ_LOAD_EVERY_S = 1.0
SETTLED_AT_ONCE = 8
GATHER_S = 0.02
"""How long a free place waits for others while the engine has work, so that what ends at about the same time is leased
and sampled together."""


class LoopState(Enum):
    """The life of a `RolloutLoop`, in this order."""

    idle = auto()
    running = auto()
    stopping = auto()
    ended = auto()


class RolloutLoop:
    """Rolls prompt groups out on one engine. Call `run` once; all else may be called while it runs.

    The collaborators are started, and the loop closes none of them. ``member`` is told of weights that are loaded, and
    says whether leases may be asked for. ``decode`` turns response tokens into the text that rewards read;
    ``greedy_baseline`` samples one more response per prompt greedily, which is not trained on; ``samples`` keeps some
    of what is scored. ``stage`` brings an offer near the engine, which loads what it yields.
    """

    def __init__(
        self,
        config: RolloutFleetConfig,
        *,
        engine: Engine,
        member: Member,
        buffer: RolloutBuffer,
        rewards: WeightedRewards,
        decode: Decode,
        samples_per_prompt: int,
        greedy_baseline: bool = False,
        samples: SampleLog | None = None,
        stage: Callable[[WeightOffer], AbstractAsyncContextManager[WeightOffer]] = nullcontext,
    ) -> None:
        self._config = config
        self._stage = stage
        self._engine = engine
        self._member = member
        self._buffer = buffer
        self._samples_per_prompt = samples_per_prompt
        self._greedy_baseline = greedy_baseline
        self._meter = FleetMeter()
        self._settlement = Settlement(
            config,
            buffer=buffer,
            rewards=rewards,
            decode=decode,
            meter=self._meter,
            stamp=self._stamp,
            samples=samples,
        )
        self._groups: dict[tuple[int, int], InflightGroup] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Condition()
        self._settling_turns = asyncio.Semaphore(SETTLED_AT_ONCE)
        self._state = LoopState.idle
        self._failure: Exception | None = None
        self._has_device = True
        self._is_loading = False
        self._is_asking = False
        self._released = record.NO_SPAN
        self._is_noting = False
        buffer.count_generated = self._count_generated
        self._limit = GroupLimit(config.fewest_groups_in_flight, config.most_groups_in_flight)
        self._note_capacity()

    async def run(self) -> FleetCounters:
        """Roll out until `stop`; then abort, give back what is held, and return the final counters.

        Raises `AsyncRLError` if the engine or the buffer fails; all leases are given back first, as far as the buffer
        still answers.
        """
        if self._state is LoopState.stopping:  # stopped before it ran
            self._state = LoopState.ended
            return self._meter.counters()
        self._state = LoopState.running
        leasing = self._spawn(self._keep_leasing)
        pumps = (self._keep_renewing, self._obey_revocations, self._hand_on, self._engine.wait_failed)
        pump_tasks = {leasing, *(self._spawn(pump) for pump in pumps)}
        if not self._limit.is_fixed:
            pump_tasks.add(self._spawn(self._keep_fitting))
        self._spawn(self._keep_loading)  # a load that has begun goes on while the groups are put down
        try:
            await self._until(lambda: self._state is LoopState.stopping or self._failure is not None)
            if self._failure is not None:
                await _cancel({leasing})
                if self._engine.has_failed:
                    await self._let_settle()
                raise self._failure
            await _cancel(pump_tasks)
            await self._put_down()
        finally:
            await _cancel(self._tasks)
            groups = list(self._groups.values())
            self._groups.clear()
            await self._settlement.give_back(groups)
            self._count_running()
            self._state = LoopState.ended
            await self._notify()
        return self._meter.counters()

    async def wait_ended(self) -> None:
        """Wait until `run` has ended, if it runs."""
        await self._until(lambda: self._state not in (LoopState.running, LoopState.stopping))

    async def stop(self) -> None:
        """End `run`; returns when it has given everything back. May be called more than once, or before `run`."""
        never_ran = self._state is LoopState.idle
        if self._state in (LoopState.idle, LoopState.running):
            self._state = LoopState.stopping
            await self._notify()
        if not never_ran:
            await self._until(lambda: self._state is LoopState.ended)

    async def load_next(self, after: int) -> None:
        """Wait for weights newer than version ``after``, -1 for any, load them, and report it.

        Raises as `Engine.load_weights`, or `WeightsError` if a version could not be published.
        """
        offer = await self._buffer.next_offer(after)
        while True:
            began_s = time.monotonic()
            try:
                await self.load_weights(offer)
            except WeightsGone as gone:
                logger.info("%s", gone)
                offer = await self._next_after(offer, gone)
            else:
                await self._buffer.loaded(offer.version, time.monotonic() - began_s)
                return

    async def _next_after(self, offer: WeightOffer, gone: WeightsGone) -> WeightOffer:
        """The version to which a removed one made way; raises ``gone`` if there is none: somebody else removed it.

        A learner that starts again withdraws its offers first: then the next one is waited for, however long it takes.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.load_timeout_s):
                return await self._buffer.next_offer(offer.version)
        shown = await self._buffer.next_offer(offer.version - 1)
        if shown == offer:
            raise gone
        return shown

    async def load_weights(self, offer: WeightOffer) -> None:
        """Load offered weights, which are staged first, while samples go on.

        Leases are asked for at their version from then on. Raises as `Engine.load_weights`, and `WeightsGone` if they
        were removed before they were staged.
        """
        try:
            await self._load_weights(offer)
        finally:
            self._is_loading = False
            await self._notify()

    async def _load_weights(self, offer: WeightOffer) -> None:
        member, epoch, now_s = self._member, self._member.epoch, time.monotonic()
        version = member.version
        member.offered(epoch, offer.version, now_s, within_s=self._config.update_timeout_s(offer.num_bytes))
        staging = record.span(SpanKind.stage, lane="/staging", version=offer.version)
        try:
            async with asyncio.timeout(member.seconds_left(now_s)), self._stage(offer) as local:
                staging.close()
                if self._config.save_progress is SaveProgress.at_updates:
                    await self._park(self._config.load_timeout_s)
                self._is_loading = True
                self._meter.loaded(await self._engine.load_weights(local))
        except WeightsGone:
            member.skipped(epoch, version)
            raise
        except TimeoutError:
            raise DeadlineError(f"{member.name} was {member.state} for longer than it may be") from None
        member.verified(epoch, offer.version)
        self._released.close()
        record.level(LevelName.version, self._engine.version)
        record.cpu()
        self._has_device = True
        self._continue_parked()

    async def release_device(self) -> None:
        """Ask for no more work, let what runs end, and have the engine give up its device until the next weights.

        What does not end within ``drain_timeout_s`` is cut off, and continued after the next weights are loaded. Raises
        `DeadlineError` if it cannot be cut off.
        """
        self._has_device = False
        await self._notify()
        await self._until(lambda: not self._is_asking)
        try:
            async with asyncio.timeout(self._config.drain_timeout_s):
                await self._until(lambda: not self._groups)
        except TimeoutError:
            if not await self._park(self._config.load_timeout_s):
                raise DeadlineError(
                    f"{len(self._running())} prompt groups could be neither finished within "
                    f"rollout_fleet.drain_timeout_s = {self._config.drain_timeout_s:g} s nor cut off within "
                    f"rollout_fleet.load_timeout_s = {self._config.load_timeout_s:g} s before the learner's turn"
                ) from None
        await self._engine.release_memory()
        self._released = record.span(SpanKind.released)

    async def let_end(self) -> None:
        """Ask for no more work, since the member leaves; where nothing is saved to be handed on, let what runs end.

        What has not ended within ``drain_timeout_s`` is cut off by `stop`.
        """
        await self._notify()
        if self._config.save_progress is not SaveProgress.never:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.drain_timeout_s):
                await self._until(lambda: self._state is not LoopState.running or not (self._is_asking or self._groups))

    def counters(self) -> FleetCounters:
        """What has been done up to now."""
        return self._meter.counters()

    # Tasks

    def _spawn(self, work: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> asyncio.Task[None]:
        """Run ``work`` beside the loop; its failure ends the loop."""
        task = asyncio.create_task(self._guarded(work, *arguments))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _guarded(self, work: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        try:
            await work(*arguments)
        except Exception as error:  # noqa: BLE001 - whatever a task raises ends the loop
            if self._state is LoopState.running and self._failure is None:
                self._failure = error
                await self._notify()
            elif error is not self._failure:
                logger.warning("rollout worker: another failure while it was ending: %s", error)

    async def _until(self, is_true: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(is_true)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _keep_loading(self) -> None:
        while self._state is LoopState.running:
            await self.load_next(self._engine.version)

    # Leases

    async def _keep_leasing(self) -> None:
        """Keep one request for admission outstanding while a place is free and the engine has the device.

        A new policy version supersedes the request: it is cancelled, which gives back what is granted meanwhile, and
        sent again at the new version. So does a limit that has shrunk.
        """
        while True:
            await self._until(lambda: self._may_lease and self._num_free > 0)
            if self._running():
                await asyncio.sleep(GATHER_S)
            if not self._may_lease:
                continue
            version, num_asked = self._engine.version, self._num_free
            grant = asyncio.create_task(self._buffer.lease(version, num_asked))
            outdated = asyncio.create_task(
                self._until(
                    lambda: not self._may_lease or self._engine.version != version or self._num_free < num_asked  # noqa: B023
                )
            )
            self._is_asking = True
            self._meter.asking(True)
            record.level(LevelName.asking, 1)
            try:
                await asyncio.wait([grant, outdated], return_when=asyncio.FIRST_COMPLETED)
                if grant.done():
                    self._begin(grant.result())
            except asyncio.CancelledError:
                await self._give_back(grant)
                raise
            finally:
                try:
                    await _cancel({grant, outdated})
                finally:  # a stop may come in this very moment
                    self._is_asking = False
                    self._meter.asking(False)
                    record.level(LevelName.asking, 0)
                await self._notify()

    @property
    def _may_lease(self) -> bool:
        return self._has_device and self._member.may_lease

    @property
    def _num_free(self) -> int:
        """Places on the engine; as many groups again may be scored and stored beside it."""
        num_settling = min(self._limit.value, len(self._groups) - self._num_on_engine)
        return max(0, self._limit.value - len(self._groups) + num_settling)

    @property
    def _num_on_engine(self) -> int:
        """Groups that the engine has, or gets back after a weight update."""
        return len(self._running(*ON_ENGINE, GroupPhase.parked))

    async def _keep_fitting(self) -> None:
        """Read the engine's load every second while it has work, and hold as many groups as suit it.

        Raises `EngineError` if the first reading fails; a later one that does is left out.
        """
        has_read = False
        while True:
            await self._until(lambda: bool(self._running()))
            await asyncio.sleep(READ_LOAD_EVERY_S)
            try:
                load = await self._engine.read_load()
            except EngineError as error:
                if not has_read or self._engine.has_failed:
                    raise
                logger.warning("the limit on prompt groups stays %d: %s", self._limit.value, error)
                continue
            has_read = True
            if self._limit.note(load, num_held=self._num_on_engine):
                self._note_capacity()
                await self._notify()

    @property
    def _num_places(self) -> int:
        """Samples that the engine may have now."""
        return self._limit.value * (self._samples_per_prompt + int(self._greedy_baseline))

    def _note_capacity(self) -> None:
        record.level(LevelName.capacity, self._num_places)

    async def _give_back(self, grant: asyncio.Task[list[Lease]]) -> None:
        """Give back what was granted at the very moment of a stop."""
        if grant.done() and not grant.cancelled() and grant.exception() is None:
            for lease in grant.result():
                await self._buffer.release(lease, num_tokens=0, reason=str(GroupEnd.stopped))

    def _begin(self, leases: Sequence[Lease]) -> None:
        """Send newly leased groups to the engine; each goes on from what an earlier attempt saved of it."""
        groups = []
        for lease in leases:
            progress = self._buffer.take_progress(lease)
            group = InflightGroup.begin(
                lease,
                num_samples=self._samples_per_prompt,
                prefixes=to_prefixes(progress, num_samples=self._samples_per_prompt) if progress else (),
                greedy_baseline=self._greedy_baseline,
            )
            self._groups[group.key] = group
            groups.append(group)
        if groups:
            self._spawn(self._generate, groups)

    async def _keep_renewing(self) -> None:
        """Renew all leases every ``renew_every_s``; a renewal that fails is tried again with the next one."""
        num_failures = 0
        while True:
            await asyncio.sleep(self._config.renew_every_s)
            try:
                if self._groups:
                    await self._buffer.renew([group.lease for group in self._groups.values()])
                num_failures = 0
            except AsyncRLError as error:
                num_failures += 1
                if num_failures == MAX_RENEWAL_FAILURES:
                    raise
                logger.warning("%d leases were not renewed: %s", len(self._groups), error)

    async def _obey_revocations(self) -> None:
        while True:
            group = self._groups.get(await self._buffer.revocation())
            if group is None or group.phase is GroupPhase.settling:
                continue
            await self._end(group, GroupEnd.revoked)
            await self._engine.abort(group.outstanding)

    async def _hand_on(self) -> None:
        """Hand groups on that another worker would have done sooner; what has left the engine is done as soon here."""
        while True:
            asked = await self._buffer.hand_on_request()
            if self._config.save_progress is SaveProgress.never:
                continue
            running = (self._groups[key] for key in asked if key in self._groups)
            chosen = [group for group in running if group.phase not in (GroupPhase.ending, GroupPhase.settling)]
            for group in chosen:
                await self._end(group, GroupEnd.handed_on)
            await self._engine.abort([request_id for group in chosen for request_id in group.outstanding])

    # One group's way

    async def _generate(self, groups: Sequence[InflightGroup]) -> None:
        """Sample groups; each goes its own way as soon as its last sample is in."""
        asked: dict[str, InflightGroup] = {}
        requests: list[SampleRequest] = []
        for group in groups:
            new: list[SampleRequest] = []
            if group.phase is GroupPhase.generating:
                new = group.next_requests(self._config.sampling, on_first_token=self._first_token_of(group))
            asked.update((request.id, group) for request in new)
            requests += new
            if not new:
                await self._leave_engine(group)
        self._count_running()
        try:
            async for request, output in self._engine.generate(requests):
                await self._take(asked[request.id], request, output)
        except Exception:
            for group in groups:  # what the engine was never asked for
                if self._engine.has_failed and group.phase in ON_ENGINE:
                    group.end = group.end or GroupEnd.engine_failed
                    await self._leave_engine(group)
            raise

    async def _take(self, group: InflightGroup, request: SampleRequest, output: SampleOutput) -> None:
        """Add a sample that has ended to its group, which leaves the engine with its last one."""
        if self._engine.has_failed and not output.finish_reason:
            group.end = group.end or GroupEnd.engine_failed
        num_tokens = group.take(request.id, output)
        self._meter.generated(num_tokens)
        self._places_changed()
        if not group.outstanding:
            await self._leave_engine(group)

    def _count_generated(self) -> int:
        """Policy tokens of all samples that have ended, and of those that run as far as they have come."""
        running = [request_id for group in self._groups.values() for request_id in group.outstanding_policy]
        return self._meter.counters().tokens_generated + self._engine.num_written(running)

    async def _leave_engine(self, group: InflightGroup) -> None:
        """See to what becomes of a group that the engine is done with."""
        if group.phase is GroupPhase.cutting and not group.is_finished and group.end is None:
            group.phase = GroupPhase.parked
            self._spawn(self._settlement.save, group)
        else:
            group.phase = GroupPhase.settling
            if group.is_finished:
                self._stamp(GroupEvent.last_token, group)
            self._spawn(self._settle, group)
        self._count_running()
        await self._notify()

    async def _settle(self, group: InflightGroup) -> None:
        async with self._settling_turns:  # a few per turn of the event loop: the engine's next work goes first
            await asyncio.sleep(0)
        await self._settlement.settle(group, engine_failure=self._failure)
        await self._forget(group)

    async def _forget(self, group: InflightGroup) -> None:
        del self._groups[group.key]
        self._places_changed()
        await self._notify()

    # Cutting off

    async def _end(self, group: InflightGroup, end: GroupEnd) -> None:
        """Have a group given back: now if it is parked, else once the engine is done with it."""
        group.end = end
        if group.phase is GroupPhase.parked:
            await self._leave_engine(group)
        elif group.phase in ON_ENGINE:
            group.phase = GroupPhase.ending

    async def _park(self, timeout_s: float) -> bool:
        """Cut running groups off until `_continue_parked`; returns whether all were cut off in time."""
        for group in self._groups.values():
            if group.phase is GroupPhase.generating:
                group.phase = GroupPhase.cutting
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._abort_all(GroupPhase.cutting)
        uncut = self._running(GroupPhase.cutting)
        if uncut:
            logger.warning("%d prompt groups were not cut off within %g s; they go on", len(uncut), timeout_s)
        for group in uncut:
            group.phase = GroupPhase.generating
        return not uncut

    def _continue_parked(self) -> None:
        parked = [group for group in self._groups.values() if group.phase is GroupPhase.parked]
        for group in parked:
            group.phase = GroupPhase.generating
        if parked:
            self._spawn(self._generate, parked)

    async def _abort_all(self, phase: GroupPhase) -> None:
        """Abort the requests of all groups in ``phase`` until none is left in it.

        An engine may hear of an abort before the request itself reaches it, and ignore it. Therefore what has not ended
        after half of ``stop_timeout_s`` is aborted again.
        """
        await asyncio.sleep(0)  # what was sent at this moment reaches the engine
        while groups := self._running(phase):
            await self._engine.abort([request_id for group in groups for request_id in group.outstanding])
            with suppress(TimeoutError):
                async with asyncio.timeout(self._config.stop_timeout_s / 2):
                    await self._until(lambda: not self._running(phase))

    def _running(self, *phases: GroupPhase) -> list[InflightGroup]:
        """The groups in one of ``phases``; on the engine, unless told otherwise."""
        return [group for group in self._groups.values() if group.phase in (phases or ON_ENGINE)]

    def _count_running(self) -> None:
        self._meter.running(len(self._running()))
        self._places_changed()

    def _places_changed(self) -> None:
        """Note what holds the engine's places, once for all that happens in this turn of the event loop."""
        if not self._is_noting and record.current() is not None:
            self._is_noting = True
            asyncio.get_running_loop().call_soon(self._note_places)

    def _note_places(self) -> None:
        self._is_noting = False
        note_places(self._groups.values(), num_places=self._num_places)

    def _first_token_of(self, group: InflightGroup) -> Callable[[], None] | None:
        """Notes the group's first token, whichever sample it belongs to; None where nothing is recorded."""
        if record.current() is None:
            return None
        has_come = False

        def note() -> None:
            nonlocal has_come
            if not has_come:
                has_come = True
                self._stamp(GroupEvent.first_token, group)

        return note

    def _stamp(self, event: GroupEvent, group: InflightGroup) -> None:
        group_id, attempt = group.key
        record.stamp(event, group_id, attempt=attempt, version=self._engine.version)

    # The end

    async def _let_settle(self) -> None:
        """After the engine's failure: store what is whole, and give back the rest with what is written of it."""
        for group in self._running(GroupPhase.parked):
            await self._end(group, GroupEnd.engine_failed)
        try:
            async with asyncio.timeout(self._config.reward_timeout_s + self._config.stop_timeout_s):
                await self._until(lambda: not self._groups)
        except TimeoutError:
            logger.warning("%d prompt groups of a failed engine are given back as they are", len(self._groups))

    async def _put_down(self) -> None:
        """Cut running groups off and wait for what they wrote so far, so that their tokens are accounted for.

        A load that has begun comes to its end meanwhile: an engine of which it is cut off has failed.
        """
        for group in list(self._groups.values()):
            if group.phase is not GroupPhase.settling:
                await self._end(group, GroupEnd.stopped)
        try:
            async with asyncio.timeout(self._config.stop_timeout_s):
                await self._abort_all(GroupPhase.ending)
                await self._until(lambda: not self._groups and not self._is_loading)
        except TimeoutError:
            loading = " and the load of weights" if self._is_loading else ""
            logger.warning("%d prompt groups%s did not end within stop_timeout_s", len(self._groups), loading)
        except Exception as error:  # noqa: BLE001 - the engine may fail in any way while it stops
            logger.warning("%d prompt groups are given back as they are: %s", len(self._groups), error)


async def _cancel(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
