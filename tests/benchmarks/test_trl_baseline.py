import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from asyncrl.cli.quickstart import make_assets
from benchmarks.trl_baseline import StoppedClock, exact_match


def test_the_clock_counts_only_while_it_runs():
    clock = StoppedClock()
    clock.start()
    time.sleep(0.02)
    clock.stop()
    counted = clock.elapsed_s
    time.sleep(0.02)
    clock.stop()

    assert counted >= 0.02
    assert clock.elapsed_s == counted


def test_a_completion_must_equal_the_ground_truth():
    assert exact_match(["21", "211", ""], ["21", "21", "21"], prompts=[]) == [1.0, 0.0, 0.0]


@pytest.mark.slow
def test_a_run_prints_one_line_of_json(tmp_path):
    pytest.importorskip("trl")
    assets = make_assets(tmp_path / "assets", seed=0, num_train=64, num_held_out=16, num_demonstrations=8)
    command = [sys.executable, "-m", "benchmarks.trl_baseline", "--max-steps", "3", "--eval-every", "2"]
    paths = ["--model", assets.model, "--train", assets.train, "--held-out", assets.held_out]

    done = subprocess.run(
        [*command, *map(str, paths)], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=240
    )

    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["time_to_target_s"], result["steps"]) == (None, 3)
    steps, seconds, _ = zip(*result["accuracy_curve"], strict=True)
    assert steps == (0, 2, 3)
    assert 0 == seconds[0] < seconds[1] < seconds[2] <= result["train_s"]
    assert result["cpu_s"] > 0
    assert result["startup_s"] > 0
