"""Which rank runs where: the slots of a pool in the order of the nodes' addresses."""

from __future__ import annotations

from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from .ray_pool import RayResourcePool, node_addresses, nodes_of, sort_placement_group_by_node_ip
from .worker import Worker


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
    """The slots of a pool, by rank."""
    addresses = node_addresses()
    slots: list[Slot] = []
    pgs = sort_placement_group_by_node_ip(pool.get_placement_groups(strategy=strategy, device_name=device_name))
    for node_index, pg in enumerate(pgs):
        nodes = nodes_of(pg)
        for local_rank in range(pg.bundle_count):
            slot = Slot(
                rank=len(slots),
                local_rank=local_rank,
                local_world_size=pg.bundle_count,
                node_index=node_index,
                placement_group=pg,
                bundle_index=local_rank,
                node_id=nodes[local_rank],
                node_address=addresses[nodes[local_rank]],
            )
            slots.append(slot)
    return slots


def master_address_port(slot: Slot) -> tuple[str, str]:
    """Address of the slot's node, and a port that is free there now."""
    if slot.node_id == ray.get_runtime_context().get_node_id():
        return slot.node_address, str(Worker._get_free_port())
    strategy = PlacementGroupSchedulingStrategy(
        placement_group=slot.placement_group, placement_group_bundle_index=slot.bundle_index
    )
    port = ray.get(_free_port.options(scheduling_strategy=strategy).remote())
    return slot.node_address, str(port)


@ray.remote(num_cpus=0)
def _free_port() -> int:
    return Worker._get_free_port()
