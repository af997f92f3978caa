"""A group of workers as one object: its members, their liveness, and the methods that it takes over from them."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from asyncrl.protocol.errors import WorkerDiedError

from .dispatch import MAGIC_ATTR, Dispatch, Execute, get_predefined_dispatch_fn, get_predefined_execute_fn
from .liveness import DeathWatch, state_of, wait_until_alive
from .resource_pool import ResourcePool

_log = logging.getLogger(__name__)


class WorkerGroup:
    """Base of groups; a subclass starts the workers and knows how to call them."""

    fused_worker_execute_fn_name = "_fuw_execute"

    def __init__(self, resource_pool: ResourcePool | None) -> None:
        self._is_init_with_detached_workers = resource_pool is None
        self.fused_worker_used = False
        self._workers: list[Any] = []
        self._worker_names: list[str] = []
        self._dispatch_info: dict[str, list[int]] = {}
        self._collect_info: dict[str, list[bool]] = {}
        self._watch: DeathWatch | None = None
        self._checker_thread: threading.Thread | None = None

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """A method that the workers' class registered."""

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return len(self._workers)

    def _death_of(self, rank: int) -> WorkerDiedError:
        """The error for a worker's death; a subclass adds what it knows."""
        return WorkerDiedError(f"worker of rank {rank} died")

    def _is_worker_alive(self, worker: Any) -> bool:
        """Whether Ray considers a worker alive."""
        return state_of(worker) == "ALIVE"

    def _block_until_all_workers_alive(self, timeout_s: float = 300.0) -> None:
        """Wait until every worker is alive. Raises `DeadlineError` after ``timeout_s`` seconds."""
        wait_until_alive(self._workers, timeout_s)

    def start_worker_aliveness_check(
        self, every_n_seconds: float = 1, on_death: Callable[[WorkerDiedError], None] | None = None
    ) -> None:
        """Watch the workers from a thread, once all of them are alive. The end of a worker's process wakes it.

        Args:
            every_n_seconds: Seconds between checks of Ray's own view, even if no process ended.
            on_death: Called once, from that thread, with the error that names the worker. By default the error is
                logged and SIGABRT raised, which ends the driver.
        """
        self.stop_worker_aliveness_check()
        self._block_until_all_workers_alive()
        self._watch = DeathWatch(self._workers, self._is_worker_alive)
        self._checker_thread = threading.Thread(
            target=self._tell_of_death,
            args=(self._watch, every_n_seconds, on_death or _abort),
            daemon=True,
            name="aliveness",
        )
        self._checker_thread.start()

    def stop_worker_aliveness_check(self) -> None:
        """End the watch, if there is one."""
        if self._watch is not None:
            self._watch.close()
        if self._checker_thread is not None and self._checker_thread is not threading.current_thread():
            self._checker_thread.join()
        self._watch = self._checker_thread = None

    def _tell_of_death(
        self, watch: DeathWatch, every_n_seconds: float, on_death: Callable[[WorkerDiedError], None]
    ) -> None:
        rank = watch.wait(every_n_seconds)
        if rank is not None:
            on_death(self._death_of(rank))

    def _bind_worker_method(self, user_defined_cls: Any, func_generator: Callable[..., Any]) -> list[str]:
        """Give the group each method that the class registered. Returns their names.

        Args:
            user_defined_cls: The workers' class.
            func_generator: ``(group, method_name, *, dispatch_fn, collect_fn, execute_fn, blocking)`` to a callable.
        """
        method_names = []
        for method_name in dir(user_defined_cls):
            attrs = getattr(getattr(user_defined_cls, method_name, None), MAGIC_ATTR, None)
            if attrs is None:
                continue
            mode, execute_mode = attrs["dispatch_mode"], attrs["execute_mode"]
            if mode is Dispatch.RANK_ZERO:
                execute_mode = Execute.RANK_ZERO
            elif mode is Dispatch.ONE_TO_ALL and execute_mode is Execute.RANK_ZERO:
                mode = Dispatch.RANK_ZERO  # one rank needs one copy of the arguments
            functions = get_predefined_dispatch_fn(mode) if isinstance(mode, Dispatch) else mode
            method = func_generator(
                self,
                method_name,
                dispatch_fn=functions["dispatch_fn"],
                collect_fn=functions["collect_fn"],
                execute_fn=getattr(self, get_predefined_execute_fn(execute_mode)["execute_fn_name"]),
                blocking=attrs["blocking"],
            )
            setattr(self, method_name, method)
            method_names.append(method_name)
        return method_names


def _abort(error: WorkerDiedError) -> None:
    _log.critical("%s", error)
    signal.raise_signal(signal.SIGABRT)
