"""A run whose buffer has keys, store servers and a journal on disk, looked into while it trains."""

import json
import subprocess
import sys

import pytest

from tests.support.training_run import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


def inspect(*arguments):
    command = [sys.executable, "-m", "buffer.inspect", *arguments, "--timeout-s", "10"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_a_run_makes_its_keys_and_shows_its_buffer_to_their_holder_only(start, tmp_path):
    run = start(
        "rollout_fleet.engine=transformers",
        "sft.enabled=false",
        "evaluation.enabled=false",
        "total_steps=100000",
        f"buffer.keys={tmp_path / 'keys'}",
        "buffer.num_store_servers=2",
        "buffer.durability=disk",
        f"buffer.directory={tmp_path / 'journal'}",
        output_dir=tmp_path / "out",
    )
    words = run.wait_for_line("python -m buffer.inspect").partition("buffer.inspect ")[2].split()
    run.wait_for_line("step 1/")
    shown = inspect(*words, "--json")
    assert shown.returncode == 0, shown.stderr
    report = json.loads(shown.stdout)
    assert report["stats"]["learner_version"] >= 1
    assert report["producers"]
    refused = inspect(words[0])
    assert refused.returncode == 1
    assert "refuses this client's key" in refused.stderr
    run.end()
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "keys").iterdir()} == {0o600}
