"""The vocabulary of the system: types, errors, ports and the batch. Importing it loads neither torch nor ray."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .future import BatchData, DataProtoFuture

if TYPE_CHECKING:
    from .columns import list_of_dict_to_dict_of_list, union_numpy_dict, union_tensor_dict, union_two_dict
    from .data_proto import (
        DataProto,
        DataProtoConfig,
        DataProtoItem,
        collate_fn,
        fold_batch_dim,
        pad_dataproto_to_divisor,
        unfold_batch_dim,
        unpad_dataproto,
    )
    from .serialization import (
        all_gather_data_proto,
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


def __getattr__(name: str) -> Any:
    if name == "_padding_size_key":  # verl's dispatch functions import it from here
        return import_module(".future", __name__)._padding_size_key
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    homes = (import_module(f".{home}", __name__) for home in ("data_proto", "columns", "serialization"))
    return next(getattr(home, name) for home in homes if hasattr(home, name))
