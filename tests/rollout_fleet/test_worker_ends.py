"""A rollout loop ends while it has leases from a real buffer. The account must include the tokens of its samples."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from asyncrl.core.types import BufferStats
from asyncrl.run.reporting import balanced_account
from buffer import BufferConfig, BufferProcess
from rollout_fleet.config import SaveProgress
from rollout_fleet.loop import RolloutLoop
from rollout_fleet.metrics import FleetCounters
from tests.support.buffer_groups import AnyRole, fall_silent
from tests.support.rollout import InMemoryBuffer, make_prompts, running_loop, writes


@asynccontextmanager
async def buffer_process(tmp_path: Path, **options: float) -> AsyncIterator[tuple[BufferProcess, AnyRole]]:
    config = BufferConfig(**{"heartbeat_s": 0.1, "max_lag": 4, **options})
    with BufferProcess(config, groups_per_step=8, log_path=tmp_path / "log") as process:
        control = AnyRole(process.address, request_timeout_s=20.0)
        try:
            yield process, control
        finally:
            await control.close()


async def until_written(loop: RolloutLoop, num_tokens: int) -> None:
    async with asyncio.timeout(20):
        while loop.count_generated() < num_tokens:  # noqa: ASYNC110 - no event reports tokens
            await asyncio.sleep(0.01)


def check_balance(stats: BufferStats, counters: FleetCounters) -> None:
    """Check the account of a run with one worker. Raises `AccountError` if the account does not balance."""
    balanced_account(stats, counters)


async def test_the_account_balances_if_the_buffer_is_paused_while_a_worker_stops(tmp_path: Path):
    """The buffer server is paused while the worker releases its leases, so the worker gets no answer.

    When the server continues, it processes the releases. Then the controller declares the worker dead, and states how
    many tokens the worker has generated.
    """
    async with buffer_process(tmp_path) as (process, control):
        await control.enqueue(make_prompts(4))
        worker = AnyRole(process.address, request_timeout_s=20.0)
        options = {"stop_timeout_s": 0.5, "groups_in_flight": 4, "save_progress": SaveProgress.never}
        async with running_loop(worker, writes(200), **options) as (loop, _, _):
            name = await worker.enter()
            await until_written(loop, 40)
            process.process.send_signal(signal.SIGSTOP)
            counters = await loop.stop()
            assert counters.tokens_in_flight > 0, "the paused server must not answer the releases"
            process.process.send_signal(signal.SIGCONT)
            await control.stats()
            num_tokens = await control.bury(name, counters.tokens_generated)
            stats = await control.stats()
            assert num_tokens >= counters.tokens_generated
            check_balance(stats, replace(counters, tokens_generated=num_tokens, tokens_in_flight=0))
            assert stats.groups == {**stats.groups, "queued": 4, "leased": 0}
        await worker.close()


async def test_tokens_of_samples_that_ran_on_a_killed_worker_count_as_lost(tmp_path: Path, monkeypatch):
    """No sample ends. Each heartbeat of the worker reports the number of tokens in its running samples."""
    async with buffer_process(tmp_path) as (process, control):
        await control.enqueue(make_prompts(2))
        worker = AnyRole(process.address, request_timeout_s=20.0)
        async with running_loop(worker, writes(512, 0.02), groups_in_flight=2, stop_timeout_s=0.5) as (loop, engine, _):
            name = await worker.enter()
            await until_written(loop, 60)
            assert loop.counters().tokens_generated == 0
            await asyncio.sleep(1.0)  # the worker sends a heartbeat about every 0.1 s
            fall_silent(worker, monkeypatch)  # the worker stops its heartbeats, as if it had died
            num_tokens = await control.bury(name)
            assert 60 <= num_tokens <= loop.count_generated()
            stats = await control.stats()
            assert stats.tokens_dropped == {"lost": num_tokens}
            check_balance(stats, FleetCounters(tokens_generated=num_tokens))
            for request in engine.requests:
                assert engine.num_written([request.id]) > 0
            worker.connection.link.fail_all(asyncio.CancelledError())
            await worker.close()


async def test_heartbeats_count_each_sample_once_and_exclude_the_greedy_baseline():
    buffer = InMemoryBuffer(make_prompts(2), max_lag=0)
    async with running_loop(buffer, writes(30), greedy_baseline=True, groups_in_flight=1) as (loop, engine, _):
        counts = [0]
        async with asyncio.timeout(20):
            while len(buffer.groups) < 2:
                counts.append(buffer.count_generated())
                running = [request.id for request in engine.requests if request.id.split("-")[2] != "2"]
                assert counts[-1] == loop.counters().tokens_generated + engine.num_written(running)
                await asyncio.sleep(0)
    assert counts == sorted(counts)
    assert {*counts} - {0, 30, 60, 90, 120}, "tokens of running samples must count"
    assert buffer.count_generated() == 120 == buffer.num_tokens


async def test_groups_stored_before_their_worker_is_declared_dead_are_not_lost(tmp_path: Path):
    async with buffer_process(tmp_path) as (process, control):
        await control.enqueue(make_prompts(3))
        worker = AnyRole(process.address, request_timeout_s=20.0)
        async with running_loop(worker, writes(20), groups_in_flight=3) as (loop, *_):
            name = await worker.enter()
            async with asyncio.timeout(20):
                while (await control.stats()).groups["stored"] < 3:
                    pass
            await asyncio.sleep(0.3)
            assert await control.bury(name) == 120 == loop.counters().tokens_generated
            stats = await control.stats()
            assert (stats.tokens_buffered, stats.tokens_dropped) == (120, {})
        await worker.close()
