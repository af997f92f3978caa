"""Starts or joins the Ray cluster of a run, and reserves CPUs and GPUs of the cluster for the run's workers."""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import ray
from ray._private import worker as ray_worker
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from asyncrl.checks import check_placement, resolve_devices
from asyncrl.config import (
    LEARNER_POOL,
    LOOPBACK,
    RAY_SETS_DEVICES,
    WORKER_ENV,
    RunConfig,
    Strategy,
    learner_pools,
    learner_roles,
    requested_cpus,
)
from asyncrl.core.errors import ClusterDiedError
from asyncrl.core.host import own_python, ray_folder, visible_gpus
from asyncrl.core.remote import within
from asyncrl.core.stacks import missed
from asyncrl.single_controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, ResourcePoolManager, Role
from asyncrl.single_controller.resource_pool import NODE_ID_LABEL, JoinedResourcePool, can_place
from rollout_fleet.config import EngineKind

logger = logging.getLogger(__name__)

# These settings replace defaults of Ray that harm a run.
# By default, Ray runs its workers with niceness 15, and starts idle workers, which cost time and memory.
# By default, Ray's processes wait a minute for a new control service (GCS) after the old one has died.
# By default, Ray also kills the child processes of a dead worker before they can clean up.
_OWN_CLUSTER_ENV = {
    "RAY_worker_niceness": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
    "RAY_process_group_cleanup_enabled": "0",
}

T = TypeVar("T")


@asynccontextmanager
async def ray_cluster(config: RunConfig, say: Callable[[str], None] = logger.info) -> AsyncIterator[RunConfig]:
    """Start or join a Ray cluster, and check that the run fits into the cluster. Stop or leave the cluster at the end.

    Yields:
        The configuration, with ``cpu`` or ``cuda`` instead of the device ``auto``.

    Raises:
        ClusterDiedError: the cluster does not start, or this process cannot join the cluster.
        DeadlineError: the cluster does not answer within ``ray.start_timeout_s``.
        ValueError: the run needs more resources than the cluster has.
    """
    where = f"at ray.address={config.ray.address}" if config.ray.address else "on this machine"
    starting = asyncio.ensure_future(asyncio.to_thread(_start_or_join, config))
    try:
        try:
            await asyncio.wait_for(asyncio.shield(starting), config.ray.start_timeout_s)
        except TimeoutError:
            raise missed(
                f"Ray {where} did not come up within ray.start_timeout_s={config.ray.start_timeout_s:g} s; raise the "
                "option, or look into Ray's session logs"
            ) from None
        except Exception as error:
            raise ClusterDiedError(f"Ray {where} did not come up: {error}; look into Ray's session logs") from error
        yield await asyncio.to_thread(checked_against_cluster, config, say)
    finally:
        # Wait for the thread that starts Ray, because a shutdown of Ray during its start would end this process.
        await asyncio.wait([starting], timeout=config.stop_timeout_s / 2)
        # The run's Ray daemons block SIGTERM (`asyncrl.core.host`), so kill them without waiting.
        if (node := cast("Any", ray_worker._global_node)) is not None:
            node.kill_all_processes = partial(node.kill_all_processes, allow_graceful=False)
        await asyncio.to_thread(ray.shutdown)


def _start_or_join(config: RunConfig) -> None:
    if config.ray.address:
        own: dict[str, Any] = {"address": config.ray.address, "runtime_env": own_python()}
        own |= {"_node_ip_address": config.ray.node_address} if config.ray.node_address else {}
        ray.init(**own, logging_level=logging.ERROR, log_to_driver=False)
        return
    for name, value in _OWN_CLUSTER_ENV.items():
        os.environ.setdefault(name, value)
    cores = os.cpu_count() or 1
    wanted = int(requested_cpus(config, config.rollout_fleet.most_engines) + 0.999)
    ray.init(
        address="local",
        num_cpus=max(cores, wanted) if config.placement.oversubscribe else cores,
        num_gpus=visible_gpus(),
        include_dashboard=False,
        object_store_memory=config.ray.object_store_bytes,
        runtime_env=own_python(),
        logging_level=logging.ERROR,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
        _temp_dir=ray_folder(),
    )


def warning_of_open_cluster(config: RunConfig) -> str:
    """Return a warning if the run joins a Ray cluster of several nodes that requires no authentication token.

    Otherwise return an empty string.
    """
    # `ray.init` sets the variable RAY_AUTH_MODE if it finds a token.
    is_open = os.environ.get("RAY_AUTH_MODE", "").lower() != "token"
    if not (config.ray.address and config.placement.num_nodes > 1 and is_open):
        return ""
    return (
        f"warning: the Ray cluster at ray.address={config.ray.address} requires no authentication token, so everyone "
        "who can reach its nodes can run code on them; start every node and the run with RAY_AUTH_MODE=token and one "
        "RAY_AUTH_TOKEN"
    )


def checked_against_cluster(config: RunConfig, say: Callable[[str], None]) -> RunConfig:
    """Replace the device ``auto`` by ``cpu`` or ``cuda``. Check that the run fits into the cluster that it joined.

    With ``placement.autoscale``, the check is left out, because more nodes can join the cluster later. In this case,
    ``auto`` becomes ``cuda`` if any node has a GPU.
    """
    nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
    if config.placement.num_nodes == 1:
        own = ray.get_runtime_context().get_node_id()
        nodes = {own: nodes[own]}
    resources = {node["NodeManagerAddress"]: node["Resources"] for node in nodes.values()}
    num_gpus = sum(node.get("GPU", 0.0) for node in resources.values())
    if config.placement.autoscale:
        return resolve_devices(config, math.inf if num_gpus else 0, say)
    config = resolve_devices(config, num_gpus, say)
    if config.ray.address:
        check_nodes(config, resources)
    return config


@asynccontextmanager
async def gpu_of_this_node(config: RunConfig) -> AsyncIterator[str]:
    """Reserve one GPU of this node for a process that Ray does not start.

    Yields:
        The value of ``CUDA_VISIBLE_DEVICES`` for that process.

    Raises:
        DeadlineError: no GPU of this node became free within ``ray.start_timeout_s``.
        ValueError: this node has no GPU.
    """
    own = ray.get_runtime_context().get_node_id()
    resources = next(node["Resources"] for node in ray.nodes() if node["NodeID"] == own)
    if not resources.get("GPU"):
        raise ValueError(
            "this node must have a GPU for the warm start with learner.device=cuda, got none; start the run on a node "
            "with a GPU, or run asyncrl sft on such a node first and set model.path to the result"
        )
    actor_class: Any = ray.remote(_GpuHolder)
    here = NodeAffinitySchedulingStrategy(node_id=own, soft=False)
    environment = {"env_vars": RAY_SETS_DEVICES}
    holder = actor_class.options(num_cpus=0, num_gpus=1, scheduling_strategy=here, runtime_env=environment).remote()
    try:
        asked = holder.visible_devices.remote()
        yield await within(asked, config.ray.start_timeout_s, "a free GPU of this node", "ray.start_timeout_s")
    finally:
        ray.kill(holder)


class _GpuHolder:
    def visible_devices(self) -> str:
        return os.environ["CUDA_VISIBLE_DEVICES"]


def check_nodes(config: RunConfig, nodes: Mapping[str, Mapping[str, float]]) -> None:
    """Check that a run fits into the nodes of its cluster.

    ``nodes`` maps the address of each node to the node's Ray resources. Raises `ValueError` if nodes or resources are
    missing, or if processes that must be on the same node (`node_shares`) do not fit on any node.
    """
    if len(nodes) < config.placement.num_nodes:
        raise ValueError(
            f"placement.num_nodes={config.placement.num_nodes} nodes must be in the cluster at "
            f"ray.address={config.ray.address}, got {len(nodes)} ({', '.join(sorted(nodes))}); start Ray on more "
            "nodes, or lower placement.num_nodes"
        )
    total = {kind: sum(int(node.get(kind, 0)) for node in nodes.values()) for kind in ("CPU", "GPU")}
    check_placement(config, num_cpus=total["CPU"], num_gpus=total["GPU"])
    shares = node_shares(config)
    if not can_place(sorted(shares, key=lambda share: sorted(share.items()), reverse=True), nodes.values()):
        have = {address: {kind: node.get(kind, 0) for kind in ("CPU", "GPU")} for address, node in nodes.items()}
        largest = max(shares, key=lambda share: (share.get("GPU", 0.0), share["CPU"]))
        raise ValueError(
            f"the placement.num_nodes={config.placement.num_nodes} nodes must have enough CPUs and GPUs for the "
            "learner ranks or engines that the configuration puts on one node; the largest set of such ranks or "
            "engines needs "
            f"{largest}, but the nodes have {have}; lower placement.ranks_per_node or placement.engines_per_node, or "
            "raise placement.num_nodes"
        )


def node_shares(config: RunConfig) -> list[dict[str, float]]:
    """Return how many CPUs and GPUs the run needs, as one dict for each set of processes that must share a node.

    Such a set contains either learner ranks or engines.
    """
    placement, fleet = config.placement, config.rollout_fleet
    gpus_per_rank = 1 if config.learner.device == "cuda" else 0
    gpus_per_engine = fleet.sglang.tp_size if fleet.device == "cuda" and not placement.colocated else 0
    ranks = [n for size in learner_pools(config).values() for n in placement.on_nodes(size, placement.ranks_per_node)]
    engines = placement.on_nodes(fleet.fewest_engines, placement.engines_per_node or 1)
    takers = [(count, placement.cpus_per_learner_rank, gpus_per_rank) for count in ranks]
    takers += [(count, placement.cpus_per_engine, gpus_per_engine) for count in engines]
    return [
        {"CPU": count * num_cpus} | ({"GPU": float(count * num_gpus)} if num_gpus else {})
        for count, num_cpus, num_gpus in takers
    ]


def learner_layout(config: RunConfig) -> ResourcePoolManager:
    """Make the Ray resource pools of the learner's roles, such as actor and critic. Return the manager of the pools."""
    placement = config.placement
    cpus = placement.cpus_per_learner_rank
    with_engine = cpus + placement.cpus_per_engine / config.rollout_fleet.sglang.tp_size
    shared = {"max_colocate_count": 2, "num_cpus_per_process": with_engine}
    layout = ResourcePoolManager(
        resource_pool_spec={
            pool: placement.on_nodes(size, placement.ranks_per_node) for pool, size in learner_pools(config).items()
        },
        mapping={Role.from_string(role): pool for role, pool in learner_roles(config).items()},
        use_gpu=config.learner.device == "cuda",
        num_cpus_per_process=cpus,
        own_options={LEARNER_POOL: shared} if placement.colocated else {},  # engines share devices only with this pool
        apart=placement.strategy is Strategy.spread,
        labels=_labels(config, placement.learner_labels),
        timeout_s=config.ray.start_timeout_s,
    )
    layout.create_resource_pool()
    return layout


def engine_pool(config: RunConfig) -> RayResourcePool:
    """Return a Ray resource pool for the rollout workers that start with the run."""
    placement, count = config.placement, config.rollout_fleet.fewest_engines
    by_node = placement.engines_per_node > 0 or placement.num_nodes == 1
    return _pool_of_engines(
        config,
        process_on_nodes=placement.on_nodes(count, placement.engines_per_node),
        name_prefix="rollout",
        strategy="STRICT_PACK" if by_node else placement.strategy.upper(),
        apart=by_node and placement.strategy is Strategy.spread,
        labels=_labels(config, placement.engine_labels),
        timeout_s=config.ray.start_timeout_s,
    )


def pool_of_one(config: RunConfig, *, node_id: str, full: Collection[str]) -> RayResourcePool:
    """Return a Ray resource pool for one engine that joins a running fleet.

    The pool is on the node ``node_id``. If this id is empty, Ray chooses a node that is not in ``full``. ``full`` has
    the ids of the nodes that already have the largest allowed number of engines.
    """
    labels = _labels(config, config.placement.engine_labels)
    if node_id:
        labels |= {NODE_ID_LABEL: node_id}
    elif full and NODE_ID_LABEL not in labels:
        labels |= {NODE_ID_LABEL: f"!in({','.join(sorted(full))})"}
    return _pool_of_engines(config, process_on_nodes=[1], labels=labels)


def _pool_of_engines(config: RunConfig, **options: Any) -> RayResourcePool:
    return RayResourcePool(
        use_gpu=config.rollout_fleet.device == "cuda",
        max_colocate_count=1,
        num_cpus_per_process=config.placement.cpus_per_engine,
        num_devices_per_process=config.rollout_fleet.sglang.tp_size,
        **options,
    )


def _labels(config: RunConfig, labels: Mapping[str, str]) -> dict[str, str]:
    """Return the node labels that Ray requires of a node before it starts the run's workers there.

    The result is ``labels``. But if a run with one node joins a cluster, the result selects the controller's node.
    """
    if config.placement.num_nodes > 1 or not config.ray.address:
        return dict(labels)
    return {NODE_ID_LABEL: ray.get_runtime_context().get_node_id()}


def worker_env(config: RunConfig) -> dict[str, str]:
    """Return the environment variables of a run's workers, by name."""
    interface = config.placement.interface or (LOOPBACK if config.placement.num_nodes == 1 else "")
    return WORKER_ENV | ({"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface} if interface else {})


def learner_env(config: RunConfig) -> dict[str, str]:
    """Return the environment variables of the learner ranks, by name, including settings of torch's GPU allocator.

    Packed batches of different lengths fragment the GPU memory. Expandable segments of the allocator prevent this
    fragmentation. But a colocated learner cannot release such segments to the engines, so it does not use them.
    """
    if config.learner.device != "cuda":
        return worker_env(config)
    allowed = not config.placement.colocated
    parts = [part for part in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "").split(",") if part]
    is_named = any("expandable_segments" in part for part in parts)
    if not allowed or not is_named:
        parts = [part for part in parts if "expandable_segments" not in part]
        parts.append(f"expandable_segments:{allowed}")
    return worker_env(config) | {"PYTORCH_CUDA_ALLOC_CONF": ",".join(parts)}


async def finished_in_thread(work: Callable[[], T], timeout_s: float) -> T:
    """Call ``work`` in a thread and return its result.

    If this call is cancelled, it waits up to ``timeout_s`` for the thread to end. The reason: the thread uses Ray, and
    the caller may stop Ray next.
    """
    working = asyncio.create_task(asyncio.to_thread(work))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait([working], timeout=timeout_s)
        raise


class EnginePlaces:
    """The reservations (CPUs and GPUs) of the rollout workers, by rank.

    The workers that start with the run share one reservation of Ray until the run ends. Each worker that joins later
    has a separate reservation.

    Attributes:
        first: The worker group of the first ranks, 0 to ``first.world_size`` - 1.
    """

    def __init__(
        self, config: RunConfig, *, worker: RayClassWithInitArgs, logs: Path, pool: RayResourcePool | None = None
    ) -> None:
        """Start the first workers on the devices of ``pool``, or in a new pool if ``pool`` is None."""
        self._config = config
        self._worker = worker
        in_process = config.rollout_fleet.engine is EngineKind.transformers
        self._options: dict[str, Any] = {
            "name_prefix": "rollout",
            "log_dir": logs,
            "worker_env": worker_env(config),
            "python": config.ray.python if in_process else "",  # ray.python is only for in-process engines
        }
        pool = JoinedResourcePool(pool, config.rollout_fleet.sglang.tp_size) if pool else engine_pool(config)
        # The type is Any, because the group gets the methods of the worker class at run time.
        self.first: Any = RayWorkerGroup(pool, worker, **self._options)
        self._num_first: int = self.first.world_size
        self._pools: dict[int, RayResourcePool] = {}
        self._groups: dict[int, RayWorkerGroup] = {}
        self._nodes: dict[int, str] = dict(enumerate(self.first.node_ids))
        per_node = config.placement.engines_per_node
        self._one_at_a_time: AbstractAsyncContextManager[Any] = asyncio.Lock() if per_node else nullcontext()

    def execute_rank_async(self, rank: int, method_name: str, *args: Any) -> Awaitable[Any]:
        """Call a method of the rollout worker with rank ``rank``. Await the returned object to get the result."""
        group, index = self._group_of(rank)
        return group.execute_rank_async(index, method_name, *args)

    async def node_of(self, rank: int, wanted: str = "") -> str:
        """Wait until Ray has reserved CPUs and GPUs for the worker of a rank. Returns the id of the worker's node.

        If ``wanted`` is a node id, a new reservation is on this node. If a node dies, Ray moves the node's
        reservations to another node with enough free resources. The wait has no deadline.
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
        """Kill the worker of a rank if there is one, and start a new worker.

        ``changed`` replaces keyword arguments of the worker's constructor.
        """
        if rank in self._groups or rank < self._num_first:
            group, index = self._group_of(rank)
            group.replace_worker(index, **changed)
            return
        worker = RayClassWithInitArgs(self._worker.cls, *self._worker.args, **{**self._worker.kwargs, **changed})
        nowhere = {"master_addr": "none", "master_port": "0"}  # rollout workers do not use a process group
        self._groups[rank] = RayWorkerGroup(self._pools[rank], worker, first_rank=rank, **nowhere, **self._options)

    def close(self, rank: int) -> None:
        """Kill the worker of a rank if there is one. Also release the reservation of a worker that joined later."""
        self._nodes.pop(rank, None)
        if rank < self._num_first:
            self.first.kill_worker(rank)
        elif rank in self._groups:
            self._groups.pop(rank).shutdown()
            del self._pools[rank]
        elif rank in self._pools:
            self._pools.pop(rank).shutdown()

    def shutdown(self) -> None:
        """Kill all workers and release their resources."""
        for rank in {*self._pools}:
            self.close(rank)
        self.first.shutdown()

    def _group_of(self, rank: int) -> tuple[RayWorkerGroup, int]:
        return (self.first, rank) if rank < self._num_first else (self._groups[rank], 0)
