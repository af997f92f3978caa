"""Slow workers hand over running groups to fast workers. Most tests simulate a whole fleet in simulated time."""

import math
import random
import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.core.types import GroupSummary
from asyncrl.planner.scenario import EngineModel, LearnerModel, LengthModel, Scenario
from asyncrl.planner.simulator import Simulation
from buffer import BufferConfig, commands, operations
from buffer.encoding import Message
from buffer.groups import Group
from buffer.pace import MOST_CHANGES, WorkerPaces
from buffer.records import Operation
from buffer.service import BufferService
from buffer.sockets import LoopClock
from buffer.waiting import Replies
from tests.support.simulated_fleet import SimulatedFleet

FAST, SLOW = 100.0, 10.0
"""Tokens per second of one group. A group has 80 tokens."""
ONE_SLOW = [FAST, FAST, FAST, SLOW]


def share(speeds, *, seconds=40.0, num_places=8, **options) -> float:
    """Return the tokens trained per second, divided by the tokens per second of engines that are fully occupied."""
    fleet = SimulatedFleet(speeds, num_places=num_places, **options)
    at_end = [speed(1e9) if callable(speed) else speed for speed in speeds]
    return fleet.rate(seconds, warm_up_s=10.0) / (num_places * sum(at_end))


def turning(before: float, after: float):
    return lambda now: before if now < 15 else after


@pytest.mark.long
@pytest.mark.parametrize(
    ("speeds", "options"),
    [
        ([FAST] * 4, {}),
        (ONE_SLOW, {}),
        (ONE_SLOW, {"max_lag": 1}),
        (ONE_SLOW, {"max_lag": 4}),
        (ONE_SLOW, {"num_places": 1, "seconds": 300.0}),
        ([FAST, SLOW], {}),
        ([FAST, SLOW, SLOW, SLOW], {"seconds": 80.0}),
        ([FAST, FAST, FAST, FAST / 3], {"seconds": 20.0}),
        ([FAST, FAST, FAST, FAST / 100], {}),
        ([turning(FAST, SLOW), turning(SLOW, FAST), FAST, FAST], {}),
    ],
)
def test_a_fleet_with_slow_engines_trains_at_nine_tenths_of_its_full_rate(speeds, options):
    assert share(speeds, **options) >= 0.9


@pytest.mark.parametrize(
    "options", [{"max_lag": 0}, {"max_lag": 0, "groups_per_step": 64}, {"step_s": 1.0}, {"num_places": 16}]
)
def test_a_slow_engine_costs_at_most_5_percent_of_the_rate_if_batches_limit_the_fleet(options):
    with_it = share(ONE_SLOW, seconds=80.0, **options) * sum(ONE_SLOW)
    without = share(ONE_SLOW[:3], seconds=80.0, **options) * sum(ONE_SLOW[:3])
    assert with_it >= 0.95 * without


@pytest.mark.parametrize("groups_per_step", [28, 48])
def test_a_slow_engine_costs_at_most_10_percent_at_max_lag_0_if_lengths_vary(groups_per_step):
    """A step has more groups than the fast engines have slots. So the slow engine begins some of the groups."""

    def rate(speeds, seed: int) -> float:
        rng = random.Random(seed)
        lengths = [max(4, int(80 * rng.lognormvariate(0.0, 0.8))) for _ in range(20_000)]
        options = {"groups_per_step": groups_per_step, "max_lag": 0, "length_of": lengths.__getitem__}
        return SimulatedFleet(speeds, **options).rate(60.0, warm_up_s=20.0)

    with_it, without = (sum(rate(speeds, seed) for seed in range(3)) for speeds in (ONE_SLOW, ONE_SLOW[:3]))
    assert with_it >= 0.9 * without


def test_without_hand_over_every_group_stays_on_its_first_engine():
    fleet = SimulatedFleet(ONE_SLOW, hand_over=False)
    assert fleet.rate(40.0, warm_up_s=10.0) < 0.7 * 8 * sum(ONE_SLOW), "the fleet must wait for its slow engine"
    assert sum(worker.num_handed_on for worker in fleet.workers) == 0


def test_groups_that_are_not_due_stay_on_a_slow_engine():
    fleet = SimulatedFleet([FAST, FAST, FAST, FAST / 3], max_lag=8)
    fleet.rate(20.0, warm_up_s=5.0)
    assert sum(worker.num_handed_on for worker in fleet.workers) == 0


@pytest.mark.parametrize("num_places", [2, 8])
def test_an_engine_that_becomes_fast_gets_its_share_of_the_work(num_places):
    speeds = [lambda t: SLOW if t < 1 else FAST, FAST]
    fleet = SimulatedFleet(speeds, num_places=num_places, groups_per_step=2 * num_places, max_lag=0)
    assert fleet.rate(20.0, warm_up_s=2.0) >= 0.9 * num_places * 2 * FAST
    assert fleet.workers[0].num_written >= 0.4 * sum(worker.num_written for worker in fleet.workers)


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_an_engine_never_hands_groups_over_to_itself(max_lag):
    rng = random.Random(0)
    lengths = [max(4, int(rng.lognormvariate(4.0, 1.5))) for _ in range(10_000)]
    fleet = SimulatedFleet([FAST], max_lag=max_lag, length_of=lengths.__getitem__)
    fleet.rate(60.0, warm_up_s=10.0)
    assert fleet.workers[0].num_handed_on == 0


def count_hand_overs(monkeypatch) -> Counter:
    """Return a counter. For each group, it counts how often the buffer asks a worker to hand over the group."""
    asked: Counter = Counter()
    push = Replies.push

    def counted(replies, client, message):
        asked.update(group_id for group_id, _ in getattr(message, "groups", ()))
        push(replies, client, message)

    monkeypatch.setattr(Replies, "push", counted)
    return asked


@pytest.mark.parametrize(
    ("num_engines", "max_lag", "spread"), [(16, 4, 0.5), (8, 1, 0.5), (8, 1, 1.0), (40, 1, 1.0), (512, 1, 0.5)]
)
def test_equal_engines_hand_over_at_most_one_group_in_twenty(monkeypatch, num_engines, max_lag, spread):
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
    asked = count_hand_overs(monkeypatch)
    Simulation(scenario).run()
    assert asked.total() <= 0.05 * scenario.num_steps * scenario.groups_per_step


@pytest.mark.long
@pytest.mark.parametrize("share_of_slow_groups", [pytest.param(0.1, marks=pytest.mark.slow), 0.5])
def test_hand_over_costs_at_most_2_percent_if_only_the_groups_are_slow(share_of_slow_groups):
    """All engines have the same speed. Some groups call tools and need ten times as long per token as other groups."""
    ratios = []
    for seed in range(3):
        rng = random.Random(seed)
        paces = [10.0 if rng.random() < share_of_slow_groups else 1.0 for _ in range(20_000)]
        options = {"num_places": 2, "groups_per_step": 8, "max_lag": 2, "pace_of": paces.__getitem__}
        on, off = (SimulatedFleet([FAST] * 8, hand_over=value, **options) for value in (True, False))
        ratios.append(on.rate(1000.0, warm_up_s=30.0) / off.rate(1000.0, warm_up_s=30.0))
    assert sum(ratios) / len(ratios) >= 0.98


def test_no_group_is_handed_over_more_than_twice_if_engine_speeds_change(monkeypatch):
    rng = random.Random(1)
    drawn = [[rng.choice([FAST, SLOW, SLOW / 10]) for _ in range(40)] for _ in range(6)]
    fleet = SimulatedFleet([lambda now, speeds=speeds: speeds[int(now / 3) % 40] for speeds in drawn], max_lag=1)
    asked = count_hand_overs(monkeypatch)
    fleet.rate(60.0, warm_up_s=1.0)
    assert 0 < max(asked.values()) <= MOST_CHANGES


def test_hand_overs_are_requested_from_a_hanging_engine_even_if_no_message_arrives(monkeypatch):
    fleet = SimulatedFleet([FAST, lambda now: FAST if now < 5 else 1e-3], groups_per_step=8, max_lag=1)
    asked = count_hand_overs(monkeypatch)
    fleet.rate(20.0, warm_up_s=0.1)
    assert asked


# Tests of the measured paces


def lease(
    group_id: int, owner: bytes, *, attempt: int = 0, num_inherited: int = 0, deadline: int = 1
) -> commands.GrantedLease:
    progress = (
        commands.Progress(num_tokens=num_inherited, oldest_version=0, newest_version=0) if num_inherited else None
    )
    return commands.GrantedLease(
        group_id=group_id, attempt=attempt, engine_version=0, deadline=deadline, owner=owner, progress=progress
    )


def measured(**paces: float) -> WorkerPaces:
    """Return the measured paces of workers after eight groups of 100 tokens each. ``paces`` are seconds per token.

    Each worker's last group ended at 1000 s.
    """
    of = WorkerPaces()
    group_id = -1
    for name, pace in paces.items():
        for number in range(8):
            ends_at = 1000.0 - 100 * pace * (7 - number)
            of.granted(lease(group_id, name.encode()), ends_at - 100 * pace)
            of.ended(group_id, 0, ends_at, num_tokens=100)
            group_id -= 1
    return of


def test_the_slowest_worker_first_hands_over_its_group_with_the_earliest_deadline():
    of = measured(fast=0.01, slow=0.1, slower=0.2)
    for group_id, (name, deadline) in enumerate([(b"slow", 2), (b"slow", 1), (b"slower", 1), (b"fast", 0)]):
        of.granted(lease(group_id, name, deadline=deadline), 1000.0)
    offered = []
    while (group := of.first_on_offer()) is not None:
        offered.append((group.worker, group.deadline))
        of.take_over(group, b"fast", 1000.0)
    assert offered == [(b"slower", 1), (b"slow", 1), (b"slow", 2)]
    assert of.num_kept(b"fast", 1000.5) == 3
    assert of.num_kept(b"fast", 1001.5) == 0, "a slot must be reserved for a second only"


def test_a_worker_that_only_continues_groups_is_measured_by_its_own_tokens():
    of = measured(fast=0.01)
    for group_id in range(8):
        of.granted(lease(group_id, b"fast"), 1000.0)
        of.saved(group_id, 0, 90)
        of.ended(group_id, 0, 1000.9)
        of.granted(lease(group_id, b"late", attempt=1, num_inherited=180), 1001.0)
        of.ended(group_id, 1, 1002.0, num_tokens=100)
    assert of.usual_pace(b"late", 1002.0) == pytest.approx(0.1)
    assert of.is_slow(b"late", of.usual_pace(b"fast", 1002.0))


def test_a_group_that_began_before_a_server_restart_does_not_count_as_fast():
    of = measured(fast=0.01)
    for group_id in range(8):
        of.recover(Group(group_id=group_id, owner=b"other", num_attempts=1), 1000.0)
        of.ended(group_id, 0, 1000.1, num_tokens=1000)
    assert of.usual_pace(b"other", 1000.1) == pytest.approx(0.01)
    assert not of.is_slow(b"fast", of.usual_pace(b"other", 1000.1))


def test_after_one_fast_group_an_engine_does_not_count_as_slow():
    of = measured(fast=0.01, tools=0.1)
    of.granted(lease(0, b"tools"), 1000.0)
    of.ended(0, 0, 1001.0, num_tokens=100)
    assert not of.is_slow(b"tools", of.usual_pace(b"fast", 1001.0))


def test_a_new_worker_counts_as_fast_until_its_first_group_takes_too_long():
    of = measured(fast=0.01)
    of.granted(lease(0, b"new"), 1000.0)
    assert of.usual_pace(b"new", 1000.0) == of.usual_pace(b"fast", 1000.0)
    of.look(1000.0)
    assert of.next_look(1000.0) == pytest.approx(1002.0)
    of.look(1001.9)
    assert of.first_on_offer() is None
    of.look(1002.1)
    assert of.first_on_offer().worker == b"new"


def test_an_idle_slow_worker_counts_as_fast_again_after_some_time():
    of = measured(fast=0.01, slow=0.1)
    assert of.is_slow(b"slow", of.usual_pace(b"fast", 1000.0))
    assert of.usual_pace(b"slow", 1200.0) == pytest.approx(0.1)
    assert of.usual_pace(b"slow", 1400.0) == pytest.approx(0.01)


def test_if_a_worker_dies_after_a_hand_over_other_workers_can_take_the_group():
    of = measured(fast=0.01, slow=0.1)
    of.granted(lease(0, b"slow"), 1000.0)
    of.take_over(of.first_on_offer(), b"fast", 1000.0)
    of.forget(b"fast")
    assert of.num_kept(b"fast", 1000.0) == 0
    of.ended(0, 0, 1000.1)
    of.granted(lease(0, b"other", attempt=1), 1000.2)
    of.forget(b"other")
    of.granted(lease(0, b"slow", attempt=2), 1000.3)
    assert of.first_on_offer() is None, "no faster worker is left"


def test_slow_workers_get_no_lease_for_a_second_while_a_group_moves_to_a_faster_worker():
    of = measured(fast=0.01, medium=0.04, slow=0.1)
    assert of.pace_of_takers(1000.0) == math.inf
    for group_id in (0, 1):
        of.granted(lease(group_id, b"slow"), 1000.0)
        of.take_over(of.first_on_offer(), b"fast", 1000.0)
    assert of.pace_of_takers(1000.0) == math.inf, "the slow worker still has both groups"
    of.ended(0, 0, 1000.1)
    assert [of.is_slow(name, of.pace_of_takers(1000.1)) for name in (b"fast", b"medium", b"slow")] == [
        False,
        True,
        True,
    ]
    of.granted(lease(0, b"fast", attempt=1), 1000.2)
    assert of.pace_of_takers(1000.2) == math.inf, "the faster worker has leased the group"
    of.ended(1, 0, 1000.3)
    of.look(1000.3)
    assert of.next_look(1000.3) == pytest.approx(1001.0)
    assert of.pace_of_takers(1001.0) == math.inf, "the faster worker has not leased the group in time"


def test_a_worker_that_became_slow_counts_as_slow_while_it_hands_over_its_groups():
    of = measured(fast=0.01, drops=0.01)
    for group_id in range(4):
        of.granted(lease(group_id, b"drops"), 1000.0)
    of.look(1003.0)
    for group_id in range(4):
        of.take_over(of.first_on_offer(), b"fast", 1003.0)
        of.ended(group_id, 0, 1003.1)
        assert of.is_slow(b"drops", of.pace_of_takers(1003.1))


def test_the_time_of_a_call_does_not_grow_with_the_number_of_workers_and_groups():
    def seconds(num_workers: int) -> float:
        of = WorkerPaces()
        for round_number in range(3):
            for number in range(num_workers):
                of.granted(lease(number, b"%d" % number, attempt=round_number), 10.0 * round_number)
            for number in range(num_workers):
                of.ended(number, round_number, 10.0 * round_number + 1 + (number % 2) * 8, num_tokens=100)
        for number in range(8 * num_workers):
            of.granted(lease(number, b"%d" % (number % num_workers), attempt=3), 40.0)
        for number in range(2 * num_workers):  # half of these groups are queued, and half are still on the slow workers
            group = of.first_on_offer()
            of.take_over(group, b"%d" % (2 * number % num_workers), 40.0)
            if number % 2:
                of.ended(group.group_id, 3, 40.0)
        began_s = time.process_time()
        for _ in range(200):
            group = of.first_on_offer()
            of.take_over(group, b"0", 40.0)
            of.ended(group.group_id, 3, 40.0)
            of.next_look(40.0)
            of.pace_of_takers(40.0)
        return time.process_time() - began_s

    assert seconds(4000) < 5 * seconds(100) + 0.02


# Tests of workers that may begin a group


class Workers:
    """A buffer service with scripted workers. The test tells each worker what to do, and controls the time."""

    def __init__(self, max_lag: int) -> None:
        self.now = 0.0
        clock = LoopClock(lambda: self.now)
        self.service = BufferService(BufferConfig(max_lag=max_lag), groups_per_step=2, send=self._send, clock=clock)
        self.ledger = self.service.ledger
        self.held: dict[tuple[int, int], tuple[bytes, int]] = {}
        self.asking: dict[bytes, int] = {}
        self.to_hand_over: list[tuple[int, int]] = []
        self.last_id = self.num_prompts = 0

    def _send(self, client: bytes, message: Message) -> None:
        if isinstance(message.body, operations.HandOn):
            self.to_hand_over += message.body.groups
        elif isinstance(message.body, commands.Leased) and self.asking.pop(client, None) is not None:
            self.held |= {lease.key: (client, lease.engine_version) for lease in message.body.leases}

    def ask(self, client: bytes, operation: Operation) -> None:
        self.last_id += 1
        self.now += 0.01
        self.service.handle(Message(client=client, request_id=self.last_id, body=operation))
        self.service.settle()
        self.check()

    def check(self) -> None:
        """Check how long a worker that may begin a group waits for a lease: at most 1 s per possible hand-over."""
        for _ in range(10 * MOST_CHANGES * (1 + self.ledger.groups.num_leased)):
            if not self._may_begin():
                return
            self.now += 0.1  # the clock would ignore a larger step, as after a stall of the event loop
            self.service.settle()
        assert not self._may_begin()

    def _may_begin(self) -> list[bytes]:
        if not self.ledger.groups.num_queued or not self.ledger.room.has_room():
            return []
        return [client for client, version in self.asking.items() if self.ledger.admits(version)]


@settings(max_examples=60, deadline=None)
@given(max_lag=st.integers(0, 3), data=st.data())
async def test_workers_that_may_begin_a_group_do_not_wait_for_a_lease(max_lag: int, data: st.DataObject) -> None:
    """The actions of the workers are random. A worker that may begin a group must get a lease."""
    of = Workers(max_lag)
    for _ in range(data.draw(st.integers(5, 60))):
        action = data.draw(st.sampled_from(["enqueue", "lease", "lease", "put", "put", "step", "hand", "die"]))
        worker = b"worker-%d" % data.draw(st.integers(0, 3))
        if action == "enqueue":
            number = data.draw(st.integers(1, 6))
            groups = tuple(range(of.num_prompts, of.num_prompts + number))
            of.num_prompts += number
            of.ask(b"controller", commands.Enqueue(groups, (0,) * number))
        elif action == "lease" and worker not in of.asking:
            version = data.draw(st.integers(max(0, of.ledger.learner_version - 2), of.ledger.learner_version))
            of.asking[worker] = version
            of.ask(worker, commands.LeaseGroups(engine_version=version, max_groups=data.draw(st.integers(1, 3))))
        elif action == "put" and of.held:
            key = data.draw(st.sampled_from(sorted(of.held)))
            owner, version = of.held.pop(key)
            pace_s = 0.02 if owner == b"worker-0" else 0.001
            of.now += 3 * pace_s  # the worker needs this time for three tokens
            of.ask(owner, put_of(key, version))
        elif action == "step":
            version = of.ledger.learner_version
            of.ask(b"controller", commands.PlanBatch(version))
            if version in of.ledger.groups.plans:
                of.ask(b"controller", commands.Commit(version))
        elif action == "hand" and of.to_hand_over:
            key = of.to_hand_over.pop()
            if key in of.held:
                owner, _ = of.held.pop(key)
                of.ask(owner, commands.Release(group_id=key[0], attempt=key[1], num_tokens=0, reason="handed_on"))
        elif action == "die":
            of.asking.pop(worker, None)
            of.held = {key: value for key, value in of.held.items() if value[0] != worker}
            of.ask(worker, operations.Leave(()))
    of.service.close()


def put_of(key: tuple[int, int], version: int) -> commands.Put:
    return commands.Put(
        summary=GroupSummary(
            group_id=key[0],
            attempt=key[1],
            num_prompt_tokens=1,
            response_lengths=(3,),
            num_tokens=3,
            oldest_version=version,
            newest_version=version,
            rewards=(1.0,),
        )
    )
