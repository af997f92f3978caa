"""Trajectories with several branches: their weight in losses, in advantages and in the division among ranks."""

import os
from dataclasses import replace
from functools import partial

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from asyncrl.core.trajectory import Trajectory, TrajectoryGroup, Turn
from asyncrl.core.types import FinishReason, GroupSummary, Plan
from learner.advantages import BatchAdvantages
from learner.batching import group_cost, rank_batches
from learner.config import Aggregation, AlgorithmConfig, Anchor, Device, LearnerConfig, Mask, OptimizerConfig, Weight
from learner.fsdp import open_mesh
from learner.trainer import Trainer
from learner.types import GroupShare, RankBatch, TokenSequence, group_sequences
from learner.verl_api import RewardModelWorker
from tests.support.policy_step import policy_step
from tests.support.tiny_models import VOCABULARY, plain_log_probs, save_tiny_model
from tests.support.trajectories import sampled_turn

RNG = np.random.default_rng(0)
PROMPT = Turn.given(np.array([3, 4], dtype=np.int32))
CONFIG = LearnerConfig(device=Device.cpu, max_tokens_per_micro_batch=60, optimizer=OptimizerConfig(clip_grad_norm=0.0))


def sampled(length: int, parent: int, reason: FinishReason = FinishReason.stop) -> Turn:
    return sampled_turn(RNG, length, parent, vocabulary=VOCABULARY, finish_reason=reason)


def observed(length: int, parent: int) -> Turn:
    return Turn.given(RNG.integers(0, VOCABULARY, length).astype(np.int32), parent=parent)


TREE = (PROMPT, sampled(2, 0), observed(3, 1), sampled(3, 2), sampled(2, 2), observed(2, -1), sampled(4, 5))
"""Two branches below a tool's answer, and one from a new root; 11 tokens of the policy."""

GROUP = TrajectoryGroup.from_trajectories(
    [Trajectory(turns=TREE, reward=1.0), Trajectory(turns=(PROMPT, sampled(5, 0)), reward=0.0)], group_id=7, attempt=0
)
ADVANTAGE = {(7, 0): 0.5, (7, 1): -2.0}


def with_advantages(sequences: list[TokenSequence]) -> list[TokenSequence]:
    return [
        s.with_column("advantages", np.full(len(s.input_ids), ADVANTAGE[s.trajectory], np.float32)) for s in sequences
    ]


def by_trajectory(model_path: str) -> tuple[torch.nn.Module, list[tuple[torch.Tensor, torch.Tensor, float]]]:
    """Return a pair: the model of transformers, and a list with one tuple per trajectory.

    The tuple contains the policy log-probs, the behavior log-probs and the advantage.
    """
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, attn_implementation="eager")
    parts: dict = {key: ([], []) for key in ADVANTAGE}
    for sequence in group_sequences(GROUP):
        own, behavior = parts[sequence.trajectory]
        own.append(plain_log_probs(model, sequence))
        behavior.append(torch.from_numpy(sequence.columns["behavior_logprobs"][sequence.loss_mask]))
    return model, [(torch.cat(own), torch.cat(was), ADVANTAGE[key]) for key, (own, was) in parts.items()]


def norm_of(model: torch.nn.Module, loss: torch.Tensor) -> float:
    loss.backward()
    return float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))


@pytest.mark.parametrize("budget", [60, 10])
@pytest.mark.parametrize("aggregation", [Aggregation.sequence_mean, Aggregation.sequence_sum_norm])
def test_sequence_aggregation_counts_trajectories_not_branches(aggregation, budget, model_path):
    model, trajectories = by_trajectory(model_path)
    sums = {
        Aggregation.sequence_mean: [-a * own.mean() for own, _, a in trajectories],
        Aggregation.sequence_sum_norm: [-a * own.sum() / 8 for own, _, a in trajectories],
    }[aggregation]
    expected = torch.stack(sums).mean()
    algorithm = AlgorithmConfig(loss="reinforce", aggregation=aggregation, sequence_norm_tokens=8)
    trainer = Trainer(replace(CONFIG, max_tokens_per_micro_batch=budget), model_path=model_path, total_updates=1)
    got = policy_step(trainer, algorithm).run(with_advantages(group_sequences(GROUP)))
    assert got["loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert got["grad_norm"] == pytest.approx(norm_of(model, expected), rel=1e-4)
    assert (got["num_tokens"], got["num_trajectories"]) == (16, 2)


def test_gspo_uses_the_ratio_of_the_whole_trajectory(model_path):
    model, trajectories = by_trajectory(model_path)
    losses = []
    for own, behavior, advantage in trajectories:
        mean = (own - behavior).detach().mean()
        # In GSPO-token (arXiv 2507.18071, equation 13), each token's ratio has the value of the trajectory's ratio.
        # The gradient of each token's ratio is the gradient of this token's log-prob, times the ratio.
        ratio = (mean + own - own.detach()).exp()
        clipped = ratio.clamp(1 - 0.04, 1 + 0.05)
        losses.append(-torch.minimum(ratio * advantage, clipped * advantage).mean())
    expected = torch.stack(losses).mean()
    trainer = Trainer(CONFIG, model_path=model_path, total_updates=1)
    algorithm = AlgorithmConfig(loss="gspo", clip_low=0.04, clip_high=0.05, aggregation=Aggregation.sequence_mean)
    got = policy_step(trainer, algorithm).run(with_advantages(group_sequences(GROUP)))
    assert got["loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert got["grad_norm"] == pytest.approx(norm_of(model, expected), rel=1e-4)


def test_the_sequence_importance_weight_covers_the_whole_trajectory(model_path):
    _, trajectories = by_trajectory(model_path)
    weights = [float((own.detach() - was).sum().exp().clamp(max=2.0)) for own, was, _ in trajectories]
    expected = sum(w * len(own) for w, (own, _, _) in zip(weights, trajectories, strict=True)) / 16
    trainer = Trainer(CONFIG, model_path=model_path, total_updates=1)
    algorithm = AlgorithmConfig(anchor=Anchor.proximal, weight=Weight.sequence)
    got = policy_step(trainer, algorithm).run(with_advantages(group_sequences(GROUP)))
    assert got["importance_weight"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    "algorithm",
    [
        AlgorithmConfig(loss="gspo", clip_low=0.04, clip_high=0.05),
        AlgorithmConfig(anchor=Anchor.proximal, weight=Weight.sequence),
        AlgorithmConfig(masks=[Mask.token, Mask.geometric]),
        AlgorithmConfig(loss=f"{__file__}:own_loss"),
    ],
)
def test_losses_of_whole_trajectories_refuse_branches_that_exceed_a_micro_batch(algorithm, model_path):
    trainer = Trainer(replace(CONFIG, max_tokens_per_micro_batch=10), model_path=model_path, total_updates=1)
    # The branches have 9, 8 and 5 tokens. The second branch shares 6 tokens with the first branch.
    # The second branch does not share the token that predicts its first loss token.
    with pytest.raises(ValueError, match=r"max_tokens_per_micro_batch.*3 branches.*got 10 for 16 tokens"):
        policy_step(trainer, algorithm).run(with_advantages(group_sequences(GROUP)))


def own_loss(inputs, config):
    raise AssertionError("the loss must be refused before it is called")


def test_losses_of_whole_trajectories_refuse_a_model_that_runs_sequences_separately(tmp_path):
    path = save_tiny_model(tmp_path / "model", "rwkv", initializer_range=0.3)
    trainer = Trainer(CONFIG, model_path=path, total_updates=1)
    with pytest.raises(ValueError, match="one sequence at a time"):
        policy_step(trainer, AlgorithmConfig(loss="gspo", clip_low=0.04, clip_high=0.05)).run(
            with_advantages(group_sequences(GROUP))
        )
    assert policy_step(trainer, AlgorithmConfig()).run(with_advantages(group_sequences(GROUP)))["num_tokens"] == 16


def test_mask_truncated_depends_only_on_the_last_branch_of_a_trajectory():
    def masks(*reasons: FinishReason) -> list[int]:
        turns = (PROMPT, sampled(2, 0), sampled(3, 1, reasons[0]), sampled(4, 1, reasons[1]))
        group = TrajectoryGroup.from_trajectories([Trajectory(turns=turns, reward=0.0)], group_id=0, attempt=0)
        return [int(s.loss_mask.sum()) for s in group_sequences(group, mask_truncated=True)]

    assert masks(FinishReason.length, FinishReason.stop) == [5, 4]
    assert masks(FinishReason.stop, FinishReason.length) == [0, 0]


def test_the_balance_counts_the_packed_length_of_every_branch():
    lengths = [len(s.input_ids) for s in group_sequences(GROUP)]
    assert lengths == [10, 9, 6, 7]
    cost = group_cost(GROUP.summary)
    assert cost.prompt == 2
    assert cost.samples == pytest.approx([25 - 3 * 2, 7 - 2], rel=1e-3)
    assert cost.of([0, 1]) == pytest.approx(26, rel=1e-3)
    chains = [
        TrajectoryGroup.from_trajectories([Trajectory(turns=(PROMPT, sampled(18, 0)), reward=0.0)] * 2, **ids)
        for ids in ({"group_id": 8, "attempt": 0}, {"group_id": 9, "attempt": 0})
    ]
    wide = TrajectoryGroup.from_trajectories([Trajectory(turns=TREE, reward=0.0)] * 4, group_id=7, attempt=0)
    plan = Plan(version=0, groups=[wide.summary, *(chain.summary for chain in chains)])
    first, second = rank_batches(plan, AlgorithmConfig(), num_shards=2, max_lag=0)
    assert {first.group_ids, second.group_ids} == {(7,), (8, 9)}  # 78 and 76 tokens


def test_a_serialized_summary_has_branches_only_for_branching_trajectories():
    summary = GROUP.summary
    assert (summary.branch_tokens, summary.num_branches) == ((25, 7), (3, 1))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(summary), type=GroupSummary) == summary
    chain = TrajectoryGroup.from_trajectories(
        [Trajectory(turns=(PROMPT, sampled(2, 0), observed(1, 1), sampled(3, 2)), reward=0.0)], group_id=0, attempt=0
    )
    assert (chain.summary.branch_tokens, chain.summary.num_branches) == ((), ())


def test_the_adaptive_kl_coefficient_counts_trajectories_not_branches():
    mesh = open_mesh(LearnerConfig(device=Device.cpu))
    algorithm = AlgorithmConfig(
        advantage="grpo_no_std", kl_reward_coef=0.1, kl_target=1.0, kl_horizon=10, samples_per_prompt=2
    )
    advantages = BatchAdvantages(algorithm, mesh)
    sequences = [
        s.with_column("reference_logprobs", np.zeros(len(s.input_ids), np.float32)) for s in group_sequences(GROUP)
    ]
    advantages.assign(sequences, {(7, 0): 1.0, (7, 1): 0.0})
    assert advantages.kl_coefficient.value == pytest.approx(0.1 * (1 - 0.2 * 2 / 10))


def earning(turn_rewards: dict[int, float], reward: float = 1.0) -> TrajectoryGroup:
    trajectories = [
        Trajectory(turns=TREE, reward=reward, turn_rewards=turn_rewards),
        Trajectory(turns=(PROMPT, sampled(5, 0)), reward=0.0),
    ]
    return TrajectoryGroup.from_trajectories(trajectories, group_id=7, attempt=0)


def test_rewards_of_turns_are_part_of_the_trajectory_reward():
    summary = earning({1: 0.25, 2: 0.5, 6: -1.0}).summary
    assert summary.rewards == (0.75, 0.0)
    assert earning({}).summary.rewards == (1.0, 0.0)


def test_token_estimators_place_turn_rewards_at_the_last_token_of_the_turn():
    group = earning({1: 0.25, 2: 0.5, 6: -1.0})
    algorithm = AlgorithmConfig(advantage="gae", gamma=0.5, whiten_advantages=False)
    advantages = BatchAdvantages(algorithm, open_mesh(LearnerConfig(device=Device.cpu)))
    rewards = {(7, sample): reward for sample, reward in enumerate(group.summary.rewards)}
    assigned, _ = advantages.assign(group_sequences(group), rewards)
    outcome = 1.0 + 0.5  # the outcome reward, plus the reward of an observation
    first, second, third, _ = (s.columns["returns"][s.loss_mask].tolist() for s in assigned)
    assert first == pytest.approx(
        [0.5 * (0.25 + 0.125 * outcome), 0.25 + 0.125 * outcome, *(outcome * d for d in (0.25, 0.5, 1))]
    )
    assert second == pytest.approx([0.5 * outcome, outcome])
    assert third == pytest.approx([(outcome - 1.0) * d for d in (0.125, 0.25, 0.5, 1)])


class Source:
    def __init__(self, group: TrajectoryGroup) -> None:
        self.fetch = lambda group_ids: [group for _ in group_ids]


def test_a_reward_model_score_is_added_to_the_rewards_of_turns(model_path, tmp_path):
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_pretrained(model_path, num_labels=1).save_pretrained(tmp_path)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
    shares = (GroupShare(group_id=7, samples=(0,), rewards=np.zeros(1, np.float32), mini_batch=0),)
    scores = []
    for turn_rewards in ({}, {1: 0.25, 4: 0.5}):
        worker = RewardModelWorker(
            LearnerConfig(device=Device.cpu),
            AlgorithmConfig(),
            model_path=str(tmp_path),
            connect_buffer=partial(Source, earning(turn_rewards)),
        )
        worker.init_model()
        scores.append(worker.rewards(RankBatch(version=0, shares=shares, max_lag=0))[7, 0])
    assert scores[1] == pytest.approx(scores[0] + 0.75)
