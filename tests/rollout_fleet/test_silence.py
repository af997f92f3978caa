"""When an engine counts as silent."""

from __future__ import annotations

import asyncio

import pytest

from asyncrl.core.errors import DeadlineError, EngineError
from rollout_fleet.engines.engine import SilenceWatch

pytestmark = [pytest.mark.timeout(30), pytest.mark.usefixtures("virtual_time")]


async def answers() -> None:
    return


async def hangs() -> None:
    await asyncio.Event().wait()


async def refuses() -> None:
    raise EngineError("refused")


async def test_an_engine_without_running_requests_is_not_silent():
    watch = SilenceWatch("engine", timeout_s=0.05, probe=hangs)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(watch.wait(), 0.3)


async def test_tokens_of_any_request_keep_an_engine_alive():
    watch = SilenceWatch("engine", timeout_s=0.4, probe=hangs)
    waiting = asyncio.create_task(watch.wait())
    with watch.running(1):
        for _ in range(10):
            await asyncio.sleep(0.1)
            watch.token()
    assert not waiting.done()
    waiting.cancel()


@pytest.mark.parametrize(("probe", "what"), [(hangs, "did not answer a probe"), (refuses, "probe failed: refused")])
async def test_silence_without_an_answer_to_the_probe_is_a_failure_within_the_deadline(probe, what):
    watch = SilenceWatch("engine", timeout_s=0.2, probe=probe)
    with watch.running(3), pytest.raises(DeadlineError, match=f"no token of its 3 running requests.*{what}"):
        await asyncio.wait_for(watch.wait(), 5)


async def test_an_engine_that_answers_probes_but_writes_nothing_fails_in_the_end():
    watch = SilenceWatch("engine", timeout_s=0.1, probe=answers)
    with watch.running(1), pytest.raises(DeadlineError, match="answered 3 probes, but produced no token"):
        await asyncio.wait_for(watch.wait(), 5)


async def test_an_intended_pause_does_not_count_as_silence():
    watch = SilenceWatch("engine", timeout_s=0.1, probe=hangs)
    waiting = asyncio.create_task(watch.wait())
    with watch.running(1), watch.paused():
        await asyncio.sleep(0.4)
        assert not waiting.done()
    waiting.cancel()
