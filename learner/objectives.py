"""What a role learns: the policy's loss with its correction, KL penalty and entropy bonus, and the critic's loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .config import Aggregation, AlgorithmConfig, Correction
from .losses import (
    BY_TOKEN,
    LOSSES,
    LossInputs,
    LossTerms,
    ValueInputs,
    bounded_exp,
    effective_sample_size,
    importance_weights,
    k3,
    kl_penalty,
)

_SQUARE = "_squared"
_OF_SEQUENCES = (Correction.sequence_truncated, Correction.sequence_rejected)
_WEIGHTS = {"ratio": "effective_sample_size", "importance_weight": "importance_sample_size"}


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What a trainer minimises.

    Attributes:
        loss: Gives each token of a micro-batch its loss, from what the role's head computes.
        aggregation: How token losses become the loss of the batch.
        sequence_norm_tokens: See `learner.losses.token_weights`.
        needs_entropy: Whether the loss or its metrics read the entropy.
        needs_proximal: Whether a step scores ``proximal_logprobs`` before its first update.
        needs_trajectories: Whether the loss of a token reads its trajectory's other tokens, on all branches.
        summarize: Turns a step's mean metrics into those that are reported.
    """

    loss: Callable[[Any], LossTerms]
    aggregation: Aggregation = Aggregation.token_mean
    sequence_norm_tokens: int = 0
    needs_entropy: bool = False
    needs_proximal: bool = False
    needs_trajectories: bool = False
    summarize: Callable[[dict[str, float]], dict[str, float]] = dict


def policy_objective(config: AlgorithmConfig) -> Objective:
    """Compose the policy's objective: the loss that ``config`` names, and the terms around it.

    Raises:
        ValueError: there is no such loss.
    """
    policy_loss = LOSSES.get(config.loss)

    def loss(inputs: LossInputs) -> LossTerms:
        terms = policy_loss(inputs, config)
        per_token, metrics = terms.per_token, {**terms.metrics, **behavior_metrics(inputs)}
        if inputs.entropy is not None:
            metrics["entropy"] = inputs.entropy.detach()
        if config.correction is not Correction.none:
            log_weights = inputs.proximal_logprobs - inputs.columns["behavior_logprobs"]
            weights = importance_weights(log_weights, inputs, config)
            per_token = weights * per_token
            metrics |= _with_square("importance_weight", weights) | {"masked_fraction": (weights == 0).float()}
        if config.kl_coef:
            divergence = kl_penalty(inputs.log_probs, inputs.columns["reference_logprobs"], config.kl_estimator)
            per_token = per_token + config.kl_coef * divergence
            metrics["reference_kl"] = divergence.detach()
        if config.entropy_coef and inputs.entropy is not None:
            per_token = per_token - config.entropy_coef * inputs.entropy
        return LossTerms(per_token=per_token, metrics=metrics)

    return Objective(
        loss=loss,
        aggregation=config.aggregation,
        sequence_norm_tokens=config.sequence_norm_tokens,
        needs_entropy=config.entropy_coef > 0 or config.report_entropy,
        needs_proximal=config.num_mini_batches > 1 and config.correction is not Correction.none,
        needs_trajectories=config.loss not in BY_TOKEN or config.correction in _OF_SEQUENCES,
        summarize=summarized,
    )


def behavior_metrics(inputs: LossInputs) -> dict[str, Tensor]:
    """How far the policy is from the one that sampled.

    Returns:
        [M] ``ratio`` policy ÷ behaviour and its square, and ``behavior_kl``: KL(behaviour ‖ policy) in nats by the k3
        estimator, r - 1 - log r with log r within ±20 (http://joschu.net/blog/kl-approx.html), each value >= 0.
    """
    log_ratio = inputs.log_probs.detach() - inputs.columns["behavior_logprobs"]
    return _with_square("ratio", bounded_exp(log_ratio)) | {"behavior_kl": k3(log_ratio)}


def summarized(metrics: dict[str, float]) -> dict[str, float]:
    """Turn the means of squared weights, over the batch's tokens, into effective sample sizes.

    Returns:
        The metrics, with ``effective_sample_size`` (of policy ÷ behaviour) and, under a correction,
        ``importance_sample_size`` (of the weights applied), each a share of the batch in (0, 1].
    """
    sizes = {
        size: effective_sample_size(metrics[name], metrics[name + _SQUARE])
        for name, size in _WEIGHTS.items()
        if name + _SQUARE in metrics
    }
    return {name: value for name, value in metrics.items() if not name.endswith(_SQUARE)} | sizes


def _with_square(name: str, values: Tensor) -> dict[str, Tensor]:
    return {name: values, name + _SQUARE: values.square()}


def value_objective(clip: float) -> Objective:
    """The critic's objective: `value_loss` with this ``clip``, every token of the batch counting the same."""

    def loss(inputs: ValueInputs) -> LossTerms:
        values, returns = inputs.values, inputs.columns["returns"]
        per_token, clipped = value_loss(values, inputs.columns["values"], returns, clip=clip)
        exact, error = returns.double(), (returns - values.detach()).double()
        metrics = {
            "value_clip_fraction": clipped.double(),
            "value_mean": values.detach().double(),
            "return_mean": exact,
            "return_mean_squared": exact.square(),
            "error": error,
            "error_squared": error.square(),
        }
        return LossTerms(per_token=per_token, metrics=metrics)

    return Objective(loss=loss, summarize=_value_summary)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float) -> tuple[Tensor, Tensor]:
    """Squared error of the values, with PPO's clipping (the loss of OpenAI's ``baselines`` ppo2; arXiv 2005.12729, 3).

    half of max((v - R)², (clip(v, old - c, old + c) - R)²): a value that has left the interval towards the return gets
    no gradient. All are [M] float32: ``values`` v with gradient, ``old_values`` before the step, ``returns`` R.
    ``clip`` is c > 0; 0 does not clip.

    Returns:
        [M] float32 losses, and [M] bool where the clipped error is the larger one. Example: value 1, old value 0,
        return 2 and c 0.2 give 0.5 · 1.8² = 1.62, clipped.
    """
    loss = (values - returns).square()
    if not clip:
        return 0.5 * loss, torch.zeros_like(values, dtype=torch.bool)
    moved = values - old_values
    outside = moved.abs() > clip
    # Not clamp alone: inside the interval old + (v - old) differs from v in the last bit, which would count as clipped.
    near = torch.where(outside, old_values + moved.clamp(-clip, clip), values)
    clipped = (near - returns).square()
    return 0.5 * torch.maximum(loss, clipped), outside & (clipped > loss)


def _value_summary(metrics: dict[str, float]) -> dict[str, float]:
    """``value_loss``, and ``explained_variance``: 1 - variance of return less value ÷ variance of the return."""
    variance = metrics["return_mean_squared"] - metrics["return_mean"] ** 2
    left = metrics["error_squared"] - metrics["error"] ** 2
    # A variance below rounding counts as none.
    explained = 1.0 - left / variance if variance > 1e-12 * metrics["return_mean_squared"] else 0.0
    hidden = ("loss", "error", "error_squared", "return_mean_squared")
    kept = {name: value for name, value in metrics.items() if name not in hidden}
    return {"value_loss": metrics["loss"], **kept, "explained_variance": explained}
