"""Environments: secret environment variables stay in the rollout worker, and errors of tools name their cause."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from asyncrl.core.errors import RewardError
from asyncrl.core.types import Prompt
from rollout_fleet.config import EngineDevice, RolloutFleetConfig
from rollout_fleet.engines.process_guard import is_secret, without_secrets
from rollout_fleet.engines.sglang_server import SGLangServer
from rollout_fleet.episodes.adapters import use_tools
from rollout_fleet.episodes.environment import AssistantMessage, EpisodeFailure, FailureKind, Policy, ToolError
from rollout_fleet.rewards import WeightedRewards

PROMPT = Prompt(group_id=7, prompt_ids=np.asarray([3, 4], dtype=np.int32), ground_truth="42")
SECRETS = (
    "HF_TOKEN", "WANDB_API_KEY", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY",
    "MLFLOW_TRACKING_PASSWORD", "GITHUB_TOKEN", "RAY_AUTH_TOKEN", "GOOGLE_APPLICATION_CREDENTIALS", "SSH_AUTH_SOCK",
    "my_secret", "TOKEN", "AZURE_CLIENT_SECRET",
)  # fmt: skip
HARMLESS = (
    "PATH", "HOME", "TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS", "KEYBOARD_LAYOUT", "CUDA_VISIBLE_DEVICES", "MONKEY",
    "SGLANG_TIMEOUT_KEEP_ALIVE", "RAY_AUTH_MODE", "LD_LIBRARY_PATH", "MAX_TOKENS_PER_STEP",
)  # fmt: skip


@pytest.mark.parametrize("name", SECRETS)
def test_a_variable_with_the_name_of_a_secret_is_a_secret(name):
    assert is_secret(name)


@pytest.mark.parametrize("name", HARMLESS)
def test_a_variable_with_an_ordinary_name_is_not_a_secret(name):
    assert not is_secret(name)


@pytest.mark.parametrize("name", ["SGLANG_TWO_STREAM_MAX_TOKENS", "SGLANG_USE_AITER_FP8_PER_TOKEN"])
@pytest.mark.parametrize("value", ["1024", "0", "true", "False"])
def test_a_variable_that_counts_tokens_is_not_a_secret(name, value):
    assert without_secrets((), {name: value}) == {name: value}
    assert without_secrets((), {name: "hf_abcdef"}) == {}


def test_a_variable_with_a_numeric_password_or_key_is_a_secret():
    assert without_secrets((), {"DB_PASSWORD": "123456", "API_KEY": "42", "BOT_TOKEN": "1234567890123"}) == {}


@pytest.fixture
def judge(tmp_path: Path, monkeypatch) -> str:
    for name in ("OPENAI_API_KEY", "HF_TOKEN"):
        monkeypatch.setenv(name, "s3cret")
    path = tmp_path / "judge.py"
    path.write_text(
        "import os\ndef score(prompt, text):\n    os.environ['HOME']\n    return float(os.environ[text] == 's3cret')\n"
    )
    return f"{path}:score"


async def test_a_reward_gets_only_the_secrets_in_pass_secrets_and_its_error_names_the_option(judge):
    rewards = WeightedRewards(RolloutFleetConfig(reward=judge, pass_secrets=["OPENAI_API_KEY"]))
    await rewards.start()
    try:
        assert (await rewards.score(PROMPT, ["OPENAI_API_KEY"])).total.tolist() == [1.0]
        with pytest.raises(RewardError, match=r"HF_TOKEN with rollout_fleet.pass_secrets=\[HF_TOKEN\]"):
            await rewards.score(PROMPT, ["HF_TOKEN"])
    finally:
        await rewards.close()


@pytest.mark.parametrize("passed", [(), ("HF_TOKEN",)])
def test_an_inference_server_gets_only_the_secrets_in_pass_secrets(judge, tmp_path, passed):
    server = SGLangServer(
        RolloutFleetConfig(pass_secrets=list(passed)),
        model_path="/nowhere",
        device=EngineDevice.cpu,
        rank=0,
        log_dir=str(tmp_path),
        seed=0,
    )
    environment = server.environment(tmp_path)
    assert {"OPENAI_API_KEY", "HF_TOKEN"} & set(environment) == set(passed)
    assert "PATH" in environment


async def test_an_error_names_tool_timeout_s_only_if_the_tool_exceeded_it():
    async def searching(within_s):
        async with asyncio.timeout(within_s):
            await asyncio.sleep(60)

    policy = Policy("http://host/v1", "key", tool_timeout_s=0.2)
    with pytest.raises(ToolError, match="tool search raised TimeoutError"):
        await policy.run_tool(searching(0.01), name="search")
    with pytest.raises(ToolError, match=r"within rollout_fleet\.environment\.tool_timeout_s = 0\.2 s"):
        await policy.run_tool(searching(10), name="search")
    assert (policy.metrics["tool_calls"], policy.metrics["tool_errors"]) == (2, 2)


class CallingPolicy(Policy):
    """A policy that calls the tool ``search`` in each message."""

    async def chat(self, messages, *, tools=None, **options):
        call = {"id": "1", "type": "function", "function": {"name": "search", "arguments": json.dumps({})}}
        return AssistantMessage(role="assistant", content="", tool_calls=[call])


async def test_an_overflow_inside_a_tool_is_an_overflow_and_not_a_tool_failure():
    async def call(name, arguments):
        raise EpisodeFailure(FailureKind.overflow, "the episode has used all its turns")

    policy = CallingPolicy("http://host/v1", "key")
    with pytest.raises(EpisodeFailure, match="the episode has used all its turns") as failure:
        await policy.run_tool(call("search", {}), name="search")
    assert failure.value.kind is FailureKind.overflow
    with pytest.raises(EpisodeFailure, match="the episode has used all its turns"):
        await asyncio.wait_for(use_tools(policy, [], tools=[{"function": {"name": "search"}}], call=call), 5)
