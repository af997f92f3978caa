"""What a worker wrote before it died: in a log file of its own, or in the files that Ray keeps of its output."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray._private import state as ray_state
from ray._private import worker as ray_worker
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from asyncrl.protocol.log_tail import last_lines

_REMOTE_READ_TIMEOUT_S = 10.0
_RAY_MARKS = (":job_id:", ":actor_name:", ":task_name:")


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


def last_words_of(worker: Any, log_file: str | None) -> Callable[[], str]:
    """Reads the end of what an actor wrote, on whichever node it ran, with the paths of the files.

    Args:
        worker: The actor's handle.
        log_file: Where it writes on its node; None where Ray keeps its output.
    """
    return partial(_read_last_words, worker._actor_id.hex(), log_file)


def _read_last_words(actor_id: str, log_file: str | None) -> str:
    if not ray.is_initialized():
        return f"{log_file}:\n{last_lines(log_file)}" if log_file else "its output: (Ray is shut down)"
    actor = ray_state.actors(actor_id)
    if not actor:
        return "its output: (Ray does not know the actor)"
    if not actor["Pid"]:
        return "its output: (it never ran)"
    node_id = actor["Address"]["NodeID"]
    if node_id == ray.get_runtime_context().get_node_id():
        return tail_of(log_file, actor["Pid"])
    there = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
    reading = ray.remote(num_cpus=0)(tail_of).options(scheduling_strategy=there).remote(log_file, actor["Pid"])
    try:
        return ray.get(reading, timeout=_REMOTE_READ_TIMEOUT_S)
    except RayError as error:
        where = log_file or "its output"
        return f"{where}: (cannot be read, its node does not answer: {type(error).__name__})"


def tail_of(log_file: str | None, pid: int) -> str:
    """The paths and ends of what a process of this node wrote: its log, or else Ray's files of its output."""
    if log_file is not None:
        return f"{log_file}:\n{last_lines(log_file)}"
    node: Any = ray_worker._global_node
    logs = Path(node.get_logs_dir_path())
    tails = {path: _without_marks(last_lines(str(path))) for path in sorted(logs.glob(f"worker-*-{pid}.*"))}
    return "\n".join(f"{path}:\n{tail}" for path, tail in tails.items() if tail) or f"{logs}: (nothing of pid {pid})"


def _without_marks(text: str) -> str:
    """The lines that the worker wrote; Ray's own say which job and actor the file is of."""
    return "\n".join(line for line in text.splitlines() if line.strip() and not line.startswith(_RAY_MARKS))
