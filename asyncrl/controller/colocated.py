"""Training on devices that both pools share: generation and training take turns.

One turn after another, each step waiting for the one before::

    buffer fills a batch ─▶ engines let what runs end, and release the device ─▶ learner takes it, and updates
          ▲                                                                             │
          └── engines take the device back, load the weights, go on ◀── learner publishes, and offloads

The prompts are fed beside it, as in `asyncrl.controller.controller`. The staleness bound holds by the same ledger:
what is still running when a batch is full ends under the old weights, is stored, and trained on at a lag of one step or
more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Protocol

from asyncrl.controller.controller import Controller, FleetPort, LearnerPort, Turn
from asyncrl.protocol.types import WeightSnapshot


class TurnTakingLearner(LearnerPort, Protocol):
    """A learner group that can leave its devices."""

    def rollout_mode(self, version: int) -> Awaitable[WeightSnapshot]:
        """Publish the weights as ``version``, then offload as the options say."""
        ...

    def trainer_mode(self) -> Awaitable[None]:
        """Bring back what `rollout_mode` moved away."""
        ...


class TurnTakingFleet(FleetPort, Protocol):
    """A fleet that can leave its devices."""

    async def release_device(self) -> None:
        """Let what runs end, and give the devices up until `load`."""
        ...


class TurnTaking(Controller):
    """Drives both pools on the same devices, with the learner offloaded and the engines up when it begins."""

    _learner: TurnTakingLearner
    _fleet: TurnTakingFleet

    async def train(self) -> None:
        """Train to the last step and publish its weights; see `Controller.train`."""
        self._progress.began_s = time.time()
        async with asyncio.TaskGroup() as tasks:
            feed = tasks.create_task(self._feed(), name="feed")
            await tasks.create_task(self._take_turns(), name="turns")
            feed.cancel()

    async def _take_turns(self) -> None:
        progress = self._progress
        for version in range(self._resumed.version, self._config.total_steps):
            asked_s = time.monotonic()
            plan = await self._buffer.plan(version)
            waited_s = time.monotonic() - asked_s
            progress.uncommitted[version] = plan
            await self._fleet.release_device()
            await self._learner.trainer_mode()
            plan = await self._learner.scored(plan)
            metrics = await self._learner.update(plan)
            metrics = {**metrics, **await self._learner.update_critic(plan)}
            checkpoint = await self._save(version + 1)
            snapshot = await self._learner.rollout_mode(version + 1)
            stats = await self._buffer.commit(version)
            del progress.uncommitted[version]
            progress.publish_s = await self._fleet.load(snapshot)
            progress.engine_version = snapshot.version
            if checkpoint is not None:
                await checkpoint
            await self._report(Turn(plan=plan, plan_wait_s=waited_s), metrics, stats)
