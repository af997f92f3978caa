"""Versions that stay in memory of the learner ranks, on their own devices, for engines of the host to map.

Each rank copies its shards, and what it computes of tensors that are no parts of parameters, into one buffer. Its few
buffers hold the newest versions in turn; one is written again when no engine reads what it holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.weights.handles import LentPart
from asyncrl.weights.lent_memory import LentBuffer
from asyncrl.weights.verified_tensors import tensor_pieces

from .weight_files import DATA_FILE, RankShare, WritableFile
from .weight_layout import ModelLayout

_ALIGNMENT = 16
_SLOWEST_LOAD = 1e8  # bytes per second, on top of which the deadline of an engine's load stands


@dataclass(frozen=True, kw_only=True)
class LendOptions:
    """How a rank lends its memory.

    Attributes:
        num_buffers: Each as large as the rank's part of the model: 2, or 3 where a version is evaluated while newer
            ones are published.
        timeout_s: Of an engine's load; a second per 100 MB comes on top.
    """

    num_buffers: int
    timeout_s: float


class LentBuffers:
    """The buffers of one rank, made when they are first needed."""

    def __init__(self, options: LendOptions, num_bytes: int, device: torch.device, *, whole_bytes: int) -> None:
        """Reserve nothing yet.

        Args:
            options: How many.
            num_bytes: Of this rank's part.
            device: Of its parameters.
            whole_bytes: Of the model, with which an engine's deadline grows.
        """
        self._options, self._num_bytes, self._device = options, num_bytes, device
        self._timeout_s = 2 * (options.timeout_s + whole_bytes / _SLOWEST_LOAD)
        self._buffers: list[LentBuffer] = []

    def take(self, *, shown: int) -> LentBuffer:
        """A buffer for the next version; waits until no engine reads what it holds.

        Args:
            shown: The oldest version that engines are still offered, which stays if there is another one beside the
                newest.

        Raises:
            WeightsError: there is no room, or an engine reads for longer than it may.
        """
        if len(self._buffers) < self._options.num_buffers:
            self._buffers.append(LentBuffer(self._num_bytes, self._device))
            return self._buffers[-1]
        *older, _newest = sorted(self._buffers, key=lambda buffer: buffer.version)
        chosen = next((buffer for buffer in older if buffer.version != shown), older[0])
        chosen.claim(self._timeout_s)
        return chosen

    def close(self) -> None:
        """Nobody can map them any more."""
        for buffer in self._buffers:
            buffer.close()


class LentModel:
    """One version in this rank's memory; the counterpart of `ModelFiles`.

    Attributes:
        layout: Of the whole model's data file, which is never written.
        folder: Holds the files that describe the model; ``name`` is the data file's.
        is_full: Always.
        is_frozen: Never.
    """

    is_full = True
    is_frozen = False

    def __init__(self, layout: ModelLayout, folder: Path, buffer: LentBuffer, *, rank: int, num_ranks: int) -> None:
        self.layout, self.folder, self.name = layout, folder, DATA_FILE
        folder.mkdir(parents=True, exist_ok=True)
        self._buffer, self._rank, self._num_ranks = buffer, rank, num_ranks
        self._copied: torch.cuda.Event | None = None
        self._places = {start: (num_bytes, at) for start, num_bytes, at in segments_of(layout, rank, num_ranks)}
        self._raw = WritableFile(None, layout.num_raw_bytes, layout.raw_regions) if layout.num_raw_bytes else None

    def write(self) -> None:
        """Copy this rank's shards, on their device."""
        for region in self.layout.regions:
            self._bytes_at(region.start).view(region.dtype).copy_(region.values())
        if self._buffer.data.device.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record()
        if self._raw is not None:
            self._raw.write(self.layout.raw_regions)

    def exchange(self, group: dist.ProcessGroup) -> None:
        """See `ModelLayout.exchange`."""
        if self._raw is not None:
            self.layout.exchange(self._raw.data, group)

    def finish(self, version: int) -> RankShare:
        """Compute the rest of this rank's part, after `exchange`; digest it, and lend it from here on."""
        if self._copied is not None:
            self._copied.synchronize()
        if self._raw is not None:
            self.layout.compute(
                self._raw.data, lambda stored: self._bytes_at(stored.start), self._rank, self._num_ranks
            )
        pieces = [piece for start in self._places for piece in tensor_pieces(start, self._bytes_at(start))]
        self._buffer.complete(version)
        segments = tuple((start, num_bytes, at) for start, (num_bytes, at) in self._places.items())
        return RankShare(pieces=pieces, changes=[], lent=LentPart(handle=self._buffer.handle, segments=segments))

    def close(self) -> None:
        """Free what tensors were computed from; the version stays."""
        if self._raw is not None:
            self._raw.close()

    def _bytes_at(self, start: int) -> Tensor:
        num_bytes, at = self._places[start]
        return self._buffer.data[at : at + num_bytes]


def segments_of(layout: ModelLayout, rank: int, num_ranks: int) -> list[tuple[int, int, int]]:
    """Where a rank's part of the data file lies in its buffer; see `LentPart.segments`."""
    computed = layout.computed_by(rank, num_ranks)
    parts = [(region.start, region.num_bytes) for region in layout.regions]
    parts += [(stored.start, stored.num_bytes) for stored in computed if stored.num_bytes]
    segments, at = [], 0
    for start, num_bytes in parts:
        segments.append((start, num_bytes, at))
        at += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
    return segments


def buffer_bytes(segments: list[tuple[int, int, int]]) -> int:
    """Of a buffer that holds all segments."""
    return max((at + num_bytes for _, num_bytes, at in segments), default=0)
