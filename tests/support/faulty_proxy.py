"""A proxy between an engine and its SGLang server. The proxy makes one of the calls fail."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from tests.support.engine_probes import RunningServer

ANSWERS = {
    "500": b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 4\r\n\r\noops",
    "garbage": b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n\x00<html>",
    "nothing": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
    "truncated": b'HTTP/1.1 200 OK\r\nContent-Length: 200\r\n\r\n{"success": true',
    "stalls": b"",
}
"""The answers to the engine. ``stalls`` sends nothing, and the connection stays open."""


class FaultyProxy(RunningServer):
    """A proxy between an engine and a running SGLang server. `fail` sets the fault that the proxy injects.

    Attributes:
        paths: Paths of all calls, in order of arrival.
    """

    def __init__(self, server: object) -> None:
        super().__init__(server)
        self.paths: list[str] = []
        self._fault: tuple[str, str] = "", ""
        self._answer: bytes | None = None
        self._act: Callable[[], Awaitable[None]] | None = None

    @property
    def url(self) -> str:
        """The URL of the proxy. The engine uses it in place of the server's URL."""
        return f"http://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"

    async def start(self, port: int = 0) -> None:
        """Listen on ``port``, or on a free port if ``port`` is 0."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener = await asyncio.start_server(self._accept, "127.0.0.1", port)

    async def stop(self) -> None:
        """Close all connections."""
        self._listener.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def fail(
        self, path: str, moment: str, *, answer: bytes | None = None, act: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """From now on, make every HTTP call with the path ``path`` fail.

        Args:
            path: Path of the call. Example: ``"/pause_generation"``.
            moment: ``before`` the server receives the call, ``during`` its work on the call, or ``after`` its answer.
                With ``midway``, the proxy closes the connection after the first event of the server's answer.
            answer: What the engine gets in place of the server's answer. If ``answer`` is empty, the call hangs.
            act: Function that the proxy calls at ``moment``.
        """
        self._fault, self._answer, self._act = (path, moment), answer, act

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await self._pass_on(reader, writer)
        self._tasks.discard(task)
        writer.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one request of the engine and its answer."""
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: (\d+)", head)
        body = await reader.readexactly(int(length[1]) if length else 0)
        path = head.split()[1].decode()
        self.paths.append(path)
        if await self._fails(path, "before", writer):
            return
        server = urlsplit(self._server.url)
        from_server, to_server = await asyncio.open_connection(server.hostname, server.port)
        try:
            to_server.write(head.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") + body)
            await to_server.drain()
            if await self._fails(path, "during", writer):
                await from_server.read()
                return
            if self._fault == (path, "after"):
                answer = await from_server.read()
                if not await self._fails(path, "after", writer):
                    writer.write(answer)
                return
            if self._fault == (path, "midway"):
                writer.write(await from_server.readuntil(b"\n\n"))  # forward the first event of the stream
                await writer.drain()
                await self._fails(path, "midway", writer)
                return
            while data := await from_server.read(1 << 16):
                writer.write(data)
                await writer.drain()
        finally:
            to_server.close()

    async def _fails(self, path: str, moment: str, writer: asyncio.StreamWriter) -> bool:
        """Inject the fault if it is set for this call and moment. Returns whether the proxy has answered the engine."""
        if self._fault != (path, moment):
            return False
        if self._act is not None:
            await self._act()
        if self._answer is None:
            return False
        writer.write(self._answer)
        await writer.drain()
        if not self._answer:
            await asyncio.Event().wait()  # wait until the proxy is stopped
        writer.close()
        return True
