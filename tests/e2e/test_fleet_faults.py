"""Faults of the fleet while it trains on real SGLang: servers and workers are killed and stopped, and the run is right.

Every member that is struck comes back; every step is made; every token is accounted for, and has the log-prob of the
version that it names, also where a sample was begun on an engine that died.
"""

import os
import signal
import time

import psutil
import pytest

from tests.e2e.run_checks import (
    assert_every_step_is_made_and_no_version_goes_back,
    assert_every_token_is_accounted_for,
    assert_trained_tokens_have_the_log_prob_of_their_version,
)
from tests.support.training_run import RunningTraining

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(2400)]

STEPS = 300
START_S = 600  # of an engine, on a machine that has other work
CHECKED_EVERY = 97  # samples; each is recomputed under every version that it names


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on two engines in which one member after another is struck while the other goes on."""
    running = RunningTraining(
        tmp_path_factory.mktemp("faults"),
        f"total_steps={STEPS}",
        "rollout_fleet.num_engines=2",
        "rollout_fleet.silence_timeout_s=6",
        "rollout_fleet.load_timeout_s=15",
        "learner.keep_snapshots=-1",
        "record_trajectories=true",
        "algorithm.groups_per_step=16",
        "evaluation.enabled=false",
        "sft.enabled=false",
    )
    try:
        running.wait_for_line("step 1/")
        strike(running, "sglang::scheduler", signal.SIGKILL, "is back after")
        strike(running, "sglang::scheduler", signal.SIGSTOP, "is back after")
        strike(running, "ray::RolloutWorker", signal.SIGKILL, "is back after")
        assert running.finish(timeout_s=1200) == 0, running.output
        yield running
    finally:
        running.end()


def strike(run: RunningTraining, words: str, number: signal.Signals, back: str) -> None:
    """Signal the first process of this name, and wait until its member is back; prints how long that took."""
    run.family = {pid: child for pid, child in run.family.items() if child.is_running() and not is_zombie(child)}
    os.kill(run.pid_of(words), number)
    struck_s = time.monotonic()
    run.wait_for_line(back, timeout_s=START_S)
    print(f"{number.name} of {words}: back after {time.monotonic() - struck_s:.1f} s")  # noqa: T201


def is_zombie(process: psutil.Process) -> bool:
    return process.status() == psutil.STATUS_ZOMBIE


def test_every_step_is_made_and_no_version_goes_back(run):
    assert_every_step_is_made_and_no_version_goes_back(run, STEPS)


def test_every_token_is_accounted_for(run):
    assert_every_token_is_accounted_for(run)


def test_trained_tokens_have_the_log_prob_of_the_version_that_they_name(run):
    assert_trained_tokens_have_the_log_prob_of_their_version(run, every=CHECKED_EVERY)
