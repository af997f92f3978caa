"""A worker's own log file: everything the process writes goes there, and its end is what an error shows."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from asyncrl.protocol.remote import WorkerIdentity

NUM_TAIL_LINES = 20
_TAIL_BYTES = 16_384
_REMOTE_READ_TIMEOUT_S = 10.0


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


def identity_with_log(group: str, rank: int, node: str, node_id: str, log_file: str | None) -> WorkerIdentity:
    """A worker's identity whose last words are the end of its log, wherever it ran."""
    last_words = None if log_file is None else partial(last_lines_on, node_id, log_file)
    return WorkerIdentity(group=group, rank=rank, node=node, last_words=last_words)


def last_lines(path: str, num_lines: int = NUM_TAIL_LINES) -> str:
    """The end of a log file; a remark in its place where the file cannot be read."""
    try:
        with open(path, "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - _TAIL_BYTES))
            text = log.read().decode("utf-8", "backslashreplace")
    except OSError as error:
        return f"(no log at {path}: {error.strerror})"
    return "\n".join(text.splitlines()[-num_lines:]) or "(empty)"


def last_lines_on(node_id: str, path: str) -> str:
    """The path and end of a log file on another node; a remark in its place where the node does not answer."""
    return f"{path}:\n{_read_on(node_id, path)}"


def _read_on(node_id: str, path: str) -> str:
    if Path(path).exists() or not ray.is_initialized() or node_id == ray.get_runtime_context().get_node_id():
        return last_lines(path)
    there = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
    reading = ray.remote(num_cpus=0)(last_lines).options(scheduling_strategy=there).remote(path)
    try:
        return ray.get(reading, timeout=_REMOTE_READ_TIMEOUT_S)
    except RayError as error:
        return f"(log {path} cannot be read, its node does not answer: {type(error).__name__})"
