"""A group of workers as one object: its resources, its members, and the methods that it takes over from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .decorator import MAGIC_ATTR, Dispatch, Execute
from .dispatch import get_predefined_dispatch_fn, get_predefined_execute_fn


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


class WorkerGroup:
    """Base of groups; a subclass starts the workers and knows how to call them."""

    fused_worker_execute_fn_name = "_fuw_execute"

    def __init__(self, resource_pool: ResourcePool | None, **kwargs: Any) -> None:
        self._is_init_with_detached_workers = resource_pool is None
        self.fused_worker_used = False
        self._workers: list[Any] = []
        self._worker_names: list[str] = []
        self._dispatch_info: dict[str, list[int]] = {}
        self._collect_info: dict[str, list[bool]] = {}

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return len(self._workers)

    def _bind_worker_method(self, user_defined_cls: type, func_generator: Callable[..., Any]) -> list[str]:
        """Give the group each method that the class registered. Returns their names.

        Args:
            user_defined_cls: The workers' class.
            func_generator: ``(group, method_name, *, dispatch_fn, collect_fn, execute_fn, blocking)`` to a callable.
        """
        method_names = []
        for method_name in dir(user_defined_cls):
            attrs = getattr(getattr(user_defined_cls, method_name, None), MAGIC_ATTR, None)
            if attrs is None:
                continue
            mode = attrs["dispatch_mode"]
            functions = get_predefined_dispatch_fn(mode) if isinstance(mode, Dispatch) else mode
            execute_mode = Execute.RANK_ZERO if mode is Dispatch.RANK_ZERO else attrs["execute_mode"]
            method = func_generator(
                self,
                method_name,
                dispatch_fn=functions["dispatch_fn"],
                collect_fn=functions["collect_fn"],
                execute_fn=getattr(self, get_predefined_execute_fn(execute_mode)["execute_fn_name"]),
                blocking=attrs["blocking"],
            )
            setattr(self, method_name, method)
            method_names.append(method_name)
        return method_names
