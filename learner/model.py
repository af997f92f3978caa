"""A Hugging Face causal language model as the learner sees it: packed tokens in, log-probs of chosen tokens out."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from .attention import ATTENTION_NAME, packed_layout
from .logprobs import chunked_log_probs
from .packing import MicroBatch
from .ulysses import (
    gather_outputs_and_unpad,
    get_ulysses_sequence_parallel_rank,
    get_ulysses_sequence_parallel_world_size,
    ulysses_pad_and_slice_inputs,
)

log = logging.getLogger(__name__)

_CHANGES_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Options of model families whose logits are more than a linear map of the last hidden state."""


def load_causal_lm(model_path: str, dtype: torch.dtype, *, on_meta: bool = False) -> PreTrainedModel:
    """Load a model with the packed attention.

    Args:
        model_path: Directory in Hugging Face layout.
        dtype: Type of the parameters.
        on_meta: Build the model without its weights, on the meta device; `learner.fsdp.shard_model` fills it.

    Returns:
        The model on the CPU or the meta device, in training mode.

    Raises:
        ValueError: there is no model at the path, or one that packed training would compute wrongly.
    """
    if not (Path(model_path) / "config.json").is_file():
        raise ValueError(f"model path must hold a Hugging Face model, got {model_path!r} without a config.json")
    config = AutoConfig.from_pretrained(model_path)
    for name in _CHANGES_LOGITS:
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise ValueError(f"{model_path!r} sets {name}={getattr(config, name)}, which the learner does not compute")
    if on_meta:
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION_NAME)
        return cast("PreTrainedModel", empty).train()
    if getattr(config, "output_router_logits", False):
        log.warning(
            "%s sets output_router_logits=true: the learner adds no router_aux_loss_coef=%s times the routers' "
            "balancing loss, which is not a sum over tokens and would depend on how micro-batches split them",
            model_path,
            getattr(config, "router_aux_loss_coef", None),
        )
    model = AutoModelForCausalLM.from_pretrained(
        model_path, config=config, dtype=dtype, attn_implementation=ATTENTION_NAME
    )
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # loaded weights are views of the file: they cannot be resized
    return cast("PreTrainedModel", model).train()


class PackedModel(nn.Module):
    """A Hugging Face model that runs on micro-batches, split over the sp ranks where there are several.

    Args:
        pretrained: The model; its parameters are this module's.
    """

    def __init__(self, pretrained: PreTrainedModel) -> None:
        super().__init__()
        self.pretrained = pretrained

    def hidden_states(self, batch: MicroBatch) -> Tensor:
        """Last hidden states [N, h] of a micro-batch on the model's device; this rank's part of them under Ulysses."""
        sp_size = get_ulysses_sequence_parallel_world_size()
        input_ids, position_ids, padding = ulysses_pad_and_slice_inputs(
            batch.input_ids[None], batch.position_ids[None], sp_size
        )
        backbone = cast("nn.Module", self.pretrained.base_model)
        return backbone(
            input_ids=input_ids,
            position_ids=position_ids,
            use_cache=False,
            packed=packed_layout(batch.lengths + (1,) * padding, batch.input_ids.device),
        ).last_hidden_state[0]


def at_places(
    hidden: Tensor, places: Tensor, compute: Callable[[Tensor, Tensor | slice], tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    """Compute something of the hidden states at chosen packed places, each on the rank where it lies.

    Args:
        hidden: [N, h]; under Ulysses this rank's part of it.
        places: [M] int64 packed places, the same on all sp ranks.
        compute: Gives some [m] tensors from [m, h] hidden states and their index into ``places``.

    Returns:
        These tensors at all places, [M], on every sp rank.
    """
    if get_ulysses_sequence_parallel_world_size() == 1:
        return compute(hidden.index_select(0, places), slice(None))
    local = places - get_ulysses_sequence_parallel_rank() * len(hidden)
    mine = (local >= 0) & (local < len(hidden))
    values = torch.stack(compute(hidden.index_select(0, local[mine]), mine), dim=-1)
    spread = values.new_zeros(len(hidden), values.shape[-1]).index_copy(0, local[mine], values)
    # Every sp rank computes the same loss from what it collects, so its own part of the gradient is all it needs.
    everyone = gather_outputs_and_unpad(spread, gather_dim=0, grad_scaler=False)
    return tuple(value.clone() for value in everyone.index_select(0, places).unbind(-1))


class PolicyModel(PackedModel):
    """Computes log-probs of the tokens in the loss of a micro-batch.

    Args:
        causal_lm: The model; its parameters are this module's.
        temperature: Softmax temperature at sampling.
        logprob_chunk_tokens: Tokens whose logits are held in float32 at a time.
    """

    def __init__(self, causal_lm: PreTrainedModel, *, temperature: float, logprob_chunk_tokens: int) -> None:
        super().__init__(causal_lm)
        self.temperature = temperature
        self.logprob_chunk_tokens = logprob_chunk_tokens

    def forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies at the tokens in the loss.

        Args:
            batch: N packed tokens, M in the loss, on the model's device.

        Returns:
            Log-probs [M] float32 and entropies [M] float32.
        """
        head = cast("nn.Linear", self.pretrained.get_output_embeddings())

        def scores(hidden: Tensor, index: Tensor | slice) -> tuple[Tensor, Tensor]:
            return chunked_log_probs(
                hidden,
                head.weight,
                head.bias,
                batch.targets[index],
                temperature=self.temperature,
                chunk_tokens=self.logprob_chunk_tokens,
            )

        log_probs, entropy = at_places(self.hidden_states(batch), batch.predict_index, scores)
        return log_probs, entropy


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether decoupled weight decay applies: matrices decay, biases and norm gains do not."""
    return parameter.ndim >= 2 and not name.endswith(".bias")
