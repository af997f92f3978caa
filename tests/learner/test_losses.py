import math

import pytest
import torch
from torch import Tensor

from learner.config import Aggregation, AlgorithmConfig
from learner.losses import LOSSES, LossInputs, LossTerms, negative_log_likelihood, token_weights


def inputs(ratios: list[float], advantages: list[float], lengths: list[int] | None = None) -> LossInputs:
    lengths = lengths or [len(ratios)]
    behavior = torch.full((len(ratios),), -2.0)
    return LossInputs(
        log_probs=(torch.tensor(ratios).log() + behavior).requires_grad_(),
        entropy=torch.zeros(len(ratios)),
        sequence_index=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        loss_lengths=torch.tensor(lengths),
        columns={"behavior_logprobs": behavior, "advantages": torch.tensor(advantages)},
    )


def gradient(terms: LossTerms, of: LossInputs) -> Tensor:
    return torch.autograd.grad(terms.per_token.sum(), of.log_probs)[0]


def test_ppo_clips_what_would_go_too_far_and_nothing_else() -> None:
    #        inside  up, wanted  up, unwanted  down, wanted  down, unwanted
    given = inputs([1.1, 1.5, 1.5, 0.5, 0.5], [2.0, 1.0, -1.0, -1.0, 1.0])
    terms = LOSSES.get("ppo_clip")(given, AlgorithmConfig(clip_low=0.2, clip_high=0.3))
    assert terms.per_token.tolist() == pytest.approx([-2.2, -1.3, 1.5, 0.8, -0.5], abs=1e-6)
    assert terms.metrics["clip_fraction"].tolist() == [0, 1, 0, 1, 0]
    assert gradient(terms, given).tolist() == pytest.approx([-2.2, 0, 1.5, 0, -0.5], abs=1e-6)


def test_behavior_kl_is_the_k3_estimator() -> None:
    terms = LOSSES.get("ppo_clip")(inputs([1.0, 2.0, 0.25], [1.0, 1.0, 1.0]), AlgorithmConfig())
    want = [0.0, 1.0 - math.log(2.0), -0.75 + math.log(4.0)]
    assert terms.metrics["behavior_kl"].tolist() == pytest.approx(want, abs=1e-6)
    assert terms.metrics["ratio"].tolist() == pytest.approx([1.0, 2.0, 0.25])


def test_supervised_loss_is_minus_the_log_prob() -> None:
    assert negative_log_likelihood(inputs([1.0], [0.0])).per_token.tolist() == [2.0]


def test_token_mean_counts_tokens_and_sequence_mean_counts_sequences() -> None:
    given = inputs([1.0] * 4, [0.0] * 4, lengths=[1, 3])
    tokens = token_weights(given, Aggregation.token_mean, num_tokens=8, num_sequences=4)
    sequences = token_weights(given, Aggregation.sequence_mean, num_tokens=8, num_sequences=4)
    assert tokens.tolist() == [0.125] * 4
    assert sequences.tolist() == pytest.approx([1 / 4, 1 / 12, 1 / 12, 1 / 12])
