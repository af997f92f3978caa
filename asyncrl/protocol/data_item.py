"""Single rows of a `DataProto`, and batches made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tensordict import TensorDict

from .columns import object_array
from .merging import same_columns
from .rows import stack_rows

if TYPE_CHECKING:
    from .data_proto import DataProto


@dataclass
class DataProtoItem:
    """One row of a `DataProto`."""

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


def collate_fn(x: Sequence[DataProtoItem]) -> DataProto:
    """Stack rows to a batch; their values become object arrays.

    Tensors whose first dimensions differ, as the rows of a nested tensor do, become a jagged tensor.
    """
    from .data_proto import DataProto

    tensors = [item.batch for item in x if item.batch is not None]
    batch = None
    if tensors:
        parts = same_columns([dict(row.items()) for row in tensors], "batch")
        batch = TensorDict({key: stack_rows(rows) for key, rows in parts.items()}, batch_size=(len(tensors),))
    values = same_columns([item.non_tensor_batch for item in x], "non_tensor_batch")
    return DataProto(batch=batch, non_tensor_batch={key: object_array(column) for key, column in values.items()})
