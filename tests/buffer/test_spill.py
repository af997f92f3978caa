"""With `buffer.max_memory_bytes`, payloads that do not fit into memory stay in the journal's files."""

import asyncio
import shutil
import tempfile
import time
import tracemalloc
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import psutil
import pytest

from asyncrl.core.errors import UnknownGroup
from buffer import BufferConfig, BufferSupervisor, ControlClient, LearnerClient, WorkerClient
from buffer.encoding import group_frames
from buffer.frames import FramesOnDisk
from buffer.journal import Journal
from tests.support.buffer_groups import prompt, rollout

MB = 1 << 20
NUM_GROUPS = 24
TOKENS = 80_000
"""Tokens of a group. A group takes about a megabyte."""


def options(directory: Path, **changes):
    return {
        "max_lag": 0,
        "durability": "disk",
        "directory": str(directory),
        "max_memory_bytes": 4 * MB,
        "request_timeout_s": 60.0,
        **changes,
    }


def test_the_bound_on_memory_needs_a_journal():
    with pytest.raises(ValueError, match=r"max_memory_bytes=5 needs buffer\.durability=disk, got memory"):
        BufferConfig(max_memory_bytes=5)


@contextmanager
def serving(directory: Path, **changes):
    """Run a server in a separate process."""
    config = BufferConfig(**options(directory, **changes))
    with BufferSupervisor(config, groups_per_step=NUM_GROUPS, log_path=directory / "buffer.log") as server:
        yield server.connection


@asynccontextmanager
async def clients(connection):
    made = [kind(connection.client()) for kind in (ControlClient, WorkerClient, LearnerClient)]
    try:
        yield made
    finally:
        for client in made:
            await client.close()


def servers() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [one for one in children if "buffer.server" in " ".join(one.cmdline())]


def memory() -> int:
    """Return the memory (RSS) of all servers in bytes, without memory that maps files."""
    return sum(one.memory_info().rss - one.memory_info().shared for one in servers())


async def put_groups(control, worker, tokens=TOKENS, first=0):
    """Store the groups of one step. Their ids are ``first``, ``first`` + 1, and so on. Returns the groups by id."""
    await control.enqueue([prompt(group_id) for group_id in range(first, first + NUM_GROUPS)])
    put = {}
    for _ in range(NUM_GROUPS):
        (lease,) = await worker.lease(0, 1)
        put[lease.prompt.group_id] = group = rollout(lease, num_tokens=tokens)
        await worker.put(group)
    return put


def assert_same(found, put):
    assert b"".join(map(bytes, group_frames(found))) == b"".join(map(bytes, group_frames(put)))


async def assert_fetched_as_put(control, learner, put):
    plan = await control.plan(0)
    fetched = await learner.fetch([group.group_id for group in plan.groups])
    assert len(fetched) == NUM_GROUPS
    for group in fetched:
        assert_same(group, put[group.group_id])


@pytest.mark.parametrize("tokens", [TOKENS, TOKENS // 8], ids=["large", "small"])
@pytest.mark.parametrize("changes", [{}, {"num_store_servers": 1}], ids=["ledger", "store"])
async def test_memory_stays_within_the_bound_and_fetched_groups_are_unchanged(tmp_path, changes, tokens):
    bound = NUM_GROUPS * tokens * 3
    with serving(tmp_path, max_memory_bytes=bound, **changes) as connection:
        async with clients(connection) as (control, worker, learner):
            before = memory()
            put = await put_groups(control, worker, tokens)
            stats = await control.stats()
            assert stats.held_bytes > 3.9 * bound
            assert memory() - before < bound + 12 * MB
            if not changes:
                assert stats.stored_bytes - bound <= stats.disk_bytes < stats.stored_bytes
            await assert_fetched_as_put(control, learner, put)
            await control.commit(0)
            assert (await control.stats()).disk_bytes == 0


async def disk_bytes_become(control, expected) -> int:
    """Wait until ``expected(number of bytes on disk)`` is true. Returns this number."""
    deadline_s = time.monotonic() + 30
    while not expected(on_disk := (await control.stats()).disk_bytes):
        assert time.monotonic() < deadline_s, on_disk
        await asyncio.sleep(0.02)
    return on_disk


async def test_the_statistics_show_the_bytes_of_store_servers_on_disk(tmp_path):
    with serving(tmp_path, max_lag=1, max_memory_bytes=1, num_store_servers=2) as connection:
        async with clients(connection) as (control, worker, _):
            await put_groups(control, worker, TOKENS // 8)
            await put_groups(control, worker, TOKENS // 8, first=NUM_GROUPS)
            await control.plan(0)
            await control.commit(0)
            stored_bytes = (await control.stats()).stored_bytes
            assert await disk_bytes_become(control, lambda on_disk: on_disk > 0.9 * stored_bytes) <= stored_bytes
            report = await control.inspect()
            assert sum(store["disk_bytes"] for store in report["stores"]) == pytest.approx(stored_bytes, rel=0.1)
            for server in servers():
                if "--store" in server.cmdline():
                    server.kill()
            await disk_bytes_become(control, lambda on_disk: on_disk > 0.9 * stored_bytes)
            await control.plan(1)
            await control.commit(1)
            await disk_bytes_become(control, lambda on_disk: on_disk == 0)


async def test_a_restarted_server_keeps_the_bound_on_memory(tmp_path):
    with serving(tmp_path) as connection:
        async with clients(connection) as (control, worker, _):
            empty = memory()
            put = await put_groups(control, worker)
            for server in servers():
                server.kill()
    with serving(tmp_path) as connection:
        async with clients(connection) as (control, _, learner):
            await control.stats()
            assert memory() - empty < 4 * MB + 12 * MB
            await assert_fetched_as_put(control, learner, put)
            await control.commit(0)
            assert (await control.stats()).stored_bytes == 0


def wait_for_one_pair(directory: Path) -> None:
    """Wait until a compaction has ended: the journal then has only one frames file."""
    deadline = time.monotonic() + 30
    while len([*directory.glob("journal.*.frames")]) > 1:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.long
@pytest.mark.parametrize("changes", [{}, {"num_store_servers": 1}], ids=["ledger", "store"])
@pytest.mark.parametrize("disk", ["", "/dev/shm"], ids=["same disk", "other disk"])
async def test_a_run_resumes_from_a_checkpoint_with_payloads_on_disk(tmp_path, changes, disk):
    folder = Path(tempfile.mkdtemp(dir=disk or tmp_path))
    try:
        await resumes_from(folder / "v00000000", tmp_path, changes)
    finally:
        shutil.rmtree(folder)


async def resumes_from(part: Path, tmp_path: Path, changes) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    with serving(tmp_path / "a", **changes) as connection:
        async with clients(connection) as (control, worker, _):
            put = await put_groups(control, worker)
            await control.checkpoint(part, 0, key="one")
    with serving(tmp_path / "b", checkpoint=str(part), **changes) as connection:
        async with clients(connection) as (control, _, learner):
            await control.resume(0, key="one", tokens_generated=NUM_GROUPS * TOKENS)
            await assert_fetched_as_put(control, learner, put)
            shutil.rmtree(part)
            await assert_fetched_as_put(control, learner, put)


async def written(journal: Journal, frames) -> FramesOnDisk:
    done = asyncio.get_running_loop().create_future()
    journal.keep(frames, done.set_result)
    return await done


async def test_frames_on_disk_are_found_after_a_compaction_and_after_a_restart(tmp_path):
    journal = Journal(tmp_path / "journal")
    kept = {key: await written(journal, [b"%d" % key * 1000, b"", b"end"]) for key in range(3)}
    journal.note({("payload", key): frames for key, frames in kept.items()})
    for _ in range(2):
        journal.compact(None, [("payload", key, kept[key]) for key in (0, 2)])
        await asyncio.to_thread(wait_for_one_pair, tmp_path)
    assert [*kept[0]] == [b"0" * 1000, b"", b"end"]
    with pytest.raises(FileNotFoundError):
        kept[1].read()
    journal.close()
    found = Journal(tmp_path / "journal")
    held = found.recover().frames["payload"]
    assert {key: [*frames] for key, frames in held.items()} == {key: [*kept[key]] for key in (0, 2)}
    found.close()


async def test_frames_that_are_written_while_a_compaction_begins_are_found_in_the_new_file(tmp_path):
    journal, done = Journal(tmp_path / "journal"), asyncio.get_running_loop().create_future()
    journal.keep([b"x" * 50_000_000], done.set_result)
    await asyncio.sleep(0)  # let the writing thread begin
    assert journal._writing
    journal.compact(None, [])
    kept = await done
    journal.note({("payload", 1): kept})
    await asyncio.to_thread(wait_for_one_pair, tmp_path)
    assert [*kept] == [b"x" * 50_000_000]
    journal.close()
    found = Journal(tmp_path / "journal")
    assert [len(frame) for frame in found.recover().frames["payload"][1]] == [50_000_000]
    found.close()


async def test_a_compaction_reads_only_one_payload_into_memory_at_a_time(tmp_path):
    journal, size = Journal(tmp_path / "journal"), 2_000_000
    kept = {key: await written(journal, [bytes([key]) * size]) for key in range(20)}
    journal.note({("payload", key): frames for key, frames in kept.items()})
    tracemalloc.start()
    journal.compact(None, [("payload", key, frames) for key, frames in kept.items()])
    await asyncio.to_thread(wait_for_one_pair, tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 * size
    assert all([*frames] == [bytes([key]) * size] for key, frames in kept.items())
    journal.close()


@pytest.mark.parametrize("changes", [{}, {"num_store_servers": 1}], ids=["ledger", "store"])
async def test_a_damaged_payload_on_disk_is_generated_again(tmp_path, changes):
    with serving(tmp_path, max_memory_bytes=1, **changes) as connection:
        async with clients(connection) as (control, worker, learner):
            put = await put_groups(control, worker)
            plan = await control.plan(0)
            (file,) = [path for path in tmp_path.glob("*.frames") if path.stat().st_size > MB]
            with file.open("r+b") as frames:
                frames.seek(NUM_GROUPS * TOKENS // 2)
                frames.write(b"damage")
            fetches = [learner.fetch([group.group_id]) for group in plan.groups]
            answers = await asyncio.gather(*fetches, return_exceptions=True)
            answered = dict(zip((group.group_id for group in plan.groups), answers, strict=True))
            lost = [group_id for group_id, answer in answered.items() if isinstance(answer, UnknownGroup)]
            assert "are damaged" in str(answered[lost[0]])
            for group_id in answered.keys() - {*lost}:
                assert_same(answered[group_id][0], put[group_id])
            assert len(lost) == 1
            await control.lose(lost)
            (lease,) = await worker.lease(0, 1)
            assert lease.prompt.group_id == lost[0]
