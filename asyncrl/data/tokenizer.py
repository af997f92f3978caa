"""The policy's tokenizer, as light as it can be read: prompts are checked before torch is imported."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .encode import Tokenizer

_FAST = "PreTrainedTokenizerFast"


def load_tokenizer(model_path: str, *, chat_template: bool) -> Tokenizer:
    """Return the tokenizer of a model directory.

    Args:
        model_path: Directory in Hugging Face layout.
        chat_template: Whether conversations are to be rendered, which takes transformers.

    Returns:
        The ``tokenizers`` library's own where ``tokenizer.json`` says all there is to say; transformers' otherwise.
    """
    if not chat_template and _is_plain_fast(Path(model_path)):
        return _FastTokenizer(Path(model_path, "tokenizer.json"))
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path)


def _is_plain_fast(folder: Path) -> bool:
    """A tokenizer class of its own may add tokens that the file does not name."""
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    return settings.get("tokenizer_class") == _FAST and (folder / "tokenizer.json").is_file()


class _FastTokenizer:
    """Implements `Tokenizer` without transformers."""

    chat_template = None

    def __init__(self, file: Path) -> None:
        from tokenizers import Tokenizer as Rust

        self.name_or_path = str(file.parent)
        self._rust = Rust.from_file(str(file))
        self._rust.no_truncation()
        self._rust.no_padding()

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> Mapping[str, Any]:
        """See `Tokenizer`."""
        return {"input_ids": [e.ids for e in self._rust.encode_batch(text, add_special_tokens=add_special_tokens)]}

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
        """See `Tokenizer`; never called, since this tokenizer has no template."""
        raise ValueError(f"{self.name_or_path}: the tokenizer has no chat template, got {conversation!r} and {kwargs}")
