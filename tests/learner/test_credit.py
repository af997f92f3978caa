"""The advantages that several ranks compute, compared with explicit arithmetic and with the results of one process."""

from dataclasses import replace

import numpy as np
import pytest

from learner.advantages import ADVANTAGES, BatchAdvantages, TokenAdvantages, token_level, turn_level
from learner.config import (
    CRITIC_ADVANTAGES,
    TOKEN_ADVANTAGES,
    TURN_ADVANTAGES,
    AlgorithmConfig,
    Device,
    KLEstimator,
    LearnerConfig,
)
from learner.fsdp import open_mesh
from learner.turn_advantages import TurnAdvantages
from learner.types import TokenSequence, TurnSpan
from tests.support.ranks import run_on_ranks
from tests.support.trajectories import runs

MULTI_TURN = [False, True, True, False, False, True]
"""One prompt token, two policy tokens, two of the environment, one policy token."""


def sequence(mask: list[bool], **columns: list[float]) -> TokenSequence:
    """Make a sequence. ``mask`` marks the policy's tokens, and adjacent policy tokens are one turn.

    Each column has the given values at policy tokens. At other tokens, each column has a value that an estimator must
    not read.
    """
    filled = {}
    for name, values in columns.items():
        column = np.full(len(mask), 1e6, dtype=np.float32)
        column[np.array(mask)] = values
        filled[name] = column
    spans = [(begin, end) for begin, end in runs(np.array(mask)) if mask[begin]]
    turns = tuple(TurnSpan(index, index - 1, begin, end, 0.0) for index, (begin, end) in enumerate(spans))
    return TokenSequence(input_ids=np.ones(len(mask), np.int32), loss_mask=np.array(mask), columns=filled, turns=turns)


def numbered(sequences: list[TokenSequence], groups: list[int]) -> list[TokenSequence]:
    """Return the sequences with trajectory ids. ``groups`` has the group id of each sequence."""
    keys = [(group, groups[:index].count(group)) for index, group in enumerate(groups)]
    return [replace(one, trajectory=key) for one, key in zip(sequences, keys, strict=True)]


def assign(
    advantages: BatchAdvantages, sequences: list[TokenSequence], rewards: list[float], groups: list[int]
) -> tuple[list[TokenSequence], dict[str, float]]:
    sequences = numbered(sequences, groups)
    return advantages.assign(
        sequences, {one.trajectory: reward for one, reward in zip(sequences, rewards, strict=True)}
    )


def computed_by(**options: object) -> BatchAdvantages:
    return BatchAdvantages(AlgorithmConfig(**options), open_mesh(LearnerConfig(device=Device.cpu)))


def of_tokens(s: TokenSequence, name: str = "advantages") -> list[float]:
    return s.columns[name][s.loss_mask].tolist()


def test_gae_skips_environment_tokens_and_places_the_outcome_at_the_last_policy_token():
    sequences = [
        sequence(MULTI_TURN, behavior_logprobs=[0] * 3, values=[0.5, 0.75, 0.25]),
        sequence([False, True], behavior_logprobs=[0], values=[3.0]),
        sequence([False, False], behavior_logprobs=[], values=[]),
    ]
    got, _ = assign(
        computed_by(advantage="gae", gae_lambda=0.5, whiten_advantages=False), sequences, [1.0, 2.0, 9.0], [0, 1, 1]
    )
    third = 1.0 - 0.25
    second = 0.25 - 0.75 + 0.5 * third
    first = 0.75 - 0.5 + 0.5 * second
    assert of_tokens(got[0]) == pytest.approx([first, second, third])
    assert of_tokens(got[0], "returns") == pytest.approx([first + 0.5, second + 0.75, third + 0.25])
    assert of_tokens(got[1]) == pytest.approx([-1.0])
    assert got[0].columns["advantages"][[0, 3, 4]].tolist() == [0.0] * 3


def test_outcome_estimators_subtract_the_summed_kl_penalty_from_the_reward():
    sequences = [
        sequence(MULTI_TURN, behavior_logprobs=[-1, -1, -2], reference_logprobs=[-2, -1, -2.5]),  # KL 1 + 0 + 0.5
        sequence([False, True], behavior_logprobs=[-1], reference_logprobs=[-0.5]),  # KL -0.5
    ]
    got, metrics = assign(computed_by(advantage="grpo_no_std", kl_reward_coef=0.2), sequences, [1.0, 0.0], [4, 4])
    first, second = 1.0 - 0.2 * 1.5, 0.0 + 0.2 * 0.5
    assert of_tokens(got[0]) == pytest.approx([(first - second) / 2] * 3)
    assert of_tokens(got[1]) == pytest.approx([(second - first) / 2])
    assert metrics == pytest.approx({"reward_kl": 1.0 / 4, "kl_reward_coef": 0.2})


def test_token_estimators_subtract_the_kl_penalty_per_token():
    one = sequence(MULTI_TURN, behavior_logprobs=[-1, -1, -2], reference_logprobs=[-2, -1, -2.5])
    got, _ = assign(
        computed_by(advantage="gae", whiten_advantages=False, kl_reward_coef=0.2, gamma=0.5), [one], [1.0], [0]
    )
    last = 1.0 - 0.1
    assert of_tokens(got[0], "returns") == pytest.approx([-0.2 + 0.25 * last, 0.5 * last, last])
    options = {"whiten_advantages": False, "kl_reward_coef": 0.2, "kl_reward_estimator": KLEstimator.k2}
    squared, _ = assign(computed_by(advantage="gae", **options), [one], [0.0], [0])
    assert of_tokens(squared[0], "returns") == pytest.approx([-0.2 * (0.5 + 0.125), -0.2 * 0.125, -0.2 * 0.125])


def test_the_adaptive_kl_coefficient_changes_after_the_step_that_uses_it():
    one = sequence([False, True], behavior_logprobs=[-1], reference_logprobs=[-3])
    assigner = computed_by(advantage="grpo_no_std", kl_reward_coef=0.1, kl_target=1.0, kl_horizon=10)
    seen = [assign(assigner, [one, one], [0.0, 0.0], [0, 0])[1]["kl_reward_coef"] for _ in range(2)]
    assert seen == pytest.approx([0.1, 0.1 * (1 + 0.2 * 2 / 10)])  # the relative error 2 / 1 - 1 is clipped at 0.2


def test_a_batch_of_trajectories_without_policy_tokens_is_accepted():
    silent = sequence([False, False], behavior_logprobs=[], reference_logprobs=[])
    for name in ("gae", "reinforce_plus_plus", "grpo", "turn_gae", "turn_grpo"):
        got, _ = assign(computed_by(advantage=name, kl_reward_coef=0.1), [silent] * 2, [1.0, 1.0], [0, 0])
        assert not got[0].columns["advantages"].any()


def test_branches_of_one_trajectory_count_once_and_share_its_advantage():
    columns = {"behavior_logprobs": [-1.0], "reference_logprobs": [-2.0]}  # KL 1
    branches = [sequence([False, True], **columns), sequence([False, False, True], **columns)]
    other = sequence([False, True], behavior_logprobs=[-1.0], reference_logprobs=[-1.0])
    sequences = [replace(one, trajectory=(7, 0)) for one in branches] + [replace(other, trajectory=(7, 1))]
    got, _ = computed_by(advantage="grpo_no_std", kl_reward_coef=0.1).assign(sequences, {(7, 0): 1.0, (7, 1): 0.0})
    assert [of_tokens(one) for one in got] == [pytest.approx([0.4]), pytest.approx([0.4]), pytest.approx([-0.4])]


def random_batch() -> tuple[list[TokenSequence], dict[tuple[int, int], float]]:
    rng = np.random.default_rng(0)
    sequences = []
    for _ in range(12):
        mask = [False, *(rng.random(int(rng.integers(1, 12))) < 0.7).tolist()]
        count = sum(mask)
        columns = {name: rng.normal(size=count) for name in ("behavior_logprobs", "reference_logprobs", "values")}
        sequences.append(sequence(mask, **columns))
    sequences = numbered(sequences, np.repeat(np.arange(4), 3).tolist())
    return sequences, {
        one.trajectory: float(reward) for one, reward in zip(sequences, rng.normal(size=12), strict=True)
    }


def one_for_all(rewards, group_ids):
    return rewards.mean()


@token_level
def one_per_trajectory(batch, config, total):
    return TokenAdvantages(advantages=batch.group_ids.double(), returns=batch.rewards)


@turn_level
def one_column(batch, config):
    return TurnAdvantages(advantages=batch.rewards, returns=batch.rewards[:, None])


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("one_for_all", r"per trajectory, of shape \[2\], got \[\]"),
        ("one_per_trajectory", r"per policy token, of shape \[6\], got \[2\]"),
        ("one_column", r"per turn, of shape \[4\], got \[4, 1\]"),
    ],
)
def test_a_custom_estimator_must_return_one_number_per_trajectory_token_or_turn(function, words):
    advantages = computed_by(advantage=f"{__file__}:{function}")
    with pytest.raises(ValueError, match=f"algorithm.advantage must return a tensor with one number {words}"):
        assign(advantages, [sequence(MULTI_TURN), sequence(MULTI_TURN)], [1.0, 0.0], [1, 1])


def assign_share(dp_size: int, shares: list[list[int]]) -> dict[str, tuple[dict, dict[str, float]]]:
    """Return a pair per estimator: the advantages of this rank's sequences by trajectory, and the metrics."""
    mesh = open_mesh(LearnerConfig(device=Device.cpu, num_ranks=dp_size))
    sequences, rewards = random_batch()
    own = [sequences[index] for index in shares[mesh.dp_rank]]
    outcome = {}
    for name in ADVANTAGES.names():
        for coefficient in (0.0, 0.3):
            discounts = {"gamma": 0.95} if name in TOKEN_ADVANTAGES | TURN_ADVANTAGES else {}
            discounts |= {"gae_lambda": 0.9} if name in CRITIC_ADVANTAGES else {}
            algorithm = AlgorithmConfig(advantage=name, kl_reward_coef=coefficient, **discounts)
            got, metrics = BatchAdvantages(algorithm, mesh).assign(
                own, {one.trajectory: rewards[one.trajectory] for one in own}
            )
            outcome[f"{name} {coefficient}"] = ({one.trajectory: of_tokens(one) for one in got}, metrics)
    return outcome


def assign_by_source(dp_size: int, shares: list[list[int]]) -> dict:
    """Return the advantages of this rank's sequences. Groups 1 and 3 have source b, which has another estimator."""
    mesh = open_mesh(LearnerConfig(device=Device.cpu, num_ranks=dp_size))
    sequences, rewards = random_batch()
    own = [sequences[index] for index in shares[mesh.dp_rank]]
    algorithm = AlgorithmConfig(
        advantage="leave_one_out_batch", advantage_by_source={"b": "reinforce_plus_plus_baseline"}
    )
    sources = {one.trajectory[0]: "ab"[one.trajectory[0] % 2] for one in own}
    own_rewards = {one.trajectory: rewards[one.trajectory] for one in own}
    got, _ = BatchAdvantages(algorithm, mesh).assign(own, own_rewards, sources)
    return {one.trajectory: of_tokens(one) for one in got}


@pytest.mark.long
def test_each_data_source_has_its_own_estimator_on_any_number_of_ranks():
    sequences, rewards = random_batch()
    want = {}
    for parity, name in ((0, "leave_one_out_batch"), (1, "reinforce_plus_plus_baseline")):
        own = [one for one in sequences if one.trajectory[0] % 2 == parity]
        got, _ = computed_by(advantage=name).assign(own, {one.trajectory: rewards[one.trajectory] for one in own})
        want |= {one.trajectory: of_tokens(one) for one in got}
    assert assign_by_source(1, [list(range(12))]) == want
    halves = run_on_ranks(2, assign_by_source, 2, [[8, 7, 6, 0, 1, 2], [3, 4, 5, 9, 10, 11]])
    assert halves[0] | halves[1] == want


@pytest.mark.parametrize("options", [{"advantage_by_source": {"a": "gae"}}, {"advantage": "remax"}])
def test_estimators_that_cannot_apply_to_one_data_source_are_refused(options: dict):
    with pytest.raises(ValueError, match="advantage_by_source needs estimators with one reward per trajectory"):
        AlgorithmConfig(**{"advantage_by_source": {"a": "rloo"}, **options})


def assign_all(dp_size: int, splits: list[list[list[int]]]) -> list[dict]:
    return [assign_share(dp_size, shares) for shares in splits]


@pytest.mark.long
def test_two_ranks_compute_the_advantages_of_one_process_for_any_split_of_the_groups():
    (alone,) = assign_all(1, [[list(range(12))]])
    splits = [
        [[8, 7, 6, 0, 1, 2], [3, 4, 5, 9, 10, 11]],
        [[], list(range(12))],
        [[11, 0, 4, 7], [1, 2, 3, 5, 6, 8, 9, 10]],
    ]
    results = run_on_ranks(2, assign_all, 2, splits)
    for index, shares in enumerate(splits):
        for name, (want, want_metrics) in alone.items():
            got = {key: values for result in results for key, values in result[index][name][0].items()}
            assert got.keys() == want.keys()
            for key, values in want.items():
                assert got[key] == pytest.approx(values, rel=1e-5, abs=1e-6), (name, shares)
            assert results[0][index][name][1] == pytest.approx(want_metrics)
            assert any(any(values) for values in want.values()), name
