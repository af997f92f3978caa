"""The rollout fleet as a worker group, behind the port that the controller drives.

Every wait is for the workers, under a deadline of `within`; Ray wakes it when they answer or die.
"""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import ray

from asyncrl.config import RunConfig
from asyncrl.controller.cluster import engine_pool, stop_groups, worker_env
from asyncrl.controller.run_folder import RunPaths
from asyncrl.protocol.ports import FleetCounts
from asyncrl.protocol.remote import within
from asyncrl.protocol.types import AnsweredPrompt, Prompt
from asyncrl.single_controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from asyncrl.single_controller.calls import PendingResult
from buffer import BufferConnection, BufferRole
from rollout_fleet.config import RolloutFleetConfig
from rollout_fleet.engines.staging import LINKS
from rollout_fleet.metrics import FleetCounters
from rollout_fleet.worker import RolloutWorker

T = TypeVar("T")


class FleetGroup:
    """The rollout fleet."""

    def __init__(
        self, config: RunConfig, *, buffer: BufferConnection, paths: RunPaths, pool: RayResourcePool | None = None
    ) -> None:
        """Start the workers, in their own pool unless one is given; `start` brings up their engines."""
        self._config = config
        self._links = paths.snapshots / LINKS
        worker = RayClassWithInitArgs(
            ray.remote(RolloutWorker),
            _fleet_options(config),
            model_path=config.model.path,
            samples_per_prompt=config.algorithm.samples_per_prompt,
            connect_buffer=buffer.for_role(BufferRole.rollout).client,
            log_dir=str(paths.logs),
            staging_dir=str(paths.staging),
            copy_weights=config.weights.copies,
            seed=config.seed,
            greedy_baseline=config.algorithm.greedy_baseline,
            sample_dir=str(paths.samples),
            profile=config.profile,
        )
        # Typed Any, because the group's methods are bound from the worker class when it is made.
        self._group: Any = RayWorkerGroup(
            pool or engine_pool(config),
            worker,
            name_prefix="rollout",
            log_dir=paths.logs,
            worker_env=worker_env(config),
        )

    async def start(self) -> None:
        """Bring every engine up, on the weights that the learner offers first.

        Raises `DeadlineError`, or `WorkerDiedError`, which ends with the dead one's log.
        """
        # The worker keeps the deadline itself, with a better message; this one is for a worker that hangs.
        timeout_s = self._config.rollout_fleet.start_timeout_s + 30
        await within(self._group.start(), timeout_s, "the rollout engines", "rollout_fleet.start_timeout_s")
        await self._while_answering(self._group.load_first(), "the rollout workers, which wait for the first weights")

    async def run(self) -> None:
        """Roll out until `drain`; raises when an engine or a worker dies, or a worker falls silent."""
        await self._while_answering(self._group.run(), "the rollout workers, which generate")

    async def release_device(self) -> None:
        """See `ColocatedFleetPort.release_device`."""
        fleet = self._config.rollout_fleet
        timeout_s = fleet.drain_timeout_s + 2 * fleet.load_timeout_s + 10
        option = "rollout_fleet.drain_timeout_s"
        await within(self._group.release_device(), timeout_s, "the engines to release their devices", option)

    async def counters(self) -> FleetCounts:
        """See `FleetPort.counters`."""
        return await self._counters("the fleet's counters")

    async def drain(self) -> FleetCounts:
        """See `FleetPort.drain`."""
        what = "the rollout workers, which put down their work"
        return _total(await self._while_answering(self._group.drain(), what))

    def engines(self) -> list[str]:
        """See `AnsweringFleet.engines`: the workers' ranks."""
        return [str(rank) for rank in range(self._config.rollout_fleet.num_engines)]

    async def answer(
        self, engine: str, prompts: Sequence[Prompt], *, version: int, num_samples: int
    ) -> list[AnsweredPrompt]:
        """See `AnsweringFleet.answer`."""
        call = self._group.workers[int(engine)].answer.remote(list(prompts), version, num_samples)
        what = f"rollout worker {engine}, which answers held-out prompts"
        return await self._while_answering(PendingResult(call), what)

    async def stop(self, timeout_s: float) -> None:
        """End engines and workers: ask, then kill, and remove the links to weights that a killed one has left."""
        try:
            await stop_groups([self._group], self._group.shutdown, timeout_s)
        finally:
            shutil.rmtree(self._links, ignore_errors=True)

    async def _while_answering(self, pending: Awaitable[T], what: str) -> T:
        """Await a call in which workers keep the deadlines. Raises `DeadlineError` if they answer no other calls."""
        call = asyncio.ensure_future(pending)
        try:
            while not call.done():
                await asyncio.wait({call}, timeout=self._config.buffer.request_timeout_s)
                if not call.done():
                    await self._counters(what)
            return call.result()
        finally:
            call.cancel()

    async def _counters(self, what: str) -> FleetCounts:
        timeout_s = self._config.buffer.request_timeout_s
        return _total(await within(self._group.counters(), timeout_s, what, "buffer.request_timeout_s"))


def _fleet_options(config: RunConfig) -> RolloutFleetConfig:
    """The fleet's options; servers on shared devices must be able to leave them."""
    fleet = config.rollout_fleet
    return replace(fleet, sglang=replace(fleet.sglang, memory_saver=True)) if config.placement.colocated else fleet


def _total(workers: Sequence[FleetCounters]) -> FleetCounts:
    return FleetCounts(
        tokens_generated=sum(worker.tokens_generated for worker in workers),
        tokens_in_flight=sum(worker.tokens_in_flight for worker in workers),
        groups_failed=sum((worker.groups_failed for worker in workers), Counter()),
        busy=[worker.busy for worker in workers],
    )
