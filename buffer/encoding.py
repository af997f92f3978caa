"""Encodes and decodes messages, prompts and trajectory groups.

A message has a msgpack header ``[PROTOCOL_VERSION, epoch, [[request_id, number of frames, record], …]]``, and then the
frames of its records (`buffer.commands` and `buffer.operations`). The epoch is the name of the run. Request id 0 marks
a push: a message that the server sends without a request.

A prompt is encoded by the project's codec. A group is encoded as a head with the schema of its columns, then one buffer
per column. This takes a third of the codec's time.

`pack` joins small frames, because ZMQ has a fixed cost per part, and cuts large frames into parts. The first part
begins with ``b"prcl"``, the number of frames, and the frames' lengths as uint64. Inside a joined part every frame
starts at a multiple of 16 bytes, so arrays can be read in place.
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from math import prod
from operator import or_
from typing import Any

import msgpack
import msgspec
import numpy as np

from asyncrl.core import errors
from asyncrl.core.errors import AsyncRLError, WireError
from asyncrl.core.trajectory import TURN_DTYPE, TrajectoryGroup
from asyncrl.core.types import Prompt
from asyncrl.single_controller import codec
from asyncrl.single_controller.codec import buffer_of, checked_shape, dtype_of

from .commands import OPERATIONS
from .operations import Failure
from .records import Answer, Int64, Operation, leaves

PROTOCOL_VERSION = 9
MAX_HEADER_BYTES = 1 << 20
MAX_FRAMES = 4096
MAX_BATCH = 64
MAX_REPLY_HEADER_BYTES = 1 << 28
MAX_REPLY_FRAMES = 1 << 20
PUSH_ID = 0
CHUNK_BYTES = 4 * 1024**2
JOIN_BELOW_BYTES = 256 * 1024
_SMALL_BYTES = 64 * 1024
_PACKED = b"prcl"
_ALIGN = 16
_PADDING = [bytes(n) for n in range(_ALIGN)]
_GROUP = b"grp\x03"
_GROUP_HEAD = struct.Struct("<4sqq")
"""The start of an encoded group: a marker, the id and the attempt. The schema follows."""
_NUMERIC = frozenset("biufc")
_MALFORMED = (
    *(ValueError, TypeError, KeyError, IndexError, OverflowError, AttributeError, StopIteration, RuntimeError),
    *(struct.error, msgpack.exceptions.UnpackException),
)

_encode = msgspec.msgpack.Encoder().encode
_read_header = msgspec.msgpack.Decoder(tuple[int, str, list[tuple[Int64, Int64, msgspec.Raw]]]).decode
_read_operation = msgspec.msgpack.Decoder(reduce(or_, OPERATIONS)).decode
_read_answer = msgspec.msgpack.Decoder(reduce(or_, leaves(Answer))).decode
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


@dataclass(kw_only=True, slots=True, eq=False)
class Message:
    """A message: a record and its frames (encoded prompts or trajectories).

    The class is not frozen, because a frozen class would double the construction time.

    Attributes:
        request_id: Chosen by the client and repeated in the answer; `PUSH_ID` if the message answers no request.
        body: An operation, or an answer. The body of a received request stays encoded until `operation_of` decodes it.
        payload: Frames of the record.
        client: Id of the client that sent the request; the server sets it.
    """

    request_id: int
    body: Any
    payload: Sequence[Any] = ()
    client: bytes = b""


Send = Callable[[bytes, Message], None]
"""A function that sends a message to the client with this id."""


def frames_of(epoch: str, messages: Sequence[Message]) -> list[Any]:
    """Join messages into one ZMQ message, and return its frames: a header, then all payloads.

    One joined message is faster than several messages, because each ZMQ message has a fixed cost. ``epoch`` is the name
    of the run.
    """
    heads = [(message.request_id, len(message.payload), message.body) for message in messages]
    return [_encode((PROTOCOL_VERSION, epoch, heads)), *(frame for message in messages for frame in message.payload)]


def parse_requests(frames: Sequence[Any], *, max_frames: int = MAX_FRAMES) -> tuple[str, list[Message]]:
    """Return the epoch (name of the run) and the requests in a client's ZMQ message.

    The bodies of the requests stay encoded. Raises `WireError` if the message is malformed.
    """
    epoch, requests = _parse(frames, max_frames, MAX_HEADER_BYTES)
    if len(requests) > MAX_BATCH:
        raise WireError(f"a message must have at most {MAX_BATCH} requests, got {len(requests)}")
    return epoch, requests


def operation_of(request: Message) -> Operation[Any]:
    """Decode a request's operation. Raises `WireError` if the operation is unknown or a field is out of range."""
    try:
        return _read_operation(request.body)
    except _UNREADABLE as error:
        raise WireError(f"not an operation of the buffer: {error}") from error


def parse_answers(frames: Sequence[Any]) -> list[Message]:
    """Return the answers and pushes in a server's ZMQ message, which may be larger than a client's message.

    Raises `WireError` if the message is malformed.
    """
    _, messages = _parse(frames, MAX_REPLY_FRAMES, MAX_REPLY_HEADER_BYTES)
    try:
        for message in messages:
            message.body = _read_answer(message.body)
    except _UNREADABLE as error:
        raise WireError(f"not an answer of the buffer: {error}") from error
    return messages


def _parse(frames: Sequence[Any], max_frames: int, max_header_bytes: int) -> tuple[str, list[Message]]:
    if not 1 <= len(frames) <= max_frames:
        raise WireError(f"a message must have 1 to {max_frames} frames, got {len(frames)}")
    header = memoryview(frames[0])
    if header.nbytes > max_header_bytes:
        raise WireError(f"a header must have at most {max_header_bytes} bytes, got {header.nbytes}")
    start = bytes(header[:2])
    got = start[1] if len(start) == 2 and start[0] >> 4 == 9 and start[1] < 128 else "none"
    if got != PROTOCOL_VERSION:
        raise WireError(
            f"expected a header of buffer protocol version {PROTOCOL_VERSION}, got version {got}; run the same release "
            "of asyncrl on both sides"
        )
    try:
        _, epoch, heads = _read_header(header)
    except _UNREADABLE as error:
        raise WireError(f"a header must be [version, epoch, [[request_id, frames, record], …]]: {error}") from error
    messages, end = [], 1
    for request_id, num_frames, body in heads:
        messages.append(Message(request_id=request_id, body=body, payload=frames[end : end + num_frames]))
        end += num_frames
    if end != len(frames):
        raise WireError(f"a message has {len(frames) - 1} frames after its header, but the header describes {end - 1}")
    return epoch, messages


_ERRORS = {
    kind.__name__: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, AsyncRLError)
}


def failure_of(error: AsyncRLError) -> Failure:
    """Return the answer that makes the client raise ``error``."""
    return Failure(type(error).__name__, str(error))


def error_of(failure: Failure) -> AsyncRLError:
    """Return the error that the client raises for the server's answer ``failure``."""
    kind = _ERRORS.get(failure.name)
    return WireError(f"unknown reply {failure.name!r}: {failure.message}") if kind is None else kind(failure.message)


def prompt_frames(prompt: Prompt) -> list[Any]:
    """Encode a prompt as a list of frames (bytes, or views of bytes)."""
    values = {
        "group_id": prompt.group_id,
        "prompt_ids": prompt.prompt_ids,
        "ground_truth": prompt.ground_truth,
        "data_source": prompt.data_source,
        "extra": dict(prompt.extra),
        "messages": tuple(map(dict, prompt.messages)),
        "tools": tuple(map(dict, prompt.tools)),
        "environment": prompt.environment,
        "environment_options": dict(prompt.environment_options),
    }
    return pack(codec.encode(values))


def prompt_of(frames: Sequence[Any]) -> Prompt:
    """Decode a prompt from the frames of `prompt_frames`. Raises `WireError` if the frames do not hold a prompt."""
    values = codec.decode(unpack(frames))
    try:
        return Prompt(**values)
    except TypeError as error:
        raise WireError(f"payload is not a Prompt: {error}") from error


def group_frames(group: TrajectoryGroup) -> list[Any]:
    """Encode a trajectory group as a list of frames: a head, the turns, and one buffer per column.

    The head holds the group's ids and the schema of the columns: names, dtypes and shapes without the first dimension.
    Large arrays are not copied. Raises `TypeError` if a column is not an array of numbers.
    """
    buffers: list[Any] = [group.turns.tobytes()]
    schema = []
    for scope in (group.token_columns, group.trajectory_columns, group.turn_columns, group.image_columns):
        described = []
        for name, column in scope.items():
            if not isinstance(column, np.ndarray) or column.dtype.kind not in _NUMERIC:
                raise TypeError(
                    f"column {name!r} of a TrajectoryGroup must be a numpy array of numbers, got {column!r:.40}"
                )
            described.append((name, column.dtype, column.shape[1:]))
            buffers.append(buffer_of(column))
        schema.append(tuple(described))
    return pack([_GROUP_HEAD.pack(_GROUP, group.group_id, group.attempt) + _schema_bytes(tuple(schema)), *buffers])


def group_of(frames: Sequence[Any]) -> TrajectoryGroup:
    """Decode a trajectory group from the frames of `group_frames`. Raises `WireError` if the frames are malformed.

    The arrays are read-only views of the frames. Only a column that was sent in several parts is copied.
    """
    head, *buffers = unpack([memoryview(frame).toreadonly() for frame in frames])
    if head[: len(_GROUP)] != _GROUP:
        raise WireError(f"payload is not a TrajectoryGroup of this release: it begins with {bytes(head[:4])!r}")
    try:
        _, group_id, attempt = _GROUP_HEAD.unpack_from(head)
        schema = _schema_of(bytes(head[_GROUP_HEAD.size :]))
        rest = iter(buffers)
        turns = _array(TURN_DTYPE, (), TURN_DTYPE.itemsize, next(rest))
        token, trajectory, turn, image = (
            {name: _array(dtype, shape, row_bytes, next(rest)) for name, dtype, shape, row_bytes in scope}
            for scope in schema
        )
        group = TrajectoryGroup(
            group_id=group_id,
            attempt=attempt,
            turns=turns,
            token_columns=token,
            trajectory_columns=trajectory,
            turn_columns=turn,
            image_columns=image,
        )
        group.check()
    except _MALFORMED as error:
        raise WireError(f"payload is not a TrajectoryGroup: {type(error).__name__}: {error}") from error
    if next(rest, None) is not None:
        raise WireError("payload is not a TrajectoryGroup: it has more buffers than its schema has columns")
    return group


@lru_cache(maxsize=256)
def _schema_bytes(schema: tuple[tuple[tuple[str, np.dtype, tuple[int, ...]], ...], ...]) -> bytes:
    named = [[(name, dtype.str, shape) for name, dtype, shape in scope] for scope in schema]
    packed: Any = msgpack.packb(named)
    return packed


@lru_cache(maxsize=256)
def _schema_of(data: bytes) -> list[list[tuple[str, np.dtype, tuple[int, ...], int]]]:
    """Return four lists: the columns per token, per trajectory, per turn and per image of an encoded group.

    Each list has one tuple per column: name, dtype, shape without the first dimension, and bytes per row.
    """
    schema = []
    for scope in msgpack.unpackb(data, max_ext_len=0):
        columns = [(str(name), dtype_of(dtype.encode()), checked_shape(shape)) for name, dtype, shape in scope]
        schema.append([(name, dtype, shape, dtype.itemsize * prod(shape)) for name, dtype, shape in columns])
    if any(dtype.kind not in _NUMERIC or not row_bytes for scope in schema for _, dtype, _, row_bytes in scope):
        raise WireError(f"columns must hold numbers, got {schema}")
    return schema


def _array(dtype: np.dtype, shape: tuple[int, ...], row_bytes: int, buffer: memoryview) -> np.ndarray:
    num_rows, rest = divmod(len(buffer), row_bytes)
    if rest:
        raise WireError(
            f"a column with rows {dtype}{list(shape)} must have a multiple of {row_bytes} bytes, got {len(buffer)}"
        )
    if not num_rows:
        return np.empty((0, *shape), dtype=dtype)
    return np.ndarray((num_rows, *shape), dtype, buffer)


def pack(frames: Sequence[Any]) -> list[Any]:
    """Pack frames (bytes, or views of bytes) into parts of a suitable size for ZMQ, and return the parts.

    If all frames together have fewer than ``JOIN_BELOW_BYTES`` bytes, the result is one part. Otherwise the result is a
    header and parts of at most ``CHUNK_BYTES`` bytes.
    """
    lengths = [*map(len, frames)]
    header = struct.pack(f"<4sI{len(lengths)}Q", _PACKED, len(lengths), *lengths)
    if sum(lengths) < JOIN_BELOW_BYTES:
        return [_joined(header, frames, lengths)]
    parts: list[Any] = [header]
    for start, stop in _runs(lengths):
        if lengths[start] < _SMALL_BYTES:
            parts.append(_joined(b"", frames[start:stop], lengths[start:stop]))
        else:
            view = memoryview(frames[start])
            parts += [view[i : i + CHUNK_BYTES] for i in range(0, lengths[start], CHUNK_BYTES)]
    return parts


def unpack(parts: Sequence[Any]) -> list[Any]:
    """Return the frames that `pack` packed, as views of ``parts`` if possible.

    Raises `WireError` if the payload is malformed.
    """
    if not parts:
        raise WireError("a payload must have at least one part, got none")
    header, *pieces = (memoryview(part).cast("B") for part in parts)
    lengths, start = _lengths(header)
    if not pieces:
        return _split(header, start, lengths)
    if start != header.nbytes:
        raise WireError(f"a payload's header has {header.nbytes} bytes, expected {start}")
    frames: list[Any] = []
    left = iter(pieces)
    for first, stop in _runs(lengths):
        piece = next(left, None)
        if piece is None:
            raise WireError(f"a payload of {len(pieces)} parts is incomplete: its header describes more parts")
        if lengths[first] < _SMALL_BYTES:
            frames += _split(piece, 0, lengths[first:stop])
        else:
            frames.append(_rejoined(piece, left, lengths[first]))
    if next(left, None) is not None:
        raise WireError(f"a payload has {len(pieces)} parts, but its header describes fewer")
    return frames


def _runs(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield ranges [start, stop) of frame numbers.

    A range has one large frame, or adjacent small frames. `pack` joins the small frames of a range into one part.
    """
    start = 0
    while start < len(lengths):
        stop, size = start + 1, lengths[start] + _ALIGN
        if lengths[start] < _SMALL_BYTES:
            while stop < len(lengths) and lengths[stop] < _SMALL_BYTES and size + lengths[stop] < CHUNK_BYTES:
                size += lengths[stop] + _ALIGN
                stop += 1
        yield start, stop
        start = stop


def _joined(header: bytes, frames: Sequence[Any], lengths: Sequence[int]) -> bytes:
    parts: list[Any] = [header]
    position = len(header)
    for frame, length in zip(frames, lengths, strict=True):
        padding = -position % _ALIGN
        parts += (_PADDING[padding], frame)
        position += padding + length
    return b"".join(parts)


def _split(part: memoryview, start: int, lengths: Sequence[int]) -> list[memoryview]:
    views = []
    for length in lengths:
        start += -start % _ALIGN
        views.append(part[start : start + length])
        start += length
    if start != part.nbytes:
        raise WireError(f"a part has {part.nbytes} bytes, but its frames need {start} bytes")
    return views


def _rejoined(piece: memoryview, others: Iterator[memoryview], length: int) -> Any:
    if piece.nbytes == length:
        return piece
    pieces = [piece]
    size = piece.nbytes
    while size < length and (more := next(others, None)) is not None:
        pieces.append(more)
        size += more.nbytes
    if size != length:
        raise WireError(f"the parts of a frame must have {length} bytes in total, got {size}")
    return memoryview(b"".join(pieces))


def _lengths(header: memoryview) -> tuple[tuple[int, ...], int]:
    if header[: len(_PACKED)] != _PACKED:
        raise WireError(f"a payload must begin with a header, got {bytes(header[:4])!r}")
    try:
        (number,) = struct.unpack_from("<I", header, len(_PACKED))
        end = len(_PACKED) + 4 + 8 * number
        if end > header.nbytes:
            raise WireError(f"a payload's header of {header.nbytes} bytes is too small for {number} frame lengths")
        return struct.unpack_from(f"<{number}Q", header, len(_PACKED) + 4), end
    except struct.error as error:
        raise WireError(f"a payload's header of {header.nbytes} bytes is incomplete: {error}") from error
