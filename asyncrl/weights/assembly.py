"""Assembles published tensors from received pieces (parts of tensors), and verifies each piece by its digest."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from asyncrl.core.errors import WeightsError
from asyncrl.weights.manifest import DTYPES, PIECE_BYTES, DigestThreads, Manifest, Piece, StoredTensor, factors_of

BUCKET_BYTES = 64 << 20
"""Bytes of each of the two page-locked buffers for copies between a GPU and the host."""


def known_dtype(stored: StoredTensor) -> torch.dtype:
    """Return the torch dtype of a tensor in a data file. Raises `WeightsError` if the dtype is unknown."""
    if stored.dtype not in DTYPES:
        raise WeightsError(f"{stored.name} is of type {stored.dtype}; known are {sorted(DTYPES)}")
    return getattr(torch, DTYPES[stored.dtype])


class DeviceDigests:
    """Computes the digests of `manifest.device_digest_of` on a device, without waiting for the device."""

    def __init__(self, device: torch.device) -> None:
        self._factors: Tensor = factors_of(torch.arange(PIECE_BYTES // 4, device=device))

    def of(self, data: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Return one digest per piece: a list of scalar int64 tensors on the device.

        Args:
            data: The bytes of adjacent pieces (parts of a data file), [bytes] uint8 on the device.
            sizes: Bytes of each piece.
        """
        digests: list[Tensor] = []
        at = 0
        for size, run in groupby(sizes):
            count = len(list(run))
            own = data[at : at + count * size]
            at += count * size
            if size % 4 or own.storage_offset() % 4:
                own = F.pad(own.view(count, size), (0, -size % 4)).clone().view(-1)
            words = own.view(torch.int32).view(count, -1)
            digests += (words * self._factors[: words.shape[1]]).sum(1).unbind()
        return digests


class BucketCopies:
    """Copies host bytes to a device through two buffers of `BUCKET_BYTES`. For a GPU, the buffers are page-locked."""

    def __init__(self, threads: DigestThreads, device: torch.device) -> None:
        self._threads, self._device, self._count = threads, device, 0
        is_cuda = device.type == "cuda"
        self._buckets = [torch.empty(BUCKET_BYTES, dtype=torch.uint8, pin_memory=is_cuda) for _ in range(2)]
        self._sent = [torch.cuda.Event() for _ in range(2)] if is_cuda else []

    def copied(self, source: np.ndarray) -> Tensor:
        """Copy ``source``, [bytes] uint8, to the device, and return the copy, [bytes] uint8.

        The copy on the device is possibly not finished when this method returns.
        """
        target = torch.empty(len(source), dtype=torch.uint8, device=self._device)
        for start in range(0, len(source), BUCKET_BYTES):
            index, data = self._count % 2, source[start : start + BUCKET_BYTES]
            self._count += 1
            if self._sent:
                self._sent[index].synchronize()  # wait until the device has read the buffer's previous content
            bucket = self._buckets[index][: len(data)]
            places = [slice(first, first + PIECE_BYTES) for first in range(0, len(data), PIECE_BYTES)]
            view = bucket.numpy()
            list(self._threads.map(np.copyto, [view[place] for place in places], [data[place] for place in places]))
            target[start : start + len(data)].copy_(bucket, non_blocking=True)
            if self._sent:
                self._sent[index].record()
        return target


class TensorAssembly:
    """Builds the tensors of one policy version from pieces (parts of tensors).

    `add` yields a tensor when all pieces of the tensor are verified. The tensor may be a view of the bytes that the
    caller gave `add`. If the caller never changes these bytes, a model may keep the tensor.

    Args:
        manifest: Manifest of the version; it must have one data file.
        name: Name of the version, for messages.
        device: Device of the pieces and tensors.
        digests_there: Whether ``device`` computes the digests. They are then compared with `Piece.device_digest`
            instead of `Piece.digest`.

    Raises:
        WeightsError: a dtype is unknown, or ``digests_there`` is True and the learner published no device digests.
    """

    def __init__(self, manifest: Manifest, *, name: str, device: torch.device, digests_there: bool) -> None:
        for stored in manifest.tensors:
            known_dtype(stored)
        if digests_there and any(piece.device_digest is None for piece in manifest.pieces):
            raise WeightsError(
                f"{name}: these weights have no digests for a GPU, because the learner ran on a CPU; "
                "transfer them with gloo"
            )
        self._name, self._device = name, device
        self._tensors = sorted(manifest.tensors, key=lambda stored: (stored.start, stored.num_bytes))
        self._starts = [stored.start for stored in self._tensors]
        self._num_left = {stored.name: stored.num_bytes for stored in self._tensors}
        self._begun: dict[str, Tensor] = {}
        self._added: set[int] = set()
        self._threads = DigestThreads()
        self._digests = DeviceDigests(device) if digests_there else None

    def add(self, span: Sequence[Piece], data: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Take the bytes of adjacent pieces, and verify each piece by its digest.

        Yields (name, tensor) of each tensor that is now complete. ``span`` describes the pieces (parts of tensors), and
        ``data`` has the bytes of all these pieces, [bytes] uint8. Raises `WeightsError` if the bytes differ from the
        published bytes, or if a piece is added twice.
        """
        first, wrong = span[0].start, self._wrong(span, data)
        for piece in span:
            stored = self._tensors[bisect_right(self._starts, piece.start) - 1]
            if piece in wrong:
                raise WeightsError(f"{self._name}: received bytes of {stored.name} differ from the published bytes")
            if piece.start in self._added or stored.name not in self._num_left:
                raise WeightsError(f"{self._name}: bytes of {stored.name} were received twice")
            self._added.add(piece.start)
            self._num_left[stored.name] -= piece.num_bytes
            begin, end = stored.start - first, stored.start + stored.num_bytes - first
            if not (begin >= 0 and end <= data.numel()):
                if stored.name not in self._begun:
                    self._begun[stored.name] = torch.empty(stored.num_bytes, dtype=torch.uint8, device=self._device)
                at, source = piece.start - stored.start, piece.start - first
                self._begun[stored.name][at : at + piece.num_bytes] = data[source : source + piece.num_bytes]
            if not self._num_left[stored.name]:
                del self._num_left[stored.name]
                yield stored.name, shaped(stored, self._begun.pop(stored.name, data[max(begin, 0) : max(end, 0)]))

    def _wrong(self, span: Sequence[Piece], data: Tensor) -> list[Piece]:
        if self._digests is not None:
            arrived = torch.stack(self._digests.of(data, [piece.num_bytes for piece in span])).tolist()
            return [piece for piece, digest in zip(span, arrived, strict=True) if piece.device_digest != digest]
        first, view = span[0].start, data.numpy()
        return self._threads.wrong(
            span, lambda piece: view[piece.start - first : piece.start - first + piece.num_bytes]
        )

    def finish(self) -> Iterator[tuple[str, Tensor]]:
        """End the assembly: yield (name, tensor) of each tensor of size 0. No pieces arrive for such a tensor.

        Raises `WeightsError` if bytes of any tensor are missing.
        """
        self._threads.shutdown(wait=False)
        for stored in self._tensors:
            if self._num_left.get(stored.name):
                raise WeightsError(
                    f"{self._name}: {len(self._num_left)} of {len(self._tensors)} tensors are incomplete; the first, "
                    f"{stored.name}, lacks {self._num_left[stored.name]} of {stored.num_bytes} bytes"
                )
            if not stored.num_bytes:
                yield stored.name, shaped(stored, torch.empty(0, dtype=torch.uint8, device=self._device))
        self._num_left.clear()

    @property
    def is_whole(self) -> bool:
        """True if `add` and `finish` have yielded every tensor."""
        return not self._num_left


def shaped(stored: StoredTensor, data: Tensor) -> Tensor:
    """Return ``data``, [bytes] uint8, as a tensor with the dtype and shape that ``stored`` describes.

    The result is a view, or a copy if the bytes are not aligned for the dtype. Raises `WeightsError` if the dtype
    is unknown.
    """
    dtype = known_dtype(stored)
    aligned = data if data.data_ptr() % dtype.itemsize == 0 else data.clone()
    return aligned.view(dtype).view(stored.shape)
