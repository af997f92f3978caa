"""Answers the requests of ``asyncrl join`` and ``asyncrl leave`` to a run with an elastic fleet.

One task waits for the next request; the desk wakes it (`rollout_fleet.membership`). Each request has its own task,
which ends when the engine serves or has left. A dead desk is replaced; its pending requests fail.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import ray
from ray.exceptions import RayActorError

from asyncrl.config import RunConfig
from asyncrl.core.errors import AsyncRLError, MembershipRefused
from asyncrl.core.remote import raised_in_worker
from asyncrl.placement_config import WORKER_ENV
from asyncrl.run.engine_places import node_id_at
from asyncrl.single_controller.resource_pool import current_node
from rollout_fleet.membership import NAMESPACE, Action, FleetAnswer, FleetDesk, FleetRequest, write_address

logger = logging.getLogger(__name__)


class ElasticFleet(Protocol):
    """A fleet that engines join and leave; `FleetGroup` implements it."""

    async def join(self, num_engines: int, *, node: str = "") -> str:
        """Add engines."""
        ...

    async def leave(self, rank: int) -> str:
        """Let an engine leave."""
        ...

    def describe(self) -> str:
        """Describe the members for people."""
        ...


async def answered(fleet: ElasticFleet, request: FleetRequest, config: RunConfig) -> FleetAnswer:
    """Carry out a request; a refusal or a failure becomes the answer."""
    try:
        if request.action is Action.describe:
            return FleetAnswer(words=fleet.describe())
        if request.action is Action.leave:
            return FleetAnswer(words=await fleet.leave(request.member))
        node = await asyncio.to_thread(_node_id, config, request.node) if request.node else ""
        return FleetAnswer(words=await fleet.join(request.num_engines, node=node))
    except AsyncRLError as error:
        return FleetAnswer(words=str(raised_in_worker(error)), is_refused=True)
    except Exception as error:
        logger.exception("the request could not be served: %s", request)
        return FleetAnswer(words=f"{error!r}; the run's logs/controller.log has the traceback", is_refused=True)


def _node_id(config: RunConfig, address: str) -> str:
    node_id = node_id_at(address)
    if config.placement.num_nodes == 1 and node_id != current_node():
        raise MembershipRefused(
            f"--node {address} is another node, and placement.num_nodes=1 keeps the run on its own; start it with more"
        )
    return node_id


@asynccontextmanager
async def served_requests(fleet: ElasticFleet, config: RunConfig, run_dir: Path) -> AsyncIterator[None]:
    """Answer requests inside the block; without effect for a fleet of fixed size."""
    if not config.rollout_fleet.is_elastic:
        yield
        return
    context = ray.get_runtime_context()
    node_address = ray.util.get_node_ip_address() if config.ray.address else "127.0.0.1"
    write_address(run_dir, address=context.gcs_address, node_address=config.ray.node_address or node_address)
    serving = asyncio.create_task(_serve(fleet, config, str(run_dir)))
    try:
        yield
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def _serve(fleet: ElasticFleet, config: RunConfig, name: str) -> None:
    while True:
        options = {"name": name, "namespace": NAMESPACE, "num_cpus": 0, "runtime_env": {"env_vars": WORKER_ENV}}
        desk: Any = ray.remote(FleetDesk).options(**options).remote()
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    number, request = await desk.next_request.remote()
                    logger.info("asked to %s", request)
                    tasks.create_task(_answer(desk, number, fleet, request, config))
        except* RayActorError as died:
            logger.warning("the desk for join and leave died and is replaced: %s", died.exceptions[0])


async def _answer(desk: Any, number: int, fleet: ElasticFleet, request: FleetRequest, config: RunConfig) -> None:
    await desk.answer.remote(number, await answered(fleet, request, config))
