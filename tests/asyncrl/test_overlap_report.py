"""The output and the files of ``asyncrl profile``."""

import json
from dataclasses import replace

import pytest

from asyncrl.profile.attribution import OverlapReport
from asyncrl.profile.command import main
from asyncrl.profile.perfetto import trace_events
from asyncrl.profile.trace import Span
from tests.support.traces import record_run, trace_of


def half_and_half():
    """Return the report of two steps of 100 ns.

    In each step, the learner rank waits 40 ns and works 60 ns. The engine can run 2 samples and always runs one.
    """
    fleet = [("engine-0", "capacity", 0, 2), ("engine-0", "running", 0, 1), ("engine-0", "tail", 0, 1)]
    learner = [("learner-0", "update", start, start + 60) for start in (40, 140)]
    waits = [("controller/plan", "plan_wait", start, start + 40) for start in (0, 100)]
    return OverlapReport.of(trace_of(fleet=fleet, learner=learner, controller=waits, steps=[0, 100, 200]))


def test_efficiency_is_the_time_of_the_slower_pool_alone_divided_by_the_step_time():
    report = half_and_half()
    run = report.run
    assert run.step_s == pytest.approx(100e-9)
    assert run.alone_s("learner") == pytest.approx(60e-9)
    # A group occupies its slots until its last sample ends. So the fleet alone would also need 100 ns per step.
    assert run.alone_s("fleet") == pytest.approx(100e-9)
    assert run.efficiency == pytest.approx(1.0)
    assert run.pools["learner"].utilisation == 0.6
    assert run.pools["fleet"].utilisation == 0.5
    assert run.utilisation == pytest.approx(0.55)
    assert run.idle_s("learner") == pytest.approx({"slow_generation": 80e-9})


def test_each_step_has_figures_that_add_up_to_the_run(tmp_path):
    document = OverlapReport.of(record_run(tmp_path, num_steps=5, max_lag=1)).to_dict()
    assert [step["step"] for step in document["steps"]] == list(range(5))
    for pool in ("learner", "fleet"):
        run, steps = document["run"][pool], [step[pool] for step in document["steps"]]
        for name in ("capacity_ns", "busy_ns"):
            assert run[name] == sum(step[name] for step in steps)
        for cause, total in run["idle_ns"].items():
            assert total == sum(step["idle_ns"].get(cause, 0) for step in steps)
        assert run["capacity_ns"] == run["busy_ns"] + sum(run["idle_ns"].values())
    lag = document["run"]["lag"]
    assert lag["mean"] == pytest.approx(lag["before_queue"] + lag["in_queue"])
    assert 0 < lag["mean"] <= 1
    assert document["recorded"] == {
        "processes": {"buffer": 1, "controller": 1, "fleet": 2, "learner": 2},
        "dropped_records": 0,
        "torn_files": 0,
        "clock_error_ns": 0,
    }


def test_steps_add_up_to_the_run_with_gaps_and_a_repeated_step():
    fleet = [("engine-0", "capacity", 0, 2), ("engine-0", "running", 0, 1)]
    learner = [("learner-0", "update", start, start + 60) for start in (40, 140, 500)]
    trace = trace_of(fleet=fleet, learner=learner)
    step_spans = [
        Span(lane="controller", kind="step", step=step, start=start, end=end, process="controller")
        for step, start, end in ((0, 0, 100), (1, 103, 200), (2, 207, 230), (1, 450, 600))
    ]
    document = OverlapReport.of(replace(trace, spans=(*trace.spans, *step_spans))).to_dict()
    assert [step["step"] for step in document["steps"]] == [0, 1, 2, 1]
    assert [round(step["duration_s"] * 1e9) for step in document["steps"]] == [100, 100, 30, 370]
    for pool, capacity in (("learner", 600), ("fleet", 1200)):
        run, steps = document["run"][pool], [step[pool] for step in document["steps"]]
        assert run["capacity_ns"] == sum(step["capacity_ns"] for step in steps) == capacity
        for step in steps:
            assert step["capacity_ns"] == step["busy_ns"] + sum(step["idle_ns"].values())
        for cause, total in run["idle_ns"].items():
            assert total == sum(step["idle_ns"].get(cause, 0) for step in steps)


def test_the_command_prints_a_table_and_writes_both_files(tmp_path, capsys):
    record_run(tmp_path, num_steps=3, max_lag=0)
    assert main([str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "3 steps of" in printed
    assert "staleness_gate" in printed
    assert json.loads((tmp_path / "overlap.json").read_text())["run"]["num_steps"] == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["overlap.json", "profile", "report.html", "trace.json"]


def test_the_table_of_steps_shows_whole_causes_on_a_narrow_terminal(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    record_run(tmp_path, num_steps=3, max_lag=0)
    assert main([str(tmp_path)]) == 0
    assert "…" not in capsys.readouterr().out


def test_the_command_reports_a_folder_without_a_record(tmp_path, capsys):
    for folder, problem in ((tmp_path, "holds no record"), (tmp_path / "none", "does not exist")):
        assert main([str(folder)]) == 2
        assert problem in capsys.readouterr().err


def test_the_command_names_a_truncated_configuration(tmp_path, capsys):
    record_run(tmp_path)
    (tmp_path / "config.yaml").write_text('{"a": ')
    assert main([str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {tmp_path}/config.yaml must hold the options of the run")
    assert error.count("\n") == 1


def test_the_command_reports_a_run_without_a_finished_step(tmp_path, capsys):
    record_run(tmp_path, num_steps=0)
    assert main([str(tmp_path)]) == 0
    assert "no learner step is finished yet" in capsys.readouterr().out


def test_trace_json_has_lanes_of_every_pool_an_arrow_per_group_and_counters(tmp_path):
    trace = record_run(tmp_path, num_steps=3, max_lag=1)
    assert main([str(tmp_path)]) == 0
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    lanes = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"learner-0", "learner-1", "engine-0", "engine-1", "buffer", "controller", "learner-0/publish"} <= lanes
    begins = [event for event in events if event["ph"] == "s"]
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert len(begins) == len(ends) == 3 * 4
    for begin in begins:
        group = trace.groups[begin["id"]]
        assert begin["ts"] == (group.time("lease") - trace.start) / 1000
        assert ends[begin["id"]]["ts"] >= begin["ts"]
    counters = {event["name"] for event in events if event["ph"] == "C"}
    assert {"stored", "budget", "lag", "engine-0 running"} <= counters
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")


def test_overlapping_evaluations_of_an_engine_are_asynchronous_trace_events():
    trace = trace_of(fleet=[("engine-0", "evaluation", 0, 20), ("engine-0", "evaluation", 10, 30)])
    phases = [event["ph"] for event in trace_events(trace)["traceEvents"] if event["name"] == "evaluation"]
    assert phases == ["b", "e", "b", "e"]


def test_the_history_of_a_group_has_each_event_in_order(tmp_path, capsys):
    record_run(tmp_path, num_steps=3, max_lag=1)
    assert main([str(tmp_path), "--group", "0"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    ledger_events = [line[2] for line in lines if line[3] == "buffer"]
    assert ledger_events == ["lease", "stored", "planned", "trained"]
    assert {"first_token", "last_token"} <= {line[2] for line in lines}
    times = [float(line[0]) for line in lines]
    assert times == sorted(times)
    assert main([str(tmp_path), "--group", "12345"]) == 2
    assert "no event of group 12345, only of the groups 0 to" in capsys.readouterr().err
