"""The deadlines of waits and of repeated calls, and the messages of deadline errors."""

import asyncio
import time

import pytest

from asyncrl.core import remote
from asyncrl.core.errors import DeadlineError
from asyncrl.core.remote import StepDeadline, process_end, wait_for_first_end, within


async def test_a_late_wait_names_the_awaited_result_and_the_option():
    with pytest.raises(DeadlineError, match=r"^waited 0\.01 s for the step; raise learner\.step_timeout_s "):
        await within(asyncio.Event().wait(), 0.01, "the step", "learner.step_timeout_s")
    assert await within(asyncio.sleep(0, result=7), 1.0, "seven", "x") == 7


async def test_a_deadline_excludes_time_in_which_the_waiting_process_is_stopped():
    asyncio.get_running_loop().call_later(0.05, time.sleep, 1.5)
    assert await within(asyncio.sleep(1.0, result="in time"), 0.8, "an answer", "x") == "in time"
    with pytest.raises(DeadlineError, match=r"waited 0.8 s for an answer"):
        await within(asyncio.sleep(5.0), 0.8, "an answer", "x")


async def test_the_deadline_of_a_repeated_call_is_ten_times_its_longest_duration_within_limits(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(remote.time, "monotonic", lambda: now[0])
    deadline = StepDeadline(1200.0)

    async def call(seconds):
        now[0] += seconds

    assert deadline.seconds("update") == 1200.0
    for seconds, expected in [(2.0, 120.0), (30.0, 300.0), (9.0, 300.0), (500.0, 1200.0)]:
        await deadline.within(call(seconds), "update", "the update of step 3", "learner.step_timeout_s")
        assert deadline.seconds("update") == expected
    assert deadline.seconds("critic") == 1200.0

    class Queued(asyncio.Future):
        queued_s = 0.0

    queued = Queued()
    queued.set_result(None)
    now[0] = 70.0
    await deadline.within(queued, "critic", "the critic's update of step 3", "learner.step_timeout_s")
    assert deadline.seconds("critic") == 700.0


async def test_the_message_of_a_shortened_deadline_names_its_origin():
    deadline = StepDeadline(100.0, floor_s=0.05, factor=2.0)
    await deadline.within(asyncio.sleep(0), "update", "the update of step 0", "learner.step_timeout_s")
    with pytest.raises(DeadlineError, match=r"the update of step 1; .*learner\.step_timeout_s \(at most 100 s"):
        await deadline.within(asyncio.Event().wait(), "update", "the update of step 1", "learner.step_timeout_s")


async def test_the_end_of_a_process_wakes_its_waiters():
    lasting = await asyncio.create_subprocess_exec("sleep", "60")
    short = await asyncio.create_subprocess_exec("sleep", "0.1")
    waiting = asyncio.create_task(process_end(lasting.pid))
    assert await asyncio.to_thread(wait_for_first_end, [lasting.pid, short.pid]) == short.pid
    assert not waiting.done()
    lasting.kill()
    await asyncio.wait_for(waiting, 10)
    await lasting.wait()
    await process_end(lasting.pid)
