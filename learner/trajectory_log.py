"""A log of the trajectories in learner steps: one parquet file per step and data-parallel rank.

A file has one row per branch (path through the turns of a trajectory). With ``record_trajectories``, a run logs all
trained trajectories. With `TokenLogOptions`, the run also logs a few sequences. Each of their tokens
has the engine's log-prob and the learner's log-prob.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from asyncrl.core.receipts import DIGEST_BITS, counts_of, token_digest
from asyncrl.core.trajectory import UNVERSIONED, Branch, TrajectoryGroup

from .types import RankBatch, TokenSequence, branches_of

SCHEMA = pa.schema(
    {
        "group_id": pa.int64(),
        "attempt": pa.int32(),
        "prompt_ids": pa.list_(pa.int32()),
        "response_ids": pa.list_(pa.int32()),
        "response_mask": pa.list_(pa.bool_()),
        "behavior_logprobs": pa.list_(pa.float32()),
        "learner_logprobs": pa.list_(pa.float32()),
        "versions": pa.list_(pa.int32()),
        "reward": pa.float32(),
        "advantage": pa.float32(),
        "lag": pa.int32(),
    }
)


LEARNER_LOGPROBS = "learner_logprobs"
"""Name of a column: the learner's log-probs of the sequence's tokens before the update."""


@dataclass(frozen=True, kw_only=True)
class TokenLogOptions:
    """Options for the log of a few sequences, which rank 0 writes.

    Attributes:
        directory: Folder of the files.
        every_steps: Number of learner steps from one file to the next.
        num_sequences: Largest number of sequences per file. Each sequence costs a forward pass.
    """

    directory: str
    every_steps: int
    num_sequences: int = 8


class TrajectoryLog:
    """Writes the trajectories of learner steps. Example of a file name: ``step_00000012_rank0.parquet``."""

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
        """Write the samples of one step and data-parallel rank to a file, atomically, and return its path.

        Args:
            batch: The rank's batch. The rewards in the batch are written, because a reward model may have replaced the
                rewards in the groups.
            groups: The batch's groups by id.
            sequences: One sequence per branch of the batch's samples, with the column ``advantages``. The sequences are
                in the order of ``batch.shares``. If there are fewer sequences than branches, only the first branches
                are written.
            rank: Number of the data-parallel rank, for the name of the file.
        """
        branches = _branches(batch, groups)
        rewards = batch.rewards
        rows = [
            _row(group, branch, sequence, rewards[sequence.trajectory], batch.version)
            for (group, branch), sequence in zip(branches, sequences, strict=False)
        ]
        path = self._directory / f"step_{batch.version:08d}_rank{rank}.parquet"
        partial = path.with_name(f".{path.name}.partial")
        pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), partial)
        partial.replace(path)
        return path


def trained_groups(
    batch: RankBatch, groups: Mapping[int, TrajectoryGroup], sequences: Sequence[TokenSequence]
) -> list[dict[str, Any]]:
    """Return the counts and digests of a rank's trained tokens, which ``asyncrl audit`` later checks.

    Returns one dict per prompt group. A dict has the ``group`` id, the ``attempt`` (number of the attempt to generate
    the group, from 0), and these fields:

    - ``versions``: number of trained tokens by policy version.
    - ``digest``: the sum of `token_digest` over the trained turns.
    - ``in_loss``: number of tokens in the loss. Trajectories that ``mask_truncated`` leaves out of the loss count only
      in the other fields.

    ``sequences`` has one sequence per branch.
    """
    found: dict[int, dict[str, Any]] = {}
    versions: dict[int, list[np.ndarray]] = {}
    for (group, branch), sequence in zip(_branches(batch, groups), sequences, strict=True):
        mask, along = sequence.loss_mask, group.along(branch, "versions")
        mask = mask if mask.any() else np.ones_like(mask)
        new: dict[str, Any] = {"group": group.group_id, "attempt": group.attempt, "digest": 0, "in_loss": 0}
        own = found.setdefault(group.group_id, new)
        own["in_loss"] += int(np.count_nonzero(sequence.loss_mask))
        for turn in sequence.turns:
            chosen = slice(turn.start, turn.stop)
            ids = sequence.input_ids[chosen][mask[chosen]]
            own["digest"] = (own["digest"] + token_digest(group.group_id, branch.trajectory, ids)) % (1 << DIGEST_BITS)
            versions.setdefault(group.group_id, []).append(along[chosen])
    tokens = {group_id: counts_of(np.concatenate(parts)) for group_id, parts in versions.items()}
    return [own | {"versions": tokens.get(group_id, {})} for group_id, own in found.items()]


def _branches(batch: RankBatch, groups: Mapping[int, TrajectoryGroup]) -> list[tuple[TrajectoryGroup, Branch]]:
    return [
        (groups[share.group_id], branch)
        for share in batch.shares
        for branch in branches_of(groups[share.group_id], share.samples)
    ]


def _row(
    group: TrajectoryGroup, branch: Branch, sequence: TokenSequence, reward: float, version: int
) -> dict[str, Any]:
    num_prompt = len(group.prompt_ids) if branch.turns[0] == 0 else 0  # some branches do not begin with the prompt
    versions = group.along(branch, "versions")
    sampled = versions[versions != UNVERSIONED]
    advantages = sequence.columns["advantages"][sequence.loss_mask]
    own = sequence.columns.get(LEARNER_LOGPROBS)
    return {
        "group_id": group.group_id,
        "attempt": group.attempt,
        "prompt_ids": sequence.input_ids[:num_prompt],
        "response_ids": sequence.input_ids[num_prompt:],
        "response_mask": group.trained_mask(branch)[num_prompt:],
        "behavior_logprobs": sequence.columns["behavior_logprobs"][num_prompt:],
        "learner_logprobs": None if own is None else own[num_prompt:],
        "versions": versions[num_prompt:],
        "reward": reward,
        "advantage": float(advantages.mean()) if len(advantages) else 0.0,
        "lag": version - int(sampled.min()) if len(sampled) else 0,
    }
