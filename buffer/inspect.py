"""Print what a running buffer holds: ``python -m buffer.inspect tcp://127.0.0.1:5555 [--json] [--keys DIRECTORY]``."""

import argparse
import asyncio
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from asyncrl.protocol.errors import AsyncRLError

from .client import BufferClient
from .keys import client_keys


async def read(address: str, *, keys: str, timeout_s: float) -> dict[str, Any]:
    """Ask a server for everything it shows."""
    client = BufferClient(address, request_timeout_s=timeout_s, keys=client_keys(Path(keys)) if keys else None)
    try:
        return await client.inspect()
    finally:
        await client.close()


def render(report: dict[str, Any]) -> str:
    """The report as text: totals, then what is spread over the unfinished groups, then producers."""
    stats, groups = report["stats"], report["groups"]
    states = ", ".join(f"{number} {state}" for state, number in stats["groups"].items())
    lags = ", ".join(f"{lag}: {number}" for lag, number in stats["lag_histogram"]) or "none yet"
    dropped = ", ".join(f"{number} {reason}" for reason, number in stats["tokens_dropped"].items()) or "0"
    lines = [
        f"learner version {stats['learner_version']}, max_lag {report['max_lag']}, B {report['groups_per_step']}",
        f"groups     {states}",
        f"tokens     {stats['tokens_trained']} trained, {stats['tokens_buffered']} buffered, dropped {dropped}",
        f"lags       {lags}",
        f"payload    {stats['stored_bytes']} bytes",
        f"waiting    {stats['leases_waiting']} workers",
        f"stored     {_spread(groups, 'mean_reward', 'reward')}, {_spread(groups, 'mean_length', 'length')}",
        f"refused    puts {stats['puts_refused'] or 0}, messages {report['malformed']} malformed, "
        f"{report['unknown_keys']} unknown keys, {report['over_rate']} over the rate",
    ]
    producers = Counter(group["owner"] for group in groups if group["state"] == "leased")
    lines += [f"producer   {owner}: {number} leases" for owner, number in producers.most_common()]
    return "\n".join(lines)


def _spread(groups: list[dict[str, Any]], field: str, name: str) -> str:
    values = [group[field] for group in groups if field in group]
    if not values:
        return f"{name} -"
    return f"{name} {min(values):.3g} … {max(values):.3g}, mean {sum(values) / len(values):.3g}"


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m buffer.inspect", description="Show what a buffer server holds.")
    parser.add_argument("address", help="where it listens, e.g. tcp://127.0.0.1:5555; its log names it")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--keys", default="", help="directory of the run's CURVE keys")
    parser.add_argument("--timeout-s", type=float, default=5.0, help="how long to wait for the server")
    args = parser.parse_args()
    try:
        report = asyncio.run(read(args.address, keys=args.keys, timeout_s=args.timeout_s))
    except (AsyncRLError, ValueError) as error:
        sys.exit(str(error))
    sys.stdout.write((json.dumps(report) if args.json else render(report)) + "\n")


if __name__ == "__main__":
    main()
