"""The stacks of all threads of a run's processes, written when a deadline is missed.

Each process of a run calls `listen`, and from then on writes its stacks to a file of its own when it gets a signal. The
handler is C code (`faulthandler`). So a process also answers while it is blocked in a library, or computes and does not
release the interpreter. Every missed deadline is raised as an error of `missed`, which asks the processes of this host.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from asyncrl.core.errors import DeadlineError

logger = logging.getLogger(__name__)

FOLDER = Path("logs", "stacks")
"""The files' folder in the run's folder. Example of a file: ``logs/stacks/learner-0-4711.log`` of process 4711."""
_SIGNAL = signal.SIGUSR2
_ANSWER_S = 0.25
"""Pause after the question: its sender may kill the processes next."""
_REST_S = 10.0
"""A process asks again after this time at the earliest. Many requests can miss their deadlines at once."""

_file: TextIO | None = None
_asked_s = -_REST_S


def listen(run_dir: Path, process: str) -> None:
    """Write the stacks of this process to ``run_dir`` when they are asked for. Without effect if it listens already.

    If the folder is not writable, the process does not listen and logs a warning.
    """
    global _file
    if _file is not None:
        return
    path = run_dir.resolve() / FOLDER / f"{process}-{os.getpid()}.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _file = path.open("a")
    except OSError as error:
        logger.warning("%s does not write its stacks: cannot write to %s: %s", process, path.parent, error.strerror)
        return
    faulthandler.register(_SIGNAL, file=_file, all_threads=True)


def stop() -> None:
    """End `listen`. Removes the empty files of processes that have ended, too."""
    global _file
    if _file is None:
        return
    faulthandler.unregister(_SIGNAL)
    folder = Path(_file.name).parent
    _file.close()
    _file = None
    for path in folder.glob("*.log"):
        with suppress(FileNotFoundError):
            if path.stat().st_size == 0 and not _is_written_by(path, _pid_of(path)):
                path.unlink()


def missed(message: str, details: str = "") -> DeadlineError:
    """The error of a missed deadline. The processes of the run on this host write their stacks first.

    The error has the message, the folder of the stacks, the processes that did not answer, and then ``details``. In a
    process that does not `listen`, it has the message and the details.
    """
    global _asked_s
    if _file is None:
        return DeadlineError(message + details)
    folder, silent = Path(_file.name).parent, ""
    if time.monotonic() - _asked_s >= _REST_S:
        silent = ", ".join(_ask(folder, message))
        _asked_s = time.monotonic()
    silent = silent and f" (no answer of {silent})"
    return DeadlineError(f"{message}; the stacks of this host's processes are in {folder}{silent}{details}")


def _ask(folder: Path, message: str) -> list[str]:
    """Ask every process for its stacks. Returns the processes that did not answer."""
    asked = {path: _pid_of(path) for path in sorted(folder.glob("*.log")) if _is_written_by(path, _pid_of(path))}
    sizes = {}
    for path, pid in asked.items():
        with path.open("a") as file:
            file.write(f"\n== {time.strftime('%Y-%m-%d %H:%M:%S')}: {message}\n")
            if pid == os.getpid():
                _write_tasks(file)
        sizes[path] = path.stat().st_size
        with suppress(ProcessLookupError):
            os.kill(pid, _SIGNAL)
    time.sleep(_ANSWER_S)
    return [f"{path.stem} ({_state_of(asked[path])})" for path, size in sizes.items() if path.stat().st_size == size]


def _write_tasks(file: TextIO) -> None:
    """Write the stacks of the tasks of this thread's event loop, if there is one."""
    with suppress(RuntimeError):
        for task in asyncio.all_tasks():
            task.print_stack(file=file)


def _pid_of(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])


def _is_written_by(path: Path, pid: int) -> bool:
    """Whether a process has the file open. Otherwise the number may be that of another process by now."""
    with suppress(OSError):
        return any(link.readlink() == path for link in Path(f"/proc/{pid}/fd").iterdir())
    return False


def _state_of(pid: int) -> str:
    """The state of a process by its name in Linux. Example: ``T (stopped)``."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("State:"))
    return "ended"
