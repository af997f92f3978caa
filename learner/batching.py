"""Divides samples among mini-batches and data-parallel ranks, and sequences among micro-batches.

This module does not import torch.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from asyncrl.core.types import GroupSummary, Plan

from .config import AlgorithmConfig
from .types import GroupShare, RankBatch, TokenSequence

BALANCED = 1.02
"""Prompt groups are split into samples until the most expensive part costs at most this many times the mean cost of a
part. The parts are the mini-batches, or the ranks' shares of a mini-batch."""

QUADRATIC_TOKENS = 32_768
"""Sequence length, in tokens, at which attention is assumed to cost as much as the rest of the model. This is about 8
times the hidden size; the value is for a hidden size of 4,096."""

MAX_ATTENDED = 8
"""In a micro-batch, attention may read at most this many times the token budget. Attention reads a shared prompt once
per sequence, but the budget counts the prompt once."""

_HALVINGS = 6


def karmarkar_karp(sizes: Sequence[float], num_parts: int) -> list[list[int]]:
    """Divide items into parts of similar total size (largest differencing method, Karmarkar and Karp 1982).

    Args:
        sizes: Size of each item, >= 0.
        num_parts: Number of parts, >= 1.

    Returns:
        One list of indices into ``sizes`` per part, the largest part first. Each list is ascending and may be empty.
        Example: sizes 8, 7, 6, 5, 4 in two parts give parts of 16 and 14.
    """
    # A heap entry is a tuple: negated spread of a partition, number to break ties, the partition's non-empty parts.
    # The spread of a partition is the size of its largest part minus the size of its smallest part.
    # heapq pops the smallest entry, which is the partition with the largest spread.
    heap = [(-size, index, [(size, [index])]) for index, size in enumerate(sizes)]
    if num_parts == 1 or not heap:
        return [list(range(len(sizes)))] + [[] for _ in range(num_parts - 1)]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, first, left = heapq.heappop(heap)
        _, second, right = heap[0]
        parts = _joined_parts(left, right, num_parts)
        spread = parts[0][0] - (parts[-1][0] if len(parts) == num_parts else 0)
        heapq.heapreplace(heap, (-spread, min(first, second), parts))
    parts = [sorted(items) for _, items in heap[0][2]]
    return parts + [[] for _ in range(num_parts - len(parts))]


_Parts = list[tuple[float, list[int]]]


def _joined_parts(left: _Parts, right: _Parts, num_parts: int) -> _Parts:
    """Join two partitions: the largest part of ``left`` with the smallest part of ``right``, and so on.

    Each partition has ``num_parts`` parts, but ``left`` and ``right`` leave out the empty parts.
    """
    shared = max(0, len(left) + len(right) - num_parts)
    kept, rest = len(left) - shared, right[: len(right) - shared]
    pairs = zip(left[kept:], reversed(right[len(rest) :]), strict=True)
    joined = left[:kept] + rest + [(a + b, x + y) for (a, x), (b, y) in pairs]
    joined.sort(key=operator.itemgetter(0), reverse=True)
    return joined


def rank_batches(
    plan: Plan, algorithm: AlgorithmConfig, *, num_shards: int, max_lag: int, whole_groups: bool = False
) -> list[RankBatch]:
    """Divide the groups of a learner step among mini-batches, and each mini-batch among data-parallel ranks.

    Both divisions are balanced by cost. A prompt group is split only if a division into whole groups would be
    unbalanced. The mini-batches do not depend on the number of ranks. Groups with a reward that is not finite are left
    out.

    Args:
        plan: The groups that the step trains on.
        algorithm: Options of the algorithm.
        num_shards: Number of data-parallel ranks.
        max_lag: Staleness bound in learner steps.
        whole_groups: Never split a prompt group.

    Returns:
        One batch per data-parallel rank. Some batches are empty if there are fewer samples than ranks.
    """
    rewards = [plan_rewards(group, algorithm) for group in plan.groups]
    costs = [group_cost(group) for group in plan.groups]
    everything = [
        (index, tuple(range(len(samples)))) for index, (_, samples) in enumerate(costs) if plan.groups[index].is_scored
    ]
    shares: list[list[GroupShare]] = [[] for _ in range(num_shards)]
    loads = [0.0] * num_shards
    for mini_batch, members in enumerate(
        _balanced(everything, costs, algorithm.num_mini_batches, whole_groups=whole_groups)
    ):
        parts = _balanced(members, costs, num_shards, whole_groups=whole_groups)
        for shard, part in zip(sorted(range(num_shards), key=loads.__getitem__), parts, strict=True):
            loads[shard] += sum(costs[index].of(samples) for index, samples in part)
            shares[shard] += [
                GroupShare(
                    group_id=plan.groups[index].group_id,
                    samples=samples,
                    rewards=rewards[index][list(samples)],
                    mini_batch=mini_batch,
                    data_source=plan.groups[index].data_source,
                )
                for index, samples in part
            ]
    return [RankBatch(version=plan.version, shares=tuple(share), max_lag=max_lag) for share in shares]


class GroupCost(NamedTuple):
    """Estimated cost of a prompt group for the learner. The cost of a token in a short sequence is 1.

    Attributes:
        prompt: Cost of the prompt. Each rank that holds samples of the group has this cost once.
        samples: Cost of each sample: its tokens without the prompt, plus T² / `QUADRATIC_TOKENS` for attention. T is
            the number of tokens of the prompt and the sample.
    """

    prompt: float
    samples: list[float]

    def of(self, samples: Sequence[int]) -> float:
        """Return the cost for one rank that computes the prompt and the samples with the indices ``samples``."""
        return self.prompt + sum(self.samples[sample] for sample in samples)


def group_cost(group: GroupSummary) -> GroupCost:
    """Estimate the learner's computing cost for the prompt and for each sample of a group.

    If a sample has several branches (paths through its turns), the estimate assumes that they are equally long.
    """
    num_prompt = group.num_prompt_tokens
    tokens = group.branch_tokens or [num_prompt + length for length in group.response_lengths]
    branches = group.num_branches or [1] * len(tokens)
    return GroupCost(
        num_prompt,
        [
            max(0, count - num * num_prompt) + count**2 / (max(1, num) * QUADRATIC_TOKENS)
            for count, num in zip(tokens, branches, strict=True)
        ],
    )


_Item = tuple[int, tuple[int, ...]]
"""The index of a group in the plan, and the indices of some of the group's samples."""


def _balanced(
    items: Sequence[_Item], costs: Sequence[GroupCost], num_parts: int, *, whole_groups: bool
) -> list[list[_Item]]:
    """Divide items, which are prompt groups or some samples of a group, into ``num_parts`` lists of similar cost.

    If lists of whole items would have different costs, the most expensive items are split into single samples: an
    eighth of the items, or more if needed.
    """
    ordered = sorted(items, key=lambda item: costs[item[0]].of(item[1]), reverse=True)
    best: list[list[_Item]] = []
    lowest = float("inf")
    for num_split in (0,) if whole_groups else sorted({0, *(-(-len(items) // share) for share in (8, 4, 2, 1))}):
        single = [(index, (sample,)) for index, samples in ordered[:num_split] for sample in samples]
        pieces = single + ordered[num_split:]
        sizes = [costs[index].of(samples) for index, samples in pieces]
        parts = [_joined([pieces[place] for place in part]) for part in karmarkar_karp(sizes, num_parts)]
        loads = [sum(costs[index].of(samples) for index, samples in part) for part in parts]
        if max(loads) < lowest:
            lowest, best = max(loads), parts
        if max(loads) * num_parts <= BALANCED * sum(loads):
            break
    return best


def needs_whole_groups(advantage: str) -> bool:
    """Return whether each rank must hold whole prompt groups for the estimator called ``advantage``.

    This is True for a user's token-level estimator, which may compare the samples of a group.
    """
    if ":" not in advantage:
        return False
    from .advantages import ADVANTAGES, is_token_level

    return is_token_level(ADVANTAGES.get(advantage))


def _joined(pieces: Sequence[_Item]) -> list[_Item]:
    samples: dict[int, list[int]] = {}
    for index, some in sorted(pieces):
        samples.setdefault(index, []).extend(some)
    return [(index, tuple(sorted(some))) for index, some in samples.items()]


def plan_rewards(group: GroupSummary, algorithm: AlgorithmConfig) -> np.ndarray:
    """Return the rewards of a group's trajectories, [G] float32, with DAPO's length penalty if it is enabled."""
    rewards = np.asarray(group.rewards, dtype=np.float32)
    if not algorithm.overlong_max_tokens:
        return rewards
    limits = {"max_tokens": algorithm.overlong_max_tokens, "buffer_tokens": algorithm.overlong_buffer_tokens}
    return rewards + overlong_penalty(np.array(group.response_lengths), **limits)


def overlong_penalty(lengths: np.ndarray, *, max_tokens: int, buffer_tokens: int) -> np.ndarray:
    """Compute the soft penalty of long responses (DAPO, arXiv 2503.14476, equation 13).

    The penalty is 0 up to the length ``max_tokens - buffer_tokens``, and then falls linearly to -1 at ``max_tokens``.
    Longer responses get -1.

    Args:
        lengths: [B], in tokens.
        max_tokens: Shortest length with a penalty of -1.
        buffer_tokens: Number of tokens of the linear part; 0 means no linear part.

    Returns:
        [B] float32 in [-1, 0], to be added to the rewards. Example: ``max_tokens=10``, ``buffer_tokens=4`` and the
        lengths 6, 7, 10, 12 give 0, -0.25, -1, -1.
    """
    over = lengths.astype(np.float64) - (max_tokens - buffer_tokens)
    penalty = (over >= 0) if buffer_tokens == 0 else (over / buffer_tokens).clip(0.0, 1.0)
    return -penalty.astype(np.float32)


def split_sequences(sequences: Sequence[TokenSequence], count: int) -> list[list[TokenSequence]]:
    """Split sequences into ``count`` lists. List i has the sequences whose attribute ``mini_batch`` is i.

    Raises `ValueError` if a ``mini_batch`` is outside 0..count - 1.
    """
    parts: list[list[TokenSequence]] = [[] for _ in range(count)]
    for sequence in sequences:
        if not 0 <= sequence.mini_batch < count:
            raise ValueError(
                f"a sequence's mini_batch must be in 0..{count - 1}, got {sequence.mini_batch}; make the "
                "sequences with the same algorithm.num_mini_batches as the learner step"
            )
        parts[sequence.mini_batch].append(sequence)
    return parts


class PackItem(NamedTuple):
    """Sequences that must share a micro-batch.

    Attributes:
        prompt: Any value that identifies the prompt. Items of a micro-batch with equal prompts share the prompt's
            tokens. An item with None shares no tokens.
        num_prompt: Number of tokens of the prompt; 0 without a prompt.
        num_own: Number of the item's packed tokens without the prompt.
        num_attended: Number of tokens that attention reads. The prompt counts once for each sequence of the item.
    """

    prompt: Hashable | None
    num_prompt: int
    num_own: int
    num_attended: int


def first_fit(items: Sequence[PackItem], budget: int) -> list[list[int]]:
    """Assign items to micro-batches of at most ``budget`` packed tokens by first fit. An item is one or more sequences.

    An item goes to a micro-batch that already holds the item's prompt, if this micro-batch has room. Otherwise it goes
    to the first micro-batch with room for the prompt and the item, or to a new micro-batch. Items with equal prompts
    are assigned one after another, the largest item first. The prompt whose items have the most tokens comes first.
    Each item must fit into the budget.

    Items share a micro-batch only if attention reads at most `MAX_ATTENDED` · ``budget`` tokens there. This number is
    the sum of the items' ``num_attended``.

    Returns:
        One list per micro-batch, with the indices of its items in ``items``.
    """
    groups: dict[Hashable, list[int]] = {}
    for index, item in enumerate(items):
        groups.setdefault((index,) if item.prompt is None else item.prompt, []).append(index)
    totals = [(items[group[0]].num_prompt + sum(items[i].num_own for i in group), group) for group in groups.values()]
    bins: list[list[int]] = []
    room: list[int] = []
    attended: list[int] = []
    for _, group in sorted(totals, key=lambda total: -total[0]):
        holders: set[int] = set()
        for index in sorted(group, key=lambda i: -items[i].num_own):
            _, num_prompt, num_own, num_attended = items[index]
            readable = MAX_ATTENDED * budget - num_attended
            place = next((b for b in holders if room[b] >= num_own and attended[b] <= readable), None)
            if place is not None:
                room[place] -= num_own
            else:
                needed = num_prompt + num_own
                place = next(
                    (b for b, free in enumerate(room) if free >= needed and attended[b] <= readable), len(bins)
                )
                if place == len(bins):
                    bins.append([])
                    room.append(budget)
                    attended.append(0)
                holders.add(place)
                room[place] -= needed
            bins[place].append(index)
            attended[place] += num_attended
    return bins


def balanced_fit(items: Sequence[PackItem], budget: int, count: int) -> list[list[int]]:
    """Assign items to at most ``count`` micro-batches of similar size, each of at most ``budget`` packed tokens.

    Returns one list of indices into ``items`` per micro-batch. ``count`` must be at least the number of micro-batches
    that `first_fit` makes.
    """
    best = first_fit(items, budget)
    tokens = sum(item.num_own for item in items) + sum({item.prompt: item.num_prompt for item in items}.values())
    low, high = max([-(-tokens // count), *(item.num_prompt + item.num_own for item in items)]), budget
    for _ in range(_HALVINGS):
        middle = (low + high) // 2
        if middle >= high:
            break
        bins = first_fit(items, middle)
        if len(bins) <= count:
            best, high = bins, middle
        else:
            low = middle + 1
    return best
