"""Named columns: what `DataProto` is given, made into columns that fit together, and taken out of it by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from tensordict import TensorDict

from .errors import BatchError
from .rows import leading_shape


def object_array(values: Any) -> np.ndarray:
    """An object array of Python values, as numpy makes it: values of equal length become further dimensions."""
    try:
        return np.array(values, dtype=object)
    except ValueError:  # arrays that agree in their first dimensions only
        column = np.empty(len(values), dtype=object)
        for index, value in enumerate(values):
            column[index] = value
        return column


def tensors_together(tensors: Mapping[str, Any], num_batch_dims: int) -> TensorDict | None:
    """A TensorDict of the tensors, None of none. Raises `BatchError` unless their leading dimensions agree."""
    sizes = {key: leading_shape(tensor, num_batch_dims) for key, tensor in tensors.items()}
    for key, size in sizes.items():
        if not size:
            raise BatchError(f"tensor {key!r} has no dimension, and needs one for the rows; put it into meta_info")
    if len(set(sizes.values())) > 1:
        raise BatchError(f"tensors must have the same first dimension, got {sizes}")
    return TensorDict(source=dict(tensors), batch_size=next(iter(sizes.values()))) if tensors else None


def arrays_of(non_tensors: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Arrays as they are, and anything else as object arrays."""
    if not isinstance(non_tensors, Mapping):
        raise BatchError(f"non_tensors must be a dict of arrays or lists, got {type(non_tensors).__name__}")
    return {key: value if isinstance(value, np.ndarray) else object_array(value) for key, value in non_tensors.items()}


def check_rows(batch: TensorDict | None, arrays: Mapping[str, Any], num_rows: int) -> None:
    """Raise `BatchError` unless all arrays have ``num_rows`` rows, and the tensors one batch dimension."""
    if batch is not None and len(batch.batch_size) != 1:
        raise BatchError(f"batch must have one batch dimension, got {tuple(batch.batch_size)}")
    for key, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise BatchError(f"non_tensor_batch[{key!r}] must be a numpy array, got {type(array).__name__}")
        if array.ndim == 0 or len(array) != num_rows:
            raise BatchError(f"non_tensor_batch[{key!r}] has shape {array.shape}, the batch has {num_rows} rows")


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
        ValueError: there are not as many new names as old ones, or one stands twice.
        BatchError: there is no such tensor.
    """
    if len(old) != len(new) or len(set(old)) != len(old) or len(set(new)) != len(new):
        raise ValueError(f"rename needs as many new names as old ones, each once, got {old} and {new}")
    (tensors,) = pop_all({"batch": batch}, [old])
    for key, tensor in zip(new, tensors.values(), strict=True):
        batch.set(key, tensor)
