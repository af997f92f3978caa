"""A hypothesis state machine compares the ledger with an independent model after every action."""

from collections import Counter
from dataclasses import replace

import msgpack
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from asyncrl.core.errors import LeaseExpired, ReplayBufferError, StoreFull, UnknownGroup, VersionTooOld
from asyncrl.core.types import GroupSummary
from buffer.checkpoints import MAX_MARKS
from buffer.commands import GrantedLease, Progress, PutResult
from buffer.config import OnStale
from buffer.rule import ORDERS, StalenessRule
from tests.support.ledgers import DrivenLedger, RecordedCommands

LEASE_S = 10.0
ORDER_NAMES = [*ORDERS.names(), "tests.support.orders_of_mine:scattered"]


def summary_of(
    lease: GrantedLease,
    *,
    oldest: int,
    num_tokens: int,
    newest: int | None = None,
    rewards: tuple[float, ...] = (0.0, 1.0),
) -> GroupSummary:
    return GroupSummary(
        group_id=lease.group_id,
        attempt=lease.attempt,
        num_prompt_tokens=1,
        response_lengths=(num_tokens, 1),
        num_tokens=num_tokens,
        oldest_version=oldest,
        newest_version=oldest if newest is None else newest,
        rewards=rewards,
    )


class LedgerMachine(RuleBasedStateMachine):
    @initialize(
        max_lag=st.integers(0, 4),
        groups_per_step=st.integers(1, 4),
        on_stale=st.sampled_from(OnStale),
        order=st.sampled_from(ORDER_NAMES),
        filters=st.sampled_from([[], ["equal_rewards"]]),
        max_bytes=st.sampled_from([0, 10, 20, 40]),
        num_stores=st.integers(1, 2),
        joining=st.booleans(),
        max_deaths=st.integers(0, 3),
        max_uses=st.integers(1, 3),
    )
    def start(
        self,
        max_lag: int,
        groups_per_step: int,
        on_stale: OnStale,
        order: str,
        filters: list[str],
        max_bytes: int,
        num_stores: int,
        joining: bool,
        max_deaths: int,
        max_uses: int,
    ) -> None:
        self.max_uses = min(max_uses, max_lag + 1)
        self.max_deaths = max_deaths
        self.deaths: dict[int, int] = {}
        self.max_bytes, self.joining = max_bytes, joining
        self.max_lag, self.size, self.on_stale, self.filters = max_lag, groups_per_step, on_stale, filters
        rule = StalenessRule(max_lag=max_lag, groups_per_step=groups_per_step, max_uses=self.max_uses)
        self.memory = {"max_bytes": max_bytes, "num_stores": 0 if joining else num_stores}
        self.new_ledger = lambda: DrivenLedger(
            rule,
            on_stale=on_stale,
            order=order,
            lease_s=LEASE_S,
            filters=filters,
            max_deaths=max_deaths,
            **self.memory,
        )
        self.places: dict[int, int] = {}
        self.hosts: dict[int, str] = {} if joining else dict.fromkeys(range(num_stores), "")
        self.lost_prefixes: set[tuple[int, int]] = set()
        self.ledger = self.new_ledger()
        self.ledger.log = self.log = RecordedCommands()
        self.last_snapshot: bytes | None = None
        self.now = 0.0
        self.version = 0
        self.num_enqueued = 0
        self.num_dropped = 0
        self.granted: list[GrantedLease] = []
        self.running: dict[int, tuple[GrantedLease, float]] = {}
        self.ended: list[GrantedLease] = []
        self.saved: dict[tuple[int, int], Progress] = {}
        self.inherited: dict[tuple[int, int], Progress] = {}
        self.continues: dict[tuple[int, int], bool] = {}
        self.prefixes: dict[int, Progress] = {}
        self.reported: set[tuple[int, int]] = set()
        self.own_tokens: dict[tuple[int, int], int] = {}
        self.stored: dict[int, tuple[GroupSummary, int]] = {}
        self.planned: dict[int, list[int]] = {}
        self.consumed: dict[int, tuple[GroupSummary, int]] = {}
        self.uses: dict[int, list[int]] = {}
        self.marked: dict[int, set[int]] = {0: set()}
        self.num_reopened = 0
        for host in "ab"[:num_stores] * joining:
            self.a_store_joins(host)

    @precondition(lambda self: self.joining and len(self.hosts) < 4)
    @rule(host=st.sampled_from("abc"))
    def a_store_joins(self, host: str) -> None:
        number = self.ledger.add_store(host)
        assert number not in {*self.hosts, *self.places.values()}
        self.hosts[number] = host

    @precondition(lambda self: len(self.hosts) > 1 and self.joining)
    @rule(data=st.data())
    def a_store_is_gone(self, data: st.DataObject) -> None:
        """Drop a store. The store's groups are queued again, except groups of a planned batch."""
        number = data.draw(st.sampled_from(sorted(self.hosts)))
        planned = {group_id for ids in self.planned.values() for group_id in ids}
        lost = {group_id for group_id in self.stored if self.places[group_id] == number} - planned
        assert set(self.ledger.drop_store(number).group_ids) == lost
        assert not self.ledger.drop_store(number).is_new
        del self.hosts[number]
        for group_id in lost:
            del self.stored[group_id]

    # Actions

    @rule(number=st.integers(1, 30), again=st.booleans())
    def enqueue(self, number: int, again: bool) -> None:
        ids = range(self.num_enqueued, self.num_enqueued + number)
        assert self.ledger.enqueue(ids) == list(ids)
        self.num_enqueued += number
        if again:
            assert self.ledger.enqueue(range(self.num_enqueued)) == []

    @rule(behind=st.integers(0, 3), number=st.integers(1, 20), worker=st.integers(0, 2), continues=st.booleans())
    def lease(self, behind: int, number: int, worker: int, continues: bool) -> None:
        version = max(0, self.version - behind)
        deadlines = self._open_deadlines()
        granted = self.ledger.lease(version, number, owner=bytes([worker]), now=self.now)
        for lease in granted:
            self._check_prefix(lease, version, deadlines)
            assert lease.deadline == lease.engine_version + self.max_lag
            assert self._admits(lease.engine_version, deadlines)
            deadlines.append(lease.deadline)
            assert lease.group_id not in self.running
            assert lease.group_id not in self.stored
            assert lease.group_id not in self.consumed
            assert (lease.group_id, lease.attempt) not in {(x.group_id, x.attempt) for x in self.granted}
            self.granted.append(lease)
            self.continues[lease.group_id, lease.attempt] = continues
            self.running[lease.group_id] = (lease, self.now + LEASE_S)
        assert len(granted) <= number
        if len(granted) < number:
            no_more = not self._admits(version, deadlines) or not self.ledger.room.has_room()
            assert no_more or not self._may_have(bytes([worker]))

    def _may_have(self, worker: bytes) -> int:
        """Return the number of queued groups that a worker may lease.

        A suspect is a group that is dropped if one more of its workers dies. A worker may lease only one suspect.
        """
        suspects = [group_id for group_id in self.deaths if self._is_suspect(group_id) and group_id not in self.running]
        holds_one = any(lease.owner == worker for g, (lease, _) in self.running.items() if self._is_suspect(g))
        return self._num_queued() - len(suspects) + bool(suspects and not holds_one)

    def _is_suspect(self, group_id: int) -> bool:
        return 0 < self.max_deaths <= self.deaths.get(group_id, 0) + 1 and group_id in self.deaths

    def _num_queued(self) -> int:
        ended = len(self.consumed) + self.num_dropped
        return self.num_enqueued - len(self.running) - len(self.stored.keys() - self.consumed.keys()) - ended

    @rule(data=st.data(), num_steps=st.integers(1, 5), stragglers=st.floats(0.0, 1.0))
    def steps_pass(self, data: st.DataObject, num_steps: int, stragglers: float) -> None:
        """Make steps, but leave some of the oldest groups unfinished. So the deadlines of these groups come close."""
        for _ in range(num_steps):
            self.enqueue(number=30, again=False)
            number = data.draw(st.sampled_from([1, 3, 30]))
            self.lease(behind=data.draw(st.integers(0, 2)), number=number, worker=0, continues=True)
            last = sorted(self.running, key=lambda group_id: self.running[group_id][0].deadline)
            for group_id in last[int(stragglers * self.max_lag * self.size) :]:
                lease, expires_at = self.running.pop(group_id)
                self._put(lease, expires_at, lease.engine_version, num_tokens=1)
            for _ in range(data.draw(st.integers(1, 2))):
                if len(self.planned) < 2:
                    self.plan()
            if self.planned:
                self.commit(again=False)

    @rule(ahead=st.integers(1, 3))
    def an_engine_ahead_of_the_learner_is_refused(self, ahead: int) -> None:
        try:
            self.ledger.lease(self.version + ahead, 1, now=self.now)
        except ReplayBufferError:
            return
        raise AssertionError("the ledger gave a lease to an engine at a version that no step has made")

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num_running=st.integers(0, 3), num_tokens=st.integers(0, 50))
    def put_all_but(self, data: st.DataObject, num_running: int, num_tokens: int) -> None:
        """Put all running groups except ``num_running`` groups, in any order."""
        for group_id in data.draw(st.permutations(sorted(self.running)))[num_running:]:
            lease, expires_at = self.running.pop(group_id)
            oldest = data.draw(st.integers(lease.engine_version, self.version))
            self._put(lease, expires_at, oldest, num_tokens)

    def _put(self, lease: GrantedLease, expires_at: float, oldest: int, num_tokens: int) -> None:
        num_tokens += self._least_tokens(lease)
        filtered = bool(self.filters) and num_tokens % 5 == 0
        left_out = num_tokens // 4  # the put omits trajectories with this many tokens
        newest = oldest + num_tokens % (self.version - oldest + 1)
        rewards = (0.0, 0.0 if filtered else 1.0)
        summary = summary_of(lease, oldest=oldest, newest=newest, num_tokens=num_tokens - left_out, rewards=rewards)
        continued = self._continued(lease)
        if not self._reserve(lease):
            self.running[lease.group_id] = (lease, expires_at)
            return
        self._report(lease, num_tokens)
        if filtered:
            assert self.ledger.put(summary, continued=continued, num_left_out=left_out) is PutResult.filtered
            assert self.ledger.put(summary) is PutResult.duplicate
            self.num_dropped += 1
            self.deaths.pop(lease.group_id, None)
        else:
            self.deaths.pop(lease.group_id, None)
            size = self._size(lease.group_id)
            put = self.ledger.put(summary, continued=continued, num_bytes=size, num_left_out=left_out)
            assert put is PutResult.stored
            self.stored[lease.group_id] = (summary, lease.deadline)

    def _size(self, group_id: int) -> int:
        return 1 + group_id * 7 % 9

    def _reserve(self, lease: GrantedLease) -> bool:
        """Reserve bytes for the group of a lease, and return whether they fit.

        Check each group that was evicted: either its deadline is later than this group's, or only its prefix is lost.
        """
        size, host = self._size(lease.group_id), "ab"[lease.group_id % 2]
        near = {number for number in self.hosts if self.hosts[number] == host}
        has_near = any(self._held(number) + size <= self.max_bytes or not self.max_bytes for number in near)
        may_move = bool(self.planned) or self.ledger.can_plan()
        try:
            reserved = self.ledger.reserve(lease, size, host=host)
        except StoreFull:
            new = [
                (group_id, deadline) for group_id, (_, deadline) in self.stored.items() if group_id not in self.consumed
            ]
            due_first = [group_id for group_id, deadline in new if deadline <= lease.deadline]
            held = [sum(self._size(g) for g in due_first if self.places[g] == place) for place in self.hosts]
            assert may_move or min(held) + size > self.max_bytes, "the groups that are due first must fit"
            return False
        assert not (may_move and reserved.evicted)
        assert not has_near or reserved.store in near, "a group that fits must go to its host's store"
        for group_id in reserved.evicted:
            if group_id in self.running:
                other, _ = self.running[group_id]
                self.lost_prefixes.add((group_id, other.attempt))
            elif group_id in self.prefixes:
                del self.prefixes[group_id]
            elif group_id in self.consumed:
                del self.stored[group_id]
            else:
                assert self.stored.pop(group_id)[1] > lease.deadline
        self.places[lease.group_id] = reserved.store
        again = self.ledger.reserve(lease, size)
        assert (again.store, again.evicted) == (reserved.store, ()), "a repeated reservation must be the same"
        return True

    def _held(self, place: int) -> int:
        return sum(self._size(group_id) for group_id in self.stored if self.places[group_id] == place)

    @invariant()
    def no_store_holds_more_than_its_bound(self) -> None:
        if not self.max_bytes:
            return
        assert all(self._held(place) <= self.max_bytes for place in self.hosts)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num_tokens=st.integers(0, 50))
    def save_progress(self, data: st.DataObject, num_tokens: int) -> None:
        lease, _ = self.running[data.draw(st.sampled_from(sorted(self.running)))]
        oldest = data.draw(st.integers(lease.engine_version, self.version))
        progress = Progress(
            num_tokens=num_tokens + self._least_tokens(lease), oldest_version=oldest, newest_version=self.version
        )
        self._save(lease, progress)

    def _save(self, lease: GrantedLease, progress: Progress) -> None:
        try:
            self.ledger.save(lease, progress, continued=self._continued(lease), num_bytes=2)
        except StoreFull:
            assert self.max_bytes
            return
        self.saved[lease.group_id, lease.attempt] = progress
        self.lost_prefixes.discard((lease.group_id, lease.attempt))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def every_worker_dies_after_saving(self, data: st.DataObject) -> None:
        for group_id in sorted(self.running):
            lease, _ = self.running[group_id]
            oldest = data.draw(st.integers(lease.engine_version, self.version))
            progress = Progress(
                num_tokens=1 + self._least_tokens(lease), oldest_version=oldest, newest_version=self.version
            )
            self._save(lease, progress)
        self.time_passes(seconds=15.0)

    @rule(compacts=st.booleans(), order=st.sampled_from(ORDER_NAMES), on_stale=st.sampled_from(OnStale))
    def the_server_restarts(self, compacts: bool, order: str, on_stale: OnStale) -> None:
        """Restore the ledger from a snapshot and from the commands that the journal recorded after the snapshot.

        A ledger with other options must reach the same state.
        """
        before = msgpack.packb(self.ledger.snapshot())
        replayed = self._replayed(
            DrivenLedger(self.ledger.rule, on_stale=on_stale, order=order, lease_s=LEASE_S, **self.memory)
        )
        assert msgpack.packb(replayed.snapshot()) == before
        self.ledger = self._replayed(self.new_ledger())
        self.ledger.log = self.log
        if compacts:
            self.last_snapshot, self.log.rows = before, []

    def _replayed(self, ledger: DrivenLedger) -> DrivenLedger:
        if self.last_snapshot is not None:
            ledger.restore(msgpack.unpackb(self.last_snapshot, strict_map_key=False))
        for command, outcome in self.log.read():
            ledger.enact(command, outcome)
        for lease, expires_at in self.running.values():
            ledger.renew(lease.group_id, lease.attempt, now=expires_at - LEASE_S)
        ledger.attempts.drain_revocations()
        return ledger

    @precondition(lambda self: any(lease.engine_version > 0 for lease, _ in self.running.values()))
    @rule(data=st.data(), num_tokens=st.integers(1, 50))
    def put_with_a_token_too_old(self, data: st.DataObject, num_tokens: int) -> None:
        ids = sorted(g for g, (lease, _) in self.running.items() if lease.engine_version > 0)
        lease, _ = self.running.pop(data.draw(st.sampled_from(ids)))
        num_tokens += self._least_tokens(lease)
        summary = summary_of(lease, oldest=lease.engine_version - 1, num_tokens=num_tokens)
        too_old = Progress(num_tokens=num_tokens, oldest_version=lease.engine_version - 1, newest_version=self.version)
        with pytest.raises(VersionTooOld):
            self.ledger.save(lease, too_old)
        for _ in range(2):
            try:
                self.ledger.put(summary, continued=self._continued(lease))
            except VersionTooOld:
                continue
            raise AssertionError("the ledger stored a trajectory with a token older than the version of its lease")
        self._report(lease, num_tokens)

    @precondition(lambda self: self.ended)
    @rule(data=st.data(), num_tokens=st.integers(1, 50))
    def put_late(self, data: st.DataObject, num_tokens: int) -> None:
        lease = data.draw(st.sampled_from(self.ended))
        num_tokens += self._least_tokens(lease)
        left_out = num_tokens // 4
        summary = summary_of(lease, oldest=lease.engine_version, num_tokens=num_tokens - left_out)
        try:
            self.ledger.put(summary, continued=self._continued(lease), num_left_out=left_out)
        except (LeaseExpired, VersionTooOld):
            self._report(lease, num_tokens)
            return
        raise AssertionError("the ledger accepted a put of an attempt that had lost its lease")

    @precondition(lambda self: self.stored or self.consumed)
    @rule(data=st.data())
    def put_again(self, data: st.DataObject) -> None:
        summaries = [summary for summary, _ in (*self.stored.values(), *self.consumed.values())]
        assert self.ledger.put(data.draw(st.sampled_from(summaries))) is PutResult.duplicate

    @precondition(lambda self: self.num_enqueued)
    @rule(data=st.data())
    def an_attempt_that_was_never_leased_is_unknown(self, data: st.DataObject) -> None:
        group_id = data.draw(st.integers(0, self.num_enqueued))
        attempt = sum(lease.group_id == group_id for lease in self.granted)
        summary = GroupSummary(
            group_id=group_id,
            attempt=attempt,
            num_prompt_tokens=1,
            response_lengths=(1, 1),
            num_tokens=2,
            oldest_version=self.version,
            newest_version=self.version,
            rewards=(0.0, 1.0),
        )
        with pytest.raises(UnknownGroup):
            self.ledger.put(summary)
        with pytest.raises(UnknownGroup):
            self.ledger.release(group_id, attempt, num_tokens=2, reason="aborted")

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num_tokens=st.integers(0, 50))
    def release(self, data: st.DataObject, num_tokens: int) -> None:
        lease, _ = self.running.pop(data.draw(st.sampled_from(sorted(self.running))))
        num_tokens += self._least_tokens(lease)
        self._hand_on(lease)
        for _ in range(2):
            self._release(lease, num_tokens)
        self.ended.append(lease)
        self._report(lease, num_tokens)

    def _release(self, lease: GrantedLease, num_tokens: int) -> None:
        group_id, attempt, continued = lease.group_id, lease.attempt, self._continued(lease)
        self.ledger.release(group_id, attempt, num_tokens=num_tokens, reason="aborted", continued=continued)

    @precondition(lambda self: self.ended)
    @rule(data=st.data(), num_tokens=st.integers(0, 50))
    def release_late(self, data: st.DataObject, num_tokens: int) -> None:
        lease = data.draw(st.sampled_from(self.ended))
        num_tokens += self._least_tokens(lease)
        self._release(lease, num_tokens)
        self._report(lease, num_tokens)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        group_id = data.draw(st.sampled_from(sorted(self.running)))
        lease, _ = self.running[group_id]
        assert self.ledger.renew(group_id, lease.attempt, now=self.now)
        self.running[group_id] = (lease, self.now + LEASE_S)

    @precondition(lambda self: self.running)
    @rule(worker=st.integers(0, 2))
    def a_worker_is_gone(self, worker: int) -> None:
        """Let a worker become silent. The server revokes its leases before they expire."""
        lost = [lease for lease, _ in self.running.values() if lease.owner == bytes([worker])]
        assert sum(self._is_suspect(lease.group_id) for lease in lost) <= 1, "a worker may hold only one suspect"
        assert self.ledger.take_back(bytes([worker])) == len(lost)
        for lease in lost:
            self.deaths[lease.group_id] = self.deaths.get(lease.group_id, 0) + 1
            if self.deaths[lease.group_id] == self.max_deaths:
                del self.deaths[lease.group_id]
                self.num_dropped += 1
            else:
                self._hand_on(lease)
        self._end(lost)

    @rule(seconds=st.floats(-15.0, 15.0) | st.sampled_from([-1e9, 1e9]))
    def time_passes(self, seconds: float) -> None:
        """Let the clock jump forward or backward. Only the expiry of leases may depend on the clock."""
        self.now += seconds
        lost = [lease for lease, expires_at in self.running.values() if expires_at <= self.now]
        assert self.ledger.expire(self.now) == len(lost)
        for lease in lost:
            self._hand_on(lease)
        self._end(lost)

    @precondition(lambda self: self.running)
    @rule()
    def the_next_lease_runs_out_now(self) -> None:
        next_expiry = min(expires_at for _, expires_at in self.running.values())
        self.time_passes(seconds=0.0 if next_expiry <= self.now else next_expiry - self.now)

    @precondition(lambda self: len(self.planned) < 2)
    @rule()
    def plan(self) -> None:
        version = self.version + len(self.planned)
        may_be_made = self.ledger.can_plan()
        num_too_few = self._num_missing_from(version)
        plan = self.ledger.plan(version)
        assert (plan is not None) == may_be_made
        revoked = {(r.group_id, r.attempt) for _, r in self.ledger.attempts.drain_revocations()}
        given_up = [lease for lease, _ in self.running.values() if (lease.group_id, lease.attempt) in revoked]
        self._end(given_up)
        if self.on_stale is OnStale.drop:
            self.num_dropped += len(given_up)
            for lease in given_up:
                self.deaths.pop(lease.group_id, None)
        if plan is None:
            assert given_up == []
            return
        assert len(given_up) == num_too_few, "the plan gave up a wrong number of groups"
        assert self.ledger.plan(version) == plan
        ids = [summary.group_id for summary in plan.groups]
        assert len(set(ids)) == len(ids) == self.size
        already = {group_id for planned in self.planned.values() for group_id in planned}
        assert not already & set(ids)
        for summary in plan.groups:
            assert self.stored[summary.group_id][0] == summary
        self.planned[version] = ids

    def _num_missing_from(self, version: int) -> int:
        """Return how many running groups must end before batch ``version``, so that no group misses its deadline."""
        planned = {group_id for ids in self.planned.values() for group_id in ids}
        ready = [deadline for group_id, (_, deadline) in self.stored.items() if group_id not in planned]
        deadlines = self._open_deadlines()
        return max(
            0,
            *(
                sum(deadline <= version + k for deadline in deadlines)
                - k * self.size
                - sum(deadline <= version + k for deadline in ready)
                for k in range(self.max_lag + 1)
            ),
        )

    @precondition(lambda self: self.planned)
    @rule(again=st.booleans())
    def commit(self, again: bool) -> None:
        ids = self.planned.pop(self.version)
        assert self.ledger.checkpoint(self.version + 1)
        assert not self.ledger.checkpoint(self.version + 1)
        assert self.ledger.commit(self.version) == ids
        batch: dict[int, tuple[GroupSummary, int]] = {}
        for group_id in ids:
            summary, deadline = self.stored.pop(group_id)
            assert self.version - summary.oldest_version <= self.max_lag
            assert self.version <= deadline
            uses = self.uses.setdefault(group_id, [])
            assert len(uses) == summary.num_uses < self.max_uses
            uses.append(self.version)
            assert (group_id in self.consumed) == (summary.num_uses > 0)
            self.consumed.setdefault(group_id, (summary, self.version))
            batch[group_id] = summary, deadline
        if again:
            assert self.ledger.commit(self.version) == []
        self.version += 1
        self._stay_for_further_uses(batch)
        self.marked[self.version] = self._finished()
        self.marked = {version: self.marked[version] for version in sorted(self.marked)[-MAX_MARKS:]}

    def _stay_for_further_uses(self, batch: dict[int, tuple[GroupSummary, int]]) -> None:
        """Keep trained groups for another use, except groups that would make another group miss its deadline."""
        for group_id, (summary, deadline) in batch.items():
            may_stay = summary.num_uses + 1 < self.max_uses and self.places[group_id] in self.hosts
            if may_stay and self._admits(deadline - self.max_lag, self._open_deadlines()):
                self.stored[group_id] = replace(summary, num_uses=summary.num_uses + 1), deadline

    @precondition(lambda self: self.stored)
    @rule(data=st.data())
    def trajectories_are_lost(self, data: st.DataObject) -> None:
        """Lose the trajectories of some groups, as after a power failure.

        The prompts of the lost groups are queued again. The first batch with a lost group and all later batches are
        planned again. Other groups of these batches are lost too if the store that held them no longer exists.
        """
        lost = data.draw(st.lists(st.sampled_from(sorted(self.stored)), min_size=1, max_size=2, unique=True))
        first = min((version for version, ids in self.planned.items() if set(ids) & set(lost)), default=None)
        dissolved = [version for version in self.planned if first is not None and version >= first]
        assert sorted(self.ledger.lose(lost)) == sorted(dissolved)
        with_them = {group_id for version in dissolved for group_id in self.planned.pop(version)}
        for group_id in {*lost, *(group_id for group_id in with_them if self.places[group_id] not in self.hosts)}:
            del self.stored[group_id]

    @rule(back=st.integers(0, 5))
    def the_learner_goes_back(self, back: int) -> None:
        """Let the learner go back to a checkpoint.

        Groups and prefixes stay if none of their tokens has a later version.
        """
        version = sorted(self.marked)[max(0, len(self.marked) - 1 - back)]
        again = self._finished() - self.marked[version]
        dropped = again - set(self.consumed)
        kept = [(summary, at) for summary, at in self.consumed.values() if at < version]
        self.ledger.attempts.drain_revocations()
        self.ledger.rewind(version)
        assert self.ledger.account.tokens_trained == sum(summary.num_tokens for summary, _ in kept)
        self.uses = {group_id: [at for at in uses if at < version] for group_id, uses in self.uses.items()}
        assert self.ledger.account.lags == Counter(
            at - self.consumed[group_id][0].oldest_version for group_id, uses in self.uses.items() for at in uses
        )
        self.marked = {known: ids for known, ids in self.marked.items() if known <= version}
        self.num_dropped -= len(dropped)
        self.num_reopened += len(dropped)
        leases = [lease for lease, _ in self.running.values()]
        revoked = {(r.group_id, r.attempt) for _, r in self.ledger.attempts.drain_revocations()}
        assert revoked == {(lease.group_id, lease.attempt) for lease in leases}
        for lease in leases:
            self._hand_on(lease)
        self._end(leases)
        self.consumed = {group_id: found for group_id, found in self.consumed.items() if group_id not in again}
        self._lose_versions_above(version, again)
        assert self.ledger.enqueue(range(self.num_enqueued)) == sorted(again - self.stored.keys() - self.lost_by_rewind)

    def _lose_versions_above(self, version: int, again: set[int]) -> None:
        """Remove groups with tokens of versions above ``version``, and planned groups whose store is gone."""
        planned = {group_id for ids in self.planned.values() for group_id in ids}
        gone = {group_id for group_id in planned if self.places[group_id] not in self.hosts}
        lost = {group_id for group_id, (summary, _) in self.stored.items() if summary.newest_version > version}
        self.version, self.planned = version, {}
        self.lost_by_rewind = again & (gone | lost) & self.stored.keys()
        self.stored = {
            group_id: (replace(summary, num_uses=len(self.uses.get(group_id, ()))), deadline)
            for group_id, (summary, deadline) in self.stored.items()
            if group_id not in gone | lost
        }
        self.prefixes = {g: prefix for g, prefix in self.prefixes.items() if prefix.newest_version <= version}

    def _finished(self) -> set[int]:
        return {group_id for start, end in self.ledger.history.finished.ranges() for group_id in range(start, end)}

    # Invariants

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
    def only_the_next_batch_may_be_planned_and_at_most_two_ahead(self) -> None:
        next_plan = self.version + len(self.planned)
        for version in (self.version - 1, next_plan + (len(self.planned) < 2), next_plan + 1):
            with pytest.raises(ReplayBufferError):
                self.ledger.check_plan(version)

    @invariant()
    def every_group_is_somewhere(self) -> None:
        groups = self.ledger.stats().groups
        num_planned = sum(map(len, self.planned.values()))
        assert groups["leased"] == len(self.running)
        assert groups["stored"] == len(self.stored) - num_planned
        assert groups["planned"] == num_planned
        assert groups["consumed"] == len(self.consumed)
        assert groups["dropped"] == self.num_dropped + self.num_reopened
        assert groups["queued"] == self._num_queued()

    @invariant()
    def only_a_running_attempt_holds_a_lease_and_only_a_put_one_is_stored(self) -> None:
        running = {(lease.group_id, lease.attempt) for lease, _ in self.running.values()}
        for lease in self.granted:
            key = lease.group_id, lease.attempt
            assert (self.ledger.groups.running(*key) is not None) == (key in running)
        for group_id, (summary, _) in self.stored.items():
            assert self.ledger.groups.stored(group_id).result.attempt == summary.attempt

    @invariant()
    def every_token_is_somewhere(self) -> None:
        stats = self.ledger.stats()
        assert stats.tokens_trained == sum(summary.num_tokens for summary, _ in self.consumed.values())
        prefixes = [*self.prefixes.values(), *(self.inherited[key] for key in self._prefixes_in_use())]
        in_prefixes = sum(prefix.num_tokens for prefix in prefixes)
        new = [summary for group_id, (summary, _) in self.stored.items() if group_id not in self.consumed]
        assert stats.tokens_buffered == sum(summary.num_tokens for summary in new) + in_prefixes
        further = {group_id: len(uses[1:]) for group_id, uses in self.uses.items()}
        assert stats.groups_reused == sum(further.values())
        assert stats.tokens_reused == sum(
            self.consumed[group_id][0].num_tokens * number for group_id, number in further.items() if number
        )
        accounted = stats.tokens_trained + stats.tokens_buffered + sum(stats.tokens_dropped.values())
        assert accounted == sum(self.own_tokens.values())
        owner_of = {(lease.group_id, lease.attempt): lease.owner for lease in self.granted}
        for owner in set(owner_of.values()):
            own = sum(number for key, number in self.own_tokens.items() if owner_of[key] == owner)
            assert self.ledger.account.settled_by(owner) == own
        assert sum(stats.lag_histogram.values()) == len(self.consumed) + stats.groups_reused
        assert all(0 <= lag <= self.max_lag for lag in stats.lag_histogram)

    @invariant()
    def whoever_waits_for_a_batch_is_woken(self) -> None:
        """If the next batch cannot be planned yet, check that one of three events can make it possible.

        The events are: a running lease ends, a step is committed, or an engine gets a lease for a new prompt.
        """
        num_stored = len(self._open_deadlines()) - len(self.running)
        if self.running:
            return
        if num_stored >= self.size:
            assert len(self.planned) == 2 or self.ledger.can_plan()
        elif not self.planned:
            assert self.ledger.admits(self.version)
            assert self.ledger.room.has_room()

    @invariant()
    def every_running_lease_has_a_timer(self) -> None:
        if self.running:
            assert self.ledger.groups.leases.next_expiry() == min(expires_at for _, expires_at in self.running.values())
        else:
            assert self.ledger.groups.leases.next_expiry() is None

    def _admits(self, version: int, deadlines: list[int]) -> bool:
        """Return whether all groups can meet their deadlines if one more group begins at ``version``."""
        next_plan, deadline = self.version + len(self.planned), version + self.max_lag
        due = sorted([*deadlines, deadline])
        return deadline >= next_plan and all(due[i] >= next_plan + i // self.size for i in range(len(due)))

    def _check_prefix(self, lease: GrantedLease, version: int, deadlines: list[int]) -> None:
        """Check the prefix of the lease. A saved prefix is used if a group may still begin at the prefix's version."""
        prefix = self.prefixes.pop(lease.group_id, None)
        if prefix is not None and self._admits(prefix.oldest_version, deadlines):
            assert lease.progress == prefix
            assert lease.engine_version == min(version, prefix.oldest_version)
            self.inherited[lease.group_id, lease.attempt] = prefix
        else:
            assert lease.progress is None
            assert lease.engine_version == version

    def _prefixes_in_use(self) -> list[tuple[int, int]]:
        """Return the running attempts that continue an inherited prefix, or can still continue such a prefix."""
        keys = [(lease.group_id, lease.attempt) for lease, _ in self.running.values()]
        return [key for key in keys if key in self.inherited and (self.continues[key] or key not in self.saved)]

    def _continued(self, lease: GrantedLease) -> bool:
        """Return the value of ``continued`` in the worker's reports on this lease."""
        key = lease.group_id, lease.attempt
        return key not in self.inherited or self.continues[key] or key in self.saved

    def _least_tokens(self, lease: GrantedLease) -> int:
        """Return the smallest number of tokens that an attempt can report: those in its latest save or its prefix."""
        key = lease.group_id, lease.attempt
        continued = self.inherited[key].num_tokens if key in self.inherited and self.continues[key] else 0
        return self.saved[key].num_tokens if key in self.saved else continued

    def _own(self, lease: GrantedLease, num_tokens: int) -> int:
        """Return the number of tokens that an attempt wrote, without the tokens of the prefix that it continued."""
        key = lease.group_id, lease.attempt
        return num_tokens - (self.inherited[key].num_tokens if key in self.inherited and self.continues[key] else 0)

    def _report(self, lease: GrantedLease, num_tokens: int) -> None:
        """Let an attempt report ``num_tokens``, including its prefix. Later reports of the same attempt are ignored."""
        key = lease.group_id, lease.attempt
        if key not in self.reported:
            self.reported.add(key)
            self.own_tokens[key] = self._own(lease, num_tokens)

    def _count_saved(self, lease: GrantedLease) -> None:
        """End an attempt that does not report its tokens. The account then includes only the tokens that it saved."""
        key = lease.group_id, lease.attempt
        if key in self.saved:
            self.own_tokens[key] = self._own(lease, self.saved[key].num_tokens)

    def _hand_on(self, lease: GrantedLease) -> None:
        """End an attempt early, and pass its saved prefix to the next attempt."""
        key = lease.group_id, lease.attempt
        self._count_saved(lease)
        if key in self.lost_prefixes:
            return
        if (prefix := self.saved.get(key, self.inherited.get(key))) is not None:
            self.prefixes[lease.group_id] = prefix

    def _end(self, leases: list[GrantedLease]) -> None:
        for lease in leases:
            del self.running[lease.group_id]
            self._count_saved(lease)
            self.ended.append(lease)


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=300, stateful_step_count=60, suppress_health_check=list(HealthCheck))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_ledger_matches_its_model_in_ten_thousand_runs():
    search = settings(max_examples=10_000, stateful_step_count=60, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(LedgerMachine, settings=search)
