import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.protocol.types import FinishReason, GroupSummary, Plan
from learner.batching import group_tokens, karmarkar_karp, split_plan, split_sequences
from learner.packing import num_micro_batches, pack
from learner.types import RankBatch, TokenSequence, group_sequences
from tests.support.trajectories import make_group

LENGTHS = st.lists(st.integers(1, 40), max_size=30)


def sequences_of(lengths: list[int]) -> list[TokenSequence]:
    """Every token id is unique in the batch, so that a token is recognised wherever it went."""
    ids = iter(range(1_000_000))
    return [
        TokenSequence(
            input_ids=np.array([next(ids) for _ in range(length)]),
            loss_mask=np.arange(length) % 3 == 1,
            columns={"advantages": np.full(length, float(index), dtype=np.float32)},
        )
        for index, length in enumerate(lengths)
    ]


@given(lengths=LENGTHS, budget=st.integers(40, 90), extra=st.integers(0, 3))
def test_every_token_is_packed_once_within_the_budget(lengths: list[int], budget: int, extra: int) -> None:
    sequences = sequences_of(lengths)
    count = num_micro_batches(sequences, budget) + extra
    batches = pack(sequences, max_tokens=budget, count=count)
    assert len(batches) == count
    assert all(len(batch.input_ids) == sum(batch.lengths) <= budget for batch in batches)
    assert all(list(batch.lengths) == sorted(batch.lengths, reverse=True) for batch in batches)
    packed = sorted(index for batch in batches for index in batch.source)
    assert packed == list(range(len(lengths)))
    for batch in batches:
        start = 0
        for source, length in zip(batch.source, batch.lengths, strict=False):
            span = slice(start, start + length)
            assert batch.input_ids[span].tolist() == sequences[source].input_ids.tolist()
            assert batch.position_ids[span].tolist() == list(range(length))
            start += length


@given(lengths=LENGTHS, budget=st.integers(40, 90))
def test_what_no_prediction_needs_can_be_left_out(lengths: list[int], budget: int) -> None:
    sequences = sequences_of(lengths)
    counts = [num_micro_batches(sequences, budget, whole=whole) for whole in (True, False)]
    batches = [
        pack(sequences, max_tokens=budget, count=count, whole=whole)
        for count, whole in zip(counts, (True, False), strict=True)
    ]
    whole, cut = (
        {
            (batch.source[owner], int(target)): (
                int(batch.position_ids[place]),
                batch.input_ids[: place + 1].tolist()[-1],
            )
            for batch in some
            for place, target, owner in zip(
                batch.predict_index.tolist(), batch.targets.tolist(), batch.sequence_index.tolist(), strict=True
            )
        }
        for some in batches
    )
    assert cut == whole  # the same targets, predicted from the same places of the same sequences
    for batch in batches[1]:
        assert list(batch.lengths) == sorted(batch.lengths, reverse=True)
        assert len(batch.input_ids) == len(batch.position_ids) == sum(batch.lengths) <= budget
        for source, length in zip(batch.source, batch.lengths, strict=False):
            in_loss = np.flatnonzero(sequences[source].loss_mask)
            assert length == (in_loss[-1] if len(in_loss) else 1)


@given(lengths=LENGTHS)
def test_each_target_is_predicted_by_the_token_before_it(lengths: list[int]) -> None:
    sequences = sequences_of(lengths)
    batches = pack(sequences, max_tokens=64, count=max(1, num_micro_batches(sequences, 64)))
    in_loss = {int(i): index for index, s in enumerate(sequences) for i in s.input_ids[s.loss_mask]}
    seen = [int(target) for batch in batches for target in batch.targets]
    assert sorted(seen) == sorted(in_loss)
    for batch in batches:
        assert (batch.input_ids[batch.predict_index] + 1 == batch.targets).all()
        owners = [in_loss[int(target)] for target in batch.targets]
        assert [batch.source[i] for i in batch.sequence_index] == owners
        if owners:
            assert batch.columns["advantages"].tolist() == owners
        assert int(batch.loss_lengths.sum()) == len(owners)


def test_a_sequence_over_the_budget_names_the_option() -> None:
    with pytest.raises(ValueError, match=r"max_tokens_per_micro_batch.*got 16 for a sequence of 17"):
        num_micro_batches(sequences_of([17]), 16)


def test_an_empty_rank_still_gets_its_micro_batches() -> None:
    batches = pack([], max_tokens=16, count=2)
    assert [(len(b.input_ids), len(b.targets)) for b in batches] == [(1, 0), (1, 0)]


def test_differencing_balances_as_in_the_paper() -> None:
    parts = karmarkar_karp([8, 7, 6, 5, 4], 2)
    assert sorted(sum([8, 7, 6, 5, 4][i] for i in part) for part in parts) == [14, 16]


@given(sizes=st.lists(st.integers(0, 100), max_size=30), num_parts=st.integers(1, 6))
def test_parts_hold_every_item_once_and_are_balanced(sizes: list[int], num_parts: int) -> None:
    parts = karmarkar_karp(sizes, num_parts)
    assert len(parts) == num_parts
    assert sorted(index for part in parts for index in part) == list(range(len(sizes)))
    sums = [sum(sizes[index] for index in part) for part in parts]
    assert max(sums) - min(sums) <= max(sizes, default=0)


def summary(group_id: int, num_prompt: int, lengths: tuple[int, ...]) -> GroupSummary:
    return GroupSummary(
        group_id=group_id,
        attempt=0,
        num_prompt_tokens=num_prompt,
        response_lengths=lengths,
        num_tokens=sum(lengths),
        oldest_version=0,
        newest_version=0,
        rewards=(0.0,) * len(lengths),
    )


def split(plan: Plan, advantages: list[np.ndarray], **options: int) -> list[RankBatch]:
    rewards = [np.zeros_like(values) for values in advantages]
    options = {"num_mini_batches": 1, "max_lag": 0, **options}
    return split_plan(plan, rewards=rewards, advantages=advantages, **options)


def test_a_plan_is_split_whole_and_balanced() -> None:
    groups = [summary(10 + i, 5, (1 + i, 2)) for i in range(8)]
    advantages = [np.full(2, float(i), dtype=np.float32) for i in range(8)]
    shards = split(Plan(version=4, groups=groups), advantages, num_shards=2, max_lag=3)
    assert sorted(i for shard in shards for i in shard.group_ids) == list(range(10, 18))
    assert all(a[0] == i - 10 for s in shards for i, a in zip(s.group_ids, s.advantages, strict=True))
    assert {(shard.version, shard.max_lag) for shard in shards} == {(4, 3)}
    loads = [sum(group_tokens(groups[i - 10]) for i in shard.group_ids) for shard in shards]
    assert abs(loads[0] - loads[1]) <= 4


def test_fewer_groups_than_ranks_leave_empty_shards() -> None:
    plan = Plan(version=0, groups=[summary(1, 2, (3,))])
    shards = split(plan, [np.ones(1)], num_shards=3)
    assert sorted(len(shard.group_ids) for shard in shards) == [0, 0, 1]


@given(st.lists(st.integers(1, 50), min_size=4, max_size=24), st.integers(1, 4))
def test_mini_batches_follow_from_the_plan_whatever_the_ranks(lengths: list[int], num_mini_batches: int) -> None:
    plan = Plan(version=0, groups=[summary(i, 3, (length,)) for i, length in enumerate(lengths)])
    advantages = [np.zeros(1, np.float32)] * len(lengths)
    of_ranks = []
    for num_shards in (1, 2, 3):
        shards = split(plan, advantages, num_shards=num_shards, num_mini_batches=num_mini_batches)
        of_ranks.append({i: m for shard in shards for i, m in zip(shard.group_ids, shard.mini_batches, strict=True)})
        assert sum(len(shard.group_ids) for shard in shards) == len(lengths)
    assert of_ranks[0] == of_ranks[1] == of_ranks[2]
    assert set(of_ranks[0].values()) == set(range(num_mini_batches))


def test_every_mini_batch_is_balanced_over_the_ranks() -> None:
    groups = [summary(i, 0, (length,)) for i, length in enumerate([90, 80, 70, 60, 50, 40, 30, 20])]
    advantages = [np.zeros(1, np.float32)] * 8
    shards = split(Plan(version=0, groups=groups), advantages, num_shards=2, num_mini_batches=2)
    loads = np.zeros((2, 2))
    for rank, shard in enumerate(shards):
        for group_id, mini_batch in zip(shard.group_ids, shard.mini_batches, strict=True):
            loads[rank, mini_batch] += group_tokens(groups[group_id])
    assert loads.sum(0).tolist() == [220, 220]
    assert np.abs(loads[0] - loads[1]).max() <= 40
    assert abs(loads[0].sum() - loads[1].sum()) <= 20


def test_a_sequence_of_an_unknown_mini_batch_is_refused() -> None:
    sequence = TokenSequence(input_ids=np.ones(2), loss_mask=np.array([False, True]), mini_batch=2)
    assert [len(part) for part in split_sequences([sequence], 4)] == [0, 0, 1, 0]
    with pytest.raises(ValueError, match=r"mini_batch must be in 0\.\.1, got 2"):
        split_sequences([sequence], 2)


def test_a_group_becomes_one_sequence_a_sample() -> None:
    group = make_group(
        group_id=1,
        attempt=0,
        prompt_ids=np.array([1, 2], dtype=np.int32),
        response_ids=np.array([3, 4, 5, 6], dtype=np.int32),
        response_lengths=np.array([1, 3], dtype=np.int32),
        response_mask=np.array([True, True, False, True]),
        logprobs=np.array([-1, -2, 0, -4], dtype=np.float32),
        versions=np.zeros(4, dtype=np.int32),
        rewards=np.array([0.0, 1.0], dtype=np.float32),
        finish_reasons=(FinishReason.stop, FinishReason.length),
    )
    first, second = group_sequences(group, np.array([0.5, -0.5], dtype=np.float32), mini_batch=3)
    assert (first.mini_batch, second.mini_batch) == (3, 3)
    assert first.input_ids.tolist() == [1, 2, 3]
    assert second.input_ids.tolist() == [1, 2, 4, 5, 6]
    assert second.loss_mask.tolist() == [False, False, True, False, True]
    assert second.columns["behavior_logprobs"].tolist() == [0, 0, -2, 0, -4]
    assert second.columns["advantages"][2:].tolist() == [-0.5, -0.5, -0.5]


def test_a_first_token_in_the_loss_is_refused() -> None:
    with pytest.raises(ValueError, match="first one"):
        TokenSequence(input_ids=np.ones(2), loss_mask=np.ones(2, dtype=bool))
    with pytest.raises(ValueError, match="aligned"):
        TokenSequence(input_ids=np.ones(2), loss_mask=np.zeros(3, dtype=bool))
