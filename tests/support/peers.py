"""Processes that execute functions for a test, one at a time. The test can kill or pause a process during a call."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch

from tests.support.ranks import IMPORTED_ONCE


class Peer:
    """A process that executes calls of the test.

    `ask` begins a call of ``function(state, *args)`` in the process, and `answer` waits for the result.
    """

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED_ONCE)
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other,), daemon=True)
        self._process.start()
        other.close()

    def ask(self, function: Callable[..., Any], *args: Any) -> Peer:
        self._pipe.send((function, args))
        return self

    def answer(self, timeout_s: float = 60.0) -> Any:
        """Return the result of the call that `ask` began. Raises its error, or `EOFError` if the process dies."""
        assert self._pipe.poll(timeout_s), f"no answer after {timeout_s} s"
        result, error = self._pipe.recv()
        if error is not None:
            raise error
        return result

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait_end(self, timeout_s: float = 10.0) -> None:
        """Wait until the process has ended. The test calls this after a signal that kills the process."""
        self._process.join(timeout_s)
        assert not self._process.is_alive(), f"the process has not ended after {timeout_s} s"

    def end(self) -> None:
        self._pipe.close()
        self._process.kill()
        self._process.join(5.0)


@contextlib.contextmanager
def peers(count: int) -> Iterator[list[Peer]]:
    """Run ``count`` processes during the ``with`` block."""
    made = [Peer() for _ in range(count)]
    try:
        yield made
    finally:
        for peer in made:
            peer.end()


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    state: dict[str, Any] = {}
    with contextlib.suppress(EOFError):
        while True:
            function, args = pipe.recv()
            try:
                outcome = function(state, *args), None
            except Exception as error:  # noqa: BLE001 - `answer` raises it
                outcome = None, error
            pipe.send(outcome)
