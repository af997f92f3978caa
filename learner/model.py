"""A Hugging Face causal language model as the learner sees it: packed tokens in, log-probs of chosen tokens out."""

from __future__ import annotations

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
    model = AutoModelForCausalLM.from_pretrained(
        model_path, config=config, dtype=dtype, attn_implementation=ATTENTION_NAME
    )
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # loaded weights are views of the file: they cannot be resized
    return cast("PreTrainedModel", model).train()


class PolicyModel(nn.Module):
    """Computes log-probs of the tokens in the loss of a micro-batch.

    Args:
        causal_lm: The model; its parameters are this module's.
        temperature: Softmax temperature at sampling.
        logprob_chunk_tokens: Tokens whose logits are held in float32 at a time.
    """

    def __init__(self, causal_lm: PreTrainedModel, *, temperature: float, logprob_chunk_tokens: int) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.temperature = temperature
        self.logprob_chunk_tokens = logprob_chunk_tokens

    def forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies at the tokens in the loss.

        Args:
            batch: N packed tokens, M in the loss, on the model's device.

        Returns:
            Log-probs [M] float32 and entropies [M] float32.
        """
        sp_size = get_ulysses_sequence_parallel_world_size()
        input_ids, position_ids, padding = ulysses_pad_and_slice_inputs(
            batch.input_ids[None], batch.position_ids[None], sp_size
        )
        backbone = cast("nn.Module", self.causal_lm.base_model)
        hidden = backbone(
            input_ids=input_ids,
            position_ids=position_ids,
            use_cache=False,
            packed=packed_layout(batch.lengths + (1,) * padding, batch.input_ids.device),
        ).last_hidden_state[0]
        if sp_size == 1:
            return self._log_probs(hidden, batch.predict_index, batch.targets)
        return self._log_probs_of_all_ranks(hidden, batch)

    def _log_probs(self, hidden: Tensor, predict_index: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        head = cast("nn.Linear", self.causal_lm.get_output_embeddings())
        return chunked_log_probs(
            hidden.index_select(0, predict_index),
            head.weight,
            head.bias,
            targets,
            temperature=self.temperature,
            chunk_tokens=self.logprob_chunk_tokens,
        )

    def _log_probs_of_all_ranks(self, hidden: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Compute this rank's part of the tokens in the loss, and collect the others'."""
        place = batch.predict_index - get_ulysses_sequence_parallel_rank() * len(hidden)
        mine = (place >= 0) & (place < len(hidden))
        values = torch.stack(self._log_probs(hidden, place[mine], batch.targets[mine]), dim=-1)
        spread = values.new_zeros(len(hidden), 2).index_copy(0, place[mine], values)
        # Every sp rank computes the same loss from what it collects, so its own part of the gradient is all it needs.
        everyone = gather_outputs_and_unpad(spread, gather_dim=0, grad_scaler=False)
        log_probs, entropy = everyone.index_select(0, batch.predict_index).unbind(-1)
        return log_probs.clone(), entropy.clone()


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether decoupled weight decay applies: matrices decay, biases and norm gains do not."""
    return parameter.ndim >= 2 and not name.endswith(".bias")
