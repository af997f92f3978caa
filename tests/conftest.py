"""How a session of tests runs: its shared Ray cluster, its split over processes, and its end.

With ``pytest -n 2 --dist loadgroup``, as `scripts/test.sh` runs it, a test file stays on one process, and so do all
tests that use the shared cluster, and all that start whole training runs: two of those at once would starve each other.
"""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.leftovers import end_leftovers, name_session, watch_session
from tests.support.ray_cluster import two_node_cluster

ROOT = Path(__file__).resolve().parents[1]
_SESSION = pytest.StashKey[str]()
_WATCHER = pytest.StashKey[subprocess.Popen]()


def pytest_configure(config):
    # Processes that tests start find the packages and `tests.support`, wherever they run.
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    if not hasattr(config, "workerinput"):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # fixtures end what they started
            signal.signal(number, signal.default_int_handler)
        config.stash[_SESSION] = name_session()
        config.stash[_WATCHER] = watch_session(config.stash[_SESSION])


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    if (watcher := config.stash.get(_WATCHER, None)) is None:
        return
    for words in end_leftovers(config.stash[_SESSION]):
        config.get_terminal_writer().line(f"left behind by a test, and ended now: {words[:300]}", red=True)
    watcher.stdin.close()
    watcher.wait(30)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_group(item)))
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=_rank)


def _group(item):
    if "cluster" in item.fixturenames:
        return "ray"
    if item.path.parent.name == "e2e":
        return "whole runs"
    return str(item.path.relative_to(ROOT))


def _rank(item):
    """The longest groups go first, so that neither process waits for the other at the end."""
    group = item.get_closest_marker("xdist_group").args[0]
    longest = ("whole runs", "ray", "tests/rollout_fleet", "tests/learner")
    return next((rank for rank, name in enumerate(longest) if group.startswith(name)), len(longest))


@pytest.fixture(scope="session")
def cluster():
    """The Ray cluster of all tests that need one, because to start one takes as long as most of them.

    A second one in the same process works; `tests/single_controller/test_two_clusters.py` is about that.
    """
    with two_node_cluster() as cluster:
        yield cluster
