"""The stack traces that the processes of a run write to the run's folder when a deadline is missed."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.core import stacks
from asyncrl.core.errors import DeadlineError
from asyncrl.core.remote import within

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE_A_RUN = {
    "asyncrl/run/run_socket.py",
    "asyncrl/sft/warm_start.py",
    "asyncrl/core/host.py",
    "rollout_fleet/join.py",
}
"""Files whose waits are outside a run, or wait for processes of other projects."""
CHILD = """
import sys
from asyncrl.core import stacks

stacks.listen(__import__("pathlib").Path(sys.argv[1]), "learner-0")

def hangs_in_a_library():
    sys.stdout.write("up\\n")
    sys.stdout.flush()
    sys.stdin.buffer.raw.read(1)

hangs_in_a_library()
"""


@pytest.fixture
def listening(tmp_path):
    stacks.listen(tmp_path, "controller")
    yield tmp_path / stacks.FOLDER
    stacks.stop()


@pytest.fixture
def child(tmp_path, listening):
    command = [sys.executable, "-c", CHILD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout.readline() == b"up\n"
        yield process
        process.kill()


async def test_a_missed_deadline_leaves_the_stacks_of_both_sides(child, listening):
    with pytest.raises(DeadlineError, match=rf"stacks .* are in {re.escape(str(listening))}"):
        await within(asyncio.sleep(10), 0.1, "the update of step 7", "learner.step_timeout_s")
    theirs = (listening / f"learner-0-{child.pid}.log").read_text()
    assert "waited 0.1 s for the update of step 7" in theirs
    assert "in hangs_in_a_library" in theirs
    own = (listening / f"controller-{os.getpid()}.log").read_text()
    assert "in within" in own, "the stacks of the threads are missing"
    assert "test_a_missed_deadline_leaves" in own, "the tasks of the event loop are missing"


def test_a_deadline_error_names_a_process_that_writes_no_stacks_and_its_state(child, listening):
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    assert f"(no answer of learner-0-{child.pid} (T (stopped)))" in str(stacks.missed("waited 1 s"))
    child.send_signal(signal.SIGCONT)


def test_an_ended_process_is_not_asked_for_stacks_and_its_empty_file_is_removed(child, listening):
    stranger = listening / f"engine-0-{os.getppid()}.log"  # as if the process had ended and another one had its id
    stranger.touch()
    assert "no answer" not in str(stacks.missed("waited 1 s"))
    assert stranger.read_text() == ""
    stacks.stop()
    assert not stranger.exists()
    assert (listening / f"learner-0-{child.pid}.log").exists()


def test_outside_a_run_a_deadline_error_does_not_mention_stacks():
    assert str(stacks.missed("waited 1 s", "; it is late")) == "waited 1 s; it is late"


def test_every_deadline_error_of_a_run_requests_the_stacks():
    files = [file for part in ("asyncrl", "rollout_fleet", "learner", "buffer") for file in (ROOT / part).rglob("*.py")]
    raising = {str(file.relative_to(ROOT)) for file in files if "DeadlineError(" in file.read_text()}
    assert raising == OUTSIDE_A_RUN | {"asyncrl/core/errors.py", "asyncrl/core/stacks.py"}
