"""Low-rank adapters on the policy (LoRA, arXiv 2106.09685), by peft: trained alone, and published alone or merged.

The adapters are injected into the Hugging Face model, which keeps its class; its own weights are frozen. Nothing is
ever merged in place: merged weights are computed beside those that are trained.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from asyncrl.protocol.errors import WeightsError
from asyncrl.protocol.manifest import AdaptedLayer

from .config import LoraConfig

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

_ADAPTER = "default"
_PEFT_PREFIX = "base_model.model."


def add_adapters(model: PreTrainedModel, config: LoraConfig, *, dtype: torch.dtype = torch.float32) -> None:
    """Inject adapters that change nothing yet (B is 0), and freeze all else.

    The model is on the CPU or the meta device. The adapters are held in ``dtype``; the model's own weights keep their
    types. The rank is > 0. Raises `ValueError` if the model has no such modules.
    """
    from peft import LoraConfig as PeftConfig  # takes most of a second, which only adapters need
    from peft import inject_adapter_in_model

    targets = list(config.target_modules)
    chosen = _linear_layers(model) if targets == ["all-linear"] else targets
    peft = PeftConfig(r=config.rank, lora_alpha=config.alpha, target_modules=chosen, lora_dropout=config.dropout)
    try:
        inject_adapter_in_model(peft, model, adapter_name=_ADAPTER)
    except ValueError as error:
        raise ValueError(f"learner.lora.target_modules={targets} cannot be adapted: {error}") from error
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    strange = sorted({type(layer).__name__ for _, layer in _layers(model) if layer.get_base_layer().weight.ndim != 2})
    if strange:
        raise ValueError(f"learner.lora.target_modules must name linear layers, got {strange}; name projections")


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Inside, the model computes what it did without adapters. Raises `ValueError` if it has none."""
    layers = [layer for _, layer in _layers(model)]
    if not layers:
        raise ValueError("the policy has no adapters to switch off; set learner.lora.rank, or use a reference role")
    # By their scale, not by peft's switch, which makes parameters need no gradient for a while: FSDP notes that once.
    scales = [layer.scaling[_ADAPTER] for layer in layers]
    for layer in layers:
        layer.scaling[_ADAPTER] = 0.0
    try:
        yield
    finally:
        for layer, scale in zip(layers, scales, strict=True):
            layer.scaling[_ADAPTER] = scale


def has_adapters(model: nn.Module) -> bool:
    """Whether a model has adapters."""
    return bool(_layers(model))


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter, by its name."""
    return name.endswith((f".lora_A.{_ADAPTER}.weight", f".lora_B.{_ADAPTER}.weight"))


def plain_name(name: str) -> str:
    """The name that a parameter has in a model without adapters."""
    return name.replace(".base_layer.", ".")


def frozen_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Plain weights without what the adapters add, under the names of a model without adapters."""
    return {plain_name(name): tensor for name, tensor in weights.items() if not is_adapter(name)}


def adapter_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The adapters alone, under the names of peft's own files; see `merged_weights`."""
    return {
        f"{_PEFT_PREFIX}{name}.lora_{part}.weight": weights[f"{name}.lora_{part}.{_ADAPTER}.weight"]
        for name, _ in _layers(model)
        for part in "AB"
    }


def adapted_layers(model: nn.Module, tensor_of: Mapping[str, str]) -> tuple[AdaptedLayer, ...]:
    """Every layer that has an adapter.

    Args:
        model: With adapters.
        tensor_of: Name of a parameter, in a model without adapters, to that of the tensor of a checkpoint that it is.

    Raises:
        WeightsError: an adapted parameter is not a tensor of the checkpoint as it is, but a part, joined or transposed.
    """
    layers = _layers(model)
    if missing := [name for name, _ in layers if f"{name}.weight" not in tensor_of]:
        raise WeightsError(f"{missing[0]}.weight is not a tensor of the checkpoint as it is ({len(missing)} are not)")
    return tuple(
        AdaptedLayer(
            weight=tensor_of[f"{name}.weight"],
            down=f"{_PEFT_PREFIX}{name}.lora_A.weight",
            up=f"{_PEFT_PREFIX}{name}.lora_B.weight",
            scale=_scale(layer),
        )
        for name, layer in layers
    )


def write_adapter_config(folder: Path, model: nn.Module) -> None:
    """Write peft's description of the adapters beside them, so that ``PeftModel.from_pretrained`` loads the folder."""
    cast("Any", model).peft_config[_ADAPTER].save_pretrained(folder)


def merged_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Plain weights W + scale · B A under the names of a model without adapters.

    ``weights`` holds whole tensors by the parameter names of the model, all or those of some layers; the model tells
    which layers have adapters, and their scales. None is changed.

    Returns:
        Name to tensor, each in its own type; the product is computed in float32.
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
    """Alpha ÷ rank; also while another thread has the adapters off, which peft's own ``scaling`` then says."""
    return layer.lora_alpha[_ADAPTER] / layer.r[_ADAPTER]


def _layers(model: nn.Module) -> list[tuple[str, LoraLayer]]:
    if "peft.tuners.lora" not in sys.modules:  # then nothing has injected any
        return []
    from peft.tuners.lora import LoraLayer

    return [(name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer)]


def _linear_layers(model: PreTrainedModel) -> list[str]:
    """All linear layers but the output embedding, whose weight may be tied and is read by the log-probs."""
    head = model.get_output_embeddings()
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head]
