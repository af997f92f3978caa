"""The ranks of the fleet: which ranks joining engines get, and which engines may leave. Pure and synchronous.

::

    absent ──join──▶ coming ──arrived──▶ present ──leave──▶ leaving ──gone──▶ absent
                        └──────────────────leave───────────────▲
    any but absent ──gone──▶ absent                                    the engine failed for good, or has left

The run keeps the places of the ranks below ``fewest``, and gives such a rank out again when its engine has left. Every
other rank is given once, so that logs and counters of a rank belong to one engine.
"""

from __future__ import annotations

from enum import StrEnum

from asyncrl.core.errors import MembershipRefused


class Presence(StrEnum):
    """The state of a rank that has an engine."""

    coming = "coming"
    present = "present"
    leaving = "leaving"


class Roster:
    """The ranks of a fleet of ``fewest`` to ``most`` engines; at least ``needed`` must stay.

    At first ``fewest`` are present. With ``most`` None the fleet has a fixed size: no engine joins or leaves.
    """

    def __init__(self, *, fewest: int, most: int | None, needed: int) -> None:
        self._fewest = fewest
        self._most = most
        self._needed = needed
        self._next = fewest
        self._presence = dict.fromkeys(range(fewest), Presence.present)

    @property
    def ranks(self) -> list[int]:
        """Ranks with a present, coming or leaving engine, ascending."""
        return sorted(self._presence)

    @property
    def num_free(self) -> int:
        """How many engines may join now."""
        return 0 if self._most is None else max(0, self._most - len(self._presence))

    def presence_of(self, rank: int) -> Presence | None:
        """The state of a rank; None if it has no engine."""
        return self._presence.get(rank)

    def join(self, num_engines: int, *, in_kept_places: bool = True) -> list[int]:
        """Return ranks for joining engines; ranks with kept places come first, unless ``in_kept_places`` is false.

        Raises:
            MembershipRefused: the fleet has a fixed size, or would have more than ``most``.
        """
        self._check_elastic("join")
        if num_engines < 1:
            raise MembershipRefused(f"--num must be >= 1 engines, got {num_engines}")
        if num_engines > self.num_free:
            raise MembershipRefused(
                f"rollout_fleet.num_engines allows {self._most} engines; {len(self._presence)} are present or coming, "
                f"got {num_engines} more; ask for at most {self.num_free}, or let others leave first"
            )
        kept = [rank for rank in range(self._fewest) if rank not in self._presence] if in_kept_places else []
        new = range(self._next, self._next + max(0, num_engines - len(kept)))
        self._next = new.stop
        ranks = [*kept[:num_engines], *new]
        self._presence.update(dict.fromkeys(ranks, Presence.coming))
        return ranks

    def arrived(self, rank: int) -> None:
        """The engine of a rank serves."""
        if self._presence.get(rank) is Presence.coming:
            self._presence[rank] = Presence.present

    def leave(self, rank: int) -> None:
        """Let the engine of a rank leave.

        Raises:
            MembershipRefused: the fleet has a fixed size, there is no such engine, or too few would be left.
        """
        self._check_elastic("leave")
        presence = self._presence.get(rank)
        if presence is None:
            raise MembershipRefused(f"the fleet has no rollout worker {rank}, only {self.ranks}; name one of these")
        if presence is Presence.leaving:
            raise MembershipRefused(f"rollout worker {rank} is leaving already; wait for the first command")
        num_left = sum(one is Presence.present for one in self._presence.values()) - 1
        if presence is Presence.present and num_left < self._needed:
            raise MembershipRefused(
                f"rollout worker {rank} must stay: {num_left} engines would be left, rollout_fleet.min_engines is "
                f"{self._needed}; let another join first"
            )
        self._presence[rank] = Presence.leaving

    def gone(self, rank: int) -> None:
        """The engine of a rank and its processes are gone."""
        self._presence.pop(rank, None)

    def _check_elastic(self, what: str) -> None:
        if self._most is None:
            raise MembershipRefused(
                f"engines {what} an elastic fleet only, and rollout_fleet.num_engines={self._fewest} is a fixed size; "
                f"start the run with 'rollout_fleet.num_engines={{min: {self._fewest}, max: {2 * self._fewest}}}'"
            )
