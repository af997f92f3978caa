"""Advantages that the ranks compute, against arithmetic written out, and on two ranks against one process."""

import numpy as np
import pytest

from learner.config import AlgorithmConfig, Device, KLEstimator, LearnerConfig
from learner.credit import CreditAssignment
from learner.mesh import open_mesh
from learner.registry import ADVANTAGES
from learner.types import TokenSequence
from tests.support.ranks import run_on_ranks

MULTI_TURN = [False, True, True, False, False, True]
"""One prompt token, two policy tokens, two of the environment, one policy token."""


def sequence(mask: list[bool], **columns: list[float]) -> TokenSequence:
    """The columns are given at the policy's tokens; elsewhere they hold what must not be read."""
    filled = {}
    for name, values in columns.items():
        column = np.full(len(mask), 1e6, dtype=np.float32)
        column[np.array(mask)] = values
        filled[name] = column
    return TokenSequence(input_ids=np.ones(len(mask), np.int32), loss_mask=np.array(mask), columns=filled)


def credit(**options: object) -> CreditAssignment:
    return CreditAssignment(AlgorithmConfig(**options), open_mesh(LearnerConfig(device=Device.cpu)))


def of_tokens(s: TokenSequence, name: str = "advantages") -> list[float]:
    return s.columns[name][s.loss_mask].tolist()


def test_gae_skips_what_the_environment_said_and_pays_at_the_last_policy_token() -> None:
    sequences = [
        sequence(MULTI_TURN, behavior_logprobs=[0] * 3, values=[0.5, 0.75, 0.25]),
        sequence([False, True], behavior_logprobs=[0], values=[3.0]),
        sequence([False, False], behavior_logprobs=[], values=[]),
    ]
    got, _ = credit(advantage="gae", trace=0.5, whiten_advantages=False).assign(
        sequences, np.array([1.0, 2.0, 9.0], np.float32), np.array([0, 1, 1])
    )
    third = 1.0 - 0.25
    second = 0.25 - 0.75 + 0.5 * third
    first = 0.75 - 0.5 + 0.5 * second
    assert of_tokens(got[0]) == pytest.approx([first, second, third])
    assert of_tokens(got[0], "returns") == pytest.approx([first + 0.5, second + 0.75, third + 0.25])
    assert of_tokens(got[1]) == pytest.approx([-1.0])
    assert got[0].columns["advantages"][[0, 3, 4]].tolist() == [0.0] * 3


def test_a_kl_penalty_in_the_rewards_reaches_outcome_estimators_as_a_sum() -> None:
    sequences = [
        sequence(MULTI_TURN, behavior_logprobs=[-1, -1, -2], reference_logprobs=[-2, -1, -2.5]),  # KL 1 + 0 + 0.5
        sequence([False, True], behavior_logprobs=[-1], reference_logprobs=[-0.5]),  # KL -0.5
    ]
    got, metrics = credit(advantage="grpo_no_std", kl_reward_coef=0.2).assign(
        sequences, np.array([1.0, 0.0], np.float32), np.array([4, 4])
    )
    first, second = 1.0 - 0.2 * 1.5, 0.0 + 0.2 * 0.5
    assert of_tokens(got[0]) == pytest.approx([(first - second) / 2] * 3)
    assert of_tokens(got[1]) == pytest.approx([(second - first) / 2])
    assert metrics == pytest.approx({"reward_kl": 1.0 / 4, "kl_reward_coef": 0.2})


def test_a_kl_penalty_in_the_rewards_is_paid_token_by_token() -> None:
    one = sequence(MULTI_TURN, behavior_logprobs=[-1, -1, -2], reference_logprobs=[-2, -1, -2.5])
    got, _ = credit(advantage="gae", whiten_advantages=False, kl_reward_coef=0.2, discount=0.5).assign(
        [one], np.array([1.0], np.float32), np.array([0])
    )
    last = 1.0 - 0.1
    assert of_tokens(got[0], "returns") == pytest.approx([-0.2 + 0.25 * last, 0.5 * last, last])
    squared, _ = credit(
        advantage="gae", whiten_advantages=False, kl_reward_coef=0.2, kl_reward_estimator=KLEstimator.k2
    ).assign([one], np.array([0.0], np.float32), np.array([0]))
    assert of_tokens(squared[0], "returns") == pytest.approx([-0.2 * (0.5 + 0.125), -0.2 * 0.125, -0.2 * 0.125])


def test_an_adaptive_coefficient_follows_after_the_step_that_it_was_used_in() -> None:
    one = sequence([False, True], behavior_logprobs=[-1], reference_logprobs=[-3])
    assigner = credit(advantage="grpo_no_std", kl_reward_coef=0.1, kl_target=1.0, kl_horizon=10)
    seen = [
        assigner.assign([one, one], np.zeros(2, np.float32), np.zeros(2, np.int64))[1]["kl_reward_coef"]
        for _ in range(2)
    ]
    assert seen == pytest.approx([0.1, 0.1 * (1 + 0.2 * 2 / 10)])  # the error 2 / 1 - 1 is cut at 0.2


def test_a_batch_of_trajectories_without_policy_tokens_is_no_error() -> None:
    silent = sequence([False, False], behavior_logprobs=[], reference_logprobs=[])
    for name in ("gae", "reinforce_plus_plus", "grpo"):
        got, _ = credit(advantage=name, kl_reward_coef=0.1).assign([silent] * 2, np.ones(2, np.float32), np.zeros(2))
        assert not got[0].columns["advantages"].any()


def random_batch() -> tuple[list[TokenSequence], np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    sequences = []
    for _ in range(12):
        mask = [False, *(rng.random(int(rng.integers(1, 12))) < 0.7).tolist()]
        count = sum(mask)
        columns = {name: rng.normal(size=count) for name in ("behavior_logprobs", "reference_logprobs", "values")}
        sequences.append(sequence(mask, **columns))
    return sequences, rng.normal(size=12).astype(np.float32), np.repeat(np.arange(4), 3)


def assign_share(dp_size: int, shares: list[list[int]]) -> dict[str, tuple[dict[int, list[float]], dict[str, float]]]:
    """Advantages of this rank's groups under every estimator, by the index of the sequence in the whole batch."""
    mesh = open_mesh(LearnerConfig(device=Device.cpu, num_ranks=dp_size))
    sequences, rewards, groups = random_batch()
    own = [i for i in range(12) if groups[i] in shares[mesh.dp_rank]]
    outcome = {}
    for name in ADVANTAGES.names():
        for coefficient in (0.0, 0.3):
            algorithm = AlgorithmConfig(advantage=name, kl_reward_coef=coefficient, trace=0.9, discount=0.95)
            got, metrics = CreditAssignment(algorithm, mesh).assign(
                [sequences[i] for i in own], rewards[own], groups[own]
            )
            outcome[f"{name} {coefficient}"] = ({i: of_tokens(s) for i, s in zip(own, got, strict=True)}, metrics)
    return outcome


def test_two_ranks_give_the_advantages_of_one_process_also_when_one_has_nothing() -> None:
    alone = assign_share(1, [[0, 1, 2, 3]])
    for shares in ([[2, 0], [3, 1]], [[], [0, 1, 2, 3]]):
        results = run_on_ranks(2, assign_share, 2, shares)
        for name, (want, want_metrics) in alone.items():
            got = {i: values for result in results for i, values in result[name][0].items()}
            assert got.keys() == want.keys()
            for i, values in want.items():
                assert got[i] == pytest.approx(values, rel=1e-5, abs=1e-6), (name, shares)
            assert results[0][name][1] == pytest.approx(want_metrics)
            assert any(any(values) for values in want.values()), name
