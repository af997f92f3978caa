"""Sharding of the model over the mesh with FSDP2, and its inverse: whole tensors, a unit at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from .mesh import LearnerMesh
from .model import PackedModel

MIN_UNIT_NUMEL = 1_000_000
"""A layer with fewer parameters than this joins the root unit: its own collectives would cost more than they hide."""


def shard_model(model: PackedModel, mesh: LearnerMesh, dtype: torch.dtype) -> None:
    """Shard the parameters over all dp × sp ranks, in place, and move the model to its device.

    A single rank that computes in the type of its parameters has nothing to shard and nothing to cast: the model
    stays plain, which is what `fully_shard` would compute, without its hooks.

    Args:
        model: The model on the CPU, with float32 parameters, the same on every rank.
        mesh: The group.
        dtype: Type of the parameters while computing; gradients are reduced in float32.
    """
    model.to(mesh.device)
    if mesh.num_ranks == 1 and dtype == torch.float32:
        return
    axis = mesh.device_mesh._flatten("fsdp")
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    layers = set(model.pretrained._no_split_modules or ())
    for module in list(model.modules()):
        if type(module).__name__ in layers and sum(p.numel() for p in module.parameters()) >= MIN_UNIT_NUMEL:
            fully_shard(module, mesh=axis, mp_policy=policy)
    fully_shard(model, mesh=axis, mp_policy=policy)


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
