"""Policy losses: a number for each token of a micro-batch, and how the numbers become the loss of a whole batch.

Letters: M tokens in the loss of a micro-batch. A loss knows nothing of micro-batches or ranks: `token_weights` give
each token its share of the whole batch, so the sum is the same however the batch is split.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from .config import Aggregation, AlgorithmConfig
from .registry import Registry


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """What a loss sees of a micro-batch.

    Attributes:
        log_probs: [M] float32, with gradient.
        entropy: [M] float32, with gradient.
        sequence_index: [M] int64, sequence of each token, counted within the micro-batch.
        loss_lengths: [number of sequences] int64, tokens in the loss of each sequence.
        columns: [M] float32 by name: ``behavior_logprobs`` and ``advantages`` in RL.
    """

    log_probs: Tensor
    entropy: Tensor
    sequence_index: Tensor
    loss_lengths: Tensor
    columns: Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class LossTerms:
    """What a loss gives back.

    Attributes:
        per_token: [M] float32, with gradient.
        metrics: [M] float32 by name, without gradient; each is reported as its mean over the batch's tokens.
    """

    per_token: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


class PolicyLoss(Protocol):
    """A loss by its options."""

    def __call__(self, inputs: LossInputs, config: AlgorithmConfig) -> LossTerms:
        """See `LossInputs` and `LossTerms`."""
        ...


LOSSES: Registry[PolicyLoss] = Registry("algorithm.loss")


@LOSSES.register("ppo_clip")
def ppo_clip(inputs: LossInputs, config: AlgorithmConfig) -> LossTerms:
    """PPO's clipped surrogate (arXiv 1707.06347, equation 7), against the behaviour policy.

    -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = policy / behaviour. Deviation: the paper's old policy is
    the one before the update; here it is the one that sampled the token, whichever version that was, so that one
    optimizer update a batch still corrects for the lag. ``clip_high > clip_low`` is clip-higher (DAPO, arXiv
    2503.14476, section 3.1).

    Example: ratio 1.5, advantage 1, clip 0.2 gives -1.2 and no gradient; advantage -1 gives 1.5.
    """
    advantages = inputs.columns["advantages"]
    log_ratio = inputs.log_probs - inputs.columns["behavior_logprobs"]
    ratio = log_ratio.exp()
    surrogate = ratio * advantages
    clipped = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high) * advantages
    metrics = {"clip_fraction": (clipped < surrogate).float(), **behavior_metrics(log_ratio)}
    return LossTerms(per_token=-torch.minimum(surrogate, clipped), metrics=metrics)


def behavior_metrics(log_ratio: Tensor) -> dict[str, Tensor]:
    """How far the policy is from the one that sampled.

    Args:
        log_ratio: [M] policy minus behaviour log-prob.

    Returns:
        ``ratio``, and ``behavior_kl``: KL(behaviour ‖ policy) in nats by the k3 estimator, r - 1 - log r
        (http://joschu.net/blog/kl-approx.html), each value >= 0.
    """
    log_ratio = log_ratio.detach()
    ratio = log_ratio.exp()
    return {"ratio": ratio, "behavior_kl": ratio - 1.0 - log_ratio}


def negative_log_likelihood(inputs: LossInputs) -> LossTerms:
    """Supervised loss: minus the log-prob of each token, in nats."""
    return LossTerms(per_token=-inputs.log_probs)


def token_weights(inputs: LossInputs, aggregation: Aggregation, *, num_tokens: int, num_sequences: int) -> Tensor:
    """Share of each token in the loss of the whole batch.

    Args:
        inputs: A micro-batch.
        aggregation: ``token_mean``: every token of the batch counts the same. ``sequence_mean``: every sequence
            counts the same, and every token within it.
        num_tokens: Tokens in the loss of the whole batch, over all micro-batches and ranks.
        num_sequences: Its sequences with at least one such token.

    Returns:
        [M] float32; over the whole batch they sum to 1.
    """
    if aggregation is Aggregation.token_mean:
        return torch.full_like(inputs.log_probs, 1.0 / max(1, num_tokens), requires_grad=False)
    return 1.0 / (inputs.loss_lengths[inputs.sequence_index] * max(1, num_sequences)).float()
