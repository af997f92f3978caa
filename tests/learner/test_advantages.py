import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.protocol.types import GroupSummary, Plan
from learner.advantages import ADVANTAGES, Scale, group_advantages, plan_advantages

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
