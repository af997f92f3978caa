"""The examples of docs/rewards.md run, and the page names every built-in reward, option and kind of sandbox."""

import inspect
import re
from pathlib import Path

import numpy as np
import pytest
import yaml

from asyncrl.cli.compose import compose_run
from asyncrl.core.errors import SandboxError
from asyncrl.core.types import Prompt
from rollout_fleet.reward_protocol import BoundReward
from rollout_fleet.rewards import REWARDS, Rollout, WeightedRewards
from rollout_fleet.sandbox import SandboxKind

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
FUNCTIONS, SANDBOX = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
PROMPT = Prompt(group_id=0, prompt_ids=np.asarray([3], dtype=np.int32), ground_truth="42")


def test_rewards_md_names_every_built_in_reward_with_its_options():
    rows = {row.split("`")[1]: row for row in PAGE.splitlines() if re.match(r"\| `\w+` \| .* \| .*\|$", row)}
    for name in REWARDS.names():
        options = [*inspect.signature(REWARDS.get(name)).parameters]
        named = set(re.findall(r"`(\w+)`", rows[name].rpartition(" | ")[2]))
        own = {option for option in options if option not in ("prompt", "response_text", "rollout")}
        assert named == own or ("…" in rows[name] and named < own), name
    assert [kind for kind in SandboxKind if kind != "auto" and f"\n| `{kind}` | " not in PAGE] == []


async def test_the_functions_in_rewards_md_work(tmp_path):
    (tmp_path / "mine.py").write_text(FUNCTIONS)

    async def scores(name, *rollouts, **options):
        bound = BoundReward(f"{tmp_path}/mine.py:{name}", options)
        return [one async for one in bound.answers(PROMPT, rollouts)]

    (short,) = await scores("short", Rollout.answer("x" * 11), characters=10)
    assert short.reward == 0.0
    long = Rollout(text="42", turns={1: "<tool_call>", 3: "<tool_call> error", 5: "42"})
    fewest = await scores("fewest_turns", Rollout.answer("a"), long)
    assert [one.reward for one in fewest] == [1.0, 0.0]
    (by_turn,) = await scores("no_errors", long)
    assert (by_turn.reward, by_turn.turn_rewards) == (1.0, {1: 0.1})


def test_the_sandbox_in_rewards_md_works():
    try:
        exec(compile(SANDBOX, "docs/rewards.md", "exec"), {})
    except SandboxError as error:
        pytest.skip(f"this machine cannot isolate programs: {error}")


def test_the_options_in_rewards_md_compose(tmp_path):
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
    experiment = tmp_path / "by_source.yaml"
    experiment.write_text(f"# @package _global_\nexperiment: by_source\n{text}")
    fleet = compose_run([f"experiment={experiment}"]).rollout_fleet
    assert fleet.weights_for("apps") == {"code": 1.0, "length": 0.1}
    assert fleet.weights_for("other") == {"exact_match": 1.0}
    assert fleet.options_of("code") == yaml.safe_load(text)["rollout_fleet"]["reward_options"]["code"]
    pytest.importorskip("math_verify", reason="the extra `math` is not installed")
    WeightedRewards(fleet)
    weighted, judged = (
        compose_run(
            [word.strip("'") for word in command.replace("\\\n", " ").split()] + ["model.path=warm"]
        ).rollout_fleet
        for command in re.findall(r"asyncrl train … (.*?)\n```", PAGE, flags=re.DOTALL)
    )
    assert weighted.options_of("length") == {"max_tokens": 1024, "buffer_tokens": 256}
    assert (judged.reward, judged.judge_model) == ("judge", "warm")
