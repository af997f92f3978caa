"""OpenAI's responses API: converts JSON bodies to `ChatRequest`, and sampled answers to JSON and stream events.

A request may put functions into namespaces. The policy sees such a function as ``NAMESPACE__NAME``.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .messages import Message, read_content, text_or_parts
from .openai_api import MODEL, check_fields, list_of, read_options, split_tools, usage_of
from .session import ChatRequest, SampledAnswer

_FIELDS = {
    "model",
    "input",
    "instructions",
    "previous_response_id",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "max_output_tokens",
    "text",
    "stream",
    "stream_options",
    "temperature",
    "top_p",
    "reasoning",
    "include",
    "truncation",
    "max_tool_calls",
}


def read_request(
    body: Mapping[str, Any], *, stored: Mapping[str, Sequence[Message]], key: str = "", is_retry: bool = False
) -> ChatRequest:
    """Convert the JSON body of a request to ``/v1/responses`` to a `ChatRequest`.

    ``stored`` maps the id of each earlier response to its conversation without ``instructions``. ``key`` is the
    request's idempotency key. ``is_retry`` says whether the client marks the request as repeated.

    Raises:
        ValueError: a field is not supported. The error names the field and its valid values.
    """
    check_fields(body, _FIELDS)
    messages: list[Message] = []
    if previous := body.get("previous_response_id"):
        if previous not in stored:
            raise ValueError(f"previous_response_id must be the id of a response of this episode, got {previous!r}")
        messages += stored[previous]
    if body.get("instructions"):
        messages = [{"role": "system", "content": body["instructions"]}, *messages]
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else list_of(body, "input")
    messages += _read_items(items)
    tools, hosted = split_tools({"tools": _without_namespaces(list_of(body, "tools"))})
    named = {"reasoning_effort": (body.get("reasoning") or {}).get("effort"), "hosted_tools": hosted}
    options = read_options(
        {**body, **named},
        max_tokens=body.get("max_output_tokens"),
        json_schema=_read_format((body.get("text") or {}).get("format") or {}),
    )
    tools = [_read_tool(tool, f"the function at place {place} of tools") for place, tool in enumerate(tools)]
    return ChatRequest(messages=messages, tools=tools, options=options, key=key, is_retry=is_retry)


def response(body: Mapping[str, Any], answer: SampledAnswer) -> dict[str, Any]:
    """Convert a sampled answer to the JSON body of a response of ``/v1/responses``. ``body`` is the request."""
    output: list[dict[str, Any]] = []
    in_namespace = {
        _full_name(space["name"], own["name"]): {"namespace": space["name"], "name": own["name"]}
        for space in list_of(body, "tools")
        if space.get("type") == "namespace"
        for own in space["tools"]
    }
    if answer.message.get("reasoning_content"):
        part = {"type": "reasoning_text", "text": answer.message["reasoning_content"]}
        output.append({"type": "reasoning", "id": _id("rs"), "summary": [], "content": [part]})
    if answer.message.get("content"):
        part = {"type": "output_text", "text": answer.message["content"], "annotations": [], "logprobs": []}
        output.append(
            {"type": "message", "id": _id("msg"), "role": "assistant", "status": "completed", "content": [part]}
        )
    for call in answer.message.get("tool_calls", ()):
        item = {"type": "function_call", "id": _id("fc"), "call_id": call["id"], "status": "completed"}
        output.append({**item, **call["function"], **in_namespace.get(call["function"]["name"], {})})
    usage = usage_of([answer])
    is_cut = answer.finish_reason == "length"
    return {
        "id": _id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "error": None,
        "model": body.get("model") or MODEL,
        "instructions": body.get("instructions"),
        "previous_response_id": body.get("previous_response_id"),
        "output": output,
        "tools": body.get("tools") or [],
        "tool_choice": body.get("tool_choice") or "auto",
        "parallel_tool_calls": True,
        "temperature": body.get("temperature"),
        "top_p": body.get("top_p"),
        "metadata": body.get("metadata"),
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": answer.num_reused_tokens},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
        "turn": answer.turn,
    }


def events(whole: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the server-sent events of a streamed response. ``whole`` is the result of `response`."""
    begun = {**whole, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    all_events: list[dict[str, Any]] = [{"type": "response.created", "response": begun}]
    for index, item in enumerate(whole["output"]):
        all_events += _item_events(index, item)
    last = "response.incomplete" if whole["status"] == "incomplete" else "response.completed"
    for number, event in enumerate([*all_events, {"type": last, "response": whole}]):
        yield {**event, "sequence_number": number}


def _item_events(index: int, item: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    place = {"item_id": item["id"], "output_index": index}
    if item["type"] == "function_call":
        empty = {**item, "arguments": "", "status": "in_progress"}
        yield {"type": "response.output_item.added", "output_index": index, "item": empty}
        yield {"type": "response.function_call_arguments.delta", **place, "delta": item["arguments"]}
        ended = {"name": item["name"], "arguments": item["arguments"]}
        yield {"type": "response.function_call_arguments.done", **place, **ended}
    else:
        kind = "reasoning_text" if item["type"] == "reasoning" else "output_text"
        started = {} if item["type"] == "reasoning" else {"status": "in_progress"}
        yield {"type": "response.output_item.added", "output_index": index, "item": {**item, **started, "content": []}}
        part = item["content"][0]
        place["content_index"] = 0
        logprobs = {} if kind == "reasoning_text" else {"logprobs": []}
        yield {"type": "response.content_part.added", **place, "part": {**part, "text": ""}}
        yield {"type": f"response.{kind}.delta", **place, **logprobs, "delta": part["text"]}
        yield {"type": f"response.{kind}.done", **place, **logprobs, "text": part["text"]}
        yield {"type": "response.content_part.done", **place, "part": part}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _read_items(items: Sequence[Any]) -> list[dict[str, Any]]:
    """Convert input items to messages. Consecutive reasoning, text and calls of the assistant become one message."""
    messages: list[dict[str, Any]] = []
    can_join = False

    def assistant() -> dict[str, Any]:
        nonlocal can_join
        if not can_join:
            messages.append({"role": "assistant", "content": ""})
        can_join = True
        return messages[-1]

    for place, item in enumerate(items):
        kind = item.get("type", "message") if isinstance(item, Mapping) else None
        where = f"input[{place}]"
        if kind == "reasoning":
            texts = [part.get("text") or "" for part in item.get("content") or []]
            can_join = False
            assistant()["reasoning_content"] = "".join(texts)
        elif kind == "function_call":
            name = _full_name(item["namespace"], item["name"]) if item.get("namespace") else item["name"]
            function = {"name": name, "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            assistant().setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = text_or_parts(item["output"], f"{where}.output")
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": output})
            can_join = False
        elif kind == "message" and item.get("role") == "assistant":
            can_join = can_join and not messages[-1]["content"] and "tool_calls" not in messages[-1]
            assistant()["content"] = read_content(item.get("content"), f"{where}.content")
        elif kind == "message":
            content = text_or_parts(item.get("content"), f"{where}.content")
            messages.append({"role": item.get("role"), "content": content})
            can_join = False
        else:
            raise ValueError(
                f"{where}.type must be message, reasoning, function_call or function_call_output, got {kind!r}"
            )
    return messages


def _full_name(namespace: str, name: str) -> str:
    return f"{namespace}__{name}"


def _without_namespaces(tools: Sequence[Any]) -> list[Any]:
    flat: list[Any] = []
    for tool in tools:
        if isinstance(tool, Mapping) and tool.get("type") == "namespace":
            flat += [{**own, "name": _full_name(tool["name"], own["name"])} for own in tool["tools"]]
        else:
            flat.append(tool)
    return flat


def _read_tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(tool.get("name"), str):
        raise ValueError(f"{where} must have a name, got {tool!r}")
    return {"type": "function", "function": {name: tool.get(name) for name in ("name", "description", "parameters")}}


def _read_format(value: Mapping[str, Any]) -> str:
    kind = value.get("type", "text")
    if kind == "text":
        return ""
    if kind == "json_schema" and isinstance(value.get("schema"), Mapping):
        return json.dumps(value["schema"])
    if kind == "json_object":
        return json.dumps({"type": "object"})
    raise ValueError(f"text.format.type must be text, json_object or json_schema with a schema, got {kind!r}")


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
