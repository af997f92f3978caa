"""Every row of the table in `tests.e2e.faults`: the run ends as expected and leaves nothing behind.

Without ``-m slow``, `test_own_parts.py` kills a supervisor, `test_resume.py` interrupts a run, and the parts' own tests
kill workers, Ray's daemons and engines.
"""

import os
import random
import time

import pytest

from tests.e2e.faults import CONTROLLER, FAULTS, SUPERVISOR, Fault, assert_nothing_is_left
from tests.support.leftovers import shared_memory_of

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

OPTIONS = ["sft.enabled=false", "evaluation.enabled=false", "total_steps=100000"]
ROWS = [pytest.param(fault, engine, id=f"{fault}-{engine}") for fault in FAULTS for engine in fault.engines]


@pytest.mark.parametrize(("fault", "engine"), ROWS)
def test_a_run_ends_as_the_table_says_and_leaves_nothing(start, fault: Fault, engine: str):
    seed = int(os.environ.get("ASYNCRL_FAULT_SEED", random.randrange(10**6)))
    print(f"ASYNCRL_FAULT_SEED={seed}")  # noqa: T201 - pytest shows it when the test fails
    run = start(*OPTIONS, f"rollout_fleet.engine={engine}", *fault.options)
    run.wait_for_line(fault.moment)
    time.sleep(random.Random(seed).uniform(0.0, 0.5))
    run.remember_family()
    shared_memory = shared_memory_of(run.family.values())
    words = "asyncrl.train" if fault.part == CONTROLLER else fault.part
    os.kill(run.process.pid if fault.part == SUPERVISOR else run.pid_of(words), fault.signal)
    if fault.goes_on:
        struck_s = time.monotonic()
        run.wait_for_line("rollout worker 0 is back" if "RolloutWorker" in fault.part else "serves version")
        print(f"{fault}: back after {time.monotonic() - struck_s:.1f} s")  # noqa: T201 - as above
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
