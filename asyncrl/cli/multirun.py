"""``asyncrl train --multirun``: one run per combination of option values, with Hydra's sweepers and launchers.

Each run is a process of ``python -m asyncrl train``. The default launcher executes the runs one after the other.
`run_one` waits for a run without a deadline, because each run enforces its own deadlines.
"""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import TaskFunction
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from asyncrl.checks import check_options
from asyncrl.cli.compose import CONFIG_DIR, compose_run, explain, schema, with_own_experiments
from asyncrl.config import RunConfig, override_of
from asyncrl.metrics import counted, read_json
from rollout_fleet.engines.process_guard import signal_at_parent_death

_FORWARDED = (signal.SIGINT, signal.SIGTERM)
_TABLE_WIDTH = 160


def multirun(overrides: Sequence[str]) -> int:
    """Run all combinations of the option values in ``overrides``, and print a table of the runs at the end.

    Returns the exit status: 0, or 1 if a run failed. If a signal stopped the sweep, the status is 128 plus the signal's
    number. Example: ``["buffer.max_lag=0,2,4", "seed=0,1"]`` gives six runs.

    Raises:
        ValueError: an option of a combination is wrong. No run was started.
    """
    first = _check_combinations(overrides)
    folder = Path(first.output_dir, first.experiment, "multirun", time.strftime("%Y-%m-%d_%H-%M-%S")).resolve()
    own_folder = next((value for name, _, value in map(_split, overrides) if name == "hydra.sweep.dir"), "")
    folder = Path(own_folder.strip("'\"")).resolve() if own_folder and "$" not in own_folder else folder
    arguments = ["--multirun", f"hydra.sweep.dir='{folder}'", "hydra/job_logging=none"]
    with with_own_experiments(overrides) as (known, paths):
        arguments += [override for override in known if _split(override)[0] != "hydra.sweep.dir"]
        status = _run_hydra(arguments, _task(paths))
    if any(folder.glob("*")):
        sys.stdout.write(overview(folder))
    return status


def _check_combinations(overrides: Sequence[str]) -> RunConfig:
    own = [override for override in overrides if not _split(override)[0].startswith("hydra")]
    try:
        # Some sweepers choose the values only during the sweep. Such values are checked later, by each run.
        combinations = BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(own), None)[0]
    except HydraException as error:
        if any(_split(override)[0] == "hydra/sweeper" for override in overrides):
            return compose_run([override for override in own if "(" not in override])
        raise ValueError(explain(error, own)) from error
    configs = []
    for combination in combinations:
        # `~NAME` removes an option. Hydra's sweeper writes such an override as `~NAME=`, so remove the `=`.
        given = [option.removesuffix("=") if option.startswith("~") else option for option in combination]
        config = compose_run(given)
        try:
            check_options(config)
        except ValueError as error:
            raise ValueError(f"{' '.join(combination)}: {error}") from error
        configs.append(config)
    return configs[0]


def _split(override: str) -> tuple[str, str, str]:
    return override.lstrip("+~").partition("=")


def _task(own_experiments: dict[str, str]) -> TaskFunction:
    def task(composed: DictConfig) -> float | None:
        del composed  # not needed: the process of the run composes the options again
        return run_one(own_experiments)

    return task


def _run_hydra(arguments: Sequence[str], task: TaskFunction) -> int:
    ConfigStore.instance().store(name="schema", node=schema())
    before, sys.argv = sys.argv, [sys.argv[0], *arguments]
    try:
        hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name="run")(task)()
    except SystemExit as ending:  # Hydra has already printed the error
        return ending.code if isinstance(ending.code, int) else 1
    finally:
        sys.argv = before
    return 0


def run_one(own_experiments: dict[str, str]) -> float | None:
    """Start a run with the options that Hydra's launcher has chosen. Forward SIGINT and SIGTERM to the run.

    ``own_experiments`` maps the name of each of the user's experiments to its file. Returns a score for sweepers: the
    mean reward of the sampled answers in the evaluation after training; None without this evaluation.

    Raises:
        RuntimeError: the run failed. The message names the options and the folder.
    """
    job = HydraConfig.get()
    folder = Path(job.runtime.output_dir)
    options = []
    for override in job.overrides.task:
        name, _, value = override.partition("=")
        path = own_experiments.get(value.strip("'\"")) if name == "experiment" else None
        options.append(override_of("experiment", path) if path else override)
    sys.stdout.write(f"\nrun {job.job.num}: {shlex.join(options)}\n")
    sys.stdout.flush()
    stopped_by: list[int] = []
    started: list[subprocess.Popen[bytes]] = []

    def forward(number: int, _: FrameType | None) -> None:
        stopped_by.append(number)
        for process in started:
            process.send_signal(number)

    # Only the main thread may set signal handlers.
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, forward) for number in _FORWARDED if is_main}
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "asyncrl", "train", *options, override_of("run_dir", folder)],
            start_new_session=True,  # Ctrl-C must not reach the run directly, because this process forwards the signal
            preexec_fn=lambda: signal_at_parent_death(signal.SIGTERM),
        )
        started.append(process)
        if stopped_by:  # forward a signal that arrived while the process was starting
            process.send_signal(stopped_by[0])
        status = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if stopped_by:
        sys.exit(128 + stopped_by[0])  # the signal ends the whole sweep, not only this run
    if status != 0:
        raise RuntimeError(f"the run {shlex.join(options)} ended with status {status}; see {folder}/logs")
    summary = read_json(folder / "summary.json", "eval") or {"eval": {}}
    return (summary["eval"].get("after") or {}).get("sampled")


def overview(folder: Path) -> str:
    """Return a table of the runs below ``folder``, as text. An unfinished run has dashes as results.

    The columns are the options that differ between the runs, the results, and the folder.
    """
    runs = sorted(path.parent for path in folder.glob("**/config.yaml") if (path.parent / "logs").is_dir())
    options = [_leaves(OmegaConf.load(run / "config.yaml")) for run in runs]
    names = [name for name in (options[0] if options else ()) if name != "run_dir"]
    varied = [name for name in names if len({str(chosen.get(name)) for chosen in options}) > 1]
    table = Table(box=None, pad_edge=False)
    for name in (*varied, "greedy", "sampled", "s per step", "largest lag", "folder"):
        table.add_column(name, justify="left" if name == "folder" else "right", overflow="fold")
    for run, chosen in zip(runs, options, strict=True):
        values = [str(chosen.get(name, "-")) for name in varied]
        table.add_row(*values, *_result_cells(run), str(run.relative_to(folder)))
    with Console(width=_TABLE_WIDTH) as console, console.capture() as shown:
        console.print(f"\n{counted(len(runs), 'run')} in {folder}")
        console.print(table)
    return shown.get()


def _result_cells(run: Path) -> list[str]:
    summary = read_json(run / "summary.json", "eval", "max_lag", "train_wall_s", "policy_version")
    if summary is None:
        return ["-"] * 4
    after = summary["eval"]["after"] or {}
    rewards = [f"{after[kind]:.3f}" if after.get(kind) is not None else "-" for kind in ("greedy", "sampled")]
    step_s = summary["train_wall_s"] / max(1, summary["policy_version"])
    return [*rewards, f"{step_s:.3g}", str(summary["max_lag"]["realised"])]


def _leaves(node: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(node, DictConfig):
        return {prefix.removesuffix("."): node}
    return {name: value for key in node for name, value in _leaves(node[key], f"{prefix}{key}.").items()}
