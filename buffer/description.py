"""Describes the ledger for `asyncrl inspect`. `LedgerNotes` records the ledger's changes in the profile of the run.

`asyncrl inspect` shows the state of a group, and why the next batch is not planned yet.
"""

import time
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import to_builtins

from asyncrl.core import record
from asyncrl.core.record import NONE, GroupEvent, LevelName

from . import commands
from .account import NO_ROOM, REWOUND, STALE, STORE_LOST, VERSION_TOO_OLD, WORKER_DIED
from .config import OnStale
from .groups import Group, GroupState
from .ledger import Ledger

_SHOWN_GROUPS = 8
_LANE = "buffer"


def plan_wait(ledger: Ledger, now: float) -> dict[str, Any]:
    """Return a JSON object that explains why the next batch is not planned yet.

    The object has the batch's version (``version``), the reason as a sentence (``why``), and a description of each
    running group that the batch waits for (``groups``). ``now`` is the current time in seconds on the buffer server's
    clock.
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

    ``now`` is the current time in seconds on the buffer server's clock.
    """
    group = ledger.groups.get(group_id)
    known: dict[str, Any] = {"group_id": group_id}
    if group is None:
        num_attempts = ledger.history.num_attempts(group_id)
        if group_id in ledger.history.finished:
            state = "consumed or dropped"
        elif num_attempts:
            state = "not queued: it finished after the checkpoint that the learner went back to"
        else:
            state = "unknown: it was never queued"
        known |= {"state": state, "num_attempts": num_attempts}
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


class LedgerNotes:
    """Records changes of the groups' states, and the ledger's current counts, in the run's profile."""

    def __init__(self, ledger: Ledger, recorder: record.Recorder) -> None:
        self._ledger = ledger
        self._recorder = recorder

    def note(self, command: Any, outcome: Any) -> None:
        """Record in the profile which groups a command changed. ``outcome`` is the ledger's decision."""
        match outcome:
            case commands.Granted():
                for lease in outcome.leases:
                    details = {"deadline": lease.deadline, "inherited": lease.num_inherited}
                    self._stamp(GroupEvent.lease, lease, version=lease.engine_version, **details)
            case commands.PutOutcome():
                self._stamp_put(command, outcome)
            case commands.Released(was_running=True):
                event = GroupEvent.dropped if outcome.is_dropped else GroupEvent.requeued
                self._stamp(event, command, reason=command.reason, tokens=command.num_tokens)
            case commands.TakenBack():
                self._stamp_all(GroupEvent.dropped, outcome.dropped, reason=WORKER_DIED)
                reason = "silent" if isinstance(command, commands.TakeBack) else "expired"
                queued = [group_id for group_id in outcome.group_ids if group_id not in outcome.dropped]
                self._stamp_all(GroupEvent.requeued, queued, reason=reason)
            case commands.Lost() | commands.DroppedStore():
                self._stamp_requeued(outcome.group_ids, reason=STORE_LOST)
            case commands.Reserved():
                self._stamp_requeued(outcome.evicted, reason=NO_ROOM)
            case _:
                self._note_batch(outcome)

    def _note_batch(self, outcome: Any) -> None:
        match outcome:
            case commands.Planned(is_new=True):
                self._stamp_all(GroupEvent.planned, outcome.group_ids, version=outcome.version)
                event = GroupEvent.dropped if outcome.is_dropped else GroupEvent.requeued
                self._stamp_all(event, outcome.given_up, reason=STALE)
            case commands.Committed():
                self._stamp_all(GroupEvent.trained, outcome.group_ids, version=outcome.version)
                self._recorder.level(LevelName.cpu, time.process_time_ns() // 1000)
            case commands.Rewound():
                ended = dict.fromkeys((*outcome.dropped, *outcome.revoked))
                self._stamp_requeued(ended, reason=REWOUND)

    def levels(self, *, held_bytes: int) -> None:
        """Record the ledger's current counts in the profile. The recorder ignores unchanged counts."""
        ledger = self._ledger
        for state in ("queued", "leased", "stored", "planned"):
            self._recorder.level(LevelName(state), getattr(ledger.groups, f"num_{state}"), lane=_LANE)
        self._recorder.level(LevelName.budget, ledger.budget, lane=_LANE)
        self._recorder.level(LevelName.full, int(not ledger.room.has_room()), lane=_LANE)
        self._recorder.level(LevelName.version, ledger.learner_version, lane=_LANE)
        self._recorder.level(LevelName.bytes, held_bytes, lane=_LANE)

    def _stamp_put(self, put: commands.Put, outcome: commands.PutOutcome) -> None:
        summary = put.summary
        match outcome.result:
            case commands.PutResult.stored:
                event, details = GroupEvent.stored, {"bytes": put.num_bytes}
            case commands.PutResult.filtered:
                event, details = GroupEvent.dropped, {"reason": outcome.reason}
            case commands.PutResult.too_old:
                event, details = GroupEvent.requeued, {"reason": VERSION_TOO_OLD}
            case _:  # the put is late or a duplicate, so an earlier event has already recorded the end of the attempt
                return
        details |= {
            "newest": summary.newest_version,
            "learner": self._ledger.learner_version,
            "tokens": summary.num_tokens,
            "prompt_tokens": summary.num_prompt_tokens,
            "lengths": summary.response_lengths,
            "rewards": summary.rewards,
        }
        self._stamp(event, summary, version=summary.oldest_version, **details)

    def _stamp(self, event: GroupEvent, of: Any, *, version: int = NONE, **details: Any) -> None:
        self._recorder.stamp(event, of.group_id, attempt=of.attempt, version=version, lane=_LANE, **details)

    def _stamp_requeued(self, group_ids: Iterable[int], *, reason: str) -> None:
        queued = [group_id for group_id in group_ids if group_id in self._ledger.groups]
        self._stamp_all(GroupEvent.requeued, queued, reason=reason)

    def _stamp_all(self, event: GroupEvent, group_ids: Iterable[int], *, version: int = NONE, **details: Any) -> None:
        for group_id in group_ids:
            self._recorder.stamp(event, group_id, attempt=NONE, version=version, lane=_LANE, **details)
