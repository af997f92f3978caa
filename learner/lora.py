"""Low-rank adapters on the policy (LoRA, arXiv 2106.09685) with peft. Only adapters are trained.

Adapters are added to the Hugging Face model in place; the model keeps its class. Merging makes new tensors and does not
change the model.
"""

from __future__ import annotations

import logging
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from asyncrl.core.errors import WeightsError
from asyncrl.weights.manifest import AdaptedLayer

from .config import LoraConfig
from .fsdp import is_first_rank, local_tensor, own_part

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

log = logging.getLogger(__name__)

_ADAPTER = "default"
_ALL_LINEAR = "all-linear"
_PEFT_PREFIX = "base_model.model."


def add_adapters(model: PreTrainedModel, config: LoraConfig, *, dtype: torch.dtype = torch.float32) -> None:
    """Add low-rank adapters to a model, and freeze all other weights. `fill_adapters` sets the adapters' values later.

    The model must be on the meta device. The rank must be > 0. The adapters are stored in ``dtype``. Expert tensors do
    not get adapters; the log names them. Raises `ValueError` if a target is not the name of a linear layer.
    """
    from peft import LoraConfig as PeftConfig  # imported only if needed, because the import takes most of a second
    from peft import inject_adapter_in_model

    chosen = _target_layers(model, list(config.target_modules))
    peft = PeftConfig(r=config.rank, lora_alpha=config.alpha, target_modules=chosen, lora_dropout=config.dropout)
    # The container has no attribute `config`. peft would rename the expert layers of a module with this attribute.
    container = nn.ModuleDict({"model": model})
    inject_adapter_in_model(peft, container, adapter_name=_ADAPTER)
    cast("Any", model).peft_config = container.peft_config
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    if (experts := _counted_experts(model)) and is_first_rank():
        log.warning("these expert tensors are frozen, they have no adapters (learner.lora): %s", ", ".join(experts))


def fill_adapters(model: nn.Module) -> None:
    """Set the initial values of allocated adapters: A is random, as in `nn.Linear`, and B is 0.

    Each rank draws every A completely and keeps only the rows of its shard. Thus the values do not depend on the number
    of ranks.
    """
    for _, layer in _layers(model):
        for part, init in (("A", partial(nn.init.kaiming_uniform_, a=math.sqrt(5))), ("B", nn.init.zeros_)):
            weight = cast("Any", getattr(layer, f"lora_{part}"))[_ADAPTER].weight.detach()
            local_tensor(weight).copy_(init(torch.empty(weight.shape))[own_part(weight)])


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Switch off the model's adapters until the context ends. Raises `ValueError` if the model has no adapters."""
    layers = [layer for _, layer in _layers(model)]
    if not layers:
        raise ValueError("the policy must have adapters to switch off, got none; set learner.lora.rank")
    # Set the scales to 0. peft's own function would change `requires_grad`, which FSDP reads only once.
    scales = [layer.scaling[_ADAPTER] for layer in layers]
    for layer in layers:
        layer.scaling[_ADAPTER] = 0.0
    try:
        yield
    finally:
        for layer, scale in zip(layers, scales, strict=True):
            layer.scaling[_ADAPTER] = scale


def has_adapters(model: nn.Module) -> bool:
    """Return whether a model has adapters."""
    return bool(_layers(model))


def is_adapter(name: str) -> bool:
    """Return whether the parameter with this name belongs to an adapter."""
    return name.endswith((f".lora_A.{_ADAPTER}.weight", f".lora_B.{_ADAPTER}.weight"))


def plain_name(name: str) -> str:
    """Return the name that a parameter has in the same model without adapters."""
    return name.replace(".base_layer.", ".")


def frozen_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of ``weights`` that are not adapters, under the names of a model without adapters."""
    return {plain_name(name): tensor for name, tensor in weights.items() if not is_adapter(name)}


def adapter_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the adapters' tensors, named as in peft's files. ``weights`` has unsharded tensors by parameter name."""
    return {
        f"{_PEFT_PREFIX}{name}.lora_{part}.weight": weights[f"{name}.lora_{part}.{_ADAPTER}.weight"]
        for name, _ in _layers(model)
        for part in "AB"
    }


def adapted_layers(model: nn.Module, tensor_of: Mapping[str, str]) -> tuple[AdaptedLayer, ...]:
    """Return, for each layer with an adapter, the names of its weight and adapter tensors, and the adapter's scale.

    Args:
        model: A model with adapters.
        tensor_of: Dict that maps a parameter's name to the name of the equal tensor in the checkpoint.

    Raises:
        WeightsError: the checkpoint does not store an adapted parameter as one tensor.
    """
    layers = _layers(model)
    if missing := [name for name, _ in layers if f"{name}.base_layer.weight" not in tensor_of]:
        raise WeightsError(
            f"the checkpoint does not store {missing[0]}.weight as one tensor ({len(missing)} such layers in total)"
        )
    return tuple(
        AdaptedLayer(
            weight=tensor_of[f"{name}.base_layer.weight"],
            down=f"{_PEFT_PREFIX}{name}.lora_A.weight",
            up=f"{_PEFT_PREFIX}{name}.lora_B.weight",
            scale=_scale(layer),
        )
        for name, layer in layers
    )


def write_adapter_config(folder: Path, model: nn.Module) -> None:
    """Write peft's configuration of the adapters into a folder, so that ``PeftModel.from_pretrained`` can read it."""
    cast("Any", model).peft_config[_ADAPTER].save_pretrained(folder)


def merged_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights with merged adapters, W + scale · B A, under the names of a model without adapters.

    Args:
        model: Defines the adapted layers and their scales.
        weights: Whole tensors by parameter name, for all or some layers; they are not changed.

    Returns:
        Tensors by name, in the dtypes of ``weights``. The product is computed in float32.
    """
    plain = dict(weights)
    for name, layer in _layers(model):
        if f"{name}.base_layer.weight" not in plain:
            continue
        down, up = (plain.pop(f"{name}.lora_{part}.{_ADAPTER}.weight").float() for part in "AB")
        base = plain.pop(f"{name}.base_layer.weight")
        merged = torch.addmm(base.float(), up, down, alpha=_scale(layer))
        plain[f"{name}.weight"] = merged.to(base.dtype)
        if (bias := plain.pop(f"{name}.base_layer.bias", None)) is not None:
            plain[f"{name}.bias"] = bias
    return plain


def _scale(layer: LoraLayer) -> float:
    """Return alpha / rank. peft's ``scaling`` is not usable, because `adapters_off` in another thread sets it to 0."""
    return layer.lora_alpha[_ADAPTER] / layer.r[_ADAPTER]


def _layers(model: nn.Module) -> list[tuple[str, LoraLayer]]:
    if "peft.tuners.lora" not in sys.modules:  # peft was not imported, so no model has adapters
        return []
    from peft.tuners.lora import LoraLayer

    return [(name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer)]


def _target_layers(model: PreTrainedModel, targets: list[str]) -> list[str]:
    """Return the names of the linear layers that match ``targets``.

    The output embedding cannot have an adapter, because the head reads the embedding's weight and not its output.
    """
    head = model.get_output_embeddings()
    if targets == [_ALL_LINEAR]:
        linear = [name for name, module in model.named_modules() if _is_linear(module) and module is not head]
        if not linear:
            raise ValueError(
                f"learner.lora.target_modules={targets} must name linear layers of the model; {type(model).__name__} "
                f"has none for {_ALL_LINEAR}; set learner.lora.rank=0, which trains all weights"
            )
        return linear
    remedy = f"name attention or dense projections, or use {_ALL_LINEAR}"
    chosen: dict[str, nn.Module] = {}
    for target in targets:
        found = {name: module for name, module in model.named_modules() if f".{name}".endswith(f".{target}")}
        if not found:
            experts = _counted_experts(model)
            stacked = f"; expert tensors have no adapters: {', '.join(experts)}" if experts else ""
            raise ValueError(
                f"learner.lora.target_modules={targets} must name linear layers of the model; no linear layer of "
                f"{type(model).__name__} is called {target!r}{stacked}; {remedy}"
            )
        chosen |= found
    for name, module in chosen.items():
        if module is head or not _is_linear(module):
            kind = "the output embedding" if module is head else f"a {type(module).__name__}"
            raise ValueError(
                f"learner.lora.target_modules={targets} must name linear layers of the model; {name} is {kind}; "
                f"{remedy}"
            )
    return list(chosen)


def _is_linear(module: nn.Module) -> bool:
    """Return whether a module computes only a linear map. Llama 4's router is an `nn.Linear` that computes more."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def expert_tensors(model: PreTrainedModel) -> list[str]:
    """Return the names of the parameters that hold the matrices of all experts of a layer."""
    return [
        f"{prefix}.{name}"
        for prefix, module in model.named_modules()
        if not isinstance(module, nn.modules.conv._ConvNd)
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 3
    ]


def _counted_experts(model: PreTrainedModel) -> list[str]:
    stacked = Counter(re.sub(r"\.\d+\.", ".*.", name) for name in expert_tensors(model))
    return [f"{name} ({count})" for name, count in sorted(stacked.items())]
