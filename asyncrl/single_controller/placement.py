"""Worker classes with their arguments, and where each rank runs: slots in the order of the nodes' addresses."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from asyncrl.core.errors import UsageError
from asyncrl.core.remote import fetch

from .resource_pool import (
    DEVICE_RESOURCES,
    ClassWithInitArgs,
    RayResourcePool,
    node_addresses,
    nodes_of,
    sort_placement_group_by_node_ip,
)


def unwrap(cls: Any) -> type:
    """The plain class under ``ray.remote``."""
    return getattr(cls, "__ray_actor_class__", cls)


class RayClassWithInitArgs(ClassWithInitArgs):
    """A worker class, plain or under ``ray.remote``, and the arguments to make it with."""

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(cls if hasattr(cls, "__ray_actor_class__") else ray.remote(cls), *args, **kwargs)
        self._options: dict[str, Any] = {}
        self._additional_resource: dict[str, Any] = {}

    def set_additional_resource(self, additional_resource: dict[str, Any]) -> None:
        """Set more resources, as options of ``ActorClass.options``."""
        self._additional_resource = additional_resource

    def update_options(self, options: dict[str, Any]) -> None:
        """Add options of ``ActorClass.options``."""
        self._options.update(options)

    def for_rank(self, options: dict[str, Any], **changed: Any) -> RayClassWithInitArgs:
        """A copy for one rank, whose ``options`` win over those set here; environment variables are merged.

        ``changed`` replaces keyword arguments of the class for this rank. A class that names no CPUs uses those that
        the pool reserved.
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
        """Start the actor in a bundle of a placement group, with a share of a device if it needs one.

        With ``sharing_with``, it runs on that actor's node and devices instead.
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
    """The place of one rank: a bundle of a placement group. The pool has one placement group per node.

    Local ranks count the processes in one placement group. ``node_index`` is its position in the pool.
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
    """The slots of a pool, or of a part of a pool, by rank. ``strategy`` replaces the pool's."""
    addresses = node_addresses()
    unsorted_pgs = pool.get_placement_groups(strategy=strategy, device_name=device_name)
    processes = {pg.id: count for pg, count in zip(unsorted_pgs, pool.store, strict=True)}
    pgs = sort_placement_group_by_node_ip(unsorted_pgs)
    nodes = [nodes_of(pg) for pg in pgs]
    bundles = [(node_index, bundle) for node_index, pg in enumerate(pgs) for bundle in range(processes[pg.id])]
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
    """Address of the slot's node, and a free port there.

    Raises `UsageError` if every port of the range is taken, `DeadlineError` if the node does not answer in time.
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
    """A free port of this node, from a half-open range if one is given."""
    for port in (0,) if port_range is None else range(*port_range):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return probe.getsockname()[1]
    raise UsageError(f"no port of {port_range} is free; widen master_port_range")


_free_port_there: Any = ray.remote(num_cpus=0)(free_port)
