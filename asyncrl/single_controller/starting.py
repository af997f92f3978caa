"""Starting the workers of a group: each with its place, its name, its environment and its share of a device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.protocol.errors import UsageError
from asyncrl.protocol.remote import WorkerIdentity, introduce

from .placement import Slot
from .ray_class import RayClassWithInitArgs, unwrap
from .ray_pool import RayResourcePool
from .worker_log import last_words_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """What all workers of a group are started with.

    Attributes:
        group: Name of the group.
        ray_class: The workers' class and its arguments.
        pool: Where they run.
        use_gpu: Whether each takes its share of a device.
        device_name: Kind of device. Example: ``cuda``.
        master: Address and port at which rank 0 gathers the group.
        worker_env: Further environment variables.
        is_detached: Whether they outlive the driver.
        log_dir: Directory of their logs; None leaves their output to Ray.
        nsight: Options of NVIDIA Nsight Systems, under which the workers then run; None runs them without.
    """

    group: str
    ray_class: RayClassWithInitArgs
    pool: RayResourcePool
    use_gpu: bool
    device_name: str
    master: tuple[str, str]
    worker_env: dict[str, str]
    is_detached: bool
    log_dir: str | Path | None
    nsight: dict[str, Any] | str | None

    def start(self, slot: Slot, world_size: int) -> tuple[Any, str]:
        """Start the worker of a slot. Returns its handle and its name.

        Raises:
            UsageError: ``worker_env`` sets a variable that describes the worker.
        """
        name = f"{self.group}{unwrap(self.ray_class.cls).__name__}_{slot.node_index}:{slot.local_rank}"
        log_file = None if self.log_dir is None else str(Path(self.log_dir).resolve() / f"{self.group}-{slot.rank}.log")
        options: dict[str, Any] = {
            "name": name,
            "runtime_env": {"env_vars": self._environment(slot, world_size, log_file)},
        }
        if self.nsight is not None:
            options["runtime_env"]["nsight"] = self.nsight
        if self.is_detached:
            options["lifetime"] = "detached"
        worker = self.ray_class.for_rank(options)(
            placement_group=slot.placement_group,
            placement_group_bundle_idx=slot.bundle_index,
            use_gpu=self.use_gpu,
            num_gpus=1 / self.pool.max_colocate_count,
            device_name=self.device_name,
        )
        identity = WorkerIdentity(
            group=self.group, rank=slot.rank, node=slot.node_address, last_words=last_words_of(worker, log_file)
        )
        introduce(worker._actor_id.hex(), identity)
        return worker, name

    def _environment(self, slot: Slot, world_size: int, log_file: str | None) -> dict[str, str]:
        env = {
            "WORLD_SIZE": str(world_size),
            "RANK": str(slot.rank),
            "WG_PREFIX": self.group,
            "WG_BACKEND": "ray",
            "RAY_LOCAL_WORLD_SIZE": str(slot.local_world_size),
            "RAY_LOCAL_RANK": str(slot.local_rank),
            "MASTER_ADDR": self.master[0],
            "MASTER_PORT": self.master[1],
        }
        taken = sorted(env.keys() & self.worker_env.keys())
        if taken:
            raise UsageError(f"worker_env sets {taken}, which describe the worker and are the group's to set")
        return env | self.worker_env | ({} if log_file is None else {"WG_LOG_FILE": log_file})
