"""``asyncrl plan RUN | SPEC.yaml | --fit MODEL``: predict the effect of other options, or which layouts fit on GPUs.

RUN is the folder of a run, which may still be in progress. SPEC.yaml is a scenario: it describes the sizes, speeds and
options of a run to simulate (docs/planning.md). The command writes ``plan.json``, the chart ``plan.png`` and, for RUN,
``advice.json``.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from asyncrl.cli.compose import CONFIG_DIR, compose_run, read_config
from asyncrl.config import RunConfig, override_of
from asyncrl.core.errors import with_exit_status
from asyncrl.metrics.run_records import write_json
from asyncrl.planner.calibration import Calibration, calibrate
from asyncrl.planner.choices import (
    MAX_REPLAY_ERROR,
    NUM_REPLICATES,
    Choices,
    Prediction,
    RunPlan,
    advise,
    make_plan,
    misses,
    splits_of,
)
from asyncrl.planner.device_memory import GIB, longest_sample
from asyncrl.planner.fit import DeviceUse, card_bytes, layouts_that_fit, model_size
from asyncrl.planner.scenario import Scenario, load_spec
from asyncrl.profile.report import Advice, advice_file
from asyncrl.profile.trace import FOLDER, Trace
from buffer.config import OnStale

_NUM_SHOWN = 12
_MAX_RECORD_BYTES = 64 << 20
"""Largest size of a profile that ``--only-advice`` reads. To read it takes about ten times as much memory."""
_ADVICE_STEPS = 30
"""Number of learner steps that ``--only-advice`` simulates for each choice of options."""
_FRONTIER_REPLICATES = 2
_PROGRESS_EVERY_S = 3.0


@with_exit_status
def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``asyncrl plan`` and return the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.fit:
        return _print_fit(options)
    if options.target is None:
        parser.error("the folder of a run, a scenario or --fit MODEL is required")
    target = Path(options.target)
    if options.only_advice:
        return _write_advice_only(target, options)
    folder = Path(options.out or (target if target.is_dir() else target.parent))
    calibration = _read_run(target, options.steps) if target.is_dir() else None
    base = load_spec(target) if calibration is None else calibration.scenario
    base = base if options.steps is None else replace(base, num_steps=options.steps)
    notes = () if calibration is None else calibration.notes
    # Create the folder before the simulations, which take minutes, so that a folder that is not writable fails early.
    folder.mkdir(parents=True, exist_ok=True)
    plan = make_plan(
        base,
        _choices(options, base),
        replicates=options.replicates,
        seed=options.seed,
        notes=notes,
        on_progress=_Progress(),
    )
    advice = None if calibration is None else _advised(target, calibration, options)
    document = {**plan.to_dict(), "advice": advice and asdict(advice)}
    write_json(folder / "plan.json", document)
    chart = folder / "plan.png" if draw(plan, folder / "plan.png") else None
    if options.json:
        sys.stdout.write(json.dumps(document) + "\n")
    else:
        written = " and ".join(str(path) for path in (folder / "plan.json", chart) if path)
        sys.stdout.write("\n".join([*_page(plan, calibration, advice), "", f"wrote {written}", ""]))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="asyncrl plan", description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("target", metavar="RUN|SPEC", nargs="?", help="folder of a run, or YAML file of a scenario")
    parser.add_argument("--fit", metavar="MODEL", help="folder with config.json, name of a model or of an experiment")
    parser.add_argument("--gpu", metavar="NAME:COUNT", default="H100:8", help="the GPUs of --fit; default: H100:8")
    parser.add_argument("--max-lag", type=int, nargs="+", default=[0, 1, 2, 4], help="staleness bounds to predict")
    parser.add_argument("--publish-every", type=int, nargs="+", default=[1, 2], help="steps between published versions")
    parser.add_argument("--batch", type=int, nargs="+", default=[], help="groups per step; default: the run's value")
    parser.add_argument("--on-stale", nargs="+", choices=list(OnStale), default=["wait", "requeue"], type=OnStale)
    parser.add_argument("--keep-split", action="store_true", help="keep the numbers of engines and ranks")
    parser.add_argument("--replicates", type=_at_least(1), default=NUM_REPLICATES, help="simulations per interval")
    parser.add_argument("--steps", type=int, help="learner steps to simulate")
    parser.add_argument("--seed", type=_at_least(0), default=0, help="seed of the response lengths")
    parser.add_argument(
        "--out", help="folder for plan.json and plan.png; default: the run's folder, or the folder of the scenario"
    )
    parser.add_argument(
        "--only-advice", type=int, metavar="S", help="write only the advice, with at most S seconds of CPU time"
    )
    parser.add_argument(
        "--frontier", action="store_true", help="with --only-advice: also write plan.json for the bounds of --max-lag"
    )
    parser.add_argument("--json", action="store_true", help="print plan.json instead of the table")
    return parser


def _at_least(low: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if int(text) < low:
            raise argparse.ArgumentTypeError(f"must be >= {low}, got {int(text)}")
        return int(text)

    return number


class _Progress:
    def __init__(self) -> None:
        self._written_at = time.monotonic()

    def __call__(self, simulation: str) -> None:
        now = time.monotonic()
        if now - self._written_at >= _PROGRESS_EVERY_S:
            self._written_at = now
            sys.stderr.write(f"plan: simulating {simulation}\n")


def _read_run(folder: Path, num_steps: int | None) -> Calibration:
    config = read_config(folder)
    if config.placement.colocated:
        raise ValueError(
            f"{folder} is a run with placement.colocated=true, expected separate pools: the simulator does not support "
            "colocated pools; write a scenario (SPEC.yaml), and run asyncrl plan SPEC.yaml"
        )
    try:
        calibration = calibrate(Trace.load(folder), config)
    except FileNotFoundError as error:
        raise ValueError(str(error)) from error
    if num_steps is None:
        return calibration
    return replace(calibration, scenario=replace(calibration.scenario, num_steps=num_steps))


def _choices(options: argparse.Namespace, base: Scenario) -> Choices:
    return Choices(
        splits=() if options.keep_split else splits_of(base),
        max_lag=options.max_lag,
        groups_per_step=options.batch,
        publish_every=options.publish_every,
        on_stale=options.on_stale,
    )


def _advised(run_dir: Path, calibration: Calibration, options: argparse.Namespace) -> Advice | None:
    advice = advise(
        calibration.scenario,
        measured_step_s=calibration.step_s,
        num_faults=calibration.num_faults,
        seed=options.seed,
        keep_split=options.keep_split,
    )
    write_json(advice_file(run_dir), {"advice": advice and asdict(advice), "cpu_s": time.process_time()})
    return advice


def _write_advice_only(run_dir: Path, options: argparse.Namespace) -> int:
    """Write ``advice.json``; if ``--frontier`` is set, also write ``plan.json``. Limit the CPU time of this process."""
    resource.setrlimit(resource.RLIMIT_CPU, (options.only_advice, options.only_advice))
    num_bytes = sum(path.stat().st_size for path in (run_dir / FOLDER).glob("*.msgpack"))
    if num_bytes > _MAX_RECORD_BYTES:
        raise ValueError(
            f"the run's profile has {num_bytes >> 20} MiB, --only-advice reads at most {_MAX_RECORD_BYTES >> 20} MiB"
        )
    calibration = _read_run(run_dir, options.steps or _ADVICE_STEPS)
    advice = _advised(run_dir, calibration, options)
    if options.frontier:
        _write_frontier(run_dir, calibration, options)
    sys.stdout.write(f"advice: {advice or 'none'}\n")
    return 0


def _write_frontier(run_dir: Path, calibration: Calibration, options: argparse.Namespace) -> None:
    plan = make_plan(
        calibration.scenario,
        Choices(max_lag=options.max_lag, publish_every=(), on_stale=()),
        replicates=_FRONTIER_REPLICATES,
        seed=options.seed,
        notes=(*calibration.notes, "only buffer.max_lag varies here; asyncrl plan varies more options"),
    )
    if misses(plan.current, calibration.step_s):
        sys.stderr.write(f"the replay misses the measured step time by more than {MAX_REPLAY_ERROR:.0%}: no frontier\n")
        return
    write_json(run_dir / "plan.json", {**plan.to_dict(), "advice": None})


# Memory


def _print_fit(options: argparse.Namespace) -> int:
    name, _, count = options.gpu.partition(":")
    if not (count or "1").isdecimal() or not int(count or "1"):
        raise ValueError(f"--gpu must be NAME:COUNT, for example H100:8, got {options.gpu!r}")
    card, num_gpus = card_bytes(name), int(count or "1")
    config = experiment_or_model(options.fit)
    model = model_size(config.model.path)
    layouts = layouts_that_fit(config, model, card, num_gpus)
    if options.json:
        sys.stdout.write(json.dumps([asdict(layout) for layout in layouts]) + "\n")
        return 0
    experts = (
        f", {model.num_experts} experts per layer, {model.experts_per_token} per token" if model.num_experts else ""
    )
    lines = [
        f"{options.fit}: {model.num_parameters / 1e9:.2f} billion parameters{experts}; {num_gpus} x {name.upper()} of "
        f"{card / GIB:.1f} GiB; samples of up to {longest_sample(config):,} tokens",
        "",
        f"{'ranks':>5} {'sp':>3} {'engines':>9} {'token budget':>12}  GiB of a rank, by kind",
    ]
    for layout in layouts:
        engines = f"{layout.num_engines} x tp {layout.tp_size}"
        lines.append(
            f"{layout.num_ranks:>5} {layout.sp_size:>3} {engines:>9} {layout.budget:>12,}  {_kinds(layout.rank)}"
        )
    engine = _kinds(layouts[0].engine) if layouts else ""
    lines += ["", f"GiB of an engine's GPU: {engine}"] if layouts else [NOTHING_FITS if num_gpus > 1 else ONE_GPU]
    sys.stdout.write("\n".join([*lines, ""]))
    return 0 if layouts else 1


ONE_GPU = "ranks and engines have separate GPUs, so they need at least two; on one GPU use placement.colocated=true"
NOTHING_FITS = "nothing fits: use more GPUs, GPUs with more memory, or learner.lora.rank for adapters"


def _kinds(use: DeviceUse) -> str:
    parts = ", ".join(f"{kind} {size / GIB:.1f}" for kind, size in use.parts.items() if size >= GIB / 20)
    return f"{use.total / GIB:.1f}: {parts}"


def experiment_or_model(name: str) -> RunConfig:
    """Return the configuration of the built-in experiment ``name``.

    If there is no such experiment, return the default configuration with the model ``name``.
    """
    if (CONFIG_DIR / "experiment" / f"{name}.yaml").is_file():
        return compose_run([f"experiment={name}"])
    return compose_run(["experiment=custom", override_of("model.path", name)])


# Output


def _page(plan: RunPlan, calibration: Calibration | None, advice: Advice | None) -> list[str]:
    lines = []
    if calibration is not None:
        current = plan.current.outcome
        lines.append(
            f"measured {calibration.step_s:.3g} s per step at mean lag {calibration.lag_mean:.2f}; replayed "
            f"{current.step_s:.3g} s at {current.lag_mean:.2f}"
        )
        if misses(plan.current, calibration.step_s):
            lines.append(
                f"note: the replay misses the measured step time by more than {MAX_REPLAY_ERROR:.0%}, so there is no "
                "advice, and the recommended choice may not suit this run"
            )
    lines += [f"note: {note}" for note in plan.notes]
    lines += ["", *_table(plan), ""]
    best = plan.recommended
    changes = best.to_dict(plan.base)["overrides"]
    lines.append(
        f"recommended: {' '.join(changes)} ({best.outcome.step_s:.3g} s per step, {best.step_s[0]:.3g} to "
        f"{best.step_s[1]:.3g}, mean lag {best.outcome.lag_mean:.2f})"
        if changes
        else "recommended: the present options"
    )
    if calibration is not None:
        lines.append(f"advice: {advice}" if advice else "advice: none")
    return lines


def _table(plan: RunPlan) -> list[str]:
    fastest = sorted(plan.predictions, key=lambda one: -one.groups_per_s)
    shown = fastest[:_NUM_SHOWN]
    shown += [plan.current] if plan.current not in shown else []
    head = (
        f"{'engines':>7} {'ranks':>5} {'batch':>5} {'max_lag':>7} {'every':>5} {'on_stale':8} {'s/step':>8} {'lag':>5}"
    )
    lines = [f"{head}  {'learner waits for':28} the fleet waits for"]
    for one in shown:
        scenario, outcome = one.scenario, one.outcome
        mark = "  <- now" if one is plan.current else "  <- recommended" if one is plan.recommended else ""
        lines.append(
            f"{scenario.num_engines:>7} {scenario.num_ranks:>5} {scenario.groups_per_step:>5} {scenario.max_lag:>7} "
            f"{scenario.publish_every:>5} {scenario.on_stale:8} {outcome.step_s:>8.3g} {outcome.lag_mean:>5.2f}  "
            f"{_largest(one, 'learner_idle'):28} {_largest(one, 'fleet_idle')}{mark}"
        )
    hidden = len(plan.predictions) - len(shown)
    return [*lines, *([f"… and {hidden} more in plan.json"] if hidden > 0 else [])]


def _largest(one: Prediction, pool: str) -> str:
    causes: dict[str, float] = dict(getattr(one.outcome, pool))
    if not causes:
        return "-"
    name = max(causes, key=lambda cause: causes[cause])
    return f"{name} {causes[name]:.0%}"


def draw(plan: RunPlan, path: Path) -> bool:
    """Draw a chart with the mean lag on the x axis and the predicted step time on the y axis. Save it as ``path``.

    The chart has one curve per division of the devices between engines and ranks. Returns False if there is no chart,
    because matplotlib is not installed; otherwise True.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        return False
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for curve in plan.curves():
        points: list[dict[str, Any]] = curve["points"]
        lags, times = [point["lag"] for point in points], [point["step_s"] for point in points]
        low = [max(0.0, point["step_s"] - point["interval"][0]) for point in points]
        high = [max(0.0, point["interval"][1] - point["step_s"]) for point in points]
        axes.errorbar(lags, times, yerr=[low, high], marker="o", capsize=2, label=curve["name"])
        for lag, step_s, point in zip(lags, times, points, strict=True):
            axes.annotate(str(point["max_lag"]), (lag, step_s), textcoords="offset points", xytext=(4, 4), fontsize=8)
    for one, label, marker in ((plan.current, "now", "D"), (plan.recommended, "recommended", "*")):
        axes.plot(one.outcome.lag_mean, one.outcome.step_s, marker, markersize=12, label=label)
    axes.set(xlabel="mean lag (learner steps)", ylabel="seconds per step", title="predicted, by buffer.max_lag")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True
