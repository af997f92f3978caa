"""Workers that connect, wait for leases, load newer versions, become silent and leave."""

import asyncio
import itertools
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncrl.core.errors import DeclaredDead, LeaseExpired, NotLeaseOwner, WireError
from buffer import BufferConfig, BufferProcess, Durability, journal
from buffer.commands import GrantedLease
from buffer.encoding import Message
from buffer.server import BufferServer
from buffer.sockets import LoopClock
from buffer.waiting import FairQueue
from tests.support.buffer_groups import AnyRole, fall_silent, prompt, rollout, running


async def until_waiting(control: AnyRole, number: int) -> None:
    async with asyncio.timeout(30):
        while (await control.stats()).leases_waiting != number:
            pass


async def test_the_leases_of_a_silent_worker_are_revoked_before_they_expire(monkeypatch):
    async with running(lease_s=600.0, heartbeat_s=0.1) as run:
        hung, other = run.client(), run.client()
        await hung.enqueue([prompt(0)])
        [lost] = await hung.lease(0, 1)
        fall_silent(hung, monkeypatch)
        [again] = await asyncio.wait_for(other.lease(0, 1), 30)
        assert (again.prompt.group_id, again.attempt) == (0, 1)
        assert await asyncio.wait_for(hung.revocation(), 30) == (0, 0)
        with pytest.raises(LeaseExpired):
            await hung.put(rollout(lost))


async def test_a_worker_that_sends_heartbeats_keeps_its_leases():
    async with running(lease_s=600.0, heartbeat_s=0.1) as run:
        worker = run.client()
        await worker.enqueue([prompt(0)])
        [lease] = await worker.lease(0, 1)
        await asyncio.sleep(1.0)
        await worker.put(rollout(lease))


async def test_a_worker_that_becomes_silent_while_it_waits_gets_no_lease(monkeypatch):
    async with running(heartbeat_s=0.1) as run:
        hung, control = run.client(), run.client()
        wait = asyncio.ensure_future(hung.lease(0, 1))
        await until_waiting(control, 1)
        fall_silent(hung, monkeypatch)
        await until_waiting(control, 0)
        await control.enqueue([prompt(0)])
        assert (await control.stats()).groups["leased"] == 0
        wait.cancel()


async def test_a_group_that_is_leased_while_its_client_closes_is_queued_again_immediately():
    async with running(groups_per_step=8, lease_s=600.0, heartbeat_s=0.1) as run:
        leaver, control = run.client(), run.client()
        for number in range(20):
            wait = asyncio.ensure_future(leaver.lease(0, 1))
            await leaver.stats()
            enqueue = asyncio.ensure_future(control.enqueue([prompt(number)]))
            for _ in range(number):
                await asyncio.sleep(0)
            await leaver.close()
            await enqueue
            [answer] = await asyncio.gather(wait, return_exceptions=True)
            num_known = len(answer) if isinstance(answer, list) else 0
            stats = await control.stats()
            assert stats.groups["leased"] == num_known
            # If the closed client still had the lease, this request would wait until the client counts as silent.
            [lease] = await control.lease(0, 1)
            await control.put(rollout(lease))
            if number % 8 == 7:
                version = number // 8
                await control.plan(version)
                await control.commit(version)
                return
            leaver = run.client()


async def test_a_lease_remains_after_its_connection_closes_and_only_its_owner_may_report_it():
    async with running(lease_s=600.0) as run:
        first, second = run.client(), run.client()
        await first.enqueue([prompt(0)])
        [lease] = await first.lease(0, 1)
        for report in (
            second.put(rollout(lease)),
            second.release(lease, num_tokens=3, reason="theirs"),
            second.save_progress(lease, rollout(lease)),
            second.renew([lease]),
        ):
            with pytest.raises(NotLeaseOwner, match=r"of group 0 attempt 0 came from client .*; only the owner"):
                await report
        await first.close()
        assert (await second.stats()).groups["leased"] == 1
        assert (await second.stats()).tokens_dropped == {}


async def test_a_commit_ends_the_waiting_requests_of_workers_with_too_old_versions():
    async with running(groups_per_step=1, max_lag=0, request_timeout_s=60.0) as run:
        worker, control = run.client(), run.client()
        await control.enqueue([prompt(i) for i in range(3)])
        [lease] = await worker.lease(0, 1)
        await worker.put(rollout(lease))
        await control.plan(0)
        wait = asyncio.ensure_future(worker.lease(0, 1))
        await until_waiting(control, 1)
        await control.commit(0)
        assert await asyncio.wait_for(wait, 30) == []
        assert [lease.engine_version for lease in await worker.lease(1, 1)] == [1]


async def test_a_worker_can_cancel_a_request_and_get_a_lease_at_a_newer_version():
    async with running(groups_per_step=1, max_lag=0, request_timeout_s=60.0) as run:
        worker, control = run.client(), run.client()
        await control.enqueue([prompt(i) for i in range(3)])
        [lease] = await worker.lease(0, 1)
        await worker.put(rollout(lease))
        await control.plan(0)
        await control.commit(0)
        wait = asyncio.ensure_future(worker.lease(0, 1))
        await until_waiting(control, 1)
        assert (await control.stats()).leases_waiting == 1, "the worker must have only one open request"
        wait.cancel()
        [lease] = await asyncio.wait_for(worker.lease(1, 1), 30)
        assert lease.engine_version == 1
        assert (await control.stats()).leases_waiting == 0


async def test_jumps_of_the_wall_clock_do_not_affect_leases_and_steps(monkeypatch: pytest.MonkeyPatch):
    jumps = itertools.cycle([1e9, -1e9, 0.0, 1e12])
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + next(jumps))
    async with running(groups_per_step=2, max_lag=1, lease_s=0.6, heartbeat_s=0.2, max_requests_per_s=500) as run:
        worker, control = run.client(), run.client()
        await control.enqueue([prompt(i) for i in range(12)])
        for version in range(4):
            leases = await worker.lease(version, 2)
            await asyncio.sleep(0.1)
            await worker.renew(leases)
            for lease in leases:
                await worker.put(rollout(lease))
            await control.plan(version)
            await control.commit(version)
        [lost] = await worker.lease(4, 1)
        await asyncio.wait_for(worker.revocation(), 30)
        stats = await control.stats()
        assert (stats.groups["consumed"], stats.tokens_dropped) == (8, {})
        assert lost.attempt == 0


def test_a_fair_queue_prefers_clients_with_fewer_turns_but_gives_new_clients_no_credit():
    turns = FairQueue()
    for client in (b"a", b"b", b"a"):
        turns.take(client)
    assert turns.turn_of(b"b") < turns.turn_of(b"a")
    for _ in range(5):
        turns.take(b"b")
    assert turns.turn_of(b"a") < turns.turn_of(b"b")
    assert turns.turn_of(b"new") == turns.turn_of(b"b") - 1


async def test_a_stall_of_the_servers_event_loop_revokes_no_lease(tmp_path: Path):
    """The server is stopped for longer than its timeouts. A worker with 150 leases sends heartbeats all the time."""
    config = BufferConfig(heartbeat_s=0.4, lease_s=2.0)
    with BufferProcess(config, groups_per_step=150, log_path=tmp_path / "log") as process:
        worker = AnyRole(process.address, request_timeout_s=10.0)
        await worker.enqueue([prompt(i) for i in range(150)])
        leases = await worker.lease(0, 150)
        assert len(leases) == 150
        process.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(2.6)
        process.process.send_signal(signal.SIGCONT)
        await worker.renew(leases)
        await asyncio.sleep(0.5)
        stats = await worker.stats()
        assert (stats.groups["leased"], stats.groups["queued"]) == (150, 0)
        assert "the event loop stalled for" in process.log_tail()
        await worker.close()


async def test_a_stall_of_the_clients_event_loop_fails_no_request():
    async with running() as run:
        control, worker = run.client(), run.client(request_timeout_s=1.0)
        waiting = asyncio.ensure_future(worker.lease(0, 1))
        await worker.stats()
        await control.enqueue([prompt(0)])
        time.sleep(1.5)  # noqa: ASYNC251 - block the event loop
        assert len(await waiting) == 1


async def test_the_loop_clock_does_not_count_stalls_of_the_event_loop():
    now = 100.0
    clock = LoopClock(lambda: now)
    now += 0.3
    assert clock.time() == pytest.approx(100.3)
    now += 60.0
    assert clock.time() == pytest.approx(100.3)
    now += 0.2
    assert clock.time() == pytest.approx(100.5)
    clock.close()


async def test_a_worker_that_is_declared_dead_loses_its_leases_and_its_unreported_tokens():
    async with running(lease_s=600.0) as run:
        worker, control = run.client(), run.client()
        worker.count_generated = lambda: 12
        name = await worker.enter()
        await control.enqueue([prompt(0), prompt(1)])
        first, second = await worker.lease(0, 2)
        await worker.put(rollout(first))
        await worker.stats()  # before this request, the client sends a heartbeat
        for _ in range(2):
            assert await control.bury(name) == 12
        stats = await control.stats()
        assert (stats.tokens_buffered, stats.tokens_dropped) == (5, {"lost": 7})
        [again] = await control.lease(0, 1)
        assert (again.prompt.group_id, again.attempt) == (1, 1)
        with pytest.raises(DeclaredDead, match=r"put came from a worker .*declared dead"):
            await worker.put(rollout(second))
        assert (await control.stats()).tokens_dropped == {"lost": 7}


async def test_a_restarted_server_refuses_a_worker_that_was_declared_dead(tmp_path: Path):
    """`bury` declares a worker dead, and returns its number of tokens. After a restart, it returns the same number."""
    options = {"durability": Durability.disk, "directory": str(tmp_path), "lease_s": 600.0, "epoch": "run"}
    async with running(groups_per_step=4, **options) as run:
        worker, control = run.client(), run.client()
        worker.count_generated = lambda: 12
        name = await worker.enter()
        await control.enqueue([prompt(i) for i in range(3)])
        first, second = await worker.lease(0, 2)
        await worker.put(rollout(first))
        await worker.stats()
        assert await control.bury(name) == 12
        before = await control.stats()
        run.server.close()
        run.server = BufferServer(BufferConfig(**options), groups_per_step=4)  # the journal contains its address
        for call in (worker.put(rollout(second)), worker.lease(0, 1), worker.release(first, num_tokens=5, reason="x")):
            with pytest.raises(DeclaredDead):
                await call
        assert await control.bury(name, 99) == 12
        after = await control.stats()
        assert (after.tokens_dropped, after.tokens_buffered) == (before.tokens_dropped, before.tokens_buffered)
        assert after.groups == before.groups == {**before.groups, "queued": 2, "leased": 0, "stored": 1}


async def test_the_token_count_of_a_dead_worker_is_the_larger_of_two_reports():
    async with running(lease_s=600.0) as run:
        control = run.client()
        for known, beat, expected in ((20, 12, 20), (3, 12, 12), (20, 0, 20)):
            worker = run.client()
            worker.count_generated = lambda beat=beat: beat
            name = await worker.enter()
            await worker.stats()
            assert await control.bury(name, known) == expected


async def test_a_put_that_is_written_while_its_worker_is_declared_dead_counts_as_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The server receives a put, but writes it to the journal only after the worker was declared dead."""
    options = {"durability": Durability.disk, "directory": str(tmp_path), "lease_s": 600.0}
    async with running(groups_per_step=4, **options) as run:
        worker, control = run.client(), run.client()
        name = await worker.enter()
        await control.enqueue([prompt(0)])
        [lease] = await worker.lease(0, 1)
        is_writing, may_write = threading.Event(), threading.Event()

        def write_late(*call: Any) -> None:
            if threading.current_thread() is not threading.main_thread():
                is_writing.set()
                assert may_write.wait(60)
            write_all(*call)

        write_all = journal.write_all
        monkeypatch.setattr(journal, "write_all", write_late)
        putting = asyncio.ensure_future(worker.put(rollout(lease, num_tokens=100_000)))
        async with asyncio.timeout(20):
            while not is_writing.is_set():
                await control.stats()
        assert await control.bury(name, 100_000) == 100_000
        may_write.set()
        with pytest.raises((LeaseExpired, DeclaredDead)):
            await asyncio.wait_for(putting, 20)
        assert (await control.stats()).tokens_dropped == {"lost": 100_000}


async def test_a_lease_has_no_prefix_if_the_prefix_is_lost_before_the_answer():
    """The server loses the saved prefix after it grants the lease and before it sends the answer."""
    async with running(groups_per_step=4, max_lag=2) as run:
        first, second = run.client(), run.client()
        await first.enqueue([prompt(0)])
        [lease] = await first.lease(0, 1)
        await first.save_progress(lease, rollout(lease, num_tokens=7))
        await first.release(lease, num_tokens=7, reason="stopped")
        service = run.server.service
        answer = service._admission._answer

        def answer_without_prefix(request: Message, granted: Sequence[GrantedLease]) -> None:
            for granted_lease in granted:
                service._lose([granted_lease.group_id])
                service._store.evict([granted_lease.group_id])
            answer(request, granted)

        service._admission._answer = answer_without_prefix
        [again] = await second.lease(0, 1)
        assert second.take_progress(again) is None
        await second.put(rollout(again, num_tokens=9))
        stats = await second.stats()
        assert (stats.tokens_buffered, stats.tokens_dropped) == (9, {"discarded_prefix": 7})


async def test_an_invalid_worker_name_is_refused_and_an_unknown_worker_has_no_tokens():
    async with running() as run:
        control = run.client()
        assert await control.bury("00ff") == 0
        with pytest.raises(WireError, match="matching regex"):
            await control.bury("worker 1")
