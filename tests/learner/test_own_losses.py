"""A user's own loss: its token columns, its options, the proximal policy, and the decorator `by_token`."""

from dataclasses import replace

import numpy as np
import pytest

from asyncrl.cli.compose import compose_run
from asyncrl.config import override_of
from asyncrl.core.trajectory import Trajectory, TrajectoryGroup, Turn
from learner.config import AlgorithmConfig, Anchor, Device, LearnerConfig, OptimizerConfig
from learner.losses import LOSSES, LossTerms, by_token
from learner.trainer import Trainer
from learner.types import TokenSequence, group_sequences
from tests.support.policy_step import policy_step
from tests.support.tiny_models import VOCABULARY
from tests.support.trajectories import sampled_turn

RNG = np.random.default_rng(3)
PROMPT = Turn.given(np.array([3, 4], dtype=np.int32))
CONFIG = LearnerConfig(device=Device.cpu, max_tokens_per_micro_batch=12, optimizer=OptimizerConfig(clip_grad_norm=0.0))
SEEN: list[dict[str, np.ndarray]] = []


@by_token
def watching(inputs, config):
    SEEN.append({name: value.numpy() for name, value in inputs.columns.items()})
    factor = config.options.get("factor", 1.0)
    return LossTerms(per_token=-factor * inputs.columns["advantages"] * inputs.log_probs)


@by_token
def anchored(inputs, config):
    return LossTerms(
        per_token=-inputs.log_probs, metrics={"moved": (inputs.log_probs - inputs.proximal_logprobs).detach()}
    )


def shaped(inputs, config):
    losses = -inputs.columns["advantages"] * inputs.log_probs
    changes = {"mean": losses.mean(), "column": losses[:, None], "metric": losses}
    metrics = {"size": losses.detach().mean()} if config.options["kind"] == "metric" else {}
    return LossTerms(per_token=changes[config.options["kind"]], metrics=metrics)


def sampled(length: int, parent: int, **columns: np.ndarray) -> Turn:
    return sampled_turn(RNG, length, parent, vocabulary=VOCABULARY, version=5, columns=columns)


def group_of(group_id: int, *turns: Turn) -> TrajectoryGroup:
    trajectories = [Trajectory(turns=(PROMPT, *turns), reward=1.0)]
    return TrajectoryGroup.from_trajectories(trajectories, group_id=group_id, attempt=0)


def own(function: str, **options) -> AlgorithmConfig:
    return AlgorithmConfig(loss=f"{__file__}:{function}", report_entropy=False, **options)


def with_advantages(sequences: list[TokenSequence]) -> list[TokenSequence]:
    return [s.with_column("advantages", np.full(len(s.input_ids), 0.5, np.float32)) for s in sequences]


@pytest.fixture
def seen() -> list[dict[str, np.ndarray]]:
    """Return an empty list, to which the test's loss writes its inputs.

    The registry imports this file a second time, under another name. So the loss writes to the list of that module.
    """
    imported = LOSSES.get(f"{__file__}:watching").__globals__["SEEN"]
    imported.clear()
    return imported


def test_a_custom_loss_gets_every_token_column_under_its_name(model_path, seen):
    experts = np.arange(6, dtype=np.int16).reshape(3, 2)
    groups = [group_of(1, sampled(3, 0, experts=experts)), group_of(2, sampled(4, 0))]
    sequences = [s for group in groups for s in group_sequences(group, all_columns=True)]
    policy_step(Trainer(CONFIG, model_path=model_path, total_updates=1), own("watching")).run(
        with_advantages(sequences)
    )
    (columns,) = seen
    assert columns["versions"].tolist() == [5.0] * 7
    longest, shorter = groups[1], groups[0]  # the longest sequence comes first
    for name in ("token_ids", "logprobs"):
        want = np.concatenate([longest.token_columns[name][2:], shorter.token_columns[name][2:]])
        np.testing.assert_array_equal(columns[name], want.astype(np.float32))
    np.testing.assert_array_equal(columns["behavior_logprobs"], columns["logprobs"])
    assert columns["experts"].tolist() == [[0.0, 0.0]] * 4 + experts.tolist(), (
        "a missing column must be filled with zeros"
    )


def test_a_built_in_loss_does_not_get_unused_columns():
    (sequence,) = group_sequences(group_of(1, sampled(3, 0, experts=np.zeros((3, 2), dtype=np.int16))))
    assert set(sequence.columns) == {"behavior_logprobs"}


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("mean", r"per_token .* \[3\], got \[\]"),
        ("column", r"per_token .* got \[3, 1\]"),
        ("metric", r"size .* got \[\]"),
    ],
)
def test_a_custom_loss_must_return_one_number_per_token(model_path, kind, words):
    sequences = with_advantages(group_sequences(group_of(1, sampled(3, 0)), all_columns=True))
    step = policy_step(Trainer(CONFIG, model_path=model_path, total_updates=1), own("shaped", options={"kind": kind}))
    with pytest.raises(ValueError, match=words):
        step.run(sequences)


def test_a_custom_loss_gets_its_options_and_a_built_in_loss_refuses_options(model_path):
    sequences = with_advantages(group_sequences(group_of(1, sampled(3, 0))))
    losses = []
    for options in ({}, {"factor": 3.0}):
        trainer = Trainer(CONFIG, model_path=model_path, total_updates=1)
        losses.append(policy_step(trainer, own("watching", options=options)).run(sequences)["loss"])
    assert losses[1] == pytest.approx(3 * losses[0], rel=1e-5)
    with pytest.raises(
        ValueError, match=r"algorithm.options=\{'factor': 3.0\} needs your own loss .*algorithm.loss=ppo"
    ):
        AlgorithmConfig(options={"factor": 3.0})


def test_options_of_a_custom_loss_can_be_set_on_the_command_line():
    loss = override_of("algorithm.loss", f"{__file__}:watching")
    assert compose_run([loss, "algorithm.options={factor: 2.5, name: x}"]).algorithm.options == {
        "factor": 2.5,
        "name": "x",
    }


def test_a_custom_loss_by_token_trains_branches_in_separate_micro_batches(model_path):
    """The trajectory has three branches of up to 9 tokens, and a micro-batch holds at most 12 tokens.

    The loss gspo is not marked with `by_token`. So it needs all branches in one micro-batch, and raises an error.
    """
    turns = (sampled(3, 0), sampled(4, 1), sampled(4, 1), sampled(4, 0))
    sequences = with_advantages(group_sequences(group_of(1, *turns)))
    assert len(sequences) == 3
    trainer = Trainer(CONFIG, model_path=model_path, total_updates=1)
    assert policy_step(trainer, own("watching")).run(sequences)["num_micro_batches"] > 1
    with pytest.raises(ValueError, match="3 branches together"):
        policy_step(trainer, AlgorithmConfig(loss="gspo", anchor=Anchor.proximal, clip_low=3e-4, clip_high=4e-4)).run(
            sequences
        )


def test_a_custom_loss_gets_the_proximal_log_probs_from_before_the_step(model_path):
    sequences = with_advantages([s for i in range(2) for s in group_sequences(group_of(i, sampled(6, 0)))])
    halves = [replace(sequence, mini_batch=index) for index, sequence in enumerate(sequences)]
    config = replace(CONFIG, optimizer=OptimizerConfig(lr=1e-2))

    def moved(sequences: list[TokenSequence], **options) -> float:
        trainer = Trainer(config, model_path=model_path, total_updates=2)
        return policy_step(trainer, own("anchored", **options)).run(sequences)["moved"]

    assert moved(sequences) == 0.0, "with one update, both policies must be equal"
    assert abs(moved(halves, num_mini_batches=2, anchor=Anchor.proximal)) > 1e-3, (
        "the second update must start from changed weights"
    )
    with pytest.raises(ValueError, match=r"algorithm.anchor must be proximal .* several updates, got behavior"):
        moved(halves, num_mini_batches=2)
