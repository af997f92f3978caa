"""The alarms about a run's steps, evaluations and files."""

import json
import math
from dataclasses import replace

import pytest

from asyncrl.cli.compose import compose_run
from asyncrl.metrics import Alarms, Estimate, Evaluation, MetricsWriter, RunLimits, StepRecord, read_alarms
from asyncrl.run.reporting import slowest_engine

LIMITS = RunLimits(total_steps=100, max_lag=2)
NORMAL = StepRecord(
    step=0,
    time_s=0.5,
    reward=0.25,
    reward_std=0.5,
    equal_reward_groups=0.5,
    truncated_samples=0.0,
    samples_per_group=4.0,
    response_length=8.0,
    lag_mean=1.0,
    lag_max=2,
    generated_tokens=100,
    rollout_tokens_per_s=4000.0,
    learner_tokens_per_s=20000.0,
    buffer_groups=3,
    leased_groups=5,
    engine_version=0,
    plan_wait_s=0.01,
    update_s=0.1,
    publish_s=0.02,
    free_disk_bytes=10**12,
    learner={"entropy": 1.0, "engine_gap": 0.01},
)


def changes_of(alarms, records):
    """Return one tuple per start or end of an alarm: the step, the alarm's name, and True for a start."""
    return [(r.step, alarm.name, alarm.last_step is None) for r in records for alarm in alarms.step(r)]


def steps(count, first=0, **changes):
    return [replace(NORMAL, step=step, **changes) for step in range(first, first + count)]


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("equal_rewards", {"equal_reward_groups": 1.0, "reward": 0.0}, "all are 0"),
        ("no_update", {"learner": {"grad_norm": math.nan}}, "the policy skips updates"),
        ("no_update", {"learner": {"grad_norm": 1.0, "critic.grad_norm": math.inf}}, "the critic skips updates"),
        ("no_update", {"learner": {"grad_norm": 0.0}}, "the policy does not change"),
        ("engine_gap", {"learner": {"engine_gap": 0.3}}, "differ by 0.3 nats per token"),
        ("truncation", {"truncated_samples": 0.4}, "40% of the samples"),
        ("length_bias", {"dropped_groups": 30, "kept_length": 100.0, "dropped_length": 150.0}, "150 tokens per sample"),
        ("lag", {"lag_mean": 2.0}, "buffer.max_lag=2 allows"),
        ("buffer_full", {"buffer_fill": 0.96}, "96% of buffer.max_stored_bytes"),
        ("slow_engine", {"slowest_engine": 0.2}, "20% of the median engine"),
    ],
)
def test_an_alarm_begins_in_the_fifth_step_of_its_condition_and_ends_with_the_condition(name, changes, words):
    alarms = Alarms(LIMITS)
    records = [*steps(3), *steps(6, 3, **changes), *steps(4, 9)]
    assert changes_of(alarms, records) == [(7, name, True), (9, name, False)]
    [alarm] = alarms.history
    assert (alarm.first_step, alarm.last_step) == (7, 8)
    assert words in alarm.message
    assert alarms.metrics() == {f"alarm.{name}": 0.0}


@pytest.mark.parametrize(
    "changes",
    [
        {"equal_reward_groups": 0.95},
        {"learner": {"grad_norm": 1e-9, "critic.grad_norm": 0.0}},
        {"learner": {"engine_gap": 0.05}},
        {"truncated_samples": 0.1},
        {"dropped_groups": 30, "kept_length": 100.0, "dropped_length": 110.0},
        {"dropped_groups": 3, "kept_length": 100.0, "dropped_length": 500.0},
        {"lag_mean": 1.9},
        {"buffer_fill": 0.9},
        {"slowest_engine": 0.6},
    ],
)
def test_a_condition_below_its_threshold_raises_no_alarm(changes):
    assert changes_of(Alarms(LIMITS), steps(12, **changes)) == []


def test_a_condition_that_is_absent_in_one_of_five_steps_raises_no_alarm():
    records = [replace(r, equal_reward_groups=0.9 if r.step % 5 == 4 else 1.0) for r in steps(30)]
    assert changes_of(Alarms(LIMITS), records) == []


def test_equal_rewards_without_a_gradient_raise_one_alarm():
    records = steps(6, equal_reward_groups=1.0, learner={"grad_norm": 0.0})
    assert changes_of(Alarms(LIMITS), records) == [(4, "equal_rewards", True)]


def test_advantages_across_groups_raise_an_alarm_only_if_all_rewards_are_equal():
    alarms = Alarms(replace(LIMITS, compares_groups=False))
    records = [*steps(6, equal_reward_groups=1.0), *steps(6, 6, equal_reward_groups=1.0, reward_std=0.0)]
    assert changes_of(alarms, records) == [(10, "equal_rewards", True)]
    assert compose_run(["algorithm.advantage=turn_grpo"]).algorithm.compares_groups
    for advantage in ("advantage=gae", "advantage=remax", "advantage_by_source={a: leave_one_out_batch}"):
        assert not compose_run([f"algorithm.{advantage}"]).algorithm.compares_groups


def test_a_disk_that_fills_before_the_last_step_raises_an_alarm():
    free = [replace(r, free_disk_bytes=2**30 * (50 - r.step)) for r in steps(8)]
    alarms = Alarms(LIMITS)
    assert changes_of(alarms, free) == [(4, "disk", True)]
    assert "full in 46 steps, 95 are left: 46.0 GiB are free, and 1024.0 MiB are used per step" in str(
        alarms.current[0]
    )
    assert changes_of(Alarms(replace(LIMITS, total_steps=50)), free) == []


def test_collapsing_entropy_raises_an_alarm_with_both_values():
    records = [
        replace(r, learner={"entropy": 0.8 if r.step < 8 else 0.004}, equal_reward_groups=0.95) for r in steps(20)
    ]
    alarms = Alarms(LIMITS)
    assert changes_of(alarms, records) == [(12, "entropy", True)]
    assert "from 0.8 to 0.004 nats per token, at reward 0.25" in alarms.current[0].message


def test_falling_entropy_with_different_rewards_raises_no_alarm():
    records = [replace(r, learner={"entropy": 0.8 * 0.5**r.step}) for r in steps(20)]
    assert changes_of(Alarms(LIMITS), records) == []
    single = [replace(record, equal_reward_groups=1.0) for record in records]  # each prompt has one sample
    assert changes_of(Alarms(replace(LIMITS, compares_groups=False)), single) == []


def test_a_return_to_a_checkpoint_begins_a_new_window():
    alarms = Alarms(LIMITS)
    equal = [replace(NORMAL, step=step, equal_reward_groups=1.0) for step in (0, 1, 2, 3, 2, 3, 4, 5, 6)]
    assert changes_of(alarms, equal) == [(6, "equal_rewards", True)]


def test_an_alarm_ended_by_a_return_to_a_checkpoint_includes_its_first_step():
    alarms = Alarms(LIMITS)
    for step in (0, 1, 2, 3, 4, 2):
        alarms.step(replace(NORMAL, step=step, equal_reward_groups=1.0))
    assert [(alarm.first_step, alarm.last_step) for alarm in alarms.history] == [(4, 4)]


def evaluation(version, mean, low, high):
    estimates = {"greedy": Estimate(mean=mean, low=low, high=high)}
    return Evaluation(policy_version=version, sampled=mean, greedy=mean, num_prompts=50, estimates=estimates)


def test_a_greedy_reward_below_the_interval_of_the_best_raises_an_alarm_until_it_recovers():
    alarms = Alarms(LIMITS)
    rewards = [(0, 0.4, 0.3, 0.5), (10, 0.8, 0.7, 0.9), (20, 0.7, 0.6, 0.8), (30, 0.5, 0.4, 0.6), (40, 0.8, 0.7, 0.9)]
    changed = [[alarm.last_step for alarm in alarms.evaluation(evaluation(*reward))] for reward in rewards]
    assert changed == [[], [], [], [None], [39]]
    assert "fell from 0.800 at version 10 to 0.500" in alarms.history[0].message


def test_alarms_of_a_runs_files_equal_the_alarms_of_its_records(tmp_path):
    alarms, writer = Alarms(LIMITS), MetricsWriter(tmp_path)
    for record in [*steps(2), *steps(7, 2, lag_mean=2.0, learner={"engine_gap": 0.5}), *steps(3, 9)]:
        alarms.step(record)
        writer.write(replace(record, metrics=alarms.metrics()))
        if record.step in (4, 8):
            alarms.evaluation(evaluation(record.step + 1, *((0.9, 0.8, 1.0) if record.step == 4 else (0.2, 0.1, 0.3))))
    for version, mean in ((5, 0.9), (9, 0.2)):
        writer.evaluation(evaluation(version, mean, mean - 0.1, mean + 0.1))
    writer.close()
    assert len(alarms.history) == 3
    assert read_alarms(tmp_path, LIMITS).history == alarms.history
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line.get("alarm.lag") for line in lines] == [None] * 6 + [1.0] * 3 + [0.0] * 3


def test_a_damaged_line_of_a_runs_metrics_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    with pytest.raises(ValueError, match=r"line 1 of .*metrics\.jsonl .*step, reward"):
        read_alarms(tmp_path, LIMITS)


@pytest.mark.parametrize(
    ("before", "now", "share"),
    [
        ({"0": 100, "1": 100, "2": 100}, {"0": 200, "1": 200, "2": 125}, 0.25),
        ({"0": 0}, {"0": 500}, 1.0),
        ({"0": 0, "1": 0}, {"0": 0, "1": 0}, 1.0),
        ({"0": 0, "1": 0}, {"0": 100, "1": 100, "2": 1}, 1.0),  # engine 2 joined later
    ],
)
def test_the_slowest_engine_is_compared_with_the_median_engine(before, now, share):
    assert slowest_engine(before, now) == share
