"""``asyncrl check-gpu [--model DIR] [--gpus N]``: checks this machine for training, one line per check.

The checks do not need a network, and continue after a failure. At the end, the command writes a JSON file for bug
reports. The exit status is 1 if a check failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Any

from asyncrl.core.errors import with_exit_status
from asyncrl.core.host import visible_gpus
from asyncrl.gpu_check.run_checks import quickstart
from asyncrl.gpu_check.tasks import FULL, TOY, EngineTest, Setup, run_task
from asyncrl.planner.device_memory import ModelSize, RankSetup, rank_bytes
from asyncrl.weights.carriers import CARRIERS
from learner.config import SELECTIVE

PACKAGES = ("torch", "transformers", "sglang", "ray", "flash-attn-4", "flash-attn", "tensordict", "pyzmq", "numpy")
PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "A100": 312.0, "B200": 2250.0, "L40S": 362.0}
"""Dense bfloat16 TFLOP/s by the name of the GPU, from the vendor's data sheets."""
MIN_FILES, MIN_SHARED_BYTES = 4096, 16 << 30
LOSS_TOLERANCE = {"cuda": 0.02, "cpu": 1e-4}
PEAK_TOLERANCE = 1.2
"""Largest accepted ratio of the measured peak memory to the peak memory that the memory planner predicted."""
GAP_TOLERANCE = {"bfloat16": (0.03, 0.5), "float32": (1e-3, 1e-2)}
"""By dtype: the largest accepted mean and single difference between engine and learner log-probs, in nats."""
_OTHER_KERNEL = "rollout_fleet.sglang.extra_args=[--attention-backend,triton]"


class State(StrEnum):
    """The outcome of a test."""

    passed = "PASS"
    failed = "FAIL"
    skipped = "SKIP"


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The result of one test, which is shown as one line.

    Attributes:
        name: What was tested. Example: ``train dense ranks=2 sp=2``.
        number: The measured values as text, for the line.
        remedy: After a failure, the option or action that may help; otherwise empty.
        figures: The measured values by name, for the JSON file.
    """

    name: str
    state: State
    seconds: float = 0.0
    number: str = ""
    remedy: str = ""
    figures: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, is_right: bool, number: str, remedy: str = "", **figures: Any) -> Result:
        """Return a passed result if ``is_right`` is True, otherwise a failed result."""
        state = State.passed if is_right else State.failed
        return cls(name=name, state=state, number=number, remedy=remedy, figures=figures)

    def line(self) -> str:
        """Return the result as one line of text for the user."""
        remedy = f"  -> {self.remedy}" if self.remedy and self.state is not State.passed else ""
        return f"{self.state.value}  {self.seconds:6.1f} s  {self.name:34} {self.number}{remedy}"


@dataclass(frozen=True, kw_only=True)
class Check:
    """A check of one component of the machine. A check has one or more results.

    Attributes:
        name: The value of the option ``--only`` that selects this check.
        run: Function that yields the results. `results_of` measures how long each result takes.
        needs: Names of required Python packages. If a package is missing, the check is skipped.
    """

    name: str
    run: Callable[[Setup], Iterator[Result]]
    needs: tuple[str, ...] = ()


# Stack


def stack(setup: Setup) -> Iterator[Result]:
    """Check the packages, GPUs, shared memory and limit of open files of this machine. Yields one result for each."""
    versions = {name: version for name in PACKAGES if (version := _version(name))}
    found = f"Python {platform.python_version()}, " + ", ".join(f"{k} {v}" for k, v in versions.items())
    yield Result.of("packages", "torch" in versions, found, "bash scripts/setup.sh", **versions)
    if setup.device == "cuda":
        cards = _cards()
        yield Result.of("GPUs", bool(cards), "; ".join(cards), "see docs/gpus.md, Install", cards=cards)
    free = shutil.disk_usage("/dev/shm").free
    remedy = "docker run --shm-size=64g, or weights.transport=file"
    yield Result.of(
        "/dev/shm", free >= MIN_SHARED_BYTES or setup.device == "cpu", f"{free / 1e9:.1f} GB free", remedy, free=free
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield Result.of(
        "open files", hard >= MIN_FILES, f"{soft}, at most {hard}", "ulimit -Hn 65536", soft=soft, hard=hard
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _cards() -> list[str]:
    """Return one text per GPU with its name, memory, driver and compute capability."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version,compute_cap", "--format=csv,noheader"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in listed.splitlines()]


def layers_on(cards: Sequence[str]) -> int:
    """Return the number of layers of the checked models: 4 with at least 70 GB of GPU memory, 2 with 36 GB, else 1."""
    megabytes = [int(match[1]) for card in cards if (match := re.search(r"(\d+) MiB", card))]
    smallest = min(megabytes, default=0) * 1.048576 / 1e3
    return 4 if smallest >= 70 else 2 if smallest >= 36 else 1


# The learner


def kernels(setup: Setup) -> Iterator[Result]:
    """Compare the attention kernels with float32 attention, and measure their speeds. Yields a result per kernel."""
    for one in run_task(setup, "learner_tasks:kernels"):
        if "selected" in one:
            is_fast = setup.device == "cpu" or one["selected"] != "sdpa"
            number = f"learner.attention=auto selects {one['selected']}"
            yield Result.of("kernel selection", is_fast, number, "see the lines above and docs/gpus.md", **one)
        elif "error" in one:
            yield Result(name=f"kernel {one['kernel']}", state=State.skipped, number=one["error"], figures=one)
        else:
            yield Result.of(f"kernel {one['kernel']}", True, f"{one['tflops']:.0f} TFLOP/s", **one)


def log_probs(setup: Setup) -> Iterator[Result]:
    """Compare log-probs that the learner computes in chunks with log-probs in float64."""
    for one in run_task(setup, "learner_tasks:log_probs"):
        is_right = one["error"] < 1e-3 and one["gradient_error"] < (0.02 if setup.device == "cuda" else 1e-4)
        number = (
            f"error {one['error']:.1e} nats, gradient {one['gradient_error']:.1e}, {one['tokens_per_s']:.0f} tokens/s, "
            f"{one['peak_bytes'] / 1e9:.1f} GB"
        )
        yield Result.of("log-probs against fp64", is_right, number, "learner.logprob_chunk_tokens=512", **one)


def training(setup: Setup) -> Iterator[Result]:
    """Make the same learner step in several variants, with different numbers of ranks and different options.

    All variants must have the same loss and gradient norm as the first variant, which runs on one rank. The peak memory
    of a variant must be at most `PEAK_TOLERANCE` times the planned memory.
    """
    for experts in (False, True):
        kind = "mixture" if experts else "dense"
        model = _saved_model(setup, experts=experts)
        first: dict[str, Any] = {}
        for variant in variants_of(setup):
            num_ranks, sp_size, recompute, compiled = variant
            words = f"ranks={num_ranks} sp={sp_size}" + " recompute" * bool(recompute) + " compile" * compiled
            words += f" {SELECTIVE}" * (recompute == SELECTIVE)
            (one,) = run_task(
                setup,
                "learner_tasks:train",
                num_ranks=num_ranks,
                model=model,
                sp_size=sp_size,
                activation_checkpointing=recompute,
                torch_compile=compiled,
            )
            first = first or one
            errors = [abs(one[name] / first[name] - 1) for name in ("loss", "grad_norm")]
            planned = _planned_bytes(setup, model, num_ranks, recompute)
            number = (
                f"loss {one['loss']:.5f}, gradient {one['grad_norm']:.4g}, {one['tokens_per_s'] / num_ranks:.0f} "
                f"tokens/s per rank{_utilization(one, setup, num_ranks)}, peak {one['peak_bytes'] / 1e9:.1f} GB, "
                f"planned {planned / 1e9:.1f} GB"
            )
            is_same, fits = max(errors) <= LOSS_TOLERANCE[setup.device], one["peak_bytes"] <= PEAK_TOLERANCE * planned
            remedy = "do not use the options of this variant, and report the failure: its results differ"
            if is_same:
                remedy = "lower learner.max_tokens_per_micro_batch, and report the failure: it needs more than planned"
            yield Result.of(f"train {kind} {words}", is_same and fits, number, remedy, **one, planned_bytes=planned)


def _planned_bytes(setup: Setup, model: str, num_ranks: int, recompute: bool | str) -> int:
    """Return the peak memory of a rank in bytes, as the planner predicts it."""
    rank = RankSetup(
        num_shards=num_ranks,
        tokens=setup.sizes.budget(num_ranks),
        checkpointing=bool(recompute),
        keeps_attention=recompute == SELECTIVE,
        compute_bytes=2 if setup.device == "cuda" else 4,
    )
    return sum(rank_bytes(ModelSize.of(model), rank).values())


def _saved_model(setup: Setup, *, experts: bool = False) -> str:
    """Return the folder of a model with random weights. The first call makes and saves the model."""
    folder = Path(setup.folder, "mixture" if experts else "dense")
    if not (folder / "config.json").exists():
        list(run_task(setup, "learner_tasks:models", experts=experts))
    return str(folder)


def variants_of(setup: Setup) -> list[tuple[int, int, bool | str, bool]]:
    """Return the variants of the learner step. The check compares each later variant with the first variant.

    A variant is a tuple: number of ranks, ``sp_size``, activation checkpointing, and True to use ``torch.compile``.
    """
    rows: list[tuple[int, int, bool | str, bool]] = [(1, 1, False, False), (1, 1, True, False)]
    if setup.device == "cuda":
        rows += [(1, 1, True, True), (1, 1, SELECTIVE, True)]
    for sp_size in (1, 2, 4):
        if setup.num_gpus > 1 and setup.num_gpus % sp_size == 0:
            rows.append((setup.num_gpus, sp_size, True, False))
    return rows


def _utilization(one: dict[str, Any], setup: Setup, num_ranks: int) -> str:
    """Return a text with the model FLOP/s as a fraction of the GPU's peak.

    The text is empty for a GPU whose peak is unknown, and for the mixture of experts.
    """
    cards = _cards() if setup.device == "cuda" else []
    peak = next((value for name, value in PEAK_TFLOPS.items() if cards and name in cards[0]), 0.0)
    if not peak or one["parameters"] > 2e9:
        return ""
    return f", MFU {6 * one['parameters'] * one['tokens_per_s'] / num_ranks / peak / 1e12:.0%}"


def offload(setup: Setup) -> Iterator[Result]:
    """Move model and optimizer to the host and back, and check that the values stay the same."""
    for one in run_task(setup, "learner_tasks:offload", model=_saved_model(setup)):
        is_right = one["is_same"] and one["kept_share"] < 0.1
        number = f"{one['gb_per_s']:.1f} GB/s per direction, {one['kept_share']:.1%} stays on the device"
        yield Result.of("offload round trips", is_right, number, "placement.colocated=false", **one)


def checkpoint(setup: Setup) -> Iterator[Result]:
    """Save a checkpoint during training, load it, and check that the values stay the same."""
    for one in run_task(setup, "learner_tasks:checkpoint", model=_saved_model(setup)):
        number = f"training waits {one['stall_s']:.2f} s, written at {one['gb_per_s']:.2f} GB/s"
        yield Result.of("checkpoint and load", one["is_same"], number, "checkpoint.directory on a faster disk", **one)


# Engines and runs


def serving(setup: Setup) -> Iterator[Result]:
    """Check an engine: its output layer, log-probs, weight updates, and how it releases its device.

    An engine must also refuse to load damaged weights.
    """
    model = setup.model or _saved_model(setup)
    found = {}
    for head in ("float32", "bfloat16"):
        (found[head],) = run_task(setup, "serving_tasks:output_layer", model=model, fp32_head=head == "float32")
    number = "; ".join(f"{head}: engine - learner {_gap(one)}" for head, one in found.items())
    yield Result.of("output layer", _is_close(found["float32"], "bfloat16"), number, _OTHER_KERNEL, **found)
    is_cuda = setup.device == "cuda"
    for tp_size in (1, 2):
        if setup.num_gpus < tp_size:
            continue
        own_gpus = is_cuda and setup.num_gpus > tp_size
        backends = {
            rules.carrier.value: rules.backend(own_gpus=own_gpus)
            for rules in CARRIERS.values()
            if own_gpus or not (is_cuda and rules.between_gpus)
        }
        for one in run_task(setup, "serving_tasks:serving", model=model, tp_size=tp_size, backends=backends):
            yield _served(setup, f"tp={tp_size}", one)


def _is_close(one: dict[str, Any], dtype: str) -> bool:
    mean, single = GAP_TOLERANCE[dtype]
    return one["mean"] <= mean and one["max"] <= single and one["num_tokens"] > 0


def _gap(one: dict[str, Any]) -> str:
    return f"{one['mean']:.1e} nats, at most {one['max']:.1e}"


def _served(setup: Setup, where: str, one: dict[str, Any]) -> Result:
    what = EngineTest(one["what"])
    if what is EngineTest.start:
        return Result.of(f"engine {where}", True, "up", **one)
    if what is EngineTest.damage:
        number = one["refused"] or "a version with a damaged byte was served"
        return Result.of(f"damaged byte {where}", bool(one["refused"]), number, "do not train with this machine", **one)
    is_close, gap = _is_close(one, setup.dtype), f"engine - learner {_gap(one)}"
    if what is EngineTest.logprobs:
        number, name = f"{gap}; {one['tokens_per_s']:.0f} tokens/s", "log-probs of engine and learner"
        remedy = _OTHER_KERNEL
    elif what is EngineTest.release:
        number = f"{one['cycles']} times, {one['seconds']:.2f} s, {one['freed_bytes'] / 1e9:.1f} GB freed; {gap}"
        name, remedy = "release and resume", "placement.colocated=false"
    else:
        number = (
            f"pause {one['pause_s']:.2f} s, {one['gb_per_s']:.2f} GB/s, {one['versions_per_sample']:.1f} versions per "
            f"sample; {gap}"
        )
        name, remedy = f"weights over {one['carrier']}", "use another weights.transport"
    return Result.of(f"{name} {where}", is_close, number, remedy, **one)


def runs(setup: Setup) -> Iterator[Result]:
    """Run the quickstart in three forms. On a machine with one GPU, only the colocated form runs.

    The forms are: learner and engines on the same devices (colocated), on separate devices, and with a killed engine.
    """
    rows: list[tuple[str, list[str], bool]] = [("quickstart-colocated", ["placement.colocated=true"], False)]
    if setup.device == "cpu" or setup.num_gpus > 1:
        rows.insert(0, ("quickstart", [], False))
        rows.append(("quickstart-engine-killed", [], True))
    for name, overrides, kills in rows:
        for one in quickstart(setup, name, *overrides, kill_engine=kills):
            tokens = one["tokens"]
            is_whole = tokens["generated"] == sum(tokens[k] for k in ("trained", "dropped", "buffered", "in_flight"))
            is_whole = is_whole and one["policy_version"] == one["steps"]
            number = f"{one['steps']} steps, {tokens['trained']} tokens trained, lag <= {one['max_lag']['realised']}"
            yield Result.of(name, is_whole, number, f"read {setup.folder}/{name}.log", tokens=tokens)


CHECKS = (
    Check(name="stack", run=stack),
    Check(name="kernels", run=kernels, needs=("torch", "transformers")),
    Check(name="log_probs", run=log_probs, needs=("torch", "transformers")),
    Check(name="training", run=training, needs=("torch", "transformers")),
    Check(name="offload", run=offload, needs=("torch", "transformers")),
    Check(name="checkpoint", run=checkpoint, needs=("torch", "transformers")),
    Check(name="serving", run=serving, needs=("torch", "transformers", "sglang")),
    Check(name="runs", run=runs, needs=("torch", "transformers", "sglang", "ray")),
)


def results_of(check: Check, setup: Setup) -> Iterator[Result]:
    """Run a check, and yield its results. An error becomes a failed result and ends the check.

    If a required package is missing, the check is skipped.
    """
    if missing := [name for name in check.needs if importlib.util.find_spec(name) is None]:
        yield Result(name=check.name, state=State.skipped, number=f"needs {', '.join(missing)}, not installed")
        return
    began, results = time.perf_counter(), check.run(setup)
    while True:
        try:
            result = next(results)
        except StopIteration:
            return
        except Exception as error:  # noqa: BLE001 - an error of a check must not prevent the next checks
            seconds = time.perf_counter() - began
            text = f"{type(error).__name__}: {error}"
            yield Result(name=check.name, state=State.failed, seconds=seconds, number=text, remedy="see its log")
            return
        now = time.perf_counter()
        yield replace(result, seconds=now - began)
        began = now


@with_exit_status
def main() -> int:
    """Run ``asyncrl check-gpu`` and return the exit status."""
    arguments = _parser().parse_args()
    gpus = visible_gpus()
    device = arguments.device or ("cuda" if gpus else "cpu")
    if device == "cuda" and not gpus:
        raise ValueError("--device cuda needs a GPU that nvidia-smi lists, got none; use --device cpu")
    names = [check.name for check in CHECKS]
    chosen = arguments.only.split(",") if arguments.only else names
    if unknown := sorted(set(chosen) - set(names)):
        raise ValueError(f"--only must list checks from {', '.join(names)}, got {', '.join(unknown)}")
    folder = Path(arguments.output or tempfile.mkdtemp(prefix="check-gpu-"))
    folder.mkdir(parents=True, exist_ok=True)
    setup = Setup(
        device=device,
        num_gpus=arguments.gpus or gpus or 1,
        sizes=replace(FULL, layers=layers_on(_cards())) if device == "cuda" else TOY,
        model=arguments.model,
        folder=str(folder.resolve()),
        timeout_s=arguments.timeout_s,
    )
    # Raise `SystemExit` on SIGTERM, so that the ``finally`` clauses stop the processes of tasks and runs.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.stdout.write(f"checking {device} x {setup.num_gpus}; logs and report in {folder}\n")
    results = []
    for check in CHECKS:
        for result in results_of(check, setup) if check.name in chosen else ():
            results.append(result)
            sys.stdout.write(result.line() + "\n")
            sys.stdout.flush()
    return _report(results, setup)


def _report(results: list[Result], setup: Setup) -> int:
    failed = [result for result in results if result.state is State.failed]
    path = Path(setup.folder, "check.json")
    path.write_text(json.dumps({"setup": asdict(setup), "results": [asdict(result) for result in results]}, indent=1))
    counts = ", ".join(f"{sum(r.state is state for r in results)} {state.value}" for state in State)
    lines = ["", *(result.line().partition("\n")[0][:200] for result in results), "", counts, f"report: {path}", ""]
    sys.stdout.write("\n".join(lines))
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Check this machine for training: kernels, memory, engines, runs.")
    parser.add_argument("--model", default="", help="folder of a model for the engine checks; default: random weights")
    parser.add_argument("--gpus", type=int, default=0, help="number of GPUs to use; default: all that are visible")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="", help="default: cuda if there is a GPU")
    parser.add_argument(
        "--only", default="", help=f"checks to run, separated by commas: {','.join(check.name for check in CHECKS)}"
    )
    parser.add_argument("--output", default="", help="folder for models, logs and check.json; default: a new folder")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="deadline of each task")
    return parser


if __name__ == "__main__":
    sys.exit(main())
