"""Store servers on the hosts that produce: one on each node from which rollout workers reach the buffer.

Trajectories stay there until the learner's ranks fetch them: they cross the network once. A worker's host is named to
the buffer as it enters, whether at the start, in the place of another, or later; `HostStores.watch` is told of it, and
places a store there through an actor of that node. The actor starts a store server again where it dies. A store that is
gone for good takes its groups with it: they are generated again, and counted (``store_lost``).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NoReturn, Protocol

import ray
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from asyncrl.core.errors import DeadlineError, WorkerDiedError
from asyncrl.core.record import ProfileConfig
from asyncrl.core.remote import fetch_async, raised_in_worker, within
from asyncrl.placement_config import WORKER_ENV
from buffer import BufferConfig, BufferConnection, BufferRole, BufferSupervisor, ControlClient, WorkerClient
from buffer.config import is_loopback
from buffer.sockets import allow_clients
from buffer.store_servers import store_config

logger = logging.getLogger(__name__)

STOP_S = 2.0


class NodeStore:
    """Keeps the store server of one node up; an actor there."""

    def __init__(
        self,
        number: int,
        config: BufferConfig,
        *,
        num_clients: int,
        start_timeout_s: float,
        log_dir: str,
        profile: ProfileConfig,
    ) -> None:
        self._number = number
        self._num_clients = num_clients
        self._config = config_of_node(config, ray.util.get_node_ip_address().strip("[]"))
        self._start_timeout_s = start_timeout_s
        self._log_path = Path(log_dir) / f"store-{number}.log"
        self._profile = profile
        self._server: BufferSupervisor | None = None
        self._restarts: asyncio.Queue[str] = asyncio.Queue()
        self._watching: asyncio.Task[NoReturn] | None = None

    async def start(self) -> str:
        """Start it; returns its address. Raises `ValueError` if this node allows too few open files."""
        allow_clients(self._num_clients)
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        self._server = BufferSupervisor(
            self._config,
            groups_per_step=1,
            log_path=self._log_path,
            start_timeout_s=self._start_timeout_s,
            store=self._number,
            waits=False,
            profile=self._profile,
            role=BufferRole.rollout,
            on_restart=self._restarts.put_nowait,
        )
        address = await asyncio.to_thread(self._server.read_address)
        self._watching = asyncio.create_task(self._server.watch())
        return address

    async def next_restart(self) -> str:
        """Wait until it was started again; how that was. Raises `WorkerDiedError` where it may not be."""
        assert self._watching is not None
        waiting = asyncio.ensure_future(self._restarts.get())
        await asyncio.wait({waiting, self._watching}, return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            return waiting.result()
        waiting.cancel()
        return self._watching.result()

    async def stop(self) -> None:
        """End it."""
        if self._watching is not None:
            self._watching.cancel()
        if self._server is not None:
            await asyncio.to_thread(self._server.stop)


def config_of_node(config: BufferConfig, address: str) -> BufferConfig:
    """The options of a store on the node with this address in the cluster, given those of the buffer."""
    own = store_config(config)
    if is_loopback(own.host):
        return own
    try:
        ip_address(own.host)
    except ValueError:  # an interface, or every address
        return replace(own, advertised_host=address if own.advertised_host else "")
    return replace(own, host=address, advertised_host="")


class NodeActors(Protocol):
    """Makes the actors; `ray_actors` is the real one."""

    def __call__(self, node_id: str, number: int) -> Any:
        """A `NodeStore` actor on a node."""
        ...


class HostStores:
    """The stores of a run that are on the hosts of its rollout workers; run `watch`, then `stop`.

    Args:
        control: Client of the buffer; `stop` closes it.
        make: Makes the actor of a node.
        start_timeout_s: How long one may take to come up.
        restarts: How often another is placed on a host whose actor has died.
        say: Tells people what becomes of stores.

    Attributes:
        num_restarts: How often a store server was started again.
    """

    def __init__(
        self,
        control: ControlClient,
        *,
        make: NodeActors,
        start_timeout_s: float,
        restarts: int,
        say: Callable[[str], None],
    ) -> None:
        self._control = control
        self._make = make
        self._start_timeout_s = start_timeout_s
        self._restarts = restarts
        self._say = say
        self._actors: dict[int, Any] = {}
        self._num_placed: Counter[str] = Counter()
        self.num_restarts = 0

    async def watch(self) -> NoReturn:
        """Place stores, and drop those that are gone. Raises `WorkerDiedError` when the last one has died for good."""
        known: set[str] = set()
        asking = asyncio.ensure_future(self._control.store_wanted(known))
        keeping: set[asyncio.Future[Any]] = set()
        try:
            while True:
                done, _ = await asyncio.wait({asking, *keeping}, return_when=asyncio.FIRST_COMPLETED)
                keeping -= done
                again = {kept.result() for kept in done - {asking}} - {""}
                if asking in done:
                    host = asking.result()
                    known.add(host)
                    keeping.add(asyncio.ensure_future(self._keep(host)))
                known -= again
                if again or asking in done:
                    asking.cancel()
                    asking = asyncio.ensure_future(self._control.store_wanted(known))
        finally:
            for task in (asking, *keeping):
                task.cancel()
            await asyncio.gather(asking, *keeping, return_exceptions=True)

    async def _keep(self, host: str) -> str:
        """A store on a host, until it is gone; returns the host if another may be placed there, else nothing."""
        number = self._num_placed.total()
        self._num_placed[host] += 1
        joined: int | None = None
        try:
            actor = self._actors[number] = self._make(host, number)
            starting = fetch_async([actor.start.remote()])
            option = "buffer.request_timeout_s"
            (address,) = await within(starting, self._start_timeout_s, f"store server {number}", option)
            joined = await self._control.add_store(address, host)
            self._say(f"store server {number} keeps the rollouts of its host, at {address}")
            while True:
                (line,) = await fetch_async([actor.next_restart.remote()])
                self.num_restarts += 1
                self._say(line)
        except Exception as error:  # noqa: BLE001 - whatever it is, this store is gone, and the others go on
            if (lost := self._actors.pop(number, None)) is not None:
                ray.kill(lost)
            await self._drop(number, joined, error)
            has_died = isinstance(error, RayActorError) and self._num_placed[host] <= self._restarts
            return host if has_died else ""

    async def _drop(self, number: int, joined: int | None, error: Exception) -> None:
        """A store is gone: its groups are generated again, and its host's go to the other stores."""
        logger.warning("store server %d is gone: %s", number, error)
        num_groups = 0 if joined is None else await self._dropped(joined)
        has_failed = not isinstance(error, RayActorError)  # else its actor has died, most likely with the node
        if has_failed and not self._actors:
            raise WorkerDiedError(f"no store server is left: {raised_in_worker(error)}") from error
        reason = str(raised_in_worker(error)).splitlines()[0] if has_failed else "its actor or its node has died"
        self._say(f"store server {number} is gone, {num_groups} groups are generated again: {reason}")

    async def _dropped(self, store: int) -> int:
        """See `ControlClient.drop_store`; asks until the buffer answers."""
        while True:
            try:
                return await self._control.drop_store(store)
            except DeadlineError as error:
                logger.warning("store server %d is not dropped yet: %s", store, error)

    async def stop(self) -> None:
        """End the stores, and their actors."""
        actors, self._actors = list(self._actors.values()), {}
        try:
            async with asyncio.timeout(STOP_S):
                await asyncio.gather(*(actor.stop.remote() for actor in actors), return_exceptions=True)
        except TimeoutError:
            logger.warning("%d store servers did not stop within %g s, and are killed", len(actors), STOP_S)
        finally:
            for actor in actors:
                ray.kill(actor)
            await self._control.close()


def ray_actors(
    config: BufferConfig, *, num_clients: int, start_timeout_s: float, log_dir: Path, profile: ProfileConfig
) -> NodeActors:
    """Makes `NodeStore` actors of the cluster that this process is connected to; ``config`` is the buffer's own."""
    actor_class: Any = ray.remote(NodeStore)
    options = {"num_cpus": 0, "max_concurrency": 4, "runtime_env": {"env_vars": WORKER_ENV}}

    def make(node_id: str, number: int) -> Any:
        place = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
        return actor_class.options(scheduling_strategy=place, **options).remote(
            number,
            config,
            num_clients=num_clients,
            start_timeout_s=start_timeout_s,
            log_dir=str(log_dir),
            profile=profile,
        )

    return make


def client_on_this_node(buffer: BufferConnection, name: str) -> WorkerClient:
    """Make the client of a rollout worker on this node: its puts go to the store of the node."""
    return WorkerClient(buffer.client(host=ray.get_runtime_context().get_node_id()), name=name)
