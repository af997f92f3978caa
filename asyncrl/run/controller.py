"""The training loops of a run, in one asyncio process. Sampled tokens and weights do not pass through this process.

`Controller` has five loops. This list shows what each loop waits for (B is ``algorithm.groups_per_step``)::

    feed      waits for room in the buffer's queue    ── woken by the buffer, when a worker takes a group
    plan      waits for a free slot in the pipeline   ── woken by complete, after the commit of a step
              then for the next batch                 ── woken by the buffer, when B groups are stored
              then for the reward model, if any       ── woken by the learner ranks
    complete  waits for the oldest queued step        ── woken by the learner ranks
    follow    waits until all engines serve a newer version ── woken by the buffer, after the load of the last engine
    examine   waits until an engine serves the version to evaluate ── woken by the buffer, after the load of an engine
              then for the answers of such engines    ── woken by the rollout workers

    prompts ─feed─▶ buffer ─plan─▶ [at most 2 steps] ─complete─▶ buffer (commits)

While the learner computes step v, it sends the weights of version v, and the fleet generates. The controller queues
step v + 1 on the ranks. Threads of the ranks fetch and pack the batch of step v + 1.

No step waits until the engines have loaded weights. After the commit of a step, the buffer offers the version that the
step made, if this version is published (``weights.publish_every``). Each worker loads the newest offered version when
it can. If loading is slower than training, workers skip versions. Then admission (the buffer's rule for when a worker
may begin a group) slows generation down.

`_Training.stop` cancels feed, follow and examine, and ends plan. Then complete commits and reports the queued steps.

A deadlock needs a cycle of waits. These are the waits:

- feed, plan and follow wait for the buffer. plan waits there for finished groups.
- plan also waits for a free slot in the pipeline, and for the scores of a reward model. Neither wait needs
  a later batch: complete and the learner finish the steps that are already queued.
- complete waits for the learner. If no step is queued, complete and the learner wait for a batch from plan.
- examine waits for the buffer and for the answers of engines. An answering engine does not wait for a loop.
- A rollout worker waits for admission before it begins a group. Admission waits for commits by complete, or until the
  worker's engine has loaded a newer version.
- An engine waits for a commit before it loads a newer version. A pinned engine stays on the version that examine
  evaluates, until this evaluation ends.

Only one cycle could block: plan waits for finished groups, these groups wait for admission, admission waits for a
commit by complete, and complete waits for a batch from plan. In this cycle no step is queued. The buffer then admits
all groups of the next batch without a further commit (proof in docs/staleness.md). So the cycle cannot block.

plan queues a checkpoint on the ranks between two updates. The ranks write the checkpoint while they train. After the
death of a rank, the loops begin again at the newest checkpoint. A store of the buffer holds finished groups. If a store
dies before the ranks have fetched a batch from it, the loops begin again at the step of this batch, with a new plan.

`ColocatedController` is for a learner and engines that share devices. It has feed and one more loop. Each action of
this loop waits for the previous action::

    buffer fills a batch ─▶ engines finish, and release the device ─▶ learner loads, and updates
          ▲                                                                             │
          └── engines load the weights, and resume ◀─ learner publishes the weights, and offloads

After the death of a rank, the engines release the devices, and the loop begins again at the newest checkpoint. Groups
that are unfinished when a batch is full are finished under the old weights. The learner trains on them one or more
versions later (a lag).
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from asyncrl.config import RunConfig, num_store_servers
from asyncrl.core import record
from asyncrl.core.errors import BatchLost
from asyncrl.core.ports import (
    ColocatedFleetPort,
    ColocatedLearnerPort,
    ControlBuffer,
    FleetPort,
    LearnerPort,
    PromptSource,
)
from asyncrl.core.types import BufferStats, Plan, Prompt
from asyncrl.metrics import StepRecord, TrainingResult
from asyncrl.run.evaluator import PinnedEngines, num_pinned_engines
from asyncrl.run.reporting import Reporter
from asyncrl.run.resume import Checkpointer, Resumed, RunState

T = TypeVar("T")
LearnerT = TypeVar("LearnerT", bound=LearnerPort)
FleetT = TypeVar("FleetT", bound=FleetPort)
Loop = Callable[[], Coroutine[Any, Any, None]]
Evaluate = Callable[[int, PinnedEngines | None], Awaitable[Any]]

logger = logging.getLogger(__name__)

# While the ranks compute a step, the next step is already queued, so the ranks do not wait for the controller.
_PIPELINE_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class _QueuedStep:
    """A learner step that the controller has queued on the ranks, and the pending results of the step's calls."""

    plan: Plan
    plan_wait_s: float
    actor: Awaitable[Mapping[str, float]]
    weights: Awaitable[None] | None
    critic: Awaitable[Mapping[str, float]]
    dispatched: record.OpenSpan
    checkpoint: Awaitable[str] | None


class _Training(ABC, Generic[LearnerT, FleetT]):
    """Base of `Controller` and `ColocatedController`.

    It feeds prompts to the buffer, runs the loops, and counts all tokens at the end.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        buffer: ControlBuffer,
        learner: LearnerT,
        fleet: FleetT,
        prompts: PromptSource,
        on_step: Callable[[StepRecord], None],
        evaluate: Evaluate | None = None,
        resumed: RunState | None = None,
        last: StepRecord | None = None,
        earlier: BufferStats | None = None,
    ) -> None:
        """Prepare the loops. Learner, buffer and engines must have started at the policy version of ``resumed``.

        ``resumed`` is the run's state in the checkpoint from which the run continues; None for a new run. ``last`` is
        the record of the newest step before this checkpoint. ``earlier`` has the ledger's counts at the start of this
        process. ``on_step`` gets the record of each finished step. ``evaluate`` evaluates a policy version. Its
        arguments are the version, and a `PinnedEngines` function that returns the engines that stay on this version
        (None: all engines stay on the version).
        """
        resumed = resumed or RunState()
        self._evaluate = evaluate
        self._config = config
        self._versions = range(resumed.version, config.total_steps)
        self._publish_every = config.weights.publish_every
        self._queued_version = resumed.version
        self._buffer = buffer
        self._learner = learner
        self._fleet = fleet
        self._prompts = prompts
        self._unqueued: Sequence[Prompt] = ()
        self._stopping = asyncio.Event()
        self._beside: list[asyncio.Task[None]] = []
        self._reporter = Reporter(
            samples_per_prompt=config.algorithm.samples_per_prompt,
            store_bytes=config.buffer.max_stored_bytes * max(1, num_store_servers(config)),
            on_step=on_step,
            version=resumed.version,
            earlier=earlier,
            last=last,
        )
        self._checkpointer = Checkpointer(
            config, buffer=buffer, learner=learner, fleet=fleet, prompts=prompts, resumed=resumed
        )

    async def train(self) -> None:
        """Train to the last step, and publish the final weights. A call of `stop` ends the training earlier.

        After a `LearnerDiedError`, call `rewind` and then `train` again. After a `BatchLost`, call `replan` and then
        `train` again. Each `AsyncRLError` is raised in an `ExceptionGroup`.
        """
        self._reporter.begin()

        async def feed() -> None:
            while True:
                self._unqueued = self._unqueued or self._prompts.take(self._config.algorithm.groups_per_step)
                wants_outcomes = self._prompts.wants_outcomes
                outcomes = await self._buffer.enqueue(self._unqueued, wants_outcomes=wants_outcomes)
                self._prompts.note(outcomes)
                self._unqueued = ()

        step_loops, following_loops = self.loops()
        async with asyncio.TaskGroup() as tasks:
            feeding = tasks.create_task(feed(), name="feed")
            following = [tasks.create_task(loop()) for loop in following_loops]
            self._beside = [feeding, *following]
            if self._stopping.is_set():
                self.stop()
            await asyncio.gather(*(tasks.create_task(loop()) for loop in step_loops))
            await asyncio.gather(*following, return_exceptions=True)  # the task group raises the errors of the loops
            feeding.cancel()

    def stop(self) -> None:
        """End the training early: do not plan another batch.

        `train` returns as soon as all queued steps are committed and reported.
        """
        self._stopping.set()
        for task in self._beside:
            task.cancel()

    @property
    def is_stopped(self) -> bool:
        """True after a call of `stop`."""
        return self._stopping.is_set()

    @property
    def num_steps(self) -> int:
        """Number of learner steps that this process has finished. A step that ran twice counts twice."""
        return self._reporter.num_steps

    @property
    def has_all_steps(self) -> bool:
        """True if the controller has queued the last step of the run on the ranks."""
        return self._queued_version == self._versions.stop

    async def save_stopped(self) -> str:
        """Stop all work of the fleet, save a checkpoint, and return the checkpoint's folder. Call this after `stop`.

        Before the checkpoint, the fleet saves the tokens of running groups in the buffer.
        """
        await self._fleet.drain()
        return await (await self._checkpointer.save(self._queued_version, wait=True))

    async def checkpoint(self) -> Path:
        """Save a checkpoint after the next learner step. Wait until the save is complete, and return the folder."""
        return await self._checkpointer.requested()

    async def _unless_stopped(self, work: Callable[[], Awaitable[T]]) -> T | None:
        if self.is_stopped:
            return None
        task, stopping = asyncio.ensure_future(work()), asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            for left in (task, stopping):
                left.cancel()
            await asyncio.gather(task, stopping, return_exceptions=True)

    def newest_checkpoint(self, folder: Path) -> Resumed | None:
        """Return the newest complete checkpoint in ``folder`` that this process has saved, or None if there is none."""
        return self._checkpointer.newest(folder)

    async def rewind(self, state: RunState, *, incarnation: int) -> Sequence[tuple[int, int]]:
        """Make the buffer and this controller go back to a checkpoint.

        ``incarnation`` is the number of restarts of the learner so far. If the checkpoint contains steps that the
        buffer has not committed, the buffer first commits these steps. Returns the ids of the groups that are finished
        at the checkpoint, as sorted ranges [start, end).
        """
        await self._commit_before(state.version)
        await self._buffer.rewind(state.version, incarnation=incarnation)
        self._go_on_from(state.version)
        self._reporter.rewind(state.version)
        return await self._buffer.finished()

    async def replan(self) -> tuple[int, Sequence[int]]:
        """Recover from a `BatchLost`: let the fleet generate the lost groups again.

        The next call of `train` plans the step of the lost batch again. Returns a pair: the number of this step, and
        the ids of the lost groups. Raises `LearnerDiedError` if the ranks cannot continue.
        """
        group_ids = await self._learner.withdraw()
        await self._buffer.lose(group_ids)
        version = (await self._buffer.stats()).learner_version
        self._go_on_from(version)
        self._reporter.rewind(self._reporter.engine_version)
        return version, group_ids

    def _go_on_from(self, version: int) -> None:
        self._versions = range(version, self._versions.stop)
        self._queued_version = version
        self._checkpointer.rewind(version)

    async def _commit_before(self, stop: int) -> None:
        for version in range((await self._buffer.stats()).learner_version, stop):
            await self._buffer.commit(version)

    async def account(self) -> TrainingResult:
        """Stop all work of the fleet, and return the results of the training, with the token account.

        The account says what became of the generated tokens: trained, dropped, buffered or in flight. Raises
        `AccountError` if the numbers do not add up.
        """
        counts = await self._fleet.drain()
        return self._reporter.result(await self._buffer.stats(), counts)

    @abstractmethod
    def loops(self) -> tuple[Sequence[Loop], Sequence[Loop]]:
        """Return a pair: the loops that make the learner steps, and the loops that run in parallel with the steps.

        The loops that make the steps end after the last step of the run, or earlier after `stop`. The parallel loops
        end when the engines serve the final version and the last evaluation during training has ended. `stop` cancels
        the parallel loops.
        """

    async def _follow(self, last: int) -> None:
        """Report each version that all engines serve, until all engines serve version ``last``."""
        while self._reporter.engine_version < last:
            version, took_s = await self._buffer.served(
                self._reporter.engine_version, self._config.rollout_fleet.min_engines
            )
            self._reporter.published(version, took_s)

    def _next_evaluated(self, after: int) -> int | None:
        """Return the next version after ``after`` that the run evaluates during training, or None."""
        steps = self._config.evaluation.every_steps
        if not (steps and self._config.evaluation.enabled) or self._evaluate is None:
            return None
        due = steps * (after // steps + 1)
        published = -(-due // self._publish_every) * self._publish_every
        return published if published < self._versions.stop else None

    async def _planned(self, version: int) -> tuple[Plan, float]:
        asked_s = time.monotonic()
        with record.span(record.SpanKind.plan_wait, lane="/plan", step=version):
            plan = await self._buffer.plan(version)
        waited_s = time.monotonic() - asked_s
        return plan, waited_s


class Controller(_Training[LearnerPort, FleetPort]):
    """The controller for a learner and engines on separate devices, which work at the same time."""

    def __init__(self, config: RunConfig, **parts: Any) -> None:
        super().__init__(config, **parts)
        self._steps: asyncio.Queue[_QueuedStep | BatchLost | None] = asyncio.Queue()
        self._places = asyncio.Semaphore(_PIPELINE_STEPS)

    def _go_on_from(self, version: int) -> None:
        self._steps, self._places = asyncio.Queue(), asyncio.Semaphore(_PIPELINE_STEPS)
        super()._go_on_from(version)

    def loops(self) -> tuple[Sequence[Loop], Sequence[Loop]]:
        """Return a pair: the loops plan and complete, which make the steps, and the loops follow and examine."""
        return (self._plan, self._complete), (partial(self._follow, self._versions.stop), self._examine)

    async def _plan(self) -> None:
        for version in self._versions:
            await self._places.acquire()
            planned = await self._unless_stopped(partial(self._planned, version))
            if planned is None:
                break
            plan, waited_s = planned
            dispatched = record.span(record.SpanKind.dispatched, lane="/complete", step=version)
            try:
                plan = await self._learner.scored(plan)
            except BatchLost as lost:  # `_complete` commits the earlier steps, and then raises this `BatchLost`
                await self._steps.put(lost)
                return
            self._queued_version = version + 1
            self._reporter.planned(plan)
            is_published = (version + 1) % self._publish_every == 0 or version + 1 == self._versions.stop
            step = _QueuedStep(
                plan=plan,
                plan_wait_s=waited_s,
                dispatched=dispatched,
                actor=self._learner.step(plan),
                weights=self._learner.publish(version + 1) if is_published else None,
                critic=self._learner.step_critic(plan),  # queue this step after the publish, which is more urgent
                checkpoint=await self._checkpointer.save_if_due(version + 1),
            )
            await self._steps.put(step)
        await self._steps.put(None)

    async def _complete(self) -> None:
        while (step := await self._steps.get()) is not None:
            if isinstance(step, BatchLost):
                raise step
            metrics = await step.actor
            step.dispatched.close()
            stats = await self._buffer.commit(step.plan.version)
            self._checkpointer.committed()
            self._places.release()
            if step.weights is not None:
                await step.weights  # wait until the ranks have copied the weights; engines load them later
            metrics = {**metrics, **await step.critic}
            if step.checkpoint is not None:
                with record.span(record.SpanKind.checkpoint, lane="/complete", version=step.plan.version + 1):
                    await step.checkpoint
            self._reporter.step(
                step.plan,
                plan_wait_s=step.plan_wait_s,
                metrics=metrics,
                stats=stats,
                counts=await self._fleet.counters(),
            )
        await self._learner.finish_publish()

    async def _examine(self) -> None:
        """Evaluate the policy versions that ``evaluation.every_steps`` selects, one at a time."""
        due = self._next_evaluated(self._queued_version)
        while (version := self._next_evaluated(self._queued_version)) is not None and self._evaluate is not None:
            if version != due:
                logger.info("training has passed policy version %s; version %d is evaluated next", due, version)
            num_engines = num_pinned_engines(self._config.evaluation.share, len(self._fleet.engines()))
            await self._evaluate(version, partial(self._buffer.pin, version, num_engines))
            due = self._next_evaluated(version)
        await self._buffer.unpin()


class ColocatedController(_Training[ColocatedLearnerPort, ColocatedFleetPort]):
    """The controller for a learner and engines that use the same devices alternately. The engines use them first."""

    _trained: tuple[Plan, float, Mapping[str, float]] | None = None
    """A trained step that is not reported yet: (its plan, seconds that the loop waited for this plan, its metrics)."""

    def loops(self) -> tuple[Sequence[Loop], Sequence[Loop]]:
        """Return one loop, in which engines and learner use the devices alternately."""
        return (self._take_turns,), ()

    async def save_stopped(self) -> str:
        """Stop all work of the fleet, let the engines free their devices, and save a checkpoint.

        Returns the checkpoint's folder. Call this after `stop`.
        """
        await self._fleet.drain()
        await self._fleet.release_device()
        await self._learner.trainer_mode()
        return await super().save_stopped()

    async def rewind(self, state: RunState, *, incarnation: int) -> Sequence[tuple[int, int]]:
        """Make the buffer and this controller go back to a checkpoint. Then let the engines free their devices.

        The new learner ranks need these devices. ``incarnation`` is the number of restarts of the learner so far.
        Returns the ids of the groups that are finished at the checkpoint, as sorted ranges [start, end).
        """
        await self._commit_before(state.version)
        # A step that the checkpoint contains is not repeated. If such a step was not reported yet, report it now.
        if self._trained is not None and self._trained[0].version < state.version:
            await self._report(await self._buffer.stats())
        self._trained = None
        finished = await super().rewind(state, incarnation=incarnation)
        await self._fleet.release_device(incarnation)
        return finished

    async def _take_turns(self) -> None:
        self._fleet.take_device()
        for version in self._versions:
            planned = await self._unless_stopped(partial(self._planned, version))
            if planned is None:
                return
            plan, waited_s = planned
            await self._fleet.release_device()
            await self._learner.trainer_mode()
            plan = await self._learner.scored(plan)
            self._queued_version = version + 1
            self._reporter.planned(plan)
            with record.span(record.SpanKind.dispatched, lane="/complete", step=version):
                metrics = await self._learner.step(plan)
                metrics = {**metrics, **await self._learner.step_critic(plan)}
            self._trained = plan, waited_s, metrics
            checkpoint = await self._checkpointer.save_if_due(version + 1)
            if not self.is_stopped:  # after `stop`, the learner keeps the devices to save the final checkpoint
                await self._learner.rollout_mode(version + 1)
                self._fleet.take_device()
            stats = await self._buffer.commit(version)
            self._checkpointer.committed()
            await self._unless_stopped(partial(self._follow, version + 1))
            if self._evaluate is not None and version + 1 == self._next_evaluated(version):
                await self._unless_stopped(partial(self._evaluate, version + 1, None))
            if checkpoint is not None:
                await checkpoint
            await self._report(stats)

    async def _report(self, stats: BufferStats) -> None:
        assert self._trained is not None
        counts = await self._fleet.counters()
        (plan, waited_s, metrics), self._trained = self._trained, None
        self._reporter.step(plan, plan_wait_s=waited_s, metrics=metrics, stats=stats, counts=counts)
