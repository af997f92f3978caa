"""``asyncrl keys RUN``: replace the access keys to the buffer of a running training.

The command returns after the buffer has begun to refuse the old keys.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from asyncrl.core.errors import with_exit_status
from asyncrl.run.run_socket import ask_for_keys


@with_exit_status
def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``asyncrl keys``: print the folder of the keys, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="asyncrl keys",
        description="Replace the keys of the clients of a training's buffer on all its nodes. Training does not wait.",
    )
    parser.add_argument("run", type=Path, help="folder of the run, such as outputs/quickstart/<time>")
    parser.add_argument("--timeout-s", type=float, default=120.0, help="deadline (default 120)")
    options = parser.parse_args(arguments)
    sys.stdout.write(f"replaced the keys in {ask_for_keys(options.run, timeout_s=options.timeout_s)}\n")
    return 0
