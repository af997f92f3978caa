"""Store servers: processes that hold the payloads, beside the ledger's server or on the hosts of the workers.

A worker stores a payload before it reports the put to the ledger. The ledger tells the store to remove the payload when
its attempt has ended or its group is finished, also if the worker died before its report. `buffer.store_links` is the
ledger's side.
"""

import asyncio
import logging
import math
import uuid
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from asyncrl.core.errors import (
    AsyncRLError,
    ReplayBufferError,
    StoreFull,
    UnknownGroup,
    WireError,
    WorkerDiedError,
)
from asyncrl.core.lives import keep_up

from .account import IdSet
from .commands import Frames
from .config import BufferConfig, Durability
from .encoding import JOIN_BELOW_BYTES
from .journal import Journal
from .messages import Message, Replies, Send, integer, integers, pairs
from .process import BufferSupervisor
from .stores import FetchWindow, size_of
from .waiting import PendingRequest, PendingRequests

logger = logging.getLogger(__name__)


class StoreService:
    """Payloads without a ledger, at most ``max_stored_bytes``; with a journal they survive the process."""

    def __init__(self, config: BufferConfig, *, send: Send, journal: Journal | None = None) -> None:
        self._limit = config.max_stored_bytes
        self._replies = Replies(send)
        self._journal = journal
        self._payloads: dict[int, dict[int, Frames]] = {}
        self._unread = FetchWindow(self._limit)
        self._finished = IdSet()
        self._ended: dict[int, int] = {}  # unfinished group to its last ended attempt
        self._unwritten_removals: set[int] = set()
        self._stored_bytes = 0
        self._reserved: dict[tuple[int, int], int] = {}
        self._reserving = PendingRequests(self._replies, config.request_timeout_s / 2)
        self._operations = {
            "reserve": self._reserve,
            "put_payload": self._put,
            "fetch": self._fetch,
            "reconcile": self._reconcile,
            "hello": lambda client, request: self._replies.reply(client, request.request_id),
            "remove": self._remove,
        }
        if journal is not None:
            journal.on_written = self.settle
            for key, payload in journal.recover().frames.get("payload", {}).items():
                self._keep(key >> 16, key & 0xFFFF, payload)

    def handle(self, client: bytes, request: Message) -> None:
        """Answer one request; an `AsyncRLError` becomes the reply."""
        operation = self._operations.get(request.name)
        try:
            if operation is None:
                raise WireError(f"unknown operation {request.name!r:.40} of a store server")
            operation(client, request)
        except AsyncRLError as error:
            self._replies.fail(client, request.request_id, error)

    def settle(self) -> None:
        """Reserve bytes for waiting requests, in order of arrival."""
        self._write_removals()
        if self._journal is not None and self._journal.is_grown():
            self._compact(self._journal)
        for pending in self._reserving.all():
            group_id, attempt, size = pending.fields.values()
            if self._held_bytes(group_id, attempt) + size > self._limit:
                return
            if self._is_wanted(group_id, attempt):
                self._reserved[group_id, attempt] = size
            self._reserving.remove(pending.client, pending.request_id)
            self._replies.reply(pending.client, pending.request_id, {"granted": True, "is_held": True})

    def _compact(self, journal: Journal) -> None:
        held = (
            ("payload", _key(group_id, attempt), frames)
            for group_id, attempts in self._payloads.items()
            for attempt, frames in attempts.items()
        )
        try:
            journal.compact(None, held)
        except ReplayBufferError as error:
            logger.warning("the journal was not compacted: %s", error)

    def close(self) -> None:
        """Cancel every pending request."""
        self._reserving.close()

    def _held_bytes(self, group_id: int, attempt: int) -> int:
        """Bytes stored and reserved, without the reservation of this attempt."""
        return self._stored_bytes + sum(self._reserved.values()) - self._reserved.get((group_id, attempt), 0)

    def _reserve(self, client: bytes, request: Message) -> None:
        names = ("group_id", "attempt", "num_bytes")
        fields = {name: integer(request.fields, name) for name in names}
        self._check_size(fields["num_bytes"])
        pending = PendingRequest(client=client, request_id=request.request_id, fields=fields)
        self._reserving.add(pending)

    def _check_size(self, size: int) -> None:
        if size > self._limit:
            raise ReplayBufferError(
                f"a group of {size} bytes is larger than buffer.max_stored_bytes={self._limit}; raise it"
            )

    def _put(self, client: bytes, request: Message) -> None:
        group_id, attempt = integer(request.fields, "group_id"), integer(request.fields, "attempt")
        if attempt > 0xFFFF or group_id >= 1 << 47:
            raise WireError(f"group {group_id} attempt {attempt} is out of range")
        size = size_of(request.payload)
        self._check_size(size)
        if not self._is_wanted(group_id, attempt):
            self._reserved.pop((group_id, attempt), None)
            self._replies.reply(client, request.request_id)
            return
        if self._held_bytes(group_id, attempt) + size > self._limit:
            raise StoreFull(f"{size} bytes do not fit beside {self._stored_bytes}, the limit is {self._limit}")
        self._reserved[group_id, attempt] = size
        then = partial(self._store, client, request, group_id, attempt)
        if self._journal is None or size < JOIN_BELOW_BYTES:
            then(request.payload, None)
        else:
            self._journal.keep(request.payload, then)

    def _is_wanted(self, group_id: int, attempt: int) -> bool:
        """False if the attempt is stored here, or ended by the ledger's account; the ledger then answers the put."""
        is_over = group_id in self._finished or attempt <= self._ended.get(group_id, -1)
        return not is_over and attempt not in self._payloads.get(group_id, {})

    def _store(
        self,
        client: bytes,
        request: Message,
        group_id: int,
        attempt: int,
        kept: Frames | int,
        error: ReplayBufferError | None,
    ) -> None:
        """Store a payload. The journal's thread writes a large one; a small one is part of its record."""
        self._reserved.pop((group_id, attempt), None)
        try:
            if error is not None:
                raise error
            if self._is_wanted(group_id, attempt):
                if self._journal is not None:
                    self._journal.note({("payload", _key(group_id, attempt)): kept})
                self._keep(group_id, attempt, request.payload)
            self._replies.reply(client, request.request_id)
        except ReplayBufferError as failure:
            self._replies.fail(client, request.request_id, failure)

    def _keep(self, group_id: int, attempt: int, payload: Frames) -> None:
        self._payloads.setdefault(group_id, {})[attempt] = payload
        self._unwritten_removals.discard(_key(group_id, attempt))
        self._stored_bytes += size_of(payload)

    def _fetch(self, client: bytes, request: Message) -> None:
        counts: list[int] = []
        payload: list[Any] = []
        for group_id, attempt in _attempts(request):
            frames = self._payloads.get(group_id, {}).get(attempt)
            if frames is None:
                raise UnknownGroup(f"no trajectories of group {group_id} attempt {attempt} are stored here")
            counts.append(len(frames))
            payload += frames
        self._unread.add(client, request.request_id, size_of(payload), read=integer(request.fields, "read"))
        self._replies.reply(client, request.request_id, {"counts": counts}, payload)

    def _reconcile(self, client: bytes, request: Message) -> None:
        """Drop payloads that the ledger no longer needs; reply with the groups that it expects and this store lacks."""
        self._finished, self._ended = IdSet(pairs(request.fields, "finished")), dict(pairs(request.fields, "ended"))
        held = {*self._payloads, *(group_id for group_id, _ in self._reserved)}
        for group_id in held:
            if group_id in self._finished:
                self._forget(group_id)
            elif group_id in self._ended:
                self._forget(group_id, last=self._ended[group_id])
        missing = [
            group_id for group_id, attempt in _attempts(request) if attempt not in self._payloads.get(group_id, {})
        ]
        self._replies.reply(client, request.request_id, {"groups": missing})

    def _remove(self, client: bytes, request: Message) -> None:
        for group_id in integers(request.fields, "groups"):
            self._finished.add(group_id)
            self._ended.pop(group_id, None)
            self._forget(group_id)
        for group_id, attempt in pairs(request.fields, "ended"):
            if group_id not in self._finished:
                self._ended[group_id] = max(attempt, self._ended.get(group_id, -1))
            self._forget(group_id, last=attempt)
        self._replies.reply(client, request.request_id)

    def _forget(self, group_id: int, *, last: float = math.inf) -> None:
        """Drop the payload and the reservation of a group's attempts up to ``last``."""
        attempts = self._payloads.pop(group_id, {})
        if kept := {attempt: payload for attempt, payload in attempts.items() if attempt > last}:
            self._payloads[group_id] = kept
        for attempt in attempts.keys() - kept.keys():
            self._stored_bytes -= size_of(attempts[attempt])
            if self._journal is not None:
                self._unwritten_removals.add(_key(group_id, attempt))
        for key in [key for key in self._reserved if key[0] == group_id and key[1] <= last]:
            del self._reserved[key]

    def _write_removals(self) -> None:
        """Record the dropped payloads; if the disk is full, they are recorded with later ones."""
        if self._journal is None or not self._unwritten_removals:
            return
        try:
            self._journal.note({("payload", key): 0 for key in self._unwritten_removals})
        except ReplayBufferError as error:
            logger.warning("the journal still holds %d dropped payloads: %s", len(self._unwritten_removals), error)
        else:
            self._unwritten_removals.clear()


def _key(group_id: int, attempt: int) -> int:
    return group_id << 16 | attempt


def _attempts(request: Message) -> list[tuple[int, int]]:
    """The distinct groups that a request names, and their attempts."""
    group_ids, attempts = integers(request.fields, "groups"), integers(request.fields, "attempts")
    if len(group_ids) != len(attempts) or len(set(group_ids)) != len(group_ids):
        raise WireError(f"a {request.name} must name each group once, with one attempt each")
    return list(zip(group_ids, attempts, strict=True))


class StoreServers:
    """``num_store_servers`` processes beside the ledger's server that hold the payloads; made on a running loop.

    A store server that dies or hangs is restarted at its address, up to ``buffer.restarts`` times; without a journal it
    is empty after the restart. ``on_lost`` is called when a server cannot be restarted any more. Raises `AsyncRLError`
    if a server did not start.

    Attributes:
        addresses: Addresses of the servers, by the ledger's store number.
    """

    def __init__(
        self, config: BufferConfig, *, groups_per_step: int, on_lost: Callable[[WorkerDiedError], None]
    ) -> None:
        self._on_lost = on_lost
        self._servers: list[BufferSupervisor] = []
        self._watches: list[asyncio.Task[None]] = []
        own = store_config(config)
        try:
            for number in range(config.num_store_servers):
                server = BufferSupervisor(
                    own, groups_per_step=groups_per_step, log_path=None, store=number, waits=False, on_restart=_log
                )
                self._servers.append(server)
            self.addresses = [server.read_address() for server in self._servers]
        except BaseException:
            self.close()
            raise
        self._watches = [asyncio.get_running_loop().create_task(self._watch(server)) for server in self._servers]

    def close(self) -> None:
        """End the servers."""
        for watch in self._watches:
            watch.cancel()
        for server in self._servers:
            server.stop()

    async def _watch(self, server: BufferSupervisor) -> None:
        try:
            await keep_up(server)
        except Exception as error:  # noqa: BLE001 - whatever it is, this store is lost
            self._on_lost(WorkerDiedError(str(error)))


def store_config(config: BufferConfig) -> BufferConfig:
    """The options of one store server. It begins empty if its journal has another epoch."""
    own = replace(config, port=0, bulk_port=0, num_store_servers=0)
    if config.durability is Durability.memory:  # a journal remembers the address
        own = replace(own, epoch=config.epoch or uuid.uuid4().hex[:16])
    return own


def _log(line: str) -> None:
    logger.error("%s", line)
