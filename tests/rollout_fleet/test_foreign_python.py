"""Environments in a separate Python installation that does not have asyncrl's packages."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from rollout_fleet.episodes.environment import EpisodeFailure, FailureKind, Outcome
from tests.support import played_environments
from tests.support.foreign_python import ADDITION, python_with
from tests.support.played_environments import make_prompt

pytestmark = pytest.mark.timeout(600)
play = partial(played_environments.play, start_timeout_s=300.0)
AGENT = """
import importlib.util, sys
from rollout_fleet.episodes import Outcome

async def main(prompt, policy):
    message = await policy.chat(prompt.messages)
    turn = await policy.sample(list(prompt.prompt_ids))
    strange = {name: importlib.util.find_spec(name) is None for name in ("numpy", "aiohttp", "torch", "msgpack")}
    return Outcome(reward=turn.token_ids[-1], metrics=strange, answer=f"{message.text} {sys.prefix}")
"""


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return str(folder / "bin" / "python")


async def test_an_environment_runs_under_a_python_without_any_package(bare_python, tmp_path):
    (tmp_path / "agent.py").write_text(AGENT)
    outcome, _ = await play(f"{tmp_path}/agent.py:main", python=bare_python)
    assert outcome.reward == 5.0
    assert outcome.metrics == {"numpy": 1.0, "aiohttp": 1.0, "torch": 1.0, "msgpack": 1.0}
    assert outcome.answer == f"HELLO {Path(bare_python).parents[1]}"


async def test_an_error_names_the_package_that_an_adapter_needs_and_the_python_without_it(bare_python):
    with pytest.raises(ValueError, match=rf"needs the package aiohttp in {bare_python}: .*install it there"):
        await play("openenv", {"url": "http://127.0.0.1:1"}, python=bare_python)


MCP_SERVER = """
import sys
from mcp.server.mcpserver import MCPServer

server = MCPServer("numbers")

@server.tool()
def double(a: int) -> int:
    "Doubles a number."
    return 2 * a

if len(sys.argv) > 1:
    server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
server.run()
"""


@pytest.fixture(scope="module")
def full_python(tmp_path_factory) -> str:
    """Return the path of a Python with verifiers, mcp and gymnasium, installed from the package index."""
    return python_with(tmp_path_factory.mktemp("full"), "verifiers==0.4.0", "mcp", "gymnasium")


async def wait_for_port(port: int, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            assert time.monotonic() < deadline, f"nothing listens on port {port}"
            await asyncio.sleep(0.05)
        else:
            writer.close()
            return


@pytest.mark.slow
async def test_an_unmodified_environment_of_verifiers_runs(full_python, tmp_path, monkeypatch):
    """The agent is a program. The package `verifiers` starts the program with `uv`, which installs its packages."""
    (tmp_path / "addition.py").write_text(ADDITION)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    seat = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    options = {"env": {"taskset": {"id": "addition"}, "agent": seat}}

    def script(body):
        return {"role": "assistant", "content": "3"}

    prompts = [make_prompt(extra={"task": task}) for task in (2, 3)]
    outcome, requests = await play("verifiers", options, script, python=full_python, prompt=prompts[0])
    assert outcome == Outcome(reward=2.0, metrics={"exact": 2.0}, answer="3")
    assert requests[0]["messages"] == [{"role": "user", "content": "2 + 1"}]
    with pytest.raises(EpisodeFailure, match=r"column 'task' must be .* 0\.\.2, got 3"):
        await play("verifiers", options, script, python=full_python, prompt=prompts[1])


@pytest.mark.slow
async def test_real_mcp_servers_and_a_gymnasium_game_are_played(full_python, tmp_path):
    """The episode starts one MCP server. The test starts another MCP server on loopback, and kills it later."""
    (tmp_path / "server.py").write_text(MCP_SERVER)

    def doubles(body):
        if body["messages"][-1]["role"] == "tool":
            return {"role": "assistant", "content": body["messages"][-1]["content"]}
        function = {"name": "double", "arguments": '{"a": 21}'}
        return {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": function}],
        }

    servers = {"numbers": {"command": full_python, "args": [f"{tmp_path}/server.py"]}}
    outcome, requests = await play("mcp", {"servers": servers}, doubles, python=full_python)
    assert outcome.answer == "42"
    assert requests[0]["tools"][0]["function"]["parameters"]["required"] == ["a"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    listening = {"servers": {"numbers": {"url": f"http://127.0.0.1:{port}/mcp"}}}
    process = await asyncio.create_subprocess_exec(full_python, f"{tmp_path}/server.py", str(port))
    try:
        await wait_for_port(port)
        outcome, _ = await play("mcp", listening, doubles, python=full_python)
        assert outcome.answer == "42"
    finally:
        process.kill()
        await process.wait()
    with pytest.raises(EpisodeFailure, match=rf"{port}/mcp'}} cannot be reached or was lost: ConnectError") as failure:
        await play("mcp", listening, doubles, python=full_python)
    assert failure.value.kind is FailureKind.tool

    def right(body):
        return {"role": "assistant", "content": "2"}

    options = {"env": "FrozenLake-v1", "kwargs": {"is_slippery": False}, "max_steps": 4}
    outcome, _ = await play("gym", options, right, python=full_python)
    assert outcome.metrics["steps"] == 4.0
