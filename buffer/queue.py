"""Prompts that wait for admission, and the saved prefixes of those that were begun before."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from .leases import Progress


class PromptQueue:
    """Group ids in order; a group that comes back goes to the head, with what was saved of it."""

    def __init__(self) -> None:
        self._ids: deque[int] = deque()
        self._progress: dict[int, Progress] = {}

    def __len__(self) -> int:
        return len(self._ids)

    def extend(self, group_ids: Iterable[int]) -> None:
        """Add new groups at the tail."""
        self._ids.extend(group_ids)

    def push_front(self, group_id: int, progress: Progress | None = None) -> None:
        """Put a group back, with the prefix that its next attempt may continue."""
        self._ids.appendleft(group_id)
        if progress is not None:
            self._progress[group_id] = progress

    def pop(self) -> tuple[int, Progress | None]:
        """The next group, and its saved prefix; the caller continues it or counts it as dropped."""
        group_id = self._ids.popleft()
        return group_id, self._progress.pop(group_id, None)

    def snapshot(self) -> dict[str, Any]:
        """Everything, as plain values."""
        progress = [[group_id, asdict(progress)] for group_id, progress in self._progress.items()]
        return {"ids": list(self._ids), "progress": progress}

    def restore(self, values: Mapping[str, Any]) -> None:
        """Take the state of a snapshot."""
        self._ids = deque(values["ids"])
        self._progress = {group_id: Progress(**fields) for group_id, fields in values["progress"]}
