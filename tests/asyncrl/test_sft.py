"""Supervised fine-tuning on the quickstart's demonstrations, in this process and on two ranks."""

import asyncio
import errno
import json
import os
from dataclasses import replace
from tempfile import gettempdir

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.cli import sft_command
from asyncrl.cli.compose import compose_run
from asyncrl.cli.quickstart import make_assets
from asyncrl.config import StopMetric, WarmStartConfig
from asyncrl.sft.fine_tuning import SftEvaluation, best_of, fine_tune, read_demonstrations, should_stop
from tests.support.ranks import run_on_ranks

NUM_ROWS = 4096
OVERRIDES = [
    "sft.max_steps=60",
    "sft.eval_every=30",
    "sft.eval_prompts=32",
    "sft.val_rows=0",
    "sft.target_val_loss=0.0",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sft")


def composed(folder, *overrides):
    """Return the quickstart's configuration with a quarter of its demonstrations."""
    assets = make_assets(f"{folder}/assets", seed=0, num_train=NUM_ROWS, num_held_out=256, num_demonstrations=NUM_ROWS)
    files = [
        f"model.path={assets.model}",
        f"data.train_files=[{assets.train}]",
        f"data.eval_files=[{assets.held_out}]",
        f"sft.train_files=[{assets.demonstrations}]",
    ]
    return compose_run([f"output_dir={folder}", *OVERRIDES, *files, *overrides])


def test_the_loss_covers_only_the_response_and_its_end_token(folder):
    config = composed(folder)
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    train, validation = read_demonstrations(config, tokenizer)
    prompt, _, response = tokenizer.decode(train[0].input_ids).partition("=")
    assert train[0].input_ids[-1] == tokenizer.eos_token_id
    assert response.endswith("<eos>")
    assert np.count_nonzero(~train[0].loss_mask) == len(prompt) + 1
    assert train[0].loss_mask[len(prompt) + 1 :].all()
    assert validation == []


@pytest.mark.long
def test_validation_rows_are_the_last_rows_and_are_not_trained(folder):
    tokenizer = AutoTokenizer.from_pretrained(composed(folder).model.path)
    everything, _ = read_demonstrations(composed(folder), tokenizer)
    train, validation = read_demonstrations(composed(folder, "sft.val_rows=100"), tokenizer)
    assert len(train) == len(everything) - 100
    assert validation[-1].input_ids.tolist() == everything[-1].input_ids.tolist()
    with pytest.raises(ValueError, match=rf"sft\.val_rows must be less than the {NUM_ROWS} rows"):
        read_demonstrations(composed(folder, f"sft.val_rows={NUM_ROWS}"), tokenizer)


@pytest.mark.long
async def test_fine_tuning_changes_the_policy_and_records_its_evaluation(folder, caplog):
    config = composed(folder, "sft.val_rows=64")
    with caplog.at_level("INFO", logger="asyncrl.sft"):
        policy = await fine_tune(config)
    losses = [float(line.split("loss ")[1].split()[0]) for line in caplog.messages if line.startswith("step")]
    assert losses[-1] < losses[0] < 2.7, "an untrained policy has a loss of log(14) = 2.64"
    result = json.loads((policy / "sft.json").read_text())
    assert result["steps"] == 60
    assert 0.0 <= result["accuracy"] <= 1.0
    assert result["val_loss"] == pytest.approx(losses[-1], abs=0.2)
    trained = AutoModelForCausalLM.from_pretrained(policy)
    untrained = AutoModelForCausalLM.from_pretrained(config.model.path)
    assert any((a != b).any() for a, b in zip(trained.parameters(), untrained.parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(policy).eos_token == "<eos>"
    caplog.clear()
    with caplog.at_level("INFO", logger="asyncrl.sft"):
        assert await fine_tune(config) == policy
    assert [line.split()[0] for line in caplog.messages] == ["reusing"], "the policy must not be trained again"


@pytest.mark.long
async def test_fine_tuning_stops_at_a_validation_loss_without_accuracy(folder):
    options = ["sft.val_rows=64", "sft.eval_prompts=0", "sft.eval_every=5", "sft.target_val_loss=2.4"]
    policy = await fine_tune(composed(folder, *options))
    result = json.loads((policy / "sft.json").read_text())
    assert result["accuracy"] is None
    assert result["val_loss"] <= 2.4
    assert result["steps"] < 60


def evaluations(*losses: float) -> list[SftEvaluation]:
    return [SftEvaluation(step=step, accuracy=1 - loss, val_loss=loss) for step, loss in enumerate(losses)]


@pytest.mark.parametrize("metric", list(StopMetric))
def test_patience_counts_evaluations_since_the_best_evaluation(metric):
    sft = WarmStartConfig(patience=2, stop_metric=metric, val_rows=1)
    assert not should_stop(evaluations(0.9, 0.5), sft)
    assert not should_stop(evaluations(0.9, 0.5, 0.6), sft)
    assert should_stop(evaluations(0.9, 0.5, 0.6, 0.5), sft)
    assert best_of(evaluations(0.9, 0.5, 0.6, 0.5), metric).step == 1
    assert not should_stop(evaluations(0.9, 0.5, 0.6, 0.4), sft)


def test_a_nan_loss_is_never_the_best():
    history = [SftEvaluation(step=step, val_loss=loss) for step, loss in enumerate((float("nan"), 0.5, float("nan")))]
    assert best_of(history, StopMetric.val_loss).step == 1
    assert not should_stop(history, WarmStartConfig(val_rows=1, target_val_loss=0.1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_val_loss": 1.0}, "need a validation loss"),
        ({"patience": 1, "stop_metric": StopMetric.val_loss}, "need a validation loss"),
        ({"eval_prompts": 0, "target_accuracy": 0.5}, "need sft.eval_prompts >= 1"),
        ({"response_key": ""}, "response_key must name a column"),
        ({"chat_template_kwargs": {"a": 1}}, "chat_template is false"),
        ({"val_rows": 3, "val_files": ["x.jsonl"]}, "val_rows must be 0 with"),
        ({"progress_timeout_s": 0}, "progress_timeout_s must be > 0"),
    ],
)
def test_a_wrong_fine_tuning_option_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        WarmStartConfig(**options)


def test_a_full_disk_during_fine_tuning_is_reported_with_the_folders_and_a_remedy(folder, capsys, monkeypatch):
    async def full(config):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("asyncrl.sft.fine_tuning.fine_tune", full)
    model = composed(folder).model.path
    assert sft_command.main([f"output_dir={folder}", f"model.path={model}"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"error: a file in {folder}/quickstart/sft or in the temporary folder {gettempdir()} ")
    assert error.endswith(
        "cannot be written: No space left on device; free space on its disk, or choose a folder on another disk with "
        "output_dir=DIR"
    )


def test_a_demonstration_that_is_too_long_is_named(folder, tmp_path):
    rows = tmp_path / "long.jsonl"
    lines = [json.dumps({"prompt": "12>", "response": "21" * count}) for count in (1, 100, 200)]
    rows.write_text("\n".join(lines))
    config = composed(folder)
    config = replace(config, sft=replace(config.sft, train_files=[str(rows)]))
    with pytest.raises(ValueError, match=r"long.jsonl, line 2 has 2\d\d tokens, .*\(2 of 3 rows"):
        read_demonstrations(config, AutoTokenizer.from_pretrained(config.model.path))


def fine_tuned(folder: str, num_ranks: int, sp_size: int) -> dict:
    options = ["sft.val_rows=33", "sft.max_steps=4", "sft.eval_every=2"]
    ranks = [f"learner.num_ranks={num_ranks}", f"learner.sp_size={sp_size}", "algorithm.groups_per_step=32"]
    policy = asyncio.run(fine_tune(composed(folder, *options, *ranks)))
    result = policy / "sft.json"
    return json.loads(result.read_text()) if os.environ.get("RANK", "0") == "0" else {}


@pytest.fixture(scope="module")
def alone(folder):
    return fine_tuned(str(folder / "alone"), 1, 1)


@pytest.mark.long
@pytest.mark.parametrize("sp_size", [1, 2])
def test_two_ranks_reach_the_same_loss_as_one_process(folder, alone, sp_size):
    result = run_on_ranks(2, fine_tuned, str(folder / f"two-{sp_size}"), 2, sp_size)[0]
    assert result["steps"] == alone["steps"] == 4
    assert result["val_loss"] == pytest.approx(alone["val_loss"], rel=1e-5)
