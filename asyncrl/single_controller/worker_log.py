"""A worker's own log file: everything the process writes goes there, and its end is what an error shows."""

from __future__ import annotations

import os
import sys
from pathlib import Path

NUM_TAIL_LINES = 20
_TAIL_BYTES = 16_384


def redirect_output(path: str) -> None:
    """Send stdout and stderr of this process, C++ and child processes included, to the end of a file."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115


def last_lines(path: str, num_lines: int = NUM_TAIL_LINES) -> str:
    """The end of a log file; a remark in its place where the file cannot be read."""
    try:
        with open(path, "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - _TAIL_BYTES))
            text = log.read().decode("utf-8", "backslashreplace")
    except OSError as error:
        return f"(no log at {path}: {error.strerror})"
    return "\n".join(text.splitlines()[-num_lines:]) or "(empty)"
