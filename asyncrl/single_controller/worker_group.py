"""A group of workers as one object: its members, and the methods that it takes over from them."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from asyncrl.protocol.errors import DeadlineError, WorkerDiedError

from .decorator import MAGIC_ATTR, Dispatch, Execute
from .dispatch import get_predefined_dispatch_fn, get_predefined_execute_fn
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
        self._stop_checking = threading.Event()
        self._checker_thread: threading.Thread | None = None

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """A method that the workers' class registered."""

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return len(self._workers)

    def _is_worker_alive(self, worker: Any) -> bool:
        """Whether a worker has started and has not died; a subclass knows."""
        raise TypeError(f"{type(self).__name__} must define _is_worker_alive to check its workers")

    def _death_of(self, rank: int) -> WorkerDiedError:
        return WorkerDiedError(f"worker of rank {rank} died")

    def _block_until_all_workers_alive(self, timeout_s: float = 300.0, every_n_seconds: float = 1.0) -> None:
        """Wait until every worker is alive. Raises `DeadlineError` after ``timeout_s`` seconds."""
        missing: list[int] = []
        for _ in range(max(1, round(timeout_s / every_n_seconds))):
            missing = [rank for rank, worker in enumerate(self._workers) if not self._is_worker_alive(worker)]
            if not missing:
                return
            self._stop_checking.wait(every_n_seconds)
        raise DeadlineError(f"workers of ranks {missing} were not alive after {timeout_s} s")

    def start_worker_aliveness_check(
        self, every_n_seconds: float = 1, on_death: Callable[[WorkerDiedError], None] | None = None
    ) -> None:
        """Watch the workers from a thread, once all of them are alive.

        Args:
            every_n_seconds: Seconds between two looks.
            on_death: Called once, from that thread, with the error that names the worker. By default the error is
                logged and SIGABRT raised, which ends the driver.
        """
        self._block_until_all_workers_alive(every_n_seconds=every_n_seconds)
        self._checker_thread = threading.Thread(
            target=self._watch, args=(every_n_seconds, on_death or _abort), daemon=True, name="aliveness"
        )
        self._checker_thread.start()

    def stop_worker_aliveness_check(self) -> None:
        """End the watch, if there is one."""
        self._stop_checking.set()
        if self._checker_thread is not None and self._checker_thread is not threading.current_thread():
            self._checker_thread.join()
        self._checker_thread = None
        self._stop_checking.clear()

    def _watch(self, every_n_seconds: float, on_death: Callable[[WorkerDiedError], None]) -> None:
        while not self._stop_checking.wait(every_n_seconds):
            for rank, worker in enumerate(self._workers):
                if not self._is_worker_alive(worker):
                    on_death(self._death_of(rank))
                    return

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
