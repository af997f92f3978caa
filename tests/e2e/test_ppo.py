"""Runs of PPO with a critic and a reference, and of a policy with adapters."""

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from asyncrl.cli.compose import compose_run
from asyncrl.cli.quickstart import with_quickstart_assets
from tests.e2e.run_checks import assert_the_account_closes
from tests.support.training_run import undocumented

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

FAST = ["rollout_fleet.engine=transformers", "evaluation.num_samples=1"]


def finished(start, *overrides):
    run = start(*FAST, *overrides)
    run.wait_for_line("step 1/")
    run.remember_family()
    assert run.finish(timeout_s=300) == 0, run.output
    assert run.survivors() == []
    return run


def test_ppo_learns_with_a_critic_and_accounts_for_every_token(start):
    steps = 30
    run = finished(start, "experiment=ppo", f"total_steps={steps}")
    records = run.records
    assert [record["step"] for record in records] == list(range(steps))
    # During the five warm-up steps, the policy does not change, and the critic learns values.
    # Returns are 0 or 1, with mean m. If the critic predicts 0, its loss is m / 2; if it predicts m, m (1 - m) / 2.
    assert all("learner.grad_norm" not in record for record in records[:5])
    cost = [record["learner.critic.value_loss"] / record["learner.critic.return_mean"] for record in records]
    assert np.mean(cost[3:6]) < 0.97 * cost[0]
    assert records[0]["learner.critic.value_mean"] == 0
    # The critic's values must follow the returns while the policy improves, so their error must be small.
    returns = [record["learner.critic.return_mean"] for record in records]
    off = [abs(record["learner.critic.value_mean"] - mean) for record, mean in zip(records, returns, strict=True)]
    assert np.mean(off[2:]) < np.mean(returns[2:]) / 3
    assert np.isfinite([record["learner.critic.explained_variance"] for record in records]).all()
    assert records[0]["learner.reward_kl"] == pytest.approx(0.0, abs=1e-4)
    assert records[-1]["learner.reward_kl"] > 1e-3
    rewards = [record["reward"] for record in records]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.05
    assert_the_account_closes(run.summary)
    overlap = run.summary["overlap"]
    assert overlap["step_s"] * steps == pytest.approx(run.summary["train_wall_s"], rel=0.2)
    # The learner also works on critic, reference and values, so it is busy for longer than the policy's updates.
    busy_s = overlap["utilisation"]["learner"] * overlap["step_s"] * steps
    assert busy_s > 1.5 * sum(record["update_s"] for record in records)
    assert undocumented(records[-1]) == []


def test_adapters_train_and_are_merged_into_the_saved_policy(start):
    run = finished(
        start,
        "total_steps=6",
        "learner.lora.rank=8",
        "learner.optimizer.lr=1e-2",
        "algorithm.kl_coef=0.01",
        "learner.keep_snapshots=-1",
    )
    assert run.records[-1]["learner.reference_kl"] > 0
    policy = AutoModelForCausalLM.from_pretrained(run.run_dir / "policy", dtype=torch.float32)
    frozen = AutoModelForCausalLM.from_pretrained(run.run_dir / "snapshots" / "frozen", dtype=torch.float32)
    adapters = PeftModel.from_pretrained(frozen, run.run_dir / "snapshots" / "v00000006")
    published: torch.nn.Module = adapters.merge_and_unload()
    assert not any("lora" in name for name, _ in policy.named_parameters())
    for (name, one), (_, other) in zip(policy.named_parameters(), published.named_parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6, msg=name)
    start = next(path.parent for path in run.output_dir.glob("*/sft/*/sft.json"))
    first = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    moved = {name for (name, a), b in zip(policy.named_parameters(), first.parameters(), strict=True) if (a != b).any()}
    assert "model.layers.0.self_attn.q_proj.weight" in moved
    assert "model.embed_tokens.weight" not in moved


def test_a_run_trains_on_the_scores_of_its_reward_model(start, tmp_path):
    """An untrained policy gets no reward from the reward function. So it can learn only from the reward model."""
    config = with_quickstart_assets(compose_run([f"output_dir={tmp_path}"]))
    torch.manual_seed(0)
    judge = AutoModelForSequenceClassification.from_pretrained(config.model.path, num_labels=1).eval()
    torch.nn.init.normal_(judge.score.weight)
    judge.save_pretrained(tmp_path / "judge")
    run = finished(
        start,
        f"learner.reward_model.path={tmp_path / 'judge'}",
        "sft.enabled=false",
        "total_steps=12",
        "record_trajectories=true",
        "buffer.filters=[no_tokens]",
    )
    records = run.records
    rows = pq.read_table(run.run_dir / "trajectories" / "step_00000003_rank0.parquet").to_pylist()
    assert records[3]["reward"] == pytest.approx(np.mean([row["reward"] for row in rows]), abs=1e-4)
    assert np.std([row["reward"] for row in rows]) > 0.05
    for row in rows[::16]:
        # Do not call `judge(...)`. It would ignore final tokens of the response that are padding tokens.
        with torch.no_grad():
            hidden = judge.model(torch.tensor([row["prompt_ids"] + row["response_ids"]])).last_hidden_state
            score = judge.score(hidden[0, -1]).item()
        assert row["reward"] == pytest.approx(score, abs=1e-4)
    rewards = [record["reward"] for record in records]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.05
    assert_the_account_closes(run.summary)
