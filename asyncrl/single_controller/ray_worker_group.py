"""Worker groups on Ray: starts one actor per process of a pool, and calls them all as if they were one object."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import ray

from asyncrl.protocol.errors import UsageError, WorkerDiedError
from asyncrl.protocol.remote import WorkerIdentity, death_of, forget, identity_of, introduce

from .calls import PendingResult, PendingResults, Route, deadline_in_force, func_generator, shared
from .liveness import address_of, last_words_of
from .placement import Launch, RayClassWithInitArgs, master_address_port, slots_of, unwrap
from .resource_pool import RayResourcePool, current_cluster, get_random_string
from .worker_group import WorkerGroup

_log = logging.getLogger(__name__)


class RayWorkerGroup(WorkerGroup):
    """The workers of one class on one pool.

    Args:
        resource_pool: Where to start them; None attaches to workers that are running already.
        ray_cls_with_init: Their class and its arguments.
        bin_pack: Whether the processes of one node of the pool must share a node of the cluster, or may spread.
        name_prefix: Name of the group; begins its workers' names. Random by default.
        detached: Whether the workers outlive the driver; their pool must be detached too.
        worker_names: Names of running workers to attach to.
        worker_handles: Handles of running workers to attach to.
        ray_wait_register_center_timeout: Seconds that rank 0's node may take to name a free port.
        worker_env: Further environment variables of the workers.
        device_name: ``cuda`` or ``npu``.
        use_gpu: Whether each worker takes its share of a device; by default as the pool says.
        master_addr: Rendezvous address, given together with ``master_port``; chosen by default.
        master_port: Rendezvous port.
        master_port_range: Half-open range of ports to choose from; None for any.
        profile_steps: Steps to profile. If there are any, CUDA workers run under Nsight Systems.
        worker_nsight_options: Options of Nsight Systems. Example: ``{"trace": "cuda,nvtx"}``.
        log_dir: Directory for the workers' output, one file per rank; None leaves it to Ray.
        timeout_s: Seconds that a blocking call may take; None is unlimited.

    Raises:
        UsageError: an option contradicts the pool or another option.
        DeadlineError: the cluster did not grant the pool in time.
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
    ) -> None:
        super().__init__(resource_pool)
        self.resource_pool = resource_pool
        self.ray_cls_with_init = ray_cls_with_init
        self.name_prefix = get_random_string(length=6) if name_prefix is None else name_prefix
        self.device_name = device_name
        self.use_gpu = _checked_use_gpu(use_gpu, resource_pool)
        self.customized_worker_env = worker_env or {}
        self.profile_steps = profile_steps
        self.worker_nsight_options = worker_nsight_options
        self.log_dir = log_dir
        self.timeout_s = timeout_s
        self.sub_cls_name = ""
        self.fused_worker_used = ray_cls_with_init is not None and ray_cls_with_init.fused_worker_used
        self.wg_dict: dict[str, RayWorkerGroup] | None = None
        self._master_addr, self._master_port = _checked_master(master_addr, master_port)
        if resource_pool is None:
            self._attach(worker_names, worker_handles)
        else:
            ports = None if master_port_range is None else (master_port_range[0], master_port_range[1])
            self._start(resource_pool, bin_pack, detached, ports, ray_wait_register_center_timeout)
        if ray_cls_with_init is not None:
            self._bind_worker_method(unwrap(ray_cls_with_init.cls), func_generator)

    @classmethod
    def from_detached(
        cls,
        name_prefix: str | None = None,
        worker_names: list[str] | None = None,
        worker_handles: list[Any] | None = None,
        ray_cls_with_init: RayClassWithInitArgs | None = None,
        **kwargs: Any,
    ) -> RayWorkerGroup:
        """A group of workers that are running already, found by their names or handles."""
        return cls(
            resource_pool=None,
            ray_cls_with_init=ray_cls_with_init,
            name_prefix=name_prefix,
            worker_names=worker_names,
            worker_handles=worker_handles,
            **kwargs,
        )

    @property
    def worker_names(self) -> list[str]:
        """Ray names of the workers, in the order of the ranks."""
        return self._worker_names

    @property
    def workers(self) -> list[Any]:
        """Actor handles, in the order of the ranks."""
        return self._workers

    @property
    def master_address(self) -> str | None:
        """Address at which the group gathers."""
        return self._master_addr

    @property
    def master_port(self) -> str | None:
        """Port at which the group gathers."""
        return self._master_port

    def _attach(self, worker_names: list[str] | None, worker_handles: list[Any] | None) -> None:
        if not worker_names and not worker_handles:
            raise UsageError("a group needs a resource_pool to start workers in, or worker_names to attach to")
        self._worker_names = list(worker_names or [])
        self._workers = list(worker_handles or [ray.get_actor(name) for name in self._worker_names])
        for rank, worker in enumerate(self._workers):
            last_words = last_words_of(worker, None)
            identity = WorkerIdentity(group=self.name_prefix, rank=rank, node=address_of(worker), last_words=last_words)
            introduce(worker._actor_id.hex(), identity)

    def _start(
        self,
        pool: RayResourcePool,
        bin_pack: bool,
        detached: bool,
        master_ports: tuple[int, int] | None,
        port_timeout_s: float,
    ) -> None:
        if self.ray_cls_with_init is None:
            raise UsageError("a group needs ray_cls_with_init, the class of its workers")
        if pool.world_size < 1:
            raise UsageError(f"pool {pool.name_prefix!r} has no processes; name some in process_on_nodes")
        if detached and not pool.detached:
            _log.warning(
                "group %r is detached and its pool is not: the pool ends with this driver, and the workers with it; "
                "pass detached=True to the pool",
                self.name_prefix,
            )
        slots = slots_of(pool, "STRICT_PACK" if bin_pack else "PACK", self.device_name)
        pool.enter()
        try:
            if self._master_addr is None or self._master_port is None:
                self._master_addr, self._master_port = master_address_port(slots[0], master_ports, port_timeout_s)
            launch = self._launch(pool, self.ray_cls_with_init, (self._master_addr, self._master_port), detached)
            for slot in slots:
                worker, name = launch.start(slot, len(slots))
                self._workers.append(worker)
                self._worker_names.append(name)
        except BaseException:
            self.shutdown()
            raise

    def _launch(
        self, pool: RayResourcePool, ray_class: RayClassWithInitArgs, master: tuple[str, str], detached: bool
    ) -> Launch:
        is_profiled = self.profile_steps and self.device_name == "cuda"
        return Launch(
            group=self.name_prefix,
            ray_class=ray_class,
            pool=pool,
            use_gpu=self.use_gpu,
            device_name=self.device_name,
            master=master,
            worker_env=self.customized_worker_env,
            is_detached=detached,
            log_dir=self.log_dir,
            nsight=self.worker_nsight_options if is_profiled else None,
        )

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, RayWorkerGroup]:
        """One group per role of a colocated class, over the same workers, with the role's methods.

        Raises:
            UsageError: the class has no such role.
        """
        if self.ray_cls_with_init is None:
            raise UsageError("this group does not know its workers' class; give it ray_cls_with_init")
        raw = unwrap(self.ray_cls_with_init.cls)
        classes = getattr(raw, "raw_cls_dict", {})
        groups = {}
        for role in prefix_set:
            if role not in classes:
                raise UsageError(f"{raw.__name__} has no role {role!r}, only {list(classes)}")
            groups[role] = self._over_the_same_workers()
            groups[role].sub_cls_name = role
            groups[role]._bind_worker_method(classes[role], func_generator)
        return groups

    spawn_fused = spawn  # verl's name for the same

    def fuse(self, prefix_set: Iterable[str]) -> None:
        """Give this group one attribute per role, each a group as `spawn` makes it."""
        if self.wg_dict is None:
            self.wg_dict = self.spawn(prefix_set)
        for role, group in self.wg_dict.items():
            setattr(self, role, group)

    def _over_the_same_workers(self) -> RayWorkerGroup:
        """A group of these workers, without methods."""
        group = type(self).from_detached(
            name_prefix=self.name_prefix,
            worker_names=self._worker_names,
            worker_handles=self._workers,
            timeout_s=self.timeout_s,
            log_dir=self.log_dir,
            worker_env=self.customized_worker_env,
            use_gpu=self.use_gpu,
            device_name=self.device_name,
            profile_steps=self.profile_steps,
            worker_nsight_options=self.worker_nsight_options,
            master_addr=self._master_addr,
            master_port=self._master_port,
        )
        group.ray_cls_with_init = self.ray_cls_with_init
        return group

    def execute_rank_zero_async(self, method_name: str, *args: Any, **kwargs: Any) -> PendingResult:
        """Call a method of rank 0; returns a reference to the result."""
        return PendingResult(self._execute_remote_single_worker(self._workers[0], method_name, *args, **kwargs))

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of rank 0 and wait for the result."""
        return self._fetch(self.execute_rank_zero_async(method_name, *args, **kwargs))

    def execute_rank_zero(self, method_name: str, *args: Any, **kwargs: Any) -> PendingResult:
        """As `execute_rank_zero_async`."""
        return self.execute_rank_zero_async(method_name, *args, **kwargs)

    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> PendingResults:
        """Call a method of every worker; returns references to the results.

        Where every argument is a list of one entry per rank, each rank receives its entry; otherwise every rank
        receives all arguments as they are.
        """
        return self._execute_all(method_name, args, kwargs)

    def _execute_all(
        self, method_name: str, args: Sequence[Any], kwargs: dict[str, Any], silent: frozenset[int] = frozenset()
    ) -> PendingResults:
        """As `execute_all_async`; the ranks in ``silent`` need not send their results."""
        num_workers = len(self._workers)
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
        """Call a method of one worker, as all calls do whose result is wanted; returns a reference to the result."""
        return self._route_to(method_name).call(worker, args, kwargs)

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of every worker and wait for the results."""
        return self._fetch(self.execute_all_async(method_name, *args, **kwargs))

    def execute_all(self, method_name: str, *args: Any, **kwargs: Any) -> PendingResults:
        """As `execute_all_async`."""
        return self.execute_all_async(method_name, *args, **kwargs)

    def shutdown(self) -> None:
        """Kill the workers; the last group of a pool to do so gives the pool's reservation back.

        Groups that were spawned from this one, or that attached to its workers, end with it. After a shutdown of Ray
        the workers have ended already, except detached ones: attach to those again by ``worker_names``.
        """
        self.stop_worker_aliveness_check()
        has_ended = any(worker._ray_cluster_and_job != current_cluster() for worker in self._workers)
        for worker in self._workers:
            forget(worker._actor_id.hex())
            if not has_ended:
                ray.kill(worker)
        self._workers = []
        if self.resource_pool is not None and not has_ended:
            self.resource_pool.leave()
        self.resource_pool = None

    def _route_to(self, method_name: str) -> Route:
        """How calls of a method reach the workers."""
        if self.ray_cls_with_init is None:
            return Route(remote_name=method_name)
        return Route.of(unwrap(self.ray_cls_with_init.cls), method_name, self.sub_cls_name)

    def _fetch(self, pending: PendingResult | PendingResults) -> Any:
        return pending.get(deadline_in_force(self.timeout_s))

    def _death_of(self, rank: int) -> WorkerDiedError:
        identity = identity_of(self._workers[rank]._actor_id.hex())
        assert identity is not None
        return death_of(identity, "Its process ended.")


def _checked_use_gpu(use_gpu: bool | None, pool: RayResourcePool | None) -> bool:
    """Whether workers take a device: as requested, otherwise as the pool does."""
    if pool is None:
        return use_gpu is not False
    if use_gpu and not pool.use_gpu:
        raise UsageError("use_gpu is True, but the pool reserved no devices; make it with use_gpu=True")
    return pool.use_gpu if use_gpu is None else use_gpu


def _checked_master(address: str | None, port: str | int | None) -> tuple[str | None, str | None]:
    """Both, or neither."""
    if (address is None) != (port is None):
        raise UsageError(
            f"master_addr is {address!r} and master_port {port!r}; give both, or neither, and they are chosen"
        )
    return address, None if port is None else str(port)
