"""How far two policies are apart on sampled tokens: importance weights of off-policy correction, and KL estimators.

With w = proximal ÷ behaviour, a token's own weight is w and its sequence's weight is the product over the sequence. The
weights are constants: no gradient flows through them. The KL estimators follow http://joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .config import AlgorithmConfig, Correction, KLEstimator

MAX_LOG_WEIGHT = 20.0
"""Logarithms of ratios and weights are cut here, so that they and their gradients stay finite (e^20 is 5e8)."""

MAX_LOW_VARIANCE = 10.0
"""Largest value, either way, of the ``low_variance`` estimator."""

_SERIES_UP_TO = 0.05


def importance_weights(
    log_weights: Tensor, sequence_index: Tensor, loss_lengths: Tensor, config: AlgorithmConfig
) -> Tensor:
    """Weights of the tokens of a micro-batch.

    Args:
        log_weights: [M] float32, proximal minus behaviour log-prob.
        sequence_index: [M] int64, sequence of each token.
        loss_lengths: [number of sequences] int64, tokens of each sequence.
        config: ``correction`` chooses; ``correction_low`` and ``correction_high`` are the bounds.

            - ``none``: 1.
            - ``untruncated``: w (decoupled PPO, arXiv 2505.24298).
            - ``token_truncated``: min(w, high), truncated importance sampling by token (V-trace's rho, arXiv
              1802.01561, equation 1).
            - ``sequence_truncated``: min(weight of the sequence, high), the same for all its tokens.
            - ``token_masked``: w inside [low, high], 0 outside (IcePop, in Ring-1T, arXiv 2510.18855).
            - ``sequence_rejected``: 1 where the geometric mean of w over the sequence is inside [low, high], 0 for
              the whole sequence elsewhere. Deviation from rejection by the product: the bounds do not depend on
              the sequence's length.

    Returns:
        [M] float32. Example: w = 0.25, 1, 4 as one sequence with bounds 0.5 and 2 give, in this order of
        corrections: 1, 1, 1 · 0.25, 1, 4 · 0.25, 1, 2 · 1, 1, 1 · 0, 1, 0 · 1, 1, 1.
    """
    low, high = config.correction_low, config.correction_high
    if config.correction is Correction.none:
        return torch.ones_like(log_weights)
    if config.correction is Correction.sequence_truncated:
        total = sequence_sums(log_weights, sequence_index, len(loss_lengths))
        return bounded_exp(total).clamp(max=high)[sequence_index]
    if config.correction is Correction.sequence_rejected:
        mean = bounded_exp(sequence_means(log_weights, sequence_index, loss_lengths))
        return ((mean >= low) & (mean <= high)).float()[sequence_index]
    weights = bounded_exp(log_weights)
    if config.correction is Correction.token_truncated:
        return weights.clamp(max=high)
    if config.correction is Correction.token_masked:
        return torch.where((weights >= low) & (weights <= high), weights, 0.0)
    return weights


def sequence_sums(values: Tensor, sequence_index: Tensor, num_sequences: int) -> Tensor:
    """[number of sequences] sums of [M] values over each sequence; differentiable."""
    return values.new_zeros(num_sequences).index_add(0, sequence_index, values)


def sequence_means(values: Tensor, sequence_index: Tensor, loss_lengths: Tensor) -> Tensor:
    """[number of sequences] means of [M] values over each sequence, 0 for one without tokens; differentiable."""
    return sequence_sums(values, sequence_index, len(loss_lengths)) / loss_lengths.clamp(min=1)


def effective_sample_size(mean_weight: float, mean_square: float) -> float:
    """Share of the batch that weighted samples are worth, (E w)² ÷ E w² (Kong, 1992), in (0, 1].

    Example: weights 1, 1, 1, 1 are worth 1.0 of the batch, weights 2, 0, 0, 0 are worth 0.25.
    """
    return mean_weight**2 / mean_square if mean_square > 0 else 0.0


def bounded_exp(log_weights: Tensor) -> Tensor:
    """Exponential of logarithms within ± `MAX_LOG_WEIGHT`; constant, without gradient, outside."""
    return log_weights.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT).exp()


def kl_penalty(log_probs: Tensor, reference_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate the divergence at each token, differentiable in the policy's log-probs.

    Args:
        log_probs: [M] policy log-probs.
        reference_logprobs: [M] reference log-probs of the same tokens.
        estimator: With d = reference - policy: ``k1`` is -d (unbiased, may be negative), ``k2`` d² / 2, ``k3``
            exp(d) - 1 - d (unbiased, never negative) with d within ±20, so that one token that the policy has all but
            given up cannot give an infinite loss, ``low_variance`` is ``k3`` with the value within ±10 too. As a loss
            only ``k2`` has the gradient of the divergence in expectation, on tokens that the policy itself sampled.

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
