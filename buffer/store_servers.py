"""A server that holds payloads (encoded trajectories).

A store server runs on the host of the ledger's server, or on a host of rollout workers.

A worker stores a payload before it reports the put to the ledger. The ledger tells the store which payloads to remove.
A restarted store may lack acknowledged payloads, or hold removed payloads. So each time that the ledger connects to a
store, the ledger tells the store which groups are finished, and asks which other groups the store lacks.
"""

import logging
import math
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from asyncrl.core.errors import AsyncRLError, ReplayBufferError, StoreFull, UnknownGroup, WireError

from . import commands, operations
from .account import IdSet
from .checkpoint_parts import PartWriter
from .config import BufferConfig
from .encoding import Message, Send
from .fetches import FetchReplies
from .frames import Frames, in_memory, size_of
from .journal import Journal, numbers_of, read_contents
from .operations import Done
from .records import Answer, Key
from .stores import FrameTable, PayloadWriter
from .waiting import HeldRequests, PendingWrites, Replies, handlers_of

logger = logging.getLogger(__name__)


class StoreService:
    """Holds at most ``max_stored_bytes`` bytes of payloads. With a journal, payloads survive the end of the process."""

    def __init__(self, config: BufferConfig, *, send: Send, journal: Journal | None = None) -> None:
        self._limit = config.max_stored_bytes
        self._replies = Replies(send)
        self._journal = journal
        self._max_memory_bytes = config.max_memory_bytes
        self._payloads = FrameTable[Key]()
        self._by_group: dict[int, set[Key]] = {}
        self._fetches = FetchReplies(self._replies, self._limit)
        self._finished = IdSet()
        self._ended: dict[int, int] = {}  # maps each unfinished group to the number of its latest ended attempt
        self._unwritten_removals: set[int] = set()
        self._reserved: dict[Key, int] = {}
        self._reserving = HeldRequests(self._replies, config.request_timeout_s / 2)
        self._parts = PartWriter(journal)
        self._writer = PayloadWriter(journal, fits_in_memory=self._fits_in_memory, refuse=self._refuse)
        self._pending = PendingWrites(HeldRequests(self._replies, config.request_timeout_s / 2))
        self._handlers = handlers_of((self,))
        if journal is not None:
            journal.on_written = self.settle
            for number, payload in journal.recover().frames.get("payload", {}).items():
                try:
                    self._keep((number >> 16, number & 0xFFFF), payload)
                except OSError as error:
                    logger.error("group %d is lost: %s", number >> 16, error)

    def handle(self, request: Message) -> None:
        """Handle one request. If the handler raises an `AsyncRLError`, the error is the answer."""
        kind = type(request.body)
        try:
            if (handler := self._handlers.get(kind)) is None:
                raise WireError(f"{request.body.name} is not an operation of a store server")
            if (answer := handler(request, request.body)) is not None:
                self._replies.answer(request, answer)
        except AsyncRLError as error:
            self._replies.fail(request, error)

    def close(self) -> None:
        """Cancel every waiting request."""
        self._reserving.close()
        self._pending.close()
        self._parts.close()
        self._fetches.close()

    def settle(self) -> None:
        """Record dropped payloads in the journal. Then reserve bytes for waiting requests, in order of arrival."""
        self._write_removals()
        if self._journal is not None and self._journal.is_grown():
            self._compact(self._journal)
        for request in self._reserving.all():
            reserve: commands.Reserve = request.body
            key = reserve.group_id, reserve.attempt
            if self._held_bytes(key) + reserve.num_bytes > self._limit:
                return
            if self._is_wanted(key):
                self._reserved[key] = reserve.num_bytes
            self._reserving.answer(lambda request: commands.Reservation(), [request])

    def _compact(self, journal: Journal) -> None:
        held = (("payload", number_of(key), frames) for key, frames in self._payloads)
        try:
            journal.compact(None, held)
        except ReplayBufferError as error:
            logger.warning("the journal was not compacted: %s", error)

    def _held_bytes(self, key: Key) -> int:
        return self._payloads.num_bytes + sum(self._reserved.values()) - self._reserved.get(key, 0)

    def on_hello(self, request: Message, hello: operations.Hello) -> Answer:
        """Answer a request that only checks whether the server responds."""
        return Done()

    def on_reserve(self, request: Message, reserve: commands.Reserve) -> None:
        """Reserve bytes for a payload when enough bytes are free."""
        self._check_size(reserve.num_bytes)
        self._reserving.hold(request)

    def _check_size(self, size: int) -> None:
        if size > self._limit:
            raise ReplayBufferError(
                f"a group of {size} bytes exceeds buffer.max_stored_bytes={self._limit}; raise this limit"
            )

    def on_put_payload(self, request: Message, put: operations.PutPayload) -> Answer | None:
        """Store the trajectories of an attempt. Ignore a repeated request, and trajectories of an ended attempt."""
        key, size = (put.group_id, put.attempt), size_of(request.payload)
        self._check_size(size)
        if not self._is_wanted(key):
            self._reserved.pop(key, None)
            return Done()
        if self._held_bytes(key) + size > self._limit:
            raise StoreFull(
                f"{size} bytes do not fit: {self._payloads.num_bytes} bytes are stored, and the limit is {self._limit}"
            )
        self._reserved[key] = size
        self._writer.write(request, partial(self._store, request, key))
        return None

    def _refuse(self, request: Message, error: AsyncRLError) -> None:
        """Answer a put with an error, because the journal cannot write the payload. Free the put's reserved bytes."""
        self._reserved.pop((request.body.group_id, request.body.attempt), None)
        self._replies.fail(request, error)

    def _fits_in_memory(self, size: int) -> bool:
        return not self._max_memory_bytes or self._payloads.memory_bytes + size <= self._max_memory_bytes

    def _is_wanted(self, key: Key) -> bool:
        """Return whether the store needs an attempt's payload. A stored payload, or an ended attempt, gives False."""
        is_over = key[0] in self._finished or key[1] <= self._ended.get(key[0], -1)
        return not is_over and key not in self._payloads

    def _store(self, request: Message, key: Key, kept: Frames) -> None:
        self._reserved.pop(key, None)
        if self._is_wanted(key):
            if self._journal is not None:
                self._journal.note({("payload", number_of(key)): kept})
            self._keep(key, request.payload if self._fits_in_memory(size_of(request.payload)) else kept)
        self._replies.answer(request, Done())

    def _keep(self, key: Key, payload: Frames) -> None:
        """Add a payload. If a payload on disk fits in memory, read it into memory. Raises `OSError` if this fails."""
        self._payloads.put(key, in_memory(payload) if self._fits_in_memory(size_of(payload)) else payload)
        self._by_group.setdefault(key[0], set()).add(key)
        self._unwritten_removals.discard(number_of(key))

    def on_fetch(self, request: Message, fetch: operations.Fetch) -> None:
        """Answer with the trajectories of the requested attempts, in the order of the request."""
        if len(fetch.attempts) != len(fetch.group_ids):
            raise WireError("a fetch from a store server must name one attempt per group")
        parts: list[Frames] = []
        for key in zip(fetch.group_ids, fetch.attempts, strict=True):
            if key not in self._payloads:
                raise UnknownGroup(f"no trajectories of group {key[0]} attempt {key[1]} are stored here")
            parts.append(self._payloads.get(key))
        self._fetches.send(request, fetch, parts)

    def on_reconcile(self, request: Message, expected: operations.Reconcile) -> Answer:
        """Drop payloads that the ledger does not need. Answer with the ids of the groups that this store lacks.

        If the run resumed from a checkpoint, first load missing payloads from this store's files in the checkpoint.
        """
        self._finished, self._ended = IdSet(expected.finished), dict(expected.ended)
        used_again = {group_id for group_id, _ in expected.attempts}
        for group_id in {*self._by_group, *(group_id for group_id, _ in self._reserved)}:
            if group_id in self._finished and group_id not in used_again:
                self._forget(group_id)
            elif group_id in self._ended:
                self._forget(group_id, last=self._ended[group_id])
        missing = [key for key in expected.attempts if key not in self._payloads]
        if missing and expected.part and numbers_of(Path(expected.part)):
            self._load(Path(expected.part), missing)
        lacked = tuple(key[0] for key in expected.attempts if key not in self._payloads)
        return operations.Missing(lacked, self._payloads.disk_bytes)

    def _load(self, part: Path, keys: Iterable[Key]) -> None:
        payloads = read_contents(part).recovered.frames.get("payload", {})
        for key in keys:
            if (payload := payloads.get(number_of(key))) is not None:
                try:
                    own = payload if self._journal is None else self._journal.adopt("payload", number_of(key), payload)
                    self._keep(key, own)
                except OSError as error:
                    logger.error("the part of a checkpoint lacks group %d: %s", key[0], error)

    def on_save_part(self, request: Message, save: operations.SavePart) -> None:
        """Write the payloads that this store has now to this store's files in a checkpoint.

        The server answers when the files are on the disk.
        """
        held = (("payload", number_of(key), frames) for key, frames in self._payloads)
        self._pending.wait(request, lambda: self._parts.write(Path(save.path), values={}, snapshot=None, frames=held))

    def on_remove(self, request: Message, remove: operations.Remove) -> Answer:
        """Drop the payloads of finished groups, and of ended attempts at other groups."""
        for group_id in remove.group_ids:
            self._finished.add(group_id)
            self._ended.pop(group_id, None)
            self._forget(group_id)
        for group_id, attempt in remove.ended:
            if group_id not in self._finished:
                self._ended[group_id] = max(attempt, self._ended.get(group_id, -1))
            self._forget(group_id, last=attempt)
        return operations.Removed(self._payloads.disk_bytes)

    def _forget(self, group_id: int, *, last: float = math.inf) -> None:
        for key in [key for key in self._by_group.get(group_id, ()) if key[1] <= last]:
            self._payloads.remove(key)
            self._by_group[group_id].discard(key)
            if self._journal is not None:
                self._unwritten_removals.add(number_of(key))
        if not self._by_group.get(group_id, True):
            del self._by_group[group_id]
        for key in [key for key in self._reserved if key[0] == group_id and key[1] <= last]:
            del self._reserved[key]

    def _write_removals(self) -> None:
        """Record dropped payloads in the journal. After a failed write, the next call tries again."""
        if self._journal is None or not self._unwritten_removals:
            return
        try:
            self._journal.note({("payload", key): 0 for key in self._unwritten_removals})
        except ReplayBufferError as error:
            logger.warning("the journal still holds %d dropped payloads: %s", len(self._unwritten_removals), error)
        else:
            self._unwritten_removals.clear()


def number_of(key: Key) -> int:
    """Return the integer that identifies a (group id, attempt number) pair in the store server's journal."""
    return key[0] << 16 | key[1]
