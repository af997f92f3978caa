"""Models of a few thousand parameters in Hugging Face layout, and batches for their training."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from learner.types import TokenSequence

VOCABULARY = 23

_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_DELTA_NET = {
    "head_dim": 8,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
_WINDOW = {"head_dim": 8, "sliding_window": 5}
_WINDOW_THEN_ALL = {**_WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}

# Windows, chunks and query scales are so small that they have an effect in 24 tokens, the longest test sequence.
_FAMILIES: dict[str, dict] = {
    "qwen2": {"tie_word_embeddings": False},
    "qwen3": {"head_dim": 8, "tie_word_embeddings": True},
    "llama": {"tie_word_embeddings": False},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, **_EXPERTS},
    "qwen3_next": {**_DELTA_NET, "num_experts": 4, "shared_expert_intermediate_size": 16, **_EXPERTS},
    "qwen3_5_text": _DELTA_NET,
    "gemma3_text": {**_WINDOW_THEN_ALL, "query_pre_attn_scalar": 8},
    "mistral": _WINDOW,
    "phi3": {"partial_rotary_factor": 0.5},
    "gpt_oss": {**_WINDOW_THEN_ALL, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        **_LATENT,
        **_EXPERTS,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
    "glm4": {"head_dim": 8, "partial_rotary_factor": 0.5},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_ff_dim": 48, "block_auto_adjust_ff_dim": False},
    "olmo2": {},
    "llama4_text": {
        "head_dim": 8,
        "intermediate_size_mlp": 48,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "layer_types": ["chunked_attention", "full_attention"],
        "no_rope_layers": [1, 0],
        "attention_chunk_size": 5,
        "floor_scale": 4,
        "attn_scale": 0.3,
    },
    "qwen2_moe": {
        **_EXPERTS,
        "use_sliding_window": True,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_experts": 4,
        "shared_expert_intermediate_size": 16,
    },
    "granitemoehybrid": {
        **_MAMBA,
        "layer_types": ["mamba", "attention"],
        "mamba_n_groups": 1,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "shared_intermediate_size": 16,
    },
    "granite": {"logits_scaling": 0.25, "attention_multiplier": 0.5, "residual_multiplier": 0.7},
    "cohere": {"logit_scale": 3.0},
    "cohere2": {"logit_scale": 0.3, **_WINDOW_THEN_ALL},
    "gemma2": {
        **_WINDOW_THEN_ALL,
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 0.5,
        "final_logit_softcapping": 1.5,
    },
    "minimax": {
        "head_dim": 8,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "deepseek_v32": {
        **_LATENT,
        **_EXPERTS,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "index_n_heads": 2,
        "index_head_dim": 8,
    },
    "falcon_h1": {**_MAMBA, "head_dim": 8, "mamba_d_ssm": 64},
    "bloom": {"n_head": 4, "n_layer": 2},
    "rwkv": {"attention_hidden_size": 32, "context_length": 256},
    "nemotron": {},
    "mamba": {},
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2},
    "openai-gpt": {"n_embd": 32, "n_head": 4, "n_layer": 2},
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": 16, "block_types": ["recurrent", "attention"]},
    "opt": {"dropout": 0.3, "layerdrop": 0.5, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "mixtral": {"router_jitter_noise": 0.3, "num_local_experts": 4, "num_experts_per_tok": 2},
    "phimoe": {"router_jitter_noise": 0.3, "num_local_experts": 4, "num_experts_per_tok": 2},
    "electra": {"is_decoder": True, "embedding_size": 16},
}
FAMILIES = ["llama", "qwen2", "qwen3", "qwen3_moe"]
"""Families without unusual layers."""

TRAINED_FAMILIES = [*list(_FAMILIES)[: list(_FAMILIES).index("minimax") + 1]]
"""Families that the learner trains with and without sequence parallelism."""


def tiny_config(family: str, *, initializer_range: float, **options: Any) -> PreTrainedConfig:
    """Return the configuration of a tiny model of the family. ``options`` replaces fields of the configuration."""
    special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    own = {**_SHAPE, **special, "initializer_range": initializer_range, **_FAMILIES[family], **options}
    return AutoConfig.for_model(family, **own)


def save_tiny_model(
    directory: Path, family: str = "qwen3", seed: int = 0, *, initializer_range: float = 0.2, **options: Any
) -> str:
    """Save a tiny model. Its weights are large, so wrong masks or positions change the results very much."""
    torch.manual_seed(seed)
    config = tiny_config(family, initializer_range=initializer_range, **options)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return str(directory)


def plain_log_probs(model: torch.nn.Module, sequence: TokenSequence, *, temperature: float = 1.0) -> torch.Tensor:
    """Return the log-probs of the tokens in the loss. A plain forward pass computes them, without packing."""
    ids = torch.from_numpy(sequence.input_ids.astype(np.int64))
    log_probs = F.log_softmax(model(ids[None]).logits[0, :-1] / temperature, dim=-1)
    return log_probs.gather(-1, ids[1:, None])[:, 0][torch.from_numpy(sequence.loss_mask[1:])]


def random_sequences(num: int, seed: int = 0, *, longest: int = 24) -> list[TokenSequence]:
    """Return ``num`` random sequences of 2 to ``longest`` tokens. Each has a prompt and a response.

    Advantages have different orders of magnitude. Every second sequence gets the prompt of the sequence before it, if
    the prompt is shorter than the sequence.
    """
    rng = np.random.default_rng(seed)
    return _with_common_prompts([_sequence(rng, int(rng.integers(2, longest + 1))) for _ in range(num)])


def _with_common_prompts(sequences: list[TokenSequence]) -> list[TokenSequence]:
    for index in range(1, len(sequences), 2):
        before, own = sequences[index - 1], sequences[index]
        num_prompt = int(np.argmax(before.loss_mask))
        if num_prompt < len(own.input_ids):
            sequences[index] = replace(
                own,
                input_ids=np.concatenate((before.input_ids[:num_prompt], own.input_ids[num_prompt:])),
                loss_mask=np.arange(len(own.input_ids)) >= num_prompt,
            )
    return sequences


def _sequence(rng: np.random.Generator, length: int) -> TokenSequence:
    num_prompt = int(rng.integers(1, length))
    return TokenSequence(
        input_ids=rng.integers(0, VOCABULARY, length).astype(np.int32),
        loss_mask=np.arange(length) >= num_prompt,
        columns={
            "behavior_logprobs": -rng.uniform(0.5, 6.0, length).astype(np.float32),
            "advantages": np.full(length, rng.normal() * 10.0 ** rng.integers(-2, 2), dtype=np.float32),
        },
    )


def awkward_sequences(seed: int = 0) -> list[TokenSequence]:
    """Return sequences that are difficult to split over ranks and micro-batches.

    Some have only one token, or no token in the loss. Others have strided arrays or very different advantages.
    """
    rng = np.random.default_rng(seed)
    sequences = _with_common_prompts([_sequence(rng, int(rng.integers(2, 25))) for _ in range(13)])
    alone = TokenSequence(
        input_ids=np.array([5], dtype=np.int32),
        loss_mask=np.zeros(1, dtype=bool),
        columns={name: np.zeros(1, dtype=np.float32) for name in ("behavior_logprobs", "advantages")},
    )
    masked = replace(sequences[0], loss_mask=np.zeros(len(sequences[0].input_ids), dtype=bool))
    scaled = [
        sequence.with_column("advantages", np.full(len(sequence.input_ids), (-1.0) ** i * 10.0 ** (i - 4), np.float32))
        for i, sequence in enumerate(sequences[:8])
    ]
    return [alone, *(_strided(sequence) for sequence in scaled), masked, *sequences[8:], alone]


def _strided(sequence: TokenSequence) -> TokenSequence:
    """Return the same sequence with arrays that are strided views (every second entry of a larger array)."""

    def spread(values: np.ndarray) -> np.ndarray:
        return values.repeat(2)[::2]

    return TokenSequence(
        input_ids=spread(sequence.input_ids),
        loss_mask=spread(sequence.loss_mask),
        columns={name: spread(values) for name, values in sequence.columns.items()},
    )
