"""A process of a run is paused by SIGSTOP in any phase, and then continues.

If the pause is shorter than the deadline of the process, the run continues. If the pause is longer, the process is
replaced, or the run ends with an error that names the process. ``ASYNCRL_FAULT_ENGINE=sglang`` uses real servers.
"""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from tests.e2e.faults import CONTROLLER, FLEET_STARTS, STARTED, STOPS, parts_of
from tests.e2e.run_checks import assert_every_step_is_made_and_no_version_goes_back, assert_every_token_is_accounted_for
from tests.support.training_run import RunningTraining

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

ENGINE = os.environ.get("ASYNCRL_FAULT_ENGINE", "transformers")
STEPS = 40
GROUPS_PER_STEP = 8
DEADLINE_S = 12.0
STALLS_S = [1.0, 5.0, 1.5 * DEADLINE_S]
END_TIMEOUT_S = 300.0
PARTS = parts_of(ENGINE, GROUPS_PER_STEP) | {CONTROLLER: "asyncrl train"}


def evaluates(run: RunningTraining) -> None:
    run.wait_for_step(9)  # after step 9 the run evaluates version 10


def loads(run: RunningTraining) -> None:
    run.wait_for_step(3)
    _wait_for_new(run, "snapshots")


def saves(run: RunningTraining) -> None:
    run.wait_for_step(3)
    _wait_for_new(run, "checkpoints")


def _wait_for_new(run: RunningTraining, folder: str) -> None:
    """Wait until ``folder`` in the run's folder contains a new file."""
    path, deadline = run.run_dir / folder, time.monotonic() + 60
    before = set(os.listdir(path)) if path.is_dir() else set()
    while not path.is_dir() or set(os.listdir(path)) <= before:
        assert time.monotonic() < deadline, f"no new file in {path}"
        time.sleep(0.005)


PHASES: dict[str, Callable[[RunningTraining], object]] = {
    "start": lambda run: run.wait_for_line(FLEET_STARTS),
    "training": lambda run: run.wait_for_step(3),
    "evaluation": evaluates,
    "load": loads,
    "checkpoint": saves,
    "stop": lambda run: run.wait_for_line(STOPS),
}


@pytest.mark.parametrize("stall_s", STALLS_S)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("phase", PHASES)
def test_a_run_continues_or_names_the_paused_part_after_a_pause_in_any_phase(start, tmp_path, phase, part, stall_s):
    run = start(
        f"total_steps={STEPS}",
        f"rollout_fleet.engine={ENGINE}",
        "rollout_fleet.num_engines=2",
        "rollout_fleet.silence_timeout_s=6",
        "rollout_fleet.load_timeout_s=15",
        f"algorithm.groups_per_step={GROUPS_PER_STEP}",
        "buffer.durability=disk",
        f"buffer.directory={tmp_path / 'journal'}",
        "buffer.stores_on=hosts",
        f"buffer.request_timeout_s={DEADLINE_S:g}",
        f"learner.step_timeout_s={DEADLINE_S:g}",
        "learner.restarts=3",
        "learner.keep_snapshots=-1",
        "checkpoint.every_steps=2",
        "evaluation.every_steps=10",
        "record_trajectories=true",
        "sft.enabled=false",
    )
    run.wait_for_line(STARTED)
    PHASES[phase](run)
    run.remember_family()
    pids = run.pids_at(PARTS[part]) if part != CONTROLLER else [run.pid_of(PARTS[part])]
    if not pids:
        pytest.skip(f"no process of the {part} runs at this moment")
    os.kill(pids[0], signal.SIGSTOP)
    time.sleep(stall_s)
    with suppress(ProcessLookupError):  # the run has already replaced the process
        os.kill(pids[0], signal.SIGCONT)
    began_s = time.monotonic()
    status = run.finish(END_TIMEOUT_S)
    print(f"{part}, {phase}, {stall_s:g} s: status {status} after {time.monotonic() - began_s:.1f} s")  # noqa: T201
    if status == 0:
        assert_every_step_is_made_and_no_version_goes_back(run, STEPS)
        assert_every_token_is_accounted_for(run)
    else:
        assert stall_s > DEADLINE_S, run.output
        assert phase == "start", run.output
        assert "error: " in run.output
    assert run.survivors() == []
