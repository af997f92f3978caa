"""Prompts as token ids: an endless stream of training prompts, and a list of held-out prompts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from asyncrl.core.errors import SamplerError
from asyncrl.core.image_files import VISION_FAMILIES, ImageReader, content_of, with_placeholders
from asyncrl.core.types import GroupSummary, Prompt

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
from .samplers import UNIFORM, Sampler, make_sampler
from .tokenizer import Tokenizer

_OF_SAMPLER = {"sampler", "chosen", "sampler_state"}


class PromptStream:
    """An endless stream of the training prompts, shuffled in each pass over the data, or chosen by ``data.sampler``.

    The group id of a prompt is the prompt's position in the stream. The same seed, files and options give the same
    order on every machine. ``num_filtered`` is the number of prompts that the stream leaves out, because they are
    longer than ``max_prompt_tokens``. A run that goes back to a checkpoint calls `repeat_unfinished`.
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
        """Read and tokenize the training files.

        If ``has_environment``, all prompts have messages. ``images`` reads image files; it is None for a text model.
        An image file is read twice: in this call, to count its tokens, and when the stream returns its prompt.

        Raises:
            ValueError: a file, row or column does not match ``config``.
        """
        if not config.train_files:
            raise ValueError("data.train_files must name at least one parquet or jsonl file, got none; name one")
        reader = _PromptReader(config, tokenizer, has_environment=has_environment, images=images)
        self._prompts, self._files, self.num_filtered = reader.read(config.train_files)
        for key in config.extra_keys:
            if not any(key in prompt.extra for prompt in self._prompts):
                raise ValueError(
                    f"{', '.join(config.train_files)}: at least one row must have a value in the column {key!r} of "
                    "data.extra_keys, got none; correct the name, or leave it out"
                )
        self._seed = seed
        self._shuffle = config.shuffle
        self._position = 0
        self._again: list[int] = []
        self._order = lru_cache(maxsize=1)(self._draw_order)
        self._chosen: list[int] = []
        self._sampler: Sampler | None = None
        self._sampler_name = config.sampler
        if config.sampler != UNIFORM:
            self._sampler = make_sampler(
                config.sampler,
                [prompt.data_source for prompt in self._prompts],
                seed=seed,
                shuffle=config.shuffle,
                weights=config.source_weights,
                options=config.sampler_options,
            )

    @property
    def num_prompts(self) -> int:
        """Number of prompts in the training files, without the prompts that are too long."""
        return len(self._prompts)

    @property
    def data_sources(self) -> set[str]:
        """Names of the data sources of the rows."""
        return {prompt.data_source for prompt in self._prompts}

    @property
    def environments(self) -> set[str]:
        """Names of the environments that rows or data sources select. The run's own environment is not included."""
        return {prompt.environment for prompt in self._prompts} - {""}

    def take(self, count: int) -> list[Prompt]:
        """Return the next ``count`` prompts, and advance the stream. ``count`` must be >= 0.

        After a call of `repeat_unfinished`, the repeated prompts come first. They do not advance the stream.
        """
        again, self._again = self._again[:count], self._again[count:]
        start, self._position = self._position, self._position + count - len(again)
        if self._sampler is not None:
            self._chosen += [self._choose(self._sampler) for _ in range(start, self._position)]
        return self.at([*again, *range(start, self._position)])

    def repeat_unfinished(self, finished: Sequence[tuple[int, int]]) -> None:
        """Make `take` return the unfinished prompts again, before it returns new prompts.

        Unfinished prompts are all earlier prompts that are not in ``finished``, a list of sorted ranges [start, end) of
        group ids. The buffer skips prompts that it already has.
        """
        self._again, start = [], 0
        for first, end in [*finished, (self._position, self._position)]:
            self._again.extend(range(start, first))
            start = end

    def first(self) -> Prompt:
        """Return one prompt without advancing the stream.

        Without a sampler, it is the first prompt of the first pass over the data. With a sampler, it is the prompt that
        the sampler would choose next.
        """
        row = self._order(0)[0] if self._sampler is None else self._choose(copy.deepcopy(self._sampler))
        return _loaded(self._prompts[row], 0)

    def at(self, positions: Sequence[int]) -> list[Prompt]:
        """Return the prompts at ``positions``, which are also the prompts' group ids. The stream does not advance.

        If a sampler chooses the prompts, `take` must already have returned these prompts.
        """
        return [_loaded(self._prompts[self._row(position)], position) for position in positions]

    def _row(self, position: int) -> int:
        if self._sampler is not None:
            return self._chosen[position]
        epoch, index = divmod(position, self.num_prompts)
        return self._order(epoch)[index]

    def _choose(self, sampler: Sampler) -> int:
        row = self._asked("choose", sampler.choose)
        if isinstance(row, (int, np.integer)) and 0 <= row < self.num_prompts:
            return int(row)
        raise SamplerError(
            f"data.sampler={self._sampler_name} must choose a row in 0..{self.num_prompts - 1}, got {row!r}"
        )

    def _asked(self, name: str, method: Callable[..., Any], *arguments: Any) -> Any:
        """Call ``method``, a method of the sampler. If the call raises an exception, raise `SamplerError` instead."""
        try:
            return method(*arguments)
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise SamplerError(f"data.sampler={self._sampler_name}: {name} raised {what}; correct the class") from error

    @property
    def wants_outcomes(self) -> bool:
        """True if a sampler chooses the prompts. If False, `note` does nothing."""
        return self._sampler is not None

    def note(self, groups: Sequence[GroupSummary]) -> None:
        """Pass summaries (rewards, lengths) of finished groups to the sampler. Without a sampler, do nothing."""
        if self._sampler is not None:
            for group in groups:
                self._asked("note", self._sampler.note, self._chosen[group.group_id], group)

    def state(self) -> dict[str, Any]:
        """Return a copy of the state of the stream and of the sampler, as JSON values, for `restore`."""
        state = {
            "seed": self._seed,
            "position": self._position,
            "shuffle": self._shuffle,
            "num_prompts": self.num_prompts,
            "files": self._files,
        }
        if self._sampler is not None:
            state |= {
                "sampler": self._sampler_name,
                "chosen": self._chosen,
                "sampler_state": self._asked("state", self._sampler.state),
            }
        return copy.deepcopy(state)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state that the method `state` returned in this process or in an earlier process.

        Raises the errors of `check`.
        """
        self.check(state)
        self._position, self._again = state["position"], []
        if self._sampler is not None:
            self._chosen = list(state["chosen"])
            self._asked("restore", self._sampler.restore, state["sampler_state"])

    def check(self, state: Mapping[str, Any]) -> None:
        """Check that `restore` can set the stream to ``state``.

        Raises:
            ValueError: files or options have changed since the state was saved. The message names the difference.
        """
        now = self.state()
        needed = set(now) if state.get("sampler", UNIFORM) == self._sampler_name else set(now) - _OF_SAMPLER
        if missing := sorted(needed - set(state)):
            raise ValueError(f"prompt stream: the saved state must have {missing}, got none; use the result of state()")
        # Compare the seed first. Another seed changes the files of the quickstart, and the error must name the seed.
        _check_same(state, now, seed="the seed", shuffle="data.shuffle", sampler="data.sampler")
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
        _check_same(state, now, num_prompts="the number of prompts")
        if not isinstance(state["position"], int) or state["position"] < 0:
            raise ValueError(f"prompt stream: position must be an integer >= 0, got {state['position']!r}")

    def _draw_order(self, epoch: int) -> np.ndarray:
        if not self._shuffle:
            return np.arange(self.num_prompts)
        return np.random.default_rng([self._seed, epoch]).permutation(self.num_prompts)


def _check_same(saved: Mapping[str, Any], now: Mapping[str, Any], **options: str) -> None:
    """Compare the states ``saved`` and ``now`` at some keys. Raise `ValueError` if the values at a key differ.

    Each keyword in ``options`` is one of these keys. The value of the keyword names the key in the error message.
    """
    for key, option in options.items():
        before, current = (values.get(key, UNIFORM) for values in (saved, now))
        if before != current:
            raise ValueError(
                f"prompt stream: {option} was {before} when the state was saved, got {current}; resume with the "
                "options and the tokenizer of the saved run, or start a new run"
            )


def load_eval_prompts(
    config: DataConfig, tokenizer: Tokenizer, *, has_environment: bool = False, images: ImageReader | None = None
) -> list[Prompt]:
    """Read the held-out prompts of ``config.eval_files``. Return the first ``eval_max_prompts`` of them, tokenized.

    If ``eval_max_prompts`` is 0, return all prompts. A prompt's group id is its index in the list. If
    ``has_environment``, all prompts have messages. ``images`` reads image files; it is None for a text model. Raises
    the errors of `PromptStream`.
    """
    if not config.eval_files:
        return []
    reader = _PromptReader(config, tokenizer, has_environment=has_environment, images=images)
    prompts, _, _ = reader.read(config.eval_files)
    return [_loaded(prompt, prompt.group_id) for prompt in prompts[: config.eval_max_prompts or len(prompts)]]


def _loaded(prompt: Prompt, group_id: int) -> Prompt:
    """Return a copy of a prompt with the group id ``group_id`` and with its images read."""
    return replace(prompt, group_id=group_id, messages=with_loaded_images(prompt.messages, f"prompt group {group_id}"))


class _PromptReader:
    def __init__(
        self, config: DataConfig, tokenizer: Tokenizer, *, has_environment: bool, images: ImageReader | None
    ) -> None:
        if config.chat_template:
            check_template("data", tokenizer)
        if config.images_key and images is None:
            raise ValueError(
                f"data.images_key is {config.images_key!r}, but the model has no vision tower that the learner trains, "
                f"expected one of the families {', '.join(VISION_FAMILIES)}; set model.path to such a model, or leave "
                "data.images_key empty"
            )
        self._config = config
        self._tokenizer = tokenizer
        self._has_environment = has_environment
        self._images = images

    def read(self, paths: Sequence[str]) -> tuple[list[Prompt], list[list[str]], int]:
        """Read files. Return a triple: the prompts, [path, digest] per file, and the number of too long prompts."""
        prompts: list[Prompt] = []
        files: list[list[str]] = []
        num_filtered = 0
        for path in paths:
            rows = read_rows(path, self._config.keys, optional=self._config.extra_keys)
            files.append([path, rows.digest])
            kept = _within_limit(rows, self._prompts_of(rows), self._config)
            num_filtered += len(rows) - len(kept)
            prompts += [replace(prompt, group_id=index) for index, prompt in enumerate(kept, start=len(prompts))]
        if not prompts:
            raise ValueError(
                f"{', '.join(paths)}: at least one prompt must have at most data.max_prompt_tokens = "
                f"{self._config.max_prompt_tokens} tokens, got {num_filtered} longer prompts; raise the limit"
            )
        return prompts, files, num_filtered

    def _prompts_of(self, rows: Rows) -> list[Prompt]:
        config = self._config
        truths = rows.serializable_column(config.ground_truth_key) if config.ground_truth_key else [None] * len(rows)
        extra = {key: rows.optional_column(key) for key in config.extra_keys}
        sources = _names(rows, config.data_source_key, "a string")
        environments = _names(
            rows, config.environment_key, "an environment's name, or null for the run's", may_be_null=True
        )
        by_source = config.environment_by_source
        environments = [own or by_source.get(source, "") for own, source in zip(environments, sources, strict=True)]
        options = _options(rows, config.environment_options_key)
        tools: Sequence[tuple[Message, ...]] = [()] * len(rows)
        if config.tools_key:
            tools = read_tools(rows, config.tools_key)
        messages, texts = self._rendered(rows, tools) if config.chat_template else self._plain(rows, environments)
        # The text from a chat template has special tokens already, so the tokenizer must not add them again.
        encoded = self._tokenizer(texts, add_special_tokens=not config.chat_template)["input_ids"]
        return [
            Prompt(
                group_id=row,
                prompt_ids=self._token_ids(rows, row, ids, messages[row]),
                ground_truth=truths[row],
                data_source=sources[row],
                extra={key: values[row] for key, values in extra.items() if values[row] is not None},
                messages=messages[row],
                tools=tools[row],
                environment=environments[row],
                environment_options=options[row],
            )
            for row, ids in enumerate(encoded)
        ]

    def _place(self, rows: Rows, row: int) -> str:
        return f"{rows.where(row)}: column {self._config.prompt_key!r}"

    def _rendered(
        self, rows: Rows, tools: Sequence[tuple[Message, ...]]
    ) -> tuple[Sequence[tuple[Message, ...]], list[str]]:
        """Render conversations. Return a pair: the messages of each row, and the rendered text of each row."""
        config = self._config
        messages: Sequence[tuple[Message, ...]] = read_messages(
            rows, config.prompt_key, system_prompt=config.system_prompt, has_images=self._images is not None
        )
        if config.images_key:
            images = rows.column(config.images_key)
            messages = [
                fill_images(own, images[row], f"{rows.where(row)}: column {config.images_key!r}")
                for row, own in enumerate(messages)
            ]
        texts = [
            render_chat(
                without_images(own),
                self._place(rows, row),
                self._tokenizer,
                config.chat_template_kwargs,
                add_generation_prompt=True,
                tools=tools[row],
            )
            for row, own in enumerate(messages)
        ]
        return messages, texts

    def _plain(self, rows: Rows, environments: Sequence[str]) -> tuple[Sequence[tuple[Message, ...]], list[str]]:
        """Read prompts that are plain text. Return a pair: the messages of each row, and the text of each row.

        A row with an environment has its text as one user message. A row without an environment has no messages.
        """
        texts = [_text(value, self._place(rows, row)) for row, value in enumerate(rows.column(self._config.prompt_key))]
        asks = zip(texts, environments, strict=True)
        has_environment = self._has_environment
        return [({"role": "user", "content": text},) if has_environment or own else () for text, own in asks], texts

    def _token_ids(self, rows: Rows, row: int, ids: Sequence[int], messages: Sequence[Message]) -> np.ndarray:
        """Return the token ids of a prompt as a read-only array, [prompt length] int32.

        Placeholder tokens stand for the images.
        """
        where = self._place(rows, row)
        if not len(ids):
            shown = rows.column(self._config.prompt_key)[row]
            raise ValueError(f"{where} is {shown!r}, which has no tokens, expected at least one token; remove the row")
        if (images := self._images) is not None:
            places = [(f"{where}, image {place}", source) for place, source in enumerate(images_of(messages))]
            counts = [images.num_tokens(content_of(source, at, from_files=True), at) for at, source in places]
            ids = with_placeholders(ids, counts, images.token_id, where)
        prompt_ids = np.asarray(ids, dtype=np.int32)
        prompt_ids.flags.writeable = False
        return prompt_ids


def _names(rows: Rows, key: str, expected: str, *, may_be_null: bool = False) -> list[str]:
    """Read a column of strings. If ``key`` is empty, all strings are empty. If ``may_be_null``, null becomes "".

    ``expected`` describes a valid value in the error message.
    """
    if not key:
        return [""] * len(rows)
    values = rows.column(key) if may_be_null else rows.serializable_column(key)
    names = ["" if value is None else value for value in values]
    for row, name in enumerate(names):
        if not isinstance(name, str):
            raise ValueError(f"{rows.where(row)}: column {key!r} is {name!r}, expected {expected}; fix the row")
    return names


def _options(rows: Rows, key: str) -> Sequence[Mapping[str, Any]]:
    """Read a column of mappings or of their JSON texts. Null becomes {}. If ``key`` is empty, each row gets {}."""
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
    """Return the prompts within ``max_prompt_tokens``. With ``overlong_prompts=error``, a longer prompt is an error."""
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
