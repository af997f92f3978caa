"""Handles each request to the buffer: the ledger decides, the store keeps frames, and some requests have to wait.

After each burst of messages `settle` answers the waiting requests that can be answered now. A timer answers the others
with "nothing yet". Two more timers fire at the next expiry of a lease and when the next producer counts as silent.
Nothing polls.
"""

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from asyncrl.core import record
from asyncrl.core.errors import AsyncRLError, DeclaredDead, ReplayBufferError, StoreFull, StoreLost, WireError
from asyncrl.core.types import BufferStats

from .commands import (
    Commit,
    Expire,
    Frames,
    LoseGroups,
    Progress,
    Put,
    PutResult,
    Release,
    Reserve,
    Rewind,
    SavePrefix,
)
from .config import BufferConfig
from .encoding import JOIN_BELOW_BYTES
from .heartbeats import Deadline, LoopClock
from .journal import Journal
from .ledger import Ledger
from .ledger_notes import LedgerNotes
from .messages import (
    REVOKED,
    SPACE,
    Message,
    Replies,
    Send,
    count,
    flag,
    integer,
    integers,
    pairs,
    stats_fields,
    summary_of,
    text,
)
from .offers import OfferRequests
from .rule import StalenessRule
from .store_links import StoreLinks
from .store_requests import StoreRequests
from .stores import PayloadStore, size_of
from .waiting import Admission, BatchRequests, Collaborators, PendingRequest, PromptIntake

logger = logging.getLogger(__name__)

_BEATS_TO_SILENCE = 4


class BufferService:
    """The buffer without its socket.

    Args:
        config: Options.
        groups_per_step: B.
        send: Sends one message to one client.
        on_rewound: Called after a rewind of the learner: finished groups may come again.
        counters: Returns the server's own counters, for `buffer.inspect`.
        links: Connections to the store servers that hold the payloads; None keeps the payloads here.
        journal: Journal of an earlier server, which this one continues; None if nothing is kept on disk.
        clock: Measures deadlines; the clock of the running loop unless a test passes another.
    """

    def __init__(
        self,
        config: BufferConfig,
        *,
        groups_per_step: int,
        send: Send,
        on_rewound: Callable[[], None] = lambda: None,
        counters: Callable[[], dict[str, int]] = dict,
        links: StoreLinks | None = None,
        journal: Journal | None = None,
        clock: LoopClock | None = None,
    ) -> None:
        num_stores = 1 if links is None else len(links.addresses)
        self.ledger = _ledger(config, groups_per_step=groups_per_step, num_stores=num_stores)
        self._config = config
        self._counters = counters
        self._on_rewound = on_rewound
        self._links = links
        self._clock = LoopClock() if clock is None else clock
        self._replies = Replies(send)
        self._store = PayloadStore(config.max_prompt_bytes, None if links is None else links.remove)
        shared = Collaborators(
            ledger=self.ledger, store=self._store, replies=self._replies, hold_s=config.request_timeout_s / 2
        )
        self._intake = PromptIntake(shared, queue_size=config.queue_size)
        self._admission = Admission(
            shared,
            clock=self._clock,
            silent_s=_BEATS_TO_SILENCE * config.heartbeat_s,
            hands_over=config.hand_over,
            settle=self.settle,
        )
        max_filtered = config.max_filtered_steps * groups_per_step
        self._batches = BatchRequests(shared, links=links, max_filtered=max_filtered)
        self._offers = OfferRequests(shared, journal)
        self._stores = StoreRequests(shared, links=links)
        self._reserving = shared.pending()
        self._refused_for_space: set[bytes] = set()
        self._refused_prompts: set[bytes] = set()
        self._journal = journal
        self._expiry = Deadline(self._expire, self._clock)
        self._silence = Deadline(self._take_from_silent, self._clock)
        self._notes = self._recorded()
        self._operations = self._all_operations()
        if journal is not None:
            self._recover(journal)

    def _recorded(self) -> LedgerNotes | None:
        """Record the ledger's commands if this process records; a journal's replay is not recorded again."""
        recorder = record.current()
        if recorder is None:
            return None
        notes = LedgerNotes(self.ledger, recorder)
        self.ledger.on_applied = notes.note
        return notes

    def _all_operations(self) -> dict[str, Callable[[bytes, Message], None]]:
        """Operations by name."""
        return {
            **self._intake.operations,
            **self._admission.operations,
            **self._batches.operations,
            **self._offers.operations,
            **self._stores.operations,
            "loaded": self._loaded,
            "beat": self._beat,
            "leave": self._leave,
            "bury": self._bury,
            "hello": self._hello,
            "reserve": self._reserve,
            "put": self._put,
            "release": self._release,
            "save": self._save_progress,
            "commit": self._commit,
            "lose": self._lose_planned,
            "rewind": self._rewind,
            "stats": self._stats,
            "inspect": self._inspect,
        }

    def handle(self, client: bytes, request: Message) -> None:
        """Run the operation of a request; an `AsyncRLError` becomes the reply. `settle` answers pending requests."""
        self._admission.heartbeats.hear(client, self._clock.time())
        operation = self._operations.get(request.name)
        try:
            if client in self.ledger.account.buried:
                raise DeclaredDead(f"{request.name} came from a worker that was declared dead and replaced; stop it")
            if operation is None:
                raise WireError(f"unknown operation {request.name!r:.40}; use one of {sorted(self._operations)}")
            operation(client, request)
        except AsyncRLError as error:
            self._refuse(client, request, error)

    def _refuse(self, client: bytes, request: Message, error: AsyncRLError) -> None:
        if isinstance(error, StoreFull):
            refused = self._refused_prompts if request.name == "enqueue" else self._refused_for_space
            refused.add(client)
        self._replies.fail(client, request.request_id, error)

    def _when_kept(self, client: bytes, request: Message, store: Callable[[Frames | int], None]) -> None:
        """Call ``store`` with small frames, or with the place of large frames after the journal has written them."""
        if self._journal is None or size_of(request.payload) < JOIN_BELOW_BYTES:
            store(request.payload)
            return

        def then(place: int, error: AsyncRLError | None) -> None:
            try:
                if error is not None:
                    raise error
                store(place)
            except AsyncRLError as refusal:
                self._refuse(client, request, refusal)
            except Exception as failure:
                logger.exception("%s failed", request.name)
                self._refuse(client, request, ReplayBufferError(f"the buffer failed at {request.name}: {failure!r}"))

        self._journal.keep(request.payload, then)

    def settle(self) -> None:
        """Answer pending requests until no more can be answered."""
        ledger, before = self.ledger, None
        try:
            while before != (
                before := (
                    ledger.groups.num_queued,
                    ledger.groups.num_leased,
                    ledger.groups.num_stored,
                    self._intake.num_waiting,
                )
            ):
                self._admission.grant_saved()  # first: otherwise a batch is made without a group that it waited for
                self._batches.make()
                self._forget_finished()
                self._intake.fill()
                self._admission.grant()
                self._grant_reservations()
        except ReplayBufferError as error:
            logger.error("the buffer grants nothing while the journal cannot be written: %s", error)
        for revocation in self.ledger.drain_revocations():
            fields = {"group_id": revocation.group_id, "attempt": revocation.attempt}
            self._admission.revoked(**fields)
            self._replies.push(revocation.owner, REVOKED, fields)
        self._stores.settle()
        self._expiry.at(self.ledger.groups.leases.next_expiry())
        self._silence.at(self._admission.heartbeats.next_silence())
        self._compact()
        if self._notes is not None:
            self._notes.levels(held_bytes=self._store.held_bytes)

    def close(self) -> None:
        """Cancel every timer."""
        for part in (
            self._reserving,
            self._intake,
            self._admission,
            self._batches,
            self._offers,
            self._stores,
            self._expiry,
            self._silence,
            self._clock,
        ):
            part.close()

    def _recover(self, journal: Journal) -> None:
        """Load the prompts, trajectories and leases of an earlier server; running leases are renewed in full."""
        ledger = self.ledger
        journal.claim({"epoch": self._config.epoch, **ledger.options})
        recovered = journal.recover()
        if recovered.snapshot is not None:
            ledger.restore(recovered.snapshot)
        for command, outcome in recovered.commands:
            ledger.enact(command, outcome)
        ledger.renew_all(self._clock.time())
        ledger.drain_revocations()
        ledger.drain_finished()
        ledger.groups.ended_attempts.clear()
        ledger.log = journal
        self._stores.recover()
        self._offers.recover(journal)
        journal.on_written = self.settle
        self._store.recover(recovered.frames, ledger)
        self._lose(group_id for group_id, _ in ledger.groups.stored_in() if group_id not in self._store.payloads)
        self._lose(
            group.group_id
            for group in ledger.groups
            if group.prefix_bytes and group.group_id not in self._store.prefixes
        )
        self._admission.recover(ledger.groups.leases.all())
        self._expiry.at(ledger.groups.leases.next_expiry())
        self._silence.at(self._admission.heartbeats.next_silence())

    def _lose(
        self, group_ids: Iterable[int], *, unsent: Iterable[tuple[int, int]] = (), missing: Iterable[int] = ()
    ) -> None:
        """Generate groups again whose frames are lost; the workers send ``unsent`` groups again."""
        command = LoseGroups(group_ids=tuple(group_ids), unsent=tuple(unsent), missing=tuple(missing))
        if lost := self.ledger.apply(command).group_ids:
            logger.warning("the trajectories or saved prefixes of %d groups are lost", len(lost))
            self._store.evict(group_id for group_id in lost if group_id in self._store.payloads)

    def lose_from_store(
        self,
        store: int,
        group_ids: Iterable[int],
        *,
        stored: Iterable[tuple[int, int]],
        reserved: Iterable[tuple[int, int]] = (),
    ) -> bool:
        """Handle the answer of a store server that it does not hold ``group_ids``.

        ``stored`` and ``reserved`` are the groups and attempts that this store had when it was asked. Groups that were
        stored are generated again. Groups that were reserved are sent again. A planned batch stays, because its ranks
        may already have the groups. If a rank does not have them, it reports this, and the missing groups of that batch
        and of later ones are generated again.

        Returns whether a reserved group was stored in the meantime. Its payload may have reached the store after the
        question, so the caller has to ask again.
        """
        ledger, missing = self.ledger, set(group_ids)
        was_reserved = {key for key in reserved if key[0] in missing}
        now_stored = set(ledger.groups.stored_in(store))
        found = [group_id for group_id, _ in now_stored.intersection(stored) if group_id in missing]
        self._lose(
            (group_id for group_id in found if not ledger.groups.is_planned(group_id)),
            unsent=was_reserved.intersection(ledger.groups.leases.reserved_in(store)),
            missing=filter(ledger.groups.is_planned, found),
        )
        self.settle()
        return not was_reserved.isdisjoint(now_stored)

    def _forget_finished(self) -> None:
        """Drop the frames of finished groups, and notify the clients whose put or prompts did not fit."""
        finished = self.ledger.drain_finished()
        self._admission.finished(finished)
        groups = self.ledger.groups
        ended, groups.ended_attempts = groups.ended_attempts, []
        if self._store.forget(finished, ended):
            self._tell_of_space(self._refused_for_space)
            self._tell_of_space(self._refused_prompts)

    def _tell_of_space(self, clients: set[bytes]) -> None:
        for client in clients:
            self._replies.push(client, SPACE)
        clients.clear()

    def _compact(self, *, is_urgent: bool = True) -> None:
        """Replace the journal's commands by a snapshot if the journal has grown long."""
        if self._journal is not None and self._journal.is_grown(is_urgent=is_urgent):
            try:
                self._journal.compact(self.ledger.snapshot(), self._store.frames())
            except ReplayBufferError as error:
                logger.warning("the journal was not compacted: %s", error)

    # Events

    def _expire(self) -> None:
        lease_s = self._config.lease_s
        try:
            if num_expired := len(self.ledger.apply(Expire(), self._clock.time()).group_ids):
                logger.warning("%d leases were not renewed within %.1f s and were revoked", num_expired, lease_s)
        except ReplayBufferError as error:
            logger.error("expired leases are not revoked while the journal cannot be written: %s", error)
            self._expiry.at(self._clock.time() + lease_s)
            return
        self.settle()

    def _take_from_silent(self) -> None:
        try:
            for client in self._admission.heartbeats.take_silent(self._clock.time()):
                self._offers.forget(client)
                self._admission.take_from(client)
        except ReplayBufferError as error:
            logger.error("leases of silent producers are not revoked before they expire: %s", error)
        self.settle()

    # Results

    def _reserve(self, client: bytes, request: Message) -> None:
        """Reserve bytes for a group before it is sent; requests wait, in order of arrival, until the bytes fit."""
        names = ("group_id", "attempt", "num_bytes")
        fields: dict[str, Any] = {name: integer(request.fields, name) for name in names}
        fields["host"] = text(request.fields, "host") if "host" in request.fields else ""
        pending = PendingRequest(client=client, request_id=request.request_id, fields=fields)
        self._reserving.add(pending)

    def _grant_reservations(self) -> None:
        for pending in self._reserving.all():
            group = self.ledger.groups.running(pending.fields["group_id"], pending.fields["attempt"])
            is_held = group is not None
            fields: dict[str, Any] = {"granted": True, "is_held": is_held}
            try:
                if is_held:
                    store = self._make_room(pending.client, Reserve(**pending.fields))
                    fields["address"] = self._links.addresses[store] if self._links is not None else ""
                self._replies.reply(pending.client, pending.request_id, fields)
            except StoreFull:
                continue
            except ReplayBufferError as error:
                self._replies.fail(pending.client, pending.request_id, error)
            self._reserving.remove(pending.client, pending.request_id)

    def _make_room(self, client: bytes, command: Reserve) -> int:
        """Reserve bytes for a group; returns its store. Raises `StoreFull`, and fails plans that can never be made."""
        group_id = command.group_id
        try:
            reserved = self.ledger.apply(command, sender=client)
        except StoreFull:
            if self.ledger.groups.space.stores and self.ledger.cannot_hold_batch(group_id):
                self._batches.fail(command.num_bytes)
            raise
        if reserved.evicted:
            logger.warning("%d groups were evicted for group %d, which is due earlier", len(reserved.evicted), group_id)
            self._store.evict(reserved.evicted)
        return reserved.store

    def _put(self, client: bytes, request: Message) -> None:
        summary = summary_of(request.fields)
        size, digest = self._store.receipt_of(request.payload)
        continued = flag(request.fields, "continued", default=True)
        num_left_out = count(request.fields, "num_left_out") if "num_left_out" in request.fields else 0
        command = Put(
            summary=summary,
            continued=continued,
            num_bytes=size,
            digest=digest,
            num_left_out=num_left_out,
        )
        key = summary.group_id, summary.attempt
        group = self.ledger.groups.running(*key)
        if group is not None and self._store.is_elsewhere and not group.num_bytes:
            raise StoreLost(f"the store of group {key[0]} attempt {key[1]} does not hold it; send the group again")
        is_easy = (self._journal is None or size < JOIN_BELOW_BYTES) and self.ledger.room.fits(size)
        if is_easy or group is None or self._store.is_elsewhere:
            self._store_group(client, request, command, request.payload)
        else:
            self._make_room(client, Reserve(group_id=key[0], attempt=key[1], num_bytes=size))
            self._when_kept(client, request, partial(self._store_group, client, request, command))

    def _store_group(self, client: bytes, request: Message, command: Put, kept: Frames | int) -> None:
        group_id = command.summary.group_id
        result = self.ledger.apply(command, sender=client, frames={("payload", group_id): kept}).result
        if result in (PutResult.filtered, PutResult.stored):
            self._admission.ended(client, command)
        if result is PutResult.filtered:
            self._batches.note_filtered()
        elif result is PutResult.stored:
            self._store.keep_payload(group_id, request.payload, command.num_bytes)
            self._tell_of_space(self._refused_prompts)
            self._admission.heartbeats.count_put(client, command.summary.num_tokens)
        self._replies.reply(client, request.request_id)

    def _release(self, client: bytes, request: Message) -> None:
        fields = request.fields
        command = Release(
            group_id=integer(fields, "group_id"),
            attempt=integer(fields, "attempt"),
            num_tokens=count(fields, "num_tokens"),
            reason=text(fields, "reason"),
            continued=flag(fields, "continued", default=True),
            max_failures=count(fields, "max_failures"),
        )
        released = self.ledger.apply(command, sender=client)
        self._admission.ended(client, command)
        self._replies.reply(client, request.request_id, {"is_dropped": released.is_dropped})

    def _save_progress(self, client: bytes, request: Message) -> None:
        fields, frames = request.fields, request.payload
        group_id, attempt = integer(fields, "group_id"), integer(fields, "attempt")
        names = ("num_tokens", "oldest_version", "newest_version")
        progress = Progress(**{name: count(fields, name) for name in names})
        continued = flag(fields, "continued", default=True)
        command = SavePrefix(
            group_id=group_id,
            attempt=attempt,
            progress=progress,
            continued=continued,
            num_bytes=size_of(frames),
        )

        longest_response = count(fields, "longest_response") if "longest_response" in fields else None

        def save(kept: Frames | int) -> None:
            self.ledger.apply(command, sender=client, frames={("progress", group_id): kept})
            if longest_response is not None:
                self._admission.saved(group_id, attempt, longest_response)
            self._store.prefixes.put(group_id, frames)
            self._replies.reply(client, request.request_id)

        self._when_kept(client, request, save)

    def _commit(self, client: bytes, request: Message) -> None:
        committed = self.ledger.apply(Commit(version=integer(request.fields, "version")))
        self._forget_finished()
        if committed.group_ids:
            self._admission.answer_outdated(except_for=self._offers.receivers)  # these wait for newer weights
            self._compact(is_urgent=False)  # the buffer holds few groups now
        self._stats(client, request)
        self._offers.show()  # after the reply to the controller: many engines may wait

    def _lose_planned(self, client: bytes, request: Message) -> None:
        """Plan a batch again: the learner's ranks did not find some of its groups, and no rank made the step."""
        self._lose(
            group_id for group_id in integers(request.fields, "groups") if self.ledger.groups.is_planned(group_id)
        )
        self._replies.reply(client, request.request_id)

    def _rewind(self, client: bytes, request: Message) -> None:
        fields = request.fields
        command = Rewind(
            version=integer(fields, "version"),
            incarnation=integer(fields, "incarnation"),
            finished=tuple(pairs(fields, "finished")),
            tokens_trained=count(fields, "tokens_trained"),
            lag_histogram=tuple(pairs(fields, "lag_histogram")),
        )
        self._forget_finished()  # before finished groups are queued again
        rewound = self.ledger.apply(command)
        if rewound.is_new:
            self._store.evict(rewound.group_ids)
            self._offers.withdraw()
            self._on_rewound()
            logger.warning("the learner goes on from version %d, incarnation %d", command.version, command.incarnation)
        self._replies.reply(client, request.request_id)

    # The state of clients, and of the buffer

    def _beat(self, client: bytes, request: Message) -> None:
        """Note a heartbeat; it also registers a producer that only an earlier server knew."""
        self._admission.heartbeats.enter(client, self._clock.time())
        if "generated" in request.fields:
            self._admission.heartbeats.count_generated(client, count(request.fields, "generated"))
        self._offers.note_beat(client, request.fields)
        self._stores.note_host(request.fields)
        self._replies.reply(client, request.request_id, _clock_fields())

    def _loaded(self, client: bytes, request: Message) -> None:
        """Note that an engine serves a version; its waiting request for leases is now for this version."""
        self._offers.loaded(client, request)
        if self._offers.is_current(request.fields):
            self._admission.adopt(client, integer(request.fields, "version"))

    def _leave(self, client: bytes, request: Message) -> None:
        self._offers.forget(client)
        self._admission.leave(client, request)

    def _bury(self, client: bytes, request: Message) -> None:
        """Declare a worker dead, on the word of the controller that started it."""
        try:
            dead = bytes.fromhex(text(request.fields, "worker"))
        except ValueError as error:
            raise WireError(f"field 'worker' must hold the hexadecimal digits of an identity: {error}") from error
        num_generated = self._admission.bury(dead, count(request.fields, "generated"))
        self._offers.forget(dead)
        self._replies.reply(client, request.request_id, {"generated": num_generated})

    def _hello(self, client: bytes, request: Message) -> None:
        """Reply with the buffer's options. A producer is registered, and must send heartbeats from then on."""
        if flag(request.fields, "produces", default=False):
            self._stores.note_host(request.fields)
            self._admission.heartbeats.enter(client, self._clock.time())
        rule = self.ledger.rule
        fields = {"max_lag": rule.max_lag, "groups_per_step": rule.groups_per_step}
        fields |= {"heartbeat_s": self._config.heartbeat_s, "is_elsewhere": self._store.is_elsewhere}
        self._replies.reply(client, request.request_id, {**fields, **_clock_fields()})

    def _stats(self, client: bytes, request: Message) -> None:
        self._replies.reply(client, request.request_id, stats_fields(self._totals()))

    def _totals(self) -> BufferStats:
        return self.ledger.stats(
            stored_bytes=self._store.payloads.num_bytes,
            held_bytes=self._store.held_bytes + self._store.prompt_bytes + self._intake.num_waiting_bytes,
            leases_waiting=self._admission.num_waiting,
        )

    def _inspect(self, client: bytes, request: Message) -> None:
        rule, table = self.ledger.rule, self.ledger.groups
        groups = table.leases.all() + [group for group in table if group.summary is not None]
        fields = {
            "max_lag": rule.max_lag,
            "groups_per_step": rule.groups_per_step,
            "max_stored_bytes": self.ledger.room.max_bytes,
            **self._counters(),
            "stores": self._stores.describe(),
            "stats": stats_fields(self._totals()),
            "finished": self.ledger.history.finished.ranges(),
            "groups": [group.describe(self.ledger.learner_version, self._clock.time()) for group in groups],
            "producers": self._admission.describe(),
        }
        self._replies.reply(client, request.request_id, fields)


def _ledger(config: BufferConfig, *, groups_per_step: int, num_stores: int) -> Ledger:
    """A new ledger with the options of the buffer."""
    return Ledger(
        StalenessRule(max_lag=config.max_lag, groups_per_step=groups_per_step),
        on_stale=config.on_stale,
        order=config.order,
        lease_s=config.lease_s,
        filters=config.filters,
        first_version=config.first_version,
        max_bytes=config.max_stored_bytes,
        max_deaths=config.max_worker_deaths,
        num_stores=num_stores,
    )


def _clock_fields() -> dict[str, Any]:
    """This host's clock, for clients on other hosts."""
    return {"clock": record.clock_id(), "now_ns": time.monotonic_ns()}
