"""``asyncrl audit``: compare the receipts of a run. A receipt is a record that a process wrote about tokens or weights.

If a run was continued, it had several ``asyncrl train`` processes. The audit compares the receipts of all of them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from asyncrl.core.errors import with_exit_status
from asyncrl.run.audit import audit, audited_lives


@with_exit_status
def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``asyncrl audit`` and return the exit status.

    The status is 1 if a receipt is missing or wrong, and 2 if the run has no receipts. A receipt is a record that a
    process wrote about tokens or weights.
    """
    parser = argparse.ArgumentParser(
        prog="asyncrl audit",
        description="Follow every trained token of a run from its engine to its learner step, over all lives.",
    )
    parser.add_argument("run", type=Path, help="folder of a run; the lives that it continues are audited too")
    parser.add_argument("--forward", type=int, default=0, metavar="N", help="compute log-probs of N stored samples")
    options = parser.parse_args(arguments)
    lives = audited_lives(options.run)
    result = audit(lives)
    if options.forward:
        from asyncrl.run.forward_audit import check_forward

        check_forward(result, lives, options.forward)
    lines = [f"checked: {line}" for line in result.checked]
    lines += [f"not checked: {line}" for line in result.unchecked]
    lines += [f"bad: {fault}" for fault in result.bad]
    lines.append(f"{len(result.bad)} bad receipts in {lives[-1].folder}")
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if result.bad else 0
