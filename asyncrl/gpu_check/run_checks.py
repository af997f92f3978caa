"""Runs the quickstart training for ``asyncrl check-gpu``, and kills an engine during the run if a check requests it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from asyncrl.config import override_of
from asyncrl.gpu_check.tasks import Setup, TaskFailed

_SERVER = "sglang::scheduler"
_TAIL_LINES = 12
_STOP_S = 90.0
"""Longest time in seconds that a check waits for a run to stop. The run's own deadlines to stop are shorter."""
_NUM_STEPS = {"cuda": 40, "cpu": 6}


def quickstart(setup: Setup, name: str, *overrides: str, kill_engine: bool = False) -> Iterator[dict[str, Any]]:
    """Run the quickstart with the options ``overrides``. Yields the run's summary, with the added key ``steps``.

    ``name`` is the name of the run's folder. If ``kill_engine`` is true, kill the scheduler of an engine after the
    first step. The run must then continue.

    Raises:
        TaskFailed: the run failed or missed its deadline.
    """
    folder, log = Path(setup.folder, name), Path(setup.folder, f"{name}.log")
    metrics, num_steps = folder / "metrics.jsonl", _NUM_STEPS[setup.device]
    options = [
        override_of("run_dir", folder),
        override_of("output_dir", f"{setup.folder}/quickstart"),
        f"total_steps={num_steps}",
        f"learner.device={setup.device}",
        f"rollout_fleet.device={setup.device}",
        f"learner.dtype={setup.dtype}",
        "evaluation.num_samples=1",
        "data.eval_max_prompts=16",
        *overrides,
    ]
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "asyncrl", "train", *options], stdout=output, stderr=subprocess.STDOUT
        )
    ends_at, is_killed = time.monotonic() + setup.timeout_s, not kill_engine
    try:
        while process.poll() is None:
            if time.monotonic() > ends_at:
                raise TaskFailed(f"missed the deadline of {setup.timeout_s:g} s (--timeout-s); log: {log}")
            if not is_killed and metrics.exists() and metrics.stat().st_size:
                is_killed = _kill_a_server(process.pid)
            time.sleep(0.2)
        if process.returncode:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
            raise TaskFailed(f"exit status {process.returncode}; the end of {log}:\n{tail}")
    finally:
        if process.poll() is None:
            process.terminate()  # send SIGTERM, so that the run ends its own processes
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
    if not is_killed:
        raise TaskFailed("the run ended before its engine could be killed")
    yield {"steps": num_steps, **json.loads((folder / "summary.json").read_text())}


def _kill_a_server(pid: int) -> bool:
    """Kill one scheduler among the descendants of a process. Return whether a scheduler was killed."""
    for child in psutil.Process(pid).children(recursive=True):
        try:
            if _SERVER in " ".join(child.cmdline()) or _SERVER in child.name():
                child.kill()
                return True
        except psutil.Error:
            continue
    return False
