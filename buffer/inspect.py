"""Print a report about a running buffer, or about one of its groups.

``python -m buffer.inspect ADDRESS [--group ID [--payload]] [--json] [--keys DIRECTORY] [--timeout-s SECONDS]``.
"""

import argparse
import asyncio
import json
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

from asyncrl.core.errors import with_exit_status
from asyncrl.core.trajectory import FINISH_REASONS, TrajectoryGroup

from .keys import BufferRole
from .role_clients import BufferConnection, ControlClient, LearnerClient


async def read(connection: BufferConnection, *, group_id: int = -1, with_payload: bool = False) -> dict[str, Any]:
    """Request a report from a buffer's server, and return the report as a JSON object.

    If ``group_id`` is 0 or more, the report describes only this group. The report of a stored group also contains the
    group's trajectories if ``with_payload`` is true.
    """
    client = connection.client()
    try:
        report = await ControlClient(client).inspect(group_id)
        if with_payload and "summary" in report:
            [group] = await LearnerClient(client).fetch([group_id])
            report["trajectories"] = trajectories_of(group)
        return report
    finally:
        await client.close()


def trajectories_of(group: TrajectoryGroup) -> list[dict[str, Any]]:
    """Return one JSON object per trajectory of a group, with the reward and all turns after the prompt."""
    tokens = {name: group.token_columns[name] for name in ("token_ids", "logprobs", "versions")}
    rewards = group.trajectory_columns["rewards"].tolist()
    trajectories: list[dict[str, Any]] = [{"reward": reward, "turns": []} for reward in rewards]
    start = 0
    for index, turn in enumerate(group.turns.tolist()):
        trajectory, parent, num_tokens, sampled, reason = turn
        if index:
            own = {name: column[start : start + num_tokens].tolist() for name, column in tokens.items()}
            ended = str(FINISH_REASONS[reason]) if reason >= 0 else ""
            shape = {"turn": index, "parent": parent, "sampled": bool(sampled), "finish_reason": ended}
            trajectories[trajectory]["turns"].append(shape | own)
        start += num_tokens
    return trajectories


def render(report: dict[str, Any]) -> str:
    """Format the report of a whole buffer (a result of `read`) as readable text."""
    stats, groups = report["stats"], report["groups"]
    lines = [
        f"learner version {stats['learner_version']}, max_lag {report['max_lag']}, B {report['groups_per_step']}",
        f"plan       {report['plan']['why']}",
        f"groups     {_counts(stats['groups'])}; dropped for {_counts(stats['groups_dropped'])}; "
        f"filters dropped the last {stats['filtered_in_a_row']} finished",
        f"tokens     {stats['tokens_trained']} trained, {stats['tokens_buffered']} buffered, dropped for "
        f"{_counts(stats['tokens_dropped'])}",
        f"uses       {stats['groups_reused']} after the first, {stats['tokens_reused']} tokens; "
        f"{sum(group.get('num_uses', 0) > 0 for group in groups)} of the stored groups were used",
        f"lags       consumed {_lags(stats['lag_histogram'])}; "
        f"stored {_lags(_now(groups, 'stored', 'planned'))}; leased {_lags(_now(groups, 'leased'))}",
        f"rewards    {_spread(groups, 'mean_reward')} over stored groups",
        f"lengths    {_spread(groups, 'mean_length')} over stored groups; consumed samples mean "
        f"{stats['mean_length_kept']:.3g}, dropped {stats['mean_length_dropped']:.3g}",
        f"memory     {stats['held_bytes']} bytes held, {stats['stored_bytes']} of them trajectories, of "
        f"{report['max_stored_bytes']}; {report['memory_bytes']} are in the memory of this server, "
        f"{stats['disk_bytes']} on disk and not in memory",
        f"waiting    {stats['leases_waiting']} requests for leases",
        f"refused    puts {_counts(stats['puts_refused'])}; messages {report['malformed']} malformed, "
        f"{report['over_rate']} over the rate, {report['unsent']} unsent; {report['unknown_keys']} unknown keys, "
        f"{report['no_files']} without a file, {report['endless']} connections with a message without end",
    ]
    for number, store in enumerate(report["stores"]):
        where = f"of host {store['host']} " * bool(store["host"])
        held = f"{store['bytes']} bytes, {store['disk_bytes']} on disk"
        what = "gone" if store["is_gone"] else f"at {store['address']}, {held}"
        lines.append(f"store      {number} {where}{what}")
    for producer in report["producers"]:
        lines.append(
            f"producer   {producer['owner']}: {producer['leases']} leases, {producer['puts']} puts, "
            f"{producer['tokens']} tokens, heard of {producer['heard_s_ago']} s ago"
        )
    return "\n".join(lines)


def render_group(report: dict[str, Any]) -> str:
    """Format the report of one group (a result of `read`) as readable text."""
    parts = ("summary", "ended_attempts", "trajectories")
    lines = [", ".join(f"{name} {value}" for name, value in report.items() if name not in parts)]
    if "summary" in report:
        summary = report["summary"]
        shown = "num_tokens", "oldest_version", "newest_version", "response_lengths", "rewards"
        lines.append("stored     " + ", ".join(f"{name} {summary[name]}" for name in shown))
    for end in report["ended_attempts"]:
        owes = "; its worker owes a report" if end["owes_report"] else ""
        lines.append(f"attempt    {end['attempt']} on {end['owner'] or 'no worker'} ended: {end['reason']}{owes}")
    for number, trajectory in enumerate(report.get("trajectories", ())):
        lines.append(f"trajectory {number}: reward {trajectory['reward']:.4g}")
        for turn in trajectory["turns"]:
            versions, logprobs = turn["versions"], turn["logprobs"]
            spent = f", versions {min(versions)} … {max(versions)}" if turn["sampled"] and versions else ""
            spent += f", mean log-prob {sum(logprobs) / len(logprobs):.4g}" if spent else ""
            who = f"policy, {turn['finish_reason']}" if turn["sampled"] else "environment"
            lines.append(f"  turn {turn['turn']} after {turn['parent']}: {len(versions)} tokens of the {who}{spent}")
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
    """Run the command, and return its exit status."""
    parser = argparse.ArgumentParser(prog="asyncrl inspect", description="Show what a buffer server holds.")
    parser.add_argument(
        "address", help="address of the buffer, e.g. tcp://10.0.0.1:5555; the run prints it at its start"
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--keys", default="", help="directory of the run's CURVE keys")
    parser.add_argument("--timeout-s", type=float, default=5.0, help="seconds to wait for the server")
    parser.add_argument(
        "--group", type=int, default=-1, metavar="ID", help="show the attempts and the holder of one group"
    )
    parser.add_argument(
        "--payload", action="store_true", help="with --group: show the group's stored trajectories, turn by turn"
    )
    args = parser.parse_args()
    if args.payload and args.group < 0:
        parser.error("--payload shows the trajectories of one group; name it with --group ID")
    connection = BufferConnection(
        address=args.address, request_timeout_s=args.timeout_s, keys=args.keys, role=BufferRole.inspector
    )
    report = asyncio.run(read(connection, group_id=args.group, with_payload=args.payload))
    shown = render if args.group < 0 else render_group
    sys.stdout.write((json.dumps(report) if args.json else shown(report)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
