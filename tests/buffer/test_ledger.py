"""The ledger and its parts, with numbers worked by hand."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.protocol.errors import (
    LeaseExpired,
    NotLeaseOwner,
    ReplayBufferError,
    StalenessError,
    StoreFull,
    UnknownGroup,
    VersionTooNew,
    VersionTooOld,
    WireError,
)
from buffer import account
from buffer.account import IdSet
from buffer.commands import (
    Commit,
    Enqueue,
    Expire,
    Granted,
    GrantedLease,
    LeaseGroups,
    PlanBatch,
    Progress,
    Put,
    PutResult,
    Release,
    Renew,
    Reserve,
    Reserved,
    TakeBack,
)
from buffer.config import BufferConfig, Durability, OnStale
from buffer.encoding import pack, unpack
from buffer.rule import StalenessRule
from buffer.selection import ORDERS, Window
from tests.support.ledgers import DrivenLedger, summary_of


def ledger(max_lag: int, groups_per_step: int, **options) -> DrivenLedger:
    new = DrivenLedger(StalenessRule(max_lag=max_lag, groups_per_step=groups_per_step), **options)
    new.enqueue(range(100))
    return new


@pytest.mark.parametrize(
    ("open_by_deadline", "planned_next", "engine", "admitted"),
    [
        ({}, 5, 5, True),
        ({6: 7}, 5, 5, True),
        ({6: 8}, 5, 5, False),
        ({6: 4}, 5, 4, True),  # those due later leave a seat in the step that the old version needs
        ({5: 3, 6: 4}, 5, 4, True),
        ({5: 4}, 5, 4, False),
        ({5: 4, 6: 3}, 5, 5, True),
        ({5: 4, 6: 4}, 5, 5, False),
        ({}, 5, 3, False),
        ({}, 6, 4, False),
        ({6: 3}, 6, 5, True),
        ({6: 4}, 6, 5, False),
    ],
)
def test_a_group_is_admitted_where_every_step_up_to_the_bound_has_a_seat_for_what_is_due(
    open_by_deadline, planned_next, engine, admitted
):
    rule = StalenessRule(max_lag=1, groups_per_step=4)
    assert rule.admits(open_by_deadline, version=planned_next, engine_version=engine) is admitted


def is_feasible(open_by_deadline: Mapping[int, int], *, version: int, groups_per_step: int) -> bool:
    """Whether steps from ``version`` on, each of which takes the groups that are due first, miss no deadline."""
    due_first = sorted(deadline for deadline, number in open_by_deadline.items() for _ in range(number))
    return all(deadline >= version + place // groups_per_step for place, deadline in enumerate(due_first))


@pytest.mark.parametrize(("max_lag", "groups_per_step"), [(0, 1), (0, 3), (1, 1), (1, 2), (2, 1), (2, 2), (3, 1)])
def test_admission_refuses_exactly_what_would_miss_a_deadline(max_lag: int, groups_per_step: int):
    rule = StalenessRule(max_lag=max_lag, groups_per_step=groups_per_step)
    num_compared = 0
    for counts in product(range((max_lag + 1) * groups_per_step + 1), repeat=max_lag + 1):
        open_by_deadline = {10 + k: number for k, number in enumerate(counts)}
        if not is_feasible(open_by_deadline, version=10, groups_per_step=groups_per_step):
            continue
        for engine_version in range(10 - max_lag - 2, 11):
            deadline = engine_version + max_lag
            after = {**open_by_deadline, deadline: open_by_deadline.get(deadline, 0) + 1}
            expected = is_feasible(after, version=10, groups_per_step=groups_per_step)
            assert rule.admits(open_by_deadline, version=10, engine_version=engine_version) is expected
            num_compared += 1
    assert num_compared > 5


def test_a_batch_must_hold_what_the_steps_after_it_cannot_take():
    rule = StalenessRule(max_lag=2, groups_per_step=3)
    # due: 2 at version 10, 5 by 11, 9 by 12; the steps after 10 take 3 each
    assert rule.required({10: 2, 11: 3, 12: 4}, version=10) == [2, 2, 3]
    # 7 due by 11 leave one step for 4 of them: more than a batch holds, which admission never lets happen
    assert rule.required({10: 2, 11: 5}, version=10) == [2, 4, 1]


def test_a_window_closes_when_the_seats_left_are_needed():
    window = Window([1, 1, 0], 2)
    assert window.last == 3
    window.take(2)
    assert window.last == 0
    window.take(0)
    assert window.last == 0


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("fifo", [4, 0]),
        ("earliest_deadline", [0, 1]),
        ("freshest_first", [4, 5]),
        ("shortest_first", [1, 4]),
    ],
)
def test_each_order_takes_the_groups_it_prefers(order, expected):
    of = ledger(3, 2, order=order)
    old = of.lease(0, 4, now=0.0)
    of.put(summary_of(old[2]))
    of.put(summary_of(old[3]))
    assert of.step() == [2, 3]
    fresh = of.lease(1, 2, now=0.0)
    for lease, length in ((fresh[0], 3), (old[0], 9), (fresh[1], 7), (old[1], 2)):
        of.put(summary_of(lease, lengths=(length,)))
    assert of.step() == expected


def test_ready_groups_overtake_slow_ones_inside_the_window():
    of = ledger(2, 1)
    slow, quick = of.lease(0, 1, now=0.0), of.lease(0, 2, now=0.0)
    for lease in quick:
        of.put(summary_of(lease))
    assert [of.step(), of.step()] == [[1], [2]]
    of.put(summary_of(of.lease(2, 1, now=0.0)[0]))
    assert of.plan(2) is None
    of.put(summary_of(slow[0]))
    assert of.step() == [0]


@pytest.mark.parametrize("order", ORDERS)
def test_a_group_due_now_is_in_the_batch_whatever_the_order(order):
    of = ledger(1, 1, order=order)
    [old, other] = of.lease(0, 2, now=0.0)
    of.put(summary_of(other))
    assert of.step() == [1]
    of.put(summary_of(of.lease(1, 1, now=0.0)[0], lengths=(1,)))
    of.put(summary_of(old, lengths=(50,)))
    assert of.step() == [0]


def test_a_dropped_straggler_is_gone_and_its_late_tokens_count_once():
    of = ledger(1, 1, on_stale=OnStale.drop)
    [slow, quick] = of.lease(0, 2, now=0.0)
    of.put(summary_of(quick))
    of.step()
    of.put(summary_of(of.lease(1, 1, now=0.0)[0]))
    of.step()
    assert [(r.group_id, r.attempt) for r in of.drain_revocations()] == [(0, 0)]
    for _ in range(2):
        of.release(slow.group_id, slow.attempt, num_tokens=30, reason="stale")
    stats = of.stats()
    assert (stats.groups["dropped"], stats.tokens_dropped) == (1, {"stale": 30})
    assert (stats.mean_length_kept, stats.mean_length_dropped) == (5.0, 30.0)


def test_more_groups_share_a_deadline_than_its_steps_take_and_the_last_leased_gives_way():
    of = ledger(2, 1, on_stale=OnStale.requeue)
    first = of.lease(0, 3, now=0.0)
    of.put(summary_of(first[0]))
    of.step()
    [fresh] = of.lease(1, 9, now=0.0)
    of.put(summary_of(fresh))
    # groups 1 and 2 are due at 2, one of them must be in batch 1 or go; group 3 is ready
    assert of.step() == [3]
    assert [r.group_id for r in of.drain_revocations()] == [2]


def test_a_filtered_group_is_replaced_and_its_put_acknowledged_again():
    of = ledger(0, 2, filters=["equal_rewards"])
    leases = of.lease(0, 9, now=0.0)
    equal = summary_of(leases[0], rewards=(1.0, 1.0))
    assert of.put(equal) is PutResult.filtered
    assert of.put(equal) is PutResult.duplicate
    [replacement] = of.lease(0, 9, now=0.0)
    of.put(summary_of(replacement))
    of.put(summary_of(leases[1]))
    assert sorted(of.step()) == [1, 2]
    assert of.stats().tokens_dropped == {"equal_rewards": 5}


def test_a_saved_prefix_is_continued_at_its_own_version_and_its_tokens_count_once():
    of = ledger(2, 1, lease_s=10.0)
    [dead, other] = of.lease(0, 2, now=0.0)
    of.save(dead, Progress(num_tokens=40, oldest_version=0, newest_version=0))
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


def test_a_group_that_is_released_to_be_dropped_is_finished_with_all_of_its_tokens():
    of = ledger(2, 1, lease_s=10.0)
    [lease] = of.lease(0, 1, now=0.0)
    of.save(lease, Progress(num_tokens=40, oldest_version=0, newest_version=0))
    for _ in range(2):
        of.release(0, 0, num_tokens=45, reason="reward", max_failures=1)
    stats = of.stats()
    assert (stats.tokens_buffered, stats.tokens_dropped, stats.groups_dropped) == (0, {"reward": 45}, {"reward": 1})
    assert of.finished() == [(0, 1)]
    assert [each.group_id for each in of.lease(0, 1, now=0.0)] == [1]


def test_failures_of_a_group_add_up_over_its_workers_and_nothing_else_is_one():
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
    old = GrantedLease(group_id=0, attempt=0, engine_version=0, deadline=1)
    of.enact(LeaseGroups(engine_version=0, max_groups=1), Granted(leases=(old,)))
    of.put(summary_of(old))
    of.plan(5)
    with pytest.raises(StalenessError, match="lag 5, bound 1"):
        of.commit(5)
    assert of.stats().tokens_trained == 0


def test_plans_and_commits_out_of_order_are_refused_by_name():
    of = ledger(1, 1)
    of.put(summary_of(of.lease(0, 1, now=0.0)[0]))
    for version in (1, 2):
        with pytest.raises(ReplayBufferError, match=rf"plan\({version}\) was asked while the learner is at version 0"):
            of.plan(version)
    with pytest.raises(ReplayBufferError, match=r"commit\(0\)"):
        of.commit(0)
    of.step()
    with pytest.raises(ReplayBufferError, match=r"plan\(0\)"):
        of.plan(0)


def test_what_was_never_leased_can_be_neither_put_nor_released():
    of = ledger(1, 1)
    [lease] = of.lease(0, 1, now=0.0)
    for group_id, attempt in ((lease.group_id, 1), (1, 0), (999, 0)):
        with pytest.raises(UnknownGroup, match=f"group {group_id} attempt {attempt} was never leased"):
            of.put(replace(summary_of(lease), group_id=group_id, attempt=attempt))
        with pytest.raises(UnknownGroup, match="cannot be released"):
            of.release(group_id, attempt, num_tokens=1, reason="aborted")
    assert of.stats().tokens_dropped == {}


@given(st.lists(st.integers(0, 40)))
def test_a_set_of_ranges_is_a_set(values: list[int]):
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
def test_a_parcel_gives_back_its_frames_at_aligned_places(frames: list[bytes]):
    [parcel] = pack(frames)
    assert [bytes(frame) for frame in unpack([parcel])] == frames


@given(st.binary(max_size=60))
def test_a_malformed_parcel_is_a_wire_error(tail: bytes):
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
        ({"filters": ["nonsense"]}, "buffer.filters names 'nonsense'; known are .*module:function"),
        ({"lease_s": 0}, "buffer.lease_s must be > 0"),
        ({"port": 70000}, "buffer.port"),
        ({"num_store_servers": -1}, "num_store_servers"),
    ],
)
def test_a_wrong_option_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        BufferConfig(**options)


def test_an_order_of_ones_own_is_found_by_its_path():
    of = ledger(1, 1, order="tests.support.orders_of_mine:longest_first")
    short, long = of.lease(0, 2, now=0.0)
    of.put(summary_of(short, lengths=(3,)))
    of.put(summary_of(long, lengths=(9,)))
    assert of.step() == [long.group_id]


def test_a_filter_of_ones_own_drops_under_its_path():
    name = "tests.support.orders_of_mine:only_even_groups"
    of = ledger(0, 1, filters=[name])
    of.put(summary_of(of.lease(0, 1, now=0.0)[0]))
    of.step()
    assert of.put(summary_of(of.lease(1, 1, now=0.0)[0])) is PutResult.filtered
    stats = of.stats()
    assert (stats.tokens_dropped, stats.groups_dropped) == ({name: 5}, {name: 1})
    assert stats.mean_length_dropped_by_reason == {name: 5.0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"filters": ["tests.support.orders_of_mine:fails"]},
            "buffer.filters 'tests.support.orders_of_mine:fails' raised KeyError",
        ),
        ({"order": "tests.support.orders_of_mine:no_number"}, "buffer.order must give a number, got nan"),
    ],
)
def test_code_of_ones_own_that_fails_answers_the_put_and_changes_nothing(options, message):
    of = ledger(0, 1, **options)
    [lease] = of.lease(0, 1, now=0.0)
    before = of.snapshot()
    with pytest.raises(ReplayBufferError, match=message):
        of.put(summary_of(lease))
    assert of.snapshot() == before


def test_a_prefix_that_its_worker_did_not_take_counts_as_dropped_when_it_puts():
    of = ledger(2, 1)
    [lease] = of.lease(0, 1, now=0.0)
    of.save(lease, Progress(num_tokens=40, oldest_version=0, newest_version=0))
    of.release(0, 0, num_tokens=45, reason="aborted")
    [again] = of.lease(0, 1, now=0.0)
    assert (again.num_inherited, of.stats().tokens_buffered) == (40, 40)
    of.put(summary_of(again, lengths=(60,)), continued=False)
    stats = of.stats()
    assert (stats.tokens_buffered, stats.tokens_dropped) == (60, {"aborted": 5, "discarded_prefix": 40})
    assert lease.group_id == again.group_id


@pytest.mark.parametrize("on_stale", [OnStale.requeue, OnStale.drop])
def test_what_a_given_up_straggler_had_saved_counts_as_dropped_though_its_worker_is_dead(on_stale):
    of = ledger(1, 1, on_stale=on_stale)
    [slow, quick] = of.lease(0, 2, now=0.0)
    of.save(slow, Progress(num_tokens=30, oldest_version=0, newest_version=0))
    of.put(summary_of(quick))
    of.step()
    of.put(summary_of(of.lease(1, 1, now=0.0)[0]))
    of.step()
    assert of.stats().tokens_dropped == {"stale": 30}
    of.release(slow.group_id, 0, num_tokens=37, reason="revoked")
    assert of.stats().tokens_dropped == {"stale": 37}


def test_a_snapshot_of_another_format_is_refused_by_name():
    of = ledger(1, 1)
    with pytest.raises(ValueError, match="snapshot has format=1, expected 8"):
        ledger(1, 1).restore({**of.snapshot(), "format": 1})


def test_a_token_of_a_version_that_no_step_has_made_is_refused_and_nothing_changes():
    of = ledger(1, 1)
    [lease] = of.lease(0, 1, now=0.0)
    before = of.snapshot()
    with pytest.raises(VersionTooNew, match="holds a token of policy version 1, but the learner is at 0"):
        of.put(replace(summary_of(lease), newest_version=1))
    with pytest.raises(VersionTooNew, match="holds a token of policy version 1"):
        of.save(lease, Progress(num_tokens=1, oldest_version=0, newest_version=1))
    with pytest.raises(VersionTooNew, match="at policy version 1, but the learner has committed 0 steps"):
        of.lease(1, 1)
    assert of.snapshot() == before


def test_only_the_owner_of_a_lease_reports_it_also_after_it_was_taken_back():
    of = ledger(1, 1)
    [lease] = of.lease(0, 1, owner=b"a", now=0.0)
    put = Put(summary=summary_of(lease), owner=b"b")
    release = Release(group_id=0, attempt=0, num_tokens=3, reason="theirs", owner=b"b")
    of.take_back(b"a")
    for command in (put, release):
        with pytest.raises(NotLeaseOwner):
            of.apply(command)
    with pytest.raises(LeaseExpired):
        of.apply(replace(put, owner=b"a"))
    assert of.stats().tokens_dropped == {"expired": 5}


def test_what_the_ledger_holds_does_not_grow_with_the_length_of_a_run(monkeypatch: pytest.MonkeyPatch):
    """Groups end in every way: stored, filtered, given up, released, too old, expired and never heard of again."""
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

    def end(lease: GrantedLease) -> None:
        ending = (lease.group_id * 7 + lease.attempt) % 16
        if ending == 0:
            return  # its worker is never heard of again
        if ending == 1:
            apply(Release(group_id=lease.group_id, attempt=lease.attempt, num_tokens=3, reason="aborted"))
            return
        apply(Renew(group_id=lease.group_id, attempt=lease.attempt))
        oldest = lease.engine_version - 1 if ending == 2 else None
        apply(Put(summary=summary_of(lease, oldest=oldest, rewards=(0.0, float(ending != 3)))))

    while num_commands < 150_000:
        now += 1.0
        if of.num_queued < 8:
            apply(Enqueue(group_ids=tuple(range(next_id, next_id + 8))))
            next_id += 8
        for lease in apply(LeaseGroups(engine_version=of.learner_version, max_groups=12)).leases:
            end(lease)
        apply(Expire())
        if apply(PlanBatch(version=of.learner_version)).group_ids:
            apply(Commit(version=of.learner_version))
        of.drain_finished()
        of.drain_revocations()
        held.append((num_commands, of.num_held))
    assert of.learner_version > 5_000
    first = max(number for commands, number in held if 25_000 < commands <= 50_000)
    assert max(number for commands, number in held if commands > 125_000) <= first


def test_a_full_store_beside_an_empty_one_takes_nothing_and_nobody_waits():
    of = ledger(0, 4, max_bytes=10, num_stores=2)
    leases = of.lease(0, 4)
    places = []
    for lease in leases:
        places.append(of.reserve(lease, 5).store)
        of.put(summary_of(lease), num_bytes=5)
    assert sorted(places) == [0, 0, 1, 1]
    assert of.plan(0) is not None


def test_one_huge_group_slows_admission_down_and_never_stops_it():
    of = ledger(0, 2, max_bytes=1000)
    running = []
    for size in [900] + [10] * 40:
        leases = of.lease(of.learner_version, 2)
        running.append(len(leases))
        for lease in leases:
            of.reserve(lease, size if lease is leases[0] else 10)
            of.put(summary_of(lease), num_bytes=size if lease is leases[0] else 10)
        if of.plan(of.learner_version) is not None:
            of.commit(of.learner_version)
    assert running[1:4] == [1, 1, 1]
    assert running[-10:] == [2] * 10


def test_a_stored_group_that_is_due_later_gives_way_and_its_tokens_are_counted():
    of = ledger(1, 1, max_bytes=10)
    [slow, quick] = of.lease(0, 2)
    of.reserve(quick, 4)
    of.put(summary_of(quick), num_bytes=4)
    of.step()
    [later] = of.lease(1, 1)
    of.reserve(later, 8)
    of.put(summary_of(later, lengths=(8,)), num_bytes=8)
    assert of.plan(1) is None, "group 0 is due now"
    assert of.reserve(slow, 9).evicted == (later.group_id,)
    of.put(summary_of(slow), num_bytes=9)
    assert of.step() == [slow.group_id]
    assert of.stats().tokens_dropped == {"no_room": 8}
    [again] = of.lease(2, 1)
    assert (again.group_id, again.attempt) == (later.group_id, 1)


def test_a_group_comes_without_a_reservation_up_to_the_last_byte_of_a_single_store():
    of = ledger(0, 2, max_bytes=10)
    assert (of.fits(10), of.fits(11)) == (True, False)
    assert not ledger(0, 2, max_bytes=10, num_stores=2).fits(1)


def test_a_batch_that_the_stores_cannot_hold_is_known_when_its_last_group_asks_for_room():
    of = ledger(0, 3, max_bytes=10)
    first, second = of.lease(0, 3)[:2]  # the third is due as early, and has reserved nothing
    of.reserve(first, 6)
    of.put(summary_of(first), num_bytes=6)
    with pytest.raises(StoreFull, match=r"6 bytes do not fit: 4 of buffer\.max_stored_bytes=10 are free"):
        of.reserve(second, 6)
    assert of.cannot_hold_batch(second.group_id)
    with pytest.raises(ReplayBufferError, match=r"larger than buffer\.max_stored_bytes=10"):
        of.reserve(second, 11)


def test_trajectories_that_are_lost_dissolve_their_batch_and_are_generated_again():
    of = ledger(2, 1)
    for lease in of.lease(0, 3):
        of.put(summary_of(lease))
    before = of.plan(0)
    of.plan(1)
    assert before is not None
    assert of.lose([before.groups[0].group_id]) == (0, 1)
    stats = of.stats()
    assert (stats.groups["queued"], stats.groups["stored"], stats.groups["planned"]) == (98, 2, 0)
    assert stats.tokens_dropped == {"store_lost": 5}
    assert len(of.step()) == 1


@pytest.mark.parametrize(("length", "kept"), [(0, PutResult.filtered), (1, PutResult.stored)])
def test_a_group_in_which_the_policy_wrote_nothing_is_filtered(length: int, kept: PutResult):
    of = ledger(0, 1, filters=["no_tokens"])
    assert of.put(summary_of(of.lease(0, 1)[0], lengths=(length,))) is kept


def test_a_group_that_just_fits_may_begin():
    ledger = DrivenLedger(StalenessRule(max_lag=1, groups_per_step=1), max_bytes=1000)
    ledger.enqueue(range(2))
    [lease] = ledger.lease(0, 1)
    ledger.reserve(lease, 500)
    ledger.put(summary_of(lease), num_bytes=500)
    assert len(ledger.lease(0, 1)) == 1
    assert not ledger.has_room()


def test_a_full_store_with_a_batch_that_nobody_has_planned_yet_lets_no_group_begin():
    ledger = DrivenLedger(StalenessRule(max_lag=1, groups_per_step=2), max_bytes=1000)
    ledger.enqueue(range(4))
    for lease in ledger.lease(0, 2):
        ledger.reserve(lease, 500)
        ledger.put(summary_of(lease), num_bytes=500)
    assert (ledger.num_stored, ledger.num_leased, ledger.num_planned) == (2, 0, 0)
    assert not ledger.has_room()
    assert ledger.lease(0, 1) == []


@pytest.mark.parametrize(("num_stores", "recorded"), [(1, []), (2, [Reserve])])
def test_a_reservation_is_recorded_only_where_it_says_which_store_holds_the_group(num_stores: int, recorded: list):
    ledger = DrivenLedger(StalenessRule(max_lag=1, groups_per_step=2), max_bytes=1000, num_stores=num_stores)
    ledger.enqueue([0])
    [lease] = ledger.lease(0, 1)
    log: list[type] = []
    ledger.log = SimpleNamespace(record=lambda command, outcome, frames: log.append(type(command)))
    ledger.reserve(lease, 500)
    assert log == recorded


def test_the_stored_groups_of_one_store_are_those_that_were_reserved_there():
    ledger = DrivenLedger(StalenessRule(max_lag=1, groups_per_step=2), max_bytes=1000, num_stores=2)
    ledger.enqueue(range(2))
    for lease in ledger.lease(0, 2):
        ledger.reserve(lease, 900)
        ledger.put(summary_of(lease), num_bytes=900)
    assert ledger.stored_groups() == [(0, 0), (1, 0)]
    assert [ledger.stored_groups(store) for store in range(2)] == [[(0, 0)], [(1, 0)]]


def test_a_lost_prefix_is_dropped_and_its_group_begins_afresh():
    ledger = DrivenLedger(StalenessRule(max_lag=1, groups_per_step=1))
    ledger.enqueue([0])
    [lease] = ledger.lease(0, 1)
    ledger.save(lease, Progress(num_tokens=4, oldest_version=0, newest_version=0), num_bytes=10)
    assert ledger.groups_with_prefix() == [0]
    ledger.release(0, 0, num_tokens=4)
    assert ledger.lose([0]) == ()
    assert (ledger.account.tokens_buffered, ledger.account.tokens_dropped) == (0, {"store_lost": 4})
    [again] = ledger.lease(0, 1)
    assert (again.attempt, again.progress) == (1, None)


def test_the_budget_is_how_many_are_admitted_one_after_another():
    rule = StalenessRule(max_lag=2, groups_per_step=2)
    for due in ((0, 0, 0), (1, 0, 0), (2, 1, 0), (0, 3, 2), (2, 2, 2), (0, 0, 5)):
        for engine_version in (0, 1, 2, 3):
            open_by_deadline = {3 + k: number for k, number in enumerate(due)}
            budget = rule.budget(open_by_deadline, version=3, engine_version=engine_version)
            deadline, admitted = rule.deadline(engine_version), 0
            while rule.admits(open_by_deadline, version=3, engine_version=engine_version):
                open_by_deadline[deadline] = open_by_deadline.get(deadline, 0) + 1
                admitted += 1
            assert budget == admitted, (due, engine_version)


def test_a_reservation_that_is_made_again_stays_in_its_store():
    ledger = DrivenLedger(StalenessRule(max_lag=1, groups_per_step=4), max_bytes=1000, num_stores=2)
    ledger.enqueue(range(4))
    leases = ledger.lease(0, 4)
    sizes = (400, 100, 300, 500)
    assert [ledger.reserve(lease, size).store for lease, size in zip(leases, sizes, strict=True)] == [0, 1, 1, 0]
    assert [ledger.reserve(lease, size).store for lease, size in zip(leases, sizes, strict=True)] == [0, 1, 1, 0]


def test_a_group_without_bytes_goes_to_the_emptiest_store_too():
    ledger = DrivenLedger(StalenessRule(max_lag=1, groups_per_step=2), max_bytes=1000, num_stores=2)
    ledger.enqueue(range(2))
    first, second = ledger.lease(0, 2)
    assert [ledger.reserve(first, 400).store, ledger.reserve(second, 0).store] == [0, 1]


def test_what_is_reserved_is_known_by_its_store():
    ledger = DrivenLedger(StalenessRule(max_lag=1, groups_per_step=2), max_bytes=1000, num_stores=2)
    ledger.enqueue(range(3))
    leases = ledger.lease(0, 3)
    for lease, size in zip(leases, (400, 100, 0), strict=True):
        ledger.reserve(lease, size)
    assert [ledger.is_reserved(group_id, 0) for group_id in range(3)] == [True, True, False]
    assert [ledger.reserved_groups(store) for store in (0, 1)] == [[(0, 0)], [(1, 0)]]


def test_a_group_and_a_prefix_of_just_the_bound_fit():
    ledger = DrivenLedger(StalenessRule(max_lag=1, groups_per_step=1), max_bytes=1000)
    ledger.enqueue([0])
    [lease] = ledger.lease(0, 1)
    ledger.save(lease, Progress(num_tokens=4, oldest_version=0, newest_version=0), num_bytes=1000)
    assert ledger.reserve(lease, 1000) == Reserved(store=0)
    ledger.put(summary_of(lease), num_bytes=1000)
    assert ledger.num_stored == 1


def test_no_more_gives_way_than_a_group_needs():
    ledger = DrivenLedger(StalenessRule(max_lag=1, groups_per_step=2), max_bytes=1000)
    ledger.enqueue(range(3))
    first, second, third = ledger.lease(0, 3)
    for lease in (first, second):
        ledger.save(lease, Progress(num_tokens=4, oldest_version=0, newest_version=0), num_bytes=500)
    assert ledger.reserve(third, 500) == Reserved(store=0, evicted=(1,))
    assert ledger.groups_with_prefix() == [0]


def test_a_stored_group_that_is_due_as_soon_as_another_does_not_give_way_to_it():
    ledger = DrivenLedger(StalenessRule(max_lag=1, groups_per_step=2), max_bytes=1000)
    ledger.enqueue(range(2))
    first, second = ledger.lease(0, 2)
    ledger.reserve(first, 600)
    ledger.put(summary_of(first), num_bytes=600)
    with pytest.raises(StoreFull):
        ledger.reserve(second, 600)


def test_a_group_that_has_grown_may_reserve_more_in_the_place_of_what_it_reserved():
    ledger = DrivenLedger(StalenessRule(max_lag=1, groups_per_step=2), max_bytes=1000)
    ledger.enqueue([0])
    [lease] = ledger.lease(0, 1)
    assert [ledger.reserve(lease, size) for size in (600, 900)] == [Reserved(store=0)] * 2


def test_a_commit_that_is_sent_again_changes_nothing_also_the_first():
    ledger = DrivenLedger(StalenessRule(max_lag=1, groups_per_step=1))
    ledger.enqueue([0])
    [lease] = ledger.lease(0, 1)
    ledger.put(summary_of(lease))
    assert ledger.step() == [0]
    before = ledger.snapshot()
    assert ledger.commit(0) == []
    assert ledger.snapshot() == before


def test_only_the_groups_that_are_due_first_can_be_the_ones_that_the_stores_cannot_hold():
    ledger = DrivenLedger(StalenessRule(max_lag=1, groups_per_step=1), max_bytes=1000)
    ledger.enqueue(range(4))
    first, second = ledger.lease(0, 2)
    ledger.put(summary_of(first))
    assert ledger.step() == [0]
    [third] = ledger.lease(1, 1)
    assert (second.deadline, third.deadline) == (1, 2)
    assert [ledger.cannot_hold_batch(lease.group_id) for lease in (second, third)] == [True, False]
    ledger.release(second.group_id, 0, num_tokens=0)
    [again] = ledger.lease(1, 1)
    assert again.deadline == third.deadline
    assert [ledger.cannot_hold_batch(lease.group_id) for lease in (again, third)] == [True, True]


def test_of_a_stored_group_only_the_attempt_that_is_stored_is_acknowledged_again():
    ledger = DrivenLedger(StalenessRule(max_lag=1, groups_per_step=2))
    ledger.enqueue([0])
    [lost] = ledger.lease(0, 1)
    ledger.release(0, 0, num_tokens=0)
    [again] = ledger.lease(0, 1)
    assert [ledger.put(summary_of(again)) for _ in range(2)] == [PutResult.stored, PutResult.duplicate]
    with pytest.raises(LeaseExpired):
        ledger.put(summary_of(lost))


@pytest.mark.parametrize(("num_generated", "num_lost"), [(20, 9), (11, 0), (5, 0)])
def test_what_a_dead_worker_had_generated_and_nobody_can_report_is_lost(num_generated, num_lost):
    new = ledger(2, 2)
    first, second, _ = new.lease(0, 3, owner=b"a")
    new.put(summary_of(first, lengths=(3, 4)))
    new.save(second, Progress(num_tokens=4, oldest_version=0, newest_version=0))
    taken = new.apply(TakeBack(owner=b"a", num_generated=num_generated))
    assert (taken.group_ids, taken.num_lost) == ((1, 2), num_lost)
    assert new.account.tokens_dropped == ({"lost": num_lost} if num_lost else {})
    assert (new.account.tokens_buffered, new.account.num_tokens) == (11, 11 + num_lost)
    [again] = new.lease(0, 1, owner=b"b")
    assert (again.group_id, again.attempt) == (2, 1)
