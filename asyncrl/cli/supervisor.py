"""The parent of a run: passes signals on, waits for the end, and leaves no process behind, whatever the run dies of.

A run cannot clean up after itself when it is killed, or when Ray aborts it because its own daemon died. So it runs in
a child, in a session of its own (a terminal's Ctrl-C reaches the parent only, once), and the parent adopts every
orphan of the run (Linux child subreaper), so that it can end what is left. Should the parent itself be killed, the
run is told by SIGHUP, stops, and ends what is left in its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ORPHAN_GRACE_S = 3.0
EXIT_INTERRUPTED = 130


def supervise(work: Callable[[], int], *, stop_timeout_s: float) -> int:
    """Run ``work`` in a child process and end everything that it leaves.

    Args:
        work: The run; called in the child, returns its exit status.
        stop_timeout_s: After a signal, the run may take this long to stop; then it is killed.

    Returns:
        The run's exit status, or minus the number of the signal that it died of. Example: -9.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        os._exit(_run_in_child(work, parent))

    def pass_on(number: int, _: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):  # it ends at this moment: nothing to pass on to
            os.kill(child, signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
            signal.setitimer(signal.ITIMER_REAL, stop_timeout_s)

    def kill(_: int, __: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):  # it ends at this moment, as it should
            os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGALRM, kill)
    for number in _PASSED_ON:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup means it
            signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
    status = _wait_for(child)
    _end_orphans(ORPHAN_GRACE_S if status >= 0 else 0.0)
    return status


def _run_in_child(work: Callable[[], int], parent: int) -> int:
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # Not SIGTERM: the kernel sends this once for each thread of a dying parent, and a second SIGTERM means hurry.
    _prctl(_PR_SET_PDEATHSIG, signal.SIGHUP)
    if os.getppid() != parent:
        return 1
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
    try:
        return work()
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else 1
    finally:
        # The parent does this too; but it may have been killed.
        _end_orphans(ORPHAN_GRACE_S)


def exit_at_once(status: int) -> NoReturn:
    """End the run from within, without unwinding it, and everything that it started."""
    _end_orphans(0.0)
    os._exit(status)


def _wait_for(child: int) -> int:
    """Reap children, adopted ones too, until the run has ended."""
    while True:
        pid, status = os.wait()
        if pid == child:
            return os.waitstatus_to_exitcode(status)


def _end_orphans(grace_s: float) -> None:
    """Give what the run left a moment to end by itself, then kill it."""
    orphans = psutil.Process().children(recursive=True)
    _, alive = psutil.wait_procs(orphans, timeout=grace_s)
    while alive:
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=5)
        alive = [process for process in psutil.Process().children(recursive=True) if process.is_running()]


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


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
        """Handle the signals that `supervise` passes on."""
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
