"""Gathers the whole weights of a model on one rank, to compare them with published weights and saved policies."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import numpy as np
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from asyncrl.weights.layout import Part
from learner.fsdp import stored_buffers
from learner.lora import merged_weights
from learner.model_shards import PretrainedShards
from learner.packed_model import PackedModel


def whole_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every full parameter of a plain or sharded model, one FSDP unit at a time.

    Every rank must iterate to the end. Tied parameters are yielded once, under their first name. A tensor is valid only
    until the next tensor is yielded.
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


def gather_weights(trainer: PackedModel) -> dict[str, Tensor] | None:
    """Collect the whole weights of a plain or sharded model. This is a collective, so every rank must call it.

    Returns:
        On rank 0, a dict from checkpoint names to CPU tensors in the computing type. Tied tensors occur once, and
        adapters are merged. On other ranks, None.
    """
    is_first = trainer.mesh.rank == 0
    weights: dict[str, Tensor] = {}
    for name, tensor in whole_tensors(trainer.head):
        if is_first:
            whole = tensor.to(device="cpu", dtype=trainer.compute_dtype, copy=True)
            weights[name.removeprefix("pretrained.")] = whole
    if not is_first:
        return None
    for name, buffer in stored_buffers(trainer.head).items():
        weights[name.removeprefix("pretrained.")] = buffer.detach().cpu().clone()
    return revert_weight_conversion(trainer.pretrained, merged_weights(trainer.pretrained, weights))


def weights_of(trainer: PackedModel) -> dict[str, np.ndarray]:
    """Gather the model's weights, and return a dict from checkpoint names to numpy arrays.

    On all ranks except rank 0, the dict is empty.
    """
    return {name: value.numpy() for name, value in (gather_weights(trainer) or {}).items()}


def assert_weights_equal(got: dict[str, np.ndarray], want: dict[str, np.ndarray], *, atol: float = 0.0) -> None:
    """Compare all weights of two models by name."""
    assert got.keys() == want.keys()
    assert want
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=0, atol=atol, err_msg=name)


def save_whole(directory: Path, model: PackedModel) -> str:
    """Save a model that is on one rank. Does not use the code that publishes weights and saves policies."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    weights = {name: tensor.contiguous() for name, tensor in (gather_weights(model) or {}).items()}
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    PretrainedShards(model.pretrained, model.compute_dtype).describe(directory, Part.whole)
    return str(directory)
