"""The base class of workers (Ray actors), and functions that make a class with several workers in one process."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any, Self

import ray

from asyncrl.core.errors import UsageError
from asyncrl.core.host import keep_stop_blocked

from .calls import FUSED_METHOD_SEPARATOR, attach_results
from .dispatch import MAGIC_ATTR, Dispatch, Execute, materialize_async, register
from .resource_pool import RayClassWithInitArgs, free_port, remote_class, unwrap


class WorkerHelper:
    """Methods of `Worker` that return the address of the worker's node, and a free port of this node."""

    @staticmethod
    def _get_node_ip() -> str:
        return ray.util.get_node_ip_address()

    def get_available_master_addr_port(self) -> tuple[str, str]:
        """Return a pair of strings: the IP address of this process's node, and a free port of this node."""
        return self._get_node_ip().strip("[]"), str(free_port())


ALL_DEVICES = "not set"
"""What a process reports as its visible devices if no environment variable restricts them."""


class Worker(WorkerHelper):
    """Base class of the workers of a group. A worker is a Ray actor: one process with one rank.

    The group sets these environment variables, which ``torch.distributed`` reads: RANK, WORLD_SIZE, LOCAL_RANK,
    LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT. A subclass must call ``super().__init__()`` first.
    """

    fused_worker_attr_name = "fused_worker_dict"

    _rank: int
    _world_size: int
    _local_rank: int
    _local_world_size: int
    _master_addr: str | None
    _master_port: str | None

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Redirect output to the worker's log before the constructor runs.

        If SIGTERM is blocked in this process, keep SIGINT and SIGTERM blocked.
        """
        keep_stop_blocked()
        log_file = os.environ.pop("WG_LOG_FILE", None)
        if log_file is not None:
            redirect_output(log_file)
        return super().__new__(cls)

    def __init__(self, cuda_visible_devices: str | None = None) -> None:
        self._setup_env_cuda_visible_devices()
        if cuda_visible_devices not in (None, ALL_DEVICES):
            os.environ[visible_devices_name()] = cuda_visible_devices
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            raise ValueError("RANK and WORLD_SIZE are not set; start the worker with a RayWorkerGroup, which sets them")
        store: dict[str, Any] = {f"_{key.lower()}": os.environ.get(key) for key in self.env_keys()}
        store |= {
            "_rank": int(os.environ["RANK"]),
            "_world_size": int(os.environ["WORLD_SIZE"]),
            "_local_rank": int(os.environ.get("LOCAL_RANK", "0")),
            "_local_world_size": int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        }
        self._configure_with_store(store)
        self.fused_worker_dict: dict[str, Worker] = {}
        self._dispatch_dp_rank: dict[str, int] = {}
        self._collect_dp_rank: dict[str, bool] = {}

    def _configure_with_store(self, store: dict[str, Any]) -> None:
        """Set each entry of ``store`` as an attribute. Also set the environment variables that `env_keys` names.

        Example: the variable RANK gets the entry ``_rank``.
        """
        vars(self).update(store)
        for key in self.env_keys():
            value = store.get(f"_{key.lower()}")
            if value is not None:
                os.environ[key] = str(value)

    @classmethod
    def env_keys(cls) -> list[str]:
        """Return the names of the environment variables that describe a worker's position in its group.

        Each variable is also an attribute: RANK is ``_rank``. A subclass may add variables.
        """
        place = ["WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK"]
        return [*place, "MASTER_ADDR", "MASTER_PORT", visible_devices_name()]

    def _setup_env_cuda_visible_devices(self) -> None:
        """Set the visible devices of the process. A subclass for another accelerator overrides this method."""
        set_up_visible_devices()

    @property
    def rank(self) -> int:
        """Rank of this worker in its group, from 0."""
        return self._rank

    @property
    def world_size(self) -> int:
        """Number of workers in the group."""
        return self._world_size

    def get_master_addr_port(self) -> tuple[str | None, str | None]:
        """Return a pair: the address and the port at which the group's processes meet, for ``torch.distributed``.

        The address is that of the node of rank 0. Both values are None if the group has not set them.
        """
        return self._master_addr, self._master_port

    def get_cuda_visible_devices(self) -> str:
        """Return the process's ``CUDA_VISIBLE_DEVICES``, or ``not set`` if all devices are visible.

        On NPUs, the variable is ``ASCEND_RT_VISIBLE_DEVICES``.
        """
        return os.environ.get(visible_devices_name(), ALL_DEVICES)

    def get_fused_worker_by_name(self, worker_name: str) -> Worker | None:
        """Return the worker of the role ``worker_name`` that runs in the same process; None if there is none."""
        return self.fused_worker_dict.get(worker_name)

    def get_node_id(self) -> str:
        """Return Ray's id of the node on which this process runs."""
        return ray.get_runtime_context().get_node_id()

    def _register_dispatch_collect_info(self, mesh_name: str, dp_rank: int, is_collect: bool) -> None:
        """Register this worker in a mesh, for `make_nd_compute_dataproto_dispatch_fn`.

        Args:
            mesh_name: Name of the mesh. Example: ``"train"``.
            dp_rank: Index of the data part that the worker receives.
            is_collect: Whether this worker's result is collected. It is True on one worker per dp rank.
        """
        if mesh_name in self._dispatch_dp_rank:
            raise UsageError(f"mesh {mesh_name!r} is registered already on rank {self._rank}; register a mesh once")
        self._dispatch_dp_rank[mesh_name] = dp_rank
        self._collect_dp_rank[mesh_name] = is_collect

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def _query_dispatch_info(self, mesh_name: str) -> int:
        return self._dispatch_dp_rank[self._known_mesh(mesh_name)]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def _query_collect_info(self, mesh_name: str) -> bool:
        return self.query_collect_info(mesh_name)

    def query_collect_info(self, mesh_name: str) -> bool:
        """Return whether calls over the mesh ``mesh_name`` use the result of this worker.

        Such calls use the result of one worker per dp rank. Raises `UsageError` if this worker has not registered the
        mesh.
        """
        return self._collect_dp_rank[self._known_mesh(mesh_name)]

    def get_dispatch_collect(self) -> dict[str, dict[str, Any]]:
        """Return the meshes that this worker has registered, as keyword arguments for `set_dispatch_collect`.

        ``dispatch_dp_rank`` maps the name of each mesh to this worker's dp rank. ``collect_dp_rank`` maps the name to
        whether calls over the mesh use this worker's result.
        """
        return {"dispatch_dp_rank": self._dispatch_dp_rank, "collect_dp_rank": self._collect_dp_rank}

    def set_dispatch_collect(
        self, mesh_name: str, dispatch_dp_rank: dict[str, int], collect_dp_rank: dict[str, bool]
    ) -> None:
        """Register this worker in the mesh ``mesh_name``, with the dp rank that another worker has in its newest mesh.

        ``dispatch_dp_rank`` and ``collect_dp_rank`` come from `get_dispatch_collect` of the other worker.
        """
        if not dispatch_dp_rank or not collect_dp_rank:
            raise UsageError(
                f"this worker cannot join mesh {mesh_name!r} with the dp rank of another worker, because the other "
                "worker has registered no mesh; first register a mesh in the other worker"
            )
        dp_rank, is_collect = list(dispatch_dp_rank.values())[-1], list(collect_dp_rank.values())[-1]
        self._register_dispatch_collect_info(mesh_name, dp_rank, is_collect)

    def _known_mesh(self, mesh_name: str) -> str:
        if mesh_name not in self._dispatch_dp_rank:
            known = sorted(self._dispatch_dp_rank)
            raise UsageError(f"mesh {mesh_name!r} is not registered, only {known}; register the mesh in __init__")
        return mesh_name

    def _call_chained(self, method_name: str, args: tuple[Any, ...], kwargs: dict[str, Any], *results: Any) -> Any:
        """Call a method of this worker. The fetched ``results`` replace the futures in the method's arguments."""
        args, kwargs = attach_results(args, kwargs, results)
        return getattr(self, method_name)(*args, **kwargs)

    def _call_silently(self, method_name: str, *args: Any, **kwargs: Any) -> None:
        getattr(self, method_name)(*args, **kwargs)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def execute_with_func_generator(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``func(worker, *args, **kwargs)`` on every worker, and return the result of ``func``.

        The worker group cuts each batch in ``args`` and ``kwargs`` into one part per worker.
        """
        return func(self, *args, **kwargs)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def execute_func_rank_zero(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``func(*args, **kwargs)`` in the process of rank 0, and return the result of ``func``."""
        return func(*args, **kwargs)


def redirect_output(path: str) -> None:
    """Append the process's stdout and stderr to the file ``path`` from now on.

    This includes the output of C++ code and of child processes. Missing folders are created.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115


NOSET_VISIBLE_DEVICES = tuple(
    f"RAY_EXPERIMENTAL_NOSET_{variable}"
    for variable in (
        *("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"),
        *("HABANA_VISIBLE_MODULES", "NEURON_RT_VISIBLE_CORES", "TPU_VISIBLE_CHIPS", "ONEAPI_DEVICE_SELECTOR"),
    )
)


def ray_noset_visible_devices(env_vars: Mapping[str, str] = os.environ) -> bool:
    """Return whether an environment variable tells Ray not to set the visible devices of its workers.

    A worker then sees all devices of its node.
    """
    return any(env_vars.get(name) for name in NOSET_VISIBLE_DEVICES)


def visible_devices_name(env_vars: Mapping[str, str] = os.environ) -> str:
    """Return the name of the environment variable that restricts the visible devices.

    The name is ``ASCEND_RT_VISIBLE_DEVICES`` if that variable is set, or if torch with NPU support is loaded. Else it
    is ``CUDA_VISIBLE_DEVICES``.
    """
    is_npu = hasattr(sys.modules.get("torch"), "npu") or bool(env_vars.get("ASCEND_RT_VISIBLE_DEVICES"))
    return "ASCEND_RT_VISIBLE_DEVICES" if is_npu else "CUDA_VISIBLE_DEVICES"


def set_up_visible_devices(env_vars: MutableMapping[str, str] = os.environ) -> None:
    """Set the environment variables for this worker's devices. Call this before an accelerator is used.

    ROCm's variables are copied to ``CUDA_VISIBLE_DEVICES``. If an environment variable tells Ray not to restrict the
    visible devices, the current device is set to the device that Ray assigned to the worker.
    Raises `UsageError` if ROCm's variables conflict.
    """
    _unify_rocm(env_vars)
    if ray_noset_visible_devices(env_vars):
        _choose_device_within_node(env_vars)


def _unify_rocm(env_vars: MutableMapping[str, str]) -> None:
    """Copy ROCm's variables to CUDA_VISIBLE_DEVICES, which torch reads on ROCm too."""
    hip = env_vars.pop("HIP_VISIBLE_DEVICES", None)
    cuda = env_vars.get("CUDA_VISIBLE_DEVICES")
    if cuda == "":  # an empty CUDA_VISIBLE_DEVICES hides all devices
        env_vars.pop("ROCR_VISIBLE_DEVICES", None)
        return
    if hip and cuda and hip != cuda:
        raise UsageError(f"HIP_VISIBLE_DEVICES is {hip!r}, but CUDA_VISIBLE_DEVICES is {cuda!r}; set only one of them")
    if hip:
        env_vars["CUDA_VISIBLE_DEVICES"] = cuda = hip
    rocr = env_vars.get("ROCR_VISIBLE_DEVICES")
    if rocr and cuda:
        raise UsageError(f"ROCR_VISIBLE_DEVICES is {rocr!r} while CUDA or HIP devices are {cuda!r}; unset one of them")
    if rocr:
        env_vars["CUDA_VISIBLE_DEVICES"] = env_vars.pop("ROCR_VISIBLE_DEVICES")


def _choose_device_within_node(env_vars: MutableMapping[str, str]) -> None:
    """Set LOCAL_RANK and the current device to the device that Ray has assigned to this worker.

    Ray returns a device id. If CUDA_VISIBLE_DEVICES (on NPUs, ASCEND_RT_VISIBLE_DEVICES) lists the id, LOCAL_RANK is
    the position of the id in this list. Otherwise LOCAL_RANK is the id.
    """
    is_npu = visible_devices_name(env_vars) == "ASCEND_RT_VISIBLE_DEVICES"
    assigned = ray.get_runtime_context().get_accelerator_ids()["NPU" if is_npu else "GPU"]
    if not assigned:
        return
    seen = env_vars.get(visible_devices_name(env_vars), "").split(",")
    place = seen.index(assigned[0]) if assigned[0] in seen else int(assigned[0])
    env_vars["LOCAL_RANK"] = str(place)
    device = _device_module(is_npu)
    if device.is_available():
        device.set_device(place)


def _device_module(is_npu: bool) -> Any:
    import torch

    return torch.npu if is_npu else torch.cuda  # type: ignore[attr-defined]


FusedWorkerCLSName = "FusedWorker"


def create_colocated_worker_raw_cls(class_dict: dict[str, RayClassWithInitArgs]) -> type[Worker]:
    """Return a new class whose instances hold one worker per role, in attributes with the names of the roles.

    ``class_dict`` has the worker class of each role with its arguments.

    A subclass may have methods that use several roles. In this case, set ``fused_worker_used = True`` on the
    subclass's `RayClassWithInitArgs`, and call `WorkerGroup.fuse`.
    """
    if not class_dict:
        raise UsageError("class_dict must name at least one role and its class, got none")
    members = {role: (unwrap(member.cls), member.args, member.kwargs) for role, member in class_dict.items()}

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        Worker.__init__(self, *args, **kwargs)
        # Subclasses read the next three attributes, whose names are verl's.
        self.cls_names = list(members)
        self.init_args_dict = {role: init_args for role, (_, init_args, _) in members.items()}
        self.init_kwargs_dict = {role: init_kwargs for role, (_, _, init_kwargs) in members.items()}
        for role, (cls, init_args, init_kwargs) in members.items():
            self.fused_worker_dict[role] = cls(*init_args, **init_kwargs)
            setattr(self, role, self.fused_worker_dict[role])
        for worker in self.fused_worker_dict.values():
            setattr(worker, Worker.fused_worker_attr_name, self.fused_worker_dict)

    name = "_".join([FusedWorkerCLSName, *class_dict])
    raw: Any = type(name, (Worker,), {"__init__": __init__, "__module__": __name__})
    raw.is_fused_worker = True
    raw.raw_cls_dict = {role: cls for role, (cls, _, _) in members.items()}
    methods = (getattr(cls, name, None) for cls in raw.raw_cls_dict.values() for name in dir(cls))
    raw._fuw_execute = _route_async if any(map(inspect.iscoroutinefunction, methods)) else _route
    return raw


def create_colocated_worker_cls_fused(class_dict: dict[str, RayClassWithInitArgs]) -> RayClassWithInitArgs:
    """Combine worker classes, one per role, into one class for a worker group, so that all roles share each process.

    `RayWorkerGroup.spawn` then returns one group per role, over the same processes.
    """
    raw: Any = create_colocated_worker_raw_cls(class_dict)
    fused = RayClassWithInitArgs(remote_class(raw, raw.raw_cls_dict.values()))
    fused.fused_worker_used = True
    return fused


create_colocated_worker_cls = create_colocated_worker_cls_fused  # verl used this name for the function


def _route(self: Any, method_name: str, *args: Any, **kwargs: Any) -> Any:
    """Call a method of a role's worker. Example of ``method_name``: ``actor_fwmn_step`` for ``step`` of ``actor``."""
    role, _, name = method_name.partition(FUSED_METHOD_SEPARATOR)
    worker = self.fused_worker_dict.get(role)
    if worker is None:
        raise UsageError(f"there is no role {role!r} in this worker, only {list(self.fused_worker_dict)}")
    return getattr(worker, name)(*args, **kwargs)


async def _route_async(self: Any, method_name: str, *args: Any, **kwargs: Any) -> Any:
    """Do the same as `_route`, but first await the futures in ``args`` and ``kwargs``. This frees the event loop."""
    role, _, name = method_name.partition(FUSED_METHOD_SEPARATOR)
    attrs = getattr(getattr(self.raw_cls_dict.get(role), name, None), MAGIC_ATTR, {})
    if attrs.get("materialize_futures"):
        args, kwargs = await materialize_async(args, kwargs)
    result = _route(self, method_name, *args, **kwargs)
    return await result if inspect.isawaitable(result) else result
