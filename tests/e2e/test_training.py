"""A short training on real SGLang with two data-parallel ranks, checked token by token."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.profile import Trace
from tests.e2e.run_checks import (
    assert_every_token_is_accounted_for,
    assert_trained_tokens_have_the_log_prob_of_their_version,
    model_of_version,
    trained_samples,
)
from tests.support.training_run import RunningTraining, undocumented

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

STEPS = 4


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("at_updates", 1), id="at_updates"),
        pytest.param(("at_updates", 1, "learner.sp_size=2"), id="sequence_parallel", marks=pytest.mark.slow),
        pytest.param(("at_stop", 2), id="at_stop", marks=pytest.mark.slow),
        pytest.param(("at_stop", 1, "rollout_fleet.sglang.tp_size=2"), id="two_ranks", marks=pytest.mark.slow),
    ],
)
def run(request, tmp_path_factory):
    """Return a finished run.

    With ``at_stop``, the engine keeps its running requests at a weight update. With ``at_updates``, the worker saves
    the requests and continues them after the update.
    """
    save_progress, num_engines, *others = request.param
    running = RunningTraining(
        tmp_path_factory.mktemp("training"),
        f"total_steps={STEPS}",
        f"rollout_fleet.num_engines={num_engines}",
        "learner.num_ranks=2",
        f"rollout_fleet.save_progress={save_progress}",
        *others,
        "learner.keep_snapshots=-1",
        "record_trajectories=true",
        "algorithm.groups_per_step=8",
        "evaluation.num_samples=1",
        "sft.target_accuracy=0.3",
        "profile.torch_steps=[2]",
    )
    try:
        running.wait_for_line("step 1/")
        running.remember_family()
        assert running.finish(timeout_s=300) == 0, running.output
        yield running
    finally:
        running.end()


def test_versions_advance_by_one_per_step_and_no_lag_exceeds_the_bound(run):
    assert [record["step"] for record in run.records] == list(range(STEPS))
    assert run.summary["policy_version"] == STEPS
    assert run.summary["max_lag"]["realised"] <= run.summary["max_lag"]["bound"]
    # The gradient is 0 only if all rewards of each group are equal.
    assert all(record["learner.grad_norm"] > 0 or record["equal_reward_groups"] == 1 for record in run.records)
    assert any(record["learner.grad_norm"] > 0 for record in run.records)
    assert sum(run.summary["max_lag"]["histogram"].values()) == STEPS * 8
    versions = {version for row in trained_samples(run) for version in row["versions"]}
    assert 0 in versions
    assert max(versions) > 0, "no token was sampled with trained weights"


def test_the_record_of_the_run_explains_every_second_of_both_pools(run):
    document = json.loads((run.run_dir / "overlap.json").read_text())
    assert document["run"]["num_steps"] == STEPS
    assert document["recorded"]["dropped_records"] == document["recorded"]["torn_files"] == 0
    engines = document["recorded"]["processes"]["fleet"]
    assert document["recorded"]["processes"] == {"controller": 1, "buffer": 1, "fleet": engines, "learner": 2}
    for pool in ("learner", "fleet"):
        time = document["run"][pool]
        assert time["capacity_ns"] == time["busy_ns"] + sum(time["idle_ns"].values())
        assert time["busy_ns"] > 0
    assert run.summary["overlap"]["step_s"] == document["run"]["step_s"]
    assert document["run"]["lag"]["mean"] == pytest.approx(np.mean([record["lag_mean"] for record in run.records]))
    trace = Trace.load(run.run_dir)
    trained = [group for group in trace.groups.values() if group.step >= 0]
    assert len(trained) == STEPS * 8
    for group in trained:
        times = [group.time(event) for event in ("lease", "last_token", "reward", "stored", "planned", "trained")]
        assert times == sorted(times)
    assert len(trace.spans_of("pause")) > 0
    assert sorted(path.name for path in (run.run_dir / "profile").glob("torch-*")) == [
        f"torch-step2-actor-{rank}.json.gz" for rank in range(2)
    ]
    events = json.loads((run.run_dir / "trace.json").read_text())["traceEvents"]
    assert sum("torch_trace" in event.get("args", {}) for event in events) == 2


def test_every_metric_of_a_run_is_documented(run):
    assert undocumented(run.records[-1]) == []


def test_every_token_is_accounted_for(run):
    assert_every_token_is_accounted_for(run)
    assert run.summary["tokens"]["trained"] == sum(record["learner.num_tokens"] for record in run.records)


def test_every_trained_token_has_the_log_prob_of_its_version(run):
    assert assert_trained_tokens_have_the_log_prob_of_their_version(run) == run.summary["tokens"]["trained"]


def test_the_exported_policy_loads_and_equals_the_learners_last_version(run):
    policy = AutoModelForCausalLM.from_pretrained(run.run_dir / "policy", dtype=torch.float32)
    last = model_of_version(run, STEPS)
    for (name, exported), (_, published) in zip(policy.named_parameters(), last.named_parameters(), strict=True):
        torch.testing.assert_close(exported, published, rtol=0, atol=0, msg=name)
    first = model_of_version(run, 0)
    assert any(not torch.equal(a, b) for a, b in zip(policy.parameters(), first.parameters(), strict=True))
    tokenizer = AutoTokenizer.from_pretrained(run.run_dir / "policy")
    assert tokenizer.decode(tokenizer("12345=")["input_ids"]) == "12345="


def test_the_run_folder_has_the_files_that_the_readme_names(run):
    for name in ("config.yaml", "metrics.jsonl", "summary.json", "reward.png", "policy/config.json"):
        assert (run.run_dir / name).stat().st_size > 0, name
    assert any((run.run_dir / "tensorboard").iterdir())
    logs = {path.name for path in (run.run_dir / "logs").iterdir()}
    expected = {"controller.log", "buffer.log", "learner-0.log", "learner-1.log", "rollout-0.log", "sglang-0.log"}
    assert expected <= logs


def test_no_process_or_shared_memory_outlives_the_run(run):
    assert run.survivors() == []
    assert not run.left_in_shared_memory()
