"""The terminal, trackers, dashboard and advice of a run, and the effect of their failures."""

import asyncio
import io
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from asyncrl.cli.compose import compose_run
from asyncrl.metrics import History, TerminalView, Trackers
from asyncrl.run import reporting
from asyncrl.run.reporting import Watching
from tests.asyncrl.test_metrics import make_record
from tests.support.traces import record_run


@pytest.fixture
def watched(tmp_path):
    """Return a function that returns a pair: a new `Watching`, and the stream of the run's messages."""
    (tmp_path / "logs").mkdir()
    said = io.StringIO()

    def make(*overrides):
        view = TerminalView(title="run", total_steps=9, console=Console(file=said, width=400))
        return Watching(compose_run(list(overrides)), tmp_path, view), said

    return make


async def test_a_run_continues_if_its_dashboard_does_not_start(watched):
    watching, said = watched("dashboard=true", "dashboard_address=192.0.2.1:1")  # this host does not have the address
    async with watching:
        watching.step(make_record(0))
    assert "the dashboard did not start at 192.0.2.1:1; the run continues without it; see " in said.getvalue()


async def test_the_use_of_the_pools_follows_the_steps(watched, tmp_path, monkeypatch):
    record_run(tmp_path)
    told = asyncio.Queue()
    monkeypatch.setattr(TerminalView, "use", lambda _, use: told.put_nowait(use))
    watching, _ = watched()
    async with watching, asyncio.timeout(20):
        watching.step(make_record(0))
        use = await told.get()
    assert 0 < use.learner.utilisation < 1


async def test_a_run_without_a_profile_still_reports_its_steps(watched):
    watching, said = watched("profile.enabled=false")
    async with watching:
        watching.step(make_record(0))
        await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()}, timeout=20)
        assert asyncio.all_tasks() == {asyncio.current_task()}, "no task may wait for the use of the pools"
    assert "step 1/9" in said.getvalue()


def test_alarms_of_a_resumed_run_know_the_steps_of_the_earlier_lives(watched):
    watching, said = watched("total_steps=9")
    equal = [replace(make_record(step), equal_reward_groups=1.0) for step in range(6)]
    watching.go_on(History(steps=equal[:5]))
    assert "warning: equal rewards (since step 4)" in said.getvalue()
    assert watching.examine(equal[5]).metrics["alarm.equal_rewards"] == 1.0


async def test_a_tracker_that_does_not_close_in_time_does_not_delay_the_end(watched, monkeypatch):
    monkeypatch.setattr(reporting, "_CLOSE_TIMEOUT_S", 0.05)
    slow = Trackers({"slow": SimpleNamespace(place="", close=lambda: time.sleep(0.5))})
    monkeypatch.setattr(Trackers, "open", lambda *_: slow)
    watched_run, said = watched()
    async with watched_run:
        pass
    assert "took longer than 0.05 s to end" in said.getvalue()


@pytest.fixture
def looks(monkeypatch):
    """Return the list of run folders for which `look_for_advice` was called."""
    found = []

    async def look(run_dir):
        found.append(run_dir)

    monkeypatch.setattr(reporting, "look_for_advice", look)
    return found


@pytest.mark.parametrize(
    ("num_steps", "options", "num_looks"),
    [(30, [], 1), (29, [], 0), (30, ["profile.advice=false"], 0), (30, ["profile.enabled=false"], 0)],
)
async def test_a_run_of_thirty_steps_looks_for_advice_when_it_ends(
    watched, looks, tmp_path, num_steps, options, num_looks
):
    watching, _ = watched(*options)
    async with watching:
        for step in range(num_steps):
            watching.step(make_record(step))
        await watching.last_advice()
    assert looks == [tmp_path] * num_looks


async def test_a_failed_or_hanging_search_for_advice_is_logged_and_ends(tmp_path, monkeypatch, caplog):
    (tmp_path / "logs").mkdir()
    monkeypatch.setattr(reporting.sys, "executable", "/bin/false")
    await reporting.look_for_advice(tmp_path)
    assert "no advice was found (status 1); see logs/advice.log" in caplog.text
    hanging = tmp_path / "python"
    hanging.write_text("#!/bin/sh\nsleep 60\n")
    hanging.chmod(0o755)
    monkeypatch.setattr(reporting.sys, "executable", str(hanging))
    monkeypatch.setattr(reporting, "_ADVICE_S", 0.2)
    await reporting.look_for_advice(tmp_path)
    assert "no advice was found (status None)" in caplog.text
