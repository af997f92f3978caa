"""Where work is done soonest: which worker gets the next group, and which one hands running groups on.

A worker's pace is the seconds it takes per group, measured over its last groups while it held any. The next group goes
to the waiting worker that would be done with all it holds first, so a slow engine does not hoard the places that
admission leaves. When nothing more is admitted and a worker has nothing to do, the one with the most work left hands it
as many groups as make both end at the same time. Pure: callers bring the time and the leases that each worker holds.
"""

from collections.abc import Mapping
from dataclasses import dataclass

_MEMORY = 0.9
"""Weight of the past at each new group: about the last ten count."""
_HAND_ON_EVERY_S = 1.0
_LEAST_HELD = 2
_LEAST_S = 1e-6


@dataclass(kw_only=True, slots=True)
class _Pace:
    """Groups done and the seconds they took, both fading; ``since`` the last of them, or since it holds any."""

    since: float
    num_groups: float = 0.0
    took_s: float = 0.0


class WorkBalance:
    """The paces of all workers that have held a lease."""

    def __init__(self) -> None:
        self._paces: dict[bytes, _Pace] = {}
        self._asked: dict[bytes, float] = {}

    def granted(self, worker: bytes, num_held: int, now: float) -> None:
        """A worker that held ``num_held`` leases gets one more; one that held none was idle, which says nothing."""
        pace = self._paces.setdefault(worker, _Pace(since=now))
        if num_held == 0:
            pace.since = now

    def done(self, worker: bytes, now: float) -> None:
        """A worker stored a group."""
        if (pace := self._paces.get(worker)) is not None:
            pace.num_groups = _MEMORY * pace.num_groups + 1
            pace.took_s = _MEMORY * pace.took_s + now - pace.since
            pace.since = now

    def forget(self, worker: bytes) -> None:
        """A worker is gone."""
        self._paces.pop(worker, None)
        self._asked.pop(worker, None)

    def pace_s(self, worker: bytes, now: float) -> float | None:
        """Seconds per group of a worker that holds some; None before its first is done.

        A group that takes longer than those before counts already.
        """
        average_s = self._average_s(worker)
        return None if average_s is None else max(average_s, now - self._paces[worker].since)

    def delay_s(self, worker: bytes, num_held: int, now: float) -> float:
        """Seconds until a worker is done with what it holds and one group more.

        0 for one that holds none: it is never left without work, and its pace stays known. One of unknown pace counts
        as the fastest that is known.
        """
        if num_held == 0:
            return 0.0
        pace_s = self.pace_s(worker, now)
        return (num_held + 1) * (self._fastest_s() if pace_s is None else pace_s)

    def hand_on(self, idle: bytes, num_held: Mapping[bytes, int], now: float) -> tuple[bytes, int] | None:
        """Who is to hand on how many groups to an idle worker; None where that would bring nothing.

        ``num_held`` are the leases of each worker. A worker is not asked twice within a second.
        """
        own_s = self._average_s(idle) or self._fastest_s()
        busy = {
            worker: number * (self.pace_s(worker, now) or self._fastest_s())
            for worker, number in num_held.items()
            if worker != idle and number >= _LEAST_HELD and now - self._asked.get(worker, -1e9) >= _HAND_ON_EVERY_S
        }
        if not busy:
            return None
        busiest = max(busy, key=busy.__getitem__)
        theirs_s = busy[busiest] / num_held[busiest]
        number = min(int(busy[busiest] / (theirs_s + own_s)), num_held[busiest] - 1)
        if number < 1:
            return None
        self._asked[busiest] = now
        return busiest, number

    def _fastest_s(self) -> float:
        known = [average_s for worker in self._paces if (average_s := self._average_s(worker)) is not None]
        return min(known, default=1.0)

    def _average_s(self, worker: bytes) -> float | None:
        pace = self._paces.get(worker)
        return None if pace is None or not pace.num_groups else max(pace.took_s / pace.num_groups, _LEAST_S)
