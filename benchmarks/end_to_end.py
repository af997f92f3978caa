"""Compares asyncrl, TRL and synchronous asyncrl by the training time to a held-out accuracy of 0.90.

``python -m benchmarks.end_to_end`` needs the ``bench`` extra. For each seed, three competitors train from the same
warm-started policy, one after another: asyncrl with the in-process engine at the default ``buffer.max_lag``, asyncrl at
``buffer.max_lag=0``, and TRL. Task, model, hyper-parameters and cores are the same.

Evaluation does not count as training time. TRL's clock stops during an evaluation. asyncrl's published weights are kept
and evaluated after the training. The target is reached when the interpolated mean of three evaluations crosses it
(`first_crossing`). Each evaluation has 2,048 samples. A seed that misses the target is reported, and counts with its
whole training time.

For all competitors, a step has twice as many prompts as in the quickstart, and the learning rate is half as high
(`WORK`). With the quickstart's own options, a policy reaches the target in 50 steps. Such a policy changes so much per
step that it learns less from samples that are two versions old. The figure ``steps_to_090_vs_trl`` shows this effect.
Wall time depends on other work of the machine. So the benchmark also reports the CPU time of each competitor, including
its start. ``time_standard_error`` is the standard error over seeds.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.cli.compose import compose_run
from asyncrl.cli.quickstart import with_quickstart_assets
from asyncrl.config import RunConfig
from asyncrl.sft.warm_start import warm_start_path
from benchmarks.held_out import HeldOut, first_crossing, load_held_out
from benchmarks.report import Target, print_report

TARGET_ACCURACY = 0.90
RUN_TIMEOUT_S = 900
WORK = ("algorithm.groups_per_step=64", "rollout_fleet.groups_in_flight=64", "learner.optimizer.lr=5.0e-4")
"""The options that differ from the quickstart's options."""
_LOOK_EVERY_S = 1.0
_NUM_DRAWS = 1000


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of one training.

    Attributes:
        time_s: Training time to the target, or the whole training time if the target was missed.
        start_s: Time before the first step.
        steps: Learner steps to the target, or all steps if the target was missed.
        step_s: Training time per step, averaged over all steps.
        cpu_s: CPU seconds of all processes of the whole training, including the start.
        hit: Whether the target was reached.
    """

    time_s: float
    start_s: float
    steps: float
    step_s: float
    cpu_s: float
    hit: bool


class Contest:
    """Runs the competitors with one seed. All competitors start from the same warm-started policy."""

    def __init__(self, seed: int, output_dir: Path, *overrides: str, eval_every: int, threads: int) -> None:
        self._overrides = [f"seed={seed}", f"output_dir={output_dir}", *WORK, *overrides]
        self._config = with_quickstart_assets(compose_run(self._overrides))
        self._eval_every = eval_every
        self._threads = threads
        _run([sys.executable, "-m", "asyncrl", "sft", *self._overrides])
        self._warm = warm_start_path(self._config)
        tokenizer = AutoTokenizer.from_pretrained(self._warm)
        self._held_out = load_held_out(
            self._config.data.eval_files[0],
            tokenizer,
            max_new_tokens=self._config.rollout_fleet.sampling.max_new_tokens,
        )

    def asyncrl(self, max_lag: int | None = None) -> Outcome:
        """Train with asyncrl in a separate process, and then evaluate the weights that the run published.

        ``max_lag`` is the value of ``buffer.max_lag``; None keeps the default.
        """
        overrides = [*self._overrides, "rollout_fleet.engine=transformers", "learner.keep_snapshots=-1"]
        overrides += ["evaluation.enabled=false", *([] if max_lag is None else [f"buffer.max_lag={max_lag}"])]
        output, cpu_s = _run([sys.executable, "-m", "asyncrl", "train", *overrides])
        run_dir = Path(next(line.split("writing to ", 1)[1] for line in output if "writing to " in line))
        records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        start_s = json.loads((run_dir / "summary.json").read_text())["start_wall_s"]
        times = {0: 0.0} | {record["step"] + 1: record["time_s"] for record in records}
        curve = _curve(self._warm, run_dir / "snapshots", self._held_out, self._eval_every)
        steps = first_crossing(curve, TARGET_ACCURACY)
        time_s = first_crossing([(times[int(step)], accuracy) for step, accuracy in curve], TARGET_ACCURACY)
        return Outcome(
            time_s=times[len(records)] if time_s is None else time_s,
            start_s=start_s,
            steps=len(records) if steps is None else steps,
            step_s=times[len(records)] / len(records),
            cpu_s=cpu_s,
            hit=steps is not None,
        )

    def trl(self) -> Outcome:
        """Train with TRL in a separate process (`benchmarks.trl_baseline`)."""
        output, _ = _run([sys.executable, "-m", "benchmarks.trl_baseline", *self._trl_options(self._config)])
        result = json.loads(output[-1])
        hit = result["time_to_target_s"] is not None
        return Outcome(
            time_s=result["time_to_target_s"] if hit else result["train_s"],
            start_s=result["startup_s"],
            steps=result["steps_to_target"] if hit else result["steps"],
            step_s=result["train_s"] / result["steps"],
            cpu_s=result["cpu_s"],
            hit=hit,
        )

    def _trl_options(self, config: RunConfig) -> list[str]:
        optimizer, algorithm = config.learner.optimizer, config.algorithm
        options = {
            "model": self._warm,
            "train": config.data.train_files[0],
            "held-out": config.data.eval_files[0],
            "seed": config.seed,
            "max-steps": config.total_steps,
            "groups-per-step": algorithm.groups_per_step,
            "samples-per-prompt": algorithm.samples_per_prompt,
            "max-new-tokens": config.rollout_fleet.sampling.max_new_tokens,
            "lr": optimizer.lr,
            "beta1": optimizer.betas[0],
            "beta2": optimizer.betas[1],
            "weight-decay": optimizer.weight_decay,
            "clip": algorithm.clip_low,
            "clip-grad-norm": optimizer.clip_grad_norm,
            "eval-every": self._eval_every,
            "target": TARGET_ACCURACY,
            "threads": self._threads,
        }
        return [text for name, value in options.items() for text in (f"--{name}", str(value))]


def main() -> int:
    """Run all competitors for all seeds, and print the report. Return 0 if every target is met, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.end_to_end", description="Time to sampled 0.90 against TRL."
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--total-steps", type=int, default=150, help="learner steps of each training")
    parser.add_argument("--eval-every", type=int, default=5, help="steps between evaluations")
    parser.add_argument("--threads", type=int, default=2, help="number of threads of torch in TRL")
    parser.add_argument("overrides", nargs="*", help="options of every competitor, such as learner.optimizer.lr=5.0e-4")
    options = parser.parse_args()
    outcomes: dict[str, list[Outcome]] = {"asyncrl": [], "asyncrl, max_lag=0": [], "TRL": []}
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as folder:
        for seed in options.seeds:
            contest = Contest(
                seed,
                Path(folder),
                f"total_steps={options.total_steps}",
                *options.overrides,
                eval_every=options.eval_every,
                threads=options.threads,
            )
            for name, train in (
                ("asyncrl", contest.asyncrl),
                ("TRL", contest.trl),
                ("asyncrl, max_lag=0", lambda contest=contest: contest.asyncrl(max_lag=0)),
            ):
                outcomes[name].append(train())
                print(f"seed {seed}: {name}: {outcomes[name][-1]}", file=sys.stderr, flush=True)
    return _report(outcomes, options.seeds)


def _report(outcomes: dict[str, list[Outcome]], seeds: list[int]) -> int:
    rows = {}
    for name, results in outcomes.items():
        for seed, result in zip(seeds, results, strict=True):
            hit = "" if result.hit else ", target missed"
            rows[f"{name}, seed {seed}"] = (
                f"{result.time_s:.1f} s in {result.steps:.0f} steps, {result.step_s * 1e3:.0f} ms per step, "
                f"start {result.start_s:.1f} s, {result.cpu_s:.0f} CPU seconds in all{hit}"
            )
    mine, trl, sync = (outcomes[name] for name in ("asyncrl", "TRL", "asyncrl, max_lag=0"))
    figures = {
        "time_to_090_vs_trl": _median_ratio(mine, trl, "time_s"),
        "time_to_090_vs_sync": _median_ratio(mine, sync, "time_s"),
        "steps_to_090_vs_trl": _median_ratio(mine, trl, "steps"),
        "step_time_vs_trl": _median_ratio(mine, trl, "step_s"),
        "time_standard_error": _standard_error(mine, trl, "time_s"),
        "steps_standard_error": _standard_error(mine, trl, "steps"),
        "asyncrl_cpu_s": statistics.median(result.cpu_s for result in mine),
        "trl_cpu_s": statistics.median(result.cpu_s for result in trl),
        "asyncrl_start_s": statistics.median(result.start_s for result in outcomes["asyncrl"]),
        "trl_start_s": statistics.median(result.start_s for result in outcomes["TRL"]),
        "missed": float(sum(not result.hit for results in outcomes.values() for result in results)),
    }
    targets = {"time_to_090_vs_trl": Target(at_most=0.65), "missed": Target(at_most=0)}
    title = "training time to sampled held-out accuracy 0.90, medians of paired ratios"
    met = print_report(title, rows, figures, targets, baseline="TRL GRPOTrainer, same warm start, two cores")
    return 0 if met else 1


def _median_ratio(mine: list[Outcome], others: list[Outcome], name: str) -> float:
    return statistics.median(_ratios(mine, others, name))


def _standard_error(mine: list[Outcome], others: list[Outcome], name: str) -> float:
    """Estimate the standard error of a median ratio with the bootstrap method.

    Each seed gives one ratio: the field ``name`` of its outcome in ``mine``, divided by this field in ``others``.
    """
    ratios, draw = _ratios(mine, others, name), random.Random(0)
    return statistics.pstdev(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(_NUM_DRAWS))


def _ratios(mine: list[Outcome], others: list[Outcome], name: str) -> list[float]:
    return [getattr(a, name) / getattr(b, name) for a, b in zip(mine, others, strict=True)]


def _curve(warm: Path, snapshots: Path, held_out: HeldOut, eval_every: int) -> list[tuple[float, float]]:
    """Evaluate published versions until the target is reached (`first_crossing`).

    Return a pair (version, sampled accuracy) for each evaluated version.
    """
    torch.set_num_threads(2)
    versions = {0: warm} | {int(path.name.removeprefix("v")): path for path in snapshots.glob("v????????")}
    curve: list[tuple[float, float]] = []
    for version, path in sorted(versions.items()):
        if version % eval_every == 0 and first_crossing(curve, TARGET_ACCURACY) is None:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
            curve.append((version, held_out.accuracy(model)))
    return curve


def _run(command: list[str]) -> tuple[list[str], float]:
    """Run the command of one competitor until it ends.

    Return a pair: the lines that the command printed, and the CPU seconds of all its processes.
    """
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=output, stderr=errors)
        try:
            cpu_s = _cpu_s_until_end(process, RUN_TIMEOUT_S)
        finally:
            process.kill()
        output.seek(0)
        errors.seek(0)
        printed, said = output.read(), errors.read()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command[1:4])} ended with {process.returncode}:\n{printed}\n{said}"[-4000:])
    return printed.splitlines(), cpu_s


def _cpu_s_until_end(process: subprocess.Popen[bytes], timeout_s: float) -> float:
    """Wait for the end of a process. Return the CPU seconds of the process and its descendants.

    The times are read once per second, so the last second of a process is possibly missing. Raises `TimeoutError` if
    the process runs longer than ``timeout_s`` seconds.
    """
    used, run = dict[int, float](), psutil.Process(process.pid)
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        with suppress(psutil.NoSuchProcess):
            for part in (run, *run.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    used[part.pid] = sum(part.cpu_times()[:2])
        with suppress(subprocess.TimeoutExpired):
            process.wait(_LOOK_EVERY_S)
            return sum(used.values())
    raise TimeoutError(f"a competitor took longer than {timeout_s:g} s")


if __name__ == "__main__":
    sys.exit(main())
