"""Resource pools: sets of processes for which Ray reserves CPUs and GPUs, in placement groups.

A worker group starts its workers in a pool: one rank in each process.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import string
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from ipaddress import ip_address
from itertools import accumulate
from typing import Any

import ray
from ray._private import state as ray_state
from ray._private import worker as ray_worker
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from asyncrl.core.errors import UsageError
from asyncrl.core.remote import fetch
from asyncrl.core.stacks import missed

from .dispatch import BESIDE, DynamicEnum, runs_beside


class ResourcePool:
    """A set of processes, described by the number of processes on each node. Example: ``[8, 8]`` for two nodes.

    At most ``max_colocate_count`` worker groups may share the pool at the same time.
    """

    def __init__(
        self, process_on_nodes: list[int] | None = None, max_colocate_count: int = 10, n_gpus_per_node: int = 8
    ) -> None:
        self._store = list(process_on_nodes or [])
        self.max_colocate_count = max_colocate_count
        self.n_gpus_per_node = n_gpus_per_node

    def add_node(self, process_count: int) -> None:
        """Add a further node with ``process_count`` processes to the pool."""
        self._store.append(process_count)

    @property
    def store(self) -> list[int]:
        """List of the number of processes on each node."""
        return self._store

    def __call__(self) -> list[int]:
        """Return the number of processes on each node, like the property `store`."""
        return self._store

    @property
    def world_size(self) -> int:
        """Number of processes of the pool, over all nodes."""
        return sum(self._store)

    def local_world_size_list(self) -> list[int]:
        """Return a list with one number per rank: how many processes run on the rank's node."""
        return [count for count in self._store for _ in range(count)]

    def local_rank_list(self) -> list[int]:
        """Return a list with one number per rank: the index of the rank among the ranks of its node, from 0."""
        return [local_rank for count in self._store for local_rank in range(count)]


class ClassWithInitArgs:
    """A class and the arguments of its constructor, to make an instance later."""

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        self.cls = cls
        self.args = args
        self.kwargs = kwargs
        self.fused_worker_used = False

    def __call__(self) -> Any:
        """Make an instance of the class with these arguments."""
        return self.cls(*self.args, **self.kwargs)


def get_random_string(length: int) -> str:
    """Return a random string of ``length`` letters and digits."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(length))


DEVICE_RESOURCES = {"cuda": "GPU", "npu": "NPU"}
NODE_ID_LABEL = "ray.io/node-id"
"""Name of the label with a node's id, which Ray gives every node."""


class RayResourcePool(ResourcePool):
    """A pool of processes in a Ray cluster. It has a placement group for each node, with one bundle per process.

    Args:
        process_on_nodes: Number of processes on each node.
        use_gpu: Whether every process has a device (a GPU or NPU).
        name_prefix: First part of the placement groups' names; random by default.
        max_colocate_count: Number n of worker groups that may share the pool. In each process, a group gets 1/n of the
            devices.
        detached: Whether the reservation stays after the end of the process that made the pool.
        accelerator_type: Use only nodes with this kind of device. Example: ``"A100"``.
        num_cpus_per_process: CPUs of each process; ``max_colocate_count`` by default.
        num_devices_per_process: Devices of each process, if ``use_gpu`` is set.
        strategy: Ray's placement strategy for the bundles of a placement group. ``STRICT_PACK`` packs all on one node.
        apart: Whether each placement group must be on a different node.
        labels: Ray label selectors of the nodes. Example: ``{"market-type": "!spot"}``.
        timeout_s: Seconds to wait for the cluster to grant the reservation.
    """

    def __init__(
        self,
        process_on_nodes: list[int] | None = None,
        use_gpu: bool = True,
        name_prefix: str | None = None,
        max_colocate_count: int = 10,
        detached: bool = False,
        accelerator_type: str | None = None,
        *,
        num_cpus_per_process: float | None = None,
        num_devices_per_process: int = 1,
        strategy: str = "STRICT_PACK",
        apart: bool = False,
        labels: Mapping[str, str] | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        super().__init__(process_on_nodes, max_colocate_count)
        self.use_gpu = use_gpu
        self.name_prefix = get_random_string(length=6) if name_prefix is None else name_prefix
        self.pgs: list[PlacementGroup] | None = None
        self._reserved: list[PlacementGroup] = []
        self._cluster: Any = None
        self._wholes: list[RayResourcePool] = []
        self.detached = detached
        self.accelerator_type = accelerator_type
        self.num_cpus_per_process = max_colocate_count if num_cpus_per_process is None else num_cpus_per_process
        self.num_devices_per_process = num_devices_per_process
        self.strategy = strategy
        self.apart = apart
        self.labels = dict(labels or {})
        self.timeout_s = timeout_s
        self._num_users = 0  # the number of worker groups that use this pool or a part of this pool
        self._had_groups = False

    def options(self) -> dict[str, Any]:
        """Return the constructor's keyword arguments for an equal pool, except ``name_prefix``."""
        names = ("use_gpu", "max_colocate_count", "detached", "accelerator_type", "num_cpus_per_process", "timeout_s")
        names += ("num_devices_per_process", "strategy", "apart", "labels")
        return {"process_on_nodes": list(self._store)} | {name: getattr(self, name) for name in names}

    def bundle(self, device_name: str = "cuda") -> dict[str, float]:
        """Return the resources that one process reserves, as a bundle of a placement group: amounts by name.

        ``device_name`` is ``cuda`` or ``npu``. Example: ``{"CPU": 10.0, "GPU": 1.0}``.
        """
        bundle = {"CPU": float(self.num_cpus_per_process)}
        if self.use_gpu:
            bundle[DEVICE_RESOURCES.get(device_name, device_name)] = float(self.num_devices_per_process)
            if self.accelerator_type is not None:
                bundle[self.accelerator_type] = 1e-4
        return bundle

    def get_placement_groups(
        self, strategy: str | None = None, name: str | None = None, device_name: str = "cuda"
    ) -> list[PlacementGroup]:
        """Return one placement group per node. The first call in a Ray cluster waits until the groups are reserved.

        ``strategy`` replaces the pool's strategy. ``name`` replaces the first part of the groups' names.
        ``device_name`` is ``cuda`` or ``npu``.

        Raises:
            DeadlineError: the cluster does not grant the reservation in time. Nothing is then reserved.
            UsageError: this pool was split or merged from pools of a Ray cluster that has ended.
        """
        if self._cluster is not None and self._has_ended():
            if self._wholes:
                what = f"pool {self.name_prefix!r} is made of pools of a Ray cluster that has ended"
                raise UsageError(f"{what}; split or merge them again")
            self.pgs, self._reserved, self._had_groups, self._num_users = None, [], False, 0
        if self.pgs is not None:
            return self.pgs
        prefix = name or f"{self.name_prefix}_{'_'.join(map(str, self._store))}:"
        deadline_s = time.monotonic() + self.timeout_s
        pgs: list[PlacementGroup] = []
        for index, count in enumerate(self._store):
            taken = {node for pg in pgs for node in nodes_of(pg).values()} if self.apart else ()
            labels = {**self.labels, **({NODE_ID_LABEL: f"!in({','.join(sorted(taken))})"} if taken else {})}
            pgs.append(self._asked(f"{prefix}{index}", count, labels, device_name, strategy))
            if self.apart:
                self._wait_until_granted(pgs, len(pgs) - 1, deadline_s, device_name)
        if not self.apart:
            self._wait_until_granted(pgs, 0, deadline_s, device_name)
        self.pgs = self._reserved = pgs
        self._cluster = current_cluster()
        return pgs

    async def reserve(self, device_name: str = "cuda") -> list[str]:
        """Reserve the pool's placement groups, and wait without a deadline until the cluster grants all of them.

        Returns a list with the node id of each placement group. If the wait is cancelled, nothing stays reserved. The
        pool's option ``apart`` has no effect here.
        """
        pgs = [
            self._asked(f"{self.name_prefix}_{count}:{index}", count, self.labels, device_name)
            for index, count in enumerate(self._store)
        ]
        try:
            await asyncio.gather(*(pg.ready() for pg in pgs))
        except BaseException:
            for pg in pgs:
                remove_placement_group(pg)
            raise
        self.pgs = self._reserved = pgs
        self._cluster = current_cluster()
        return [nodes_of(pg)[0] for pg in pgs]

    def _asked(
        self, name: str, count: int, labels: Mapping[str, str], device_name: str, strategy: str | None = None
    ) -> PlacementGroup:
        return placement_group(
            bundles=[self.bundle(device_name) for _ in range(count)],
            strategy=strategy or self.strategy,
            name=name,
            lifetime="detached" if self.detached else None,
            bundle_label_selector=[dict(labels)] * count if labels else None,  # type: ignore[arg-type]
        )

    def _wait_until_granted(
        self, pgs: Sequence[PlacementGroup], first: int, deadline_s: float, device_name: str
    ) -> None:
        """Wait until Ray grants ``pgs[first:]``. At the deadline, release all of ``pgs`` and raise `DeadlineError`."""
        left_s, awaited = max(deadline_s - time.monotonic(), 0.0), [pg.ready() for pg in pgs[first:]]
        _, waiting = ray.wait(awaited, num_returns=len(awaited), timeout=left_s)
        if not waiting:
            return
        for pg in pgs:
            remove_placement_group(pg)
        where = f", on nodes with labels {self.labels}" if self.labels else ""
        where += ", each on a node of its own" if self.apart else ""
        raise missed(
            f"the cluster did not grant {len(waiting) + len(self._store) - len(pgs)} of {len(self._store)} placement "
            f"groups of pool {self.name_prefix!r} (processes {self._store}, each {self.bundle(device_name)}{where}) in "
            f"{self.timeout_s} s; free now: {ray.available_resources()}"
        )

    def borrow_from(self, *pools: RayResourcePool) -> None:
        """Declare that this pool uses the placement groups of other pools.

        The other pools then stay reserved while a worker group runs in this pool.
        """
        self._wholes = [whole for pool in pools for whole in (pool._wholes or [pool])]
        self._cluster = current_cluster()

    def enter(self) -> None:
        """Record that one more worker group uses this pool."""
        self._had_groups = True
        for pool in (self, *self._wholes):
            pool._num_users += 1

    def leave(self) -> None:
        """Record that a worker group no longer uses this pool.

        If no other group uses the pool or a part of the pool, release the reservation.
        """
        for pool in (self, *self._wholes):
            pool._num_users -= 1
            if pool._had_groups and pool._num_users == 0:
                pool.shutdown()

    def shutdown(self) -> None:
        """Release the pool's placement groups, which kills the workers in them.

        If this pool is a part of a larger pool, nothing is released. Raises `UsageError` for a detached pool after
        Ray's shutdown.
        """
        if not self._reserved:
            return
        if not self._has_ended():
            for pg in self._reserved:
                remove_placement_group(pg)
        elif self.detached and current_cluster() is None:
            where = f"pool {self.name_prefix!r} is detached and outlives Ray's shutdown"
            raise UsageError(f"{where}; to release the pool, connect to the same cluster again")
        self.pgs, self._reserved, self._had_groups = None, [], False

    def _has_ended(self) -> bool:
        """Return whether the reservation has ended. A detached reservation continues after the end of its job."""
        now = current_cluster()
        if self.detached and now is not None:
            return self._cluster[0] != now[0]
        return self._cluster != now


def current_cluster() -> Any:
    """Return a pair: ids of this process's Ray cluster and job; None if the process is not connected to Ray."""
    worker = ray_worker.global_worker
    node = worker.node  # at shutdown, Ray removes the node before it reports the disconnection
    return (node.cluster_id, worker.current_job_id) if node is not None and worker.connected else None


def current_node() -> str:
    """Return Ray's id of the node on which this process runs."""
    return ray.get_runtime_context().get_node_id()


def node_addresses() -> dict[str, str]:
    """Return the IP address of every node of the Ray cluster, by node id."""
    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}


def nodes_of(pg: PlacementGroup) -> dict[int, str]:
    """Return the node id of every bundle of a granted placement group, by bundle index."""
    table: Any = placement_group_table(pg)
    return table["bundles_to_node_id"]


def sort_placement_group_by_node_ip(pgs: list[PlacementGroup]) -> list[PlacementGroup]:
    """Return the placement groups sorted by the IP address of each group's first node.

    With this order, ranks keep their nodes if a job restarts.
    """
    addresses = node_addresses()
    return sorted(pgs, key=lambda pg: address_order(addresses[nodes_of(pg)[0]]))


def address_order(address: str) -> tuple[int, bytes, str]:
    """Return a key for sorting node addresses. IP addresses are in numerical order (.9 before .10), names come last."""
    try:
        packed = ip_address(address).packed
    except ValueError:
        return 99, b"", address
    return len(packed), packed, address


class SubRayResourcePool(RayResourcePool):
    """A part of a pool: ``subgroup_world_size`` adjacent processes, from the process ``start_bundle_index`` on.

    The index counts the processes of the whole pool, in the order of the node addresses. The whole pool owns and
    releases the placement groups.
    """

    def __init__(
        self, placement_groups: list[PlacementGroup], start_bundle_index: int, subgroup_world_size: int, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.pgs = placement_groups
        self.start_bundle_index = start_bundle_index
        self.subgroup_world_size = subgroup_world_size

    @property
    def world_size(self) -> int:
        """Number of processes in this part of the pool."""
        return self.subgroup_world_size


class JoinedResourcePool(RayResourcePool):
    """A second set of processes on the devices of a pool.

    Each process of the second set uses the devices of ``size`` adjacent processes of the pool.

    Example: inference engines with ``size`` tensor-parallel ranks, on the devices of ``size`` learner ranks. Both sets
    share the devices, so ``max_colocate_count`` must be at least 2.

    Raises:
        UsageError: the devices of one process of the second set would be on two nodes.
    """

    def __init__(self, whole: RayResourcePool, size: int) -> None:
        if any(count % size for count in whole.store):
            raise UsageError(
                f"pool {whole.name_prefix!r} must have a multiple of {size} processes on each node, because a process "
                f"uses {size} devices of one node, got {whole.store}"
            )
        counts = [count // size for count in whole.store]
        super().__init__(
            **{**whole.options(), "process_on_nodes": counts}, name_prefix=f"{whole.name_prefix}_by_{size}"
        )
        self.size = size
        self.pgs = whole.get_placement_groups()
        self.borrow_from(whole)

    def visible_devices(self, slots: Sequence[Slot]) -> list[str]:
        """Return the value of ``CUDA_VISIBLE_DEVICES`` for the process of each slot, in the order of ``slots``.

        A slot has the reserved resources of one rank.

        Raises `DeadlineError` if a node does not answer within ``timeout_s``.
        """
        asking = [
            _devices_there.options(
                num_gpus=1 / self.max_colocate_count,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=slot.placement_group, placement_group_bundle_index=slot.bundle_index + index
                ),
            ).remote()
            for slot in slots
            for index in range(self.size)
        ]
        found = fetch(asking, self.timeout_s, f"the devices of pool {self.name_prefix!r}")
        return [",".join(found[first : first + self.size]) for first in range(0, len(found), self.size)]


def split_resource_pool(resource_pool: RayResourcePool, split_size: int | list[int]) -> list[SubRayResourcePool]:
    """Cut a pool, or a part of a pool, into a list of parts, each for its own worker groups.

    If the pool is not reserved yet, it is reserved first.

    ``split_size`` is the number of processes of every part, or a list with one number per part. All parts together
    must have as many processes as the pool.
    """
    total = resource_pool.world_size
    sizes = [split_size] * (total // max(split_size, 1)) if isinstance(split_size, int) else list(split_size)
    if sum(sizes) != total or min(sizes, default=0) < 1:
        raise UsageError(f"parts of {split_size} processes do not add up to the {total} processes of the pool")
    first = getattr(resource_pool, "start_bundle_index", 0)
    starts = list(accumulate(sizes[:-1], initial=first))
    pgs = resource_pool.get_placement_groups()
    parts = [
        SubRayResourcePool(
            pgs, start, size, **resource_pool.options(), name_prefix=f"{resource_pool.name_prefix}_split_{index}"
        )
        for index, (start, size) in enumerate(zip(starts, sizes, strict=True))
    ]
    for part in parts:
        part.borrow_from(resource_pool)
    return parts


def merge_resource_pool(rp1: RayResourcePool, rp2: RayResourcePool) -> RayResourcePool:
    """Return a pool with the processes of two pools. The new pool uses the reservations of the two pools.

    Raises `UsageError` if a pool is a part of another pool, or if the pools differ in an option other than the nodes.
    """
    for pool in (rp1, rp2):
        if isinstance(pool, SubRayResourcePool):
            raise UsageError(f"pool {pool.name_prefix!r} is a part of a pool; merge whole pools, then split the result")
    ours, theirs = rp1.options(), rp2.options()
    different = sorted(key for key in ours if key != "process_on_nodes" and ours[key] != theirs[key])
    if different:
        raise UsageError(f"pools {rp1.name_prefix!r} and {rp2.name_prefix!r} differ in {different}; use equal options")
    options = {**ours, "process_on_nodes": rp1.store + rp2.store}
    merged = RayResourcePool(**options, name_prefix=f"{rp1.name_prefix}_{rp2.name_prefix}")
    merged.pgs = rp1.get_placement_groups() + rp2.get_placement_groups()
    merged.borrow_from(rp1, rp2)
    return merged


_TEXTS = {
    "Actor": "actor",
    "Rollout": "rollout",
    "ActorRollout": "actor_rollout",
    "Critic": "critic",
    "RefPolicy": "ref",
    "RewardModel": "rm",
    "ActorRolloutRef": "actor_rollout_ref",
    "Env": "env",
    "TeacherModel": "teacher",
}


class WorkerRole(DynamicEnum):
    """The role of a worker group in training, such as the critic. ``Role.register("MyRole")`` adds a role."""

    keeps_case = True

    def __str__(self) -> str:
        return _TEXTS.get(self.name, self.name.lower())

    @classmethod
    def from_string(cls, name: str) -> WorkerRole:
        """Return the role with this name or short name, such as ``RefPolicy`` or ``ref``.

        Raises `ValueError` if there is no such role.
        """
        for role in cls:
            if name.lower() in (str(role), role.name.lower()):
                return role
        raise ValueError(f"no role is called {name!r}, only {[str(role) for role in cls]}; use register() to add one")


Role = WorkerRole  # verl uses this name for the class
for _name in _TEXTS:
    Role.register(_name)


@dataclass
class ResourcePoolManager:
    """The resource pools of a job, and the assignment of roles to pools.

    Attributes that are not listed here are options of all pools. `RayResourcePool` describes them.

    Attributes:
        resource_pool_spec: Number of processes on each node, by pool name. Example: ``{"actor": [8, 8]}``.
        mapping: Name of the pool of each role.
        resource_pool_dict: The pools, after `create_resource_pool` has made them.
        max_colocate_count: Number of groups that may share a pool; 1 if all roles of a pool share the processes.
        device_name: ``cuda`` or ``npu``.
        own_options: By pool name, options of `RayResourcePool` that replace the options of this object.
    """

    resource_pool_spec: dict[str, list[int]]
    mapping: dict[Role, str]
    resource_pool_dict: dict[str, RayResourcePool] = field(default_factory=dict)
    use_gpu: bool = True
    max_colocate_count: int = 1
    device_name: str = "cuda"
    num_cpus_per_process: float | None = None
    apart: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 300.0
    own_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def create_resource_pool(self) -> None:
        """Fill ``resource_pool_dict`` with a pool for each entry of ``resource_pool_spec``. Nothing is reserved yet.

        Raises `ValueError` if the pools do not fit on the cluster's nodes. The message names the missing resources.
        """
        for name, process_on_nodes in self.resource_pool_spec.items():
            own = ("use_gpu", "max_colocate_count", "num_cpus_per_process", "apart", "labels", "timeout_s")
            options: dict[str, Any] = {option: getattr(self, option) for option in own}
            options |= self.own_options.get(name, {})
            self.resource_pool_dict[name] = RayResourcePool(process_on_nodes, name_prefix=name, **options)
        self._check_resource_available()

    def get_resource_pool(self, role: Role) -> RayResourcePool:
        """Return the pool of a role. Raises `KeyError` if the role or its pool is unknown."""
        return self.resource_pool_dict[self.mapping[role]]

    def get_n_gpus(self) -> int:
        """Return the number of processes of all pools together: one device per process."""
        return sum(count for process_on_nodes in self.resource_pool_spec.values() for count in process_on_nodes)

    def _check_resource_available(self) -> None:
        """Raise `ValueError` if the pools do not fit on the nodes."""
        free = {node: dict(resources) for node, resources in ray_state.available_resources_per_node().items()}
        demands = [(count, name) for name, counts in self.resource_pool_spec.items() for count in counts]
        demands.sort(reverse=True)
        bundles = {name: pool.bundle(self.device_name) for name, pool in self.resource_pool_dict.items()}
        needs = [{key: count * amount for key, amount in bundles[name].items()} for count, name in demands]
        if can_place(needs, free.values()):
            return
        scarce = DEVICE_RESOURCES.get(self.device_name, self.device_name) if self.use_gpu else "CPU"
        for (count, name), needed in zip(demands, needs, strict=True):
            hosts = [have for have in free.values() if fits(needed, have)]
            if hosts:
                take(needed, min(hosts, key=lambda have: have.get(scarce, 0.0)))
                continue
            addresses = node_addresses()
            missing = [
                f"node {addresses.get(node, node)} lacks "
                + ", ".join(
                    f"{n - have.get(r, 0):g} {r} (has {have.get(r, 0):g} of {n:g})"
                    for r, n in needed.items()
                    if have.get(r, 0) < n
                )
                for node, have in free.items()
            ]
            total = sum(have.get(scarce, 0) for have in free.values())
            raise ValueError(
                f"pool {name!r} needs {count} processes on one node, and no node has room: {'; '.join(missing)}. "
                f"Larger sets of processes are placed first; all nodes together then have {total:g} {scarce} left. Ask "
                "for fewer processes or add nodes"
            )


Resources = Mapping[str, float]

_ROUNDING = 1e-9
_MAX_STEPS = 10_000


def fits(needed: Resources, free: Resources) -> bool:
    """Return whether a node's free resources (amounts by name) are at least the ``needed`` amounts."""
    return all(free.get(resource, 0.0) + _ROUNDING >= amount for resource, amount in needed.items())


def take(needed: Resources, free: dict[str, float]) -> None:
    """Subtract the ``needed`` resources (amounts by name) from ``free``, in place."""
    for resource, amount in needed.items():
        free[resource] -= amount


def can_place(needs: Sequence[Resources], nodes: Iterable[Resources]) -> bool:
    """Return whether all ``needs`` fit on the nodes at the same time, if each need must be on one node.

    A need or node is a dict of resource amounts by name. The largest need must come first. If the search takes more
    than 10,000 steps, the function returns True, and the cluster decides later.
    """
    steps = 0

    def place(index: int, free: list[dict[str, float]]) -> bool:
        nonlocal steps
        if index == len(needs):
            return True
        tried = set()
        for position, have in enumerate(free):
            alike = tuple(sorted(have.items()))
            if alike in tried or not fits(needs[index], have):
                continue
            tried.add(alike)
            steps += 1
            left = dict(have)
            take(needs[index], left)
            if steps > _MAX_STEPS or place(index + 1, [*free[:position], left, *free[position + 1 :]]):
                return True
        return False

    wanted = {resource for needed in needs for resource in needed}
    return place(0, [{resource: node.get(resource, 0.0) for resource in wanted} for node in nodes])


def unwrap(cls: Any) -> type:
    """Return the plain class inside a class that ``ray.remote`` has wrapped. Return a plain class unchanged."""
    return getattr(cls, "__ray_actor_class__", cls)


def remote_class(cls: type, roles: Iterable[type] = ()) -> Any:
    """Return ``ray.remote(cls)``.

    If the class, or one of the classes ``roles``, has methods with the decorator `beside`, the actor gets a second
    thread for these methods.
    """
    has_two = any(runs_beside(getattr(owner, name, None)) for owner in (cls, *roles) for name in dir(owner))
    options: dict[str, Any] = {"concurrency_groups": {BESIDE: 1}}
    return ray.remote(**options)(cls) if has_two else ray.remote(cls)


class RayClassWithInitArgs(ClassWithInitArgs):
    """A worker class, plain or wrapped by ``ray.remote``, and the arguments of its constructor."""

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(cls if hasattr(cls, "__ray_actor_class__") else remote_class(cls), *args, **kwargs)
        self._options: dict[str, Any] = {}
        self._additional_resource: dict[str, Any] = {}

    def set_additional_resource(self, additional_resource: dict[str, Any]) -> None:
        """Set keyword arguments for ``ActorClass.options`` that replace all other values of the same names."""
        self._additional_resource = additional_resource

    def update_options(self, options: dict[str, Any]) -> None:
        """Add keyword arguments for ``ActorClass.options``."""
        self._options.update(options)

    def for_rank(self, options: dict[str, Any], **changed: Any) -> RayClassWithInitArgs:
        """Return a copy of this object, with arguments and options changed for the actor of one rank.

        If the class does not set ``num_cpus``, the actor uses the CPUs that the pool reserved.

        Args:
            options: Options of ``ActorClass.options`` that replace this object's options. Environment variables are
                merged.
            changed: Keyword arguments of the class. They replace this object's arguments.
        """
        ours = copy(self)
        ours.kwargs = {**self.kwargs, **changed}
        runtime_env = {**self._options.get("runtime_env", {}), **options["runtime_env"]}
        own_vars = self._options.get("runtime_env", {}).get("env_vars", {})
        runtime_env["env_vars"] = {**own_vars, **options["runtime_env"]["env_vars"]}
        ours._options = {**self._options, **options, "runtime_env": runtime_env}
        if self.cls._default_options.get("num_cpus") is None:
            ours._options.setdefault("num_cpus", 0)
        return ours

    def __call__(  # type: ignore[override]
        self,
        placement_group: PlacementGroup | None = None,
        placement_group_bundle_idx: int = 0,
        use_gpu: bool = True,
        num_gpus: float = 1,
        sharing_with: Any = None,
        device_name: str = "cuda",
    ) -> Any:
        """Start the actor in a bundle of a placement group. With ``use_gpu``, the actor gets ``num_gpus`` devices.

        If ``sharing_with`` is an actor, the new actor runs on the node and the devices of that actor instead.
        """
        if sharing_with is not None:
            node_id, devices = ray.get(
                [sharing_with.get_node_id.remote(), sharing_with.get_cuda_visible_devices.remote()]
            )
            affinity = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
            options = {**self._options, "scheduling_strategy": affinity}
            return self.cls.options(**options).remote(*self.args, cuda_visible_devices=devices, **self.kwargs)
        options: dict[str, Any] = {
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=placement_group,  # type: ignore[arg-type]
                placement_group_bundle_index=placement_group_bundle_idx,
            ),
            **self._options,
        }
        if use_gpu and device_name == "cuda":
            options["num_gpus"] = num_gpus
        elif use_gpu:
            device = DEVICE_RESOURCES.get(device_name, device_name)
            options["resources"] = {**options.get("resources", {}), device: num_gpus}
        options.update(self._additional_resource)
        return self.cls.options(**options).remote(*self.args, **self.kwargs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """The reserved resources (a bundle of a placement group) in which one rank runs.

    Attributes:
        local_rank: Index of the rank among the ranks of its placement group.
        local_world_size: Number of ranks in the placement group.
        node_index: Index of the placement group in the pool.
    """

    rank: int
    local_rank: int
    local_world_size: int
    node_index: int
    placement_group: PlacementGroup
    bundle_index: int
    node_id: str
    node_address: str


def slots_of(pool: RayResourcePool, strategy: str | None, device_name: str) -> list[Slot]:
    """Reserve a pool if it is not reserved yet. Return the reserved resources of each rank, in the order of the ranks.

    ``strategy`` replaces the pool's placement strategy. ``device_name`` is ``cuda`` or ``npu``.
    """
    addresses = node_addresses()
    unsorted_pgs = pool.get_placement_groups(strategy=strategy, device_name=device_name)
    processes = {pg.id: count for pg, count in zip(unsorted_pgs, pool.store, strict=True)}
    pgs = sort_placement_group_by_node_ip(unsorted_pgs)
    nodes = [nodes_of(pg) for pg in pgs]
    size = pool.size if isinstance(pool, JoinedResourcePool) else 1
    bundles = [(node_index, bundle * size) for node_index, pg in enumerate(pgs) for bundle in range(processes[pg.id])]
    first = getattr(pool, "start_bundle_index", 0)
    bundles = bundles[first : first + pool.world_size]
    on_node = Counter(node_index for node_index, _ in bundles)
    seen: Counter[int] = Counter()
    slots: list[Slot] = []
    for rank, (node_index, bundle) in enumerate(bundles):
        node_id = nodes[node_index][bundle]
        slot = Slot(
            rank=rank,
            local_rank=seen[node_index],
            local_world_size=on_node[node_index],
            node_index=node_index,
            placement_group=pgs[node_index],
            bundle_index=bundle,
            node_id=node_id,
            node_address=addresses[node_id],
        )
        seen[node_index] += 1
        slots.append(slot)
    return slots


def master_address_port(slot: Slot, port_range: Sequence[int] | None, timeout_s: float) -> tuple[str, str]:
    """Return the IP address of a slot's node, and a free port on this node as text, for a rendezvous.

    ``port_range`` is a half-open range of ports, or None for any port.

    Raises `UsageError` if all ports of the range are in use, and `DeadlineError` if the node does not answer in time.
    """
    if slot.node_id == ray.get_runtime_context().get_node_id():
        port = free_port(port_range)
    else:
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=slot.placement_group, placement_group_bundle_index=slot.bundle_index
        )
        asking = _free_port_there.options(scheduling_strategy=strategy).remote(port_range)
        (port,) = fetch([asking], timeout_s, f"a free port of node {slot.node_address}")
    return slot.node_address.strip("[]"), str(port)


def free_port(port_range: Sequence[int] | None = None) -> int:
    """Return a port that is free on this node now. ``port_range`` is a half-open range, or None for any port.

    Raises `UsageError` if no port of the range is free.
    """
    for port in (0,) if port_range is None else range(*port_range):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return probe.getsockname()[1]
    raise UsageError(f"no port of {port_range} is free; widen master_port_range")


_free_port_there: Any = ray.remote(num_cpus=0)(free_port)


def _visible_devices() -> str:
    return ",".join(ray.get_runtime_context().get_accelerator_ids()["GPU"])  # use the format of CUDA_VISIBLE_DEVICES


_devices_there: Any = ray.remote(num_cpus=0)(_visible_devices)
