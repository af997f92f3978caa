"""Selection orders by name: which stored groups a batch prefers, inside the window that keeps every deadline."""

from collections.abc import Callable, Mapping

from asyncrl.protocol.types import GroupSummary

from .naming import find

Preference = Callable[[GroupSummary, int], float]
"""From a group and its deadline to a number; the smallest is taken first, ties in the order of storing."""


def fifo(summary: GroupSummary, deadline: int) -> float:
    """Stored first, taken first."""
    return 0


def earliest_deadline(summary: GroupSummary, deadline: int) -> float:
    """Due first, taken first."""
    return deadline


def freshest_first(summary: GroupSummary, deadline: int) -> float:
    """Youngest oldest token first: the smallest lag that the window allows."""
    return -summary.oldest_version


def shortest_first(summary: GroupSummary, deadline: int) -> float:
    """Fewest response tokens first."""
    return sum(summary.response_lengths)


ORDERS: Mapping[str, Preference] = {
    order.__name__: order for order in (fifo, earliest_deadline, freshest_first, shortest_first)
}


def find_order(name: str) -> Preference:
    """The built-in order of this name, or the function at ``module:function``.

    Raises:
        ValueError: there is none.
    """
    return find(name, ORDERS, option="buffer.order")
