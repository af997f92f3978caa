"""The ledger tracks the state of every prompt group, and counts tokens. It uses neither sockets nor a clock.

A group moves ``queued → leased → stored → planned → consumed``. A worker generates a leased group. The trajectories of
a stored group are complete. A planned group is in a batch for the learner, which then consumes the group. A group can
also be dropped, or go back to the head of the queue. A consumed group can be stored again for a further training step.

Each command has two functions. ``_decide_*`` computes the outcome and changes nothing. ``_enact_*`` applies the
outcome to the state. A restarted server applies the outcomes in its journal, and decides nothing again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from asyncrl.core.errors import LeaseExpired, ReplayBufferError, StalenessError, VersionTooNew, VersionTooOld
from asyncrl.core.types import BufferStats, Plan

from . import commands
from .account import (
    NO_ROOM,
    REWOUND,
    STALE,
    STALE_PREFIX,
    STORE_LOST,
    VERSION_TOO_OLD,
    WORKER_DIED,
    Account,
    AttemptHistory,
    Attempts,
    EndedAttempt,
    IdSet,
)
from .checkpoints import Marks, decide_return
from .config import OnStale
from .frames import LoggedFrames
from .groups import Group, GroupState, GroupTable
from .records import Command, LedgerOutcome, Result, leaves
from .rule import Room, StalenessRule, choose_batch, dropped_by, find_filters, find_order, rank_of


class CommandLog(Protocol):
    """Records commands and their outcomes. The ledger calls `record` before it applies the outcome."""

    def record(self, command: Command[Any, Any], outcome: LedgerOutcome, frames: LoggedFrames) -> None:
        """Record a command with its outcome. ``frames`` has the command's encoded prompts, prefix or trajectories."""


class Call(NamedTuple):
    """The sender of a command, and the time when the command arrived.

    ``sender`` is a client id, or None if the sender is unknown. ``now`` is in seconds on the buffer server's clock.
    """

    now: float
    sender: bytes | None


class Ledger:
    """Tracks the state of every prompt group, and counts the tokens.

    Args:
        rule: The staleness bound.
        on_stale: What the ledger does with a running group that the staleness bound requires in the next batch.
        order: Order in which batches take stored groups: a name from `buffer.rule`, or ``module:function``.
        lease_s: A lease (a worker's right to generate a group) expires if it is not renewed for this many seconds.
        filters: Names from `buffer.rule`, or ``module:function``. A group that a filter drops is never stored.
        first_version: Version of the learner's policy at the beginning.
        max_bytes: Bound on the bytes in each store (a server that holds trajectories); 0 means no bound.
        num_stores: Number of stores at the beginning.
        max_deaths: A group is dropped when this many workers died or fell silent while they held a lease on the group;
            0 drops no group.

    Attributes:
        learner_version: v, the version of the learner's policy. Each committed training step adds 1.
        incarnation: How often the learner has gone back to a checkpoint since the run was started or resumed.
        history: Attempts and groups that ended.
        marks: The checkpoints that the learner may go back to.
        options: Options that must stay the same if a later server continues the journal of this ledger.
        log: Records each command whose outcome `is_recorded`, before the command changes the state. If None, nothing
            is recorded.
        on_applied: Called with every command and its outcome, after the outcome was applied.
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
        self.learner_version = first_version
        self.incarnation = 0
        self.groups = GroupTable(num_stores=num_stores)
        self.history = AttemptHistory()
        self.account = Account()
        self.attempts = Attempts(self.groups, self.history, self.account)
        self.marks = Marks(first_version)
        self.rule = rule
        self.room = Room(self.groups, max_bytes=max_bytes, groups_per_step=rule.groups_per_step)
        self.options = {
            "max_lag": rule.max_lag,
            "groups_per_step": rule.groups_per_step,
            "max_uses": rule.max_uses,
            "order": order,
            "filters": list(filters),
            "num_stores": num_stores,
        }
        self.log: CommandLog | None = None
        self.on_applied: Callable[[Command[Any, Any], Any], None] | None = None
        self.prefer = find_order(order)
        self.filters = find_filters(filters)
        self.on_stale = on_stale
        self.lease_s = lease_s
        self.max_deaths = max_deaths
        # After ``suspect_deaths`` deaths of workers, a group is a suspect. A worker leases at most one suspect.
        self.suspect_deaths = max(1, max_deaths - 1) if max_deaths else 0

    def apply(
        self,
        command: Command[Result, Any],
        now: float = 0.0,
        *,
        sender: bytes | None = None,
        frames: LoggedFrames | None = None,
    ) -> Result:
        """Decide a command, record it in the log, apply its outcome, and return the outcome.

        Args:
            command: The operation to decide.
            now: Current time in seconds on the buffer server's clock.
            sender: Id of the client that sent the command. If None, the ledger does not check that the client has the
                lease.
            frames: The encoded prompts, saved prefix or trajectories that came with the command. The log records these
                frames, except those of a put (a finished group) that is not stored.

        Raises:
            ReplayBufferError: The command is refused, and nothing has changed.
            LeaseExpired: The sender has lost the lease. The tokens of a put count as dropped if they were not counted
                before. A saved prefix is not stored.
            VersionTooOld: A token is too old. The tokens of a put count as dropped, and the group's prompt is queued
                again. A saved prefix is not stored, and the lease stays. A repeated put changes nothing.
        """
        is_put = type(command) is commands.Put
        outcome: Any = _DECIDE[type(command)](self, command, Call(now, sender))
        if self.log is not None and outcome.is_recorded:
            is_dropped = is_put and outcome.result is not commands.PutResult.stored
            self.log.record(command, outcome, {} if is_dropped or frames is None else frames)
        self.enact(command, outcome)
        if self.on_applied is not None:
            self.on_applied(command, outcome)
        if is_put and outcome.refusal:
            raise (VersionTooOld if outcome.result is commands.PutResult.too_old else LeaseExpired)(outcome.refusal)
        return outcome

    def enact(self, command: Command[Any, Any], outcome: Any) -> None:
        """Apply a command's outcome to the state. This ledger or an earlier server's ledger decided the outcome."""
        _ENACT[type(command)](self, command, outcome)

    @property
    def next_plan(self) -> int:
        """The learner version (w) whose batch is planned next."""
        return self.learner_version + len(self.groups.plans)

    @property
    def num_held(self) -> int:
        """Number of records of groups and attempts in memory. The number stays bounded in a long run."""
        return len(self.groups) + len(self.history)

    @property
    def budget(self) -> int:
        """How many new groups the staleness bound allows now on engines that serve the learner's version.

        The bound on bytes may allow fewer groups.
        """
        open_by_deadline = self.groups.open_by_deadline
        return self.rule.budget(open_by_deadline, version=self.next_plan, engine_version=self.learner_version)

    def admits(self, engine_version: int) -> bool:
        """Return whether the staleness bound admits a new group on an engine that serves ``engine_version``."""
        return self.rule.admits(self.groups.open_by_deadline, version=self.next_plan, engine_version=engine_version)

    def knows(self, group_id: int) -> bool:
        """Return whether the ledger knows a group. The ledger also knows finished groups.

        When the learner goes back to a checkpoint, the ledger forgets the groups that finished after the checkpoint.
        """
        return group_id in self.groups or group_id in self.history.finished

    def check_engine_version(self, engine_version: int) -> None:
        """Raise `VersionTooNew` if a lease request's version is negative or newer than the learner's version."""
        if not 0 <= engine_version <= self.learner_version:
            raise VersionTooNew(
                f"an engine requested a lease at policy version {engine_version}, but the learner has committed "
                f"{self.learner_version} steps; an engine must serve a version in 0..{self.learner_version}"
            )

    def check_newest(self, group_id: int, attempt: int, newest_version: int) -> None:
        """Raise `VersionTooNew` if the version of an attempt's newest token is newer than the learner's version."""
        if newest_version > self.learner_version:
            raise VersionTooNew(
                f"group {group_id} attempt {attempt} holds a token of policy version {newest_version}, but the learner "
                f"is at {self.learner_version}; does its worker belong to another run?"
            )

    def check_plan(self, version: int) -> None:
        """Raise `ReplayBufferError` if the controller must not request the batch of ``version`` now.

        The controller may request a planned batch again, or the next batch. The next batch must be at most one step
        ahead of the learner.
        """
        if version not in self.groups.plans and (version != self.next_plan or version > self.learner_version + 1):
            raise ReplayBufferError(
                f"plan({version}) was requested at learner version {self.learner_version}, but the next plan is "
                f"{self.next_plan}; plan in order, at most one step ahead of the last commit"
            )

    def can_plan(self) -> bool:
        """Return whether the next batch can be made now.

        A batch needs ``groups_per_step`` stored groups. With ``on_stale=wait``, the batch also waits for all running
        groups that it must contain. With other values of ``on_stale``, the plan revokes the leases of these running
        groups, and the batch is made without them.
        """
        if self.groups.num_stored < self.rule.groups_per_step:
            return False
        return self.on_stale is not OnStale.wait or not any(self.missing())

    def missing(self) -> list[int]:
        """Return how many running (leased) groups the next batch must take, as ``max_lag + 1`` numbers.

        A group's deadline is the last learner version that may consume the group. w is the version of the next batch.
        Number k counts groups with a deadline of at most w + k that are not counted in the numbers before it.
        """
        return self.rule.missing(self.groups.open_by_deadline, self.groups.ready.counts(), version=self.next_plan)

    def cannot_hold_batch(self, group_id: int) -> bool:
        """Return whether the stores are too small for a batch. Call this method when the stores refuse a group's bytes.

        Returns False if a batch is planned or can be made. Also returns False if another running group has reserved
        bytes, or has an earlier deadline (the last learner version that may consume a group).
        """
        group = self.groups.get(group_id)
        others = [other for other in self.groups.leases.all() if other is not group]
        if group is None or any(other.num_bytes or other.deadline < group.deadline for other in others):
            return False
        return not self.groups.num_planned and not self.can_plan()

    def batch(self, version: int) -> Plan:
        """Return the planned batch of the learner step ``version``: the metadata of its groups, in order."""
        groups = map(self.groups.stored, self.groups.plans[version])
        return Plan(version=version, groups=tuple(group.result for group in groups))

    def renew_all(self, now: float) -> None:
        """Extend every lease until ``lease_s`` seconds after ``now``."""
        for group in self.groups.leases.all():
            self.groups.leases.extend(group, now + self.lease_s)

    def stats(
        self, *, stored_bytes: int = 0, held_bytes: int = 0, disk_bytes: int = 0, leases_waiting: int = 0
    ) -> BufferStats:
        """Return one record with the counts of tokens, the number of groups in each state, and the learner's version.

        The record also has the arguments: three sizes in bytes, and the number of waiting requests for leases.
        """
        groups = {state: getattr(self.groups, f"num_{state}") for state in ("queued", "leased", "stored", "planned")}
        held = {
            "stored_bytes": stored_bytes,
            "held_bytes": held_bytes,
            "disk_bytes": disk_bytes,
            "leases_waiting": leases_waiting,
        }
        return self.account.stats(groups, learner_version=self.learner_version, **held)

    def snapshot(self) -> dict[str, Any]:
        """Return the ledger's state as a dict of plain values, for `restore`."""
        return {
            "learner_version": self.learner_version,
            "incarnation": self.incarnation,
            "groups": self.groups.snapshot(),
            "history": self.history.snapshot(),
            "account": self.account.snapshot(),
            "marks": self.marks.snapshot(),
        }

    def restore(self, values: Mapping[str, Any]) -> None:
        """Load ``values``, a result of `snapshot`, into this new ledger."""
        self.learner_version, self.incarnation = values["learner_version"], values["incarnation"]
        self.groups.restore(values["groups"])
        self.history.restore(values["history"])
        self.account.restore(values["account"])
        self.marks.restore(values["marks"])


# Prompts and leases


def _decide_enqueue(ledger: Ledger, command: commands.Enqueue, call: Call) -> commands.Queued:
    new = dict.fromkeys(group_id for group_id in command.group_ids if not ledger.knows(group_id))
    return commands.Queued(group_ids=tuple(new))


def _enact_enqueue(ledger: Ledger, command: commands.Enqueue, outcome: commands.Queued) -> None:
    for group_id in outcome.group_ids:
        ledger.groups.enqueue(group_id, num_attempts=ledger.history.num_attempts(group_id))


def _decide_lease_groups(ledger: Ledger, command: commands.LeaseGroups, call: Call) -> commands.Granted:
    ledger.check_engine_version(command.engine_version)
    version, admits = ledger.next_plan, ledger.rule.admits
    due = dict(ledger.groups.open_by_deadline)
    leases: list[commands.GrantedLease] = []
    num_freed_bytes = 0
    for group in ledger.groups.head(command.max_groups, owner=call.sender or b"", suspect_deaths=ledger.suspect_deaths):
        if not ledger.room.has_room(len(leases), num_freed_bytes):
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
        deadline = ledger.rule.deadline(oldest)
        due[deadline] = due.get(deadline, 0) + 1
        leases.append(
            commands.GrantedLease(
                group_id=group.group_id,
                attempt=group.num_attempts,
                engine_version=oldest,
                deadline=deadline,
                owner=call.sender or b"",
                request_id=command.request_id,
                expires_at=call.now + ledger.lease_s,
                progress=progress,
            )
        )
    return commands.Granted(leases=tuple(leases))


def _enact_lease_groups(ledger: Ledger, command: commands.LeaseGroups, outcome: commands.Granted) -> None:
    for granted in outcome.leases:
        group = ledger.groups[granted.group_id]
        if granted.progress is None and group.progress is not None:
            ledger.account.drop_prefix(group.num_saved, STALE_PREFIX)
        ledger.groups.lease(group, granted)


def _decide_renew(ledger: Ledger, command: commands.Renew, call: Call) -> commands.Renewed:
    lost = tuple(key for key in command.leases if ledger.attempts.held(*key, call.sender) is None)
    return commands.Renewed(expires_at=call.now + ledger.lease_s, lost=lost)


def _enact_renew(ledger: Ledger, command: commands.Renew, outcome: commands.Renewed) -> None:
    for key in command.leases:
        if (group := ledger.groups.running(*key)) is not None:
            ledger.groups.leases.extend(group, outcome.expires_at)


def _decide_save_prefix(ledger: Ledger, command: commands.SavePrefix, call: Call) -> commands.Saved:
    group_id, attempt, progress = command.group_id, command.attempt, command.progress
    group = ledger.attempts.held(group_id, attempt, call.sender)
    if group is None:
        raise LeaseExpired(f"the worker has lost the lease on group {group_id} attempt {attempt}; nothing was saved")
    ledger.check_newest(group_id, attempt, progress.newest_version)
    if progress.oldest_version < group.engine_version:
        raise VersionTooOld(
            f"the prefix of group {group_id} attempt {attempt} has a token of policy version {progress.oldest_version},"
            f" but its lease began at version {group.engine_version}; the prefix was not saved"
        )
    ledger.room.check_prefix(group, command.num_bytes)
    return commands.Saved()


def _enact_save_prefix(ledger: Ledger, command: commands.SavePrefix, outcome: commands.Saved) -> None:
    group = ledger.groups[command.group_id]
    ledger.attempts.settle_prefix(group, command.progress.num_tokens, command.continued)
    ledger.groups.space.set_progress(group, command.progress, command.num_bytes)


def _decide_release(ledger: Ledger, command: commands.Release, call: Call) -> commands.Released:
    group_id, attempt = command.group_id, command.attempt
    ledger.attempts.check_was_leased(group_id, attempt, "it cannot be released")
    group = ledger.attempts.held(group_id, attempt, call.sender)
    ended = ledger.history.of(group_id, attempt)
    return commands.Released(
        was_running=group is not None,
        was_owed=ended is not None and ended.owes_report,
        is_dropped=group is not None and 0 < command.max_failures <= group.num_failures + 1,
    )


def _enact_release(ledger: Ledger, command: commands.Release, outcome: commands.Released) -> None:
    account, reason = ledger.account, command.reason
    if outcome.was_running:
        group = ledger.groups[command.group_id]
        owner, num_counted = group.owner, group.num_saved
        group.num_failures += command.max_failures > 0
        with account.settling(owner):
            if outcome.is_dropped:
                account.give_up(reason, num_saved=group.num_saved, num_inherited=group.num_inherited)
                account.groups_dropped[reason] += 1
                ledger.attempts.drop(group, stored=False)
            else:
                ledger.attempts.hand_on(group)
    elif outcome.was_owed and (owed := ledger.attempts.settle_owed(command.group_id, command.attempt)) is not None:
        owner, num_counted, reason = owed.owner, owed.num_counted, owed.reason
    else:
        return
    with account.settling(owner):
        account.abandon(command.num_tokens, reason, num_counted=num_counted if command.continued else 0)


def _decide_expire(ledger: Ledger, command: commands.Expire, call: Call) -> commands.TakenBack:
    return commands.TakenBack(group_ids=tuple(group.group_id for group in ledger.groups.leases.expired(call.now)))


def _enact_expire(ledger: Ledger, command: commands.Expire | commands.TakeBack, outcome: commands.TakenBack) -> None:
    for group_id in outcome.group_ids:
        group = ledger.groups[group_id]
        if isinstance(command, commands.TakeBack):
            ledger.groups.count_death(group)
        if group_id in outcome.dropped:
            ledger.attempts.give_up(group, is_dropped=True, reason=WORKER_DIED)
            continue
        ledger.attempts.revoke(group, "expired")
        with ledger.account.settling(group.owner):
            ledger.attempts.hand_on(group)


def _decide_take_back(ledger: Ledger, command: commands.TakeBack, call: Call) -> commands.TakenBack:
    if command.owner in ledger.account.buried:
        return commands.TakenBack(group_ids=())
    groups = ledger.groups.leases.of_owner(command.owner)
    num_lost = None
    if command.num_generated is not None:
        num_saved = sum(group.num_saved - group.num_inherited for group in groups)
        num_lost = max(0, command.num_generated - ledger.account.settled_by(command.owner) - num_saved)
    dropped = tuple(group.group_id for group in groups if 0 < ledger.max_deaths <= group.num_deaths + 1)
    return commands.TakenBack(group_ids=tuple(group.group_id for group in groups), num_lost=num_lost, dropped=dropped)


def _enact_take_back(ledger: Ledger, command: commands.TakeBack, outcome: commands.TakenBack) -> None:
    _enact_expire(ledger, command, outcome)
    if outcome.num_lost is not None:
        ledger.account.bury(command.owner, outcome.num_lost)


# Finished groups and the stores that hold them


def _decide_reserve(ledger: Ledger, command: commands.Reserve, call: Call) -> commands.Reserved:
    group = ledger.attempts.held(command.group_id, command.attempt, call.sender)
    if group is None:  # the worker has lost the lease, so a later put of this attempt will be refused
        return commands.Reserved(store=0)
    may_evict = not ledger.groups.num_planned and not ledger.can_plan()
    store, evicted = ledger.room.reserve(group, command.num_bytes, host=command.host, may_evict=may_evict)
    return commands.Reserved(store=store, evicted=evicted, is_choice=not ledger.room.is_shared)


def _enact_reserve(ledger: Ledger, command: commands.Reserve, outcome: commands.Reserved) -> None:
    for group_id in outcome.evicted:
        ledger.attempts.evict(ledger.groups[group_id], NO_ROOM)
    group = ledger.groups.running(command.group_id, command.attempt)
    if group is not None:
        ledger.groups.space.set_bytes(group, command.num_bytes, outcome.store)


def _decide_put(ledger: Ledger, command: commands.Put, call: Call) -> commands.PutOutcome:
    summary = command.summary
    group_id, attempt = summary.group_id, summary.attempt
    group = ledger.attempts.held(group_id, attempt, call.sender)
    if group is None:
        return _decide_put_without_lease(ledger, command)
    ledger.check_newest(group_id, attempt, summary.newest_version)
    if summary.oldest_version < group.engine_version:
        message = (
            f"group {group_id} attempt {attempt} holds a token of policy version {summary.oldest_version}, but its "
            f"lease began at version {group.engine_version}; its prompt is leased again"
        )
        return commands.PutOutcome(result=commands.PutResult.too_old, refusal=message)
    if ledger.filters and (name := dropped_by(ledger.filters, summary)) is not None:
        return commands.PutOutcome(result=commands.PutResult.filtered, reason=name)
    return commands.PutOutcome(result=commands.PutResult.stored, rank=rank_of(ledger.prefer, summary, group.deadline))


def _decide_put_without_lease(ledger: Ledger, command: commands.Put) -> commands.PutOutcome:
    group_id, attempt = command.summary.group_id, command.summary.attempt
    ledger.attempts.check_was_leased(group_id, attempt, "put only leased groups")
    group = ledger.groups.get(group_id)
    if group is None:
        was_stored = ledger.history.was_stored(group_id, attempt)
    else:
        was_stored = group.summary is not None and group.summary.attempt == attempt
    if was_stored:
        return commands.PutOutcome(result=commands.PutResult.duplicate)
    ended = ledger.history.of(group_id, attempt)
    if ended is not None and ended.refusal:
        return commands.PutOutcome(result=commands.PutResult.too_old, refusal=ended.refusal)
    message = (
        f"the worker has lost the lease on group {group_id} attempt {attempt}, so the {command.summary.num_tokens} "
        "tokens are dropped; renew each lease well before buffer.lease_s ends, and abort rollouts of revoked leases"
    )
    return commands.PutOutcome(result=commands.PutResult.late, refusal=message)


def _enact_put(ledger: Ledger, command: commands.Put, outcome: commands.PutOutcome) -> None:
    summary, account = command.summary, ledger.account
    if outcome.result is commands.PutResult.duplicate:
        account.puts_refused["duplicate"] += 1
    elif (group := ledger.groups.running(summary.group_id, summary.attempt)) is not None:
        with account.settling(group.owner):
            _settle(ledger, group, command, outcome)
    elif (owed := ledger.attempts.settle_owed(summary.group_id, summary.attempt)) is not None:
        with account.settling(owed.owner):
            num_counted = owed.num_counted if command.continued else 0
            account.refuse(summary, owed.reason, num_counted=num_counted - command.num_left_out)


def _settle(ledger: Ledger, group: Group, command: commands.Put, outcome: commands.PutOutcome) -> None:
    summary, account = command.summary, ledger.account
    ledger.attempts.settle_prefix(group, summary.num_tokens + command.num_left_out, command.continued)
    account.leave_out(command.num_left_out)
    num_inherited = group.num_inherited
    if outcome.result is commands.PutResult.stored:
        ledger.groups.space.set_bytes(group, command.num_bytes)
        group.digest = command.digest
        ledger.groups.store(group, summary, outcome.rank)
        account.store(summary, num_inherited=num_inherited)
    elif outcome.result is commands.PutResult.filtered:
        ledger.attempts.drop(group, stored=True)
        account.filter(summary, outcome.reason, num_inherited=num_inherited)
    else:
        ended = EndedAttempt(owner=group.owner, refusal=outcome.refusal)
        ledger.history.end(group.group_id, group.attempt, ended)
        ledger.groups.requeue(group, keeps_progress=False)
        account.give_up(VERSION_TOO_OLD, num_saved=0, num_inherited=num_inherited)
        account.refuse(summary, VERSION_TOO_OLD, num_counted=0)


def _decide_lose_groups(ledger: Ledger, command: commands.LoseGroups, call: Call) -> commands.Lost:
    """Decide which groups are lost, and which batches are planned again.

    If the command names a group of a batch, this batch and all later batches are planned again. The lost groups then
    include each group of these batches that no store holds.
    """
    table = ledger.groups
    groups = [group for group_id in command.group_ids if (group := table.get(group_id)) is not None]
    planned = [group.planned_for for group in groups if group.state is GroupState.planned]
    dissolved = tuple(version for version in table.plans if planned and version >= min(planned))
    with_them = (table[group_id] for version in dissolved for group_id in table.plans[version])
    groups += [group for group in with_them if group.is_missing]
    found = (group.group_id for group in groups if group.summary is not None or group.prefix_bytes)
    return commands.Lost(
        group_ids=tuple(dict.fromkeys(found)),
        dissolved=dissolved,
        unsent=tuple(group_id for group_id, attempt in command.unsent if table.running(group_id, attempt) is not None),
        missing=tuple(group_id for group_id in command.missing if table.is_planned(group_id)),
    )


def _enact_lose_groups(ledger: Ledger, command: commands.LoseGroups, outcome: commands.Lost) -> None:
    ledger.groups.dissolve(outcome.dissolved)
    for group_id in outcome.group_ids:
        ledger.attempts.evict(ledger.groups[group_id], STORE_LOST)
    for group_id in outcome.unsent:
        ledger.groups.space.set_bytes(ledger.groups[group_id], 0)
    for group_id in outcome.missing:
        ledger.groups[group_id].is_missing = True


def _decide_add_store(ledger: Ledger, command: commands.AddStore, call: Call) -> commands.AddedStore:
    stores = ledger.groups.space.stores
    known = [
        number
        for number, place in enumerate(stores)
        if (place.address, place.host, place.is_gone) == (command.address, command.host, False)
    ]
    number = next(iter([*known, *ledger.groups.space.awaited_stores()]), len(stores))
    return commands.AddedStore(store=number, is_new=not known)


def _enact_add_store(ledger: Ledger, command: commands.AddStore, outcome: commands.AddedStore) -> None:
    if outcome.is_new:
        ledger.groups.space.join(outcome.store, command.address, command.host)


def _decide_drop_store(ledger: Ledger, command: commands.DropStore, call: Call) -> commands.DroppedStore:
    if ledger.groups.space.stores[command.store].is_gone:
        return commands.DroppedStore(is_new=False)
    there = [group for group in ledger.groups if group.store == command.store and group.num_bytes]
    return commands.DroppedStore(
        is_new=True,
        group_ids=tuple(group.group_id for group in there if group.state is GroupState.stored),
        reserved=tuple(group.group_id for group in there if group.state is GroupState.leased),
    )


def _enact_drop_store(ledger: Ledger, command: commands.DropStore, outcome: commands.DroppedStore) -> None:
    ledger.groups.space.stores[command.store].is_gone = True
    for group in ledger.groups.of_state(GroupState.planned):
        group.is_missing = group.is_missing or group.store == command.store
    for group_id in outcome.reserved:
        ledger.groups.space.set_bytes(ledger.groups[group_id], 0)
    for group_id in outcome.group_ids:
        ledger.attempts.evict(ledger.groups[group_id], STORE_LOST)


# Batches


def _decide_plan_batch(ledger: Ledger, command: commands.PlanBatch, call: Call) -> commands.Planned:
    """Choose the groups of a batch. If the batch is already planned, return the groups of this batch.

    Raises the error of `Ledger.check_plan`.
    """
    version, groups = command.version, ledger.groups
    ledger.check_plan(version)
    if version in groups.plans:
        return commands.Planned(version=version, group_ids=groups.plans[version], is_new=False)
    if not ledger.can_plan():
        return commands.Planned(version=version, group_ids=(), is_new=False)
    given_up = groups.leases.last(ledger.missing(), version=version)
    due = dict(groups.open_by_deadline)
    for group in given_up:
        due[group.deadline] -= 1
    required = ledger.rule.required(due, version=version)
    batch = choose_batch(groups.ready.by_rank(), required, version=version, seats=ledger.rule.groups_per_step)
    return commands.Planned(
        version=version,
        group_ids=tuple(batch),
        given_up=tuple(group.group_id for group in given_up),
        is_dropped=ledger.on_stale is OnStale.drop,
    )


def _enact_plan_batch(ledger: Ledger, command: commands.PlanBatch, outcome: commands.Planned) -> None:
    if not outcome.is_new:
        return
    for group_id in outcome.given_up:
        ledger.attempts.give_up(ledger.groups[group_id], is_dropped=outcome.is_dropped, reason=STALE)
    ledger.groups.plan(outcome.version, outcome.group_ids)


def _decide_commit(ledger: Ledger, command: commands.Commit, call: Call) -> commands.Committed:
    """Decide which groups a learner step has consumed. The outcome of a repeated commit has no groups.

    Raises `ReplayBufferError` if the step's batch is not planned, or if an earlier step is not committed. Raises
    `StalenessError` if a group breaks the staleness bound, which would be a bug in the ledger.
    """
    version = command.version
    if 0 <= version < ledger.learner_version:
        return commands.Committed(version=version, group_ids=())
    if version != ledger.learner_version or version not in ledger.groups.plans:
        raise ReplayBufferError(
            f"commit({version}) was requested at learner version {ledger.learner_version}, with planned versions "
            f"{sorted(ledger.groups.plans)}; commit planned versions in order"
        )
    group_ids = ledger.groups.plans[version]
    for group in map(ledger.groups.stored, group_ids):
        lag = version - group.result.oldest_version
        if lag > ledger.rule.max_lag or version > group.deadline:
            raise StalenessError(
                f"group {group.group_id} with deadline {group.deadline} would be consumed at version {version} with a "
                f"token of version {group.result.oldest_version}; the lag is {lag}, max_lag is {ledger.rule.max_lag}"
            )
    return commands.Committed(version=version, group_ids=group_ids, again=_admitted_again(ledger, group_ids))


def _admitted_again(ledger: Ledger, group_ids: Sequence[int]) -> tuple[tuple[int, float], ...]:
    """Return which groups of a committed batch stay stored for a further step, as (group id, new sort key) pairs.

    A group stays if a store has its trajectories, fewer than ``max_uses`` steps have trained on it, and the staleness
    rule admits it again. The committed step counts as a use.
    """
    rule, again = ledger.rule, []
    if rule.max_uses == 1:
        return ()
    due = dict(ledger.groups.open_by_deadline)
    for group in map(ledger.groups.stored, group_ids):
        if group.is_missing or len(group.uses) + 1 >= rule.max_uses:
            continue
        if rule.admits(due, version=ledger.next_plan, engine_version=group.engine_version):
            due[group.deadline] = due.get(group.deadline, 0) + 1
            summary = replace(group.result, num_uses=len(group.uses) + 1)
            again.append((group.group_id, rank_of(ledger.prefer, summary, group.deadline)))
    return tuple(again)


def _enact_commit(ledger: Ledger, command: commands.Commit, outcome: commands.Committed) -> None:
    if not outcome.group_ids:
        return
    again = dict(outcome.again)
    for group in map(ledger.groups.stored, outcome.group_ids):
        ledger.attempts.finish(group, stored=True, is_kept=group.group_id in again)
        ledger.account.consume(group.result, outcome.version)
    ledger.groups.finish_batch(outcome.version, again)
    ledger.learner_version += 1
    ledger.marks.reach(ledger.learner_version, ledger.history, ledger.account)


# Checkpoints, and going back to a checkpoint


def _decide_checkpoint(ledger: Ledger, command: commands.Checkpoint, call: Call) -> commands.Marked:
    if ledger.marks.has(command.version, command.key):
        return commands.Marked(is_new=False)
    if not ledger.learner_version <= command.version <= ledger.next_plan:
        raise ReplayBufferError(
            f"checkpoint({command.version}) was requested at learner version {ledger.learner_version}; every step "
            "before a checkpoint must be planned or committed, so the checkpoint's version must be in "
            f"{ledger.learner_version}..{ledger.next_plan}"
        )
    return commands.Marked(is_new=True)


def _enact_checkpoint(ledger: Ledger, command: commands.Checkpoint, outcome: commands.Marked) -> None:
    if outcome.is_new:
        ledger.marks.add(command.version, command.key)
        ledger.marks.reach(ledger.learner_version, ledger.history, ledger.account)


def _decide_rewind(ledger: Ledger, command: commands.Rewind, call: Call) -> commands.Rewound:
    if command.incarnation <= ledger.incarnation:
        return commands.Rewound(is_new=False)
    if not 0 <= command.version <= ledger.learner_version:
        raise ReplayBufferError(
            f"rewind({command.version}) was requested at learner version {ledger.learner_version}; rewind to the "
            "version of a checkpoint whose steps are committed"
        )
    ledger.marks.at(command.version)
    return decide_return(ledger.groups, command.version, rule=ledger.rule, prefer=ledger.prefer)


def _enact_rewind(ledger: Ledger, command: commands.Rewind, outcome: commands.Rewound) -> None:
    if outcome.is_new:
        _go_back(ledger, command.version, outcome)
        ledger.incarnation = command.incarnation


def _decide_resume(ledger: Ledger, command: commands.Resume, call: Call) -> commands.Rewound:
    if ledger.marks.at(command.version).key != command.key:
        raise ReplayBufferError(
            f"the learner and the ledger have different checkpoints of version {command.version}; resume both from "
            "the same checkpoint"
        )
    return decide_return(ledger.groups, command.version, rule=ledger.rule, prefer=ledger.prefer)


def _enact_resume(ledger: Ledger, command: commands.Resume, outcome: commands.Rewound) -> None:
    _go_back(ledger, command.version, outcome)
    ledger.groups.space.await_stores()
    ledger.incarnation = 0
    ledger.account.begin_life(command.tokens_generated)


def _go_back(ledger: Ledger, version: int, outcome: commands.Rewound) -> None:
    ledger.groups.dissolve(tuple(ledger.groups.plans))
    ledger.attempts.forget_uses(version)
    lost = dict.fromkeys(outcome.unfit, STALE) | dict.fromkeys(outcome.missing, STORE_LOST)
    lost |= dict.fromkeys(outcome.group_ids, REWOUND)
    # Requeue the largest id first. Each group goes to the head of the queue, so the smallest id is then at the head.
    for group_id in sorted({*lost, *outcome.revoked}, reverse=True):
        ledger.attempts.take_back(ledger.groups[group_id], lost)
    for group_id, deadline, rank in outcome.moved:
        ledger.groups.move(ledger.groups[group_id], deadline, rank)
    mark = ledger.marks.at(version)
    ledger.history.reopen(IdSet(mark.finished))
    ledger.account.rewind(
        tokens_trained=mark.tokens_trained,
        tokens_reused=mark.tokens_reused,
        groups_reused=mark.groups_reused,
        lags=dict(mark.lags),
    )
    ledger.marks.forget_after(version)
    ledger.learner_version = version


_DECIDE, _ENACT = (
    {kind: globals()[f"_{verb}_{kind.__struct_config__.tag}"] for kind in leaves(Command)}
    for verb in ("decide", "enact")
)
"""The functions that decide and enact each type of command."""
