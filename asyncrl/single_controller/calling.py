"""The path of one call through a group: dispatch, execute, wait where it blocks, collect, unpad."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import ray

from asyncrl.protocol.future import DataProtoFuture, _padding_size_key

from .dispatch import collect_all_to_all, collect_dp_compute, silent_ranks

if TYPE_CHECKING:
    from .ray_worker_group import RayWorkerGroup

_SHARE_FROM_BYTES = 100_000
# What these return has an entry for each rank, not for each row, so that no padding is in it.
_COLLECT_BY_RANK = (collect_all_to_all, collect_dp_compute)


def func_generator(
    group: RayWorkerGroup,
    method_name: str,
    dispatch_fn: Callable[..., Any],
    collect_fn: Callable[..., Any],
    execute_fn: Callable[..., Any],
    blocking: bool,
) -> Callable[..., Any]:
    """The group's side of a registered method: dispatch, execute, wait where it blocks, collect, unpad."""

    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = dispatch_fn(group, *args, **kwargs)
        padding_size = kwargs.pop(_padding_size_key, 0)
        silent = silent_ranks(group, collect_fn)
        if silent and execute_fn == group.execute_all:
            output = group._execute_all(method_name, args, kwargs, silent)
        else:
            output = execute_fn(method_name, *args, **kwargs)
        if blocking:
            output = group._fetch(output)
        output = collect_fn(group, output)
        return output if not padding_size or collect_fn in _COLLECT_BY_RANK else _unpadded(output, padding_size)

    call.__name__ = method_name
    return call


def _unpadded(output: Any, padding_size: int) -> Any:
    """Rows without the last ones; what is neither a batch, nor a list of rows, nor a future stays as it is."""
    if isinstance(output, DataProtoFuture):
        return output.then(partial(_unpadded, padding_size=padding_size))
    if isinstance(output, list) or hasattr(output, "chunk"):
        return output[:-padding_size]
    return output


def shared(values: list[Any]) -> list[Any]:
    """A list that holds one large value for every rank, as a list of references to one copy in the object store."""
    if len(values) < 2 or getattr(values[0], "nbytes", 0) < _SHARE_FROM_BYTES:
        return values
    if any(value is not values[0] for value in values):
        return values
    return [ray.put(values[0])] * len(values)
