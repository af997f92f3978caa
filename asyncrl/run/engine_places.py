"""The places of the fleet's workers, by rank.

The places of the first ranks are one reservation, kept until the run ends. Every joining engine has its own place,
which is released when the engine leaves.

`EnginePlaces.node_of` waits for the cluster to grant a place, without a deadline; Ray wakes it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any

import ray

from asyncrl.config import RunConfig
from asyncrl.core.errors import MembershipRefused
from asyncrl.run.cluster import engine_pool, pool_of_one, worker_env
from asyncrl.single_controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from rollout_fleet.config import EngineKind


class EnginePlaces:
    """The place of each worker.

    Attributes:
        first: The worker group of the first ranks, 0 to ``first.world_size`` - 1.
    """

    def __init__(
        self, config: RunConfig, *, worker: RayClassWithInitArgs, logs: Path, pool: RayResourcePool | None = None
    ) -> None:
        """Start the first workers, in their own pool unless one is given. Raises as `RayWorkerGroup` does."""
        self._config = config
        self._worker = worker
        in_process = config.rollout_fleet.engine is EngineKind.transformers
        self._options: dict[str, Any] = {
            "name_prefix": "rollout",
            "log_dir": logs,
            "worker_env": worker_env(config),
            "python": config.ray.python if in_process else "",  # the worker of a server needs no torch
        }
        # Typed Any, because the group's methods are bound from the worker class when it is made.
        self.first: Any = RayWorkerGroup(pool or engine_pool(config), worker, **self._options)
        self._num_first: int = self.first.world_size
        self._pools: dict[int, RayResourcePool] = {}
        self._groups: dict[int, RayWorkerGroup] = {}
        self._nodes: dict[int, str] = dict(enumerate(self.first.node_ids))
        per_node = config.placement.engines_per_node
        self._one_at_a_time: AbstractAsyncContextManager[Any] = asyncio.Lock() if per_node else nullcontext()

    def execute_rank_async(self, rank: int, method_name: str, *args: Any) -> Awaitable[Any]:
        """Call a method of the worker of a rank."""
        group, index = self._group_of(rank)
        return group.execute_rank_async(index, method_name, *args)

    async def node_of(self, rank: int, wanted: str = "") -> str:
        """Wait until the cluster has a place for a rank; returns the id of its node.

        A new place is on the node with the id ``wanted``, if given. Ray moves the place of a dead node as soon as
        another node has room.
        """
        if rank in self._groups or rank < self._num_first:
            group, index = self._group_of(rank)
            self._nodes[rank] = await group.node_of(index)
        elif rank not in self._pools:
            async with self._one_at_a_time:
                most = self._config.placement.engines_per_node
                full = {node for node, count in Counter(self._nodes.values()).items() if most and count >= most}
                pool = pool_of_one(self._config, node_id=wanted, full=full)
                (self._nodes[rank],) = await pool.reserve()
            self._pools[rank] = pool
        return self._nodes[rank]

    def replace_worker(self, rank: int, **changed: Any) -> None:
        """Kill the worker of a rank, if there is one, and start another with these arguments of its class."""
        if rank in self._groups or rank < self._num_first:
            group, index = self._group_of(rank)
            group.replace_worker(index, **changed)
            return
        worker = RayClassWithInitArgs(self._worker.cls, *self._worker.args, **{**self._worker.kwargs, **changed})
        nowhere = {"master_addr": "none", "master_port": "0"}  # rollout workers have no rendezvous
        self._groups[rank] = RayWorkerGroup(self._pools[rank], worker, first_rank=rank, **nowhere, **self._options)

    def close(self, rank: int) -> None:
        """Kill the worker of a rank, if it has one. Also release the Ray resources of a rank that joined later."""
        self._nodes.pop(rank, None)
        if rank < self._num_first:
            self.first.kill_worker(rank)
        elif rank in self._groups:
            self._groups.pop(rank).shutdown()
            del self._pools[rank]
        elif rank in self._pools:
            self._pools.pop(rank).shutdown()

    def shutdown(self) -> None:
        """Kill all workers and release all places."""
        for rank in {*self._pools}:
            self.close(rank)
        self.first.shutdown()

    def _group_of(self, rank: int) -> tuple[RayWorkerGroup, int]:
        """Return the group of a rank and the rank's index in it."""
        return (self.first, rank) if rank < self._num_first else (self._groups[rank], 0)


def node_id_at(address: str) -> str:
    """Return the id of the node at an address. Raises `MembershipRefused` if the cluster has no such node."""
    nodes = {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}
    if address not in nodes:
        raise MembershipRefused(
            f"--node must be the address of a node of the run's Ray cluster ({', '.join(sorted(nodes))}), got "
            f"{address}; start Ray there first: ray start --address HEAD"
        )
    return nodes[address]
