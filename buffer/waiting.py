"""Lets requests wait until the buffer can answer them: requests for leases, batches, checkpoints, room in the queue.

A lease is a worker's right to generate a group. `buffer.service` handles the operations. It checks all waiting
requests after each burst of messages. A timer ends each wait with `NothingYet`. After a commit, workers whose weights
are now too old for any group get `NothingYet` immediately.
"""

import asyncio
import logging
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Any

from asyncrl.core.errors import AsyncRLError, ReplayBufferError, StoreFull
from asyncrl.core.types import GroupSummary

from . import commands, operations
from .config import BufferConfig
from .encoding import PUSH_ID, Message, Send, failure_of
from .frames import Frames, size_of
from .groups import Group
from .ledger import Ledger
from .operations import Checkpointed, NothingYet
from .pace import Heartbeats, RunningGroup, WorkerPaces
from .records import Answer, Key, Push
from .sockets import Deadline, LoopClock
from .stores import PayloadStore

logger = logging.getLogger(__name__)

_MAX_PER_CLIENT = 256
_MAX_IN_ALL = 16_384
_MAX_REMEMBERED = 4096
_MAX_WRITES = 4
_FIRST_WARNING_STEPS = 4
_BEATS_TO_SILENCE = 4
_SEARCH_S = 5e-5
"""If a search finds no worker that can take over a group, the next search waits this many seconds per waiting request.
A search takes a fiftieth of this time."""


class Replies:
    """Sends answers and pushes. ``send`` is called with a client id and a message."""

    def __init__(self, send: Send) -> None:
        self._send = send

    def answer(self, request: Message, answer: Answer, payload: Sequence[Any] = ()) -> None:
        """Answer a request."""
        self._send(request.client, Message(request_id=request.request_id, body=answer, payload=payload))

    def fail(self, request: Message, error: AsyncRLError) -> None:
        """Answer a request with an error."""
        self.answer(request, failure_of(error))

    def push(self, client: bytes, push: Push) -> None:
        """Send a client a message that answers no request."""
        self._send(client, Message(request_id=PUSH_ID, body=push))


Handler = Callable[[Message, Any], Answer | None]


def handlers_of(parts: Sequence[object]) -> dict[type, Handler]:
    """Return a map from each operation to its handler: the method ``on_<name>`` of one of the objects in ``parts``.

    The handler returns the answer, or None to answer later.
    """
    methods = {kind: f"on_{kind.__struct_config__.tag}" for kind in commands.OPERATIONS}
    return {kind: getattr(part, name) for kind, name in methods.items() for part in parts if hasattr(part, name)}


def nothing_yet(request: Message) -> Answer:
    """Return `NothingYet`. The client then repeats its request."""
    return NothingYet()


class HeldRequests:
    """The unanswered requests of one operation, in order of arrival.

    Args:
        replies: Sends the answers.
        hold_s: Longest time in seconds that a request waits.
        late: Function that returns the answer to a request that has waited ``hold_s`` seconds, or raises an error.
    """

    def __init__(self, replies: Replies, hold_s: float, late: Callable[[Message], Answer] = nothing_yet) -> None:
        self._replies, self._hold_s, self._late = replies, hold_s, late
        self._requests: dict[tuple[bytes, int], Message] = {}
        self._timers: dict[tuple[bytes, int], asyncio.TimerHandle] = {}
        self._by_client: dict[bytes, dict[int, Message]] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: Message) -> bool:
        return self._requests.get((request.client, request.request_id)) is request

    def all(self) -> list[Any]:
        """Return all waiting requests, in order of arrival."""
        return list(self._requests.values())

    @property
    def clients(self) -> Container[bytes]:
        """Ids of the clients with a waiting request."""
        return self._by_client.keys()

    def of_client(self, client: bytes) -> list[Any]:
        """Return the waiting requests of a client, in order of arrival."""
        return list(self._by_client.get(client, {}).values())

    def hold(self, request: Message) -> None:
        """Let a request wait until it is answered, but at most ``hold_s`` seconds.

        A repeated request with the same id replaces the waiting request. Raises `ReplayBufferError` if too many
        requests wait.
        """
        key = request.client, request.request_id
        self.remove(*key)
        num_of_client = len(self._by_client.get(request.client, ()))
        if num_of_client >= _MAX_PER_CLIENT or len(self) >= _MAX_IN_ALL:
            raise ReplayBufferError(
                f"too many requests of this operation wait: {num_of_client} of this client (at most "
                f"{_MAX_PER_CLIENT}), {len(self)} of all clients (at most {_MAX_IN_ALL}); wait for answers before you "
                "send more requests"
            )
        self._timers[key] = asyncio.get_running_loop().call_later(self._hold_s, self.answer, self._late, [request])
        self._requests[key] = self._by_client.setdefault(request.client, {})[request.request_id] = request
        self.num_bytes += size_of(request.payload)

    def remove(self, client: bytes, request_id: int) -> Message | None:
        """Remove a waiting request. Return the request, or None if no such request waits."""
        request = self._requests.pop((client, request_id), None)
        if request is None:
            return None
        self._timers.pop((client, request_id)).cancel()
        of_client = self._by_client[client]
        del of_client[request_id]
        if not of_client:
            del self._by_client[client]
        self.num_bytes -= size_of(request.payload)
        return request

    def answer(self, answer_to: Callable[[Any], Answer | None], requests: Iterable[Message] | None = None) -> None:
        """Call ``answer_to`` with each of the ``requests``, by default with all waiting requests. Send the answers.

        If ``answer_to`` returns None, the request continues to wait. If ``answer_to`` raises an error, the error is the
        answer.
        """
        for request in self.all() if requests is None else requests:
            try:
                answer = answer_to(request)
            except AsyncRLError as error:
                answer = failure_of(error)
            if answer is not None:
                self.remove(request.client, request.request_id)
                self._replies.answer(request, answer)

    def fail_all(self, error: AsyncRLError) -> None:
        """Answer every request with an error."""
        self.answer(lambda request: failure_of(error))

    def withdraw(self, client: bytes) -> None:
        """Remove all requests of a lost client."""
        for request in self.of_client(client):
            self.remove(client, request.request_id)

    def close(self) -> None:
        """Cancel every timer."""
        for client, request_id in list(self._requests):
            self.remove(client, request_id)


class PendingWrites:
    """Requests that wait until files are written. A repeated request with the same ``key`` waits for the same files."""

    def __init__(self, held: HeldRequests) -> None:
        self._held = held
        self._writes: dict[str, asyncio.Future[Checkpointed]] = {}

    def wait(self, request: Message, begin: Callable[[], Awaitable[Checkpointed]]) -> None:
        """Answer a request when its write is complete.

        ``begin`` is a function that returns the coroutine of the write. It is called only if no earlier request with
        the same ``key`` has begun the write.
        """
        key = request.body.key
        if key not in self._writes:
            self._writes[key] = write = asyncio.ensure_future(begin())
            write.add_done_callback(lambda _: self._settle())
            for old in [key for key, known in self._writes.items() if known.done()][:-_MAX_WRITES]:
                del self._writes[old]
        self._held.hold(request)
        if self._writes[key].done():
            self._settle()

    def _settle(self) -> None:
        def answer_to(request: Message) -> Answer | None:
            write = self._writes[request.body.key]
            return write.result() if write.done() and not write.cancelled() else None

        self._held.answer(answer_to)

    def close(self) -> None:
        """Cancel the writes."""
        for write in self._writes.values():
            write.cancel()
        self._held.close()


@dataclass(kw_only=True, slots=True, eq=False)
class WaitingWorker(Message):
    """A waiting request for leases, with the leases granted so far.

    ``incarnation`` is how often the learner had gone back to a checkpoint when it made the engine's weights.
    """

    body: commands.LeaseGroups
    incarnation: int
    granted: list[commands.GrantedLease] = field(default_factory=list)

    @property
    def version(self) -> int:
        """The version that the worker's engine serves."""
        return self.body.engine_version


class WaitingWorkers(HeldRequests):
    """Waiting requests for leases, indexed by the policy version that the sender's engine serves."""

    def __init__(self, replies: Replies, hold_s: float) -> None:
        super().__init__(replies, hold_s)
        self._by_version: dict[int, dict[tuple[bytes, int], int]] = {}
        self._next_place = 0

    @property
    def versions(self) -> list[int]:
        """The policy versions that the engines of the waiting workers serve."""
        return list(self._by_version)

    def at_version(self, version: int) -> list[tuple[int, Any]]:
        """Return the requests for leases at a policy version, as (position in the order of arrival, request) pairs."""
        return [(place, self._requests[key]) for key, place in self._by_version.get(version, {}).items()]

    def hold(self, request: Any) -> None:
        """Let a request wait, and index the request by the policy version that the sender's engine serves."""
        super().hold(request)
        self._next_place += 1
        self._by_version.setdefault(request.version, {})[request.client, request.request_id] = self._next_place

    def remove(self, client: bytes, request_id: int) -> Any:
        """Remove a waiting request from the list and the index. Return the request, or None if it does not wait."""
        request: Any = super().remove(client, request_id)
        if request is not None:
            del self._by_version[request.version][client, request_id]
            if not self._by_version[request.version]:
                del self._by_version[request.version]
        return request


class FairQueue:
    """The order in which waiting workers get leases.

    This is start-time fair queueing (Goyal et al., SIGCOMM 1996). Each worker has a number. The worker with the lowest
    number comes first, and each lease adds 1 to its worker's number. After a pause, a worker's number is at least the
    number of the worker that got the latest lease.
    """

    def __init__(self) -> None:
        self._next: dict[bytes, int] = {}
        self._serving = 0

    def turn_of(self, client: bytes) -> int:
        """Return the number that decides when a worker gets its next lease. The lowest number comes first."""
        return max(self._next.get(client, 0), self._serving)

    def take(self, client: bytes) -> None:
        """Record that a worker got a lease. The worker's number `turn_of` grows by 1."""
        turn = self.turn_of(client)
        self._serving = turn
        self._next[client] = turn + 1
        if len(self._next) > _MAX_REMEMBERED:
            self._next = {known: turn for known, turn in self._next.items() if turn > self._serving + 1}


@dataclass(frozen=True, kw_only=True, slots=True)
class Collaborators:
    """The objects that all request handlers of the buffer's service share."""

    config: BufferConfig
    ledger: Ledger
    store: PayloadStore
    replies: Replies

    def held(self, late: Callable[[Message], Answer] = nothing_yet) -> HeldRequests:
        """Return an empty collection for the waiting requests of one operation.

        ``late`` is a function that returns the answer to a request that has waited too long.
        """
        return HeldRequests(self.replies, self.config.request_timeout_s / 2, late)


class PromptIntake:
    """Prompts that wait for room in the queue. At most ``queue_size`` prompts are in the queue."""

    def __init__(self, shared: Collaborators) -> None:
        self._ledger, self._store = shared.ledger, shared.store
        self._queue_size = shared.config.queue_size
        self._held = shared.held()
        self._outcomes: deque[GroupSummary] | None = None  # None means that no request has set ``wants_outcomes``
        self.close = self._held.close

    def keep_finished(self) -> None:
        """Retain the metadata of groups that finish from now on, for the answers to `Enqueue`."""
        if self._outcomes is None:
            self._outcomes = deque(maxlen=_MAX_REMEMBERED)

    def note_finished(self, group: GroupSummary) -> None:
        """Retain a finished group's metadata for the next answer to `Enqueue`, if a request set ``wants_outcomes``."""
        if self._outcomes is not None:
            self._outcomes.append(group)

    def answer(self) -> Answer:
        """Return the answer to `Enqueue`, with the metadata of the groups finished since the previous answer."""
        outcomes = tuple(self._outcomes or ())
        if self._outcomes:
            self._outcomes.clear()
        return commands.Enqueued(outcomes)

    @property
    def num_waiting(self) -> int:
        """Number of requests whose prompts wait for room in the queue."""
        return len(self._held)

    @property
    def num_waiting_bytes(self) -> int:
        """Size of the prompts in waiting requests, in bytes."""
        return self._held.num_bytes

    def hold(self, request: Message, prompts: Mapping[int, Frames]) -> None:
        """Let a request wait until the queue has room for its ``prompts``, a map from group ids to frames.

        Known prompts are ignored. Raises the errors of `PayloadStore.check_prompts`.
        """
        self._held.remove(request.client, request.request_id)
        new = deque(item for item in prompts.items() if not self._ledger.knows(item[0]))
        payload = [frame for _, parts in new for frame in parts]
        self._store.check_prompts(size_of(payload), num_waiting_bytes=self._held.num_bytes)
        key = {"client": request.client, "request_id": request.request_id}
        self._held.hold(Message(**key, body=new, payload=payload))

    def fill(self) -> None:
        """Queue waiting prompts in order of arrival while the queue has room."""
        for request in self._held.all():
            num_free = max(0, self._queue_size - self._ledger.groups.num_queued)
            chosen = list(islice(request.body, num_free))
            self._queue(chosen)
            for _ in chosen:  # remove prompts only after they are queued, because the write to the journal may fail
                request.body.popleft()
            if request.body:
                return
            self._held.answer(lambda request: self.answer(), [request])

    def _queue(self, prompts: Sequence[tuple[int, Frames]]) -> None:
        new = {group_id: frames for group_id, frames in prompts if not self._ledger.knows(group_id)}
        if not new:
            return
        frames = {("prompt", group_id): parts for group_id, parts in new.items()}
        self._ledger.apply(commands.Enqueue(group_ids=tuple(new)), frames=frames)
        for group_id, parts in new.items():
            self._store.prompts.put(group_id, parts)


class Admission:
    """The workers' requests for leases. Decides which worker gets the next lease.

    Args:
        clock: Measures the workers' paces and the time since their last messages.
        settle: Function that a timer calls when `grant` may be able to grant leases although no message arrived.

    Attributes:
        clock: The argument ``clock``.
        paces: The workers' paces, and the groups that faster workers may take over.
        heartbeats: The workers that send heartbeats.
    """

    def __init__(self, shared: Collaborators, *, clock: LoopClock, settle: Callable[[], None]) -> None:
        self._ledger, self._store, self._replies = shared.ledger, shared.store, shared.replies
        self.clock = clock
        self._held = WaitingWorkers(shared.replies, shared.config.request_timeout_s / 2)
        self._granted: OrderedDict[tuple[bytes, int], list[commands.GrantedLease]] = OrderedDict()
        self._turns = FairQueue()
        self._hands_over = shared.config.hand_over
        self.paces = WorkerPaces()
        self._look = Deadline(settle, clock)
        self._search_from = -math.inf
        self.heartbeats = Heartbeats(_BEATS_TO_SILENCE * shared.config.heartbeat_s)

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for leases."""
        return len(self._held)

    def close(self) -> None:
        """Cancel every timer."""
        self._held.close()
        self._look.close()

    def recover(self, leases: Iterable[Group]) -> None:
        """Load the records of the groups that workers had leased from an earlier server."""
        for lease in leases:
            self._granted.setdefault((lease.owner, lease.request_id), []).append(lease.granted())
            self.paces.recover(lease, self.clock.time())
            self.heartbeats.enter(lease.owner, self.clock.time())

    def describe(self) -> list[dict[str, Any]]:
        """Return one JSON object per worker that sends heartbeats, for `asyncrl inspect`."""
        num_leases = Counter(lease.owner for lease in self._ledger.groups.leases.all())
        return self.heartbeats.describe(self.clock.time(), num_leases)

    def answer_again(self, request: Message) -> bool:
        """Answer a repeated request with the leases that it got before. Return False if the request is not repeated."""
        granted = self._granted.get((request.client, request.request_id))
        if granted is not None:
            self._answer(request, granted)
        return granted is not None

    def hold(self, request: Message) -> None:
        """Let a request for leases wait."""
        key = {"client": request.client, "request_id": request.request_id}
        self._held.hold(WaitingWorker(**key, body=request.body, incarnation=request.body.incarnation))

    def adopt(self, client: bytes, version: int) -> None:
        """Record that a client's engine loaded ``version`` from the current learner.

        The client's waiting requests for leases at this version may then get leases.
        """
        for request in self._held.of_client(client):
            if request.version == version:
                request.incarnation = self._ledger.incarnation

    def answer_outdated(self, *, except_for: Container[bytes]) -> None:
        """After a commit, answer `NothingYet` to the workers whose weights are too old for any group.

        Clients in ``except_for`` (client ids) get no answer now, because these clients will get newer weights.
        """
        rule, learner_version = self._ledger.rule, self._ledger.learner_version
        outdated = [request for request in self._held.all() if rule.deadline(request.version) < learner_version]
        self._held.answer(nothing_yet, [request for request in outdated if request.client not in except_for])

    def _admitted(self, versions: Iterable[int]) -> set[int]:
        if not self._ledger.groups.num_queued or not self._ledger.room.has_room():
            return set()
        return {version for version in versions if self._ledger.admits(version)}

    def grant(self) -> None:
        """Let faster workers take over running groups of slow workers. Then grant leases until no group may begin.

        Slow workers come last. Among the other workers, the worker with the fewest groups comes first. If workers have
        equally many groups, `FairQueue` decides.
        """
        now = self.clock.time()
        self.paces.look(now)
        if self._held:
            versions = self._admitted(self._held.versions)
            if self._hands_over:
                self._take_over(versions, now)
            if versions:
                self._grant_to_waiting(versions, now)
        self._look.at(self.paces.next_look(now))

    def grant_saved(self) -> None:
        """Grant leases while the group at the head of the queue has a saved prefix (tokens of an earlier attempt)."""
        if self._held and self._is_saved_first() and (versions := self._admitted(self._held.versions)):
            self._grant_to_waiting(versions, self.clock.time(), only_saved=True)

    def _is_saved_first(self) -> bool:
        return any(group.progress is not None for group in self._ledger.groups.head(1, owner=b""))

    def _grant_to_waiting(self, versions: set[int], now: float, *, only_saved: bool = False) -> None:
        waiting = [entry for version in versions for entry in self._held.at_version(version)]
        of_takers = self.paces.pace_of_takers(now)
        waiting = [
            (place, request)
            for place, request in waiting
            if self._num_free(request, now) > 0 and not self.paces.is_slow(request.client, of_takers)
        ]
        usual = min((self.paces.usual_pace(request.client, now) for _, request in waiting), default=0.0)
        line = [
            (
                self._hands_over and self.paces.is_slow(request.client, usual),
                self._ledger.groups.leases.num_of_owner(request.client),
                self._turns.turn_of(request.client),
                place,
                request,
            )
            for place, request in waiting
        ]
        heapify(line)
        served: list[WaitingWorker] = []
        try:
            while line and versions and (self._is_saved_first() or not only_saved):
                is_slow, num_held, turn, place, request = heappop(line)
                if request.version in versions and self._grant_one(request, served, now):
                    heappush(line, (is_slow, num_held + 1, turn + 1, place, request))
                versions = self._admitted(versions)
        finally:  # if the write of a lease to the journal fails, answer with the leases granted before the failure
            for request in served:
                self._held.remove(request.client, request.request_id)
                # Remember the leases, because the answer may be lost. The worker then repeats the request.
                self._granted[request.client, request.request_id] = request.granted
                if len(self._granted) > _MAX_REMEMBERED:
                    self._granted.popitem(last=False)
                self._answer(request, request.granted)

    def _num_free(self, request: WaitingWorker, now: float) -> int:
        """Return how many further leases a worker's request may get.

        Returns 0 if the learner has gone back to a checkpoint since it made the engine's weights.
        """
        if request.incarnation != self._ledger.incarnation:
            return 0
        return request.body.max_groups - len(request.granted) - self.paces.num_kept(request.client, now)

    def _take_over(self, admitted: set[int], now: float) -> None:
        while (group := self.paces.first_on_offer()) is not None and self._ledger.room.has_room():
            is_due = group.deadline <= self._ledger.next_plan
            takers = [
                version
                for version in self._held.versions
                if version not in admitted or (is_due and group.deadline < self._ledger.rule.deadline(version))
            ]
            if not takers:
                return
            if now < self._search_from:
                self._look.at(self._search_from)
                return
            if (taker := self._fastest_taker(group, takers, now)) is None:
                self._search_from = now + _SEARCH_S * len(self._held)
                return
            self.paces.take_over(group, taker, now)
            self._replies.push(group.worker, operations.HandOn(((group.group_id, group.attempt),)))

    def _fastest_taker(self, group: RunningGroup, versions: Iterable[int], now: float) -> bytes | None:
        """Return the fastest worker that may take over ``group``, or None.

        Only workers whose engine serves one of ``versions`` may take over the group.
        """
        paces = [
            (self.paces.usual_pace(request.client, now), request.client)
            for version in versions
            if version >= group.engine_version
            for _, request in self._held.at_version(version)
            if request.client != group.worker and self._num_free(request, now) > 0
        ]
        usual, taker = min(paces, default=(math.inf, b""))
        return taker if self.paces.is_slow(group.worker, usual) else None

    def ended(self, command: commands.Put | commands.Release) -> None:
        """Record that a worker stored or released a group, or that a filter dropped the group."""
        if isinstance(command, commands.Put):
            ended, num_tokens = command.summary, max(command.summary.response_lengths, default=0)
        else:
            ended, num_tokens = command, None
        self.paces.ended(ended.group_id, ended.attempt, self.clock.time(), num_tokens=num_tokens)

    def _grant_one(self, request: WaitingWorker, served: list[WaitingWorker], now: float) -> bool:
        granted = request.granted
        command = commands.LeaseGroups(engine_version=request.version, max_groups=1, request_id=request.request_id)
        new = self._ledger.apply(command, now, sender=request.client).leases
        for lease in new:
            if lease.progress is None:
                self._store.prefixes.remove(lease.group_id)
            self.paces.granted(lease, now)
        if new:
            self._turns.take(request.client)
        granted.extend(new)
        if new and len(granted) == 1:
            served.append(request)
        return bool(new) and self._num_free(request, now) > 0

    def _answer(self, request: Message, granted: Sequence[commands.GrantedLease]) -> None:
        payload: list[Any] = []
        leases: list[commands.LeasedGroup] = []
        for lease in granted:
            if self._ledger.groups.running(lease.group_id, lease.attempt) is None:
                continue
            prompt = self._store.prompts.get(lease.group_id)
            prefix = () if lease.progress is None else self._store.prefixes.get(lease.group_id)
            num_frames = len(prefix) if prefix or lease.progress is None else -1
            numbers = lease.engine_version, lease.deadline, len(prompt), num_frames
            leases.append(commands.LeasedGroup(lease.group_id, lease.attempt, *numbers))
            payload += [*prompt, *prefix]
        self._replies.answer(request, commands.Leased(tuple(leases)), payload)

    def cancel(self, client: bytes, request_id: int) -> None:
        """Cancel a request for leases. Groups granted to this request go back to the queue."""
        if self._held.remove(client, request_id) is None:
            for lease in self._granted.pop((client, request_id), []):
                self._give_back(lease, "cancelled")

    def _give_back(self, lease: commands.GrantedLease, reason: str) -> None:
        if self._ledger.groups.running(lease.group_id, lease.attempt) is not None:
            self._ledger.apply(
                commands.Release(group_id=lease.group_id, attempt=lease.attempt, num_tokens=0, reason=reason)
            )

    def leave(self, client: bytes, kept: Container[Key]) -> None:
        """Release the leases of a worker that disconnects, except ``kept``: (group id, attempt number) pairs."""
        self._held.withdraw(client)
        for lease in self._ledger.groups.leases.of_owner(client):
            if (lease.group_id, lease.attempt) not in kept:
                self._give_back(lease.granted(), "undelivered")
        if not self._ledger.groups.leases.of_owner(client):
            self.heartbeats.leave(client)
            self.paces.forget(client)

    def take_from(self, client: bytes) -> None:
        """Revoke the leases of a worker whose heartbeats have stopped, before the leases expire."""
        self._held.withdraw(client)
        self.paces.forget(client)
        if taken := self._ledger.apply(commands.TakeBack(owner=client)).group_ids:
            logger.warning("worker %s is silent; %d leases were revoked", client.hex()[:8], len(taken))

    def bury(self, client: bytes, num_generated: int) -> int:
        """Revoke the leases of a dead worker, and count its unreported tokens as lost.

        Returns the number of generated tokens: the larger of ``num_generated`` and the number in the worker's last
        heartbeat. A repeated call returns the same number.
        """
        buried = self._ledger.account.buried
        if client not in buried:
            num_generated = max(num_generated, self.heartbeats.num_generated(client))
            taken = self._ledger.apply(commands.TakeBack(owner=client, num_generated=num_generated))
            name, num_leases = client.hex()[:8], len(taken.group_ids)
            logger.warning("worker %s has ended; %d leases, and %d tokens lost", name, num_leases, taken.num_lost or 0)
        self._held.withdraw(client)
        self.heartbeats.leave(client)
        self.paces.forget(client)
        return buried[client]


class BatchRequests:
    """The controller's requests for batches.

    The requests fail when filters have dropped ``max_filtered_steps`` times B groups in a row, and no batch can be
    filled. B is the number of groups per learner step.
    """

    def __init__(self, shared: Collaborators) -> None:
        self._ledger = shared.ledger
        self._max_filtered = shared.config.max_filtered_steps * shared.ledger.rule.groups_per_step
        self._held = shared.held(self._late)
        self.close = self._held.close

    def hold(self, request: Message) -> None:
        """Let a request for a batch wait until the batch can be made.

        Raises `ReplayBufferError` if filters have dropped too many groups in a row.
        """
        if self._is_filtered_away():
            raise ReplayBufferError(self._filtered())
        self._held.hold(request)

    def make(self) -> None:
        """Make every requested batch that can be made, and answer the requests for these batches."""

        def answer_to(request: Message) -> Answer | None:
            is_made = self._ledger.apply(request.body).group_ids
            return commands.Batch(tuple(self._ledger.batch(request.body.version).groups)) if is_made else None

        self._held.answer(answer_to, sorted(self._held.all(), key=lambda request: request.body.version))

    def _late(self, request: Message) -> Answer:
        """Answer `NothingYet`, with a warning if filters drop many groups in a row.

        Raises `ReplayBufferError` if groups were dropped and no prompt is left to complete the batch.
        """
        groups, num_wanted = self._ledger.groups, self._ledger.rule.groups_per_step
        is_idle = not (groups.num_queued or groups.num_leased or groups.num_planned)
        if is_idle and self._ledger.account.groups_dropped and groups.num_stored < num_wanted:
            raise ReplayBufferError(
                f"{self._stored()}, no prompts are queued and no groups run; {self._dropped()}; enqueue more prompts"
            )
        return NothingYet(self._filtered() if self._ledger.account.filtered_in_a_row >= num_wanted else "")

    def note_filtered(self) -> None:
        """Handle a group that a filter has dropped.

        After many such groups in a row, log a warning. At the limit, fail all requests for batches.
        """
        if self._is_filtered_away():
            self._held.fail_all(ReplayBufferError(self._filtered()))
            return
        num_steps, rest = divmod(self._ledger.account.filtered_in_a_row, self._ledger.rule.groups_per_step)
        if rest == 0 and num_steps >= _FIRST_WARNING_STEPS and num_steps.bit_count() == 1:
            logger.warning(self._filtered())
            self._held.answer(lambda request: NothingYet(self._filtered()))

    def _is_filtered_away(self) -> bool:
        ledger = self._ledger
        is_short = ledger.groups.num_stored < ledger.rule.groups_per_step
        return is_short and 0 < self._max_filtered <= ledger.account.filtered_in_a_row

    def _filtered(self) -> str:
        number = self._ledger.account.filtered_in_a_row
        return (
            f"{self._stored()}, and buffer.filters dropped the last {number} finished groups; {self._dropped()}. "
            "Check the rewards, use other prompts or filters, or raise buffer.max_filtered_steps"
        )

    def _stored(self) -> str:
        ledger = self._ledger
        stored = f"{ledger.groups.num_stored} of the {ledger.rule.groups_per_step} groups"
        return f"{stored} of batch {ledger.next_plan} are stored"

    def _dropped(self) -> str:
        dropped = self._ledger.account.groups_dropped
        return "dropped in total: " + ", ".join(f"{number} for {reason}" for reason, number in dropped.items())

    def fail(self, size: int) -> None:
        """Fail every pending request for a batch, because the stores cannot hold a batch.

        ``size`` is the size in bytes of the group that does not fit.
        """
        ledger = self._ledger
        self._held.fail_all(
            StoreFull(
                f"buffer.max_stored_bytes={ledger.room.max_bytes} cannot hold a batch: {ledger.groups.num_stored} of "
                f"{ledger.rule.groups_per_step} groups are stored, and the next group of {size} bytes does not fit; "
                "raise this limit"
            )
        )
