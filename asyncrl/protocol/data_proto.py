"""`DataProto`, the batch that a controller and its workers exchange: tensors, arrays of anything, and facts."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from . import batch_ops, wire
from .errors import BatchError

AUTO_PADDING_KEY = "_asyncrl_auto_padding"


@dataclass
class DataProtoItem:
    """One row of a `DataProto`."""

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


@dataclass
class DataProto:
    """B rows.

    Attributes:
        batch: Tensors whose first dimension is B; None where there are none.
        non_tensor_batch: Numpy arrays whose first dimension is B; of dtype object for Python values.
        meta_info: What holds for all rows.
    """

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.check_consistency()

    def __len__(self) -> int:
        if self.batch is not None:
            return self.batch.batch_size[0]
        return next((len(array) for array in self.non_tensor_batch.values()), 0)

    def check_consistency(self) -> None:
        """Raise `BatchError` unless all tensors and arrays have the same number of rows."""
        if self.batch is not None and len(self.batch.batch_size) != 1:
            raise BatchError(f"batch must have one batch dimension, got {tuple(self.batch.batch_size)}")
        for key, array in self.non_tensor_batch.items():
            if not isinstance(array, np.ndarray):
                raise BatchError(f"non_tensor_batch[{key!r}] must be a numpy array, got {type(array).__name__}")
            if array.ndim == 0 or len(array) != len(self):
                raise BatchError(f"non_tensor_batch[{key!r}] has shape {array.shape}, the batch has {len(self)} rows")

    @classmethod
    def from_single_dict(
        cls, data: dict[str, Any], meta_info: dict[str, Any] | None = None, auto_padding: bool = False
    ) -> DataProto:
        """Sort the entries of one dict into tensors and numpy arrays."""
        tensors = {key: value for key, value in data.items() if isinstance(value, torch.Tensor)}
        arrays = {key: value for key, value in data.items() if isinstance(value, np.ndarray)}
        for key in data.keys() - tensors.keys() - arrays.keys():
            raise ValueError(f"data[{key!r}] must be a tensor or a numpy array, got {type(data[key]).__name__}")
        return cls.from_dict(tensors=tensors, non_tensors=arrays, meta_info=meta_info, auto_padding=auto_padding)

    @classmethod
    def from_dict(
        cls,
        tensors: dict[str, torch.Tensor] | None = None,
        non_tensors: dict[str, Any] | None = None,
        meta_info: dict[str, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> DataProto:
        """Build a batch from tensors and arrays; lists among the arrays become object arrays."""
        if num_batch_dims < 1 or (non_tensors is not None and num_batch_dims != 1):
            raise BatchError(f"num_batch_dims must be 1 beside arrays, and positive, got {num_batch_dims}")
        sizes = {key: tensor.shape[:num_batch_dims] for key, tensor in (tensors or {}).items()}
        if len(set(sizes.values())) > 1:
            raise BatchError(f"tensors must have the same first dimension, got {sizes}")
        batch = TensorDict(source=tensors, batch_size=next(iter(sizes.values()))) if tensors else None
        arrays = {
            key: value if isinstance(value, np.ndarray) else batch_ops.object_column(value)
            for key, value in (non_tensors or {}).items()
        }
        meta_info = {} if meta_info is None else meta_info
        if auto_padding:
            meta_info[AUTO_PADDING_KEY] = True
        return cls(batch=batch, non_tensor_batch=arrays, meta_info=meta_info)

    def __getitem__(self, item: Any) -> Any:
        if isinstance(item, slice):
            return self.slice(item.start, item.stop, item.step)
        if isinstance(item, list | np.ndarray | torch.Tensor):
            return self.select_idxs(item)
        if isinstance(item, int | np.integer):
            row = None if self.batch is None else self.batch[int(item)]
            values = {key: array[item] for key, array in self.non_tensor_batch.items()}
            return DataProtoItem(batch=row, non_tensor_batch=values, meta_info=self.meta_info)
        raise TypeError(f"a DataProto is indexed by int, slice, list, array or tensor, got {type(item).__name__}")

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> DataProto:
        """Rows ``start:end:step``, sharing memory with this batch."""
        rows = slice(start, end, step)
        batch = None if self.batch is None else self.batch[rows]
        arrays = {key: array[rows] for key, array in self.non_tensor_batch.items()}
        return type(self)(batch=batch, non_tensor_batch=arrays, meta_info=self.meta_info)

    def select_idxs(self, idxs: Any) -> DataProto:
        """The rows at these positions, or where the mask is True; copied."""
        index = torch.as_tensor(idxs)
        index = index if index.dtype == torch.bool else index.to(torch.int64)
        index_np = index.cpu().numpy()
        batch = None
        if self.batch is not None:
            num_rows = int(index.sum()) if index.dtype == torch.bool else len(index)
            rows = {key: tensor[index.to(tensor.device)] for key, tensor in self.batch.items()}
            batch = TensorDict(rows, batch_size=(num_rows,), device=self.batch.device)
        arrays = {key: array[index_np] for key, array in self.non_tensor_batch.items()}
        return type(self)(batch=batch, non_tensor_batch=arrays, meta_info=self.meta_info)

    def select(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
        deepcopy: bool = False,
    ) -> DataProto:
        """The entries named; None takes all of a part."""
        batch = self.batch
        if batch_keys is not None:
            batch = self._need_batch().select(*batch_keys)
        arrays = _picked(self.non_tensor_batch, non_tensor_batch_keys)
        meta_info = _picked(self.meta_info, meta_info_keys)
        if deepcopy:
            arrays, meta_info = copy.deepcopy(arrays), copy.deepcopy(meta_info)
        return type(self)(batch=batch, non_tensor_batch=arrays, meta_info=meta_info)

    def pop(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
    ) -> DataProto:
        """Take the entries named out of this batch, into a new one."""
        tensors = {key: self._need_batch().pop(key) for key in batch_keys or ()}
        arrays = {key: self.non_tensor_batch.pop(key) for key in non_tensor_batch_keys or ()}
        meta_info = {key: self.meta_info.pop(key) for key in meta_info_keys or ()}
        return type(self).from_dict(tensors=tensors, non_tensors=arrays, meta_info=meta_info)

    def union(self, other: DataProto) -> DataProto:
        """Add the other's entries to this batch. Raises `BatchError` where the two have unequal entries."""
        self.batch = batch_ops.union_tensor_dict(self.batch, other.batch)
        self.non_tensor_batch = batch_ops.union_numpy_dict(self.non_tensor_batch, other.non_tensor_batch)
        self.meta_info = batch_ops.union_two_dict(self.meta_info, other.meta_info)
        return self

    def to(self, device: Any) -> DataProto:
        """Move the tensors, in place."""
        if self.batch is not None:
            self.batch = self.batch.to(device)
        return self

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> DataProto:
        """Repeat every row: ``a a b b`` interleaved, ``a b a b`` otherwise."""
        batch = None
        if self.batch is not None:
            rows = {key: batch_ops.repeat_tensor(value, repeat_times, interleave) for key, value in self.batch.items()}
            batch = TensorDict(rows, batch_size=(len(self) * repeat_times,))
        arrays = {
            key: batch_ops.repeat_array(array, repeat_times, interleave) for key, array in self.non_tensor_batch.items()
        }
        return type(self)(batch=batch, non_tensor_batch=arrays, meta_info=self.meta_info)

    def is_padding_enabled(self) -> bool:
        """Whether dispatch may pad this batch to a multiple of the ranks."""
        return bool(self.meta_info.get(AUTO_PADDING_KEY, False))

    def padding(self, padding_size: int, padding_candidate: str = "") -> None:
        """Append copies of the first row, where ``padding_candidate`` is ``first``, or else of the last."""
        if padding_size == 0:
            return
        row = self.select_idxs([0 if padding_candidate == "first" else len(self) - 1])
        padded = type(self).concat([self, row.repeat(padding_size)])
        self.batch, self.non_tensor_batch = padded.batch, padded.non_tensor_batch

    def chunk(self, chunks: int) -> list[DataProto]:
        """Cut the rows into equal parts, sharing memory with this batch."""
        if len(self) % chunks != 0 and not self.is_padding_enabled():
            raise BatchError(f"{len(self)} rows cannot be cut into {chunks} equal parts; pad them, or enable padding")
        size = -(-len(self) // chunks)
        return [self.slice(i * size, (i + 1) * size) for i in range(chunks)]

    def split(self, split_size: int) -> list[DataProto]:
        """Cut the rows into parts of ``split_size``; the last may be shorter."""
        return [self.slice(start, start + split_size) for start in range(0, len(self), split_size)]

    @staticmethod
    def concat(data: Sequence[DataProto]) -> DataProto:
        """Lay batches end to end; metrics in meta_info become lists, all else must be equal."""
        batches = [part.batch for part in data]
        batch = torch.cat(batches, dim=0) if batches and batches[0] is not None else None  # type: ignore[arg-type]
        columns = batch_ops.list_of_dict_to_dict_of_list([part.non_tensor_batch for part in data])
        arrays = {key: np.concatenate(parts, axis=0) for key, parts in columns.items()}
        meta_info = batch_ops.merge_meta_info([part.meta_info for part in data])
        kind = type(data[0]) if data else DataProto
        return kind(batch=batch, non_tensor_batch=arrays, meta_info=meta_info)  # type: ignore[arg-type]

    def _need_batch(self) -> TensorDict:
        if self.batch is None:
            raise BatchError("this DataProto holds no tensors")
        return self.batch

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        foreign: list[Any] = []
        header, *buffers = wire.encode(_plain(self), foreign=foreign)
        if protocol >= 5:
            return _rebuilt, (type(self), header, [pickle.PickleBuffer(b) for b in buffers], foreign)
        return _rebuilt, (type(self), header, [bytes(b) for b in buffers], foreign)


def _plain(data: DataProto) -> dict[str, Any]:
    """The parts of a batch as values of the codec."""
    batch = None if data.batch is None else [dict(data.batch.items()), list(data.batch.batch_size)]
    return {"batch": batch, "arrays": data.non_tensor_batch, "meta": data.meta_info}


def _rebuilt(kind: type[DataProto], header: bytes, buffers: Sequence[Any], foreign: Sequence[Any]) -> DataProto:
    parts = wire.decode([header, *buffers], foreign=foreign, writable=True)
    batch = parts["batch"]
    tensors = None if batch is None else TensorDict(batch[0], batch_size=batch[1])
    return kind(batch=tensors, non_tensor_batch=parts["arrays"], meta_info=parts["meta"])


def _picked(entries: dict[str, Any], keys: Iterable[str] | None) -> dict[str, Any]:
    return entries if keys is None else {key: entries[key] for key in entries if key in set(keys)}


def concat_batches(parts: Sequence[Any]) -> Any:
    """Lay `DataProto`s, or TensorDicts, end to end."""
    if isinstance(parts[0], DataProto):
        return DataProto.concat(parts)
    if isinstance(parts[0], TensorDict):
        return torch.cat(list(parts), dim=0)
    raise TypeError(f"results must be DataProto or TensorDict to be joined, got {type(parts[0]).__name__}")
