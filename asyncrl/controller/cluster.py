"""The Ray cluster of a run, its own or one that is joined, and what all of its worker groups have in common.

`within` is how the controller waits for a group: under a deadline, with a message that says what it waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
import ray

from asyncrl.config import RunConfig, check_placement, requested_cpus
from asyncrl.protocol.errors import DeadlineError, WorkerDiedError
from asyncrl.protocol.log_tail import last_lines

# Ray starts workers at nice 15 by default, which starves them beside any other load; idle workers started ahead of
# need cost start-up time and memory that a run of a few actors never earns back; and a control service that died on
# the same machine does not come back, so nobody needs to wait a minute for it.
_OWN_CLUSTER_ENV = {
    "RAY_worker_niceness": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
}


# One thread per process: on a machine with few cores, threads that compete for them stop every process.
WORKER_ENV = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

_DAEMONS = ("raylet", "gcs_server")

T = TypeVar("T")


@asynccontextmanager
async def ray_cluster(config: RunConfig) -> AsyncIterator[None]:
    """Start or join Ray, check that the run fits, and leave nothing behind.

    Raises:
        DeadlineError: the cluster does not answer within ``ray.start_timeout_s``.
        ValueError: the run asks for more than the cluster has.
    """
    if config.ray.address:
        start = asyncio.to_thread(
            ray.init, address=config.ray.address, logging_level=logging.ERROR, log_to_driver=False
        )
    else:
        start = asyncio.to_thread(_start_own, config)
    try:
        try:
            await asyncio.wait_for(start, config.ray.start_timeout_s)
        except TimeoutError:
            raise DeadlineError(
                f"Ray did not come up within ray.start_timeout_s={config.ray.start_timeout_s:g} s "
                f"(address {config.ray.address or 'of our own'!r}); raise it, or look into Ray's session logs"
            ) from None
        if config.ray.address:
            _check_one_host(config.ray.address)
            total = ray.cluster_resources()
            check_placement(config, num_cpus=int(total.get("CPU", 0)), num_gpus=int(total.get("GPU", 0)))
        yield
    finally:
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


async def process_ended(pid: int) -> None:
    """Wait for a process of this machine to end; the kernel wakes this through a pid file descriptor."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


async def ray_died() -> None:
    """Wait for a daemon of our own cluster to end; returns at once where the cluster is not our own.

    Raises:
        WorkerDiedError: one ended; the message names it and ends with its log.
    """
    daemons = [child for child in psutil.Process().children() if child.name() in _DAEMONS]
    watching = {asyncio.ensure_future(process_ended(daemon.pid)): daemon for daemon in daemons}
    logs = {daemon: _log_of(daemon) for daemon in daemons}
    if not daemons:
        return
    try:
        done, _ = await asyncio.wait(watching, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for watcher in watching:
            watcher.cancel()
    dead = watching[done.pop()]
    name = "raylet" if dead.name() == "raylet" else "gcs_server"
    raise WorkerDiedError(f"Ray's {name} (pid {dead.pid}) died; its log ends:\n{last_lines(logs[dead])}")


def _log_of(daemon: psutil.Process) -> str:
    options = dict(argument.lstrip("-").split("=", 1) for argument in daemon.cmdline() if "=" in argument)
    folder = options.get("log_dir") or os.path.join(options.get("session_dir", ""), "logs")
    return os.path.join(folder, f"{daemon.name()}.out")


@dataclass(frozen=True, kw_only=True)
class GroupLogs:
    """Where the workers of a group log, so that one that does not answer can be shown.

    Attributes:
        part: What a worker is, for messages. Example: ``rollout worker``.
        name: The group's name; rank r logs to ``<folder>/<name>-<r>.log``.
        folder: The run's logs.
    """

    part: str
    name: str
    folder: Path

    def of(self, ranks: Sequence[int]) -> str:
        """The ranks by name, and the end of the first one's log."""
        path = self.folder / f"{self.name}-{ranks[0]}.log"
        who = f"{self.part} {ranks[0]}" if len(ranks) == 1 else f"{self.part}s {', '.join(map(str, ranks))}"
        return f"{who} did not answer; {path} ends:\n{last_lines(str(path))}"


async def within(pending: Awaitable[T], timeout_s: float, what: str, option: str, logs: GroupLogs | None = None) -> T:
    """Await a group's call under a deadline.

    Args:
        pending: The call.
        timeout_s: The deadline.
        what: What is awaited, for the message.
        option: The option that bounds it, for the message.
        logs: Where the workers of the group log.

    Raises:
        DeadlineError: it passed; the message names what was awaited, who did not answer, and the option.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await pending
    except TimeoutError:
        late = _late_ranks(pending)
        who = logs.of(late) if logs is not None and late else "look into the logs"
        raise DeadlineError(f"waited {timeout_s:g} s ({option}) for {what}: {who}") from None


def _late_ranks(pending: Awaitable[Any]) -> list[int]:
    """The ranks of a call that have not answered; none where the call is not a list with a reference per rank."""
    references = [item for item in pending if isinstance(item, ray.ObjectRef)] if isinstance(pending, list) else []
    if not references:
        return []
    answered, _ = ray.wait(references, num_returns=len(references), timeout=0, fetch_local=False)
    return [rank for rank, reference in enumerate(references) if reference not in answered]


async def stop_groups(groups: Sequence[Any], shutdown: Callable[[], None], timeout_s: float) -> None:
    """Ask every worker of the groups to stop, for at most ``timeout_s`` seconds, then kill what is left."""
    try:
        # Whatever a dying worker answers no longer matters: it is killed next.
        with contextlib.suppress(Exception):
            await asyncio.wait_for(all_of([group.execute_all_async("stop") for group in groups]), timeout_s)
    finally:
        await asyncio.to_thread(shutdown)


async def all_of(pending: Sequence[Awaitable[Any]]) -> None:
    """Await calls that were made before, one after another."""
    for result in pending:
        await result
