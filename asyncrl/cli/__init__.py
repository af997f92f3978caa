"""The ``asyncrl`` command: ``asyncrl train | sft | evaluate | samples | …``."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from types import FrameType
from typing import NoReturn

# `_COMMANDS` maps each command to its module and its line in ``--help``.
# A module is imported only when its command runs, because some modules import torch, which takes seconds.
_COMMANDS = {
    "train": ("asyncrl.cli.train_command", "train a policy asynchronously"),
    "plan": ("asyncrl.cli.plan_command", "predict the effect of other options, from a run or a scenario"),
    "sft": ("asyncrl.cli.sft_command", "fine-tune a model on demonstrations"),
    "profile": ("asyncrl.profile.command", "show why learner and fleet of a run were idle"),
    "evaluate": ("asyncrl.cli.evaluate_command", "evaluate a model, a checkpoint or a run on held-out prompts"),
    "samples": ("asyncrl.samples", "show the decoded samples of a run"),
    "rewards": ("asyncrl.cli.rewards_command", "try rewards on given responses, before a run"),
    "dashboard": ("asyncrl.profile.dashboard", "serve the live report of a run"),
    "join": ("rollout_fleet.join", "add engines to a running training"),
    "leave": ("rollout_fleet.join:leave", "remove an engine from a running training, or list the engines"),
    "runs": ("asyncrl.cli.runs_command", "list runs, their lives and their checkpoints"),
    "audit": ("asyncrl.cli.audit_command", "follow every trained token of a run from its engine to its step"),
    "checkpoint": ("asyncrl.cli.checkpoint_command", "let a running training save a checkpoint"),
    "keys": ("asyncrl.cli.keys_command", "replace the keys of a running training"),
    "buffer": ("asyncrl.cli.buffer_command", "export the groups of a run's buffer, and make demonstrations of them"),
    "inspect": ("buffer.inspect", "inspect the replay buffer of a running training"),
    "doctor": ("asyncrl.cli.doctor_command", "check this machine, or show the alarms and errors of a run"),
    "check-gpu": ("asyncrl.gpu_check.program", "check this machine for training, part by part"),
    "export": ("learner.checkpoint", "convert a checkpoint to a model in Hugging Face layout"),
}


def command_line() -> NoReturn:
    """Run the ``asyncrl`` command of this process, and end the process with the exit status of `main`.

    After a training, this function skips Python's normal exit, because that exit may wait forever for threads of
    libraries. At this time, all other processes of the training have ended, and all files are written.
    """
    is_training = sys.argv[1:2] == ["train"]
    status = main()
    if is_training:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):  # ignore write errors: the program that reads the output may have closed the pipe
                stream.flush()
        os._exit(status)
    sys.exit(status)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``asyncrl COMMAND ...`` and return the exit status.

    ``arguments`` are the words after ``asyncrl``. If None, the words come from the command line of this process.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help"):
        lines = [f"  {name:10} {meaning}" for name, (_, meaning) in _COMMANDS.items()]
        usage = ["usage: asyncrl COMMAND ...", "", *lines, "", "asyncrl COMMAND --help explains a command.", ""]
        sys.stdout.write("\n".join(usage))
        return 0
    if name not in _COMMANDS:
        sys.stderr.write(f"error: unknown command {name!r}, expected one of {', '.join(_COMMANDS)}\n")
        return 2
    if os.environ.get("COLUMNS") == "0":
        del os.environ["COLUMNS"]  # with 0 columns, the library rich would print nothing
    # Hide torchvision's warning about missing image codecs, also in child processes: no command needs the codecs.
    message = "Failed to load image Python extension"
    warnings.filterwarnings("ignore", message=message)
    former = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, [former, f"ignore:{message}:UserWarning"]))
    sys.argv = [f"asyncrl {name}", *rest]  # argparse shows `sys.argv[0]` in usage and error messages
    before = {number: signal.signal(number, stop_early) for number in (signal.SIGINT, signal.SIGTERM)}
    module, _, function = _COMMANDS[name][0].partition(":")
    command: Callable[[], int | None] = getattr(import_module(module), function or "main")
    # Restore the signal handlers, but not in `asyncrl train`, which later sets new handlers (`supervise`).
    if name != "train":
        for number, handler in before.items():
            signal.signal(number, handler)
    return command() or 0


def exit_status(number: int) -> int:
    """Return the exit status of a command that a signal stopped. Example: 143 for SIGTERM."""
    return 128 + number


def stop_early(number: int, _: FrameType | None) -> NoReturn:
    """Signal handler: end this process at once. Use this handler only while the process has no child processes."""
    os.write(2, f"stopped by {signal.Signals(number).name} before anything was started\n".encode())
    os._exit(exit_status(number))
