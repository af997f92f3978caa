"""Weights over the network: gloo broadcasts from the learner ranks to the hosts of the engines, no shared folder.

    receivers ──ask──▶ rank 0 (a store)           A round: one version, those who asked, one deadline.
    rank 0 ──call──▶ receivers ──present──▶       Who does not answer is not in it.
    rank 0 ──round──▶ receivers, other ranks      Each rank and the receivers form a process group of their own,
    each rank ══ its own bytes ══▶ receivers      in which that rank broadcasts the bytes that it holds.

No rank holds or receives the bytes of another one. A receiver compares every digest as the bytes arrive, and ends with
a data file and a manifest on its own host. A member that dies or stops ends the round for all by the deadline, which
grows with the bytes. Those who are left ask again, up to `MAX_ROUNDS` times.

Who waits, and for whom: rank 0's thread for requests, woken by a receiver; the other ranks' threads for the next round,
woken by rank 0; a receiver, on a thread that can be abandoned, for rank 0 and then for all ranks. Training waits for
none of them. Neither the store nor the groups authenticate anyone, and digests do not stop an attacker.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, DistStoreError, PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore

from .errors import DeadlineError, WeightsError, WeightsGone
from .manifest import (
    COLLECTIVE_SCHEME,
    FROZEN,
    Manifest,
    Piece,
    WeightOffer,
    digest_of,
    read_manifest,
    safetensors_header,
)

T = TypeVar("T")
logger = logging.getLogger(__name__)

MAX_ROUNDS = 3
WINDOW_S = 0.5
"""How long a round waits for further receivers after the first one."""
CALL_S = 3.0
"""How long rank 0 waits for those who asked to say that they are still there."""
SPAN_BYTES = 64 << 20
"""Most bytes of one broadcast, unless a piece is larger."""
SLOWEST_ROUND = 1e8  # bytes per second, on top of which the deadline stands
_END = "end"
_FOREVER = timedelta(days=20)  # the longest that fits what the store takes


@dataclass(frozen=True, kw_only=True)
class CollectiveOptions:
    """How the learner ranks send.

    Attributes:
        interface: Network interface whose IPv4 address engines know rank 0 by; ``lo`` reaches this host only.
        num_receivers: A round begins as soon as so many ask.
        timeout_s: Of a round; a second per 100 MB comes on top.
        keep: Newest versions that each rank holds in memory for those who ask, unless it is told that fewer will do.
    """

    interface: str
    num_receivers: int
    timeout_s: float
    keep: int


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
    """

    number: int
    version: int
    store: str
    num_receivers: int
    shares: tuple[int, ...]
    is_delta: bool
    timeout_s: float
    oldest: int


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
        self._store = _connect(address, _FOREVER)
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
        return replace(offer, manifest=f"{COLLECTIVE_SCHEME}{self.address}")

    def retire(self, oldest: int) -> None:
        """On rank 0: nobody will ask for a version before ``oldest``. The other ranks hear of it in the next round."""
        self._oldest = oldest
        for held in (self._parts, self._offers):
            _forget_before(held, oldest)

    def close(self) -> None:
        """Take part in no further round; one that is running is abandoned."""
        self._is_closed = True
        if self._control is not None:
            self._control.queue_push("requests", json.dumps({"end": _END}))
        self._thread.join(WINDOW_S)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - nobody waits for this thread; the receivers' deadlines tell
            if not self._is_closed:
                logger.error("rank %d takes part in no further round of weights: %s", self._rank, _line(error))

    # Rank 0

    def _lead(self) -> None:
        """Make a round for those who ask, for the newest of their versions, and for frozen weights."""
        number = 0
        while not self._is_closed:
            present = self._present(self._next_requests())
            if not present:
                continue
            newest = max(request["version"] for request in present)
            for version in sorted({request["version"] for request in present}):
                asked = [request for request in present if request["version"] == version]
                offered = self._offers.get(version) if version in (newest, FROZEN) else None
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
        first = self._pop("requests")
        return self._gather("requests", [first], self._options.num_receivers, WINDOW_S) if "id" in first else []

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
        timer = threading.Timer(wait_s, self._control.queue_push, (queue, json.dumps(end)))
        timer.daemon = True
        timer.start()
        while len(messages) < count and (message := self._pop(queue)) != end:
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
            timeout_s=self._options.timeout_s + offered.offer.num_bytes / SLOWEST_ROUND,
            oldest=self._oldest,
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
                self._send(Round(**{**fields, "shares": tuple(fields["shares"])}))
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
            data, spans = part.data, map(_range_of, spans_of(part.pieces))
            if this.is_delta:
                assert part.delta is not None, "rank 0 offers deltas that all ranks hold"
                data, spans = part.delta, spans_of_file(part.delta.nbytes)
            with _groups(this, [self._rank], index=0, deadline=deadline) as groups:
                under_way: deque[Any] = deque()
                for span in spans:
                    under_way.append(_broadcast(groups[0], data, span, deadline))
                    if len(under_way) > 1:
                        under_way.popleft().wait(deadline.left)
                while under_way:
                    under_way.popleft().wait(deadline.left)
        except Exception as error:  # noqa: BLE001 - a member that is gone, in whatever way gloo says it
            logger.warning("round %d of policy version %d failed: %s", this.number, this.version, _line(error))
        else:
            logger.debug("round %d: sent in %.3f s", this.number, time.monotonic() - began_s)

    def _pop(self, queue: str) -> dict[str, Any]:
        """The next message of a queue."""
        return json.loads(self._store.queue_pop(queue))


async def receive_weights(offer: WeightOffer, folder: Path, *, timeout_s: float, holds: str = "") -> WeightOffer:
    """Receive what is offered into ``folder``, made for it, on this host; generation goes on meanwhile.

    Args:
        offer: For which `WeightOffer.is_collective` holds.
        folder: Gets ``manifest.json`` and the data file; in shared memory, where there is room.
        timeout_s: As in `CollectiveOptions`.
        holds: Digest of the manifest of the version that this host holds. If the one that is offered is a delta to it,
            the delta alone is sent.

    Returns:
        The same version, in ``folder``: a delta, which is still to be applied and verified, or one that is whole.

    Raises:
        WeightsGone: the ranks hold newer versions only.
        WeightsError: no round of `MAX_ROUNDS` brought the version whole, or there is no room.
        DeadlineError: rank 0 did not answer in time.
    """
    errors: list[str] = []
    for _ in range(MAX_ROUNDS):
        target = folder / f"r{uuid.uuid4().hex[:8]}"
        target.mkdir(parents=True)
        try:
            receiver = WeightReceiver(offer, target, timeout_s=timeout_s, holds=holds)
            return await _received(receiver, offer, timeout_s)
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


async def _received(receiver: WeightReceiver, offer: WeightOffer, timeout_s: float) -> WeightOffer:
    limit_s = _longest_wait_s(timeout_s, offer.num_bytes)
    try:
        async with asyncio.timeout(limit_s):
            return await asyncio.wrap_future(_on_own_thread(receiver.receive))
    except TimeoutError:
        raise DeadlineError(
            f"policy version {offer.version} was not received from {offer.manifest} within {limit_s:.1f} s: twice "
            f"rollout_fleet.load_timeout_s = {timeout_s:g} s and a second per 100 MB"
        ) from None


def _longest_wait_s(timeout_s: float, num_bytes: int) -> float:
    """Of a receiver: for the round that runs when it asks, and for its own."""
    return 2 * (timeout_s + num_bytes / SLOWEST_ROUND + WINDOW_S + CALL_S)


class WeightReceiver:
    """One attempt to receive a version."""

    def __init__(self, offer: WeightOffer, folder: Path, *, timeout_s: float, holds: str = "") -> None:
        self._offer, self._folder, self._timeout_s, self._holds = offer, folder, timeout_s, holds

    def receive(self) -> WeightOffer:
        """Ask, take part in a round, compare. Blocks; raises as `receive_weights` does."""
        try:
            this, index = self._admission()
            return self._transfer(this, index, RoundDeadline(this.timeout_s))
        except WeightsGone:
            raise
        except (RuntimeError, WeightsError) as error:
            failure = _line(error)
        # Not from the error, whose frames would keep the connections open.
        raise WeightsError(failure)

    def _transfer(self, this: Round, index: int, deadline: RoundDeadline) -> WeightOffer:
        path = self._folder / "manifest.json"
        path.write_bytes(_connect(this.store, deadline.left).get("manifest"))
        offer = replace(self._offer, manifest=str(path))
        manifest = read_manifest(offer)
        if this.is_delta:
            self._receive_delta(this, manifest, index, deadline)
            return offer
        if offer.kind == "delta":  # the whole version that it results in
            offer = replace(offer, kind="full", base_version=None)
        data = self._make_file(manifest)
        senders = range(len(this.shares))
        with _groups(this, senders, index=1 + index, deadline=deadline) as groups:
            parts, first = [], 0
            for share in this.shares:
                parts.append(spans_of(manifest.pieces[first : first + share]))
                first += share
            arrived: list[list[Piece]] = []
            for row in zip_longest(*parts):
                spans = [(group, span) for group, span in zip(groups, row, strict=True) if span]
                works = [_broadcast(group, data, _range_of(span), deadline) for group, span in spans]
                self._check(manifest, data, arrived)  # of the row before, while this one is on its way
                for work in works:
                    work.wait(deadline.left)
                arrived = [span for _, span in spans]
            self._check(manifest, data, arrived)
        return offer

    def _receive_delta(self, this: Round, manifest: Manifest, index: int, deadline: RoundDeadline) -> None:
        """Receive the delta file of each rank; what is in them is verified when they are applied."""
        assert manifest.delta is not None, "a round of a delta"
        ends: dict[int, int] = {}
        for change in manifest.delta.changes:
            ends[change.file] = max(change.at + change.num_bytes, ends.get(change.file, 0))
        files = [self._map_file(name, ends.get(file, 0)) for file, name in enumerate(manifest.delta.files)]
        with _groups(this, range(len(files)), index=1 + index, deadline=deadline) as groups:
            for row in zip_longest(*(spans_of_file(file.nbytes) for file in files)):
                works = [
                    _broadcast(group, file, span, deadline)
                    for group, file, span in zip(groups, files, row, strict=True)
                    if span
                ]
                for work in works:
                    work.wait(deadline.left)

    def _admission(self) -> tuple[Round, int]:
        """Ask rank 0, and answer its call; returns the round and this receiver's place in it."""
        deadline = RoundDeadline(_longest_wait_s(self._timeout_s, self._offer.num_bytes))
        place = self._offer.manifest.removeprefix(COLLECTIVE_SCHEME)
        store, own_id = _connect(place, deadline.left), uuid.uuid4().hex
        store.queue_push("requests", json.dumps({"id": own_id, "version": self._offer.version, "holds": self._holds}))
        call = store.get(f"call/{own_id}").decode()
        store.queue_push(call, json.dumps({"id": own_id}))
        answer = json.loads(store.get(f"answer/{own_id}"))
        for kind in ("call", "answer"):
            store.delete_key(f"{kind}/{own_id}")
        if answer.get("gone"):
            raise WeightsGone(f"policy version {self._offer.version} is no longer sent by {self._offer.manifest}")
        if answer.get("late"):
            raise WeightsError(f"rank 0 did not hear of this host within {CALL_S} s")
        index = answer.pop("index")
        return Round(**{**answer, "shares": tuple(answer["shares"])}), index

    def _make_file(self, manifest: Manifest) -> Tensor:
        """The data file, with its header and room for its data: [bytes] uint8."""
        head, _ = safetensors_header([(t.name, t.dtype, t.shape, t.num_bytes) for t in manifest.tensors])
        data = self._map_file(manifest.files[0], len(head) + manifest.num_bytes)
        data[: len(head)].copy_(torch.frombuffer(bytearray(head), dtype=torch.uint8))
        return data

    def _map_file(self, name: str, size: int) -> Tensor:
        """A new file with room for so many bytes: [bytes] uint8."""
        if size == 0:
            (self._folder / name).touch()
            return torch.empty(0, dtype=torch.uint8)
        with (self._folder / name).open("w+b") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                raise WeightsError(
                    f"no room for {size} bytes of weights in {self._folder}: {error}; free some there"
                ) from error
            mapping = mmap.mmap(file.fileno(), size)
        return torch.frombuffer(mapping, dtype=torch.uint8)

    def _check(self, manifest: Manifest, data: Tensor, spans: Sequence[Sequence[Piece]]) -> None:
        view = data.numpy()
        for piece in (piece for span in spans for piece in span):
            if digest_of(view[piece.start : piece.start + piece.num_bytes]) != piece.digest:
                names = [t.name for t in manifest.tensors if t.start <= piece.start < t.start + t.num_bytes]
                raise WeightsError(f"policy version {self._offer.version}: other bytes of {names[0]} arrived")


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


def _range_of(span: Sequence[Piece]) -> tuple[int, int]:
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


@contextmanager
def _groups(this: Round, senders: Sequence[int], *, index: int, deadline: RoundDeadline) -> Iterator[list[Any]]:
    """The groups of learner ranks with the receivers, in which this process is ``index``.

    They end with the block; a connection that ends early ends the others' waits at once.
    """
    groups: list[Any] = []
    try:
        store = _connect(this.store, deadline.left)
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=_own_address(this.store))]
        options._threads = 1
        for sender in senders:
            options._timeout = deadline.left
            groups.append(ProcessGroupGloo(PrefixStore(f"{sender}", store), index, 1 + this.num_receivers, options))
        yield groups
    finally:
        groups.clear()


def _broadcast(group: Any, data: Tensor, span: tuple[int, int], deadline: RoundDeadline) -> Any:
    """Begin to send a range of bytes, on the rank of the group that holds it, or to receive it."""
    options = BroadcastOptions()
    options.rootRank, options.rootTensor, options.timeout = 0, 0, deadline.left
    return group.broadcast([data[slice(*span)]], options)


def _serve(host: str) -> TCPStore:
    """A store that listens on this address alone."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _connect(address: str, timeout: timedelta) -> TCPStore:
    host, _, port = address.rpartition(":")
    return TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)


def _own_address(peer: str) -> str:
    """This host's address on the way to ``peer``, host and port."""
    host, _, port = peer.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))  # sends nothing
        return probe.getsockname()[0]


def _on_own_thread(work: Callable[[], T]) -> Future[T]:
    """Run on a thread that nobody has to wait for, not even the end of the process."""
    future: Future[T] = Future()

    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(work())
        except Exception as error:  # noqa: BLE001 - raised by whoever awaits it
            future.set_exception(error)

    threading.Thread(target=run, name="receive-weights", daemon=True).start()
    return future


def _keep_newest(held: dict[int, Any], count: int) -> None:
    for version in sorted(held.keys() - {FROZEN})[:-count]:
        held.pop(version, None)


def _forget_before(held: dict[int, Any], oldest: int) -> None:
    for version in sorted(held):
        if FROZEN < version < oldest:
            held.pop(version, None)


def _line(error: Exception) -> str:
    """What an error says, without torch's own stack."""
    text = str(error).partition("\n")[0][:300]
    return text if isinstance(error, WeightsError) else f"{type(error).__name__}: {text}"
