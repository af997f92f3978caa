"""Measures the share of work that a run keeps when it is resumed, and the cost of checkpoints.

``python -m benchmarks.resume`` trains the quickstart with large batches on the in-process engine. SIGTERM stops one run
between two checkpoints, and SIGKILL ends all processes of another run between two checkpoints. Then the benchmark
resumes both runs. A token that the policy generated before the stop is lost in two cases: the checkpoint does not
include the token, or the resumed run drops the token for one of the `LOST_REASONS`. Finally, a buffer server starts
from a checkpoint of ``--payload-mb`` MB. The benchmark compares the server's memory with the size of its groups. The
arguments after the options are options of the run. Wall times are valid only on an idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from asyncrl.core.types import Prompt
from benchmarks.report import Target, print_report
from buffer import BufferConfig, BufferSupervisor, ControlClient, WorkerClient
from learner.checkpoint_folder import newest_checkpoint, read_progress
from tests.support.buffer_groups import prompt, rollout

EVERY_STEPS = 10
LOST_REASONS = ("rewound", "resume", "lost")
_TIMEOUT_S = 900.0
_GROUP_TOKENS = 100_000
_BASE = [
    "rollout_fleet.engine=transformers",
    "sft.enabled=false",
    "evaluation.enabled=false",
    "learner.restarts=0",
    # Use large batches, with which a step takes about a second. A step of the quickstart is shorter than a checkpoint.
    "algorithm.groups_per_step=256",
    "rollout_fleet.groups_in_flight=128",
]


@dataclass(frozen=True, kw_only=True)
class Kept:
    """The measurements of a run that was stopped and resumed.

    Attributes:
        share: Share (0 to 1) of the tokens generated before the stop that the resumed run kept.
        steps: A pair: how many learner steps the run made before the stop, and how many the checkpoint includes.
        start_s: Seconds from the first command to the end of the run's first learner step.
        resume_s: Seconds from the command that resumes the run to the end of the next learner step.
        stall_s: A pair: seconds that a rank waits for one checkpoint, and seconds of a step. None if not measured.
    """

    share: float
    steps: tuple[int, int]
    start_s: float
    resume_s: float
    stall_s: tuple[float, float] | None

    def __str__(self) -> str:
        ended, saved = self.steps
        stall = (
            "; a checkpoint takes {:.3f} s of a rank, and a step {:.2f} s".format(*self.stall_s) if self.stall_s else ""
        )
        return (
            f"{100 * self.share:.2f}% of the tokens kept; stopped in step {ended}, resumed at step {saved}; the first "
            f"step ended after {self.start_s:.1f} s, after the resume {self.resume_s:.1f} s{stall}"
        )


class Life:
    """A training process that starts or resumes a run, and the lines of its output."""

    def __init__(self, output_dir: Path, overrides: Sequence[str]) -> None:
        command = [sys.executable, "-m", "asyncrl", "train", f"output_dir={output_dir}", *_BASE, *overrides]
        self._began_s = time.monotonic()
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
        self.lines: list[str] = []

    def wait_for(self, words: str) -> float:
        """Wait for a line of output that contains ``words``; return the seconds since the start of the process."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if words in line:
                return time.monotonic() - self._began_s
        raise RuntimeError(f"the run ended before it printed {words!r}:\n{''.join(self.lines[-20:])}")

    def wait_for_step(self, count: int) -> None:
        """Wait until ``count`` learner steps are done.

        This method reads the steps from ``metrics.jsonl``, because the process does not print a line for each step.
        """
        command = ["tail", "--lines=+1", "--follow=name", "--retry", f"--pid={self.process.pid}"]
        tail = subprocess.Popen([*command, str(self.run_dir / "metrics.jsonl")], stdout=subprocess.PIPE, text=True)
        with tail:
            assert tail.stdout is not None
            reached = any(json.loads(line)["step"] + 1 >= count for line in tail.stdout)
            tail.kill()
        if not reached:
            raise RuntimeError(f"the run ended before step {count}; its folder is {self.run_dir}")

    @property
    def run_dir(self) -> Path:
        """The folder of the run, as the training process has printed it."""
        return Path(next(line for line in self.lines if " writing to " in line).partition(" writing to ")[2].strip())

    def kill(self) -> None:
        """Kill the training process and all its child processes with SIGKILL."""
        family = [self.process.pid, *(one.pid for one in psutil.Process(self.process.pid).children(recursive=True))]
        for pid in family:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(_TIMEOUT_S)

    def finish(self) -> int:
        """Wait until the process ends and read its output; return the exit status."""
        assert self.process.stdout is not None
        self.lines += list(self.process.stdout)
        return self.process.wait(_TIMEOUT_S)


def measure(number: signal.Signals, folder: Path, steps: int, overrides: Sequence[str]) -> Kept:
    """Stop a run with the signal ``number`` after ``steps`` steps, then resume the run for a few steps.

    Return the share of the generated tokens that the resumed run kept, and the times before and after the stop.
    """
    options = [f"checkpoint.every_steps={EVERY_STEPS}", *overrides]
    first = Life(folder, ["total_steps=100000", *options])
    start_s = first.wait_for(" step 1/")
    first.wait_for_step(steps)
    if number is signal.SIGKILL:
        first.kill()
    else:
        first.process.send_signal(number)
        first.finish()
    metrics = [json.loads(line) for line in (first.run_dir / "metrics.jsonl").read_text().splitlines()]
    checkpoint = newest_checkpoint(first.run_dir / "checkpoints")
    assert checkpoint is not None, "".join(first.lines[-20:])
    generated = metrics[-1]["generated_tokens"]
    stall = None
    if number is not signal.SIGKILL:
        summary = json.loads((first.run_dir / "summary.json").read_text())
        generated = summary["tokens"]["generated"]
        stall = _stall(summary, metrics)
    saved = read_progress(checkpoint).version
    second = Life(folder, [f"total_steps={saved + 3}", f"checkpoint.resume={checkpoint}", *options])
    resume_s = second.wait_for(f" step {saved + 1}/")
    if second.finish() != 0:
        raise RuntimeError("".join(second.lines[-20:]))
    tokens = json.loads((second.run_dir / "summary.json").read_text())["tokens"]
    unsaved = max(0, generated - read_progress(checkpoint).run["tokens_generated"])
    lost = unsaved + sum(tokens["dropped_by_reason"].get(reason, 0) for reason in LOST_REASONS)
    return Kept(
        share=1.0 - lost / generated,
        steps=(metrics[-1]["step"] + 1, saved),
        start_s=start_s,
        resume_s=resume_s,
        stall_s=stall,
    )


def _stall(summary: dict[str, Any], metrics: Sequence[dict[str, Any]]) -> tuple[float, float] | None:
    """Return a pair: the seconds that a rank waits for one checkpoint, and the median seconds of a step.

    Return None if the run recorded no profile.
    """
    if summary["overlap"] is None:
        return None
    idle_s = summary["overlap"]["idle_s"]["learner"].get("checkpoint", 0.0)
    step_s = statistics.median(late - early for early, late in pairwise(one["time_s"] for one in metrics))
    return idle_s / max(1, len(metrics) // EVERY_STEPS), step_s


async def memory_vs_held(payload_mb: int, folder: Path) -> tuple[float, str]:
    """Measure the memory of a buffer server that starts from a checkpoint with ``payload_mb`` MB of groups.

    Return a pair: the server's memory divided by the bytes of the groups, and a text with both byte counts.
    """
    num_groups = max(1, payload_mb * 1_000_000 // (_GROUP_TOKENS * 13))
    options: dict[str, Any] = {
        # At max_lag 0, the buffer admits one batch, which has all groups. A larger max_lag makes leases slower.
        "max_lag": 0,
        "request_timeout_s": 120.0,
        "max_stored_bytes": 4 * payload_mb * 1_000_000,
    }
    part = folder / "v00000000"

    async def fill(client: ControlClient, worker: WorkerClient) -> None:
        prompts: list[Prompt] = [prompt(group_id) for group_id in range(num_groups)]
        await client.enqueue(prompts)
        for _ in prompts:
            (lease,) = await worker.lease(0, 1)
            await worker.put(rollout(lease, num_tokens=_GROUP_TOKENS))
        await client.checkpoint(part, 0, key="one")

    def serve(**more: Any) -> BufferSupervisor:
        return BufferSupervisor(
            BufferConfig(**options, **more), groups_per_step=num_groups, log_path=folder / "buffer.log"
        )

    with serve() as server:
        empty = _server_memory(folder)
        client, worker = ControlClient(server.connection.client()), WorkerClient(server.connection.client())
        await fill(client, worker)
        held = (await client.stats()).held_bytes
        await worker.close()
        await client.close()
    with serve(checkpoint=str(part)) as server:
        client = ControlClient(server.connection.client())
        await client.resume(0, key="one", tokens_generated=num_groups * _GROUP_TOKENS)
        assert (await client.stats()).held_bytes == held
        taken = _server_memory(folder) - empty
        await client.close()
    return taken / held, f"the restarted server takes {taken / 1e6:.0f} MB for groups of {held / 1e6:.0f} MB"


def _server_memory(folder: Path) -> int:
    """Return the resident bytes of the buffer server that this process has started."""
    (server,) = [one for one in psutil.Process().children(recursive=True) if "buffer.server" in " ".join(one.cmdline())]
    return server.memory_info().rss


def main() -> int:
    """Measure resumed runs and a resumed buffer, and print the report. Return 0 if every target is met, else 1."""
    parser = argparse.ArgumentParser(description="Measure what a resume keeps and what checkpoints cost.")
    parser.add_argument(
        "--steps", type=int, default=65, help="steps before SIGKILL, and half before SIGTERM (default 65)"
    )
    parser.add_argument("--payload-mb", type=int, default=200, help="payload of the restarted buffer (default 200)")
    parser.add_argument("overrides", nargs="*", help="further options of the runs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        stopped = measure(signal.SIGTERM, Path(folder, "stopped"), options.steps // 2, options.overrides)
        print(stopped, flush=True)
        killed = measure(signal.SIGKILL, Path(folder, "killed"), options.steps, options.overrides)
        print(killed, flush=True)
        Path(folder, "buffer").mkdir()
        memory, words = asyncio.run(memory_vs_held(options.payload_mb, Path(folder, "buffer")))
    figures = {
        "work_kept_at_sigterm": stopped.share,
        "work_kept_at_sigkill": killed.share,
        "checkpoint_stall_vs_step": stopped.stall_s and stopped.stall_s[0] / stopped.stall_s[1],
        "resume_to_first_step_vs_start": stopped.resume_s / stopped.start_s,
        "restart_memory_vs_held": memory,
    }
    targets = {
        "work_kept_at_sigterm": Target(at_least=1.0),
        "work_kept_at_sigkill": Target(at_least=0.9),
        "checkpoint_stall_vs_step": Target(at_most=0.05),
        "resume_to_first_step_vs_start": Target(at_most=1.1),
        "restart_memory_vs_held": Target(at_most=1.3),
    }
    rows = {"SIGTERM": str(stopped), "SIGKILL": str(killed), "buffer": words}
    what = f"work that a run keeps when it is resumed, with a checkpoint every {EVERY_STEPS} steps"
    return 0 if print_report(what, rows, figures, targets, baseline="the run before the stop") else 1


if __name__ == "__main__":
    sys.exit(main())
