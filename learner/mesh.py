"""The ranks of a learner group as a dp × sp mesh, and the few collectives the trainer needs.

Ranks are laid out dp-major: the sp ranks of one sequence group are neighbours. Every collective is bounded by the
process group's time-out.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from .config import Device, LearnerConfig


def choose_device(device: Device) -> torch.device:
    """The device this rank computes on.

    Raises:
        ValueError: CUDA is asked for where torch sees none.
    """
    if device is Device.cuda and not torch.cuda.is_available():
        raise ValueError("learner.device=cuda needs a GPU that torch can see, got none; use learner.device=cpu")
    if device is Device.cpu or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


@dataclass(frozen=True, kw_only=True)
class LearnerMesh:
    """This rank's place in the group. Slicing a device mesh costs a millisecond: what it says is kept.

    Attributes:
        device_mesh: Two axes, ``dp`` and ``sp``.
        device: Where this rank computes.
        fsdp_size: Ranks that share one copy of the parameters, dp x sp unless HSDP keeps several copies.
        timeout: Bounds every collective.
    """

    device_mesh: DeviceMesh
    device: torch.device
    fsdp_size: int
    timeout: timedelta

    @cached_property
    def rank(self) -> int:
        """Global rank."""
        return dist.get_rank()

    @cached_property
    def num_ranks(self) -> int:
        """Ranks of the group, dp × sp."""
        return self.device_mesh.size()

    @cached_property
    def fsdp_mesh(self) -> DeviceMesh:
        """The same ranks as FSDP sees them: one axis to shard over, under HSDP ``replicate`` before it."""
        if self.fsdp_size == self.num_ranks:
            return _bounded(self.device_mesh._flatten("fsdp"), self.timeout)
        shape = (self.num_ranks // self.fsdp_size, self.fsdp_size)
        mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("replicate", "shard"))
        return _bounded(mesh, self.timeout)

    @cached_property
    def sp_size(self) -> int:
        """Ranks of one sequence-parallel group."""
        return self.device_mesh["sp"].size()

    @cached_property
    def dp_rank(self) -> int:
        """Which share of the batch this rank trains on."""
        return self.device_mesh["dp"].get_local_rank()

    @cached_property
    def sp_rank(self) -> int:
        """Place within the sequence-parallel group."""
        return self.device_mesh["sp"].get_local_rank()

    @cached_property
    def dp_group(self) -> ProcessGroup:
        """The ranks that train on other sequences and share this one's place in its sequence-parallel group."""
        return self.device_mesh["dp"].get_group()

    @cached_property
    def sp_group(self) -> ProcessGroup:
        """The ranks that share this one's sequences."""
        return self.device_mesh["sp"].get_group()

    def sum_over_dp(self, values: Tensor) -> Tensor:
        """Sum over data-parallel ranks of values that the sp ranks of a group share."""
        if self.num_ranks > 1:
            dist.all_reduce(values, group=self.dp_group)
        return values

    def largest(self, values: Tensor) -> Tensor:
        """Largest over all ranks, entry by entry; the values may be on the CPU and come back there."""
        if self.num_ranks == 1:
            return values
        shared = values.to(self.device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        return shared.to(values.device)


def open_mesh(config: LearnerConfig) -> LearnerMesh:
    """Join the group and build its mesh.

    The group is the process's default one if there is one already; else it comes from the environment (``RANK``,
    ``WORLD_SIZE``, ``MASTER_ADDR``, ``MASTER_PORT``), and a single rank needs no environment at all.

    Raises:
        ValueError: the group has another size than ``learner.num_ranks``.
    """
    device = choose_device(config.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=config.step_timeout_s)
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        if config.num_ranks == 1:
            store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
            dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
        else:
            dist.init_process_group(backend, timeout=timeout)
    if dist.get_world_size() != config.num_ranks:
        raise ValueError(f"learner.num_ranks is {config.num_ranks}, but the process group has {dist.get_world_size()}")
    shape = (config.num_ranks // config.sp_size, config.sp_size)
    return LearnerMesh(
        device_mesh=_bounded(init_device_mesh(device.type, shape, mesh_dim_names=("dp", "sp")), timeout),
        device=device,
        fsdp_size=config.num_ranks if config.fsdp_size == -1 else config.fsdp_size,
        timeout=timeout,
    )


def _bounded(mesh: DeviceMesh, timeout: timedelta) -> DeviceMesh:
    """Bound the collectives of every axis; groups of part of the ranks do not inherit the time-out of the whole."""
    for axis in range(mesh.ndim):
        _set_pg_timeout(timeout, mesh.get_group(axis))
    return mesh
