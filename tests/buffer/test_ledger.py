"""The ledger and its account, compared with hand-computed numbers."""

from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.core.errors import (
    LeaseExpired,
    NotLeaseOwner,
    ReplayBufferError,
    StalenessError,
    UnknownGroup,
    VersionTooNew,
    VersionTooOld,
    WireError,
)
from buffer import account, commands
from buffer.account import IdSet
from buffer.config import BufferConfig, Durability, OnStale
from buffer.encoding import pack, unpack
from buffer.records import LedgerOutcome, leaves
from buffer.rule import StalenessRule
from tests.support.ledgers import DrivenLedger, RecordedCommands, ledger, summary_of


def test_the_late_tokens_of_a_dropped_stale_group_count_once():
    of = ledger(1, 1, on_stale=OnStale.drop)
    [slow, quick] = of.lease(0, 2, now=0.0)
    of.put(summary_of(quick))
    of.step()
    of.put(summary_of(of.lease(1, 1, now=0.0)[0]))
    of.step()
    assert [(r.group_id, r.attempt) for _, r in of.attempts.drain_revocations()] == [(0, 0)]
    for _ in range(2):
        of.release(slow.group_id, slow.attempt, num_tokens=30, reason="stale")
    stats = of.stats()
    assert (stats.groups["dropped"], stats.tokens_dropped) == (1, {"stale": 30})
    assert (stats.mean_length_kept, stats.mean_length_dropped) == (5.0, 30.0)


def test_if_too_many_groups_share_a_deadline_the_last_leased_group_is_revoked():
    of = ledger(2, 1, on_stale=OnStale.requeue)
    first = of.lease(0, 3, now=0.0)
    of.put(summary_of(first[0]))
    of.step()
    [fresh] = of.lease(1, 9, now=0.0)
    of.put(summary_of(fresh))
    # Groups 1 and 2 are due at version 2, and a batch has one group. So batch 1 should contain group 1 or group 2.
    # Groups 1 and 2 still run. So the ledger puts group 3 into batch 1, and revokes the lease of group 2.
    assert of.step() == [3]
    assert [r.group_id for _, r in of.attempts.drain_revocations()] == [2]


def test_a_filtered_group_is_replaced_and_its_repeated_put_is_acknowledged():
    of = ledger(0, 2, filters=["equal_rewards"])
    leases = of.lease(0, 9, now=0.0)
    equal = summary_of(leases[0], rewards=(1.0, 1.0))
    assert of.put(equal) is commands.PutResult.filtered
    assert of.put(equal) is commands.PutResult.duplicate
    [replacement] = of.lease(0, 9, now=0.0)
    of.put(summary_of(replacement))
    of.put(summary_of(leases[1]))
    assert sorted(of.step()) == [1, 2]
    assert of.stats().tokens_dropped == {"equal_rewards": 5}


def test_a_saved_prefix_is_continued_at_its_own_version_and_its_tokens_count_once():
    of = ledger(2, 1, lease_s=10.0)
    [dead, other] = of.lease(0, 2, now=0.0)
    of.save(dead, commands.Progress(num_tokens=40, oldest_version=0, newest_version=0))
    of.put(summary_of(other))
    of.step()
    of.expire(now=11.0)
    assert of.stats().tokens_buffered == 40
    [again] = of.lease(1, 1, now=11.0)
    assert (again.group_id, again.attempt, again.engine_version, again.deadline) == (0, 1, 0, 2)
    of.put(summary_of(again, lengths=(60,)))
    of.release(0, 0, num_tokens=45, reason="aborted")
    stats = of.stats()
    assert (stats.tokens_buffered, stats.tokens_dropped) == (60, {"expired": 5})
    assert dead.engine_version == 0


def test_tokens_that_a_put_omits_are_dropped_once_even_if_they_were_saved():
    of = ledger(1, 1)
    [lease] = of.lease(0, 1, now=0.0)
    of.save(lease, commands.Progress(num_tokens=8, oldest_version=0, newest_version=0))
    of.expire(100.0)
    [again] = of.lease(0, 1, now=100.0)
    assert again.num_inherited == 8
    for _ in range(2):
        of.put(summary_of(again, lengths=(6,)), num_left_out=4)
    assert (of.stats().tokens_buffered, of.stats().tokens_dropped) == (6, {"reward": 4})
    with pytest.raises(LeaseExpired):
        of.put(summary_of(lease, lengths=(7,)), num_left_out=5)
    assert of.stats().tokens_dropped == {"reward": 4, "expired": 12 - 8}


def test_a_group_that_fails_too_often_is_finished_and_all_its_tokens_are_dropped():
    of = ledger(2, 1, lease_s=10.0)
    [lease] = of.lease(0, 1, now=0.0)
    of.save(lease, commands.Progress(num_tokens=40, oldest_version=0, newest_version=0))
    for _ in range(2):
        of.release(0, 0, num_tokens=45, reason="reward", max_failures=1)
    stats = of.stats()
    assert (stats.tokens_buffered, stats.tokens_dropped, stats.groups_dropped) == (0, {"reward": 45}, {"reward": 1})
    assert of.history.finished.ranges() == [(0, 1)]
    assert [each.group_id for each in of.lease(0, 1, now=0.0)] == [1]


def test_failures_of_a_group_add_up_over_workers_and_other_ends_are_no_failures():
    of = ledger(2, 1, lease_s=10.0)
    [lease] = of.lease(0, 1, owner=b"first", now=0.0)
    assert not of.release(0, 0, num_tokens=5, reason="reward", max_failures=3)
    of.lease(0, 1, owner=b"second", now=0.0)
    of.expire(now=11.0)
    of.lease(0, 1, owner=b"second", now=11.0)
    assert not of.release(0, 2, num_tokens=5, reason="stopped")
    of.lease(0, 1, owner=b"second", now=11.0)
    assert not of.release(0, 3, num_tokens=5, reason="reward", max_failures=3)
    restarted = DrivenLedger(of.rule)
    restarted.restore(of.snapshot())
    for each in (of, restarted):
        [last] = each.lease(0, 1, owner=b"third", now=11.0)
        assert (last.group_id, last.attempt) == (lease.group_id, 4)
        assert each.release(0, 4, num_tokens=5, reason="reward", max_failures=3)
        assert each.stats().groups_dropped == {"reward": 1}


def test_a_commit_that_breaks_the_bound_is_refused_before_anything_changes():
    of = ledger(1, 1, first_version=5)
    old = commands.GrantedLease(group_id=0, attempt=0, engine_version=0, deadline=1)
    of.enact(commands.LeaseGroups(engine_version=0, max_groups=1), commands.Granted(leases=(old,)))
    of.put(summary_of(old))
    of.plan(5)
    with pytest.raises(StalenessError, match="the lag is 5, max_lag is 1"):
        of.commit(5)
    assert of.stats().tokens_trained == 0


def test_plans_and_commits_in_a_wrong_order_are_refused():
    of = ledger(1, 1)
    of.put(summary_of(of.lease(0, 1, now=0.0)[0]))
    for version in (1, 2):
        with pytest.raises(ReplayBufferError, match=rf"plan\({version}\) was requested at learner version 0"):
            of.plan(version)
    with pytest.raises(ReplayBufferError, match=r"commit\(0\)"):
        of.commit(0)
    of.step()
    with pytest.raises(ReplayBufferError, match=r"plan\(0\)"):
        of.plan(0)


def test_an_attempt_that_was_never_leased_cannot_be_put_or_released():
    of = ledger(1, 1)
    [lease] = of.lease(0, 1, now=0.0)
    for group_id, attempt in ((lease.group_id, 1), (1, 0), (999, 0)):
        with pytest.raises(UnknownGroup, match=f"group {group_id} attempt {attempt} was never leased"):
            of.put(replace(summary_of(lease), group_id=group_id, attempt=attempt))
        with pytest.raises(UnknownGroup, match="cannot be released"):
            of.release(group_id, attempt, num_tokens=1, reason="aborted")
    assert of.stats().tokens_dropped == {}


@given(st.lists(st.integers(0, 40)))
def test_an_id_set_has_the_same_elements_as_a_python_set(values: list[int]):
    of, expected = IdSet(), set()
    for value in values:
        of.add(value)
        expected.add(value)
        assert [x for x in range(-1, 42) if x in of] == sorted(expected)
        assert len(of) == len(expected)
    ranges = of.ranges()
    assert all(end < start for (_, end), (start, _) in pairwise(ranges))
    assert IdSet(ranges).ranges() == ranges


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=5))
def test_unpacking_a_parcel_returns_the_packed_frames(frames: list[bytes]):
    [parcel] = pack(frames)
    assert [bytes(frame) for frame in unpack([parcel])] == frames


@given(st.binary(max_size=60))
def test_a_malformed_parcel_raises_only_a_wire_error(tail: bytes):
    try:
        frames = unpack([b"prcl" + tail])
    except WireError:
        return
    assert sum(len(frame) for frame in frames) <= len(tail)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_lag": -1}, "buffer.max_lag must be >= 0, got -1"),
        ({"durability": Durability.disk}, "buffer.directory"),
        ({"filters": ["nonsense"]}, "buffer.filters must be one of .*module:function of your own, got 'nonsense'"),
        ({"lease_s": 0}, "buffer.lease_s must be > 0"),
        ({"port": 70000}, "buffer.port"),
        ({"num_store_servers": -1}, "num_store_servers"),
    ],
)
def test_the_error_for_an_invalid_buffer_option_names_it(options, message):
    with pytest.raises(ValueError, match=message):
        BufferConfig(**options)


def test_a_prefix_that_the_worker_did_not_continue_counts_as_dropped_at_the_put():
    of = ledger(2, 1)
    [lease] = of.lease(0, 1, now=0.0)
    of.save(lease, commands.Progress(num_tokens=40, oldest_version=0, newest_version=0))
    of.release(0, 0, num_tokens=45, reason="aborted")
    [again] = of.lease(0, 1, now=0.0)
    assert (again.num_inherited, of.stats().tokens_buffered) == (40, 40)
    of.put(summary_of(again, lengths=(60,)), continued=False)
    stats = of.stats()
    assert (stats.tokens_buffered, stats.tokens_dropped) == (60, {"aborted": 5, "discarded_prefix": 40})
    assert lease.group_id == again.group_id


@pytest.mark.parametrize("on_stale", [OnStale.requeue, OnStale.drop])
def test_saved_tokens_of_a_stale_group_count_as_dropped_before_its_worker_reports(on_stale):
    of = ledger(1, 1, on_stale=on_stale)
    [slow, quick] = of.lease(0, 2, now=0.0)
    of.save(slow, commands.Progress(num_tokens=30, oldest_version=0, newest_version=0))
    of.put(summary_of(quick))
    of.step()
    of.put(summary_of(of.lease(1, 1, now=0.0)[0]))
    of.step()
    assert of.stats().tokens_dropped == {"stale": 30}
    of.release(slow.group_id, 0, num_tokens=37, reason="revoked")
    assert of.stats().tokens_dropped == {"stale": 37}


def test_a_token_of_a_version_that_no_step_has_made_is_refused_and_nothing_changes():
    of = ledger(1, 1)
    [lease] = of.lease(0, 1, now=0.0)
    before = of.snapshot()
    with pytest.raises(VersionTooNew, match=r"token of policy version 1, .* learner is at 0"):
        of.put(replace(summary_of(lease), newest_version=1))
    with pytest.raises(VersionTooNew, match="holds a token of policy version 1"):
        of.save(lease, commands.Progress(num_tokens=1, oldest_version=0, newest_version=1))
    with pytest.raises(VersionTooNew, match=r"at policy version 1, .* committed 0 steps"):
        of.lease(1, 1)
    assert of.snapshot() == before


def test_only_the_owner_may_report_a_lease_even_after_the_lease_was_revoked():
    of = ledger(1, 1)
    [lease] = of.lease(0, 1, owner=b"a", now=0.0)
    put = commands.Put(summary=summary_of(lease))
    release = commands.Release(group_id=0, attempt=0, num_tokens=3, reason="theirs")
    of.take_back(b"a")
    for command in (put, release):
        with pytest.raises(NotLeaseOwner):
            of.apply(command, sender=b"b")
    with pytest.raises(LeaseExpired):
        of.apply(put, sender=b"a")
    assert of.stats().tokens_dropped == {"expired": 5}


@pytest.mark.long
def test_the_size_of_the_ledger_does_not_grow_with_the_length_of_a_run(monkeypatch: pytest.MonkeyPatch):
    """In this test, each group is trained, or ends in another way: lost, released, too old, or dropped by a filter."""
    of = DrivenLedger(
        StalenessRule(max_lag=2, groups_per_step=4), on_stale=OnStale.drop, filters=["equal_rewards"], lease_s=5.0
    )
    monkeypatch.setattr(account, "MAX_REMEMBERED", 256)
    num_commands, next_id, now, held = 0, 0, 0.0, []

    def apply(command: Any) -> Any:
        nonlocal num_commands
        num_commands += 1
        with suppress(VersionTooOld, LeaseExpired):
            return of.apply(command, now)

    def end(lease: commands.GrantedLease) -> None:
        ending = (lease.group_id * 7 + lease.attempt) % 16
        if ending == 0:
            return  # let the lease expire
        if ending == 1:
            apply(commands.Release(group_id=lease.group_id, attempt=lease.attempt, num_tokens=3, reason="aborted"))
            return
        apply(commands.Renew(((lease.group_id, lease.attempt),)))
        oldest = lease.engine_version - 1 if ending == 2 else None
        apply(commands.Put(summary=summary_of(lease, oldest=oldest, rewards=(0.0, float(ending != 3)))))

    while num_commands < 150_000:
        now += 1.0
        if of.groups.num_queued < 8:
            apply(commands.Enqueue(group_ids=tuple(range(next_id, next_id + 8))))
            next_id += 8
        for lease in apply(commands.LeaseGroups(engine_version=of.learner_version, max_groups=12)).leases:
            end(lease)
        apply(commands.Expire())
        if apply(commands.PlanBatch(version=of.learner_version)).group_ids:
            apply(commands.Commit(version=of.learner_version))
        of.attempts.drain_finished()
        of.attempts.drain_revocations()
        held.append((num_commands, of.num_held))
    assert of.learner_version > 5_000
    first = max(number for commands, number in held if 25_000 < commands <= 50_000)
    assert max(number for commands, number in held if commands > 125_000) <= first


def test_a_repeated_commit_of_the_first_step_changes_nothing():
    ledger = DrivenLedger(StalenessRule(max_lag=1, groups_per_step=1))
    ledger.enqueue([0])
    [lease] = ledger.lease(0, 1)
    ledger.put(summary_of(lease))
    assert ledger.step() == [0]
    before = ledger.snapshot()
    assert ledger.commit(0) == []
    assert ledger.snapshot() == before


def test_a_repeated_put_is_acknowledged_only_for_the_stored_attempt():
    ledger = DrivenLedger(StalenessRule(max_lag=1, groups_per_step=2))
    ledger.enqueue([0])
    [lost] = ledger.lease(0, 1)
    ledger.release(0, 0, num_tokens=0)
    [again] = ledger.lease(0, 1)
    assert [ledger.put(summary_of(again)) for _ in range(2)] == [
        commands.PutResult.stored,
        commands.PutResult.duplicate,
    ]
    with pytest.raises(LeaseExpired):
        ledger.put(summary_of(lost))


@pytest.mark.parametrize(("num_generated", "num_lost"), [(20, 9), (11, 0), (5, 0)])
def test_unreported_tokens_of_a_dead_worker_count_as_lost(num_generated, num_lost):
    new = ledger(2, 2)
    first, second, _ = new.lease(0, 3, owner=b"a")
    new.put(summary_of(first, lengths=(3, 4)))
    new.save(second, commands.Progress(num_tokens=4, oldest_version=0, newest_version=0))
    taken = new.apply(commands.TakeBack(owner=b"a", num_generated=num_generated))
    assert (taken.group_ids, taken.num_lost) == ((1, 2), num_lost)
    assert new.account.tokens_dropped == ({"lost": num_lost} if num_lost else {})
    assert (new.account.tokens_buffered, new.account.num_tokens) == (11, 11 + num_lost)
    [again] = new.lease(0, 1, owner=b"b")
    assert (again.group_id, again.attempt) == (2, 1)


def test_late_reports_of_a_dead_worker_count_once_even_after_a_restart():
    """The lease of an attempt expires before its worker is declared dead.

    The worker never reports the tokens of this attempt, so the tokens count as lost.
    """
    new = ledger(2, 2, lease_s=10.0)
    expired, running, _ = new.lease(0, 3, owner=b"a")
    new.renew(running.group_id, running.attempt, now=15.0)
    assert new.expire(now=12.0) == 2
    new.apply(commands.TakeBack(owner=b"a", num_generated=20))
    again = ledger(2, 2)
    again.restore(new.snapshot())
    for of in (new, again):
        assert of.account.buried[b"a"] == 20
        assert of.apply(commands.TakeBack(owner=b"a", num_generated=30)).num_lost is None
        for lease in (expired, running):
            with pytest.raises(LeaseExpired):
                of.put(summary_of(lease))
            of.release(lease.group_id, lease.attempt, num_tokens=5)
        assert of.account.tokens_dropped == {"lost": 20}


def test_the_ledger_knows_the_last_ended_attempt_of_each_unfinished_group():
    """Group 0 runs in its first attempt.

    Group 1 is queued after two attempts. Group 2 is stored in its second attempt. Group 3 was never leased.
    """
    of = DrivenLedger(StalenessRule(max_lag=3, groups_per_step=4))
    of.enqueue(range(3))
    zero, one, two = of.lease(0, 3)
    of.release(one.group_id, 0, num_tokens=0)
    [again] = of.lease(0, 1)
    of.release(again.group_id, again.attempt, num_tokens=0)
    of.release(two.group_id, 0, num_tokens=0)
    [again] = of.lease(0, 1)
    of.put(summary_of(again))
    of.enqueue([3])
    assert of.groups.running(zero.group_id, 0) is not None
    assert {g.group_id: g.past_attempt for g in of.groups if g.past_attempt >= 0} == {1: 1, 2: 0}


def test_the_ledger_lists_every_ended_attempt_for_the_stores():
    of = DrivenLedger(StalenessRule(max_lag=3, groups_per_step=4))
    of.enqueue(range(2))
    first, second = of.lease(0, 2)
    of.reserve(second, 7)
    for lease in (first, second):
        of.release(lease.group_id, 0, num_tokens=0)
    assert of.groups.ended_attempts == [(0, 0), (1, 0)]


def test_a_missing_group_stays_in_its_planned_batch_until_the_batch_is_dissolved():
    of = ledger(3, 2)
    for lease in of.lease(0, 6):
        of.put(summary_of(lease))
    for version in range(2):
        of.plan(version)
    assert of.apply(commands.LoseGroups(group_ids=(), missing=(3, 99, 5))).missing == (3,)
    assert [group.group_id for group in of.batch(1).groups] == [2, 3]
    replayed = ledger(3, 2)
    replayed.restore(of.snapshot())
    for each in (of, replayed):
        lost = each.apply(commands.LoseGroups(group_ids=(0,)))
        assert (lost.group_ids, lost.dissolved) == ((0, 3), (0, 1))
        assert {group.group_id for group in each.plan(0).groups} <= {1, 2, 4, 5}
        assert each.account.tokens_dropped == {"store_lost": 10}


def test_a_batch_with_a_missing_group_can_be_committed():
    of = ledger(3, 2)
    for lease in of.lease(0, 2):
        of.put(summary_of(lease))
    of.plan(0)
    of.apply(commands.LoseGroups(group_ids=(), missing=(0,)))
    assert of.commit(0) == [0, 1]
    assert of.account.tokens_dropped == {}


def test_every_outcome_declares_whether_the_journal_records_it():
    kinds = [kind for kind in leaves(LedgerOutcome) if kind.__module__.startswith("buffer.")]
    assert len(kinds) > 10
    assert all("is_recorded" in vars(kind) for kind in kinds)
    with pytest.raises(TypeError, match="Undecided must declare the property is_recorded"):
        type("Undecided", (LedgerOutcome,), {}, frozen=True)


def test_the_ledger_records_only_outcomes_that_change_its_state():
    of = ledger(1, 1)
    of.log = recorded = RecordedCommands()
    assert of.enqueue([0]) == []
    [lease] = of.lease(0, 1)
    of.renew(lease.group_id, lease.attempt, now=1.0)
    of.plan(0)
    of.put(summary_of(lease))
    for _ in range(2):
        of.plan(0)
    for _ in range(2):
        of.commit(0)
    kinds = [type(command) for command, _ in recorded.read()]
    assert kinds == [commands.LeaseGroups, commands.Put, commands.PlanBatch, commands.Commit]
