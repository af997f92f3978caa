"""Advantage estimators: from the rewards of a batch to one number a trajectory. Pure, on the controller's side.

Sums run in float64: rewards of very different size in one batch keep their small differences. Rewards that are all
equal give exact zeros.
"""

from __future__ import annotations

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


@ADVANTAGES.register("reinforce_plus_plus")
def reinforce_plus_plus(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Rewards normalised over the batch (REINFORCE++, arXiv 2501.03262).

    Deviation: the KL term is no part of the reward here; see ``algorithm.kl_coef``.

    Example: rewards 3, 0, 0 give 1.155, -0.577, -0.577, whatever their prompts.
    """
    return group_advantages(rewards, torch.zeros_like(group_ids), scale=Scale.std)


@ADVANTAGES.register("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Group-centred rewards, divided by their deviation over the batch (REINFORCE++-baseline, arXiv 2501.03262).

    Example: rewards 3, 1 in one group and 0, 0 in another give 1.225, -1.225, 0, 0.
    """
    centered = _centered(rewards, *_members(group_ids))
    _need_two(torch.tensor([len(rewards)]), "REINFORCE++-baseline")
    return torch.where(centered == 0, 0.0, centered / centered.std()).to(torch.float32)


def remax(rewards: Tensor, greedy_rewards: Tensor) -> Tensor:
    """Each reward less that of the greedy response to the same prompt (ReMax, arXiv 2310.10505).

    Args:
        rewards: [B] float32.
        greedy_rewards: [B] float32, repeated over the samples of a prompt.

    Returns:
        [B] float32. Example: rewards 1, 0 with greedy rewards 1, 1 give 0, -1.
    """
    return (rewards.double() - greedy_rewards.double()).float()


def generalized_advantages(
    rewards: Tensor, values: Tensor, loss_lengths: Tensor, *, discount: float, trace: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over packed responses (GAE, arXiv 1506.02438, equation 16).

    Args:
        rewards: [M] float32, one a policy token, responses laid end to end; an outcome reward stands at its
            response's last token.
        values: [M] float32, the critic's value before each of these tokens; after the last one it is 0.
        loss_lengths: [number of responses] int64, tokens of each; they sum to M. In a multi-turn response the
            environment's tokens are left out: the value of the next policy token follows directly.
        discount: Gamma, in [0, 1].
        trace: Lambda, in [0, 1].

    Returns:
        Advantages [M] float32 and returns (advantages + values) [M] float32. Example: rewards 0, 1 and values
        0.5, 0.6 with gamma 1 and lambda 0.5 give advantages 0.3, 0.4.
    """
    advantages = torch.zeros(len(rewards), dtype=torch.float64)
    end = len(rewards)
    for length in reversed(loss_lengths.tolist()):
        following_value = following = 0.0
        for token in range(end - 1, end - length - 1, -1):
            value = float(values[token])
            following = float(rewards[token]) + discount * following_value - value + discount * trace * following
            advantages[token], following_value = following, value
        end -= length
    return advantages.float(), (advantages + values.double()).float()


def overlong_penalty(lengths: Tensor, *, max_tokens: int, buffer_tokens: int) -> Tensor:
    """Soft penalty of long responses (DAPO, arXiv 2503.14476, equation 13).

    Args:
        lengths: [B] response lengths in tokens.
        max_tokens: Length from which the penalty is 1.
        buffer_tokens: Tokens before it over which the penalty grows from 0, linearly; 0 makes it a step.

    Returns:
        [B] float32 in [-1, 0], to be added to the rewards. Example: with 10 and 4, lengths 6, 7, 10, 12 give
        0, -0.25, -1, -1.
    """
    over = lengths.double() - (max_tokens - buffer_tokens)
    if buffer_tokens == 0:
        return -(over >= 0).float()
    return -(over / buffer_tokens).clamp(0.0, 1.0).float()


def plan_advantages(
    plan: Plan, estimator: AdvantageEstimator, *, overlong_max_tokens: int = 0, overlong_buffer_tokens: int = 0
) -> list[np.ndarray]:
    """Advantages of a planned batch.

    Args:
        plan: Its groups carry the rewards and the response lengths.
        estimator: See `ADVANTAGES`.
        overlong_max_tokens: See `overlong_penalty`; 0 has no penalty.
        overlong_buffer_tokens: See `overlong_penalty`.

    Returns:
        One [G] float32 array a group, in the plan's order.
    """
    sizes = [len(group.rewards) for group in plan.groups]
    rewards = torch.tensor([reward for group in plan.groups for reward in group.rewards], dtype=torch.float32)
    if overlong_max_tokens:
        lengths = torch.tensor([length for group in plan.groups for length in group.response_lengths])
        rewards += overlong_penalty(lengths, max_tokens=overlong_max_tokens, buffer_tokens=overlong_buffer_tokens)
    group_ids = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes, dtype=torch.int64))
    return np.split(estimator(rewards, group_ids).numpy(), np.cumsum(sizes)[:-1])


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
