"""The planner compares values of options, gives advice under certain conditions, and replays a recorded run."""

import json
from dataclasses import asdict, replace

import pytest

from asyncrl.cli import plan_command
from asyncrl.cli.compose import compose_run, dump_yaml, read_config
from asyncrl.core.record import GroupEvent
from asyncrl.planner.calibration import calibrate, fair_shares, united
from asyncrl.planner.choices import Choices, Prediction, advise, make_plan, predict, recommend, splits_of
from asyncrl.planner.scenario import EngineModel, LearnerModel, LengthModel, Scenario, configured
from asyncrl.planner.simulator import SimulatedRun, simulate
from asyncrl.profile.report import advice_file, read_advice
from buffer.config import OnStale
from tests.support.traces import record_run

BASE = Scenario(
    groups_in_flight=4,
    groups_per_step=4,
    samples_per_prompt=2,
    max_lag=0,
    ask_s=0.0,
    num_steps=16,
    warm_up_steps=4,
    engine=EngineModel(step_s=0.03),
    learner=LearnerModel(step_s=2.0),
    lengths=LengthModel(mean_tokens=100, spread=0.1, prompt_spread=0.0),
)


def predicted(step_s, lag, **options):
    outcome = SimulatedRun(
        step_s=step_s,
        tokens_per_s=1.0,
        lag_mean=lag,
        lag_histogram={},
        learner_idle={},
        fleet_idle={},
        stored_bytes=0,
        dropped=0.0,
        wait_s=0.0,
        update_s=0.0,
    )
    scenario = replace(BASE, max_lag=4, **options)
    return Prediction(scenario=scenario, outcome=outcome, step_s=(step_s, step_s), lag_mean=(lag, lag))


def test_the_plan_recommends_the_smallest_lag_among_the_fastest_choices():
    now, fast, fresh = predicted(10, 0.0), predicted(5.0, 3.0), predicted(5.05, 1.0)
    assert recommend([now, fast, fresh, predicted(6, 0.5)]) is fresh


def test_the_present_options_win_a_tie():
    now, other = predicted(5, 1.0), predicted(5, 1.0)
    assert recommend([now, other]) is now


@pytest.mark.parametrize("options", [{"groups_per_step": 8}, {"num_ranks": 5}, {"on_stale": OnStale.drop}])
def test_choices_that_change_learning_or_need_more_devices_are_not_recommended(options):
    now = predicted(10, 1.0)
    assert recommend([now, predicted(1, 0.0, **options)]) is now


def test_a_plan_of_a_serial_run_recommends_a_lag():
    plan = make_plan(BASE, Choices(max_lag=[0, 1, 2], publish_every=[1], on_stale=[OnStale.wait]), replicates=2)
    assert plan.current.scenario == BASE
    assert plan.recommended.scenario.max_lag == 1
    assert plan.recommended.step_s[0] <= plan.recommended.outcome.step_s * 1.05
    json.dumps(plan.to_dict())
    (curve,) = plan.curves()
    assert [point["max_lag"] for point in curve["points"]] == [0, 1, 2]


def test_splits_divide_the_present_devices():
    assert splits_of(replace(BASE, num_engines=2, num_ranks=2)) == [(1, 3), (2, 2), (3, 1)]
    large = replace(BASE, num_engines=48, num_ranks=16, groups_per_step=1024)
    assert len(splits_of(large)) <= 10
    assert (48, 16) in splits_of(large)


def test_splits_respect_the_sequence_parallel_ranks():
    base = replace(BASE, num_engines=4, num_ranks=4, groups_per_step=8)
    assert splits_of(replace(base, ranks_at_once=2)) == [(2, 6), (4, 4), (6, 2)]
    assert splits_of(replace(base, ranks_at_once=4)) == [(4, 4)]
    config = compose_run(["learner.num_ranks=4", "learner.sp_size=2", "learner.fsdp_size=4"])
    assert configured(BASE, config).ranks_at_once == 4


def test_advice_moves_enough_engines_for_a_valid_number_of_ranks():
    one_engine = replace(BASE, num_engines=5, num_ranks=2, groups_per_step=8, groups_in_flight=8, max_lag=1)
    slow_ranks = replace(one_engine, learner=LearnerModel(step_s=0.1, rank_s_per_token=0.05), ranks_at_once=2)
    measured_s = simulate(slow_ranks).step_s
    advice = advise(slow_ranks, measured_step_s=measured_s)
    assert advice is not None
    assert advice.change == "rollout_fleet.num_engines=3 learner.num_ranks=4"
    kept = advise(slow_ranks, measured_step_s=measured_s, keep_split=True)
    assert kept is None or "num_ranks" not in kept.change


def test_a_prediction_is_within_its_interval():
    uneven = replace(BASE, lengths=LengthModel(mean_tokens=100, spread=1.0))
    for seed in range(6):
        found = predict(uneven, replicates=3, seed=seed)
        assert found.step_s[0] <= found.outcome.step_s <= found.step_s[1]
        assert found.lag_mean[0] <= found.outcome.lag_mean <= found.lag_mean[1]


def test_advice_names_the_best_change_and_the_reason():
    advice = advise(BASE, measured_step_s=5.0)
    assert advice is not None
    assert advice.change.startswith("buffer.max_lag=")
    assert advice.predicted_step_s < 4
    assert advice.interval[0] <= advice.predicted_step_s <= advice.interval[1] * 1.01
    assert "the engines wait for admission" in advice.why or "the ranks wait" in advice.why
    json.dumps(asdict(advice))


def test_there_is_no_advice_for_a_run_with_faults():
    assert advise(BASE, measured_step_s=5.0, num_faults=1) is None


def test_there_is_no_advice_if_the_replay_does_not_match_the_run():
    assert advise(BASE, measured_step_s=9.0) is None


def test_there_is_no_advice_if_the_replay_error_exceeds_the_gain():
    nearly = replace(BASE, learner=LearnerModel(step_s=0.5))
    in_turns_s, overlapped_s = (simulate(replace(nearly, max_lag=max_lag)).step_s for max_lag in (0, 1))
    assert advise(nearly, measured_step_s=in_turns_s) is not None
    assert advise(nearly, measured_step_s=1.01 * overlapped_s) is None


def test_there_is_no_advice_if_no_change_is_faster():
    learner_bound = replace(BASE, max_lag=2, engine=EngineModel(step_s=0.001))
    assert advise(learner_bound, measured_step_s=2.0) is None


RECORDED = {"num_steps": 24, "groups_per_step": 8, "groups_in_flight": 8, "num_engines": 2}


def recorded_config(max_lag):
    return compose_run(
        [
            "algorithm.groups_per_step=8",
            "algorithm.samples_per_prompt=2",
            "rollout_fleet.groups_in_flight=8",
            "rollout_fleet.num_engines=2",
            "learner.num_ranks=2",
            f"buffer.max_lag={max_lag}",
        ]
    )


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_the_replay_of_a_recorded_run_matches_the_run(tmp_path, max_lag):
    trace = record_run(tmp_path, max_lag=max_lag, **RECORDED)
    calibration = calibrate(trace, recorded_config(max_lag))
    replayed = simulate(replace(calibration.scenario, ask_s=0.0))
    assert replayed.step_s == pytest.approx(calibration.step_s, rel=0.1)
    assert replayed.lag_mean == pytest.approx(calibration.lag_mean, abs=0.3)
    assert calibration.num_faults == 0


def test_groups_that_were_stored_before_the_run_was_resumed_do_not_count_in_the_mean_lag(tmp_path):
    trace = record_run(tmp_path, max_lag=0, **RECORDED)
    stamps = [stamp for stamp in trace.stamps if stamp.group % 3 or stamp.event != GroupEvent.stored]
    assert calibrate(replace(trace, stamps=tuple(stamps)), recorded_config(0)).lag_mean == 0.0


@pytest.mark.long
def test_the_record_of_a_serial_run_predicts_runs_with_lag(tmp_path):
    serial = calibrate(record_run(tmp_path / "0", max_lag=0, **RECORDED), recorded_config(0)).scenario
    for max_lag in (1, 2):
        trace = record_run(tmp_path / str(max_lag), max_lag=max_lag, **RECORDED)
        real = calibrate(trace, recorded_config(max_lag))
        prediction = simulate(replace(serial, max_lag=max_lag, ask_s=0.0))
        assert prediction.step_s == pytest.approx(real.step_s, rel=0.12)
        assert prediction.lag_mean == pytest.approx(real.lag_mean, abs=0.3)


def test_fair_shares_divide_a_core_equally_between_running_activities():
    second = 10**9
    assert fair_shares([(0, 2 * second)], [(second, 2 * second)]) == [1.5, 0.5]
    assert fair_shares([(0, 4), (0, 4)], [(8, 9)]) == pytest.approx([4e-9, 1e-9])


def test_united_merges_overlapping_spans():
    assert united([(4, 6), (0, 2), (1, 3), (3, 3)]) == [(0, 3), (4, 6)]


def test_calibration_refuses_a_record_with_too_few_steps(tmp_path):
    with pytest.raises(ValueError, match="at least 5 learner steps, got 3"):
        calibrate(record_run(tmp_path, num_steps=3), recorded_config(1))


@pytest.mark.long
def test_the_command_plans_from_a_run_and_writes_the_files_of_the_report(tmp_path, capsys):
    record_run(tmp_path, max_lag=0, **RECORDED)
    (tmp_path / "config.yaml").write_text(dump_yaml(recorded_config(0)))
    assert read_config(tmp_path) == recorded_config(0)
    arguments = [
        str(tmp_path),
        "--max-lag",
        "0",
        "1",
        "--publish-every",
        "1",
        "--on-stale",
        "wait",
        "--replicates",
        "2",
    ]
    assert plan_command.main([*arguments, "--steps", "14", "--keep-split"]) == 0
    page = capsys.readouterr().out
    assert "recommended: buffer.max_lag=1" in page
    assert "advice: buffer.max_lag=" in page
    document = json.loads((tmp_path / "plan.json").read_text())
    assert document["advice"]["change"].startswith("buffer.max_lag=")
    assert json.loads(json.dumps(asdict(read_advice(tmp_path)))) == document["advice"]
    assert document["curves"][0]["points"][0].keys() == {"lag", "step_s", "max_lag", "interval"}
    assert (tmp_path / "plan.png").stat().st_size > 0


@pytest.mark.long
def test_the_command_makes_its_folder_and_reports_progress_and_a_bad_replay(tmp_path, capsys, monkeypatch):
    run, out = tmp_path / "run", tmp_path / "plans" / "first"
    run.mkdir()
    record_run(run, max_lag=0, **RECORDED)
    (run / "config.yaml").write_text(dump_yaml(recorded_config(0)))
    monkeypatch.setattr(plan_command, "_PROGRESS_EVERY_S", 0.0)
    monkeypatch.setattr(plan_command, "misses", lambda *_: True)
    few = ["--max-lag", "0", "1", "--publish-every", "1", "--on-stale", "wait", "--replicates", "1", "--keep-split"]
    assert plan_command.main([str(run), *few, "--steps", "14", "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert "plan: simulating choice 1 of 1" in printed.err
    assert "the replay misses the measured step time by more than 20%" in printed.out
    assert (out / "plan.json").is_file()
    (tmp_path / "file").touch()
    assert plan_command.main([str(run), "--out", str(tmp_path / "file")]) == 2
    assert f"{tmp_path / 'file'}" in capsys.readouterr().err


@pytest.mark.parametrize("option", [("--replicates", "0"), ("--seed", "-1")])
def test_the_command_refuses_numbers_out_of_range(option, tmp_path, capsys):
    with pytest.raises(SystemExit):
        plan_command.main([str(tmp_path), *option])
    assert f"{option[0]}: must be >=" in capsys.readouterr().err


@pytest.mark.long
def test_only_advice_limits_the_cpu_time_and_the_size_of_the_record(tmp_path, capsys, monkeypatch):
    record_run(tmp_path, max_lag=0, **RECORDED)
    (tmp_path / "config.yaml").write_text(dump_yaml(recorded_config(0)))
    limits = []
    monkeypatch.setattr(plan_command.resource, "setrlimit", lambda *limit: limits.append(limit))
    assert plan_command.main([str(tmp_path), "--only-advice", "7", "--steps", "14"]) == 0
    assert limits == [(plan_command.resource.RLIMIT_CPU, (7, 7))]
    assert capsys.readouterr().out.startswith("advice: buffer.max_lag=")
    assert json.loads(advice_file(tmp_path).read_text())["cpu_s"] > 0
    assert not (tmp_path / "plan.json").exists()
    assert plan_command.main([str(tmp_path), "--only-advice", "7", "--steps", "14", "--frontier"]) == 0
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert [point["max_lag"] for point in plan["curves"][0]["points"]] == [0, 1, 2, 4]
    monkeypatch.setattr(plan_command, "_MAX_RECORD_BYTES", 9)
    assert plan_command.main([str(tmp_path), "--only-advice", "7"]) == 2
    assert "--only-advice reads at most" in capsys.readouterr().err


def test_the_command_reports_a_missing_run_and_a_missing_configuration(tmp_path, capsys):
    assert plan_command.main([str(tmp_path / "nothing")]) == 2
    assert "pass a run's folder or a YAML file" in capsys.readouterr().err
    assert plan_command.main([str(tmp_path)]) == 2
    assert "config.yaml" in capsys.readouterr().err
