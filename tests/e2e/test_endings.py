"""However a run ends, it ends soon, says why, and leaves nothing behind.

Every test starts a whole run to end it, so most are ``slow``; `test_resume` ends a run by SIGINT.
"""

import os
import signal
import time

import pytest

pytestmark = pytest.mark.e2e

# Generation in process starts fastest; the tests that need a server ask for one.
FAST = ["rollout_fleet.engine=transformers", "sft.enabled=false", "evaluation.enabled=false", "total_steps=100000"]
END_TIMEOUT_S = 15


def assert_nothing_is_left(run):
    assert run.survivors() == []
    assert not run.left_in_shared_memory()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_within_15_seconds_and_leaves_nothing(start, number):
    run = start(*FAST)
    run.wait_for_line("step 1/")
    run.remember_family()
    run.signal(number)
    assert run.finish(END_TIMEOUT_S) == 128 + number
    assert f"stopped by {number.name}" in run.lines[-1]
    assert_nothing_is_left(run)


@pytest.mark.slow
def test_ctrl_c_while_the_parts_start_ends_the_run(start):
    run = start(*FAST)
    run.wait_for_line("waiting for learner")
    run.remember_family()
    run.signal(signal.SIGINT)
    assert run.finish(END_TIMEOUT_S) == 130
    assert_nothing_is_left(run)


@pytest.mark.parametrize(
    ("process", "part"),
    [
        ("ray::ActorWorker", "learner"),
        pytest.param("buffer.server", "buffer", marks=pytest.mark.slow),
        pytest.param("ray::RolloutWorker", "rollout", marks=pytest.mark.slow),
    ],
)
def test_a_killed_part_ends_the_run_with_its_name(start, process, part):
    run = start(*FAST)
    run.wait_for_line("step 1/")
    run.kill(process)
    assert run.finish(END_TIMEOUT_S) == 1
    last_words = "\n".join(run.lines[-30:])
    assert "error:" in last_words
    assert part in last_words
    assert_nothing_is_left(run)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("process", "part"), [("raylet/raylet", "node manager"), ("gcs/gcs_server", "control service")]
)
def test_a_killed_daemon_of_ray_ends_the_run_with_its_name(start, process, part):
    run = start(*FAST)
    run.wait_for_line("step 1/")
    run.kill(process)
    assert run.finish(END_TIMEOUT_S) == 1
    assert f"error: Ray's {part}" in run.lines[-1]
    assert_nothing_is_left(run)


def test_a_killed_supervisor_takes_the_run_with_it(start):
    run = start(*FAST)
    run.wait_for_line("step 1/")
    run.remember_family()
    run.process.kill()
    run.process.wait(10)
    assert run.survivors(END_TIMEOUT_S) == []
    assert not run.left_in_shared_memory()


@pytest.mark.slow
def test_a_second_signal_ends_a_run_without_its_supervisor_on_the_spot(start):
    run = start(*FAST)
    run.wait_for_line("step 1/")
    run.remember_family()
    controller = run.pid_of("asyncrl.train")
    run.process.kill()
    run.process.wait(10)
    for _ in range(2):
        os.kill(controller, signal.SIGTERM)
        time.sleep(0.2)
    assert run.survivors(END_TIMEOUT_S) == []


@pytest.mark.slow
def test_a_killed_sglang_server_ends_the_run_with_the_tail_of_its_log(start):
    run = start(*FAST, "rollout_fleet.engine=sglang")
    run.wait_for_line("step 1/")
    run.kill("sglang.launch_server")
    assert run.finish(END_TIMEOUT_S) == 1
    last_words = "\n".join(run.lines[-40:])
    assert "error: sglang-0" in last_words
    assert "sglang-0.log" in last_words
    assert_nothing_is_left(run)


@pytest.mark.slow
def test_an_sglang_server_that_does_not_come_up_ends_the_run_with_its_own_words(start):
    run = start(*FAST, "rollout_fleet.engine=sglang", "rollout_fleet.sglang.extra_args=[--no-such-option]")
    assert run.finish(120) == 1
    assert "no-such-option" in "\n".join(run.lines[-40:])
    assert_nothing_is_left(run)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("buffer.max_lag=-1", "buffer.max_lag must be >= 0"),
        pytest.param(
            "buffer.maxlag=1", "unknown option buffer.maxlag; did you mean buffer.max_lag?", marks=pytest.mark.slow
        ),
        pytest.param("data.max_prompt_tokens=3", "max_prompt_tokens", marks=pytest.mark.slow),
        pytest.param("learner.device=cuda", "asks for 2 GPUs", marks=pytest.mark.slow),
    ],
)
def test_a_wrong_option_ends_the_run_before_any_process_starts(start, override, words):
    run = start(*FAST, override)
    assert run.finish(60) != 0
    assert words in "\n".join(run.lines[-5:])
    assert "waiting for rollout" not in run.output
    assert "waiting for learner" not in run.output


@pytest.mark.slow
def test_a_killed_controller_child_is_reported_and_cleaned_up_by_its_supervisor(start):
    run = start(*FAST)
    run.wait_for_line("step 1/")
    run.kill("asyncrl.train")
    assert run.finish(END_TIMEOUT_S) == 1
    assert "the controller died of SIGKILL" in run.output
    assert_nothing_is_left(run)


@pytest.mark.slow
def test_a_killed_warm_start_ends_the_run_with_its_name(start):
    run = start(*FAST, "sft.enabled=true", "sft.target_accuracy=1.01")
    run.wait_for_line("warm start: step")
    run.kill("asyncrl.sft")
    assert run.finish(END_TIMEOUT_S) == 1
    assert "error: the warm start" in run.lines[-1]
    assert_nothing_is_left(run)
