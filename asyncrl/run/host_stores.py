"""Runs one store server, which holds finished groups, on each host with rollout workers.

A trajectory stays on the host of its worker until the learner's ranks fetch it, so it crosses the network only once. If
a store is lost, the buffer counts the store's groups as dropped for the reason ``store_lost``. The fleet then generates
these groups again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NoReturn

import ray
from ray.exceptions import ActorUnschedulableError, RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from asyncrl.config import WORKER_ENV
from asyncrl.core.errors import DeadlineError, WorkerDiedError
from asyncrl.core.lives import Faults, keep_up
from asyncrl.core.remote import fetch_async, raised_in_worker, within
from buffer import BufferConfig, BufferRole, BufferSupervisor, ControlClient
from buffer.config import is_loopback
from buffer.process import store_config
from buffer.sockets import allow_clients

logger = logging.getLogger(__name__)

STOP_S = 2.0


class NodeStore:
    """A Ray actor on one node that runs this node's store server, and restarts it."""

    def __init__(self, config: BufferConfig, *, num_clients: int, log_path: Path, **options: Any) -> None:
        self._config = config_of_node(config, ray.util.get_node_ip_address().strip("[]"))
        self._num_clients = num_clients
        self._log_path = log_path
        self._options = options
        self._server: BufferSupervisor | None = None
        self._restarts: asyncio.Queue[str] = asyncio.Queue()
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Start the store server, and return the server's address.

        Raises `ValueError` if this node allows too few open files.
        """
        allow_clients(self._num_clients)
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        self._server = BufferSupervisor(
            self._config,
            groups_per_step=1,
            log_path=self._log_path,
            waits=False,
            role=BufferRole.rollout,
            on_restart=self._restarts.put_nowait,
            **self._options,
        )
        address = await asyncio.to_thread(self._server.read_address)
        self._watching = asyncio.create_task(keep_up(self._server))
        return address

    async def next_restart(self) -> str:
        """Wait until the store server has restarted. Returns a description of the restart for the user.

        Raises `WorkerDiedError` if no restarts are left.
        """
        assert self._watching is not None
        waiting = asyncio.ensure_future(self._restarts.get())
        await asyncio.wait({waiting, self._watching}, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            waiting.cancel()
            self._watching.result()
        return await waiting

    async def stop(self) -> None:
        """Stop the store server of this node."""
        if self._watching is not None:
            self._watching.cancel()
        if self._server is not None:
            await asyncio.to_thread(self._server.stop)


def config_of_node(config: BufferConfig, address: str) -> BufferConfig:
    """Return the options of a store server on the node with address ``address``.

    ``config`` has the options of the buffer.
    """
    own = store_config(config)
    if is_loopback(own.host):
        return own
    try:
        ip_address(own.host)
    except ValueError:  # `host` is "*" or the name of an interface; each node resolves it to its own address
        return replace(own, advertised_host=address if own.advertised_host else "")
    return replace(own, host=address, advertised_host="")


class HostStores:
    """The stores of a run: one store server on each host with rollout workers. Call `watch`, then `stop`.

    Args:
        control: Client of the buffer; `stop` closes it.
        make: Function that takes the id of a node and the number of a store, and makes a `NodeStore` actor on the node.
        restarts: How often the store of a host may be replaced.
        say: Function that shows a line to the user.

    Attributes:
        num_restarts: Number of restarts of store servers so far.
        num_placed: Number of `NodeStore` actors that have been started so far.
        actors: The running `NodeStore` actors, by store number.
    """

    def __init__(
        self,
        control: ControlClient,
        *,
        make: Callable[[str, int], Any],
        start_timeout_s: float,
        restarts: int,
        say: Callable[[str], None],
    ) -> None:
        self.control = control
        self.make = make
        self.start_timeout_s = start_timeout_s
        self.restarts = restarts
        self.say = say
        self.actors: dict[int, Any] = {}
        self.num_restarts = self.num_placed = 0

    async def watch(self) -> NoReturn:
        """Start a store on each host with rollout workers. Replace lost stores, at most ``restarts`` times per host.

        The fleet generates the groups of a lost store again. Raises `WorkerDiedError` if the last store is lost and
        must not be replaced.
        """
        known: set[str] = set()
        async with asyncio.TaskGroup() as tasks:
            while True:
                known.add(host := await self.control.store_wanted(known))
                tasks.create_task(self._keep(host))

    async def _keep(self, host: str) -> None:
        with suppress(_Gone):
            await keep_up(_HostStore(self, host), has_begun=False)

    async def stop(self) -> None:
        """Stop all store servers, and kill the actors that run them."""
        actors, self.actors = list(self.actors.values()), {}
        try:
            async with asyncio.timeout(STOP_S):
                await asyncio.gather(*(actor.stop.remote() for actor in actors), return_exceptions=True)
        except TimeoutError:
            logger.warning("%d store servers did not stop within %g s, and are killed", len(actors), STOP_S)
        finally:
            for actor in actors:
                ray.kill(actor)
            await self.control.close()


class _Gone(Exception):
    """A lost store is not replaced, because no restarts are left."""


class _HostStore:
    """The store of one host. If the store is lost, `keep_up` replaces it while restarts are left."""

    def __init__(self, stores: HostStores, host: str) -> None:
        self._stores = stores
        self._host = host
        self._faults = Faults(stores.restarts)
        self._number = 0
        self._joined: int | None = None

    async def begin(self) -> None:
        stores = self._stores
        self._number, self._joined = stores.num_placed, None
        stores.num_placed += 1
        actor = stores.actors[self._number] = stores.make(self._host, self._number)
        what, option = f"store server {self._number}", "buffer.request_timeout_s"
        (address,) = await within(fetch_async([actor.start.remote()]), stores.start_timeout_s, what, option)
        self._joined = await stores.control.add_store(address, self._host)
        stores.say(f"{what} stores the rollouts of its host, at {address}")

    async def watch(self) -> NoReturn:
        while True:
            (line,) = await fetch_async([self._stores.actors[self._number].next_restart.remote()])
            self._stores.num_restarts += 1
            self._stores.say(line)

    async def end(self, fault: Exception) -> float:
        """Kill the actor of the lost store, so that the fleet generates the store's groups again."""
        stores, name = self._stores, f"store server {self._number}"
        logger.warning("%s is gone: %s", name, fault)
        if (lost := stores.actors.pop(self._number, None)) is not None:
            ray.kill(lost)
        num_groups = 0 if self._joined is None else await self._dropped(self._joined)
        has_died = isinstance(fault, RayActorError | ActorUnschedulableError)  # the actor or its node has died
        may_restart = self._faults.add(time.monotonic()) is not None
        is_final = isinstance(raised_in_worker(fault), WorkerDiedError) or not may_restart
        if is_final and not (has_died or stores.actors):
            raise WorkerDiedError(f"no store server is left: {raised_in_worker(fault)}") from fault
        reason = "its actor or its node has died" if has_died else str(raised_in_worker(fault)).splitlines()[0]
        stores.say(f"{name} is gone, {num_groups} groups are generated again: {reason}")
        if is_final:
            raise _Gone
        return 0.0

    async def _dropped(self, store: int) -> int:
        while True:
            try:
                return await self._stores.control.drop_store(store)
            except DeadlineError as error:
                logger.warning("the buffer has not yet dropped store server %d: %s", store, error)


def ray_actors(config: BufferConfig, *, log_dir: Path, **options: Any) -> Callable[[str, int], Any]:
    """Return a function that makes a `NodeStore` actor in the connected Ray cluster.

    The returned function takes a node id and the number of the store. Stores are numbered from 0, in the order of their
    start. ``config`` has the options of the buffer. ``options`` are the other keyword arguments of `NodeStore`.
    """
    actor_class: Any = ray.remote(NodeStore)
    place: dict[str, Any] = {"num_cpus": 0, "max_concurrency": 4, "runtime_env": {"env_vars": WORKER_ENV}}

    def make(node_id: str, number: int) -> Any:
        there = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
        path = log_dir / f"store-{number}.log"
        made = actor_class.options(scheduling_strategy=there, **place)
        return made.remote(config, store=number, log_path=path, **options)

    return make
