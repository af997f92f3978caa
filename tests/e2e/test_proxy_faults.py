"""A network that goes wrong between a worker and its SGLang server, in a whole run: the run goes on and is right."""

import time

import pytest

from tests.e2e.faults import STARTED, assert_nothing_is_left
from tests.e2e.run_checks import (
    assert_every_step_is_made_and_no_version_goes_back,
    assert_every_token_is_accounted_for,
    assert_trained_tokens_have_the_log_prob_of_their_version,
)
from tests.support.faulty_proxy import ANSWERS
from tests.support.leftovers import shared_memory_of
from tests.support.server_proxy import ServerProxy

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]

STEPS = 60
STEPS_BETWEEN = 8


def test_a_run_outlives_whatever_the_network_answers_in_the_place_of_its_server(start):
    proxy = ServerProxy()
    run = start(
        f"total_steps={STEPS}",
        proxy.option,
        "rollout_fleet.restarts=20",
        "rollout_fleet.restart_backoff_s=0.2",
        "rollout_fleet.silence_timeout_s=4",
        "rollout_fleet.load_timeout_s=15",
        "learner.keep_snapshots=-1",
        "record_trajectories=true",
        "algorithm.groups_per_step=8",
        "evaluation.enabled=false",
        "sft.enabled=false",
    )
    with proxy.serving(run):
        run.wait_for_line(STARTED)
        for number, (name, answer) in enumerate(ANSWERS.items()):
            run.wait_for_step(5 + number * STEPS_BETWEEN)
            struck_s = time.monotonic()
            proxy.fail("/generate", "during", answer)
            run.wait_for_line("has ended, epoch", timeout_s=120)
            proxy.heal()
            run.wait_for_line("is back after", timeout_s=240)
            run.wait_for_step(run.num_steps + 1)
            print(f"{name}: a step after {time.monotonic() - struck_s:.1f} s")  # noqa: T201 - the time to recovery
        run.remember_family()
        shared_memory = shared_memory_of(run.family.values())
        assert run.finish(240) == 0, run.output
    assert proxy.num_failed >= len(ANSWERS)
    assert_every_step_is_made_and_no_version_goes_back(run, STEPS)
    assert_every_token_is_accounted_for(run)
    assert_trained_tokens_have_the_log_prob_of_their_version(run, every=7)
    assert_nothing_is_left(run, shared_memory)
