"""Weights over the network, the receivers' side: the hosts of the engines, or the engines' own ranks.

A host receives a version into its memory while its engines generate, and ends with a data file and a manifest, which
they map. With `CollectiveOptions.into_engines` each rank of an engine receives bucket by bucket, on its own device,
while it stands still: no host holds a copy, and the engine loads each tensor as soon as it is whole. Every piece is
compared with its digest as it arrives. What a round is, and who waits for whom, stands in `collective.py`.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import queue
import shutil
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asyncrl.core.errors import DeadlineError, WeightsError, WeightsGone
from asyncrl.core.host import make_private_folder, open_private
from asyncrl.core.remote import on_own_thread
from asyncrl.core.types import Carrier, WeightOffer
from asyncrl.weights import rounds as weight_rounds
from asyncrl.weights.assembly import TensorAssembly
from asyncrl.weights.carriers import HOST_WINDOW_S, load_limit_s
from asyncrl.weights.channel import ChannelAddress, ChannelRefused, WeightChannel
from asyncrl.weights.collective import (
    RoundDeadline,
    RoundGroup,
    RoundStore,
    one_line,
    range_of,
    round_groups,
    spans_of,
    spans_of_file,
)
from asyncrl.weights.manifest import Manifest, Piece, digest_of, read_manifest, safetensors_header
from asyncrl.weights.rounds import MAX_ROUNDS, Round

logger = logging.getLogger(__name__)

NUM_AHEAD = 2
"""Tensors that wait, whole, for an engine's rank to load them."""


async def receive_weights(offer: WeightOffer, folder: Path, *, timeout_s: float, holds: str = "") -> WeightOffer:
    """Receive what is offered into ``folder``, made for it, on this host; generation goes on meanwhile.

    Args:
        offer: Carried by `Carrier.host_stream`.
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
        target = make_private_folder(folder / f"r{uuid.uuid4().hex[:8]}")
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
            return await asyncio.wrap_future(on_own_thread(receiver.receive))
    except TimeoutError:
        raise DeadlineError(
            f"policy version {offer.version} was not received from {offer.manifest} within {limit_s:.1f} s: twice "
            f"rollout_fleet.load_timeout_s = {timeout_s:g} s and a second per 100 MB"
        ) from None


def _longest_wait_s(timeout_s: float, num_bytes: int) -> float:
    """Of a host: for the round that runs when it asks, and for its own."""
    return 2 * (load_limit_s(timeout_s, num_bytes) + HOST_WINDOW_S + weight_rounds.CALL_S)


class WeightReceiver:
    """One attempt of a host to receive a version."""

    def __init__(self, offer: WeightOffer, folder: Path, *, timeout_s: float, holds: str = "") -> None:
        self._offer, self._folder, self._timeout_s, self._holds = offer, folder, timeout_s, holds

    def receive(self) -> WeightOffer:
        """Ask, take part in a round, compare. Blocks; raises as `receive_weights` does."""
        try:
            limit_s = _longest_wait_s(self._timeout_s, self._offer.num_bytes)
            with WeightChannel(channel_of(self._offer)) as channel:
                this, index = admission(channel, self._offer, RoundDeadline(limit_s), holds=self._holds)
                return self._transfer(RoundStore(channel, this, RoundDeadline(this.timeout_s)), index)
        except WeightsGone:
            raise
        except (RuntimeError, TimeoutError, WeightsError) as error:
            failure = one_line(error)
        # Not from the error, whose frames would keep the connections open.
        raise WeightsError(failure)

    def _transfer(self, store: RoundStore, index: int) -> WeightOffer:
        offer, manifest = fetch_manifest(store, self._offer, self._folder)
        if store.this.is_delta:
            self._receive_delta(store, manifest, index)
            return offer
        if offer.kind == "delta":  # the whole version that it results in
            offer = replace(offer, kind="full", base_version=None)
        data = self._make_file(manifest)
        senders = range(len(store.this.shares))
        with round_groups(store, senders, index=1 + index) as groups:
            arrived: list[list[Piece]] = []
            for row in zip_longest(*parts_of(store.this, manifest)):
                spans = [(group, span) for group, span in zip(groups, row, strict=True) if span]
                waits = [group.broadcast(data[slice(*range_of(span))]) for group, span in spans]
                self._check(manifest, data, arrived)  # of the row before, while this one is on its way
                for wait in waits:
                    wait()
                arrived = [span for _, span in spans]
            self._check(manifest, data, arrived)
        return offer

    def _receive_delta(self, store: RoundStore, manifest: Manifest, index: int) -> None:
        """Receive the delta file of each rank; what is in them is verified when they are applied."""
        assert manifest.delta is not None, "a round of a delta"
        ends: dict[int, int] = {}
        for change in manifest.delta.changes:
            ends[change.file] = max(change.at + change.num_bytes, ends.get(change.file, 0))
        files = [self._map_file(name, ends.get(file, 0)) for file, name in enumerate(manifest.delta.files)]
        with round_groups(store, range(len(files)), index=1 + index) as groups:
            for row in zip_longest(*(spans_of_file(file.nbytes) for file in files)):
                waits = [
                    group.broadcast(file[slice(*span)])
                    for group, file, span in zip(groups, files, row, strict=True)
                    if span
                ]
                for wait in waits:
                    wait()

    def _make_file(self, manifest: Manifest) -> Tensor:
        """The data file, with its header and room for its data: [bytes] uint8."""
        head, _ = safetensors_header([(t.name, t.dtype, t.shape, t.num_bytes) for t in manifest.tensors])
        data = self._map_file(manifest.files[0], len(head) + manifest.num_bytes)
        data[: len(head)].copy_(torch.frombuffer(bytearray(head), dtype=torch.uint8))
        return data

    def _map_file(self, name: str, size: int) -> Tensor:
        """A new file with room for so many bytes: [bytes] uint8."""
        if size == 0:
            os.close(open_private(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
            return torch.empty(0, dtype=torch.uint8)
        with os.fdopen(open_private(self._folder / name, os.O_RDWR | os.O_CREAT | os.O_EXCL), "w+b") as file:
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
                raise WeightsError(f"{self._offer.name}: other bytes of {names[0]} arrived")


class RoundFailed(WeightsError):
    """A round in which an engine's rank took part came to nothing; another one may be asked for."""


class ArrivingWeights:
    """A version that arrives in this process, a rank of an engine, while it is loaded: one round.

    A thread takes part in the round, and hands whole tensors over; whoever loads them waits for it until the deadline,
    and leaves it behind then. In memory are, at most, the tensor that is loaded and `NUM_AHEAD` others, each with the
    bucket that it came in, those whose parts are still on their way, and a bucket of `collective.SPAN_BYTES` per
    learner rank.

    Attributes:
        manifest: Of the version.
        copier: None: each tensor is verified before it is given out.
    """

    copier = None

    def __init__(self, offer: WeightOffer, device: torch.device, *, timeout_s: float) -> None:
        """Ask for the version, and wait for its manifest.

        Args:
            offer: Carried by `Carrier.engine_stream`.
            device: Where the tensors are to be, if the round moves memory of GPUs; else they are in the host's.
            timeout_s: Of everything.

        Raises:
            RoundFailed: the round came to nothing.
            WeightsGone: the ranks no longer hold the version.
            DeadlineError: nothing came in time.
        """
        self._offer, self._device, self._timeout_s = offer, device, timeout_s
        self._deadline = RoundDeadline(timeout_s)
        self._arrived: queue.Queue[Any] = queue.Queue(NUM_AHEAD)
        self._is_left = threading.Event()
        self._groups: list[RoundGroup] = []
        self._is_whole = False
        on_own_thread(self._receive)
        self.manifest: Manifest = self._next()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and tensor of each, verified, as they become whole; raises as the constructor does."""
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
            arrived = self._arrived.get(timeout=self._deadline.left.total_seconds())
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
        except Exception as error:  # noqa: BLE001 - raised by whoever waits for the tensors
            failure = RoundFailed(one_line(error))
        self._hand_over(failure)

    def _take_part(self) -> None:
        with WeightChannel(channel_of(self._offer)) as channel:
            this, index = admission(channel, self._offer, self._deadline)
            deadline = RoundDeadline(min(this.timeout_s, self._deadline.left.total_seconds()))
            self._receive_round(RoundStore(channel, this, deadline), index)

    def _receive_round(self, store: RoundStore, index: int) -> None:
        this = store.this
        with tempfile.TemporaryDirectory(prefix="asyncrl-manifest-") as folder:
            _, manifest = fetch_manifest(store, self._offer, Path(folder))
        self._hand_over(manifest)
        device = self._device if this.backend == "nccl" else torch.device("cpu")
        assembly = TensorAssembly(manifest, name=self._offer.name, device=device)
        senders = range(len(this.shares))
        with round_groups(store, senders, index=1 + index) as self._groups:
            parts = zip(self._groups, parts_of(this, manifest), strict=True)
            streams = [_RankStream(group, spans, device) for group, spans in parts]
            while under_way := [stream for stream in streams if stream.span]:
                # What stands first in the file: so no tensor waits for its other parts for longer than it must.
                first = min(under_way, key=lambda stream: stream.span[0].start)
                for arrived in assembly.add(*first.take()):
                    self._hand_over(arrived)
        for arrived in assembly.finish():
            self._hand_over(arrived)

    def _hand_over(self, arrived: Any) -> None:
        if self._is_left.is_set():
            raise WeightsError("the load has ended")
        self._arrived.put(arrived, timeout=self._deadline.left.total_seconds())


class _RankStream:
    """What one learner rank sends to an engine's rank, one bucket after the other.

    Attributes:
        span: The pieces that are under way; empty at the end.
    """

    def __init__(self, group: RoundGroup, spans: Iterator[list[Piece]], device: torch.device) -> None:
        self._group, self._spans, self._device = group, spans, device
        self.span: list[Piece] = []
        self._begin()

    def take(self) -> tuple[list[Piece], Tensor]:
        """Wait for what is under way, and begin with the next; returns the pieces and their bytes, [bytes] uint8."""
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


def channel_of(offer: WeightOffer) -> ChannelAddress:
    """Where learner rank 0 is asked for what it offers."""
    return ChannelAddress(endpoint=offer.manifest, access=offer.access)


def admission(
    channel: WeightChannel, offer: WeightOffer, deadline: RoundDeadline, *, holds: str = ""
) -> tuple[Round, int]:
    """Ask rank 0 for a version, and answer its call; returns the round and this receiver's place in it.

    Raises:
        WeightsGone: the ranks no longer hold the version, or there is no rank 0 any more.
        WeightsError: rank 0 did not hear of this receiver, or the connection to it ended.
        DeadlineError: rank 0 said nothing.
    """
    channel.send({"kind": "ask", "version": offer.version, "holds": holds})
    try:
        while "answer" not in (head := channel.receive(deadline.left.total_seconds()).head):
            channel.send({"kind": "present", "call": head["call"]})
    except ChannelRefused as error:
        raise WeightsGone(f"{offer.name} is no longer sent: {error}") from None
    except TimeoutError as error:
        raise DeadlineError(f"{offer.name} was not received: {error}") from None
    answer = head["answer"]
    if answer.get("gone"):
        raise WeightsGone(f"{offer.name} is no longer sent by {offer.manifest}")
    if answer.get("late"):
        raise WeightsError(f"rank 0 did not hear of this receiver within {weight_rounds.CALL_S} s")
    return Round.read(answer), head["index"]


def fetch_manifest(store: RoundStore, offer: WeightOffer, folder: Path) -> tuple[WeightOffer, Manifest]:
    """Fetch the manifest of a round into ``folder``; returns the offer of it there, and what it says."""
    path = folder / "manifest.json"
    path.write_bytes(store.get("manifest"))
    local = replace(offer, manifest=str(path), carrier=Carrier.folder)
    return local, read_manifest(local)


def parts_of(this: Round, manifest: Manifest) -> list[Iterator[list[Piece]]]:
    """What each learner rank broadcasts in a round, in its order."""
    parts, first = [], 0
    for share in this.shares:
        parts.append(spans_of(manifest.pieces[first : first + share]))
        first += share
    return parts
