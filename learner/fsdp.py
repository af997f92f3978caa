"""Arranges the ranks of a learner group in a dp × sp mesh, and shards a model over this mesh with FSDP2.

dp × sp means data-parallel times sequence-parallel. Neighboring ranks are in the same sequence-parallel group. Each
rank allocates and fills only its own shards of the parameters.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import FileStore, HashStore, ProcessGroup, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from .config import RENDEZVOUS_FILE, Device, Dtype, GradientSync, LearnerConfig, Resharding, sums_each_micro_batch

MIN_UNIT_NUMEL = 1_000_000
"""A decoder layer with fewer parameters is sharded together with the root module. For such a layer, separate
collectives would cost more time than they save by their overlap with computation."""


def choose_device(device: Device) -> torch.device:
    """Return the device for the computation of this rank. ``device`` is the option ``learner.device``.

    Raises `ValueError` if the option is ``cuda`` and torch does not find a GPU.
    """
    if device is Device.cuda and not torch.cuda.is_available():
        raise ValueError("learner.device=cuda needs a GPU that torch can see, got none; use learner.device=cpu")
    if device is Device.cpu or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


@dataclass(frozen=True, kw_only=True)
class ParameterTypes:
    """Dtypes of a model's parameters.

    Attributes:
        compute: Dtype of the computation and of published weights.
        trained: Dtype in which trained parameters and AdamW's moments are stored.
        frozen: Dtype in which frozen parameters are stored.
    """

    compute: torch.dtype
    trained: torch.dtype
    frozen: torch.dtype


def parameter_types(config: LearnerConfig, device: torch.device) -> ParameterTypes:
    """Return the dtypes for computation and storage that ``learner.dtype`` and ``learner.frozen_dtype`` select.

    ``auto`` depends on the device. Raises `ValueError` if the GPU does not support bfloat16.
    """
    usual = torch.bfloat16 if device.type == "cuda" else torch.float32
    compute = usual if config.dtype is Dtype.auto else getattr(torch, config.dtype)
    if device.type == "cuda" and compute is torch.bfloat16 and not torch.cuda.is_bf16_supported(False):
        raise ValueError(
            f"learner.dtype={config.dtype} needs a GPU that computes in bfloat16, got "
            f"{torch.cuda.get_device_name(device)}; set learner.dtype=float32"
        )
    frozen = compute if config.frozen_dtype is Dtype.auto else getattr(torch, config.frozen_dtype)
    return ParameterTypes(compute=compute, trained=torch.float32, frozen=frozen)


def with_memory_options(config: LearnerConfig, model: nn.Module, device: torch.device) -> LearnerConfig:
    """Return a copy of the options, in which values for this device and model replace null and ``auto``.

    Only ``activation_checkpointing`` and ``gradient_sync`` change.
    """
    on_cuda = device.type == "cuda"
    card_bytes = torch.cuda.get_device_properties(device).total_memory if on_cuda else 0
    num_trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    each = sums_each_micro_batch(config.gradient_sync, num_trained, card_bytes)
    return replace(
        config,
        activation_checkpointing=on_cuda
        if config.activation_checkpointing is None
        else config.activation_checkpointing,
        gradient_sync=GradientSync.micro_batch if each else GradientSync.update,
    )


@dataclass(frozen=True, kw_only=True)
class LearnerMesh:
    """This rank's position in the learner's dp × sp mesh, with the process groups of the mesh.

    Attributes:
        device_mesh: Mesh with the axes ``dp`` and ``sp``.
        device: This rank's device.
        fsdp_size: Number of ranks that share one copy of the parameters: dp × sp, or fewer with HSDP.
        timeout: Deadline of each collective.
        group: The process group of all ranks; None is torch's default group.
    """

    device_mesh: DeviceMesh
    device: torch.device
    fsdp_size: int
    timeout: timedelta
    group: ProcessGroup | None = None

    @cached_property
    def rank(self) -> int:
        """Index of this process among all ranks."""
        return dist.get_rank()

    @cached_property
    def num_ranks(self) -> int:
        """Number of ranks of the group, dp × sp."""
        return self.device_mesh.size()

    @cached_property
    def fsdp_mesh(self) -> DeviceMesh:
        """The mesh for FSDP. It has one axis, or with HSDP the two axes ``replicate`` and ``shard``."""
        if self.fsdp_size == self.num_ranks:
            return _bounded(self.device_mesh._flatten("fsdp"), self.timeout)
        shape = (self.num_ranks // self.fsdp_size, self.fsdp_size)
        mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("replicate", "shard"))
        return _bounded(mesh, self.timeout)

    @cached_property
    def sp_size(self) -> int:
        """Number of ranks of a sequence-parallel group."""
        return self.device_mesh["sp"].size()

    @cached_property
    def dp_rank(self) -> int:
        """Index of this rank among the data-parallel ranks; the same for all ranks of a sequence-parallel group."""
        return self.device_mesh["dp"].get_local_rank()

    @cached_property
    def sp_rank(self) -> int:
        """Index of this rank in its sequence-parallel group."""
        return self.device_mesh["sp"].get_local_rank()

    @cached_property
    def dp_group(self) -> ProcessGroup:
        """The process group of the ranks with the same ``sp_rank``. These ranks train on different samples."""
        return self.device_mesh["dp"].get_group()

    @cached_property
    def sp_group(self) -> ProcessGroup:
        """The process group of the ranks that compute the same sequences as this rank."""
        return self.device_mesh["sp"].get_group()

    def sum_over_dp(self, values: Tensor) -> Tensor:
        """Sum a tensor over the data-parallel ranks, in place, and return it.

        All ranks of a sequence-parallel group must pass the same values.
        """
        if self.num_ranks > 1:
            dist.all_reduce(values, group=self.dp_group)
        return values

    def any_in_sp_group(self, flags: Sequence[bool]) -> list[bool]:
        """Return, for each flag, whether it is True on any rank of this rank's sequence-parallel group.

        All ranks pass the same number of flags, at least one.
        """
        shared = torch.tensor(flags, dtype=torch.int32, device=self.device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=self.sp_group)
        return shared.bool().tolist()

    def largest(self, values: Tensor) -> Tensor:
        """Return the elementwise maximum over all ranks, on the device of ``values``."""
        if self.num_ranks == 1:
            return values
        shared = values.to(self.device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=self.group)
        return shared.to(values.device)

    def on_host(self) -> LearnerMesh:
        """Return a mesh of the same ranks on the CPU, with separate gloo groups, for a second thread.

        All ranks must call this together. Each thread needs its own groups, because the order of the threads'
        collectives may differ between ranks.
        """
        if self.num_ranks == 1:
            return replace(self, device=torch.device("cpu"))
        shape, names = tuple(self.device_mesh.shape), ("dp", "sp")
        backends: Any = dict.fromkeys(names, "gloo")
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names, backend_override=backends)
        group = dist.new_group(backend="gloo", timeout=self.timeout)
        return replace(self, device=torch.device("cpu"), device_mesh=_bounded(mesh, self.timeout), group=group)


def open_mesh(config: LearnerConfig) -> LearnerMesh:
    """Join the process group of the learner, and return the mesh of its ranks.

    Uses the default process group if it exists. Otherwise several ranks need the environment variables ``RANK``,
    ``WORLD_SIZE``, and either `RENDEZVOUS_FILE`, or ``MASTER_ADDR`` and ``MASTER_PORT``. Raises `ValueError` if the
    size of the group is not ``learner.num_ranks``.
    """
    device = choose_device(config.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=config.step_timeout_s)
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        if config.num_ranks == 1:
            store = HashStore()
            dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
        else:
            _join_group(backend, timeout)
    if dist.get_world_size() != config.num_ranks:
        raise ValueError(
            f"learner.num_ranks must be the size of the process group, got {config.num_ranks} for a group of "
            f"{dist.get_world_size()} ranks"
        )
    shape = (config.num_ranks // config.sp_size, config.sp_size)
    return LearnerMesh(
        device_mesh=_bounded(init_device_mesh(device.type, shape, mesh_dim_names=("dp", "sp")), timeout),
        device=device,
        fsdp_size=config.num_ranks if config.fsdp_size == -1 else config.fsdp_size,
        timeout=timeout,
    )


def _join_group(backend: str, timeout: timedelta) -> None:
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # use the store that torchrun or a test has created
        dist.init_process_group(backend, timeout=timeout)
        return
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if path := os.environ.get(RENDEZVOUS_FILE):
        store = FileStore(path, world_size)
    else:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family).detach() if rank == 0 else None
        store = TCPStore(host, port, world_size, rank == 0, timeout, master_listen_fd=listener)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def _bounded(mesh: DeviceMesh, timeout: timedelta) -> DeviceMesh:
    """Set the time-out of each axis's process group. These groups do not inherit the default group's time-out."""
    for axis in range(mesh.ndim):
        _set_pg_timeout(timeout, mesh.get_group(axis))
    return mesh


def shard_model(model: nn.Module, mesh: LearnerMesh, config: LearnerConfig) -> None:
    """Shard a model on the meta device over the ranks, in place, and allocate this rank's shards.

    Before the call, the parameters must have the dtypes for storage (`ParameterTypes.trained` and
    `ParameterTypes.frozen`). After the call, the parameters' values are undefined. Gradients are reduced in float32.

    On a single rank, FSDP does not wrap a model that is stored in the computation's dtype, because FSDP's hooks take
    time. With ``offload_policy``, FSDP wraps every model.
    """
    layers = decoder_layers(model)
    if compiles_layers(config, mesh.device):
        for layer in layers:
            layer.forward = torch.compile(layer.forward, dynamic=True)
    compute = parameter_types(config, mesh.device).compute
    held = {parameter.dtype for parameter in model.parameters()}
    if mesh.num_ranks == 1 and held == {compute} and not config.offload_policy:
        _allocate(model, mesh.device)
        return
    num_shards = mesh.fsdp_size
    policies: dict[str, Any] = {
        "shard_placement_fn": lambda parameter: Shard(shard_dimension(parameter.shape, num_shards)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32),
        "reshard_after_forward": None if config.resharding is Resharding.layer else False,
    }
    if config.offload_policy:
        policies["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda")
    for layer in layers:
        if sum(parameter.numel() for parameter in layer.parameters()) >= MIN_UNIT_NUMEL:
            fully_shard(layer, mesh=mesh.fsdp_mesh, **policies)
    fully_shard(model, mesh=mesh.fsdp_mesh, **policies)
    _allocate(model, torch.device("cpu") if config.offload_policy else mesh.device)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(mesh.device)


def shard_dimension(shape: Sequence[int], num_shards: int) -> int:
    """Return the dimension over which FSDP shards a parameter: 0, or 1 for some stacked experts.

    FSDP pads dimension 0 to a multiple of the number of shards. Thus 16 experts on 64 ranks would need the memory of 64
    experts. FSDP does not pad dimension 1, so the number of shards must divide dimension 1.
    """
    return int(len(shape) > 2 and shape[0] % num_shards > 0 and shape[1] % num_shards == 0)


def _allocate(model: nn.Module, home: torch.device) -> None:
    before = torch.__future__.get_swap_module_params_on_conversion()
    # Keep the parameter objects, because FSDP and modules with tied weights hold references to these objects.
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to_empty(device=home)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def compiles_layers(config: LearnerConfig, device: torch.device) -> bool:
    """Return whether to compile the decoder layers. If ``learner.torch_compile`` is null, compile only on CUDA."""
    return device.type == "cuda" if config.torch_compile is None else config.torch_compile


def prepare_backward(model: nn.Module, config: LearnerConfig, *, is_last: bool) -> None:
    """Set how FSDP treats gradients and parameters in the next backward pass.

    The options ``gradient_sync`` and ``resharding`` select the behavior. ``is_last`` is True for the last backward pass
    before an optimizer update.
    """
    if not isinstance(model, FSDPModule):
        return
    model.set_requires_gradient_sync(is_last or config.gradient_sync is GradientSync.micro_batch)
    model.set_requires_all_reduce(is_last)
    model.set_reshard_after_backward(is_last or config.resharding is Resharding.layer)


def drop_gradients(model: nn.Module) -> None:
    """Delete all gradients, including those that FSDP has not yet summed over the ranks."""
    for parameter in model.parameters():
        parameter.grad = None
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None) or [
                state._fsdp_param_group
            ]  # the name of this attribute depends on torch's version
            for group in groups:
                for parameter in group.fsdp_params if group is not None else ():
                    parameter.sharded_param.grad = parameter.unsharded_accumulated_grad = None
                    if hasattr(parameter, "_unsharded_param"):
                        parameter._unsharded_param.grad = None


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the decoder layers inside a module, in order.

    Each layer is compiled as one unit. It is also sharded as one unit if it has at least `MIN_UNIT_NUMEL` parameters.
    """
    inner = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    names = {name for module in inner for name in module._no_split_modules or ()}
    return [module for module in model.modules() if type(module).__name__ in names]


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a sharded tensor, or a plain tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_part(tensor: Tensor) -> tuple[slice, ...]:
    """Return which region of the whole tensor this rank holds, as one slice per dimension."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    shape, first = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + size) for start, size in zip(first, shape, strict=True))


def is_first_rank() -> bool:
    """Return whether this process is rank 0 or has no process group. Such a process logs for all ranks."""
    return not dist.is_initialized() or dist.get_rank() == 0


def stored_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a checkpoint stores, by name. Each rank has the whole buffers, which are not trained."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }
