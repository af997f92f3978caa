"""Ends the processes that a test session leaves behind, even if the session is killed.

Every process of a session inherits an environment variable with the session's name. At the end of the session,
`end_leftovers` ends the processes that still have the variable. If the session dies, a watcher process does the same.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

_VARIABLE = "ASYNCRL_TEST_SESSION"
_GRACE_S = 5.0
_STOP_S = 10.0


def name_session() -> str:
    """Return the name of this test session. All child processes that start after this call inherit the name."""
    return os.environ.setdefault(_VARIABLE, uuid.uuid4().hex)


def watch_session(name: str, *, grace_s: float = _GRACE_S) -> subprocess.Popen[bytes]:
    """Start the watcher process. If its standard input closes, the watcher ends the session's processes, then exits."""
    environment = {key: value for key, value in os.environ.items() if key != _VARIABLE}
    command = [sys.executable, __file__, name, str(grace_s)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, start_new_session=True)


def end_leftovers(name: str, *, grace_s: float = _GRACE_S) -> list[str]:
    """Wait ``grace_s`` seconds until the session's processes have ended. Terminate the others, and finally kill them.

    Returns:
        The command lines of the processes that this function had to end.
    """
    _, alive = psutil.wait_procs(list(_processes_of(name)), timeout=grace_s)
    words = []
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            words.append(" ".join(process.cmdline()) or process.name())
            process.terminate()
    psutil.wait_procs(alive, timeout=_STOP_S)
    while alive := list(_processes_of(name)):  # repeat, because a process can start new processes
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=5.0)
    return words


def shared_memory_of(processes: Iterable[psutil.Process]) -> set[int]:
    """Return the inodes of the files in shared memory that these processes map.

    Semaphores are identified by inode too, because the memory map of a process does not contain the name of their file.
    """
    inodes = set()
    for process in processes:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                fields = line.split(maxsplit=5)
                if fields[-1].startswith("/dev/shm/"):
                    inodes.add(int(fields[4]))
    return inodes


def left_in_shared_memory(inodes: set[int]) -> list[str]:
    """Return the names of the files in shared memory that have one of these inodes."""
    return [entry.name for entry in os.scandir("/dev/shm") if entry.inode() in inodes]


def _processes_of(name: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.environ().get(_VARIABLE) == name and not _ends_with_us(process):
                yield process


def _ends_with_us(process: psutil.Process) -> bool:
    """Return whether a process is a helper process of Python's multiprocessing.

    A helper process ends when the pipe to this process closes.
    """
    return process.ppid() == os.getpid() and any("from multiprocessing." in word for word in process.cmdline())


if __name__ == "__main__":
    with contextlib.suppress(OSError):
        sys.stdin.buffer.read()
    end_leftovers(sys.argv[1], grace_s=float(sys.argv[2]))
