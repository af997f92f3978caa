"""A run on SGLang in which the initial policy is the judge that scores the policy's answers."""

import json
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollout_fleet.engines.engine import load_decoder
from tests.e2e.run_checks import assert_every_token_is_accounted_for, trained_samples
from tests.support.chat_models import save_calling_policy
from tests.support.training_run import RunningTraining

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 4
VERDICTS = [json.dumps({"name": "grade", "arguments": {"score": score}}) for score in (3, 7)]
"""The verdicts that the judge samples most often. Each verdict is one token."""


def asked_of(tokenizer, response):
    """Return the [1, T] tokens of the prompt that asks the judge about ``response``."""
    messages = [{"role": "user", "content": f"{response} How good is it?"}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=False)


def save_judge(folder):
    """Save a model that mostly writes verdicts, which depend on the prompt. Returns the model's folder."""
    path = save_calling_policy(folder, VERDICTS, p_call=0.15, p_stop=0.1)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    tokens = [tokenizer.convert_tokens_to_ids(f"<tool_call>{verdict}</tool_call>") for verdict in VERDICTS]
    usual = [*tokens * 50, *range(256)]  # tokens that are frequent in answers of the policy
    choices = (random.Random(n).choices(usual, k=1 + n % 8) for n in range(64))
    asked = [asked_of(tokenizer, tokenizer.decode(chosen)) for chosen in choices]
    with torch.no_grad():
        hidden = torch.stack([model.model(ids).last_hidden_state[0, -1] for ids in asked])
        spread = torch.linalg.svd(hidden - hidden.mean(0))
        # Find the direction in which the hidden states of the prompts differ most. The verdict depends on it.
        taste = spread.Vh[0] * 0.5 / (spread.S[0] / len(asked) ** 0.5)
        taste -= taste @ hidden.mean(0) / hidden.mean(0).square().sum() * hidden.mean(0)
        base = model.lm_head.weight[tokens[0]].clone()
        for token, sign in zip(tokens, (1, -1), strict=True):
            model.lm_head.weight[token] = base + sign * taste
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("judge")
    rows = [{"prompt": [{"role": "user", "content": f"Say {n}."}], "ground_truth": "-"} for n in range(16)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    judge = {
        "template": "{response} How good is it?",
        "pattern": r'"score": (\d)',
        "options": {"temperature": 0.0, "max_tokens": 1},
    }
    (folder / "judged.yaml").write_text(
        "# @package _global_\nexperiment: judged\nrollout_fleet:\n  reward: judge\n  judge_model: ${model.path}\n"
        f"  reward_options: {json.dumps({'judge': judge})}\n"
    )
    running = RunningTraining(
        folder / "out",
        "experiment=judged.yaml",
        f"model.path={save_judge(folder / 'model')}",
        f"data.train_files=[{folder}/train.parquet]",
        "data.chat_template=true",
        "data.max_prompt_tokens=64",
        f"total_steps={STEPS}",
        "evaluation.enabled=false",
        "algorithm.groups_per_step=4",
        "algorithm.samples_per_prompt=4",
        "rollout_fleet.groups_in_flight=4",
        "rollout_fleet.sampling.max_new_tokens=8",
        "rollout_fleet.sglang.max_total_tokens=32768",
        "learner.device=cpu",
        "learner.optimizer.lr=1e-2",
        "record_trajectories=true",
        cwd=folder,
    )
    try:
        assert running.finish(timeout_s=500) == 0, running.output
        yield running
    finally:
        running.end()


def test_the_judge_of_a_run_is_the_initial_policy(run):
    assert_every_token_is_accounted_for(run)
    rows = trained_samples(run)
    assert max(version for row in rows for version in row["versions"]) >= STEPS - 2
    path = str(run.output_dir.parent / "model")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)
    decode, seen = load_decoder(path), set()
    for row in rows:
        ids = asked_of(tokenizer, decode(row["response_ids"]))
        with torch.no_grad():
            written = model(ids).logits[0, -1].argmax()
        verdict = tokenizer.decode(written).rpartition('"score": ')[2][0]
        assert row["reward"] == pytest.approx(int(verdict) / 10)
        seen.add(verdict)
    assert seen == {"3", "7"}, "the judge must give different verdicts"


def test_no_process_of_the_judge_outlives_the_run(run):
    assert (run.run_dir / "logs" / "judge-0.log").is_file()
    assert run.survivors() == []
