"""Weights over the network: each learner rank broadcasts its own bytes to the receivers of a round.

    each rank ══ its own bytes ══▶ receivers      Each rank and the receivers form one process group per round, in which
                                                  the rank is the first member.

`rounds.py` says which receivers are in a round and how its members meet. No rank holds or receives the bytes of another
rank. Receivers compare every byte with its digest as it arrives. There are two kinds of receivers:

- A host of engines receives a version into its memory while its engines generate (`receive_weights`). The result is a
  data file and a manifest.
- An engine's rank receives bucket by bucket while the engine stands still (`ArrivingWeights`). No host holds a copy,
  and the engine loads each tensor as soon as it is complete.

A member that dies or stops ends the round for all by the deadline, which grows with the bytes. The other receivers ask
again, up to `MAX_ROUNDS` times. Each learner rank has a thread that waits for rank 0 to announce a round. A receiver
waits on a thread that can be abandoned, for rank 0 and then for all ranks. Training waits for none of them. The groups
authenticate nobody, and digests do not stop an attacker.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import mmap
import os
import queue
import shutil
import socket
import struct
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, Store  # type: ignore

from asyncrl.core.errors import DeadlineError, WeightsError, WeightsGone
from asyncrl.core.host import make_private_folder, open_private
from asyncrl.core.remote import on_own_thread
from asyncrl.core.types import Carrier, WeightOffer
from asyncrl.weights import rounds
from asyncrl.weights.assembly import TensorAssembly
from asyncrl.weights.carriers import HOST_WINDOW_S, PublishOptions, load_limit_s
from asyncrl.weights.manifest import DigestThreads, Manifest, Piece, parse_manifest, read_manifest, safetensors_header
from asyncrl.weights.rounds import (
    MAX_ROUNDS,
    ChannelAddress,
    ChannelRefused,
    HeldOffer,
    HeldVersions,
    Round,
    RoundCoordinator,
    WeightChannel,
)

logger = logging.getLogger(__name__)

SPAN_BYTES = 64 << 20
"""Most bytes of one broadcast, unless a piece is larger."""
NUM_AHEAD = 2
"""Complete tensors that wait for an engine's rank to load them, from a stream or from files."""
_RETRY_S = 1.0
_FOREVER = timedelta(days=20)  # the longest that torch takes


# The learner's side


@dataclass(frozen=True, kw_only=True)
class HeldPart:
    """One learner rank's part of a version: [bytes] uint8 with the ``pieces`` that it sends, and its delta file."""

    data: Tensor
    pieces: tuple[Piece, ...]
    delta: Tensor | None


class WeightSender:
    """The sender of one learner rank. `hold` and `offer` return at once; rounds run on the sender's own thread.

    Without an ``address`` it is rank 0's sender, and listens. The senders of the other ranks connect to ``address``.

    Attributes:
        address: Of rank 0's channel.

    Raises `ValueError` if the interface does not exist.
    """

    def __init__(
        self, options: PublishOptions, *, rank: int, num_ranks: int, address: ChannelAddress | None = None
    ) -> None:
        self._rank = rank
        self._parts: HeldVersions[HeldPart] = HeldVersions(options.num_held)
        self._coordinator: RoundCoordinator | None = None
        self._channel: WeightChannel | None = None
        self._is_closed = threading.Event()
        works = [self._take_part]
        if address is None:
            host = interface_address(options.interface)
            self._coordinator = RoundCoordinator(options, host, num_ranks=num_ranks)
            address = self._coordinator.address
            works.append(self._coordinate)
        self._options, self.address = options, address
        self._threads = [threading.Thread(target=work, name="weight-rounds", daemon=True) for work in works]
        for thread in self._threads:
            thread.start()

    def hold(self, version: int, data: Tensor, pieces: Sequence[Piece], delta: Tensor | None = None) -> None:
        """Send a version in the rounds to come.

        Args:
            version: Policy version.
            data: [bytes] uint8, the data file.
            pieces: This rank's pieces of it.
            delta: [bytes] uint8 of this rank's delta file, for receivers that hold the version before.
        """
        self._parts.add(version, HeldPart(data=data, pieces=tuple(pieces), delta=delta))

    def offer(self, offer: WeightOffer, shares: Sequence[int]) -> WeightOffer:
        """Return the offer as engines of any host can take it. Call it on rank 0, once every rank holds its part.

        Args:
            offer: With the manifest's path on this host.
            shares: Number of the manifest's pieces that each rank holds, in the manifest's order.
        """
        assert self._coordinator is not None, "rank 0 offers"
        delta = read_manifest(offer).delta
        held = HeldOffer(
            offer=offer,
            manifest=Path(offer.manifest).read_bytes(),
            shares=tuple(shares),
            base="" if delta is None else delta.base.digest,
        )
        self._coordinator.offers.add(offer.version, held)
        carrier = self._options.carrier
        return replace(offer, manifest=self.address.endpoint, carrier=carrier, access=self.address.access)

    def retire(self, oldest: int) -> None:
        """Forget versions before ``oldest``, the oldest version that engines are still offered."""
        self._parts.retire(oldest)
        if self._coordinator is not None:
            self._coordinator.offers.retire(oldest)

    def close(self) -> None:
        """Take part in no further round; abandon a running one. May be called more than once."""
        self._is_closed.set()
        if self._coordinator is not None:
            self._coordinator.close()
        if (channel := self._channel) is not None:
            channel.close()
        for thread in self._threads:
            thread.join(HOST_WINDOW_S)

    # On the threads

    def _coordinate(self) -> None:
        assert self._coordinator is not None, "rank 0 coordinates"
        try:
            asyncio.run(self._coordinator.run())
        except Exception as error:  # noqa: BLE001 - nobody waits for this thread; receivers report missed deadlines
            logger.error("no further round of weights is made: %r", error)

    def _take_part(self) -> None:
        """Send in every round that rank 0 announces; connect again if the connection is lost."""
        number, is_sent = 0, True
        while not self._is_closed.is_set():
            try:
                with WeightChannel(self.address, rounds.SILENCE_S) as self._channel:
                    while True:
                        report = {"kind": "done", "rank": self._rank, "round": number, "failed": not is_sent}
                        self._channel.send(report)
                        this = msgspec.convert(self._channel.receive(None), Round)
                        number, is_sent = this.number, self._send(this)
            except (WeightsError, TimeoutError) as error:
                if not self._is_closed.wait(_RETRY_S):
                    logger.warning("learner rank %d connects to rank 0 again: %s", self._rank, error)

    def _send(self, this: Round) -> bool:
        """Broadcast this rank's part; returns whether it was sent. After a failure the receivers ask again."""
        began_s = time.monotonic()
        try:
            self._parts.retire(this.oldest)
            if (part := self._parts.get(this.version)) is None:
                raise WeightsGone(f"rank {self._rank} no longer holds policy version {this.version}")
            sending = on_own_thread(partial(self._transfer, this, part, RoundDeadline(this.timeout_s)))
            sending.result(this.timeout_s + HOST_WINDOW_S)  # a blocked group is abandoned
        except Exception as error:  # noqa: BLE001 - a group reports a lost member by various errors
            logger.warning("round %d of policy version %d failed: %s", this.number, this.version, one_line(error))
            return False
        logger.debug("round %d: sent in %.3f s", this.number, time.monotonic() - began_s)
        return True

    def _transfer(self, this: Round, part: HeldPart, deadline: RoundDeadline) -> None:
        data, spans = part.data, map(range_of, spans_of(part.pieces))
        if this.is_delta:
            assert part.delta is not None, "rank 0 offers deltas that all ranks hold"
            data, spans = part.delta, spans_of_file(part.delta.nbytes)
        with (
            WeightChannel(self.address, deadline.left_s) as channel,
            round_groups(RoundStore(channel, this, deadline), [self._rank], index=0) as (group,),
        ):
            under_way: deque[Callable[[], None]] = deque()
            for span in spans:
                under_way.append(group.broadcast(data[slice(*span)]))
                if len(under_way) > 1:
                    under_way.popleft()()
            while under_way:
                under_way.popleft()()


# The groups of a round


class RoundDeadline:
    """The end of a wait."""

    def __init__(self, timeout_s: float) -> None:
        self._ends_s = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        """Remaining time, at least a millisecond."""
        return max(self._ends_s - time.monotonic(), 1e-3)

    @property
    def left(self) -> timedelta:
        """Remaining time, as torch takes it."""
        return timedelta(seconds=self.left_s)


class RoundStore(Store):
    """A torch store on rank 0, over the channel; the process groups of a round meet there.

    Each member of a gloo group leaves one key. It is answered when all members have left theirs.

    Args:
        channel: Used by the store alone from here on.
        this: The round.
        deadline: Of all waits.
    """

    def __init__(self, channel: WeightChannel, this: Round, deadline: RoundDeadline) -> None:
        super().__init__()
        self.this, self.deadline, self._channel = this, deadline, channel
        self.own_host = channel.own_host
        self._lock = threading.Lock()  # NCCL has its own threads
        self._known: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        """Leave a value for the other members."""
        content = value.encode() if isinstance(value, str) else bytes(value)
        with self._lock:
            self._channel.send({"kind": "leave", "round": self.this.number, "key": key, "value": content})

    def get(self, key: str) -> bytes:
        """Wait for a value.

        Raises:
            WeightsError: the round is over, or the connection ended.
            TimeoutError: no member has sent the value by the deadline.
        """
        self.wait([key])
        return self._known[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for several keys. The round's deadline counts, not ``timeout``. Raises as `get` does."""
        for key in keys:
            with self._lock:
                if key in self._known:
                    continue
                count = 1 + self.this.num_receivers if "/" in key and self.this.backend == "gloo" else 1
                self._channel.send({"kind": "want", "round": self.this.number, "key": key, "count": count})
                answer = self._channel.receive(self.deadline.left_s)
                if "values" not in answer:
                    raise WeightsError(f"round {self.this.number} of weights is over")
                self._known |= answer["values"]

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether the keys are known in this process."""
        return all(key in self._known for key in keys)


class RoundGroup:
    """A learner rank, the first member, and the receivers of a round. The group ends with the round.

    Args:
        store: Of the round; kept as long as the group.
        sender: The learner rank.
        index: This process's place in the group.
    """

    def __init__(self, store: RoundStore, sender: int, *, index: int) -> None:
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
        """Begin to send [bytes] uint8 as the first member, or to receive them as another member.

        Returns:
            Waits for the end. It raises `RuntimeError` if a member was lost, or the deadline has passed.
        """
        if self._is_nccl:
            data = data.to("cuda")
        options = BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, self._deadline.left
        return partial(self._wait, self._group.broadcast([data], options), data)

    def _wait(self, work: Any, _data: Tensor) -> None:
        """Wait for a broadcast. The argument keeps its data alive until then."""
        work.wait(self._deadline.left)

    def abort(self) -> None:
        """End running broadcasts, also for a thread that waits for them."""
        if self._is_nccl:
            self._group.abort()


@contextmanager
def round_groups(store: RoundStore, senders: Sequence[int], *, index: int) -> Iterator[list[RoundGroup]]:
    """Yield the groups of learner ranks with the receivers; this process has place ``index`` in each.

    The groups end with the block. A connection that ends early also ends the waits of the other members at once.
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


# Receivers


async def receive_weights(offer: WeightOffer, folder: Path, *, timeout_s: float, holds: str = "") -> WeightOffer:
    """Receive an offered version into this host's memory, while its engines generate.

    Args:
        offer: Carried by `Carrier.host_stream`.
        folder: The version goes into a new folder in it; in shared memory, if there is room.
        timeout_s: Deadline of the transfer, without the second per 100 MB.
        holds: Digest of the manifest of the version that this host holds. If the offer is a delta to it, the ranks send
            the delta alone.

    Returns:
        The same version on this host: a delta, which is still to be applied and verified, or a full version.

    Raises:
        WeightsGone: the ranks hold newer versions only.
        WeightsError: all `MAX_ROUNDS` rounds failed, or there is no room.
        DeadlineError: rank 0 did not answer in time.
    """
    # Twice the time of one round: the host may wait for a running round before its own round starts.
    limit_s = 2 * (load_limit_s(timeout_s, offer.num_bytes) + HOST_WINDOW_S + rounds.CALL_S)
    errors: list[str] = []
    for _ in range(MAX_ROUNDS):
        target = make_private_folder(folder / f"r{uuid.uuid4().hex[:8]}")
        try:
            async with asyncio.timeout(limit_s):
                receive = partial(_received_once, offer, target, limit_s, holds)
                return await asyncio.wrap_future(on_own_thread(receive))
        except TimeoutError:
            shutil.rmtree(target, ignore_errors=True)
            raise DeadlineError(
                f"policy version {offer.version} was not received from {offer.manifest} within {limit_s:.1f} s: twice "
                f"rollout_fleet.load_timeout_s = {timeout_s:g} s and a second per 100 MB"
            ) from None
        except BaseException as error:
            shutil.rmtree(target, ignore_errors=True)
            if not isinstance(error, WeightsError) or isinstance(error, WeightsGone):
                raise
            errors.append(str(error))
            logger.warning("policy version %d was not received, asking again: %s", offer.version, error)
    raise WeightsError(
        f"policy version {offer.version} was not received from {offer.manifest} in {MAX_ROUNDS} rounds: {errors}; "
        "with learner and engines on several hosts, set weights.interface to the network that they share"
    )


def _received_once(offer: WeightOffer, folder: Path, limit_s: float, holds: str) -> WeightOffer:
    """Ask, take part in a round, and compare. Raises `WeightsError` if the round failed, or as `admission` does."""
    try:
        with admission(offer, RoundDeadline(limit_s), holds=holds) as (store, index):
            return _receive_files(store, offer, folder, index)
    except WeightsGone:
        raise
    except (RuntimeError, TimeoutError, WeightsError) as error:
        failure = one_line(error)
    # Not from the error: its frames would keep the connections open.
    raise WeightsError(failure)


def _receive_files(store: RoundStore, offer: WeightOffer, folder: Path, index: int) -> WeightOffer:
    """Receive the manifest, and the data file or the delta files. `apply_delta` verifies a delta later."""
    content, this = store.get("manifest"), store.this
    local = replace(offer, manifest=str(folder / "manifest.json"), carrier=Carrier.folder)
    manifest = parse_manifest(local, content)
    Path(local.manifest).write_bytes(content)
    if this.is_delta:
        assert manifest.delta is not None, "a round of a delta"
        ends = [0] * len(manifest.delta.files)
        for change in manifest.delta.changes:
            ends[change.file] = max(change.at + change.num_bytes, ends[change.file])
        files = [new_file(folder / name, end) for name, end in zip(manifest.delta.files, ends, strict=True)]
        with round_groups(store, range(len(files)), index=1 + index) as groups:
            for row in zip_longest(*(spans_of_file(file.nbytes) for file in files)):
                sent = [(g, file, span) for g, file, span in zip(groups, files, row, strict=True) if span]
                for wait in [group.broadcast(file[slice(*span)]) for group, file, span in sent]:
                    wait()
        return local
    data = new_data_file(folder, manifest)
    view = data.numpy()

    def check(pieces: Sequence[Piece]) -> None:
        wrong = threads.wrong(pieces, lambda piece: view[piece.start : piece.start + piece.num_bytes])
        if wrong:
            raise WeightsError(f"{offer.name}: other bytes of {manifest.tensor_at(wrong[0]).name} arrived")

    with DigestThreads() as threads, round_groups(store, range(len(this.shares)), index=1 + index) as groups:
        arrived: list[Piece] = []
        for row in zip_longest(*parts_of(this, manifest)):
            spans = [(group, span) for group, span in zip(groups, row, strict=True) if span]
            waits = [group.broadcast(data[slice(*range_of(span))]) for group, span in spans]
            check(arrived)  # verify the previous row while the broadcasts of this row run
            for wait in waits:
                wait()
            arrived = [piece for _, span in spans for piece in span]
        check(arrived)
    # A delta was sent as the full version that it results in.
    return replace(local, kind="full", base_version=None) if offer.kind == "delta" else local


def new_data_file(folder: Path, manifest: Manifest) -> Tensor:
    """Make the data file, with its header: [bytes] uint8. Raises `WeightsError` if there is no room."""
    head, _ = safetensors_header([(t.name, t.dtype, t.shape, t.num_bytes) for t in manifest.tensors])
    data = new_file(folder / manifest.files[0], len(head) + manifest.num_bytes)
    data[: len(head)].copy_(torch.frombuffer(bytearray(head), dtype=torch.uint8))
    return data


def new_file(path: Path, size: int) -> Tensor:
    """Make a file of ``size`` bytes and map it: [bytes] uint8. Raises `WeightsError` if there is no room."""
    with os.fdopen(open_private(path, os.O_RDWR | os.O_CREAT | os.O_EXCL), "w+b") as file:
        if size == 0:
            return torch.empty(0, dtype=torch.uint8)
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            raise WeightsError(f"no room for {size} bytes of weights in {path.parent}: {error}; free some") from error
        return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)


class RoundFailed(WeightsError):
    """A round of an engine's rank failed; the rank may ask for another round."""


class ArrivingWeights:
    """A version that arrives in this process, a rank of an engine, while it is loaded: one round.

    A thread takes part in the round and hands over complete tensors. The loading thread waits for it until the
    deadline, and then abandons it. Memory holds at most the tensor that is loaded, `NUM_AHEAD` others with the buckets
    that they came in, incomplete tensors, and one bucket of `SPAN_BYTES` per learner rank.

    Args:
        offer: Carried by `Carrier.engine_stream`.
        device: Device of the tensors with NCCL; gloo leaves them in host memory.
        timeout_s: Deadline of the whole transfer.

    Attributes:
        manifest: Of the version. The constructor waits for it.
        copier: None, because each tensor is verified before it is handed over.

    Raises `RoundFailed` if the round failed, `WeightsGone` if the ranks no longer hold the version, `DeadlineError` if
    nothing came in time.
    """

    copier = None

    def __init__(self, offer: WeightOffer, device: torch.device, *, timeout_s: float) -> None:
        self._offer, self._device, self._timeout_s = offer, device, timeout_s
        self._deadline = RoundDeadline(timeout_s)
        self._arrived: queue.Queue[Any] = queue.Queue(NUM_AHEAD)
        self._is_left = threading.Event()
        self._groups: list[RoundGroup] = []
        self._is_whole = False
        on_own_thread(self._receive)
        self.manifest: Manifest = self._next()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and tensor of each, verified, as they become complete; raises as the constructor does."""
        while (arrived := self._next()) is not None:
            yield arrived
        self._is_whole = True

    def verify(self) -> None:
        """Raise `WeightsError` unless every tensor has arrived."""
        if not self._is_whole:
            raise WeightsError(f"{self._offer.name}: not every tensor was taken from {self._offer.manifest}")

    def close(self) -> None:
        """Leave the round, if it still runs."""
        self._is_left.set()
        with suppress(queue.Empty):
            while True:
                self._arrived.get_nowait()
        for group in list(self._groups):
            group.abort()

    def _next(self) -> Any:
        try:
            arrived = self._arrived.get(timeout=self._deadline.left_s)
        except queue.Empty:
            self.close()
            raise DeadlineError(
                f"{self._offer.name} did not arrive from {self._offer.manifest} within {self._timeout_s:.1f} s"
            ) from None
        if isinstance(arrived, Exception):
            raise arrived
        return arrived

    # On the thread

    def _receive(self) -> None:
        failure: Exception | None = None
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            self._take_part()
        except (DeadlineError, WeightsGone) as error:
            failure = error
        except Exception as error:  # noqa: BLE001 - raised in the loading thread
            failure = RoundFailed(one_line(error))
        self._hand_over(failure)

    def _take_part(self) -> None:
        with admission(self._offer, self._deadline) as (store, index):
            self._receive_round(store, index)

    def _receive_round(self, store: RoundStore, index: int) -> None:
        this, manifest = store.this, parse_manifest(self._offer, store.get("manifest"))
        self._hand_over(manifest)
        device = self._device if this.backend == "nccl" else torch.device("cpu")
        assembly = TensorAssembly(manifest, name=self._offer.name, device=device)
        with round_groups(store, range(len(this.shares)), index=1 + index) as self._groups:
            parts = zip(self._groups, parts_of(this, manifest), strict=True)
            streams = [_RankStream(group, spans, device) for group, spans in parts]
            while under_way := [stream for stream in streams if stream.span]:
                # In the order of the file, so that a tensor waits for its other parts as briefly as possible.
                first = min(under_way, key=lambda stream: stream.span[0].start)
                for arrived in assembly.add(*first.take()):
                    self._hand_over(arrived)
        for arrived in assembly.finish():
            self._hand_over(arrived)

    def _hand_over(self, arrived: Any) -> None:
        if self._is_left.is_set():
            raise WeightsError("the load has ended")
        self._arrived.put(arrived, timeout=self._deadline.left_s)


class _RankStream:
    """The buckets that one learner rank sends to an engine's rank.

    Attributes:
        span: The pieces of the bucket that is under way; empty at the end.
    """

    def __init__(self, group: RoundGroup, spans: Iterator[list[Piece]], device: torch.device) -> None:
        self._group, self._spans, self._device = group, spans, device
        self.span: list[Piece] = []
        self._begin()

    def take(self) -> tuple[list[Piece], Tensor]:
        """Wait for the bucket, and begin the next one; returns the pieces and their bytes, [bytes] uint8."""
        self._wait()
        taken = self.span, self._data
        self._begin()
        return taken

    def _begin(self) -> None:
        self.span = next(self._spans, [])
        if self.span:
            first, end = range_of(self.span)
            self._data = torch.empty(end - first, dtype=torch.uint8, device=self._device)
            self._wait: Callable[[], None] = self._group.broadcast(self._data)


@contextmanager
def admission(offer: WeightOffer, deadline: RoundDeadline, *, holds: str = "") -> Iterator[tuple[RoundStore, int]]:
    """Ask rank 0 for a version, and answer its call; yield the round's store and this receiver's place in the round.

    Raises:
        WeightsGone: the ranks no longer hold the version, or rank 0 has ended.
        WeightsError: rank 0 did not hear of this receiver, or the connection ended.
        DeadlineError: rank 0 did not answer.
    """
    with ExitStack() as stack:
        try:
            address = ChannelAddress(endpoint=offer.manifest, access=offer.access)
            channel = stack.enter_context(WeightChannel(address, deadline.left_s))
            channel.send({"kind": "ask", "version": offer.version, "holds": holds})
            while "answer" not in (message := channel.receive(deadline.left_s)):
                channel.send({"kind": "present", "call": message["call"]})
        except ChannelRefused as error:
            raise WeightsGone(f"{offer.name} is no longer sent: {error}") from None
        except TimeoutError as error:
            raise DeadlineError(f"{offer.name} was not received: {error}") from None
        answer = message["answer"]
        if answer.get("gone"):
            raise WeightsGone(f"{offer.name} is no longer sent by {offer.manifest}")
        if answer.get("late"):
            raise WeightsError(f"rank 0 did not hear of this receiver within {rounds.CALL_S} s")
        this = msgspec.convert(answer, Round)
        yield RoundStore(channel, this, RoundDeadline(min(this.timeout_s, deadline.left_s))), message["index"]


# What one broadcast holds


def parts_of(this: Round, manifest: Manifest) -> list[Iterator[list[Piece]]]:
    """Return what each learner rank broadcasts in a round, in order."""
    parts, first = [], 0
    for share in this.shares:
        parts.append(spans_of(manifest.pieces[first : first + share]))
        first += share
    return parts


def spans_of(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Yield adjacent pieces of up to `SPAN_BYTES` together: one broadcast each."""
    span: list[Piece] = []
    for piece in pieces:
        if span:
            begin, end = range_of(span)
            if piece.start != end or end + piece.num_bytes - begin > SPAN_BYTES:
                yield span
                span = []
        span.append(piece)
    if span:
        yield span


def spans_of_file(num_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield first and end byte of each broadcast of a file without pieces."""
    for start in range(0, num_bytes, SPAN_BYTES):
        yield start, min(start + SPAN_BYTES, num_bytes)


def range_of(span: Sequence[Piece]) -> tuple[int, int]:
    """Return first and end byte of adjacent pieces."""
    return span[0].start, span[-1].start + span[-1].num_bytes


def interface_address(interface: str) -> str:
    """Return the IPv4 address of a network interface. Raises `ValueError` if it has none."""
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
    """Return an error's message without torch's stack."""
    text = str(error).partition("\n")[0][:300]
    return text if isinstance(error, WeightsError) else f"{type(error).__name__}: {text}"
