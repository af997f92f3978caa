"""The interface of environments (the user's code between the turns of a rollout), and the client to call the policy.

An environment runs in a child process, which may use another Python. So this module needs only the standard library.
"""

from __future__ import annotations

import asyncio
import http.client
import io
import itertools
import json
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import urlsplit

from asyncrl.core.errors import AsyncRLError
from asyncrl.core.registry import Registry

if TYPE_CHECKING:
    from asyncrl.core.types import Prompt

T = TypeVar("T")
OVERFLOW_CODE = "context_length_exceeded"
"""Error code of a request whose episode has used up its turns or tokens. OpenAI's API uses the same code."""
OnTool = Callable[[int, str, bool], None]
"""Function that is called when a tool call begins, and again when the call ends.

Its arguments are the number of the call in the episode, the name of the tool, and whether the call begins.
"""
MAX_LEVELS = 100
"""Largest allowed number of nested objects and arrays in JSON that the policy wrote."""
_LARGEST = 3.4028234663852886e38  # the largest finite float32


class FailureKind(StrEnum):
    """The kind of an episode's failure. ``rollout_fleet.environment.on_failure`` sets how each kind is handled."""

    environment = "environment"
    tool = "tool"
    reward = "reward"
    overflow = "overflow"
    infrastructure = "infrastructure"


class EpisodeFailure(AsyncRLError):
    """The episode has failed and has no outcome. The message has the cause."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(kind, message)
        self.kind = kind

    def __str__(self) -> str:
        return self.args[1]


class ToolError(AsyncRLError):
    """A tool of an environment failed.

    If the environment does not catch this error, the episode fails with the failure kind ``tool``.
    """


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of an episode, which the environment returns.

    Attributes:
        reward: Value of the built-in reward ``environment``; None if only other reward functions score the episode.
        turn_rewards: Additional rewards of turns, by the turn's index (`AssistantMessage.turn`, `SampledTurn.turn`).
        metrics: Numbers to report. Example: ``{"guesses": 4.0}``.
        answer: The text that reward functions score. Empty or None: the text of the last sampled turn.
    """

    reward: float | None = None
    turn_rewards: Mapping[int, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    answer: str = ""

    @classmethod
    def of(cls, returned: object) -> Outcome:
        """Make an `Outcome` from the value that an environment has returned.

        ``returned`` is an `Outcome`, a mapping with fields of `Outcome`, a number (the reward), or None (no reward).

        Raises `EpisodeFailure` of kind ``reward`` for other values, and for numbers that are not finite in float32.
        """
        try:
            if isinstance(returned, Outcome):
                fields = asdict(returned)
            elif isinstance(returned, Mapping):
                fields = asdict(cls(**returned))
            else:
                fields = asdict(cls(reward=returned))  # type: ignore[arg-type]
            return cls(
                reward=None if fields["reward"] is None else _number(fields["reward"]),
                turn_rewards={_turn(turn): _number(value) for turn, value in fields["turn_rewards"].items()},
                metrics={_text(name): _number(value) for name, value in fields["metrics"].items()},
                answer="" if fields["answer"] is None else _text(fields["answer"]),
            )
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise EpisodeFailure(
                FailureKind.reward,
                f"the environment returned {str(returned)[:200]!r} ({error}); it must return an Outcome, a mapping of "
                "its fields, one finite number, or None",
            ) from None


def _number(value: Any) -> float:
    if isinstance(value, (str, bytes)) or getattr(value, "ndim", 0) != 0:
        raise ValueError(f"{value!r} is not a number")
    number = float(value)
    if not math.isfinite(number) or abs(number) > _LARGEST:
        raise ValueError(f"{number} is not finite in float32")
    return number


def _text(value: Any) -> str:
    """Return ``str(value)`` with ``?`` for each unpaired surrogate, because files and messages need valid Unicode."""
    return str(value).encode(errors="replace").decode()


def _turn(key: Any) -> int:
    if not str(key).isdecimal():
        raise ValueError(f"{key!r} is not the index of a turn")
    return int(key)


class AssistantMessage(dict[str, Any]):
    """An assistant's message in the form of OpenAI's API. Append it to the messages to continue the conversation.

    Attributes:
        turn: Index of the message's turn in the episode, for `Outcome.turn_rewards`.
        finish_reason: ``stop``, ``length`` or ``tool_calls``.
    """

    turn: int
    finish_reason: str

    @property
    def text(self) -> str:
        """The text of the message, without tool calls; empty if it has only tool calls."""
        return self.get("content") or ""

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """The message's tool calls in OpenAI's form; empty if there are none.

        A call is ``{"id": …, "type": "function", "function": {"name": …, "arguments": …}}``, with arguments as JSON.
        """
        return self.get("tool_calls") or []


@dataclass(frozen=True, kw_only=True)
class SampledTurn:
    """A turn that the policy sampled, as tokens. `Policy.sample` returns this object.

    Attributes:
        turn: Index of the turn in the episode. Pass it as ``parent`` to continue after this turn.
        token_ids: The sampled tokens.
        logprobs: One log-prob per token.
        finish_reason: ``stop`` or ``length``.
    """

    turn: int
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str


class Policy:
    """The client of one episode's environment. It sends requests to the episode's endpoint, where the policy answers.

    Any client of OpenAI's API can be used instead, with ``base_url`` and ``api_key``.

    Attributes:
        base_url: URL for this episode. Example: ``"http://127.0.0.1:41234/v1"``.
        api_key: Key of this episode. The endpoint refuses it after the end of the episode.
        sample_index: Index of this rollout in its prompt group, 0..G - 1.
        metrics: Numbers that are added to the metrics of the outcome: ``tool_calls``, ``tool_errors`` and ``tool_s`` if
            `run_tool` was used.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str,
        *,
        sample_index: int = 0,
        turn_timeout_s: float = 600.0,
        tool_timeout_s: float = 60.0,
        on_tool: OnTool = lambda number, name, is_running: None,
    ) -> None:
        self.base_url = base_url
        self.api_key = api_key
        self.sample_index = sample_index
        self.metrics: dict[str, float] = {}
        self._turn_timeout_s = turn_timeout_s
        self._tool_timeout_s = tool_timeout_s
        self._on_tool = on_tool
        self._tool_numbers = itertools.count()

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> AssistantMessage:
        """Send a conversation to the policy, and return the assistant's message that the policy samples.

        Args:
            messages: The conversation so far, in the form of OpenAI's API.
            tools: JSON schemas of the tools that the model may call.
            **options: Further fields of the request. Example: ``max_tokens=64, stop=["END"]``.

        Raises:
            EpisodeFailure: the episode's budget is used up (kind ``overflow``), or the endpoint did not answer.
            ValueError: the endpoint refused the request.
        """
        body = {"model": "policy", "messages": list(messages), **({"tools": list(tools)} if tools else {}), **options}
        answer = await self._post("/chat/completions", body)
        (choice, *_) = answer["choices"]
        message = AssistantMessage(choice["message"])
        message.turn, message.finish_reason = choice.get("turn", -1), choice["finish_reason"]
        return message

    async def sample(self, tokens: Sequence[int], *, parent: int | None = 0, **options: Any) -> SampledTurn:
        """Let the policy continue token ids instead of messages. Returns the sampled tokens.

        The policy sees all tokens up to the end of the turn with the index ``parent``, and then ``tokens``. ``parent``
        0 is the prompt; None begins a new sequence. ``options`` are further fields of the request. Raises the errors of
        `chat`.
        """
        body = {"parent": parent, "tokens": [int(token) for token in tokens], **options}
        answer = await self._post("/asyncrl/sample", body)
        return SampledTurn(**{name: answer[name] for name in ("turn", "token_ids", "logprobs", "finish_reason")})

    async def give(self, tokens: Sequence[int], *, parent: int | None = 0) -> int:
        """Append a turn of token ids that the policy did not sample, such as a tool's result.

        The new turn follows the turn with the index ``parent``. ``parent`` 0 is the prompt; None begins a new sequence.
        Returns the index of the new turn, to pass as ``parent``. Raises the errors of `chat`.
        """
        answer = await self._post("/asyncrl/give", {"parent": parent, "tokens": [int(token) for token in tokens]})
        return answer["turn"]

    async def run_tool(self, call: Awaitable[T], *, name: str = "tool") -> T:
        """Await ``call`` with the deadline ``rollout_fleet.environment.tool_timeout_s``, and return its result.

        The call adds to ``tool_calls``, ``tool_errors`` and ``tool_s`` (seconds) in `metrics`. ``name`` is the tool's
        name for errors and reports.

        Raises:
            ToolError: the call raised an exception or exceeded its deadline.
            EpisodeFailure: the call raised it, for example because the episode's budget is used up.
        """
        started, failed, number = time.monotonic(), 1, next(self._tool_numbers)
        deadline = asyncio.timeout(self._tool_timeout_s)
        self._on_tool(number, name, True)
        try:
            async with deadline:
                result = await call
            failed = 0
            return result
        except EpisodeFailure:
            failed = 0  # do not record an error of the tool, because the episode itself failed
            raise
        except ToolError:
            raise
        except Exception as error:
            if isinstance(error, TimeoutError) and deadline.expired():  # the tool itself did not raise the error
                raise ToolError(
                    f"tool {name} did not answer within rollout_fleet.environment.tool_timeout_s = "
                    f"{self._tool_timeout_s:g} s; make the tool faster, or raise the option"
                ) from error
            raise ToolError(f"tool {name} raised {type(error).__name__}: {error}") from error
        finally:
            self._on_tool(number, name, False)
            for metric, value in (("calls", 1), ("errors", failed), ("s", time.monotonic() - started)):
                self.metrics[f"tool_{metric}"] = self.metrics.get(f"tool_{metric}", 0.0) + value

    async def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self._turn_timeout_s):
                status, answer = await _post_json(self.base_url + path, self.api_key, body)
        except TimeoutError:
            raise EpisodeFailure(
                FailureKind.infrastructure,
                f"the endpoint did not answer a request for a turn within rollout_fleet.environment.turn_timeout_s = "
                f"{self._turn_timeout_s:g} s; raise the option, or lower sampling.max_new_tokens",
            ) from None
        except (OSError, EOFError, http.client.HTTPException) as error:
            raise EpisodeFailure(
                FailureKind.infrastructure, f"the episode's endpoint {self.base_url} could not be reached: {error!r}"
            ) from error
        if status == http.client.OK:
            return answer
        error = answer.get("error") or {}
        message = f"the endpoint answered {status} to {path}: {error.get('message', answer)}"
        if error.get("code") == OVERFLOW_CODE:
            raise EpisodeFailure(FailureKind.overflow, message)
        if status in (http.client.BAD_REQUEST, http.client.UNPROCESSABLE_ENTITY):
            raise ValueError(message)
        raise EpisodeFailure(FailureKind.infrastructure, message)


async def _post_json(url: str, api_key: str, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    place = urlsplit(url)
    payload = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(place.hostname, place.port or 80)
    try:
        head = (
            f"POST {place.path} HTTP/1.0\r\nHost: {place.netloc}\r\nAuthorization: Bearer {api_key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
        )
        writer.write(head.encode() + payload)
        await writer.drain()
        # With HTTP/1.0, the server closes the connection after its answer, so read until the end.
        head, _, content = (await reader.read(-1)).partition(b"\r\n\r\n")
        status_line, _, lines = head.partition(b"\r\n")
        headers = http.client.parse_headers(io.BytesIO(lines + b"\r\n\r\n"))
        if len(content) < int(headers.get("Content-Length", 0)) or not status_line:
            raise EOFError("the connection was closed in the middle of an answer")
        return int(status_line.split()[1]), json.loads(content)
    except ValueError as error:
        raise http.client.HTTPException(f"no answer in JSON ({error})") from error
    finally:
        writer.close()


class Environment(Protocol):
    """The user's code between the turns of an episode.

    One object serves all episodes of a process with the same options. Episodes may run at the same time, so keep the
    state of an episode in local variables of `run`.

    If the worker of an episode dies, `run` is called again on another worker. Equal requests then get the recorded
    answers. If `run` changes anything outside its process, set the class attribute ``replayable = False``. Then the
    recorded answers are dropped, and the policy samples new answers.
    """

    async def run(self, prompt: Prompt, policy: Policy) -> Outcome:
        """Run one episode (one rollout of ``prompt``), and return its outcome.

        ``policy`` samples the model's turns.

        Raises:
            Exception: the episode has failed. The kind of the failure is ``tool`` for a `ToolError`, the attribute
                ``kind`` of an `EpisodeFailure`, and ``environment`` for most other exceptions.
        """
        ...


ENVIRONMENTS: Registry[Any] = Registry("rollout_fleet.environment.name")
"""Registry of environments: maps each name to a class or an async function."""


def read_json(text: str) -> Any:
    """Parse a JSON text that the policy wrote, and return its value.

    Raises `ValueError` if the text is not JSON, has too many levels of objects and arrays, or is not valid Unicode
    (`is_usable`).
    """
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError(f"JSON must have at most {MAX_LEVELS} levels, got more") from error
    is_plain = text.isascii() and "\\" not in text and text.count("{") + text.count("[") <= MAX_LEVELS
    if not is_plain and not is_usable(value):
        raise ValueError(f"JSON must have at most {MAX_LEVELS} levels and valid Unicode, got {text[:100]!r}")
    return value


def is_usable(value: Any) -> bool:
    """Return whether chat templates, tokenizers and clients can process ``value``, parsed JSON that the policy wrote.

    The value must have at most `MAX_LEVELS` levels of objects and arrays, and its texts must be valid Unicode. Texts in
    JSON can be invalid, because JSON may have an escape for only one half of a surrogate pair.
    """
    level = [value]
    for _ in range(MAX_LEVELS + 1):
        parts = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, (dict, list))]
        level = [one for part in parts for one in part]
        if not level:
            break
    else:
        return False
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True
