import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from gloo import run_on_ranks
from tiny_models import random_sequences, save_tiny_model

import learner.checkpoint
from learner.checkpoint import Checkpointer
from learner.config import AlgorithmConfig, Device, LearnerConfig, OptimizerConfig, Schedule
from learner.step import PolicyStep
from learner.trainer import PolicyTrainer
from learner.weights import gather_weights


def trainer_of(model_path: str, num_ranks: int = 1, sp_size: int = 1) -> PolicyTrainer:
    optimizer = OptimizerConfig(lr=1e-3, schedule=Schedule.linear, warmup_steps=1, eps=1e-4)
    config = LearnerConfig(num_ranks=num_ranks, sp_size=sp_size, device=Device.cpu, optimizer=optimizer)
    return PolicyTrainer(config, model_path=model_path, total_updates=8)


def step(trainer: PolicyTrainer, seed: int) -> None:
    dp = trainer.mesh.num_ranks // trainer.mesh.sp_size
    PolicyStep(trainer, AlgorithmConfig()).run(random_sequences(8, seed)[trainer.mesh.dp_rank :: dp])


def weights_of(trainer: PolicyTrainer) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in (gather_weights(trainer) or {}).items()}


@pytest.fixture
def model_path(tmp_path: Path) -> str:
    return save_tiny_model(tmp_path / "model")


def assert_equal(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> None:
    assert left.keys() == right.keys()
    assert left
    for name, value in left.items():
        np.testing.assert_array_equal(value, right[name], err_msg=name)


def resumed_run(model_path: str, directory: str, num_ranks: int) -> tuple[dict, dict, int]:
    """Weights of a run of four steps, and of one that stops after two and is resumed by another trainer."""
    trainer = trainer_of(model_path, num_ranks)
    for seed in (0, 1):
        step(trainer, seed)
    path = Checkpointer(trainer, directory).save(2)
    drawn = torch.rand(1).item()
    for seed in (2, 3):
        step(trainer, seed)
    resumed = trainer_of(model_path, num_ranks)
    version = Checkpointer(resumed, directory).load(path)
    assert torch.rand(1).item() == drawn
    for seed in (2, 3):
        step(resumed, seed)
    return weights_of(trainer), weights_of(resumed), version


def test_a_resumed_run_continues_bit_for_bit(model_path: str, tmp_path: Path) -> None:
    straight, resumed, version = resumed_run(model_path, str(tmp_path / "checkpoints"), 1)
    assert_equal(straight, resumed)
    assert version == 2


def two_ranks(model_path: str, directory: str, alone: str) -> tuple:
    outcome = resumed_run(model_path, directory, 2)
    split = trainer_of(model_path, 2, sp_size=2)
    Checkpointer(split, alone).load(Path(alone) / "v00000005")
    return outcome, weights_of(split)


def test_ranks_resume_bit_for_bit_and_load_what_another_layout_saved(model_path: str, tmp_path: Path) -> None:
    trainer = trainer_of(model_path)
    step(trainer, 7)
    alone = Checkpointer(trainer, str(tmp_path / "alone"))
    alone.save(5)
    (straight, resumed, _), loaded = run_on_ranks(
        2, two_ranks, model_path, str(tmp_path / "two"), str(tmp_path / "alone")
    )[0]
    assert_equal(straight, resumed)
    assert_equal(loaded, weights_of(trainer))

    single = trainer_of(model_path)  # and one process loads what two ranks saved
    Checkpointer(single, str(tmp_path / "two")).load(tmp_path / "two" / "v00000002")
    for seed in (2, 3):
        step(single, seed)
    for name, value in weights_of(single).items():
        np.testing.assert_allclose(value, straight[name], atol=2e-5, err_msg=name)


def test_training_goes_on_while_a_checkpoint_is_written(model_path: str, tmp_path: Path) -> None:
    trainer = trainer_of(model_path)
    step(trainer, 0)
    saved = weights_of(trainer)
    checkpointer = Checkpointer(trainer, str(tmp_path / "c"))
    path = checkpointer.save(1, wait=False)
    step(trainer, 1)
    checkpointer.finish()
    other = trainer_of(model_path)
    assert Checkpointer(other, str(tmp_path / "c")).load(path) == 1
    assert_equal(weights_of(other), saved)


def test_a_crash_while_saving_leaves_the_checkpoint_before(
    model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(model_path)
    step(trainer, 0)
    saved = weights_of(trainer)
    checkpointer = Checkpointer(trainer, str(tmp_path / "c"))
    checkpointer.save(1)
    step(trainer, 1)

    def crash(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(learner.checkpoint.state_dict_saver, "async_save", crash)
    with pytest.raises(OSError, match="no space"):
        checkpointer.save(2)
    monkeypatch.undo()
    newest = checkpointer.latest()
    assert newest is not None
    assert newest.name == "v00000001"
    checkpointer.load(newest)
    assert_equal(weights_of(trainer), saved)
    assert checkpointer.save(2).name == "v00000002"  # what the crash left behind is in nobody's way
    assert checkpointer.latest() == tmp_path / "c" / "v00000002"


def test_only_the_last_checkpoints_are_kept(model_path: str, tmp_path: Path) -> None:
    checkpointer = Checkpointer(trainer_of(model_path), str(tmp_path / "c"), keep=2)
    assert checkpointer.latest() is None
    for version in (9, 10, 11):
        checkpointer.save(version)
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["v00000010", "v00000011"]


def test_a_path_without_a_checkpoint_is_named(model_path: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no checkpoint at '.*nowhere'"):
        Checkpointer(trainer_of(model_path), str(tmp_path)).load(tmp_path / "nowhere")
