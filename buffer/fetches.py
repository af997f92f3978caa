"""Answers fetches (requests for stored trajectories).

A thread reads the trajectories that are on disk, so reading does not block the event loop.
"""

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from asyncrl.core.errors import AsyncRLError, StoreFull, UnknownGroup

from . import operations
from .encoding import Message
from .frames import Frames, FramesOnDisk, in_memory, size_of
from .waiting import Replies

logger = logging.getLogger(__name__)

_MAX_CLIENTS = 4096


class FetchReplies:
    """Answers fetches with trajectories. Each client may have at most ``limit`` bytes of unread replies.

    A client gets the error `UnknownGroup` if trajectories on disk cannot be read.
    """

    def __init__(self, replies: Replies, limit: int) -> None:
        self._replies = replies
        self._window = FetchWindow(limit)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="payloads")
        self._reads: set[asyncio.Task[None]] = set()

    def send(self, request: Message, fetch: operations.Fetch, parts: Sequence[Frames]) -> None:
        """Answer a fetch with ``parts``, the frames of each requested group. A thread reads frames that are on disk.

        Raises `StoreFull` if the client must read earlier replies first.
        """
        self._window.add(request.client, request.request_id, sum(map(size_of, parts)), read=fetch.read)
        if any(isinstance(part, FramesOnDisk) for part in parts):
            read = asyncio.get_running_loop().create_task(self._read(request, fetch.group_ids, parts))
            self._reads.add(read)
            read.add_done_callback(self._reads.discard)
        else:
            self._answer(request, parts)

    async def _read(self, request: Message, group_ids: Sequence[int], parts: Sequence[Frames]) -> None:
        def read() -> list[Frames]:
            return [_read(group_id, part) for group_id, part in zip(group_ids, parts, strict=True)]

        try:
            self._answer(request, await asyncio.get_running_loop().run_in_executor(self._pool, read))
        except AsyncRLError as error:
            logger.warning("%s", error)
            self._replies.fail(request, error)

    def _answer(self, request: Message, parts: Sequence[Frames]) -> None:
        payload: list[Any] = [frame for frames in parts for frame in frames]
        self._replies.answer(request, operations.Payloads(tuple(map(len, parts))), payload)

    def close(self) -> None:
        """Cancel the pending reads. The fetches that wait for these reads get no answer."""
        for read in self._reads:
            read.cancel()
        self._pool.shutdown()


def _read(group_id: int, frames: Frames) -> Frames:
    try:
        return in_memory(frames)
    except OSError as error:
        raise UnknownGroup(
            f"the trajectories of group {group_id} cannot be read from {error.filename}: {error.strerror}; the group "
            "is generated again"
        ) from error


class FetchWindow:
    """Checks that no client has more than ``limit`` bytes of unread replies."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._replies: OrderedDict[bytes, deque[tuple[int, int]]] = OrderedDict()

    def add(self, client: bytes, request_id: int, num_bytes: int, *, read: int) -> None:
        """Count a reply of ``num_bytes`` bytes to the request ``request_id``, before the reply is sent.

        ``read`` is the largest id of a request whose reply the client has read. Raises `StoreFull` if the client would
        have more than ``limit`` unread bytes. A single reply may be larger than ``limit``.
        """
        replies = self._replies.setdefault(client, deque())
        self._replies.move_to_end(client)
        while replies and (replies[0][0] <= read or replies[0][0] == request_id):
            replies.popleft()
        waiting = sum(size for _, size in replies)
        if replies and waiting + num_bytes > self._limit:
            raise StoreFull(
                f"this client has {waiting} unread bytes of earlier fetches, and {num_bytes} more bytes would exceed "
                f"buffer.max_stored_bytes={self._limit}; read the earlier replies first"
            )
        replies.append((request_id, num_bytes))
        if len(self._replies) > _MAX_CLIENTS:
            self._replies.popitem(last=False)
