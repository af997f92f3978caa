"""A ROUTER socket with what every server of the buffer needs: keys, limits, counters, acknowledgements in batches."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import zmq

from asyncrl.protocol.errors import RateExceeded, WireError

from . import messages
from .channel import Channel
from .config import BufferConfig
from .journal import Journal
from .keys import Gate, check_exposure, secure_server, server_keys
from .messages import Message

_MAX_UNREAD_MESSAGES = 64


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


class Endpoint:
    """Binds a ROUTER socket and serves on it until `close`; made on a running loop.

    Args:
        config: Options.
        make_service: Builds what answers the requests, which sends through the endpoint it is given.
        journal: Remembers the address, so that a server started again is found where it was.
    """

    def __init__(
        self, config: BufferConfig, *, make_service: "Callable[[Endpoint], Service]", journal: Journal | None
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
