"""How the codec writes numpy: a descriptor (dtype and shape) for the header, and the array's own memory."""

from __future__ import annotations

import struct
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from .errors import WireError

_PLAIN_KINDS = frozenset("biufcmMSU")


def is_plain(dtype: np.dtype) -> bool:
    """True for numbers, bools, fixed-width strings, dates and durations: memory without pointers."""
    return dtype.kind in _PLAIN_KINDS


def buffer_of(array: np.ndarray) -> memoryview:
    """The array's memory as bytes, in C order; copied only where the array is not contiguous."""
    if array.nbytes == 0:
        return memoryview(b"")
    if not array.flags.c_contiguous:
        array = np.ascontiguousarray(array)
    try:
        return array.data.cast("B")
    except (TypeError, ValueError):  # dates, strings and long doubles have no buffer format of their own
        return array.reshape(-1).view(np.uint8).data


@lru_cache(maxsize=4096)
def describe(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    """Descriptor: length of the dtype's name, number of dimensions, the name, the dimensions as int64."""
    return descriptor(dtype.str.encode(), shape)


def descriptor(name: bytes, shape: tuple[int, ...]) -> bytes:
    """The descriptor of an array whose dtype has this name."""
    return struct.pack(f"<BB{len(name)}s{len(shape)}q", len(name), len(shape), name, *shape)


def parse(data: bytes) -> tuple[bytes, tuple[int, ...], int]:
    """Read a descriptor: the dtype's name, the shape, and where the descriptor ends."""
    name_length, ndim = data[0], data[1]
    name = data[2 : 2 + name_length]
    end = 2 + name_length + 8 * ndim
    shape = struct.unpack_from(f"<{ndim}q", data, 2 + name_length)
    if shape and min(shape) < 0:
        raise WireError(f"array has a negative dimension: {shape}")
    return name, shape, end


@lru_cache(maxsize=4096)
def _layout(data: bytes) -> tuple[np.dtype, tuple[int, ...], int]:
    """dtype, shape and size in bytes of what a descriptor describes."""
    name, shape, end = parse(data)
    if end != len(data):
        raise WireError(f"array descriptor has {len(data)} bytes, expected {end}")
    dtype = dtype_of(name)
    return dtype, shape, prod(shape) * dtype.itemsize


def array_of(data: bytes, buffer: memoryview) -> np.ndarray:
    """A read-only view of a buffer, laid out as its descriptor says. Raises `WireError` where the two do not fit."""
    dtype, shape, nbytes = _layout(data)
    if nbytes != buffer.nbytes:
        raise WireError(f"array {dtype}{list(shape)} needs {nbytes} bytes, got {buffer.nbytes}")
    if nbytes == 0:
        return np.empty(shape, dtype=dtype)
    array = np.ndarray(shape, dtype, buffer)
    if not buffer.readonly:
        array.flags.writeable = False
    return array


def scalar_of(data: bytes) -> Any:
    """A numpy scalar from its descriptor and its bytes."""
    name, shape, end = parse(data)
    dtype = dtype_of(name)
    if shape or len(data) - end != dtype.itemsize:
        raise WireError(f"scalar {dtype} needs {dtype.itemsize} bytes, got {len(data) - end}")
    if dtype.itemsize == 0:
        return np.zeros((), dtype=dtype)[()]
    return np.frombuffer(data, dtype=dtype, offset=end)[0]


@lru_cache(maxsize=256)
def dtype_of(name: bytes) -> np.dtype:
    """The dtype that `describe` wrote; `WireError` for any other name, above all for those with pointers."""
    try:
        dtype = np.dtype(name.decode("ascii"))
    except (TypeError, ValueError, SyntaxError) as error:
        raise WireError(f"unknown dtype {name!r}") from error
    if not is_plain(dtype) or dtype.str.encode() != name:
        raise WireError(f"dtype {name!r} does not travel")
    return dtype
