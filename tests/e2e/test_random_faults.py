"""Twenty random faults in one run: its parts are killed and stopped at random moments, and the run is right.

The seed is printed; ``ASYNCRL_FAULT_SEED=N`` repeats it. ``ASYNCRL_FAULT_ENGINE=sglang`` takes real servers.
"""

import os
import random
import signal
import time

import pytest

from tests.e2e.faults import STARTED, assert_it_ends_right, parts_of

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(3000)]

FAULTS = 20
STEPS_BETWEEN = 5
FIRST_STEP = 5
STEPS = FIRST_STEP + FAULTS * STEPS_BETWEEN + 100  # what makes up for a pause may run ahead of the faults
GROUPS_PER_STEP = 8
ENGINE = os.environ.get("ASYNCRL_FAULT_ENGINE", "transformers")
PARTS = parts_of(ENGINE, GROUPS_PER_STEP)
RECOVERY_TIMEOUT_S = 240


def test_a_run_is_right_whatever_dies_or_hangs_when(start, tmp_path):
    seed = int(os.environ.get("ASYNCRL_FAULT_SEED", random.randrange(10**6)))
    print(f"ASYNCRL_FAULT_SEED={seed}")  # noqa: T201 - pytest shows it when the test fails
    draw = random.Random(seed)
    run = start(
        f"total_steps={STEPS}",
        f"rollout_fleet.engine={ENGINE}",
        "rollout_fleet.num_engines=2",
        "rollout_fleet.restarts=100",
        "rollout_fleet.restart_backoff_s=0.2",
        "rollout_fleet.silence_timeout_s=6",
        "rollout_fleet.load_timeout_s=15",
        f"algorithm.groups_per_step={GROUPS_PER_STEP}",
        "buffer.durability=disk",
        f"buffer.directory={tmp_path / 'journal'}",
        "buffer.stores_on=hosts",
        "buffer.restarts=100",
        "buffer.request_timeout_s=12",
        "learner.restarts=100",
        "learner.step_timeout_s=12",
        "learner.keep_snapshots=-1",
        "checkpoint.every_steps=2",
        "record_trajectories=true",
        "evaluation.enabled=false",
        "sft.enabled=false",
    )
    run.wait_for_line(STARTED)
    for number in range(FAULTS):
        run.wait_for_step(FIRST_STEP + number * STEPS_BETWEEN, timeout_s=RECOVERY_TIMEOUT_S)
        time.sleep(draw.uniform(0.0, 1.0))
        strike(run, draw, number)
    assert_it_ends_right(run, num_steps=STEPS, groups_per_step=GROUPS_PER_STEP, timeout_s=RECOVERY_TIMEOUT_S)


def strike(run, draw: random.Random, number: int) -> None:
    """Kill or stop one process of a part, and print how long the next step took to come."""
    part, sent = draw.choice(sorted(PARTS)), draw.choice([signal.SIGKILL, signal.SIGSTOP])
    pids = run.pids_at(PARTS[part])
    if not pids:  # it is being started again
        print(f"fault {number}: no {part} to strike")  # noqa: T201 - as above
        return
    before, struck_s = run.num_steps, time.monotonic()
    os.kill(draw.choice(pids), sent)
    run.wait_for_step(before + 2, timeout_s=RECOVERY_TIMEOUT_S)  # the first may have been on its way
    print(f"fault {number}: {sent.name} of {part} at step {before}, two steps in {time.monotonic() - struck_s:.1f} s")  # noqa: T201
