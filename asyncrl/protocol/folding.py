"""Turning the rows of a `DataProto` into groups of rows, and back."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from tensordict import TensorDict

from .errors import BatchError
from .rows import is_nested

if TYPE_CHECKING:
    from .data_proto import DataProto


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """Columns ``[B, ...]`` become ``[new_batch_size, B // new_batch_size, ...]``, sharing memory.

    Raises:
        BatchError: ``new_batch_size`` does not divide B, or a column is a nested tensor.
    """
    if new_batch_size < 1 or len(data) % new_batch_size != 0:
        raise BatchError(f"new_batch_size must divide the {len(data)} rows, got {new_batch_size}")
    shape = (new_batch_size, len(data) // new_batch_size)
    batch = None
    if data.batch is not None:
        tensors = {key: _dense(key, tensor).reshape(*shape, *tensor.shape[1:]) for key, tensor in data.batch.items()}
        batch = TensorDict(tensors, batch_size=(new_batch_size,), device=data.batch.device)
    arrays = {key: array.reshape(*shape, *array.shape[1:]) for key, array in data.non_tensor_batch.items()}
    return type(data)(batch=batch, non_tensor_batch=arrays, meta_info=data.meta_info)


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """Columns ``[A, B, ...]`` become ``[A * B, ...]``: the first ``batch_dims`` dimensions are joined.

    Raises:
        BatchError: a column has fewer dimensions, or is a nested tensor.
    """
    for key, column in {**data._columns(), **data.non_tensor_batch}.items():
        if _dense(key, column).ndim < batch_dims:
            raise BatchError(f"{key!r} has {column.ndim} dimensions, of which {batch_dims} cannot be joined")
    arrays = {key: _joined(array, batch_dims) for key, array in data.non_tensor_batch.items()}
    batch = None
    if data.batch is not None:
        tensors = {key: tensor.flatten(0, batch_dims - 1) for key, tensor in data.batch.items()}
        num_rows = next((len(column) for column in [*tensors.values(), *arrays.values()]), len(data))
        batch = TensorDict(tensors, batch_size=(num_rows,), device=data.batch.device)
    return type(data)(batch=batch, non_tensor_batch=arrays, meta_info=data.meta_info)


def _joined(array: Any, batch_dims: int) -> Any:
    return array.reshape(prod(array.shape[:batch_dims]), *array.shape[batch_dims:])


def _dense(key: str, column: Any) -> Any:
    if is_nested(column):
        raise BatchError(f"{key!r} is a nested tensor, which cannot be folded; take it out by pop")
    return column
