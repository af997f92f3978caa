"""The store servers beside a ledger's server: started with it, watched, ended with it.

One that dies is started again in its place where its payloads are on disk, and its clients reconnect by themselves;
without them the ledger's server cannot keep its word, and ends. The kernel says when one dies, through a descriptor.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from asyncrl.protocol.errors import AsyncRLError, WorkerDiedError

from .config import BufferConfig, Durability
from .keys import client_keys
from .link import Link
from .process import BufferProcess

logger = logging.getLogger(__name__)


class StoreServers:
    """``num_store_servers`` processes that hold the payloads; made on a running loop.

    Args:
        config: Options of the ledger's server.
        groups_per_step: B.
        on_lost: Called when one is dead for good, with its payloads.

    Attributes:
        addresses: Where they listen; the one of a group is at its id modulo their number.

    Raises:
        AsyncRLError: one did not come up.
    """

    def __init__(
        self, config: BufferConfig, *, groups_per_step: int, on_lost: Callable[[WorkerDiedError], None]
    ) -> None:
        self._config = replace(config, port=0, num_store_servers=0)
        self._groups_per_step = groups_per_step
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._processes: list[BufferProcess] = []
        self._descriptors: dict[int, int] = {}
        self._restarts: set[asyncio.Task[None]] = set()
        self._links: list[Link] = []
        try:
            for number in range(config.num_store_servers):
                self._processes.append(self._launch(number))
            for number, process in enumerate(self._processes):
                process.read_address()
                self._watch(number)
        except BaseException:
            self.close()
            raise
        self.addresses = [process.address for process in self._processes]
        keys = client_keys(Path(config.keys)) if config.keys else None
        for address in self.addresses:
            link = Link(address, timeout_s=config.request_timeout_s, keys=keys, on_push=lambda message: None)
            self._links.append(link)

    def remove(self, group_id: int) -> None:
        """Have the server of a group forget it."""
        self._links[group_id % len(self._links)].post("remove", {"groups": [group_id]})

    def close(self) -> None:
        """End them."""
        for descriptor in self._descriptors.values():
            self._loop.remove_reader(descriptor)
            os.close(descriptor)
        self._descriptors.clear()
        for restart in self._restarts:
            restart.cancel()
        for link in self._links:
            link.close()
        for process in self._processes:
            process.stop()

    def _launch(self, number: int) -> BufferProcess:
        return BufferProcess(
            self._config, groups_per_step=self._groups_per_step, log_path=None, store=number, waits=False
        )

    def _watch(self, number: int) -> None:
        descriptor = self._descriptors[number] = os.pidfd_open(self._processes[number].process.pid)
        self._loop.add_reader(descriptor, self._on_end, number)

    def _on_end(self, number: int) -> None:
        descriptor = self._descriptors.pop(number)
        self._loop.remove_reader(descriptor)
        os.close(descriptor)
        dead = self._processes[number]
        dead.stop()
        what = f"store server {number} (pid {dead.process.pid}, {dead.address}) died, status {dead.process.returncode}"
        if self._config.durability == Durability.memory:
            self._on_lost(WorkerDiedError(f"{what}; its payloads are lost, buffer.durability=disk would keep them"))
            return
        logger.error("%s; it is started again where it was", what)
        restart = self._loop.create_task(self._restart(number, what))
        self._restarts.add(restart)
        restart.add_done_callback(self._restarts.discard)

    async def _restart(self, number: int, what: str) -> None:
        """Start a server in the place of one that died; the ledger's server goes on meanwhile."""
        try:
            self._processes[number] = self._launch(number)
            await asyncio.to_thread(self._processes[number].read_address)
            self._watch(number)
        except (AsyncRLError, OSError) as error:
            self._on_lost(WorkerDiedError(f"{what}, and did not come up again: {error}"))
