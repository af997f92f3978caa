"""The run's prompts: a seeded, endless, resumable order over the training files, and the fixed held-out list.

An epoch's order is drawn when the stream reaches it, so the state is a position.
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
    """An endless stream of the training files' prompts, shuffled anew every epoch.

    The group id of a prompt is its position in the run. The same seed, files and options give the same order on every
    machine, and a restored stream goes on with the prompt that the saved one would have given next.
    """

    def __init__(self, config: DataConfig, tokenizer: Tokenizer, *, seed: int) -> None:
        """Read and tokenise the training files.

        Args:
            config: See `DataConfig`.
            tokenizer: The policy's.
            seed: Seed of the order; >= 0.

        Raises:
            ValueError: a file, row or column is not as the options say; the message names it.
        """
        if seed < 0:
            raise ValueError(f"seed must be >= 0, got {seed}; 0 is usual")
        if not config.train_files:
            raise ValueError("data.train_files is empty, expected at least one parquet or jsonl file; name one")
        self._table = _PromptTable(config.train_files, config, tokenizer)
        self._seed = seed
        self._shuffle = config.shuffle
        self._position = 0
        self._order = lru_cache(maxsize=1)(self._draw_order)

    @property
    def num_prompts(self) -> int:
        """Prompts of one epoch."""
        return len(self._table)

    @property
    def num_filtered(self) -> int:
        """Prompts left out because they are longer than ``max_prompt_tokens``."""
        return self._table.num_filtered

    def take(self, count: int) -> list[Prompt]:
        """The next ``count`` prompts.

        Raises:
            ValueError: ``count`` is negative.
        """
        if count < 0:
            raise ValueError(f"take: count must be >= 0, got {count}")
        prompts = [self._prompt(position) for position in range(self._position, self._position + count)]
        self._position += count
        return prompts

    def at(self, positions: Sequence[int]) -> list[Prompt]:
        """The prompts at these positions, which are their group ids; the stream stays where it is."""
        return [self._prompt(position) for position in positions]

    def state(self) -> dict[str, Any]:
        """Where the stream stands, small and plain enough for JSON and msgpack."""
        return {
            "seed": self._seed,
            "position": self._position,
            "shuffle": self._shuffle,
            "num_prompts": self.num_prompts,
            "files": [[rows.path, rows.digest] for rows in self._table.files],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state.

        Raises:
            ValueError: the state is of other files or options than this stream's; the message names the difference.
        """
        now = self.state()
        if missing := sorted(set(now) - set(state)):
            raise ValueError(f"prompt stream: the saved state lacks {missing}; it is not one that state() gave")
        _check_files(state["files"], now["files"])
        for key, option in (
            ("seed", "the seed"),
            ("shuffle", "data.shuffle"),
            ("num_prompts", "the number of prompts"),
        ):
            if state[key] != now[key]:
                raise ValueError(
                    f"prompt stream: {option} was {state[key]} when the state was saved, got {now[key]}; resume with "
                    "the options and the tokenizer of the saved run, or start anew"
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
    """The held-out prompts in the files' order; the group id is the place in the list.

    Returns:
        At most ``eval_max_prompts`` prompts, all of them when it is 0; none without ``eval_files``.

    Raises:
        ValueError: as `PromptStream`.
    """
    if not config.eval_files:
        return []
    table = _PromptTable(config.eval_files, config, tokenizer)
    count = min(len(table), config.eval_max_prompts or len(table))
    return [table.prompt(index, group_id=index) for index in range(count)]


class _PromptTable:
    """The prompts of several files as one list: tokens, ground truth, data source and further columns of each."""

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
                f"{', '.join(paths)}: all {self.num_filtered} prompts are longer than data.max_prompt_tokens = "
                f"{config.max_prompt_tokens}, expected at least one that is not; raise the limit"
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
            raise ValueError(f"{rows.where(row)}: column {key!r} is {source!r}, expected a string; mend the row")
    return sources


def _check_files(saved: Sequence[Sequence[str]], now: Sequence[Sequence[str]]) -> None:
    if len(saved) != len(now):
        raise ValueError(
            f"prompt stream: the saved state is of {len(saved)} files ({', '.join(path for path, _ in saved)}), got "
            f"{len(now)} ({', '.join(path for path, _ in now)}); name the same files in data.train_files"
        )
    for (saved_path, saved_digest), (path, digest) in zip(saved, now, strict=True):
        if saved_digest != digest:
            raise ValueError(
                f"prompt stream: {path} is not the file that the state was saved with ({saved_path}, digest "
                f"{saved_digest}, got {digest}); put the old file back, or start anew"
            )
