"""The leases that run now: who holds them, when they are due, when they run out, and how they end."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from heapq import heappop, heappush
from typing import Any, TypeVar


class PutResult(StrEnum):
    """What an acknowledged put did."""

    stored = "stored"
    duplicate = "duplicate"
    filtered = "filtered"


@dataclass(frozen=True, kw_only=True, slots=True)
class Revocation:
    """A lease that its owner no longer holds."""

    owner: bytes
    group_id: int
    attempt: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """What the ledger knows of a saved, unfinished group.

    Attributes:
        num_tokens: Tokens the policy has written.
        oldest_version: Version of the oldest of them.
    """

    num_tokens: int
    oldest_version: int


@dataclass(kw_only=True, slots=True)
class RunningLease:
    """One group being generated.

    Attributes:
        group_id: The group.
        attempt: Its fence.
        engine_version: u, what the engine served at admission.
        deadline: u + max_lag.
        owner: Who holds it; opaque.
        request_id: Which of the owner's requests it answers, so that a request sent again gets the same lease.
        expires_at: When it runs out unless renewed, on the clock of the ledger's ``now``.
        progress: What has been saved of it so far: the prefix it began with, or what its worker saved since.
        num_inherited: Tokens of the prefix that it began with.
    """

    group_id: int
    attempt: int
    engine_version: int
    deadline: int
    owner: bytes
    expires_at: float
    progress: Progress | None = None
    num_inherited: int = 0
    request_id: int = 0

    @property
    def num_saved(self) -> int:
        """Tokens that are saved of it."""
        return 0 if self.progress is None else self.progress.num_tokens


Key = TypeVar("Key")


def _remove(index: dict[Key, dict[int, None]], key: Key, group_id: int) -> None:
    """Take a group out of an index of groups by key."""
    group_ids = index[key]
    del group_ids[group_id]
    if not group_ids:
        del index[key]


class RunningLeases:
    """Running leases by group, by deadline and by expiry; every operation is O(log n) or better."""

    def __init__(self) -> None:
        self._by_group: dict[int, RunningLease] = {}
        self._by_deadline: dict[int, dict[int, None]] = {}
        self._by_owner: dict[bytes, dict[int, None]] = {}
        self._expiries: list[tuple[float, int, int]] = []

    def __len__(self) -> int:
        return len(self._by_group)

    def all(self) -> list[RunningLease]:
        """Every running lease, in the order they began."""
        return list(self._by_group.values())

    def of_owner(self, owner: bytes) -> list[RunningLease]:
        """The running leases of one owner."""
        return [self._by_group[group_id] for group_id in self._by_owner.get(owner, ())]

    def describe(self, now: float, *, version: int) -> list[dict[str, Any]]:
        """What is known of every running lease, for people; its lag is what it would have at ``version``."""
        return [
            {
                "group_id": lease.group_id,
                "state": "leased",
                "attempt": lease.attempt,
                "deadline": lease.deadline,
                "lag": version - lease.engine_version,
                "owner": lease.owner.hex()[:8],
                "num_saved_tokens": lease.num_saved,
                "expires_in_s": round(lease.expires_at - now, 1),
            }
            for lease in self._by_group.values()
        ]

    def held(self, group_id: int, attempt: int) -> RunningLease | None:
        """The lease, if this attempt still holds it."""
        lease = self._by_group.get(group_id)
        return lease if lease is not None and lease.attempt == attempt else None

    def add(self, lease: RunningLease) -> None:
        """Begin a lease."""
        self._by_group[lease.group_id] = lease
        self._by_deadline.setdefault(lease.deadline, {})[lease.group_id] = None
        self._by_owner.setdefault(lease.owner, {})[lease.group_id] = None
        heappush(self._expiries, (lease.expires_at, lease.group_id, lease.attempt))

    def extend(self, lease: RunningLease, expires_at: float) -> None:
        """Move a lease's expiry."""
        lease.expires_at = expires_at
        heappush(self._expiries, (expires_at, lease.group_id, lease.attempt))

    def remove(self, lease: RunningLease) -> None:
        """End a lease."""
        del self._by_group[lease.group_id]
        _remove(self._by_deadline, lease.deadline, lease.group_id)
        _remove(self._by_owner, lease.owner, lease.group_id)

    def due(self) -> dict[int, int]:
        """Deadline to number of running leases."""
        return {deadline: len(group_ids) for deadline, group_ids in self._by_deadline.items()}

    def last_leased(self, deadline: int, number: int) -> list[RunningLease]:
        """``number`` leases due at ``deadline`` or earlier, those begun last first."""
        chosen: list[RunningLease] = []
        for due in sorted((d for d in self._by_deadline if d <= deadline), reverse=True):
            for group_id in reversed(self._by_deadline[due]):
                if len(chosen) == number:
                    return chosen
                chosen.append(self._by_group[group_id])
        return chosen

    def next_expiry(self) -> RunningLease | None:
        """The lease that runs out first."""
        while self._expiries:
            expires_at, group_id, attempt = self._expiries[0]
            lease = self.held(group_id, attempt)
            if lease is not None and lease.expires_at == expires_at:
                return lease
            heappop(self._expiries)
        return None

    def snapshot(self) -> list[dict[str, Any]]:
        """Every lease as plain values, in the order they began."""
        return [asdict(lease) for lease in self._by_group.values()]

    def restore(self, values: Iterable[Mapping[str, Any]]) -> None:
        """Begin the leases of a snapshot."""
        for fields in values:
            progress = None if fields["progress"] is None else Progress(**fields["progress"])
            self.add(RunningLease(**{**fields, "progress": progress}))
