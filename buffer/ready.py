"""Stored groups in the order that a batch prefers them, inside the window that keeps every deadline."""

from heapq import heappop, heappush

from asyncrl.protocol.errors import ReplayBufferError
from asyncrl.protocol.types import GroupSummary

from .orders import Preference
from .staleness import StalenessRule, Window


class ReadyGroups:
    """Stored groups that no plan holds yet: one heap for each deadline, best group on top.

    Args:
        rule: The bound.
        prefer: Which groups a batch prefers.
    """

    def __init__(self, rule: StalenessRule, prefer: Preference) -> None:
        self._rule = rule
        self._prefer = prefer
        self._heaps: dict[int, list[tuple[float, int, int]]] = {}
        self._num_added = 0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def rank(self, summary: GroupSummary, deadline: int) -> float:
        """The number that is smallest for the group taken first.

        Raises:
            ReplayBufferError: the order gave something else.
        """
        rank = self._prefer(summary, deadline)
        if not isinstance(rank, int | float) or rank != rank:
            raise ReplayBufferError(f"buffer.order must give a number, got {rank!r:.40} for group {summary.group_id}")
        return rank

    def add(self, group_id: int, deadline: int, rank: float) -> None:
        """Add a group that was just stored."""
        heappush(self._heaps.setdefault(deadline, []), (rank, self._num_added, group_id))
        self._num_added += 1
        self._size += 1

    def due(self) -> dict[int, int]:
        """Deadline to number of groups."""
        return {deadline: len(heap) for deadline, heap in self._heaps.items()}

    def in_order(self) -> list[int]:
        """All group ids, in the order they were stored."""
        entries = (entry for heap in self._heaps.values() for entry in heap)
        return [group_id for _, _, group_id in sorted(entries, key=lambda entry: entry[1])]

    def take_batch(self, required: list[int], version: int) -> list[int]:
        """Remove and return the B preferred groups among those that the window lets in.

        Args:
            required: From `StalenessRule.required`; the ready groups must satisfy it.
            version: w, the version planned.
        """
        window = Window(required, seats := self._rule.groups_per_step)
        tops = [(heap[0], deadline) for deadline, heap in self._heaps.items()]
        tops.sort(reverse=True)
        batch: list[int] = []
        while len(batch) < seats:
            deadline = self._best(tops, version + window.last)
            batch.append(self._pop(deadline, tops))
            window.take(deadline - version)
        return batch

    def _best(self, tops: list[tuple[tuple[float, int, int], int]], last: int) -> int:
        """The deadline, at most ``last``, whose best group is preferred."""
        return min(top for top in tops if top[1] <= last)[1]

    def _pop(self, deadline: int, tops: list[tuple[tuple[float, int, int], int]]) -> int:
        """Take the best group of one deadline and refresh ``tops``."""
        heap = self._heaps[deadline]
        entry = heappop(heap)
        tops.remove((entry, deadline))
        if heap:
            tops.append((heap[0], deadline))
        else:
            del self._heaps[deadline]
        self._size -= 1
        return entry[2]
