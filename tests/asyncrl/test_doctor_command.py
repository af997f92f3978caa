"""``asyncrl doctor``: checks of this machine, and the state of a run."""

import json
import re

import pytest

from asyncrl.cli import doctor_command
from asyncrl.cli.compose import compose_run, dump_yaml
from asyncrl.cli.doctor_command import examine, main
from asyncrl.metrics import LifeRecord, MetricsWriter, write_life
from tests.asyncrl.test_alarms import NORMAL, steps
from tests.support.ray_cluster import away_from_the_shared_cluster


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "config.yaml").write_text(dump_yaml(compose_run(["total_steps=50", "buffer.max_lag=2"])))
    (tmp_path / "logs").mkdir()
    return tmp_path


def written(run_dir, records):
    writer = MetricsWriter(run_dir)
    for record in records:
        writer.write(record)
    writer.close()


def test_the_machine_passes_its_checks_without_ray_and_sandbox(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(doctor_command, "ray_starts", lambda: iter(()))
    monkeypatch.setattr(doctor_command, "sandbox", lambda: iter(()))
    assert main(["--output", str(tmp_path / "new")]) == 0
    said = capsys.readouterr().out
    assert re.search(r"PASS .* packages .*Python 3\.\d+\.\d+, torch", said)
    assert f"GiB free in {tmp_path}" in said
    assert "0 checks failed" in said


def test_a_failed_check_of_the_machine_gives_its_remedy_and_status_1(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(doctor_command, "MIN_DISK_BYTES", 1 << 60)
    monkeypatch.setattr(doctor_command, "ray_starts", lambda: iter(()))
    monkeypatch.setattr(doctor_command, "sandbox", lambda: iter(()))
    assert main(["--output", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert re.search(r"FAIL .* disk .*-> another output_dir", said)
    assert "1 check failed" in said


@pytest.mark.slow
def test_a_ray_cluster_starts_on_this_machine():
    with away_from_the_shared_cluster():
        [result] = doctor_command.ray_starts()
    assert "a task ran in process" in result.number
    assert result.state == "PASS"


def test_a_run_with_a_lasting_alarm_shows_it_with_status_1(run_dir, capsys):
    written(run_dir, [*steps(6, truncated_samples=0.5), *steps(6, 6, lag_mean=2.0)])
    (run_dir / "logs" / "buffer.log").write_text("INFO fine\nERROR the disk is slow\n")
    assert main([str(run_dir)]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"{run_dir}: live, 12 steps of 50 recorded"
    assert said[1].startswith("ALARM  lag (since step 10): every trained group has the largest lag")
    assert said[2].startswith("over   truncation (steps 4 to 5): 50% of the samples")
    assert said[3:] == [f"{run_dir}/logs/buffer.log: 1 line with errors, the last ones:", "  ERROR the disk is slow"]


def test_a_run_without_an_alarm_has_status_0(run_dir):
    written(run_dir, [NORMAL])
    (run_dir / "summary.json").write_text(json.dumps({}))
    assert examine(run_dir) == ([f"{run_dir}: ended, 1 step of 50 recorded", "no alarm"], True)


@pytest.mark.parametrize(("status", "state"), [(143, "stopped"), (1, "failed")])
def test_a_run_that_ended_without_a_summary_is_not_live(run_dir, status, state):
    written(run_dir, [NORMAL])
    write_life(run_dir, LifeRecord(host="here", began_s=1.0, ended_s=2.0, status=status))
    lines, _ = examine(run_dir)
    assert lines[0] == f"{run_dir}: {state} without a summary, 1 step of 50 recorded"


def test_a_folder_that_does_not_belong_to_a_run_is_refused(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "must be the folder of a run, got a folder without config.yaml" in capsys.readouterr().err
