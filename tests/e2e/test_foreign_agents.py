"""A run on SGLang whose agents use unmodified openai-agents and verifiers, in a separate Python environment."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.e2e.run_checks import assert_every_token_is_accounted_for, trained_samples
from tests.support.chat_models import save_calling_policy
from tests.support.engine_log import LOGGING, assert_trained_tokens_were_sampled, read_engine_log
from tests.support.foreign_python import ADDITION, python_with
from tests.support.training_run import RunningTraining

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 4
CALL = json.dumps({"name": "weather", "arguments": {"city": "Rome"}})
AGENT = """
from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from agents.exceptions import MaxTurnsExceeded
from openai import AsyncOpenAI

set_tracing_disabled(True)


@function_tool
def weather(city: str) -> str:
    "Weather of a city."
    return f"21 degrees in {city}"


async def main(prompt, base_url, api_key):
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        model = OpenAIChatCompletionsModel(model="policy", openai_client=client)
        agent = Agent(name="a", instructions="Be brief.", tools=[weather], model=model)
        try:
            result = await Runner.run(agent, prompt.messages[-1]["content"], max_turns=4)
        except MaxTurnsExceeded:
            return {"reward": 0.0, "metrics": {"sdk_calls": 4}}
    calls = sum(item.type == "tool_call_item" for item in result.new_items)
    return {"reward": float(calls > 0) + 0.01 * len(result.final_output), "metrics": {"sdk_calls": calls}}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("foreign")
    python = python_with(folder / "python", "verifiers==0.4.0", "openai-agents")
    (folder / "agent.py").write_text(AGENT)
    (folder / "addition.py").write_text(ADDITION)
    (folder / "sitecustomize.py").write_text(LOGGING)
    seat = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    options = {"env": {"taskset": {"id": "addition"}, "agent": seat}}
    rows = [
        {
            "prompt": [{"role": "user", "content": f"How warm is city {number}?"}],
            "environment": "verifiers" if number % 2 else None,
            "options": json.dumps(options) if number % 2 else None,
            "task": number % 3,
            "ground_truth": "21",
        }
        for number in range(24)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    running = RunningTraining(
        folder / "out",
        "experiment=custom",
        f"model.path={save_calling_policy(folder / 'model', [CALL])}",
        f"data.train_files=[{folder}/train.parquet]",
        "data.chat_template=true",
        "data.environment_key=environment",
        "data.environment_options_key=options",
        "data.extra_keys=[task]",
        "data.max_prompt_tokens=128",
        f"total_steps={STEPS}",
        "evaluation.enabled=false",
        "algorithm.groups_per_step=4",
        "algorithm.samples_per_prompt=2",
        "rollout_fleet.groups_in_flight=4",
        "rollout_fleet.reward=environment",
        "rollout_fleet.sampling.max_new_tokens=16",
        "rollout_fleet.sglang.max_total_tokens=32768",
        f"rollout_fleet.environment.name={folder}/agent.py:main",
        f"rollout_fleet.environment.python={python}",
        "rollout_fleet.environment.renderer.keep_reasoning=true",
        "learner.device=cpu",
        "record_trajectories=true",
        cwd=folder,
        python_path=folder,
        environment={"http_proxy": "", "https_proxy": ""},  # uv downloads packages for verifiers
    )
    try:
        assert running.finish(timeout_s=700) == 0, running.output
        yield running
    finally:
        running.end()


def test_episodes_of_both_packages_do_not_fail_and_every_token_is_accounted_for(run):
    assert_every_token_is_accounted_for(run)
    assert len(run.records) == STEPS
    assert sum(record.get("sdk_calls", 0.0) for record in run.records) > 0
    assert any("exact" in record for record in run.records)
    failed = {name: value for name, value in run.records[-1].items() if name.startswith("episode.failed_")}
    assert not any(failed.values()), failed


def test_every_trained_token_was_sent_to_sglang_or_sampled_by_sglang(run):
    answers = read_engine_log(run.output_dir.parent)
    assert assert_trained_tokens_were_sampled(trained_samples(run), answers) == run.summary["tokens"]["trained"]
    assert sum(record["episode.retokenised_tokens"] for record in run.records) == 0
