"""Packs sequences one after the other into micro-batches within a token budget. Nothing is padded or truncated.

The samples of one prompt can share the prompt's tokens, which are then packed once. But the token directly before the
first loss token is packed for each sequence, so each packed token predicts at most one token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from .batching import MAX_ATTENDED, PackItem, balanced_fit, first_fit
from .types import SampleKey, TokenSequence

REFUSED = 2**31 - 1
"""A rank requests this number of micro-batches if its sequences do not fit, so that all ranks raise an error."""


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """The sequences of one forward and backward pass, longest first.

    In shapes, N is the number of packed tokens, and M the number of tokens in the loss.

    Attributes:
        input_ids: [N] int64.
        position_ids: [N] int64, counted from 0 in every sequence; [3, N] if a sequence has images.
        lengths: Number of tokens of each sequence. The sum is N, or more if sequences share tokens.
        token_index: [sum of lengths] int64 on the host. For each token of each sequence, its position among the packed
            tokens. None without shared tokens.
        image_rows: [N] int64, index of each image token's feature among the merged features of ``pixels``; -1 for
            text. None without images.
        pixels: [patches, …] uint8, the pixels of each image once; None without images.
        grids: [images, 3] int64, number of patches of each image in time, height and width; None without images.
        predict_index: [M] int64 on the host, packed position of the token before each token in the loss.
        targets: [M] int64, the tokens in the loss.
        trajectory_index: [M] int64, index of each loss token's trajectory within this micro-batch.
        trajectory_lengths: [number of trajectories] int64, number of tokens in the loss of each trajectory, over all
            its branches (paths through the turns).
        columns: [M, …] float32 by name, the sequences' columns at the tokens in the loss; 0 if a sequence does not have
            the column.
        source: Index of each sequence in the list passed to `Packer.pack`.
    """

    input_ids: Tensor
    position_ids: Tensor
    lengths: tuple[int, ...]
    predict_index: np.ndarray
    targets: Tensor
    trajectory_index: Tensor
    trajectory_lengths: Tensor
    columns: dict[str, Tensor] = field(default_factory=dict)
    source: tuple[int, ...] = ()
    token_index: np.ndarray | None = None
    image_rows: Tensor | None = None
    pixels: Tensor | None = None
    grids: Tensor | None = None

    def last_index(self) -> np.ndarray:
        """Return the packed position of each sequence's last token: [number of sequences] int64, on the host."""
        last = np.cumsum(self.lengths) - 1
        return last if self.token_index is None else self.token_index[last]

    def to(self, device: torch.device) -> MicroBatch:
        """Return a copy of the micro-batch on a device, or ``self`` if it is already there."""
        if self.input_ids.device == device:
            return self
        return self._with_tensors(lambda value: on_device(value, device))

    def pinned(self) -> MicroBatch:
        """Return a copy of the micro-batch in page-locked memory."""
        return self._with_tensors(Tensor.pin_memory)

    def with_columns(self, sequences: Sequence[TokenSequence]) -> MicroBatch:
        """Return a copy of the micro-batch with the columns of ``sequences``, as one value per token in the loss.

        ``sequences`` must be the sequences that were passed to `Packer.pack`, in the same order. They may have other
        columns than the packed sequences.
        """
        chosen = [sequences[index] for index in self.source]
        in_loss = np.flatnonzero(np.concatenate([sequence.loss_mask for sequence in chosen])) if chosen else []
        names = dict.fromkeys(name for sequence in sequences for name in sequence.columns)
        columns = {
            name: torch.from_numpy(_column(name, chosen)[in_loss].astype(np.float32, copy=False))
            if chosen
            else torch.zeros(0)
            for name in names
        }
        return replace(self, columns=columns)

    def _with_tensors(self, change: Callable[[Tensor], Tensor]) -> MicroBatch:
        tensors = {name: change(value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **tensors, columns={name: change(value) for name, value in self.columns.items()})


def on_device(values: Tensor | np.ndarray, device: torch.device) -> Tensor:
    """Copy a tensor or array from the host to ``device``, so that the host does not wait for a GPU.

    The copy goes via page-locked memory. For the CPU, the values are not copied.
    """
    tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    if device.type == "cpu":
        return tensor
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def tokens_in_loss(sequences: Sequence[TokenSequence]) -> dict[SampleKey, int]:
    """Return how many tokens of each trajectory are in the loss, over all its branches (paths through its turns)."""
    totals = dict.fromkeys((sequence.trajectory for sequence in sequences), 0)
    for sequence in sequences:
        totals[sequence.trajectory] += int(np.count_nonzero(sequence.loss_mask))
    return totals


@dataclass(frozen=True, kw_only=True)
class Packer:
    """Packs sequences into micro-batches.

    Attributes:
        max_tokens: Token budget: the largest number of packed tokens per micro-batch.
        whole: Whether to pack all tokens. If False, the last token in the loss of each sequence and the tokens after
            it are left out, because they predict no token in the loss. At least one token per sequence is packed.
        together: Whether several sequences may share a micro-batch. If False, each sequence gets its own micro-batch,
            for models that cannot separate packed sequences.
        share_prompts: Whether sequences of a micro-batch share the tokens of a common prompt. The budget counts these
            tokens once.
        keep_branches: Raise an error if the branches of a trajectory do not fit into one micro-batch.
        budget: Name of the option that sets ``max_tokens``, for error messages.
    """

    max_tokens: int
    whole: bool = True
    together: bool = True
    share_prompts: bool = False
    keep_branches: bool = False
    budget: str = "learner.max_tokens_per_micro_batch"

    def pack(
        self,
        sequences: Sequence[TokenSequence],
        *,
        columns: bool = True,
        agree: Callable[[int], int] = lambda needed: needed,
    ) -> list[MicroBatch]:
        """Pack sequences into micro-batches with similar numbers of tokens.

        The branches of a trajectory (paths through its turns) share a micro-batch if they fit.

        Args:
            sequences: In any order; may be empty.
            columns: Whether to fill `MicroBatch.columns` from the sequences. If False, call `MicroBatch.with_columns`
                later.
            agree: Called once with the number of micro-batches that this rank needs. It returns the number to make,
                which is not smaller and is equal on all ranks. Additional micro-batches hold one token outside the
                loss. A rank whose sequences do not fit requests `REFUSED`; all ranks then raise an error.

        Returns:
            At least one micro-batch. Each sequence is in exactly one micro-batch.

        Raises:
            ValueError: on all ranks, if a sequence exceeds the budget. With ``keep_branches``, also if the branches of
                a trajectory do not fit into one micro-batch.
        """
        # ``rfind`` finds the last True of the loss mask. For sequences of usual lengths, it is faster than numpy.
        lengths = [len(s.input_ids) if self.whole else max(1, s.loss_mask.tobytes().rfind(1)) for s in sequences]
        prompts = _prompts(sequences) if self.share_prompts else {}
        try:
            units = self._units(sequences, lengths, prompts)
        except ValueError:
            agree(REFUSED)
            raise
        bins = self._bins([_item(sequences, unit, lengths, prompts) for unit in units], agree)
        in_loss = tokens_in_loss(sequences)
        batches = []
        for part in bins:
            source = sorted((index for place in part for index in units[place]), key=lambda i: (-lengths[i], i))
            packed = [lengths[index] for index in source] or [1]
            batches.append(_micro_batch(sequences, source, packed, in_loss, prompts))
        return [batch.with_columns(sequences) if columns else batch for batch in batches]

    def _bins(self, items: Sequence[PackItem], agree: Callable[[int], int]) -> list[list[int]]:
        count = agree(max(1, len(first_fit(items, self.max_tokens)) if self.together else len(items)))
        if count >= REFUSED:
            raise ValueError(
                f"{self.budget} must hold the sequences of each rank, got {self.max_tokens} tokens, which is too small "
                f"for another rank; see the error of that rank, and raise {self.budget}"
            )
        bins = (
            balanced_fit(items, self.max_tokens, count) if self.together else [[place] for place in range(len(items))]
        )
        return bins + [[] for _ in range(count - len(bins))]

    def _units(
        self, sequences: Sequence[TokenSequence], lengths: Sequence[int], prompts: Mapping[SampleKey, bytes]
    ) -> list[list[int]]:
        if lengths and max(lengths) > self.max_tokens:
            raise ValueError(
                f"{self.budget} must hold the longest sequence, got {self.max_tokens} for a sequence of {max(lengths)} "
                "tokens; raise this option, or lower the limits on the lengths of prompts and responses"
            )
        branches: dict[SampleKey, list[int]] = {}
        for index, sequence in enumerate(sequences):
            branches.setdefault(sequence.trajectory, []).append(index)
        units = []
        for unit in branches.values():
            if len(unit) == 1:
                units.append(unit)
                continue
            unit.sort(key=lambda i: -lengths[i])
            item = _item(sequences, unit, lengths, prompts)
            num_tokens = item.num_prompt + item.num_own
            if self.together and num_tokens <= self.max_tokens and item.num_attended <= MAX_ATTENDED * self.max_tokens:
                units.append(unit)
            elif self.keep_branches:
                raise ValueError(
                    f"{self.budget} must hold a trajectory's {len(unit)} branches together, got "
                    f"{self.max_tokens} for {num_tokens} tokens: algorithm.loss, weight or masks read whole "
                    "trajectories; raise this option, or choose a loss, a weight and masks that work per token"
                    if self.together
                    else "algorithm.loss, weight or masks read whole trajectories, and this model runs one sequence at "
                    f"a time, got a trajectory of {len(unit)} branches; choose a loss, a weight and masks that work "
                    "per token"
                )
            else:
                units += [[index] for index in unit]
        return units


def _num_leading(sequence: TokenSequence) -> int:
    """Return the number of leading tokens that other sequences can share.

    These are the tokens before the token whose output predicts the first token in the loss.
    """
    return max(0, sequence.loss_mask.tobytes().find(1) - 1)


def _prompts(sequences: Sequence[TokenSequence]) -> dict[SampleKey, bytes]:
    first: dict[SampleKey, tuple[int, TokenSequence]] = {}
    for sequence in sequences:
        num_leading = _num_leading(sequence)
        if num_leading and (sequence.trajectory not in first or num_leading < first[sequence.trajectory][0]):
            first[sequence.trajectory] = (num_leading, sequence)
    return {key: sequence.compared[:num_leading].tobytes() for key, (num_leading, sequence) in first.items()}


def _holds(sequence: TokenSequence, prompt: bytes) -> bool:
    num_prompt = len(prompt) // sequence.input_ids.itemsize
    return _num_leading(sequence) >= num_prompt and sequence.compared[:num_prompt].tobytes() == prompt


def _item(
    sequences: Sequence[TokenSequence], unit: list[int], lengths: Sequence[int], prompts: Mapping[SampleKey, bytes]
) -> PackItem:
    chosen, packed = [sequences[index] for index in unit], [lengths[index] for index in unit]
    prompt = prompts.get(chosen[0].trajectory)
    if prompt is None or not any(_holds(sequence, prompt) for sequence in chosen):
        return PackItem(None, 0, sum(packed), sum(packed))
    leads = _leading_tokens(chosen, packed, prompts, np.argsort(unit).tolist())
    num_packed = sum(packed) if leads is None else len(np.unique(leads))
    num_prompt = len(prompt) // chosen[0].input_ids.itemsize
    return PackItem(prompt, num_prompt, num_packed - num_prompt, sum(packed))


def _micro_batch(
    sequences: Sequence[TokenSequence],
    source: Sequence[int],
    packed: Sequence[int],
    totals: Mapping[SampleKey, int],
    prompts: Mapping[SampleKey, bytes],
) -> MicroBatch:
    """Make a micro-batch of the sequences with the indices ``source``. Tokens that sequences share are packed once.

    ``packed`` has the number of leading tokens to pack per sequence. ``totals`` has the number of tokens in the loss
    per trajectory.
    """
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
    images = _images(chosen, packed)
    tokens, positions = input_ids[kept], (positions if images is None else _positions(chosen).T)[..., kept]
    rows = None if images is None else images[0][kept]
    predict_index, token_index = in_loss - 1 - moved[of_sequence[in_loss]], None
    leads = _leading_tokens(chosen, packed, prompts, np.argsort(source).tolist()) if source and prompts else None
    if leads is not None:
        is_packed = leads == np.arange(len(leads))
        tokens, positions = tokens[is_packed], positions[..., is_packed]
        rows = None if rows is None else rows[is_packed]
        token_index = np.flatnonzero(is_packed).searchsorted(leads)
        predict_index = token_index[predict_index]
    return MicroBatch(
        input_ids=torch.from_numpy(tokens.astype(np.int64)),
        position_ids=torch.from_numpy(np.ascontiguousarray(positions)),
        lengths=tuple(packed),
        token_index=token_index,
        predict_index=predict_index,
        targets=torch.from_numpy(input_ids[in_loss].astype(np.int64)),
        trajectory_index=torch.from_numpy(trajectory[of_sequence[in_loss]]),
        trajectory_lengths=torch.tensor([totals.get(key, 0) for key in places]),
        source=tuple(source),
        image_rows=None if rows is None else torch.from_numpy(rows),
        pixels=None if images is None else torch.from_numpy(images[1]),
        grids=None if images is None else torch.from_numpy(images[2]),
    )


def _images(chosen: Sequence[TokenSequence], packed: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Return the images in the packed tokens as three arrays; None without images.

    ``packed`` has the number of leading tokens to pack per sequence. The vision tower computes features from the
    returned pixels. The first array has one int64 per token of the concatenated sequences: for an image token, the
    index of its feature; for a text token, -1. Entries of tokens that are not packed have no meaning. The second array
    is the pixels [patches, …] uint8 of the images. The third is their grids [images, 3] int64. Each image is included
    once.
    """
    first_rows: dict[tuple[int, int], int] = {}
    rows, pixels, grids, num_rows = [], [], [], 0
    for sequence, length in zip(chosen, packed, strict=True):
        own = np.full(len(sequence.input_ids), -1, dtype=np.int64)
        rows.append(own)
        if (images := sequence.images) is None:
            continue
        group = images.group
        for index in np.unique(images.indices[:length][images.indices[:length] >= 0]):
            key = (id(group), int(index))
            if key not in first_rows:
                first_rows[key] = num_rows
                pixels.append(group.pixels_of(index))
                grids.append(group.grids[index, :3])
                num_rows += int(group.first_rows[index + 1] - group.first_rows[index])
            is_own = images.indices == index
            own[is_own] = images.rows[is_own] - group.first_rows[index] + first_rows[key]
    if not pixels:
        return None
    return np.concatenate(rows), np.concatenate(pixels), np.stack(grids).astype(np.int64)


def _positions(chosen: Sequence[TokenSequence]) -> np.ndarray:
    own = (
        np.repeat(np.arange(len(sequence.input_ids))[:, None], 3, axis=1)
        if sequence.images is None
        else sequence.images.positions
        for sequence in chosen
    )
    return np.concatenate([*own]).astype(np.int64)


def _column(name: str, chosen: Sequence[TokenSequence]) -> np.ndarray:
    shape = next((each.columns[name].shape[1:] for each in chosen if name in each.columns), ())
    return np.concatenate(
        [each.columns[name] if name in each.columns else np.zeros((len(each.input_ids), *shape)) for each in chosen]
    )


def _leading_tokens(
    chosen: Sequence[TokenSequence],
    packed: Sequence[int],
    prompts: Mapping[SampleKey, bytes],
    order: Sequence[int],
) -> np.ndarray | None:
    """Find leading tokens that sequences share, so that only one copy of a shared token is packed.

    Returns [sum of ``packed``] int64, with one entry per token of the concatenated sequences; None if no tokens are
    shared. If a token is packed, its entry is its own index. If a token is not packed, its entry is the index of the
    equal token that is packed for an earlier sequence. The earlier sequence is another branch of the same trajectory,
    or the first sequence with the same prompt. ``order`` lists the indices of the sequences, the earliest first. Only
    the first `_num_leading` tokens of a sequence can be left out.
    """
    leads, shares, starts = np.arange(sum(packed)), False, [0, *accumulate(packed)]
    leaders: dict[bytes, tuple[int, np.ndarray]] = {}
    branches: dict[SampleKey, list[tuple[int, np.ndarray]]] = {}
    for place in order:
        sequence, length, start = chosen[place], packed[place], starts[place]
        tokens, limit = sequence.compared[:length], min(length, _num_leading(sequence))
        earlier = branches.setdefault(sequence.trajectory, [])
        prompt = prompts.get(sequence.trajectory)
        candidates = [*earlier, *([leaders[prompt]] if prompt in leaders else [])]
        shared = [(_num_common(tokens[:limit], other), first) for first, other in candidates]
        num_shared, first = max(shared, default=(0, 0))
        if num_shared:
            leads[start : start + num_shared] = leads[first : first + num_shared]
            shares = True
        earlier.append((start, tokens))
        if prompt is not None and prompt not in leaders and _holds(sequence, prompt):
            leaders[prompt] = (start, tokens)
    return leads if shares else None


def _num_common(tokens: np.ndarray, others: np.ndarray) -> int:
    length = min(len(tokens), len(others))
    different = np.flatnonzero(tokens[:length] != others[:length])
    return int(different[0]) if len(different) else length


_BLANK = TokenSequence(input_ids=np.zeros(1, dtype=np.int32), loss_mask=np.zeros(1, dtype=bool))
