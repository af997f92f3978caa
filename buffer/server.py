"""The buffer server: one asyncio loop, one ROUTER socket, one `BufferService`. Run as ``python -m buffer.server``.

It announces its address by one line on stdout (or on the descriptor named by ``--announce-fd``), logs to stderr, and
ends on SIGTERM, on SIGINT and with its parent.
"""

import argparse
import asyncio
import ctypes
import gc
import json
import logging
import os
import signal
import sys
import time
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any

import zmq

from asyncrl.protocol.errors import WireError

from . import messages
from .channel import Channel
from .config import BufferConfig, Durability, OnStale, SelectionOrder
from .journal import Journal
from .keys import Gate, check_exposure, secure_server, server_keys
from .messages import Message
from .service import BufferService

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_MAX_UNREAD_MESSAGES = 64


class BufferServer:
    """Binds a ROUTER socket and serves on it until `close`; made on a running loop.

    Args:
        config: Options.
        groups_per_step: B, groups consumed by one learner step.
    """

    def __init__(self, config: BufferConfig, *, groups_per_step: int) -> None:
        check_exposure(config.host, config.keys)
        self._context = zmq.Context()
        self._gate: Gate | None = None
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, config.max_message_bytes)
        socket.setsockopt(zmq.RCVHWM, _MAX_UNREAD_MESSAGES)
        if config.keys:
            keys = server_keys(Path(config.keys))
            self._gate = Gate(self._context, keys, self._count_unknown_key)
            secure_server(socket, keys)
        self._journal = _open_journal(config)
        self.num_malformed = self.num_unsent = self.num_unknown_keys = self.num_over_rate = 0
        self._outbox: dict[bytes, list[Message]] = {}
        self._flush_handle: asyncio.Handle | None = None
        self._limit = RateLimit(config.max_requests_per_s)
        self._service = BufferService(
            config,
            groups_per_step=groups_per_step,
            send=self._send,
            counters=self.counters,
            journal=self._journal,
        )
        self.address = self._bind(socket, config)
        self._channel = Channel(socket, self._on_message)

    def _bind(self, socket: zmq.Socket[bytes], config: BufferConfig) -> str:
        """Bind the configured port, or the one that an earlier server of this journal had, or a free one."""
        address = f"tcp://{config.host}:{config.port or '*'}"
        if not config.port and self._journal is not None:
            address = self._journal.read("address") or address
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            raise ValueError(f"the buffer cannot bind {address}: {error.strerror}; set buffer.port") from error
        bound = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        if self._journal is not None:
            self._journal.write("address", bound)
        return bound

    def counters(self) -> dict[str, int]:
        """What was turned away, or could not be delivered."""
        return {
            "malformed": self.num_malformed,
            "unsent": self.num_unsent,
            "unknown_keys": self.num_unknown_keys,
            "over_rate": self.num_over_rate,
        }

    def _count_unknown_key(self) -> None:
        self.num_unknown_keys += 1

    def close(self) -> None:
        """Stop serving; held requests stay unanswered."""
        self._service.close()
        if self._flush_handle is not None:
            self._flush_handle.cancel()
        self._channel.close()
        if self._gate is not None:
            self._gate.close()
        if self._journal is not None:
            self._journal.close()
        self._context.destroy(linger=0)

    def _on_message(self, frames: list[zmq.Frame]) -> None:
        client = frames[0].bytes
        if not self._limit.allows(client):
            self.num_over_rate += 1
            return
        try:
            request = messages.parse(frames[1:])
        except WireError as error:
            self.num_malformed += 1
            self._send(client, messages.error_reply(messages.PUSH_ID, error))
            return
        self._service.handle(client, request)

    def _send(self, client: bytes, message: Message) -> None:
        """Send to a client when the messages that have come are read, so that acknowledgements travel together."""
        if not self._outbox:
            self._flush_handle = asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.setdefault(client, []).append(message)

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, {}
        for client, replies in outbox.items():
            for message in messages.coalesce(replies):
                self._send_now(client, message)

    def _send_now(self, client: bytes, message: Message) -> None:
        """One that is gone, or reads nothing, asks again when it is back."""
        try:
            self._channel.send([client, *message.frames()])
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self.num_unsent += 1


class RateLimit:
    """Counts requests of each client within a second.

    Args:
        per_second: Most requests of one client.
    """

    def __init__(self, per_second: int) -> None:
        self._per_second = per_second
        self._counts: Counter[bytes] = Counter()
        self._since = 0.0

    def allows(self, client: bytes) -> bool:
        """Count a request; False when its client has had its share of this second."""
        now = time.monotonic()
        if now - self._since >= 1.0:
            self._since = now
            self._counts.clear()
        self._counts[client] += 1
        return self._counts[client] <= self._per_second


def _open_journal(config: BufferConfig) -> Journal | None:
    if config.durability == Durability.memory:
        return None
    directory = Path(config.directory)
    directory.mkdir(parents=True, exist_ok=True)
    return Journal(directory / "journal.sqlite")


def calm_collector() -> None:
    """Keep Python's full garbage collections away: their cost grows with the ledger, which holds no cycles."""
    gc.set_threshold(10_000, 20, 1_000_000)


def end_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends (Linux)."""
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        logger.warning("the kernel refused PR_SET_PDEATHSIG; the server may outlive its parent")
    if os.getppid() != parent:
        os._exit(1)


def config_from_json(values: dict[str, Any]) -> BufferConfig:
    """Build the options from plain values.

    Raises:
        ValueError: an option is unknown or out of range.
    """
    known = {field.name for field in fields(BufferConfig)}
    if unknown := sorted(set(values) - known):
        raise ValueError(f"unknown buffer options {unknown}; known are {sorted(known)}")
    kinds = {"on_stale": OnStale, "order": SelectionOrder, "durability": Durability}
    return BufferConfig(**{name: kinds[name](value) if name in kinds else value for name, value in values.items()})


async def serve(config: BufferConfig, *, groups_per_step: int, announce_fd: int) -> None:
    """Serve until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    server = BufferServer(config, groups_per_step=groups_per_step)
    logger.info("buffer serves at %s with %s, groups_per_step=%d", server.address, config, groups_per_step)
    os.write(announce_fd, f"{server.address}\n".encode())
    try:
        await stop.wait()
    finally:
        server.close()
        logger.info("buffer ends; turned away or undelivered: %s", server.counters())


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m buffer.server", description="Serve the replay buffer.")
    parser.add_argument("--groups-per-step", type=int, required=True, help="groups one learner step consumes")
    parser.add_argument("--config", default="{}", help='options of buffer/config.py as JSON, e.g. {"max_lag": 2}')
    parser.add_argument("--announce-fd", type=int, default=1, help="descriptor that gets the address, one line")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    end_with_parent()
    calm_collector()
    config = config_from_json(json.loads(args.config))
    asyncio.run(serve(config, groups_per_step=args.groups_per_step, announce_fd=args.announce_fd))


if __name__ == "__main__":
    main()
