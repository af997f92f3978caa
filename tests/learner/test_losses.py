import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from learner.config import Aggregation, AlgorithmConfig, Anchor
from learner.losses import LOSSES, LossInputs, LossTerms, negative_log_likelihood, token_weights


def inputs(ratios: list[float], advantages: list[float], lengths: list[int] | None = None) -> LossInputs:
    lengths = lengths or [len(ratios)]
    behavior = torch.full((len(ratios),), -2.0)
    return LossInputs(
        log_probs=(torch.tensor(ratios).log() + behavior).requires_grad_(),
        entropy=torch.zeros(len(ratios)),
        trajectory_index=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        trajectory_lengths=torch.tensor(lengths),
        columns={"behavior_logprobs": behavior, "advantages": torch.tensor(advantages)},
    )


def gradient(terms: LossTerms, of: LossInputs) -> Tensor:
    return torch.autograd.grad(terms.per_token.sum(), of.log_probs)[0]


def test_ppo_clips_only_ratios_outside_the_bounds():
    # One ratio is inside the bounds. Two ratios are above and two are below, each with a positive and a negative
    # advantage.
    given = inputs([1.1, 1.5, 1.5, 0.5, 0.5], [2.0, 1.0, -1.0, -1.0, 1.0])
    terms = LOSSES.get("ppo_clip")(given, AlgorithmConfig(clip_low=0.2, clip_high=0.3))
    assert terms.per_token.tolist() == pytest.approx([-2.2, -1.3, 1.5, 0.8, -0.5], abs=1e-6)
    assert terms.metrics["clip_fraction"].tolist() == [0, 1, 0, 1, 0]
    assert gradient(terms, given).tolist() == pytest.approx([-2.2, 0, 1.5, 0, -0.5], abs=1e-6)


def test_dual_clip_bounds_the_loss_for_negative_advantages():
    given = inputs([5.0, 2.0, 5.0], [-1.0, -1.0, 1.0])
    terms = LOSSES.get("ppo_clip")(given, AlgorithmConfig(dual_clip=3.0))
    assert terms.per_token.tolist() == pytest.approx([3.0, 2.0, -1.2], abs=1e-5)
    assert terms.metrics["dual_clip_fraction"].tolist() == [1, 0, 0]
    assert gradient(terms, given).tolist() == pytest.approx([0.0, 2.0, 0.0], abs=1e-5)


def test_gspo_clips_the_geometric_mean_of_a_sequence():
    given = inputs([4.0, 1.0, 1.1, 1.1], [1.0, 1.0, 2.0, 2.0], lengths=[2, 2])
    terms = LOSSES.get("gspo")(given, AlgorithmConfig(clip_low=0.2, clip_high=0.3))
    assert terms.per_token.tolist() == pytest.approx([-1.3, -1.3, -2.2, -2.2], abs=1e-5)
    assert terms.metrics["clip_fraction"].tolist() == [1, 1, 0, 0]
    assert gradient(terms, given).tolist() == pytest.approx([0.0, 0.0, -2.2, -2.2], abs=1e-5)


def test_gspo_of_a_single_token_equals_ppo():
    for ratio, advantage in ((1.5, 1.0), (1.5, -1.0), (0.5, 1.0), (0.9, -2.0)):
        given = inputs([ratio], [advantage])
        ppo, gspo = (LOSSES.get(name)(given, AlgorithmConfig()) for name in ("ppo_clip", "gspo"))
        assert gspo.per_token.item() == pytest.approx(ppo.per_token.item(), abs=1e-6)
        assert gradient(gspo, given).item() == pytest.approx(gradient(ppo, given).item(), abs=1e-6)


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    given = inputs([1.5, 0.5, 1.1], [2.0, 1.0, -1.0])
    terms = LOSSES.get("cispo")(given, AlgorithmConfig(loss="cispo"))
    assert gradient(terms, given).tolist() == pytest.approx([-2.4, -0.8, 1.1], abs=1e-5)
    assert terms.metrics["clip_fraction"].tolist() == [1, 1, 0]


@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "cispo"])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_policies_far_apart_give_finite_losses_and_gradients(name, advantage):
    given = inputs([1.0, 1.0], [advantage] * 2)
    given = replace(given, columns={**given.columns, "behavior_logprobs": torch.tensor([-300.0, 300.0])})
    terms = LOSSES.get(name)(given, AlgorithmConfig())
    assert torch.isfinite(terms.per_token).all()
    assert torch.isfinite(gradient(terms, given)).all()


def test_gspo_gives_each_token_the_gradient_of_its_sequences_ratio():
    """In equation 13 of arXiv 2507.18071, each token's ratio has the value of the sequence's ratio.

    The derivative of this ratio with respect to the token's log-prob is the ratio itself.
    """
    given = inputs([1.2, 0.9, 1.1], [1.0, 1.0, -2.0], lengths=[2, 1])
    terms = LOSSES.get("gspo")(given, AlgorithmConfig(clip_low=0.5, clip_high=0.5))
    first, second = math.sqrt(1.2 * 0.9), 1.1
    assert terms.per_token.tolist() == pytest.approx([-first, -first, 2 * second], abs=1e-5)
    assert gradient(terms, given).tolist() == pytest.approx([-first, -first, 2 * second], abs=1e-5)


def test_reinforce_is_minus_advantage_times_log_prob():
    given = inputs([1.0, 2.0], [3.0, -1.0])
    terms = LOSSES.get("reinforce")(given, AlgorithmConfig(loss="reinforce"))
    assert terms.per_token.tolist() == pytest.approx([6.0, math.log(2) - 2.0], abs=1e-6)
    assert gradient(terms, given).tolist() == [-3.0, 1.0]


@pytest.mark.parametrize("name", ["ppo_clip", "gspo", "cispo"])
def test_the_ratio_of_a_loss_uses_the_anchor(name):
    given = inputs([3.0, 3.0], [1.0, 1.0])
    proximal = given.columns["behavior_logprobs"] + math.log(2.0)  # the ratio policy / proximal is 1.5
    given = replace(given, columns={**given.columns, "proximal_logprobs": proximal})
    for anchor, ratio in ((Anchor.behavior, 3.0), (Anchor.proximal, 1.5)):
        terms = LOSSES.get(name)(given, AlgorithmConfig(clip_high=9.0, anchor=anchor))
        assert gradient(terms, given).tolist() == pytest.approx([-ratio] * 2, abs=1e-5)


def test_engine_noise_does_not_clip_gspo_with_the_proximal_anchor():
    """Noise of 0.02 nats per token changes the mean of 200 tokens by about 1.4e-3, which exceeds the clip bounds."""
    torch.manual_seed(0)
    given = inputs([1.0] * 200 * 64, [-1.0] * 200 * 64, lengths=[200] * 64)
    noisy = given.columns["behavior_logprobs"] + 0.02 * torch.randn(200 * 64)
    given = replace(given, columns={**given.columns, "behavior_logprobs": noisy, "proximal_logprobs": noisy * 0 - 2.0})
    bounds = {"clip_low": 3e-4, "clip_high": 4e-4}
    clipped = {
        anchor: LOSSES.get("gspo")(given, AlgorithmConfig(anchor=anchor, **bounds)).metrics["clip_fraction"].mean()
        for anchor in Anchor
    }
    assert clipped[Anchor.behavior] > 0.3
    assert clipped[Anchor.proximal] == 0.0


def test_supervised_loss_is_minus_the_log_prob():
    assert negative_log_likelihood(inputs([1.0], [0.0])).per_token.tolist() == [2.0]


def test_each_aggregation_gives_its_golden_weights():
    given = inputs([1.0] * 4, [0.0] * 4, lengths=[1, 3])
    tokens = token_weights(given, Aggregation.token_mean, num_tokens=8, num_trajectories=4)
    sequences = token_weights(given, Aggregation.sequence_mean, num_tokens=8, num_trajectories=4)
    constant = token_weights(
        given, Aggregation.sequence_sum_norm, num_tokens=8, num_trajectories=4, sequence_norm_tokens=10
    )
    assert tokens.tolist() == [0.125] * 4
    assert constant.tolist() == pytest.approx([1 / 40] * 4)
    assert sequences.tolist() == pytest.approx([1 / 4, 1 / 12, 1 / 12, 1 / 12])
