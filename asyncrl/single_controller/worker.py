"""The base of every worker: who it is in its group, which devices it sees, and where it stands in each mesh."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncrl.protocol.errors import UsageError

from .calls import attach_results
from .devices import ALL_DEVICES, set_up_visible_devices, visible_devices_name
from .dispatch import Dispatch, Execute, register


class WorkerHelper:
    """Where a process is, and which ports are free there."""

    @staticmethod
    def _get_node_ip() -> str:
        import ray

        return ray.util.get_node_ip_address()

    @staticmethod
    def _get_free_port() -> int:
        with socket.socket() as probe:
            probe.bind(("", 0))
            return probe.getsockname()[1]

    def get_available_master_addr_port(self) -> tuple[str, str]:
        """This node's address, and a port that is free now."""
        return self._get_node_ip().strip("[]"), str(self._get_free_port())

    def _get_pid(self) -> int:
        return os.getpid()


class Worker(WorkerHelper):
    """One process of a worker group.

    The group describes the process through its environment: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
    MASTER_ADDR and MASTER_PORT, which is also what ``torch.distributed`` reads. A subclass calls
    ``super().__init__()`` first.
    """

    fused_worker_attr_name = "fused_worker_dict"

    _rank: int
    _world_size: int
    _local_rank: int
    _local_world_size: int
    _master_addr: str | None
    _master_port: str | None

    def __new__(cls, *args: Any, **kwargs: Any) -> Worker:
        """Open the worker's log first."""
        log_file = os.environ.pop("WG_LOG_FILE", None)
        if log_file is not None:
            redirect_output(log_file)
        return super().__new__(cls)

    def __init__(self, cuda_visible_devices: str | None = None) -> None:
        self._setup_env_cuda_visible_devices()
        if cuda_visible_devices not in (None, ALL_DEVICES):
            os.environ[visible_devices_name()] = cuda_visible_devices
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            raise ValueError(
                "RANK and WORLD_SIZE are not set; a Worker is started by a RayWorkerGroup, which sets them"
            )
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
        """Set each ``_key`` as an attribute, and as environment variable KEY if `env_keys` names it."""
        vars(self).update(store)
        for key in self.env_keys():
            value = store.get(f"_{key.lower()}")
            if value is not None:
                os.environ[key] = str(value)

    @classmethod
    def env_keys(cls) -> list[str]:
        """Names of the environment variables that describe a worker; each is an attribute too, RANK as ``_rank``.

        A subclass may add its own.
        """
        return [
            "WORLD_SIZE",
            "RANK",
            "LOCAL_WORLD_SIZE",
            "LOCAL_RANK",
            "MASTER_ADDR",
            "MASTER_PORT",
            visible_devices_name(),
        ]

    def _setup_env_cuda_visible_devices(self) -> None:
        """Set which devices the process sees; a subclass for another accelerator overrides it."""
        set_up_visible_devices()

    @property
    def rank(self) -> int:
        """Position in the group, from 0."""
        return self._rank

    @property
    def world_size(self) -> int:
        """Number of workers in the group."""
        return self._world_size

    def get_master_addr_port(self) -> tuple[str | None, str | None]:
        """Address and port at which rank 0 gathers the group."""
        return self._master_addr, self._master_port

    def get_cuda_visible_devices(self) -> str:
        """The devices this process may use, in the runtime's notation; ``not set`` if it sees all."""
        return os.environ.get(visible_devices_name(), ALL_DEVICES)

    def get_fused_worker_by_name(self, worker_name: str) -> Worker | None:
        """A worker that lives in the same process under this name, or None."""
        return self.fused_worker_dict.get(worker_name)

    def get_node_id(self) -> str:
        """Ray's id of the node that this process runs on."""
        import ray

        return ray.get_runtime_context().get_node_id()

    def _register_dispatch_collect_info(self, mesh_name: str, dp_rank: int, is_collect: bool) -> None:
        """Register this worker's place in a mesh, for `make_nd_compute_dataproto_dispatch_fn`.

        Args:
            mesh_name: Name under which methods refer to the mesh. Example: ``"train"``.
            dp_rank: Which part of the data this worker receives.
            is_collect: Whether its answer counts; one worker of each dp rank should say True.

        Raises:
            UsageError: the mesh is registered already.
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
        """Whether this worker's answer counts in a mesh. Raises `UsageError` if the mesh is not registered."""
        return self._collect_dp_rank[self._known_mesh(mesh_name)]

    def get_dispatch_collect(self) -> dict[str, dict[str, Any]]:
        """``dispatch_dp_rank`` and ``collect_dp_rank`` by mesh, the arguments of another worker's setter."""
        return {"dispatch_dp_rank": self._dispatch_dp_rank, "collect_dp_rank": self._collect_dp_rank}

    def set_dispatch_collect(
        self, mesh_name: str, dispatch_dp_rank: dict[str, int], collect_dp_rank: dict[str, bool]
    ) -> None:
        """Take the same place in a mesh as another worker has, according to its `get_dispatch_collect`.

        Args:
            mesh_name: The mesh to be registered here.
            dispatch_dp_rank: The other's dp rank in each of its meshes; the last one is taken.
            collect_dp_rank: Likewise, whether its answer counts.

        Raises:
            UsageError: the mesh is registered already, or the other has none.
        """
        if not dispatch_dp_rank or not collect_dp_rank:
            raise UsageError(f"mesh {mesh_name!r} cannot follow a worker that registered no mesh; register its first")
        dp_rank, is_collect = list(dispatch_dp_rank.values())[-1], list(collect_dp_rank.values())[-1]
        self._register_dispatch_collect_info(mesh_name, dp_rank, is_collect)

    def _known_mesh(self, mesh_name: str) -> str:
        if mesh_name not in self._dispatch_dp_rank:
            known = sorted(self._dispatch_dp_rank)
            raise UsageError(f"mesh {mesh_name!r} is not registered, only {known}; register it in __init__")
        return mesh_name

    def _call_chained(self, method_name: str, args: tuple[Any, ...], kwargs: dict[str, Any], *results: Any) -> Any:
        """Call a method with its futures replaced by their results, which Ray has fetched."""
        args, kwargs = attach_results(args, kwargs, results)
        return getattr(self, method_name)(*args, **kwargs)

    def _call_silently(self, method_name: str, *args: Any, **kwargs: Any) -> None:
        """Call a method whose result is not collected; only errors are returned."""
        getattr(self, method_name)(*args, **kwargs)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def execute_with_func_generator(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``func(worker, part of the data)`` on every worker."""
        return func(self, *args, **kwargs)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def execute_func_rank_zero(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``func(*args)`` on rank 0."""
        return func(*args, **kwargs)


def redirect_output(path: str) -> None:
    """Send stdout and stderr of this process, C++ and child processes included, to the end of a file."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
