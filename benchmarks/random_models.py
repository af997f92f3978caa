"""Saves policies with random weights in Hugging Face layout. The benchmarks choose the sizes of these policies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, Qwen3Config

from rollout_fleet.episodes.chat_tokenizer import PLAIN_ROLES


def save_random_qwen3(directory: Path | str, *, layers: int, hidden: int, mlp: int, heads: int, **options: Any) -> str:
    """Save a random Qwen3 in float32 with tied embeddings and ``heads / 2`` key-value heads; return the folder's path.

    Args:
        directory: Target folder. It is created if it does not exist.
        layers: Decoder layers.
        hidden: Width of the residual stream.
        mlp: Width of the feed-forward layers.
        heads: Number of query heads; must be even.
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


def save_tokenizer(folder: Path) -> str:
    """Save a tokenizer with one token per byte, and with asyncrl's plain chat markers; return the folder's path."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={letter: place for place, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    markers = ["<|end|>", "<|tools|>", *(f"<|{role}|>" for role in PLAIN_ROLES)]
    tokenizer.add_special_tokens([AddedToken(marker, special=True) for marker in markers])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    return str(folder)
