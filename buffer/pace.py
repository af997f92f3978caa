"""Measures the pace of each worker, and chooses running groups that a faster worker takes over. Finds silent workers.

A worker's *pace* is its seconds per token. A worker is *slow* if even the fastest of its latest groups took at least
twice as long per token as another worker's median group. The fastest group decides, because a slow engine slows down
all groups. Tools and long answers slow down only single groups.

A faster worker that has capacity for another group takes over a slow worker's group in two cases:

- No new prompt may begin on the faster worker.
- The next plan waits for that group, and a new prompt would be due later.

A group changes workers at most twice. A slow worker still gets new groups, except while a group that was handed over
waits in the queue for its taker. Each call takes O(log n) time for n groups and workers.
"""

import math
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Any

from .commands import GrantedLease
from .groups import Group

MOST_CHANGES = 2
"""Largest number of changes of worker per group. The second change serves a group that moved to a slow worker."""
_SLOWER = 2.0
"""A worker is slow if it needs this many times another worker's seconds per token. A takeover then saves more time
than the prefill on the new worker costs.
"""
_KEPT = 8
"""A worker's pace is taken from this number of its latest groups. The number is small because engines change, and above
1 because groups differ.
"""
_FORGET_AFTER = 30.0
"""An idle worker's pace is forgotten after this many times the duration of the worker's longest group. Then a slow
worker gets a group as a trial. These trials cost 3% of the time of all workers."""
_PLACE_KEPT_S = 1.0
"""Longest time in seconds that a worker keeps capacity free for a group that it takes over from a slow worker. The slow
worker hands the group over within a few decoding steps, and the taker then requests leases.
"""


@dataclass(kw_only=True, slots=True)
class _Worker:
    """The measured pace and the groups of a worker.

    Attributes:
        since: Time when the worker last ended a group, or got a group while the worker was idle. A group that is handed
            over does not count as ended.
        paces: Seconds per token of the worker's latest groups.
        took: Seconds that the worker's latest groups took. For a group that the worker took over, this is an estimate
            of the whole time.
        is_watched: Whether `WorkerPaces.look` will check the worker at a scheduled time.
        slowdown: Time from ``since`` to the latest check, divided by the duration of the worker's longest group; 1 if
            the quotient is below 2.
    """

    since: float
    paces: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    took: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    groups: dict[int, None] = field(default_factory=dict)
    is_slow: bool = False
    is_watched: bool = False
    slowdown: float = 1.0

    @property
    def usual(self) -> float:
        """The worker's median seconds per token."""
        return sorted(self.paces)[len(self.paces) // 2]


@dataclass(kw_only=True, slots=True)
class RunningGroup:
    """A group that a worker generates now.

    Attributes:
        began: Time when the worker got the group.
        engine_version: A policy version. No token of the group has an older version.
        deadline: The last learner version that may consume the group.
        num_before: Number of tokens of the longest sample when the worker got the group; None if unknown.
        num_saved: Number of tokens of the longest sample in the latest saved prefix.
        taker: The worker that takes the group over; empty if the worker was not asked to hand the group over.
        kept_until: Time until which ``taker`` keeps capacity free for the group.
    """

    worker: bytes
    group_id: int
    attempt: int
    began: float
    engine_version: int
    deadline: int
    num_before: int | None
    num_saved: int
    taker: bytes = b""
    kept_until: float = -math.inf


class WorkerPaces:
    """The paces of all workers, and the running groups that faster workers may take over."""

    def __init__(self) -> None:
        self._workers: dict[bytes, _Worker] = {}
        self._by_usual: list[tuple[float, bytes]] = []
        self._running: dict[int, RunningGroup] = {}
        self._on_offer: list[tuple[int, float, int, int]] = []
        self._looks: list[tuple[float, bytes]] = []
        self._unknown: dict[bytes, None] = {}
        self._num_changes: Counter[int] = Counter()
        self._num_saved: dict[int, int] = {}
        self._kept: dict[bytes, list[RunningGroup]] = {}
        self._kept_untils: deque[float] = deque()
        self._on_the_way: dict[int, RunningGroup] = {}
        self._takers: list[tuple[float, int, int]] = []
        self._longest_s = self._longest_before_s = 0.0
        self._num_ended = self._longest_tokens = 0

    # Events

    def granted(self, lease: GrantedLease, now: float) -> None:
        """Record that a worker got ``lease`` at the time ``now``. The worker begins or continues the group."""
        self._begin(lease, self._num_saved.get(lease.group_id) if lease.num_inherited else 0, now)

    def recover(self, lease: Group, now: float) -> None:
        """Record a group that a worker had leased from an earlier server. The time ``now`` counts as its start."""
        self._begin(lease, None, now)

    def _begin(self, lease: GrantedLease | Group, num_before: int | None, now: float) -> None:
        self._leave(lease.group_id)
        self._on_the_way.pop(lease.group_id, None)
        worker = self._workers.setdefault(lease.owner, _Worker(since=now))
        if not worker.groups:
            worker.since, worker.slowdown = now, 1.0
        running = RunningGroup(
            worker=lease.owner,
            group_id=lease.group_id,
            attempt=lease.attempt,
            began=now,
            engine_version=lease.engine_version,
            deadline=lease.deadline,
            num_before=num_before,
            num_saved=num_before or 0,
        )
        self._running[lease.group_id] = running
        worker.groups[lease.group_id] = None
        if worker.is_slow:
            self._offer(running)
        self._look_later(lease.owner, worker)

    def saved(self, group_id: int, attempt: int, num_tokens: int) -> None:
        """Record that a worker saved the prefix (tokens so far) of a group.

        The group's longest sample has ``num_tokens`` tokens.
        """
        running = self._running.get(group_id)
        if running is not None and running.attempt == attempt:
            running.num_saved = self._num_saved[group_id] = num_tokens

    def ended(self, group_id: int, attempt: int, now: float, *, num_tokens: int | None = None) -> None:
        """Record that a worker stored or released a group.

        ``num_tokens`` is the length of the longest sample in tokens; None for a release.
        """
        running = self._running.get(group_id)
        if running is None or running.attempt != attempt:
            return
        self._leave(group_id)
        worker = self._workers[running.worker]
        if num_tokens is None and running.taker:
            self._on_the_way[group_id] = running
            heappush(self._takers, (self.usual_pace(running.taker, now), group_id, attempt))
        else:
            worker.since, worker.slowdown = now, 1.0
        num_written = running.num_saved if num_tokens is None else num_tokens
        num_written -= num_written if running.num_before is None else running.num_before
        if num_written > 0 and now > running.began:
            self._measure(running.worker, worker, now - running.began, num_written, num_tokens or 0)
        else:
            self._judge(worker)

    def _measure(self, name: bytes, worker: _Worker, took_s: float, num_written: int, num_tokens: int) -> None:
        fastest = self._fastest()
        self._remove_pace(name, worker)
        worker.paces.append(took_s / num_written)
        usual = worker.usual
        insort(self._by_usual, (usual, name))
        self._longest_tokens = max(self._longest_tokens, num_tokens)
        worker.took.append(max(took_s, min(worker.paces) * (num_tokens or self._longest_tokens)))
        self._judge(worker)
        if fastest is None or usual < fastest:  # other workers may be slow compared with the new fastest worker
            for other_usual, other in reversed(self._by_usual):
                if other_usual < _SLOWER * usual:
                    break
                self._judge(self._workers[other])
        if not worker.is_slow:
            self._longest_s = max(self._longest_s, worker.took[-1])
        self._num_ended += 1
        # ``_longest_s`` is the longest duration of the groups that ended since the last reset.
        # Use ``_longest_s`` only after enough groups have ended, because short groups end first.
        if self._num_ended >= len(self._running):
            self._longest_before_s, self._longest_s, self._num_ended = self._longest_s, 0.0, 0
            unknown, self._unknown = self._unknown, {}
            for other in unknown:
                if (known := self._workers.get(other)) is not None:
                    self._look_later(other, known)

    def revoked(self, group_id: int, attempt: int) -> None:
        """Record that a worker lost its lease on a group."""
        running = self._running.get(group_id)
        if running is not None and running.attempt == attempt:
            self._leave(group_id)

    def forget(self, name: bytes) -> None:
        """Forget a worker that is gone, and its running groups."""
        if (worker := self._workers.pop(name, None)) is not None:
            self._remove_pace(name, worker)
            for group_id in worker.groups:
                del self._running[group_id]
        self._kept.pop(name, None)

    def finished(self, group_ids: Iterable[int]) -> None:
        """Forget groups that were consumed or dropped."""
        for group_id in group_ids:
            self._leave(group_id)
            self._on_the_way.pop(group_id, None)
            self._num_saved.pop(group_id, None)
            self._num_changes.pop(group_id, None)

    def look(self, now: float) -> None:
        """Check the workers whose next check is due at the time ``now``: a worker may have become slow.

        If a worker has ended no group for at least twice the duration of its longest group, the call sets
        `_Worker.slowdown`.
        """
        while self._looks and self._looks[0][0] <= now:
            _, name = heappop(self._looks)
            worker = self._workers.get(name)
            if worker is None:
                continue
            worker.is_watched = False
            longest_s = self._longest_of(worker)
            if worker.groups and longest_s and worker.since + _SLOWER * worker.slowdown * longest_s <= now:
                worker.slowdown = max(_SLOWER, (now - worker.since) / longest_s)
                self._judge(worker)
            self._look_later(name, worker)

    # Decisions

    def next_look(self, now: float) -> float | None:
        """Return the time of the next change that may occur although no message arrives; None if there is no such time.

        At this time, `look` checks a worker, or a worker stops keeping capacity free for a group that it takes over.
        """
        while self._kept_untils and self._kept_untils[0] <= now:
            self._kept_untils.popleft()
        moments = [*islice(self._kept_untils, 1), *(when for when, _ in self._looks[:1])]
        return min(moments, default=None)

    def usual_pace(self, name: bytes, now: float) -> float:
        """Return a worker's median seconds per token.

        For an unknown worker, return the fastest worker's median, or 0 if no worker was measured. If a worker has been
        idle for a long time, the call forgets the worker's pace, so a slow worker is measured again.
        """
        worker = self._workers.get(name)
        if worker is None or not worker.paces:
            return self._fastest() or 0.0
        if not worker.groups and now - worker.since > _FORGET_AFTER * max(worker.took):
            self._remove_pace(name, worker)
            worker.paces.clear()
            worker.took.clear()
            worker.is_slow, worker.slowdown = False, 1.0
            return self._fastest() or 0.0
        return worker.usual

    def is_slow(self, name: bytes, usual: float) -> bool:
        """Return whether a worker is slow compared with a median of ``usual`` seconds per token.

        A worker is slow if its fastest group took at least 2 times ``usual`` seconds per token. If the worker has ended
        no group for a long time, the time of its fastest group is first multiplied by `_Worker.slowdown`.
        """
        worker = self._workers.get(name)
        return worker is not None and 0 < _SLOWER * usual <= self._best(worker)

    def first_on_offer(self) -> RunningGroup | None:
        """Return the running group that a faster worker should take over next, or None."""
        while self._on_offer:
            _, _, group_id, attempt = self._on_offer[0]
            if self._is_on_offer(group_id, attempt):
                return self._running[group_id]
            heappop(self._on_offer)
        return None

    def take_over(self, running: RunningGroup, taker: bytes, now: float) -> None:
        """Record that the worker ``taker`` takes over the group ``running``, a result of `first_on_offer`.

        The worker ``taker`` keeps capacity free for the group for at most ``_PLACE_KEPT_S`` seconds. During this time,
        the group does not go back to a slow worker (`pace_of_takers`).
        """
        heappop(self._on_offer)
        running.taker, running.kept_until = taker, now + _PLACE_KEPT_S
        self._num_changes[running.group_id] += 1
        self._kept.setdefault(taker, []).append(running)
        self._kept_untils.append(running.kept_until)

    def pace_of_takers(self, now: float) -> float:
        """Return the median seconds per token of the fastest waiting taker, or infinity if no taker waits.

        A waiting taker is a worker that takes over a group. The slow worker has released the group, but the taker has
        no lease yet. A worker that is slow compared with the result must get no lease, because the lease could be for
        that group.
        """
        while self._takers:
            pace, group_id, attempt = self._takers[0]
            group = self._on_the_way.get(group_id)
            if group is not None and group.attempt == attempt and now < group.kept_until:
                return pace
            heappop(self._takers)
        return math.inf

    def num_kept(self, name: bytes, now: float) -> int:
        """Return the number of groups that a worker will take over. The worker keeps capacity free for these groups."""
        kept = self._kept.get(name)
        if kept is None:
            return 0
        kept = [group for group in kept if group.kept_until > now and self._running.get(group.group_id) is group]
        self._kept[name] = kept
        if not kept:
            del self._kept[name]
        return len(kept)

    # Parts

    def _is_on_offer(self, group_id: int, attempt: int) -> bool:
        running = self._running.get(group_id)
        if running is None or running.attempt != attempt or running.taker:
            return False
        return self._workers[running.worker].is_slow and self._num_changes[group_id] < MOST_CHANGES

    def _leave(self, group_id: int) -> None:
        if (running := self._running.pop(group_id, None)) is not None:
            del self._workers[running.worker].groups[group_id]

    def _fastest(self) -> float | None:
        return self._by_usual[0][0] if self._by_usual else None

    def _best(self, worker: _Worker) -> float:
        """Return the seconds per token of a worker's fastest group, multiplied by ``slowdown``.

        The result decides whether the worker is slow. ``slowdown`` is above 1 if the worker has not ended a group for a
        long time. If no group of the worker was measured, the fastest worker's median replaces the fastest group.
        """
        return worker.slowdown * (min(worker.paces) if worker.paces else self._fastest() or 0.0)

    def _longest_of(self, worker: _Worker) -> float:
        """Return the duration of a worker's longest group in seconds.

        If no group of the worker was measured, return the longest duration of a group on workers that are not slow.
        """
        return max(worker.took) if worker.took else max(self._longest_s, self._longest_before_s)

    def _remove_pace(self, name: bytes, worker: _Worker) -> None:
        if worker.paces:
            del self._by_usual[bisect_left(self._by_usual, (worker.usual, name))]

    def _judge(self, worker: _Worker) -> None:
        was_slow, fastest = worker.is_slow, self._fastest()
        worker.is_slow = fastest is not None and self._best(worker) >= _SLOWER * fastest
        if worker.is_slow and not was_slow:
            for group_id in worker.groups:
                self._offer(self._running[group_id])

    def _offer(self, running: RunningGroup) -> None:
        if len(self._on_offer) > 2 * len(self._running) + 64:
            self._on_offer = [entry for entry in set(self._on_offer) if self._is_on_offer(*entry[2:])]
            heapify(self._on_offer)
        best = self._best(self._workers[running.worker])
        heappush(self._on_offer, (running.deadline, -best, running.group_id, running.attempt))

    def _look_later(self, name: bytes, worker: _Worker) -> None:
        """Schedule the next check of a worker: has the worker become slow?

        The first check is due when the worker has ended no group for twice the duration of its longest group. If the
        worker still ends no group, each later check is due twice as long after ``since`` as the check before it.
        """
        if worker.is_watched or not worker.groups:
            return
        if not worker.took and not self._longest_before_s:
            self._unknown[name] = None
            return
        worker.is_watched = True
        heappush(self._looks, (worker.since + _SLOWER * worker.slowdown * self._longest_of(worker), name))


@dataclass(kw_only=True, slots=True)
class _Producer:
    last_heard: float
    num_puts: int = 0
    num_tokens: int = 0


class Heartbeats:
    """The rollout workers that send heartbeats. A worker is gone if it sends no message for ``silent_s`` seconds."""

    def __init__(self, silent_s: float) -> None:
        self._silent_s = silent_s
        self._producers: dict[bytes, _Producer] = {}
        self._num_generated: dict[bytes, int] = {}

    def enter(self, client: bytes, now: float) -> None:
        """Register a client as a rollout worker, which sends heartbeats."""
        if client not in self._producers:
            self._producers[client] = _Producer(last_heard=now)
        self.hear(client, now)

    def hear(self, client: bytes, now: float) -> None:
        """Record that a client sent a message at the time ``now``. Clients that are not registered are ignored."""
        producer = self._producers.pop(client, None)
        if producer is not None:
            producer.last_heard = now
            self._producers[client] = producer

    def count_put(self, client: bytes, num_tokens: int) -> None:
        """Count a group of ``num_tokens`` policy tokens that a worker stored."""
        producer = self._producers.get(client)
        if producer is not None:
            producer.num_puts += 1
            producer.num_tokens += num_tokens

    def count_generated(self, client: bytes, num_tokens: int) -> None:
        """Set the number of tokens that a worker has generated since the worker started."""
        self._num_generated[client] = num_tokens

    def num_generated(self, client: bytes) -> int:
        """Return the number of generated tokens in a worker's last heartbeat, or 0 if the worker sent no heartbeat."""
        return self._num_generated.get(client, 0)

    def leave(self, client: bytes) -> None:
        """Forget a worker that left or is dead."""
        self._producers.pop(client, None)
        self._num_generated.pop(client, None)

    def next_silence(self) -> float | None:
        """Return the time when the first worker is gone if no worker sends a message; None if there is no worker."""
        longest_ago = next(iter(self._producers.values()), None)
        return None if longest_ago is None else longest_ago.last_heard + self._silent_s

    def take_silent(self, now: float) -> list[bytes]:
        """Remove the workers that have been silent for ``silent_s`` seconds, and return their client ids."""
        gone = []
        for client, producer in self._producers.items():
            if producer.last_heard + self._silent_s > now:
                break
            gone.append(client)
        for client in gone:
            del self._producers[client]
        return gone

    def describe(self, now: float, num_leases: Mapping[bytes, int]) -> list[dict[str, Any]]:
        """Return one JSON object per worker, for `asyncrl inspect`.

        ``num_leases`` maps each client id to the number of leases that the client holds.
        """
        return [
            {
                "owner": client.hex()[:8],
                "leases": num_leases.get(client, 0),
                "puts": producer.num_puts,
                "tokens": producer.num_tokens,
                "heard_s_ago": round(now - producer.last_heard, 1),
            }
            for client, producer in self._producers.items()
        ]
