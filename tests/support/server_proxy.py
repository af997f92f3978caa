"""Proxies between the rollout workers of a real training run and their SGLang server. A test can make calls fail.

`ServerProxy.option` moves the server to another port, but the worker still calls the original port. A proxy listens on
this original port and forwards the calls. If the run starts another server, another proxy listens on its original port.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import psutil

from asyncrl.single_controller.resource_pool import free_port
from tests.support.faulty_proxy import FaultyProxy
from tests.support.training_run import RunningTraining

_LOOK_S = 0.1


class ServerProxy:
    """The proxies for the SGLang servers of one run. Any thread can call `fail` and `heal`.

    Attributes:
        option: An option for the run. With this option, the server listens on another port than the worker calls.
        num_failed: Number of failed calls.
    """

    def __init__(self) -> None:
        self._port = free_port()
        self.option = f"rollout_fleet.sglang.extra_args=['--port','{self._port}']"
        self.num_failed = 0
        self._loop = asyncio.new_event_loop()
        self._proxies: dict[int, FaultyProxy] = {}
        self._fault: tuple[str, str, bytes] | None = None
        threading.Thread(target=self._loop.run_forever, daemon=True, name="proxy").start()

    def fail(self, path: str, moment: str, answer: bytes) -> None:
        """From now on, answer every call of ``path`` with the HTTP response ``answer``.

        ``moment`` says when the proxy sends this answer: ``before`` the server receives the call, ``during`` the
        server's work, or ``after`` the server's answer.
        """
        self._set((path, moment, answer))

    def heal(self) -> None:
        """From now on, forward all calls to the server again."""
        self._set(None)

    def _set(self, fault: tuple[str, str, bytes] | None) -> None:
        self._fault = fault
        self._loop.call_soon_threadsafe(lambda: [self._apply(proxy) for proxy in self._proxies.values()])

    def _apply(self, proxy: FaultyProxy) -> None:
        path, moment, answer = self._fault or ("", "", None)
        proxy.fail(path, moment, answer=answer, act=self._count if self._fault else None)

    async def _count(self) -> None:
        self.num_failed += 1

    @contextlib.contextmanager
    def serving(self, run: RunningTraining) -> Iterator[ServerProxy]:
        """During the ``with`` block, start a proxy for each SGLang server that the run starts."""
        ended = threading.Event()
        looking = threading.Thread(target=self._look, args=(run, ended), daemon=True)
        looking.start()
        try:
            yield self
        finally:
            ended.set()
            looking.join()
            for proxy in self._proxies.values():
                self._do(proxy.stop())
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _look(self, run: RunningTraining, ended: threading.Event) -> None:
        while not ended.wait(_LOOK_S):
            for port in self._called_ports(run):
                if port not in self._proxies:
                    proxy = self._proxies[port] = FaultyProxy(SimpleNamespace(url=f"http://127.0.0.1:{self._port}"))
                    self._apply(proxy)
                    self._do(proxy.start(port=port))

    def _called_ports(self, run: RunningTraining) -> set[int]:
        """Return the ports that workers call: the first ``--port`` in the command line of each SGLang server."""
        ports = set()
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(run.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error, ValueError, IndexError):
                    words = child.cmdline()
                    if "sglang.launch_server" in words:
                        ports.add(int(words[words.index("--port") + 1]))
        return ports

    def _do(self, work) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)
