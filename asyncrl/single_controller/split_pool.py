"""One reservation for several groups: parts of a pool, and pools put together."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from ray.util.placement_group import PlacementGroup

from .ray_pool import RayResourcePool


class SubRayResourcePool(RayResourcePool):
    """A range of the processes of a pool. The reservation stays the whole pool's, which gives it back.

    Args:
        placement_groups: The whole pool's placement groups.
        start_bundle_index: First process of the range, counted over the nodes in the order of their addresses.
        subgroup_world_size: Processes in the range.
        kwargs: As the whole pool's.
    """

    owns_placement_groups = False

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
        ValueError: the sizes do not add up to the pool's processes.
    """
    total = resource_pool.world_size
    sizes = [split_size] * (total // split_size) if isinstance(split_size, int) else list(split_size)
    if sum(sizes) != total or min(sizes, default=0) < 1:
        raise ValueError(f"parts of {split_size} processes do not add up to the pool's {total}")
    first = getattr(resource_pool, "start_bundle_index", 0)
    starts = list(accumulate(sizes[:-1], initial=first))
    pgs = resource_pool.get_placement_groups()
    return [
        SubRayResourcePool(
            pgs, start, size, **resource_pool.options(), name_prefix=f"{resource_pool.name_prefix}_split_{index}"
        )
        for index, (start, size) in enumerate(zip(starts, sizes, strict=True))
    ]


def merge_resource_pool(rp1: RayResourcePool, rp2: RayResourcePool) -> RayResourcePool:
    """The processes of two pools as one pool. The reservations stay theirs, who give them back.

    Raises:
        ValueError: the pools differ in more than their nodes.
    """
    ours, theirs = rp1.options(), rp2.options()
    different = sorted(key for key in ours if key != "process_on_nodes" and ours[key] != theirs[key])
    if different:
        raise ValueError(f"pools {rp1.name_prefix!r} and {rp2.name_prefix!r} differ in {different}; make them alike")
    options = {**ours, "process_on_nodes": rp1.store + rp2.store}
    merged = RayResourcePool(**options, name_prefix=f"{rp1.name_prefix}_{rp2.name_prefix}")
    merged.owns_placement_groups = False
    merged.pgs = rp1.get_placement_groups() + rp2.get_placement_groups()
    return merged
