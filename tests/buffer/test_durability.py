"""A buffer server that is killed and restarted from its journal loses no work."""

import asyncio
import errno
import json
import os
import random
import signal
import threading
import tracemalloc
from contextlib import suppress
from itertools import product
from pathlib import Path

import pytest

from asyncrl.core.errors import ReplayBufferError
from asyncrl.core.types import Lease
from buffer import BufferConfig, BufferProcess, Durability, StoresOn, journal, stores
from buffer.commands import Commit, Committed, LeaseGroups, Put, PutOutcome, PutResult
from buffer.journal import AppendOnlyFile, Head, Journal, Value
from buffer.records import Command
from buffer.sockets import remove_socket_folder, with_socket_folder
from tests.support.buffer_groups import AnyRole, chat_prompt, prompt, rollout, running


def on_disk(directory: Path, **options) -> BufferConfig:
    return BufferConfig(durability=Durability.disk, directory=str(directory), **options)


class Killable:
    """A server process that can be killed and started again with the same journal and address."""

    def __init__(self, directory: Path, groups_per_step: int, **options) -> None:
        self._config, self._sockets = with_socket_folder(on_disk(directory, **options))
        self._size, self._log = groups_per_step, directory / "log"
        self.process = self._start()

    def _start(self) -> BufferProcess:
        return BufferProcess(self._config, groups_per_step=self._size, log_path=self._log)

    def kill_and_restart(self) -> None:
        address = self.process.address
        os.kill(self.process.process.pid, signal.SIGKILL)
        self.process.stop()
        self.process = self._start()
        assert self.process.address == address

    def stop(self) -> None:
        self.process.stop()
        remove_socket_folder(self._sockets)


async def test_acknowledged_work_is_unchanged_after_a_restart(tmp_path: Path):
    options = {"durability": Durability.disk, "directory": str(tmp_path), "max_lag": 1}
    async with running(**options) as run:
        worker = AnyRole(run.server.address, request_timeout_s=5.0)
        await worker.enqueue([prompt(i) for i in range(8)])
        leases = await worker.lease(0, 4)
        for lease in leases[:3]:
            await worker.put(rollout(lease))
        await worker.plan(0)
        await worker.commit(0)
        [lease] = await worker.lease(1, 1)
        await worker.put(rollout(lease))
        before = await worker.stats()
    async with running(**options) as run:
        client = run.client()
        assert await client.stats() == before
        await worker.put(rollout(leases[3]))
        plan = await client.plan(1)
        fetched = await client.fetch([group.group_id for group in plan.groups])
        assert [group.summary for group in fetched] == list(plan.groups)
        again = await client.lease(1, 9)
        assert again[0].prompt.extra == {"row": again[0].prompt.group_id}
        assert (await client.commit(1)).lag_histogram == {0: 2, 1: 2}
        await worker.close()


async def test_messages_tools_and_environment_of_a_prompt_survive_a_restart(tmp_path: Path):
    options = {"durability": Durability.disk, "directory": str(tmp_path)}
    async with running(**options) as run:
        await run.client().enqueue([chat_prompt(i) for i in range(2)])
        [lost] = await run.client().lease(0, 1)
    async with running(**options) as run:
        queued = await run.client().lease(0, 1)
        assert {lost.prompt.group_id, queued[0].prompt.group_id} == {0, 1}
        for lease in (lost, *queued):
            sent = chat_prompt(lease.prompt.group_id)
            assert lease.prompt.messages == sent.messages
            assert lease.prompt.tools == sent.tools
            assert (lease.prompt.environment, lease.prompt.environment_options) == (
                sent.environment,
                sent.environment_options,
            )


class Learner:
    """The learner's version, and requests for leases at this version."""

    def __init__(self) -> None:
        self.version = 0
        self._advanced = asyncio.Event()

    def advance(self) -> None:
        self.version += 1
        self._advanced.set()
        self._advanced = asyncio.Event()

    async def lease(self, client: AnyRole) -> list[Lease]:
        """Request leases at the learner's version. If the version advances, cancel the request and repeat it."""
        while True:
            call = asyncio.ensure_future(client.lease(self.version, 2))
            advanced = asyncio.ensure_future(self._advanced.wait())
            try:
                await asyncio.wait({call, advanced}, return_when=asyncio.FIRST_COMPLETED)
                if call.done():
                    return call.result()
            finally:
                advanced.cancel()
                call.cancel()


async def work(client: AnyRole, learner: Learner) -> None:
    """Act as a rollout worker: lease groups at the learner's version, put them, and ignore errors of the puts."""
    while True:
        for lease in await learner.lease(client):
            with suppress(ReplayBufferError):
                await client.put(rollout(lease, num_tokens=4 + lease.prompt.group_id % 7))


async def train(control: AnyRole, learner: Learner, *, num_steps: int) -> list[int]:
    """Act as the learner, and return the ids of the consumed groups."""
    consumed: list[int] = []
    while learner.version < num_steps:
        plan = await control.plan(learner.version)
        ids = [group.group_id for group in plan.groups]
        fetched = await control.fetch(ids)
        assert [group.summary for group in fetched] == list(plan.groups)
        consumed += ids
        await control.commit(learner.version)
        learner.advance()
        await asyncio.sleep(0.02)
    return consumed


async def train_through_kills(directory: Path, *, num_steps: int, kill_after: list[float], **options) -> None:
    """Run workers and a controller for ``num_steps`` steps. Kill and restart the server after each of the times."""
    server = Killable(directory, groups_per_step=4, max_lag=2, lease_s=1.0, queue_size=16, **options)
    *workers, control = (AnyRole(server.process.address, request_timeout_s=60.0) for _ in range(3))
    learner = Learner()

    async def kill() -> None:
        for seconds in kill_after:
            await asyncio.sleep(seconds)
            await asyncio.to_thread(server.kill_and_restart)

    tasks = [asyncio.ensure_future(work(worker, learner)) for worker in workers]
    tasks.append(asyncio.ensure_future(control.enqueue([prompt(i) for i in range(4 * num_steps + 8)])))
    tasks.append(killer := asyncio.ensure_future(kill()))
    try:
        consumed = await train(control, learner, num_steps=num_steps)
        assert killer.done(), "training ended before the last kill"
        assert len(consumed) == len(set(consumed)) == 4 * num_steps
        stats = await control.stats()
        assert stats.learner_version == num_steps
        assert max(stats.lag_histogram) <= 2
        assert stats.tokens_trained == sum(4 + group_id % 7 for group_id in consumed)
    finally:
        for task in tasks:
            task.cancel()
        for client in [*workers, control]:
            await client.close()
        server.stop()


@pytest.mark.long
@pytest.mark.parametrize("num_store_servers", [0, 2])
async def test_training_continues_after_kills_of_the_server(tmp_path: Path, num_store_servers: int):
    kills = [0.2, 0.3, 0.4]
    run = train_through_kills(tmp_path, num_steps=120, kill_after=kills, num_store_servers=num_store_servers)
    await asyncio.wait_for(run, 100)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_training_continues_after_a_hundred_random_kills_of_the_server(tmp_path: Path):
    seconds = random.Random(0)
    kills = [seconds.uniform(0.0, 1.0) for _ in range(100)]
    await asyncio.wait_for(train_through_kills(tmp_path, num_steps=1500, kill_after=kills), 850)


async def put_all(client: AnyRole, leases: list[Lease], acknowledged: list[int]) -> None:
    for lease in leases:
        await client.put(rollout(lease, num_tokens=1500))
        acknowledged.append(lease.prompt.group_id)


async def test_a_put_on_a_full_disk_fails_and_all_acknowledged_groups_are_stored(tmp_path: Path, monkeypatch):
    def allocate(descriptor: int, offset: int, num_bytes: int) -> None:
        if offset + num_bytes > 60_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        posix_fallocate(descriptor, offset, num_bytes)

    posix_fallocate = os.posix_fallocate
    monkeypatch.setattr(os, "posix_fallocate", allocate)
    options = {"durability": Durability.disk, "directory": str(tmp_path), "max_lag": 3}
    acknowledged = []
    async with running(groups_per_step=4, **options) as run:
        worker = AnyRole(run.server.address, request_timeout_s=5.0)
        await worker.enqueue([prompt(i) for i in range(12)])
        leases = await worker.lease(0, 12)
        with pytest.raises(ReplayBufferError, match=r"journal cannot be written: No space left"):
            await put_all(worker, leases, acknowledged)
        assert acknowledged
        stats = await worker.stats()
        assert stats.groups["stored"] == len(acknowledged)
        address = run.server.address
    async with running(groups_per_step=4, **options) as run:  # the disk is still full
        assert run.server.address == address
        fetched = await run.client().fetch(acknowledged)
        assert [group.group_id for group in fetched] == acknowledged
    monkeypatch.undo()
    async with running(groups_per_step=4, **options) as run:
        client = run.client()
        fetched = await client.fetch(acknowledged)
        assert [group.group_id for group in fetched] == acknowledged
        await worker.put(rollout(leases[len(acknowledged)], num_tokens=1500))
        await worker.close()


def test_the_error_for_a_file_that_is_not_a_journal_names_the_file(tmp_path: Path):
    (tmp_path / "journal.1.log").write_text("something else, and long enough to be looked at" * 100)
    with pytest.raises(ValueError, match=r"journal\.1\.log is not .* format 11: .* b'something"):
        Journal(tmp_path / "journal")


def test_the_error_for_a_journal_of_an_earlier_release_names_the_file(tmp_path: Path):
    (tmp_path / "store0.1.log").write_bytes(b"asyncrl buffer journal 4\n" + bytes(100))
    with pytest.raises(ValueError, match=r"store0\.1\.log is not .* format 11: .* b'asyncrl"):
        Journal(tmp_path / "store0")


def test_the_error_for_a_journal_that_cannot_be_opened_names_the_journal(tmp_path: Path):
    (tmp_path / "journal.1.log").mkdir()
    with pytest.raises(ReplayBufferError, match=r"journal cannot be opened: Is a directory"):
        Journal(tmp_path / "journal")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"max_lag": 3}, "written with max_lag=2, but this server has 3"),
        ({"order": "fifo"}, "written with order='earliest_deadline', but this server has 'fifo'"),
        ({"filters": ["no_tokens"]}, r"written with filters=\[\], but this server has \['no_tokens'\]"),
        ({"groups_per_step": 3}, "written with groups_per_step=2, but this server has 3"),
        ({"stores_on": StoresOn.hosts}, "written with num_stores=1, but this server has 0"),
        ({"epoch": "another run"}, "written with epoch='a run', but this server has 'another run'"),
    ],
)
async def test_the_error_for_a_journal_of_other_options_or_another_run_names_the_difference(
    tmp_path: Path, changed, message
):
    options = {"durability": Durability.disk, "directory": str(tmp_path), "epoch": "a run"}
    async with running(**options) as run:
        await run.client().enqueue([prompt(0)])
    with pytest.raises(ValueError, match=message):
        running(**{**options, **changed})
    async with running(**options) as run:
        assert (await run.client().stats()).groups["queued"] == 1


async def test_a_planned_batch_is_the_same_after_a_restart(tmp_path: Path):
    options = {"durability": Durability.disk, "directory": str(tmp_path), "order": "shortest_first"}
    async with running(**options) as run:
        client = run.client()
        await client.enqueue([prompt(i) for i in range(4)])
        for lease in await client.lease(0, 4):
            await client.put(rollout(lease, num_tokens=9 - lease.prompt.group_id))
        before = await client.plan(0)
        assert [group.group_id for group in before.groups] == [3, 2]
    async with running(**options) as run:
        assert await run.client().plan(0) == before


async def test_a_repeated_put_with_other_content_has_no_effect_even_after_a_restart(tmp_path: Path):
    options = {"durability": Durability.disk, "directory": str(tmp_path)}
    async with running(**options) as run:
        client = run.client()
        await client.enqueue([prompt(0)])
        [lease] = await client.lease(0, 1)
        first = rollout(lease, num_tokens=4)
        await client.put(first)
        num_bytes = size_of_files(tmp_path)
        await client.put(rollout(lease, num_tokens=4000))
        assert size_of_files(tmp_path) < num_bytes + 1000
    async with running(**options) as run:
        [fetched] = await run.client().fetch([0])
        assert fetched.summary == first.summary


async def test_a_restart_does_not_restore_the_prompts_of_filtered_groups(tmp_path: Path):
    options = {"durability": Durability.disk, "directory": str(tmp_path), "filters": ["equal_rewards"]}
    async with running(**options) as run:
        client = run.client()
        await client.enqueue([prompt(i) for i in range(6)])
        for lease in await client.lease(0, 5):
            await client.put(rollout(lease, rewards=(1.0, 1.0)))
        held_bytes = (await client.stats()).held_bytes
    async with running(**options) as run:
        assert (await run.client().stats()).held_bytes == held_bytes


def test_inspect_prints_the_groups_and_clients_of_the_server(tmp_path: Path, capsys, monkeypatch):
    from buffer import inspect

    async def fill(address: str) -> None:
        client = AnyRole(address)
        await client.enqueue([prompt(i) for i in range(5)])
        leases = await client.lease(0, 3)
        await client.put(rollout(leases[0]))
        await client.close()

    with BufferProcess(BufferConfig(), groups_per_step=2, log_path=tmp_path / "log") as process:
        asyncio.run(fill(process.address))
        monkeypatch.setattr("sys.argv", ["inspect", process.address])
        inspect.main()
        text = capsys.readouterr().out
        assert "2 queued, 2 leased, 1 stored" in text
        assert "rewards    0.5 … 0.5, mean 0.5 over stored groups" in text
        assert "stored 1 at 0; leased 2 at 0" in text
        assert "2 leases, 1 puts, 5 tokens, heard of" in text
        monkeypatch.setattr("sys.argv", ["inspect", process.address, "--json"])
        inspect.main()
        assert json.loads(capsys.readouterr().out)["stats"]["groups"]["queued"] == 2


@pytest.fixture
def no_frames_in_the_log(monkeypatch):
    """Let the journal write all payloads to the frames file. By default, it writes small payloads to the log file."""
    monkeypatch.setattr(stores, "JOIN_BELOW_BYTES", 0)


async def test_after_a_power_failure_a_small_put_is_either_complete_or_absent(tmp_path: Path):
    num_stored, num_lost = await outcomes_of_cut_files(tmp_path)
    assert {0, 6} < num_stored
    assert num_lost == {0}


@pytest.mark.usefixtures("no_frames_in_the_log")
async def test_after_a_power_failure_a_large_payload_is_complete_or_its_group_counts_as_lost(tmp_path: Path):
    num_stored, num_lost = await outcomes_of_cut_files(tmp_path)
    assert {0, 6} < num_stored
    assert {0, 6} < num_lost


async def outcomes_of_cut_files(tmp_path: Path) -> tuple[set[int], set[int]]:
    """Cut each file of the journal at 13 places, as a power failure cuts unsynced writes.

    After each cut, count the groups that are still stored and the groups that are lost. Returns the two sets of counts.
    """
    before = tmp_path / "before"
    options = {"durability": Durability.disk, "max_lag": 3}
    async with running(directory=str(before), **options) as run:
        client = run.client()
        await client.enqueue([prompt(i) for i in range(6)])
        for lease in await client.lease(0, 6):
            await client.put(rollout(lease))
        await client.plan(0)
    files = {path.name: path.read_bytes() for path in before.iterdir() if path.suffix != ".lock"}
    num_stored, num_lost = set(), set()
    for name, part in product(files, range(13)):
        after = tmp_path / f"{name} {part}"
        after.mkdir()
        for other, data in files.items():
            (after / other).write_bytes(data[: len(data) * part // 12] if other == name else data)
        async with running(directory=str(after), **options) as run:
            client = run.client()
            stats = await client.stats()
            stored = [group["group_id"] for group in (await client.inspect())["groups"] if group["state"] != "leased"]
            fetched = await client.fetch(stored)
            assert [(group.group_id, group.summary.num_tokens) for group in fetched] == [(i, 5) for i in stored]
            num_stored.add(len(stored))
            num_lost.add(stats.tokens_dropped.get("store_lost", 0) // 5)
    return num_stored, num_lost


@pytest.mark.usefixtures("no_frames_in_the_log")
async def test_a_group_whose_trajectories_were_lost_on_disk_is_counted_and_generated_again(tmp_path: Path):
    options = {"durability": Durability.disk, "directory": str(tmp_path), "max_lag": 3, "order": "shortest_first"}
    async with running(**options) as run:
        client = run.client()
        await client.enqueue([prompt(i) for i in range(4)])
        for lease in await client.lease(0, 4):
            await client.put(rollout(lease, num_tokens=9 - lease.prompt.group_id))
        assert [group.group_id for group in (await client.plan(0)).groups] == [3, 2]
    frames = tmp_path / "journal.1.frames"
    frames.write_bytes(frames.read_bytes()[:-200])  # cut off a part of group 3
    async with running(**options) as run:
        client = run.client()
        stats = await client.stats()
        assert (stats.groups["queued"], stats.groups["stored"], stats.groups["planned"]) == (1, 3, 0)
        assert stats.tokens_dropped == {"store_lost": 6}
        assert [group.group_id for group in (await client.plan(0)).groups] == [2, 1]
        assert [(lease.prompt.group_id, lease.attempt) for lease in await client.lease(0, 1)] == [(3, 1)]


@pytest.mark.usefixtures("no_frames_in_the_log")
async def test_a_saved_prefix_that_was_lost_on_disk_is_counted_as_dropped(tmp_path: Path):
    options = {"durability": Durability.disk, "directory": str(tmp_path)}
    async with running(**options) as run:
        client = run.client()
        await client.enqueue([prompt(i) for i in range(2)])
        leases = await client.lease(0, 2)
        for lease in leases:
            await client.save_progress(lease, rollout(lease, num_tokens=4))
        await client.release(leases[1], num_tokens=4, reason="stopped")
    frames = tmp_path / "journal.1.frames"
    frames.write_bytes(frames.read_bytes()[:40])
    async with running(**options) as run:
        client = run.client()
        assert (await client.stats()).tokens_dropped == {"store_lost": 4}
        [lease] = await client.lease(0, 1)
        assert (lease.prompt.group_id, client.take_progress(lease)) == (1, None)
        await client.put(rollout(lease))
        stats = await client.stats()
        assert (stats.tokens_buffered, stats.tokens_dropped) == (5, {"store_lost": 4})


def test_frames_are_written_completely_even_if_each_system_call_writes_few_bytes(tmp_path: Path, monkeypatch):
    """In this test, ``os.pwritev`` writes 7 bytes per call. The real function writes less than 2^31 bytes per call."""
    written = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, parts, *at: written(fd, [bytes(parts[0])[:7]], *at))
    file = AppendOnlyFile(tmp_path / "file")
    file.append([(Value(name="some", value="head"), [b"a" * 20, b"", b"b" * 9]), (Head(), [b"c"])])
    file.close()
    monkeypatch.undo()
    file = AppendOnlyFile(tmp_path / "file")
    (first, start), (second, behind) = file.read()
    assert (first, second) == (Value(name="some", value="head"), Head())
    assert file.frames_at(start, [20, 0, 9]) == [b"a" * 20, b"", b"b" * 9]
    assert file.frames_at(behind, [1]) == [b"c"]


def test_consecutive_puts_are_written_together_and_before_the_next_command(tmp_path: Path, monkeypatch):
    first = Journal(tmp_path / "journal")
    lease = Lease(prompt=prompt(0), attempt=0, engine_version=0, deadline_version=1)
    put = Put(summary=rollout(lease).summary)
    stored = PutOutcome(result=PutResult.stored, rank=1.0)
    num_writes: list[int] = []
    pwritev = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda *call: num_writes.append(1) or pwritev(*call))
    for group_id in range(3):
        first.record(put, stored, {("payload", group_id): [b"x" * group_id]})
    assert not num_writes
    first.record(Commit(version=0), Committed(version=0, group_ids=(0,)), {})
    first.record(put, stored, {})
    first.flush()
    first.flush()
    assert len(num_writes) == 2
    first.close()
    found = Journal(tmp_path / "journal").recover()
    assert [command for command, _ in found.commands] == [put, put, put, Commit(version=0), put]
    assert {key: [*frames] for key, frames in found.frames["payload"].items()} == {0: [b""], 1: [b"x"], 2: [b"xx"]}


async def test_a_put_is_acknowledged_only_when_it_is_written(tmp_path: Path, monkeypatch):
    options = {"durability": Durability.disk, "directory": str(tmp_path), "max_lag": 3}
    async with running(groups_per_step=4, **options) as run:
        client = run.client()
        await client.enqueue([prompt(i) for i in range(4)])
        first, second, *_ = await client.lease(0, 4)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", lambda *_: os.close(-1))
            with pytest.raises(ReplayBufferError, match=r"journal cannot be written: Bad file descriptor"):
                await client.put(rollout(first))
        await client.put(rollout(second))
        await client.put(rollout(first))  # this repeated put of group 0 writes the group to the journal
    async with running(groups_per_step=4, **options) as run:
        fetched = await run.client().fetch([0, 1])
        assert [group.group_id for group in fetched] == [0, 1]


def size_of_files(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


async def old_files_are_deleted(directory: Path) -> None:
    """Wait until no compaction of a server's journal is in progress."""
    async with asyncio.timeout(60):
        while len(journal.numbers_of(directory / "journal")) > 1:  # noqa: ASYNC110 - no event reports a deletion
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("largest_in_log", [0, 256 * 1024])
async def test_the_journal_stays_small_during_a_run_and_a_restart_restores_its_groups(
    tmp_path: Path, monkeypatch, largest_in_log: int
):
    monkeypatch.setattr(stores, "JOIN_BELOW_BYTES", largest_in_log)
    monkeypatch.setattr(journal, "_COMPACT_BYTES", 50_000)
    options = {"durability": Durability.disk, "directory": str(tmp_path)}
    async with running(groups_per_step=2, **options) as run:
        client, largest = run.client(), 0
        await client.enqueue([prompt(i) for i in range(96)])
        for version in range(40):
            for lease in await client.lease(version, 2):
                await client.save_progress(lease, rollout(lease, num_tokens=200))
                await client.put(rollout(lease, num_tokens=400))
            await client.plan(version)
            await client.commit(version)
            await old_files_are_deleted(tmp_path)  # otherwise a slow disk would increase the measured size
            largest = max(largest, size_of_files(tmp_path))
        [lease, late] = await client.lease(40, 2)
        await client.put(rollout(lease, num_tokens=400))
        await client.save_progress(late, rollout(late, num_tokens=200))
        before = await client.stats()
        assert largest < 600_000, "the files must be compacted: 1,300,000 bytes were written"
    async with running(groups_per_step=2, **options) as run:
        client = run.client()
        assert await client.stats() == before
        assert [group.summary for group in await client.fetch([80])] == [rollout(lease, num_tokens=400).summary]
        assert [lease.prompt.group_id for lease in await client.lease(40, 1)] == [82]


@pytest.mark.parametrize("num_store_servers", [0, 2])
async def test_a_journal_is_compacted_while_groups_are_stored_also_with_store_servers(
    tmp_path: Path, monkeypatch, num_store_servers: int
):
    monkeypatch.setattr(journal, "_COMPACT_BYTES", 0)
    options = {"durability": Durability.disk, "directory": str(tmp_path), "num_store_servers": num_store_servers}
    async with running(groups_per_step=2, max_lag=2, **options) as run:
        client = run.client()
        await client.enqueue([prompt(0), prompt(1)])
        for version in range(30):
            await client.enqueue([prompt(2 * version + i) for i in (2, 3)])
            for lease in await client.lease(version, 2 + 2 * (version == 0)):
                await client.put(rollout(lease))
            await client.plan(version)
            await client.commit(version)
            await old_files_are_deleted(tmp_path)
        before = await client.stats()
    assert max(journal.numbers_of(tmp_path / "journal")) > 4, "the journal must be compacted several times"
    assert before.groups["stored"] == 2
    async with running(groups_per_step=2, max_lag=2, **options) as run:
        client = run.client()
        assert await client.stats() == before
        plan = await client.plan(30)
        fetched = await client.fetch([group.group_id for group in plan.groups])
        assert [group.summary for group in fetched] == list(plan.groups)


def test_a_reference_to_lost_frames_never_finds_other_frames(tmp_path: Path):
    first = Journal(tmp_path / "journal")
    first.note({("payload", 1): 1})  # key 1 refers to frames that were never written
    first.close()
    second = Journal(tmp_path / "journal")
    second.note({("payload", 2): [b"others"]})
    second.close()
    third = Journal(tmp_path / "journal")
    found = third.recover().frames
    assert {kind: {key: [*frames] for key, frames in held.items()} for kind, held in found.items()} == {
        "payload": {2: [b"others"]}
    }
    third.close()


def test_a_journal_can_be_open_in_only_one_server_at_a_time(tmp_path: Path):
    first = Journal(tmp_path / "journal")
    with pytest.raises(ReplayBufferError, match=r"journal is held by another server"):
        Journal(tmp_path / "journal")
    first.close()
    Journal(tmp_path / "journal").close()


def compact(journal_of_run: Journal) -> None:
    """Compact a journal, and wait until its old files are deleted or their deletion has failed."""

    async def compact_and_wait() -> None:
        written = asyncio.Event()
        journal_of_run.on_written = written.set
        journal_of_run.compact(None, [])
        await written.wait()

    others = threading.enumerate()
    asyncio.run(compact_and_wait())
    for thread in threading.enumerate():
        if thread not in others and thread.daemon:  # wait for the thread that deletes the files
            thread.join()


def test_a_compaction_deletes_old_files_that_an_interrupted_deletion_left(tmp_path: Path, monkeypatch):
    def delete(file: AppendOnlyFile) -> None:
        deleted.append(file.path.name)
        if len(deleted) > 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        delete_file(file)

    deleted: list[str] = []
    delete_file = AppendOnlyFile.delete
    monkeypatch.setattr(AppendOnlyFile, "delete", delete)
    first = Journal(tmp_path / "journal")
    compact(first)
    assert len(deleted) == 2
    first.close()  # now the files are as after a kill of the server
    monkeypatch.undo()
    second = Journal(tmp_path / "journal")
    compact(second)
    second.close()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"journal.lock", "journal.3.log", "journal.3.frames"}


def test_the_next_compaction_deletes_old_files_whose_deletion_failed(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(AppendOnlyFile, "sync", lambda file: os.close(-1))
    only = Journal(tmp_path / "journal")
    compact(only)
    assert (tmp_path / "journal.1.log").exists()
    monkeypatch.undo()
    compact(only)
    only.close()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"journal.lock", "journal.3.log", "journal.3.frames"}


def test_new_files_are_on_the_disk_before_old_files_are_deleted(tmp_path: Path, monkeypatch):
    def note(descriptor: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    events: list[str] = []
    delete_file = AppendOnlyFile.delete
    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(AppendOnlyFile, "delete", lambda file: (events.append("deleted"), delete_file(file)))
    only = Journal(tmp_path / "journal")
    compact(only)
    only.close()
    assert events == ["journal.2.log", "journal.2.frames", tmp_path.name, "deleted", "deleted"]


@pytest.mark.parametrize(("place", "is_said"), [(-20, False), (150, True)])
def test_damage_inside_a_journal_is_logged_but_an_incomplete_end_of_the_file_is_not(
    tmp_path: Path, caplog, place: int, is_said: bool
):
    first = Journal(tmp_path / "journal")
    for group_id in range(3):
        first.note({("payload", group_id): [b"x" * 100]})
    first.close()
    log = tmp_path / "journal.1.log"
    data = bytearray(log.read_bytes())
    data[place] ^= 1
    log.write_bytes(data)
    second = Journal(tmp_path / "journal")
    found = second.recover().frames.get("payload", {})
    second.close()
    assert len(found) == (0 if is_said else 2)
    said = [record.getMessage() for record in caplog.records if "is damaged at byte" in record.getMessage()]
    assert len(said) == is_said
    assert all("journal.1.log" in line for line in said)


async def test_leases_granted_before_the_disk_was_full_reach_their_worker(tmp_path: Path, monkeypatch):
    def record(journal_of_run: Journal, command: Command, *rest) -> None:
        if isinstance(command, LeaseGroups):
            num_leased.append(1)
            if len(num_leased) == 3:
                raise ReplayBufferError("the disk is full")
        record_command(journal_of_run, command, *rest)

    num_leased: list[int] = []
    record_command = Journal.record
    monkeypatch.setattr(Journal, "record", record)
    async with running(durability=Durability.disk, directory=str(tmp_path), max_lag=3) as run:
        client = run.client()
        await client.enqueue([prompt(i) for i in range(4)])
        leases = await client.lease(0, 4)
        assert [lease.prompt.group_id for lease in leases] == [0, 1]


async def test_a_compaction_that_failed_on_a_full_disk_is_not_repeated_at_every_message(tmp_path: Path, monkeypatch):
    def append(file: AppendOnlyFile, records) -> list[int]:
        records = list(records)
        if isinstance(records[0][0], journal.Begin):
            attempts.append(1)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return append_records(file, records)

    attempts: list[int] = []
    append_records = AppendOnlyFile.append
    monkeypatch.setattr(journal, "_COMPACT_BYTES", 4000)
    async with running(durability=Durability.disk, directory=str(tmp_path), max_lag=8) as run:
        client = run.client()
        await client.enqueue([prompt(i) for i in range(12)])
        monkeypatch.setattr(AppendOnlyFile, "append", append)
        for lease in await client.lease(0, 12):
            await client.put(rollout(lease, num_tokens=400))
        num_attempts = len(attempts)
        for _ in range(20):
            await client.stats()
        assert len(attempts) == num_attempts
        assert 1 <= num_attempts <= 12


async def test_a_restart_reads_only_frames_that_were_not_removed(tmp_path: Path):
    size = 2_000_000
    journal = Journal(tmp_path / "journal")
    for key in range(40):
        written = asyncio.get_running_loop().create_future()
        journal.keep([b"%d" % key * (size // 2)], written.set_result)
        journal.note({("payload", key): await written})
        if key >= 2:
            journal.note({("payload", key): 0})
    journal.close()
    tracemalloc.start()
    journal = Journal(tmp_path / "journal")
    held = {key: [*frames] for key, frames in journal.recover().frames["payload"].items()}
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held == {key: [b"%d" % key * (size // 2)] for key in (0, 1)}
    assert peak < 3 * sum(len(frame) for frames in held.values() for frame in frames)
    journal.close()


async def test_reading_frames_beyond_the_end_of_the_file_raises_an_error(tmp_path: Path):
    file = AppendOnlyFile(tmp_path / "file")
    file.append([(Head(), [b"a" * 20])])
    [(_, start)] = file.read()
    with pytest.raises(OSError, match="the file ends too early"):
        file.frames_at(start, [21])
    file.close()
