"""One reservation for several groups: parts of a pool, and pools put together."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from ray.util.placement_group import PlacementGroup

from asyncrl.protocol.errors import UsageError

from .ray_pool import RayResourcePool


class SubRayResourcePool(RayResourcePool):
    """A range of the processes of a pool. The reservation stays the whole pool's, which gives it back.

    Args:
        placement_groups: The whole pool's placement groups.
        start_bundle_index: First process of the range, counted over the nodes in the order of their addresses.
        subgroup_world_size: Processes in the range.
        kwargs: As the whole pool's.
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
        """Number of processes in the range."""
        return self.subgroup_world_size


def split_resource_pool(resource_pool: RayResourcePool, split_size: int | list[int]) -> list[SubRayResourcePool]:
    """Cut a pool, or a part of one, into parts.

    Args:
        resource_pool: The pool; it is reserved now, if it was not yet.
        split_size: Processes of every part, or of each.

    Raises:
        UsageError: the sizes do not add up to the pool's processes.
    """
    total = resource_pool.world_size
    sizes = [split_size] * (total // max(split_size, 1)) if isinstance(split_size, int) else list(split_size)
    if sum(sizes) != total or min(sizes, default=0) < 1:
        raise UsageError(f"parts of {split_size} processes do not add up to the pool's {total}")
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
    """The processes of two pools as one pool. The reservations stay theirs, who give them back.

    Raises:
        UsageError: the pools differ in more than their nodes.
    """
    ours, theirs = rp1.options(), rp2.options()
    different = sorted(key for key in ours if key != "process_on_nodes" and ours[key] != theirs[key])
    if different:
        raise UsageError(f"pools {rp1.name_prefix!r} and {rp2.name_prefix!r} differ in {different}; make them alike")
    options = {**ours, "process_on_nodes": rp1.store + rp2.store}
    merged = RayResourcePool(**options, name_prefix=f"{rp1.name_prefix}_{rp2.name_prefix}")
    merged.pgs = rp1.get_placement_groups() + rp2.get_placement_groups()
    merged.borrow_from(rp1, rp2)
    return merged


def extract_pg_from_exist(
    resource_pools: dict[str, RayResourcePool], src_role_names: list[str], resource_pool: RayResourcePool
) -> list[PlacementGroup]:
    """Placement groups of other pools that have room for this one's processes, one for each of its nodes.

    The node that asks for the most processes takes the largest placement group, and so on down.

    Args:
        resource_pools: Pools by role.
        src_role_names: Roles whose pools may be taken from.
        resource_pool: The pool to be placed; assign the result to its ``pgs``.

    Raises:
        UsageError: there are too few placement groups, or they are too small.
    """
    usable = [pool for role, pool in resource_pools.items() if role in src_role_names]
    sources = [pg for pool in usable for pg in pool.get_placement_groups()]
    sources.sort(key=lambda pg: pg.bundle_count, reverse=True)
    wanted = sorted(enumerate(resource_pool.store), key=lambda node: node[1], reverse=True)
    if len(sources) < len(wanted):
        raise UsageError(f"{len(wanted)} nodes are asked for, pools {src_role_names} have {len(sources)} to share")
    for (_, count), pg in zip(wanted, sources, strict=False):
        if count > pg.bundle_count:
            raise UsageError(f"{count} processes are asked for on one node, the largest left has {pg.bundle_count}")
    chosen = {index: pg for (index, _), pg in zip(wanted, sources, strict=False)}
    return [chosen[index] for index in range(len(wanted))]
