"""The rollout loop of one worker: lease, generate, score, put, until it is stopped.

    ask for admission ──leases──▶ engine ──answers──▶ score ──▶ put / release
          ▲  woken by a free place or a new policy version            │
          └──────────────────────── a free place ◀────────────────────┘

Beside it run: renewal (a timer), revocations (woken by the buffer), and the watch over the engine (woken by its
death). The first of them to fail ends the loop with its error. Knows neither Ray nor sockets nor any engine.

A group that is cut off, by a stop or by a weight update that is to save what runs, is saved with its lease as far as it
is written; whoever leases it next, or this worker after the update, goes on from there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from asyncrl.protocol.errors import AsyncRLError, DeadlineError, LeaseExpired, StoreFull, VersionTooOld
from asyncrl.protocol.ports import RolloutBuffer
from asyncrl.protocol.types import Lease, WeightSnapshot

from .config import RolloutFleetConfig, SaveProgress
from .decoding import Decode
from .engines.base import Engine
from .held import Held, request_id
from .meter import FleetMeter
from .rewards.scorer import RewardScorer
from .trajectory import to_prefixes, to_progress, to_trajectory_group
from .types import FleetCounters, GenerationRequest, GroupOutput

logger = logging.getLogger(__name__)


class RolloutLoop:
    """Rolls prompt groups out on one engine. `run` once; the other methods may be called while it runs."""

    def __init__(
        self,
        config: RolloutFleetConfig,
        *,
        engine: Engine,
        buffer: RolloutBuffer,
        scorer: RewardScorer,
        decode: Decode,
        samples_per_prompt: int,
    ) -> None:
        """Take the collaborators, all started; the loop closes none of them. Needs a running event loop."""
        self._config = config
        self._engine = engine
        self._buffer = buffer
        self._scorer = scorer
        self._decode = decode
        self._samples_per_prompt = samples_per_prompt
        self._meter = FleetMeter()
        self._held: dict[str, Held] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._parked: dict[str, Held] = {}
        self._place_free = asyncio.Event()
        self._changed = asyncio.Event()
        self._open = asyncio.Event()
        self._open.set()
        self._asks_nothing = asyncio.Event()
        self._moved_on = asyncio.Event()
        self._stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._began = False
        self._finished = asyncio.Event()

    async def run(self) -> FleetCounters:
        """Roll out until `stop`; then abort, give back what is held, and return the final counters.

        Raises:
            AsyncRLError: the engine died, the buffer failed, or a reward did; all leases are given back first, as
                far as the buffer still answers.
        """
        self._began = True
        pumps = [self._ask(), self._renew(), self._obey_revocations(), self._watch_engine()]
        pump_tasks = {self._spawn(pump) for pump in pumps}
        try:
            await asyncio.shield(self._stopped)
            await _cancel(pump_tasks)
            await self._abort_all()
        finally:
            await _cancel(self._tasks)
            self._parked.clear()
            await self._release_all()
            self._finished.set()
        return self._meter.counters()

    async def stop(self) -> None:
        """End `run`; returns when it has given everything back. May be called more than once, or before `run`."""
        if not self._stopped.done():
            self._stopped.set_result(None)
        if self._began:
            await self._finished.wait()

    async def load_weights(self, snapshot: WeightSnapshot) -> None:
        """Load new weights into the engine; new leases are asked for at their version from then on."""
        try:
            if self._config.save_progress is SaveProgress.at_updates:
                await self._park_running()
            self._meter.loaded(await self._engine.load_weights(snapshot))
        finally:
            self._go_on()
        self._changed.set()
        self._open.set()

    async def _park_running(self) -> None:
        """Cut running groups off, and wait until the engine has answered with what is written of them."""
        cut = {rid: held for rid, held in self._held.items() if held.running and not held.revoked}
        for held in cut.values():
            held.cut = True

        def uncut() -> list[str]:
            return [rid for rid, held in cut.items() if held.cut and rid in self._held]

        if not await self._abort(uncut, lambda: not uncut(), timeout_s=self._config.load_timeout_s):
            logger.warning("%d prompt groups were not cut off within load_timeout_s, and are not saved", len(uncut()))
        for held in cut.values():
            held.cut = False

    def _go_on(self) -> None:
        """Continue what was cut off."""
        parked, self._parked = self._parked, {}
        for held in parked.values():
            if held.revoked:
                self._spawn(self._release(held, reason="revoked"))
        if going_on := {rid: held for rid, held in parked.items() if not held.revoked}:
            self._spawn(self._generate(going_on))

    async def release_device(self) -> None:
        """Ask for no more work, let what runs end, and have the engine give up its device until `load_weights`.

        Raises:
            DeadlineError: what runs did not end within ``generate_timeout_s`` and ``reward_timeout_s``.
        """
        self._open.clear()
        self._changed.set()
        timeout_s = self._config.generate_timeout_s + self._config.reward_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                if self._began:
                    await self._asks_nothing.wait()
                await self._until(lambda: not self._held)
        except TimeoutError:
            raise DeadlineError(
                f"{len(self._held)} prompt groups did not end within {timeout_s:g} s before the learner's turn; raise "
                "rollout_fleet.generate_timeout_s, or lower rollout_fleet.sampling.max_new_tokens"
            ) from None
        await self._engine.release_memory()

    def counters(self) -> FleetCounters:
        """What has been done up to now."""
        return self._meter.counters()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run ``work`` beside the loop; its failure ends the loop."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[None]) -> None:
        """Let the first failure of any task end the loop."""
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if not self._stopped.done():
            self._stopped.set_exception(error)
        else:
            logger.warning("rollout worker: while it was ending, also: %s", error)

    # Admission

    async def _ask(self) -> None:
        """Keep one request for admission outstanding while a place is free.

        A new policy version supersedes the request: it is cancelled, which gives back what is granted meanwhile, and
        sent again at the new version. While the device is released nothing is asked for.
        """
        while True:
            while not self._open.is_set():
                self._asks_nothing.set()
                await self._open.wait()
            self._asks_nothing.clear()
            num_free = self._config.groups_in_flight - len(self._held)
            if num_free <= 0:
                self._place_free.clear()
                await self._place_free.wait()
                continue
            self._changed.clear()
            lease = asyncio.create_task(self._buffer.lease(self._engine.version, num_free))
            changed = asyncio.create_task(self._changed.wait())
            self._meter.asking(True)
            try:
                await asyncio.wait([lease, changed], return_when=asyncio.FIRST_COMPLETED)
                if lease.done():
                    self._roll_out(lease.result())
            except asyncio.CancelledError:
                await self._give_back(lease)
                raise
            finally:
                self._meter.asking(False)
                await _cancel({lease, changed})

    async def _give_back(self, answer: asyncio.Task[list[Lease]]) -> None:
        """Give back what was granted at the very moment of a stop."""
        if answer.done() and not answer.cancelled() and answer.exception() is None:
            for lease in answer.result():
                await self._buffer.release(lease, num_tokens=0, reason="stopped")

    def _roll_out(self, leases: Sequence[Lease]) -> None:
        """Send newly leased groups to the engine."""
        if not leases:
            return
        taken = {held.rid: held for held in (Held(lease=lease) for lease in leases)}
        self._held.update(taken)
        for held in taken.values():
            self._take_up(held)
        self._spawn(self._generate(taken))

    def _take_up(self, held: Held) -> None:
        """Go on from what an earlier attempt saved of the group."""
        progress = self._buffer.take_progress(held.lease)
        if progress is not None:
            held.prefixes = to_prefixes(progress, num_samples=self._samples_per_prompt)
            held.num_inherited = held.num_tokens = progress.summary.num_tokens

    # One group's way

    async def _generate(self, held: dict[str, Held]) -> None:
        """Generate groups; each goes its own way as soon as it is answered."""
        requests = [
            GenerationRequest(
                rid=rid,
                prompt_ids=group.lease.prompt.prompt_ids,
                num_samples=self._samples_per_prompt,
                sampling=self._config.sampling,
                prefixes=group.prefixes,
            )
            for rid, group in held.items()
        ]
        num_unanswered = len(requests)
        self._meter.sent(num_unanswered)
        for group in held.values():
            group.running = True
        try:
            async for output in self._engine.generate(requests):
                num_unanswered -= 1
                self._meter.answered(1)
                self._take_answer(held[output.rid], output)
        finally:
            self._meter.answered(num_unanswered)

    def _take_answer(self, held: Held, output: GroupOutput) -> None:
        """Count what is new in an answer, and see to what becomes of the group."""
        self._meter.generated(output.num_tokens - held.num_tokens)
        held.num_tokens = output.num_tokens
        held.running = False
        if held.cut and output.aborted and not (held.revoked or self._stopped.done()):
            held.prefixes = output.trained
            self._parked[output.rid] = held
            self._spawn(self._save(held, output))
        else:
            self._spawn(self._settle(held, output))
        held.cut = False
        self._moved_on.set()

    async def _save(self, held: Held, output: GroupOutput) -> None:
        """Save a group that was cut off, as far as it is written; without room for it, that much is not saved."""
        if output.num_tokens == 0:
            return
        try:
            await self._buffer.save_progress(held.lease, to_progress(held.lease, output))
        except (LeaseExpired, StoreFull, VersionTooOld) as error:
            logger.warning("prompt group %d was not saved: %s", held.lease.prompt.group_id, error)

    async def _settle(self, held: Held, output: GroupOutput) -> None:
        """Score and store a finished group, or give an aborted one back."""
        if output.aborted or held.revoked:
            if not held.revoked and self._config.save_progress is not SaveProgress.never:
                await self._save(held, output)
            reason = "revoked" if held.revoked else "stopped" if self._stopped.done() else "aborted"
            await self._release(held, reason=reason)
            return
        started = time.perf_counter()
        texts = [self._decode(sample.token_ids.tolist()) for sample in output.samples]
        rewards = await self._scorer.score(held.lease.prompt, texts)
        self._meter.scored(time.perf_counter() - started)
        try:
            await self._buffer.put(to_trajectory_group(held.lease, output, rewards))
        except (LeaseExpired, VersionTooOld) as error:
            logger.warning("prompt group %d was refused: %s", held.lease.prompt.group_id, error)
            self._meter.refused(held.num_own)
        else:
            self._meter.stored(held.num_own)
        self._let_go(held)

    async def _release(self, held: Held, *, reason: str) -> None:
        await self._buffer.release(held.lease, num_tokens=held.num_tokens, reason=reason)
        self._meter.released(held.num_own)
        self._let_go(held)

    def _let_go(self, held: Held) -> None:
        self._held.pop(held.rid, None)
        self._place_free.set()
        self._moved_on.set()

    # Leases

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._config.renew_every_s)
            if self._held:
                await self._buffer.renew([held.lease for held in self._held.values()])

    async def _obey_revocations(self) -> None:
        while True:
            group_id, attempt = await self._buffer.revocation()
            rid = request_id(group_id, attempt)
            if rid in self._held:
                self._held[rid].revoked = True
                await self._engine.abort(rid)

    async def _watch_engine(self) -> None:
        await self._engine.wait_failed()

    # The end

    async def _abort_all(self) -> None:
        """Cut running requests off, and wait for what they wrote so far, so that its tokens are accounted for."""
        parked, self._parked = self._parked, {}
        for held in parked.values():
            self._spawn(self._release(held, reason="stopped"))

        def running() -> list[str]:
            return [rid for rid, held in self._held.items() if held.running]

        await self._abort(running, lambda: not self._held, timeout_s=self._config.stop_timeout_s)
        if self._held:
            logger.warning("%d prompt groups did not end within stop_timeout_s; giving them back", len(self._held))

    async def _abort(self, running: Callable[[], list[str]], ended: Callable[[], bool], *, timeout_s: float) -> bool:
        """Abort requests until they have ended; returns whether they did in time.

        An engine may hear of an abort before the request itself reaches it, and ignore it: what has not ended after
        half of ``stop_timeout_s`` is aborted once more.
        """
        await asyncio.sleep(0)  # what was sent at this moment begins
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not ended():
                    await asyncio.gather(*(self._engine.abort(rid) for rid in running()))
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._until(ended), self._config.stop_timeout_s / 2)
        return ended()

    async def _until(self, ended: Callable[[], bool]) -> None:
        """Wait for something that an answer, or a group let go, brings about."""
        while not ended():
            self._moved_on.clear()
            await self._moved_on.wait()

    async def _release_all(self) -> None:
        """Give back what is still held, with the tokens that were answered, as far as the buffer is there."""
        try:
            async with asyncio.timeout(self._config.stop_timeout_s):
                for held in list(self._held.values()):
                    await self._release(held, reason="stopped")
        except (TimeoutError, AsyncRLError) as error:
            logger.warning("%d leases could not be given back: %r", len(self._held), error)


async def _cancel(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
