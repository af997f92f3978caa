"""Sweeps (``--multirun``) of real training runs."""

import signal

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

SMALL = (
    "rollout_fleet.engine=transformers",
    "evaluation.enabled=false",
    "buffer.max_lag=0,1",
    "sft.eval_every=5",  # these two options make the warm start short
    "sft.target_val_loss=2.5",
    "total_steps=2",
)


def values_in_table(sweep):
    """Return the last column of the sweep's printed table: the folder names of its two runs."""
    return [line.split()[-1] for line in sweep.output.splitlines()[-2:]]


def test_a_multirun_reuses_its_warm_start_and_a_signal_stops_it_and_its_current_run(start, tmp_path):
    sweep = start("--multirun", *SMALL, f"hydra.sweep.dir={tmp_path}/sweep")
    sweep.wait_for_line("warm start: reusing", timeout_s=600)  # one whole run
    sweep.remember_family()
    sweep.process.send_signal(signal.SIGTERM)
    assert sweep.finish(60) == 128 + signal.SIGTERM, sweep.output
    assert not sweep.survivors()
    first, second = (tmp_path / "sweep" / number for number in "01")
    assert (first / "logs" / "sft.log").is_file()
    assert (first / "policy" / "config.json").is_file()
    assert not (second / "logs" / "sft.log").exists()
    assert not (second / "policy").exists()
    assert values_in_table(sweep) == ["0", "1"]


def test_a_multirun_trains_each_value_in_its_folder(start, tmp_path):
    sweep = start("--multirun", *SMALL, f"hydra.sweep.dir={tmp_path}/sweep")
    assert sweep.finish(600) == 0, sweep.output
    assert values_in_table(sweep) == ["0", "1"]
    assert all((tmp_path / "sweep" / number / "policy" / "config.json").is_file() for number in "01")
