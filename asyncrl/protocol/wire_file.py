"""Frames of the codec in one file: their number and sizes, then the frames, each at a multiple of 64 bytes."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import BinaryIO

from .errors import WireError
from .wire import Frame

_MAGIC = b"aRLfile\x01"
_ALIGNMENT = 64


def write_frames(file: BinaryIO, frames: Sequence[Frame]) -> None:
    """Write frames to a file opened for binary writing."""
    sizes = [memoryview(frame).nbytes for frame in frames]
    head = _MAGIC + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
    file.write(head + b"\0" * (-len(head) % _ALIGNMENT))
    for frame, size in zip(frames, sizes, strict=True):
        file.write(frame)
        file.write(b"\0" * (-size % _ALIGNMENT))


def read_frames(data: bytes | memoryview) -> list[memoryview]:
    """The frames in a file's bytes, as views of them.

    Raises:
        WireError: the bytes are not such a file, or a part of one.
    """
    view = memoryview(data)
    if bytes(view[: len(_MAGIC)]) != _MAGIC:
        raise WireError(f"not a file of this protocol: it begins with {bytes(view[: len(_MAGIC)])!r}")
    try:
        (num_frames,) = struct.unpack_from("<I", view, len(_MAGIC))
        sizes = struct.unpack_from(f"<{num_frames}Q", view, len(_MAGIC) + 4)
    except struct.error as error:
        raise WireError(f"file is truncated: {error}") from error
    start = _aligned(len(_MAGIC) + 4 + 8 * num_frames)
    frames = []
    for size in sizes:
        if start + size > view.nbytes:
            raise WireError(f"file is truncated: it has {view.nbytes} bytes, a frame ends at {start + size}")
        frames.append(view[start : start + size])
        start += _aligned(size)
    if start != view.nbytes:
        raise WireError(f"file has {view.nbytes} bytes, its frames end at {start}")
    return frames


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
