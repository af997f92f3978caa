"""The training loops: one asyncio process that sees metadata only.

Four loops, what each waits for, and who wakes it::

    feed      waits for room in the buffer's queue    ── woken by the buffer, when a lease is granted
    plan      waits for a place in the pipeline       ── woken by complete, when it commits a step
              then for the next batch                 ── woken by the buffer, when B groups are stored
    complete  waits for the update it was handed      ── woken by the learner ranks
    publish   waits for weights newer than the fleet's ── woken by complete

    prompts ─feed─▶ buffer ─plan─▶ [at most 2 steps] ─complete─▶ [newest snapshot] ─publish─▶ fleet

While the learner computes step v, the fleet generates, the plan of v + 1 is made and queued behind it on the ranks,
and the weights of v travel to the engines. Publishing takes the newest snapshot only: where publishing is slower than
training, versions are skipped, and admission, which goes by the engine's version, slows generation down.

A deadlock would need a loop that waits for one that waits for it. feed and plan wait for the buffer only; complete for
the learner only; publish for complete and the fleet. Admission waits for commits (complete) and newer engines
(publish), so the only cycle is plan → rollouts → admission → complete → plan, and it moves because a batch at the
learner's version is admitted without any further commit (docs/staleness.md).

A checkpoint is queued on the ranks between two updates, by plan, with what the run needs to go on (asyncrl/resume.py);
the ranks write it while they train on.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from asyncrl.config import RunConfig
from asyncrl.controller.resume import RunState
from asyncrl.metrics import Overlap, StepRecord, TrainingResult
from asyncrl.protocol.errors import AccountError
from asyncrl.protocol.ports import ControlBuffer
from asyncrl.protocol.types import BufferStats, Plan, Prompt, TokenAccount, WeightSnapshot

# The step that the ranks compute, and one queued behind it: enough that they never wait for the controller.
_PIPELINE_STEPS = 2


class LearnerPort(Protocol):
    """What the controller needs of the learner group. Calls queue on the ranks in the order they are made."""

    async def scored(self, plan: Plan) -> Plan:
        """The plan with the rewards of the reward model, where there is one."""
        ...

    def update(self, plan: Plan) -> Awaitable[Mapping[str, float]]:
        """Start the update on a batch; its metrics come with ``started_at`` and ``ended_at`` (Unix seconds)."""
        ...

    def publish(self, version: int) -> Awaitable[WeightSnapshot]:
        """Write the weights, as they are after the updates queued so far, as ``version``."""
        ...

    def update_critic(self, plan: Plan) -> Awaitable[Mapping[str, float]]:
        """Let the critic learn from the batch of the last `update`; its metrics, none where there is no critic."""
        ...

    def save(self, version: int, run: Mapping[str, Any], *, wait: bool) -> Awaitable[str]:
        """Save a checkpoint of ``version`` with the run's own state; with ``wait``, until it is whole."""
        ...


class FleetPort(Protocol):
    """What the controller needs of the rollout fleet."""

    async def load(self, snapshot: WeightSnapshot) -> float:
        """Put a snapshot on every engine; returns the seconds of the slowest."""
        ...

    async def counters(self) -> FleetCounts:
        """The fleet's own counts since it began."""
        ...

    async def drain(self) -> FleetCounts:
        """Put down all work: abort what runs, give the leases back; returns the final counts."""
        ...


class PromptSource(Protocol):
    """Where prompts come from."""

    def take(self, count: int) -> Sequence[Prompt]:
        """The next ``count`` prompts of an endless order."""
        ...

    def state(self) -> Mapping[str, Any]:
        """Where the order stands, as plain values."""
        ...


@dataclass(frozen=True, kw_only=True)
class FleetCounts:
    """The fleet's counters, over its engines.

    Attributes:
        tokens_generated: Policy tokens that the engines produced for training, also those of aborted requests.
        tokens_in_flight: Of these, not yet stored or given back.
        busy_s: Mean over engines of the seconds with a request running.
    """

    tokens_generated: int
    tokens_in_flight: int
    busy_s: float


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A batch that the learner trains on, and how long the controller waited for it."""

    plan: Plan
    plan_wait_s: float


@dataclass(frozen=True, kw_only=True)
class _Step(Turn):
    """A learner step on its way: with the handles of the update, the weights after it, and their checkpoint."""

    update: Awaitable[Mapping[str, float]]
    weights: Awaitable[WeightSnapshot]
    critic: Awaitable[Mapping[str, float]]
    checkpoint: Awaitable[str] | None


@dataclass
class _Progress:
    """What the loops share."""

    began_s: float = 0.0
    ended_s: float = 0.0
    learner_busy_s: float = 0.0
    rollout_busy_s: float = 0.0
    engine_version: int = 0
    publish_s: float = 0.0
    max_lag: int = 0
    newest: WeightSnapshot | None = None
    uncommitted: dict[int, Plan] = field(default_factory=dict)
    published: asyncio.Condition = field(default_factory=asyncio.Condition)
    last_report: tuple[float, int] = (0.0, 0)


class Controller:
    """Drives buffer, learner and fleet through ``total_steps`` learner steps, or through what is left of them."""

    def __init__(
        self,
        config: RunConfig,
        *,
        buffer: ControlBuffer,
        learner: LearnerPort,
        fleet: FleetPort,
        prompts: PromptSource,
        on_step: Callable[[StepRecord], None],
        resumed: RunState | None = None,
    ) -> None:
        """Take the parts, all started, with learner, buffer and engines at the version of ``resumed``."""
        self._config = config
        self._resumed = resumed or RunState()
        self._buffer = buffer
        self._learner = learner
        self._fleet = fleet
        self._prompts = prompts
        self._on_step = on_step
        self._progress = _Progress(engine_version=self._resumed.version)
        self._steps: asyncio.Queue[_Step] = asyncio.Queue()
        self._places = asyncio.Semaphore(_PIPELINE_STEPS)

    async def train(self) -> None:
        """Train to the last step and publish its weights.

        Raises:
            AsyncRLError: a part died or missed its deadline; the message names it.
        """
        self._progress.began_s = time.time()
        async with asyncio.TaskGroup() as tasks:
            feed = tasks.create_task(self._feed(), name="feed")
            plan = tasks.create_task(self._plan(), name="plan")
            complete = tasks.create_task(self._complete(), name="complete")
            publish = tasks.create_task(self._publish(), name="publish")
            await asyncio.gather(plan, complete, publish)
            feed.cancel()

    async def account(self) -> TrainingResult:
        """Let the fleet put down its work, and close the token account.

        Raises:
            AccountError: the token account does not balance.
        """
        progress = self._progress
        counts = await self._fleet.drain()
        stats = await self._buffer.stats()
        tokens = TokenAccount(
            generated=counts.tokens_generated,
            trained=stats.tokens_trained,
            dropped=sum(stats.tokens_dropped.values()),
            buffered=stats.tokens_buffered,
            in_flight=counts.tokens_in_flight,
        )
        before = self._resumed
        if tokens.balance != 0:
            raise AccountError(
                f"every generated token must be trained, dropped, buffered or in flight; {tokens.balance} are not: "
                f"{tokens}, dropped {dict(stats.tokens_dropped)}; please report this with the run's logs"
            )
        dropped = Counter(before.all_dropped()) + Counter(stats.tokens_dropped)
        lags = Counter(before.lag_histogram) + Counter(stats.lag_histogram)
        measured_s = progress.ended_s - progress.began_s
        return TrainingResult(
            policy_version=stats.learner_version,
            train_wall_s=measured_s,
            overlap=Overlap(
                rollout_busy_s=progress.rollout_busy_s,
                learner_busy_s=progress.learner_busy_s,
                measured_s=measured_s,
            ),
            tokens=replace(
                tokens,
                generated=before.tokens_generated + tokens.generated,
                trained=before.tokens_trained + tokens.trained,
                dropped=sum(dropped.values()),
            ),
            max_lag_realised=max(lags, default=progress.max_lag),
            lag_histogram=dict(sorted(lags.items())),
            tokens_dropped=dict(dropped),
        )

    async def _feed(self) -> None:
        while True:
            await self._buffer.enqueue(self._prompts.take(self._config.algorithm.groups_per_step))

    async def _plan(self) -> None:
        for version in range(self._resumed.version, self._config.total_steps):
            await self._places.acquire()
            asked_s = time.monotonic()
            plan = await self._buffer.plan(version)
            waited_s = time.monotonic() - asked_s
            self._progress.uncommitted[version] = plan
            plan = await self._learner.scored(plan)
            update = self._learner.update(plan)
            weights = self._learner.publish(version + 1)
            critic = self._learner.update_critic(plan)  # behind the weights, which wait for the policy alone
            step = _Step(
                plan=plan,
                plan_wait_s=waited_s,
                update=update,
                weights=weights,
                critic=critic,
                checkpoint=await self._save(version + 1),
            )
            await self._steps.put(step)

    async def _save(self, version: int) -> Awaitable[str] | None:
        """Queue a checkpoint on the ranks where one is due, right behind the update that leads to ``version``."""
        every, last = self._config.checkpoint.every_steps, self._config.total_steps
        if every == 0 or (version % every != 0 and version != last):
            return None
        planned = list(self._progress.uncommitted.values())
        stats = await self._buffer.stats()
        state = self._resumed.after(
            prompts=self._prompts.state(),
            stats=stats,
            finished=await self._buffer.finished(),
            planned=planned,
            tokens_generated=(await self._fleet.counters()).tokens_generated,
            version=version,
        )
        return self._learner.save(version, state.plain(), wait=version == last)

    async def _complete(self) -> None:
        for _ in range(self._resumed.version, self._config.total_steps):
            step = await self._steps.get()
            metrics = await step.update
            stats = await self._buffer.commit(step.plan.version)
            del self._progress.uncommitted[step.plan.version]
            self._places.release()
            await self._offer(await step.weights)
            metrics = {**metrics, **await step.critic}
            if step.checkpoint is not None:
                await step.checkpoint
            await self._report(step, metrics, stats)

    async def _offer(self, snapshot: WeightSnapshot) -> None:
        async with self._progress.published:
            self._progress.newest = snapshot
            self._progress.published.notify_all()

    async def _publish(self) -> None:
        progress = self._progress
        while progress.engine_version < self._config.total_steps:
            async with progress.published:
                await progress.published.wait_for(self._has_newer_weights)
                snapshot = progress.newest
            if snapshot is not None:
                progress.publish_s = await self._fleet.load(snapshot)
                progress.engine_version = snapshot.version

    def _has_newer_weights(self) -> bool:
        newest = self._progress.newest
        return newest is not None and newest.version > self._progress.engine_version

    async def _report(self, step: Turn, metrics: Mapping[str, float], stats: BufferStats) -> None:
        """Record a finished step. The only call it makes is for the fleet's counters: metadata, a millisecond."""
        progress, now_s = self._progress, time.time()
        counts = await self._fleet.counters()
        update_s = metrics["ended_at"] - metrics["started_at"]
        progress.learner_busy_s += update_s
        progress.rollout_busy_s = counts.busy_s
        progress.ended_s = metrics["ended_at"]
        last_s, last_tokens = progress.last_report
        elapsed_s = now_s - (last_s or progress.began_s)
        progress.last_report = (now_s, counts.tokens_generated)
        groups = step.plan.groups
        lags = [step.plan.version - group.oldest_version for group in groups]
        progress.max_lag = max(progress.max_lag, *lags)
        trained = slice(self._config.algorithm.samples_per_prompt)  # a greedy baseline comes after them
        rewards = [reward for group in groups for reward in group.rewards[trained]]
        lengths = [length for group in groups for length in group.response_lengths[trained]]
        self._on_step(
            StepRecord(
                step=step.plan.version,
                time_s=progress.ended_s - progress.began_s,
                reward=sum(rewards) / len(rewards),
                solved_groups=sum(len(set(group.rewards)) == 1 for group in groups) / len(groups),
                response_length=sum(lengths) / len(lengths),
                lag_mean=sum(lags) / len(lags),
                lag_max=max(lags),
                generated_tokens=counts.tokens_generated,
                rollout_tokens_per_s=(counts.tokens_generated - last_tokens) / elapsed_s if elapsed_s > 0 else 0.0,
                learner_tokens_per_s=sum(group.num_tokens for group in groups) / update_s if update_s > 0 else 0.0,
                buffer_groups=stats.groups["stored"],
                leased_groups=stats.groups["leased"],
                dropped_groups=stats.groups["dropped"],
                kept_length=stats.mean_length_kept,
                dropped_length=stats.mean_length_dropped,
                engine_version=progress.engine_version,
                plan_wait_s=step.plan_wait_s,
                update_s=update_s,
                publish_s=progress.publish_s,
                learner={name: value for name, value in metrics.items() if name not in ("started_at", "ended_at")},
            )
        )
