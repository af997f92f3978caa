"""Loads a model's tokenizer. Where possible, the package transformers is not used, because it would import torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

_FAST = "PreTrainedTokenizerFast"


class Tokenizer(Protocol):
    """The methods of a transformers tokenizer that this package uses."""

    chat_template: Any

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> Mapping[str, Any]:
        """Return ``input_ids``, a list of token ids for each text."""
        ...

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
        """Render the messages of one conversation with the chat template, to text or token ids."""
        ...

    def get_vocab(self) -> Mapping[str, int]:
        """Return a mapping from the text of each token to its id, including added tokens."""
        ...


def load_tokenizer(model_path: str, *, chat_template: bool) -> Tokenizer:
    """Load the tokenizer of a model directory.

    With ``chat_template``, transformers loads a tokenizer that can render conversations. Otherwise, the library
    ``tokenizers`` loads a tokenizer of the class ``PreTrainedTokenizerFast``, because transformers would import torch.
    Transformers loads all other classes.

    Raises:
        ValueError: transformers cannot load the tokenizer, for example because a file is missing.
    """
    file = Path(model_path, "tokenizer.json")
    settings = json.loads(Path(model_path, "tokenizer_config.json").read_text())
    # Other classes need transformers, because they may add special tokens that ``tokenizer.json`` does not have.
    if not chat_template and settings.get("tokenizer_class") == _FAST and file.is_file():
        return _FastTokenizer(file)
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model_path)
    except (ImportError, OSError, TypeError, ValueError) as error:
        names = sorted(path.name for path in Path(model_path).glob("*token*"))
        raise ValueError(
            f"{model_path} must hold a tokenizer that transformers can load, got {', '.join(names)} "
            f"({' '.join(str(error).split())}); copy all files of the tokenizer from the original model, such as "
            "tokenizer.json"
        ) from error


class _FastTokenizer:
    """A `Tokenizer` that reads ``tokenizer.json`` without the package transformers."""

    chat_template = None

    def __init__(self, file: Path) -> None:
        from tokenizers import Tokenizer as Rust

        self.name_or_path = str(file.parent)
        self._rust = Rust.from_file(str(file))
        self._rust.no_truncation()
        self._rust.no_padding()

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> Mapping[str, Any]:
        return {"input_ids": [e.ids for e in self._rust.encode_batch(text, add_special_tokens=add_special_tokens)]}

    def get_vocab(self) -> Mapping[str, int]:
        return self._rust.get_vocab()

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
        raise ValueError(
            f"{self.name_or_path}: the tokenizer has no chat template, so it cannot render the conversation "
            f"{conversation!r} with the options {kwargs}"
        )
