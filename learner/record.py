"""A record of what was trained on: a parquet file a learner step and rank, a row a sample."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from asyncrl.protocol.trajectory import TrajectoryGroup

from .types import RankBatch, TokenSequence

SCHEMA = pa.schema(
    {
        "group_id": pa.int64(),
        "attempt": pa.int32(),
        "prompt_ids": pa.list_(pa.int32()),
        "response_ids": pa.list_(pa.int32()),
        "response_mask": pa.list_(pa.bool_()),
        "behavior_logprobs": pa.list_(pa.float32()),
        "versions": pa.list_(pa.int32()),
        "reward": pa.float32(),
        "advantage": pa.float32(),
        "lag": pa.int32(),
    }
)


class TrajectoryRecorder:
    """Writes consumed groups.

    Args:
        directory: Holds ``step_00000012_rank0.parquet`` for the step that version 12 consumed on rank 0.
    """

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)
        self._directory.mkdir(parents=True, exist_ok=True)

    def write(
        self, batch: RankBatch, groups: Sequence[TrajectoryGroup], sequences: Sequence[TokenSequence], *, rank: int
    ) -> Path:
        """Write one rank's groups of one step.

        Args:
            batch: This rank's share; its rewards are those that were trained on, a reward model's for one.
            groups: Its groups.
            sequences: One a sample, in the same order, with ``advantages``.
            rank: Data-parallel rank.

        Returns:
            The file.
        """
        learned = iter(sequences)
        rows = [
            row
            for group, rewards in zip(groups, batch.rewards, strict=True)
            for row in _rows(group, rewards, learned, batch.version)
        ]
        path = self._directory / f"step_{batch.version:08d}_rank{rank}.parquet"
        pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), path)
        return path


def _rows(
    group: TrajectoryGroup, rewards: np.ndarray, learned: Iterator[TokenSequence], version: int
) -> Iterator[dict[str, Any]]:
    ends = np.cumsum(group.response_lengths)
    for sample, (end, length) in enumerate(zip(ends.tolist(), group.response_lengths.tolist(), strict=True)):
        span, sequence = slice(end - length, end), next(learned)
        advantages = sequence.columns["advantages"][sequence.loss_mask]
        versions = group.versions[len(group.prompt_ids) :][span]
        yield {
            "group_id": group.group_id,
            "attempt": group.attempt,
            "prompt_ids": group.prompt_ids,
            "response_ids": group.response_ids[span],
            "response_mask": group.response_mask[span],
            "behavior_logprobs": group.behavior_logprobs[span],
            "versions": versions,
            "reward": float(rewards[sample]),
            "advantage": float(advantages.mean()) if len(advantages) else 0.0,
            "lag": version - int(versions[versions >= 0].min()),
        }
