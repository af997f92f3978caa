"""The rollout loop of one worker. It repeats these steps until it is stopped. A lease is the right to generate a group.

    lease ──groups──▶ engine ──samples──▶ score ──▶ put / release
      ▲                                                 │
      └───────── room for another group ◀───────────────┘

The tasks of the loop wait for the following events. Every change of the loop's state or of a group's phase notifies the
condition ``_changed``.

- `_keep_leasing` waits for room on the engine, then for leases. A group that leaves the engine ends the first wait. The
  buffer ends the second wait. The loop cancels a request for leases that still waits if the engine loads a new version
  or has less room, if the device is released, or if the worker must leave.
- `_send` (one task per batch of leases) waits for the next finished sample. The engine wakes it.
- `_settle` (one task per group) first lets tasks run that send requests to the engine. Then it waits for the reward,
  then for the buffer. The reward and the buffer wake it.
- `load_next` waits for weights. The buffer's offer of a version wakes it.
- `_obey` waits for a revoked lease, or for a request to hand groups to another worker. The buffer wakes it.
- `_keep_fitting` and `_keep_renewing` wait for their timers.
- `run` waits for `stop` or for the first failure of a task. One of the tasks is `Engine.wait_failed`.
- `load_weights`, `release_device` and `stop` wait until groups leave the engine or the loop. `_send` and `_settle`
  wake these three methods.

A stop, a weight update or a failure of the engine can cut a group off. The group's tokens are then saved with its
lease. After an update, this worker continues the group. After a stop or a failure, the next holder of the lease
continues it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import replace
from enum import Enum, auto
from functools import partial
from typing import Any

from asyncrl.core import receipts, record
from asyncrl.core.errors import AsyncRLError, EngineError, RequestRefused, WeightsGone
from asyncrl.core.image_files import prompt_images
from asyncrl.core.images import PlacedImage
from asyncrl.core.ports import RolloutBuffer
from asyncrl.core.record import GroupEvent, LevelName, SpanKind
from asyncrl.core.stacks import missed
from asyncrl.core.types import Lease, WeightOffer

from .answering import AnsweringParts
from .config import RolloutFleetConfig, SaveProgress
from .engines.engine import NOTHING, Engine, SampleOutput, SampleRequest, cancel
from .episodes.episode_run import EpisodeRun, Player
from .inflight import ON_ENGINE, GroupEnd, GroupLimit, GroupPhase, InflightGroup, InflightGroups
from .metrics import FleetCounters, FleetMeter
from .settlement import Settlement

logger = logging.getLogger(__name__)

MAX_RENEWAL_FAILURES = 3
READ_LOAD_EVERY_S = 1.0
SETTLED_AT_ONCE = 8
GATHER_S = 0.02
"""Seconds of pause before a lease request while the engine has work, so that one request asks for several groups."""
ASK_AGAIN_S = 0.1
"""Seconds of pause before a turn is requested again, if the engine aborted the turn before its first token."""


class LoopState(Enum):
    """The states of a `RolloutLoop`, in order."""

    idle = auto()
    running = auto()
    stopping = auto()
    ended = auto()


class RolloutLoop:
    """Generates prompt groups on one engine. Call `run` once. The other methods may be called while `run` runs.

    Args:
        parts: The engine and its helpers, already started. The loop does not close them.
        name: Name of the engine in messages and receipts. Example: ``"engine-3"``.
        samples_per_prompt: Group size G.
        greedy_baseline: Sample one more response per prompt greedily. The learner does not train on it.
        seed: The run's seed if every answer gets its own seed, otherwise None.
        stage: Context manager that copies or links the files of an offered weight version to the engine's host. It
            yields an offer that names these local files; the engine loads this offer.
    """

    def __init__(
        self,
        config: RolloutFleetConfig,
        parts: AnsweringParts,
        *,
        name: str,
        buffer: RolloutBuffer,
        samples_per_prompt: int,
        greedy_baseline: bool = False,
        seed: int | None = None,
        stage: Callable[[WeightOffer], AbstractAsyncContextManager[WeightOffer]] = nullcontext,
    ) -> None:
        self._config = config
        self._engine, self._player, self._images = parts.engine, parts.player, parts.images
        self._playing: dict[tuple[int, int], list[asyncio.Task[None]]] = {}
        self._stage = stage
        self._name = name
        self._buffer = buffer
        self._begin_group = partial(
            InflightGroup.begin,
            num_samples=samples_per_prompt,
            greedy_baseline=greedy_baseline,
            seed=seed,
        )
        self._meter = FleetMeter()
        self._stamp = partial(_stamp, self._engine)
        self._settlement = Settlement(config, parts, buffer=buffer, meter=self._meter, stamp=self._stamp, engine=name)
        self._limit = GroupLimit(config.fewest_groups_in_flight, config.most_groups_in_flight)
        self._groups = InflightGroups(
            self._limit,
            samples_per_group=samples_per_prompt + int(greedy_baseline),
            meter=self._meter,
            most_held=config.environment.max_groups,
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Condition()
        self._settling_turns = asyncio.Semaphore(SETTLED_AT_ONCE)
        self._state = LoopState.idle
        self._failure: Exception | None = None
        self._has_loaded = False  # becomes true at the first load of weights, and stays true
        self._has_weights = False
        self._is_released = False
        self._is_leaving = False
        self._releasing = asyncio.Lock()
        self._incarnation = 0
        self._is_loading = False
        self._is_asking = False
        self._released = record.NO_SPAN
        buffer.count_generated = self.count_generated

    async def run(self) -> FleetCounters:
        """Lease prompt groups, generate, score and store them. Runs until `stop` is called or the loop fails.

        At the end, running samples are aborted, and all leases (rights of this worker to generate a group) are given
        back, so that other workers can continue the groups. Returns the final counters.

        Raises `AsyncRLError` if the engine or the replay buffer fails. If the buffer still answers, all leases are
        given back first.
        """
        if self._state is LoopState.ended:
            return self.counters()
        self._state = LoopState.running
        leasing = self._spawn(self._keep_leasing)
        pumps = [self._keep_renewing, self._engine.wait_failed] + ([] if self._limit.is_fixed else [self._keep_fitting])
        obeying = (self._spawn(self._obey, end) for end in (GroupEnd.revoked, GroupEnd.handed_on))
        pump_tasks = {leasing, *(self._spawn(pump) for pump in pumps), *obeying}
        # Keep `load_next` out of `pump_tasks`: a stop cancels `pump_tasks`, but waits for a running weight load.
        self._spawn(partial(self.load_next, self._engine.version, keeps_on=True))
        try:
            await self._until(lambda: self._state is LoopState.stopping or self._failure is not None)
            if self._failure is not None:
                await cancel({leasing})
                if self._engine.has_failed:
                    await self._let_settle()
                raise self._failure
            await cancel(pump_tasks)
            await self._cut_off_all()
        finally:
            await cancel(self._tasks)
            groups = list(self._groups)
            for group in groups:
                self._groups.remove(group)
            await self._settlement.give_back(groups)
            self._groups.moved()
            self._state = LoopState.ended
            await self._notify()
        return self.counters()

    async def wait_ended(self) -> None:
        """Wait until `run` has ended. Returns immediately if `run` is not running."""
        await self._until(lambda: self._state not in (LoopState.running, LoopState.stopping))

    async def stop(self) -> FleetCounters:
        """End `run`, wait until it has given back all leased groups, and return the final counters.

        May be called more than once. If `stop` is called before `run`, a later `run` returns immediately.
        """
        if self._state in (LoopState.idle, LoopState.running):
            self._state = LoopState.ended if self._state is LoopState.idle else LoopState.stopping
            await self._notify()
        await self._until(lambda: self._state is LoopState.ended)
        return self.counters()

    async def load_next(self, after: int, *, keeps_on: bool = False) -> None:
        """Wait until weights newer than the policy version ``after`` are published, and load them into the engine.

        If ``after`` is -1, any version is new enough. After the load, the method tells the replay buffer which version
        the engine serves. With ``keeps_on``, the method also loads each later version until `run` ends.

        Raises the errors of `Engine.load_weights`, and `WeightsError` if the learner could not publish a version.
        """
        offer = await self._buffer.next_offer(after)
        while True:
            began_s = time.monotonic()
            try:
                await self.load_weights(offer)
            except WeightsGone as gone:
                logger.info("%s", gone)
                offer = await self._next_after(offer, gone)
                continue
            await self._buffer.loaded(offer.version, time.monotonic() - began_s)
            if not keeps_on or self._state is not LoopState.running:
                return
            offer = await self._buffer.next_offer(self._engine.version)

    async def _next_after(self, offer: WeightOffer, gone: WeightsGone) -> WeightOffer:
        """Wait for a new offer and return it, because the weights of ``offer`` were removed.

        Raises ``gone`` if the buffer still offers the removed weights after ``load_timeout_s``. If the learner has
        restarted, this method waits for the learner's next offer without a deadline.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.load_timeout_s):
                return await self._buffer.next_offer(offer.version)
        shown = await self._buffer.next_offer(offer.version - 1)
        if shown == offer:
            raise gone
        return shown

    async def load_weights(self, offer: WeightOffer) -> None:
        """Bring the files of the offered weights to the engine's host (staging), then load them into the engine.

        Samples are generated during the staging. Groups that are leased after the load get the new policy version.

        Raises the errors of `Engine.load_weights`. Raises `WeightsGone` if the weights were removed before the staging,
        or if a new learner has replaced the learner that published them.
        """
        timeout_s = self._config.update_timeout_s(offer.num_bytes)
        staging = record.span(SpanKind.stage, lane="/staging", version=offer.version)
        try:
            async with asyncio.timeout(timeout_s), self._stage(offer) as local:
                staging.close()
                if self._config.save_progress is SaveProgress.at_updates:
                    await self._park(self._config.load_timeout_s)
                if offer.incarnation < self._incarnation:
                    raise WeightsGone(f"{offer.name} is from the old incarnation {offer.incarnation} of the learner")
                self._is_loading, self._is_released = True, False
                self._meter.loaded(await self._engine.load_weights(local))
            receipts.note(receipts.Act.loaded, engine=self._name, version=offer.version, digest=offer.digest)
            self._released.close()
            record.level(LevelName.version, self._engine.version)
            record.cpu()
            self._has_loaded = self._has_weights = True
            if parked := self._groups.in_phase(GroupPhase.parked):
                for group in parked:
                    group.phase = GroupPhase.generating
                self._spawn(self._generate, parked)
        except TimeoutError:
            raise missed(
                f"{self._name} did not load policy version {offer.version} within {timeout_s:g} s; raise "
                "rollout_fleet.load_timeout_s if the load is only slow"
            ) from None
        finally:
            self._is_loading = False
            await self._notify()

    async def release_device(self, incarnation: int | None = None) -> None:
        """Wait until the running groups have finished, then free the engine's memory on the device for the learner.

        No new groups are leased until the next weights are loaded. Groups that do not finish within ``drain_timeout_s``
        are aborted, and continue after the next load. The release waits for a running load of weights. Without
        ``incarnation`` it also waits for the engine's first load.

        If a new learner has replaced a dead learner, pass ``incarnation``, the number of restarts of the learner. Then
        weights of earlier incarnations are refused.

        Raises `DeadlineError` if the engine does not abort its groups.
        """
        if incarnation is not None:
            self._incarnation = max(self._incarnation, incarnation)
            await self._notify()
        current = self._incarnation

        def may_release() -> bool:
            needs_first_load = incarnation is None and current == self._incarnation
            return not self._is_loading and (self._has_loaded or not needs_first_load)

        async with self._releasing:
            await self._until(may_release)
            if not self._is_released:
                await self._release_device()
                self._is_released = True

    async def _release_device(self) -> None:
        self._has_weights = False
        await self._notify()
        await self._until(lambda: not self._is_asking)
        try:
            async with asyncio.timeout(self._config.drain_timeout_s):
                await self._until(lambda: not len(self._groups))
        except TimeoutError:
            if not await self._park(self._config.load_timeout_s):
                raise missed(
                    f"{len(self._groups.in_phase())} prompt groups did not finish within "
                    f"rollout_fleet.drain_timeout_s = {self._config.drain_timeout_s:g} s, and were not aborted within "
                    f"rollout_fleet.load_timeout_s = {self._config.load_timeout_s:g} s; the learner needs the device"
                ) from None
        await self._engine.release_memory()
        self._released = record.span(SpanKind.released)

    async def let_end(self) -> None:
        """Take no more prompt groups from the replay buffer, because this worker leaves the run.

        If the run never saves unfinished groups (``save_progress=never``), wait up to ``drain_timeout_s`` for the
        running groups to finish.
        """
        self._is_leaving = True
        await self._notify()
        if self._config.save_progress is not SaveProgress.never:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.drain_timeout_s):
                await self._until(
                    lambda: self._state is not LoopState.running or not (self._is_asking or len(self._groups))
                )

    def counters(self) -> FleetCounters:
        """Return this worker's counters of tokens, groups and seconds up to now."""
        counters = self._meter.counters()
        return counters if self._player is None else replace(counters, episodes=self._player.counts)

    def count_generated(self) -> int:
        """Return how many tokens the engine has sampled for training so far, including running samples."""
        return self._meter.counters().tokens_generated + self._engine.num_written(self._groups.outstanding_policy)

    # Tasks

    def _spawn(self, work: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> asyncio.Task[None]:
        task = asyncio.create_task(self._guarded(work, *arguments))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _guarded(self, work: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        try:
            await work(*arguments)
        except Exception as error:  # noqa: BLE001 - any error of a task makes `run` fail
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

    # Leases

    async def _keep_leasing(self) -> None:
        """Keep one request for leases (rights to generate groups) open while the engine has room for a group.

        If the policy version changes, or fewer groups fit on the engine, cancel the request and send a new request.
        """
        while True:
            await self._until(lambda: self._may_lease and self._groups.num_free > 0)
            if self._groups.in_phase():
                await asyncio.sleep(GATHER_S)
            version, num_asked = self._engine.version, self._groups.num_free
            if not self._may_lease or num_asked == 0:  # new turns may have filled the engine during the sleep
                continue

            def is_outdated(version: int = version, num_asked: int = num_asked) -> bool:
                return not self._may_lease or self._engine.version != version or self._groups.num_free < num_asked

            grant = asyncio.create_task(self._buffer.lease(version, num_asked))
            outdated = asyncio.create_task(self._until(is_outdated))
            self._is_asking = True
            self._meter.asking(True)
            record.level(LevelName.asking, 1)
            try:
                await asyncio.wait([grant, outdated], return_when=asyncio.FIRST_COMPLETED)
                if grant.done():
                    leases = grant.result()
                    self._begin(leases, [await prompt_images(self._images, lease.prompt) for lease in leases])
            except asyncio.CancelledError:
                if grant.done() and not grant.cancelled() and grant.exception() is None:
                    for lease in grant.result():
                        await self._buffer.release(lease, num_tokens=0, reason=str(GroupEnd.stopped))
                raise
            finally:
                try:
                    await cancel({grant, outdated})
                finally:
                    self._is_asking = False
                    self._meter.asking(False)
                    record.level(LevelName.asking, 0)
                await self._notify()

    @property
    def _may_lease(self) -> bool:
        return self._has_weights and not self._is_leaving and not self._engine.has_failed

    async def _keep_fitting(self) -> None:
        """Read the engine's load once per second while the engine has groups, and adapt the limit on groups."""
        has_read = False
        while True:
            await self._until(lambda: bool(self._groups.in_phase()))
            await asyncio.sleep(READ_LOAD_EVERY_S)
            try:
                load = await self._engine.read_load()
            except EngineError as error:
                if not has_read or self._engine.has_failed:
                    raise
                logger.warning("the limit on prompt groups stays %d: %s", self._limit.value, error)
                continue
            has_read = True
            if self._limit.note(load, num_held=self._groups.num_on_engine):
                self._groups.note_capacity()
                await self._notify()

    def _begin(self, leases: Sequence[Lease], images: Sequence[tuple[PlacedImage, ...]]) -> None:
        answering = []
        for lease, own_images in zip(leases, images, strict=True):
            player = self._player if self._player is not None and self._player.plays(lease.prompt) else None
            group = self._begin_group(
                lease,
                sampling=self._config.sampling_for(lease.prompt.data_source),
                budget=player.budget if player else None,
                progress=self._buffer.take_progress(lease),
                images=own_images,
            )
            self._groups.add(group)
            if player:
                self._begin_playing(group, player)
            else:
                answering.append(group)
        if answering:
            self._spawn(self._generate, answering)

    def _begin_playing(self, group: InflightGroup, player: Player) -> None:
        """Start one task per episode of a group. In this task, the environment plays the episode.

        When the environment requests a turn of the policy, `_generate` sends this request to the engine.
        """

        def ask() -> None:
            if group.phase is GroupPhase.generating:
                self._spawn(self._generate, [group])

        group.runs = [
            EpisodeRun(episode, ask=ask, vocab_size=self._engine.vocab_size, on_place=self._groups.note_places)
            for episode in group.episodes
        ]
        self._playing[group.key] = [
            self._spawn(self._play, group, index, player) for index in range(len(group.episodes))
        ]
        self._groups.note_places()

    async def _play(self, group: InflightGroup, index: int, player: Player) -> None:
        run = group.runs[index]
        own = self._config.sampling_for(group.lease.prompt.data_source)
        sampling = own if index < len(group.trained) else own.greedy()
        try:
            await player.play(group.lease.prompt, run, sampling=sampling, index=index)
        finally:
            run.end("its environment has ended" if run.is_over else "its group leaves this worker")
        await self._engine.abort([name for name in group.outstanding if group.belongs_to(name, index)])
        self._groups.moved()
        await self._leave_if_done(group)
        await self._notify()

    async def _keep_renewing(self) -> None:
        """Renew all leases every ``renew_every_s`` seconds. After three failures in a row, raise the third failure."""
        num_failures = 0
        while True:
            await asyncio.sleep(self._config.renew_every_s)
            try:
                if len(self._groups):
                    await self._buffer.renew([group.lease for group in self._groups])
                num_failures = 0
            except AsyncRLError as error:
                num_failures += 1
                if num_failures == MAX_RENEWAL_FAILURES:
                    raise
                logger.warning("%d leases were not renewed: %s", len(self._groups), error)

    async def _obey(self, end: GroupEnd) -> None:
        """Release groups when the buffer revokes their leases or hands the groups over to another worker.

        A group is not handed over if its tokens would be lost. This is the case if progress is never saved, or if an
        environment of the group cannot be replayed.
        """
        while True:
            if end is GroupEnd.revoked:
                keys, spared = [await self._buffer.revocation()], [GroupPhase.settling]
            else:
                keys, spared = await self._buffer.hand_on_request(), [GroupPhase.ending, GroupPhase.settling]
            found = [group for key in keys if (group := self._groups.get(key)) is not None]
            chosen = [group for group in found if group.phase not in spared]
            if end is GroupEnd.handed_on:
                is_saved = self._config.save_progress is not SaveProgress.never
                chosen = [group for group in chosen if is_saved and group.is_replayable]
            for group in chosen:
                await self._end(group, end)
            await self._engine.abort([request_id for group in chosen for request_id in group.outstanding])

    # The methods below move groups from phase to phase.

    async def _generate(self, groups: Sequence[InflightGroup], *, apart: bool = False, pause_s: float = 0.0) -> None:
        """Send the new requests of ``groups`` to the engine, after a pause of ``pause_s`` seconds.

        All requests go in one call; with ``apart``, each request gets its own call. If a group has no unanswered
        requests and its environments can send no more requests, the engine has finished the group. Then `_leave_engine`
        begins the next phase of the group.
        """
        if pause_s:
            await asyncio.sleep(pause_s)
        asked: dict[str, InflightGroup] = {}
        requests: list[SampleRequest] = []
        for group in groups:
            if group.phase is GroupPhase.generating:
                new = group.next_requests(on_first_token=_first_token_stamp(self._engine, group))
                asked.update((request.id, group) for request in new)
                requests += new
            await self._leave_if_done(group)
        self._groups.moved()
        if apart:
            for request in requests:
                self._spawn(self._send, [asked[request.id]], asked, [request])
        else:
            await self._send(groups, asked, requests)

    async def _send(
        self, groups: Sequence[InflightGroup], asked: Mapping[str, InflightGroup], requests: Sequence[SampleRequest]
    ) -> None:
        """Send requests to the engine in one call, and process the answers. ``asked`` maps request ids to groups."""
        try:
            async for request, output in self._engine.generate(requests):
                await self._take(asked[request.id], request, output)
        except RequestRefused as refused:
            left = [request.id for request in requests if request.id in asked[request.id].outstanding]
            waiting = {asked[name].key: asked[name] for name in left}
            if not any(group.runs for group in waiting.values()):
                raise
            if len(left) > 1:  # send each request alone, to find the refused requests
                for name in left:
                    asked[name].take(name, NOTHING)
                await self._generate([*waiting.values()], apart=True)
                return
            for group in waiting.values():  # raise the error in the environment that sent the request
                group.refuse(left, refused)
                await self._leave_if_done(group)
        except Exception:
            for group in groups:  # `_take` ends only groups with a running request, so end the other groups here
                if self._engine.has_failed and group.phase in ON_ENGINE:
                    group.end = group.end or GroupEnd.engine_failed
                    await self._leave_engine(group)
            raise

    async def _take(self, group: InflightGroup, request: SampleRequest, output: SampleOutput) -> None:
        if self._engine.has_failed and not output.finish_reason:
            group.end = group.end or GroupEnd.engine_failed
        num_tokens = group.take(request.id, output)
        self._meter.add(tokens_generated=num_tokens, tokens_in_flight=num_tokens)
        if group.is_playing:  # wake `_keep_leasing` with `_notify`, because the group may need less room now
            if not output.finish_reason and group.phase is GroupPhase.generating and group.end is None:
                # the engine aborted the turn without a request from this loop, so request the turn again
                pause_s = 0.0 if len(output.token_ids) else ASK_AGAIN_S
                self._spawn(partial(self._generate, [group], pause_s=pause_s))
            self._groups.moved()
            await self._notify()
        else:
            self._groups.note_places()
        await self._leave_if_done(group)

    async def _leave_if_done(self, group: InflightGroup) -> None:
        if group.is_done_here and group.phase in ON_ENGINE:
            await self._leave_engine(group)

    async def _leave_engine(self, group: InflightGroup) -> None:
        if group.phase is GroupPhase.cutting and not group.is_finished and group.end is None:
            group.phase = GroupPhase.parked
            self._spawn(self._settlement.save, group)
        else:
            group.phase = GroupPhase.settling
            for playing in self._playing.pop(group.key, ()):
                playing.cancel()
            if group.is_finished:
                self._stamp(GroupEvent.last_token, group)
            self._spawn(self._settle, group)
        self._groups.moved()
        await self._notify()

    async def _settle(self, group: InflightGroup) -> None:
        async with self._settling_turns:  # let tasks that send requests to the engine run before this group is scored
            await asyncio.sleep(0)
        await self._settlement.settle(group, engine_failure=self._failure)
        self._groups.remove(group)
        await self._notify()

    # Cutting off

    async def _end(self, group: InflightGroup, end: GroupEnd) -> None:
        """Make a group leave this worker, for the reason ``end``.

        A group without unanswered requests leaves now. Any other group leaves when the engine has answered its
        requests.
        """
        group.end = end
        for playing in self._playing.get(group.key, ()):
            playing.cancel()
        if group.phase is GroupPhase.parked or (group.runs and group.phase in ON_ENGINE and not group.outstanding):
            await self._leave_engine(group)
        elif group.phase in ON_ENGINE:
            group.phase = GroupPhase.ending

    async def _park(self, timeout_s: float) -> bool:
        """Abort running groups until the next weight load. Return whether all groups were aborted in time."""
        for group in self._groups.in_phase(GroupPhase.generating):
            group.phase = GroupPhase.cutting
            if group.runs and not group.outstanding:
                await self._leave_engine(group)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._abort_all(GroupPhase.cutting)
        uncut = self._groups.in_phase(GroupPhase.cutting)
        if uncut:
            logger.warning("%d prompt groups were not aborted within %g s; they continue", len(uncut), timeout_s)
        for group in uncut:
            group.phase = GroupPhase.generating
        if uncut:  # request the turns of these groups that were aborted above, or that environments requested meanwhile
            self._spawn(self._generate, uncut)
        return not uncut

    async def _abort_all(self, phase: GroupPhase) -> None:
        """Abort the requests of all groups in ``phase`` until no group is in this phase.

        The abort is repeated, because an engine ignores the abort of a request that has not arrived yet.
        """
        await asyncio.sleep(0)  # let tasks that are sending requests run before the abort
        while groups := self._groups.in_phase(phase):
            await self._engine.abort([request_id for group in groups for request_id in group.outstanding])
            with suppress(TimeoutError):
                async with asyncio.timeout(self._config.stop_timeout_s / 2):
                    await self._until(lambda: not self._groups.in_phase(phase))

    # The end

    async def _let_settle(self) -> None:
        """Wait until finished groups of the failed engine are stored, and unfinished groups are saved and released."""
        for group in self._groups:
            if group.phase is GroupPhase.parked or (group.phase in ON_ENGINE and not group.outstanding):
                await self._end(group, GroupEnd.engine_failed)
        try:
            async with asyncio.timeout(self._config.reward_timeout_s + self._config.stop_timeout_s):
                await self._until(lambda: not len(self._groups))
        except TimeoutError:
            logger.warning("%d prompt groups of a failed engine are released as they are", len(self._groups))

    async def _cut_off_all(self) -> None:
        """Abort running groups and wait for their tokens. Do not cancel a running weight load, but wait for it."""
        for group in self._groups:
            if group.phase is not GroupPhase.settling:
                await self._end(group, GroupEnd.stopped)
        try:
            async with asyncio.timeout(self._config.stop_timeout_s):
                await self._abort_all(GroupPhase.ending)
                await self._until(lambda: not len(self._groups) and not self._is_loading)
        except TimeoutError:
            loading = " and the load of weights" if self._is_loading else ""
            logger.warning("%d prompt groups%s did not end within stop_timeout_s", len(self._groups), loading)
        except Exception as error:  # noqa: BLE001 - the engine may fail in any way
            logger.warning("%d prompt groups are released as they are: %s", len(self._groups), error)


def _stamp(engine: Engine, event: GroupEvent, group: InflightGroup) -> None:
    group_id, attempt = group.key
    record.stamp(event, group_id, attempt=attempt, version=engine.version)


def _first_token_stamp(engine: Engine, group: InflightGroup) -> Callable[[], None] | None:
    if record.current() is None or (group.runs and group.num_own_tokens):
        return None
    stamps = iter([partial(_stamp, engine, GroupEvent.first_token, group)])
    return lambda: next(stamps, lambda: None)()
