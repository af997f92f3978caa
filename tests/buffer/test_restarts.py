"""A buffer server that dies at any moment and is restarted loses no work."""

import asyncio
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.core.errors import DeadlineError, WorkerDiedError
from asyncrl.core.lives import keep_up
from asyncrl.core.types import Lease
from buffer import BufferConfig, BufferSupervisor, Durability, commands, journal, operations
from buffer.encoding import Message, prompt_frames
from buffer.journal import Journal
from buffer.records import Operation
from buffer.sockets import folder_of
from buffer.store_servers import StoreService
from tests.support.buffer_groups import AnyRole, prompt, rollout, running
from tests.support.mortal_buffer import MortalServer, MortalWrites
from tests.support.offers import bare_offer

WORKER, CONTROLLER = b"worker", b"controller"
NUM_STEPS = 4


class Script:
    """A worker and a controller that send their requests one after the other."""

    def __init__(self, server: MortalServer) -> None:
        self.server = server
        self.last_id = 0
        self.plans: list[list[int]] = []

    def ask(self, client: bytes, operation: Operation, payload: list[Any] | None = None) -> Any:
        self.last_id += 1
        request = Message(request_id=self.last_id, body=operation, payload=payload or [])
        return self.server.ask(client, request).body

    def run(self) -> None:
        frames = [prompt_frames(prompt(i)) for i in range(2 * NUM_STEPS)]
        enqueue = commands.Enqueue(tuple(range(len(frames))), tuple(map(len, frames)))
        assert self.ask(CONTROLLER, enqueue, [part for parts in frames for part in parts]) == commands.Enqueued()
        for version in range(NUM_STEPS):
            self.step(version)

    def step(self, version: int) -> None:
        leases: list[commands.LeasedGroup] = []
        while len(leases) < 2:  # a server that is killed between two leases has granted only one lease
            leases += self.ask(WORKER, commands.LeaseGroups(engine_version=version, max_groups=2 - len(leases))).leases
        assert [lease.key for lease in leases] == [(2 * version, 0), (2 * version + 1, 0)]
        for lease in leases:
            self.put(*lease.key, version)
        plan = self.ask(CONTROLLER, commands.PlanBatch(version))
        assert self.ask(CONTROLLER, commands.PlanBatch(version)) == plan
        self.plans.append([group.group_id for group in plan.groups])
        assert len(self.ask(CONTROLLER, operations.Fetch(tuple(self.plans[-1]))).counts) == 2
        self.ask(CONTROLLER, commands.Commit(version))
        self.ask(CONTROLLER, operations.Offer(offer=bare_offer(version + 1)))

    def put(self, group_id: int, attempt: int, version: int) -> None:
        class Leased:
            pass

        lease: Any = Leased()
        lease.prompt, lease.attempt, lease.engine_version = prompt(group_id), attempt, version
        self.ask(WORKER, commands.Put(summary=rollout(lease, num_tokens=4 + group_id).summary), [b"trajectories"])


MOMENTS = st.lists(st.tuples(st.integers(1, 12), st.sampled_from([0, 1, 16, 31, 32])), max_size=12)


@settings(max_examples=40, deadline=None)
@given(MOMENTS)
def test_after_kills_at_any_writes_the_steps_equal_those_of_a_run_without_kills(tmp_path_factory, kills):
    async def run() -> None:
        config = BufferConfig(max_lag=1, request_timeout_s=60.0)
        server = MortalServer(config, tmp_path_factory.mktemp("journal"), groups_per_step=2)
        script = Script(server)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(journal, "write_all", MortalWrites(kills))
            script.run()
        stats = script.ask(CONTROLLER, operations.Stats()).stats
        assert script.plans == [[2 * version, 2 * version + 1] for version in range(NUM_STEPS)]
        assert (stats.learner_version, stats.groups["consumed"]) == (NUM_STEPS, 2 * NUM_STEPS)
        assert stats.tokens_trained == sum(4 + group_id for group_id in range(2 * NUM_STEPS))
        assert (stats.tokens_dropped, stats.tokens_buffered, stats.lag_histogram) == ({}, 0, {0: 2 * NUM_STEPS})
        assert script.ask(WORKER, operations.NextOffer(0)).offer.version == NUM_STEPS
        server.close()

    asyncio.run(run())


async def test_a_restarted_server_has_the_same_offers_and_pinned_engines(tmp_path: Path):
    options = {"durability": Durability.disk, "directory": str(tmp_path), "max_lag": 4}
    async with running(groups_per_step=1, **options) as run:
        worker, control = (AnyRole(run.server.address, request_timeout_s=20.0, name=name) for name in "wc")
        await control.offer(bare_offer(0))
        pinning = asyncio.ensure_future(control.pin(0, 1, ()))
        await control.stats()
        await worker.loaded((await worker.next_offer(-1)).version, 0.5)
        assert await pinning == {"w"}
        await control.enqueue([prompt(0)])
        [lease] = await worker.lease(0, 1)
        await worker.put(rollout(lease))
        await control.plan(0)
        await control.offer(bare_offer(1))
        await control.commit(0)
    async with running(groups_per_step=1, **options) as run:
        assert await control.served(-1, 1) == (0, 0.5), "the worker must report its version again"
        assert (await run.client().next_offer(-1)).version == 1
        waiting = asyncio.ensure_future(worker.next_offer(0))
        await worker.stats()
        assert not waiting.done(), "the worker's engine must still be pinned"
        await control.unpin()
        assert (await asyncio.wait_for(waiting, 5)).version == 1
        for client in (worker, control):
            await client.close()


async def test_after_a_restart_a_lost_engine_does_not_count_as_a_pinned_engine(tmp_path: Path):
    options = {"durability": Durability.disk, "directory": str(tmp_path), "max_lag": 4}
    async with running(groups_per_step=1, **options) as run:
        worker, control = run.client(name="w"), run.client(name="c")
        name = await worker.enter()
        await control.offer(bare_offer(0))
        pinning = asyncio.ensure_future(control.pin(0, 1, ()))
        await control.stats()
        await worker.loaded((await worker.next_offer(-1)).version, 0.5)
        assert await pinning == {"w"}
        await control.bury(name)
    async with running(groups_per_step=1, **options) as run:
        other, control = run.client(name="v"), run.client(name="c")
        pinning = asyncio.ensure_future(control.pin(0, 1, ()))
        await other.loaded((await other.next_offer(-1)).version, 0.5)
        assert await asyncio.wait_for(pinning, 5) == {"v"}


async def test_a_late_message_about_a_lease_before_a_restart_does_not_affect_a_later_attempt(tmp_path: Path):
    """After another worker has leased the group, late copies of a lease request and of its cancellation arrive."""
    server = MortalServer(BufferConfig(max_lag=1, request_timeout_s=60.0), tmp_path, groups_per_step=2)
    script, other = Script(server), b"other"
    parts = prompt_frames(prompt(0))
    script.ask(CONTROLLER, commands.Enqueue((0,), (len(parts),)), [*parts])
    wanted = commands.LeaseGroups(engine_version=0, max_groups=1)
    assert script.ask(WORKER, wanted).leases[0].key == (0, 0)
    lease = Message(request_id=script.last_id, body=wanted)
    server.kill()
    script.ask(WORKER, commands.Release(group_id=0, attempt=0, num_tokens=0, reason="aborted"))
    assert script.ask(other, wanted).leases[0].key == (0, 1)
    assert server.ask(WORKER, lease).body.leases == ()
    script.ask(WORKER, operations.Cancel(lease.request_id))
    assert server.service.ledger.groups.running(0, 1) is not None
    server.close()


async def test_a_waiting_request_gets_its_full_deadline_again_after_a_server_restart(tmp_path: Path):
    options = {"durability": Durability.disk, "directory": str(tmp_path), "request_timeout_s": 60.0}
    async with running(**options) as run:
        client = AnyRole(run.server.address, request_timeout_s=1.4)
        waiting = asyncio.ensure_future(client.plan(0))  # the call fails after 2.1 s
        await asyncio.sleep(1.4)
    async with running(**options):
        await asyncio.sleep(1.4)
        assert not waiting.done()
        with pytest.raises(DeadlineError, match=r"plan.* within 2\.1 s"):
            await waiting
        await client.close()


async def test_a_restarted_server_still_reports_a_failed_publish(tmp_path: Path):
    options = {"durability": Durability.disk, "directory": str(tmp_path)}
    async with running(**options) as run:
        await run.client().publish_failed("no room on rank 1")
    async with running(**options) as run:
        with pytest.raises(Exception, match="no room on rank 1"):
            await run.client().next_offer(-1)


def supervised(directory: Path, said: asyncio.Queue[str], **options: Any) -> BufferSupervisor:
    config = BufferConfig(directory=str(directory), **{"durability": Durability.disk, "max_lag": 1, **options})
    return BufferSupervisor(config, groups_per_step=2, log_path=directory / "log", on_restart=said.put_nowait)


def kill(server: BufferSupervisor, number: int = signal.SIGKILL) -> None:
    """Send a signal to the process of a supervised server. Finds the process by the server's address."""
    folder = folder_of(server.connection.address)
    (process,) = [child for child in psutil.Process().children() if folder in " ".join(child.cmdline())]
    process.send_signal(number)


async def test_the_run_ends_if_the_buffer_server_dies_after_its_last_restart(tmp_path: Path):
    said: asyncio.Queue[str] = asyncio.Queue()
    with supervised(tmp_path, said, restarts=1) as server:
        watching = asyncio.ensure_future(keep_up(server))
        client = AnyRole(server.connection.client())
        await client.enqueue([prompt(i) for i in range(4)])
        leases = await client.lease(0, 2)
        kill(server)
        await asyncio.gather(*(client.put(rollout(lease)) for lease in leases))
        assert {group.group_id for group in (await client.plan(0)).groups} == {0, 1}
        assert server.faults.num_restarts == 1
        told = await said.get()
        assert f"died with status -9; it was started again at {server.connection.address} within" in told
        assert "(restart 1 of buffer.restarts=1)" in told
        kill(server)
        with pytest.raises(WorkerDiedError, match=r"buffer.restarts=1 are used up: the buffer server \(pid \d+\) died"):
            await watching
        await client.close()


async def test_a_restart_that_cannot_start_a_process_is_repeated(tmp_path: Path, monkeypatch):
    said: asyncio.Queue[str] = asyncio.Queue()
    with supervised(tmp_path, said, restarts=3) as server:
        watching = asyncio.ensure_future(keep_up(server))
        start, failures = subprocess.Popen, [BlockingIOError(11, "Resource temporarily unavailable")] * 2

        def start_late(*command: Any, **options: Any) -> subprocess.Popen:
            if failures:
                raise failures.pop()
            return start(*command, **options)

        monkeypatch.setattr(subprocess, "Popen", start_late)
        kill(server)
        assert "(restart 3 of buffer.restarts=3)" in await said.get()
        assert (failures, watching.done()) == ([], False)
        watching.cancel()


async def test_a_buffer_server_without_a_journal_is_not_restarted(tmp_path: Path):
    with supervised(tmp_path, asyncio.Queue(), durability=Durability.memory) as server:
        kill(server)
        with pytest.raises(
            WorkerDiedError, match=r"^the buffer server .* died with status -9; with buffer.durability=disk it would"
        ):
            await keep_up(server)


@pytest.mark.slow
async def test_a_server_that_hangs_is_killed_and_restarted_before_its_clients_deadlines(tmp_path: Path):
    said: asyncio.Queue[str] = asyncio.Queue()
    with supervised(tmp_path, said, request_timeout_s=6.0) as server:
        watching = asyncio.ensure_future(keep_up(server))
        client = AnyRole(server.connection.client())
        await client.enqueue([prompt(0)])
        kill(server, signal.SIGSTOP)
        assert (await client.stats()).groups["queued"] == 1
        words = "answered nothing for 3.0 s (half of buffer.request_timeout_s) and was killed; it was started"
        assert words in await said.get()
        watching.cancel()
        await client.close()


AT_A_WRITE = """
import os, signal
number, share = map(int, os.environ.pop("KILL_AT").split())
pwritev, done = os.pwritev, []

def mortal(descriptor, parts, offset, flags=0):
    done.append(1)
    if len(done) < number:
        return pwritev(descriptor, parts, offset, flags)
    data = b"".join(map(bytes, parts))
    pwritev(descriptor, [data[: len(data) * share // 2]], offset)
    os.kill(os.getpid(), signal.SIGKILL)

os.pwritev = mortal
"""
FIRST_WRITES = [
    "begin",
    "epoch",
    "address",
    "owner",
    "enqueue",
    "lease",
    "lease",
    "put",
    "plan",
    "commit",
]


@pytest.mark.parametrize(
    ("write", "share"),
    [
        pytest.param(number, share, id=f"{name}-{number}-{share}", marks=() if is_usual else pytest.mark.slow)
        for number, name in enumerate(FIRST_WRITES, 1)
        for share in (0, 1, 2)
        for is_usual in [(name, share) in {("put", 1), ("plan", 0), ("commit", 2)}]
        if number > 4  # the server must not be killed before a client has connected
    ],
)
async def test_a_server_that_is_killed_during_a_write_restarts_with_all_acknowledged_work(
    tmp_path: Path, monkeypatch, write: int, share: int
):
    (tmp_path / "python").mkdir()
    (tmp_path / "python" / "sitecustomize.py").write_text(AT_A_WRITE)
    said: asyncio.Queue[str] = asyncio.Queue()
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{tmp_path / 'python'}:{os.environ.get('PYTHONPATH', os.getcwd())}")
        patch.setenv("KILL_AT", f"{write} {share}")
        server = supervised(tmp_path, said)
    with server:
        watching = asyncio.ensure_future(keep_up(server))
        client = AnyRole(server.connection.client())
        await client.enqueue([prompt(i) for i in range(4)])
        leases: list[Lease] = []
        while len(leases) < 2:  # a server that is killed between the two leases grants only one lease
            leases += await client.lease(0, 2 - len(leases))
        assert [lease.prompt.group_id for lease in leases] == [0, 1]
        await asyncio.gather(*(client.put(rollout(lease)) for lease in leases))
        assert [group.group_id for group in (await client.plan(0)).groups] == [0, 1]
        assert [group.group_id for group in await client.fetch([0, 1])] == [0, 1]
        stats = await client.commit(0)
        assert (stats.tokens_trained, stats.tokens_dropped, stats.groups["queued"]) == (10, {}, 2)
        await asyncio.wait_for(said.get(), 5)
        watching.cancel()
        await client.close()


class FullDisk:
    """Replaces the function that writes the journal's files. Writes fail while ``is_full`` is true."""

    def __init__(self) -> None:
        self.is_full = False
        self._write_all = journal.write_all

    def __call__(self, *call: Any) -> None:
        if self.is_full:
            raise OSError(28, "No space left on device")
        self._write_all(*call)


@pytest.mark.parametrize("is_restarted_while_full", [False, True])
async def test_a_payload_that_was_removed_while_the_disk_was_full_stays_removed(
    tmp_path: Path, monkeypatch, is_restarted_while_full: bool
):
    """While its disk is full, a store cannot record in its journal that it removed a payload. It records this later.

    If the store is killed before that, the restarted store gets the ids of the finished groups from the ledger.
    """
    disk = FullDisk()
    monkeypatch.setattr(journal, "write_all", disk)
    config = BufferConfig(durability=Durability.disk, directory=str(tmp_path))
    replies: list[Message] = []

    def ask(service: StoreService, operation: Operation, payload: list[bytes] | None = None) -> Any:
        service.handle(Message(client=b"x", request_id=len(replies) + 1, body=operation, payload=payload or []))
        service.settle()
        return replies[-1].body

    def start() -> tuple[StoreService, Journal]:
        kept = Journal(tmp_path / "store0")
        return StoreService(config, send=lambda client, message: replies.append(message), journal=kept), kept

    service, kept = start()
    for group_id in range(2):
        ask(service, operations.PutPayload(group_id, 0), [b"x" * 100])
    disk.is_full = True
    ask(service, operations.Remove((0,)))
    if not is_restarted_while_full:
        disk.is_full = False
        service.settle()
    service.close()
    kept.close()
    disk.is_full = False
    service, kept = start()
    held = ask(service, operations.Fetch((0,), (0,)))
    assert isinstance(held, operations.Payloads if is_restarted_while_full else operations.Failure)
    missing = ask(service, operations.Reconcile(attempts=((1, 0),), finished=((0, 1),))).group_ids
    assert missing == ()
    assert ask(service, operations.Fetch((0,), (0,))).name == "UnknownGroup"
    ask(service, operations.PutPayload(0, 0), [b"late"])
    assert ask(service, operations.Fetch((0,), (0,))).name == "UnknownGroup", "the store must refuse finished groups"
    assert ask(service, operations.Fetch((1,), (0,))).counts == (1,)
    service.close()
    kept.close()


async def test_prompts_that_arrive_while_the_disk_is_full_are_queued_when_it_has_room(tmp_path: Path, monkeypatch):
    disk = FullDisk()
    monkeypatch.setattr(journal, "write_all", disk)
    server = MortalServer(BufferConfig(request_timeout_s=60.0), tmp_path, groups_per_step=1)
    disk.is_full = True
    server.send(CONTROLLER, Message(request_id=1, body=commands.Enqueue((0, 1), (1, 1)), payload=[b"x", b"y"]))
    assert server.service.ledger.groups.num_queued == 0
    disk.is_full = False
    server.service.settle()
    assert server.service.ledger.groups.num_queued == 2
    server.close()
