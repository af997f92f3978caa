"""Ranks and engines that share devices die in every phase, and the run continues."""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.faults import assert_it_ends_right
from tests.support.training_run import undocumented

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]

RANK, WORKER, SERVER = "ray::ActorWorker", "ray::RolloutWorker", "sglang::scheduler"
STEPS = 12
LOSS = """
import pathlib
import time
from learner.losses import LossTerms, by_token

@by_token
def slow(inputs, config):
    pathlib.Path({mark!r}).touch()
    time.sleep(0.1)
    return LossTerms(per_token=-inputs.columns["advantages"] * inputs.log_probs)
"""


@pytest.fixture
def started(start, tmp_path):
    """Return a function that starts colocated runs. The loss function of such a run creates the file ``mark``."""
    mark, loss = tmp_path / "trains", tmp_path / "own_loss.py"
    loss.write_text(LOSS.format(mark=str(mark)))

    def run(engine, num_ranks, *options):
        run = start(
            f"total_steps={STEPS}",
            "sft.enabled=false",
            "evaluation.enabled=false",
            "placement.colocated=true",
            f"rollout_fleet.engine={engine}",
            f"learner.num_ranks={num_ranks}",
            f"rollout_fleet.num_engines={num_ranks}",
            "learner.offload_at_transition_only=true",
            "algorithm.groups_per_step=8",
            f"algorithm.loss={loss}:slow",
            "checkpoint.every_steps=2",
            "weights.transport=file",
            "learner.keep_snapshots=-1",
            "record_trajectories=true",
            *options,
        )
        run.mark = mark
        return run

    return run


def wait_for(is_true, timeout_s=120.0):
    until_s = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < until_s, "the phase must begin in time"
        time.sleep(0.002)


def wait_for_phase(run, phase):
    """Wait for a phase of the run: ``trains``, ``hands over`` (the learner has just published), or ``generates``."""
    run.wait_for_line("step 1/")
    run.wait_for_step(5)
    if phase == "trains":
        Path(run.mark).unlink()
        wait_for(Path(run.mark).exists)
    elif phase == "hands over":
        newest = max(path.name for path in (run.run_dir / "snapshots").glob("v*"))
        wait_for(lambda: max(path.name for path in (run.run_dir / "snapshots").glob("v*")) > newest)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["trains", "hands over", "generates"])
@pytest.mark.parametrize(("engine", "num_ranks"), [("transformers", 2), ("sglang", 1)])
def test_a_colocated_run_survives_the_death_of_a_rank_in_each_phase(started, engine, num_ranks, phase):
    run = started(engine, num_ranks)
    wait_for_phase(run, phase)
    os.kill(run.pids_at(RANK)[-1], signal.SIGKILL)
    run.wait_for_line("the learner continues from version", timeout_s=120)
    assert_it_ends_right(run, num_steps=STEPS, timeout_s=300)
    assert run.summary["restarts"]["learner"] == 1
    assert "rollout worker 0 has ended" not in run.output


def test_colocated_roles_survive_a_rank_death_and_release_the_device_in_each_step(started):
    """Each of two sequence-parallel ranks has actor, critic and reference. Ranks and engines share two devices."""
    run = started("transformers", 2, "learner.sp_size=2", "algorithm.advantage=gae", "algorithm.kl_coef=0.01")
    wait_for_phase(run, "hands over")
    os.kill(run.pids_at("ray::FusedWorker")[-1], signal.SIGKILL)
    run.wait_for_line("the learner continues from version", timeout_s=120)
    assert_it_ends_right(run, num_steps=STEPS, timeout_s=300)
    assert run.summary["restarts"]["learner"] == 1
    assert "rollout worker 0 has ended" not in run.output
    for record in run.records:
        for role in ("learner.", "learner.critic."):
            assert record[f"{role}rollout_device_bytes_before"] > 0
            assert record[f"{role}rollout_device_bytes_after"] == 0
            assert record[f"{role}trainer_device_bytes_after"] == record[f"{role}rollout_device_bytes_before"]
    assert undocumented(run.records[-1]) == []


@pytest.mark.slow
def test_a_colocated_run_with_tensor_parallel_engines_survives_the_death_of_a_rank(started):
    run = started("sglang", 2, "rollout_fleet.num_engines=1", "rollout_fleet.sglang.tp_size=2")
    wait_for_phase(run, "generates")
    os.kill(run.pids_at(RANK)[-1], signal.SIGKILL)
    run.wait_for_line("the learner continues from version", timeout_s=120)
    assert_it_ends_right(run, num_steps=STEPS, timeout_s=300)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["trains", "hands over", "generates"])
@pytest.mark.parametrize(("engine", "part"), [("transformers", WORKER), ("sglang", WORKER), ("sglang", SERVER)])
def test_a_colocated_run_survives_the_death_of_an_engine_in_each_phase(started, engine, part, phase):
    run = started(engine, 1)
    wait_for_phase(run, phase)
    os.kill(run.pid_at(part), signal.SIGKILL)
    run.wait_for_line("rollout worker 0 is back", timeout_s=120)
    assert_it_ends_right(run, num_steps=STEPS, timeout_s=300)
    assert run.summary["restarts"]["learner"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["transformers", "sglang"])
def test_a_colocated_run_survives_deaths_of_ranks_and_engines_at_any_time(started, engine):
    seed = int(os.environ.get("ASYNCRL_FAULT_SEED", random.randrange(10**6)))
    print(f"ASYNCRL_FAULT_SEED={seed}")  # noqa: T201 - pytest shows it when the test fails
    dice = random.Random(seed)
    run = started(
        engine, 1, "learner.restarts=100", "rollout_fleet.restarts=100", "rollout_fleet.restart_backoff_s=0.1"
    )
    run.wait_for_line("step 1/")
    for _ in range(8):
        time.sleep(dice.uniform(0.0, 6.0))
        for part in dice.choice([[RANK], [RANK], [WORKER], [RANK, WORKER]]):
            for pid in run.pids_at(part)[-1:]:
                os.kill(pid, signal.SIGKILL)
    assert_it_ends_right(run, num_steps=STEPS, timeout_s=600)
