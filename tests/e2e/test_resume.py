"""A run that has ended, and a second run that continues from the newest checkpoint of the first run."""

import json
import os
import signal
import time

import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.run.run_socket import ask_for_checkpoint
from learner.checkpoint_folder import newest_checkpoint, read_progress, whole_checkpoints
from tests.e2e.run_checks import assert_every_token_is_accounted_for, assert_the_account_closes

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]

OPTIONS = [
    "rollout_fleet.engine=transformers",
    "sft.enabled=false",
    "evaluation.num_samples=1",
    "data.eval_max_prompts=16",
    "algorithm.groups_per_step=4",
    "checkpoint.every_steps=2",
    "record_trajectories=true",
    "evaluation.every_steps=2",
    "rollout_fleet.samples.every_steps=2",
]


def consumed(run_dir, first, end):
    """Return the ids of the groups that each step from ``first`` to ``end - 1`` consumed."""
    files = [run_dir / "trajectories" / f"step_{step:08d}_rank0.parquet" for step in range(first, end)]
    return [sorted(set(pq.read_table(file)["group_id"].to_pylist())) for file in files]


def check_what_is_kept(run, checkpoint):
    assert f"policy, summary.json, reward.png, checkpoints, logs in {run.run_dir}" in run.lines[-1]
    assert run.lines[-1].endswith(f" total_steps=100000 learner.restarts=0 checkpoint.resume={checkpoint}")
    assert "; to continue: asyncrl train " in run.lines[-1]
    assert run.summary["policy_version"] == run.records[-1]["step"] + 1 == read_progress(checkpoint).version
    assert run.summary["total_steps"] == 100000
    assert_every_token_is_accounted_for(run)
    assert run.summary["tokens"]["dropped_by_reason"].get("lost", 0) == 0, "the rollout worker must report its tokens"
    AutoModelForCausalLM.from_pretrained(run.run_dir / "policy")
    AutoTokenizer.from_pretrained(run.run_dir / "policy")


def saved_version(run_dir):
    newest = newest_checkpoint(run_dir / "checkpoints")
    return read_progress(newest).version if newest else 0


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_a_run_continues_from_the_newest_checkpoint_of_an_ended_run(start, tmp_path, number):
    ended = start(*OPTIONS, "total_steps=100000", "learner.restarts=0")
    ended.wait_for_line("step 1/")
    while saved_version(ended.run_dir) < 6:  # wait for the third checkpoint
        assert ended.process.poll() is None
        time.sleep(0.05)
    ended.remember_family()
    asked = ask_for_checkpoint(ended.run_dir, timeout_s=120)
    assert asked.is_dir()
    assert read_progress(asked).version >= 6
    if number is signal.SIGKILL:
        os.kill(ended.pid_of("ray::ActorWorker"), number)
        ended.finish(60)
    else:
        ended.signal_all(number)  # more processes get the signal than after Ctrl-C in a terminal
        assert ended.finish(60) == 130, ended.output
        assert f"stopped by {number.name}" in ended.lines[-1]
    assert ended.survivors() == []
    assert not ended.left_in_shared_memory()
    first_dir = ended.run_dir
    newest = newest_checkpoint(first_dir / "checkpoints")
    progress = read_progress(newest)
    assert len(whole_checkpoints(first_dir / "checkpoints")) <= 2
    if number is signal.SIGINT:
        check_what_is_kept(ended, newest)
    else:
        assert progress.version % 2 == 0 or newest == asked

    resumed = start(*OPTIONS, f"total_steps={progress.version + 4}", "checkpoint.resume=auto")
    line = resumed.wait_for_line("resuming ")
    assert f"{newest}: {progress.version} steps done" in line
    assert resumed.finish(240) == 0, resumed.output
    (second_dir,) = {path.parent for path in tmp_path.glob("*/*/summary.json")} - {first_dir}
    steps = consumed(first_dir, 0, progress.version) + consumed(second_dir, progress.version, progress.version + 4)
    ids = [group_id for step in steps for group_id in step]
    assert len(ids) == len(set(ids)) == 4 * (progress.version + 4)  # no group may be consumed twice
    assert max(ids) < len(ids) + 4 * 4  # only prompts that were in flight at the end may be missing
    summary = json.loads((second_dir / "summary.json").read_text())
    assert summary["policy_version"] == progress.version + 4
    evaluations = [json.loads(line) for line in (second_dir / "evaluations.jsonl").read_text().splitlines()]
    versions = [evaluation["policy_version"] for evaluation in evaluations]
    assert versions == sorted(set(versions))
    assert (versions[0], versions[-1]) == (0, progress.version + 4), "the evaluations of the first run must be included"
    versions = [version for version in versions if version >= progress.version]
    assert versions[0] == progress.version
    assert len(versions) >= 3, "the resumed run must evaluate during training"
    kept = {file.name.split("-rollout")[0] for file in (second_dir / "samples").iterdir()}
    assert {f"{kind}-v{version:08d}" for kind in ("sampled", "greedy") for version in versions} <= kept
    assert any(name.startswith("train-") for name in kept)
    assert "train sample of group" in resumed.output
    assert_the_account_closes(summary)
    assert summary["tokens"]["generated"] > progress.run["tokens_generated"]
    assert sum(summary["max_lag"]["histogram"].values()) == len(ids)
