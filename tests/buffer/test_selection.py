"""The staleness rule, `buffer.rule.Window`, and the groups of a batch, compared with hand-computed numbers."""

from collections.abc import Mapping
from itertools import product

import pytest

from asyncrl.core.errors import (
    ReplayBufferError,
)
from buffer.commands import PutResult
from buffer.rule import ORDERS, StalenessRule, Window
from tests.support.ledgers import ledger, summary_of


@pytest.mark.parametrize(
    ("open_by_deadline", "planned_next", "engine", "admitted"),
    [
        ({}, 5, 5, True),
        ({6: 7}, 5, 5, True),
        ({6: 8}, 5, 5, False),
        # no open group has the deadline 5, so step 5 can still take a new group from an engine at version 4
        ({6: 4}, 5, 4, True),
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
def test_a_group_is_admitted_only_if_all_groups_can_meet_their_deadlines(
    open_by_deadline, planned_next, engine, admitted
):
    rule = StalenessRule(max_lag=1, groups_per_step=4)
    assert rule.admits(open_by_deadline, version=planned_next, engine_version=engine) is admitted


def is_feasible(open_by_deadline: Mapping[int, int], *, version: int, groups_per_step: int) -> bool:
    """Return whether the steps from ``version`` on meet all deadlines.

    Each step takes the groups with the earliest deadlines.
    """
    due_first = sorted(deadline for deadline, number in open_by_deadline.items() for _ in range(number))
    return all(deadline >= version + place // groups_per_step for place, deadline in enumerate(due_first))


@pytest.mark.parametrize(("max_lag", "groups_per_step"), [(0, 1), (0, 3), (1, 1), (1, 2), (2, 1), (2, 2), (3, 1)])
def test_admission_refuses_a_group_exactly_if_a_deadline_would_be_missed(max_lag: int, groups_per_step: int):
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


def test_a_batch_must_contain_the_groups_that_later_steps_cannot_take():
    rule = StalenessRule(max_lag=2, groups_per_step=3)
    # By versions 10, 11 and 12, the number of due groups is 2, 5 and 9. Each step after step 10 takes 3 groups.
    assert rule.required({10: 2, 11: 3, 12: 4}, version=10) == [2, 2, 3]
    # 7 groups are due by version 11, so step 10 must take 4. A batch has only 3, but a run never leases so many groups.
    assert rule.required({10: 2, 11: 5}, version=10) == [2, 4, 1]


def test_a_window_closes_when_its_remaining_places_are_needed_for_due_groups():
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
def test_each_order_plans_the_groups_that_it_prefers(order, expected):
    of = ledger(3, 2, order=order)
    old = of.lease(0, 4, now=0.0)
    of.put(summary_of(old[2]))
    of.put(summary_of(old[3]))
    assert of.step() == [2, 3]
    fresh = of.lease(1, 2, now=0.0)
    for lease, length in ((fresh[0], 3), (old[0], 9), (fresh[1], 7), (old[1], 2)):
        of.put(summary_of(lease, lengths=(length,)))
    assert of.step() == expected


def test_finished_groups_overtake_slow_groups_within_their_deadlines():
    of = ledger(2, 1)
    slow, quick = of.lease(0, 1, now=0.0), of.lease(0, 2, now=0.0)
    for lease in quick:
        of.put(summary_of(lease))
    assert [of.step(), of.step()] == [[1], [2]]
    of.put(summary_of(of.lease(2, 1, now=0.0)[0]))
    assert of.plan(2) is None
    of.put(summary_of(slow[0]))
    assert of.step() == [0]


@pytest.mark.parametrize("order", [*ORDERS.names(), "tests.support.orders_of_mine:by_group"])
def test_every_order_puts_a_group_that_is_due_into_the_batch(order):
    of = ledger(1, 1, order=order)
    [old, other] = of.lease(0, 2, now=0.0)
    of.put(summary_of(other))
    assert of.step() == [1]
    of.put(summary_of(of.lease(1, 1, now=0.0)[0], lengths=(1,)))
    of.put(summary_of(old, lengths=(50,)))
    assert of.step() == [0]


def test_the_reward_spread_order_takes_large_variances_first_and_unscored_groups_last():
    of = ledger(3, 1, order="reward_spread")
    rewards = ((1.0, 1.0), (0.0, 1.0), (float("nan"), 1.0), (0.0, 3.0))
    for lease, own in zip(of.lease(0, 4), rewards, strict=True):
        of.put(summary_of(lease, rewards=own))
    assert [of.step() for _ in rewards] == [[3], [1], [0], [2]]


def test_a_users_order_and_filter_are_loaded_from_a_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "def last_first(summary, deadline):\n    return -summary.group_id\n"
        "def not_long(summary):\n    return summary.num_tokens < 10\n"
    )
    of = ledger(1, 1, order=f"{path}:last_first", filters=[f"{path}:not_long"])
    long, first = of.lease(0, 2)
    assert of.put(summary_of(long, lengths=(10,))) is PutResult.filtered
    of.put(summary_of(first))
    [last] = of.lease(0, 1)
    of.put(summary_of(last))
    assert of.step() == [last.group_id]


def test_a_users_order_is_imported_by_its_module_path():
    of = ledger(1, 1, order="tests.support.orders_of_mine:longest_first")
    short, long = of.lease(0, 2, now=0.0)
    of.put(summary_of(short, lengths=(3,)))
    of.put(summary_of(long, lengths=(9,)))
    assert of.step() == [long.group_id]


def test_groups_that_a_users_filter_drops_are_counted_under_its_path():
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
        ({"order": "tests.support.orders_of_mine:no_number"}, "buffer.order must return a number, got nan"),
    ],
)
def test_an_error_in_a_users_order_or_filter_fails_the_put_and_changes_nothing(options, message):
    of = ledger(0, 1, **options)
    [lease] = of.lease(0, 1, now=0.0)
    before = of.snapshot()
    with pytest.raises(ReplayBufferError, match=message):
        of.put(summary_of(lease))
    assert of.snapshot() == before


@pytest.mark.parametrize(("length", "kept"), [(0, PutResult.filtered), (1, PutResult.stored)])
def test_the_no_tokens_filter_drops_only_groups_without_sampled_tokens(length: int, kept: PutResult):
    of = ledger(0, 1, filters=["no_tokens"])
    assert of.put(summary_of(of.lease(0, 1)[0], lengths=(length,))) is kept


def test_the_budget_equals_the_number_of_groups_that_can_be_admitted():
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
