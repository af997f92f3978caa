"""A small HTTP endpoint with scripted answers. It replaces the policy of an environment."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web


@dataclass(frozen=True)
class Access:
    base_url: str
    api_key: str


def echo(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer: the content of the last message in capitals."""
    return {"role": "assistant", "content": str(body["messages"][-1]["content"]).upper()}


class PolicyEndpoint:
    """Answers each request with ``script(body)``. ``requests`` has the bodies of all requests."""

    def __init__(self, script: Callable[[Mapping[str, Any]], dict[str, Any]] = echo) -> None:
        self.requests: list[dict[str, Any]] = []
        self.refused = 0
        self.turn_s = 0.0
        self._script = script
        self._keys: set[str] = set()
        self._runner: web.AppRunner | None = None
        self._url = ""

    async def __aenter__(self) -> PolicyEndpoint:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/asyncrl/sample", self._sample)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self._url = f"http://{host}:{port}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    def open(self) -> Access:
        """Open another episode. Returns its base URL and its key."""
        self._keys.add(f"key-{len(self._keys)}")
        return Access(self._url, f"key-{len(self._keys) - 1}")

    async def _body(self, request: web.Request) -> dict[str, Any]:
        if request.headers.get("Authorization", "").removeprefix("Bearer ") not in self._keys:
            self.refused += 1
            raise web.HTTPUnauthorized(
                text=json.dumps({"error": {"message": "wrong key", "code": "invalid_api_key"}}),
                content_type="application/json",
            )
        body = await request.json()
        self.requests.append(body)
        await asyncio.sleep(self.turn_s)
        return body

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request)
        message = self._script(body)
        if "error" in message:
            return web.json_response(message, status=message.pop("status", 400))
        finish_reason = "tool_calls" if message.get("tool_calls") else "stop"
        choice = {"index": 0, "message": message, "finish_reason": finish_reason, "turn": len(self.requests)}
        usage = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
        answer = {"id": "c", "object": "chat.completion", "created": 0, "model": "policy"}
        if body.get("stream"):
            choice["delta"] = choice.pop("message")
            chunk = json.dumps({**answer, "object": "chat.completion.chunk", "choices": [choice], "usage": usage})
            return web.Response(text=f"data: {chunk}\n\ndata: [DONE]\n\n", content_type="text/event-stream")
        return web.json_response({**answer, "choices": [choice], "usage": usage})

    async def _sample(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        tokens = [token + 1 for token in body["tokens"]]
        answer = {"turn": len(self.requests), "token_ids": tokens, "logprobs": [-0.5] * len(tokens)}
        return web.json_response({**answer, "versions": [3] * len(tokens), "finish_reason": "stop"})
