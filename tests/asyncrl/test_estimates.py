"""pass@k, mean@k and their intervals, compared with hand-computed numbers."""

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.core.types import AnsweredPrompt
from asyncrl.metrics import Estimate, evaluation_of
from asyncrl.metrics.estimates import pass_at_k


@given(st.integers(1, 8), st.data())
def test_pass_at_k_is_the_share_of_subsets_of_k_samples_with_a_pass(num_samples, data):
    num_passed = data.draw(st.integers(0, num_samples))
    k = data.draw(st.integers(1, num_samples))
    samples = [index < num_passed for index in range(num_samples)]
    share = np.mean([any(choice) for choice in combinations(samples, k)])
    assert pass_at_k(num_samples, num_passed, k) == pytest.approx(share)


def test_an_interval_of_passes_is_wilsons_with_positive_width_for_equal_values():
    found = Estimate.over([1.0] * 95 + [0.0] * 5)
    assert (found.mean, found.low, found.high) == pytest.approx((0.95, 0.8882, 0.9785), abs=1e-4)
    assert Estimate.over([1.0] * 256).low == pytest.approx(1 / (1 + 1.96**2 / 256), abs=1e-4)
    assert Estimate.over([1.0]).high == 1.0
    assert Estimate.over([0.0] * 256).high == pytest.approx(0.0148, abs=1e-4)


@given(
    st.lists(st.sampled_from((0.0, 1.0)), min_size=1, max_size=300) | st.lists(st.floats(-5, 5), min_size=1, max_size=4)
)
@settings(max_examples=50, deadline=None)
def test_a_mean_lies_within_its_interval(values):
    found = Estimate.over(values)
    assert found.low <= found.mean <= found.high


@pytest.mark.parametrize("count", range(1, 300, 7))
def test_an_interval_of_equal_values_includes_the_mean(count):
    """In floating point, the upper end of Wilson's interval for 256 passes of 256 is 1 - 1e-16."""
    assert Estimate.over([1.0] * count).high == 1.0
    assert Estimate.over([0.0] * count).low == 0.0


def test_an_interval_of_means_resamples_prompts_and_not_samples():
    """Every sample of half of the prompts has reward 1; every sample of the other half has 0.1."""
    values = [1.0, 0.1] * 200
    found = Estimate.over(values)
    error = 1.96 * np.std(values) / math.sqrt(len(values))
    assert (found.mean, found.low, found.high) == pytest.approx((0.55, 0.55 - error, 0.55 + error), abs=0.005)
    assert Estimate.over(values) == found, "the estimate must use a fixed seed"


def test_an_estimate_needs_the_value_of_a_prompt():
    with pytest.raises(ValueError, match="at least one prompt, got none"):
        Estimate.over([])


def answered(group_id, sampled, greedy, source=""):
    return AnsweredPrompt(
        group_id=group_id,
        sampled=sampled,
        greedy=greedy,
        data_source=source,
        response_lengths=(4, 4, 2),
        num_truncated=1,
    )


def summed_up(answers, num_prompts, **options):
    options = {"pass_reward": 1.0, "policy_version": 3, "incomplete": {}, "took_s": 1.0, **options}
    return evaluation_of(answers, num_prompts=num_prompts, **options)


def test_an_evaluation_has_estimates_per_data_source_and_names_missing_prompts():
    failed = AnsweredPrompt(group_id=2, reward_failure="it raised")
    answers = [answered(0, (1.0, 0.0), 1.0, "math"), answered(1, (0.5, 0.25), 0.0, "code"), failed]
    found = summed_up(answers, 5, incomplete={"1": "it died"})
    assert (found.sampled, found.greedy) == (0.4375, 0.5)
    assert {name: one.mean for name, one in found.estimates.items()} == {
        "mean@2": 0.4375, "pass@1": 0.25, "pass@2": 0.5, "greedy": 0.5,
    }  # fmt: skip
    assert {source: estimates["pass@2"].mean for source, estimates in found.by_source.items()} == {
        "math": 1.0, "code": 0.0,
    }  # fmt: skip
    assert (found.num_prompts, found.num_failed, found.num_missing) == (5, 1, 2)
    assert (found.response_length, found.truncated) == pytest.approx((10 / 3, 1 / 3))
    assert found.shortfall == "; 1 without a reward, incomplete, 2 unanswered (engine 1: it died)"
    scalars = found.scalars()
    assert (scalars["sampled"], scalars["math/pass@1"], scalars["code/mean@2"]) == (0.4375, 0.5, 0.375)
    assert scalars["greedy/low"] < 0.5 < scalars["greedy/high"]


def test_a_pass_is_a_reward_of_at_least_pass_reward():
    answers = [answered(0, (0.7, 0.2), 0.9)]
    assert summed_up(answers, 1).estimates["pass@2"].mean == 0.0
    assert summed_up(answers, 1, pass_reward=0.5).estimates["pass@2"].mean == 1.0


def test_an_evaluation_without_rewards_gives_none():
    assert summed_up([], 4) is None
    assert summed_up([AnsweredPrompt(group_id=0, reward_failure="it raised")], 1) is None
