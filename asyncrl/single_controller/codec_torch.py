"""How the codec writes torch tensors. Imported only if the process has loaded torch already.

A dense tensor is described by bytes, as an array is; a nested one by a list of the descriptions of its parts.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import torch

from asyncrl.core.errors import WireError
from asyncrl.single_controller.codec_numpy import Unsupported, buffer_of, descriptor, parse

_NOT_SENT = re.compile(r"torch\.(q.*|bits.*|u?int[1-7])")  # quantized, opaque, and below one byte: torch copies none
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

with warnings.catch_warnings():  # torch warns about read-only memory once per process: here, silently
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)
    torch.from_numpy(np.frombuffer(b"\0", dtype=np.uint8))


def describe(tensor: Any) -> tuple[Description, list[memoryview]]:
    """Description and memory of a tensor; copied only if not contiguous or not on the CPU. May raise `Unsupported`."""
    if not isinstance(tensor, torch.Tensor):
        raise Unsupported(tensor, f"the wire carries no {type(tensor).__name__} as a column of tensors")
    if tensor.is_nested:
        return _describe_nested(tensor)
    name = _NAMES.get(tensor.dtype)
    if name is None or tensor.layout is not torch.strided or type(tensor) not in _TYPES:
        kind = f"{type(tensor).__name__} of dtype {tensor.dtype}, layout {tensor.layout}, device {tensor.device}"
        raise Unsupported(tensor, f"the wire carries no {kind}; make it a dense tensor")
    try:
        array = tensor.numpy()
    except (RuntimeError, TypeError):  # needs a gradient, is elsewhere, is a lazy conjugate, or has no numpy dtype
        array = _as_bytes(tensor)
    return _descriptor(name, tensor.shape), [buffer_of(array)]


def _as_bytes(tensor: torch.Tensor) -> np.ndarray:
    """The memory of any tensor, in C order, as a numpy array of bytes."""
    try:
        dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        return dense.reshape(-1).view(torch.uint8).numpy() if dense.numel() else np.empty(0, dtype=np.uint8)
    except (RuntimeError, TypeError) as error:  # the meta device, or a dtype that has no view as bytes
        reason = f"a tensor of dtype {tensor.dtype} on {tensor.device} has no memory to send: {error}"
        raise Unsupported(tensor, reason) from error


def _describe_nested(tensor: Any) -> tuple[Description, list[memoryview]]:
    """Rows of a strided nested tensor; values, offsets, lengths and ragged dimension of a jagged one."""
    if tensor.layout is torch.jagged:
        lengths = tensor.lengths()  # None if the rows are contiguous
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
    """Torch dtype, numpy dtype (None if there is none), shape and number of bytes of a descriptor."""
    name, shape, end = parse(data)
    dtype = _DTYPES.get(name)
    if dtype is None or end != len(data):
        raise WireError(f"tensor descriptor names no dtype of torch: {name!r}")
    return dtype, _AS_NUMPY.get(dtype), shape, prod(shape) * dtype.itemsize


def tensor_of(description: Any, take: Callable[[], memoryview], *, copy: bool) -> torch.Tensor:
    """The tensor of a description and the next buffers, copied from read-only ones if ``copy``. Raises `WireError`."""
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
    """The inverse of `_describe_nested`."""
    if len(description) == 1 and type(description[0]) is list:
        rows = [tensor_of(row, take, copy=copy) for row in description[0]]
        if not rows or any(row.is_nested or row.dtype != rows[0].dtype or row.ndim != rows[0].ndim for row in rows):
            raise WireError("nested tensor whose rows are not dense tensors of one dtype and number of dimensions")
        with warnings.catch_warnings():  # torch discourages strided nested tensors
            warnings.simplefilter("ignore")
            return torch.nested.as_nested_tensor(rows, layout=torch.strided)
    values, offsets, lengths, ragged_dim = description
    values, offsets = tensor_of(values, take, copy=copy), tensor_of(offsets, take, copy=copy)
    return jagged_of(values, offsets, None if lengths is None else tensor_of(lengths, take, copy=copy), ragged_dim)


def jagged_of(values: torch.Tensor, offsets: torch.Tensor, lengths: torch.Tensor | None, ragged_dim: Any) -> Any:
    """A nested tensor. Raises `WireError` unless its rows lie within its values."""
    if values.is_nested or type(ragged_dim) is not int or not 1 <= ragged_dim <= values.ndim:
        raise WireError("nested tensor without values or with an impossible ragged dimension")
    _check_rows(values.shape[ragged_dim - 1], offsets, lengths)
    return torch.nested.nested_tensor_from_jagged(values, offsets, lengths, jagged_dim=ragged_dim)


def _check_rows(num_values: int, offsets: torch.Tensor, lengths: torch.Tensor | None) -> None:
    """Rows must start at 0, follow one another and end within the values."""
    if not _is_index(offsets) or len(offsets) == 0:
        raise WireError("nested tensor whose offsets are not a vector of integers")
    steps = offsets.diff()
    if int(offsets[0]) != 0 or bool((offsets[1:] < offsets[:-1]).any()) or int(offsets[-1]) > num_values:
        raise WireError(f"nested tensor whose offsets leave its {num_values} values")
    if lengths is None:
        return
    if not _is_index(lengths) or len(lengths) != len(steps) or bool(((lengths < 0) | (lengths > steps)).any()):
        raise WireError("nested tensor whose lengths leave its rows")


def _is_index(value: torch.Tensor) -> bool:
    return not value.is_nested and value.ndim == 1 and value.dtype in (torch.int32, torch.int64)
