"""ZMQ sockets on an asyncio loop, for the buffer's servers and clients: addresses, large messages, and a clock.

Every client has two connections to a server. The *control* connection carries requests and small payloads. The *bulk*
connection carries payloads of ``JOIN_BELOW_BYTES`` or more, so they do not delay heartbeats and renewals of leases.
The bulk connection sends payloads in chunks. At most ``WINDOW_BYTES`` are sent before the peer acknowledges a chunk.
"""

import asyncio
import ctypes
import fcntl
import ipaddress
import itertools
import logging
import os
import resource
import shutil
import socket
import struct
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import zmq

from asyncrl.core.errors import WireError
from asyncrl.core.host import socket_base

from .config import BufferConfig
from .encoding import CHUNK_BYTES

logger = logging.getLogger(__name__)

WINDOW_BYTES = 4 * CHUNK_BYTES
_BURST = 64
_COPY_BELOW_BYTES = 64 * 1024
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_LAST = int(zmq.NOBLOCK)
_send: Any = zmq.backend.Socket.send
_receive: Any = zmq.backend.Socket.recv
"""ZMQ's own functions to send and receive a frame. The wrappers of `zmq.Socket` take more than twice as long."""
_CHUNK = struct.Struct("<4sQII")
_CHUNK_MAGIC, _ACK_MAGIC = b"chnk", b"ackn"
_MAX_CHUNK_FRAMES = 2048
_MAX_INCOMPLETE = 64
_MAX_INCOMPLETE_FRAMES = 1 << 20
_PREFIX = "asyncrl-"
_SCHEME = "ipc://"
_LONGEST_NAME = "store-1000000.bulk"
_BACKLOG = 1024
_TICK_S = 0.1
_LONGEST_GAP_S = 0.5
_SIOCGIFADDR = 0x8915
_CLONE_FILES = 0x400
_EVENT = struct.Struct("=Hi")
_BYTES_RECEIVED, _BYTES_RECEIVED_AT, _TCP_INFO_BYTES = struct.Struct("=Q"), 128, 136

_monitors = itertools.count()


class LoopClock:
    """A monotonic clock of the running event loop. The clock stops while the loop stalls.

    After a stall, the loop fires its timers before it reads the messages that have arrived. With an ordinary clock, all
    clients would then count as silent. ``stalled_s`` is the total length of the stalls in seconds.
    """

    def __init__(self, time: Callable[[], float] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._time = self._loop.time if time is None else time
        self.stalled_s = 0.0
        self._last_seen = self._time()
        self._tick_handle: asyncio.TimerHandle | None = None
        self._tick()

    def time(self) -> float:
        """Return the time of this clock: the loop's time minus the total length of the loop's stalls, in seconds."""
        now = self._time()
        gap = now - self._last_seen
        self._last_seen = now
        if gap > _LONGEST_GAP_S:
            self.stalled_s += gap
            logger.info("the event loop stalled for %.1f s; every deadline is extended by the same time", gap)
        return now - self.stalled_s

    def call_at(self, when: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        """Call ``callback`` at ``when``, a time of this clock in seconds.

        After a stall, the loop calls ``callback`` too early. So ``callback`` must check the time.
        """
        return self._loop.call_later(max(0.0, when - self.time()), callback)

    def close(self) -> None:
        """Stop the timer."""
        if self._tick_handle is not None:
            self._tick_handle.cancel()

    def _tick(self) -> None:
        self.time()
        self._tick_handle = self._loop.call_later(_TICK_S, self._tick)


class Deadline:
    """One timer for the earliest of many changing deadlines.

    The timer stays unchanged if the earliest deadline moves to a later time. So a message can move a deadline at no
    cost, but the timer may fire too early. If no deadline has passed when ``on_due`` is called, ``on_due`` must call
    `at` with the next deadline.
    """

    def __init__(self, on_due: Callable[[], None], clock: LoopClock) -> None:
        self._on_due = on_due
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self._when = 0.0

    def at(self, when: float | None) -> None:
        """Make sure that ``on_due`` is called at the time ``when`` or earlier. Do nothing if ``when`` is None."""
        if when is None or (self._timer is not None and self._when <= when):
            return
        self.close()
        self._when = when

        def fire() -> None:
            self._timer = None
            self._on_due()

        self._timer = self._clock.call_at(when, fire)

    def close(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Channel:
    """A ZMQ socket on the event loop. It passes received messages to a callback, and sends without blocking.

    The event loop calls ``on_message`` with the frames of each message. It calls ``on_burst_end`` when all received
    messages are handled, or after 64 messages. `close` also closes the socket.
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
        """Send a message (a sequence of frames) without blocking.

        Raises `zmq.ZMQError` if the peer is unknown, or if the peer's queue is full.
        """
        last = len(frames) - 1
        for i, frame in enumerate(frames):
            small = type(frame) is bytes and len(frame) < _COPY_BELOW_BYTES
            _send(self._socket, frame, _MORE if i < last else _LAST, small)
        self._schedule()

    def close(self) -> None:
        """Stop reading, and close the socket. Messages that were not sent yet are lost."""
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
        for num_read in range(_BURST):
            if self._socket.closed:
                return 0
            try:
                frames = [_receive(self._socket, _LAST, False)]
            except zmq.Again:
                return num_read
            while frames[-1].more:
                frames.append(_receive(self._socket, _LAST, False))
            self._on_message(frames)
        return _BURST


def monitor_of(socket: zmq.Socket[Any], events: int) -> zmq.Socket[Any]:
    """Return a ZMQ socket that receives a message for each event of ``socket`` that the bit mask ``events`` selects.

    The returned socket has a unique address, because ZMQ's default address may still belong to an earlier socket.
    """
    return socket.get_monitor_socket(events, f"inproc://monitor-{next(_monitors)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """A piece of a message, or the acknowledgement of a piece.

    Attributes:
        request_id: Request id of the message.
        index: Index of the chunk in the message, from 0.
        count: Number of chunks of the message; 0 in an acknowledgement.
        frames: The message's frames in this chunk.
    """

    request_id: int
    index: int
    count: int = 0
    frames: Sequence[Any] = ()

    @classmethod
    def parse(cls, frames: Sequence[Any]) -> "Chunk":
        """Return the chunk that was encoded as ``frames``. Raises `WireError` if ``frames`` is not a chunk."""
        head = memoryview(frames[0]) if frames else memoryview(b"")
        if head.nbytes != _CHUNK.size:
            raise WireError(f"the first frame of a chunk must have {_CHUNK.size} bytes, got {head.nbytes}")
        magic, request_id, index, count = _CHUNK.unpack(head)
        if magic not in (_CHUNK_MAGIC, _ACK_MAGIC) or (magic == _CHUNK_MAGIC) != (index < count):
            raise WireError(f"not a chunk: {bytes(head[:4])!r}, {index} of {count}")
        return cls(request_id=request_id, index=index, count=count, frames=frames[1:])

    def to_frames(self) -> list[Any]:
        """Encode the chunk as a list of frames, for `parse`."""
        magic = _CHUNK_MAGIC if self.count else _ACK_MAGIC
        return [_CHUNK.pack(magic, self.request_id, self.index, self.count), *self.frames]


class ChunkSender:
    """Sends messages to one peer in order, as chunks. ``send`` is called with the frames of each chunk.

    At most ``WINDOW_BYTES`` are sent before the peer acknowledges a chunk.
    """

    def __init__(self, send: Callable[[list[Any]], None]) -> None:
        self._send = send
        self._queue: deque[tuple[Chunk, int]] = deque()
        self._unacknowledged: dict[tuple[int, int], int] = {}
        self._num_bytes = 0

    @property
    def is_idle(self) -> bool:
        """True if the peer has acknowledged every chunk."""
        return not self._queue and not self._unacknowledged

    def push(self, request_id: int, frames: Sequence[Any]) -> None:
        """Send a message in chunks. Later chunks may wait for acknowledgements. The frames are not copied."""
        pieces: list[tuple[list[Any], int]] = []
        for frame in frames:
            size = len(frame)
            if not pieces or pieces[-1][1] + size > CHUNK_BYTES or len(pieces[-1][0]) >= _MAX_CHUNK_FRAMES:
                pieces.append(([], 0))
            pieces[-1] = (pieces[-1][0], pieces[-1][1] + size)
            pieces[-1][0].append(frame)
        for index, (parts, size) in enumerate(pieces):
            chunk = Chunk(request_id=request_id, index=index, count=len(pieces), frames=parts)
            self._queue.append((chunk, size))
        self._pump()

    def acknowledge(self, chunk: Chunk) -> None:
        """Record that the peer acknowledged a chunk, and send further chunks."""
        self._num_bytes -= self._unacknowledged.pop((chunk.request_id, chunk.index), 0)
        self._pump()

    def reset(self) -> None:
        """Forget all messages that were not sent or not acknowledged. Call this when a new connection begins."""
        self._queue.clear()
        self._unacknowledged.clear()
        self._num_bytes = 0

    def _pump(self) -> None:
        while self._queue and (not self._num_bytes or self._num_bytes + self._queue[0][1] <= WINDOW_BYTES):
            chunk, size = self._queue.popleft()
            self._unacknowledged[chunk.request_id, chunk.index] = size
            self._num_bytes += size
            self._send(chunk.to_frames())


@dataclass(kw_only=True, slots=True)
class _IncompleteMessage:
    frames: list[Any] = field(default_factory=list)
    num_chunks: int = 0
    num_bytes: int = 0


class ChunkReceiver:
    """Receives messages of one peer in chunks. All incomplete messages together have at most ``max_bytes``."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._messages: dict[int, _IncompleteMessage] = {}

    @property
    def is_idle(self) -> bool:
        """True if every received message is complete."""
        return not self._messages

    def add(self, chunk: Chunk) -> list[Any] | None:
        """Add a chunk. Return all frames of the chunk's message if the message is complete, else None.

        If earlier chunks are missing, or if the incomplete messages are too large, drop the message and raise
        `WireError`.
        """
        message = self._messages.pop(chunk.request_id, None) or _IncompleteMessage()
        self._num_bytes -= message.num_bytes
        if chunk.index == 0:  # index 0 begins a new message, or a message that the peer sends again
            message = _IncompleteMessage()
        if chunk.index != message.num_chunks:
            raise WireError(f"expected chunk {message.num_chunks} of request {chunk.request_id}, got {chunk.index}")
        message.frames += chunk.frames
        message.num_chunks += 1
        message.num_bytes += sum(map(len, chunk.frames))
        if self._num_bytes + message.num_bytes > self._max_bytes:
            raise WireError(
                f"request {chunk.request_id} and the other incomplete requests of this client have more than "
                f"{self._max_bytes} bytes (the larger of buffer.max_prompt_bytes and buffer.max_stored_bytes); raise "
                "that limit, or send smaller requests"
            )
        if chunk.index + 1 == chunk.count:
            return message.frames
        if len(self._messages) >= _MAX_INCOMPLETE or len(message.frames) > _MAX_INCOMPLETE_FRAMES:
            raise WireError(
                f"request {chunk.request_id} has more than {_MAX_INCOMPLETE_FRAMES} frames, or its client has more "
                f"than {_MAX_INCOMPLETE} incomplete requests; send smaller requests, or wait for the replies"
            )
        self._messages[chunk.request_id] = message
        self._num_bytes += message.num_bytes
        return None

    def reset(self) -> None:
        """Forget all incomplete messages. Call this method when a new connection begins."""
        self._messages.clear()
        self._num_bytes = 0


_FILES_PER_CLIENT = 2  # a client has a control connection and a bulk connection
_FILES_PER_LINK = 8
_SOCKETS_PER_LINK = 6
"""ZMQ sockets per link to a server: two connections, each with its socket and both ends of its monitor."""
_OTHER_FILES = 256


def client_context() -> zmq.Context[Any]:
    """Return the ZMQ context of this process. It allows more sockets than ZMQ's default of 1023."""
    context = zmq.Context.instance()
    if context.get(zmq.MAX_SOCKETS) != (most := context.get(zmq.SOCKET_LIMIT)):
        context.set(zmq.MAX_SOCKETS, most)  # ZMQ ignores MAX_SOCKETS if the context already has a socket
    return context


def allow_clients(num_clients: int, *, num_links: int = 0) -> None:
    """Raise this process's limit of open files for ``num_clients`` clients and ``num_links`` connections to servers.

    Child processes inherit the limit. Raises `ValueError` if the limit cannot be high enough, or if ZMQ allows too few
    sockets.
    """
    most = zmq.Context.instance().get(zmq.SOCKET_LIMIT) // _SOCKETS_PER_LINK
    if num_links > most:
        raise ValueError(f"a process can reach at most {most} servers of the buffer, got {num_links}; run fewer stores")
    needed = _FILES_PER_CLIENT * num_clients + _FILES_PER_LINK * num_links + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and needed > hard:
        links = f" and links to {num_links} store servers" if num_links else ""
        raise ValueError(
            f"the limit of open files must be at least {needed} for {num_clients} clients of the buffer{links}, got "
            f"{hard}; raise the limit before you start the program: ulimit -Hn {needed}, or LimitNOFILE in its service"
        )
    if soft != resource.RLIM_INFINITY and needed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def make_socket_folder() -> str:
    """Make a folder with a random name that only this user may open (mode 0700)."""
    return tempfile.mkdtemp(prefix=_PREFIX, dir=socket_base(f"{_PREFIX}{'x' * 8}/{_LONGEST_NAME}"))


def with_socket_folder(config: BufferConfig) -> tuple[BufferConfig, str]:
    """Return a pair: a copy of the options that names a folder for Unix sockets, and the path of this folder.

    The path is empty if the options need no new folder. Otherwise the caller must remove the folder.
    """
    if config.host or config.socket_folder:
        return config, ""
    folder = make_socket_folder()
    return replace(config, socket_folder=folder), folder


def remove_socket_folder(folder: str) -> None:
    """Remove a folder and its sockets. Do nothing if the folder is missing or the name is empty."""
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


def unix_address(folder: str, name: str) -> str:
    """Return the address of the Unix socket ``name`` in a folder. Example: ``ipc:///tmp/asyncrl-4k2f9a1c/buffer``."""
    return f"{_SCHEME}{folder}/{name}"


def folder_of(address: str) -> str:
    """Return the folder of the Unix socket with this address, or an empty string if the address has a port."""
    return str(Path(address.removeprefix(_SCHEME)).parent) if address.startswith(_SCHEME) else ""


def bulk_address(address: str, port: int) -> str:
    """Return the address for the bulk connection to the server with the control address ``address``.

    ``port`` is the server's port for large payloads, 0 for Unix sockets.
    """
    return f"{address.rpartition(':')[0]}:{port}" if port else f"{address}.bulk"


class PortListener:
    """Binds a ZMQ socket to a port. Create the listener while an asyncio event loop runs.

    Close the listener before the ZMQ socket.

    ``on_refused`` is called with a reason for each connection that the listener closes:

    - ``no_files``: this process may not open more files.
    - ``endless``: an incomplete message exceeds ``max_incomplete_bytes``.

    The owner must call ``received`` with the last frame of each message. Raises `OSError` if the port cannot be bound.
    """

    def __init__(
        self,
        bound: zmq.Socket[Any],
        host: str,
        port: int,
        *,
        max_incomplete_bytes: int,
        on_refused: Callable[[str], None],
    ) -> None:
        own_host = _address_of(host)
        family = socket.AF_INET6 if ":" in own_host else socket.AF_INET
        self._listener = socket.create_server((own_host, port), family=family, backlog=_BACKLOG)
        # Make accept() non-blocking, because ZMQ's thread and the thread of `_Refusals` both call accept().
        # If one thread takes the only connection, a blocking accept() would block the other thread.
        self._listener.setblocking(False)
        self._bound = bound
        name = f"[{own_host}]" if family == socket.AF_INET6 else own_host
        self.address = f"tcp://{name}:{self._listener.getsockname()[1]}"
        self._refusals = _Refusals(self._listener.fileno(), self.address, partial(on_refused, "no_files"))
        self._connections = _Connections(self.address, max_incomplete_bytes, partial(on_refused, "endless"))
        self.received = self._connections.received
        bound.setsockopt(zmq.USE_FD, os.dup(self._listener.fileno()))
        monitor = monitor_of(bound, zmq.EVENT_ACCEPT_FAILED | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        bound.bind(self.address)
        self._monitor = Channel(monitor, self._on_event)

    def close(self) -> None:
        """Stop listening."""
        self._bound.disable_monitor()
        self._monitor.close()
        self._connections.close()
        self._refusals.close()
        self._listener.close()

    def _on_event(self, frames: list[zmq.Frame]) -> None:
        event, descriptor = _EVENT.unpack(frames[0].bytes)
        if event == zmq.EVENT_ACCEPT_FAILED:
            self._refusals.wanted.set()
        else:
            self._connections.changed(descriptor, is_open=event == zmq.EVENT_ACCEPTED)


class _Connections:
    """Closes a connection when its incomplete message exceeds ``max_bytes``.

    ZMQ limits the size of a frame, but not the number of frames in an incomplete message. So this class checks each
    second how many bytes the kernel has received on each connection.
    """

    def __init__(self, address: str, max_bytes: int, on_closed: Callable[[], None]) -> None:
        self._address, self._max_bytes, self._on_closed = address, max_bytes, on_closed
        self._since: dict[int, int] = {}
        """Bytes that each connection had received at its latest complete message."""
        self._heard: set[int] = set()
        self._check = asyncio.get_running_loop().create_task(self._close_endless())

    def close(self) -> None:
        self._check.cancel()

    def changed(self, descriptor: int, *, is_open: bool) -> None:
        if is_open:
            self._since[descriptor] = 0
        else:
            self._since.pop(descriptor, None)

    def received(self, frame: zmq.Frame) -> None:
        self._heard.add(int(frame.get(zmq.SRCFD)))

    async def _close_endless(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            heard, self._heard = self._heard, set()
            for descriptor, before in list(self._since.items()):
                try:
                    with socket.socket(fileno=os.dup(descriptor)) as connection:
                        num_bytes = _bytes_received(connection)
                        if descriptor in heard:
                            self._since[descriptor] = num_bytes
                        elif num_bytes - before > self._max_bytes:
                            self._since.pop(descriptor)
                            self._on_closed()
                            logger.warning(
                                "%s closes a connection from %s: its message has more than %d bytes and no end",
                                self._address,
                                connection.getpeername()[0],
                                self._max_bytes,
                            )
                            connection.shutdown(socket.SHUT_RDWR)
                except OSError:  # the peer or ZMQ has just closed the connection
                    self._since.pop(descriptor, None)


def _bytes_received(connection: socket.socket) -> int:
    """Return the connection's ``tcpi_bytes_received`` (see tcp(7)), or 0 if the kernel does not report this value."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    return _BYTES_RECEIVED.unpack_from(info, _BYTES_RECEIVED_AT)[0] if len(info) >= _TCP_INFO_BYTES else 0


class _Refusals(threading.Thread):
    """A thread that accepts and closes all waiting connections each time the event ``wanted`` is set.

    The thread has its own file table, which holds only the listening socket. So the thread can accept a connection when
    the process cannot open more files.
    """

    def __init__(self, listening: int, address: str, on_refused: Callable[[], None]) -> None:
        super().__init__(name=f"refusals {address}", daemon=True)
        self._listening, self._address = listening, address
        self._loop, self._on_refused = asyncio.get_running_loop(), on_refused
        self._is_alone, self._is_closed, self._has_refused = threading.Event(), False, False
        self.wanted = threading.Event()
        self.start()
        self._is_alone.wait()

    def close(self) -> None:
        self._is_closed = True
        self.wanted.set()
        self.join()

    def run(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        is_alone = libc.unshare(_CLONE_FILES) == 0
        if is_alone:
            os.closerange(3, self._listening)
            os.closerange(self._listening + 1, os.sysconf("SC_OPEN_MAX"))
        self._is_alone.set()
        if not is_alone:
            logger.warning("%s: connections beyond the limit of open files will cost a core", self._address)
            return
        with socket.socket(fileno=self._listening) as listener:
            while self.wanted.wait() and not self._is_closed:
                self.wanted.clear()
                with suppress(OSError):  # accept() raises an error if no connection is pending
                    while True:
                        listener.accept()[0].close()
                        self._loop.call_soon_threadsafe(self._note)

    def _note(self) -> None:
        self._on_refused()
        if not self._has_refused:
            self._has_refused = True
            logger.warning("%s closes connections because this process cannot open more files", self._address)


def _address_of(host: str) -> str:
    """Return the address to bind. ``host`` is an address, the name of an interface, or ``*``."""
    if host == "*":
        return "0.0.0.0"
    name = "127.0.0.1" if host == "localhost" else host.strip("[]")
    with suppress(ValueError):
        return str(ipaddress.ip_address(name))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
    return socket.inet_ntoa(answer[20:24])
