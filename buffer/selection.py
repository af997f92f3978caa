"""Which finished groups the buffer keeps, and which of them a batch takes: filters, selection orders, and the window.

A filter or an order is a function of a group's `GroupSummary`, built in or at ``module:function``. The window allows a
batch to be filled in any order of preference without missing a deadline.
"""

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from typing import Any, TypeVar

from asyncrl.core.errors import ReplayBufferError
from asyncrl.core.types import GroupSummary

Found = TypeVar("Found", bound=Callable[..., Any])
Filter = Callable[[GroupSummary], bool]
"""Returns whether to keep a group."""
Preference = Callable[[GroupSummary, int], float]
"""Maps a group and its deadline to a number; the smallest comes first, equal ones in the order of storing."""
Entry = tuple[float, int, int]
"""Rank, place in the order of storing, group id."""


def _rewards_differ(summary: GroupSummary) -> bool:
    """A group of equal rewards has zero advantages everywhere (DAPO, arXiv 2503.14476, equation 11)."""
    return len(set(summary.rewards)) > 1


def _has_tokens(summary: GroupSummary) -> bool:
    """A group without policy tokens has no loss."""
    return summary.num_tokens > 0


FILTERS: Mapping[str, Filter] = {"equal_rewards": _rewards_differ, "no_tokens": _has_tokens}
"""Name to filter. A dropped group is counted under the name."""


def find_filters(names: Sequence[str]) -> dict[str, Filter]:
    """Name to filter, built in or at ``module:function``, in order. Raises `ValueError` if there is no such filter."""
    return {name: find(name, FILTERS, option="buffer.filters") for name in names}


def dropped_by(filters: Mapping[str, Filter], summary: GroupSummary) -> str | None:
    """The first filter that drops the group, or None."""
    return next((name for name, keeps in filters.items() if not keeps(summary)), None)


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
    """The built-in order of this name, or the function at ``module:function``. Raises `ValueError` if there is none."""
    return find(name, ORDERS, option="buffer.order")


def rank_of(prefer: Preference, summary: GroupSummary, deadline: int) -> float:
    """The rank of a group in the selection order. Raises `ReplayBufferError` if the order does not return a number."""
    rank = prefer(summary, deadline)
    if not isinstance(rank, int | float) or rank != rank:
        raise ReplayBufferError(f"buffer.order must return a number, got {rank!r:.40} for group {summary.group_id}")
    return float(rank)


class Window:
    """Which deadlines a batch may still take while it is filled in any order of preference.

    The batch may take a group due at w + k if, for every j < k, enough seats remain for the required groups due at
    w + j or earlier. A closed deadline stays closed, so filling a batch costs O(B·max_lag).
    """

    def __init__(self, required: Sequence[int], seats: int) -> None:
        self._slack = [seats - number for number in required]
        self._last = next((j for j, slack in enumerate(self._slack) if slack <= 0), len(self._slack))

    @property
    def last(self) -> int:
        """Largest k whose groups may be taken now."""
        return self._last

    def take(self, k: int) -> None:
        """Seat a group due at w + k."""
        for j in range(min(k, len(self._slack))):
            self._slack[j] -= 1
            if self._slack[j] <= 0 and j < self._last:
                self._last = j


def choose_batch(
    ready: Mapping[int, Sequence[Entry]], required: Sequence[int], *, version: int, seats: int
) -> list[int]:
    """Choose ``seats`` groups: at each seat the most preferred group that the window allows.

    ``ready`` maps each deadline to its stored groups, sorted by rank. They satisfy ``required``, which comes from
    `StalenessRule.required`.
    """
    window = Window(required, seats)
    tops = [(entries[0], deadline, 0) for deadline, entries in ready.items() if entries]
    heapify(tops)
    batch: list[int] = []
    while len(batch) < seats:
        (_, _, group_id), deadline, place = tops[0]
        if deadline - version > window.last:
            heappop(tops)
            continue
        batch.append(group_id)
        window.take(deadline - version)
        entries = ready[deadline]
        if place + 1 < len(entries):
            heapreplace(tops, (entries[place + 1], deadline, place + 1))
        else:
            heappop(tops)
    return batch


def find(name: str, built_ins: Mapping[str, Found], *, option: str) -> Found:
    """Return a function of ``built_ins``, or import ``module:function``; its errors become `ReplayBufferError`.

    Raises `ValueError` if ``name`` is neither. ``option`` names the option that holds ``name``. Example:
    ``"my_orders:longest_first"``.
    """
    if name in built_ins:
        return built_ins[name]
    module_name, colon, function_name = name.partition(":")
    if not (module_name and colon and function_name):
        raise ValueError(f"{option} names {name!r}; use one of {sorted(built_ins)}, or your own module:function")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{option}: {name!r} cannot be imported ({error}); is its folder on PYTHONPATH?") from error
    if not callable(function):
        raise ValueError(f"{option}: {name!r} must be a function, got {type(function).__name__}")
    return _with_origin(function, f"{option} {name!r}")


def _with_origin(function: Callable[..., Any], what: str) -> Any:
    """Wrap a user's function: its errors name their origin and fail one request, not the server."""

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Exception as error:
            raise ReplayBufferError(f"{what} raised {type(error).__name__}: {error}") from error

    return call
