"""Any split of a batch over ranks and micro-batches gives the same results as one process."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncrl.core.trajectory import TrajectoryGroup
from asyncrl.core.types import FinishReason, Plan
from learner import fsdp
from learner.advantages import BatchAdvantages
from learner.batching import rank_batches
from learner.config import (
    Aggregation,
    AlgorithmConfig,
    Anchor,
    Device,
    LearnerConfig,
    Mask,
    OptimizerConfig,
    Weight,
)
from learner.losses import LOSSES
from learner.trainer import Trainer
from learner.types import TokenSequence, group_sequences
from tests.support.policy_step import policy_step, share_of
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import VOCABULARY, awkward_sequences, random_sequences
from tests.support.trajectories import make_group
from tests.support.whole_weights import assert_weights_equal, weights_of

NUM_UPDATES = 2


def config(num_ranks: int, sp_size: int = 1, max_tokens: int = 50) -> LearnerConfig:
    return LearnerConfig(
        num_ranks=num_ranks,
        sp_size=sp_size,
        device=Device.cpu,
        max_tokens_per_micro_batch=max_tokens,
        logprob_chunk_tokens=16,
        skip_selftest="test_families.py compares each load on these meshes",
        # eps is large. Otherwise AdamW would turn rounding errors in tiny gradients into updates of full size.
        optimizer=OptimizerConfig(lr=1e-3, clip_grad_norm=0.5, weight_decay=0.1, eps=1e-4),
    )


CORRECTIONS = [
    {},
    {"anchor": Anchor.proximal, "weight": Weight.token, "weight_cap": 0},
    {"anchor": Anchor.proximal, "weight": Weight.token, "masks": [Mask.token]},
    {"anchor": Anchor.proximal, "weight": Weight.sequence, "masks": [Mask.sequence], "sequence_band": (0.0, 8.0)},
    {"masks": [Mask.geometric], "geometric_band": (0.9, 1.1)},
    {"masks": [Mask.token, Mask.k3], "k3_max": 0.1},
]

CASES = [
    AlgorithmConfig(
        loss=loss,
        aggregation=list(Aggregation)[index % len(Aggregation)],
        **CORRECTIONS[index % len(CORRECTIONS)],
        sequence_norm_tokens=24,
        **({"clip_low": 0.04, "clip_high": 0.05} if loss == "gspo" else {}),
        dual_clip=3.0,
        entropy_coef=0.01 * (index % 2),
    )
    for index, loss in enumerate(sorted(LOSSES.names()) * 2)
]
"""Each loss occurs twice. From case to case, the aggregation and the correction (weight and masks) change."""


def train(
    model_path: str, learner: LearnerConfig, num_sequences: int, num_cases: int = len(CASES)
) -> list[tuple[list[dict], dict, int]]:
    """Return for each case: the metrics of each update, the final weights, and the number of trained sequences."""
    sequences = awkward_sequences()[:num_sequences]
    outcomes = []
    for algorithm in CASES[:num_cases]:
        trainer = Trainer(learner, model_path=model_path, total_updates=NUM_UPDATES, temperature=0.7)
        share = share_of(trainer, sequences)
        step = policy_step(trainer, algorithm)
        metrics = [step.run(share) for _ in range(NUM_UPDATES)]
        outcomes.append((metrics, weights_of(trainer), len(share)))
    return outcomes


def assert_same(left: list, right: list) -> None:
    """Compare all cases of ``left`` with the same cases of ``right``."""
    for case, (metrics, weights, _), (want_metrics, want_weights, _) in zip(CASES, left, right, strict=False):
        for got, want in zip(metrics, want_metrics, strict=True):
            for name in want.keys() - {"num_micro_batches"}:
                # The loss adds terms of up to +-1000, which cancel each other.
                # The rounding error of the loss is relative to its terms, not to their sum.
                assert got[name] == pytest.approx(want[name], rel=1e-4, abs=1e-5), (case, name)
        assert_weights_equal(weights, want_weights, atol=2e-5)


def on_each_mesh(model_path: str, meshes: list[tuple[LearnerConfig, int]]) -> list[list]:
    """Test several meshes in the same processes.

    Each loss runs twice on the first mesh, and once on each other mesh. On each mesh after the first, every layer is an
    FSDP unit.
    """
    outcomes = []
    for learner, num_sequences in meshes:
        outcomes.append(train(model_path, learner, num_sequences, len(CASES) // (1 + bool(outcomes))))
        fsdp.MIN_UNIT_NUMEL = 1
    return outcomes


@pytest.mark.long
def test_two_ranks_equal_one_process_even_if_one_rank_has_no_loss_token(model_path):
    alone = train(model_path, config(1, max_tokens=10_000), 16)
    meshes = [(config(2), 16), (config(2, sp_size=2), 16), (config(2), 2)]
    results = run_on_ranks(2, on_each_mesh, model_path, meshes)
    data, sequence, uneven = results[0]
    assert_same(data, alone)
    assert_same(sequence, alone)
    assert_same(uneven, train(model_path, config(1), 2))
    # Each of the two ranks has one sequence. One of the two sequences has no token in the loss.
    assert sorted(result[2][0][2] for result in results) == [1, 1]
    assert alone[0][0][0]["num_micro_batches"] == 1
    assert data[0][0][0]["num_micro_batches"] > 1
    moved = np.abs(alone[0][1]["model.embed_tokens.weight"] - start_weights(model_path))
    assert moved.max() > 1e-3  # weights change by 100 times the tolerance


@pytest.mark.long
def test_four_ranks_equal_one_process_in_every_layout(model_path):
    alone = train(model_path, config(1, max_tokens=10_000), 16)
    meshes = [
        (config(4, sp_size=2), 16),
        (replace(config(4, sp_size=4), activation_checkpointing=True), 16),
        (replace(config(4), fsdp_size=2, activation_checkpointing="selective"), 16),
        (replace(config(4, sp_size=2), fsdp_size=2, offload_policy=True, activation_checkpointing="selective"), 16),
        (config(4), 3),  # four ranks for three sequences, so one rank has none
    ]
    results = run_on_ranks(4, on_each_mesh, model_path, meshes, timeout_s=200.0)
    *outcomes, few = results[0]
    for outcome in outcomes:
        assert_same(outcome, alone)
    assert_same(few, train(model_path, config(1), 3))
    assert min(result[-1][0][2] for result in results) == 0


def plan_of(groups: list[TrajectoryGroup]) -> Plan:
    return Plan(version=0, groups=[group.summary for group in groups])


def step_on_a_plan(model_path: str, learner: LearnerConfig) -> tuple[list[dict], dict]:
    """Make two steps of four updates each. Returns the metrics and the final weights."""
    groups = [random_group(seed) for seed in range(10)]
    by_id = {group.group_id: group for group in groups}
    algorithm = AlgorithmConfig(num_mini_batches=4, anchor=Anchor.proximal, weight=Weight.token, entropy_coef=0.01)
    shards = rank_batches(plan_of(groups), algorithm, num_shards=learner.num_ranks // learner.sp_size, max_lag=0)
    # A trainer with a self-test uses its training forward for the proximal log-probs of the first update.
    trainer = Trainer(replace(learner, skip_selftest=""), model_path=model_path, total_updates=8)
    batch = shards[trainer.mesh.dp_rank]
    sequences = [
        sequence
        for share in batch.shares
        for sequence in group_sequences(by_id[share.group_id], samples=share.samples, mini_batch=share.mini_batch)
    ]
    sequences, _ = BatchAdvantages(algorithm, trainer.mesh).assign(sequences, batch.rewards)
    step = policy_step(trainer, algorithm)
    metrics = [step.run(sequences) for _ in range(2)]
    return metrics, weights_of(trainer)


def random_group(seed: int) -> TrajectoryGroup:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 14, 3).astype(np.int32)
    total = int(lengths.sum())
    return make_group(
        group_id=100 + seed,
        attempt=0,
        prompt_ids=rng.integers(0, VOCABULARY, int(rng.integers(1, 8))).astype(np.int32),
        response_ids=rng.integers(0, VOCABULARY, total).astype(np.int32),
        response_lengths=lengths,
        response_mask=rng.random(total) < 0.8,  # an environment wrote the other tokens
        logprobs=-rng.uniform(0.5, 6.0, total).astype(np.float32),
        versions=np.zeros(total, dtype=np.int32),
        rewards=rng.random(3).astype(np.float32),
        finish_reasons=(FinishReason.stop,) * 3,
    )


@pytest.mark.long
def test_four_updates_per_step_do_not_depend_on_the_number_of_ranks(model_path):
    metrics, weights = step_on_a_plan(model_path, config(1, max_tokens=10_000))
    assert metrics[0]["num_tokens"] == sum(random_group(seed).summary.num_tokens for seed in range(10))
    for learner in (config(2), config(2, sp_size=2)):
        got_metrics, got_weights = run_on_ranks(2, step_on_a_plan, model_path, learner)[0]
        for got, want in zip(got_metrics, metrics, strict=True):
            for name in want.keys() - {"num_micro_batches"}:
                assert got[name] == pytest.approx(want[name], rel=5e-5, abs=1e-6), name
        assert_weights_equal(got_weights, weights, atol=3e-5)
    assert np.abs(weights["model.embed_tokens.weight"] - start_weights(model_path)).max() > 1e-3


def start_weights(model_path: str) -> np.ndarray:
    from safetensors.torch import load_file

    return load_file(f"{model_path}/model.safetensors")["model.embed_tokens.weight"].numpy()


def test_the_cases_cover_every_loss_aggregation_weight_and_mask():
    assert {case.loss for case in CASES} == set(LOSSES.names())
    assert {case.aggregation for case in CASES} == set(Aggregation)
    assert {case.anchor for case in CASES} == set(Anchor)
    assert {case.weight for case in CASES} == set(Weight)
    assert {mask for case in CASES for mask in case.masks} == set(Mask)


def error_of_an_update(model_path: str, learner: LearnerConfig, longest: int) -> str:
    """Return the error of an update on this rank. Only data-parallel rank 0 has a sequence that is too long."""
    trainer = Trainer(learner, model_path=model_path, total_updates=1)
    length = longest if trainer.mesh.dp_rank == 0 else 6
    mask = np.arange(length) > 1
    columns = {name: np.zeros(length, dtype=np.float32) for name in ("behavior_logprobs", "advantages")}
    sequence = TokenSequence(input_ids=np.arange(length) % VOCABULARY, loss_mask=mask, columns=columns)
    try:
        policy_step(trainer, AlgorithmConfig()).run([sequence])
    except ValueError as error:
        return str(error)
    return "trained"


@pytest.mark.long
@pytest.mark.parametrize(("num_ranks", "sp_size"), [(2, 1), (4, 2)])
def test_a_sequence_over_the_budget_raises_an_error_on_all_ranks(model_path, num_ranks, sp_size):
    """If only one rank raised the error, the other ranks would wait in a collective for ten minutes."""
    learner = config(num_ranks, sp_size=sp_size, max_tokens=20)
    errors = run_on_ranks(num_ranks, error_of_an_update, model_path, learner, 50, timeout_s=60.0)
    assert len(errors) == num_ranks
    for rank, error in enumerate(errors):
        assert "learner.max_tokens_per_micro_batch" in error
        assert ("for a sequence of 49 tokens" in error) == (rank < sp_size), error
        assert ("another rank" in error) == (rank >= sp_size), error
    assert run_on_ranks(num_ranks, error_of_an_update, model_path, learner, 12)[0] == "trained"


def test_log_probs_do_not_depend_on_the_order_of_sequences(model_path):
    trainer = Trainer(config(1, max_tokens=60), model_path=model_path, total_updates=1)
    sequences = random_sequences(9)
    forward, backward = trainer.scores(sequences), trainer.scores(sequences[::-1])
    for one, other in zip(forward, backward[::-1], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    assert torch.distributed.get_world_size() == 1
