"""``asyncrl checkpoint RUN``: ask a running training for a checkpoint, and wait until it is complete."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from asyncrl.core.errors import with_exit_status
from asyncrl.run.run_socket import ask_for_checkpoint


@with_exit_status
def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``asyncrl checkpoint``: print the folder of the checkpoint, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="asyncrl checkpoint",
        description="Let a running training save a checkpoint with its next learner step. Training does not wait.",
    )
    parser.add_argument("run", type=Path, help="folder of the run, such as outputs/quickstart/<time>")
    parser.add_argument("--timeout-s", type=float, default=900.0, help="deadline (default 900)")
    options = parser.parse_args(arguments)
    sys.stdout.write(f"{ask_for_checkpoint(options.run, timeout_s=options.timeout_s)}\n")
    return 0
