"""The agents in examples/agents in child processes with a scripted policy, and the code of docs/agents.md."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.core.types import Prompt
from rollout_fleet.config import RolloutFleetConfig
from rollout_fleet.episodes.config import EnvironmentConfig
from rollout_fleet.episodes.environment import Outcome
from rollout_fleet.episodes.environment_processes import EnvironmentProcesses
from tests.support.policy_endpoint import PolicyEndpoint

ROOT = Path(__file__).parents[2]
AGENTS = ROOT / "examples" / "agents"
PAGE = ROOT / "docs" / "agents.md"


async def play(name: str, options: dict, script, *, text: str, truth: str = "", group_id: int = 7):
    messages = ({"role": "user", "content": text},)
    ids = np.asarray([3, 4], dtype=np.int32)
    prompt = Prompt(group_id=group_id, prompt_ids=ids, messages=messages, ground_truth=truth)
    environments = EnvironmentProcesses(RolloutFleetConfig(environment=EnvironmentConfig(name=name, options=options)))
    await environments.start()
    try:
        async with PolicyEndpoint(script) as endpoint:
            return await environments.run(prompt, endpoint.open(), sample=0), endpoint.requests
    finally:
        await environments.close()


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def calls(*named: tuple[str, dict]) -> dict[str, Any]:
    functions = [{"name": name, "arguments": json.dumps(arguments)} for name, arguments in named]
    listed = [{"id": f"c{n}", "type": "function", "function": function} for n, function in enumerate(functions)]
    return {"role": "assistant", "content": None, "tool_calls": listed}


def in_order(*answers: dict[str, Any]):
    left = iter(answers)
    return lambda body: next(left)


async def test_the_calculator_computes_what_the_policy_asks_for():
    script = in_order(calls(("calculate", {"expression": "(3 + 4) * -5"})), said("-35"))
    outcome, requests = await play(f"{AGENTS}/calculator.py:Calculator", {}, script, text="?", truth="-35")
    assert (outcome.reward, outcome.metrics["calls"], outcome.metrics["tool_errors"]) == (1.0, 1.0, 0.0)
    assert requests[1]["messages"][-1]["content"] == "-35"


@pytest.mark.parametrize("expression", ["__import__('os')", "2 ** 9", "1 +", "1 / 0", "9e12"])
async def test_an_expression_that_the_calculator_refuses_is_told_to_the_policy(expression):
    script = in_order(calls(("calculate", {"expression": expression})), said("0"))
    outcome, requests = await play(f"{AGENTS}/calculator.py:Calculator", {}, script, text="?", truth="1")
    assert (outcome.reward, outcome.metrics["tool_errors"]) == (0.0, 1.0)
    assert requests[1]["messages"][-1]["content"].startswith("error: tool calculate raised")


async def test_a_number_is_guessed_by_bisection():
    low, high = 1, 100

    def bisect(body):
        nonlocal low, high
        heard = [message["content"] for message in body["messages"] if message["role"] == "user"][-1]
        middle = (low + high) // 2
        if heard.startswith("Higher"):
            low = middle + 1
        if heard.startswith("Lower"):
            high = middle - 1
        return said(f"Is it {(low + high) // 2}?")

    options = {"env": f"{AGENTS}/guess.py:GuessTheNumber"}
    outcome, _ = await play("gym", options, bisect, text="Let us play.")
    assert outcome.reward == 1.0
    assert 1 <= outcome.metrics["steps"] <= 7
    outcome, _ = await play("gym", options, lambda body: said("hello"), text="Let us play.")
    assert (outcome.reward, outcome.metrics["steps"]) == (0.0, 7.0)


async def test_two_roles_play_nim_and_the_turns_of_the_winner_are_rewarded():
    outcome, requests = await play(
        f"{AGENTS}/nim.py:Nim", {"stones": 6}, lambda _: said("I take 3."), text="", group_id=0
    )
    assert outcome.turn_rewards == {1: -1.0, 2: 1.0}
    assert [len(request["messages"]) for request in requests] == [1, 1]
    assert requests[1]["messages"][0]["content"].endswith("The other player took 3. 3 stones are left.")
    outcome, _ = await play(f"{AGENTS}/nim.py:Nim", {"stones": 2}, lambda _: said("3"), text="", group_id=0)
    assert (outcome.turn_rewards, outcome.metrics["illegal_moves"]) == ({1: -1.0}, 1.0)


async def test_the_search_agent_uses_tools_in_parallel_and_compacts(tmp_path):
    (tmp_path / "a.txt").write_text("The tower was built in 1889.\n" + "x" * 500)
    (tmp_path / "b.txt").write_text("The bridge was built in 1932.")

    def script(body):
        last = body["messages"][-1]
        if str(last["content"]).startswith("Your memory is full"):
            return said("the tower: 1889")
        if str(last["content"]).startswith("You found out before"):
            return said(f"It was built in {last['content'][-4:]}.")
        return calls(("search", {"words": "tower built"}), ("read", {"file": "a.txt"}), ("read", {"file": "c.txt"}))

    options = {"folder": str(tmp_path), "max_chars": 400}
    name = f"{AGENTS}/search.py:main"
    outcome, requests = await play(name, options, script, text="When was the tower built?", truth="1889")
    assert outcome == Outcome(reward=1.0, answer="It was built in 1889.", metrics={"compactions": 1.0})
    results = [message["content"] for message in requests[1]["messages"] if message["role"] == "tool"]
    assert results[0] == "a.txt: The tower was built in 1889."
    assert results[2] == "error: KeyError('c.txt'); the files are ['a.txt', 'b.txt']"


def page_files() -> dict[str, str]:
    """Return the page's programs by name. The first line of each program has its name."""
    blocks = re.findall(r"```python\n# (\S+\.py)\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    return dict(blocks)


def test_the_programs_on_the_page_of_agents_are_those_that_these_tests_run():
    assert sorted(page_files()) == ["agent.py", "client.py", "game.py", "program.py"]


@pytest.mark.parametrize(
    ("file", "name", "options"),
    [
        ("agent.py", "{folder}/agent.py:Asker", {}),
        ("client.py", "{folder}/client.py:main", {}),
        ("game.py", "gym", {"env": "{folder}/game.py:Echo"}),
        ("program.py", "command", {"command": f"{shlex.quote(sys.executable)} {{folder}}/program.py"}),
    ],
)
async def test_each_program_on_the_page_of_agents_runs(tmp_path, file, name, options):
    (tmp_path / file).write_text(page_files()[file])
    options = {key: value.format(folder=tmp_path) for key, value in options.items()}
    outcome, _ = await play(name.format(folder=tmp_path), options, lambda _: said("42"), text="6 * 7", truth="42")
    assert outcome.reward == 1.0


@pytest.mark.parametrize("path", sorted(AGENTS.glob("*.py")), ids=lambda path: path.stem)
def test_the_page_of_agents_names_each_example(path):
    assert f"examples/agents/{path.name}" in PAGE.read_text()
    assert importlib.util.spec_from_file_location(path.stem, path) is not None
