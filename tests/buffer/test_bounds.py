"""What a server holds stays within its bounds, whatever its clients do, and who meets a bound is told."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from groups import prompt, rollout, running

from asyncrl.protocol.errors import ReplayBufferError, StoreFull, WireError
from buffer import BufferConfig, BufferProcess
from buffer.admission import PendingRequest, PendingRequests
from buffer.client import BufferClient


async def test_prompts_wait_while_others_fill_their_bound_and_go_on_when_groups_are_finished():
    async with running(groups_per_step=4, max_lag=0, max_prompt_bytes=1000) as run:
        client = run.client()
        await client.enqueue([prompt(i) for i in range(4)])
        more = asyncio.ensure_future(client.enqueue([prompt(i) for i in range(4, 8)]))
        for lease in await client.lease(0, 4):
            await client.put(rollout(lease))
        assert not more.done()
        stats = await client.stats()
        assert 0 < stats.held_bytes - stats.stored_bytes <= 1000
        await client.plan(0)
        await client.commit(0)
        await asyncio.wait_for(more, 5)


async def test_prompts_and_groups_that_can_never_fit_are_refused_by_the_options_name():
    async with running(max_prompt_bytes=300, max_stored_bytes=2000) as run:
        client = run.client()
        with pytest.raises(ReplayBufferError, match=r"buffer\.max_prompt_bytes is 300"):
            await client.enqueue([prompt(i) for i in range(9)])
        await client.enqueue([prompt(0)])
        [lease] = await client.lease(0, 1)
        with pytest.raises(ReplayBufferError, match=r"larger than buffer\.max_stored_bytes=2000"):
            await client.put(rollout(lease, num_tokens=1000))
        await client.put(rollout(lease))


async def test_saved_prefixes_count_against_the_bound():
    async with running(groups_per_step=2, max_stored_bytes=8000) as run:
        client = run.client()
        await client.enqueue([prompt(i) for i in range(2)])
        first, second = await client.lease(0, 2)
        await client.save_progress(first, rollout(first, num_tokens=400))
        assert (await client.stats()).held_bytes > 5000
        with pytest.raises(StoreFull):
            await client.save_progress(second, rollout(second, num_tokens=400))
        await client.save_progress(first, rollout(first, num_tokens=500))
        await client.put(rollout(first, num_tokens=500))
        assert (await client.stats()).groups["stored"] == 1


async def test_a_fetch_names_each_group_once():
    async with running(groups_per_step=1) as run:
        client = run.client()
        await client.enqueue([prompt(0)])
        [lease] = await client.lease(0, 1)
        await client.put(rollout(lease))
        with pytest.raises(WireError, match="each group once"):
            await client.fetch([0] * 1000)


async def test_a_consumer_that_reads_nothing_is_sent_no_more_than_the_bound():
    async with running(groups_per_step=1, max_stored_bytes=10_000) as run:
        client = run.client()
        await client.enqueue([prompt(0)])
        [lease] = await client.lease(0, 1)
        await client.put(rollout(lease, num_tokens=400))
        link = client._connect()
        await link.request("fetch", {"groups": [0], "read": 0})
        with pytest.raises(StoreFull, match="unread"):
            await link.request("fetch", {"groups": [0], "read": 0})
        await link.request("fetch", {"groups": [0], "read": link.next_id()})


async def test_waiting_requests_of_one_client_are_bounded():
    room = PendingRequests()
    for number in range(256):
        room.add(PendingRequest(client=b"a", request_id=number), 9.0, lambda request: None)
    with pytest.raises(ReplayBufferError, match="256 requests of this kind wait, of them 256 of this client"):
        room.add(PendingRequest(client=b"a", request_id=256), 9.0, lambda request: None)
    room.add(PendingRequest(client=b"b", request_id=0), 9.0, lambda request: None)
    room.close()
    assert len(room) == 0


CONSUMER = """
import sys
from buffer import SyncBufferClient
rank = SyncBufferClient(sys.argv[1], request_timeout_s=60.0)
while True:
    rank.fetch([0])
    print("fetched", flush=True)
"""


async def test_a_stopped_consumer_holds_up_nobody_else(tmp_path: Path):
    with BufferProcess(BufferConfig(max_lag=1), groups_per_step=4, log_path=tmp_path / "log") as process:
        client = BufferClient(process.address, request_timeout_s=10.0)
        await client.enqueue([prompt(i) for i in range(80)])
        for lease in await client.lease(0, 4):
            await client.put(rollout(lease, num_tokens=100_000))
        environment = {**os.environ, "PYTHONPATH": os.getcwd()}
        command = [sys.executable, "-c", CONSUMER, process.address]
        consumer = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, env=environment)
        try:
            assert consumer.stdout is not None
            await consumer.stdout.readline()
            consumer.send_signal(signal.SIGSTOP)
            for version in range(10):
                plan = await client.plan(version)
                await client.fetch([group.group_id for group in plan.groups])
                await client.commit(version)
                for lease in await client.lease(version + 1, 4):
                    await client.put(rollout(lease, num_tokens=100_000))
            assert (await client.stats()).groups["consumed"] == 40
        finally:
            consumer.kill()
            await consumer.communicate()
            await client.close()
