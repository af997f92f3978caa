"""Rounds: transfers of a version from the learner ranks to receivers. This module chooses and connects the members.

    receivers ──ask──▶ rank 0              A round: one version, its receivers, one deadline.
    receivers ◀──call, present──▶ rank 0   A receiver that does not answer the call is not in the round.
    rank 0 ──round──▶ receivers, ranks     Each member stores its address at rank 0 for the other members (`Meeting`).
    ranks ──done──▶ rank 0                 Then the next round begins.

These messages use TCP connections to rank 0, the *channel*. A message is its length followed by a msgpack map. On a
new connection, each side first proves that it has the channel's key. Receivers get the key in the offers of versions.
Except on loopback, the buffer encrypts the offers. The weights do not pass through the channel, but through a process
group (`stream.py`).
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import socket
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from asyncrl.core.errors import WeightsError
from asyncrl.core.types import FROZEN, WeightOffer
from asyncrl.weights.carriers import HOST_WINDOW_S, Backend, PublishOptions

logger = logging.getLogger(__name__)

T = TypeVar("T")
MAX_ROUNDS = 3
CALL_S = 3.0
"""Seconds within which a receiver must answer rank 0's call."""
HEARTBEAT_S = 5.0
SILENCE_S = 15.0
"""Seconds after which a connection ends if the other host answers nothing, not even TCP's keep-alive probes."""
_MAX_REQUEST_BYTES = 1 << 20
"""Longest accepted message to rank 0. It can be short, because members send only addresses and numbers."""
_NONCE_BYTES, _PROOF_BYTES, _SIZE_BYTES = 16, 32, 4


# Rounds


@dataclass(frozen=True, kw_only=True)
class Round:
    """One transfer of a version to the receivers that requested it.

    Attributes:
        number: Number of the round, from 1.
        group: Number of the round in which the process group was made. Later rounds with the same members use the same
            group. The group's first ranks are the learner ranks, and the receivers follow.
        shares: By learner rank: the number of pieces (parts of tensors) that the rank sends. The manifest lists the
            pieces in the order of the ranks.
        is_delta: Whether each rank sends its delta file instead of its pieces. The receivers then hold the previous
            version.
        timeout_s: Longest time of the round in seconds, including the transfers.
        oldest: Oldest version that the learner ranks must keep in memory. The ranks forget older versions.
    """

    number: int
    version: int
    group: int
    num_receivers: int
    shares: tuple[int, ...]
    is_delta: bool
    timeout_s: float
    oldest: int
    backend: Backend

    @property
    def num_members(self) -> int:
        """Number of processes in the round: learner ranks and receivers."""
        return len(self.shares) + self.num_receivers


@dataclass(frozen=True, kw_only=True)
class HeldOffer:
    """The data that rank 0 keeps for an offered version.

    Attributes:
        manifest: Text of the version's manifest.
        shares: By learner rank: the number of pieces that the rank sends.
        base: If the version is a delta, the manifest digest of its base version; otherwise empty.
    """

    offer: WeightOffer
    manifest: bytes
    shares: tuple[int, ...]
    base: str


@dataclass(frozen=True, kw_only=True)
class RoundRequest:
    """A receiver's request for a version.

    Attributes:
        receiver: Connection to the receiver.
        holds: Manifest digest of the version that the receiver has; empty if it has none.
        host: Host name of the receiver.
    """

    receiver: Any
    version: int
    holds: str
    host: str = ""


class HeldVersions(dict[int, T]):
    """A dict that maps a policy version to the data that a learner rank keeps of the version.

    Frozen weights are never removed.

    Args:
        count: Number of newest versions to keep. In addition, the oldest version that is still offered to engines is
            kept.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count, self.oldest = count, 0

    def add(self, version: int, held: T) -> None:
        """Store the data ``held`` for ``version``. Then remove the oldest versions if there are too many versions."""
        self[version] = held
        for older in sorted(self.keys() - {FROZEN})[: -self._count]:
            if older != self.oldest:
                self.pop(older, None)

    def retire(self, oldest: int) -> None:
        """Remove the versions before ``oldest``, the oldest version that is still offered to engines."""
        self.oldest = max(oldest, self.oldest)
        for version in sorted(self):
            if FROZEN < version < oldest:
                self.pop(version, None)


def rounds_of(
    requests: Sequence[RoundRequest], offers: Mapping[int, HeldOffer], *, only_newest: bool
) -> list[tuple[HeldOffer | None, list[RoundRequest], bool]]:
    """Divide requests for weights into rounds (transfers of one version), oldest version first.

    Args:
        requests: At least one request.
        offers: The versions that the ranks hold.
        only_newest: Whether to send only the newest requested policy version. Receivers that requested an older version
            must then request again. Must be False for paused engines, because they cannot load another version.

    Returns:
        A tuple per round: the offer, the requests that the round answers, and whether a delta is sent. The offer is
        None if these requests get no version.
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
    """A key-value store on rank 0, in which the members of a new process group exchange their addresses.

    Attributes:
        ends_s: Time of the event loop at which the round ends.
        values: The stored values by key.
        pending: Members that wait for a value, as tuples: connection, key of the value, and number of keys that must be
            stored before the member gets an answer.
    """

    ends_s: float
    values: dict[str, bytes] = field(default_factory=dict)
    pending: list[tuple[Any, str, int]] = field(default_factory=list)

    def take(self, member: Any, message: Mapping[str, Any]) -> list[Any]:
        """Process a member's message. The message stores a value, or asks for the value of a key.

        Returns the connections of the members that must now get an answer. For each of these members, the store now has
        the value and as many keys as the member requires.
        """
        if message["kind"] == "leave":
            self.values[message["key"]] = message["value"]
        else:
            self.pending.append((member, message["key"], message["count"]))
        ready = [one for one in self.pending if one[1] in self.values and len(self.values) >= one[2]]
        self.pending = [one for one in self.pending if one not in ready]
        return [one[0] for one in ready]


class RoundCoordinator:
    """The coordinator on learner rank 0. It runs one round (transfer of a version) after the other.

    It has its own event loop, and listens for receivers and learner ranks on a free port of ``host``, an IPv4 address.
    ``offers`` are the versions that every rank holds; any thread may change them.

    Attributes:
        address: Address and key for connections to this coordinator.
    """

    def __init__(self, options: PublishOptions, host: str, *, num_ranks: int) -> None:
        self.offers: HeldVersions[HeldOffer] = HeldVersions(options.num_held)
        self._options, self._num_ranks = options, num_ranks
        self._listener = socket.create_server((host, 0))
        self.address = ChannelAddress(
            endpoint=f"{host}:{self._listener.getsockname()[1]}", access=secrets.token_hex(_PROOF_BYTES)
        )
        self._requests: asyncio.Queue[RoundRequest] = asyncio.Queue()
        self._call = 0
        self._present: asyncio.Queue[StreamWriter] = asyncio.Queue()
        self._meetings: dict[int, Meeting] = {}
        self._members: list[StreamWriter] = []
        self._group = 0
        self._ranks: dict[int, StreamWriter] = {}
        # `_done` maps each learner rank to the latest round that has ended on the rank.
        self._done: dict[int, int] = {}
        self._rank_done = asyncio.Event()
        self._closed: Future[None] = Future()

    async def run(self) -> None:
        """Accept connections, and run rounds until `close` is called. An error ends this call, and is logged."""
        server = await asyncio.start_server(self._serve, sock=self._listener)
        try:
            making = asyncio.create_task(self._make_rounds())
            await asyncio.wait({making, asyncio.wrap_future(self._closed)}, return_when=asyncio.FIRST_COMPLETED)
            if making.done() and (error := making.exception()) is not None:
                # Log the error here, because no other code reads it. The receivers report only missed deadlines.
                logger.error("the learner does not send further weights: %r", error)
        finally:
            server.close()

    def close(self) -> None:
        """Make `run` return. May be called from any thread, and more than once."""
        if not self._closed.done():
            self._closed.set_result(None)

    async def _make_rounds(self) -> None:
        number, options = 0, self._options
        await self._until_done(0)
        while True:
            requests = [await self._requests.get()]
            requests += await _gathered(self._requests, options.num_receivers - 1, options.window_s)
            # Call the receivers, and leave out receivers that do not answer, because they would block the round.
            self._call, self._present = self._call + 1, asyncio.Queue()
            for request in requests:
                send_message(request.receiver, {"call": self._call})
            there = set(await _gathered(self._present, len(requests), CALL_S))
            _answer([request for request in requests if request.receiver not in there], {"late": True})
            present = [request for request in requests if request.receiver in there]
            only_newest = not options.into_engines
            divided = rounds_of(present, self.offers, only_newest=only_newest) if present else []
            for offered, asked, is_delta in divided:
                if offered is None:
                    _answer(asked, {"gone": True})
                else:
                    number += 1
                    await self._run(number, offered, asked, is_delta=is_delta)

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        key, nonce = self.address.access, secrets.token_bytes(_NONCE_BYTES)
        try:
            _keep_alive(writer.get_extra_info("socket"))
            async with asyncio.timeout(SILENCE_S):
                writer.write(nonce)
                proof, other_nonce = await reader.readexactly(_PROOF_BYTES), await reader.readexactly(_NONCE_BYTES)
                if not hmac.compare_digest(proof, _proof(key, b"client", nonce)):
                    writer.write(bytes(_PROOF_BYTES))
                    return
                writer.write(_proof(key, b"server", other_nonce))
            while True:
                size = int.from_bytes(await reader.readexactly(_SIZE_BYTES))
                if size > _MAX_REQUEST_BYTES:
                    logger.warning("a member of the channel of weights sent %d bytes and is disconnected", size)
                    return
                message = await reader.readexactly(size)
                try:
                    self.take(writer, msgspec.msgpack.decode(message))
                except (KeyError, TypeError, ValueError) as error:
                    logger.warning("%.100r on the channel of weights is ignored: %r", message, error)
        except (EOFError, OSError, asyncio.CancelledError):
            pass  # ignore the error: the connection or the coordinator ended, or the client sent no key
        finally:
            writer.close()

    def take(self, sender: StreamWriter, message: dict[str, Any]) -> None:
        """Handle a message that ``sender``, a rank or a receiver, has sent on the channel."""
        match message["kind"]:
            case "ask":
                fields = {name: message[name] for name in ("version", "holds", "host")}
                self._requests.put_nowait(RoundRequest(receiver=sender, **fields))
            case "present" if message["call"] == self._call:
                self._present.put_nowait(sender)
            case "done":
                if message["failed"]:
                    self._members = []
                    if (broken := self._meetings.pop(message["round"], None)) is not None:
                        for member, _, _ in broken.pending:  # tell the waiting members that this round is over
                            send_message(member, {"over": message["round"]})
                self._ranks[message["rank"]] = sender
                self._done[message["rank"]] = message["round"]
                self._rank_done.set()
            case "leave" | "want" if (meeting := self._meetings.get(message["round"])) is not None:
                for member in meeting.take(sender, message):
                    send_message(member, {"values": meeting.values})
            case "leave" | "want":
                send_message(sender, {"over": message["round"]})

    async def _run(self, number: int, offered: HeldOffer, requests: Sequence[RoundRequest], *, is_delta: bool) -> None:
        """Run a round, in the process group of the previous round if the members are the same."""
        if {request.receiver for request in requests} != set(self._members):
            # Sort the receivers by host, so that only one receiver of each host receives from another host.
            self._members = [request.receiver for request in sorted(requests, key=lambda request: request.host)]
            self._group = number
        this = Round(
            number=number,
            version=offered.offer.version,
            group=self._group,
            num_receivers=len(requests),
            shares=offered.shares,
            is_delta=is_delta,
            timeout_s=self._options.round_timeout_s(offered.offer.num_bytes),
            oldest=self.offers.oldest,
            backend=self._options.backend,
        )
        now_s = asyncio.get_running_loop().time()
        # Keep the addresses of a round's members until the round's deadline, because receivers may still need them.
        self._meetings = {other: held for other, held in self._meetings.items() if now_s < held.ends_s}
        self._meetings[number] = Meeting(ends_s=now_s + this.timeout_s)
        for rank in self._ranks.values():
            send_message(rank, asdict(this))
        for index, member in enumerate(self._members):
            send_message(member, {"answer": asdict(this), "index": index, "manifest": offered.manifest})
        try:
            async with asyncio.timeout(this.timeout_s + HOST_WINDOW_S):
                await self._until_done(number)
        except TimeoutError:
            self._members = []
            logger.warning("round %d of weights: not every rank has finished within %.1f s", number, this.timeout_s)

    async def _until_done(self, number: int) -> None:
        """Wait until every learner rank has reported the end of round ``number``.

        Rounds are numbered from 1. A rank that connects for the first time reports the end of round 0.
        """
        while len(self._done) < self._num_ranks or min(self._done.values()) < number:
            self._rank_done.clear()
            await self._rank_done.wait()


def _answer(requests: Sequence[RoundRequest], answer: dict[str, Any]) -> None:
    for request in requests:
        send_message(request.receiver, {"answer": answer})


async def _gathered(queue: asyncio.Queue[T], count: int, wait_s: float) -> list[T]:
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
    """An error: no process listens at a channel's address, or the process there does not have the channel's key."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChannelAddress:
    """Address and key of rank 0's `RoundCoordinator`.

    Attributes:
        endpoint: IPv4 address and port. Example: ``"10.0.0.5:41234"``.
        access: The channel's secret key. ``repr`` does not show the key.
    """

    endpoint: str
    access: str = field(repr=False)


class WeightChannel:
    """A blocking connection to learner rank 0, for one thread at a time. It is a context manager.

    Attributes:
        own_host: This host's address in the connection. Rank 0's host can reach this address.
    """

    def __init__(self, address: ChannelAddress) -> None:
        self.address, self._socket = address, socket.socket()

    def connect(self, timeout_s: float) -> Self:
        """Connect to learner rank 0, and return this object. May be called once.

        Raises:
            ChannelRefused: no process listens at the address, or the process there does not have the channel's key.
            WeightsError: rank 0 cannot be reached, the connection ended, or `close` was called.
            TimeoutError: rank 0 did not answer in time.
        """
        address, ends_s = self.address, time.monotonic() + timeout_s
        host, _, port = address.endpoint.rpartition(":")
        try:
            try:
                self._socket.settimeout(min(timeout_s, SILENCE_S))
                self._socket.connect((host, int(port)))
            except ConnectionRefusedError:
                raise ChannelRefused(f"nobody listens at {address.endpoint}") from None
            except OSError as error:
                raise WeightsError(f"learner rank 0 at {address.endpoint} cannot be reached: {error}") from None
            _keep_alive(self._socket)
            self.own_host: str = self._socket.getsockname()[0]
            nonce, key = secrets.token_bytes(_NONCE_BYTES), address.access
            self._write(_proof(key, b"client", self._read(_NONCE_BYTES, ends_s)) + nonce)
            if not hmac.compare_digest(self._read(_PROOF_BYTES, ends_s), _proof(key, b"server", nonce)):
                raise ChannelRefused(f"the process at {address.endpoint} does not have this channel's key")
        except BaseException:
            self._socket.close()
            raise
        return self

    @property
    def is_open(self) -> bool:
        """True if the connection to rank 0 is open, as far as this host knows."""
        try:
            self._socket.settimeout(0.0)
            return bool(self._socket.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def send(self, message: dict[str, Any]) -> None:
        """Send a message to rank 0. Raises `WeightsError` if the connection ended."""
        self._write(framed(message))

    def receive(self, timeout_s: float | None) -> dict[str, Any]:
        """Wait for the next message of rank 0, and return it. If ``timeout_s`` is None, there is no deadline.

        Raises:
            WeightsError: the connection ended.
            TimeoutError: no message came in time.
        """
        ends_s = None if timeout_s is None else time.monotonic() + timeout_s
        return msgspec.msgpack.decode(self._read(int.from_bytes(self._read(_SIZE_BYTES, ends_s)), ends_s))

    def close(self) -> None:
        """End the connection immediately. A thread that connects or waits for a message gets an error."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def __enter__(self) -> WeightChannel:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def _write(self, data: bytes) -> None:
        try:
            self._socket.settimeout(SILENCE_S)
            self._socket.sendall(data)
        except OSError:
            raise WeightsError(f"the connection to learner rank 0 at {self.address.endpoint} ended") from None

    def _read(self, num_bytes: int, ends_s: float | None) -> bytes:
        data, began_s = b"", time.monotonic()
        while len(data) < num_bytes:
            try:
                self._socket.settimeout(None if ends_s is None else max(ends_s - time.monotonic(), 1e-3))
                part = self._socket.recv(num_bytes - len(data))
            except OSError as error:
                # A TimeoutError without an errno means that no message came in time.
                # A TimeoutError with an errno means that TCP has ended the connection.
                if isinstance(error, TimeoutError) and error.errno is None:
                    silent_s = time.monotonic() - began_s
                    what = f"learner rank 0 at {self.address.endpoint} was silent for {silent_s:.1f} s"
                    raise TimeoutError(what) from None
                part = b""
            if not part:
                raise WeightsError(f"the connection to learner rank 0 at {self.address.endpoint} ended")
            data += part
        return data


def framed(message: dict[str, Any]) -> bytes:
    """Return the bytes of a message on the channel: the size of the content, then the content."""
    content = msgspec.msgpack.encode(message)
    return len(content).to_bytes(_SIZE_BYTES) + content


def send_message(receiver: StreamWriter, message: dict[str, Any]) -> None:
    """Send a message. If the connection is closing, do nothing."""
    if not receiver.is_closing():
        receiver.write(framed(message))


def _proof(key: str, side: bytes, nonce: bytes) -> bytes:
    return hmac.digest(key.encode(), side + nonce, "sha256")


def _keep_alive(connection: Any) -> None:
    """Configure TCP to detect a host that disappears."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, int(HEARTBEAT_S))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, int(HEARTBEAT_S))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, int(SILENCE_S / HEARTBEAT_S) - 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SILENCE_S * 1000))
