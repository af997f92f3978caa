"""Predictions against reality: ``python -m benchmarks.plan``.

Records one quickstart on the in-process engine at ``buffer.max_lag=0``, with engine and learner rank pinned to a
core each, predicts the runs at 1, 2 and 4 and with two engines from it, and then makes these runs. The simulation knows
that all engines share one core, the rank has another, and the other processes take time of both (`HostModel`).
``--again DIR`` compares runs that ``--keep DIR`` has kept.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from asyncrl.cli.compose import read_config
from asyncrl.profile.calibration import Calibration, calibrate
from asyncrl.profile.planner import Prediction, predict
from asyncrl.profile.scenario import Scenario
from asyncrl.profile.trace import FOLDER, Trace
from benchmarks.overlap import train_pinned
from benchmarks.report import Target, print_report

NUM_SIMULATED = 300
"""Steps of each simulation."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run that is predicted and made.

    Attributes:
        max_lag: Its bound.
        num_engines: Its engines.
    """

    max_lag: int
    num_engines: int = 1

    @property
    def name(self) -> str:
        """For the table."""
        return f"max_lag {self.max_lag}" if self.num_engines == 1 else f"{self.num_engines} engines"

    @property
    def folder(self) -> str:
        """Of its runs."""
        return self.name.replace(" ", "-")

    def scenario(self, recorded: Scenario) -> Scenario:
        """The recorded scenario under this case's options."""
        return replace(recorded, max_lag=self.max_lag, num_engines=self.num_engines, num_steps=NUM_SIMULATED)


RECORDED = Case(max_lag=0)
CASES = (Case(max_lag=1), Case(max_lag=2), Case(max_lag=4), Case(max_lag=2, num_engines=2))


def main() -> int:
    """Record, predict, run, compare; returns 0 if every target is met."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan", description="Predictions against reality.")
    parser.add_argument("--steps", type=int, default=60, help="learner steps of each run")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each; the one with the median step time counts")
    parser.add_argument("--keep", type=Path, help="keep the runs in this directory")
    parser.add_argument("--again", type=Path, help="compare the runs in this directory, and make none")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="plan-") as scratch:
        folder = options.again or options.keep or Path(scratch)
        num_repeats = 0 if options.again else options.repeats
        for repeat in range(num_repeats):  # all in turn: what slows the machine down for a while is in each of them
            for case in (RECORDED, *CASES):
                _make(folder / case.folder / str(repeat), case, options.steps)
        recorded = _median_run(folder / RECORDED.folder)
        predicted = {case: predict(case.scenario(recorded.scenario)) for case in CASES}
        measured = {case: _median_run(folder / case.folder) for case in CASES}
    return _report(recorded, predicted, measured)


def _make(folder: Path, case: Case, num_steps: int) -> None:
    overrides = (
        f"buffer.max_lag={case.max_lag}",
        f"rollout_fleet.num_engines={case.num_engines}",
        f"total_steps={num_steps}",
    )
    train_pinned(folder, *overrides, engine="transformers")


def _median_run(folder: Path) -> Calibration:
    """What the run with the median step time says, of those in a folder."""
    runs = [path.parent for path in folder.rglob(FOLDER) if (path.parent / "config.yaml").is_file()]
    read = [calibrate(Trace.load(run), read_config(run)) for run in runs]
    if not read:
        raise FileNotFoundError(f"there is no recorded run in {folder}; make them with --keep")
    return sorted(read, key=lambda calibration: calibration.step_s)[len(read) // 2]


def _report(recorded: Calibration, predicted: dict[Case, Prediction], measured: dict[Case, Calibration]) -> int:
    replayed = predict(recorded.scenario, replicates=1).outcome
    rows = {f"{RECORDED.name}, recorded": f"{recorded.step_s:.3f} s per step, replayed {replayed.step_s:.3f}"}
    throughput, lags = [], []
    for case in CASES:
        prediction, real = predicted[case], measured[case]
        throughput.append(abs(real.step_s / prediction.outcome.step_s - 1))
        lags.append(abs(prediction.outcome.lag_mean - real.lag_mean))
        rows[case.name] = (
            f"predicted {prediction.outcome.step_s:.3f} s per step at mean lag {prediction.outcome.lag_mean:.2f}, "
            f"measured {real.step_s:.3f} at {real.lag_mean:.2f}; predicted {_idle(prediction)}"
        )
    figures = {"throughput_error": max(throughput), "lag_error": max(lags)}
    targets = {"throughput_error": Target(at_most=0.10), "lag_error": Target(at_most=0.3)}
    title = "predictions from one recorded run, in-process engine, a core for engines and one for the rank"
    return 0 if print_report(title, rows, figures, targets, baseline="the runs themselves") else 1


def _idle(prediction: Prediction) -> str:
    """What either pool is predicted to wait for most, as shares of the time."""
    outcome = prediction.outcome
    pools = {"learner": outcome.learner_idle, "fleet": outcome.fleet_idle}
    return "; ".join(
        f"{pool} idle: " + ", ".join(f"{cause} {share:.0%}" for cause, share in _largest(causes))
        for pool, causes in pools.items()
    )


def _largest(causes: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(causes.items(), key=lambda item: -item[1])[:3]


if __name__ == "__main__":
    sys.exit(main())
