from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncrl.protocol.types import GroupSummary, Plan
from learner.config import AlgorithmConfig
from learner.planning import credited_on_ranks, overlong_penalty, plan_advantages, plan_rewards, rank_batches


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


def test_the_length_penalty_grows_over_the_buffer() -> None:
    lengths = torch.tensor([6, 7, 8, 10, 12])
    assert overlong_penalty(lengths, max_tokens=10, buffer_tokens=4).tolist() == [0.0, -0.25, -0.5, -1.0, -1.0]
    assert overlong_penalty(lengths, max_tokens=10, buffer_tokens=0).tolist() == [0.0, 0.0, 0.0, -1.0, -1.0]


def test_a_plan_can_punish_long_responses() -> None:
    plan = Plan(version=0, groups=[replace(summary(1, (1.0, 1.0)), response_lengths=(2, 9))])
    algorithm = AlgorithmConfig(advantage="grpo_no_std", overlong_max_tokens=10, overlong_buffer_tokens=4)
    assert plan_rewards(plan, algorithm)[0].tolist() == [1.0, 0.25]
    (batch,) = rank_batches(plan, algorithm, num_shards=1, max_lag=0)
    assert batch.rewards[0].tolist() == [1.0, 0.25]
    assert batch.advantages is not None
    assert batch.advantages[0].tolist() == [0.375, -0.375]


def test_a_plan_gives_an_array_for_each_group() -> None:
    plan = Plan(version=3, groups=[summary(5, (1.0, 0.0)), summary(6, (2.0, 2.0, 5.0))])
    algorithm = AlgorithmConfig(advantage="grpo_no_std")
    first, second = plan_advantages(plan_rewards(plan, algorithm), algorithm)
    assert (first.dtype, first.tolist()) == (np.float32, [0.5, -0.5])
    assert second.tolist() == [-1.0, -1.0, 2.0]


@pytest.mark.parametrize(
    ("options", "on_ranks"),
    [({}, False), ({"kl_reward_coef": 0.1}, True), ({"advantage": "gae"}, True), ({"kl_coef": 0.1}, False)],
)
def test_what_needs_tokens_is_left_to_the_ranks(options: dict, on_ranks: bool) -> None:
    algorithm = AlgorithmConfig(**options)
    assert credited_on_ranks(algorithm) is on_ranks
    plan = Plan(version=0, groups=[summary(1, (1.0, 0.0))])
    (batch,) = rank_batches(plan, algorithm, num_shards=1, max_lag=0)
    assert (batch.advantages is None) is on_ranks
    assert batch.rewards[0].tolist() == [1.0, 0.0]
