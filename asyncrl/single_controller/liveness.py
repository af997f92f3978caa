"""Whether workers are alive, noticing a death while nobody calls them, and what a worker wrote before it died.

On each node one task waits for the workers' processes to end. The kernel wakes that task when a process ends, and the
task's end wakes whoever watches the group. Where the node dies, Ray ends the task. A worker's own methods are not used,
because a worker runs one method at a time.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

import psutil
import ray
from ray._private import state as ray_state
from ray._private import worker as ray_worker
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from asyncrl.core.errors import ClusterDiedError
from asyncrl.core.remote import last_lines, process_end, wait_for_first_end

from .resource_pool import current_cluster


def state_of(worker: Any) -> str:
    """An actor's state, as Ray names it. Example: ``"ALIVE"``."""
    actor = ray_state.actors(worker._actor_id.hex())
    return actor["State"] if actor else "UNKNOWN"


def address_of(worker: Any) -> str:
    """Address of the node on which an actor lives."""
    actor = ray_state.actors(worker._actor_id.hex())
    return actor["Address"]["IPAddress"] if actor else "unknown"


async def ray_death() -> NoReturn:
    """Wait until one of Ray's own processes on this machine has died: the raylet, or the control service (gcs_server).

    Raises `ClusterDiedError`, which names it and ends with its log. Ray itself reports a dead raylet as its workers'
    death after some 15 s, and ends this process without an error some seconds after the control service died.
    """
    node: Any = ray_worker._global_node
    daemons = await asyncio.to_thread(_ray_daemons, node)
    never = asyncio.get_running_loop().create_future()  # for a cluster without daemons on this machine
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
        f"Ray's {_DAEMONS[name]} ({name}, pid {pid}) died, and the run cannot go on without it; the end of {log}:\n"
        f"{last_lines(str(log))}"
    )


_DAEMONS = {"raylet": "node manager", "gcs_server": "control service"}


def _ray_daemons(node: Any) -> dict[int, str]:
    """Process ids and names of the raylet and the control service that this driver uses, if they run here."""
    marks = {
        "raylet": f"--raylet_socket_name={node.raylet_socket_name}",
        "gcs_server": f"--session-name={node.session_name}",
    }
    return {
        process.pid: name
        for process in psutil.process_iter(["name", "cmdline"])
        for name, mark in marks.items()
        if process.info["name"] == name and mark in (process.info["cmdline"] or [])
    }


class DeathWatch:
    """Waits for the first death among some workers, by rank, all of which are alive as far as Ray knows."""

    def __init__(self, workers: Sequence[Any], is_alive: Callable[[Any], bool]) -> None:
        self._workers = list(workers)
        self._is_alive = is_alive
        self._closed = threading.Event()
        self._cluster = current_cluster()
        self._ranks: dict[str, dict[int, int]] = defaultdict(dict)
        for rank, worker in enumerate(workers):
            actor = ray_state.actors(worker._actor_id.hex())
            self._ranks[actor["Address"]["NodeID"]][actor["Pid"]] = rank
        self._nodes = {_watch_on(node_id, list(ranks)): node_id for node_id, ranks in self._ranks.items()}

    def wait(self, every_s: float) -> int | None:
        """The rank of a worker that died; None if the watch was closed or Ray was shut down.

        Every ``every_s`` seconds Ray is asked for the workers' states, even if no process ended.
        """
        while not self._is_over():
            try:
                rank = self._next_death(every_s)
            except Exception:
                if self._is_over():
                    return None
                raise
            if rank is not None and not self._is_over():  # otherwise Ray's shutdown ended the worker
                return rank
        return None

    def _next_death(self, every_s: float) -> int | None:
        ended, _ = ray.wait(list(self._nodes), num_returns=1, timeout=every_s)
        if self._is_over():
            return None
        dead = [rank for rank, worker in enumerate(self._workers) if not self._is_alive(worker)]
        rank = self._reported_by(ended[0]) if ended else None
        return dead[0] if rank is None and dead else rank

    def close(self) -> None:
        """End the watch; `wait` returns."""
        was_over = self._is_over()
        self._closed.set()
        for task in [] if was_over else list(self._nodes):
            ray.cancel(task, force=True)

    def _is_over(self) -> bool:
        return self._closed.is_set() or self._cluster != current_cluster()

    def _reported_by(self, task: Any) -> int | None:
        """The rank of the worker that died, as the task on its node reports; a lost task is started again."""
        node_id = self._nodes.pop(task)
        ranks = self._ranks[node_id]
        try:
            pid: Any = ray.get(task)
            return ranks[pid]
        except RayTaskError:
            raise
        except RayError:
            self._nodes[_watch_on(node_id, list(ranks))] = node_id
            return None


async def first_to_end(workers: Sequence[Any], is_alive: Callable[[Any], bool]) -> int:
    """Wait until the process of one of the workers, all alive by now, has ended; returns its index.

    The kernel tells of those on this node, and a `DeathWatch` of the others.
    """
    here = ray.get_runtime_context().get_node_id()
    actors = [ray_state.actors(worker._actor_id.hex()) for worker in workers]
    elsewhere = [index for index, actor in enumerate(actors) if actor["Address"]["NodeID"] != here]
    waiting: dict[asyncio.Future[Any], int] = {
        asyncio.ensure_future(process_end(actor["Pid"])): index
        for index, actor in enumerate(actors)
        if index not in elsewhere
    }
    watch = DeathWatch([workers[index] for index in elsewhere], is_alive) if elsewhere else None
    afar = None if watch is None else asyncio.ensure_future(asyncio.to_thread(watch.wait, _ASKED_EVERY_S))
    try:
        ended, _ = await asyncio.wait({*waiting, *([afar] if afar else [])}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
        if watch is not None:
            await asyncio.to_thread(watch.close)
    first = ended.pop()
    return waiting[first] if first in waiting else elsewhere[cast("int", first.result())]


def _watch_on(node_id: str, pids: list[int]) -> Any:
    there = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
    return _first_to_end.options(scheduling_strategy=there).remote(pids)


_first_to_end = ray.remote(num_cpus=0, max_retries=0)(wait_for_first_end)


_ASKED_EVERY_S = 5.0
_REMOTE_READ_TIMEOUT_S = 10.0
_RAY_MARKS = (":job_id:", ":actor_name:", ":task_name:")  # begin the lines in which Ray names job and actor


def last_words(actor_id: str, log_file: str | None) -> str:
    """Paths and end of an actor's output on its node; ``log_file`` is its log there, None if Ray keeps it."""
    if not ray.is_initialized():
        return f"{log_file}:\n{last_lines(log_file)}" if log_file else "its output: (Ray is shut down)"
    actor = ray_state.actors(actor_id)
    if not actor:
        return "its output: (Ray does not know the actor)"
    if not actor["Pid"]:
        return "its output: (it never ran)"
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


def tail_of(log_file: str | None, pid: int) -> str:
    """Paths and last lines of what a process of this node wrote: its log, or the files that Ray keeps."""
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
