"""Prompts as token ids: plain strings, or chat messages that the tokenizer's template renders.

Most tokenizers are loaded without transformers, so that prompts are checked before torch is imported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from .config import DataConfig, OverlongPrompts
from .row_files import Rows

_FAST = "PreTrainedTokenizerFast"


class Tokenizer(Protocol):
    """The interface of a transformers tokenizer that this package uses."""

    chat_template: Any

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> Mapping[str, Any]:
        """Return ``input_ids``, a list of token ids for each text."""
        ...

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
        """Render one conversation."""
        ...

    def get_vocab(self) -> Mapping[str, int]:
        """Return all tokens with their ids, including added tokens."""
        ...


def load_tokenizer(model_path: str, *, chat_template: bool) -> Tokenizer:
    """Return the tokenizer of a model directory.

    Args:
        model_path: Directory in Hugging Face layout.
        chat_template: Whether the caller renders conversations, which needs transformers.

    Returns:
        A tokenizer of the ``tokenizers`` library if ``tokenizer.json`` defines it completely; else of transformers.
    """
    file = Path(model_path, "tokenizer.json")
    settings = json.loads(Path(model_path, "tokenizer_config.json").read_text())
    # Another tokenizer class may add tokens of its own.
    if not chat_template and settings.get("tokenizer_class") == _FAST and file.is_file():
        return _FastTokenizer(file)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path)


def encode_prompts(rows: Rows, config: DataConfig, tokenizer: Tokenizer) -> list[np.ndarray]:
    """Tokenize the prompt column of one file.

    Returns:
        One [P] int32 array per row, without the limit of `split_overlong`.

    Raises:
        ValueError: a prompt does not match ``chat_template``, or has no tokens.
    """
    if config.chat_template and not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"data.chat_template is true but the tokenizer of {getattr(tokenizer, 'name_or_path', '')!r} has no "
            "template; use an instruct model's tokenizer, or plain string prompts with data.chat_template=false"
        )
    column = rows.column(config.prompt_key)
    render = _render_chat if config.chat_template else _plain_text
    texts = [render(value, rows.where(row), config, tokenizer) for row, value in enumerate(column)]
    # A template writes the special tokens; for a plain prompt, the tokenizer adds them.
    encoded = tokenizer(texts, add_special_tokens=not config.chat_template)["input_ids"]
    prompts = [np.asarray(ids, dtype=np.int32) for ids in encoded]
    for row, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(
                f"{rows.where(row)}: column {config.prompt_key!r} is {column[row]!r}, which has no tokens, expected at "
                "least one; remove the row"
            )
    return prompts


def split_overlong(rows: Rows, prompts: Sequence[np.ndarray], config: DataConfig) -> list[int]:
    """Return the indices of the rows whose prompt is within the limit.

    Raises:
        ValueError: a prompt is longer and ``overlong_prompts`` is ``error``.
    """
    kept = [row for row, prompt in enumerate(prompts) if len(prompt) <= config.max_prompt_tokens]
    if len(kept) < len(prompts) and config.overlong_prompts == OverlongPrompts.error:
        row = next(row for row, prompt in enumerate(prompts) if len(prompt) > config.max_prompt_tokens)
        raise ValueError(
            f"{rows.where(row)}: column {config.prompt_key!r} has {len(prompts[row])} tokens, expected at most "
            f"data.max_prompt_tokens = {config.max_prompt_tokens} ({len(prompts) - len(kept)} of {len(prompts)} rows "
            "are longer); raise the limit, or set data.overlong_prompts=filter to leave them out"
        )
    return kept


def _plain_text(value: Any, where: str, config: DataConfig, tokenizer: Tokenizer) -> str:
    if isinstance(value, str):
        return value
    remedy = "set data.chat_template=true" if isinstance(value, list) else "convert it to a string"
    raise ValueError(
        f"{where}: column {config.prompt_key!r} is {_short(value)}, expected a string (data.chat_template is false); "
        f"{remedy}"
    )


def _render_chat(value: Any, where: str, config: DataConfig, tokenizer: Tokenizer) -> str:
    if not isinstance(value, list) or not value:
        remedy = "; set data.chat_template=false for plain prompts" if isinstance(value, str) else "; fix the row"
        raise ValueError(
            f"{where}: column {config.prompt_key!r} is {_short(value)}, expected a list of {{role, content}} "
            f"messages (data.chat_template is true){remedy}"
        )
    where = f"{where}: column {config.prompt_key!r}"
    return render_chat(value, where, tokenizer, config.chat_template_kwargs, add_generation_prompt=True)


def render_chat(
    messages: Sequence[Any],
    where: str,
    tokenizer: Tokenizer,
    template_kwargs: Mapping[str, Any],
    *,
    add_generation_prompt: bool,
) -> str:
    """Render one conversation to text.

    Args:
        messages: Messages with role and content, as read from a file.
        where: File and row, for messages.
        tokenizer: A tokenizer with a chat template.
        template_kwargs: Further arguments of the template.
        add_generation_prompt: Add the beginning of the assistant's turn at the end.

    Raises:
        ValueError: a message is not a mapping of role and content, or the template refuses the conversation.
    """
    plain = [_message(item, f"{where}, message {index}") for index, item in enumerate(messages)]
    try:
        return tokenizer.apply_chat_template(
            plain, tokenize=False, add_generation_prompt=add_generation_prompt, **template_kwargs
        )
    except Exception as error:
        raise ValueError(
            f"{where}: the chat template refuses the messages ({error}), expected roles in an order that the template "
            "supports; fix the row"
        ) from error


def _message(item: Any, where: str) -> dict[str, Any]:
    if not isinstance(item, Mapping):
        raise ValueError(f"{where} is {_short(item)}, expected a mapping with role and content; fix the row")
    for key in ("role", "content"):
        if not isinstance(item.get(key), str):
            raise ValueError(
                f"{where} has {key} = {_short(item.get(key))}, expected a string; only text messages are supported"
            )
    return {key: part for key, part in item.items() if part is not None}  # parquet stores null for missing fields


def _short(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:60] + '…'} ({type(value).__name__})"


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
        """Return ``input_ids`` for each text."""
        return {"input_ids": [e.ids for e in self._rust.encode_batch(text, add_special_tokens=add_special_tokens)]}

    def get_vocab(self) -> Mapping[str, int]:
        """Return all tokens with their ids."""
        return self._rust.get_vocab()

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
        """Raise an error: this tokenizer has no template."""
        raise ValueError(f"{self.name_or_path}: the tokenizer has no chat template, got {conversation!r} and {kwargs}")
