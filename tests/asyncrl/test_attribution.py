"""Each idle second of a run has exactly one cause."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.core.record import LevelName, SpanKind
from asyncrl.profile import Attribution
from asyncrl.profile.attribution import BUSY, FleetCause, LearnerCause, Series, swept
from asyncrl.profile.trace import Span
from tests.support.traces import record_run, trace_of

OPEN = [("queued", 0, 5), ("budget", 0, 1)]


def states(attribution, pool, lane=None):
    """Return the periods of a pool, sorted by time. A period is a tuple: start, end, state, number of sample slots."""
    found = [(s.start, s.end, s.state, s.places) for s in attribution.stretches[pool] if lane in (None, s.lane)]
    return sorted(found)


def fleet_of(notes, buffer=OPEN, end=100):
    return Attribution.of(trace_of(fleet=[("engine-0", *note) for note in notes], buffer=buffer), (0, end))


def test_slots_of_running_samples_are_busy_and_other_used_slots_are_group_tail_or_reward():
    notes = [("capacity", 0, 4), ("running", 0, 4), ("running", 40, 1), ("tail", 40, 3)]
    notes += [("running", 70, 0), ("tail", 70, 0), ("settling", 70, 4)]
    assert states(fleet_of(notes), "fleet") == [
        (0, 40, "busy", 4),
        (40, 70, "busy", 1),
        (40, 70, "group_tail", 3),
        (70, 100, "reward", 4),
    ]


@pytest.mark.parametrize(
    ("buffer", "cause"),
    [
        ([("queued", 0, 0), ("budget", 0, 1)], "no_prompts"),
        ([*OPEN, ("full", 0, 1)], "buffer_full"),
        ([("queued", 0, 5), ("budget", 0, 0)], "staleness_gate"),
        ([*OPEN, ("version", 0, 3)], "publish_wait"),
        (OPEN, "lease"),
    ],
)
def test_a_free_slot_is_idle_for_the_cause_that_blocks_the_next_group(buffer, cause):
    assert states(fleet_of([("capacity", 0, 2)], buffer), "fleet") == [(0, 100, cause, 2)]


def test_engine_causes_apply_to_all_slots_and_down_has_priority_over_pause():
    notes = [("capacity", 0, 3), ("running", 0, 2), ("pause", 10, 40), ("down", 30, 60)]
    assert states(fleet_of(notes), "fleet") == [
        (0, 10, "busy", 2),
        (0, 10, "lease", 1),
        (10, 30, "publish_pause", 3),
        (30, 60, "engine_down", 3),
        (60, 100, "busy", 2),
        (60, 100, "lease", 1),
    ]


@pytest.mark.parametrize(
    ("ended", "rest"), [("failed", [(30, 100, "engine_down", 2)]), ("left", [(30, 40, "engine_down", 2)])]
)
def test_samples_of_a_dead_worker_end_when_the_controller_records_its_end(ended, rest):
    trace = trace_of(fleet=[("engine-0", "capacity", 0, 2), ("engine-0", "running", 0, 2)], buffer=OPEN)
    periods = [("ready", 0, 30), ("fenced", 30, 40), (ended, 40, 100)]
    members = [Span("engine-0/worker", "member", *times, cause=state) for state, *times in periods]
    attribution = Attribution.of(replace(trace, spans=tuple(members)), (0, 100))
    assert states(attribution, "fleet") == [(0, 30, "busy", 2), *rest]


def test_re_prefill_makes_running_samples_idle_and_evaluation_uses_the_other_slots():
    notes = [("capacity", 0, 3), ("running", 0, 1), ("re_prefill", 0, 20), ("evaluation", 50, 100), ("tail", 0, 1)]
    assert states(fleet_of(notes), "fleet") == [
        (0, 20, "re_prefill", 1),
        (0, 50, "group_tail", 1),
        (0, 50, "lease", 1),
        (20, 100, "busy", 1),
        (50, 100, "evaluation", 2),
    ]


def test_free_slots_are_idle_for_tool_or_environment_before_group_tail():
    notes = [("capacity", 0, 8), ("running", 0, 4), ("environment", 0, 4), ("running", 10, 5), ("tool", 10, 2)]
    notes += [("environment", 10, 1), ("running", 40, 1), ("tool", 40, 3), ("tail", 40, 2), ("pause", 60, 70)]
    notes += [("running", 80, 8), ("tool", 80, 6)]
    attribution = fleet_of(notes, buffer=[("queued", 0, 5), ("budget", 0, 0)])
    assert states(attribution, "fleet") == [
        (0, 10, "busy", 4),
        (0, 10, "environment", 4),
        (10, 40, "busy", 5),
        (10, 40, "tool", 2),
        (10, 60, "environment", 1),
        (40, 60, "busy", 1),
        (40, 60, "group_tail", 2),
        (40, 60, "staleness_gate", 1),
        (40, 60, "tool", 3),
        (60, 70, "publish_pause", 8),
        (70, 80, "busy", 1),
        (70, 80, "environment", 1),
        (70, 80, "group_tail", 2),
        (70, 80, "staleness_gate", 1),
        (70, 80, "tool", 3),
        (80, 100, "busy", 8),
    ], "a slot that other work fills must count as busy while an episode waits for a tool"
    idle = {"tool": 150, "environment": 100, "publish_pause": 80, "group_tail": 60, "staleness_gate": 30}
    assert attribution.total("fleet").idle == idle
    assert attribution.total("fleet").alone("fleet", 100) == 100 * (380 + 150 + 100 + 60) / 800, (
        "only the fleet's own causes count"
    )


def learner_of(spans, *, controller=(), fleet=(), buffer=OPEN, steps=(0, 100)):
    trace = trace_of(learner=spans, controller=controller, fleet=fleet, buffer=buffer, steps=steps)
    return Attribution.of(trace)


def test_a_rank_is_idle_in_blocking_spans_and_busy_in_the_other_parts_of_its_update():
    spans = [("update", 0, 90), ("fetch", 0, 20), ("wait_ranks", 80, 90), ("publish_copy", 90, 100)]
    attribution = learner_of([("learner-0", *span) for span in spans])
    assert states(attribution, "learner") == [
        (0, 20, "fetch", 1),
        (20, 80, "busy", 1),
        (80, 90, "rank_skew", 1),
        (90, 100, "publish", 1),
    ]


def test_a_rank_that_finishes_first_has_rank_skew():
    attribution = learner_of([("learner-0", "update", 0, 60), ("learner-1", "update", 0, 100)])
    assert states(attribution, "learner", "learner-0") == [(0, 60, "busy", 1), (60, 100, "rank_skew", 1)]


def test_batch_tail_needs_a_closed_gate_and_at_most_half_of_the_peak_samples():
    wait = [("controller/plan", "plan_wait", 0, 100)]
    rank = [("learner-0", "fetch", 200, 201)]
    running = [("engine-0", "capacity", 0, 8), ("engine-0", "running", 0, 8), ("engine-0", "running", 30, 4)]
    closed = learner_of(rank, controller=wait, fleet=running, buffer=[("queued", 0, 9), ("budget", 0, 0)])
    assert states(closed, "learner") == [(0, 30, "slow_generation", 1), (30, 100, "batch_tail", 1)]
    may_begin = learner_of(rank, controller=wait, fleet=running, buffer=OPEN)
    assert states(may_begin, "learner") == [(0, 100, "slow_generation", 1)]


def test_a_learner_without_a_batch_gets_the_fleets_cause_if_no_sample_runs():
    wait = [("controller/plan", "plan_wait", 0, 100)]
    fleet = [("engine-0", "capacity", 0, 2), ("engine-0", "settling", 0, 2), ("engine-0", "settling", 20, 0)]
    fleet += [("engine-0", "pause", 40, 60)]
    attribution = learner_of([("learner-0", "fetch", 200, 201)], controller=wait, fleet=fleet)
    assert states(attribution, "learner") == [
        (0, 20, "reward", 1),
        (20, 40, "lease", 1),
        (40, 60, "publish", 1),
        (60, 100, "lease", 1),
    ]


def test_a_learner_without_a_batch_waits_for_tools_and_environments_only_if_no_sample_runs():
    wait = [("controller/plan", "plan_wait", 0, 100)]
    fleet = [("engine-0", "capacity", 0, 4), ("engine-0", "running", 0, 1), ("engine-0", "tool", 0, 3)]
    fleet += [("engine-0", "running", 30, 0), ("engine-0", "environment", 30, 1), ("engine-0", "tool", 80, 0)]
    attribution = learner_of([("learner-0", "fetch", 200, 201)], controller=wait, fleet=fleet)
    expected = [(0, 30, "slow_generation", 1), (30, 80, "tool", 1), (80, 100, "environment", 1)]
    assert states(attribution, "learner") == expected


def test_a_rank_that_has_not_begun_a_planned_step_is_idle_for_dispatch():
    controller = [("controller/plan", "plan_wait", 0, 100), ("controller/complete", "dispatched", 0, 100)]
    attribution = learner_of([("learner-0", "update", 10, 100)], controller=controller)
    assert states(attribution, "learner") == [(0, 10, "dispatch", 1), (10, 100, "busy", 1)]


def test_the_pool_times_of_the_steps_add_up_to_the_run(tmp_path):
    trace = record_run(tmp_path, num_steps=6, max_lag=2)
    attribution = Attribution.of(trace)
    for pool, places in (("learner", 2), ("fleet", 16)):
        total, steps = attribution.total(pool), attribution.per_step(pool, trace.steps)
        assert [step.capacity for step in steps] == [places * step.duration for step in trace.steps]
        assert sum(step.busy for step in steps) == total.busy
        idle = sum(total.idle.values())
        assert sum(sum(step.idle.values()) for step in steps) == idle == total.capacity - total.busy


def test_a_lag_of_one_removes_the_idle_time_at_the_staleness_gate(tmp_path):
    serial, ahead = (Attribution.of(record_run(tmp_path / str(lag), max_lag=lag)) for lag in (0, 1))
    assert next(iter(serial.total("fleet").idle)) == "staleness_gate"
    assert ahead.total("learner").utilisation > 1.5 * serial.total("learner").utilisation


KINDS = {
    "fleet": ([kind.value for kind in SpanKind], ["engine-0", "engine-1"]),
    "learner": ([kind.value for kind in SpanKind], ["learner-0", "learner-1", "learner-0/publish"]),
    "controller": (["plan_wait", "dispatched", "evaluation", "checkpoint"], ["controller", "controller/plan"]),
}
LEVELS = st.lists(
    st.tuples(
        st.sampled_from(["engine-0", "engine-1"]),
        st.sampled_from([name.value for name in LevelName]),
        st.integers(0, 60),
        st.integers(0, 6),
    ),
    max_size=20,
)


def notes_of(pool):
    kinds, lanes = KINDS[pool]
    times = st.tuples(st.integers(0, 60), st.integers(0, 60)).map(sorted)
    span = st.tuples(st.sampled_from(lanes), st.sampled_from(kinds), times)
    return st.lists(span.map(lambda note: (note[0], note[1], *note[2])), max_size=12)


@settings(max_examples=60, deadline=None)
@given(
    fleet=notes_of("fleet"),
    levels=LEVELS,
    learner=notes_of("learner"),
    controller=notes_of("controller"),
    buffer=st.lists(
        st.tuples(st.sampled_from(["queued", "full", "budget", "version"]), st.integers(0, 60), st.integers(0, 2)),
        max_size=10,
    ),
    steps=st.lists(st.integers(0, 70), min_size=2, max_size=5, unique=True).map(sorted),
)
def test_the_causes_sum_to_the_idle_time_of_any_trace(fleet, levels, learner, controller, buffer, steps):
    trace = trace_of(fleet=[*fleet, *levels], learner=learner, controller=controller, buffer=buffer, steps=steps)
    attribution = Attribution.of(trace)
    start, end = attribution.window
    capacities = [Series((x.time, x.value) for x in trace.levels_of("capacity", e)) for e in trace.lanes("fleet")]
    expected = {
        "learner": len(trace.lanes("learner")) * (end - start),
        "fleet": sum((b - a) * now["n"] for one in capacities for a, b, now in swept((start, end), {"n": one})),
    }
    known = {"learner": {BUSY, *LearnerCause}, "fleet": {BUSY, *FleetCause}}
    for pool, capacity in expected.items():
        total = attribution.total(pool)
        assert total.capacity == capacity == total.busy + sum(total.idle.values())
        assert {stretch.state for stretch in attribution.stretches[pool]} <= known[pool]
        assert sum(part.capacity for part in attribution.per_step(pool, trace.steps)) == capacity
