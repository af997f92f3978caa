"""No request can make a buffer server exceed its memory bounds. A client that exceeds a bound gets an error."""

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from asyncrl.core.errors import ReplayBufferError, StoreFull, WireError
from asyncrl.core.types import Prompt
from buffer import BufferConfig, BufferProcess
from buffer.client import ClientSocket
from buffer.commands import Renew
from buffer.encoding import Message, prompt_frames
from buffer.frames import size_of
from buffer.operations import Done, Fetch, NothingYet
from buffer.records import MAX_LEASES
from buffer.sockets import Chunk, ChunkReceiver, ChunkSender
from buffer.waiting import HeldRequests, Replies
from tests.support.buffer_groups import AnyRole, prompt, rollout, running


async def test_new_prompts_wait_at_the_bound_of_prompts_until_groups_are_stored():
    async with running(groups_per_step=4, max_lag=0, max_prompt_bytes=1000, request_timeout_s=60.0) as run:
        client = run.client(request_timeout_s=60.0)
        await client.enqueue([prompt(i) for i in range(4)])
        more = asyncio.ensure_future(client.enqueue([prompt(i) for i in range(4, 8)]))
        leases = await client.lease(0, 4)
        stats = await client.stats()
        assert 0 < stats.held_bytes <= 1000
        assert not more.done()
        for lease in leases:
            await client.put(rollout(lease))
        await asyncio.wait_for(more, 20)


async def test_a_batch_is_planned_even_if_its_prompts_exceed_max_prompt_bytes():
    """``max_prompt_bytes`` has room for three prompts. A batch of eight prompts must be planned nevertheless."""
    size = size_of(prompt_frames(prompt(0)))
    async with running(groups_per_step=8, max_lag=0, max_prompt_bytes=3 * size) as run:
        client, feeder = run.client(), run.client()

        async def feed() -> None:
            for number in range(8):
                await feeder.enqueue([prompt(number)])

        feeding = asyncio.ensure_future(feed())
        async with asyncio.timeout(20):
            for _ in range(8):
                [lease] = await client.lease(0, 1)
                await client.put(rollout(lease))
            await feeding
            assert len((await client.plan(0)).groups) == 8
        stats = await client.stats()
        assert stats.held_bytes - stats.stored_bytes == 8 * size, "held_bytes must include prompts of stored groups"
        await client.commit(0)
        assert (await client.stats()).held_bytes == 0


async def test_a_requeued_prompt_counts_against_max_prompt_bytes_again():
    size = size_of(prompt_frames(prompt(0)))
    async with running(groups_per_step=2, max_lag=2, max_prompt_bytes=4 * size) as run:
        client = run.client()
        await client.enqueue([prompt(i) for i in range(4)])
        for lease in await client.lease(0, 2):
            await client.put(rollout(lease))
        await client.plan(0)
        await client.commit(0)
        await client.enqueue([prompt(i) for i in range(4, 6)])
        for lease in await client.lease(1, 4):
            await client.put(rollout(lease))
        await client.rewind(0, incarnation=1)
        more = asyncio.ensure_future(client.enqueue([prompt(6)]))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(more), 0.5)
        client.connection.incarnation = 1
        leases = await client.lease(0, 4)
        assert [lease.prompt.extra["row"] for lease in leases] == [2, 3, 4, 5]
        await client.put(rollout(leases[0]))
        await asyncio.wait_for(more, 20)


async def test_the_error_for_too_large_prompts_or_groups_names_the_option():
    async with running(max_prompt_bytes=300, max_stored_bytes=2000) as run:
        client = run.client()
        with pytest.raises(ReplayBufferError, match=r"buffer\.max_prompt_bytes=300"):
            await client.enqueue([prompt(i) for i in range(9)])
        await client.enqueue([prompt(0)])
        [lease] = await client.lease(0, 1)
        with pytest.raises(ReplayBufferError, match=r"exceeds buffer\.max_stored_bytes=2000"):
            await client.put(rollout(lease, num_tokens=1000))
        await client.put(rollout(lease))


async def test_saved_prefixes_count_against_max_stored_bytes():
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


async def test_a_fetch_that_names_a_group_twice_is_refused():
    async with running(groups_per_step=1) as run:
        client = run.client()
        await client.enqueue([prompt(0)])
        [lease] = await client.lease(0, 1)
        await client.put(rollout(lease))
        with pytest.raises(WireError, match="must not name a group twice"):
            await client.fetch([0] * 1000)


async def test_a_fetch_is_refused_while_too_many_fetched_bytes_are_unread():
    async with running(groups_per_step=1, max_stored_bytes=10_000) as run:
        client = run.client()
        await client.enqueue([prompt(0)])
        [lease] = await client.lease(0, 1)
        await client.put(rollout(lease, num_tokens=400))
        link = client.connection.link
        await link.request(Fetch((0,)))
        with pytest.raises(StoreFull, match="unread bytes of earlier fetches"):
            await link.request(Fetch((0,)))
        await link.request(Fetch((0,), read=link.next_id()))


async def test_waiting_requests_of_one_client_are_bounded():
    room = HeldRequests(Replies(lambda client, reply: None), 9.0)
    for number in range(256):
        room.hold(Message(client=b"a", request_id=number, body=None))
    with pytest.raises(ReplayBufferError, match=r"too many requests of this operation wait: 256 of this client"):
        room.hold(Message(client=b"a", request_id=256, body=None))
    room.hold(Message(client=b"b", request_id=0, body=None))
    room.close()
    assert len(room) == 0


async def test_a_pending_request_is_answered_once_by_its_timer_or_by_a_grant():
    replies: asyncio.Queue[tuple[bytes, Message]] = asyncio.Queue()
    room = HeldRequests(Replies(lambda client, reply: replies.put_nowait((client, reply))), 0.01)
    for client in (b"granted", b"kept"):
        room.hold(Message(client=client, request_id=1, body=None))
    room.answer(lambda request: Done() if request.client == b"granted" else None)
    answers = [await replies.get() for _ in range(2)]
    assert [(client, reply.body) for client, reply in answers] == [(b"granted", Done()), (b"kept", NothingYet())]
    assert not len(room)
    assert replies.empty()


@pytest.mark.parametrize("num_store_servers", [0, 1])
async def test_no_worker_sends_a_payload_twice_if_the_store_is_full(
    monkeypatch: pytest.MonkeyPatch, num_store_servers: int
):
    """The buffer has room for three groups. Each of eight workers sends its group only once."""
    num_sent = Counter()
    push = ChunkSender.push

    def sent(sender: ChunkSender, request_id: int, frames: list) -> None:
        num_sent["bytes"] += sum(map(len, frames))
        push(sender, request_id, frames)

    monkeypatch.setattr(ChunkSender, "push", sent)
    options = {"max_stored_bytes": 4_000_000, "num_store_servers": num_store_servers}
    async with running(groups_per_step=1, max_lag=8, **options) as run:
        control, producers = run.client(), [run.client() for _ in range(8)]
        await control.enqueue([prompt(i) for i in range(8)])
        leases = [(await producer.lease(0, 1))[0] for producer in producers]
        puts = [
            asyncio.ensure_future(producer.put(rollout(lease, num_tokens=100_000)))
            for producer, lease in zip(producers, leases, strict=True)
        ]
        for version in range(8):
            await control.plan(version)
            await control.commit(version)
        await asyncio.wait_for(asyncio.gather(*puts), 60)
        assert 8 * 1_200_000 < num_sent["bytes"] < 9 * 1_200_000


async def test_small_puts_that_wait_for_a_full_store_continue_when_it_has_room():
    async with running(groups_per_step=1, max_lag=8, max_stored_bytes=20_000, request_timeout_s=60.0) as run:
        control, producer = run.client(), run.client()
        await control.enqueue([prompt(i) for i in range(8)])
        leases = await producer.lease(0, 8)
        puts = asyncio.gather(*(producer.put(rollout(lease, num_tokens=500)) for lease in leases))
        for version in range(8):
            await asyncio.wait_for(control.plan(version), 30)  # times out if a waiting put never continues
            await control.commit(version)
        await asyncio.wait_for(puts, 60)


async def test_one_call_can_queue_prompts_with_many_images():
    def with_images(group_id: int) -> Prompt:
        images = [np.full((70, 70, 3), group_id, dtype=np.uint8) for _ in range(32)]
        return Prompt(group_id=group_id, prompt_ids=np.arange(3, dtype=np.int32), extra={"images": images})

    async with running(groups_per_step=128, queue_size=128) as run:
        client = run.client(request_timeout_s=20.0)
        await client.enqueue([with_images(i) for i in range(128)])
        leases = []
        while len(leases) < 128:
            leases += await client.lease(0, 128)
        assert {int(lease.prompt.extra["images"][31][0, 0, 0]) for lease in leases} == set(range(128))


def with_image(group_id: int, num_bytes: int) -> Prompt:
    image = np.full(num_bytes, group_id, dtype=np.uint8)
    return Prompt(group_id=group_id, prompt_ids=np.arange(3, dtype=np.int32), extra={"image": image})


async def test_large_prompts_saved_prefixes_and_leases_need_no_reservation():
    async with running(groups_per_step=1) as run:
        first, second = run.client(), run.client()
        await first.enqueue([with_image(7, 9_000_000)])
        [lease] = await first.lease(0, 1)
        await first.save_progress(lease, rollout(lease, num_tokens=100_000))
        await first.release(lease, num_tokens=100_000, reason="stopped")
        [again] = await second.lease(0, 1)
        assert again.prompt.extra["image"].tobytes() == bytes([7]) * 9_000_000
        saved = second.take_progress(again)
        assert saved is not None
        assert saved.summary == rollout(lease, num_tokens=100_000).summary


async def test_a_too_large_message_fails_only_the_call_of_its_sender():
    async with running(groups_per_step=1, max_stored_bytes=2_000_000, max_prompt_bytes=3_000_000) as run:
        client = run.client()
        waiting = asyncio.ensure_future(client.lease(0, 1))
        with pytest.raises(WireError, match=r"more than 3000000 bytes.*buffer\.max_prompt_bytes"):
            await client.enqueue([with_image(0, 30_000_000)])
        assert not waiting.done()
        await client.enqueue([with_image(1, 2_500_000)])
        [lease] = await asyncio.wait_for(waiting, 30)
        with pytest.raises(StoreFull, match=r"bytes of a prefix do not fit.*max_stored_bytes is 2000000"):
            await client.save_progress(lease, rollout(lease, num_tokens=180_000))
        await client.save_progress(lease, rollout(lease, num_tokens=100_000))
        await client.put(rollout(lease, num_tokens=120_000))
        assert (await client.stats()).groups["stored"] == 1


async def test_too_large_or_negative_token_counts_are_refused():
    async with running(groups_per_step=1) as run:
        client = run.client()
        await client.enqueue([prompt(0)])
        [lease] = await client.lease(0, 1)
        for num_tokens in (1 << 62, (1 << 64) - 1, -1):
            with pytest.raises(WireError, match=r"Expected `int` [<>]= (1099511627776|0)"):
                await client.release(lease, num_tokens=num_tokens, reason="too many")
        await client.put(rollout(lease))
        assert (await client.stats()).tokens_buffered == 5


CONSUMER = """
import sys
from buffer import BufferClient, SyncBufferClient
rank = SyncBufferClient(BufferClient(sys.argv[1], request_timeout_s=60.0))
while True:
    rank.fetch([0])
    print("fetched", flush=True)
"""


async def test_a_stopped_learner_rank_delays_no_other_client(tmp_path: Path):
    with BufferProcess(BufferConfig(max_lag=1), groups_per_step=4, log_path=tmp_path / "log") as process:
        client = AnyRole(process.address, request_timeout_s=10.0)
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


async def test_a_renewal_of_too_many_leases_is_refused_and_delays_no_other_call():
    """The header of one message can name half a million leases, but the server accepts at most `MAX_LEASES`."""
    async with running(groups_per_step=1) as run:
        modest = run.client()
        await modest.enqueue([prompt(0)])
        [lease] = await modest.lease(0, 1)
        links = [ClientSocket(run.server.address, timeout_s=5.0, keys=None) for _ in range(20)]
        began = asyncio.get_running_loop().time()
        calls = [link.call(Renew(((0, 0),) * 300_000)) for link in links]
        refusals = asyncio.gather(*calls, return_exceptions=True)
        await modest.renew([lease])
        assert [type(refusal) for refusal in await refusals] == [WireError] * 20
        other = run.client()
        with pytest.raises(WireError, match=f"Expected `array` of length <= {MAX_LEASES}"):
            await other.connection.link.call(Renew(((0, 0),) * (MAX_LEASES + 1)))
        assert asyncio.get_running_loop().time() - began < 4.0
        assert (await modest.stats()).groups["leased"] == 1
        for link in links:
            link.close()


async def test_a_worker_can_renew_more_leases_than_fit_into_one_request():
    async with running(groups_per_step=1) as run:
        client = run.client()
        await client.enqueue([prompt(0)])
        [lease] = await client.lease(0, 1)
        await client.renew([lease] * (2 * MAX_LEASES + 1))
        assert (await client.stats()).groups["leased"] == 1


def test_all_incomplete_messages_of_a_client_have_one_common_bound():
    receiver = ChunkReceiver(10_000)
    receiver.add(Chunk(request_id=1, index=0, count=2, frames=[b"a" * 6_000]))
    with pytest.raises(WireError, match=r"other incomplete requests"):
        receiver.add(Chunk(request_id=2, index=0, count=2, frames=[b"b" * 6_000]))
    assert receiver.add(Chunk(request_id=1, index=1, count=2, frames=[b"a" * 4_000])) == [b"a" * 6_000, b"a" * 4_000]
    assert receiver.add(Chunk(request_id=3, index=0, count=1, frames=[b"c" * 10_000])) == [b"c" * 10_000]
    assert receiver.is_idle


def test_a_restarted_message_counts_once_against_the_bound_on_incomplete_messages():
    receiver = ChunkReceiver(10_000)
    for _ in range(3):
        receiver.add(Chunk(request_id=1, index=0, count=2, frames=[b"a" * 6_000]))
    assert receiver.add(Chunk(request_id=1, index=1, count=2, frames=[b"a" * 4_000]))
    assert receiver.is_idle


def test_a_client_may_have_at_most_64_incomplete_requests_of_any_size():
    receiver = ChunkReceiver(10_000)
    for request_id in range(1, 65):
        receiver.add(Chunk(request_id=request_id, index=0, count=2, frames=[]))
    with pytest.raises(WireError, match="its client has more than 64 incomplete requests"):
        receiver.add(Chunk(request_id=65, index=0, count=2, frames=[]))
