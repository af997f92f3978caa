"""Advantages of single tokens: estimators that need each token's own reward, or a critic's value of it. Pure.

Letters: B trajectories, M policy tokens of all of them, laid end to end. An environment's tokens are not among the M:
in a multi-turn trajectory the next policy token follows directly, however much was observed in between.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import TypeIs

from .advantages import OutcomeEstimator
from .config import AlgorithmConfig
from .registry import ADVANTAGES

SumOverRanks = Callable[[Tensor], Tensor]
"""Adds a float64 tensor up over the data-parallel ranks; the identity where one rank holds the batch."""


@dataclass(frozen=True, kw_only=True)
class TokenRewards:
    """This rank's trajectories, as an estimator sees them.

    Attributes:
        rewards: [M] float64, a reward a token; an outcome reward stands at its trajectory's last policy token.
        lengths: [B] int64, policy tokens of each trajectory; they sum to M. May be 0.
        group_ids: [B] int64, prompt group of each trajectory.
        values: [M] float64, the critic's value before each token; zeros without a critic (``algorithm.critic``).
    """

    rewards: Tensor
    lengths: Tensor
    group_ids: Tensor
    values: Tensor


@dataclass(frozen=True, kw_only=True)
class TokenAdvantages:
    """What an estimator gives back.

    Attributes:
        advantages: [M] float64.
        returns: [M] float64, what a critic learns to predict.
    """

    advantages: Tensor
    returns: Tensor


class TokenEstimator(Protocol):
    """Turns token rewards into token advantages. A collective where it sums over ranks."""

    def __call__(self, batch: TokenRewards, config: AlgorithmConfig, total: SumOverRanks) -> TokenAdvantages:
        """See `TokenRewards`, `TokenAdvantages` and `SumOverRanks`."""
        ...


def token_level(estimator: TokenEstimator) -> TokenEstimator:
    """Decorator that marks an estimator as one of tokens: the learner's ranks call it, with `TokenRewards`."""
    _TOKEN_LEVEL.add(estimator)
    return estimator


def is_token_level(estimator: OutcomeEstimator | TokenEstimator) -> TypeIs[TokenEstimator]:
    """Whether an estimator is marked by `token_level`; the others are given one reward a trajectory."""
    return estimator in _TOKEN_LEVEL


_TOKEN_LEVEL: set[TokenEstimator] = set()


@ADVANTAGES.register("gae")
@token_level
def gae(batch: TokenRewards, config: AlgorithmConfig, total: SumOverRanks) -> TokenAdvantages:
    """Generalised advantages of a critic's values, standardised over the batch's tokens where the option says so.

    See `generalized_advantages`; ``discount``, ``trace`` and ``whiten_advantages`` are options. A trajectory cut at
    the length limit ends like any other: nothing is bootstrapped after its last token. ``mask_truncated`` leaves it
    out.
    """
    advantages, returns = generalized_advantages(
        batch.rewards, batch.values, batch.lengths, discount=config.discount, trace=config.trace
    )
    if config.whiten_advantages:
        advantages = standardized(advantages, total)
    return TokenAdvantages(advantages=advantages, returns=returns)


@ADVANTAGES.register("reinforce_plus_plus")
@token_level
def reinforce_plus_plus(batch: TokenRewards, config: AlgorithmConfig, total: SumOverRanks) -> TokenAdvantages:
    """The return from each token on, standardised over the batch's tokens (REINFORCE++, arXiv 2501.03262, section 3).

    With ``kl_reward_coef`` β this is the paper's r - β Σ KL over the tokens from here on. Deviation: the paper's KL
    is that of the policy before the update, ours that of the behaviour policy, which sampled the tokens.

    Example: one-token trajectories with rewards 3, 0, 0 give 1.155, -0.577, -0.577, whatever their prompts.
    """
    returns = returns_to_go(batch.rewards, batch.lengths, discount=config.discount)
    return TokenAdvantages(advantages=standardized(returns, total), returns=returns)


def generalized_advantages(
    rewards: Tensor,
    values: Tensor,
    lengths: Tensor,
    *,
    discount: float,
    trace: float,
    last_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over packed trajectories (GAE, arXiv 1506.02438, equations 11 to 16).

    A_t = δ_t + γ λ A_(t+1) with δ_t = r_t + γ V_(t+1) - V_t, from each trajectory's last token backwards.

    Args:
        rewards: [M] float, one a policy token, trajectories laid end to end.
        values: [M] float, the critic's value before each of these tokens.
        lengths: [B] int64, policy tokens of each trajectory; they sum to M.
        discount: Gamma, in [0, 1].
        trace: Lambda, in [0, 1].
        last_values: [B] float, the value after each trajectory's last token: 0 (the default) where it has ended, the
            critic's value to bootstrap from where it was cut off.

    Returns:
        Advantages [M] float64 and returns (advantages + values) [M] float64. Example: rewards 0, 1 and values
        0.5, 0.6 with gamma 1 and lambda 0.5 give advantages 0.3, 0.4, and with a last value of 1 they give 0.8, 1.4.
    """
    advantages = torch.zeros(len(rewards), dtype=torch.float64)
    last = torch.zeros(len(lengths), dtype=torch.float64) if last_values is None else last_values.double()
    ends = lengths.cumsum(0)
    following, following_value = torch.zeros_like(last), last
    # The k-th token from the end of every trajectory at once.
    for k in range(int(lengths.max()) if len(lengths) else 0):
        alive = lengths > k
        token = (ends - 1 - k)[alive]
        value = values[token].double()
        delta = rewards[token].double() + discount * following_value[alive] - value
        advantages[token] = delta + discount * trace * following[alive]
        following = following.masked_scatter(alive, advantages[token])
        following_value = following_value.masked_scatter(alive, value)
    return advantages, advantages + values.double()


def returns_to_go(rewards: Tensor, lengths: Tensor, *, discount: float) -> Tensor:
    """Discounted sum of the rewards from each token to its trajectory's end.

    Args:
        rewards: [M] float.
        lengths: [B] int64, tokens of each trajectory; they sum to M.
        discount: Gamma, in [0, 1].

    Returns:
        [M] float64. Example: rewards 1, 0, 4 of one trajectory with gamma 0.5 give 2, 2, 4.
    """
    return generalized_advantages(rewards, torch.zeros_like(rewards), lengths, discount=discount, trace=1.0)[1]


def standardized(values: Tensor, total: SumOverRanks) -> Tensor:
    """Less the mean and divided by the sample deviation (n - 1), over the tokens of all ranks.

    Args:
        values: [M] float64, this rank's.
        total: Adds up over the ranks.

    Returns:
        [M] float64; zeros where all values are equal, nothing is added to the deviation.
    """
    count, sums = total(torch.tensor([len(values), float(values.sum())], dtype=torch.float64)).tolist()
    centered = values - sums / max(1.0, count)
    squares = float(total(centered.square().sum()[None]))
    # Centring leaves rounding where values are equal: it must not be blown up.
    largest = float(total(values.square().sum()[None])) / max(1.0, count)
    if count < 2 or squares / count <= 1e-24 * largest:
        return torch.zeros_like(values)
    return centered / (squares / (count - 1)) ** 0.5
