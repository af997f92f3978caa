"""Handles of memory that a learner rank lends to the processes of its host, and who may read it when.

A rank lends buffers, and writes one version after the other into each of them. Beside a buffer stands a *note*: a few
bytes that say which version the buffer holds, and on which readers hold a shared lock of the kernel. The rank writes a
version only once nobody reads the one before. The kernel drops the locks of a process that dies, and the note of a rank
that dies cannot be opened any more.
"""

from __future__ import annotations

import fcntl
import os
import struct
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from asyncrl.core.errors import WeightsError, WeightsGone

NOTE = struct.Struct("<q16s")
"""A note: the version, and `MemoryHandle.life`."""
NOTHING = -2
"""Stands for the version of a buffer that is about to be written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryHandle:
    """A buffer of another process of this host, which can be mapped while that one lives.

    Attributes:
        pid: The process.
        life: 16 random characters; another process that was given the same id has others.
        note: Descriptor of the note, in that process.
        data: Descriptor of the bytes, in that process; -1 where they are on a GPU.
        num_bytes: Of the buffer.
        gpu: Unique id of the GPU; empty where the bytes are in the host's memory.
        ipc: What torch needs to map memory of a GPU (CUDA IPC), bytes in hexadecimal.
    """

    pid: int
    life: str
    note: int
    data: int
    num_bytes: int
    gpu: str = ""
    ipc: tuple[Any, ...] = ()

    def path(self, descriptor: int) -> str:
        """Where another process finds a file that this one has open."""
        return f"/proc/{self.pid}/fd/{descriptor}"


@dataclass(frozen=True, kw_only=True, slots=True)
class LentPart:
    """What one learner rank lends of a version.

    Attributes:
        handle: Of its buffer.
        segments: First byte in the data file, number of bytes, and first byte in the buffer, of each contiguous part.
    """

    handle: MemoryHandle
    segments: tuple[tuple[int, int, int], ...]

    @classmethod
    def read(cls, fields: dict[str, Any]) -> LentPart:
        """From what JSON made of one."""
        handle = MemoryHandle(**{**fields["handle"], "ipc": tuple(fields["handle"]["ipc"])})
        return cls(handle=handle, segments=tuple((start, size, at) for start, size, at in fields["segments"]))


class ReadLock:
    """While it is open, the rank does not overwrite the version in its buffer."""

    def __init__(self, handle: MemoryHandle, version: int) -> None:
        """Lock the buffer for reading; waits only for a rank that writes its note.

        Raises:
            WeightsGone: the rank has ended, or has overwritten the version.
            WeightsError: its memory may not be opened by this process.
        """
        who = f"policy version {version} is no longer lent: learner process {handle.pid}"
        try:
            self._descriptor = os.open(handle.path(handle.note), os.O_RDONLY)
        except (FileNotFoundError, ProcessLookupError):
            raise WeightsGone(f"{who} has ended") from None
        except PermissionError as error:
            raise WeightsError(
                f"the memory that learner process {handle.pid} lends cannot be opened: {error}; learner and engines "
                "must run as one user of one host, or set weights.transport=shared_memory"
            ) from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH)
            note = os.pread(self._descriptor, NOTE.size, 0)
            if len(note) != NOTE.size or NOTE.unpack(note)[1] != handle.life.encode():
                raise WeightsGone(f"{who} has ended, and another has its number")
            if (held := NOTE.unpack(note)[0]) != version:
                now = "is about to write a newer one" if held == NOTHING else f"has written version {held} in its place"
                raise WeightsGone(f"{who} {now}")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let the rank write. May be called more than once."""
        with suppress(OSError):
            os.close(self._descriptor)
        self._descriptor = -1
