"""Checks that every run must pass, after any faults of its parts."""

import json
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
import yaml
from transformers import AutoModelForCausalLM

from asyncrl.core.trajectory import UNVERSIONED
from tests.support.training_run import RunningTraining

TOLERANCE = 1e-3


def assert_every_step_is_made_and_no_version_goes_back(
    run: RunningTraining, num_steps: int, *, is_interrupted: bool = False
) -> None:
    """Check that each step occurs once and in order, and that the engines' version never decreases.

    ``metrics.jsonl`` of an interrupted run can lack up to two steps, because the ranks had queued these steps.
    """
    assert [record["step"] for record in run.records] == list(range(num_steps))
    versions = [record["engine_version"] for record in run.records]
    assert versions == sorted(versions)
    assert run.summary["policy_version"] - num_steps in ((0, 1, 2) if is_interrupted else (0,))


def assert_the_account_closes(summary: dict) -> None:
    """Check that each generated token is trained, dropped, buffered or in flight, and that no lag is too large."""
    tokens = summary["tokens"]
    assert tokens["generated"] == sum(tokens[name] for name in ("trained", "dropped", "buffered", "in_flight"))
    assert summary["max_lag"]["realised"] <= summary["max_lag"]["bound"]


def assert_every_token_is_accounted_for(run: RunningTraining) -> None:
    """Check that the account balances and matches the trained samples. Also check that no group was trained twice."""
    assert_the_account_closes(run.summary)
    tokens = run.summary["tokens"]
    rows = trained_samples(run, "group_id", "response_mask")
    assert tokens["trained"] == sum(sum(row["response_mask"]) for row in rows)
    num_groups = sum(run.summary["max_lag"]["histogram"].values())
    samples = Counter(row["group_id"] for row in rows)
    assert len(samples) == num_groups, "each group must be consumed once"
    assert len(set(samples.values())) == 1, "each group must have all its samples"


def assert_trained_tokens_have_the_log_prob_of_their_version(run: RunningTraining, *, every: int = 1) -> int:
    """Recompute the log-probs of every ``every``-th sample with the versions of its tokens, and compare them.

    Returns the number of compared tokens.
    """
    rows_by_version = defaultdict(list)
    for row in trained_samples(run)[::every]:
        for version in {*row["versions"]} - {UNVERSIONED}:
            rows_by_version[version].append(row)
    assert len(rows_by_version) > 1
    num_compared = 0
    for version, rows in rows_by_version.items():
        model = model_of_version(run, version)
        for row in rows:
            mine = np.asarray(row["versions"]) == version
            np.testing.assert_allclose(
                np.asarray(row["behavior_logprobs"])[mine],
                response_logprobs(model, row)[mine],
                atol=TOLERANCE,
                err_msg=f"version {version}",
            )
            num_compared += int(mine.sum())
    return num_compared


def trained_samples(run: RunningTraining, *columns: str) -> list[dict]:
    """Return the rows of all trained trajectories. ``columns`` defaults to all columns."""
    rows = []
    for path in sorted((run.run_dir / "trajectories").glob("*.parquet")):
        rows += pq.read_table(path, columns=list(columns) or None).to_pylist()
    return rows


def model_of_version(run: RunningTraining, version: int):
    """Return a model with the weights of a version, which must be in the run's folder of snapshots."""
    if version == 0:
        warm = next((path.parent for path in run.output_dir.glob("*/sft/*/sft.json")), None)
        made = next((path.parent for path in run.output_dir.glob("*/assets/**/config.json")), None)
        path = warm or made or yaml.safe_load((run.run_dir / "config.yaml").read_text())["model"]["path"]
    else:
        path = run.run_dir / "snapshots" / f"v{version:08d}"
    assert Path(path, "config.json").is_file(), f"no weights of version {version}: {json.dumps(str(path))}"
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.no_grad()
def response_logprobs(model, row: dict) -> np.ndarray:
    """Return [R] float32 log-probs of the response from a plain Hugging Face forward pass.

    If the prompt is empty, the log-prob of the response's first token is 0.
    """
    ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
    logits = model(ids).logits[0, :-1]
    chosen = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    return np.concatenate([np.zeros(1, dtype=np.float32), chosen.numpy()])[len(row["prompt_ids"]) :]
