"""Measures how well generation and training overlap, at several values of ``buffer.max_lag``.

``python -m benchmarks.overlap`` trains a random policy on the quickstart's prompts, without warm start and evaluation.
The runs have ``buffer.max_lag`` 0, 1, 2 and 4. The engine and the learner rank are each pinned to a core. The benchmark
first measures the in-process engine, then SGLang (figures that end in ``_sglang``). All processes of the SGLang server
share the engine's core.

At max_lag 0, the rank waits while the engine generates, and the engine waits while the rank trains. So the run at
max_lag 0 shows how long generation alone and training alone take. An ideal step takes the longer of the two times. The
time of generation alone includes the wait for the last samples of a batch. At a larger max_lag, the engine generates
other batches during this wait. So an efficiency can exceed 1.

In a step, the engine and the rank each work for at least some tenths of a second (`Work`). The quickstart's own steps
(``--work quickstart``) take less than a tenth of a second. In such short steps, the controller, the buffer and the
messages of 256 samples take a seventh of the two cores. The speed of a machine changes by more than the margin of the
figures. So the benchmark compares only runs of the same repetition. A figure is the median over the repetitions.

The recorder's cost is measured separately, because it is much smaller than the difference between two runs. The cost is
the CPU time of one record (with the writing thread), multiplied by the largest number of records per step of a process.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgpack
from transformers import AutoTokenizer

from asyncrl.cli.quickstart import make_assets
from asyncrl.core.record import GroupEvent, LevelName, Pool, Recorder, SpanKind
from asyncrl.profile.attribution import Attribution, OverlapReport
from asyncrl.profile.trace import FOLDER, Span, StepWindow, Trace
from benchmarks.random_models import save_random_qwen3
from benchmarks.report import Target, print_report

LAGS = (0, 1, 2, 4)
ENGINES = {"transformers": "", "sglang": "_sglang"}
"""The engines, each with the suffix of the names of its figures."""
NUM_STEPS = 30
NUM_WARM_UP = 5
"""Number of first steps of a run. The benchmark does not measure them, because they load code and allocate memory."""
NUM_RECORDS = 50_000
_RUN_TIMEOUT_S = 600
_LOOK_EVERY_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Work:
    """The sizes of a learner step and of the model, a random Qwen3 of two layers.

    Attributes:
        groups: Prompts per step, with 8 samples each.
        in_flight: Number of prompts that the engine processes at the same time.
        hidden: Width of the model.
        new_tokens: Longest response. Few responses end earlier, because all `VOCABULARY` tokens are about equally
            likely.
        steps: Steps per run.
    """

    groups: int
    in_flight: int
    hidden: int
    new_tokens: int
    steps: int = NUM_STEPS

    def overrides(self, folder: Path) -> list[str]:
        """Make a model and data in ``folder``. Return Hydra overrides for a run with this model and data."""
        assets = make_assets(folder / "assets", seed=0)
        tokenizer = AutoTokenizer.from_pretrained(assets.model)
        ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        shape = {"layers": 2, "hidden": self.hidden, "mlp": 2 * self.hidden, "heads": 4, "head_dim": self.hidden // 4}
        model = save_random_qwen3(folder / "model", **shape, vocab_size=VOCABULARY, **ids)
        tokenizer.save_pretrained(model)
        return [
            "quickstart=false",
            f"model.path={model}",
            f"data.train_files=[{assets.train}]",
            f"data.eval_files=[{assets.held_out}]",
            f"algorithm.groups_per_step={self.groups}",
            f"rollout_fleet.groups_in_flight={self.in_flight}",
            f"rollout_fleet.sampling.max_new_tokens={self.new_tokens}",
        ]


VOCABULARY = 256
WORKS = {
    "transformers": Work(groups=32, in_flight=32, hidden=64, new_tokens=48),
    "sglang": Work(groups=32, in_flight=4, hidden=256, new_tokens=64, steps=12),
}
"""The work for each engine.

With the in-process engine, generation and training take about the same time. In this case the overlap saves the most
time, and any gap costs the most time. SGLang recomputes the running samples at each update. On a CPU this takes about a
fourth of the time to generate the samples. So a step has several times as many samples as the engine generates at the
same time, as in large runs.
"""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The trace (the recorded events) of a run, and the time windows of the run's steps after the warm-up."""

    trace: Trace
    steps: tuple[StepWindow, ...]

    @property
    def step_s(self) -> float:
        """Mean seconds per step after the warm-up."""
        return (self.steps[-1].end - self.steps[0].start) / len(self.steps) * 1e-9

    @property
    def counted(self) -> set[int]:
        """The step numbers of all learner steps after the warm-up."""
        return {step.version for step in self.steps}

    def learner_alone_s(self) -> float:
        """Return the median seconds of an update, plus the median seconds to copy the weights for a publish."""
        updates = self._median(span for span in self.trace.spans_of(SpanKind.update) if span.step in self.counted)
        return updates + self._median(self.trace.spans_of(SpanKind.publish_copy))

    def fleet_alone_s(self) -> float:
        """Return the median seconds from the first lease of a batch until the last group of the batch is stored.

        The figure is valid only if engines and ranks never work at the same time.
        """
        times: dict[int, list[int]] = {}
        for group in self.trace.groups.values():
            if group.step in self.counted:
                moments = (group.time(GroupEvent.lease), group.time(GroupEvent.stored))
                times.setdefault(group.step, []).extend(moment for moment in moments if moment is not None)
        return statistics.median(max(moments) - min(moments) for moments in times.values()) * 1e-9

    def attribution_error_ns(self) -> int:
        """Return the error of the time report in nanoseconds, summed over the learner and the fleet.

        The error is the difference between the available time and the sum of all busy and idle times.
        """
        attribution, (start, end) = Attribution.of(self.trace), self.trace.window
        places = {Pool.learner: len(self.trace.lanes(Pool.learner)), Pool.fleet: 0}
        for lane in self.trace.lanes(Pool.fleet):
            places[Pool.fleet] += self.trace.level_at(LevelName.capacity, lane, start)
        totals = {pool: attribution.total(pool) for pool in places}
        spent = {pool: time.busy + sum(time.idle.values()) for pool, time in totals.items()}
        return sum(abs(places[pool] * (end - start) - time) for pool, time in spent.items())

    def _median(self, spans: Iterator[Span] | tuple[Span, ...]) -> float:
        return statistics.median(span.end - span.start for span in spans) * 1e-9


def main() -> int:
    """Measure the overlap, and print the report. Return 0 if every target is met, else 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, help="learner steps of each run; the default depends on the work")
    parser.add_argument("--rounds", type=int, default=3, help="number of repetitions; a figure is their median")
    parser.add_argument("--engine", choices=ENGINES, help="measure only this engine")
    parser.add_argument("--lags", type=int, nargs="+", default=LAGS, help="values of buffer.max_lag, including 0")
    parser.add_argument("--work", choices=("long", "quickstart"), default="long", help="work of a step")
    parser.add_argument("--keep", type=Path, help="keep the runs in this directory")
    parser.add_argument("overrides", nargs="*", help="options of every run, such as weights.publish_every=2")
    args = parser.parse_args()
    engines = [args.engine] if args.engine else list(ENGINES)
    with tempfile.TemporaryDirectory(prefix="overlap-") as scratch:
        folder = args.keep or Path(scratch)
        rounds = {engine: _rounds(folder / engine, engine, args) for engine in engines}
        return _report(rounds, record_s=seconds_per_record(folder))


def _rounds(folder: Path, engine: str, args: argparse.Namespace) -> list[dict[int, Measurement]]:
    """Make the runs of an engine. Return one dictionary per repetition, which maps each ``max_lag`` to a run."""
    work = None if args.work == "quickstart" else WORKS[engine]
    steps = args.steps or (NUM_STEPS if work is None else work.steps)
    own = [] if work is None else work.overrides(folder / "work")
    options = [f"total_steps={steps}", *own, *args.overrides]
    return [
        {
            lag: _measured(folder / f"lag{lag}-{number}", f"buffer.max_lag={lag}", *options, engine=engine)
            for lag in args.lags
        }
        for number in range(args.rounds)
    ]


def _report(rounds: dict[str, list[dict[int, Measurement]]], *, record_s: float) -> int:
    rows: dict[str, str] = {}
    figures: dict[str, float | None] = {}
    targets = {"recorder_cost": Target(at_most=0.01), "attribution_error_ns": Target(at_most=0)}
    for engine, runs in rounds.items():
        learner = [by_lag[0].learner_alone_s() for by_lag in runs]
        fleet = [by_lag[0].fleet_alone_s() for by_lag in runs]
        rows[f"{engine}: alone"] = f"learner {_list(learner)}, fleet {_list(fleet)} s per step"
        ideal = [max(pair) for pair in zip(learner, fleet, strict=True)]
        for lag in runs[0]:
            steps = [by_lag[lag].step_s for by_lag in runs]
            rows[f"{engine}: max_lag {lag}"] = f"{_list(steps)} s per step; {_in_the_way(runs[-1][lag])}"
            if lag:
                figures[f"efficiency_lag{lag}{ENGINES[engine]}"] = _median_ratio(ideal, steps)
            if lag == 2:
                alone = [by_lag[0].step_s for by_lag in runs]
                figures[f"speedup_lag2{ENGINES[engine]}"] = _median_ratio(alone, steps)
        targets[f"efficiency_lag1{ENGINES[engine]}"] = Target(at_least=0.90)
        targets[f"efficiency_lag2{ENGINES[engine]}"] = Target(at_least=0.95)
    measured = [run for runs in rounds.values() for by_lag in runs for run in by_lag.values()]
    per_step = max(_records_per_step(run) for run in measured)
    rows["records"] = f"{per_step:.0f} per step, {record_s * 1e6:.1f} us each"
    figures["recorder_cost"] = max(_records_per_step(run) * record_s / run.step_s for run in measured)
    figures["attribution_error_ns"] = float(sum(run.attribution_error_ns() for run in measured))
    title = "overlap of generation and training, each pinned to a core"
    baseline = "the longer of generation and training alone, in the same repetition's run at max_lag 0"
    return 0 if print_report(title, rows, figures, targets, baseline=baseline) else 1


def _median_ratio(values: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(value / other for value, other in zip(values, others, strict=True))


def _list(values: Sequence[float]) -> str:
    return " ".join(f"{value:.3f}" for value in values)


def _in_the_way(run: Measurement) -> str:
    """Return a text that lists the main causes of idle time, each with its seconds per step."""
    report = OverlapReport.of(run.trace).run
    parts = []
    for pool in (Pool.learner, Pool.fleet):
        causes = [f"{cause} {s / report.num_steps:.3f}" for cause, s in list(report.idle_s(pool).items())[:4]]
        parts.append(f"{pool} idle: {', '.join(causes)}")
    return "; ".join(parts)


def _measured(folder: Path, *overrides: str, engine: str) -> Measurement:
    trace = Trace.load(train_pinned(folder, *overrides, engine=engine))
    return Measurement(trace=trace, steps=tuple(step for step in trace.steps[NUM_WARM_UP:] if not step.is_open))


def train_pinned(folder: Path, *overrides: str, engine: str) -> Path:
    """Train in a separate process; return the run's folder. The engine and the rank are each pinned to a core.

    The run writes into ``folder``. ``overrides`` are options of the run.
    """
    command = [sys.executable, "-m", "asyncrl", "train", f"output_dir={folder}", f"rollout_fleet.engine={engine}"]
    command += [
        "sft.enabled=false",
        "evaluation.enabled=false",
        "profile.advice=false",
        "rollout_fleet.samples.every_steps=0",
        *overrides,
    ]
    log_path = folder / "output.log"
    folder.mkdir(parents=True)
    with log_path.open("w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    try:
        seen: set[Path] = set()
        end_s = time.monotonic() + _RUN_TIMEOUT_S
        while process.poll() is None and time.monotonic() < end_s:
            seen |= _pin(folder, seen)
            time.sleep(_LOOK_EVERY_S)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command[1:4])} ended with {process.returncode}:\n{log_path.read_text()[-3000:]}")
    return next(path for path in (folder / "quickstart").iterdir() if (path / FOLDER).is_dir())


def _pin(folder: Path, seen: set[Path]) -> set[Path]:
    """Pin the engines to the first core and the learner ranks to the last core.

    The profile files in ``folder`` name the processes. Return the profile files that are not in ``seen``.
    """
    cores, found = sorted(os.sched_getaffinity(0)), set()
    for path in set(folder.glob(f"quickstart/*/{FOLDER}/*.msgpack")) - seen:
        header = next(iter(msgpack.Unpacker(path.open("rb"))), None)
        if header is None:
            continue
        found.add(path)
        if header[1]["pool"] in (Pool.fleet, Pool.learner):
            core = cores[0] if header[1]["pool"] == Pool.fleet else cores[-1]
            # Pin all threads of the process. A thread that they start later inherits the core.
            for task in Path(f"/proc/{header[1]['pid']}/task").iterdir():
                os.sched_setaffinity(int(task.name), {core})
    return found


def _records_per_step(run: Measurement) -> float:
    """Return the number of records per step of the process that writes the most records.

    A span (a time interval) takes two records.
    """
    counts: dict[str, int] = {}
    for notes, weight in ((run.trace.spans, 2), (run.trace.levels, 1), (run.trace.stamps, 1)):
        for note in notes:
            counts[note.process] = counts.get(note.process, 0) + weight
    return max(counts.values()) / len(run.trace.steps)


def seconds_per_record(folder: Path) -> float:
    """Return how many CPU seconds a process needs per record, including the time to write the record to a file.

    The recorder writes a typical mix of records into ``folder``.
    """
    recorder = Recorder(folder / "cost", process="cost", pool=Pool.fleet)
    began_s = time.process_time()
    for number in range(NUM_RECORDS // 4):
        with recorder.span(SpanKind.reward, lane="/reward", group=number):
            recorder.level(LevelName.running, number)
        recorder.stamp(
            GroupEvent.stored, number, version=3, lane="buffer", lengths=[9] * 8, rewards=[0.5] * 8, tokens=72
        )
    recorder.close()
    return (time.process_time() - began_s) / NUM_RECORDS


if __name__ == "__main__":
    sys.exit(main())
