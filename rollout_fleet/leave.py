"""``asyncrl leave``, ``python -m rollout_fleet.leave``: let an engine leave a run while it goes, or list them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from .membership import Action, FleetRequest, request_parser, run_request


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status when nothing is left of the engine."""
    parser = request_parser("leave", "Let an engine hand on what it has under way, and end; without MEMBER, list them.")
    parser.add_argument("member", type=int, nargs="?", metavar="MEMBER", help="number of the rollout worker")
    options = parser.parse_args(arguments)
    if options.member is None:
        return run_request(options, FleetRequest(action=Action.describe))
    return run_request(options, FleetRequest(action=Action.leave, member=options.member))


if __name__ == "__main__":
    sys.exit(main())
