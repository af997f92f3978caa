"""A client's connections to one server, on asyncio: requests, replies, deadlines, resending after a reconnect.

The control socket requests the run's epoch and the bulk port. Then the bulk socket connects and greets, and the server
answers. A request waits for the steps that it needs, under its own deadline. Each transferred chunk of the request
restarts the deadline.
"""

import asyncio
import itertools
import struct
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from asyncrl.core.errors import DeadlineError, NotAllowed, ReplayBufferError, WireError

from . import messages
from .encoding import JOIN_BELOW_BYTES
from .heartbeats import Deadline, LoopClock
from .keys import ClientKeys, secure_client
from .messages import ACKS, CONNECT, OK, PUSH_ID, PUSHES, Message
from .sockets import Channel, Chunk, ChunkReceiver, ChunkSender, bulk_address, client_context, monitor_of

_RECONNECT_MS = 50
_RECONNECT_MAX_MS = 2000
_HEARTBEAT_MS = 5000
_BATCH = 16
_HELD = frozenset({"lease", "enqueue", "plan", "reserve", "next_offer", "served", "pin", "store_wanted"})
_HELD_FACTOR = 1.5
"""A server may hold these requests for half of the deadline, so their deadline is half longer. A server that dies at
the end of the hold, and is restarted, then has the usual time to answer."""
_LARGE_REPLIES = frozenset({"fetch", "lease"})
_MAX_REPLY_BYTES = 1 << 40
_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
"""The server does not know the key, or only one side has keys."""


class Connection:
    """A DEALER socket that reconnects by itself; the server knows it by ``identity``.

    ``on_message`` gets the frames of each message, ``on_change`` whether the connection was made or lost. A connection
    without a complete frame for ``silent_s`` seconds counts as lost. ``on_refused`` is called if the server refuses the
    keys; ZMQ does not retry then. Raises `ValueError` if the address is malformed.
    """

    def __init__(
        self,
        address: str,
        *,
        identity: bytes,
        keys: ClientKeys | None,
        on_message: Callable[[list[zmq.Frame]], None],
        on_change: Callable[[bool], None],
        on_refused: Callable[[], None],
        silent_s: float,
    ) -> None:
        self._on_change = on_change
        self._on_refused = on_refused
        socket: zmq.Socket[bytes] = client_context().socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IDENTITY, identity)
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(1000 * silent_s))
        socket.setsockopt(zmq.SNDHWM, 0)
        if keys is not None:
            secure_client(socket, keys)
        monitor = monitor_of(socket, zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _REFUSED)
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            socket.disable_monitor()
            monitor.close()
            socket.close()
            raise ValueError(
                f"{address!r} is not the address of a buffer; use an address like ipc:///FOLDER/buffer or tcp://HOST:PORT"
            ) from error
        self._socket = socket
        self._channel = Channel(socket, on_message)
        self._monitor = Channel(monitor, self._on_event)

    def send(self, frames: Sequence[Any]) -> None:
        """Hand a message to ZMQ."""
        self._channel.send(frames)

    def close(self) -> None:
        """Close the connection at once."""
        self._socket.disable_monitor()  # first: otherwise ZMQ's thread waits until its last events are read
        self._monitor.close()
        self._channel.close()

    def _on_event(self, event: list[zmq.Frame]) -> None:
        (number,) = struct.unpack_from("=H", event[0].bytes)
        if number & _REFUSED:
            self._on_refused()
        else:
            self._on_change(number == zmq.EVENT_HANDSHAKE_SUCCEEDED)


@dataclass(kw_only=True, slots=True, eq=False)
class _UnansweredRequest:
    """A request without a reply yet, with its deadline ``due``; errors name ``caller``.

    A request that ``is_large`` travels in chunks. ``needs_bulk``: it, or its reply, may travel on the bulk socket.
    """

    caller: str
    request: Message
    is_large: bool
    needs_bulk: bool
    reply: asyncio.Future[Message]
    due: float


class ClientSocket:
    """The connections to one server; made on a running loop, and used on that loop only.

    ``timeout_s`` is the deadline of each request, counted from its last progress. ``on_push`` gets each message that
    answers no request; ``on_connected`` is called each time that the server is reached.

    Attributes:
        is_connected: Whether the server can be reached now.
        num_read: Largest request id of a fetch whose reply has come, also if the fetch was cancelled.
        loop: The event loop of the connections.
        identity: The identity of this client on the server.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float,
        keys: ClientKeys | None,
        on_push: Callable[[Message], None],
        on_connected: Callable[[], None] = lambda: None,
        epoch: str = "",
    ) -> None:
        self.address = address
        self.is_connected = False
        self.num_read = 0
        self.loop = asyncio.get_running_loop()
        self._timeout_s = timeout_s
        self._keys = keys
        self._epoch = epoch
        self._on_push = on_push
        self._when_connected = on_connected
        self.identity = uuid.uuid4().bytes
        self._unanswered: dict[int, _UnansweredRequest] = {}
        self._outbox: list[Message] = []
        self._flush_handle: asyncio.Handle | None = None
        self._clock = LoopClock()
        self._deadline = Deadline(self._miss_deadlines, self._clock)
        self._ids = itertools.count(1)
        self._connect_id = 0
        self._refusal: Exception | None = None
        self._closed = False
        self._is_bulk_ready = False
        self._bulk: Connection | None = None
        self._bulk_port = 0
        self._sender = ChunkSender(self._send_bulk)
        self._receiver = ChunkReceiver(_MAX_REPLY_BYTES)
        self._control = Connection(
            address,
            identity=self.identity,
            keys=keys,
            on_message=self._on_message,
            on_change=self._on_control_change,
            on_refused=self._on_refused,
            silent_s=4 * _HEARTBEAT_MS / 1000,
        )

    def next_id(self) -> int:
        """Return a request id, for a request that may be cancelled later."""
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
        """Send a request and wait for its reply; errors name ``caller``, by default the request's name.

        Raises:
            DeadlineError: No reply came in time.
            ReplayBufferError: The reply is an error, or the connection was closed.
        """
        if self._closed:
            raise self._closed_error(name)
        request_id = next(self._ids) if request_id is None else request_id
        request = Message(name=name, request_id=request_id, fields=fields, payload=payload)
        try:
            reply = await self._begin(request, caller or name)
        finally:
            self._unanswered.pop(request_id, None)
        if reply.name != OK:
            raise messages.error_of(reply)
        return reply

    def post(self, name: str, fields: Mapping[str, Any], on_reply: Callable[[Message], None] | None = None) -> None:
        """Send a request without waiting for its reply; it is repeated after a reconnect like every request.

        ``on_reply`` gets the reply unless the reply is an error.
        """
        if self._closed:
            return
        request = Message(name=name, request_id=next(self._ids), fields=fields)

        def forget(reply: asyncio.Future[Message]) -> None:
            self._unanswered.pop(request.request_id, None)
            if reply.cancelled() or reply.exception() is not None or on_reply is None:
                return
            if reply.result().name == OK:
                on_reply(reply.result())

        self._begin(request, name).add_done_callback(forget)

    def _begin(self, request: Message, caller: str) -> asyncio.Future[Message]:
        is_large = bool(request.payload) and sum(map(len, request.payload)) >= JOIN_BELOW_BYTES
        unanswered = _UnansweredRequest(
            caller=caller,
            request=request,
            is_large=is_large,
            needs_bulk=is_large or request.name in _LARGE_REPLIES,
            reply=self.loop.create_future(),
            due=self._clock.time() + self._seconds_for(request.name),
        )
        self._unanswered[request.request_id] = unanswered
        self._deadline.at(unanswered.due)
        if self._refusal is not None:
            unanswered.reply.set_exception(self._refusal)
        self._send(unanswered)
        return unanswered.reply

    def _send(self, unanswered: _UnansweredRequest) -> None:
        """Send a request if its connections are ready; small requests of one turn of the loop share a message."""
        if not self.is_connected or (unanswered.needs_bulk and not self._is_bulk_ready):
            return
        request = unanswered.request
        if unanswered.is_large:
            self._sender.push(request.request_id, request.frames(self._epoch))
        elif len(self._unanswered) == 1:
            self._control.send(request.frames(self._epoch))
        else:
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
            self._control.send(message.frames(self._epoch))

    def _send_bulk(self, frames: list[Any]) -> None:
        if self._bulk is not None:
            self._bulk.send(frames)

    # Deadlines

    def _miss_deadlines(self) -> None:
        """Fail overdue requests."""
        now = self._clock.time()
        earliest: float | None = None
        for unanswered in self._unanswered.values():
            if unanswered.reply.done():
                continue
            if unanswered.due <= now:
                unanswered.reply.set_exception(self._deadline_error(unanswered))
            elif earliest is None or unanswered.due < earliest:
                earliest = unanswered.due
        self._deadline.at(earliest)

    def _seconds_for(self, name: str) -> float:
        """The deadline of a request."""
        return self._timeout_s * (_HELD_FACTOR if name in _HELD else 1.0)

    def _note_progress(self, request_id: int | None = None) -> None:
        """Note progress: a chunk of a reply came, or a chunk was acknowledged, which moves all queued requests."""
        due = self._clock.time() + self._timeout_s
        if request_id is None:
            for unanswered in self._unanswered.values():
                if unanswered.is_large:
                    unanswered.due = due
        elif (unanswered := self._unanswered.get(request_id)) is not None:
            unanswered.due = due

    def _deadline_error(self, unanswered: _UnansweredRequest) -> DeadlineError:
        return DeadlineError(
            f"buffer.{unanswered.caller}: no answer from {self.address} within "
            f"{self._seconds_for(unanswered.request.name):.1f} s; the server is gone or overloaded, or this client has "
            "the keys of another run; its log says more"
        )

    def fail_all(self, error: Exception) -> None:
        """Fail every pending request with ``error``."""
        for unanswered in self._unanswered.values():
            if not unanswered.reply.done():
                unanswered.reply.set_exception(error)

    def close(self) -> None:
        """Close the connections; pending requests raise at once."""
        if self._closed:
            return
        self._closed = True
        self.fail_all(self._closed_error("a call"))
        self._deadline.close()
        self._clock.close()
        if self._flush_handle is not None:
            self._flush_handle.cancel()
        for connection in (self._control, self._bulk):
            if connection is not None:
                connection.close()

    def _closed_error(self, what: str) -> ReplayBufferError:
        return ReplayBufferError(f"the client of the buffer at {self.address} was closed while {what} waited")

    # Connecting

    def _on_control_change(self, is_connected: bool) -> None:
        """Greet the server; pending requests are repeated when the server has answered."""
        self.is_connected = False
        if is_connected:
            self._refusal = None
            self._connect_id = next(self._ids)
            message = Message(name=CONNECT, request_id=self._connect_id)
            self._control.send(message.frames(self._epoch))

    def _on_refused(self) -> None:
        self._refuse(
            NotAllowed(
                f"the buffer at {self.address} refuses this client's key; pass the keys of its run (buffer.keys, or "
                "--keys), or no keys to a run without keys"
            )
        )

    def _refuse(self, refusal: Exception) -> None:
        """Fail every request until another server answers."""
        self._refusal = refusal
        self.fail_all(refusal)

    def _on_connected(self, reply: Message) -> None:
        """Note the run and the bulk port that the server named."""
        if reply.name != OK:
            self._refuse(messages.error_of(reply))
            return
        self._epoch = messages.text(reply.fields, "epoch")
        self.is_connected = True
        self._resend(needs_bulk=False)
        self._when_connected()
        port = messages.integer(reply.fields, "bulk_port")
        if self._bulk is not None and port != self._bulk_port:  # of a server that was restarted without a journal
            self._bulk.close()
            self._bulk = None
            self._on_bulk_change(False)
        if self._bulk is None:
            self._bulk_port = port
            self._bulk = Connection(
                bulk_address(self.address, port),
                identity=self.identity,
                keys=self._keys,
                on_message=self._on_chunk,
                on_change=self._on_bulk_change,
                on_refused=self._on_refused,
                silent_s=max(self._timeout_s, 4 * _HEARTBEAT_MS / 1000),
            )
        elif self._is_bulk_ready:
            self._resend(needs_bulk=True)

    def _on_bulk_change(self, is_connected: bool) -> None:
        """Greet the server on the bulk socket; it answers when it can reach this client there."""
        self._is_bulk_ready = False
        self._sender.reset()
        self._receiver.reset()
        if is_connected:
            self._send_bulk([b""])

    def _on_greeted(self) -> None:
        self._is_bulk_ready = True
        self._resend(needs_bulk=True)

    def _resend(self, *, needs_bulk: bool) -> None:
        """Repeat every request without a reply: a lost connection may have lost it.

        Its deadline starts again, because a restarted server may hold it as long as a new request.
        """
        now = self._clock.time()
        for unanswered in list(self._unanswered.values()):
            if unanswered.needs_bulk == needs_bulk and not unanswered.reply.done():
                unanswered.due = now + self._seconds_for(unanswered.request.name)
                self._send(unanswered)

    # Incoming messages

    def _on_chunk(self, frames: list[zmq.Frame]) -> None:
        if len(frames) == 1 and not len(frames[0]):
            self._on_greeted()
            return
        try:
            chunk = Chunk.parse(frames)
            if not chunk.count:
                self._sender.acknowledge(chunk)
                self._note_progress()
                return
            whole = self._receiver.add(chunk)
        except WireError as error:
            self.fail_all(error)
            return
        self._send_bulk(Chunk(request_id=chunk.request_id, index=chunk.index).to_frames())
        self._note_progress(chunk.request_id)
        if whole is not None:
            self._on_message(whole)

    def _on_message(self, frames: Sequence[Any]) -> None:
        try:
            message = messages.parse_reply(frames)
        except WireError as error:
            self.fail_all(error)
            return
        if message.name == ACKS:
            plain = Message(name=OK, request_id=PUSH_ID)
            for request_id in messages.integers(message.fields, "ids"):
                self._resolve(request_id, plain)
        elif message.request_id == PUSH_ID and message.name in PUSHES:
            self._on_push(message)
        elif message.request_id == PUSH_ID:
            self.fail_all(messages.error_of(message))
        elif message.request_id == self._connect_id:
            self._on_connected(message)
        else:
            if "counts" in message.fields:
                self.num_read = max(self.num_read, message.request_id)
            self._resolve(message.request_id, message)

    def _resolve(self, request_id: int, reply: Message) -> None:
        unanswered = self._unanswered.get(request_id)
        if unanswered is not None and not unanswered.reply.done():
            unanswered.reply.set_result(reply)
