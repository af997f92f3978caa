"""Estimators of KL(policy ‖ reference) from the tokens that were sampled, after http://joschu.net/blog/kl-approx.html."""

from __future__ import annotations

import torch
from torch import Tensor

from .config import KLEstimator
from .importance import MAX_LOG_WEIGHT

MAX_LOW_VARIANCE = 10.0
_SERIES_UP_TO = 0.05


def kl_penalty(log_probs: Tensor, reference_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate the divergence at each token, differentiable in the policy's log-probs.

    Args:
        log_probs: [M] policy log-probs.
        reference_logprobs: [M] reference log-probs of the same tokens.
        estimator: With d = reference - policy: ``k1`` is -d (unbiased, may be negative), ``k2`` d² / 2, ``k3``
            exp(d) - 1 - d (unbiased, never negative) with d within ±20, so that one token that the policy has all but
            given up is no infinite loss, ``low_variance`` is ``k3`` with the value within ±10 too. As a loss only
            ``k2`` has the gradient of the divergence in expectation, on tokens that the policy itself sampled.

    Returns:
        [M] nats. Example: policy -1, reference -2 give 1, 0.5, 0.368, 0.368.
    """
    difference = reference_logprobs - log_probs
    if estimator is KLEstimator.k1:
        return -difference
    if estimator is KLEstimator.k2:
        return difference.square() / 2
    estimate = k3(difference)
    return estimate.clamp(max=MAX_LOW_VARIANCE) if estimator is KLEstimator.low_variance else estimate


def k3(log_ratio: Tensor) -> Tensor:
    """exp(d) - 1 - d, by its series where d is small and the difference would cancel; >= 0, d is cut at ±20."""
    bounded = log_ratio.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT)
    series = bounded.square() / 2 * (1 + bounded / 3 * (1 + bounded / 4 * (1 + bounded / 5)))
    return torch.where(bounded.abs() < _SERIES_UP_TO, series, bounded.expm1() - bounded)


class AdaptiveKLCoefficient:
    """Coefficient that steers a divergence towards a target (arXiv 1909.08593, section 2.2).

    Deviation: the divergence is the mean over a batch's tokens; the paper's is of whole continuations, and verl's is
    the mean over sequences of their means.

    Args:
        initial: First coefficient.
        target: Divergence aimed at, nats a token.
        horizon: Samples over which the coefficient follows.
    """

    def __init__(self, *, initial: float, target: float, horizon: int) -> None:
        self.value = initial
        self._target = target
        self._horizon = horizon

    def update(self, measured: float, num_samples: int) -> float:
        """Follow a step's divergence; returns the new coefficient.

        Example: 0.1 with target 6 and horizon 10000, after 256 samples at 12 nats, becomes 0.100512.
        """
        error = min(max(measured / self._target - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * num_samples / self._horizon
        return self.value
