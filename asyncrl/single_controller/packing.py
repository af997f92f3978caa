"""Whether demands, each of which needs a node to itself or shares one, fit on the nodes of a cluster."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

Resources = Mapping[str, float]

_ROUNDING = 1e-9
_MAX_STEPS = 10_000


def fits(needed: Resources, free: Resources) -> bool:
    """Whether a node with these free resources has room."""
    return all(free.get(resource, 0.0) + _ROUNDING >= amount for resource, amount in needed.items())


def take(needed: Resources, free: dict[str, float]) -> None:
    """Subtract what is needed, in place."""
    for resource, amount in needed.items():
        free[resource] -= amount


def can_place(needs: Sequence[Resources], nodes: Iterable[Resources]) -> bool:
    """Whether there is a way to give each demand room on one node.

    Args:
        needs: Resources of each demand, the largest first.
        nodes: Free resources of each node.

    Returns:
        False where no way was found; after 10,000 steps the search gives up and leaves it to the cluster, with True.
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
