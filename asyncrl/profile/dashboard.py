"""``asyncrl dashboard RUN`` serves the report of a run over HTTP and updates it while the run is in progress.

The dashboard is a separate process that only reads the run's folder. On an address that is not loopback, it needs a
token. It has no TLS, so use a tunnel (``ssh -L``) on a network that you do not trust.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import importlib.util
import ipaddress
import logging
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path

from aiohttp import web

from asyncrl.core.errors import with_exit_status
from asyncrl.metrics.trackers import in_url, split_address
from asyncrl.profile.page import render
from asyncrl.profile.report import RunReport

logger = logging.getLogger(__name__)

TOKEN_VARIABLE = "ASYNCRL_DASHBOARD_TOKEN"
_COOKIE = "asyncrl_token"
_KEEP_ALIVE_S = 15.0
_DEBOUNCE_MS = 1000
_REST_FACTOR = 5.0
"""Pause after each report, as a multiple of the time to make the report. Limits the CPU time to a sixth of one core."""
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Dashboard:
    """Serves the pages of one run.

    Args:
        token: Secret that visitors send once as ``/?token=``, or as a bearer token. Empty disables the check.
        only_loopback: Answer only requests with a loopback name in the Host header. This prevents DNS rebinding, where
            a foreign web page uses a host name for 127.0.0.1.
    """

    def __init__(self, run_dir: Path, *, token: str = "", only_loopback: bool = True) -> None:
        self._run_dir = run_dir
        self._report = RunReport(run_dir)
        self._token = token
        self._only_loopback = only_loopback
        self._news = asyncio.Condition()
        self._count = 0
        self._document = b""
        self._failure = "nothing is recorded yet"

    def app(self) -> web.Application:
        """Return the aiohttp application. While the application runs, it watches the run's folder for new files."""
        app = web.Application(middlewares=[self._guard])
        app.add_routes(
            [
                web.get("/", self._page),
                web.get("/document.json", self._send_document),
                web.get("/events", self._send_events),
            ]
        )
        app.cleanup_ctx.append(self._following)
        return app

    async def refresh(self) -> None:
        """Build the report from the run's folder again, and notify every open page."""
        try:
            self._document = await asyncio.to_thread(self._report.to_json)
            self._failure = ""
        except (OSError, ValueError) as error:
            self._failure = str(error)
        except Exception as error:
            logger.exception("the report cannot be made")
            self._failure = f"the report cannot be made: {error!r}"
        async with self._news:
            self._count += 1
            self._news.notify_all()

    async def _following(self, _: web.Application):  # noqa: ANN202 - aiohttp expects an async generator
        following = asyncio.create_task(self._follow())
        yield
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

    async def _follow(self) -> None:
        from watchfiles import awatch

        await self.refresh()
        async for _ in awatch(self._run_dir, watch_filter=_is_report_file, debounce=_DEBOUNCE_MS, step=200):
            began_s = time.monotonic()
            await self.refresh()
            await asyncio.sleep(_REST_FACTOR * (time.monotonic() - began_s))

    @web.middleware
    async def _guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        host = request.host.rpartition(":")[0] if request.host.rpartition(":")[2].isdigit() else request.host
        if self._only_loopback and not is_loopback(host.strip("[]")):
            raise web.HTTPForbidden(text=f"open the dashboard at a loopback host (localhost), got {request.host}\n")
        if self._token:
            if self._is_token(request.query.get("token", "")):
                answer = web.HTTPFound("/")
                answer.set_cookie(_COOKIE, self._token, httponly=True, samesite="Strict")
                raise answer
            bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
            if not self._is_token(bearer) and not self._is_token(request.cookies.get(_COOKIE, "")):
                raise web.HTTPUnauthorized(text="open the dashboard with its token: /?token=...\n")
        answer = await handler(request)
        if not answer.prepared:
            answer.headers.update(_HEADERS)
        return answer

    def _is_token(self, shown: str) -> bool:
        return hmac.compare_digest(shown.encode(), self._token.encode())

    async def _page(self, _: web.Request) -> web.Response:
        return web.Response(text=render(None, title=f"asyncrl {self._run_dir.name}"), content_type="text/html")

    async def _send_document(self, _: web.Request) -> web.Response:
        if not self._document:
            raise web.HTTPServiceUnavailable(text=self._failure + "\n")
        answer = web.Response(body=self._document, content_type="application/json")
        answer.enable_compression()
        return answer

    async def _send_events(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream", **_HEADERS})
        await answer.prepare(request)
        sent = 0
        with suppress(ConnectionResetError):
            while True:
                if self._count > sent:
                    sent = self._count
                    kind, data = ("failed", self._failure) if self._failure else ("report", str(sent))
                    await answer.write(f"event: {kind}\ndata: {' '.join(data.split())}\n\n".encode())
                    continue
                try:
                    async with asyncio.timeout(_KEEP_ALIVE_S), self._news:
                        await self._news.wait_for(lambda sent=sent: self._count > sent)
                except TimeoutError:
                    await answer.write(b": keep-alive\n\n")
        return answer


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is ``localhost`` or a loopback IP address, such as 127.0.0.1."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_dashboard(address: str, token: str) -> None:
    """Check that a dashboard can be served on ``address`` (HOST:PORT) with the secret ``token``.

    Raises:
        ValueError: ``address`` is malformed; or ``token`` is empty although ``address`` is not loopback; or the package
            ``watchfiles`` is not installed.
    """
    host, _ = split_address(address, "dashboard_address")
    if importlib.util.find_spec("watchfiles") is None:
        raise ValueError(
            "dashboard=true needs the package watchfiles, which is not installed; install it with "
            "pip install 'asyncrl[dashboard]', or set dashboard=false"
        )
    if not is_loopback(host) and not token:
        raise ValueError(
            f"dashboard_address={address} is not loopback, so anyone on the network could open the page; set the "
            f"environment variable {TOKEN_VARIABLE} to a secret that visitors must send, or use host 127.0.0.1"
        )


async def serve(run_dir: Path, address: str, *, token: str, with_parent: bool) -> None:
    """Serve the dashboard of a run on ``address`` (HOST:PORT). Write the URL to stdout, then run until cancelled.

    If ``with_parent`` is true, return when stdin ends, which happens at the end of the parent process.
    """
    host, port = split_address(address, "dashboard_address")
    dashboard = Dashboard(run_dir, token=token, only_loopback=is_loopback(host))
    runner = web.AppRunner(dashboard.app(), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
        bound = runner.addresses[0]
        sys.stdout.write(f"http://{in_url(bound[0])}:{bound[1]}/\n")
        sys.stdout.flush()
        if with_parent:
            await asyncio.to_thread(sys.stdin.buffer.read)
        else:
            await asyncio.Event().wait()
    finally:
        await runner.cleanup()


@with_exit_status
def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``asyncrl dashboard`` with the given command-line arguments; return the exit status."""
    parser = argparse.ArgumentParser(prog="asyncrl dashboard", description="Serve the live report of a run.")
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument(
        "--address", default="127.0.0.1:8300", help="HOST:PORT (default 127.0.0.1:8300; port 0 picks a free port)"
    )
    parser.add_argument("--with-parent", action="store_true", help="exit when stdin ends")
    options = parser.parse_args(arguments)
    token = os.environ.get(TOKEN_VARIABLE, "")
    try:
        check_dashboard(options.address, token)
        if not options.run.is_dir():
            raise ValueError(f"RUN must be the folder of a run, got {options.run}")
        asyncio.run(serve(options.run, options.address, token=token, with_parent=options.with_parent))
    except KeyboardInterrupt:
        return 130
    return 0


def _is_report_file(_: object, path: str) -> bool:
    file = Path(path)
    names = ("metrics.jsonl", "summary.json", "plan.json", "advice.json")
    return file.parent.name in ("profile", "samples") or file.name in names


if __name__ == "__main__":
    sys.exit(main())
