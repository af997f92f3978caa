"""``--help``: what the options mean, read off the config dataclasses, which are the only place that says it."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

from asyncrl.config import RunConfig

# What a user turns first; --help-all lists every option.
COMMON_OPTIONS = (
    "seed",
    "total_steps",
    "output_dir",
    "model.path",
    "data.train_files",
    "data.eval_files",
    "buffer.max_lag",
    "buffer.on_stale",
    "algorithm.groups_per_step",
    "algorithm.samples_per_prompt",
    "algorithm.clip_low",
    "algorithm.clip_high",
    "learner.num_ranks",
    "learner.device",
    "learner.optimizer.lr",
    "learner.max_tokens_per_micro_batch",
    "rollout_fleet.engine",
    "rollout_fleet.num_engines",
    "rollout_fleet.groups_in_flight",
    "rollout_fleet.sampling.temperature",
    "rollout_fleet.sampling.max_new_tokens",
    "ray.address",
)

_USAGE = """\
usage: bash scripts/run_async.sh [experiment=NAME] [OPTION=VALUE ...]
       python -m asyncrl.train   [experiment=NAME] [OPTION=VALUE ...]

Trains a policy asynchronously: an SGLang rollout fleet, a ZMQ replay buffer and an FSDP learner group run at the same
time. Options are Hydra overrides; results go to <output_dir>/<experiment>/<time>/.

experiments: {experiments}

  --help       this page          --help-all   every option          --print-config   the resolved configuration
"""


def help_text(config: RunConfig, *, experiments: list[str], everything: bool) -> str:
    """Return the help page, with the values that the composed experiment gives.

    Args:
        config: The composed run.
        experiments: Names of the experiments to choose from.
        everything: List every option instead of `COMMON_OPTIONS`.
    """
    documented = describe(config)
    names = list(documented) if everything else COMMON_OPTIONS
    lines = [_USAGE.format(experiments=", ".join(experiments)), "options, with their values in this experiment:"]
    for name in names:
        meaning, value = documented[name]
        lines += [f"  {name}={_shown(value)}", f"      {meaning}"]
    return "\n".join(lines)


def describe(config: Any, prefix: str = "") -> dict[str, tuple[str, Any]]:
    """Map every option's dotted name to its meaning, from the docstring's Attributes, and its value."""
    meanings = _attribute_docs(type(config))
    hints = get_type_hints(type(config))
    found: dict[str, tuple[str, Any]] = {}
    for entry in fields(config):
        value = getattr(config, entry.name)
        if is_dataclass(hints[entry.name]):
            found |= describe(value, f"{prefix}{entry.name}.")
        else:
            found[prefix + entry.name] = (meanings[entry.name], value)
    return found


def _attribute_docs(kind: type) -> dict[str, str]:
    text = inspect.getdoc(kind) or ""
    _, _, attributes = text.partition("Attributes:\n")
    entries = re.split(r"\n    (?=\w+: )", "\n" + attributes)
    pairs = (entry.split(": ", 1) for entry in entries if ": " in entry)
    return {name.strip(): " ".join(meaning.split()) for name, meaning in pairs}


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "[" + ",".join(str(item) for item in value) + "]"
    return str(value)
