"""Turning the rows of a `DataProto` into groups of rows, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensordict import TensorDict

from .errors import BatchError

if TYPE_CHECKING:
    from .data_proto import DataProto


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """Columns ``[B, ...]`` become ``[new_batch_size, B // new_batch_size, ...]``.

    Raises:
        BatchError: ``new_batch_size`` does not divide B.
    """
    if new_batch_size < 1 or len(data) % new_batch_size != 0:
        raise BatchError(f"new_batch_size must divide the {len(data)} rows, got {new_batch_size}")
    num_inner = len(data) // new_batch_size
    shape = (new_batch_size, num_inner)
    batch = None
    if data.batch is not None:
        tensors = {key: tensor.reshape(*shape, *tensor.shape[1:]) for key, tensor in data.batch.items()}
        batch = TensorDict(tensors, batch_size=(new_batch_size,))
    arrays = {key: array.reshape(*shape, *array.shape[1:]) for key, array in data.non_tensor_batch.items()}
    return type(data)(batch=batch, non_tensor_batch=arrays, meta_info=data.meta_info)


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """Columns ``[A, B, ...]`` become ``[A * B, ...]``: the first ``batch_dims`` dimensions are joined."""
    batch = None
    if data.batch is not None:
        tensors = {key: tensor.flatten(0, batch_dims - 1) for key, tensor in data.batch.items()}
        num_rows = next((len(tensor) for tensor in tensors.values()), 0)
        batch = TensorDict(tensors, batch_size=(num_rows,))
    arrays = {key: array.reshape(-1, *array.shape[batch_dims:]) for key, array in data.non_tensor_batch.items()}
    return type(data)(batch=batch, non_tensor_batch=arrays, meta_info=data.meta_info)
