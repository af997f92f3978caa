"""The leases that run now: who holds them, when they are due, when they run out, and how they end."""

from dataclasses import dataclass
from enum import StrEnum
from heapq import heappop, heappush
from typing import Any


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
        progress: What has been saved of it so far.
    """

    group_id: int
    attempt: int
    engine_version: int
    deadline: int
    owner: bytes
    expires_at: float
    progress: Progress | None = None
    request_id: int = 0


class RunningLeases:
    """Running leases by group, by deadline and by expiry; every operation is O(log n) or better."""

    def __init__(self) -> None:
        self._by_group: dict[int, RunningLease] = {}
        self._by_deadline: dict[int, dict[int, None]] = {}
        self._expiries: list[tuple[float, int, int]] = []

    def __len__(self) -> int:
        return len(self._by_group)

    def all(self) -> list[RunningLease]:
        """Every running lease, in the order they began."""
        return list(self._by_group.values())

    def describe(self, now: float) -> list[dict[str, Any]]:
        """What is known of every running lease, for people."""
        return [
            {
                "group_id": lease.group_id,
                "state": "leased",
                "attempt": lease.attempt,
                "deadline": lease.deadline,
                "owner": lease.owner.hex()[:8],
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
        heappush(self._expiries, (lease.expires_at, lease.group_id, lease.attempt))

    def extend(self, lease: RunningLease, expires_at: float) -> None:
        """Move a lease's expiry."""
        lease.expires_at = expires_at
        heappush(self._expiries, (expires_at, lease.group_id, lease.attempt))

    def remove(self, lease: RunningLease) -> None:
        """End a lease."""
        del self._by_group[lease.group_id]
        same_deadline = self._by_deadline[lease.deadline]
        del same_deadline[lease.group_id]
        if not same_deadline:
            del self._by_deadline[lease.deadline]

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
