"""Measures the time from the command to the end of the first learner step, and the time of each part of the start.

``python -m benchmarks.start_up`` runs the quickstart twice for one step, in a new folder. The first run makes the
warm-started policy, and the second run reuses this policy. ``--engine`` is ``sglang`` or ``transformers``. The
arguments after the options are options of the run. Wall times are valid only on an idle machine. ``cpu_s`` is the CPU
time of all processes of the run until the first step ends. Other work of the machine changes ``cpu_s`` less than it
changes wall times.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.report import Target, print_report

TIMEOUT_S = 600
_READY = re.compile(r"^\[ *([\d.]+) s\] (.*): ready after ([\d.]+) s$")
_WALL_S = {"transformers": 8.0, "sglang": 20.0}


@dataclass(frozen=True, kw_only=True)
class StartUp:
    """The times of one start of a run.

    Attributes:
        first_step_s: Seconds from the command to the end of the first learner step.
        cpu_s: CPU seconds of all processes until the end of the first learner step.
        parts: Maps the name of each part of the start to a pair: the seconds from the command until the part was ready,
            and the seconds that the run waited for the part.
    """

    first_step_s: float
    cpu_s: float
    parts: dict[str, tuple[float, float]]


def start(engine: str, output_dir: Path, overrides: Sequence[str]) -> StartUp:
    """Run the quickstart for one step, and return the times of the start. ``overrides`` are options of the run."""
    command = [sys.executable, "-m", "asyncrl", "train", "total_steps=1", f"rollout_fleet.engine={engine}"]
    began_s = time.monotonic()
    run = subprocess.Popen(
        [*command, f"output_dir={output_dir}", "evaluation.enabled=false", *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    lines, first_step_s, cpu_s, parts = [], None, 0.0, {}
    assert run.stdout is not None
    for line in run.stdout:
        lines.append(line)
        if "] step 1/" in line:
            first_step_s, cpu_s = time.monotonic() - began_s, _cpu_s(psutil.Process(run.pid))
        if found := _READY.match(line.strip()):
            parts[found[2]] = float(found[1]), float(found[3])
    if run.wait(TIMEOUT_S) or first_step_s is None:
        raise RuntimeError(f"the run ended with {run.returncode}:\n{''.join(lines)}"[-4000:])
    return StartUp(first_step_s=first_step_s, cpu_s=cpu_s, parts=parts)


def _cpu_s(run: psutil.Process) -> float:
    """Return the CPU seconds of the processes of a run, including ended child processes."""
    used = 0.0
    for process in (run, *run.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            used += sum(process.cpu_times()[:4])  # User and system time of the process and of its ended children.
    return used


def main() -> int:
    """Measure two starts, and print the report. Return 0 if the target is met, else 1."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.start_up", description="Command to first step.")
    parser.add_argument("--engine", choices=sorted(_WALL_S), default="transformers")
    parser.add_argument("overrides", nargs="*", help="further options of the run")
    options = parser.parse_args()
    engine, overrides = options.engine, options.overrides
    with tempfile.TemporaryDirectory(prefix="asyncrl-start-") as folder:
        starts = {name: start(engine, Path(folder), overrides) for name in ("with a warm start", "reusing it")}
    rows = {}
    for name, one in starts.items():
        rows[name] = f"first step after {one.first_step_s:.1f} s, {one.cpu_s:.1f} CPU seconds"
        for part, (at_s, took_s) in one.parts.items():
            rows[f"{name}: {part}"] = f"ready at {at_s:.1f} s, after {took_s:.1f} s"
    first, again = starts.values()
    figures = {
        "first_step_s": first.first_step_s,
        "first_step_reusing_s": again.first_step_s,
        "cpu_s": first.cpu_s,
        "cpu_reusing_s": again.cpu_s,
    }
    targets = {"first_step_reusing_s": Target(at_most=_WALL_S[engine])}
    title = " ".join([f"start-up of the quickstart with {engine}", *overrides])
    return 0 if print_report(title, rows, figures, targets, baseline="none") else 1


if __name__ == "__main__":
    sys.exit(main())
