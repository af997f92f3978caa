"""The buffer server: the ledger, the payloads or the store servers that hold them. Run as ``python -m buffer.server``.

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
from dataclasses import fields
from pathlib import Path
from typing import Any

from asyncrl.protocol.errors import AsyncRLError, WorkerDiedError

from .config import BufferConfig, Durability, OnStale
from .journal import Journal
from .server_socket import ServerSocket
from .service import BufferService
from .store_servers import StoreServers, StoreService
from .stores import MemoryStore, RemoteStore

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_MALLOC_OPTIONS = {"M_TRIM_THRESHOLD": (-1, 2**31 - 1), "M_TOP_PAD": (-2, 64 << 20), "M_MMAP_THRESHOLD": (-3, 32 << 20)}


class BufferServer:
    """The ledger's server, with ``num_store_servers`` processes of payloads beside it; made on a running loop.

    Args:
        config: Options.
        groups_per_step: B, groups consumed by one learner step.

    Attributes:
        lost: Gets the error for which this server cannot go on.
    """

    def __init__(self, config: BufferConfig, *, groups_per_step: int) -> None:
        self.lost: asyncio.Future[WorkerDiedError] = asyncio.get_running_loop().create_future()
        self._stores = StoreServers(config, groups_per_step=groups_per_step, on_lost=self._lose)
        journal = _open_journal(config, "journal")

        def make_service(endpoint: ServerSocket) -> BufferService:
            return BufferService(
                config,
                groups_per_step=groups_per_step,
                send=endpoint.send,
                counters=endpoint.counters,
                store=RemoteStore(self._stores.remove) if config.num_store_servers else MemoryStore(),
                store_addresses=self._stores.addresses,
                journal=journal,
            )

        try:
            self._endpoint = ServerSocket(config, make_service=make_service, journal=journal)
        except BaseException:
            self._stores.close()
            raise

    @property
    def address(self) -> str:
        """Where it listens."""
        return self._endpoint.address

    @property
    def bulk_port(self) -> int:
        """Where large payloads go."""
        return self._endpoint.bulk_port

    def counters(self) -> dict[str, int]:
        """What was turned away, or could not be delivered."""
        return self._endpoint.counters()

    def close(self) -> None:
        """Stop serving; held requests stay unanswered."""
        self._endpoint.close()
        self._stores.close()

    def _lose(self, error: WorkerDiedError) -> None:
        if not self.lost.done():
            self.lost.set_result(error)


class StoreServer:
    """A server of payloads only; made on a running loop.

    Args:
        config: Options.
        number: Which of the store servers it is.
    """

    def __init__(self, config: BufferConfig, *, number: int) -> None:
        journal = _open_journal(config, f"store{number}")
        self._endpoint = ServerSocket(
            config,
            make_service=lambda endpoint: StoreService(config, send=endpoint.send, journal=journal),
            journal=journal,
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
    return Journal(directory / f"{name}.sqlite")


def config_from_json(values: dict[str, Any]) -> BufferConfig:
    """Build the options from plain values.

    Raises:
        ValueError: an option is unknown or out of range.
    """
    known = {field.name for field in fields(BufferConfig)}
    if unknown := sorted(set(values) - known):
        raise ValueError(f"unknown buffer options {unknown}; known are {sorted(known)}")
    kinds = {"on_stale": OnStale, "durability": Durability}
    return BufferConfig(**{name: kinds[name](value) if name in kinds else value for name, value in values.items()})


async def serve(server: "BufferServer | StoreServer", *, announce_fd: int) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        WorkerDiedError: a store server died with its payloads.
    """
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    server.lost.add_done_callback(lambda _: stop.set())
    os.write(announce_fd, f"{server.address}\n".encode())
    try:
        await stop.wait()
        if server.lost.done():
            raise server.lost.result()
    finally:
        server.close()
        logger.info("ends; turned away or undelivered: %s", server.counters())


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


def keep_memory() -> None:
    """Have glibc keep what is freed: a batch leaves, and the next takes its place without new pages from the kernel.

    A third of the time to receive a frame is the kernel's, for pages that were given back a moment ago. What is kept is
    what was once held, within ``buffer.max_stored_bytes``.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    for name, (option, value) in _MALLOC_OPTIONS.items():
        if mallopt is None or not mallopt(option, value):
            logger.info("the C library has no %s; memory goes back to the kernel with each batch", name)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m buffer.server", description="Serve the replay buffer.")
    parser.add_argument("--groups-per-step", type=int, required=True, help="groups one learner step consumes")
    parser.add_argument("--config", default="{}", help='options of buffer/config.py as JSON, e.g. {"max_lag": 2}')
    parser.add_argument("--announce-fd", type=int, default=1, help="descriptor that gets the address, one line")
    parser.add_argument("--store", type=int, help="serve payloads as store server number STORE, without a ledger")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    end_with_parent()
    calm_collector()
    keep_memory()
    try:
        asyncio.run(_serve(config_from_json(json.loads(args.config)), args))
    except (AsyncRLError, ValueError) as error:
        sys.exit(f"the buffer server ends: {error}")


async def _serve(config: BufferConfig, args: argparse.Namespace) -> None:
    if args.store is not None:
        server = StoreServer(config, number=args.store)
    else:
        server = BufferServer(config, groups_per_step=args.groups_per_step)
    logger.info("serves at %s with %s, groups_per_step=%d", server.address, config, args.groups_per_step)
    await serve(server, announce_fd=args.announce_fd)


if __name__ == "__main__":
    main()
