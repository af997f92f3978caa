"""One codec for Ray, ZMQ and disk: a versioned msgpack header and the raw buffers of the arrays behind it.

`encode` copies no contiguous array, `decode` returns views of the frames it was given. Whatever the bytes are,
`decode` raises `WireError` or returns plain values: it runs no code and allocates in proportion to the message.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from msgpack.exceptions import UnpackException

from .errors import WireError
from .wire_tree import Decoder, Encoder, Frame
from .wire_walk import Columns, Unsupported, check_depth, path_to

__all__ = ["MAX_BYTES", "MAX_DEPTH", "MAX_FRAMES", "VERSION", "Columns", "Frame", "decode", "encode"]

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


def encode(value: Any, *, foreign: list[Any] | None = None, max_depth: int | None = MAX_DEPTH) -> list[Frame]:
    """Turn a value into frames.

    Args:
        value: None, bool, int, float, complex, str, bytes, aware datetimes; lists, tuples and dicts; numpy arrays and
            scalars of every dtype (objects: of what is listed here; structured: of named fields); and, where torch is
            loaded, its dense and nested tensors of any dtype of whole bytes. Subclasses of these do not travel.
        foreign: Where given, values of any other type are appended to it and travel by position; the transport
            must carry them itself, and hand them back to `decode`.
        max_depth: Containers within containers allowed; None leaves it to msgpack, which packs about 500.

    Returns:
        The header, then the memory of the arrays. Buffers of contiguous arrays share the array's memory, so the value
        must not be written to until the frames are sent.

    Raises:
        WireError: the value holds something that is not listed above, nests deeper than ``max_depth``, or holds
            itself; the message says where.
    """
    encoder = Encoder(foreign)
    try:
        if max_depth is not None:
            check_depth(value, max_depth)
        return [_PREFIX + encoder.pack(value), *encoder.buffers]
    except Unsupported as error:
        raise WireError(f"{path_to(error.value, value)}: {error}") from error
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
        frames: What `encode` returned. Anything that has a buffer will do.
        foreign: The list that `encode` filled.
        max_frames: Frames allowed, the header among them.
        max_bytes: Bytes allowed over all frames.
        max_depth: Containers within containers allowed; None leaves it to msgpack, which reads about 1000.
        writable: Arrays over frames that may be written to may be written to as well.

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
        if max_depth is not None:
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
        views = [memoryview(frame) for frame in frames]
        views = [view if view.format == "B" and view.ndim == 1 else view.cast("B") for view in views]
    except (TypeError, ValueError) as error:
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
