"""Many small frames as one: ZMQ's cost is by the frame, and below ``JOIN_BELOW_BYTES`` a copy is cheaper than frames.

A parcel is ``b"prcl"``, the number of frames, their lengths as uint64, and the frames, each from a multiple of 16 on,
so that arrays can be read in place.
"""

import struct
from collections.abc import Sequence
from typing import Any

from asyncrl.protocol.errors import WireError

JOIN_BELOW_BYTES = 256 * 1024
_MAGIC = b"prcl"
_ALIGN = 16
_PADDING = [bytes(n) for n in range(_ALIGN)]


def wrap(frames: Sequence[Any]) -> list[Any]:
    """One parcel if the frames are small together, else the frames as they are.

    Args:
        frames: Bytes, or views of bytes: what has its length in bytes as ``len``.
    """
    lengths = [*map(len, frames)]
    if sum(lengths) >= JOIN_BELOW_BYTES:
        return list(frames)
    parts: list[Any] = [struct.pack(f"<4sI{len(lengths)}Q", _MAGIC, len(lengths), *lengths)]
    position = len(parts[0])
    for frame, length in zip(frames, lengths, strict=True):
        parts.append(_PADDING[-position % _ALIGN])
        parts.append(frame)
        position += -position % _ALIGN + length
    return [b"".join(parts)]


def unwrap(frames: Sequence[Any]) -> list[Any]:
    """The frames that `wrap` was given; views of the parcel where it made one.

    Raises:
        WireError: the parcel is malformed.
    """
    if len(frames) != 1:
        return list(frames)
    parcel = memoryview(frames[0]).cast("B")
    if parcel[: len(_MAGIC)] != _MAGIC:
        return list(frames)
    try:
        (number,) = struct.unpack_from("<I", parcel, len(_MAGIC))
        start = len(_MAGIC) + 4 + 8 * number
        if start > parcel.nbytes:
            raise WireError(f"a parcel of {parcel.nbytes} bytes cannot hold {number} frames")
        lengths = struct.unpack_from(f"<{number}Q", parcel, len(_MAGIC) + 4)
    except struct.error as error:
        raise WireError(f"a parcel of {parcel.nbytes} bytes is cut short: {error}") from error
    views = []
    for length in lengths:
        start += -start % _ALIGN
        views.append(parcel[start : start + length])
        start += length
    if start != parcel.nbytes:
        raise WireError(f"a parcel of {parcel.nbytes} bytes says that it has {start}")
    return views
