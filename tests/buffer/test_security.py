"""The clients that the buffer accepts, and attacks by hostile clients."""

import asyncio
import os
import resource
import stat
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import psutil
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect

from asyncrl.core.errors import DeadlineError, NotAllowed, RateExceeded, ReplayBufferError, WireError, WrongEpoch
from asyncrl.core.host import NotPrivate
from asyncrl.core.types import BufferStats
from buffer import (
    BufferClient,
    BufferConfig,
    BufferConnection,
    BufferProcess,
    SyncBufferClient,
    client_keys,
    make_keys,
)
from buffer.commands import OPERATIONS
from buffer.encoding import (
    PROTOCOL_VERSION,
    Message,
    frames_of,
    operation_of,
    parse_answers,
    parse_requests,
)
from buffer.operations import Stats
from buffer.records import BufferRole, Operation
from buffer.server import BufferServer
from buffer.service import BufferService
from buffer.sockets import Channel, PortListener, bulk_address, folder_of, make_socket_folder, remove_socket_folder
from tests.support.buffer_groups import AnyRole, prompt, rollout, running
from tests.support.offers import bare_offer
from tests.support.stranger import NOBODY, as_stranger, refusals

CONTROLLER, ROLLOUT = BufferRole.controller, BufferRole.rollout


async def test_clients_with_keys_can_lease_put_plan_and_fetch(tmp_path: Path):
    make_keys(tmp_path)
    async with running(groups_per_step=1, keys=str(tmp_path)) as run:
        control, worker = (run.client(keys=client_keys(tmp_path, role)) for role in (CONTROLLER, ROLLOUT))
        await control.enqueue([prompt(0)])
        [lease] = await worker.lease(0, 1)
        await worker.put(rollout(lease))
        await control.plan(0)
        rank = SyncBufferClient(
            BufferClient(run.server.address, request_timeout_s=5.0, keys=client_keys(tmp_path, BufferRole.learner))
        )
        [group] = await asyncio.to_thread(rank.fetch, [0])
        rank.close()
        assert group.summary == rollout(lease).summary


async def test_a_server_makes_missing_keys_and_announces_its_address(
    tmp_path: Path,
):
    config = BufferConfig(keys=str(tmp_path / "keys"), request_timeout_s=5.0)
    for _ in range(2):  # the second server uses the keys of the first server
        with BufferProcess(config, groups_per_step=1, log_path=tmp_path / "log") as process:
            assert process.connection.keys == str(tmp_path / "keys")
            client = AnyRole(process.connection.client())
            assert (await client.stats()).learner_version == 0
            await client.close()
            stranger = AnyRole(process.address, request_timeout_s=60)
            with pytest.raises(NotAllowed, match="refuses this client's key"):
                await stranger.stats()
            await stranger.close()
    assert (tmp_path / "keys" / "rollout.json").stat().st_mode & 0o777 == 0o600


async def test_a_role_must_not_make_the_calls_of_another_role(tmp_path: Path):
    make_keys(tmp_path)
    async with running(groups_per_step=1, keys=str(tmp_path)) as run:
        worker, control, inspector, rank = (
            run.client(keys=client_keys(tmp_path, role))
            for role in (ROLLOUT, CONTROLLER, BufferRole.inspector, BufferRole.learner)
        )
        await control.enqueue([prompt(0)])
        theirs = worker.offer(bare_offer(0)), worker.pin(0, 1), worker.unpin(), worker.served(0, 1)
        for call in (worker.plan(0), worker.commit(0), worker.enqueue([prompt(1)]), worker.fetch([0]), *theirs):
            with pytest.raises(NotAllowed, match="the key of role 'rollout' must not send"):
                await call
        for call in (
            inspector.plan(0),
            inspector.lease(0, 1),
            rank.commit(0),
            rank.lease(0, 1),
            rank.next_offer(0),
            control.lease(0, 1),
            control.offer(bare_offer(0)),
        ):
            with pytest.raises(NotAllowed, match="use the key of another role"):
                await call
        assert (await inspector.inspect())["stats"]["groups"]["queued"] == 1
        [lease] = await worker.lease(0, 1)
        # a large put goes through the bulk socket, which checks the roles too
        await worker.put(rollout(lease, num_tokens=200_000))
        with pytest.raises(NotAllowed):
            await rank.put(rollout(lease, num_tokens=200_000))


async def test_a_client_with_a_key_may_send_any_number_of_complete_messages(tmp_path: Path):
    make_keys(tmp_path)
    async with running(
        groups_per_step=1, host="127.0.0.1", keys=str(tmp_path), max_message_bytes=1 << 20, max_lag=12
    ) as run:
        control, worker = (run.client(keys=client_keys(tmp_path, role)) for role in (CONTROLLER, ROLLOUT))
        await control.enqueue([prompt(i) for i in range(12)])
        for _ in range(12):
            [lease] = await worker.lease(0, 1)
            await worker.put(rollout(lease, num_tokens=50_000))
        await asyncio.sleep(1.2)
        assert (await control.stats()).groups["stored"] == 12
        assert run.server.counters()["endless"] == 0


GREETING = b"\xff" + b"\0" * 8 + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" * 32
READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
FRAME_AND_MORE = b"\x03" + (1 << 16).to_bytes(8, "big") + bytes(1 << 16)


async def test_a_connection_with_an_endless_message_is_closed_and_other_connections_continue():
    refused: list[str] = []
    arrived: list[bytes] = []
    after = asyncio.Event()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        listener = PortListener(router, "127.0.0.1", 0, max_incomplete_bytes=1 << 20, on_refused=refused.append)

        def on_message(frames: list[zmq.Frame]) -> None:
            listener.received(frames[-1])
            if frames[-1].bytes == b"after":
                after.set()
            else:
                arrived.append(frames[-1].bytes)

        channel = Channel(router, on_message)
        reader, writer = await asyncio.open_connection("127.0.0.1", int(listener.address.rpartition(":")[2]))
        writer.write(GREETING)
        await reader.readexactly(len(GREETING))
        writer.write(READY)
        with context.socket(zmq.DEALER) as good:
            good.connect(listener.address)
            with pytest.raises(ConnectionError):
                await send_without_end(writer, good)
            good.send(b"after")
            await asyncio.wait_for(after.wait(), timeout=10)
        writer.close()
        listener.close()
        channel.close()
    assert refused == ["endless"]
    assert set(arrived) == {bytes(1 << 16)}
    assert sum(map(len, arrived)) > 1 << 20  # the limit is the size of one message, not of all messages


async def send_without_end(writer: asyncio.StreamWriter, good: zmq.Socket[bytes]) -> None:
    """Send an endless message on one connection, and many complete messages on another connection."""
    for _ in range(5000):
        writer.write(FRAME_AND_MORE)
        await writer.drain()
        good.send(bytes(1 << 16))
        await asyncio.sleep(0.01)


async def test_the_error_for_a_message_of_another_run_names_both_runs(tmp_path: Path):
    config = BufferConfig(epoch="first", socket_folder=str(private_folder(tmp_path)), request_timeout_s=5.0)
    server = BufferServer(config, groups_per_step=1)
    worker = AnyRole(server.address, request_timeout_s=5.0)
    await worker.enqueue([prompt(0)])
    [lease] = await worker.lease(0, 1)
    server.close()
    server = BufferServer(replace(config, epoch="second"), groups_per_step=1)
    control = AnyRole(server.address, request_timeout_s=5.0, epoch="second")
    await control.enqueue([prompt(0)])
    [again] = await control.lease(0, 1)
    for call in (worker.put(rollout(lease)), worker.lease(0, 1), worker.renew([lease]), worker.stats()):
        with pytest.raises(WrongEpoch, match=r"from run 'first', .* serves run 'second'"):
            await call
    stranger = AnyRole(server.address, request_timeout_s=5.0, epoch="first")
    with pytest.raises(WrongEpoch):
        await stranger.stats()
    await control.put(rollout(again))
    assert (await control.stats()).tokens_buffered == 5
    for client in (worker, control, stranger):
        await client.close()
    server.close()


def private_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "sockets"
    folder.mkdir(mode=0o700)
    return folder


async def test_any_exception_of_the_server_answers_the_request_and_the_server_continues(
    monkeypatch: pytest.MonkeyPatch,
):
    async with running(groups_per_step=1) as run:
        client = run.client()

        def fail(*_: object, **__: object) -> None:
            raise RuntimeError("a defect")

        with monkeypatch.context() as broken:
            broken.setattr(BufferService, "_totals", fail)
            with pytest.raises(
                ReplayBufferError, match=r"the buffer failed at .*RuntimeError: a defect; see the server's log"
            ):
                await client.stats()
            broken.setattr(BufferService, "settle", fail)
            with pytest.raises(ReplayBufferError, match="RuntimeError"):
                await client.stats()
        await client.enqueue([prompt(0)])
        [lease] = await client.lease(0, 1)
        await client.put(rollout(lease))
        assert run.server.counters()["failed"] >= 3


async def test_an_answer_that_cannot_be_encoded_is_an_error_for_its_client(monkeypatch: pytest.MonkeyPatch):
    async with running(groups_per_step=1) as run:
        client = run.client()
        monkeypatch.setattr(BufferService, "_totals", lambda service: 1 << 70)
        with pytest.raises(ReplayBufferError, match=r"buffer failed at .* 1 requests"):
            await client.stats()
        await client.enqueue([prompt(0)])


async def test_clients_with_an_unknown_key_or_no_key_are_refused_and_unknown_keys_are_counted(tmp_path: Path):
    make_keys(tmp_path / "run")
    make_keys(tmp_path / "other")
    known, other = (client_keys(tmp_path / name, CONTROLLER) for name in ("run", "other"))
    stranger = replace(other, server_public=known.server_public)
    async with running(keys=str(tmp_path / "run")) as run:
        for keys in (stranger, None):
            with pytest.raises(NotAllowed, match="refuses this client's key"):
                await run.client(keys=keys, request_timeout_s=60).stats()
        assert run.server.counters()["unknown_keys"] >= 1
        assert (await run.client(keys=known).stats()).learner_version == 0


async def test_a_server_without_keys_refuses_keys_and_keys_of_another_run_get_no_answer(tmp_path: Path):
    make_keys(tmp_path / "run")
    make_keys(tmp_path / "other")
    known, other = (client_keys(tmp_path / name, CONTROLLER) for name in ("run", "other"))
    async with running() as run:
        with pytest.raises(NotAllowed, match="no keys to a run without"):
            await run.client(keys=known, request_timeout_s=60).stats()
    async with running(keys=str(tmp_path / "run")) as run:
        with pytest.raises(DeadlineError, match="the keys of another run"):
            await run.client(keys=other, request_timeout_s=0.3).stats()


def test_key_files_must_be_private_to_their_owner(tmp_path: Path):
    make_keys(tmp_path)
    for name in ("server", "store", *BufferRole):
        assert (tmp_path / f"{name}.json").stat().st_mode & 0o777 == 0o600
    (tmp_path / "rollout.json").chmod(0o644)
    with pytest.raises(ValueError, match=r"rollout.json is readable by other users \(mode 644\)"):
        client_keys(tmp_path, ROLLOUT)
    with pytest.raises(ValueError, match="exists; keys are made once"):
        make_keys(tmp_path)
    (tmp_path / "rollout.json").chmod(0o600)
    (tmp_path / "rollout.json").write_text("[]")
    with pytest.raises(ValueError, match=r"rollout.json must hold \[.*\], got list"):
        client_keys(tmp_path, BufferRole.rollout)


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3", "*", "127.0.0.1", "lo", "localhost"])
async def test_without_keys_no_port_is_bound(host: str):
    with pytest.raises(ValueError, match=rf"can reach buffer.host={host.replace('*', '.')}, but buffer.keys is empty"):
        BufferServer(BufferConfig(host=host, advertised_host="10.1.2.3"), groups_per_step=1)


def test_a_server_that_listens_on_all_addresses_needs_an_advertised_host():
    with pytest.raises(ValueError, match=r"connect to buffer.host=0.0.0.0; set buffer.advertised_host"):
        BufferConfig(host="0.0.0.0")


async def test_clients_connect_to_the_advertised_address(tmp_path):
    make_keys(tmp_path)
    server = BufferServer(
        BufferConfig(host="0.0.0.0", advertised_host="127.0.0.1", keys=str(tmp_path)), groups_per_step=1
    )
    try:
        assert server.address.startswith("tcp://127.0.0.1:")
        client = AnyRole(BufferConnection(address=server.address, keys=str(tmp_path)).client())
        assert isinstance(await client.stats(), BufferStats)
        await client.close()
    finally:
        server.close()


async def test_the_error_for_another_protocol_version_names_both_versions():
    async with running() as run:
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.connect(run.server.address)
        ours, other = PROTOCOL_VERSION, PROTOCOL_VERSION + 1
        foreign = msgpack.packb([other, "", [[7, 0, ["stats"]]]])
        socket.send(foreign)
        [reply] = parse_answers(await asyncio.to_thread(socket.recv_multipart))
        socket.close(linger=0)
        assert reply.body.name == "WireError"
        assert f"protocol version {ours}, got version {other}" in reply.body.message
        with pytest.raises(WireError, match=f"got version {other}"):
            parse_answers([foreign])


async def test_a_too_large_frame_closes_its_connection_and_the_server_continues():
    async with running(max_message_bytes=10_000) as run:
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.connect(run.server.address)
        socket.send(os.urandom(20_000))
        assert (await run.client().stats()).learner_version == 0
        socket.close(linger=0)
        assert run.server.counters()["malformed"] == 0


async def test_a_client_over_the_request_rate_gets_errors_and_other_clients_get_answers():
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
SMALL = st.integers(0, 3)


PLAIN = {
    inspect.IntType: SMALL,
    inspect.BoolType: st.booleans(),
    inspect.FloatType: st.floats(0, 9),
    inspect.BytesType: st.binary(max_size=16),
    inspect.StrType: st.sampled_from(["", "a0", "00"]),
    inspect.NoneType: st.none(),
}


def of_type(kind: Any) -> st.SearchStrategy:
    """Return a hypothesis strategy for the values of a field. The values are small, so many requests have an effect."""
    match kind:
        case inspect.TupleType():
            return st.tuples(*map(of_type, kind.item_types))
        case inspect.VarTupleType():
            return st.lists(of_type(kind.item_type), max_size=3).map(tuple)
        case inspect.UnionType():
            return st.one_of(*map(of_type, kind.types))
        case inspect.StructType() | inspect.DataclassType():
            fields = {field.name: of_type(field.type) for field in kind.fields if field.required}
            others = {field.name: of_type(field.type) for field in kind.fields if not field.required}
            return st.fixed_dictionaries(fields, optional=others).map(lambda values: kind.cls(**values))
        case inspect.EnumType():
            return st.sampled_from([*kind.cls])
        case inspect.LiteralType():
            return st.sampled_from(kind.values)
    return PLAIN[type(kind)]


@st.composite
def operations(draw: st.DrawFn) -> Operation:
    """Draw an operation of any kind. If the drawn fields contradict each other, return `Stats` instead."""
    kind = draw(st.sampled_from(OPERATIONS))
    try:
        return draw(of_type(inspect.type_info(kind)))
    except ValueError:
        return Stats()


damaged = st.tuples(st.sampled_from([kind.__struct_config__.tag for kind in OPERATIONS]), st.lists(values, max_size=4))


@settings(max_examples=500)
@given(operation=damaged.map(lambda parts: [parts[0], *parts[1]]) | values)
def test_any_values_decode_to_an_operation_or_raise_a_wire_error(operation: Any):
    request = Message(request_id=1, body=msgspec.msgpack.encode(operation))
    try:
        assert type(operation_of(request)) in OPERATIONS
    except WireError:
        return


@settings(max_examples=500)
@given(frames=st.lists(st.binary(max_size=200) | values.map(msgpack.packb), max_size=4))
def test_any_frames_parse_to_messages_or_raise_a_wire_error(frames: list[bytes]):
    try:
        _, found = parse_requests(frames)
        assert all(isinstance(request, Message) for request in found)
    except WireError:
        return


@settings(max_examples=300)
@given(stream=st.lists(st.tuples(operations(), st.lists(st.binary(max_size=50), max_size=3)), max_size=30))
def test_no_request_raises_in_the_service_or_breaks_the_ledger(stream):
    """Every request gets a reply, which can be a protocol error. After all requests, the account balances."""

    async def ask() -> None:
        replies: list[Message] = []
        config = BufferConfig(queue_size=8, max_stored_bytes=1000, max_lag=1)
        service = BufferService(config, groups_per_step=1, send=lambda client, reply: replies.append(reply))
        for number, (operation, payload) in enumerate(stream):
            service.handle(Message(client=b"client", request_id=number + 1, body=operation, payload=payload))
            service.settle()
        assert len(parse_answers(frames_of("", replies))) == len(replies)
        stats = service.ledger.stats()
        held = [group.summary.num_tokens if group.summary else group.num_saved for group in service.ledger.groups]
        assert stats.tokens_buffered == sum(held)
        assert stats.groups["queued"] <= 8 + 1
        service.close()

    asyncio.run(ask())


async def test_a_server_still_works_after_garbage_from_several_clients():
    async with running(groups_per_step=1) as run:
        sockets = [zmq.Context.instance().socket(zmq.DEALER) for _ in range(4)]
        for socket in sockets:
            socket.connect(run.server.address)
            for size in (0, 1, 10, 1000):
                socket.send_multipart([os.urandom(size)] * (1 + size % 5))
        client: AnyRole = run.client()
        await client.enqueue([prompt(0)])
        [lease] = await client.lease(0, 1)
        await client.put(rollout(lease))
        assert len((await client.plan(0)).groups) == 1
        with pytest.raises(ReplayBufferError):
            await client.commit(5)
        for socket in sockets:
            socket.close(linger=0)


async def test_another_user_of_the_host_cannot_open_the_sockets_of_a_buffer(tmp_path: Path):
    """Other users cannot reach the sockets of ledger and stores, and cannot replace the sockets."""
    async with running(num_store_servers=1) as run:
        [store] = [each["address"] for each in (await run.client().inspect())["stores"]]
        paths = [path for address in (run.server.address, store) for path in (address, bulk_address(address, 0))]
        paths = [path.removeprefix("ipc://") for path in paths]
        assert [stat.S_ISSOCK(os.lstat(path).st_mode) for path in paths] == [True] * 4

        def take_over() -> str:
            try:
                os.unlink(paths[0])
            except OSError as error:
                return type(error).__name__
            return ""

        found = await asyncio.to_thread(as_stranger, lambda: (refusals(paths), take_over()))
        assert found == [dict.fromkeys(paths, "PermissionError"), "PermissionError"]
        assert (await run.client().stats()).learner_version == 0


async def test_a_buffer_refuses_a_socket_folder_that_another_user_could_have_made(tmp_path: Path):
    folder = tmp_path / "sockets"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(NotPrivate, match=r"got a folder of user .* with mode 777"):
        BufferServer(BufferConfig(socket_folder=str(folder)), groups_per_step=1)
    folder.rmdir()
    (tmp_path / "real").mkdir()
    folder.symlink_to(tmp_path / "real")
    with pytest.raises(NotPrivate, match="got a link"):
        BufferServer(BufferConfig(socket_folder=str(folder)), groups_per_step=1)


def is_there(path: str) -> bool:
    return os.path.lexists(path)


async def test_a_server_removes_its_socket_folder_at_its_end():
    async with running() as run:
        folder = folder_of(run.server.address)
        assert stat.S_IMODE(os.lstat(folder).st_mode) == 0o700
    assert not is_there(folder)


def test_the_socket_folder_of_a_killed_server_process_is_removed(tmp_path: Path):
    with BufferProcess(BufferConfig(), groups_per_step=1, log_path=tmp_path / "log") as process:
        folder = Path(folder_of(process.address))
        assert folder.is_dir()
        process.kill()
    assert not folder.exists()


def test_the_path_of_a_socket_is_short_even_if_the_temporary_folder_has_a_long_name(tmp_path: Path, monkeypatch):
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    folder = make_socket_folder()
    assert len(f"{folder}/store-1000000.bulk") <= 107
    remove_socket_folder(folder)


def test_keys_of_another_user_are_not_read(tmp_path: Path):
    make_keys(tmp_path)
    try:
        os.chown(tmp_path / "rollout.json", NOBODY, NOBODY)
    except PermissionError:
        pytest.skip("only root can change the owner of a file")
    with pytest.raises(ValueError, match=f"got user {NOBODY}"):
        client_keys(tmp_path, ROLLOUT)


_MANY_CONNECTIONS = """
import resource, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (2048, 4096))
host, _, port = sys.argv[1].removeprefix("tcp://").rpartition(":")
ends = [socket.create_connection((host, int(port)), 10) for _ in range(int(sys.argv[2]))]
print(len(ends), flush=True)
sys.stdin.read()
"""


def test_connections_beyond_the_limit_of_open_files_do_not_occupy_a_cpu_core(tmp_path: Path):
    """Many connections without keys are open on the server's port. A client of the run still gets answers."""
    config = BufferConfig(host="127.0.0.1", keys=str(tmp_path / "keys"))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        process = BufferProcess(config, groups_per_step=1, log_path=tmp_path / "log")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    with process:
        client = process.connection.sync_client()
        command = [sys.executable, "-c", _MANY_CONNECTIONS, process.address, "400"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as stranger:
            assert stranger.stdout is not None
            assert stranger.stdout.readline().strip() == "400"
            server = psutil.Process(process.process.pid)
            before = sum(server.cpu_times()[:2])
            time.sleep(3)
            assert sum(server.cpu_times()[:2]) - before < 0.5
            assert client.stats().learner_version == 0
            assert "cannot open more files" in process.log_tail()
            stranger.kill()
        client.close()
