"""Print the contents of a running buffer: ``python -m buffer.inspect ADDRESS [--json] [--keys DIRECTORY]``."""

import argparse
import asyncio
import json
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

from asyncrl.core.errors import with_exit_status

from .keys import BufferRole
from .role_clients import BufferConnection, ControlClient


async def read(connection: BufferConnection) -> dict[str, Any]:
    """Request a server's report."""
    client = ControlClient(connection.client())
    try:
        return await client.inspect()
    finally:
        await client.close()


def render(report: dict[str, Any]) -> str:
    """Format the report as text: totals, then distributions over the unfinished groups, then producers."""
    stats, groups = report["stats"], report["groups"]
    lines = [
        f"learner version {stats['learner_version']}, max_lag {report['max_lag']}, B {report['groups_per_step']}",
        f"groups     {_counts(stats['groups'])}; dropped for {_counts(stats['groups_dropped'])}; "
        f"filters dropped the last {stats['filtered_in_a_row']} finished",
        f"tokens     {stats['tokens_trained']} trained, {stats['tokens_buffered']} buffered, dropped for "
        f"{_counts(stats['tokens_dropped'])}",
        f"lags       consumed {_lags(stats['lag_histogram'])}; "
        f"stored {_lags(_now(groups, 'stored', 'planned'))}; leased {_lags(_now(groups, 'leased'))}",
        f"rewards    {_spread(groups, 'mean_reward')} over stored groups",
        f"lengths    {_spread(groups, 'mean_length')} over stored groups; consumed samples mean "
        f"{stats['mean_length_kept']:.3g}, dropped {stats['mean_length_dropped']:.3g}",
        f"memory     {stats['held_bytes']} bytes held, {stats['stored_bytes']} of them trajectories, of "
        f"{report['max_stored_bytes']}",
        f"waiting    {stats['leases_waiting']} requests for leases",
        f"refused    puts {_counts(stats['puts_refused'])}; messages {report['malformed']} malformed, "
        f"{report['over_rate']} over the rate, {report['unsent']} unsent; {report['unknown_keys']} unknown keys, "
        f"{report['no_files']} without a file, {report['endless']} connections with a message without end",
    ]
    for number, store in enumerate(report["stores"]):
        where = f"of host {store['host']} " * bool(store["host"])
        what = "gone" if store["is_gone"] else f"at {store['address']}, {store['bytes']} bytes"
        lines.append(f"store      {number} {where}{what}")
    for producer in report["producers"]:
        lines.append(
            f"producer   {producer['owner']}: {producer['leases']} leases, {producer['puts']} puts, "
            f"{producer['tokens']} tokens, heard of {producer['heard_s_ago']} s ago"
        )
    return "\n".join(lines)


def _counts(numbers: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in numbers.items()) or "nothing"


def _lags(numbers: Mapping[int, int]) -> str:
    return ", ".join(f"{number} at {lag}" for lag, number in sorted(numbers.items())) or "none"


def _now(groups: list[dict[str, Any]], *states: str) -> Mapping[int, int]:
    return Counter(group["lag"] for group in groups if group["state"] in states)


def _spread(groups: list[dict[str, Any]], field: str) -> str:
    values = [group[field] for group in groups if field in group]
    if not values:
        return "none"
    return f"{min(values):.3g} … {max(values):.3g}, mean {sum(values) / len(values):.3g}"


@with_exit_status
def main() -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="asyncrl inspect", description="Show what a buffer server holds.")
    parser.add_argument("address", help="where it listens, e.g. tcp://10.0.0.1:5555; the run says it when it starts")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--keys", default="", help="directory of the run's CURVE keys")
    parser.add_argument("--timeout-s", type=float, default=5.0, help="how long to wait for the server")
    args = parser.parse_args()
    connection = BufferConnection(
        address=args.address, request_timeout_s=args.timeout_s, keys=args.keys, role=BufferRole.inspector
    )
    report = asyncio.run(read(connection))
    sys.stdout.write((json.dumps(report) if args.json else render(report)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
