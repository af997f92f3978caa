"""One codec for Ray, ZMQ and disk: a versioned msgpack header and the raw buffers of the arrays behind it.

`encode` copies no contiguous array, `decode` returns views of the frames it was given. Whatever the bytes are,
`decode` raises `WireError` or returns plain values: it runs no code and allocates in proportion to the message.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import msgpack
import numpy as np

from . import wire_numpy
from .errors import WireError

Frame = bytes | memoryview

VERSION = 1
MAX_FRAMES = 65_536
MAX_BYTES = 1 << 32
MAX_DEPTH = 100

_MAGIC = b"aRL"
_PREFIX = _MAGIC + bytes([VERSION])
_EXT_TUPLE = 0
_EXT_ARRAY = 1
_EXT_OBJECTS = 2
_EXT_SCALAR = 3
_EXT_INT = 4
_EXT_TENSOR = 5
_EXT_JAGGED = 6
_EXT_COMPLEX = 7
_EXT_FOREIGN = 8
_EXT_COLUMNS = 9
_EXT_DENSE_COLUMNS = 10
_CONTAINERS = frozenset({list, dict, tuple})
_ATOMS = frozenset({type(None), bool, int, float, str, bytes})
_MALFORMED = (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError, MemoryError, struct.error)


@dataclass(frozen=True, slots=True)
class Columns:
    """Tensors by name that the receiver takes as views of the frames, and promises to copy before it writes."""

    tensors: dict[str, Any]


def encode(value: Any, *, foreign: list[Any] | None = None, max_depth: int = MAX_DEPTH) -> list[Frame]:
    """Turn a value into frames.

    Args:
        value: None, bool, int, float, complex, str, bytes, aware datetimes, lists, tuples, dicts, numpy arrays and
            scalars (object arrays of the same), and torch tensors where torch is loaded.
        foreign: Where given, values of any other type are appended to it and travel by position; the transport
            must carry them itself, and hand them back to `decode`.
        max_depth: Containers within containers allowed, as in `decode`.

    Returns:
        The header, then one buffer per array. Buffers of contiguous arrays share the array's memory, so the value
        must not be written to until the frames are sent.

    Raises:
        TypeError: the value holds something that is not listed above.
        ValueError: it nests deeper than ``max_depth``, or holds itself.
    """
    return _Encoder(foreign, max_depth).encode(value)


def decode(
    frames: Sequence[Frame],
    *,
    foreign: Sequence[Any] = (),
    max_frames: int = MAX_FRAMES,
    max_bytes: int = MAX_BYTES,
    max_depth: int = MAX_DEPTH,
) -> Any:
    """Turn frames back into the value.

    Args:
        frames: What `encode` returned. Anything that has a buffer will do.
        foreign: The list that `encode` filled.
        max_frames: Frames allowed, the header among them.
        max_bytes: Bytes allowed over all frames.
        max_depth: Containers within containers allowed.

    Returns:
        The value. Arrays are read-only views of the frames. Tensors, which torch cannot mark read-only, are copied
        out of read-only frames, except in `Columns`, which come back as a dict.

    Raises:
        WireError: the frames are not a message of this codec, or break one of the limits.
    """
    views = _checked_views(frames, max_frames, max_bytes)
    decoder = _Decoder(views[1:], foreign, max_depth)
    try:
        value = decoder.unpack(views[0][len(_PREFIX) :])
        check_depth(value, max_depth)
    except WireError:
        raise
    except _MALFORMED as error:
        raise WireError(f"malformed message: {type(error).__name__}: {error}") from error
    if decoder.num_taken != len(views) - 1:
        raise WireError(f"message has {len(views) - 1} buffers, its header describes {decoder.num_taken}")
    return value


def check_depth(value: Any, max_depth: int) -> None:
    """Raise `ValueError` where containers nest deeper than ``max_depth``."""
    level = [value] if type(value) in _CONTAINERS else []
    for _ in range(max_depth):
        if not level:
            return
        inner: list[Any] = []
        for container in level:
            items = container.values() if type(container) is dict else container
            if not _CONTAINERS.isdisjoint(map(type, items)):
                inner.extend(item for item in items if type(item) in _CONTAINERS)
        level = inner
    if level:
        raise ValueError(f"containers nest deeper than {max_depth}")


def _checked_views(frames: Sequence[Frame], max_frames: int, max_bytes: int) -> list[memoryview]:
    """Views of the frames, within the limits and with the right prefix on the first."""
    if not 1 <= len(frames) <= max_frames:
        raise WireError(f"message has {len(frames)} frames; 1 to {max_frames} are allowed")
    try:
        views = [memoryview(frame) for frame in frames]
        views = [view if view.format == "B" and view.ndim == 1 else view.cast("B") for view in views]
    except TypeError as error:
        raise WireError(f"a frame is not a contiguous buffer: {error}") from error
    num_bytes = sum(view.nbytes for view in views)
    if num_bytes > max_bytes:
        raise WireError(f"message has {num_bytes} bytes; {max_bytes} are allowed")
    prefix = bytes(views[0][: len(_PREFIX)])
    if prefix != _PREFIX:
        if prefix[: len(_MAGIC)] == _MAGIC and len(prefix) == len(_PREFIX):
            raise WireError(
                f"message is of version {prefix[-1]}, this side speaks version {VERSION}; upgrade the older"
            )
        raise WireError(f"not a message of this protocol: it begins with {prefix!r}")
    return views


class _Encoder:
    """Packs one message; `hook` is called by msgpack for whatever msgpack has no type for."""

    def __init__(self, foreign: list[Any] | None, max_depth: int) -> None:
        self.buffers: list[Frame] = []
        self.foreign = foreign
        self.max_depth = max_depth
        self.depth = 0

    def encode(self, value: Any) -> list[Frame]:
        check_depth(value, self.max_depth)
        return [_PREFIX + self.pack(value), *self.buffers]

    def pack(self, value: Any) -> Any:
        return msgpack.packb(
            value, default=self.hook, strict_types=True, datetime=True, unicode_errors="surrogatepass", buf_size=4096
        )

    def nested(self, code: int, value: Any) -> msgpack.ExtType:
        self.depth += 1
        if self.depth > self.max_depth:
            raise ValueError(f"containers nest deeper than {self.max_depth}")
        packed = self.pack(value)
        self.depth -= 1
        return msgpack.ExtType(code, packed)

    def hook(self, value: Any) -> Any:
        kind = type(value)
        if kind is np.ndarray:
            return self.array(value)
        if kind is tuple:
            return self.nested(_EXT_TUPLE, list(value))
        if kind is int:
            return msgpack.ExtType(_EXT_INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
        if kind is complex:
            return msgpack.ExtType(_EXT_COMPLEX, struct.pack("<dd", value.real, value.imag))
        if isinstance(value, np.generic) and wire_numpy.is_plain(value.dtype):
            return msgpack.ExtType(_EXT_SCALAR, wire_numpy.describe(value.dtype, ()) + value.tobytes())
        if isinstance(value, Columns):
            return self.columns(value.tensors)
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            return self.tensor(value)
        if self.foreign is not None:
            self.foreign.append(value)
            return msgpack.ExtType(_EXT_FOREIGN, b"")
        raise TypeError(
            f"the wire carries no {kind.__module__}.{kind.__qualname__}; convert it to plain values or arrays"
        )

    def array(self, array: np.ndarray) -> msgpack.ExtType:
        if array.dtype == object:
            items = array.reshape(-1).tolist()
            check_depth(items, self.max_depth)
            return self.nested(_EXT_OBJECTS, [list(array.shape), items])
        if not wire_numpy.is_plain(array.dtype):
            raise TypeError(f"the wire carries no numpy array of dtype {array.dtype}; split it into plain columns")
        self.buffers.append(wire_numpy.buffer_of(array))
        return msgpack.ExtType(_EXT_ARRAY, wire_numpy.describe(array.dtype, array.shape))

    def columns(self, tensors: dict[str, Any]) -> msgpack.ExtType:
        """Dense tensors as two lists, of names and of descriptors, which is read faster than a tree."""
        wire_torch = _torch_side()
        if any(tensor.is_nested for tensor in tensors.values()):
            return self.nested(_EXT_COLUMNS, tensors)
        described = [wire_torch.describe(tensor) for tensor in tensors.values()]
        self.buffers.extend(buffer for _, buffer in described)
        names_and_layouts = [list(tensors), [header for header, _ in described]]
        return msgpack.ExtType(_EXT_DENSE_COLUMNS, self.pack(names_and_layouts))

    def tensor(self, tensor: Any) -> msgpack.ExtType:
        wire_torch = _torch_side()
        if tensor.is_nested:
            return self.nested(_EXT_JAGGED, wire_torch.jagged_parts(tensor))
        header, buffer = wire_torch.describe(tensor)
        self.buffers.append(buffer)
        return msgpack.ExtType(_EXT_TENSOR, header)


class _Decoder:
    """Unpacks one message; buffers are taken in the order in which the header mentions them."""

    def __init__(self, buffers: list[memoryview], foreign: Sequence[Any], max_depth: int) -> None:
        self.buffers = buffers
        self.foreign = foreign
        self.shares_tensors = False
        self.max_depth = max_depth
        self.num_taken = 0
        self.num_foreign = 0
        self.depth = 0

    def unpack(self, data: Any) -> Any:
        _check_complete(data)
        return msgpack.unpackb(
            data,
            ext_hook=self.hook,
            strict_map_key=False,
            timestamp=3,
            unicode_errors="surrogatepass",
        )

    def nested(self, data: bytes) -> Any:
        self.depth += 1
        if self.depth > self.max_depth:
            raise WireError(f"containers nest deeper than {self.max_depth}")
        value = self.unpack(data)
        self.depth -= 1
        return value

    def hook(self, code: int, data: bytes) -> Any:
        reader = _READERS.get(code)
        if reader is None:
            raise WireError(f"message holds an unknown type, code {code}")
        return reader(self, data)

    def array(self, data: bytes) -> np.ndarray:
        return wire_numpy.array_of(data, self.take())

    def take(self) -> memoryview:
        if self.num_taken >= len(self.buffers):
            raise WireError(f"message is truncated: its header describes more than {len(self.buffers)} buffers")
        self.num_taken += 1
        return self.buffers[self.num_taken - 1]

    def objects(self, data: bytes) -> np.ndarray:
        shape, items = self.nested(data)
        if prod(shape) != len(items) or min(shape, default=0) < 0:
            raise WireError(f"object array of shape {shape} has {len(items)} items")
        array = np.empty(len(items), dtype=object)
        if _ATOMS.issuperset(map(type, items)):
            array[:] = items
            return array.reshape(shape)
        check_depth(items, self.max_depth)
        for index, item in enumerate(items):  # numpy would look into sequences
            array[index] = item
        return array.reshape(shape)

    def foreign_value(self, data: bytes) -> Any:
        if data or self.num_foreign >= len(self.foreign):
            raise WireError("message refers to a value that did not travel with it")
        self.num_foreign += 1
        return self.foreign[self.num_foreign - 1]

    def tensor(self, data: bytes) -> Any:
        return _torch_side().tensor_of(data, self.take(), copy=not self.shares_tensors)

    def jagged(self, data: bytes) -> Any:
        return _torch_side().jagged_of(self.nested(data))

    def dense_columns(self, data: bytes) -> dict[str, Any]:
        names, layouts = self.nested(data)
        tensor_of = _torch_side().tensor_of
        return {name: tensor_of(layout, self.take(), copy=False) for name, layout in zip(names, layouts, strict=True)}

    def columns(self, data: bytes) -> Any:
        self.shares_tensors = True
        value = self.nested(data)
        self.shares_tensors = False
        return value


_READERS: dict[int, Callable[[_Decoder, bytes], Any]] = {
    _EXT_TUPLE: lambda decoder, data: tuple(decoder.nested(data)),
    _EXT_ARRAY: _Decoder.array,
    _EXT_OBJECTS: _Decoder.objects,
    _EXT_SCALAR: lambda _, data: wire_numpy.scalar_of(data),
    _EXT_INT: lambda _, data: int.from_bytes(data, "little", signed=True),
    _EXT_TENSOR: _Decoder.tensor,
    _EXT_JAGGED: _Decoder.jagged,
    _EXT_COMPLEX: lambda _, data: complex(*struct.unpack("<dd", data)),
    _EXT_FOREIGN: _Decoder.foreign_value,
    _EXT_COLUMNS: _Decoder.columns,
    _EXT_DENSE_COLUMNS: _Decoder.dense_columns,
}


def _torch_side() -> Any:
    """The part of the codec that needs torch; a process that has not loaded torch is not made to."""
    if "torch" not in sys.modules:
        raise WireError("the message holds torch tensors, and this process has not imported torch; do that first")
    from . import wire_torch

    return wire_torch


def _check_complete(data: Any) -> None:
    """Walk the header without building it, so that no length in it is trusted before its items are there."""
    walker = msgpack.Unpacker(max_buffer_size=max(len(data), 1), read_size=max(len(data), 1))
    walker.feed(data)
    try:
        walker.skip()
    except msgpack.OutOfData as error:
        raise WireError("message is truncated: its header ends early") from error
    if walker.tell() != len(data):
        raise WireError(f"message has {len(data) - walker.tell()} bytes after the end of its header")
