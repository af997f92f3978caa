"""The clients of the buffer, one per role: rollout worker, learner and controller.

While the server answers `NothingYet`, every call except `lease` repeats its request.
"""

import asyncio
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import msgspec

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
from asyncrl.core.types import BufferStats, GroupSummary, Lease, Plan, Prompt, WeightOffer

from . import commands, operations
from .client import BufferClient, ClientSocket
from .encoding import CHUNK_BYTES, Message, group_frames, group_of, prompt_frames, prompt_of
from .frames import size_of
from .keys import client_keys
from .records import MAX_LEASES, MAX_REASON, BufferRole, Command, Key, Reply
from .stores import digest_of

logger = logging.getLogger(__name__)

_PROMPTS_AT_ONCE = 128
_GROUPS_AT_ONCE = 16
_FIRST_AND_LAST = 4
_GOODBYE_S = 1.0
_Result = TypeVar("_Result")


class WorkerClient:
    """The client of a rollout worker. The interface `RolloutBuffer` documents the calls.

    Args:
        client: The connection to the buffer.
        name: Name of the worker's engine, which the controller sees.
        window: Largest number of unacknowledged puts (finished groups). Further puts wait for an acknowledgement.
    """

    def __init__(self, client: BufferClient, *, name: str = "", window: int = 32) -> None:
        self.count_generated: Callable[[], int] = lambda: 0
        self._client = client
        self._name = name
        self._window = asyncio.Semaphore(window)
        self._offered_incarnation = client.incarnation
        # ``_puts_elsewhere`` is True if store servers hold the trajectories, and None before the first `Welcome`.
        self._puts_elsewhere: bool | None = None
        self._beat_s = 0.0
        self._beat: asyncio.TimerHandle | None = None
        self._serves: operations.Loaded | None = None
        self._held: set[tuple[int, int]] = set()
        self._prefixes: dict[tuple[int, int], TrajectoryGroup] = {}
        # ``_begun_afresh`` holds the leases whose saved prefix was evicted or lost.
        self._begun_afresh: set[tuple[int, int]] = set()
        self._revocations: deque[tuple[int, int]] = deque()
        self._pushed = asyncio.Event()
        self._hand_on: asyncio.Queue[list[Key]] = asyncio.Queue()
        client.on_connected = self._say_beat
        client.on_push |= {
            operations.Revoked: self._note_revoked,
            operations.HandOn: lambda push: self._hand_on.put_nowait(list(push.groups)),
        }

    async def enter(self) -> str:
        """Connect and start the heartbeats. Return this worker's name for `ControlClient.bury`."""
        return (await self._entered("enter")).identity.hex()

    async def lease(self, engine_version: int, max_groups: int) -> list[Lease]:
        """Wait for leases. A lease is the right to generate the group of one prompt.

        ``engine_version`` is the policy version that the worker's engine serves. Returns at most ``max_groups`` leases,
        or no lease if the server's time limit ends first. If the call is cancelled, the groups that the buffer leased
        to this call go back to the queue.
        """
        link = await self._entered("lease")
        request_id = link.next_id()
        asked = commands.LeaseGroups(
            engine_version=engine_version, max_groups=max_groups, incarnation=self._client.incarnation
        )
        try:
            answer = await link.request(asked, request_id=request_id, caller="lease")
        except asyncio.CancelledError:
            link.post(operations.Cancel(request_id))
            raise
        if self._client.is_closed:  # `close` was called during the request, and gives the leases back to the buffer
            raise self._client.closed_error()
        frames = iter(answer.payload)
        leases = []
        for lease in answer.body.leases if isinstance(answer.body, commands.Leased) else ():
            prompt = prompt_of([next(frames) for _ in range(lease.num_prompt_frames)])
            versions = {"engine_version": lease.engine_version, "deadline_version": lease.deadline}
            leases.append(Lease(prompt=prompt, attempt=lease.attempt, **versions))
            self._held.add(lease.key)
            if lease.num_prefix_frames < 0:
                self._begun_afresh.add(lease.key)
            elif lease.num_prefix_frames:
                self._prefixes[lease.key] = group_of([next(frames) for _ in range(lease.num_prefix_frames)])
        return leases

    def take_progress(self, lease: Lease) -> TrajectoryGroup | None:
        """Return the saved prefix of this lease's group: the tokens that an earlier attempt saved.

        Returns None if there is no prefix, or if an earlier call returned the prefix.
        """
        return self._prefixes.pop((lease.prompt.group_id, lease.attempt), None)

    async def save_progress(self, lease: Lease, group: TrajectoryGroup) -> None:
        """Save the tokens so far of a running group. If the lease ends, the next worker can continue these tokens."""
        key, summary = (lease.prompt.group_id, lease.attempt), group.summary
        progress = commands.Progress(
            num_tokens=summary.num_tokens, oldest_version=summary.oldest_version, newest_version=summary.newest_version
        )
        save = commands.SavePrefix(
            group_id=key[0],
            attempt=key[1],
            progress=progress,
            continued=self._has_continued(key),
            longest_response=max(summary.response_lengths, default=0),
        )
        await self._client.link.call(save, group_frames(group))
        self._prefixes.pop(key, None)
        self._begun_afresh.discard(key)

    def _has_continued(self, key: Key) -> bool:
        """Return False if the worker did not take the prefix of its lease, or if the prefix is lost; otherwise True."""
        return key not in self._prefixes and key not in self._begun_afresh

    async def renew(self, leases: Sequence[Lease]) -> None:
        """Extend the leases that are still valid. `revocation` returns the lost leases."""
        keys = [(lease.prompt.group_id, lease.attempt) for lease in leases]
        for start in range(0, len(keys), MAX_LEASES):
            await self._client.link.call(commands.Renew(tuple(keys[start : start + MAX_LEASES])))

    async def put(self, group: TrajectoryGroup, *, num_left_out: int = 0, data_source: str = "") -> None:
        """Store a finished group. If the store is full, wait until the learner consumes a batch, and send again.

        ``num_left_out`` is the number of tokens in trajectories that are not in ``group``, because their reward failed.
        """
        summary = replace(group.summary, data_source=data_source) if data_source else group.summary
        async with self._window:
            payload: Sequence[Any] = group_frames(group)
            key = group.group_id, group.attempt
            put = commands.Put(summary=summary, continued=self._has_continued(key), num_left_out=num_left_out)
            if self._puts_elsewhere is None:
                self._puts_elsewhere = (await self._client.hello(operations.Hello(), "put")).is_elsewhere
            if not self._puts_elsewhere:
                await self._report(put, key, payload)
                return
            put = msgspec.structs.replace(put, num_bytes=size_of(payload), digest=digest_of(payload))
            while True:
                await self._put_in_store(key, payload)
                try:
                    await self._report(put, key)
                    return
                except StoreLost as error:
                    logger.warning("%s", error)

    async def _put_in_store(self, key: Key, payload: Sequence[Any]) -> None:
        """Send a payload to the store server that the ledger chooses.

        If this store server does not answer, send the payload to another store server.
        """
        client, address, failure = self._client, "", None
        while (room := await client.reserve(key, payload)).is_held:
            if failure is not None and room.address == address:
                raise failure
            address = room.address
            try:
                await client.call_with_payload(
                    operations.PutPayload(*key), payload, key, link=client.store_link(address)
                )
                return
            except DeadlineError as error:
                failure = error

    async def release(self, lease: Lease, *, num_tokens: int, reason: str, max_failures: int = 0) -> bool:
        """Give a lease back without storing the group, and report that the attempt generated ``num_tokens`` tokens.

        If the lease was revoked, the call only reports the tokens. Set ``max_failures`` only for an attempt that
        failed. The buffer drops the group after this number of failures. Returns whether the group was dropped.
        """
        key = lease.prompt.group_id, lease.attempt
        release = commands.Release(
            group_id=key[0],
            attempt=key[1],
            num_tokens=num_tokens,
            reason=reason,
            continued=self._has_continued(key),
            max_failures=max_failures,
        )
        return (await self._report(release, key)).is_dropped

    async def _report(self, command: Command[Any, Reply], key: Key, payload: Sequence[Any] = ()) -> Reply:
        try:
            answer = await self._client.call_with_payload(command, payload, key)
        except (LeaseExpired, VersionTooOld, UnknownGroup):
            self._forget(key)
            raise
        self._forget(key)
        return answer

    def _forget(self, key: Key) -> None:
        self._held.discard(key)
        self._prefixes.pop(key, None)
        self._begun_afresh.discard(key)

    async def revocation(self) -> tuple[int, int]:
        """Wait until the buffer revokes a lease. Return the lease's (group id, attempt number) pair."""
        await self._client.connect()
        while not self._revocations:
            if self._client.is_closed:
                raise self._client.closed_error()
            self._pushed.clear()
            await self._pushed.wait()
        return self._revocations.popleft()

    def _note_revoked(self, revoked: operations.Revoked) -> None:
        self._revocations.append((revoked.group_id, revoked.attempt))
        self._pushed.set()

    async def hand_on_request(self) -> list[Key]:
        """Wait until the buffer asks this worker to hand groups over to a faster worker.

        Returns a (group id, attempt number) pair for each of these groups.
        """
        await self._client.connect()
        return await self._hand_on.get()

    async def next_offer(self, after: int) -> WeightOffer:
        """Wait for weights newer than version ``after``. Return the offer, which says where to load the weights.

        The call has no time limit as long as the server answers.
        """
        link = await self._entered("next_offer")
        offer = (await link.call(operations.NextOffer(after + 1, self._offered_incarnation), caller="next_offer")).offer
        self._offered_incarnation = offer.incarnation
        return offer

    async def loaded(self, version: int, took_s: float) -> None:
        """Report that the engine serves ``version``, after a load of ``took_s`` seconds.

        Each heartbeat repeats the report.
        """
        await self._entered("loaded")
        self._client.incarnation = incarnation = self._offered_incarnation
        self._serves = operations.Loaded(version=version, seconds=took_s, engine=self._name, incarnation=incarnation)
        await self._client.link.call(self._serves)

    async def fenced(self) -> None:
        """Report that the engine serves no version until the next `loaded`."""
        self._serves = None
        await (await self._entered("fenced")).call(operations.Fenced())

    async def close(self) -> None:
        """Close the connection. Pending calls raise `ReplayBufferError`.

        Before you call `close`, release the leases that `lease` has returned. An unreleased lease lasts until it
        expires, or until the client has been silent for four heartbeats. If the buffer granted a lease during a pending
        call of `lease`, the buffer puts the group of this lease back into the queue.
        """
        self._pushed.set()
        if self._beat is not None:
            self._beat.cancel()
        await self._client.close(self._say_goodbye if self._beat_s else None)

    async def _say_goodbye(self, link: ClientSocket) -> None:
        with suppress(AsyncRLError, TimeoutError):
            async with asyncio.timeout(min(_GOODBYE_S, self._client.timeout_s)):
                await link.request(operations.Leave(tuple(self._held)))

    async def _entered(self, caller: str) -> ClientSocket:
        """Return the connection. The first call starts the heartbeats."""
        link = self._client.link
        if not self._beat_s:
            hello = operations.Hello(produces=True, host=self._client.host)
            self._beat_s = (await self._client.hello(hello, caller)).heartbeat_s
            if self._beat is None:
                self._send_beat()
        return link

    def _say_beat(self) -> None:
        """Send a heartbeat.

        The client also calls this method after a reconnect, because a restarted server does not know this worker.
        """
        if self._beat_s and not self._client.is_closed:
            beat = operations.Beat(serves=self._serves, host=self._client.host, generated=self.count_generated())
            self._client.link.post(beat, partial(self._client.note_clock, time.monotonic_ns()))

    def _send_beat(self) -> None:
        self._say_beat()
        self._beat = asyncio.get_running_loop().call_later(self._beat_s, self._send_beat)


class LearnerClient:
    """The calls of a learner rank. `SyncBufferClient` has the same calls without asyncio."""

    def __init__(self, client: BufferClient) -> None:
        self._client = client
        self._fetching = asyncio.Lock()

    async def offer(self, offer: WeightOffer) -> int:
        """Offer weights to the engines. Return the oldest version that the buffer may still offer."""
        incarnation = self._client.incarnation
        named = replace(offer, incarnation=incarnation)
        return (await self._client.link.call(operations.Offer(offer=named, incarnation=incarnation))).value

    async def publish_failed(self, reason: str) -> None:
        """Report that the learner could not publish a version, with the reason as text."""
        await self._client.link.call(
            operations.Offer(failure=reason[:MAX_REASON] or "no reason", incarnation=self._client.incarnation)
        )

    async def fetch(self, group_ids: Sequence[int]) -> list[TrajectoryGroup]:
        """Fetch stored groups in the order of ``group_ids``. Arrays are read-only views of the received bytes.

        One fetch runs at a time, because the server bounds a client's unread bytes. The groups are divided among
        several requests, so the client decodes some groups while it receives others. The first and the last requests
        are small, because they overlap with no other work. Example: 40 groups are fetched as 4, 12, 16, 4 and 4.
        """
        if len(set(group_ids)) != len(group_ids):
            raise WireError("a fetch must not name a group twice")
        async with self._fetching:
            await self._client.hello_for_clock("fetch")
            cuts = {0, len(group_ids)}
            if len(group_ids) > 2 * _FIRST_AND_LAST:
                last = len(group_ids) - _FIRST_AND_LAST
                cuts |= {_FIRST_AND_LAST, *range(_GROUPS_AT_ONCE, last, _GROUPS_AT_ONCE), last}
            some = (group_ids[start:stop] for start, stop in pairwise(sorted(cuts)))
            parts = await asyncio.gather(*map(self._fetch, some), return_exceptions=True)
            groups: list[TrajectoryGroup] = []
            for part in parts:  # raise the error of a failed request only now, after all requests have ended
                if isinstance(part, BaseException):
                    raise part
                groups += part
            return groups

    async def _fetch(self, group_ids: Sequence[int]) -> list[TrajectoryGroup]:
        answer = await _fetch_from(self._client.link, operations.Fetch(tuple(group_ids)))
        places = answer.body
        if not isinstance(places, operations.Places):
            return _groups_of(_payloads_in(answer), group_ids)
        asked: dict[int, tuple[list[int], list[int]]] = {}
        for group_id, (place, attempt, _) in zip(group_ids, places.groups, strict=True):
            ids, attempts = asked.setdefault(place, ([], []))
            ids.append(group_id)
            attempts.append(attempt)
        calls = (
            _fetch_from(self._client.store_link(places.addresses[place]), operations.Fetch(tuple(ids), tuple(attempts)))
            for place, (ids, attempts) in asked.items()
        )
        answers = zip(asked, await asyncio.gather(*calls), strict=True)
        streams = {place: _payloads_in(answer) for place, answer in answers}
        payloads = [next(streams[place], []) for place, *_ in places.groups]
        for group_id, payload, (place, _, digest) in zip(group_ids, payloads, places.groups, strict=True):
            if digest_of(payload) != digest:
                raise WireError(
                    f"the bytes of group {group_id} from the store at {places.addresses[place]} do not have the digest "
                    "of the stored group"
                )
        return _groups_of(payloads, group_ids)

    async def stats(self) -> BufferStats:
        """Return the buffer's current counts of groups, tokens and bytes."""
        return (await self._client.link.call(operations.Stats())).stats

    async def close(self) -> None:
        """Close the connection."""
        await self._client.close()


async def _fetch_from(link: ClientSocket, fetch: operations.Fetch) -> Message:
    """Fetch groups from one server.

    The server refuses the request if this client has too many unread bytes. If the client has read another reply since
    it sent the refused request, repeat the request once.
    """
    told = link.num_read
    try:
        return await link.request(msgspec.structs.replace(fetch, read=told), caller="fetch")
    except StoreFull:
        if link.num_read == told:
            raise
    return await link.request(msgspec.structs.replace(fetch, read=link.num_read), caller="fetch")


def _payloads_in(answer: Message) -> Iterator[Sequence[Any]]:
    frames = iter(answer.payload)
    counts = answer.body.counts if isinstance(answer.body, operations.Payloads) else ()
    if sum(counts) != len(answer.payload):
        raise WireError(f"a reply to a fetch must have {sum(counts)} frames, got {len(answer.payload)}")
    return ([next(frames) for _ in range(number)] for number in counts)


def _groups_of(payloads: Iterable[Sequence[Any]], group_ids: Sequence[int]) -> list[TrajectoryGroup]:
    came = [group_of(payload) for payload in payloads]
    if (got := [group.group_id for group in came]) != list(group_ids):
        raise WireError(f"a fetch of groups {list(group_ids)[:5]}… returned groups {got[:5]}…")
    return came


class SyncBufferClient:
    """Implements the interface `LearnerBuffer`: a `LearnerClient` on its own thread. Any thread may call this object.

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
        """Fetch stored groups in the order of ``group_ids``, with `LearnerClient.fetch`."""
        return self._call("fetch", partial(self._learner.fetch, group_ids))

    def offer(self, offer: WeightOffer) -> int:
        """Offer weights to the engines. Return the oldest version that the buffer may still offer."""
        return self._call("offer", partial(self._learner.offer, offer))

    def publish_failed(self, reason: str) -> None:
        """Report that the learner could not publish a version, with the reason as text."""
        self._call("publish_failed", partial(self._learner.publish_failed, reason))

    def stats(self) -> BufferStats:
        """Return the buffer's current counts of groups, tokens and bytes."""
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
                f"buffer.{name}: the client of the buffer at {self._address} belongs to process {self._process}, but "
                f"was called in process {os.getpid()}; make one client per process"
            )
        if self._loop.is_closed():
            raise ReplayBufferError(f"the client of the buffer at {self._address} is closed")
        return asyncio.run_coroutine_threadsafe(call(), self._loop).result()


class ControlClient:
    """The client of the controller. The interface `ControlBuffer` documents the calls.

    A call that waits has no time limit as long as the server answers. Use `asyncio.timeout` to limit the call.
    """

    def __init__(self, client: BufferClient) -> None:
        self._client = client

    async def enqueue(self, prompts: Sequence[Prompt], *, wants_outcomes: bool = False) -> list[GroupSummary]:
        """Queue prompts. While the queue is full, wait until workers lease prompts.

        While the buffer's memory for prompts is full, wait until groups are stored or finished.

        Returns the metadata of the groups that were finished since the last call with ``wants_outcomes``. A call
        without prompts does not wait.
        """
        outcomes: list[GroupSummary] = []

        async def send() -> None:
            enqueue = commands.Enqueue(tuple(group_ids), tuple(counts), wants_outcomes)
            outcomes.extend((await self._client.call_with_space(enqueue, payload)).outcomes)

        group_ids: list[int] = []
        counts: list[int] = []
        payload: list[Any] = []
        for prompt in prompts:
            frames = prompt_frames(prompt)
            if group_ids and (len(group_ids) == _PROMPTS_AT_ONCE or size_of(payload) + size_of(frames) > CHUNK_BYTES):
                await send()
                group_ids, counts, payload = [], [], []
            group_ids.append(prompt.group_id)
            counts.append(len(frames))
            payload += frames
        if group_ids or wants_outcomes:
            await send()
        return outcomes

    async def plan(self, version: int) -> Plan:
        """Wait for the batch that the learner consumes at ``version``, and return the metadata of its groups."""
        return Plan(version=version, groups=(await self._client.link.call(commands.PlanBatch(version))).groups)

    async def commit(self, version: int) -> BufferStats:
        """Mark the batch of ``version`` as consumed. Return the buffer's counts of groups, tokens and bytes."""
        return (await self._client.link.call(commands.Commit(version))).stats

    async def served(self, after: int, num_engines: int) -> tuple[int, float]:
        """Wait until there are ``num_engines`` engines, and all engines serve versions newer than ``after``.

        Returns the oldest version that an engine serves, and the seconds of the slowest load of this version.
        """
        serving = await self._client.link.call(operations.Served(after + 1, num_engines))
        return serving.version, serving.seconds

    async def bury(self, worker: str, num_generated: int = 0) -> int:
        """Declare a rollout worker dead. ``worker`` is the name that `WorkerClient.enter` returned.

        Returns how many tokens the worker generated: the larger of ``num_generated`` and the number in the worker's
        latest heartbeat.
        """
        return (await self._client.link.call(operations.Bury(worker, num_generated))).value

    async def store_wanted(self, known: Collection[str]) -> str:
        """Wait until a rollout worker connects from a host that is not in ``known``. Return the name of the host.

        Raises `ReplayBufferError` if ``buffer.stores_on`` is not ``hosts``.
        """
        return (await self._client.link.call(operations.StoreWanted(tuple(sorted(known))))).names[0]

    async def add_store(self, address: str, host: str) -> int:
        """Add a store server that the workers of ``host`` prefer. Return the store's number.

        A repeated call has no effect. Raises `ReplayBufferError` if ``buffer.stores_on`` is not ``hosts``.
        """
        return (await self._client.link.call(commands.AddStore(address, host))).store

    async def drop_store(self, store: int) -> int:
        """Report that store server number ``store`` is lost.

        Returns how many of the store's groups are generated again. The number excludes groups in planned batches.
        """
        return len((await self._client.link.call(commands.DropStore(store))).group_ids)

    async def pin(self, version: int, num_engines: int, known: Collection[str] = ()) -> set[str]:
        """Keep at most ``num_engines`` engines on (pin them to) ``version``, until `unpin` or the next `pin`.

        Waits until the set of pinned engines that serve this version differs from ``known``, a set of engine names.
        Returns the names of the pinned engines that serve the version after the wait.
        """
        return set((await self._client.link.call(operations.Pin(version, num_engines, tuple(sorted(known))))).names)

    async def unpin(self) -> None:
        """End the effect of `pin`: offer the newest version to all engines."""
        await self._client.link.call(operations.Unpin())

    async def lose(self, group_ids: Sequence[int]) -> None:
        """Report planned groups that the stores lack. These groups are generated again.

        The batches of these groups and all later batches are planned again.
        """
        await self._client.link.call(commands.LoseGroups(group_ids=tuple(group_ids)))

    async def rewind(self, version: int, *, incarnation: int) -> None:
        """Make the buffer go back to the checkpoint of ``version``. A new learner continues from this checkpoint.

        ``incarnation`` counts how often the learner has gone back to a checkpoint, including this time. A repeated call
        has no effect.
        """
        await self._client.link.call(commands.Rewind(version=version, incarnation=incarnation))

    async def resume(self, version: int, *, key: str, tokens_generated: int) -> None:
        """Make the buffer of a resumed run go back to the checkpoint ``key`` of ``version``.

        Afterwards, the steps before ``version`` count as committed. ``tokens_generated`` is the number of policy tokens
        that the run generated up to the checkpoint.
        """
        await self._client.link.call(commands.Resume(version=version, key=key, tokens_generated=tokens_generated))

    async def checkpoint(self, folder: Path, version: int, *, key: str) -> operations.Checkpointed:
        """Write a checkpoint of the buffer to ``folder``, an absolute path. Wait until the folder is complete.

        ``key`` is a random name of the checkpoint. Returns how many groups, saved prefixes and bytes the checkpoint
        has.
        """
        return await self._client.link.call(commands.Checkpoint(folder=str(folder), version=version, key=key))

    async def renew_keys(self) -> None:
        """Make the server and the store servers read the clients' keys again."""
        await self._client.link.call(operations.RenewKeys())
        stores = (await self._client.link.call(operations.Inspect())).values["stores"]
        links = [self._client.store_link(store["address"]) for store in stores if store["address"]]
        await asyncio.gather(*(link.call(operations.RenewKeys()) for link in links))

    async def stats(self) -> BufferStats:
        """Return the buffer's current counts of groups, tokens and bytes."""
        return (await self._client.link.call(operations.Stats())).stats

    async def inspect(self, group_id: int = -1) -> dict[str, Any]:
        """Return a JSON object that describes the buffer: its leased, stored and planned groups, and its workers.

        If ``group_id`` is 0 or more, the object describes only this group.
        """
        return (await self._client.link.call(operations.Inspect(group_id))).values

    async def finished(self) -> list[tuple[int, int]]:
        """Return the ids of consumed and dropped groups, as sorted ranges [start, end)."""
        return [(start, end) for start, end in (await self.inspect())["finished"]]

    async def close(self) -> None:
        """Close the connection."""
        await self._client.close()


@dataclass(frozen=True, kw_only=True)
class BufferConnection:
    """The data that a client needs to connect to a buffer, without secrets. Each process makes its own client.

    Attributes:
        keys: Directory with the key of ``role``; empty if the server has no keys.
        role: Role of the clients that use this connection.
    """

    address: str
    request_timeout_s: float = 30.0
    keys: str = ""
    role: BufferRole = BufferRole.controller
    epoch: str = ""
    incarnation: int = 0

    def for_role(self, role: BufferRole) -> "BufferConnection":
        """Return a copy of this connection for clients of another role."""
        return replace(self, role=role)

    def client(self, *, host: str = "") -> BufferClient:
        """Return a new client. ``host`` is the name of the host that the client runs on.

        Raises `ValueError` if the file of keys is missing or malformed, or if other users can read it.
        """
        return BufferClient(
            self.address,
            request_timeout_s=self.request_timeout_s,
            keys=client_keys(Path(self.keys), self.role) if self.keys else None,
            epoch=self.epoch,
            host=host,
            incarnation=self.incarnation,
        )

    def sync_client(self) -> SyncBufferClient:
        """Return a new client of a learner rank.

        Raises `ValueError` if the address is malformed, or if the keys cannot be read.
        """
        return SyncBufferClient(self.client())
