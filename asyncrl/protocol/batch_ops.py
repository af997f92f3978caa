"""What `DataProto` does with its three parts, on the parts themselves: tensors, arrays and meta information."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from .errors import BatchError


def union_tensor_dict(tensor_dict1: TensorDict | None, tensor_dict2: TensorDict | None) -> TensorDict | None:
    """Add the second's tensors to the first, in place. A tensor in both must be equal.

    Raises:
        BatchError: the batch sizes differ, or a tensor does.
    """
    if tensor_dict1 is None or tensor_dict2 is None:
        return tensor_dict2 if tensor_dict1 is None else tensor_dict1
    if tensor_dict1.batch_size != tensor_dict2.batch_size:
        raise BatchError(
            f"union needs equal batch sizes, got {tuple(tensor_dict1.batch_size)} and {tuple(tensor_dict2.batch_size)}"
        )
    for key, tensor in tensor_dict2.items():
        if key not in tensor_dict1.keys():  # noqa: SIM118 - a TensorDict refuses ``in``
            tensor_dict1[key] = tensor
        elif not deep_equal(tensor_dict1[key], tensor):
            raise BatchError(f"union: tensor {key!r} differs between the two; drop or rename one of them")
    return tensor_dict1


def union_numpy_dict(dict1: dict[str, np.ndarray], dict2: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Add the second's arrays to the first, in place. An array in both must be equal, NaN to NaN.

    Raises:
        BatchError: an array differs.
    """
    for key, value in dict2.items():
        if key in dict1 and not deep_equal(dict1[key], value):
            raise BatchError(f"union: array {key!r} differs between the two; drop or rename one of them")
        dict1[key] = value
    return dict1


def union_two_dict(dict1: dict[Any, Any], dict2: dict[Any, Any]) -> dict[Any, Any]:
    """Add the second's entries to the first, in place. An entry in both must be equal.

    Raises:
        BatchError: an entry differs.
    """
    for key, value in dict2.items():
        if key in dict1 and not deep_equal(dict1[key], value):
            raise BatchError(f"meta_info {key!r} differs: {dict1[key]!r} and {value!r}; drop or rename one of them")
        dict1[key] = value
    return dict1


def deep_equal(a: Any, b: Any) -> bool:
    """Equality that looks into arrays, tensors and containers, and in which NaN equals NaN."""
    if a is b:
        return True
    if type(a) is not type(b):
        return bool(np.isscalar(a) and np.isscalar(b) and a == b)
    if isinstance(a, torch.Tensor):
        return _tensors_equal(a, b)
    if isinstance(a, np.ndarray):
        return _arrays_equal(a, b)
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(deep_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(deep_equal(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float | np.floating):
        return bool(a == b or (a != a and b != b))
    return bool(a == b)


def _arrays_equal(a: np.ndarray, b: np.ndarray) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype == object:
        return all(deep_equal(x, y) for x, y in zip(a.flat, b.flat, strict=True))
    return bool(np.array_equal(a, b, equal_nan=a.dtype.kind in "fcmM"))


def _tensors_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.is_nested or b.is_nested:
        return a.is_nested and b.is_nested and all(map(_tensors_equal, a.unbind(), b.unbind()))
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_floating_point():
        return bool(((a == b) | (a.isnan() & b.isnan())).all())
    return torch.equal(a, b)


def list_of_dict_to_dict_of_list(list_of_dict: Sequence[Mapping[Any, Any]]) -> dict[Any, list[Any]]:
    """Turn records into columns.

    Raises:
        BatchError: the records have different keys.
    """
    if not list_of_dict:
        return {}
    keys = list_of_dict[0].keys()
    for record in list_of_dict:
        if record.keys() != keys:
            raise BatchError(f"records must have the same keys, got {sorted(keys)} and {sorted(record.keys())}")
    return {key: [record[key] for record in list_of_dict] for key in keys}


def merge_meta_info(meta_infos: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the meta information of parts; each ``metrics`` entry becomes a list over the parts.

    Raises:
        BatchError: another entry differs between parts.
    """
    merged: dict[str, Any] = {}
    metrics: list[Mapping[str, Any]] = []
    for meta_info in meta_infos:
        own = meta_info.get("metrics")
        metrics.extend(own if isinstance(own, list) else [own] if own is not None else [])
        union_two_dict(merged, {key: value for key, value in meta_info.items() if key != "metrics"})
    if metrics:
        names = dict.fromkeys(name for own in metrics for name in own)
        merged["metrics"] = {name: [own[name] for own in metrics if name in own] for name in names}
    return merged


def take_rows(tensor: torch.Tensor, rows: Any) -> torch.Tensor:
    """The rows that a slice, a mask or positions select; a slice of a dense tensor shares its memory."""
    if not tensor.is_nested:
        return tensor[rows if isinstance(rows, slice) else rows.to(tensor.device)]
    parts = tensor.unbind()
    if isinstance(rows, slice):
        return _jagged(parts[rows], tensor)
    positions = rows.nonzero().flatten() if rows.dtype == torch.bool else rows
    return _jagged([parts[position] for position in positions.tolist()], tensor)


def cat_rows(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Lay tensors end to end along the rows; jagged ones by their rows."""
    if not any(tensor.is_nested for tensor in tensors):
        return torch.cat(list(tensors), dim=0)
    return _jagged([row for tensor in tensors for row in tensor.unbind()], tensors[0])


def repeat_rows(tensor: torch.Tensor, times: Sequence[int]) -> torch.Tensor:
    """Row i ``times[i]`` times in succession."""
    index = np.repeat(np.arange(len(times)), times)
    return take_rows(tensor, torch.from_numpy(index))


def repeat_tensor(tensor: torch.Tensor, repeat_times: int, interleave: bool) -> torch.Tensor:
    """Repeat all rows: ``a a b b`` interleaved, ``a b a b`` otherwise."""
    if tensor.is_nested:
        rows = list(tensor.unbind())
        return _jagged(
            [row for row in rows for _ in range(repeat_times)] if interleave else rows * repeat_times, tensor
        )
    if interleave:
        return tensor.repeat_interleave(repeat_times, dim=0)
    return tensor.unsqueeze(0).expand(repeat_times, *tensor.shape).reshape(-1, *tensor.shape[1:])


def _jagged(rows: Sequence[torch.Tensor], like: Any) -> torch.Tensor:
    """A jagged tensor of these rows; of no rows, one that has the ragged dimension and nothing in it."""
    if rows:
        return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)
    values = like.values()
    offsets = torch.zeros(1, dtype=like.offsets().dtype, device=values.device)
    return torch.nested.nested_tensor_from_jagged(values[:0], offsets)


def repeat_array(array: np.ndarray, repeat_times: int, interleave: bool) -> np.ndarray:
    """As `repeat_tensor`."""
    if interleave:
        return np.repeat(array, repeat_times, axis=0)
    return np.tile(array, (repeat_times,) + (1,) * (array.ndim - 1))


def unfold_columns(values: Any, n_split: int, key: str) -> Any:
    """Cut the second dimension into ``n_split`` parts and lay them under one another."""
    rows, columns = values.shape[:2]
    if columns % n_split != 0:
        raise BatchError(f"{key!r} has {columns} columns, which {n_split} does not divide")
    return values.reshape(rows * n_split, columns // n_split, *values.shape[2:])


def object_column(values: Sequence[Any]) -> np.ndarray:
    """A one-dimensional object array, also of values that are sequences of equal length themselves."""
    column = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):
        column[index] = value
    return column


def chunk_ends(num_rows: int, chunks: int, *, is_balanced: bool) -> list[int]:
    """Where each of ``chunks`` parts ends: sizes that differ by one at most, or all alike but for the last ones."""
    if is_balanced:
        return [(index + 1) * (num_rows // chunks) + min(index + 1, num_rows % chunks) for index in range(chunks)]
    size = -(-num_rows // chunks)
    return [min((index + 1) * size, num_rows) for index in range(chunks)]


def as_index(idxs: Any) -> torch.Tensor:
    """Positions as int64, or a mask as bool, on the CPU."""
    index = torch.as_tensor(np.asarray(idxs) if isinstance(idxs, list | tuple) else idxs).cpu()
    if index.dtype == torch.bool:
        return index
    return index.to(torch.int64) if index.numel() else torch.zeros(0, dtype=torch.int64)


def as_names(keys: Any) -> list[str]:
    """One name or several as a list."""
    if isinstance(keys, str):
        return [keys]
    if not isinstance(keys, list | tuple):
        raise TypeError(f"names must be a string or a list of strings, got {type(keys).__name__}")
    return list(keys)


def picked(entries: dict[str, Any], keys: Iterable[str] | None) -> dict[str, Any]:
    """The entries named; None takes all, in the same dict."""
    if keys is None:
        return entries
    wanted = set(keys)
    return {key: value for key, value in entries.items() if key in wanted}


def check_rows(batch: TensorDict | None, arrays: Mapping[str, Any], num_rows: int) -> None:
    """Raise `BatchError` unless all arrays have ``num_rows`` rows, and the tensors one batch dimension."""
    if batch is not None and len(batch.batch_size) != 1:
        raise BatchError(f"batch must have one batch dimension, got {tuple(batch.batch_size)}")
    for key, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise BatchError(f"non_tensor_batch[{key!r}] must be a numpy array, got {type(array).__name__}")
        if array.ndim == 0 or len(array) != num_rows:
            raise BatchError(f"non_tensor_batch[{key!r}] has shape {array.shape}, the batch has {num_rows} rows")


def pop_all(parts: Mapping[str, Any], wanted: Sequence[list[str]]) -> list[dict[str, Any]]:
    """Take entries out of several parts, all or none. Raises `BatchError` where one is not there."""
    for keys, (name, part) in zip(wanted, parts.items(), strict=True):
        known = [] if part is None else list(part.keys())
        missing = sorted(set(keys) - set(known))
        if missing:
            raise BatchError(f"{name} has no {missing}, only {sorted(known)}")
    return [{key: part.pop(key) for key in keys} for keys, part in zip(wanted, parts.values(), strict=True)]


def rename_tensors(batch: TensorDict, old: list[str], new: list[str]) -> None:
    """Give tensors new names, in place; names may be exchanged.

    Raises:
        ValueError: there are not as many new names as old ones.
        BatchError: there is no such tensor.
    """
    if len(old) != len(new):
        raise ValueError(f"rename needs as many new names as old ones, got {old} and {new}")
    (tensors,) = pop_all({"batch": batch}, [old])
    for key, tensor in zip(new, tensors.values(), strict=True):
        batch.set(key, tensor)
