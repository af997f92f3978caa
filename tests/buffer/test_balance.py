"""Leases by measured speed, and running groups that pass from a loaded worker to an idle one."""

import asyncio

import pytest

from buffer.balance import WorkBalance
from tests.support.buffer_groups import prompt, rollout, running

FAST, SLOW = b"fast", b"slow"


def measured(**paces_s: float) -> WorkBalance:
    """Workers that have done ten groups each at these paces, the last of them at 100 s."""
    balance = WorkBalance()
    for name, pace_s in paces_s.items():
        worker = name.encode()
        balance.granted(worker, 0, 100.0 - 10 * pace_s)
        for number in range(10):
            balance.ended(worker, 100.0 - (9 - number) * pace_s)
    return balance


def test_a_pace_is_the_time_per_group_while_any_is_held():
    balance = measured(fast=2.0)
    assert balance.pace_s(FAST, 1, 100.0) == pytest.approx(2.0)
    balance.granted(FAST, 0, 500.0)  # it had nothing to do for 400 s
    balance.ended(FAST, 502.0)
    assert balance.pace_s(FAST, 1, 502.0) == pytest.approx(2.0)


def test_a_worker_that_stalls_is_slow_before_its_group_is_done_or_when_it_is_taken_from_it():
    balance = measured(fast=2.0)
    assert balance.pace_s(FAST, 1, 130.0) == 30.0
    balance.granted(SLOW, 0, 100.0)
    balance.ended(SLOW, 140.0, part=0.0)
    assert balance.pace_s(SLOW, 0, 150.0) == 40.0


def test_a_worker_that_hands_on_every_group_is_as_fast_as_the_parts_that_it_wrote():
    balance = WorkBalance()
    balance.granted(SLOW, 0, 0.0)
    for number in range(1, 21):
        balance.ended(SLOW, 10.0 * number, part=0.25)
    assert balance.pace_s(SLOW, 0, 200.0) == pytest.approx(40.0)


def test_nobody_is_asked_for_its_only_group_before_any_worker_has_done_one():
    balance = WorkBalance()
    balance.granted(SLOW, 0, 0.0)
    assert balance.hand_on(FAST, {SLOW: 1}, 60.0) is None
    assert balance.next_hand_on(FAST, {SLOW: 1}, 60.0) is None
    assert balance.hand_on(FAST, {SLOW: 8}, 60.0) == (SLOW, 4), "half of them, as between equal ones"
    balance.granted(b"other", 0, 0.0)
    balance.ended(b"other", 10.0)
    assert balance.hand_on(FAST, {SLOW: 1}, 60.0) == (SLOW, 1)


def test_leases_follow_the_pace_and_a_slow_worker_is_tried_again_now_and_then():
    balance, held = measured(fast=1.0, slow=10.0), {FAST: 0, SLOW: 0}
    for _ in range(22):
        worker = min(held, key=lambda worker: balance.delay_s(worker, held[worker], 100.0))
        balance.granted(worker, held[worker], 100.0)
        held[worker] += 1
    assert held == {FAST: 20, SLOW: 2}
    balance = measured(fast=1.0, slow=10.0)
    assert balance.delay_s(SLOW, 0, 100.0) > balance.delay_s(FAST, 5, 100.0)
    assert balance.delay_s(SLOW, 0, 200.0) < balance.delay_s(FAST, 0, 100.0)


def test_a_worker_of_unknown_pace_counts_as_the_fastest_known():
    balance = measured(fast=2.0, slow=10.0)
    assert balance.delay_s(b"new", 3, 100.0) == balance.delay_s(FAST, 3, 100.0) == pytest.approx(8.0)


def test_a_worker_that_never_had_a_group_is_tried_before_one_that_is_known():
    balance = WorkBalance()
    balance.granted(SLOW, 0, 0.0)
    balance.ended(SLOW, 24.0)
    assert balance.delay_s(b"new", 0, 25.0) < balance.delay_s(SLOW, 0, 25.0)


@pytest.mark.parametrize(
    ("idle", "num_held", "asked"),
    [
        (FAST, {SLOW: 11}, (SLOW, 10)),  # 10 groups take the fast one as long as 1 takes the slow one
        (SLOW, {FAST: 11}, (FAST, 1)),
        (SLOW, {FAST: 5}, None),  # it would be done last
        (FAST, {SLOW: 1}, (SLOW, 1)),
        (FAST, {b"new": 1}, None),  # as fast
        (FAST, {SLOW: 2, b"new": 30}, (b"new", 15)),
        (FAST, {FAST: 5}, None),
        (FAST, {}, None),
    ],
)
def test_the_most_loaded_worker_hands_on_what_makes_both_end_together(idle, num_held, asked):
    balance = measured(fast=1.0, slow=10.0)
    assert balance.hand_on(idle, num_held, 100.0) == asked


@pytest.mark.parametrize(("idle", "busy", "number"), [(SLOW, FAST, 1), (SLOW, FAST, 2), (SLOW, FAST, 5)])
def test_who_will_be_asked_if_nothing_ends_is_known_beforehand(idle, busy, number):
    balance = measured(fast=1.0, slow=10.0)
    balance.granted(busy, 0, 100.0)
    when = balance.next_hand_on(idle, {busy: number}, 100.0)
    assert balance.hand_on(idle, {busy: number}, when - 1e-6) is None
    assert balance.hand_on(idle, {busy: number}, when + 1e-6) is not None


async def test_an_idle_worker_is_given_groups_of_a_loaded_one_with_what_is_written_of_them():
    async with running(groups_per_step=4, max_lag=0) as run:
        loaded, idle, control = run.client(), run.client(), run.client()
        await control.enqueue([prompt(number) for number in range(8)])
        leases = await loaded.lease(0, 4)
        waiting = asyncio.create_task(idle.lease(0, 4))
        asked = await asyncio.wait_for(loaded.hand_on_request(), 10)
        assert asked == [(lease.prompt.group_id, 0) for lease in leases[2:]]  # which have most left
        for lease in leases[2:]:
            await loaded.save_progress(lease, rollout(lease))
            await loaded.release(lease, num_tokens=5, reason="handed_on")
        [first, *_] = await asyncio.wait_for(waiting, 10)
        assert (first.prompt.group_id, 0) in asked
        assert idle.take_progress(first).summary.num_tokens == 5
        assert (await control.stats()).tokens_dropped == {}
