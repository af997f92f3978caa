"""Advantage estimators: from the rewards of a batch to one number a trajectory. Pure.

Sums run in float64: rewards of very different size in one batch keep their small differences. Rewards that are all
equal give exact zeros.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch
from torch import Tensor

from .registry import ADVANTAGES

if TYPE_CHECKING:
    from .token_advantages import TokenEstimator


class Scale(StrEnum):
    """What a centred reward is divided by."""

    std = "std"
    none = "none"


class OutcomeEstimator(Protocol):
    """Turns the rewards of a whole batch into advantages, one a trajectory."""

    def __call__(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        """[B] float32 rewards and [B] int64 group ids to [B] float32 advantages."""
        ...


AdvantageEstimator: TypeAlias = "OutcomeEstimator | TokenEstimator"
"""What ``algorithm.advantage`` names."""


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
    group, counts = _members(group_ids)
    centered = _centered(rewards, group, counts)
    if scale is Scale.none:
        return centered.to(torch.float32)
    _need_two(counts, "GRPO with std")
    variance = _sums(centered.square(), group, len(counts)) / (counts - 1)
    deviation = variance.sqrt()[group]
    return torch.where(centered == 0, 0.0, centered / deviation).to(torch.float32)


@ADVANTAGES.register("grpo")
def grpo(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Group-normalised rewards, see `group_advantages`."""
    return group_advantages(rewards, group_ids, scale=Scale.std)


@ADVANTAGES.register("grpo_no_std")
def grpo_no_std(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Group-centred rewards, not divided by their deviation, see `group_advantages`."""
    return group_advantages(rewards, group_ids, scale=Scale.none)


ADVANTAGES.register("dr_grpo")(grpo_no_std)
"""Dr. GRPO's advantage (arXiv 2503.20783, section 3.2); its loss is aggregated by ``sequence_sum_norm``."""


@ADVANTAGES.register("rloo")
def rloo(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Each reward less the mean of the others in its group (RLOO, arXiv 2402.14740).

    Example: rewards 3, 0, 0 in one group give 3, -1.5, -1.5.
    """
    group, counts = _members(group_ids)
    _need_two(counts, "RLOO")
    return (_centered(rewards, group, counts) * (counts / (counts - 1))[group]).to(torch.float32)


@ADVANTAGES.register("leave_one_out_batch")
def leave_one_out_batch(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Each reward less the mean of all others in the batch, whatever their prompt.

    Example: rewards 3, 0, 0 give 3, -1.5, -1.5, also when each is of a prompt of its own.
    """
    return rloo(rewards, torch.zeros_like(group_ids))


@ADVANTAGES.register("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Group-centred rewards, divided by their deviation over the batch (REINFORCE++-baseline, arXiv 2501.03262).

    The deviation is over trajectories; verl's is over tokens, where a long trajectory counts more.

    Example: rewards 3, 1 in one group and 0, 0 in another give 1.225, -1.225, 0, 0.
    """
    centered = _centered(rewards, *_members(group_ids))
    _need_two(torch.tensor([len(rewards)]), "REINFORCE++-baseline")
    return torch.where(centered == 0, 0.0, centered / centered.std()).to(torch.float32)


@ADVANTAGES.register("remax")
def remax(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Each reward less that of the greedy response to the same prompt (ReMax, arXiv 2310.10505, equation 6).

    Args:
        rewards: [B] float32; the last trajectory of each group is the greedy one.
        group_ids: [B] int64.

    Returns:
        [B] float32, 0 for the greedy ones, which are not trained on. Example: rewards 1, 0 and greedy 1 give
        0, -1, 0.
    """
    group, counts = _members(group_ids)
    last = torch.zeros(len(counts), dtype=torch.int64)
    last.scatter_reduce_(0, group, torch.arange(len(group)), "amax", include_self=False)
    return (rewards.double() - rewards.double()[last[group]]).float()


def _members(group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """[B] index of each trajectory's group, and the groups' sizes."""
    _, group, counts = torch.unique(group_ids, return_inverse=True, return_counts=True)
    return group, counts


def _sums(values: Tensor, group: Tensor, num_groups: int) -> Tensor:
    return torch.zeros(num_groups, dtype=torch.float64).index_add_(0, group, values)


def _centered(rewards: Tensor, group: Tensor, counts: Tensor) -> Tensor:
    """[B] float64, less the group's mean; exactly 0 where the whole group is equal."""
    values = rewards.to(torch.float64)
    centered = values - (_sums(values, group, len(counts)) / counts)[group]
    highest, lowest = (
        torch.zeros(len(counts), dtype=torch.float64).scatter_reduce_(0, group, values, reduce, include_self=False)
        for reduce in ("amax", "amin")
    )
    return centered.masked_fill((highest == lowest)[group], 0.0)


def _need_two(counts: Tensor, name: str) -> None:
    if len(counts) and int(counts.min()) < 2:
        raise ValueError(f"{name} needs at least 2 samples to compare, got 1; raise algorithm.samples_per_prompt")
