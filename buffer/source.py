"""The blocking client of the buffer, for learner ranks."""

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import zmq

from asyncrl.protocol.types import BufferStats, TrajectoryGroup

from . import messages
from .keys import ClientKeys
from .link import connect, deadline_error
from .messages import OK, PUSH_ID, Message


class SyncBufferClient:
    """Implements the port `TrajectorySource`. One thread at a time.

    Args:
        address: Where the server listens.
        request_timeout_s: Deadline of each request.
        keys: CURVE keys, where the server has them.
    """

    def __init__(self, address: str, *, request_timeout_s: float = 30.0, keys: ClientKeys | None = None) -> None:
        self.address = address
        self._timeout_s = request_timeout_s
        self._keys = keys
        self._context: zmq.Context[Any] = zmq.Context()
        self._link = _SyncLink(self._context, address, request_timeout_s, keys)
        self._stores: list[_SyncLink] = []

    def fetch(self, group_ids: Sequence[int]) -> list[TrajectoryGroup]:
        """See `TrajectorySource.fetch`. Where store servers hold the payloads, all are asked at once.

        Raises:
            UnknownGroup: a group is not stored.
            DeadlineError: no answer came in time.
        """
        reply = self._link.request("fetch", {"groups": list(group_ids)})
        if "stores" not in reply.fields:
            return messages.groups_of(reply, group_ids)
        if not self._stores:
            addresses = reply.fields["stores"]
            self._stores = [_SyncLink(self._context, a, self._timeout_s, self._keys) for a in addresses]
        asked = messages.split_by_store(group_ids, messages.integers(reply.fields, "attempts"), len(self._stores))
        for store, fields in zip(self._stores, asked, strict=True):
            store.send("fetch", fields)
        return messages.join_from_stores([store.receive() for store in self._stores], group_ids)

    def stats(self) -> BufferStats:
        """The ledger now."""
        return messages.stats_of(self._link.request("stats", {}).fields)

    def close(self) -> None:
        """Close the connection."""
        self._context.destroy(linger=0)


class _SyncLink:
    """One connection with at most one request on its way."""

    def __init__(self, context: zmq.Context[Any], address: str, timeout_s: float, keys: ClientKeys | None) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._ids = itertools.count(1)
        self._request = Message(name="", request_id=0)
        self._num_connects = 0
        self._socket, self._monitor = connect(context, address, keys)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    def request(self, name: str, fields: Mapping[str, Any]) -> Message:
        """Send a request and wait for its reply."""
        self.send(name, fields)
        return self.receive()

    def send(self, name: str, fields: Mapping[str, Any]) -> None:
        """Send a request."""
        self._request = Message(name=name, request_id=next(self._ids), fields=fields)
        self._socket.send_multipart(self._request.frames())

    def receive(self) -> Message:
        """Wait for the reply to what was sent last."""
        deadline = time.monotonic() + self._timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            ready = dict(self._poller.poll(int(left_s * 1000) + 1))
            if self._monitor in ready:
                self._note_connected()
            if self._socket in ready:
                reply = messages.parse_reply(self._socket.recv_multipart(copy=False))
                if reply.request_id not in (self._request.request_id, PUSH_ID):
                    continue
                if reply.name != OK:
                    raise messages.error_of(reply)
                return reply
        raise deadline_error(self._request.name, self._address, self._timeout_s)

    def _note_connected(self) -> None:
        """Send the request again after a reconnect: the connection before it may have lost it."""
        self._monitor.recv_multipart()
        self._num_connects += 1
        if self._num_connects > 1:
            self._socket.send_multipart(self._request.frames())
