"""One codec for Ray, ZMQ and disk: a versioned msgpack header, then the raw buffers of the arrays.

`encode` copies no contiguous array; `decode` returns views of the frames. For any input bytes `decode` either raises
`WireError` or returns plain values: it runs no code, and its allocations are proportional to the message.

In the header, what msgpack has no type for is an extension (a leaf), or a list that begins with a mark (a container).
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import msgpack
import numpy as np
from msgpack.exceptions import UnpackException

from asyncrl.core.errors import WireError
from asyncrl.single_controller import codec_numpy
from asyncrl.single_controller.codec_numpy import Unsupported

Frame = bytes | bytearray | memoryview

VERSION = 1
MAX_FRAMES = 65_536
MAX_BYTES = 1 << 32
MAX_DEPTH = 100

_MAGIC = b"aRL"
_PREFIX = _MAGIC + bytes([VERSION])
_MALFORMED = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    UnpackException,
    ValueError,
    struct.error,
)

_EXT_MARK = 0
_EXT_ARRAY = 1
_EXT_SCALAR = 2
_EXT_INT = 3
_EXT_COMPLEX = 4
_EXT_TENSOR = 5
_EXT_FOREIGN = 6
_ATOMS = frozenset({type(None), bool, int, float, str, bytes})
_CONTAINERS = frozenset({list, dict, tuple, np.ndarray})
_OBJECT = np.dtype(object)
_MANY = 8  # items that are looked through faster at once than one by one


@dataclass(frozen=True, slots=True)
class Columns:
    """Tensors by name, received as views of the frames; the receiver must copy them before it writes."""

    tensors: dict[str, Any]


def encode(value: Any, *, foreign: list[Any] | None = None, max_depth: int | None = MAX_DEPTH) -> list[Frame]:
    """Turn a value into frames.

    Args:
        value: None, bool, int, float, complex, str, bytes, aware datetimes; lists, tuples and dicts; numpy arrays and
            scalars of every dtype (object arrays of the types in this list; structured arrays with named fields); if
            torch is loaded, dense and nested tensors of any dtype of whole bytes. Subclasses are refused.
        foreign: If given, values of any other type are appended to it; the transport passes it to `decode`.
        max_depth: Limit on nested containers; None leaves it to msgpack, which packs about 500.

    Returns:
        The header, then the memory of the arrays. Buffers of contiguous arrays share the array's memory, so the value
        must not be written to until the frames are sent.

    Raises:
        WireError: the value holds something else, nests too deep, or holds itself; the message says where.
    """
    encoder = Encoder(foreign)
    try:
        if max_depth is not None:
            check_depth(value, max_depth)
        return [_PREFIX + encoder.pack(value), *encoder.buffers]
    except Unsupported as error:
        raise WireError(f"{path_to(error.value, value) or 'value'}: {error}") from error
    except (ValueError, OverflowError) as error:
        raise WireError(f"the value does not travel: {error}") from error


def decode(
    frames: Sequence[Frame],
    *,
    foreign: Sequence[Any] = (),
    max_frames: int = MAX_FRAMES,
    max_bytes: int = MAX_BYTES,
    max_depth: int | None = MAX_DEPTH,
    writable: bool = False,
) -> Any:
    """Turn frames back into the value.

    Args:
        frames: What `encode` returned, as any objects with a buffer.
        foreign: The list that `encode` filled.
        max_frames: Limit on frames, the header among them.
        max_bytes: Limit over all frames.
        max_depth: Limit on nested containers; None leaves it to msgpack, which reads about 1000.
        writable: Make arrays over writable frames writable.

    Returns:
        The value. Arrays are views of the frames, read-only unless ``writable``. Tensors, which torch cannot mark
        read-only, are copied out of read-only frames, except in `Columns`, which come back as a dict.

    Raises:
        WireError: the frames are not a message of this codec, or break one of the limits.
    """
    views = _checked_views(frames, max_frames, max_bytes)
    decoder = Decoder(views[1:], foreign, writable=writable)
    try:
        value = decoder.unpack(views[0][len(_PREFIX) :])
        if max_depth is not None and decoder.num_containers > max_depth:
            check_depth(value, max_depth)
    except WireError:
        raise
    except _MALFORMED as error:
        raise WireError(f"malformed message: {type(error).__name__}: {error}") from error
    if decoder.num_taken != len(views) - 1:
        raise WireError(f"message has {len(views) - 1} buffers, its header describes {decoder.num_taken}")
    return value


def _checked_views(frames: Sequence[Frame], max_frames: int, max_bytes: int) -> list[memoryview]:
    """Views of the frames, within the limits and with the right prefix on the first."""
    if not 1 <= len(frames) <= max_frames:
        raise WireError(f"message has {len(frames)} frames; 1 to {max_frames} are allowed")
    try:
        views = [memoryview(frame).cast("B") for frame in frames]
    except (TypeError, ValueError) as error:
        raise WireError(f"a frame is not a contiguous buffer: {error}") from error
    num_bytes = sum(map(len, views))
    if num_bytes > max_bytes:
        raise WireError(f"message has {num_bytes} bytes; {max_bytes} are allowed")
    prefix = bytes(views[0][: len(_PREFIX)])
    if prefix != _PREFIX:
        if prefix[: len(_MAGIC)] == _MAGIC and len(prefix) == len(_PREFIX):
            versions = f"version {prefix[-1]}, this side speaks version {VERSION}"
            raise WireError(f"message is of {versions}; upgrade the older")
        raise WireError(f"not a message of this protocol: it begins with {prefix!r}")
    return views


@dataclass(frozen=True, slots=True, eq=False)
class _Mark:
    """First item of a list that encodes another container, which ``build(decoder, items after the mark)`` makes."""

    sent: msgpack.ExtType
    build: Callable[[Any, list[Any]], Any]


class Encoder:
    """Packs one message."""

    def __init__(self, foreign: list[Any] | None) -> None:
        self.buffers: list[Frame] = []
        self.foreign = foreign

    def pack(self, value: Any) -> Any:
        """The header's bytes for a value; its buffers are appended to ``buffers``."""
        return msgpack.packb(
            value, default=self.hook, strict_types=True, datetime=True, unicode_errors="surrogatepass", buf_size=4096
        )

    def hook(self, value: Any) -> Any:
        """Called by msgpack for values that it has no type for."""
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
        elif isinstance(value, np.generic) and codec_numpy.is_plain(value.dtype):
            return msgpack.ExtType(_EXT_SCALAR, codec_numpy.describe(value.dtype, ()) + value.tobytes())
        else:
            packed = self.tensor(value)
        return self.left_out(value) if packed is None else packed

    def left_out(self, value: Any) -> msgpack.ExtType:
        """Send a value beside the message, if that is allowed."""
        if self.foreign is None:
            kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
            detail = f" of dtype {value.dtype}" if isinstance(value, np.ndarray | np.generic) else ""
            raise Unsupported(value, f"the wire carries no {kind}{detail}; convert it to plain values or arrays")
        self.foreign.append(value)
        return msgpack.ExtType(_EXT_FOREIGN, b"")

    def array(self, array: np.ndarray) -> Any:
        """A descriptor, with the array's memory as a buffer; arrays of pointers go into the header instead."""
        if codec_numpy.is_plain(array.dtype):
            self.buffers.append(codec_numpy.buffer_of(array))
            return msgpack.ExtType(_EXT_ARRAY, codec_numpy.describe(array.dtype, array.shape))
        if array.dtype == object:
            return [_OBJECTS.sent, array.reshape(-1).tolist(), *array.shape]
        if array.dtype == np.dtypes.StringDType():
            return [_STRINGS.sent, array.reshape(-1).tolist(), *array.shape]
        parts = codec_numpy.record_parts(array)
        return None if parts is None else [_RECORD.sent, *parts]

    def columns(self, tensors: dict[str, Any]) -> Any:
        """Tensors as one flat list of names and descriptions, which is faster to read than a tree."""
        describe = _torch_side().describe
        try:
            described = [describe(tensor) for tensor in tensors.values()]
        except Unsupported:
            return tensors  # one of them does not travel: `tensor` says which, or leaves it out
        for _, buffers in described:
            self.buffers.extend(buffers)
        names_and_descriptions = zip(tensors, (description for description, _ in described), strict=True)
        return [_COLUMNS.sent, *chain.from_iterable(names_and_descriptions)]

    def tensor(self, value: Any) -> Any:
        """The description of a tensor, its memory as buffers; None if the value is not a tensor that travels."""
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
    """Unpacks one message; buffers are taken in the order in which the header mentions them."""

    def __init__(self, buffers: list[memoryview], foreign: Sequence[Any], *, writable: bool) -> None:
        self.buffers = buffers
        self.foreign = foreign
        self.writable = writable
        self.num_taken = 0
        self.num_foreign = 0
        self.open_marks = 0
        self.num_containers = 0

    def unpack(self, data: Any) -> Any:
        """The value of the header."""
        _check_complete(data)
        value = msgpack.unpackb(
            data,
            ext_hook=self.extension,
            list_hook=self.sequence,
            object_hook=self.mapping,
            strict_map_key=False,
            timestamp=3,
            unicode_errors="surrogatepass",
        )
        if self.open_marks:
            raise WireError("message has a mark that begins no list")
        return value

    def extension(self, code: int, data: bytes) -> Any:
        """Called by msgpack for an extension."""
        if code == _EXT_TENSOR:
            return _torch_side().tensor_of(data, self.take, copy=True)
        if code == _EXT_ARRAY:
            return codec_numpy.array_of(data, self.take(), writable=self.writable)
        if code == _EXT_MARK and data in _MARKS:
            self.open_marks += 1
            return _MARKS[data]
        reader = _LEAF_READERS.get(code)
        if reader is None:
            raise WireError(f"message holds an unknown type, code {code}")
        return reader(self, data)

    def sequence(self, items: list[Any]) -> Any:
        """Called by msgpack for a list, after its items."""
        self.num_containers += 1
        if not items or type(items[0]) is not _Mark:
            return items
        self.open_marks -= 1
        return items.pop(0).build(self, items)

    def mapping(self, items: dict[Any, Any]) -> dict[Any, Any]:
        """Called by msgpack for a map, after its items."""
        self.num_containers += 1
        return items

    def take(self) -> memoryview:
        """The next buffer."""
        if self.num_taken >= len(self.buffers):
            raise WireError(f"message is truncated: its header describes more than {len(self.buffers)} buffers")
        self.num_taken += 1
        return self.buffers[self.num_taken - 1]

    def foreign_value(self, data: bytes) -> Any:
        """The next value that travelled beside the message."""
        if data or self.num_foreign >= len(self.foreign):
            raise WireError("message refers to a value that did not travel with it")
        self.num_foreign += 1
        return self.foreign[self.num_foreign - 1]

    def objects(self, parts: list[Any]) -> np.ndarray:
        """An array of Python values."""
        items, *dims = parts
        shape = codec_numpy.checked_items(dims, items)
        array = np.empty(len(items), dtype=object)
        if _ATOMS.issuperset(map(type, items)):
            array[:] = items
        else:
            for index, item in enumerate(items):  # assigned at once, numpy would look into sequences
                array[index] = item
        return array.reshape(shape)

    def strings(self, parts: list[Any]) -> np.ndarray:
        """An array of strings of any length."""
        items, *dims = parts
        shape = codec_numpy.checked_items(dims, items, str)
        return np.array(items, dtype=np.dtypes.StringDType()).reshape(shape)

    def nested_tensor(self, parts: list[Any]) -> Any:
        """A nested tensor."""
        (description,) = parts
        if type(description) is not list:
            raise WireError("nested tensor without a list of its parts")
        return _torch_side().tensor_of(description, self.take, copy=True)

    def columns(self, parts: list[Any]) -> dict[str, Any]:
        """Tensors by name, over the next buffers."""
        tensor_of = _torch_side().tensor_of
        described = zip(parts[::2], parts[1::2], strict=True)
        return {name: tensor_of(description, self.take, copy=False) for name, description in described}


def _mark(code: bytes, build: Callable[[Any, list[Any]], Any]) -> _Mark:
    return _Mark(sent=msgpack.ExtType(_EXT_MARK, code), build=build)


_TUPLE = _mark(b"t", lambda _, items: tuple(items))
_OBJECTS = _mark(b"o", Decoder.objects)
_STRINGS = _mark(b"s", Decoder.strings)
_RECORD = _mark(b"r", lambda _, parts: codec_numpy.record_of(parts))
_NESTED = _mark(b"n", Decoder.nested_tensor)
_COLUMNS = _mark(b"c", Decoder.columns)
_MARKS = {mark.sent.data: mark for mark in (_TUPLE, _OBJECTS, _STRINGS, _RECORD, _NESTED, _COLUMNS)}

_LEAF_READERS: dict[int, Callable[[Decoder, bytes], Any]] = {
    _EXT_SCALAR: lambda _, data: codec_numpy.scalar_of(data),
    _EXT_INT: lambda _, data: int.from_bytes(data, "little", signed=True),
    _EXT_COMPLEX: lambda _, data: complex(*struct.unpack("<dd", data)),
    _EXT_FOREIGN: Decoder.foreign_value,
}


def _torch_side() -> Any:
    """The torch part of the codec. Decoding never imports torch into a process that has not loaded it."""
    if "torch" not in sys.modules:
        raise WireError("the message holds torch tensors, and this process has not imported torch; do that first")
    from asyncrl.single_controller import codec_torch

    return codec_torch


def _check_complete(data: Any) -> None:
    """Walk the header without building it, so that no length is trusted before its items have been seen."""
    walker = msgpack.Unpacker(max_buffer_size=max(len(data), 1), read_size=max(len(data), 1))
    walker.feed(data)
    try:
        walker.skip()
    except msgpack.OutOfData as error:
        raise WireError("message is truncated: its header ends early") from error
    if walker.tell() != len(data):
        raise WireError(f"message has {len(data) - walker.tell()} bytes after the end of its header")


def check_depth(value: Any, max_depth: int) -> None:
    """Raise `ValueError` if containers (object arrays included) nest deeper than ``max_depth``."""
    level = [value] if _is_container(value) else []
    for _ in range(max_depth):
        if not level:
            return
        inner: list[Any] = []
        for container in level:
            items = _items_of(container)
            if len(items) > _MANY and _ATOMS.issuperset(map(type, items)):
                continue
            inner.extend(item for item in items if type(item) in _CONTAINERS and _is_container(item))
        level = inner
    if level:
        raise ValueError(f"containers nest deeper than {max_depth}, or one holds itself")


def path_to(target: Any, value: Any, path: str = "value") -> str | None:
    """The path to ``target`` within ``value``, by identity. Example: ``value['meta_info']['paths'][0]``."""
    if value is target:
        return path
    return next(filter(None, (path_to(target, item, path + step) for step, item in _steps(value))), None)


def _steps(value: Any) -> Iterator[tuple[str, Any]]:
    """What a container holds, each with the expression that leads to it."""
    if type(value) is Columns:
        value = value.tensors
    if type(value) is dict:
        for key, item in value.items():
            yield f"[key {key!r:.80}]", key
            yield f"[{key!r:.80}]", item
    elif _is_container(value):
        for index, item in enumerate(_items_of(value)):
            yield f"[{index}]", item


def _is_container(value: Any) -> bool:
    return type(value) in _CONTAINERS and (type(value) is not np.ndarray or value.dtype is _OBJECT)


def _items_of(container: Any) -> Any:
    if type(container) is dict:
        return container.values()
    return container.reshape(-1).tolist() if type(container) is np.ndarray else container
