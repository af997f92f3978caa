"""The client of the buffer, on asyncio.

Requests that the server may hold (lease, enqueue, plan) are asked again for as long as it answers "nothing yet".
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from typing import Any

from asyncrl.core import record
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

from .client_socket import ClientSocket
from .encoding import CHUNK_BYTES, JOIN_BELOW_BYTES, group_frames, group_of, prompt_frames, prompt_of
from .keys import ClientKeys
from .messages import (
    HAND_ON,
    MAX_LEASES,
    MAX_REASON,
    REVOKED,
    SPACE,
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
from .sockets import allow_clients
from .stores import Receipt

logger = logging.getLogger(__name__)

_PROMPTS_AT_ONCE = 128
_GROUPS_AT_ONCE = 16
_FIRST_AND_LAST = 4
_GOODBYE_S = 1.0


class BufferClient:
    """Implements the ports `RolloutBuffer` and `ControlBuffer`.

    It connects at the first call and belongs to the loop of that call.

    Args:
        address: Where the server listens. Example: ``"ipc:///dev/shm/asyncrl-1f/sockets/buffer"``.
        request_timeout_s: Deadline of each request; the server answers held ones within half of its own.
        window: Puts on their way at once; further ones wait for an acknowledgement.
        keys: CURVE keys, where the server has them.
        epoch: The run that this client belongs to; empty takes the one that the server names first.
        name: Of a rollout worker's engine, by which the controller knows it.
        host: Where this client is, as `add_store` names it: what it puts goes to the store there, where that has room.
        incarnation: Of a learner rank: which life of the learner it belongs to.
    """

    def __init__(
        self,
        address: str,
        *,
        request_timeout_s: float = 30.0,
        window: int = 32,
        keys: ClientKeys | None = None,
        epoch: str = "",
        name: str = "",
        host: str = "",
        incarnation: int = 0,
    ) -> None:
        self.address = address
        self.count_generated: Callable[[], int] = lambda: 0
        self._name = name
        self._host = host
        self._epoch = epoch
        self._incarnation = self._offered_incarnation = incarnation
        self._timeout_s = request_timeout_s
        self._keys = keys
        self._window = asyncio.Semaphore(window)
        self._link: ClientSocket | None = None
        self._store_links: dict[str, ClientSocket] = {}
        self._puts_elsewhere: bool | None = None  # whether store servers hold the payloads, once it is known
        self._beat_s = 0.0
        self._is_elsewhere: bool | None = None  # whether the server's clock is another one, once it is known
        self._serves: Mapping[str, float | str] = {}
        self._beat: asyncio.TimerHandle | None = None
        self._revocations: deque[tuple[int, int]] = deque()
        self._held: set[tuple[int, int]] = set()
        self._prefixes: dict[tuple[int, int], TrajectoryGroup] = {}
        self._begun_afresh: set[tuple[int, int]] = set()  # leases whose prefix was gone before it was sent
        self._pushed = asyncio.Event()
        self._hand_on: asyncio.Queue[list[tuple[int, int]]] = asyncio.Queue()
        self._space = asyncio.Event()
        self._fetching = asyncio.Lock()
        self._closed = False

    async def connect(self) -> None:
        """Open the connection now; does not wait for the server. Raises `ValueError` if the address is malformed."""
        self._connect()

    # What a rollout worker does

    async def enter(self) -> str:
        """See `RolloutBuffer.enter`."""
        return (await self._entered("enter")).identity.hex()

    async def lease(self, engine_version: int, max_groups: int) -> list[Lease]:
        """See `RolloutBuffer.lease`. Cancelling it gives back whatever is granted meanwhile.

        A worker whose engine advances while it waits cancels the call and asks again at the new version.
        """
        link = await self._entered("lease")
        request_id = link.next_id()
        fields = {"engine_version": engine_version, "max_groups": max_groups, "incarnation": self._incarnation}
        try:
            reply = await link.request("lease", fields, request_id=request_id)
        except asyncio.CancelledError:
            link.post("cancel", {"request": request_id})
            raise
        if self._closed:  # meanwhile, and what came goes back
            raise self._closed_error()
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
        """See `RolloutBuffer.take_progress`."""
        return self._prefixes.pop((lease.prompt.group_id, lease.attempt), None)

    async def save_progress(self, lease: Lease, group: TrajectoryGroup) -> None:
        """See `RolloutBuffer.save_progress`."""
        key, summary = (lease.prompt.group_id, lease.attempt), group.summary
        fields = {"group_id": key[0], "attempt": key[1], "continued": self._has_continued(key)}
        fields |= {"num_tokens": summary.num_tokens, "oldest_version": summary.oldest_version}
        fields["newest_version"] = summary.newest_version
        fields["longest_response"] = max(summary.response_lengths, default=0)
        await self._connect().request("save", fields, group_frames(group))
        self._prefixes.pop(key, None)
        self._begun_afresh.discard(key)

    def _has_continued(self, key: tuple[int, int]) -> bool:
        """Whether a lease goes on from the prefix that it was granted with, if there was one."""
        return key not in self._prefixes and key not in self._begun_afresh

    async def renew(self, leases: Sequence[Lease]) -> None:
        """See `RolloutBuffer.renew`."""
        for start in range(0, len(leases), MAX_LEASES):
            some = leases[start : start + MAX_LEASES]
            groups = [lease.prompt.group_id for lease in some]
            await self._connect().request("renew", {"groups": groups, "attempts": [lease.attempt for lease in some]})

    async def put(self, group: TrajectoryGroup, *, num_left_out: int = 0) -> None:
        """See `RolloutBuffer.put`. While the store is full it waits for a batch to leave, and sends again."""
        async with self._window:
            payload: Sequence[Any] = group_frames(group)
            key, fields = (group.group_id, group.attempt), summary_fields(group.summary)
            fields |= {"num_left_out": num_left_out} if num_left_out else {}
            if self._puts_elsewhere is None:
                self._puts_elsewhere = bool((await self._hello({}, "put")).fields["is_elsewhere"])
            if not self._puts_elsewhere:
                await self._report("put", key, fields, payload)
                return
            receipt = [Receipt.of(payload).to_frame()]
            while True:
                await self._put_elsewhere(key, payload)
                try:
                    await self._report("put", key, fields, receipt)
                    return
                except StoreLost as error:
                    logger.warning("%s", error)

    async def _put_elsewhere(self, key: tuple[int, int], payload: Sequence[Any]) -> None:
        """Have a store server take a payload, another one where that does not answer and is gone.

        Where the lease is lost, no store gets it: the ledger says what becomes of the put.
        """
        fields, address, failure = {"group_id": key[0], "attempt": key[1]}, "", None
        asked = fields | self._where
        while (reserved := await self._wait_for_room(self._connect(), asked, payload))["is_held"]:
            if failure is not None and reserved["address"] == address:
                raise failure
            address = reserved["address"]
            try:
                await self._put_reserved(self._link_to_store(address), "put_payload", fields, payload)
                return
            except DeadlineError as error:
                failure = error

    def _link_to_store(self, address: str) -> ClientSocket:
        if address not in self._store_links:
            keys = self._keys.for_stores() if self._keys is not None else None
            allow_clients(0, num_links=len(self._store_links) + 2)
            self._store_links[address] = self._link_to(address, keys=keys)
        return self._store_links[address]

    async def release(self, lease: Lease, *, num_tokens: int, reason: str, max_failures: int = 0) -> bool:
        """See `RolloutBuffer.release`. Also reports the tokens of a revoked lease; counted once."""
        key = lease.prompt.group_id, lease.attempt
        fields = {"group_id": key[0], "attempt": key[1], "num_tokens": num_tokens, "reason": reason}
        reply = await self._report("release", key, fields | {"max_failures": max_failures})
        return flag(reply.fields, "is_dropped", default=False)

    async def _report(
        self, name: str, key: tuple[int, int], fields: dict[str, Any], payload: Sequence[Any] = ()
    ) -> Message:
        """Send what ends an attempt; once it is answered for good, nothing is known of the attempt here."""
        if not self._has_continued(key):
            fields["continued"] = False
        try:
            reply = await self._put_reserved(self._connect(), name, fields, payload)
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
        """See `RolloutBuffer.revocation`."""
        self._connect()
        while not self._revocations:
            if self._closed:
                raise self._closed_error()
            self._pushed.clear()
            await self._pushed.wait()
        return self._revocations.popleft()

    async def hand_on_request(self) -> list[tuple[int, int]]:
        """See `RolloutBuffer.hand_on_request`."""
        self._connect()
        return await self._hand_on.get()

    async def next_offer(self, after: int) -> WeightOffer:
        """See `RolloutBuffer.next_offer`. It waits as long as the server answers."""
        link = await self._entered("next_offer")
        fields = {"at_least": after + 1, "incarnation": self._offered_incarnation}
        while True:
            reply = await link.request("next_offer", fields)
            if "offer" in reply.fields:
                offer = offer_of(reply.fields["offer"])
                self._offered_incarnation = offer.incarnation
                return offer

    async def loaded(self, version: int, took_s: float) -> None:
        """See `RolloutBuffer.loaded`. Each heartbeat repeats it."""
        link = await self._entered("loaded")
        self._incarnation = self._offered_incarnation
        fields = {"seconds": took_s, "engine": self._name, "incarnation": self._incarnation}
        self._serves = fields | {"serves": version}
        await link.request("loaded", fields | {"version": version})

    async def fenced(self) -> None:
        """See `RolloutBuffer.fenced`."""
        self._serves = {}
        await (await self._entered("fenced")).request("fenced", {})

    # What the learner does

    async def offer(self, offer: WeightOffer) -> int:
        """See `WeightLog.offer`."""
        named = {"incarnation": self._incarnation}
        reply = await self._connect().request("offer", {"offer": asdict(offer) | named, **named})
        return integer(reply.fields, "oldest")

    async def publish_failed(self, reason: str) -> None:
        """See `WeightLog.publish_failed`."""
        fields = {"failure": reason[:MAX_REASON], "incarnation": self._incarnation}
        await self._connect().request("offer", fields)

    # What the controller does

    async def enqueue(self, prompts: Sequence[Prompt]) -> None:
        """See `ControlBuffer.enqueue`. While the store is full it waits for groups to leave, and sends again."""
        num_queued = 0
        while num_queued < len(prompts):
            some = prompts[num_queued : num_queued + _PROMPTS_AT_ONCE]
            encoded = _within_a_chunk([prompt_frames(prompt) for prompt in some])
            some = some[: len(encoded)]
            fields = {"groups": [prompt.group_id for prompt in some], "counts": [len(frames) for frames in encoded]}
            payload = [frame for frames in encoded for frame in frames]
            reply = await self._request_with_space(self._connect(), "enqueue", fields, payload)
            num_queued += integer(reply.fields, "queued")

    async def plan(self, version: int) -> Plan:
        """See `ControlBuffer.plan`. It waits as long as the server answers; bound the whole with `asyncio.timeout`."""
        while True:
            reply = await self._connect().request("plan", {"version": version})
            if "groups" in reply.fields:
                return Plan(version=version, groups=tuple(map(summary_of, reply.fields["groups"])))
            if "warning" in reply.fields:
                logger.warning("the next batch is waited for: %s", reply.fields["warning"])

    async def commit(self, version: int) -> BufferStats:
        """See `ControlBuffer.commit`."""
        return stats_of((await self._connect().request("commit", {"version": version})).fields)

    async def served(self, after: int, num_engines: int) -> tuple[int, float]:
        """See `ControlBuffer.served`. It waits as long as the server answers."""
        fields = {"at_least": after + 1, "num_engines": num_engines}
        while "version" not in (reply := await self._connect().request("served", fields)).fields:
            pass
        return integer(reply.fields, "version"), seconds(reply.fields, "seconds")

    async def bury(self, worker: str, num_generated: int = 0) -> int:
        """See `ControlBuffer.bury`."""
        fields = {"worker": worker, "generated": num_generated}
        return integer((await self._connect().request("bury", fields)).fields, "generated")

    async def store_wanted(self, known: Collection[str]) -> str:
        """Wait until a rollout worker enters from a host that is not ``known``; the host.

        It waits as long as the server answers. Raises as `add_store`.
        """
        fields = {"known": sorted(known)}
        while "host" not in (reply := await self._connect().request("store_wanted", fields)).fields:
            pass
        return str(reply.fields["host"])

    async def add_store(self, address: str, host: str) -> int:
        """A store server has joined, for the workers of ``host`` first; returns its number. The same again is no other.

        Raises `ReplayBufferError` unless ``buffer.stores_on`` is ``hosts``.
        """
        return integer((await self._connect().request("add_store", {"address": address, "host": host})).fields, "store")

    async def drop_store(self, store: int) -> int:
        """A store server is gone for good; returns how many groups were on it, which are generated again."""
        return integer((await self._connect().request("drop_store", {"store": store})).fields, "groups")

    async def pin(self, version: int, num_engines: int, known: Collection[str] = ()) -> set[str]:
        """See `ControlBuffer.pin`. It waits as long as the server answers, and tells a restarted one again."""
        fields = {"version": version, "num_engines": num_engines, "known": sorted(known)}
        while "engines" not in (reply := await self._connect().request("pin", fields)).fields:
            pass
        return set(reply.fields["engines"])

    async def unpin(self) -> None:
        """See `ControlBuffer.unpin`."""
        await self._connect().request("unpin", {})

    async def lose(self, group_ids: Sequence[int]) -> None:
        """See `ControlBuffer.lose`."""
        await self._connect().request("lose", {"groups": list(group_ids)})

    async def rewind(
        self,
        version: int,
        *,
        incarnation: int,
        finished: Sequence[tuple[int, int]],
        tokens_trained: int,
        lag_histogram: Mapping[int, int],
    ) -> None:
        """See `ControlBuffer.rewind`."""
        fields = {
            "version": version,
            "incarnation": incarnation,
            "finished": [bound for part in finished for bound in part],
            "tokens_trained": tokens_trained,
            "lag_histogram": [number for part in sorted(lag_histogram.items()) for number in part],
        }
        await self._connect().request("rewind", fields)

    async def stats(self) -> BufferStats:
        """See `ControlBuffer.stats`."""
        return stats_of((await self._connect().request("stats", {})).fields)

    async def fetch(self, group_ids: Sequence[int]) -> list[TrajectoryGroup]:
        """Stored groups in the order asked for; arrays are read-only views of the received bytes.

        One fetch runs at a time, because the server bounds what one client has not read yet. It asks for a few groups
        per request, so that those that have come are decoded while the others are on their way; for fewer at both ends,
        where either has to wait for the other.
        """
        async with self._fetching:
            if record.current() is not None and self._is_elsewhere is not False:
                await self._hello({}, "fetch")
            some = (group_ids[start:stop] for start, stop in pairwise(_cuts(len(group_ids))))
            parts = await asyncio.gather(*map(self._fetch, some), return_exceptions=True)
            groups: list[TrajectoryGroup] = []
            for part in parts:  # where one fails, none is left on its way to the next fetch
                if isinstance(part, BaseException):
                    raise part
                groups += part
            return groups

    async def _fetch(self, group_ids: Sequence[int]) -> list[TrajectoryGroup]:
        reply = await self._fetch_from(self._connect(), {"groups": list(group_ids)})
        if "stores" not in reply.fields:
            return _checked(map(group_of, _payloads_in(reply)), group_ids)
        places, addresses = integers(reply.fields, "places"), reply.fields["stores"]
        asked = _split_by_store(group_ids, integers(reply.fields, "attempts"), places)
        calls = (self._fetch_from(self._link_to_store(addresses[place]), fields) for place, fields in asked.items())
        replies = zip(asked, await asyncio.gather(*calls), strict=True)
        streams = {place: _payloads_in(reply) for place, reply in replies}
        payloads = [next(streams[place], []) for place in places]
        for group_id, place, payload, digest in zip(group_ids, places, payloads, reply.fields["digests"], strict=True):
            if Receipt.of(payload).digest != digest:
                raise WireError(f"the store at {addresses[place]} sent other bytes for group {group_id} than were put")
        return _checked(map(group_of, payloads), group_ids)

    async def _fetch_from(self, link: ClientSocket, fields: dict[str, Any]) -> Message:
        """A server that counts a reply as unread which nobody waited for is told, and asked again."""
        told = link.num_read
        try:
            return await link.request("fetch", {**fields, "read": told})
        except StoreFull:
            if link.num_read == told:
                raise
        return await link.request("fetch", {**fields, "read": link.num_read})

    async def inspect(self) -> dict[str, Any]:
        """Every unfinished group and every producer, for people; see `buffer.inspect`."""
        return dict((await self._connect().request("inspect", {})).fields)

    async def finished(self) -> list[tuple[int, int]]:
        """See `ControlBuffer.finished`."""
        return [(start, end) for start, end in (await self.inspect())["finished"]]

    async def close(self) -> None:
        """Close the connection; calls that wait raise `ReplayBufferError` at once.

        What was granted and did not get to a caller goes back. A lease that `lease` returned stays until it runs out,
        or until the server has not heard of this client for four of ``buffer.heartbeat_s``: release it first.
        """
        if self._closed:
            return
        self._closed = True
        self._pushed.set()
        self._space.set()
        if self._beat is not None:
            self._beat.cancel()
        if self._link is not None:
            self._link.fail_all(self._closed_error())
            if self._beat_s and self._link.is_connected:
                await self._say_goodbye(self._link)
        for link in (self._link, *self._store_links.values()):
            if link is not None:
                link.close()

    async def _say_goodbye(self, link: ClientSocket) -> None:
        with suppress(AsyncRLError, TimeoutError):
            async with asyncio.timeout(min(_GOODBYE_S, self._timeout_s)):
                groups, attempts = zip(*self._held, strict=True) if self._held else ((), ())
                await link.request("leave", {"groups": groups, "attempts": attempts})

    # The connection

    def _connect(self) -> ClientSocket:
        if self._closed:
            raise self._closed_error()
        if self._link is None:
            self._link = self._link_to(self.address, keys=self._keys, on_connected=self._say_beat)
        elif self._link.loop is not asyncio.get_running_loop():
            raise ReplayBufferError(
                f"the client of the buffer at {self.address} lives on another event loop, that of its first call; make "
                "one for each loop"
            )
        return self._link

    def _link_to(
        self, address: str, *, keys: ClientKeys | None, on_connected: Callable[[], None] = lambda: None
    ) -> ClientSocket:
        return ClientSocket(
            address,
            timeout_s=self._timeout_s,
            keys=keys,
            on_push=self._on_push,
            on_connected=on_connected,
            epoch=self._epoch,
        )

    def _closed_error(self) -> ReplayBufferError:
        return ReplayBufferError(f"the client of the buffer at {self.address} is closed")

    async def _entered(self, caller: str) -> ClientSocket:
        """The connection of a producer, which beats from the first call on."""
        link = self._connect()
        if not self._beat_s:
            fields = {"produces": True} | self._where
            self._beat_s = float((await self._hello(fields, caller)).fields["heartbeat_s"])
            if self._beat is None:
                self._send_beat()
        return link

    @property
    def _where(self) -> dict[str, str]:
        return {"host": self._host} if self._host else {}

    async def _hello(self, fields: Mapping[str, Any], caller: str) -> Message:
        sent_ns = time.monotonic_ns()
        reply = await self._connect().request("hello", fields, caller=caller)
        self._note_clock(sent_ns, reply)
        return reply

    def _note_clock(self, sent_ns: int, reply: Message) -> None:
        """Record how this host's clock stands against the server's, where it is another one."""
        clock = reply.fields["clock"]
        self._is_elsewhere = clock != record.clock_id()
        if self._is_elsewhere:
            now_ns = time.monotonic_ns()
            offset_ns = reply.fields["now_ns"] - (sent_ns + now_ns) // 2
            record.clock(clock, offset_ns=offset_ns, error_ns=(now_ns - sent_ns) // 2)

    def _say_beat(self) -> None:
        """Also at once to a server that was started again: it knows neither this producer nor its engine's version."""
        if self._beat_s and self._link is not None:
            fields = {**self._serves, **self._where, "generated": self.count_generated()}
            self._link.post("beat", fields, partial(self._note_clock, time.monotonic_ns()))

    def _send_beat(self) -> None:
        self._say_beat()
        self._beat = asyncio.get_running_loop().call_later(self._beat_s, self._send_beat)

    async def _request_with_space(
        self, link: ClientSocket, name: str, fields: dict[str, Any], payload: Sequence[Any]
    ) -> Message:
        """A request that is sent again when something has left, or after half a deadline, for as long as it must."""
        while True:
            space = self._space  # a push that comes while the request is on its way counts too
            try:
                return await link.request(name, fields, payload)
            except StoreFull:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._timeout_s / 2):
                        await space.wait()

    async def _put_reserved(
        self, link: ClientSocket, name: str, fields: dict[str, Any], payload: Sequence[Any]
    ) -> Message:
        """Reserve the bytes of a large payload before it is sent, and those of a small one that was refused.

        Where the lease is lost, the request goes without its payload.
        """
        is_reserved = sum(map(len, payload)) < JOIN_BELOW_BYTES
        while True:
            if not is_reserved and not (await self._wait_for_room(link, fields, payload))["is_held"]:
                payload = ()
            try:
                return await link.request(name, fields, payload)
            except StoreFull:
                is_reserved = False

    async def _wait_for_room(
        self, link: ClientSocket, fields: Mapping[str, Any], payload: Sequence[Any]
    ) -> Mapping[str, Any]:
        """Ask a server to set bytes aside, until it has."""
        names = ("group_id", "attempt", "host")
        asked = {name: fields[name] for name in names if name in fields} | {"num_bytes": sum(map(len, payload))}
        while not (reply := await link.request("reserve", asked, caller="put")).fields.get("granted"):
            pass
        return reply.fields

    def _on_push(self, message: Message) -> None:
        if message.name == REVOKED:
            self._revocations.append((integer(message.fields, "group_id"), integer(message.fields, "attempt")))
            self._pushed.set()
        elif message.name == HAND_ON:
            groups, attempts = integers(message.fields, "groups"), integers(message.fields, "attempts")
            self._hand_on.put_nowait(list(zip(groups, attempts, strict=True)))
        elif message.name == SPACE:
            self._space.set()
            self._space = asyncio.Event()


def _within_a_chunk(encoded: Sequence[Sequence[Any]]) -> list[Sequence[Any]]:
    """As many of the prompts as make a chunk together; at least one."""
    size, chosen = 0, []
    for frames in encoded:
        size += sum(map(len, frames))
        if chosen and size > CHUNK_BYTES:
            break
        chosen.append(frames)
    return chosen


def _cuts(num_groups: int) -> list[int]:
    """Where a fetch is cut into requests. Example: 40 groups are asked for as 4, 12, 16, 4 and 4."""
    cuts = {0, num_groups}
    if num_groups > 2 * _FIRST_AND_LAST:
        last = num_groups - _FIRST_AND_LAST
        cuts |= {_FIRST_AND_LAST, *range(_GROUPS_AT_ONCE, last, _GROUPS_AT_ONCE), last}
    return sorted(cuts)


def _split_by_store(
    group_ids: Sequence[int], attempts: Sequence[int], places: Sequence[int]
) -> dict[int, dict[str, list[int]]]:
    """The fields of the fetch that each store server that holds any of the groups is asked for."""
    asked: dict[int, dict[str, list[int]]] = {}
    for group_id, attempt, place in zip(group_ids, attempts, places, strict=True):
        fields = asked.setdefault(place, {"groups": [], "attempts": []})
        fields["groups"].append(group_id)
        fields["attempts"].append(attempt)
    return asked


def _payloads_in(reply: Message) -> Iterator[Sequence[Any]]:
    """The frames of each group in the reply to a fetch."""
    frames = iter(reply.payload)
    counts = integers(reply.fields, "counts")
    if sum(counts) != len(reply.payload):
        raise WireError(f"a fetch says that it has {sum(counts)} frames, and has {len(reply.payload)}")
    return ([next(frames) for _ in range(number)] for number in counts)


def _checked(groups: Iterable[TrajectoryGroup], group_ids: Sequence[int]) -> list[TrajectoryGroup]:
    """Refuse groups that are not those asked for."""
    came = list(groups)
    if (got := [group.group_id for group in came]) != list(group_ids):
        raise WireError(f"fetched groups {got[:5]}… instead of {list(group_ids)[:5]}…")
    return came
