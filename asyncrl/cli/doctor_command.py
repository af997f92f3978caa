"""``asyncrl doctor`` checks this machine; ``asyncrl doctor RUN`` shows the state of a run, its alarms and errors.

The check of the machine takes about ten seconds, and starts a Ray cluster with one CPU. The exit status is 1 if a check
has failed, or if an alarm of the run has not ended.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from asyncrl.cli.compose import read_config
from asyncrl.core.errors import with_exit_status
from asyncrl.core.host import files_below, own_python, ray_folder, visible_gpus
from asyncrl.gpu_check.program import Check, Result, State, results_of, stack
from asyncrl.gpu_check.tasks import TOY, Setup
from asyncrl.metrics import RunLimits, counted, read_alarms, read_json, read_life
from rollout_fleet.sandbox import Sandbox, SandboxError

MAX_CLOCK_GAP_S = 2.0
"""Largest allowed difference between this host's clock and the modification time of a new file, in seconds."""
MIN_DISK_BYTES = 10 << 30
_TIMEOUT_S = 60.0
_QUIET_S = 60.0
"""A run without ``summary.json`` counts as running only if a file in its folder changed within this many seconds."""
_SHOWN_ERRORS = 5


@with_exit_status
def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``asyncrl doctor`` and return the exit status."""
    parser = argparse.ArgumentParser(prog="asyncrl doctor", description="Check this machine, or a run.")
    parser.add_argument("run", nargs="?", type=Path, help="the run's folder, <output_dir>/<experiment>/<time>")
    parser.add_argument("--output", type=Path, default=Path("outputs"), help="where runs are written; default: outputs")
    options = parser.parse_args(arguments)
    if options.run is None:
        return check_machine(options.output)
    lines, is_well = examine(options.run)
    sys.stdout.write("\n".join([*lines, ""]))
    return 0 if is_well else 1


# The machine


def check_machine(output: Path) -> int:
    """Check this machine, and print one line per result. Return the exit status: 1 if a check failed.

    ``output`` is the folder for runs. One of the checks measures the free disk space in this folder.
    """
    gpus = visible_gpus()
    with tempfile.TemporaryDirectory(prefix="asyncrl-doctor-") as folder:
        setup = Setup(
            device="cuda" if gpus else "cpu",
            num_gpus=gpus or 1,
            sizes=TOY,
            model="",
            folder=folder,
            timeout_s=_TIMEOUT_S,
        )
        checks = (
            Check(name="stack", run=stack),
            Check(name="network", run=lambda _: network()),
            Check(name="disk", run=lambda _: disk(output)),
            Check(name="Ray", run=lambda _: ray_starts(), needs=("ray",)),
            Check(name="sandbox", run=lambda _: sandbox()),
        )
        num_failed = 0
        for result in (result for check in checks for result in results_of(check, setup)):
            num_failed += result.state is State.failed
            sys.stdout.write(result.line() + "\n")
            sys.stdout.flush()
    sys.stdout.write(f"\n{counted(num_failed, 'check')} failed\n")
    return 1 if num_failed else 0


def network() -> Iterator[Result]:
    """Check that connections over the loopback interface work, and that ``localhost`` resolves to this interface."""
    remedy = "allow loopback connections in the firewall or the container"
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = server.getsockname()
            with socket.create_connection(address, timeout=5.0):
                yield Result.of("loopback", True, f"a free port, {address[1]}, accepts connections")
    except OSError as error:
        yield Result.of("loopback", False, str(error), remedy)
    resolved = socket.gethostbyname("localhost")
    yield Result.of("localhost", resolved.startswith("127."), resolved, "add '127.0.0.1 localhost' to /etc/hosts")


def disk(output: Path) -> Iterator[Result]:
    """Check the free disk space in the folder ``output``, and that its file system's clock agrees with this host's."""
    place = next(path for path in (output.resolve(), *output.resolve().parents) if path.exists())
    free = shutil.disk_usage(place).free
    yield Result.of("disk", free >= MIN_DISK_BYTES, f"{free / 2**30:.1f} GiB free in {place}", "another output_dir")
    with tempfile.NamedTemporaryFile(dir=place) as file:
        gap_s = abs(os.fstat(file.fileno()).st_mtime - time.time())
    remedy = "synchronize the clocks of this host and its file server"
    yield Result.of("clock", gap_s <= MAX_CLOCK_GAP_S, f"new files are {gap_s:.3f} s from this host's clock", remedy)


def ray_starts() -> Iterator[Result]:
    """Check that a Ray cluster starts on this machine and runs a task."""
    import ray

    began_s = time.monotonic()
    quiet: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": 40}
    ray.init(address="local", num_cpus=1, num_gpus=0, runtime_env=own_python(), _temp_dir=ray_folder(), **quiet)
    try:
        pid = ray.get(ray.remote(lambda: os.getpid()).remote(), timeout=_TIMEOUT_S)
        number = f"{ray.__version__}: a task ran in process {pid} after {time.monotonic() - began_s:.1f} s"
        yield Result.of("Ray", pid != os.getpid(), number)
    finally:
        ray.shutdown()


def sandbox() -> Iterator[Result]:
    """Check whether this machine has a sandbox. Rewards and tools need a sandbox to run code of the policy.

    If there is no sandbox, the result is ``skipped``, not ``failed``.
    """
    try:
        kind = asyncio.run(Sandbox().start())
    except SandboxError as error:
        yield Result(name="sandbox", state=State.skipped, number=f"no code of the policy can run: {error}")
    else:
        yield Result.of("sandbox", True, str(kind))


# A run


def examine(run_dir: Path) -> tuple[list[str], bool]:
    """Return a pair: lines for the user about a run's state, alarms and errors; and True if all alarms have ended.

    An alarm is a warning about the training. Raises `ValueError` if ``run_dir`` is not the folder of a run, or if a
    file in this folder is damaged. The message names the damaged file.
    """
    config = read_config(run_dir)
    limits = RunLimits(
        total_steps=config.total_steps,
        max_lag=config.buffer.max_lag,
        compares_groups=config.algorithm.compares_groups,
    )
    alarms = read_alarms(run_dir, limits)
    lines = [f"{run_dir}: {_state(run_dir)}, {counted(alarms.num_steps, 'step')} of {config.total_steps} recorded"]
    lasting, over = alarms.current, [alarm for alarm in alarms.history if alarm.last_step is not None]
    lines += [f"ALARM  {alarm}" for alarm in lasting] + [f"over   {alarm}" for alarm in over]
    if not alarms.history:
        lines.append("no alarm")
    for path in sorted((run_dir / "logs").glob("*.log")):
        found = [line for line in path.read_text(errors="replace").splitlines() if "ERROR" in line or "Error:" in line]
        if found:
            lines.append(f"{path}: {counted(len(found), 'line')} with errors, the last ones:")
            lines += [f"  {line[:300]}" for line in found[-_SHOWN_ERRORS:]]
    return lines, not lasting


def _state(run_dir: Path) -> str:
    if read_json(run_dir / "summary.json") is not None:
        return "ended"
    if (life := read_life(run_dir)) is not None and life.status is not None:
        return f"{life.end} without a summary"
    newest = max((state.st_mtime for _, state in files_below(run_dir)), default=0.0)
    quiet_s = time.time() - newest
    return "live" if quiet_s < _QUIET_S else f"without a summary, and nothing was written for {quiet_s:.0f} s"
