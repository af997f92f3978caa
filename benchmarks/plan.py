"""Compares the planner's predictions with real runs: ``python -m benchmarks.plan``.

The benchmark records one quickstart on the in-process engine at ``buffer.max_lag=0``. The engine and the learner rank
are each pinned to a core. The benchmark also makes runs at max_lag 1, 2 and 4 and with two engines. It predicts these
runs from the recorded run. In the simulation all engines share one core, the rank has the second core, and other
processes use both cores (`HostModel`). ``--keep DIR`` keeps the runs, and ``--again DIR`` compares the kept runs.

A machine's speed changes within minutes by more than the bounds of the figures. So the benchmark makes several
repetitions. Each repetition predicts its own runs from its own recorded run. The figure is the median error over the
repetitions. The order of the runs differs between repetitions. Runs with equal options also differ between repetitions.
The benchmark reports these differences (``equal_runs_differ_by``, ``equal_lags_differ_by``). A prediction error below
them means nothing.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import fmean, median

from asyncrl.cli.compose import read_config
from asyncrl.planner.calibration import Calibration, calibrate
from asyncrl.planner.scenario import Scenario
from asyncrl.planner.simulator import SimulatedRun, simulate
from asyncrl.profile.trace import FOLDER, Trace
from benchmarks.overlap import train_pinned
from benchmarks.report import Target, print_report

NUM_SIMULATED = 150
"""Steps of each simulation."""
NUM_SEEDS = 4
"""Simulations per case and repetition. The prediction is the mean, because the division of work is random."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Options of a run. The benchmark makes the run, and compares it with a prediction.

    Attributes:
        max_lag: ``buffer.max_lag`` of the run.
        num_engines: Number of engines of the run.
    """

    max_lag: int
    num_engines: int = 1

    @property
    def name(self) -> str:
        """Name of the run in the table."""
        return f"max_lag {self.max_lag}" if self.num_engines == 1 else f"{self.num_engines} engines"

    @property
    def folder(self) -> str:
        """Name of the folder of all runs with these options."""
        return self.name.replace(" ", "-")

    def scenario(self, recorded: Scenario) -> Scenario:
        """Return a copy of ``recorded``, the scenario of the recorded run, with the options of this case."""
        return replace(recorded, max_lag=self.max_lag, num_engines=self.num_engines, num_steps=NUM_SIMULATED)


RECORDED = Case(max_lag=0)
CASES = (Case(max_lag=1), Case(max_lag=2), Case(max_lag=4), Case(max_lag=2, num_engines=2))


@dataclass(frozen=True, kw_only=True)
class Round:
    """One repetition of the benchmark: a recorded run, the predictions from it, and the real runs that it predicts."""

    recorded: Calibration
    predicted: Mapping[Case, Sequence[SimulatedRun]]
    measured: Mapping[Case, Calibration]

    @classmethod
    def of(cls, folder: Path, number: int) -> Round:
        """Read all runs of repetition ``number`` from ``folder``; predict the other runs from the recorded run."""
        recorded = _read_run(folder / RECORDED.folder / str(number))
        return cls(
            recorded=recorded,
            predicted={
                case: [simulate(case.scenario(recorded.scenario), seed=seed) for seed in range(NUM_SEEDS)]
                for case in CASES
            },
            measured={case: _read_run(folder / case.folder / str(number)) for case in CASES},
        )

    def step_s(self, case: Case) -> float:
        """Return the predicted seconds per step of a case, as a mean over the seeds of the simulation."""
        return fmean(outcome.step_s for outcome in self.predicted[case])

    def lag_mean(self, case: Case) -> float:
        """Return the predicted mean lag (learner steps) of a case, as a mean over the seeds of the simulation."""
        return fmean(outcome.lag_mean for outcome in self.predicted[case])

    def throughput_error(self, case: Case) -> float:
        """Return a - 1, where a is the measured seconds per step divided by the predicted seconds per step."""
        return self.measured[case].step_s / self.step_s(case) - 1

    def lag_error(self, case: Case) -> float:
        """Return the measured mean lag minus the predicted mean lag, in learner steps."""
        return self.measured[case].lag_mean - self.lag_mean(case)


def main() -> int:
    """Make the runs, and compare each run with its prediction. Return 0 if every target is met, else 1."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan", description="Predictions against reality.")
    parser.add_argument("--steps", type=int, default=60, help="learner steps of each run")
    parser.add_argument("--repeats", type=int, default=7, help="number of repetitions; a figure is their median error")
    parser.add_argument("--keep", type=Path, help="keep the runs in this directory")
    parser.add_argument("--again", type=Path, help="compare the runs in this directory, and make no runs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="plan-") as scratch:
        folder = options.again or options.keep or Path(scratch)
        num_made = 0 if options.again else options.repeats
        for number in range(num_made):
            for case in order_of_runs(number):
                _make(folder / case.folder / str(number), case, options.steps)
        num_rounds = num_made or len(list((folder / RECORDED.folder).iterdir()))
        return _report([Round.of(folder, number) for number in range(num_rounds)])


def order_of_runs(number: int) -> Sequence[Case]:
    """Return the runs of repetition ``number`` in a random order. ``number`` is the seed of the order."""
    cases = (RECORDED, *CASES)
    return random.Random(number).sample(cases, len(cases))


def _make(folder: Path, case: Case, num_steps: int) -> None:
    overrides = (
        f"buffer.max_lag={case.max_lag}",
        f"rollout_fleet.num_engines={case.num_engines}",
        f"total_steps={num_steps}",
    )
    train_pinned(folder, *overrides, engine="transformers")


def _read_run(folder: Path) -> Calibration:
    """Read the recorded run in ``folder``, and calibrate the planner from this run."""
    run = next((path.parent for path in folder.rglob(FOLDER) if (path.parent / "config.yaml").is_file()), None)
    if run is None:
        raise FileNotFoundError(f"{folder} has no recorded run; make the runs with --keep first")
    return calibrate(Trace.load(run), read_config(run))


def _report(rounds: Sequence[Round]) -> int:
    replays = [simulate(round_.recorded.scenario).step_s for round_ in rounds]
    rows = {
        f"{RECORDED.name}, recorded": f"{_list(each.recorded.step_s for each in rounds)} s per step, "
        f"replayed {_list(replays)}"
    }
    throughput, lags = [], []
    for case in CASES:
        throughput.append(abs(median(each.throughput_error(case) for each in rounds)))
        lags.append(abs(median(each.lag_error(case) for each in rounds)))
        real = [each.measured[case] for each in rounds]
        rows[case.name] = (
            f"predicted {_list(each.step_s(case) for each in rounds)} s per step at mean lag "
            f"{_list((each.lag_mean(case) for each in rounds), 2)}, measured {_list(one.step_s for one in real)} at "
            f"{_list((one.lag_mean for one in real), 2)}: off by {throughput[-1]:.0%} and {lags[-1]:.2f}; predicted "
            f"{_idle(rounds[0].predicted[case][0])}"
        )
    steps = [[round_.measured[case].step_s for round_ in rounds] for case in CASES]
    steps.append([round_.recorded.step_s for round_ in rounds])
    mean_lags = [[round_.measured[case].lag_mean for round_ in rounds] for case in CASES]
    figures = {
        "throughput_error": max(throughput),
        "lag_error": max(lags),
        "equal_runs_differ_by": max(_difference(each, lambda a, b: max(a, b) / min(a, b) - 1) for each in steps),
        "equal_lags_differ_by": max(_difference(each, lambda a, b: abs(a - b)) for each in mean_lags),
    }
    targets = {"throughput_error": Target(at_most=0.10), "lag_error": Target(at_most=0.3)}
    title = "predictions from recorded runs, in-process engine, one core for engines and one core for the rank"
    return 0 if print_report(title, rows, figures, targets, baseline="the measured runs") else 1


def _difference(values: Sequence[float], between: Callable[[float, float], float]) -> float:
    """Call the function ``between`` for all pairs of ``values``; return the median result, or 0 without a pair."""
    return median([between(one, other) for one, other in combinations(values, 2)] or [0.0])


def _list(values: Iterable[float], digits: int = 3) -> str:
    return " ".join(f"{value:.{digits}f}" for value in values)


def _idle(outcome: SimulatedRun) -> str:
    """Return a text that lists the main predicted causes of idle time, each with its share of the whole time."""
    pools = {"learner": outcome.learner_idle, "fleet": outcome.fleet_idle}
    return "; ".join(
        f"{pool} idle: " + ", ".join(f"{cause} {share:.0%}" for cause, share in _largest(causes))
        for pool, causes in pools.items()
    )


def _largest(causes: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(causes.items(), key=lambda item: -item[1])[:3]


if __name__ == "__main__":
    sys.exit(main())
