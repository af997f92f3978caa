"""The simulator of a run, compared with hand-computed steps."""

from dataclasses import replace
from itertools import pairwise

import pytest
import simpy

from asyncrl.planner.scenario import (
    EngineModel,
    HostModel,
    LearnerModel,
    LengthModel,
    Scenario,
    load_spec,
    overrides,
)
from asyncrl.planner.simulated_engine import SharedCore, SimulatedEngine, SimulatedGroup
from asyncrl.planner.simulator import Simulation, simulate
from buffer.config import OnStale
from rollout_fleet.config import OnUpdate

EQUAL = LengthModel(mean_tokens=100, spread=0.0, prompt_spread=0.0)


def scenario(**options):
    """Return a scenario with responses of 100 tokens at 0.03 s per token.

    A batch takes 3 s to generate and 2 s to train. Nothing else takes time.
    """
    numbers = {
        "groups_in_flight": 4,
        "groups_per_step": 4,
        "samples_per_prompt": 2,
        "ask_s": 0.0,
        "hands_on": False,
        "num_steps": 30,
        "warm_up_steps": 10,
        "engine": EngineModel(step_s=0.03),
        "learner": LearnerModel(step_s=2.0),
        "lengths": EQUAL,
    }
    return Scenario(**{**numbers, **options})


def test_generation_and_training_alternate_without_lag():
    outcome = simulate(scenario(max_lag=0))
    assert outcome.step_s == pytest.approx(3 + 2)
    assert outcome.lag_histogram == {0: 1.0}
    assert outcome.wait_s == pytest.approx(3)


def test_with_a_lag_of_one_the_slower_pool_sets_the_pace():
    outcome = simulate(scenario(max_lag=1))
    assert outcome.step_s == pytest.approx(3)
    assert outcome.lag_histogram == {1: 1.0}
    faster_engine = simulate(scenario(max_lag=1, engine=EngineModel(step_s=0.01)))
    assert faster_engine.step_s == pytest.approx(2)


def test_two_engines_halve_the_time_of_a_batch_if_slots_are_the_limit():
    slow = scenario(max_lag=2, groups_in_flight=2, learner=LearnerModel(step_s=0.1))
    assert simulate(slow).step_s == pytest.approx(6)
    assert simulate(replace(slow, num_engines=2)).step_s == pytest.approx(3)


def test_an_engine_slows_down_with_the_number_of_running_samples():
    model = EngineModel(step_s=0.01, step_s_per_sample=0.005)  # with 8 samples, each token takes 0.05 s
    outcome = simulate(scenario(max_lag=0, engine=model))
    assert outcome.step_s == pytest.approx(5 + 2)


def test_a_publish_costs_copy_travel_and_load_time_without_overlap():
    learner = LearnerModel(step_s=2.0, copy_s=0.25, publish_s=0.5, load_s=0.125)
    assert simulate(scenario(max_lag=0, learner=learner)).step_s == pytest.approx(3 + 2 + 0.875)


def test_more_ranks_share_the_tokens_of_a_step():
    learner = LearnerModel(step_s=1.0, rank_s_per_token=0.01)  # one rank needs 8 s for 800 tokens
    assert simulate(scenario(max_lag=0, learner=learner)).step_s == pytest.approx(3 + 1 + 8)
    assert simulate(scenario(max_lag=0, learner=learner, num_ranks=4)).step_s == pytest.approx(3 + 1 + 2)


def test_a_weight_update_recomputes_the_cache_unless_the_engine_keeps_it():
    slow = LearnerModel(step_s=1.0, load_s=0.5)
    writing = scenario(max_lag=2, engine=EngineModel(step_s=0.03, prefill_s_per_token=0.001), learner=slow)
    recomputed = simulate(writing)
    kept = simulate(replace(writing, learner=replace(slow, on_update=OnUpdate.keep)))
    assert recomputed.fleet_idle["re_prefill"] > 0
    assert "re_prefill" not in kept.fleet_idle
    assert recomputed.step_s > kept.step_s


def test_a_batch_engine_runs_until_its_longest_sample_ends():
    engine = EngineModel(step_s=0.01, step_s_per_sample=0.001, takes_batches=True, batch_s=0.5)
    lengths = LengthModel(recorded=[[10, 100]])
    outcome = simulate(scenario(max_lag=0, engine=engine, lengths=lengths))
    assert outcome.step_s == pytest.approx(0.5 + 100 * (0.01 + 8 * 0.001) + 2)


def test_the_jobs_on_a_core_share_it_equally():
    env, ends = simpy.Environment(), {}
    core = SharedCore(env)
    core.run(3.0, lambda: ends.setdefault("long", env.now))
    core.run(1.0, lambda: ends.setdefault("short", env.now))
    env.run(until=3.0)
    core.run(0.5, lambda: ends.setdefault("late", env.now))  # the long job still needs 1.5 s when this job starts
    env.run()
    assert ends == pytest.approx({"short": 2.0, "late": 4.0, "long": 4.5})
    assert core.busy_s == pytest.approx(4.5)


BATCHES = EngineModel(step_s=0.03, takes_batches=True)


def test_two_engines_on_one_core_are_as_fast_as_one():
    engine = EngineModel(step_s=1e-9, step_s_per_sample=0.03 / 8, takes_batches=True)
    shared = {"max_lag": 2, "ask_s": 0.01, "engine": engine, "learner": LearnerModel(step_s=0.1)}
    one = scenario(host=HostModel(is_shared=True), **shared)
    assert simulate(one).step_s == pytest.approx(3.0, rel=0.05)
    assert simulate(replace(one, num_engines=2)).step_s == pytest.approx(3.0, rel=0.1)
    assert simulate(replace(one, num_engines=2, host=HostModel())).step_s == pytest.approx(1.5, rel=0.1)


@pytest.mark.parametrize(("max_lag", "expected_s"), [(0, 3 + 0.25 + 0.3 + 3), (2, 3.8)])
def test_other_work_on_the_host_slows_down_busy_pools(max_lag, expected_s):
    """The engine and the learner each have one core. In each step the controller uses the less busy core for 1 s.

    In each step the engine generates for 3 s, stores four groups in 0.0625 s each, and waits 0.3 s for leases. The
    learner trains for 3 s. Without lag, one core is always idle. With lag, the controller slows down both cores.
    """
    host = HostModel(is_shared=True, settle_s=0.0625, step_s=1.0)
    work = {"engine": BATCHES, "learner": LearnerModel(step_s=3.0), "host": host}
    outcome = simulate(scenario(max_lag=max_lag, ask_s=0.3, **work))
    assert outcome.step_s == pytest.approx(expected_s, rel=0.05)


def test_only_engines_that_take_batches_can_share_a_core():
    with pytest.raises(ValueError, match=r"host.is_shared needs engine.takes_batches=true"):
        scenario(host=HostModel(is_shared=True))


def test_an_engine_runs_at_most_max_running_samples():
    """The engine runs four of the eight samples at a time. Four samples together take 3 s."""
    outcome = simulate(scenario(max_lag=0, engine=EngineModel(step_s=0.03, max_running=4)))
    assert outcome.step_s == pytest.approx(6 + 2)


def test_the_same_seed_gives_the_same_outcome_and_another_seed_gives_another():
    uneven = scenario(lengths=LengthModel(mean_tokens=100, spread=0.6))
    assert simulate(uneven, seed=3) == simulate(uneven, seed=3)
    assert simulate(uneven, seed=3) != simulate(uneven, seed=4)


@pytest.mark.parametrize("max_lag", [0, 1, 3])
@pytest.mark.parametrize("on_stale", list(OnStale))
def test_no_group_is_consumed_beyond_the_bound(max_lag, on_stale):
    uneven = scenario(
        max_lag=max_lag,
        on_stale=on_stale,
        num_engines=3,
        lengths=LengthModel(mean_tokens=100, spread=1.2, prompt_spread=0.8),
        learner=LearnerModel(step_s=0.5, publish_s=0.7, load_s=0.1),
    )
    outcome = simulate(uneven)
    assert max(outcome.lag_histogram) <= max_lag
    if on_stale is OnStale.wait:
        assert outcome.dropped == 0


def test_requeued_stragglers_cost_tokens_and_save_time():
    uneven = scenario(
        max_lag=1,
        groups_in_flight=8,
        lengths=LengthModel(mean_tokens=100, spread=0.2, prompt_spread=1.2),
        learner=LearnerModel(step_s=0.2),
    )
    waits, requeues = simulate(uneven), simulate(replace(uneven, on_stale=OnStale.requeue))
    assert requeues.dropped > waits.dropped == 0
    assert requeues.step_s < waits.step_s


def test_a_full_buffer_makes_the_engines_wait():
    bytes_per_batch = 4 * 2 * 100 * 14
    slow = LearnerModel(step_s=20.0)
    free, full = (
        simulate(scenario(max_lag=4, learner=slow, max_stored_bytes=bound))
        for bound in (1 << 30, round(1.5 * bytes_per_batch))
    )
    assert "buffer_full" not in free.fleet_idle
    assert full.fleet_idle["buffer_full"] > 0.2
    assert full.stored_bytes <= 1.5 * bytes_per_batch


def test_groups_with_equal_rewards_are_generated_but_not_trained_on():
    outcome = simulate(scenario(max_lag=0, equal_rewards=0.5))
    assert outcome.dropped == pytest.approx(0.5, abs=0.1)
    assert outcome.step_s > 5


@pytest.mark.long
@pytest.mark.parametrize("share", [0.9, 0.99])
def test_the_prompt_queue_stays_filled_if_nearly_all_groups_have_equal_rewards(share):
    outcome = simulate(scenario(max_lag=0, equal_rewards=share))
    assert outcome.dropped == pytest.approx(share, abs=0.05)


def test_whole_groups_are_simulated_by_their_longest_sample():
    uneven = scenario(max_lag=0, lengths=LengthModel(recorded=[[50, 100]]))
    whole = simulate(replace(uneven, whole_groups=True))
    assert whole.step_s == pytest.approx(simulate(uneven).step_s)


def test_the_idle_shares_of_a_pool_sum_to_less_than_one():
    outcome = simulate(scenario(max_lag=1, lengths=LengthModel(mean_tokens=100, spread=0.8)))
    assert 0 < sum(outcome.learner_idle.values()) < 1
    assert 0 < sum(outcome.fleet_idle.values()) < 1


def test_the_simulated_buffer_ends_with_a_balanced_account():
    simulation = Simulation(scenario(max_lag=2, on_stale=OnStale.requeue, lengths=LengthModel(spread=1.0)))
    simulation.run()
    stats = simulation.buffer.ledger.stats()
    written = sum(worker.engine.num_tokens for worker in simulation.workers)
    known = stats.tokens_trained + sum(stats.tokens_dropped.values()) + stats.tokens_buffered
    num_in_flight = 4 * 2 * simulation.scenario.lengths.max_tokens
    assert written - num_in_flight <= known <= written


def test_a_scenario_is_read_from_yaml_and_errors_name_the_option(tmp_path):
    path = tmp_path / "spec.yaml"
    path.write_text("num_engines: 3\nengine: {step_s: 0.5}\non_stale: requeue\n")
    read = load_spec(path)
    assert (read.num_engines, read.engine.step_s, read.on_stale) == (3, 0.5, OnStale.requeue)
    path.write_text("engine: {speed: 3}\n")
    with pytest.raises(ValueError, match="speed"):
        load_spec(path)
    path.write_text("max_lag: 1\npublish_every: 3\n")
    with pytest.raises(ValueError, match="publish_every must be at most max_lag"):
        load_spec(path)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("learner: {variation: [1.0, .nan]}", "learner.variation"),
        ("engine: {variation: [1.0, .inf]}", "engine.variation"),
        ("engine: {step_s: 1.0e300}", "engine.step_s"),
        ("lengths: {spread: 1.0e200}", "lengths.spread"),
        ("lengths: {recorded: [[100000000000000000000000]]}", "lengths.recorded"),
        ("lengths: {recorded: [[]]}", "lengths.recorded"),
        ("queue_groups: 1", "queue_groups must be 0 or at least groups_per_step=32"),
        ("max_lag: 1000000000", "max_lag"),
        ("max_lag: -1", "max_lag must be from 0"),
        ("num_engines: 1000000000000000000000", "num_engines"),
        ("num_engines: 2\nnum_engines: 3", "duplicate key"),
        ("engine: {step_s: ", "spec.yaml is not a scenario"),
        ("\tnum_engines: 2", "spec.yaml is not a scenario"),
        ("3\n", "spec.yaml is not a scenario"),
        ("- 1\n", "spec.yaml is not a scenario"),
        ("", "spec.yaml is empty"),
        ("# num_engines: 8\n", "spec.yaml is empty"),
    ],
)
def test_a_scenario_with_invalid_values_is_refused_by_name(tmp_path, text, named):
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=named):
        load_spec(path)


def test_overrides_name_the_changed_options_of_a_run():
    base = scenario()
    assert overrides(replace(base, max_lag=4, num_engines=2), base) == [
        "rollout_fleet.num_engines=2",
        "buffer.max_lag=4",
    ]


def engine_of(simulation, model, finished=None):
    return SimulatedEngine(
        simulation.env,
        model,
        on_update=OnUpdate.keep,
        prompt_tokens=0,
        whole_groups=False,
        on_finished=lambda group: None if finished is None else finished.append(group),
    )


def test_a_revoked_group_leaves_the_engine_with_its_number_of_tokens():
    simulation = Simulation(scenario())
    engine = engine_of(simulation, EngineModel(step_s=0.01))
    group = SimulatedGroup(group_id=0, attempt=0, lengths=[100, 40], to_write=[100, 40])
    engine.add([group])
    simulation.env.run(until=0.5)
    assert engine.revoke(group) == 50 + 40
    simulation.env.run(until=5)
    assert engine.num_tokens == 50 + 40


def test_a_stopped_group_needs_its_missing_tokens():
    simulation, left = Simulation(scenario()), []
    engine = engine_of(simulation, EngineModel(step_s=0.01))
    group = SimulatedGroup(group_id=0, attempt=0, lengths=[100, 40, 70], to_write=[100, 40, 70])
    engine.add([group])
    simulation.env.run(until=0.5)
    engine.cut(group, left.extend)
    simulation.env.run(until=0.52)
    assert sorted(left) == [20, 50]
    again = SimulatedGroup(group_id=0, attempt=1, lengths=[100, 40, 70], to_write=left)
    assert again.num_saved == 140
    engine.add([again])
    simulation.env.run(until=5)
    assert engine.num_tokens == 210


def test_a_group_stopped_in_a_batch_is_returned_at_the_end_of_the_batch():
    """A batch takes 0.5 s plus 0.01 s per token.

    So at 0.8 s the long sample has 30 tokens, and the sample of 20 tokens is finished.
    """
    simulation, left, finished = Simulation(scenario()), [], []
    engine = engine_of(simulation, EngineModel(step_s=0.01, batch_s=0.5, takes_batches=True), finished)
    long, short = (
        SimulatedGroup(group_id=number, attempt=0, lengths=[length], to_write=[length])
        for number, length in enumerate((100, 20))
    )
    engine.add([long, short])
    simulation.env.run(until=0.8)
    for group in (long, short):
        engine.cut(group, left.append)
    assert left == finished == []
    simulation.env.run(until=5)
    assert left == [[70]]
    assert finished == [short]


def test_a_waiting_group_that_is_stopped_is_returned_after_a_batch_of_one_token():
    """The engine runs one sample per batch, so the second group waits for the batch of the first group.

    The test stops the second group while the group waits. The engine still runs a batch for the second group, from
    1.5 s to 2.01 s, and decodes one token.
    """
    simulation, left = Simulation(scenario()), []
    model = EngineModel(step_s=0.01, batch_s=0.5, takes_batches=True, max_running=1)
    engine = engine_of(simulation, model)
    groups = [SimulatedGroup(group_id=number, attempt=0, lengths=[100], to_write=[100]) for number in range(2)]
    engine.add(groups)
    simulation.env.run(until=0.8)
    engine.cut(groups[1], left.extend)
    simulation.env.run(until=2.005)
    assert left == []
    simulation.env.run(until=2.015)
    assert left == [99]


def test_handed_over_groups_continue_without_lost_tokens():
    """The two engines are equally fast.

    An engine with many running samples needs more than twice as long per group as an engine with few samples.
    """
    model = EngineModel(step_s=0.001, step_s_per_sample=0.01)
    lengths = LengthModel(recorded=[[10, 10], [300, 300]])
    keeps = scenario(max_lag=0, num_engines=2, groups_in_flight=8, engine=model, lengths=lengths, groups_per_step=8)
    simulation = Simulation(replace(keeps, hands_on=True))
    handed_over = simulation.run()
    assert handed_over.dropped == 0
    assert handed_over.step_s == pytest.approx(simulate(keeps).step_s, rel=0.02)


def test_simulated_steps_vary_like_the_recorded_ones():
    """Every fourth learner step is slower. Without lag, a step takes the generation time plus the training time."""
    variation = [0.75, 0.75, 0.75, 1.75]
    varied = scenario(max_lag=0, num_steps=30, warm_up_steps=10, learner=LearnerModel(step_s=2.0, variation=variation))
    outcome = simulate(varied)
    assert outcome.step_s == pytest.approx(3 + 2)
    ends = outcome.step_ends
    assert sorted({round(end - before, 6) for before, end in pairwise(ends[10:])}) == [3 + 1.5, 3 + 3.5]


def test_the_groups_of_a_batch_are_settled_one_by_one_during_the_next_batch():
    """The first batch ends at 3 s. To score and store a group takes 0.5 s of CPU time.

    This work and the next batch share the engine's core. So the engine stores one group per second.
    """
    host = HostModel(is_shared=True, settle_s=0.5)
    simulation = Simulation(
        scenario(max_lag=2, groups_per_step=8, engine=BATCHES, learner=LearnerModel(step_s=0.01), host=host)
    )
    stored_at = []
    simulation.stored = lambda group: stored_at.append(simulation.env.now)
    simulation.run()
    assert stored_at[:4] == pytest.approx([4.0, 5.0, 6.0, 7.0])
