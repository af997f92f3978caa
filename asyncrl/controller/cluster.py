"""The Ray cluster of a run, its own or one that is joined, and what all of its worker groups have in common."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import ray

from asyncrl.config import RunConfig, check_placement, requested_cpus
from asyncrl.protocol.errors import ClusterDiedError, DeadlineError

# Ray starts workers at nice 15 by default, which starves them beside any other load; idle workers started ahead of
# need cost start-up time and memory that a run of a few actors never earns back; a control service that died on the
# same machine does not come back, so nobody needs to wait a minute for it; and the children of a worker that died end
# by themselves, after they have removed what it left.
_OWN_CLUSTER_ENV = {
    "RAY_worker_niceness": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
    "RAY_process_group_cleanup_enabled": "0",
}

# One thread per process: on a machine with few cores, threads that compete for them stop every process. The children of
# a worker that exits end by themselves, as above; Ray would kill them first.
WORKER_ENV = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_kill_child_processes_on_worker_exit": "0",
}

T = TypeVar("T")


@asynccontextmanager
async def ray_cluster(config: RunConfig) -> AsyncIterator[None]:
    """Start or join Ray, check that the run fits, and leave nothing behind.

    Raises:
        ClusterDiedError: Ray does not start, or cannot be joined.
        DeadlineError: the cluster does not answer within ``ray.start_timeout_s``.
        ValueError: the run asks for more than the cluster has.
    """
    if config.ray.address:
        start = asyncio.to_thread(
            ray.init, address=config.ray.address, logging_level=logging.ERROR, log_to_driver=False
        )
    else:
        start = asyncio.to_thread(_start_own, config)
    starting = asyncio.ensure_future(start)
    try:
        try:
            await asyncio.wait_for(asyncio.shield(starting), config.ray.start_timeout_s)
        except TimeoutError:
            raise DeadlineError(
                f"Ray did not come up within ray.start_timeout_s={config.ray.start_timeout_s:g} s "
                f"(address {config.ray.address or 'of our own'!r}); raise it, or look into Ray's session logs"
            ) from None
        except Exception as error:
            where = f"at ray.address={config.ray.address}" if config.ray.address else "on this machine"
            raise ClusterDiedError(f"Ray {where} did not come up: {error}; look into Ray's session logs") from error
        if config.ray.address:
            _check_one_host(config.ray.address)
            total = ray.cluster_resources()
            check_placement(config, num_cpus=int(total.get("CPU", 0)), num_gpus=int(total.get("GPU", 0)))
        yield
    finally:
        # Ray that is shut down while its thread still starts it ends this process, with a status of its own.
        await asyncio.wait([starting], timeout=config.stop_timeout_s / 2)
        await asyncio.to_thread(ray.shutdown)


def _start_own(config: RunConfig) -> None:
    for name, value in _OWN_CLUSTER_ENV.items():
        os.environ.setdefault(name, value)
    cores = os.cpu_count() or 1
    wanted = requested_cpus(config)
    ray.init(
        address="local",
        num_cpus=max(cores, int(wanted + 0.999)) if config.placement.oversubscribe else cores,
        include_dashboard=False,
        object_store_memory=config.ray.object_store_bytes,
        logging_level=logging.ERROR,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
    )


def _check_one_host(address: str) -> None:
    hosts = sorted({node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]})
    if len(hosts) > 1:
        raise ValueError(
            f"ray.address={address} must be a cluster of one host, got {len(hosts)} ({', '.join(hosts)}): weights are "
            "published through a file that learner and engines share; use a single-node cluster"
        )


async def stop_groups(groups: Sequence[Any], shutdown: Callable[[], None], timeout_s: float) -> None:
    """Ask every worker of the groups to stop, for at most ``timeout_s`` seconds, then kill what is left."""
    try:
        # Whatever a dying worker answers no longer matters: it is killed next.
        with contextlib.suppress(Exception):
            await asyncio.wait_for(AllOf([group.execute_all_async("stop") for group in groups]), timeout_s)
    finally:
        await asyncio.to_thread(shutdown)


async def finished_in_thread(work: Callable[[], T], timeout_s: float) -> T:
    """Do work in a thread; a cancellation waits for it, since it needs the Ray that is stopped next."""
    working = asyncio.create_task(asyncio.to_thread(work))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait([working], timeout=timeout_s)
        raise


class AllOf:
    """Calls made to several groups, awaited one after another; ``futures`` lets a message name the late workers."""

    def __init__(self, calls: Sequence[Awaitable[Any]]) -> None:
        self._calls = calls
        self.futures = [ref for call in calls if isinstance(call, list) for ref in call]

    def __await__(self) -> Generator[Any, None, None]:
        for call in self._calls:
            yield from call.__await__()
