"""The class `DataProto`: a batch of rows, which a controller and its workers exchange."""

from __future__ import annotations

import copy
import logging
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch.utils.data import DataLoader

from asyncrl.core.errors import BatchError
from asyncrl.single_controller import columns, serialization
from asyncrl.single_controller.codec import decode, encode
from asyncrl.single_controller.columns import UnbuiltBatch, is_nested, object_array, same_columns, take_rows

_log = logging.getLogger(__name__)


class _CheckedSwitches(type):
    def __setattr__(cls, name: str, value: Any) -> None:
        if name == "auto_padding" and not isinstance(value, bool):
            raise BatchError(f"DataProtoConfig.auto_padding must be a bool, got {value!r}")
        super().__setattr__(name, value)


class DataProtoConfig(metaclass=_CheckedSwitches):
    """Settings for all `DataProto` batches in this process.

    Attributes:
        auto_padding: Whether to pad each batch whose rows cannot be divided evenly over the ranks of a call.
        auto_padding_key: Key in ``meta_info`` that enables padding for one batch. verl uses the same key.
    """

    auto_padding: bool = False
    auto_padding_key: str = "_verl_auto_padding"


class _BuiltWhenRead:
    """Descriptor for the field ``batch`` of `DataProto`. The first read builds a TensorDict from the tensors."""

    def __get__(self, data: Any, kind: Any = None) -> Any:
        if data is not None and isinstance(data._batch, UnbuiltBatch):
            data._batch = data._batch.build()
        return None if data is None else data._batch

    def __set__(self, data: Any, batch: Any) -> None:
        data._batch = batch


_BUILT_WHEN_READ: Any = _BuiltWhenRead()


@dataclass
class DataProtoItem:
    """One row of a `DataProto`."""

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False, repr=False)
class DataProto:
    """A batch of B rows: tensors and numpy arrays by name, and values for the whole batch.

    A batch that arrived through Ray is decoded when an attribute is first read. Other processes may read the memory of
    such a batch. Therefore the first read of ``batch`` copies the tensors, and the caller may write to the copies.

    Args:
        batch: Tensors with first dimension B; None if there are no tensors.
        non_tensor_batch: Numpy arrays with first dimension B, of dtype object for Python values.
        meta_info: Values that apply to all rows.

    Raises:
        BatchError: the columns do not have the same number of rows, or `check_consistency` finds another fault.
    """

    batch: TensorDict | None = _BUILT_WHEN_READ
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.non_tensor_batch is None:  # callers of verl pass None for an empty dict
            self.non_tensor_batch = {}
        if self.meta_info is None:
            self.meta_info = {}
        self.check_consistency()

    if TYPE_CHECKING:
        # `_batch` has a TensorDict, an `UnbuiltBatch` or None.
        _batch: ClassVar[Any]
        # `_arrived` has the received message until the batch is decoded.
        _arrived: ClassVar[serialization.Message]
    else:

        def __getattr__(self, name: str) -> Any:
            """Return the attribute ``name``. If this batch is still an encoded message, decode the message first."""
            message = vars(self).get("_arrived")
            if message is not None:  # the message is None if another thread has already decoded it
                header, buffers, foreign = message
                parts = decode([header, *buffers], foreign=foreign, writable=True)
                for field_name, value in vars(serialization.from_parts(type(self), parts)).items():
                    vars(self).setdefault(field_name, value)
                vars(self).pop("_arrived", None)
            if name not in self.__dict__:
                raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
            return self.__dict__[name]

    def __len__(self) -> int:
        if self._batch is not None:
            return self._batch.batch_size[0]
        return next((len(array) for array in self.non_tensor_batch.values() if array.ndim), 0)

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {len(self)} rows\n{self.get_data_info()}"

    def check_consistency(self) -> None:
        """Check that all columns have the same number of rows, and that ``batch`` has exactly one batch dimension.

        Raises `BatchError` if this is not true, or if an entry of ``non_tensor_batch`` is not a numpy array.
        """
        if self._batch is not None and len(self._batch.batch_size) != 1:
            raise BatchError(f"batch must have one batch dimension, got {tuple(self._batch.batch_size)}")
        for key, array in self.non_tensor_batch.items():
            if not isinstance(array, np.ndarray):
                raise BatchError(f"non_tensor_batch[{key!r}] must be a numpy array, got {type(array).__name__}")
            if array.ndim == 0 or len(array) != len(self):
                raise BatchError(f"non_tensor_batch[{key!r}] must have {len(self)} rows, got shape {array.shape}")

    @classmethod
    def from_single_dict(
        cls, data: dict[str, Any], meta_info: dict[str, Any] | None = None, auto_padding: bool = False
    ) -> DataProto:
        """Build a batch from a dict of tensors and numpy arrays, which become its columns.

        ``meta_info`` has values for the whole batch. With ``auto_padding``, calls of a worker group may append rows to
        the batch. Raises `ValueError` for an entry that is neither a tensor nor an array.
        """
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
        """Build a batch from tensors, arrays and lists with the same number of rows. Lists become object arrays.

        The first ``num_batch_dims`` dimensions of all tensors must be equal. ``num_batch_dims`` must be 1 if there are
        arrays. With ``auto_padding``, calls of a worker group may append rows to the batch.
        """
        if num_batch_dims < 1 or (non_tensors and num_batch_dims != 1):
            raise BatchError(
                f"num_batch_dims must be positive, and must be 1 if there are arrays; got {num_batch_dims}"
            )
        if not isinstance(non_tensors, Mapping | None):
            raise BatchError(f"non_tensors must be a dict of arrays or lists, got {type(non_tensors).__name__}")
        sizes = {
            key: (tensor.size(0),) if is_nested(tensor) else tuple(tensor.shape[:num_batch_dims])
            for key, tensor in (tensors or {}).items()
        }
        for key, size in sizes.items():
            if not size:
                raise BatchError(f"tensor {key!r} has no dimension for the rows; put a scalar tensor into meta_info")
        if len(set(sizes.values())) > 1:
            raise BatchError(f"tensors must have the same first dimension, got {sizes}")
        batch = TensorDict(source=dict(tensors), batch_size=next(iter(sizes.values()))) if tensors else None
        arrays = {
            key: value if isinstance(value, np.ndarray) else object_array(value)
            for key, value in (non_tensors or {}).items()
        }
        meta_info = {} if meta_info is None else meta_info
        if auto_padding:
            meta_info[DataProtoConfig.auto_padding_key] = True
        return cls(batch=batch, non_tensor_batch=arrays, meta_info=meta_info)

    @classmethod
    def from_tensordict(
        cls, tensor_dict: TensorDict, meta_info: dict[str, Any] | None = None, num_batch_dims: int = 1
    ) -> DataProto:
        """Build a batch from the entries of a TensorDict.

        `NonTensorStack` entries become object arrays, and `NonTensorData` entries become meta information. The first
        ``num_batch_dims`` dimensions of all tensors must be equal.
        """
        tensors: dict[str, Any] = {}
        arrays: dict[str, Any] = {}
        facts = dict(meta_info or {})
        for key in map(str, tensor_dict.keys()):
            value = tensor_dict.get(key)
            if isinstance(value, torch.Tensor):
                tensors[key] = value
            elif isinstance(value, NonTensorStack):
                arrays[key] = object_array([item.tolist() for item in value])
            elif isinstance(value, NonTensorData):
                facts[key] = value.data
            else:
                kind = type(value).__name__
                raise BatchError(f"entry {key!r} is a {kind}; a DataProto can hold only tensors and non-tensor data")
        if not tensors and not arrays:
            return cls(TensorDict({}, tensor_dict.batch_size) if tensor_dict.batch_size else None, meta_info=facts)
        return cls.from_dict(tensors, arrays, facts, num_batch_dims)

    def to_tensordict(self) -> TensorDict:
        """Return the tensors, arrays and meta information as one TensorDict, the inverse of `from_tensordict`.

        Raises `BatchError` if a name occurs twice, for example as a tensor and as meta information.
        """
        batch_size = (len(self),) if self.batch is not None or self.non_tensor_batch else ()
        names = [*self.columns(), *self.non_tensor_batch, *self.meta_info]
        if len(set(names)) < len(names):
            raise BatchError(
                f"names must be unique in a batch, got twice: {sorted({n for n in names if names.count(n) > 1})}"
            )
        joined: Any = TensorDict(self.columns(), batch_size=batch_size)
        for key, array in self.non_tensor_batch.items():
            values: list[Any] = [NonTensorData(value) for value in array]
            joined.set(key, NonTensorStack.from_list(values))
        for key, value in self.meta_info.items():
            joined.set(key, NonTensorData(value, batch_size=joined.batch_size))
        return joined

    def __getitem__(self, item: Any) -> Any:
        if isinstance(item, slice):
            return self.slice(item.start, item.stop, item.step)
        if isinstance(item, np.ndarray | torch.Tensor) and item.ndim == 0:
            item = item.item()
        if isinstance(item, list | np.ndarray | torch.Tensor):
            return self.select_idxs(item)
        if isinstance(item, int | np.integer):
            if not -len(self) <= item < len(self):
                raise IndexError(f"row {item} of a batch of {len(self)} rows")
            row = None if self.batch is None else self.batch[int(item)]
            values = {key: array[item] for key, array in self.non_tensor_batch.items()}
            return DataProtoItem(batch=row, non_tensor_batch=values, meta_info=self.meta_info)
        raise TypeError(f"a DataProto is indexed by int, slice, list, array or tensor, got {type(item).__name__}")

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> DataProto:
        """Return a batch with the rows ``start:end:step``.

        The rows share memory with this batch, except rows of nested tensors. If ``step`` is negative, all rows are
        copies.
        """
        rows = slice(start, end, step)
        positions = range(*rows.indices(len(self)))
        if positions.step < 0:
            return self.select_idxs(list(positions))
        return self._mapped(lambda _, column: take_rows(column, rows), len(positions), shares_memory=True)

    def select_idxs(self, idxs: Any) -> DataProto:
        """Return a batch with copies of the selected rows.

        ``idxs`` has the positions of the rows, or is a mask with one bool per row. Raises the errors of
        `columns.as_index`.
        """
        index = columns.as_index(idxs, len(self))
        return self._mapped(lambda _, column: take_rows(column, index), len(index))

    def select(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
        deepcopy: bool = False,
    ) -> DataProto:
        """Return a batch with only the named tensors, arrays and entries of ``meta_info``.

        An argument that is None selects all entries of its dict. The columns share memory with this batch. With
        ``deepcopy``, the arrays and the meta information are copies, and the tensors still share memory.
        """
        batch = self._shared_batch()
        if batch_keys is not None:
            keys = tuple(batch_keys)
            if keys and batch is None:
                raise BatchError(f"this DataProto has no tensors, so it has no {list(keys)}")
            batch = None if batch is None else batch.select(*keys)
        arrays = columns.picked(self.non_tensor_batch, non_tensor_batch_keys)
        meta_info = columns.picked(self.meta_info, meta_info_keys)
        if deepcopy:
            arrays, meta_info = copy.deepcopy(arrays), copy.deepcopy(meta_info)
        return self._derived(batch, arrays, meta_info)

    def pop(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
    ) -> DataProto:
        """Remove the named tensors, arrays and entries of ``meta_info`` from this batch.

        Returns a batch with the removed entries. An argument that is None removes nothing. Raises `BatchError`
        if a name is missing.
        """
        parts = {"batch": self.batch, "non_tensor_batch": self.non_tensor_batch, "meta_info": self.meta_info}
        wanted = (batch_keys, non_tensor_batch_keys, meta_info_keys)
        tensors, arrays, meta_info = columns.pop_all(parts, [list(dict.fromkeys(keys or ())) for keys in wanted])
        return type(self).from_dict(tensors=tensors, non_tensors=arrays, meta_info=meta_info)

    def rename(self, old_keys: str | list[str] | None = None, new_keys: str | list[str] | None = None) -> DataProto:
        """Rename tensors in place, and return this batch. Arrays and meta information keep their names.

        Each of ``old_keys`` and ``new_keys`` is one name or a list of names.
        """
        if self.batch is None:
            raise BatchError("this DataProto has no tensors, so there is nothing to rename")
        for keys in (old_keys, new_keys):
            if not isinstance(keys, str | list | tuple):
                raise TypeError(f"names must be a string or a list of strings, got {type(keys).__name__}")
        old, new = ([keys] if isinstance(keys, str) else list(keys or ()) for keys in (old_keys, new_keys))
        if len(old) != len(new) or len(set(old)) != len(old) or len(set(new)) != len(new):
            raise ValueError(f"rename needs one new name per old name, and no repeated names; got {old} and {new}")
        # Remove all tensors first, because the new name of one tensor may be the old name of another.
        (tensors,) = columns.pop_all({"batch": self.batch}, [old])
        for key, tensor in zip(new, tensors.values(), strict=True):
            self.batch.set(key, tensor)
        return self

    def union(self, other: DataProto) -> DataProto:
        """Add the columns and the meta information of another batch to this batch, in place. Return this batch.

        Raises `BatchError` if entries of the same name differ, or if the batches do not have the same number of rows.
        After an error, this batch is unchanged.
        """
        sizes = [len(data) for data in (self, other) if data._batch is not None or data.non_tensor_batch]
        if len(set(sizes)) > 1:
            raise BatchError(f"union needs identical batch sizes, got {sizes[0]} and {sizes[1]} rows")
        arrays = columns.union_numpy_dict(dict(self.non_tensor_batch), other.non_tensor_batch)
        meta_info = columns.union_two_dict(dict(self.meta_info), other.meta_info)
        self.batch = columns.union_tensor_dict(self.batch, other.batch)
        self.non_tensor_batch.update(arrays)
        self.meta_info.update(meta_info)
        return self

    def reorder(self, indices: Any) -> None:
        """Replace the rows, in place, by the rows at the positions ``indices``."""
        reordered = self.select_idxs(indices)
        self.batch, self.non_tensor_batch = reordered._batch, reordered.non_tensor_batch

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> DataProto:
        """Return a batch with ``repeat_times`` copies of every row: ``a a b b`` if ``interleave``, else ``a b a b``."""
        rows = np.arange(len(self))
        return self.select_idxs(np.repeat(rows, repeat_times) if interleave else np.tile(rows, repeat_times))

    def sample_level_repeat(self, repeat_times: Any) -> DataProto:
        """Return a batch with ``repeat_times[i]`` adjacent copies of row i. ``repeat_times`` has B integers >= 0."""
        counts = np.asarray(repeat_times.detach().cpu() if isinstance(repeat_times, torch.Tensor) else repeat_times)
        if counts.shape != (len(self),):
            raise BatchError(f"repeat_times must have one count for each of {len(self)} rows, got shape {counts.shape}")
        if len(self) and (counts.dtype.kind not in "iu" or counts.min() < 0):
            raise BatchError(f"repeat_times must be integers >= 0, got {counts.dtype} from {counts.min()}")
        return self.select_idxs(np.repeat(np.arange(len(self)), counts.astype(np.int64)))

    def unfold_column_chunks(self, n_split: int, split_keys: list[str] | None = None) -> DataProto:
        """Return a batch in which each row of the named columns is cut into ``n_split`` adjacent rows.

        The second dimension is cut: ``[B, n * m]`` becomes ``[B * n, m]``. The rows of the other columns are repeated.

        Raises `BatchError` if ``n_split`` does not divide the second dimension, or if this dimension differs between
        rows.
        """
        repeated, split = np.repeat(np.arange(len(self)), n_split), set(split_keys or ())

        def unfold(key: str, column: Any) -> Any:
            if key not in split:
                return take_rows(column, repeated)
            if is_nested(column) or column.ndim < 2:
                raise BatchError(
                    f"{key!r} has no second dimension of the same length in all rows; remove {key!r} from split_keys"
                )
            if column.shape[1] % n_split != 0:
                raise BatchError(
                    f"the second dimension of {key!r} must be a multiple of n_split={n_split}, got {column.shape[1]}"
                )
            return column.reshape(len(repeated), column.shape[1] // n_split, *column.shape[2:])

        return self._mapped(unfold, len(repeated), shares_memory=True)

    def to(self, device: Any) -> DataProto:
        """Move the tensors of this batch to a device. Return this batch."""
        if self.batch is not None:
            self.batch = self.batch.to(device)
        return self

    def is_padding_enabled(self) -> bool:
        """Return whether calls of a worker group may append rows, so that all ranks get the same number of rows."""
        return bool(self.meta_info.get(DataProtoConfig.auto_padding_key) or DataProtoConfig.auto_padding)

    def padding(self, padding_size: int, padding_candidate: str = "") -> None:
        """Append ``padding_size`` copies of the last row to this batch, in place.

        If ``padding_candidate`` is ``first``, append copies of the first row instead. Raises `BatchError` if there is
        no row to copy, or ``padding_size`` is negative.
        """
        if padding_size < 0:
            raise BatchError(f"padding_size must be >= 0, got {padding_size}")
        if padding_size == 0:
            return
        if not len(self):
            raise BatchError(f"an empty batch has no row to append {padding_size} times")
        row = 0 if padding_candidate == "first" else len(self) - 1
        self.reorder([*range(len(self)), *[row] * padding_size])

    def chunk(self, chunks: int) -> list[DataProto]:
        """Cut the rows into a list of ``chunks`` parts. The parts have equal size if padding is not enabled.

        The parts share memory with this batch, except rows of nested tensors.

        If padding is enabled, the parts may differ in size. A batch with tensors is then cut as ``torch.chunk`` does,
        with empty parts at the end if parts are missing. A batch without tensors is cut as ``numpy.array_split`` does.

        Raises `BatchError` if ``chunks`` is below 1, or if padding is not enabled and ``chunks`` does not divide the
        number of rows.
        """
        if chunks < 1 or (len(self) % chunks != 0 and not self.is_padding_enabled()):
            raise BatchError(f"{len(self)} rows cannot be cut into {chunks} equal parts; pad them or enable padding")
        num_rows, size = len(self), -(-len(self) // chunks)
        ends = [min((index + 1) * size, num_rows) for index in range(chunks)]
        if self._batch is None:
            ends = np.cumsum([len(part) for part in np.array_split(np.arange(num_rows), chunks)]).tolist()
        return [self.slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]

    def split(self, split_size: int) -> list[DataProto]:
        """Cut the rows into a list of batches of ``split_size`` rows. The last batch may be shorter.

        The batches share memory with this batch, except rows of nested tensors. Raises `BatchError` if ``split_size``
        is below 1.
        """
        if split_size < 1:
            raise BatchError(f"split_size must be >= 1, got {split_size}")
        return [self.slice(start, start + split_size) for start in range(0, len(self), split_size)]

    @staticmethod
    def concat(data: Sequence[DataProto]) -> DataProto:
        """Concatenate the rows of batches with the same columns. An empty list gives an empty batch.

        In the meta information, ``metrics`` becomes a dict of lists: for each metric, the values of all batches.

        Raises `BatchError` if the batches have different columns, or if the rows of a column do not fit together. Also
        raises `BatchError` if two batches have different values for a key of the meta information, except ``metrics``.
        """
        if not data:
            return DataProto()
        tensors = same_columns([part.columns() for part in data], "batch")
        batch = None
        batches = [part._batch for part in data if part._batch is not None]
        if batches:
            joined = columns.cat_columns(tensors)
            device = batches[0].device if len({part.device for part in batches}) == 1 else None
            batch = UnbuiltBatch(joined, sum(map(len, data)), device)
        array_parts = same_columns([part.non_tensor_batch for part in data], "non_tensor_batch")
        arrays = columns.cat_columns(array_parts)
        return data[0]._derived(batch, arrays, columns.merge_meta_info([part.meta_info for part in data]))

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: dict[str, Any] | None = None,
    ) -> Iterator[DataProto]:
        """Return an iterator over mini-batches of ``mini_batch_size`` rows, for ``epochs`` passes over the rows.

        A ``torch.utils.data.DataLoader`` with the options ``dataloader_kwargs`` chooses the rows. By default the rows
        keep their order. ``seed`` is the seed of the order if ``shuffle`` is True. The arrays of the mini-batches
        have dtype object. Raises `BatchError` if ``mini_batch_size`` does not divide the number of rows.
        """
        if mini_batch_size < 1 or len(self) % mini_batch_size != 0:
            raise BatchError(f"mini_batch_size must divide the {len(self)} rows, got {mini_batch_size}")
        if not len(self):  # a DataLoader cannot shuffle an empty data set
            return iter(())

        def collate(rows: list[int]) -> DataProto:
            mini_batch = self.select_idxs(rows)
            arrays = mini_batch.non_tensor_batch
            mini_batch.non_tensor_batch = {key: object_array(list(array)) for key, array in arrays.items()}
            return mini_batch

        generator = None if seed is None else torch.Generator().manual_seed(seed)
        loader = DataLoader(
            range(len(self)),  # type: ignore[arg-type]
            batch_size=mini_batch_size,
            collate_fn=collate,
            generator=generator,
            **(dataloader_kwargs or {}),
        )
        return (mini_batch for _ in range(epochs) for mini_batch in loader)

    def get_data_info(self) -> str:
        """Return a text that describes the batch. The text has three headings, each followed by one line per entry.

        - ``batch``: name, shape, dtype and device of each tensor. For a nested tensor, the line has the number of rows
          and the layout instead of the shape.
        - ``non_tensor_batch``: name, shape and dtype of each array.
        - ``meta_info``: name of each entry, and type of its value.
        """
        shapes = {
            key: f"({t.size(0)}, {str(t.layout).removeprefix('torch.')})" if is_nested(t) else str(tuple(t.shape))
            for key, t in self.columns().items()
        }
        tensors = [f"  {key}: {shapes[key]} ({t.dtype}) {t.device}" for key, t in self.columns().items()]
        arrays = [f"  {key}: ndarray{array.shape} ({array.dtype})" for key, array in self.non_tensor_batch.items()]
        facts = [f"  {key}: {_type_name(value)}" for key, value in self.meta_info.items()]
        return "\n".join(["batch", *tensors, "non_tensor_batch", *arrays, "meta_info", *facts])

    @property
    def nbytes(self) -> int:
        """Size of the tensors and arrays in bytes. The size of an object array includes only its pointers."""
        return sum(value.nbytes for value in [*self.columns().values(), *self.non_tensor_batch.values()])

    def save_to_disk(self, filepath: str | Path) -> None:
        """Write the batch to a file atomically.

        Raises `WireError` if the codec does not support a value. The message says where the value is in the batch.
        """
        frames = encode(serialization.parts_of(self))
        partial = Path(f"{filepath}.partial")
        with open(partial, "wb") as file:
            serialization.write_frames(file, frames)
        os.replace(partial, filepath)

    @classmethod
    def load_from_disk(cls, filepath: str | Path) -> DataProto:
        """Return the batch that `save_to_disk` wrote to a file. Raises `WireError` if the file has other content."""
        frames = serialization.read_frames(np.fromfile(filepath, dtype=np.uint8).data)
        parts = decode(frames, writable=True)
        return serialization.from_parts(cls, parts, is_borrowed=False)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle the parts that `__getstate__` returns. With pickle protocol 5, the buffers can be sent out-of-band."""
        header, buffers, foreign = self.__getstate__()
        wrap = pickle.PickleBuffer if protocol >= 5 else bytearray
        return serialization.rebuild, (type(self), header, [wrap(buffer) for buffer in buffers], foreign)

    def __getstate__(self) -> serialization.Message:
        """Return the encoded batch as a tuple: header, buffers, and values that the codec does not support.

        If the batch arrived as a message and is not decoded yet, return the message.
        """
        if vars(self).keys() == {"_arrived"}:
            return self._arrived
        foreign: list[Any] = []  # `encode` appends unsupported values to this list, and Ray pickles the list
        header, *buffers = encode(serialization.parts_of(self), foreign=foreign)
        return header, buffers, foreign

    def __setstate__(self, message: serialization.Message) -> None:
        self.__dict__ = {"_arrived": message}

    def __copy__(self) -> DataProto:
        return self._derived(self._shared_batch(), dict(self.non_tensor_batch), dict(self.meta_info))

    def __deepcopy__(self, memo: dict[int, Any]) -> DataProto:
        batch = None if self._batch is None else self._batch.clone()
        arrays, meta_info = copy.deepcopy((self.non_tensor_batch, self.meta_info), memo)
        return self._derived(batch, arrays, meta_info)

    def _derived(self, batch: Any, arrays: dict[str, np.ndarray], meta_info: dict[str, Any]) -> DataProto:
        return type(self)(batch=batch, non_tensor_batch=arrays, meta_info=meta_info)

    def _mapped(self, change: Callable[[str, Any], Any], num_rows: int, *, shares_memory: bool = False) -> DataProto:
        batch = None
        if self._batch is not None:
            is_borrowed = shares_memory and isinstance(self._batch, UnbuiltBatch) and self._batch.is_borrowed
            tensors = {key: change(key, tensor) for key, tensor in self._batch.items()}
            batch = UnbuiltBatch(tensors, num_rows, self._batch.device, is_borrowed)
        arrays = {key: change(key, array) for key, array in self.non_tensor_batch.items()}
        return self._derived(batch, arrays, self.meta_info)

    def _shared_batch(self) -> Any:
        """Return the tensors of this batch, for a new batch that shares memory with this batch.

        If other processes may read the memory, return an `UnbuiltBatch`. Then both batches build their own TensorDict
        with copies of the tensors when their ``batch`` is read. Otherwise return the TensorDict of this batch.
        """
        return self._batch if isinstance(self._batch, UnbuiltBatch) and self._batch.is_borrowed else self.batch

    def columns(self) -> dict[str, Any]:
        """Return the tensors of the batch by name, without a copy. Other processes may read the tensors' memory."""
        return {} if self._batch is None else dict(self._batch.items())


def collate_fn(x: Sequence[DataProtoItem]) -> DataProto:
    """Stack a list of rows into a batch.

    Tensors of equal shape are stacked, and tensors of different lengths become a jagged nested tensor. Other values
    become object arrays. The meta information of the rows is dropped.
    """
    tensors = [item.batch for item in x if item.batch is not None]
    batch = None
    if tensors:
        parts = same_columns([dict(row.items()) for row in tensors], "batch")
        columns_of_rows = {
            key: torch.stack(rows)
            if len({row.shape for row in rows}) == 1
            else torch.nested.as_nested_tensor(rows, layout=torch.jagged)
            for key, rows in parts.items()
        }
        batch = TensorDict(columns_of_rows, batch_size=(len(tensors),))
    values = same_columns([item.non_tensor_batch for item in x], "non_tensor_batch")
    return DataProto(batch=batch, non_tensor_batch={key: object_array(column) for key, column in values.items()})


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Append copies of rows, from the first row on, until ``size_divisor`` divides the number of rows.

    Returns the new batch and the number of appended rows. If this number is 0, the batch is ``data`` itself.
    """
    if not hasattr(data, "select_idxs") or size_divisor < 1:
        raise BatchError(f"a DataProto and a divisor >= 1 are needed, got {type(data).__name__} and {size_divisor}")
    pad_size = -len(data) % size_divisor
    if len(data) == 0:
        _log.warning("an empty DataProto cannot be padded to a multiple of %d; it stays empty", size_divisor)
    if pad_size == 0:
        return data, 0
    return data.select_idxs(np.resize(np.arange(len(data)), len(data) + pad_size)), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Return the batch without its last ``pad_size`` rows, which `pad_dataproto_to_divisor` appended."""
    return data[:-pad_size] if pad_size else data


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """Return a batch whose columns are reshaped from ``[B, ...]`` to ``[new_batch_size, B // new_batch_size, ...]``.

    Raises `BatchError` for nested tensors, or if ``new_batch_size`` does not divide B.
    """
    if new_batch_size < 1 or len(data) % new_batch_size != 0:
        raise BatchError(f"new_batch_size must divide the {len(data)} rows, got {new_batch_size}")
    shape = (new_batch_size, len(data) // new_batch_size)

    def fold(key: str, column: Any) -> Any:
        return _dense(key, column).reshape(*shape, *column.shape[1:])

    return data._mapped(fold, new_batch_size, shares_memory=True)


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """Return a batch in which the first ``batch_dims`` dimensions of each column are joined.

    Example: ``[A, B, ...]`` becomes ``[A * B, ...]``.

    Raises `BatchError` for nested tensors, or if a column has fewer than ``batch_dims`` dimensions.
    """

    def unfold(key: str, column: Any) -> Any:
        if _dense(key, column).ndim < batch_dims:
            raise BatchError(f"{key!r} must have batch_dims={batch_dims} or more dimensions, got {column.ndim}")
        return column.reshape(prod(column.shape[:batch_dims]), *column.shape[batch_dims:])

    columns_now = [*data.columns().items(), *data.non_tensor_batch.items()]
    num_rows = len(unfold(*columns_now[0])) if columns_now else len(data)
    return data._mapped(unfold, num_rows, shares_memory=True)


def _dense(key: str, column: Any) -> Any:
    if is_nested(column):
        raise BatchError(f"{key!r} is a nested tensor, which cannot be reshaped; remove {key!r} with pop")
    return column


def _type_name(value: Any) -> str:
    """Return the type of a value and of its items, as text. Example: ``dict[str: list[int]]``."""
    if isinstance(value, list):
        return f"list[{'|'.join(sorted({_type_name(item) for item in value[:3]})) or '...'}]"
    if isinstance(value, tuple):
        return f"tuple({', '.join(map(_type_name, value))})"
    if isinstance(value, dict) and value:
        key, item = next(iter(value.items()))
        return f"dict[{_type_name(key)}: {_type_name(item)}]"
    if isinstance(value, np.ndarray):
        return f"ndarray{value.shape} ({value.dtype})"
    return type(value).__name__
