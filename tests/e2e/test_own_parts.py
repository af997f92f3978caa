"""A run with all kinds of user code and options: a reward, a loss, an advantage, keys, store servers, a journal."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.e2e.faults import assert_nothing_is_left
from tests.support.leftovers import shared_memory_of
from tests.support.training_run import ROOT, RunningTraining

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]

OWN = """
from beside import SCALE
from learner.losses import LossTerms
from learner.losses import LOSSES
from learner.advantages import TokenAdvantages, returns_to_go, token_level


@LOSSES.register("my_name")
def scaled(inputs, config):
    per_token = -SCALE * inputs.columns["advantages"] * inputs.log_probs
    return LossTerms(per_token=per_token, metrics={
        "advantage_seen": inputs.columns["advantages"], "version_seen": inputs.columns["versions"]
    })


@token_level
def sevens(batch, config, total):
    returns = returns_to_go(batch.rewards, batch.lengths, gamma=config.gamma)
    return TokenAdvantages(advantages=0 * returns + 7, returns=returns)
"""
FAST = ["rollout_fleet.engine=transformers", "sft.enabled=false", "evaluation.enabled=false", "total_steps=100000"]


@pytest.fixture(scope="module")
def own_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mine")
    (folder / "own.py").write_text(OWN)
    (folder / "beside.py").write_text("SCALE = 0.5\n\n\ndef parity(prompt, text):\n    return len(text) % 2 + 10\n")
    return folder


@pytest.fixture(scope="module")
def run(own_folder, tmp_path_factory):
    root = tmp_path_factory.mktemp("run")
    running = RunningTraining(
        root / "out",
        *FAST,
        "algorithm.groups_per_step=4",
        "algorithm.samples_per_prompt=2",
        "algorithm.num_mini_batches=2",
        "algorithm.loss=own.py:my_name",
        "algorithm.advantage=own.py:sevens",
        "rollout_fleet.reward=beside.py:parity",
        f"buffer.keys={root / 'keys'}",
        "buffer.stores_on=hosts",
        "buffer.durability=disk",
        f"buffer.directory={root / 'journal'}",
        cwd=own_folder,
    )
    try:
        running.inspector = running.wait_for_line("python -m buffer.inspect").partition("buffer.inspect ")[2].split()
        running.wait_for_line("step 1/")
        yield running
    finally:
        running.end()


def inspect(*arguments):
    command = [sys.executable, "-m", "buffer.inspect", *arguments, "--timeout-s", "10"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_inspect_shows_the_buffer_of_a_run_only_with_a_key(run):
    shown = inspect(*run.inspector, "--json")
    assert shown.returncode == 0, shown.stderr
    report = json.loads(shown.stdout)
    assert report["stats"]["learner_version"] >= 1
    assert report["producers"]
    refused = inspect(run.inspector[0])
    assert refused.returncode == 1
    assert "refuses this client's key" in refused.stderr
    keys = run.output_dir.parent / "keys"
    assert {path.stat().st_mode & 0o777 for path in keys.iterdir()} == {0o600}


def test_a_run_trains_with_the_users_reward_loss_and_advantage(run):
    assert run.records
    assert "warm start" not in run.output, "the run must not have a warm start"
    for record in run.records:
        assert record["learner.advantage_seen"] == pytest.approx(7.0)
        assert 0 <= record["learner.version_seen"] <= record["step"]
        assert 10 <= record["reward"] <= 11
        assert 0 < record["learner.effective_sample_size"] <= 1.0 + 1e-6
        assert record["learner.behavior_kl"] >= -1e-6


def test_logs_of_a_run_have_no_warning_about_torchvisions_image_extension(run):
    logs = {path.name: path.read_text() for path in (run.run_dir / "logs").glob("*.log")}
    assert {"controller.log", "learner-0.log", "rollout-0.log"} <= logs.keys()
    assert [name for name, text in logs.items() if "Failed to load image Python extension" in text] == []


def test_training_continues_after_the_buffer_server_is_killed_and_restarted(run):
    os.kill(run.pid_at("buffer.server --groups-per-step 4"), signal.SIGKILL)
    line = run.wait_for_line("it was started again at", timeout_s=60)
    assert "died with status -9" in line
    assert run.inspector[0] in line, "the server must restart at its old address"
    run.wait_for_step(run.num_steps + 5, timeout_s=60)
    steps = [record["step"] for record in run.records]
    assert steps == list(range(len(steps)))
    report = json.loads(inspect(*run.inspector, "--json").stdout)
    assert report["stats"]["tokens_dropped"] == {}, "no lease may be lost"


def test_training_continues_after_the_keys_of_a_run_are_replaced(run):
    keys = run.output_dir.parent / "keys"
    before = {path.name: path.read_text() for path in keys.iterdir()}
    command = [sys.executable, "-m", "asyncrl", "keys", str(run.run_dir)]
    asked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert asked.stdout == f"replaced the keys in {keys}\n", asked.stderr
    after = {path.name: path.read_text() for path in keys.iterdir()}
    assert after.keys() == before.keys()
    assert [name for name in before if before[name] == after[name]] == []
    run.wait_for_step(run.num_steps + 10, timeout_s=60)
    report = json.loads(inspect(*run.inspector, "--json").stdout)
    assert report["stats"]["tokens_dropped"] == {}, "no lease may be lost"


def test_a_run_ends_and_leaves_nothing_when_its_supervisor_is_killed(run):
    run.remember_family()
    shared_memory = shared_memory_of(run.family.values())
    os.kill(run.process.pid, signal.SIGKILL)
    assert run.finish(60) == -signal.SIGKILL
    assert_nothing_is_left(run, shared_memory)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.loss=own.py:missing", "own.py has no 'missing', but has"),
        ("algorithm.advantage=absent.py:f", "there is no file"),
        ("algorithm.loss=ppo", "algorithm.loss must be one of ['cispo', 'gspo', 'ppo_clip', 'reinforce']"),
    ],
)
def test_a_wrong_name_fails_before_any_process_starts(start, own_folder, tmp_path, override, message):
    """`tests/asyncrl/test_train_command.py` tests wrong names with a scripted run."""
    run = start(override, output_dir=tmp_path / "out", cwd=own_folder)
    assert run.finish(timeout_s=120) in (1, 2)
    assert message in run.lines[-1]
    assert "waiting for learner" not in run.output
    assert "warm start" not in run.output


@pytest.mark.slow
def test_a_prompt_that_is_too_long_fails_before_the_warm_start(start, own_folder, tmp_path):
    """`tests/asyncrl/test_prepare.py` tests that reading the prompts raises this error."""
    run = start("data.max_prompt_tokens=6", output_dir=tmp_path / "out", cwd=own_folder)
    assert run.finish(timeout_s=120) == 1
    assert "data.max_prompt_tokens = 6" in run.lines[-1] + run.output
    assert not list(run.output_dir.glob("*/*/logs")), "a failed start must not leave a folder"
    assert "warm start" not in run.output
