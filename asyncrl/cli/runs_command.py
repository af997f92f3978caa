"""``asyncrl runs``: list the runs in a folder, each with its ``asyncrl train`` processes (lives) and checkpoints."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from asyncrl.core.errors import with_exit_status
from asyncrl.metrics import LifeState, counted
from asyncrl.run.run_lives import Life, find_runs

_UNITS = ("B", "KB", "MB", "GB", "TB")


@with_exit_status
def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``asyncrl runs`` and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="asyncrl runs", description="List runs, their lives and their checkpoints; the newest run is the last."
    )
    parser.add_argument("folder", type=Path, nargs="?", default=Path("outputs"), help="default: outputs")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    options = parser.parse_args(arguments)
    if not options.folder.is_dir():
        raise ValueError(f"{options.folder} must be a folder with runs, such as outputs/; name another folder")
    runs, damaged = find_runs(options.folder)
    if options.json:
        sys.stdout.write(json.dumps([[asdict(life) for life in run] for run in runs], default=str) + "\n")
    else:
        lines = [line for run in runs for line in _lines(run)]
        sys.stdout.write("\n".join([*lines, f"{counted(len(runs), 'run')} in {options.folder}", ""]))
    for error in damaged:
        sys.stderr.write(f"error: {error}\n")
    return 2 if damaged else 0


def _lines(run: Sequence[Life]) -> list[str]:
    lines = [f"{run[0].folder}" + f" ({len(run)} lives)" * (len(run) > 1)]
    for life in run:
        steps = f"{life.num_steps} of {life.total_steps} steps"
        resumed = f", continues {life.record.resumed}" * bool(life.record.resumed)
        where = f" ({life.record.host})" * (life.state is LifeState.elsewhere)
        lines.append(f"  {life.folder.name}  {life.state}{where}, {steps}, {size(life.num_bytes)}{resumed}")
        for one in life.checkpoints:
            lacks = f", incomplete: without {', '.join(one.missing)}" * bool(one.missing)
            lines.append(f"    {one.path}  {size(one.num_bytes)}{lacks}")
    return lines


def size(num_bytes: float) -> str:
    """Return a number of bytes as readable text. Example: 1234567 gives ``1.23 MB``."""
    for unit in _UNITS:
        if num_bytes < 1000 or unit == _UNITS[-1]:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    raise AssertionError("the last unit returns")
