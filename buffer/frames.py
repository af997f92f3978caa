"""Frames are the encoded bytes of a payload. Frames are in memory, or in a journal's file until a caller reads them."""

import errno
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple, Self, overload

import xxhash

Frames = Sequence[Any]
"""The encoded bytes of a prompt, a saved prefix or a trajectory group, in memory or as `FramesOnDisk`."""
LoggedFrames = Mapping[tuple[str, int], Frames | int]
"""Maps (kind, key) to the frames of a command, or to a number that identifies frames in the journal.

The number 0 removes the frames. `Journal` describes the keys.
"""


class Written(NamedTuple):
    """The position of consecutive frames in a file.

    Attributes:
        start: Offset of the first frame in the file, in bytes.
        head_bytes: Size in bytes of the head, which is directly before the first frame; 0 without a head.
        checksum: xxh3 hash of the head and the frames.
    """

    start: int
    head_bytes: int
    checksum: int

    @classmethod
    def without_head(cls, start: int, frames: Frames) -> Self:
        """Return the position of ``frames``, which have no head and begin at byte ``start`` of a file.

        The checksum covers only the frames.
        """
        digest = xxhash.xxh3_64()
        for frame in frames:
            digest.update(frame)
        return cls(start, 0, digest.intdigest())


class FramesOnDisk(Sequence[Any]):
    """Consecutive frames in a file. Each iteration reads the frames and verifies their checksum.

    Raises `OSError` if the frames cannot be read or are damaged.

    Attributes:
        place: Number that identifies the frames in their journal.
        num_bytes: Total size of the frames in bytes.
    """

    def __init__(self, path: Path, written: Written, lengths: Iterable[int], *, place: int) -> None:
        self._at = path, written
        self._lengths = tuple(lengths)
        self.place = place
        self.num_bytes = sum(self._lengths)

    def move(self, path: Path, written: Written, *, place: int) -> None:
        """Make later reads use a copy of the frames. Another thread may call `read` during this call.

        The copy is in the file ``path``, at the position ``written``. ``place`` identifies the copy in its journal.
        """
        self._at, self.place = (path, written), place

    def move_to(self, copy: "FramesOnDisk") -> None:
        """Make later reads use the file and the position of ``copy``, which holds the same frames."""
        self._at, self.place = copy._at, copy.place

    def read(self) -> Frames:
        """Return the frames as a list of bytes. Raises `OSError` if the frames are damaged or unreadable."""
        while True:
            path, written = at = self._at
            begin, lengths = written.start - written.head_bytes, (written.head_bytes, *self._lengths)
            try:
                with path.open("rb", buffering=0) as file:
                    head, *frames = frames_at(file.fileno(), begin, lengths, path)
                break
            except FileNotFoundError:
                if at == self._at:  # if `move` has set another file meanwhile, read the frames from that file instead
                    raise
        digest = xxhash.xxh3_64(head)
        for frame in frames:
            digest.update(frame)
        if digest.intdigest() != written.checksum:
            message = f"the {self.num_bytes} bytes from byte {written.start} on are damaged"
            raise OSError(errno.EIO, message, str(path))
        return frames

    def __len__(self) -> int:
        return len(self._lengths)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.read())

    @overload
    def __getitem__(self, index: int) -> Any: ...

    @overload
    def __getitem__(self, index: slice) -> Frames: ...

    def __getitem__(self, index: int | slice) -> Any:
        return self.read()[index]


def frames_at(descriptor: int, start: int, lengths: Sequence[int], path: Path) -> Frames:
    """Return consecutive frames of an open file, from byte ``start`` on, as a list of bytes.

    ``lengths`` holds the size of each frame. Raises `OSError` if the file cannot be read or is too short.
    """
    ends = [*accumulate(lengths, initial=start)]
    return [_bytes_at(descriptor, begin, end - begin, path) for begin, end in pairwise(ends)]


def _bytes_at(descriptor: int, start: int, num_bytes: int, path: Path) -> bytes:
    parts: list[bytes] = []
    while num_bytes:
        part = os.pread(descriptor, num_bytes, start)  # Linux reads at most 2 GiB per call
        if not part:
            raise OSError(errno.EIO, "the file ends too early", str(path))
        parts.append(part)
        start, num_bytes = start + len(part), num_bytes - len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def in_memory(frames: Frames) -> Frames:
    """Read ``frames`` into memory if they are on disk. Return the frames in memory.

    Raises `OSError` if frames on disk cannot be read or are damaged.
    """
    return frames.read() if isinstance(frames, FramesOnDisk) else frames


def size_of(frames: Iterable[Any]) -> int:
    """Return the total size of frames, in bytes."""
    return frames.num_bytes if isinstance(frames, FramesOnDisk) else sum(map(len, frames))
