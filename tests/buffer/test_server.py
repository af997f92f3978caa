"""The buffer over real sockets."""

import asyncio
import importlib
import pkgutil
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest

import buffer
from asyncrl.core.errors import (
    DeadlineError,
    LeaseExpired,
    ReplayBufferError,
    StoreFull,
    UnknownGroup,
    VersionTooOld,
)
from buffer import BufferClient, BufferConfig, BufferProcess, OnStale, SyncBufferClient
from buffer.commands import OPERATIONS
from buffer.encoding import Message
from buffer.frames import Frames
from buffer.operations import Connect, Payloads, RenewKeys
from buffer.server import ServerSocket
from buffer.stores import PayloadStore
from buffer.waiting import handlers_of
from tests.support.buffer_groups import AnyRole, prompt, rollout, running


async def test_a_group_goes_from_prompt_to_commit_and_its_arrays_arrive_unchanged():
    async with running(max_lag=0) as run:
        worker, control = run.client(), run.client()
        await control.enqueue([prompt(i) for i in range(4)])
        leases = await worker.lease(0, 10)
        assert [(x.prompt.group_id, x.attempt, x.deadline_version) for x in leases] == [(0, 0, 0), (1, 0, 0)]
        assert leases[0].prompt.ground_truth == "x"
        assert leases[1].prompt.extra == {"row": 1}
        for lease in leases:
            await worker.put(rollout(lease))
        plan = await control.plan(0)
        assert [group.group_id for group in plan.groups] == [0, 1]
        rank = SyncBufferClient(BufferClient(run.server.address, request_timeout_s=5.0))
        groups = await asyncio.to_thread(rank.fetch, [1, 0])
        rank.close()
        assert [group.group_id for group in groups] == [1, 0]
        expected = rollout(leases[1])
        for name in ("turns", "token_ids", "logprobs", "versions", "rewards", "prompt_ids"):
            np.testing.assert_array_equal(getattr(groups[0], name), getattr(expected, name))
        assert groups[0].summary == expected.summary
        stats = await control.commit(0)
        assert (stats.learner_version, stats.tokens_trained, stats.tokens_buffered) == (1, 10, 0)
        assert stats.stored_bytes == 0
        assert stats.groups == {"queued": 2, "leased": 0, "stored": 0, "planned": 0, "consumed": 2, "dropped": 0}


async def test_a_fetch_is_split_into_small_requests_whose_replies_are_sent_one_by_one(monkeypatch):
    events: list[str] = []
    look_up, frames = PayloadStore.trajectories, ServerSocket._frames

    def looking_up(store: PayloadStore, group_id: int) -> Frames:
        events.append("looked up")
        return look_up(store, group_id)

    def sending(socket: ServerSocket, answers: list[Message]) -> list:
        events.extend("sent" for answer in answers if isinstance(answer.body, Payloads))
        return frames(socket, answers)

    monkeypatch.setattr(PayloadStore, "trajectories", looking_up)
    monkeypatch.setattr(ServerSocket, "_frames", sending)
    async with running(groups_per_step=40) as run:
        client, ids = run.client(), [*range(40)]
        await client.enqueue([prompt(i) for i in ids])
        for lease in await client.lease(0, 40):
            await client.put(rollout(lease))
        assert [group.group_id for group in await client.fetch(ids[::-1])] == ids[::-1]
        runs = [(event, len([*same])) for event, same in groupby(events)]
        assert [number for event, number in runs if event == "looked up"] == [4, 12, 16, 4, 4]
        assert [number for event, number in runs if event == "sent"] == [1] * 5
        events.clear()
        assert await client.fetch([]) == []
        assert len(await client.fetch(ids[:8])) == 8
        assert events == ["looked up"] * 8 + ["sent"]


async def test_with_max_lag_0_no_group_is_leased_between_plan_and_commit():
    async with running(max_lag=0, request_timeout_s=1.0) as run:
        worker, control = run.client(), run.client()
        await control.enqueue([prompt(i) for i in range(4)])
        for lease in await worker.lease(0, 10):
            await worker.put(rollout(lease))
        await control.plan(0)
        ahead = asyncio.ensure_future(control.plan(1))
        assert await run.client().lease(0, 1) == []
        await control.commit(0)
        for lease in await worker.lease(1, 10):
            await worker.put(rollout(lease))
        assert [group.oldest_version for group in (await ahead).groups] == [1, 1]


async def test_waiting_workers_share_the_groups_that_may_begin():
    async with running(groups_per_step=4, max_lag=0) as run:
        workers, control = [run.client(), run.client()], run.client()
        waits = [asyncio.ensure_future(worker.lease(0, 4)) for worker in workers]
        while (await control.stats()).leases_waiting < 2:  # wait until both requests have arrived
            pass
        await control.enqueue([prompt(i) for i in range(8)])
        assert [len(leases) for leases in await asyncio.gather(*waits)] == [2, 2]


async def test_a_put_sent_twice_is_stored_once_and_acknowledged_twice():
    async with running() as run:
        worker = run.client()
        await worker.enqueue([prompt(0)])
        [lease] = await worker.lease(0, 1)
        await worker.put(rollout(lease))
        await worker.put(rollout(lease))
        stats = await worker.stats()
        assert stats.tokens_buffered == 5
        assert stats.puts_refused == {"duplicate": 1}


async def test_a_group_whose_lease_expired_is_leased_again_and_its_late_put_counts_once():
    async with running(lease_s=0.2) as run:
        late, other = run.client(), run.client()
        await late.enqueue([prompt(0)])
        [lost] = await late.lease(0, 1)
        [again] = await other.lease(0, 1)
        assert (again.prompt.group_id, again.attempt) == (0, 1)
        assert await asyncio.wait_for(late.revocation(), 30) == (0, 0)
        for _ in range(2):
            with pytest.raises(LeaseExpired, match="group 0 attempt 0"):
                await late.put(rollout(lost))
        await other.put(rollout(again))
        stats = await other.stats()
        assert stats.tokens_dropped == {"expired": 5}
        assert stats.tokens_buffered == 5


async def test_a_renewed_lease_does_not_expire():
    async with running(lease_s=1.0) as run:
        worker = run.client()
        await worker.enqueue([prompt(0)])
        leases = await worker.lease(0, 1)
        for _ in range(6):
            await asyncio.sleep(0.25)
            await worker.renew(leases)
        await worker.put(rollout(leases[0]))


async def test_a_trajectory_older_than_its_lease_is_refused_and_its_prompt_is_leased_again():
    async with running(max_lag=3) as run:
        worker = run.client()
        await worker.enqueue([prompt(i) for i in range(5)])
        for lease in await worker.lease(0, 2):
            await worker.put(rollout(lease))
        await worker.plan(0)
        await worker.commit(0)
        [lease] = await worker.lease(1, 1)
        with pytest.raises(VersionTooOld, match="version 0, but its lease began at version 1"):
            await worker.put(rollout(lease, version=0))
        [again] = await worker.lease(1, 1)
        assert (again.prompt.group_id, again.attempt) == (lease.prompt.group_id, 1)


async def test_enqueue_waits_while_the_queue_is_full_until_a_group_is_leased():
    async with running(queue_size=2, groups_per_step=4) as run:
        control, worker = run.client(), run.client()
        wait = asyncio.ensure_future(control.enqueue([prompt(i) for i in range(5)]))
        assert len(await worker.lease(0, 2)) == 2
        assert not wait.done()
        assert len(await worker.lease(0, 2)) >= 1
        await asyncio.wait_for(wait, 30)


@pytest.mark.long
async def test_one_call_can_transfer_thousands_of_prompts_or_groups():
    number = 5000
    async with running(groups_per_step=number, max_lag=0, queue_size=number) as run:
        client = run.client(window=64, request_timeout_s=20.0)
        await client.enqueue([prompt(i) for i in range(number)])
        leases = await client.lease(0, number)
        await asyncio.gather(*(client.put(rollout(lease)) for lease in leases))
        ids = [group.group_id for group in (await client.plan(0)).groups]
        assert ids == list(range(number))
        assert [group.group_id for group in await client.fetch(ids)] == ids


async def test_a_running_group_is_requeued_at_its_deadline_and_its_worker_is_notified():
    async with running(groups_per_step=1, max_lag=1, on_stale=OnStale.requeue) as run:
        slow, fast, control = run.client(), run.client(), run.client()
        await control.enqueue([prompt(i) for i in range(5)])
        [straggler] = await slow.lease(0, 1)
        [lease] = await fast.lease(0, 1)
        await fast.put(rollout(lease))
        await control.plan(0)
        await control.commit(0)
        [lease] = await fast.lease(1, 1)
        await fast.put(rollout(lease))
        plan = await control.plan(1)
        assert [group.group_id for group in plan.groups] == [lease.prompt.group_id]
        assert await asyncio.wait_for(slow.revocation(), 30) == (straggler.prompt.group_id, 0)
        await slow.release(straggler, num_tokens=7, reason="stale")
        await slow.release(straggler, num_tokens=7, reason="stale")
        assert (await control.stats()).tokens_dropped == {"stale": 7}
        [again] = await slow.lease(1, 1)
        assert (again.prompt.group_id, again.attempt) == (straggler.prompt.group_id, 1)


async def test_another_worker_continues_the_saved_prefix_of_a_dead_worker():
    async with running(lease_s=0.3) as run:
        dead, other = run.client(), run.client()
        await dead.enqueue([prompt(0)])
        [lease] = await dead.lease(0, 1)
        assert dead.take_progress(lease) is None
        await dead.save_progress(lease, rollout(lease, num_tokens=4))
        [again] = await other.lease(0, 1)
        saved = other.take_progress(again)
        assert saved is not None
        np.testing.assert_array_equal(saved.token_ids, rollout(lease, num_tokens=4).token_ids)
        await other.put(rollout(again, num_tokens=9))
        await dead.release(lease, num_tokens=6, reason="aborted")
        stats = await other.stats()
        assert (stats.tokens_buffered, stats.tokens_dropped) == (9, {"expired": 2})


async def test_a_cancelled_lease_request_leases_no_group():
    async with running() as run:
        worker, control = run.client(), run.client()
        wait = asyncio.ensure_future(worker.lease(0, 2))
        await worker.stats()
        wait.cancel()
        with pytest.raises(asyncio.CancelledError):
            await wait
        await worker.stats()
        await control.enqueue([prompt(0)])
        assert (await control.stats()).groups["leased"] == 0
        assert len(await control.lease(0, 1)) == 1


async def test_the_servers_errors_reach_the_client_with_type_and_message():
    async with running() as run:
        client = run.client()
        with pytest.raises(UnknownGroup, match="group 9"):
            await client.fetch([9])
        with pytest.raises(ReplayBufferError, match=r"version 3.*committed 0 steps"):
            await client.lease(3, 1)
        with pytest.raises(ReplayBufferError, match=r"plan\(2\)"):
            await client.plan(2)
        with pytest.raises(ReplayBufferError, match=r"commit\(0\)"):
            await client.commit(0)


async def test_the_deadline_error_of_a_call_without_a_server_names_call_and_address():
    client = AnyRole("tcp://127.0.0.1:1", request_timeout_s=0.2)
    with pytest.raises(DeadlineError, match=r"buffer.stats: no answer from tcp://127.0.0.1:1 within 0.2 s"):
        await client.stats()
    await client.close()
    rank = SyncBufferClient(BufferClient("tcp://127.0.0.1:1", request_timeout_s=0.2))
    with pytest.raises(DeadlineError, match=r"buffer.fetch"):
        rank.fetch([1])
    rank.close()


async def test_closing_a_client_ends_its_waiting_calls():
    async with running() as run:
        client = run.client()
        waits = [asyncio.ensure_future(call) for call in (client.lease(0, 1), client.plan(0), client.revocation())]
        await client.stats()
        await client.close()
        for wait in waits:
            with pytest.raises(ReplayBufferError, match="closed"):
                await asyncio.wait_for(wait, 30)


async def test_a_full_store_delays_leases_until_a_batch_is_committed():
    async with running(groups_per_step=2, max_lag=3, max_stored_bytes=20_000) as run:
        worker, control = run.client(), run.client()
        await control.enqueue([prompt(i) for i in range(20)])
        for _ in range(3):
            [lease] = await worker.lease(0, 1)
            await worker.put(rollout(lease, num_tokens=400))
        held = asyncio.ensure_future(worker.lease(0, 1))
        await asyncio.sleep(0)
        assert (await worker.stats()).leases_waiting == 1
        await control.plan(0)
        assert not held.done()
        await control.commit(0)
        assert len(await asyncio.wait_for(held, 30)) == 1
        assert (await control.stats()).stored_bytes <= 20_000


def test_the_server_process_announces_its_address_and_ends_on_sigterm(tmp_path: Path):
    with BufferProcess(BufferConfig(), groups_per_step=2, log_path=tmp_path / "log") as process:
        assert process.address.startswith("ipc://")
        rank = SyncBufferClient(BufferClient(process.address, request_timeout_s=5.0))
        assert rank.stats().learner_version == 0
        rank.close()
        process.stop(timeout_s=1.0)
        assert process.process.returncode == 0


async def test_a_plan_fails_if_the_store_is_too_small_for_a_batch():
    async with running(groups_per_step=4, max_lag=0, max_stored_bytes=600, request_timeout_s=2.0) as run:
        worker, control = run.client(), run.client()
        await control.enqueue([prompt(i) for i in range(8)])
        plan = asyncio.ensure_future(control.plan(0))
        [lease] = await worker.lease(0, 1)
        await worker.put(rollout(lease))
        [lease] = await worker.lease(0, 1)
        # The put waits for free bytes in the store, and only a commit would free bytes.
        put = asyncio.ensure_future(worker.put(rollout(lease)))
        with pytest.raises(StoreFull, match=r"buffer\.max_stored_bytes=600 cannot hold a batch"):
            await asyncio.wait_for(plan, 30)
        put.cancel()


def test_the_two_services_have_a_handler_for_every_operation():
    modules = [importlib.import_module(f"buffer.{found.name}") for found in pkgutil.iter_modules(buffer.__path__)]
    handlers = {
        module.__name__: handlers_of([kind for kind in vars(module).values() if is_class_of(module, kind)])
        for module in modules
    }
    assert {name for name, found in handlers.items() if found} == {"buffer.service", "buffer.store_servers"}
    handled = handlers["buffer.service"].keys() | handlers["buffer.store_servers"].keys()
    assert handled == set(OPERATIONS) - {Connect, RenewKeys}  # the server's sockets handle these two


def is_class_of(module, value):
    return isinstance(value, type) and value.__module__ == module.__name__
