"""Laying batches end to end, and cutting them up, whichever of the kinds that dispatch knows they are."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDictBase

from .errors import BatchError, UsageError
from .future import DataProtoFuture
from .merging import merge_meta_info, same_columns
from .rows import cat_rows, is_nested, take_rows
from .unbuilt_batch import UnbuiltBatch

if TYPE_CHECKING:
    from .data_proto import DataProto


class BatchData:
    """One batch, or a list of them, of any kind: `DataProto`, `DataProtoFuture`, TensorDict, or Ray's reference to one.

    Example: ``BatchData(argument).chunk(chunks=4)``, ``BatchData(results).concat()``.

    Args:
        data: What to cut up, or the list to lay end to end.
    """

    def __init__(self, data: Any) -> None:
        self._data = data

    def is_chunkable(self) -> bool:
        """Whether `chunk` can cut it up."""
        return _is_batch(self._data) or isinstance(self._data, DataProtoFuture)

    def is_concatable(self) -> bool:
        """Whether it is a list of at least one batch, or of references."""
        data = self._data
        return isinstance(data, list | tuple) and len(data) > 0 and (_is_batch(data[0]) or _is_reference(data[0]))

    def chunk(self, chunks: int) -> Sequence[Any]:
        """Cut it into parts of its own kind, as `DataProto.chunk` does; a TensorDict only evenly.

        Raises:
            BatchError: the rows cannot be cut evenly.
            UsageError: it is of none of these kinds.
        """
        if isinstance(self._data, TensorDictBase):
            return chunk_tensordict(self._data, chunks)
        if not self.is_chunkable():
            raise UsageError(f"a {type(self._data).__name__} cannot be cut into parts; give a DataProto or TensorDict")
        return self._data.chunk(chunks=chunks)

    def concat(self) -> Any:
        """Lay the batches of the list end to end; of references, the future of that.

        Raises:
            ValueError: the list is empty.
            UsageError: it holds something else.
        """
        data = self._data
        if not data:
            raise ValueError("an empty list of batches cannot be laid end to end")
        if _is_reference(data[0]):
            return DataProtoFuture.concat(list(data))
        if isinstance(data[0], TensorDictBase):
            return concat_tensordict(data)
        if not _is_batch(data[0]):
            raise UsageError(f"results must be DataProto or TensorDict to be joined, got {type(data[0]).__name__}")
        return type(data[0]).concat(data)


def concat_rows(data: Sequence[DataProto]) -> DataProto:
    """What `DataProto.concat` returns, of at least one batch."""
    tensors = same_columns([part._columns() for part in data], "batch")
    batch = None
    if any(part._batch is not None for part in data):
        joined = {key: cat_rows(parts) for key, parts in tensors.items()}
        batch = UnbuiltBatch(joined, sum(map(len, data)))
    array_parts = same_columns([part.non_tensor_batch for part in data], "non_tensor_batch")
    arrays = {key: np.concatenate(parts, axis=0) for key, parts in array_parts.items()}
    return data[0]._derived(batch, arrays, merge_meta_info([part.meta_info for part in data]))


def chunk_tensordict(data: TensorDictBase, chunks: int) -> list[TensorDictBase]:
    """Cut a TensorDict into equal parts, its nested tensors and non-tensor entries too.

    Raises:
        BatchError: ``chunks`` does not divide the rows, or there are none to cut.
    """
    if not data.batch_size or chunks < 1 or data.batch_size[0] % chunks != 0:
        raise BatchError(f"a TensorDict of batch size {tuple(data.batch_size)} cannot be cut into {chunks} equal parts")
    nested, rest = _apart(data)
    size = data.batch_size[0] // chunks
    slices = [slice(index * size, (index + 1) * size) for index in range(chunks)]
    return [_together(rest[part], {key: take_rows(tensor, part) for key, tensor in nested.items()}) for part in slices]


def concat_tensordict(data: Sequence[TensorDictBase]) -> TensorDictBase:
    """Lay TensorDicts end to end, their nested tensors too; of such without a batch dimension, the first.

    Raises:
        BatchError: they do not have the same entries.
    """
    if not data[0].batch_size:
        return data[0]
    same_columns([dict.fromkeys(map(str, part.keys())) for part in data], "a TensorDict")
    nested, rests = zip(*map(_apart, data), strict=True)
    joined = {key: cat_rows(parts) for key, parts in same_columns(nested, "the nested tensors").items()}
    return _together(torch.cat(list(rests), dim=0), joined)


def _apart(data: TensorDictBase) -> tuple[dict[str, Any], Any]:
    """The nested tensors, which torch neither cuts nor joins, and a TensorDict of all else."""
    nested = {key: tensor for key, tensor in data.items() if is_nested(tensor)}
    return nested, data.exclude(*nested)


def _together(rest: Any, nested: dict[str, Any]) -> TensorDictBase:
    for key, tensor in nested.items():
        rest.set(key, tensor)
    return rest


def _is_batch(data: Any) -> bool:
    from .data_proto import DataProto

    return isinstance(data, DataProto | TensorDictBase)


def _is_reference(data: Any) -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and isinstance(data, ray.ObjectRef)
