"""`DataProto` for the eye (its entries and sizes in words) and as a single TensorDict."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from .columns import object_array
from .errors import BatchError
from .rows import is_nested

_GIB = 1024**3


def describe(tensors: Mapping[str, Any], arrays: Mapping[str, np.ndarray], meta_info: Mapping[str, Any]) -> str:
    """Three headed lists of entries, one line each."""
    lines = ["batch"]
    lines += [f"  {key}: {_shape_of(value)} ({value.dtype}) {value.device}" for key, value in tensors.items()]
    lines += ["non_tensor_batch"]
    lines += [f"  {key}: ndarray{value.shape} ({value.dtype})" for key, value in arrays.items()]
    lines += ["meta_info"]
    lines += [f"  {key}: {type_name(value)}" for key, value in meta_info.items()]
    return "\n".join(lines)


def _shape_of(tensor: Any) -> str:
    """The shape in words; of a nested tensor, its rows and layout."""
    if is_nested(tensor):
        return f"({tensor.size(0)}, {str(tensor.layout).removeprefix('torch.')})"
    return str(tuple(tensor.shape))


def type_name(value: Any) -> str:
    """The type of a value, with the types inside a container. Example: ``dict[str: list[int]]``."""
    if isinstance(value, list):
        return f"list[{'|'.join(sorted({type_name(item) for item in value[:3]})) or '...'}]"
    if isinstance(value, tuple):
        return f"tuple({', '.join(map(type_name, value))})"
    if isinstance(value, dict) and value:
        key, item = next(iter(value.items()))
        return f"dict[{type_name(key)}: {type_name(item)}]"
    if isinstance(value, np.ndarray):
        return f"ndarray{value.shape} ({value.dtype})"
    return type(value).__name__


def write_size(tensors: Mapping[str, torch.Tensor], arrays: Mapping[str, np.ndarray], prefix: str) -> None:
    """Write both sizes to stdout, in GiB."""
    tensor_gib = sum(tensor.nbytes for tensor in tensors.values()) / _GIB
    array_gib = sum(array.nbytes for array in arrays.values()) / _GIB
    message = f"Size of tensordict: {tensor_gib} GB, size of non_tensor_batch: {array_gib} GB"
    sys.stdout.write(f"{prefix}, {message}\n" if prefix else f"{message}\n")


def sort_tensordict(
    tensor_dict: TensorDict,
) -> tuple[dict[str, torch.Tensor], dict[str, np.ndarray], dict[str, Any]]:
    """Tensors, per-row values and values for all rows of a TensorDict."""
    tensors: dict[str, torch.Tensor] = {}
    arrays: dict[str, np.ndarray] = {}
    facts: dict[str, Any] = {}
    for key in map(str, tensor_dict.keys()):
        value = tensor_dict.get(key)
        if isinstance(value, torch.Tensor):
            tensors[key] = value
        elif isinstance(value, NonTensorStack):
            arrays[key] = object_array([item.tolist() for item in value])
        elif isinstance(value, NonTensorData):
            facts[key] = value.data
        else:
            raise BatchError(
                f"entry {key!r} is a {type(value).__name__}; only tensors and non-tensor data have a place"
            )
    return tensors, arrays, facts


def join_tensordict(
    tensors: Mapping[str, torch.Tensor],
    arrays: Mapping[str, np.ndarray],
    facts: Mapping[str, Any],
    batch_size: tuple[int, ...],
) -> TensorDict:
    """The inverse of `sort_tensordict`."""
    names = [*tensors, *arrays, *facts]
    if len(set(names)) < len(names):
        raise BatchError(f"a name stands in more than one part: {sorted({n for n in names if names.count(n) > 1})}")
    joined: Any = TensorDict(dict(tensors), batch_size=batch_size)
    for key, array in arrays.items():
        values: list[Any] = [NonTensorData(value) for value in array]
        joined.set(key, NonTensorStack.from_list(values))
    for key, value in facts.items():
        joined.set(key, NonTensorData(value, batch_size=joined.batch_size))
    return joined
