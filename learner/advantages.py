"""Advantage estimators: from the rewards of a batch to one number a trajectory. Pure, on the controller's side."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from asyncrl.protocol.types import Plan

from .registry import Registry


class Scale(StrEnum):
    """What a centred reward is divided by."""

    std = "std"
    none = "none"


class AdvantageEstimator(Protocol):
    """Turns the rewards of a whole batch into advantages."""

    def __call__(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        """[B] float32 rewards and [B] int64 group ids to [B] float32 advantages."""
        ...


ADVANTAGES: Registry[AdvantageEstimator] = Registry("algorithm.advantage")


def group_advantages(rewards: Tensor, group_ids: Tensor, *, scale: Scale) -> Tensor:
    """Center each reward on its prompt group (GRPO, arXiv 2402.03300, section 4.1.2).

    Args:
        rewards: [B] float32, one scalar a trajectory.
        group_ids: [B] int64; equal ids form a group, in any order.
        scale: ``std`` divides by the group's sample standard deviation (n - 1), with nothing added to it; ``none``
            leaves the difference (Dr. GRPO, arXiv 2503.20783).

    Returns:
        [B] float32. A group of equal rewards gives exact zeros. Example: rewards 1, 0, 0, 1 in one group with
        ``std`` give 0.866, -0.866, -0.866, 0.866.

    Raises:
        ValueError: a group has one member and ``scale`` is ``std``.
    """
    _, group, counts = torch.unique(group_ids, return_inverse=True, return_counts=True)
    if scale is Scale.std and len(counts) and int(counts.min()) < 2:
        raise ValueError("GRPO with std needs at least 2 samples a prompt, got 1; raise algorithm.samples_per_prompt")
    values = rewards.to(torch.float64)
    mean = torch.zeros(len(counts), dtype=torch.float64).index_add_(0, group, values) / counts
    centered = values - mean[group]
    highest = torch.zeros_like(mean).scatter_reduce_(0, group, values, "amax", include_self=False)
    lowest = torch.zeros_like(mean).scatter_reduce_(0, group, values, "amin", include_self=False)
    flat = (highest == lowest)[group]
    if scale is Scale.std:
        variance = torch.zeros_like(mean).index_add_(0, group, centered.square()) / (counts - 1)
        centered = centered / variance.sqrt()[group]
    return centered.masked_fill(flat, 0.0).to(torch.float32)


@ADVANTAGES.register("grpo")
def grpo(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Group-normalised rewards, see `group_advantages`."""
    return group_advantages(rewards, group_ids, scale=Scale.std)


@ADVANTAGES.register("grpo_no_std")
def grpo_no_std(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Group-centred rewards, not divided by their deviation (Dr. GRPO, arXiv 2503.20783, section 3.2)."""
    return group_advantages(rewards, group_ids, scale=Scale.none)


def plan_advantages(plan: Plan, estimator: AdvantageEstimator) -> list[np.ndarray]:
    """Advantages of a planned batch.

    Args:
        plan: Its groups carry the rewards.
        estimator: See `ADVANTAGES`.

    Returns:
        One [G] float32 array a group, in the plan's order.
    """
    sizes = [len(group.rewards) for group in plan.groups]
    rewards = torch.tensor([reward for group in plan.groups for reward in group.rewards], dtype=torch.float32)
    group_ids = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes, dtype=torch.int64))
    return _split(estimator(rewards, group_ids).numpy(), sizes)


def _split(values: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
    return np.split(values, np.cumsum(sizes)[:-1])
