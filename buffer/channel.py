"""A ZMQ socket on an asyncio loop: woken by the socket's descriptor, it hands each message to one callback.

zmq's descriptor is edge-triggered, so every wake and every send is followed by reading until nothing is left; after
``_BURST`` messages the loop gets its turn, so that timers and signals are never starved. A second callback ends each
burst, for what is to be done once for many messages.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import zmq

_BURST = 64
_COPY_BELOW_BYTES = 64 * 1024
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_LAST = int(zmq.NOBLOCK)


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
