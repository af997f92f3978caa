"""The files of one published version, of which each rank writes its own part into memory that was made ready before."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.core.errors import WeightsError
from asyncrl.weights.delta import write_delta
from asyncrl.weights.handles import LentPart
from asyncrl.weights.manifest import DIGEST_THREADS, PIECE_BYTES, Change, Piece, map_file, pieces_of

from .weight_layout import ModelLayout, Part, Region, in_file, item_bytes

DATA_FILE = "model.safetensors"
BUCKET_BYTES = 64 << 20
"""Page-locked bytes through which parameters leave a GPU, twice."""
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14; older kernels touch the pages when they are written
_madvise = ctypes.CDLL(None).madvise  # mmap's own holds the interpreter's lock: for 0.6 s per GB, while a rank computes
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class WritableFile:
    """A file of known size, mapped, of which this rank writes some ranges; made ready before it is needed."""

    def __init__(self, path: Path | None, num_bytes: int, regions: Sequence[Region], *, is_alone: bool = False) -> None:
        """Make the file, or open the one that another rank made; reserve and touch this rank's ranges.

        Without a path it is memory of this process. ``is_alone`` reserves the whole file: no other rank opens it.

        Raises:
            WeightsError: there is no room.
        """
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644) if path else os.memfd_create("weights")
        try:
            os.ftruncate(self._descriptor, num_bytes)
            for start, size in [(0, num_bytes)] if is_alone else [(r.start, r.num_bytes) for r in regions]:
                os.posix_fallocate(self._descriptor, start, size)
            mapping = mmap.mmap(self._descriptor, num_bytes)
        except OSError as error:
            os.close(self._descriptor)
            where = path.parent if path else "memory"
            raise WeightsError(
                f"no room for {num_bytes} bytes of weights in {where}: {error}; free some. Published weights go "
                "elsewhere with weights.transport=file and weights.directory"
            ) from error
        self.data = torch.frombuffer(mapping, dtype=torch.uint8)
        page = mmap.PAGESIZE
        for region in regions:
            first, last = region.start // page * page, -(-(region.start + region.num_bytes) // page) * page
            _madvise(self.data.data_ptr() + first, min(last, num_bytes) - first, _POPULATE_WRITE)

    def write(self, regions: Sequence[Region]) -> None:
        """Copy the parameters' values; on a GPU through two page-locked buckets."""
        on_gpu = [region for region in regions if region.parameter.device.type == "cuda"]
        for region in regions:
            if region.parameter.device.type != "cuda":
                self._place(region).copy_(region.values())
        if on_gpu:
            self._write_from_gpu(on_gpu)

    def _write_from_gpu(self, regions: Sequence[Region]) -> None:
        chunks = [
            (region, first, min(region.num_values - first, BUCKET_BYTES // region.dtype.itemsize))
            for region in regions
            for first in range(0, region.num_values, BUCKET_BYTES // region.dtype.itemsize)
        ]
        buckets = [torch.empty(BUCKET_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        waiting: tuple[Tensor, Tensor, Any] | None = None
        for index, (region, first, size) in enumerate(chunks):
            bucket = buckets[index % 2][: size * region.dtype.itemsize].view(region.dtype)
            bucket.copy_(region.values()[first : first + size], non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
            if waiting is not None:
                self._empty(*waiting)
            waiting = self._place(region)[first : first + size], bucket, copied
        if waiting is not None:
            self._empty(*waiting)

    @staticmethod
    def _empty(place: Tensor, bucket: Tensor, copied: Any) -> None:
        copied.synchronize()
        place.copy_(bucket)

    def _place(self, region: Region) -> Tensor:
        return self.data[region.start : region.start + region.num_bytes].view(region.dtype)

    def sync(self) -> None:
        """Wait until the file system holds what was written; nothing to wait for where the file lies in memory.

        A host that shares a directory sees mapped writes of another one only after this.
        """
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Give the mapping back, once no view of it is left; the file stays. May be called more than once."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        _madvise(self.data.data_ptr(), self.data.nbytes, mmap.MADV_DONTNEED)  # which leaves little to unmap
        self.data = torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankShare:
    """What one rank wrote of a version; ``lent`` is where it lies, if in no file."""

    pieces: list[Piece]
    changes: list[Change]
    lent: LentPart | None = None


def delta_file(rank: int) -> str:
    """Name of the file with what changed of a rank's part."""
    return f"delta-{rank:05d}.bin"


class ModelFiles:
    """The data file of one version, and in memory what tensors are to be computed from.

    Of a version that is not full, each rank has its part of the data file in memory, and a delta file in the folder.

    Attributes:
        layout: Of the data file.
        folder: Holds the files; ``name`` is the data file's.
        is_full: Whether the data file is among them.
    """

    def __init__(self, layout: ModelLayout, folder: Path, *, name: str = DATA_FILE, is_full: bool = True) -> None:
        self.layout, self.folder, self.name, self.is_full = layout, folder, name, is_full
        folder.mkdir(parents=True, exist_ok=True)
        self._data = WritableFile(folder / name if is_full else None, layout.num_bytes, layout.regions)
        self._raw = None
        if layout.num_raw_bytes:
            self._raw = WritableFile(None, layout.num_raw_bytes, layout.raw_regions)

    @property
    def is_frozen(self) -> bool:
        """Whether they hold what lies below adapters."""
        return self.layout.part is Part.frozen

    @property
    def data(self) -> Tensor:
        """[bytes] uint8 of the data file; what this rank wrote of it stays while someone refers to it."""
        return self._data.data

    def write(self) -> None:
        """Copy this rank's shards."""
        self._data.write(self.layout.regions)
        if self._raw is not None:
            self._raw.write(self.layout.raw_regions)

    def exchange(self, group: dist.ProcessGroup) -> None:
        """See `ModelLayout.exchange`."""
        if self._raw is not None:
            self.layout.exchange(self._raw.data, group)

    def finish(self, rank: int, num_ranks: int, base: ModelFiles | None = None) -> RankShare:
        """Compute this rank's part of the rest, after `exchange`; digest its part, and compare it with the base.

        It has then reached the file system, and may be offered to other hosts.
        """
        parts = [(region.start, region.num_bytes, region.dtype.itemsize) for region in self.layout.regions]
        if self._raw is not None:
            done = self.layout.compute(self._raw.data, in_file(self._data.data), rank, num_ranks)
            parts += [(stored.start, stored.num_bytes, item_bytes(stored)) for stored in done]
        if rank == 0:
            self._data.data[: len(self.layout.head)].copy_(
                torch.frombuffer(bytearray(self.layout.head), dtype=torch.uint8)
            )
        data = self._data.data.numpy()
        digested = self._digested([(start, num_bytes) for start, num_bytes, _ in parts], data)
        changes = []
        if not self.is_full:
            assert base is not None, "the first version is full"
            spans = [
                (piece.start, piece.num_bytes, part[2])
                for part, pieces in zip(parts, digested, strict=True)
                for piece in pieces
            ]
            changes = write_delta(self.folder / delta_file(rank), rank, base.data.numpy(), data, spans)
        return RankShare(pieces=[piece for pieces in digested for piece in pieces], changes=changes)

    def _digested(self, parts: Sequence[tuple[int, int]], data: np.ndarray) -> list[list[Piece]]:
        """The pieces of each part, first byte and bytes, while the file system takes them."""
        if sum(num_bytes for _, num_bytes in parts) <= PIECE_BYTES:  # threads would take longer to wake
            digested = [pieces_of(0, start, num_bytes, data) for start, num_bytes in parts]
            self._data.sync()
            return digested
        with ThreadPoolExecutor(DIGEST_THREADS + 1) as threads:
            synced = threads.submit(self._data.sync)
            digested = list(threads.map(lambda part: pieces_of(0, part[0], part[1], data), parts))
            synced.result()
        return digested

    def delta(self, rank: int) -> Tensor:
        """[bytes] uint8 of a rank's delta file, after `finish`; stays when the file is removed."""
        path = self.folder / delta_file(rank)
        return torch.from_numpy(map_file(path).copy()) if path.stat().st_size else torch.empty(0, dtype=torch.uint8)

    def close(self, *, keep_data: bool = False) -> None:
        """Unmap the files; the data file only if it is not to be kept as the base of the next version."""
        if not keep_data:
            self._data.close()
        if self._raw is not None:
            self._raw.close()
