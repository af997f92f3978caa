"""What the learner is handed: a rank's share of a step, and the token sequences that it trains on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from asyncrl.protocol.trajectory import TrajectoryGroup
from asyncrl.protocol.types import FinishReason


@dataclass(frozen=True, kw_only=True)
class RankBatch:
    """The share of one learner step that one data-parallel rank trains on, as metadata: no tokens.

    Attributes:
        version: Learner version that consumes the batch; the step takes it to ``version + 1``.
        group_ids: Prompt groups to fetch from the buffer; may be empty.
        rewards: One [G] float32 array a group, in the order of ``group_ids``; a length penalty is in them.
        advantages: One [G] float32 array a group, in the same order; None where the ranks compute them from tokens.
        mini_batches: Which optimizer update of the step trains on each group, counted from 0.
        max_lag: Staleness bound in learner steps; the rank refuses a batch that breaks it.
    """

    version: int
    group_ids: tuple[int, ...]
    rewards: tuple[np.ndarray, ...]
    advantages: tuple[np.ndarray, ...] | None
    mini_batches: tuple[int, ...]
    max_lag: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenSequence:
    """One unpadded sequence to train on.

    Attributes:
        input_ids: [T] int32 token ids, T >= 1.
        loss_mask: [T] bool, True where the token is in the loss. The first token has no prediction: its entry is
            False.
        columns: Further [T] float32 arrays by name, aligned with ``input_ids`` and read where ``loss_mask`` is
            True. Example: ``behavior_logprobs``, ``advantages``.
        mini_batch: Which optimizer update of a learner step trains on it, counted from 0.
    """

    input_ids: np.ndarray
    loss_mask: np.ndarray
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    mini_batch: int = 0

    def with_column(self, name: str, values: np.ndarray) -> TokenSequence:
        """The sequence with one more [T] float32 column."""
        return replace(self, columns={**self.columns, name: values})

    def __post_init__(self) -> None:
        length = len(self.input_ids)
        if length == 0:
            raise ValueError("a sequence must hold at least one token, got none; filter empty rows out")
        for name, array in (("loss_mask", self.loss_mask), *self.columns.items()):
            if len(array) != length:
                raise ValueError(f"{name} must be aligned with input_ids ({length} tokens), got {len(array)} entries")
        if self.loss_mask[0]:
            raise ValueError("loss_mask[0] must be False: no token predicts the first one; start with a prompt token")


def group_sequences(
    group: TrajectoryGroup, advantages: np.ndarray | None, *, mini_batch: int = 0, mask_truncated: bool = False
) -> list[TokenSequence]:
    """Lay a prompt group out as G sequences of prompt and response.

    Args:
        group: G trajectories of one prompt.
        advantages: [G] float32, one a sample, for all its tokens; None leaves the column out.
        mini_batch: Which optimizer update of the step trains on the group.
        mask_truncated: Leave samples that hit the length limit out of the loss.

    Returns:
        G sequences with the columns ``behavior_logprobs`` and, where given, ``advantages``; prompt and masked tokens
        are not in the loss.
    """
    ends = np.cumsum(group.response_lengths).tolist()
    sequences = []
    for sample, (end, length) in enumerate(zip(ends, group.response_lengths.tolist(), strict=True)):
        span = slice(end - length, end)
        dropped = mask_truncated and group.finish_reasons[sample] is FinishReason.length
        mask = np.zeros(length, dtype=bool) if dropped else group.response_mask[span]
        columns = {"behavior_logprobs": _after_prompt(group, group.behavior_logprobs[span])}
        if advantages is not None:
            columns["advantages"] = _after_prompt(group, np.full(length, advantages[sample], dtype=np.float32))
        sequences.append(
            TokenSequence(
                input_ids=np.concatenate([group.prompt_ids, group.response_ids[span]]),
                loss_mask=_after_prompt(group, mask),
                mini_batch=mini_batch,
                columns=columns,
            )
        )
    return sequences


def _after_prompt(group: TrajectoryGroup, values: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros(len(group.prompt_ids), dtype=values.dtype), values])
