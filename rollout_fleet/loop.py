"""The rollout loop of one worker: lease, generate, score, put, until it is stopped.

    ask for admission ──leases──▶ engine ──answers──▶ score ──▶ put / release
          ▲  woken by a free place or a new policy version            │
          └──────────────────────── a free place ◀────────────────────┘

Beside it run: renewal (a timer), revocations (woken by the buffer), and the watch over the engine (woken by its
death). The first of them to fail ends the loop with its error. Knows neither Ray nor sockets nor any engine.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.protocol.errors import AsyncRLError, DeadlineError, LeaseExpired, VersionTooOld
from asyncrl.protocol.ports import RolloutBuffer
from asyncrl.protocol.types import Lease, WeightSnapshot

from .config import RolloutFleetConfig
from .decoding import Decode
from .engines.base import Engine
from .meter import FleetMeter
from .rewards.scorer import RewardScorer
from .trajectory import to_trajectory_group
from .types import FleetCounters, GenerationRequest, GroupOutput

logger = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class _Held:
    """A lease this worker holds, and the tokens it has to account for."""

    lease: Lease
    num_tokens: int = 0
    revoked: bool = False


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
        self._held: dict[str, _Held] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._place_free = asyncio.Event()
        self._changed = asyncio.Event()
        self._open = asyncio.Event()
        self._open.set()
        self._asks_nothing = asyncio.Event()
        self._drained = asyncio.Event()
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
        self._meter.loaded(await self._engine.load_weights(snapshot))
        self._changed.set()
        self._open.set()

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
                while self._held:
                    self._drained.clear()
                    await self._drained.wait()
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
        held = {_rid(lease): _Held(lease=lease) for lease in leases}
        self._held.update(held)
        self._spawn(self._generate(held))

    # One group's way

    async def _generate(self, held: dict[str, _Held]) -> None:
        """Generate groups; each goes its own way as soon as it is answered."""
        requests = [
            GenerationRequest(
                rid=rid,
                prompt_ids=group.lease.prompt.prompt_ids,
                num_samples=self._samples_per_prompt,
                sampling=self._config.sampling,
            )
            for rid, group in held.items()
        ]
        num_unanswered = len(requests)
        self._meter.sent(num_unanswered)
        try:
            async for output in self._engine.generate(requests):
                num_unanswered -= 1
                self._meter.answered(1)
                held[output.rid].num_tokens = output.num_tokens
                self._meter.generated(output.num_tokens)
                self._spawn(self._settle(held[output.rid], output))
        finally:
            self._meter.answered(num_unanswered)

    async def _settle(self, held: _Held, output: GroupOutput) -> None:
        """Score and store a finished group, or give an aborted one back."""
        if output.aborted or held.revoked:
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
            self._meter.refused(held.num_tokens)
        else:
            self._meter.stored(held.num_tokens)
        self._let_go(held)

    async def _release(self, held: _Held, *, reason: str) -> None:
        await self._buffer.release(held.lease, num_tokens=held.num_tokens, reason=reason)
        self._meter.released(held.num_tokens)
        self._let_go(held)

    def _let_go(self, held: _Held) -> None:
        self._held.pop(_rid(held.lease), None)
        self._place_free.set()
        if not self._held:
            self._drained.set()

    # Leases

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._config.renew_every_s)
            if self._held:
                await self._buffer.renew([held.lease for held in self._held.values()])

    async def _obey_revocations(self) -> None:
        while True:
            group_id, attempt = await self._buffer.revocation()
            rid = _request_id(group_id, attempt)
            if rid in self._held:
                self._held[rid].revoked = True
                await self._engine.abort(rid)

    async def _watch_engine(self) -> None:
        await self._engine.wait_failed()

    # The end

    async def _abort_all(self) -> None:
        """Cut running requests off, and wait for what they wrote so far, so that its tokens are accounted for."""
        self._drained.clear()
        if not self._held:
            return
        try:
            async with asyncio.timeout(self._config.stop_timeout_s):
                await asyncio.gather(*(self._engine.abort(rid) for rid in list(self._held)))
                await self._drained.wait()
        except TimeoutError:
            logger.warning("%d prompt groups did not end within stop_timeout_s; giving them back", len(self._held))

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


def _request_id(group_id: int, attempt: int) -> str:
    """Return an id of fixed width, since SGLang's scheduler matches ids by prefix."""
    return f"{group_id:012d}-{attempt:03d}"


def _rid(lease: Lease) -> str:
    return _request_id(lease.prompt.group_id, lease.attempt)
