"""Calls one SGLang server over HTTP: single calls, and streamed batches of samples. Callers set the deadlines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson

from asyncrl.core.errors import EngineError, RequestRefused

from .sglang_server import SERVER_KEEP_ALIVE_S, SGLangServer

logger = logging.getLogger(__name__)

DEATH_GRACE_S = 2.0
# The client must drop an idle connection first: a server that closes one while a request is on its way resets it.
CLIENT_KEEP_ALIVE_S = SERVER_KEEP_ALIVE_S / 4
_EVENT_END = b"\n\n"
_EVENT_START = b"data: "
_LAST_EVENT = b"data: [DONE]"


class SGLangClient:
    """A connection pool to one running server; `open` it when the server is up.

    Every call raises `RequestRefused` for a status of 4xx, `EngineError` if the server fails or cannot be reached
    although it is alive, and `WorkerDiedError` if it died.
    """

    def __init__(self, server: SGLangServer) -> None:
        self._server = server
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Make the pool; the first call connects."""
        self._session = aiohttp.ClientSession(
            self._server.url,
            headers={**self._server.headers, "Content-Type": "application/json"},
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=CLIENT_KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None),
        )

    async def close(self) -> None:
        """Close all connections. May be called more than once."""
        if self._session is not None:
            await self._session.close()

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        """Call the server; returns its JSON answer, or None for an empty answer.

        A call whose connection breaks is sent once more on another connection. All calls of this method may be
        repeated: the second call has the same result, or the server refuses it.
        """
        session = self._opened(method, path)
        try:
            try:
                status, content = await _exchange(session, method, path, body)
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
                await self._raise_if_dead()
                logger.warning("%s: %s %s is sent again after %r", self._server.name, method, path, error)
                status, content = await _exchange(session, method, path, body)
        except aiohttp.ClientError as error:
            raise await self._unreachable(method, path, error) from error
        self._check_status(status, method, path, content)
        return self._decoded(content, method, path) if content else None

    async def stream(self, path: str, body: Any) -> AsyncIterator[list[Any]]:
        """Post a request; yields lists of decoded server-sent events that arrived together, until the stream ends.

        The request is not repeated when the connection breaks. No deadline: the caller watches for silence.
        """
        session = self._opened("POST", path)
        try:
            async with session.post(path, data=_encoded(body)) as response:
                if response.status != 200:
                    self._check_status(response.status, "POST", path, await response.read())
                unread = b""
                async for data in response.content.iter_any():
                    *events, unread = (unread + data).split(_EVENT_END)
                    if found := [event.removeprefix(_EVENT_START) for event in events if event != _LAST_EVENT]:
                        yield self._decoded(b"[" + b",".join(found) + b"]", "POST", path)  # one decoding is faster
        except aiohttp.ClientError as error:
            raise await self._unreachable("POST", path, error) from error

    def _opened(self, method: str, path: str) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            raise EngineError(f"{self._server.name} is not running; {method} {path} cannot be sent")
        return self._session

    def _check_status(self, status: int, method: str, path: str, content: bytes) -> None:
        if status != 200:
            kind = RequestRefused if 400 <= status < 500 else EngineError
            raise kind(f"{self._server.name} answered {method} {path} with {status}: {content[:500]!r}")

    def _decoded(self, content: bytes, method: str, path: str) -> Any:
        try:
            return orjson.loads(content)
        except orjson.JSONDecodeError as error:
            raise EngineError(
                f"{self._server.name} answered {method} {path} with what is not JSON ({error}): {content[:500]!r}"
            ) from error

    async def _unreachable(self, method: str, path: str, error: Exception) -> EngineError:
        await self._raise_if_dead()
        return EngineError(f"{self._server.name} could not be reached for {method} {path}: {error!r}")

    async def _raise_if_dead(self) -> None:
        """Raise `WorkerDiedError` if the server exits soon; its connections break before its process is gone."""
        try:
            async with asyncio.timeout(DEATH_GRACE_S):
                await self._server.wait_exit()
        except TimeoutError:
            return


async def _exchange(session: aiohttp.ClientSession, method: str, path: str, body: Any) -> tuple[int, bytes]:
    """Send one HTTP request; returns the status and the whole body of the answer."""
    async with session.request(method, path, data=None if body is None else _encoded(body)) as response:
        return response.status, await response.read()


def _encoded(body: Any) -> bytes:
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
