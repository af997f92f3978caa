"""What a planned batch becomes before it goes to the ranks: shaped rewards, advantages where these suffice, shares.

Pure, on the controller's side: it sees metadata only.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from asyncrl.protocol.types import Plan

from .batching import split_plan
from .config import AlgorithmConfig
from .registry import ADVANTAGES
from .token_advantages import is_token_level
from .types import RankBatch


def rank_batches(plan: Plan, algorithm: AlgorithmConfig, *, num_shards: int, max_lag: int) -> list[RankBatch]:
    """One batch a data-parallel rank.

    Args:
        plan: The batch of one learner step.
        algorithm: What is optimised.
        num_shards: Data-parallel ranks.
        max_lag: Staleness bound in learner steps.
    """
    rewards = plan_rewards(plan, algorithm)
    return split_plan(
        plan,
        rewards=rewards,
        advantages=None if credited_on_ranks(algorithm) else plan_advantages(rewards, algorithm),
        num_shards=num_shards,
        num_mini_batches=algorithm.num_mini_batches,
        max_lag=max_lag,
    )


def credited_on_ranks(algorithm: AlgorithmConfig) -> bool:
    """Whether advantages take tokens, which only the ranks have: a critic's values, or a KL penalty in the rewards."""
    return algorithm.kl_reward_coef > 0 or is_token_level(ADVANTAGES.get(algorithm.advantage))


def plan_rewards(plan: Plan, algorithm: AlgorithmConfig) -> list[np.ndarray]:
    """The rewards of each group as [G] float32, with DAPO's length penalty where it is on."""
    if not algorithm.overlong_max_tokens:
        return [np.asarray(group.rewards, dtype=np.float32) for group in plan.groups]
    limits = {"max_tokens": algorithm.overlong_max_tokens, "buffer_tokens": algorithm.overlong_buffer_tokens}
    return [
        np.asarray(group.rewards, dtype=np.float32)
        + overlong_penalty(torch.tensor(group.response_lengths), **limits).numpy()
        for group in plan.groups
    ]


def plan_advantages(rewards: list[np.ndarray], algorithm: AlgorithmConfig) -> list[np.ndarray]:
    """Outcome advantages of a batch.

    Args:
        rewards: One [G] float32 array a group.
        algorithm: Its ``advantage`` is an outcome estimator.

    Returns:
        One [G] float32 array a group, in the same order.
    """
    estimator = ADVANTAGES.get(algorithm.advantage)
    assert not is_token_level(estimator), algorithm.advantage
    sizes = [len(group) for group in rewards]
    group_ids = torch.from_numpy(np.repeat(np.arange(len(rewards)), sizes))
    advantages = estimator(torch.from_numpy(np.concatenate(rewards)), group_ids)
    return np.split(advantages.numpy(), np.cumsum(sizes)[:-1])


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
