"""Setup of a test session: the shared Ray cluster, the split of tests over processes, and the cleanup.

With ``pytest -n 2``, each test file runs in one process. All tests with the shared cluster run in one process. All
tests that start training runs also run in one process, because two simultaneous runs are too slow.
"""

import gc
import os
import signal
import subprocess
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.leftovers import end_leftovers, name_session, watch_session
from tests.support.ray_cluster import two_node_cluster
from tests.support.virtual_time import virtual_time  # noqa: F401 - a fixture

ROOT = Path(__file__).resolve().parents[1]
settings.register_profile("any machine", deadline=None)  # no time limit per example of hypothesis
settings.load_profile("any machine")
_GROUPS = {
    "tests/e2e/": "whole runs",
    "tests/single_controller/": "cluster",
    "tests/asyncrl/test_role_groups.py": "cluster",
    "tests/asyncrl/test_examples.py": "cluster",
    "tests/single_controller/test_future.py": "cluster",
}
"""Groups of tests: a mapping from the start of a test file's path to the name of the group.

The tests of a group run in one process, and the longest groups run first.
"""
_SESSION = pytest.StashKey[str]()
_WATCHER = pytest.StashKey[subprocess.Popen]()


def pytest_configure(config):
    # Let the processes that tests start import the packages and `tests.support` from any folder.
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    if not hasattr(config, "workerinput"):
        # Let these signals raise KeyboardInterrupt. Then the fixtures end their processes.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
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


def pytest_collection_modifyitems(items):
    for item in items:
        if "cluster" in item.fixturenames and group_of(item.nodeid) != "cluster":
            raise pytest.UsageError(f"{item.nodeid} uses the shared cluster: name its file in {__file__}, _GROUPS")
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=_rank)


def group_of(nodeid):
    """Return the group of tests that run in the same process: a name of `_GROUPS`, or the test's file."""
    return next((name for start, name in _GROUPS.items() if nodeid.startswith(start)), nodeid.partition("::")[0])


def _rank(item):
    """Return the sort key of a test. The longest groups come first, so both processes end at similar times."""
    if (group := group_of(item.nodeid)) in _GROUPS.values():
        return list(_GROUPS.values()).index(group)
    return len(_GROUPS) + (item.path.parent.name not in ("rollout_fleet", "learner"))


@pytest.hookimpl(optionalhook=True)  # pytest-xdist is possibly not installed
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadScopeScheduling

    class ByGroupOrFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return group_of(nodeid)

    return ByGroupOrFile(config, log)


@pytest.fixture(autouse=True)
def collects_garbage():
    """Undo ``gc.freeze`` after each test. Workers and servers call ``gc.freeze``, and some run in pytest's process."""
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def cluster():
    """Yield the Ray cluster that all tests share. The start of a cluster takes longer than most tests."""
    with two_node_cluster() as cluster:
        yield cluster
