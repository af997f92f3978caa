"""Who waits for the ledger, and who wakes them: requests for leases, and prompts on their way into the queue.

After every burst of messages both are looked at again. A worker whose engine advances cancels its request and asks
again; a commit answers those whose version it puts out of reach. Every wait ends under a timer: "nothing yet".
"""

import asyncio
import logging
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any

from asyncrl.protocol.errors import ReplayBufferError, WireError

from .balance import WorkBalance
from .commands import Enqueue, Frames, GrantedLease, LeaseGroups, Put, Release, Renew, TakeBack
from .groups import Group
from .heartbeats import Deadline, Heartbeats, LoopClock
from .late_groups import ASK_AGAIN_S, LateGroups
from .ledger import Ledger
from .messages import HAND_ON, MAX_LEASES, REVOKED, Message, Replies, incarnation_of, integer, integers
from .stores import PayloadStore, size_of

logger = logging.getLogger(__name__)

_MAX_PER_CLIENT = 256
_MAX_IN_ALL = 16_384
_MAX_REMEMBERED = 4096
_LOOK_S = 5e-5
"""Seconds, per lease, until all leases are looked at again at the earliest; a look takes a fiftieth of it."""
_LOOKS_PER_GROUP = 20.0
"""Looks in the time in which an idle worker would do a group, at most: more often, there is little new to see."""


@dataclass(kw_only=True, slots=True, eq=False)
class PendingRequest:
    """A request without an answer yet.

    Attributes:
        client: Who asked.
        request_id: Which of its requests.
        fields: What was asked, as the operation needs it.
        num_bytes: Payload that waits with it.
        timer: Gives the answer "nothing yet".
    """

    client: bytes
    request_id: int
    fields: dict[str, Any] = field(default_factory=dict)
    num_bytes: int = 0
    timer: asyncio.TimerHandle | None = None


class PendingRequests:
    """Pending requests of one operation, in the order they came."""

    def __init__(self) -> None:
        self._requests: dict[tuple[bytes, int], PendingRequest] = {}
        self._by_client: dict[bytes, dict[int, PendingRequest]] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: PendingRequest) -> bool:
        return self._requests.get((request.client, request.request_id)) is request

    def all(self) -> list[PendingRequest]:
        """Those pending now, first come first."""
        return list(self._requests.values())

    @property
    def clients(self) -> Container[bytes]:
        """Who has any pending."""
        return self._by_client.keys()

    def of_client(self, client: bytes) -> list[PendingRequest]:
        """Those of one client."""
        return list(self._by_client.get(client, {}).values())

    def add(self, request: PendingRequest, hold_s: float, on_timeout: Callable[[PendingRequest], None]) -> None:
        """Hold a request for ``hold_s`` at most; a copy takes its place. Raises `ReplayBufferError` if too many are."""
        self.remove(request.client, request.request_id)
        num_of_client = len(self._by_client.get(request.client, ()))
        if num_of_client >= _MAX_PER_CLIENT or len(self) >= _MAX_IN_ALL:
            raise ReplayBufferError(
                f"{len(self)} requests of this kind wait, of them {num_of_client} of this client; at most "
                f"{_MAX_IN_ALL} and {_MAX_PER_CLIENT} may"
            )

        def time_out() -> None:
            self.remove(request.client, request.request_id)
            on_timeout(request)

        request.timer = asyncio.get_running_loop().call_later(hold_s, time_out)
        self._requests[request.client, request.request_id] = request
        self._by_client.setdefault(request.client, {})[request.request_id] = request
        self.num_bytes += request.num_bytes

    def remove(self, client: bytes, request_id: int) -> PendingRequest | None:
        """Take a request out, because it is answered or no longer wanted."""
        request = self._requests.pop((client, request_id), None)
        if request is None:
            return None
        of_client = self._by_client[client]
        del of_client[request_id]
        if not of_client:
            del self._by_client[client]
        self.num_bytes -= request.num_bytes
        if request.timer is not None:
            request.timer.cancel()
        return request

    def withdraw(self, client: bytes) -> None:
        """Take out all requests of a client that is gone."""
        for request in self.of_client(client):
            self.remove(client, request.request_id)

    def close(self) -> None:
        """Cancel every timer."""
        for request in self.all():
            self.remove(request.client, request.request_id)


class PendingLeases(PendingRequests):
    """Pending requests for leases, also by the version that their engines serve, of which there are few."""

    def __init__(self) -> None:
        super().__init__()
        self._by_version: dict[int, dict[tuple[bytes, int], int]] = {}
        self._next_place = 0

    @property
    def versions(self) -> list[int]:
        """The versions that are asked for."""
        return list(self._by_version)

    def at_version(self, version: int) -> list[tuple[int, PendingRequest]]:
        """Those at one version, each with its place in the order they came."""
        return [(place, self._requests[key]) for key, place in self._by_version.get(version, {}).items()]

    def add(self, request: PendingRequest, hold_s: float, on_timeout: Callable[[PendingRequest], None]) -> None:
        """See `PendingRequests.add`."""
        super().add(request, hold_s, on_timeout)
        self._next_place += 1
        of_version = self._by_version.setdefault(request.fields["version"], {})
        of_version[request.client, request.request_id] = self._next_place

    def remove(self, client: bytes, request_id: int) -> PendingRequest | None:
        """See `PendingRequests.remove`."""
        request = super().remove(client, request_id)
        if request is not None:
            version = request.fields["version"]
            del self._by_version[version][client, request_id]
            if not self._by_version[version]:
                del self._by_version[version]
        return request


class FairQueue:
    """Whose turn it is when more workers wait than groups can begin.

    Start-time fair queueing (Goyal et al., SIGCOMM 1996): each grant moves a worker's turn by one, and the lowest turn
    is served first. A worker that was away resumes at the turn that is being served, so a newcomer holds up nobody.
    """

    def __init__(self) -> None:
        self._next: dict[bytes, int] = {}
        self._serving = 0

    def turn_of(self, client: bytes) -> int:
        """The turn of a client; the lowest is served first."""
        return max(self._next.get(client, 0), self._serving)

    def take(self, client: bytes) -> None:
        """A client was served in its turn."""
        turn = self.turn_of(client)
        self._serving = turn
        self._next[client] = turn + 1
        if len(self._next) > _MAX_REMEMBERED:
            self._next = {known: turn for known, turn in self._next.items() if turn > self._serving + 1}


@dataclass(frozen=True, kw_only=True, slots=True)
class Collaborators:
    """What each part of the service works with: the ledger decides, the store keeps, `Replies` answer.

    A request that cannot be granted is answered after ``hold_s``, with what there is.
    """

    ledger: Ledger
    store: PayloadStore
    replies: Replies
    hold_s: float


class PromptIntake:
    """The operation ``enqueue``: at most ``queue_size`` prompts are queued at once."""

    def __init__(self, shared: Collaborators, *, queue_size: int) -> None:
        self._ledger, self._store, self._replies = shared.ledger, shared.store, shared.replies
        self._hold_s = shared.hold_s
        self._queue_size = queue_size
        self._pending = PendingRequests()
        self.operations = {"enqueue": self._enqueue}

    @property
    def num_waiting(self) -> int:
        """Requests that wait."""
        return len(self._pending)

    @property
    def num_waiting_bytes(self) -> int:
        """Bytes of the prompts that wait."""
        return self._pending.num_bytes

    def close(self) -> None:
        """Stop whatever waits."""
        self._pending.close()

    def _enqueue(self, client: bytes, message: Message) -> None:
        group_ids, counts = integers(message.fields, "groups"), integers(message.fields, "counts")
        if len(group_ids) != len(counts) or sum(counts) != len(message.payload):
            raise WireError("enqueue names as many groups as it carries prompts")
        self._pending.remove(client, message.request_id)
        size = size_of(message.payload)
        self._store.check_prompts(size, num_waiting_bytes=self._pending.num_bytes)
        payload = iter(message.payload)
        prompts = [(group_id, [next(payload) for _ in range(n)]) for group_id, n in zip(group_ids, counts, strict=True)]
        fields = {"prompts": prompts, "queued": 0}
        request = PendingRequest(client=client, request_id=message.request_id, fields=fields, num_bytes=size)
        self._pending.add(request, self._hold_s, self._answer)

    def _answer(self, request: PendingRequest) -> None:
        self._replies.reply(request.client, request.request_id, {"queued": request.fields["queued"]})

    def fill(self) -> None:
        """Queue what the queue has room for, first come first."""
        for request in self._pending.all():
            prompts, num_queued = request.fields["prompts"], request.fields["queued"]
            num_free = max(0, self._queue_size - self._ledger.num_queued)
            chosen = prompts[num_queued : num_queued + num_free]
            self._queue(chosen)
            request.fields["queued"] += len(chosen)
            if request.fields["queued"] < len(prompts):
                return
            self._pending.remove(request.client, request.request_id)
            self._answer(request)

    def _queue(self, prompts: Sequence[tuple[int, Frames]]) -> None:
        new = {group_id: frames for group_id, frames in prompts if not self._ledger.knows(group_id)}
        if not new:
            return
        frames = {("prompt", group_id): parts for group_id, parts in new.items()}
        self._ledger.apply(Enqueue(group_ids=tuple(new)), frames=frames)
        for group_id, parts in new.items():
            self._store.prompts.put(group_id, parts)


class Admission:
    """The operations of workers on leases; a producer not heard of for ``silent_s`` on ``clock`` is gone."""

    def __init__(self, shared: Collaborators, *, clock: LoopClock, silent_s: float) -> None:
        self._ledger, self._store, self._replies = shared.ledger, shared.store, shared.replies
        self._hold_s = shared.hold_s
        self._clock = clock
        self._pending = PendingLeases()
        self._granted: OrderedDict[tuple[bytes, int], list[GrantedLease | Group]] = OrderedDict()
        self._turns = FairQueue()
        self._balance = WorkBalance()
        self._late = LateGroups(self._ledger, is_waiting=lambda worker: worker in self._pending.clients)
        self._relief = Deadline(self._look_again, clock)
        self._relieve_from = -math.inf
        self._relieve_at: float | None = None
        self._asked: dict[bytes, tuple[Sequence[tuple[int, int]], float]] = {}
        self._not_relieved_before: dict[bytes, float] = {}
        self.heartbeats = Heartbeats(silent_s)
        self.operations = {
            "lease": self._lease,
            "cancel": self._cancel,
            "renew": self._renew,
        }

    @property
    def num_waiting(self) -> int:
        """Requests that wait for admission."""
        return len(self._pending)

    def close(self) -> None:
        """Stop whatever waits."""
        self._pending.close()
        self._relief.close()

    def recover(self, leases: Iterable[Group]) -> None:
        """Take up the leases of the server before this one; their owners get the same timeout as everyone else."""
        for lease in leases:
            self._granted.setdefault((lease.owner, lease.request_id), []).append(lease)
            self._late.granted(lease, self._ledger.num_leases_of(lease.owner) - 1, self._clock.time())
            self.heartbeats.enter(lease.owner, self._clock.time())

    def describe(self) -> list[dict[str, Any]]:
        """What is known of every producer, for people."""
        num_leases = Counter(lease.owner for lease in self._ledger.leases())
        return self.heartbeats.describe(self._clock.time(), num_leases)

    def _lease(self, client: bytes, message: Message) -> None:
        granted = self._granted.get((client, message.request_id))
        if granted is not None:
            self._answer(client, message.request_id, granted)
            return
        version = integer(message.fields, "engine_version")
        num_wanted = integer(message.fields, "max_groups")
        incarnation = incarnation_of(message.fields)
        if incarnation == self._ledger.incarnation:
            self._ledger.check_engine_version(version)
        fields = {"version": version, "wanted": num_wanted, "granted": [], "incarnation": incarnation}
        request = PendingRequest(client=client, request_id=message.request_id, fields=fields)
        self._pending.add(request, self._hold_s, self._answer_nothing)

    def _answer_nothing(self, request: PendingRequest) -> None:
        self._answer(request.client, request.request_id, [])

    def adopt(self, client: bytes, version: int) -> None:
        """The engine of a client has loaded ``version`` from the learner that lives."""
        for request in self._pending.of_client(client):
            if request.fields["version"] == version:
                request.fields["incarnation"] = self._ledger.incarnation

    def answer_outdated(self, *, except_for: Container[bytes]) -> None:
        """After a commit: let workers ask again whose engine is now too far behind for any group to begin.

        Not those ``except_for`` that are woken otherwise.
        """
        for request in self._pending.all():
            is_outdated = self._ledger.rule.deadline(request.fields["version"]) < self._ledger.learner_version
            if is_outdated and request.client not in except_for:
                self._pending.remove(request.client, request.request_id)
                self._answer_nothing(request)

    def _admitted(self, versions: Iterable[int]) -> set[int]:
        """Those of the versions at which a group that waits may begin; none where no group waits, or none fits."""
        if not self._ledger.num_queued or not self._ledger.has_room():
            return set()
        return {version for version in versions if self._ledger.admits(version)}

    def grant(self) -> None:
        """One lease at a time to the waiting worker that will be done first, until nothing more is admitted.

        Workers that would be done at the same time take turns. Only requests at a version that is admitted are looked
        at: it costs little while all engines are too far behind.
        """
        now = self._clock.time()
        self._late.note_steps(now)
        for worker, keys in self._late.take_late(now).items():
            self._ask_to_hand_on(worker, keys)
        if self._pending:
            if versions := self._admitted(self._pending.versions):
                self._grant_to_waiting(versions, now)
            elif now >= self._relieve_from:
                self._relieve(now)
        self._relief.at(self._next_look())

    def grant_saved(self) -> None:
        """Lease what was handed on at the head of the queue, and nothing else."""
        if self._pending and self._is_saved_first() and (versions := self._admitted(self._pending.versions)):
            self._grant_to_waiting(versions, self._clock.time(), only_saved=True)

    def _is_saved_first(self) -> bool:
        first = self._ledger.first_queued
        return first is not None and first.progress is not None

    def _next_look(self) -> float | None:
        """When a group may be late, or a worker may be known to be slow."""
        moments = (self._late.next_look(), self._relieve_at)
        return min((when for when in moments if when is not None), default=None)

    def _grant_to_waiting(self, versions: set[int], now: float, *, only_saved: bool = False) -> None:
        waiting = [entry for version in versions for entry in self._pending.at_version(version)]
        line = [
            (self._delay_s(request, now), self._turns.turn_of(request.client), place, request)
            for place, request in waiting
            # An engine with weights of a learner that was replaced waits until it has loaded others.
            if request.fields["wanted"] > 0 and request.fields["incarnation"] == self._ledger.incarnation
        ]
        heapify(line)
        served: list[PendingRequest] = []
        try:
            while line and versions and (self._is_saved_first() or not only_saved):
                _, turn, place, request = heappop(line)
                is_admitted = request.fields["version"] in versions
                if is_admitted and self._grant_one(request, served, only_saved=only_saved):
                    heappush(line, (self._delay_s(request, now), turn + 1, place, request))
                versions = self._admitted(versions)
        finally:  # also where the journal could not be written for one more
            for request in served:
                self._pending.remove(request.client, request.request_id)
                self._remember(request)
                self._answer(request.client, request.request_id, request.fields["granted"])

    def _delay_s(self, request: PendingRequest, now: float) -> float:
        return self._balance.delay_s(request.client, self._ledger.num_leases_of(request.client), now)

    def _relieve(self, now: float) -> None:
        """Nothing is admitted: ask the most loaded worker to hand groups on to one that waits and has none.

        Its engine must be as new as theirs began, or they could not begin on it. A worker that gets none of them all
        the same is considered again only after the time that it takes for a group.
        """
        self._relieve_from = now + _LOOK_S * self._ledger.num_leased
        idle, moments = None, []
        for request in self._pending.all():
            if not self._ledger.num_leases_of(request.client):
                if (when := self._not_relieved_before.get(request.client, now)) <= now:
                    idle = request
                    break
                moments.append(when)
        if idle is not None and (when := self._relieve_one(idle, now)) is not None:
            moments.append(when)
        self._relieve_at = max(min(moments), self._relieve_from) if moments else None

    def _relieve_one(self, idle: PendingRequest, now: float) -> float | None:
        """Ask for one idle worker; when to look again where nobody is known to be slow yet."""
        leases = self._ledger.leases()
        version, num_held = idle.fields["version"], Counter(lease.owner for lease in leases)
        too_new = {lease.owner for lease in leases if lease.engine_version > version}
        excluded = too_new | self._still_asked(now)
        candidates = {worker: number for worker, number in num_held.items() if worker not in excluded}
        if (asked := self._balance.hand_on(idle.client, candidates, now)) is not None:
            worker, number = asked
            begun_last = [(lease.group_id, lease.attempt) for lease in leases if lease.owner == worker][-number:]
            self._ask_to_hand_on(worker, begun_last)  # they have most left
            self._not_relieved_before[idle.client] = now + self._balance.pace_s(idle.client, 0, now)
            return None
        when = self._balance.next_hand_on(idle.client, candidates, now)
        if when is not None:
            rest_s = self._balance.pace_s(idle.client, 0, now) / _LOOKS_PER_GROUP
            self._relieve_from = max(self._relieve_from, now + rest_s)
        return when

    def _look_again(self) -> None:
        """A moment has come at which a group may be late, or a worker is known to be slow. Grants nothing.

        Whatever lets a group begin is a message, and grants it then.
        """
        now = self._clock.time()
        for worker, keys in self._late.take_late(now).items():
            self._ask_to_hand_on(worker, keys)
        if self._pending and now >= self._relieve_from and not self._admitted(self._pending.versions):
            self._relieve(now)
        elif self._relieve_at is not None and now >= self._relieve_at:
            self._relieve_at = None
        self._relief.at(self._next_look())

    def _still_asked(self, now: float) -> set[bytes]:
        """The workers that still have a group which they were asked to hand on a short while ago."""
        for worker, (keys, asked_at) in list(self._asked.items()):
            if now >= asked_at + ASK_AGAIN_S or not any(self._ledger.holds(*key) for key in keys):
                del self._asked[worker]
        return set(self._asked)

    def _ask_to_hand_on(self, worker: bytes, keys: Sequence[tuple[int, int]]) -> None:
        self._asked[worker] = keys, self._clock.time()
        groups, attempts = zip(*keys, strict=True)
        self._replies.push(worker, HAND_ON, {"groups": list(groups), "attempts": list(attempts)})

    def ended(self, client: bytes, command: Put | Release) -> None:
        """A worker stored a group, or had it filtered, or gave it back unfinished."""
        now = self._clock.time()
        if isinstance(command, Put):
            ended, num_left_out, num_saved = command.summary, command.num_left_out, None
        else:
            ended, num_left_out, num_saved = command, 0, self._ledger.num_saved(command.group_id)
        num_tokens = ended.num_tokens + num_left_out
        part = self._late.ended(ended.group_id, ended.attempt, num_tokens, now, num_saved=num_saved)
        self._balance.ended(client, now, part=part)

    def _grant_one(self, request: PendingRequest, served: list[PendingRequest], *, only_saved: bool) -> bool:
        """Grant a group if its engine is admitted; whether the worker wants more and may get it."""
        granted, now = request.fields["granted"], self._clock.time()
        command = self._command_for(request, now)
        if command is None or (only_saved and command.skip_saved):
            return False
        num_held = self._ledger.num_leases_of(request.client)
        new = self._ledger.apply(command, now).leases
        for lease in new:
            if lease.progress is None:
                self._store.prefixes.remove(lease.group_id)
            self._late.granted(lease, num_held, now)
        if new:
            self._not_relieved_before.pop(request.client, None)
            self._turns.take(request.client)
            self._balance.granted(request.client, num_held, now)
        granted.extend(new)
        if new and len(granted) == 1:
            served.append(request)
        return bool(new) and len(granted) < request.fields["wanted"]

    def _command_for(self, request: PendingRequest, now: float) -> LeaseGroups | None:
        """What a worker may take: nothing that it would hold up, where a faster one is there."""
        worker, version, first = request.client, request.fields["version"], self._ledger.first_queued
        skip_saved = first is not None and self._late.is_late(worker, first, now)
        if (skip_saved or first is None or first.progress is None) and not self._late.is_worth(worker, version, now):
            return None
        return LeaseGroups(
            engine_version=version,
            max_groups=1,
            owner=worker,
            request_id=request.request_id,
            skip_saved=skip_saved,
        )

    def _remember(self, request: PendingRequest) -> None:
        """Keep the answer, in case the request is sent again because the answer was lost."""
        self._granted[request.client, request.request_id] = request.fields["granted"]
        if len(self._granted) > _MAX_REMEMBERED:
            self._granted.popitem(last=False)

    def _answer(self, client: bytes, request_id: int, granted: Sequence[GrantedLease | Group]) -> None:
        payload: list[Any] = []
        leases = []
        for lease in granted:
            if not self._ledger.holds(lease.group_id, lease.attempt):
                continue
            prompt = self._store.prompts.get(lease.group_id)
            prefix = () if lease.progress is None else self._store.prefixes.get(lease.group_id)
            leases.append(
                [lease.group_id, lease.attempt, lease.engine_version, lease.deadline, len(prompt), len(prefix)]
            )
            payload += [*prompt, *prefix]
        self._replies.reply(client, request_id, {"leases": leases}, payload)

    def _cancel(self, client: bytes, message: Message) -> None:
        """A lease that is no longer wanted; if it was granted meanwhile, its groups go back to the queue."""
        cancelled = integer(message.fields, "request")
        if self._pending.remove(client, cancelled) is None:
            for lease in self._granted.pop((client, cancelled), []):
                self._give_back(lease, "cancelled")
        self._replies.reply(client, message.request_id)

    def _give_back(self, lease: GrantedLease | Group, reason: str) -> None:
        """A lease whose worker will report nothing of it."""
        if self._ledger.holds(lease.group_id, lease.attempt):
            self._ledger.apply(Release(group_id=lease.group_id, attempt=lease.attempt, num_tokens=0, reason=reason))

    def _renew(self, client: bytes, message: Message) -> None:
        for group_id, attempt in zip(*_groups_and_attempts(message), strict=True):
            renewed = self._ledger.apply(Renew(group_id=group_id, attempt=attempt, owner=client), self._clock.time())
            if renewed.expires_at is None:
                self._replies.push(client, REVOKED, {"group_id": group_id, "attempt": attempt})
        self._replies.reply(client, message.request_id)

    def leave(self, client: bytes, message: Message) -> None:
        """A goodbye, with the leases that the client knows of: all others, and what it waits for, are given back."""
        known = set(zip(*_groups_and_attempts(message), strict=True))
        self._pending.withdraw(client)
        for lease in self._ledger.leases_of(client):
            if (lease.group_id, lease.attempt) not in known:
                self._give_back(lease, "undelivered")
        if not self._ledger.leases_of(client):
            self.heartbeats.leave(client)
            self._forget(client)
        self._replies.reply(client, message.request_id)

    def take_from(self, client: bytes) -> None:
        """Take the leases of a producer that is gone, before they run out."""
        self._pending.withdraw(client)
        self._forget(client)
        if taken := self._ledger.apply(TakeBack(owner=client)).group_ids:
            logger.warning("producer %s is silent; %d leases were taken back", client.hex()[:8], len(taken))

    def _forget(self, client: bytes) -> None:
        self._late.forget(client)
        self._not_relieved_before.pop(client, None)

    def bury(self, client: bytes) -> int:
        """A producer is dead: take its leases, and count what it can no longer report; returns all that it generated.

        What of that was only in its memory counts as lost.
        """
        self._pending.withdraw(client)
        self._balance.forget(client)
        self._forget(client)
        account = self._ledger.account
        settled, before = account.settled_by(client), account.num_tokens
        taken = self._ledger.apply(TakeBack(owner=client, num_generated=self.heartbeats.leave(client)))
        name, num_leases = client.hex()[:8], len(taken.group_ids)
        logger.warning("producer %s is dead; %d leases, and %d tokens lost", name, num_leases, taken.num_lost or 0)
        return settled + account.num_tokens - before


def _groups_and_attempts(message: Message) -> tuple[list[int], list[int]]:
    group_ids, attempts = integers(message.fields, "groups"), integers(message.fields, "attempts")
    if len(group_ids) != len(attempts):
        raise WireError(f"{message.name} names one attempt for each group, got {len(attempts)} for {len(group_ids)}")
    if len(group_ids) > MAX_LEASES:
        raise WireError(f"{message.name} names at most {MAX_LEASES} leases, got {len(group_ids)}; send several")
    return group_ids, attempts
