"""A client's connection to one server, for asyncio: requests, replies, deadlines, resending after a reconnect."""

import asyncio
import itertools
import struct
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from asyncrl.protocol.errors import DeadlineError, ReplayBufferError, WireError

from . import messages
from .channel import Channel
from .keys import ClientKeys, secure_client
from .messages import ACKS, OK, PUSH_ID, PUSHES, Message

_RECONNECT_MS = 50
_RECONNECT_MAX_MS = 2000
_HEARTBEAT_MS = 5000


def connect(
    context: zmq.Context[Any], address: str, keys: ClientKeys | None
) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """A DEALER with an identity of its own, and the monitor that speaks when it is connected or cut off."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IDENTITY, uuid.uuid4().bytes)
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 4 * _HEARTBEAT_MS)
    socket.setsockopt(zmq.SNDHWM, 0)
    if keys is not None:
        secure_client(socket, keys)
    monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
    socket.connect(address)
    return socket, monitor


def is_connected(event: Sequence[Any]) -> bool:
    """Whether a monitor's message says that the connection was made, rather than lost."""
    (number,) = struct.unpack_from("=H", bytes(event[0]))
    return number == zmq.EVENT_HANDSHAKE_SUCCEEDED


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
    deadline: asyncio.TimerHandle


class Link:
    """One connection; made on a running loop, and of use on that loop only.

    Args:
        address: Where the server listens.
        timeout_s: Deadline of each request.
        keys: CURVE keys, where the server has them.
        on_push: Called with each message that answers no request.

    Attributes:
        is_connected: Whether the server can be reached now.
        num_read: Largest request id of a fetch that was answered.
    """

    def __init__(
        self, address: str, *, timeout_s: float, keys: ClientKeys | None, on_push: Callable[[Message], None]
    ) -> None:
        self.address = address
        self.is_connected = False
        self.num_read = 0
        self._timeout_s = timeout_s
        self._on_push = on_push
        self._loop = asyncio.get_running_loop()
        self._pending: dict[int, _Pending] = {}
        self._ids = itertools.count(1)
        self._num_connects = 0
        self._closed = False
        self._socket, monitor = connect(zmq.Context.instance(), address, keys)
        self._channel = Channel(self._socket, self._on_message)
        self._monitor = Channel(monitor, self._on_event)

    def next_id(self) -> int:
        """A request id, for a request that may have to be cancelled."""
        return next(self._ids)

    async def request(
        self,
        name: str,
        fields: Mapping[str, Any],
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
        try:
            reply = await self._begin(request_id, frames, caller or name)
        finally:
            self._end(request_id)
        if reply.name != OK:
            raise messages.error_of(reply)
        return reply

    def post(self, name: str, fields: Mapping[str, Any]) -> None:
        """Send a request whose reply nobody waits for; after a reconnect it is sent again like any other."""
        if self._closed:
            return
        request_id = next(self._ids)
        frames = Message(name=name, request_id=request_id, fields=fields).frames()

        def forget(reply: asyncio.Future[Message]) -> None:
            self._end(request_id)
            if not reply.cancelled():
                reply.exception()

        self._begin(request_id, frames, name).add_done_callback(forget)

    def _begin(self, request_id: int, frames: list[Any], name: str) -> asyncio.Future[Message]:
        reply: asyncio.Future[Message] = self._loop.create_future()
        deadline = self._loop.call_later(self._timeout_s, self._miss_deadline, reply, name)
        self._pending[request_id] = _Pending(name=name, frames=frames, reply=reply, deadline=deadline)
        self._channel.send(frames)
        return reply

    def _end(self, request_id: int) -> None:
        pending = self._pending.pop(request_id, None)
        if pending is not None:
            pending.deadline.cancel()

    def _miss_deadline(self, reply: asyncio.Future[Message], name: str) -> None:
        if not reply.done():
            reply.set_exception(deadline_error(name, self.address, self._timeout_s))

    def fail_all(self, error: Exception) -> None:
        """Let every request that waits raise ``error``."""
        for pending in self._pending.values():
            if not pending.reply.done():
                pending.reply.set_exception(error)

    def close(self) -> None:
        """Close the connection; requests that wait raise at once."""
        if self._closed:
            return
        self._closed = True
        self.fail_all(self._closed_error("a call"))
        self._socket.disable_monitor()  # first, or ZMQ's thread would wait for somebody to read its last events
        self._monitor.close()
        self._channel.close()

    def _closed_error(self, what: str) -> ReplayBufferError:
        return ReplayBufferError(f"the client of the buffer at {self.address} was closed while {what} waited")

    def _on_event(self, event: list[zmq.Frame]) -> None:
        """Send again what has no reply once the connection is back: the one before may have lost it."""
        self.is_connected = is_connected(event)
        if not self.is_connected:
            return
        self._num_connects += 1
        if self._num_connects > 1:
            for pending in self._pending.values():
                self._channel.send(pending.frames)

    def _on_message(self, frames: list[zmq.Frame]) -> None:
        try:
            message = messages.parse_reply(frames)
        except WireError as error:
            self.fail_all(error)
            return
        if message.name == ACKS:
            for request_id in messages.integers(message.fields, "ids"):
                self._resolve(request_id, Message(name=OK, request_id=request_id))
        elif message.request_id == PUSH_ID and message.name in PUSHES:
            self._on_push(message)
        elif message.request_id == PUSH_ID:
            self.fail_all(messages.error_of(message))
        else:
            self._resolve(message.request_id, message)

    def _resolve(self, request_id: int, reply: Message) -> None:
        pending = self._pending.get(request_id)
        if pending is not None and not pending.reply.done():
            pending.reply.set_result(reply)
