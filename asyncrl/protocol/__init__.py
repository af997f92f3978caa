"""The vocabulary of the system: types, errors, ports and the batch. Importing it loads neither torch nor ray."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .future import DataProtoFuture
from .padding import DataProtoConfig, pad_dataproto_to_divisor, unpad_dataproto

if TYPE_CHECKING:
    from .data_concat import BatchData
    from .data_item import DataProtoItem, collate_fn
    from .data_proto import DataProto
    from .folding import fold_batch_dim, unfold_batch_dim
    from .gathering import all_gather_data_proto
    from .merging import list_of_dict_to_dict_of_list, union_numpy_dict, union_tensor_dict, union_two_dict
    from .tensor_parts import (
        deserialize_single_tensor,
        deserialize_tensordict,
        serialize_single_tensor,
        serialize_tensordict,
    )

__all__ = [
    "BatchData",
    "DataProto",
    "DataProtoConfig",
    "DataProtoFuture",
    "DataProtoItem",
    "all_gather_data_proto",
    "collate_fn",
    "deserialize_single_tensor",
    "deserialize_tensordict",
    "fold_batch_dim",
    "list_of_dict_to_dict_of_list",
    "pad_dataproto_to_divisor",
    "serialize_single_tensor",
    "serialize_tensordict",
    "unfold_batch_dim",
    "union_numpy_dict",
    "union_tensor_dict",
    "union_two_dict",
    "unpad_dataproto",
]

_ON_DEMAND = {
    "_padding_size_key": "padding",
    "BatchData": "data_concat",
    "DataProto": "data_proto",
    "DataProtoItem": "data_item",
    "all_gather_data_proto": "gathering",
    "collate_fn": "data_item",
    "deserialize_single_tensor": "tensor_parts",
    "deserialize_tensordict": "tensor_parts",
    "fold_batch_dim": "folding",
    "list_of_dict_to_dict_of_list": "merging",
    "serialize_single_tensor": "tensor_parts",
    "serialize_tensordict": "tensor_parts",
    "unfold_batch_dim": "folding",
    "union_numpy_dict": "merging",
    "union_tensor_dict": "merging",
    "union_two_dict": "merging",
}


def __getattr__(name: str) -> Any:
    if name not in _ON_DEMAND:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_ON_DEMAND[name]}", __name__), name)
