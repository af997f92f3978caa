"""The search agent trains on SGLang while its process, its engine and its rollout worker are killed in mid-episode.

The policy is random and calls tools by chance, in parallel; what it writes, decoded and encoded again, is seldom the
same tokens. Some answers are lost on their way, so the unmodified client sends those requests again.
"""

import json
import os
import signal

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.e2e.run_checks import (
    assert_every_step_is_made_and_no_version_goes_back,
    assert_the_account_closes,
    trained_samples,
)
from tests.support.chat_models import save_calling_policy
from tests.support.training_run import RunningTraining

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1500)]

STEPS = 12
CALLS = [
    json.dumps({"name": "search", "arguments": {"words": "tower built"}}),
    json.dumps({"name": "read", "arguments": {"file": "a.txt"}}),
]
AGENT = """
import asyncio, os, random
from pathlib import Path

import httpx
from examples.agents import search
from openai import AsyncOpenAI, DefaultAsyncHttpxClient


class Lossy(httpx.AsyncHTTPTransport):
    async def handle_async_request(self, request):
        response = await super().handle_async_request(request)
        await response.aread()
        if request.headers["x-stainless-retry-count"] == "0" and random.random() < 0.1:
            raise httpx.ReadError("the answer was lost", request=request)
        return response


class SlowTexts(search.Texts):
    async def call(self, call):
        await asyncio.sleep(0.2)
        return await super().call(call)


def client(**options):
    return AsyncOpenAI(http_client=DefaultAsyncHttpxClient(transport=Lossy()), **options)


search.AsyncOpenAI, search.Texts = client, SlowTexts


async def main(prompt, base_url, api_key, folder):
    with open(Path(__file__).with_name("pids"), "a") as file:
        file.write(f"{os.getpid()}\\n")
    outcome = await search.main(prompt, base_url, api_key, folder=folder, max_chars=250, max_rounds=6)
    return outcome | {"reward": outcome["reward"] + 0.01 * len(outcome["answer"])}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("search")
    texts = folder / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("The tower was built in 1889.\n" + "It is high. " * 8)
    (texts / "b.txt").write_text("The tower of the bridge was built in 1932.")
    (folder / "agent.py").write_text(AGENT)
    rows = [
        {"prompt": [{"role": "user", "content": f"When was tower {number} built?"}], "ground_truth": "1889"}
        for number in range(64)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    running = RunningTraining(
        folder / "out",
        "experiment=custom",
        f"model.path={save_calling_policy(folder / 'model', CALLS)}",
        f"data.train_files=[{folder}/train.parquet]",
        "data.chat_template=true",
        "data.max_prompt_tokens=128",
        f"total_steps={STEPS}",
        "evaluation.enabled=false",
        "algorithm.groups_per_step=4",
        "algorithm.samples_per_prompt=2",
        "buffer.max_lag=4",
        "rollout_fleet.groups_in_flight=8",
        "rollout_fleet.reward=environment",
        "rollout_fleet.save_progress=at_updates",
        "rollout_fleet.sampling.max_new_tokens=16",
        "rollout_fleet.sglang.max_total_tokens=32768",
        f"rollout_fleet.environment.name={folder}/agent.py:main",
        f"rollout_fleet.environment.options={{folder: {texts}}}",
        "learner.device=cpu",
        "learner.optimizer.lr=1e-3",
        "learner.keep_snapshots=-1",
        "record_trajectories=true",
    )
    try:
        running.wait_for_line("step 1/", 400)
        for step, part in ((2, "environment_child"), (5, "sglang::scheduler"), (8, "ray::RolloutWorker")):
            running.wait_until(lambda step=step: running.num_steps >= step, f"step {step}", 400)
            is_agent = part == "environment_child"
            os.kill(pids_of_agents(running)[-1] if is_agent else running.pid_at(part), signal.SIGKILL)
        assert running.finish(timeout_s=600) == 0, running.output
        yield running
    finally:
        running.end()


def pids_of_agents(run):
    """The process of each episode that has begun, in order."""
    return [int(line) for line in (run.output_dir.parent / "pids").read_text().split()]


def test_every_step_is_made_and_no_token_is_lost(run):
    assert_every_step_is_made_and_no_version_goes_back(run, STEPS)
    assert_the_account_closes(run.summary)
    rows = trained_samples(run, "group_id", "response_mask")
    assert run.summary["tokens"]["trained"] == sum(sum(row["response_mask"]) for row in rows)
    groups = {row["group_id"] for row in rows}
    assert len(groups) == sum(run.summary["max_lag"]["histogram"].values()) == 4 * STEPS


def test_no_process_of_an_agent_outlives_the_run(run):
    assert not any(map(psutil.pid_exists, pids_of_agents(run)))
