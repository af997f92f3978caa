"""What a role learns: policy losses, off-policy corrections and KL estimators, and the objectives made of them.

A loss is one number per token of a micro-batch. It does not depend on the ranks: `token_weights` give each token its
share of the whole batch, so the sum is the same however the batch is split. With w = proximal ÷ behaviour, a token's
importance weight is w, and its trajectory's weight is the product over the trajectory; no gradient flows through
weights. The KL estimators follow http://joschu.net/blog/kl-approx.html. Letter: M tokens in the loss of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from asyncrl.core.registry import Registry

from .config import Aggregation, AlgorithmConfig, Anchor, KLEstimator, Mask, Weight

MAX_LOG_WEIGHT = 20.0
"""Logarithms of ratios and weights are cut here, so that they and their gradients stay finite (e^20 is 5e8)."""

MAX_LOW_VARIANCE = 10.0
"""Largest value, either way, of the ``low_variance`` estimator."""

_SERIES_UP_TO = 0.05
_SQUARE = "_squared"
_WEIGHTS = {"ratio": "effective_sample_size", "importance_weight": "importance_sample_size"}
_OF_SEQUENCES = (Mask.sequence, Mask.geometric, Mask.k3)


@dataclass(frozen=True, kw_only=True)
class TokenInputs:
    """What every objective sees of a micro-batch.

    Attributes:
        trajectory_index: [M] int64, trajectory of each token, counted within the micro-batch.
        trajectory_lengths: [number of trajectories] int64, tokens in the loss of each, on all its branches.
        columns: [M] float32 by name: ``behavior_logprobs`` and ``advantages`` in RL, ``reference_logprobs`` where
            there is a KL penalty, ``values`` and ``returns`` where there is a critic. A loss of your own also gets
            every token column of the prompt groups under its own name, [M, …] float32, 0 where a group has none:
            ``token_ids``, ``logprobs``, ``versions``, and what your engine or environment adds.
    """

    trajectory_index: Tensor
    trajectory_lengths: Tensor
    columns: Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class LossInputs(TokenInputs):
    """What a policy loss sees of a micro-batch.

    Attributes:
        log_probs: [M] float32, with gradient.
        entropy: [M] float32, with gradient; None where neither ``entropy_coef`` nor ``report_entropy`` asks for it.
        one_update: Whether the step makes one optimizer update. Then the proximal policy is the policy itself.
    """

    log_probs: Tensor
    entropy: Tensor | None = None
    one_update: bool = True

    @property
    def proximal_logprobs(self) -> Tensor:
        """[M] log-probs before the step, without gradient.

        Raises `ValueError` if the step makes several updates and no option asked for them.
        """
        if "proximal_logprobs" not in self.columns and self.one_update:
            return self.log_probs.detach()
        try:
            return self.columns["proximal_logprobs"]
        except KeyError:
            raise ValueError(
                "algorithm.anchor must be proximal for a loss that reads proximal_logprobs in a step of several "
                "updates, got behavior: nothing scored them before the first update; set it"
            ) from None


@dataclass(frozen=True, kw_only=True)
class ValueInputs(TokenInputs):
    """What the critic's objective sees of a micro-batch.

    Attributes:
        values: [M] float32, with gradient.
    """

    values: Tensor


@dataclass(frozen=True, kw_only=True)
class LossTerms:
    """What a loss gives back.

    Attributes:
        per_token: [M] float32, with gradient.
        metrics: [M] float32 by name, without gradient; each is reported as its mean over the batch's tokens.
    """

    per_token: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


PolicyLoss: TypeAlias = Callable[[LossInputs, AlgorithmConfig], LossTerms]
"""A loss by its options."""

LOSSES: Registry[PolicyLoss] = Registry("algorithm.loss")

_BY_TOKEN: set[PolicyLoss] = set()


def by_token(loss: PolicyLoss) -> PolicyLoss:
    """Decorator that marks a loss whose value at a token depends on that token alone.

    A loss without the mark gets whole trajectories: all branches of one must fit into one micro-batch.
    """
    _BY_TOKEN.add(loss)
    return loss


def anchor_log_probs(inputs: LossInputs, config: AlgorithmConfig) -> Tensor:
    """[M] log-probs in the denominator of the ratio, of the policy that ``algorithm.anchor`` names."""
    return inputs.columns["behavior_logprobs"] if config.anchor is Anchor.behavior else inputs.proximal_logprobs


@LOSSES.register("ppo_clip")
@by_token
def ppo_clip(inputs: LossInputs, config: AlgorithmConfig) -> LossTerms:
    """PPO's clipped surrogate (arXiv 1707.06347, equation 7).

    -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = policy / anchor. Deviation: the paper's anchor is the
    policy before the update. ``anchor=behavior``, the default, is the policy that sampled the token, whichever version
    that was: then the clip bounds the lag too, also with one optimizer update per batch. ``anchor=proximal`` with
    ``weight=token`` is decoupled PPO (arXiv 2110.00641, equation 5; AReaL, arXiv 2505.24298). ``clip_high > clip_low``
    is clip-higher (DAPO, arXiv 2503.14476, section 3.1). ``dual_clip`` c bounds the loss at -c A where A < 0 (arXiv
    1912.09729).

    Example: ratio 1.5, advantage 1, clip 0.2 gives -1.2 and no gradient; advantage -1 gives 1.5.
    """
    advantages = inputs.columns["advantages"]
    return _clipped(bounded_exp(inputs.log_probs - anchor_log_probs(inputs, config)), advantages, config)


def _clipped(ratio: Tensor, advantages: Tensor, config: AlgorithmConfig) -> LossTerms:
    surrogate = ratio * advantages
    clipped = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high) * advantages
    objective = torch.minimum(surrogate, clipped)
    metrics = {"clip_fraction": (clipped < surrogate).float()}
    if config.dual_clip:
        bound = torch.where(advantages < 0, config.dual_clip * advantages, -torch.inf)
        metrics["dual_clip_fraction"] = (bound > objective).float()
        objective = torch.maximum(objective, bound)
    return LossTerms(per_token=-objective, metrics=metrics)


@LOSSES.register("gspo")
def gspo(inputs: LossInputs, config: AlgorithmConfig) -> LossTerms:
    """Clipped surrogate of sequence ratios (GSPO-token, arXiv 2507.18071, equations 7 and 13 to 14).

    The ratio of a trajectory is the geometric mean of its tokens' ratios; a token's ratio has this value, and the
    gradient of its own log-prob. The paper means ``aggregation=sequence_mean``, bounds near 3e-4 and 4e-4, several
    updates per step, and ``anchor=proximal``: the log-probs of an engine differ from the learner's by more than these
    bounds under the same weights.

    Example: two tokens with ratios 4 and 1 both have ratio 2.
    """
    log_ratio = inputs.log_probs - anchor_log_probs(inputs, config)
    mean = trajectory_means(log_ratio.detach(), inputs)[inputs.trajectory_index]
    ratio = bounded_exp(mean + inputs.log_probs - inputs.log_probs.detach())
    return _clipped(ratio, inputs.columns["advantages"], config)


@LOSSES.register("cispo")
@by_token
def cispo(inputs: LossInputs, config: AlgorithmConfig) -> LossTerms:
    """REINFORCE weighted by the clipped ratio; every token keeps its gradient (CISPO, arXiv 2506.13585, equation 4).

    -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log policy. The paper leaves the ratio unbounded below:
    ``clip_low=1``.

    Example: ratio 1.5, advantage 2, clip 0.2 give a gradient of -2.4 at the log-prob.
    """
    ratio = bounded_exp(inputs.log_probs.detach() - anchor_log_probs(inputs, config))
    weight = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    return LossTerms(
        per_token=-weight * inputs.columns["advantages"] * inputs.log_probs,
        metrics={"clip_fraction": (weight != ratio).float()},
    )


@LOSSES.register("reinforce")
@by_token
def reinforce(inputs: LossInputs, config: AlgorithmConfig) -> LossTerms:
    """-A log policy (Williams, 1992): the teaching baseline. Without a correction every batch counts as on-policy."""
    return LossTerms(per_token=-inputs.columns["advantages"] * inputs.log_probs)


def negative_log_likelihood(inputs: LossInputs) -> LossTerms:
    """Supervised loss: minus the log-prob of each token, in nats."""
    return LossTerms(per_token=-inputs.log_probs)


def token_weights(
    inputs: TokenInputs,
    aggregation: Aggregation,
    *,
    num_tokens: int,
    num_trajectories: int,
    sequence_norm_tokens: int = 0,
) -> Tensor:
    """Share of each token in the loss of the whole batch.

    Args:
        inputs: A micro-batch.
        aggregation: ``token_mean``: every token of the batch counts the same. ``sequence_mean``: every trajectory
            counts the same, whatever its branches, and every token within it. ``sequence_sum_norm``: every token
            counts 1 / (trajectories * ``sequence_norm_tokens``), whatever the length of its trajectory (Dr. GRPO,
            arXiv 2503.20783, section 3.2).
        num_tokens: Tokens in the loss of the whole batch, over all micro-batches and ranks.
        num_trajectories: Its trajectories with at least one such token.
        sequence_norm_tokens: The constant L of ``sequence_sum_norm``, in tokens.

    Returns:
        [M] float32; for the two means they sum to 1 over the whole batch.
    """
    if aggregation is Aggregation.token_mean:
        return torch.full_like(inputs.trajectory_index, 1.0 / max(1, num_tokens), dtype=torch.float32)
    if aggregation is Aggregation.sequence_sum_norm:
        share = 1.0 / (max(1, num_trajectories) * sequence_norm_tokens)
        return torch.full_like(inputs.trajectory_index, share, dtype=torch.float32)
    return 1.0 / (inputs.trajectory_lengths[inputs.trajectory_index] * max(1, num_trajectories)).float()


def importance_weights(log_weights: Tensor, inputs: TokenInputs, config: AlgorithmConfig) -> Tensor:
    """Factors of the token losses of a micro-batch: ``algorithm.weight``, before any mask.

    Args:
        log_weights: [M] float32, proximal minus behaviour log-prob.
        inputs: Which trajectory each token belongs to; a sequence is a whole trajectory here.
        config: ``weight`` chooses; ``weight_cap`` c > 0 truncates each factor to min(factor, c).

            - ``none``: 1.
            - ``token``: w. Not truncated, this is the factor of decoupled PPO (arXiv 2110.00641, equation 5; AReaL,
              arXiv 2505.24298); truncated, it is TIS (Yao et al. 2025, https://fengyao.notion.site/off-policy-rl;
              arXiv 2510.26788), V-trace's rho (arXiv 1802.01561, equation 1).
            - ``sequence``: the product of w over the sequence, the same for all its tokens.

    Returns:
        [M] float32. Example: w = 0.25, 1, 4 as one sequence with cap 2 give 1, 1, 1 · 0.25, 1, 2 · 1, 1, 1; with cap 0
        ``token`` gives 0.25, 1, 4.
    """
    if config.weight is Weight.none:
        return torch.ones_like(log_weights)
    if config.weight is Weight.sequence:
        weights = bounded_exp(_trajectory_sums(log_weights, inputs))[inputs.trajectory_index]
    else:
        weights = bounded_exp(log_weights)
    return weights.clamp(max=config.weight_cap) if config.weight_cap else weights


def kept_tokens(log_weights: Tensor, inputs: TokenInputs, config: AlgorithmConfig) -> Tensor:
    """Which tokens of a micro-batch pass every rule of ``algorithm.masks``.

    A token that fails one has no loss; a KL penalty and an entropy bonus stay. The shares of the other tokens stay as
    they are, as in IcePop's objective. Deviation from verl, which divides by what is kept.

    Args:
        log_weights: [M] float32, proximal minus behaviour log-prob.
        inputs: Which trajectory each token belongs to.
        config: ``masks`` with their bounds.

            - ``token``: w of the token is inside ``token_band`` (IcePop, in Ring-1T, arXiv 2510.18855, with [0.5, 5]).
            - ``sequence``: the product of w over the trajectory is inside ``sequence_band`` (masked importance
              sampling, MIS: Liu et al. 2025, https://richardli.xyz/rl-collapse; arXiv 2510.26788, with at most 2).
            - ``geometric``: the geometric mean of w over the trajectory is inside ``geometric_band``. The band does
              not depend on the length, and must be narrow: a mean of 1.01 over 100 tokens is a product of 2.7 (verl's
              rollout correction, with [0.999, 1.001]).
            - ``k3``: the mean over the trajectory of w - 1 - log w, which estimates KL(behaviour ‖ proximal), is at
              most ``k3_max`` (trust region masking, arXiv 2512.23075; verl's ``seq_mean_k3``, with 0.01).

    Returns:
        [M] bool. Example: w = 0.25, 1, 4 as one sequence: ``token`` keeps the second and third, ``sequence`` and
        ``geometric`` keep all (both are 1), ``k3`` none (its mean is 0.75).
    """
    kept = torch.ones_like(log_weights, dtype=torch.bool)
    if Mask.token in config.masks:
        kept &= _inside(bounded_exp(log_weights), config.token_band)
    for mask in (each for each in _OF_SEQUENCES if each in config.masks):
        if mask is Mask.sequence:
            trajectories = _inside(bounded_exp(_trajectory_sums(log_weights, inputs)), config.sequence_band)
        elif mask is Mask.geometric:
            trajectories = _inside(bounded_exp(trajectory_means(log_weights, inputs)), config.geometric_band)
        else:
            trajectories = trajectory_means(k3(log_weights), inputs) <= config.k3_max
        kept &= trajectories[inputs.trajectory_index]
    return kept


def _inside(weights: Tensor, band: tuple[float, float]) -> Tensor:
    low, high = band
    return (weights >= low) & (weights <= high)


def _trajectory_sums(values: Tensor, inputs: TokenInputs) -> Tensor:
    lengths = inputs.trajectory_lengths
    return values.new_zeros(len(lengths)).index_add(0, inputs.trajectory_index, values)


def trajectory_means(values: Tensor, inputs: TokenInputs) -> Tensor:
    """[number of trajectories] means of [M] values over each, 0 for one without tokens; differentiable."""
    return _trajectory_sums(values, inputs) / inputs.trajectory_lengths.clamp(min=1)


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


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What a trainer minimises.

    Attributes:
        loss: Gives each token of a micro-batch its loss, from what the role's head computes.
        aggregation: How token losses become the loss of the batch.
        sequence_norm_tokens: See `token_weights`.
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
    """The loss that ``config`` names with the terms around it; raises `ValueError` if there is no such loss."""
    policy_loss = LOSSES.get(config.loss)

    def loss(inputs: LossInputs) -> LossTerms:
        inputs = replace(inputs, one_update=config.num_mini_batches == 1)
        terms = policy_loss(inputs, config)
        per_token, metrics = terms.per_token, {**terms.metrics, **behavior_metrics(inputs)}
        if inputs.entropy is not None:
            metrics["entropy"] = inputs.entropy.detach()
        if config.corrects:
            log_weights = inputs.proximal_logprobs - inputs.columns["behavior_logprobs"]
            kept = kept_tokens(log_weights, inputs, config).float()
            weights = importance_weights(log_weights, inputs, config) * kept
            per_token = weights * per_token
            metrics |= _with_square("importance_weight", weights) | {"masked_fraction": 1.0 - kept}
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
        needs_proximal=config.num_mini_batches > 1 and config.needs_proximal,
        needs_trajectories=(
            policy_loss not in _BY_TOKEN
            or config.weight is Weight.sequence
            or any(mask in config.masks for mask in _OF_SEQUENCES)
        ),
        summarize=summarized,
    )


def behavior_metrics(inputs: LossInputs) -> dict[str, Tensor]:
    """How far the policy is from the one that sampled, [M] each.

    ``ratio`` policy ÷ behaviour and its square, and ``behavior_kl``: KL(behaviour ‖ policy) in nats by the k3
    estimator, r - 1 - log r with log r within ±20, each value >= 0.
    """
    log_ratio = inputs.log_probs.detach() - inputs.columns["behavior_logprobs"]
    return _with_square("ratio", bounded_exp(log_ratio)) | {"behavior_kl": k3(log_ratio)}


def summarized(metrics: dict[str, float]) -> dict[str, float]:
    """Turn the means of squared weights, over the batch's tokens, into effective sample sizes.

    These are ``effective_sample_size`` (of policy ÷ behaviour) and, under a correction, ``importance_sample_size`` (of
    the weights applied), each a share of the batch in (0, 1].
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
    ``clip`` is c > 0; 0 does not clip. Returns [M] float32 losses, and [M] bool where the clipped error is the larger
    one. Example: value 1, old value 0, return 2 and c 0.2 give 0.5 · 1.8² = 1.62, clipped.
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
