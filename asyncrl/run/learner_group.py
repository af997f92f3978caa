"""The learner, with the interface that the controller uses (`LearnerPort`). Each role is a group of Ray workers.

Roles are, for example, the actor and the critic. Every call waits for the ranks until a deadline. If a rank dies, the
call fails earlier.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from ray.exceptions import RayError, RayTaskError

from asyncrl.config import RunConfig, learner_pools, learner_roles, num_engine_hosts, role_model, role_options
from asyncrl.core.errors import (
    AccountError,
    BatchLost,
    ClusterDiedError,
    DeadlineError,
    LearnerDiedError,
    WorkerDiedError,
)
from asyncrl.core.host import make_private_folder
from asyncrl.core.receipts import DIGEST_BITS
from asyncrl.core.remote import StepDeadline, death_among, raised_in_worker, refs_of, within
from asyncrl.core.types import Carrier, Plan
from asyncrl.run.cluster import finished_in_thread, learner_env, learner_layout
from asyncrl.run.run_folder import RunPaths, remove_published
from asyncrl.single_controller import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    ResourcePoolManager,
    Role,
    create_colocated_worker_cls_fused,
)
from asyncrl.weights.carriers import PublishOptions
from buffer import BufferConnection, BufferRole
from learner.batching import needs_whole_groups, rank_batches
from learner.checkpoint_folder import CRITIC, part_of
from learner.config import RENDEZVOUS_FILE, LearnerConfig
from learner.roles import ROLES, RemoteScores, scored_by
from learner.trajectory_log import TokenLogOptions
from learner.types import RankBatch
from learner.verl_api import ActorWorker, CriticWorker, ReferenceWorker, RewardModelWorker

T = TypeVar("T")
logger = logging.getLogger(__name__)

_DEATH_NOTICED_S = 10.0
"""Longest time in seconds from a failed call on the ranks until Ray reports which rank has died."""
_CALLS_FAIL_S = 5.0
"""Longest time in seconds from the death of a rank until all pending calls on the ranks fail."""

WORKER_CLASSES = {"actor": ActorWorker, "critic": CriticWorker, "ref": ReferenceWorker, "rm": RewardModelWorker}
"""The class of each role's ranks. The run calls methods of their base class `ModelWorker` (`learner/worker.py`)."""


class LearnerGroup:
    """All roles of the learner. The ranks execute the calls of this object in order.

    Each learner step queues these calls: compute the scores (the reference's log-probs and the critic's values), train
    the actor, publish the new weights, and train the critic. The scores go directly from worker to worker. If the roles
    share a process, the scores stay in this process.

    Attributes:
        checkpoints: The folder of the learner's checkpoints.
        roles: The worker group of each role, by role name, and the names of their pools. A restart replaces the groups.
    """

    roles: RoleGroups

    def __init__(self, config: RunConfig, *, buffer: BufferConnection, paths: RunPaths) -> None:
        """Start the ranks, which do not load models before `init` is called."""
        self._config = config
        self._buffer = buffer
        self._paths = paths
        self.checkpoints = paths.checkpoints
        self._layout = learner_layout(config)
        for pool in self._layout.resource_pool_dict.values():
            pool.enter()  # reserve the devices once: ranks that start later use the same reservation
        self._begin(incarnation=0)

    def _begin(self, *, incarnation: int) -> None:
        self._batches: tuple[Plan | None, dict[int, list[RankBatch]]] = (None, {})
        self._scores: dict[str, RemoteScores] = {}
        self._announced: dict[str, Awaitable[Any]] = {}  # maps each role to the newest pending call of its `announce`
        self._deadline = StepDeadline(2 * self._config.learner.step_timeout_s)
        buffer = replace(self._buffer, incarnation=incarnation).for_role(BufferRole.learner)
        self.roles = RoleGroups(self._config, layout=self._layout, connect_buffer=buffer.sync_client, paths=self._paths)

    async def init(self) -> None:
        """Load the models on every rank. Raises `LearnerDiedError` if a rank dies or misses the deadline."""
        timeout_s = self._config.learner.start_timeout_s
        pending = AllOf([group.init_model() for group in self.roles])
        loading = within(pending, timeout_s, "the learner's models", "learner.start_timeout_s")
        await or_death(loading, pending)

    async def death(self) -> NoReturn:
        """Wait until the process of a rank ends, even if no call is pending. Then raise `LearnerDiedError`.

        Pending calls report the death in more detail. So this method waits `_CALLS_FAIL_S` seconds before it raises, so
        that such a call can fail first.
        """
        try:
            death: Exception = await self.roles.death()
        except Exception as error:  # noqa: BLE001 - report every error, because nothing else watches for deaths
            death = WorkerDiedError(f"the watch on the learner's ranks failed: {error!r}")
        await asyncio.sleep(_CALLS_FAIL_S)
        raise LearnerDiedError(str(death))

    async def end(self) -> None:
        """Kill the remaining ranks after a rank has died. Call `begin_again` or `stop` next."""
        await asyncio.to_thread(self.roles.shutdown)

    async def begin_again(self, checkpoint: Path, version: int, *, incarnation: int) -> None:
        """Start new ranks from the checkpoint of ``version``, and publish this version.

        ``incarnation`` is the number of restarts of the learner so far. The method removes versions after ``version``
        that the previous ranks published. Colocated engines must have freed the devices. The method leaves these
        devices free again, after the publish. Raises the errors of `init` and `load`.
        """
        await finished_in_thread(partial(self._begin, incarnation=incarnation), self._config.ray.start_timeout_s)
        await asyncio.to_thread(remove_published, self._paths.snapshots, after=version)
        await self.init()
        await self.load(checkpoint)
        if self._config.placement.colocated:
            await self.rollout_mode(version)
            return
        await self.publish(version)
        await self.finish_publish()

    async def scored(self, plan: Plan) -> Plan:
        """Return a copy of the plan (the groups of a step's batch) that has the rewards of the reward model.

        If the run has no reward model, return ``plan`` itself.
        """
        if "rm" not in self.roles:
            return plan
        self._announce(plan, ["rm"])
        pending = self.roles["rm"].rewards(self._shares(plan, "rm"))
        results = await self._in_time(pending, f"the rewards of step {plan.version}", kind="rewards")
        scores = {sample: reward for result in results for sample, reward in result.items()}
        groups = [
            replace(group, rewards=tuple(scores[group.group_id, sample] for sample in range(len(group.rewards))))
            for group in plan.groups
        ]
        if unscored := [group.group_id for group in groups if not group.is_scored]:
            logger.warning("step %d leaves out groups %s: their scores are not finite", plan.version, unscored)
        if len(unscored) == len(groups):
            raise ValueError(
                f"learner.reward_model.path={self._config.learner.reward_model.path} must give finite scores, got NaN "
                f"or infinity in each of the {len(groups)} groups of step {plan.version}; check the model, or set "
                "learner.dtype=float32"
            )
        return replace(plan, groups=groups)

    def step(self, plan: Plan) -> Awaitable[Mapping[str, float]]:
        """Queue the calls that compute log-probs and values, then the actor's step on the batch.

        Await the result to get the step's metrics. The await raises `AccountError` if the ranks have trained on other
        tokens than the tokens of ``plan``.
        """
        unsent: list[Awaitable[Any]] = []
        readers = [role for role in ("actor", "critic") if role in self.roles]
        columns = sorted({column for role in readers for column in self._reads(role)})
        self._announce(plan, [*(scored_by(column, self._config.learner).name for column in columns), *readers])
        self._scores = {column: self._score(column, plan, unsent) for column in columns}
        step = self.roles["actor"].step(*self._step_arguments("actor", plan))

        async def finish() -> Mapping[str, float]:
            found = await self._first(step, f"the update of step {plan.version}", kind="update", after=unsent)
            scored = [group for group in plan.groups if group.is_scored]
            planned = sum(group.digest for group in scored) % (1 << DIGEST_BITS)
            if found["digest"] != planned:
                raise AccountError(
                    f"the ranks trained step {plan.version} on other tokens than planned: the digest of the tokens "
                    f"must be {planned:x}, got {found['digest']:x}; this is a defect of asyncrl; asyncrl audit names "
                    "the groups of the run's steps, and a resume continues at the newest checkpoint"
                )
            metrics = {name: value for name, value in found.items() if name != "digest"}
            return metrics | {"witnessed_tokens": sum(group.num_tokens for group in scored)}

        return finish()

    def step_critic(self, plan: Plan) -> Awaitable[Mapping[str, float]]:
        """Queue the critic's step on the batch of the latest call of `step`. Await the result to get the metrics.

        If the run has no critic, nothing is queued, and the metrics are empty.
        """
        step = self.roles["critic"].step(*self._step_arguments("critic", plan)) if "critic" in self.roles else None

        async def metrics() -> Mapping[str, float]:
            if step is None:
                return {}
            found = await self._first(step, f"the critic's update of step {plan.version}", kind="critic")
            return {f"critic.{name}": value for name, value in found.items()}

        return metrics()

    def publish(self, version: int) -> Awaitable[None]:
        """Queue the publish of the weights as policy version ``version``.

        Await the result to wait until the ranks have copied the weights.
        """
        return self._first(self.roles["actor"].publish_weights(version), f"the weights of version {version}")

    async def finish_publish(self) -> None:
        """Wait until the learner has offered the latest published version to the engines."""
        await self._in_time(self.roles["actor"].finish_publish(), "the offer of the last weights")

    def rollout_mode(self, version: int) -> Awaitable[None]:
        """Queue the publish of ``version``, and then free GPU memory for the engines on the same GPUs.

        To free the memory, the roles in the actor's pool move their tensors to the host's memory. Await the result to
        wait until the engines can load the version.
        """
        others = [group.rollout_mode(version) for role, group in self._on_shared_devices() if role != "actor"]
        actor = self.roles["actor"].rollout_mode(version)
        return self._first(actor, f"the turn to rollout at {version}", after=others)

    async def trainer_mode(self) -> None:
        """Move the tensors back to the devices, after `rollout_mode` has moved them to the host's memory."""
        await self._in_time(AllOf([group.trainer_mode() for _, group in self._on_shared_devices()]), "training's turn")

    async def withdraw(self) -> list[int]:
        """Discard the batch after a `BatchLost`, and return the ids of the groups that the ranks did not find.

        Raises `LearnerDiedError` if the critic runs in other processes than the actor, because the critic may have
        trained on the batch.
        """
        if "critic" in self.roles and not self.roles.share_a_pool("critic", "actor"):
            raise LearnerDiedError(
                "the critic runs in separate processes, so it may have trained on a batch that the actor lost"
            )
        await self._in_time(AllOf([*self._announced.values()]), "the announced batches")
        found: set[int] = set()
        for group in self.roles:  # a rank executes this call after it has skipped all calls for the lost batch
            lost = await self._in_time(group.forget_batch(), "the groups of a batch that the ranks did not find")
            found.update(group_id for part in lost for group_id in part)
        self._batches, self._scores, self._announced = (None, {}), {}, {}
        return sorted(found)

    @property
    def pool(self) -> RayResourcePool:
        """The Ray resource pool of the processes with the role ``actor``."""
        return self._layout.get_resource_pool(Role.from_string("actor"))

    def _on_shared_devices(self) -> list[tuple[str, Any]]:
        return [(role, self.roles[role]) for role in self.roles.pools if self.roles.share_a_pool(role, "actor")]

    def save(self, version: int, run: Mapping[str, Any], *, wait: bool, parts: Sequence[str] = ()) -> Awaitable[str]:
        """Queue a checkpoint of ``version``. Await the result to get the checkpoint's folder.

        ``run`` is the state of the run, which the checkpoint includes. If ``wait`` is true, the await ends only after
        the ranks have written their files. ``parts`` names folders of the checkpoint that other processes write. The
        checkpoint is not complete before these folders exist.
        """
        critic = []
        if "critic" in self.roles:
            critic = [self.roles["critic"].save_checkpoint(str(self.checkpoints / CRITIC), version, wait)]
            parts = [*parts, CRITIC]
        saved = {"run": run, "life": str(self._paths.logs.parent), "parts": list(parts)}
        keep = self._config.checkpoint.keep
        actor = self.roles["actor"].save_checkpoint(str(self.checkpoints), version, wait, keep=keep, **saved)
        return self._first(actor, f"the checkpoint of version {version}", after=critic)

    async def load(self, checkpoint: Path) -> int:
        """Load a checkpoint on all ranks, and return the policy version of the checkpoint.

        Raises `ValueError` if the run has a critic, but the checkpoint does not contain a critic.
        """
        if "critic" in self.roles:
            critic = part_of(checkpoint, CRITIC)
            if not critic.is_dir():
                raise ValueError(
                    f"checkpoint.resume needs the critic of {checkpoint} in {critic}, got none; name a "
                    "checkpoint of a run with a critic, or use the algorithm of the run that saved this checkpoint"
                )
            await self._first(self.roles["critic"].load_checkpoint(str(critic)), f"loading {critic}")
        return await self._first(self.roles["actor"].load_checkpoint(str(checkpoint)), f"loading {checkpoint}")

    async def save_policy(self, directory: Path) -> None:
        """Write the policy and the tokenizer into ``directory``, in Hugging Face layout."""
        await self._first(self.roles["actor"].save_policy(str(directory)), "the saved policy")

    async def stop(self, timeout_s: float) -> None:
        """Ask the ranks to stop, kill them after ``timeout_s`` seconds, and release their reserved resources."""
        try:
            with suppress(Exception):  # ignore errors, because the ranks are killed next
                stopping = AllOf([group.execute_all_async("stop") for group in self.roles])
                await asyncio.wait_for(stopping, timeout_s)
        finally:
            try:
                await self.end()
            finally:
                while self._layout.resource_pool_dict:
                    self._layout.resource_pool_dict.popitem()[1].leave()

    def _shares(self, plan: Plan, role: str) -> list[RankBatch]:
        """Return the batch of each data-parallel rank of a role.

        Roles with the same number of data-parallel ranks get the same batches.
        """
        if self._batches[0] is not plan:
            self._batches = (plan, {})
        shares, dp_size = self._batches[1], self.roles.dp_sizes[role]
        if dp_size not in shares:
            shares[dp_size] = rank_batches(
                plan,
                self._config.algorithm,
                num_shards=dp_size,
                max_lag=self._config.buffer.max_lag,
                whole_groups=needs_whole_groups(self._config.algorithm.advantage),
            )
        return shares[dp_size]

    def _announce(self, plan: Plan, roles: Sequence[str]) -> None:
        """Let the ranks prepare their batches for later calls. These calls must come in the order of ``roles``."""
        self._announced |= {role: self.roles[role].announce(self._shares(plan, role)) for role in dict.fromkeys(roles)}

    def _reads(self, role: str) -> tuple[str, ...]:
        return ROLES[role].reads(self._config.algorithm)

    def _score(self, column: str, plan: Plan, unsent: list[Awaitable[Any]]) -> RemoteScores:
        """Queue the call that computes the scores named ``column``. An example of ``column`` is ``values``.

        The steps of actor and critic read the scores. If each process of these roles computes the scores of its own
        batch (`RoleGroups.keeps_scores_for`), the call does not return the scores, and the steps do not await the call.
        So this method appends the call to the list ``unsent``. `step` awaits all calls in this list, and raises their
        errors.
        """
        role = scored_by(column, self._config.learner).name
        batches = self._shares(plan, role)
        readers = [reader for reader in ("actor", "critic") if reader in self.roles and column in self._reads(reader)]
        send = not all(self.roles.keeps_scores_for(role, reader) for reader in readers)
        results = self.roles[role].score(batches, send=send)
        if not send:
            unsent.append(results)
        return RemoteScores(role=role, batches=batches, results=results)

    def _step_arguments(self, role: str, plan: Plan) -> list[Sequence[Any]]:
        """Return the arguments of a role's step: the batches, then one list per kind of scores that the role reads.

        A kind of scores is, for example, ``values``. Each list has the scores of each batch. If the processes of the
        role already have the scores, each list has None for each batch.
        """
        batches = self._shares(plan, role)
        arguments: list[Sequence[Any]] = [batches]
        for column in self._reads(role):
            scores = self._scores[column]
            in_process = self.roles.keeps_scores_for(scores.role, role)
            arguments.append([None] * len(batches) if in_process else scores.needed_by(batches))
        return arguments

    async def _first(
        self, pending: Awaitable[list[T]], what: str, *, kind: str = "", after: Sequence[Awaitable[Any]] = ()
    ) -> T:
        """Return rank 0's result of the call ``pending``.

        ``after`` contains earlier calls to the ranks. The method first awaits these calls, and raises their errors.
        """
        for earlier in after:
            await self._in_time(earlier, what, kind=kind)
        return (await self._in_time(pending, what, kind=kind))[0]

    async def _in_time(self, pending: Awaitable[T], what: str, *, kind: str = "") -> T:
        """Await a call to the ranks until a deadline. Raises the errors of `or_death`.

        The deadline depends on the longest earlier call of this ``kind``. A call with an empty ``kind`` may have to
        wait for a queued step, so the deadline of such a call is twice ``learner.step_timeout_s``.
        """
        option = "learner.step_timeout_s"
        if kind:
            result = self._deadline.within(pending, kind, what, option)
        else:
            result = within(pending, 2 * self._config.learner.step_timeout_s, what, option)
        return await or_death(result, pending)


async def or_death(result: Awaitable[T], pending: Any) -> T:
    """Await the result of a ``pending`` call.

    After the death of a rank, calls on other ranks can fail before Ray reports the death. So after a failure, this
    function waits up to `_DEATH_NOTICED_S` seconds for Ray's report of a death.

    Raises `LearnerDiedError` if a rank died, if the ranks missed the deadline, or if Ray itself failed. Other errors
    of the call are raised unchanged.
    """
    try:
        return await result
    except ClusterDiedError:
        raise
    except BatchLost as lost:
        raise BatchLost(str(raised_in_worker(lost))) from lost
    except (WorkerDiedError, DeadlineError) as fault:
        raise LearnerDiedError(str(fault)) from fault
    except Exception as fault:
        death = await asyncio.to_thread(death_among, refs_of(pending), _DEATH_NOTICED_S)
        if death is None and isinstance(fault, RayError) and not isinstance(fault, RayTaskError):
            death = fault  # Ray itself raised the error, not the code of a rank
        if death is None:
            raise
        raise LearnerDiedError(str(death)) from death


class AllOf:
    """Pending calls to several worker groups. Awaiting this object awaits all of the calls.

    Attributes:
        futures: Ray's object references of all calls. From these references, error messages get the workers' names.
    """

    def __init__(self, calls: Sequence[Awaitable[Any]]) -> None:
        self._calls = calls
        self.futures = [ref for call in calls if isinstance(call, list) for ref in call]

    def __await__(self) -> Generator[Any, None, None]:
        for call in self._calls:
            yield from call.__await__()


class RoleGroups:
    """The worker groups of the learner, by role. Roles in the same pool (set of devices) share processes.

    Attributes:
        pools: Name of each role's pool.
        dp_sizes: Number of data-parallel ranks of each role.
    """

    def __init__(
        self, config: RunConfig, *, layout: ResourcePoolManager, connect_buffer: Callable[[], Any], paths: RunPaths
    ) -> None:
        self.pools = learner_roles(config)
        options = {role: role_options(config, role) for role in self.pools}
        self.dp_sizes = {role: own.num_ranks // own.sp_size for role, own in options.items()}
        self._groups: dict[str, Any] = {}
        self._hosts: list[RayWorkerGroup] = []
        self._is_down = False
        for pool in learner_pools(config):
            roles = [role for role, its_pool in self.pools.items() if its_pool == pool]
            classes = {role: _worker_class(role, options[role], config, connect_buffer, paths) for role in roles}
            env = learner_env(config)
            if config.placement.num_nodes == 1:  # on one node, ranks find each other through a file, not over a port
                env |= {RENDEZVOUS_FILE: str(make_private_folder(paths.staging) / f"ranks-{uuid.uuid4().hex}")}
            host = RayWorkerGroup(
                layout.get_resource_pool(Role.from_string(roles[0])),
                classes[roles[0]] if len(roles) == 1 else create_colocated_worker_cls_fused(classes),
                name_prefix=pool,
                log_dir=paths.logs,
                worker_env=env,
                python=config.ray.python,
            )
            self._hosts.append(host)
            self._groups |= {roles[0]: host} if len(roles) == 1 else host.spawn(roles)

    def __contains__(self, role: str) -> bool:
        return role in self._groups

    def __getitem__(self, role: str) -> Any:
        if self._is_down:
            raise LearnerDiedError("a learner rank died, and no new ranks have started yet")
        return self._groups[role]

    def __iter__(self) -> Any:
        return iter(self._groups.values())

    async def death(self) -> WorkerDiedError:
        """Wait until a process of any role dies, and return an error that names the process."""
        watching = {asyncio.ensure_future(host.death()) for host in self._hosts}
        try:
            ended, _ = await asyncio.wait(watching, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for watch in watching:
                watch.cancel()
            await asyncio.gather(*watching, return_exceptions=True)
        return ended.pop().result()

    def share_a_pool(self, one: str, other: str) -> bool:
        """Return whether two roles run in the same processes."""
        return self.pools[one] == self.pools[other]

    def keeps_scores_for(self, role: str, reader: str) -> bool:
        """Return whether each process of the role ``reader`` also runs the role ``role`` on the same samples.

        If so, each process already has the scores (log-probs or values) of ``role`` that it needs.
        """
        return self.share_a_pool(role, reader) and self.dp_sizes[role] == self.dp_sizes[reader]

    def shutdown(self) -> None:
        """Kill the processes of all roles."""
        self._is_down = True
        for host in self._hosts:
            host.shutdown()


def _publish_options(config: RunConfig) -> PublishOptions:
    fleet, rules = config.rollout_fleet, config.weights.rules
    into_engines = rules.carrier is Carrier.engine_stream
    own_gpus = config.learner.device == fleet.device == "cuda" and not config.placement.colocated
    return PublishOptions(
        carrier=rules.carrier,
        full_every=config.weights.full_every,
        adapters=config.publishes_adapters,
        timeout_s=fleet.load_timeout_s,
        # While engines serve version u and receive version u + 1, the newest version of the learner is at most
        # u + max_lag + 1. So the ranks hold the versions from u to u + max_lag + 1, for engines to receive.
        num_held=config.buffer.max_lag + 2,
        interface=config.weights.interface,
        num_receivers=fleet.most_engines * fleet.sglang.tp_size if into_engines else num_engine_hosts(config),
        backend=rules.backend(own_gpus=own_gpus),
    )


def _worker_class(
    role: str, options: LearnerConfig, config: RunConfig, connect_buffer: Callable[[], Any], paths: RunPaths
) -> RayClassWithInitArgs:
    every_steps = config.rollout_fleet.samples.every_steps
    publishes = {
        "snapshot_dir": str(paths.snapshots),
        "publish": _publish_options(config),
        "trajectory_dir": str(paths.trajectories) if paths.trajectories else None,
        "token_log": TokenLogOptions(directory=str(paths.tokens), every_steps=every_steps) if every_steps else None,
    }
    return RayClassWithInitArgs(
        WORKER_CLASSES[role],
        options,
        config.algorithm,
        model_path=role_model(config, role),
        total_steps=config.total_steps,
        temperature=config.rollout_fleet.sampling.temperature,
        connect_buffer=connect_buffer,
        seed=config.seed,
        profile=config.profile,
        pool=learner_roles(config)[role],
        **(publishes if role == "actor" else {}),
    )
