"""Turns response tokens into the text that rewards read, with the model's own tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

Decode = Callable[[Sequence[int]], str]


def load_decoder(model_path: str) -> Decode:
    """Return a function from token ids to text without special tokens.

    A ``tokenizer.json`` is read by the tokenizers library alone, which spares the worker transformers and torch.
    """
    tokenizer_file = Path(model_path) / "tokenizer.json"
    if tokenizer_file.is_file():
        from tokenizers import Tokenizer

        fast = Tokenizer.from_file(str(tokenizer_file))
        return lambda token_ids: fast.decode(list(token_ids), skip_special_tokens=True)
    from transformers import AutoTokenizer

    slow = AutoTokenizer.from_pretrained(model_path)
    return lambda token_ids: slow.decode(list(token_ids), skip_special_tokens=True)
