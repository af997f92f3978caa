"""A ledger whose payloads are on store servers."""

import asyncio
import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from asyncrl.core.errors import LeaseExpired, UnknownGroup
from buffer import BufferClient, BufferConfig, BufferProcess, BufferSupervisor, Durability, SyncBufferClient
from buffer.client import ClientSocket
from buffer.encoding import Message
from buffer.groups import GroupState
from buffer.journal import read_contents
from buffer.operations import Checkpointed, Fetch, PutPayload, Remove, SavePart
from buffer.records import Operation
from buffer.server import StoreServer
from buffer.store_servers import StoreService, number_of
from tests.support.buffer_groups import AnyRole, prompt, rollout, running


async def test_payloads_on_store_servers_are_fetched_in_order_and_removed_with_their_batch():
    async with running(groups_per_step=6, max_lag=0, num_store_servers=2) as run:
        client = run.client()
        await client.enqueue([prompt(i) for i in range(6)])
        leases = await client.lease(0, 6)
        await asyncio.gather(*(client.put(rollout(lease)) for lease in leases))
        ids = [group.group_id for group in (await client.plan(0)).groups][::-1]
        rank = SyncBufferClient(BufferClient(run.server.address, request_timeout_s=5.0))
        for fetched in (await asyncio.to_thread(rank.fetch, ids), await client.fetch(ids)):
            assert [group.group_id for group in fetched] == ids
            assert [group.token_ids[len(group.prompt_ids)] for group in fetched] == ids
        assert (await client.stats()).stored_bytes > 0
        assert (await client.commit(0)).stored_bytes == 0
        with pytest.raises(UnknownGroup):
            await asyncio.to_thread(rank.fetch, ids)
        rank.close()


async def test_a_late_put_does_not_replace_the_payload_of_the_newer_attempt():
    async with running(groups_per_step=1, lease_s=0.8, num_store_servers=1) as run:
        late, other = run.client(), run.client()
        await late.enqueue([prompt(0)])
        [lost] = await late.lease(0, 1)
        [again] = await other.lease(0, 1)
        await other.put(rollout(again, num_tokens=9))
        with pytest.raises(LeaseExpired):
            await late.put(rollout(lost, num_tokens=5))
        [group] = await other.fetch([0])
        assert (group.attempt, group.summary.num_tokens) == (1, 9)


async def test_store_servers_end_when_the_ledgers_server_ends(tmp_path: Path):
    config = BufferConfig(num_store_servers=2)
    with BufferProcess(config, groups_per_step=1, log_path=tmp_path / "log") as process:
        client = AnyRole(process.address, request_timeout_s=5.0)
        await client.enqueue([prompt(0)])
        [lease] = await client.lease(0, 1)
        await client.put(rollout(lease))
        stores = await stores_of(client)
        await client.close()
        process.process.kill()
        process.process.wait()
    for address in stores:
        link = ClientSocket(address, timeout_s=1.0, keys=None)
        with pytest.raises(Exception, match="no answer"):
            await link.request(Fetch(()))
        link.close()


async def stores_of(client: AnyRole) -> list[str]:
    return [store["address"] for store in (await client.inspect())["stores"]]


async def put_one(client: AnyRole) -> None:
    await client.enqueue([prompt(0)])
    [lease] = await client.lease(0, 1)
    await client.put(rollout(lease))


async def test_the_ledgers_server_ends_with_an_error_if_a_store_server_dies_without_restarts(tmp_path):
    config = BufferConfig(num_store_servers=2, restarts=0)
    with BufferProcess(config, groups_per_step=1, log_path=tmp_path / "log") as process:
        client = AnyRole(process.address, request_timeout_s=5.0)
        await put_one(client)
        [store, _] = await stores_of(client)
        os.kill(pid_listening_at(store), signal.SIGKILL)
        assert await asyncio.to_thread(process.process.wait, 60) == 1
        assert "store server 0" in process.log_tail()
        assert "its payloads are lost; buffer.durability=disk would keep them" in process.log_tail()
        await client.close()


async def test_groups_of_a_dead_store_server_without_a_journal_are_generated_again():
    async with running(groups_per_step=2, max_lag=1, num_store_servers=1, request_timeout_s=20.0) as run:
        client = run.client(request_timeout_s=20.0)
        await client.enqueue([prompt(i) for i in range(4)])
        first, second, third, fourth = await client.lease(0, 4)
        for lease in (first, second, third):
            await client.put(rollout(lease))
        assert [group.group_id for group in (await client.plan(0)).groups] == [0, 1]
        [store] = await stores_of(client)
        os.kill(pid_listening_at(store), signal.SIGKILL)
        [again] = await client.lease(0, 1)
        assert (again.prompt.group_id, again.attempt) == (2, 1)
        assert (await client.stats()).tokens_dropped == {"store_lost": 5}
        with pytest.raises(UnknownGroup, match=r"no trajectories of group 0 attempt 0"):
            await client.fetch([0, 1])
        assert (await client.commit(0)).tokens_trained == 10, "a fetched batch must count as trained"
        for lease in (again, fourth):
            await client.put(rollout(lease, num_tokens=100_000))
        assert [group.group_id for group in await client.fetch([2, 3])] == [2, 3]


async def test_if_a_store_server_restarts_empty_its_uncommitted_batch_is_planned_once_more():
    options = {"groups_per_step": 2, "max_lag": 3, "num_store_servers": 1, "request_timeout_s": 20.0}
    async with running(**options) as run:
        client = run.client(request_timeout_s=20.0)
        await client.enqueue([prompt(i) for i in range(8)])
        for lease in await client.lease(0, 4):
            await client.put(rollout(lease))
        for version in range(2):
            await client.plan(version)
        [store] = await stores_of(client)
        os.kill(pid_listening_at(store), signal.SIGKILL)
        ledger = run.server.service.ledger
        async with asyncio.timeout(30):
            while not all(group.is_missing for group in ledger.groups.of_state(GroupState.planned)):
                await client.stats()
        assert await client.commit(0), "the ranks have fetched the first batch"
        await client.lose([2])
        stats = await client.stats()
        assert (stats.groups["stored"], stats.groups["planned"], stats.tokens_dropped) == (0, 0, {"store_lost": 10})
        for lease in await client.lease(0, 2):
            await client.put(rollout(lease))
        planned = [group.group_id for group in (await client.plan(1)).groups]
        assert [group.group_id for group in await client.fetch(planned)] == planned


async def test_a_store_server_on_disk_restarts_with_its_payloads(tmp_path: Path):
    config = BufferConfig(num_store_servers=2, durability=Durability.disk, directory=str(tmp_path))
    with BufferProcess(config, groups_per_step=1, log_path=tmp_path / "log") as process:
        client = AnyRole(process.address, request_timeout_s=20.0)
        await put_one(client)
        [store, _] = await stores_of(client)
        os.kill(pid_listening_at(store), signal.SIGKILL)
        [group] = await client.fetch([0])
        assert group.group_id == 0
        assert "it was started again at" in process.log_tail()
        await client.plan(0)
        assert (await client.commit(0)).stored_bytes == 0
        await client.close()


async def test_the_ledger_answers_requests_while_a_store_server_restarts(tmp_path: Path, monkeypatch):
    options = {"num_store_servers": 1, "durability": Durability.disk, "directory": str(tmp_path)}
    starting, may_start = threading.Event(), threading.Event()
    read_address = BufferProcess.read_address

    def read_late(process: BufferProcess) -> str:
        starting.set()
        assert may_start.wait(60)
        return read_address(process)

    async with running(groups_per_step=1, **options) as run:
        client = run.client(request_timeout_s=20.0)
        await put_one(client)
        monkeypatch.setattr(BufferProcess, "read_address", read_late)
        [store] = await stores_of(client)
        os.kill(pid_listening_at(store), signal.SIGKILL)
        await asyncio.to_thread(starting.wait, 60)
        for _ in range(10):
            await client.stats()
        may_start.set()
        assert [group.group_id for group in await client.fetch([0])] == [0]


async def test_groups_that_a_store_server_lost_are_counted_and_generated_again(tmp_path: Path, monkeypatch):
    options = {"num_store_servers": 1, "durability": Durability.disk, "directory": str(tmp_path), "max_lag": 0}
    options["request_timeout_s"] = 40.0
    launch = BufferSupervisor._launch

    def launch_after_a_loss_of_power(server: BufferSupervisor) -> BufferProcess:
        for path in tmp_path.glob("store0.*.frames"):
            path.write_bytes(path.read_bytes()[:-100])
        return launch(server)

    async with running(groups_per_step=2, **options) as run:
        client = run.client(request_timeout_s=40.0)
        await client.enqueue([prompt(i) for i in range(2)])
        for lease in await client.lease(0, 2):
            await client.put(rollout(lease, num_tokens=30_000))
        monkeypatch.setattr(BufferSupervisor, "_launch", launch_after_a_loss_of_power)
        [store] = await stores_of(client)
        os.kill(pid_listening_at(store), signal.SIGKILL)
        [again] = await client.lease(0, 1)
        assert (again.prompt.group_id, again.attempt) == (1, 1)
        assert (await client.stats()).tokens_dropped == {"store_lost": 30_000}
        await client.put(rollout(again))
        assert [group.group_id for group in (await client.plan(0)).groups] == [0, 1]
        assert [(group.group_id, group.attempt) for group in await client.fetch([0, 1])] == [(0, 0), (1, 1)]


def pid_listening_at(address: str) -> int:
    path = address.removeprefix("ipc://")
    return next(c.pid for c in psutil.net_connections("unix") if c.laddr == path and c.pid is not None)


async def test_for_a_trained_group_repeated_puts_are_acknowledged_and_late_puts_are_refused():
    async with running(groups_per_step=1, lease_s=0.8, num_store_servers=1) as run:
        late, other = run.client(), run.client()
        await late.enqueue([prompt(0)])
        [lost] = await late.lease(0, 1)
        [again] = await other.lease(0, 1)
        await other.put(rollout(again))
        await other.plan(0)
        await other.commit(0)
        await other.put(rollout(again))
        with pytest.raises(LeaseExpired):
            await late.put(rollout(lost, num_tokens=7))
        stats = await other.stats()
        assert (stats.puts_refused, stats.tokens_dropped) == ({"duplicate": 1, "expired": 1}, {"expired": 7})
        assert stats.stored_bytes == 0


async def test_a_restarted_store_has_only_the_payloads_of_its_own_epoch(tmp_path: Path):
    config = BufferConfig(durability=Durability.disk, directory=str(tmp_path), epoch="first")
    held = {"first": b"of the first life", "second": b"of the second life"}
    for epoch, payload in held.items():
        for is_again in (False, True):
            server = StoreServer(replace(config, epoch=epoch), number=0)
            link = ClientSocket(server.address, timeout_s=5.0, keys=None, epoch=epoch)
            if not is_again:
                with pytest.raises(UnknownGroup):
                    await link.request(Fetch((7,), (0,)))
                await link.request(PutPayload(7, 0), [payload])
            reply = await link.request(Fetch((7,), (0,)))
            assert [bytes(frame) for frame in reply.payload] == [payload]
            link.close()
            server.close()


async def test_a_checkpoint_contains_a_group_that_is_removed_after_the_checkpoint_was_requested(tmp_path: Path):
    replies: asyncio.Queue[Message] = asyncio.Queue()
    service = StoreService(BufferConfig(), send=lambda client, message: replies.put_nowait(message))

    def ask(operation: Operation, payload: Sequence[bytes] = ()) -> None:
        service.handle(Message(client=b"x", request_id=1, body=operation, payload=list(payload)))

    ask(PutPayload(7, 0), [b"tokens"])
    ask(SavePart(key="v1", path=str(tmp_path / "store0")))
    ask(Remove((7,)))
    async with asyncio.timeout(10):
        while not isinstance(body := (await replies.get()).body, Checkpointed):
            pass
    assert body.num_groups == 1
    assert [*read_contents(tmp_path / "store0").places] == [("payload", number_of((7, 0)))]
    service.close()
