"""The control channel of weights that are sent over the network; for the rounds on it see `test_stream.py`."""

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
from asyncrl.core.types import WeightOffer
from asyncrl.weights import rounds
from asyncrl.weights.rounds import ChannelRefused, ChannelServer, RankChannel, WeightChannel, rank_id

NO_NAME_SERVICE = Path(__file__).parents[1] / "support" / "no_name_service.c"
SECONDS = 10.0


@pytest.fixture
async def server():
    with closing(ChannelServer("127.0.0.1")) as server:
        yield server


def ask(address, *values):
    """One message there and one back."""
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


async def test_a_stranger_and_who_looks_for_an_earlier_sender_are_refused(server):
    with closing(ChannelServer("127.0.0.1")) as other:
        earlier = replace(server.address, access=other.address.access)
    stranger = replace(server.address, access=server.address.access[:40] + zmq.curve_keypair()[1].decode())
    for address in (earlier, stranger):
        with pytest.raises(ChannelRefused, match=f"another sender listens at {server.address.endpoint}"):
            await asyncio.to_thread(ask, address)


async def test_a_sender_that_has_ended_is_known_at_once(server):
    asking = asyncio.create_task(asyncio.to_thread(ask, server.address))
    await server.receive()
    server.close()
    with pytest.raises(WeightsError, match=f"the connection to learner rank 0 at {server.address.endpoint} ended"):
        await asking
    with pytest.raises(ChannelRefused, match=f"nobody listens at {server.address.endpoint}"):
        await asyncio.to_thread(ask, server.address)


async def test_a_host_that_cannot_be_reached_is_no_sender_that_has_ended(server, monkeypatch):
    server.close()

    def unreachable(*_):
        raise OSError(113, "No route to host")

    monkeypatch.setattr(rounds.socket, "create_connection", unreachable)
    with pytest.raises(WeightsError, match=r"cannot be reached: .*No route to host") as raised:
        await asyncio.to_thread(ask, server.address)
    assert not isinstance(raised.value, ChannelRefused)


async def test_a_sender_that_vanished_without_a_word_is_noticed(monkeypatch):
    """As when its host lost power or its link was cut: bytes go nowhere, and nothing ends the connection."""
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


async def test_a_sender_that_stands_still_is_waited_for_until_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as silent, closing(ChannelServer("127.0.0.1")) as other:
        address = replace(other.address, endpoint=f"127.0.0.1:{silent.getsockname()[1]}")

        def wait():
            with WeightChannel(address) as channel:
                channel.receive(0.2)

        with pytest.raises(TimeoutError, match=f"learner rank 0 at {address.endpoint} was silent for 0.2 s"):
            await asyncio.to_thread(wait)


async def test_a_learner_rank_that_comes_back_is_reached_under_its_name(server):
    with closing(RankChannel(server.address, 3)) as lost:
        await lost.send({"round": 1})
        await server.receive()
        with closing(RankChannel(server.address, 3)) as back:
            await back.send({"round": 2})
            assert (await server.receive()).head == {"round": 2}
            server.send(rank_id(3), {"round": 7})
            assert await back.receive() == {"round": 7}


async def test_a_message_that_cannot_be_read_is_said_and_skipped(server, caplog):
    with closing(RankChannel(server.address, 0)) as rank:
        await rank.send([1])
        await rank.send({"round": 1})
        assert (await server.receive()).head == {"round": 1}
    assert "a message begins with a JSON object" in caplog.text


async def test_it_listens_on_one_address_alone_and_that_is_a_number(server):
    host, _, port = server.address.endpoint.rpartition(":")
    assert re.fullmatch(r"\d+\.\d+\.\d+\.\d+", host)
    socket.create_connection((host, int(port)), SECONDS).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", int(port)), SECONDS)


async def test_keys_are_shown_neither_in_an_address_nor_in_an_offer(server):
    offer = WeightOffer(version=1, manifest="10.0.0.1:1", digest="", num_bytes=0, access=server.address.access)
    assert server.address.access[:9] not in repr(server.address) + repr(offer)


def test_weights_arrive_where_the_name_service_answers_nothing_since_nobody_asks_it(tmp_path):
    """Torch's own store asks it at each connection; where an answer was lost, that took 5 s, and rounds were missed."""
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
