"""The run's prompts as token ids: an endless, seeded, resumable stream over the training files, and held-out prompts.

The stream draws the order of an epoch when it reaches the epoch, so its state is a position. Most tokenizers are loaded
without transformers, so that prompts are checked before torch is imported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from asyncrl.core.types import Prompt

from .config import DataConfig, OverlongPrompts
from .row_files import Rows, read_rows

_FAST = "PreTrainedTokenizerFast"


class PromptStream:
    """An endless stream of the training prompts, shuffled in each epoch.

    The group id of a prompt is its position in the stream. The same seed, files and options give the same order on
    every machine. A restored stream continues with the next prompt of the saved stream. ``num_filtered`` prompts are
    left out because they are longer than ``max_prompt_tokens``.
    """

    def __init__(self, config: DataConfig, tokenizer: Tokenizer, *, seed: int) -> None:
        """Read and tokenize the training files. Raises `ValueError` that names a wrong file, row or column."""
        if not config.train_files:
            raise ValueError("data.train_files must name at least one parquet or jsonl file, got none; name one")
        self._prompts, self._files, self.num_filtered = _read_prompts(config.train_files, config, tokenizer)
        self._seed = seed
        self._shuffle = config.shuffle
        self._position = 0
        self._order = lru_cache(maxsize=1)(self._draw_order)

    @property
    def num_prompts(self) -> int:
        """Number of prompts per epoch."""
        return len(self._prompts)

    def take(self, count: int) -> list[Prompt]:
        """Return the next ``count`` prompts; ``count`` >= 0."""
        self._position += count
        return self.at(range(self._position - count, self._position))

    def at(self, positions: Sequence[int]) -> list[Prompt]:
        """Return the prompts with these group ids; the stream's position does not change."""
        places = [(position, *divmod(position, self.num_prompts)) for position in positions]
        return [
            replace(self._prompts[self._order(epoch)[index]], group_id=group_id) for group_id, epoch, index in places
        ]

    def state(self) -> dict[str, Any]:
        """Return the position and a description of the files, as JSON values."""
        return {
            "seed": self._seed,
            "position": self._position,
            "shuffle": self._shuffle,
            "num_prompts": self.num_prompts,
            "files": self._files,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state.

        Raises:
            ValueError: the state belongs to other files or options; the message names the difference.
        """
        now = self.state()
        if missing := sorted(set(now) - set(state)):
            raise ValueError(f"prompt stream: the saved state must have {missing}, got none; use the result of state()")
        saved, files = state["files"], now["files"]
        if len(saved) != len(files):
            raise ValueError(
                f"prompt stream: the saved state has {len(saved)} files ({', '.join(path for path, _ in saved)}), got "
                f"{len(files)} ({', '.join(path for path, _ in files)}); set data.train_files to the same files"
            )
        for (saved_path, saved_digest), (path, digest) in zip(saved, files, strict=True):
            if saved_digest != digest:
                raise ValueError(
                    f"prompt stream: {path} must be the file of the saved state ({saved_path}, digest {saved_digest}), "
                    f"got digest {digest}; restore the old file, or start a new run"
                )
        for key, option in (
            ("seed", "the seed"),
            ("shuffle", "data.shuffle"),
            ("num_prompts", "the number of prompts"),
        ):
            if state[key] != now[key]:
                raise ValueError(
                    f"prompt stream: {option} was {state[key]} when the state was saved, got {now[key]}; resume with "
                    "the options and the tokenizer of the saved run, or start a new run"
                )
        if not isinstance(state["position"], int) or state["position"] < 0:
            raise ValueError(f"prompt stream: position must be an integer >= 0, got {state['position']!r}")
        self._position = state["position"]

    def _draw_order(self, epoch: int) -> np.ndarray:
        if not self._shuffle:
            return np.arange(self.num_prompts)
        return np.random.default_rng([self._seed, epoch]).permutation(self.num_prompts)


def load_eval_prompts(config: DataConfig, tokenizer: Tokenizer) -> list[Prompt]:
    """Read the first ``eval_max_prompts`` held-out prompts (0: all); the group id is the index in the list."""
    if not config.eval_files:
        return []
    prompts, _, _ = _read_prompts(config.eval_files, config, tokenizer)
    return prompts[: config.eval_max_prompts or len(prompts)]


def _read_prompts(
    paths: Sequence[str], config: DataConfig, tokenizer: Tokenizer
) -> tuple[list[Prompt], list[list[str]], int]:
    """The prompts of several files with their indices as ids, path and digest of each file, and the number left out."""
    prompts: list[Prompt] = []
    files: list[list[str]] = []
    num_filtered = 0
    keys = [config.prompt_key, config.ground_truth_key, config.data_source_key, *config.extra_keys]
    for path in paths:
        rows = read_rows(path, [key for key in keys if key])
        files.append([path, rows.digest])
        encoded = _encode(rows, config, tokenizer)
        kept = _within_limit(rows, encoded, config)
        num_filtered += len(rows) - len(kept)
        columns = {key: rows.serializable_column(key) for key in keys[1:] if key}
        for row, source in enumerate(columns.get(config.data_source_key, ())):
            if not isinstance(source, str):
                where = f"{rows.where(row)}: column {config.data_source_key!r}"
                raise ValueError(f"{where} is {source!r}, expected a string; fix the row")
        for row in kept:
            encoded[row].flags.writeable = False
            prompts.append(
                Prompt(
                    group_id=len(prompts),
                    prompt_ids=encoded[row],
                    ground_truth=columns[config.ground_truth_key][row] if config.ground_truth_key else None,
                    data_source=columns[config.data_source_key][row] if config.data_source_key else "",
                    extra={key: columns[key][row] for key in config.extra_keys},
                )
            )
    if not prompts:
        raise ValueError(
            f"{', '.join(paths)}: at least one prompt must have at most data.max_prompt_tokens = "
            f"{config.max_prompt_tokens} tokens, got {num_filtered} longer prompts; raise the limit"
        )
    return prompts, files, num_filtered


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
    """Return the tokenizer of a model directory; with ``chat_template`` it can render conversations.

    It is a tokenizer of the ``tokenizers`` library if ``tokenizer.json`` defines it completely, else of transformers.
    """
    file = Path(model_path, "tokenizer.json")
    settings = json.loads(Path(model_path, "tokenizer_config.json").read_text())
    # Another tokenizer class may add tokens of its own.
    if not chat_template and settings.get("tokenizer_class") == _FAST and file.is_file():
        return _FastTokenizer(file)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path)


def _encode(rows: Rows, config: DataConfig, tokenizer: Tokenizer) -> list[np.ndarray]:
    """Tokenize the prompt column of one file: one [P] int32 array per row."""
    if config.chat_template and not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"data.chat_template is true but the tokenizer of {getattr(tokenizer, 'name_or_path', '')!r} has no "
            "template; use an instruct model's tokenizer, or plain string prompts with data.chat_template=false"
        )
    column = rows.column(config.prompt_key)
    texts = [
        _text(value, f"{rows.where(row)}: column {config.prompt_key!r}", config, tokenizer)
        for row, value in enumerate(column)
    ]
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


def _within_limit(rows: Rows, prompts: Sequence[np.ndarray], config: DataConfig) -> list[int]:
    """Return the indices of the rows whose prompt is within the limit; a longer one may be an error."""
    kept = [row for row, prompt in enumerate(prompts) if len(prompt) <= config.max_prompt_tokens]
    if len(kept) < len(prompts) and config.overlong_prompts == OverlongPrompts.error:
        row = next(row for row, prompt in enumerate(prompts) if len(prompt) > config.max_prompt_tokens)
        raise ValueError(
            f"{rows.where(row)}: column {config.prompt_key!r} has {len(prompts[row])} tokens, expected at most "
            f"data.max_prompt_tokens = {config.max_prompt_tokens} ({len(prompts) - len(kept)} of {len(prompts)} rows "
            "are longer); raise the limit, or set data.overlong_prompts=filter to leave them out"
        )
    return kept


def _text(value: Any, where: str, config: DataConfig, tokenizer: Tokenizer) -> str:
    """A prompt as text: a plain string, or rendered messages."""
    if config.chat_template and isinstance(value, list) and value:
        return render_chat(value, where, tokenizer, config.chat_template_kwargs, add_generation_prompt=True)
    if config.chat_template:
        remedy = "; set data.chat_template=false for plain prompts" if isinstance(value, str) else "; fix the row"
        raise ValueError(
            f"{where} is {_short(value)}, expected a list of {{role, content}} messages (data.chat_template is true)"
            f"{remedy}"
        )
    if not isinstance(value, str):
        remedy = "set data.chat_template=true" if isinstance(value, list) else "convert it to a string"
        raise ValueError(f"{where} is {_short(value)}, expected a string (data.chat_template is false); {remedy}")
    return value


def render_chat(
    messages: Sequence[Any],
    where: str,
    tokenizer: Tokenizer,
    template_kwargs: Mapping[str, Any],
    *,
    add_generation_prompt: bool,
) -> str:
    """Render one conversation, as read from a file, to text; ``where`` names its file and row in errors.

    Raises:
        ValueError: a message is not a mapping of role and content, or the template refuses the conversation.
    """
    for index, item in enumerate(messages):
        if not isinstance(item, Mapping):
            raise ValueError(
                f"{where}, message {index} is {_short(item)}, expected a mapping with role and content; fix the row"
            )
        for key in ("role", "content"):
            if not isinstance(item.get(key), str):
                raise ValueError(
                    f"{where}, message {index} has {key} = {_short(item.get(key))}, expected a string; only text "
                    "messages are supported"
                )
    # Parquet stores null for missing fields.
    plain = [{key: part for key, part in item.items() if part is not None} for item in messages]
    try:
        return tokenizer.apply_chat_template(
            plain, tokenize=False, add_generation_prompt=add_generation_prompt, **template_kwargs
        )
    except Exception as error:
        raise ValueError(
            f"{where}: the chat template refuses the messages ({error}), expected roles in an order that the template "
            "supports; fix the row"
        ) from error


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
