"""The ledger: where every prompt group is, as a pure state machine. No socket, no clock of its own, no payload.

``queued → leased → stored → planned → consumed``, with exits ``dropped(reason)`` and a way back to the head of the
queue under the next attempt. Whoever drives it passes the time in, calls `expire` at `next_expiry`, and sends the
`Revocation`s that `drain_revocations` returns.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from asyncrl.protocol.errors import LeaseExpired, ReplayBufferError, StalenessError, UnknownGroup, VersionTooOld
from asyncrl.protocol.types import BufferStats, GroupSummary, Plan

from .account import Account
from .attempts import Attempts
from .config import OnStale, SelectionOrder
from .leases import RunningLease, RunningLeases
from .ready import ReadyGroups
from .staleness import StalenessRule


class PutResult(StrEnum):
    """What an acknowledged put did."""

    stored = "stored"
    duplicate = "duplicate"


@dataclass(frozen=True, kw_only=True, slots=True)
class Revocation:
    """A lease that its owner no longer holds."""

    owner: bytes
    group_id: int
    attempt: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stored:
    """A stored or planned group."""

    summary: GroupSummary
    deadline: int


class Ledger:
    """The account of prompt groups.

    Args:
        rule: The staleness bound.
        on_stale: What happens to a running group that a plan would have to wait for.
        order: Which stored groups a batch prefers.
        lease_s: A lease not renewed for this long is taken back.
    """

    def __init__(
        self,
        rule: StalenessRule,
        *,
        on_stale: OnStale = OnStale.wait,
        order: SelectionOrder = SelectionOrder.earliest_deadline,
        lease_s: float = 60.0,
    ) -> None:
        self.rule = rule
        self.account = Account()
        self.learner_version = 0
        self._on_stale = on_stale
        self._lease_s = lease_s
        self._attempts = Attempts()
        self._queue: deque[int] = deque()
        self._leases = RunningLeases()
        self._stored: dict[int, _Stored] = {}
        self._ready = ReadyGroups(rule, order)
        self._plans: dict[int, Plan] = {}
        self._revocations: list[Revocation] = []

    @property
    def num_queued(self) -> int:
        """Groups that wait for admission."""
        return len(self._queue)

    @property
    def num_leased(self) -> int:
        """Groups that are being generated."""
        return len(self._leases)

    @property
    def num_stored(self) -> int:
        """Groups that wait for a plan."""
        return len(self._ready)

    @property
    def num_planned(self) -> int:
        """Groups that wait for the commit of their step."""
        return len(self._stored) - len(self._ready)

    @property
    def outstanding(self) -> int:
        """Groups admitted, and neither consumed nor dropped."""
        return self.num_leased + len(self._stored)

    @property
    def next_plan(self) -> int:
        """w, the version to be planned next."""
        return self.learner_version + len(self._plans)

    def due(self) -> dict[int, int]:
        """Deadline to number of groups leased or stored, not yet planned."""
        due = self._ready.due()
        for deadline, number in self._leases.due().items():
            due[deadline] = due.get(deadline, 0) + number
        return due

    def admits(self, engine_version: int) -> bool:
        """Whether a group may begin now on an engine that serves ``engine_version``."""
        return self.rule.admits(
            outstanding=self.outstanding, learner_version=self.learner_version, engine_version=engine_version
        )

    def holds(self, group_id: int, attempt: int) -> bool:
        """Whether this attempt is the one being generated."""
        return self._leases.held(group_id, attempt) is not None

    def enqueue(self, group_ids: Iterable[int]) -> list[int]:
        """Queue prompts; returns those that were new, so that a prompt sent twice is queued once."""
        new = [group_id for group_id in group_ids if self._attempts.begin(group_id)]
        self._queue.extend(new)
        return new

    def lease(self, engine_version: int, max_groups: int, *, owner: bytes = b"", now: float) -> list[RunningLease]:
        """Admit up to ``max_groups`` from the head of the queue; empty when none is admitted now.

        Raises:
            ReplayBufferError: the engine claims a version that no committed step has made.
        """
        self.check_engine_version(engine_version)
        granted = []
        while len(granted) < max_groups and self._queue and self.admits(engine_version):
            group_id = self._queue.popleft()
            lease = RunningLease(
                group_id=group_id,
                attempt=self._attempts.lease(group_id),
                engine_version=engine_version,
                deadline=self.rule.deadline(engine_version),
                owner=owner,
                expires_at=now + self._lease_s,
            )
            self._leases.add(lease)
            granted.append(lease)
        return granted

    def check_engine_version(self, engine_version: int) -> None:
        """Refuse a version that no committed step has made.

        Raises:
            ReplayBufferError: it is none of 0..learner_version.
        """
        if not 0 <= engine_version <= self.learner_version:
            raise ReplayBufferError(
                f"an engine asks for a lease at policy version {engine_version}, but the learner has committed "
                f"{self.learner_version} steps; an engine serves a version in 0..{self.learner_version}"
            )

    def renew(self, group_id: int, attempt: int, *, now: float) -> bool:
        """Extend a lease; False when it is no longer held."""
        lease = self._leases.held(group_id, attempt)
        if lease is not None:
            self._leases.extend(lease, now + self._lease_s)
        return lease is not None

    def next_expiry(self) -> float | None:
        """When `expire` is to be called next, on the clock of ``now``; None while no lease runs."""
        lease = self._leases.next_expiry()
        return None if lease is None else lease.expires_at

    def expire(self, now: float) -> int:
        """Take back every lease that ran out; its prompt goes to the head of the queue. Returns how many."""
        num_expired = 0
        while (lease := self._leases.next_expiry()) is not None and lease.expires_at <= now:
            self._revoke(lease)
            self._queue.appendleft(lease.group_id)
            num_expired += 1
        return num_expired

    def drain_revocations(self) -> list[Revocation]:
        """Leases taken away since the last call."""
        revocations, self._revocations = self._revocations, []
        return revocations

    def put(self, summary: GroupSummary) -> PutResult:
        """Store a finished group, once however often it is sent.

        Raises:
            LeaseExpired: the attempt is no longer the current one; its tokens count as dropped.
            VersionTooOld: the group holds a token older than its lease; its tokens count as dropped, and its prompt is
                leased again.
            UnknownGroup: no such attempt was ever leased.
        """
        lease = self._leases.held(summary.group_id, summary.attempt)
        if lease is None:
            return self._put_without_lease(summary)
        self._leases.remove(lease)
        if summary.oldest_version < lease.engine_version:
            self._refuse_as_too_old(summary, lease)
        self._stored[summary.group_id] = _Stored(summary=summary, deadline=lease.deadline)
        self._ready.add(summary, lease.deadline)
        self.account.store(summary)
        return PutResult.stored

    def _refuse_as_too_old(self, summary: GroupSummary, lease: RunningLease) -> None:
        message = (
            f"group {summary.group_id} attempt {summary.attempt} holds a token of policy version "
            f"{summary.oldest_version}, but its lease began at {lease.engine_version}; its prompt is leased again"
        )
        self._attempts.refuse_as_too_old(summary.group_id, summary.attempt, message)
        self._queue.appendleft(summary.group_id)
        self.account.refuse(summary, "version_too_old")
        raise VersionTooOld(message)

    def _put_without_lease(self, summary: GroupSummary) -> PutResult:
        """Acknowledge what was stored before; refuse what comes too late, and count it once."""
        group_id, attempt = summary.group_id, summary.attempt
        if not self._attempts.was_leased(group_id, attempt):
            raise UnknownGroup(f"group {group_id} attempt {attempt} was never leased; put only what a lease asked for")
        stored = self._stored.get(group_id)
        if (stored is not None and stored.summary.attempt == attempt) or self._attempts.finished_with(
            group_id, attempt
        ):
            self.account.puts_refused["duplicate"] += 1
            return PutResult.duplicate
        if (message := self._attempts.too_old(group_id, attempt)) is not None:
            raise VersionTooOld(message)
        if self._attempts.report(group_id, attempt):
            self.account.refuse(summary, "expired")
        raise LeaseExpired(
            f"the lease on group {group_id} attempt {attempt} is no longer held, and its {summary.num_tokens} tokens "
            "are dropped; renew leases well within buffer.lease_s and abort a rollout that is revoked"
        )

    def release(self, group_id: int, attempt: int, *, num_tokens: int, reason: str) -> None:
        """Give a lease back unfinished, or report what a revoked attempt had written; counted once.

        Raises:
            UnknownGroup: no such attempt was ever leased.
        """
        if not self._attempts.was_leased(group_id, attempt):
            raise UnknownGroup(f"group {group_id} attempt {attempt} was never leased; it cannot be released")
        lease = self._leases.held(group_id, attempt)
        if lease is not None:
            self._leases.remove(lease)
            self._queue.appendleft(group_id)
        elif not self._attempts.report(group_id, attempt):
            return
        self.account.abandon(num_tokens, reason)

    def plan(self, version: int) -> Plan | None:
        """The batch of ``version``, or None while it must wait; a plan once made stays as it is.

        Raises:
            ReplayBufferError: ``version`` is committed already, or is not the next to be planned.
        """
        self.check_plan(version)
        if version in self._plans:
            return self._plans[version]
        if self.num_stored < self.rule.groups_per_step or not self._stragglers_resolved(version):
            return None
        required = self.rule.required(self.due(), version=version)
        group_ids = self._ready.take_batch(required, version)
        plan = Plan(version=version, groups=tuple(self._stored[group_id].summary for group_id in group_ids))
        self._plans[version] = plan
        return plan

    def check_plan(self, version: int) -> None:
        """Refuse a version that can be neither planned now nor answered from a plan made before.

        Raises:
            ReplayBufferError: ``version`` is committed already, or is not the next to be planned.
        """
        if version not in self._plans and (version != self.next_plan or version > self.learner_version + 1):
            raise ReplayBufferError(
                f"plan({version}) was asked while the learner is at version {self.learner_version} and the next to "
                f"plan is {self.next_plan}; plan in order, at most one step ahead of the last commit"
            )

    def _stragglers_resolved(self, version: int) -> bool:
        """Whether the groups that this plan must hold are stored; revokes the missing unless it is to wait for them."""
        ready = self._ready.due()
        num_ready = num_revoked = 0
        for k, required in enumerate(self.rule.required(self.due(), version=version)):
            num_ready += ready.get(version + k, 0)
            num_missing = required - num_revoked - num_ready
            if num_missing > 0 and self._on_stale == OnStale.wait:
                return False
            for lease in self._leases.last_leased(version + k, num_missing) if num_missing > 0 else ():
                self._give_up(lease)
                num_revoked += 1
        return True

    def _give_up(self, lease: RunningLease) -> None:
        """A straggler: revoke it, then lease its prompt again or drop it."""
        self._revoke(lease)
        if self._on_stale == OnStale.requeue:
            self._queue.appendleft(lease.group_id)
        else:
            self._attempts.finish(lease.group_id, stored=False)
            self.account.groups_dropped += 1

    def _revoke(self, lease: RunningLease) -> None:
        self._leases.remove(lease)
        self._attempts.revoke(lease.group_id, lease.attempt)
        self._revocations.append(Revocation(owner=lease.owner, group_id=lease.group_id, attempt=lease.attempt))

    def commit(self, version: int) -> list[int]:
        """Mark the plan of ``version`` consumed; returns its group ids, none when it was committed before.

        Raises:
            StalenessError: a group of the batch breaks the bound. It must never fire.
            ReplayBufferError: the plan of ``version`` was not made, or an earlier one is not committed.
        """
        if 0 <= version < self.learner_version:
            return []
        if version != self.learner_version or version not in self._plans:
            raise ReplayBufferError(
                f"commit({version}) was asked while the learner is at version {self.learner_version} and the "
                f"plans made are {sorted(self._plans)}; commit in order, what was planned"
            )
        plan = self._plans[version]
        self._check_bound(plan)
        del self._plans[version]
        for summary in plan.groups:
            del self._stored[summary.group_id]
            self._attempts.finish(summary.group_id, stored=True)
            self.account.consume(summary, version)
        self.learner_version += 1
        return [summary.group_id for summary in plan.groups]

    def _check_bound(self, plan: Plan) -> None:
        for summary in plan.groups:
            lag = plan.version - summary.oldest_version
            if lag > self.rule.max_lag or plan.version > self._stored[summary.group_id].deadline:
                raise StalenessError(
                    f"group {summary.group_id} would be consumed at version {plan.version} with a token of version "
                    f"{summary.oldest_version}: lag {lag}, bound {self.rule.max_lag}; the ledger is wrong"
                )

    def stats(self, *, stored_bytes: int = 0, leases_waiting: int = 0) -> BufferStats:
        """The ledger now."""
        groups = {
            "queued": self.num_queued,
            "leased": self.num_leased,
            "stored": self.num_stored,
            "planned": self.num_planned,
        }
        return self.account.stats(
            learner_version=self.learner_version,
            groups=groups,
            stored_bytes=stored_bytes,
            leases_waiting=leases_waiting,
        )
