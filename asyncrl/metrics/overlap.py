"""Where the training time went: generation and training at the same time, one of them alone, or neither."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

Interval = tuple[float, float]
"""A span of time [start, end), in seconds since the epoch."""

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """The training time in four parts, in seconds, which add up to it.

    The learner is busy while any of its roles computes: scores of the critic, the reference and the reward model, and
    the updates of policy and critic. The fleet's parts are means over its engines; an engine is busy while it has a
    training request. What is left are weight updates, checkpoints, and waiting.

    Attributes:
        both_s: The learner and the engine were busy.
        learner_alone_s: The learner was busy, and the engine waited: for admission, or for weights.
        fleet_alone_s: The engine was busy, and the learner waited: for a batch.
        neither_s: Neither was busy.
    """

    both_s: float
    learner_alone_s: float
    fleet_alone_s: float
    neither_s: float

    @classmethod
    def within(cls, span: Interval, *, engines: Sequence[Iterable[Interval]], learner: Iterable[Interval]) -> Overlap:
        """Measure a span of time.

        Args:
            span: Training, from its beginning to its end.
            engines: When each engine was busy, in any order.
            learner: When any role of the learner was; these may overlap.
        """
        trained = _clipped(learner, span)
        generated = [_clipped(engine, span) for engine in engines]
        share = 1 / max(1, len(generated))
        both_s = share * sum(_length_of_both(engine, trained) for engine in generated)
        fleet_s, learner_s = share * sum(_length(engine) for engine in generated), _length(trained)
        return cls(
            both_s=both_s,
            learner_alone_s=learner_s - both_s,
            fleet_alone_s=fleet_s - both_s,
            neither_s=max(0.0, span[1] - span[0] - learner_s - fleet_s + both_s),
        )


def joined(spans: Iterable[tuple[Number, Number]]) -> tuple[tuple[Number, Number], ...]:
    """Sorted, disjoint spans. Example: [(2, 3), (0, 2), (5, 6)] gives ((0, 3), (5, 6))."""
    found: list[tuple[Number, Number]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return tuple(found)


def _clipped(spans: Iterable[Interval], span: Interval) -> Sequence[Interval]:
    clipped = ((max(start, span[0]), min(end, span[1])) for start, end in spans)
    return joined((start, end) for start, end in clipped if start < end)


def _length(spans: Iterable[Interval]) -> float:
    return sum(end - start for start, end in spans)


def _length_of_both(left: Sequence[Interval], right: Sequence[Interval]) -> float:
    """Seconds in which two sorted, disjoint lists of spans overlap."""
    total, place = 0.0, 0
    for start, end in left:
        while place < len(right) and right[place][1] <= start:
            place += 1
        for other_start, other_end in right[place:]:
            if other_start >= end:
                break
            total += min(end, other_end) - max(start, other_start)
    return total
