"""Sharding of the model over the mesh with FSDP2, and its inverse: whole tensors, a unit at a time.

Only rank 0 reads weights; it hands every other rank its shards, so a host never holds the model once a rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from .config import LearnerConfig
from .mesh import LearnerMesh

MIN_UNIT_NUMEL = 1_000_000
"""A layer with fewer parameters than this joins the root unit: its own collectives would cost more than they hide."""


def shard_model(model: nn.Module, mesh: LearnerMesh, config: LearnerConfig) -> None:
    """Shard the parameters over the ranks of the mesh, in place, and move the model to its device.

    A single rank that computes in the type of its parameters has nothing to shard and nothing to cast: the model
    stays plain, which is what `fully_shard` would compute, without its hooks.

    Args:
        model: The model with float32 parameters; on rank 0 on the CPU with its weights, on the others best on the
            meta device: they receive their shards, and the buffers, from rank 0.
        mesh: The group.
        config: ``dtype`` while computing (gradients are reduced in float32), ``offload_policy``, ``torch_compile``.
    """
    layers = decoder_layers(model)
    if config.torch_compile:
        for layer in layers:
            layer.forward = torch.compile(layer.forward, dynamic=True)
    if mesh.num_ranks == 1 and config.dtype == "float32" and not config.offload_policy:
        model.to(mesh.device)
        return
    whole = model.state_dict() if mesh.rank == 0 else {}
    policies: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=getattr(torch, config.dtype), reduce_dtype=torch.float32)
    }
    if config.offload_policy:
        policies["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda")
    for layer in layers:
        if sum(parameter.numel() for parameter in layer.parameters()) >= MIN_UNIT_NUMEL:
            fully_shard(layer, mesh=mesh.fsdp_mesh, **policies)
    fully_shard(model, mesh=mesh.fsdp_mesh, **policies)
    if mesh.num_ranks > 1:
        _fill_from_first_rank(model, whole, mesh, config)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated layers of the Hugging Face models inside a module: the units of sharding and compiling."""
    inner = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    names = {name for module in inner for name in module._no_split_modules or ()}
    return [module for module in model.modules() if type(module).__name__ in names]


def _fill_from_first_rank(model: nn.Module, whole: dict[str, Any], mesh: LearnerMesh, config: LearnerConfig) -> None:
    """Give every rank its shards of rank 0's weights, tensor by tensor, and rank 0's buffers.

    Args:
        model: Sharded; on the ranks without weights on the meta device.
        whole: Rank 0's weights before they were sharded; empty on the others.
        mesh: The group.
        config: See `shard_model`.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        home = torch.device("cpu") if config.offload_policy else mesh.device
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)  # keeps tied parameters one and FSDP's references
        try:
            model.to_empty(device=home)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)
    set_model_state_dict(model, whole, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    for buffer in model.buffers():
        buffer.data = buffer.data.to(mesh.device)
        dist.broadcast(buffer.data, src=0)  # those that are not saved, as rotary frequencies, are not in the state


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor; a plain tensor is its own part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter whole, unsharding one FSDP unit at a time. Every rank must iterate to the end.

    Args:
        model: Sharded or plain.

    Yields:
        Name and tensor, each parameter once (tied ones under their first name). The tensor is valid until the next
        step of the iteration.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not units:
        yield from ((name, parameter.detach()) for name, parameter in model.named_parameters())
        return
    for unit in units:
        unit.unshard()
        prefix = next(name for name, module in model.named_modules() if module is unit)
        for name, parameter in cast("nn.Module", unit).named_parameters(prefix=prefix):
            if not isinstance(parameter, DTensor):
                yield name, parameter.detach()
        unit.reshard()
