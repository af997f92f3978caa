"""Handles the operations of the buffer's server, with the ledger and the store of prompts and trajectories.

The handler of an operation is the method ``on_<name>`` of a class in this file. `buffer.server` itself handles only
`Connect` and `RenewKeys`. `buffer.store_servers` handles the operations of the store servers.

If the service cannot answer a request yet, the request waits. After each burst of messages, `settle` answers the
waiting requests that can be answered now. If a request waits too long, a timer answers the request with `NothingYet`.
Other timers revoke expired leases, and find silent rollout workers.
"""

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial

from msgspec import to_builtins
from msgspec.structs import replace

from asyncrl.core import record
from asyncrl.core.errors import (
    AsyncRLError,
    DeclaredDead,
    ReplayBufferError,
    StoreFull,
    StoreLost,
    WireError,
    WrongEpoch,
)
from asyncrl.core.types import BufferStats, GroupSummary

from . import commands, operations
from .checkpoint_parts import CheckpointRequests
from .commands import PutResult
from .config import BufferConfig
from .description import LedgerNotes, describe_group, plan_wait
from .encoding import Message, Send
from .fetches import FetchReplies
from .frames import Frames, size_of
from .journal import Journal, Recovered
from .ledger import Ledger
from .offers import OfferRequests
from .operations import Done
from .records import MAX_COUNT, MAX_REASON, Answer
from .rule import StalenessRule
from .sockets import Deadline, LoopClock
from .store_links import StoreJoins, StoreLinks
from .stores import PayloadStore, PayloadWriter
from .waiting import Admission, BatchRequests, Collaborators, PromptIntake, Replies, handlers_of

logger = logging.getLogger(__name__)


class BufferService:
    """Handles the requests that the socket of the buffer's server receives.

    Args:
        config: Options of the buffer.
        groups_per_step: B, the number of prompt groups per learner step.
        send: Function that sends one message to one client.
        on_rewound: Called after the buffer has gone back to a checkpoint, because finished groups may be queued again.
        counters: Function that returns the socket's counts of refused and undelivered messages.
        links: Connections to the store servers. If None, this process keeps the payloads.
        journal: The journal that this server continues. If None, the server keeps nothing on disk.
        clock: Measures deadlines. If None, the service makes a `LoopClock` on the running loop.
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
        remove = None if links is None else links.remove
        self._store = PayloadStore(config.max_prompt_bytes, remove, max_memory_bytes=config.max_memory_bytes)
        shared = Collaborators(config=config, ledger=self.ledger, store=self._store, replies=self._replies)
        self._intake = PromptIntake(shared)
        self._admission = Admission(shared, clock=self._clock, settle=self.settle)
        self._batches = BatchRequests(shared)
        self._offers = OfferRequests(shared, journal)
        self._joins = StoreJoins(shared, links)
        self._checkpoints = CheckpointRequests(shared, journal=journal, links=links)
        parts = shared, self._admission, self._offers, self._joins
        self._handlers = handlers_of((self, WorkerRequests(*parts), ControlRequests(*parts)))
        self._reserving = shared.held()
        self._fetches = FetchReplies(self._replies, config.max_stored_bytes)
        self._refused_for_space, self._refused_prompts = set[bytes](), set[bytes]()
        self._journal = journal
        self._writer = PayloadWriter(journal, fits_in_memory=self._store.fits_in_memory, refuse=self._refuse)
        self._expiry = Deadline(self._expire, self._clock)
        self._silence = Deadline(self._take_from_silent, self._clock)
        recorder = record.current()
        self._notes = None if recorder is None else LedgerNotes(self.ledger, recorder)
        if self._notes is not None:
            self.ledger.on_applied = self._notes.note
        held = self._intake, self._admission, self._batches, self._offers, self._joins, self._checkpoints
        self._closing = (self._reserving, self._fetches, *held, self._expiry, self._silence, self._clock)
        earlier = self._checkpoints.continue_earlier()
        if journal is not None:
            self.ledger.log, journal.on_written = journal, self.settle
        if earlier is not None:
            self._recover(earlier)
        self._offers.recover()

    def handle(self, request: Message) -> None:
        """Handle one request of a client. If the handler raises an `AsyncRLError`, the error is the answer."""
        self._admission.heartbeats.hear(request.client, self._clock.time())
        kind = type(request.body)
        try:
            if request.client in self.ledger.account.buried:
                raise DeclaredDead(
                    f"{request.body.name} came from a worker that was declared dead and replaced; stop this worker"
                )
            if (handler := self._handlers.get(kind)) is None:
                raise WireError(f"{request.body.name} is not an operation of this server")
            if (answer := handler(request, request.body)) is not None:
                self._replies.answer(request, answer)
        except AsyncRLError as error:
            self._refuse(request, error)

    def _refuse(self, request: Message, error: AsyncRLError) -> None:
        if isinstance(error, StoreFull):
            refused = self._refused_prompts if isinstance(request.body, commands.Enqueue) else self._refused_for_space
            refused.add(request.client)
        self._replies.fail(request, error)

    def settle(self) -> None:
        """Answer waiting requests that can be answered now, send `Revoked` messages to workers, and set the timers."""
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
                # Grant leases on queued groups with a saved prefix first, because a batch may wait for such a group.
                self._admission.grant_saved()
                self._batches.make()
                self._forget_finished()
                self._intake.fill()
                self._admission.grant()
                self._reserving.answer(self._grant_reservation)
        except ReplayBufferError as error:
            logger.error("the buffer grants nothing while the journal cannot be written: %s", error)
        for owner, revoked in self.ledger.attempts.drain_revocations():
            self._admission.paces.revoked(revoked.group_id, revoked.attempt)
            self._replies.push(owner, revoked)
        self._joins.settle()
        self._expiry.at(self.ledger.groups.leases.next_expiry())
        self._silence.at(self._admission.heartbeats.next_silence())
        self._compact()
        if self._notes is not None:
            self._notes.levels(held_bytes=self._store.held_bytes)

    def close(self) -> None:
        """Cancel every timer and every waiting request."""
        for part in self._closing:
            part.close()

    def _recover(self, recovered: Recovered) -> None:
        """Load the prompts, saved prefixes, trajectories and leases of an earlier server.

        Each lease is renewed for its full time.
        """
        ledger = self.ledger
        if recovered.snapshot is not None:
            ledger.restore(recovered.snapshot)
        for command, outcome in recovered.commands:
            ledger.enact(command, outcome)
        ledger.renew_all(self._clock.time())
        ledger.attempts.drain_revocations()
        ledger.attempts.drain_finished()
        ledger.groups.ended_attempts.clear()
        self._joins.recover()
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
        """Queue the prompts of groups again, because their trajectories or saved prefixes are lost.

        The arguments are the fields of `LoseGroups`.
        """
        command = commands.LoseGroups(group_ids=tuple(group_ids), unsent=tuple(unsent), missing=tuple(missing))
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
        """Handle a report that the store server number ``store`` lacks the trajectories of groups.

        Lost stored groups are generated again. If a leased group has reserved bytes but no trajectories in the store,
        the group's worker sends the trajectories again. A planned batch stays, because the learner's ranks may already
        have the groups of the batch.

        Args:
            store: Number of the store server.
            group_ids: Ids of the groups that the store server lacks.
            stored: (group id, attempt number) pairs of the groups that this store server should have held at the time
                of the report, according to the ledger.
            reserved: (group id, attempt number) pairs of the leased groups for which the ledger had reserved bytes on
                this store server at that time.

        Returns:
            True if a group in ``group_ids`` and ``reserved`` was stored after the report. The caller must then ask the
            store server again, because it may have the group now.
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
        finished = self.ledger.attempts.drain_finished()
        self._admission.paces.finished(finished)
        groups = self.ledger.groups
        ended, groups.ended_attempts = groups.ended_attempts, []
        if self._store.forget(finished, ended):
            self._tell_of_space(self._refused_for_space)
            self._tell_of_space(self._refused_prompts)

    def _tell_of_space(self, clients: set[bytes]) -> None:
        for client in clients:
            self._replies.push(client, operations.Space())
        clients.clear()

    def _compact(self, *, is_urgent: bool = True) -> None:
        if self._journal is not None and self._journal.is_grown(is_urgent=is_urgent):
            try:
                self._journal.compact(self.ledger.snapshot(), self._store.frames())
            except ReplayBufferError as error:
                logger.warning("the journal was not compacted: %s", error)

    # Events

    def _expire(self) -> None:
        lease_s = self._config.lease_s
        try:
            if num_expired := len(self.ledger.apply(commands.Expire(), self._clock.time()).group_ids):
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
            logger.error("leases of silent workers are not revoked before they expire: %s", error)
        self.settle()

    # Prompts and results

    def on_enqueue(self, request: Message, enqueue: commands.Enqueue) -> Answer | None:
        """Queue a request's prompts while the queue has room. Answer when all prompts are queued. Ignore known prompts.

        A request without prompts asks for the metadata of finished groups, and is answered immediately.
        """
        if len(enqueue.group_ids) != len(enqueue.counts) or sum(enqueue.counts) != len(request.payload):
            raise WireError("enqueue must have one group id per prompt, and the frames of all prompts")
        if enqueue.wants_outcomes:
            self._intake.keep_finished()
        if not enqueue.group_ids:
            return self._intake.answer()
        frames = iter(request.payload)
        prompts = ([next(frames) for _ in range(number)] for number in enqueue.counts)
        return self._intake.hold(request, dict(zip(enqueue.group_ids, prompts, strict=True)))

    def on_reserve(self, request: Message, reserve: commands.Reserve) -> None:
        """Reserve bytes for a group's trajectories, before the worker sends them.

        Requests wait in order of arrival until the bytes are free.
        """
        self._reserving.hold(request)

    def _grant_reservation(self, request: Message) -> commands.Reservation | None:
        reserve: commands.Reserve = request.body
        if self.ledger.groups.running(reserve.group_id, reserve.attempt) is None:
            return commands.Reservation(is_held=False)
        try:
            store = self._make_room(request.client, reserve)
        except StoreFull:
            return None
        return commands.Reservation(address="" if self._links is None else self._links.addresses[store])

    def _make_room(self, client: bytes, command: commands.Reserve) -> int:
        """Reserve bytes for a group, and return the number of the store.

        If the bytes do not fit, and the stores are too small for a batch, the requests for batches get an error.
        """
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

    def on_put(self, request: Message, put: commands.Put) -> None:
        """Store the trajectories of a finished group, or record that a store server holds the trajectories."""
        check_counts(put.summary)
        group = self.ledger.groups.running(*put.key)
        if not self._store.is_elsewhere:
            put = replace(put, num_bytes=size_of(request.payload), digest=b"")
        elif request.payload or not put.num_bytes or len(put.digest) != 16:
            raise WireError(
                "this buffer keeps payloads in store servers; a put to the buffer server must carry only the payload's "
                "size and its digest of 16 bytes"
            )
        elif group is not None and not group.num_bytes:
            raise StoreLost(f"no store holds group {put.key[0]} attempt {put.key[1]}; send the group again")
        is_easy = not self._writer.writes_first(put.num_bytes) and self.ledger.room.fits(put.num_bytes)
        if is_easy or group is None or self._store.is_elsewhere:
            self._store_group(request, put, request.payload)
        else:
            reserve = commands.Reserve(group_id=put.key[0], attempt=put.key[1], num_bytes=put.num_bytes)
            self._make_room(request.client, reserve)
            self._writer.write(request, partial(self._store_group, request, put))

    def _store_group(self, request: Message, put: commands.Put, kept: Frames) -> None:
        client, group_id = request.client, put.key[0]
        frames = {} if self._store.is_elsewhere else {("payload", group_id): kept}
        result = self.ledger.apply(put, sender=client, frames=frames).result
        if result in (PutResult.filtered, PutResult.stored):
            self._admission.ended(put)
            self._intake.note_finished(put.summary)
        if result is PutResult.filtered:
            self._batches.note_filtered()
        elif result is PutResult.stored:
            in_memory = self._store.fits_in_memory(put.num_bytes)
            self._store.keep_payload(group_id, request.payload if in_memory else kept, put.num_bytes)
            self._tell_of_space(self._refused_prompts)
            self._admission.heartbeats.count_put(client, put.summary.num_tokens)
        self._replies.answer(request, Done())

    def on_release(self, request: Message, release: commands.Release) -> Answer:
        """End the lease (the right to generate a group) of a worker that does not store the group.

        If the buffer has already revoked the lease, only count the attempt's tokens as dropped. No token is counted
        twice.
        """
        released = self.ledger.apply(release, sender=request.client)
        self._admission.ended(release)
        return released

    def on_save_prefix(self, request: Message, save: commands.SavePrefix) -> None:
        """Save the prefix (tokens so far) of a running group."""

        def store(kept: Frames) -> None:
            command = replace(save, num_bytes=size_of(request.payload))
            self.ledger.apply(command, sender=request.client, frames={("progress", save.group_id): kept})
            if save.longest_response >= 0:
                self._admission.paces.saved(save.group_id, save.attempt, save.longest_response)
            self._store.prefixes.put(save.group_id, request.payload)
            self._replies.answer(request, Done())

        self._writer.write(request, store)

    # Batches

    def on_plan_batch(self, request: Message, plan: commands.PlanBatch) -> None:
        """Answer a request for a batch when the batch can be made."""
        self.ledger.check_plan(plan.version)
        self._batches.hold(request)

    def on_fetch(self, request: Message, fetch: operations.Fetch) -> Answer | None:
        """Reply with the trajectories of groups. If store servers hold them, reply with the store of each group."""
        if self._links is not None:
            groups = map(self.ledger.groups.in_store, fetch.group_ids)
            places = tuple((group.store, group.result.attempt, group.digest) for group in groups)
            return operations.Places(tuple(self._links.addresses), places)
        parts = [self._store.trajectories(group_id) for group_id in fetch.group_ids]
        self._fetches.send(request, fetch, parts)
        return None

    def on_commit(self, request: Message, commit: commands.Commit) -> None:
        """Record that a learner step has trained on its batch. Answer with the counts of groups, tokens and bytes."""
        committed = self.ledger.apply(commit)
        self._forget_finished()
        if committed.group_ids:
            # Leave out the workers that have requested newer weights, because they will get an offer.
            self._admission.answer_outdated(except_for=self._offers.receivers.clients)
            self._compact(is_urgent=False)  # compaction is cheap after a commit, because the buffer holds few groups
        self._replies.answer(request, operations.Totals(self._totals()))
        self._offers.show()  # send the offers after the reply to the commit, because many engines may get an offer

    def on_lose_groups(self, request: Message, lose: commands.LoseGroups) -> Answer:
        """Undo planned batches, because the learner's ranks did not find some of the groups in the stores.

        The lost groups are generated again, and the batches are planned again.
        """
        self._lose(filter(self.ledger.groups.is_planned, lose.group_ids))
        return Done()

    def on_rewind(self, request: Message, rewind: commands.Rewind) -> Answer:
        """Make the buffer go back to a checkpoint, because the learner has died and continues from this checkpoint."""
        # Drop the data of finished groups now, because the return to the checkpoint may queue these groups again.
        self._forget_finished()
        rewound = self.ledger.apply(rewind)
        if rewound.is_new:
            self._take_back(rewound)
            logger.warning("the learner goes on from version %d, incarnation %d", rewind.version, rewind.incarnation)
        return Done()

    def on_resume(self, request: Message, resume: commands.Resume) -> Answer:
        """Make the buffer go back to the checkpoint from which the run was resumed."""
        self._forget_finished()
        self._take_back(self.ledger.apply(resume))
        self._joins.leave_earlier()
        logger.info("the run goes on from version %d", resume.version)
        return Done()

    def _take_back(self, rewound: commands.Rewound) -> None:
        self._store.evict(rewound.dropped)
        self._on_rewound()
        self._offers.withdraw()
        self._checkpoints.note_marks()

    def on_checkpoint(self, request: Message, checkpoint: commands.Checkpoint) -> None:
        """Begin to write a checkpoint. The server answers when the checkpoint is complete.

        If the client repeats the request, the repeated request waits for the same write.
        """
        self.ledger.apply(checkpoint)
        self._checkpoints.note_marks()
        self._checkpoints.begin(request)

    # Reports about the buffer

    def _totals(self) -> BufferStats:
        return self.ledger.stats(
            stored_bytes=self._store.payloads.num_bytes,
            held_bytes=self._store.held_bytes + self._store.prompt_bytes + self._intake.num_waiting_bytes,
            disk_bytes=self._store.payloads.disk_bytes if self._links is None else sum(self._links.disk_bytes),
            leases_waiting=self._admission.num_waiting,
        )

    def on_stats(self, request: Message, stats: operations.Stats) -> Answer:
        """Answer with the ledger's counts of groups, tokens and bytes."""
        return operations.Totals(self._totals())

    def on_inspect(self, request: Message, inspect: operations.Inspect) -> Answer:
        """Answer with a description of the buffer, or of the one group that the request names.

        The buffer's description has its options and counts, all leased, stored and planned groups, and all workers.
        """
        now = self._clock.time()
        if inspect.group_id >= 0:
            return operations.Report(describe_group(self.ledger, inspect.group_id, now))
        rule, table = self.ledger.rule, self.ledger.groups
        groups = table.leases.all() + [group for group in table if group.summary is not None]
        return operations.Report(
            {
                "max_lag": rule.max_lag,
                "groups_per_step": rule.groups_per_step,
                "max_stored_bytes": self.ledger.room.max_bytes,
                "memory_bytes": self._store.memory_bytes,
                **self._counters(),
                "stores": self._joins.describe(),
                "stats": to_builtins(self._totals()),
                "finished": self.ledger.history.finished.ranges(),
                "plan": plan_wait(self.ledger, now),
                "groups": [group.describe(self.ledger.learner_version, now) for group in groups],
                "producers": self._admission.describe(),
            }
        )


class WorkerRequests:
    """Handles the operations of workers: connecting, heartbeats, leases, weights, and disconnecting."""

    def __init__(self, shared: Collaborators, admission: Admission, offers: OfferRequests, joins: StoreJoins) -> None:
        self._ledger, self._store, self._replies = shared.ledger, shared.store, shared.replies
        self._heartbeat_s = shared.config.heartbeat_s
        self._admission, self._offers, self._joins = admission, offers, joins

    def on_hello(self, request: Message, hello: operations.Hello) -> Answer:
        """Answer with the server's settings for clients.

        If ``hello.produces`` is true, register the client as a rollout worker. The client must then send heartbeats.
        """
        if hello.produces:
            self._enter(request.client, hello.host)
        return self._welcome()

    def on_beat(self, request: Message, beat: operations.Beat) -> Answer:
        """Record a heartbeat. Answer with the server's settings for clients.

        The heartbeat also registers a worker that a restarted server does not know yet.
        """
        self._enter(request.client, beat.host)
        self._admission.heartbeats.count_generated(request.client, beat.generated)
        if beat.serves is not None:
            self._offers.note_loaded(request.client, beat.serves)
        return self._welcome()

    def _enter(self, client: bytes, host: str) -> None:
        self._admission.heartbeats.enter(client, self._admission.clock.time())
        self._joins.note_host(host)

    def _welcome(self) -> operations.Welcome:
        rule = self._ledger.rule
        clock = record.clock_id(), time.monotonic_ns()
        return operations.Welcome(
            rule.max_lag, rule.groups_per_step, self._heartbeat_s, self._store.is_elsewhere, *clock
        )

    def on_lease_groups(self, request: Message, lease: commands.LeaseGroups) -> None:
        """Let a request for leases wait. Answer a repeated request with the leases that the request got before."""
        if self._admission.answer_again(request):
            return
        if lease.incarnation == self._ledger.incarnation:
            self._ledger.check_engine_version(lease.engine_version)
        self._admission.hold(request)

    def on_cancel(self, request: Message, cancel: operations.Cancel) -> Answer:
        """Cancel a request for leases. Groups granted to this request go back to the queue."""
        self._admission.cancel(request.client, cancel.request)
        return Done()

    def on_renew(self, request: Message, renew: commands.Renew) -> Answer:
        """Extend leases. Send the client a `Revoked` message for each lease that has already ended."""
        for key in self._ledger.apply(renew, self._admission.clock.time(), sender=request.client).lost:
            self._replies.push(request.client, operations.Revoked(*key))
        return Done()

    def on_next_offer(self, request: Message, wanted: operations.NextOffer) -> Answer | None:
        """Answer a request for weights, now or as soon as newer weights are offered."""
        return self._offers.answer_receiver(request) or self._offers.receivers.hold(request)

    def on_loaded(self, request: Message, loaded: operations.Loaded) -> Answer:
        """Record which policy version a worker's engine serves now.

        If the learner has gone back to a checkpoint since it published these weights, the buffer ignores the report.
        Otherwise the worker's waiting requests for leases at this version may get leases.
        """
        if self._offers.is_current(loaded):
            self._ledger.check_engine_version(loaded.version)
            self._offers.note_loaded(request.client, loaded)
            self._admission.adopt(request.client, loaded.version)
        return Done()

    def on_fenced(self, request: Message, fenced: operations.Fenced) -> Answer:
        """Record that the worker's engine serves no policy version now."""
        self._offers.forget(request.client)
        return Done()

    def on_leave(self, request: Message, leave: operations.Leave) -> Answer:
        """Forget a worker that leaves. Release all leases of the worker, except those that the message names."""
        self._offers.forget(request.client)
        self._admission.leave(request.client, set(leave.leases))
        return Done()


class ControlRequests:
    """Handles the operations of the learner and the controller on weights, engines and store servers."""

    def __init__(self, shared: Collaborators, admission: Admission, offers: OfferRequests, joins: StoreJoins) -> None:
        self._ledger, self._store = shared.ledger, shared.store
        self._admission, self._offers, self._joins = admission, offers, joins

    def on_offer(self, request: Message, offer: operations.Offer) -> Answer:
        """Add the learner's offer. Answer with the oldest version in the log of offers, or 0 if there is no offer.

        If the message reports a failed publish, all waiting requests fail with this failure. Raises `WrongEpoch` if
        another learner has replaced the sender.
        """
        if not self._offers.is_current(offer):
            raise WrongEpoch(
                f"an offer came from incarnation {offer.incarnation} of the learner, but this buffer serves "
                f"{self._ledger.incarnation}; another learner has replaced the sender; end the sender"
            )
        if offer.offer is None:
            self._offers.fail(offer.failure)
        else:
            self._offers.add(offer.offer)
        return operations.Number(self._offers.log.oldest())

    def on_served(self, request: Message, served: operations.Served) -> Answer | None:
        """Answer with the oldest version that any engine serves.

        The answer waits until ``num_engines`` engines serve a version, and all of them serve ``at_least`` or newer.
        Raises `WeightsError` if a publish failed.
        """
        self._offers.log.check()
        return self._offers.answer_follower(request) or self._offers.followers.hold(request)

    def on_pin(self, request: Message, pin: operations.Pin) -> Answer | None:
        """Keep engines on (pin them to) a version. Answer with the names of the pinned engines that serve this version.

        The answer waits until these names differ from the names that the controller knows. Raises `WeightsGone` if the
        pinned version is lost, and `WeightsError` if a publish failed.
        """
        self._offers.pin(pin.version, pin.num_engines)
        return self._offers.answer_evaluator(request) or self._offers.evaluators.hold(request)

    def on_unpin(self, request: Message, unpin: operations.Unpin) -> Answer:
        """Let the pinned engines (engines that are kept on one version) load newer versions again."""
        self._offers.unpin()
        return Done()

    def on_bury(self, request: Message, bury: operations.Bury) -> Answer:
        """Declare a worker dead, because the controller requested this.

        The answer has the number of tokens that the worker generated.
        """
        dead = bytes.fromhex(bury.worker)
        answer = operations.Number(self._admission.bury(dead, bury.generated))
        self._offers.forget(dead)
        return answer

    def on_store_wanted(self, request: Message, wanted: operations.StoreWanted) -> None:
        """Answer with the name of a host when a worker connects from a host without a store server."""
        self._joins.joining()
        self._joins.wanted.hold(request)

    def on_add_store(self, request: Message, add: commands.AddStore) -> Answer:
        """Add a store. A repeated request has no effect."""
        links, added = self._joins.joining(), self._ledger.apply(add)
        if added.is_new:
            links.connect(add.address, added.store)
            logger.info("store %d of host %s joins at %s", added.store, add.host, add.address)
        return added

    def on_drop_store(self, request: Message, drop: commands.DropStore) -> Answer:
        """Drop a store that the controller declares lost."""
        links, stores = self._joins.joining(), self._ledger.groups.space.stores
        if drop.store >= len(stores):
            raise WireError(f"there is no store number {drop.store}; {len(stores)} stores have joined this buffer")
        dropped = self._ledger.apply(drop)
        if dropped.is_new:
            links.disconnect(drop.store)
            self._store.evict(dropped.group_ids)
            logger.warning("store %d is lost with %d stored groups", drop.store, len(dropped.group_ids))
        return dropped


def check_counts(summary: GroupSummary) -> None:
    """Raise `WireError` if a count in a group's metadata is out of range.

    The range is so small that sums of counts fit into 63 bits.
    """
    lists = summary.response_lengths, summary.branch_tokens, summary.num_branches
    versions = summary.oldest_version, summary.newest_version
    counts = (*versions, summary.num_prompt_tokens, summary.num_tokens, summary.num_truncated, *map(sum, lists))
    if summary.num_uses:
        raise WireError(f"num_uses of a group must be 0 in a put, got {summary.num_uses}; the ledger counts the uses")
    if len(summary.data_source) > MAX_REASON:
        raise WireError(f"data_source of a group must have at most {MAX_REASON} characters")
    least = min(summary.group_id, summary.attempt, *counts, *lists[0], *lists[1], *lists[2])
    most = max(summary.group_id >> 23, summary.attempt >> 23, *counts)
    if least < 0 or most > MAX_COUNT:
        raise WireError(f"the counts of a group must be integers in [0, 2**40], got {least} to {most}")


def _ledger(config: BufferConfig, *, groups_per_step: int, num_stores: int) -> Ledger:
    return Ledger(
        StalenessRule(max_lag=config.max_lag, groups_per_step=groups_per_step, max_uses=config.max_uses),
        on_stale=config.on_stale,
        order=config.order,
        lease_s=config.lease_s,
        filters=config.filters,
        max_bytes=config.max_stored_bytes,
        max_deaths=config.max_worker_deaths,
        num_stores=num_stores,
    )
