"""Models of a few thousand parameters, saved in Hugging Face layout, and batches to train them on."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

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
_FAMILIES = {
    "qwen2": lambda: Qwen2Config(**_SHAPE, tie_word_embeddings=False),
    "qwen3": lambda: Qwen3Config(**_SHAPE, head_dim=8, tie_word_embeddings=True),
    "llama": lambda: LlamaConfig(**_SHAPE, tie_word_embeddings=False),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **_SHAPE, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
}
FAMILIES = sorted(_FAMILIES)


def save_tiny_model(directory: Path, family: str = "qwen3", seed: int = 0) -> str:
    """Weights are spread out (0.2), so that a wrong mask or position is far from right."""
    torch.manual_seed(seed)
    config = _FAMILIES[family]()
    config.initializer_range = 0.2
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return str(directory)


def random_sequences(num: int, seed: int = 0, *, longest: int = 24) -> list[TokenSequence]:
    """Sequences of 2 to ``longest`` tokens with responses, behaviour log-probs and advantages of many magnitudes."""
    rng = np.random.default_rng(seed)
    return [_sequence(rng, int(rng.integers(2, longest + 1))) for _ in range(num)]


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
    """What splits get wrong: sequences of one token, without loss, in strided arrays, and of very unlike values."""
    rng = np.random.default_rng(seed)
    sequences = [_sequence(rng, int(rng.integers(2, 25))) for _ in range(13)]
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
    """The same sequence in arrays of every second entry."""

    def spread(values: np.ndarray) -> np.ndarray:
        return values.repeat(2)[::2]

    return TokenSequence(
        input_ids=spread(sequence.input_ids),
        loss_mask=spread(sequence.loss_mask),
        columns={name: spread(values) for name, values in sequence.columns.items()},
    )
