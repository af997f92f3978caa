"""The ledger: where every prompt group is, as a pure state machine. No socket, no clock of its own, no payload.

``queued → leased → stored → planned → consumed``, with exits ``dropped(reason)`` and a way back to the head of the
queue under the next attempt. Whoever drives it passes the time in, calls `expire` at `next_expiry`, and sends the
`Revocation`s that `drain_revocations` returns.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from asyncrl.protocol.errors import LeaseExpired, ReplayBufferError, UnknownGroup, VersionTooOld
from asyncrl.protocol.types import BufferStats, GroupSummary, Plan

from .account import Account
from .attempts import Attempts
from .batches import Batches
from .config import OnStale, SelectionOrder
from .filters import dropped_by
from .leases import Progress, PutResult, Revocation, RunningLease, RunningLeases
from .queue import PromptQueue
from .staleness import StalenessRule

SNAPSHOT_FORMAT = 1


class Ledger:
    """The account of prompt groups.

    Args:
        rule: The staleness bound.
        on_stale: What happens to a running group that a plan would have to wait for.
        order: Which stored groups a batch prefers.
        lease_s: A lease not renewed for this long is taken back.
        filters: Names from `buffer.filters`; a finished group that one drops is never stored.
        first_version: Learner version to begin at.
    """

    def __init__(
        self,
        rule: StalenessRule,
        *,
        on_stale: OnStale = OnStale.wait,
        order: SelectionOrder = SelectionOrder.earliest_deadline,
        lease_s: float = 60.0,
        filters: Sequence[str] = (),
        first_version: int = 0,
    ) -> None:
        self.rule = rule
        self.account = Account()
        self.learner_version = first_version
        self._on_stale = on_stale
        self._lease_s = lease_s
        self._filters = tuple(filters)
        self._attempts = Attempts()
        self._queue = PromptQueue(self.account)
        self._leases = RunningLeases()
        self._batches = Batches(rule, order)
        self._revocations: list[Revocation] = []
        self._finished: list[int] = []

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
        return self._batches.num_ready

    @property
    def num_planned(self) -> int:
        """Groups that wait for the commit of their step."""
        return len(self._batches) - self._batches.num_ready

    @property
    def outstanding(self) -> int:
        """Groups admitted, and neither consumed nor dropped."""
        return self.num_leased + len(self._batches)

    @property
    def next_plan(self) -> int:
        """w, the version to be planned next."""
        return self.learner_version + len(self._batches.plans)

    def due(self) -> dict[int, int]:
        """Deadline to number of groups leased or stored, not yet planned."""
        due = self._batches.ready_due()
        for deadline, number in self._leases.due().items():
            due[deadline] = due.get(deadline, 0) + number
        return due

    def admits(self, engine_version: int) -> bool:
        """Whether a group may begin now on an engine that serves ``engine_version``."""
        return self.rule.admits(
            outstanding=self.outstanding, learner_version=self.learner_version, engine_version=engine_version
        )

    def running_leases(self) -> list[RunningLease]:
        """Every lease that runs, in the order they began."""
        return self._leases.all()

    def holds(self, group_id: int, attempt: int) -> bool:
        """Whether this attempt is the one being generated."""
        return self._leases.held(group_id, attempt) is not None

    def has_stored(self, group_id: int) -> bool:
        """Whether the group is stored or planned."""
        return group_id in self._batches

    def stored_attempt(self, group_id: int) -> int:
        """The attempt of a stored or planned group. Raises UnknownGroup if it is neither."""
        return self._batches.attempt(group_id)

    def is_planned(self, version: int) -> bool:
        """Whether the batch of ``version`` is made and not committed."""
        return version in self._batches.plans

    def enqueue(self, group_ids: Iterable[int]) -> list[int]:
        """Queue prompts; returns those that were new, so that a prompt sent twice is queued once."""
        new = [group_id for group_id in group_ids if self._attempts.begin(group_id)]
        self._queue.extend(new)
        return new

    def lease(
        self, engine_version: int, max_groups: int, *, owner: bytes = b"", request_id: int = 0, now: float
    ) -> list[RunningLease]:
        """Admit up to ``max_groups`` from the head of the queue; empty when none is admitted now.

        Raises:
            ReplayBufferError: the engine claims a version that no committed step has made.
        """
        self.check_engine_version(engine_version)
        granted = []
        while len(granted) < max_groups and self._queue and self.admits(engine_version):
            group_id, saved = self._queue.pop()
            progress = self._continued(saved)
            oldest = engine_version if progress is None else min(engine_version, progress.oldest_version)
            lease = RunningLease(
                group_id=group_id,
                attempt=self._attempts.lease(group_id),
                engine_version=oldest,
                deadline=self.rule.deadline(oldest),
                owner=owner,
                expires_at=now + self._lease_s,
                progress=progress,
                request_id=request_id,
            )
            self._leases.add(lease)
            granted.append(lease)
        return granted

    def _continued(self, saved: Progress | None) -> Progress | None:
        """The prefix that the next attempt continues, if a group as old as its oldest token is still admitted."""
        if saved is None:
            return None
        if self.admits(saved.oldest_version):
            self.account.use_progress(saved.num_tokens)
            return saved
        self.account.drop_progress(saved.num_tokens)
        return None

    def save_progress(self, group_id: int, attempt: int, progress: Progress) -> None:
        """Note what a running group has so far; its next attempt may continue it.

        Raises:
            LeaseExpired: the attempt is no longer the current one.
            VersionTooOld: the progress holds a token older than its lease.
        """
        lease = self._leases.held(group_id, attempt)
        if lease is None:
            raise LeaseExpired(f"the lease on group {group_id} attempt {attempt} is no longer held; nothing was saved")
        if progress.oldest_version < lease.engine_version:
            raise VersionTooOld(
                f"progress of group {group_id} attempt {attempt} holds a token of policy version "
                f"{progress.oldest_version}, but its lease began at {lease.engine_version}; nothing was saved"
            )
        lease.progress = progress

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
            self.take_back(lease)
            num_expired += 1
        return num_expired

    def take_back(self, lease: RunningLease) -> None:
        """Revoke a lease; its prompt, and what was saved of it, go to the head of the queue."""
        self._revoke(lease, num_inherited=self._queue.push_front(lease.group_id, lease.progress))

    def drain_revocations(self) -> list[Revocation]:
        """Leases taken away since the last call."""
        revocations, self._revocations = self._revocations, []
        return revocations

    def drain_finished(self) -> list[int]:
        """Groups consumed or dropped since the last call; nobody needs their prompts and trajectories."""
        finished, self._finished = self._finished, []
        return finished

    def _finish(self, group_id: int, *, stored: bool) -> None:
        self._attempts.finish(group_id, stored=stored)
        self._finished.append(group_id)

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
        if (name := dropped_by(self._filters, summary)) is not None:
            self._finish(summary.group_id, stored=True)
            self.account.filter(summary, name)
            return PutResult.filtered
        self._batches.add(summary, lease.deadline)
        self.account.store(summary)
        return PutResult.stored

    def _refuse_as_too_old(self, summary: GroupSummary, lease: RunningLease) -> None:
        message = (
            f"group {summary.group_id} attempt {summary.attempt} holds a token of policy version "
            f"{summary.oldest_version}, but its lease began at {lease.engine_version}; its prompt is leased again"
        )
        self._attempts.refuse_as_too_old(summary.group_id, summary.attempt, message)
        self._queue.push_front(summary.group_id)
        self.account.refuse(summary, "version_too_old")
        raise VersionTooOld(message)

    def _put_without_lease(self, summary: GroupSummary) -> PutResult:
        """Acknowledge what was stored before; refuse what comes too late, and count it once."""
        group_id, attempt = summary.group_id, summary.attempt
        if not self._attempts.was_leased(group_id, attempt):
            raise UnknownGroup(f"group {group_id} attempt {attempt} was never leased; put only what a lease asked for")
        if self._batches.holds(group_id, attempt) or self._attempts.finished_with(group_id, attempt):
            self.account.puts_refused["duplicate"] += 1
            return PutResult.duplicate
        if (message := self._attempts.too_old(group_id, attempt)) is not None:
            raise VersionTooOld(message)
        if (num_inherited := self._attempts.report(group_id, attempt)) is not None:
            self.account.refuse(summary, "expired", num_inherited=num_inherited)
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
            num_inherited = self._queue.push_front(group_id, lease.progress)
        else:
            num_inherited = self._attempts.report(group_id, attempt)
        if num_inherited is not None:
            self.account.abandon(num_tokens - num_inherited, reason)

    def plan(self, version: int) -> Plan | None:
        """The batch of ``version``, or None while it must wait; a plan once made stays as it is.

        Raises:
            ReplayBufferError: ``version`` is committed already, or is not the next to be planned.
        """
        self.check_plan(version)
        if not self.is_planned(version):
            if not self.can_plan(version):
                return None
            self._give_up_stragglers(version)
            self._batches.make(version, self.rule.required(self.due(), version=version))
        return self._batches.plans[version]

    def check_plan(self, version: int) -> None:
        """Refuse a version that can be neither planned now nor answered from a plan made before.

        Raises:
            ReplayBufferError: ``version`` is committed already, or is not the next to be planned.
        """
        is_next = version == self.next_plan and version <= self.learner_version + 1
        if not self.is_planned(version) and not is_next:
            raise ReplayBufferError(
                f"plan({version}) was asked while the learner is at version {self.learner_version} and the next to "
                f"plan is {self.next_plan}; plan in order, at most one step ahead of the last commit"
            )

    def _missing(self) -> list[int]:
        return self.rule.missing(self.due(), self._batches.ready_due(), version=self.next_plan)

    def can_plan(self, version: int) -> bool:
        """Whether the next batch can be made now, its stragglers given up unless they are to be waited for."""
        if self.num_stored < self.rule.groups_per_step:
            return False
        return self._on_stale != OnStale.wait or not any(self._missing())

    def _give_up_stragglers(self, version: int) -> None:
        """Revoke running groups that this batch would have to hold, those begun last first: they lose the least."""
        for k, number in enumerate(self._missing()):
            for lease in self._leases.last_leased(version + k, number):
                self._give_up(lease)

    def _give_up(self, lease: RunningLease) -> None:
        """A straggler: revoke it, then lease its prompt again or drop it."""
        self._revoke(lease)
        if self._on_stale == OnStale.requeue:
            self._queue.push_front(lease.group_id)
        else:
            self._finish(lease.group_id, stored=False)
            self.account.groups_dropped += 1

    def _revoke(self, lease: RunningLease, *, num_inherited: int = 0) -> None:
        self._leases.remove(lease)
        self._attempts.revoke(lease.group_id, lease.attempt, num_inherited=num_inherited)
        self._revocations.append(Revocation(owner=lease.owner, group_id=lease.group_id, attempt=lease.attempt))

    def commit(self, version: int) -> list[int]:
        """Mark the plan of ``version`` consumed; returns its group ids, none when it was committed before.

        Raises:
            StalenessError: a group of the batch breaks the bound. It must never fire.
            ReplayBufferError: the plan of ``version`` was not made, or an earlier one is not committed.
        """
        if 0 <= version < self.learner_version:
            return []
        if version != self.learner_version or not self.is_planned(version):
            raise ReplayBufferError(
                f"commit({version}) was asked while the learner is at version {self.learner_version} and the "
                f"plans made are {sorted(self._batches.plans)}; commit in order, what was planned"
            )
        plan = self._batches.take(version)
        for summary in plan.groups:
            self._finish(summary.group_id, stored=True)
            self.account.consume(summary, version)
        self.learner_version += 1
        return [summary.group_id for summary in plan.groups]

    def finished(self) -> list[tuple[int, int]]:
        """Ids of the groups that are consumed or dropped, as ranges [start, end)."""
        return self._attempts.finished()

    def unfinished(self, *, now: float) -> list[dict[str, Any]]:
        """What is known of every group that is leased, stored or planned, for people."""
        return self._leases.describe(now) + self._batches.describe(self.learner_version)

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

    def snapshot(self) -> dict[str, Any]:
        """The whole ledger as plain values, for `restore`."""
        return {
            "format": SNAPSHOT_FORMAT,
            "max_lag": self.rule.max_lag,
            "groups_per_step": self.rule.groups_per_step,
            "learner_version": self.learner_version,
            "queue": self._queue.snapshot(),
            "leases": [asdict(lease) for lease in self._leases.all()],
            "batches": self._batches.snapshot(),
            "attempts": self._attempts.snapshot(),
            "account": self.account.snapshot(),
        }

    def restore(self, values: Mapping[str, Any]) -> None:
        """Take the state of a snapshot into this new ledger.

        Raises:
            ValueError: the snapshot has another format, or another bound or batch size than this ledger.
        """
        expected = {
            "format": SNAPSHOT_FORMAT,
            "max_lag": self.rule.max_lag,
            "groups_per_step": self.rule.groups_per_step,
        }
        for name, value in expected.items():
            if values.get(name) != value:
                raise ValueError(
                    f"the ledger's snapshot has {name}={values.get(name)}, expected {value}; resume with the options "
                    "and the release that wrote it, or start without it"
                )
        self.learner_version = values["learner_version"]
        self._queue.restore(values["queue"])
        for fields in values["leases"]:
            progress = None if fields["progress"] is None else Progress(**fields["progress"])
            self._leases.add(RunningLease(**{**fields, "progress": progress}))
        self._batches.restore(values["batches"])
        self._attempts.restore(values["attempts"])
        self.account.restore(values["account"])
