"""What the buffer server does with each request: the ledger decides, the store keeps, the waiting rooms hold.

Waits: ``lease`` waits for admission, ``enqueue`` for room in the queue, ``plan`` for a batch. Every message that
changes the ledger ends in `_wake`, which answers whoever can be answered now; a timer answers "nothing yet" otherwise,
and one more timer stands at the next lease's expiry. Nothing looks at a clock in a loop.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from asyncrl.protocol.errors import AsyncRLError, ReplayBufferError, StoreFull, WireError

from . import messages
from .config import BufferConfig
from .journal import Frames, Journal
from .leases import Progress, PutResult, RunningLease
from .messages import OK, PUSH_ID, REVOKED, SPACE, Message, integer, integers, text
from .recorded import RecordedLedger
from .staleness import StalenessRule
from .store import MemoryStore, Store
from .waiting import Held, WaitingRoom

logger = logging.getLogger(__name__)

_MAX_REMEMBERED = 4096
_BEHIND_HOLD_S = 0.05
"""How long a worker is held whose engine is behind the learner; then it is asked for its engine's new version."""

Send = Callable[[bytes, Message], None]


class BufferService:
    """The buffer without its socket.

    Args:
        config: Options.
        groups_per_step: B.
        send: Sends one message to one client.
        counters: What the server counts, for `buffer.inspect`.
        store: Keeps the payloads; None keeps them in this process.
        store_addresses: Where clients find the payloads, by group id modulo their number; empty if here.
        journal: What an earlier server left, and where this one writes; None keeps nothing.
    """

    def __init__(
        self,
        config: BufferConfig,
        *,
        groups_per_step: int,
        send: Send,
        counters: Callable[[], dict[str, int]] = dict,
        store: Store | None = None,
        store_addresses: Sequence[str] = (),
        journal: Journal | None = None,
    ) -> None:
        self.ledger = RecordedLedger(
            StalenessRule(max_lag=config.max_lag, groups_per_step=groups_per_step),
            on_stale=config.on_stale,
            order=config.order,
            lease_s=config.lease_s,
            filters=config.filters,
            first_version=config.first_version,
        )
        self._config = config
        self._send = send
        self._counters = counters
        self._loop = asyncio.get_running_loop()
        self._hold_s = config.request_timeout_s / 2
        self._prompts: dict[int, Frames] = {}
        self._progress: dict[int, Frames] = {}
        self._store = MemoryStore() if store is None else store
        self._store_addresses = list(store_addresses)
        self._lease_waits = WaitingRoom()
        self._enqueue_waits = WaitingRoom()
        self._plan_waits = WaitingRoom()
        self._granted: OrderedDict[tuple[bytes, int], list[RunningLease]] = OrderedDict()
        self._refused_for_space: set[bytes] = set()
        self._largest_bytes = 0
        self._expiry: asyncio.TimerHandle | None = None
        if journal is not None:
            self._recover(journal)
        self._operations = {
            "hello": self._hello,
            "enqueue": self._enqueue,
            "lease": self._lease,
            "cancel": self._cancel,
            "renew": self._renew,
            "put": self._put,
            "release": self._release,
            "save": self._save_progress,
            "plan": self._plan,
            "fetch": self._fetch,
            "commit": self._commit,
            "stats": self._stats,
            "inspect": self._inspect,
        }

    def handle(self, client: bytes, request: Message) -> None:
        """Answer one request, now or later; an error of this system becomes the reply."""
        operation = self._operations.get(request.name)
        try:
            if operation is None:
                raise WireError(f"unknown operation {request.name!r:.40}; known are {sorted(self._operations)}")
            operation(client, request)
        except AsyncRLError as error:
            self._send(client, messages.error_reply(request.request_id, error))
        self._wake()

    def _recover(self, journal: Journal) -> None:
        """Take up the prompts, trajectories and leases of the server before this one."""
        frames = self.ledger.attach(journal, now=self._loop.time())
        for group_id, parts in frames.get("payload", {}).items():
            if self.ledger.has_stored(group_id):
                self._store.put(group_id, parts)
                self._largest_bytes = max(self._largest_bytes, self._store.measure(parts))
        for lease in self.ledger.running_leases():
            self._granted.setdefault((lease.owner, lease.request_id), []).append(lease)
        self._prompts.update(frames.get("prompt", {}))
        self._progress.update(frames.get("progress", {}))
        self._forget(self.ledger.drain_finished())
        self._set_expiry_timer()

    def _forget(self, group_ids: Iterable[int]) -> None:
        """Drop the frames of groups that are consumed or dropped."""
        for group_id in group_ids:
            self._prompts.pop(group_id, None)
            self._progress.pop(group_id, None)
            self._store.remove(group_id)

    def close(self) -> None:
        """Cancel every timer."""
        for room in (self._lease_waits, self._enqueue_waits, self._plan_waits):
            room.close()
        if self._expiry is not None:
            self._expiry.cancel()

    def _reply(self, client: bytes, request_id: int, fields: dict[str, Any] | None = None, payload: Any = ()) -> None:
        self._send(client, Message(name=OK, request_id=request_id, fields=fields or {}, payload=payload))

    def _hello(self, client: bytes, request: Message) -> None:
        rule = self.ledger.rule
        fields = {"max_lag": rule.max_lag, "groups_per_step": rule.groups_per_step, "stores": self._store_addresses}
        self._reply(client, request.request_id, fields)

    # Prompts

    def _enqueue(self, client: bytes, request: Message) -> None:
        group_ids, counts = integers(request.fields, "groups"), integers(request.fields, "counts")
        if len(group_ids) != len(counts) or sum(counts) != len(request.payload):
            raise WireError("enqueue names as many groups as it carries prompts")
        payload = iter(request.payload)
        prompts = [(group_id, [next(payload) for _ in range(n)]) for group_id, n in zip(group_ids, counts, strict=True)]
        held = Held(client=client, request_id=request.request_id, fields={"prompts": prompts, "queued": 0})
        self._enqueue_waits.hold(held, self._hold_s, self._answer_enqueue)

    def _answer_enqueue(self, held: Held) -> None:
        self._reply(held.client, held.request_id, {"queued": held.fields["queued"]})

    def _fill_queue(self) -> None:
        for held in self._enqueue_waits.all():
            prompts = held.fields["prompts"]
            while held.fields["queued"] < len(prompts) and self.ledger.num_queued < self._config.queue_size:
                group_id, frames = prompts[held.fields["queued"]]
                if self.ledger.enqueue([group_id], {group_id: frames}):
                    self._prompts[group_id] = frames
                held.fields["queued"] += 1
            if held.fields["queued"] < len(prompts):
                return
            self._enqueue_waits.leave(held.client, held.request_id)
            self._answer_enqueue(held)

    # Leases

    def _lease(self, client: bytes, request: Message) -> None:
        granted = self._granted.get((client, request.request_id))
        if granted is not None:
            self._answer_lease(client, request.request_id, granted)
            return
        version = integer(request.fields, "engine_version")
        num_wanted = integer(request.fields, "max_groups")
        self.ledger.check_engine_version(version)
        held = Held(client=client, request_id=request.request_id, fields={"version": version, "wanted": num_wanted})
        held.fields["granted"] = []
        self._hold_lease(held)

    def _hold_lease(self, held: Held) -> None:
        """Hold a request for admission: briefly if its engine is behind, whose version will soon be another."""
        behind = held.fields["version"] < self.ledger.learner_version
        hold_s = min(_BEHIND_HOLD_S, self._hold_s) if behind else self._hold_s
        self._lease_waits.hold(held, hold_s, lambda held: self._answer_lease(held.client, held.request_id, []))

    def _has_room(self) -> bool:
        """Whether one more group fits beside what is stored and what the running leases may bring."""
        reserved = (self.ledger.num_leased + 1) * self._largest_bytes
        return self._store.stored_bytes + reserved <= self._config.max_stored_bytes

    def _grant_leases(self) -> None:
        """One lease to each waiting worker in turn, until nothing more is admitted."""
        waiting = [held for held in self._lease_waits.all() if held.fields["wanted"] > 0]
        served: list[Held] = []
        while waiting and self.ledger.num_queued and self._has_room():
            still_waiting = []
            for held in waiting:
                granted = held.fields["granted"]
                if not self._has_room():
                    break
                owner, now = held.client, self._loop.time()
                new = self.ledger.lease(held.fields["version"], 1, owner=owner, request_id=held.request_id, now=now)
                granted.extend(new)
                if new and len(granted) == 1:
                    served.append(held)
                if new and len(granted) < held.fields["wanted"]:
                    still_waiting.append(held)
            waiting = still_waiting
        for held in served:
            self._lease_waits.leave(held.client, held.request_id)
            self._remember_grant(held)
            self._answer_lease(held.client, held.request_id, held.fields["granted"])

    def _remember_grant(self, held: Held) -> None:
        """Keep the answer, in case the request is sent again because the answer was lost."""
        self._granted[held.client, held.request_id] = held.fields["granted"]
        if len(self._granted) > _MAX_REMEMBERED:
            self._granted.popitem(last=False)

    def _answer_lease(self, client: bytes, request_id: int, granted: list[RunningLease]) -> None:
        held = [lease for lease in granted if self.ledger.holds(lease.group_id, lease.attempt)]
        payload: list[Any] = []
        leases = []
        for lease in held:
            frames = self._prompts[lease.group_id]
            progress = () if lease.progress is None else self._progress.get(lease.group_id, ())
            numbers = [lease.group_id, lease.attempt, lease.engine_version, lease.deadline, len(frames), len(progress)]
            leases.append(numbers)
            payload += [*frames, *progress]
        self._reply(client, request_id, {"leases": leases}, payload)

    def _cancel(self, client: bytes, request: Message) -> None:
        """A lease that is no longer wanted; if it was granted meanwhile, its groups go back to the queue."""
        cancelled = integer(request.fields, "request")
        if self._lease_waits.leave(client, cancelled) is None:
            for lease in self._granted.pop((client, cancelled), []):
                self.ledger.release(lease.group_id, lease.attempt, num_tokens=0, reason="cancelled")
        self._reply(client, request.request_id)

    def _renew(self, client: bytes, request: Message) -> None:
        group_ids, attempts = integers(request.fields, "groups"), integers(request.fields, "attempts")
        if len(group_ids) != len(attempts):
            raise WireError("renew names one attempt for each group")
        for group_id, attempt in zip(group_ids, attempts, strict=True):
            if not self.ledger.renew(group_id, attempt, now=self._loop.time()):
                self._push_revoked(client, group_id, attempt)
        self._reply(client, request.request_id)

    def _push_revoked(self, client: bytes, group_id: int, attempt: int) -> None:
        self._send(client, Message(name=REVOKED, request_id=PUSH_ID, fields={"group_id": group_id, "attempt": attempt}))

    # Results

    def _put(self, client: bytes, request: Message) -> None:
        summary = messages.summary_of(request.fields)
        size = self._store.measure(request.payload)
        if self.ledger.holds(summary.group_id, summary.attempt):
            self._check_space(client, size)
        if self.ledger.put(summary, request.payload) is PutResult.stored:
            self._store.put(summary.group_id, request.payload)
            self._largest_bytes = max(self._largest_bytes, size)
        self._reply(client, request.request_id)

    def _check_space(self, client: bytes, size: int) -> None:
        limit = self._config.max_stored_bytes
        if self._store.stored_bytes + size <= limit:
            return
        if self.ledger.num_planned == 0 and len(self._plan_waits):
            self._fail_plans(size)
        self._refused_for_space.add(client)
        raise StoreFull(
            f"{size} bytes do not fit beside the {self._store.stored_bytes} stored, buffer.max_stored_bytes is "
            f"{limit}; the group is sent again when a batch has left"
        )

    def _fail_plans_without_room(self) -> None:
        """Nothing runs, nothing is under way, no lease fits, and a batch is not complete: nobody would ever wake it."""
        ledger = self.ledger
        idle = ledger.num_leased == 0 and ledger.num_planned == 0
        if idle and len(self._plan_waits) and ledger.num_stored < ledger.rule.groups_per_step and not self._has_room():
            self._fail_plans(self._largest_bytes)

    def _fail_plans(self, size: int) -> None:
        """The store is full and no batch is under way that could leave: say so instead of waiting for ever."""
        error = StoreFull(
            f"buffer.max_stored_bytes={self._config.max_stored_bytes} cannot hold a batch: {self.ledger.num_stored} "
            f"groups fill it, {self.ledger.rule.groups_per_step} are needed, the next has {size} bytes; raise it"
        )
        for held in self._plan_waits.all():
            self._plan_waits.leave(held.client, held.request_id)
            self._send(held.client, messages.error_reply(held.request_id, error))

    def _release(self, client: bytes, request: Message) -> None:
        fields = request.fields
        self.ledger.release(
            integer(fields, "group_id"),
            integer(fields, "attempt"),
            num_tokens=integer(fields, "num_tokens"),
            reason=text(fields, "reason"),
        )
        self._reply(client, request.request_id)

    def _save_progress(self, client: bytes, request: Message) -> None:
        fields = request.fields
        group_id = integer(fields, "group_id")
        progress = Progress(num_tokens=integer(fields, "num_tokens"), oldest_version=integer(fields, "oldest_version"))
        self.ledger.save_progress(group_id, integer(fields, "attempt"), progress, request.payload)
        self._progress[group_id] = request.payload
        self._reply(client, request.request_id)

    # Batches

    def _plan(self, client: bytes, request: Message) -> None:
        version = integer(request.fields, "version")
        self.ledger.check_plan(version)
        held = Held(client=client, request_id=request.request_id, fields={"version": version})
        self._plan_waits.hold(held, self._hold_s, lambda held: self._reply(held.client, held.request_id))

    def _make_plans(self) -> None:
        for held in sorted(self._plan_waits.all(), key=lambda held: held.fields["version"]):
            try:
                plan = self.ledger.plan(held.fields["version"])
            except ReplayBufferError as error:
                self._plan_waits.leave(held.client, held.request_id)
                self._send(held.client, messages.error_reply(held.request_id, error))
                continue
            if plan is not None:
                self._plan_waits.leave(held.client, held.request_id)
                groups = [messages.summary_fields(summary) for summary in plan.groups]
                self._reply(held.client, held.request_id, {"groups": groups})

    def _fetch(self, client: bytes, request: Message) -> None:
        """Payloads, or where they are: the store servers, and the attempts to ask them for."""
        if self._store_addresses:
            attempts = [self.ledger.stored_attempt(group_id) for group_id in integers(request.fields, "groups")]
            self._reply(client, request.request_id, {"stores": self._store_addresses, "attempts": attempts})
            return
        payload: list[Any] = []
        counts = []
        for group_id in integers(request.fields, "groups"):
            frames = self._store.get(group_id)
            counts.append(len(frames))
            payload.extend(frames)
        self._reply(client, request.request_id, {"counts": counts}, payload)

    def _commit(self, client: bytes, request: Message) -> None:
        self.ledger.commit(integer(request.fields, "version"))
        self._forget(self.ledger.drain_finished())
        for held in self._lease_waits.all():
            self._hold_lease(held)
        for waiting in self._refused_for_space:
            self._send(waiting, Message(name=SPACE, request_id=PUSH_ID))
        self._refused_for_space.clear()
        self._stats(client, request)

    def _stats(self, client: bytes, request: Message) -> None:
        stats = self.ledger.stats(stored_bytes=self._store.stored_bytes, leases_waiting=len(self._lease_waits))
        self._reply(client, request.request_id, messages.stats_fields(stats))

    def _inspect(self, client: bytes, request: Message) -> None:
        stats = self.ledger.stats(stored_bytes=self._store.stored_bytes, leases_waiting=len(self._lease_waits))
        rule = self.ledger.rule
        bounds = {"max_lag": rule.max_lag, "groups_per_step": rule.groups_per_step}
        fields = {**bounds, **self._counters(), "finished": self.ledger.finished()}
        groups = self.ledger.unfinished(now=self._loop.time())
        self._reply(client, request.request_id, {**fields, "stats": messages.stats_fields(stats), "groups": groups})

    # Events

    def _wake(self) -> None:
        """Answer every held request that can be answered, until none can."""
        before = None
        try:
            while before != (before := (self.ledger.num_queued, self.ledger.outstanding, len(self._enqueue_waits))):
                self._make_plans()
                self._fill_queue()
                self._grant_leases()
                self._fail_plans_without_room()
        except ReplayBufferError as error:
            logger.error("nothing is granted while the journal cannot be written: %s", error)
        self._forget(self.ledger.drain_finished())
        for revocation in self.ledger.drain_revocations():
            self._push_revoked(revocation.owner, revocation.group_id, revocation.attempt)
        self._set_expiry_timer()

    def _set_expiry_timer(self) -> None:
        due = self.ledger.next_expiry()
        if self._expiry is not None:
            if self._expiry.when() == due:
                return
            self._expiry.cancel()
        self._expiry = None if due is None else self._loop.call_at(due, self._expire)

    def _expire(self) -> None:
        self._expiry = None
        lease_s = self._config.lease_s
        try:
            num_expired = self.ledger.expire(self._loop.time())
        except ReplayBufferError as error:
            logger.error("expired leases stay until the journal can be written: %s", error)
            self._expiry = self._loop.call_later(lease_s, self._expire)
            return
        logger.warning("%d leases were not renewed within %.1f s and were taken back", num_expired, lease_s)
        self._wake()
