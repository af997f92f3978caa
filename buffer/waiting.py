"""Every request that the buffer holds until it can be answered: leases, prompts for the queue, and batches.

The service looks at all of them after each burst of messages. A worker whose engine advances cancels its request and
asks again; a commit answers the requests whose version is then too old. A timer ends each wait with "nothing yet".
"""

import asyncio
import logging
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any

from asyncrl.core.errors import AsyncRLError, ReplayBufferError, StoreFull, WireError

from .commands import Enqueue, Frames, GrantedLease, LeaseGroups, PlanBatch, Put, Release, Renew, TakeBack
from .groups import Group
from .heartbeats import Deadline, Heartbeats, LoopClock
from .ledger import Ledger
from .messages import HAND_ON, MAX_LEASES, REVOKED, Message, Replies, incarnation_of, integer, integers, summary_fields
from .pace import RunningGroup, WorkerPaces
from .store_links import StoreLinks
from .stores import FetchWindow, PayloadStore, size_of

logger = logging.getLogger(__name__)

_MAX_PER_CLIENT = 256
_MAX_IN_ALL = 16_384
_MAX_REMEMBERED = 4096
_FIRST_WARNING_STEPS = 4
_SEARCH_S = 5e-5
"""Seconds per pending request between a failed search and the next one; a search takes a fiftieth of this time."""


@dataclass(kw_only=True, slots=True, eq=False)
class PendingRequest:
    """A request without an answer yet.

    Attributes:
        client: The client that sent it.
        request_id: Its id, chosen by the client.
        fields: Its parsed fields.
        num_bytes: Size of its payload.
        timer: Answers "nothing yet" when the time is over.
    """

    client: bytes
    request_id: int
    fields: dict[str, Any] = field(default_factory=dict)
    num_bytes: int = 0
    timer: asyncio.TimerHandle | None = None


class PendingRequests:
    """Pending requests of one operation, in the order they came.

    Args:
        replies: Sends the replies.
        hold_s: Longest time in seconds that a request waits. Then ``nothing_yet`` answers the request.
        nothing_yet: Answers a request that could not be granted in time. By default it sends a reply without fields,
            and the client sends the request again.
    """

    def __init__(
        self, replies: Replies, hold_s: float, nothing_yet: Callable[[PendingRequest], None] | None = None
    ) -> None:
        self._replies, self._hold_s = replies, hold_s
        self._nothing_yet = self._reply_nothing if nothing_yet is None else nothing_yet
        self._requests: dict[tuple[bytes, int], PendingRequest] = {}
        self._by_client: dict[bytes, dict[int, PendingRequest]] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: PendingRequest) -> bool:
        return self._requests.get((request.client, request.request_id)) is request

    def all(self) -> list[PendingRequest]:
        """All pending requests, in the order they came."""
        return list(self._requests.values())

    @property
    def clients(self) -> Container[bytes]:
        """The clients that have a pending request."""
        return self._by_client.keys()

    def of_client(self, client: bytes) -> list[PendingRequest]:
        """The pending requests of one client."""
        return list(self._by_client.get(client, {}).values())

    def _reply_nothing(self, request: PendingRequest) -> None:
        self._replies.reply(request.client, request.request_id)

    def add(self, request: PendingRequest) -> None:
        """Hold a request; a copy of it takes its place. Raises `ReplayBufferError` if too many are held."""
        self.remove(request.client, request.request_id)
        num_of_client = len(self._by_client.get(request.client, ()))
        if num_of_client >= _MAX_PER_CLIENT or len(self) >= _MAX_IN_ALL:
            raise ReplayBufferError(
                f"{len(self)} requests of this kind wait, of them {num_of_client} of this client; at most "
                f"{_MAX_IN_ALL} and {_MAX_PER_CLIENT} may"
            )

        def time_out() -> None:
            self.remove(request.client, request.request_id)
            self._nothing_yet(request)

        request.timer = asyncio.get_running_loop().call_later(self._hold_s, time_out)
        self._requests[request.client, request.request_id] = request
        self._by_client.setdefault(request.client, {})[request.request_id] = request
        self.num_bytes += request.num_bytes

    def remove(self, client: bytes, request_id: int) -> PendingRequest | None:
        """Remove a request that was answered or cancelled."""
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

    def answer(self, try_to: Callable[[PendingRequest], bool]) -> None:
        """Call ``try_to`` with each request in order of arrival, and remove the requests for which it returns true."""
        for request in self.all():
            if try_to(request):
                self.remove(request.client, request.request_id)

    def fail_all(self, error: AsyncRLError) -> None:
        """Answer every request with an error."""
        for request in self.all():
            self.remove(request.client, request.request_id)
            self._replies.fail(request.client, request.request_id, error)

    def withdraw(self, client: bytes) -> None:
        """Remove all requests of a client that is gone."""
        for request in self.of_client(client):
            self.remove(client, request.request_id)

    def close(self) -> None:
        """Cancel every timer."""
        for request in self.all():
            self.remove(request.client, request.request_id)


class PendingLeases(PendingRequests):
    """Pending requests for leases, also indexed by the version that their engines serve. There are few versions."""

    def __init__(self, replies: Replies, hold_s: float, nothing_yet: Callable[[PendingRequest], None]) -> None:
        super().__init__(replies, hold_s, nothing_yet)
        self._by_version: dict[int, dict[tuple[bytes, int], int]] = {}
        self._next_place = 0

    @property
    def versions(self) -> list[int]:
        """The engine versions of the pending requests."""
        return list(self._by_version)

    def at_version(self, version: int) -> list[tuple[int, PendingRequest]]:
        """The requests at one version, each with its place in the order they came."""
        return [(place, self._requests[key]) for key, place in self._by_version.get(version, {}).items()]

    def add(self, request: PendingRequest) -> None:
        """Hold a request, and index it by its version."""
        super().add(request)
        self._next_place += 1
        of_version = self._by_version.setdefault(request.fields["version"], {})
        of_version[request.client, request.request_id] = self._next_place

    def remove(self, client: bytes, request_id: int) -> PendingRequest | None:
        """Remove a request from the line and from the index."""
        request = super().remove(client, request_id)
        if request is not None:
            version = request.fields["version"]
            del self._by_version[version][client, request_id]
            if not self._by_version[version]:
                del self._by_version[version]
        return request


class FairQueue:
    """The order of waiting workers when more workers wait than groups can begin.

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
        """Note that a client was served in its turn."""
        turn = self.turn_of(client)
        self._serving = turn
        self._next[client] = turn + 1
        if len(self._next) > _MAX_REMEMBERED:
            self._next = {known: turn for known, turn in self._next.items() if turn > self._serving + 1}


@dataclass(frozen=True, kw_only=True, slots=True)
class Collaborators:
    """Shared objects of the parts of the service: the ledger decides, the store keeps frames, `Replies` answer.

    A request that cannot be granted is answered with "nothing yet" after ``hold_s`` seconds.
    """

    ledger: Ledger
    store: PayloadStore
    replies: Replies
    hold_s: float

    def pending(self, nothing_yet: Callable[[PendingRequest], None] | None = None) -> PendingRequests:
        """Return an empty collection for the pending requests of one operation."""
        return PendingRequests(self.replies, self.hold_s, nothing_yet)


class PromptIntake:
    """The operation ``enqueue``: at most ``queue_size`` prompts are queued at once."""

    def __init__(self, shared: Collaborators, *, queue_size: int) -> None:
        self._ledger, self._store, self._replies = shared.ledger, shared.store, shared.replies
        self._queue_size = queue_size
        self._pending = shared.pending(nothing_yet=self._answer)
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
        """Cancel every timer."""
        self._pending.close()

    def _enqueue(self, client: bytes, message: Message) -> None:
        group_ids, counts = integers(message.fields, "groups"), integers(message.fields, "counts")
        if len(group_ids) != len(counts) or sum(counts) != len(message.payload):
            raise WireError("enqueue must name one group per prompt")
        self._pending.remove(client, message.request_id)
        size = size_of(message.payload)
        self._store.check_prompts(size, num_waiting_bytes=self._pending.num_bytes)
        payload = iter(message.payload)
        prompts = [(group_id, [next(payload) for _ in range(n)]) for group_id, n in zip(group_ids, counts, strict=True)]
        fields = {"prompts": prompts, "queued": 0}
        request = PendingRequest(client=client, request_id=message.request_id, fields=fields, num_bytes=size)
        self._pending.add(request)

    def _answer(self, request: PendingRequest) -> None:
        self._replies.reply(request.client, request.request_id, {"queued": request.fields["queued"]})

    def fill(self) -> None:
        """Queue waiting prompts in order of arrival while the queue has room."""
        for request in self._pending.all():
            prompts, num_queued = request.fields["prompts"], request.fields["queued"]
            num_free = max(0, self._queue_size - self._ledger.groups.num_queued)
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
    """The operations of workers on leases.

    Args:
        clock: Measures paces and silence.
        silent_s: A producer that sends no message for this long counts as gone.
        hands_over: Whether faster workers take over running groups of slow ones, see `buffer.pace`.
        settle: Called when `grant` may find something to do although no message came.
    """

    def __init__(
        self,
        shared: Collaborators,
        *,
        clock: LoopClock,
        silent_s: float,
        hands_over: bool,
        settle: Callable[[], None],
    ) -> None:
        self._ledger, self._store, self._replies = shared.ledger, shared.store, shared.replies
        self._clock = clock
        self._pending = PendingLeases(shared.replies, shared.hold_s, self._answer_nothing)
        self._granted: OrderedDict[tuple[bytes, int], list[GrantedLease]] = OrderedDict()
        self._turns = FairQueue()
        self._hands_over = hands_over
        self._paces = WorkerPaces()
        self._look = Deadline(settle, clock)
        self._search_from = -math.inf
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
        """Cancel every timer."""
        self._pending.close()
        self._look.close()

    def recover(self, leases: Iterable[Group]) -> None:
        """Load the leases of an earlier server; their owners get the same timeout as everyone else."""
        for lease in leases:
            self._granted.setdefault((lease.owner, lease.request_id), []).append(lease.granted())
            self._paces.recover(lease, self._clock.time())
            self.heartbeats.enter(lease.owner, self._clock.time())

    def describe(self) -> list[dict[str, Any]]:
        """Describe every producer for `asyncrl inspect`."""
        num_leases = Counter(lease.owner for lease in self._ledger.groups.leases.all())
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
        self._pending.add(request)

    def _answer_nothing(self, request: PendingRequest) -> None:
        self._answer(request.client, request.request_id, [])

    def adopt(self, client: bytes, version: int) -> None:
        """Note that the engine of a client loaded ``version`` from the current learner."""
        for request in self._pending.of_client(client):
            if request.fields["version"] == version:
                request.fields["incarnation"] = self._ledger.incarnation

    def answer_outdated(self, *, except_for: Container[bytes]) -> None:
        """After a commit, answer the workers whose engine is now too old for any group to begin; they ask again.

        Workers in ``except_for`` are left out: newer weights wake them.
        """
        for request in self._pending.all():
            is_outdated = self._ledger.rule.deadline(request.fields["version"]) < self._ledger.learner_version
            if is_outdated and request.client not in except_for:
                self._pending.remove(request.client, request.request_id)
                self._answer_nothing(request)

    def _admitted(self, versions: Iterable[int]) -> set[int]:
        """The versions at which a queued group may begin; empty if no group is queued or none fits."""
        if not self._ledger.groups.num_queued or not self._ledger.room.has_room():
            return set()
        return {version for version in versions if self._ledger.admits(version)}

    def grant(self) -> None:
        """Let faster workers take groups over, then grant one lease at a time until no more group is admitted.

        Faster workers come before slow ones. Among equally fast workers, the worker with the fewest groups comes first;
        workers with equally many groups take turns. Only requests at an admitted version are checked, so the call costs
        little while all engines are too far behind.
        """
        now = self._clock.time()
        self._paces.look(now)
        if self._pending:
            versions = self._admitted(self._pending.versions)
            if self._hands_over:
                self._take_over(versions, now)
            if versions:
                self._grant_to_waiting(versions, now)
        self._look.at(self._paces.next_look(now))

    def grant_saved(self) -> None:
        """Lease only groups with a saved prefix, from the head of the queue."""
        if self._pending and self._is_saved_first() and (versions := self._admitted(self._pending.versions)):
            self._grant_to_waiting(versions, self._clock.time(), only_saved=True)

    def _is_saved_first(self) -> bool:
        return any(group.progress is not None for group in self._ledger.groups.head(1, owner=b""))

    def _grant_to_waiting(self, versions: set[int], now: float, *, only_saved: bool = False) -> None:
        waiting = [entry for version in versions for entry in self._pending.at_version(version)]
        waiting = [(place, request) for place, request in waiting if self._num_free(request, now) > 0]
        usual = min((self._paces.usual_pace(request.client, now) for _, request in waiting), default=0.0)
        line = [
            (
                self._hands_over and self._paces.is_slow(request.client, usual),
                self._ledger.groups.leases.num_of_owner(request.client),
                self._turns.turn_of(request.client),
                place,
                request,
            )
            for place, request in waiting
        ]
        heapify(line)
        served: list[PendingRequest] = []
        try:
            while line and versions and (self._is_saved_first() or not only_saved):
                is_slow, num_held, turn, place, request = heappop(line)
                if request.fields["version"] in versions and self._grant_one(request, served, now):
                    heappush(line, (is_slow, num_held + 1, turn + 1, place, request))
                versions = self._admitted(versions)
        finally:  # also after a failed write of the journal
            for request in served:
                self._pending.remove(request.client, request.request_id)
                self._remember(request)
                self._answer(request.client, request.request_id, request.fields["granted"])

    def _num_free(self, request: PendingRequest, now: float) -> int:
        """Places that a request may fill now; 0 if its engine serves weights of a learner that was replaced."""
        fields = request.fields
        if fields["incarnation"] != self._ledger.incarnation:
            return 0
        return fields["wanted"] - len(fields["granted"]) - self._paces.num_kept(request.client, now)

    def _take_over(self, admitted: set[int], now: float) -> None:
        """Ask slow workers to hand over running groups, as long as faster workers wait for them."""
        while (group := self._paces.first_on_offer()) is not None and self._ledger.room.has_room():
            is_due = group.deadline <= self._ledger.next_plan
            takers = [
                version
                for version in self._pending.versions
                if version not in admitted or (is_due and group.deadline < self._ledger.rule.deadline(version))
            ]
            if not takers:
                return
            if now < self._search_from:
                self._look.at(self._search_from)
                return
            if (taker := self._fastest_taker(group, takers, now)) is None:
                self._search_from = now + _SEARCH_S * len(self._pending)
                return
            self._paces.take_over(group, taker, now)
            self._replies.push(group.worker, HAND_ON, {"groups": [group.group_id], "attempts": [group.attempt]})

    def _fastest_taker(self, group: RunningGroup, versions: Iterable[int], now: float) -> bytes | None:
        """The fastest waiting worker at these versions that may continue a group; None if it is not much faster."""
        paces = [
            (self._paces.usual_pace(request.client, now), request.client)
            for version in versions
            if version >= group.engine_version
            for _, request in self._pending.at_version(version)
            if request.client != group.worker and self._num_free(request, now) > 0
        ]
        usual, taker = min(paces, default=(math.inf, b""))
        return taker if self._paces.is_slow(group.worker, usual) else None

    def ended(self, client: bytes, command: Put | Release) -> None:
        """Note that an attempt ended: its group was stored, filtered or released."""
        if isinstance(command, Put):
            ended, num_tokens = command.summary, max(command.summary.response_lengths, default=0)
        else:
            ended, num_tokens = command, None
        self._paces.ended(ended.group_id, ended.attempt, self._clock.time(), num_tokens=num_tokens)

    def saved(self, group_id: int, attempt: int, longest_response: int) -> None:
        """A worker saved a running group, whose longest sample has so many tokens."""
        self._paces.saved(group_id, attempt, longest_response)

    def revoked(self, group_id: int, attempt: int) -> None:
        """Note that a worker lost its lease on a group."""
        self._paces.revoked(group_id, attempt)

    def finished(self, group_ids: Iterable[int]) -> None:
        """Forget groups that were consumed or dropped."""
        self._paces.finished(group_ids)

    def _grant_one(self, request: PendingRequest, served: list[PendingRequest], now: float) -> bool:
        """Grant a group if the engine is admitted. Returns whether the worker wants and may get another group."""
        granted = request.fields["granted"]
        command = LeaseGroups(engine_version=request.fields["version"], max_groups=1, request_id=request.request_id)
        new = self._ledger.apply(command, now, sender=request.client).leases
        for lease in new:
            if lease.progress is None:
                self._store.prefixes.remove(lease.group_id)
            self._paces.granted(lease, now)
        if new:
            self._turns.take(request.client)
        granted.extend(new)
        if new and len(granted) == 1:
            served.append(request)
        return bool(new) and self._num_free(request, now) > 0

    def _remember(self, request: PendingRequest) -> None:
        """Keep the answer: the client repeats the request if the answer was lost."""
        self._granted[request.client, request.request_id] = request.fields["granted"]
        if len(self._granted) > _MAX_REMEMBERED:
            self._granted.popitem(last=False)

    def _answer(self, client: bytes, request_id: int, granted: Sequence[GrantedLease]) -> None:
        payload: list[Any] = []
        leases = []
        for lease in granted:
            if self._ledger.groups.running(lease.group_id, lease.attempt) is None:
                continue
            prompt = self._store.prompts.get(lease.group_id)
            prefix = () if lease.progress is None else self._store.prefixes.get(lease.group_id)
            # -1: the prefix was evicted or lost after the grant, and the worker has to start again.
            num_frames = len(prefix) if prefix or lease.progress is None else -1
            leases.append(
                [lease.group_id, lease.attempt, lease.engine_version, lease.deadline, len(prompt), num_frames]
            )
            payload += [*prompt, *prefix]
        self._replies.reply(client, request_id, {"leases": leases}, payload)

    def _cancel(self, client: bytes, message: Message) -> None:
        """Cancel a request for leases. Groups that were granted meanwhile go back to the queue."""
        cancelled = integer(message.fields, "request")
        if self._pending.remove(client, cancelled) is None:
            for lease in self._granted.pop((client, cancelled), []):
                self._give_back(lease, "cancelled")
        self._replies.reply(client, message.request_id)

    def _give_back(self, lease: GrantedLease, reason: str) -> None:
        """Release a lease that its worker never received."""
        if self._ledger.groups.running(lease.group_id, lease.attempt) is not None:
            self._ledger.apply(Release(group_id=lease.group_id, attempt=lease.attempt, num_tokens=0, reason=reason))

    def _renew(self, client: bytes, message: Message) -> None:
        for group_id, attempt in zip(*_groups_and_attempts(message), strict=True):
            command = Renew(group_id=group_id, attempt=attempt)
            renewed = self._ledger.apply(command, self._clock.time(), sender=client)
            if renewed.expires_at is None:
                self._replies.push(client, REVOKED, {"group_id": group_id, "attempt": attempt})
        self._replies.reply(client, message.request_id)

    def leave(self, client: bytes, message: Message) -> None:
        """Handle ``leave``: release the leases that a leaving client does not name."""
        known = set(zip(*_groups_and_attempts(message), strict=True))
        self._pending.withdraw(client)
        for lease in self._ledger.groups.leases.of_owner(client):
            if (lease.group_id, lease.attempt) not in known:
                self._give_back(lease.granted(), "undelivered")
        if not self._ledger.groups.leases.of_owner(client):
            self.heartbeats.leave(client)
            self._paces.forget(client)
        self._replies.reply(client, message.request_id)

    def take_from(self, client: bytes) -> None:
        """Revoke the leases of a silent producer before they expire."""
        self._pending.withdraw(client)
        self._paces.forget(client)
        if taken := self._ledger.apply(TakeBack(owner=client)).group_ids:
            logger.warning("producer %s is silent; %d leases were revoked", client.hex()[:8], len(taken))

    def bury(self, client: bytes, num_generated: int) -> int:
        """Revoke the leases of a dead producer, and count its unreported tokens as lost; returns all that it generated.

        ``num_generated`` is the caller's count; the producer's last heartbeat may have reported more. Tokens that were
        only in the producer's memory count as lost. A repeated call returns the same number.
        """
        buried = self._ledger.account.buried
        if client not in buried:
            num_generated = max(num_generated, self.heartbeats.num_generated(client))
            taken = self._ledger.apply(TakeBack(owner=client, num_generated=num_generated))
            name, num_leases = client.hex()[:8], len(taken.group_ids)
            logger.warning(
                "producer %s has ended; %d leases, and %d tokens lost", name, num_leases, taken.num_lost or 0
            )
        self._pending.withdraw(client)
        self.heartbeats.leave(client)
        self._paces.forget(client)
        return buried[client]


def _groups_and_attempts(message: Message) -> tuple[list[int], list[int]]:
    group_ids, attempts = integers(message.fields, "groups"), integers(message.fields, "attempts")
    if len(group_ids) != len(attempts):
        raise WireError(f"{message.name} must name one attempt per group, got {len(attempts)} for {len(group_ids)}")
    if len(group_ids) > MAX_LEASES:
        raise WireError(f"{message.name} names at most {MAX_LEASES} leases, got {len(group_ids)}; send several")
    return group_ids, attempts


class BatchRequests:
    """The operations ``plan`` and ``fetch``; plans fail after ``max_filtered`` filtered groups in a row, if not 0.

    ``links`` connect to the store servers if these hold the payloads.
    """

    def __init__(self, shared: Collaborators, *, links: StoreLinks | None, max_filtered: int) -> None:
        self._ledger, self._store, self._replies = shared.ledger, shared.store, shared.replies
        self._links = links
        self._max_filtered = max_filtered
        self._pending = shared.pending(nothing_yet=self._answer_late)
        self._unread = FetchWindow(shared.ledger.room.max_bytes)
        self.operations = {"plan": self._plan, "fetch": self._fetch}

    def close(self) -> None:
        """Cancel every timer."""
        self._pending.close()

    def _plan(self, client: bytes, message: Message) -> None:
        version = integer(message.fields, "version")
        self._ledger.check_plan(version)
        if self._is_filtered_away():
            raise ReplayBufferError(self._filtered())
        request = PendingRequest(client=client, request_id=message.request_id, fields={"version": version})
        self._pending.add(request)

    def make(self) -> None:
        """Make and send every requested batch that can be made now."""
        for request in sorted(self._pending.all(), key=lambda request: request.fields["version"]):
            try:
                version = request.fields["version"]
                is_made = self._ledger.apply(PlanBatch(version=version)).group_ids
            except ReplayBufferError as error:
                self._pending.remove(request.client, request.request_id)
                self._replies.fail(request.client, request.request_id, error)
                continue
            if is_made:
                self._pending.remove(request.client, request.request_id)
                groups = [summary_fields(summary) for summary in self._ledger.batch(version).groups]
                self._replies.reply(request.client, request.request_id, {"groups": groups})

    def _answer_late(self, request: PendingRequest) -> None:
        """Answer a plan request that waited for ``hold_s``, so that the client sends it again.

        The request fails if no queued or running prompt can complete the batch.
        """
        ledger = self._ledger
        is_idle = not (ledger.groups.num_queued or ledger.groups.num_leased or ledger.groups.num_planned)
        if is_idle and ledger.account.groups_dropped and ledger.groups.num_stored < ledger.rule.groups_per_step:
            text = f"{self._stored()}, no prompts are queued and nothing runs; {self._dropped()}. Enqueue more prompts"
            self._replies.fail(request.client, request.request_id, ReplayBufferError(text))
            return
        is_starving = ledger.account.filtered_in_a_row >= ledger.rule.groups_per_step
        self._replies.reply(request.client, request.request_id, {"warning": self._filtered()} if is_starving else {})

    def note_filtered(self) -> None:
        """A filter dropped a group: warn if filters keep nothing for long, fail all plans at the limit."""
        if self._is_filtered_away():
            self._pending.fail_all(ReplayBufferError(self._filtered()))
            return
        num_steps, rest = divmod(self._ledger.account.filtered_in_a_row, self._ledger.rule.groups_per_step)
        if rest == 0 and num_steps >= _FIRST_WARNING_STEPS and num_steps.bit_count() == 1:
            logger.warning(self._filtered())
            for request in self._pending.all():
                self._pending.remove(request.client, request.request_id)
                self._replies.reply(request.client, request.request_id, {"warning": self._filtered()})

    def _is_filtered_away(self) -> bool:
        ledger = self._ledger
        is_short = ledger.groups.num_stored < ledger.rule.groups_per_step
        return is_short and 0 < self._max_filtered <= ledger.account.filtered_in_a_row

    def _filtered(self) -> str:
        number = self._ledger.account.filtered_in_a_row
        return (
            f"{self._stored()}, and buffer.filters dropped the last {number} that were finished; {self._dropped()}. "
            "Look at the rewards, take other prompts or filters, or raise buffer.max_filtered_steps"
        )

    def _stored(self) -> str:
        ledger = self._ledger
        stored = f"{ledger.groups.num_stored} of the {ledger.rule.groups_per_step} groups"
        return f"{stored} of batch {ledger.next_plan} are stored"

    def _dropped(self) -> str:
        dropped = self._ledger.account.groups_dropped
        return "dropped in all: " + ", ".join(f"{number} for {reason}" for reason, number in dropped.items())

    def fail(self, size: int) -> None:
        """Fail every pending plan: the stores cannot hold a batch."""
        ledger = self._ledger
        self._pending.fail_all(
            StoreFull(
                f"buffer.max_stored_bytes={ledger.room.max_bytes} cannot hold a batch: {ledger.groups.num_stored} "
                f"groups fill it, {ledger.rule.groups_per_step} are needed, the next has {size} bytes; raise it"
            )
        )

    def _fetch(self, client: bytes, message: Message) -> None:
        """Reply with the payloads, or with the stores that hold them and the attempts to fetch there."""
        group_ids = integers(message.fields, "groups")
        if len(set(group_ids)) != len(group_ids):
            raise WireError("a fetch must name each group once")
        if self._links is not None:
            groups = [self._ledger.groups.in_store(group_id) for group_id in group_ids]
            fields = {
                "stores": self._links.addresses,
                "attempts": [group.result.attempt for group in groups],
                "places": [group.store for group in groups],
                "digests": [group.digest for group in groups],
            }
            self._replies.reply(client, message.request_id, fields)
            return
        parts = [self._store.trajectories(group_id) for group_id in group_ids]
        payload: list[Any] = [frame for frames in parts for frame in frames]
        self._unread.add(client, message.request_id, size_of(payload), read=integer(message.fields, "read"))
        self._replies.reply(client, message.request_id, {"counts": [len(frames) for frames in parts]}, payload)
