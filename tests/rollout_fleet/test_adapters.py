"""The adapters of environments, in child processes: gymnasium games, programs, OpenEnv servers and MCP servers."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from aiohttp import web

from asyncrl.core.remote import process_end
from rollout_fleet.episodes.environment import EpisodeFailure, FailureKind, Outcome
from tests.support import played_environments
from tests.support.played_environments import make_prompt

pytestmark = pytest.mark.long
play = partial(played_environments.play, tool_timeout_s=5.0)

GAMES = '''
class Space:
    n, start = 10, 0

class Guess:
    """A game with the interface of gymnasium. The player guesses the seed."""
    action_space = Space()

    def __init__(self, limit=5):
        self.limit = limit

    def reset(self, *, seed=None, options=None):
        self.number, self.left = seed, self.limit
        return f"Guess a number from 0 to 9. {options}", {}

    def step(self, action):
        self.left -= 1
        hint = "Right." if action == self.number else "Higher." if action < self.number else "Lower."
        return hint, float(action == self.number), action == self.number, self.left == 0, {}

    def close(self):
        print("closed")

class Letters:
    """A game with an older async interface. Observations are messages, and actions are texts."""
    async def reset(self):
        self.seen = ""
        return [{"role": "system", "content": "Write letters."}, {"role": "user", "content": "a"}]

    async def step(self, action):
        self.seen += action
        return action + "b", len(action), len(self.seen) > 5, {}

class Short(Guess):
    def step(self, action):
        return "Right.", 1.0, True

class Stops(Guess):
    def step(self, action):
        return next(iter(()))

class Broken(Guess):
    def step(self, action):
        raise RuntimeError("the board is gone")
'''


@pytest.fixture
def games(tmp_path: Path) -> str:
    (tmp_path / "games.py").write_text(GAMES)
    return str(tmp_path / "games.py")


def guesses(*texts: str):
    left = iter(texts)
    return lambda body: {"role": "assistant", "content": next(left)}


async def test_a_gym_with_numbers_as_actions_is_played_to_the_end(games):
    script = guesses("is it 5?", "no idea", "12", "8", "I say 7")
    outcome, requests = await play("gym", {"env": f"{games}:Guess"}, script, prompt=make_prompt(extra={"level": 1}))
    assert outcome.reward == 1.0
    assert outcome.answer == "I say 7"
    assert {name: outcome.metrics[name] for name in ("steps", "invalid_actions", "finished")} == {
        "steps": 5.0, "invalid_actions": 2.0, "finished": 1.0,
    }  # fmt: skip
    assert requests[0]["messages"] == [{"role": "user", "content": "hello\n\nGuess a number from 0 to 9. {'level': 1}"}]
    heard = [message["content"] for message in requests[-1]["messages"] if message["role"] == "user"]
    assert heard[1:] == ["Higher.", *["Answer with a number from 0 to 9."] * 2, "Lower."]


async def test_the_option_turn_rewards_gives_each_turn_the_reward_of_its_step(games):
    options = {"env": f"{games}:Guess", "turn_rewards": True, "kwargs": {"limit": 2}}
    outcome, _ = await play("gym", options, guesses("7", "8"))
    assert (outcome.reward, outcome.turn_rewards) == (0.0, {1: 1.0})


async def test_a_game_that_nobody_wins_ends_at_the_step_limit(games):
    outcome, requests = await play("gym", {"env": f"{games}:Guess", "max_steps": 3}, guesses(*"1234"))
    assert (outcome.reward, outcome.metrics["finished"], len(requests)) == (0.0, 0.0, 3)


async def test_an_async_gym_with_messages_and_the_old_interface_is_played(games):
    outcome, requests = await play("gym", {"env": f"{games}:Letters"}, guesses("xx", "yyyy"))
    assert (outcome.reward, outcome.answer) == (6.0, "yyyy")
    assert [message["role"] for message in requests[0]["messages"]] == ["user", "system", "user"]


async def test_an_exception_in_a_gym_is_a_tool_failure(games):
    with pytest.raises(EpisodeFailure, match=r"step raised RuntimeError: the board is gone") as failure:
        await play("gym", {"env": f"{games}:Broken"}, guesses("1"))
    assert failure.value.kind is FailureKind.tool


async def test_a_gym_whose_step_returns_a_tuple_of_the_wrong_length_is_refused(games):
    words = r"step of .*options.env must return \(observation, reward, terminated, .* got \('Right.', 1.0, True\)"
    with pytest.raises(EpisodeFailure, match=words):
        await play("gym", {"env": f"{games}:Short"}, guesses("1"))


async def test_a_gym_that_raises_stop_iteration_does_not_hang(games):
    with pytest.raises(EpisodeFailure, match=r"tool step raised RuntimeError: .* StopIteration"):
        await play("gym", {"env": f"{games}:Stops"}, guesses("1"))


async def test_a_number_with_thousands_of_digits_is_an_invalid_action(games):
    outcome, _ = await play("gym", {"env": f"{games}:Guess"}, guesses("1" * 5000, "7"))
    assert (outcome.reward, outcome.metrics["invalid_actions"]) == (1.0, 1.0)


async def test_a_gym_adapter_sends_the_images_of_a_prompt_as_images(games):
    parts = [{"type": "image_url", "image_url": {"url": "data:,"}}, {"type": "text", "text": "look"}]
    prompt = replace(make_prompt(), messages=({"role": "user", "content": parts},))
    _, requests = await play("gym", {"env": f"{games}:Guess"}, guesses("7"), prompt=prompt)
    observation = {"type": "text", "text": "\n\nGuess a number from 0 to 9. {}"}
    assert requests[0]["messages"] == [{"role": "user", "content": [*parts, observation]}]


async def test_a_registered_gymnasium_environment_is_played():
    pytest.importorskip("gymnasium", reason="the package gymnasium is not installed")
    outcome, _ = await play("gym", {"env": "FrozenLake-v1", "max_steps": 4}, guesses(*"0123"))
    assert outcome.metrics["steps"] >= 1


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("gym", {"env": "missing.py:Game"}, "options.env=missing.py:Game: there is no file"),
        ("gym", {"env": "NoGame-v3", "kwarks": {}}, r"options must be the arguments of gym\(env"),
        ("command", {"command": "no-such-program --x"}, "command must begin with a program, got 'no-such-program"),
        ("command", {"command": "python 'agent.py"}, "command must be a command line, got .*No closing quotation"),
        ("command", {"command": "true", "cwd": "/no/folder"}, "cwd must be an existing folder, got '/no/folder'"),
        ("gym", {"env": "FrozenLake-v1", "kwargs": [1]}, r"a mapping as kwargs .*, got kwargs=\[1\]"),
        ("gym", {"env": "FrozenLake-v1", "max_steps": "5"}, "a whole number >= 1 as max_steps, got .* max_steps='5'"),
        ("mcp", {"servers": [{"url": "http://a"}]}, r"servers must map names to servers.*got \[|needs the package mcp"),
        (
            "mcp",
            {"servers": {"a": {"args": []}}},
            "servers.a must have either a command or a url|needs the package mcp",
        ),
    ],
)
async def test_an_adapter_refuses_invalid_options(name, options, words):
    with pytest.raises(ValueError, match=words):
        await play(name, options)


AGENT = """
import json, os, sys, urllib.request

asked = sys.stdin.read()
prompt = json.load(open(os.environ["ASYNCRL_PROMPT"]))
assert asked == prompt["messages"][-1]["content"]
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    data=json.dumps({"model": "policy", "messages": prompt["messages"]}).encode(),
    headers={"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
)
answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
mode = sys.argv[1]
print("thinking")
if mode == "answer":
    print(answer)
if mode == "number":
    print("42")
if mode == "reward":
    print(json.dumps({"reward": 1000, "answer": answer}))
outcomes = {
    "fields": json.dumps({"reward": float(answer == prompt["ground_truth"]), "answer": answer}),
    "file": "0.5",
    "bad file": "half",
}
if mode in outcomes:
    open(os.environ["ASYNCRL_OUTCOME"], "w").write(outcomes[mode])
if mode == "bad bytes":
    open(os.environ["ASYNCRL_OUTCOME"], "wb").write(b"\\xff")
if mode == "deep":
    open(os.environ["ASYNCRL_OUTCOME"], "w").write("[" * 100_000)
if mode == "pipe":
    os.mkfifo(os.environ["ASYNCRL_OUTCOME"])
if mode == "folder":
    os.mkdir(os.environ["ASYNCRL_OUTCOME"])
if mode == "fail":
    sys.exit("no tools here")
"""


@pytest.mark.parametrize(
    ("mode", "outcome"),
    [
        ("answer", Outcome(answer="thinking\nHELLO\n")),
        ("number", Outcome(answer="thinking\n42\n")),
        ("reward", Outcome(answer='thinking\n{"reward": 1000, "answer": "HELLO"}\n')),
        ("fields", Outcome(reward=1.0, answer="HELLO")),
        ("file", Outcome(reward=0.5)),
    ],
)
async def test_the_output_of_an_agent_program_is_its_answer_and_never_its_reward(tmp_path, mode, outcome):
    """A coding agent prints the policy's answer. If a printed number were the reward, the policy could choose it."""
    (tmp_path / "agent.py").write_text(AGENT)
    command = shlex.join([sys.executable, f"{tmp_path}/agent.py", mode])
    assert (await play("command", {"command": command}, prompt=make_prompt(ground_truth="HELLO")))[0] == outcome


async def test_a_daemon_of_an_agent_program_does_not_delay_its_end_and_is_killed(tmp_path):
    """A coding agent can start servers with ``setsid``. Such a server inherits the agent's standard output."""
    started = tmp_path / "started"
    daemon = f"import os, time; open({str(started)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    (tmp_path / "agent.py").write_text(
        f"import os, subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {daemon!r}], start_new_session=True)\n"
        f"while not os.path.exists({str(started)!r}) or not open({str(started)!r}).read(): time.sleep(0.01)\n"
        "print(sys.stdin.read(), os.listdir())\n"
    )
    outcome, _ = await asyncio.wait_for(play("command", {"command": [sys.executable, f"{tmp_path}/agent.py"]}), 30.0)
    assert outcome.answer == "hello []\n", "the program's folder must not contain the prompt"
    await asyncio.wait_for(process_end(int(started.read_text())), 10.0)


FAKE_AGENT = r"""#!/usr/bin/env python3
import json, os, sys, tomllib
said = {"arguments": sys.argv[1:], "stdin": sys.stdin.read(), "url": os.environ.get("ANTHROPIC_BASE_URL", "")}
if "CODEX_HOME" in os.environ:
    own = tomllib.load(open(os.path.join(os.environ["CODEX_HOME"], "config.toml"), "rb"))
    provider = own["model_providers"][own["model_provider"]]
    said |= {"url": provider["base_url"], "key": os.environ[provider["env_key"]], "api": provider["wire_api"]}
print(json.dumps(said))
"""


@pytest.mark.parametrize(
    ("name", "path", "expected"),
    [("claude", "", {"arguments": ["-p", "--model", "policy"]}), ("codex", "/v1", {"api": "responses"})],
)
async def test_the_scripts_in_agents_md_pass_the_task_and_the_endpoint_to_coding_agents(
    tmp_path, monkeypatch, name, path, expected
):
    """The real agents are not installed on this machine. A script replaces them and prints its arguments."""
    page = (Path(__file__).parents[2] / "docs" / "agents.md").read_text()
    (script,) = [block for block in page.split("```") if f"# {name}.sh" in block]
    (tmp_path / f"{name}.sh").write_text(script.removeprefix("bash"))
    (tmp_path / name).write_text(FAKE_AGENT)
    (tmp_path / name).chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    outcome, _ = await play("command", {"command": f"bash {tmp_path}/{name}.sh"})
    said = json.loads(outcome.answer)
    assert said["stdin"] == "hello"
    assert said["url"].startswith("http://127.0.0.1:")
    assert said["url"].endswith(path)
    assert {key: said[key][:3] if key == "arguments" else said[key] for key in expected} == expected


@pytest.mark.parametrize("ground_truth", [True, False])
async def test_a_program_gets_the_ground_truth_only_if_the_option_is_set(tmp_path, ground_truth):
    (tmp_path / "agent.py").write_text("import os; print(open(os.environ['ASYNCRL_PROMPT']).read())")
    options = {"command": [sys.executable, f"{tmp_path}/agent.py"], "ground_truth": ground_truth}
    outcome, _ = await play("command", options, prompt=make_prompt(ground_truth="HELLO"))
    shown = json.loads(outcome.answer)
    assert shown.get("ground_truth") == ("HELLO" if ground_truth else None)
    assert shown["messages"] == [{"role": "user", "content": "hello"}]
    assert ("extra" in shown) is ground_truth


async def test_the_text_of_a_prompt_with_images_is_the_standard_input_of_a_program(tmp_path):
    (tmp_path / "agent.py").write_text("import sys; print(sys.stdin.read())")
    parts = [{"type": "image_url", "image_url": {"url": "data:,"}}, {"type": "text", "text": "which colour?"}]
    prompt = replace(make_prompt(), messages=({"role": "user", "content": parts},))
    outcome, _ = await play("command", {"command": [sys.executable, f"{tmp_path}/agent.py"]}, prompt=prompt)
    assert outcome.answer == "which colour?\n"


@pytest.mark.parametrize(
    ("mode", "kind", "words"),
    [
        ("fail", FailureKind.environment, "ended with exit status 1: no tools here"),
        ("bad file", FailureKind.reward, "ASYNCRL_OUTCOME must hold JSON, got 'half'"),
        ("bad bytes", FailureKind.reward, "ASYNCRL_OUTCOME must hold JSON, got '\ufffd'"),
        ("deep", FailureKind.reward, r"ASYNCRL_OUTCOME must hold JSON, got '\[\["),
        ("pipe", FailureKind.reward, "ASYNCRL_OUTCOME must be a regular file with JSON"),
        ("folder", FailureKind.reward, "ASYNCRL_OUTCOME must be a regular file with JSON"),
    ],
)
async def test_a_failed_program_fails_the_episode_with_its_last_output(tmp_path, mode, kind, words):
    (tmp_path / "agent.py").write_text(AGENT)
    with pytest.raises(EpisodeFailure, match=words) as failure:
        await play("command", {"command": [sys.executable, f"{tmp_path}/agent.py", mode]})
    assert failure.value.kind is kind


@pytest.fixture
async def openenv_url():
    """Yield the URL of an OpenEnv server with one session per WebSocket.

    The server counts letters, and refuses actions without ``message``.
    """

    async def session(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        heard = 0
        async for raw in socket:
            asked = json.loads(raw.data)
            data: dict = {"observation": {"echo": f"say something, {asked['data'].get('seed')}"}, "done": False}
            if asked["type"] == "step" and "message" not in asked["data"]:
                data = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": ["message"]}
                await socket.send_json({"type": "error", "data": data})
                continue
            if asked["type"] == "step" and asked["data"]["message"] == "break":
                await socket.send_json({"type": "error", "data": {"message": "boom", "code": "EXECUTION_ERROR"}})
                continue
            if asked["type"] == "step" and asked["data"]["message"] == "full":
                data = {"message": "Server at capacity: 1/1", "code": "CAPACITY_REACHED"}
                await socket.send_json({"type": "error", "data": data})
                continue
            if asked["type"] == "step" and asked["data"]["message"] == "close":
                await socket.close()
                continue
            if asked["type"] == "step":
                heard += 1
                text = asked["data"]["message"]
                data = {"observation": {"echo": text[::-1], "n": 1}, "reward": len(text) / 10, "done": heard == 2}
            await socket.send_json({"type": "observation", "data": data})
        return socket

    app = web.Application()
    app.router.add_get("/ws", session)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def test_a_session_of_an_openenv_server_is_played(openenv_url):
    options = {"url": openenv_url, "observation": "echo"}
    outcome, requests = await play("openenv", options, guesses("abc", "abcd"))
    assert outcome.reward == pytest.approx(0.7)
    assert [message["content"] for message in requests[1]["messages"]] == ["hello\n\nsay something, 7", "abc", "cba"]


async def test_the_policy_gets_the_error_of_an_action_that_an_openenv_server_refuses(openenv_url):
    options = {"url": openenv_url, "action": "json"}
    script = guesses("no json", '{"text": "a"}', '{"message": "a"}', '{"message": "b"}')
    outcome, requests = await play("openenv", options, script)
    assert (outcome.metrics["invalid_actions"], outcome.metrics["tool_errors"]) == (2.0, 0.0)
    heard = [message["content"] for message in requests[-1]["messages"] if message["role"] == "user"]
    assert heard[1].startswith("Answer with a JSON object")
    assert heard[2] == "Invalid message: ['message']"
    assert json.loads(heard[3]) == {"echo": "a", "n": 1}


async def test_an_openenv_server_that_fails_or_does_not_exist_is_a_tool_failure(openenv_url):
    for url, says, words in (
        (openenv_url, "break", "answered EXECUTION_ERROR: boom"),
        (openenv_url, "full", "Server at capacity: 1/1; start the server with max_concurrent_envs of at least"),
        (openenv_url, "close", "closed the session before it answered 'step'"),
        ("http://127.0.0.1:9", "break", "the OpenEnv server ws://127.0.0.1:9/ws cannot be reached"),
    ):
        with pytest.raises(EpisodeFailure, match=words) as failure:
            await play("openenv", {"url": url}, guesses(says))
        assert failure.value.kind is FailureKind.tool


async def test_an_openenv_server_without_a_handshake_is_a_tool_failure_after_the_tool_timeout():
    server = await asyncio.start_server(lambda reader, writer: asyncio.sleep(60), "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    with pytest.raises(EpisodeFailure, match=r"tool connect did not answer within .*tool_timeout_s = 1 s") as failure:
        await play("openenv", {"url": url}, guesses("abc"), tool_timeout_s=1.0)
    assert failure.value.kind is FailureKind.tool
    server.close()


async def test_an_error_names_a_field_that_openenv_observations_do_not_have(openenv_url):
    words = r"must have the field 'ecko', which options.observation names, got {'echo': 'say something"
    with pytest.raises(EpisodeFailure, match=words) as failure:
        await play("openenv", {"url": openenv_url, "observation": "ecko"}, guesses("abc", "abcd"))
    assert failure.value.kind is FailureKind.tool


MCP = '''
"""A fake of the package mcp with the same names. Its sessions use standard streams."""
import asyncio, json
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

@dataclass
class StdioServerParameters:
    command: str
    args: list = field(default_factory=list)
    env: dict = field(default_factory=dict)

class Tool(SimpleNamespace):
    def model_dump(self, by_alias):
        return {"inputSchema": {"type": "object", "properties": {"a": {"type": "number"}}}}

class Page(SimpleNamespace):
    def model_dump(self, by_alias):
        return self.more

types = SimpleNamespace(PaginatedRequestParams=lambda cursor: SimpleNamespace(cursor=cursor))

class McpError(Exception):
    def __init__(self, code, message):
        super().__init__(message)
        self.error = SimpleNamespace(code=code, message=message)

class ClientSession:
    def __init__(self, read, write):
        self.parameters = read
    async def __aenter__(self):
        return self
    async def __aexit__(self, *_):
        pass
    async def initialize(self):
        if "silent" in self.parameters.args:
            await asyncio.sleep(600)
    async def list_tools(self, params=None):
        names, page = self.parameters.args, int(params.cursor) if params else 0
        more = {"nextCursor": str(page + 1)} if page + 1 < len(names) else {}
        return Page(tools=[Tool(name=names[page], description="doubles")], more=more)
    async def call_tool(self, name, arguments):
        assert name in self.parameters.args, name
        if arguments["a"] > 200:
            raise McpError(-32000, "Connection closed")
        if arguments["a"] > 100:
            raise OSError("the server is gone")
        if arguments["a"] < 0:
            raise McpError(-32602, "a must not be negative")
        return SimpleNamespace(content=[SimpleNamespace(type="text", text=str(2 * arguments["a"]))])
'''
MCP_STDIO = """
from contextlib import asynccontextmanager

@asynccontextmanager
async def stdio_client(parameters, errlog):
    yield parameters, None
"""
MCP_URL = """
from contextlib import asynccontextmanager
from types import SimpleNamespace

@asynccontextmanager
async def streamable_http_client(url):
    if "broken" in url:
        yield SimpleNamespace(args=["double"]), None
        raise ExceptionGroup("unhandled errors in a TaskGroup", [ConnectionResetError("reset by peer")])
    yield SimpleNamespace(args=["double"]), None
"""


@pytest.fixture
def mcp_package(tmp_path, monkeypatch):
    (tmp_path / "mcp" / "client").mkdir(parents=True)
    (tmp_path / "mcp" / "__init__.py").write_text(MCP)
    (tmp_path / "mcp" / "client" / "stdio.py").write_text(MCP_STDIO)
    (tmp_path / "mcp" / "client" / "streamable_http.py").write_text(MCP_URL)
    monkeypatch.syspath_prepend(str(tmp_path))


def tool_call(number: int, name: str, arguments: str) -> dict:
    return {"id": f"call-{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


async def test_the_policy_calls_mcp_tools_in_parallel_and_gets_errors_for_wrong_calls(mcp_package):
    def script(body):
        if body["messages"][-1]["role"] == "tool":
            return {"role": "assistant", "content": body["messages"][-4]["content"]}
        calls = [
            tool_call(0, "double", '{"a": 4}'), tool_call(1, "twice", '{"a": 5}'),
            tool_call(2, "triple", "{}"), tool_call(3, "double", "{"),
        ]  # fmt: skip
        return {"role": "assistant", "content": None, "tool_calls": calls}

    servers = {"one": {"command": "server", "args": ["double"]}, "two": {"command": "server", "args": ["twice"]}}
    outcome, requests = await play("mcp", {"servers": servers}, script)
    assert outcome.answer == "8"
    assert outcome.metrics["tool_calls"] == 4.0  # two requests for the lists of tools, and two valid calls
    assert [tool["function"]["name"] for tool in requests[0]["tools"]] == ["double", "twice"]
    assert [message["content"] for message in requests[1]["messages"][-4:]] == [
        "8",
        "10",
        "error: there is no tool 'triple', only ['double', 'twice']",
        "error: the arguments of double are not JSON: Expecting property name enclosed in double quotes: "
        "line 1 column 2 (char 1)",
    ]


async def test_tools_of_several_mcp_servers_get_different_names(mcp_package):
    def script(body):
        if body["messages"][-1]["role"] == "tool":
            return {"role": "assistant", "content": body["messages"][-1]["content"]}
        return {"role": "assistant", "content": None, "tool_calls": [tool_call(0, "two__double", '{"a": 4}')]}

    servers = {
        "one": {"command": "server", "args": ["double", "twice"]},
        "two": {"command": "server", "args": ["double"]},
    }
    outcome, requests = await play("mcp", {"servers": servers}, script)
    assert outcome.answer == "8"
    names = [tool["function"]["name"] for tool in requests[0]["tools"]]
    assert names == ["one__double", "twice", "two__double"]


@pytest.mark.parametrize(
    ("number", "words"),
    [(101, "tool double raised OSError: the server is gone"), (201, "its MCP server was lost: Connection closed")],
)
async def test_a_lost_mcp_server_is_a_tool_failure(mcp_package, number, words):
    def script(body):
        return {"role": "assistant", "content": None, "tool_calls": [tool_call(0, "double", f'{{"a": {number}}}')]}

    with pytest.raises(EpisodeFailure, match=words) as failure:
        await play("mcp", {"servers": {"one": {"command": "server", "args": ["double"]}}}, script)
    assert failure.value.kind is FailureKind.tool


async def test_the_policy_gets_an_error_that_an_mcp_server_returns(mcp_package):
    def script(body):
        if body["messages"][-1]["role"] == "tool":
            return {"role": "assistant", "content": body["messages"][-1]["content"]}
        return {"role": "assistant", "content": None, "tool_calls": [tool_call(0, "double", '{"a": -1}')]}

    outcome, _ = await play("mcp", {"servers": {"one": {"command": "server", "args": ["double"]}}}, script)
    assert outcome.answer == "error: tool double raised McpError: a must not be negative"


async def test_an_mcp_server_that_starts_no_session_is_a_tool_failure_after_the_tool_timeout(mcp_package):
    words = r"the MCP server {'command': 'server', .*} did not list its tools: .*tool_timeout_s = 5 s"
    with pytest.raises(EpisodeFailure, match=words) as failure:
        await play("mcp", {"servers": {"one": {"command": "server", "args": ["silent"]}}})
    assert failure.value.kind is FailureKind.tool


async def test_a_tool_failure_names_the_url_of_a_lost_mcp_server(mcp_package):
    def script(body):
        is_answer = body["messages"][-1]["role"] == "tool"
        calls = [] if is_answer else [tool_call(0, "double", '{"a": 4}')]
        return {"role": "assistant", "content": body["messages"][-1]["content"], "tool_calls": calls}

    outcome, _ = await play("mcp", {"servers": {"one": {"url": "http://127.0.0.1:1/mcp"}}}, script)
    assert outcome.answer == "8"
    words = r"an MCP server of {'one': 'http://broken/mcp'} cannot be reached or was lost: ConnectionResetError"
    with pytest.raises(EpisodeFailure, match=words) as failure:
        await play("mcp", {"servers": {"one": {"url": "http://broken/mcp"}}}, script)
    assert failure.value.kind is FailureKind.tool

    def overflows(body):
        return {"error": {"message": "episode 7-0-0 has used 4 of max_turns = 4", "code": "context_length_exceeded"}}

    with pytest.raises(EpisodeFailure, match="has used 4 of max_turns") as failure:
        await play("mcp", {"servers": {"one": {"url": "http://127.0.0.1:1/mcp"}}}, overflows)
    assert failure.value.kind is FailureKind.overflow


async def test_an_error_names_the_package_that_an_adapter_needs(monkeypatch, tmp_path):
    (tmp_path / "mcp.py").write_text("raise ImportError('no mcp here')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match=r"environment.name=mcp needs the package mcp in .*python.*: no mcp here"):
        await play("mcp", {"servers": {}})
