"""The processes of a test session end with the session."""

import os
import subprocess
import uuid

import psutil
import pytest

from tests.support.leftovers import end_leftovers, watch_session

MINE = uuid.uuid4().hex  # a name that no other session has
WAIT = "echo up; read line"


@pytest.fixture
def orphan():
    """Yield a process of a session called `MINE`, in its own process group, like a daemon."""
    process = subprocess.Popen(
        ["sh", "-c", WAIT],
        env=os.environ | {"ASYNCRL_TEST_SESSION": MINE},
        start_new_session=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout.readline() == b"up\n"  # before this line, the environment of the process cannot be read
    yield process
    process.kill()
    process.communicate()


def test_leftover_processes_of_a_session_are_ended_and_named(orphan):
    assert end_leftovers(uuid.uuid4().hex, grace_s=0) == []
    assert orphan.poll() is None
    assert end_leftovers(MINE, grace_s=0) == [f"sh -c {WAIT}"]
    assert not psutil.pid_exists(orphan.pid)


def test_leftover_processes_of_a_killed_session_are_ended(orphan):
    watcher = watch_session(MINE, grace_s=0)
    watcher.stdin.close()  # the kernel does this when the session dies
    assert orphan.wait(60) != 0
    watcher.wait(60)
