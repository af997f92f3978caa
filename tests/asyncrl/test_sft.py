"""Supervised fine-tuning on the quickstart's demonstrations, in this process."""

import json

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.compose import compose_run
from asyncrl.prepare import with_quickstart_assets
from asyncrl.sft import fine_tune, read_demonstrations


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sft")
    overrides = ["sft.max_steps=60", "sft.eval_every=30", "sft.eval_prompts=32", "sft.target_accuracy=1.01"]
    return with_quickstart_assets(compose_run([f"output_dir={folder}", *overrides]))


def test_the_loss_is_on_the_response_and_its_end_only(config):
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    sequence = read_demonstrations(config, tokenizer)[0]
    prompt, _, response = tokenizer.decode(sequence.input_ids).partition("=")
    assert sequence.input_ids[-1] == tokenizer.eos_token_id
    assert response.endswith("<eos>")
    assert np.count_nonzero(~sequence.loss_mask) == len(prompt) + 1
    assert sequence.loss_mask[len(prompt) + 1 :].all()


async def test_fine_tuning_changes_the_policy_and_says_how_well_it_does(config, caplog):
    with caplog.at_level("INFO", logger="asyncrl.sft"):
        policy = await fine_tune(config)
    losses = [float(line.split("loss ")[1].split()[0]) for line in caplog.messages if "loss" in line]
    assert losses[-1] < losses[0] < 2.7, "log(14) = 2.64 is a policy that knows nothing"
    result = json.loads((policy / "sft.json").read_text())
    assert result["steps"] == 60
    assert 0.0 <= result["accuracy"] <= 1.0
    trained = AutoModelForCausalLM.from_pretrained(policy)
    untrained = AutoModelForCausalLM.from_pretrained(config.model.path)
    assert any((a != b).any() for a, b in zip(trained.parameters(), untrained.parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(policy).eos_token == "<eos>"
