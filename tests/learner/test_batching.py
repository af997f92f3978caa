"""A plan is divided among ranks and mini-batches. Tests of the balance, the rewards, and any number of ranks."""

import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.core.types import GroupSummary, Plan
from learner.batching import group_cost, karmarkar_karp, overlong_penalty, rank_batches, split_sequences
from learner.config import AlgorithmConfig
from learner.types import RankBatch, TokenSequence


def summary(
    group_id: int, lengths: tuple[int, ...], rewards: tuple[float, ...] = (), num_prompt: int = 5
) -> GroupSummary:
    return GroupSummary(
        group_id=group_id,
        attempt=0,
        num_prompt_tokens=5,
        response_lengths=lengths,
        num_tokens=sum(lengths),
        oldest_version=0,
        newest_version=0,
        rewards=rewards or tuple(float(group_id + sample) for sample in range(len(lengths))),
    )


def split(plan: Plan, num_shards: int, num_mini_batches: int = 1, **options: bool) -> list[RankBatch]:
    algorithm = AlgorithmConfig(num_mini_batches=num_mini_batches)
    return rank_batches(plan, algorithm, num_shards=num_shards, max_lag=3, **options)


def loads(plan: Plan, batches: list[RankBatch], num_mini_batches: int = 1) -> np.ndarray:
    """Return the cost of each mini-batch of each rank, as an array [ranks, mini-batches]."""
    costs = {group.group_id: group_cost(group) for group in plan.groups}
    table = np.zeros((len(batches), num_mini_batches))
    for rank, batch in enumerate(batches):
        for share in batch.shares:
            table[rank, share.mini_batch] += costs[share.group_id].of(share.samples)
    return table


def largest_sample(plan: Plan) -> float:
    return max(cost.prompt + max(cost.samples) for cost in map(group_cost, plan.groups))


def long_tailed_plan(num_groups: int, samples: int, seed: int) -> Plan:
    """Return a plan whose lengths resemble reasoning: groups have different lengths, and few samples are very long."""
    rng = np.random.default_rng(seed)
    scale = rng.lognormal(6.5, 0.6, (num_groups, 1))
    lengths = np.clip(scale * rng.lognormal(0.0, 0.5, (num_groups, samples)), 8, 6000).astype(int)
    return Plan(version=4, groups=[summary(10 + i, tuple(row.tolist())) for i, row in enumerate(lengths)])


def test_karmarkar_karp_gives_the_partition_of_the_paper():
    parts = karmarkar_karp([8, 7, 6, 5, 4], 2)
    assert sorted(sum([8, 7, 6, 5, 4][i] for i in part) for part in parts) == [14, 16]


@given(sizes=st.lists(st.integers(0, 100), max_size=30), num_parts=st.integers(1, 6))
def test_karmarkar_karp_assigns_every_item_once_and_balances_the_parts(sizes, num_parts):
    parts = karmarkar_karp(sizes, num_parts)
    assert len(parts) == num_parts
    assert sorted(index for part in parts for index in part) == list(range(len(sizes)))
    sums = [sum(sizes[index] for index in part) for part in parts]
    assert max(sums) - min(sums) <= max(sizes, default=0)


@pytest.mark.parametrize("num_shards", [2, 16, 32])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_with_eight_sequences_per_rank_no_rank_costs_five_percent_more_than_the_mean(num_shards, seed):
    plan = long_tailed_plan(32, 8, seed)
    table = loads(plan, split(plan, num_shards))
    assert table.max() <= max(1.05 * table.mean(), largest_sample(plan))


def test_eight_thousand_sequences_are_split_over_a_thousand_ranks_within_seconds():
    plan = long_tailed_plan(1024, 8, seed=0)
    start = time.process_time()
    table = loads(plan, split(plan, 1024))
    assert time.process_time() - start < 10.0  # an idle machine needs 0.6 s
    assert table.max() <= max(1.05 * table.mean(), largest_sample(plan))


@settings(max_examples=60)
@given(st.data())
def test_ranks_with_eight_sequences_are_balanced_for_any_lengths(data):
    num_shards, samples = data.draw(st.integers(1, 8)), data.draw(st.sampled_from([1, 2, 4, 8]))
    num_mini_batches = data.draw(st.integers(1, 2))
    num_groups = num_shards * num_mini_batches * 8 // samples * data.draw(st.integers(1, 2))
    lengths = data.draw(st.lists(st.integers(50, 400), min_size=num_groups * samples, max_size=num_groups * samples))
    rows = np.array(lengths).reshape(num_groups, samples).tolist()
    plan = Plan(version=0, groups=[summary(i, tuple(row)) for i, row in enumerate(rows)])
    table = loads(plan, split(plan, num_shards, num_mini_batches), num_mini_batches)
    assert table.max() <= 1.05 * table.mean()


def test_groups_are_split_only_if_whole_groups_cannot_balance_the_ranks():
    even = Plan(version=0, groups=[summary(i, (100,) * 4) for i in range(8)])
    assert all(len(share.samples) == 4 for batch in split(even, 4) for share in batch.shares)
    uneven = Plan(version=0, groups=[summary(0, (4000, 100, 100, 100)), *even.groups[1:]])
    batches = split(uneven, 2)
    assert sum(len(batch.shares) for batch in batches) < 8 + 4
    whole = split(uneven, 4, whole_groups=True)
    assert all(len(share.samples) == 4 for batch in whole for share in batch.shares)


def test_a_split_contains_every_sample_once_with_its_reward():
    plan = long_tailed_plan(6, 4, seed=3)
    batches = split(plan, 5)
    rewards = {key: reward for batch in batches for key, reward in batch.rewards.items()}
    assert sum(len(batch.sample_keys) for batch in batches) == 24
    assert rewards == {(g.group_id, s): g.group_id + s for g in plan.groups for s in range(4)}
    assert {(batch.version, batch.max_lag) for batch in batches} == {(4, 3)}
    assert any(len(share.samples) < 4 for batch in batches for share in batch.shares)


@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_a_group_with_a_non_finite_reward_is_left_out_completely(num_shards):
    rewards = {1: (1.0, math.nan), 2: (0.0, 1.0), 3: (math.inf, 0.0), 4: (0.5, 0.5)}
    plan = Plan(version=1, groups=[summary(index, (3, 4), values) for index, values in rewards.items()])
    batches = split(plan, num_shards, num_mini_batches=2)
    held = {key for batch in batches for key in batch.sample_keys}
    assert held == {(2, 0), (2, 1), (4, 0), (4, 1)}
    assert all(math.isfinite(reward) for batch in batches for reward in batch.rewards.values())


def test_fewer_samples_than_ranks_leave_empty_shards():
    batches = split(Plan(version=0, groups=[summary(1, (3,))]), 3)
    assert sorted(len(batch.shares) for batch in batches) == [0, 0, 1]
    assert batches[2].rewards in ({}, {(1, 0): 1.0})


@given(st.lists(st.integers(1, 50), min_size=4, max_size=24), st.integers(1, 4))
def test_mini_batches_do_not_depend_on_the_number_of_ranks(lengths, num_mini_batches):
    plan = Plan(version=0, groups=[summary(i, (length, 7)) for i, length in enumerate(lengths)])
    of_ranks = []
    for num_shards in (1, 2, 3):
        shares = [share for batch in split(plan, num_shards, num_mini_batches) for share in batch.shares]
        of_ranks.append({(s.group_id, sample): s.mini_batch for s in shares for sample in s.samples})
        assert sum(len(share.samples) for share in shares) == 2 * len(lengths)
    assert of_ranks[0] == of_ranks[1] == of_ranks[2]
    assert set(of_ranks[0].values()) == set(range(num_mini_batches))


def test_a_sequence_of_an_unknown_mini_batch_is_refused():
    sequence = TokenSequence(input_ids=np.ones(2), loss_mask=np.array([False, True]), mini_batch=2)
    assert [len(part) for part in split_sequences([sequence], 4)] == [0, 0, 1, 0]
    with pytest.raises(ValueError, match=r"mini_batch must be in 0\.\.1, got 2"):
        split_sequences([sequence], 2)


def test_the_length_penalty_grows_over_the_last_tokens_before_the_limit():
    lengths = np.array([6, 7, 8, 10, 12])
    assert overlong_penalty(lengths, max_tokens=10, buffer_tokens=4).tolist() == [0.0, -0.25, -0.5, -1.0, -1.0]
    assert overlong_penalty(lengths, max_tokens=10, buffer_tokens=0).tolist() == [0.0, 0.0, 0.0, -1.0, -1.0]


def test_plan_rewards_include_the_length_penalty():
    plan = Plan(version=0, groups=[summary(1, (2, 9), (1.0, 1.0))])
    algorithm = AlgorithmConfig(overlong_max_tokens=10, overlong_buffer_tokens=4)
    (batch,) = rank_batches(plan, algorithm, num_shards=1, max_lag=0)
    assert batch.rewards == {(1, 0): 1.0, (1, 1): 0.25}
