"""Many faults in one run.

``ASYNCRL_FAULT_ENGINE=sglang`` uses real SGLang servers. The tests print how long each recovery takes, and the seed of
the random faults. ``ASYNCRL_FAULT_SEED=N`` repeats the faults.
"""

import os
import random
import signal
import time

import pytest

from tests.e2e.faults import CONTROLLER, STARTED, assert_it_ends_right, parts_of
from tests.support.faulty_proxy import ANSWERS
from tests.support.server_proxy import ServerProxy
from tests.support.training_run import RunningTraining

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(3000)]

ENGINE = os.environ.get("ASYNCRL_FAULT_ENGINE", "transformers")
STEPS = 150
GROUPS_PER_STEP = 8
PAUSE_S = 5.0
KILLS_UNTIL_ONE_HITS = 20
RECOVERY_TIMEOUT_S = 240
PARTS = parts_of(ENGINE, GROUPS_PER_STEP)
RAY = {"node manager": "raylet/raylet", "control service": "gcs/gcs_server"}
CHECKED = [
    "learner.keep_snapshots=-1",
    "record_trajectories=true",
    "evaluation.enabled=false",
    "sft.enabled=false",
    f"algorithm.groups_per_step={GROUPS_PER_STEP}",
]
OPTIONS = [*CHECKED, f"total_steps={STEPS}", f"rollout_fleet.engine={ENGINE}", "buffer.durability=disk"]
SHORT_SILENCE = ["rollout_fleet.silence_timeout_s=6", "rollout_fleet.load_timeout_s=15"]


def test_a_process_paused_for_five_seconds_only_delays_the_run(start, tmp_path):
    run = start(*OPTIONS, f"buffer.directory={tmp_path / 'journal'}", "buffer.stores_on=hosts")
    run.wait_for_line(STARTED)
    run.wait_for_step(3)
    pids = {part: run.pid_at(words) for part, words in PARTS.items()}
    pids |= {part: run.pid_of(words) for part, words in RAY.items()}
    for part, pid in (pids | {CONTROLLER: run.pid_of("asyncrl train")}).items():
        before = run.num_steps
        os.kill(pid, signal.SIGSTOP)
        time.sleep(PAUSE_S)
        os.kill(pid, signal.SIGCONT)
        run.goes_on(f"{PAUSE_S:g} s without the {part}", before=before)
    assert_it_ends_right(run, num_steps=STEPS, timeout_s=RECOVERY_TIMEOUT_S)
    assert set(run.summary["restarts"].values()) == {0}
    assert "lost" not in run.summary["tokens"]["dropped_by_reason"]
    assert " is back after " not in run.output


def test_a_batch_lost_between_plan_and_fetch_is_planned_again_without_a_learner_restart(start):
    in_memory = [option for option in OPTIONS if "durability" not in option]
    run = start(*in_memory, "buffer.stores_on=hosts", "buffer.restarts=100")
    run.wait_for_line(STARTED)
    for _ in range(KILLS_UNTIL_ONE_HITS):
        run.wait_for_step(run.num_steps + 3, timeout_s=RECOVERY_TIMEOUT_S)
        os.kill(run.pid_at("--store 0"), signal.SIGKILL)
        run.wait_for_line("it was started again at")
        if "its batch is planned again" in run.output:
            break
    assert_it_ends_right(run, num_steps=STEPS, timeout_s=RECOVERY_TIMEOUT_S)
    restarts = run.summary["restarts"]
    assert restarts["batches"] >= 1
    assert restarts["learner"] == 0


def test_a_run_survives_simultaneous_deaths_of_several_parts(start, tmp_path):
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
    os.kill(run.pid_at(PARTS["buffer"]), signal.SIGKILL)
    run.wait_for_line("the learner continues from version")
    run.goes_on("the buffer died while the learner was started again", before=before)
    for pid in run.pids_at("ray::RolloutWorker"):
        os.kill(pid, signal.SIGKILL)
    run.goes_on("all workers died")
    assert_it_ends_right(run, num_steps=STEPS, timeout_s=RECOVERY_TIMEOUT_S)
    assert run.summary["restarts"]["learner"] == 3


def strike_together(run: RunningTraining, *parts: str) -> None:
    """Send SIGKILL to the first process of each part at the same time, and wait for further steps."""
    before, pids = run.num_steps, [run.pid_at(part) for part in parts]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    run.goes_on(f"{' and '.join(parts)} died", before=before)


def test_a_run_is_correct_after_random_kills_and_stalls_of_any_part(start, tmp_path):
    num_faults, steps_between, first = 20, 5, 5
    # Add 100 steps, because the run can make more than five steps between two faults.
    num_steps = first + num_faults * steps_between + 100
    seed = int(os.environ.get("ASYNCRL_FAULT_SEED", random.randrange(10**6)))
    print(f"ASYNCRL_FAULT_SEED={seed}")  # noqa: T201 - pytest shows it when the test fails
    draw = random.Random(seed)
    run = start(
        *OPTIONS,
        *SHORT_SILENCE,
        f"total_steps={num_steps}",
        "rollout_fleet.num_engines=2",
        "rollout_fleet.restarts=100",
        "rollout_fleet.restart_backoff_s=0.2",
        f"buffer.directory={tmp_path / 'journal'}",
        "buffer.stores_on=hosts",
        "buffer.restarts=100",
        "buffer.request_timeout_s=12",
        "learner.restarts=100",
        "learner.step_timeout_s=12",
        "checkpoint.every_steps=2",
    )
    run.wait_for_line(STARTED)
    for number in range(num_faults):
        run.wait_for_step(first + number * steps_between, timeout_s=RECOVERY_TIMEOUT_S)
        time.sleep(draw.uniform(0.0, 1.0))
        part, sent = draw.choice(sorted(PARTS)), draw.choice([signal.SIGKILL, signal.SIGSTOP])
        if pids := run.pids_at(PARTS[part]):
            before = run.num_steps
            os.kill(draw.choice(pids), sent)
            run.goes_on(f"fault {number}, {sent.name} of {part}", before=before)
        else:
            print(f"fault {number}: no {part} to strike, it is being started again")  # noqa: T201
    assert_it_ends_right(run, num_steps=num_steps, timeout_s=RECOVERY_TIMEOUT_S)


def test_a_run_survives_each_kind_of_wrong_http_answer_of_an_sglang_server(start):
    proxy, num_steps = ServerProxy(), 60
    restarts = ["rollout_fleet.restarts=20", "rollout_fleet.restart_backoff_s=0.2", "rollout_fleet.silence_timeout_s=4"]
    run = start(*CHECKED, f"total_steps={num_steps}", proxy.option, "rollout_fleet.load_timeout_s=15", *restarts)
    with proxy.serving(run):
        run.wait_for_line(STARTED)
        for number, (name, answer) in enumerate(ANSWERS.items()):
            run.wait_for_step(5 + number * 8)
            struck_s = time.monotonic()
            proxy.fail("/generate", "during", answer)
            run.wait_for_line("has ended, epoch", timeout_s=120)
            proxy.heal()
            run.wait_for_line("is back after", timeout_s=240)
            run.wait_for_step(run.num_steps + 1)
            print(f"{name}: a step after {time.monotonic() - struck_s:.1f} s")  # noqa: T201
        assert_it_ends_right(run, num_steps=num_steps, timeout_s=240, every=7)
    assert proxy.num_failed >= len(ANSWERS)


def test_killed_or_paused_servers_and_workers_recover_and_the_run_is_correct(start):
    """Each fault hits one of two rollout workers. The engine of the other worker continues the samples."""
    sixteen = ["algorithm.groups_per_step=16", "rollout_fleet.num_engines=2", "total_steps=300"]
    run = start(*CHECKED, *SHORT_SILENCE, *sixteen)
    run.wait_for_line("step 1/")
    for words, number in (
        ("sglang::scheduler", signal.SIGKILL),
        ("sglang::scheduler", signal.SIGSTOP),
        ("ray::RolloutWorker", signal.SIGKILL),
    ):
        os.kill(run.pids_at(words)[0], number)
        struck_s = time.monotonic()
        run.wait_for_line("is back after", timeout_s=600)  # the timeout is long, because the machine may be busy
        print(f"{number.name} of {words}: back after {time.monotonic() - struck_s:.1f} s")  # noqa: T201
    assert_it_ends_right(run, num_steps=300, timeout_s=1200, groups_per_step=16, every=97)
