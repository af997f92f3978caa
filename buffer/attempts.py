"""The fence: which attempts of a group were leased, which one was stored, and which still owe a report.

An attempt ends in exactly one report (a put, a refused put or a release); what it reports is counted once, however
often it is sent. Finished groups are remembered as ranges of ids, so the memory of a long run stays small.
"""

from collections.abc import Mapping
from typing import Any

from .idset import IdSet


class Attempts:
    """Attempts of every group of the run, by group id."""

    def __init__(self) -> None:
        self._num_leased: dict[int, int] = {}
        self._finished = IdSet()
        self._never_stored: set[int] = set()
        self._unreported: dict[tuple[int, int], int] = {}
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

    def revoke(self, group_id: int, attempt: int, *, num_inherited: int = 0) -> None:
        """The lease was taken away: the attempt owes a report, less the tokens that the next attempt inherits."""
        self._unreported[group_id, attempt] = num_inherited

    def report(self, group_id: int, attempt: int) -> int | None:
        """The tokens inherited, if this is the report that a revoked attempt owed; None when it owed none."""
        return self._unreported.pop((group_id, attempt), None)

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
            "unreported": [[*key, num_tokens] for key, num_tokens in self._unreported.items()],
            "too_old": [[*key, message] for key, message in self._too_old.items()],
        }

    def restore(self, values: Mapping[str, Any]) -> None:
        """Take the state of a snapshot."""
        self._num_leased = dict(values["num_leased"])
        self._finished = IdSet(values["finished"])
        self._never_stored = set(values["never_stored"])
        self._unreported = {(group_id, attempt): number for group_id, attempt, number in values["unreported"]}
        self._too_old = {(group_id, attempt): message for group_id, attempt, message in values["too_old"]}
