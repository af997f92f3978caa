"""Admission of groups and selection of batches: the staleness rule, the bound on bytes, filters and orders.

``docs/staleness.md`` proves that every lag stays within ``max_lag``, and that the bound on bytes causes no deadlock.
B is the number of groups per learner step. u is the engine version. w is the version that is planned next. k is a
number of learner steps after w.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from itertools import accumulate
from statistics import pvariance
from typing import Any

from asyncrl.core.errors import ReplayBufferError, StoreFull
from asyncrl.core.registry import Registry
from asyncrl.core.types import GroupSummary

from .groups import Entry, Group, GroupState, GroupTable

Filter = Callable[[GroupSummary], bool]
"""Maps the metadata of a finished group to True if the buffer should keep the group."""
Preference = Callable[[GroupSummary, int], float]
"""Maps a group's metadata and deadline to a sort key, a number. Batches take groups with a small sort key first. Among
equal sort keys, they take the group that was stored earliest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StalenessRule:
    """The staleness bound in learner steps.

    Attributes:
        max_lag: η, the largest number of learner steps between a group's oldest token and its consumption. 0 means
            synchronous training.
        groups_per_step: B, the number of groups per learner step.
        max_uses: Largest number of learner steps that train on a group.
    """

    max_lag: int
    groups_per_step: int
    max_uses: int = 1

    def __post_init__(self) -> None:
        if self.max_lag < 0:
            raise ValueError(f"max_lag must be >= 0, got {self.max_lag}; use 0 for synchronous training")
        if self.groups_per_step < 1:
            raise ValueError(f"groups_per_step must be >= 1, got {self.groups_per_step}")
        if not 1 <= self.max_uses <= self.max_lag + 1:
            raise ValueError(
                f"buffer.max_uses must be in 1..buffer.max_lag + 1 = {self.max_lag + 1}, got {self.max_uses}: each use "
                "of a group is one learner step, and max_lag limits every use; raise max_lag, or lower max_uses"
            )

    def deadline(self, engine_version: int) -> int:
        """Return the last learner version that may consume a group admitted at ``engine_version``."""
        return engine_version + self.max_lag

    def admits(self, open_by_deadline: Mapping[int, int], *, version: int, engine_version: int) -> bool:
        """Return whether one more group may begin on an engine that serves ``engine_version`` (u).

        A group's deadline is the last learner version that may consume the group. ``open_by_deadline`` maps each
        deadline to its number of open groups: leased groups, and stored groups that are in no batch. ``version`` (w) is
        the version that is planned next. The caller ensures that all deadlines are w or later, and that u is at most
        the learner's version.

        η is ``max_lag``, and B is ``groups_per_step``. The new group has the deadline d = u + η. For each k from d - w
        to η, at most (k + 1)·B open groups, including the new group, may have the deadline w + k or an earlier
        deadline. The check costs O(η).

        Example: B = 4, max_lag = 1, and no batch is planned. An engine at the learner's version may begin a group while
        fewer than 8 groups are open. An engine one version behind also needs fewer than 4 groups with the deadline w.
        """
        first = self.deadline(engine_version) - version
        if first < 0:
            return False
        due = 0
        for k in range(self.max_lag + 1):
            due += open_by_deadline.get(version + k, 0)
            if k >= first and due + 1 > (k + 1) * self.groups_per_step:
                return False
        return True

    def budget(self, open_by_deadline: Mapping[int, int], *, version: int, engine_version: int) -> int:
        """Return how many new groups `admits` allows on engines that serve ``engine_version``."""
        first = self.deadline(engine_version) - version
        if first < 0:
            return 0
        due = list(accumulate(open_by_deadline.get(version + k, 0) for k in range(self.max_lag + 1)))
        return max(0, min((k + 1) * self.groups_per_step - due[k] for k in range(first, self.max_lag + 1)))

    def required(self, open_by_deadline: Mapping[int, int], *, version: int) -> list[int]:
        """Return how many open groups the batch of ``version`` (w) must take, so that no group misses its deadline.

        A group's deadline is the last learner version that may consume the group. Open groups are leased groups, and
        stored groups that are in no batch. The result has ``max_lag + 1`` numbers. Number k is about the open groups
        whose deadline is at most w + k. The k later steps up to w + k can consume k·B of these groups (B is
        ``groups_per_step``). The batch of w must take the other groups. If `admits` admitted every group, no number is
        larger than B.
        """
        due = 0
        required = []
        for k in range(self.max_lag + 1):
            due += open_by_deadline.get(version + k, 0)
            required.append(max(0, due - k * self.groups_per_step))
        return required

    def missing(
        self, open_by_deadline: Mapping[int, int], ready_by_deadline: Mapping[int, int], *, version: int
    ) -> list[int]:
        """Return how many running groups the batch of ``version`` (w) must take, so that no group misses its deadline.

        A group's deadline is the last learner version that may consume the group. The result has ``max_lag + 1``
        numbers. Number k counts groups with a deadline of at most w + k that are not counted in the numbers before it.
        ``ready_by_deadline`` counts only the stored groups of ``open_by_deadline``.
        """
        num_ready = num_missing = 0
        missing = []
        for k, required in enumerate(self.required(open_by_deadline, version=version)):
            num_ready += ready_by_deadline.get(version + k, 0)
            missing.append(max(0, required - num_ready - num_missing))
            num_missing += missing[-1]
        return missing


class Room:
    """Decides whether bytes are free in the stores. Each store may hold ``max_bytes`` bytes; 0 means no bound.

    A single store and the saved prefixes (tokens of unfinished groups) share one bound. With several stores, the saved
    prefixes have their own bound.

    Attributes:
        is_shared: Whether the single store and the saved prefixes share one bound.
    """

    def __init__(self, groups: GroupTable, *, max_bytes: int, groups_per_step: int) -> None:
        self._groups = groups
        self._max_bytes = max_bytes
        self._groups_per_step = groups_per_step
        self.is_shared = len(groups.space.stores) == 1

    @property
    def max_bytes(self) -> int:
        """Bound on the total number of bytes in all running stores."""
        return self._max_bytes * len(self._groups.space.open_stores())

    def has_room(self, num_granted: int = 0, num_freed_bytes: int = 0) -> bool:
        """Return whether one more group fits, in addition to all stored bytes and the running groups' expected bytes.

        The caller will grant ``num_granted`` leases before this group's lease, so ``num_granted`` more groups count as
        running. ``num_freed_bytes`` is the size of the saved prefixes that the buffer deletes with these leases.

        If no group runs, no batch is planned and no batch can be filled, one group may always begin. This exception
        prevents a deadlock: without the group, no batch would be consumed, and no bytes would become free.
        """
        groups = self._groups
        if not self._max_bytes:
            return True
        is_idle = not (num_granted or groups.num_leased or groups.num_planned)
        if is_idle and groups.num_stored < self._groups_per_step:
            return True
        num_bytes = sum(groups.space.stored_bytes) + groups.space.prefix_bytes - num_freed_bytes
        num_bytes += (groups.num_leased + num_granted + 1) * groups.space.expected_bytes
        return num_bytes <= self.max_bytes

    def fits(self, num_bytes: int) -> bool:
        """Return whether trajectories of ``num_bytes`` bytes fit now without a reservation.

        With several stores, all trajectories need a reservation.
        """
        space = self._groups.space
        return self.is_shared and space.stored_bytes[0] + space.prefix_bytes + num_bytes <= self._max_bytes

    def _num_free(self, store: int, group: Group) -> float:
        """Return the free bytes of a store. The bytes of ``group`` count as free."""
        if not self._max_bytes:
            return math.inf
        num_held = self._groups.space.stored_bytes[store] - (group.num_bytes if store == group.store else 0)
        if self.is_shared:
            num_held += self._groups.space.prefix_bytes - group.prefix_bytes
        return self._max_bytes - num_held

    def reserve(self, group: Group, num_bytes: int, *, host: str, may_evict: bool) -> tuple[int, tuple[int, ...]]:
        """Choose a store for a running group's trajectories of ``num_bytes`` bytes. Nothing is reserved or evicted yet.

        The store on ``host`` comes first. If the bytes do not fit there, choose the store with the most free bytes. If
        the bytes fit in no store and ``may_evict``, choose groups to evict. Returns a pair: the number of the store,
        and the ids of the groups to evict.

        Raises:
            StoreFull: The bytes do not fit now.
            ReplayBufferError: The group is larger than a store.
        """
        if 0 < num_bytes <= group.num_bytes:  # an earlier call has reserved the bytes
            return group.store, ()
        if 0 < self._max_bytes < num_bytes:
            raise ReplayBufferError(
                f"a group of {num_bytes} bytes exceeds buffer.max_stored_bytes={self._max_bytes}; raise this limit"
            )
        stores, free = self._groups.space.stores, lambda store: self._num_free(store, group)
        emptiest_first = sorted(self._groups.space.open_stores(), key=free, reverse=True)
        if not emptiest_first:
            raise StoreFull(f"no store can take {num_bytes} bytes: no store has joined, or all stores are lost")
        fitting = [store for store in emptiest_first if num_bytes <= free(store)]
        if fitting:
            return next((store for store in fitting if host and stores[store].host == host), fitting[0]), ()
        for store in emptiest_first if may_evict else ():
            evicted = self._who_gives_way(group, store, num_bytes - self._num_free(store, group))
            if evicted is not None:
                return store, evicted
        raise StoreFull(
            f"{num_bytes} bytes do not fit: {free(emptiest_first[0])} of buffer.max_stored_bytes={self._max_bytes} are "
            "free; the worker sends the group again after the learner has consumed a batch"
        )

    def _who_gives_way(self, group: Group, store: int, num_bytes: float) -> tuple[int, ...] | None:
        """Return the groups to evict so that ``num_bytes`` bytes become free, or None if too few bytes can be freed.

        The groups that the learner has already trained on come first. They are stored only for a further training step.
        """
        prefixes = [other for other in self._groups if other.prefix_bytes and other is not group]
        prefixes.sort(key=lambda other: (other.state is GroupState.leased, -other.place))
        stored = [other for other in self._groups.of_state(GroupState.stored) if other.store == store]
        used = [other for other in stored if other.uses]
        later = [other for other in stored if other.deadline > group.deadline and not other.uses]
        later.sort(key=lambda other: (-other.deadline, -other.place))
        evicted: list[int] = []
        for other in [*used, *(prefixes if self.is_shared else ()), *later]:
            evicted.append(other.group_id)
            num_bytes -= other.prefix_bytes if other.summary is None else other.num_bytes
            if num_bytes <= 0:
                return tuple(evicted)
        return None

    def check_prefix(self, group: Group, num_bytes: int) -> None:
        """Raise `StoreFull` if ``num_bytes`` bytes of a running group's new saved prefix (tokens so far) do not fit.

        The bytes of the group's earlier prefix count as free.
        """
        if not self._max_bytes:
            return
        num_held = self._groups.space.prefix_bytes - group.prefix_bytes
        num_held += self._groups.space.stored_bytes[0] if self.is_shared else 0
        if num_held + num_bytes > self._max_bytes:
            raise StoreFull(
                f"{num_bytes} bytes of a prefix do not fit: {num_held} bytes are in use, and buffer.max_stored_bytes "
                f"is {self._max_bytes}; the prefix was not saved"
            )


FILTERS: Registry[Filter] = Registry("buffer.filters")
"""Filters by name. The buffer counts the groups that each filter drops."""
ORDERS: Registry[Preference] = Registry("buffer.order")
"""Selection orders by name."""


@FILTERS.register("equal_rewards")
def _has_signal(summary: GroupSummary) -> bool:
    """Drop a group with equal rewards, because its advantages are all zero (DAPO, arXiv 2503.14476, equation 11)."""
    return not summary.has_equal_rewards


@FILTERS.register("no_tokens")
def _has_tokens(summary: GroupSummary) -> bool:
    """Drop a group without policy tokens, because only policy tokens have a loss."""
    return summary.num_tokens > 0


@ORDERS.register("fifo")
def _as_stored(summary: GroupSummary, deadline: int) -> float:
    return 0.0


@ORDERS.register("earliest_deadline")
def _due_first(summary: GroupSummary, deadline: int) -> float:
    return float(deadline)


@ORDERS.register("freshest_first")
def _youngest_oldest_token_first(summary: GroupSummary, deadline: int) -> float:
    return float(-summary.oldest_version)


@ORDERS.register("shortest_first")
def _fewest_response_tokens_first(summary: GroupSummary, deadline: int) -> float:
    return float(sum(summary.response_lengths))


@ORDERS.register("reward_spread")
def _largest_reward_variance_first(summary: GroupSummary, deadline: int) -> float:
    """Take groups with a large variance of rewards first. The variance is 0 for a group without finite rewards."""
    return -pvariance(summary.rewards) if summary.is_scored and summary.rewards else 0.0


def find_filters(names: Sequence[str]) -> dict[str, Filter]:
    """Return a dict that maps each name in ``names`` to a filter. Raises `ValueError` for an unknown name."""
    return {name: _find(FILTERS, name) for name in names}


def dropped_by(filters: Mapping[str, Filter], summary: GroupSummary) -> str | None:
    """Return the name of the first filter that drops the group, or None."""
    return next((name for name, keeps in filters.items() if not keeps(summary)), None)


def find_order(name: str) -> Preference:
    """Return the function that computes the sort keys of the order ``name``. Raises `ValueError` for an unknown name.

    Batches take stored groups with small sort keys first.
    """
    return _find(ORDERS, name)


def rank_of(prefer: Preference, summary: GroupSummary, deadline: int) -> float:
    """Return the sort key of a group, which the function ``prefer`` computes. Batches take small sort keys first.

    Raises `ReplayBufferError` if ``prefer`` does not return a number.
    """
    rank = prefer(summary, deadline)
    if not isinstance(rank, int | float) or rank != rank:
        raise ReplayBufferError(f"buffer.order must return a number, got {rank!r:.40} for group {summary.group_id}")
    return float(rank)


class Window:
    """Computes which deadlines are still allowed for the next group of a partly filled batch.

    A group's deadline is the last learner version that may consume the group. w is the batch's version. The batch must
    take some groups with early deadlines. So the batch may take a group with the deadline w + k only if enough seats
    (positions in the batch) remain for the required groups with earlier deadlines. An excluded deadline stays excluded,
    so filling a batch of B groups costs O(B·max_lag).
    """

    def __init__(self, required: Sequence[int], seats: int) -> None:
        self._slack = [seats - number for number in required]
        self._last = next((j for j, slack in enumerate(self._slack) if slack <= 0), len(self._slack))

    @property
    def last(self) -> int:
        """Largest k such that the batch of version w may now take a group with the deadline w + k."""
        return self._last

    def take(self, k: int) -> None:
        """Record that the batch of version w takes a group with the deadline w + k."""
        for j in range(min(k, len(self._slack))):
            self._slack[j] -= 1
            if self._slack[j] <= 0 and j < self._last:
                self._last = j


def choose_batch(
    ready: Mapping[int, Sequence[Entry]], required: Sequence[int], *, version: int, seats: int
) -> list[int]:
    """Choose ``seats`` groups for a batch, and return their ids.

    ``ready`` maps each deadline to its stored groups, sorted by sort key. The batch must take at least ``required[k]``
    of the groups whose deadline is at most ``version + k`` (`StalenessRule.required`). ``ready`` must hold enough
    groups.

    The `Window` keeps seats free for the required groups, so it limits the deadlines that the batch may still take.
    Until the batch is full, take the group with the smallest sort key among the groups with such deadlines.
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


def _find(registry: Registry[Any], name: str) -> Any:
    """Return the filter or the order ``name``. Errors of a user's function become `ReplayBufferError`.

    A `ReplayBufferError` fails one request. It does not end the server.
    """
    function = registry.get(name)
    if name in registry.names():
        return function

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Exception as error:
            what = f"{registry.option} {name!r} raised {type(error).__name__}: {error}"
            raise ReplayBufferError(what) from error

    return call
