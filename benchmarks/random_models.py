"""Random policies in Hugging Face folders, with the sizes that the benchmarks need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, Qwen3Config


def save_random_qwen3(directory: Path | str, *, layers: int, hidden: int, mlp: int, heads: int, **options: Any) -> str:
    """Write a random Qwen3 in float32 with tied embeddings and half as many key-value heads. Returns the folder.

    Args:
        directory: Target folder; it is created if it does not exist.
        layers: Decoder layers.
        hidden: Width of the residual stream.
        mlp: Width of the feed-forward layers.
        heads: Query heads; even.
        options: More options of `Qwen3Config`, such as ``vocab_size`` and ``head_dim``.
    """
    config = Qwen3Config(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        tie_word_embeddings=True,
        **options,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return str(directory)
