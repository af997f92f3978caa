"""How an attempt at a prompt group ends, and how a group leaves the ledger: steps that several operations share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.core.errors import NotLeaseOwner, UnknownGroup, VersionTooNew

from . import commands
from .account import DISCARDED_PREFIX, NO_ROOM, EndedAttempt
from .groups import Group, GroupState

if TYPE_CHECKING:
    from .ledger import Ledger


def held(ledger: Ledger, group_id: int, attempt: int, sender: bytes | None) -> Group | None:
    """The group, if this attempt runs. Raises `NotLeaseOwner` if the report comes from another client."""
    group = ledger.groups.running(group_id, attempt)
    ended = ledger.history.of(group_id, attempt) if group is None else group
    owner = b"" if ended is None else ended.owner
    if sender is not None and owner and sender != owner:
        raise NotLeaseOwner(
            f"a report of group {group_id} attempt {attempt} came from client {sender.hex()[:8]}, but its lease "
            f"belongs to {owner.hex()[:8]}; only its owner may report it"
        )
    return group


def check_was_leased(ledger: Ledger, group_id: int, attempt: int, remedy: str) -> None:
    """Raise `UnknownGroup` unless the attempt was leased."""
    group = ledger.groups.get(group_id)
    known = ledger.history.num_attempts(group_id) if group is None else group.num_attempts
    if not 0 <= attempt < known:
        raise UnknownGroup(f"group {group_id} attempt {attempt} was never leased; {remedy}")


def check_newest(ledger: Ledger, group_id: int, attempt: int, newest_version: int) -> None:
    """Raise `VersionTooNew` if no learner step has made this version."""
    if newest_version > ledger.learner_version:
        raise VersionTooNew(
            f"group {group_id} attempt {attempt} holds a token of policy version {newest_version}, but the learner "
            f"is at {ledger.learner_version}; does its worker belong to another run?"
        )


def hand_on(ledger: Ledger, group: Group) -> None:
    """Queue the prompt of a lease that ended, with its saved prefix."""
    if group.is_evicted:
        ledger.account.give_up(NO_ROOM, num_saved=group.num_saved, num_inherited=group.num_inherited)
    else:
        ledger.account.hand_on(num_saved=group.num_saved, num_inherited=group.num_inherited)
    ledger.groups.requeue(group, keeps_progress=not group.is_evicted)


def settle_prefix(ledger: Ledger, group: Group, num_tokens: int, continued: bool) -> None:
    """Count the prefix of a lease as dropped, unless the report of its worker contains it."""
    if not continued or num_tokens < group.num_inherited:
        ledger.account.drop_prefix(group.num_inherited, DISCARDED_PREFIX)
        group.num_inherited = 0


def settle_owed(ledger: Ledger, group_id: int, attempt: int) -> EndedAttempt | None:
    """The attempt whose owed report came now. None if it owed no report, or if its dead owner's tokens are counted."""
    owed = ledger.history.settle(group_id, attempt)
    return None if owed is None or owed.owner in ledger.account.buried else owed


def revoke(ledger: Ledger, group: Group, reason: str) -> None:
    """End a lease from the side of the buffer. Its worker owes a report of its tokens."""
    ended = EndedAttempt(owner=group.owner, owes_report=True, num_counted=group.num_saved, reason=reason)
    ledger.history.end(group.group_id, group.attempt, ended)
    ledger.revocations.append((group.owner, commands.Revoked(group.group_id, group.attempt)))


def give_up(ledger: Ledger, group: Group, *, is_dropped: bool, reason: str) -> None:
    """Revoke a running group and drop its tokens. Its prompt is dropped or queued."""
    revoke(ledger, group, reason)
    with ledger.account.settling(group.owner):
        ledger.account.give_up(reason, num_saved=group.num_saved, num_inherited=group.num_inherited)
    if is_dropped:
        drop(ledger, group, stored=False)
        ledger.account.groups_dropped[reason] += 1
    else:
        ledger.groups.requeue(group, keeps_progress=False)


def drop(ledger: Ledger, group: Group, *, stored: bool) -> None:
    """Finish a running group."""
    ledger.groups.finish(group)
    finish(ledger, group, stored=stored)


def finish(ledger: Ledger, group: Group, *, stored: bool) -> None:
    """Remember a group that was consumed or dropped."""
    ledger.history.finish(group.group_id, num_attempts=group.num_attempts, stored=stored)
    ledger.newly_finished.append(group.group_id)


def evict(ledger: Ledger, group: Group, reason: str) -> None:
    """Drop the trajectories of a stored group, or the saved prefix of a queued or running group."""
    if group.summary is not None:
        ledger.account.evict(group.summary, reason)
        ledger.groups.evict(group)
    elif group.state is GroupState.queued:
        ledger.account.drop_prefix(group.num_saved, reason)
        ledger.groups.space.set_progress(group, None, 0)
    else:
        ledger.groups.space.evict_prefix(group)
