"""Policy losses, off-policy corrections, KL estimators, and the training objectives of actor and critic.

The loss of a batch is the sum of its token losses, weighted by `token_weights`. This sum does not depend on the
division into micro-batches and ranks. In shapes, M is the number of tokens in the loss of a micro-batch.

The *behavior* policy sampled the token. The *proximal* policy is the policy before the learner step. The *anchor* is
one of these two policies (``algorithm.anchor``). The importance weight w of a token is its probability under the
proximal policy, divided by its probability under the behavior policy. It has no gradient.
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
"""The logarithms of ratios and weights are clamped to ± this number, so that values and gradients stay finite."""

MAX_LOW_VARIANCE = 10.0
"""Largest value of the ``low_variance`` estimator."""

_SERIES_UP_TO = 0.05
_SQUARE = "_squared"
_FRESH = "fresh_tokens"
_WEIGHTS = {"ratio": "effective_sample_size", "importance_weight": "importance_sample_size"}
_OF_SEQUENCES = (Mask.sequence, Mask.geometric, Mask.k3)


@dataclass(frozen=True, kw_only=True)
class TokenInputs:
    """The inputs of a training objective for a micro-batch. Subclasses add the outputs of the model.

    Attributes:
        trajectory_index: [M] int64, index of each token's trajectory within the micro-batch.
        trajectory_lengths: [number of trajectories] int64, number of tokens in the loss of each trajectory, over all
            its branches (paths through the turns).
        columns: [M] float32 by name: ``behavior_logprobs`` and ``advantages`` in RL, ``reference_logprobs`` with a KL
            penalty, ``values`` and ``returns`` with a critic. Your own loss also gets ``token_ids``, ``logprobs``,
            ``versions``, and columns that your engine or environment adds. These additional columns are [M, …] float32,
            and 0 if a prompt group does not have them.
    """

    trajectory_index: Tensor
    trajectory_lengths: Tensor
    columns: Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class LossInputs(TokenInputs):
    """The inputs of a policy loss for a micro-batch.

    Attributes:
        log_probs: [M] float32, the tokens' log-probs under the trained policy, with gradient.
        entropy: [M] float32, the policy's entropy at each token, with gradient; None if ``entropy_coef`` is 0 and
            ``report_entropy`` is off.
        is_proximal: Whether ``log_probs`` replace a missing column ``proximal_logprobs``, as in the first update of a
            step.
    """

    log_probs: Tensor
    entropy: Tensor | None = None
    is_proximal: bool = True

    @property
    def proximal_logprobs(self) -> Tensor:
        """Log-probs of the tokens under the policy before the learner step, [M], without gradient.

        If a step has several updates, the learner must compute these log-probs before the first update. The learner
        computes them only if an option requires them. Otherwise this property raises `ValueError`.
        """
        if "proximal_logprobs" not in self.columns and self.is_proximal:
            return self.log_probs.detach()
        try:
            return self.columns["proximal_logprobs"]
        except KeyError:
            raise ValueError(
                "algorithm.anchor must be proximal for a loss that reads proximal_logprobs in a step of several "
                "updates, got behavior: the learner did not compute them before the first update; set "
                "algorithm.anchor=proximal"
            ) from None


@dataclass(frozen=True, kw_only=True)
class ValueInputs(TokenInputs):
    """The inputs of the critic's loss for a micro-batch.

    Attributes:
        values: [M] float32, the critic's values before the tokens, with gradient.
    """

    values: Tensor


@dataclass(frozen=True, kw_only=True)
class LossTerms:
    """The result of a loss.

    Attributes:
        per_token: [M] float32, the loss of each token, with gradient.
        metrics: [M] tensors by name, without gradient. The learner reports each metric's mean over the batch's tokens.
    """

    per_token: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


PolicyLoss: TypeAlias = Callable[[LossInputs, AlgorithmConfig], LossTerms]
"""A function that gets the inputs of a micro-batch and the algorithm's options, and returns the loss of each token."""

LOSSES: Registry[PolicyLoss] = Registry("algorithm.loss")

_BY_TOKEN: set[PolicyLoss] = set()


def by_token(loss: PolicyLoss) -> PolicyLoss:
    """Mark a policy loss in which the loss of a token depends on this token alone. Use this function as a decorator.

    For other losses, all branches of a trajectory (paths through its turns) must fit into one micro-batch.
    """
    _BY_TOKEN.add(loss)
    return loss


def anchor_log_probs(inputs: LossInputs, config: AlgorithmConfig) -> Tensor:
    """Return the tokens' log-probs under the policy that ``algorithm.anchor`` names, [M].

    ``behavior`` is the policy that sampled the token. ``proximal`` is the policy before the learner step.
    """
    return inputs.columns["behavior_logprobs"] if config.anchor is Anchor.behavior else inputs.proximal_logprobs


@LOSSES.register("ppo_clip")
@by_token
def ppo_clip(inputs: LossInputs, config: AlgorithmConfig) -> LossTerms:
    """Compute PPO's clipped surrogate loss of each token (arXiv 1707.06347, equation 7).

    The loss is -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A). A is the advantage, and r is the token's probability
    under the policy, divided by its probability under the anchor (`anchor_log_probs`).

    - Difference from the paper: the paper's anchor is the policy before the update. With the default
      ``anchor=behavior``, the clip also bounds the effect of lag.
    - ``anchor=proximal`` with ``weight=token`` is decoupled PPO (arXiv 2110.00641, equation 5; AReaL, arXiv
      2505.24298).
    - ``clip_high > clip_low`` is clip-higher (DAPO, arXiv 2503.14476, section 3.1).
    - ``dual_clip`` c bounds the loss at -c A where A < 0 (arXiv 1912.09729).

    Example: ratio 1.5, advantage 1 and clip 0.2 give the loss -1.2 without gradient. Advantage -1 gives the loss 1.5.
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
    """Compute the clipped surrogate loss with one ratio per trajectory (GSPO-token, arXiv 2507.18071, equation 13).

    The ratio of a trajectory is the geometric mean of its tokens' ratios (equations 7 and 14). Each token gets the
    trajectory's ratio, with the gradient of the token's own log-prob. The paper uses ``aggregation=sequence_mean``,
    bounds near 3e-4 and 4e-4, and several updates per step. Such bounds need ``anchor=proximal``, because log-probs of
    engine and learner differ by more than these bounds, even with the same weights.

    Example: two tokens with ratios 4 and 1 both have ratio 2.
    """
    log_ratio = inputs.log_probs - anchor_log_probs(inputs, config)
    mean = trajectory_means(log_ratio.detach(), inputs)[inputs.trajectory_index]
    ratio = bounded_exp(mean + inputs.log_probs - inputs.log_probs.detach())
    return _clipped(ratio, inputs.columns["advantages"], config)


@LOSSES.register("cispo")
@by_token
def cispo(inputs: LossInputs, config: AlgorithmConfig) -> LossTerms:
    """Compute the REINFORCE loss of each token, weighted by the clipped ratio (CISPO, arXiv 2506.13585, equation 4).

    The loss is -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log policy. sg stops the gradient, and A is the advantage.
    The ratio r is the token's probability under the policy, divided by its probability under the anchor
    (`anchor_log_probs`). All tokens keep their gradient. In the paper, ``clip_low`` is 1.

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
    """Compute the loss of each token, -A log policy (Williams, 1992). A is the token's advantage.

    Without ``algorithm.weight`` and ``algorithm.masks``, this loss treats all batches as on-policy.
    """
    return LossTerms(per_token=-inputs.columns["advantages"] * inputs.log_probs)


def negative_log_likelihood(inputs: LossInputs) -> LossTerms:
    """Compute the supervised loss: minus the log-prob of each token, in nats."""
    return LossTerms(per_token=-inputs.log_probs)


def token_weights(
    inputs: TokenInputs,
    aggregation: Aggregation,
    *,
    num_tokens: int,
    num_trajectories: int,
    sequence_norm_tokens: int = 0,
) -> Tensor:
    """Return a factor for each token. The loss of the whole batch is the sum of the tokens' losses times the factors.

    Args:
        inputs: The tokens of a micro-batch.
        aggregation: ``token_mean`` gives all tokens of the batch the same weight. ``sequence_mean`` gives all
            trajectories the same weight, divided equally among the tokens of a trajectory. ``sequence_sum_norm`` gives
            each token the weight 1 / (trajectories * ``sequence_norm_tokens``) (Dr. GRPO, arXiv 2503.20783, section
            3.2).
        num_tokens: Tokens in the loss of the whole batch.
        num_trajectories: Trajectories of the whole batch with at least one token in the loss.
        sequence_norm_tokens: The constant L of ``sequence_sum_norm``, in tokens.

    Returns:
        [M] float32. For the two means, the sum over the whole batch is 1.
    """
    if aggregation is Aggregation.token_mean:
        return torch.full_like(inputs.trajectory_index, 1.0 / max(1, num_tokens), dtype=torch.float32)
    if aggregation is Aggregation.sequence_sum_norm:
        share = 1.0 / (max(1, num_trajectories) * sequence_norm_tokens)
        return torch.full_like(inputs.trajectory_index, share, dtype=torch.float32)
    return 1.0 / (inputs.trajectory_lengths[inputs.trajectory_index] * max(1, num_trajectories)).float()


def importance_weights(log_weights: Tensor, inputs: TokenInputs, config: AlgorithmConfig) -> Tensor:
    """Return the factor by which ``algorithm.weight`` multiplies the loss of each token, before masking.

    Args:
        log_weights: [M] float32, proximal minus behavior log-prob. Below, w is the exponential of this difference.
        inputs: The micro-batch. Its ``trajectory_index`` names the trajectory of each token.
        config: ``weight`` selects the factor. ``weight_cap`` > 0 is the largest factor.

            - ``none``: 1.
            - ``token``: w. Without truncation, this is decoupled PPO (arXiv 2110.00641, equation 5; AReaL, arXiv
              2505.24298). With truncation, it is TIS (Yao et al. 2025, https://fengyao.notion.site/off-policy-rl; arXiv
              2510.26788) and V-trace's rho (arXiv 1802.01561, equation 1).
            - ``sequence``: the product of w over the trajectory, for all its tokens.

    Returns:
        [M] float32. Example: w = 0.25, 1, 4 in one trajectory with cap 2. ``token`` gives 0.25, 1, 2, and ``sequence``
        gives 1, 1, 1.
    """
    if config.weight is Weight.none:
        return torch.ones_like(log_weights)
    if config.weight is Weight.sequence:
        weights = bounded_exp(_trajectory_sums(log_weights, inputs))[inputs.trajectory_index]
    else:
        weights = bounded_exp(log_weights)
    return weights.clamp(max=config.weight_cap) if config.weight_cap else weights


def kept_tokens(log_weights: Tensor, inputs: TokenInputs, config: AlgorithmConfig) -> Tensor:
    """Return which tokens of a micro-batch pass all rules of ``algorithm.masks``.

    A token that fails a rule has policy loss 0. Its KL penalty and entropy bonus remain. The factors of the other
    tokens (`token_weights`) do not change, as in IcePop. Difference from verl: verl divides by the number of kept
    tokens.

    Args:
        log_weights: [M] float32, proximal minus behavior log-prob. Below, w is the exponential of this difference.
        inputs: The micro-batch. Its ``trajectory_index`` names the trajectory of each token.
        config: ``masks`` lists the rules. Other options are their bounds.

            - ``token``: w is inside ``token_band`` (IcePop, arXiv 2510.18855, with [0.5, 5]).
            - ``sequence``: the product of w over the trajectory is inside ``sequence_band`` (masked importance
              sampling: Liu et al. 2025, https://richardli.xyz/rl-collapse; arXiv 2510.26788, with at most 2).
            - ``geometric``: the geometric mean of w over the trajectory is inside ``geometric_band`` (verl, with
              [0.999, 1.001]). A mean of 1.01 over 100 tokens is a product of 2.7, so the band must be narrow.
            - ``k3``: the mean of w - 1 - log w over the trajectory is at most ``k3_max`` (trust region masking, arXiv
              2512.23075; verl's ``seq_mean_k3``, with 0.01). This mean estimates KL(behavior ‖ proximal).

    Returns:
        [M] bool. Example: w = 0.25, 1, 4 in one trajectory. ``token`` keeps the second and the third token.
        ``sequence`` and ``geometric`` keep all tokens, because product and mean are 1. ``k3`` keeps no token, because
        its mean is 0.75.
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
    """Return [number of trajectories] values: the mean of ``values`` over the tokens of each trajectory.

    ``values`` are [M], one per token. The mean is 0 for a trajectory without tokens.
    """
    return _trajectory_sums(values, inputs) / inputs.trajectory_lengths.clamp(min=1)


def effective_sample_size(mean_weight: float, mean_square: float) -> float:
    """Return the effective sample size as a fraction of the batch size, (E w)² / E w² (Kong, 1992), in [0, 1].

    ``mean_weight`` is E w, and ``mean_square`` is E w². The result is 0 if all weights are 0. Example: weights 2, 0, 0,
    0 give 0.25.
    """
    return mean_weight**2 / mean_square if mean_square > 0 else 0.0


def bounded_exp(log_weights: Tensor) -> Tensor:
    """Clamp each entry to ± `MAX_LOG_WEIGHT`, and return the exponentials. Clamped entries have no gradient."""
    return log_weights.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT).exp()


def kl_penalty(log_probs: Tensor, reference_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate the policy's KL divergence from the reference at each token, with a gradient for the policy.

    The estimators follow http://joschu.net/blog/kl-approx.html. If the policy sampled the tokens, the expected gradient
    of ``k2`` is the gradient of the divergence. This does not hold for the other estimators.

    Args:
        log_probs: [M] policy log-probs.
        reference_logprobs: [M] reference log-probs of the same tokens.
        estimator: With d = reference - policy:

            - ``k1``: -d (unbiased, may be negative).
            - ``k2``: d² / 2.
            - ``k3``: exp(d) - 1 - d (unbiased, never negative). d is clamped to ±20, so that the loss stays finite.
            - ``low_variance``: ``k3``, but at most 10.

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
    """Compute exp(d) - 1 - d >= 0 for each entry d of ``log_ratio``, with d clamped to ±20.

    For small d, a power series avoids cancellation.
    """
    bounded = log_ratio.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT)
    series = bounded.square() / 2 * (1 + bounded / 3 * (1 + bounded / 4 * (1 + bounded / 5)))
    return torch.where(bounded.abs() < _SERIES_UP_TO, series, bounded.expm1() - bounded)


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The objective that a trainer minimizes.

    Attributes:
        loss: Function that takes the result of the head's method ``inputs``, and returns the loss of each token.
        aggregation: How to combine the losses of tokens into the loss of the batch.
        sequence_norm_tokens: With ``aggregation=sequence_sum_norm``, the number of tokens by which the sum of a
            trajectory's token losses is divided.
        needs_entropy: Whether the loss or its metrics read the entropy.
        needs_proximal: Whether the updates after the first one read ``proximal_logprobs``. The learner step then
            computes this column before the first update.
        needs_trajectories: Whether the loss of a token reads other tokens of its trajectory, on all branches.
        summarize: Function that takes the mean metrics of a learner step, and returns the metrics to report.
    """

    loss: Callable[[Any], LossTerms]
    aggregation: Aggregation = Aggregation.token_mean
    sequence_norm_tokens: int = 0
    needs_entropy: bool = False
    needs_proximal: bool = False
    needs_trajectories: bool = False
    summarize: Callable[[dict[str, float]], dict[str, float]] = dict


def policy_objective(config: AlgorithmConfig) -> Objective:
    """Return the policy's training objective: the loss of ``algorithm.loss``, with the options of ``config``.

    The options add an off-policy correction, a KL penalty and an entropy bonus. Raises `ValueError` for an unknown
    name of a loss.
    """
    policy_loss = LOSSES.get(config.loss)

    def loss(inputs: LossInputs) -> LossTerms:
        # In the first update of a step, the policy's own log-probs may replace the column ``proximal_logprobs``.
        # Later updates of the step need the column ``proximal_logprobs``.
        inputs = replace(inputs, is_proximal=config.num_mini_batches == 1 or config.needs_proximal)
        terms = policy_loss(inputs, config)
        _check_terms(terms, inputs, config)
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


def _check_terms(terms: LossTerms, inputs: LossInputs, config: AlgorithmConfig) -> None:
    """Raise `ValueError` if a loss or metric has the wrong shape, because torch would broadcast such a shape."""
    for name, values in {"per_token": terms.per_token, **terms.metrics}.items():
        if values.shape != inputs.log_probs.shape:
            raise ValueError(
                f"algorithm.loss={config.loss} must return {name} with one number per token, of shape "
                f"{list(inputs.log_probs.shape)}, got {list(values.shape)}; do not sum or average over tokens, "
                "algorithm.aggregation does this"
            )


def behavior_metrics(inputs: LossInputs) -> dict[str, Tensor]:
    """Return metrics of the distance between the policy and the behavior policy: [M] tensors by name.

    - ``ratio``: the token's probability under the policy, divided by its probability under the behavior policy.
      ``ratio_squared`` is the square of this ratio.
    - ``behavior_kl``: KL(behavior ‖ policy) in nats by the k3 estimator, >= 0.
    - ``engine_gap``: distance between the engine's and the learner's log-probs under the same weights. It is 0 at
      tokens that an older version sampled (lag > 0). It is missing without proximal log-probs.
    - ``fresh_tokens``: 1 at tokens of lag 0, else 0; 0 without the column ``is_fresh``. It is missing if ``engine_gap``
      is missing.

    The names do not depend on ``is_fresh``: an empty micro-batch lacks this column, and needs the names of the others.
    """
    behavior = inputs.columns["behavior_logprobs"]
    log_ratio = inputs.log_probs.detach() - behavior
    metrics = _with_square("ratio", bounded_exp(log_ratio)) | {"behavior_kl": k3(log_ratio)}
    if inputs.is_proximal or "proximal_logprobs" in inputs.columns:
        is_fresh = inputs.columns.get("is_fresh", torch.zeros_like(behavior))
        metrics |= {"engine_gap": (inputs.proximal_logprobs - behavior).abs() * is_fresh, _FRESH: is_fresh}
    return metrics


def summarized(metrics: dict[str, float]) -> dict[str, float]:
    """Return a step's mean metrics, in which effective sample sizes replace the mean squared weights.

    ``effective_sample_size`` is computed from ``ratio`` (`behavior_metrics`). ``importance_sample_size`` is computed
    from the importance weights of ``algorithm.weight`` and ``algorithm.masks``. Both are in [0, 1]. ``engine_gap``
    in ``metrics`` is a mean over all tokens in the loss. In the result, ``engine_gap`` is the mean over tokens of lag
    0. It is missing without such tokens.
    """
    sizes = {
        size: effective_sample_size(metrics[name], metrics[name + _SQUARE])
        for name, size in _WEIGHTS.items()
        if name + _SQUARE in metrics
    }
    kept = {name: value for name, value in metrics.items() if not name.endswith(_SQUARE)} | sizes
    if (share := kept.pop(_FRESH, 0.0)) > 0:
        return kept | {"engine_gap": kept["engine_gap"] / share}
    kept.pop("engine_gap", None)  # the mean over the tokens of lag 0 does not exist if there are no such tokens
    return kept


def _with_square(name: str, values: Tensor) -> dict[str, Tensor]:
    return {name: values, name + _SQUARE: values.square()}


def value_objective(clip: float) -> Objective:
    """Return the critic's training objective: the mean of `value_loss` over the batch's tokens."""

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
    """Compute the squared error of the values with PPO's clipping (arXiv 2005.12729, section 3; OpenAI's ppo2).

    The loss is half of max((v - R)², (clip(v, old - c, old + c) - R)²). A value that moved by more than c gets
    no gradient if the clipped value is farther from the return than the value.

    Args:
        values: v, [M] float32, with gradient.
        old_values: Values before the step, [M] float32.
        returns: R, [M] float32.
        clip: c > 0; 0 does not clip.

    Returns:
        A pair: losses [M] float32, and a tensor [M] bool that is True if the clipped error is larger. Example: value 1,
        old value 0, return 2 and c 0.2 give the loss 0.5 · 1.8² = 1.62 and True.
    """
    loss = (values - returns).square()
    if not clip:
        return 0.5 * loss, torch.zeros_like(values, dtype=torch.bool)
    moved = values - old_values
    outside = moved.abs() > clip
    near = torch.where(outside, old_values + moved.clamp(-clip, clip), values)
    clipped = (near - returns).square()
    return 0.5 * torch.maximum(loss, clipped), outside & (clipped > loss)


def _value_summary(metrics: dict[str, float]) -> dict[str, float]:
    variance = metrics["return_mean_squared"] - metrics["return_mean"] ** 2
    left = metrics["error_squared"] - metrics["error"] ** 2
    # If the returns vary less than the rounding error, the explained variance is 0.
    explained = 1.0 - left / variance if variance > 1e-12 * metrics["return_mean_squared"] else 0.0
    hidden = ("loss", "error", "error_squared", "return_mean_squared")
    kept = {name: value for name, value in metrics.items() if name not in hidden}
    return {"value_loss": metrics["loss"], **kept, "explained_variance": explained}
