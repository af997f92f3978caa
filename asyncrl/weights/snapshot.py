"""One learner rank's part of a published version: copied shards and computed tensors in a file, with digests.

The file is created in advance, so that a publish only has to copy.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asyncrl.weights.assembly import BUCKET_BYTES
from asyncrl.weights.delta import write_delta
from asyncrl.weights.layout import ModelLayout, Part, Region, dtype_of
from asyncrl.weights.manifest import DIGEST_THREADS, PIECE_BYTES, Change, Piece, map_file, pieces_of, write_error

DATA_FILE = "model.safetensors"
# This is MADV_POPULATE_WRITE of Linux 5.14. Older kernels allocate the pages at the first write.
_POPULATE_WRITE = 23
# Call madvise through ctypes, because the madvise of Python's mmap holds the GIL for 0.6 s per GB.
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankShare:
    """One rank's report on its part of a version.

    Attributes:
        pieces: The pieces (parts of tensors) that this rank wrote, with digests.
        changes: If the version is a delta, the pieces that differ from the previous version; otherwise empty.
    """

    pieces: list[Piece]
    changes: list[Change] = field(default_factory=list)


class WritableFile:
    """A memory-mapped file of known size. This rank writes some ranges of the file.

    Args:
        path: The file, which another rank may have created; None uses memory of this process.
        num_bytes: Size of the file.
        regions: The ranges that this rank writes. Their memory is allocated in advance.
        is_alone: Whether to reserve the whole file, because no other rank opens it.

    Raises:
        WeightsError: the file cannot be opened, or its bytes cannot be reserved.
    """

    def __init__(self, path: Path | None, num_bytes: int, regions: Sequence[Region], *, is_alone: bool = False) -> None:
        where = path.parent if path else "memory"
        elsewhere = "publish elsewhere with weights.transport=file and weights.directory"
        remedy = "choose a folder on another disk" if is_alone else elsewhere
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644) if path else os.memfd_create("weights")
        except OSError as error:
            raise write_error(num_bytes, where, error, remedy) from error
        try:
            os.ftruncate(self._descriptor, num_bytes)
            for start, size in [(0, num_bytes)] if is_alone else [(r.start, r.num_bytes) for r in regions]:
                os.posix_fallocate(self._descriptor, start, size)
            mapping = mmap.mmap(self._descriptor, num_bytes)
        except OSError as error:
            os.close(self._descriptor)
            raise write_error(num_bytes, where, error, remedy) from error
        self.data = torch.frombuffer(mapping, dtype=torch.uint8)
        page = mmap.PAGESIZE
        for region in regions:
            first, last = region.start // page * page, -(-(region.start + region.num_bytes) // page) * page
            _madvise(self.data.data_ptr() + first, min(last, num_bytes) - first, _POPULATE_WRITE)

    def write(self, regions: Sequence[Region]) -> None:
        """Copy the current values of the parameters in ``regions`` into the file."""
        on_gpu = [region for region in regions if region.parameter.device.type == "cuda"]
        for region in regions:
            if region.parameter.device.type != "cuda":
                self.bytes_at(region.start, region.num_bytes).view(region.dtype).copy_(region.values())
        if on_gpu:
            self._write_from_gpu(on_gpu)

    def _write_from_gpu(self, regions: Sequence[Region]) -> None:
        buckets = [torch.empty(BUCKET_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        under_way: list[tuple[Tensor, Tensor, Any]] = []

        def finish_first() -> None:
            place, bucket, copied = under_way.pop(0)
            copied.synchronize()
            place.copy_(bucket)

        num_chunks = 0
        for region in regions:
            place = self.bytes_at(region.start, region.num_bytes).view(region.dtype)
            for values, part in zip(
                region.values().split(BUCKET_BYTES // region.dtype.itemsize),
                place.split(BUCKET_BYTES // region.dtype.itemsize),
                strict=True,
            ):
                bucket = buckets[num_chunks % 2][: part.nbytes].view(region.dtype)
                num_chunks += 1
                bucket.copy_(values, non_blocking=True)
                copied = torch.cuda.Event()
                copied.record()
                under_way.append((part, bucket, copied))
                if len(under_way) > 1:
                    finish_first()
        while under_way:
            finish_first()

    def bytes_at(self, start: int, num_bytes: int) -> Tensor:
        """Return a view of a range of the file, [num_bytes] uint8."""
        return self.data[start : start + num_bytes]

    def digest(self, spans: Sequence[tuple[int, int]], *, for_device: bool) -> list[list[Piece]]:
        """Compute the digests of ranges of the file, and sync the file to disk at the same time.

        ``spans`` are (first byte, number of bytes) pairs. If ``for_device`` is True, also compute the digests that
        engines compute on GPUs (`Piece.device_digest`). Returns one list of digested pieces per span.
        """
        digest = partial(pieces_of, 0, data=self.data.numpy(), for_device=for_device)
        if sum(num_bytes for _, num_bytes in spans) <= PIECE_BYTES:  # for few bytes, threads would take longer
            digested = [digest(*span) for span in spans]
            self.sync()
            return digested
        with ThreadPoolExecutor(DIGEST_THREADS + 1) as threads:
            synced = threads.submit(self.sync)
            digested = list(threads.map(lambda span: digest(*span), spans))
            synced.result()
        return digested

    def sync(self) -> None:
        """Wait until the file system has the written bytes.

        Without this call, other hosts that share the directory possibly do not see writes to the mapped file.
        """
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Unmap the file without removing it. May be called more than once."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        _madvise(self.data.data_ptr(), self.data.nbytes, mmap.MADV_DONTNEED)  # make the later unmapping faster
        self.data = torch.empty(0, dtype=torch.uint8)


class RankPart:
    """This rank's part of one version: values that the rank copies from its shards, and tensors that the rank computes.

    If ``is_full`` is True, these data are in the file ``name`` in ``folder``. If ``is_full`` is False, the version is a
    delta. The data are then only in memory, and `finish` writes the changes since the previous version to ``folder``.
    """

    def __init__(
        self,
        layout: ModelLayout,
        folder: Path,
        rank: int,
        *,
        name: str = DATA_FILE,
        is_full: bool = True,
    ) -> None:
        self.layout, self.folder, self.rank, self.name, self.is_full = layout, folder, rank, name, is_full
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / name if is_full else None
        self._file = WritableFile(path, layout.num_bytes, layout.regions)
        self._raw: WritableFile | None = None
        if layout.num_raw_bytes:
            self._raw = WritableFile(None, layout.num_raw_bytes, layout.raw_regions)

    @property
    def data(self) -> Tensor:
        """The memory of the data file, [bytes] uint8. This rank's bytes stay valid while the tensor is referenced."""
        return self._file.data

    def write(self) -> None:
        """Copy the current values of this rank's shards into the memory of this `RankPart`."""
        self._file.write(self.layout.regions)
        if self._raw is not None:
            self._raw.write(self.layout.raw_regions)

    def exchange(self) -> None:
        """Send parameter shards between the ranks. All ranks call this together.

        Afterwards, each rank has the whole parameters from which it computes tensors in `finish`.
        """
        if self._raw is not None:
            self.layout.exchange(self._raw.data)

    def finish(self, base: RankPart | None = None) -> RankShare:
        """Compute this rank's tensors from whole parameters. Then digest all bytes that this rank provides.

        Call `exchange` before this method. If the version is a delta, the method also writes this rank's delta file.
        This file has the changes since ``base``, which is this rank's part of the previous version.

        Returns:
            A `RankShare` with the digested pieces and, for a delta, the changed pieces.
        """
        computed = self.layout.computed if self._raw is not None else []
        if self._raw is not None:
            self.layout.compute(self._raw.data, lambda stored: self._file.bytes_at(stored.start, stored.num_bytes))
        if self.rank == 0:
            self.layout.write_head(self.data)
        spans = [(region.start, region.num_bytes) for region in self.layout.regions]
        spans += [(stored.start, stored.num_bytes) for stored in computed]
        digested = self._file.digest(spans, for_device=self.layout.device.type == "cuda")
        changes: list[Change] = []
        if not self.is_full:
            assert base is not None, "a delta must have a base version"
            sizes = [region.dtype.itemsize for region in self.layout.regions]
            sizes += [dtype_of(stored).itemsize for stored in computed]
            compared = [(p.start, p.num_bytes, size) for size, ps in zip(sizes, digested, strict=True) for p in ps]
            path = self.folder / delta_file(self.rank)
            changes = write_delta(path, self.rank, base.data.numpy(), self.data.numpy(), compared)
        pieces = [piece for part in digested for piece in part]
        return RankShare(pieces=pieces, changes=changes)

    @property
    def is_frozen(self) -> bool:
        """True if the file contains the frozen weights of a model. The adapters of the model are in another file."""
        return self.layout.part is Part.frozen

    def delta(self) -> Tensor | None:
        """Return this rank's delta file after `finish`, [bytes] uint8; None for a full version."""
        if self.is_full:
            return None
        path = self.folder / delta_file(self.rank)
        return torch.from_numpy(map_file(path).copy()) if path.stat().st_size else torch.empty(0, dtype=torch.uint8)

    def close(self, *, keep_data: bool = False) -> None:
        """Release the memory of this part. If ``keep_data``, keep the data as the base of the next version."""
        if not keep_data:
            self._file.close()
        if self._raw is not None:
            self._raw.close()


def delta_file(rank: int) -> str:
    """Return the name of a rank's delta file."""
    return f"delta-{rank:05d}.bin"
