"""Rounds in which the learner ranks send a version over the network: which receivers are in one, and how they meet.

    receivers ──ask──▶ rank 0              A round: one version, its receivers, one deadline.
    receivers ◀──call, present──▶ rank 0   A receiver that does not answer the call is not in the round.
    rank 0 ──round──▶ receivers, ranks     Each member leaves its address at rank 0 for the others (`Meeting`).
    ranks ──done──▶ rank 0                 Then the next round begins.

These messages go over one ZMQ socket of rank 0, the *channel*. A message is a JSON object and any number of byte
strings. The channel's keys (CURVE) are made with the learner and travel in offers, which the buffer encrypts beyond
loopback. The channel refuses a process without an offer of this learner. Addresses are numeric, so no name service is
asked. The weights themselves go from each rank to the receivers (`stream.py`).

`RoundCoordinator` runs on rank 0, on an event loop that training does not wait for. Messages and its own deadlines wake
it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any, TypeVar

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils.monitor import recv_monitor_message

from asyncrl.core.errors import WeightsError
from asyncrl.core.types import FROZEN, WeightOffer
from asyncrl.weights.carriers import HOST_WINDOW_S, Backend, PublishOptions

logger = logging.getLogger(__name__)

T = TypeVar("T")
MAX_ROUNDS = 3
CALL_S = 3.0
"""Time that receivers have to answer rank 0's call."""
HEARTBEAT_S = 5.0
SILENCE_S = 15.0
"""A connection ends if the other end sends nothing for this long, not even heartbeats."""
_NEVER_MS = 10**9  # with -1, libzmq 4.3.5 may hang on a connection that was refused
_DOMAIN = "weights"
_KEY_CHARS = 40  # of a CURVE key in Z85
_FAILURES = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_ENDS = zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED


# Rounds


@dataclass(frozen=True, kw_only=True)
class Round:
    """One version for the receivers that asked for it.

    Attributes:
        number: Counts from 1.
        version: Policy version.
        num_receivers: Number of receivers. Each process group also has one learner rank, as its rank 0.
        shares: Number of the manifest's pieces that each learner rank sends, in the manifest's order.
        is_delta: Each rank sends its delta file instead; the receivers hold the version before.
        timeout_s: Deadline of the round, transfers included.
        oldest: Oldest version that the ranks still hold.
        backend: See `PublishOptions`.
    """

    number: int
    version: int
    num_receivers: int
    shares: tuple[int, ...]
    is_delta: bool
    timeout_s: float
    oldest: int
    backend: Backend

    @classmethod
    def read(cls, fields: dict[str, Any]) -> Round:
        """Return the round of a decoded message."""
        return cls(**{**fields, "shares": tuple(fields["shares"])})


@dataclass(frozen=True, kw_only=True)
class HeldOffer:
    """An offered version on rank 0: the manifest's text, `Round.shares`, and the digest of a delta's base."""

    offer: WeightOffer
    manifest: bytes
    shares: tuple[int, ...]
    base: str


@dataclass(frozen=True, kw_only=True)
class RoundRequest:
    """A receiver's request for a version; ``holds`` is the digest of the version that it holds, or empty."""

    receiver: bytes
    version: int
    holds: str


class HeldVersions(dict[int, T]):
    """What a learner rank holds of the newest versions, by version. Frozen weights stay.

    Args:
        count: Number of versions. The oldest version that engines are still offered is held as well.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count, self.oldest = count, 0

    def add(self, version: int, held: T) -> None:
        """Hold a version; forget those that are too many."""
        self[version] = held
        for older in sorted(self.keys() - {FROZEN})[: -self._count]:
            if older != self.oldest:
                self.pop(older, None)

    def retire(self, oldest: int) -> None:
        """Forget versions before ``oldest``, the oldest version that engines are still offered."""
        self.oldest = max(oldest, self.oldest)
        for version in sorted(self):
            if FROZEN < version < oldest:
                self.pop(version, None)


def rounds_of(
    requests: Sequence[RoundRequest], offers: Mapping[int, HeldOffer], *, only_newest: bool
) -> list[tuple[HeldOffer | None, list[RoundRequest], bool]]:
    """Divide requests into rounds, oldest version first.

    Args:
        requests: At least one.
        offers: The versions that the ranks hold.
        only_newest: Send only the newest of the requested policy versions. A receiver that requested an older version
            requests again. False where engines pause for the version that they requested: they cannot take another.

    Returns:
        Per round the offer, its requests, and whether a delta is sent. The offer is None if no version is sent.
    """
    newest = max(request.version for request in requests)
    rounds: list[tuple[HeldOffer | None, list[RoundRequest], bool]] = []
    for version in sorted({request.version for request in requests}):
        asked = [request for request in requests if request.version == version]
        is_sent = not only_newest or version in (newest, FROZEN)
        offered = offers.get(version) if is_sent else None
        holders = [request for request in asked if offered and offered.base and request.holds == offered.base]
        others = [request for request in asked if request not in holders]
        rounds += [(offered, some, some is holders) for some in (holders, others) if some]
    return rounds


@dataclass(kw_only=True)
class Meeting:
    """What the members of a round leave for one another.

    Attributes:
        ends_s: Time of the event loop at which the round ends.
        values: What members left, by key. The keys of one process group begin with its name and a slash.
        pending: Waiting members, each with its key and the number of keys that its group must have.
    """

    ends_s: float
    values: dict[str, bytes]
    pending: list[tuple[bytes, str, int]] = field(default_factory=list)

    def leave(self, key: str, value: bytes) -> list[tuple[bytes, dict[str, bytes]]]:
        """Store a value. Returns the members whose requests can be answered now, with the answers."""
        self.values[key] = value
        waiting, self.pending = self.pending, []
        return [answer for member, wanted, count in waiting for answer in self.ask(member, wanted, count)]

    def ask(self, member: bytes, key: str, count: int) -> list[tuple[bytes, dict[str, bytes]]]:
        """Request a key; answered when the key is there and its group has ``count`` keys. Returns like `leave`."""
        group = key.partition("/")[0] + "/"
        known = {own: value for own, value in self.values.items() if own == key or own.startswith(group)}
        if key in known and len(known) >= count:
            return [(member, known)]
        self.pending.append((member, key, count))
        return []


class RoundCoordinator:
    """Makes one round after the other. Any thread may change ``offers``, the versions that every rank holds."""

    def __init__(self, options: PublishOptions, server: ChannelServer, *, num_ranks: int) -> None:
        self.offers: HeldVersions[HeldOffer] = HeldVersions(options.num_held)
        self._options, self._server, self._num_ranks = options, server, num_ranks
        self._requests: asyncio.Queue[RoundRequest] = asyncio.Queue()
        self._call = ""
        self._present: asyncio.Queue[bytes] = asyncio.Queue()
        self._meetings: dict[int, Meeting] = {}
        self._done: dict[int, int] = {}  # the last round that each rank reported
        self._rank_done = asyncio.Event()

    async def run(self) -> None:
        """Make rounds until the task is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._listen())
            tasks.create_task(self._lead())

    async def _listen(self) -> None:
        while True:
            message = await self._server.receive()
            try:
                self._take(message)
            except (KeyError, TypeError, ValueError) as error:
                logger.warning("%s on the channel of weights is ignored: %r", message.head, error)

    def _take(self, message: ChannelMessage) -> None:
        sender, head = message.sender, message.head
        match head["kind"]:
            case "ask":
                self._requests.put_nowait(RoundRequest(receiver=sender, version=head["version"], holds=head["holds"]))
            case "present" if head["call"] == self._call:
                self._present.put_nowait(sender)
            case "done":
                if head["failed"] and (broken := self._meetings.pop(head["round"], None)) is not None:
                    for member, _, _ in broken.pending:  # so that they do not wait until the deadline
                        self._server.send(member, {"over": head["round"]})
                self._done[head["rank"]] = head["round"]
                self._rank_done.set()
            case "leave":
                if (meeting := self._meeting(head["round"])) is not None:
                    self._hand_out(meeting.leave(head["key"], message.values[0]))
            case "want":
                if (meeting := self._meeting(head["round"])) is not None:
                    self._hand_out(meeting.ask(sender, head["key"], head["count"]))
                else:
                    self._server.send(sender, {"over": head["round"]})

    def _meeting(self, number: int) -> Meeting | None:
        meeting = self._meetings.get(number)
        return meeting if meeting is not None and asyncio.get_running_loop().time() < meeting.ends_s else None

    def _hand_out(self, answers: Iterable[tuple[bytes, dict[str, bytes]]]) -> None:
        for member, values in answers:
            self._server.send(member, {"keys": list(values)}, *values.values())

    async def _lead(self) -> None:
        await self._until_done(0)
        number, options = 0, self._options
        while True:
            requests = [await self._requests.get()]
            requests += await _gathered(self._requests, options.num_receivers - 1, options.window_s)
            present = await self._those_present(requests)
            only_newest = not options.into_engines
            for offered, asked, is_delta in rounds_of(present, self.offers, only_newest=only_newest) if present else ():
                if offered is None:
                    self._answer(asked, {"gone": True})
                else:
                    number += 1
                    await self._run(number, offered, asked, is_delta=is_delta)

    async def _those_present(self, requests: Sequence[RoundRequest]) -> list[RoundRequest]:
        """Call the receivers; returns the requests of those that answer. A stopped receiver delays the others once."""
        self._call, self._present = uuid.uuid4().hex, asyncio.Queue()
        for request in requests:
            self._server.send(request.receiver, {"call": self._call})
        there = set(await _gathered(self._present, len(requests), CALL_S))
        self._answer([request for request in requests if request.receiver not in there], {"late": True})
        return [request for request in requests if request.receiver in there]

    def _answer(self, requests: Sequence[RoundRequest], answer: dict[str, Any]) -> None:
        for index, request in enumerate(requests):
            self._server.send(request.receiver, {"answer": answer, "index": index})

    async def _run(self, number: int, offered: HeldOffer, requests: Sequence[RoundRequest], *, is_delta: bool) -> None:
        """Announce a round, and wait until all ranks are done with it."""
        this = Round(
            number=number,
            version=offered.offer.version,
            num_receivers=len(requests),
            shares=offered.shares,
            is_delta=is_delta,
            timeout_s=self._options.round_timeout_s(offered.offer.num_bytes),
            oldest=self.offers.oldest,
            backend=self._options.backend,
        )
        now_s = asyncio.get_running_loop().time()
        # A receiver may still look for the others when the ranks are done.
        self._meetings = {other: held for other, held in self._meetings.items() if now_s < held.ends_s}
        self._meetings[number] = Meeting(ends_s=now_s + this.timeout_s, values={"manifest": offered.manifest})
        for rank in range(self._num_ranks):
            self._server.send(rank_id(rank), asdict(this))
        self._answer(requests, asdict(this))
        try:
            async with asyncio.timeout(this.timeout_s + HOST_WINDOW_S):
                await self._until_done(number)
        except TimeoutError:
            logger.warning("round %d of weights: not every rank was done within %.1f s", number, this.timeout_s)

    async def _until_done(self, number: int) -> None:
        """Wait until every rank has reported a round; round 0 means that the rank is connected."""
        while len(self._done) < self._num_ranks or min(self._done.values()) < number:
            self._rank_done.clear()
            await self._rank_done.wait()


async def _gathered(queue: asyncio.Queue[T], count: int, wait_s: float) -> list[T]:
    """Return what arrives within ``wait_s``, at most ``count`` items."""
    found: list[T] = []
    try:
        async with asyncio.timeout(wait_s):
            while len(found) < count:
                found.append(await queue.get())
    except TimeoutError:
        pass
    return found


# The channel


class ChannelRefused(WeightsError):
    """No process listens at a channel's address, or another sender does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChannelAddress:
    """How to reach a `ChannelServer`.

    Attributes:
        endpoint: IPv4 address and port. Example: ``"10.0.0.5:41234"``.
        access: The server's public key and the clients' secret key, Z85 text. Never shown.
    """

    endpoint: str
    access: str = field(repr=False)

    def unlock(self, dealer: zmq.Socket[Any]) -> None:
        """Give a client's socket the keys."""
        own_key = self.access[_KEY_CHARS:].encode()
        dealer.curve_serverkey, dealer.curve_secretkey = self.access[:_KEY_CHARS].encode(), own_key
        dealer.curve_publickey = zmq.curve_public(own_key)
        _keep_alive(dealer)

    def own_host(self) -> str:
        """Return the IPv4 address of this host that the server's host can reach."""
        host, _, port = self.endpoint.rpartition(":")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, int(port)))  # sends nothing
            return probe.getsockname()[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChannelMessage:
    """A received message.

    Attributes:
        head: JSON object.
        values: Byte strings.
        sender: At the server, the connection that the message came from; the answer goes there.
    """

    head: dict[str, Any]
    values: list[bytes]
    sender: bytes = b""

    @classmethod
    def read(cls, frames: list[bytes], sender: bytes = b"") -> ChannelMessage:
        """Raises `ValueError` if the frames are not a message."""
        head = json.loads(frames[0]) if frames else None
        if not isinstance(head, dict):
            raise ValueError(f"a message begins with a JSON object, got {frames[:1]!r:.100}")
        return cls(head=head, values=list(frames[1:]), sender=sender)


class ChannelServer:
    """Listens on a free port of ``host``, an IPv4 address, with its own keys. Make it on a running event loop.

    Attributes:
        address: For the clients.
    """

    def __init__(self, host: str) -> None:
        public, secret = zmq.curve_keypair()
        self._allowed, own = zmq.curve_keypair()
        self._context = zmq.asyncio.Context()  # an authenticator needs a context for itself
        self._gate = AsyncioAuthenticator(self._context)
        self._gate.configure_curve_callback(_DOMAIN, self)
        self._gate.start()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a learner rank may connect again
        self._socket.curve_server, self._socket.curve_publickey, self._socket.curve_secretkey = True, public, secret
        self._socket.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)
        _keep_alive(self._socket)
        self._socket.bind(f"tcp://{host}:*")
        endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://")
        self.address = ChannelAddress(endpoint=endpoint, access=(public + own).decode())

    def callback(self, _domain: str, key: bytes) -> bool:
        """Return whether a client's public key is the one of the offers; `zmq.auth` calls this."""
        return key == self._allowed

    def send(self, receiver: bytes, head: dict[str, Any], *values: bytes) -> None:
        """Send to a connection; a connection that has ended is ignored."""
        self._socket.send_multipart([receiver, json.dumps(head).encode(), *values])

    async def receive(self) -> ChannelMessage:
        """Return the next message."""
        while True:
            sender, *frames = await self._socket.recv_multipart()
            try:
                return ChannelMessage.read(frames, sender)
            except ValueError as error:
                logger.warning("a message on the channel of weights is ignored: %s", error)

    def close(self) -> None:
        """End all connections at once."""
        self._gate.stop()
        self._context.destroy(linger=0)


class RankChannel:
    """A learner rank's connection to rank 0, on an event loop; it is made again if it is lost."""

    def __init__(self, address: ChannelAddress, rank: int) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.ROUTING_ID, rank_id(rank))
        address.unlock(self._socket)
        self._socket.connect(f"tcp://{address.endpoint}")

    async def send(self, head: dict[str, Any]) -> None:
        """Send, or keep the message until there is a connection."""
        await self._socket.send(json.dumps(head).encode())

    async def receive(self) -> dict[str, Any]:
        """Return the next message's head. Raises `ValueError` if it is not a message."""
        return ChannelMessage.read(await self._socket.recv_multipart()).head

    def close(self) -> None:
        """End the connection at once."""
        self._context.destroy(linger=0)


class WeightChannel:
    """A receiver's connection to rank 0, which is not made again. It blocks, and serves one thread at a time.

    A context manager. The constructor begins to connect; `receive` reports a failure.
    """

    def __init__(self, address: ChannelAddress) -> None:
        self.address = address
        self._is_reached = False
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, 0)  # a stopped rank 0 has until the deadline of `receive`
        address.unlock(self._socket)
        self._events = self._socket.get_monitor_socket(zmq.EVENT_CONNECTED | _FAILURES | _ENDS)
        self._poller = zmq.Poller()
        for watched in (self._socket, self._events):
            self._poller.register(watched, zmq.POLLIN)
        self._socket.connect(f"tcp://{address.endpoint}")

    def send(self, head: dict[str, Any], *values: bytes) -> None:
        """Send, or keep the message until there is a connection."""
        self._socket.send_multipart([json.dumps(head).encode(), *values])

    def receive(self, timeout_s: float) -> ChannelMessage:
        """Wait for the next message.

        Raises:
            ChannelRefused: no process listens at the address, or the process belongs to another sender.
            WeightsError: the connection ended, or cannot be made.
            TimeoutError: no message came in time.
        """
        ends_s = time.monotonic() + timeout_s
        while True:
            left_s = ends_s - time.monotonic()
            ready = dict(self._poller.poll(max(1, int(left_s * 1000))))
            if self._socket in ready:
                return ChannelMessage.read(self._socket.recv_multipart())
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
        """Raise if an event is the end of the connection."""
        if event == zmq.EVENT_CONNECTED:
            self._is_reached = True
        elif event & _FAILURES:
            self._check_listening()  # rank 0 may have ended during the handshake
            raise ChannelRefused(f"another sender listens at {self.address.endpoint}")
        elif self._is_reached:
            raise WeightsError(f"the connection to learner rank 0 at {self.address.endpoint} ended")
        else:
            self._check_listening()
            raise WeightsError(f"learner rank 0 at {self.address.endpoint} did not accept the connection")

    def _check_listening(self) -> None:
        """Raise the reason why no connection can be made, which ZMQ does not report."""
        host, _, port = self.address.endpoint.rpartition(":")
        try:
            socket.create_connection((host, int(port)), SILENCE_S).close()
        except ConnectionRefusedError:
            raise ChannelRefused(f"nobody listens at {self.address.endpoint}") from None
        except OSError as error:
            raise WeightsError(f"learner rank 0 at {self.address.endpoint} cannot be reached: {error}") from None


def rank_id(rank: int) -> bytes:
    """Return the connection of a learner rank, for `ChannelServer.send`."""
    return f"rank {rank}".encode()


def _keep_alive(end: zmq.Socket[Any]) -> None:
    """Notice a peer that vanished, and never drop messages."""
    end.setsockopt(zmq.HEARTBEAT_IVL, int(HEARTBEAT_S * 1000))
    end.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(SILENCE_S * 1000))
    end.setsockopt(zmq.SNDHWM, 0)
    end.setsockopt(zmq.RCVHWM, 0)
