"""Token-level estimators, compared with plain loops over single trajectories."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.advantages import (
    ADVANTAGES,
    TokenRewards,
    generalized_advantages,
    is_token_level,
    returns_to_go,
    standardized,
)
from learner.config import AlgorithmConfig


def alone(values: torch.Tensor) -> torch.Tensor:
    return values


def tokens(rewards: list[float], lengths: list[int], values: list[float] | None = None) -> TokenRewards:
    return TokenRewards(
        rewards=torch.tensor(rewards, dtype=torch.float64),
        lengths=torch.tensor(lengths),
        group_ids=torch.arange(len(lengths)),
        values=torch.tensor(values or [0.0] * len(rewards), dtype=torch.float64),
    )


def gae_of_one(rewards: list[float], values: list[float], last: float, gamma: float, gae_lambda: float) -> list[float]:
    """Compute equation 16 of arXiv 1506.02438 (GAE) for one trajectory.

    The advantage of a token is the sum of the discounted one-step errors of this token and all later tokens.
    """
    following = [*values, last][1:]
    errors = [r + gamma * after - v for r, after, v in zip(rewards, following, values, strict=True)]
    return [
        sum((gamma * gae_lambda) ** (later - t) * errors[later] for later in range(t, len(errors)))
        for t in range(len(errors))
    ]


def test_gae_uses_the_critics_values_and_does_not_cross_trajectories():
    rewards, values = torch.tensor([0.0, 1.0, 0.0, 0.0, 2.0]), torch.tensor([0.5, 0.6, 1.0, 1.0, 1.0])
    lengths = torch.tensor([2, 3])
    advantages, returns = generalized_advantages(rewards, values, lengths, gamma=1.0, gae_lambda=0.5)
    assert advantages.tolist() == pytest.approx([0.3, 0.4, 0.25, 0.5, 1.0])
    assert returns.tolist() == pytest.approx([0.8, 1.0, 1.25, 1.5, 2.0])
    discounted, _ = generalized_advantages(rewards, values, lengths, gamma=0.5, gae_lambda=1.0)
    assert discounted.tolist() == pytest.approx([0.0, 0.4, -0.5, 0.0, 1.0])  # the discounted returns minus the values


def test_a_truncated_trajectory_can_bootstrap():
    rewards, values = torch.tensor([0.0, 1.0, 7.0]), torch.tensor([0.5, 0.6, 3.0])
    advantages, _ = generalized_advantages(
        rewards, values, torch.tensor([2, 1]), gamma=1.0, gae_lambda=0.5, last_values=torch.tensor([1.0, 0.0])
    )
    assert advantages.tolist() == pytest.approx([0.8, 1.4, 4.0])


@given(
    st.lists(st.lists(st.tuples(st.floats(-9, 9), st.floats(-9, 9)), max_size=7), min_size=1, max_size=5),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_gae_equals_the_sum_in_the_paper(trajectories, gamma, gae_lambda):
    rewards = torch.tensor([r for t in trajectories for r, _ in t], dtype=torch.float64)
    values = torch.tensor([v for t in trajectories for _, v in t], dtype=torch.float64)
    last = torch.arange(len(trajectories), dtype=torch.float64)
    lengths = torch.tensor([len(t) for t in trajectories])
    got, returns = generalized_advantages(
        rewards, values, lengths, gamma=gamma, gae_lambda=gae_lambda, last_values=last
    )
    want = [
        advantage
        for index, t in enumerate(trajectories)
        for advantage in gae_of_one([r for r, _ in t], [v for _, v in t], float(index), gamma, gae_lambda)
    ]
    assert got.tolist() == pytest.approx(want, abs=1e-9)
    assert returns.tolist() == pytest.approx((torch.tensor(want, dtype=torch.float64) + values).tolist(), abs=1e-9)


def test_returns_to_go_are_discounted_from_each_token():
    got = returns_to_go(torch.tensor([1.0, 0.0, 4.0, 3.0]), torch.tensor([3, 1]), gamma=0.5)
    assert got.tolist() == [2.0, 2.0, 4.0, 3.0]


def test_gae_whitens_its_advantages_but_not_the_returns():
    batch = tokens([0.0, 1.0, 0.0, 0.0, 2.0], [2, 3], [0.5, 0.6, 1.0, 1.0, 1.0])
    plain = ADVANTAGES.get("gae")(
        batch, AlgorithmConfig(advantage="gae", gae_lambda=0.5, whiten_advantages=False), alone
    )
    assert plain.advantages.tolist() == pytest.approx([0.3, 0.4, 0.25, 0.5, 1.0])
    white = ADVANTAGES.get("gae")(batch, AlgorithmConfig(advantage="gae", gae_lambda=0.5), alone)
    mean = 2.45 / 5
    deviation = math.sqrt(sum((a - mean) ** 2 for a in (0.3, 0.4, 0.25, 0.5, 1.0)) / 4)
    want = [(a - mean) / deviation for a in (0.3, 0.4, 0.25, 0.5, 1.0)]
    assert white.advantages.tolist() == pytest.approx(want)
    assert white.returns.tolist() == pytest.approx([0.8, 1.0, 1.25, 1.5, 2.0])


def test_reinforce_plus_plus_standardizes_returns_over_the_tokens():
    one_token_each = ADVANTAGES.get("reinforce_plus_plus")(tokens([3, 1, 0, 0], [1] * 4), AlgorithmConfig(), alone)
    assert one_token_each.advantages.tolist() == pytest.approx([math.sqrt(2), 0.0, -math.sqrt(0.5), -math.sqrt(0.5)])
    # The first trajectory has two tokens with a KL penalty of 0.5 each. The second trajectory has one token.
    got = ADVANTAGES.get("reinforce_plus_plus")(tokens([-0.5, 3 - 0.5, 0.0], [2, 1]), AlgorithmConfig(), alone)
    assert got.returns.tolist() == [2.0, 2.5, 0.0]
    mean, deviation = 1.5, math.sqrt((0.25 + 1.0 + 2.25) / 2)
    assert got.advantages.tolist() == pytest.approx([(r - mean) / deviation for r in (2.0, 2.5, 0.0)])


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus"])
@pytest.mark.parametrize("reward", [0.1, 1e-8, 1e6])
def test_equal_rewards_give_zero_token_advantages(name, reward):
    estimator = ADVANTAGES.get(name)
    assert is_token_level(estimator)
    got = estimator(tokens([reward] * 7, [1] * 7), AlgorithmConfig(), alone)
    assert got.advantages.tolist() == [0.0] * 7


def test_large_values_with_a_small_difference_are_standardized_correctly():
    got = standardized(torch.tensor([1e6, 1e6 + 1], dtype=torch.float64), alone)
    assert got.tolist() == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)])
    assert standardized(torch.tensor([5.0], dtype=torch.float64), alone).tolist() == [0.0]
    assert standardized(torch.zeros(0, dtype=torch.float64), alone).tolist() == []


def test_returns_to_go_are_correct_over_any_number_of_blocks():
    lengths = torch.tensor([0, 1, 63, 64, 65, 500, 2, 128, 9000, 0, 3])  # 9000 tokens are more than 64 blocks of 64
    rewards = torch.randn(int(lengths.sum()), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    got = returns_to_go(rewards, lengths, gamma=0.97)
    want = []
    for part in rewards.split(lengths.tolist()):
        total, sums = 0.0, []
        for value in reversed(part.tolist()):
            total = value + 0.97 * total
            sums.append(total)
        want += reversed(sums)
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64))


def test_a_nan_reward_affects_only_its_own_trajectory():
    rewards = torch.ones(300, dtype=torch.float64)
    rewards[150] = torch.nan
    got = returns_to_go(rewards, torch.tensor([100, 100, 100]), gamma=1.0)
    assert got[:100].tolist() == got[200:].tolist() == [float(left) for left in range(100, 0, -1)]
    assert got[100:151].isnan().all()
    assert got[151:200].isfinite().all()


def test_rounding_noise_in_equal_token_rewards_does_not_become_advantages():
    batch = TokenRewards(
        rewards=torch.tensor([0.5, 0.5 + 1e-7], dtype=torch.float64),
        lengths=torch.tensor([1, 1]),
        group_ids=torch.tensor([0, 1]),
        values=torch.zeros(2, dtype=torch.float64),
    )
    got = ADVANTAGES.get("reinforce_plus_plus")(batch, AlgorithmConfig(), lambda values: values)
    assert got.advantages.abs().max() < 1e-3
