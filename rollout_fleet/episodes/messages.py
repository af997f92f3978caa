"""Chat messages: converts a client's messages to the form that templates need, and compares messages.

Client libraries change the form of messages. So messages are treated as equal if they differ only in:

- ids of tool calls and the formatting of JSON arguments,
- white space around an assistant's content,
- the form of a content: a text, text parts or None,
- the field ``name`` and unknown fields, or
- reasoning that the client left out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

import orjson

from asyncrl.core.image_files import is_image

from .environment import read_json

Message = Mapping[str, Any]
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


ReadImage = Callable[[Mapping[str, Any], str], str]
"""Reads the image in one part of a message, and returns the image's digest. The string names the part in errors."""


def read_message(message: Any, where: str, read_image: ReadImage | None = None) -> dict[str, Any]:
    """Check a client's chat message, and return it with only the fields that chat templates support.

    The content is text. With images it is a list of parts ``{"type": "text", "text": …}`` and ``{"type": "image",
    "digest": …}``. Only messages of the user and of tools may have images.

    Raises:
        ValueError: the role is unknown, or a part or a field is not supported. ``where`` names the message in the
            error.
    """
    role = _ROLES.get(str(message.get("role"))) if isinstance(message, Mapping) else None
    if role is None:
        got = message.get("role") if isinstance(message, Mapping) else message
        raise ValueError(f"{where}.role must be one of {', '.join(_ROLES)}, got {got!r}")
    if message.get("function_call"):
        raise ValueError(f"{where}.function_call is not supported; use tool_calls")
    content = message.get("content")
    if isinstance(content, list) and any(map(is_image, content)):
        read: dict[str, Any] = {"role": role, "content": _read_parts(content, role, f"{where}.content", read_image)}
    else:
        read = {"role": role, "content": read_content(content, f"{where}.content")}
    if isinstance(name := message.get("name"), str) and name:
        read["name"] = name
    if role == "tool":
        read["tool_call_id"] = str(message.get("tool_call_id") or "")
    if role == "assistant":
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if isinstance(reasoning, str) and reasoning:
            read["reasoning_content"] = reasoning
        if calls := message.get("tool_calls"):
            if not isinstance(calls, list):
                raise ValueError(f"{where}.tool_calls must be a list, got {type(calls).__name__}")
            read["tool_calls"] = [_read_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return read


def images_in(message: Message) -> list[str]:
    """Return the digests of the images in a message, in order. The message must come from `read_message`."""
    content = message["content"]
    return [part["digest"] for part in content if part["type"] == "image"] if isinstance(content, list) else []


def _read_parts(content: Sequence[Any], role: str, where: str, read_image: ReadImage | None) -> list[dict[str, Any]]:
    if read_image is None:
        raise ValueError(f"{where} has an image, but the policy has no vision tower that asyncrl supports; send text")
    if role not in ("user", "tool"):
        raise ValueError(f"{where} has an image in a message of role {role}; send it in a message of role user or tool")
    return [
        {"type": "image", "digest": read_image(part, f"{where}[{place}]")}
        if is_image(part)
        else {"type": "text", "text": read_content([part], f"{where}[{place}]")}
        for place, part in enumerate(content)
    ]


def read_content(content: Any, where: str) -> str:
    """Return the content of a message as one text: a string, the joined parts of a list, or "" for None.

    Raises `ValueError` for other contents. ``where`` names the content in the error.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise ValueError(f"{where} must be a string or a list of parts, got {type(content).__name__}")
    texts = []
    for place, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in _TEXT_PARTS:
            raise ValueError(f"{where}[{place}].type must be one of {', '.join(_TEXT_PARTS)}, got {kind!r}")
        texts.append(str(part.get("refusal" if kind == "refusal" else "text") or ""))
    return "".join(texts)


def text_or_parts(content: Any, where: str) -> Any:
    """Return the content of a message as one text, or unchanged if it is a list with images.

    Raises `ValueError` for other contents. ``where`` names the content in the error.
    """
    has_images = isinstance(content, list) and any(map(is_image, content))
    return content if has_images else read_content(content, where)


def _read_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"{where}.function.name must be a string, got {function!r}")
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments or {}, ensure_ascii=False)
    return {
        "id": str(call.get("id") or ""),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def canonical(message: Message, call_places: Mapping[str, int]) -> bytes:
    """Return JSON bytes that are the same for two messages if the messages are treated as equal.

    The bytes leave out reasoning. ``call_places`` maps the id of each earlier tool call to its position among the tool
    calls of the conversation. In a tool's message, this position replaces the id.
    """
    content = message["content"]
    form: list[Any] = [message["role"], content.strip() if message["role"] == "assistant" else content]
    if message["role"] == "tool":
        form.append(call_places.get(message["tool_call_id"], -1))
    for call in message.get("tool_calls", ()):
        function = call["function"]
        try:
            arguments = read_json(function["arguments"] or "{}")
        except ValueError:
            arguments = function["arguments"].strip()
        form += [function["name"], arguments]
    with suppress(TypeError):  # use `json` below for invalid Unicode, which orjson refuses
        if "tool_calls" not in message:
            return orjson.dumps(form)
    return json.dumps(form, sort_keys=True).encode()  # unlike orjson, `json` keeps large integers and NaN


def follow(digest: bytes, message: Message, call_places: Mapping[str, int]) -> bytes:
    """Return the digest of a conversation that ends with ``message``. ``digest`` covers the earlier messages.

    ``call_places`` maps the id of each earlier tool call to its position among the tool calls of the conversation.
    """
    return hashlib.blake2b(digest + canonical(message, call_places), digest_size=16).digest()


def chain(messages: Sequence[Message]) -> list[bytes]:
    """Return one digest per message. The i-th digest covers the conversation up to and including the i-th message."""
    places: dict[str, int] = {}
    digest, digests, numbers = b"", [], count()
    for message in messages:
        digest = follow(digest, message, places)
        digests.append(digest)
        for call in message.get("tool_calls", ()):
            places[call["id"]] = next(numbers)
    return digests


def same_reasoning(sent: Sequence[Message], known: Sequence[Message]) -> bool:
    """Return whether each message in ``sent`` has no reasoning, or the same reasoning as in ``known``.

    ``sent`` and ``known`` must be the same messages apart from the reasoning. Many clients do not send the reasoning.
    """
    for own, other in zip(sent, known, strict=True):
        reasoning = own.get("reasoning_content", "").strip()
        if reasoning and reasoning != other.get("reasoning_content", "").strip():
            return False
    return True


def with_reasoning(sent: Sequence[Message], known: Sequence[Message]) -> list[Message]:
    """Return the messages ``sent`` by a client, with missing reasoning filled in.

    ``known`` has the fleet's records of the same messages. A message without reasoning gets the recorded reasoning.
    """
    return [
        {**own, "reasoning_content": other["reasoning_content"]}
        if other.get("reasoning_content") and not own.get("reasoning_content")
        else own
        for own, other in zip(sent, known, strict=True)
    ]
