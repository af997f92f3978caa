"""Noticing that a worker died while nobody calls it: on each node one task waits for the workers' processes to end.

The kernel wakes that task when a process ends, and the task's end wakes whoever watches the group. Where the node dies,
Ray ends the task. A worker's own methods are not used, because a worker runs one at a time.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import ray
from ray._private import state as ray_state
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from asyncrl.protocol.remote import fetch

from .ray_pool import current_cluster

_log = logging.getLogger(__name__)


def wait_until_alive(workers: Sequence[Any], timeout_s: float) -> None:
    """Wait until every worker has been made.

    Raises:
        DeadlineError: not within ``timeout_s`` seconds; the message names who was late.
        WorkerDiedError: one died.
    """
    starting = [worker for worker in workers if state_of(worker) != "ALIVE"]
    fetch([worker.__ray_ready__.remote() for worker in starting], timeout_s)


def state_of(worker: Any) -> str:
    """Ray's word for an actor's state. Example: ``"ALIVE"``."""
    actor = ray_state.actors(worker._actor_id.hex())
    return actor["State"] if actor else "UNKNOWN"


def address_of(worker: Any) -> str:
    """Address of the node on which an actor lives."""
    actor = ray_state.actors(worker._actor_id.hex())
    return actor["Address"]["IPAddress"] if actor else "unknown"


def check_workers_alive(workers: Sequence[Any], is_alive: Callable[[Any], bool], gap_time: float = 1) -> None:
    """Raise SIGABRT whenever a worker is found dead; it asks for ever, so give it a thread.

    A group's ``start_worker_aliveness_check`` waits for the end of the processes instead of asking.

    Args:
        workers: What to ask about.
        is_alive: Whether one of them is alive.
        gap_time: Seconds between two rounds of questions.
    """
    pause = threading.Event()
    while True:
        for worker in workers:
            if not is_alive(worker):
                _log.warning("worker %s is not alive; raising SIGABRT", worker)
                signal.raise_signal(signal.SIGABRT)
        pause.wait(gap_time)


class DeathWatch:
    """Waits for the first death among some workers, all of which are alive.

    Args:
        workers: Actor handles, by rank.
        is_alive: Whether one of them is alive, as far as Ray knows.
    """

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
        """The rank of a worker that died; None where the watch was closed, or Ray shut down.

        Args:
            every_s: Seconds after which Ray is asked for the workers' states, even if no process ended.
        """
        while not self._is_over():
            try:
                rank = self._next_death(every_s)
            except Exception:
                if self._is_over():
                    return None
                raise
            if rank is not None and not self._is_over():  # else Ray's shutdown ended it
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
        """Who died, as the task on their node says; where the task itself was lost, another takes its place."""
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


def _watch_on(node_id: str, pids: list[int]) -> Any:
    there = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
    return _first_to_end.options(scheduling_strategy=there).remote(pids)


@ray.remote(num_cpus=0, max_retries=0)
def _first_to_end(pids: list[int]) -> int:
    """Wait until one of these processes of this node ends; returns its id."""
    with ExitStack() as opened:
        waiting = select.poll()
        pid_of = {}
        for pid in pids:
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                return pid
            opened.callback(os.close, descriptor)
            waiting.register(descriptor, select.POLLIN)
            pid_of[descriptor] = pid
        return pid_of[waiting.poll()[0][0]]
