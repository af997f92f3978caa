"""The ``asyncrl`` command, ``asyncrl train | sft | evaluate | samples | …``, and what its parts have in common."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from types import FrameType
from typing import NoReturn

# A command's module is imported when it is called: some need torch, which takes seconds to load.
_COMMANDS = {
    "train": ("asyncrl.cli.train_command", "train a policy asynchronously"),
    "plan": ("asyncrl.cli.plan_command", "predict what other options would do, from a run or a scenario"),
    "sft": ("asyncrl.cli.sft_command", "fine-tune a model on demonstrations"),
    "profile": ("asyncrl.profile.command", "say why learner and fleet of a run were idle"),
    "evaluate": ("asyncrl.cli.evaluate_command", "evaluate a model, a checkpoint or a run on held-out prompts"),
    "samples": ("asyncrl.samples", "read the decoded samples that a run has kept"),
    "dashboard": ("asyncrl.profile.dashboard", "serve the report of a run, live"),
    "join": ("rollout_fleet.join", "add engines to a run while it goes"),
    "leave": ("rollout_fleet.join:leave", "let an engine leave a run while it goes, or list the engines"),
    "inspect": ("buffer.inspect", "look into the replay buffer of a running training"),
    "export": ("learner.checkpoint", "turn a checkpoint into a model in Hugging Face layout"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``asyncrl COMMAND ...``; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help"):
        sys.stdout.write(_usage())
        return 0
    if name not in _COMMANDS:
        sys.stderr.write(f"error: unknown command {name!r}, expected one of {', '.join(_COMMANDS)}\n")
        return 2
    _ignore_missing_codecs()
    sys.argv = [f"asyncrl {name}", *rest]  # a command's own argument parser shows it in messages
    before = {number: signal.signal(number, stop_early) for number in (signal.SIGINT, signal.SIGTERM)}
    module, _, function = _COMMANDS[name][0].partition(":")
    command: Callable[[], int | None] = getattr(import_module(module), function or "main")
    if name != "train":  # a training's supervisor takes them over, once there is something to stop
        for number, handler in before.items():
            signal.signal(number, handler)
    return command() or 0


def exit_status(number: int) -> int:
    """The exit status of a command that a signal stopped. Example: 143 for SIGTERM."""
    return 128 + number


def stop_early(number: int, _: FrameType | None) -> NoReturn:
    """Handle a signal that comes before a command has started anything."""
    os.write(2, f"stopped by {signal.Signals(number).name} before anything was started\n".encode())
    os._exit(exit_status(number))


def _ignore_missing_codecs() -> None:
    """Keep torchvision's first words out of every log, here and in child processes: nothing here reads images."""
    message = "Failed to load image Python extension"
    warnings.filterwarnings("ignore", message=message)
    former = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, [former, f"ignore:{message}:UserWarning"]))


def _usage() -> str:
    lines = [f"  {name:8} {meaning}" for name, (_, meaning) in _COMMANDS.items()]
    return "\n".join(["usage: asyncrl COMMAND ...", "", *lines, "", "asyncrl COMMAND --help explains a command.", ""])
