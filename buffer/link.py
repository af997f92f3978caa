"""A client's connection to one server, for asyncio: requests, replies, deadlines, resending after a reconnect."""

import asyncio
import itertools
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from asyncrl.protocol.errors import DeadlineError, ReplayBufferError, WireError

from . import messages
from .channel import Channel
from .keys import ClientKeys, secure_client
from .messages import ACKS, OK, PUSH_ID, PUSHES, Message

_RECONNECT_MS = 50
_RECONNECT_MAX_MS = 200


def connect(
    context: zmq.Context[Any], address: str, keys: ClientKeys | None
) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """A DEALER with an identity of its own, and the monitor that speaks whenever it is connected."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IDENTITY, uuid.uuid4().bytes)
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
    socket.setsockopt(zmq.SNDHWM, 0)
    if keys is not None:
        secure_client(socket, keys)
    monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    socket.connect(address)
    return socket, monitor


def deadline_error(name: str, address: str, timeout_s: float) -> DeadlineError:
    """The error of a request that nobody answered."""
    return DeadlineError(
        f"buffer.{name}: no answer from {address} within {timeout_s:.1f} s; the server is gone or overloaded, or "
        "refuses this client's key; its log says more"
    )


@dataclass(kw_only=True, slots=True, eq=False)
class _Pending:
    """A request without a reply yet."""

    name: str
    frames: list[Any]
    reply: asyncio.Future[Message]


class Link:
    """One connection; made on a running loop, and of use on that loop only.

    Args:
        address: Where the server listens.
        timeout_s: Deadline of each request.
        keys: CURVE keys, where the server has them.
        on_push: Called with each message that answers no request.
    """

    def __init__(
        self, address: str, *, timeout_s: float, keys: ClientKeys | None, on_push: Callable[[Message], None]
    ) -> None:
        self.address = address
        self._timeout_s = timeout_s
        self._on_push = on_push
        self._pending: dict[int, _Pending] = {}
        self._ids = itertools.count(1)
        self._num_connects = 0
        self._closed = False
        self._context: zmq.Context[Any] = zmq.Context()
        socket, monitor = connect(self._context, address, keys)
        self._channel = Channel(socket, self._on_message)
        self._monitor = Channel(monitor, self._on_connected)

    def next_id(self) -> int:
        """A request id, for a request that may have to be cancelled."""
        return next(self._ids)

    async def request(
        self,
        name: str,
        fields: dict[str, Any],
        payload: Sequence[Any] = (),
        *,
        request_id: int | None = None,
        caller: str = "",
    ) -> Message:
        """Send a request and wait for its reply; ``caller`` is the call that an error names, if not the request's.

        Raises:
            DeadlineError: no reply came in time.
            ReplayBufferError: the server answered with an error, or the link was closed.
        """
        if self._closed:
            raise self._closed_error(name)
        request_id = next(self._ids) if request_id is None else request_id
        frames = Message(name=name, request_id=request_id, fields=fields, payload=payload).frames()
        loop = asyncio.get_running_loop()
        pending = _Pending(name=caller or name, frames=frames, reply=loop.create_future())
        self._pending[request_id] = pending
        deadline = loop.call_later(self._timeout_s, self._miss_deadline, pending)
        try:
            self._channel.send(frames)
            reply = await pending.reply
        finally:
            deadline.cancel()
            del self._pending[request_id]
        if reply.name != OK:
            raise messages.error_of(reply)
        return reply

    def _miss_deadline(self, pending: _Pending) -> None:
        if not pending.reply.done():
            pending.reply.set_exception(deadline_error(pending.name, self.address, self._timeout_s))

    def post(self, name: str, fields: dict[str, Any]) -> None:
        """Send a request whose reply nobody waits for."""
        if not self._closed:
            self._channel.send(Message(name=name, request_id=next(self._ids), fields=fields).frames())

    def close(self) -> None:
        """Close the connection; requests that wait raise at once."""
        if self._closed:
            return
        self._closed = True
        self._fail_all(self._closed_error("a call"))
        self._monitor.close()
        self._channel.close()
        self._context.destroy(linger=0)

    def _closed_error(self, what: str) -> ReplayBufferError:
        return ReplayBufferError(f"the client of the buffer at {self.address} was closed while {what} waited")

    def _on_connected(self, frames: list[zmq.Frame]) -> None:
        """Send again what has no reply: the connection before this one may have lost it."""
        self._num_connects += 1
        if self._num_connects > 1:
            for pending in self._pending.values():
                self._channel.send(pending.frames)

    def _on_message(self, frames: list[zmq.Frame]) -> None:
        try:
            message = messages.parse_reply(frames)
        except WireError as error:
            self._fail_all(error)
            return
        if message.name == ACKS:
            for request_id in messages.integers(message.fields, "ids"):
                self._resolve(request_id, Message(name=OK, request_id=request_id))
        elif message.request_id == PUSH_ID and message.name in PUSHES:
            self._on_push(message)
        elif message.request_id == PUSH_ID:
            self._fail_all(messages.error_of(message))
        else:
            self._resolve(message.request_id, message)

    def _resolve(self, request_id: int, reply: Message) -> None:
        pending = self._pending.get(request_id)
        if pending is not None and not pending.reply.done():
            pending.reply.set_result(reply)

    def _fail_all(self, error: Exception) -> None:
        for pending in self._pending.values():
            if not pending.reply.done():
                pending.reply.set_exception(error)
