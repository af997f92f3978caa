"""Who may speak to the buffer, and what whoever speaks can do to it."""

import asyncio
import os
from pathlib import Path

import msgpack
import pytest
import zmq
from groups import prompt, rollout, running
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.protocol.errors import DeadlineError, RateExceeded, ReplayBufferError, WireError
from asyncrl.protocol.types import BufferStats
from buffer import BufferClient, BufferConfig, BufferProcess, SyncBufferClient, client_keys, make_keys, messages
from buffer.messages import PROTOCOL_VERSION, Message
from buffer.server import BufferServer
from buffer.service import BufferService


async def test_with_keys_the_run_goes_on_as_without(tmp_path: Path):
    make_keys(tmp_path)
    keys = client_keys(tmp_path)
    async with running(groups_per_step=1, keys=str(tmp_path)) as run:
        client = run.client(keys=keys)
        await client.enqueue([prompt(0)])
        [lease] = await client.lease(0, 1)
        await client.put(rollout(lease))
        await client.plan(0)
        rank = SyncBufferClient(run.server.address, request_timeout_s=5.0, keys=keys)
        [group] = await asyncio.to_thread(rank.fetch, [0])
        rank.close()
        assert group.summary == rollout(lease).summary


async def test_a_server_makes_the_keys_where_there_are_none_and_says_how_to_reach_it(
    tmp_path: Path,
):
    config = BufferConfig(keys=str(tmp_path / "keys"), request_timeout_s=5.0)
    for _ in range(2):  # started again it keeps them
        with BufferProcess(config, groups_per_step=1, log_path=tmp_path / "log") as process:
            assert process.connection.keys == str(tmp_path / "keys")
            client = process.connection.client()
            assert (await client.stats()).learner_version == 0
            await client.close()
            stranger = BufferClient(process.address, request_timeout_s=0.5)
            with pytest.raises(DeadlineError, match="refuses this client's key"):
                await stranger.stats()
            await stranger.close()
    assert (tmp_path / "keys" / "client.json").stat().st_mode & 0o777 == 0o600


async def test_an_unknown_key_and_no_key_are_refused_and_the_unknown_key_is_counted(tmp_path: Path):
    make_keys(tmp_path / "run")
    make_keys(tmp_path / "other")
    known, other = client_keys(tmp_path / "run"), client_keys(tmp_path / "other")
    stranger = type(other)(public=other.public, secret=other.secret, server_public=known.server_public)
    async with running(keys=str(tmp_path / "run")) as run:
        for keys in (stranger, None):
            with pytest.raises(DeadlineError, match="refuses this client's key"):
                await run.client(keys=keys, request_timeout_s=0.5).stats()
        assert run.server.counters()["unknown_keys"] >= 1
        assert (await run.client(keys=known).stats()).learner_version == 0


def test_key_files_belong_to_their_owner_only(tmp_path: Path):
    make_keys(tmp_path)
    for name in ("server.json", "client.json"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    (tmp_path / "client.json").chmod(0o644)
    with pytest.raises(ValueError, match=r"client.json is readable by others \(mode 644\)"):
        client_keys(tmp_path)
    with pytest.raises(ValueError, match="exists; keys are made once"):
        make_keys(tmp_path)


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3", "*"])
async def test_without_keys_nothing_but_loopback_is_bound(host: str):
    with pytest.raises(ValueError, match=rf"buffer.host={host.replace('*', '.')} is reachable.*buffer.keys is empty"):
        BufferServer(BufferConfig(host=host), groups_per_step=1)


async def test_another_protocol_version_is_refused_by_name():
    async with running() as run:
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.connect(run.server.address)
        socket.send(msgpack.packb([PROTOCOL_VERSION + 1, "stats", 7, {}]))
        frames = await asyncio.to_thread(socket.recv_multipart)
        reply = messages.parse(frames)
        socket.close(linger=0)
        assert reply.name == "WireError"
        ours, other = PROTOCOL_VERSION, PROTOCOL_VERSION + 1
        assert f"protocol version {ours}, got version {other}" in reply.fields["message"]
        with pytest.raises(WireError, match=f"got version {other}"):
            messages.parse([msgpack.packb([PROTOCOL_VERSION + 1, "ok", 7, {}])])


async def test_a_frame_over_the_limit_closes_its_connection_and_the_server_goes_on():
    async with running(max_message_bytes=10_000) as run:
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.connect(run.server.address)
        socket.send(os.urandom(20_000))
        assert (await run.client().stats()).learner_version == 0
        socket.close(linger=0)
        assert run.server.counters()["malformed"] == 0


async def test_a_client_over_its_rate_is_told_so_and_others_are_answered():
    async with running(max_requests_per_s=20) as run:
        greedy, modest = run.client(), run.client()
        answers = await asyncio.gather(*(greedy.stats() for _ in range(60)), return_exceptions=True)
        refused = [answer for answer in answers if isinstance(answer, RateExceeded)]
        assert refused
        assert "more than 20 requests" in str(refused[0])
        assert len(refused) + sum(isinstance(answer, BufferStats) for answer in answers) == 60
        assert run.server.counters()["over_rate"] == len(refused)
        assert (await modest.stats()).learner_version == 0


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
operations = st.sampled_from(
    [
        "hello",
        "enqueue",
        "lease",
        "cancel",
        "beat",
        "leave",
        "renew",
        "put",
        "release",
        "save",
        "plan",
        "fetch",
        "commit",
        "stats",
        "inspect",
        "nonsense",
    ]
)
field_names = st.sampled_from(
    [
        "group_id",
        "attempt",
        "groups",
        "counts",
        "attempts",
        "version",
        "engine_version",
        "max_groups",
        "num_tokens",
        "reason",
        "request",
        "rewards",
        "response_lengths",
        "num_prompt_tokens",
        "oldest_version",
        "newest_version",
        "continued",
        "produces",
        "read",
    ]
)
small = st.integers(-1, 5) | st.lists(st.integers(-1, 5), max_size=3) | st.text(max_size=3)
requests = st.tuples(operations, st.dictionaries(field_names, small | values, max_size=10))


@settings(max_examples=500, deadline=None)
@given(frames=st.lists(st.binary(max_size=200) | values.map(msgpack.packb), max_size=4))
def test_parsing_any_frames_gives_a_message_or_a_wire_error(frames: list[bytes]):
    try:
        assert isinstance(messages.parse(frames), Message)
    except WireError:
        return


@settings(max_examples=300, deadline=None)
@given(stream=st.lists(st.tuples(requests, st.lists(st.binary(max_size=50), max_size=3)), max_size=30))
def test_no_request_raises_in_the_service_or_breaks_the_ledger(stream):
    """Whatever is asked, the answer is a reply or an error of the protocol, and the account still balances."""

    async def ask() -> None:
        replies: list[Message] = []
        config = BufferConfig(queue_size=8, max_stored_bytes=1000, max_lag=1)
        service = BufferService(config, groups_per_step=1, send=lambda client, reply: replies.append(reply))
        for number, ((name, fields), payload) in enumerate(stream):
            service.handle(b"client", Message(name=name, request_id=number + 1, fields=fields, payload=payload))
            service.settle()
        for reply in replies:
            Message(name=reply.name, request_id=reply.request_id, fields=reply.fields).frames()
        stats = service.ledger.stats()
        assert stats.tokens_buffered >= 0
        assert stats.groups["queued"] <= 8 + 1
        service.close()

    asyncio.run(ask())


async def test_a_server_that_got_garbage_from_many_sides_still_works():
    async with running(groups_per_step=1) as run:
        sockets = [zmq.Context.instance().socket(zmq.DEALER) for _ in range(4)]
        for socket in sockets:
            socket.connect(run.server.address)
            for size in (0, 1, 10, 1000):
                socket.send_multipart([os.urandom(size)] * (1 + size % 5))
        client: BufferClient = run.client()
        await client.enqueue([prompt(0)])
        [lease] = await client.lease(0, 1)
        await client.put(rollout(lease))
        assert len((await client.plan(0)).groups) == 1
        with pytest.raises(ReplayBufferError):
            await client.commit(5)
        for socket in sockets:
            socket.close(linger=0)
