"""The rollout fleet as a worker group, behind the port that the controller drives.

Every wait is for the members, which see to the deadlines; see `asyncrl.controller.fleet_member`.
"""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import ray

from asyncrl.config import RunConfig
from asyncrl.controller.cluster import engine_pool, stop_groups, worker_env
from asyncrl.controller.fleet_member import FleetMember
from asyncrl.controller.host_stores import client_on_this_node
from asyncrl.controller.run_folder import RunPaths
from asyncrl.protocol.errors import EngineLost
from asyncrl.protocol.ports import FleetCounts
from asyncrl.protocol.remote import within
from asyncrl.protocol.types import AnsweredPrompt, Prompt
from asyncrl.single_controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from buffer import BufferConnection, BufferRole
from rollout_fleet.config import RolloutFleetConfig
from rollout_fleet.engines.staging import LINKS
from rollout_fleet.member import MemberState
from rollout_fleet.metrics import FleetCounters
from rollout_fleet.worker import RolloutWorker


class FleetGroup:
    """The rollout fleet."""

    def __init__(
        self,
        config: RunConfig,
        *,
        buffer: BufferConnection,
        paths: RunPaths,
        say: Callable[[str], None],
        pool: RayResourcePool | None = None,
    ) -> None:
        """Start the workers, in their own pool unless one is given; `start` brings up their engines.

        ``say`` tells people what becomes of members.
        """
        self._config = config
        self._links = paths.snapshots / LINKS
        worker = RayClassWithInitArgs(
            ray.remote(RolloutWorker),
            _fleet_options(config),
            model_path=config.model.path,
            samples_per_prompt=config.algorithm.samples_per_prompt,
            connect_buffer=partial(client_on_this_node, buffer.for_role(BufferRole.rollout)),
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
        self._control = buffer.client()
        self._say = say
        self._is_idle = False
        self._members = [
            FleetMember(rank, config, group=self._group, bury=self._control.bury, on_change=self._say_if_idle, say=say)
            for rank in range(config.rollout_fleet.num_engines)
        ]

    async def start(self) -> None:
        """Bring every engine up, on the weights that the learner offers first.

        Raises `DeadlineError`, or `WorkerDiedError`, which ends with the dead one's log: what fails at once is more
        likely wrong than broken.
        """
        await asyncio.gather(*(member.start() for member in self._members))
        await asyncio.gather(*(member.load_first() for member in self._members))

    async def run(self) -> None:
        """Roll out until `drain`, on the engines that are left.

        Raises `EngineLost` when fewer are left than ``rollout_fleet.min_engines``, and what a worker raises that no
        other could do better.
        """
        running = {asyncio.ensure_future(member.run()): member for member in self._members}
        try:
            while running:
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for run in done:
                    del running[run]
                    try:
                        run.result()
                    except EngineLost as error:
                        self._check_enough(error)
        finally:
            for run in running:
                run.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def _check_enough(self, error: EngineLost) -> None:
        """An engine has failed for good: go on without it, if enough are left."""
        num_left, wanted = len(self._left), self._config.rollout_fleet.min_engines
        if num_left < wanted:
            raise EngineLost(
                f"{num_left} of {len(self._members)} rollout engines are left, rollout_fleet.min_engines is {wanted}. "
                f"{error}"
            ) from error
        self._say(
            f"the run goes on with {num_left} of {len(self._members)} rollout engines: {str(error).splitlines()[0]}"
        )

    def _say_if_idle(self) -> None:
        """Say it when no engine is up any more, and when one is back."""
        is_idle = not any(member.is_serving for member in self._members)
        if is_idle != self._is_idle and self._left:
            self._say("no rollout engine is up; training waits" if is_idle else "training goes on")
        self._is_idle = is_idle

    @property
    def _left(self) -> list[FleetMember]:
        """The members that have not failed for good."""
        return [member for member in self._members if member.member.state is not MemberState.failed]

    async def release_device(self) -> None:
        """See `ColocatedFleetPort.release_device`."""
        fleet = self._config.rollout_fleet
        timeout_s = fleet.drain_timeout_s + 2 * fleet.load_timeout_s + 10
        option = "rollout_fleet.drain_timeout_s"
        await within(self._group.release_device(), timeout_s, "the engines to release their devices", option)

    async def counters(self) -> FleetCounts:
        """See `FleetPort.counters`."""
        return _total(await asyncio.gather(*(member.counters() for member in self._members)))

    async def drain(self) -> FleetCounts:
        """See `FleetPort.drain`."""
        return _total(await asyncio.gather(*(member.drain() for member in self._members)))

    def engines(self) -> list[str]:
        """See `AnsweringFleet.engines`: the ranks of the workers that are left."""
        return [str(member.rank) for member in self._left]

    async def answer(
        self, engine: str, prompts: Sequence[Prompt], *, version: int, num_samples: int
    ) -> list[AnsweredPrompt]:
        """See `AnsweringFleet.answer`."""
        return await self._members[int(engine)].answer(prompts, version=version, num_samples=num_samples)

    async def stop(self, timeout_s: float) -> None:
        """End engines and workers: ask, then kill, and remove the links to weights that a killed one has left."""
        for member in self._members:
            member.stop()
        try:
            await stop_groups([self._group], self._group.shutdown, timeout_s)
        finally:
            await self._control.close()
            shutil.rmtree(self._links, ignore_errors=True)


def _fleet_options(config: RunConfig) -> RolloutFleetConfig:
    """The fleet's options; servers on shared devices must be able to leave them, and are not replaced."""
    fleet = config.rollout_fleet
    if not config.placement.colocated:
        return fleet
    return replace(fleet, restarts=0, sglang=replace(fleet.sglang, memory_saver=True))


def _total(workers: Sequence[FleetCounters]) -> FleetCounts:
    return FleetCounts(
        tokens_generated=sum(worker.tokens_generated for worker in workers),
        tokens_in_flight=sum(worker.tokens_in_flight for worker in workers),
        groups_failed=sum((worker.groups_failed for worker in workers), Counter()),
    )
