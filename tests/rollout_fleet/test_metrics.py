"""The counters of a rollout worker, and the events about its engine that the worker records for the profile."""

import pytest

from asyncrl.core.lives import Faults
from rollout_fleet.engines.engine import SilenceWatch
from rollout_fleet.member import Member
from rollout_fleet.metrics import FleetMeter, note_member
from tests.support.rollout import running_loop, writes

pytestmark = pytest.mark.usefixtures("virtual_time")


async def probe():
    raise AssertionError


async def test_a_re_prefill_is_recorded_from_the_end_of_a_pause_to_the_next_token(recorded):
    watch = SilenceWatch("engine", timeout_s=10, probe=probe)
    with watch.running(2):
        with watch.paused(recomputes=True) as stands_still:
            stands_still()
        watch.token()
    trace = recorded()
    (pause,), (again,) = trace.spans_of("pause"), trace.spans_of("re_prefill")
    assert pause.lane == again.lane == "engine-0"
    assert again.start >= pause.end
    assert not again.is_open


async def test_no_pause_is_recorded_before_the_engine_stands_still(recorded):
    watch = SilenceWatch("engine", timeout_s=10, probe=probe)
    with watch.running(1), watch.paused():
        pass
    assert recorded().spans_of("pause") == ()


async def test_no_re_prefill_is_recorded_if_no_sample_runs_or_the_cache_stays(recorded):
    watch = SilenceWatch("engine", timeout_s=10, probe=probe)
    with watch.paused(recomputes=True) as stands_still:
        stands_still()
    with watch.running(1), watch.paused() as stands_still:
        stands_still()
    assert recorded().spans_of("re_prefill") == ()


async def test_the_trace_records_how_many_slots_of_an_engine_are_in_use(recorded, make_buffer):
    buffer = make_buffer(12)
    async with running_loop(buffer, writes(3), groups_in_flight=4, samples_per_prompt=3):
        await buffer.stored(12)
    trace = recorded()
    levels = {name: trace.levels_of(name, "engine-0") for name in ("capacity", "running", "tail", "settling")}
    assert [level.value for level in levels["capacity"]] == [12]
    assert max(level.value for level in levels["running"]) == 12
    assert max(level.value for level in levels["settling"]) > 0
    for time in {level.time for level in trace.levels}:
        assert sum(trace.level_at(name, "engine-0", time) for name in ("running", "tail")) <= 12
    for settling in levels["settling"]:  # the worker records "running" and "tail" before "settling"
        assert sum(trace.level_at(name, "engine-0", settling.time) for name in ("running", "tail", "settling")) <= 12
    assert [level.value for name in ("running", "tail", "settling") for level in levels[name][-1:]] == [0, 0, 0]
    for group in range(12):
        assert [stamp.event for stamp in trace.groups[group].stamps] == ["first_token", "last_token", "reward"]
    assert len(trace.spans_of("reward", "engine-0/reward")) == 12


async def test_the_trace_records_every_state_and_epoch_of_a_member(recorded):
    member = Member("engine-0", Faults(1))
    note_member(member, "engine-0/worker")
    member.started(0)
    member.verified(0)
    member.fault(0, 2.0)
    member.stopped()
    trace = recorded()
    spans = trace.spans_of("member", "engine-0/worker")
    states = ["starting", "catching_up", "ready", "fenced", "backoff"]
    assert [span.cause for span in spans] == states
    assert [span.is_open for span in spans] == [False] * 4 + [True]
    assert [level.value for level in trace.levels_of("epoch", "engine-0/worker")] == [0, 1]


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_a_second_is_waiting_only_if_no_sample_runs():
    clock = Clock()
    meter = FleetMeter(clock)
    meter.asking(True)
    clock.now += 2.0
    meter.running(2)
    clock.now += 3.0
    meter.running(1)
    clock.now += 1.0
    meter.running(0)
    clock.now += 0.5
    meter.asking(False)
    clock.now += 10.0
    counters = meter.counters()
    assert (counters.busy_s, counters.wait_s) == (4.0, 2.5)


def test_the_time_of_a_weight_load_does_not_count_as_busy():
    clock = Clock()
    meter = FleetMeter(clock)
    meter.running(1)
    clock.now += 3.0
    meter.loaded(0.5)
    clock.now += 1.0
    counters = meter.counters()
    assert (counters.busy_s, counters.load_s) == (3.5, (0.5,))


def test_a_weight_load_of_an_idle_engine_does_not_reduce_the_busy_time():
    clock = Clock()
    meter = FleetMeter(clock)
    meter.running(1)
    clock.now += 3.0
    meter.running(0)
    meter.loaded(0.5)
    assert meter.counters().busy_s == 3.0
