"""A rank's shards of a Hugging Face model. `asyncrl.weights` uses them to publish and to save the model."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from asyncrl.single_controller.serialization import gather_values
from asyncrl.weights.layout import Part
from asyncrl.weights.manifest import AdaptedLayer

from .fsdp import LearnerMesh, stored_buffers
from .lora import (
    adapted_layers,
    adapter_weights,
    frozen_weights,
    has_adapters,
    is_adapter,
    merged_weights,
    write_adapter_config,
)

T = TypeVar("T")


class ShardedModel(Protocol):
    """The attributes of a model that `PretrainedShards.of` reads."""

    @property
    def mesh(self) -> LearnerMesh:
        """This rank's position in the learner group."""
        ...

    @property
    def head(self) -> nn.Module:
        """The sharded module. It contains the Hugging Face model."""
        ...

    @property
    def pretrained(self) -> PreTrainedModel:
        """The Hugging Face model, a submodule of `head`."""
        ...

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of published parameters."""
        ...


class PretrainedShards:
    """Implements `asyncrl.weights.layout.ModelShards` for a Hugging Face model, sharded or whole.

    Args:
        model: The Hugging Face model.
        dtype: Dtype in which parameters are written.
        rank: Index of this rank among the ``num_ranks`` ranks.
        group: A gloo process group of all ranks; None for a single rank.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        dtype: torch.dtype,
        *,
        rank: int = 0,
        num_ranks: int = 1,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._model, self.dtype = model, dtype
        self.rank, self.num_ranks, self.group = rank, num_ranks, group
        self.name = type(model).__name__
        self.has_adapters = has_adapters(model)

    @classmethod
    def of(cls, model: ShardedModel) -> PretrainedShards:
        """Make the `PretrainedShards` of a learner's model. All ranks call this together.

        FSDP first frees the parameters that it had gathered. The object gets a separate process group, because
        publishing runs in parallel with training.
        """
        for module in model.head.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        mesh, group = model.mesh, None
        if mesh.num_ranks > 1:
            group = cast("dist.ProcessGroup", dist.new_group(backend="gloo", timeout=mesh.timeout))
        return cls(model.pretrained, model.compute_dtype, rank=mesh.rank, num_ranks=mesh.num_ranks, group=group)

    def held(self, part: Part) -> dict[str, Tensor]:
        """Return this rank's shards of the parameters and stored buffers, by name.

        ``part`` selects all tensors, only the adapters, or all tensors except the adapters.
        """
        return {
            name: tensor
            for name, tensor in (*self._model.named_parameters(), *stored_buffers(self._model).items())
            if part is Part.whole or is_adapter(name) is (part is Part.adapters)
        }

    def converted(self, part: Part, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert unsharded weights to the tensors of a Hugging Face checkpoint, by name.

        The names of ``weights`` are those of `held`. For ``Part.adapters``, the result has the tensors of peft's file.
        For ``Part.whole``, adapters are merged.
        """
        if part is Part.adapters:
            return adapter_weights(self._model, weights)
        plain = merged_weights(self._model, weights) if part is Part.whole else frozen_weights(weights)
        return revert_weight_conversion(self._model, plain)

    def adapted_layers(self, tensor_of: Mapping[str, str]) -> tuple[AdaptedLayer, ...]:
        """Return, for each layer with an adapter, the names of its weight and adapter tensors, and the adapter's scale.

        ``tensor_of`` maps a parameter's name to the name of the checkpoint's tensor with the same values. Raises
        `WeightsError` if the checkpoint does not store an adapted parameter as one tensor.
        """
        return adapted_layers(self._model, tensor_of)

    def describe(self, folder: Path, part: Part) -> None:
        """Write a JSON configuration into ``folder``: peft's for ``Part.adapters``, otherwise the model's."""
        if part is Part.adapters:
            write_adapter_config(folder, self._model)
        else:
            # Change a copy, because the training thread may use the model's configuration at the same time.
            config = copy.deepcopy(self._model.config)
            config.dtype = self.dtype
            config.save_pretrained(folder)
            if self._model.generation_config is not None:
                self._model.generation_config.save_pretrained(folder)

    def gather(self, value: T, kind: Any) -> list[T]:
        """Return the values that all ranks pass, in rank order. All ranks call this together.

        ``kind`` is the type of ``value``.
        """
        return gather_values(value, kind, self.group)

    def close(self) -> None:
        """Destroy the process group, if there is one."""
        if self.group is not None:
            dist.destroy_process_group(self.group)
