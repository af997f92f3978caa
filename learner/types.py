"""The learner's input: the samples of each rank and step, and their token sequences."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from asyncrl.core.images import IMAGE_ROWS, POSITIONS, GroupImages
from asyncrl.core.trajectory import Branch, TrajectoryGroup

SampleKey = tuple[int, int]
"""The key of a trajectory: its prompt group's id, and its index in the group."""

_UNNAMED = itertools.count()
_num_images = itertools.count()


@dataclass(frozen=True, kw_only=True)
class GroupShare:
    """S trajectories of a prompt group that one rank trains on in one optimizer update.

    Attributes:
        group_id: Id of the group, to fetch it from the replay buffer.
        samples: [S] indices of the trajectories in the group, ascending.
        rewards: [S] float32, the trajectories' rewards, including DAPO's length penalty if it is enabled.
        mini_batch: Index of the optimizer update that trains on these trajectories, from 0.
        data_source: Name of the data source of the group's prompt.
    """

    group_id: int
    samples: tuple[int, ...]
    rewards: np.ndarray
    mini_batch: int
    data_source: str = ""


@dataclass(frozen=True, kw_only=True)
class RankBatch:
    """The samples of one learner step for one data-parallel rank, as metadata without tokens.

    Attributes:
        version: Policy version before the step. The version after the step is ``version + 1``.
        shares: The trajectories of this rank, by prompt group and mini-batch; may be empty.
        max_lag: Staleness bound in learner steps. The rank refuses a batch with a staler group.
    """

    version: int
    shares: tuple[GroupShare, ...]
    max_lag: int

    @property
    def group_ids(self) -> tuple[int, ...]:
        """The ids of the batch's prompt groups, without duplicates."""
        return tuple(dict.fromkeys(share.group_id for share in self.shares))

    @property
    def sample_keys(self) -> list[SampleKey]:
        """The keys of all samples, (group id, index in the group), in the order of ``shares``."""
        return [(share.group_id, sample) for share in self.shares for sample in share.samples]

    @property
    def sources(self) -> dict[int, str]:
        """The name of the data source of each group, by group id."""
        return {share.group_id: share.data_source for share in self.shares}

    @property
    def rewards(self) -> dict[SampleKey, float]:
        """The reward of each sample by key, in the order of `sample_keys`."""
        rewards = [float(reward) for share in self.shares for reward in share.rewards]
        return dict(zip(self.sample_keys, rewards, strict=True))


class TurnSpan(NamedTuple):
    """A sampled turn, with its position in a training sequence.

    Attributes:
        turn: Index of the turn in its prompt group.
        previous: Index of the previous sampled turn on the path, among the turns of the group; -1 for a first turn.
        start: Position of the turn's first token in the sequence.
        stop: Position after the turn's last token in the sequence.
        reward: Reward of the turn, plus the rewards of the unsampled turns up to the next sampled turn.
    """

    turn: int
    previous: int
    start: int
    stop: int
    reward: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SequenceImages:
    """The images in a sequence of T tokens.

    Attributes:
        group: All images of the sequence's prompt group.
        indices: [T] int64, the index of each token's image in ``group``; -1 for text.
        rows: [T] int32. For each image token, the index of its feature among the features of all images in ``group``;
            -1 for text. The vision tower computes one feature per image token.
        positions: [T, 3] int32, each token's position in time, height and width, for rotary embeddings.
        compared: [T] int32, the id of each text token, and a negative number for each token of an image. Equal entries
            of two sequences mean equal tokens or equal images.
    """

    group: GroupImages
    indices: np.ndarray
    rows: np.ndarray
    positions: np.ndarray
    compared: np.ndarray

    @classmethod
    def of(
        cls,
        group: GroupImages,
        token_ids: Sequence[np.ndarray],
        rows: Sequence[np.ndarray],
        positions: Sequence[np.ndarray],
    ) -> list[SequenceImages]:
        """Return the images of several sequences of one group, one object per sequence.

        ``group`` has the images of the group. The other arguments are lists with one array per sequence. ``token_ids``
        are the token ids of a sequence, [T]. ``rows`` and ``positions`` become the attributes with these names.
        """
        keys = np.array([-1 - next(_num_images) % 2**31 for _ in range(group.num_images)], dtype=np.int32)
        made = []
        for ids, own_rows, own_positions in zip(token_ids, rows, positions, strict=True):
            indices = np.where(own_rows < 0, -1, group.first_rows.searchsorted(own_rows, side="right") - 1)
            compared = np.where(own_rows < 0, ids, keys[indices]).astype(np.int32)
            made.append(cls(group=group, indices=indices, rows=own_rows, positions=own_positions, compared=compared))
        return made


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenSequence:
    """One unpadded training sequence of T tokens.

    Attributes:
        input_ids: [T] int32 token ids, T >= 1.
        loss_mask: [T] bool, True where the token is in the loss. The first entry is False.
        columns: [T] float32 arrays by name, such as ``advantages``. The loss reads them where ``loss_mask`` is True.
            Token columns of a group may be [T, …] of any numeric dtype.
        mini_batch: Index of the optimizer update that trains on this sequence, from 0.
        trajectory: Key of the trajectory that this sequence is a branch of (a path through the turns); by default a new
            trajectory.
        token_rewards: [T] float32, the reward of each turn in ``turns`` at the turn's last token, 0 elsewhere; None
            without such rewards. The trajectory's reward includes the rewards of its turns.
        turns: The sampled turns that this sequence trains on, in order, including turns that ``mask_truncated`` leaves
            out of the loss. Empty outside RL.
        images: The images in the sequence; None for text.
    """

    input_ids: np.ndarray
    loss_mask: np.ndarray
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    mini_batch: int = 0
    trajectory: SampleKey = field(default_factory=lambda: (-1, next(_UNNAMED)))
    token_rewards: np.ndarray | None = None
    turns: tuple[TurnSpan, ...] = ()
    images: SequenceImages | None = None

    @property
    def compared(self) -> np.ndarray:
        """[T] int32: ``images.compared``, or ``input_ids`` if the sequence has no images.

        Two sequences can share their first n tokens only if the first n entries are equal.
        """
        return self.input_ids if self.images is None else self.images.compared

    def with_column(self, name: str, values: np.ndarray) -> TokenSequence:
        """Return a copy of the sequence with one more [T] float32 column, or with this column replaced."""
        return replace(self, columns={**self.columns, name: values})

    def with_tokens(self, name: str, values: np.ndarray) -> TokenSequence:
        """Return a copy of the sequence with one more column: ``values`` at the tokens in the loss and 0 elsewhere."""
        column = np.zeros(len(self.input_ids), dtype=np.float32)
        column[self.loss_mask] = values
        return self.with_column(name, column)

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
    group: TrajectoryGroup,
    *,
    samples: Sequence[int] | None = None,
    mini_batch: int = 0,
    mask_truncated: bool = False,
    all_columns: bool = False,
    version: int | None = None,
) -> list[TokenSequence]:
    """Return one sequence per branch of a prompt group's trajectories. A branch is a path through the turns.

    Each sampled turn is in the loss of exactly one branch. Prompts and tokens from an environment are not in the loss.

    Args:
        group: The prompt group.
        samples: Indices of the trajectories; None means all.
        mini_batch: Index of the optimizer update that trains on the sequences.
        mask_truncated: Leave a trajectory out of the loss if its last branch reached the length limit.
        all_columns: Add all token columns of the group, not only ``behavior_logprobs``.
        version: The learner's policy version. The sequences get the column ``is_fresh``: 1 at tokens that this version
            sampled, else 0. With None, they do not get this column.
    """
    branches = branches_of(group, range(group.num_trajectories) if samples is None else samples)
    if not branches:
        return []
    is_cut = {branch.trajectory: mask_truncated and group.is_truncated(branch) for branch in branches}
    own = {name: group.along_each(branches, name) for name in (group.token_columns if all_columns else ())}
    if version is not None:
        versions = group.along_each(branches, "versions")
        own["is_fresh"] = [(each == version).astype(np.float32) for each in versions]
    columns = [group.along_each(branches, "token_ids"), group.along_each(branches, "logprobs")]
    seen: Sequence[SequenceImages | None] = [None] * len(branches)
    if group.images is not None:
        rows, positions = (group.along_each(branches, name) for name in (IMAGE_ROWS, POSITIONS))
        seen = SequenceImages.of(group.images, columns[0], rows, positions)
    return [
        TokenSequence(
            input_ids=token_ids,
            loss_mask=np.zeros_like(mask) if is_cut[branch.trajectory] else mask,
            columns={**{name: parts[index] for name, parts in own.items()}, "behavior_logprobs": logprobs},
            mini_batch=mini_batch,
            trajectory=(group.group_id, branch.trajectory),
            token_rewards=group.rewards_along(branch),
            turns=tuple(_turn_spans(group, branch)),
            images=seen[index],
        )
        for index, (branch, token_ids, logprobs, mask) in enumerate(
            zip(branches, *columns, group.trained_masks(branches), strict=True)
        )
    ]


def _turn_spans(group: TrajectoryGroup, branch: Branch) -> Iterator[TurnSpan]:
    lengths, stop = group.turns["num_tokens"], 0
    for turn in branch.turns:
        start, stop = stop, stop + int(lengths[turn])
        if turn in branch.trained:
            yield TurnSpan(turn, group.previous_turns[turn], start, stop, group.earned[turn])


def branches_of(group: TrajectoryGroup, samples: Sequence[int]) -> list[Branch]:
    """Return the branches (paths through the turns) of some trajectories, one trajectory after the other.

    ``samples`` are the trajectories' indices in the group.
    """
    by_trajectory: dict[int, list[Branch]] = {}
    for branch in group.branches:
        by_trajectory.setdefault(branch.trajectory, []).append(branch)
    return [branch for sample in samples for branch in by_trajectory[sample]]
