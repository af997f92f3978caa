"""A log of what was trained on: one parquet file per learner step and rank, one row per sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from asyncrl.protocol.types import TrajectoryGroup

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


class TrajectoryLog:
    """Writes consumed samples.

    Args:
        directory: Holds ``step_00000012_rank0.parquet`` for the step that version 12 consumed on rank 0.
    """

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)
        self._directory.mkdir(parents=True, exist_ok=True)

    def write(
        self,
        batch: RankBatch,
        groups: Mapping[int, TrajectoryGroup],
        sequences: Sequence[TokenSequence],
        *,
        rank: int,
    ) -> Path:
        """Write one rank's samples of one step.

        Args:
            batch: This rank's share; its rewards are those that were trained on, a reward model's for one.
            groups: Its groups by id.
            sequences: One per sample, in the order of the batch's shares, with ``advantages``.
            rank: Data-parallel rank.

        Returns:
            The file.
        """
        rows = [
            _row(groups[group_id], sample, sequence, float(reward), batch.version)
            for (group_id, sample), reward, sequence in zip(batch.sample_keys, batch.rewards, sequences, strict=True)
        ]
        path = self._directory / f"step_{batch.version:08d}_rank{rank}.parquet"
        pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), path)
        return path


def _row(group: TrajectoryGroup, sample: int, sequence: TokenSequence, reward: float, version: int) -> dict[str, Any]:
    end = int(group.response_lengths[: sample + 1].sum())
    span = slice(end - int(group.response_lengths[sample]), end)
    advantages = sequence.columns["advantages"][sequence.loss_mask]
    return {
        "group_id": group.group_id,
        "attempt": group.attempt,
        "prompt_ids": group.prompt_ids,
        "response_ids": group.response_ids[span],
        "response_mask": group.response_mask[span],
        "behavior_logprobs": group.behavior_logprobs[span],
        "versions": group.versions[span],
        "reward": reward,
        "advantage": float(advantages.mean()) if len(advantages) else 0.0,
        "lag": version - int(group.versions[span].min()),
    }
