"""Runs the ledger's server or a store server: ``python -m buffer.server``.

The server announces its address in one line on stdout, or on ``--announce-fd``. It ends on SIGTERM, SIGINT or SIGUSR1,
and when its parent process ends. The server of a run blocks SIGTERM and SIGINT, so the run sends SIGUSR1.
"""

import argparse
import asyncio
import gc
import json
import logging
import os
import signal
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import zmq

from asyncrl.core import record
from asyncrl.core.errors import (
    AsyncRLError,
    NotAllowed,
    RateExceeded,
    ReplayBufferError,
    WireError,
    WorkerDiedError,
    WrongEpoch,
)
from asyncrl.core.host import end_with_parent, keep_freed_memory, make_private_folder

from .checkpoint_parts import store_part
from .config import BufferConfig, Durability, OnStale, StoresOn
from .encoding import (
    JOIN_BELOW_BYTES,
    MAX_FRAMES,
    MAX_REPLY_FRAMES,
    PUSH_ID,
    Message,
    failure_of,
    frames_of,
    operation_of,
    parse_requests,
)
from .journal import Journal
from .keys import KeyGate, ServerKeys, check_exposure, secure_server, server_keys, store_keys
from .operations import Connect, Connected, Done, Failure, NewKeys, Reconcile, RenewKeys
from .process import StoreServers
from .service import BufferService
from .sockets import (
    Channel,
    Chunk,
    ChunkReceiver,
    ChunkSender,
    PortListener,
    bulk_address,
    folder_of,
    make_socket_folder,
    remove_socket_folder,
    unix_address,
)
from .store_links import StoreLinks
from .store_servers import StoreService

logger = logging.getLogger(__name__)
_KEPT_BYTES = 2**31 - 1
"""Largest number of freed bytes that glibc keeps for later allocations. glibc accepts no larger value."""
_MAX_UNREAD_MESSAGES = 64


class RateLimit:
    """Limits each client to ``per_second`` requests per second. A request that names N leases is counted N times."""

    def __init__(self, per_second: int) -> None:
        self._per_second = per_second
        self._counts: Counter[bytes] = Counter()
        self._since = 0.0

    def check(self, client: bytes, num_parts: int) -> None:
        """Add ``num_parts`` to the number of requests that a client has sent in the current second.

        A request that names N leases is counted N times. Raises `RateExceeded` if the client exceeds the limit.
        """
        now = time.monotonic()
        if now - self._since >= 1.0:
            self._since = now
            self._counts.clear()
        self._counts[client] += num_parts
        if self._counts[client] > self._per_second:
            raise RateExceeded(
                f"more than {self._per_second} requests came from this client within a second "
                "(buffer.max_requests_per_s; a request that names leases counts once per lease); this request was not "
                "answered, send it again later"
            )


@dataclass(kw_only=True, slots=True)
class _BulkPeer:
    sender: ChunkSender
    receiver: ChunkReceiver
    last_heard: float = field(default_factory=time.monotonic)


class Service(Protocol):
    """The interface of an object that answers the requests of a `ServerSocket`."""

    def handle(self, request: Message) -> None:
        """Answer a request, now or later."""

    def settle(self) -> None:
        """Do the work that is due after the received messages, such as answering waiting requests."""

    def close(self) -> None:
        """Cancel every pending request."""


class ServerSocket:
    """Binds the control socket and the bulk socket (for large payloads), and serves requests until `close`.

    Create this object while an asyncio event loop runs. Every request gets a reply, which may be an error. Errors other
    than `AsyncRLError` are logged with a traceback.

    Args:
        config: Options of the buffer.
        make_service: Function that makes the object that answers the requests.
        journal: Keeps the epoch and the addresses on disk, so a restarted server has the same address.
        store: Number of this store server; None for the ledger's server.

    Attributes:
        address: Address of the control socket.
        bulk_port: Port of large payloads; 0 for a Unix socket.
        epoch: Name of the run that this server serves.
    """

    def __init__(
        self,
        config: BufferConfig,
        *,
        make_service: "Callable[[ServerSocket], Service]",
        journal: Journal | None,
        store: int | None = None,
    ) -> None:
        check_exposure(config.host, config.keys)
        self._config = config
        self._journal = journal
        self._context = zmq.Context()
        self._gate: KeyGate | None = None
        self._counts: dict[str, int] = dict.fromkeys(
            ("malformed", "unsent", "unknown_keys", "over_rate", "failed", "no_files", "endless"), 0
        )
        self._outbox: dict[bytes, list[Message]] = {}
        self._flush_handle: asyncio.Handle | None = None
        self._peers: dict[bytes, _BulkPeer] = {}
        self._swept_at = 0.0
        self._limit = RateLimit(config.max_requests_per_s)
        known = journal.read("epoch") if journal is not None else None
        self.epoch = config.epoch or known or uuid.uuid4().hex[:16]
        if journal is not None and self.epoch != known:
            journal.write("epoch", self.epoch)
            # Forget the addresses of an earlier run, because another process may use these addresses now.
            for name in ("address", "bulk_address"):
                if journal.read(name):
                    journal.write(name, "")
        self._own_folder = ""
        self._listeners: dict[str, PortListener] = {}
        self._read_keys = partial(server_keys if store is None else store_keys, Path(config.keys))
        self._told: set[bytes] = set()
        keys = self._read_keys() if config.keys else None
        if keys is not None:
            self._gate = KeyGate(self._context, keys, partial(self._count, "unknown_keys"))
        control = self._router(keys, silent_s=4 * config.heartbeat_s)
        bulk = self._router(keys, silent_s=max(config.request_timeout_s, 4 * config.heartbeat_s))
        self._service = make_service(self)
        if config.host:
            self.address = self._bind_port(control, "address", config.port)
            if config.advertised_host:
                self.address = f"tcp://{config.advertised_host}:{self.address.rpartition(':')[2]}"
            self.bulk_port = int(self._bind_port(bulk, "bulk_address", config.bulk_port).rpartition(":")[2])
        else:
            self.bulk_port = 0
            self.address = self._bind_unix(control, bulk, "buffer" if store is None else f"store-{store}")
        self._control = Channel(control, self._on_message, self._on_burst_end)
        self._bulk = Channel(bulk, self._on_chunk, self._on_burst_end)

    def _router(self, keys: ServerKeys | None, *, silent_s: float) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, self._config.max_message_bytes)
        socket.setsockopt(zmq.RCVHWM, _MAX_UNREAD_MESSAGES)
        beat_ms = max(1, int(self._config.heartbeat_s * 1000))
        socket.setsockopt(zmq.HEARTBEAT_IVL, beat_ms)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(4, int(silent_s * 1000)))
        if keys is not None:
            secure_server(socket, keys)
        return socket

    def _bind_unix(self, control: zmq.Socket[bytes], bulk: zmq.Socket[bytes], name: str) -> str:
        known_address = (self._journal.read("address") or "") if self._journal is not None else ""
        known = folder_of(known_address)
        folder = self._config.socket_folder or known
        if not self._config.socket_folder:
            folder = self._own_folder = known or make_socket_folder()
        make_private_folder(Path(folder))
        address = unix_address(folder, name)
        control.bind(address)
        bulk.bind(bulk_address(address, 0))
        if self._journal is not None and address != known_address:
            self._journal.write("address", address)
        return address

    def _bind_port(self, socket: zmq.Socket[bytes], name: str, port: int) -> str:
        known = (self._journal.read(name) or "") if self._journal is not None else ""
        if not port and not folder_of(known):
            port = int(known.rpartition(":")[2] or 0)
        try:
            listener = PortListener(
                socket,
                self._config.host,
                port,
                max_incomplete_bytes=2 * self._config.max_message_bytes,
                on_refused=self._count,
            )
        except OSError as error:
            option = "buffer.port" if name == "address" else "buffer.bulk_port"
            raise ValueError(
                f"the buffer cannot bind port {port} of {self._config.host}: {error.strerror}; set {option} or "
                "buffer.host"
            ) from error
        self._listeners[name] = listener
        if self._journal is not None and listener.address != known:
            self._journal.write(name, listener.address)
        return listener.address

    def counters(self) -> dict[str, int]:
        """Return the number of refused or undelivered messages, by cause."""
        return dict(self._counts)

    def _count(self, what: str) -> None:
        self._counts[what] += 1

    def close(self) -> None:
        """Stop serving. Pending requests are not answered."""
        self._service.close()
        if self._flush_handle is not None:
            self._flush_handle.cancel()
        for listener in self._listeners.values():
            listener.close()
        self._control.close()
        self._bulk.close()
        if self._gate is not None:
            self._gate.close()
        if self._journal is not None:
            self._journal.close()
        self._context.destroy(linger=0)
        remove_socket_folder(self._own_folder)

    # Incoming messages

    def _on_message(self, frames: list[zmq.Frame]) -> None:
        if self._listeners:
            self._listeners["address"].received(frames[-1])
        client = frames[0].bytes
        if self._admits(client, frames[-1]):
            self._receive(client, self._role_of(frames[-1]), frames[1:], MAX_FRAMES)

    def _on_chunk(self, frames: list[zmq.Frame]) -> None:
        if self._listeners:
            self._listeners["bulk_address"].received(frames[-1])
        client = frames[0].bytes
        if not self._admits(client, frames[-1]):
            return
        if len(frames) == 2 and not len(frames[1]):
            self._peers.pop(client, None)
            self._send_bulk(client, [b""])
            return
        request_id = PUSH_ID
        try:
            chunk = Chunk.parse(frames[1:])
            peer = self._peer(client)
            peer.last_heard = time.monotonic()
            if chunk.count:
                # Acknowledge even a refused chunk, because the client waits for the acknowledgement.
                request_id = chunk.request_id
                self._send_bulk(client, Chunk(request_id=request_id, index=chunk.index).to_frames())
                whole = peer.receiver.add(chunk)
                if whole is not None:
                    self._receive(client, self._role_of(frames[-1]), whole, MAX_REPLY_FRAMES)
            else:
                peer.sender.acknowledge(chunk)
        except WireError as error:
            self._count("malformed")
            self._fail(client, request_id, error)
        self._forget_idle_peers()

    def _peer(self, client: bytes) -> _BulkPeer:
        peer = self._peers.get(client)
        if peer is None:
            sender = ChunkSender(lambda frames: self._send_bulk(client, frames))
            max_bytes = max(self._config.max_stored_bytes, self._config.max_prompt_bytes)
            peer = _BulkPeer(sender=sender, receiver=ChunkReceiver(max_bytes))
            self._peers[client] = peer
        return peer

    def _forget_idle_peers(self) -> None:
        now = time.monotonic()
        if now - self._swept_at < 1.0:
            return
        self._swept_at = now
        oldest = now - 4 * self._config.request_timeout_s
        kept = {
            client: peer
            for client, peer in self._peers.items()
            if peer.last_heard > oldest and not (peer.sender.is_idle and peer.receiver.is_idle)
        }
        self._peers = kept

    def _role_of(self, frame: zmq.Frame) -> str | None:
        return None if self._gate is None else self._gate.role_of(str(frame.get("User-Id")))

    def _admits(self, client: bytes, frame: zmq.Frame) -> bool:
        """Return whether the server accepts the sender's key.

        If the key is not the newest key of its role, tell the client to read its keys again.
        """
        if self._gate is None:
            return True
        public = str(frame.get("User-Id"))
        is_accepted = self._gate.role_of(public) is not None
        if not is_accepted:
            self._count("unknown_keys")
        if not is_accepted or (not self._gate.is_newest(public) and client not in self._told):
            self._told.add(client)
            self.send(client, Message(request_id=PUSH_ID, body=NewKeys()))
        return is_accepted

    def _renew_keys(self) -> None:
        if self._gate is None:
            raise ReplayBufferError("this buffer has no keys to replace; buffer.keys is empty")
        try:
            self._gate.renew(self._read_keys())
        except (OSError, ValueError) as error:
            raise ReplayBufferError(f"the keys were not read again: {error}") from error
        self._told.clear()

    def _receive(self, client: bytes, role: str | None, frames: list[Any], max_frames: int) -> None:
        try:
            epoch, requests = parse_requests(frames, max_frames=max_frames)
        except WireError as error:
            self._count("malformed")
            self._fail(client, PUSH_ID, error)
            return
        for request in requests:
            request.client = client
            self._handle(role, request, epoch)
        if len(requests) > 1:
            self._flush()  # send the replies now, so the client can prepare its next requests

    def _handle(self, role: str | None, request: Message, epoch: str) -> None:
        name = "a request"
        try:
            self._limit.check(request.client, 1)
            operation = request.body = operation_of(request)
            name = operation.name
            self._limit.check(request.client, operation.num_parts - 1)
            if epoch != self.epoch and (epoch or not isinstance(operation, Connect)):
                raise WrongEpoch(
                    f"{name} came from run {epoch!r:.40}, but this buffer serves run {self.epoch!r}; the sender "
                    "belongs to another run and must end"
                )
            if role is not None and role not in operation.roles:
                raise NotAllowed(
                    f"a client with the key of role {role!r} must not send {name}; use the key of another role"
                )
            if isinstance(operation, Connect):
                connected = Connected(self.epoch, self.bulk_port)
                self.send(request.client, Message(request_id=request.request_id, body=connected))
            elif isinstance(operation, RenewKeys):
                self._renew_keys()
                self.send(request.client, Message(request_id=request.request_id, body=Done()))
            else:
                self._service.handle(request)
        except AsyncRLError as error:
            if isinstance(error, RateExceeded):
                self._count("over_rate")
            self._fail(request.client, request.request_id, error)
        except Exception as error:  # noqa: BLE001 - a failed request must not end the server
            self._fail(request.client, request.request_id, self._failure(name, error))

    def _fail(self, client: bytes, request_id: int, error: AsyncRLError) -> None:
        self.send(client, Message(request_id=request_id, body=failure_of(error)))

    def _failure(self, what: str, error: Exception) -> ReplayBufferError:
        self._count("failed")
        logger.error("%s failed", what, exc_info=error)
        return ReplayBufferError(f"the buffer failed at {what}: {type(error).__name__}: {error}; see the server's log")

    def _on_burst_end(self) -> None:
        try:
            self._service.settle()
        except Exception as error:  # noqa: BLE001 - the server tries again after the next messages
            self._failure("answering pending requests", error)
        self._flush()

    # Replies

    def send(self, client: bytes, message: Message) -> None:
        """Send a message to a client. Small messages are sent together, after all received messages are handled.

        A message with a payload is sent immediately, so the client does not wait for replies to other requests.
        """
        self._outbox.setdefault(client, []).append(message)
        if message.payload:
            self._flush()
        elif self._flush_handle is None:
            self._flush_handle = asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        if self._flush_handle is not None:
            self._flush_handle.cancel()
            self._flush_handle = None
        outbox, self._outbox = self._outbox, {}
        refusal = self._write_journal() if outbox else None
        for client, answers in outbox.items():
            if refusal is not None:
                failure = failure_of(refusal)
                answers = [a if a.request_id == PUSH_ID else _failed(a, failure) for a in answers]
            large = [answer for answer in answers if sum(map(len, answer.payload)) >= JOIN_BELOW_BYTES]
            if small := [answer for answer in answers if answer not in large]:
                self._send_by(self._control, [client, *self._frames(small)])
            for answer in large:
                peer = self._peer(client)
                peer.last_heard = time.monotonic()
                peer.sender.push(answer.request_id, self._frames([answer]))

    def _frames(self, answers: list[Message]) -> list[Any]:
        """Encode answers. If one answer cannot be encoded, all answers become errors."""
        try:
            return frames_of(self.epoch, answers)
        except (ValueError, TypeError, OverflowError) as error:
            failure = failure_of(self._failure(f"the answers to {len(answers)} requests", error))
            return frames_of(self.epoch, [_failed(a, failure) for a in answers if a.request_id != PUSH_ID])

    def _write_journal(self) -> ReplayBufferError | None:
        """Write the journal before replies are sent. Return an error that replaces the replies if the write fails."""
        try:
            if self._journal is not None:
                self._journal.flush()
        except ReplayBufferError as error:
            self._count("failed")
            logger.error("requests are answered with an error, because the journal cannot be written: %s", error)
            return error
        return None

    def _send_bulk(self, client: bytes, frames: list[Any]) -> None:
        self._send_by(self._bulk, [client, *frames])

    def _send_by(self, channel: Channel, frames: list[Any]) -> None:
        """Send frames. The frames are lost if the client has disconnected or does not read its messages.

        The client must then repeat the request.
        """
        try:
            channel.send(frames)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self._count("unsent")


def _failed(answer: Message, failure: Failure) -> Message:
    return Message(request_id=answer.request_id, body=failure)


class BufferServer:
    """The ledger's server. Create it while an asyncio event loop runs in this thread.

    Attributes:
        address: Address of the server.
        bulk_port: Port of large payloads; 0 for a Unix socket.
        counters: Function that returns the counts of refused and undelivered messages.
        lost: A future. If this server cannot continue, the future's result is the error, and `serve` ends.
        service: The object that answers the requests.
    """

    service: BufferService

    def __init__(self, config: BufferConfig, *, groups_per_step: int) -> None:
        self.lost: asyncio.Future[WorkerDiedError] = asyncio.get_running_loop().create_future()
        self._checks: set[asyncio.Task[None]] = set()
        self._checkpoint = config.checkpoint
        may_join = config.stores_on is StoresOn.hosts
        self._stores = StoreServers(config, groups_per_step=groups_per_step, on_lost=self._lose)
        self._links = StoreLinks(config, on_connected=self._check_stores, may_join=may_join)
        for address in self._stores.addresses:
            self._links.connect(address)
        journal = _open_journal(config, "journal")

        def make_service(endpoint: ServerSocket) -> BufferService:
            self.service = BufferService(
                config,
                groups_per_step=groups_per_step,
                send=endpoint.send,
                on_rewound=self._check_stores,
                counters=endpoint.counters,
                links=self._links if may_join or config.num_store_servers else None,
                journal=journal,
            )
            return self.service

        try:
            self._endpoint = ServerSocket(config, make_service=make_service, journal=journal)
        except BaseException:
            self._links.close()
            self._stores.close()
            if journal is not None:
                journal.close()
            raise
        self.address, self.bulk_port = self._endpoint.address, self._endpoint.bulk_port
        self.counters = self._endpoint.counters

    def close(self) -> None:
        """Stop serving. Pending requests are not answered."""
        for check in self._checks:
            check.cancel()
        self._endpoint.close()
        self._links.close()
        self._stores.close()

    def _check_stores(self, *numbers: int) -> None:
        """Ask stores which groups they lack, and queue these groups again. Without ``numbers``, ask all stores."""
        for number in numbers or [n for n, address in enumerate(self._links.addresses) if address]:
            check = asyncio.get_running_loop().create_task(self._requeue_missing(number))
            self._checks.add(check)
            check.add_done_callback(self._checks.discard)

    async def _requeue_missing(self, number: int) -> None:
        ledger, is_unsure = self.service.ledger, True
        try:
            while is_unsure:
                stored, reserved = ledger.groups.stored_in(number), ledger.groups.leases.reserved_in(number)
                expected = Reconcile(
                    attempts=tuple(stored + reserved),
                    finished=tuple(ledger.history.finished.ranges()),
                    ended=tuple((g.group_id, g.past_attempt) for g in ledger.groups if g.past_attempt >= 0),
                    part=str(Path(self._checkpoint, store_part(number))) if self._checkpoint else "",
                )
                missing = await self._links.reconcile(number, expected)
                is_unsure = self.service.lose_from_store(number, missing, stored=stored, reserved=reserved)
        except AsyncRLError as error:
            logger.warning("store server %d did not report what it holds: %s", number, error)

    def _lose(self, error: WorkerDiedError) -> None:
        if not self.lost.done():
            self.lost.set_result(error)


class StoreServer:
    """The store server with the number ``number``. Create this object while an asyncio event loop runs.

    `BufferServer` documents the attributes. A store server has no ``bulk_port`` and no ``service``.
    """

    def __init__(self, config: BufferConfig, *, number: int) -> None:
        journal = _open_journal(config, f"store{number}")
        if (
            journal is not None
            and config.epoch
            and journal.read("epoch")
            not in (
                None,
                config.epoch,
                config.earlier_epoch or None,
            )
        ):
            logger.info(
                "run %s begins with an empty store: payloads of run %s are dropped", config.epoch, journal.read("epoch")
            )
            journal.begin_anew()
        self._endpoint = ServerSocket(
            config,
            make_service=lambda endpoint: StoreService(config, send=endpoint.send, journal=journal),
            journal=journal,
            store=number,
        )
        self.lost: asyncio.Future[WorkerDiedError] = asyncio.get_running_loop().create_future()
        self.address = self._endpoint.address
        self.counters = self._endpoint.counters
        self.close = self._endpoint.close


def _open_journal(config: BufferConfig, name: str) -> Journal | None:
    if config.durability == Durability.memory:
        return None
    directory = Path(config.directory)
    directory.mkdir(parents=True, exist_ok=True)
    return Journal(directory / name)


def config_from_json(values: dict[str, Any]) -> BufferConfig:
    """Build the options from plain values. Raises `ValueError` if an option is unknown or out of range."""
    known = {field.name for field in fields(BufferConfig)}
    if unknown := sorted(set(values) - known):
        raise ValueError(f"unknown buffer options {unknown}; the known options are {sorted(known)}")
    kinds = {"on_stale": OnStale, "durability": Durability, "stores_on": StoresOn}
    return BufferConfig(**{name: kinds[name](value) if name in kinds else value for name, value in values.items()})


async def serve(server: "BufferServer | StoreServer", *, announce_fd: int) -> None:
    """Write the server's address to the file descriptor ``announce_fd``. Serve until SIGTERM, SIGINT or SIGUSR1.

    Raises `WorkerDiedError` if a store server cannot be restarted.
    """
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    server.lost.add_done_callback(lambda _: stop.set())
    os.write(announce_fd, f"{server.address}\n".encode())
    try:
        await stop.wait()
        if server.lost.done():
            raise server.lost.result()
    finally:
        server.close()
        logger.info("ends; refused or undelivered: %s", server.counters())


def calm_collector() -> None:
    """Avoid full garbage collections. Their cost grows with the ledger, which has no reference cycles."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 1_000_000)


def main() -> None:
    """Run the server with the options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m buffer.server", description="Serve the replay buffer.")
    parser.add_argument("--groups-per-step", type=int, required=True, help="prompt groups per learner step")
    parser.add_argument("--config", default="{}", help='options of buffer/config.py as JSON, e.g. {"max_lag": 2}')
    parser.add_argument("--announce-fd", type=int, default=1, help="file descriptor for the line with the address")
    parser.add_argument("--store", type=int, help="serve payloads as store server number STORE, without a ledger")
    parser.add_argument("--profile", default="{}", help="options of asyncrl.core.record.ProfileConfig as JSON")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    end_with_parent()
    calm_collector()
    keep_freed_memory(_KEPT_BYTES)
    name = "buffer" if args.store is None else f"store-{args.store}"
    record.start(record.ProfileConfig(**json.loads(args.profile)), process=name, pool=record.Pool.buffer)
    try:
        asyncio.run(_serve(config_from_json(json.loads(args.config)), args))
    except (AsyncRLError, ValueError) as error:
        sys.exit(f"the buffer server ends: {error}")
    finally:
        record.stop()


async def _serve(config: BufferConfig, args: argparse.Namespace) -> None:
    if args.store is not None:
        server = StoreServer(config, number=args.store)
    else:
        server = BufferServer(config, groups_per_step=args.groups_per_step)
    logger.info("serves at %s with %s, groups_per_step=%d", server.address, config, args.groups_per_step)
    await serve(server, announce_fd=args.announce_fd)


if __name__ == "__main__":
    main()
