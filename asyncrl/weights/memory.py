"""Weights in memory that learner ranks lend to processes of their host: host memory, or a GPU's through CUDA IPC.

`LentBuffers` is the rank's side: a few buffers, each of which takes one version after another. `LentWeights` is the
reader's side. Only tensors of which several ranks hold parts are copied.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import warnings
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from asyncrl.core.errors import WeightsError
from asyncrl.core.remote import on_own_thread
from asyncrl.core.types import WeightOffer
from asyncrl.weights.assembly import TensorAssembly, tensor_pieces
from asyncrl.weights.carriers import load_limit_s
from asyncrl.weights.layout import ALIGNMENT, ModelLayout, Region
from asyncrl.weights.manifest import NOTE, NOTHING, LentPart, MemoryHandle, Piece, ReadLock, read_manifest

Segment = tuple[int, int, int]
"""First byte in the data file, number of bytes, first byte in the buffer."""


class LentBuffers:
    """The buffers of one rank, each made when it is first needed.

    Args:
        layout: Of the model's data file, which is never written.
        num_buffers: 2, or 3 where a version is evaluated while newer ones are published.
        timeout_s: Deadline of an engine's load, beside a second per 100 MB.
    """

    def __init__(self, layout: ModelLayout, *, num_buffers: int, timeout_s: float) -> None:
        self._layout, self._num_buffers = layout, num_buffers
        self._timeout_s = 2 * load_limit_s(timeout_s, layout.num_bytes)
        self._buffers: list[LentBuffer] = []

    def take(self, *, shown: int) -> LentBuffer:
        """A buffer for the next version; waits until no engine reads the buffer's version.

        ``shown`` is the oldest version that engines are still offered. It stays if there is a third buffer. Raises
        `WeightsError` if there is no room, or an engine reads for longer than a load may take.
        """
        if len(self._buffers) < self._num_buffers:
            self._buffers.append(LentBuffer(segments_of(self._layout), self._layout.device))
            return self._buffers[-1]
        *older, _newest = sorted(self._buffers, key=lambda buffer: buffer.version)
        chosen = next((buffer for buffer in older if buffer.version != shown), older[0])
        chosen.claim(self._timeout_s)
        return chosen

    def close(self) -> None:
        """Free the buffers; no process can map them any more."""
        for buffer in self._buffers:
            buffer.free()


class LentBuffer:
    """A buffer of this process that other processes of the host may map; a `snapshot.PartTarget`.

    Args:
        segments: What the buffer holds.
        device: Where it is.

    Attributes:
        data: [bytes] uint8, on the device.
        version: What it holds; `NOTHING` until it is complete.
        handle: For the processes that map it.

    Raises `WeightsError` if there is no room.
    """

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        self.version = NOTHING
        self._segments = tuple(segments)
        self._places = {start: at for start, _, at in segments}
        self._life = secrets.token_hex(8)
        self._note = os.memfd_create("weights-note")
        self._memory = -1
        num_bytes = max((at + size for _, size, at in segments), default=0)
        try:
            if device.type == "cpu":
                self._memory = os.memfd_create("weights")
                os.posix_fallocate(self._memory, 0, max(num_bytes, 1))
                mapping = mmap.mmap(self._memory, max(num_bytes, 1))
                self.data = torch.frombuffer(mapping, dtype=torch.uint8)[:num_bytes]
            else:
                self.data = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        except (OSError, torch.OutOfMemoryError) as error:
            raise WeightsError(
                f"no room for {num_bytes} bytes of weights on {device}: {error}; free some, or set "
                "weights.transport=shared_memory"
            ) from error
        self._copied: torch.cuda.Event | None = None
        self._write_note(NOTHING)
        self.handle = self._make_handle()

    def claim(self, timeout_s: float) -> None:
        """Wait until nobody reads the version in the buffer; nobody is given it from here on.

        Raises:
            WeightsError: an engine still reads it after ``timeout_s``.
        """
        version, locked = self.version, on_own_thread(self._forget)
        try:
            locked.result(timeout_s)
        except TimeoutError:
            raise WeightsError(
                f"an engine still reads policy version {version} from memory that the learner lends after "
                f"{timeout_s:.0f} s; its load had rollout_fleet.load_timeout_s and a second per 100 MB"
            ) from None

    def _forget(self) -> None:
        fcntl.flock(self._note, fcntl.LOCK_EX)
        self.version = NOTHING
        self._write_note(NOTHING)
        fcntl.flock(self._note, fcntl.LOCK_UN)

    def write(self, regions: Sequence[Region]) -> None:
        """See `PartTarget.write`; the copies stay on the device."""
        for region in regions:
            self.bytes_at(region.start, region.num_bytes).view(region.dtype).copy_(region.values())
        if self.data.device.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record()

    def bytes_at(self, start: int, num_bytes: int) -> Tensor:
        """See `PartTarget.bytes_at`; a segment begins at ``start``."""
        at = self._places[start]
        return self.data[at : at + num_bytes]

    def digest(self, spans: Sequence[tuple[int, int]]) -> list[list[Piece]]:
        """See `PartTarget.digest`; computed on the device."""
        if self._copied is not None:
            self._copied.synchronize()
        return [tensor_pieces(start, self.bytes_at(start, num_bytes)) for start, num_bytes in spans if num_bytes]

    def lend(self, version: int) -> LentPart:
        """The buffer holds all of a version, which other processes may read."""
        self.version = version
        self._write_note(version)
        return LentPart(handle=self.handle, segments=self._segments)

    def close(self) -> None:
        """The version stays readable after it is published."""

    def free(self) -> None:
        """Free the memory. May be called more than once."""
        for descriptor in (self._note, self._memory):
            if descriptor >= 0:
                os.close(descriptor)
        self._note = self._memory = -1
        self.data = torch.empty(0, dtype=torch.uint8)

    def _write_note(self, version: int) -> None:
        os.pwrite(self._note, NOTE.pack(version, self._life.encode()), 0)

    def _make_handle(self) -> MemoryHandle:
        gpu, ipc = "", ()
        if self.data.device.type == "cuda":
            gpu = _gpu_id(self.data.device.index)
            shared = self.data.untyped_storage()._share_cuda_()[1:]
            ipc = tuple(part.hex() if isinstance(part, bytes) else part for part in shared)
        return MemoryHandle(
            pid=os.getpid(),
            life=self._life,
            note=self._note,
            data=self._memory,
            num_bytes=self.data.numel(),
            gpu=gpu,
            ipc=ipc,
        )


def segments_of(layout: ModelLayout) -> list[Segment]:
    """The places of a rank's part of the data file in its buffer."""
    parts = [(region.start, region.num_bytes) for region in layout.regions]
    parts += [(stored.start, stored.num_bytes) for stored in layout.computed if stored.num_bytes]
    segments, at = [], 0
    for start, num_bytes in parts:
        segments.append((start, num_bytes, at))
        at += -(-num_bytes // ALIGNMENT) * ALIGNMENT
    return segments


def _gpu_id(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def map_memory(handle: MemoryHandle) -> Tensor:
    """Map a buffer of another process of this host: [bytes] uint8, which must not be written to.

    Raises:
        FileNotFoundError: the process has ended.
        WeightsError: the buffer is on a GPU that this process does not see.
    """
    if handle.gpu:
        seen = [_gpu_id(index) for index in range(torch.cuda.device_count())]
        if handle.gpu not in seen:
            raise WeightsError(
                f"learner process {handle.pid} lends memory of GPU {handle.gpu}; this engine sees {seen}. It must see "
                "the GPUs of all learner ranks, or set weights.transport=shared_memory"
            )
        parts: list[Any] = [bytes.fromhex(part) if isinstance(part, str) else part for part in handle.ipc]
        storage = torch.UntypedStorage._new_shared_cuda(seen.index(handle.gpu), *parts)
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[: handle.num_bytes]
    descriptor = os.open(handle.path(handle.data), os.O_RDONLY)
    try:
        mapping = mmap.mmap(descriptor, max(handle.num_bytes, 1), prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)
    with warnings.catch_warnings():  # it is mapped read-only, and nothing here writes to it
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(mapping, dtype=torch.uint8)[: handle.num_bytes]


class LentWeights:
    """A version in memory that the learner ranks of this host lend; locked against overwriting until `close`.

    Args:
        offer: Carried by `Carrier.lent_memory`.
        device: Where tensors are put together of which several ranks hold parts.

    Attributes:
        manifest: Of the offer.
        copier: None, because each tensor is verified before it is given out.

    Raises `WeightsGone` if a rank has ended or has overwritten the version, `WeightsError` if memory cannot be mapped
    or the manifest is not the one that was offered.
    """

    copier = None

    def __init__(self, offer: WeightOffer, device: torch.device) -> None:
        self.manifest, self._offer = read_manifest(offer), offer
        self._locks: list[ReadLock] = []
        self._assembly = TensorAssembly(self.manifest, name=offer.name, device=device)
        try:
            for part in self.manifest.lent:
                self._locks.append(ReadLock(part.handle, offer.version))
            self._maps = [map_memory(part.handle) for part in self.manifest.lent]
        except BaseException:
            self.close()
            raise

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and tensor of each, verified: a view of the memory, or a tensor put together of several parts.

        Raises:
            WeightsError: the bytes are not those that were published.
        """
        segments = sorted((*segment, rank) for rank, part in enumerate(self.manifest.lent) for segment in part.segments)
        starts = [start for start, *_ in segments]
        for pieces in self._spans(starts):
            start, _, at, rank = segments[bisect_right(starts, pieces[0].start) - 1]
            first, end = pieces[0].start, pieces[-1].start + pieces[-1].num_bytes
            yield from self._assembly.add(pieces, self._maps[rank][at + first - start : at + end - start])
        yield from self._assembly.finish()

    def _spans(self, starts: Sequence[int]) -> Iterator[list[Piece]]:
        """The pieces of each part of a tensor that one rank holds."""
        cuts = sorted({*starts, *(stored.start for stored in self.manifest.tensors)})
        span: list[Piece] = []
        for piece in sorted(self.manifest.pieces, key=lambda piece: piece.start):
            if span and bisect_right(cuts, piece.start) != bisect_right(cuts, span[0].start):
                yield span
                span = []
            span.append(piece)
        if span:
            yield span

    def verify(self) -> None:
        """Raise `WeightsError` unless every tensor was given out."""
        if not self._assembly.is_whole:
            raise WeightsError(f"{self._offer.name}: not every tensor was taken from {self._offer.manifest}")

    def close(self) -> None:
        """Let the ranks overwrite the version."""
        for lock in self._locks:
            lock.close()
        self._maps = []
