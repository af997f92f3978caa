import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.advantages import ADVANTAGES, Scale, group_advantages, is_token_level, is_turn_level

ONE_GROUP = torch.zeros(4, dtype=torch.int64)


def test_grpo_divides_by_the_sample_deviation():
    got = group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]), ONE_GROUP, scale=Scale.std)
    assert got.tolist() == pytest.approx([0.8660254, -0.8660254, -0.8660254, 0.8660254], abs=1e-6)


def test_grpo_without_scaling_only_centers_the_rewards():
    got = group_advantages(torch.tensor([3.0, 0.0, 0.0, 1.0]), ONE_GROUP, scale=Scale.none)
    assert got.tolist() == pytest.approx([2.0, -1.0, -1.0, 0.0])


def test_grpo_finds_the_groups_if_their_rewards_are_interleaved():
    rewards, groups = torch.tensor([1.0, 10.0, 3.0, 30.0]), torch.tensor([7, 2, 7, 2])
    got = group_advantages(rewards, groups, scale=Scale.std)
    assert got.tolist() == pytest.approx([-(0.5**0.5), -(0.5**0.5), 0.5**0.5, 0.5**0.5])


@pytest.mark.parametrize("scale", list(Scale))
@pytest.mark.parametrize("reward", [0.1, 1e-8, 1e6])
def test_equal_rewards_give_exact_zeros(scale, reward):
    assert (
        group_advantages(torch.full((3,), reward), torch.zeros(3, dtype=torch.int64), scale=scale).tolist() == [0] * 3
    )


def test_large_rewards_with_a_small_difference_give_correct_advantages():
    got = group_advantages(torch.tensor([1e6, 1e6 + 1]), torch.zeros(2, dtype=torch.int64), scale=Scale.std)
    assert got.tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5])


def test_scaling_by_the_deviation_refuses_a_group_of_one_sample():
    with pytest.raises(ValueError, match="samples_per_prompt"):
        group_advantages(torch.tensor([1.0]), torch.tensor([0]), scale=Scale.std)


REWARDS, TWO_GROUPS = torch.tensor([3.0, 1.0, 0.0, 0.0]), torch.tensor([0, 0, 1, 1])


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("grpo", [0.70710678, -0.70710678, 0.0, 0.0]),
        ("grpo_no_std", [1.0, -1.0, 0.0, 0.0]),
        ("dr_grpo", [1.0, -1.0, 0.0, 0.0]),
        ("rloo", [2.0, -2.0, 0.0, 0.0]),
        ("leave_one_out_batch", [8 / 3, 0.0, -4 / 3, -4 / 3]),
        ("remax", [2.0, 0.0, 0.0, 0.0]),
        ("reinforce_plus_plus_baseline", [1.2247449, -1.2247449, 0.0, 0.0]),
    ],
)
def test_each_estimator_gives_its_golden_numbers(name, want):
    assert ADVANTAGES.get(name)(REWARDS, TWO_GROUPS).tolist() == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("grpo", [1.1547005, -0.5773503, -0.5773503, 0.7071068, -0.7071068]),
        ("grpo_no_std", [2.0, -1.0, -1.0, 1.0, -1.0]),
        ("rloo", [3.0, -1.5, -1.5, 2.0, -2.0]),
    ],
)
def test_rewards_are_compared_within_groups_of_different_sizes(name, want):
    rewards, groups = torch.tensor([3.0, 0.0, 0.0, 2.0, 0.0]), torch.tensor([4, 4, 4, 9, 9])
    assert ADVANTAGES.get(name)(rewards, groups).tolist() == pytest.approx(want, abs=1e-6)


OUTCOME_NAMES = [
    name
    for name in ADVANTAGES.names()
    if not is_token_level(ADVANTAGES.get(name)) and not is_turn_level(ADVANTAGES.get(name))
]


def test_every_estimator_has_golden_numbers():
    marks = test_each_estimator_gives_its_golden_numbers.pytestmark  # type: ignore[attr-defined]
    assert sorted(name for name, _ in marks[0].args[1]) == OUTCOME_NAMES
    assert set(ADVANTAGES.names()) - set(OUTCOME_NAMES) == {
        *("gae", "reinforce_plus_plus"),  # test_token_advantages.py tests these estimators
        *("turn_gae", "turn_grpo", "turn_grpo_no_std"),  # test_turn_advantages.py tests these estimators
    }


@pytest.mark.parametrize("name", OUTCOME_NAMES)
def test_equal_rewards_give_zero_advantages_for_every_estimator(name):
    assert ADVANTAGES.get(name)(torch.full((4,), 0.1), TWO_GROUPS).tolist() == [0.0] * 4


def test_remax_subtracts_the_reward_of_the_greedy_response_of_each_group():
    rewards, groups = torch.tensor([1.0, 0.25, 0.0, 0.0, 1.0, 0.5]), torch.tensor([7, 7, 7, 2, 2, 2])
    assert ADVANTAGES.get("remax")(rewards, groups).tolist() == [1.0, 0.25, 0.0, -0.5, 0.5, 0.0]
    interleaved = torch.tensor([7, 2, 7, 2, 7, 2])
    assert ADVANTAGES.get("remax")(rewards, interleaved).tolist() == [0.0, -0.25, -1.0, -0.5, 0.0, 0.0]


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=2, max_size=16))
def test_advantages_of_a_group_sum_to_zero(rewards):
    for scale in Scale:
        got = group_advantages(torch.tensor(rewards), torch.zeros(len(rewards), dtype=torch.int64), scale=scale)
        assert torch.isfinite(got).all()
        assert abs(got.double().sum().item()) <= 1e-5 * max(1.0, got.abs().sum().item())


@pytest.mark.parametrize("name", ["grpo", "reinforce_plus_plus_baseline"])
def test_rounding_noise_in_equal_rewards_does_not_become_advantages(name):
    rewards = torch.tensor([0.5, 0.5 + 1e-7, 0.5, 0.5 + 2e-7])
    got = ADVANTAGES.get(name)(rewards, torch.zeros(4, dtype=torch.int64))
    assert got.abs().max() < 2e-3
    # Scale the rewards by 1e4. Their differences are still only rounding errors of float32.
    large = ADVANTAGES.get(name)(1e4 * rewards, torch.zeros(4, dtype=torch.int64))
    assert large.abs().max() < 1.5
