"""What the learner is handed: a rank's share of a step, and the token sequences that it trains on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from asyncrl.protocol.types import FinishReason, TrajectoryGroup

SampleKey = tuple[int, int]
"""A sample's group id, and its place in the group."""


@dataclass(frozen=True, kw_only=True)
class GroupShare:
    """The samples of one prompt group that one rank trains on in one optimizer update.

    Attributes:
        group_id: The group to fetch from the buffer.
        samples: [S] their places in the group, ascending.
        rewards: [S] float32; a length penalty is in them.
        mini_batch: Which optimizer update of the step trains on them, counted from 0.
    """

    group_id: int
    samples: tuple[int, ...]
    rewards: np.ndarray
    mini_batch: int


@dataclass(frozen=True, kw_only=True)
class RankBatch:
    """The share of one learner step that one data-parallel rank trains on, as metadata: no tokens.

    Attributes:
        version: Learner version that consumes the batch; the step takes it to ``version + 1``.
        shares: What the rank trains on; may be empty. A group may come in several shares, one per mini-batch.
        max_lag: Staleness bound in learner steps; the rank refuses a batch that breaks it.
    """

    version: int
    shares: tuple[GroupShare, ...]
    max_lag: int

    @property
    def group_ids(self) -> tuple[int, ...]:
        """The groups to fetch, each once."""
        return tuple(dict.fromkeys(share.group_id for share in self.shares))

    @property
    def sample_keys(self) -> list[SampleKey]:
        """Group id and place in the group of each sample, in the order of the shares."""
        return [(share.group_id, sample) for share in self.shares for sample in share.samples]

    @property
    def rewards(self) -> np.ndarray:
        """[B] float32, one per sample, in the same order."""
        return np.concatenate([np.zeros(0, dtype=np.float32), *(share.rewards for share in self.shares)])


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
    group: TrajectoryGroup, *, samples: Sequence[int] | None = None, mini_batch: int = 0, mask_truncated: bool = False
) -> list[TokenSequence]:
    """Lay samples of a prompt group out as sequences of prompt and response.

    Args:
        group: G trajectories of one prompt.
        samples: Which of them; None takes all.
        mini_batch: Which optimizer update of the step trains on them.
        mask_truncated: Leave samples that hit the length limit out of the loss.

    Returns:
        One sequence per sample with the column ``behavior_logprobs``; prompt and masked tokens are not in the loss.
    """
    ends = np.cumsum(group.response_lengths).tolist()
    sequences = []
    for sample in range(group.num_samples) if samples is None else samples:
        length = int(group.response_lengths[sample])
        span = slice(ends[sample] - length, ends[sample])
        dropped = mask_truncated and group.finish_reasons[sample] is FinishReason.length
        mask = np.zeros(length, dtype=bool) if dropped else group.response_mask[span]
        sequences.append(
            TokenSequence(
                input_ids=np.concatenate([group.prompt_ids, group.response_ids[span]]),
                loss_mask=_after_prompt(group, mask),
                mini_batch=mini_batch,
                columns={"behavior_logprobs": _after_prompt(group, group.behavior_logprobs[span])},
            )
        )
    return sequences


def _after_prompt(group: TrajectoryGroup, values: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros(len(group.prompt_ids), dtype=values.dtype), values])
