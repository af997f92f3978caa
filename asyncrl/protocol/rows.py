"""Rows of tensors and arrays: which an index means, and taking, joining and repeating them. Nested tensors too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .errors import BatchError


def as_index(idxs: Any, num_rows: int) -> np.ndarray:
    """Positions (int64, from 0) that an index of positions or a mask means.

    Args:
        idxs: A list, tuple, array or tensor, of one dimension: integers in [-B, B), or B bools.
        num_rows: B.

    Raises:
        TypeError: they are neither integers nor bools.
        IndexError: a position is outside the batch, or there are not B bools, or there are more dimensions.
    """
    index = np.asarray(idxs.detach().cpu() if isinstance(idxs, torch.Tensor) else idxs)
    if index.ndim != 1:
        raise IndexError(f"an index of rows must have one dimension, got shape {index.shape}")
    if index.dtype == bool:
        if len(index) != num_rows:
            raise IndexError(f"a mask must have one bool for each of {num_rows} rows, got {len(index)}")
        return index.nonzero()[0]
    if not index.size:
        return np.empty(0, dtype=np.int64)
    if index.dtype.kind not in "iu":
        raise TypeError(f"rows are indexed by integers or bools, got {index.dtype}")
    index = index.astype(np.int64)
    if index.min() < -num_rows or index.max() >= num_rows:
        raise IndexError(f"rows {index.min()} to {index.max()} asked for, of a batch of {num_rows} rows")
    return np.where(index < 0, index + num_rows, index)


def as_counts(repeat_times: Any, num_rows: int) -> np.ndarray:
    """One count (int64) for each row. Raises `BatchError` for anything else."""
    counts = np.asarray(repeat_times.detach().cpu() if isinstance(repeat_times, torch.Tensor) else repeat_times)
    if counts.shape != (num_rows,):
        raise BatchError(f"repeat_times must have one count for each of {num_rows} rows, got shape {counts.shape}")
    if num_rows and (counts.dtype.kind not in "iu" or counts.min() < 0):
        raise BatchError(f"repeat_times must be integers >= 0, got {counts.dtype} from {counts.min()}")
    return counts.astype(np.int64)


def take_rows(tensor: Any, rows: slice | np.ndarray) -> Any:
    """The rows of a slice with a positive step, which shares a dense tensor's memory, or at positions."""
    if not is_nested(tensor):
        return tensor[rows if isinstance(rows, slice) else torch.from_numpy(rows).to(tensor.device)]
    parts = rows_of(tensor)
    return nested_of(parts[rows] if isinstance(rows, slice) else [parts[row] for row in rows.tolist()], tensor)


def cat_rows(tensors: Sequence[Any]) -> Any:
    """Lay tensors end to end along the rows; nested ones by their rows."""
    if not any(map(is_nested, tensors)):
        return torch.cat(list(tensors), dim=0)
    if not all(map(is_nested, tensors)):
        raise BatchError("nested and dense tensors cannot be joined; make all of them nested")
    return nested_of([row for tensor in tensors for row in rows_of(tensor)], tensors[0])


def stack_rows(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """One tensor of these rows: dense, or jagged where their first dimensions differ."""
    if len({row.shape for row in rows}) == 1:
        return torch.stack(list(rows))
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def repeat_rows(tensor: Any, repeat_times: int, *, interleave: bool) -> Any:
    """Repeat all rows: ``a a b b`` interleaved, ``a b a b`` otherwise."""
    if is_nested(tensor):
        positions = np.arange(tensor.size(0))
        return take_rows(tensor, repeat_array(positions, repeat_times, interleave=interleave))
    if interleave:
        return tensor.repeat_interleave(repeat_times, dim=0)
    return torch.cat([tensor] * repeat_times, dim=0) if repeat_times else tensor[:0]


def repeat_array(array: np.ndarray, repeat_times: int, *, interleave: bool) -> np.ndarray:
    """As `repeat_rows`."""
    if interleave:
        return np.repeat(array, repeat_times, axis=0)
    return np.tile(array, (repeat_times,) + (1,) * (array.ndim - 1))


def unfold_or_repeat(key: str, column: Any, *, n_split: int, split_keys: set[str]) -> Any:
    """The column cut into ``n_split`` if it is among ``split_keys``, otherwise every row ``n_split`` times."""
    if key in split_keys:
        return unfold_columns(column, n_split, key)
    repeat = repeat_array if isinstance(column, np.ndarray) else repeat_rows
    return repeat(column, n_split, interleave=True)


def unfold_columns(values: Any, n_split: int, key: str) -> Any:
    """Cut the second dimension into ``n_split`` parts, each a row of its own.

    Raises:
        BatchError: there is no second dimension, it is ragged, or ``n_split`` does not divide it.
    """
    if is_nested(values) or values.ndim < 2:
        raise BatchError(f"{key!r} has no second dimension of one length, which split_keys must have")
    rows, columns = values.shape[:2]
    if columns % n_split != 0:
        raise BatchError(f"{key!r} has {columns} columns, which {n_split} does not divide")
    return values.reshape(rows * n_split, columns // n_split, *values.shape[2:])


def chunk_ends(num_rows: int, chunks: int, *, is_balanced: bool) -> list[int]:
    """Where each of ``chunks`` parts ends: sizes differ by at most one, or all but the last ones are equal."""
    if is_balanced:
        return [(index + 1) * (num_rows // chunks) + min(index + 1, num_rows % chunks) for index in range(chunks)]
    size = -(-num_rows // chunks)
    return [min((index + 1) * size, num_rows) for index in range(chunks)]


def is_nested(tensor: Any) -> bool:
    """Whether this is a nested tensor; a TensorDict within a batch is not."""
    return isinstance(tensor, torch.Tensor) and tensor.is_nested


def leading_shape(tensor: Any, num_dims: int) -> tuple[int, ...]:
    """The first dimensions; a nested tensor has one."""
    return (tensor.size(0),) if is_nested(tensor) else tuple(tensor.shape[:num_dims])


def rows_of(nested: Any) -> list[torch.Tensor]:
    """The rows of a nested tensor, as views."""
    if nested.layout is not torch.jagged:
        return list(nested.unbind())
    offsets, lengths = nested.offsets(), nested.lengths()
    starts, sizes = offsets[:-1].tolist(), (offsets.diff() if lengths is None else lengths).tolist()
    values, dim = nested.values(), nested._ragged_idx - 1
    return [values.narrow(dim, start, size) for start, size in zip(starts, sizes, strict=True)]


def nested_of(rows: Sequence[torch.Tensor], like: Any) -> Any:
    """A nested tensor of these rows, with the layout and the ragged dimension of another."""
    if like.layout is not torch.jagged:
        return torch.nested.as_nested_tensor(list(rows), layout=like.layout)
    values, dim = like.values(), like._ragged_idx - 1
    sizes = torch.tensor([0, *(row.shape[dim] for row in rows)], device=values.device)
    offsets = sizes.cumsum(0).to(like.offsets().dtype)
    joined = torch.cat(list(rows), dim=dim) if rows else values.narrow(dim, 0, 0)
    return torch.nested.nested_tensor_from_jagged(joined, offsets, jagged_dim=dim + 1)
