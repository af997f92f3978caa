"""The end of a log file, which is what an error shows of it. Loads nothing, so that a supervisor may use it."""

from __future__ import annotations

import os

NUM_TAIL_LINES = 20
_TAIL_BYTES = 16_384


def last_lines(path: str, num_lines: int = NUM_TAIL_LINES) -> str:
    """The end of a log file; a remark in its place where the file cannot be read."""
    try:
        with open(path, "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - _TAIL_BYTES))
            text = log.read().decode("utf-8", "backslashreplace")
    except OSError as error:
        return f"(no log at {path}: {error.strerror})"
    return "\n".join(text.splitlines()[-num_lines:]) or "(empty)"
