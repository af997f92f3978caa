"""Offload of model and optimizer to host memory, measured by the bytes of tensor storages."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch

from learner.config import AlgorithmConfig, Device, LearnerConfig
from learner.offload import MovableTensors, OffloadPolicy
from learner.trainer import Trainer
from tests.support.policy_step import policy_step
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import random_sequences
from tests.support.whole_weights import gather_weights

PLAIN = LearnerConfig(device=Device.cpu, skip_selftest="test_selftest.py tests it")
PARAM = replace(PLAIN, param_offload=True)
OPTIMIZER = replace(PLAIN, optimizer_offload=True)
TRANSITION = replace(PLAIN, offload_at_transition_only=True)


class Learner:
    """A trainer and its offload policy. The methods call the two objects in the same order as a learner's worker."""

    def __init__(self, config: LearnerConfig, model_path: str) -> None:
        self.trainer = Trainer(config, model_path=model_path, total_updates=9)
        self.residence = OffloadPolicy(config, self.trainer.head, self.trainer.optimizer)
        self.step = policy_step(self.trainer, AlgorithmConfig())
        self.model_bytes = sum(p.numel() * 4 for p in self.trainer.head.parameters())

    @property
    def flags(self) -> tuple[bool, bool]:
        return self.residence.model_offloaded, self.residence.optimizer_offloaded

    @property
    def num_copies(self) -> int:
        """The bytes on the device, divided by the bytes of the weights: 1 for the weights, plus 2 for the moments."""
        return self.residence.device_bytes() // self.model_bytes

    def update(self) -> float:
        with self.residence.updating():
            assert self.flags == (False, False)
            return self.step.run(random_sequences(4))["loss"]

    def log_prob(self) -> np.ndarray:
        with self.residence.reading():
            assert not self.residence.model_offloaded
            return self.trainer.scores(random_sequences(1))[0]


@pytest.mark.parametrize("is_freed", [True, False])
def test_training_waits_for_the_memory_of_a_killed_engine(model_path, monkeypatch, is_freed):
    monkeypatch.setattr("learner.offload._RETRY_S", 0.01)
    monkeypatch.setattr("learner.offload._FREED_WITHIN_S", 60.0 if is_freed else 0.05)
    learner = Learner(TRANSITION, model_path)
    learner.update()
    learner.residence.enter_rollout()
    move, left = MovableTensors._move_to_device, [torch.OutOfMemoryError("CUDA out of memory")] * 3

    def move_when_free(tensors):
        if left:
            raise left.pop() if is_freed else left[0]
        move(tensors)

    monkeypatch.setattr(MovableTensors, "_move_to_device", move_when_free)
    if not is_freed:
        with pytest.raises(torch.OutOfMemoryError):
            learner.residence.enter_training()
        assert learner.flags == (True, True)
        return
    learner.residence.enter_training()
    assert (left, learner.flags) == ([], (False, False))
    learner.update()


def test_by_default_everything_stays_on_the_device(model_path):
    learner = Learner(PLAIN, model_path)
    for act in (learner.update, learner.log_prob, learner.residence.enter_rollout, learner.residence.enter_training):
        act()
        assert learner.flags == (False, False)
    assert learner.num_copies == 3


def test_param_offload_frees_the_model_after_every_use(model_path):
    learner = Learner(PARAM, model_path)
    assert (learner.flags, learner.residence.device_bytes()) == ((True, False), 0)
    for act in (learner.update, learner.log_prob):
        act()
        assert learner.flags == (True, False)
    assert learner.num_copies == 2  # the moments stay


def test_optimizer_offload_frees_the_moments_after_every_update(model_path):
    learner = Learner(OPTIMIZER, model_path)
    learner.update()
    assert learner.flags == (False, True)
    assert learner.num_copies == 1
    learner.log_prob()
    assert learner.flags == (False, True)  # scoring does not load the moments


def test_rollout_mode_frees_all_device_memory_and_training_mode_restores_it(model_path):
    learner = Learner(TRANSITION, model_path)
    learner.update()
    assert learner.flags == (False, False)
    full = learner.residence.device_bytes()
    learner.residence.enter_rollout()
    assert (learner.flags, learner.residence.device_bytes()) == ((True, True), 0)
    assert learner.residence.metrics == {"rollout_device_bytes_before": full, "rollout_device_bytes_after": 0.0}
    learner.residence.enter_training()
    assert (learner.flags, learner.residence.device_bytes()) == ((False, False), full)
    assert learner.residence.metrics["trainer_device_bytes_before"] == 0.0
    assert learner.residence.metrics["trainer_device_bytes_after"] == full


def test_an_update_loads_tensors_that_rollout_mode_offloaded(model_path):
    learner = Learner(TRANSITION, model_path)
    learner.residence.enter_rollout()
    learner.update()
    assert learner.flags == (False, False)
    learner.residence.enter_rollout()
    learner.log_prob()
    assert learner.flags == (False, True)


@pytest.mark.parametrize("config", [PARAM, OPTIMIZER, TRANSITION])
def test_offloading_does_not_change_results(config, model_path):
    moved, still = Learner(config, model_path), Learner(PLAIN, model_path)
    for _ in range(3):
        assert moved.update() == still.update()
        moved.residence.enter_rollout()
        moved.residence.enter_training()
    np.testing.assert_array_equal(moved.log_prob(), still.log_prob())


@pytest.mark.parametrize("config", [PLAIN, PARAM, OPTIMIZER, TRANSITION])
def test_saving_a_checkpoint_loads_offloaded_tensors_and_offloads_them_again(config, model_path):
    learner = Learner(config, model_path)
    learner.update()
    learner.residence.enter_rollout()
    before, held = learner.flags, learner.residence.device_bytes()
    with learner.residence.persisting():
        assert learner.flags == (False, False)
        assert learner.num_copies == 3
    assert (learner.flags, learner.residence.device_bytes()) == (before, held)


@pytest.mark.parametrize("other", [{"param_offload": True}, {"optimizer_offload": True}])
def test_offload_at_transition_only_is_ignored_beside_other_options_with_a_warning(other, model_path, caplog):
    with caplog.at_level(logging.WARNING, logger="learner.offload"):
        learner = Learner(replace(TRANSITION, **other), model_path)
    assert "offload_at_transition_only is ignored" in caplog.text
    learner.update()
    before = learner.flags
    learner.residence.enter_rollout()
    assert learner.flags == before == (bool(other.get("param_offload")), bool(other.get("optimizer_offload")))


@pytest.mark.parametrize("config", [PLAIN, PARAM, OPTIMIZER, TRANSITION])
def test_after_an_error_the_flags_are_correct_and_the_learner_continues(config, model_path):
    learner, still = Learner(config, model_path), Learner(PLAIN, model_path)
    learner.update()
    still.update()
    learner.residence.enter_rollout()
    flags = learner.flags
    for use in (learner.residence.persisting, learner.residence.reading, learner.residence.updating):
        with pytest.raises(OSError, match="full"), use():
            raise OSError("disk full")
        assert learner.num_copies == (not learner.flags[0]) + 2 * (not learner.flags[1])
        if use == learner.residence.persisting:
            assert learner.flags == flags
    assert learner.flags == (config.param_offload, config.optimizer_offload)
    assert learner.update() == still.update()


def test_a_failed_update_leaves_no_gradients_for_the_next_update(model_path):
    learner, still = Learner(PARAM, model_path), Learner(PLAIN, model_path)
    backward, calls = torch.Tensor.backward, []

    def fail_late(self: torch.Tensor) -> None:
        backward(self)
        calls.append(1)
        raise RuntimeError("out of memory")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "backward", fail_late)
        with pytest.raises(RuntimeError, match="out of memory"):
            learner.update()
    assert calls
    assert learner.flags == (True, False)
    assert learner.update() == still.update()


def test_a_failed_offload_or_load_changes_no_tensor():
    tensors = [torch.arange(6.0), torch.arange(4.0)]
    movable, copy = MovableTensors(lambda: tensors), torch.Tensor.copy_
    want = [tensor.tolist() for tensor in tensors]

    def fail_on_the_second(self: torch.Tensor, source: torch.Tensor, **options: bool) -> torch.Tensor:
        if source.numel() == 16:
            raise MemoryError
        return copy(self, source, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", fail_on_the_second)
        with pytest.raises(MemoryError):
            movable.offload()
    assert (movable.offloaded, movable.device_bytes(), [t.tolist() for t in tensors]) == (False, 40, want)
    movable.offload()
    assert (movable.offloaded, movable.device_bytes()) == (True, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", fail_on_the_second)
        with pytest.raises(MemoryError):
            movable.load()
    assert (movable.offloaded, movable.device_bytes()) == (True, 0)
    resize = torch.UntypedStorage.resize_

    def fail_to_grow(self: torch.UntypedStorage, size: int) -> object:
        if size == 16:
            raise MemoryError
        return resize(self, size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "resize_", fail_to_grow)
        with pytest.raises(MemoryError):
            movable.load()
    assert (movable.offloaded, movable.device_bytes()) == (True, 0)
    movable.load()
    assert (movable.offloaded, movable.device_bytes(), [t.tolist() for t in tensors]) == (False, 40, want)


def sharded_run(model_path: str, config: LearnerConfig) -> tuple[list[float], int, float]:
    learner = Learner(replace(config, num_ranks=2), model_path)
    losses, bytes_after = [], -1
    for _ in range(2):
        losses.append(learner.update())
        learner.log_prob()  # this forward leaves the root's parameters unsharded
        learner.residence.enter_rollout()
        bytes_after = learner.residence.device_bytes()
        learner.residence.enter_training()
    with learner.residence.reading():
        weights = gather_weights(learner.trainer)
    return losses, bytes_after, sum(float(value.abs().sum()) for value in (weights or {}).values())


def both_sharded_runs(model_path: str) -> list[tuple[list[float], int, float]]:
    return [sharded_run(model_path, PLAIN), sharded_run(model_path, TRANSITION)]


def test_sharded_parameters_are_offloaded_and_loaded_again(model_path):
    for still, moved in run_on_ranks(2, both_sharded_runs, model_path):
        assert moved[0] == still[0]
        assert moved[2] == still[2]
        assert moved[1] == 0 < still[1]


def test_one_slab_of_host_memory_stores_all_copies_and_is_reused():
    tensors = [torch.arange(count, dtype=torch.float32) for count in (3, 1000, 1)]
    movable = MovableTensors(lambda: tensors)
    for _ in range(2):
        movable.offload()
        slab = movable.slab
        assert slab.untyped_storage().nbytes() == 512 + 4096 + 512
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
        movable.load()
        assert [tensor[-1].item() for tensor in tensors] == [2.0, 999.0, 0.0]
        assert movable.slab is slab
    tensors.append(torch.ones(2000))
    movable.offload()
    assert len(movable.slab) == 512 + 4096 + 512 + 8192
    movable.load()
    assert tensors[3].sum().item() == 2000.0
