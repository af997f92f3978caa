"""Anthropic's messages API: converts JSON bodies to `ChatRequest`, and sampled answers to JSON and stream events."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from asyncrl.core.image_files import is_image

from .environment import read_json
from .messages import read_content, text_or_parts
from .openai_api import MODEL, check_fields, list_of, read_options, split_tools
from .session import ChatRequest, SampledAnswer

_FIELDS = {
    "model",
    "messages",
    "system",
    "tools",
    "tool_choice",
    "max_tokens",
    "stop_sequences",
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "thinking",
    "output_config",
    "context_management",
    "cache_control",
    "inference_geo",
}
_BLOCKS = {"user": "text, image or tool_result", "assistant": "text, thinking or tool_use", "system": "text"}
"""The allowed types of blocks, by the role of the message."""
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def read_request(body: Mapping[str, Any], *, key: str = "", is_retry: bool = False) -> ChatRequest:
    """Convert the JSON body of a request to ``/v1/messages`` to a `ChatRequest`.

    ``key`` is the request's idempotency key. ``is_retry`` says whether the client marks the request as repeated.

    Raises `ValueError` if a field is not supported or wrong. The error names the field and its valid values.
    """
    check_fields(body, _FIELDS)
    messages: list[dict[str, Any]] = []
    if body.get("system"):
        messages.append({"role": "system", "content": read_content(body["system"], "system")})
    for place, message in enumerate(list_of(body, "messages")):
        messages += _read_message(message, f"messages[{place}]")
    if messages and messages[-1]["role"] == "assistant":
        raise ValueError("the last message must have the role user, got assistant: answers cannot be prefilled")
    tools, hosted = split_tools(body, "custom")
    choice, config = body.get("tool_choice") or {}, body.get("output_config") or {}
    named = {
        "stop": body.get("stop_sequences"),
        "tool_choice": choice if choice.get("type") == "tool" else choice.get("type"),
        "parallel_tool_calls": not choice.get("disable_parallel_tool_use"),
        "reasoning_effort": config.get("effort"),
        "hosted_tools": hosted,
    }
    schema = (config.get("format") or {}).get("schema")
    options = read_options(
        {**body, **named}, max_tokens=body.get("max_tokens"), json_schema=json.dumps(schema) if schema else ""
    )
    tools = [_read_tool(tool, f"tools[{place}]") for place, tool in enumerate(tools)]
    return ChatRequest(messages=messages, tools=tools, options=options, key=key, is_retry=is_retry)


def join_thread(body: Mapping[str, Any], stored: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the body of a request to ``/v1/messages`` without its field ``thread``.

    If ``thread`` names an earlier answer to continue, the result includes the earlier request's messages and fields.
    ``stored`` maps the id of each earlier answer to the result of `store_thread`.

    Raises `ValueError` if ``thread`` is malformed or names an unknown answer.
    """
    alone = {name: value for name, value in body.items() if name != "thread"}
    match body.get("thread"):
        case None | {"type": "create"}:
            return alone
        case {"type": "continue", "previous_message_id": str(previous)} if previous in stored:
            earlier = stored[previous]
        case thread:
            raise ValueError(
                "thread.type must be 'create', or 'continue' with thread.previous_message_id set to the id of an "
                f"earlier answer of a thread in this episode, got {thread}"
            )
    return {**earlier, **alone, "messages": [*earlier["messages"], *list_of(alone, "messages")]}


def store_thread(body: Mapping[str, Any], whole: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request and its answer as one request body. `join_thread` needs this body to continue the thread.

    A thread is a conversation that the endpoint stores. ``body`` is the body of the request, and ``whole`` the body of
    the answer (the result of `message`). The result is ``body`` without ``stream``, with the answer as last message.
    """
    kept = {name: value for name, value in body.items() if name != "stream"}
    return {**kept, "messages": [*list_of(body, "messages"), {"role": "assistant", "content": whole["content"]}]}


def message(body: Mapping[str, Any], answer: SampledAnswer) -> dict[str, Any]:
    """Convert a sampled answer to the JSON body of a response of ``/v1/messages``.

    ``body`` is the request. The additional field ``turn`` is the index of the answer in the rollout.
    """
    blocks: list[dict[str, Any]] = []
    if answer.message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": answer.message["reasoning_content"], "signature": ""})
    if answer.message.get("content"):
        blocks.append({"type": "text", "text": answer.message["content"]})
    for call in answer.message.get("tool_calls", ()):
        function = call["function"]
        blocks.append(
            {"type": "tool_use", "id": call["id"], "name": function["name"], "input": _input_of(function["arguments"])}
        )
    is_cut = answer.finish_reason == "stop" and answer.stop_text != ""
    return {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": body.get("model") or MODEL,
        "content": blocks,
        "stop_reason": "stop_sequence" if is_cut else _REASONS[answer.finish_reason],
        "stop_sequence": answer.stop_text if is_cut else None,
        "usage": {
            "input_tokens": answer.num_prompt_tokens - answer.num_reused_tokens,
            "cache_read_input_tokens": answer.num_reused_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": len(answer.token_ids),
        },
        "turn": answer.turn,
    }


def events(whole: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the server-sent events of a streamed answer. ``whole`` is the answer that `message` returns."""
    begun = {
        **whole,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {**whole["usage"], "output_tokens": 0},
    }
    yield {"type": "message_start", "message": begun}
    for index, block in enumerate(whole["content"]):
        if block["type"] == "tool_use":
            start = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)}
        elif block["type"] == "thinking":
            start = {**block, "thinking": ""}
            delta = {"type": "thinking_delta", "thinking": block["thinking"]}
        else:
            start = {**block, "text": ""}
            delta = {"type": "text_delta", "text": block["text"]}
        yield {"type": "content_block_start", "index": index, "content_block": start}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    ended = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    yield {"type": "message_delta", "delta": ended, "usage": {"output_tokens": whole["usage"]["output_tokens"]}}
    yield {"type": "message_stop"}


def error(kind: str, text: str) -> dict[str, Any]:
    """Return the JSON body of an error answer. ``kind`` is the type of the error, ``text`` its message."""
    kinds = {"invalid_api_key": "authentication_error", "server_error": "api_error", "not_found": "not_found_error"}
    return {"type": "error", "error": {"type": kinds.get(kind, kind), "message": text}}


def _read_message(content: Any, where: str) -> list[dict[str, Any]]:
    """Convert an Anthropic message to messages in OpenAI's form. Each tool result becomes a separate message."""
    role = content.get("role") if isinstance(content, Mapping) else None
    if role not in ("user", "assistant", "system"):
        raise ValueError(f"{where}.role must be user, assistant or system, got {role!r}")
    blocks = content.get("content")
    if isinstance(blocks, str):
        return [{"role": role, "content": blocks}]
    if not isinstance(blocks, list):
        raise ValueError(f"{where}.content must be a text or a list of blocks, got {type(blocks).__name__}")
    results: list[dict[str, Any]] = []
    own: dict[str, Any] = {"role": role}
    parts: list[Any] = []
    for place, block in enumerate(blocks):
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "text" or (is_image(block) and role == "user"):
            parts.append(block)
        elif kind == "thinking" and role == "assistant":
            own["reasoning_content"] = block["thinking"]
        elif kind == "tool_use" and role == "assistant":
            function = {"name": block["name"], "arguments": json.dumps(block["input"], ensure_ascii=False)}
            own.setdefault("tool_calls", []).append({"id": block["id"], "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            result = text_or_parts(block.get("content"), f"{where}.content[{place}].content")
            results.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": result})
        else:
            raise ValueError(f"{where}.content[{place}].type must be {_BLOCKS[role]} from the {role}, got {kind!r}")
    own["content"] = text_or_parts(parts, f"{where}.content")
    return [*results, own] if own["content"] or role == "assistant" or not results else results


def _read_tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or "input_schema" not in tool:
        raise ValueError(f"{where} must have a name and an input_schema, got {tool!r}")
    function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": tool["input_schema"]}
    return {"type": "function", "function": function}


def _input_of(arguments: str) -> Any:
    try:
        return read_json(arguments or "{}")
    except ValueError:
        return {"arguments": arguments}  # the API requires an object as ``input``
