"""Memory of a learner rank that processes of its host map: the host's own, or a GPU's by CUDA IPC.

`LentBuffer` is the rank's side: a buffer that it fills with one version after the other. `LentWeights` is the side of
whoever loads them. Nothing is copied between the two but what has to be put together of several ranks' parts.
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
from asyncrl.weights.handles import NOTE, NOTHING, MemoryHandle, ReadLock
from asyncrl.weights.manifest import Piece, read_manifest
from asyncrl.weights.verified_tensors import TensorAssembly


class LentBuffer:
    """A buffer of this process that others may map.

    Attributes:
        data: [bytes] uint8, on the device.
        version: What it holds; `handles.NOTHING` until it is complete.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Reserve the memory.

        Raises:
            WeightsError: there is no room.
        """
        self.version = NOTHING
        self._life = secrets.token_hex(8)
        self._note = os.memfd_create("weights-note")
        self._memory = -1
        try:
            self.data = self._on_host(num_bytes) if device.type == "cpu" else _on_gpu(num_bytes, device)
        except (OSError, torch.OutOfMemoryError) as error:
            raise WeightsError(
                f"no room for {num_bytes} bytes of weights on {device}: {error}; free some, or set "
                "weights.transport=shared_memory"
            ) from error
        self._write_note(NOTHING)
        self.handle = self._make_handle()

    def claim(self, timeout_s: float) -> None:
        """Wait until nobody reads the version in the buffer; from here on nobody is given it.

        Raises:
            WeightsError: somebody still read it after ``timeout_s``.
        """
        locked = on_own_thread(self._forget)
        try:
            locked.result(timeout_s)
        except TimeoutError:
            raise WeightsError(
                f"an engine still reads policy version {self.version} from memory that the learner lends after "
                f"{timeout_s:.0f} s; its load had rollout_fleet.load_timeout_s and a second per 100 MB"
            ) from None

    def complete(self, version: int) -> None:
        """The buffer holds all of a version now, which others may read."""
        self.version = version
        self._write_note(version)

    def close(self) -> None:
        """Nobody can map it any more. May be called more than once."""
        for descriptor in (self._note, self._memory):
            if descriptor >= 0:
                os.close(descriptor)
        self._note = self._memory = -1
        self.data = torch.empty(0, dtype=torch.uint8)

    def _forget(self) -> None:
        fcntl.flock(self._note, fcntl.LOCK_EX)
        self.version = NOTHING
        self._write_note(NOTHING)
        fcntl.flock(self._note, fcntl.LOCK_UN)

    def _write_note(self, version: int) -> None:
        os.pwrite(self._note, NOTE.pack(version, self._life.encode()), 0)

    def _on_host(self, num_bytes: int) -> Tensor:
        self._memory = os.memfd_create("weights")
        os.posix_fallocate(self._memory, 0, max(num_bytes, 1))
        return torch.frombuffer(mmap.mmap(self._memory, max(num_bytes, 1)), dtype=torch.uint8)[:num_bytes]

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


def _on_gpu(num_bytes: int, device: torch.device) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def _gpu_id(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def map_memory(handle: MemoryHandle) -> Tensor:
    """Map a buffer of another process of this host: [bytes] uint8, which must not be written to.

    Raises:
        FileNotFoundError: the process has ended.
        WeightsError: it is on a GPU that this process does not see.
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
    """A version in memory that the learner ranks of this host lend; locked against being overwritten until `close`.

    Attributes:
        manifest: Of the offer.
        copier: None: each tensor is verified before it is given out.
    """

    copier = None

    def __init__(self, offer: WeightOffer, device: torch.device) -> None:
        """Map the memory of all ranks.

        Args:
            offer: Whose manifest has `Manifest.lent`.
            device: Where tensors that several ranks hold are put together.

        Raises:
            WeightsGone: a rank has ended, or has overwritten the version.
            WeightsError: memory cannot be mapped, or the manifest is not the one that was offered.
        """
        self.manifest, self._offer, self._device = read_manifest(offer), offer, device
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
        """Yield name and tensor of each, verified: a view of the memory, or what was put together of several parts.

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
