"""Worker groups start workers in Ray, call methods of all workers, and detect the death of a worker."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from asyncrl.core.errors import ClusterDiedError, UsageError, WorkerDiedError
from asyncrl.core.host import NO_GPUS
from asyncrl.core.remote import WorkerIdentity, death_of, fetch, identities

from .calls import PendingResult, PendingResults, Route, deadline_s, func_generator, shared
from .dispatch import MAGIC_ATTR, Dispatch, Execute, get_predefined_dispatch_fn, get_predefined_execute_fn
from .liveness import address_of, first_death, last_words, state_of
from .resource_pool import (
    JoinedResourcePool,
    RayClassWithInitArgs,
    RayResourcePool,
    ResourcePool,
    Slot,
    current_cluster,
    current_node,
    get_random_string,
    master_address_port,
    node_addresses,
    slots_of,
    unwrap,
)

_log = logging.getLogger(__name__)
_START_TIMEOUT_S = 300.0


class WorkerGroup:
    """Base class of worker groups. A subclass starts the workers and sends calls to them."""

    def __init__(self, resource_pool: ResourcePool | None) -> None:
        self._is_init_with_detached_workers = resource_pool is None
        self.fused_worker_used = False
        self._bound: list[str] = []
        self._workers: list[Any] = []
        self._worker_names: list[str] = []
        self._slots: list[Slot] = []
        self._devices: list[str] = []
        self._replacements: list[Callable[..., tuple[Any, str]]] = []
        self._num_replaced = 0
        self._dispatch_info: dict[str, list[int]] = {}
        self._collect_info: dict[str, list[bool]] = {}
        self._watch: tuple[asyncio.AbstractEventLoop, asyncio.Task[int | None]] | None = None
        self._checker_thread: threading.Thread | None = None

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return a registered method of the class of the workers."""

    @property
    def world_size(self) -> int:
        """Number of workers in the group."""
        return len(self._workers)

    def _running(self) -> list[Any]:
        """Return the workers. Raises `UsageError` after the group was shut down."""
        if not self._workers:
            name = getattr(self, "name_prefix", type(self).__name__)
            raise UsageError(f"group {name!r} has no workers, because it was shut down; start a new group")
        return self._workers

    def _is_worker_alive(self, worker: Any) -> bool:
        return state_of(worker) == "ALIVE"

    def start_worker_aliveness_check(
        self, every_n_seconds: float = 1, on_death: Callable[[WorkerDiedError], None] | None = None
    ) -> None:
        """Wait until all workers have started. Then start a thread that waits for the death of a worker.

        The end of a worker's process wakes the thread. The thread also asks Ray for the workers' states every
        ``every_n_seconds``. After a death, the thread calls ``on_death`` once with an error that names the worker. By
        default the thread raises SIGABRT, which ends the driver.
        """
        self.stop_worker_aliveness_check()
        starting = [worker for worker in self._workers if state_of(worker) != "ALIVE"]
        fetch([worker.__ray_ready__.remote() for worker in starting], _START_TIMEOUT_S, "the workers of the group")
        loop = asyncio.new_event_loop()
        task = loop.create_task(first_death(self._workers, self._is_worker_alive, every_n_seconds))

        def watch() -> None:
            with suppress(asyncio.CancelledError), closing(loop):
                rank = loop.run_until_complete(task)
                if rank is not None:
                    (on_death or _abort)(self._death_of(rank))

        self._watch = loop, task
        self._checker_thread = threading.Thread(target=watch, daemon=True, name="aliveness")
        self._checker_thread.start()

    def stop_worker_aliveness_check(self) -> None:
        """End the thread that `start_worker_aliveness_check` started, if the thread still runs."""
        if self._watch is not None:
            loop, task = self._watch
            with suppress(RuntimeError):  # ignore the error if the event loop has already ended
                loop.call_soon_threadsafe(task.cancel)
        if self._checker_thread not in (None, threading.current_thread()):
            self._checker_thread.join()
        self._watch = self._checker_thread = None

    async def death(self) -> WorkerDiedError:
        """Wait until a worker of this group dies, even if no call runs. Return an exception that names the worker.

        Raises `ClusterDiedError` if Ray shuts down.
        """
        rank = await first_death(self._workers, self._is_worker_alive)
        if rank is None:
            raise ClusterDiedError("Ray was shut down while this process watched the workers")
        return self._death_of(rank)

    def _death_of(self, rank: int) -> WorkerDiedError:
        return death_of(identities[self._workers[rank]._actor_id.hex()], "Its process ended.")

    def _bind_worker_method(self, user_defined_cls: Any, func_generator: Callable[..., Any]) -> list[str]:
        method_names = []
        for method_name in dir(user_defined_cls):
            attrs = getattr(getattr(user_defined_cls, method_name, None), MAGIC_ATTR, None)
            if attrs is None:
                continue
            mode, execute_mode = attrs["dispatch_mode"], attrs["execute_mode"]
            if mode is Dispatch.RANK_ZERO:
                execute_mode = Execute.RANK_ZERO
            elif mode is Dispatch.ONE_TO_ALL and execute_mode is Execute.RANK_ZERO:
                mode = Dispatch.RANK_ZERO  # do not make a list of arguments per rank, because only rank 0 is called
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


_node_id: Any = ray.remote(num_cpus=0)(current_node)


def _abort(error: WorkerDiedError) -> None:
    _log.critical("%s", error)
    signal.raise_signal(signal.SIGABRT)


class RayWorkerGroup(WorkerGroup):
    """Starts one worker of a class in each process of a resource pool, and calls methods of all workers.

    Args:
        resource_pool: Pool in which the workers start; None attaches to running workers.
        ray_cls_with_init: Class of the workers, with the arguments of its constructor.
        bin_pack: If False, Ray may place the processes of one placement group on several nodes. The pool's strategy is
            then ignored.
        name_prefix: Name of the group and prefix of its workers' names; random by default.
        detached: Whether the workers continue after the end of this process. Their pool must be detached too.
        worker_names: Names of running workers to attach to.
        worker_handles: Handles of running workers to attach to.
        ray_wait_register_center_timeout: Seconds to wait until the node of rank 0 names a free port.
        worker_env: Further environment variables of the workers.
        device_name: ``cuda`` or ``npu``.
        use_gpu: Whether each worker uses a fraction of its process's devices; the pool's setting by default.
        master_addr: MASTER_ADDR of the workers, for ``torch.distributed``. Give ``master_port`` too. By default, the
            group chooses both.
        master_port: MASTER_PORT of the workers.
        master_port_range: Half-open range from which the group chooses the port; None allows any port.
        profile_steps: Training steps to profile. With ``worker_nsight_options``, Nsight Systems profiles CUDA workers.
        worker_nsight_options: Options of Nsight Systems. Example: ``{"trace": "cuda,nvtx"}``.
        log_dir: Directory for the workers' output, one file per rank; None uses Ray's log files.
        timeout_s: Seconds that a blocking call may take; None is unlimited.
        first_rank: RANK of the first worker. With it, several groups can number their workers consecutively.
        python: Shell command that runs Python in the workers; empty uses Ray's default.

    Raises:
        UsageError: the options contradict each other or the pool's options.
        DeadlineError: the pool is not granted in time, or the node of rank 0 does not name a port in time.
    """

    def __init__(
        self,
        resource_pool: RayResourcePool | None = None,
        ray_cls_with_init: RayClassWithInitArgs | None = None,
        bin_pack: bool = True,
        name_prefix: str | None = None,
        detached: bool = False,
        worker_names: list[str] | None = None,
        worker_handles: list[Any] | None = None,
        ray_wait_register_center_timeout: float = 300,
        *,
        worker_env: dict[str, str] | None = None,
        device_name: str = "cuda",
        use_gpu: bool | None = None,
        master_addr: str | None = None,
        master_port: str | None = None,
        master_port_range: tuple[int, int] | list[int] | None = None,
        profile_steps: list[int] | None = None,
        worker_nsight_options: dict[str, Any] | str | None = None,
        log_dir: str | Path | None = None,
        timeout_s: float | None = None,
        first_rank: int = 0,
        python: str = "",
    ) -> None:
        super().__init__(resource_pool)
        self.resource_pool = resource_pool
        self.ray_cls_with_init = ray_cls_with_init
        self.name_prefix = get_random_string(length=6) if name_prefix is None else name_prefix
        self.device_name = device_name
        if use_gpu and resource_pool is not None and not resource_pool.use_gpu:
            raise UsageError("use_gpu is True, but the pool reserved no devices; make the pool with use_gpu=True")
        self.use_gpu = use_gpu if use_gpu is not None else resource_pool is None or resource_pool.use_gpu
        self.customized_worker_env = worker_env or {}
        self.profile_steps, self.worker_nsight_options = profile_steps, worker_nsight_options
        self.log_dir, self.timeout_s, self.first_rank, self.python = log_dir, timeout_s, first_rank, python
        self.sub_cls_name = ""
        self.fused_worker_used = ray_cls_with_init is not None and ray_cls_with_init.fused_worker_used
        self.wg_dict: dict[str, RayWorkerGroup] | None = None
        self.master_address, self.master_port = master_addr, None if master_port is None else str(master_port)
        if resource_pool is None:
            if not worker_names and not worker_handles:
                raise UsageError("a group needs a resource_pool to start workers in, or worker_names to attach to")
            self._worker_names = list(worker_names or [])
            self._workers = list(worker_handles or [ray.get_actor(name) for name in self._worker_names])
            for rank, worker in enumerate(self._workers):
                self._introduce(worker, rank, address_of(worker))
        else:
            self._start(resource_pool, bin_pack, detached, master_port_range, ray_wait_register_center_timeout)
        if ray_cls_with_init is not None:
            self._bound = self._bind_worker_method(unwrap(ray_cls_with_init.cls), func_generator)

    @classmethod
    def from_detached(
        cls,
        name_prefix: str | None = None,
        worker_names: list[str] | None = None,
        worker_handles: list[Any] | None = None,
        ray_cls_with_init: RayClassWithInitArgs | None = None,
        **kwargs: Any,
    ) -> RayWorkerGroup:
        """Return a group of running workers. Pass either the names of their Ray actors, or their actor handles."""
        kwargs |= {"worker_names": worker_names, "worker_handles": worker_handles}
        return cls(None, ray_cls_with_init, name_prefix=name_prefix, **kwargs)

    @property
    def worker_names(self) -> list[str]:
        """Ray names of the workers, in the order of the ranks."""
        return self._worker_names

    @property
    def node_ids(self) -> list[str]:
        """Ray's node id of each worker, in the order of the ranks; empty if the group did not start the workers."""
        return [slot.node_id for slot in self._slots]

    @property
    def workers(self) -> list[Any]:
        """Ray actor handles of the workers, in the order of the ranks."""
        return self._workers

    def _introduce(self, worker: Any, rank: int, node: str, log_file: str | None = None) -> None:
        actor_id = worker._actor_id.hex()
        tail = partial(last_words, actor_id, log_file)
        identities.setdefault(actor_id, WorkerIdentity(group=self.name_prefix, rank=rank, node=node, last_words=tail))

    def _start(
        self,
        pool: RayResourcePool,
        bin_pack: bool,
        detached: bool,
        master_ports: Sequence[int] | None,
        port_timeout_s: float,
    ) -> None:
        if self.ray_cls_with_init is None:
            raise UsageError("a group needs ray_cls_with_init, the class of its workers")
        if (self.master_address is None) != (self.master_port is None):
            given = f"master_addr is {self.master_address!r} and master_port {self.master_port!r}"
            raise UsageError(f"{given}; set both or neither of them")
        if pool.world_size < 1:
            raise UsageError(f"pool {pool.name_prefix!r} has no processes; set its process_on_nodes")
        if detached and not pool.detached:
            _log.warning(
                "group %r is detached and its pool is not: the pool ends with this driver, and the workers with it; "
                "pass detached=True to the pool",
                self.name_prefix,
            )
        slots = slots_of(pool, None if bin_pack else "PACK", self.device_name)
        self._slots = [replace(slot, rank=self.first_rank + slot.rank) for slot in slots]
        pool.enter()
        try:
            if self.master_address is None:
                self.master_address, self.master_port = master_address_port(slots[0], master_ports, port_timeout_s)
            num_devices = pool.num_devices_per_process / pool.max_colocate_count
            if self.use_gpu and isinstance(pool, JoinedResourcePool):
                # Ray cannot give an actor fractions of several devices, so the group itself sets CUDA_VISIBLE_DEVICES.
                num_devices, self._devices = 0.0, pool.visible_devices(slots)
            for index in range(len(slots)):
                start = partial(self._start_worker, index, len(slots), num_devices, detached)
                worker, name = start()
                self._workers.append(worker)
                self._worker_names.append(name)
                self._replacements.append(start)
        except BaseException:
            self.shutdown()
            raise

    async def node_of(self, rank: int) -> str:
        """Wait until Ray has reserved the resources of a rank, and return the id of the node with these resources.

        If a node dies, Ray reserves the resources of the node's ranks on other nodes.
        """
        slot = self._slots[rank]
        there = PlacementGroupSchedulingStrategy(
            placement_group=slot.placement_group, placement_group_bundle_index=slot.bundle_index
        )
        node_id = await PendingResult(_node_id.options(scheduling_strategy=there).remote())
        self._slots[rank] = replace(slot, node_id=node_id, node_address=node_addresses()[node_id])
        return node_id

    def kill_worker(self, rank: int) -> None:
        """Kill the worker of a rank if it is alive. The worker's resources stay reserved."""
        ray.kill(self._workers[rank])

    def replace_worker(self, rank: int, **changed: Any) -> None:
        """Kill the worker of a rank if it is alive. Start a new worker of the same class with the same resources.

        ``changed`` are keyword arguments of the class. They replace the group's arguments of the same names. Ray starts
        the new worker as soon as the resources are free. Calls of the new worker wait until then.
        """
        if not self._replacements:
            raise UsageError(f"group {self.name_prefix!r} did not start its workers; use the group that started them")
        self.kill_worker(rank)
        self._num_replaced += 1
        self._workers[rank], self._worker_names[rank] = self._replacements[rank](f"~{self._num_replaced}", **changed)

    def _start_worker(
        self, index: int, world_size: int, num_devices: float, detached: bool, suffix: str = "", **changed: Any
    ) -> tuple[Any, str]:
        ray_class: Any = self.ray_cls_with_init
        slot = self._slots[index]
        place = f"{slot.node_index}:{slot.local_rank}" + (f"+{self.first_rank}" if self.first_rank else "")
        name = f"{self.name_prefix}{unwrap(ray_class.cls).__name__}_{place}{suffix}"
        log_file = None
        if self.log_dir is not None:
            log_file = str(Path(self.log_dir).resolve() / f"{self.name_prefix}-{slot.rank}.log")
        environment = self._environment(slot, world_size, log_file)
        if self._devices:
            environment["CUDA_VISIBLE_DEVICES"] = self._devices[index]
        runtime_env: dict[str, Any] = {"env_vars": environment}
        if self.python:
            runtime_env["py_executable"] = self.python
        if self.profile_steps and self.device_name == "cuda" and self.worker_nsight_options is not None:
            runtime_env["nsight"] = self.worker_nsight_options
        options = {"name": name, "runtime_env": runtime_env} | ({"lifetime": "detached"} if detached else {})
        worker = ray_class.for_rank(options, **changed)(
            placement_group=slot.placement_group,
            placement_group_bundle_idx=slot.bundle_index,
            use_gpu=self.use_gpu,
            num_gpus=num_devices,
            device_name=self.device_name,
        )
        self._introduce(worker, slot.rank, slot.node_address, log_file)
        return worker, name

    def _environment(self, slot: Slot, world_size: int, log_file: str | None) -> dict[str, str]:
        env = {
            "WORLD_SIZE": str(world_size),
            "RANK": str(slot.rank),
            "WG_PREFIX": self.name_prefix,
            "WG_BACKEND": "ray",
            "LOCAL_WORLD_SIZE": str(slot.local_world_size),
            "LOCAL_RANK": str(slot.local_rank),
            "RAY_LOCAL_WORLD_SIZE": str(slot.local_world_size),  # verl uses this name for LOCAL_WORLD_SIZE
            "RAY_LOCAL_RANK": str(slot.local_rank),
            "MASTER_ADDR": str(self.master_address),
            "MASTER_PORT": str(self.master_port),
        }
        taken = sorted(env.keys() & self.customized_worker_env.keys())
        if taken:
            raise UsageError(f"worker_env sets {taken}, but the group sets them; remove them from worker_env")
        env |= {} if log_file is None else {"WG_LOG_FILE": log_file}
        # Ray 2.60 shows all GPUs to an actor that has reserved no GPU. Therefore hide the GPUs.
        hidden = {} if self.use_gpu else NO_GPUS
        return hidden | self.customized_worker_env | env

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, RayWorkerGroup]:
        """Return one group per role, by role name, for workers of a class that `create_colocated_worker_cls` made.

        All groups call the same processes; each group has the methods of its role. ``prefix_set`` names the roles.

        Raises `UsageError` for an unknown role.
        """
        if self.ray_cls_with_init is None:
            raise UsageError("this group does not know the class of its workers; pass ray_cls_with_init to the group")
        raw = unwrap(self.ray_cls_with_init.cls)
        classes = getattr(raw, "raw_cls_dict", {})
        groups = {}
        for role in prefix_set:
            if role not in classes:
                raise UsageError(f"{raw.__name__} has no role {role!r}, only {list(classes)}")
            group = groups[role] = copy(self)
            group.resource_pool, group.sub_cls_name, group.wg_dict = None, role, None
            group._dispatch_info, group._collect_info = {}, {}
            group._watch = group._checker_thread = None
            for name in self._bound:
                delattr(group, name)
            group._bound = group._bind_worker_method(classes[role], func_generator)
        return groups

    spawn_fused = spawn  # verl also uses this name for the method

    def fuse(self, prefix_set: Iterable[str]) -> None:
        """Give this group one attribute per role, with the name of the role. ``prefix_set`` names the roles.

        The value of an attribute is a group with the methods of the role's class (see `spawn`).
        """
        if self.wg_dict is None:
            self.wg_dict = self.spawn(prefix_set)
        for role, group in self.wg_dict.items():
            setattr(self, role, group)

    def execute_rank_zero_async(self, method_name: str, *args: Any, **kwargs: Any) -> PendingResult:
        """Call the method ``method_name`` of the worker of rank 0. Return a reference to the result without waiting."""
        return PendingResult(self._execute_remote_single_worker(self._running()[0], method_name, *args, **kwargs))

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Call the method ``method_name`` of the worker of rank 0, wait for the result, and return it."""
        return self._fetch(self.execute_rank_zero_async(method_name, *args, **kwargs))

    execute_rank_zero = execute_rank_zero_async

    def execute_rank_async(self, rank: int, method_name: str, *args: Any, **kwargs: Any) -> PendingResult:
        """Call the method ``method_name`` of one rank's worker. Return a reference to the result without waiting."""
        return PendingResult(self._execute_remote_single_worker(self._running()[rank], method_name, *args, **kwargs))

    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> PendingResults:
        """Call the method ``method_name`` of every worker. Return references to the results without waiting.

        The references are a list in rank order. If every argument is a list with one entry per rank, each rank receives
        its entry of each list. Otherwise every rank receives all arguments unchanged.
        """
        return self._execute_all(method_name, args, kwargs)

    def _execute_all(
        self, method_name: str, args: Sequence[Any], kwargs: dict[str, Any], silent: frozenset[int] = frozenset()
    ) -> PendingResults:
        """Do the same as `execute_all_async`, but the ranks in ``silent`` return only errors, and no results."""
        num_workers = len(self._running())
        if not all(isinstance(value, list) and len(value) == num_workers for value in (*args, *kwargs.values())):
            args = [[arg] * num_workers for arg in args]
            kwargs = {key: [value] * num_workers for key, value in kwargs.items()}
        args = [shared(arg) for arg in args]
        kwargs = {key: shared(value) for key, value in kwargs.items()}
        pending = PendingResults()
        for rank, worker in enumerate(self._workers):
            own_args, own_kwargs = [arg[rank] for arg in args], {key: value[rank] for key, value in kwargs.items()}
            if rank in silent:
                pending.append(self._route_to(method_name).call(worker, tuple(own_args), own_kwargs, is_silent=True))
            else:
                pending.append(self._execute_remote_single_worker(worker, method_name, *own_args, **own_kwargs))
        return pending

    def _execute_remote_single_worker(self, worker: Any, method_name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method of one worker, and return a reference to the result."""
        return self._route_to(method_name).call(worker, args, kwargs)

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call the method ``method_name`` of every worker, wait, and return the results in rank order.

        The arguments are distributed as in `execute_all_async`.
        """
        return self._fetch(self.execute_all_async(method_name, *args, **kwargs))

    execute_all = execute_all_async

    def shutdown(self) -> None:
        """Kill the workers. Other groups of these workers, made by `spawn` or attached by name, also end.

        The last group of a pool also releases the pool's reservation. A running call raises `WorkerDiedError`, and a
        later call of this group raises `UsageError`. If Ray was shut down, this method does not kill any worker, so
        detached workers still run.
        """
        self.stop_worker_aliveness_check()
        has_ended = any(worker._ray_cluster_and_job != current_cluster() for worker in self._workers)
        for worker in self._workers if not has_ended else []:
            ray.kill(worker)
        self._workers = []
        if self.resource_pool is not None and not has_ended:
            self.resource_pool.leave()
        self.resource_pool = None

    def _route_to(self, method_name: str) -> Route:
        if self.ray_cls_with_init is None:
            return Route(remote_name=method_name)
        return Route.of(unwrap(self.ray_cls_with_init.cls), method_name, self.sub_cls_name)

    def _fetch(self, pending: PendingResult | PendingResults) -> Any:
        return pending.get(deadline_s.get() or self.timeout_s)
