"""How the codec writes torch tensors. Imported only where the process has loaded torch already."""

from __future__ import annotations

import warnings
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import torch

from .errors import WireError
from .wire_numpy import buffer_of, descriptor, parse

warnings.filterwarnings("ignore", message="The given buffer is not writable")

_DTYPES = {
    str(dtype).removeprefix("torch.").encode(): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.q", "torch.bits"))
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_descriptor = lru_cache(maxsize=4096)(descriptor)


def describe(tensor: torch.Tensor) -> tuple[bytes, memoryview]:
    """Descriptor and memory of a dense tensor; copied only where it is not contiguous or not on the CPU."""
    name = _NAMES.get(tensor.dtype)
    if name is None or tensor.layout is not torch.strided:
        raise TypeError(f"the wire carries no tensor of dtype {tensor.dtype} and layout {tensor.layout}; make it dense")
    try:
        array = tensor.numpy()
    except (RuntimeError, TypeError):  # needs a gradient, is elsewhere, is a lazy conjugate, or has no numpy dtype
        array = _as_bytes(tensor)
    return _descriptor(name, tuple(tensor.shape)), buffer_of(array)


def _as_bytes(tensor: torch.Tensor) -> np.ndarray:
    """The memory of any tensor, in C order, as a numpy array of bytes."""
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return dense.reshape(-1).view(torch.uint8).numpy() if dense.numel() else np.empty(0, dtype=np.uint8)


@lru_cache(maxsize=4096)
def _layout(data: bytes) -> tuple[torch.dtype, tuple[int, ...], int]:
    """dtype, shape and size in bytes of what a descriptor describes."""
    name, shape, end = parse(data)
    dtype = _DTYPES.get(name)
    if dtype is None or end != len(data):
        raise WireError(f"tensor descriptor names no dtype of torch: {name!r}")
    return dtype, shape, prod(shape) * dtype.itemsize


def tensor_of(data: bytes, buffer: memoryview, *, copy: bool) -> torch.Tensor:
    """Lay a buffer out as its descriptor says; ``copy`` takes it out of read-only memory.

    Raises:
        WireError: the two do not fit.
    """
    dtype, shape, nbytes = _layout(data)
    if nbytes != buffer.nbytes:
        raise WireError(f"tensor {dtype}{list(shape)} needs {nbytes} bytes, got {buffer.nbytes}")
    try:
        if nbytes == 0:
            return torch.empty(shape, dtype=dtype)
        tensor = torch.frombuffer(buffer, dtype=dtype)
        tensor = tensor if len(shape) == 1 else tensor.view(shape)
    except RuntimeError as error:
        raise WireError(f"tensor {dtype}{list(shape)} cannot be built: {error}") from error
    return tensor.clone() if copy and buffer.readonly else tensor


def jagged_parts(tensor: Any) -> list[Any]:
    """Values, offsets, lengths (None where rows leave no holes) and ragged dimension of a nested tensor."""
    if tensor.layout is not torch.jagged:
        raise TypeError("the wire carries nested tensors of the jagged layout only; pass layout=torch.jagged")
    lengths = tensor.lengths()
    return [tensor.values().detach(), tensor.offsets(), lengths, getattr(tensor, "_ragged_idx", 1)]


def jagged_of(parts: Any) -> torch.Tensor:
    """Build a nested tensor, after a check that its rows lie within its values."""
    values, offsets, lengths, ragged_dim = parts
    if not (isinstance(values, torch.Tensor) and isinstance(ragged_dim, int) and 1 <= ragged_dim <= values.ndim):
        raise WireError("nested tensor without values or with an impossible ragged dimension")
    _check_rows(values.shape[ragged_dim - 1], offsets, lengths)
    return torch.nested.nested_tensor_from_jagged(values, offsets, lengths, jagged_dim=ragged_dim)


def _check_rows(num_values: int, offsets: Any, lengths: Any) -> None:
    """Rows must start at 0, follow one another and end within the values."""
    if not _is_index(offsets) or len(offsets) == 0:
        raise WireError("nested tensor whose offsets are not a vector of integers")
    steps = offsets.diff()
    if int(offsets[0]) != 0 or bool((steps < 0).any()) or int(offsets[-1]) > num_values:
        raise WireError(f"nested tensor whose offsets leave its {num_values} values")
    if lengths is None:
        return
    if not _is_index(lengths) or len(lengths) != len(steps) or bool(((lengths < 0) | (lengths > steps)).any()):
        raise WireError("nested tensor whose lengths leave its rows")


def _is_index(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 1 and value.dtype in (torch.int32, torch.int64)
