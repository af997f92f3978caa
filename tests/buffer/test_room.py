"""Limited bytes in the stores: which groups may begin, which store gets a group, and which groups are evicted."""

from types import SimpleNamespace

import pytest

from asyncrl.core.errors import (
    ReplayBufferError,
    StoreFull,
)
from buffer.commands import Progress, Reserve, Reserved
from buffer.rule import StalenessRule
from tests.support.ledgers import DrivenLedger, ledger, summary_of


def test_groups_go_to_the_emptier_store_and_no_worker_waits_for_a_full_store():
    of = ledger(0, 4, max_bytes=10, num_stores=2)
    leases = of.lease(0, 4)
    places = []
    for lease in leases:
        places.append(of.reserve(lease, 5).store)
        of.put(summary_of(lease), num_bytes=5)
    assert sorted(places) == [0, 0, 1, 1]
    assert of.plan(0) is not None


def test_one_huge_group_slows_admission_but_never_stops_it():
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


def test_a_stored_group_is_evicted_for_a_group_that_is_due_earlier():
    of = ledger(1, 1, max_bytes=10)
    [slow, quick] = of.lease(0, 2)
    of.reserve(quick, 4)
    of.put(summary_of(quick), num_bytes=4)
    of.step()
    [later] = of.lease(1, 1)
    of.reserve(later, 8)
    of.put(summary_of(later, lengths=(8,)), num_bytes=8)
    assert of.plan(1) is None, "batch 1 must wait for group 0"
    assert of.reserve(slow, 9).evicted == (later.group_id,)
    of.put(summary_of(slow), num_bytes=9)
    assert of.step() == [slow.group_id]
    assert of.stats().tokens_dropped == {"no_room": 8}
    [again] = of.lease(2, 1)
    assert (again.group_id, again.attempt) == (later.group_id, 1)


def test_a_group_needs_no_reservation_if_it_fits_into_the_only_store():
    of = ledger(0, 2, max_bytes=10)
    assert (of.room.fits(10), of.room.fits(11)) == (True, False)
    assert not ledger(0, 2, max_bytes=10, num_stores=2).room.fits(1)


def test_a_failed_reservation_shows_that_the_stores_are_too_small_for_the_batch():
    of = ledger(0, 3, max_bytes=10)
    first, second = of.lease(0, 3)[:2]  # the third group belongs to the same batch, but has no reserved bytes yet
    of.reserve(first, 6)
    of.put(summary_of(first), num_bytes=6)
    with pytest.raises(StoreFull, match=r"6 bytes do not fit: 4 of buffer\.max_stored_bytes=10 are free"):
        of.reserve(second, 6)
    assert of.cannot_hold_batch(second.group_id)
    with pytest.raises(ReplayBufferError, match=r"exceeds buffer\.max_stored_bytes=10"):
        of.reserve(second, 11)


def test_lost_trajectories_dissolve_their_batch_and_are_generated_again():
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


def test_a_group_that_fits_exactly_may_begin():
    ledger = DrivenLedger(StalenessRule(max_lag=1, groups_per_step=1), max_bytes=1000)
    ledger.enqueue(range(2))
    [lease] = ledger.lease(0, 1)
    ledger.reserve(lease, 500)
    ledger.put(summary_of(lease), num_bytes=500)
    assert len(ledger.lease(0, 1)) == 1
    assert not ledger.room.has_room()


def test_no_group_begins_while_an_unplanned_batch_fills_the_store():
    ledger = DrivenLedger(StalenessRule(max_lag=1, groups_per_step=2), max_bytes=1000)
    ledger.enqueue(range(4))
    for lease in ledger.lease(0, 2):
        ledger.reserve(lease, 500)
        ledger.put(summary_of(lease), num_bytes=500)
    assert (ledger.groups.num_stored, ledger.groups.num_leased, ledger.groups.num_planned) == (2, 0, 0)
    assert not ledger.room.has_room()
    assert ledger.lease(0, 1) == []


@pytest.mark.parametrize(("num_stores", "recorded"), [(1, []), (2, [Reserve])])
def test_a_reservation_is_recorded_only_if_there_are_several_stores(num_stores: int, recorded: list):
    ledger = DrivenLedger(StalenessRule(max_lag=1, groups_per_step=2), max_bytes=1000, num_stores=num_stores)
    ledger.enqueue([0])
    [lease] = ledger.lease(0, 1)
    log: list[type] = []
    ledger.log = SimpleNamespace(record=lambda command, outcome, frames: log.append(type(command)))
    ledger.reserve(lease, 500)
    assert log == recorded


def test_the_ledger_lists_the_stored_groups_of_each_store():
    ledger = DrivenLedger(StalenessRule(max_lag=1, groups_per_step=2), max_bytes=1000, num_stores=2)
    ledger.enqueue(range(2))
    for lease in ledger.lease(0, 2):
        ledger.reserve(lease, 900)
        ledger.put(summary_of(lease), num_bytes=900)
    assert ledger.groups.stored_in() == [(0, 0), (1, 0)]
    assert [ledger.groups.stored_in(store) for store in range(2)] == [[(0, 0)], [(1, 0)]]


def test_a_lost_prefix_is_dropped_and_its_group_restarts_from_the_prompt():
    ledger = DrivenLedger(StalenessRule(max_lag=1, groups_per_step=1))
    ledger.enqueue([0])
    [lease] = ledger.lease(0, 1)
    ledger.save(lease, Progress(num_tokens=4, oldest_version=0, newest_version=0), num_bytes=10)
    assert [group.group_id for group in ledger.groups if group.prefix_bytes] == [0]
    ledger.release(0, 0, num_tokens=4)
    assert ledger.lose([0]) == ()
    assert (ledger.account.tokens_buffered, ledger.account.tokens_dropped) == (0, {"store_lost": 4})
    [again] = ledger.lease(0, 1)
    assert (again.attempt, again.progress) == (1, None)


def test_a_repeated_reservation_stays_in_its_store():
    ledger = DrivenLedger(StalenessRule(max_lag=1, groups_per_step=4), max_bytes=1000, num_stores=2)
    ledger.enqueue(range(4))
    leases = ledger.lease(0, 4)
    sizes = (400, 100, 300, 500)
    assert [ledger.reserve(lease, size).store for lease, size in zip(leases, sizes, strict=True)] == [0, 1, 1, 0]
    assert [ledger.reserve(lease, size).store for lease, size in zip(leases, sizes, strict=True)] == [0, 1, 1, 0]


def test_a_group_of_0_bytes_also_goes_to_the_emptiest_store():
    ledger = DrivenLedger(StalenessRule(max_lag=1, groups_per_step=2), max_bytes=1000, num_stores=2)
    ledger.enqueue(range(2))
    first, second = ledger.lease(0, 2)
    assert [ledger.reserve(first, 400).store, ledger.reserve(second, 0).store] == [0, 1]


def test_reservations_are_listed_by_store():
    ledger = DrivenLedger(StalenessRule(max_lag=1, groups_per_step=2), max_bytes=1000, num_stores=2)
    ledger.enqueue(range(3))
    leases = ledger.lease(0, 3)
    for lease, size in zip(leases, (400, 100, 0), strict=True):
        ledger.reserve(lease, size)
    assert [ledger.groups[group_id].num_bytes > 0 for group_id in range(3)] == [True, True, False]
    assert [ledger.groups.leases.reserved_in(store) for store in (0, 1)] == [[(0, 0)], [(1, 0)]]


def test_a_group_or_a_prefix_of_exactly_max_bytes_fits():
    ledger = DrivenLedger(StalenessRule(max_lag=1, groups_per_step=1), max_bytes=1000)
    ledger.enqueue([0])
    [lease] = ledger.lease(0, 1)
    ledger.save(lease, Progress(num_tokens=4, oldest_version=0, newest_version=0), num_bytes=1000)
    assert ledger.reserve(lease, 1000) == Reserved(store=0)
    ledger.put(summary_of(lease), num_bytes=1000)
    assert ledger.groups.num_stored == 1


def test_no_more_prefixes_are_evicted_than_a_group_needs():
    ledger = DrivenLedger(StalenessRule(max_lag=1, groups_per_step=2), max_bytes=1000)
    ledger.enqueue(range(3))
    first, second, third = ledger.lease(0, 3)
    for lease in (first, second):
        ledger.save(lease, Progress(num_tokens=4, oldest_version=0, newest_version=0), num_bytes=500)
    assert ledger.reserve(third, 500) == Reserved(store=0, evicted=(1,))
    assert [group.group_id for group in ledger.groups if group.prefix_bytes] == [0]


def test_a_stored_group_is_not_evicted_for_a_group_with_the_same_deadline():
    ledger = DrivenLedger(StalenessRule(max_lag=1, groups_per_step=2), max_bytes=1000)
    ledger.enqueue(range(2))
    first, second = ledger.lease(0, 2)
    ledger.reserve(first, 600)
    ledger.put(summary_of(first), num_bytes=600)
    with pytest.raises(StoreFull):
        ledger.reserve(second, 600)


def test_a_larger_reservation_of_a_group_replaces_its_earlier_reservation():
    ledger = DrivenLedger(StalenessRule(max_lag=1, groups_per_step=2), max_bytes=1000)
    ledger.enqueue([0])
    [lease] = ledger.lease(0, 1)
    assert [ledger.reserve(lease, size) for size in (600, 900)] == [Reserved(store=0)] * 2


def test_only_the_groups_that_are_due_first_can_make_a_batch_too_large_for_the_stores():
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
