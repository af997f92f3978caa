"""The objective that a configuration describes: a policy loss, weighted off-policy, KL penalty and entropy bonus."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from .config import AlgorithmConfig, Correction
from .importance import bounded_exp, effective_sample_size, importance_weights
from .kl import k3, kl_penalty
from .losses import LOSSES, LossInputs, LossTerms

_SQUARE = "_squared"
_WEIGHTS = {"ratio": "effective_sample_size", "importance_weight": "importance_sample_size"}


def policy_objective(config: AlgorithmConfig) -> Callable[[LossInputs], LossTerms]:
    """Compose the objective.

    Args:
        config: Names the loss and the terms around it.

    Returns:
        A loss for `learner.trainer.PolicyTrainer.update`. Its metrics go through `summarized`.

    Raises:
        ValueError: there is no such loss.
    """
    policy_loss = LOSSES.get(config.loss)

    def objective(inputs: LossInputs) -> LossTerms:
        terms = policy_loss(inputs, config)
        per_token, metrics = terms.per_token, {**terms.metrics, **behavior_metrics(inputs)}
        if config.correction is not Correction.none:
            log_weights = inputs.proximal_logprobs - inputs.columns["behavior_logprobs"]
            weights = importance_weights(log_weights, inputs.sequence_index, inputs.loss_lengths, config)
            per_token = weights * per_token
            metrics |= _with_square("importance_weight", weights) | {"masked_fraction": (weights == 0).float()}
        if config.kl_coef:
            divergence = kl_penalty(inputs.log_probs, inputs.columns["reference_logprobs"], config.kl_estimator)
            per_token = per_token + config.kl_coef * divergence
            metrics["reference_kl"] = divergence.detach()
        if config.entropy_coef:
            per_token = per_token - config.entropy_coef * inputs.entropy
        return LossTerms(per_token=per_token, metrics=metrics)

    return objective


def behavior_metrics(inputs: LossInputs) -> dict[str, Tensor]:
    """How far the policy is from the one that sampled.

    Returns:
        [M] ``ratio`` policy ÷ behaviour and its square, and ``behavior_kl``: KL(behaviour ‖ policy) in nats by the k3
        estimator, r - 1 - log r with log r within ±20 (http://joschu.net/blog/kl-approx.html), each value >= 0.
    """
    log_ratio = inputs.log_probs.detach() - inputs.columns["behavior_logprobs"]
    return _with_square("ratio", bounded_exp(log_ratio)) | {"behavior_kl": k3(log_ratio)}


def summarized(metrics: dict[str, float]) -> dict[str, float]:
    """Turn the means of squared weights into effective sample sizes.

    Args:
        metrics: Means over the batch's tokens, from an objective of this module.

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
