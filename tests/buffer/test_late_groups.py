"""Groups that would hold up their batch are handed on in time: whole fleets in simulated time, and the estimates."""

import math
import random
from dataclasses import replace

import pytest

from asyncrl.profile.scenario import EngineModel, LearnerModel, LengthModel, Scenario
from asyncrl.profile.simulator import Simulation
from asyncrl.protocol.types import GroupSummary
from buffer import Ledger, StalenessRule
from buffer.commands import Enqueue, Expire, LeaseGroups, Progress, Put, Release
from buffer.late_groups import GroupLengths, LateGroups
from buffer.messages import HAND_ON
from tests.support.simulated_fleet import SimulatedFleet

FAST, SLOW = 100.0, 10.0
"""Tokens per second of one group; a group has 80."""
ONE_SLOW = [FAST, FAST, FAST, SLOW]


def share(speeds, *, seconds=40.0, num_places=8, **options) -> float:
    """Tokens trained on per second, of the sum of what the engines write when every place is taken."""
    fleet = SimulatedFleet(speeds, num_places=num_places, **options)
    at_end = [speed(1e9) if callable(speed) else speed for speed in speeds]
    return fleet.rate(seconds, warm_up_s=10.0) / (num_places * sum(at_end))


@pytest.mark.parametrize(
    ("speeds", "options"),
    [
        ([FAST] * 4, {}),
        (ONE_SLOW, {}),
        (ONE_SLOW, {"max_lag": 1}),
        (ONE_SLOW, {"max_lag": 4}),
        (ONE_SLOW, {"num_places": 16}),
        (ONE_SLOW, {"num_places": 1, "seconds": 300.0}),
        ([FAST, SLOW], {}),
        ([FAST, SLOW, SLOW, SLOW], {"seconds": 80.0}),
        ([FAST, FAST, FAST, FAST / 3], {"seconds": 20.0}),
        ([lambda t: FAST if t < 15 else SLOW, lambda t: SLOW if t < 15 else FAST, FAST, FAST], {}),
    ],
)
def test_a_fleet_with_slow_engines_trains_on_nine_tenths_of_what_they_write(speeds, options):
    assert share(speeds, **options) >= 0.9


def lengths(seed: int, *, sigma: float):
    rng = random.Random(seed)
    drawn = [max(4, int(rng.lognormvariate(4.0, sigma))) for _ in range(10_000)]
    return drawn.__getitem__


@pytest.mark.parametrize(
    "options",
    [
        {"max_lag": 0},
        {"max_lag": 0, "groups_per_step": 64},
        {"length_of": lengths(0, sigma=0.8)},
        {"length_of": lengths(1, sigma=0.8), "max_lag": 1},
        {"step_s": 1.0},
    ],
    ids=["synchronous", "synchronous large steps", "long tail", "long tail at lag 1", "slow learner"],
)
def test_a_slow_engine_costs_nothing_where_batches_are_what_limits_the_fleet(options):
    with_it = share(ONE_SLOW, seconds=80.0, **options) * sum(ONE_SLOW)
    without = share(ONE_SLOW[:3], seconds=80.0, **options) * sum(ONE_SLOW[:3])
    assert with_it >= 0.95 * without


def test_groups_in_time_are_left_where_they_are():
    fleet = SimulatedFleet([FAST, FAST, FAST, FAST / 3], max_lag=8)
    fleet.rate(20.0, warm_up_s=5.0)
    assert sum(worker.num_handed_on for worker in fleet.workers) == 0


@pytest.mark.parametrize("num_places", [2, 8])
def test_an_engine_that_was_slow_once_shares_the_work_of_an_equal_one_again(num_places):
    speeds = [lambda t: SLOW if t < 1 else FAST, FAST]
    fleet = SimulatedFleet(speeds, num_places=num_places, groups_per_step=2 * num_places, max_lag=0)
    assert fleet.rate(20.0, warm_up_s=2.0) >= 0.9 * num_places * 2 * FAST
    assert fleet.workers[0].num_written >= 0.4 * sum(worker.num_written for worker in fleet.workers)


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_a_long_group_is_not_handed_on_to_the_engine_that_has_it(max_lag):
    fleet = SimulatedFleet([FAST], max_lag=max_lag, length_of=lengths(0, sigma=1.5))
    fleet.rate(60.0, warm_up_s=10.0)
    assert fleet.workers[0].num_handed_on == 0


def test_a_batch_is_not_made_without_a_group_that_it_waited_for_and_that_was_just_handed_on():
    fleet = SimulatedFleet(ONE_SLOW, max_lag=1, length_of=lengths(1, sigma=0.8))
    fleet.rate(60.0, warm_up_s=1.0)
    assert fleet.workers[3].num_handed_on > 0
    assert "stale_prefix" not in fleet.buffer.ledger.account.tokens_dropped


@pytest.mark.parametrize(
    ("num_engines", "max_lag", "spread"), [(16, 4, 0.5), (8, 1, 0.5), (8, 1, 1.0), (40, 1, 1.0), (512, 1, 0.5)]
)
def test_equal_engines_with_a_group_each_hand_on_next_to_nothing_however_long_they_run(num_engines, max_lag, spread):
    scenario = Scenario(
        num_engines=num_engines,
        groups_in_flight=1,
        groups_per_step=num_engines // 4,
        samples_per_prompt=16,
        max_lag=max_lag,
        num_steps=16 + 2400 // num_engines,
        whole_groups=True,
        lengths=LengthModel(mean_tokens=8000, spread=spread, prompt_spread=0.3, prompt_tokens=500),
        engine=EngineModel(step_s=0.012, step_s_per_sample=0.0002, prefill_s_per_token=5e-6),
        learner=LearnerModel(step_s=40.0, rank_s_per_token=0.0, copy_s=0.5, publish_s=5.0, load_s=1.0),
    )
    simulation, num_handed_on = Simulation(scenario), 0
    push = simulation.buffer._service._replies.push

    def counted(client, name, fields):
        nonlocal num_handed_on
        num_handed_on += len(fields["groups"]) if name == HAND_ON else 0
        push(client, name, fields)

    simulation.buffer._service._replies.push = counted
    simulation.run()
    assert num_handed_on <= 0.1 * scenario.num_steps * scenario.groups_per_step


def test_nobody_is_asked_again_and_again_for_an_idle_worker_that_gets_nothing_of_it(monkeypatch):
    fleet = SimulatedFleet([FAST, SLOW, FAST], num_places=1, groups_per_step=2, max_lag=0)
    late = fleet.buffer._service._admission._late
    monkeypatch.setattr(late, "is_worth", lambda worker, *_: worker != b"engine-2")
    monkeypatch.setattr(late, "is_late", lambda worker, *_: worker == b"engine-2")
    monkeypatch.setattr(late, "take_late", lambda _: {})
    monkeypatch.setattr(late, "next_look", lambda: None)
    fleet.rate(40.0, warm_up_s=5.0)
    assert 0 < sum(worker.num_handed_on for worker in fleet.workers) <= 45 / 0.8


def test_what_is_late_is_asked_for_though_nothing_else_happens():
    fleet = SimulatedFleet(ONE_SLOW, max_lag=1)
    fleet.rate(6.0, warm_up_s=0.1)  # all wait for the eight groups of the slow engine, which takes 8 s for them
    assert fleet.workers[3].num_handed_on >= 8


def test_what_is_still_to_come_of_a_group_is_the_mean_of_the_longer_ones():
    seen = GroupLengths()
    for length in (10, 40, 20):
        seen.add(length)
    assert (seen.mean, seen.longest) == (pytest.approx(70 / 3), pytest.approx(40 * (1 + 4 / 3)))
    assert [seen.left(written) for written in (0, 10, 25, 40, 1000)] == pytest.approx([70 / 3, 20, 15, 4, 4])


class Watched:
    """Two workers on a ledger with steps of 4 groups and a lag of 1, which both have done a group of 100 tokens."""

    def __init__(self, *, slow_took_s: float, fast_took_s: float = 1.0) -> None:
        self.ledger = Ledger(StalenessRule(max_lag=1, groups_per_step=4))
        self.ledger.apply(Enqueue(group_ids=tuple(range(20))))
        self.late = LateGroups(self.ledger, is_waiting=lambda _: False)
        self.lease(b"fast", 0.0)
        self.lease(b"slow", 0.0)
        self.put(0, fast_took_s)
        self.put(1, slow_took_s)

    def lease(self, owner: bytes, now: float) -> None:
        num_held = self.ledger.num_leases_of(owner)
        command = LeaseGroups(engine_version=self.ledger.learner_version, max_groups=1, owner=owner)
        [lease] = self.ledger.apply(command, now).leases
        self.late.granted(lease, num_held, now)

    def put(self, group_id: int, now: float) -> None:
        summary = GroupSummary(
            group_id=group_id,
            attempt=0,
            num_prompt_tokens=1,
            response_lengths=(100,),
            num_tokens=100,
            oldest_version=0,
            newest_version=0,
            rewards=(0.0,),
        )
        self.ledger.apply(Put(summary=summary), now)
        self.late.ended(group_id, 0, 100, now)


def test_a_group_is_handed_on_at_the_last_moment_from_which_a_faster_engine_is_in_time():
    watched = Watched(slow_took_s=20.0)  # 100 and 5 tokens per second; 6 groups are missing until version 1 is planned
    for _ in range(2):
        watched.lease(b"fast", 20.0)
    watched.lease(b"slow", 20.01)
    # At 2.05 groups per second the batch is ready after 2.9 s; the fast engine needs 1.25 s, and a place within 1 s.
    asked_at, now = None, 20.0
    while asked_at is None:
        now = watched.late.next_look()
        if b"slow" in watched.late.take_late(now):
            asked_at = now
    assert 20.5 < asked_at < 21.0


def test_a_group_that_ends_as_soon_as_it_begins_does_not_say_how_fast_its_engine_is():
    watched = Watched(slow_took_s=20.0)
    slow = watched.late._workers[b"slow"]
    slow.is_tried = True
    watched.lease(b"slow", 30.0)
    watched.put(2, 30.0)
    assert (slow.is_tried, slow.took_s) == (True, pytest.approx(16.0)), "it is as slow as before, and still to be tried"


def test_an_engine_may_be_tried_in_vain_for_as_long_as_a_run_lasts():
    watched = Watched(slow_took_s=20.0)
    slow = watched.late._workers[b"slow"]
    slow.patience, slow.is_tried = 1e308, True
    watched.lease(b"slow", 30.0)
    watched.lease(b"fast", 49.5)
    watched.put(2, 50.0)
    assert (slow.patience, slow.is_tried) == (math.inf, False)
    watched.late.is_worth(b"slow", 0, 51.0)


def measured(watched: Watched, worker: bytes) -> float:
    known = watched.late._workers[worker]
    return known.num_tokens / known.took_s


def continued(watched: Watched, owner: bytes, now: float, *, num_inherited: int) -> None:
    """Lease a group to a worker, of which others have written so many tokens."""
    num_held = watched.ledger.num_leases_of(owner)
    command = LeaseGroups(engine_version=watched.ledger.learner_version, max_groups=1, owner=owner)
    [lease] = watched.ledger.apply(command, now).leases
    watched.late.granted(
        replace(lease, progress=Progress(num_tokens=num_inherited, oldest_version=0, newest_version=0)), num_held, now
    )


def test_a_fast_engine_that_hands_groups_on_is_no_slower_for_it():
    watched = Watched(slow_took_s=20.0)
    for number in range(4):
        watched.lease(b"fast", 30.0 + number)
        watched.late.ended(2 + number, 0, 50, 30.5 + number, num_saved=50)
    assert measured(watched, b"fast") == pytest.approx(100.0)


def test_who_writes_only_beginnings_is_not_the_fastest_for_it():
    watched = Watched(slow_took_s=20.0)
    watched.lease(b"fast", 30.0)
    for number in range(5):
        watched.lease(b"slow", 30.0 + number)
        watched.late.ended(3 + number, 0, 90, 30.1 + number, num_saved=90)
    assert measured(watched, b"slow") <= 100.0


def test_who_continues_a_group_is_slower_only_if_it_takes_longer_than_for_a_whole_one():
    watched = Watched(slow_took_s=20.0)
    continued(watched, b"fast", 30.0, num_inherited=90)
    watched.put(2, 30.8)  # the end of a group may be its slow part
    assert measured(watched, b"fast") == pytest.approx(100.0)
    for number in range(5):
        continued(watched, b"fast", 40.0 + 10 * number, num_inherited=50)
        watched.put(3 + number, 45.0 + 10 * number)
    assert measured(watched, b"fast") < 50.0, "who takes 5 s for half of a group writes 20 tokens per second at most"


def test_a_new_engine_that_only_continues_groups_is_measured_by_them():
    watched = Watched(slow_took_s=20.0)
    watched.lease(b"fast", 34.5)
    continued(watched, b"new", 30.0, num_inherited=50)
    watched.put(3, 35.0)
    assert measured(watched, b"new") == pytest.approx(20.0)


@pytest.mark.parametrize(("num_saved", "part"), [(60, 0.3), (30, 0.0), (0, 0.0)])
def test_of_a_group_that_is_given_back_only_what_is_kept_counts_as_a_part(num_saved, part):
    watched = Watched(slow_took_s=20.0)
    continued(watched, b"fast", 30.0, num_inherited=30)
    assert watched.late.ended(2, 0, 70, 30.4, num_saved=num_saved) == pytest.approx(part)


@pytest.mark.parametrize("num_workers", [19, 20])
def test_one_of_two_fast_engines_that_hangs_is_compared_with_the_other(num_workers):
    ledger = Ledger(StalenessRule(max_lag=0, groups_per_step=num_workers))
    ledger.apply(Enqueue(group_ids=tuple(range(num_workers))))
    late = LateGroups(ledger, is_waiting=lambda _: True)
    names = [b"%d" % number for number in range(num_workers)]
    for name in names:
        [lease] = ledger.apply(LeaseGroups(engine_version=0, max_groups=1, owner=name), 0.0).leases
        late.granted(lease, 0, 0.0)
    for number in range(num_workers):
        late.ended(number, 0, 100, 1.0 if number < 2 else 10.0)
    ledger.apply(Release(group_id=1, attempt=0, num_tokens=0, reason="aborted"))
    assert late._estimate(4.0).fastest_beside(names[0]) > 2 * late._rate(names[0], 4.0)


def test_groups_without_a_token_do_not_end_the_look_at_others():
    watched = Watched(slow_took_s=20.0)
    watched.late._lengths = GroupLengths()
    watched.lease(b"fast", 30.0)
    watched.lease(b"slow", 30.0)
    watched.late.ended(2, 0, 0, 31.0)
    watched.late.take_late(40.0)


def test_a_group_is_looked_at_again_soon_though_nobody_is_known_who_could_finish_it():
    watched = Watched(slow_took_s=20.0)
    watched.late.forget(b"fast")
    watched.late.forget(b"slow")
    watched.lease(b"slow", 20.0)
    assert watched.late.next_look() <= 30.0


@pytest.mark.parametrize("took_s", [1.0, 4000.0])
def test_how_often_a_group_is_looked_at_does_not_grow_with_the_seconds_that_it_takes(took_s):
    watched = Watched(fast_took_s=took_s, slow_took_s=1.5 * took_s)
    watched.lease(b"fast", 2 * took_s)
    num_looks = 0
    while (now := watched.late.next_look()) < 3 * took_s:
        assert not watched.late.take_late(now)
        num_looks += 1
    assert num_looks <= 5


@pytest.mark.parametrize(("slow_took_s", "handed_on"), [(20.0, {b"slow"}), (1.5, set())])
def test_nothing_is_handed_on_where_nobody_is_much_faster(slow_took_s, handed_on):
    watched = Watched(slow_took_s=slow_took_s)
    watched.lease(b"fast", 20.0)
    watched.lease(b"slow", 20.0)
    asked = set()
    while (now := watched.late.next_look()) < 23.0:
        asked |= watched.late.take_late(now).keys() - {b"fast"}
        if now > 20.9 and watched.ledger.holds(2, 0):
            watched.put(2, now)
            watched.lease(b"fast", now)
    assert asked == handed_on


def test_leases_that_end_before_any_group_was_finished_are_forgotten():
    ledger = Ledger(StalenessRule(max_lag=4, groups_per_step=1000), lease_s=1.0)
    ledger.apply(Enqueue(group_ids=tuple(range(10))))
    late = LateGroups(ledger, is_waiting=lambda worker: False)
    for now in range(0, 1000, 2):
        for lease in ledger.apply(LeaseGroups(engine_version=0, max_groups=10, owner=b"a"), now).leases:
            late.granted(lease, 0, now)
        ledger.apply(Expire(), now + 1.5)
    assert len(late._unmeasured) <= 2 * 10 + 64
    assert len(late._running) <= 2 * 10 + 64
