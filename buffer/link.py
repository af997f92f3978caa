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
from .deadline import Deadline
from .keys import ClientKeys, secure_client
from .messages import ACKS, OK, PUSH_ID, PUSHES, Message
from .parcels import JOIN_BELOW_BYTES

_RECONNECT_MS = 50
_RECONNECT_MAX_MS = 2000
_HEARTBEAT_MS = 5000
_BATCH = 16


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

    caller: str
    request: Message
    reply: asyncio.Future[Message]
    due: float


class Link:
    """One connection; made on a running loop, and of use on that loop only.

    Args:
        address: Where the server listens.
        timeout_s: Deadline of each request.
        keys: CURVE keys, where the server has them.
        on_push: Called with each message that answers no request.

    Attributes:
        is_connected: Whether the server can be reached now.
        num_read: Largest request id of a fetch whose reply has come, also if nobody waited for it any more.
        loop: The loop that it lives on.
    """

    def __init__(
        self, address: str, *, timeout_s: float, keys: ClientKeys | None, on_push: Callable[[Message], None]
    ) -> None:
        self.address = address
        self.is_connected = False
        self.num_read = 0
        self._timeout_s = timeout_s
        self._on_push = on_push
        self.loop = asyncio.get_running_loop()
        self._pending: dict[int, _Pending] = {}
        self._outbox: list[Message] = []
        self._flush_handle: asyncio.Handle | None = None
        self._deadline = Deadline(self._miss_deadlines)
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
        request = Message(name=name, request_id=request_id, fields=fields, payload=payload)
        try:
            reply = await self._begin(request, caller or name)
        finally:
            self._end(request_id)
        if reply.name != OK:
            raise messages.error_of(reply)
        return reply

    def post(self, name: str, fields: Mapping[str, Any]) -> None:
        """Send a request whose reply nobody waits for; after a reconnect it is sent again like any other."""
        if self._closed:
            return
        request = Message(name=name, request_id=next(self._ids), fields=fields)

        def forget(reply: asyncio.Future[Message]) -> None:
            self._end(request.request_id)
            if not reply.cancelled():
                reply.exception()

        self._begin(request, name).add_done_callback(forget)

    def _begin(self, request: Message, caller: str) -> asyncio.Future[Message]:
        reply: asyncio.Future[Message] = self.loop.create_future()
        due = self.loop.time() + self._timeout_s
        self._pending[request.request_id] = _Pending(caller=caller, request=request, reply=reply, due=due)
        self._deadline.at(due)
        self._send(request)
        return reply

    def _send(self, request: Message) -> None:
        """Send a large or lone request at once, and small ones together with the others that are made in this turn."""
        if len(self._pending) == 1 or sum(map(len, request.payload)) >= JOIN_BELOW_BYTES:
            self._channel.send(request.frames())
            return
        self._outbox.append(request)
        if len(self._outbox) == _BATCH:
            self._flush()
        elif self._flush_handle is None:
            self._flush_handle = self.loop.call_soon(self._flush)

    def _flush(self) -> None:
        if self._flush_handle is not None:
            self._flush_handle.cancel()
            self._flush_handle = None
        outbox, self._outbox = self._outbox, []
        if outbox:
            message = outbox[0] if len(outbox) == 1 else messages.batch(outbox)
            self._channel.send(message.frames())

    def _end(self, request_id: int) -> None:
        self._pending.pop(request_id, None)

    def _miss_deadlines(self) -> None:
        """Fail what is overdue; all requests have as long, so that the first are due first."""
        now = self.loop.time()
        for pending in self._pending.values():
            if pending.due > now:
                self._deadline.at(pending.due)
                return
            if not pending.reply.done():
                pending.reply.set_exception(deadline_error(pending.caller, self.address, self._timeout_s))

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
        self._deadline.close()
        if self._flush_handle is not None:
            self._flush_handle.cancel()
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
                self._channel.send(pending.request.frames())

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
            if "counts" in message.fields:
                self.num_read = max(self.num_read, message.request_id)
            self._resolve(message.request_id, message)

    def _resolve(self, request_id: int, reply: Message) -> None:
        pending = self._pending.get(request_id)
        if pending is not None and not pending.reply.done():
            pending.reply.set_result(reply)
