"""``asyncrl join``, ``python -m rollout_fleet.join``: add engines to a run while it goes."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from .membership import Action, FleetRequest, request_parser, run_request


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status when the engines serve, or could not."""
    parser = request_parser("join", "Add engines to a run while it goes, up to rollout_fleet.num_engines.max.")
    parser.add_argument("--num", type=int, default=1, metavar="N", help="how many engines (default 1)")
    parser.add_argument("--node", default="", help="address of the node to be on; by default any that has room")
    options = parser.parse_args(arguments)
    request = FleetRequest(action=Action.join, num_engines=options.num, node=options.node)
    return run_request(options, request)


if __name__ == "__main__":
    sys.exit(main())
