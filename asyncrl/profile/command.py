"""``asyncrl profile RUN`` prints tables that say why the learner ranks and the engines of a run were idle.

The command also writes ``overlap.json``, ``trace.json`` and ``report.html`` into the run's folder.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from asyncrl.core.errors import with_exit_status
from asyncrl.core.record import NONE
from asyncrl.profile.attribution import POOLS, Figures, OverlapReport
from asyncrl.profile.perfetto import trace_events
from asyncrl.profile.report import REPORT, write_report
from asyncrl.profile.trace import FOLDER, Trace

_SHOWN_STEPS = 8


def explain(run_dir: Path) -> OverlapReport:
    """Compute and return the overlap report of a run: why learner ranks and engines were idle.

    Also write ``overlap.json``, ``trace.json`` and ``report.html`` into the run's folder, each atomically.

    Raises:
        OSError: a file cannot be read or written.
        ValueError: another version of asyncrl wrote the record.
    """
    trace = Trace.load(run_dir)
    report = OverlapReport.of(trace)
    _write_whole(run_dir / "overlap.json", report.to_dict(), indent=1)
    torch_traces = [path.name for path in (run_dir / FOLDER).glob("torch-*.json.gz")]
    _write_whole(run_dir / "trace.json", trace_events(trace, torch_traces=torch_traces))
    write_report(run_dir, trace, report)
    return report


@with_exit_status
def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``asyncrl profile`` with the given command-line arguments; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="asyncrl profile",
        description="Show why the learner and the fleet were idle. The run may still be in progress.",
    )
    parser.add_argument("run", type=Path, help="the run's folder, <output_dir>/<experiment>/<time>")
    parser.add_argument("--json", action="store_true", help="print overlap.json instead of the table")
    parser.add_argument("--group", type=int, metavar="ID", help="print the history of one prompt group instead")
    args = parser.parse_args(arguments)
    if args.group is not None:
        sys.stdout.write("\n".join(history_of(Trace.load(args.run), args.group)) + "\n")
        return 0
    report = explain(args.run)
    if args.json:
        sys.stdout.write(json.dumps(report.to_dict(), indent=1) + "\n")
    else:
        show(report, Console(highlight=False, soft_wrap=True))
        sys.stdout.write(f"more: {args.run / REPORT}, and {args.run / 'trace.json'} for ui.perfetto.dev\n")
    return 0


def history_of(trace: Trace, group_id: int) -> list[str]:
    """Return one line of text per recorded event of a prompt group, in order of time.

    A line begins with the seconds since the first record of the run.

    Raises:
        ValueError: the record has no event of the group.
    """
    life = trace.groups.get(group_id)
    if life is None:
        known = f"{min(trace.groups)} to {max(trace.groups)}" if trace.groups else "none"
        raise ValueError(f"the record has no event of group {group_id}, only of the groups {known}")
    lines = []
    for stamp in life.stamps:
        attempt = f"attempt {stamp.attempt}" if stamp.attempt != NONE else ""
        version = f"version {stamp.version}" if stamp.version != NONE else ""
        details = [f"{name} {value}" for name, value in stamp.details.items()]
        what = ", ".join(filter(None, [attempt, version, *details]))
        lines.append(f"{(stamp.time - trace.start) / 1e9:10.3f} s  {stamp.event:12} {stamp.lane:14} {what}".rstrip())
    return lines


def show(report: OverlapReport, console: Console) -> None:
    """Print tables of busy and idle times to ``console``: for the whole run, and for each of the latest steps."""
    run = report.run
    if not run.num_steps:
        console.print("no learner step is finished yet")
        return
    lag = run.lag
    console.print(
        f"{run.num_steps} steps of {run.step_s:.3f} s; the slower pool alone would take {run.ideal_step_s:.3f} s"
    )
    console.print(f"overlap efficiency {run.efficiency:.2f}, utilisation of both pools {run.utilisation:.2f}")
    console.print(f"lag {lag.mean:.2f} = {lag.before_queue:.2f} before the queue + {lag.in_queue:.2f} in it")
    for pool in POOLS:
        console.print(_causes_table(run, pool))
    console.print(_steps_table(report))
    recorded = report.recorded
    if recorded["dropped_records"] or recorded["torn_files"]:
        console.print(
            f"{recorded['dropped_records']} records were dropped, {recorded['torn_files']} files are truncated"
        )


def _causes_table(run: Figures, pool: str) -> Table:
    time, lanes = run.pools[pool], run.num_lanes[pool]
    what = "ranks" if pool == "learner" else "engines"
    table = Table("state", "s per step", "share", title=f"{pool}: {lanes} {what}", title_justify="left")
    for state, total in (("busy", time.busy), *time.idle.items()):
        share = total / time.capacity if time.capacity else 0.0
        table.add_row(state, f"{share * run.step_s:.3f}", f"{share:.1%}")
    return table


def _steps_table(report: OverlapReport) -> Table:
    # Fold long names of causes in a narrow terminal, because Rich would cut them off by default.
    learner, fleet = (Column("waits most for", overflow="fold") for _ in POOLS)
    table = Table("step", "s", "learner", learner, "fleet", fleet, "lag", title_justify="left")
    for version, step in report.steps[-_SHOWN_STEPS:]:
        cells: list[str] = []
        for pool in POOLS:
            cells += [f"{step.pools[pool].utilisation:.0%}", next(iter(step.pools[pool].idle), "")]
        table.add_row(str(version), f"{step.duration * 1e-9:.3f}", *cells, f"{step.lag.mean:.2f}")
    return table


def _write_whole(path: Path, document: Any, indent: int | None = None) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(document, indent=indent) + "\n")
    os.replace(partial, path)
