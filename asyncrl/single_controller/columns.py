"""Functions on the columns (named tensors and arrays) of a batch, and the conversion of tensors to bytes."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, ItemsView, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict, TensorDictBase

from asyncrl.core.errors import BatchError, WireError
from asyncrl.single_controller.codec import Unsupported, buffer_of, descriptor, parse


def as_index(idxs: Any, num_rows: int) -> np.ndarray:
    """Convert the index in ``batch[idxs]`` to row positions: [n] int64 in [0, B), where B is ``num_rows``.

    ``idxs`` is a list, array or tensor: integers in [-B, B), or a mask of B bools. Raises `TypeError` for other values.
    Raises `IndexError` if a position is outside the batch, or if ``idxs`` has a wrong shape.
    """
    index = np.asarray(idxs.detach().cpu() if isinstance(idxs, torch.Tensor) else idxs)
    if index.ndim != 1:
        raise IndexError(f"an index of rows must have one dimension, got shape {index.shape}")
    if index.dtype == bool:
        if len(index) != num_rows:
            raise IndexError(f"a mask must have one bool for each of {num_rows} rows, got {len(index)}")
        return index.nonzero()[0]
    if not index.size:
        return np.empty(0, dtype=np.int64)
    if index.dtype.kind not in "iu":
        raise TypeError(f"rows are indexed by integers or bools, got {index.dtype}")
    index = index.astype(np.int64)
    if index.min() < -num_rows or index.max() >= num_rows:
        raise IndexError(f"rows must be in [{-num_rows}, {num_rows}), got {index.min()} to {index.max()}")
    return np.where(index < 0, index + num_rows, index)


def take_rows(column: Any, rows: slice | np.ndarray) -> Any:
    """Return the selected rows of a column: an array, a dense tensor or a nested tensor.

    ``rows`` is a slice, or [n] int64 positions. A slice of an array or of a dense tensor gives a view. All other
    selections give copies. Raises `ValueError` for a slice of a dense tensor with step < 1.
    """
    if isinstance(column, np.ndarray):
        return column[rows]
    if not is_nested(column):
        return column[rows if isinstance(rows, slice) else torch.from_numpy(rows).to(column.device)]
    parts = rows_of(column)
    return nested_of(parts[rows] if isinstance(rows, slice) else [parts[row] for row in rows.tolist()], column)


def cat_columns(parts: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Concatenate the rows of the tensors or arrays with the same name.

    ``parts`` maps each name to a list of tensors or arrays. Raises `BatchError` if rows do not fit together.
    """
    joined = {}
    for key, columns in parts.items():
        try:
            joined[key] = cat_arrays(columns) if isinstance(columns[0], np.ndarray) else cat_rows(columns)
        except (RuntimeError, ValueError) as error:
            raise BatchError(f"the column `{key}` of the batches cannot be joined: {error}") from error
    return joined


def cat_arrays(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate the rows of arrays.

    Object arrays may differ in the shape of their rows, because `object_array` turns lists of equal length into further
    dimensions. In this case, the result is an object array of shape [B], and each item is one row.
    """
    if len({array.shape[1:] for array in arrays}) == 1 or any(array.dtype != object for array in arrays):
        return np.concatenate(arrays, axis=0)
    return _object_column([row for array in arrays for row in array.tolist()])


def cat_rows(tensors: Sequence[Any]) -> Any:
    """Concatenate the rows of tensors. Raises `BatchError` if some of the tensors are nested and some are dense."""
    if not any(map(is_nested, tensors)):
        return torch.cat(list(tensors), dim=0)
    if not all(map(is_nested, tensors)):
        raise BatchError("nested and dense tensors cannot be joined; make all of them nested")
    return nested_of([row for tensor in tensors for row in rows_of(tensor)], tensors[0])


def is_nested(tensor: Any) -> bool:
    """Return whether a value of any type is a nested tensor of torch."""
    return isinstance(tensor, torch.Tensor) and tensor.is_nested


def rows_of(nested: Any) -> list[torch.Tensor]:
    """Return the rows of a nested tensor as a list of dense tensors, which are views."""
    if nested.layout is not torch.jagged:
        return list(nested.unbind())
    offsets, lengths = nested.offsets(), nested.lengths()
    starts, sizes = offsets[:-1].tolist(), (offsets.diff() if lengths is None else lengths).tolist()
    values, dim = nested.values(), nested._ragged_idx - 1
    return [values.narrow(dim, start, size) for start, size in zip(starts, sizes, strict=True)]


def nested_of(rows: Sequence[torch.Tensor], like: Any) -> Any:
    """Return a nested tensor with the given rows. Its layout and ragged dimension are those of ``like``."""
    if like.layout is not torch.jagged:
        return torch.nested.as_nested_tensor(list(rows), layout=like.layout)
    values, dim = like.values(), like._ragged_idx - 1
    sizes = torch.tensor([0, *(row.shape[dim] for row in rows)], device=values.device)
    offsets = sizes.cumsum(0).to(like.offsets().dtype)
    joined = torch.cat(list(rows), dim=dim) if rows else values.narrow(dim, 0, 0)
    return torch.nested.nested_tensor_from_jagged(joined, offsets, jagged_dim=dim + 1)


def object_array(values: Any) -> np.ndarray:
    """Return ``values`` as a numpy array of dtype object. Sequences of equal length become further dimensions."""
    try:
        return np.array(values, dtype=object)
    except ValueError:  # numpy raises this error if the values are arrays that differ only after the first dimension
        return _object_column(values)


def _object_column(values: Any) -> np.ndarray:
    column = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):
        column[index] = value
    return column


def picked(entries: dict[str, Any], keys: Iterable[str] | None) -> dict[str, Any]:
    """Return the entries with the given keys. Unknown keys are ignored. If ``keys`` is None, return all entries."""
    if keys is None:
        return entries
    wanted = set(keys)
    return {key: value for key, value in entries.items() if key in wanted}


def pop_all(parts: Mapping[str, Any], wanted: Sequence[list[str]]) -> list[dict[str, Any]]:
    """Remove entries from several dicts, and return the removed entries of each dict.

    Args:
        parts: Maps a name, which error messages show, to a dict, a TensorDict or None.
        wanted: The keys to remove from each dict, in the order of ``parts``.

    Raises:
        BatchError: a key is missing. In this case nothing is removed.
    """
    for keys, (name, part) in zip(wanted, parts.items(), strict=True):
        known = [] if part is None else list(part.keys())
        missing = sorted(set(keys) - set(known))
        if missing:
            raise BatchError(f"{name} has no {missing}, only {sorted(known)}")
    return [{key: part.pop(key) for key in keys} for keys, part in zip(wanted, parts.values(), strict=True)]


@dataclass(slots=True)
class UnbuiltBatch:
    """The tensors of a `DataProto` for which no TensorDict is built yet.

    It takes longer to build a TensorDict than to cut tensors into parts with fewer rows. Therefore a `DataProto` builds
    its TensorDict only when ``batch`` is read. Do not change an object of this class. The dataclass is not frozen,
    because constructing a frozen dataclass takes twice the time.

    Attributes:
        tensors: Tensors by name, all of ``num_rows`` rows.
        device: Device of the TensorDict; None for a TensorDict without a device.
        is_borrowed: Whether other processes may read the tensors' memory. If so, the TensorDict gets copies.
    """

    tensors: dict[str, Any]
    num_rows: int
    device: torch.device | None = None
    is_borrowed: bool = False

    @property
    def batch_size(self) -> torch.Size:
        """The batch size that the TensorDict will have, ``[num_rows]``."""
        return torch.Size((self.num_rows,))

    def items(self) -> ItemsView[str, Any]:
        """Return (name, tensor) pairs. Do not write to the tensors."""
        return self.tensors.items()

    def select(self, *keys: str) -> UnbuiltBatch:
        """Return an `UnbuiltBatch` with only the named tensors. Raises `KeyError` if a tensor is missing.

        The tensors are not copied.
        """
        missing = [key for key in keys if key not in self.tensors]
        if missing:
            raise KeyError(f"batch has no {missing}, only {list(self.tensors)}")
        return UnbuiltBatch({key: self.tensors[key] for key in keys}, self.num_rows, self.device, self.is_borrowed)

    def build(self) -> TensorDict:
        """Return the tensors as a TensorDict. If other processes may read the memory, the tensors are copied."""
        return self.clone() if self.is_borrowed else TensorDict(self.tensors, self.batch_size, device=self.device)

    def clone(self) -> TensorDict:
        """Return a TensorDict with copies of the tensors."""
        copies = {key: tensor.clone() for key, tensor in self.tensors.items()}
        return TensorDict(copies, self.batch_size, device=self.device)


def chunk_tensordict(data: TensorDictBase, chunks: int) -> list[TensorDictBase]:
    """Cut the rows of a TensorDict into ``chunks`` TensorDicts of equal size.

    The TensorDict may have nested tensors and non-tensor entries. Raises `BatchError` if there is no batch dimension,
    or if ``chunks`` does not divide the number of rows.
    """
    if not data.batch_size or chunks < 1 or data.batch_size[0] % chunks != 0:
        raise BatchError(f"a TensorDict of batch size {tuple(data.batch_size)} cannot be cut into {chunks} equal parts")
    nested, rest = _apart(data)
    size = data.batch_size[0] // chunks
    slices = [slice(index * size, (index + 1) * size) for index in range(chunks)]
    return [_together(rest[part], {key: take_rows(tensor, part) for key, tensor in nested.items()}) for part in slices]


def concat_tensordict(data: Sequence[TensorDictBase]) -> TensorDictBase:
    """Concatenate the rows of TensorDicts that have the same entries.

    If the first TensorDict has no batch dimension, return this TensorDict. Raises `BatchError` if the entries differ.
    """
    if not data[0].batch_size:
        return data[0]
    same_columns([dict.fromkeys(map(str, part.keys())) for part in data], "a TensorDict")
    nested, rests = zip(*map(_apart, data), strict=True)
    joined = {key: cat_rows(parts) for key, parts in same_columns(nested, "the nested tensors").items()}
    return _together(torch.cat(list(rests), dim=0), joined)


def _apart(data: TensorDictBase) -> tuple[dict[str, Any], Any]:
    """Return a pair: the nested tensors, which torch cannot cut or join, and a TensorDict of the other entries."""
    nested = {key: tensor for key, tensor in data.items() if is_nested(tensor)}
    return nested, data.exclude(*nested)


def _together(rest: Any, nested: dict[str, Any]) -> TensorDictBase:
    for key, tensor in nested.items():
        rest.set(key, tensor)
    return rest


_DROP_ONE = "Drop or rename one of them"


def union_tensor_dict(tensor_dict1: TensorDict | None, tensor_dict2: TensorDict | None) -> TensorDict | None:
    """Insert the tensors of the second TensorDict into the first TensorDict. Return the changed first TensorDict.

    If one TensorDict is None, return the other. Raises `BatchError` if the batch sizes differ, or if tensors of the
    same name differ. NaN equals NaN.
    """
    if tensor_dict1 is None or tensor_dict2 is None:
        return tensor_dict2 if tensor_dict1 is None else tensor_dict1
    if tensor_dict1.batch_size != tensor_dict2.batch_size:
        raise BatchError(
            "the two tensor dicts must have identical batch sizes, "
            f"got {tuple(tensor_dict1.batch_size)} and {tuple(tensor_dict2.batch_size)}"
        )
    own = dict(tensor_dict1.items())
    for key, value in tensor_dict2.items():
        if key in own and not deep_equal(own[key], value):
            raise BatchError(f"the column `{key}` differs between the first and the second batch. {_DROP_ONE}")
    for key, value in tensor_dict2.items():
        if key not in own:
            tensor_dict1[key] = value
    return tensor_dict1


def union_numpy_dict(tensor_dict1: dict[str, np.ndarray], tensor_dict2: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Insert the arrays of the second dict into the first dict. Return the changed first dict.

    Raises `BatchError` if arrays of the same name differ. NaN equals NaN.
    """
    for key in tensor_dict1.keys() & tensor_dict2.keys():
        first, second = tensor_dict1[key], tensor_dict2[key]
        if not isinstance(first, np.ndarray) or not isinstance(second, np.ndarray) or not deep_equal(first, second):
            raise BatchError(f"the column `{key}` differs between the first and the second batch. {_DROP_ONE}")
    tensor_dict1.update(tensor_dict2)
    return tensor_dict1


def union_two_dict(dict1: dict[Any, Any], dict2: dict[Any, Any]) -> dict[Any, Any]:
    """Insert the entries of the second dict into the first dict. Return the changed first dict.

    Raises `BatchError` if both dicts have a key with different values.
    """
    for key in dict1.keys() & dict2.keys():
        if not facts_equal(dict1[key], dict2[key]):
            raise BatchError(
                f"the meta information {key!r} differs between the first and the second batch: "
                f"{dict1[key]!r:.200} and {dict2[key]!r:.200}. {_DROP_ONE}"
            )
    dict1.update(dict2)
    return dict1


def list_of_dict_to_dict_of_list(list_of_dict: Sequence[Mapping[Any, Any]]) -> dict[Any, list[Any]]:
    """Turn a list of dicts (records) into one dict of lists: for each key, the values of all records.

    The result has the keys of the first record. If another record lacks a key, the key's list is shorter. Raises
    `BatchError` if a record has a key that the first record does not have.
    """
    if not list_of_dict:
        return {}
    columns: dict[Any, list[Any]] = {key: [] for key in list_of_dict[0]}
    for record in list_of_dict:
        for key, value in record.items():
            if key not in columns:
                raise BatchError(f"key {key!r} is missing in the first record, which has {list(columns)}")
            columns[key].append(value)
    return columns


def same_columns(records: Sequence[Mapping[Any, Any]], part: str) -> dict[Any, list[Any]]:
    """Turn a list of dicts (records) with the same keys into one dict of lists: per key, the values of all records.

    Raises `BatchError` if the keys differ. ``part`` is the name of the records in the error message.
    """
    for record in records:
        if record.keys() != records[0].keys():
            raise BatchError(
                f"all batches must have the same keys in {part}, got {sorted(records[0])} and {sorted(record)}"
            )
    return list_of_dict_to_dict_of_list(records)


def merge_meta_info(meta_infos: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one dict with the meta information of several batches.

    The entry ``metrics`` becomes a dict of lists: for each metric, the values of all batches. Raises `BatchError` if
    two batches have different values for any other key.
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


def deep_equal(a: Any, b: Any) -> bool:
    """Return whether two values have equal types and values. Containers may be cyclic. NaN equals NaN.

    TensorDicts and dataclasses such as `DataProto` are compared entry by entry.
    """
    return _equal(a, b, frozenset())


def facts_equal(a: Any, b: Any) -> bool:
    """Return whether two values are equal by `deep_equal` or by ``==``. Example: 1 and 1.0 are equal."""
    if deep_equal(a, b):
        return True
    try:
        return bool(a == b)
    except (TypeError, ValueError, RuntimeError, LookupError):  # ``==`` on arrays returns an array, not one bool
        return False


def _equal(a: Any, b: Any, open_pairs: frozenset[tuple[int, int]]) -> bool:
    """Return what `deep_equal` returns. ``open_pairs`` has ids of the enclosing containers, to detect cycles."""
    if a is b:
        return True
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return tensors_equal(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, float | np.floating):
        return bool(a == b or (a != a and b != b))
    if isinstance(a, type) or not (isinstance(a, _CONTAINERS) or is_dataclass(a)):
        return bool(a == b)
    if (id(a), id(b)) in open_pairs:
        return True
    return _containers_equal(a, b, open_pairs | {(id(a), id(b))})


_CONTAINERS = (np.ndarray, Mapping, list, tuple, TensorDictBase)


def _containers_equal(a: Any, b: Any, open_pairs: frozenset[tuple[int, int]]) -> bool:
    if isinstance(a, NonTensorStack):
        return _equal(list(a.tolist()), list(b.tolist()), open_pairs)
    if isinstance(a, TensorDictBase):
        return a.batch_size == b.batch_size and _equal(dict(a.items()), dict(b.items()), open_pairs)
    if is_dataclass(a):
        return all(_equal(getattr(a, each.name), getattr(b, each.name), open_pairs) for each in fields(a))
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(_equal(a[key], b[key], open_pairs) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(_equal(x, y, open_pairs) for x, y in zip(a, b, strict=True))
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype.names:
        return all(_equal(a[name], b[name], open_pairs) for name in a.dtype.names)
    if a.dtype.hasobject:
        return all(_equal(x, y, open_pairs) for x, y in zip(a.flat, b.flat, strict=True))
    return bool(np.array_equal(a, b, equal_nan=a.dtype.kind in "fcmM"))


def tensors_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have the same dtype, shape and values. NaN equals NaN.

    Nested tensors are compared row by row.
    """
    if a.is_nested or b.is_nested:
        if not (a.is_nested and b.is_nested) or a.size(0) != b.size(0):
            return False
        return all(map(tensors_equal, a.unbind(), b.unbind()))
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_floating_point() or a.is_complex():
        return bool(((a == b) | (a.isnan() & b.isnan())).all())
    return torch.equal(a, b)


# Exclude the dtypes that torch cannot copy: quantized dtypes, opaque dtypes, and dtypes smaller than one byte.
_NOT_SENT = re.compile(r"torch\.(q.*|bits.*|u?int[1-7])")
_DTYPES = {
    str(dtype).removeprefix("torch.").encode(): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not _NOT_SENT.fullmatch(str(dtype))
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_AS_NUMPY = {torch.from_numpy(np.empty(0, dtype=name)).dtype: np.dtype(name) for name in "?bhilBHILefdFD"}
_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
_descriptor = lru_cache(maxsize=4096)(descriptor)

Description = bytes | list[Any]

# Torch warns about read-only memory only once per process. Cause the warning here, where it is ignored.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)
    torch.from_numpy(np.frombuffer(b"\0", dtype=np.uint8))


def describe(tensor: Any) -> tuple[Description, list[memoryview]]:
    """Return a pair for sending a tensor: its description (dtype and shape), and a list of memoryviews of its memory.

    A nested tensor has several memoryviews. Only a tensor that is not contiguous or not on the CPU is copied. Raises
    `Unsupported` if the codec cannot send the tensor.
    """
    if not isinstance(tensor, torch.Tensor):
        raise Unsupported(tensor, f"the codec does not support {type(tensor).__name__} as a column of tensors")
    if tensor.is_nested:
        return _describe_nested(tensor)
    name = _NAMES.get(tensor.dtype)
    if name is None or tensor.layout is not torch.strided or type(tensor) not in _TYPES:
        kind = f"{type(tensor).__name__} of dtype {tensor.dtype}, layout {tensor.layout}, device {tensor.device}"
        raise Unsupported(tensor, f"the codec does not support {kind}; make it a dense tensor")
    try:
        return _descriptor(name, tensor.shape), [buffer_of(tensor.numpy())]
    except (RuntimeError, TypeError):  # `tensor.numpy` rejects tensors with gradient or on a GPU, and some dtypes
        pass
    try:
        return _descriptor(name, tensor.shape), [memory_of(tensor).data]
    except (RuntimeError, TypeError) as error:  # `memory_of` rejects tensors on the meta device, and some dtypes
        reason = f"a tensor of dtype {tensor.dtype} on {tensor.device} has no memory to send: {error}"
        raise Unsupported(tensor, reason) from error


def memory_of(tensor: torch.Tensor) -> np.ndarray:
    """Return the bytes of a dense tensor in C order, [nbytes] uint8.

    The result is a view if the tensor is contiguous and on the CPU.
    """
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return dense.reshape(-1).view(torch.uint8).numpy() if dense.numel() else np.empty(0, dtype=np.uint8)


def _describe_nested(tensor: Any) -> tuple[Description, list[memoryview]]:
    if tensor.layout is torch.jagged:
        lengths = tensor.lengths()  # ``lengths`` is None if the rows are contiguous
        dense = [tensor.values(), tensor.offsets(), *([] if lengths is None else [lengths])]
    else:
        dense = list(tensor.unbind())
    described = [describe(part.detach()) for part in dense]
    headers, buffers = [header for header, _ in described], [memory for _, (memory,) in described]
    if tensor.layout is not torch.jagged:
        return [headers], buffers
    return [*headers[:2], headers[2] if len(headers) > 2 else None, tensor._ragged_idx], buffers


@lru_cache(maxsize=4096)
def _layout(data: bytes) -> tuple[torch.dtype, np.dtype | None, tuple[int, ...], int]:
    name, shape, end = parse(data)
    dtype = _DTYPES.get(name)
    if dtype is None or end != len(data):
        raise WireError(f"a tensor has the dtype {name!r}, which torch does not have")
    return dtype, _AS_NUMPY.get(dtype), shape, prod(shape) * dtype.itemsize


def tensor_of(description: Any, take: Callable[[], memoryview], *, copy: bool) -> torch.Tensor:
    """Build a tensor from a description that `describe` returned, and from buffers with the tensor's memory.

    Each call of ``take`` returns the next buffer. The tensor shares memory with the buffer. If ``copy``, a read-only
    buffer is copied. Raises `WireError` if the description and the buffers do not fit together.
    """
    if type(description) is list:
        return _nested_of(description, take, copy=copy)
    dtype, numpy_dtype, shape, nbytes = _layout(description)
    buffer = take()
    if nbytes != buffer.nbytes:
        raise WireError(f"tensor {dtype}{list(shape)} needs {nbytes} bytes, got {buffer.nbytes}")
    try:
        if nbytes == 0:
            return torch.empty(shape, dtype=dtype)
        if numpy_dtype is None:
            tensor = torch.frombuffer(buffer, dtype=dtype).view(shape)
        else:
            tensor = torch.from_numpy(np.ndarray(shape, numpy_dtype, buffer))
    except (RuntimeError, ValueError) as error:
        raise WireError(f"tensor {dtype}{list(shape)} cannot be built: {error}") from error
    return tensor.clone() if copy and buffer.readonly else tensor


def _nested_of(description: list[Any], take: Callable[[], memoryview], *, copy: bool) -> torch.Tensor:
    if len(description) == 1 and type(description[0]) is list:
        rows = [tensor_of(row, take, copy=copy) for row in description[0]]
        if not rows or any(row.is_nested or row.dtype != rows[0].dtype or row.ndim != rows[0].ndim for row in rows):
            raise WireError("the rows of a nested tensor are not dense tensors of equal dtype and number of dimensions")
        with warnings.catch_warnings():  # ignore torch's warning about strided nested tensors
            warnings.simplefilter("ignore")
            return torch.nested.as_nested_tensor(rows, layout=torch.strided)
    values, offsets, lengths, ragged_dim = description
    values, offsets = tensor_of(values, take, copy=copy), tensor_of(offsets, take, copy=copy)
    return jagged_of(values, offsets, None if lengths is None else tensor_of(lengths, take, copy=copy), ragged_dim)


def jagged_of(values: torch.Tensor, offsets: torch.Tensor, lengths: torch.Tensor | None, ragged_dim: Any) -> Any:
    """Return a nested tensor of the jagged layout from its parts, the arguments of ``nested_tensor_from_jagged``.

    Raises `WireError` if the parts do not fit together.
    """
    if values.is_nested or type(ragged_dim) is not int or not 1 <= ragged_dim <= values.ndim:
        raise WireError("a nested tensor has no values, or an impossible ragged dimension")
    _check_rows(values.shape[ragged_dim - 1], offsets, lengths)
    return torch.nested.nested_tensor_from_jagged(values, offsets, lengths, jagged_dim=ragged_dim)


def _check_rows(num_values: int, offsets: torch.Tensor, lengths: torch.Tensor | None) -> None:
    for index in (offsets,) if lengths is None else (offsets, lengths):
        if index.is_nested or index.ndim != 1 or index.dtype not in (torch.int32, torch.int64):
            raise WireError("the offsets or lengths of a nested tensor are not a vector of integers")
    if not len(offsets) or int(offsets[0]) or bool((offsets[1:] < offsets[:-1]).any()) or int(offsets[-1]) > num_values:
        raise WireError(f"the offsets of a nested tensor are outside its {num_values} values")
    if lengths is not None:
        room = offsets.diff()
        if len(lengths) != len(room) or bool(((lengths < 0) | (lengths > room)).any()):
            raise WireError("the lengths of a nested tensor do not fit its offsets")
