"""What the ledger remembers of the learner's checkpoints, and how it goes back to one of them.

A *mark* holds the totals of the ledger at the commit of a checkpoint's last step. The ledger goes back to a mark when
the learner's ranks have died (`Rewind`), and when a new life of the run begins from a checkpoint (`Resume`). In both
cases every group and saved prefix without a token of a lost version stays. ``docs/staleness.md`` proves the bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import convert, to_builtins

from asyncrl.core.errors import ReplayBufferError

from . import attempts, commands
from .account import REWOUND, STALE, STORE_LOST, IdSet
from .groups import Group, GroupState
from .records import Key, Row
from .rule import rank_of

if TYPE_CHECKING:
    from .ledger import Call, Ledger

MAX_MARKS = 8
"""Marks that the ledger remembers. At most two checkpoints are being written at a time."""


class Mark(Row, frozen=True, kw_only=True):
    """The ledger's totals at a checkpoint.

    Attributes:
        version: Learner version of the checkpoint.
        key: Names this checkpoint; empty for the beginning of the run.
        is_reached: Whether the steps before ``version`` are committed. The totals are set from then on.
        finished: Groups that were consumed or dropped, as sorted ranges [start, end).
        tokens_trained: Policy tokens of the consumed groups.
        lags: Pairs of a lag in learner steps and the number of consumed groups with this lag.
    """

    version: int
    key: str = ""
    is_reached: bool = False
    finished: tuple[Key, ...] = ()
    tokens_trained: int = 0
    lags: tuple[Key, ...] = ()


class Marks:
    """The newest marks, by version. The first one is the beginning of the run."""

    def __init__(self, first_version: int) -> None:
        self._by_version = {first_version: Mark(version=first_version, is_reached=True)}

    def has(self, version: int, key: str) -> bool:
        """Whether this checkpoint is marked."""
        return version in self._by_version and self._by_version[version].key == key

    def keys(self) -> list[str]:
        """The keys of the marked checkpoints, oldest first."""
        return [self._by_version[version].key for version in sorted(self._by_version)]

    def add(self, version: int, key: str) -> None:
        """Mark a checkpoint. Its totals follow with `reach`."""
        self._by_version[version] = Mark(version=version, key=key)
        for old in sorted(self._by_version)[:-MAX_MARKS]:
            del self._by_version[old]

    def reach(self, ledger: Ledger) -> None:
        """Set the totals of a mark at the ledger's version, if there is one without totals."""
        mark = self._by_version.get(ledger.learner_version)
        if mark is not None and not mark.is_reached:
            self._by_version[mark.version] = Mark(
                version=mark.version,
                key=mark.key,
                is_reached=True,
                finished=tuple(ledger.history.finished.ranges()),
                tokens_trained=ledger.account.tokens_trained,
                lags=tuple(sorted(ledger.account.lags.items())),
            )

    def at(self, version: int) -> Mark:
        """The mark of a version. Raises `ReplayBufferError` if there is none with totals."""
        mark = self._by_version.get(version)
        if mark is None or not mark.is_reached:
            known = sorted(mark.version for mark in self._by_version.values() if mark.is_reached)
            raise ReplayBufferError(
                f"the ledger cannot go back to version {version}: it knows the checkpoints of the versions {known}; "
                "name one of these"
            )
        return mark

    def forget_after(self, version: int) -> None:
        """Forget the checkpoints of lost versions."""
        self._by_version = {known: mark for known, mark in self._by_version.items() if known <= version}

    def snapshot(self) -> list[Any]:
        """The marks as plain values."""
        return to_builtins(list(self._by_version.values()))

    def restore(self, values: Sequence[Any]) -> None:
        """Load a snapshot."""
        self._by_version = {mark.version: mark for mark in convert(values, list[Mark])}


def decide_checkpoint(ledger: Ledger, command: commands.Checkpoint, call: Call) -> commands.Marked:
    """A repeated checkpoint has no effect."""
    if ledger.marks.has(command.version, command.key):
        return commands.Marked(is_new=False)
    if not ledger.learner_version <= command.version <= ledger.next_plan:
        raise ReplayBufferError(
            f"checkpoint({command.version}) was requested at learner version {ledger.learner_version}; every step "
            "before a checkpoint must be planned or committed, so its version is in "
            f"{ledger.learner_version}..{ledger.next_plan}"
        )
    return commands.Marked(is_new=True)


def enact_checkpoint(ledger: Ledger, command: commands.Checkpoint, outcome: commands.Marked) -> None:
    """Add the mark."""
    if outcome.is_new:
        ledger.marks.add(command.version, command.key)
        ledger.marks.reach(ledger)


def decide_rewind(ledger: Ledger, command: commands.Rewind, call: Call) -> commands.Rewound:
    """A repeated or earlier rewind has no effect."""
    if command.incarnation <= ledger.incarnation:
        return commands.Rewound(is_new=False)
    if not 0 <= command.version <= ledger.learner_version:
        raise ReplayBufferError(
            f"rewind({command.version}) was requested at learner version {ledger.learner_version}; rewind to the "
            "version of a checkpoint whose steps are committed"
        )
    ledger.marks.at(command.version)
    return _decide_return(ledger, command.version)


def enact_rewind(ledger: Ledger, command: commands.Rewind, outcome: commands.Rewound) -> None:
    """Go back within a life of the run."""
    if outcome.is_new:
        _go_back(ledger, command.version, outcome)
        ledger.incarnation = command.incarnation


def decide_resume(ledger: Ledger, command: commands.Resume, call: Call) -> commands.Rewound:
    """Decide what a new life of the run keeps."""
    if ledger.marks.at(command.version).key != command.key:
        raise ReplayBufferError(
            f"the ledger's checkpoint of version {command.version} is not the one to resume; resume both parts of one "
            "checkpoint"
        )
    return _decide_return(ledger, command.version)


def enact_resume(ledger: Ledger, command: commands.Resume, outcome: commands.Rewound) -> None:
    """Begin a new life. Tokens that the earlier lives generated and never reported are lost with their workers."""
    _go_back(ledger, command.version, outcome)
    ledger.groups.space.await_stores()
    ledger.incarnation = 0
    ledger.account.begin_life(command.tokens_generated)


def _decide_return(ledger: Ledger, version: int) -> commands.Rewound:
    """Decide which groups stay.

    With the options that the groups were admitted under, every group without a token of a lost version can be consumed
    in time. A run may resume with a smaller ``max_lag`` or ``groups_per_step``. Then the groups that cannot be consumed
    in time are dropped; the choice by the earliest deadline keeps as many groups as possible.
    """
    lost = [group for group in ledger.groups if group.newest_version > version]
    missing = [group for group in ledger.groups if group.is_missing]
    gone = {group.group_id for group in (*lost, *missing)}
    stay = [group for group in ledger.groups if group.summary is not None and group.group_id not in gone]
    stay.sort(key=lambda group: (group.engine_version, group.place))
    num_kept, unfit, moved = 0, [], []
    for group in stay:
        deadline = ledger.rule.deadline(group.engine_version)
        if deadline < version + num_kept // ledger.rule.groups_per_step:
            unfit.append(group.group_id)
            continue
        num_kept += 1
        rank = rank_of(ledger.prefer, group.result, deadline)
        if (deadline, rank) != (group.deadline, group.rank):
            moved.append((group.group_id, deadline, rank))
    return commands.Rewound(
        is_new=True,
        group_ids=tuple(group.group_id for group in lost),
        revoked=tuple(group.group_id for group in ledger.groups.leases.all()),
        missing=tuple(group.group_id for group in missing),
        unfit=tuple(unfit),
        moved=tuple(moved),
    )


def _go_back(ledger: Ledger, version: int, outcome: commands.Rewound) -> None:
    """Groups without a token of a lost version stay, every batch is planned again, and every lease ends."""
    ledger.groups.dissolve(tuple(ledger.groups.plans))
    lost = dict.fromkeys(outcome.unfit, STALE) | dict.fromkeys(outcome.missing, STORE_LOST)
    lost |= dict.fromkeys(outcome.group_ids, REWOUND)
    for group_id in sorted({*lost, *outcome.revoked}, reverse=True):  # reversed: each goes to the head of the queue
        _take_back(ledger, ledger.groups[group_id], lost)
    for group_id, deadline, rank in outcome.moved:
        ledger.groups.move(ledger.groups[group_id], deadline, rank)
    mark = ledger.marks.at(version)
    ledger.history.reopen(IdSet(mark.finished))
    ledger.account.rewind(tokens_trained=mark.tokens_trained, lags=dict(mark.lags))
    ledger.marks.forget_after(version)
    ledger.learner_version = version


def _take_back(ledger: Ledger, group: Group, lost: Mapping[int, str]) -> None:
    """Drop what is lost of a group, and end its lease. Its prompt is queued."""
    if group.state is not GroupState.leased:
        attempts.evict(ledger, group, lost[group.group_id])
    elif group.group_id in lost:
        attempts.give_up(ledger, group, is_dropped=False, reason=REWOUND)
    else:
        attempts.revoke(ledger, group, REWOUND)
        with ledger.account.settling(group.owner):
            attempts.hand_on(ledger, group)
