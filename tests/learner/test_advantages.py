from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.protocol.types import GroupSummary, Plan
from learner.advantages import (
    ADVANTAGES,
    Scale,
    generalized_advantages,
    group_advantages,
    overlong_penalty,
    plan_advantages,
    remax,
)

ONE_GROUP = torch.zeros(4, dtype=torch.int64)


def test_grpo_divides_by_the_sample_deviation() -> None:
    got = group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]), ONE_GROUP, scale=Scale.std)
    assert got.tolist() == pytest.approx([0.8660254, -0.8660254, -0.8660254, 0.8660254], abs=1e-6)


def test_grpo_without_deviation_only_centers() -> None:
    got = group_advantages(torch.tensor([3.0, 0.0, 0.0, 1.0]), ONE_GROUP, scale=Scale.none)
    assert got.tolist() == pytest.approx([2.0, -1.0, -1.0, 0.0])


def test_groups_are_told_apart_in_any_order() -> None:
    rewards, groups = torch.tensor([1.0, 10.0, 3.0, 30.0]), torch.tensor([7, 2, 7, 2])
    got = group_advantages(rewards, groups, scale=Scale.std)
    assert got.tolist() == pytest.approx([-(0.5**0.5), -(0.5**0.5), 0.5**0.5, 0.5**0.5])


@pytest.mark.parametrize("scale", list(Scale))
@pytest.mark.parametrize("reward", [0.1, 1e-8, 1e6])
def test_equal_rewards_give_exact_zeros(scale: Scale, reward: float) -> None:
    assert (
        group_advantages(torch.full((3,), reward), torch.zeros(3, dtype=torch.int64), scale=scale).tolist() == [0] * 3
    )


def test_a_small_difference_beside_a_large_reward_is_kept() -> None:
    got = group_advantages(torch.tensor([1e6, 1e6 + 1]), torch.zeros(2, dtype=torch.int64), scale=Scale.std)
    assert got.tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5])


def test_one_sample_has_no_deviation() -> None:
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
        ("reinforce_plus_plus", [1.41421356, 0.0, -0.70710678, -0.70710678]),
        ("reinforce_plus_plus_baseline", [1.2247449, -1.2247449, 0.0, 0.0]),
    ],
)
def test_each_estimator_gives_its_golden_numbers(name: str, want: list[float]) -> None:
    assert ADVANTAGES.get(name)(REWARDS, TWO_GROUPS).tolist() == pytest.approx(want, abs=1e-6)


def test_every_estimator_has_golden_numbers() -> None:
    marks = test_each_estimator_gives_its_golden_numbers.pytestmark  # type: ignore[attr-defined]
    assert sorted(name for name, _ in marks[0].args[1]) == ADVANTAGES.names()


@pytest.mark.parametrize("name", ADVANTAGES.names())
def test_equal_rewards_teach_nothing_whatever_the_estimator(name: str) -> None:
    assert ADVANTAGES.get(name)(torch.full((4,), 0.1), TWO_GROUPS).tolist() == [0.0] * 4


def test_remax_compares_with_the_greedy_response() -> None:
    assert remax(torch.tensor([1.0, 0.0, 0.25]), torch.tensor([1.0, 1.0, 0.0])).tolist() == [0.0, -1.0, 0.25]


def test_gae_follows_the_critic_and_stays_inside_each_response() -> None:
    rewards = torch.tensor([0.0, 1.0, 0.0, 0.0, 2.0])
    values = torch.tensor([0.5, 0.6, 1.0, 1.0, 1.0])
    lengths = torch.tensor([2, 3])
    advantages, returns = generalized_advantages(rewards, values, lengths, discount=1.0, trace=0.5)
    assert advantages.tolist() == pytest.approx([0.3, 0.4, 0.25, 0.5, 1.0])
    assert returns.tolist() == pytest.approx([0.8, 1.0, 1.25, 1.5, 2.0])
    discounted, _ = generalized_advantages(rewards, values, lengths, discount=0.5, trace=1.0)
    assert discounted.tolist() == pytest.approx([0.0, 0.4, -0.5, 0.0, 1.0])  # discounted returns less the values


def test_gae_with_trace_zero_is_the_one_step_error() -> None:
    advantages, _ = generalized_advantages(
        torch.tensor([1.0, 0.0]), torch.tensor([0.2, 0.4]), torch.tensor([2]), discount=0.9, trace=0.0
    )
    assert advantages.tolist() == pytest.approx([1.0 + 0.36 - 0.2, -0.4])


def test_the_length_penalty_grows_over_the_buffer() -> None:
    lengths = torch.tensor([6, 7, 8, 10, 12])
    assert overlong_penalty(lengths, max_tokens=10, buffer_tokens=4).tolist() == [0.0, -0.25, -0.5, -1.0, -1.0]
    assert overlong_penalty(lengths, max_tokens=10, buffer_tokens=0).tolist() == [0.0, 0.0, 0.0, -1.0, -1.0]


def test_a_plan_can_punish_long_responses() -> None:
    plan = Plan(version=0, groups=[replace(summary(1, (1.0, 1.0)), response_lengths=(2, 9))])
    (got,) = plan_advantages(plan, ADVANTAGES.get("grpo_no_std"), overlong_max_tokens=10, overlong_buffer_tokens=4)
    assert got.tolist() == [0.375, -0.375]


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=2, max_size=16))
def test_advantages_of_a_group_sum_to_zero(rewards: list[float]) -> None:
    for scale in Scale:
        got = group_advantages(torch.tensor(rewards), torch.zeros(len(rewards), dtype=torch.int64), scale=scale)
        assert torch.isfinite(got).all()
        assert abs(got.double().sum().item()) <= 1e-5 * max(1.0, got.abs().sum().item())


def test_a_plan_gives_an_array_for_each_group() -> None:
    plan = Plan(version=3, groups=[summary(5, (1.0, 0.0)), summary(6, (2.0, 2.0, 5.0))])
    first, second = plan_advantages(plan, ADVANTAGES.get("grpo_no_std"))
    assert (first.dtype, first.tolist()) == (np.float32, [0.5, -0.5])
    assert second.tolist() == [-1.0, -1.0, 2.0]


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"algorithm\.advantage must be one of .*grpo.*got 'grppo'"):
        ADVANTAGES.get("grppo")
    with pytest.raises(ValueError, match="no_such_module"):
        ADVANTAGES.get("no_such_module:f")
    assert ADVANTAGES.get("learner.advantages:grpo") is ADVANTAGES.get("grpo")


def summary(group_id: int, rewards: tuple[float, ...], tokens: int = 4) -> GroupSummary:
    return GroupSummary(
        group_id=group_id,
        attempt=0,
        num_prompt_tokens=3,
        response_lengths=(tokens,) * len(rewards),
        num_tokens=tokens * len(rewards),
        oldest_version=0,
        newest_version=0,
        rewards=rewards,
    )
