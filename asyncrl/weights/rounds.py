"""Rounds in which the learner ranks send a version over the network: what one is, and who is in it.

    receivers ──ask──▶ rank 0              A round: one version, those who asked, one deadline.
    receivers ◀──call, present──▶ rank 0   Who does not answer the call is not in it.
    rank 0 ──round──▶ receivers, ranks     Each of them leaves there where it can be reached (`Meeting`).
    ranks ──done──▶ rank 0                 Then comes the next round.

All of it goes over rank 0's control channel (`weight_channel.py`); the weights themselves go from each rank to the
receivers, in groups that `collective.py` makes. `RoundCoordinator` is rank 0's side. It runs on an event loop that
training does not wait for, and is woken by messages and its own deadlines.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from asyncrl.core.types import FROZEN, WeightOffer
from asyncrl.weights.carriers import HOST_WINDOW_S, Backend, PublishOptions
from asyncrl.weights.channel import ChannelMessage, ChannelServer, rank_id

logger = logging.getLogger(__name__)

T = TypeVar("T")
MAX_ROUNDS = 3
CALL_S = 3.0
"""How long rank 0 waits for those who asked to say that they are still there."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """One version for those who asked for it.

    Attributes:
        number: Counts from 1.
        version: Policy version.
        num_receivers: Each group has one member more: rank 0 in it is a learner rank.
        shares: Number of the manifest's pieces that each learner rank sends, in the manifest's order.
        is_delta: Each rank sends its delta file instead, to those who hold the version before.
        timeout_s: Of the round, the bytes included.
        oldest: Older versions need not be held any more.
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
        """From what JSON made of one."""
        return cls(**{**fields, "shares": tuple(fields["shares"])})


@dataclass(frozen=True, kw_only=True)
class HeldOffer:
    """A version on rank 0, with its manifest's text, `Round.shares`, and the digest of what its deltas apply to."""

    offer: WeightOffer
    manifest: bytes
    shares: tuple[int, ...]
    base: str


@dataclass(frozen=True, kw_only=True)
class RoundRequest:
    """What a receiver asks for: a version; ``holds`` is the digest of the one that it holds, or empty."""

    receiver: bytes
    version: int
    holds: str


@dataclass(kw_only=True)
class Meeting:
    """What the members of a round leave for one another.

    Attributes:
        ends_s: When it is over, by the loop's clock.
        values: Whatever they left, by key. Keys of one group begin with its name and a slash.
        pending: Members that wait: who, for which key, and how many keys there must be in its group.
    """

    ends_s: float
    values: dict[str, bytes]
    pending: list[tuple[bytes, str, int]] = field(default_factory=list)

    def leave(self, key: str, value: bytes) -> list[tuple[bytes, dict[str, bytes]]]:
        """Leave a value; returns who can be answered now, and with what."""
        self.values[key] = value
        waiting, self.pending = self.pending, []
        answers: list[tuple[bytes, dict[str, bytes]]] = []
        for member, wanted, count in waiting:
            answers += self.ask(member, wanted, count)
        return answers

    def ask(self, member: bytes, key: str, count: int) -> list[tuple[bytes, dict[str, bytes]]]:
        """Wait for a key, and until its group has left ``count`` of them; returns what `leave` does."""
        group = key.partition("/")[0] + "/"
        known = {own: value for own, value in self.values.items() if own == key or own.startswith(group)}
        if key in known and len(known) >= count:
            return [(member, known)]
        self.pending.append((member, key, count))
        return []


class RoundCoordinator:
    """Makes rounds for those who ask, one after the other. Any thread may call `hold` and `retire`."""

    def __init__(self, options: PublishOptions, server: ChannelServer, *, num_ranks: int) -> None:
        self._options, self._server, self._num_ranks = options, server, num_ranks
        self._offers: dict[int, HeldOffer] = {}
        self._oldest = 0
        self._requests: asyncio.Queue[RoundRequest] = asyncio.Queue()
        self._call = ""
        self._present: asyncio.Queue[bytes] = asyncio.Queue()
        self._meetings: dict[int, Meeting] = {}
        self._done: dict[int, int] = {}  # the last round of each rank that has been heard of
        self._rank_done = asyncio.Event()

    def hold(self, held: HeldOffer) -> None:
        """Send a version to those who ask; every rank holds its part of it."""
        self._offers[held.offer.version] = held
        keep_newest(self._offers, self._options.num_held, oldest=self._oldest)

    def retire(self, oldest: int) -> None:
        """Nobody will ask for a version before ``oldest``, which engines are still offered."""
        self._oldest = oldest
        forget_before(self._offers, oldest)

    async def run(self) -> None:
        """Until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._listen())
            tasks.create_task(self._lead())

    # What comes in

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
                if head["failed"]:
                    self._break_up(head["round"])
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

    def _break_up(self, number: int) -> None:
        """End a round in which a rank failed: nobody waits until its deadline for what does not come."""
        meeting = self._meetings.pop(number, None)
        for member, _, _ in meeting.pending if meeting is not None else []:
            self._server.send(member, {"over": number})

    def _hand_out(self, answers: Iterable[tuple[bytes, dict[str, bytes]]]) -> None:
        for member, values in answers:
            self._server.send(member, {"keys": list(values)}, *values.values())

    # Rounds

    async def _lead(self) -> None:
        """Make a round for those who ask, for the newest of their versions, and for frozen weights.

        An engine that stands still for a version cannot take another one, and is sent it as long as it is held.
        """
        await self._until_done(0)
        number = 0
        while True:
            present = await self._those_present(await self._next_requests())
            newest = max((request.version for request in present), default=FROZEN)
            for version in sorted({request.version for request in present}):
                asked = [request for request in present if request.version == version]
                is_sent = self._options.into_engines or version in (newest, FROZEN)
                offered = self._offers.get(version) if is_sent else None
                if offered is None:
                    self._answer(asked, {"gone": True})
                    continue
                holders = [request for request in asked if offered.base and request.holds == offered.base]
                others = [request for request in asked if request not in holders]
                for requests in filter(None, (holders, others)):
                    number += 1
                    await self._run(number, offered, requests, is_delta=requests is holders)

    async def _next_requests(self) -> list[RoundRequest]:
        """Wait for a request, and a moment for others."""
        first = await self._requests.get()
        return [first, *await _gathered(self._requests, self._options.num_receivers - 1, self._options.window_s)]

    async def _those_present(self, requests: Sequence[RoundRequest]) -> list[RoundRequest]:
        """Those of the receivers who answer a call; one that was stopped or killed since it asked holds nobody up."""
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
        """Tell everyone of a round, and wait until all ranks are done with it."""
        this = Round(
            number=number,
            version=offered.offer.version,
            num_receivers=len(requests),
            shares=offered.shares,
            is_delta=is_delta,
            timeout_s=self._options.round_timeout_s(offered.offer.num_bytes),
            oldest=self._oldest,
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
        """Until every rank has said that it is done with a round; with 0, that it is there."""
        while len(self._done) < self._num_ranks or min(self._done.values()) < number:
            self._rank_done.clear()
            await self._rank_done.wait()


async def _gathered(queue: asyncio.Queue[T], count: int, wait_s: float) -> list[T]:
    """What comes within ``wait_s``, until there are ``count``."""
    found: list[T] = []
    try:
        async with asyncio.timeout(wait_s):
            while len(found) < count:
                found.append(await queue.get())
    except TimeoutError:
        pass
    return found


def keep_newest(held: dict[int, Any], count: int, *, oldest: int) -> None:
    """Forget all but the newest versions, the oldest one that is still offered, and frozen weights."""
    for version in sorted(held.keys() - {FROZEN})[:-count]:
        if version != oldest:
            held.pop(version, None)


def forget_before(held: dict[int, Any], oldest: int) -> None:
    """Forget versions before ``oldest``, but not frozen weights."""
    for version in sorted(held):
        if FROZEN < version < oldest:
            held.pop(version, None)
