"""Running groups that would hold up their batch, and when each is handed on to a faster engine.

A plan waits for every group that is due with it, so one slow engine that holds such a group stops the whole fleet. How
long a group still takes follows from the tokens per second that its worker writes of one group, and from the lengths of
the groups before it; when its batch is ready without it, from the pace of the fleet and of the learner. A group that
would come too late where it runs is handed on at the last moment from which a faster engine finishes it in time. So a
slow engine is at work all the same, and what it writes is used.

Pure: callers bring the time. Nothing looks at all groups: each one is looked at again when half of the time is over
until it would have to be handed on, or when it should have ended.
"""

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush, nlargest
from itertools import accumulate

from .commands import GrantedLease
from .groups import Group
from .ledger import Ledger

_MEMORY = 0.8
"""Weight of the past at each group that ends: about the last five count."""
_PLACES_MEMORY = 0.98
_LENGTHS_KEPT = 128
_UNSEEN = 4.0
"""Of n known lengths the longest counts (1 + this / n) times: the fewer there are, the likelier is a longer one."""
_FASTEST_SHARE = 0.05
"""A worker is compared with the slowest of the fastest ones: of one, and of so many more for each worker that is
measured. Of thousands of estimates the highest is mostly luck."""
_FASTER = 2.0
"""A group is handed on to an engine that writes so many times as fast, or to none."""
_MARGIN = 1.25
"""Room for a group that is longer than expected, in the time that the faster engine needs for it."""
_HAND_OVER_S = 0.05
"""What it costs to hand a group on: cutting it off, saving, leasing, computing its cache again."""
_WORTH_BEGINNING = 0.05
"""A worker begins a group that it will hand on only if it writes at least this part of one until then."""
_TRY_EVERY = 10.0
"""A worker that is refused for being too slow is tried after so many times the seconds that it takes per group."""
_TRY_LESS = 4.0
"""Before, it is tried after the seconds of a group on the fastest worker, and each time in vain so many times later."""
ASK_AGAIN_S = 10.0
_LONGEST_S = 10.0
_LONGEST_GROUPS = 0.25
"""Every group is looked at after so long at the latest, in seconds and as a part of the time that a fast worker takes
for one, whichever is longer: whoever was not known to be faster may be by then."""
_STEP_MEMORY = 0.7
_ESTIMATE_S = 2.5e-4
"""Seconds, per worker, for which the estimates of the whole fleet are good; computing them takes a fiftieth of it."""
_ESTIMATE_GROUPS = 2e-5
"""The same as a part of the time that a fast worker takes for a group: of many workers one changes little."""
_ESTIMATE_LONGEST = 0.1
"""This part counts of that time at most, however many workers there are."""

Key = tuple[int, int]
"""A group and its attempt."""


class GroupLengths:
    """The tokens of the last groups that ended, and what is still to come of one of which some are written."""

    def __init__(self) -> None:
        self._last: deque[int] = deque()
        self._total = 0
        self._sorted: list[int] = []
        self._sums: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._last)

    def add(self, num_tokens: int) -> None:
        """A group ended with so many tokens."""
        self._last.append(num_tokens)
        self._total += num_tokens
        if len(self._last) > _LENGTHS_KEPT:
            self._total -= self._last.popleft()
        self._sorted = []

    @property
    def longest(self) -> float:
        """The most tokens that a group is expected to have: those of the longest, and more while few are known."""
        self._sort()
        return max(1.0, self._sorted[-1]) * (1 + _UNSEEN / len(self._sorted))

    @property
    def mean(self) -> float:
        """The mean of all, at least one token."""
        return max(1.0, self._total / len(self._last))

    def left(self, num_written: float) -> float:
        """Tokens still to come after ``num_written``: the mean over the longer groups, or a tenth of the longest known.

        Example: of lengths 10, 20, 40 there are 20 to come after 10, and 4 after 40.
        """
        self._sort()
        place = bisect_right(self._sorted, num_written)
        number = len(self._sorted) - place
        if not number:
            return max(1.0, self._sorted[-1] / 10)
        return (self._sums[-1] - self._sums[place]) / number - num_written

    def _sort(self) -> None:
        if not self._sorted:
            self._sorted = sorted(self._last)
            self._sums = list(accumulate(self._sorted, initial=0))


@dataclass(kw_only=True, slots=True)
class _Worker:
    """What a worker wrote of single groups, and in how many seconds, both fading.

    ``since`` is when a group of it last ended, or when it had one again; ``most_held`` how many it held at once. One
    that ``is_tried`` was refused before. It counts as the fastest until that cannot be true, and is measured afresh by
    the group it has; ``patience`` is how many groups' time it waits for that, more after each trial in vain.
    """

    since: float
    num_tokens: float = 0.0
    took_s: float = 0.0
    most_held: float = 0.0
    patience: float = 1.0
    is_tried: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class _RunningGroup:
    """A lease: whose, since when, on top of how many tokens, and the last version that may consume it.

    ``due_at`` is when its batch was expected to be ready without it, when it began.
    """

    worker: bytes
    began: float
    num_inherited: int
    deadline: int
    due_at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _FleetEstimate:
    """Tokens per second of one group on a fast worker, and the groups per second of all.

    Attributes:
        fastest: Of the slowest of the fastest workers, with which the others are compared.
        fastest_worker: Whose this is.
        beside_it: What that one is itself compared with.
        groups_per_s: Of all workers together.
        group_s: Seconds that a fast worker takes for a group, by what it ended last; 0 while none has ended one.
        until: When this is computed again.
    """

    fastest: float
    fastest_worker: bytes
    beside_it: float
    groups_per_s: float
    group_s: float
    until: float

    def fastest_beside(self, worker: bytes) -> float:
        """Tokens per second that others write of one group, if they are fast: nothing is handed on to oneself."""
        return self.beside_it if worker == self.fastest_worker else self.fastest


class LateGroups:
    """Says which running groups are to be handed on, and who is too slow to begin one.

    Args:
        ledger: What is leased, stored and planned; only read.
        is_waiting: Whether a worker waits for work.
    """

    def __init__(self, ledger: Ledger, *, is_waiting: Callable[[bytes], bool]) -> None:
        self._ledger = ledger
        self._is_waiting = is_waiting
        self._workers: dict[bytes, _Worker] = {}
        self._running: dict[Key, _RunningGroup] = {}
        self._looks: list[tuple[float, Key]] = []
        self._unmeasured: dict[Key, None] = {}
        self._lengths = GroupLengths()
        self._fleet: _FleetEstimate | None = None
        self._step_s: float | None = None
        self._version, self._next_plan = ledger.learner_version, ledger.next_plan
        self._planned_at: dict[int, float] = {}
        self._committed_at = -math.inf

    # What is heard

    def granted(self, lease: GrantedLease | Group, num_held: int, now: float) -> None:
        """A worker that held ``num_held`` leases begins a group, or goes on with one under a server that restarted."""
        worker = self._workers.setdefault(lease.owner, _Worker(since=now))
        if num_held == 0:
            worker.since = now
        worker.most_held = max(num_held + 1.0, _PLACES_MEMORY * worker.most_held)
        key = lease.group_id, lease.attempt
        self._running[key] = _RunningGroup(
            worker=lease.owner,
            began=now,
            num_inherited=lease.num_inherited,
            deadline=lease.deadline,
            due_at=now + self._due_s(lease.deadline, now) if self._lengths else math.inf,
        )
        if self._lengths:
            heappush(self._looks, (self._next_look_at(key, now), key))
        else:
            self._unmeasured[key] = None
            self._forget_ended()

    def ended(self, group_id: int, attempt: int, num_tokens: int, now: float, *, num_saved: int | None = None) -> float:
        """A worker stored a group of so many tokens, or gave it back with ``num_saved`` of them kept.

        Returns which part of a group it wrote that is not lost, as far as that is known. Example: of a group with 80
        tokens, 20 of which another worker had written, 0.75.
        """
        running, is_whole = self._running.pop((group_id, attempt), None), num_saved is None
        self._unmeasured.pop((group_id, attempt), None)
        if running is None:
            return float(is_whole)
        if (worker := self._workers.get(running.worker)) is not None:
            self._measure(running, worker, num_tokens, now, is_whole=is_whole)
        if is_whole:
            self._lengths.add(num_tokens)
            for key in self._unmeasured:
                heappush(self._looks, (now, key))
            self._unmeasured.clear()
        if not num_tokens or not self._lengths:
            return float(is_whole)
        num_kept = num_tokens if num_saved is None else min(num_saved, num_tokens)
        return max(0, num_kept - running.num_inherited) / self._num_expected(num_tokens, is_whole=is_whole)

    def _num_expected(self, num_tokens: int, *, is_whole: bool) -> float:
        """Tokens of a group of which so many are written, as a whole."""
        return num_tokens if is_whole else max(num_tokens, self._lengths.mean)

    def _measure(self, running: _RunningGroup, worker: _Worker, num_tokens: int, now: float, *, is_whole: bool) -> None:
        """Count what a worker wrote of a group, as far as that says how fast it writes a whole one.

        The samples of a group end one after another, so its beginning is written faster than all of it, and its end
        slower. So the beginning makes no worker faster than it was and others are. Who continued a group was at least
        as fast as the part that it wrote, and no faster than if it had written all in that time: between the two
        nothing is learned.
        """
        num_written, took_s = max(0.0, num_tokens - running.num_inherited), now - running.began
        ends_trial = worker.is_tried and num_written > 0 and took_s > 0
        worker.since = now
        if not is_whole or running.num_inherited:
            own = _measured(worker) if worker.took_s and not ends_trial else 0.0
            fleet = self._estimate(now) if self._lengths else None
            others = fleet.fastest_beside(running.worker) if fleet is not None and fleet.group_s else 0.0
            usual = own or others
            if not is_whole:
                if not usual:
                    return
                num_written = min(num_written, max(own, others) * took_s)
            if running.num_inherited and usual and not ends_trial:
                num_expected = self._num_expected(num_tokens, is_whole=is_whole)
                num_written = min(max(num_written, usual * took_s), num_expected)
        memory = 0.0 if ends_trial else _MEMORY
        worker.num_tokens = memory * worker.num_tokens + num_written
        worker.took_s = memory * worker.took_s + took_s
        if ends_trial:
            worker.is_tried = False
            is_slow = self._estimate(now).fastest_beside(running.worker) >= _FASTER * _measured(worker)
            worker.patience = _TRY_LESS * worker.patience if is_slow else 1.0

    def _forget_ended(self) -> None:
        """Leases that ran out or were taken back are not heard of: let them be at most half of what is kept."""
        if len(self._unmeasured) > 2 * self._ledger.num_leased + 64:
            for key in [key for key in self._unmeasured if not self._ledger.holds(*key)]:
                del self._unmeasured[key]
                self._running.pop(key, None)

    def forget(self, worker: bytes) -> None:
        """A worker is gone."""
        self._workers.pop(worker, None)

    def note_steps(self, now: float) -> None:
        """The ledger may have planned or committed a step: learn how long the learner takes for one it has."""
        version, next_plan = self._ledger.learner_version, self._ledger.next_plan
        if version < self._version:  # it went back
            self._planned_at.clear()
            self._version = self._next_plan = version
        for planned in range(self._next_plan, next_plan):
            self._planned_at[planned] = now
        for committed in range(self._version, version):
            took_s = now - max(self._committed_at, self._planned_at.pop(committed, now))
            before_s = took_s if self._step_s is None else self._step_s
            self._step_s = _STEP_MEMORY * before_s + (1 - _STEP_MEMORY) * took_s
            self._committed_at = now
        self._version, self._next_plan = version, next_plan

    # What follows

    def next_look(self) -> float | None:
        """When `take_late` may have something next; None while nothing runs."""
        return self._looks[0][0] if self._looks else None

    def take_late(self, now: float) -> dict[bytes, list[Key]]:
        """The groups that are to be handed on now, by the worker that has them."""
        late: dict[bytes, list[Key]] = {}
        while self._looks and self._looks[0][0] <= now:
            _, key = heappop(self._looks)
            if not self._ledger.holds(*key):
                self._running.pop(key, None)
            elif (running := self._running.get(key)) is not None:
                when = self._next_look_at(key, now)
                if when <= now:
                    late.setdefault(running.worker, []).append(key)
                    when = now + ASK_AGAIN_S
                heappush(self._looks, (when, key))
        return late

    def is_late(self, worker: bytes, group: Group, now: float) -> bool:
        """Whether a group that waits with a saved prefix would come too late from this worker, and not from others."""
        if not self._lengths or group.progress is None:
            return False
        deadline = self._ledger.rule.deadline(group.progress.oldest_version)
        return self._slack_s(worker, self._lengths.left(group.num_saved), self._due_s(deadline, now), now) < math.inf

    def is_worth(self, worker: bytes, engine_version: int, now: float) -> bool:
        """Whether this worker should begin a group: it is in time, or writes enough before it hands it on.

        One that has nothing is tried now and then: it may have become faster, or was slow for a moment only.
        """
        if not self._lengths:
            return True
        fleet, known = self._estimate(now), self._workers.get(worker)
        fastest = fleet.fastest_beside(worker)
        rate = self._rate(worker, now) if known is None or not known.took_s else _measured(known)
        if fastest < _FASTER * rate:  # as for most workers of most fleets: nobody could finish it much sooner
            return True
        deadline, mean = self._ledger.rule.deadline(engine_version), self._lengths.mean
        slack_s = self._slack_s(worker, mean, self._due_s(deadline, now), now, rate=rate)
        if slack_s == math.inf or slack_s * rate >= max(_HAND_OVER_S * fastest, _WORTH_BEGINNING * mean):
            return True
        if known is None or self._ledger.num_leases_of(worker):
            return False
        patience_s = min(known.patience * mean / fastest, _TRY_EVERY * mean / rate)
        known.is_tried = now - known.since >= patience_s
        return known.is_tried

    # Estimates

    def _rate(self, worker: bytes, now: float) -> float:
        """Tokens per second of one group; one that is not measured counts as the fastest until that cannot be true."""
        known, limit = self._workers.get(worker), self._limit(worker, now)
        fastest = self._estimate(now).fastest
        if known is None or not known.took_s or (known.is_tried and _MARGIN * limit >= fastest):
            return min(fastest, limit)
        return min(_measured(known), limit)

    def _limit(self, worker: bytes, now: float) -> float:
        """What a worker that has ended nothing for a while can be writing at most, by the longest group known."""
        known = self._workers.get(worker)
        if known is None or not self._ledger.num_leases_of(worker):
            return math.inf
        return self._lengths.longest / max(now - known.since, 1e-6)

    def _estimate(self, now: float) -> _FleetEstimate:
        """The fleet's speed now; only while a length is known."""
        if self._fleet is None or now >= self._fleet.until:
            self._fleet = self._measured_fleet(now)
        return self._fleet

    def _measured_fleet(self, now: float) -> _FleetEstimate:
        """All workers that are there: each is looked at once, since there may be thousands."""
        mean, longest = self._lengths.mean, self._lengths.longest
        tokens_per_s, num_there, most_measured = 0.0, 0, 0.0
        rates: list[tuple[float, bytes]] = []
        unmeasured: list[tuple[float, float]] = []
        for name, worker in self._workers.items():
            num_held, since_s = self._ledger.num_leases_of(name), now - worker.since
            measured = _measured(worker) if worker.took_s else 0.0
            ended_lately = measured > 0 and since_s < mean / measured
            if not (num_held or self._is_waiting(name) or ended_lately):
                continue
            num_there += 1
            limit = longest / max(since_s, 1e-6) if num_held else math.inf
            if measured:
                rate = min(measured, limit)
                rates.append((rate, name))
                most_measured = max(most_measured, measured)
                tokens_per_s += worker.most_held * rate
            else:
                unmeasured.append((worker.most_held, limit))
        last = int(_FASTEST_SHARE * len(rates))
        fastest_ones = nlargest(max(2, last + 1), rates)
        fastest, fastest_worker = fastest_ones[last] if rates else (0.0, b"")
        beside_it = fastest_ones[last - 1 if last else 1][0] if len(rates) > 1 else 0.0
        tokens_per_s += sum(most_held * min(fastest, limit) for most_held, limit in unmeasured)
        group_s = mean / most_measured if rates else 0.0
        return _FleetEstimate(
            fastest=max(fastest, 1e-6),
            fastest_worker=fastest_worker,
            beside_it=max(beside_it, 1e-6),
            groups_per_s=max(tokens_per_s / mean, 1e-9),
            group_s=group_s,
            until=now + max(_ESTIMATE_S * num_there, min(_ESTIMATE_GROUPS * num_there, _ESTIMATE_LONGEST) * group_s),
        )

    def _due_s(self, deadline: int, now: float) -> float:
        """Seconds until the plan of version ``deadline`` could be made, were it not for one group."""
        num_steps = max(0, deadline - self._ledger.next_plan)
        num_missing = (num_steps + 1) * self._ledger.rule.groups_per_step - self._ledger.num_stored
        return max(num_missing / self._estimate(now).groups_per_s, num_steps * (self._step_s or 0.0))

    def _slack_s(self, worker: bytes, num_left: float, due_s: float, now: float, *, rate: float | None = None) -> float:
        """Seconds until a group that is due in ``due_s`` is handed on at the latest.

        Infinite where it is in time with this worker, or nobody is faster.
        """
        fleet, rate = self._estimate(now), self._rate(worker, now) if rate is None else rate
        if (fastest := fleet.fastest_beside(worker)) < _FASTER * rate:
            return math.inf
        num_before = self._ledger.num_leases_of(worker) + 1  # handed on together, for which places must become free
        elsewhere_s = _MARGIN * num_left / fastest + num_before / fleet.groups_per_s + _HAND_OVER_S
        if num_left / rate - max(due_s, elsewhere_s) < _HAND_OVER_S:
            return math.inf
        return due_s - elsewhere_s

    def _next_look_at(self, key: Key, now: float) -> float:
        """When a running group is to be looked at again; ``now`` where it is to be handed on."""
        running = self._running[key]
        rate, took_s = self._rate(running.worker, now), now - running.began
        written = running.num_inherited + rate * took_s
        num_left = self._lengths.left(written)
        # It should have ended: expect it to take as long again. One that was long already may become twice as long.
        if written > max(self._lengths.longest, 2 * running.num_inherited):
            num_left = self._lengths.mean
            rate = min(rate, num_left / max(took_s, 1e-6))
        due_s = min(running.due_at - now, self._due_s(running.deadline, now))
        slack_s = self._slack_s(running.worker, num_left, due_s, now, rate=rate)
        if slack_s == math.inf:
            longest_s = max(_LONGEST_S, _LONGEST_GROUPS * self._estimate(now).group_s)
            return now + min(max(num_left / rate, took_s / 4, _HAND_OVER_S), longest_s)
        return now if slack_s < _HAND_OVER_S / 2 else now + slack_s / 2


def _measured(worker: _Worker) -> float:
    return max(worker.num_tokens / worker.took_s, 1e-6)
