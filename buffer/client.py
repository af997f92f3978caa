"""The buffer's clients: `BufferClient` for asyncio (rollout workers, controller), `SyncBufferClient` for learner ranks.

Every request is kept until its reply came and is sent again after a reconnect; every request has a deadline. Requests
that the server may hold (lease, enqueue, plan) are asked again for as long as the server answers "nothing yet".
"""

import asyncio
import itertools
import time
import uuid
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from asyncrl.protocol.errors import DeadlineError, ReplayBufferError, StoreFull, WireError
from asyncrl.protocol.types import BufferStats, Lease, Plan, Prompt, TrajectoryGroup

from . import messages
from .channel import Channel
from .messages import OK, PUSH_ID, REVOKED, SPACE, Message

_RECONNECT_MS = 50
_RECONNECT_MAX_MS = 2000


def _connect(context: zmq.Context[Any], address: str) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """A DEALER with an identity of its own, and the monitor that tells of its connections."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IDENTITY, uuid.uuid4().bytes)
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
    socket.setsockopt(zmq.SNDHWM, 0)
    monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    socket.connect(address)
    return socket, monitor


@dataclass(kw_only=True, slots=True, eq=False)
class _Pending:
    """A request without a reply yet."""

    frames: list[Any]
    reply: asyncio.Future[Message]


class BufferClient:
    """The asyncio face; implements the ports `RolloutBuffer` and `ControlBuffer`.

    It connects at the first call and belongs to the loop of that call.

    Args:
        address: Where the server listens. Example: ``"tcp://127.0.0.1:5555"``.
        request_timeout_s: Deadline of each request; the server answers held ones within half of its own.
        window: Puts on their way at once; further ones wait for an acknowledgement.
    """

    def __init__(self, address: str, *, request_timeout_s: float = 30.0, window: int = 8) -> None:
        self.address = address
        self._timeout_s = request_timeout_s
        self._ids = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._window = asyncio.Semaphore(window)
        self._revocations: deque[tuple[int, int]] = deque()
        self._revoked = asyncio.Event()
        self._space = asyncio.Event()
        self._closed = False
        self._context: zmq.Context[Any] | None = None
        self._channel: Channel | None = None
        self._monitor: Channel | None = None
        self._num_connects = 0

    # RolloutBuffer

    async def lease(self, engine_version: int, max_groups: int) -> list[Lease]:
        """See `RolloutBuffer.lease`. Cancelling it gives back whatever is granted meanwhile."""
        fields = {"engine_version": engine_version, "max_groups": max_groups}
        request_id = next(self._ids)
        try:
            reply = await self._call("lease", fields, request_id=request_id)
        except asyncio.CancelledError:
            self._post("cancel", {"request": request_id})
            raise
        frames = iter(reply.payload)
        return [
            Lease(
                prompt=messages.prompt_of([next(frames) for _ in range(num_frames)]),
                attempt=attempt,
                engine_version=version,
                deadline_version=deadline,
            )
            for _, attempt, version, deadline, num_frames in reply.fields["leases"]
        ]

    async def renew(self, leases: Sequence[Lease]) -> None:
        """See `RolloutBuffer.renew`."""
        groups = [lease.prompt.group_id for lease in leases]
        await self._call("renew", {"groups": groups, "attempts": [lease.attempt for lease in leases]})

    async def put(self, group: TrajectoryGroup) -> None:
        """See `RolloutBuffer.put`. While the store is full it waits for a batch to leave, and sends again."""
        fields = messages.summary_fields(group.summary)
        payload = messages.group_frames(group)
        async with self._window:
            while True:
                self._space.clear()
                try:
                    await self._call("put", fields, payload)
                except StoreFull:
                    await self._wait_for_space()
                else:
                    return

    async def release(self, lease: Lease, *, num_tokens: int, reason: str) -> None:
        """See `RolloutBuffer.release`. Also reports the tokens of a revoked lease; counted once."""
        fields = {"group_id": lease.prompt.group_id, "attempt": lease.attempt}
        await self._call("release", {**fields, "num_tokens": num_tokens, "reason": reason})

    async def revocation(self) -> tuple[int, int]:
        """See `RolloutBuffer.revocation`."""
        self._connect()
        while not self._revocations:
            if self._closed:
                raise self._closed_error("revocation")
            self._revoked.clear()
            await self._revoked.wait()
        return self._revocations.popleft()

    # ControlBuffer

    async def enqueue(self, prompts: Sequence[Prompt]) -> None:
        """See `ControlBuffer.enqueue`."""
        left = [(prompt.group_id, messages.prompt_frames(prompt)) for prompt in prompts]
        while left:
            fields = {"groups": [group_id for group_id, _ in left], "counts": [len(frames) for _, frames in left]}
            reply = await self._call("enqueue", fields, [frame for _, frames in left for frame in frames])
            left = left[messages.integer(reply.fields, "queued") :]

    async def plan(self, version: int) -> Plan:
        """See `ControlBuffer.plan`. It waits as long as the server answers; bound the whole with `asyncio.timeout`."""
        while True:
            reply = await self._call("plan", {"version": version})
            if "groups" in reply.fields:
                return Plan(version=version, groups=tuple(map(messages.summary_of, reply.fields["groups"])))

    async def commit(self, version: int) -> BufferStats:
        """See `ControlBuffer.commit`."""
        return messages.stats_of((await self._call("commit", {"version": version})).fields)

    async def stats(self) -> BufferStats:
        """See `ControlBuffer.stats`."""
        return messages.stats_of((await self._call("stats", {})).fields)

    async def fetch(self, group_ids: Sequence[int]) -> list[TrajectoryGroup]:
        """Stored groups in the order asked for; arrays are read-only views of the received bytes."""
        reply = await self._call("fetch", {"groups": list(group_ids)})
        return _groups_of(reply, group_ids)

    async def close(self) -> None:
        """Close the connection; calls that wait raise `ReplayBufferError` at once."""
        self._closed = True
        self._revoked.set()
        for pending in list(self._pending.values()):
            if not pending.reply.done():
                pending.reply.set_exception(self._closed_error("a call"))
        if self._channel is not None and self._monitor is not None and self._context is not None:
            self._monitor.close()
            self._channel.close()
            self._context.destroy(linger=0)
            self._channel = self._monitor = self._context = None

    def _closed_error(self, what: str) -> ReplayBufferError:
        return ReplayBufferError(f"the client of the buffer at {self.address} was closed while {what} waited")

    # Requests

    async def _call(
        self, name: str, fields: dict[str, Any], payload: Sequence[Any] = (), *, request_id: int | None = None
    ) -> Message:
        if self._closed:
            raise self._closed_error(name)
        channel = self._connect()
        request_id = next(self._ids) if request_id is None else request_id
        frames = Message(name=name, request_id=request_id, fields=fields, payload=payload).frames()
        pending = _Pending(frames=frames, reply=asyncio.get_running_loop().create_future())
        self._pending[request_id] = pending
        try:
            channel.send(frames)
            async with asyncio.timeout(self._timeout_s):
                reply = await pending.reply
        except TimeoutError:
            raise DeadlineError(
                f"buffer.{name}: no answer from {self.address} within {self._timeout_s:.1f} s; the server is gone or "
                "overloaded, its log says more"
            ) from None
        finally:
            del self._pending[request_id]
        if reply.name != OK:
            raise messages.error_of(reply)
        return reply

    def _post(self, name: str, fields: dict[str, Any]) -> None:
        """Send a request whose reply nobody waits for."""
        if self._channel is not None:
            self._channel.send(Message(name=name, request_id=next(self._ids), fields=fields).frames())

    async def _wait_for_space(self) -> None:
        """Until the server says that a batch has left, or the request's deadline has passed."""
        try:
            async with asyncio.timeout(self._timeout_s / 2):
                await self._space.wait()
        except TimeoutError:
            return

    def _connect(self) -> Channel:
        if self._channel is None:
            self._context = zmq.Context()
            socket, monitor = _connect(self._context, self.address)
            self._channel = Channel(socket, self._on_message)
            self._monitor = Channel(monitor, self._on_connected)
        return self._channel

    def _on_connected(self, frames: list[zmq.Frame]) -> None:
        """Send again what has no reply: the connection before this one may have lost it."""
        parse_monitor_message([frame.bytes for frame in frames])
        self._num_connects += 1
        if self._num_connects > 1 and self._channel is not None:
            for pending in self._pending.values():
                self._channel.send(pending.frames)

    def _on_message(self, frames: list[zmq.Frame]) -> None:
        try:
            message = messages.parse(frames)
        except WireError as error:
            self._fail_all(error)
            return
        if message.request_id == PUSH_ID:
            self._on_push(message)
            return
        pending = self._pending.get(message.request_id)
        if pending is not None and not pending.reply.done():
            pending.reply.set_result(message)

    def _on_push(self, message: Message) -> None:
        if message.name == REVOKED:
            fields = message.fields
            self._revocations.append((messages.integer(fields, "group_id"), messages.integer(fields, "attempt")))
            self._revoked.set()
        elif message.name == SPACE:
            self._space.set()
        else:
            self._fail_all(messages.error_of(message))

    def _fail_all(self, error: Exception) -> None:
        for pending in self._pending.values():
            if not pending.reply.done():
                pending.reply.set_exception(error)


class SyncBufferClient:
    """The blocking face; implements the port `TrajectorySource` for learner ranks. One thread at a time.

    Args:
        address: Where the server listens.
        request_timeout_s: Deadline of each request.
    """

    def __init__(self, address: str, *, request_timeout_s: float = 30.0) -> None:
        self.address = address
        self._timeout_s = request_timeout_s
        self._ids = itertools.count(1)
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket, self._monitor = _connect(self._context, address)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._num_connects = 0

    def fetch(self, group_ids: Sequence[int]) -> list[TrajectoryGroup]:
        """See `TrajectorySource.fetch`.

        Raises:
            UnknownGroup: a group is not stored.
            DeadlineError: no answer came in time.
        """
        return _groups_of(self._call("fetch", {"groups": list(group_ids)}), group_ids)

    def stats(self) -> BufferStats:
        """The ledger now."""
        return messages.stats_of(self._call("stats", {}).fields)

    def close(self) -> None:
        """Close the connection."""
        self._context.destroy(linger=0)

    def _call(self, name: str, fields: dict[str, Any]) -> Message:
        request_id = next(self._ids)
        frames = Message(name=name, request_id=request_id, fields=fields).frames()
        self._socket.send_multipart(frames)
        deadline = time.monotonic() + self._timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            ready = dict(self._poller.poll(int(left_s * 1000) + 1))
            if self._monitor in ready:
                self._monitor.recv_multipart()
                self._num_connects += 1
                if self._num_connects > 1:
                    self._socket.send_multipart(frames)
            if self._socket in ready:
                reply = messages.parse(self._socket.recv_multipart(copy=False))
                if reply.request_id in (request_id, PUSH_ID):
                    if reply.name != OK:
                        raise messages.error_of(reply)
                    return reply
        raise DeadlineError(
            f"buffer.{name}: no answer from {self.address} within {self._timeout_s:.1f} s; the server is gone or "
            "overloaded, its log says more"
        )


def _groups_of(reply: Message, group_ids: Sequence[int]) -> list[TrajectoryGroup]:
    """The groups in a fetch's reply."""
    frames = iter(reply.payload)
    groups = [messages.group_of([next(frames) for _ in range(n)]) for n in messages.integers(reply.fields, "counts")]
    if [group.group_id for group in groups] != list(group_ids):
        raise WireError(f"asked for groups {list(group_ids)[:5]}…, got {[group.group_id for group in groups][:5]}…")
    return groups
