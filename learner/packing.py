"""Unpadded sequences laid end to end in micro-batches of a token budget. No padding, and nothing is truncated.

Samples of one prompt can share its tokens: they are packed once, and each sample's attention reads them from there. The
last token before a sequence's first token in the loss is its own, so that each packed token predicts one token at most.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from .batching import bin_lengths, num_bins
from .types import SampleKey, TokenSequence

REFUSED = 2**31 - 1
"""The number of micro-batches that a rank asks for when its sequences do not fit; see `pack`."""


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Sequences of one forward-backward, longest first. N packed tokens, M of them in the loss.

    Attributes:
        input_ids: [N] int64.
        position_ids: [N] int64, counted from 0 in every sequence.
        lengths: Tokens of every sequence; they sum to N, or to more where tokens are shared.
        token_index: [sum of lengths] int64, packed position of every token of every sequence; None where nothing is
            shared, and the sequences are packed as they are.
        predict_index: [M] int64, packed position whose next token is in the loss.
        targets: [M] int64, that next token.
        trajectory_index: [M] int64, trajectory (within this micro-batch) of each token in the loss.
        trajectory_lengths: [number of trajectories] int64, tokens in the loss of each, on all its branches: also those
            in other micro-batches.
        columns: [M, …] float32 by name, the sequences' columns at the tokens in the loss; 0 where a sequence has none.
        source: Index of every sequence in the list that was packed.
    """

    input_ids: Tensor
    position_ids: Tensor
    lengths: tuple[int, ...]
    predict_index: Tensor
    targets: Tensor
    trajectory_index: Tensor
    trajectory_lengths: Tensor
    columns: dict[str, Tensor] = field(default_factory=dict)
    source: tuple[int, ...] = ()
    token_index: Tensor | None = None

    def last_index(self) -> Tensor:
        """[number of sequences] int64, packed position of the last token of each."""
        last = torch.tensor(self.lengths, device=self.input_ids.device).cumsum(0) - 1
        return last if self.token_index is None else self.token_index[last]

    def to(self, device: torch.device) -> MicroBatch:
        """Copy of the micro-batch on a device; itself where it is there already."""
        if self.input_ids.device == device:
            return self
        tensors = {
            name: value.to(device, non_blocking=True) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        columns = {name: value.to(device, non_blocking=True) for name, value in self.columns.items()}
        return MicroBatch(**tensors, lengths=self.lengths, columns=columns, source=self.source)


def tokens_in_loss(sequences: Sequence[TokenSequence]) -> dict[SampleKey, int]:
    """Tokens in the loss of each trajectory, on all its branches."""
    totals = dict.fromkeys((sequence.trajectory for sequence in sequences), 0)
    for sequence in sequences:
        totals[sequence.trajectory] += int(np.count_nonzero(sequence.loss_mask))
    return totals


def pack(
    sequences: Sequence[TokenSequence],
    *,
    max_tokens: int,
    whole: bool = True,
    together: bool = True,
    share_prompts: bool = False,
    keep_branches: bool = False,
    agree: Callable[[int], int] = lambda needed: needed,
) -> list[MicroBatch]:
    """Fill micro-batches, balanced by tokens. Branches of one trajectory share one where they fit.

    Args:
        sequences: In any order; may be empty.
        max_tokens: Most tokens of a micro-batch.
        whole: Pack every token. Otherwise each sequence ends before its last token in the loss: under causal attention
            no other prediction needs that token, or what follows it. One without such a token keeps its first.
        together: Sequences share micro-batches. Otherwise each gets its own, for models that cannot tell them apart.
        share_prompts: What sequences of a micro-batch have in common before their first token in the loss is packed
            once. The budget counts it for each.
        keep_branches: The loss reads whole trajectories: refuse those whose branches cannot share a micro-batch.
        agree: Called once with the number of micro-batches that this rank needs; returns how many are made, at least
            that. What is left over becomes empty micro-batches: one token that is in no loss, so that every rank takes
            part in every collective. A rank whose sequences do not fit asks for `REFUSED`; then every rank raises, and
            none waits for the others.

    Returns:
        At least one micro-batch; they hold every sequence once. Raises `ValueError` if a sequence alone is over the
        budget, or branches do not fit together under ``keep_branches``, on this rank or another one.
    """
    # The last True is found in bytes: an array function costs more than the row is long.
    lengths = [len(s.input_ids) if whole else max(1, s.loss_mask.tobytes().rfind(1)) for s in sequences]
    try:
        units = _units(sequences, lengths, max_tokens, together, keep_branches)
    except ValueError:
        agree(REFUSED)
        raise
    sizes = [sum(lengths[index] for index in unit) for unit in units]
    count = agree(max(1, num_bins(sizes, max_tokens) if together else len(units)))
    if count >= REFUSED:
        raise ValueError(
            f"learner.max_tokens_per_micro_batch={max_tokens} tokens must hold what every rank is given, got more on "
            "another rank, whose error has the lengths; raise it"
        )
    if together:
        parts = [[index for place in part for index in units[place]] for part in bin_lengths(sizes, max_tokens, count)]
    else:
        parts = units + [[] for _ in range(count - len(units))]
    in_loss = tokens_in_loss(sequences)
    ordered = [sorted(part, key=lambda i: -lengths[i]) for part in parts]
    return [
        _micro_batch(sequences, source, [lengths[i] for i in source] or [1], in_loss, share_prompts)
        for source in ordered
    ]


def _units(
    sequences: Sequence[TokenSequence], lengths: Sequence[int], max_tokens: int, together: bool, keep_branches: bool
) -> list[list[int]]:
    """What is packed as one: the branches of a trajectory, or each alone where they cannot share a micro-batch."""
    if lengths and max(lengths) > max_tokens:
        raise ValueError(
            f"learner.max_tokens_per_micro_batch must hold the longest sequence, got {max_tokens} for a sequence of "
            f"{max(lengths)} tokens; raise it, or lower the longest prompt or response"
        )
    branches: dict[SampleKey, list[int]] = {}
    for index, sequence in enumerate(sequences):
        branches.setdefault(sequence.trajectory, []).append(index)
    units = branches.values()
    return [part for unit in units for part in _kept_or_split(unit, lengths, max_tokens, together, keep_branches)]


def _kept_or_split(
    unit: list[int], lengths: Sequence[int], max_tokens: int, together: bool, keep_branches: bool
) -> list[list[int]]:
    """See `_units`, of one trajectory."""
    if len(unit) == 1:
        return [unit]
    num_tokens = sum(lengths[index] for index in unit)
    if together and num_tokens <= max_tokens:
        return [unit]
    if keep_branches and not together:
        raise ValueError(
            "algorithm.loss, weight or masks read whole trajectories, and this model runs one sequence at a time, got "
            f"a trajectory of {len(unit)} branches; choose a loss, a weight and masks by token"
        )
    if keep_branches:
        raise ValueError(
            f"learner.max_tokens_per_micro_batch must hold a trajectory's {len(unit)} branches together, since "
            f"algorithm.loss, weight or masks read all of it, got {max_tokens} for {num_tokens} tokens; raise it, or "
            "choose a loss, a weight and masks by token"
        )
    return [[index] for index in unit]


def _micro_batch(
    sequences: Sequence[TokenSequence],
    source: Sequence[int],
    packed: Sequence[int],
    totals: Mapping[SampleKey, int],
    share_prompts: bool,
) -> MicroBatch:
    """Lay sequences end to end, the first ``packed`` tokens of each; ``totals`` are the trajectories' tokens."""
    chosen = [sequences[index] for index in source] or [_BLANK]
    input_ids = np.concatenate([sequence.input_ids for sequence in chosen])
    loss_mask = np.concatenate([sequence.loss_mask for sequence in chosen])
    lengths = np.array([len(sequence.input_ids) for sequence in chosen])
    starts = np.cumsum(lengths) - lengths
    in_loss = np.flatnonzero(loss_mask)
    of_sequence = np.repeat(np.arange(len(chosen)), lengths)
    positions = np.arange(len(input_ids)) - starts[of_sequence]
    places: dict[SampleKey, int] = {}
    trajectory = np.array([places.setdefault(sequence.trajectory, len(places)) for sequence in chosen])
    kept, ends = positions < np.asarray(packed)[of_sequence], np.cumsum(packed, dtype=np.int64)
    moved = starts - (ends - np.asarray(packed))
    columns = {
        name: torch.from_numpy(_column(name, chosen)[in_loss].astype(np.float32, copy=False))
        if source
        else torch.zeros(0)
        for name in dict.fromkeys(name for sequence in sequences for name in sequence.columns)
    }
    tokens, positions = input_ids[kept], positions[kept]
    predict_index, token_index = in_loss - 1 - moved[of_sequence[in_loss]], None
    leads = _leading_tokens(chosen, packed) if share_prompts else None
    if leads is not None:
        is_packed = leads == np.arange(len(leads))
        tokens, positions = tokens[is_packed], positions[is_packed]
        token_index = np.flatnonzero(is_packed).searchsorted(leads)
        predict_index = token_index[predict_index]
    return MicroBatch(
        input_ids=torch.from_numpy(tokens.astype(np.int64)),
        position_ids=torch.from_numpy(positions),
        lengths=tuple(packed),
        token_index=None if token_index is None else torch.from_numpy(token_index),
        predict_index=torch.from_numpy(predict_index),
        targets=torch.from_numpy(input_ids[in_loss].astype(np.int64)),
        trajectory_index=torch.from_numpy(trajectory[of_sequence[in_loss]]),
        trajectory_lengths=torch.tensor([totals.get(key, 0) for key in places]),
        columns=columns,
        source=tuple(source),
    )


def _column(name: str, chosen: Sequence[TokenSequence]) -> np.ndarray:
    """[tokens, …] of a column of sequences laid end to end; 0 in those without it."""
    shape = next((each.columns[name].shape[1:] for each in chosen if name in each.columns), ())
    return np.concatenate(
        [each.columns[name] if name in each.columns else np.zeros((len(each.input_ids), *shape)) for each in chosen]
    )


def _leading_tokens(chosen: Sequence[TokenSequence], packed: Sequence[int]) -> np.ndarray | None:
    """Which token each token of the sequences, laid end to end, is packed as: [sum of ``packed``] int64, or None.

    That is itself, or the same token of the first sequence with the same prompt. None: no two have one in common.
    """
    leads, leaders, start, shares = np.arange(sum(packed)), dict[bytes, int](), 0, False
    for sequence, length in zip(chosen, packed, strict=True):
        num_shared = sequence.loss_mask.tobytes().find(1) - 1
        if num_shared > 0:
            leader = leaders.setdefault(sequence.input_ids[:num_shared].tobytes(), start)
            if leader != start:
                leads[start : start + num_shared] = np.arange(leader, leader + num_shared)
                shares = True
        start += length
    return leads if shares else None


_BLANK = TokenSequence(input_ids=np.zeros(1, dtype=np.int32), loss_mask=np.zeros(1, dtype=bool))
