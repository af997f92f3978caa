"""What one role scores for another: how it travels from worker to worker, and which rank's results each rank needs.

The controller handles references only: the scores themselves go from worker to worker, or stay in the process that
both roles share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from asyncrl.protocol.data_proto import DataProto
from asyncrl.protocol.future import DataProtoFuture

from .types import RankBatch, SampleKey

_VALUES = "values"


@dataclass(frozen=True, kw_only=True)
class RemoteScores:
    """What a role computes of a batch, still under way.

    Attributes:
        role: Who computes it. Example: ``critic``.
        batches: What it was given, one per data-parallel rank.
        results: References to what it returns, one per rank; the first sp rank of each data-parallel rank answers.
    """

    role: str
    batches: Sequence[RankBatch]
    results: Sequence[Any]

    def needed_by(self, batches: Sequence[RankBatch]) -> list[DataProtoFuture]:
        """The scores of the samples that each data-parallel rank of another role was given.

        Args:
            batches: The same plan, shared out over any number of ranks.

        Returns:
            One future per rank, of sample to scores; it refers only to the ranks that scored its samples.
        """
        sp_size = len(self.results) // len(self.batches)
        scored = [set(batch.sample_keys) for batch in self.batches]
        return [
            DataProtoFuture(
                collect_fn=unpack_scores,
                futures=[
                    self.results[index * sp_size]
                    for index, keys in enumerate(scored)
                    if not keys.isdisjoint(batch.sample_keys)
                ],
            )
            for batch in batches
        ]


def pack_scores(scores: Mapping[SampleKey, np.ndarray]) -> DataProto:
    """Scores as rows that travel.

    Args:
        scores: [tokens in the loss] float32 per sample.
    """
    longest = max(map(len, scores.values()), default=0)
    rows = [np.pad(row, (0, longest - len(row))) for row in scores.values()]
    columns = {
        "group_ids": np.array([group_id for group_id, _ in scores], dtype=np.int64),
        "samples": np.array([sample for _, sample in scores], dtype=np.int64),
        "lengths": np.array([len(row) for row in scores.values()], dtype=np.int64),
        _VALUES: np.stack(rows) if rows else np.zeros((0, 0), dtype=np.float32),
    }
    return DataProto.from_dict({name: torch.from_numpy(column) for name, column in columns.items()})


def unpack_scores(parts: Sequence[DataProto]) -> dict[SampleKey, np.ndarray]:
    """The inverse of `pack_scores`, of what several ranks packed."""
    scores: dict[SampleKey, np.ndarray] = {}
    for part in parts:
        assert part.batch is not None
        names = ("group_ids", "samples", "lengths", _VALUES)
        group_ids, samples, lengths, rows = (part.batch[name].numpy() for name in names)
        for group_id, sample, length, row in zip(group_ids, samples, lengths, rows, strict=True):
            scores[int(group_id), int(sample)] = row[:length]
    return scores
