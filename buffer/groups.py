"""The table of unfinished prompt groups: one record per group, with indexes to find groups by state or deadline.

`buffer.ledger` decides when a group changes its state.
"""

from collections import Counter, deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from heapq import heapify, heappop, heappush, heapreplace
from itertools import islice
from operator import attrgetter
from typing import Any

from msgspec import Struct, convert, to_builtins

from asyncrl.core.errors import UnknownGroup
from asyncrl.core.types import GroupSummary

from .commands import GrantedLease, Progress

Entry = tuple[float, int, int]
"""A stored group: its sort key (`Group.rank`), its position in the order of storing, and its id."""


class GroupState(StrEnum):
    """The state of an unfinished group.

    The group waits for a worker (``queued``), a worker generates the group (``leased``), its trajectories are complete
    (``stored``), or it is in a batch for the learner (``planned``).
    """

    queued = "queued"
    leased = "leased"
    stored = "stored"
    planned = "planned"


class StorePlace(Struct, kw_only=True, array_like=True):
    """Address and state of a store (a server that holds trajectories).

    If ``is_gone``, the store is lost and never returns. If ``is_awaited``, the store joined before the run was resumed,
    and no new store has replaced it yet. The next store that joins takes over the number of the awaited store, and
    loads the awaited store's groups from the checkpoint. ``address`` and ``host`` are empty for an awaited store, and
    for a store that exists from the start.
    """

    address: str = ""
    host: str = ""
    is_gone: bool = False
    is_awaited: bool = False


class Group(Struct, kw_only=True, array_like=True, eq=False):
    """One unfinished prompt group.

    Attributes:
        place: Number that sorts the groups of the same state: by position in the queue, by time of leasing or storing,
            or by position in the batch.
        num_attempts: Number of attempts (tries of a worker to generate the group) so far. The current or latest attempt
            has the number ``num_attempts - 1``.
        num_failures: Number of failed attempts.
        num_deaths: Number of workers that died, or became silent, while they held a lease on the group.
        engine_version: u, the policy version of the engine when the group was leased, or of the oldest token that the
            attempt continues.
        deadline: u + max_lag, the last learner version that may consume the group.
        owner: Id of the client that holds the lease; empty if the group is not leased.
        request_id: Id of the owner's request that was answered with this lease.
        expires_at: Time when the lease expires, in seconds on the buffer server's clock.
        progress: Token count and versions of the saved prefix (the tokens that an unfinished group has so far), from
            the current or an earlier attempt.
        num_inherited: Number of tokens from earlier attempts that the current attempt continues.
        summary: Metadata of the stored trajectories; None before the group is stored.
        rank: Sort key of the stored group. Batches take the groups with the smallest keys first.
        planned_for: The learner version whose batch holds the group; -1 if no batch holds the group.
        num_bytes: Size of the trajectories in bytes; 0 before a store has reserved bytes for them.
        store: Number of the store that holds the trajectories.
        digest: XXH3 hash of the trajectories, 16 bytes, if a store server holds them.
        is_missing: Whether a batch holds the group, but no store has its trajectories.
        prefix_bytes: Size of the saved prefix in bytes.
        is_evicted: Whether the saved prefix was deleted to free bytes. ``progress`` still counts the tokens of the
            prefix, but no attempt can continue the prefix.
        uses: Versions of the learner steps that trained on the group. After the first of these steps, the group
            counts as finished, even if it stays stored for a further step.
    """

    group_id: int
    state: GroupState = GroupState.queued
    place: int = 0
    num_attempts: int = 0
    num_failures: int = 0
    num_deaths: int = 0
    engine_version: int = 0
    deadline: int = 0
    owner: bytes = b""
    request_id: int = 0
    expires_at: float = 0.0
    progress: Progress | None = None
    num_inherited: int = 0
    summary: GroupSummary | None = None
    rank: float = 0.0
    planned_for: int = -1
    num_bytes: int = 0
    store: int = 0
    digest: bytes = b""
    is_missing: bool = False
    prefix_bytes: int = 0
    is_evicted: bool = False
    uses: tuple[int, ...] = ()

    @property
    def attempt(self) -> int:
        """Number of the current or latest attempt; -1 before the first attempt."""
        return self.num_attempts - 1

    @property
    def past_attempt(self) -> int:
        """Number of the latest attempt that ended and has no stored trajectories; -1 if there is none."""
        return self.attempt - (self.state is not GroupState.queued)

    @property
    def num_saved(self) -> int:
        """Number of policy tokens in the saved prefix (the tokens that an unfinished group has so far)."""
        return 0 if self.progress is None else self.progress.num_tokens

    @property
    def newest_version(self) -> int:
        """The policy version of the newest token in the trajectories or the saved prefix; -1 if there is no token."""
        held = self.progress if self.summary is None else self.summary
        return -1 if held is None else held.newest_version

    @property
    def result(self) -> GroupSummary:
        """Metadata of the trajectories of a stored or planned group."""
        assert self.summary is not None
        return self.summary

    def result_at(self, version: int) -> GroupSummary:
        """Return the metadata of a stored or planned group.

        ``num_uses`` in the result counts only the learner steps before ``version`` that trained on the group.
        """
        num_uses = sum(use < version for use in self.uses)
        return self.result if num_uses == len(self.uses) else replace(self.result, num_uses=num_uses)

    def set_uses(self, uses: tuple[int, ...]) -> None:
        """Set the versions of the learner steps that trained on the group."""
        self.uses = uses
        self.summary = replace(self.result, num_uses=len(uses))

    def granted(self) -> GrantedLease:
        """Return the current lease (a worker's right to generate the group) as a separate record."""
        return GrantedLease(
            group_id=self.group_id,
            attempt=self.attempt,
            engine_version=self.engine_version,
            deadline=self.deadline,
            owner=self.owner,
            request_id=self.request_id,
            expires_at=self.expires_at,
            progress=self.progress,
        )

    def describe(self, learner_version: int, now: float) -> dict[str, Any]:
        """Return a JSON object that describes the group, for `asyncrl inspect`.

        A queued group has no lease, so its lag, owner and expiry have no meaning. ``now`` is the current time in
        seconds on the buffer server's clock.
        """
        known = {
            "group_id": self.group_id,
            "state": str(self.state),
            "attempt": self.attempt,
            "deadline": self.deadline,
        }
        if self.summary is None:
            return known | {
                "lag": learner_version - self.engine_version,
                "owner": self.owner.hex()[:8],
                "num_saved_tokens": self.num_saved,
                "expires_in_s": round(self.expires_at - now, 1),
            }
        return known | {
            "lag": learner_version - self.summary.oldest_version,
            "num_uses": len(self.uses),
            "mean_reward": sum(self.summary.rewards) / max(1, len(self.summary.rewards)),
            "mean_length": sum(self.summary.response_lengths) / max(1, len(self.summary.response_lengths)),
        }


_FORGETTING = 16


def _discard(index: dict[Any, dict[int, None]], key: Any, group_id: int) -> None:
    group_ids = index[key]
    del group_ids[group_id]
    if not group_ids:
        del index[key]


class LeaseIndex:
    """Indexes of the leased groups: by deadline, by owner, and by the expiry of the lease."""

    def __init__(self) -> None:
        self._groups: dict[int, Group] = {}
        self._by_deadline: dict[int, dict[int, None]] = {}
        self._by_owner: dict[bytes, dict[int, None]] = {}
        self._expiries: list[tuple[float, int, int]] = []

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def num_expiries(self) -> int:
        """Number of entries in the heap of expiry times. Ended leases may still have entries."""
        return len(self._expiries)

    def add(self, group: Group) -> None:
        """Add a group whose lease begins."""
        self._groups[group.group_id] = group
        self._by_deadline.setdefault(group.deadline, {})[group.group_id] = None
        self._by_owner.setdefault(group.owner, {})[group.group_id] = None
        self._push_expiry(group)

    def remove(self, group: Group) -> None:
        """Remove a group whose lease ended."""
        del self._groups[group.group_id]
        _discard(self._by_deadline, group.deadline, group.group_id)
        _discard(self._by_owner, group.owner, group.group_id)
        # Reset the expiry time. A restarted server does not know renewed times, because the journal omits them.
        group.expires_at = 0.0

    def all(self) -> list[Group]:
        """Return the records of the leased groups, the oldest lease first."""
        return sorted(self._groups.values(), key=attrgetter("place"))

    def of_owner(self, owner: bytes) -> list[Group]:
        """Return the records of the groups that the client ``owner`` has leased."""
        return [self._groups[group_id] for group_id in self._by_owner.get(owner, ())]

    def num_of_owner(self, owner: bytes) -> int:
        """Return the number of groups that the client ``owner`` has leased."""
        return len(self._by_owner.get(owner, ()))

    def reserved_in(self, store: int) -> list[tuple[int, int]]:
        """Return (group id, attempt number) pairs of the leased groups that have reserved bytes in store ``store``."""
        return [(group.group_id, group.attempt) for group in self.all() if group.num_bytes and group.store == store]

    def last(self, numbers: Sequence[int], *, version: int) -> list[Group]:
        """Return the leased groups that must lose their leases in the plan of the learner step ``version``.

        For k = 0, 1, …, choose up to ``numbers[k]`` more groups with a deadline of at most ``version + k``. A group's
        deadline is the last learner version that may consume the group. Groups with the latest deadline come first.
        Among equal deadlines, the newest leases come first.
        """
        chosen: dict[int, None] = {}
        for k, number in enumerate(numbers):
            if number:
                due = sorted((deadline for deadline in self._by_deadline if deadline <= version + k), reverse=True)
                candidates = (g for deadline in due for g in reversed(self._by_deadline[deadline]) if g not in chosen)
                chosen.update(dict.fromkeys(list(islice(candidates, number))))
        return [self._groups[group_id] for group_id in chosen]

    def next_expiry(self) -> float | None:
        """Return the time when the next lease expires, or None if there is no lease.

        The time is in seconds on the buffer server's clock.
        """
        expiries = self._expiries
        while expiries:
            expires_at, group_id, attempt = expiries[0]
            group = self._groups.get(group_id)
            if group is None or group.attempt != attempt or group.expires_at < expires_at:
                heappop(expiries)
            elif group.expires_at > expires_at:
                heapreplace(expiries, (group.expires_at, group_id, attempt))
            else:
                return expires_at
        return None

    def expired(self, now: float) -> list[Group]:
        """Return the groups whose leases have expired by the time ``now``, the earliest expiry first."""
        due = {(group_id, attempt) for expires_at, group_id, attempt in self._expiries if expires_at <= now}
        running = ((self._groups.get(group_id), attempt) for group_id, attempt in due)
        groups = [group for group, attempt in running if group is not None and group.attempt == attempt]
        groups.sort(key=lambda group: (group.expires_at, group.place))
        return [group for group in groups if group.expires_at <= now]

    def extend(self, group: Group, expires_at: float) -> None:
        """Set the expiry time of a group's lease, in seconds on the buffer server's clock."""
        is_earlier = expires_at < group.expires_at
        group.expires_at = expires_at
        if is_earlier:
            self._push_expiry(group)

    def _push_expiry(self, group: Group) -> None:
        if len(self._expiries) > 2 * len(self._groups) + 64:
            self._expiries = [(other.expires_at, other.group_id, other.attempt) for other in self._groups.values()]
            heapify(self._expiries)
        heappush(self._expiries, (group.expires_at, group.group_id, group.attempt))


class ReadyIndex:
    """The stored groups that are in no batch, by deadline (the last learner version that may consume a group)."""

    def __init__(self) -> None:
        self._entries: dict[int, list[Entry]] = {}

    def add(self, group: Group) -> None:
        """Add a stored group."""
        self._entries.setdefault(group.deadline, []).append((group.rank, group.place, group.group_id))

    def remove(self, deadline: int, group_ids: Container[int]) -> None:
        """Remove those groups in ``group_ids`` that have the deadline ``deadline``."""
        entries = [entry for entry in self._entries[deadline] if entry[2] not in group_ids]
        if entries:
            self._entries[deadline] = entries
        else:
            del self._entries[deadline]

    def by_rank(self) -> Mapping[int, Sequence[Entry]]:
        """Return a map from each deadline to its groups. The groups are `Entry` tuples in ascending order."""
        for entries in self._entries.values():
            entries.sort()
        return self._entries

    def counts(self) -> dict[int, int]:
        """Return a map from each deadline to its number of groups."""
        return {deadline: len(entries) for deadline, entries in self._entries.items()}


class StoreSpace:
    """The list of stores, and the bytes that trajectories and saved prefixes occupy.

    Attributes:
        stores: Address and state of each store.
        stored_bytes: Bytes of trajectories per store, including reserved bytes.
        prefix_bytes: Bytes of all saved prefixes (the tokens that unfinished groups have so far).
        expected_bytes: Expected size of a group's trajectories in bytes: the size of the largest stored group, reduced
            by 1/16 with each smaller group that is stored later.
    """

    def __init__(self, num_stores: int) -> None:
        self.stores = [StorePlace() for _ in range(num_stores)]
        self.stored_bytes = [0] * num_stores
        self.prefix_bytes = self.expected_bytes = 0

    def join(self, number: int, address: str, host: str) -> None:
        """Add the store with the number ``number``: a new number, or the number of an awaited store.

        An awaited store joined before the run was resumed. The new store replaces the awaited store.
        """
        if number == len(self.stores):
            self.stored_bytes.append(0)
        self.stores[number : number + 1] = [StorePlace(address=address, host=host)]

    def await_stores(self) -> None:
        """Mark each joined store as awaited, except lost stores. New stores that join replace the awaited stores."""
        for number, place in enumerate(self.stores):
            if place.address and not place.is_gone:
                self.stores[number] = StorePlace(is_awaited=True)

    def awaited_stores(self) -> list[int]:
        """Return the numbers of the stores from before the resume that no new store has replaced yet."""
        return [number for number, place in enumerate(self.stores) if place.is_awaited]

    def open_stores(self) -> list[int]:
        """Return the numbers of the stores that can hold groups."""
        return [number for number, place in enumerate(self.stores) if not (place.is_gone or place.is_awaited)]

    def set_bytes(self, group: Group, num_bytes: int, store: int | None = None) -> None:
        """Record the size of a group's trajectories in bytes.

        ``store`` is the number of the store that holds the trajectories. None leaves the group's store unchanged.
        """
        if group.num_bytes:
            self.stored_bytes[group.store] -= group.num_bytes
        group.num_bytes = num_bytes
        if store is not None:
            group.store = store
        if num_bytes:
            self.stored_bytes[group.store] += num_bytes

    def expect(self, num_bytes: int) -> None:
        """Update the expected size of trajectories, because a group of ``num_bytes`` bytes was stored."""
        self.expected_bytes = max(num_bytes, self.expected_bytes - self.expected_bytes // _FORGETTING)

    def set_progress(self, group: Group, progress: Progress | None, num_bytes: int) -> None:
        """Record the saved prefix (tokens so far) of an unfinished group.

        ``num_bytes`` is the prefix's size. If the group has no saved prefix, ``progress`` is None and the size is 0.
        """
        self.prefix_bytes += num_bytes - group.prefix_bytes
        group.progress, group.prefix_bytes, group.is_evicted = progress, num_bytes, False

    def evict_prefix(self, group: Group) -> None:
        """Record that a group's saved prefix was deleted to free bytes. ``group.progress`` stays unchanged."""
        self.prefix_bytes -= group.prefix_bytes
        group.prefix_bytes, group.is_evicted = 0, True

    def restore(self, places: Iterable[StorePlace], expected_bytes: int, groups: Iterable[Group]) -> None:
        """Load the stores ``places`` of a snapshot, and compute the bytes in each store from ``groups``."""
        self.stores, self.expected_bytes = list(places), expected_bytes
        self.stored_bytes = [0] * len(self.stores)
        for group in groups:
            self.prefix_bytes += group.prefix_bytes
            if group.num_bytes:
                self.stored_bytes[group.store] += group.num_bytes


class GroupTable:
    """The unfinished prompt groups by id, with indexes of the queued, leased, stored and planned groups.

    Attributes:
        leases: The groups that workers generate now.
        ready: The stored groups that are in no batch.
        open_by_deadline: Maps each deadline (the last learner version that may consume a group) to its number of open
            groups. A group is open if it is leased, or stored and not in a planned batch.
        plans: Maps the version of each planned learner step to the group ids of its batch.
        ended_attempts: (group id, attempt number) pairs of ended attempts whose trajectories a store may still hold.
            The service deletes these trajectories, and empties the list.
    """

    def __init__(self, *, num_stores: int = 1) -> None:
        self.leases = LeaseIndex()
        self.ready = ReadyIndex()
        self.space = StoreSpace(num_stores)
        self.open_by_deadline: dict[int, int] = {}
        self.plans: dict[int, tuple[int, ...]] = {}
        self.ended_attempts: list[tuple[int, int]] = []
        self.num_stored = self.num_planned = 0
        self._groups: dict[int, Group] = {}
        self._queue: deque[int] = deque()
        self._next_place = 0
        self._head_place = -1
        self._present_at_deaths: set[int] = set()

    def __len__(self) -> int:
        return len(self._groups) + self.leases.num_expiries

    def __contains__(self, group_id: int) -> bool:
        return group_id in self._groups

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups.values())

    def __getitem__(self, group_id: int) -> Group:
        return self._groups[group_id]

    @property
    def num_queued(self) -> int:
        """Number of groups in the queue."""
        return len(self._queue)

    @property
    def num_leased(self) -> int:
        """Number of leased groups (groups that workers generate now)."""
        return len(self.leases)

    # Looking up

    def get(self, group_id: int) -> Group | None:
        """Return the record of the group with this id; None if the group is finished or unknown."""
        return self._groups.get(group_id)

    def running(self, group_id: int, attempt: int) -> Group | None:
        """Return the record of a group if the group's attempt number ``attempt`` is running, else None."""
        group = self._groups.get(group_id)
        if group is None or group.state is not GroupState.leased or group.num_attempts != attempt + 1:
            return None
        return group

    def stored(self, group_id: int) -> Group:
        """Return the record of a group. Raises `UnknownGroup` if the group's trajectories are not stored."""
        group = self._groups.get(group_id)
        if group is None or group.summary is None:
            raise UnknownGroup(
                f"no trajectories of group {group_id} are stored; fetch only groups of a plan, before its commit"
            )
        return group

    def in_store(self, group_id: int) -> Group:
        """Return the record of a group. Raises `UnknownGroup` if no running store holds the group's trajectories."""
        group = self.stored(group_id)
        place = self.space.stores[group.store]
        if place.is_gone or place.is_awaited:
            where = f" of host {place.host} at {place.address}" if place.address else ""
            what = "was not replaced after the resume" if place.is_awaited else "is lost"
            raise UnknownGroup(f"the trajectories of group {group_id} are lost: store {group.store}{where} {what}")
        return group

    def is_planned(self, group_id: int) -> bool:
        """Return whether the group is in a planned batch."""
        group = self._groups.get(group_id)
        return group is not None and group.state is GroupState.planned

    def stored_in(self, store: int | None = None) -> list[tuple[int, int]]:
        """Return (group id, attempt number) pairs of the stored and planned groups that belong to store ``store``.

        If ``store`` is None, return the groups of all stores. The result includes groups whose trajectories the store
        has lost (`Group.is_missing`).
        """
        stored = (group for group in self if group.summary is not None)
        return [(group.group_id, group.result.attempt) for group in stored if store is None or group.store == store]

    def of_state(self, state: GroupState) -> list[Group]:
        """Return the records of the groups in the state ``state``, sorted by `Group.place`."""
        groups = [group for group in self._groups.values() if group.state is state]
        return sorted(groups, key=lambda group: group.place)

    def head(self, number: int, *, owner: bytes, suspect_deaths: int = 0) -> list[Group]:
        """Return the first ``number`` groups of the queue that the client ``owner`` may lease.

        A group is a suspect if ``suspect_deaths`` or more workers died or fell silent while they held a lease on the
        group. If ``suspect_deaths`` is 0, no group is a suspect. A client gets a lease on at most one suspect at a
        time. So the death of a client drops at most one suspect.
        """
        queued = map(self._groups.__getitem__, self._queue)
        if not (suspect_deaths and self._present_at_deaths):
            return list(islice(queued, number))
        has_one = any(group.num_deaths >= suspect_deaths for group in self.leases.of_owner(owner))
        chosen: list[Group] = []
        for group in queued:
            is_suspect = group.num_deaths >= suspect_deaths
            if len(chosen) == number:
                break
            if not (is_suspect and has_one):
                has_one = has_one or is_suspect
                chosen.append(group)
        return chosen

    # State changes

    def enqueue(self, group_id: int, *, num_attempts: int = 0) -> None:
        """Add a group at the tail of the queue.

        ``num_attempts`` is the number of earlier attempts. This number is positive only if the group had finished, and
        the learner then went back to an earlier checkpoint.
        """
        self._groups[group_id] = Group(group_id=group_id, place=self._place(), num_attempts=num_attempts)
        if num_attempts:
            self.ended_attempts.append((group_id, num_attempts - 1))
        self._queue.append(group_id)

    def requeue(self, group: Group, *, keeps_progress: bool) -> None:
        """End the lease of a group, and put the group at the head of the queue.

        If ``keeps_progress``, the saved prefix (the tokens so far) stays with the group.
        """
        self.leases.remove(group)
        self._count_open(group.deadline, -1)
        self._to_head(group, keeps_progress=keeps_progress)

    def _to_head(self, group: Group, *, keeps_progress: bool) -> None:
        self._queue.appendleft(group.group_id)
        group.state, group.place, group.owner = GroupState.queued, self._head_place, b""
        group.num_inherited, group.is_missing = 0, False
        # Append the attempt even if no bytes are reserved, because its trajectories may still reach a store.
        self.ended_attempts.append((group.group_id, group.attempt))
        self.space.set_bytes(group, 0)
        if not keeps_progress:
            self.space.set_progress(group, None, 0)
        self._head_place -= 1

    def evict(self, group: Group) -> None:
        """Drop the trajectories of a stored group.

        If the learner has trained on the group, remove the group from the table. Otherwise put the group at the head of
        the queue.
        """
        self.ready.remove(group.deadline, {group.group_id})
        self.num_stored -= 1
        self._count_open(group.deadline, -1)
        if group.uses:
            self._remove(group)
            return
        group.summary, group.rank = None, 0.0
        self._to_head(group, keeps_progress=False)

    def lease(self, group: Group, granted: GrantedLease) -> None:
        """Move a group from the queue to the leased groups. ``granted`` is the group's new lease."""
        self._queue.remove(group.group_id)
        group.state, group.place = GroupState.leased, self._place()
        group.num_attempts = granted.attempt + 1
        group.engine_version, group.deadline = granted.engine_version, granted.deadline
        group.owner, group.request_id = granted.owner, granted.request_id
        group.num_inherited = granted.num_inherited
        if granted.progress is None:
            self.space.set_progress(group, None, 0)
        group.expires_at = granted.expires_at
        self._count_open(group.deadline, 1)
        self.leases.add(group)

    def store(self, group: Group, summary: GroupSummary, rank: float) -> None:
        """Move a leased group to the stored groups. Set its metadata to ``summary`` and its sort key to ``rank``."""
        self.leases.remove(group)
        group.state, group.place = GroupState.stored, self._place()
        group.summary, group.rank, group.num_failures, group.num_deaths = summary, rank, 0, 0
        self._present_at_deaths.discard(group.group_id)
        group.num_inherited, group.owner = 0, b""
        if group.progress is not None:
            self.space.set_progress(group, None, 0)
        self.space.expect(group.num_bytes)
        self._make_ready(group)

    def plan(self, version: int, group_ids: tuple[int, ...]) -> None:
        """Move stored groups into the batch of the learner step ``version``, in the order of ``group_ids``."""
        chosen = set(group_ids)
        for deadline, number in Counter(self._groups[group_id].deadline for group_id in group_ids).items():
            self._count_open(deadline, -number)
            self.ready.remove(deadline, chosen)
        for place, group_id in enumerate(group_ids):
            group = self._groups[group_id]
            group.state, group.planned_for, group.place = GroupState.planned, version, place
        self.num_stored -= len(group_ids)
        self.num_planned += len(group_ids)
        self.plans[version] = group_ids

    def dissolve(self, versions: Iterable[int]) -> None:
        """Undo the planned batches of these versions. The groups of the batches become stored groups again."""
        for version in versions:
            for group_id in self.plans.pop(version):
                self._return_to_stored(self._groups[group_id])

    def move(self, group: Group, deadline: int, rank: float) -> None:
        """Give a stored group another deadline and another sort key (`Group.rank`)."""
        self.ready.remove(group.deadline, {group.group_id})
        self._count_open(group.deadline, -1)
        group.deadline, group.rank = deadline, rank
        self._count_open(deadline, 1)
        self.ready.add(group)

    def count_death(self, group: Group) -> None:
        """Record that a worker died, or became silent, while it held a lease on the group."""
        group.num_deaths += 1
        self._present_at_deaths.add(group.group_id)

    def _return_to_stored(self, group: Group) -> None:
        group.state, group.planned_for, group.place = GroupState.stored, -1, self._place()
        self.num_planned -= 1
        self._count_open(group.deadline, 1)
        self._make_ready(group)

    def _make_ready(self, group: Group) -> None:
        self.num_stored += 1
        self.ready.add(group)

    def finish_batch(self, version: int, again: Mapping[int, float]) -> None:
        """Remove the batch of the committed learner step ``version``.

        ``again`` maps group ids to new sort keys (`Group.rank`). The groups in ``again`` become stored groups again,
        for a further use. The other groups of the batch leave the table.
        """
        for group_id in self.plans.pop(version):
            group = self._groups[group_id]
            if group_id in again:
                group.rank = again[group_id]
                group.set_uses((*group.uses, version))
                self._return_to_stored(group)
            else:
                self._remove(group)
                self.num_planned -= 1

    def _remove(self, group: Group) -> None:
        self.space.set_bytes(group, 0)
        del self._groups[group.group_id]

    def finish(self, group: Group) -> None:
        """Remove a leased group from the table, because the group was dropped."""
        self.leases.remove(group)
        self._count_open(group.deadline, -1)
        self.space.set_progress(group, None, 0)
        self._present_at_deaths.discard(group.group_id)
        self._remove(group)

    def _count_open(self, deadline: int, change: int) -> None:
        number = self.open_by_deadline.get(deadline, 0) + change
        if number:
            self.open_by_deadline[deadline] = number
        else:
            del self.open_by_deadline[deadline]

    def _place(self) -> int:
        self._next_place += 1
        return self._next_place

    # Snapshot

    def snapshot(self) -> dict[str, Any]:
        """Return the table as a dict of plain values, for `restore`."""
        return {
            "places": [self._head_place, self._next_place],
            "expected_bytes": self.space.expected_bytes,
            "stores": to_builtins(self.space.stores),
            "rows": to_builtins(list(self._groups.values()), builtin_types=(bytes,)),
        }

    def restore(self, values: Mapping[str, Any]) -> None:
        """Load ``values``, a result of `snapshot`, into this empty table, and compute the indexes."""
        self._head_place, self._next_place = values["places"]
        for group in convert(values["rows"], list[Group]):
            self._groups[group.group_id] = group
            if group.num_deaths:
                self._present_at_deaths.add(group.group_id)
        self.space.restore(convert(values["stores"], list[StorePlace]), values["expected_bytes"], self)
        self._queue.extend(group.group_id for group in self.of_state(GroupState.queued))
        for group in self.of_state(GroupState.leased):
            self._count_open(group.deadline, 1)
            self.leases.add(group)
        for group in self.of_state(GroupState.stored):
            self._count_open(group.deadline, 1)
            self.num_stored += 1
            self.ready.add(group)
        planned = self.of_state(GroupState.planned)
        self.num_planned = len(planned)
        for version in sorted({group.planned_for for group in planned}):
            self.plans[version] = tuple(group.group_id for group in planned if group.planned_for == version)
