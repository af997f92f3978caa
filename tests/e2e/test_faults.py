"""Runs every row of the tables in `tests.e2e.faults`."""

import os
import random
import time

import pytest

from tests.e2e.faults import (
    CONTROLLER,
    FAULTS,
    LAST,
    RECOVERIES,
    SELDOM,
    STARTED,
    STEPS,
    SUPERVISOR,
    assert_it_ends_right,
    assert_nothing_is_left,
)
from tests.support.leftovers import shared_memory_of

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

OPTIONS = ["sft.enabled=false", "evaluation.enabled=false", "total_steps=100000"]
ROWS = [pytest.param(fault, engine, id=f"{fault}-{engine}") for fault in FAULTS for engine in fault.engines]


@pytest.mark.parametrize(("fault", "engine"), ROWS)
def test_a_run_ends_as_the_table_of_faults_says_and_leaves_nothing_behind(start, fault, engine):
    seed = int(os.environ.get("ASYNCRL_FAULT_SEED", random.randrange(10**6)))
    print(f"ASYNCRL_FAULT_SEED={seed}")  # noqa: T201 - pytest shows it when the test fails
    run = start(*OPTIONS, f"rollout_fleet.engine={engine}", *fault.options)
    run.wait_for_line(fault.moment)
    time.sleep(random.Random(seed).uniform(0.0, fault.within_s))
    run.remember_family()
    shared_memory = shared_memory_of(run.family.values())
    words = "asyncrl train" if fault.part == CONTROLLER else fault.part
    os.kill(run.process.pid if fault.part == SUPERVISOR else run.wait_for_process(words), fault.signal)
    if fault.goes_on:
        struck_s = time.monotonic()
        run.wait_for_line("rollout worker 0 is back")
        print(f"{fault}: back after {time.monotonic() - struck_s:.1f} s")  # noqa: T201 - shown by pytest -s
        run.wait_for_line("step ")
        run.wait_for_line("step ")
        run.process.terminate()
    assert run.finish(fault.end_timeout_s) == fault.status, run.output
    last_words = "\n".join(run.lines[-40:])
    for words in fault.words:
        assert words in last_words
    assert "memory ran out" not in last_words or fault.part == CONTROLLER
    assert "Traceback" not in "\n".join(run.lines[-5:])
    assert_nothing_is_left(run, shared_memory)


@pytest.mark.parametrize("engine", ["transformers", "sglang"])
@pytest.mark.parametrize("recovery", [*RECOVERIES, *SELDOM], ids=str)
def test_a_run_survives_the_fault_and_makes_all_steps(start, tmp_path, recovery, engine):
    run = start(
        f"total_steps={STEPS}",
        "sft.enabled=false",
        "evaluation.enabled=false",
        f"rollout_fleet.engine={engine}",
        "algorithm.groups_per_step=8",
        "record_trajectories=true",
        *(option.format(folder=tmp_path) for option in recovery.options),
    )
    run.wait_for_line(STARTED)
    if recovery.moment:
        run.wait_for_line(recovery.moment)
    else:
        run.wait_for_step(recovery.after_steps)
    os.kill(run.pid_at(recovery.part), recovery.signal)
    began_s = time.monotonic()
    if recovery.words:
        run.wait_for_line(recovery.words, timeout_s=120)
    elif recovery.after_steps < LAST:
        run.wait_for_step(run.num_steps + 3, timeout_s=120)
    print(f"recovered from {recovery} within {time.monotonic() - began_s:.1f} s")  # noqa: T201 - shown by pytest -s
    assert_it_ends_right(run, num_steps=STEPS, timeout_s=240, every=0)
    assert recovery.restarts.items() <= run.summary["restarts"].items()
