"""Single rows of a `DataProto`, and batches made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict

from .batch_ops import list_of_dict_to_dict_of_list, object_column

if TYPE_CHECKING:
    from .data_proto import DataProto


@dataclass
class DataProtoItem:
    """One row of a `DataProto`."""

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


def collate_fn(x: Sequence[DataProtoItem]) -> DataProto:
    """Stack rows to a batch; their values become object arrays."""
    from .data_proto import DataProto

    batches = [item.batch for item in x]
    batch = None if not batches or batches[0] is None else torch.stack(batches).contiguous()  # type: ignore[arg-type]
    columns = list_of_dict_to_dict_of_list([item.non_tensor_batch for item in x])
    arrays = {key: object_column(values) for key, values in columns.items()}
    return DataProto(batch=batch, non_tensor_batch=arrays)  # type: ignore[arg-type]
