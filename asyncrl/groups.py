"""The two worker groups of a run, behind the ports that the controller and the evaluation drive."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import ray

from asyncrl.config import RunConfig
from asyncrl.controller import FleetCounts
from asyncrl.protocol.errors import DeadlineError
from asyncrl.protocol.types import Plan, Prompt, WeightSnapshot
from asyncrl.single_controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from buffer import BufferClient, SyncBufferClient
from learner.planning import rank_batches
from learner.registry import ADVANTAGES, LOSSES
from learner.worker import LearnerWorker
from rollout_fleet.config import RolloutFleetConfig, SamplingConfig
from rollout_fleet.types import FleetCounters
from rollout_fleet.worker import RolloutWorker

T = TypeVar("T")

# One thread a process: on a machine with few cores, threads that fight for them stop everybody.
_WORKER_ENV = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


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


def check_algorithm(config: RunConfig) -> None:
    """Look the algorithm's parts up by name, so that a wrong name fails before the parts start.

    Raises:
        ValueError: ``algorithm.advantage`` or ``algorithm.loss`` is neither registered nor ``module:function``.
    """
    ADVANTAGES.get(config.algorithm.advantage)
    LOSSES.get(config.algorithm.loss)


class Learner:
    """The learner group. Calls queue on the ranks in the order they are made."""

    def __init__(
        self, config: RunConfig, *, buffer_address: str, paths: RunPaths, pool: RayResourcePool | None = None
    ) -> None:
        """Start the ranks, in their own pool unless one is given; `init` builds their model."""
        self._config = config
        self._checkpoints = paths.checkpoints
        worker = RayClassWithInitArgs(
            ray.remote(LearnerWorker),
            replace(config.learner, keep_snapshots=_snapshots_kept(config)),
            config.algorithm,
            model_path=config.model.path,
            total_steps=config.total_steps,
            temperature=config.rollout_fleet.sampling.temperature,
            connect_buffer=partial(SyncBufferClient, buffer_address, request_timeout_s=config.buffer.request_timeout_s),
            snapshot_dir=str(paths.snapshots),
            seed=config.seed,
            trajectory_dir=str(paths.trajectories) if paths.trajectories else None,
            checksums=config.rollout_fleet.verify_weights,
        )
        self._group = _start_group(
            "learner",
            worker,
            num_workers=config.learner.num_ranks,
            num_cpus=config.placement.cpus_per_learner_rank,
            num_gpus=1 if config.learner.device == "cuda" else 0,
            config=config,
            log_dir=paths.logs,
            pool=pool,
        )

    async def init(self) -> None:
        """Load the model on every rank.

        Raises:
            DeadlineError: not within ``learner.start_timeout_s``.
            WorkerDiedError: a rank died.
        """
        timeout_s = self._config.learner.start_timeout_s
        await within(self._group.init_model(), timeout_s, "the learner's models", "learner.start_timeout_s")

    def update(self, plan: Plan) -> Awaitable[Mapping[str, float]]:
        """See `LearnerPort.update`."""
        shards = rank_batches(
            plan,
            self._config.algorithm,
            num_shards=self._config.learner.num_ranks // self._config.learner.sp_size,
            max_lag=self._config.buffer.max_lag,
        )
        what = f"the update of step {plan.version}"
        return self._first(self._group.update_policy(shards), what)

    def publish(self, version: int) -> Awaitable[WeightSnapshot]:
        """See `LearnerPort.publish`."""
        return self._first(self._group.publish_weights(version), f"the weights of version {version}")

    def rollout_mode(self, version: int) -> Awaitable[WeightSnapshot]:
        """See `asyncrl.turns.TurnTakingLearner.rollout_mode`."""
        return self._first(self._group.rollout_mode(version), f"the turn to rollout at version {version}")

    def trainer_mode(self) -> Awaitable[None]:
        """See `asyncrl.turns.TurnTakingLearner.trainer_mode`."""
        return self._first(self._group.trainer_mode(), "the turn to training")

    def save(self, version: int, run: Mapping[str, Any], *, wait: bool) -> Awaitable[str]:
        """See `LearnerPort.save`."""
        saved = self._group.save_checkpoint(str(self._checkpoints), version, wait, run)
        return self._first(saved, f"the checkpoint of version {version}")

    async def load(self, checkpoint: Path) -> int:
        """Go on from a checkpoint; returns its version."""
        return await self._first(self._group.load_checkpoint(str(checkpoint)), f"loading {checkpoint}")

    async def save_policy(self, directory: Path) -> None:
        """Write the policy and its tokenizer in Hugging Face layout."""
        await self._first(self._group.save_policy(str(directory)), "the saved policy")

    async def stop(self, timeout_s: float) -> None:
        """End the ranks: ask, then kill."""
        await _stop_group(self._group, timeout_s)

    async def _first(self, pending: Awaitable[list[T]], what: str) -> T:
        """Rank 0's answer; the ranks reduce what they measure among themselves."""
        return (await within(pending, self._step_deadline_s, what, "learner.step_timeout_s"))[0]

    @property
    def _step_deadline_s(self) -> float:
        # A call may wait on the ranks behind the step before it.
        return 2 * self._config.learner.step_timeout_s


class Fleet:
    """The rollout fleet."""

    def __init__(
        self, config: RunConfig, *, buffer_address: str, paths: RunPaths, pool: RayResourcePool | None = None
    ) -> None:
        """Start the workers, in their own pool unless one is given; `start` brings up their engines."""
        self._config = config
        worker = RayClassWithInitArgs(
            ray.remote(RolloutWorker),
            _fleet_options(config),
            model_path=config.model.path,
            samples_per_prompt=config.algorithm.samples_per_prompt,
            connect_buffer=partial(BufferClient, buffer_address, request_timeout_s=config.buffer.request_timeout_s),
            log_dir=str(paths.logs),
            seed=config.seed,
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
        timeout_s = self._config.rollout_fleet.load_timeout_s + 10
        what = f"loading weights of version {snapshot.version}"
        await within(self._group.load_weights(snapshot), timeout_s, what, "rollout_fleet.load_timeout_s")
        return loop.time() - began_s

    async def release_device(self) -> None:
        """See `asyncrl.turns.TurnTakingFleet.release_device`."""
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
        """See `asyncrl.evaluation.EvaluationFleet`."""
        count = self._config.rollout_fleet.num_engines
        shares = [list(prompts[index::count]) for index in range(count)]
        pending = self._group.evaluate(shares, [sampling] * count, [num_samples] * count)
        results = await within(pending, self._config.evaluation.timeout_s, "the evaluation", "evaluation.timeout_s")
        return [reward for result in results for reward in result.rewards]

    async def stop(self, timeout_s: float) -> None:
        """End engines and workers: ask, then kill."""
        await _stop_group(self._group, timeout_s)


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
    return RayWorkerGroup(pool, worker, name_prefix=name, log_dir=log_dir, worker_env=_WORKER_ENV)


def shared_pool(config: RunConfig) -> RayResourcePool | None:
    """The processes' places where learner ranks and engines share devices, one of each a device; else None."""
    placement = config.placement
    if not placement.colocated:
        return None
    return RayResourcePool(
        process_on_nodes=[config.learner.num_ranks],
        use_gpu=config.learner.device == "cuda",
        name_prefix="colocated",
        max_colocate_count=2,
        num_cpus_per_process=placement.cpus_per_learner_rank + placement.cpus_per_engine,
        timeout_s=config.ray.start_timeout_s,
    )


def _fleet_options(config: RunConfig) -> RolloutFleetConfig:
    """The fleet's options; servers on shared devices must be able to leave them."""
    fleet = config.rollout_fleet
    return replace(fleet, sglang=replace(fleet.sglang, memory_saver=True)) if config.placement.colocated else fleet


def _snapshots_kept(config: RunConfig) -> int:
    """While engines load version u + 1, admission at u lets the learner reach u + max_lag + 1, and no further."""
    kept = config.learner.keep_snapshots
    return kept if kept == -1 else max(kept, config.buffer.max_lag + 2)


async def _stop_group(group: RayWorkerGroup, timeout_s: float) -> None:
    try:
        # Whatever a dying worker answers no longer matters: it is killed next.
        with contextlib.suppress(Exception):
            await asyncio.wait_for(_awaited(group.execute_all_async("stop")), timeout_s)
    finally:
        await asyncio.to_thread(group.shutdown)


async def _awaited(pending: Awaitable[Any]) -> None:
    await pending


def _total(workers: Sequence[FleetCounters]) -> FleetCounts:
    return FleetCounts(
        tokens_generated=sum(worker.tokens_generated for worker in workers),
        tokens_in_flight=sum(worker.tokens_in_flight for worker in workers),
        busy_s=sum(worker.busy_s for worker in workers) / len(workers),
    )
