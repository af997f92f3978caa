"""The vocabulary of the system: types, errors, ports and the batch. Importing it loads neither torch nor ray."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .future import DataProtoFuture
from .padding import DataProtoConfig, pad_dataproto_to_divisor, unpad_dataproto

if TYPE_CHECKING:
    from .batch_ops import list_of_dict_to_dict_of_list, union_numpy_dict, union_tensor_dict, union_two_dict
    from .data_item import DataProtoItem, collate_fn
    from .data_proto import DataProto
    from .folding import fold_batch_dim, unfold_batch_dim

__all__ = [
    "DataProto",
    "DataProtoConfig",
    "DataProtoFuture",
    "DataProtoItem",
    "collate_fn",
    "fold_batch_dim",
    "list_of_dict_to_dict_of_list",
    "pad_dataproto_to_divisor",
    "unfold_batch_dim",
    "union_numpy_dict",
    "union_tensor_dict",
    "union_two_dict",
    "unpad_dataproto",
]

_WITH_TORCH = {
    "DataProto": "data_proto",
    "DataProtoItem": "data_item",
    "collate_fn": "data_item",
    "fold_batch_dim": "folding",
    "unfold_batch_dim": "folding",
    "list_of_dict_to_dict_of_list": "batch_ops",
    "union_numpy_dict": "batch_ops",
    "union_tensor_dict": "batch_ops",
    "union_two_dict": "batch_ops",
}


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_WITH_TORCH[name]}", __name__), name)
