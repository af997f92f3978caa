"""Who obeys SIGINT and SIGTERM: of all processes of a run only its supervisor does.

A scheduler (``scancel``) or systemd sends SIGTERM to every process of a run at once. The controller blocks both
signals, and every thread and process inherits that, Ray's daemons included. Each process ends by what its owner does: a
closed pipe, another signal, SIGKILL, or the kernel's signal at its owner's death.
"""

from __future__ import annotations

import os
import signal
from multiprocessing import resource_tracker
from typing import Any

STOP_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM})


def leave_stop_to_owner() -> None:
    """Block the stop signals in this thread, and in the threads and processes that it starts from now on.

    Python's resource tracker starts first: the thread that starts it unblocks both signals afterwards (Python < 3.13).
    """
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def keep_stop_blocked() -> None:
    """As `leave_stop_to_owner`, where this process has inherited that the stop signals are blocked; else nothing."""
    if signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        leave_stop_to_owner()


def release_resource_tracker() -> None:
    """Let Python's resource tracker clean up and exit, unless a child of this process still uses it."""
    tracker: Any = resource_tracker._resource_tracker
    if tracker._fd is not None:
        os.close(tracker._fd)
        tracker._fd = None


def outlive_stop() -> None:
    """Ignore SIGTERM in this process alone: programs that it starts obey both stop signals, and so do forked children.

    Code of users may end its own subprocesses by SIGTERM, which a mask that they inherit would prevent. Call it in the
    main thread before there are others.
    """
    signal.signal(signal.SIGTERM, _ignore)  # a handler, since SIG_IGN would be inherited
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
