"""When a group is admitted: the staleness rule in learner steps, and the room that is left in bytes.

Nothing here waits. ``docs/staleness.md`` proves that admission and planning together keep every lag within ``max_lag``,
and that a bound on bytes never makes everybody wait. Letters: B groups per learner step, u engine version, w version
that is planned next, k learner steps from w on.
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
    """The bound and the unit it is counted in.

    Attributes:
        max_lag: η, learner steps between a group's oldest token and its consumption, at most. 0 is synchronous.
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

        With d = u + η the group is admitted if, for each k from d - w to η, the open groups due at w + k or earlier
        and this one number at most (k + 1)·B, which is what the steps w … w + k consume. It costs O(η).
        ``open_by_deadline`` counts the groups leased or stored, not yet planned; none is due before ``version``, w.

        Example: with B = 4, max_lag = 1 and nothing planned, an engine at the learner's version is admitted while
        fewer than 8 groups are open. An engine one version behind is also refused when 4 are due at w.
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
        """How many more groups `admits` would let begin on that engine one after another; 0 where it refuses."""
        first = self.deadline(engine_version) - version
        if first < 0:
            return 0
        due = list(accumulate(open_by_deadline.get(version + k, 0) for k in range(self.max_lag + 1)))
        return max(0, min((k + 1) * self.groups_per_step - due[k] for k in range(first, self.max_lag + 1)))

    def required(self, open_by_deadline: Mapping[int, int], *, version: int) -> list[int]:
        """How many groups due soon the plan of ``version`` must hold, as ``max_lag + 1`` numbers.

        Entry k is how many of the open groups due at w + k or earlier it must hold, so that the steps w + 1 … w + k can
        take the rest. Never more than B while admission is obeyed.
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
        """How many running groups the plan of ``version`` would have to hold: ``max_lag + 1`` numbers.

        ``ready_by_deadline`` are the stored ones of ``open_by_deadline``. Entry k counts those due by w + k, less the
        entries before it.
        """
        num_ready = num_missing = 0
        missing = []
        for k, required in enumerate(self.required(open_by_deadline, version=version)):
            num_ready += ready_by_deadline.get(version + k, 0)
            missing.append(max(0, required - num_ready - num_missing))
            num_missing += missing[-1]
        return missing


class Room:
    """The bytes that each store may still take of ``max_bytes``; 0 is no bound.

    A single store shares its bound with the saved prefixes; beside several stores, or stores that join, the prefixes
    have one of that size.

    Attributes:
        is_shared: Whether there is one store, from the beginning.
    """

    def __init__(self, groups: GroupTable, *, max_bytes: int, groups_per_step: int) -> None:
        self._groups = groups
        self._max_bytes = max_bytes
        self._groups_per_step = groups_per_step
        self.is_shared = len(groups.space.stores) == 1

    @property
    def max_bytes(self) -> int:
        """Bytes that all stores may hold."""
        return self._max_bytes * len(self._groups.space.open_stores())

    def has_room(self, num_granted: int = 0, num_freed_bytes: int = 0) -> bool:
        """Whether one more group fits beside what is held and what the running leases are expected to bring.

        Where nothing runs and no batch is stored or planned, one group may always begin: nothing else would make room.
        ``num_granted`` leases are granted in the same breath, and drop saved prefixes of ``num_freed_bytes``.
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
        """Whether a group may come without a reservation: there is one store, and it has so many bytes to spare."""
        space = self._groups.space
        return self.is_shared and space.stored_bytes[0] + space.prefix_bytes + num_bytes <= self._max_bytes

    def _num_free(self, store: int, group: Group) -> float:
        """Bytes that a store may take for a group, in the place of what it holds of it."""
        if not self._max_bytes:
            return math.inf
        num_held = self._groups.space.stored_bytes[store] - (group.num_bytes if store == group.store else 0)
        if self.is_shared:
            num_held += self._groups.space.prefix_bytes - group.prefix_bytes
        return self._max_bytes - num_held

    def reserve(self, group: Group, num_bytes: int, *, host: str, may_evict: bool) -> Reserved:
        """The store that takes ``num_bytes`` of a running group, and the groups that give way for it.

        The store of ``host`` takes them where they fit, else the emptiest one. ``may_evict`` says that no batch is
        planned, and none can be made of what is stored. Raises `StoreFull` if it fits later, `ReplayBufferError` if it
        never will.
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
            raise StoreFull(f"{num_bytes} bytes wait for a store; none has joined, or all are gone")
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
        """Groups that hold ``num_bytes`` of a store and are needed later than ``group``; None if they hold less.

        Saved prefixes go first, those of waiting prompts before those of running ones; then the latest deadlines.
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
        """Refuse progress of a running group that does not fit. Raises `StoreFull` if it does not fit now."""
        if not self._max_bytes:
            return
        num_held = self._groups.space.prefix_bytes - group.prefix_bytes
        num_held += self._groups.space.stored_bytes[0] if self.is_shared else 0
        if num_held + num_bytes > self._max_bytes:
            raise StoreFull(
                f"{num_bytes} bytes of progress do not fit beside the {num_held} held, buffer.max_stored_bytes is "
                f"{self._max_bytes}; nothing was saved"
            )
