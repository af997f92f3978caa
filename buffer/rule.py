"""When a group is admitted: the staleness rule in learner steps, and the free room in bytes.

Nothing here waits. ``docs/staleness.md`` proves that admission and planning keep every lag within ``max_lag``, and that
the bound on bytes causes no deadlock. Letters: B groups per learner step, u engine version, w version that is planned
next, k learner steps after w.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

from asyncrl.core.errors import ReplayBufferError, StoreFull

from .commands import Reserved
from .groups import Group, GroupState, GroupTable


@dataclass(frozen=True, kw_only=True, slots=True)
class StalenessRule:
    """The staleness bound in learner steps.

    Attributes:
        max_lag: η, the most learner steps between a group's oldest token and its consumption. 0 is synchronous.
        groups_per_step: B.
    """

    max_lag: int
    groups_per_step: int

    def __post_init__(self) -> None:
        if self.max_lag < 0:
            raise ValueError(f"max_lag must be >= 0, got {self.max_lag}; use 0 for synchronous training")
        if self.groups_per_step < 1:
            raise ValueError(f"groups_per_step must be >= 1, got {self.groups_per_step}")

    def deadline(self, engine_version: int) -> int:
        """Last learner version that may consume a group admitted at ``engine_version``."""
        return engine_version + self.max_lag

    def admits(self, open_by_deadline: Mapping[int, int], *, version: int, engine_version: int) -> bool:
        """Whether one more group may begin on an engine that serves ``engine_version`` (u, at most the learner's).

        The new group has the deadline d = u + η. It is admitted if for each k from d - w to η: the number of open
        groups due at w + k or earlier, plus 1, is at most (k + 1)·B. The steps w … w + k consume (k + 1)·B groups.
        The check costs O(η).

        ``open_by_deadline`` counts the groups that are leased or stored and not yet planned, by deadline. No open group
        is due before ``version``, w.

        Example: with B = 4, max_lag = 1 and nothing planned, an engine at the learner's version is admitted while
        fewer than 8 groups are open. An engine one version behind is also refused when 4 groups are due at w.
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
        """How many more groups `admits` would admit on that engine one after another."""
        first = self.deadline(engine_version) - version
        if first < 0:
            return 0
        due = list(accumulate(open_by_deadline.get(version + k, 0) for k in range(self.max_lag + 1)))
        return max(0, min((k + 1) * self.groups_per_step - due[k] for k in range(first, self.max_lag + 1)))

    def required(self, open_by_deadline: Mapping[int, int], *, version: int) -> list[int]:
        """How many open groups of each deadline the plan of ``version`` must take, as ``max_lag + 1`` numbers.

        Entry k counts open groups due at w + k or earlier. The plan must take this many of them, because the steps
        w + 1 … w + k can consume only k·B. Entries are at most B if every group was admitted by `admits`.
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
        """How many running groups the plan of ``version`` would have to take, as ``max_lag + 1`` numbers.

        ``ready_by_deadline`` counts the stored groups in ``open_by_deadline``. Entry k counts running groups due at
        w + k or earlier, without the groups that earlier entries count.
        """
        num_ready = num_missing = 0
        missing = []
        for k, required in enumerate(self.required(open_by_deadline, version=version)):
            num_ready += ready_by_deadline.get(version + k, 0)
            missing.append(max(0, required - num_ready - num_missing))
            num_missing += missing[-1]
        return missing


class Room:
    """The free bytes of each store under the bound ``max_bytes``; 0 means no bound.

    The saved prefixes of running groups take space too. With a single store, they share the bound of that store.
    Otherwise the bound applies to the saved prefixes separately.

    Attributes:
        is_shared: Whether the saved prefixes share the bound of the store.
    """

    def __init__(self, groups: GroupTable, *, max_bytes: int, groups_per_step: int) -> None:
        self._groups = groups
        self._max_bytes = max_bytes
        self._groups_per_step = groups_per_step
        self.is_shared = len(groups.space.stores) == 1

    @property
    def max_bytes(self) -> int:
        """Bytes that all stores together may hold."""
        return self._max_bytes * len(self._groups.space.open_stores())

    def has_room(self, num_granted: int = 0, num_freed_bytes: int = 0) -> bool:
        """Whether one more group fits beside the held bytes and the expected bytes of the running groups.

        One group may always begin if no group runs and no batch is stored or planned: nothing else would free bytes.
        The caller is about to grant ``num_granted`` other leases, which drop ``num_freed_bytes`` of saved prefixes.
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
        """Whether a group needs no reservation: there is a single store, and it has ``num_bytes`` free."""
        space = self._groups.space
        return self.is_shared and space.stored_bytes[0] + space.prefix_bytes + num_bytes <= self._max_bytes

    def _num_free(self, store: int, group: Group) -> float:
        """Bytes that a store can give to a group; bytes that the group already has there count as free."""
        if not self._max_bytes:
            return math.inf
        num_held = self._groups.space.stored_bytes[store] - (group.num_bytes if store == group.store else 0)
        if self.is_shared:
            num_held += self._groups.space.prefix_bytes - group.prefix_bytes
        return self._max_bytes - num_held

    def reserve(self, group: Group, num_bytes: int, *, host: str, may_evict: bool) -> Reserved:
        """Choose the store for ``num_bytes`` of a running group, and the groups to evict for it.

        The store of ``host`` is chosen if the bytes fit there, else the emptiest store. ``may_evict`` is true if no
        batch is planned and no batch can be made of the stored groups.

        Raises:
            StoreFull: The bytes do not fit now.
            ReplayBufferError: The group is larger than a store.
        """
        if 0 < num_bytes <= group.num_bytes:  # reserved before
            return Reserved(store=group.store)
        if 0 < self._max_bytes < num_bytes:
            raise ReplayBufferError(
                f"a group of {num_bytes} bytes is larger than buffer.max_stored_bytes={self._max_bytes}; raise it"
            )
        stores, free = self._groups.space.stores, lambda store: self._num_free(store, group)
        emptiest_first = sorted(self._groups.space.open_stores(), key=free, reverse=True)
        if not emptiest_first:
            raise StoreFull(f"{num_bytes} bytes wait for a store; no store has joined, or all stores are gone")
        fitting = [store for store in emptiest_first if num_bytes <= free(store)]
        if fitting:
            return Reserved(store=next((store for store in fitting if host and stores[store].host == host), fitting[0]))
        for store in emptiest_first if may_evict else ():
            evicted = self._who_gives_way(group, store, num_bytes - self._num_free(store, group))
            if evicted is not None:
                return Reserved(store=store, evicted=evicted)
        raise StoreFull(
            f"{num_bytes} bytes do not fit: {free(emptiest_first[0])} of buffer.max_stored_bytes={self._max_bytes} are "
            "free; the group is sent again when a batch has left"
        )

    def _who_gives_way(self, group: Group, store: int, num_bytes: float) -> tuple[int, ...] | None:
        """Groups to evict for ``group``: together they hold ``num_bytes`` in the store; None if they hold less.

        Saved prefixes are evicted first: the prefixes of queued groups, then of running groups. Stored groups that are
        due later than ``group`` follow, the latest deadline first.
        """
        prefixes = [other for other in self._groups if other.prefix_bytes and other is not group]
        prefixes.sort(key=lambda other: (other.state is GroupState.leased, -other.place))
        stored = [other for other in self._groups.of_state(GroupState.stored) if other.store == store]
        later = [other for other in stored if other.deadline > group.deadline]
        later.sort(key=lambda other: (-other.deadline, -other.place))
        evicted: list[int] = []
        for other in [*(prefixes if self.is_shared else ()), *later]:
            evicted.append(other.group_id)
            num_bytes -= other.prefix_bytes if other.summary is None else other.num_bytes
            if num_bytes <= 0:
                return tuple(evicted)
        return None

    def check_prefix(self, group: Group, num_bytes: int) -> None:
        """Raise `StoreFull` if the saved prefix of a running group does not fit now."""
        if not self._max_bytes:
            return
        num_held = self._groups.space.prefix_bytes - group.prefix_bytes
        num_held += self._groups.space.stored_bytes[0] if self.is_shared else 0
        if num_held + num_bytes > self._max_bytes:
            raise StoreFull(
                f"{num_bytes} bytes of progress do not fit beside {num_held} bytes held, buffer.max_stored_bytes is "
                f"{self._max_bytes}; the progress was not saved"
            )
