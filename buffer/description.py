"""Describes the ledger for `asyncrl inspect`: the state of a group, and why the next batch is not planned yet."""

from collections.abc import Sequence
from typing import Any

from msgspec import to_builtins

from .config import OnStale
from .groups import Group, GroupState
from .ledger import Ledger

_SHOWN_GROUPS = 8


def plan_wait(ledger: Ledger, now: float) -> dict[str, Any]:
    """Return a JSON object that tells why the next batch is not planned yet.

    The object has the batch's version (``version``), the reason as a sentence (``why``), and a description of each
    running group that the batch waits for (``groups``). ``now`` is the current time in seconds on the clock of the
    leases.
    """
    version, groups = ledger.next_plan, ledger.groups
    waits_for: Sequence[Group] = ()
    if version > ledger.learner_version + 1:
        why = f"batch {version} waits until the learner commits batch {ledger.learner_version}"
    elif ledger.can_plan():
        why = f"batch {version} can be made; the controller has not requested it yet"
    elif groups.num_stored < ledger.rule.groups_per_step:
        waits_for = groups.leases.all()
        why = f"batch {version} has {groups.num_stored} of {ledger.rule.groups_per_step} groups; "
        why += _running(waits_for) if waits_for else "no group runs"
        if groups.num_stored + len(waits_for) < ledger.rule.groups_per_step:
            why += f"; {_why_none_begins(ledger)}"
    else:
        missing = ledger.missing()
        last = version + max(k for k, number in enumerate(missing) if number)
        waits_for = [group for group in groups.leases.all() if group.deadline <= last]
        why = (
            f"batch {version} waits for {sum(missing)} of the groups due by version {last}; {_running(waits_for)}; "
            f"buffer.on_stale={OnStale.wait} never gives them up"
        )
    return {
        "version": version,
        "why": why,
        "groups": [group.describe(ledger.learner_version, now) for group in waits_for],
    }


def _running(groups: Sequence[Group]) -> str:
    shown = ", ".join(
        f"group {group.group_id} (attempt {group.attempt}, due by {group.deadline}) on {group.owner.hex()[:8]}"
        for group in groups[:_SHOWN_GROUPS]
    )
    return f"{len(groups)} run: {shown}" + f" and {len(groups) - _SHOWN_GROUPS} more" * (len(groups) > _SHOWN_GROUPS)


def _why_none_begins(ledger: Ledger) -> str:
    num_queued = ledger.groups.num_queued
    if not num_queued:
        return "no prompt is queued"
    if not ledger.room.has_room():
        return f"{num_queued} prompts are queued, but buffer.max_stored_bytes leaves no room for another group"
    if not ledger.budget:
        until = f"until the learner commits batch {ledger.learner_version}"
        return f"{num_queued} prompts are queued, but buffer.max_lag={ledger.rule.max_lag} admits no group {until}"
    return f"{num_queued} prompts are queued, and wait for an engine that requests a lease at an admitted version"


def describe_group(ledger: Ledger, group_id: int, now: float) -> dict[str, Any]:
    """Return a JSON object that describes a group: its state, and how its past attempts ended.

    ``now`` is the current time in seconds on the clock of the leases.
    """
    group = ledger.groups.get(group_id)
    known: dict[str, Any] = {"group_id": group_id}
    if group is None:
        is_finished = group_id in ledger.history.finished
        state = "consumed or dropped" if is_finished else "unknown: it was never queued"
        known |= {"state": state, "num_attempts": ledger.history.num_attempts(group_id)}
    else:
        described = group.describe(ledger.learner_version, now)
        if group.state is GroupState.queued:  # leave out the lease's fields, because a queued group has no lease
            described = {name: described[name] for name in ("state", "attempt")}
        known |= described | {
            "num_attempts": group.num_attempts,
            "num_failures": group.num_failures,
            "num_deaths": group.num_deaths,
            "engine_version": group.engine_version,
            "num_saved_tokens": group.num_saved,
            "num_bytes": group.num_bytes,
            "store": group.store,
        }
        if group.planned_for >= 0:
            known["planned_for"] = group.planned_for
        if group.summary is not None:
            known["summary"] = to_builtins(group.summary)
    ended = [(attempt, ledger.history.of(group_id, attempt)) for attempt in range(known["num_attempts"])]
    return known | {
        "ended_attempts": [
            {
                "attempt": attempt,
                "owner": end.owner.hex()[:8],
                "reason": end.reason or end.refusal,
                "owes_report": end.owes_report,
                "num_counted_tokens": end.num_counted,
            }
            for attempt, end in ended
            if end is not None
        ]
    }
