"""The asyncio client of the buffer, for rollout workers and the controller.

Requests that the server may hold (lease, enqueue, plan) are asked again for as long as it answers "nothing yet".
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

from asyncrl.protocol.errors import ReplayBufferError, StoreFull
from asyncrl.protocol.types import BufferStats, Lease, Plan, Prompt, TrajectoryGroup

from . import messages
from .keys import ClientKeys
from .link import Link
from .messages import REVOKED, SPACE, Message, integer
from .store import size_frame

_PROMPTS_AT_ONCE = 128


class BufferClient:
    """Implements the ports `RolloutBuffer` and `ControlBuffer`.

    It connects at the first call and belongs to the loop of that call.

    Args:
        address: Where the server listens. Example: ``"tcp://127.0.0.1:5555"``.
        request_timeout_s: Deadline of each request; the server answers held ones within half of its own.
        window: Puts on their way at once; further ones wait for an acknowledgement.
        keys: CURVE keys, where the server has them.
    """

    def __init__(
        self, address: str, *, request_timeout_s: float = 30.0, window: int = 8, keys: ClientKeys | None = None
    ) -> None:
        self.address = address
        self._timeout_s = request_timeout_s
        self._keys = keys
        self._window = asyncio.Semaphore(window)
        self._link: Link | None = None
        self._store_links: list[Link] | None = None
        self._revocations: deque[tuple[int, int]] = deque()
        self._progress: dict[tuple[int, int], TrajectoryGroup] = {}
        self._pushed = asyncio.Event()
        self._space = asyncio.Event()
        self._closed = False

    async def lease(self, engine_version: int, max_groups: int) -> list[Lease]:
        """See `RolloutBuffer.lease`. Cancelling it gives back whatever is granted meanwhile.

        A worker whose engine advances while it waits should cancel and ask again at the new version.
        """
        link = self._connect()
        request_id = link.next_id()
        fields = {"engine_version": engine_version, "max_groups": max_groups}
        try:
            reply = await link.request("lease", fields, request_id=request_id)
        except asyncio.CancelledError:
            link.post("cancel", {"request": request_id})
            raise
        frames = iter(reply.payload)
        leases = []
        for group_id, attempt, version, deadline, num_prompt_frames, num_progress_frames in reply.fields["leases"]:
            prompt = messages.prompt_of([next(frames) for _ in range(num_prompt_frames)])
            leases.append(Lease(prompt=prompt, attempt=attempt, engine_version=version, deadline_version=deadline))
            if num_progress_frames:
                saved = messages.group_of([next(frames) for _ in range(num_progress_frames)])
                self._progress[group_id, attempt] = saved
        return leases

    def take_progress(self, lease: Lease) -> TrajectoryGroup | None:
        """What an earlier attempt of this lease's group had saved: its samples so far, to be continued.

        The put or release of this attempt reports all tokens, those of the prefix among them.
        """
        return self._progress.pop((lease.prompt.group_id, lease.attempt), None)

    async def save_progress(self, lease: Lease, group: TrajectoryGroup) -> None:
        """Save a running group with its lease, so that another worker can continue it if this one dies.

        Args:
            lease: The lease that it runs under.
            group: Its samples so far; finish reasons are of no meaning yet.

        Raises:
            LeaseExpired: the lease is no longer held.
            VersionTooOld: the group holds a token older than its lease.
        """
        summary = group.summary
        fields = {"group_id": lease.prompt.group_id, "attempt": lease.attempt}
        fields |= {"num_tokens": summary.num_tokens, "oldest_version": summary.oldest_version}
        await self._connect().request("save", fields, messages.group_frames(group))

    async def renew(self, leases: Sequence[Lease]) -> None:
        """See `RolloutBuffer.renew`."""
        groups = [lease.prompt.group_id for lease in leases]
        await self._connect().request("renew", {"groups": groups, "attempts": [lease.attempt for lease in leases]})

    async def put(self, group: TrajectoryGroup) -> None:
        """See `RolloutBuffer.put`. While the store is full it waits for a batch to leave, and sends again."""
        payload = messages.group_frames(group)
        async with self._window:
            stores = await self._stores("put")
            if stores:
                store = stores[group.group_id % len(stores)]
                fields = {"group_id": group.group_id, "attempt": group.attempt}
                await self._put_until_stored(store, "put_payload", fields, payload)
                payload = [size_frame(sum(memoryview(frame).nbytes for frame in payload))]
            await self._put_until_stored(self._connect(), "put", messages.summary_fields(group.summary), payload)

    async def _put_until_stored(self, link: Link, name: str, fields: dict[str, Any], payload: Sequence[Any]) -> None:
        while True:
            self._space.clear()
            try:
                await link.request(name, fields, payload)
            except StoreFull:
                await self._wait_for_space()
            else:
                return

    async def _stores(self, caller: str) -> list[Link]:
        """Connections to the store servers; none if the ledger's server keeps the payloads itself."""
        if self._store_links is None:
            addresses = (await self._connect().request("hello", {}, caller=caller)).fields["stores"]
            if self._store_links is None:
                self._store_links = [self._link_to(address) for address in addresses]
        return self._store_links

    async def release(self, lease: Lease, *, num_tokens: int, reason: str) -> None:
        """See `RolloutBuffer.release`. Also reports the tokens of a revoked lease; counted once."""
        fields: dict[str, Any] = {"group_id": lease.prompt.group_id, "attempt": lease.attempt}
        await self._connect().request("release", {**fields, "num_tokens": num_tokens, "reason": reason})

    async def revocation(self) -> tuple[int, int]:
        """See `RolloutBuffer.revocation`."""
        self._connect()
        while not self._revocations:
            if self._closed:
                raise self._closed_error()
            self._pushed.clear()
            await self._pushed.wait()
        return self._revocations.popleft()

    async def enqueue(self, prompts: Sequence[Prompt]) -> None:
        """See `ControlBuffer.enqueue`."""
        num_queued = 0
        while num_queued < len(prompts):
            some = prompts[num_queued : num_queued + _PROMPTS_AT_ONCE]
            encoded = [messages.prompt_frames(prompt) for prompt in some]
            fields = {"groups": [prompt.group_id for prompt in some], "counts": [len(frames) for frames in encoded]}
            payload = [frame for frames in encoded for frame in frames]
            reply = await self._connect().request("enqueue", fields, payload)
            num_queued += integer(reply.fields, "queued")

    async def plan(self, version: int) -> Plan:
        """See `ControlBuffer.plan`. It waits as long as the server answers; bound the whole with `asyncio.timeout`."""
        while True:
            reply = await self._connect().request("plan", {"version": version})
            if "groups" in reply.fields:
                return Plan(version=version, groups=tuple(map(messages.summary_of, reply.fields["groups"])))

    async def commit(self, version: int) -> BufferStats:
        """See `ControlBuffer.commit`."""
        return messages.stats_of((await self._connect().request("commit", {"version": version})).fields)

    async def stats(self) -> BufferStats:
        """See `ControlBuffer.stats`."""
        return messages.stats_of((await self._connect().request("stats", {})).fields)

    async def fetch(self, group_ids: Sequence[int]) -> list[TrajectoryGroup]:
        """Stored groups in the order asked for; arrays are read-only views of the received bytes."""
        reply = await self._connect().request("fetch", {"groups": list(group_ids)})
        if "stores" not in reply.fields:
            return messages.groups_of(reply, group_ids)
        stores = await self._stores("fetch")
        asked = messages.split_by_store(group_ids, messages.integers(reply.fields, "attempts"), len(stores))
        calls = (store.request("fetch", fields) for store, fields in zip(stores, asked, strict=True))
        return messages.join_from_stores(await asyncio.gather(*calls), group_ids)

    async def inspect(self) -> dict[str, Any]:
        """Every unfinished group and every producer, for people; see `buffer.inspect`."""
        return dict((await self._connect().request("inspect", {})).fields)

    async def finished(self) -> list[tuple[int, int]]:
        """See `ControlBuffer.finished`."""
        return [(start, end) for start, end in (await self.inspect())["finished"]]

    async def close(self) -> None:
        """Close the connection; calls that wait raise `ReplayBufferError` at once."""
        self._closed = True
        self._pushed.set()
        self._space.set()
        for link in (self._link, *(self._store_links or ())):
            if link is not None:
                link.close()

    def _connect(self) -> Link:
        if self._closed:
            raise self._closed_error()
        if self._link is None:
            self._link = self._link_to(self.address)
        return self._link

    def _link_to(self, address: str) -> Link:
        return Link(address, timeout_s=self._timeout_s, keys=self._keys, on_push=self._on_push)

    def _closed_error(self) -> ReplayBufferError:
        return ReplayBufferError(f"the client of the buffer at {self.address} is closed")

    async def _wait_for_space(self) -> None:
        """Until the server says that a batch has left; after half a deadline the put is tried anyway."""
        try:
            async with asyncio.timeout(self._timeout_s / 2):
                await self._space.wait()
        except TimeoutError:
            return

    def _on_push(self, message: Message) -> None:
        if message.name == REVOKED:
            self._revocations.append((integer(message.fields, "group_id"), integer(message.fields, "attempt")))
            self._pushed.set()
        elif message.name == SPACE:
            self._space.set()
