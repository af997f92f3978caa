"""The blocking client of the buffer, for learner ranks."""

import itertools
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import zmq

from asyncrl.protocol.errors import DeadlineError, ReplayBufferError, StoreFull
from asyncrl.protocol.trajectory import TrajectoryGroup
from asyncrl.protocol.types import BufferStats

from . import messages
from .fetching import groups_of, join_from_stores, split_by_store
from .keys import ClientKeys
from .link import connect, deadline_error, is_connected
from .messages import OK, PUSH_ID, PUSHES, Message
from .summaries import stats_of


class SyncBufferClient:
    """Implements the port `TrajectorySource`. Threads take turns; a forked process makes a client of its own.

    Args:
        address: Where the server listens.
        request_timeout_s: Deadline of each request.
        keys: CURVE keys, where the server has them.
    """

    def __init__(self, address: str, *, request_timeout_s: float = 30.0, keys: ClientKeys | None = None) -> None:
        self.address = address
        self._timeout_s = request_timeout_s
        self._keys = keys
        self._link = _SyncLink(address, request_timeout_s, keys)
        self._stores: list[_SyncLink] = []
        self._turn = threading.Lock()
        self._process = os.getpid()

    def fetch(self, group_ids: Sequence[int]) -> list[TrajectoryGroup]:
        """See `TrajectorySource.fetch`. Where store servers hold the payloads, all are asked at once.

        Raises:
            UnknownGroup: a group is not stored.
            DeadlineError: no answer came in time.
        """
        with self._in_turn("fetch"):
            reply = _fetch_from([self._link], [{"groups": list(group_ids)}])[0]
            if "stores" not in reply.fields:
                return groups_of(reply, group_ids)
            if not self._stores:
                self._stores = [_SyncLink(address, self._timeout_s, self._keys) for address in reply.fields["stores"]]
            asked = split_by_store(group_ids, messages.integers(reply.fields, "attempts"), len(self._stores))
            return join_from_stores(_fetch_from(self._stores, asked), group_ids)

    def stats(self) -> BufferStats:
        """The ledger now."""
        with self._in_turn("stats"):
            self._link.send("stats", {})
            [reply] = _checked([self._link.receive()])
            return stats_of(reply.fields)

    @contextmanager
    def _in_turn(self, call: str) -> Iterator[None]:
        """Let one thread in at a time, as sockets need it, and no process but the one that made them."""
        if os.getpid() != self._process:
            raise ReplayBufferError(
                f"buffer.{call}: the client of the buffer at {self.address} was made in process {self._process}, and "
                f"this is {os.getpid()}; make one in each process"
            )
        if not self._turn.acquire(timeout=self._timeout_s):
            raise DeadlineError(
                f"buffer.{call}: other threads had this client for {self._timeout_s:.1f} s; give each one"
            )
        try:
            yield
        finally:
            self._turn.release()

    def close(self) -> None:
        """Close the connection."""
        if os.getpid() == self._process:
            for link in (self._link, *self._stores):
                link.close()


def _fetch_from(links: "Sequence[_SyncLink]", asked: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Ask all at once, and wait for all, also where one fails."""
    told = [link.num_read for link in links]
    for link, fields in zip(links, asked, strict=True):
        link.send("fetch", {**fields, "read": link.num_read})
    replies = [link.receive() for link in links]
    for i, (link, fields) in enumerate(zip(links, asked, strict=True)):
        if replies[i].name == StoreFull.__name__ and link.num_read > told[i]:
            link.send("fetch", {**fields, "read": link.num_read})
            replies[i] = link.receive()
    return _checked(replies)


def _checked(replies: list[Message]) -> list[Message]:
    """Raise the first error among replies."""
    for reply in replies:
        if reply.name != OK:
            raise messages.error_of(reply)
    return replies


class _SyncLink:
    """One connection with at most one request on its way."""

    def __init__(self, address: str, timeout_s: float, keys: ClientKeys | None) -> None:
        self.num_read = 0
        self._address = address
        self._timeout_s = timeout_s
        self._ids = itertools.count(1)
        self._request = Message(name="", request_id=0)
        self._num_connects = 0
        self._socket, self._monitor = connect(zmq.Context.instance(), address, keys)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    def send(self, name: str, fields: Mapping[str, Any]) -> None:
        """Send a request."""
        if self._socket.closed:
            raise ReplayBufferError(f"the client of the buffer at {self._address} is closed")
        self._request = Message(name=name, request_id=next(self._ids), fields=fields)
        self._socket.send_multipart(self._request.frames())

    def receive(self) -> Message:
        """Wait for the reply to what was sent last, which may be an error."""
        deadline = time.monotonic() + self._timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            ready = dict(self._poller.poll(int(left_s * 1000) + 1))
            if self._monitor in ready:
                self._note_event()
            if self._socket in ready and (reply := self._read()) is not None:
                return reply
        raise deadline_error(self._request.name, self._address, self._timeout_s)

    def _read(self) -> Message | None:
        """The reply, if that is what came; a late one to an earlier request is passed over."""
        reply = messages.parse_reply(self._socket.recv_multipart(copy=False))
        if "counts" in reply.fields:
            self.num_read = max(self.num_read, reply.request_id)
        if reply.request_id not in (self._request.request_id, PUSH_ID) or reply.name in PUSHES:
            return None
        return reply

    def _note_event(self) -> None:
        """Send the request again after a reconnect: the connection before it may have lost it."""
        if not is_connected(self._monitor.recv_multipart()):
            return
        self._num_connects += 1
        if self._num_connects > 1:
            self._socket.send_multipart(self._request.frames())

    def close(self) -> None:
        """Close the connection."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
