"""The fence: which attempts of a group were leased, which one was stored, and which still owe a report.

An attempt ends in exactly one report (a put, a refused put or a release); what it reports is counted once, however
often it is sent. Finished groups are remembered as ranges of ids, so the memory of a long run stays small.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .idset import IdSet


@dataclass(frozen=True, kw_only=True, slots=True)
class Owed:
    """The report that a revoked attempt owes.

    Attributes:
        num_counted: Tokens of it that are counted already: those that were saved.
        reason: What its other tokens are dropped for, when they are reported.
    """

    num_counted: int
    reason: str


class Attempts:
    """Attempts of every group of the run, by group id."""

    def __init__(self) -> None:
        self._num_leased: dict[int, int] = {}
        self._finished = IdSet()
        self._never_stored: set[int] = set()
        self._owed: dict[tuple[int, int], Owed] = {}
        self._too_old: dict[tuple[int, int], str] = {}

    def begin(self, group_id: int) -> bool:
        """Know a group; False when it was known before, so that a resent prompt is queued once."""
        if group_id in self._num_leased or group_id in self._finished:
            return False
        self._num_leased[group_id] = 0
        return True

    def lease(self, group_id: int) -> int:
        """Number the next attempt of a group."""
        attempt = self._num_leased[group_id]
        self._num_leased[group_id] = attempt + 1
        return attempt

    def revoke(self, group_id: int, attempt: int, *, num_counted: int, reason: str) -> None:
        """The lease was taken away: the attempt owes a report of what was not saved of it."""
        self._owed[group_id, attempt] = Owed(num_counted=num_counted, reason=reason)

    def report(self, group_id: int, attempt: int) -> Owed | None:
        """What a revoked attempt owes, which its report settles; None when it owes nothing."""
        return self._owed.pop((group_id, attempt), None)

    def refuse_as_too_old(self, group_id: int, attempt: int, message: str) -> None:
        """Remember why an attempt was refused, to answer the same when it is sent again."""
        self._too_old[group_id, attempt] = message

    def too_old(self, group_id: int, attempt: int) -> str | None:
        """The message that an attempt was refused with for its age."""
        return self._too_old.get((group_id, attempt))

    def finish(self, group_id: int, *, stored: bool) -> None:
        """The group is consumed or dropped; ``stored`` says whether its last attempt was stored."""
        if not stored:
            self._never_stored.add(group_id)
        self._finished.add(group_id)
        if self._num_leased[group_id] == 1:
            del self._num_leased[group_id]

    def was_leased(self, group_id: int, attempt: int) -> bool:
        """Whether the attempt was ever granted."""
        known = self._num_leased.get(group_id, 1 if group_id in self._finished else 0)
        return 0 <= attempt < known

    def finished_with(self, group_id: int, attempt: int) -> bool:
        """Whether the group is finished and this attempt is the one that was stored."""
        if group_id not in self._finished or group_id in self._never_stored:
            return False
        return attempt == self._num_leased.get(group_id, 1) - 1

    def finished(self) -> list[tuple[int, int]]:
        """Ids of the groups that are consumed or dropped, as ranges [start, end)."""
        return self._finished.ranges()

    def snapshot(self) -> dict[str, Any]:
        """Everything, as plain values."""
        return {
            "num_leased": list(self._num_leased.items()),
            "finished": self._finished.ranges(),
            "never_stored": sorted(self._never_stored),
            "owed": [[*key, owed.num_counted, owed.reason] for key, owed in self._owed.items()],
            "too_old": [[*key, message] for key, message in self._too_old.items()],
        }

    def restore(self, values: Mapping[str, Any]) -> None:
        """Take the state of a snapshot."""
        self._num_leased = dict(values["num_leased"])
        self._finished = IdSet(values["finished"])
        self._never_stored = set(values["never_stored"])
        self._owed = {(g, a): Owed(num_counted=number, reason=reason) for g, a, number, reason in values["owed"]}
        self._too_old = {(group_id, attempt): message for group_id, attempt, message in values["too_old"]}
