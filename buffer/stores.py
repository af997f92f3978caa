"""Keeps encoded prompts, saved prefixes (tokens of unfinished groups) and trajectories within bounds on bytes.

If store servers hold the trajectories, the ledger's server keeps only their sizes.
"""

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import xxhash

from asyncrl.core.errors import AsyncRLError, ReplayBufferError, StoreFull, UnknownGroup

from .encoding import JOIN_BELOW_BYTES, Message
from .frames import Frames, FramesOnDisk, in_memory, size_of
from .journal import Journal
from .ledger import Ledger

logger = logging.getLogger(__name__)

Key = TypeVar("Key", bound=Hashable)


def digest_of(payload: Iterable[Any]) -> bytes:
    """Return the XXH3 digest (16 bytes) of a payload. The division of the payload into frames does not matter."""
    digest = xxhash.xxh3_128()
    for frame in payload:
        digest.update(frame)
    return digest.digest()


class FrameTable(Generic[Key]):
    """Maps a key to frames (encoded prompts, saved prefixes or trajectories).

    A key is a group id, or a (group id, attempt number) pair.

    Attributes:
        num_bytes: Total size of the frames in bytes.
        memory_bytes: Total size of the frames in memory.
        disk_bytes: Total size of the frames on this server's disk. Only ``num_bytes`` includes frames on store servers.
    """

    def __init__(self) -> None:
        self._frames: dict[Key, tuple[Frames, int]] = {}
        self.num_bytes = self.memory_bytes = self.disk_bytes = 0

    def __contains__(self, key: Key) -> bool:
        return key in self._frames

    def __iter__(self) -> Iterator[tuple[Key, Frames]]:
        return ((key, frames) for key, (frames, _) in self._frames.items())

    def put(self, key: Key, frames: Frames, size: int | None = None) -> None:
        """Store the frames of a key, and drop the key's earlier frames.

        ``size`` is the number of bytes that ``num_bytes`` includes for the key; by default the size of the frames.
        """
        self.remove(key)
        self._frames[key] = frames, size_of(frames) if size is None else size
        self._count(*self._frames[key], 1)

    def get(self, key: Key) -> Frames:
        """Return the frames of a key, or an empty sequence if the key is unknown."""
        return self._frames.get(key, ((), 0))[0]

    def remove(self, key: Key) -> None:
        """Remove the frames of a key. An unknown key is ignored."""
        if key in self._frames:
            self._count(*self._frames.pop(key), -1)

    def move_to(self, other: "FrameTable[Key]", key: Key) -> None:
        """Move the frames of a key to another table. An unknown key is ignored."""
        if key in self:
            other.put(key, *self._frames[key])
            self.remove(key)

    def _count(self, frames: Frames, size: int, sign: int) -> None:
        self.num_bytes += sign * size
        if isinstance(frames, FramesOnDisk):
            self.disk_bytes += sign * frames.num_bytes
        else:
            self.memory_bytes += sign * size_of(frames)


class PayloadWriter:
    """Writes large payloads, and payloads that do not fit in memory, to the journal before they are stored.

    Args:
        journal: The server's journal, or None.
        fits_in_memory: Function that returns whether a payload of this number of bytes fits within the memory bound.
        refuse: Function that answers a request with an error.
    """

    def __init__(
        self,
        journal: Journal | None,
        *,
        fits_in_memory: Callable[[int], bool],
        refuse: Callable[[Message, AsyncRLError], None],
    ) -> None:
        self._journal, self._fits_in_memory, self._refuse = journal, fits_in_memory, refuse

    def writes_first(self, num_bytes: int) -> bool:
        """Return whether the journal writes a payload of ``num_bytes`` bytes before the payload is stored."""
        if self._journal is None:
            return False
        return num_bytes >= JOIN_BELOW_BYTES or not self._fits_in_memory(num_bytes)

    def write(self, request: Message, store: Callable[[Frames], None]) -> None:
        """Call ``store`` with the payload of a request, now or after the journal has written the payload.

        After a write, ``store`` gets the frames on disk. If the write or the later call of ``store`` fails, the request
        is refused.
        """
        if self._journal is None or not self.writes_first(size_of(request.payload)):
            store(request.payload)
            return

        def then(kept: FramesOnDisk | ReplayBufferError) -> None:
            try:
                if isinstance(kept, ReplayBufferError):
                    raise kept
                store(kept)
            except AsyncRLError as refusal:
                self._refuse(request, refusal)
            except Exception as failure:
                name = request.body.name
                logger.exception("%s failed", name)
                self._refuse(request, ReplayBufferError(f"the buffer failed at {name}: {failure!r}"))

        self._journal.keep(request.payload, then)


class PayloadStore:
    """The prompts, saved prefixes and trajectories that the ledger's server holds.

    Args:
        max_prompt_bytes: Bound on the prompts of groups that are not stored yet, in bytes.
        remove_elsewhere: Function that tells the store servers to drop trajectories. `forget` passes its own arguments
            to this function. None if this server itself holds the trajectories.
        max_memory_bytes: Bound on trajectories and saved prefixes in memory, in bytes; 0 means no bound. Trajectories
            that exceed the bound stay on disk.
    """

    def __init__(
        self,
        max_prompt_bytes: int,
        remove_elsewhere: Callable[[Sequence[int], Sequence[tuple[int, int]]], None] | None = None,
        *,
        max_memory_bytes: int = 0,
    ) -> None:
        self.prompts, self.prefixes, self.payloads = FrameTable[int](), FrameTable[int](), FrameTable[int]()
        self._stored_prompts = FrameTable[int]()
        self._max_memory_bytes = max_memory_bytes
        self.max_prompt_bytes = max_prompt_bytes
        self._remove_elsewhere = remove_elsewhere

    @property
    def held_bytes(self) -> int:
        """Size of all stored trajectories and saved prefixes in bytes, including trajectories on store servers."""
        return self.prefixes.num_bytes + self.payloads.num_bytes

    @property
    def memory_bytes(self) -> int:
        """Size of the trajectories and saved prefixes in this server's memory, in bytes."""
        return self.prefixes.memory_bytes + self.payloads.memory_bytes

    def fits_in_memory(self, num_bytes: int) -> bool:
        """Return whether another payload of ``num_bytes`` bytes fits within the bound on memory."""
        return not self._max_memory_bytes or self.memory_bytes + num_bytes <= self._max_memory_bytes

    @property
    def prompt_bytes(self) -> int:
        """Size of all prompts in bytes, including the prompts of stored groups."""
        return self.prompts.num_bytes + self._stored_prompts.num_bytes

    @property
    def is_elsewhere(self) -> bool:
        """True if store servers hold the trajectories."""
        return self._remove_elsewhere is not None

    def trajectories(self, group_id: int) -> Frames:
        """Return the encoded trajectories of a group. Raises `UnknownGroup` if this server does not hold them."""
        if group_id not in self.payloads:
            raise UnknownGroup(
                f"no trajectories of group {group_id} are stored; fetch only groups of a plan, before its commit"
            )
        return self.payloads.get(group_id)

    def frames(self) -> Iterator[tuple[str, int, Frames]]:
        """Yield (kind, group id, frames) for each prompt, saved prefix and group that this server holds."""
        tables = [("prompt", self.prompts), ("prompt", self._stored_prompts), ("progress", self.prefixes)]
        if not self.is_elsewhere:
            tables.append(("payload", self.payloads))
        for kind, table in tables:
            for group_id, frames in table:
                yield kind, group_id, frames

    def recover(self, frames: Mapping[str, Mapping[int, Frames]], ledger: Ledger) -> None:
        """Load the prompts, trajectories and saved prefixes of the ledger's unfinished groups.

        ``frames`` holds all frames of a journal: ``frames[kind][group_id]`` are the frames of one prompt, saved prefix
        or group.
        """
        for group_id, parts in frames.get("prompt", {}).items():
            if group_id in ledger.groups:
                self.prompts.put(group_id, in_memory(parts))
        payloads = frames.get("payload", {})
        for group in ledger.groups:
            if group.summary is not None and (self.is_elsewhere or group.group_id in payloads):
                try:
                    self.keep_payload(group.group_id, payloads.get(group.group_id, ()), group.num_bytes)
                except OSError as error:
                    logger.error("the trajectories of group %d are lost: %s", group.group_id, error)
        with_prefix = {group.group_id for group in ledger.groups if group.prefix_bytes}
        for group_id, parts in frames.get("progress", {}).items():
            if group_id in with_prefix:
                self.prefixes.put(group_id, in_memory(parts))

    def keep_payload(self, group_id: int, payload: Frames, size: int) -> None:
        """Store the trajectories of a group, and remove the group's saved prefix.

        ``size`` is the size of the trajectories in bytes. Trajectories on disk are read into memory if they fit there.
        Raises `OSError` if the trajectories cannot be read.
        """
        self.prefixes.remove(group_id)
        self.payloads.put(group_id, in_memory(payload) if self.fits_in_memory(size) else payload, size)
        self.prompts.move_to(self._stored_prompts, group_id)

    def evict(self, group_ids: Iterable[int]) -> None:
        """Drop the trajectories and saved prefixes of groups. The prompts stay."""
        for group_id in group_ids:
            self.prefixes.remove(group_id)
            self.payloads.remove(group_id)
            self._stored_prompts.move_to(self.prompts, group_id)

    def forget(self, finished: Sequence[int], ended: Sequence[tuple[int, int]]) -> bool:
        """Drop all frames of finished groups. Store servers also drop the payloads of ended attempts.

        ``ended`` holds (group id, attempt number) pairs. Returns whether bytes may have become free.
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
        """Raise an error if new prompts of ``size`` bytes exceed the bound on prompts.

        The bound also covers the prompts of groups that are not stored yet, and the prompts that wait for room in the
        queue. ``num_waiting_bytes`` is the size of the waiting prompts in bytes.

        Raises:
            StoreFull: The prompts do not fit now.
            ReplayBufferError: The prompts are larger than ``max_prompt_bytes``.
        """
        limit = self.max_prompt_bytes
        if size > limit:
            raise ReplayBufferError(
                f"{size} bytes of prompts exceed buffer.max_prompt_bytes={limit}; raise this limit, or enqueue fewer "
                "prompts per call"
            )
        held = self.prompts.num_bytes + num_waiting_bytes
        if held + size > limit:
            raise StoreFull(
                f"{size} bytes of prompts do not fit: {held} bytes are in use, and buffer.max_prompt_bytes is {limit}; "
                "the client sends the prompts again when groups are stored or finished"
            )
