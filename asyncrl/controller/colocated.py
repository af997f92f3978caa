"""Training on devices that both pools share: generation and training take turns.

One turn after another, each step waiting for the one before::

    buffer fills a batch ─▶ engines let what runs end, and release the device ─▶ learner takes it, and updates
          ▲                                                                             │
          └── engines take the device back, load the weights, go on ◀── learner publishes, and offloads

Prompts are fed by a loop of their own, which the buffer wakes. The staleness bound holds by the same ledger as in
`asyncrl.controller.controller`: what is still running when a batch is full ends under the old weights, is stored, and
is trained on with a lag of one step or more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from asyncrl.config import RunConfig
from asyncrl.controller.parts import ColocatedFleetPort, ColocatedLearnerPort, PromptSource
from asyncrl.controller.reporting import Reporter
from asyncrl.controller.resume import Checkpointer, RunState
from asyncrl.metrics import StepRecord, TrainingResult
from asyncrl.protocol.ports import ControlBuffer


class ColocatedController:
    """Drives both pools on the same devices, with the learner offloaded and the engines up when it begins."""

    def __init__(
        self,
        config: RunConfig,
        *,
        buffer: ControlBuffer,
        learner: ColocatedLearnerPort,
        fleet: ColocatedFleetPort,
        prompts: PromptSource,
        on_step: Callable[[StepRecord], None],
        resumed: RunState | None = None,
    ) -> None:
        """Take the parts, all started, with learner, buffer and engines at the version of ``resumed``."""
        resumed = resumed or RunState()
        self._versions = range(resumed.version, config.total_steps)
        self._prompts_per_call = config.algorithm.groups_per_step
        self._buffer = buffer
        self._learner = learner
        self._fleet = fleet
        self._prompts = prompts
        self._reporter = Reporter(
            samples_per_prompt=config.algorithm.samples_per_prompt, on_step=on_step, resumed=resumed
        )
        self._checkpointer = Checkpointer(
            config, buffer=buffer, learner=learner, fleet=fleet, prompts=prompts, resumed=resumed
        )

    async def train(self) -> None:
        """Train to the last step and publish its weights.

        Raises:
            AsyncRLError: a part died or missed its deadline; the message names it.
        """
        self._reporter.begin()
        async with asyncio.TaskGroup() as tasks:
            feed = tasks.create_task(self._feed(), name="feed")
            await tasks.create_task(self._take_turns(), name="turns")
            feed.cancel()

    async def account(self) -> TrainingResult:
        """Let the fleet stop all work, and close the token account.

        Raises:
            AccountError: the token account does not balance.
        """
        counts = await self._fleet.drain()
        return self._reporter.result(await self._buffer.stats(), counts)

    async def _feed(self) -> None:
        while True:
            await self._buffer.enqueue(self._prompts.take(self._prompts_per_call))

    async def _take_turns(self) -> None:
        for version in self._versions:
            asked_s = time.monotonic()
            plan = await self._buffer.plan(version)
            waited_s = time.monotonic() - asked_s
            self._checkpointer.planned(plan)
            await self._fleet.release_device()
            await self._learner.trainer_mode()
            plan = await self._learner.scored(plan)
            metrics = await self._learner.update(plan)
            metrics = {**metrics, **await self._learner.update_critic(plan)}
            checkpoint = await self._checkpointer.save_if_due(version + 1)
            snapshot = await self._learner.rollout_mode(version + 1)
            stats = await self._buffer.commit(version)
            self._checkpointer.committed(version)
            self._reporter.published(snapshot.version, await self._fleet.load(snapshot))
            if checkpoint is not None:
                await checkpoint
            counts = await self._fleet.counters()
            self._reporter.step(plan, plan_wait_s=waited_s, metrics=metrics, stats=stats, counts=counts)
