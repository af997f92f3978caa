"""Who trains on what: samples over mini-batches and data-parallel ranks, sequences over micro-batches.

Pure arithmetic on metadata; loads no torch.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Sequence

import numpy as np

from asyncrl.core.types import GroupSummary, Plan

from .config import AlgorithmConfig
from .types import GroupShare, RankBatch, TokenSequence

BALANCED = 1.02
"""Largest ÷ mean cost of the parts of a batch up to which no further group is split: a split group is fetched twice."""

QUADRATIC_TOKENS = 32_768
"""Length at which attention costs as much as all else: near 8 hidden sizes, of a model with 4,096."""


def karmarkar_karp(sizes: Sequence[float], num_parts: int) -> list[list[int]]:
    """Partition items so that the largest part is small (largest differencing method, Karmarkar and Karp 1982).

    Returns ``num_parts`` (>= 1) lists of indices into ``sizes`` (each >= 0), each ascending, largest part first; some
    may be empty. Example: sizes 8, 7, 6, 5, 4 in two parts give parts of 16 and 14.
    """
    # A partition: its spread (negated for the heap), a tie-break, and its parts without the empty ones, largest first.
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
    """Join two partitions: the largest part of one with the smallest of the other; what is not there is empty."""
    shared = max(0, len(left) + len(right) - num_parts)
    kept, rest = len(left) - shared, right[: len(right) - shared]
    pairs = zip(left[kept:], reversed(right[len(rest) :]), strict=True)
    joined = left[:kept] + rest + [(a + b, x + y) for (a, x), (b, y) in pairs]
    joined.sort(key=operator.itemgetter(0), reverse=True)
    return joined


def rank_batches(
    plan: Plan, algorithm: AlgorithmConfig, *, num_shards: int, max_lag: int, whole_groups: bool = False
) -> list[RankBatch]:
    """Share a planned batch out: its samples over mini-batches, then each mini-batch over data-parallel ranks.

    Both are balanced by cost; a prompt group is split only where whole groups are not balanced, and never under
    ``whole_groups`` (see `needs_whole_groups`). Advantages do not depend on who holds a sample,
    since the ranks compute them together. Which samples an optimizer update trains on follows from the plan alone, so
    the weights after the step do not depend on the number of ranks. A group without finite rewards is left out. Each of
    the ``num_shards`` batches has the bound
    ``max_lag`` in learner steps; some are empty when there are fewer samples than ranks.
    """
    rewards = [plan_rewards(group, algorithm) for group in plan.groups]
    costs = [sample_costs(group) for group in plan.groups]
    everything = [
        (index, tuple(range(len(samples)))) for index, samples in enumerate(costs) if plan.groups[index].is_scored
    ]
    shares: list[list[GroupShare]] = [[] for _ in range(num_shards)]
    loads = [0.0] * num_shards
    for mini_batch, members in enumerate(
        _balanced(everything, costs, algorithm.num_mini_batches, whole_groups=whole_groups)
    ):
        parts = _balanced(members, costs, num_shards, whole_groups=whole_groups)
        # The largest part goes to the rank with the least so far.
        for shard, part in zip(sorted(range(num_shards), key=loads.__getitem__), parts, strict=True):
            loads[shard] += sum(_cost(item, costs) for item in part)
            shares[shard] += [
                GroupShare(
                    group_id=plan.groups[index].group_id,
                    samples=samples,
                    rewards=rewards[index][list(samples)],
                    mini_batch=mini_batch,
                )
                for index, samples in part
            ]
    return [RankBatch(version=plan.version, shares=tuple(share), max_lag=max_lag) for share in shares]


def sample_costs(group: GroupSummary) -> list[float]:
    """What each sample of a group costs the learner: T + T² ÷ `QUADRATIC_TOKENS` for T tokens, prompt included.

    The branches of a sample cost as much each, taken as equally long.
    """
    tokens = group.branch_tokens or [group.num_prompt_tokens + length for length in group.response_lengths]
    branches = group.num_branches or [1] * len(tokens)
    return [count + count**2 / (max(1, num) * QUADRATIC_TOKENS) for count, num in zip(tokens, branches, strict=True)]


_Item = tuple[int, tuple[int, ...]]
"""A group by its index in the plan, and some of its samples."""


def _cost(item: _Item, costs: Sequence[Sequence[float]]) -> float:
    return sum(costs[item[0]][sample] for sample in item[1])


def _balanced(
    items: Sequence[_Item], costs: Sequence[Sequence[float]], num_parts: int, *, whole_groups: bool
) -> list[list[_Item]]:
    """Partition groups, or parts of groups; the costliest are split into samples, no more of them than it takes."""
    ordered = sorted(items, key=lambda item: -_cost(item, costs))
    best: list[list[_Item]] = []
    lowest = float("inf")
    for num_split in (0,) if whole_groups else sorted({0, *(-(-len(items) // share) for share in (8, 4, 2, 1))}):
        single = [(index, (sample,)) for index, samples in ordered[:num_split] for sample in samples]
        pieces = single + ordered[num_split:]
        sizes = [_cost(piece, costs) for piece in pieces]
        parts = karmarkar_karp(sizes, num_parts)
        largest = max(sum(sizes[place] for place in part) for part in parts)
        if largest < lowest:
            lowest, best = largest, [_joined([pieces[place] for place in part]) for part in parts]
        if lowest * num_parts <= BALANCED * sum(sizes):
            break
    return best


def needs_whole_groups(advantage: str) -> bool:
    """Whether each rank must hold whole prompt groups: a token estimator of one's own may compare their samples.

    Ours do not; outcome estimators are given the whole batch on every rank. Loads torch for one's own alone.
    """
    if ":" not in advantage:
        return False
    from .advantages import ADVANTAGES, is_token_level

    return is_token_level(ADVANTAGES.get(advantage))


def _joined(pieces: Sequence[_Item]) -> list[_Item]:
    """Samples of the same group as one item, groups in the order of the plan."""
    samples: dict[int, list[int]] = {}
    for index, some in sorted(pieces):
        samples.setdefault(index, []).extend(some)
    return [(index, tuple(sorted(some))) for index, some in samples.items()]


def plan_rewards(group: GroupSummary, algorithm: AlgorithmConfig) -> np.ndarray:
    """The rewards of a group as [G] float32, with DAPO's length penalty where it is on."""
    rewards = np.asarray(group.rewards, dtype=np.float32)
    if not algorithm.overlong_max_tokens:
        return rewards
    limits = {"max_tokens": algorithm.overlong_max_tokens, "buffer_tokens": algorithm.overlong_buffer_tokens}
    return rewards + overlong_penalty(np.array(group.response_lengths), **limits)


def overlong_penalty(lengths: np.ndarray, *, max_tokens: int, buffer_tokens: int) -> np.ndarray:
    """Soft penalty of long responses (DAPO, arXiv 2503.14476, equation 13).

    The penalty of the [B] ``lengths``, in tokens, is 1 from ``max_tokens`` on. It grows from 0, linearly, over the
    ``buffer_tokens`` before it; 0 makes it a step. Returns [B] float32 in [-1, 0], to be added to the rewards. Example:
    with 10 and 4, lengths 6, 7, 10, 12 give 0, -0.25, -1, -1.
    """
    over = lengths.astype(np.float64) - (max_tokens - buffer_tokens)
    penalty = (over >= 0) if buffer_tokens == 0 else (over / buffer_tokens).clip(0.0, 1.0)
    return -penalty.astype(np.float32)


def split_sequences(sequences: Sequence[TokenSequence], count: int) -> list[list[TokenSequence]]:
    """Sort sequences by the update that trains on them, maybe none; `ValueError` for one outside 0..count - 1."""
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
    """Fill ``count`` micro-batches, at least `num_bins`, with sequences: balanced, and none over the budget.

    Returns lists of indices into ``lengths``, which are in tokens and none above ``budget``; some may stay empty.
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
