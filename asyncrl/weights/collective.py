"""Weights over the network, the learner's side: each rank broadcasts its own bytes to those who are in a round.

    each rank ══ its own bytes ══▶ receivers      Each rank and the receivers form a process group of their own,
                                                  in which that rank is the first.

Who is in a round, and how its members find one another, stands in `weight_rounds.py`. No rank holds or receives the
bytes of another one. Receivers (`weight_receiver.py`) are the hosts of the engines, or the engines' own ranks. A member
that dies or stops ends the round for all by the deadline, which grows with the bytes. Those who are left ask again, up
to `MAX_ROUNDS` times.

Who waits, and for whom: each rank's thread for the next round, woken by rank 0; a receiver, on a thread that can be
abandoned, for rank 0 and then for all ranks. Training waits for none of them. The groups authenticate nobody, and
digests do not stop an attacker.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, Store  # type: ignore

from asyncrl.core.errors import WeightsError, WeightsGone
from asyncrl.core.remote import on_own_thread
from asyncrl.core.types import WeightOffer
from asyncrl.weights.carriers import HOST_WINDOW_S, PublishOptions
from asyncrl.weights.channel import ChannelAddress, ChannelServer, RankChannel, WeightChannel
from asyncrl.weights.manifest import Piece, read_manifest
from asyncrl.weights.rounds import (
    HeldOffer,
    Round,
    RoundCoordinator,
    forget_before,
    keep_newest,
)

logger = logging.getLogger(__name__)

SPAN_BYTES = 64 << 20
"""Most bytes of one broadcast, unless a piece is larger."""
_START_S = 30.0
_FOREVER = timedelta(days=20)  # the longest that torch takes


@dataclass(frozen=True, kw_only=True)
class HeldPart:
    """What one learner rank holds of a version: [bytes] uint8, of which it sends ``pieces``, or its delta file."""

    data: Tensor
    pieces: tuple[Piece, ...]
    delta: Tensor | None


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
        address: Of rank 0's control channel; the other ranks are made with it.
    """

    def __init__(
        self, options: PublishOptions, *, rank: int, num_ranks: int, address: ChannelAddress | None = None
    ) -> None:
        """Listen on rank 0, or connect to rank 0 at ``address``.

        Raises:
            ValueError: there is no such interface.
        """
        self._options, self._rank, self._num_ranks = options, rank, num_ranks
        self._host = interface_address(options.interface) if address is None else ""
        self._parts: dict[int, HeldPart] = {}
        self._oldest = 0
        self._coordinator: RoundCoordinator | None = None
        self._loop = asyncio.new_event_loop()
        self._work: asyncio.Task[None] | None = None
        started: Future[ChannelAddress] = Future()
        self._thread = threading.Thread(target=self._serve, args=(address, started), name="weight-rounds", daemon=True)
        self._thread.start()
        self.address = started.result(_START_S)

    def hold(self, version: int, data: Tensor, pieces: Sequence[Piece], delta: Tensor | None = None) -> None:
        """Send ``pieces`` of a version from ``data``, [bytes] uint8, in the rounds to come.

        Those who hold the version before are sent ``delta`` instead, [bytes] uint8 of this rank's delta file.
        """
        self._parts[version] = HeldPart(data=data, pieces=tuple(pieces), delta=delta)
        keep_newest(self._parts, self._options.num_held, oldest=self._oldest)

    def offer(self, offer: WeightOffer, shares: Sequence[int]) -> WeightOffer:
        """On rank 0, once every rank holds its part: the offer as engines of any host can take it.

        Args:
            offer: With the manifest's path on this host.
            shares: Number of the manifest's pieces that each rank holds, in the manifest's order.
        """
        assert self._coordinator is not None, "rank 0 offers"
        delta = read_manifest(offer).delta
        self._coordinator.hold(
            HeldOffer(
                offer=offer,
                manifest=Path(offer.manifest).read_bytes(),
                shares=tuple(shares),
                base="" if delta is None else delta.base.digest,
            )
        )
        carrier = self._options.carrier
        return replace(offer, manifest=self.address.endpoint, carrier=carrier, access=self.address.access)

    def retire(self, oldest: int) -> None:
        """Nobody will ask for a version before ``oldest``, which engines are still offered."""
        self._oldest = oldest
        if self._coordinator is not None:
            self._coordinator.retire(oldest)
        forget_before(self._parts, oldest)

    def close(self) -> None:
        """Take part in no further round; one that is running is abandoned. May be called more than once."""
        if not self._loop.is_closed():
            with suppress(RuntimeError):  # it has ended by itself
                self._loop.call_soon_threadsafe(self._end)
        self._thread.join(HOST_WINDOW_S)

    # On the thread

    def _serve(self, address: ChannelAddress | None, started: Future[ChannelAddress]) -> None:
        self._work = self._loop.create_task(self._take_part(address, started))
        try:
            self._loop.run_until_complete(self._work)
        except asyncio.CancelledError:
            pass  # closed
        except Exception as error:  # noqa: BLE001 - nobody waits for this thread; the receivers' deadlines tell
            if started.done():
                logger.error("rank %d takes part in no further round of weights: %r", self._rank, error)
            else:
                started.set_exception(error)
        finally:
            self._loop.close()

    def _end(self) -> None:
        if self._work is not None:
            self._work.cancel()

    async def _take_part(self, address: ChannelAddress | None, started: Future[ChannelAddress]) -> None:
        """In every round; on rank 0, also make them."""
        if address is not None:
            started.set_result(address)
            await self._follow(address)
            return
        with closing(ChannelServer(self._host)) as server:
            self._coordinator = RoundCoordinator(self._options, server, num_ranks=self._num_ranks)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._coordinator.run())
                tasks.create_task(self._follow(server.address))
                started.set_result(server.address)

    async def _follow(self, address: ChannelAddress) -> None:
        """Say which round was the last one, and wait for the next."""
        with closing(RankChannel(address, self._rank)) as channel:
            number, is_sent = 0, True
            while True:
                await channel.send({"kind": "done", "rank": self._rank, "round": number, "failed": not is_sent})
                this = Round.read(await channel.receive())
                number, is_sent = this.number, await self._send(this, address)

    async def _send(self, this: Round, address: ChannelAddress) -> bool:
        """Broadcast this rank's part to the receivers; returns whether it was sent. What fails is theirs to repeat."""
        began_s = time.monotonic()
        try:
            forget_before(self._parts, this.oldest)
            if (part := self._parts.get(this.version)) is None:
                raise WeightsGone(f"rank {self._rank} no longer holds policy version {this.version}")
            sending = on_own_thread(partial(self._transfer, this, part, address, RoundDeadline(this.timeout_s)))
            async with asyncio.timeout(this.timeout_s + HOST_WINDOW_S):  # a group that cannot be left is abandoned
                await asyncio.wrap_future(sending)
        except Exception as error:  # noqa: BLE001 - a member that is gone, in whatever way the group says it
            logger.warning("round %d of policy version %d failed: %s", this.number, this.version, one_line(error))
            return False
        logger.debug("round %d: sent in %.3f s", this.number, time.monotonic() - began_s)
        return True

    def _transfer(self, this: Round, part: HeldPart, address: ChannelAddress, deadline: RoundDeadline) -> None:
        data, spans = part.data, map(range_of, spans_of(part.pieces))
        if this.is_delta:
            assert part.delta is not None, "rank 0 offers deltas that all ranks hold"
            data, spans = part.delta, spans_of_file(part.delta.nbytes)
        with (
            WeightChannel(address) as channel,
            round_groups(RoundStore(channel, this, deadline), [self._rank], index=0) as (group,),
        ):
            under_way: deque[Callable[[], None]] = deque()
            for span in spans:
                under_way.append(group.broadcast(data[slice(*span)]))
                if len(under_way) > 1:
                    under_way.popleft()()
            while under_way:
                under_way.popleft()()


class RoundStore(Store):
    """Where the members of a round meet: what torch calls a store, on rank 0, over the control channel.

    Groups ask it how to reach their other members. Those of gloo leave one key each, and are told all at once.

    Attributes:
        this: The round.
        deadline: Of all waits.
        own_host: IPv4 address by which the other members reach this one.
    """

    def __init__(self, channel: WeightChannel, this: Round, deadline: RoundDeadline) -> None:
        """Meet over ``channel``, on which nothing else is received from here on."""
        super().__init__()
        self.this, self.deadline, self.own_host = this, deadline, channel.address.own_host()
        self._channel = channel
        self._lock = threading.Lock()  # NCCL has threads of its own
        self._known: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        """Leave a value for the others."""
        content = value.encode() if isinstance(value, str) else bytes(value)
        with self._lock:
            self._channel.send({"kind": "leave", "round": self.this.number, "key": key}, content)

    def get(self, key: str) -> bytes:
        """Wait for what somebody has left.

        Raises:
            WeightsError: the round is over, or the connection ended.
            TimeoutError: nobody has left it by the deadline.
        """
        self.wait([key])
        return self._known[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for several keys, until the round's deadline, whatever ``timeout`` is; raises as `get` does."""
        with self._lock:
            for key in keys:
                if key not in self._known:
                    self._known |= self._fetched(key)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether the keys have come here; asks nobody."""
        return all(key in self._known for key in keys)

    def _fetched(self, key: str) -> dict[str, bytes]:
        group_size = 1 + self.this.num_receivers
        count = group_size if "/" in key and self.this.backend == "gloo" else 1
        self._channel.send({"kind": "want", "round": self.this.number, "key": key, "count": count})
        answer = self._channel.receive(self.deadline.left.total_seconds())
        if "keys" not in answer.head:
            raise WeightsError(f"round {self.this.number} of weights is over")
        return dict(zip(answer.head["keys"], answer.values, strict=True))


class RoundGroup:
    """A learner rank and the receivers of a round, of which the learner rank is the first; it ends with the round."""

    def __init__(self, store: RoundStore, sender: int, *, index: int) -> None:
        """Meet the others.

        Args:
            store: Of the round; kept for as long as the group is.
            sender: The learner rank.
            index: This process's place in the group.
        """
        self._store, self._deadline, self._is_nccl = store, store.deadline, store.this.backend == "nccl"
        own, size = PrefixStore(f"{sender}", store), 1 + store.this.num_receivers
        if self._is_nccl:
            from torch.distributed import ProcessGroupNCCL  # not in every build of torch

            options: Any = ProcessGroupNCCL.Options()
            options._timeout = _FOREVER  # torch's watchdog would end the process; `abort` ends the waits
            self._group: Any = ProcessGroupNCCL(own, index, size, options)
        else:
            options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [ProcessGroupGloo.create_device(hostname=store.own_host)]
            options._threads = 1
            options._timeout = self._deadline.left
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
def round_groups(store: RoundStore, senders: Sequence[int], *, index: int) -> Iterator[list[RoundGroup]]:
    """The groups of learner ranks with the receivers, in which this process is ``index``.

    They end with the block; a connection that ends early ends the others' waits at once.
    """
    groups: list[RoundGroup] = []
    try:
        for sender in senders:
            groups.append(RoundGroup(store, sender, index=index))
        yield groups
    finally:
        for group in groups:
            group.abort()
        groups.clear()


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


def one_line(error: Exception) -> str:
    """What an error says, without torch's own stack."""
    text = str(error).partition("\n")[0][:300]
    return text if isinstance(error, WeightsError) else f"{type(error).__name__}: {text}"
