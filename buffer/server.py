"""The buffer server: the ledger, the payloads or the store servers that hold them. Run as ``python -m buffer.server``.

It announces its address in one line on stdout (or ``--announce-fd``). It ends on SIGTERM, SIGINT and SIGUSR1, and with
its parent. In a run it inherits blocked SIGTERM and SIGINT; its owner sends SIGUSR1.
"""

import argparse
import asyncio
import gc
import json
import logging
import os
import signal
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from asyncrl.core import record
from asyncrl.core.errors import AsyncRLError, WorkerDiedError
from asyncrl.core.host import end_with_parent, keep_freed_memory

from .commands import Reconcile
from .config import BufferConfig, Durability, OnStale, StoresOn
from .journal import Journal
from .process import StoreServers
from .server_socket import ServerSocket
from .service import BufferService
from .store_servers import StoreLinks, StoreService

logger = logging.getLogger(__name__)

_KEPT_BYTES = 2**31 - 1
"""Freed bytes that are kept: what was once held, within ``buffer.max_stored_bytes``."""


class BufferServer:
    """The ledger's server; the payloads are here, in ``num_store_servers`` other processes, or on stores that join.

    Made on a running loop.

    Attributes:
        address: The server's address.
        bulk_port: See `ServerSocket`.
        counters: Returns counts of refused and undelivered messages.
        lost: Gets the error after which this server cannot continue.
    """

    _service: BufferService

    def __init__(self, config: BufferConfig, *, groups_per_step: int) -> None:
        self.lost: asyncio.Future[WorkerDiedError] = asyncio.get_running_loop().create_future()
        self._checks: set[asyncio.Task[None]] = set()
        may_join = config.stores_on is StoresOn.hosts
        self._stores = StoreServers(config, groups_per_step=groups_per_step, on_lost=self._lose)
        self._links = StoreLinks(config, on_connected=self._check_store, may_join=may_join)
        for address in self._stores.addresses:
            self._links.connect(address)
        journal = _open_journal(config, "journal")

        def make_service(endpoint: ServerSocket) -> BufferService:
            self._service = BufferService(
                config,
                groups_per_step=groups_per_step,
                send=endpoint.send,
                on_rewound=self._check_stores,
                counters=endpoint.counters,
                links=self._links if may_join or config.num_store_servers else None,
                journal=journal,
            )
            return self._service

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
        """Stop serving; pending requests are not answered."""
        for check in self._checks:
            check.cancel()
        self._endpoint.close()
        self._links.close()
        self._stores.close()

    def _check_store(self, number: int) -> None:
        """Reconcile a store with the ledger: after it is reached, or after finished groups were reopened."""
        check = asyncio.get_running_loop().create_task(self._requeue_missing(number))
        self._checks.add(check)
        check.add_done_callback(self._checks.discard)

    def _check_stores(self) -> None:
        for number, address in enumerate(self._links.addresses):
            if address:
                self._check_store(number)

    async def _requeue_missing(self, number: int) -> None:
        ledger, is_unsure = self._service.ledger, True
        try:
            while is_unsure:
                stored, reserved = ledger.groups.stored_in(number), ledger.groups.leases.reserved_in(number)
                expected = Reconcile(
                    attempts=tuple(stored + reserved),
                    finished=tuple(ledger.history.finished.ranges()),
                    ended=tuple((g.group_id, g.past_attempt) for g in ledger.groups if g.past_attempt >= 0),
                )
                missing = await self._links.reconcile(number, expected)
                is_unsure = self._service.lose_from_store(number, missing, stored=stored, reserved=reserved)
        except AsyncRLError as error:
            logger.warning("store server %d did not report what it holds: %s", number, error)

    def _lose(self, error: WorkerDiedError) -> None:
        if not self.lost.done():
            self.lost.set_result(error)


class StoreServer:
    """Store server ``number``; made on a running loop. It has the attributes of `BufferServer`."""

    def __init__(self, config: BufferConfig, *, number: int) -> None:
        journal = _open_journal(config, f"store{number}")
        if journal is not None and config.epoch and journal.read("epoch") not in (None, config.epoch):
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
        raise ValueError(f"unknown buffer options {unknown}; known are {sorted(known)}")
    kinds = {"on_stale": OnStale, "durability": Durability, "stores_on": StoresOn}
    return BufferConfig(**{name: kinds[name](value) if name in kinds else value for name, value in values.items()})


async def serve(server: "BufferServer | StoreServer", *, announce_fd: int) -> None:
    """Serve until SIGTERM, SIGINT or SIGUSR1. Raises `WorkerDiedError` if a store server died with its payloads."""
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
    """Avoid full garbage collections: their cost grows with the ledger, which has no reference cycles."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 1_000_000)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m buffer.server", description="Serve the replay buffer.")
    parser.add_argument("--groups-per-step", type=int, required=True, help="groups one learner step consumes")
    parser.add_argument("--config", default="{}", help='options of buffer/config.py as JSON, e.g. {"max_lag": 2}')
    parser.add_argument("--announce-fd", type=int, default=1, help="descriptor that gets the address, one line")
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
