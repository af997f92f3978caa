import json
import shlex
import signal
import subprocess
import sys
import textwrap

import pytest

from asyncrl.cli.compose import compose_run, dump_yaml
from asyncrl.cli.multirun import multirun, overview
from asyncrl.run.run_folder import make_run_dir


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["buffer.max_lag=0,-2"], ["buffer.max_lag must be >= 0", "-2"]),
        (["buffer.max_lagg=0,1"], ["unknown option buffer.max_lagg", "buffer.max_lag"]),
        (["learner.num_ranks=1,2", "learner.sp_size=1,2"], ["learner.sp_size", "2"]),
        (["buffer.max_lag=[0,1"], ["cannot parse", "buffer.max_lag=[0,1"]),
    ],
)
def test_a_multirun_with_one_wrong_combination_starts_no_run(tmp_path, overrides, words):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the test checks the message
        multirun([f"output_dir={tmp_path}", *overrides])
    assert all(word in str(caught.value) for word in words)
    assert not list(tmp_path.iterdir())


def test_the_overview_of_a_multirun_shows_the_varied_options_and_each_result(tmp_path):
    for number, (max_lag, reward) in enumerate([(0, 0.5), (2, 0.75)]):
        config = compose_run([f"buffer.max_lag={max_lag}", "seed=7", f"run_dir={tmp_path / str(number)}"])
        run = make_run_dir(config, dump_yaml(config))
        result = {
            "eval": {"after": {"greedy": reward, "sampled": reward / 2}},
            "max_lag": {"realised": max_lag},
            "train_wall_s": 30.0,
            "policy_version": 20,
        }
        (run / "summary.json").write_text(json.dumps(result))
    unfinished = compose_run(["buffer.max_lag=4", "seed=7", f"run_dir={tmp_path / '2'}"])
    make_run_dir(unfinished, dump_yaml(unfinished))
    header, *rows = overview(tmp_path).splitlines()[2:]
    assert header.split() == ["buffer.max_lag", "greedy", "sampled", "s", "per", "step", "largest", "lag", "folder"]
    assert [row.split() for row in rows] == [
        ["0", "0.500", "0.250", "1.5", "0", "0"],
        ["2", "0.750", "0.375", "1.5", "2", "1"],
        ["4", "-", "-", "-", "-", "2"],
    ]


def test_run_dir_is_the_folder_of_a_run(tmp_path):
    config = compose_run([f"run_dir={tmp_path}/here"])
    assert make_run_dir(config, dump_yaml(config)) == tmp_path / "here"
    assert (tmp_path / "here" / "logs").is_dir()


SWEEP = """
    import sys
    from asyncrl.cli.multirun import multirun
    sys.executable = sys.argv[1]
    sys.exit(multirun(["buffer.max_lag=0,1,2", f"hydra.sweep.dir={sys.argv[2]}"]))
"""
RUN = """
    import signal, sys
    def stop(number, frame):
        print("stopped", flush=True)
        sys.exit(143)
    signal.signal(signal.SIGTERM, stop)
    print(*sys.argv[1:], flush=True)
    while "buffer.max_lag=1" in sys.argv:
        signal.pause()
"""
"""Program that stands in for a run. With ``buffer.max_lag=1`` it waits for SIGTERM."""


def test_a_multirun_starts_a_run_per_value_and_a_signal_stops_it_and_its_current_run(tmp_path):
    """The runs of this sweep are scripted. `tests/e2e/test_multirun.py` tests sweeps of real runs."""
    (tmp_path / "run.py").write_text(textwrap.dedent(RUN))
    run = tmp_path / "run"
    run.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {tmp_path}/run.py "$@"\n')
    run.chmod(0o755)
    command = [sys.executable, "-c", textwrap.dedent(SWEEP), run, tmp_path / "sweep"]
    sweep = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = []
    while "buffer.max_lag=1 run_dir" not in (lines or [""])[-1]:
        lines.append(sweep.stdout.readline())
        assert lines[-1], lines
    sweep.send_signal(signal.SIGTERM)
    rest, _ = sweep.communicate(timeout=60)
    assert sweep.returncode == 128 + signal.SIGTERM, rest
    assert "stopped" in rest
    assert "run 2:" not in rest
    started = [line.split()[-1] for line in lines if "run_dir=" in line]
    assert started == [f"run_dir={tmp_path}/sweep/{number}" for number in (0, 1)]
