"""A set of integers kept as ranges, for ids that finish nearly in order: memory grows with the gaps, not the count."""

from bisect import bisect_right
from collections.abc import Iterable


class IdSet:
    """Integers as disjoint, sorted ranges ``[start, end)``; ``add`` and ``in`` search in O(log ranges)."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in ranges:
            self._starts.append(start)
            self._ends.append(end)

    def __contains__(self, value: int) -> bool:
        i = bisect_right(self._starts, value) - 1
        return i >= 0 and value < self._ends[i]

    def __len__(self) -> int:
        return sum(end - start for start, end in self.ranges())

    def add(self, value: int) -> None:
        """Add one integer; adding it again changes nothing."""
        i = bisect_right(self._starts, value)
        if i > 0 and value < self._ends[i - 1]:
            return
        touches_left = i > 0 and self._ends[i - 1] == value
        touches_right = i < len(self._starts) and self._starts[i] == value + 1
        if touches_left and touches_right:
            self._ends[i - 1] = self._ends[i]
            del self._starts[i], self._ends[i]
        elif touches_left:
            self._ends[i - 1] = value + 1
        elif touches_right:
            self._starts[i] = value
        else:
            self._starts.insert(i, value)
            self._ends.insert(i, value + 1)

    def ranges(self) -> list[tuple[int, int]]:
        """The ranges in order, end excluded. Example: {1, 2, 5} gives [(1, 3), (5, 6)]."""
        return list(zip(self._starts, self._ends, strict=True))
