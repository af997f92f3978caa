"""OpenAI's chat completions and completions: converts JSON bodies to requests, and sampled answers to JSON."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .chat_tokenizer import ChatTokenizer
from .session import ChatRequest, SampledAnswer, SampleOptions, TextRequest

MODEL = "policy"
_LARGEST_TOKEN = 2**31 - 1

_OTHER = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "reasoning_effort",
    "tool_choice",
    "parallel_tool_calls",
    "best_of",
    "verbosity",
)
_COMMON = {
    "model",
    "n",
    "stop",
    "stop_token_ids",
    "seed",
    "stream",
    "stream_options",
    "max_tokens",
    "logprobs",
    *_OTHER,
}
_WITHOUT_EFFECT = {
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prediction",
    "client_metadata",
}
_CHAT = {
    *_COMMON,
    "messages",
    "tools",
    "response_format",
    "max_completion_tokens",
    "top_logprobs",
}


def read_chat(body: Mapping[str, Any], *, key: str = "", is_retry: bool = False) -> ChatRequest:
    """Convert the JSON body of a request to ``/v1/chat/completions`` to a `ChatRequest`.

    ``key`` is the request's idempotency key. ``is_retry`` says whether the client marks the request as repeated.

    Raises `ValueError` if a field is not supported or wrong. The error names the field and its valid values.
    """
    check_fields(body, _CHAT)
    tools, hosted = split_tools(body)
    for place, tool in enumerate(tools):
        if "function" not in tool:
            raise ValueError(f"tools[{place}] must be {{'type': 'function', 'function': …}}, got {tool!r}")
    if body.get("top_logprobs"):
        raise ValueError(
            f"top_logprobs must be 0, got {body['top_logprobs']}: engines report only the log-prob of the sampled token"
        )
    max_tokens = body.get("max_completion_tokens")
    options = read_options(
        {**body, "hosted_tools": hosted},
        max_tokens=body.get("max_tokens") if max_tokens is None else max_tokens,
        json_schema=_read_format(body.get("response_format")),
    )
    return ChatRequest(messages=list_of(body, "messages"), tools=tools, options=options, key=key, is_retry=is_retry)


def read_completion(body: Mapping[str, Any], *, key: str = "", is_retry: bool = False) -> TextRequest:
    """Convert the JSON body of a request to ``/v1/completions`` to a `TextRequest`.

    ``key`` is the request's idempotency key. ``is_retry`` says whether the client marks the request as repeated.

    Raises `ValueError` if a field is not supported or wrong. The error names the field and its valid values.
    """
    check_fields(body, {*_COMMON, "prompt"})
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if not prompt or not (isinstance(prompt, str) or (isinstance(prompt, list) and all(map(_is_token_id, prompt)))):
        raise ValueError("prompt must be one text or one list of token ids, and not empty; send one request per prompt")
    options = read_options(body, max_tokens=body.get("max_tokens"))
    return TextRequest(prompt=prompt, options=options, key=key, is_retry=is_retry)


def read_options(body: Mapping[str, Any], *, max_tokens: Any, json_schema: str = "") -> SampleOptions:
    """Read the sampling options from the JSON body of a request. The body has OpenAI's field names.

    A caller may add the field ``hosted_tools`` to ``body``. This field lists the types of the tools that the servers of
    an API provider would run.

    Raises `ValueError` if a field is wrong. The error names the field and its valid values.
    """
    stop = body.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
        raise ValueError(f"stop must be a text or a list of texts, got {stop!r}")
    if not isinstance(body.get("stream_options") or {}, Mapping):
        raise ValueError(f"stream_options must be an object, got {body['stream_options']!r}")
    for name, value in (("n", body.get("n")), ("seed", body.get("seed")), ("max_tokens", max_tokens)):
        if value is not None and type(value) is not int:
            raise ValueError(f"{name} must be a whole number, got {value!r}")
    ids = token_ids_of(body, "stop_token_ids")
    other = {name: body[name] for name in (*_OTHER, "hosted_tools") if body.get(name) is not None}
    if other.get("tool_choice") == "none":
        del other["tool_choice"]
    if other.get("best_of") == (body.get("n") or 1):
        del other["best_of"]
    if not body.get("tools"):
        other.pop("parallel_tool_calls", None)
    return SampleOptions(
        n=1 if body.get("n") is None else body["n"],
        max_tokens=max_tokens,
        stop=tuple(stop),
        stop_token_ids=tuple(ids),
        seed=body.get("seed"),
        json_schema=json_schema,
        reads_calls=body.get("tool_choice") != "none",
        other=other,
    )


def check_fields(body: Mapping[str, Any], known: set[str]) -> None:
    """Raise `ValueError` if a request's body has a field that is not supported.

    The fields ``known`` are supported. Some other fields are accepted and have no effect. A field that is None, false,
    0 or empty is treated as missing.
    """
    unknown = sorted(name for name in body.keys() - known - _WITHOUT_EFFECT if body[name])
    if unknown:
        raise ValueError(f"{unknown[0]} is not supported here; leave it out. Supported are {', '.join(sorted(known))}")


def split_tools(body: Mapping[str, Any], own_type: str = "function") -> tuple[list[Mapping[str, Any]], list[str]]:
    """Split the tools in a request's body. Returns a pair: the client's tools, and the types of all other tools.

    The client runs its own tools. They have the type ``own_type`` or no type. The API provider's servers would run the
    other tools, such as a web search. Raises `ValueError` for a tool that is not a JSON object.
    """
    own, hosted = [], []
    for place, tool in enumerate(list_of(body, "tools")):
        if not isinstance(tool, Mapping):
            raise ValueError(f"tools[{place}] must be an object, got {tool!r}")
        kind = tool.get("type") or own_type
        if kind == own_type:
            own.append(tool)
        else:
            hosted.append(str(kind))
    return own, hosted


def list_of(body: Mapping[str, Any], name: str) -> list[Any]:
    """Return the field ``name`` of a request's body, which must be a list. Missing or None gives an empty list.

    Raises `ValueError` for any other value.
    """
    value = body.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise ValueError(f"{name} must be a list, got {type(value).__name__}")
    return value


def token_ids_of(body: Mapping[str, Any], name: str) -> list[int]:
    """Return the field ``name`` of a request's body, a list of token ids. Missing or None gives an empty list.

    Raises `ValueError` for any other value.
    """
    tokens = list_of(body, name)
    wrong = [token for token in tokens if not _is_token_id(token)]
    if wrong:
        raise ValueError(f"{name} must be a list of token ids, got {wrong[0]!r} in the list")
    return tokens


def _is_token_id(token: Any) -> bool:
    return type(token) is int and 0 <= token <= _LARGEST_TOKEN


def _read_format(value: Any) -> str:
    kind = value.get("type") if isinstance(value, Mapping) else value
    if kind in (None, "text"):
        return ""
    if kind == "json_object":
        return json.dumps({"type": "object"})
    if kind == "json_schema":
        schema = (value.get("json_schema") or {}).get("schema")
        if isinstance(schema, Mapping):
            return json.dumps(schema)
        raise ValueError(f"response_format.json_schema.schema must be a JSON schema, got {schema!r}")
    raise ValueError(f"response_format.type must be text, json_object or json_schema, got {kind!r}")


def usage_of(answers: Sequence[SampledAnswer]) -> dict[str, Any]:
    """Return OpenAI's field ``usage`` for answers to one prompt. The tokens of the prompt are counted only once."""
    written = sum(len(answer.token_ids) for answer in answers)
    prompt = answers[0].num_prompt_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": answers[0].num_reused_tokens},
    }


def chat_completion(
    body: Mapping[str, Any], answers: Sequence[SampledAnswer], tokenizer: ChatTokenizer
) -> dict[str, Any]:
    """Convert sampled answers to the JSON body of a response of ``/v1/chat/completions``, one choice per answer.

    ``body`` is the request. The additional field ``turn`` of a choice is the index of the answer in the rollout.
    """
    choices = [
        {
            "index": index,
            "message": {"refusal": None, **answer.message},
            "finish_reason": answer.finish_reason,
            "logprobs": _chat_logprobs(answer, tokenizer) if body.get("logprobs") else None,
            "turn": answer.turn,
        }
        for index, answer in enumerate(answers)
    ]
    return {**_head("chatcmpl", "chat.completion", body), "choices": choices, "usage": usage_of(answers)}


def chat_chunks(
    body: Mapping[str, Any], answers: Sequence[SampledAnswer], tokenizer: ChatTokenizer
) -> Iterator[dict[str, Any]]:
    """Yield the chunks of a streamed response of ``/v1/chat/completions``. ``body`` is the request."""
    head = _head("chatcmpl", "chat.completion.chunk", body)

    def chunk(index: int, delta: Mapping[str, Any], finish_reason: str | None = None, **more: Any) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason, **more}
        return {**head, "choices": [choice]}

    for index, answer in enumerate(answers):
        message = answer.message
        yield chunk(index, {"role": "assistant", "content": ""}, turn=answer.turn)
        if message.get("reasoning_content"):
            yield chunk(index, {"reasoning_content": message["reasoning_content"]})
        logprobs = _chat_logprobs(answer, tokenizer) if body.get("logprobs") else None
        if message.get("content") or logprobs:
            yield chunk(index, {"content": message.get("content") or ""}, logprobs=logprobs)
        for place, call in enumerate(message.get("tool_calls", ())):
            begun = {**call, "index": place, "function": {"name": call["function"]["name"], "arguments": ""}}
            yield chunk(index, {"tool_calls": [begun]})
            written = {"index": place, "function": {"arguments": call["function"]["arguments"]}}
            yield chunk(index, {"tool_calls": [written]})
        yield chunk(index, {}, answer.finish_reason)
    if (body.get("stream_options") or {}).get("include_usage"):
        yield {**head, "choices": [], "usage": usage_of(answers)}


def completion(body: Mapping[str, Any], answers: Sequence[SampledAnswer], tokenizer: ChatTokenizer) -> dict[str, Any]:
    """Convert sampled answers to the JSON body of a response of ``/v1/completions``, one choice per answer.

    ``body`` is the request. A streamed response sends the result as its only chunk.
    """
    choices = [
        {
            "index": index,
            "text": answer.message["content"],
            "finish_reason": answer.finish_reason,
            "logprobs": {
                "tokens": [tokenizer.decode([token]) for token in answer.token_ids.tolist()],
                "token_logprobs": answer.logprobs.tolist(),
                "top_logprobs": None,
                "text_offset": [],
            }
            if body.get("logprobs") is not None
            else None,
            "turn": answer.turn,
        }
        for index, answer in enumerate(answers)
    ]
    return {**_head("cmpl", "text_completion", body), "choices": choices, "usage": usage_of(answers)}


def _chat_logprobs(answer: SampledAnswer, tokenizer: ChatTokenizer) -> dict[str, Any]:
    entries = []
    for token, logprob in zip(answer.token_ids.tolist(), answer.logprobs.tolist(), strict=True):
        text = tokenizer.decode([token])
        # If a token has only a part of a character, the decoded text is not valid, and the bytes are not known.
        own_bytes = None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode())
        entries.append({"token": text, "logprob": logprob, "bytes": own_bytes, "top_logprobs": []})
    return {"content": entries, "refusal": None}


def _head(prefix: str, kind: str, body: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": body.get("model") or MODEL,
        "system_fingerprint": None,
    }
