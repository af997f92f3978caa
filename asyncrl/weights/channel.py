"""The control channel of weights that are sent over the network: one ZMQ socket on learner rank 0.

`ChannelServer` is that socket, `WeightChannel` the connection of a receiver, which blocks, and `RankChannel` that of a
learner rank, on an event loop. A message is a JSON object and any number of byte strings. The keys (CURVE) are made
with the server and travel with its address, in offers. Who has no offer of this very server is refused: a stranger, and
who asks for what an earlier learner offered. Addresses are numbers, so no name service is asked for anything.
"""

from __future__ import annotations

import json
import logging
import socket
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils.monitor import recv_monitor_message

from asyncrl.core.errors import WeightsError

logger = logging.getLogger(__name__)

HEARTBEAT_S = 5.0
SILENCE_S = 15.0
"""A connection whose other end sends nothing, not even heartbeats, for so long is given up."""
_NEVER_MS = 10**9  # -1 would say so, but libzmq 4.3.5 then may hang on a connection that was refused
_DOMAIN = "weights"
_KEY_CHARS = 40  # of a CURVE key in Z85
_FAILURES = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_ENDS = zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED


class ChannelRefused(WeightsError):
    """Nobody listens at a channel's address, or somebody else does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChannelAddress:
    """How to reach a `ChannelServer`.

    Attributes:
        endpoint: IPv4 address and port. Example: ``"10.0.0.5:41234"``.
        access: The server's public key and the secret key of all who may reach it, Z85 text. Never shown.
    """

    endpoint: str
    access: str = field(repr=False)

    @property
    def server_key(self) -> bytes:
        """Public."""
        return self.access[:_KEY_CHARS].encode()

    @property
    def own_key(self) -> bytes:
        """Secret."""
        return self.access[_KEY_CHARS:].encode()

    def own_host(self) -> str:
        """IPv4 address by which the server's host reaches this one."""
        host, _, port = self.endpoint.rpartition(":")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, int(port)))  # sends nothing
            return probe.getsockname()[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChannelMessage:
    """A message, as it was received.

    Attributes:
        sender: At the server, the connection that it came from; the answer goes there.
        head: JSON object.
        values: Whatever bytes go with it.
    """

    head: dict[str, Any]
    values: list[bytes]
    sender: bytes = b""


class ChannelServer:
    """Listens on one address, with keys of its own. Make it on a running event loop.

    Attributes:
        address: For `WeightChannel` and `RankChannel`, of any process that is to reach it.
    """

    def __init__(self, host: str) -> None:
        """Listen on a free port of ``host``, an IPv4 address."""
        public, secret = zmq.curve_keypair()
        self._allowed, own = zmq.curve_keypair()
        self._context = zmq.asyncio.Context()  # of its own: there is one gate per context
        self._gate = AsyncioAuthenticator(self._context)
        self._gate.configure_curve_callback(_DOMAIN, self)
        self._gate.start()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a learner rank that lost its connection comes back
        self._socket.curve_server, self._socket.curve_publickey, self._socket.curve_secretkey = True, public, secret
        self._socket.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)
        _keep_alive(self._socket)
        self._socket.bind(f"tcp://{host}:*")
        endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://")
        self.address = ChannelAddress(endpoint=endpoint, access=(public + own).decode())

    def callback(self, _domain: str, key: bytes) -> bool:
        """Whether a client's public key opens the channel; asked by `zmq.auth`."""
        return key == self._allowed

    def send(self, receiver: bytes, head: dict[str, Any], *values: bytes) -> None:
        """Send to a connection; nothing happens if it has ended."""
        self._socket.send_multipart([receiver, json.dumps(head).encode(), *values])

    async def receive(self) -> ChannelMessage:
        """The next message."""
        while True:
            sender, *frames = await self._socket.recv_multipart()
            try:
                return _message(frames, sender)
            except ValueError as error:
                logger.warning("a message on the channel of weights is ignored: %s", error)

    def close(self) -> None:
        """End all connections at once."""
        self._gate.stop()
        self._context.destroy(linger=0)


class RankChannel:
    """A learner rank's connection to rank 0, on an event loop; one that is lost is made again."""

    def __init__(self, address: ChannelAddress, rank: int) -> None:
        """Connect, as soon as rank 0 is there."""
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.ROUTING_ID, rank_id(rank))
        _unlock(self._socket, address)
        self._socket.connect(f"tcp://{address.endpoint}")

    async def send(self, head: dict[str, Any]) -> None:
        """Send, or keep it until there is a connection."""
        await self._socket.send(json.dumps(head).encode())

    async def receive(self) -> dict[str, Any]:
        """The next message's head. Raises `ValueError` if it is not a message."""
        return _message(await self._socket.recv_multipart()).head

    def close(self) -> None:
        """End the connection at once."""
        self._context.destroy(linger=0)


class WeightChannel:
    """One connection to rank 0, which is not made again; blocking, for one thread at a time. A context manager.

    Attributes:
        address: Rank 0's.
    """

    def __init__(self, address: ChannelAddress) -> None:
        """Begin to connect; what becomes of it is told by `receive`."""
        self.address = address
        self._is_reached = False
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, 0)  # a server that stands still is waited for
        _unlock(self._socket, address)
        self._events = self._socket.get_monitor_socket(zmq.EVENT_CONNECTED | _FAILURES | _ENDS)
        self._poller = zmq.Poller()
        for watched in (self._socket, self._events):
            self._poller.register(watched, zmq.POLLIN)
        self._socket.connect(f"tcp://{address.endpoint}")

    def send(self, head: dict[str, Any], *values: bytes) -> None:
        """Send, or keep it until there is a connection."""
        self._socket.send_multipart([json.dumps(head).encode(), *values])

    def receive(self, timeout_s: float) -> ChannelMessage:
        """Wait for the next message.

        Raises:
            ChannelRefused: nobody listens there, or not who made the address.
            WeightsError: the connection ended, or cannot be made.
            TimeoutError: nothing came in time.
        """
        ends_s = time.monotonic() + timeout_s
        while True:
            left_s = ends_s - time.monotonic()
            ready = dict(self._poller.poll(max(1, int(left_s * 1000))))
            if self._socket in ready:
                return _message(self._socket.recv_multipart())
            if self._events in ready:
                self._notice(recv_monitor_message(self._events)["event"])
            elif left_s <= 0:
                raise TimeoutError(f"learner rank 0 at {self.address.endpoint} was silent for {timeout_s:.1f} s")

    def close(self) -> None:
        """End the connection at once."""
        self._context.destroy(linger=0)

    def __enter__(self) -> WeightChannel:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def _notice(self, event: int) -> None:
        """Raise where an event of the connection is its end."""
        if event == zmq.EVENT_CONNECTED:
            self._is_reached = True
        elif event & _FAILURES:
            self._check_listening()  # else it ended before it had answered
            raise ChannelRefused(f"another sender listens at {self.address.endpoint}")
        elif self._is_reached:
            raise WeightsError(f"the connection to learner rank 0 at {self.address.endpoint} ended")
        else:
            self._check_listening()
            raise WeightsError(f"learner rank 0 at {self.address.endpoint} was not there at first")

    def _check_listening(self) -> None:
        """Raise why no connection can be made, which ZMQ does not tell."""
        host, _, port = self.address.endpoint.rpartition(":")
        try:
            socket.create_connection((host, int(port)), SILENCE_S).close()
        except ConnectionRefusedError:
            raise ChannelRefused(f"nobody listens at {self.address.endpoint}") from None
        except OSError as error:
            raise WeightsError(f"learner rank 0 at {self.address.endpoint} cannot be reached: {error}") from None


def rank_id(rank: int) -> bytes:
    """The connection of a learner rank, for `ChannelServer.send`."""
    return f"rank {rank}".encode()


def _unlock(dealer: zmq.Socket[Any], address: ChannelAddress) -> None:
    dealer.curve_serverkey, dealer.curve_secretkey = address.server_key, address.own_key
    dealer.curve_publickey = zmq.curve_public(address.own_key)
    _keep_alive(dealer)


def _keep_alive(end: zmq.Socket[Any]) -> None:
    """Notice a peer that is gone without a word; drop nothing for want of room."""
    end.setsockopt(zmq.HEARTBEAT_IVL, int(HEARTBEAT_S * 1000))
    end.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(SILENCE_S * 1000))
    end.setsockopt(zmq.SNDHWM, 0)
    end.setsockopt(zmq.RCVHWM, 0)


def _message(frames: list[bytes], sender: bytes = b"") -> ChannelMessage:
    head = json.loads(frames[0]) if frames else None
    if not isinstance(head, dict):
        raise ValueError(f"a message begins with a JSON object, got {frames[:1]!r:.100}")
    return ChannelMessage(head=head, values=list(frames[1:]), sender=sender)
