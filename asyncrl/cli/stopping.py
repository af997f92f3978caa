"""How a run is stopped from outside: by a signal, a second one, or the death of its supervisor."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable
from typing import Any

from asyncrl.cli.supervisor import exit_at_once

EXIT_INTERRUPTED = 130


class Stopping:
    """Cancels the run at the first signal; a second one ends it on the spot."""

    def __init__(
        self,
        run: asyncio.Future[Any],
        say: Callable[[str], None],
        *,
        timeout_s: float,
        give_up: Callable[[], None],
    ) -> None:
        """Take what is stopped.

        Args:
            run: Cancelled; stops what it started while it unwinds.
            say: Writes a line to the terminal.
            timeout_s: How long stopping may take. The supervisor sees to it; when it is dead, ``give_up`` does.
            give_up: Ends the process; called in a thread of its own.
        """
        self.cause = "cancellation"
        self._run = run
        self._say = say
        self._timeout_s = timeout_s
        self._give_up = give_up
        self._stopped = False

    def listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Handle the signals of ``asyncrl.cli.supervisor``."""
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGHUP, self._on_supervisor_death)

    def _on_signal(self, number: signal.Signals) -> None:
        if self._stopped:
            exit_at_once(EXIT_INTERRUPTED)
        self._stop(number.name)
        self._say(f"{number.name}: stopping, at most {self._timeout_s:g} s; once more ends the run on the spot")

    def _on_supervisor_death(self) -> None:
        if not self._stopped:
            self._stop("the death of its supervisor")
        give_up_after(self._timeout_s, self._give_up)

    def _stop(self, cause: str) -> None:
        self._stopped = True
        self.cause = cause
        self._run.cancel()


def give_up_after(timeout_s: float, give_up: Callable[[], None]) -> None:
    """Call ``give_up`` in ``timeout_s`` seconds unless the process has ended by then."""
    timer = threading.Timer(timeout_s, give_up)
    timer.daemon = True
    timer.start()
