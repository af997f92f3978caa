"""Who watches a run: what goes wrong with them costs a line, and never the run."""

import asyncio
import io
import time
from types import SimpleNamespace

import pytest
from rich.console import Console

from asyncrl.cli.compose import compose_run
from asyncrl.metrics import TerminalView, Trackers
from asyncrl.run import watching
from asyncrl.run.watching import AdviceProcess, Watching
from tests.asyncrl.test_metrics import make_record
from tests.support.traces import record_run


@pytest.fixture
def watched(tmp_path):
    """Return a maker of a watched run, and what it has said."""
    (tmp_path / "logs").mkdir()
    said = io.StringIO()

    def make(*overrides):
        view = TerminalView(title="run", total_steps=9, console=Console(file=said, width=400))
        return Watching(compose_run(list(overrides)), tmp_path, view), said

    return make


async def test_a_run_goes_on_without_a_dashboard_that_does_not_come_up(watched):
    watching, said = watched("dashboard=true", "dashboard_address=192.0.2.1:1")  # refused: no token
    async with watching:
        watching.step(make_record(0))
    assert "the dashboard did not come up at 192.0.2.1:1, the run goes on without it; see " in said.getvalue()


async def test_the_use_of_the_pools_follows_the_steps(watched, tmp_path):
    record_run(tmp_path)
    watching, _ = watched()
    told = asyncio.Queue()
    watching._view.use = told.put_nowait
    async with watching, asyncio.timeout(20):
        watching.step(make_record(0))
        use = await told.get()
    assert 0 < use.learner.utilisation < 1


async def test_a_run_that_records_nothing_is_watched_all_the_same(watched):
    watching, said = watched("profile.enabled=false")
    async with watching:
        watching.step(make_record(0))
        await watching._reading
    assert "step 1/9" in said.getvalue()


async def test_trackers_that_do_not_end_are_left(watched, monkeypatch):
    monkeypatch.setattr(watching, "_CLOSE_TIMEOUT_S", 0.05)
    watched_run, said = watched()
    async with watched_run:
        watched_run._trackers = Trackers({"slow": SimpleNamespace(close=lambda: time.sleep(0.5))})
    assert "took longer than 0.05 s to end" in said.getvalue()


@pytest.fixture
def advised(tmp_path, monkeypatch):
    """Return the looks for advice of a run whose steps take a simulated second; each look takes 3 s of CPU."""
    (tmp_path / "logs").mkdir()
    looks, process = [], AdviceProcess(tmp_path)

    async def look(*flags):
        looks.append(process._num_steps)
        process._spent_s, process._next_s = process._spent_s + 3, 3

    monkeypatch.setattr(process, "_look", look)
    monkeypatch.setattr(watching, "time", SimpleNamespace(monotonic=lambda: 1000.0 + process._num_steps))
    return process, looks


async def test_looks_for_advice_take_a_hundredth_of_the_time(advised):
    process, looks = advised
    for _ in range(1300):
        process.step()
        await asyncio.sleep(0)
    assert looks == [301, 601, 901, 1201]  # 3 s are expected of the first; then 3 + 3, 6 + 3, ...


async def test_after_the_last_step_there_is_one_look_more_unless_there_were_few_steps(advised):
    process, looks = advised
    await process.last()
    for _ in range(40):
        process.step()
    await process.last()
    assert looks == [40]


async def test_a_look_for_advice_that_fails_is_counted_and_costs_the_run_nothing(tmp_path, monkeypatch):
    (tmp_path / "logs").mkdir()
    monkeypatch.setattr(watching.sys, "executable", "/bin/false")
    process = AdviceProcess(tmp_path)
    await process._look()
    assert (process._spent_s, process._next_s) == (12.0, 12.0)
