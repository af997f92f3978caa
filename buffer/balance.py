"""Where work is done soonest: which worker gets the next group, and which one hands running groups on.

A worker's pace is the seconds it takes per group, measured over its last groups while it held any. The next group goes
to the waiting worker that would be done with all it holds first, so a slow engine does not hoard the places that
admission leaves. When nothing more is admitted and a worker has nothing to do, the one with the most work left hands it
as many groups as make both end at the same time. Groups that are due are `buffer.late_groups`' business. Pure: callers
bring the time and the leases that each worker holds.
"""

from collections.abc import Mapping
from dataclasses import dataclass

_MEMORY = 0.9
"""Weight of the past at each new group: about the last ten count."""
_UNKNOWN_S = 1.0
_LEAST_S = 1e-6
_TRY_EVERY = 10.0
"""An idle worker that is slower than the others is tried after so many times the seconds that it takes per group."""
_WORTH_IT = 2.0
"""A worker's only group is handed on where that makes it this much faster."""


@dataclass(kw_only=True, slots=True)
class _Pace:
    """Groups done and the seconds they took, both fading; ``since`` the last change, or since it holds any."""

    since: float
    num_groups: float = 0.0
    took_s: float = 0.0
    average_s: float = _LEAST_S

    def count(self, part: float, now: float) -> None:
        memory = _MEMORY**part
        self.num_groups = memory * self.num_groups + part
        self.took_s = memory * self.took_s + now - self.since
        self.since = now
        self.average_s = max(self.took_s / max(self.num_groups, 1.0), _LEAST_S)


class WorkBalance:
    """The paces of all workers that have held a lease."""

    def __init__(self) -> None:
        self._paces: dict[bytes, _Pace] = {}
        self._known_fastest_s: float | None = None

    def granted(self, worker: bytes, num_held: int, now: float) -> None:
        """A worker that held ``num_held`` leases gets one more; one that held none was idle, which says nothing."""
        pace = self._paces.setdefault(worker, _Pace(since=now))
        if num_held == 0:
            pace.since = now

    def ended(self, worker: bytes, now: float, *, part: float = 1.0) -> None:
        """A worker stored or gave back a group, of which it wrote ``part``; the time counts in any case."""
        if (pace := self._paces.get(worker)) is not None:
            pace.count(part, now)
            self._known_fastest_s = None

    def forget(self, worker: bytes) -> None:
        """A worker is gone."""
        self._paces.pop(worker, None)
        self._known_fastest_s = None

    def pace_s(self, worker: bytes, num_held: int, now: float) -> float:
        """Seconds per group; a group that takes longer than those before counts already, while any is held.

        A worker that has done nothing yet counts as the fastest that is known.
        """
        pace = self._paces.get(worker)
        held_s = now - pace.since if pace is not None and num_held else 0.0
        usual_s = pace.average_s if pace is not None and pace.took_s else self._fastest_s()
        return usual_s if usual_s > held_s else held_s

    def delay_s(self, worker: bytes, num_held: int, now: float) -> float:
        """Seconds until a worker is done with what it holds and one group more; 0 for one that never had any.

        A part of the time for which an idle one has waited is taken off: a slow one is tried again now and then.
        """
        pace = self._paces.get(worker)
        if pace is None and not num_held:
            return 0.0
        idle_s = now - pace.since if pace is not None and not num_held else 0.0
        return (num_held + 1) * self.pace_s(worker, num_held, now) - idle_s / _TRY_EVERY

    def hand_on(self, idle: bytes, num_held: Mapping[bytes, int], now: float) -> tuple[bytes, int] | None:
        """Who is to hand on how many groups to an idle worker; None where that would bring nothing.

        ``num_held`` are the leases of each worker that may be asked.
        """
        busy = {
            worker: number * self.pace_s(worker, number, now)
            for worker, number in num_held.items()
            if worker != idle and number
        }
        if not busy:
            return None
        busiest = max(busy, key=busy.__getitem__)
        theirs_s = busy[busiest] / num_held[busiest]
        own_s = self.pace_s(idle, 0, now) if self._has_measured_any else theirs_s
        number = int(busy[busiest] / (theirs_s + own_s))
        if number == 0 and theirs_s > _WORTH_IT * own_s:
            number = 1
        if number == 0:
            return None
        return busiest, number

    def next_hand_on(self, idle: bytes, num_held: Mapping[bytes, int], now: float) -> float | None:
        """When `hand_on` would ask a worker that ends no group until then; None where it would ask none.

        The longer a worker ends nothing, the slower it is known to be.
        """
        own_s, fewest = self.pace_s(idle, 0, now), 1 if self._has_measured_any else 2
        moments = [
            self._paces[worker].since + (own_s / (number - 1) if number > 1 else _WORTH_IT * own_s)
            for worker, number in num_held.items()
            if worker != idle and number >= fewest and worker in self._paces
        ]
        return min(moments, default=None)

    @property
    def _has_measured_any(self) -> bool:
        """Whether any worker has written as much as a group: before, nobody is known to be slower than others."""
        return any(pace.num_groups >= 1 for pace in self._paces.values())

    def _fastest_s(self) -> float:
        if self._known_fastest_s is None:
            paces = (pace.average_s for pace in self._paces.values() if pace.num_groups >= 1)
            self._known_fastest_s = min(paces, default=_UNKNOWN_S)
        return self._known_fastest_s
