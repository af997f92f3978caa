"""The buffer's ZMQ sockets on an asyncio loop: `ServerSocket` (ROUTER) and `ClientSocket` (DEALER).

Both stand on `Channel`, which is woken by the socket's descriptor. The descriptor is edge-triggered, so every wake and
every send is followed by reading until nothing is left. After ``_BURST`` messages the loop gets its turn, so timers and
signals are never starved.
"""

import asyncio
import itertools
import logging
import struct
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import zmq
from zmq.utils import z85

from asyncrl.protocol.errors import (
    DeadlineError,
    RateExceeded,
    ReplayBufferError,
    WireError,
)

from . import messages
from .clock import Deadline
from .config import BufferConfig
from .encoding import JOIN_BELOW_BYTES
from .journal import Journal
from .keys import ClientKeys, ServerKeys, check_exposure, server_keys
from .messages import ACKS, OK, PUSH_ID, PUSHES, Message

logger = logging.getLogger(__name__)

_BURST = 64
_COPY_BELOW_BYTES = 64 * 1024
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_LAST = int(zmq.NOBLOCK)
_MAX_UNREAD_MESSAGES = 64
_RECONNECT_MS = 50
_RECONNECT_MAX_MS = 2000
_HEARTBEAT_MS = 5000
_BATCH = 16
_ZAP_ADDRESS = "inproc://zeromq.zap.01"


class Channel:
    """Receives into a callback, sends without blocking.

    Args:
        socket: Bound or connected; closed by `close`.
        on_message: Called on the loop with the frames of one message.
        on_burst_end: Called after the messages of one burst.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        on_message: Callable[[list[zmq.Frame]], None],
        on_burst_end: Callable[[], None] | None = None,
    ) -> None:
        self._socket = socket
        self._on_message = on_message
        self._on_burst_end = on_burst_end
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._turn: asyncio.Handle | None = None
        self._loop.add_reader(self._descriptor, self._read)
        self._schedule()

    def send(self, frames: Sequence[Any]) -> None:
        """Hand a message to ZMQ.

        Raises:
            zmq.ZMQError: the peer is unknown, or its queue is full.
        """
        last = len(frames) - 1
        for i, frame in enumerate(frames):
            small = type(frame) is bytes and len(frame) < _COPY_BELOW_BYTES
            self._socket.send(frame, _MORE if i < last else _LAST, copy=small)
        self._schedule()

    def close(self) -> None:
        """Stop reading and close the socket at once."""
        if self._turn is not None:
            self._turn.cancel()
        self._loop.remove_reader(self._descriptor)
        self._socket.close(linger=0)

    def _schedule(self) -> None:
        if self._turn is None and not self._socket.closed:
            self._turn = self._loop.call_soon(self._read)

    def _read(self) -> None:
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        num_read = self._read_burst()
        if num_read and self._on_burst_end is not None:
            self._on_burst_end()
        if num_read == _BURST:
            self._schedule()

    def _read_burst(self) -> int:
        """Hand on what has come, up to a burst; how many messages."""
        for num_read in range(_BURST):
            if self._socket.closed:
                return 0
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return num_read
            self._on_message(frames)
        return _BURST


# The server's side


class Service(Protocol):
    """What answers the requests."""

    def handle(self, client: bytes, request: Message) -> None:
        """Answer one request, now or later."""
        ...

    def settle(self) -> None:
        """Do what is to be done once for all messages that have come."""
        ...

    def close(self) -> None:
        """Stop whatever waits."""
        ...


class ServerSocket:
    """Binds a ROUTER socket and serves on it until `close`; made on a running loop.

    Args:
        config: Options.
        make_service: Builds what answers the requests, which sends through the endpoint it is given.
        journal: Remembers the address, so that a server started again is found where it was.
    """

    def __init__(
        self, config: BufferConfig, *, make_service: "Callable[[ServerSocket], Service]", journal: Journal | None
    ) -> None:
        check_exposure(config.host, config.keys)
        self._context = zmq.Context()
        self._gate: Gate | None = None
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, config.max_message_bytes)
        socket.setsockopt(zmq.RCVHWM, _MAX_UNREAD_MESSAGES)
        if config.keys:
            keys = server_keys(Path(config.keys))
            self._gate = Gate(self._context, keys, self._count_unknown_key)
            secure_server(socket, keys)
        self._journal = journal
        self.num_malformed = self.num_unsent = self.num_unknown_keys = self.num_over_rate = 0
        self._outbox: dict[bytes, list[Message]] = {}
        self._flush_handle: asyncio.Handle | None = None
        self._set_heartbeat(socket, config)
        self._limit = RateLimit(config.max_requests_per_s)
        self._service = make_service(self)
        self.address = self._bind(socket, config)
        self._channel = Channel(socket, self._on_message, self._on_burst_end)

    @staticmethod
    def _set_heartbeat(socket: zmq.Socket[bytes], config: BufferConfig) -> None:
        """Have ZMQ close connections whose other end is gone without a word."""
        beat_ms = max(1, int(config.heartbeat_s * 1000))
        socket.setsockopt(zmq.HEARTBEAT_IVL, beat_ms)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 4 * beat_ms)

    def _bind(self, socket: zmq.Socket[bytes], config: BufferConfig) -> str:
        """Bind the configured port, or the one that an earlier server of this journal had, or a free one."""
        address = f"tcp://{config.host}:{config.port or '*'}"
        known = self._journal.read("address") if self._journal is not None else None
        if known and not config.port:
            address = known
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            raise ValueError(f"the buffer cannot bind {address}: {error.strerror}; set buffer.port") from error
        bound = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        if self._journal is not None and bound != known:
            self._journal.write("address", bound)
        return bound

    def counters(self) -> dict[str, int]:
        """What was turned away, or could not be delivered."""
        return {
            "malformed": self.num_malformed,
            "unsent": self.num_unsent,
            "unknown_keys": self.num_unknown_keys,
            "over_rate": self.num_over_rate,
        }

    def _count_unknown_key(self) -> None:
        self.num_unknown_keys += 1

    def close(self) -> None:
        """Stop serving; held requests stay unanswered."""
        self._service.close()
        if self._flush_handle is not None:
            self._flush_handle.cancel()
        self._channel.close()
        if self._gate is not None:
            self._gate.close()
        if self._journal is not None:
            self._journal.close()
        self._context.destroy(linger=0)

    def _on_message(self, frames: list[zmq.Frame]) -> None:
        client = frames[0].bytes
        try:
            requests = messages.unbatch(messages.parse(frames[1:]))
        except WireError as error:
            self.num_malformed += 1
            self.send(client, Message.of_error(messages.PUSH_ID, error))
            return
        for request in requests:
            if self._limit.allows(client):
                self._service.handle(client, request)
            else:
                self.num_over_rate += 1
                self.send(client, Message.of_error(request.request_id, self._limit.error()))
        if len(requests) > 1:
            self._on_burst_end()  # so that a producer makes its next batch while the one behind this is read

    def _on_burst_end(self) -> None:
        self._service.settle()
        self._flush()

    def send(self, client: bytes, message: Message) -> None:
        """Send to a client when the messages that have come are read, so that acknowledgements travel together."""
        if self._flush_handle is None:
            self._flush_handle = asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.setdefault(client, []).append(message)

    def _flush(self) -> None:
        if self._flush_handle is not None:
            self._flush_handle.cancel()
            self._flush_handle = None
        outbox, self._outbox = self._outbox, {}
        for client, replies in outbox.items():
            for message in messages.coalesce(replies):
                self._send_now(client, message)

    def _send_now(self, client: bytes, message: Message) -> None:
        """One that is gone, or reads nothing, asks again when it is back."""
        try:
            self._channel.send([client, *message.frames()])
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self.num_unsent += 1


class RateLimit:
    """Counts requests of each client within a second.

    Args:
        per_second: Most requests of one client.
    """

    def __init__(self, per_second: int) -> None:
        self._per_second = per_second
        self._counts: Counter[bytes] = Counter()
        self._since = 0.0

    def allows(self, client: bytes) -> bool:
        """Count a request; False when its client has had its share of this second."""
        now = time.monotonic()
        if now - self._since >= 1.0:
            self._since = now
            self._counts.clear()
        self._counts[client] += 1
        return self._counts[client] <= self._per_second

    def error(self) -> RateExceeded:
        """What a client over its rate is told."""
        return RateExceeded(
            f"more than {self._per_second} requests came from this client within a second (buffer.max_requests_per_s); "
            "this one was not answered, send it again later"
        )


class Gate:
    """Answers ZMQ's question (ZAP, RFC 27) whether a key may enter.

    Args:
        context: Of the socket to guard; make the gate before binding it.
        keys: Whom to let in.
        on_refused: Called for each key turned away.
    """

    def __init__(self, context: zmq.Context[Any], keys: ServerKeys, on_refused: Callable[[], None]) -> None:
        self._allowed = z85.decode(keys.client_public)
        self._on_refused = on_refused
        socket = context.socket(zmq.ROUTER)
        socket.bind(_ZAP_ADDRESS)
        self._channel = Channel(socket, self._answer)

    def close(self) -> None:
        """Stop answering."""
        self._channel.close()

    def _answer(self, frames: list[zmq.Frame]) -> None:
        parts = [frame.bytes for frame in frames]
        sender, empty, version, request_id = parts[:4]
        allowed = len(parts) == 9 and parts[7] == b"CURVE" and parts[8] == self._allowed
        if not allowed:
            self._on_refused()
            logger.warning("refused a client with an unknown key, from %s", parts[5].decode(errors="replace"))
        status, text = (b"200", b"OK") if allowed else (b"400", b"unknown key")
        self._channel.send([sender, empty, version, request_id, status, text, b"", b""])


def secure_server(socket: zmq.Socket[Any], keys: ServerKeys) -> None:
    """Make a socket that is to be bound speak CURVE."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt_string(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt_string(zmq.CURVE_SECRETKEY, keys.secret)
    socket.setsockopt_string(zmq.ZAP_DOMAIN, "buffer")


# The client's side


def secure_client(socket: zmq.Socket[Any], keys: ClientKeys) -> None:
    """Make a socket that is to be connected speak CURVE."""
    socket.setsockopt_string(zmq.CURVE_SERVERKEY, keys.server_public)
    socket.setsockopt_string(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt_string(zmq.CURVE_SECRETKEY, keys.secret)


def connect(
    context: zmq.Context[Any], address: str, keys: ClientKeys | None
) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """A DEALER with an identity of its own, and the monitor that speaks when it is connected or cut off.

    Raises:
        ValueError: the address is none.
    """
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
    try:
        socket.connect(address)
    except zmq.ZMQError as error:
        socket.disable_monitor()
        monitor.close()
        socket.close()
        raise ValueError(f"{address!r} is not the address of a buffer; use one like tcp://HOST:PORT") from error
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


class ClientSocket:
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
