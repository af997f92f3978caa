import os
import pickle
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import filesystem, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, TensorProperties, TensorStorageMetadata
from transformers import AutoModelForCausalLM

import learner.checkpoint
from asyncrl.core.errors import CheckpointError
from asyncrl.core.host import replace_folder
from learner.checkpoint import ShardedCheckpointer, main
from learner.checkpoint_folder import (
    named_checkpoints,
    newest_checkpoint,
    partial_path,
    read_progress,
)
from learner.config import AlgorithmConfig, Device, LearnerConfig, LoraConfig, OptimizerConfig, Schedule
from learner.model_folder import save_policy
from learner.plain_reading import load_plain
from learner.trainer import Trainer
from tests.support.policy_step import policy_step
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import random_sequences, save_tiny_model
from tests.support.whole_weights import assert_weights_equal, weights_of


def trainer_of(model_path: str, num_ranks: int = 1, **options: Any) -> Trainer:
    optimizer = OptimizerConfig(lr=1e-3, schedule=Schedule.linear, warmup_steps=1, eps=1e-4)
    options |= {"num_ranks": num_ranks, "device": Device.cpu, "skip_selftest": "test_selftest.py tests it"}
    config = LearnerConfig(optimizer=optimizer, **options)
    return Trainer(config, model_path=model_path, total_updates=8)


def step(trainer: Trainer, seed: int) -> None:
    dp = trainer.mesh.num_ranks // trainer.mesh.sp_size
    policy_step(trainer, AlgorithmConfig()).run(random_sequences(8, seed)[trainer.mesh.dp_rank :: dp])


def resumed_run(model_path: str, directory: str, num_ranks: int, **options: Any) -> tuple[dict, dict, int]:
    """Return three values: the weights of a run of four steps, the weights of a resumed run, and the resumed version.

    The resumed run loads the checkpoint of the first run after two steps, and makes the other two steps.
    """
    trainer = trainer_of(model_path, num_ranks, **options)
    for seed in (0, 1):
        step(trainer, seed)
    path = ShardedCheckpointer(trainer, directory).save(2)
    drawn = torch.rand(1).item()
    for seed in (2, 3):
        step(trainer, seed)
    resumed = trainer_of(model_path, num_ranks, **options)
    version = ShardedCheckpointer(resumed, directory).load(path)
    assert torch.rand(1).item() == drawn
    for seed in (2, 3):
        step(resumed, seed)
    return weights_of(trainer), weights_of(resumed), version


@pytest.fixture
def checkpointer(model_path: str, tmp_path: Path) -> ShardedCheckpointer:
    """Return a checkpointer for a trainer that has made no step yet."""
    return ShardedCheckpointer(trainer_of(model_path), str(tmp_path / "c"))


def test_a_resumed_run_continues_bit_for_bit(model_path, tmp_path):
    straight, resumed, version = resumed_run(model_path, str(tmp_path / "checkpoints"), 1)
    assert_weights_equal(straight, resumed)
    assert version == 2


def two_ranks(model_path: str, directory: str, alone: str) -> tuple:
    outcome = resumed_run(model_path, directory, 2)
    loaded = []
    for split in (trainer_of(model_path, 2, sp_size=2), trainer_of(model_path, 2, fsdp_size=1)):
        ShardedCheckpointer(split, alone).load(Path(alone) / "v00000005")
        loaded.append(weights_of(split))
    return outcome, loaded


@pytest.mark.long
@pytest.mark.parametrize("num_experts", [0, 3])
def test_ranks_resume_bit_for_bit_and_load_checkpoints_of_another_layout(num_experts, model_path, tmp_path):
    """Two ranks cannot divide three experts equally, so they shard the rows of each expert."""
    if num_experts:
        model_path = save_tiny_model(tmp_path / "model", "qwen3_moe", num_experts=num_experts)
    trainer = trainer_of(model_path)
    step(trainer, 7)
    alone = ShardedCheckpointer(trainer, str(tmp_path / "alone"))
    alone.save(5)
    (straight, resumed, _), loaded = run_on_ranks(
        2, two_ranks, model_path, str(tmp_path / "two"), str(tmp_path / "alone")
    )[0]
    assert_weights_equal(straight, resumed)
    for weights in loaded:
        assert_weights_equal(weights, weights_of(trainer))

    single = trainer_of(model_path)  # let one process load the checkpoint of two ranks
    ShardedCheckpointer(single, str(tmp_path / "two")).load(tmp_path / "two" / "v00000002")
    for seed in (2, 3):
        step(single, seed)
    assert_weights_equal(weights_of(single), straight, atol=2e-5)


def test_training_continues_while_a_checkpoint_is_written(model_path, tmp_path):
    trainer = trainer_of(model_path)
    step(trainer, 0)
    saved = weights_of(trainer)
    checkpointer = ShardedCheckpointer(trainer, str(tmp_path / "c"))
    path = checkpointer.save(1, wait=False)
    step(trainer, 1)
    checkpointer.finish()
    other = trainer_of(model_path)
    assert ShardedCheckpointer(other, str(tmp_path / "c")).load(path) == 1
    assert_weights_equal(weights_of(other), saved)


def test_a_crash_while_saving_keeps_the_previous_checkpoint(model_path, tmp_path, monkeypatch):
    trainer = trainer_of(model_path)
    step(trainer, 0)
    saved = weights_of(trainer)
    checkpointer = ShardedCheckpointer(trainer, str(tmp_path / "c"))
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
    assert_weights_equal(weights_of(trainer), saved)
    assert checkpointer.save(2).name == "v00000002"  # the files of the crashed save are ignored
    assert checkpointer.latest() == tmp_path / "c" / "v00000002"


def test_only_the_newest_checkpoints_are_retained(checkpointer, tmp_path):
    assert checkpointer.latest() is None
    for version in (9, 10, 11):
        checkpointer.save(version, keep=2)
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["v00000010", "v00000011"]


def test_a_checkpoint_and_its_parts_are_removed_only_after_a_newer_complete_one(checkpointer, tmp_path):
    def found():
        return sorted(str(path.relative_to(tmp_path / "c")) for path in (tmp_path / "c").glob("**/v*"))

    for version in (1, 2):
        (tmp_path / "c" / "buffer" / f"v{version:08d}").mkdir(parents=True)
        checkpointer.save(version, keep=1, parts=["buffer"])
    assert found() == ["buffer/v00000002", "v00000002"]
    checkpointer.save(3, keep=1, parts=["buffer"])
    assert found() == ["buffer/v00000002", "v00000002", "v00000003"], "version 3 lacks a part, so version 2 must stay"
    assert newest_checkpoint(tmp_path / "c") == tmp_path / "c" / "v00000002"
    checkpointer.save(4, keep=1)
    assert found() == ["v00000004"]


def test_dropout_continues_with_the_random_state_of_the_checkpoint(model_path, tmp_path):
    adapters = LoraConfig(rank=4, dropout=0.5)
    straight, resumed, _ = resumed_run(model_path, str(tmp_path / "c"), 1, lora=adapters)
    assert_weights_equal(straight, resumed)
    other = trainer_of(model_path, lora=adapters)
    ShardedCheckpointer(other, str(tmp_path / "c")).load(tmp_path / "c" / "v00000002")
    torch.manual_seed(7)
    for seed in (2, 3):
        step(other, seed)
    assert any((value != straight[name]).any() for name, value in weights_of(other).items())


def test_a_background_save_completes_without_another_call(checkpointer, tmp_path):
    checkpointer.save(3, wait=False, run={"prompts": {"position": 9}})
    deadline = time.monotonic() + 30
    while (newest := newest_checkpoint(tmp_path / "c")) is None:  # wait for the thread that writes the checkpoint
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert newest == tmp_path / "c" / "v00000003"
    assert newest_checkpoint(newest) == newest
    progress = read_progress(newest)
    assert (progress.version, progress.num_ranks, progress.run) == (3, 1, {"prompts": {"position": 9}})


def test_the_next_call_raises_the_error_of_a_background_save_on_a_full_disk(checkpointer, tmp_path, monkeypatch):
    checkpointer.save(1)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(learner.checkpoint, "replace_folder", full)
    checkpointer.save(2, wait=False)
    with pytest.raises(CheckpointError, match=r"could not be written: rank 0: OSError: .*No space left"):
        checkpointer.finish()
    assert checkpointer.latest() == tmp_path / "c" / "v00000001"


def test_a_crash_between_renames_or_during_a_removal_leaves_complete_checkpoints(checkpointer, tmp_path):
    final = checkpointer.save(4)
    final.rename(final.with_name(f".{final.name}.replaced"))
    assert newest_checkpoint(tmp_path / "c") == final
    assert checkpointer.load(final) == 4
    (tmp_path / "c" / ".v00000001.removed").mkdir()
    checkpointer.save(5)
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["v00000004", "v00000005"]


def test_a_save_of_an_existing_version_succeeds_while_a_command_reads_the_folder(tmp_path, monkeypatch):
    """A command reads the folder when the old checkpoint is renamed, but the new checkpoint is not yet in its place."""
    final = tmp_path / "v00000004"
    rename = Path.rename

    def rename_and_read(path, target):
        rename(path, target)
        if target.suffix == ".replaced":
            monkeypatch.undo()
            assert named_checkpoints(tmp_path) == [final]

    for content in ("old", "new"):
        partial_path(final).mkdir()
        (partial_path(final) / content).touch()
        replace_folder(partial_path(final), final)
        monkeypatch.setattr(Path, "rename", rename_and_read)
    assert [path.name for path in final.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [final]


def kill_while_saving(model_path: str, directory: str) -> None:
    trainer = trainer_of(model_path)
    ShardedCheckpointer(trainer, directory).save(1)
    write = filesystem.FileSystemWriter.write_data

    def die(*args: object, **kwargs: object) -> None:
        write(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)

    filesystem.FileSystemWriter.write_data = die
    step(trainer, 0)
    ShardedCheckpointer(trainer, directory).save(2)


@pytest.mark.long
def test_a_process_killed_while_saving_keeps_the_previous_checkpoint(model_path, tmp_path):
    with pytest.raises(EOFError):
        run_on_ranks(1, kill_while_saving, model_path, str(tmp_path / "c"))
    newest = newest_checkpoint(tmp_path / "c")
    assert newest == tmp_path / "c" / "v00000001"
    trainer = trainer_of(model_path)
    checkpointer = ShardedCheckpointer(trainer, str(tmp_path / "c"))
    assert checkpointer.load(newest) == 1
    assert_weights_equal(weights_of(trainer), weights_of(trainer_of(model_path)))
    checkpointer.save(3)
    assert checkpointer.latest() == tmp_path / "c" / "v00000003"
    assert {path.name for path in (tmp_path / "c").iterdir()} == {"v00000001", "v00000003"}  # no partial folder


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_an_exported_checkpoint_equals_the_saved_policy(family, tmp_path):
    path = save_tiny_model(tmp_path / "model", family)
    trainer = trainer_of(path)
    step(trainer, 0)
    ShardedCheckpointer(trainer, str(tmp_path / "c")).save(1)
    assert main([str(tmp_path / "c"), str(tmp_path / "out")]) == 0
    save_policy(trainer, str(tmp_path / "policy"))
    exported, saved = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype="auto").state_dict() for name in ("out", "policy")
    )
    assert exported.keys() == saved.keys()
    for name, value in saved.items():
        assert value.dtype == exported[name].dtype
        assert torch.equal(value, exported[name]), name
    assert main([str(tmp_path / "c"), str(tmp_path / "half"), "--dtype", "bfloat16"]) == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto").dtype == torch.bfloat16


def test_an_export_reads_one_layer_at_a_time(checkpointer, tmp_path, monkeypatch):
    checkpointer.save(1)
    reads, load = [], learner.checkpoint.load_plain

    def recorded(state: dict[str, Any], *arguments: Any, **options: Any) -> None:
        reads.append(list(state["model"]))
        load(state, *arguments, **options)

    monkeypatch.setattr(learner.checkpoint, "load_plain", recorded)
    learner.checkpoint.export(tmp_path / "c", tmp_path / "out")
    assert len(reads) == 3
    for names, layer in zip(reads[1:], ("model.layers.0.", "model.layers.1."), strict=True):
        assert all(layer in name for name in names)


def test_saving_before_the_first_update_does_not_change_training(model_path, tmp_path):
    """A checkpoint that is saved during the critic's warm-up contains a policy without updates."""
    straight, saved = trainer_of(model_path), trainer_of(model_path)
    ShardedCheckpointer(saved, str(tmp_path)).save(0)
    resumed = trainer_of(model_path)
    ShardedCheckpointer(resumed, str(tmp_path)).load(tmp_path / "v00000000")
    for trainer in (straight, saved, resumed):
        for seed in range(2):
            step(trainer, seed)
    assert_weights_equal(weights_of(straight), weights_of(saved))
    assert_weights_equal(weights_of(straight), weights_of(resumed))


class RunsCode:
    """An object that creates a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return Path.touch, (self.mark,)


def hide_code_in_metadata(part: Path, mark: Path) -> None:
    metadata = pickle.loads(part.read_bytes())
    metadata.planner_data = RunsCode(mark)
    part.write_bytes(pickle.dumps(metadata))


def hide_code_in_random_state(part: Path, mark: Path) -> None:
    torch.save({"torch": RunsCode(mark)}, part)
    part.with_name("digests_0.json").unlink()  # an attacker could write matching digests


def change_a_byte(part: Path, mark: Path) -> None:
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)


UNREAD, NO_FILE = "v00000001 could not be read: rank 0: ", "FileNotFoundError: .*"
WRONG_PARTS = {
    "no-shard": ("__0_0.distcp", lambda part, _: part.unlink(), f"{UNREAD}{NO_FILE}__0_0.distcp.*; name an older"),
    "broken-shard": ("__0_0.distcp", lambda part, _: part.write_bytes(b"broken"), UNREAD),
    "changed-bytes": ("__0_0.distcp", change_a_byte, f"{UNREAD}CheckpointError: __0_0.distcp is damaged"),
    "no-metadata": (".metadata", lambda part, _: part.unlink(), f"{UNREAD}AssertionError: metadata is None"),
    "code-in-metadata": (".metadata", hide_code_in_metadata, UNREAD),
    "no-random-state": ("random_0.pt", lambda part, _: part.unlink(), f"{UNREAD}{NO_FILE}random_0.pt"),
    "code-in-random-state": ("random_0.pt", hide_code_in_random_state, UNREAD),
    "changed-random-state": ("random_0.pt", change_a_byte, f"{UNREAD}CheckpointError: random_0.pt is damaged"),
    "no-model": ("huggingface", lambda part, _: shutil.rmtree(part), "v00000001 has no huggingface/config.json"),
    "another-record": ("progress.json", lambda part, _: part.write_text('{"version": 1}'), "another version"),
    "no-folder": ("", lambda part, _: shutil.rmtree(part), "no checkpoint at '.*v00000001'"),
}
LOADED_ANYWAY = ("no-model",)  # only an export reads the model's folder
RANDOM_STATES = ("no-random-state", "code-in-random-state", "changed-random-state")
EXPORTED_ANYWAY = (*RANDOM_STATES, "another-record")  # an export does not need these files


@pytest.mark.parametrize("wrong", WRONG_PARTS)
def test_the_error_names_a_wrong_part_of_a_checkpoint_and_its_code_does_not_run(wrong, checkpointer, tmp_path, capsys):
    (part, damage, words), mark = WRONG_PARTS[wrong], tmp_path / "mark"
    broken = checkpointer.save(1)
    damage(broken / part, mark)
    if wrong not in LOADED_ANYWAY:
        with pytest.raises((CheckpointError, ValueError), match=words):
            checkpointer.load(broken)
    if wrong not in EXPORTED_ANYWAY:
        assert main([str(broken), str(tmp_path / "out")]) == 2
        assert re.search(words, capsys.readouterr().err)
    assert not mark.exists()


class PickledByAttribute:
    """An object that is pickled as ``getattr(owner, name)``.

    Python 3.11.0 to 3.11.3 pickles members of enums in this form.
    """

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name

    def __reduce__(self) -> tuple:
        return getattr, (self.owner, self.name)


def with_memory_format(path: Path, memory_format: Any) -> None:
    """Rewrite the metadata of a checkpoint so that each tensor has the memory format ``memory_format``."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for value in metadata.state_dict_metadata.values():
        if isinstance(value, TensorStorageMetadata):
            state = value.properties.__getstate__()
            value.properties = PropertiesWith((*state[:3], memory_format, *state[4:]))
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


class PropertiesWith:
    """An object that is pickled as a `TensorProperties` with the state ``state``."""

    def __init__(self, state: tuple) -> None:
        self.state = state

    def __reduce__(self) -> tuple:
        return TensorProperties, (), self.state


def test_a_checkpoint_written_by_an_early_python_3_11_is_loaded(checkpointer):
    path = checkpointer.save(1)
    with_memory_format(path, PickledByAttribute(_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT"))
    assert checkpointer.load(path) == 1
    with_memory_format(path, PickledByAttribute(TensorProperties, "create_from_tensor"))
    with pytest.raises(CheckpointError, match=r"metadata calls getattr\(.*, 'create_from_tensor'\)"):
        checkpointer.load(path)


def test_a_pickled_random_state_is_not_read(checkpointer, tmp_path, caplog):
    mark = tmp_path / "mark"
    old = checkpointer.save(1)
    (old / "random_0.pt").unlink()
    (old / "digests_0.json").unlink()
    (old / "random_0.pickle").write_bytes(pickle.dumps(RunsCode(mark)))
    assert checkpointer.load(old) == 1
    assert "has a pickled random state, which is not read" in caplog.text
    assert not mark.exists()


def test_code_in_a_value_of_a_checkpoint_is_refused_and_does_not_run(tmp_path):
    mark = tmp_path / "mark"
    state_dict_saver.save({"value": RunsCode(mark), "plain": (1, "a")}, checkpoint_id=tmp_path / "c", no_dist=True)
    with pytest.raises(CheckpointException, match="Weights only load failed"):
        load_plain({"value": 0, "plain": ()}, tmp_path / "c", no_dist=True)
    assert not mark.exists()
    plain = {"plain": ()}
    load_plain(plain, tmp_path / "c", no_dist=True)
    assert plain == {"plain": (1, "a")}
