"""Rounds (transfers of a version over the network): the ranks of a round, and the channel for its messages."""

import asyncio
import os
import re
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.core.errors import WeightsError
from asyncrl.core.types import FROZEN, WeightOffer
from asyncrl.weights import rounds
from asyncrl.weights.carriers import PublishOptions
from asyncrl.weights.rounds import (
    ChannelRefused,
    HeldOffer,
    HeldVersions,
    RoundCoordinator,
    RoundRequest,
    WeightChannel,
    rounds_of,
)

NO_NAME_SERVICE = Path(__file__).parents[1] / "support" / "no_name_service.c"
SECONDS = 10.0


def held(version, base=""):
    offer = WeightOffer(version=version, manifest="", digest="", num_bytes=0)
    return HeldOffer(offer=offer, manifest=b"", shares=(), base=base)


@pytest.mark.parametrize("only_newest", [True, False], ids=["hosts", "engines"])
def test_rounds_group_requests_by_version_and_by_the_version_of_the_receivers(only_newest):
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


def test_a_rank_stores_the_newest_and_the_oldest_offered_version_and_frozen_weights():
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
def coordinator():
    with coordinators() as one:
        yield one


@contextmanager
def coordinators(first_message=None, num_receivers=1):
    """Yield a coordinator of one learner rank. The coordinator runs in a thread.

    The function ``first_message(connection, message)`` replaces the coordinator's function that handles messages.
    """
    coordinator = RoundCoordinator(PublishOptions(num_receivers=num_receivers), "127.0.0.1", num_ranks=1)
    if first_message is not None:
        coordinator.take = first_message
    thread = threading.Thread(target=lambda: asyncio.run(coordinator.run()))
    thread.start()
    yield coordinator
    coordinator.close()
    thread.join(SECONDS)
    assert not thread.is_alive()


def echo(connection, message):
    rounds.send_message(connection, {"echo": message})


def connected(coordinator):
    return WeightChannel(coordinator.address).connect(SECONDS)


def test_a_message_arrives_with_its_bytes_and_gets_an_answer():
    with coordinators(echo) as coordinator, connected(coordinator) as channel:
        message = {"kind": "ask", "values": [b"\x00\x01", b""], "number": 3}
        channel.send(message)
        assert channel.receive(SECONDS) == {"echo": message}


def test_the_channel_refuses_clients_with_a_wrong_or_old_key(coordinator):
    with coordinators() as other:
        earlier = replace(coordinator.address, access=other.address.access)
    for address in (earlier, replace(coordinator.address, access="")):
        with pytest.raises(ChannelRefused, match=f"{coordinator.address.endpoint} does not have this channel"):
            WeightChannel(address).connect(SECONDS)


def test_the_channel_ignores_messages_of_a_client_without_the_key():
    taken = []
    with coordinators(lambda *message: taken.append(message)) as coordinator:
        host_and_port = ("127.0.0.1", int(coordinator.address.endpoint.rpartition(":")[2]))
        with socket.create_connection(host_and_port, SECONDS) as stranger:
            stranger.sendall(bytes(48) + rounds.framed({"kind": "ask", "version": 1, "holds": "", "host": ""}))
            while stranger.recv(1024):
                pass
    assert taken == []


def test_a_receiver_refuses_a_sender_without_the_key(coordinator):
    """A false server does not know the key. It sends the client's proof of the key back to the client.

    The client must not accept its own proof as the proof of the server.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def reflect():
            connection, _ = listener.accept()
            with connection:
                connection.sendall(bytes(16))
                connection.sendall(connection.recv(32, socket.MSG_WAITALL))

        impostor = threading.Thread(target=reflect)
        impostor.start()
        address = replace(coordinator.address, endpoint=f"127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(ChannelRefused, match="does not have this channel's key"):
            WeightChannel(address).connect(SECONDS)
        impostor.join(SECONDS)


def test_a_receiver_detects_the_end_of_a_sender_without_waiting():
    with coordinators(lambda *_: coordinator.close()) as coordinator:
        with connected(coordinator) as channel:
            channel.send({"kind": "ask"})
            with pytest.raises(
                WeightsError, match=f"the connection to learner rank 0 at {coordinator.address.endpoint} ended"
            ):
                channel.receive(SECONDS)
        with pytest.raises(ChannelRefused, match=f"nobody listens at {coordinator.address.endpoint}"):
            connected(coordinator)


def test_an_unreachable_host_does_not_count_as_an_ended_sender(coordinator, monkeypatch):
    def unreachable(*_):
        raise OSError(113, "No route to host")

    monkeypatch.setattr(rounds.socket.socket, "connect", unreachable)
    with pytest.raises(WeightsError, match=r"cannot be reached: .*No route to host") as raised:
        connected(coordinator)
    assert not isinstance(raised.value, ChannelRefused)


@pytest.mark.long
def test_a_receiver_detects_a_lost_sender_host_by_its_missing_answers(tmp_path):
    """After a power loss of the sender's host, no bytes arrive, but the connection does not end."""
    script = tmp_path / "vanish.py"
    script.write_text(VANISHING)
    if subprocess.run(["unshare", "-rn", "ip", "link", "set", "lo", "up"], check=False).returncode:
        pytest.skip("network namespaces are not allowed here")
    subprocess.run(["unshare", "-rn", sys.executable, script], check=True, timeout=60.0)


VANISHING = """
import subprocess
from tests.weights.test_rounds import SECONDS, connected, coordinators, rounds
from asyncrl.core.errors import WeightsError

rounds.HEARTBEAT_S, rounds.SILENCE_S = 1.0, 3.0
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
with coordinators(lambda *_: None) as coordinator, connected(coordinator) as channel:
    channel.send({"kind": "ask"})
    subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
    try:
        channel.receive(SECONDS)
    except WeightsError as error:
        assert "ended" in str(error), error
    else:
        raise AssertionError("the receiver did not notice that the sender had vanished")
"""


def test_a_receiver_waits_for_a_silent_sender_until_the_deadline(coordinator):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = replace(coordinator.address, endpoint=f"127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(TimeoutError, match=f"learner rank 0 at {address.endpoint} was silent for 0.2 s"):
            WeightChannel(address).connect(0.2)


def test_a_learner_rank_that_connects_again_gets_its_messages(coordinator):
    for _ in range(2):
        with connected(coordinator) as rank, connected(coordinator) as receiver:
            coordinator.offers.add(1, held(1))
            rank.send({"kind": "done", "rank": 0, "round": 0, "failed": False})
            receiver.send({"kind": "ask", "version": 1, "holds": "", "host": ""})
            receiver.send({"kind": "present", "call": receiver.receive(SECONDS)["call"]})
            assert rank.receive(SECONDS)["version"] == 1
            rank.send(
                {"kind": "done", "rank": 0, "round": receiver.receive(SECONDS)["answer"]["number"], "failed": False}
            )


def test_receivers_of_one_host_are_neighbors_in_a_group():
    hosts = ["b", "a", "b", "a"]
    with coordinators(num_receivers=4) as coordinator, ExitStack() as stack:
        coordinator.offers.add(1, held(1))
        stack.enter_context(connected(coordinator)).send({"kind": "done", "rank": 0, "round": 0, "failed": False})
        receivers = [stack.enter_context(connected(coordinator)) for _ in hosts]
        for receiver, host in zip(receivers, hosts, strict=True):
            receiver.send({"kind": "ask", "version": 1, "holds": "", "host": host})
        for receiver in receivers:
            receiver.send({"kind": "present", "call": receiver.receive(SECONDS)["call"]})
        places = {receiver.receive(SECONDS)["index"]: host for receiver, host in zip(receivers, hosts, strict=True)}
    assert [places[index] for index in range(4)] == ["a", "a", "b", "b"]


def test_an_unreadable_message_is_logged_and_skipped(coordinator, caplog):
    with connected(coordinator) as channel:
        channel.send([1])
        channel.send({"kind": "want", "round": 7, "key": "", "count": 1})
        assert channel.receive(SECONDS) == {"over": 7}
    assert "on the channel of weights is ignored" in caplog.text


def test_the_channel_listens_only_on_one_numeric_address(coordinator):
    host, _, port = coordinator.address.endpoint.rpartition(":")
    assert re.fullmatch(r"\d+\.\d+\.\d+\.\d+", host)
    socket.create_connection((host, int(port)), SECONDS).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", int(port)), SECONDS)


def test_channel_keys_are_not_in_the_repr_of_addresses_and_offers(coordinator):
    address = coordinator.address
    offer = WeightOffer(version=1, manifest="10.0.0.1:1", digest="", num_bytes=0, access=address.access)
    assert len(address.access) == 64
    assert address.access[:9] not in repr(address) + repr(offer)


@pytest.mark.long
def test_a_stream_needs_no_name_service(tmp_path):
    """Torch's store asks a name service (DNS) at each connection, but a stream must not depend on it.

    Otherwise, a lost answer of the name service delays a connection by 5 s, and receivers miss transfers.
    """
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
