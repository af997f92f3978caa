"""Checks that training with rewards corrects mistakes in the demonstrations: ``python -m benchmarks.quickstart``.

The benchmark runs the quickstart as a user does, with warm start and evaluations, for each engine and each seed. After
the warm start, most greedy answers are wrong. So a sharper distribution alone cannot give a high accuracy, and the high
accuracy after training comes from rewards. The timing of a run decides which groups a batch gets, and the lags of these
groups. So other work of the machine changes the wall times and also the accuracies.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import Target, print_report

ENGINES = ("transformers", "sglang")
RUN_TIMEOUT_S = 900


@dataclass(frozen=True, kw_only=True)
class Learned:
    """One run of the quickstart.

    Attributes:
        greedy: Greedy held-out accuracy before and after training.
        sampled: Held-out accuracy of samples at temperature 1, before and after training.
        max_lag: Largest lag of the training data.
        train_s: Seconds of training.
        wall_s: Seconds of the whole run.
    """

    greedy: tuple[float, float]
    sampled: tuple[float, float]
    max_lag: int
    train_s: float
    wall_s: float

    def __str__(self) -> str:
        return (
            f"greedy {self.greedy[0]:.3f} -> {self.greedy[1]:.3f}, "
            f"sampled {self.sampled[0]:.3f} -> {self.sampled[1]:.3f}, lag at most {self.max_lag}, "
            f"{self.train_s:.0f} s of training in {self.wall_s:.0f} s"
        )


def learn(engine: str, seed: int, output_dir: Path, overrides: Sequence[str]) -> Learned:
    """Run the quickstart in a separate process; return the accuracies and times from its ``summary.json``."""
    command = [sys.executable, "-m", "asyncrl", "train", f"seed={seed}", f"rollout_fleet.engine={engine}"]
    command += [f"output_dir={output_dir}", *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command[1:])} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"[-4000:]
        )
    run_dir = next(line.split("writing to ", 1)[1] for line in done.stdout.splitlines() if "writing to " in line)
    summary = json.loads((Path(run_dir) / "summary.json").read_text())
    before, after = summary["eval"]["before"], summary["eval"]["after"]
    return Learned(
        greedy=(before["greedy"], after["greedy"]),
        sampled=(before["sampled"], after["sampled"]),
        max_lag=summary["max_lag"]["realised"],
        train_s=summary["train_wall_s"],
        wall_s=summary["wall_s"],
    )


def main() -> int:
    """Run the quickstart for each engine and seed, and print the report. Return 0 if every target is met, else 1."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quickstart", description="What the quickstart learns.")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("overrides", nargs="*", help="Hydra overrides for every run, after --")
    options = parser.parse_args()
    runs: dict[str, Learned] = {}
    with tempfile.TemporaryDirectory(prefix="asyncrl-quickstart-") as folder:
        for engine in options.engines:
            for seed in options.seeds:
                name = f"{engine}, seed {seed}"
                runs[name] = learn(engine, seed, Path(folder), options.overrides)
                print(f"{name}: {runs[name]}", file=sys.stderr, flush=True)
    return report(runs)


def report(runs: dict[str, Learned]) -> int:
    """Print the results of all runs, and the worst value of each figure. Return 0 if every target is met, else 1."""
    figures = {
        "greedy_before_worst": max(run.greedy[0] for run in runs.values()),
        "greedy_after_worst": min(run.greedy[1] for run in runs.values()),
        "sampled_after_worst": min(run.sampled[1] for run in runs.values()),
        "max_lag": float(max(run.max_lag for run in runs.values())),
    }
    targets = {"greedy_before_worst": Target(at_most=0.6), "greedy_after_worst": Target(at_least=0.95)}
    rows = {name: str(run) for name, run in runs.items()}
    title = "accuracy of the quickstart before and after training"
    return 0 if print_report(title, rows, figures, targets, baseline="the warm start") else 1


if __name__ == "__main__":
    sys.exit(main())
