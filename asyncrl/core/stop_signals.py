"""SIGINT and SIGTERM in the processes of a run: only the supervisor handles them.

A scheduler (``scancel``) or systemd sends SIGTERM to every process of a run at once. The controller blocks both
signals, and its threads and child processes inherit the mask, including Ray's daemons. The parent of each process stops
that process: it closes a pipe, or sends another signal. The kernel signals a process whose parent died.
"""

from __future__ import annotations

import os
import signal
from multiprocessing import resource_tracker
from typing import Any

STOP_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM})


def leave_stop_to_owner() -> None:
    """Block the stop signals in this thread, and in the threads and processes that it starts later.

    Starts Python's resource tracker first, because starting the tracker unblocks both signals (Python < 3.13).
    """
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def keep_stop_blocked() -> None:
    """Call `leave_stop_to_owner` if this process inherited blocked stop signals; otherwise do nothing."""
    if signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        leave_stop_to_owner()


def release_resource_tracker() -> None:
    """Let Python's resource tracker clean up and exit. It stays while a child of this process uses it."""
    tracker: Any = resource_tracker._resource_tracker
    if tracker._fd is not None:
        os.close(tracker._fd)
        tracker._fd = None


def outlive_stop() -> None:
    """Ignore SIGTERM in this process. Started programs and forked children still obey both stop signals.

    A user's code may stop its own subprocesses with SIGTERM; an inherited mask would prevent that. Call this in the
    main thread, before other threads start.
    """
    signal.signal(signal.SIGTERM, _ignore)  # a handler: children would inherit SIG_IGN
    os.register_at_fork(before=_hold_back, after_in_child=_obey, after_in_parent=_let_through)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _hold_back() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _let_through() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _obey() -> None:
    if signal.getsignal(signal.SIGTERM) is _ignore:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _let_through()


def _ignore(*_: object) -> None:
    pass
