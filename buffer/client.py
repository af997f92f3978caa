"""Connects one process to the buffer: sends requests, repeats them after a reconnect, and enforces their deadlines.

A client has a control socket, and a bulk socket for large messages. A request that is large, or may have a large
answer, waits until both sockets are connected. Other requests need only the control socket. A large message is sent in
chunks. Each received chunk of an answer restarts the deadline of the request. When the server acknowledges a chunk of
a request, the deadlines of all large requests restart.
"""

import asyncio
import itertools
import logging
import struct
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import zmq

from asyncrl.core import record
from asyncrl.core.errors import NotAllowed, ReplayBufferError, StoreFull, WireError
from asyncrl.core.stacks import missed

from . import commands, operations
from .encoding import JOIN_BELOW_BYTES, PUSH_ID, Message, error_of, frames_of, parse_answers
from .keys import ClientKeys, secure_client
from .operations import NothingYet
from .records import Answer, Key, Operation, Push, Reply
from .sockets import (
    Channel,
    Chunk,
    ChunkReceiver,
    ChunkSender,
    Deadline,
    LoopClock,
    allow_clients,
    bulk_address,
    client_context,
    monitor_of,
)

logger = logging.getLogger(__name__)

_RECONNECT_MS = 50
_RECONNECT_MAX_MS = 2000
_HEARTBEAT_MS = 5000
_BATCH = 16
_HELD_FACTOR = 1.5
"""A request that the server may hold has this multiple of the usual deadline. The server holds the request for at most
half of the usual deadline. If the server dies meanwhile, a restarted server still has the usual time to answer."""
_MAX_REPLY_BYTES = 1 << 40
_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
"""ZMQ's events for a refused connection: the server does not know the key, or only one side has keys."""


class Connection:
    """A ZMQ socket (DEALER) that reconnects automatically. Raises `ValueError` if the address is malformed.

    Args:
        on_message: Called with the frames of each message.
        on_change: Called with True when the connection is made, and with False when it is lost.
        on_refused: Called when the server refuses the keys. ZMQ does not connect again then.
        silent_s: A connection without a complete frame for this many seconds counts as lost.
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

        def on_event(event: list[zmq.Frame]) -> None:
            (number,) = struct.unpack_from("=H", event[0].bytes)
            if number & _REFUSED:
                on_refused()
            else:
                on_change(number == zmq.EVENT_HANDSHAKE_SUCCEEDED)

        self._monitor = Channel(monitor, on_event)

    def send(self, frames: Sequence[Any]) -> None:
        """Send a message: a sequence of frames (bytes, or views of bytes)."""
        self._channel.send(frames)

    def close(self) -> None:
        """Close the connection immediately."""
        # Disable the events before closing the monitor. Otherwise ZMQ's thread blocks, because nobody reads the events.
        self._socket.disable_monitor()
        self._monitor.close()
        self._channel.close()


@dataclass(kw_only=True, slots=True, eq=False)
class _UnansweredRequest:
    """A request that has no reply yet.

    ``seconds`` is the time from sending the request to the first deadline. ``due`` is the current deadline. Each
    transferred chunk of the request or of the reply moves the current deadline.
    """

    caller: str
    request: Message
    is_large: bool
    needs_bulk: bool
    seconds: float
    reply: asyncio.Future[Message]
    due: float = 0.0


class ClientSocket:
    """The connections to one server. Create the object on a running event loop, and use it only on that loop.

    Args:
        timeout_s: Deadline of each request, in seconds after the request was sent or its latest chunk was transferred.
        on_push: Called with each message that does not answer a request.
        on_connected: Called each time the client has connected to the server.

    Attributes:
        is_connected: Whether the server can be reached now.
        num_read: Largest id of a fetch (a request for trajectories) that the server has answered. The fetch may have
            been cancelled.
        identity: The id of this client on the server.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float,
        keys: ClientKeys | None,
        on_push: Callable[[Any], None] = lambda push: None,
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
        self._control = self._connect()

    def _connect(self) -> Connection:
        return Connection(
            self.address,
            identity=self.identity,
            keys=self._keys,
            on_message=self._on_message,
            on_change=self._on_control_change,
            on_refused=partial(self._on_refused, self._keys),
            silent_s=4 * _HEARTBEAT_MS / 1000,
        )

    def next_id(self) -> int:
        """Return an unused request id. Pass the id to `request` if you may cancel the request later."""
        return next(self._ids)

    async def request(
        self, operation: Operation[Any], payload: Sequence[Any] = (), *, request_id: int | None = None, caller: str = ""
    ) -> Message:
        """Send a request, and return the message that answers it.

        ``payload`` holds the request's frames (bytes, or views of bytes). ``caller`` is the name of the call in error
        messages. If ``caller`` is empty, the name of the operation is used.

        Raises:
            DeadlineError: No answer came in time.
            AsyncRLError: The answer is an error.
            ReplayBufferError: The connection was closed.
        """
        caller = caller or operation.name
        if self._closed:
            raise self._closed_error(caller)
        request_id = next(self._ids) if request_id is None else request_id
        try:
            answer = await self._begin(Message(request_id=request_id, body=operation, payload=payload), caller)
        finally:
            self._unanswered.pop(request_id, None)
        if isinstance(answer.body, operations.Failure):
            raise error_of(answer.body)
        return answer

    async def call(self, operation: Operation[Reply], payload: Sequence[Any] = (), *, caller: str = "") -> Reply:
        """Send a request, and return the body of its answer (an `Answer`).

        The request is repeated while the server answers `NothingYet`. Raises the errors of `request`.
        """
        while isinstance(answer := (await self.request(operation, payload, caller=caller)).body, NothingYet):
            if answer.warning:
                logger.warning("waiting for the next batch: %s", answer.warning)
        return answer

    def post(self, operation: Operation[Any], on_answer: Callable[[Any], None] = lambda answer: None) -> None:
        """Send a request without waiting for its answer. The request is repeated after a reconnect.

        ``on_answer`` is called with the body of the answer if the answer is not an error.
        """
        if self._closed:
            return
        request = Message(request_id=next(self._ids), body=operation)

        def forget(answer: asyncio.Future[Message]) -> None:
            self._unanswered.pop(request.request_id, None)
            if (
                not answer.cancelled()
                and answer.exception() is None
                and not isinstance(answer.result().body, operations.Failure)
            ):
                on_answer(answer.result().body)

        self._begin(request, operation.name).add_done_callback(forget)

    def _begin(self, request: Message, caller: str) -> asyncio.Future[Message]:
        is_large = bool(request.payload) and sum(map(len, request.payload)) >= JOIN_BELOW_BYTES
        unanswered = _UnansweredRequest(
            caller=caller,
            request=request,
            is_large=is_large,
            needs_bulk=is_large or request.body.has_large_answer,
            seconds=self._timeout_s * (_HELD_FACTOR if request.body.is_held else 1.0),
            reply=self.loop.create_future(),
        )
        unanswered.due = self._clock.time() + unanswered.seconds
        self._unanswered[request.request_id] = unanswered
        self._deadline.at(unanswered.due)
        if self._refusal is not None:
            unanswered.reply.set_exception(self._refusal)
        self._send(unanswered)
        return unanswered.reply

    def _send(self, unanswered: _UnansweredRequest) -> None:
        if not self.is_connected or (unanswered.needs_bulk and not self._is_bulk_ready):
            return
        request = unanswered.request
        if unanswered.is_large:
            self._sender.push(request.request_id, frames_of(self._epoch, [request]))
        elif len(self._unanswered) == 1:
            self._control.send(frames_of(self._epoch, [request]))
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
            self._control.send(frames_of(self._epoch, outbox))

    def _send_bulk(self, frames: list[Any]) -> None:
        if self._bulk is not None:
            self._bulk.send(frames)

    # Deadlines

    def _miss_deadlines(self) -> None:
        now = self._clock.time()
        earliest: float | None = None
        for unanswered in self._unanswered.values():
            if unanswered.reply.done():
                continue
            if unanswered.due <= now:
                unanswered.reply.set_exception(
                    missed(
                        f"buffer.{unanswered.caller}: no answer from {self.address} within {unanswered.seconds:.1f} s; "
                        "the server is gone or overloaded, or this client has the keys of another run; read the log of "
                        "the server"
                    )
                )
            elif earliest is None or unanswered.due < earliest:
                earliest = unanswered.due
        self._deadline.at(earliest)

    def _note_progress(self, request_id: int | None = None) -> None:
        """Restart the deadline of a request. If ``request_id`` is None, restart the deadlines of all large requests."""
        due = self._clock.time() + self._timeout_s
        if request_id is None:
            for unanswered in self._unanswered.values():
                if unanswered.is_large:
                    unanswered.due = due
        elif (unanswered := self._unanswered.get(request_id)) is not None:
            unanswered.due = due

    def fail_all(self, error: Exception) -> None:
        """Make every unanswered request raise ``error``."""
        for unanswered in self._unanswered.values():
            if not unanswered.reply.done():
                unanswered.reply.set_exception(error)

    def close(self) -> None:
        """Close the connections. Pending requests raise `ReplayBufferError` immediately."""
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
        self.is_connected = False
        if is_connected:
            self._refusal = None
            self._connect_id = next(self._ids)
            self._control.send(
                frames_of(self._epoch, [Message(request_id=self._connect_id, body=operations.Connect())])
            )

    def _on_refused(self, used: ClientKeys | None) -> None:
        """Handle the server's refusal of the keys ``used``.

        The client connects again if its key file has newer keys. Otherwise all requests fail.
        """
        if used != self._keys or self._begin_with_newest_keys():
            return
        self._refuse(
            NotAllowed(
                f"the buffer at {self.address} refuses this client's key; pass the keys of its run (buffer.keys, or "
                "--keys), or no keys to a run without keys"
            )
        )

    def _begin_with_newest_keys(self) -> bool:
        newest = self._keys and self._keys.newest()
        if newest == self._keys:
            return False
        self._keys = newest
        # Reconnect later, because a callback of a connection must not close the connection.
        self.loop.call_soon(self._reconnect)
        return True

    def _reconnect(self) -> None:
        if self._closed:
            return
        self._control.close()
        if self._bulk is not None:
            self._bulk.close()
            self._bulk = None
        self._on_bulk_change(False)
        self._on_control_change(False)
        self._control = self._connect()

    def _refuse(self, refusal: Exception) -> None:
        self._refusal = refusal
        self.fail_all(refusal)

    def _on_connected(self, answer: Answer) -> None:
        if not isinstance(answer, operations.Connected):
            self._refuse(
                error_of(answer) if isinstance(answer, operations.Failure) else WireError(f"{answer} names no run")
            )
            return
        self._epoch, port = answer.epoch, answer.bulk_port
        self.is_connected = True
        self._resend(needs_bulk=False)
        self._when_connected()
        # Close the bulk connection if the port has changed. A restarted server without a journal has another port.
        if self._bulk is not None and port != self._bulk_port:
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
                on_refused=partial(self._on_refused, self._keys),
                silent_s=max(self._timeout_s, 4 * _HEARTBEAT_MS / 1000),
            )
        elif self._is_bulk_ready:
            self._resend(needs_bulk=True)

    def _on_bulk_change(self, is_connected: bool) -> None:
        self._is_bulk_ready = False
        self._sender.reset()
        self._receiver.reset()
        if is_connected:
            self._send_bulk([b""])

    def _resend(self, *, needs_bulk: bool) -> None:
        """Repeat unanswered requests with new deadlines, because a request or its reply may be lost."""
        now = self._clock.time()
        for unanswered in list(self._unanswered.values()):
            if unanswered.needs_bulk == needs_bulk and not unanswered.reply.done():
                unanswered.due = now + unanswered.seconds
                self._send(unanswered)

    # Incoming messages

    def _on_chunk(self, frames: list[zmq.Frame]) -> None:
        if len(frames) == 1 and not len(frames[0]):
            self._is_bulk_ready = True
            self._resend(needs_bulk=True)
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
            answers = parse_answers(frames)
        except WireError as error:
            self.fail_all(error)
            return
        for answer in answers:
            if isinstance(answer.body, operations.NewKeys):
                self._begin_with_newest_keys()
            elif isinstance(answer.body, Push):
                self._on_push(answer.body)
            elif answer.request_id == PUSH_ID and isinstance(answer.body, operations.Failure):
                self.fail_all(error_of(answer.body))
            elif answer.request_id == self._connect_id:
                self._on_connected(answer.body)
            else:
                if isinstance(answer.body, operations.Payloads):
                    self.num_read = max(self.num_read, answer.request_id)
                unanswered = self._unanswered.get(answer.request_id)
                if unanswered is not None and not unanswered.reply.done():
                    unanswered.reply.set_result(answer)


class BufferClient:
    """The connections to a buffer. The client connects at the first call. Use it only on the event loop of this call.

    Args:
        address: Address of the server. Example: ``"ipc:///dev/shm/asyncrl-1f/sockets/buffer"``.
        request_timeout_s: Deadline of each request, in seconds. The server may hold a request for half of this time.
        keys: CURVE keys, if the server has them.
        epoch: Name of this client's run. If empty, the client takes the name from the server's first answer.
        host: Name of this client's host. Puts prefer the store that `ControlClient.add_store` added for this host.
        incarnation: How often the learner has gone back to a checkpoint, as far as this client knows.

    Attributes:
        on_connected: Called each time the client has connected to the server.
        on_push: Maps a type of pushes (messages that answer no request) to the callback for each push of this type.
    """

    def __init__(
        self,
        address: str,
        *,
        request_timeout_s: float = 30.0,
        keys: ClientKeys | None = None,
        epoch: str = "",
        host: str = "",
        incarnation: int = 0,
    ) -> None:
        self.address = address
        self.timeout_s = request_timeout_s
        self.host = host
        self.incarnation = incarnation
        self.is_closed = False
        self.on_connected: Callable[[], None] = lambda: None
        self.on_push: dict[type, Callable[[Any], None]] = {}
        self._epoch = epoch
        self._keys = keys
        self._link: ClientSocket | None = None
        self._store_links: dict[str, ClientSocket] = {}
        # ``_has_other_clock`` is None until a `Welcome` message has named the server's clock.
        self._has_other_clock: bool | None = None
        self._space = asyncio.Event()

    async def connect(self) -> None:
        """Open the connection without waiting for the server. Raises `ValueError` if the address is malformed."""
        _ = self.link

    @property
    def link(self) -> ClientSocket:
        """The connection to the buffer's server. The first access opens the connection.

        Raises `ReplayBufferError` if the client is closed or belongs to another event loop.
        """
        if self.is_closed:
            raise self.closed_error()
        if self._link is None:
            self._link = self._link_to(self.address, self._keys, lambda: self.on_connected())
        elif self._link.loop is not asyncio.get_running_loop():
            raise ReplayBufferError(
                f"the client of the buffer at {self.address} belongs to the event loop of its first call; make one "
                "client per event loop"
            )
        return self._link

    def store_link(self, address: str) -> ClientSocket:
        """Return the connection to the store server at ``address``. The first call opens the connection.

        Raises `ValueError` if the process's limit of open files is too low for this connection.
        """
        if address not in self._store_links:
            keys = self._keys.for_stores() if self._keys is not None else None
            allow_clients(0, num_links=len(self._store_links) + 2)
            self._store_links[address] = self._link_to(address, keys)
        return self._store_links[address]

    def _link_to(
        self, address: str, keys: ClientKeys | None, on_connected: Callable[[], None] = lambda: None
    ) -> ClientSocket:
        return ClientSocket(
            address,
            timeout_s=self.timeout_s,
            keys=keys,
            on_push=self._push,
            on_connected=on_connected,
            epoch=self._epoch,
        )

    def _push(self, push: Push) -> None:
        if isinstance(push, operations.Space):
            self._space.set()
            self._space = asyncio.Event()
        elif (on_push := self.on_push.get(type(push))) is not None:
            on_push(push)

    def closed_error(self) -> ReplayBufferError:
        """Return the error that calls on this client raise after `close`."""
        return ReplayBufferError(f"the client of the buffer at {self.address} is closed")

    async def close(self, goodbye: Callable[[ClientSocket], Awaitable[None]] | None = None) -> None:
        """Close the connections. Pending calls raise `ReplayBufferError`.

        If the server can be reached, the method first calls and awaits ``goodbye``. The argument of ``goodbye`` is the
        connection to the server.
        """
        if self.is_closed:
            return
        self.is_closed = True
        self._space.set()
        if self._link is not None:
            self._link.fail_all(self.closed_error())
            if goodbye is not None and self._link.is_connected:
                await goodbye(self._link)
        for link in (self._link, *self._store_links.values()):
            if link is not None:
                link.close()

    # Requests

    async def call_with_space(self, operation: Operation[Reply], payload: Sequence[Any]) -> Reply:
        """Send a request, and return the body of its answer. Repeat the request while the buffer is full.

        The client repeats the request when the server reports free bytes, at the latest after ``timeout_s / 2``
        seconds.
        """
        while True:
            # Read ``_space`` before sending the request, so a report of free bytes during the request is not missed.
            space = self._space
            try:
                return await self.link.call(operation, payload)
            except StoreFull:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self.timeout_s / 2):
                        await space.wait()

    async def call_with_payload(
        self, operation: Operation[Reply], payload: Sequence[Any], key: Key, *, link: ClientSocket | None = None
    ) -> Reply:
        """Send a worker's request with a payload, and return the body of its answer.

        The client first reserves bytes on the server if the payload is large, or if the server answered `StoreFull`.
        ``key`` is the payload's (group id, attempt number) pair. By default, ``link`` is the connection to the buffer's
        server. If the worker has lost its lease on the group, the request is sent without the payload.
        """
        is_reserved = sum(map(len, payload)) < JOIN_BELOW_BYTES
        while True:
            if not is_reserved and not (await self.reserve(key, payload, link=link)).is_held:
                payload = ()
            try:
                return await (link or self.link).call(operation, payload)
            except StoreFull:
                is_reserved = False

    async def reserve(
        self, key: Key, payload: Sequence[Any], *, link: ClientSocket | None = None
    ) -> commands.Reservation:
        """Wait until a server has reserved bytes for the payload of ``key``, a (group id, attempt number) pair.

        If ``link`` is None, the buffer's server chooses a store, if possible on this client's host. The answer names
        the address of the store.
        """
        num_bytes, host = sum(map(len, payload)), "" if link is not None else self.host
        reserve = commands.Reserve(group_id=key[0], attempt=key[1], num_bytes=num_bytes, host=host)
        return await (link or self.link).call(reserve, caller="put")

    async def hello(self, hello: operations.Hello, caller: str) -> operations.Welcome:
        """Send a greeting, and return the server's settings for clients.

        ``caller`` is the name of the call in error messages.
        """
        sent_ns = time.monotonic_ns()
        welcome = await self.link.call(hello, caller=caller)
        self.note_clock(sent_ns, welcome)
        return welcome

    async def hello_for_clock(self, caller: str) -> None:
        """If this process records a profile, measure the offset between the server's clock and this host's clock.

        Does nothing if the client knows that the server uses the same clock.
        """
        if record.current() is not None and self._has_other_clock is not False:
            await self.hello(operations.Hello(), caller)

    def note_clock(self, sent_ns: int, welcome: operations.Welcome) -> None:
        """Record the offset between the server's clock and this host's clock, if these are different clocks.

        ``sent_ns`` is the time of `time.monotonic_ns` at which the client sent the request for ``welcome``.
        """
        self._has_other_clock = welcome.clock != record.clock_id()
        if self._has_other_clock:
            now_ns = time.monotonic_ns()
            offset_ns = welcome.now_ns - (sent_ns + now_ns) // 2
            record.clock(welcome.clock, offset_ns=offset_ns, error_ns=(now_ns - sent_ns) // 2)
