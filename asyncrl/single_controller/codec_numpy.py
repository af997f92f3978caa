"""How the codec writes numpy arrays: a descriptor (dtype and shape) in the header, and the array's own memory."""

from __future__ import annotations

import re
import struct
import sys
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from asyncrl.core.errors import WireError

MAX_DIMS = 64  # numpy's own limit.
_MAX_PADDING = 4  # of a structured dtype, to the size of its fields; alignment alone stays below it.
_PLAIN_KINDS = frozenset("biufcmMSU")
_PLAIN_NAME = re.compile(rb"[<>|][biufcmMSU]\d{1,10}(\[\d{0,19}[a-zA-Z]{1,2}\])?")


class Unsupported(Exception):
    """The wire does not carry ``value``."""

    def __init__(self, value: Any, reason: str) -> None:
        super().__init__(reason)
        self.value = value


def is_plain(dtype: np.dtype) -> bool:
    """True for numbers, bools, fixed-width strings, dates and durations: memory without pointers."""
    return dtype.kind in _PLAIN_KINDS


def buffer_of(array: np.ndarray) -> memoryview:
    """The array's memory as bytes, in C order; copied only if the array is not contiguous."""
    try:
        return array.data.cast("B")
    except (TypeError, ValueError):  # it is not contiguous or empty, or its dtype has no buffer format
        if array.nbytes == 0:
            return memoryview(b"")
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


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
    if dtype.itemsize == 0:
        raise WireError(f"array whose dtype {name!r} has no size")
    return dtype, shape, prod(shape) * dtype.itemsize


def array_of(data: bytes, buffer: memoryview, *, writable: bool) -> np.ndarray:
    """A view of a buffer, read-only unless ``writable``. Raises `WireError` if it does not fit its descriptor."""
    dtype, shape, nbytes = _layout(data)
    if nbytes != buffer.nbytes:
        raise WireError(f"array {dtype}{list(shape)} needs {nbytes} bytes, got {buffer.nbytes}")
    if nbytes == 0:
        return np.empty(shape, dtype=dtype)
    _check_values(dtype, buffer)
    array = np.ndarray(shape, dtype, buffer)
    if not writable and not buffer.readonly:
        array.flags.writeable = False
    return array


def _check_values(dtype: np.dtype, buffer: memoryview) -> None:
    """Raise `WireError` for contents that numpy does not check itself."""
    if dtype.kind == "U" and np.frombuffer(buffer, dtype=f"{dtype.byteorder}u4").max() > sys.maxunicode:
        raise WireError("array of strings holds a character that Unicode has not")


def scalar_of(data: bytes) -> Any:
    """A numpy scalar from its descriptor and its bytes."""
    name, shape, end = parse(data)
    dtype = dtype_of(name)
    if shape or len(data) - end != dtype.itemsize:
        raise WireError(f"scalar {dtype} needs {dtype.itemsize} bytes, got {len(data) - end}")
    if dtype.itemsize == 0:
        return np.zeros((), dtype=dtype)[()]
    _check_values(dtype, memoryview(data)[end:])
    return np.frombuffer(data, dtype=dtype, offset=end)[0]


@lru_cache(maxsize=256)
def dtype_of(name: bytes) -> np.dtype:
    """The dtype that `describe` wrote. Raises `WireError` for any other name, such as those of pointer types."""
    if _PLAIN_NAME.fullmatch(name) is None:
        raise WireError(f"dtype {name!r} does not travel")
    try:
        dtype = np.dtype(name.decode("ascii"))
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"unknown dtype {name!r}") from error
    if not is_plain(dtype) or dtype.str.encode() != name:
        raise WireError(f"dtype {name!r} does not travel")
    return dtype


def record_parts(array: np.ndarray) -> list[Any] | None:
    """Shape, alignment, field names and columns of a structured array; None if these would not rebuild it."""
    dtype = array.dtype
    if not dtype.names:
        return None
    fields = [(name, dtype[name].base, dtype[name].shape) for name in dtype.names]
    if _record_dtype(fields, dtype.isalignedstruct) != dtype:
        return None
    columns = [np.ascontiguousarray(array[name]).reshape(array.shape + dtype[name].shape) for name in dtype.names]
    return [list(array.shape), dtype.isalignedstruct, list(dtype.names), columns]


def record_of(parts: list[Any]) -> np.ndarray:
    """The structured array of `record_parts`. Raises `WireError` if the columns do not fit together."""
    shape, is_aligned, names, columns = parts
    shape = checked_shape(shape)
    if not isinstance(columns, list) or not all(isinstance(column, np.ndarray) for column in columns):
        raise WireError("structured array whose fields are not arrays")
    if any(column.shape[: len(shape)] != shape for column in columns):
        raise WireError(f"structured array of shape {shape} has fields of another shape")
    fields = [(name, column.dtype, column.shape[len(shape) :]) for name, column in zip(names, columns, strict=True)]
    dtype = _record_dtype(fields, bool(is_aligned))
    if dtype is None:
        raise WireError(f"structured array of {len(fields)} fields that are mostly padding")
    array = np.empty(shape, dtype=dtype)
    for name, column in zip(names, columns, strict=True):
        array[name] = column
    return array


def _record_dtype(fields: list[tuple[str, np.dtype, tuple[int, ...]]], is_aligned: bool) -> np.dtype | None:
    """The dtype of these fields; None if it would consist mostly of padding."""
    dtype = np.dtype(fields, align=is_aligned)
    size = sum(base.itemsize * prod(shape) for _, base, shape in fields)
    return dtype if 0 < dtype.itemsize <= _MAX_PADDING * size else None


def checked_shape(shape: Any) -> tuple[int, ...]:
    """Check a shape from a header. Raises `WireError` if it is not one."""
    if not isinstance(shape, list | tuple) or len(shape) > MAX_DIMS or any(type(n) is not int or n < 0 for n in shape):
        raise WireError("array has an impossible shape: its dimensions are not at most 64 integers >= 0")
    return tuple(shape)


def checked_items(shape: Any, items: Any, *kinds: type) -> tuple[int, ...]:
    """Check a shape against its items in the header, and their types. Raises `WireError` if they do not fit."""
    shape = checked_shape(shape)
    if not isinstance(items, list) or prod(shape) != len(items):
        raise WireError(f"array of shape {shape} does not have its {prod(shape)} items")
    if kinds and not set(kinds).issuperset(map(type, items)):
        raise WireError(f"array of {kinds} holds an item of another type")
    return shape
