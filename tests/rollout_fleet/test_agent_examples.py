"""The agents of examples/agents and the programs of docs/agents.md, in child processes with a scripted policy."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrl.core.errors import SandboxError
from rollout_fleet.episodes.environment import EpisodeFailure, FailureKind, Outcome
from rollout_fleet.sandbox import Sandbox
from tests.support import played_environments
from tests.support.played_environments import make_prompt

ROOT = Path(__file__).parents[2]
AGENTS = ROOT / "examples" / "agents"
PAGE = ROOT / "docs" / "agents.md"


async def play(name: str, options: dict, script, *, text: str, truth: str = "", group_id: int = 7):
    prompt = make_prompt(text, group_id=group_id, ground_truth=truth)
    return await played_environments.play(name, options, script, prompt=prompt)


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def calls(*named: tuple[str, dict]) -> dict[str, Any]:
    functions = [{"name": name, "arguments": json.dumps(arguments)} for name, arguments in named]
    listed = [{"id": f"c{n}", "type": "function", "function": function} for n, function in enumerate(functions)]
    return {"role": "assistant", "content": None, "tool_calls": listed}


def in_order(*answers: dict[str, Any]):
    left = iter(answers)
    return lambda body: next(left)


async def test_the_calculator_computes_the_expression_of_the_policy():
    script = in_order(calls(("calculate", {"expression": "(3 + 4) * -5"})), said("-35"))
    outcome, requests = await play(f"{AGENTS}/calculator.py:Calculator", {}, script, text="?", truth="-35")
    assert (outcome.reward, outcome.metrics["calls"], outcome.metrics["tool_errors"]) == (1.0, 1.0, 0.0)
    assert requests[1]["messages"][-1]["content"] == "-35"


@pytest.mark.parametrize("expression", ["__import__('os')", "2 ** 9", "1 +", "1 / 0", "9e12"])
async def test_the_policy_gets_the_error_of_an_expression_that_the_calculator_refuses(expression):
    script = in_order(calls(("calculate", {"expression": expression})), said("0"))
    outcome, requests = await play(f"{AGENTS}/calculator.py:Calculator", {}, script, text="?", truth="1")
    assert (outcome.reward, outcome.metrics["tool_errors"]) == (0.0, 1.0)
    assert requests[1]["messages"][-1]["content"].startswith("error: tool calculate raised")


@pytest.fixture
async def _isolating():
    try:
        await Sandbox().start()
    except SandboxError as error:
        pytest.skip(f"this machine cannot isolate: {error}")


PYTHON = f"{AGENTS}/python_tool.py:PythonTool"


@pytest.mark.usefixtures("_isolating")
async def test_programs_of_the_policy_run_in_a_sandbox_and_the_policy_gets_their_output(tmp_path):
    (secret := tmp_path / "secret.txt").write_text("the answer is 42")
    programs = [
        "print(sum(range(10))); print('x' * 5000)",
        f"print(open({str(secret)!r}).read())",
        "import socket; socket.create_connection(('127.0.0.1', 80))",
        "while True: pass",
        "raise SystemExit(3)",
        "",
    ]
    script = in_order(calls(*(("python", {"code": code}) for code in programs)), said("45 "))
    outcome, requests = await play(PYTHON, {"wall_time_s": 2.0, "max_chars": 600}, script, text="?")
    assert (outcome.answer, outcome.metrics["programs"], outcome.metrics["failed_programs"]) == ("45", 6.0, 4.0)
    told = [message["content"] for message in requests[1]["messages"] if message["role"] == "tool"]
    assert told[0].startswith("45\nxxx")
    assert len(told[0]) < 700
    assert "characters left out" in told[0]
    assert "FileNotFoundError" in told[1]
    assert "the answer is" not in told[1]
    assert "Error" in told[2]
    assert told[2].endswith("[exit status 1]")
    assert re.fullmatch(r"\[the limit of (wall|cpu)_time ended the program\]", told[3])
    assert told[4:] == ["[exit status 3]", "the program printed nothing"]


async def test_an_episode_fails_on_a_machine_without_its_sandbox(monkeypatch):
    script = in_order(calls(("python", {"code": "print(1)"})), said("1"))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(EpisodeFailure, match=r"bubblewrap: .*install bubblewrap") as caught:
        await play(PYTHON, {"kind": "bubblewrap"}, script, text="?")
    assert caught.value.kind is FailureKind.environment


async def test_a_failed_sandbox_fails_the_episode_without_a_message_to_the_policy(tmp_path):
    (tmp_path / "broken.py").write_text(
        "from asyncrl.core.errors import SandboxError\n"
        "from rollout_fleet.episodes import use_tools\n"
        "async def call(name, arguments):\n"
        "    raise SandboxError('no more processes')\n"
        "async def main(prompt, policy):\n"
        "    tool = {'type': 'function', 'function': {'name': 'python', 'parameters': {}}}\n"
        "    await use_tools(policy, prompt.messages, tools=[tool], call=call)\n"
    )
    script = in_order(calls(("python", {})), said("1"))
    with pytest.raises(EpisodeFailure, match="tool python raised SandboxError: no more processes") as caught:
        await play(f"{tmp_path}/broken.py:main", {}, script, text="?")
    assert caught.value.kind is FailureKind.tool


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


async def test_the_search_agent_uses_tools_in_parallel_and_compacts_its_conversation(tmp_path):
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
    """Return the programs of docs/agents.md by name. The first line of each program is a comment with its name."""
    blocks = re.findall(r"```python\n# (\S+\.py)\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    return dict(blocks)


def test_these_tests_run_every_program_of_agents_md():
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
async def test_each_program_of_agents_md_runs(tmp_path, file, name, options):
    (tmp_path / file).write_text(page_files()[file])
    options = {key: value.format(folder=tmp_path) for key, value in options.items()}
    outcome, _ = await play(name.format(folder=tmp_path), options, lambda _: said("42"), text="6 * 7", truth="42")
    assert outcome.reward == 1.0


@pytest.mark.parametrize("path", sorted(AGENTS.glob("*.py")), ids=lambda path: path.stem)
def test_agents_md_names_each_example(path):
    assert f"examples/agents/{path.name}" in PAGE.read_text()
    assert importlib.util.spec_from_file_location(path.stem, path) is not None
