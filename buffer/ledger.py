"""The ledger: where every prompt group is, as a pure state machine. No socket, no clock of its own, no payload.

``queued → leased → stored → planned → consumed``, with exits ``dropped(reason)`` and a way back to the head of the
queue under the next attempt. Whoever drives it passes the time in, calls `expire` at `next_expiry`, and sends the
`Revocation`s that `drain_revocations` returns. What it knows is in `LedgerState`.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from asyncrl.protocol.errors import LeaseExpired, ReplayBufferError, UnknownGroup, VersionTooOld
from asyncrl.protocol.types import BufferStats, GroupSummary, Plan

from .account import DISCARDED_PREFIX, STALE_PREFIX
from .config import OnStale
from .filters import dropped_by, find_filters
from .leases import Progress, PutResult, Revocation, RunningLease
from .ledger_state import LedgerState
from .orders import find_order
from .staleness import StalenessRule


class Ledger:
    """The account of prompt groups.

    Args:
        rule: The staleness bound.
        on_stale: What happens to a running group that a plan would have to wait for.
        order: Which stored groups a batch prefers; a name from `buffer.orders`, or ``module:function``.
        lease_s: A lease not renewed for this long is taken back.
        filters: Names from `buffer.filters`, or ``module:function``; a finished group that one drops is never stored.
        first_version: Learner version to begin at.
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
    ) -> None:
        self.rule = rule
        self.state = LedgerState(rule, find_order(order), first_version=first_version)
        self._on_stale = on_stale
        self._lease_s = lease_s
        self._filters = find_filters(filters)
        self._revocations: list[Revocation] = []
        self._finished: list[int] = []

    def holds(self, group_id: int, attempt: int) -> bool:
        """Whether this attempt is the one being generated."""
        return self.state.leases.held(group_id, attempt) is not None

    def stats(self, *, stored_bytes: int = 0, held_bytes: int = 0, leases_waiting: int = 0) -> BufferStats:
        """The ledger now."""
        return self.state.stats(stored_bytes=stored_bytes, held_bytes=held_bytes, leases_waiting=leases_waiting)

    def snapshot(self) -> dict[str, Any]:
        """The whole ledger as plain values, for `restore`."""
        return self.state.snapshot()

    def restore(self, values: Mapping[str, Any]) -> None:
        """Take the state of a snapshot into this new ledger.

        Raises:
            ValueError: the snapshot has another format, or another bound or batch size than this ledger.
        """
        self.state.restore(values)

    # Admission

    def enqueue(self, group_ids: Iterable[int]) -> list[int]:
        """Queue prompts; returns those that were new, so that a prompt sent twice is queued once."""
        new = [group_id for group_id in group_ids if self.state.attempts.begin(group_id)]
        self.state.queue.extend(new)
        return new

    def lease(
        self, engine_version: int, max_groups: int, *, owner: bytes = b"", request_id: int = 0, now: float
    ) -> list[RunningLease]:
        """Admit up to ``max_groups`` from the head of the queue; empty when none is admitted now.

        Raises:
            ReplayBufferError: the engine claims a version that no committed step has made.
        """
        self.check_engine_version(engine_version)
        state = self.state
        granted: list[RunningLease] = []
        while len(granted) < max_groups and state.queue and state.admits(engine_version):
            group_id, saved = state.queue.pop()
            progress = self._continued(saved)
            oldest = engine_version if progress is None else min(engine_version, progress.oldest_version)
            lease = RunningLease(
                group_id=group_id,
                attempt=state.attempts.lease(group_id),
                engine_version=oldest,
                deadline=self.rule.deadline(oldest),
                owner=owner,
                expires_at=now + self._lease_s,
                progress=progress,
                num_inherited=0 if progress is None else progress.num_tokens,
                request_id=request_id,
            )
            state.leases.add(lease)
            granted.append(lease)
        return granted

    def _continued(self, saved: Progress | None) -> Progress | None:
        """The prefix that the next attempt may continue, if a group as old as its oldest token is still admitted."""
        if saved is None or self.state.admits(saved.oldest_version):
            return saved
        self.state.account.drop_prefix(saved.num_tokens, STALE_PREFIX)
        return None

    def check_engine_version(self, engine_version: int) -> None:
        """Refuse a version that no committed step has made.

        Raises:
            ReplayBufferError: it is none of 0..learner_version.
        """
        learner_version = self.state.learner_version
        if not 0 <= engine_version <= learner_version:
            raise ReplayBufferError(
                f"an engine asks for a lease at policy version {engine_version}, but the learner has committed "
                f"{learner_version} steps; an engine serves a version in 0..{learner_version}"
            )

    # Running leases

    def renew(self, group_id: int, attempt: int, *, now: float) -> bool:
        """Extend a lease; False when it is no longer held."""
        lease = self.state.leases.held(group_id, attempt)
        if lease is not None:
            self.state.leases.extend(lease, now + self._lease_s)
        return lease is not None

    def save_progress(self, group_id: int, attempt: int, progress: Progress, *, continued: bool = True) -> None:
        """Note what a running group has so far; its next attempt may continue it.

        Args:
            group_id: The group.
            attempt: Its attempt.
            progress: All of it, the prefix it began with included.
            continued: False if its worker did not take that prefix, and began afresh.

        Raises:
            LeaseExpired: the attempt is no longer the current one.
            VersionTooOld: the progress holds a token older than its lease.
        """
        lease = self.state.leases.held(group_id, attempt)
        if lease is None:
            raise LeaseExpired(f"the lease on group {group_id} attempt {attempt} is no longer held; nothing was saved")
        if progress.oldest_version < lease.engine_version:
            raise VersionTooOld(
                f"progress of group {group_id} attempt {attempt} holds a token of policy version "
                f"{progress.oldest_version}, but its lease began at {lease.engine_version}; nothing was saved"
            )
        self._settle_prefix(lease, progress.num_tokens, continued)
        lease.progress = progress

    def _settle_prefix(self, lease: RunningLease, num_tokens: int, continued: bool) -> None:
        """A prefix that is not part of what its worker reports is gone: count it as dropped."""
        if continued and num_tokens >= lease.num_inherited:
            return
        self.state.account.drop_prefix(lease.num_inherited, DISCARDED_PREFIX)
        lease.num_inherited = 0

    def next_expiry(self) -> float | None:
        """When `expire` is to be called next, on the clock of ``now``; None while no lease runs."""
        lease = self.state.leases.next_expiry()
        return None if lease is None else lease.expires_at

    def expire(self, now: float) -> int:
        """Take back every lease that ran out; its prompt goes to the head of the queue. Returns how many."""
        num_expired = 0
        while (lease := self.state.leases.next_expiry()) is not None and lease.expires_at <= now:
            self.take_back(lease)
            num_expired += 1
        return num_expired

    def take_back(self, lease: RunningLease) -> None:
        """Revoke a lease; its prompt, and what was saved of it, go to the head of the queue."""
        self._revoke(lease, reason="expired")
        self._hand_on(lease)

    def _hand_on(self, lease: RunningLease) -> None:
        """Queue the prompt of a lease that ended, with what was saved of it."""
        self.state.queue.push_front(lease.group_id, lease.progress)
        self.state.account.hand_on(num_saved=lease.num_saved, num_inherited=lease.num_inherited)

    def _revoke(self, lease: RunningLease, *, reason: str) -> None:
        self.state.leases.remove(lease)
        self.state.attempts.revoke(lease.group_id, lease.attempt, num_counted=lease.num_saved, reason=reason)
        self._revocations.append(Revocation(owner=lease.owner, group_id=lease.group_id, attempt=lease.attempt))

    def drain_revocations(self) -> list[Revocation]:
        """Leases taken away since the last call."""
        revocations, self._revocations = self._revocations, []
        return revocations

    # Results

    def put(self, summary: GroupSummary, *, continued: bool = True) -> PutResult:
        """Store a finished group, once however often it is sent.

        Args:
            summary: The group.
            continued: False if its lease came with a prefix that its worker did not take.

        Raises:
            LeaseExpired: the attempt is no longer the current one; its tokens count as dropped.
            VersionTooOld: the group holds a token older than its lease; its tokens count as dropped, and its prompt is
                leased again.
            UnknownGroup: no such attempt was ever leased.
        """
        lease = self.state.leases.held(summary.group_id, summary.attempt)
        if lease is None:
            return self._put_without_lease(summary, continued)
        is_too_old = summary.oldest_version < lease.engine_version
        name = None if is_too_old else dropped_by(self._filters, summary)
        rank = self.state.batches.rank(summary, lease.deadline)
        self._settle_prefix(lease, summary.num_tokens, continued)
        self.state.leases.remove(lease)
        if is_too_old:
            self._refuse_as_too_old(summary, lease)
        if name is not None:
            self._finish(summary.group_id, stored=True)
            self.state.account.filter(summary, name, num_inherited=lease.num_inherited)
            return PutResult.filtered
        self.state.batches.add(summary, lease.deadline, rank)
        self.state.account.store(summary, num_inherited=lease.num_inherited)
        return PutResult.stored

    def _refuse_as_too_old(self, summary: GroupSummary, lease: RunningLease) -> None:
        message = (
            f"group {summary.group_id} attempt {summary.attempt} holds a token of policy version "
            f"{summary.oldest_version}, but its lease began at {lease.engine_version}; its prompt is leased again"
        )
        self.state.attempts.refuse_as_too_old(summary.group_id, summary.attempt, message)
        self.state.queue.push_front(summary.group_id)
        self.state.account.give_up("version_too_old", num_saved=0, num_inherited=lease.num_inherited)
        self.state.account.refuse(summary, "version_too_old", num_counted=0)
        raise VersionTooOld(message)

    def _put_without_lease(self, summary: GroupSummary, continued: bool) -> PutResult:
        """Acknowledge what was stored before; refuse what comes too late, and count it once."""
        group_id, attempt = summary.group_id, summary.attempt
        state = self.state
        if not state.attempts.was_leased(group_id, attempt):
            raise UnknownGroup(f"group {group_id} attempt {attempt} was never leased; put only what a lease asked for")
        if state.batches.holds(group_id, attempt) or state.attempts.finished_with(group_id, attempt):
            state.account.puts_refused["duplicate"] += 1
            return PutResult.duplicate
        if (message := state.attempts.too_old(group_id, attempt)) is not None:
            raise VersionTooOld(message)
        if (owed := state.attempts.report(group_id, attempt)) is not None:
            state.account.refuse(summary, owed.reason, num_counted=owed.num_counted if continued else 0)
        raise LeaseExpired(
            f"the lease on group {group_id} attempt {attempt} is no longer held, and its {summary.num_tokens} tokens "
            "are dropped; renew leases well within buffer.lease_s and abort a rollout that is revoked"
        )

    def release(self, group_id: int, attempt: int, *, num_tokens: int, reason: str, continued: bool = True) -> None:
        """Give a lease back unfinished, or report what a revoked attempt had written; counted once.

        Args:
            group_id: The group.
            attempt: Its attempt.
            num_tokens: What it has written, with the prefix that it continued.
            reason: What the tokens that are not saved are dropped for.
            continued: False if its lease came with a prefix that its worker did not take.

        Raises:
            UnknownGroup: no such attempt was ever leased.
        """
        if not self.state.attempts.was_leased(group_id, attempt):
            raise UnknownGroup(f"group {group_id} attempt {attempt} was never leased; it cannot be released")
        lease = self.state.leases.held(group_id, attempt)
        if lease is not None:
            self.state.leases.remove(lease)
            self._hand_on(lease)
            num_counted = lease.num_saved
        elif (owed := self.state.attempts.report(group_id, attempt)) is not None:
            num_counted, reason = owed.num_counted, owed.reason
        else:
            return
        self.state.account.abandon(num_tokens, reason, num_counted=num_counted if continued else 0)

    # Batches

    def plan(self, version: int) -> Plan | None:
        """The batch of ``version``, or None while it must wait; a plan once made stays as it is.

        Raises:
            ReplayBufferError: ``version`` is committed already, or is not the next to be planned.
        """
        self.check_plan(version)
        batches = self.state.batches
        if version not in batches.plans:
            if not self.can_plan(version):
                return None
            self._give_up_stragglers(version)
            batches.make(version, self.state.required())
        return batches.plans[version]

    def check_plan(self, version: int) -> None:
        """Refuse a version that can be neither planned now nor answered from a plan made before.

        Raises:
            ReplayBufferError: ``version`` is committed already, or is not the next to be planned.
        """
        state = self.state
        is_next = version == state.next_plan and version <= state.learner_version + 1
        if version not in state.batches.plans and not is_next:
            raise ReplayBufferError(
                f"plan({version}) was asked while the learner is at version {state.learner_version} and the next to "
                f"plan is {state.next_plan}; plan in order, at most one step ahead of the last commit"
            )

    def can_plan(self, version: int) -> bool:
        """Whether the next batch can be made now, its stragglers given up unless they are to be waited for."""
        if self.state.num_stored < self.rule.groups_per_step:
            return False
        return self._on_stale != OnStale.wait or not any(self.state.missing())

    def _give_up_stragglers(self, version: int) -> None:
        """Revoke running groups that this batch would have to hold, those begun last first: they lose the least."""
        for k, number in enumerate(self.state.missing()):
            for lease in self.state.leases.last_leased(version + k, number):
                self._give_up(lease)

    def _give_up(self, lease: RunningLease) -> None:
        """A straggler: revoke it, then lease its prompt again or drop it."""
        self._revoke(lease, reason="stale")
        self.state.account.give_up("stale", num_saved=lease.num_saved, num_inherited=lease.num_inherited)
        if self._on_stale == OnStale.requeue:
            self.state.queue.push_front(lease.group_id)
        else:
            self._finish(lease.group_id, stored=False)
            self.state.account.groups_dropped["stale"] += 1

    def commit(self, version: int) -> list[int]:
        """Mark the plan of ``version`` consumed; returns its group ids, none when it was committed before.

        Raises:
            StalenessError: a group of the batch breaks the bound. It must never fire.
            ReplayBufferError: the plan of ``version`` was not made, or an earlier one is not committed.
        """
        state = self.state
        if 0 <= version < state.learner_version:
            return []
        if version != state.learner_version or version not in state.batches.plans:
            raise ReplayBufferError(
                f"commit({version}) was asked while the learner is at version {state.learner_version} and the "
                f"plans made are {sorted(state.batches.plans)}; commit in order, what was planned"
            )
        plan = state.batches.take(version)
        for summary in plan.groups:
            self._finish(summary.group_id, stored=True)
            state.account.consume(summary, version)
        state.learner_version += 1
        return [summary.group_id for summary in plan.groups]

    def _finish(self, group_id: int, *, stored: bool) -> None:
        self.state.attempts.finish(group_id, stored=stored)
        self._finished.append(group_id)

    def drain_finished(self) -> list[int]:
        """Groups consumed or dropped since the last call; nobody needs their prompts and trajectories."""
        finished, self._finished = self._finished, []
        return finished
