"""The learner's checkpoints that the ledger remembers. The ledger can go back to each of these checkpoints.

A *mark* is the record of one checkpoint. When all learner steps before the checkpoint are committed, the ledger's
counts of tokens and groups are recorded in the mark. The ledger goes back to a mark when the learner's ranks have died
(`Rewind`), and when the run resumes (`Resume`). The ledger then drops each stored group and each saved prefix that has
a token of a lost version. ``docs/staleness.md`` proves that every lag stays within ``max_lag``.
"""

from collections.abc import Sequence
from typing import Any

from msgspec import convert, to_builtins

from asyncrl.core.errors import ReplayBufferError

from . import commands
from .account import Account, AttemptHistory
from .groups import GroupTable
from .records import Key, Row
from .rule import Preference, StalenessRule, rank_of

MAX_MARKS = 8
"""Largest number of remembered marks."""
MAX_WRITING = 2
"""Largest number of checkpoints that a run writes at a time.

The limit ensures that the ledger remembers the newest complete checkpoint.
"""


class Mark(Row, frozen=True, kw_only=True):
    """A checkpoint that the ledger remembers, with the ledger's counts of tokens and groups at this checkpoint.

    Attributes:
        key: Name of the checkpoint; empty for the beginning of the run.
        is_reached: Whether all learner steps before ``version`` are committed. Until then, the counts are not set.
        finished: Ids of the groups that were consumed or dropped, as sorted ranges [start, end).
        tokens_trained: Number of policy tokens in the consumed groups.
        lags: (lag, number) pairs: how often a step trained on a group with this lag in learner steps.
        tokens_reused: Number of policy tokens that steps trained on again, counted at each use after the first.
        groups_reused: How often steps trained on a group again.
    """

    version: int
    key: str = ""
    is_reached: bool = False
    finished: tuple[Key, ...] = ()
    tokens_trained: int = 0
    lags: tuple[Key, ...] = ()
    tokens_reused: int = 0
    groups_reused: int = 0


class Marks:
    """The remembered checkpoints (`Mark`) by learner version. A new object remembers only the run's start."""

    def __init__(self, first_version: int) -> None:
        self._by_version = {first_version: Mark(version=first_version, is_reached=True)}

    def has(self, version: int, key: str) -> bool:
        """Return whether the checkpoint ``key`` of learner version ``version`` is remembered."""
        return version in self._by_version and self._by_version[version].key == key

    def keys(self) -> list[str]:
        """Return the names of the remembered checkpoints, oldest version first. The run's start has an empty name."""
        return [self._by_version[version].key for version in sorted(self._by_version)]

    def add(self, version: int, key: str) -> None:
        """Remember the checkpoint ``key`` of learner version ``version``, without counts of tokens and groups.

        `reach` records the counts later. If more than ``MAX_MARKS`` checkpoints are then remembered, the call forgets
        the checkpoint of the oldest version.
        """
        self._by_version[version] = Mark(version=version, key=key)
        for old in sorted(self._by_version)[:-MAX_MARKS]:
            del self._by_version[old]

    def reach(self, version: int, history: AttemptHistory, account: Account) -> None:
        """Record the current counts of tokens and groups in the mark (remembered checkpoint) of ``version``.

        Does nothing if there is no mark of this version, or if the mark already has counts.
        """
        mark = self._by_version.get(version)
        if mark is not None and not mark.is_reached:
            self._by_version[mark.version] = Mark(
                version=mark.version,
                key=mark.key,
                is_reached=True,
                finished=tuple(history.finished.ranges()),
                tokens_trained=account.tokens_trained,
                lags=tuple(sorted(account.lags.items())),
                tokens_reused=account.tokens_reused,
                groups_reused=account.groups_reused,
            )

    def at(self, version: int) -> Mark:
        """Return the mark (remembered checkpoint) of a version.

        Raises `ReplayBufferError` if the ledger has no mark of this version, or if a step before the checkpoint is not
        committed yet.
        """
        mark = self._by_version.get(version)
        if mark is None or not mark.is_reached:
            known = sorted(mark.version for mark in self._by_version.values() if mark.is_reached)
            raise ReplayBufferError(
                f"the ledger cannot go back to version {version}: it remembers checkpoints of the versions {known}; "
                "use one of these versions"
            )
        return mark

    def forget_after(self, version: int) -> None:
        """Forget the checkpoints of versions after ``version``."""
        self._by_version = {known: mark for known, mark in self._by_version.items() if known <= version}

    def snapshot(self) -> list[Any]:
        """Return the remembered checkpoints as a list of plain values, for `restore`."""
        return to_builtins(list(self._by_version.values()))

    def restore(self, values: Sequence[Any]) -> None:
        """Replace the remembered checkpoints with ``values``, a result of `snapshot`."""
        self._by_version = {mark.version: mark for mark in convert(values, list[Mark])}


def decide_return(groups: GroupTable, version: int, *, rule: StalenessRule, prefer: Preference) -> commands.Rewound:
    """Decide which groups the buffer keeps when the learner goes back to ``version``. This call changes no group.

    Returns a record that lists the groups to drop, the leases to revoke, and the stored groups with a new deadline or a
    new sort key. A group's deadline is the last learner version that may consume the group.

    A run may resume with a smaller ``max_lag``, ``groups_per_step`` or ``max_uses``. A stored group is then dropped if
    ``max_uses`` steps have trained on it, or if the batches up to its deadline are full.
    """
    lost = [group for group in groups if group.newest_version > version]
    missing = [group for group in groups if group.is_missing]
    gone = {group.group_id for group in (*lost, *missing)}
    stay = [group for group in groups if group.summary is not None and group.group_id not in gone]
    stay.sort(key=lambda group: (group.engine_version, group.place))
    num_kept, unfit, moved = 0, [], []
    for group in stay:
        deadline, result = rule.deadline(group.engine_version), group.result_at(version)
        if deadline < version + num_kept // rule.groups_per_step or result.num_uses >= rule.max_uses:
            unfit.append(group.group_id)
            continue
        num_kept += 1
        rank = rank_of(prefer, result, deadline)
        if (deadline, rank) != (group.deadline, group.rank):
            moved.append((group.group_id, deadline, rank))
    return commands.Rewound(
        is_new=True,
        group_ids=tuple(group.group_id for group in lost),
        revoked=tuple(group.group_id for group in groups.leases.all()),
        missing=tuple(group.group_id for group in missing),
        unfit=tuple(unfit),
        moved=tuple(moved),
    )
