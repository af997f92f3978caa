import signal

import pytest

pytestmark = pytest.mark.e2e

SMALL = (
    "rollout_fleet.engine=transformers",
    "evaluation.enabled=false",
    "buffer.max_lag=0,1",
    "sft.eval_every=5",  # a warm start that ends soon
    "sft.target_val_loss=2.5",
)


def test_a_multirun_trains_each_value_in_its_folder_and_warm_starts_once(start, tmp_path):
    sweep = start("--multirun", *SMALL, "total_steps=2", f"hydra.sweep.dir={tmp_path}/sweep")
    assert sweep.finish(240) == 0, sweep.output
    assert [line.split()[-1] for line in sweep.output.splitlines()[-2:]] == ["0", "1"]
    logs = {number: (tmp_path / "sweep" / number / "logs") for number in "01"}
    assert (logs["0"] / "sft.log").is_file()
    assert not (logs["1"] / "sft.log").exists()
    assert "warm start: reusing" in sweep.output
    assert all((log.parent / "policy" / "config.json").is_file() for log in logs.values())


def test_a_signal_stops_the_multirun_and_its_running_run(start, tmp_path):
    sweep = start("--multirun", *SMALL, "total_steps=500", f"hydra.sweep.dir={tmp_path}/sweep")
    sweep.wait_for_line(" writing to ")
    sweep.remember_family()
    sweep.process.send_signal(signal.SIGTERM)
    assert sweep.finish(60) == 128 + signal.SIGTERM, sweep.output
    assert "run 1:" not in sweep.output
    assert not sweep.survivors()
