"""Keeps frames within the buffer's byte bounds: prompts, saved prefixes and trajectories.

Trajectories are kept in the ledger's server, in the form received from the socket, or on store servers by group id. In
the second case the ledger's server keeps only their sizes.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import xxhash

from asyncrl.core.errors import ReplayBufferError, StoreFull, UnknownGroup

from .ledger import Ledger
from .records import Frames

_MAX_CLIENTS = 4096


def digest_of(payload: Iterable[Any]) -> bytes:
    """The digest of a payload; it does not depend on how the payload is cut into frames."""
    digest = xxhash.xxh3_128()
    for frame in payload:
        digest.update(frame)
    return digest.digest()


class FrameTable:
    """Frames by group id, and their total size."""

    def __init__(self) -> None:
        self._frames: dict[int, tuple[Frames, int]] = {}
        self.num_bytes = 0

    def __contains__(self, group_id: int) -> bool:
        return group_id in self._frames

    def __iter__(self) -> Iterator[tuple[int, Frames]]:
        return ((group_id, frames) for group_id, (frames, _) in self._frames.items())

    def put(self, group_id: int, frames: Frames, size: int | None = None) -> None:
        """Keep frames and replace earlier ones; ``size`` overrides the counted size."""
        self.remove(group_id)
        size = size_of(frames) if size is None else size
        self._frames[group_id] = (frames, size)
        self.num_bytes += size

    def get(self, group_id: int) -> Frames:
        """The frames of a group; empty if the table has none."""
        return self._frames.get(group_id, ((), 0))[0]

    def remove(self, group_id: int) -> None:
        """Remove the frames of a group, if there are any."""
        self.num_bytes -= self._frames.pop(group_id, ((), 0))[1]

    def move_to(self, other: "FrameTable", group_id: int) -> None:
        """Move the frames of a group to another table, if there are any."""
        if group_id in self:
            other.put(group_id, *self._frames[group_id])
            self.remove(group_id)


class PayloadStore:
    """All frames: trajectories and prefixes under the bound ``max_bytes``, prompts under another.

    Prompts count against ``max_prompt_bytes`` from before they are queued until their groups are stored. A stored group
    contains its prompt, so ``max_bytes`` bounds the prompts of stored groups, and they do not delay other prompts.
    If store servers hold the trajectories, `forget` passes its arguments to ``remove_elsewhere``.
    """

    def __init__(
        self,
        max_prompt_bytes: int,
        remove_elsewhere: Callable[[Sequence[int], Sequence[tuple[int, int]]], None] | None = None,
    ) -> None:
        self.prompts, self.prefixes, self.payloads = FrameTable(), FrameTable(), FrameTable()
        self._stored_prompts = FrameTable()
        self.max_prompt_bytes = max_prompt_bytes
        self._remove_elsewhere = remove_elsewhere

    @property
    def held_bytes(self) -> int:
        """Bytes of trajectories and prefixes."""
        return self.prefixes.num_bytes + self.payloads.num_bytes

    @property
    def prompt_bytes(self) -> int:
        """Bytes of all prompts, including prompts of stored groups."""
        return self.prompts.num_bytes + self._stored_prompts.num_bytes

    @property
    def is_elsewhere(self) -> bool:
        """Whether store servers hold the trajectories."""
        return self._remove_elsewhere is not None

    def trajectories(self, group_id: int) -> Frames:
        """The trajectories of a group. Raises `UnknownGroup` if they are not here."""
        if group_id not in self.payloads:
            raise UnknownGroup(
                f"no trajectories of group {group_id} are stored; fetch only groups of a plan, before its commit"
            )
        return self.payloads.get(group_id)

    def frames(self) -> Iterator[tuple[str, int, Frames]]:
        """Kind, group id and frames of all data that this server holds, for a journal."""
        tables = [("prompt", self.prompts), ("prompt", self._stored_prompts), ("progress", self.prefixes)]
        if not self.is_elsewhere:
            tables.append(("payload", self.payloads))
        for kind, table in tables:
            for group_id, frames in table:
                yield kind, group_id, frames

    def recover(self, frames: Mapping[str, Mapping[int, Frames]], ledger: Ledger) -> None:
        """Load the frames of unfinished groups from a journal."""
        for group_id, parts in frames.get("prompt", {}).items():
            if group_id in ledger.groups:
                self.prompts.put(group_id, parts)
        payloads = frames.get("payload", {})
        for group in ledger.groups:
            if group.summary is not None and (self.is_elsewhere or group.group_id in payloads):
                self.keep_payload(group.group_id, payloads.get(group.group_id, ()), group.num_bytes)
        with_prefix = {group.group_id for group in ledger.groups if group.prefix_bytes}
        for group_id, parts in frames.get("progress", {}).items():
            if group_id in with_prefix:
                self.prefixes.put(group_id, parts)

    def keep_payload(self, group_id: int, payload: Frames, size: int) -> None:
        """Keep the trajectories of a group, ``size`` bytes; they contain its saved prefix, which is removed."""
        self.payloads.put(group_id, payload, size)
        self.prefixes.remove(group_id)
        self.prompts.move_to(self._stored_prompts, group_id)

    def evict(self, group_ids: Iterable[int]) -> None:
        """Drop the trajectories and prefixes of evicted groups."""
        for group_id in group_ids:
            self.prefixes.remove(group_id)
            self.payloads.remove(group_id)
            self._stored_prompts.move_to(self.prompts, group_id)

    def forget(self, finished: Sequence[int], ended: Sequence[tuple[int, int]]) -> bool:
        """Drop all frames of finished groups, and tell the store servers to drop the frames of ended attempts.

        ``ended`` holds pairs of group id and attempt. Returns whether bytes may have become free.
        """
        self.evict(finished)
        for group_id in finished:
            self.prompts.remove(group_id)
        if not finished and not ended:
            return False
        if self._remove_elsewhere is not None:
            self._remove_elsewhere(finished, ended)
        return True

    def check_prompts(self, size: int, *, num_waiting_bytes: int) -> None:
        """Refuse prompts of ``size`` bytes that do not fit beside held and waiting (``num_waiting_bytes``) prompts.

        Raises:
            StoreFull: The prompts fit later, when groups have been stored or have left.
            ReplayBufferError: The prompts are larger than ``max_prompt_bytes``.
        """
        limit = self.max_prompt_bytes
        if size > limit:
            raise ReplayBufferError(
                f"{size} bytes of prompts exceed buffer.max_prompt_bytes={limit}; raise it, or enqueue fewer at once"
            )
        held = self.prompts.num_bytes + num_waiting_bytes
        if held + size > limit:
            raise StoreFull(
                f"{size} bytes of prompts do not fit beside {held} of others, buffer.max_prompt_bytes is {limit}; they "
                "are sent again when groups are stored or have left"
            )


def size_of(frames: Iterable[Any]) -> int:
    """Total bytes of frames."""
    return sum(map(len, frames))


class FetchWindow:
    """Limits the bytes of unread replies per client to ``limit``; each fetch names the last reply that was read."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._replies: OrderedDict[bytes, deque[tuple[int, int]]] = OrderedDict()

    def add(self, client: bytes, request_id: int, num_bytes: int, *, read: int) -> None:
        """Record a reply of ``num_bytes`` before it is sent.

        ``read`` is the largest request id that the client has read.

        Raises `StoreFull` if the client would have more than ``limit`` unread bytes.
        """
        replies = self._replies.setdefault(client, deque())
        self._replies.move_to_end(client)
        while replies and (replies[0][0] <= read or replies[0][0] == request_id):
            replies.popleft()
        waiting = sum(size for _, size in replies)
        if replies and waiting + num_bytes > self._limit:
            raise StoreFull(
                f"this client has not read {waiting} fetched bytes, and {num_bytes} more exceed "
                f"buffer.max_stored_bytes={self._limit}; read them first"
            )
        replies.append((request_id, num_bytes))
        if len(self._replies) > _MAX_CLIENTS:
            self._replies.popitem(last=False)
