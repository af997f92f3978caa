"""Who is in a round of a stream of weights, and the channel of these messages; `test_stream.py` sends weights."""

import asyncio
import os
import re
import socket
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from asyncrl.core.errors import WeightsError
from asyncrl.core.types import FROZEN, WeightOffer
from asyncrl.weights import rounds
from asyncrl.weights.rounds import (
    ChannelRefused,
    ChannelServer,
    HeldOffer,
    HeldVersions,
    RankChannel,
    RoundRequest,
    WeightChannel,
    rank_id,
    rounds_of,
)

NO_NAME_SERVICE = Path(__file__).parents[1] / "support" / "no_name_service.c"
SECONDS = 10.0


def held(version, base=""):
    offer = WeightOffer(version=version, manifest="", digest="", num_bytes=0)
    return HeldOffer(offer=offer, manifest=b"", shares=(), base=base)


@pytest.mark.parametrize("only_newest", [True, False], ids=["hosts", "engines"])
def test_rounds_group_requests_by_version_and_by_the_version_that_receivers_hold(only_newest):
    offers = {FROZEN: held(FROZEN), 4: held(4), 5: held(5, base="digest of 4")}
    requests = [
        RoundRequest(receiver=receiver, version=version, holds=holds)
        for receiver, version, holds in (
            (b"a", 5, ""),
            (b"b", 4, ""),
            (b"c", 5, "digest of 4"),
            (b"d", FROZEN, ""),
            (b"e", 3, ""),
        )
    ]
    divided = [
        (offer and offer.offer.version, b"".join(request.receiver for request in some), is_delta)
        for offer, some, is_delta in rounds_of(requests, offers, only_newest=only_newest)
    ]
    older = None if only_newest else 4
    assert divided == [
        (FROZEN, b"d", False),
        (None, b"e", False),
        (older, b"b", False),
        (5, b"c", True),
        (5, b"a", False),
    ]


def test_a_rank_holds_the_newest_versions_the_oldest_offered_one_and_frozen_weights():
    parts = HeldVersions(2)
    for version in (FROZEN, 1):
        parts.add(version, f"part {version}")
    parts.retire(1)
    for version in (2, 3, 4):
        parts.add(version, f"part {version}")
    assert sorted(parts) == [FROZEN, 1, 3, 4]
    parts.retire(4)
    assert sorted(parts) == [FROZEN, 4]


@pytest.fixture
async def server():
    with closing(ChannelServer("127.0.0.1")) as server:
        yield server


def ask(address, *values):
    """Send a message and return the answer."""
    with WeightChannel(address) as channel:
        channel.send({"kind": "ask"}, *values)
        return channel.receive(SECONDS)


async def test_a_message_and_its_bytes_arrive_and_are_answered(server):
    asking = asyncio.create_task(asyncio.to_thread(ask, server.address, b"\x00\x01", b""))
    message = await server.receive()
    assert (message.head, message.values) == ({"kind": "ask"}, [b"\x00\x01", b""])
    server.send(message.sender, {"answer": 1}, b"bytes")
    answer = await asking
    assert (answer.head, answer.values) == ({"answer": 1}, [b"bytes"])


async def test_the_channel_refuses_strangers_and_keys_of_an_earlier_sender(server):
    with closing(ChannelServer("127.0.0.1")) as other:
        earlier = replace(server.address, access=other.address.access)
    stranger = replace(server.address, access=server.address.access[:40] + zmq.curve_keypair()[1].decode())
    for address in (earlier, stranger):
        with pytest.raises(ChannelRefused, match=f"another sender listens at {server.address.endpoint}"):
            await asyncio.to_thread(ask, address)


async def test_an_ended_sender_is_noticed_at_once(server):
    asking = asyncio.create_task(asyncio.to_thread(ask, server.address))
    await server.receive()
    server.close()
    with pytest.raises(WeightsError, match=f"the connection to learner rank 0 at {server.address.endpoint} ended"):
        await asking
    with pytest.raises(ChannelRefused, match=f"nobody listens at {server.address.endpoint}"):
        await asyncio.to_thread(ask, server.address)


async def test_an_unreachable_host_does_not_count_as_an_ended_sender(server, monkeypatch):
    server.close()

    def unreachable(*_):
        raise OSError(113, "No route to host")

    monkeypatch.setattr(rounds.socket, "create_connection", unreachable)
    with pytest.raises(WeightsError, match=r"cannot be reached: .*No route to host") as raised:
        await asyncio.to_thread(ask, server.address)
    assert not isinstance(raised.value, ChannelRefused)


async def test_a_vanished_sender_is_noticed_by_missing_heartbeats(monkeypatch):
    """As when the host loses power: no bytes arrive, and nothing ends the connection."""
    monkeypatch.setattr(rounds, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(rounds, "SILENCE_S", 0.4)
    with closing(ChannelServer("127.0.0.1")) as server:
        is_cut = asyncio.Event()
        host, _, port = server.address.endpoint.rpartition(":")

        async def carry(source, sink):
            while data := await source.read(1 << 16):
                if not is_cut.is_set():
                    sink.write(data)
            sink.close()

        async def forward(reader, writer):
            there = await asyncio.open_connection(host, int(port))
            await asyncio.gather(carry(reader, there[1]), carry(there[0], writer))

        async with await asyncio.start_server(forward, "127.0.0.1", 0) as link:
            linked = replace(server.address, endpoint=f"127.0.0.1:{link.sockets[0].getsockname()[1]}")
            asking = asyncio.create_task(asyncio.to_thread(ask, linked))
            await server.receive()
            is_cut.set()
            with pytest.raises(WeightsError, match=r"the connection to learner rank 0 at .* ended"):
                await asking


async def test_a_stopped_sender_has_time_until_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as silent, closing(ChannelServer("127.0.0.1")) as other:
        address = replace(other.address, endpoint=f"127.0.0.1:{silent.getsockname()[1]}")

        def wait():
            with WeightChannel(address) as channel:
                channel.receive(0.2)

        with pytest.raises(TimeoutError, match=f"learner rank 0 at {address.endpoint} was silent for 0.2 s"):
            await asyncio.to_thread(wait)


async def test_a_learner_rank_that_connects_again_gets_its_messages(server):
    with closing(RankChannel(server.address, 3)) as lost:
        await lost.send({"round": 1})
        await server.receive()
        with closing(RankChannel(server.address, 3)) as back:
            await back.send({"round": 2})
            assert (await server.receive()).head == {"round": 2}
            server.send(rank_id(3), {"round": 7})
            assert await back.receive() == {"round": 7}


async def test_an_unreadable_message_is_logged_and_skipped(server, caplog):
    with closing(RankChannel(server.address, 0)) as rank:
        await rank.send([1])
        await rank.send({"round": 1})
        assert (await server.receive()).head == {"round": 1}
    assert "a message begins with a JSON object" in caplog.text


async def test_the_channel_listens_on_one_numeric_address_only(server):
    host, _, port = server.address.endpoint.rpartition(":")
    assert re.fullmatch(r"\d+\.\d+\.\d+\.\d+", host)
    socket.create_connection((host, int(port)), SECONDS).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", int(port)), SECONDS)


async def test_channel_keys_are_not_in_the_repr_of_addresses_and_offers(server):
    offer = WeightOffer(version=1, manifest="10.0.0.1:1", digest="", num_bytes=0, access=server.address.access)
    assert server.address.access[:9] not in repr(server.address) + repr(offer)


def test_a_stream_needs_no_name_service(tmp_path):
    """Torch's store asks it for each connection. A lost answer took 5 s, and rounds were missed."""
    library, queries = tmp_path / "no_name_service.so", tmp_path / "queries"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, NO_NAME_SERVICE, "-ldl"], check=True)
    script = "from tests.weights.test_stream import receive_in_one_process as run; import sys; run(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", script, tmp_path],
        check=True,
        timeout=60.0,
        env={**os.environ, "LD_PRELOAD": str(library), "ASYNCRL_NAME_QUERIES": str(queries)},
    )
    assert not queries.exists(), queries.read_text()
