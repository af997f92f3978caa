"""Processes of this machine: waiting for their end, and the last lines of their logs. Loads the standard library only.

The kernel wakes whoever waits, through a pid file descriptor, so that a death is noticed when it happens. The watch
works for any process, child or not; a process that has ended already counts as ended.
"""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import Sequence
from contextlib import ExitStack

NUM_TAIL_LINES = 20
_TAIL_BYTES = 16_384


async def process_end(pid: int) -> None:
    """Wait until a process has ended; a zombie counts as ended, and is not reaped."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def wait_for_first_end(pids: Sequence[int]) -> int:
    """Block until one of these processes has ended.

    Args:
        pids: Process ids on this machine; they need not be children of this process.

    Returns:
        The id of one that has ended.
    """
    with ExitStack() as opened:
        waiting = select.poll()
        pid_of = {}
        for pid in pids:
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                return pid
            opened.callback(os.close, descriptor)
            waiting.register(descriptor, select.POLLIN)
            pid_of[descriptor] = pid
        return pid_of[waiting.poll()[0][0]]


def last_lines(path: str, num_lines: int = NUM_TAIL_LINES) -> str:
    """The end of a log file, or a remark if the file cannot be read."""
    try:
        with open(path, "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - _TAIL_BYTES))
            text = log.read().decode("utf-8", "backslashreplace")
    except OSError as error:
        return f"(no log at {path}: {error.strerror})"
    return "\n".join(text.splitlines()[-num_lines:]) or "(empty)"
