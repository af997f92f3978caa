"""Parses sampled tokens into an assistant message, for `TemplateRenderer`."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol

from .chat_tokenizer import ChatTokenizer
from .environment import is_usable, read_json

JSON_TAGS = "json"
SGLANG = "sglang:"
REASONING_BEGIN, REASONING_END = "<think>", "</think>"
# Search for `<think>` in this number of tokens at the end of the prompt.
PROMPT_END = 16
_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
_MISTRAL_ID = re.compile(r"[A-Za-z0-9]{9}")


class ToolCall(NamedTuple):
    """A tool call that was read from an answer.

    Attributes:
        name: Name of the tool.
        arguments: An object, or the JSON text of an object.
        id: The id that the policy wrote; empty if it wrote none. Policies of Kimi K2 and Mistral write ids.
    """

    name: str
    arguments: Any
    id: str = ""


class ToolCallParser(Protocol):
    """Reads the tool calls of an answer."""

    def split(
        self, token_ids: Sequence[int], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[str, list[ToolCall], list[str]]:
        """Split a sampled answer into text and tool calls.

        Returns three values: the text outside the calls, the calls, and the texts of calls that cannot be read.
        ``tools`` are the JSON schemas of the tools that the policy may call.
        """
        ...


class JsonTagParser:
    """Reads calls of the form ``<tool_call>{"name": …, "arguments": …}</tool_call>`` from the text."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer

    def split(
        self, token_ids: Sequence[int], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[str, list[ToolCall], list[str]]:
        """Split an answer into text and the calls in ``<tool_call>`` tags (`ToolCallParser.split`)."""
        text = self._tokenizer.decode(token_ids)
        calls: list[ToolCall] = []
        malformed: list[str] = []
        for match in _CALL.finditer(text):
            try:
                call = read_json(match[1])
                calls.append(ToolCall(str(call["name"]), _checked(call.get("arguments") or {})))
            except (ValueError, KeyError, TypeError, AttributeError):
                malformed.append(match[0])
        before, tag, after = text.partition("<tool_call>")
        return before + _CALL.sub("", tag + after).strip(), calls, malformed


class LibraryParser:
    """Reads tool calls with a parser of the library ``renderers``."""

    def __init__(self, name: str, tokenizer: ChatTokenizer) -> None:
        from renderers.parsers import get_tool_parser

        self._parser = get_tool_parser(name, tokenizer)
        self._tokenizer = tokenizer

    def split(
        self, token_ids: Sequence[int], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[str, list[ToolCall], list[str]]:
        """Split an answer into text and tool calls with the library's parser (`ToolCallParser.split`)."""
        content_ids, calls = self._parser.extract(list(token_ids))
        good, malformed = split_calls(calls)
        return self._tokenizer.decode(content_ids), good, malformed


def split_calls(calls: Sequence[Any]) -> tuple[list[ToolCall], list[str]]:
    """Return a pair: the usable calls of ``calls``, and the texts of the malformed calls.

    ``calls`` are tool calls that the library ``renderers`` has parsed. If an argument of an XML call is
    plain text such as ``Rome``, the library gives the call the status ``invalid_json``. Such a call is usable, and the
    argument stays text.
    """
    good: list[ToolCall] = []
    malformed: list[str] = []
    for call in calls:
        is_read = call.status == "ok" or (call.status == "invalid_json" and isinstance(call.arguments, dict))
        arguments = call.arguments or {}
        is_named = isinstance(call.name, str) and call.name != ""
        if is_read and is_named and is_usable(arguments) and _is_object(arguments):
            good.append(ToolCall(call.name, arguments, call.id or ""))
        else:
            malformed.append(call.raw)
    return good, malformed


def _is_object(arguments: Any) -> bool:
    """Return whether a call's arguments are an object, or the JSON text of an object, as clients require."""
    try:
        return isinstance(read_json(arguments) if isinstance(arguments, str) else arguments, Mapping)
    except ValueError:
        return False


def _checked(arguments: Any) -> Any:
    if not _is_object(arguments):
        raise ValueError(f"arguments of a call must be an object, got {arguments!r}")
    return arguments


class SGLangParser:
    """Reads tool calls with the parser ``name`` of SGLang. The import of SGLang takes seconds and loads torch."""

    def __init__(self, name: str, tokenizer: ChatTokenizer) -> None:
        from sglang.srt.function_call.function_call_parser import FunctionCallParser

        known = FunctionCallParser.ToolCallParserEnum
        if name not in known:
            raise ValueError(f"SGLang has no tool parser {name!r}; it has {', '.join(sorted(known))}")
        self._name, self._parser, self._tokenizer = name, FunctionCallParser, tokenizer

    def split(
        self, token_ids: Sequence[int], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[str, list[ToolCall], list[str]]:
        """Split an answer into text and tool calls with a parser of SGLang (`ToolCallParser.split`).

        SGLang drops malformed calls, and reads only calls of the given ``tools``.
        """
        from sglang.srt.entrypoints.openai.protocol import Tool

        text = self._tokenizer.decode(token_ids)
        parser = self._parser([Tool.model_validate(tool) for tool in tools], self._name)
        if not tools or not parser.has_tool_call(text):
            return text, [], []
        content, calls = parser.parse_non_stream(text)
        good: list[ToolCall] = []
        malformed: list[str] = []
        ids = _mistral_ids(text) if self._name == "mistral" else []
        for place, call in enumerate(calls):
            try:
                own_id = ids[place] if len(ids) == len(calls) else ""
                good += [ToolCall(call.name, _checked(read_json(call.parameters) or {}), own_id)] if call.name else []
            except ValueError:
                malformed.append(call.parameters)
        return content, good, malformed


def _mistral_ids(text: str) -> list[str]:
    """Return the ids of the calls in ``[TOOL_CALLS] [{"name": …, "arguments": …, "id": …}]``.

    The parser of SGLang drops these ids. An id that Mistral's templates would refuse becomes an empty text.
    """
    with suppress(ValueError):
        calls, _ = json.JSONDecoder().raw_decode(text.partition("[TOOL_CALLS]")[2].lstrip())
        ids = [call.get("id") if isinstance(call, Mapping) else "" for call in calls] if isinstance(calls, list) else []
        return [own if isinstance(own, str) and _MISTRAL_ID.fullmatch(own) else "" for own in ids]
    return []


def make_tool_parser(name: str, tokenizer: ChatTokenizer) -> ToolCallParser:
    """Return the parser of tool calls with this name, for a model's tokenizer.

    The name is ``json`` (`JSON_TAGS`), ``sglang:NAME`` for a parser of SGLang, or the name of a parser of the library
    ``renderers``.

    Raises:
        ValueError: the parser does not exist.
    """
    if name == JSON_TAGS:
        return JsonTagParser(tokenizer)
    if name.startswith(SGLANG):
        return SGLangParser(name.removeprefix(SGLANG), tokenizer)
    from renderers.parsers import TOOL_PARSERS

    if name not in TOOL_PARSERS:
        known = [JSON_TAGS, *sorted(TOOL_PARSERS), SGLANG + "NAME"]
        raise ValueError(
            f"rollout_fleet.environment.renderer.tool_parser must be one of {', '.join(known)}, got {name!r}"
        )
    return LibraryParser(name, tokenizer)


def all_tool_parsers(tokenizer: ChatTokenizer) -> Iterator[ToolCallParser]:
    """Yield the tool parsers that fit a model's tokenizer. If SGLang is installed, its parsers come last."""
    from renderers.parsers import TOOL_PARSERS

    for name in (JSON_TAGS, *sorted(TOOL_PARSERS)):
        with suppress(Exception):  # some parsers need tokens that this tokenizer does not have
            yield make_tool_parser(name, tokenizer)
    if find_spec("sglang") is not None:
        from sglang.srt.function_call.function_call_parser import FunctionCallParser

        for name in sorted(FunctionCallParser.ToolCallParserEnum):
            yield SGLangParser(name, tokenizer)


def split_reasoning(
    tokenizer: ChatTokenizer, prompt_ids: Sequence[int], token_ids: Sequence[int]
) -> tuple[str, Sequence[int]]:
    """Split a sampled answer at ``</think>``. Returns a pair: the text of the reasoning, and the token ids after it.

    ``token_ids`` is the answer without its stop token. If the tag ``<think>`` is neither in the answer nor at the end
    of the prompt, the reasoning is empty.
    """
    from renderers.reasoning import scan_reasoning

    ids = list(token_ids)
    is_begun = tokenizer.decode(list(prompt_ids[-PROMPT_END:])).rstrip().endswith(REASONING_BEGIN)
    if not is_begun and REASONING_BEGIN not in tokenizer.decode(ids):  # decoding is faster than the library's search
        return "", ids
    boundary = scan_reasoning(tokenizer, ids, prefilled=is_begun)
    if boundary.text is None:
        return "", ids
    if boundary.is_open:
        return boundary.text, []
    end = bisect_left(range(len(ids)), True, key=lambda n: REASONING_END in tokenizer.decode(ids[: n + 1]))
    return boundary.text, ids[end + 1 :]
