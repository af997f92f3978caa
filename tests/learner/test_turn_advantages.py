"""Turn-level estimators on trees of turns, compared with golden numbers and with plain recursion over the turns."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, stdev

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.core.trajectory import ROOT, Trajectory, TrajectoryGroup, Turn
from asyncrl.core.types import FinishReason, GroupSummary
from buffer.rule import dropped_by, find_filters
from learner.advantages import ADVANTAGES, BatchAdvantages, Scale, group_advantages
from learner.config import Aggregation, AlgorithmConfig, Device, LearnerConfig
from learner.fsdp import open_mesh
from learner.losses import LossInputs, token_weights
from learner.types import TokenSequence, group_sequences

PROMPT = Turn.given(np.array([3, 4], dtype=np.int32))


def sampled(length: int, parent: int, reason: FinishReason = FinishReason.stop) -> Turn:
    return Turn(
        token_ids=np.arange(length, dtype=np.int32),
        parent=parent,
        sampled=True,
        logprobs=np.full(length, -1.0, dtype=np.float32),
        versions=np.zeros(length, dtype=np.int32),
        finish_reason=reason,
    )


def given_turn(length: int, parent: int) -> Turn:
    return Turn.given(np.arange(length, dtype=np.int32), parent=parent)


def chain(rewards: Sequence[float], outcome: float = 0.0, *, length: int = 2, cut: bool = False) -> Trajectory:
    """Return a prompt, and one sampled turn per reward. There is an observation between two sampled turns."""
    turns = [PROMPT]
    for index in range(len(rewards)):
        if index:
            turns.append(given_turn(3, len(turns) - 1))
        is_cut = cut and index == len(rewards) - 1
        turns.append(sampled(length, len(turns) - 1, FinishReason.length if is_cut else FinishReason.stop))
    places = [place for place, turn in enumerate(turns) if turn.sampled]
    return Trajectory(turns=tuple(turns), reward=outcome, turn_rewards=dict(zip(places, rewards, strict=True)))


def estimated(
    groups: Sequence[Sequence[Trajectory]],
    *,
    values: dict[tuple[int, int, int], float] | None = None,
    mask_truncated: bool = False,
    **options: object,
) -> dict[tuple[int, int, int], tuple[float, float]]:
    """Return a pair (advantage, return) for each turn. The key is: group, sample, index of the turn in its trajectory.

    All tokens of a turn have the same pair. ``values`` maps the key of a turn to the critic's value before the turn.
    The estimator must not read values inside a turn.
    """
    sequences, rewards = [], {}
    for group_id, trajectories in enumerate(groups):
        group = TrajectoryGroup.from_trajectories(trajectories, group_id=group_id, attempt=0)
        rewards |= {(group_id, sample): reward for sample, reward in enumerate(group.summary.rewards)}
        for sequence in group_sequences(group, mask_truncated=mask_truncated):
            column = np.full(len(sequence.input_ids), 1e6, dtype=np.float32)
            for turn in sequence.turns:
                column[turn.start] = (values or {}).get((*sequence.trajectory, place(groups, sequence, turn.turn)), 0.0)
            sequences.append(sequence.with_column("values", column) if values is not None else sequence)
    algorithm = AlgorithmConfig(mask_truncated=mask_truncated, **options)
    assigned, _ = BatchAdvantages(algorithm, open_mesh(LearnerConfig(device=Device.cpu))).assign(sequences, rewards)
    found = {}
    for sequence in assigned:
        in_turns = np.zeros(len(sequence.input_ids), dtype=bool)
        for turn in sequence.turns:
            span = slice(turn.start, turn.stop)
            in_turns[span] = True
            numbers = [np.unique(sequence.columns[name][span]) for name in ("advantages", "returns")]
            assert [len(each) for each in numbers] == [1, 1]
            found[*sequence.trajectory, place(groups, sequence, turn.turn)] = tuple(float(n[0]) for n in numbers)
        for name in ("advantages", "returns"):
            assert not sequence.columns[name][~in_turns].any()
            assert not sequence.columns[name][~sequence.loss_mask].any()
    return found


def place(groups: Sequence[Sequence[Trajectory]], sequence: TokenSequence, turn: int) -> int:
    """Return the index of a turn in its trajectory. ``turn`` is the turn's index in the group."""
    group_id, sample = sequence.trajectory
    return turn - sum(len(one.turns) - 1 for one in groups[group_id][:sample])


def advantages(found: dict[tuple[int, int, int], tuple[float, float]]) -> list[list[float]]:
    """Return a list for each trajectory: the advantages of its turns, in order."""
    by_trajectory: dict[tuple[int, int], list[float]] = {}
    for (group_id, sample, _), (advantage, _) in sorted(found.items()):
        by_trajectory.setdefault((group_id, sample), []).append(advantage)
    return list(by_trajectory.values())


def test_turn_gae_counts_a_turn_of_any_length_as_one_step():
    for length in (1, 5):
        got = estimated(
            [[chain([0.0, 0.0], 1.0, length=length)]],
            values={(0, 0, 1): 0.5, (0, 0, 3): 0.6},
            advantage="turn_gae",
            gae_lambda=0.5,
            whiten_advantages=False,
        )
        assert got[0, 0, 1] == pytest.approx((0.3, 0.8))
        assert got[0, 0, 3] == pytest.approx((0.4, 1.0))


def test_turn_grpo_compares_the_returns_of_turns_of_the_same_index():
    group = [chain([0.0, 1.0]), chain([0.0, 0.0]), chain([0.5])]
    got = advantages(estimated([group], advantage="turn_grpo_no_std"))
    assert got == [[0.5, 0.5], [-0.5, -0.5], [0.0]]
    divided = advantages(estimated([group], advantage="turn_grpo"))
    assert divided[0] == pytest.approx([0.5 / stdev([1, 0, 0.5]), 0.5 / stdev([1, 0])])
    halved = advantages(estimated([group], advantage="turn_grpo_no_std", gamma=0.5))
    assert halved == [pytest.approx([0.5 - 1 / 3, 0.5]), pytest.approx([-1 / 3, -0.5]), pytest.approx([0.5 - 1 / 3])]


def test_a_reward_is_not_credited_to_later_turns():
    early, none = chain([1.0, 0.0, 0.0]), chain([0.0, 0.0, 0.0])
    assert advantages(estimated([[early, none]], advantage="turn_grpo_no_std")) == [[0.5, 0, 0], [-0.5, 0, 0]]
    assert advantages(estimated([[early, none]], advantage="turn_gae", whiten_advantages=False))[0] == [1, 0, 0]


def test_a_turn_index_that_only_one_trajectory_reaches_has_the_previous_advantage():
    group = [chain([0.0]), chain([0.0, 0.0]), chain([0.0, 0.0, 0.0, 0.25], 1.0)]
    got = advantages(estimated([group], advantage="turn_grpo_no_std"))
    assert got[0] == [pytest.approx(-1.25 / 3)]
    assert got[1] == pytest.approx([-1.25 / 3, -0.625])
    assert got[2] == pytest.approx([2.5 / 3, 0.625, 0.625, 0.625])
    assert advantages(estimated([[chain([1.0, 2.0])]], advantage="turn_grpo")) == [[0.0, 0.0]]


def test_outcomes_are_compared_at_each_turn_index_that_two_trajectories_reach():
    """Compare trajectories of 3, 3, 5 and 4 turns that differ only in their outcomes, because all turn rewards are 0.

    All trajectories have at least three turns. Each of these three turns has the GRPO advantage of its trajectory.
    """
    group = [chain([0.0] * count, outcome) for count, outcome in ((3, 1.0), (3, 0.0), (5, 0.0), (4, 2.0))]
    got = advantages(estimated([group], advantage="turn_grpo"))
    whole = group_advantages(torch.tensor([1.0, 0.0, 0.0, 2.0]), torch.zeros(4), scale=Scale.std).tolist()
    assert [each[:3] for each in got] == [[number] * 3 for number in whole]
    assert got[2][3:] == pytest.approx([-(0.5**0.5)] * 2)
    assert got[3][3] == pytest.approx(0.5**0.5)


def tree(outcome: float = 1.0, rewards: dict[int, float] | None = None) -> Trajectory:
    """Return two branches below a tool's answer, and two turns from a new root."""
    turns = (
        *(PROMPT, sampled(2, 0), given_turn(3, 1), sampled(3, 2), sampled(2, 2)),
        *(given_turn(2, ROOT), sampled(4, 5), given_turn(1, 6), sampled(1, 7)),
    )
    return Trajectory(turns=turns, reward=outcome, turn_rewards=rewards or {})


def test_branches_and_new_roots_have_one_advantage_per_sampled_turn():
    values = {(0, 0, 1): 0.5, (0, 0, 3): 0.2, (0, 0, 4): 0.6, (0, 0, 6): 0.1, (0, 0, 8): 0.9}
    options = {"advantage": "turn_gae", "gamma": 0.5, "gae_lambda": 0.5, "whiten_advantages": False}
    got = estimated([[tree(1.0, {3: 1.0, 4: -1.0})]], values=values, **options)
    assert sorted(got) == [(0, 0, 1), (0, 0, 3), (0, 0, 4), (0, 0, 6), (0, 0, 8)]
    third, fourth, last = 2.0 - 0.2, 0.0 - 0.6, 1.0 - 0.9  # the last turn of each path gets the outcome
    assert got[0, 0, 3][0] == pytest.approx(third)
    assert got[0, 0, 4][0] == pytest.approx(fourth)
    assert got[0, 0, 1][0] == pytest.approx(0.5 * (0.2 + 0.6) / 2 - 0.5 + 0.25 * (third + fourth) / 2)
    assert got[0, 0, 6][0] == pytest.approx(0.5 * 0.9 - 0.1 + 0.25 * last)
    assert got[0, 0, 6][1] == pytest.approx(got[0, 0, 6][0] + 0.1)


def test_the_reward_of_an_observation_belongs_to_the_turn_before_it():
    got = estimated([[tree(1.0, {2: 4.0, 5: 8.0})]], advantage="turn_gae", whiten_advantages=False)
    # No turn precedes the new root, which is turn 5. So its reward of 8 is added to the outcome of 1.
    assert got[0, 0, 1] == (4.0 + 9.0,) * 2
    assert got[0, 0, 3] == (9.0,) * 2


def test_a_trajectory_with_several_turns_of_the_same_index_counts_once():
    forked = tree(0.0, {3: 3.0, 4: 1.0, 8: 2.0})
    group = [forked, chain([0.0, 5.0])]
    got = estimated([group], advantage="turn_grpo_no_std")
    second = (2.0 + 5.0) / 2  # the first trajectory's turns with this index have the mean 2
    assert [got[0, 0, turn][0] for turn in (3, 4, 8)] == pytest.approx([3 - second, 1 - second, 2 - second])
    assert got[0, 1, 3][0] == pytest.approx(5 - second)
    # Turns 1 and 6 are the first sampled turns of the first trajectory.
    # The return of turn 1 is 2, the mean of the rewards 3 and 1 of its two branches.
    # The return of turn 6 is 2, the reward of turn 8. The return of the second trajectory is 5.
    first = (2.0 + 5.0) / 2
    assert [got[0, 0, turn][0] for turn in (1, 6)] == pytest.approx([2 - first] * 2)
    deviation = (((3 - second) ** 2 + (1 - second) ** 2 + (2 - second) ** 2) / 3 + (5 - second) ** 2) ** 0.5
    divided = estimated([group], advantage="turn_grpo")
    assert divided[0, 0, 4][0] == pytest.approx((1 - second) / deviation)


def test_branches_of_trajectories_with_equal_means_have_bounded_advantages():
    group = [tree(0.0, {3: 1.0, 4: -1.0, 8: 0.0}), chain([0.0, 0.0])]
    got = estimated([group], advantage="turn_grpo")
    assert abs(got[0, 0, 3][0]) < 2


def test_truncated_trajectories_count_in_the_baseline_but_are_not_in_the_loss():
    group = [chain([0.0, 1.0], cut=True), chain([0.0, 0.0])]
    with_cut = estimated([group], advantage="turn_grpo_no_std", mask_truncated=True)
    assert [with_cut[0, 1, turn][0] for turn in (1, 3)] == [-0.5, -0.5]
    assert [with_cut[0, 0, turn][0] for turn in (1, 3)] == [0.0, 0.0]
    whitened = estimated([[*group, chain([3.0])]], values={(0, 0, 1): 7.0}, advantage="turn_gae", mask_truncated=True)
    assert whitened[0, 2, 1][0] == pytest.approx(0.5**0.5)  # the cut trajectory is not in the mean and the deviation


def test_the_reward_of_a_turn_without_tokens_counts_for_the_turn_before_it():
    silent = chain([0.0, 2.0, 1.0])
    turns = list(silent.turns)
    turns[3] = sampled(0, 2)
    silent = Trajectory(turns=tuple(turns), reward=0.0, turn_rewards=silent.turn_rewards)
    options = {"advantage": "turn_gae", "gae_lambda": 0.5, "whiten_advantages": False}
    values = {(0, 0, 1): 0.5, (0, 0, 5): 0.25}
    first = 0.0 + (2.0 + 0.25) - 0.5 + 0.5 * (0.0 + 0.5 * 0.75)
    sequences = group_sequences(TrajectoryGroup.from_trajectories([silent], group_id=0, attempt=0))
    with_values = []
    for sequence in sequences:
        column = np.zeros(len(sequence.input_ids), np.float32)
        for turn in sequence.turns:
            if turn.start < turn.stop:
                column[turn.start] = values[0, 0, turn.turn]
        with_values.append(sequence.with_column("values", column))
    mesh = open_mesh(LearnerConfig(device=Device.cpu))
    (got,), _ = BatchAdvantages(AlgorithmConfig(**options), mesh).assign(with_values, {(0, 0): 3.0})
    assert got.columns["advantages"][got.loss_mask].tolist() == pytest.approx([first, first, 0.75, 0.75])


REWARD = st.sampled_from([0.0, 1.0, -1.0, 0.1, 1e6, 1e6 + 1]) | st.floats(-10, 10, width=32)


@given(st.lists(st.lists(REWARD, min_size=2, max_size=6), min_size=1, max_size=4), st.booleans())
def test_trajectories_of_one_turn_have_exactly_the_advantages_of_grpo(groups, as_turn_reward):
    """The reward of a trajectory is either its outcome, or the reward of its only turn."""
    trees = [[chain([r] if as_turn_reward else [0.0], 0.0 if as_turn_reward else r) for r in group] for group in groups]
    ids = torch.tensor([index for index, group in enumerate(groups) for _ in group])
    outcomes = torch.tensor([one.reward + sum(one.turn_rewards.values()) for group in trees for one in group])
    for name in ("grpo", "grpo_no_std"):
        want = ADVANTAGES.get(name)(outcomes.float().double(), ids).tolist()
        assert [each for (each,) in advantages(estimated(trees, advantage=f"turn_{name}"))] == want


@given(st.lists(st.tuples(st.floats(-9, 9, width=32), st.floats(-9, 9, width=32)), min_size=2, max_size=8))
def test_trajectories_of_one_turn_have_exactly_the_advantages_of_gae(pairs):
    groups = [[chain([0.0], reward, length=1)] for reward, _ in pairs]
    values = {(index, 0, 1): value for index, (_, value) in enumerate(pairs)}
    for whiten in (False, True):
        options = {"gamma": 0.5, "gae_lambda": 0.25, "whiten_advantages": whiten, "values": values}
        by_turn = estimated(groups, advantage="turn_gae", **options)
        by_token = estimated(groups, advantage="gae", **options)
        assert [by_turn[key] for key in by_turn] == [pytest.approx(by_token[key], rel=1e-6) for key in by_turn]
        if not whiten:
            assert by_turn == by_token
            for index, (reward, value) in enumerate(pairs):
                assert by_turn[index, 0, 1][0] == np.float32(float(reward) - float(value))


@st.composite
def forests(draw: st.DrawFn) -> Trajectory:
    """Return a random forest of sampled and given turns, some with rewards."""
    turns, rewards = [PROMPT, sampled(1, 0)], {}
    for _ in range(draw(st.integers(0, 7))):
        parent = draw(st.integers(-1, len(turns) - 1))
        if parent == ROOT or draw(st.booleans()):
            turns.append(given_turn(draw(st.integers(1, 2)), parent))
            if parent == ROOT:
                turns.append(sampled(1, len(turns) - 1))
        else:
            turns.append(sampled(draw(st.integers(1, 3)), parent))
    for turn in range(1, len(turns)):
        if draw(st.booleans()):
            rewards[turn] = draw(st.sampled_from([0.0, 1.0, -0.5, 2.0]))
    return Trajectory(turns=tuple(turns), reward=draw(st.sampled_from([0.0, 1.0, 3.0])), turn_rewards=rewards)


def summary_of(group: Sequence[Trajectory]) -> GroupSummary:
    return TrajectoryGroup.from_trajectories(group, group_id=0, attempt=0).summary


@pytest.mark.parametrize(
    ("group", "drops"),
    [
        ([chain([1.0, 0.0]), chain([0.0, 1.0])], False),
        ([chain([1.0], 0.0), chain([0.0], 1.0)], False),
        ([chain([0.0, 1.0]), chain([0.0, 1.0])], True),
        ([chain([0.0], 1.0), chain([0.0, 0.0], 1.0)], True),
        ([chain([0.0], 1.0), chain([0.0], 0.0)], False),
        ([tree(1.0)] * 2, True),
        ([tree(1.0, {3: 1.0})] * 2, False),
    ],
)
def test_the_filter_of_equal_rewards_keeps_groups_whose_turns_have_other_rewards(group, drops):
    """The two trajectories of the table's first group have the same sum of rewards.

    But the second turns of these trajectories have different rewards, so the advantages are 0.5 and -0.5. So the filter
    must keep the group.
    """
    assert (dropped_by(find_filters(["equal_rewards"]), summary_of(group)) == "equal_rewards") == drops


@given(forests(), st.lists(forests(), max_size=2), st.integers(0, 2))
def test_a_group_that_the_filter_of_equal_rewards_drops_has_no_turn_advantage(first, others, num_copies):
    group = [first, *others, *[first] * num_copies]
    if summary_of(group).has_equal_rewards:
        for found in advantages(estimated([group], advantage="turn_grpo_no_std")):
            assert found == pytest.approx([0.0] * len(found), abs=1e-6)


class Plain:
    """Computes returns and advantages of a trajectory's turns by plain recursion."""

    def __init__(self, one: Trajectory) -> None:
        self.turns = one.turns
        self.sampled = [place for place, turn in enumerate(one.turns) if turn.sampled]
        self.children = {p: [q for q in self.sampled if self.above(q) == p] for p in self.sampled}
        earned = dict.fromkeys(self.sampled, 0.0)
        rest = one.reward
        for place, reward in one.turn_rewards.items():
            owner = place if one.turns[place].sampled else self.above(place)
            if owner is None:
                rest += reward
            else:
                earned[owner] += reward
        self.rewards = {p: reward + (0.0 if self.children[p] else rest) for p, reward in earned.items()}

    def above(self, place: int) -> int | None:
        place = self.turns[place].parent
        while place != ROOT and not self.turns[place].sampled:
            place = self.turns[place].parent
        return None if place == ROOT else place

    def index(self, place: int) -> int:
        above = self.above(place)
        return 0 if above is None else 1 + self.index(above)

    def returned(self, place: int, gamma: float) -> float:
        below = [self.returned(child, gamma) for child in self.children[place]]
        return self.rewards[place] + (gamma * mean(below) if below else 0.0)

    def gae(self, place: int, values: dict[int, float], gamma: float, lam: float) -> float:
        below = self.children[place]
        after = mean(values[child] for child in below) if below else 0.0
        later = mean(self.gae(child, values, gamma, lam) for child in below) if below else 0.0
        return self.rewards[place] + gamma * after - values[place] + gamma * lam * later


@given(st.lists(st.lists(forests(), min_size=1, max_size=4), min_size=1, max_size=2), st.sampled_from([1.0, 0.5]))
def test_random_forests_have_the_advantages_of_a_plain_recursion(groups, gamma):
    plain = {(g, s): Plain(one) for g, group in enumerate(groups) for s, one in enumerate(group)}
    keys = {(*key, place) for key, one in plain.items() for place in one.sampled}
    values = {key: 0.25 * (sum(key) % 7) for key in keys}
    got = estimated(groups, values=values, advantage="turn_gae", gamma=gamma, gae_lambda=0.5, whiten_advantages=False)
    assert got.keys() == keys
    for g, s, p in keys:
        own = {place: values[g, s, place] for place in plain[g, s].sampled}
        want = plain[g, s].gae(p, own, gamma, 0.5)
        assert got[g, s, p] == pytest.approx((want, want + own[p]), rel=1e-5, abs=1e-5)
    by_index = estimated(groups, advantage="turn_grpo_no_std", gamma=gamma)
    for g, s, p in keys:
        assert by_index[g, s, p][0] == pytest.approx(compared(plain, g, s, p, gamma), rel=1e-5, abs=1e-5)


def compared(plain: dict[tuple[int, int], Plain], group: int, sample: int, turn: int | None, gamma: float) -> float:
    """Compute the advantage of ``turn_grpo_no_std`` for one turn, from the mean return of each trajectory."""
    if turn is None:
        return 0.0
    own = plain[group, sample]
    means = [
        mean(reached)
        for (g, _), one in plain.items()
        if g == group and (reached := [one.returned(p, gamma) for p in one.sampled if one.index(p) == own.index(turn)])
    ]
    if len(means) < 2:
        return compared(plain, group, sample, own.above(turn), gamma)
    return own.returned(turn, gamma) - mean(means)


def test_whitening_gives_long_and_short_trajectories_the_same_weight():
    groups = [[chain([0.0] * 29 + [1.0], length=1)], [chain([3.0])]]
    got = advantages(estimated(groups, advantage="turn_gae", gamma=1.0))
    assert got[0] == pytest.approx([-(0.5**0.5)] * 30)  # the mean over trajectories is 2; over turns: (30 + 3) / 31
    assert got[1] == pytest.approx([0.5**0.5])


@pytest.mark.parametrize("aggregation", [Aggregation.sequence_mean, Aggregation.token_mean])
def test_sequence_mean_gives_long_and_short_trajectories_the_same_weight(aggregation):
    forked = [PROMPT, sampled(2, 0)]
    for _ in range(28):
        forked += [given_turn(1, len(forked) - 1), sampled(2, len(forked))]
    forked.append(sampled(2, 2))  # this turn branches off at the first observation
    trajectories = [Trajectory(turns=tuple(forked), reward=1.0), chain([0.0], length=2)]
    sequences = group_sequences(TrajectoryGroup.from_trajectories(trajectories, group_id=0, attempt=0))
    counts = torch.tensor([60, 2])
    index = torch.cat([torch.full((int(s.loss_mask.sum()),), s.trajectory[1]) for s in sequences])
    inputs = LossInputs(trajectory_index=index, trajectory_lengths=counts, columns={}, log_probs=torch.zeros(62))
    weights = token_weights(inputs, aggregation, num_tokens=62, num_trajectories=2)
    sums = [float(weights[index == trajectory].sum()) for trajectory in (0, 1)]
    wanted = {Aggregation.sequence_mean: [0.5, 0.5], Aggregation.token_mean: [60 / 62, 2 / 62]}[aggregation]
    assert sums == pytest.approx(wanted)


def test_a_kl_penalty_is_part_of_the_reward_of_its_turn():
    group = TrajectoryGroup.from_trajectories([chain([0.0, 1.0]), chain([0.0, 0.0])], group_id=0, attempt=0)
    sequences = [
        one.with_column(
            "reference_logprobs", np.where(np.arange(len(one.input_ids)) < 4, -1.5, -1.0).astype(np.float32)
        )
        for one in group_sequences(group)
    ]  # each of the first turn's two tokens has a KL of 0.5
    mesh = open_mesh(LearnerConfig(device=Device.cpu))
    algorithm = AlgorithmConfig(advantage="turn_gae", whiten_advantages=False, kl_reward_coef=0.1)
    (first, second), metrics = BatchAdvantages(algorithm, mesh).assign(sequences, {(0, 0): 1.0, (0, 1): 0.0})
    assert first.columns["advantages"][first.loss_mask].tolist() == pytest.approx([0.9, 0.9, 1.0, 1.0])
    assert second.columns["advantages"][second.loss_mask].tolist() == pytest.approx([-0.1, -0.1, 0, 0])
    assert metrics["reward_kl"] == pytest.approx(0.25)


def test_a_sequence_that_does_not_name_its_turns_is_refused():
    one = TokenSequence(
        input_ids=np.ones(3, np.int32),
        loss_mask=np.array([False, True, True]),
        columns={"behavior_logprobs": np.zeros(3, np.float32)},
        trajectory=(4, 1),
    )
    algorithm = AlgorithmConfig(advantage="turn_grpo")
    with pytest.raises(ValueError, match=r"needs the turns .*, got none for trajectory \(4, 1\)"):
        BatchAdvantages(algorithm, open_mesh(LearnerConfig(device=Device.cpu))).assign([one], {(4, 1): 1.0})
