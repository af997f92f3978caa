"""What the buffer server does with each request: the ledger decides, the shelves keep, and what must wait waits.

Waits: ``lease`` for admission (`Leasing`), ``enqueue`` for room in the queue (`Intake`), ``plan`` for a batch
(`Planning`). After the messages that have come, `settle` answers whoever can be answered now; a timer answers "nothing
yet" otherwise. Two more timers stand at the next lease's expiry and the next producer's silence. All go by the loop's
monotonic clock; nothing looks at a clock in a loop.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from asyncrl.protocol.errors import AsyncRLError, ReplayBufferError, StoreFull, WireError
from asyncrl.protocol.types import BufferStats

from .clock import Deadline
from .config import BufferConfig
from .intake import Intake
from .journal import Journal
from .leases import Progress, PutResult
from .leasing import Leasing
from .mailbox import Mailbox, Send
from .messages import REVOKED, SPACE, Message, flag, integer, text
from .planning import Planning
from .recorded import RecordedLedger
from .staleness import StalenessRule
from .stores import MemoryStore, PayloadStore, Store, size_of
from .summaries import stats_fields, summary_of

logger = logging.getLogger(__name__)

_BEATS_TO_SILENCE = 4


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
        self._counters = counters
        self._store_addresses = list(store_addresses)
        self._loop = asyncio.get_running_loop()
        self._mailbox = Mailbox(send)
        max_bytes = config.max_stored_bytes * max(1, len(store_addresses))
        self._shelves = PayloadStore(max_bytes, config.max_prompt_bytes, MemoryStore() if store is None else store)
        parts, hold_s = (self.ledger, self._shelves, self._mailbox), config.request_timeout_s / 2
        silent_s = _BEATS_TO_SILENCE * config.heartbeat_s
        self._intake = Intake(*parts, queue_size=config.queue_size, hold_s=hold_s)
        self._leasing = Leasing(*parts, hold_s=hold_s, silent_s=silent_s)
        max_filtered = config.max_filtered_steps * groups_per_step
        self._planning = Planning(*parts, hold_s=hold_s, store_addresses=store_addresses, max_filtered=max_filtered)
        self._refused_for_space: set[bytes] = set()
        self._expiry = Deadline(self._expire)
        self._silence = Deadline(self._take_from_silent)
        self._operations = {
            **self._intake.operations,
            **self._leasing.operations,
            **self._planning.operations,
            "hello": self._hello,
            "put": self._put,
            "release": self._release,
            "save": self._save_progress,
            "commit": self._commit,
            "stats": self._stats,
            "inspect": self._inspect,
        }
        if journal is not None:
            self._recover(journal)

    def handle(self, client: bytes, request: Message) -> None:
        """Do what is asked; an error of this system becomes the reply. `settle` answers what was held."""
        self._leasing.presence.hear(client, self._loop.time())
        operation = self._operations.get(request.name)
        try:
            if operation is None:
                raise WireError(f"unknown operation {request.name!r:.40}; known are {sorted(self._operations)}")
            operation(client, request)
        except AsyncRLError as error:
            if isinstance(error, StoreFull):
                self._refused_for_space.add(client)
            self._mailbox.fail(client, request.request_id, error)

    def settle(self) -> None:
        """Answer every held request that can be answered, until none can."""
        state, before = self.ledger.state, None
        try:
            while before != (before := (state.num_queued, state.outstanding, self._intake.num_waiting)):
                self._planning.make()
                self._forget_finished()
                self._intake.fill()
                self._leasing.grant()
                self._planning.fail_without_room()
        except ReplayBufferError as error:
            logger.error("nothing is granted while the journal cannot be written: %s", error)
        for revocation in self.ledger.drain_revocations():
            fields = {"group_id": revocation.group_id, "attempt": revocation.attempt}
            self._mailbox.push(revocation.owner, REVOKED, fields)
        self._expiry.at(self.ledger.next_expiry())
        self._silence.at(self._leasing.presence.next_silence())

    def close(self) -> None:
        """Cancel every timer."""
        for part in (self._intake, self._leasing, self._planning, self._expiry, self._silence):
            part.close()

    def _recover(self, journal: Journal) -> None:
        """Take up the prompts, trajectories and leases of the server before this one."""
        frames = self.ledger.attach(journal, now=self._loop.time())
        self._shelves.recover(frames, self.ledger.state)
        self._leasing.recover(self.ledger.state.leases.all())
        self._forget_finished()
        self._expiry.at(self.ledger.next_expiry())
        self._silence.at(self._leasing.presence.next_silence())

    def _forget_finished(self) -> None:
        """Drop the frames of finished groups, and tell those whose put or prompts did not fit."""
        if self._shelves.forget(self.ledger.drain_finished()):
            for client in self._refused_for_space:
                self._mailbox.push(client, SPACE)
            self._refused_for_space.clear()

    # Events

    def _expire(self) -> None:
        lease_s = self._config.lease_s
        try:
            if num_expired := self.ledger.expire(self._loop.time()):
                logger.warning("%d leases were not renewed within %.1f s and were taken back", num_expired, lease_s)
        except ReplayBufferError as error:
            logger.error("expired leases stay until the journal can be written: %s", error)
            self._expiry.at(self._loop.time() + lease_s)
            return
        self.settle()

    def _take_from_silent(self) -> None:
        try:
            self._leasing.take_from_silent()
        except ReplayBufferError as error:
            logger.error("leases of silent producers stay until they run out: %s", error)
        self.settle()

    # Results

    def _put(self, client: bytes, request: Message) -> None:
        summary = summary_of(request.fields)
        size = self._shelves.payloads.measure(request.payload)
        if self.ledger.holds(summary.group_id, summary.attempt):
            self._check_space(size, size_of(self._shelves.prefixes.get(summary.group_id)))
        continued = flag(request.fields, "continued", default=True)
        result = self.ledger.put(summary, request.payload, continued=continued)
        if result is PutResult.filtered:
            self._planning.note_filtered()
        elif result is PutResult.stored:
            self._shelves.keep_payload(summary.group_id, request.payload, size)
            self._leasing.presence.count_put(client, summary.num_tokens)
        self._mailbox.reply(client, request.request_id)

    def _check_space(self, size: int, replaced: int) -> None:
        try:
            self._shelves.check_trajectory(size, replaced=replaced)
        except StoreFull:
            self._planning.fail_if_stuck(size)
            raise

    def _release(self, client: bytes, request: Message) -> None:
        fields = request.fields
        self.ledger.release(
            integer(fields, "group_id"),
            integer(fields, "attempt"),
            num_tokens=integer(fields, "num_tokens"),
            reason=text(fields, "reason"),
            continued=flag(fields, "continued", default=True),
        )
        self._mailbox.reply(client, request.request_id)

    def _save_progress(self, client: bytes, request: Message) -> None:
        fields, frames = request.fields, request.payload
        group_id, attempt = integer(fields, "group_id"), integer(fields, "attempt")
        progress = Progress(num_tokens=integer(fields, "num_tokens"), oldest_version=integer(fields, "oldest_version"))
        if self.ledger.holds(group_id, attempt):
            replaced = size_of(self._shelves.prefixes.get(group_id))
            self._shelves.check_trajectory(size_of(frames), replaced=replaced)
        continued = flag(fields, "continued", default=True)
        self.ledger.save_progress(group_id, attempt, progress, frames, continued=continued)
        self._shelves.prefixes.put(group_id, frames)
        self._mailbox.reply(client, request.request_id)

    def _commit(self, client: bytes, request: Message) -> None:
        self.ledger.commit(integer(request.fields, "version"))
        self._forget_finished()
        self._leasing.answer_outdated()
        self._stats(client, request)

    # What clients ask about the buffer

    def _hello(self, client: bytes, request: Message) -> None:
        """What a client must know; a producer says so, and is heard of from then on."""
        if flag(request.fields, "produces", default=False):
            self._leasing.presence.enter(client, self._loop.time())
        rule = self.ledger.rule
        fields = {"max_lag": rule.max_lag, "groups_per_step": rule.groups_per_step, "stores": self._store_addresses}
        self._mailbox.reply(client, request.request_id, {**fields, "heartbeat_s": self._config.heartbeat_s})

    def _stats(self, client: bytes, request: Message) -> None:
        self._mailbox.reply(client, request.request_id, stats_fields(self._totals()))

    def _totals(self) -> BufferStats:
        return self.ledger.stats(
            stored_bytes=self._shelves.payloads.stored_bytes,
            held_bytes=self._shelves.held_bytes + self._shelves.prompts.num_bytes + self._intake.num_waiting_bytes,
            leases_waiting=self._leasing.num_waiting,
        )

    def _inspect(self, client: bytes, request: Message) -> None:
        rule = self.ledger.rule
        fields = {
            "max_lag": rule.max_lag,
            "groups_per_step": rule.groups_per_step,
            "max_stored_bytes": self._shelves.max_bytes,
            **self._counters(),
            "stats": stats_fields(self._totals()),
            "finished": self.ledger.state.attempts.finished(),
            "groups": self.ledger.state.unfinished(now=self._loop.time()),
            "producers": self._leasing.describe(),
        }
        self._mailbox.reply(client, request.request_id, fields)
