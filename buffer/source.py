"""The blocking client of the buffer, for learner ranks."""

import itertools
import time
from collections.abc import Sequence
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
        self._ids = itertools.count(1)
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket, self._monitor = connect(self._context, address, keys)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._num_connects = 0

    def fetch(self, group_ids: Sequence[int]) -> list[TrajectoryGroup]:
        """See `TrajectorySource.fetch`.

        Raises:
            UnknownGroup: a group is not stored.
            DeadlineError: no answer came in time.
        """
        return messages.groups_of(self._request("fetch", {"groups": list(group_ids)}), group_ids)

    def stats(self) -> BufferStats:
        """The ledger now."""
        return messages.stats_of(self._request("stats", {}).fields)

    def close(self) -> None:
        """Close the connection."""
        self._context.destroy(linger=0)

    def _request(self, name: str, fields: dict[str, Any]) -> Message:
        request_id = next(self._ids)
        frames = Message(name=name, request_id=request_id, fields=fields).frames()
        self._socket.send_multipart(frames)
        deadline = time.monotonic() + self._timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            ready = dict(self._poller.poll(int(left_s * 1000) + 1))
            if self._monitor in ready:
                self._note_connected(frames)
            if self._socket in ready:
                reply = messages.parse(self._socket.recv_multipart(copy=False))
                if reply.request_id not in (request_id, PUSH_ID):
                    continue
                if reply.name != OK:
                    raise messages.error_of(reply)
                return reply
        raise deadline_error(name, self.address, self._timeout_s)

    def _note_connected(self, frames: list[Any]) -> None:
        """Send the request again after a reconnect: the connection before it may have lost it."""
        self._monitor.recv_multipart()
        self._num_connects += 1
        if self._num_connects > 1:
            self._socket.send_multipart(frames)
