"""All processes of a test session end when the session ends."""

import os
import subprocess
import uuid

import psutil
import pytest

from tests.support.leftovers import end_leftovers, watch_session

MINE = uuid.uuid4().hex  # the name of a test session that only this file uses
WAIT = "echo up; read line"


@pytest.fixture
def orphan():
    """Yield a process that belongs to the test session `MINE`. Like a daemon, it has its own process group."""
    process = subprocess.Popen(
        ["sh", "-c", WAIT],
        env=os.environ | {"ASYNCRL_TEST_SESSION": MINE},
        start_new_session=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout.readline() == b"up\n"  # the process prints this when psutil can read its environment
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
    watcher.stdin.close()  # when a test session dies, the kernel closes the watcher's stdin
    assert orphan.wait(60) != 0
    watcher.wait(60)
