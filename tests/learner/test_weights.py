import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from learner.config import AlgorithmConfig, Device, LearnerConfig, OptimizerConfig
from learner.losses import policy_objective
from learner.trainer import Trainer
from learner.weights import SnapshotWriter, save_policy
from tests.support.tiny_models import FAMILIES, random_sequences, save_tiny_model

CONFIG = LearnerConfig(device=Device.cpu, optimizer=OptimizerConfig(lr=1e-2))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_snapshot_loads_as_the_trained_model(family: str, dtype: str, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "model", family)
    trainer = Trainer(replace(CONFIG, dtype=dtype), model_path=path, total_updates=1)
    trainer.update(random_sequences(3), policy_objective(AlgorithmConfig()))
    snapshot = SnapshotWriter(str(tmp_path / "snapshots"), keep=2).write(12, trainer)
    assert snapshot.version == 12
    assert snapshot.path.endswith("snapshots/v00000012")
    written = load_file(f"{snapshot.path}/model.safetensors")
    original = load_file(f"{path}/model.safetensors")
    assert {k: v.shape for k, v in written.items()} == {k: v.shape for k, v in original.items()}
    assert {v.dtype for v in written.values()} == {getattr(torch, dtype)}
    assert json.loads((Path(snapshot.path) / "config.json").read_text())["dtype"] == dtype
    loaded = AutoModelForCausalLM.from_pretrained(snapshot.path, dtype=torch.float32)
    again = Trainer(CONFIG, model_path=snapshot.path, total_updates=1)
    for name, value in loaded.named_parameters():
        torch.testing.assert_close(again.pretrained.get_parameter(name), value)
    assert (written["model.embed_tokens.weight"].float() - original["model.embed_tokens.weight"]).abs().max() > 1e-3


def test_old_snapshots_leave_and_nothing_half_written_stays(tmp_path: Path) -> None:
    trainer = Trainer(CONFIG, model_path=save_tiny_model(tmp_path / "model"), total_updates=1)
    writer = SnapshotWriter(str(tmp_path / "s"), keep=2)
    for version in (9, 10, 11, 11):
        writer.write(version, trainer)
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == ["v00000010", "v00000011"]
    SnapshotWriter(str(tmp_path / "s"), keep=-1).write(12, trainer)
    assert len(list((tmp_path / "s").iterdir())) == 3


def test_a_saved_policy_brings_its_tokenizer(tmp_path: Path) -> None:
    path = Path(save_tiny_model(tmp_path / "model"))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "optimizer.pt"):
        (path / name).write_text("{}")
    save_policy(Trainer(CONFIG, model_path=str(path), total_updates=1), str(tmp_path / "policy"))
    names = {file.name for file in (tmp_path / "policy").iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "model.safetensors"} <= names
    assert "optimizer.pt" not in names
