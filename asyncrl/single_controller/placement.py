"""Which rank runs where: the slots of a pool in the order of the nodes' addresses."""

from __future__ import annotations

import socket
from collections import Counter
from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from asyncrl.protocol.errors import UsageError
from asyncrl.protocol.remote import fetch

from .ray_pool import RayResourcePool, node_addresses, nodes_of, sort_placement_group_by_node_ip
from .worker import WorkerHelper


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """The place of one rank.

    Attributes:
        rank: Rank in the group.
        local_rank: Position among the group's processes of the same placement group.
        local_world_size: Number of these.
        node_index: Position of the placement group in the pool.
        placement_group: Where it is reserved.
        bundle_index: Its bundle there.
        node_id: Ray's id of the node.
        node_address: Address of the node.
    """

    rank: int
    local_rank: int
    local_world_size: int
    node_index: int
    placement_group: PlacementGroup
    bundle_index: int
    node_id: str
    node_address: str


def slots_of(pool: RayResourcePool, strategy: str, device_name: str) -> list[Slot]:
    """The slots of a pool, or of its part of a larger one, by rank."""
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


def master_address_port(slot: Slot, port_range: tuple[int, int] | None, timeout_s: float) -> tuple[str, str]:
    """Address of the slot's node, and a port that is free there now.

    Args:
        slot: Where rank 0 runs.
        port_range: First port allowed, and the one behind the last; None for any.
        timeout_s: Seconds that the node may take to answer.

    Raises:
        UsageError: every port of the range is taken.
        DeadlineError: the node did not answer in time.
    """
    if slot.node_id == ray.get_runtime_context().get_node_id():
        port = free_port(port_range)
    else:
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=slot.placement_group, placement_group_bundle_index=slot.bundle_index
        )
        (port,) = fetch([_free_port_there.options(scheduling_strategy=strategy).remote(port_range)], timeout_s)
    return slot.node_address.strip("[]"), str(port)


def free_port(port_range: tuple[int, int] | None) -> int:
    """A port of the range that nobody listens on. Raises `UsageError` where all are taken."""
    if port_range is None:
        return WorkerHelper._get_free_port()
    for port in range(*port_range):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise UsageError(f"no port from {port_range[0]} to {port_range[1] - 1} is free; widen master_port_range")


_free_port_there = ray.remote(num_cpus=0)(free_port)
