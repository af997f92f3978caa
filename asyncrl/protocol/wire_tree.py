"""The header of a message: a msgpack tree.

What msgpack has no type for is an extension (a leaf), or a list that a mark begins (what holds other values).
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import msgpack
import numpy as np

from . import wire_numpy
from .errors import WireError
from .wire_walk import Columns, Unsupported

Frame = bytes | bytearray | memoryview

_EXT_MARK = 0
_EXT_ARRAY = 1
_EXT_SCALAR = 2
_EXT_INT = 3
_EXT_COMPLEX = 4
_EXT_TENSOR = 5
_EXT_FOREIGN = 6
_ATOMS = frozenset({type(None), bool, int, float, str, bytes})


@dataclass(frozen=True, slots=True, eq=False)
class _Mark:
    """First item of a list that stands for something else.

    Attributes:
        sent: What stands in the header.
        build: Makes the value of the decoder and the items behind the mark.
    """

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
        """Called by msgpack for whatever it has no type for."""
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
        elif isinstance(value, np.generic) and wire_numpy.is_plain(value.dtype):
            return msgpack.ExtType(_EXT_SCALAR, wire_numpy.describe(value.dtype, ()) + value.tobytes())
        else:
            packed = self.tensor(value)
        return self.left_out(value) if packed is None else packed

    def left_out(self, value: Any) -> msgpack.ExtType:
        """A value that travels beside the message, if any may."""
        if self.foreign is None:
            kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
            detail = f" of dtype {value.dtype}" if isinstance(value, np.ndarray | np.generic) else ""
            raise Unsupported(value, f"the wire carries no {kind}{detail}; convert it to plain values or arrays")
        self.foreign.append(value)
        return msgpack.ExtType(_EXT_FOREIGN, b"")

    def array(self, array: np.ndarray) -> Any:
        """A descriptor, and the array's memory as a buffer; what has no memory of its own goes into the tree."""
        if wire_numpy.is_plain(array.dtype):
            self.buffers.append(wire_numpy.buffer_of(array))
            return msgpack.ExtType(_EXT_ARRAY, wire_numpy.describe(array.dtype, array.shape))
        if array.dtype == object:
            return [_OBJECTS.sent, array.reshape(-1).tolist(), *array.shape]
        if array.dtype == np.dtypes.StringDType():
            return [_STRINGS.sent, array.reshape(-1).tolist(), *array.shape]
        parts = wire_numpy.record_parts(array)
        return None if parts is None else [_RECORD.sent, *parts]

    def columns(self, tensors: dict[str, Any]) -> Any:
        """Tensors as one list of names and descriptions in turn, which is read faster than a tree."""
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
        """The description of a tensor, and its memory as buffers; None where the value is no tensor of use."""
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
            return wire_numpy.array_of(data, self.take(), writable=self.writable)
        if code == _EXT_MARK and data in _MARKS:
            self.open_marks += 1
            return _MARKS[data]
        reader = _LEAVES.get(code)
        if reader is None:
            raise WireError(f"message holds an unknown type, code {code}")
        return reader(self, data)

    def sequence(self, items: list[Any]) -> Any:
        """Called by msgpack for a list, when its items are there."""
        self.num_containers += 1
        if not items or type(items[0]) is not _Mark:
            return items
        self.open_marks -= 1
        return items.pop(0).build(self, items)

    def mapping(self, items: dict[Any, Any]) -> dict[Any, Any]:
        """Called by msgpack for a map, when its items are there."""
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
        items, dims = parts[0], parts[1:]
        shape = wire_numpy.checked_items(dims, items)
        array = np.empty(len(items), dtype=object)
        if _ATOMS.issuperset(map(type, items)):
            array[:] = items
        else:
            for index, item in enumerate(items):  # assigned at once, numpy would look into sequences
                array[index] = item
        return array.reshape(shape)

    def strings(self, parts: list[Any]) -> np.ndarray:
        """An array of strings of any length."""
        items, dims = parts[0], parts[1:]
        shape = wire_numpy.checked_items(dims, items, str)
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
        names, descriptions = parts[::2], parts[1::2]
        return {
            name: tensor_of(description, self.take, copy=False)
            for name, description in zip(names, descriptions, strict=True)
        }


def _mark(code: bytes, build: Callable[[Any, list[Any]], Any]) -> _Mark:
    return _Mark(sent=msgpack.ExtType(_EXT_MARK, code), build=build)


_TUPLE = _mark(b"t", lambda _, items: tuple(items))
_OBJECTS = _mark(b"o", Decoder.objects)
_STRINGS = _mark(b"s", Decoder.strings)
_RECORD = _mark(b"r", lambda _, parts: wire_numpy.record_of(parts))
_NESTED = _mark(b"n", Decoder.nested_tensor)
_COLUMNS = _mark(b"c", Decoder.columns)
_MARKS = {mark.sent.data: mark for mark in (_TUPLE, _OBJECTS, _STRINGS, _RECORD, _NESTED, _COLUMNS)}

_LEAVES: dict[int, Callable[[Decoder, bytes], Any]] = {
    _EXT_SCALAR: lambda _, data: wire_numpy.scalar_of(data),
    _EXT_INT: lambda _, data: int.from_bytes(data, "little", signed=True),
    _EXT_COMPLEX: lambda _, data: complex(*struct.unpack("<dd", data)),
    _EXT_FOREIGN: Decoder.foreign_value,
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
