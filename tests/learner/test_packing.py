from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.core.trajectory import Trajectory, TrajectoryGroup, Turn
from asyncrl.core.types import FinishReason
from learner.attention import packed_layout
from learner.packing import MicroBatch, Packer
from learner.types import TokenSequence, group_sequences
from tests.support.trajectories import make_group

LENGTHS = st.lists(st.integers(1, 40), max_size=30)


def sequences_of(lengths: list[int]) -> list[TokenSequence]:
    """Return sequences of the given lengths.

    Each token id occurs only once in the batch, so a test can find the packed position of the token.
    """
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
def test_every_token_is_packed_once_within_the_budget(lengths, budget, extra):
    sequences = sequences_of(lengths)
    needed = len(Packer(max_tokens=budget).pack(sequences))
    batches = Packer(max_tokens=budget).pack(sequences, agree=lambda own: own + extra)
    assert len(batches) == needed + extra
    assert all(len(batch.input_ids) == sum(batch.lengths) <= budget for batch in batches)
    for batch in batches:  # sorted by length, longest first; equal lengths keep their order
        assert list(batch.source) == sorted(batch.source, key=lambda index: (-lengths[index], index))
        assert list(batch.lengths) == [lengths[index] for index in batch.source] or not batch.source
    packed = sorted(index for batch in batches for index in batch.source)
    assert packed == list(range(len(lengths)))
    for batch in batches:
        start = 0
        for source, length in zip(batch.source, batch.lengths, strict=False):
            span = slice(start, start + length)
            assert batch.input_ids[span].tolist() == sequences[source].input_ids.tolist()
            assert batch.position_ids[span].tolist() == list(range(length))
            start += length


@given(
    prompts=st.lists(st.tuples(st.integers(1, 12), st.lists(st.integers(1, 9), min_size=1, max_size=5)), max_size=5),
    budget=st.integers(40, 90),
    whole=st.booleans(),
)
def test_samples_share_all_tokens_of_the_prompt_except_the_last(prompts, budget, whole):
    ids = iter(range(1_000_000))
    sequences = []
    for num_prompt, responses in prompts:
        prompt = [next(ids) for _ in range(num_prompt)]
        for length in responses:
            tokens = np.array([*prompt, *(next(ids) for _ in range(length))])
            sequences.append(TokenSequence(input_ids=tokens, loss_mask=np.arange(len(tokens)) >= num_prompt))
    batches = Packer(max_tokens=budget, whole=whole, share_prompts=True).pack(sequences)
    assert sorted(index for batch in batches for index in batch.source) == list(range(len(sequences)))
    for batch in batches:
        # Check that unpacking restores each sequence, and that shared tokens are packed once.
        assert len(batch.input_ids) <= budget
        index = np.arange(sum(batch.lengths)) if batch.token_index is None else batch.token_index
        (alone,) = Packer(max_tokens=sum(batch.lengths), whole=whole).pack([sequences[i] for i in batch.source])
        assert batch.lengths == alone.lengths
        assert torch.equal(batch.input_ids[index], alone.input_ids)
        assert torch.equal(batch.position_ids[index], alone.position_ids)
        assert np.array_equal(batch.predict_index, index[alone.predict_index])
        assert np.array_equal(batch.last_index(), index[alone.last_index()])
        assert len(np.unique(batch.predict_index)) == len(batch.predict_index)
        masks = [sequences[source].loss_mask for source in batch.source]
        shared = {
            (int(row[0]), place)
            for row, mask in zip(rows(alone), masks, strict=False)
            for place in range(mask.argmax() - 1)
        }
        own = sum(length - max(0, mask.argmax() - 1) for length, mask in zip(batch.lengths, masks, strict=False))
        assert len(batch.input_ids) == max(1, own + len(shared))
        layout = packed_layout(batch.lengths, torch.device("cpu"), token_index=batch.token_index)
        assert torch.equal(layout.positions(), batch.position_ids)


@given(
    shape=st.lists(st.tuples(st.integers(-1, 12), st.booleans(), st.integers(1, 4)), max_size=12),
    whole=st.booleans(),
)
def test_a_tree_of_any_shape_is_packed_once_and_unpacked_into_its_branches(shape, whole):
    ids = iter(range(1_000_000))

    def turn(length: int, parent: int, is_sampled: bool) -> Turn:
        given_turn = Turn.given(np.array([next(ids) for _ in range(length)], dtype=np.int32), parent=parent)
        return replace(given_turn, sampled=is_sampled, finish_reason=FinishReason.stop if is_sampled else None)

    turns = [turn(3, -1, False), turn(2, 0, True)]
    for parent, is_sampled, length in shape:
        place = min(parent, len(turns) - 1)
        turns.append(turn(length, place, is_sampled and place >= 0))
    group = TrajectoryGroup.from_trajectories([Trajectory(turns=tuple(turns), reward=0.0)], group_id=0, attempt=0)
    sequences = [one for one in group_sequences(group) if one.loss_mask.any()]
    (batch,) = Packer(max_tokens=10_000, whole=whole, share_prompts=True).pack(sequences)
    (alone,) = Packer(max_tokens=10_000, whole=whole).pack(sequences)
    index = np.arange(sum(batch.lengths)) if batch.token_index is None else batch.token_index
    assert torch.equal(batch.input_ids[index], alone.input_ids)
    assert torch.equal(batch.position_ids[index], alone.position_ids)
    assert torch.equal(batch.input_ids[batch.predict_index], alone.input_ids[alone.predict_index])
    assert len(np.unique(batch.predict_index)) == len(batch.predict_index)
    # A branch packs at most one shared token again: the token before its first loss token.
    assert len(batch.input_ids) <= len(np.unique(alone.input_ids)) + len(sequences)


def rows(batch: MicroBatch) -> tuple[torch.Tensor, ...]:
    """Return the tokens of each sequence of a micro-batch. The micro-batch must not share tokens."""
    return batch.input_ids.split(list(batch.lengths))


def grouped(num_groups: int, num_prompt: int, response_lengths: list[int]) -> list[TokenSequence]:
    """Return sequences of several prompts: the first sequence of each prompt, then the second of each, and so on."""
    ids = iter(range(1_000_000))
    prompts = [[next(ids) for _ in range(num_prompt)] for _ in range(num_groups)]
    return [
        TokenSequence(
            input_ids=np.array([*prompt, *(next(ids) for _ in range(length))], dtype=np.int32),
            loss_mask=np.arange(num_prompt + length) >= num_prompt,
        )
        for length in response_lengths
        for prompt in prompts
    ]


def test_samples_of_a_prompt_go_to_the_same_micro_batches():
    """Each prompt of 400 tokens has 8 samples of 40 tokens.

    Prompt and samples together need at least 720 packed tokens if they share the prompt, and 3,520 if they do not.
    """
    sequences = grouped(10, 400, [40] * 8)
    batches = Packer(max_tokens=1600, share_prompts=True).pack(sequences)
    # The last prompt token predicts the first answer token, so each sample has its own copy of this token.
    assert sum(len(batch.input_ids) for batch in batches) <= 1.1 * 10 * (399 + 8 * 41)
    assert len(batches) <= 6
    without = Packer(max_tokens=1600).pack(sequences)
    assert sum(len(batch.input_ids) for batch in without) == 10 * 8 * 440


def test_a_long_prompt_is_packed_in_as_few_micro_batches_as_possible():
    batches = Packer(max_tokens=1000, share_prompts=True).pack(grouped(1, 600, [60] * 16))
    assert len(batches) == 3  # 599 prompt tokens and up to 6 samples of 61 tokens fit into one micro-batch
    assert max(len(batch.input_ids) for batch in batches) <= 1000


def test_attention_reads_at_most_eight_times_the_token_budget():
    batches = Packer(max_tokens=1000, share_prompts=True).pack(grouped(1, 900, [1] * 64))
    assert all(sum(batch.lengths) <= 8 * 1000 for batch in batches)
    assert len(batches) == 8


def test_branches_share_the_turns_before_the_fork():
    turns = {
        name: list(range(start, start + 50)) for name, start in (("prompt", 0), ("a", 100), ("b", 200), ("c", 300))
    }
    masks = {"first": ["a", "b"], "second": ["c"]}
    first, second = [*turns["prompt"], *turns["a"], *turns["b"]], [*turns["prompt"], *turns["a"], *turns["c"]]
    sequences = [
        TokenSequence(
            input_ids=np.array(tokens, dtype=np.int32),
            loss_mask=np.isin(tokens, [token for turn in masks[name] for token in turns[turn]]),
            trajectory=(0, 0),
        )
        for name, tokens in (("first", first), ("second", second))
    ]
    (batch,) = Packer(max_tokens=201, share_prompts=True).pack(sequences)
    assert len(batch.input_ids) == 201  # the token that predicts the second branch's turn is packed twice
    assert batch.input_ids[batch.token_index].tolist() == first + second
    with pytest.raises(ValueError, match="must hold a trajectory's 2 branches together"):
        Packer(max_tokens=200, share_prompts=True, keep_branches=True).pack(sequences)


@given(lengths=LENGTHS, budget=st.integers(40, 90))
def test_tokens_that_no_prediction_needs_can_be_left_out(lengths, budget):
    sequences = sequences_of(lengths)
    batches = [Packer(max_tokens=budget, whole=whole).pack(sequences) for whole in (True, False)]
    whole, cut = (
        {
            (batch.source[owner], int(target)): (
                int(batch.position_ids[place]),
                batch.input_ids[: place + 1].tolist()[-1],
            )
            for batch in some
            for place, target, owner in zip(
                batch.predict_index.tolist(), batch.targets.tolist(), batch.trajectory_index.tolist(), strict=True
            )
        }
        for some in batches
    )
    assert cut == whole  # compare the position and the token from which each target is predicted
    for batch in batches[1]:
        assert list(batch.lengths) == sorted(batch.lengths, reverse=True)
        assert len(batch.input_ids) == len(batch.position_ids) == sum(batch.lengths) <= budget
        for source, length in zip(batch.source, batch.lengths, strict=False):
            in_loss = np.flatnonzero(sequences[source].loss_mask)
            assert length == (in_loss[-1] if len(in_loss) else 1)


@given(lengths=LENGTHS)
def test_each_target_is_predicted_by_the_token_before_it(lengths):
    sequences = sequences_of(lengths)
    batches = Packer(max_tokens=64).pack(sequences)
    in_loss = {int(i): index for index, s in enumerate(sequences) for i in s.input_ids[s.loss_mask]}
    seen = [int(target) for batch in batches for target in batch.targets]
    assert sorted(seen) == sorted(in_loss)
    for batch in batches:
        assert (batch.input_ids[batch.predict_index] + 1 == batch.targets).all()
        owners = [in_loss[int(target)] for target in batch.targets]
        assert [batch.source[i] for i in batch.trajectory_index] == owners
        if owners:
            assert batch.columns["advantages"].tolist() == owners
        assert int(batch.trajectory_lengths.sum()) == len(owners)


def test_the_error_for_a_sequence_over_the_budget_names_the_option():
    with pytest.raises(ValueError, match=r"max_tokens_per_micro_batch.*got 16 for a sequence of 17"):
        Packer(max_tokens=16).pack(sequences_of([17]))


def test_a_rank_without_sequences_gets_empty_micro_batches():
    batches = Packer(max_tokens=16).pack([], agree=lambda _: 2)
    assert [(len(b.input_ids), len(b.targets)) for b in batches] == [(1, 0), (1, 0)]


def test_a_group_becomes_one_sequence_per_branch():
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
    first, second = group_sequences(group, mini_batch=3)
    assert (first.mini_batch, second.mini_batch) == (3, 3)
    assert first.input_ids.tolist() == [1, 2, 3]
    assert second.input_ids.tolist() == [1, 2, 4, 5, 6]
    assert second.loss_mask.tolist() == [False, False, True, False, True]
    assert second.columns["behavior_logprobs"].tolist() == [0, 0, -2, 0, -4]
    assert (first.trajectory, second.trajectory) == ((1, 0), (1, 1))
    assert [s.input_ids.tolist() for s in group_sequences(group, samples=[1])] == [second.input_ids.tolist()]


def test_a_loss_mask_that_includes_the_first_token_is_refused():
    with pytest.raises(ValueError, match="first one"):
        TokenSequence(input_ids=np.ones(2), loss_mask=np.ones(2, dtype=bool))
    with pytest.raises(ValueError, match="aligned"):
        TokenSequence(input_ids=np.ones(2), loss_mask=np.zeros(3, dtype=bool))
