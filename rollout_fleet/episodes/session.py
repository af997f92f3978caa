"""A session answers the requests of one episode. Each request repeats earlier messages and adds new messages.

::

    request (messages) ──match──▶ known conversation ──extend──▶ tokens of the new messages ──▶ sample
                           └─ no match, or the template renders the conversation differently: render the whole request,
                              and branch at the first difference. `SessionCounts.branches` counts the causes.

Sampled tokens never change. A request that continues a known conversation adds only the tokens of its new messages.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Protocol

import numpy as np
import orjson

from asyncrl.core.errors import EpisodeOverflow
from asyncrl.core.image_files import ImageReader, is_image, place_images, read_bytes, source_of, with_placeholders
from asyncrl.core.images import Image, PlacedImage, moved
from asyncrl.core.trajectory import ROOT
from asyncrl.core.types import FinishReason, Prompt
from rollout_fleet.config import SamplingConfig

from .chat_parsers import ToolCall
from .episode import PROMPT, Episode
from .messages import (
    Message,
    ReadImage,
    canonical,
    chain,
    follow,
    images_in,
    read_message,
    same_reasoning,
    with_reasoning,
)
from .renderer import ChatRenderer, ParsedAnswer

NEUTRAL: Mapping[str, Any] = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": {},
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "verbosity": "medium",
    "hosted_tools": [],
}
"""Sampling options that are not supported, each with the value that has no effect."""


logger = logging.getLogger(__name__)


class TurnSampler(Protocol):
    """Samples the turns of one episode on an engine."""

    @property
    def episode(self) -> Episode:
        """The episode whose turns are sampled."""
        ...

    async def sample(
        self,
        parent: int,
        new_tokens: Sequence[int],
        sampling: SamplingConfig,
        images: tuple[PlacedImage, ...] = (),
    ) -> int:
        """Append ``new_tokens`` after the turn ``parent``, and let the engine sample a new turn after these tokens.

        Waits until the new turn is finished, and returns its index. ``new_tokens`` may be empty. If the engine aborts
        the turn, for example for a weight update, the engine continues the turn later, and this method still waits.

        Raises:
            EpisodeOverflow: the episode has used up its budget.
            EpisodeEnded: the rollout worker stopped the episode before its end, and cancels the environment.
            RequestRefused: a token is outside the vocabulary, or the engine refuses the request.
            ValueError: ``parent`` is being sampled or is not the index of a turn, or ``parent`` is `ROOT` and
                ``new_tokens`` is empty.
        """
        ...

    def give(self, parent: int, tokens: Sequence[int]) -> int:
        """Append a new turn after the turn ``parent``, with token ids that the policy did not sample.

        Returns the index of the new turn.

        Raises the errors of `Episode.give`, and `RequestRefused` for a token outside the vocabulary.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """Sampling options of a request.

    Attributes:
        n: Number of turns to sample, all after the same messages.
        max_tokens: Maximum length of a turn in tokens. ``rollout_fleet.sampling.max_new_tokens`` is the largest value
            and the default.
        stop: Texts that end a turn.
        stop_token_ids: Tokens that end a turn, in addition to the renderer's stop tokens.
        seed: Random seed; the i-th of n turns gets ``seed + i`` (`SamplingConfig.seed`).
        json_schema: JSON schema of the answer, as text; empty for none.
        reads_calls: Whether to read tool calls. Otherwise the text of tool calls stays in the content.
        other: Other options, by OpenAI's names. Example: ``{"temperature": 0.2}``. If a value differs from the run's
            value, a session with ``refuses`` refuses the request, and any other session uses the run's value. The entry
            ``hosted_tools`` lists types of tools that a provider's servers would run, such as ``web_search``.
    """

    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    json_schema: str = ""
    reads_calls: bool = True
    other: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """A request for the next turn of a conversation.

    Attributes:
        messages: The conversation in OpenAI's form.
        tools: The tools in OpenAI's form: ``{"type": "function", "function": …}``.
        options: Sampling options.
        key: Idempotency key; empty if there is none. Requests with the same key get the same answers.
        is_retry: Whether the client's headers mark this request as repeated.
    """

    messages: Sequence[Message]
    tools: Sequence[Message] = ()
    options: SampleOptions = field(default_factory=SampleOptions)
    key: str = ""
    is_retry: bool = False


@dataclass(frozen=True, kw_only=True)
class TextRequest:
    """A request to continue a text, or token ids. `ChatRequest` explains ``key`` and ``is_retry``."""

    prompt: str | Sequence[int]
    options: SampleOptions = field(default_factory=SampleOptions)
    key: str = ""
    is_retry: bool = False


@dataclass(frozen=True, kw_only=True)
class SampledAnswer:
    """One sampled turn.

    Attributes:
        turn: Index in the episode.
        message: The assistant's message in OpenAI's form. For a text request, the message's content is the text.
        finish_reason: ``stop``, ``length`` or ``tool_calls``.
        stop_text: The text of the request's option ``stop`` that ended the turn; empty if none of these texts ended the
            turn. The content does not contain this text.
        num_prompt_tokens: Number of tokens before the turn: the prompt and all turns on the path to this turn.
        num_reused_tokens: Number of these prompt tokens that were in the episode before the request.
        token_ids: [R] int32 tokens of the turn.
        logprobs: [R] float32 log-probs of these tokens.
        versions: [R] int32 policy versions of these tokens.
    """

    turn: int
    message: dict[str, Any]
    finish_reason: str
    num_prompt_tokens: int
    num_reused_tokens: int
    token_ids: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    stop_text: str = ""


@dataclass(kw_only=True)
class SessionCounts:
    """Counters of the requests and tokens of one episode.

    Attributes:
        requests: Number of new requests.
        repeated: Number of requests that got the answers to an earlier request.
        branches: Number of requests that could not continue their history, by cause. ``template``: the template renders
            the history differently. ``unparseable``: the same, and the history ends with an answer whose tool calls
            could not be parsed. ``edited``: the history has other messages. ``tools``: the tools differ. ``new_root``:
            the rendered request does not begin with the tokens of any turn of the episode.
        overridden: Number of requested values that differed from the run's sampling options, by name of the option.
        malformed_calls: Tool calls that could not be read.
        prompt_tokens: Number of tokens of all prompts.
        reused_tokens: Number of prompt tokens that were in the episode before the request.
        retokenised_tokens: Number of sampled tokens in earlier answers that a request repeats, if the answers' text was
            encoded again for a new branch. The learner does not train on the newly encoded tokens.
    """

    requests: int = 0
    repeated: int = 0
    branches: Counter[str] = field(default_factory=Counter)
    overridden: Counter[str] = field(default_factory=Counter)
    malformed_calls: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    retokenised_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class _History:
    """A sampled turn, and the messages of the conversation up to and including this turn."""

    turn: int
    messages: Sequence[Message]
    tools: str
    call_ids: frozenset[str]
    num_malformed: int


@dataclass(kw_only=True)
class _Call:
    task: asyncio.Task[list[SampledAnswer]]
    digest: str
    num_callers: int = 0
    num_lost: int = 0


@dataclass(frozen=True, kw_only=True)
class _Place:
    parent: int
    new_tokens: Sequence[int]
    messages: Sequence[Message] = ()
    images: tuple[PlacedImage, ...] = ()


class Session:
    """Answers the requests of one episode's environment, and keeps the episode's conversations.

    Attributes:
        overflow: Error message of the latest chat or text request, if the request failed because the budget of turns,
            tokens or context was used up (`EpisodeOverflow`); otherwise empty.

    Args:
        sampling: The run's sampling options.
        refuses: Whether to refuse requests with options other than the run's. Otherwise the run's options replace them.
        on_calls: Function that is called for each answer to messages. It gets the names of the tools that are called.
        images: Reads the images in messages; None if the policy takes no images.
    """

    def __init__(
        self,
        sampler: TurnSampler,
        renderer: ChatRenderer,
        *,
        sampling: SamplingConfig,
        prompt: Prompt,
        refuses: bool = False,
        on_calls: Callable[[Sequence[str]], None] = lambda names: None,
        images: ImageReader | None = None,
    ) -> None:
        self._reader = images
        self._images: dict[str, Image] = {}
        self._digests: dict[bytes, str] = {}
        self.counts = SessionCounts()
        self.overflow = ""
        self.prompt = prompt
        self._sampler = sampler
        self._renderer = renderer
        self._sampling = sampling
        self._refuses = refuses
        self._on_calls = on_calls
        self._histories: dict[bytes, list[_History]] = defaultdict(list)
        self._seen: set[bytes] = set()
        self._answers: dict[bytes, list[int]] = defaultdict(list)
        self._texts: list[tuple[str, int]] = []
        self._children: dict[int, dict[int, None]] = {ROOT: {PROMPT: None}}
        self._by_key: dict[str, _Call] = {}
        self._by_digest: dict[str, _Call] = {}

    @property
    def renderer(self) -> ChatRenderer:
        """The renderer, which converts the model's chat messages to tokens, and tokens to messages."""
        return self._renderer

    async def chat(self, request: ChatRequest) -> list[SampledAnswer]:
        """Return ``n`` sampled answers to the messages. A repeated request gets the answers to the first request.

        A request with the idempotency key of an earlier request is a repeat. An equal request without a key is a repeat
        in three cases:

        - the earlier request still runs,
        - the answer to the earlier request was lost (`lose`), or
        - the client marks the new request as a retry.

        Otherwise the new request gets new answers to the same messages.

        Raises:
            ValueError: a message, a tool or an option is not supported.
            EpisodeOverflow: the episode has used up its budget.
            EpisodeEnded: the rollout worker stopped the episode before its end.
        """
        return await self._once(request, lambda: self._answer_chat(request))

    async def count_tokens(self, request: ChatRequest) -> int:
        """Return the number of tokens of the rendered messages and tools, without sampling.

        Raises `ValueError` if there are no messages, if a message is not supported, or if the chat template raises an
        error for a message.
        """
        messages = await self._read(request.messages)
        tokens, _ = self._with_images(self._renderer.render(messages, [dict(tool) for tool in request.tools]), messages)
        return len(tokens)

    async def complete(self, request: TextRequest) -> list[SampledAnswer]:
        """Return ``n`` sampled continuations of a text or of token ids.

        A request that repeats an earlier request (`chat` explains the rules) gets the earlier answers. Raises the
        errors of `chat`.
        """
        return await self._once(request, lambda: self._answer_text(request))

    async def sample(self, parent: int, tokens: Sequence[int], options: SampleOptions) -> SampledAnswer:
        """Return one sampled answer to a request that has token ids instead of messages.

        The tokens follow the turn with the index ``parent``. If ``parent`` is `ROOT`, the tokens begin a new sequence.

        Raises the errors of `TurnSampler.sample` and `Episode.sample`, and `ValueError` for an unsupported option.
        """
        if options.n != 1:
            raise ValueError(f"n must be 1 in a request with token ids, got {options.n}; send one request per turn")
        (answer,) = await self._sample(_Place(parent=parent, new_tokens=tokens), options, stops=False)
        return answer

    def give(self, parent: int, tokens: Sequence[int]) -> int:
        """Append a turn of token ids that the policy did not sample.

        The new turn follows the turn with the index ``parent``. If ``parent`` is `ROOT`, the new turn begins a new
        sequence. Returns the index of the new turn. Raises the errors of `TurnSampler.give`.
        """
        turn = self._sampler.give(parent, tokens)
        self._know(turn)
        return turn

    def lose(self, request: ChatRequest | TextRequest) -> None:
        """Record that the answer to ``request`` was lost, because the client had disconnected.

        If the client sends the same request again, the session returns the lost answer, but only once.
        """
        call = self._by_key.get(request.key) if request.key else self._by_digest.get(_digest(request))
        if call is not None:
            call.num_lost += 1

    async def _once(
        self, request: ChatRequest | TextRequest, answer: Callable[[], Awaitable[list[SampledAnswer]]]
    ) -> Any:
        digest = _digest(request)
        call = self._earlier(request, digest)
        if call is None:
            self.counts.requests += 1
            call = _Call(task=asyncio.ensure_future(answer()), digest=digest)
            call.task.add_done_callback(self._note_overflow)
            if request.key:
                self._by_key[request.key] = call
            else:
                self._by_digest[digest] = call
        else:
            self.counts.repeated += 1
        call.num_callers += 1
        return list(await asyncio.shield(call.task))

    def _note_overflow(self, task: asyncio.Task[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        self.overflow = str(error) if isinstance(error, EpisodeOverflow) else ""

    def _earlier(self, request: ChatRequest | TextRequest, digest: str) -> _Call | None:
        call = self._by_key.get(request.key) if request.key else self._by_digest.get(digest)
        if call is None:
            return None
        if call.digest != digest:
            raise ValueError(f"idempotency key {request.key!r} was used for another request; use a new key")
        if not call.task.done():
            return call
        if call.task.cancelled() or call.task.exception() is not None:
            return None
        is_lost = call.num_lost >= call.num_callers
        return call if request.key or request.is_retry or is_lost else None

    # Messages

    async def _answer_chat(self, request: ChatRequest) -> list[SampledAnswer]:
        messages = await self._read(request.messages)
        tools = [dict(tool) for tool in request.tools]
        tools_digest = json.dumps(tools, sort_keys=True)
        digests = chain(messages)
        place = self._place(messages, tools, tools_digest, digests)
        self._seen.update(digests)
        answers = await self._sample(place, request.options, stops=True)
        for place_of_answer, answer in enumerate(answers):
            parsed = self._parse(answer, tools, reads_calls=request.options.reads_calls)
            content, stop_text = _cut(parsed.content, request.options.stop)
            message = self._message(answer, parsed, content, messages)
            self._on_calls([call.name for call in parsed.calls])
            reason = "tool_calls" if parsed.calls and answer.finish_reason == "stop" else answer.finish_reason
            answers[place_of_answer] = replace(answer, message=message, finish_reason=reason, stop_text=stop_text)
            history = [*place.messages, read_message(message, "answer")]
            self._answers[canonical(history[-1], {})].append(answer.turn)
            ids = frozenset(call["id"] for call in message.get("tool_calls", ()))
            self._histories[follow(digests[-1], history[-1], {})].append(
                _History(
                    turn=answer.turn,
                    messages=history,
                    tools=tools_digest,
                    call_ids=ids,
                    num_malformed=parsed.num_malformed,
                )
            )
        return answers

    async def _read(self, sent: Sequence[Any]) -> list[dict[str, Any]]:
        if not sent:
            raise ValueError("messages must hold at least one message, got none")
        read_image = None if self._reader is None else self._read_image
        contents = (message.get("content") for message in sent if isinstance(message, Mapping))
        if any(is_image(part) for content in contents if isinstance(content, list) for part in content):
            # Use a thread, because reading an image takes milliseconds.
            return await asyncio.to_thread(_read_messages, sent, read_image)
        return _read_messages(sent, read_image)

    def _place(
        self, messages: Sequence[Message], tools: Sequence[Message], tools_digest: str, digests: Sequence[bytes]
    ) -> _Place:
        """Find the turn that a request continues, and the tokens to add. Count the request if it begins a branch."""
        history, cause = self._longest_history(messages, tools_digest, digests)
        if history is not None:
            num_known = len(history.messages)
            known, new = with_reasoning(messages[:num_known], history.messages), messages[num_known:]
            messages = [*known, *new]
            turn = self._sampler.episode.turn(history.turn)
            prompt_ids = self._sampler.episode.path(turn.parent).tolist()
            suffix = self._renderer.extend(prompt_ids, turn.token_ids.tolist(), known, new, tools)
            if suffix is not None:
                has_answers = any(message["role"] == "assistant" for message in new)
                if has_answers and self._count_retokenised(messages, history.turn):
                    self.counts.branches["edited"] += 1
                suffix, images = self._with_images(suffix, new)
                return _Place(parent=history.turn, new_tokens=suffix, messages=messages, images=images)
            cause = "unparseable" if history.num_malformed else "template"
        tokens, images = self._with_images(self._renderer.render(messages, tools), messages)
        parent, num_shared = self._deepest(tokens, images)
        if cause or parent == ROOT:
            self.counts.branches[cause or "new_root"] += 1
        self._count_retokenised(messages, parent)
        new_images = moved((placed for placed in images if placed.offset >= num_shared), -num_shared)
        return _Place(parent=parent, new_tokens=tokens[num_shared:], messages=messages, images=new_images)

    def _count_retokenised(self, messages: Sequence[Message], parent: int) -> bool:
        """Find the sampled answers in ``messages`` whose text must be encoded again. Count their sampled tokens.

        These answers are not on the path to the turn ``parent``. Their tokens are added to
        ``counts.retokenised_tokens``. Returns whether there are such tokens.
        """
        on_path: set[int] = set()
        while parent != ROOT:
            on_path.add(parent)
            parent = self._sampler.episode.turn(parent).parent
        num_tokens = 0
        for message in messages:
            turns = self._answers.get(canonical(message, {}), []) if message["role"] == "assistant" else []
            kept = on_path.intersection(turns)
            on_path.difference_update([*kept][:1])  # each turn matches only one of several equal answers
            num_tokens += len(self._sampler.episode.turn(turns[-1]).token_ids) if turns and not kept else 0
        self.counts.retokenised_tokens += num_tokens
        return num_tokens > 0

    def _with_images(self, tokens: list[int], messages: Sequence[Message]) -> tuple[list[int], tuple[PlacedImage, ...]]:
        images = [self._images[digest] for message in messages for digest in images_in(message)]
        if self._reader is None or not images:
            return tokens, ()
        token_id, where = self._reader.token_id, "the rendered conversation"
        tokens = with_placeholders(tokens, [image.num_tokens for image in images], token_id, where)
        return tokens, place_images(np.asarray(tokens), images, token_id, where)

    def _read_image(self, part: Mapping[str, Any], where: str) -> str:
        assert self._reader is not None
        content = read_bytes(source_of(part), where)
        key = hashlib.blake2b(content, digest_size=16).digest()
        if key not in self._digests:
            image = self._reader.image(content, where)
            self._images[image.digest] = image
            self._digests[key] = image.digest
        return self._digests[key]

    def _longest_history(
        self, messages: Sequence[Message], tools: str, digests: Sequence[bytes]
    ) -> tuple[_History | None, str]:
        """Return a pair: the longest known history that is a prefix of ``messages``, and an empty text.

        If there is no such history, the pair is None and the cause: ``tools`` or ``edited``
        (`SessionCounts.branches`), or an empty text for other causes.
        """
        called = {str(message.get("tool_call_id")) for message in messages if message["role"] == "tool"}
        cause = ""
        for length in range(len(messages) - 1, 0, -1):
            found = [
                history
                for history in self._histories.get(digests[length - 1], ())
                if same_reasoning(messages[:length], history.messages)
            ]
            fitting = [history for history in found if history.tools == tools]
            if fitting:
                return max(fitting, key=lambda history: (len(history.call_ids & called), history.turn)), ""
            cause = cause or ("tools" if found else "")
        has_answers = any(message["role"] == "assistant" for message in messages)
        if not cause and has_answers and digests[0] in self._seen:
            cause = "edited"
        return None, cause

    def _parse(self, answer: SampledAnswer, tools: Sequence[Message], *, reads_calls: bool) -> ParsedAnswer:
        prompt_ids = self._sampler.episode.path(self._sampler.episode.turn(answer.turn).parent)
        parsed = self._renderer.parse(prompt_ids.tolist(), answer.token_ids.tolist(), tools)
        self.counts.malformed_calls += parsed.num_malformed
        if parsed.calls and not reads_calls:
            ids = self._renderer.without_stop(answer.token_ids.tolist())
            text = self._renderer.tokenizer.decode(ids)
            return replace(parsed, content=text.rpartition("</think>")[2], calls=())
        return parsed

    def _message(
        self, answer: SampledAnswer, parsed: ParsedAnswer, content: str, history: Sequence[Message]
    ) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if parsed.reasoning:
            message["reasoning_content"] = parsed.reasoning
        if parsed.calls:
            message["content"] = content or None
            message["tool_calls"] = [
                {
                    "id": call_id,
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": call.arguments
                        if isinstance(call.arguments, str)
                        else json.dumps(call.arguments, ensure_ascii=False),
                    },
                }
                for call, call_id in zip(parsed.calls, self._ids_of(answer.turn, parsed.calls, history), strict=True)
            ]
        return message

    def _ids_of(self, turn: int, calls: Sequence[ToolCall], history: Sequence[Message]) -> list[str]:
        """Return an id for each tool call of a turn. A replay of the episode gets the same ids.

        The policy may write the ids. If an id is missing or not unique, all ids are made from the tokens of the turn.
        Turns with the same parent and equal tokens get different ids.
        """
        episode = self._sampler.episode
        own = episode.turn(turn)
        siblings = (other for other in self._children[own.parent] if other < turn and episode.turn(other).sampled)
        num_equal = sum(np.array_equal(episode.turn(other).token_ids, own.token_ids) for other in siblings)
        written = [call.id for call in calls]
        earlier = {call["id"] for message in history for call in message.get("tool_calls", ())}
        if not num_equal and all(written) and len({*written} - earlier) == len(calls):
            return written
        name = hashlib.blake2b(episode.path(turn).tobytes(), digest_size=4).hexdigest() + f"{num_equal or ''}"
        # Mistral's templates need ids of 9 letters and digits
        return [hashlib.blake2b(f"{name}/{i}".encode(), digest_size=5).hexdigest()[:9] for i in range(len(calls))]

    # Texts

    async def _answer_text(self, request: TextRequest) -> list[SampledAnswer]:
        text = request.prompt if isinstance(request.prompt, str) else ""
        tokenizer = self._renderer.tokenizer
        known = [(known_text, turn) for known_text, turn in self._texts if text.startswith(known_text)]
        if known:
            known_text, parent = max(known, key=lambda pair: len(pair[0]))
            rest = text[len(known_text) :]
            place = _Place(parent=parent, new_tokens=tokenizer.encode_rest(rest) if rest else ())
        else:
            tokens = tokenizer.encode(text) if text else [int(token) for token in request.prompt]
            parent, num_shared = self._deepest(tokens)
            place = _Place(parent=parent, new_tokens=tokens[num_shared:])
            if parent == ROOT:
                self.counts.branches["new_root"] += 1
        answers = await self._sample(place, request.options, stops=False)
        for index, answer in enumerate(answers):
            whole = tokenizer.decode(answer.token_ids.tolist())
            written = tokenizer.decode(answer.token_ids.tolist(), skip_special_tokens=True)
            # The next prompt may repeat this turn with the turn's end token (``whole``) or without it (``written``).
            self._texts += [(text + own, answer.turn) for own in {written, whole} if text and own]
            content, stop_text = _cut(written, request.options.stop)
            answers[index] = replace(answer, message={"role": "assistant", "content": content}, stop_text=stop_text)
        return answers

    # Turns

    async def _sample(self, place: _Place, options: SampleOptions, *, stops: bool) -> list[SampledAnswer]:
        """Sample ``options.n`` turns after ``place``. With ``stops``, the renderer's stop tokens also end a turn."""
        sampling = self._sampling_of(options, stops=stops)
        episode = self._sampler.episode
        if options.n > 1:  # one failed turn fails the whole request, so check first that all n turns fit
            episode.check_room(place.parent, place.new_tokens, sampling, images=place.images, num_turns=options.n)
        seed = sampling.seed
        samplings = [replace(sampling, seed=seed + i) if i and seed is not None else sampling for i in range(options.n)]
        sampled = await asyncio.gather(
            *(self._sampler.sample(place.parent, place.new_tokens, own, place.images) for own in samplings),
            return_exceptions=True,
        )
        failures = [turn for turn in sampled if isinstance(turn, BaseException)]
        if failures:
            raise failures[0]
        num_reused = episode.depth(place.parent)
        answers = []
        for turn in sampled:
            assert isinstance(turn, int)
            self._know(turn)
            own = episode.turn(turn)
            self._check_continues(own.parent, place)
            num_prompt_tokens = episode.depth(own.parent)
            self.counts.prompt_tokens += num_prompt_tokens
            self.counts.reused_tokens += num_reused
            answers.append(
                SampledAnswer(
                    turn=turn,
                    message={},
                    finish_reason="length" if own.finish_reason is FinishReason.length else "stop",
                    num_prompt_tokens=num_prompt_tokens,
                    num_reused_tokens=num_reused,
                    token_ids=own.token_ids,
                    logprobs=own.logprobs,
                    versions=own.versions,
                )
            )
        return answers

    def _check_continues(self, context: int, place: _Place) -> None:
        """Assert that a new sampled turn follows exactly the tokens of its request.

        ``context`` is the index of the turn's parent. The path to ``context`` must be the path to the turn
        ``place.parent``, followed by ``place.new_tokens``.
        """
        tokens, given = place.new_tokens, self._sampler.episode.turn(context)
        is_given = given.parent == place.parent and np.array_equal(given.token_ids, tokens)
        continues = is_given if len(tokens) else context == place.parent
        assert continues, f"turn {context} is not turn {place.parent} and the tokens of its request"

    def _sampling_of(self, options: SampleOptions, *, stops: bool) -> SamplingConfig:
        """Return the run's sampling options, changed by the options of a request.

        Some of the run's options are fixed. If a request changes a fixed option, a session with ``refuses`` raises
        `ValueError`. Any other session uses the run's value, and counts the difference. A ``max_tokens`` that is too
        large is lowered to the run's value.
        """
        if options.n < 1:
            raise ValueError(f"n must be >= 1, got {options.n}")
        run = {**NEUTRAL, **vars(self._sampling), "max_tokens": self._sampling.max_new_tokens}
        asked = {name: value for name, value in options.other.items() if value is not None}
        wrong = {name: value for name, value in asked.items() if value != run.get(name)}
        if options.max_tokens is not None and options.max_tokens > run["max_tokens"]:
            wrong["max_tokens"] = options.max_tokens
        for name, value in wrong.items():
            if self._refuses and name != "max_tokens":
                raise ValueError(
                    f"{name} must be {run.get(name)}, the run's value, got {value}: the learner assumes the run's "
                    "sampling; leave the option out, or set rollout_fleet.environment.sampling=override"
                )
            self.counts.overridden[name] += 1
            _warn_overridden(name, str(value), str(run.get(name)))
        most = run["max_tokens"] if options.max_tokens is None else min(options.max_tokens, run["max_tokens"])
        if most < 1:
            raise ValueError(f"max_tokens must be >= 1, got {options.max_tokens}")
        ends = (*self._sampling.stop_token_ids, *options.stop_token_ids, *(self._renderer.stop_ids if stops else ()))
        return replace(
            self._sampling,
            max_new_tokens=most,
            stop=(*self._sampling.stop, *options.stop),
            stop_token_ids=tuple(dict.fromkeys(ends)),
            json_schema=options.json_schema,
            seed=options.seed,
        )

    def _know(self, turn: int) -> None:
        while turn != ROOT:
            parent = self._sampler.episode.turn(turn).parent
            self._children.setdefault(parent, {})[turn] = None
            turn = parent

    def _deepest(self, tokens: Sequence[int], images: Sequence[PlacedImage] = ()) -> tuple[int, int]:
        """Return a pair: the turn whose path is the longest prefix of the tokens and images, and the path's length."""
        ids = np.asarray(tokens, dtype=np.int32)
        seen = {placed.offset: placed.image.digest for placed in images}
        best, open_paths = (ROOT, 0), [(ROOT, 0)]
        while open_paths:
            parent, depth = open_paths.pop()
            best = max(best, (parent, depth), key=lambda place: place[1])
            for child in self._children.get(parent, ()):
                turn = self._sampler.episode.turn(child)
                is_finished = not turn.sampled or turn.finish_reason is not None
                end = depth + len(turn.token_ids)
                has_images = all(seen.get(depth + own.offset) == own.image.digest for own in turn.images)
                if is_finished and has_images and np.array_equal(turn.token_ids, ids[depth:end]):
                    open_paths.append((child, end))
        return best


def _cut(text: str, stop: Sequence[str]) -> tuple[str, str]:
    """Cut ``text`` before the first stop text in it. ``stop`` lists the stop texts.

    Returns a pair: the part before the stop text, and the stop text. Without a stop text, returns (``text``, "").
    """
    found = ((before, own) for before, own, _ in map(text.partition, stop) if own)
    return min(found, key=lambda cut: len(cut[0]), default=(text, ""))


def _read_messages(messages: Sequence[Any], read_image: ReadImage | None) -> list[dict[str, Any]]:
    return [read_message(message, f"messages[{i}]", read_image) for i, message in enumerate(messages)]


def _digest(request: ChatRequest | TextRequest) -> str:
    kept = [value for name, value in vars(request).items() if name not in ("key", "is_retry")]
    try:
        content = orjson.dumps(kept, option=orjson.OPT_SORT_KEYS, default=repr)
    except orjson.JSONEncodeError as error:
        raise ValueError(f"the request must be JSON with at most 250 levels of objects and arrays: {error}") from error
    return hashlib.blake2b(content, digest_size=16).hexdigest()


@cache
def _warn_overridden(name: str, asked: str, used: str) -> None:
    logger.warning("an environment asks for %s=%s; its turns are sampled with the run's %s", name, asked, used)
