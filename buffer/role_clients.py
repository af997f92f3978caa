"""The calls of the buffer's clients by role: a rollout worker, the learner, the controller.

The server may hold a request that it cannot grant yet, and answers "nothing yet" after a while. Except for `lease`,
the calls here repeat such a request.
"""

import asyncio
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from asyncrl.core.errors import (
    AsyncRLError,
    DeadlineError,
    LeaseExpired,
    ReplayBufferError,
    StoreFull,
    StoreLost,
    UnknownGroup,
    VersionTooOld,
    WireError,
)
from asyncrl.core.trajectory import TrajectoryGroup
from asyncrl.core.types import BufferStats, Lease, Plan, Prompt, WeightOffer

from .client import BufferClient
from .client_socket import ClientSocket
from .encoding import CHUNK_BYTES, group_frames, group_of, prompt_frames, prompt_of
from .keys import BufferRole, client_keys
from .messages import (
    HAND_ON,
    MAX_LEASES,
    MAX_REASON,
    REVOKED,
    Message,
    flag,
    integer,
    integers,
    offer_of,
    seconds,
    stats_of,
    summary_fields,
    summary_of,
)
from .stores import Receipt

logger = logging.getLogger(__name__)

_PROMPTS_AT_ONCE = 128
_GROUPS_AT_ONCE = 16
_FIRST_AND_LAST = 4
_GOODBYE_S = 1.0
_Result = TypeVar("_Result")


class WorkerClient:
    """Implements the port `RolloutBuffer`, which documents the calls.

    Args:
        client: The connection.
        name: Name of the worker's engine for the controller.
        window: Puts that may be under way at once; further puts wait for an acknowledgement.
    """

    def __init__(self, client: BufferClient, *, name: str = "", window: int = 32) -> None:
        self.count_generated: Callable[[], int] = lambda: 0
        self._client = client
        self._name = name
        self._window = asyncio.Semaphore(window)
        self._offered_incarnation = client.incarnation
        self._puts_elsewhere: bool | None = None  # whether store servers hold the payloads; None until it is known
        self._beat_s = 0.0
        self._beat: asyncio.TimerHandle | None = None
        self._serves: Mapping[str, float | str] = {}
        self._held: set[tuple[int, int]] = set()
        self._prefixes: dict[tuple[int, int], TrajectoryGroup] = {}
        self._begun_afresh: set[tuple[int, int]] = set()  # leases whose prefix was gone before it was sent
        self._revocations: deque[tuple[int, int]] = deque()
        self._pushed = asyncio.Event()
        self._hand_on: asyncio.Queue[list[tuple[int, int]]] = asyncio.Queue()
        client.on_connected = self._say_beat
        client.on_push |= {REVOKED: self._note_revoked, HAND_ON: self._note_hand_on}

    async def enter(self) -> str:
        """Connect and start the heartbeats; return this worker's name for `ControlClient.bury`."""
        return (await self._entered("enter")).identity.hex()

    async def lease(self, engine_version: int, max_groups: int) -> list[Lease]:
        """Wait for leases. Cancelling the call returns a lease that is granted meanwhile.

        A worker whose engine advances while it waits cancels the call and asks again at the new version.
        """
        link = await self._entered("lease")
        request_id = link.next_id()
        incarnation = self._client.incarnation
        fields = {"engine_version": engine_version, "max_groups": max_groups, "incarnation": incarnation}
        try:
            reply = await link.request("lease", fields, request_id=request_id)
        except asyncio.CancelledError:
            link.post("cancel", {"request": request_id})
            raise
        if self._client.is_closed:  # during the call: `close` returns what came
            raise self._client.closed_error()
        frames = iter(reply.payload)
        leases = []
        for group_id, attempt, version, deadline, num_prompt_frames, num_prefix_frames in reply.fields["leases"]:
            prompt = prompt_of([next(frames) for _ in range(num_prompt_frames)])
            leases.append(Lease(prompt=prompt, attempt=attempt, engine_version=version, deadline_version=deadline))
            self._held.add((group_id, attempt))
            if num_prefix_frames < 0:
                self._begun_afresh.add((group_id, attempt))
            elif num_prefix_frames:
                self._prefixes[group_id, attempt] = group_of([next(frames) for _ in range(num_prefix_frames)])
        return leases

    def take_progress(self, lease: Lease) -> TrajectoryGroup | None:
        """Return the saved prefix of this lease's group, if there is one."""
        return self._prefixes.pop((lease.prompt.group_id, lease.attempt), None)

    async def save_progress(self, lease: Lease, group: TrajectoryGroup) -> None:
        """Save a running group with its lease."""
        key, summary = (lease.prompt.group_id, lease.attempt), group.summary
        fields = {"group_id": key[0], "attempt": key[1], "continued": self._has_continued(key)}
        fields |= {name: getattr(summary, name) for name in ("num_tokens", "oldest_version", "newest_version")}
        fields["longest_response"] = max(summary.response_lengths, default=0)
        await self._client.request("save", fields, group_frames(group))
        self._prefixes.pop(key, None)
        self._begun_afresh.discard(key)

    def _has_continued(self, key: tuple[int, int]) -> bool:
        """Whether the worker took the prefix that its lease was granted with, if there was one."""
        return key not in self._prefixes and key not in self._begun_afresh

    async def renew(self, leases: Sequence[Lease]) -> None:
        """Extend the leases that are still valid."""
        for start in range(0, len(leases), MAX_LEASES):
            some = leases[start : start + MAX_LEASES]
            groups = [lease.prompt.group_id for lease in some]
            await self._client.request("renew", {"groups": groups, "attempts": [lease.attempt for lease in some]})

    async def put(self, group: TrajectoryGroup, *, num_left_out: int = 0) -> None:
        """Store a finished group. While the store is full, the client waits until a batch leaves, and sends again."""
        async with self._window:
            payload: Sequence[Any] = group_frames(group)
            key, fields = (group.group_id, group.attempt), summary_fields(group.summary)
            fields |= {"num_left_out": num_left_out} if num_left_out else {}
            if self._puts_elsewhere is None:
                self._puts_elsewhere = bool((await self._client.hello({}, "put"))["is_elsewhere"])
            if not self._puts_elsewhere:
                await self._report("put", key, fields, payload)
                return
            receipt = [Receipt.of(payload).to_frame()]
            while True:
                await self._put_in_store(key, payload)
                try:
                    await self._report("put", key, fields, receipt)
                    return
                except StoreLost as error:
                    logger.warning("%s", error)

    async def _put_in_store(self, key: tuple[int, int], payload: Sequence[Any]) -> None:
        """Send a payload to the store server that the ledger names, and to another one if that does not answer.

        If the lease is lost, no store gets the payload: the ledger says what becomes of the put.
        """
        fields, address, failure = {"group_id": key[0], "attempt": key[1]}, "", None
        client, asked = self._client, fields | self._where
        while (reserved := await client.reserve(client.link, asked, payload))["is_held"]:
            if failure is not None and reserved["address"] == address:
                raise failure
            address = reserved["address"]
            try:
                await client.request_with_payload(client.store_link(address), "put_payload", fields, payload)
                return
            except DeadlineError as error:
                failure = error

    async def release(self, lease: Lease, *, num_tokens: int, reason: str, max_failures: int = 0) -> bool:
        """Return a lease without a result, or report the tokens of a revoked lease; the buffer counts them once."""
        key = lease.prompt.group_id, lease.attempt
        fields = {"group_id": key[0], "attempt": key[1], "num_tokens": num_tokens, "reason": reason}
        reply = await self._report("release", key, fields | {"max_failures": max_failures})
        return flag(reply.fields, "is_dropped", default=False)

    async def _report(
        self, name: str, key: tuple[int, int], fields: dict[str, Any], payload: Sequence[Any] = ()
    ) -> Message:
        """Send the request that ends an attempt, and forget the attempt once the answer is final."""
        if not self._has_continued(key):
            fields["continued"] = False
        try:
            reply = await self._client.request_with_payload(self._client.link, name, fields, payload)
        except (LeaseExpired, VersionTooOld, UnknownGroup):
            self._forget(key)
            raise
        self._forget(key)
        return reply

    def _forget(self, key: tuple[int, int]) -> None:
        self._held.discard(key)
        self._prefixes.pop(key, None)
        self._begun_afresh.discard(key)

    async def revocation(self) -> tuple[int, int]:
        """Wait for the next (group_id, attempt) to abort."""
        await self._client.connect()
        while not self._revocations:
            if self._client.is_closed:
                raise self._client.closed_error()
            self._pushed.clear()
            await self._pushed.wait()
        return self._revocations.popleft()

    def _note_revoked(self, message: Message) -> None:
        self._revocations.append((integer(message.fields, "group_id"), integer(message.fields, "attempt")))
        self._pushed.set()

    async def hand_on_request(self) -> list[tuple[int, int]]:
        """Wait for groups that a faster worker would finish sooner."""
        await self._client.connect()
        return await self._hand_on.get()

    def _note_hand_on(self, message: Message) -> None:
        groups, attempts = integers(message.fields, "groups"), integers(message.fields, "attempts")
        self._hand_on.put_nowait(list(zip(groups, attempts, strict=True)))

    async def next_offer(self, after: int) -> WeightOffer:
        """Wait for weights newer than ``after``, without a deadline while the server answers."""
        await self._entered("next_offer")
        fields = {"at_least": after + 1, "incarnation": self._offered_incarnation}
        offer = offer_of((await self._client.request_until("next_offer", fields, "offer"))["offer"])
        self._offered_incarnation = offer.incarnation
        return offer

    async def loaded(self, version: int, took_s: float) -> None:
        """Report the version that the engine serves. Each heartbeat repeats the report."""
        await self._entered("loaded")
        self._client.incarnation = self._offered_incarnation
        fields = {"seconds": took_s, "engine": self._name, "incarnation": self._offered_incarnation}
        self._serves = fields | {"serves": version}
        await self._client.request("loaded", fields | {"version": version})

    async def fenced(self) -> None:
        """Report that the engine serves no version."""
        self._serves = {}
        await (await self._entered("fenced")).request("fenced", {})

    async def close(self) -> None:
        """Close the connection; pending calls raise `ReplayBufferError`.

        Leases that were granted but that `lease` did not return go back to the queue. A lease that `lease` returned
        stays until it expires, or until the server has not heard from this client for four heartbeats: release it
        before.
        """
        self._pushed.set()
        if self._beat is not None:
            self._beat.cancel()
        await self._client.close(self._say_goodbye if self._beat_s else None)

    async def _say_goodbye(self, link: ClientSocket) -> None:
        with suppress(AsyncRLError, TimeoutError):
            async with asyncio.timeout(min(_GOODBYE_S, self._client.timeout_s)):
                groups, attempts = zip(*self._held, strict=True) if self._held else ((), ())
                await link.request("leave", {"groups": groups, "attempts": attempts})

    async def _entered(self, caller: str) -> ClientSocket:
        """The connection; the first call starts the heartbeats."""
        link = self._client.link
        if not self._beat_s:
            fields = {"produces": True} | self._where
            self._beat_s = float((await self._client.hello(fields, caller))["heartbeat_s"])
            if self._beat is None:
                self._send_beat()
        return link

    @property
    def _where(self) -> dict[str, Any]:
        return {"host": self._client.host} if self._client.host else {}

    def _say_beat(self) -> None:
        """Send a heartbeat. A restarted server gets one at once: it knows neither this worker nor its version."""
        if self._beat_s and not self._client.is_closed:
            fields = {**self._serves, **self._where, "generated": self.count_generated()}
            self._client.link.post("beat", fields, partial(self._client.note_clock, time.monotonic_ns()))

    def _send_beat(self) -> None:
        self._say_beat()
        self._beat = asyncio.get_running_loop().call_later(self._beat_s, self._send_beat)


class LearnerClient:
    """The calls of a learner rank; `SyncBufferClient` makes them block."""

    def __init__(self, client: BufferClient) -> None:
        self._client = client
        self._fetching = asyncio.Lock()

    async def offer(self, offer: WeightOffer) -> int:
        """Offer weights to the engines; return the oldest version that the buffer may still offer."""
        named = {"incarnation": self._client.incarnation}
        return integer(await self._client.request("offer", {"offer": asdict(offer) | named, **named}), "oldest")

    async def publish_failed(self, reason: str) -> None:
        """Report a failed publish."""
        fields = {"failure": reason[:MAX_REASON], "incarnation": self._client.incarnation}
        await self._client.request("offer", fields)

    async def fetch(self, group_ids: Sequence[int]) -> list[TrajectoryGroup]:
        """Stored groups in the order of ``group_ids``; arrays are read-only views of the received bytes.

        One fetch runs at a time, because the server bounds the bytes that one client has not read yet. A fetch is cut
        into requests, so that groups that have come are decoded while others are under way. The first and the last
        request are small: the learner waits for the first, and the server waits after the last.
        """
        async with self._fetching:
            await self._client.hello_for_clock("fetch")
            some = (group_ids[start:stop] for start, stop in pairwise(_cuts(len(group_ids))))
            parts = await asyncio.gather(*map(self._fetch, some), return_exceptions=True)
            groups: list[TrajectoryGroup] = []
            for part in parts:  # all requests have ended, also if one failed
                if isinstance(part, BaseException):
                    raise part
                groups += part
            return groups

    async def _fetch(self, group_ids: Sequence[int]) -> list[TrajectoryGroup]:
        reply = await _fetch_from(self._client.link, {"groups": list(group_ids)})
        if "stores" not in reply.fields:
            return _checked(map(group_of, _payloads_in(reply)), group_ids)
        places, addresses = integers(reply.fields, "places"), reply.fields["stores"]
        asked: dict[int, dict[str, list[int]]] = {}
        for group_id, attempt, place in zip(group_ids, integers(reply.fields, "attempts"), places, strict=True):
            fields = asked.setdefault(place, {"groups": [], "attempts": []})
            fields["groups"].append(group_id)
            fields["attempts"].append(attempt)
        calls = (_fetch_from(self._client.store_link(addresses[place]), fields) for place, fields in asked.items())
        replies = zip(asked, await asyncio.gather(*calls), strict=True)
        streams = {place: _payloads_in(reply) for place, reply in replies}
        payloads = [next(streams[place], []) for place in places]
        for group_id, place, payload, digest in zip(group_ids, places, payloads, reply.fields["digests"], strict=True):
            if Receipt.of(payload).digest != digest:
                raise WireError(f"the store at {addresses[place]} sent other bytes for group {group_id} than were put")
        return _checked(map(group_of, payloads), group_ids)

    async def stats(self) -> BufferStats:
        """Return the ledger's current counts."""
        return stats_of(await self._client.request("stats", {}))

    async def close(self) -> None:
        """Close the connection."""
        await self._client.close()


async def _fetch_from(link: ClientSocket, fields: dict[str, Any]) -> Message:
    """Fetch from one server, and report which replies were read.

    The server refuses a fetch while it counts earlier replies as unread. If one of them was read meanwhile, ask again.
    """
    told = link.num_read
    try:
        return await link.request("fetch", {**fields, "read": told})
    except StoreFull:
        if link.num_read == told:
            raise
    return await link.request("fetch", {**fields, "read": link.num_read})


def _cuts(num_groups: int) -> list[int]:
    """Bounds of the requests of one fetch. Example: 40 groups are fetched as 4, 12, 16, 4 and 4."""
    cuts = {0, num_groups}
    if num_groups > 2 * _FIRST_AND_LAST:
        last = num_groups - _FIRST_AND_LAST
        cuts |= {_FIRST_AND_LAST, *range(_GROUPS_AT_ONCE, last, _GROUPS_AT_ONCE), last}
    return sorted(cuts)


def _payloads_in(reply: Message) -> Iterator[Sequence[Any]]:
    """The frames of each group in the reply to a fetch."""
    frames = iter(reply.payload)
    counts = integers(reply.fields, "counts")
    if sum(counts) != len(reply.payload):
        raise WireError(f"a reply to a fetch must have {sum(counts)} frames, got {len(reply.payload)}")
    return ([next(frames) for _ in range(number)] for number in counts)


def _checked(groups: Iterable[TrajectoryGroup], group_ids: Sequence[int]) -> list[TrajectoryGroup]:
    came = list(groups)
    if (got := [group.group_id for group in came]) != list(group_ids):
        raise WireError(f"fetched groups {got[:5]}… instead of {list(group_ids)[:5]}…")
    return came


class SyncBufferClient:
    """Implements the port `LearnerBuffer`: a `LearnerClient` on a thread of its own, which any thread may call.

    Raises `ValueError` if the address of ``client`` is malformed.
    """

    def __init__(self, client: BufferClient) -> None:
        self._address = client.address
        self._learner = LearnerClient(client)
        self._process = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"buffer {client.address}", daemon=True)
        self._thread.start()
        try:
            self._call("connect", client.connect)
        except BaseException:
            self.close()
            raise

    def fetch(self, group_ids: Sequence[int]) -> list[TrajectoryGroup]:
        """See `LearnerClient.fetch`."""
        return self._call("fetch", partial(self._learner.fetch, group_ids))

    def offer(self, offer: WeightOffer) -> int:
        """See `LearnerClient.offer`."""
        return self._call("offer", partial(self._learner.offer, offer))

    def publish_failed(self, reason: str) -> None:
        """See `LearnerClient.publish_failed`."""
        self._call("publish_failed", partial(self._learner.publish_failed, reason))

    def stats(self) -> BufferStats:
        """See `LearnerClient.stats`."""
        return self._call("stats", self._learner.stats)

    def close(self) -> None:
        """Close the connection and end the thread."""
        if os.getpid() != self._process or self._loop.is_closed():
            return
        self._call("close", self._learner.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, name: str, call: Callable[[], Coroutine[Any, Any, _Result]]) -> _Result:
        if os.getpid() != self._process:
            raise ReplayBufferError(
                f"buffer.{name}: the client of the buffer at {self._address} was made in process {self._process}, and "
                f"this is {os.getpid()}; make one in each process"
            )
        if self._loop.is_closed():
            raise ReplayBufferError(f"the client of the buffer at {self._address} is closed")
        return asyncio.run_coroutine_threadsafe(call(), self._loop).result()


class ControlClient:
    """Implements the port `ControlBuffer`, which documents the calls.

    Calls that wait have no deadline while the server answers; bound them with `asyncio.timeout`.
    """

    def __init__(self, client: BufferClient) -> None:
        self._client = client

    async def enqueue(self, prompts: Sequence[Prompt]) -> None:
        """Queue prompts. While the store is full, the client waits until groups leave, and sends again."""
        num_queued = 0
        while num_queued < len(prompts):
            some = prompts[num_queued : num_queued + _PROMPTS_AT_ONCE]
            encoded = _within_a_chunk([prompt_frames(prompt) for prompt in some])
            some = some[: len(encoded)]
            fields = {"groups": [prompt.group_id for prompt in some], "counts": [len(frames) for frames in encoded]}
            payload = [frame for frames in encoded for frame in frames]
            num_queued += integer(await self._client.request_with_space("enqueue", fields, payload), "queued")

    async def plan(self, version: int) -> Plan:
        """Wait for the batch that the learner consumes at ``version``."""
        while True:
            reply = await self._client.request("plan", {"version": version})
            if "groups" in reply:
                return Plan(version=version, groups=tuple(map(summary_of, reply["groups"])))
            if "warning" in reply:
                logger.warning("waiting for the next batch: %s", reply["warning"])

    async def commit(self, version: int) -> BufferStats:
        """Mark the plan of ``version`` as consumed."""
        return stats_of(await self._client.request("commit", {"version": version}))

    async def served(self, after: int, num_engines: int) -> tuple[int, float]:
        """Wait until ``num_engines`` engines serve versions newer than ``after``."""
        fields = {"at_least": after + 1, "num_engines": num_engines}
        reply = await self._client.request_until("served", fields, "version")
        return integer(reply, "version"), seconds(reply, "seconds")

    async def bury(self, worker: str, num_generated: int = 0) -> int:
        """Declare a rollout worker dead."""
        fields = {"worker": worker, "generated": num_generated}
        return integer(await self._client.request("bury", fields), "generated")

    async def store_wanted(self, known: Collection[str]) -> str:
        """Wait until a rollout worker enters from a host that is not in ``known``; return the host.

        Raises `ReplayBufferError` unless ``buffer.stores_on`` is ``hosts``.
        """
        return str((await self._client.request_until("store_wanted", {"known": sorted(known)}, "host"))["host"])

    async def add_store(self, address: str, host: str) -> int:
        """Add a store server, preferred by the workers of ``host``; return its number. Idempotent.

        Raises `ReplayBufferError` unless ``buffer.stores_on`` is ``hosts``.
        """
        return integer(await self._client.request("add_store", {"address": address, "host": host}), "store")

    async def drop_store(self, store: int) -> int:
        """Report that a store server is gone for good; return the number of its groups, which are generated again."""
        return integer(await self._client.request("drop_store", {"store": store}), "groups")

    async def pin(self, version: int, num_engines: int, known: Collection[str] = ()) -> set[str]:
        """Keep up to ``num_engines`` engines on ``version``. Repeats the request to a restarted server."""
        fields = {"version": version, "num_engines": num_engines, "known": sorted(known)}
        return set((await self._client.request_until("pin", fields, "engines"))["engines"])

    async def unpin(self) -> None:
        """Offer all engines the newest version again."""
        await self._client.request("unpin", {})

    async def lose(self, group_ids: Sequence[int]) -> None:
        """Report groups of planned batches that are missing in the stores."""
        await self._client.request("lose", {"groups": list(group_ids)})

    async def rewind(
        self,
        version: int,
        *,
        incarnation: int,
        finished: Sequence[tuple[int, int]],
        tokens_trained: int,
        lag_histogram: Mapping[int, int],
    ) -> None:
        """Set the learner back to the ``version`` of a checkpoint."""
        fields = {
            "version": version,
            "incarnation": incarnation,
            "finished": [bound for part in finished for bound in part],
            "tokens_trained": tokens_trained,
            "lag_histogram": [number for part in sorted(lag_histogram.items()) for number in part],
        }
        await self._client.request("rewind", fields)

    async def stats(self) -> BufferStats:
        """Return the ledger's current counts."""
        return stats_of(await self._client.request("stats", {}))

    async def inspect(self) -> dict[str, Any]:
        """Return every unfinished group and every producer, for people; see `buffer.inspect`."""
        return dict(await self._client.request("inspect", {}))

    async def finished(self) -> list[tuple[int, int]]:
        """Return the ids of consumed and dropped groups, as sorted ranges [start, end)."""
        return [(start, end) for start, end in (await self.inspect())["finished"]]

    async def close(self) -> None:
        """Close the connection."""
        await self._client.close()


def _within_a_chunk(encoded: Sequence[Sequence[Any]]) -> list[Sequence[Any]]:
    """As many of the first prompts as fit into one chunk; at least one."""
    size, chosen = 0, []
    for frames in encoded:
        size += sum(map(len, frames))
        if chosen and size > CHUNK_BYTES:
            break
        chosen.append(frames)
    return chosen


@dataclass(frozen=True, kw_only=True)
class BufferConnection:
    """How to reach a buffer: opens clients, each in the process that uses it. It contains no secret.

    Attributes:
        keys: Directory with the key of ``role``; empty if the server has no keys. `client` reads the key.
        role: Role of the clients.
    """

    address: str
    request_timeout_s: float = 30.0
    keys: str = ""
    role: BufferRole = BufferRole.controller
    epoch: str = ""
    incarnation: int = 0

    def for_role(self, role: BufferRole) -> "BufferConnection":
        """The same connection for another role."""
        return replace(self, role=role)

    def client(self, *, host: str = "") -> BufferClient:
        """Make a client. Raises `ValueError` if the keys are missing, or readable by others."""
        return BufferClient(
            self.address,
            request_timeout_s=self.request_timeout_s,
            keys=client_keys(Path(self.keys), self.role) if self.keys else None,
            epoch=self.epoch,
            host=host,
            incarnation=self.incarnation,
        )

    def sync_client(self) -> SyncBufferClient:
        """Make the client of a learner rank. Raises as `client`."""
        return SyncBufferClient(self.client())
