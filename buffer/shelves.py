"""Every frame that the server holds, prompts, saved prefixes and trajectories, and how much more fits."""

from collections.abc import Iterable, Mapping
from typing import Any

from asyncrl.protocol.errors import ReplayBufferError, StoreFull

from .journal import Frames
from .ledger_state import LedgerState
from .store import Store


class FrameShelf:
    """Frames by group id, and their size."""

    def __init__(self) -> None:
        self._frames: dict[int, Frames] = {}
        self.num_bytes = 0

    def put(self, group_id: int, frames: Frames) -> None:
        """Keep frames in the place of those that were there."""
        self.remove(group_id)
        self._frames[group_id] = frames
        self.num_bytes += size_of(frames)

    def get(self, group_id: int) -> Frames:
        """The frames of a group; none if there are none."""
        return self._frames.get(group_id, ())

    def remove(self, group_id: int) -> None:
        """Forget the frames of a group, if there are any."""
        if frames := self._frames.pop(group_id, None):
            self.num_bytes -= size_of(frames)


class Shelves:
    """All frames, trajectories and prefixes under one bound, prompts under another.

    Args:
        max_bytes: Bound on trajectories and prefixes.
        max_prompt_bytes: Bound on prompts, from before they are queued until their groups are finished.
        store: Keeps the trajectories.
    """

    def __init__(self, max_bytes: int, max_prompt_bytes: int, store: Store) -> None:
        self.prompts = FrameShelf()
        self.prefixes = FrameShelf()
        self.payloads = store
        self.max_bytes = max_bytes
        self.max_prompt_bytes = max_prompt_bytes
        self.largest_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of trajectories and prefixes."""
        return self.prefixes.num_bytes + self.payloads.stored_bytes

    def recover(self, frames: Mapping[str, Mapping[int, Frames]], state: LedgerState) -> None:
        """Take up what a journal kept."""
        for group_id, parts in frames.get("payload", {}).items():
            if group_id in state.batches:
                self.keep_payload(group_id, parts, self.payloads.measure(parts))
        for group_id, parts in frames.get("prompt", {}).items():
            self.prompts.put(group_id, parts)
        for group_id, parts in frames.get("progress", {}).items():
            self.prefixes.put(group_id, parts)

    def keep_payload(self, group_id: int, payload: Frames, size: int) -> None:
        """Keep a stored group of ``size`` bytes; its prefix, if one was saved, is part of it."""
        self.payloads.put(group_id, payload, size)
        self.prefixes.remove(group_id)
        self.largest_bytes = max(self.largest_bytes, size)

    def forget(self, group_ids: Iterable[int]) -> bool:
        """Drop all frames of groups that are consumed or dropped; whether there were any such groups."""
        is_any = False
        for group_id in group_ids:
            is_any = True
            self.prompts.remove(group_id)
            self.prefixes.remove(group_id)
            self.payloads.remove(group_id)
        return is_any

    def has_room_for_group(self, num_leased: int) -> bool:
        """Whether one more group fits beside what is held and what the running leases may bring."""
        return self.held_bytes + (num_leased + 1) * self.largest_bytes <= self.max_bytes

    def check_trajectory(self, size: int, *, replaced: int = 0) -> None:
        """Refuse a payload, or a prefix, that does not fit.

        Args:
            size: Its bytes.
            replaced: Bytes that leave for it.

        Raises:
            StoreFull: it fits when something else has left.
            ReplayBufferError: it never will.
        """
        if size > self.max_bytes:
            raise ReplayBufferError(
                f"a group of {size} bytes is larger than buffer.max_stored_bytes={self.max_bytes}; raise it"
            )
        if self.held_bytes - replaced + size > self.max_bytes:
            raise StoreFull(
                f"{size} bytes do not fit beside the {self.held_bytes} held, buffer.max_stored_bytes is "
                f"{self.max_bytes}; the group is sent again when a batch has left"
            )

    def check_prompts(self, size: int, *, num_waiting_bytes: int) -> None:
        """Refuse prompts that do not fit.

        Args:
            size: Their bytes.
            num_waiting_bytes: Bytes of other prompts that wait for room in the queue.

        Raises:
            StoreFull: they fit when groups have left.
            ReplayBufferError: they never will.
        """
        limit = self.max_prompt_bytes
        if size > limit:
            raise ReplayBufferError(
                f"{size} bytes of prompts came at once, buffer.max_prompt_bytes is {limit}; raise it, or enqueue fewer"
            )
        held = self.prompts.num_bytes + num_waiting_bytes
        if held + size > limit:
            raise StoreFull(
                f"{size} bytes of prompts do not fit beside {held} of others, buffer.max_prompt_bytes is {limit}; they "
                "are sent again when groups have left"
            )


def size_of(frames: Iterable[Any]) -> int:
    """Bytes of frames."""
    return sum(map(len, frames))
