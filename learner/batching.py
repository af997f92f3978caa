"""Who trains on what: prompt groups over data-parallel ranks, sequences over micro-batches. Pure arithmetic."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from asyncrl.protocol.types import GroupSummary, Plan

from .types import RankBatch, TokenSequence


def karmarkar_karp(sizes: Sequence[int], num_parts: int) -> list[list[int]]:
    """Partition items so that the largest part is small (largest differencing method, Karmarkar and Karp 1982).

    Args:
        sizes: Size of every item, >= 0.
        num_parts: Number of parts, >= 1; parts may stay empty.

    Returns:
        ``num_parts`` lists of item indices, each ascending, largest part first. Example: sizes 8, 7, 6, 5, 4 in two
        parts give parts of 16 and 14.
    """
    if num_parts == 1:
        return [list(range(len(sizes)))]
    heap = [_singleton(index, size, num_parts) for index, size in enumerate(sizes)]
    if not heap:
        return [[] for _ in range(num_parts)]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, first, left = heapq.heappop(heap)
        _, second, right = heapq.heappop(heap)
        heapq.heappush(heap, _difference(min(first, second), left, right))
    return [sorted(items) for _, items in heap[0][2]]


_Parts = list[tuple[int, list[int]]]


def _singleton(index: int, size: int, num_parts: int) -> tuple[int, int, _Parts]:
    """A partition of one item: its spread (negated for the heap), a tie-break and the parts, largest first."""
    return -size, index, [(size, [index]), *((0, []) for _ in range(num_parts - 1))]


def _difference(tie_break: int, left: _Parts, right: _Parts) -> tuple[int, int, _Parts]:
    """Join two partitions: the largest part of one with the smallest of the other."""
    joined = [(a + b, x + y) for (a, x), (b, y) in zip(left, reversed(right), strict=True)]
    joined.sort(key=lambda part: -part[0])
    return joined[-1][0] - joined[0][0], tie_break, joined


def group_tokens(group: GroupSummary) -> int:
    """Tokens that the learner computes on for a group: the prompt once a sample, and the responses."""
    return group.num_prompt_tokens * len(group.response_lengths) + sum(group.response_lengths)


def split_plan(
    plan: Plan,
    *,
    rewards: Sequence[np.ndarray],
    advantages: Sequence[np.ndarray] | None,
    num_shards: int,
    num_mini_batches: int,
    max_lag: int,
) -> list[RankBatch]:
    """Share a planned batch out: its groups over mini-batches, then each mini-batch over data-parallel ranks.

    Both are balanced by tokens. Which groups an optimizer update trains on follows from the plan alone, so the weights
    after the step do not depend on the number of ranks.

    Args:
        plan: The batch of one learner step.
        rewards: One [G] float32 array a group, in the order of ``plan.groups``.
        advantages: One [G] float32 array a group, in the same order; None where the ranks compute them.
        num_shards: Data-parallel ranks.
        num_mini_batches: Optimizer updates of the step.
        max_lag: Staleness bound in learner steps.

    Returns:
        One batch a data-parallel rank; some are empty when there are fewer groups than ranks.
    """
    sizes = [group_tokens(group) for group in plan.groups]
    shares: list[list[tuple[int, int]]] = [[] for _ in range(num_shards)]
    for mini_batch, members in enumerate(karmarkar_karp(sizes, num_mini_batches)):
        parts = karmarkar_karp([sizes[index] for index in members], num_shards)
        # The largest part goes to the rank with the least so far.
        loads = [sum(sizes[index] for index, _ in share) for share in shares]
        for shard, part in zip(sorted(range(num_shards), key=loads.__getitem__), parts, strict=True):
            shares[shard] += [(members[place], mini_batch) for place in part]
    return [
        RankBatch(
            version=plan.version,
            group_ids=tuple(plan.groups[index].group_id for index, _ in share),
            rewards=tuple(rewards[index] for index, _ in share),
            advantages=None if advantages is None else tuple(advantages[index] for index, _ in share),
            mini_batches=tuple(mini_batch for _, mini_batch in share),
            max_lag=max_lag,
        )
        for share in shares
    ]


def split_sequences(sequences: Sequence[TokenSequence], count: int) -> list[list[TokenSequence]]:
    """Sort a rank's sequences by the optimizer update that trains on them; some updates may have none here.

    Raises:
        ValueError: a sequence's ``mini_batch`` is outside 0..count - 1.
    """
    parts: list[list[TokenSequence]] = [[] for _ in range(count)]
    for sequence in sequences:
        if not 0 <= sequence.mini_batch < count:
            raise ValueError(
                f"a sequence's mini_batch must be in 0..{count - 1}, got {sequence.mini_batch}; split the plan with "
                "algorithm.num_mini_batches"
            )
        parts[sequence.mini_batch].append(sequence)
    return parts


def num_bins(lengths: Sequence[int], budget: int) -> int:
    """Micro-batches that sequences of ``lengths`` tokens need under a budget, by first fit decreasing."""
    return int(sum(lengths) > 0) if sum(lengths) <= budget else len(_first_fit_decreasing(lengths, budget))


def bin_lengths(lengths: Sequence[int], budget: int, count: int) -> list[list[int]]:
    """Fill ``count`` micro-batches with sequences, balanced, none over the budget.

    Args:
        lengths: Tokens of every sequence; none above ``budget``.
        budget: Most tokens of a micro-batch.
        count: Number of micro-batches, at least `num_bins`; some may stay empty.

    Returns:
        ``count`` lists of sequence indices.
    """
    balanced = karmarkar_karp(lengths, count)
    if all(sum(lengths[index] for index in part) <= budget for part in balanced):
        return balanced
    filled = _first_fit_decreasing(lengths, budget)
    return filled + [[] for _ in range(count - len(filled))]


def _first_fit_decreasing(lengths: Sequence[int], budget: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = next((b for b, free in enumerate(room) if free >= lengths[index]), None)
        if place is None:
            bins.append([])
            room.append(budget)
            place = len(bins) - 1
        bins[place].append(index)
        room[place] -= lengths[index]
    return bins
