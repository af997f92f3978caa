"""Worker groups on Ray: starts one actor per process of a pool, and calls them all as if they were one object."""

from __future__ import annotations

import inspect
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray._private import state as ray_state

from asyncrl.protocol.errors import WorkerDiedError
from asyncrl.protocol.remote import WorkerIdentity, death_of, forget, identity_of, introduce

from .calling import func_generator, shared
from .chaining import detach_references, holds_future
from .colocated import FUSED_METHOD_SEPARATOR
from .deadline import deadline_in_force
from .decorator import MAGIC_ATTR
from .placement import Slot, master_address_port, slots_of
from .ray_class import RayClassWithInitArgs, unwrap
from .ray_pool import RayResourcePool
from .results import PendingResult, PendingResults
from .worker_group import WorkerGroup
from .worker_log import identity_with_log

_FURTHER_OPTIONS = frozenset(
    {
        "master_addr",
        "master_port",
        "ray_wait_register_center_timeout",
        "use_gpu",
        "profile_steps",
        "worker_nsight_options",
    }
)


class RayWorkerGroup(WorkerGroup):
    """The workers of one class on one pool.

    Args:
        resource_pool: Where to start them; None attaches to workers that are running already.
        ray_cls_with_init: Their class and its arguments.
        bin_pack: Whether the processes of a node of the pool must be on one node, or may spread.
        name_prefix: Name of the group; begins its workers' names. Random by default.
        detached: Whether the workers outlive the driver.
        worker_names: Names of running workers to attach to.
        worker_handles: Handles of running workers to attach to.
        worker_env: Further environment variables of the workers.
        device_name: ``cuda`` or ``npu``.
        log_dir: Directory for the workers' output, one file per rank; None leaves it to Ray.
        timeout_s: Seconds that a blocking call may take; None for as long as it likes.
        kwargs: ``master_addr`` and ``master_port``, where they are chosen already. Further options of verl's groups
            (profiling, register centre) are accepted, and do nothing.
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
        *,
        worker_env: dict[str, str] | None = None,
        device_name: str = "cuda",
        log_dir: str | Path | None = None,
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> None:
        unknown = sorted(kwargs.keys() - _FURTHER_OPTIONS)
        if unknown:
            raise TypeError(f"RayWorkerGroup has no options {unknown}; see its docstring")
        super().__init__(resource_pool)
        self.resource_pool = resource_pool
        self.ray_cls_with_init = ray_cls_with_init
        self.name_prefix = name_prefix or secrets.token_hex(3)
        self.device_name = device_name
        self.log_dir = log_dir
        self.timeout_s = timeout_s
        self.sub_cls_name = ""
        self.fused_worker_used = ray_cls_with_init is not None and ray_cls_with_init.fused_worker_used
        self.wg_dict: dict[str, RayWorkerGroup] | None = None
        self._master_addr: str | None = kwargs.get("master_addr")
        self._master_port: str | None = kwargs.get("master_port")
        if resource_pool is None:
            self._attach(worker_names, worker_handles)
        else:
            self._start(resource_pool, bin_pack, detached, worker_env or {})
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
            raise ValueError("a group needs a resource_pool to start workers in, or worker_names to attach to")
        self._worker_names = list(worker_names or [])
        self._workers = list(worker_handles or [ray.get_actor(name) for name in self._worker_names])
        for rank, worker in enumerate(self._workers):
            introduce(worker._actor_id.hex(), WorkerIdentity(group=self.name_prefix, rank=rank, node=_node_of(worker)))

    def _start(self, pool: RayResourcePool, bin_pack: bool, detached: bool, worker_env: dict[str, str]) -> None:
        if self.ray_cls_with_init is None:
            raise ValueError("a group needs ray_cls_with_init, the class of its workers")
        slots = slots_of(pool, "STRICT_PACK" if bin_pack else "PACK", self.device_name)
        if self._master_addr is None or self._master_port is None:
            self._master_addr, self._master_port = master_address_port(slots[0])
        pool.enter()
        for slot in slots:
            self._start_worker(pool, slot, len(slots), detached, worker_env)

    def _start_worker(
        self, pool: RayResourcePool, slot: Slot, world_size: int, detached: bool, worker_env: dict[str, str]
    ) -> None:
        ray_class = self.ray_cls_with_init
        assert ray_class is not None
        class_name = unwrap(ray_class.cls).__name__
        name = f"{self.name_prefix}{class_name}_{slot.node_index}:{slot.local_rank}"
        log_file = (
            None if self.log_dir is None else str(Path(self.log_dir).resolve() / f"{self.name_prefix}-{slot.rank}.log")
        )
        options = {
            "name": name,
            "runtime_env": {"env_vars": self._env_of(slot, world_size, log_file) | worker_env},
            "num_cpus": pool.num_cpus_per_process / pool.max_colocate_count,
        }
        if detached:
            options["lifetime"] = "detached"
        ray_class.update_options(options)
        worker = ray_class(
            placement_group=slot.placement_group,
            placement_group_bundle_idx=slot.bundle_index,
            use_gpu=pool.use_gpu,
            num_gpus=1 / pool.max_colocate_count,
            device_name=self.device_name,
        )
        identity = identity_with_log(self.name_prefix, slot.rank, slot.node_address, slot.node_id, log_file)
        introduce(worker._actor_id.hex(), identity)
        self._workers.append(worker)
        self._worker_names.append(name)

    def _env_of(self, slot: Slot, world_size: int, log_file: str | None) -> dict[str, str]:
        env = {
            "WORLD_SIZE": str(world_size),
            "RANK": str(slot.rank),
            "WG_PREFIX": self.name_prefix,
            "WG_BACKEND": "ray",
            "RAY_LOCAL_WORLD_SIZE": str(slot.local_world_size),
            "RAY_LOCAL_RANK": str(slot.local_rank),
            "MASTER_ADDR": str(self._master_addr),
            "MASTER_PORT": str(self._master_port),
        }
        return env if log_file is None else env | {"WG_LOG_FILE": log_file}

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, RayWorkerGroup]:
        """A group for each role of a colocated class, over the same workers, with the role's methods.

        Raises:
            ValueError: the class has no such role.
        """
        return self.spawn_fused(prefix_set) if self.fused_worker_used else self._spawn_colocated(prefix_set)

    def spawn_fused(self, prefix_set: Iterable[str]) -> dict[str, RayWorkerGroup]:
        """As `spawn`, for a class of `create_colocated_worker_cls_fused`."""
        raw: Any = self._raw_class()
        groups = {}
        for role in prefix_set:
            if role not in raw.raw_cls_dict:
                raise ValueError(f"{raw.__name__} has no role {role!r}, only {list(raw.raw_cls_dict)}")
            groups[role] = self._over_the_same_workers()
            groups[role].sub_cls_name = role
            groups[role]._bind_worker_method(raw.raw_cls_dict[role], func_generator)
        return groups

    def fuse(self, prefix_set: Iterable[str]) -> None:
        """Give this group an attribute for each role, a group as `spawn` makes it, beside its own methods."""
        if self.wg_dict is None:
            self.wg_dict = self.spawn(prefix_set)
        for role, group in self.wg_dict.items():
            setattr(self, role, group)

    def _raw_class(self) -> type:
        if self.ray_cls_with_init is None:
            raise ValueError("this group does not know its workers' class; give it ray_cls_with_init")
        return unwrap(self.ray_cls_with_init.cls)

    def _over_the_same_workers(self) -> RayWorkerGroup:
        """A group of these workers, without methods."""
        group = type(self).from_detached(
            name_prefix=self.name_prefix,
            worker_names=self._worker_names,
            worker_handles=self._workers,
            timeout_s=self.timeout_s,
            device_name=self.device_name,
            master_addr=self._master_addr,
            master_port=self._master_port,
        )
        group.ray_cls_with_init = self.ray_cls_with_init
        return group

    def _spawn_colocated(self, prefix_set: Iterable[str]) -> dict[str, RayWorkerGroup]:
        raw, groups = self._raw_class(), {}
        for role in prefix_set:
            groups[role] = self._over_the_same_workers()
            groups[role]._bind_worker_method(raw, func_generator)
            groups[role]._rename_methods(raw, role)
        return groups

    def _rename_methods(self, raw: type, role: str) -> None:
        """Reach the methods of a role by their own names."""
        names = {
            attrs["method_name"]: name
            for name in dir(raw)
            if (attrs := getattr(getattr(raw, name), MAGIC_ATTR, {})) and attrs.get("role") == role
        }
        if not names:
            raise ValueError(f"{raw.__name__} has no role {role!r}")
        for method_name, host_name in names.items():
            setattr(self, method_name, getattr(self, host_name))

    def execute_rank_zero_async(self, method_name: str, *args: Any, **kwargs: Any) -> PendingResult:
        """Call a method of rank 0; returns a reference to the result."""
        return PendingResult(self._call(self._workers[0], method_name, args, kwargs))

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
        args, kwargs = tuple(map(shared, args)), {key: shared(value) for key, value in kwargs.items()}
        num_workers = len(self._workers)
        if not all(isinstance(value, list) and len(value) == num_workers for value in (*args, *kwargs.values())):
            args = tuple([arg] * num_workers for arg in args)
            kwargs = {key: [value] * num_workers for key, value in kwargs.items()}
        calls = []
        for rank, worker in enumerate(self._workers):
            own_args = tuple(arg[rank] for arg in args)
            own_kwargs = {key: value[rank] for key, value in kwargs.items()}
            calls.append(self._call(worker, method_name, own_args, own_kwargs, is_silent=rank in silent))
        return PendingResults(calls)

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of every worker and wait for the results."""
        return self._fetch(self.execute_all_async(method_name, *args, **kwargs))

    def execute_all(self, method_name: str, *args: Any, **kwargs: Any) -> PendingResults:
        """As `execute_all_async`."""
        return self.execute_all_async(method_name, *args, **kwargs)

    def shutdown(self) -> None:
        """Kill the workers; the last group of a pool to do so gives the pool's reservation back.

        Groups that were spawned from this one, or that attached to its workers, end with it.
        """
        self.stop_worker_aliveness_check()
        for worker in self._workers:
            forget(worker._actor_id.hex())
            ray.kill(worker)
        self._workers = []
        if self.resource_pool is not None:
            self.resource_pool.leave()
            self.resource_pool = None

    def _call(
        self, worker: Any, method_name: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_silent: bool = False
    ) -> ray.ObjectRef:
        """Call one worker, through its host where it shares a process."""
        method, is_coroutine = self._method_behind(method_name)
        if self.sub_cls_name:
            args = (f"{self.sub_cls_name}{FUSED_METHOD_SEPARATOR}{method_name}", *args)
            method_name = self.fused_worker_execute_fn_name
        if (
            not is_coroutine
            and getattr(method, MAGIC_ATTR, {}).get("materialize_futures")
            and holds_future(args, kwargs)
        ):
            (blank_args, blank_kwargs), references = detach_references(args, kwargs)
            args, kwargs = (method_name, blank_args, blank_kwargs, *references), {}
            method_name = "_call_chained"
        if is_silent and not is_coroutine:
            args, method_name = (method_name, *args), "_call_silently"
        return getattr(worker, method_name).remote(*args, **kwargs)

    def _method_behind(self, method_name: str) -> tuple[Any, bool]:
        """A method of the workers' class, and whether the call of it is a coroutine, which may wait for others."""
        if self.ray_cls_with_init is None:
            return None, True
        raw: Any = unwrap(self.ray_cls_with_init.cls)
        if not self.sub_cls_name:
            method = getattr(raw, method_name, None)
            return method, inspect.iscoroutinefunction(method)
        method = getattr(raw.raw_cls_dict[self.sub_cls_name], method_name, None)
        return method, inspect.iscoroutinefunction(getattr(raw, self.fused_worker_execute_fn_name))

    def _fetch(self, pending: PendingResult | PendingResults) -> Any:
        return pending.get(deadline_in_force(self.timeout_s))

    def _is_worker_alive(self, worker: Any) -> bool:
        state = ray_state.actors(worker._actor_id.hex())
        return bool(state) and state["State"] == "ALIVE"

    def _death_of(self, rank: int) -> WorkerDiedError:
        identity = identity_of(self._workers[rank]._actor_id.hex())
        assert identity is not None
        return death_of(identity, "Its actor is no longer alive.")


def _node_of(worker: Any) -> str:
    """Address of the node on which a running actor lives."""
    state = ray_state.actors(worker._actor_id.hex())
    return state["Address"]["IPAddress"] if state else "unknown"
