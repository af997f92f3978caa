"""Tensors and TensorDicts as plain tuples of dtype, shape and memory, for transports of one's own.

These are verl's names and forms. What goes through Ray, the wire and to disk here goes by `asyncrl.protocol.wire`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from .errors import BatchError
from .rows import is_nested, rows_of

TensorParts = tuple[str, tuple[int, ...], Any]


def serialize_single_tensor(obj: torch.Tensor) -> TensorParts:
    """The name of the dtype, the shape, and the memory as [nbytes] uint8, shared with a contiguous CPU tensor."""
    flat = obj.detach().cpu().flatten().contiguous()
    memory = flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, dtype=np.uint8)
    return str(obj.dtype).removeprefix("torch."), obj.shape, memory


def deserialize_single_tensor(arr: TensorParts) -> torch.Tensor:
    """The inverse of `serialize_single_tensor`, in memory of its own.

    Raises:
        BatchError: torch has no such dtype, or the memory does not fill the shape.
    """
    name, shape, data = arr
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise BatchError(f"torch has no dtype {name!r}")
    memory = bytearray(data)
    if len(memory) != torch.Size(shape).numel() * dtype.itemsize:
        raise BatchError(f"a tensor {name}{list(shape)} does not have {len(memory)} bytes")
    if not memory:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


def serialize_tensordict(
    batch: TensorDict,
) -> tuple[tuple[int, ...], str | None, dict[str, TensorParts | tuple[str, list[TensorParts]]]]:
    """Batch size, device (None where there is none of all), and each tensor's parts by name.

    A nested tensor's are the name of its layout and the parts of its rows.
    """
    items: dict[str, Any] = {}
    tensor: Any
    for key, tensor in batch.items():
        if is_nested(tensor):
            rows = [serialize_single_tensor(row) for row in rows_of(tensor)]
            items[key] = (str(tensor.layout).removeprefix("torch."), rows)
        else:
            items[key] = serialize_single_tensor(tensor)
    return tuple(batch.batch_size), None if batch.device is None else str(batch.device), items


def deserialize_tensordict(arr: Any) -> TensorDict:
    """The inverse of `serialize_tensordict`.

    Raises:
        ValueError: a tensor has neither three parts nor two, or they do not fit together.
    """
    batch_size, device, items = arr
    tensors: dict[str, Any] = {}
    for key, parts in items.items():
        if len(parts) not in (2, 3):
            raise ValueError(f"tensor {key!r} must have 3 parts, or 2 where it is nested, got {len(parts)}")
        if len(parts) == 3:
            tensors[key] = deserialize_single_tensor(parts)
            continue
        layout, rows = parts
        tensors[key] = torch.nested.as_nested_tensor(
            [deserialize_single_tensor(row) for row in rows], layout=getattr(torch, layout)
        )
    return TensorDict(source=tensors, batch_size=batch_size, device=device)
