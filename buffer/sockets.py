"""What both ends of the buffer's connections stand on: ZMQ sockets on an asyncio loop, and large messages in chunks.

Every client has two connections to a server. *Control* carries requests and small payloads. *Bulk* carries payloads
from ``JOIN_BELOW_BYTES`` on, in chunks, so a large put over a slow link delays no heartbeat and no renewal. At most
``WINDOW_BYTES`` of chunks are on their way without an acknowledgement; each acknowledgement shows progress.
"""

import asyncio
import resource
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq

from asyncrl.core.errors import WireError

from .encoding import CHUNK_BYTES

WINDOW_BYTES = 4 * CHUNK_BYTES
_BURST = 64
_COPY_BELOW_BYTES = 64 * 1024
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_LAST = int(zmq.NOBLOCK)
_send: Any = zmq.backend.Socket.send
_receive: Any = zmq.backend.Socket.recv
"""Without the wrappers of `zmq.Socket`, which cost more than twice as much as ZMQ itself: one option read per frame."""
_CHUNK = struct.Struct("<4sQII")
_CHUNK_MAGIC, _ACK_MAGIC = b"chnk", b"ackn"
_MAX_CHUNK_FRAMES = 2048
_MAX_INCOMPLETE = 64
_MAX_INCOMPLETE_FRAMES = 1 << 20


class Channel:
    """Receives into a callback, sends without blocking; it owns its bound or connected socket.

    ``on_message`` is called on the loop with the frames of each message, ``on_burst_end`` after those of one burst.
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
        """Hand a message to ZMQ. Raises `zmq.ZMQError` if the peer is unknown, or its queue is full."""
        last = len(frames) - 1
        for i, frame in enumerate(frames):
            small = type(frame) is bytes and len(frame) < _COPY_BELOW_BYTES
            _send(self._socket, frame, _MORE if i < last else _LAST, small)
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
                frames = [_receive(self._socket, _LAST, False)]
            except zmq.Again:
                return num_read
            while frames[-1].more:
                frames.append(_receive(self._socket, _LAST, False))
            self._on_message(frames)
        return _BURST


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """A piece of a message, or the acknowledgement of one.

    Attributes:
        request_id: The message that it belongs to.
        index: Its place in the message, from 0.
        count: Chunks of the whole message; 0 in an acknowledgement.
        frames: Frames of the message.
    """

    request_id: int
    index: int
    count: int = 0
    frames: Sequence[Any] = ()

    @classmethod
    def parse(cls, frames: Sequence[Any]) -> "Chunk":
        """Read a chunk from a socket. Raises `WireError` if it is not one."""
        head = memoryview(frames[0]) if frames else memoryview(b"")
        if head.nbytes != _CHUNK.size:
            raise WireError(f"a chunk begins with {_CHUNK.size} bytes, got {head.nbytes}")
        magic, request_id, index, count = _CHUNK.unpack(head)
        if magic not in (_CHUNK_MAGIC, _ACK_MAGIC) or (magic == _CHUNK_MAGIC) != (index < count):
            raise WireError(f"this is not a chunk: {bytes(head[:4])!r}, {index} of {count}")
        return cls(request_id=request_id, index=index, count=count, frames=frames[1:])

    def to_frames(self) -> list[Any]:
        """The chunk as it is sent."""
        magic = _CHUNK_MAGIC if self.count else _ACK_MAGIC
        return [_CHUNK.pack(magic, self.request_id, self.index, self.count), *self.frames]


class ChunkSender:
    """Messages on their way to one peer, first come first, within a window of bytes; ``send`` sends one chunk."""

    def __init__(self, send: Callable[[list[Any]], None]) -> None:
        self._send = send
        self._queue: deque[tuple[Chunk, int]] = deque()
        self._unacknowledged: dict[tuple[int, int], int] = {}
        self._num_bytes = 0

    @property
    def is_idle(self) -> bool:
        """Whether everything was acknowledged."""
        return not self._queue and not self._unacknowledged

    def push(self, request_id: int, frames: Sequence[Any]) -> None:
        """Send a message of any size; frames are not copied."""
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
        """The peer has a chunk."""
        self._num_bytes -= self._unacknowledged.pop((chunk.request_id, chunk.index), 0)
        self._pump()

    def reset(self) -> None:
        """Forget everything: the connection is a new one."""
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
    """The chunks of a message that have come so far: their frames, and the bytes in them."""

    frames: list[Any] = field(default_factory=list)
    num_chunks: int = 0
    num_bytes: int = 0


class ChunkReceiver:
    """Messages that arrive from one peer in chunks: those that are incomplete have at most ``max_bytes`` together."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._messages: dict[int, _IncompleteMessage] = {}

    @property
    def is_idle(self) -> bool:
        """Whether no message is incomplete."""
        return not self._messages

    def add(self, chunk: Chunk) -> list[Any] | None:
        """Take a chunk; the frames of its message if that is complete now.

        Raises `WireError`, and forgets the message, if chunks are missing before it, or it is too large with what the
        peer has not completed yet.
        """
        message = self._messages.pop(chunk.request_id, None) or _IncompleteMessage()
        self._num_bytes -= message.num_bytes
        if chunk.index == 0:  # sent again from the beginning
            message = _IncompleteMessage()
        if chunk.index != message.num_chunks:
            raise WireError(f"chunk {chunk.index} of request {chunk.request_id} came after {message.num_chunks} others")
        message.frames += chunk.frames
        message.num_chunks += 1
        message.num_bytes += sum(map(len, chunk.frames))
        if self._num_bytes + message.num_bytes > self._max_bytes:
            raise WireError(
                f"request {chunk.request_id} has more than {self._max_bytes} bytes, the larger of "
                "buffer.max_prompt_bytes and buffer.max_stored_bytes, with what this client has sent in part; raise "
                "it, or send less at once"
            )
        if chunk.index + 1 == chunk.count:
            return message.frames
        if len(self._messages) >= _MAX_INCOMPLETE or len(message.frames) > _MAX_INCOMPLETE_FRAMES:
            raise WireError(
                f"request {chunk.request_id} is one of more than {_MAX_INCOMPLETE} that its client has sent in part, "
                f"or has more than {_MAX_INCOMPLETE_FRAMES} frames; send one after the other"
            )
        self._messages[chunk.request_id] = message
        self._num_bytes += message.num_bytes
        return None

    def reset(self) -> None:
        """Forget everything: the connection is a new one."""
        self._messages.clear()
        self._num_bytes = 0


_FILES_PER_CLIENT = 2  # its control and its bulk connection
_FILES_PER_LINK = 8
_SOCKETS_PER_LINK = 6
"""A link to a server has two connections; of each, ZMQ counts the socket and both ends of its monitor as sockets."""
_OTHER_FILES = 256


def client_context() -> zmq.Context[Any]:
    """The context of all connections that this process makes; ZMQ's bound of 1023 sockets would do for 170 links."""
    context = zmq.Context.instance()
    if context.get(zmq.MAX_SOCKETS) != (most := context.get(zmq.SOCKET_LIMIT)):
        context.set(zmq.MAX_SOCKETS, most)  # counts from the first socket on
    return context


def allow_clients(num_clients: int, *, num_links: int = 0) -> None:
    """Raise this process's limit of open files to what a server takes that has so many clients, and links to stores.

    Its children inherit it. Raises `ValueError` if the limit cannot be raised so far, or ZMQ has too few sockets.
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
            f"{hard}; raise it where this is started: ulimit -Hn {needed}, or LimitNOFILE of the service that starts it"
        )
    if soft != resource.RLIM_INFINITY and needed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
