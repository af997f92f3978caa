"""What a group of workers is made of, before it is known where it runs: processes by node, a class, its arguments."""

from __future__ import annotations

import secrets
import string
from typing import Any


class ResourcePool:
    """How many processes each node gives to a group.

    Args:
        process_on_nodes: Number of processes on each node. Example: ``[8, 8]`` for two nodes of eight.
        max_colocate_count: Groups that may share the pool at the same time.
        n_gpus_per_node: Devices of a node.
    """

    def __init__(
        self, process_on_nodes: list[int] | None = None, max_colocate_count: int = 10, n_gpus_per_node: int = 8
    ) -> None:
        self._store = list(process_on_nodes or [])
        self.max_colocate_count = max_colocate_count
        self.n_gpus_per_node = n_gpus_per_node

    def add_node(self, process_count: int) -> None:
        """Add a node with this many processes."""
        self._store.append(process_count)

    def __call__(self) -> list[int]:
        """Number of processes on each node."""
        return self._store

    @property
    def store(self) -> list[int]:
        """Number of processes on each node."""
        return self._store

    @property
    def world_size(self) -> int:
        """Number of processes on all nodes."""
        return sum(self._store)

    def local_world_size_list(self) -> list[int]:
        """For every rank, the number of processes on its node."""
        return [count for count in self._store for _ in range(count)]

    def local_rank_list(self) -> list[int]:
        """For every rank, its position on its node."""
        return [local_rank for count in self._store for local_rank in range(count)]


class ClassWithInitArgs:
    """A class and the arguments to make it with, to be called where it should live."""

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        self.cls = cls
        self.args = args
        self.kwargs = kwargs
        self.fused_worker_used = False

    def __call__(self) -> Any:
        """Make the instance."""
        return self.cls(*self.args, **self.kwargs)


def get_random_string(length: int) -> str:
    """A name of letters and digits that is not taken."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(length))
