"""Makes trajectory groups for tests, from flat responses with a mask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from asyncrl.core.trajectory import Trajectory, TrajectoryGroup, Turn
from asyncrl.core.types import FinishReason


def make_group(
    *,
    group_id: int,
    attempt: int,
    prompt_ids: np.ndarray,
    response_ids: np.ndarray,
    response_lengths: np.ndarray,
    logprobs: np.ndarray,
    versions: np.ndarray,
    rewards: np.ndarray,
    finish_reasons: Sequence[FinishReason],
    response_mask: np.ndarray | None = None,
) -> TrajectoryGroup:
    """Make a group of G samples of one prompt. Each sample is a chain of turns.

    ``response_ids`` has all responses one after the other. A new turn begins where ``response_mask`` changes.
    """
    mask = np.ones(len(response_ids), dtype=bool) if response_mask is None else response_mask
    trajectories, start = [], 0
    for length, reward, reason in zip(response_lengths.tolist(), rewards.tolist(), finish_reasons, strict=True):
        turns = [Turn.given(prompt_ids)]
        for begin, end in runs(mask[start : start + length]):
            span = slice(start + begin, start + end)
            if not mask[span.start]:
                turns.append(Turn.given(response_ids[span], parent=len(turns) - 1))
                continue
            turns.append(
                Turn(
                    token_ids=response_ids[span],
                    parent=len(turns) - 1,
                    sampled=True,
                    logprobs=logprobs[span],
                    versions=versions[span],
                    finish_reason=reason if end == length else FinishReason.stop,
                )
            )
        trajectories.append(Trajectory(turns=tuple(turns), reward=reward))
        start += length
    return TrajectoryGroup.from_trajectories(trajectories, group_id=group_id, attempt=attempt)


def sampled_turn(
    rng: np.random.Generator, length: int, parent: int, *, vocabulary: int, version: int = 0, **fields: Any
) -> Turn:
    """Return a sampled turn of random tokens. ``fields`` are further fields of `Turn`."""
    return Turn(
        token_ids=rng.integers(0, vocabulary, length).astype(np.int32),
        parent=parent,
        sampled=True,
        logprobs=-rng.uniform(1.0, 4.0, length).astype(np.float32),
        versions=np.full(length, version, dtype=np.int32),
        **{"finish_reason": FinishReason.stop, **fields},
    )


def runs(mask: np.ndarray) -> list[tuple[int, int]]:
    """Return a pair for each series of equal values in ``mask``: its start and its end."""
    edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(mask)]
    return [(begin, end) for begin, end in pairwise(edges) if end > begin]


def assert_by_context(group: TrajectoryGroup, next_token: Callable[[list[int]], int]) -> int:
    """Check that every sampled token equals ``next_token(path)`` for the tokens ``path`` before it.

    Returns the number of sampled tokens.
    """
    num_checked = 0
    for branch in group.branches:
        ids, mask = group.along(branch, "token_ids").tolist(), group.trained_mask(branch)
        for place in np.flatnonzero(mask).tolist():
            assert ids[place] == next_token(ids[:place])
            num_checked += 1
    return num_checked
