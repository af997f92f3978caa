"""What a store server does: it keeps payloads by group and attempt, for a ledger that is elsewhere.

A payload is stored before the ledger hears of it and removed when the ledger is done with its group, so a client that
dies in between leaves one that the ledger's next removal, or the end of the run, takes away.
"""

from collections.abc import Callable
from typing import Any

from asyncrl.protocol.errors import AsyncRLError, ReplayBufferError, StoreFull, UnknownGroup, WireError

from .config import BufferConfig
from .idset import IdSet
from .journal import Frames, Journal
from .messages import OK, PUSH_ID, SPACE, Message, integer, integers
from .shelves import size_of
from .unread import Unread


class StoreService:
    """Payloads without a ledger.

    Args:
        config: Options; each store server may hold ``max_stored_bytes``.
        send: Sends one message to one client.
        journal: Where payloads survive the process; None keeps them in memory only.
    """

    def __init__(
        self, config: BufferConfig, *, send: Callable[[bytes, Message], None], journal: Journal | None = None
    ) -> None:
        self._limit = config.max_stored_bytes
        self._send = send
        self._journal = journal
        self._payloads: dict[int, dict[int, Frames]] = {}
        self._unread = Unread(self._limit)
        self._finished = IdSet()
        self._stored_bytes = 0
        self._refused: set[bytes] = set()
        self._operations = {"put_payload": self._put, "fetch": self._fetch, "remove": self._remove}
        if journal is not None:
            for key, payload in journal.recover().frames.get("payload", {}).items():
                self._keep(key >> 16, key & 0xFFFF, payload)

    def handle(self, client: bytes, request: Message) -> None:
        """Answer one request; an error of this system becomes the reply."""
        try:
            operation = self._operations.get(request.name)
            if operation is None:
                raise WireError(f"unknown operation {request.name!r:.40} of a store server")
            fields, payload = operation(client, request)
            self._send(client, Message(name=OK, request_id=request.request_id, fields=fields, payload=payload))
        except AsyncRLError as error:
            self._send(client, Message.of_error(request.request_id, error))

    def settle(self) -> None:
        """Nothing is left to do: each request is answered by itself."""

    def close(self) -> None:
        """Nothing waits here."""

    def _put(self, client: bytes, request: Message) -> tuple[dict[str, Any], Frames]:
        group_id, attempt = integer(request.fields, "group_id"), integer(request.fields, "attempt")
        if attempt > 0xFFFF or group_id >= 1 << 47:
            raise WireError(f"group {group_id} attempt {attempt} is out of range")
        if group_id in self._finished:
            return {}, ()  # nothing of it is kept; the ledger says what became of the put
        size = size_of(request.payload)
        if size > self._limit:
            raise ReplayBufferError(
                f"a group of {size} bytes is larger than buffer.max_stored_bytes={self._limit}; raise it"
            )
        if attempt not in self._payloads.get(group_id, {}):
            if self._stored_bytes + size > self._limit:
                self._refused.add(client)
                raise StoreFull(f"{size} bytes do not fit beside {self._stored_bytes}, the limit is {self._limit}")
            if self._journal is not None:
                self._journal.keep("payload", group_id << 16 | attempt, request.payload)
            self._keep(group_id, attempt, request.payload)
        return {}, ()

    def _keep(self, group_id: int, attempt: int, payload: Frames) -> None:
        self._payloads.setdefault(group_id, {})[attempt] = payload
        self._stored_bytes += size_of(payload)

    def _fetch(self, client: bytes, request: Message) -> tuple[dict[str, Any], Frames]:
        group_ids, attempts = integers(request.fields, "groups"), integers(request.fields, "attempts")
        if len(group_ids) != len(attempts) or len(set(group_ids)) != len(group_ids):
            raise WireError("a fetch names each group once, and one attempt for each")
        counts: list[int] = []
        payload: list[Any] = []
        for group_id, attempt in zip(group_ids, attempts, strict=True):
            frames = self._payloads.get(group_id, {}).get(attempt)
            if frames is None:
                raise UnknownGroup(f"no trajectories of group {group_id} attempt {attempt} are stored here")
            counts.append(len(frames))
            payload += frames
        self._unread.add(client, request.request_id, size_of(payload), read=integer(request.fields, "read"))
        return {"counts": counts}, payload

    def _remove(self, client: bytes, request: Message) -> tuple[dict[str, Any], Frames]:
        for group_id in integers(request.fields, "groups"):
            self._finished.add(group_id)
            for attempt, payload in self._payloads.pop(group_id, {}).items():
                self._stored_bytes -= size_of(payload)
                if self._journal is not None:
                    self._journal.discard("payload", group_id << 16 | attempt)
        for waiting in self._refused:
            self._send(waiting, Message(name=SPACE, request_id=PUSH_ID))
        self._refused.clear()
        return {}, ()
