"""How a run ends after a second signal, a failed server, a wrong option, or a signal to all processes."""

import os
import signal
import time

import pytest

from tests.e2e.run_checks import assert_every_token_is_accounted_for

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

FAST = ["rollout_fleet.engine=transformers", "sft.enabled=false", "evaluation.enabled=false", "total_steps=100000"]
END_TIMEOUT_S = 15


def test_a_second_signal_immediately_ends_a_run_without_its_supervisor(start):
    run = start(*FAST)
    run.wait_for_line("step 1/")
    run.remember_family()
    controller = run.pid_of("asyncrl train")
    run.process.kill()
    run.process.wait(10)
    for _ in range(2):
        os.kill(controller, signal.SIGTERM)
        time.sleep(0.2)
    assert run.survivors(END_TIMEOUT_S) == []


def test_a_failed_start_of_an_sglang_server_ends_the_run_with_the_servers_error(start):
    run = start(*FAST, "rollout_fleet.engine=sglang", "rollout_fleet.sglang.extra_args=[--no-such-option]")
    assert run.finish(120) == 1
    assert "no-such-option" in "\n".join(run.lines[-40:])
    assert run.survivors() == []
    assert not run.left_in_shared_memory()


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("buffer.max_lag=-1", "buffer.max_lag must be >= 0"),
        ("buffer.maxlag=1", "unknown option buffer.maxlag; did you mean buffer.max_lag?"),
        ("data.max_prompt_tokens=3", "max_prompt_tokens"),
        ("learner.device=cuda", "asks for 1 GPU"),
    ],
)
def test_a_wrong_option_ends_the_run_before_any_process_starts(start, override, words):
    run = start(*FAST, override)
    assert run.finish(60) != 0
    assert words in "\n".join(run.lines[-5:])
    assert "waiting for rollout" not in run.output
    assert "waiting for learner" not in run.output


@pytest.mark.parametrize(
    ("number", "engine", "moment"),
    [
        (signal.SIGTERM, "transformers", "step 1/"),
        (signal.SIGINT, "transformers", "step 1/"),
        (signal.SIGTERM, "transformers", "waiting for learner"),
        (signal.SIGTERM, "sglang", "step 1/"),
    ],
)
def test_a_signal_to_all_processes_of_a_run_ends_the_run_and_saves_its_policy(start, number, engine, moment):
    run = start(*FAST, "record_trajectories=true", f"rollout_fleet.engine={engine}")
    run.wait_for_line(moment)
    has_trained = moment == "step 1/"
    run.signal_all(number)
    assert run.finish(60) == 128 + number, run.output
    assert f"stopped by {number.name}" in run.lines[-1]
    assert (run.run_dir / "policy").is_dir() == has_trained
    if has_trained:
        assert_every_token_is_accounted_for(run)
        assert run.summary["tokens"]["dropped_by_reason"].get("lost", 0) == 0, "the worker must report its tokens"
    assert run.survivors(END_TIMEOUT_S) == []
