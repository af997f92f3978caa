"""Sends weights over the network. In a *round*, the learner ranks send a version, and each receiver forwards it.

    each rank ══ its own bytes ══▶ receiver ══▶ receiver ══▶ …      All are members of one process group.

Receivers verify all bytes by their digests. There are two kinds of receivers:

- A host of engines receives a version into its memory while its engines generate (`receive_weights`).
- A tensor-parallel rank of an engine receives a version in buckets. A bucket is the bytes of one send operation.
  Meanwhile the engine is paused and loads the complete tensors (`ArrivingWeights`).

If a member dies or stops, all members leave the round by the round's deadline. The receivers then ask for a
new round, until `MAX_ROUNDS` have failed. Training does not wait for a round, because the learner ranks send from
threads. The members of a group do not authenticate each other, and the digests do not protect against an attacker.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import mmap
import os
import shutil
import socket
import struct
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from heapq import merge
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Store  # type: ignore

from asyncrl.core.errors import DeadlineError, WeightsError, WeightsGone
from asyncrl.core.host import make_private_folder, open_private
from asyncrl.core.remote import on_own_thread
from asyncrl.core.stacks import missed
from asyncrl.core.types import Carrier, WeightOffer
from asyncrl.weights import rounds
from asyncrl.weights.assembly import BucketCopies, TensorAssembly
from asyncrl.weights.carriers import HOST_WINDOW_S, PublishOptions, load_limit_s
from asyncrl.weights.manifest import (
    DigestThreads,
    Manifest,
    Piece,
    parse_manifest,
    read_manifest,
    safetensors_header,
    write_error,
)
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
"""Largest size in bytes of a bucket (the bytes of one send operation), unless one piece is larger."""
NUM_UNDER_WAY = 4
"""Number of buckets that a member receives at the same time. A member also sends this number at the same time."""
NUM_AHEAD = 2
"""Number of groups of tensors that are copied to a GPU before the model's loader takes them."""
_RETRY_S = 1.0
_FOREVER = timedelta(days=20)  # torch rejects a timeout that is much longer than this


# The learner's side


@dataclass(frozen=True, kw_only=True)
class HeldPart:
    """The part of a version that one learner rank sends.

    Attributes:
        data: The data file, [bytes] uint8.
        pieces: The pieces (parts of tensors) in the data file that this rank sends.
        delta: This rank's delta file, [bytes] uint8; None if the version is not a delta.
    """

    data: Tensor
    pieces: tuple[Piece, ...]
    delta: Tensor | None


class WeightSender:
    """Sends the weights of one learner rank to receivers, on a thread. `hold` and `offer` do not wait for this thread.

    Rank 0's sender is created without the argument ``address``, and listens for connections. The senders of the other
    ranks get rank 0's address as the argument ``address``, and connect to it.

    Attributes:
        address: Address of rank 0's channel, also in the sender of rank 0. Senders and receivers connect to it.
        held_parts: The parts that this rank holds, by policy version.

    Raises:
        ValueError: the interface does not exist.
    """

    def __init__(
        self, options: PublishOptions, *, rank: int, num_ranks: int, address: ChannelAddress | None = None
    ) -> None:
        self._rank = rank
        self.held_parts: HeldVersions[HeldPart] = HeldVersions(options.num_held)
        self._coordinator: RoundCoordinator | None = None
        self._channel: WeightChannel | None = None
        self._member: GroupMember | None = None
        self._closed: Future[None] = Future()
        works = [self._take_part]
        if address is None:
            host = interface_address(options.interface)
            coordinator = self._coordinator = RoundCoordinator(options, host, num_ranks=num_ranks)
            address = coordinator.address
            works.append(lambda: asyncio.run(coordinator.run()))
        self._options, self.address = options, address
        self._threads = [threading.Thread(target=work, name="weight-rounds", daemon=True) for work in works]
        for thread in self._threads:
            thread.start()

    def hold(self, version: int, data: Tensor, pieces: Sequence[Piece], delta: Tensor | None = None) -> None:
        """Keep this rank's part of a version in memory, and send it in future rounds (transfers to receivers).

        ``data`` is the data file, and ``pieces`` are this rank's pieces of this file. ``delta`` is this rank's delta
        file, for receivers that hold the previous version. Both files are [bytes] uint8.
        """
        self.held_parts.add(version, HeldPart(data=data, pieces=tuple(pieces), delta=delta))

    def offer(self, offer: WeightOffer, shares: Sequence[int]) -> WeightOffer:
        """Offer a version to receivers. Call this method only on rank 0, after every rank holds its part.

        ``shares`` has the number of pieces that each rank holds. The manifest lists rank 0's pieces first. Returns a
        copy of ``offer`` that names rank 0's network address instead of a file.
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
        """Remove the versions before ``oldest``, the oldest version that is still offered to engines."""
        self.held_parts.retire(oldest)
        if self._coordinator is not None:
            self._coordinator.offers.retire(oldest)

    def close(self) -> None:
        """Leave a running round (a transfer), and do not join later rounds. May be called more than once."""
        if not self._closed.done():
            self._closed.set_result(None)
        if self._coordinator is not None:
            self._coordinator.close()
        if (channel := self._channel) is not None:
            channel.close()
        for thread in self._threads:
            thread.join(HOST_WINDOW_S)
        if (member := self._member) is not None:
            member.close()

    # The sender's thread runs the following methods.

    def _take_part(self) -> None:
        """Send this rank's part in every round (transfer) that rank 0 announces.

        If the connection to rank 0 is lost, connect to rank 0 again.
        """
        number, is_sent = 0, True
        while not self._closed.done():
            try:
                with WeightChannel(self.address) as channel:
                    self._channel = channel  # set `_channel` before `connect`, so that `close` can interrupt `connect`
                    if self._closed.done():
                        return
                    channel.connect(rounds.SILENCE_S)
                    while True:
                        report = {"kind": "done", "rank": self._rank, "round": number, "failed": not is_sent}
                        channel.send(report)
                        this = msgspec.convert(channel.receive(None), Round)
                        number, is_sent = this.number, self.send_round(this)
            except (WeightsError, TimeoutError) as error:
                if not wait({self._closed}, _RETRY_S).done:
                    logger.warning("learner rank %d connects to rank 0 again: %s", self._rank, error)

    def send_round(self, this: Round) -> bool:
        """Send this rank's part to the first receiver. Return False after a failure."""
        began_s = time.monotonic()
        try:
            self.held_parts.retire(this.oldest)
            if (part := self.held_parts.get(this.version)) is None:
                raise WeightsGone(f"rank {self._rank} no longer holds policy version {this.version}")
            sending = on_own_thread(partial(self._transfer, this, part, RoundDeadline(this.timeout_s)))
            # If the transfer still blocks at the deadline or after `close`, do not wait for its thread any longer.
            wait({sending, self._closed}, this.timeout_s + HOST_WINDOW_S, FIRST_COMPLETED)
            if self._closed.done():
                return False
            sending.result(0.0)
        except Exception as error:  # noqa: BLE001 - a group raises various errors if a member is lost
            logger.warning("round %d of policy version %d failed: %s", this.number, this.version, one_line(error))
            if self._member is not None:
                self._member.close()
            self._member = None
            return False
        logger.debug("round %d: sent in %.3f s", this.number, time.monotonic() - began_s)
        return True

    def _transfer(self, this: Round, part: HeldPart, deadline: RoundDeadline) -> None:
        data, buckets = part.data, buckets_of(self._rank, part.pieces)
        if this.is_delta:
            assert part.delta is not None, "rank 0 must offer only deltas that all ranks hold"
            data, buckets = part.delta, file_buckets(self._rank, part.delta.nbytes)
        if self._member is None:
            self._member = GroupMember(self.address, deadline.left_s)
        group = self._member.group(this, self._rank, deadline)
        under_way: deque[Callable[[], None]] = deque()
        for bucket in buckets:
            under_way.append(group.send(data[bucket.first : bucket.end], len(this.shares), deadline))
            if len(under_way) > NUM_UNDER_WAY:
                under_way.popleft()()
        while under_way:
            under_way.popleft()()


# The process group of a round


class RoundDeadline:
    """The common deadline of one or more successive waits."""

    def __init__(self, timeout_s: float) -> None:
        self._ends_s = time.monotonic() + timeout_s

    @property
    def is_over(self) -> bool:
        """True if the deadline has passed."""
        return time.monotonic() >= self._ends_s

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, at least 0.001."""
        return max(self._ends_s - time.monotonic(), 1e-3)

    @property
    def left(self) -> timedelta:
        """Time until the deadline, at least 1 ms."""
        return timedelta(seconds=self.left_s)


class RoundStore(Store):
    """A torch store whose values are on rank 0. Members of a new process group exchange addresses in this store."""

    def __init__(self, channel: WeightChannel, this: Round, deadline: RoundDeadline) -> None:
        super().__init__()
        self._channel, self._this, self._deadline = channel, this, deadline
        self._lock = threading.Lock()  # NCCL's own threads use the store too
        self._known: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        """Store ``value`` under ``key`` on rank 0, for the other members."""
        content = value.encode() if isinstance(value, str) else bytes(value)
        with self._lock:
            self._channel.send({"kind": "leave", "round": self._this.number, "key": key, "value": content})

    def get(self, key: str) -> bytes:
        """Wait until a member has stored a value under ``key``, and return the value.

        Raises:
            WeightsError: the round or the connection ended.
            TimeoutError: no member has sent the value by the deadline.
        """
        self.wait([key])
        return self._known[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for several keys until the round's deadline. ``timeout`` is ignored. Raises the errors of `get`."""
        # With gloo, each member stores one key and reads the keys of all members.
        # `count` tells rank 0 how many keys it must have before it answers. One answer contains the values of all keys.
        count = self._this.num_members if self._this.backend == "gloo" else 1
        for key in keys:
            with self._lock:
                if key not in self._known:
                    self._channel.send({"kind": "want", "round": self._this.number, "key": key, "count": count})
                    answer = self._channel.receive(self._deadline.left_s)
                    if "values" not in answer:
                        raise WeightsError(f"round {self._this.number} of weights is over")
                    self._known |= answer["values"]

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether this process already has the values of all keys. Does not ask rank 0."""
        return all(key in self._known for key in keys)


class WeightGroup:
    """A process group of torch for rounds (transfers of weights). The learner ranks come first, then the receivers.

    Successive rounds with the same members use the same group. ``place`` is the rank of this process in the group.
    The members must connect to each other before ``deadline``.
    """

    def __init__(self, channel: WeightChannel, this: Round, place: int, deadline: RoundDeadline) -> None:
        self.number, self._is_nccl = this.group, this.backend == "nccl"
        self._store = RoundStore(channel, this, deadline)
        self._copies: BucketCopies | None = None
        own = PrefixStore("members", self._store)
        if self._is_nccl:
            from torch.distributed import ProcessGroupNCCL  # import here, because torch may be built without NCCL

            options: Any = ProcessGroupNCCL.Options()
            options._timeout = _FOREVER  # at a timeout, torch would end the process; `abort` ends a wait instead
            self._group: Any = ProcessGroupNCCL(own, place, this.num_members, options)
        else:
            options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [ProcessGroupGloo.create_device(hostname=channel.own_host)]
            options._threads = 1
            options._timeout = deadline.left
            self._group = ProcessGroupGloo(own, place, this.num_members, options)

    def send(self, data: Tensor, to: int, deadline: RoundDeadline) -> Callable[[], None]:
        """Begin to send ``data``, [bytes] uint8, to rank ``to``. With NCCL, host memory is first copied to the GPU.

        Returns:
            A function that waits until the transfer has ended. It raises `RuntimeError` if the other member was lost,
            or if the deadline has passed.
        """
        if self._is_nccl and data.device.type == "cpu":
            device = torch.device("cuda", torch.cuda.current_device())
            self._copies = self._copies or BucketCopies(DigestThreads(), device)
            data = self._copies.copied(data.numpy())
        return partial(self._wait, self._group.send([data], to, 0), data, deadline)

    def receive(self, data: Tensor, source: int, deadline: RoundDeadline) -> Callable[[], None]:
        """Begin to receive ``data``, [bytes] uint8, from rank ``source``.

        Returns a function that waits until the transfer has ended. It raises `RuntimeError` if the other member was
        lost, or if the deadline has passed.
        """
        return partial(self._wait, self._group.recv([data], source, 0), data, deadline)

    def _wait(self, work: Any, _data: Tensor, deadline: RoundDeadline) -> None:
        """Wait for the end of a transfer. The argument ``_data`` keeps the memory alive until the end."""
        work.wait(deadline.left)

    def abort(self) -> None:
        """End the NCCL transfers that still run. A thread that waits for such a transfer gets an error."""
        if self._is_nccl:
            self._group.abort()


class GroupMember:
    """This process's membership in rounds (transfers of weights): a connection to rank 0, and a process group."""

    def __init__(self, address: ChannelAddress, timeout_s: float) -> None:
        self.channel = WeightChannel(address).connect(timeout_s)
        self._group: WeightGroup | None = None

    def group(self, this: Round, place: int, deadline: RoundDeadline) -> WeightGroup:
        """Return the process group of a round: the newest group if it has the same members, or a new one.

        ``place`` is the rank of this process in the group.
        """
        if self._group is None or self._group.number != this.group:
            self._leave()
            self._group = WeightGroup(self.channel, this, place, deadline)
        return self._group

    def close(self) -> None:
        """Leave the group, and end the connection to rank 0. A later round needs a new `GroupMember`."""
        self._leave()
        self.channel.close()

    def _leave(self) -> None:
        if self._group is not None:
            self._group.abort()
        self._group = None


# Receivers


async def receive_weights(offer: WeightOffer, folder: Path, *, timeout_s: float, holds: str = "") -> WeightOffer:
    """Receive an offered version into this host's memory, while the engines of the host generate.

    Args:
        offer: An offer with `Carrier.host_stream`.
        folder: Parent of the new folder for the version. It should be in shared memory.
        timeout_s: Time limit of the transfer, in seconds; one second per 100 MB is added.
        holds: Manifest digest of the version that this host holds. If the offer is a delta to that version, the ranks
            send the delta alone.

    Returns:
        An offer that names the received files. If it is a delta, the caller must apply and verify the delta.

    Raises:
        WeightsGone: the ranks no longer hold the version, or rank 0 has ended.
        WeightsError: all `MAX_ROUNDS` attempts failed, for example because the folder has no room.
        DeadlineError: the version was not received in time.
    """
    # Wait for twice the time of a round, because another round may have to end before this round begins.
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
            raise missed(
                f"policy version {offer.version} was not received from {offer.manifest} within {limit_s:.1f} s: twice "
                f"rollout_fleet.load_timeout_s = {timeout_s:g} s plus one second per 100 MB"
            ) from None
        except BaseException as error:
            shutil.rmtree(target, ignore_errors=True)
            if not isinstance(error, WeightsError) or isinstance(error, WeightsGone):
                raise
            errors.append(str(error))
            logger.warning("policy version %d was not received and is requested again: %s", offer.version, error)
    raise WeightsError(
        f"policy version {offer.version} was not received from {offer.manifest} in {MAX_ROUNDS} rounds: {errors}; "
        "if hosts did not reach each other, set weights.interface to the network that they share"
    )


def _received_once(offer: WeightOffer, folder: Path, limit_s: float, holds: str) -> WeightOffer:
    try:
        with closing(admission(offer, RoundDeadline(limit_s), holds=holds)) as admitted:
            return _receive_files(admitted, offer, folder)
    except WeightsGone:
        raise
    except (RuntimeError, TimeoutError, WeightsError) as error:
        failure = one_line(error)
    # Raise without `from error`, because the stack frames of `error` would keep the connections open.
    raise WeightsError(failure)


def _receive_files(admitted: ReceiverRound, offer: WeightOffer, folder: Path) -> WeightOffer:
    """Receive the files of a version. A delta is verified later, by `apply_delta`."""
    local = replace(offer, manifest=str(folder / "manifest.json"), carrier=Carrier.folder)
    manifest = parse_manifest(local, admitted.manifest)
    try:
        Path(local.manifest).write_bytes(admitted.manifest)
    except OSError as error:
        raise write_error(len(admitted.manifest), folder, error) from error
    if admitted.round.is_delta:
        assert manifest.delta is not None, "the manifest must be of a delta"
        ends = [0] * len(manifest.delta.files)
        for change in manifest.delta.changes:
            ends[change.file] = max(change.at + change.num_bytes, ends[change.file])
        files = [new_file(folder / name, end) for name, end in zip(manifest.delta.files, ends, strict=True)]
        parts = [file_buckets(rank, file.nbytes) for rank, file in enumerate(files)]
        for _ in admitted.arriving(_in_file_order(parts), lambda b: files[b.sender][b.first : b.end]):
            pass
        return local
    data = new_data_file(folder, manifest)
    view = data.numpy()
    with DigestThreads() as threads:
        for bucket, _ in admitted.arriving(admitted.buckets(manifest), lambda bucket: data[bucket.first : bucket.end]):
            wrong = threads.wrong(bucket.pieces, lambda piece: view[piece.start : piece.start + piece.num_bytes])
            if wrong:
                raise WeightsError(
                    f"{offer.name}: received bytes of {manifest.tensor_at(wrong[0]).name} differ from the published "
                    "bytes"
                )
    # Even if the offer is of a delta, the ranks have sent the full version in this round.
    return replace(local, kind="full", base_version=None) if offer.kind == "delta" else local


def new_data_file(folder: Path, manifest: Manifest) -> Tensor:
    """Create the data file of a version in ``folder``, and write its safetensors header.

    Returns the mapped file, [bytes] uint8. Raises `WeightsError` if the file cannot be written.
    """
    head, _ = safetensors_header([(t.name, t.dtype, t.shape, t.num_bytes) for t in manifest.tensors])
    data = new_file(folder / manifest.files[0], len(head) + manifest.num_bytes)
    data[: len(head)].copy_(torch.frombuffer(bytearray(head), dtype=torch.uint8))
    return data


def new_file(path: Path, size: int) -> Tensor:
    """Create a file and return its mapped memory, [size] uint8. Raises `WeightsError` if the file cannot be written."""
    try:
        with os.fdopen(open_private(path, os.O_RDWR | os.O_CREAT | os.O_EXCL), "w+b") as file:
            if size == 0:
                return torch.empty(0, dtype=torch.uint8)
            os.posix_fallocate(file.fileno(), 0, size)
            return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
    except OSError as error:
        raise write_error(size, path.parent, error) from error


class RoundFailed(WeightsError):
    """An error: a round failed for a tensor-parallel rank of an engine. The rank may ask for another round."""


class ArrivingWeights:
    """A version that a tensor-parallel rank of an engine receives in one round, while the model loads it.

    Memory holds at most the tensor that the model loads, the incomplete tensors, `NUM_UNDER_WAY` buckets that arrive,
    and `NUM_UNDER_WAY` buckets that are forwarded. A bucket has up to `SPAN_BYTES`. Each wait ends at the deadline.

    Args:
        offer: The offer of the version, with `Carrier.engine_stream`.
        device: Device of the received tensors with NCCL; with gloo, they are in host memory.
        timeout_s: Time limit of the whole transfer, in seconds.

    Attributes:
        manifest: Manifest of the version. The constructor waits for it.

    Raises:
        RoundFailed: the round failed.
        WeightsGone: the ranks no longer hold the version.
        DeadlineError: the version did not arrive in time.
    """

    copier = None

    def __init__(self, offer: WeightOffer, device: torch.device, *, timeout_s: float) -> None:
        self._offer, self._device, self._timeout_s = offer, device, timeout_s
        self._deadline, self._is_whole = RoundDeadline(timeout_s), False
        with self._named_failures():
            self._admitted = admission(offer, self._deadline)
            self.manifest: Manifest = parse_manifest(offer, self._admitted.manifest)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of each tensor as soon as it is complete and verified.

        Raises the errors of the constructor.
        """
        is_nccl = self._admitted.round.backend == "nccl"
        device = self._device if is_nccl else torch.device("cpu")
        with self._named_failures():
            assembly = TensorAssembly(self.manifest, name=self._offer.name, device=device, digests_there=is_nccl)

            def place(bucket: Bucket) -> Tensor:
                return torch.empty(bucket.end - bucket.first, dtype=torch.uint8, device=device)

            for bucket, data in self._admitted.arriving(self._admitted.buckets(self.manifest), place):
                yield from assembly.add(bucket.pieces, data)
            yield from assembly.finish()
        self._is_whole = True

    def verify(self) -> None:
        """Check that the caller of `tensors` has read every tensor. Raises `WeightsError` if not."""
        if not self._is_whole:
            raise WeightsError(
                f"{self._offer.name}: the model stopped reading before the last tensor from {self._offer.manifest}"
            )

    def close(self) -> None:
        """Leave the round (the transfer) if it still runs."""
        self._admitted.close()

    @contextmanager
    def _named_failures(self) -> Iterator[None]:
        try:
            yield
        except WeightsGone:
            raise
        except Exception as error:  # noqa: BLE001 - a group raises various errors if a member is lost
            if isinstance(error, DeadlineError) or self._deadline.is_over:
                raise missed(
                    f"{self._offer.name} did not arrive from {self._offer.manifest} within {self._timeout_s:.1f} s"
                ) from None
            raise RoundFailed(one_line(error)) from None


@dataclass(kw_only=True)
class ReceiverRound:
    """One receiver's participation in one round (transfer of weights).

    Attributes:
        manifest: Text of the version's manifest.
        member: This process's connection and process group. If this round succeeds, later rounds use them again.
        place: Rank of this receiver in the process group.
        is_done: Whether all bytes have arrived and were forwarded.
    """

    round: Round
    manifest: bytes
    member: GroupMember
    place: int
    deadline: RoundDeadline
    is_done: bool = False

    def close(self) -> None:
        """Leave the round. After a failure, also end the connection to rank 0. May be called more than once.

        After a success, the next round uses the connection again.
        """
        if not self.is_done:
            self.member.close()
        elif self.member not in _idle:
            _idle.append(self.member)

    def buckets(self, manifest: Manifest) -> Iterator[Bucket]:
        """Yield the buckets of all ranks in the order of the data file. A bucket is the bytes of one send operation.

        In this order, the bytes of one tensor arrive together.
        """
        parts, first = [], 0
        for rank, share in enumerate(self.round.shares):
            parts.append(buckets_of(rank, manifest.pieces[first : first + share]))
            first += share
        return _in_file_order(parts)

    def arriving(
        self, buckets: Iterable[Bucket], place_of: Callable[[Bucket], Tensor]
    ) -> Iterator[tuple[Bucket, Tensor]]:
        """Receive buckets, forward them to the next receiver, and yield (bucket, bytes of the bucket) pairs.

        A bucket is the bytes of one send operation. The buckets have the same order on all receivers. ``place_of``
        returns the memory for a bucket, [bytes] uint8, and no other code may write to it. Raises `RuntimeError` if the
        previous or the next member was lost, or if the deadline has passed.
        """
        group = self.member.group(self.round, self.place, self.deadline)
        receiving: deque[tuple[Bucket, Tensor, Callable[[], None]]] = deque()
        sending: deque[Callable[[], None]] = deque()
        is_first, is_last = self.place == len(self.round.shares), self.place + 1 == self.round.num_members
        left = iter(buckets)
        while True:
            while len(receiving) < NUM_UNDER_WAY and (bucket := next(left, None)) is not None:
                data, source = place_of(bucket), bucket.sender if is_first else self.place - 1
                receiving.append((bucket, data, group.receive(data, source, self.deadline)))
            if not receiving:
                break
            bucket, data, finish = receiving.popleft()
            finish()
            if not is_last:
                sending.append(group.send(data, self.place + 1, self.deadline))
            yield bucket, data
            if len(sending) > NUM_UNDER_WAY:
                sending.popleft()()
        while sending:
            sending.popleft()()
        self.is_done = True


_idle: list[GroupMember] = []
"""This process's connections to learners that are in no round now. The next round uses one of them again."""


def admission(offer: WeightOffer, deadline: RoundDeadline, *, holds: str = "") -> ReceiverRound:
    """Ask learner rank 0 for a version, and wait until a round (a transfer of this version) begins.

    Before the round, rank 0 calls each receiver, and this function answers the call. Returns this receiver's membership
    in the round.

    Raises:
        WeightsGone: the ranks no longer hold the version, or rank 0 has ended.
        WeightsError: this receiver did not answer rank 0's call in time, or the connection ended.
        DeadlineError: rank 0 did not answer.
    """
    address = ChannelAddress(endpoint=offer.manifest, access=offer.access)
    member: GroupMember | None = None
    while _idle and member is None:
        member = _idle.pop()
        # If the connection has ended or leads to another address, its learner has ended. Close the connection.
        if member.channel.address != address or not member.channel.is_open:
            member.close()
            member = None
    try:
        member = member or GroupMember(address, deadline.left_s)
        member.channel.send({"kind": "ask", "version": offer.version, "holds": holds, "host": socket.gethostname()})
        while "answer" not in (message := member.channel.receive(deadline.left_s)):
            member.channel.send({"kind": "present", "call": message["call"]})
        answer = message["answer"]
        if answer.get("gone"):
            raise WeightsGone(f"{offer.name} is no longer sent by {offer.manifest}")
        if answer.get("late"):
            raise WeightsError(f"this receiver did not answer the call of rank 0 within {rounds.CALL_S} s")
    except BaseException as error:
        if member is not None:
            member.close()
        if isinstance(error, ChannelRefused):
            raise WeightsGone(f"{offer.name} is no longer sent: {error}") from None
        if isinstance(error, TimeoutError):
            raise missed(f"{offer.name} was not received: {error}") from None
        raise
    this = msgspec.convert(answer, Round)
    return ReceiverRound(
        round=this,
        manifest=message["manifest"],
        member=member,
        place=len(this.shares) + message["index"],
        deadline=RoundDeadline(min(this.timeout_s, deadline.left_s)),
    )


# The buckets of a transfer


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Bytes of one send operation of a learner rank: adjacent pieces of a data file, or a part of a delta file."""

    sender: int
    first: int
    end: int
    pieces: tuple[Piece, ...] = ()


def buckets_of(sender: int, pieces: Sequence[Piece]) -> Iterator[Bucket]:
    """Group adjacent pieces into buckets of at most `SPAN_BYTES`. One send operation sends one bucket.

    ``sender`` is the learner rank that sends the pieces.
    """
    own: list[Piece] = []
    for index, piece in enumerate(pieces):
        own.append(piece)
        end = piece.start + piece.num_bytes
        following = pieces[index + 1] if index + 1 < len(pieces) else None
        if following and following.start == end and end + following.num_bytes - own[0].start <= SPAN_BYTES:
            continue
        yield Bucket(sender=sender, first=own[0].start, end=end, pieces=tuple(own))
        own = []


def file_buckets(sender: int, num_bytes: int) -> Iterator[Bucket]:
    """Yield the buckets of a delta file: parts of at most `SPAN_BYTES`. One send operation sends one bucket."""
    for first in range(0, num_bytes, SPAN_BYTES):
        yield Bucket(sender=sender, first=first, end=min(first + SPAN_BYTES, num_bytes))


def _in_file_order(parts: Iterable[Iterator[Bucket]]) -> Iterator[Bucket]:
    return merge(*parts, key=lambda bucket: (bucket.first, bucket.sender))


def interface_address(interface: str) -> str:
    """Return the IPv4 address of a network interface, such as ``"eth0"``.

    Raises `ValueError` if the interface does not exist or has no IPv4 address.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", interface.encode()[:15]))  # SIOCGIFADDR
        except OSError as error:
            raise ValueError(
                f"weights.interface must be a network interface with an IPv4 address where learner rank 0 runs, got "
                f"{interface!r} ({error.strerror}); choose one of {[name for _, name in socket.if_nameindex()]}"
            ) from error
    return socket.inet_ntoa(answer[20:24])


def one_line(error: Exception) -> str:
    """Return the name of an error's type and the first line of its message, cut to 300 characters.

    The name of the type is left out for a `WeightsError`.
    """
    text = str(error).partition("\n")[0][:300]
    return text if isinstance(error, WeightsError) else f"{type(error).__name__}: {text}"
