import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.advantages import AdaptiveKLCoefficient
from learner.config import Aggregation, AlgorithmConfig, Correction, KLEstimator
from learner.losses import (
    LossInputs,
    TokenInputs,
    effective_sample_size,
    importance_weights,
    kl_penalty,
    policy_objective,
    summarized,
)

WEIGHTS = torch.tensor([0.25, 1.0, 4.0, 3.0])


def trajectories(*lengths: int) -> TokenInputs:
    index = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return TokenInputs(trajectory_index=index, trajectory_lengths=torch.tensor(lengths), columns={})


@pytest.mark.parametrize(
    ("correction", "want"),
    [
        (Correction.none, [1.0, 1.0, 1.0, 1.0]),
        (Correction.untruncated, [0.25, 1.0, 4.0, 3.0]),
        (Correction.token_truncated, [0.25, 1.0, 2.0, 2.0]),
        (Correction.sequence_truncated, [1.0, 1.0, 1.0, 2.0]),
        (Correction.token_masked, [0.0, 1.0, 0.0, 0.0]),
        (Correction.sequence_rejected, [1.0, 1.0, 1.0, 0.0]),
    ],
)
def test_each_correction_gives_its_golden_weights(correction: Correction, want: list[float]) -> None:
    config = AlgorithmConfig(correction=correction, correction_low=0.5, correction_high=2.0)
    assert importance_weights(WEIGHTS.log(), trajectories(3, 1), config).tolist() == pytest.approx(want)


@given(st.lists(st.floats(-300, 300), min_size=1, max_size=8), st.sampled_from(list(Correction)))
def test_weights_stay_finite_however_far_the_policies_are(log_weights: list[float], correction: Correction) -> None:
    config = AlgorithmConfig(correction=correction)
    weights = importance_weights(torch.tensor(log_weights), trajectories(len(log_weights)), config)
    assert torch.isfinite(weights).all()
    assert (weights >= 0).all()


def inputs(policy: list[float], **columns: list[float]) -> LossInputs:
    size = len(policy)
    return LossInputs(
        log_probs=torch.tensor(policy, requires_grad=True),
        entropy=torch.full((size,), 0.5, requires_grad=True),
        trajectory_index=torch.zeros(size, dtype=torch.int64),
        trajectory_lengths=torch.tensor([size]),
        columns={name: torch.tensor(values) for name, values in columns.items()},
    )


def test_decoupled_ppo_weighs_the_clipped_ratio_by_proximal_over_behavior() -> None:
    given_inputs = inputs(
        [math.log(0.6), math.log(0.6)],
        behavior_logprobs=[math.log(0.2)] * 2,
        proximal_logprobs=[math.log(0.4)] * 2,
        advantages=[1.0, -1.0],
    )
    config = AlgorithmConfig(correction=Correction.untruncated, correction_high=9.0)
    terms = policy_objective(config).loss(given_inputs)
    assert terms.per_token.tolist() == pytest.approx([-2 * 1.2, 2 * 1.5], abs=1e-5)  # ratio 1.5, weight 2
    assert terms.metrics["importance_weight"].tolist() == pytest.approx([2.0, 2.0])
    assert terms.metrics["ratio"].tolist() == pytest.approx([3.0, 3.0])
    (gradient,) = torch.autograd.grad(terms.per_token.sum(), given_inputs.log_probs)
    assert gradient.tolist() == pytest.approx([0.0, 3.0], abs=1e-5)


def test_in_a_step_of_one_update_the_ratio_is_one_and_the_weight_is_all() -> None:
    given_inputs = inputs([math.log(0.6)], behavior_logprobs=[math.log(0.2)], advantages=[1.0])
    terms = policy_objective(AlgorithmConfig(correction=Correction.token_truncated)).loss(given_inputs)
    assert terms.per_token.tolist() == pytest.approx([-2.0])  # min(3, 2) * 1
    assert torch.autograd.grad(terms.per_token.sum(), given_inputs.log_probs)[0].tolist() == pytest.approx([-2.0])


def test_masked_tokens_are_counted_and_teach_nothing() -> None:
    given_inputs = inputs([-1.0, -1.0], behavior_logprobs=[-1.0, -4.0], advantages=[1.0, 1.0])
    terms = policy_objective(AlgorithmConfig(correction=Correction.token_masked)).loss(given_inputs)
    assert terms.metrics["masked_fraction"].tolist() == [0.0, 1.0]
    assert torch.autograd.grad(terms.per_token.sum(), given_inputs.log_probs)[0].tolist() == [-1.0, 0.0]


def test_entropy_bonus_and_kl_penalty_are_added() -> None:
    columns = {"behavior_logprobs": [-1.0], "advantages": [0.0], "reference_logprobs": [-2.0]}
    given_inputs = inputs([-1.0], **columns)
    config = AlgorithmConfig(entropy_coef=0.1, kl_coef=2.0, kl_estimator=KLEstimator.k2)
    terms = policy_objective(config).loss(given_inputs)
    assert terms.per_token.tolist() == pytest.approx([2.0 * 0.5 - 0.1 * 0.5])
    gradients = torch.autograd.grad(terms.per_token.sum(), [given_inputs.log_probs, given_inputs.entropy])
    assert [g.item() for g in gradients] == pytest.approx([2.0, -0.1])
    assert terms.metrics["reference_kl"].tolist() == [0.5]


def test_the_behavior_kl_is_k3_and_squares_become_sample_sizes() -> None:
    given_inputs = inputs([math.log(0.5), math.log(0.1)], behavior_logprobs=[math.log(0.25)] * 2, advantages=[1.0, 1.0])
    metrics = policy_objective(AlgorithmConfig()).loss(given_inputs).metrics
    assert metrics["behavior_kl"].tolist() == pytest.approx([1 - math.log(2), -0.6 + math.log(2.5)], abs=1e-6)
    means = summarized({name: value.mean().item() for name, value in metrics.items()})
    assert means["effective_sample_size"] == pytest.approx(1.2**2 / ((4 + 0.16) / 2), rel=1e-5)
    assert not any(name.endswith("squared") for name in means)


def test_effective_sample_size() -> None:
    assert effective_sample_size(1.0, 1.0) == 1.0
    assert effective_sample_size(0.5, 1.0) == 0.25
    assert effective_sample_size(0.0, 0.0) == 0.0


@pytest.mark.parametrize(
    ("estimator", "want"),
    [
        (KLEstimator.k1, [1.0, -1.0, 0.0]),
        (KLEstimator.k2, [0.5, 0.5, 0.0]),
        (KLEstimator.k3, [math.exp(-1), math.e - 2, 0.0]),
        (KLEstimator.low_variance, [math.exp(-1), math.e - 2, 0.0]),
    ],
)
def test_each_kl_estimator_gives_its_golden_numbers(estimator: KLEstimator, want: list[float]) -> None:
    policy, reference = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-2.0, -1.0, -3.0])
    assert kl_penalty(policy, reference, estimator).tolist() == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize(
    ("estimator", "want"),
    [
        (KLEstimator.k1, [1.0, 1.0]),
        (KLEstimator.k2, [1.0, -1.0]),
        (KLEstimator.k3, [1 - math.exp(-1), 1 - math.e]),
        (KLEstimator.low_variance, [1 - math.exp(-1), 1 - math.e]),
    ],
)
def test_each_kl_estimator_has_its_own_gradient(estimator: KLEstimator, want: list[float]) -> None:
    policy, reference = torch.tensor([-1.0, -2.0], requires_grad=True), torch.tensor([-2.0, -1.0])
    (gradient,) = torch.autograd.grad(kl_penalty(policy, reference, estimator).sum(), policy)
    assert gradient.tolist() == pytest.approx(want, abs=1e-6)


def test_no_gradient_flows_through_a_correction() -> None:
    for correction in (Correction.untruncated, Correction.token_truncated, Correction.sequence_truncated):
        given_inputs = inputs([math.log(0.5)], behavior_logprobs=[math.log(0.4)], advantages=[1.0])
        terms = policy_objective(AlgorithmConfig(correction=correction, loss="reinforce")).loss(given_inputs)
        (gradient,) = torch.autograd.grad(terms.per_token.sum(), given_inputs.log_probs)
        assert gradient.tolist() == pytest.approx([-1.25])  # the weight alone, not the weight's own slope


def test_the_low_variance_estimator_is_bounded() -> None:
    far = kl_penalty(torch.tensor([-90.0]), torch.tensor([0.0]), KLEstimator.low_variance)
    assert far.tolist() == [10.0]


@pytest.mark.parametrize("estimator", [KLEstimator.k3, KLEstimator.low_variance])
def test_k3_keeps_a_small_divergence_and_stays_finite_beside_a_large_one(estimator: KLEstimator) -> None:
    distances = [1e-7, -1e-5, 1e-4, 0.05, 90.0, -90.0]
    policy = torch.zeros(6, requires_grad=True)
    values = kl_penalty(policy, torch.tensor(distances), estimator)
    far = [10.0, 10.0] if estimator is KLEstimator.low_variance else [math.expm1(20) - 20, math.expm1(-20) + 20]
    want = [0.5e-14, 0.5e-10 * (1 - 1e-5 / 3), 0.5e-8 * (1 + 1e-4 / 3), math.expm1(0.05) - 0.05, *far]
    assert values.tolist() == pytest.approx(want, rel=1e-5, abs=0)
    (gradient,) = torch.autograd.grad(values.sum(), policy)
    slopes = [-math.expm1(distance) for distance in distances[:4]]
    assert gradient.tolist() == pytest.approx([*slopes, 0.0, 0.0], rel=1e-5, abs=0)


def test_the_adaptive_coefficient_follows_the_target() -> None:
    coefficient = AdaptiveKLCoefficient(initial=0.1, target=6.0, horizon=10_000)
    assert coefficient.update(12.0, 256) == pytest.approx(0.1 * (1 + 0.2 * 0.0256))
    assert coefficient.update(5.4, 1000) == pytest.approx(0.1 * 1.00512 * (1 - 0.1 * 0.1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dual_clip": 0.5}, "dual_clip must be > 1, got 0.5"),
        ({"aggregation": Aggregation.sequence_sum_norm}, "sequence_norm_tokens >= 1, got 0"),
        ({"correction_low": 1.5}, "both sides of 1"),
        ({"overlong_buffer_tokens": 4}, "overlong_buffer_tokens must be in"),
        ({"num_mini_batches": 0}, "num_mini_batches must be >= 1"),
        ({"num_mini_batches": 3, "groups_per_step": 2}, "num_mini_batches must be <= algorithm.groups_per_step"),
        ({"kl_target": 0.1}, "kl_target=0.1 adapts algorithm.kl_reward_coef, which is 0"),
        ({"kl_horizon": 0}, "kl_horizon must be >= 1"),
        ({"gae_lambda": 1.5}, "gae_lambda must be in \\[0, 1\\], got 1.5"),
        ({"kl_coef": float("nan")}, "kl_coef must be >= 0, got nan"),
    ],
)
def test_a_bad_option_is_named(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AlgorithmConfig(**options)


def test_the_example_of_a_users_own_loss_works(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    (tmp_path / "my_losses.py").write_text(page.split("```python\n")[1].split("```")[0])
    objective = policy_objective(AlgorithmConfig(loss=f"{tmp_path}/my_losses.py:bounded_reinforce")).loss
    given_inputs = inputs([-2.0, -2.0], behavior_logprobs=[-2.0, -2.0], advantages=[5.0, -0.5])
    assert objective(given_inputs).per_token.tolist() == [2.0, -1.0]
