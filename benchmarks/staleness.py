"""Measures the cost of staleness, and the effect of off-policy corrections: ``python -m benchmarks.staleness``.

The benchmark trains the quickstart's task at an exact lag η. All trainings with the same seed start from the same
warm-started policy. Each training uses one off-policy correction, and one or four optimizer updates per learner step.
``benchmarks/lagged.py`` trains in this process. A file keeps the results of finished trainings, so an interrupted
benchmark continues with the missing trainings. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from asyncrl.cli.compose import compose_run
from asyncrl.cli.quickstart import with_quickstart_assets
from asyncrl.config import RunConfig
from asyncrl.sft.warm_start import finished_warm_start, warm_start_path
from benchmarks.lagged import LaggedTraining
from learner.config import AlgorithmConfig, Anchor, Mask, Schedule, Weight

WARM_START_TIMEOUT_S = 900

_WEIGHED = {"anchor": Anchor.proximal, "weight": Weight.token}

CORRECTIONS: Mapping[str, Mapping[str, Any]] = {
    "none": {"loss": "reinforce"},
    "ppo_behavior": {"loss": "ppo_clip"},
    "tis": {"loss": "ppo_clip", **_WEIGHED, "weight_cap": 2.0},
    "decoupled": {"loss": "ppo_clip", **_WEIGHED, "weight_cap": 0.0},
    "icepop": {"loss": "ppo_clip", **_WEIGHED, "weight_cap": 0.0, "masks": [Mask.token], "token_band": (0.5, 2.0)},
    "mis": {
        "loss": "ppo_clip",
        "anchor": Anchor.proximal,
        "weight": Weight.sequence,
        "weight_cap": 0.0,
        "masks": [Mask.sequence],
        "sequence_band": (0.0, 2.0),
    },
    "geometric": {"loss": "ppo_clip", "masks": [Mask.geometric]},
    "k3": {"loss": "ppo_clip", "masks": [Mask.k3]},
}
"""The off-policy corrections by name, one per row of the table: options that differ from the defaults.

``none`` is REINFORCE. ``ppo_behavior`` clips the probability ratio policy / behavior. The next four corrections clip
the ratio policy / proximal, and weight the loss by proximal / behavior. The proximal policy is the policy at the start
of the step. The final two corrections clip the ratio policy / behavior, and mask trajectories.
"""

PUBLISHED = ("none", "ppo_behavior", "tis", "decoupled", "icepop")
"""The corrections in the table of ``docs/algorithms.md``."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The options of one training. The table shows means over trainings that differ only in the seed.

    Attributes:
        seed: Seed of assets, warm start and sampling.
        eta: The exact lag, in learner steps.
        correction: A key of `CORRECTIONS`.
        mini_batches: Optimizer updates per learner step.
        steps: Learner steps.
        lr: Constant learning rate.
    """

    seed: int
    eta: int
    correction: str
    mini_batches: int
    steps: int
    lr: float

    def algorithm(self, base: AlgorithmConfig) -> AlgorithmConfig:
        """Return a copy of ``base`` with this training's off-policy correction and number of mini-batches."""
        return replace(base, num_mini_batches=self.mini_batches, **CORRECTIONS[self.correction])


@dataclass(frozen=True, kw_only=True)
class Results:
    """A file with the results of finished trainings, one JSON object per line.

    Attributes:
        path: Path of the file. The file is created when the first training is finished.
    """

    path: Path

    def read(self) -> dict[Cell, dict[str, Any]]:
        """Return the results (JSON objects) of finished trainings. If the file does not exist, the result is empty."""
        if not self.path.is_file():
            return {}
        rows = [json.loads(line) for line in self.path.read_text().splitlines()]
        return {Cell(**row["cell"]): row for row in rows}

    def add(self, cell: Cell, figures: Mapping[str, Any]) -> None:
        """Append the options and the figures of a finished training to the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps({"cell": asdict(cell), **figures}) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the trainings that the results file does not have, and print the tables. Return 0."""
    options = _parser().parse_args(arguments)
    cells = list(cells_of(options))
    results = Results(path=Path(options.results))
    torch.set_num_threads(1)
    for seed in options.seeds:
        missing = [cell for cell in cells if cell.seed == seed and cell not in results.read()]
        if not missing or options.table_only:
            continue
        config = _warm_started(seed, options.output_dir)
        for cell in missing:
            figures = _train(cell, config)
            results.add(cell, figures)
            print(f"{cell}: final {figures['final']:.3f}, {figures['seconds']:.0f} s", file=sys.stderr, flush=True)
    print_tables(cells, results.read())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.staleness", description="The staleness table.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--eta", type=int, nargs="+", default=[0, 1, 4, 8], help="exact lags, in learner steps")
    parser.add_argument("--corrections", nargs="+", choices=list(CORRECTIONS), default=list(PUBLISHED))
    parser.add_argument(
        "--mini-batches", type=int, nargs="+", default=[1, 4], help="optimizer updates per learner step"
    )
    parser.add_argument("--steps", type=int, default=60, help="learner steps of one training")
    parser.add_argument("--lr", type=float, default=7e-4, help="constant learning rate")
    parser.add_argument("--output-dir", default="outputs", help="folder of assets and warm starts")
    parser.add_argument(
        "--results",
        default="outputs/staleness.jsonl",
        help="file of finished trainings; an interrupted benchmark continues from this file",
    )
    parser.add_argument("--table-only", action="store_true", help="train nothing, and print the finished trainings")
    return parser


def cells_of(options: argparse.Namespace) -> Iterator[Cell]:
    """Yield the options of all trainings, seed by seed.

    Because of this order, an interrupted benchmark has complete results for the first seeds.
    """
    for seed in options.seeds:
        for eta in options.eta:
            for mini_batches in options.mini_batches:
                for correction in options.corrections:
                    yield Cell(
                        seed=seed,
                        eta=eta,
                        correction=correction,
                        mini_batches=mini_batches,
                        steps=options.steps,
                        lr=options.lr,
                    )


def _warm_started(seed: int, output_dir: str) -> RunConfig:
    """Return the quickstart's options for a seed.

    The model is the warm-started policy of the seed. If this policy does not exist, the warm start runs first.
    """
    overrides = [f"seed={seed}", f"output_dir={output_dir}"]
    config = with_quickstart_assets(compose_run(overrides))
    policy = warm_start_path(config)
    if finished_warm_start(config) is None:
        command = [sys.executable, "-m", "asyncrl", "sft", *overrides]
        subprocess.run(command, check=True, timeout=WARM_START_TIMEOUT_S, stdout=sys.stderr)
    return replace(config, model=replace(config.model, path=str(policy)))


def _train(cell: Cell, config: RunConfig) -> dict[str, Any]:
    optimizer = replace(config.learner.optimizer, lr=cell.lr, schedule=Schedule.constant)
    config = replace(
        config,
        total_steps=cell.steps,
        algorithm=cell.algorithm(config.algorithm),
        learner=replace(config.learner, optimizer=optimizer),
    )
    outcome = LaggedTraining(config, lag=cell.eta, eval_every=5, eval_samples=2).run()
    return {
        "final": outcome.final,
        "area": outcome.area,
        "seconds": round(outcome.seconds, 1),
        "curve": outcome.curve,
        "metrics": {name: round(value, 6) for name, value in outcome.metrics.items()},
    }


def print_tables(cells: Sequence[Cell], finished: Mapping[Cell, Mapping[str, Any]]) -> None:
    """Print Markdown tables of the final accuracy and of the mean accuracy over training.

    Then print the mean final accuracies as JSON.
    """
    done = {cell: finished[cell] for cell in cells if cell in finished}
    print(f"{len(done)} of {len(cells)} trainings are finished")
    for figure, title in (("final", "sampled accuracy at the end"), ("area", "mean sampled accuracy over training")):
        for mini_batches in sorted({cell.mini_batches for cell in cells}):
            print(f"\n{title}, {mini_batches} update(s) per step: mean (lowest to highest) over seeds\n")
            _print_table([cell for cell in cells if cell.mini_batches == mini_batches], done, figure)
    print(json.dumps({"figures": _means(done), "finished": len(done), "cells": len(cells)}))


def _print_table(cells: Sequence[Cell], done: Mapping[Cell, Mapping[str, Any]], figure: str) -> None:
    etas, corrections = sorted({cell.eta for cell in cells}), list(dict.fromkeys(cell.correction for cell in cells))
    print("| correction | " + " | ".join(f"η = {eta}" for eta in etas) + " |")
    print("| --- |" + " --- |" * len(etas))
    for correction in corrections:
        row = []
        for eta in etas:
            values = [done[c][figure] for c in cells if c in done and (c.eta, c.correction) == (eta, correction)]
            row.append(f"{statistics.mean(values):.2f} ({min(values):.2f} to {max(values):.2f})" if values else "—")
        print(f"| `{correction}` | " + " | ".join(row) + " |")


def _means(done: Mapping[Cell, Mapping[str, Any]]) -> dict[str, float]:
    """Return the final accuracies by name, as means over seeds. Example of a name: ``tis/eta=4/updates=1``."""
    values: dict[str, list[float]] = {}
    for cell, row in done.items():
        values.setdefault(f"{cell.correction}/eta={cell.eta}/updates={cell.mini_batches}", []).append(row["final"])
    return {name: round(statistics.mean(finals), 4) for name, finals in values.items()}


if __name__ == "__main__":
    sys.exit(main())
