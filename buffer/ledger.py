"""The ledger: where every prompt group is, as a pure state machine. No socket, no clock of its own, no payload.

``queued → leased → stored → planned → consumed``, with exits ``dropped(reason)`` and a way back to the head of the
queue under the next attempt. Whoever drives it applies `Expire` at `next_expiry`, and sends the `Revocation`s.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from asyncrl.core.errors import (
    LeaseExpired,
    NotLeaseOwner,
    ReplayBufferError,
    StalenessError,
    UnknownGroup,
    VersionTooNew,
    VersionTooOld,
)
from asyncrl.core.types import GroupSummary, Plan

from . import commands
from .config import OnStale
from .groups import Group, GroupState, StorePlace
from .ledger_state import LedgerState
from .rule import Room, StalenessRule
from .selection import choose_batch, dropped_by, find_filters, find_order, rank_of


class Ledger(LedgerState):
    """The account of prompt groups.

    Args:
        rule: The staleness bound.
        on_stale: What happens to a running group that a plan would have to wait for.
        order: Which stored groups a batch prefers; a name from `buffer.selection`, or ``module:function``.
        lease_s: A lease not renewed for this long is taken back.
        filters: Names from `buffer.selection`, or ``module:function``; a group that one drops is never stored.
        first_version: Learner version to begin at.
        max_bytes: Bytes that each store may hold; 0 is no bound. Saved prefixes are held by the ledger's own server.
        num_stores: Stores that trajectories are spread over from the beginning; 0 where all of them join.
        max_deaths: A group is dropped when so many workers have died with it; 0 drops none.

    Attributes:
        options: What a journal must have been written under to be taken up.
        log: Gets every command that changes something; None writes nothing.
        on_applied: Hears of every command and its outcome, once it has taken effect.
    """

    def __init__(
        self,
        rule: StalenessRule,
        *,
        on_stale: OnStale = OnStale.wait,
        order: str = "earliest_deadline",
        lease_s: float = 60.0,
        filters: Sequence[str] = (),
        first_version: int = 0,
        max_bytes: int = 0,
        num_stores: int = 1,
        max_deaths: int = 0,
    ) -> None:
        self.rule = rule
        self.log: commands.CommandLog | None = None
        self.on_applied: Callable[[commands.Command[Any], Any], None] | None = None
        self.options = {
            "max_lag": rule.max_lag,
            "groups_per_step": rule.groups_per_step,
            "order": order,
            "filters": list(filters),
            "num_stores": num_stores,
        }
        super().__init__(first_version=first_version, num_stores=num_stores)
        self._room = Room(self._groups, max_bytes=max_bytes, groups_per_step=rule.groups_per_step)
        self._prefer = find_order(order)
        self._on_stale = on_stale
        self._max_deaths = max_deaths
        self._suspect_deaths = max(1, max_deaths - 1) if max_deaths else 0  # where the next death drops the group
        self._lease_s = lease_s
        self._filters = find_filters(filters)

    def apply(
        self,
        command: commands.Command[commands.Result],
        now: float = 0.0,
        *,
        frames: commands.LoggedFrames | None = None,
    ) -> commands.Result:
        """Decide a command, write it down, and do what was decided; returns the outcome.

        ``now`` is in seconds on any clock that leases are measured by. ``frames`` are written with the command, unless
        that is a put which is not stored. Raises `ReplayBufferError` if the command is refused; nothing has changed
        then, unless it was a put: its tokens are counted (`LeaseExpired`, `VersionTooOld`).
        """
        is_put = type(command) is commands.Put
        outcome: Any = _DECIDE[type(command)](self, command, now)
        if self.log is not None and self._has_effect(outcome):
            is_dropped = is_put and outcome.result is not commands.PutResult.stored
            self.log.record(command, outcome, {} if is_dropped or frames is None else frames)
        self.enact(command, outcome)
        if self.on_applied is not None:
            self.on_applied(command, outcome)
        if is_put and outcome.refusal:
            raise (VersionTooOld if outcome.result is commands.PutResult.too_old else LeaseExpired)(outcome.refusal)
        return outcome

    def _has_effect(self, outcome: commands.Outcome) -> bool:
        match outcome:
            case commands.PutOutcome() | commands.Saved():
                return True
            case commands.Renewed():
                return False
            case commands.TakenBack():
                return bool(outcome.group_ids) or outcome.num_lost is not None
            case commands.Granted():
                return bool(outcome.leases)
            case commands.Planned():
                return bool(outcome.group_ids) and outcome.version not in self._groups.plans
            case commands.Reserved():
                return bool(outcome.evicted) or not self._room.is_shared
            case commands.Lost():
                return bool(outcome.group_ids or outcome.unsent or outcome.missing)
            case commands.Rewound() | commands.AddedStore() | commands.DroppedStore():
                return outcome.is_new
            case commands.Released():
                return outcome.was_running or outcome.was_owed
            case _:
                return bool(outcome.group_ids)

    # What is known

    @property
    def num_queued(self) -> int:
        """Groups that wait for admission."""
        return self._groups.num_queued

    @property
    def num_leased(self) -> int:
        """Groups that are being generated."""
        return self._groups.num_leased

    @property
    def num_stored(self) -> int:
        """Groups that wait for a plan."""
        return self._groups.num_stored

    @property
    def num_planned(self) -> int:
        """Groups that wait for the commit of their step."""
        return self._groups.num_planned

    @property
    def first_queued(self) -> Group | None:
        """The group at the head of the queue."""
        return next(iter(self._groups.head(1, owner=b"")), None)

    @property
    def stored_bytes(self) -> int:
        """Bytes of trajectories in all stores, reserved ones among them."""
        return sum(self._groups.stored_bytes)

    @property
    def max_bytes(self) -> int:
        """Bytes that all stores may hold."""
        return self._room.max_bytes

    @property
    def stores(self) -> Sequence[StorePlace]:
        """Where each store is, by number."""
        return self._groups.stores

    @property
    def next_plan(self) -> int:
        """w, the version to be planned next."""
        return self.learner_version + len(self._groups.plans)

    @property
    def num_held(self) -> int:
        """Records held in memory, of unfinished groups and of the past; it does not grow with a run's length."""
        return len(self._groups) + len(self._history)

    def holds(self, group_id: int, attempt: int) -> bool:
        """Whether this attempt is the one being generated."""
        return self._groups.running(group_id, attempt) is not None

    def admits(self, engine_version: int) -> bool:
        """Whether a group may begin now on an engine that serves ``engine_version``."""
        return self.rule.admits(self._groups.open_by_deadline, version=self.next_plan, engine_version=engine_version)

    @property
    def budget(self) -> int:
        """How many groups may begin now on engines at the learner's version, if they fit."""
        open_by_deadline = self._groups.open_by_deadline
        return self.rule.budget(open_by_deadline, version=self.next_plan, engine_version=self.learner_version)

    def leases(self) -> list[Group]:
        """The groups that are leased, in the order they began."""
        return self._groups.leased()

    def leases_of(self, owner: bytes) -> list[Group]:
        """The groups that an owner holds leases on."""
        return self._groups.of_owner(owner)

    def num_leases_of(self, owner: bytes) -> int:
        """How many leases an owner holds."""
        return self._groups.num_of_owner(owner)

    def stored_attempt(self, group_id: int) -> int:
        """Which attempt of a group is stored. Raises `UnknownGroup` if none is."""
        return self._groups.stored(group_id).result.attempt

    def store_of(self, group_id: int) -> tuple[int, bytes]:
        """Which store holds the trajectories of a group, and their digest. Raises `UnknownGroup` if none does."""
        group = self._groups.stored(group_id)
        if (place := self.stores[group.store]).is_gone:
            raise UnknownGroup(
                f"the trajectories of group {group_id} were on the store of host {place.host} at {place.address}, "
                "which is gone"
            )
        return group.store, group.digest

    def stored_groups(self, store: int | None = None) -> list[tuple[int, int]]:
        """The groups whose trajectories are stored or planned, in one store or in any, and their attempts."""
        stored = (group for group in self._groups if group.summary is not None)
        return [(group.group_id, group.result.attempt) for group in stored if store is None or group.store == store]

    def reserved_groups(self, store: int) -> list[tuple[int, int]]:
        """The running groups that have bytes reserved in a store, and their attempts."""
        leased = (group for group in self._groups.leased() if group.num_bytes)
        return [(group.group_id, group.attempt) for group in leased if group.store == store]

    def ended_attempts(self) -> list[tuple[int, int]]:
        """The unfinished groups that had attempts before the one that runs or is stored, and the last of those."""
        ended = ((g.group_id, g.attempt - (g.state is not GroupState.queued)) for g in self._groups)
        return [(group_id, attempt) for group_id, attempt in ended if attempt >= 0]

    def num_saved(self, group_id: int) -> int:
        """Tokens that are saved of a group, queued or leased; 0 where it is not known."""
        group = self._groups.get(group_id)
        return 0 if group is None else group.num_saved

    def is_reserved(self, group_id: int, attempt: int) -> bool:
        """Whether this attempt runs, and has bytes reserved."""
        group = self._groups.running(group_id, attempt)
        return group is not None and group.num_bytes > 0

    def groups_with_prefix(self) -> list[int]:
        """The groups, queued or leased, of which something is saved."""
        return [group.group_id for group in self._groups if group.prefix_bytes]

    def is_stored(self, group_id: int) -> bool:
        """Whether the trajectories of a group are stored or planned."""
        group = self._groups.get(group_id)
        return group is not None and group.summary is not None

    def is_planned(self, group_id: int) -> bool:
        """Whether a batch holds the group."""
        group = self._groups.get(group_id)
        return group is not None and group.state is GroupState.planned

    def is_unfinished(self, group_id: int) -> bool:
        """Whether a group is queued, leased, stored or planned."""
        return group_id in self._groups

    def knows(self, group_id: int) -> bool:
        """Whether a group was ever queued."""
        return group_id in self._groups or group_id in self._history.finished

    def finished(self) -> list[tuple[int, int]]:
        """Ids of the groups that are consumed or dropped, as ranges [start, end)."""
        return self._history.finished.ranges()

    def batch(self, version: int) -> Plan:
        """The batch that was planned for ``version``."""
        group_ids = self._groups.plans[version]
        return Plan(version=version, groups=tuple(self._groups.stored(group_id).result for group_id in group_ids))

    def next_expiry(self) -> float | None:
        """When `Expire` is to be applied next, on the clock of ``now``; None while no lease runs."""
        group = self._groups.next_expiry()
        return None if group is None else group.expires_at

    def renew_all(self, now: float) -> None:
        """Let every running lease start afresh: after a time in which nobody could renew."""
        for group in self.leases():
            self._groups.extend(group, now + self._lease_s)

    # Admission

    def _decide_enqueue(self, command: commands.Enqueue, now: float) -> commands.Queued:
        new = dict.fromkeys(group_id for group_id in command.group_ids if not self.knows(group_id))
        return commands.Queued(group_ids=tuple(new))

    def check_engine_version(self, engine_version: int) -> None:
        """Raise `VersionTooNew` for a version that no committed step has made: none of 0..learner_version."""
        if not 0 <= engine_version <= self.learner_version:
            raise VersionTooNew(
                f"an engine asks for a lease at policy version {engine_version}, but the learner has committed "
                f"{self.learner_version} steps; an engine serves a version in 0..{self.learner_version}"
            )

    def _decide_lease(self, command: commands.LeaseGroups, now: float) -> commands.Granted:
        self.check_engine_version(command.engine_version)
        rule, version, admits = self.rule, self.next_plan, self.rule.admits
        due = dict(self._groups.open_by_deadline)
        leases: list[commands.GrantedLease] = []
        num_freed_bytes = 0
        head = self._groups.head(command.max_groups, owner=command.owner, suspect_deaths=self._suspect_deaths)
        for group in head:
            if not self._room.has_room(len(leases), num_freed_bytes):
                break
            oldest, progress = command.engine_version, group.progress
            if not admits(due, version=version, engine_version=oldest):
                break
            if progress is not None:
                if admits(due, version=version, engine_version=progress.oldest_version):
                    oldest = min(oldest, progress.oldest_version)
                else:
                    progress = None
                    num_freed_bytes += group.prefix_bytes
            deadline = rule.deadline(oldest)
            due[deadline] = due.get(deadline, 0) + 1
            leases.append(
                commands.GrantedLease(
                    group_id=group.group_id,
                    attempt=group.num_attempts,
                    engine_version=oldest,
                    deadline=deadline,
                    owner=command.owner,
                    request_id=command.request_id,
                    expires_at=now + self._lease_s,
                    progress=progress,
                )
            )
        return commands.Granted(leases=tuple(leases))

    # Running leases

    def has_room(self) -> bool:
        """Whether one more group fits; see `Room.has_room`."""
        return self._room.has_room()

    def fits(self, num_bytes: int) -> bool:
        """See `Room.fits`."""
        return self._room.fits(num_bytes)

    def _decide_reserve(self, command: commands.Reserve, now: float) -> commands.Reserved:
        group = self._held(command, command.group_id, command.attempt)
        if group is None:  # the put that follows says what became of it
            return commands.Reserved(store=0)
        may_evict = not self.num_planned and not self.can_plan()
        return self._room.reserve(group, command.num_bytes, host=command.host, may_evict=may_evict)

    def _decide_add_store(self, command: commands.AddStore, now: float) -> commands.AddedStore:
        known = [
            number
            for number, place in enumerate(self.stores)
            if (place.address, place.host, place.is_gone) == (command.address, command.host, False)
        ]
        return commands.AddedStore(store=known[0] if known else len(self.stores), is_new=not known)

    def _decide_drop_store(self, command: commands.DropStore, now: float) -> commands.DroppedStore:
        """Nobody waits for a store that is gone: what was on its way to it is reserved elsewhere."""
        if self.stores[command.store].is_gone:
            return commands.DroppedStore(is_new=False)
        there = [group for group in self._groups if group.store == command.store and group.num_bytes]
        return commands.DroppedStore(
            is_new=True,
            group_ids=tuple(group.group_id for group in there if group.state is GroupState.stored),
            reserved=tuple(group.group_id for group in there if group.state is GroupState.leased),
        )

    def cannot_hold_batch(self, group_id: int) -> bool:
        """Whether the groups that are due first, this refused one among them, are more than the stores can hold."""
        group = self._groups.get(group_id)
        others = [other for other in self.leases() if other is not group]
        is_first = group is not None and all(
            group.deadline <= other.deadline and not other.num_bytes for other in others
        )
        return is_first and not self._groups.num_planned and not self.can_plan()

    def _held(
        self,
        command: commands.Renew | commands.SavePrefix | commands.Reserve | commands.Put | commands.Release,
        group_id: int,
        attempt: int,
    ) -> Group | None:
        """The group, if this attempt of it runs. Raises `NotLeaseOwner` if another client than its owner asks."""
        group = self._groups.running(group_id, attempt)
        if group is None:
            ended = self._history.of(group_id, attempt)
            owner = b"" if ended is None else ended.owner
        else:
            owner = group.owner
        if command.owner is not None and owner and command.owner != owner:
            raise NotLeaseOwner(
                f"{type(command).__name__} of group {group_id} attempt {attempt} came from client "
                f"{command.owner.hex()[:8]}, but its lease belongs to {owner.hex()[:8]}; only its owner may report it"
            )
        return group

    def _decide_renew(self, command: commands.Renew, now: float) -> commands.Renewed:
        group = self._held(command, command.group_id, command.attempt)
        return commands.Renewed(expires_at=None if group is None else now + self._lease_s)

    def _decide_save(self, command: commands.SavePrefix, now: float) -> commands.Saved:
        group_id, attempt, progress = command.group_id, command.attempt, command.progress
        group = self._held(command, group_id, attempt)
        if group is None:
            raise LeaseExpired(f"the lease on group {group_id} attempt {attempt} is no longer held; nothing was saved")
        self._check_newest(group_id, attempt, progress.newest_version)
        if progress.oldest_version < group.engine_version:
            raise VersionTooOld(
                f"progress of group {group_id} attempt {attempt} holds a token of policy version "
                f"{progress.oldest_version}, but its lease began at {group.engine_version}; nothing was saved"
            )
        self._room.check_prefix(group, command.num_bytes)
        return commands.Saved()

    def _check_newest(self, group_id: int, attempt: int, newest_version: int) -> None:
        if newest_version > self.learner_version:
            raise VersionTooNew(
                f"group {group_id} attempt {attempt} holds a token of policy version {newest_version}, but the learner "
                f"is at {self.learner_version}; does its worker belong to another run?"
            )

    def _decide_expire(self, command: commands.Expire, now: float) -> commands.TakenBack:
        return commands.TakenBack(group_ids=tuple(group.group_id for group in self._groups.expired(now)))

    def _decide_take_back(self, command: commands.TakeBack, now: float) -> commands.TakenBack:
        if command.owner in self.account.buried:
            return commands.TakenBack(group_ids=())
        groups = self.leases_of(command.owner)
        group_ids, num_lost = tuple(group.group_id for group in groups), None
        if command.num_generated is not None:
            num_saved = sum(group.num_saved - group.num_inherited for group in groups)
            num_lost = max(0, command.num_generated - self.account.settled_by(command.owner) - num_saved)
        dropped = tuple(g.group_id for g in groups if 0 < self._max_deaths <= g.num_deaths + 1)
        return commands.TakenBack(group_ids=group_ids, num_lost=num_lost, dropped=dropped)

    # Results

    def _decide_put(self, command: commands.Put, now: float) -> commands.PutOutcome:
        summary = command.summary
        group = self._held(command, summary.group_id, summary.attempt)
        if group is None:
            return self._decide_put_without_lease(summary)
        self._check_newest(summary.group_id, summary.attempt, summary.newest_version)
        if summary.oldest_version < group.engine_version:
            message = (
                f"group {summary.group_id} attempt {summary.attempt} holds a token of policy version "
                f"{summary.oldest_version}, but its lease began at {group.engine_version}; its prompt is leased again"
            )
            return commands.PutOutcome(result=commands.PutResult.too_old, refusal=message)
        if self._filters and (name := dropped_by(self._filters, summary)) is not None:
            return commands.PutOutcome(result=commands.PutResult.filtered, reason=name)
        return commands.PutOutcome(
            result=commands.PutResult.stored, rank=rank_of(self._prefer, summary, group.deadline)
        )

    def _decide_put_without_lease(self, summary: GroupSummary) -> commands.PutOutcome:
        """Acknowledge what was stored before; refuse what comes too late."""
        group_id, attempt = summary.group_id, summary.attempt
        self._check_was_leased(group_id, attempt, "put only what a lease asked for")
        if self._has_stored(group_id, attempt):
            return commands.PutOutcome(result=commands.PutResult.duplicate)
        ended = self._history.of(group_id, attempt)
        if ended is not None and ended.refusal:
            return commands.PutOutcome(result=commands.PutResult.too_old, refusal=ended.refusal)
        message = (
            f"the lease on group {group_id} attempt {attempt} is no longer held, and its {summary.num_tokens} tokens "
            "are dropped; renew leases well within buffer.lease_s and abort a rollout that is revoked"
        )
        return commands.PutOutcome(result=commands.PutResult.late, refusal=message)

    def _check_was_leased(self, group_id: int, attempt: int, remedy: str) -> None:
        group = self._groups.get(group_id)
        known = self._history.num_attempts(group_id) if group is None else group.num_attempts
        if not 0 <= attempt < known:
            raise UnknownGroup(f"group {group_id} attempt {attempt} was never leased; {remedy}")

    def _has_stored(self, group_id: int, attempt: int) -> bool:
        group = self._groups.get(group_id)
        if group is None:
            return self._history.was_stored(group_id, attempt)
        return group.summary is not None and group.summary.attempt == attempt

    def _decide_release(self, command: commands.Release, now: float) -> commands.Released:
        group_id, attempt = command.group_id, command.attempt
        self._check_was_leased(group_id, attempt, "it cannot be released")
        group = self._held(command, group_id, attempt)
        ended = self._history.of(group_id, attempt)
        return commands.Released(
            was_running=group is not None,
            was_owed=ended is not None and ended.owes_report,
            is_dropped=group is not None and 0 < command.max_failures <= group.num_failures + 1,
        )

    # Batches

    def check_plan(self, version: int) -> None:
        """Raise `ReplayBufferError` for a version that is neither the next to be planned nor planned before."""
        is_next = version == self.next_plan and version <= self.learner_version + 1
        if version not in self._groups.plans and not is_next:
            raise ReplayBufferError(
                f"plan({version}) was asked while the learner is at version {self.learner_version} and the next to "
                f"plan is {self.next_plan}; plan in order, at most one step ahead of the last commit"
            )

    def can_plan(self) -> bool:
        """Whether the next batch can be made now, its stragglers given up unless they are to be waited for."""
        if self.num_stored < self.rule.groups_per_step:
            return False
        return self._on_stale is not OnStale.wait or not any(self._missing())

    def _missing(self) -> list[int]:
        """How many running groups of each deadline the next batch would have to hold."""
        return self.rule.missing(
            self._groups.open_by_deadline, self._groups.ready_by_deadline(), version=self.next_plan
        )

    def _decide_lose(self, command: commands.LoseGroups, now: float) -> commands.Lost:
        """A batch with a lost group, and those after it, are planned anew, without what no store has any more."""
        groups = [group for group_id in command.group_ids if (group := self._groups.get(group_id)) is not None]
        planned = [group.planned_for for group in groups if group.state is GroupState.planned]
        dissolved = tuple(version for version in self._groups.plans if planned and version >= min(planned))
        with_them = (self._groups.stored(group_id) for version in dissolved for group_id in self._groups.plans[version])
        groups += [group for group in with_them if group.is_missing]
        found = (group.group_id for group in groups if group.summary is not None or group.prefix_bytes)
        return commands.Lost(
            group_ids=tuple(dict.fromkeys(found)),
            dissolved=dissolved,
            unsent=tuple(group_id for group_id, attempt in command.unsent if self.holds(group_id, attempt)),
            missing=tuple(group_id for group_id in command.missing if self.is_planned(group_id)),
        )

    def _decide_plan(self, command: commands.PlanBatch, now: float) -> commands.Planned:
        """A batch once made stays as it is; no groups while it must wait."""
        version = command.version
        self.check_plan(version)
        if version in self._groups.plans:
            return commands.Planned(version=version, group_ids=self._groups.plans[version])
        if not self.can_plan():
            return commands.Planned(version=version, group_ids=())
        given_up = self._groups.last_leased(self._missing(), version=version)
        due = dict(self._groups.open_by_deadline)
        for group in given_up:
            due[group.deadline] -= 1
        required = self.rule.required(due, version=version)
        batch = choose_batch(self._groups.ready(), required, version=version, seats=self.rule.groups_per_step)
        return commands.Planned(
            version=version,
            group_ids=tuple(batch),
            given_up=tuple(group.group_id for group in given_up),
            is_dropped=self._on_stale is OnStale.drop,
        )

    def _decide_commit(self, command: commands.Commit, now: float) -> commands.Committed:
        """No groups when the version was committed before."""
        version = command.version
        if 0 <= version < self.learner_version:
            return commands.Committed(version=version, group_ids=())
        if version != self.learner_version or version not in self._groups.plans:
            raise ReplayBufferError(
                f"commit({version}) was asked while the learner is at version {self.learner_version} and the "
                f"plans made are {sorted(self._groups.plans)}; commit in order, what was planned"
            )
        group_ids = self._groups.plans[version]
        for group_id in group_ids:
            self._check_bound(self._groups.stored(group_id), version)
        return commands.Committed(version=version, group_ids=group_ids)

    def _check_bound(self, group: Group, version: int) -> None:
        """Raise `StalenessError` for a group that breaks the bound. It must never fire."""
        lag = version - group.result.oldest_version
        if lag > self.rule.max_lag or version > group.deadline:
            raise StalenessError(
                f"group {group.group_id} with deadline {group.deadline} would be consumed at version {version} with a "
                f"token of version {group.result.oldest_version}: lag {lag}, bound {self.rule.max_lag}"
            )

    def _decide_rewind(self, command: commands.Rewind, now: float) -> commands.Rewound:
        """The same rewind again, or an earlier one, changes nothing."""
        if command.incarnation <= self.incarnation:
            return commands.Rewound(is_new=False)
        if not 0 <= command.version <= self.learner_version:
            raise ReplayBufferError(
                f"rewind({command.version}) was asked while the learner is at version {self.learner_version}; go back "
                "to the version of a checkpoint whose steps are committed"
            )
        if not 0 <= command.tokens_trained <= self.account.tokens_trained:
            raise ReplayBufferError(
                f"rewind({command.version}) says that {command.tokens_trained} tokens were trained by then, the ledger "
                f"counts {self.account.tokens_trained} by now; the checkpoint is of another run"
            )
        lost = (group for group in self._groups if group.state is not GroupState.queued or group.progress is not None)
        return commands.Rewound(is_new=True, group_ids=tuple(group.group_id for group in lost))


_DECIDE: Mapping[type, Any] = {
    commands.Enqueue: Ledger._decide_enqueue,
    commands.LeaseGroups: Ledger._decide_lease,
    commands.Renew: Ledger._decide_renew,
    commands.SavePrefix: Ledger._decide_save,
    commands.Reserve: Ledger._decide_reserve,
    commands.Put: Ledger._decide_put,
    commands.Release: Ledger._decide_release,
    commands.Expire: Ledger._decide_expire,
    commands.TakeBack: Ledger._decide_take_back,
    commands.PlanBatch: Ledger._decide_plan,
    commands.LoseGroups: Ledger._decide_lose,
    commands.AddStore: Ledger._decide_add_store,
    commands.DropStore: Ledger._decide_drop_store,
    commands.Commit: Ledger._decide_commit,
    commands.Rewind: Ledger._decide_rewind,
}
"""Command to what decides it; deciding changes nothing."""
