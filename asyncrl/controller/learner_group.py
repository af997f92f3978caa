"""The learner and the fleet of a run, behind the ports that the controller and the evaluation drive."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import ray

from asyncrl.config import RunConfig
from asyncrl.controller.controller import FleetCounts
from asyncrl.controller.role_groups import WORKER_ENV, RoleGroups
from asyncrl.protocol.errors import DeadlineError
from asyncrl.protocol.types import Plan, Prompt, WeightSnapshot
from asyncrl.single_controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from buffer import BufferConnection
from learner.advantages import ADVANTAGES, needs_whole_groups
from learner.batching import rank_batches
from learner.remote_scores import RemoteScores
from learner.roles import ROLES, scored_by
from learner.types import RankBatch
from rollout_fleet.config import RolloutFleetConfig, SamplingConfig, SaveProgress
from rollout_fleet.types import FleetCounters
from rollout_fleet.worker import RolloutWorker

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RunPaths:
    """Where the groups write.

    Attributes:
        logs: One log a process.
        snapshots: Published weights; readable by every engine of the host.
        trajectories: Consumed trajectories; None records none.
        checkpoints: Checkpoints of the learner.
    """

    logs: Path
    snapshots: Path
    trajectories: Path | None
    checkpoints: Path


class Learner:
    """The learner's roles. Calls queue on the ranks in the order they are made.

    A step queues, role by role: the reference's and the critic's scores, the actor's step, the weights, the critic's
    step. What a role scored reaches the others from worker to worker, or stays in the process that they share.
    """

    def __init__(self, config: RunConfig, *, buffer: BufferConnection, paths: RunPaths) -> None:
        """Start the ranks; `init` builds their models."""
        self._config = config
        self._checkpoints = paths.checkpoints
        self._batches: tuple[Plan | None, dict[str, list[RankBatch]]] = (None, {})
        self._scores: dict[str, RemoteScores] = {}
        self._roles = RoleGroups(
            config,
            buffer=buffer,
            log_dir=paths.logs,
            snapshots=paths.snapshots,
            trajectories=paths.trajectories,
        )

    async def init(self) -> None:
        """Load the models on every rank.

        Raises:
            DeadlineError: not within ``learner.start_timeout_s``.
            WorkerDiedError: a rank died.
        """
        timeout_s = self._config.learner.start_timeout_s
        pending = [group.init_model() for group in self._roles]
        await within(_all(pending), timeout_s, "the learner's models", "learner.start_timeout_s")

    async def scored(self, plan: Plan) -> Plan:
        """See `LearnerPort.scored`."""
        if "rm" not in self._roles:
            return plan
        pending = self._roles["rm"].rewards(self._shares(plan, "rm"))
        results = await self._in_time(pending, f"the rewards of step {plan.version}")
        scores = {sample: reward for result in results for sample, reward in result.items()}
        groups = [
            replace(group, rewards=tuple(scores[group.group_id, sample] for sample in range(len(group.rewards))))
            for group in plan.groups
        ]
        return replace(plan, groups=groups)

    def update(self, plan: Plan) -> Awaitable[Mapping[str, float]]:
        """See `LearnerPort.update`."""
        unsent: list[Awaitable[Any]] = []
        readers = [role for role in ("actor", "critic") if role in self._roles]
        columns = dict.fromkeys(column for role in readers for column in self._reads(role))
        self._scores = {column: self._score(column, plan, unsent) for column in sorted(columns)}
        step = self._roles["actor"].step(*self._step_arguments("actor", plan))
        return self._after(unsent, step, f"the update of step {plan.version}")

    def update_critic(self, plan: Plan) -> Awaitable[Mapping[str, float]]:
        """See `LearnerPort.update_critic`."""
        if "critic" not in self._roles:
            return _nothing()
        step = self._roles["critic"].step(*self._step_arguments("critic", plan))
        return self._critic_metrics(step, f"the critic's update of step {plan.version}")

    def publish(self, version: int) -> Awaitable[WeightSnapshot]:
        """See `LearnerPort.publish`."""
        return self._first(self._roles["actor"].publish_weights(version), f"the weights of version {version}")

    def rollout_mode(self, version: int) -> Awaitable[WeightSnapshot]:
        """See `asyncrl.controller.colocated.TurnTakingLearner.rollout_mode`."""
        others = [group.rollout_mode(version) for role, group in self._on_shared_devices() if role != "actor"]
        return self._after(others, self._roles["actor"].rollout_mode(version), f"the turn to rollout at {version}")

    async def trainer_mode(self) -> None:
        """See `asyncrl.controller.colocated.TurnTakingLearner.trainer_mode`."""
        await self._in_time(_all([group.trainer_mode() for _, group in self._on_shared_devices()]), "training's turn")

    @property
    def pool(self) -> RayResourcePool:
        """The places of the actor's processes."""
        return self._roles.actor_pool

    def _on_shared_devices(self) -> list[tuple[str, Any]]:
        """The roles in the actor's pool, which engines share where the pools are colocated."""
        return [(role, self._roles[role]) for role in self._roles.pools if self._roles.share_a_pool(role, "actor")]

    def save(self, version: int, run: Mapping[str, Any], *, wait: bool) -> Awaitable[str]:
        """See `LearnerPort.save`."""
        critic = []
        if "critic" in self._roles:
            critic = [self._roles["critic"].save_checkpoint(str(self._checkpoints / "critic"), version, wait)]
        actor = self._roles["actor"].save_checkpoint(str(self._checkpoints), version, wait, run)
        return self._after(critic, actor, f"the checkpoint of version {version}")

    async def load(self, checkpoint: Path) -> int:
        """Go on from a checkpoint; returns its version.

        Raises:
            ValueError: the run has a critic and the checkpoint has none of the same version.
        """
        if "critic" in self._roles:
            critic = checkpoint.parent / "critic" / checkpoint.name
            if not critic.is_dir():
                raise ValueError(
                    f"checkpoint.resume needs the critic of {checkpoint} in {critic}, got none; name an older "
                    "checkpoint, or resume with the algorithm that saved it"
                )
            await self._first(self._roles["critic"].load_checkpoint(str(critic)), f"loading {critic}")
        return await self._first(self._roles["actor"].load_checkpoint(str(checkpoint)), f"loading {checkpoint}")

    async def save_policy(self, directory: Path) -> None:
        """Write the policy and its tokenizer in Hugging Face layout."""
        await self._first(self._roles["actor"].save_policy(str(directory)), "the saved policy")

    async def stop(self, timeout_s: float) -> None:
        """End the ranks: ask, then kill."""
        await _stop_groups(list(self._roles), self._roles.shutdown, timeout_s)

    def _shares(self, plan: Plan, role: str) -> list[RankBatch]:
        """The plan as the data-parallel ranks of a role's pool share it."""
        if self._batches[0] is not plan:
            self._batches = (plan, {})
        shares, pool = self._batches[1], self._roles.pools[role]
        if pool not in shares:
            shares[pool] = rank_batches(
                plan,
                self._config.algorithm,
                num_shards=self._roles.pool_sizes[pool] // self._config.learner.sp_size,
                max_lag=self._config.buffer.max_lag,
                whole_groups=needs_whole_groups(ADVANTAGES.get(self._config.algorithm.advantage)),
            )
        return shares[pool]

    def _reads(self, role: str) -> tuple[str, ...]:
        """The columns that a role's step takes."""
        return ROLES[role].reads(self._config.algorithm)

    def _score(self, column: str, plan: Plan, unsent: list[Awaitable[Any]]) -> RemoteScores:
        """Queue a column's scores; where no reader is in another pool they stay, and join ``unsent``."""
        role = scored_by(column, self._config.learner).name
        batches = self._shares(plan, role)
        readers = [reader for reader in ("actor", "critic") if reader in self._roles and column in self._reads(reader)]
        send = not all(self._roles.share_a_pool(role, reader) for reader in readers)
        results = self._roles[role].score(batches, send=send)
        if not send:
            unsent.append(results)
        return RemoteScores(role=role, batches=batches, results=results)

    def _step_arguments(self, role: str, plan: Plan) -> list[Sequence[Any]]:
        """A role's share of the plan, and what each of its ranks is handed of other roles' scores."""
        batches = self._shares(plan, role)
        return [batches, *(self._sent(self._scores[column], role, batches) for column in self._reads(role))]

    def _sent(self, scores: RemoteScores, role: str, batches: Sequence[RankBatch]) -> Sequence[Any]:
        """What each data-parallel rank of a role is handed of a column: None where it is in its process."""
        if self._roles.share_a_pool(scores.role, role):
            return [None] * len(batches)
        return scores.needed_by(batches)

    async def _after(self, before: Sequence[Awaitable[Any]], pending: Awaitable[list[T]], what: str) -> T:
        """Rank 0's answer, or the error of a call before it, which is the cause of its own."""
        for earlier in before:
            await self._in_time(earlier, what)
        return await self._first(pending, what)

    async def _critic_metrics(self, pending: Awaitable[list[Mapping[str, float]]], what: str) -> Mapping[str, float]:
        return {f"critic.{name}": value for name, value in (await self._first(pending, what)).items()}

    async def _first(self, pending: Awaitable[list[T]], what: str) -> T:
        """Rank 0's answer; the ranks reduce what they measure among themselves."""
        return (await self._in_time(pending, what))[0]

    async def _in_time(self, pending: Awaitable[T], what: str) -> T:
        option = "learner.step_timeout_s, twice which a call may take: the step before it has the ranks first"
        return await within(pending, 2 * self._config.learner.step_timeout_s, what, option)


class Fleet:
    """The rollout fleet."""

    def __init__(
        self, config: RunConfig, *, buffer: BufferConnection, paths: RunPaths, pool: RayResourcePool | None = None
    ) -> None:
        """Start the workers, in their own pool unless one is given; `start` brings up their engines."""
        self._config = config
        worker = RayClassWithInitArgs(
            ray.remote(RolloutWorker),
            _fleet_options(config),
            model_path=config.model.path,
            samples_per_prompt=config.algorithm.samples_per_prompt,
            connect_buffer=buffer.client,
            log_dir=str(paths.logs),
            seed=config.seed,
            greedy_baseline=config.algorithm.greedy_baseline,
        )
        self._group = _start_group(
            "rollout",
            worker,
            num_workers=config.rollout_fleet.num_engines,
            num_cpus=config.placement.cpus_per_engine,
            num_gpus=config.rollout_fleet.sglang.tp_size if config.learner.device == "cuda" else 0,
            config=config,
            log_dir=paths.logs,
            pool=pool,
        )

    async def start(self) -> None:
        """Bring every engine up.

        Raises:
            DeadlineError: not within ``rollout_fleet.start_timeout_s``.
            WorkerDiedError: an engine or its worker died; the message ends with its log.
        """
        # The worker keeps the deadline itself, with a better message; this one is for a worker that hangs.
        timeout_s = self._config.rollout_fleet.start_timeout_s + 30
        await within(self._group.start(), timeout_s, "the rollout engines", "rollout_fleet.start_timeout_s")

    async def run(self) -> None:
        """Roll out until `drain`; raises when an engine or a worker dies."""
        await self._group.run()

    async def load(self, snapshot: WeightSnapshot) -> float:
        """See `FleetPort.load`."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        fleet = self._config.rollout_fleet
        num_waits = 2 if fleet.save_progress is SaveProgress.at_updates else 1  # for what runs to be cut off, too
        timeout_s = num_waits * fleet.load_timeout_s + 10
        what = f"loading weights of version {snapshot.version}"
        await within(self._group.load_weights(snapshot), timeout_s, what, "rollout_fleet.load_timeout_s")
        return loop.time() - began_s

    async def release_device(self) -> None:
        """See `asyncrl.controller.colocated.TurnTakingFleet.release_device`."""
        fleet = self._config.rollout_fleet
        timeout_s = fleet.generate_timeout_s + fleet.reward_timeout_s + fleet.load_timeout_s + 10
        option = "rollout_fleet.generate_timeout_s"
        await within(self._group.release_device(), timeout_s, "the engines to release their devices", option)

    async def counters(self) -> FleetCounts:
        """See `FleetPort.counters`."""
        timeout_s = self._config.buffer.request_timeout_s
        return _total(
            await within(self._group.counters(), timeout_s, "the fleet's counters", "buffer.request_timeout_s")
        )

    async def drain(self) -> FleetCounts:
        """See `FleetPort.drain`."""
        timeout_s = 2 * self._config.buffer.request_timeout_s
        pending = self._group.drain()
        return _total(await within(pending, timeout_s, "the fleet to put down its work", "buffer.request_timeout_s"))

    async def evaluate(self, prompts: Sequence[Prompt], sampling: SamplingConfig, num_samples: int) -> list[float]:
        """See `asyncrl.controller.evaluation.EvaluationFleet`."""
        count = self._config.rollout_fleet.num_engines
        shares = [list(prompts[index::count]) for index in range(count)]
        pending = self._group.evaluate(shares, [sampling] * count, [num_samples] * count)
        results = await within(pending, self._config.evaluation.timeout_s, "the evaluation", "evaluation.timeout_s")
        return [reward for result in results for reward in result.rewards]

    async def stop(self, timeout_s: float) -> None:
        """End engines and workers: ask, then kill."""
        await _stop_groups([self._group], self._group.shutdown, timeout_s)


async def within(pending: Awaitable[T], timeout_s: float, what: str, option: str) -> T:
    """Await a group's call under a deadline.

    Raises:
        DeadlineError: it passed; the message names what was awaited and the option that bounds it.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await pending
    except TimeoutError:
        raise DeadlineError(f"waited {timeout_s:g} s for {what}; look into the logs, or raise {option}") from None


def _start_group(
    name: str,
    worker: RayClassWithInitArgs,
    *,
    num_workers: int,
    num_cpus: float,
    num_gpus: int,
    config: RunConfig,
    log_dir: Path,
    pool: RayResourcePool | None,
) -> Any:
    """Start a group; typed Any, because its methods are bound from the worker class when it is made."""
    pool = pool or RayResourcePool(
        process_on_nodes=[num_workers],
        use_gpu=num_gpus > 0,
        name_prefix=name,
        max_colocate_count=1,
        num_cpus_per_process=num_cpus,
        timeout_s=config.ray.start_timeout_s,
    )
    return RayWorkerGroup(pool, worker, name_prefix=name, log_dir=log_dir, worker_env=WORKER_ENV)


def _fleet_options(config: RunConfig) -> RolloutFleetConfig:
    """The fleet's options; servers on shared devices must be able to leave them."""
    fleet = config.rollout_fleet
    return replace(fleet, sglang=replace(fleet.sglang, memory_saver=True)) if config.placement.colocated else fleet


async def _stop_groups(groups: Sequence[Any], shutdown: Callable[[], None], timeout_s: float) -> None:
    try:
        # Whatever a dying worker answers no longer matters: it is killed next.
        with contextlib.suppress(Exception):
            await asyncio.wait_for(_all([group.execute_all_async("stop") for group in groups]), timeout_s)
    finally:
        await asyncio.to_thread(shutdown)


async def _all(pending: Sequence[Awaitable[Any]]) -> None:
    for result in pending:
        await result


async def _nothing() -> Mapping[str, float]:
    return {}


def _total(workers: Sequence[FleetCounters]) -> FleetCounts:
    return FleetCounts(
        tokens_generated=sum(worker.tokens_generated for worker in workers),
        tokens_in_flight=sum(worker.tokens_in_flight for worker in workers),
        busy_s=sum(worker.busy_s for worker in workers) / len(workers),
    )
