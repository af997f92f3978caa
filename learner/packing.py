"""Unpadded sequences laid end to end in micro-batches of a token budget. No padding, and nothing is truncated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from .batching import bin_lengths, num_bins
from .types import TokenSequence


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Sequences of one forward-backward, longest first. N packed tokens, M of them in the loss.

    Attributes:
        input_ids: [N] int64.
        position_ids: [N] int64, counted from 0 in every sequence.
        lengths: Tokens of every sequence; they sum to N.
        predict_index: [M] int64, packed position whose next token is in the loss.
        targets: [M] int64, that next token.
        sequence_index: [M] int64, sequence (within this micro-batch) of each token in the loss.
        loss_lengths: [number of sequences] int64, tokens in the loss of every sequence.
        columns: [M] float32 by name, the sequences' columns at the tokens in the loss.
        source: Index of every sequence in the list that was packed.
    """

    input_ids: Tensor
    position_ids: Tensor
    lengths: tuple[int, ...]
    predict_index: Tensor
    targets: Tensor
    sequence_index: Tensor
    loss_lengths: Tensor
    columns: dict[str, Tensor] = field(default_factory=dict)
    source: tuple[int, ...] = ()

    def to(self, device: torch.device) -> MicroBatch:
        """Copy of the micro-batch on a device; itself where it is there already."""
        if self.input_ids.device == device:
            return self
        tensors = {
            name: value.to(device, non_blocking=True) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        columns = {name: value.to(device, non_blocking=True) for name, value in self.columns.items()}
        return MicroBatch(**tensors, lengths=self.lengths, columns=columns, source=self.source)


def num_micro_batches(
    sequences: Sequence[TokenSequence], max_tokens: int, *, whole: bool = True, together: bool = True
) -> int:
    """Micro-batches that this rank needs; the ranks of a group agree on the largest.

    Args:
        sequences: In any order; may be empty.
        max_tokens: Most tokens of a micro-batch.
        whole: See `pack`.
        together: See `pack`.

    Raises:
        ValueError: a sequence alone is over the budget.
    """
    lengths = _packed_lengths(sequences, whole)
    if lengths and max(lengths) > max_tokens:
        raise ValueError(
            f"learner.max_tokens_per_micro_batch must hold the longest sequence, got {max_tokens} for a sequence of "
            f"{max(lengths)} tokens; raise it, or lower the longest prompt or response"
        )
    return num_bins(lengths, max_tokens) if together else len(lengths)


def pack(
    sequences: Sequence[TokenSequence], *, max_tokens: int, count: int, whole: bool = True, together: bool = True
) -> list[MicroBatch]:
    """Fill ``count`` micro-batches, balanced by tokens.

    Args:
        sequences: In any order; may be empty.
        max_tokens: Most tokens of a micro-batch.
        count: Number of micro-batches, at least `num_micro_batches`. What is left over becomes empty
            micro-batches: one token that is in no loss, so that every rank takes part in every collective.
        whole: Pack every token. Otherwise each sequence ends before its last token in the loss: under causal attention
            no other prediction needs that token, or what follows it. One without such a token keeps its first.
        together: Sequences share micro-batches. Otherwise each gets its own, for models that cannot tell them apart.

    Returns:
        ``count`` micro-batches that hold every sequence once.
    """
    lengths = _packed_lengths(sequences, whole)
    names = tuple(sequences[0].columns) if sequences else ()
    if together:
        parts = bin_lengths(lengths, max_tokens, count)
    else:
        parts = [[index] if index < len(lengths) else [] for index in range(count)]
    ordered = [sorted(part, key=lambda i: -lengths[i]) for part in parts]
    return [_micro_batch(sequences, source, [lengths[i] for i in source] or [1], names) for source in ordered]


def _packed_lengths(sequences: Sequence[TokenSequence], whole: bool) -> list[int]:
    """Tokens of each sequence that are packed."""
    if whole:
        return [len(sequence.input_ids) for sequence in sequences]
    # The last True is found in bytes: an array function costs more than the row is long.
    return [max(1, sequence.loss_mask.tobytes().rfind(1)) for sequence in sequences]


def _micro_batch(
    sequences: Sequence[TokenSequence], source: Sequence[int], packed: Sequence[int], names: tuple[str, ...]
) -> MicroBatch:
    """Lay sequences end to end, the first ``packed`` tokens of each."""
    chosen = [sequences[index] for index in source] or [_BLANK]
    input_ids = np.concatenate([sequence.input_ids for sequence in chosen])
    loss_mask = np.concatenate([sequence.loss_mask for sequence in chosen])
    lengths = np.array([len(sequence.input_ids) for sequence in chosen])
    starts = np.cumsum(lengths) - lengths
    in_loss = np.flatnonzero(loss_mask)
    of_sequence = np.repeat(np.arange(len(chosen)), lengths)
    positions = np.arange(len(input_ids)) - starts[of_sequence]
    kept, ends = positions < np.asarray(packed)[of_sequence], np.cumsum(packed)
    moved = starts - (ends - packed)
    columns = {
        name: torch.from_numpy(
            np.concatenate([s.columns[name] for s in chosen])[in_loss].astype(np.float32, copy=False)
        )
        if source
        else torch.zeros(0)
        for name in names
    }
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids[kept].astype(np.int64)),
        position_ids=torch.from_numpy(positions[kept]),
        lengths=tuple(packed),
        predict_index=torch.from_numpy(in_loss - 1 - moved[of_sequence[in_loss]]),
        targets=torch.from_numpy(input_ids[in_loss].astype(np.int64)),
        sequence_index=torch.from_numpy(of_sequence[in_loss]),
        loss_lengths=torch.from_numpy(np.bincount(of_sequence[in_loss], minlength=len(chosen))),
        columns=columns,
        source=tuple(source),
    )


_BLANK = TokenSequence(input_ids=np.zeros(1, dtype=np.int32), loss_mask=np.zeros(1, dtype=bool))
