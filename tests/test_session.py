"""What a session of tests starts ends with it."""

import os
import subprocess

import psutil
import pytest

from tests.support.leftovers import end_leftovers, watch_session


@pytest.fixture
def orphan():
    """A process of a session called ``mine``, in a group of its own, as daemons are."""
    environment = os.environ | {"ASYNCRL_TEST_SESSION": "mine"}
    process = subprocess.Popen(["sleep", "600"], env=environment, start_new_session=True)
    yield process
    process.kill()


def test_what_a_session_left_is_ended_and_named(orphan):
    assert end_leftovers("another", grace_s=0) == []
    assert orphan.poll() is None
    assert end_leftovers("mine", grace_s=0) == ["sleep 600"]
    assert not psutil.pid_exists(orphan.pid)


def test_a_session_that_is_killed_ends_what_it_left(orphan):
    watcher = watch_session("mine")
    watcher.stdin.close()  # the kernel does this when the session dies
    assert orphan.wait(60) != 0
    watcher.wait(60)
