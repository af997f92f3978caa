"""The run's prompts: an endless, seeded, resumable stream over the training files, and the held-out prompts.

The stream draws the order of an epoch when it reaches the epoch, so its state is a position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from asyncrl.core.types import Prompt

from .config import DataConfig
from .row_files import Rows, read_rows
from .tokenization import Tokenizer, encode_prompts, split_overlong


class PromptStream:
    """An endless stream of the training prompts, shuffled in each epoch.

    The group id of a prompt is its position in the stream. The same seed, files and options give the same order on
    every machine. A restored stream continues with the next prompt of the saved stream.
    """

    def __init__(self, config: DataConfig, tokenizer: Tokenizer, *, seed: int) -> None:
        """Read and tokenize the training files.

        Args:
            config: Files, columns and limits.
            tokenizer: The policy's tokenizer.
            seed: Seed of the order; >= 0.

        Raises:
            ValueError: a file, row or column does not match the options; the message names it.
        """
        if not config.train_files:
            raise ValueError("data.train_files must name at least one parquet or jsonl file, got none; name one")
        self._table = _PromptTable(config.train_files, config, tokenizer)
        self._seed = seed
        self._shuffle = config.shuffle
        self._position = 0
        self._order = lru_cache(maxsize=1)(self._draw_order)

    @property
    def num_prompts(self) -> int:
        """Number of prompts per epoch."""
        return len(self._table)

    @property
    def num_filtered(self) -> int:
        """Number of prompts left out because they are longer than ``max_prompt_tokens``."""
        return self._table.num_filtered

    def take(self, count: int) -> list[Prompt]:
        """Return the next ``count`` prompts; ``count`` >= 0."""
        prompts = [self._prompt(position) for position in range(self._position, self._position + count)]
        self._position += count
        return prompts

    def at(self, positions: Sequence[int]) -> list[Prompt]:
        """Return the prompts with these group ids; the stream's position does not change."""
        return [self._prompt(position) for position in positions]

    def state(self) -> dict[str, Any]:
        """Return the position and a description of the files, as JSON values."""
        return {
            "seed": self._seed,
            "position": self._position,
            "shuffle": self._shuffle,
            "num_prompts": self.num_prompts,
            "files": [[rows.path, rows.digest] for rows in self._table.files],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state.

        Raises:
            ValueError: the state belongs to other files or options; the message names the difference.
        """
        now = self.state()
        if missing := sorted(set(now) - set(state)):
            raise ValueError(f"prompt stream: the saved state must have {missing}, got none; use the result of state()")
        _check_files(state["files"], now["files"])
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

    def _prompt(self, position: int) -> Prompt:
        epoch, index = divmod(position, self.num_prompts)
        return self._table.prompt(int(self._order(epoch)[index]), group_id=position)

    def _draw_order(self, epoch: int) -> np.ndarray:
        if not self._shuffle:
            return np.arange(self.num_prompts)
        return np.random.default_rng([self._seed, epoch]).permutation(self.num_prompts)


def load_eval_prompts(config: DataConfig, tokenizer: Tokenizer) -> list[Prompt]:
    """Read the first ``eval_max_prompts`` held-out prompts (0: all); the group id is the index in the list.

    Raises:
        ValueError: as `PromptStream`.
    """
    if not config.eval_files:
        return []
    table = _PromptTable(config.eval_files, config, tokenizer)
    count = min(len(table), config.eval_max_prompts or len(table))
    return [table.prompt(index, group_id=index) for index in range(count)]


class _PromptTable:
    """The prompts of several files as one list, with ground truth, data source and further columns."""

    def __init__(self, paths: Sequence[str], config: DataConfig, tokenizer: Tokenizer) -> None:
        self.files: list[Rows] = []
        self.num_filtered = 0
        self._prompts: list[tuple[np.ndarray, Any, str, dict[str, Any]]] = []
        keys = [config.prompt_key, config.ground_truth_key, config.data_source_key, *config.extra_keys]
        for path in paths:
            rows = read_rows(path, [key for key in keys if key])
            self._append(rows, config, tokenizer)
            self.files.append(Rows(path=path, unit=rows.unit, numbers=(), values=(), digest=rows.digest))
        if not self._prompts:
            raise ValueError(
                f"{', '.join(paths)}: at least one prompt must have at most data.max_prompt_tokens = "
                f"{config.max_prompt_tokens} tokens, got {self.num_filtered} longer prompts; raise the limit"
            )

    def __len__(self) -> int:
        return len(self._prompts)

    def prompt(self, index: int, *, group_id: int) -> Prompt:
        ids, ground_truth, data_source, extra = self._prompts[index]
        return Prompt(
            group_id=group_id, prompt_ids=ids, ground_truth=ground_truth, data_source=data_source, extra=extra
        )

    def _append(self, rows: Rows, config: DataConfig, tokenizer: Tokenizer) -> None:
        prompts = encode_prompts(rows, config, tokenizer)
        kept = split_overlong(rows, prompts, config)
        self.num_filtered += len(rows) - len(kept)
        truths = rows.serializable_column(config.ground_truth_key) if config.ground_truth_key else [None] * len(rows)
        sources = _data_sources(rows, config.data_source_key) if config.data_source_key else [""] * len(rows)
        extras = {key: rows.serializable_column(key) for key in config.extra_keys}
        for row in kept:
            prompts[row].flags.writeable = False
            extra = {key: column[row] for key, column in extras.items()}
            self._prompts.append((prompts[row], truths[row], sources[row], extra))


def _data_sources(rows: Rows, key: str) -> list[str]:
    sources = rows.serializable_column(key)
    for row, source in enumerate(sources):
        if not isinstance(source, str):
            raise ValueError(f"{rows.where(row)}: column {key!r} is {source!r}, expected a string; fix the row")
    return sources


def _check_files(saved: Sequence[Sequence[str]], now: Sequence[Sequence[str]]) -> None:
    if len(saved) != len(now):
        raise ValueError(
            f"prompt stream: the saved state has {len(saved)} files ({', '.join(path for path, _ in saved)}), got "
            f"{len(now)} ({', '.join(path for path, _ in now)}); set data.train_files to the same files"
        )
    for (saved_path, saved_digest), (path, digest) in zip(saved, now, strict=True):
        if saved_digest != digest:
            raise ValueError(
                f"prompt stream: {path} must be the file of the saved state ({saved_path}, digest {saved_digest}), got "
                f"digest {digest}; restore the old file, or start a new run"
            )
