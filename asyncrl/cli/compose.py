"""Compose a `RunConfig` from the command line, and show the options for ``--help``.

Hydra composes the options, and the dataclasses check them. Every mistake becomes a `ValueError`.
"""

from __future__ import annotations

import difflib
import inspect
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, get_args, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from yaml import YAMLError

from asyncrl.config import REMOVED_OPTIONS, RunConfig
from asyncrl.core.registry import absolute_name
from learner.config import RETIRED_OPTIONS

CONFIG_DIR = Path(__file__).resolve().parents[2] / "configs"

# --help lists only these options; --help-all lists every option.
COMMON_OPTIONS = (
    "seed", "total_steps", "output_dir", "model.path", "data.train_files", "data.eval_files", "buffer.max_lag",
    "buffer.on_stale", "algorithm.groups_per_step", "algorithm.samples_per_prompt", "algorithm.clip_low",
    "algorithm.clip_high", "learner.num_ranks", "learner.device", "learner.optimizer.lr",
    "learner.max_tokens_per_micro_batch", "rollout_fleet.engine", "rollout_fleet.num_engines",
    "rollout_fleet.groups_in_flight", "rollout_fleet.sampling.temperature", "rollout_fleet.sampling.max_new_tokens",
    "ray.address",
)  # fmt: skip

_PATHS = (
    "output_dir", "run_dir", "model.path", "checkpoint.directory", "checkpoint.resume", "buffer.directory",
    "buffer.keys", "weights.directory", "sft.output_path", "learner.critic.path", "learner.reward_model.path",
    "rollout_fleet.judge_model",
)  # fmt: skip
"""Options with the path of a file or folder, in which a ``~`` at the start is the home folder."""

_USAGE = """\
usage: bash scripts/run_async.sh [experiment=NAME|FILE.yaml] [OPTION=VALUE ...]
       python -m asyncrl train   [experiment=NAME|FILE.yaml] [OPTION=VALUE ...]

Trains a policy asynchronously: an SGLang rollout fleet, a ZMQ replay buffer and an FSDP learner group run at the same
time. Options are Hydra overrides; results go to <output_dir>/<experiment>/<time>/.

experiments: {experiments}
corrections: {corrections} (correction=NAME sets anchor, weight and masks of the algorithm)

  --help       this page          --help-all   every option          --print-config   the resolved configuration
  --multirun   one run per combination of values, by Hydra: --multirun buffer.max_lag=0,2,4 seed=0,1
"""


def compose_run(overrides: Sequence[str]) -> RunConfig:
    """Return the configuration of a run, composed from ``configs/run.yaml`` and Hydra overrides.

    Args:
        overrides: Overrides in Hydra's grammar. ``experiment`` may also be the path of a YAML file. Example:
            ``["experiment=quickstart", "buffer.max_lag=4"]``.

    Raises:
        ValueError: an option is unknown, has the wrong type or is out of range. The message names the option.
    """
    _check_form(overrides)
    ConfigStore.instance().store(name="schema", node=schema())
    try:
        with (
            with_own_experiments(overrides) as (known, _),
            initialize_config_dir(config_dir=str(CONFIG_DIR), version_base="1.3", job_name="asyncrl"),
        ):
            composed = compose(config_name="run", overrides=known)
        _expand_home(composed)
        config = OmegaConf.to_object(composed)
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(explain(error, overrides)) from error
    if not isinstance(config, RunConfig):
        raise ValueError(f"configs/run.yaml must compose to a RunConfig, got {type(config).__name__}")
    return _with_whole_paths(config)


def read_config(run_folder: Path) -> RunConfig:
    """Read the configuration of a run from ``config.yaml`` in the run's folder.

    Raises:
        ValueError: the file is missing or damaged, or has options of another release that this release does not have.
    """
    path = run_folder / "config.yaml"
    if not path.is_file():
        raise ValueError(f"{run_folder} must be the folder of a run, got a folder without config.yaml; check the path")
    try:
        options = OmegaConf.load(path)
        got = f"{options!r:.80}"
    except (YAMLError, OSError, UnicodeDecodeError) as error:
        options, got = None, " ".join(str(error).split())
    if not isinstance(options, DictConfig) or not options:
        raise ValueError(f"{path} must hold the options of the run as YAML, got {got}; restore the file from a copy")
    try:
        for name in REMOVED_OPTIONS:
            section, _, key = name.rpartition(".")
            (OmegaConf.select(options, section) or {}).pop(key, None)
        config = OmegaConf.to_object(OmegaConf.merge(schema(), options))
    except OmegaConfBaseException as error:
        raise ValueError(f"{path}: {explain(error, ())}; use the release of asyncrl that wrote the file") from error
    assert isinstance(config, RunConfig)
    return config


def dump_yaml(config: RunConfig) -> str:
    """Return the configuration with all its options as YAML text. A user can run this YAML as an experiment."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def _check_form(overrides: Sequence[str]) -> None:
    options = describe(RunConfig())
    for override in overrides:
        name, equals, value = override.partition("=")
        if (name + equals + value) != (tight := name.strip() + equals + value.strip()):
            raise ValueError(
                f"options are set as OPTION=VALUE without spaces around =, got {override!r}; write {tight}"
            )
        if name.lstrip("+~").startswith("hydra"):
            raise ValueError(
                f"{override}: options of Hydra need --multirun; add --multirun, or leave the option out (run_dir sets "
                "the folder of a single run)"
            )
        if override.startswith(("+", "~")):
            _check_addition(override, options)


def _check_addition(override: str, options: Mapping[str, tuple[str, Any]]) -> None:
    name, value = override.lstrip("+~").partition("=")[::2]
    if (CONFIG_DIR / name).is_dir():
        return
    if name in options and not override.startswith("++"):
        what = "exists already" if override[0] == "+" else "cannot be removed"
        raise ValueError(f"{override}: the option {name} {what}; write {name}={value or options[name][1]}")
    with_own_keys = [option for option, (_, default) in options.items() if isinstance(default, dict)]
    is_own_key = any(name.startswith(f"{option}.") for option in with_own_keys)
    if name not in options and not is_own_key:
        raise ValueError(
            f"{override}: unknown option {name}; {_nearest(name)}; keys of your own are allowed in "
            f"{', '.join(with_own_keys)}"
        )


@contextmanager
def with_own_experiments(overrides: Sequence[str]) -> Iterator[tuple[list[str], dict[str, str]]]:
    """While the ``with`` block runs, keep copies of the user's experiment files in a folder on Hydra's search path.

    Args:
        overrides: Overrides in which ``experiment`` may be a path. Example: ``["experiment=mine.yaml", "seed=1"]``.

    Yields:
        A pair: the overrides with names of experiments instead of paths, and a dict from these names to the paths.

    Raises:
        ValueError: a file is missing or is not an experiment.
    """
    with tempfile.TemporaryDirectory(prefix="asyncrl-") as folder:
        known, paths = [], {}
        (experiments := Path(folder, "experiment")).mkdir()
        for override in overrides:
            name, _, value = override.partition("=")
            is_one = Path(value.strip("'\"")).is_file()  # if the whole value names a file, do not split it at commas
            files = [part.strip("'\"") for part in ([value] if is_one else value.split(","))]
            files = files if name == "experiment" else []
            for file in [file for file in files if file.endswith((".yaml", ".yml"))]:
                path = Path(file).expanduser().resolve()
                text = _read_experiment(path, override)
                paths[path.stem] = str(path)
                Path(experiments, f"{path.stem}.yaml").write_text(text)
                files[files.index(file)] = f"'{path.stem}'"
            known.append(f"experiment={','.join(files)}" if files else override)
        yield ([f"hydra.searchpath=['file://{folder}']", *known] if paths else known), paths


def _read_experiment(path: Path, override: str) -> str:
    if not path.is_file():
        raise ValueError(f"{override}: there is no file {path}; check the path")
    if (CONFIG_DIR / "experiment" / f"{path.stem}.yaml").is_file():
        raise ValueError(f"{override}: {path.stem} is the name of a built-in experiment; rename the file")
    try:
        text = path.read_text(encoding="utf-8")
        OmegaConf.create(text)
    except (YAMLError, UnicodeDecodeError, OmegaConfBaseException, OSError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{override}: {path} must be valid YAML in UTF-8, got: {reason}; correct the file") from error
    if "@package _global_" not in text:
        raise ValueError(f"{override}: {path} must contain the line '# @package _global_'; add it")
    if not re.search(r"^experiment: *\S", text, flags=re.MULTILINE):
        raise ValueError(
            f"{override}: {path} must set the experiment's name, which is the folder of its runs; add a line "
            f"'experiment: {path.stem}'"
        )
    return text


def _expand_home(options: DictConfig) -> None:
    """Expand a ``~`` at the start of a path. The shell does not expand ``~`` in quotes or in an experiment's YAML."""
    for name in _PATHS:
        path = OmegaConf.select(options, name)
        if path.startswith("~/"):
            OmegaConf.update(options, name, str(Path(path).expanduser()))


def _with_whole_paths(config: RunConfig) -> RunConfig:
    """Make the paths of the user's functions absolute, because workers may run in another directory."""
    algorithm, fleet, buffer = config.algorithm, config.rollout_fleet, config.buffer

    def whole(entries: Sequence[str]) -> list[str]:
        weighted = [entry.rpartition("*") for entry in entries]
        return [f"{weight}{star}{absolute_name(name)}" for weight, star, name in weighted]

    python = fleet.environment.python and str(Path(fleet.environment.python).expanduser().absolute())
    fleet = replace(
        fleet,
        reward=absolute_name(fleet.reward),
        rewards=whole(fleet.rewards),
        rewards_by_source={source: whole(entries) for source, entries in fleet.rewards_by_source.items()},
        environment=replace(fleet.environment, name=absolute_name(fleet.environment.name), python=python),
    )
    estimators = {source: absolute_name(name) for source, name in algorithm.advantage_by_source.items()}
    environments = {source: absolute_name(name) for source, name in config.data.environment_by_source.items()}
    return replace(
        config,
        data=replace(config.data, environment_by_source=environments),
        algorithm=replace(
            algorithm,
            loss=absolute_name(algorithm.loss),
            advantage=absolute_name(algorithm.advantage),
            advantage_by_source=estimators,
        ),
        rollout_fleet=fleet,
        buffer=replace(buffer, order=absolute_name(buffer.order), filters=list(map(absolute_name, buffer.filters))),
    )


def schema() -> DictConfig:
    """Return all options of a run with their types and defaults, for Hydra's ConfigStore."""
    options = OmegaConf.structured(RunConfig)
    _make_writable(options)
    return options


def _make_writable(node: DictConfig) -> None:
    # OmegaConf makes the nodes of frozen dataclasses read-only. Options in a read-only node cannot be overridden.
    OmegaConf.set_readonly(node, None)
    if OmegaConf.get_type(node) is dict:
        OmegaConf.set_struct(node, False)  # the user may add keys to an option that is a dict
    for key in node:
        child = node._get_node(key)
        if isinstance(child, DictConfig):
            _make_writable(child)


def explain(error: Exception, overrides: Sequence[str]) -> str:
    """Return one line for the user that explains an error of Hydra or OmegaConf.

    The line names the option if it is known. ``overrides`` are the overrides that the user gave.
    """
    if isinstance(error, OverrideParseException):
        spelled_out = re.sub(r"(?<![^=\[, ])~/", f"{Path.home()}/", str(error.override))
        if spelled_out != error.override:
            return f"cannot parse {error.override!r}: ~ needs quotes within the value; write {spelled_out!r}"
        return (
            f"cannot parse {error.override!r}, expected OPTION=VALUE; put quotes around a value with spaces or a list: "
            "'data.train_files=[a.parquet,b.parquet]'"
        )
    cause = error.__cause__ or error.__context__  # if the error is in a YAML file, Hydra sets only __context__
    detail = cause if isinstance(cause, OmegaConfBaseException) else error
    unknown = re.search(r"Could not find 'experiment/(.+?)'", str(error))
    if unknown and Path(f"{unknown[1]}.yaml").is_file():
        return f"there is no built-in experiment {unknown[1]}; for your own file write experiment={unknown[1]}.yaml"
    misspelt = re.search(r"Could not override '([\w.]+)'", str(error))
    option = misspelt[1] if misspelt else getattr(detail, "full_key", None)
    reason = str(detail).split("Config search path")[0].split("full_key:")[0]
    reason = " ".join(reason.split())
    if isinstance(detail, ConfigAttributeError | ConfigKeyError) and option:
        if option in describe(RunConfig()):
            section, _, key = option.rpartition(".")
            return f"{option} must be nested in YAML, got a key with dots; write {key} in the section {section}"
        return f"unknown option {option}; {(RETIRED_OPTIONS | REMOVED_OPTIONS).get(option) or _nearest(option)}"
    if option and "is not a ListConfig" in reason:
        value = next((item.partition("=")[2] for item in overrides if item.startswith(f"{option}=")), "a single value")
        return f"{option} must be a list, got {value}; write '{option}=[{value}]'"
    return f"{option}: {reason}" if option else reason


def _nearest(option: str) -> str:
    """Return a text that suggests options with similar names. Prefer names with the same part after the last dot."""
    names = list(describe(RunConfig()))
    namesakes = [name for name in names if name.rpartition(".")[2] == option.rpartition(".")[2]]
    near = difflib.get_close_matches(option, namesakes, n=3, cutoff=0.0) or difflib.get_close_matches(
        option, names, n=1, cutoff=0.7
    )
    return f"did you mean {' or '.join(near)}?" if near else "--help-all lists every option"


def help_text(config: RunConfig, *, everything: bool) -> str:
    """Return the text of the help page, with the values of the options in ``config``.

    If ``everything`` is True, the page lists all options, otherwise only `COMMON_OPTIONS`.
    """
    kinds = ("experiment", "correction")
    names = {f"{kind}s": ", ".join(sorted(p.stem for p in (CONFIG_DIR / kind).glob("*.yaml"))) for kind in kinds}
    usage = [_USAGE.format(**names), "options, with their values in this experiment:"]
    return "\n".join([*usage, *option_lines(config, describe(config) if everything else COMMON_OPTIONS)])


def option_lines(config: RunConfig, names: Iterable[str]) -> list[str]:
    """Return two lines of text per option in ``names``: the option with its value, and its meaning."""
    documented = describe(config)
    shown = ((name, *documented[name]) for name in names)
    return [line for name, meaning, value in shown for line in (f"  {name}={_shown(value)}", f"      {meaning}")]


def describe(config: Any, prefix: str = "") -> dict[str, tuple[str, Any]]:
    """Return a dict of all options of the dataclass ``config``, by dotted name. The values are (meaning, value) pairs.

    The meaning is a text from the docstring of the dataclass. Each name begins with ``prefix``.
    """
    meanings: dict[str, str] = {}
    for kind in type(config).__mro__:
        attributes = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")[2]
        entries = re.split(r"\n    (?=\w+: )", "\n" + attributes)
        pairs = (entry.split(": ", 1) for entry in entries if ": " in entry)
        meanings = {name.strip(): " ".join(meaning.split()) for name, meaning in pairs} | meanings
    hints = get_type_hints(type(config))
    found: dict[str, tuple[str, Any]] = {}
    for entry in fields(config):
        value = getattr(config, entry.name)
        if is_dataclass(kind := hints[entry.name]):
            found |= describe(value, f"{prefix}{entry.name}.")
        else:
            enums = [one for one in (kind, *get_args(kind)) if isinstance(one, type) and issubclass(one, StrEnum)]
            allowed = "".join(f" One of: {', '.join(enum)}." for enum in enums)
            found[prefix + entry.name] = (meanings[entry.name] + allowed, value)
    return found


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "[" + ",".join(str(item) for item in value) + "]"
    return str(value).lower() if isinstance(value, bool) else str(value)
