"""Putting the parts of batches together, name by name: what stands in both must be the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from .equality import deep_equal, facts_equal, tensors_equal
from .errors import BatchError


def union_tensor_dict(tensor_dict1: TensorDict | None, tensor_dict2: TensorDict | None) -> TensorDict | None:
    """Add the second's tensors to the first, in place. A tensor in both must be equal, NaN to NaN.

    Raises:
        BatchError: the batch sizes differ, or a tensor does; nothing was added then.
    """
    if tensor_dict1 is None or tensor_dict2 is None:
        return tensor_dict2 if tensor_dict1 is None else tensor_dict1
    if tensor_dict1.batch_size != tensor_dict2.batch_size:
        raise BatchError(
            "the two tensor dicts must have identical batch sizes, "
            f"got {tuple(tensor_dict1.batch_size)} and {tuple(tensor_dict2.batch_size)}"
        )
    own = dict(tensor_dict1.items())
    added = {key: value for key, value in tensor_dict2.items() if key not in own}
    for key, value in tensor_dict2.items():
        if key in own and not _entries_equal(own[key], value):
            raise BatchError(f"`{key}` in tensor_dict1 and tensor_dict2 are not the same object. {_DROP_ONE}")
    for key, value in added.items():
        tensor_dict1[key] = value
    return tensor_dict1


def union_numpy_dict(tensor_dict1: dict[str, np.ndarray], tensor_dict2: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Add the second's arrays to the first, in place. An array in both must be equal, NaN to NaN.

    Raises:
        BatchError: an array differs, or one in both is none; nothing was added then.
    """
    for key in tensor_dict1.keys() & tensor_dict2.keys():
        first, second = tensor_dict1[key], tensor_dict2[key]
        if not isinstance(first, np.ndarray) or not isinstance(second, np.ndarray) or not deep_equal(first, second):
            raise BatchError(f"`{key}` in tensor_dict1 and tensor_dict2 are not the same object. {_DROP_ONE}")
    tensor_dict1.update(tensor_dict2)
    return tensor_dict1


def union_two_dict(dict1: dict[Any, Any], dict2: dict[Any, Any]) -> dict[Any, Any]:
    """Add the second's entries to the first, in place. An entry in both must be equal.

    Raises:
        BatchError: an entry differs; nothing was added then.
    """
    for key in dict1.keys() & dict2.keys():
        if not facts_equal(dict1[key], dict2[key]):
            raise BatchError(
                f"{key} in meta_dict1 and meta_dict2 are not the same object: "
                f"{dict1[key]!r:.200} and {dict2[key]!r:.200}. {_DROP_ONE}"
            )
    dict1.update(dict2)
    return dict1


def list_of_dict_to_dict_of_list(list_of_dict: Sequence[Mapping[Any, Any]]) -> dict[Any, list[Any]]:
    """Turn records into columns, by the keys of the first. A record that lacks a key is left out of its column.

    Raises:
        BatchError: a record has a key that the first has not.
    """
    if not list_of_dict:
        return {}
    columns: dict[Any, list[Any]] = {key: [] for key in list_of_dict[0]}
    for record in list_of_dict:
        for key, value in record.items():
            if key not in columns:
                raise BatchError(f"key {key!r} is not in the first record, which has {list(columns)}")
            columns[key].append(value)
    return columns


def same_columns(records: Sequence[Mapping[Any, Any]], part: str) -> dict[Any, list[Any]]:
    """Turn records into columns. Raises `BatchError` unless all have the same keys."""
    for record in records:
        if record.keys() != records[0].keys():
            raise BatchError(
                f"all batches must have the same keys in {part}, got {sorted(records[0])} and {sorted(record)}"
            )
    return list_of_dict_to_dict_of_list(records)


def merge_meta_info(meta_infos: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the meta information of parts; each entry of ``metrics`` becomes the list of what the parts have.

    Raises:
        BatchError: another entry differs between parts.
    """
    merged: dict[str, Any] = {}
    metrics: list[Mapping[str, Any]] = []
    for meta_info in meta_infos:
        own = meta_info.get("metrics")
        metrics.extend(own if isinstance(own, list) else [own] if own is not None else [])
        for key, value in meta_info.items():
            if key == "metrics":
                continue
            if key in merged and not facts_equal(merged[key], value):
                raise BatchError(f"Conflicting values for meta_info key '{key}': {merged[key]!r:.200}, {value!r:.200}")
            merged.setdefault(key, value)
    if metrics:
        names = dict.fromkeys(name for own in metrics for name in own)
        merged["metrics"] = {name: [own[name] for own in metrics if name in own] for name in names}
    return merged


_DROP_ONE = "Drop or rename one of them"


def _entries_equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return tensors_equal(a, b)
    return type(a) is type(b) and bool((a == b).all())  # a TensorDict within the TensorDict
