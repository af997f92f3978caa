"""The header of a message: a msgpack tree whose leaves that msgpack lacks are extension types of ours."""

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


@dataclass(frozen=True, slots=True)
class Columns:
    """Tensors by name that the receiver takes as views of the frames, and promises to copy before it writes."""

    tensors: dict[str, Any]


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


class Encoder:
    """Packs one message."""

    def __init__(self, foreign: list[Any] | None, max_depth: int) -> None:
        self.buffers: list[Frame] = []
        self.foreign = foreign
        self.max_depth = max_depth
        self.depth = 0

    def pack(self, value: Any) -> Any:
        """The header's bytes for a value; its buffers are appended to ``buffers``."""
        return msgpack.packb(
            value, default=self.hook, strict_types=True, datetime=True, unicode_errors="surrogatepass", buf_size=4096
        )

    def nested(self, code: int, value: Any) -> msgpack.ExtType:
        """An extension that holds a tree of its own."""
        self.depth += 1
        if self.depth > self.max_depth:
            raise ValueError(f"containers nest deeper than {self.max_depth}")
        packed = self.pack(value)
        self.depth -= 1
        return msgpack.ExtType(code, packed)

    def hook(self, value: Any) -> Any:
        """Called by msgpack for whatever it has no type for."""
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
        """A descriptor, and the array's memory as a buffer; objects go into the tree."""
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
        """A descriptor, and the tensor's memory as a buffer."""
        wire_torch = _torch_side()
        if tensor.is_nested:
            return self.nested(_EXT_JAGGED, wire_torch.jagged_parts(tensor))
        header, buffer = wire_torch.describe(tensor)
        self.buffers.append(buffer)
        return msgpack.ExtType(_EXT_TENSOR, header)


class Decoder:
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
        """The value of a tree."""
        _check_complete(data)
        return msgpack.unpackb(
            data,
            ext_hook=self.hook,
            strict_map_key=False,
            timestamp=3,
            unicode_errors="surrogatepass",
        )

    def nested(self, data: bytes) -> Any:
        """The value of a tree within an extension."""
        self.depth += 1
        if self.depth > self.max_depth:
            raise WireError(f"containers nest deeper than {self.max_depth}")
        value = self.unpack(data)
        self.depth -= 1
        return value

    def hook(self, code: int, data: bytes) -> Any:
        """Called by msgpack for an extension."""
        reader = _READERS.get(code)
        if reader is None:
            raise WireError(f"message holds an unknown type, code {code}")
        return reader(self, data)

    def array(self, data: bytes) -> np.ndarray:
        """A view of the next buffer."""
        return wire_numpy.array_of(data, self.take())

    def take(self) -> memoryview:
        """The next buffer."""
        if self.num_taken >= len(self.buffers):
            raise WireError(f"message is truncated: its header describes more than {len(self.buffers)} buffers")
        self.num_taken += 1
        return self.buffers[self.num_taken - 1]

    def objects(self, data: bytes) -> np.ndarray:
        """An array of Python values."""
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
        """The next value that travelled beside the message."""
        if data or self.num_foreign >= len(self.foreign):
            raise WireError("message refers to a value that did not travel with it")
        self.num_foreign += 1
        return self.foreign[self.num_foreign - 1]

    def tensor(self, data: bytes) -> Any:
        """A tensor over the next buffer, or a copy of it."""
        return _torch_side().tensor_of(data, self.take(), copy=not self.shares_tensors)

    def jagged(self, data: bytes) -> Any:
        """A nested tensor."""
        return _torch_side().jagged_of(self.nested(data))

    def dense_columns(self, data: bytes) -> dict[str, Any]:
        """Tensors by name, over the next buffers."""
        names, layouts = self.nested(data)
        tensor_of = _torch_side().tensor_of
        return {name: tensor_of(layout, self.take(), copy=False) for name, layout in zip(names, layouts, strict=True)}

    def columns(self, data: bytes) -> Any:
        """As `dense_columns`, where some are nested tensors."""
        self.shares_tensors = True
        value = self.nested(data)
        self.shares_tensors = False
        return value


_READERS: dict[int, Callable[[Decoder, bytes], Any]] = {
    _EXT_TUPLE: lambda decoder, data: tuple(decoder.nested(data)),
    _EXT_ARRAY: Decoder.array,
    _EXT_OBJECTS: Decoder.objects,
    _EXT_SCALAR: lambda _, data: wire_numpy.scalar_of(data),
    _EXT_INT: lambda _, data: int.from_bytes(data, "little", signed=True),
    _EXT_TENSOR: Decoder.tensor,
    _EXT_JAGGED: Decoder.jagged,
    _EXT_COMPLEX: lambda _, data: complex(*struct.unpack("<dd", data)),
    _EXT_FOREIGN: Decoder.foreign_value,
    _EXT_COLUMNS: Decoder.columns,
    _EXT_DENSE_COLUMNS: Decoder.dense_columns,
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
