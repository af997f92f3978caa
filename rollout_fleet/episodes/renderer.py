"""Converts messages to tokens and back, with the model's chat template.

`load_renderer` chooses a renderer of the library ``renderers`` if this renderer makes the same tokens as the model's
chat template. Otherwise it chooses the template itself. Sampled text is never encoded again.
"""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from asyncrl.core.image_files import is_vision_model

from .chat_parsers import (
    JSON_TAGS,
    REASONING_BEGIN,
    REASONING_END,
    ToolCall,
    ToolCallParser,
    all_tool_parsers,
    make_tool_parser,
    split_calls,
    split_reasoning,
)
from .chat_tokenizer import PLAIN_ROLES, PLAIN_TEMPLATE, ChatTokenizer
from .config import RendererConfig
from .environment import read_json

AUTO = "auto"
TEMPLATE = "template"
_SENTINEL = "asyncrl sentinel"
_NAMED_TOOLS = ("gpt-oss",)  # these renderers need the field ``name`` in the messages of tools
# These renderers download a vocabulary. Use a renderer only if the model's tokenizer has the token in this table.
_DOWNLOADS = {"gpt-oss": "<|channel|>"}
logger = logging.getLogger(__name__)

Message = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class ParsedAnswer:
    """A sampled turn as a message.

    Attributes:
        content: Text after the reasoning, without tool calls. Malformed tool calls stay in the text.
        reasoning: Text of the reasoning; empty if there is none.
        calls: The tool calls, in order.
        num_malformed: Number of tool calls that could not be read.
    """

    content: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    num_malformed: int = 0


class ChatRenderer(ABC):
    """Renders conversations for one model.

    Attributes:
        name: Name in logs. Example: ``"qwen3"``; ``"template"`` for the model's chat template itself.
        tokenizer: The model's tokenizer.
        stop_ids: Tokens that end an assistant's turn.
        append_only: Result of `self_test`: for each kind of test conversation, by name, whether the tokens of the next
            turn can be appended while all earlier tokens stay the same.
        reads_calls: Whether `parse` reads tool calls in the form in which the template writes them (`self_test`). True
            if the template writes no calls.
    """

    def __init__(self, name: str, tokenizer: ChatTokenizer, stop_ids: Sequence[int]) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.stop_ids = tuple(dict.fromkeys(stop_ids))
        self.append_only: dict[str, bool] = {}
        self.reads_calls = True

    @abstractmethod
    def render(self, messages: Sequence[Message], tools: Sequence[Message]) -> list[int]:
        """Return the token ids of a conversation, including the tokens that begin the assistant's next message.

        ``tools`` are the JSON schemas of the tools, in OpenAI's form.

        Raises:
            ValueError: the template refuses the messages.
        """

    @abstractmethod
    def extend(
        self,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        history: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Sequence[Message],
    ) -> list[int] | None:
        """Return the token ids to append to a conversation for new messages, without encoding sampled text again.

        Args:
            prompt_ids: Tokens before the latest sampled answer.
            sampled_ids: Tokens of this answer. If they have no stop token, the result begins with the tokens that close
                the answer.
            history: The messages of ``prompt_ids`` and ``sampled_ids``. The final message is the answer itself.
            new_messages: The messages after the answer.
            tools: JSON schemas of the tools, in OpenAI's form.

        Returns:
            The token ids, including those that begin the assistant's next message. None if the template would render
            ``history`` differently with the new messages.
        """

    @abstractmethod
    def parse(self, prompt_ids: Sequence[int], sampled_ids: Sequence[int], tools: Sequence[Message]) -> ParsedAnswer:
        """Split a sampled answer into content, reasoning and tool calls.

        Text that cannot be parsed stays in the content. ``prompt_ids`` are the tokens before the answer, and ``tools``
        the JSON schemas of the tools.
        """

    @abstractmethod
    def close(self, history: Sequence[Message], answer: Message, tools: Sequence[Message]) -> list[int] | None:
        """Return the token ids of the message ``answer``, which follows ``history``, up to the answer's stop token.

        Returns None if the template renders ``history`` differently when ``answer`` follows.
        """

    def without_stop(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Return ``token_ids`` without a stop token at the end."""
        return token_ids[:-1] if len(token_ids) and token_ids[-1] in self.stop_ids else token_ids

    def self_test(self) -> dict[str, str]:
        """Render test conversations of several kinds, and set ``append_only`` and ``reads_calls``.

        Returns a dict from the name of each kind of conversation to its result. Each result begins with one of three
        words. ``continues``: the next turn only appends tokens. ``branches``: the template renders the history
        differently, so the session starts a new branch. ``refused``: the template does not accept the conversation.
        """
        verdicts: dict[str, str] = {}
        for kind, (messages, answer, new, tools) in _TEST_TURNS.items():
            try:
                prompt = self.render(messages, tools)
                sampled = self.close(messages, answer, tools)
                whole = self.render([*messages, answer, *new], tools)
                # This call also imports the parser's modules now, so that no episode waits for the imports.
                parsed = self.parse(prompt, sampled or (), tools)
            except ValueError as error:
                verdicts[kind] = f"refused: {error}"
                continue
            if "weather" in self.tokenizer.decode(sampled or ()) and not parsed.calls:  # "weather" is the test tool
                self.reads_calls = False
            suffix = None if sampled is None else self.extend(prompt, sampled, [*messages, answer], new, tools)
            verdicts[kind] = "branches" if suffix is None else "continues"
            if suffix is not None and [*prompt, *(sampled or ()), *suffix] != whole:
                verdicts[kind] = "continues, with other tokens than the template"
        self.append_only = {kind: verdict.startswith("continues") for kind, verdict in verdicts.items()}
        return verdicts


class LibraryRenderer(ChatRenderer):
    """Renders conversations with the renderer of one model family, from the library ``renderers``."""

    def __init__(self, name: str, tokenizer: ChatTokenizer, options: Mapping[str, Any]) -> None:
        from renderers import config_from_name, create_renderer

        config: Any = type(config_from_name(name))(**options)
        self._inner = create_renderer(tokenizer, config)
        super().__init__(name, tokenizer, self._inner.get_stop_token_ids())

    def render(self, messages: Sequence[Message], tools: Sequence[Message]) -> list[int]:
        """Return a conversation's token ids, up to the start of the next answer (`ChatRenderer.render`)."""
        return self._render(messages, tools, prompts=True)

    def extend(
        self,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        history: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Sequence[Message],
    ) -> list[int] | None:
        """Return the new messages' token ids; None if the messages change earlier tokens (`ChatRenderer.extend`)."""
        before = [*prompt_ids, *sampled_ids]
        new = self._prepared([*history, *new_messages])[len(history) :]
        bridged = self._inner.bridge_to_next_turn(list(prompt_ids), list(sampled_ids), new, tools=_tools(tools))
        if bridged is None or bridged.token_ids[: len(before)] != before:
            return None
        return list(bridged.token_ids[len(before) :])

    def parse(self, prompt_ids: Sequence[int], sampled_ids: Sequence[int], tools: Sequence[Message]) -> ParsedAnswer:
        """Split a sampled answer into content, reasoning and tool calls (`ChatRenderer.parse`)."""
        try:
            answer = self._inner.parse_response(list(sampled_ids), tools=_tools(tools), prompt_ids=list(prompt_ids))
        except (RecursionError, ValueError):  # the policy's JSON is nested too deeply, or a number is too long
            return ParsedAnswer(content=self.tokenizer.decode(self.without_stop(sampled_ids)), num_malformed=1)
        calls, malformed = split_calls(answer.tool_calls)
        return ParsedAnswer(
            content="\n".join(filter(None, [answer.content, *malformed])),
            reasoning=answer.reasoning_content or "",
            calls=tuple(calls),
            num_malformed=len(malformed),
        )

    def close(self, history: Sequence[Message], answer: Message, tools: Sequence[Message]) -> list[int] | None:
        """Return the token ids of a message after the history, up to its stop token (`ChatRenderer.close`)."""
        before = self.render(history, tools)
        after = self._render([*history, answer], tools, prompts=False)
        if after[: len(before)] != before:
            return None
        sampled = after[len(before) :]
        ends = [place for place, token in enumerate(sampled) if token in self.stop_ids]
        return sampled[: ends[-1] + 1] if ends else sampled

    def _render(self, messages: Sequence[Message], tools: Sequence[Message], *, prompts: bool) -> list[int]:
        try:
            return list(
                self._inner.render_ids(self._prepared(messages), tools=_tools(tools), add_generation_prompt=prompts)
            )
        except Exception as error:  # renderers raise exceptions of any class
            raise ValueError(f"the renderer {self.name} refuses these messages: {error}") from error

    def _prepared(self, messages: Sequence[Message]) -> list[Any]:
        return _prepared(messages, names=self.name in _NAMED_TOOLS)


class _PromptTexts:
    """Maps the tokens of the newest prompts to the prompts' texts, up to ``most_letters`` letters in total."""

    def __init__(self, most_letters: int = 1 << 25) -> None:
        self._most_letters = most_letters
        self._num_letters = 0
        self._texts: dict[int, str] = {}

    def of(self, token_ids: Sequence[int]) -> str:
        """Return the text of the prompt with these tokens; an empty text if none is stored.

        The text is found by a hash of the tokens. Two prompts may have the same hash, so the caller must compare the
        text with the rendered conversation.
        """
        return self._texts.get(hash(tuple(token_ids)), "")

    def keep(self, token_ids: Sequence[int], text: str) -> None:
        if not text:
            return
        key = hash(tuple(token_ids))
        self._num_letters += len(text) - len(self._texts.pop(key, ""))
        self._texts[key] = text
        while self._num_letters > self._most_letters:
            self._num_letters -= len(self._texts.pop(next(iter(self._texts))))


class TemplateRenderer(ChatRenderer):
    """Renders with the model's chat template.

    `extend` needs the text that the template writes for the new messages. There are two methods:

    - Render the whole conversation with the new messages. If the result begins with the text of the earlier turns, the
      rest is the text of the new messages.
    - Render a short stand-in conversation without and with the new messages. The difference is the new messages' text.

    With ``keeps_reasoning``, `extend` uses only the second method. Otherwise it uses the second method if the first
    method fails, and checks that the template also appends this text to the whole conversation.

    Args:
        tokenizer: The model's tokenizer.
        tool_parser: Name of the parser of tool calls. Empty: `self_test` finds one.
        keeps_reasoning: Whether `extend` never renders the whole conversation. Then sampled reasoning stays in the
            context even if the template drops it.
        options: Arguments of the template.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        *,
        tool_parser: str = "",
        keeps_reasoning: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._options = dict(options or {})
        self._keeps_reasoning = keeps_reasoning
        self._texts = _PromptTexts()
        self._tail = ""
        super().__init__(TEMPLATE if tokenizer.chat_template else "plain", tokenizer, ())
        self._joins_arguments = not self._accepts(_CALLED) and self._accepts(_with_text_arguments(_CALLED))
        self._tail = self._find_tail()
        self._close = self._text([_USER, _assistant(_SENTINEL)], (), prompts=False).rpartition(_SENTINEL)[2]
        self._stop_texts = self._find_stop_texts()
        known = [tokenizer.convert_tokens_to_ids(text) for text in self._stop_texts]
        eos = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        self.stop_ids = tuple(dict.fromkeys([*known, *eos, *tokenizer.end_ids]))
        self._tool_parser = make_tool_parser(tool_parser, tokenizer) if tool_parser else None

    def render(self, messages: Sequence[Message], tools: Sequence[Message]) -> list[int]:
        """Return a conversation's token ids, up to the start of the next answer (`ChatRenderer.render`)."""
        text = self._text(messages, tools, prompts=True)
        ids = self.tokenizer.encode(text)
        self._texts.keep(ids, text)
        return ids

    def extend(
        self,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        history: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Sequence[Message],
    ) -> list[int] | None:
        """Return the token ids to append for ``new_messages`` (`ChatRenderer.extend`).

        Returns None if the template renders ``history`` differently when ``new_messages`` follow.
        """
        messages, num_old = _prepared([*history, *new_messages]), len(history)
        whole = "" if self._keeps_reasoning else self._prepared_text(messages, tools, prompts=True)
        reasoning = (str(message.get("reasoning_content") or "").strip() for message in history)
        if whole and not all(text in whole for text in reasoning):
            return None
        prompt = self._texts.of(prompt_ids) if whole else ""
        path = prompt + self.tokenizer.decode(self.without_stop(sampled_ids)) + self._close if prompt else ""
        if path and whole.startswith(path):  # the new messages have not changed the text of the earlier tokens
            added = whole[len(path) :]
        else:
            added = self._short_difference(messages[num_old - 1], messages[num_old:])
            if added is None:
                return None
            if whole:
                # If the text of the prompt is known, do not render the old messages again.
                if prompt and whole.startswith(prompt) and whole.endswith(added, len(prompt)):
                    old = whole.removesuffix(added)
                else:
                    old = self._prepared_text(messages[:num_old], tools, prompts=False)
                num_ends = self._num_reasoning_ends([*prompt_ids, *sampled_ids])
                if whole != old + added or num_ends != old.count(REASONING_END):
                    return None
        text = self._after_stop(sampled_ids, self._close + added)
        if text is None:
            return None
        suffix = self._encode_after_stop(text)
        self._texts.keep([*prompt_ids, *sampled_ids, *suffix], whole)
        return suffix

    def _short_difference(self, answer: Message, new_messages: Sequence[Message]) -> str | None:
        """Return the text that the template writes for ``new_messages`` after a short conversation.

        The short conversation has two messages: a fixed user message, and ``answer`` with a placeholder as its text.
        Returns None if the new messages change the text before them.
        """
        short = {**answer, "content": _SENTINEL}
        short.pop("reasoning_content", None)
        before = self._prepared_text([_USER, short], (), prompts=False)
        after = self._prepared_text([_USER, short, *new_messages], (), prompts=True)
        return after[len(before) :] if after.startswith(before) else None

    def parse(self, prompt_ids: Sequence[int], sampled_ids: Sequence[int], tools: Sequence[Message]) -> ParsedAnswer:
        """Split a sampled answer into content, reasoning and tool calls (`ChatRenderer.parse`)."""
        ids = self.without_stop(sampled_ids)
        reasoning, rest = split_reasoning(self.tokenizer, prompt_ids, ids)
        calls: list[ToolCall] = []
        malformed: list[str] = []
        if self._tool_parser is None:
            content = self.tokenizer.decode(rest)
        else:
            try:
                content, calls, malformed = self._tool_parser.split(rest, tools)
            except (RecursionError, ValueError):  # the policy's JSON is nested too deeply, or a number is too long
                content, malformed = "", [self.tokenizer.decode(rest)]
        for token in self.tokenizer.all_special_tokens:
            content = content.replace(token, "")
        return ParsedAnswer(
            content="\n".join(filter(None, [content, *malformed])),
            reasoning=reasoning,
            calls=tuple(calls),
            num_malformed=len(malformed),
        )

    def close(self, history: Sequence[Message], answer: Message, tools: Sequence[Message]) -> list[int] | None:
        """Return the token ids of a message after the history, up to its stop token (`ChatRenderer.close`)."""
        before = self._text(history, tools, prompts=True)
        after = self._text([*history, answer], tools, prompts=False)
        opened = before.rstrip().removesuffix(REASONING_BEGIN)
        if after.startswith(before):
            sampled = after[len(before) :]
        elif opened != before.rstrip() and after.startswith(opened):
            # the template ends a prompt with <think>, but leaves out the reasoning of a finished answer
            sampled = f"{answer.get('reasoning_content', '')}{REASONING_END}{after[len(opened) :]}"
        else:
            return None
        ends = [sampled.rfind(text) + len(text) for text in self._stop_texts if text in sampled]
        return self.tokenizer.encode(sampled[: max(ends)] if ends else sampled)

    def _accepts(self, answer: Message) -> bool:
        try:
            self.tokenizer.render([_USER, answer], tools=[_WEATHER], **self._options)
        except ValueError:
            return False
        return True

    def _text(self, messages: Sequence[Message], tools: Sequence[Message], *, prompts: bool) -> str:
        return self._prepared_text(_prepared(messages), tools, prompts=prompts)

    def _prepared_text(self, messages: Sequence[Message], tools: Sequence[Message], *, prompts: bool) -> str:
        if self._joins_arguments:
            messages = [_with_text_arguments(message) for message in messages]
        text = self.tokenizer.render(messages, tools=_tools(tools), add_generation_prompt=prompts, **self._options)
        return text if prompts else text.removesuffix(self._tail)

    def self_test(self) -> dict[str, str]:
        """Find the parser of tool calls if none is named, then run `ChatRenderer.self_test`."""
        self._tool_parser = self._tool_parser or self._find_tool_parser()
        return super().self_test()

    def _find_tool_parser(self) -> ToolCallParser | None:
        """Return the first parser that reads tool calls in the form of the template.

        If no parser reads them, and the model knows the tag ``<tool_call>``, returns the parser of JSON in these tags.
        Otherwise returns None.
        """
        called = _CALLED["tool_calls"][0]["function"]
        try:
            sampled = self.without_stop(self.close([_USER], _CALLED, [_WEATHER]) or ())
        except ValueError:
            sampled = ()
        for parser in all_tool_parsers(self.tokenizer) if called["name"] in self.tokenizer.decode(sampled) else ():
            with suppress(Exception):  # parsers for other models raise exceptions of any class
                _, calls, _ = parser.split(sampled, [_WEATHER])
                if [(call.name, call.arguments) for call in calls] == [(called["name"], called["arguments"])]:
                    logger.info("tool calls are read by %s", parser)
                    return parser
        source = self.tokenizer.chat_template or PLAIN_TEMPLATE
        single = self.tokenizer.convert_tokens_to_ids("<tool_call>") not in (None, self.tokenizer.unk_token_id)
        return make_tool_parser(JSON_TAGS, self.tokenizer) if "<tool_call>" in source or single else None

    def _find_tail(self) -> str:
        """Return the end-of-sequence token if the template writes it only once, at the end of a conversation.

        Phi's templates do so. For other templates, the result is an empty text.
        """
        eos = self.tokenizer.special_tokens.get("eos_token", "")
        whole = self._text([_USER, _assistant(_SENTINEL)], (), prompts=False)
        begun = whole.removesuffix(eos)
        try:
            after = self._text([_USER, _assistant(_SENTINEL), _USER], (), prompts=True)
        except ValueError:
            return ""
        is_tail = after.startswith(begun) and not after.startswith(whole) and not begun.endswith(_SENTINEL)
        return eos if is_tail else ""

    def _find_stop_texts(self) -> list[str]:
        """Return the special tokens that close an assistant's message.

        Some templates (GLM) write no closing token. With these templates, the first token of the next message closes
        the message.
        """
        special = self.tokenizer.all_special_tokens
        found = [text for text in special if text in self._close]
        if found:
            return found
        begun = self._text([_USER, _assistant(_SENTINEL)], (), prompts=False)
        for new in (_USER, _RESULT):
            try:
                after = self._text([_USER, _assistant(_SENTINEL), new], (), prompts=True)
            except ValueError:
                continue
            if after.startswith(begun):
                found += [text for text in special if after[len(begun) :].startswith(text)]
        return found

    def _after_stop(self, sampled_ids: Sequence[int], text: str) -> str | None:
        """Return the part of ``text`` to append to an answer with the tokens ``sampled_ids``.

        ``text`` is what the template writes after the answer's content. If the answer ends with a stop token, the
        result is the part of ``text`` after this stop token, otherwise the whole ``text``. Returns None if ``text``
        begins with a different stop token.
        """
        if not len(sampled_ids) or sampled_ids[-1] not in self.stop_ids:
            return text
        sampled = self.tokenizer.decode([int(sampled_ids[-1])])
        for stop in (sampled, *self._stop_texts):
            if stop in self._close:
                return text[text.index(stop) + len(stop) :]
        if text.startswith(sampled):
            return text[len(sampled) :]
        return None if any(text.startswith(stop) for stop in self._stop_texts) else text

    def _num_reasoning_ends(self, path: list[int]) -> int:
        token = self.tokenizer.convert_tokens_to_ids(REASONING_END)
        if token not in (None, self.tokenizer.unk_token_id):
            return path.count(token)
        return self.tokenizer.decode(path).count(REASONING_END)

    def _encode_after_stop(self, text: str) -> list[int]:
        """Encode a text that follows a stop token, without the space that some tokenizers add at a text's start."""
        if self.stop_ids:
            ids = self.tokenizer.encode(self.tokenizer.decode([self.stop_ids[0]]) + text)
            if ids[0] == self.stop_ids[0]:
                return ids[1:]
        return self.tokenizer.encode(text)


def load_renderer(model_path: str, config: RendererConfig) -> ChatRenderer:
    """Choose how a model's chat messages become tokens, run the renderer's self-test, and return the renderer.

    The results of the self-test are logged.

    Raises:
        ValueError: the named renderer does not exist or does not fit the tokenizer. Or the model has neither a chat
            template nor tokens for role markers such as ``<|user|>``.
    """
    tokenizer = ChatTokenizer(model_path)
    renderer = _choose(tokenizer, config, is_vision=is_vision_model(model_path))
    verdicts = renderer.self_test()
    source = "" if tokenizer.chat_template else "; the model has no chat template, so the plain one is used"
    logger.info("%s: renderer %s%s", model_path, renderer.name, source)
    odd = [f"{kind}: {verdict}" for kind, verdict in verdicts.items() if verdict != "continues"]
    if odd:
        logger.warning("renderer %s does not append the tokens of each next turn. %s", renderer.name, "; ".join(odd))
    if not renderer.reads_calls:
        logger.warning(
            "renderer %s does not read tool calls in the form in which the chat template of %s writes them, so calls "
            "stay text; set rollout_fleet.environment.renderer.tool_parser to the parser of the model's family",
            renderer.name,
            model_path,
        )
    return renderer


def _choose(tokenizer: ChatTokenizer, config: RendererConfig, *, is_vision: bool) -> ChatRenderer:
    """Choose the renderer that fits the model and the options.

    A model with images gets a `TemplateRenderer`, because its template writes one placeholder per image. The session
    then repeats each placeholder until the image has its number of tokens.
    """
    if not tokenizer.chat_template:
        _check_markers(tokenizer)
    own = TemplateRenderer(
        tokenizer, tool_parser=config.tool_parser, keeps_reasoning=config.keep_reasoning, options=config.options
    )
    if (
        is_vision
        or config.name == TEMPLATE
        or not tokenizer.chat_template
        or (config.name == AUTO and config.tool_parser)
    ):
        return own
    from renderers.base import MODEL_RENDERER_MAP

    names = list(dict.fromkeys(MODEL_RENDERER_MAP.values()))
    options = {**config.options, **({"thinking_retention": "all"} if config.keep_reasoning else {})}
    if config.name != AUTO:
        if config.name not in names:
            raise ValueError(
                f"rollout_fleet.environment.renderer.name must be {AUTO}, {TEMPLATE} or one of "
                f"{', '.join(sorted(names))}, got {config.name!r}"
            )
        try:
            return LibraryRenderer(config.name, tokenizer, options)
        except Exception as error:
            raise ValueError(
                f"rollout_fleet.environment.renderer.name={config.name} does not fit {tokenizer.name_or_path}: "
                f"{error!r}; use {AUTO} or {TEMPLATE}, which follow the model's chat template"
            ) from error
    first = MODEL_RENDERER_MAP.get(tokenizer.name_or_path)
    for name in sorted(names, key=lambda name: name != first):
        marker = _DOWNLOADS.get(name)
        if marker and tokenizer.convert_tokens_to_ids(marker) in (None, tokenizer.unk_token_id):
            continue
        try:
            renderer = LibraryRenderer(name, tokenizer, options)
        except Exception as error:  # noqa: BLE001 - renderers for other models raise exceptions of any class
            level = logging.WARNING if marker else logging.DEBUG
            logger.log(level, "renderer %s cannot be used: %r", name, error)
            continue
        if _renders_like(renderer, own):
            return renderer
    return own


def _check_markers(tokenizer: ChatTokenizer) -> None:
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"{tokenizer.name_or_path} has neither a chat template nor an eos_token; add a chat_template to its "
            "tokenizer_config.json"
        )
    for role in PLAIN_ROLES:
        if tokenizer.unk_token_id in tokenizer.encode(f"<|{role}|>"):
            raise ValueError(
                f"{tokenizer.name_or_path} has no chat template, and its tokenizer has no tokens for <|{role}|> of the "
                "plain template; add a chat_template to its tokenizer_config.json, or add the markers to its tokens"
            )


def _renders_like(renderer: ChatRenderer, own: ChatRenderer) -> bool:
    num_equal = 0
    for messages, answer, new, tools in _TEST_TURNS.values():
        for conversation in (messages, [*messages, answer, *new]):
            try:
                expected = own.render(conversation, tools)
            except ValueError:
                continue
            try:
                if renderer.render(conversation, tools) != expected:
                    return False
            except ValueError:
                continue  # a conversation that the renderer refuses is not a difference
            num_equal += 1
    return num_equal >= len(_TEST_TURNS)


def _tools(tools: Sequence[Message]) -> list[Any] | None:
    return [dict(tool) for tool in tools] or None


def _prepared(messages: Sequence[Message], *, names: bool = False) -> list[dict[str, Any]]:
    prepared: list[dict[str, Any]] = []
    called: dict[str, str] = {}
    for message in messages:
        own = {key: value for key, value in message.items() if value is not None}
        own["content"] = own.get("content") or ""
        if not own.get("reasoning_content"):
            own.pop("reasoning_content", None)
        if calls := own.pop("tool_calls", None):
            own["tool_calls"] = [_prepared_call(call) for call in calls]
            called |= {str(call.get("id")): call["function"]["name"] for call in calls}
        if names and own["role"] == "tool" and "name" not in own:
            own["name"] = called.get(str(own.get("tool_call_id")), "")
        prepared.append(own)
    return prepared


def _prepared_call(call: Message) -> dict[str, Any]:
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = read_json(function["arguments"] or "{}")
        except ValueError:
            logger.debug("arguments of a call of %s stay text", function.get("name"))
    return {**call, "function": function}


def _with_text_arguments(message: Message) -> dict[str, Any]:
    """Return a message with the arguments of its tool calls as JSON texts, for templates that concatenate them."""
    calls = []
    for call in message.get("tool_calls", ()):
        arguments = call["function"].get("arguments")
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls} if calls else dict(message)


def _assistant(content: str, reasoning: str = "", *calls: Message) -> dict[str, Any]:
    thought = {"reasoning_content": reasoning} if reasoning else {}
    called = {"tool_calls": list(calls)} if calls else {}
    return {"role": "assistant", "content": content, **thought, **called}


def _call(number: int, arguments: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": "weather", "arguments": dict(arguments)}
    return {"id": f"callcall{number}", "type": "function", "function": function}


_USER = {"role": "user", "content": "How warm is it?"}
_SYSTEM = {"role": "system", "content": "Be brief."}
_RESULT = {"role": "tool", "content": "21 degrees", "tool_call_id": "callcall0"}
_SECOND = {"role": "tool", "content": "7 degrees", "tool_call_id": "callcall1"}
_WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Its name"}},
            "required": ["city"],
        },
    },
}
_CALLED = _assistant("", "", _call(0, {"city": "Rome"}))
_THOUGHT_AND_CALLED = _assistant("", "The user means Rome.", _call(0, {"city": "Rome"}))
_TEST_TURNS: dict[str, tuple[list[Message], Message, list[Message], list[Message]]] = {
    "a message after an answer": ([_USER], _assistant("21 degrees."), [_USER], []),
    "a message after a system message and an answer": ([_SYSTEM, _USER], _assistant("Warm."), [_USER], []),
    "a message after an answer with reasoning": ([_USER], _assistant("Warm.", "It is summer."), [_USER], []),
    "a tool's result": ([_USER], _CALLED, [_RESULT], [_WEATHER]),
    "a tool's result after reasoning": ([_SYSTEM, _USER], _THOUGHT_AND_CALLED, [_RESULT], [_WEATHER]),
    "results of two parallel calls": (
        [_USER],
        _assistant("", "", _call(0, {"city": "Rome"}), _call(1, {"city": "Oslo"})),
        [_RESULT, _SECOND],
        [_WEATHER],
    ),
    "a message after tools": ([_USER, _CALLED, _RESULT], _assistant("21 degrees."), [_USER], [_WEATHER]),
    "a message after tools and reasoning": (
        [_USER, _THOUGHT_AND_CALLED, _RESULT],
        _assistant("21 degrees.", "The tool says so."),
        [_USER],
        [_WEATHER],
    ),
}
"""Conversations for tests of renderers, by kind: messages, an answer, the messages after the answer, and the tools."""
