"""Weights over the network, the learner's side: rounds in which the ranks broadcast a version, no shared folder.

    receivers ──ask──▶ rank 0 (a store)           A round: one version, those who asked, one deadline.
    rank 0 ──call──▶ receivers ──present──▶       Who does not answer is not in it.
    rank 0 ──round──▶ receivers, other ranks      Each rank and the receivers form a process group of their own,
    each rank ══ its own bytes ══▶ receivers      in which that rank broadcasts the bytes that it holds.

No rank holds or receives the bytes of another one. Receivers (`weight_receiver.py`) are the hosts of the engines, or
the engines' own ranks. A member that dies or stops ends the round for all by the deadline, which grows with the bytes.
Those who are left ask again, up to `MAX_ROUNDS` times.

Who waits, and for whom: rank 0's thread for requests, woken by a receiver; the other ranks' threads for the next round,
woken by rank 0; a receiver, on a thread that can be abandoned, for rank 0 and then for all ranks. Training waits for
none of them. Neither the store nor the groups authenticate anyone, and digests do not stop an attacker.
"""

from __future__ import annotations

import fcntl
import json
import logging
import socket
import struct
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import Tensor
from torch.distributed import BroadcastOptions, DistStoreError, PrefixStore, ProcessGroupGloo, QueueEmptyError, TCPStore  # type: ignore

from .errors import WeightsError, WeightsGone
from .future import on_own_thread
from .manifest import COLLECTIVE_SCHEME, ENGINE_SCHEME, FROZEN, Piece, WeightOffer, read_manifest

logger = logging.getLogger(__name__)

MAX_ROUNDS = 3
WINDOW_S = 0.5
"""How long a round waits for further hosts after the first one, which generate meanwhile."""
ENGINE_WINDOW_S = 0.1
"""How long it waits for further ranks of engines, which stand still."""
ENGINE_SHARE = 0.4
"""Of the deadline of its load, that a round may take of an engine: there is time for a second one without a member that
stopped in the first."""
CALL_S = 3.0
"""How long rank 0 waits for those who asked to say that they are still there."""
SPAN_BYTES = 64 << 20
"""Most bytes of one broadcast, unless a piece is larger."""
SLOWEST_ROUND = 1e8  # bytes per second, on top of which the deadline stands
_END = "end"
_FOREVER = timedelta(days=20)  # the longest that fits what the store takes
Backend = Literal["gloo", "nccl"]


@dataclass(frozen=True, kw_only=True)
class CollectiveOptions:
    """How the learner ranks send.

    Attributes:
        interface: Network interface whose IPv4 address engines know rank 0 by; ``lo`` reaches this host only.
        num_receivers: A round begins as soon as so many ask.
        timeout_s: Of a round; a second per 100 MB comes on top. Rounds into engines have `ENGINE_SHARE` of both.
        keep: Newest versions that each rank holds in memory for those who ask, unless it is told that fewer will do.
        into_engines: The receivers are the ranks of the engines, in the middle of a load, and not their hosts.
        backend: ``gloo`` broadcasts in host memory, ``nccl`` between GPUs, each of which has one member at most.
    """

    interface: str
    num_receivers: int
    timeout_s: float
    keep: int
    into_engines: bool = False
    backend: Backend = "gloo"

    def round_timeout_s(self, num_bytes: int) -> float:
        """Of a round that sends so many bytes."""
        whole_s = self.timeout_s + num_bytes / SLOWEST_ROUND
        return whole_s * ENGINE_SHARE if self.into_engines else whole_s


@dataclass(frozen=True, kw_only=True)
class Round:
    """One version for those who asked for it.

    Attributes:
        number: Counts from 1.
        version: Policy version.
        store: Where its groups meet. Example: ``"127.0.0.1:41234"``.
        num_receivers: Each group has one member more: rank 0 in it is a learner rank.
        shares: Number of the manifest's pieces that each learner rank sends, in the manifest's order.
        is_delta: Each rank sends its delta file instead, to those who hold the version before.
        timeout_s: Of the round, the bytes included.
        oldest: Older versions need not be held any more.
        backend: See `CollectiveOptions`.
    """

    number: int
    version: int
    store: str
    num_receivers: int
    shares: tuple[int, ...]
    is_delta: bool
    timeout_s: float
    oldest: int
    backend: Backend

    @classmethod
    def read(cls, fields: dict[str, Any]) -> Round:
        """From what JSON made of one."""
        return cls(**{**fields, "shares": tuple(fields["shares"])})


@dataclass(frozen=True, kw_only=True)
class RankPart:
    """What one learner rank holds of a version: [bytes] uint8, of which it sends ``pieces``, or its delta file."""

    data: Tensor
    pieces: tuple[Piece, ...]
    delta: Tensor | None


@dataclass(frozen=True, kw_only=True)
class HeldOffer:
    """A version on rank 0, with its manifest's text, `Round.shares`, and the digest of what its deltas apply to."""

    offer: WeightOffer
    manifest: str
    shares: tuple[int, ...]
    base: str


class RoundDeadline:
    """The end of a wait."""

    def __init__(self, timeout_s: float) -> None:
        self._ends_s = time.monotonic() + timeout_s

    @property
    def left(self) -> timedelta:
        """What is left, a millisecond at least."""
        return timedelta(seconds=max(self._ends_s - time.monotonic(), 1e-3))


class WeightSender:
    """A learner rank's side. `hold` and `offer` return at once; rounds run on a thread of their own.

    Attributes:
        address: Of rank 0's store, host and port; the other ranks are made with it.
    """

    def __init__(self, options: CollectiveOptions, *, rank: int, num_ranks: int, address: str = "") -> None:
        """Open the store on rank 0, or connect to the one at ``address``.

        Raises:
            ValueError: there is no such interface.
        """
        self._options, self._rank, self._num_ranks = options, rank, num_ranks
        self._parts: dict[int, RankPart] = {}
        self._offers: dict[int, HeldOffer] = {}
        self._oldest = 0
        self._is_closed = False
        self._control: TCPStore | None = None
        if rank == 0:
            self._control = _serve(interface_address(options.interface))
            address = f"{self._control.host}:{self._control.port}"
        self.address = address
        self._store = connect(address, _FOREVER)
        work = self._lead if rank == 0 else self._follow
        self._thread = threading.Thread(target=self._guarded, args=(work,), name="weight-rounds", daemon=True)
        self._thread.start()

    def hold(self, version: int, data: Tensor, pieces: Sequence[Piece], delta: Tensor | None = None) -> None:
        """Send ``pieces`` of a version from ``data``, [bytes] uint8, in the rounds to come.

        Those who hold the version before are sent ``delta`` instead, [bytes] uint8 of this rank's delta file.
        """
        self._parts[version] = RankPart(data=data, pieces=tuple(pieces), delta=delta)
        _keep_newest(self._parts, self._options.keep)

    def offer(self, offer: WeightOffer, shares: Sequence[int]) -> WeightOffer:
        """On rank 0, once every rank holds its part: the offer as engines of any host can take it.

        Args:
            offer: With the manifest's path on this host.
            shares: Number of the manifest's pieces that each rank holds, in the manifest's order.
        """
        delta = read_manifest(offer).delta
        self._offers[offer.version] = HeldOffer(
            offer=offer,
            manifest=Path(offer.manifest).read_text(),
            shares=tuple(shares),
            base="" if delta is None else delta.base.digest,
        )
        _keep_newest(self._offers, self._options.keep)
        scheme = ENGINE_SCHEME if self._options.into_engines else COLLECTIVE_SCHEME
        return replace(offer, manifest=f"{scheme}{self.address}")

    def retire(self, oldest: int) -> None:
        """On rank 0: nobody will ask for a version before ``oldest``. The other ranks hear of it in the next round."""
        self._oldest = oldest
        for held in (self._parts, self._offers):
            _forget_before(held, oldest)

    def close(self) -> None:
        """Take part in no further round; one that is running is abandoned."""
        self._is_closed = True
        if self._control is not None:
            send_message(self._control, "requests", {"end": _END})
        self._thread.join(WINDOW_S)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - nobody waits for this thread; the receivers' deadlines tell
            if not self._is_closed:
                logger.error("rank %d takes part in no further round of weights: %s", self._rank, one_line(error))

    # Rank 0

    def _lead(self) -> None:
        """Make a round for those who ask, for the newest of their versions, and for frozen weights.

        An engine that stands still for a version cannot take another one, and is sent it as long as it is held.
        """
        number = 0
        while not self._is_closed:
            present = self._present(self._next_requests())
            if not present:
                continue
            newest = max(request["version"] for request in present)
            for version in sorted({request["version"] for request in present}):
                asked = [request for request in present if request["version"] == version]
                is_sent = self._options.into_engines or version in (newest, FROZEN)
                offered = self._offers.get(version) if is_sent else None
                if offered is None:
                    self._answer(asked, {"gone": True})
                    continue
                holders = [request for request in asked if offered.base and request["holds"] == offered.base]
                others = [request for request in asked if request not in holders]
                for requests in filter(None, (holders, others)):
                    number += 1
                    self._run(number, offered, requests, is_delta=requests is holders)
        self._store.set(f"round/{number + 1}", _END)

    def _next_requests(self) -> list[dict[str, Any]]:
        """Wait for a request, and a moment for others."""
        first = next_message(self._store, "requests")
        window_s = ENGINE_WINDOW_S if self._options.into_engines else WINDOW_S
        return self._gather("requests", [first], self._options.num_receivers, window_s) if "id" in first else []

    def _present(self, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Those of the receivers who answer a call; one that was stopped or killed since it asked holds nobody up."""
        call = uuid.uuid4().hex
        for request in requests:
            self._store.set(f"call/{request['id']}", call)
        there = {answer["id"] for answer in self._gather(call, [], len(requests), CALL_S)}
        self._answer([request for request in requests if request["id"] not in there], {"late": True})
        return [request for request in requests if request["id"] in there]

    def _gather(self, queue: str, messages: list[dict[str, Any]], count: int, wait_s: float) -> list[dict[str, Any]]:
        """Add what comes within ``wait_s``, until there are ``count``. A timer's message ends the wait."""
        assert self._control is not None
        end = {"timer": uuid.uuid4().hex}
        timer = threading.Timer(wait_s, send_message, (self._control, queue, end))
        timer.daemon = True
        timer.start()
        while len(messages) < count and (message := next_message(self._store, queue)) != end:
            if "id" in message:
                messages.append(message)
        timer.cancel()
        return messages

    def _answer(self, requests: Sequence[dict[str, Any]], answer: dict[str, Any]) -> None:
        for index, request in enumerate(requests):
            self._store.set(f"answer/{request['id']}", json.dumps({**answer, "index": index}))

    def _run(self, number: int, offered: HeldOffer, requests: Sequence[dict[str, Any]], *, is_delta: bool) -> None:
        """Tell everyone of a round, take part, and wait until the other ranks are done with it."""
        meeting = _serve(self.address.rpartition(":")[0])  # one per round: what its groups leave there goes with it
        meeting.set("manifest", offered.manifest)
        this = Round(
            number=number,
            version=offered.offer.version,
            store=f"{meeting.host}:{meeting.port}",
            num_receivers=len(requests),
            shares=offered.shares,
            is_delta=is_delta,
            timeout_s=self._options.round_timeout_s(offered.offer.num_bytes),
            oldest=self._oldest,
            backend=self._options.backend,
        )
        deadline = RoundDeadline(this.timeout_s)
        self._store.set(f"round/{number}", json.dumps(asdict(this)))
        self._answer(requests, asdict(this))
        self._send(this)
        done = [f"done/{number}/{rank}" for rank in range(1, self._num_ranks)]
        try:
            if done:
                self._store.wait(done, deadline.left)
            for key in (*done, f"round/{number}"):
                self._store.delete_key(key)
        except DistStoreError:
            logger.warning("round %d of weights: not every rank was done within %.1f s", number, this.timeout_s)

    # The other ranks

    def _follow(self) -> None:
        number = 1
        while (content := self._store.get(f"round/{number}").decode()) != _END:
            fields = json.loads(content)
            number += 1
            if not self._store.check([f"round/{number}"]):  # else this rank was away, and this round is over
                self._send(Round.read(fields))
                self._store.set(f"done/{fields['number']}/{self._rank}", "")

    # All ranks

    def _send(self, this: Round) -> None:
        """Broadcast this rank's part to the receivers. What fails there is theirs to repeat."""
        deadline = RoundDeadline(this.timeout_s)
        began_s = time.monotonic()
        try:
            _forget_before(self._parts, this.oldest)
            if (part := self._parts.get(this.version)) is None:
                raise WeightsGone(f"rank {self._rank} no longer holds policy version {this.version}")
            sending = on_own_thread(partial(self._transfer, this, part, deadline))
            sending.result(this.timeout_s + WINDOW_S)  # a group that cannot be left by itself is abandoned
        except Exception as error:  # noqa: BLE001 - a member that is gone, in whatever way the group says it
            logger.warning("round %d of policy version %d failed: %s", this.number, this.version, one_line(error))
        else:
            logger.debug("round %d: sent in %.3f s", this.number, time.monotonic() - began_s)

    def _transfer(self, this: Round, part: RankPart, deadline: RoundDeadline) -> None:
        data, spans = part.data, map(range_of, spans_of(part.pieces))
        if this.is_delta:
            assert part.delta is not None, "rank 0 offers deltas that all ranks hold"
            data, spans = part.delta, spans_of_file(part.delta.nbytes)
        with round_groups(this, [self._rank], index=0, deadline=deadline) as (group,):
            under_way: deque[Callable[[], None]] = deque()
            for span in spans:
                under_way.append(group.broadcast(data[slice(*span)]))
                if len(under_way) > 1:
                    under_way.popleft()()
            while under_way:
                under_way.popleft()()


def send_message(store: Any, queue: str, message: dict[str, Any]) -> None:
    """Put a message into a store's queue, for `next_message`."""
    store.queue_push(queue, json.dumps(message))
    store.set(f"{queue}/bell", "")


def next_message(store: Any, queue: str) -> dict[str, Any]:
    """Wait for the next message that `send_message` put into a store's queue.

    A bell is waited for, a plain key, and taken down before the queue is looked at again: nothing that comes in between
    is missed. Torch's own wait for a queue was seen to end without a message, when a process that had asked ended.
    """
    while True:
        try:
            return json.loads(store.queue_pop(queue, False))
        except QueueEmptyError:
            store.wait([f"{queue}/bell"])
            store.delete_key(f"{queue}/bell")


def spans_of(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Pieces that follow one another in the file, together up to `SPAN_BYTES`: what is broadcast at once."""
    span: list[Piece] = []
    for piece in pieces:
        if span:
            begin, end = span[0].start, span[-1].start + span[-1].num_bytes
            if piece.start != end or end + piece.num_bytes - begin > SPAN_BYTES:
                yield span
                span = []
        span.append(piece)
    if span:
        yield span


def spans_of_file(num_bytes: int) -> Iterator[tuple[int, int]]:
    """First byte, and the one behind the last, of what is broadcast at once of a file without pieces."""
    for start in range(0, num_bytes, SPAN_BYTES):
        yield start, min(start + SPAN_BYTES, num_bytes)


def range_of(span: Sequence[Piece]) -> tuple[int, int]:
    """First byte of pieces that follow one another, and the one behind the last."""
    return span[0].start, span[-1].start + span[-1].num_bytes


def interface_address(interface: str) -> str:
    """The IPv4 address of a network interface. Raises `ValueError` if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", interface.encode()[:15]))  # SIOCGIFADDR
        except OSError as error:
            raise ValueError(
                f"weights.interface must be a network interface with an IPv4 address where learner rank 0 runs, got "
                f"{interface!r} ({error.strerror}); there are {[name for _, name in socket.if_nameindex()]}"
            ) from error
    return socket.inet_ntoa(answer[20:24])


class RoundGroup:
    """A learner rank and the receivers of a round, of which the learner rank is the first; it ends with the round."""

    def __init__(self, this: Round, sender: int, store: TCPStore, *, index: int, deadline: RoundDeadline) -> None:
        """Meet the others.

        Args:
            this: The round.
            sender: The learner rank.
            store: Of the round.
            index: This process's place in the group.
            deadline: Of all waits.
        """
        self._deadline, self._is_nccl = deadline, this.backend == "nccl"
        own, size = PrefixStore(f"{sender}", store), 1 + this.num_receivers
        if self._is_nccl:
            from torch.distributed import ProcessGroupNCCL  # not in every build of torch

            options: Any = ProcessGroupNCCL.Options()
            options._timeout = _FOREVER  # torch's watchdog would end the process; `abort` ends the waits
            self._group: Any = ProcessGroupNCCL(own, index, size, options)
        else:
            options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [ProcessGroupGloo.create_device(hostname=_own_address(this.store))]
            options._threads = 1
            options._timeout = deadline.left
            self._group = ProcessGroupGloo(own, index, size, options)

    def broadcast(self, data: Tensor) -> Callable[[], None]:
        """Begin to send [bytes] uint8 as the group's first member, or to receive them as another.

        Returns:
            Waits for the end. It raises `RuntimeError` where a member is gone, or the deadline has passed.
        """
        if self._is_nccl:
            data = data.to("cuda")
        options = BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, self._deadline.left
        return partial(self._wait, self._group.broadcast([data], options), data)

    def _wait(self, work: Any, _data: Tensor) -> None:
        """Wait for a broadcast, whose data stay until then."""
        work.wait(self._deadline.left)

    def abort(self) -> None:
        """End what is under way, also for a thread that waits for it."""
        if self._is_nccl:
            self._group.abort()


@contextmanager
def round_groups(
    this: Round, senders: Sequence[int], *, index: int, deadline: RoundDeadline
) -> Iterator[list[RoundGroup]]:
    """The groups of learner ranks with the receivers, in which this process is ``index``.

    They end with the block; a connection that ends early ends the others' waits at once.
    """
    groups: list[RoundGroup] = []
    try:
        store = connect(this.store, deadline.left)
        for sender in senders:
            groups.append(RoundGroup(this, sender, store, index=index, deadline=deadline))
        yield groups
    finally:
        for group in groups:
            group.abort()
        groups.clear()


def _serve(host: str) -> TCPStore:
    """A store that listens on this address alone."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def connect(address: str, timeout: timedelta) -> TCPStore:
    """A client of the store at ``address``, host and port, whose calls take ``timeout`` at most."""
    host, _, port = address.rpartition(":")
    return TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)


def _own_address(peer: str) -> str:
    """This host's address on the way to ``peer``, host and port."""
    host, _, port = peer.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))  # sends nothing
        return probe.getsockname()[0]


def _keep_newest(held: dict[int, Any], count: int) -> None:
    for version in sorted(held.keys() - {FROZEN})[:-count]:
        held.pop(version, None)


def _forget_before(held: dict[int, Any], oldest: int) -> None:
    for version in sorted(held):
        if FROZEN < version < oldest:
            held.pop(version, None)


def one_line(error: Exception) -> str:
    """What an error says, without torch's own stack."""
    text = str(error).partition("\n")[0][:300]
    return text if isinstance(error, WeightsError) else f"{type(error).__name__}: {text}"
