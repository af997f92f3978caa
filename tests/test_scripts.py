"""The shell scripts that a user calls."""

import subprocess

import pytest
import yaml

from tests.support.training_run import ROOT


@pytest.mark.timeout(300)
def test_paths_are_seen_from_where_the_user_stands(tmp_path):
    (tmp_path / "own.py").write_text("def loss(inputs, config): ...\n")
    command = ["bash", str(ROOT / "scripts" / "run_async.sh"), "--print-config", "algorithm.loss=own.py:loss"]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert shown.returncode == 0, shown.stderr
    assert yaml.safe_load(shown.stdout)["algorithm"]["loss"] == f"{tmp_path / 'own.py'}:loss"
