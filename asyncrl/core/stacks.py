"""After a missed deadline, makes the run's processes write the stacks of their threads to files.

A process writes its stacks when it gets the signal SIGUSR2. The signal handler is C code (`faulthandler`), so it also
runs while a library holds the GIL.
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
"""Folder of the stack files, relative to the run's folder. Example of a file for pid 4711: ``learner-0-4711.log``."""
_SIGNAL = signal.SIGUSR2
_ANSWER_S = 0.25
"""Time limit in seconds for the processes to write their stacks. After this time, the caller may kill the processes."""
_REST_S = 10.0
"""Shortest interval in seconds between two requests for stacks, because many calls can miss deadlines together."""

_file: TextIO | None = None
_asked_s = -_REST_S


def listen(run_dir: Path, process: str) -> None:
    """Make this process write the stacks of all its threads to a file whenever it receives SIGUSR2.

    The file is in the run's folder, ``run_dir``. The name of the file begins with ``process``. A second call has no
    effect. If the folder is not writable, the function only logs a warning.
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
    """Stop reacting to SIGUSR2. Remove the empty stack files of this process and of ended processes."""
    global _file, _asked_s
    if _file is None:
        return
    faulthandler.unregister(_SIGNAL)
    folder = Path(_file.name).parent
    _file.close()
    _file, _asked_s = None, -_REST_S
    for path in folder.glob("*.log"):
        with suppress(FileNotFoundError):
            if path.stat().st_size == 0 and not _is_written_by(path, _pid_of(path)):
                path.unlink()


def missed(message: str, details: str = "") -> DeadlineError:
    """Make all processes of the run on this host write their stacks. Return a `DeadlineError` for a missed deadline.

    The text of the error consists of ``message``, the folder with the stacks, and ``details``. If this process has not
    called `listen`, or asked for stacks less than 10 s ago, the function only returns the error.
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
    """Make every process of the run on this host write its stacks. Return the processes that did not write."""
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
    with suppress(RuntimeError):
        for task in asyncio.all_tasks():
            task.print_stack(file=file)


def _pid_of(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])


def _is_written_by(path: Path, pid: int) -> bool:
    """Return whether the process ``pid`` has the file open. If not, another process may have this id now."""
    with suppress(OSError):
        return any(link.readlink() == path for link in Path(f"/proc/{pid}/fd").iterdir())
    return False


def _state_of(pid: int) -> str:
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("State:"))
    return "ended"
