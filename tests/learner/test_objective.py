import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.advantages import AdaptiveKLCoefficient
from learner.config import Aggregation, AlgorithmConfig, Anchor, KLEstimator, Mask, Weight
from learner.losses import (
    LossInputs,
    TokenInputs,
    effective_sample_size,
    importance_weights,
    kept_tokens,
    kl_penalty,
    policy_objective,
    summarized,
)

WEIGHTS = torch.tensor([0.25, 1.0, 4.0, 3.0])


def trajectories(*lengths: int) -> TokenInputs:
    index = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return TokenInputs(trajectory_index=index, trajectory_lengths=torch.tensor(lengths), columns={})


def proximal(**options) -> AlgorithmConfig:
    return AlgorithmConfig(anchor=Anchor.proximal, **options)


@pytest.mark.parametrize(
    ("weight", "cap", "want"),
    [
        (Weight.none, 2.0, [1.0, 1.0, 1.0, 1.0]),
        (Weight.token, 0.0, [0.25, 1.0, 4.0, 3.0]),
        (Weight.token, 2.0, [0.25, 1.0, 2.0, 2.0]),
        (Weight.sequence, 0.0, [1.0, 1.0, 1.0, 3.0]),
        (Weight.sequence, 2.0, [1.0, 1.0, 1.0, 2.0]),
    ],
)
def test_each_importance_weight_gives_its_golden_numbers(weight, cap, want):
    config = proximal(weight=weight, weight_cap=cap)
    assert importance_weights(WEIGHTS.log(), trajectories(3, 1), config).tolist() == pytest.approx(want)


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({"masks": []}, [1, 1, 1, 1]),
        ({"masks": [Mask.token]}, [0, 1, 1, 1]),
        ({"masks": [Mask.token], "token_band": (0.2, 3.5)}, [1, 1, 0, 1]),
        ({"masks": [Mask.sequence]}, [1, 1, 1, 0]),  # the products of the weights of the two trajectories are 1 and 3
        ({"masks": [Mask.sequence], "sequence_band": (0.5, 3.5)}, [1, 1, 1, 1]),
        ({"masks": [Mask.geometric]}, [1, 1, 1, 0]),  # the geometric means of the two trajectories are 1 and 3
        ({"masks": [Mask.k3]}, [0, 0, 0, 0]),  # k3: (0.25 + 1 + 4) / 3 - 1 - 0 = 0.75, then 3 - 1 - log 3 = 0.90
        ({"masks": [Mask.token, Mask.geometric]}, [0, 1, 1, 0]),
    ],
)
def test_each_mask_selects_its_golden_tokens(options, want):
    config = AlgorithmConfig(**options)
    assert kept_tokens(WEIGHTS.log(), trajectories(3, 1), config).int().tolist() == want


def test_the_geometric_mask_is_equally_strict_for_long_and_short_trajectories():
    """A geometric mean of 1.01 is outside the band of the mask ``geometric`` at any length.

    The product of 1.01 over all tokens is outside the band of the mask ``sequence`` only from 70 tokens on.
    """
    for length, product in ((10, 1), (60, 1), (80, 0)):
        log_weights = torch.full((length,), math.log(1.01))
        for mask, want in ((Mask.geometric, 0), (Mask.sequence, product)):
            kept = kept_tokens(log_weights, trajectories(length), AlgorithmConfig(masks=[mask]))
            assert kept.int().tolist() == [want] * length


def test_k3_rejects_a_divergence_that_cancels_in_the_geometric_mean():
    """Half of the tokens have a log importance weight of 0.2, and half have -0.2.

    So the geometric mean is 1, and the divergence k3 is cosh(0.2) - 1 = 0.0201.
    """
    log_weights = torch.tensor([0.2, -0.2] * 50)
    for options, want in (
        ({"masks": [Mask.geometric]}, True),
        ({"masks": [Mask.k3], "k3_max": 0.0202}, True),
        ({"masks": [Mask.k3], "k3_max": 0.0200}, False),
    ):
        assert kept_tokens(log_weights, trajectories(100), AlgorithmConfig(**options)).all() == want


@given(
    st.lists(st.floats(-300, 300), min_size=1, max_size=8),
    st.sampled_from(list(Weight)),
    st.sampled_from([0.0, 1.0, 2.0]),
    st.sets(st.sampled_from(list(Mask))),
)
def test_weights_stay_finite_for_very_different_policies(log_weights, weight, cap, masks):
    config = proximal(weight=weight, weight_cap=cap, masks=sorted(masks))
    given_weights, of = torch.tensor(log_weights), trajectories(len(log_weights))
    weights = importance_weights(given_weights, of, config)
    assert torch.isfinite(weights).all()
    assert (weights >= 0).all()
    assert kept_tokens(given_weights, of, config).dtype is torch.bool


def test_masks_do_not_change_the_ratio_that_the_loss_clips():
    """Without a proximal anchor, the loss clips the ratio policy / behavior, with and without masks.

    With the anchor and one update per step, the loss clips the ratio policy / proximal, which is 1.
    """
    columns = {"behavior_logprobs": [math.log(0.2)] * 2, "advantages": [1.0, 1.0]}
    given_inputs = inputs([math.log(0.3), math.log(0.21)], **columns)
    masked = AlgorithmConfig(masks=[Mask.token], token_band=(0.5, 2.0))
    for config, clipped in ((AlgorithmConfig(), [1, 0]), (masked, [1, 0]), (proximal(), [0, 0])):
        assert policy_objective(config).loss(given_inputs).metrics["clip_fraction"].tolist() == clipped


def inputs(policy: list[float], **columns: list[float]) -> LossInputs:
    size = len(policy)
    return LossInputs(
        log_probs=torch.tensor(policy, requires_grad=True),
        entropy=torch.full((size,), 0.5, requires_grad=True),
        trajectory_index=torch.zeros(size, dtype=torch.int64),
        trajectory_lengths=torch.tensor([size]),
        columns={name: torch.tensor(values) for name, values in columns.items()},
    )


def test_decoupled_ppo_multiplies_the_clipped_ratio_by_the_importance_weight():
    given_inputs = inputs(
        [math.log(0.6), math.log(0.6)],
        behavior_logprobs=[math.log(0.2)] * 2,
        proximal_logprobs=[math.log(0.4)] * 2,
        advantages=[1.0, -1.0],
    )
    config = proximal(weight=Weight.token, weight_cap=0.0)
    terms = policy_objective(config).loss(given_inputs)
    # The clipped ratio is policy / proximal = 1.5. The importance weight is proximal / behavior = 2.
    assert terms.per_token.tolist() == pytest.approx([-2 * 1.2, 2 * 1.5], abs=1e-5)
    assert terms.metrics["importance_weight"].tolist() == pytest.approx([2.0, 2.0])
    assert terms.metrics["ratio"].tolist() == pytest.approx([3.0, 3.0])
    (gradient,) = torch.autograd.grad(terms.per_token.sum(), given_inputs.log_probs)
    assert gradient.tolist() == pytest.approx([0.0, 3.0], abs=1e-5)


def test_with_one_update_per_step_only_the_importance_weight_scales_the_advantage():
    given_inputs = inputs([math.log(0.6)], behavior_logprobs=[math.log(0.2)], advantages=[1.0])
    terms = policy_objective(proximal(weight=Weight.token, weight_cap=2.0)).loss(given_inputs)
    assert terms.per_token.tolist() == pytest.approx([-2.0])  # min(3, 2) * 1
    assert torch.autograd.grad(terms.per_token.sum(), given_inputs.log_probs)[0].tolist() == pytest.approx([-2.0])


def test_masked_tokens_are_counted_and_have_no_gradient():
    given_inputs = inputs([-1.0, -1.0], behavior_logprobs=[-1.0, -4.0], advantages=[1.0, 1.0])
    terms = policy_objective(proximal(weight=Weight.token, masks=[Mask.token])).loss(given_inputs)
    assert terms.metrics["masked_fraction"].tolist() == [0.0, 1.0]
    assert torch.autograd.grad(terms.per_token.sum(), given_inputs.log_probs)[0].tolist() == [-1.0, 0.0]


def test_entropy_bonus_and_kl_penalty_are_added():
    columns = {"behavior_logprobs": [-1.0], "advantages": [0.0], "reference_logprobs": [-2.0]}
    given_inputs = inputs([-1.0], **columns)
    config = AlgorithmConfig(entropy_coef=0.1, kl_coef=2.0, kl_estimator=KLEstimator.k2)
    terms = policy_objective(config).loss(given_inputs)
    assert terms.per_token.tolist() == pytest.approx([2.0 * 0.5 - 0.1 * 0.5])
    gradients = torch.autograd.grad(terms.per_token.sum(), [given_inputs.log_probs, given_inputs.entropy])
    assert [g.item() for g in gradients] == pytest.approx([2.0, -0.1])
    assert terms.metrics["reference_kl"].tolist() == [0.5]


def test_metrics_include_the_k3_behavior_kl_and_the_effective_sample_size():
    given_inputs = inputs([math.log(0.5), math.log(0.1)], behavior_logprobs=[math.log(0.25)] * 2, advantages=[1.0, 1.0])
    metrics = policy_objective(AlgorithmConfig()).loss(given_inputs).metrics
    assert metrics["behavior_kl"].tolist() == pytest.approx([1 - math.log(2), -0.6 + math.log(2.5)], abs=1e-6)
    means = summarized({name: value.mean().item() for name, value in metrics.items()})
    assert means["effective_sample_size"] == pytest.approx(1.2**2 / ((4 + 0.16) / 2), rel=1e-5)
    assert not any(name.endswith("squared") for name in means)


def test_the_engine_gap_is_the_mean_distance_over_tokens_of_lag_0():
    columns = {"behavior_logprobs": [-1.0, -1.0, -1.0, -1.0], "advantages": [1.0] * 4, "is_fresh": [1.0, 0.0, 1.0, 0.0]}
    metrics = policy_objective(AlgorithmConfig()).loss(inputs([-1.25, -9.0, -0.25, -9.0], **columns)).metrics
    means = summarized({name: value.mean().item() for name, value in metrics.items()})
    assert means["engine_gap"] == pytest.approx((0.25 + 0.75) / 2)
    assert "fresh_tokens" not in means


def test_the_engine_gap_is_missing_without_a_token_of_lag_0():
    columns = {"behavior_logprobs": [-1.0], "advantages": [1.0], "is_fresh": [0.0]}
    metrics = policy_objective(AlgorithmConfig()).loss(inputs([-9.0], **columns)).metrics
    means = summarized({name: value.mean().item() for name, value in metrics.items()})
    assert not means.keys() & {"engine_gap", "fresh_tokens"}


@pytest.mark.parametrize(("options", "is_known"), [({}, False), ({"anchor": Anchor.proximal}, True)])
def test_later_updates_measure_the_engine_gap_only_before_the_step(options, is_known):
    columns = {"behavior_logprobs": [-1.0], "advantages": [1.0], "is_fresh": [1.0]}
    columns |= {"proximal_logprobs": [-1.5]} if is_known else {}
    metrics = policy_objective(AlgorithmConfig(num_mini_batches=2, **options)).loss(inputs([-9.0], **columns)).metrics
    assert ("engine_gap" in metrics) == is_known
    if is_known:
        assert metrics["engine_gap"].tolist() == [0.5]


def test_the_effective_sample_size_has_golden_numbers():
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
def test_each_kl_estimator_gives_its_golden_numbers(estimator, want):
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
def test_each_kl_estimator_has_its_own_gradient(estimator, want):
    policy, reference = torch.tensor([-1.0, -2.0], requires_grad=True), torch.tensor([-2.0, -1.0])
    (gradient,) = torch.autograd.grad(kl_penalty(policy, reference, estimator).sum(), policy)
    assert gradient.tolist() == pytest.approx(want, abs=1e-6)


def test_no_gradient_flows_through_a_weight():
    for weight in (Weight.token, Weight.sequence):
        given_inputs = inputs([math.log(0.5)], behavior_logprobs=[math.log(0.4)], advantages=[1.0])
        terms = policy_objective(AlgorithmConfig(weight=weight, loss="reinforce")).loss(given_inputs)
        (gradient,) = torch.autograd.grad(terms.per_token.sum(), given_inputs.log_probs)
        assert gradient.tolist() == pytest.approx([-1.25])  # the importance weight has no gradient


def test_the_low_variance_estimator_is_bounded():
    far = kl_penalty(torch.tensor([-90.0]), torch.tensor([0.0]), KLEstimator.low_variance)
    assert far.tolist() == [10.0]


@pytest.mark.parametrize("estimator", [KLEstimator.k3, KLEstimator.low_variance])
def test_k3_is_exact_for_small_divergences_and_bounded_for_large_ones(estimator):
    distances = [1e-7, -1e-5, 1e-4, 0.05, 90.0, -90.0]
    policy = torch.zeros(6, requires_grad=True)
    values = kl_penalty(policy, torch.tensor(distances), estimator)
    far = [10.0, 10.0] if estimator is KLEstimator.low_variance else [math.expm1(20) - 20, math.expm1(-20) + 20]
    want = [0.5e-14, 0.5e-10 * (1 - 1e-5 / 3), 0.5e-8 * (1 + 1e-4 / 3), math.expm1(0.05) - 0.05, *far]
    assert values.tolist() == pytest.approx(want, rel=1e-5, abs=0)
    (gradient,) = torch.autograd.grad(values.sum(), policy)
    slopes = [-math.expm1(distance) for distance in distances[:4]]
    assert gradient.tolist() == pytest.approx([*slopes, 0.0, 0.0], rel=1e-5, abs=0)


@pytest.mark.parametrize("num_samples", [10_000, 60_000, 10**9])
def test_the_adaptive_coefficient_stays_positive_for_batches_above_the_horizon(num_samples):
    """The paper's factor 1 - 0.2 n / horizon would be negative (-0.2) for a batch of n = 60000 samples."""
    coefficient = AdaptiveKLCoefficient(initial=0.1, target=6.0, horizon=10_000)
    assert coefficient.update(0.0, num_samples) == pytest.approx(0.08)
    assert coefficient.update(600.0, num_samples) == pytest.approx(0.096)


def test_the_adaptive_coefficient_ignores_a_non_finite_divergence():
    coefficient = AdaptiveKLCoefficient(initial=0.1, target=6.0, horizon=10_000)
    assert [coefficient.update(value, 256) for value in (math.nan, math.inf)] == [0.1, 0.1]


def test_the_adaptive_coefficient_rises_above_the_target_and_falls_below_it():
    coefficient = AdaptiveKLCoefficient(initial=0.1, target=6.0, horizon=10_000)
    assert coefficient.update(12.0, 256) == pytest.approx(0.1 * (1 + 0.2 * 0.0256))
    assert coefficient.update(5.4, 1000) == pytest.approx(0.1 * 1.00512 * (1 - 0.1 * 0.1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dual_clip": 0.5}, "dual_clip must be > 1, got 0.5"),
        ({"aggregation": Aggregation.sequence_sum_norm}, "sequence_norm_tokens >= 1, got 0"),
        ({"weight": Weight.token}, "weight must be none with algorithm.anchor=behavior, got token"),
        ({"weight_cap": 0.5}, r"weight_cap must be in \[1, 10\], or 0 for no truncation, got 0.5"),
        ({"weight_cap": 1e6}, r"weight_cap must be in \[1, 10\], or 0 for no truncation"),
        ({"token_band": (1.5, 2.0)}, r"token_band must contain 1 and lie in \[0.1, 10\], got \[1.5, 2\]"),
        ({"sequence_band": (0.0, 2.0)}, r"sequence_band must contain 1 and lie in \[0.1, 10\], got \[0, 2\]"),
        ({"geometric_band": (0.5, 2.0)}, r"geometric_band must contain 1 and lie in \[0.9, 1.1\], got \[0.5, 2\]"),
        ({"k3_max": 1.0}, r"k3_max must be in \(0, 0.1\], got 1.0"),
        ({"overlong_buffer_tokens": 4}, "overlong_buffer_tokens must be in"),
        ({"num_mini_batches": 0}, "num_mini_batches must be >= 1"),
        ({"num_mini_batches": 3, "groups_per_step": 2}, "num_mini_batches must be <= algorithm.groups_per_step"),
        ({"kl_target": 0.1}, "kl_target=0.1 needs algorithm.kl_reward_coef > 0, got 0"),
        ({"kl_horizon": 0}, "kl_horizon must be >= 1"),
        ({"loss": "gspo"}, "clip_low and clip_high must be <= 0.05 with algorithm.loss=gspo, got 0.2 and 0.2"),
        (
            {"loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4},
            "anchor must be proximal with algorithm.loss=gspo and bounds below 1e-3, got behavior",
        ),
        ({"kl_coef": 0.1, "kl_estimator": KLEstimator.k1}, "kl_estimator must be k2, k3 or low_variance .*, got k1"),
        ({"loss": "reinforce", "anchor": Anchor.proximal}, "anchor must be behavior with .*reinforce, got proximal"),
        ({"gae_lambda": 0.9}, "gae_lambda=0.9 needs one of the advantages"),
        ({"gamma": 0.9}, "gamma=0.9 needs one of the advantages"),
        ({"gae_lambda": 1.5}, "gae_lambda must be in \\[0, 1\\], got 1.5"),
        ({"kl_coef": float("nan")}, "kl_coef must be >= 0, got nan"),
    ],
)
def test_the_error_names_a_bad_option(options, message):
    with pytest.raises(ValueError, match=message):
        AlgorithmConfig(**options)


def test_the_custom_loss_in_the_docs_works(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    (tmp_path / "my_losses.py").write_text(page.split("```python\n")[1].split("```")[0])
    objective = policy_objective(AlgorithmConfig(loss=f"{tmp_path}/my_losses.py:bounded_reinforce"))
    assert not objective.needs_trajectories, "a loss marked with by_token must not need trajectories"
    given_inputs = inputs([-2.0, -2.0], behavior_logprobs=[-2.0, -2.0], advantages=[5.0, -0.5])
    assert objective.loss(given_inputs).per_token.tolist() == [2.0, -1.0]
