"""The parent process (supervisor) of a run. It forwards signals, waits for the run's end, and ends remaining processes.

If the run's main process is killed, it cannot end its own child processes. This also happens if a Ray daemon dies,
because Ray then ends the main process at once. Therefore the main process is a child of the supervisor. The supervisor
adopts and ends every orphan of the run (Linux child subreaper). If the supervisor is killed, the kernel sends SIGHUP to
the main process, which then stops the run and ends the orphans itself.

A scheduler or systemd sends SIGTERM to every process of a run at once. The main process and its child processes block
SIGINT and SIGTERM, so only the supervisor reacts. It stops the main process with other signals (`STOPS`). So the
scheduler's signal ends none of these processes before the run has written the policy. Ctrl-C reaches only the
supervisor, because the main process has a separate session.

The main process reports each fault, and its own end, through a pipe.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import psutil

from asyncrl.cli import exit_status, stop_early
from asyncrl.core.host import leave_stop_to_owner, release_resource_tracker
from rollout_fleet.child_pipes import ChildFolder
from rollout_fleet.engines.process_guard import adopt_orphans, signal_at_parent_death

STOPS = {signal.SIGINT: signal.SIGRTMIN + 3, signal.SIGTERM: signal.SIGRTMIN + 4}
"""Maps each signal that the supervisor gets to the signal that it sends to the child process instead."""
_PASSED_ON = (*STOPS, signal.SIGHUP)
_MAX_FAULT_BYTES = 32_000
_OWN_END = b"\0"
_ONE_STOP_S = 0.5
"""The supervisor does not pass on a second signal within this time after the first one.

If a scheduler signals all processes of a sweep, the supervisor of a run gets two signals: one from the scheduler, and
one from `asyncrl.cli.multirun`.
"""
_RESOURCE_TRACKER = "multiprocessing.resource_tracker"
ORPHAN_GRACE_S = 3.0
_KILL_AFTER_S = ORPHAN_GRACE_S + 2.0
"""Seconds after the run's own deadline to stop, at which the supervisor kills the run.

The run uses these seconds to end its orphaned processes.
"""
EXIT_FAILED = 1

_report_fd: int | None = None


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a run ended.

    Attributes:
        status: Exit status, or minus the number of the fatal signal. Example: -9.
        own: True if the run ended by itself, and reported its end to the supervisor.
        late: True if the supervisor killed the run, because the run did not stop in time after a signal.
        fault: The text of the faults that the run reported, if ``own`` is False; otherwise empty.
    """

    status: int
    own: bool
    late: bool
    fault: str


def supervise(work: Callable[[], int], *, stop_timeout_s: float) -> Ending:
    """Run ``work`` in a child process, and end all processes that the child leaves behind. Returns how the run ended.

    Args:
        work: Function that the child process calls. It executes the run, and returns the exit status.
        stop_timeout_s: Longest time in seconds that the run may take to stop after a signal. If the run still exists
            `_KILL_AFTER_S` later, the supervisor kills it.
    """
    global _report_fd
    adopt_orphans()
    signal.pthread_sigmask(signal.SIG_BLOCK, (*_PASSED_ON, *STOPS.values()))
    reports, _report_fd = os.pipe()
    os.set_blocking(reports, False)
    parent, child = os.getpid(), os.fork()
    if child == 0:
        os.close(reports)
        status = _run_in_child(work, parent)
        _report(_OWN_END)
        os._exit(status)
    os.close(_report_fd)
    late, passed_on_s = False, -math.inf

    def pass_on(number: int, _: FrameType | None) -> None:
        nonlocal passed_on_s
        if time.monotonic() - passed_on_s < _ONE_STOP_S:
            return
        passed_on_s = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, STOPS[signal.SIGINT if number == signal.SIGINT else signal.SIGTERM])
            signal.setitimer(signal.ITIMER_REAL, stop_timeout_s + _KILL_AFTER_S)

    def kill(_: int, __: FrameType | None) -> None:
        nonlocal late
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
            late = True

    signal.signal(signal.SIGALRM, kill)
    for number in _PASSED_ON:
        # If this process ignores SIGHUP, for example under nohup, do not set a handler, so that SIGHUP stays ignored.
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*_PASSED_ON, *STOPS.values()))
    status = _wait_for(child)
    said = _read_reports(reports)
    own = said.endswith(_OWN_END)
    _end_orphans(ORPHAN_GRACE_S if own else 0.0)
    fault = said.removesuffix(_OWN_END).decode(errors="replace")
    return Ending(status=status, own=own, late=late and not own, fault="" if own else fault)


def report_fault(last_words: str) -> None:
    """Send the text of a fault to the supervisor (the parent process), which shows it if Ray ends the run."""
    _report(last_words.encode()[-_MAX_FAULT_BYTES:])


def exit_at_once(status: int) -> NoReturn:
    """Kill all child processes of this process, and end this process at once with exit status ``status``.

    The run does not stop its components, and does not save anything.
    """
    _end_orphans(0.0)
    _report(_OWN_END)
    os._exit(status)


def _report(said: bytes) -> None:
    if _report_fd is not None:
        with contextlib.suppress(OSError):  # ignore the error if the supervisor, which reads the pipe, was killed
            os.write(_report_fd, said)


def _read_reports(reports: int) -> bytes:
    said = b""
    # `os.read` raises `BlockingIOError` if the pipe is empty and an orphaned process still has the pipe open.
    with contextlib.suppress(BlockingIOError):
        while part := os.read(reports, 65536):
            said += part
    os.close(reports)
    return said


def _run_in_child(work: Callable[[], int], parent: int) -> int:
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # If the parent dies, the kernel sends this signal to this process, once per thread of the parent. The signal is
    # SIGHUP, because a second SIGHUP has no effect. A second signal of `STOPS` would end the run at once.
    signal_at_parent_death(signal.SIGHUP)
    if os.getppid() != parent:
        return EXIT_FAILED
    adopt_orphans()
    for number, stop in STOPS.items():
        signal.signal(number, _stop_before_start)
        signal.signal(stop, lambda _, frame, number=number: _stop_before_start(number, frame))
    leave_stop_to_owner()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGHUP, *STOPS.values()))
    try:
        return work()
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else EXIT_FAILED
    finally:
        # The parent process ends the run's orphans too, but it may have been killed.
        _end_orphans(ORPHAN_GRACE_S)


def _stop_before_start(number: int, frame: FrameType | None) -> NoReturn:
    _report(_OWN_END)
    stop_early(number, frame)


def _wait_for(child: int) -> int:
    """Reap child processes, including adopted ones, until the process ``child`` has ended. Return its exit status."""
    while True:
        pid, status = os.wait()
        if pid == child:
            return os.waitstatus_to_exitcode(status)


def _end_orphans(grace_s: float) -> None:
    """Wait ``grace_s`` seconds for the orphans of the run to end. Then kill the remaining orphans, caretakers last.

    At the end, remove the files that killed child processes of rollout workers have left.

    Caretakers clean up after the other processes. They are the guard of an SGLang server, and Python's resource
    tracker. All other processes that ignore SIGINT are treated as caretakers too.
    """
    release_resource_tracker()
    orphans = psutil.Process().children(recursive=True)
    _, alive = psutil.wait_procs(orphans, timeout=grace_s)
    _kill([process for process in alive if not _is_caretaker(process)])
    psutil.wait_procs(alive, timeout=ORPHAN_GRACE_S)
    while alive := [process for process in psutil.Process().children(recursive=True) if process.is_running()]:
        _kill(alive)
    ChildFolder.clear_up_unlocked()


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=5)


def _is_caretaker(process: psutil.Process) -> bool:
    """Return whether a process is a caretaker (see `_end_orphans`): it ignores SIGINT, or is Python's resource tracker.

    The function recognizes the resource tracker by the command line, because a tracker that has just started does not
    ignore SIGINT yet.
    """
    with contextlib.suppress(OSError, psutil.Error):
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        ignored = next(int(line.split(":")[1], 16) for line in lines if line.startswith("SigIgn"))
        return bool(ignored >> (signal.SIGINT - 1) & 1) or _RESOURCE_TRACKER in " ".join(process.cmdline())
    return False


class Stopping:
    """Cancels the run at the first signal. A second signal ends the run at once.

    Attributes:
        cause: Text that names what stopped the run. Example: ``SIGTERM``.
        status: The exit status of a run that was stopped by ``cause``.
    """

    def __init__(
        self,
        run: asyncio.Future[Any],
        say: Callable[[str], None],
        *,
        timeout_s: Callable[[], float],
        give_up: Callable[[], None],
    ) -> None:
        """Prepare to stop a run.

        Args:
            run: The task of the run. The first signal cancels this task.
            say: Function that writes a line to the terminal.
            timeout_s: Function that returns the longest time to stop, in seconds.
            give_up: Function that ends the process. A separate thread calls this function if the run takes longer than
                ``timeout_s()`` to stop.
        """
        self.cause = "cancellation"
        self.status = EXIT_FAILED
        self._run = run
        self._say = say
        self._timeout_s = timeout_s
        self._give_up = give_up
        self._stopped = False

    def listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Handle the signals that `supervise` passes on, until `close` is called.

        The first signal cancels the run, and a second signal ends the run at once. If the supervisor dies, the run is
        cancelled too.
        """
        for number, stop in STOPS.items():
            loop.add_signal_handler(stop, self._on_signal, number)
        loop.add_signal_handler(signal.SIGHUP, self._on_supervisor_death)

    def close(self) -> None:
        """Ignore the signals that `listen` handles, from now on. Call this method after the run has ended."""
        loop = asyncio.get_running_loop()
        for number in (*_PASSED_ON, *STOPS.values()):
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)

    def _on_signal(self, number: signal.Signals) -> None:
        if self._stopped:
            exit_at_once(exit_status(number))
        timeout_s = self._stop(number.name, exit_status(number))
        self._say(f"{number.name}: stopping, at most {timeout_s:g} s; once more ends the run at once")

    def _on_supervisor_death(self) -> None:
        """Stop the run. Also handle SIGINT and SIGTERM from now on, because no supervisor passes them on."""
        for number in STOPS:
            signal.signal(number, signal.SIG_IGN)  # discard a pending signal, because it would end the run at once
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
        if not self._stopped:
            self._stop("the death of its supervisor", EXIT_FAILED)

    def _stop(self, cause: str, status: int) -> float:
        self._stopped = True
        self.cause, self.status = cause, status
        timeout_s = self._timeout_s()
        give_up_after(timeout_s, self._give_up)
        self._run.cancel()
        return timeout_s


def give_up_after(timeout_s: float, give_up: Callable[[], None]) -> None:
    """Call the function ``give_up`` after ``timeout_s`` seconds, on a daemon thread."""
    timer = threading.Timer(timeout_s, give_up)
    timer.daemon = True
    timer.start()
