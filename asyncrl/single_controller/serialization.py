"""Converts a `DataProto` to bytes and back, for Ray, disk and collectives. Converts a TensorDict to tuples and back."""

from __future__ import annotations

import io
import struct
import sys
from collections.abc import Sequence
from typing import Any, BinaryIO, TypeVar

import msgspec
import torch
import torch.distributed as dist
from tensordict import TensorDict

from asyncrl.core.errors import BatchError, WireError
from asyncrl.single_controller.codec import Columns, Frame, decode, encode
from asyncrl.single_controller.columns import UnbuiltBatch, is_nested, memory_of, rows_of

T = TypeVar("T")
Message = tuple[Frame, Sequence[Any], Sequence[Any]]
"""An encoded batch: the header, the memory of its arrays, and values that the codec cannot encode."""


def rebuild(kind: Any, header: Frame, buffers: Sequence[Any], foreign: Sequence[Any]) -> Any:
    """Return a batch of class ``kind`` from its pickled parts. Pickle calls this function.

    The parts are decoded when an attribute of the batch is first read.
    """
    data = kind.__new__(kind)
    data.__setstate__((header, buffers, foreign))
    return data


def parts_of(data: Any) -> dict[str, Any]:
    """Return a `DataProto` as a dict that `codec.encode` supports: tensors, arrays and meta information.

    Raises `BatchError` if the columns of the batch do not have the same number of rows.
    """
    data.check_consistency()
    batch = None
    if data._batch is not None:
        batch = [len(data), Columns(dict(data._batch.items()))]
    return {"batch": batch, "non_tensor_batch": data.non_tensor_batch, "meta_info": data.meta_info}


def from_parts(kind: type, parts: Any, *, is_borrowed: bool = True) -> Any:
    """Build a batch of class ``kind`` (`DataProto` or a subclass) from a dict that `parts_of` returned.

    ``is_borrowed`` means that other processes may read the tensors' memory; the batch then copies the tensors before
    use. Raises `WireError` if ``parts`` has another form.
    """
    try:
        batch, arrays, meta_info = parts["batch"], parts["non_tensor_batch"], parts["meta_info"]
        if type(arrays) is not dict or type(meta_info) is not dict:
            raise TypeError("the parts are not maps")
        if batch is None:
            return kind(batch=None, non_tensor_batch=arrays, meta_info=meta_info)
        num_rows, tensors = batch
        if type(num_rows) is not int or not 0 <= num_rows < sys.maxsize or type(tensors) is not dict:
            raise ValueError(f"the batch must have a number of rows and a map of tensors, got {num_rows!r:.40} rows")
        for name, tensor in tensors.items():
            if type(name) is not str or not isinstance(tensor, torch.Tensor | TensorDict):
                raise TypeError(f"the batch must contain only tensors with names, got {name!r:.40}")
            if tensor.size(0) != num_rows:
                raise ValueError(f"the batch has {num_rows} rows, but {name!r} has {tensor.size(0)}")
        unbuilt = UnbuiltBatch(tensors, num_rows, is_borrowed=is_borrowed)
        return kind(batch=unbuilt, non_tensor_batch=arrays, meta_info=meta_info)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise WireError(f"message is not a DataProto: {error}") from error


_FILE_MAGIC = b"aRLfile\x01"
_ALIGNMENT = 64


def write_frames(file: BinaryIO, frames: Sequence[Frame]) -> None:
    """Write a list of byte buffers to a binary file, in a format that `read_frames` reads."""
    sizes = [memoryview(frame).nbytes for frame in frames]
    head = _FILE_MAGIC + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
    file.write(head + b"\0" * (-len(head) % _ALIGNMENT))
    for frame, size in zip(frames, sizes, strict=True):
        file.write(frame)
        file.write(b"\0" * (-size % _ALIGNMENT))


def read_frames(data: bytes | memoryview) -> list[memoryview]:
    """Return the byte buffers that `write_frames` wrote, as views of ``data``, the content of the file.

    Raises `WireError` if `write_frames` did not write the file, or if the file is truncated.
    """
    view = memoryview(data)
    if bytes(view[: len(_FILE_MAGIC)]) != _FILE_MAGIC:
        raise WireError(f"not a file of this protocol: it begins with {bytes(view[: len(_FILE_MAGIC)])!r}")
    try:
        (num_frames,) = struct.unpack_from("<I", view, len(_FILE_MAGIC))
        sizes = struct.unpack_from(f"<{num_frames}Q", view, len(_FILE_MAGIC) + 4)
    except struct.error as error:
        raise WireError(f"file is truncated: {error}") from error
    start = _aligned(len(_FILE_MAGIC) + 4 + 8 * num_frames)
    frames = []
    for size in sizes:
        if start + size > view.nbytes:
            raise WireError(f"file is truncated: it has {view.nbytes} bytes, but a frame ends at byte {start + size}")
        frames.append(view[start : start + size])
        start += _aligned(size)
    if start != view.nbytes:
        raise WireError(f"file has {view.nbytes} bytes, but its frames end at byte {start}")
    return frames


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def all_gather_data_proto(data: Any, process_group: Any) -> None:
    """Replace each rank's batch, in place, by the rows of all ranks' batches in rank order. This is a collective.

    The ranks may have different numbers of rows. The tensors stay on the device of this rank's tensors, and
    ``meta_info`` does not change.

    Args:
        data: This rank's `DataProto`.
        process_group: The process group; None is the default group. Its timeout limits the wait.

    Raises:
        BatchError: the columns differ between ranks. All ranks raise this error.
        WireError: an object column has a value that the codec does not support.
    """
    tensors = data.columns()
    part = _message_of(parts_of(data.select(meta_info_keys=()).to("cpu")))
    parts = [from_parts(type(data), _value_of(message)) for message in all_gather_bytes(part, process_group)]
    whole = type(data).concat(parts)
    if whole.batch is not None and data._batch is not None:
        for key, tensor in tensors.items():
            whole.batch[key] = whole.batch[key].to(tensor.device)
        if data._batch.device is not None:
            whole.batch = whole.batch.to(data._batch.device)
    data.batch, data.non_tensor_batch = whole.batch, whole.non_tensor_batch


def broadcast_value(value: Any, process_group: Any) -> Any:
    """Send a Python value from the first rank of a process group to all ranks, and return it. This is a collective.

    The ``value`` of the other ranks is ignored. The first rank returns its own object. Raises `WireError` if the codec
    does not support the value.
    """
    device = _device_of(process_group)
    is_first = dist.get_rank(process_group) == 0
    message = _message_of(value) if is_first else b""
    size = torch.tensor([len(message)], device=device)
    dist.broadcast(size, group=process_group, group_src=0)
    memory = torch.frombuffer(bytearray(message.ljust(int(size), b"\0")), dtype=torch.uint8).to(device)
    dist.broadcast(memory, group=process_group, group_src=0)
    return value if is_first else _value_of(memory.cpu().numpy().data)


def _message_of(value: Any) -> bytes:
    file = io.BytesIO()
    write_frames(file, encode(value))
    return file.getvalue()


def _value_of(message: memoryview) -> Any:
    """Decode a message that `_message_of` returned. Arrays are writable views of the message."""
    return decode(read_frames(message), writable=True)


def _device_of(group: Any) -> torch.device | None:
    on_cpu = any(name in dist.get_backend(group) for name in ("gloo", "mpi"))
    return torch.device("cpu") if on_cpu else torch.accelerator.current_accelerator()


def all_gather_bytes(message: bytes, group: Any) -> list[memoryview]:
    """Send bytes from each rank of a process group to all ranks. This is a collective.

    Returns the messages of all ranks, in rank order. The messages may differ in length.
    """
    device = _device_of(group)
    num_ranks = dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(num_ranks)]
    dist.all_gather(sizes, torch.tensor([len(message)], device=device), group=group)
    longest = max(map(int, sizes))
    padded = torch.frombuffer(bytearray(message.ljust(longest, b"\0")), dtype=torch.uint8).to(device)
    gathered = [torch.empty_like(padded) for _ in range(num_ranks)]
    dist.all_gather(gathered, padded, group=group)
    return [part.cpu().numpy().data[: int(size)] for part, size in zip(gathered, sizes, strict=True)]


def gather_values(value: T, kind: Any, group: dist.ProcessGroup | None) -> list[T]:
    """Send a value from each rank of a process group to all ranks. Return the values in rank order.

    This is a collective.

    Args:
        value: A number, a string, or a list, tuple or dataclass of such values.
        kind: Type of the value, for decoding. Example: ``list[tuple[int, int]]``.
        group: The process group; None for a single rank.

    Raises:
        msgspec.ValidationError: a rank sent a value of another type.
    """
    if group is None:
        return [value]
    return [msgspec.msgpack.decode(part, type=kind) for part in all_gather_bytes(msgspec.msgpack.encode(value), group)]


def gather_rows(tensors: tuple[torch.Tensor, ...], group: dist.ProcessGroup) -> list[Any]:
    """Send a tuple of CPU tensors from each rank of a process group to all ranks. This is a collective.

    Returns one tuple of CPU tensors per rank. The ranks' tensors may differ in shape.
    """
    return [_value_of(part) for part in all_gather_bytes(_message_of(tensors), group)]


TensorParts = tuple[str, tuple[int, ...], Any]


def serialize_single_tensor(obj: torch.Tensor) -> TensorParts:
    """Return a tuple that describes a dense tensor: the dtype's name, the shape, and the bytes, [nbytes] uint8.

    The bytes are a view of the tensor's memory if the tensor is contiguous and on the CPU.
    """
    return str(obj.dtype).removeprefix("torch."), obj.shape, memory_of(obj)


def deserialize_single_tensor(arr: TensorParts) -> torch.Tensor:
    """Build a tensor, in new memory, from the tuple that `serialize_single_tensor` returned.

    Raises `BatchError` if the dtype, the shape and the bytes do not fit together.
    """
    name, shape, data = arr
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise BatchError(f"torch has no dtype {name!r}")
    memory = bytearray(data)
    if len(memory) != torch.Size(shape).numel() * dtype.itemsize:
        raise BatchError(f"{len(memory)} bytes do not fit a tensor {name}{list(shape)}")
    if not memory:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


def serialize_tensordict(
    batch: TensorDict,
) -> tuple[tuple[int, ...], str | None, dict[str, TensorParts | tuple[str, list[TensorParts]]]]:
    """Convert a TensorDict to a tuple: the batch size, the name of the device or None, and the tensors by name.

    A dense tensor becomes the result of `serialize_single_tensor`. A nested tensor becomes a pair: the layout's name,
    and a list of the rows. Each row is converted like a dense tensor.
    """
    tensors: dict[str, Any] = dict(batch.items())
    items: dict[str, Any] = {
        key: (str(tensor.layout).removeprefix("torch."), list(map(serialize_single_tensor, rows_of(tensor))))
        if is_nested(tensor)
        else serialize_single_tensor(tensor)
        for key, tensor in tensors.items()
    }
    return tuple(batch.batch_size), None if batch.device is None else str(batch.device), items


def deserialize_tensordict(arr: Any) -> TensorDict:
    """Build a TensorDict from the tuple that `serialize_tensordict` returned.

    Raises `ValueError` if the parts of the tuple do not fit together.
    """
    batch_size, device, items = arr
    tensors: dict[str, Any] = {}
    for key, parts in items.items():
        if len(parts) not in (2, 3):
            raise ValueError(f"tensor {key!r} must have 3 parts, or 2 if it is nested, got {len(parts)}")
        if len(parts) == 3:
            tensors[key] = deserialize_single_tensor(parts)
        else:
            rows = list(map(deserialize_single_tensor, parts[1]))
            tensors[key] = torch.nested.as_nested_tensor(rows, layout=getattr(torch, parts[0]))
    return TensorDict(source=tensors, batch_size=batch_size, device=device)
