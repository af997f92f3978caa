"""The HTTP server that environments use to call the policy, with OpenAI's and Anthropic's routes.

The server runs in the rollout worker. The API key of a call identifies the episode. An answer is sent when the policy
has sampled the whole answer. Until then, the server writes comment lines into a streamed answer (server-sent events).
Clients ignore these lines. The lines keep proxies and clients from closing the connection.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import orjson
from aiohttp import web

from asyncrl.core.errors import EpisodeEnded, EpisodeOverflow, RequestRefused
from asyncrl.core.trajectory import ROOT

from . import anthropic_api, openai_api, responses_api
from .session import ChatRequest, SampledAnswer, Session, TextRequest

KEEP_ALIVE_S = 5.0
MAX_BODY_BYTES = 64 << 20
MAX_CLOSED_KEYS = 100_000
RETRY_COUNT = "x-stainless-retry-count"  # OpenAI's and Anthropic's clients count retries in this header
_PREFIX = "asyncrl-"
A = TypeVar("A", ChatRequest, TextRequest)
logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Access:
    """The address and the API key that the environment of one episode uses to call the policy.

    Attributes:
        base_url: URL of the `Endpoint`, for OpenAI's clients. Example: ``"http://127.0.0.1:41001/v1"``. Anthropic's
            clients need it without ``/v1``.
    """

    base_url: str
    api_key: str = field(repr=False)


@dataclass(kw_only=True)
class EndpointCounts:
    """Counters of the calls and errors of an endpoint.

    Attributes:
        requests: Number of calls with a key of a running episode.
        unknown_keys: Number of calls with an unknown key.
        closed_keys: Number of calls with the key of an ended episode.
        lost: Number of answers that were not delivered, because the client had disconnected.
        errors: Number of error answers by HTTP status.
    """

    requests: int = 0
    unknown_keys: int = 0
    closed_keys: int = 0
    lost: int = 0
    errors: Counter[int] = field(default_factory=Counter)


class _Refused(Exception):
    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status, self.kind = status, kind


class Endpoint:
    """An HTTP server for the environments of a rollout worker.

    While the policy samples, the server sends comment lines in a streamed answer, because a silent connection could
    time out. ``keep_alive_s`` is the number of seconds between two comment lines.
    """

    def __init__(self, *, keep_alive_s: float = KEEP_ALIVE_S) -> None:
        self.counts = EndpointCounts()
        self._keep_alive_s = keep_alive_s
        self._sessions: dict[str, Session] = {}
        self._closed: dict[str, None] = {}
        self._stored: dict[str, dict[str, Any]] = {}
        self._runner: web.AppRunner | None = None
        self._base_url = ""

    async def start(self, host: str = "127.0.0.1") -> None:
        """Start the HTTP server on a free port of the address ``host``."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.add_routes(
            [
                web.get("/v1/models", self._route(self._models)),
                web.get("/v1/models/{name:.*}", self._route(self._models)),
                web.post("/v1/chat/completions", self._route(self._chat)),
                web.post("/v1/completions", self._route(self._completions)),
                web.post("/v1/responses", self._route(self._responses)),
                web.post("/v1/messages", self._route(self._messages)),
                web.post("/v1/messages/count_tokens", self._route(self._count_tokens)),
                web.post("/v1/asyncrl/sample", self._route(self._sample)),
                web.post("/v1/asyncrl/give", self._route(self._give)),
                web.route("*", "/{path:.*}", self._route(self._unknown)),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, 0)
        await site.start()
        port = self._runner.addresses[0][1]
        self._base_url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"

    async def close(self) -> None:
        """Stop the HTTP server and cut off running calls. The engine continues to sample the turns of these calls."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def open(self, session: Session) -> Access:
        """Make a secret API key for one episode, and return the key with the URL of this server.

        ``session`` answers the calls with this key, until `close_session`.
        """
        key = _PREFIX + secrets.token_hex(16)
        self._sessions[key] = session
        self._stored[key] = {}
        return Access(base_url=self._base_url, api_key=key)

    def close_session(self, api_key: str) -> None:
        """Refuse all later calls with this API key, because its episode has ended."""
        self._sessions.pop(api_key, None)
        self._stored.pop(api_key, None)
        self._closed[api_key] = None
        if len(self._closed) > MAX_CLOSED_KEYS:
            del self._closed[next(iter(self._closed))]

    def _route(
        self, handle: Callable[[web.Request, Session, str], Awaitable[web.StreamResponse]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def route(request: web.Request) -> web.StreamResponse:
            try:
                key = self._key_of(request)
                self.counts.requests += 1
                return await handle(request, self._sessions[key], key)
            except Exception as error:
                status, kind, message = _status_of(error)
                if status == 500:
                    logger.exception("the endpoint failed on %s %s", request.method, request.path)
                self.counts.errors[status] += 1
                shape = _error_shape(request)
                return _json(shape(kind, message), status=status, headers={"x-should-retry": "false"})

        return route

    def _key_of(self, request: web.Request) -> str:
        key = request.headers.get("x-api-key") or request.headers.get("authorization", "").removeprefix("Bearer ")
        if key in self._sessions:
            return key
        if key in self._closed:
            self.counts.closed_keys += 1
            raise _Refused(410, "episode_closed", "the episode of this key has ended; its turns are recorded")
        self.counts.unknown_keys += 1
        raise _Refused(
            401,
            "invalid_api_key",
            "no running episode has this key; use the base URL and the key that the environment got (OPENAI_API_KEY)",
        )

    async def _unknown(self, request: web.Request, _session: Session, _key: str) -> web.StreamResponse:
        raise _Refused(404, "not_found", f"there is no {request.method} {request.path} here")

    async def _models(self, request: web.Request, _session: Session, _key: str) -> web.StreamResponse:
        name = request.match_info.get("name") or openai_api.MODEL
        model = {"id": name, "object": "model", "created": 0, "owned_by": "asyncrl"}
        return _json(model if "name" in request.match_info else {"object": "list", "data": [model]})

    async def _chat(self, request: web.Request, session: Session, _key: str) -> web.StreamResponse:
        body = await _body_of(request)
        asked = _read(openai_api.read_chat, body, request)
        tokenizer = session.renderer.tokenizer
        return await self._answer(
            request,
            session,
            asked,
            whole=lambda answers: openai_api.chat_completion(body, answers, tokenizer),
            stream=(lambda answers: _data(openai_api.chat_chunks(body, answers, tokenizer)))
            if body.get("stream")
            else None,
        )

    async def _completions(self, request: web.Request, session: Session, _key: str) -> web.StreamResponse:
        body = await _body_of(request)
        tokenizer = session.renderer.tokenizer
        return await self._answer(
            request,
            session,
            _read(openai_api.read_completion, body, request),
            whole=lambda answers: openai_api.completion(body, answers, tokenizer),
            stream=(lambda answers: _data([openai_api.completion(body, answers, tokenizer)]))
            if body.get("stream")
            else None,
        )

    async def _responses(self, request: web.Request, session: Session, key: str) -> web.StreamResponse:
        body = await _body_of(request)
        stored = self._stored[key]
        asked = _read(partial(responses_api.read_request, stored=stored), body, request)

        def whole(answers: list[SampledAnswer]) -> dict[str, Any]:
            response = responses_api.response(body, answers[0])
            stored[response["id"]] = [*asked.messages[bool(body.get("instructions")) :], answers[0].message]
            return response

        def stream(answers: list[SampledAnswer]) -> Iterable[bytes]:
            return (_event(event["type"], event) for event in responses_api.events(whole(answers)))

        return await self._answer(request, session, asked, whole=whole, stream=stream if body.get("stream") else None)

    async def _messages(self, request: web.Request, session: Session, key: str) -> web.StreamResponse:
        sent, stored = await _body_of(request), self._stored[key]
        body = anthropic_api.join_thread(sent, stored)

        def whole(answers: list[SampledAnswer]) -> dict[str, Any]:
            message = anthropic_api.message(body, answers[0])
            if sent.get("thread"):
                stored[message["id"]] = anthropic_api.store_thread(body, message)
            return message

        def stream(answers: list[SampledAnswer]) -> Iterable[bytes]:
            return (_event(event["type"], event) for event in anthropic_api.events(whole(answers)))

        asked = _read(anthropic_api.read_request, body, request)
        return await self._answer(request, session, asked, whole=whole, stream=stream if body.get("stream") else None)

    async def _count_tokens(self, request: web.Request, session: Session, key: str) -> web.StreamResponse:
        body = anthropic_api.join_thread(await _body_of(request), self._stored[key])
        asked = _read(anthropic_api.read_request, body, request)
        return _json({"input_tokens": await session.count_tokens(asked)})

    async def _sample(self, request: web.Request, session: Session, _key: str) -> web.StreamResponse:
        body = await _body_of(request)
        parent = _parent_of(body)
        options = openai_api.read_options(body, max_tokens=body.get("max_tokens"))
        answer = await session.sample(parent, openai_api.token_ids_of(body, "tokens"), options)
        return _json(
            {
                "turn": answer.turn,
                "token_ids": answer.token_ids.tolist(),
                "logprobs": answer.logprobs.tolist(),
                "versions": answer.versions.tolist(),
                "finish_reason": answer.finish_reason,
            }
        )

    async def _give(self, request: web.Request, session: Session, _key: str) -> web.StreamResponse:
        body = await _body_of(request)
        return _json({"turn": session.give(_parent_of(body), openai_api.token_ids_of(body, "tokens"))})

    async def _answer(
        self,
        request: web.Request,
        session: Session,
        asked: ChatRequest | TextRequest,
        *,
        whole: Callable[[list[SampledAnswer]], Mapping[str, Any]],
        stream: Callable[[list[SampledAnswer]], Iterable[bytes]] | None,
    ) -> web.StreamResponse:
        work = session.chat(asked) if isinstance(asked, ChatRequest) else session.complete(asked)
        try:
            if stream is not None:
                return await self._send_stream(request, asyncio.ensure_future(work), stream)
            answers = await work
            if request.transport is None or request.transport.is_closing():
                raise ConnectionResetError("the client is gone")
            return _json(whole(answers))
        except (ConnectionError, asyncio.CancelledError):
            self.counts.lost += 1
            session.lose(asked)
            raise

    async def _send_stream(
        self,
        request: web.Request,
        work: asyncio.Future[list[SampledAnswer]],
        stream: Callable[[list[SampledAnswer]], Iterable[bytes]],
    ) -> web.StreamResponse:
        """Stream the answer. An error before the first byte sets the HTTP status. A later error is sent as an event."""
        await asyncio.wait([work], timeout=self._keep_alive_s)
        if work.done():
            work.result()
        response = web.StreamResponse(headers={"content-type": "text/event-stream", "cache-control": "no-cache"})
        await response.prepare(request)
        while not work.done():
            await response.write(b": the policy is sampling\n\n")
            await asyncio.wait([work], timeout=self._keep_alive_s)
        try:
            answers = work.result()
        except Exception as error:  # noqa: BLE001 - the HTTP status is already sent, so report the error as an event
            status, kind, message = _status_of(error)
            self.counts.errors[status] += 1
            shape = _error_shape(request)
            await response.write(_event("error", shape(kind, message)))
        else:
            await response.write(b"".join(stream(answers)))
        await response.write_eof()
        return response


def _status_of(error: Exception) -> tuple[int, str, str]:
    if isinstance(error, _Refused):
        return error.status, error.kind, str(error)
    if isinstance(error, EpisodeOverflow):
        return 400, "context_length_exceeded", str(error)
    if isinstance(error, (ValueError, RequestRefused)):
        return 400, "invalid_request_error", str(error)
    if isinstance(error, EpisodeEnded):
        return 503, "episode_ended", str(error) or "the episode was cut off; the environment is being cancelled"
    if isinstance(error, ConnectionError):
        return 499, "client_gone", str(error)
    if isinstance(error, web.HTTPException):
        return error.status, "invalid_request_error", error.reason
    return 500, "server_error", f"the rollout worker failed: {error!r}"


def _error_shape(request: web.Request) -> Callable[[str, str], dict[str, Any]]:
    return anthropic_api.error if request.path.startswith("/v1/messages") else _openai_error


def _openai_error(kind: str, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": kind}}


async def _body_of(request: web.Request) -> dict[str, Any]:
    try:
        body = orjson.loads(await request.read())
    except json.JSONDecodeError as error:
        raise ValueError(f"the body of {request.path} must be JSON: {error}") from error
    if not isinstance(body, dict):
        raise ValueError(f"the body of {request.path} must be a JSON object, got {type(body).__name__}")
    return body


def _read(reader: Callable[..., A], body: Mapping[str, Any], request: web.Request) -> A:
    retries = request.headers.get(RETRY_COUNT, "0")
    is_retry = retries.isdigit() and int(retries) > 0
    try:
        return reader(body, key=request.headers.get("idempotency-key", ""), is_retry=is_retry)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the body of {request.path} lacks a field, or a field has the wrong type: {error}") from error


def _parent_of(body: Mapping[str, Any]) -> int:
    parent = body.get("parent")
    if parent is not None and type(parent) is not int:
        raise ValueError(f"parent must be the index of a turn, or null to begin a new sequence, got {parent!r}")
    return ROOT if parent is None else parent


def _json(content: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(body=orjson.dumps(content), status=status, headers=headers, content_type="application/json")


def _data(chunks: Iterable[Mapping[str, Any]]) -> Iterable[bytes]:
    for chunk in chunks:
        yield b"data: " + orjson.dumps(chunk) + b"\n\n"
    yield b"data: [DONE]\n\n"


def _event(name: str, content: Mapping[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + orjson.dumps(content) + b"\n\n"
