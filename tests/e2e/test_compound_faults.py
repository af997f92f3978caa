"""Faults that cost nothing but time, and faults that come together; each kind in one run.

``ASYNCRL_FAULT_ENGINE=sglang`` takes real servers.
"""

import os
import signal
import time

import pytest

from tests.e2e.faults import CONTROLLER, STARTED, assert_it_ends_right, parts_of
from tests.support.training_run import RunningTraining

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1200)]

ENGINE = os.environ.get("ASYNCRL_FAULT_ENGINE", "transformers")
STEPS = 150
GROUPS_PER_STEP = 8
PAUSE_S = 5.0
KILLS_UNTIL_ONE_HITS = 20
RECOVERY_TIMEOUT_S = 240
OPTIONS = [
    f"total_steps={STEPS}",
    f"rollout_fleet.engine={ENGINE}",
    f"algorithm.groups_per_step={GROUPS_PER_STEP}",
    "buffer.durability=disk",
    "learner.keep_snapshots=-1",
    "record_trajectories=true",
    "evaluation.enabled=false",
    "sft.enabled=false",
]
RAY = {"node manager": "raylet/raylet", "control service": "gcs/gcs_server"}


def test_a_process_that_stands_still_for_five_seconds_costs_nothing_but_time(start, tmp_path):
    run = start(*OPTIONS, f"buffer.directory={tmp_path / 'journal'}", "buffer.stores_on=hosts")
    run.wait_for_line(STARTED)
    run.wait_for_step(3)
    pids = {part: run.pid_at(words) for part, words in parts_of(ENGINE, GROUPS_PER_STEP).items()}
    pids |= {part: run.pid_of(words) for part, words in RAY.items()}
    for part, pid in (pids | {CONTROLLER: run.pid_of("asyncrl train")}).items():
        before = run.num_steps
        os.kill(pid, signal.SIGSTOP)
        time.sleep(PAUSE_S)
        os.kill(pid, signal.SIGCONT)
        goes_on(run, before, f"{PAUSE_S:g} s without the {part}")
    check_end(run)
    assert set(run.summary["restarts"].values()) == {0}
    assert "lost" not in run.summary["tokens"]["dropped_by_reason"]
    assert " is back after " not in run.output


def test_a_batch_that_is_lost_between_its_plan_and_its_fetch_is_planned_anew_and_costs_no_learner(start):
    in_memory = [option for option in OPTIONS if "durability" not in option]
    run = start(*in_memory, "buffer.stores_on=hosts", "buffer.restarts=100")
    run.wait_for_line(STARTED)
    for _ in range(KILLS_UNTIL_ONE_HITS):
        run.wait_for_step(run.num_steps + 3, timeout_s=RECOVERY_TIMEOUT_S)
        os.kill(run.pid_at("--store 0"), signal.SIGKILL)
        run.wait_for_line("it was started again at")
        if "its batch is planned anew" in run.output:
            break
    check_end(run)
    restarts = run.summary["restarts"]
    assert restarts["batches"] >= 1
    assert restarts["learner"] == 0


def test_parts_that_die_together_cost_what_each_of_them_would(start, tmp_path):
    run = start(
        *OPTIONS,
        f"buffer.directory={tmp_path / 'journal'}",
        "buffer.num_store_servers=2",
        "checkpoint.every_steps=2",
        "learner.restarts=5",
        "rollout_fleet.num_engines=2",
        "rollout_fleet.restart_backoff_s=0.2",
    )
    run.wait_for_line(STARTED)
    run.wait_for_step(5)
    strike_together(run, "--store 0", "--store 1")
    strike_together(run, "ray::RolloutWorker", "ray::ActorWorker")
    strike_together(run, "ray::ActorWorker", "--store 0")
    before = run.num_steps
    os.kill(run.pid_at("ray::ActorWorker"), signal.SIGKILL)
    run.wait_for_line("the learner starts again from the newest checkpoint")
    os.kill(run.pid_at(f"buffer.server --groups-per-step {GROUPS_PER_STEP}"), signal.SIGKILL)
    run.wait_for_line("the learner goes on from version")
    goes_on(run, before, "the buffer died while the learner was started again")
    for pid in run.pids_at("ray::RolloutWorker"):
        os.kill(pid, signal.SIGKILL)
    goes_on(run, run.num_steps, "all workers died")
    check_end(run)
    assert run.summary["restarts"]["learner"] == 3


def strike_together(run: RunningTraining, *parts: str) -> None:
    """SIGKILL the first process of each part at once, and wait for further steps."""
    before, pids = run.num_steps, [run.pid_at(part) for part in parts]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    goes_on(run, before, f"{' and '.join(parts)} died")


def goes_on(run: RunningTraining, before: int, what: str) -> None:
    """Wait for two steps beyond ``before``, since the first may have been on its way; prints how long they took."""
    began_s = time.monotonic()
    run.wait_for_step(before + 2, timeout_s=RECOVERY_TIMEOUT_S)
    print(f"{what} at step {before}: two steps in {time.monotonic() - began_s:.1f} s")  # noqa: T201


def check_end(run: RunningTraining) -> None:
    """The run is right although all this happened."""
    assert_it_ends_right(run, num_steps=STEPS, groups_per_step=GROUPS_PER_STEP, timeout_s=RECOVERY_TIMEOUT_S)
