"""The run's prompts as token ids: an endless, seeded, resumable stream over the training files, and held-out prompts.

The stream draws the order of an epoch when it reaches the epoch, so its state is a position. Prompts are checked before
torch is imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from asyncrl.core.image_files import VISION_FAMILIES, ImageReader, content_of, with_placeholders
from asyncrl.core.types import Prompt

from .chat import (
    Message,
    check_template,
    fill_images,
    images_of,
    read_messages,
    read_tools,
    render_chat,
    short,
    with_loaded_images,
    without_images,
)
from .config import DataConfig, OverlongPrompts
from .row_files import Rows, read_rows
from .tokenizer import Tokenizer


class PromptStream:
    """An endless stream of the training prompts, shuffled in each epoch.

    The group id of a prompt is its position in the stream. The same seed, files and options give the same order on
    every machine. A restored stream continues with the next prompt of the saved stream. ``num_filtered`` prompts are
    left out because they are longer than ``max_prompt_tokens``.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Tokenizer,
        *,
        seed: int,
        has_environment: bool = False,
        images: ImageReader | None = None,
    ) -> None:
        """Read and tokenize the training files; ``has_environment``: the run has an environment, which needs messages.

        ``images`` reads the images of rows, None for a text model. Image files are read again when their prompt is
        taken.

        Raises:
            ValueError: a file, row or column does not match ``config``; the message names it.
        """
        if not config.train_files:
            raise ValueError("data.train_files must name at least one parquet or jsonl file, got none; name one")
        self._prompts, self._files, self.num_filtered = _read_prompts(
            config.train_files, config, tokenizer, has_environment=has_environment, images=images
        )
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
        return [_loaded(self._prompts[self._order(epoch)[index]], group_id) for group_id, epoch, index in places]

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


def load_eval_prompts(
    config: DataConfig, tokenizer: Tokenizer, *, has_environment: bool = False, images: ImageReader | None = None
) -> list[Prompt]:
    """Read the first ``eval_max_prompts`` held-out prompts (0: all); the group id is the index in the list.

    ``has_environment`` and ``images``: as in `PromptStream`.
    """
    if not config.eval_files:
        return []
    prompts, _, _ = _read_prompts(config.eval_files, config, tokenizer, has_environment=has_environment, images=images)
    return [_loaded(prompt, prompt.group_id) for prompt in prompts[: config.eval_max_prompts or len(prompts)]]


def _loaded(prompt: Prompt, group_id: int) -> Prompt:
    """A prompt with its images, under an id."""
    return replace(prompt, group_id=group_id, messages=with_loaded_images(prompt.messages, f"prompt group {group_id}"))


def _read_prompts(
    paths: Sequence[str],
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    has_environment: bool,
    images: ImageReader | None,
) -> tuple[list[Prompt], list[list[str]], int]:
    """The prompts of several files with their indices as ids, path and digest of each file, and the number left out."""
    prompts: list[Prompt] = []
    files: list[list[str]] = []
    num_filtered = 0
    if config.chat_template:
        check_template("data", tokenizer)
    if config.images_key and images is None:
        raise ValueError(
            f"data.images_key is {config.images_key!r}, but the model has no vision tower that the learner trains, "
            f"expected one of the families {', '.join(VISION_FAMILIES)}; set model.path to one, or leave it empty"
        )
    for path in paths:
        rows = read_rows(path, config.keys)
        files.append([path, rows.digest])
        read = _prompts_of(rows, config, tokenizer, has_environment=has_environment, images=images)
        kept = _within_limit(rows, read, config)
        num_filtered += len(rows) - len(kept)
        prompts += [replace(prompt, group_id=index) for index, prompt in enumerate(kept, start=len(prompts))]
    if not prompts:
        raise ValueError(
            f"{', '.join(paths)}: at least one prompt must have at most data.max_prompt_tokens = "
            f"{config.max_prompt_tokens} tokens, got {num_filtered} longer prompts; raise the limit"
        )
    return prompts, files, num_filtered


def _prompts_of(
    rows: Rows, config: DataConfig, tokenizer: Tokenizer, *, has_environment: bool, images: ImageReader | None
) -> list[Prompt]:
    """The prompt of each row of one file; the ids are not set yet."""
    empty = [()] * len(rows)
    columns = {key: rows.serializable_column(key) for key in (config.ground_truth_key, *config.extra_keys) if key}
    sources = _names(rows, config.data_source_key, "a string")
    environments = _names(
        rows, config.environment_key, "an environment's name, or null for the run's", may_be_null=True
    )
    options = _options(rows, config.environment_options_key)
    tools: Sequence[tuple[Message, ...]] = read_tools(rows, config.tools_key) if config.tools_key else empty
    messages: Sequence[tuple[Message, ...]] = empty
    where = [f"{rows.where(row)}: column {config.prompt_key!r}" for row in range(len(rows))]
    if config.chat_template:
        system, has_images = config.system_prompt, images is not None
        messages = read_messages(rows, config.prompt_key, system_prompt=system, has_images=has_images)
        if config.images_key:
            columns_of_images = rows.column(config.images_key)
            messages = [
                fill_images(own, columns_of_images[row], f"{rows.where(row)}: column {config.images_key!r}")
                for row, own in enumerate(messages)
            ]
        rendered = zip(map(without_images, messages), where, tools, strict=True)
        kwargs = config.chat_template_kwargs
        texts = [render_chat(m, w, tokenizer, kwargs, add_generation_prompt=True, tools=t) for m, w, t in rendered]
    else:
        texts = [_text(value, place) for value, place in zip(rows.column(config.prompt_key), where, strict=True)]
        asks = zip(texts, environments, strict=True)
        messages = [({"role": "user", "content": text},) if has_environment or own else () for text, own in asks]
    # A template writes the special tokens; for a plain prompt, the tokenizer adds them.
    encoded = tokenizer(texts, add_special_tokens=not config.chat_template)["input_ids"]
    prompts = []
    for row, ids in enumerate(encoded):
        if not len(ids):
            shown = rows.column(config.prompt_key)[row]
            raise ValueError(f"{where[row]} is {shown!r}, which has no tokens, expected at least one; remove the row")
        if images is not None:
            counts = [
                images.num_tokens(content_of(source, at, from_files=True), at)
                for at, source in _named(images_of(messages[row]), where[row])
            ]
            ids = with_placeholders(ids, counts, images.token_id, where[row])
        prompt_ids = np.asarray(ids, dtype=np.int32)
        prompt_ids.flags.writeable = False
        prompts.append(
            Prompt(
                group_id=row,
                prompt_ids=prompt_ids,
                ground_truth=columns[config.ground_truth_key][row] if config.ground_truth_key else None,
                data_source=sources[row],
                extra={key: columns[key][row] for key in config.extra_keys},
                messages=messages[row],
                tools=tools[row],
                environment=environments[row],
                environment_options=options[row],
            )
        )
    return prompts


def _named(images: Sequence[Any], where: str) -> list[tuple[str, Any]]:
    return [(f"{where}, image {place}", image) for place, image in enumerate(images)]


def _names(rows: Rows, key: str, expected: str, *, may_be_null: bool = False) -> list[str]:
    """A column of strings; empty strings without a column, and for null if it is allowed."""
    if not key:
        return [""] * len(rows)
    values = rows.column(key) if may_be_null else rows.serializable_column(key)
    names = ["" if value is None else value for value in values]
    for row, name in enumerate(names):
        if not isinstance(name, str):
            raise ValueError(f"{rows.where(row)}: column {key!r} is {name!r}, expected {expected}; fix the row")
    return names


def _options(rows: Rows, key: str) -> Sequence[Mapping[str, Any]]:
    """Read a column of mappings from strings, or of JSON text of such mappings. A missing column and null give {}."""
    if not key:
        return [{}] * len(rows)
    values = [{} if value is None else value for value in rows.structures(key, is_json=True)]
    for row, value in enumerate(values):
        if not isinstance(value, Mapping):
            raise ValueError(
                f"{rows.where(row)}: column {key!r} is {short(value)}, expected a mapping of options, its JSON, or "
                "null; fix the row"
            )
    return values


def _within_limit(rows: Rows, prompts: Sequence[Prompt], config: DataConfig) -> list[Prompt]:
    """Return the prompts within the limit; a longer one may be an error."""
    lengths = [len(prompt.prompt_ids) for prompt in prompts]
    kept = [prompt for prompt, length in zip(prompts, lengths, strict=True) if length <= config.max_prompt_tokens]
    if len(kept) < len(prompts) and config.overlong_prompts == OverlongPrompts.error:
        row = next(row for row, length in enumerate(lengths) if length > config.max_prompt_tokens)
        raise ValueError(
            f"{rows.where(row)}: column {config.prompt_key!r} has {lengths[row]} tokens, expected at most "
            f"data.max_prompt_tokens = {config.max_prompt_tokens} ({len(prompts) - len(kept)} of {len(prompts)} rows "
            "are longer); raise the limit, or set data.overlong_prompts=filter to leave them out"
        )
    return kept


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        remedy = "set data.chat_template=true" if isinstance(value, list) else "convert it to a string"
        raise ValueError(f"{where} is {short(value)}, expected a string (data.chat_template is false); {remedy}")
    return value
