"""Encodes Python values and arrays as bytes, for Ray, ZMQ and disk, and decodes them.

A message is a header (a version number and msgpack bytes), followed by the memory of each array.

For any input bytes, `decode` either raises `WireError` or returns plain values. `decode` runs no code from the message,
and the memory that it allocates is proportional to the size of the message.
"""

from __future__ import annotations

import re
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from itertools import chain
from math import prod
from typing import Any

import msgpack
import numpy as np
from msgpack.exceptions import UnpackException

from asyncrl.core.errors import WireError

Frame = bytes | bytearray | memoryview

VERSION = 1
_MAGIC = b"aRL"
_PREFIX = _MAGIC + bytes([VERSION])
_MALFORMED = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError),
    *(UnpackException, struct.error),
)

_EXT_MARK, _EXT_ARRAY, _EXT_SCALAR, _EXT_INT, _EXT_COMPLEX, _EXT_TENSOR, _EXT_FOREIGN = range(7)
_ATOMS = frozenset({type(None), bool, int, float, str, bytes})
MAX_DIMS = 64  # numpy's limit
# Reject a structured dtype if more than 3/4 of its bytes are padding. Alignment usually adds less padding.
_MAX_PADDING = 4
_PLAIN_KINDS = frozenset("biufcmMSU")
_PLAIN_NAME = re.compile(rb"[<>|][biufcmMSU]\d{1,10}(\[\d{0,19}[a-zA-Z]{1,2}\])?")


class Unsupported(Exception):
    """Raised for a value that the codec does not support."""

    def __init__(self, value: Any, reason: str) -> None:
        super().__init__(reason)
        self.value = value


@dataclass(frozen=True, slots=True)
class Columns:
    """A dict of tensors by name, for `encode`.

    `decode` returns a dict whose tensors are views of the received bytes. Copy a tensor before you write to it.
    """

    tensors: dict[str, Any]


def encode(value: Any, *, foreign: list[Any] | None = None) -> list[Frame]:
    """Turn a value into frames: a list of byte buffers that a transport can send without copies.

    Args:
        value: One of these types, but not a subclass:

            - None, bool, int, float, complex, str, bytes, or a datetime with a time zone
            - a list, tuple or dict
            - a numpy array or scalar of numbers, bools, times, bytes or strings
            - an object array of supported values, or a structured array with named fields
            - if torch is loaded, a dense or nested tensor with a whole number of bytes per value
        foreign: `encode` appends each unsupported value to this list. The transport must send the list, and pass it to
            `decode`. If it is None, an unsupported value is an error.

    Returns:
        The header, then the memory of the arrays. A contiguous array shares memory with its frame, so do not write to
        the value until the frames are sent.

    Raises:
        WireError: the value contains an unsupported value or itself, or has too many nested levels. 500 levels work.
    """
    encoder = Encoder(foreign)
    try:
        return [_PREFIX + encoder.pack(value), *encoder.buffers]
    except Unsupported as error:
        raise WireError(f"{_path_to(error.value, value) or 'value'}: {error}") from error
    except (ValueError, OverflowError) as error:  # msgpack raises these errors for too many nested levels
        raise WireError(f"the value cannot be encoded; it may nest too deep or contain itself: {error}") from error


def decode(frames: Sequence[Frame], *, foreign: Sequence[Any] = (), writable: bool = False) -> Any:
    """Decode a message, and return the value that `encode` got.

    Args:
        frames: The byte buffers that `encode` returned, possibly as another type of buffer. The transport must limit
            the number and the size of frames.
        foreign: The list that `encode` filled.
        writable: Whether a returned array is writable if its frame is writable.

    Returns:
        The value. Arrays are views of the frames, read-only unless ``writable``. Tensors of read-only frames are
        copies, because torch has no read-only tensors. `Columns` become a dict of tensors that are never copied.

    Raises:
        WireError: the frames are not a message of this codec.
    """
    if not frames:
        raise WireError("a message must have at least one frame, got none")
    try:
        header, *buffers = (memoryview(frame).cast("B") for frame in frames)
    except (TypeError, ValueError) as error:
        raise WireError(f"a frame is not a contiguous buffer: {error}") from error
    prefix = bytes(header[: len(_PREFIX)])
    if prefix != _PREFIX:
        if prefix[: len(_MAGIC)] == _MAGIC and len(prefix) == len(_PREFIX):
            versions = f"{prefix[-1]}, but this process reads version {VERSION}"
            raise WireError(f"message has version {versions}; write and read messages with the same release")
        raise WireError(f"not a message of this protocol: it begins with {prefix!r}")
    decoder = Decoder(buffers, foreign, writable=writable)
    try:
        value = decoder.unpack(header[len(_PREFIX) :])
    except WireError:
        raise
    except _MALFORMED as error:
        raise WireError(f"malformed message: {type(error).__name__}: {error}") from error
    if decoder.num_taken != len(buffers):
        raise WireError(f"message has {len(buffers)} buffers, but its header describes only {decoder.num_taken}")
    return value


@dataclass(frozen=True, slots=True, eq=False)
class _Mark:
    """Marks a list in a message's header. The list encodes a value of another type, such as a tuple.

    ``sent`` is the first item of the list. The function ``build`` makes the value from the other items.
    """

    sent: msgpack.ExtType
    build: Callable[[Any, list[Any]], Any]


class Encoder:
    """Encodes one message."""

    def __init__(self, foreign: list[Any] | None) -> None:
        self.buffers: list[Frame] = []
        self.foreign = foreign

    def pack(self, value: Any) -> Any:
        """Encode a value to msgpack bytes, and append the memory of its arrays to the list ``buffers``."""
        return msgpack.packb(
            value, default=self.hook, strict_types=True, datetime=True, unicode_errors="surrogatepass", buf_size=4096
        )

    def hook(self, value: Any) -> Any:
        """Convert a value for msgpack. msgpack calls this method for each value of a type that it does not support."""
        kind = type(value)
        if kind is Columns:
            return self.columns(value.tensors)
        if kind is np.ndarray or kind is np.memmap:
            packed = self.array(value)
        elif kind is tuple:
            return [_TUPLE.sent, *value]
        elif kind is int:
            return msgpack.ExtType(_EXT_INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
        elif kind is complex:
            return msgpack.ExtType(_EXT_COMPLEX, struct.pack("<dd", value.real, value.imag))
        elif isinstance(value, np.generic) and value.dtype.kind in _PLAIN_KINDS:
            return msgpack.ExtType(_EXT_SCALAR, describe(value.dtype, ()) + value.tobytes())
        else:
            packed = self.tensor(value)
        return self.left_out(value) if packed is None else packed

    def left_out(self, value: Any) -> msgpack.ExtType:
        """Append a value that the codec does not support to the list ``foreign``, and return a marker for the header.

        Raises `Unsupported` if ``foreign`` is None.
        """
        if self.foreign is None:
            kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
            detail = f" of dtype {value.dtype}" if isinstance(value, np.ndarray | np.generic) else ""
            raise Unsupported(value, f"the codec does not support {kind}{detail}; convert it to plain values or arrays")
        self.foreign.append(value)
        return msgpack.ExtType(_EXT_FOREIGN, b"")

    def array(self, array: np.ndarray) -> Any:
        """Return the header entry that describes ``array``, and append the array's memory to ``buffers``.

        If the array has Python objects or strings of variable length, the entry has the items, and no memory is
        appended. An object that occurs several times in the array is encoded once. Return None if the dtype is not
        supported.
        """
        if array.dtype.kind in _PLAIN_KINDS:
            self.buffers.append(buffer_of(array))
            return msgpack.ExtType(_EXT_ARRAY, describe(array.dtype, array.shape))
        if array.dtype == object:
            items = array.reshape(-1).tolist()
            if _ATOMS.issuperset(map(type, items)):
                return [_OBJECTS.sent, items, *array.shape]
            distinct = {id(item): item for item in items}
            if len(distinct) == len(items):
                return [_OBJECTS.sent, items, *array.shape]
            places = {key: place for place, key in enumerate(distinct)}
            chosen = np.array([places[id(item)] for item in items], dtype=np.int64)
            return [_REPEATED.sent, [*distinct.values()], chosen.reshape(array.shape)]
        if array.dtype == np.dtypes.StringDType():
            return [_STRINGS.sent, array.reshape(-1).tolist(), *array.shape]
        parts = record_parts(array)
        return None if parts is None else [_RECORD.sent, *parts]

    def columns(self, tensors: dict[str, Any]) -> Any:
        """Return the header entry that describes the dict ``tensors``, and append the tensors' memory to ``buffers``.

        The entry is one flat list, because decoding nested lists takes longer.
        """
        describe = _torch_side().describe
        try:
            described = [describe(tensor) for tensor in tensors.values()]
        except Unsupported:
            return tensors  # msgpack then calls `hook` for each tensor of the dict
        for _, buffers in described:
            self.buffers.extend(buffers)
        names_and_descriptions = zip(tensors, (description for description, _ in described), strict=True)
        return [_COLUMNS.sent, *chain.from_iterable(names_and_descriptions)]

    def tensor(self, value: Any) -> Any:
        """Return the header entry that describes the tensor ``value``, and append the tensor's memory to ``buffers``.

        Return None if the value is not a tensor. If the codec does not support the tensor, return None if ``foreign``
        is a list, else raise `Unsupported`.
        """
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(value, torch.Tensor):
            return None
        try:
            description, buffers = _torch_side().describe(value)
        except Unsupported:
            if self.foreign is not None:
                return None
            raise
        self.buffers.extend(buffers)
        return [_NESTED.sent, description] if value.is_nested else msgpack.ExtType(_EXT_TENSOR, description)


class Decoder:
    """Decodes one message. Each array in the header takes the next buffer of the message."""

    def __init__(self, buffers: list[memoryview], foreign: Sequence[Any], *, writable: bool) -> None:
        self.buffers = buffers
        self.foreign = foreign
        self.writable = writable
        self.num_taken = 0
        self.num_foreign = 0
        self.open_marks = 0

    def unpack(self, data: Any) -> Any:
        """Decode the msgpack bytes of the header, and return the message's value."""
        # First skip over the whole header. This detects wrong lengths before memory is allocated for the values.
        walker = msgpack.Unpacker(max_buffer_size=max(len(data), 1), read_size=max(len(data), 1))
        walker.feed(data)
        try:
            walker.skip()
        except msgpack.OutOfData as error:
            raise WireError("message is truncated: its header ends early") from error
        if walker.tell() != len(data):
            raise WireError(f"message has {len(data) - walker.tell()} bytes after the end of its header")
        value = msgpack.unpackb(
            data,
            ext_hook=self.extension,
            list_hook=self.sequence,
            strict_map_key=False,
            timestamp=3,
            unicode_errors="surrogatepass",
        )
        if self.open_marks:
            raise WireError("message has a type mark that is not the first item of a list")
        return value

    def extension(self, code: int, data: bytes) -> Any:
        """Return the value of a msgpack extension with this type code and content. msgpack calls this method."""
        if code == _EXT_TENSOR:
            return _torch_side().tensor_of(data, self.take, copy=True)
        if code == _EXT_ARRAY:
            return array_of(data, self.take(), writable=self.writable)
        if code == _EXT_SCALAR:
            return scalar_of(data)
        if code == _EXT_INT:
            return int.from_bytes(data, "little", signed=True)
        if code == _EXT_COMPLEX:
            return complex(*struct.unpack("<dd", data))
        if code == _EXT_FOREIGN:
            if data or self.num_foreign >= len(self.foreign):
                raise WireError("message refers to an unsupported value that was not sent")
            self.num_foreign += 1
            return self.foreign[self.num_foreign - 1]
        if code == _EXT_MARK and data in _MARKS:
            self.open_marks += 1
            return _MARKS[data]
        raise WireError(f"message contains an unknown type with the code {code}")

    def sequence(self, items: list[Any]) -> Any:
        """Return the value that a list of a message encodes. msgpack calls this method for each list.

        If the first item of the list is a `_Mark`, the other items encode the value. Otherwise the value is the list.
        """
        if not items or type(items[0]) is not _Mark:
            return items
        self.open_marks -= 1
        return items.pop(0).build(self, items)

    def take(self) -> memoryview:
        """Return the first buffer of the message that no value has used yet."""
        if self.num_taken >= len(self.buffers):
            raise WireError(f"message is truncated: it has {len(self.buffers)} buffers, but its header describes more")
        self.num_taken += 1
        return self.buffers[self.num_taken - 1]

    def objects(self, parts: list[Any]) -> np.ndarray:
        """Build an object array. ``parts`` is a list: the array's items as one list, then the array's dimensions."""
        items, *dims = parts
        shape = checked_items(dims, items)
        array = np.empty(len(items), dtype=object)
        if _ATOMS.issuperset(map(type, items)):
            array[:] = items
        else:
            # Assign item by item, because ``array[:] = items`` would turn sequences among the items into dimensions.
            for index, item in enumerate(items):
                array[index] = item
        return array.reshape(shape)

    def repeated_objects(self, parts: list[Any]) -> np.ndarray:
        """Build an object array from a pair: a list of distinct items, and an array of indices into this list."""
        items, places = parts
        if type(places) is not np.ndarray or places.dtype != np.int64 or not isinstance(items, list):
            raise WireError("an array of repeated objects must have a list of items and int64 indices into the list")
        if places.size and not 0 <= places.min() <= places.max() < len(items):
            raise WireError(f"an array of repeated objects has an index that is not in [0, {len(items)})")
        return self.objects([items, len(items)])[places]

    def strings(self, parts: list[Any]) -> np.ndarray:
        """Build an array of strings of variable length.

        ``parts`` is a list: the array's strings as one list, then the array's dimensions.
        """
        items, *dims = parts
        shape = checked_items(dims, items)
        if not {str}.issuperset(map(type, items)):
            raise WireError("an array of strings contains an item of another type")
        return np.array(items, dtype=np.dtypes.StringDType()).reshape(shape)

    def nested_tensor(self, parts: list[Any]) -> Any:
        """Build a nested tensor from its description in ``parts``, and from the next buffers of the message."""
        (description,) = parts
        if type(description) is not list:
            raise WireError("the description of a nested tensor is not a list")
        return _torch_side().tensor_of(description, self.take, copy=True)

    def columns(self, parts: list[Any]) -> dict[str, Any]:
        """Build a dict of tensors. The next buffers of the message have the memory of the tensors.

        ``parts`` is a flat list: for each tensor the name, then the description.
        """
        tensor_of = _torch_side().tensor_of
        described = zip(parts[::2], parts[1::2], strict=True)
        return {name: tensor_of(description, self.take, copy=False) for name, description in described}


_TUPLE = _Mark(msgpack.ExtType(_EXT_MARK, b"t"), lambda _, items: tuple(items))
_OBJECTS = _Mark(msgpack.ExtType(_EXT_MARK, b"o"), Decoder.objects)
_REPEATED = _Mark(msgpack.ExtType(_EXT_MARK, b"d"), Decoder.repeated_objects)
_STRINGS = _Mark(msgpack.ExtType(_EXT_MARK, b"s"), Decoder.strings)
_RECORD = _Mark(msgpack.ExtType(_EXT_MARK, b"r"), lambda _, parts: record_of(parts))
_NESTED = _Mark(msgpack.ExtType(_EXT_MARK, b"n"), Decoder.nested_tensor)
_COLUMNS = _Mark(msgpack.ExtType(_EXT_MARK, b"c"), Decoder.columns)
_MARKS = {mark.sent.data: mark for mark in (_TUPLE, _OBJECTS, _REPEATED, _STRINGS, _RECORD, _NESTED, _COLUMNS)}


def _torch_side() -> Any:
    """Return the module that encodes and decodes tensors. Raises `WireError` if torch is not loaded."""
    if "torch" not in sys.modules:
        raise WireError("the message contains torch tensors, but this process has not imported torch; import it first")
    # Avoid an import statement, because this module must not depend on torch.
    return import_module("asyncrl.single_controller.columns")


def _path_to(target: Any, value: Any, path: str = "value") -> str | None:
    """Return where the object ``target`` is in ``value``, as text. Example: ``value['meta_info']['paths'][0]``."""
    if value is target:
        return path
    return next(filter(None, (_path_to(target, item, path + step) for step, item in _steps(value))), None)


def _steps(value: Any) -> Iterator[tuple[str, Any]]:
    value = value.tensors if type(value) is Columns else value
    if type(value) is dict:
        for key, item in value.items():
            yield f"[key {key!r:.80}]", key
            yield f"[{key!r:.80}]", item
    elif type(value) in (list, tuple) or (type(value) is np.ndarray and value.dtype == object):
        for index, item in enumerate(value.reshape(-1).tolist() if isinstance(value, np.ndarray) else value):
            yield f"[{index}]", item


def buffer_of(array: np.ndarray) -> memoryview:
    """Return an array's content as bytes in C order: a view if the array is contiguous, else a copy."""
    try:
        return array.data.cast("B")
    except (TypeError, ValueError):  # the array is empty or not contiguous, or a view cannot have the array's dtype
        if array.nbytes == 0:
            return memoryview(b"")
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


@lru_cache(maxsize=4096)
def describe(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    """Return bytes that describe an array's dtype and shape.

    The bytes encode, in this order: length of the dtype's name, number of dimensions, the name, each dimension (int64).
    """
    return descriptor(dtype.str.encode(), shape)


def descriptor(name: bytes, shape: tuple[int, ...]) -> bytes:
    """Return bytes that describe an array, in the format of `describe`. ``name`` is the name of the array's dtype."""
    return struct.pack(f"<BB{len(name)}s{len(shape)}q", len(name), len(shape), name, *shape)


def parse(data: bytes) -> tuple[bytes, tuple[int, ...], int]:
    """Read bytes that `descriptor` returned. Return a tuple: dtype name, shape, and position of the next byte."""
    name_length, ndim = data[0], data[1]
    name = data[2 : 2 + name_length]
    end = 2 + name_length + 8 * ndim
    shape = struct.unpack_from(f"<{ndim}q", data, 2 + name_length)
    if shape and min(shape) < 0:
        raise WireError(f"array has a negative dimension: {shape}")
    return name, shape, end


@lru_cache(maxsize=4096)
def _layout(data: bytes) -> tuple[np.dtype, tuple[int, ...], int]:
    name, shape, end = parse(data)
    if end != len(data):
        raise WireError(f"array descriptor has {len(data)} bytes, expected {end}")
    dtype = dtype_of(name)
    if dtype.itemsize == 0:
        raise WireError(f"the dtype {name!r} of an array has size 0")
    return dtype, shape, prod(shape) * dtype.itemsize


def array_of(data: bytes, buffer: memoryview, *, writable: bool) -> np.ndarray:
    """Return an array that is a view of a buffer, read-only unless ``writable``.

    ``data`` describes the dtype and the shape (see `describe`). Raises `WireError` if the buffer has another size.
    """
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
    """Raise `WireError` if an array of strings has invalid characters, because numpy does not detect them."""
    if dtype.kind == "U" and np.frombuffer(buffer, dtype=f"{dtype.byteorder}u4").max() > sys.maxunicode:
        raise WireError("an array of strings contains a character that does not exist in Unicode")


def scalar_of(data: bytes) -> Any:
    """Return a numpy scalar. ``data`` has the scalar's description (see `describe`), then the scalar's value."""
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
    """Return the numpy dtype with this name, such as ``<f4``. Raises `WireError` if `encode` never sends this dtype."""
    if _PLAIN_NAME.fullmatch(name) is None:
        raise WireError(f"dtype {name!r} is not supported")
    try:
        dtype = np.dtype(name.decode("ascii"))
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"unknown dtype {name!r}") from error
    if dtype.kind not in _PLAIN_KINDS or dtype.str.encode() != name:
        raise WireError(f"dtype {name!r} is not supported")
    return dtype


def record_parts(array: np.ndarray) -> list[Any] | None:
    """Turn a structured array into a list that `record_of` accepts.

    The list has the shape, whether the dtype is aligned, the list of field names, and the list of the fields' arrays.
    Returns None if `record_of` could not build the array's dtype from the list.
    """
    dtype = array.dtype
    if not dtype.names:
        return None
    fields = [(name, dtype[name].base, dtype[name].shape) for name in dtype.names]
    if _record_dtype(fields, dtype.isalignedstruct) != dtype:
        return None
    columns = [np.ascontiguousarray(array[name]).reshape(array.shape + dtype[name].shape) for name in dtype.names]
    return [list(array.shape), dtype.isalignedstruct, list(dtype.names), columns]


def record_of(parts: list[Any]) -> np.ndarray:
    """Build a structured array from a list that `record_parts` returned.

    Raises `WireError` in the following cases:

    - The shape is not valid.
    - The values of a field are not an array, or the shape of the field's array does not begin with the shape of the
      structured array.
    - More than 3/4 of the dtype would be padding.

    This function may also raise other errors. `decode` turns them into `WireError`.
    """
    shape, is_aligned, names, columns = parts
    shape = checked_shape(shape)
    if not isinstance(columns, list) or not all(isinstance(column, np.ndarray) for column in columns):
        raise WireError("the fields of a structured array are not arrays")
    if any(column.shape[: len(shape)] != shape for column in columns):
        raise WireError(f"a structured array of shape {shape} has fields of another shape")
    fields = [(name, column.dtype, column.shape[len(shape) :]) for name, column in zip(names, columns, strict=True)]
    dtype = _record_dtype(fields, bool(is_aligned))
    if dtype is None:
        raise WireError(f"a structured array of {len(fields)} fields consists mostly of padding")
    array = np.empty(shape, dtype=dtype)
    for name, column in zip(names, columns, strict=True):
        array[name] = column
    return array


def _record_dtype(fields: list[tuple[str, np.dtype, tuple[int, ...]]], is_aligned: bool) -> np.dtype | None:
    dtype = np.dtype(fields, align=is_aligned)
    size = sum(base.itemsize * prod(shape) for _, base, shape in fields)
    return dtype if 0 < dtype.itemsize <= _MAX_PADDING * size else None


def checked_shape(shape: Any) -> tuple[int, ...]:
    """Check a shape from a message's header, and return it as a tuple. Raises `WireError` for an invalid shape."""
    if not isinstance(shape, list | tuple) or len(shape) > MAX_DIMS or any(type(n) is not int or n < 0 for n in shape):
        raise WireError("an array has an impossible shape: a shape must be at most 64 integers >= 0")
    return tuple(shape)


def checked_items(shape: Any, items: Any) -> tuple[int, ...]:
    """Check a shape from a message's header, and return it as a tuple.

    Raises `WireError` if the shape is invalid, or if ``items`` is not a list with as many items as the shape requires.
    """
    shape = checked_shape(shape)
    if not isinstance(items, list) or prod(shape) != len(items):
        raise WireError(f"array of shape {shape} must have {prod(shape)} items")
    return shape
