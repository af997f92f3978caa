"""How a `DataProto` travels: through Ray's pickle with its buffers beside it, and to disk in one file."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict

from . import wire
from .errors import WireError
from .unbuilt_batch import UnbuiltBatch
from .wire_file import read_frames, write_frames

if TYPE_CHECKING:
    from .data_proto import DataProto

Message = tuple[wire.Frame, Sequence[Any], Sequence[Any]]
"""Header, buffers and foreign values."""


def reduce(data: DataProto, protocol: int) -> tuple[Any, ...]:
    """What pickle needs to rebuild the batch: the codec's header, and its buffers, out of band where it can.

    Values that the codec does not carry (functions, instances) are left to pickle, whose stream this is.
    """
    header, buffers, foreign = data.__getstate__()
    wrap = pickle.PickleBuffer if protocol >= 5 else bytearray
    return rebuild, (type(data), header, [wrap(buffer) for buffer in buffers], foreign)


def rebuild(kind: type[DataProto], header: wire.Frame, buffers: Sequence[Any], foreign: Sequence[Any]) -> DataProto:
    """The inverse of `reduce`; the message is read by `unfold`, when something of the batch is asked for."""
    data = kind.__new__(kind)
    data.__setstate__((header, buffers, foreign))
    return data


def message_of(data: DataProto) -> Message:
    """The batch as a message. One that arrived and that nobody looked into goes on as it came."""
    if vars(data).keys() == {"_arrived"}:
        return data._arrived
    foreign: list[Any] = []
    header, *buffers = wire.encode(parts_of(data), foreign=foreign, max_depth=None)
    return header, buffers, foreign


def unfold(data: DataProto) -> None:
    """Read the message that a batch arrived in. What was set since then stays; tensors stay where the buffers are."""
    message = vars(data).get("_arrived")
    if message is None:  # it was made here, or another thread has read it
        return
    header, buffers, foreign = message
    trusted = {"max_frames": sys.maxsize, "max_bytes": sys.maxsize, "max_depth": None, "writable": True}
    arrived = from_parts(type(data), wire.decode([header, *buffers], foreign=foreign, **trusted))
    for name, value in vars(arrived).items():
        vars(data).setdefault(name, value)
    vars(data).pop("_arrived", None)


def parts_of(data: DataProto) -> dict[str, Any]:
    """The batch as a value of the codec. Raises `BatchError` where its columns were made not to fit together."""
    data.check_consistency()
    batch = None
    if data._batch is not None:
        batch = [len(data), wire.Columns(dict(data._batch.items()))]
    return {"batch": batch, "non_tensor_batch": data.non_tensor_batch, "meta_info": data.meta_info}


def from_parts(kind: type[DataProto], parts: Any, *, is_borrowed: bool = True) -> DataProto:
    """The inverse of `parts_of`.

    Args:
        kind: `DataProto`, or the subclass to make.
        parts: The decoded value.
        is_borrowed: The tensors' memory belongs to others too, so that they are copied when they are asked for.

    Raises:
        WireError: the value is not of that form.
    """
    try:
        batch, arrays, meta_info = parts["batch"], parts["non_tensor_batch"], parts["meta_info"]
        if type(arrays) is not dict or type(meta_info) is not dict:
            raise TypeError("its parts are not maps")
        tensors = None if batch is None else _batch_of(*batch, is_borrowed=is_borrowed)
        return kind(batch=tensors, non_tensor_batch=arrays, meta_info=meta_info)  # type: ignore[arg-type]
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise WireError(f"message is not a DataProto: {error}") from error


def _batch_of(num_rows: Any, tensors: Any, *, is_borrowed: bool) -> UnbuiltBatch:
    if type(num_rows) is not int or not 0 <= num_rows < sys.maxsize or type(tensors) is not dict:
        raise ValueError(f"its batch has {num_rows!r:.40} rows, or no map of tensors")
    for name, tensor in tensors.items():
        if type(name) is not str or not isinstance(tensor, torch.Tensor | TensorDict):
            raise TypeError(f"its batch holds something other than tensors with names: {name!r:.40}")
        if tensor.size(0) != num_rows:
            raise ValueError(f"its batch has {num_rows} rows, and {name!r} has not")
    return UnbuiltBatch(tensors, num_rows, is_borrowed=is_borrowed)


def save(data: DataProto, filepath: str | Path) -> None:
    """Write the batch to a file, which is there completely or not at all."""
    frames = wire.encode(parts_of(data))
    partial = Path(f"{filepath}.partial")
    with open(partial, "wb") as file:
        write_frames(file, frames)
    os.replace(partial, filepath)


def load(kind: type[DataProto], filepath: str | Path) -> DataProto:
    """Read a batch from a file, into memory that is the batch's own."""
    content = bytearray(os.path.getsize(filepath))
    with open(filepath, "rb") as file:
        num_read = file.readinto(content)
    frames = read_frames(memoryview(content)[:num_read])
    parts = wire.decode(frames, max_frames=sys.maxsize, max_bytes=sys.maxsize, writable=True)
    return from_parts(kind, parts, is_borrowed=False)
