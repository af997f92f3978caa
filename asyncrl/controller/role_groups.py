"""The learner's roles as worker groups: role → pool → class. Roles of one pool share its processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from asyncrl.config import RunConfig, learner_pools, learner_roles
from asyncrl.single_controller import (
    RayClassWithInitArgs,
    RayWorkerGroup,
    ResourcePoolManager,
    Role,
    create_colocated_worker_cls_fused,
)
from buffer import BufferConnection
from learner.config import LearnerConfig
from learner.verl_api import ActorWorker, CriticWorker, ReferenceWorker, RewardModelWorker

WORKER_CLASSES = {"actor": ActorWorker, "critic": CriticWorker, "ref": ReferenceWorker, "rm": RewardModelWorker}
# One thread per process: on a machine with few cores, threads that fight for them stop everybody.
WORKER_ENV = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


class RoleGroups:
    """A group for each role that the run needs; every group has the methods of its role's worker class.

    Attributes:
        actor_pool: The places of the actor's processes, which engines may share.

    Args:
        config: The run.
        buffer: Where the ranks fetch what they work on.
        log_dir: One log a process, ``<pool>-<rank>.log``.
        snapshots: Where the actor publishes weights.
        trajectories: Where the actor records what it consumed; None records nothing.
    """

    def __init__(
        self, config: RunConfig, *, buffer: BufferConnection, log_dir: Path, snapshots: Path, trajectories: Path | None
    ) -> None:
        self.pools = learner_roles(config)
        self.pool_sizes = learner_pools(config)
        self._groups: dict[str, Any] = {}
        self._hosts: list[RayWorkerGroup] = []
        layout = ResourcePoolManager(
            resource_pool_spec={pool: [size] for pool, size in self.pool_sizes.items()},
            mapping={Role.from_string(role): pool for role, pool in self.pools.items()},
            use_gpu=config.learner.device == "cuda",
            max_colocate_count=2 if config.placement.colocated else 1,
            num_cpus_per_process=_cpus_per_process(config),
            timeout_s=config.ray.start_timeout_s,
        )
        layout.create_resource_pool()
        self.actor_pool = layout.get_resource_pool(Role.from_string("actor"))
        for pool in self.pool_sizes:
            roles = [role for role, its_pool in self.pools.items() if its_pool == pool]
            options = pool_config(config, pool)
            classes = {
                role: _worker_class(
                    role, config, options, buffer.sync_client, snapshots=snapshots, trajectories=trajectories
                )
                for role in roles
            }
            host = RayWorkerGroup(
                layout.get_resource_pool(Role.from_string(roles[0])),
                classes[roles[0]] if len(roles) == 1 else create_colocated_worker_cls_fused(classes),
                name_prefix=pool,
                log_dir=log_dir,
                worker_env=WORKER_ENV,
            )
            self._hosts.append(host)
            self._groups |= {roles[0]: host} if len(roles) == 1 else host.spawn(roles)

    def __contains__(self, role: str) -> bool:
        return role in self._groups

    def __getitem__(self, role: str) -> Any:
        """A role's group; typed Any, because its methods are bound from the worker class when it is made."""
        return self._groups[role]

    def __iter__(self) -> Any:
        return iter(self._groups.values())

    def share_a_pool(self, one: str, other: str) -> bool:
        """Whether two roles live in the same processes."""
        return self.pools[one] == self.pools[other]

    def shutdown(self) -> None:
        """Kill the processes of all roles."""
        for host in self._hosts:
            host.shutdown()


def _cpus_per_process(config: RunConfig) -> float:
    placement = config.placement
    return placement.cpus_per_learner_rank + (placement.cpus_per_engine if placement.colocated else 0.0)


def pool_config(config: RunConfig, pool: str) -> LearnerConfig:
    """The learner's options in one of its pools."""
    size, learner = learner_pools(config)[pool], config.learner
    kept = learner.keep_snapshots
    return replace(
        learner,
        num_ranks=size,
        fsdp_size=learner.fsdp_size if size == learner.num_ranks else -1,
        # While engines load version u + 1, admission at u lets the learner reach u + max_lag + 1, and no further.
        keep_snapshots=kept if kept == -1 else max(kept, config.buffer.max_lag + 2),
    )


def _worker_class(
    role: str,
    config: RunConfig,
    options: LearnerConfig,
    connect_buffer: Any,
    *,
    snapshots: Path,
    trajectories: Path | None,
) -> RayClassWithInitArgs:
    paths = {
        "rm": config.learner.reward_model.path,
        "critic": config.learner.critic.path or config.model.path,
    }
    publishes = {
        "snapshot_dir": str(snapshots),
        "trajectory_dir": str(trajectories) if trajectories else None,
        "checksums": config.rollout_fleet.verify_weights,
    }
    return RayClassWithInitArgs(
        WORKER_CLASSES[role],
        options,
        config.algorithm,
        model_path=paths.get(role, config.model.path),
        total_steps=config.total_steps,
        temperature=config.rollout_fleet.sampling.temperature,
        connect_buffer=connect_buffer,
        seed=config.seed,
        **(publishes if role == "actor" else {}),
    )
