"""The path of one call through a group: dispatch, execute, wait where it blocks, collect, unpad."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import ray

from asyncrl.protocol.future import DataProtoFuture
from asyncrl.protocol.padding import unpad_dataproto

from .dispatch import PADDING_KEY, silent_ranks

if TYPE_CHECKING:
    from .ray_worker_group import RayWorkerGroup

_SHARE_FROM_BYTES = 100_000


def func_generator(
    group: RayWorkerGroup,
    method_name: str,
    *,
    dispatch_fn: Callable[..., Any],
    collect_fn: Callable[..., Any],
    execute_fn: Callable[..., Any],
    blocking: bool,
) -> Callable[..., Any]:
    """The group's side of a registered method: dispatch, execute, wait where it blocks, collect, unpad."""

    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = dispatch_fn(group, *args, **kwargs)
        padding_size = kwargs.pop(PADDING_KEY, 0)
        silent = silent_ranks(group, collect_fn)
        if silent and execute_fn == group.execute_all:
            output = group._execute_all(method_name, args, kwargs, silent)
        else:
            output = execute_fn(method_name, *args, **kwargs)
        if blocking:
            output = group._fetch(output)
        output = collect_fn(group, output)
        if not padding_size:
            return output
        if isinstance(output, DataProtoFuture):
            return output.then(partial(unpad_dataproto, pad_size=padding_size))
        return output[:-padding_size]

    call.__name__ = method_name
    return call


def shared(value: Any) -> Any:
    """A list that holds one large value for every rank, as a list of references to one copy in the object store."""
    if not isinstance(value, list) or len(value) < 2 or getattr(value[0], "nbytes", 0) < _SHARE_FROM_BYTES:
        return value
    if any(entry is not value[0] for entry in value):
        return value
    return [ray.put(value[0])] * len(value)
