"""Detects the death of a worker or of a Ray daemon, and reads the last lines that a worker printed.

`first_death` calls no method of a worker, because a living worker may be busy with a long method.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import psutil
import ray
from ray._private import state as ray_state
from ray._private import worker as ray_worker
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from asyncrl.core.errors import ClusterDiedError
from asyncrl.core.remote import last_lines, process_end, wait_for_first_end

from .resource_pool import current_cluster, current_node


def state_of(worker: Any) -> str:
    """Return Ray's name for an actor's state, such as ``"ALIVE"``; ``"UNKNOWN"`` if Ray does not know the actor."""
    actor = ray_state.actors(worker._actor_id.hex())
    return actor["State"] if actor else "UNKNOWN"


def address_of(worker: Any) -> str:
    """Return the IP address of an actor's node; ``"unknown"`` if Ray does not know the actor."""
    actor = ray_state.actors(worker._actor_id.hex())
    return actor["Address"]["IPAddress"] if actor else "unknown"


async def ray_death() -> NoReturn:
    """Wait until a Ray daemon on this machine has died: the raylet, or the control service (gcs_server).

    If the raylet dies, Ray reports only the death of its workers, after about 15 s. If the control service dies, Ray
    ends this process some seconds later without an error. If no daemon runs here, this function waits forever.

    Raises:
        ClusterDiedError: a daemon has died. The message names the daemon and has the last lines of its log.
    """
    node: Any = ray_worker._global_node
    marks = {
        "raylet": f"--raylet_socket_name={node.raylet_socket_name}",
        "gcs_server": f"--session-name={node.session_name}",
    }
    processes = await asyncio.to_thread(lambda: list(psutil.process_iter(["name", "cmdline"])))
    daemons = {
        process.pid: process.info["name"]
        for process in processes
        if marks.get(process.info["name"], "\0") in (process.info["cmdline"] or [])
    }
    never = asyncio.get_running_loop().create_future()  # `asyncio.wait` needs a future even if there are no daemons
    waiting: dict[Any, int] = {asyncio.ensure_future(process_end(pid)): pid for pid in daemons}
    try:
        ended, _ = await asyncio.wait({never, *waiting}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
    pid = waiting[ended.pop()]
    name = daemons[pid]
    log = Path(node.get_logs_dir_path()) / f"{name}.out"
    raise ClusterDiedError(
        f"Ray's {_DAEMONS[name]} ({name}, pid {pid}) died, and the run cannot continue without it; the end of {log}:\n"
        f"{last_lines(str(log))}"
    )


_DAEMONS = {"raylet": "node manager", "gcs_server": "control service"}


async def first_death(workers: Sequence[Any], is_alive: Callable[[Any], bool], every_s: float = 5.0) -> int | None:
    """Wait until one of the workers (Ray actor handles) has died. All workers must be alive at the call.

    ``is_alive`` is a function that asks Ray whether a worker is alive.

    On this node, the kernel reports the end of a process. On another node, a Ray task waits for the end of the process.
    In addition, this function asks Ray for the workers' states every ``every_s`` seconds.

    Returns:
        The index of the dead worker, or None if Ray was shut down first.
    """
    cluster, here = current_cluster(), current_node()
    ranks: dict[str, dict[int, int]] = defaultdict(dict)
    for rank, worker in enumerate(workers):
        actor = ray_state.actors(worker._actor_id.hex())
        ranks[actor["Address"]["NodeID"]][actor["Pid"]] = rank
    waiting: dict[Any, int] = {
        asyncio.ensure_future(process_end(pid)): rank for pid, rank in ranks.pop(here, {}).items()
    }
    afar: dict[Any, dict[int, int]] = {
        asyncio.ensure_future(_end_on(node_id, list(pids))): pids for node_id, pids in ranks.items()
    }
    try:
        while True:
            ended, _ = await asyncio.wait({*waiting, *afar}, timeout=every_s, return_when=asyncio.FIRST_COMPLETED)
            if cluster != current_cluster():  # Ray was shut down
                return None
            found = [waiting[one] if one in waiting else afar[one].get(one.result() or 0) for one in ended]
            states = await asyncio.to_thread(lambda: list(map(is_alive, workers)))
            dead = [rank for rank in found if rank is not None] or [i for i, alive in enumerate(states) if not alive]
            if dead:
                return dead[0] if cluster == current_cluster() else None
            for lost in [one for one in ended if one in afar]:
                pids = afar.pop(lost)
                node_id = next(node_id for node_id, on_node in ranks.items() if on_node is pids)
                afar[asyncio.ensure_future(_end_on(node_id, list(pids)))] = pids
    finally:
        for one in (*waiting, *afar):
            one.cancel()


async def _end_on(node_id: str, pids: list[int]) -> int | None:
    """Wait until one of the processes ``pids`` of a node ends, and return the process's pid.

    A Ray task waits on the node. Return None if Ray lost the task.
    """
    there = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
    task: Any = _first_to_end.options(scheduling_strategy=there).remote(pids)
    try:
        return await task
    except RayTaskError:
        raise
    except RayError:
        return None
    except asyncio.CancelledError:
        if ray.is_initialized():
            ray.cancel(task, force=True)
        raise


_first_to_end = ray.remote(num_cpus=0, max_retries=0)(wait_for_first_end)


_REMOTE_READ_TIMEOUT_S = 10.0
_RAY_MARKS = (":job_id:", ":actor_name:", ":task_name:")  # a line of a log comes from Ray if it begins so


def last_words(actor_id: str, log_file: str | None) -> str:
    """Return a text with the last lines that an actor has printed, and the path of the log file.

    ``log_file`` is the path of the actor's log on the actor's node. If it is None, the function reads Ray's log files.
    If the log cannot be read, the text says why.
    """
    if not ray.is_initialized():
        return f"{log_file}:\n{last_lines(log_file)}" if log_file else "its output: (Ray is shut down)"
    actor = ray_state.actors(actor_id)
    if not actor:
        return "its output: (Ray does not know the actor)"
    if not actor["Pid"]:
        return f"its output: (it never ran). {_newest_complaints()}"
    node_id = actor["Address"]["NodeID"]
    if node_id == ray.get_runtime_context().get_node_id():
        return tail_of(log_file, actor["Pid"])
    there = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
    reading = ray.remote(num_cpus=0)(tail_of).options(scheduling_strategy=there).remote(log_file, actor["Pid"])
    try:
        return ray.get(reading, timeout=_REMOTE_READ_TIMEOUT_S)
    except RayError as error:
        where = log_file or "its output"
        return f"{where}: (cannot be read, its node does not answer: {type(error).__name__})"


def _newest_complaints() -> str:
    """Return a text with the path and the last lines of this node's newest raylet error log.

    The log possibly says why an actor's process did not start. If there is no such log, the text is empty.
    """
    node: Any = ray_worker._global_node
    logs = [*Path(node.get_logs_dir_path()).glob("raylet*.err")]
    newest = max(logs, key=lambda path: path.stat().st_mtime_ns, default=None)
    return f"{newest}:\n{last_lines(str(newest))}" if newest else ""


def tail_of(log_file: str | None, pid: int) -> str:
    """Return a text with the last lines that a process of this node has printed, and the path of the log file.

    ``log_file`` is the process's log. If it is None, the function reads Ray's log files of the process ``pid``.
    """
    if log_file is not None:
        return f"{log_file}:\n{last_lines(log_file)}"
    node: Any = ray_worker._global_node
    logs = Path(node.get_logs_dir_path())
    tails = []
    for path in sorted(logs.glob(f"worker-*-{pid}.*")):
        lines = last_lines(str(path)).splitlines()
        if own := [line for line in lines if line.strip() and not line.startswith(_RAY_MARKS)]:
            tails += [f"{path}:", *own]
    return "\n".join(tails) or f"{logs}: (nothing of pid {pid})"
