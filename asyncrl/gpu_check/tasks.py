"""Runs each task of ``asyncrl check-gpu`` in new processes, because a task needs a GPU with free memory.

A task is a function of `learner_tasks` or `serving_tasks`. Rank 0 prints each measurement as a line that begins with
`MARK`.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from queue import Queue
from typing import Any

from asyncrl.core.host import end_with_parent

MARK = "@measured "
_TAIL_LINES = 12
_RENDEZVOUS_FILE = "ASYNCRL_RENDEZVOUS_FILE"  # copy the value, because to import `learner.config` is slow


class TaskFailed(Exception):
    """A process of a task failed, or the task missed its deadline."""


class EngineTest(StrEnum):
    """The kinds of tests in the task ``serving_tasks:serving``. Each measurement of the task names its kind."""

    start = "start"
    logprobs = "logprobs"
    weights = "weights"
    release = "release"
    damage = "damage"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the models and batches that the checks use.

    Attributes:
        hidden, mlp, heads, kv_heads, head_dim, layers, vocabulary: Sizes of the dense model.
        moe_hidden, experts, expert_mlp: Sizes of the mixture of experts. All other sizes equal the dense model's.
        head_vocabulary: Vocabulary size in the check of the log-prob kernel.
        length: Number of tokens of each sequence.
        num_steps: Number of learner steps that are measured.
        num_new_tokens: Number of tokens that the engine generates per sample.
    """

    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    vocabulary: int
    moe_hidden: int
    experts: int
    expert_mlp: int
    head_vocabulary: int
    num_sequences: int
    length: int
    num_steps: int
    num_new_tokens: int

    def budget(self, num_ranks: int) -> int:
        """Return the largest number of tokens in a micro-batch of a rank.

        The number is half of the tokens of a batch on one rank, but at least the tokens of one sequence.
        """
        return max(self.num_sequences * self.length // num_ranks // 2, self.length)


FULL = Sizes(
    hidden=4096,
    mlp=12288,
    heads=32,
    kv_heads=8,
    head_dim=128,
    layers=4,
    vocabulary=32768,
    moe_hidden=2048,
    experts=128,
    expert_mlp=768,
    head_vocabulary=151936,
    num_sequences=16,
    length=1024,
    num_steps=4,
    num_new_tokens=256,
)
"""The layer sizes of Qwen3-8B (dense) and Qwen3-30B-A3B (mixture of experts), but with only four layers."""

TOY = Sizes(
    hidden=64,
    mlp=128,
    heads=4,
    kv_heads=2,
    head_dim=16,
    layers=2,
    vocabulary=64,
    moe_hidden=64,
    experts=4,
    expert_mlp=32,
    head_vocabulary=1000,
    num_sequences=8,
    length=24,
    num_steps=1,
    num_new_tokens=150,
)
"""Sizes for a machine without a GPU."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The machine, model and folder that the checks use.

    Attributes:
        device: ``cpu`` or ``cuda``.
        num_gpus: Number of GPUs to use; on the CPU, the largest number of ranks.
        model: Folder of the model of the option ``--model``; empty without this option.
        folder: Folder for models, logs and results.
        timeout_s: Longest time of each task, in seconds.
    """

    device: str
    num_gpus: int
    sizes: Sizes
    model: str
    folder: str
    timeout_s: float

    @property
    def dtype(self) -> str:
        """Dtype of computation and engines: bfloat16 on CUDA, else float32."""
        return "bfloat16" if self.device == "cuda" else "float32"


def run_task(setup: Setup, name: str, *, num_ranks: int = 1, **options: Any) -> Iterator[dict[str, Any]]:
    """Run the task ``name``, a ``module:function`` of this package, in ``num_ranks`` processes.

    Yields the measurements of rank 0 as they arrive, each a mapping. ``options`` are further arguments of the function.

    Raises:
        TaskFailed: a rank failed, or the task missed its deadline. All processes of the task have ended.
    """
    lines: Queue[str | None] = Queue()
    ranks, logs = _start_ranks(setup, name, num_ranks, options)
    threading.Thread(target=_read, args=(ranks[0], logs[0], lines), daemon=True).start()
    for process in ranks:
        threading.Thread(target=_end_all_after, args=(process, ranks), daemon=True).start()
    stop = threading.Timer(setup.timeout_s, lambda: [process.kill() for process in ranks])
    stop.start()
    try:
        while (line := lines.get()) is not None:
            yield json.loads(line)
        codes = [process.wait() for process in ranks]
        if not stop.is_alive():
            raise TaskFailed(f"missed the deadline of {setup.timeout_s:g} s (--timeout-s); logs: {logs[0]}")
        # Prefer a status other than -9. After a rank has failed, `_end_all_after` kills the other ranks (status -9).
        for code, log in sorted(zip(codes, logs, strict=True), key=lambda pair: pair[0] == -9):
            if code:
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
                raise TaskFailed(f"exit status {code}; the end of {log}:\n{tail}")
    finally:
        stop.cancel()
        for process in ranks:
            process.kill()
            process.wait()


def _start_ranks(
    setup: Setup, name: str, num_ranks: int, options: dict[str, Any]
) -> tuple[list[subprocess.Popen[str]], list[Path]]:
    """Start the processes of a task. Return a pair: the processes, and the paths of their logs, by rank."""
    folder = Path(setup.folder)
    slug = "-".join([name.partition(":")[2], *(f"{key}={Path(str(value)).name}" for key, value in options.items())])
    task = json.dumps({"name": name, "setup": asdict(setup), "options": options})
    rendezvous = folder / f"rendezvous-{os.urandom(4).hex()}"
    ranks, logs = [], []
    for rank in range(num_ranks):
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            _RENDEZVOUS_FILE: str(rendezvous),
        }
        if setup.device == "cpu":
            environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        logs.append(folder / f"{slug}-{rank}.log")
        with logs[-1].open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "asyncrl.gpu_check.tasks", task],
                env=environment,
                stdout=subprocess.PIPE if rank == 0 else log,
                stderr=log,
                text=True,
            )
        ranks.append(process)
    return ranks, logs


def _end_all_after(process: subprocess.Popen[str], ranks: list[subprocess.Popen[str]]) -> None:
    """Wait for a rank to end. If it failed, kill all other ranks, because they would wait for the failed rank."""
    if process.wait():
        for other in ranks:
            other.kill()


def _read(process: subprocess.Popen[str], log: Path, lines: Queue[str | None]) -> None:
    """Put the measurements of rank 0 into the queue ``lines``, and append the other output of rank 0 to its log."""
    assert process.stdout is not None
    with log.open("a") as rest:
        for line in process.stdout:
            if line.startswith(MARK):
                lines.put(line.removeprefix(MARK))
            else:
                rest.write(line)
    lines.put(None)


def main() -> None:
    """Run one rank of a task. Rank 0 prints the measurements."""
    end_with_parent()
    task = json.loads(sys.argv[1])
    setup = Setup(**{**task["setup"], "sizes": Sizes(**task["setup"]["sizes"])})
    module, _, name = task["name"].partition(":")
    function = getattr(import_module(f"asyncrl.gpu_check.{module}"), name)
    if inspect.isasyncgenfunction(function):
        import asyncio

        asyncio.run(_print_all(function(setup, **task["options"])))
    else:
        for measured in function(setup, **task["options"]):
            _print(measured)


async def _print_all(measured: AsyncIterator[dict[str, Any]]) -> None:
    async for one in measured:
        _print(one)


def _print(measured: dict[str, Any]) -> None:
    if os.environ["RANK"] == "0":
        sys.stdout.write(f"{MARK}{json.dumps(measured)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
