"""A hypothesis state machine drives the ledger through everything that can happen, and recounts after every action.

The model below never asks the ledger what is right: it keeps its own deadlines, token counts and sets of groups.
"""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncrl.protocol.errors import LeaseExpired, ReplayBufferError, VersionTooOld
from asyncrl.protocol.types import GroupSummary
from buffer.config import OnStale, SelectionOrder
from buffer.leases import RunningLease
from buffer.ledger import Ledger, PutResult
from buffer.staleness import StalenessRule

LEASE_S = 10.0


def summary_of(lease: RunningLease, *, oldest: int, num_tokens: int) -> GroupSummary:
    return GroupSummary(
        group_id=lease.group_id,
        attempt=lease.attempt,
        num_prompt_tokens=1,
        response_lengths=(num_tokens,),
        num_tokens=num_tokens,
        oldest_version=oldest,
        newest_version=oldest,
        rewards=(0.0,),
    )


class LedgerMachine(RuleBasedStateMachine):
    @initialize(
        max_lag=st.integers(0, 4),
        groups_per_step=st.integers(1, 4),
        on_stale=st.sampled_from(OnStale),
        order=st.sampled_from(SelectionOrder),
    )
    def start(self, max_lag: int, groups_per_step: int, on_stale: OnStale, order: SelectionOrder) -> None:
        self.max_lag, self.size, self.on_stale = max_lag, groups_per_step, on_stale
        rule = StalenessRule(max_lag=max_lag, groups_per_step=groups_per_step)
        self.ledger = Ledger(rule, on_stale=on_stale, order=order, lease_s=LEASE_S)
        self.now = 0.0
        self.version = 0
        self.num_enqueued = 0
        self.tokens_reported = 0
        self.granted: list[RunningLease] = []
        self.running: dict[int, tuple[RunningLease, float]] = {}
        self.ended: list[RunningLease] = []
        self.reported: set[tuple[int, int]] = set()
        self.stored: dict[int, tuple[GroupSummary, int]] = {}
        self.planned: dict[int, list[int]] = {}
        self.consumed: dict[int, GroupSummary] = {}

    # What may happen

    @rule(number=st.integers(1, 8), again=st.booleans())
    def enqueue(self, number: int, again: bool) -> None:
        ids = range(self.num_enqueued, self.num_enqueued + number)
        assert self.ledger.enqueue(ids) == list(ids)
        self.num_enqueued += number
        if again:
            assert self.ledger.enqueue(range(self.num_enqueued)) == []

    @rule(behind=st.integers(0, 6), number=st.integers(1, 6))
    def lease(self, behind: int, number: int) -> None:
        version = max(0, self.version - behind)
        before = len(self.running) + len(self.stored)
        granted = self.ledger.lease(version, number, now=self.now)
        for i, lease in enumerate(granted):
            assert lease.deadline == version + self.max_lag
            assert before + i + (self.version - version) * self.size < (self.max_lag + 1) * self.size
            assert lease.group_id not in self.running
            assert lease.group_id not in self.stored
            assert lease.group_id not in self.consumed
            assert (lease.group_id, lease.attempt) not in {(x.group_id, x.attempt) for x in self.granted}
            self.granted.append(lease)
            self.running[lease.group_id] = (lease, self.now + LEASE_S)

    @rule(ahead=st.integers(1, 3))
    def an_engine_ahead_of_the_learner_is_refused(self, ahead: int) -> None:
        try:
            self.ledger.lease(self.version + ahead, 1, now=self.now)
        except ReplayBufferError:
            return
        raise AssertionError("an engine from the future was admitted")

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num_tokens=st.integers(1, 50))
    def put(self, data: st.DataObject, num_tokens: int) -> None:
        lease, _ = self.running.pop(data.draw(st.sampled_from(sorted(self.running))))
        oldest = data.draw(st.integers(lease.engine_version, self.version))
        summary = summary_of(lease, oldest=oldest, num_tokens=num_tokens)
        assert self.ledger.put(summary) is PutResult.stored
        self.stored[lease.group_id] = (summary, lease.deadline)
        self._report(lease, num_tokens)

    @precondition(lambda self: any(lease.engine_version > 0 for lease, _ in self.running.values()))
    @rule(data=st.data(), num_tokens=st.integers(1, 50))
    def put_with_a_token_too_old(self, data: st.DataObject, num_tokens: int) -> None:
        ids = sorted(g for g, (lease, _) in self.running.items() if lease.engine_version > 0)
        lease, _ = self.running.pop(data.draw(st.sampled_from(ids)))
        summary = summary_of(lease, oldest=lease.engine_version - 1, num_tokens=num_tokens)
        for _ in range(2):
            try:
                self.ledger.put(summary)
            except VersionTooOld:
                continue
            raise AssertionError("a trajectory older than its lease was stored")
        self._report(lease, num_tokens)

    @precondition(lambda self: self.ended)
    @rule(data=st.data(), num_tokens=st.integers(1, 50))
    def put_late(self, data: st.DataObject, num_tokens: int) -> None:
        lease = data.draw(st.sampled_from(self.ended))
        try:
            self.ledger.put(summary_of(lease, oldest=lease.engine_version, num_tokens=num_tokens))
        except (LeaseExpired, VersionTooOld):
            self._report(lease, num_tokens)
            return
        raise AssertionError("a put under a lost lease was accepted")

    @precondition(lambda self: self.stored or self.consumed)
    @rule(data=st.data())
    def put_again(self, data: st.DataObject) -> None:
        summaries = [summary for summary, _ in self.stored.values()] + list(self.consumed.values())
        assert self.ledger.put(data.draw(st.sampled_from(summaries))) is PutResult.duplicate

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num_tokens=st.integers(0, 50))
    def release(self, data: st.DataObject, num_tokens: int) -> None:
        lease, _ = self.running.pop(data.draw(st.sampled_from(sorted(self.running))))
        for _ in range(2):
            self.ledger.release(lease.group_id, lease.attempt, num_tokens=num_tokens, reason="aborted")
        self.ended.append(lease)
        self._report(lease, num_tokens)

    @precondition(lambda self: self.ended)
    @rule(data=st.data(), num_tokens=st.integers(0, 50))
    def release_late(self, data: st.DataObject, num_tokens: int) -> None:
        lease = data.draw(st.sampled_from(self.ended))
        self.ledger.release(lease.group_id, lease.attempt, num_tokens=num_tokens, reason="aborted")
        self._report(lease, num_tokens)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        group_id = data.draw(st.sampled_from(sorted(self.running)))
        lease, _ = self.running[group_id]
        assert self.ledger.renew(group_id, lease.attempt, now=self.now)
        self.running[group_id] = (lease, self.now + LEASE_S)

    @rule(seconds=st.floats(0.5, 15.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        lost = [lease for lease, expires_at in self.running.values() if expires_at <= self.now]
        assert self.ledger.expire(self.now) == len(lost)
        self._end(lost)

    @rule()
    def plan(self) -> None:
        version = self.version + len(self.planned)
        if len(self.planned) == 2:
            return
        plan = self.ledger.plan(version)
        revoked = {(r.group_id, r.attempt) for r in self.ledger.drain_revocations()}
        self._end([lease for lease, _ in self.running.values() if (lease.group_id, lease.attempt) in revoked])
        if plan is None:
            return
        assert self.ledger.plan(version) is plan
        ids = [summary.group_id for summary in plan.groups]
        assert len(set(ids)) == len(ids) == self.size
        already = {group_id for planned in self.planned.values() for group_id in planned}
        assert not already & set(ids)
        for summary in plan.groups:
            assert self.stored[summary.group_id][0] == summary
        self.planned[version] = ids

    @precondition(lambda self: self.planned)
    @rule(again=st.booleans())
    def commit(self, again: bool) -> None:
        ids = self.planned.pop(self.version)
        assert self.ledger.commit(self.version) == ids
        for group_id in ids:
            summary, deadline = self.stored.pop(group_id)
            assert self.version - summary.oldest_version <= self.max_lag
            assert self.version <= deadline
            assert group_id not in self.consumed
            self.consumed[group_id] = summary
        if again:
            assert self.ledger.commit(self.version) == []
        self.version += 1

    # What must hold

    def _open_deadlines(self) -> list[int]:
        planned = {group_id for ids in self.planned.values() for group_id in ids}
        stored = [deadline for group_id, (_, deadline) in self.stored.items() if group_id not in planned]
        return stored + [lease.deadline for lease, _ in self.running.values()]

    @invariant()
    def every_deadline_can_be_met(self) -> None:
        next_plan = self.version + len(self.planned)
        deadlines = self._open_deadlines()
        assert all(deadline >= next_plan for deadline in deadlines)
        for k in range(self.max_lag + 1):
            assert sum(deadline <= next_plan + k for deadline in deadlines) <= (k + 1) * self.size

    @invariant()
    def every_group_is_somewhere(self) -> None:
        groups = self.ledger.stats().groups
        num_planned = sum(map(len, self.planned.values()))
        assert groups["leased"] == len(self.running)
        assert groups["stored"] == len(self.stored) - num_planned
        assert groups["planned"] == num_planned
        assert groups["consumed"] == len(self.consumed)
        assert sum(groups.values()) == self.num_enqueued
        if self.on_stale is not OnStale.drop:
            assert groups["dropped"] == 0

    @invariant()
    def every_token_is_somewhere(self) -> None:
        stats = self.ledger.stats()
        assert stats.tokens_trained == sum(summary.num_tokens for summary in self.consumed.values())
        assert stats.tokens_buffered == sum(summary.num_tokens for summary, _ in self.stored.values())
        dropped = sum(stats.tokens_dropped.values())
        assert self.tokens_reported == stats.tokens_trained + stats.tokens_buffered + dropped
        assert sum(stats.lag_histogram.values()) == len(self.consumed)
        assert all(0 <= lag <= self.max_lag for lag in stats.lag_histogram)

    @invariant()
    def whoever_waits_for_a_batch_is_woken(self) -> None:
        """A plan that is not made waits for a running lease, a commit, or prompts that a fresh engine may begin."""
        num_open = len(self._open_deadlines()) - len(self.running)
        if num_open >= self.size or self.running or self.planned:
            return
        assert self.ledger.admits(self.version)

    @invariant()
    def every_running_lease_has_a_timer(self) -> None:
        if self.running:
            assert self.ledger.next_expiry() == min(expires_at for _, expires_at in self.running.values())
        else:
            assert self.ledger.next_expiry() is None

    def _report(self, lease: RunningLease, num_tokens: int) -> None:
        if (lease.group_id, lease.attempt) not in self.reported:
            self.reported.add((lease.group_id, lease.attempt))
            self.tokens_reported += num_tokens

    def _end(self, leases: list[RunningLease]) -> None:
        for lease in leases:
            del self.running[lease.group_id]
            self.ended.append(lease)


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(
    max_examples=300, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
