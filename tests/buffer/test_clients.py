"""Unusual uses of clients: cancelled calls, threads, forks, several event loops, a closed event loop."""

import asyncio
import itertools
import os
import time
from pathlib import Path

import pytest

from asyncrl.core.errors import ReplayBufferError
from buffer import BufferClient, BufferConfig, BufferProcess, SyncBufferClient
from tests.support.buffer_groups import AnyRole, prompt, rollout, running

NUM_BYTES = 1_000_000


async def store_two_groups(client: AnyRole) -> list[int]:
    """Store two groups that together fill more than half of `NUM_BYTES`. Returns their ids."""
    await client.enqueue([prompt(i) for i in range(2)])
    for lease in await client.lease(0, 2):
        await client.put(rollout(lease, num_tokens=25_000))
    return [0, 1]


@pytest.mark.parametrize("num_store_servers", [0, 2])
async def test_cancelled_fetches_do_not_prevent_later_fetches(num_store_servers: int):
    async with running(max_stored_bytes=NUM_BYTES, num_store_servers=num_store_servers) as run:
        client = run.client()
        ids = await store_two_groups(client)
        for seconds in (0.0, 0.001, 0.002, 0.005, 0.0):
            fetch = asyncio.ensure_future(client.fetch(ids))
            await asyncio.sleep(seconds)
            fetch.cancel()
            await asyncio.gather(fetch, return_exceptions=True)
        for _ in range(3):
            assert [group.group_id for group in await client.fetch(ids)] == ids


async def test_threads_can_share_one_blocking_client():
    async with running(max_stored_bytes=NUM_BYTES) as run:
        ids = await store_two_groups(run.client())
        rank = SyncBufferClient(BufferClient(run.server.address, request_timeout_s=20.0))

        def fetch(number: int) -> list[int]:
            return [group.group_id for group in rank.fetch(ids[::-1] if number % 2 else ids)]

        fetched = await asyncio.gather(*(asyncio.to_thread(fetch, number) for number in range(40)))
        assert fetched == list(itertools.islice(itertools.cycle([ids, ids[::-1]]), 40))
        rank.close()


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:5555", "tcp://127.0.0.1", "tcp://127.0.0.1:port"])
async def test_the_error_for_an_invalid_address_contains_it(address: str):
    with pytest.raises(ValueError, match=rf"'{address}' is not the address"):
        SyncBufferClient(BufferClient(address))
    with pytest.raises(ValueError, match="use an address like ipc:///FOLDER/buffer or tcp://HOST:PORT"):
        await AnyRole(address).stats()


def test_a_client_works_in_its_own_process_but_not_in_a_forked_child(tmp_path: Path):
    with BufferProcess(BufferConfig(), groups_per_step=1, log_path=tmp_path / "log") as server:
        rank = SyncBufferClient(BufferClient(server.address, request_timeout_s=10.0))
        rank.stats()
        child = os.fork()
        if child == 0:
            os._exit(7 if _is_refused(rank) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert rank.stats().learner_version == 0
        rank.close()


def _is_refused(rank: SyncBufferClient) -> bool:
    try:
        rank.stats()
    except ReplayBufferError as error:
        rank.close()
        return "make one client per process" in str(error)
    return False


def test_a_client_works_on_one_event_loop_only_and_its_open_calls_do_not_delay_the_loops_end(tmp_path: Path):
    async def leave_calls_open(client: AnyRole) -> None:
        waiting = [asyncio.ensure_future(client.plan(0)), asyncio.ensure_future(client.lease(0, 1))]
        await asyncio.wait(waiting, timeout=0.2)

    with BufferProcess(BufferConfig(), groups_per_step=1, log_path=tmp_path / "log") as server:
        client = AnyRole(server.address, request_timeout_s=120.0)
        began = time.monotonic()
        asyncio.run(leave_calls_open(client))
        assert time.monotonic() - began < 60.0
        with pytest.raises(ReplayBufferError, match="belongs to the event loop of its first call"):
            asyncio.run(client.stats())


@pytest.mark.parametrize("call", ["enqueue", "lease", "put", "plan", "fetch", "commit", "renew", "release"])
async def test_a_call_cancelled_at_any_moment_loses_no_group(call: str):
    """The server has possibly executed a cancelled call. The repeated call must then have no second effect."""
    async with running(groups_per_step=2, max_lag=0) as run:
        worker, control = run.client(), run.client()

        async def through(name: str, make) -> object:
            """Make a call.

            If ``name`` is the call under test, first start and cancel it up to eight times at different moments.
            """
            for num_turns in range(8 if name == call else 0):
                task = asyncio.ensure_future(make())
                for _ in range(num_turns):
                    await asyncio.sleep(0)
                await asyncio.sleep(0.001 * (num_turns % 3))
                if task.done():
                    return task.result()
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            return await make()

        await through("enqueue", lambda: control.enqueue([prompt(i) for i in range(3)]))
        leases = await asyncio.wait_for(through("lease", lambda: worker.lease(0, 2)), 30)
        assert len(leases) == 2
        await through("renew", lambda: worker.renew(leases))
        given_back = await through("release", lambda: worker.release(leases[0], num_tokens=1, reason="aborted"))
        assert given_back is False
        leases[:1] = await worker.lease(0, 1)
        for lease in leases:
            await through("put", lambda lease=lease: worker.put(rollout(lease)))
        plan = await through("plan", lambda: control.plan(0))
        ids = [group.group_id for group in plan.groups]
        assert [group.group_id for group in await through("fetch", lambda: control.fetch(ids))] == ids
        await through("commit", lambda: control.commit(0))
        stats = await control.stats()
        assert (stats.groups["consumed"], stats.groups["queued"], stats.groups["leased"]) == (2, 1, 0)
        assert (stats.tokens_trained, stats.tokens_buffered) == (10, 0)


async def test_a_request_that_the_server_may_answer_late_has_a_longer_deadline():
    """The server answers a request for leases after 1.2 s. The client's ``request_timeout_s`` is only 1 s."""
    async with running(request_timeout_s=2.4) as run:
        client = run.client(request_timeout_s=1.0)
        assert await client.lease(0, 1) == [], "the server answers after 1.2 s"
