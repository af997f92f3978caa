from dataclasses import replace

import numpy as np
import pytest
import torch

from learner.config import (
    AlgorithmConfig,
    Anchor,
    Device,
    KLEstimator,
    LearnerConfig,
    LoraConfig,
    Mask,
    OptimizerConfig,
    Weight,
)
from learner.heads import LogProbHead
from learner.packed_model import PackedModel
from learner.packing import Packer
from learner.roles import REFERENCE
from learner.trainer import Trainer
from learner.types import TokenSequence
from tests.support.policy_step import policy_step
from tests.support.tiny_models import random_sequences, save_tiny_model
from tests.support.whole_weights import assert_weights_equal, weights_of

CONFIG = LearnerConfig(device=Device.cpu, optimizer=OptimizerConfig(lr=5e-3, weight_decay=0.0))


def mini_batched(sequences: list[TokenSequence], count: int) -> list[TokenSequence]:
    return [replace(sequence, mini_batch=index % count) for index, sequence in enumerate(sequences)]


def trainer_of(model_path: str) -> Trainer:
    return Trainer(CONFIG, model_path=model_path, total_updates=8)


def test_every_mini_batch_is_an_update_and_all_tokens_are_trained_once(model_path):
    trainer, sequences = trainer_of(model_path), mini_batched(random_sequences(12), 4)
    metrics = policy_step(trainer, AlgorithmConfig(num_mini_batches=4)).run(sequences)
    assert trainer.optimizer.num_updates == 4
    assert metrics["num_tokens"] == sum(s.loss_mask.sum() for s in sequences)
    assert metrics["num_trajectories"] == 12


def test_an_empty_micro_batch_adds_nothing_to_the_metrics_of_a_step(model_path):
    """A rank with too few sequences gets empty micro-batches, which have no columns."""
    sequences = [s.with_column("is_fresh", np.ones(len(s.input_ids), np.float32)) for s in random_sequences(6)]
    metrics = []
    for empty in ([], Packer(max_tokens=1).pack([])):
        trainer = trainer_of(model_path)
        step = policy_step(trainer, AlgorithmConfig())
        packed = step.pack(sequences)
        updates = [replace(each, micro_batches=[*empty, *each.micro_batches]) for each in packed.updates]
        metrics.append(step.run(sequences, replace(packed, updates=updates)))
    assert metrics[0]["engine_gap"] > 0
    assert metrics[1] == pytest.approx(metrics[0] | {"num_micro_batches": metrics[0]["num_micro_batches"] + 1})


def test_an_update_without_tokens_changes_neither_weights_nor_metrics(model_path):
    """Momentum and weight decay would change the weights even without a gradient."""
    config = replace(CONFIG, optimizer=OptimizerConfig(lr=5e-3, weight_decay=0.1))
    sequences = mini_batched(random_sequences(6), 1)
    without = [replace(s, mini_batch=1, loss_mask=np.zeros_like(s.loss_mask)) for s in random_sequences(6)]
    metrics, weights = [], []
    for batch, count in ((sequences, 1), ([*sequences, *without], 2)):
        trainer = Trainer(config, model_path=model_path, total_updates=8)
        for _ in range(2):  # in the second step, AdamW has momentum
            step = policy_step(trainer, AlgorithmConfig(num_mini_batches=count)).run(batch)
        metrics.append(step)
        weights.append([parameter.detach().clone() for parameter in trainer.head.parameters()])
    assert [step["empty_updates"] for step in metrics] == [0.0, 1.0]
    assert metrics[1]["num_tokens"] == metrics[0]["num_tokens"]
    assert metrics[1]["grad_norm"] == pytest.approx(metrics[0]["grad_norm"], rel=0.5), (
        "the empty update must not halve the mean norm"
    )
    before = [parameter.clone() for parameter in weights[1]]
    update = policy_step(trainer, AlgorithmConfig())
    only_empty = [replace(s, mini_batch=0) for s in without]
    assert update.run(only_empty)["empty_updates"] == 1.0
    for left, right in zip(before, trainer.head.parameters(), strict=True):
        torch.testing.assert_close(left, right.detach(), rtol=0, atol=0)


def test_a_step_whose_masks_reject_every_token_changes_no_weight(model_path):
    """The tokens that a mask rejects stay in the loss, but their gradient is zero.

    If all tokens are rejected, the optimizer's update must be skipped, because momentum and weight decay would change
    the weights even with a gradient of zero.
    """
    config = replace(CONFIG, optimizer=OptimizerConfig(lr=5e-3, weight_decay=0.1))
    trainer, sequences = Trainer(config, model_path=model_path, total_updates=8), mini_batched(random_sequences(6), 1)
    policy_step(trainer, AlgorithmConfig()).run(sequences)
    before = [parameter.detach().clone() for parameter in trainer.head.parameters()]
    far = [s.with_column("behavior_logprobs", s.columns["behavior_logprobs"] - 15.0) for s in sequences]
    metrics = policy_step(trainer, AlgorithmConfig(masks=[Mask.token])).run(far)
    assert (metrics["masked_fraction"], metrics["grad_norm"], metrics["empty_updates"]) == (1.0, 0.0, 1.0)
    for left, right in zip(before, trainer.head.parameters(), strict=True):
        torch.testing.assert_close(left, right.detach(), rtol=0, atol=0)


def test_the_proximal_policy_is_the_policy_before_the_step(model_path):
    """The second update must use the proximal log-probs from before the first update."""
    seen = []

    class Spy(Trainer):
        def update(self, sequences, loss, **options):
            seen.append({s.input_ids.tobytes(): s.columns.get("proximal_logprobs") for s in sequences})
            return super().update(sequences, loss, **options)

    trainer = Spy(CONFIG, model_path=model_path, total_updates=8)
    sequences = mini_batched(random_sequences(6), 2)
    before = {s.input_ids.tobytes(): p for s, p in zip(sequences, trainer.scores(sequences), strict=True)}
    policy_step(trainer, AlgorithmConfig(num_mini_batches=2, anchor=Anchor.proximal)).run(sequences)
    after = trainer.scores(sequences)
    first, second = seen
    assert set(first.values()) == {None}, "the first update must compute its own log-probs"
    for ids, values in second.items():
        np.testing.assert_allclose(values, before[ids], atol=1e-5)
    assert max(np.abs(a - before[s.input_ids.tobytes()]).max() for s, a in zip(sequences, after, strict=True)) > 1e-3


OFF_POLICY = [
    {"anchor": Anchor.proximal},
    {"anchor": Anchor.proximal, "loss": "gspo", "clip_low": 0.04, "clip_high": 0.05},
    {"anchor": Anchor.proximal, "loss": "cispo", "weight": Weight.token, "weight_cap": 2.0},
    {"anchor": Anchor.proximal, "weight": Weight.sequence, "masks": [Mask.sequence, Mask.token]},
    {"masks": [Mask.geometric], "geometric_band": (0.9, 1.1)},
    {"loss": "reinforce", "masks": [Mask.k3], "k3_max": 0.1, "entropy_coef": 0.01},
]


@pytest.mark.parametrize("options", OFF_POLICY)
def test_the_first_update_of_a_step_uses_its_own_forward_as_proximal_log_probs(model_path, options):
    """The reference step takes the proximal log-probs from a forward over the whole batch before its first update."""
    algorithm = AlgorithmConfig(num_mini_batches=3, **options)
    config = replace(CONFIG, max_tokens_per_micro_batch=64)
    outcomes, scored = [], []
    for is_separate in (True, False):
        trainer = Trainer(config, model_path=model_path, total_updates=8)
        score = trainer.scores
        behavior = score(random_sequences(12))
        noise = np.random.default_rng(0)
        sequences = [
            s.with_column("behavior_logprobs", b + noise.normal(0, 0.2, len(b)).astype(np.float32))
            for s, b in zip(mini_batched(random_sequences(12), 3), behavior, strict=True)
        ]
        trainer.scores = lambda batch, score=score, **options: scored.append(len(batch)) or score(batch, **options)
        step = policy_step(trainer, algorithm)
        if is_separate:
            values = score(sequences)
            sequences = [s.with_column("proximal_logprobs", v) for s, v in zip(sequences, values, strict=True)]
        metrics = step.make_updates(sequences) if is_separate else step.run(sequences)
        outcomes.append((metrics, weights_of(trainer)))
    (want, want_weights), (got, weights) = outcomes
    assert scored == [8], "only two of three mini-batches must be scored"
    assert got.keys() == want.keys()
    assert got == pytest.approx(want, rel=1e-4, abs=1e-6)
    assert_weights_equal(weights, want_weights, atol=2e-5)


@pytest.mark.parametrize(
    ("changes", "num_scored"),
    [
        ({"lora": LoraConfig(rank=4)}, 3),
        ({"lora": LoraConfig(rank=4, dropout=0.5)}, 6),
        ({"skip_selftest": "the training forward is not compared with scoring"}, 6),
    ],
)
def test_proximal_log_probs_are_scored_if_the_training_forward_can_differ(model_path, changes, num_scored):
    scored = []
    trainer = Trainer(replace(CONFIG, **changes), model_path=model_path, total_updates=8)
    score = trainer.scores
    trainer.scores = lambda batch, **options: scored.append(len(batch)) or score(batch, **options)
    policy_step(trainer, AlgorithmConfig(num_mini_batches=2, anchor=Anchor.proximal)).run(
        mini_batched(random_sequences(6), 2)
    )
    assert scored == [num_scored]


def test_measuring_a_step_needs_no_forward_for_proximal_log_probs(model_path):
    trainer, sequences = trainer_of(model_path), mini_batched(random_sequences(6), 2)
    algorithm = AlgorithmConfig(num_mini_batches=2, anchor=Anchor.proximal, weight=Weight.token)
    scores = trainer.scores(sequences)
    columns = [s.with_column("proximal_logprobs", score) for s, score in zip(sequences, scores, strict=True)]
    trainer.scores = pytest.fail
    measured = policy_step(trainer, algorithm).measure(sequences)
    assert measured == pytest.approx(policy_step(trainer, algorithm).measure(columns), rel=1e-4, abs=1e-6)


def test_the_kl_penalty_pulls_towards_the_reference(model_path, tmp_path):
    trainer = trainer_of(model_path)
    reference = PackedModel(CONFIG, REFERENCE, model_path=save_tiny_model(tmp_path / "reference", seed=1))
    algorithm = AlgorithmConfig(loss="reinforce", kl_coef=1.0, kl_estimator=KLEstimator.k2)
    sequences = [s.with_column("advantages", np.zeros(len(s.input_ids), np.float32)) for s in random_sequences(8)]
    scores = reference.scores(sequences)
    sequences = [s.with_column("reference_logprobs", score) for s, score in zip(sequences, scores, strict=True)]
    step = policy_step(trainer, algorithm)
    history = [step.run(sequences) for _ in range(8)]
    assert history[0]["loss"] == pytest.approx(history[0]["reference_kl"], rel=1e-5)
    assert history[-1]["reference_kl"] < 0.8 * history[0]["reference_kl"]


def test_training_raises_log_probs_of_positive_advantages(model_path):
    trainer, sequences = trainer_of(model_path), random_sequences(6)
    signs = [1.0 if index % 2 else -1.0 for index in range(6)]
    behavior = trainer.scores(sequences)
    sequences = [
        s.with_column("advantages", np.full(len(s.input_ids), sign, np.float32)).with_column("behavior_logprobs", b)
        for s, sign, b in zip(sequences, signs, behavior, strict=True)
    ]
    first = policy_step(trainer, AlgorithmConfig(clip_low=9.0, clip_high=9.0)).run(sequences)
    assert first["ratio"] == pytest.approx(1.0, abs=1e-4)
    assert first["behavior_kl"] == pytest.approx(0.0, abs=1e-5)
    assert first["effective_sample_size"] == pytest.approx(1.0, abs=1e-4)
    moved = [(a - b).sum() for a, b in zip(trainer.scores(sequences), behavior, strict=True)]
    assert np.dot(moved, signs) > 0.1
    assert torch.isfinite(torch.tensor(moved)).all()


def test_the_entropy_is_computed_only_if_requested(model_path, monkeypatch):
    trainer, sequences, asked = trainer_of(model_path), random_sequences(4), []
    forward = LogProbHead.forward
    monkeypatch.setattr(
        LogProbHead, "forward", lambda self, batch, **options: asked.append(options) or forward(self, batch, **options)
    )
    assert "entropy" in policy_step(trainer, AlgorithmConfig()).run(sequences)
    assert "entropy" not in policy_step(trainer, AlgorithmConfig(report_entropy=False)).run(sequences)
    trainer.scores(sequences)
    policy_step(trainer, AlgorithmConfig(report_entropy=False, entropy_coef=0.1)).run(sequences)
    assert [options.get("entropy", False) for options in asked] == [True, False, False, True]
