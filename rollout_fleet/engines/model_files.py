"""The fleet's reads of a model directory: facts for the engines, and the tokenizer that decodes responses.

Imports nothing heavy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Facts of a model directory in Hugging Face layout.

    Attributes:
        vocab_size: Rows of the embedding; token ids are below this number.
        eos_ids: Tokens that end a response, from ``generation_config.json`` or ``config.json``.
        pad_id: Padding token; the first of ``eos_ids``, or 0, if the model has none.
        head_dim: Size of an attention head; 0 if heads differ in size.
    """

    vocab_size: int
    eos_ids: tuple[int, ...]
    pad_id: int
    head_dim: int


def read_model_facts(model_path: str) -> ModelFacts:
    """Read `ModelFacts`. Raises `ValueError` if ``model_path`` has no model."""
    config_file = Path(model_path) / "config.json"
    if not config_file.is_file():
        raise ValueError(f"model path must hold a config.json in Hugging Face layout, got {model_path!r}")
    config = json.loads(config_file.read_text())
    config = {**config, **config.get("text_config", {})}
    generation_file = Path(model_path) / "generation_config.json"
    generation = json.loads(generation_file.read_text()) if generation_file.is_file() else {}
    if not isinstance(config.get("vocab_size"), int):
        raise ValueError(f"{config_file} must name an integer vocab_size, got {config.get('vocab_size')!r}")
    eos_ids = _as_ids(generation.get("eos_token_id", config.get("eos_token_id")))
    pad_ids = _as_ids(generation.get("pad_token_id", config.get("pad_token_id")))
    pad_id = (*pad_ids, *eos_ids, 0)[0]
    return ModelFacts(vocab_size=config["vocab_size"], eos_ids=eos_ids, pad_id=pad_id, head_dim=_head_dim(config))


def load_decoder(model_path: str, *, special_tokens: bool = False) -> Decode:
    """Return a function from token ids to text; ``special_tokens`` keeps special tokens in the text.

    A ``tokenizer.json`` is read with the tokenizers library alone, so that the worker loads neither transformers nor
    torch. Raises `ValueError` that names the file if it is damaged.
    """
    tokenizer_file = Path(model_path) / "tokenizer.json"
    if tokenizer_file.is_file():
        from tokenizers import Tokenizer

        try:
            fast = Tokenizer.from_file(str(tokenizer_file))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"{tokenizer_file} must be a tokenizer, got {error}; restore it from a copy") from error
        return lambda token_ids: fast.decode(list(token_ids), skip_special_tokens=not special_tokens)
    from transformers import AutoTokenizer

    slow = AutoTokenizer.from_pretrained(model_path)
    return lambda token_ids: slow.decode(list(token_ids), skip_special_tokens=not special_tokens)


def _head_dim(config: Mapping[str, Any]) -> int:
    if config.get("v_head_dim") or config.get("kv_lora_rank"):  # latent attention, or values of another size
        return 0
    return config.get("head_dim") or config.get("hidden_size", 0) // (config.get("num_attention_heads") or 1)


def _as_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)
