"""Adapters that make agents and environments of other packages usable as environments of this project."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from asyncrl.core.errors import SandboxError
from asyncrl.core.registry import Registry
from rollout_fleet.child_pipes import kill_marked

from .environment import (
    ENVIRONMENTS,
    AssistantMessage,
    EpisodeFailure,
    FailureKind,
    Outcome,
    Policy,
    ToolError,
    read_json,
)

if TYPE_CHECKING:
    from asyncrl.core.types import Prompt

_INTEGER = re.compile(r"-?\d+")
_MOST_DIGITS = 100
"""Longest text of an integer that the policy may write as an action. Python refuses to read very long ones."""
_GYMNASIUM_ID = re.compile(r".*-v\d+")
_MCP_TRANSPORTS = ("anyio", "httpcore", "httpx", "httpx2", "mcp")
"""An exception of one of these packages means that the connection to an MCP server is lost."""
_SHOWN = 2000
"""Largest number of bytes of a program's output in a message."""
_MOST_OUTPUT = 1 << 20
"""Number of bytes that are read from the end of a program's standard output."""


class FunctionEnvironment:
    """Runs ``main(prompt, policy, **options)`` or ``main(prompt, base_url, api_key, **options)`` as an environment.

    A function that is not async runs in a thread. The function may have the attribute ``replayable``, which
    `Environment` explains.

    Raises:
        ValueError: the function has other parameters.
    """

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        self._function = function
        self._options = options
        self.replayable = getattr(function, "replayable", True)
        parameters = inspect.signature(function)
        self._has_policy = "base_url" not in parameters.parameters
        arguments = ("prompt", "policy") if self._has_policy else ("prompt", "base_url", "api_key")
        try:
            parameters.bind(*arguments, **options)
        except TypeError as error:
            raise ValueError(
                f"{function.__name__}{parameters} must take (prompt, policy) or (prompt, base_url, api_key), and "
                f"rollout_fleet.environment.options={dict(options)}: {error}"
            ) from error

    async def run(self, prompt: Prompt, policy: Policy) -> Any:
        """Run one episode: call the function with the prompt and the policy, and return its result unchanged.

        `Outcome.of` converts the result.
        """
        arguments = (prompt, policy) if self._has_policy else (prompt, policy.base_url, policy.api_key)
        if inspect.iscoroutinefunction(self._function):
            return await self._function(*arguments, **self._options)
        return await asyncio.to_thread(self._function, *arguments, **self._options)


@ENVIRONMENTS.register("command")
class CommandEnvironment:
    """A program in any language that acts as the agent. Each episode starts the program once.

    The program gets the environment variables ``OPENAI_BASE_URL``, ``OPENAI_API_KEY``, ``ANTHROPIC_BASE_URL`` and
    ``ANTHROPIC_API_KEY``. Its standard input is the text of the prompt's last message. ``ASYNCRL_PROMPT`` is the path
    of a JSON file with ``messages``, ``ground_truth``, ``data_source`` and ``extra``.

    The program may write its outcome as JSON to the path ``ASYNCRL_OUTCOME``: a reward, or the fields of `Outcome`.
    Otherwise reward functions score the last MiB of its standard output. This output is never read as a reward, because
    it contains text of the policy. An exit status other than 0 is a failure.

    Args:
        command: The program and its arguments. Example: ``python agent.py --fast``. A relative path is looked up in the
            directory of the run.
        cwd: Working directory of the program. Empty: a new folder, which is removed at the end of the episode.
        ground_truth: Whether the JSON file has ``ground_truth`` and ``extra``. Use false if the program runs commands
            of the policy, because the commands could read the file.
    """

    replayable = False

    def __init__(self, command: str | Sequence[str], cwd: str = "", ground_truth: bool = True) -> None:
        try:
            words = shlex.split(command) if isinstance(command, str) else list(map(str, command))
        except ValueError as error:
            raise ValueError(
                f"rollout_fleet.environment.options.command must be a command line, got {command!r}: {error}; correct "
                "its quotation marks"
            ) from error
        if not words or shutil.which(words[0]) is None:
            raise ValueError(
                f"rollout_fleet.environment.options.command must begin with a program, got {command!r}, which cannot "
                "be found; give the full path of the program"
            )
        if cwd and not Path(cwd).is_dir():
            raise ValueError(
                f"rollout_fleet.environment.options.cwd must be an existing folder, got {cwd!r}; create the folder, or "
                "leave the option out for a new folder per episode"
            )
        self._words = [str(Path(word).absolute()) if os.sep in word and Path(word).exists() else word for word in words]
        self._words[1:] = [str(Path(word).absolute()) if Path(word).is_file() else word for word in self._words[1:]]
        self._cwd = cwd
        self._fields = ("messages", "data_source", *(("ground_truth", "extra") if ground_truth else ()))

    async def run(self, prompt: Prompt, policy: Policy) -> Any:
        """Run the program until it exits or the episode is cancelled, then kill all processes that it started.

        Returns the JSON value that the program wrote to ``ASYNCRL_OUTCOME``, or else an `Outcome` with the program's
        output. Standard input, output and error are files, because a pipe stays open as long as any child process
        holds it.
        """
        with ExitStack() as stack:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="asyncrl-episode-")))
            asked, outcome, work = (scratch / name for name in ("prompt.json", "outcome.json", "work"))
            work.mkdir()
            asked.write_text(json.dumps({name: getattr(prompt, name) for name in self._fields}, default=str))
            names = ("stdin", "stdout", "stderr")
            streams = {name: stack.enter_context((scratch / name).open("w+b")) for name in names}
            streams["stdin"].write(_last_text(prompt).encode())
            streams["stdin"].seek(0)
            environment = {
                "OPENAI_BASE_URL": policy.base_url,
                "OPENAI_API_KEY": policy.api_key,
                "ANTHROPIC_BASE_URL": policy.base_url.removesuffix("/v1"),
                "ANTHROPIC_API_KEY": policy.api_key,
                "ASYNCRL_PROMPT": str(asked),
                "ASYNCRL_OUTCOME": str(outcome),
            }
            process = await asyncio.create_subprocess_exec(
                *self._words,
                **streams,  # type: ignore[arg-type]
                cwd=self._cwd or work,
                env={**os.environ, **environment},
                start_new_session=True,
            )
            try:
                await process.wait()
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                kill_marked("ASYNCRL_PROMPT", str(asked))
            if process.returncode != 0:
                raise EpisodeFailure(
                    FailureKind.environment,
                    f"{self._words[0]} ended with exit status {process.returncode}: "
                    f"{_read_end(streams['stderr'], _SHOWN)}",
                )
            return _outcome_of(outcome, _read_end(streams["stdout"], _MOST_OUTPUT))


def _last_text(prompt: Prompt) -> str:
    content = prompt.messages[-1].get("content") if prompt.messages else ""
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content)
    return str(content or "")


def _read_end(stream: BinaryIO, most: int) -> str:
    stream.seek(max(0, os.fstat(stream.fileno()).st_size - most))
    return stream.read().decode(errors="replace")


def _outcome_of(path: Path, output: str) -> Any:
    if not os.path.lexists(path):
        return Outcome(answer=output)
    if not path.is_file():  # refuse special files: reading a FIFO would block the event loop
        raise EpisodeFailure(FailureKind.reward, "ASYNCRL_OUTCOME must be a regular file with JSON, got another kind")
    written = path.read_text(errors="replace")
    try:
        return json.loads(written)
    except (ValueError, RecursionError) as error:
        message = f"ASYNCRL_OUTCOME must hold JSON, got {written[:_SHOWN]!r}: {error}"
        raise EpisodeFailure(FailureKind.reward, message) from error


class _InvalidAction(Exception):
    """Raised if the policy's text is not an action of the game. The policy gets the message and answers again."""


Step = Callable[[str], Awaitable[tuple[Any, float, bool]]]


async def _play(
    prompt: Prompt, policy: Policy, observation: Any, step: Step, *, max_steps: int, turn_rewards: bool
) -> Outcome:
    """Play a game: call the policy and ``step`` in turns. ``step`` returns (observation, reward, has_ended)."""
    messages = _with_observation(list(prompt.messages), observation)
    total, num_invalid, num_steps, done = 0.0, 0, 0, False
    rewards: dict[int, float] = {}
    message = AssistantMessage(content="")
    while not done and num_steps < max_steps:
        message = await policy.chat(messages)
        num_steps += 1
        try:
            observation, reward, done = await step(message.text)
        except _InvalidAction as error:
            observation, reward = str(error), 0.0
            num_invalid += 1
        total += reward
        rewards[message.turn] = reward
        messages = _with_observation([*messages, message], observation)
    return Outcome(
        reward=0.0 if turn_rewards else total,
        turn_rewards=rewards if turn_rewards else {},
        metrics={"steps": num_steps, "invalid_actions": num_invalid, "finished": done},
        answer=message.text,
    )


def _with_observation(messages: list[Any], observation: Any) -> list[Any]:
    """Append an observation: chat messages or text. If the last message is from the user, text is added to it."""
    if isinstance(observation, (list, tuple)) and all(isinstance(part, Mapping) for part in observation):
        return [*messages, *observation]
    text = str(observation)
    if not text:
        return messages
    if messages and messages[-1]["role"] == "user":
        content = messages[-1]["content"]
        is_parts = isinstance(content, (list, tuple))  # text and images
        joined = [*content, {"type": "text", "text": f"\n\n{text}"}] if is_parts else f"{content}\n\n{text}"
        return [*messages[:-1], {"role": "user", "content": joined}]
    return [*messages, {"role": "user", "content": text}]


@ENVIRONMENTS.register("gym")
class GymEnvironment:
    """A game with Gymnasium's methods ``reset`` and ``step``. Actions are texts; observations are texts or messages.

    - ``reset`` may have the parameters ``seed`` and ``options``. The options are the ``extra`` of the data row. The
      seed is the prompt's ``group_id``, so all rollouts of a group start in the same state. ``reset`` returns the
      observation, or ``(observation, info)``.
    - ``step`` gets the policy's text. If the game's ``action_space`` is discrete (it has ``n``), ``step`` gets the last
      integer of the text. ``step`` returns ``(observation, reward, terminated, truncated, info)``, or
      ``(observation, reward, done, info)``.
    - Both methods may be async. Otherwise they run in a thread.

    Args:
        env: Your class as ``file.py:Class`` or ``module:Class``, or the id of a registered environment of the package
            ``gymnasium``. Example: ``FrozenLake-v1``.
        kwargs: Keyword arguments of ``env``.
        max_steps: The game ends after this many steps.
        turn_rewards: Give the reward of each step to its turn. Otherwise the episode gets the sum of the rewards.
    """

    def __init__(
        self, env: str, kwargs: Mapping[str, Any] | None = None, max_steps: int = 100, turn_rewards: bool = False
    ) -> None:
        if not isinstance(kwargs or {}, Mapping) or type(max_steps) is not int or max_steps < 1:
            raise ValueError(
                "rollout_fleet.environment.options of gym must have a mapping as kwargs and a whole number >= 1 as "
                f"max_steps, got kwargs={kwargs!r:.200} and max_steps={max_steps!r:.200}"
            )
        self._kwargs = dict(kwargs or {})
        self._limits = {"max_steps": max_steps, "turn_rewards": turn_rewards}
        if _GYMNASIUM_ID.fullmatch(env):
            gymnasium = _package("gymnasium", "environment.name=gym with the id of a registered environment")
            self._make: Callable[..., Any] = lambda **options: gymnasium.make(env, **options)
        else:
            self._make = Registry[Any]("rollout_fleet.environment.options.env").get(env)

    async def run(self, prompt: Prompt, policy: Policy) -> Outcome:
        """Play one game: the policy's texts are the actions, and the observations are messages to the policy."""
        game = self._make(**self._kwargs)
        try:
            given = {"seed": prompt.group_id, "options": dict(prompt.extra)}
            parameters = inspect.signature(game.reset).parameters
            begun = await self._call(policy, "reset", game.reset, **{k: v for k, v in given.items() if k in parameters})
            observation = begun[0] if isinstance(begun, tuple) and len(begun) == 2 else begun

            async def step(text: str) -> tuple[Any, float, bool]:
                result = await self._call(policy, "step", game.step, _action(game, text))
                if not isinstance(result, (tuple, list)) or len(result) not in (4, 5):
                    raise ValueError(
                        "step of rollout_fleet.environment.options.env must return (observation, reward, terminated, "
                        f"truncated, info) or (observation, reward, done, info), got {result!r:.200}; correct it"
                    )
                return result[0], float(result[1]), any(map(bool, result[2:-1]))

            return await _play(prompt, policy, observation, step, **self._limits)
        finally:
            if callable(close := getattr(game, "close", None)):
                await self._call(policy, "close", close)

    @staticmethod
    async def _call(policy: Policy, name: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        is_async = inspect.iscoroutinefunction(function)
        call = function(*args, **options) if is_async else asyncio.to_thread(function, *args, **options)
        return await policy.run_tool(call, name=name)


def _action(game: Any, text: str) -> Any:
    space = getattr(game, "action_space", None)
    num_actions = getattr(space, "n", None)
    if num_actions is None:
        return text
    first = int(getattr(space, "start", 0))
    numbers = [int(number) for number in _INTEGER.findall(text)[-1:] if len(number) <= _MOST_DIGITS]
    if not numbers or not first <= numbers[0] < first + int(num_actions):
        raise _InvalidAction(f"Answer with a number from {first} to {first + int(num_actions) - 1}.")
    return numbers[0]


_MORE_SESSIONS = (
    "; start the server with max_concurrent_envs of at least the number of episodes that run at the same time "
    "(rollout_fleet.groups_in_flight times the samples per prompt, on each engine), or let fewer episodes run with "
    "rollout_fleet.environment.episodes_per_process"
)


@ENVIRONMENTS.register("openenv")
class OpenEnvEnvironment:
    """An environment on a server of OpenEnv (github.com/meta-pytorch/OpenEnv). Each episode has its own session.

    Args:
        url: URL of the server. Example: ``http://127.0.0.1:8000``.
        action: Field of the action that gets the policy's text. ``json``: the text is the whole action as JSON.
        observation: Field of the observation that the policy reads. Empty: the whole observation as JSON.
        max_steps: The episode ends after this many steps.
        turn_rewards: Give the reward of each step to its turn. Otherwise the episode gets the sum of the rewards.
    """

    replayable = False

    def __init__(
        self,
        url: str,
        action: str = "message",
        observation: str = "",
        max_steps: int = 100,
        turn_rewards: bool = False,
    ) -> None:
        self._aiohttp = _package("aiohttp", "environment.name=openenv")
        self._url = re.sub(r"^http", "ws", url.rstrip("/")) + "/ws"
        self._action, self._observation = action, observation
        self._limits = {"max_steps": max_steps, "turn_rewards": turn_rewards}

    async def run(self, prompt: Prompt, policy: Policy) -> Outcome:
        """Play one session with the OpenEnv server, through one WebSocket: the policy's texts are the actions."""
        async with AsyncExitStack() as stack:
            try:
                client = await stack.enter_async_context(self._aiohttp.ClientSession())
                connecting = stack.enter_async_context(client.ws_connect(self._url, max_msg_size=100 << 20))
                socket = await policy.run_tool(connecting, name="connect")
            except ToolError as error:
                if not isinstance(error.__cause__, self._aiohttp.ClientError):
                    raise
                message = f"the OpenEnv server {self._url} cannot be reached: {error.__cause__}; check options.url"
                raise ToolError(message) from error

            async def ask(kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
                await socket.send_json({"type": kind, "data": data})
                received = await socket.receive()
                if received.type is not self._aiohttp.WSMsgType.TEXT:
                    raise ToolError(f"the OpenEnv server {self._url} closed the session before it answered {kind!r}")
                answer = json.loads(received.data)
                if answer["type"] == "error":
                    code, message = answer["data"].get("code"), answer["data"].get("message")
                    if code == "VALIDATION_ERROR":
                        raise _InvalidAction(f"{message}: {answer['data'].get('errors', '')}")
                    remedy = _MORE_SESSIONS if code == "CAPACITY_REACHED" else ""
                    raise ToolError(f"the OpenEnv server {self._url} answered {code}: {message}{remedy}")
                return answer["data"]

            async def step(text: str) -> tuple[Any, float, bool]:
                answer = await _invalid_or_tool(policy, ask("step", self._action_of(text)), "step")
                return self._shown(answer), float(answer.get("reward") or 0.0), bool(answer.get("done"))

            begun = await policy.run_tool(ask("reset", {"seed": prompt.group_id, **prompt.extra}), name="reset")
            return await _play(prompt, policy, self._shown(begun), step, **self._limits)

    def _action_of(self, text: str) -> dict[str, Any]:
        if self._action != "json":
            return {self._action: text}
        try:
            action = read_json(text)
        except ValueError as error:
            raise _InvalidAction(f"Answer with a JSON object: {error}") from error
        if not isinstance(action, dict):
            raise _InvalidAction("Answer with a JSON object.")
        return action

    def _shown(self, answer: Mapping[str, Any]) -> Any:
        observation = answer.get("observation") or {}
        if not self._observation:
            return json.dumps(observation)
        if observation and not (isinstance(observation, Mapping) and self._observation in observation):
            raise ToolError(
                f"the observation of the OpenEnv server {self._url} must have the field {self._observation!r}, which "
                f"options.observation names, got {observation!r:.200}; name another field, or leave the option out"
            )
        return observation.get(self._observation, "")


async def _invalid_or_tool(policy: Policy, call: Awaitable[Any], name: str) -> Any:
    """Run a tool with `Policy.run_tool`. If the tool raises `_InvalidAction`, raise it, but do not record an error."""

    async def result() -> Any:
        try:
            return await call
        except _InvalidAction as invalid:
            return invalid

    found = await policy.run_tool(result(), name=name)
    if isinstance(found, _InvalidAction):
        raise found
    return found


async def use_tools(
    policy: Policy,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]],
    call: Callable[[str, Mapping[str, Any]], Awaitable[str]],
    **options: Any,
) -> list[Any]:
    """Let the policy call tools until it answers without a call. Returns the conversation with all new messages.

    The calls of one message run in parallel. If a call fails, the policy gets the error and continues.

    Args:
        policy: The policy.
        messages: The conversation so far.
        tools: JSON schemas, in the form of OpenAI's API.
        call: Function that takes the name of a tool and its arguments, runs the tool, and returns its result.
        **options: Further fields of each request.

    Raises:
        ToolError: a tool exceeded its deadline, lost its connection, or its sandbox failed.
        EpisodeFailure: the episode has used up its turns or tokens, or the policy's endpoint did not answer.
    """
    names = {tool["function"]["name"] for tool in tools}

    async def answer(wanted: Mapping[str, Any]) -> dict[str, Any]:
        name = wanted["function"]["name"]
        try:
            if name not in names:
                raise ToolError(f"there is no tool {name!r}, only {sorted(names)}")
            try:
                arguments = read_json(wanted["function"]["arguments"] or "{}")
            except ValueError as error:
                raise ToolError(f"the arguments of {name} are not JSON: {error}") from error
            content = await policy.run_tool(call(name, arguments), name=name)
        except ToolError as error:
            # fail the episode if the tool lost its connection, missed its deadline, or its sandbox failed
            if isinstance(error.__cause__, (OSError, SandboxError)):
                raise
            content = f"error: {error}"
        return {"role": "tool", "tool_call_id": wanted["id"], "name": name, "content": content}

    conversation = list(messages)
    while True:
        message = await policy.chat(conversation, tools=tools, **options)
        conversation.append(message)
        if not message.tool_calls:
            return conversation
        conversation += await asyncio.gather(*map(answer, message.tool_calls))


@ENVIRONMENTS.register("mcp")
class McpEnvironment:
    """Gives the tools of MCP servers to the policy. The environment needs the package ``mcp``.

    The episode ends when the policy answers without a tool call. Reward functions score this last message. If two
    servers have tools of the same name, the policy sees them as ``SERVER__TOOL``.

    Args:
        servers: Servers by name, in the format of other MCP clients. ``{command: …, args: […], env: {…}}``: a server
            that is started for each episode. ``{url: …}``: a server that already runs (streamable HTTP).
    """

    replayable = False

    def __init__(self, servers: Mapping[str, Mapping[str, Any]]) -> None:
        self._mcp = _package("mcp", "environment.name=mcp")
        if not isinstance(servers, Mapping):
            raise ValueError(
                "rollout_fleet.environment.options.servers must map names to servers, such as {files: {command: …}}, "
                f"got {servers!r:.200}"
            )
        for name, server in servers.items():
            if not isinstance(server, Mapping) or ("command" in server) == ("url" in server):
                raise ValueError(
                    f"rollout_fleet.environment.options.servers.{name} must have either a command or a url, got "
                    f"{server!r:.200}"
                )
        self._servers = servers

    async def run(self, prompt: Prompt, policy: Policy) -> Outcome:
        """Connect to the MCP servers, and let the policy call their tools until it answers without a call."""
        try:
            return await self._use_servers(prompt, policy)
        except ExceptionGroup as group:  # the task group of MCP's HTTP client raises exception groups
            lost, others = group.split(_is_of_connection)
            if lost is None or others is not None:
                raise
            places = {name: server.get("url") or server["command"] for name, server in self._servers.items()}
            raise ToolError(
                f"an MCP server of {places} cannot be reached or was lost: {_first_of(lost)!r}; check options.servers"
            ) from group

    async def _use_servers(self, prompt: Prompt, policy: Policy) -> Outcome:
        async with AsyncExitStack() as stack:
            offered: list[tuple[str, Any, Any]] = []  # each entry: name of a server, its session, one of its tools
            for server_name, server in self._servers.items():
                session = await self._connect(stack, server)
                try:
                    listed = await policy.run_tool(self._tools_of(session), name="list_tools")
                except ToolError as error:
                    raise ToolError(f"the MCP server {dict(server)} did not list its tools: {error}") from error
                offered += [(server_name, session, tool) for tool in listed]
            names = Counter(tool.name for _, _, tool in offered)
            tools: dict[str, tuple[Any, str]] = {}
            schemas = list(prompt.tools)
            for server_name, session, tool in offered:
                name = tool.name if names[tool.name] == 1 else f"{server_name}__{tool.name}"
                tools[name] = session, tool.name
                parameters = tool.model_dump(by_alias=True)["inputSchema"]
                function = {"name": name, "description": tool.description or "", "parameters": parameters}
                schemas.append({"type": "function", "function": function})

            async def call(name: str, arguments: Mapping[str, Any]) -> str:
                session, own_name = tools[name]
                try:
                    result = await session.call_tool(own_name, dict(arguments))
                except Exception as error:
                    if _has_lost_server(error):
                        raise ConnectionError(f"its MCP server was lost: {error}") from error
                    raise
                return "\n".join(getattr(part, "text", f"[{part.type}]") for part in result.content)

            messages = await use_tools(policy, prompt.messages, tools=schemas, call=call)
        return Outcome(answer=messages[-1].text)

    async def _tools_of(self, session: Any) -> list[Any]:
        await session.initialize()
        page = await session.list_tools()
        tools = list(page.tools)
        while cursor := page.model_dump(by_alias=True).get("nextCursor"):
            page = await session.list_tools(params=self._mcp.types.PaginatedRequestParams(cursor=cursor))
            tools += page.tools
        return tools

    async def _connect(self, stack: AsyncExitStack, server: Mapping[str, Any]) -> Any:
        try:
            if "url" in server:
                http = importlib.import_module("mcp.client.streamable_http")
                client = getattr(http, "streamable_http_client", None) or http.streamablehttp_client
                streams = await stack.enter_async_context(client(server["url"]))
            else:
                parameters = self._mcp.StdioServerParameters(
                    command=server["command"],
                    args=list(map(str, server.get("args", ()))),
                    env={str(name): str(value) for name, value in server.get("env", {}).items()},
                )
                stdio = importlib.import_module("mcp.client.stdio")
                streams = await stack.enter_async_context(stdio.stdio_client(parameters, errlog=sys.stderr))
            session = await stack.enter_async_context(self._mcp.ClientSession(*streams[:2]))
        except OSError as error:
            raise ToolError(f"the MCP server {dict(server)} cannot be started or reached: {error}") from error
        return session


def _is_of_connection(error: BaseException) -> bool:
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0] in _MCP_TRANSPORTS


def _has_lost_server(error: Exception) -> bool:
    """Return whether ``error``, raised by a tool call in an MCP session, means that the session's server is lost.

    If the server is lost, the episode fails. After most other errors, the policy gets the error's text as the tool's
    result.
    """
    message = getattr(getattr(error, "error", None), "message", "")  # mcp's exceptions have ``error.error.message``
    return message == "Connection closed" or type(error).__module__.partition(".")[0] == "anyio"


def _first_of(group: BaseException) -> BaseException:
    return _first_of(group.exceptions[0]) if isinstance(group, BaseExceptionGroup) else group


@ENVIRONMENTS.register("verifiers")
class VerifiersEnvironment:
    """An environment of the package ``verifiers``, 0.4 or later (``verifiers.v1``), with its agents, tools and rewards.

    The reward is the mean of the agents' rewards. Each named reward and each metric is reported.

    Args:
        env: The environment's configuration, as ``verifiers`` reads it from a file. Example:
            ``{taskset: {id: reverse-text}, agent: {harness: {id: "null"}, runtime: {type: subprocess}}}``.
        task_key: Column of the data (one of ``data.extra_keys``) with the index of the row's task in the taskset.
    """

    replayable = False

    def __init__(self, env: Mapping[str, Any], task_key: str = "task") -> None:
        self._vf = _package("verifiers.v1", "environment.name=verifiers")
        self._loaders = importlib.import_module("verifiers.v1.utils.loaders")
        self._config = self._loaders.resolve_env_config(dict(env))
        self._tasks = list(self._loaders.load_environment(self._config).taskset)
        self._task_key = task_key

    async def run(self, prompt: Prompt, policy: Policy) -> Outcome:
        """Run one episode of the task whose index is in the prompt's row of the data."""
        index = prompt.extra.get(self._task_key)
        if type(index) is not int or not 0 <= index < len(self._tasks):
            raise ValueError(
                f"column {self._task_key!r} must be the index of a task in 0..{len(self._tasks) - 1}, got {index!r}; "
                f"write the index into the data, and set data.extra_keys=[{self._task_key}]"
            )
        variable = f"ASYNCRL_EPISODE_{uuid.uuid4().hex}"  # verifiers reads API keys only from environment variables
        client = self._vf.EvalClientConfig(base_url=policy.base_url, api_key_var=variable)
        environment = self._loaders.load_environment(self._config)
        os.environ[variable] = policy.api_key
        try:
            async with environment.serving():
                context = self._vf.ModelContext(model="policy", client=client)
                episode = await environment.run_episode(self._tasks[index], context)
        finally:
            del os.environ[variable]
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if errors:
            raise EpisodeFailure(FailureKind.environment, f"verifiers: {errors[-1].type}: {errors[-1].message}")
        return _outcome_of_traces(episode.traces)


def _outcome_of_traces(traces: Sequence[Any]) -> Outcome:
    metrics: dict[str, list[float]] = {}
    for trace in traces:
        rewards = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
        for name, value in {**rewards, **trace.metrics}.items():
            if value is not None:
                metrics.setdefault(name, []).append(float(value))
    return Outcome(
        reward=sum(trace.reward for trace in traces) / len(traces),
        metrics={name: sum(values) / len(values) for name, values in metrics.items()},
        answer=traces[-1].last_reply,
    )


def _package(name: str, needed_by: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f"rollout_fleet.{needed_by} needs the package {name} in {sys.executable}: {error}; install it there, or "
            "name another Python by rollout_fleet.environment.python"
        ) from error
