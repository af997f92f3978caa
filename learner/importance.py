"""Off-policy correction: how much a token counts whose behaviour policy is not the proximal one.

With w = proximal ÷ behaviour, a token's own weight is w and its sequence's weight is the product over the sequence. The
weights are constants: no gradient flows through them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .config import AlgorithmConfig, Correction

MAX_LOG_WEIGHT = 20.0
"""Logarithms of ratios and weights are cut here, so that they and their gradients stay finite (e^20 is 5e8)."""


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
