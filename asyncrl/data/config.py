"""Options of the prompt data."""

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from asyncrl.core.errors import check_bounds

from .samplers import UNIFORM


class OverlongPrompts(StrEnum):
    """What the run does with a prompt longer than ``max_prompt_tokens``: it raises an error, or skips the prompt."""

    error = "error"
    filter = "filter"


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The files and columns of prompts. A key with dots names a nested column: ``reward_model.ground_truth``.

    Attributes:
        train_files: Parquet or jsonl files, read as one data set in this order.
        eval_files: Files of held-out prompts with the same columns.
        prompt_key: Column of the prompt. A value is a string, or a list of messages {role, content, tool_calls, …} if
            ``chat_template`` is true.
        ground_truth_key: Column of the expected answer for the reward function, or empty.
        data_source_key: Column of the task's name for the reward function, or empty.
        extra_keys: Names of further columns that the reward function gets. A row may lack such a column, or have null
            in it.
        chat_template: Render the messages with the tokenizer's chat template and a generation prompt.
        chat_template_kwargs: Further arguments of the template. Example: ``{"enable_thinking": false}``.
        system_prompt: A system message before the messages of each row, or empty.
        tools_key: Column of the tools that the template renders: a list of JSON schemas {type: function, function:
            {name, description, parameters}}, or its JSON text; null for none. Empty if there is no such column.
        images_key: Column of the images of a row: a list of paths, file contents, base64 texts, or mappings {bytes,
            path}. The images replace the marks ``<image>`` in the texts of the messages, in order. Empty if there is no
            such column.
        environment_key: Column of the row's environment; null means the environment of the run. Empty if there is no
            such column.
        environment_options_key: Column of further options of the row's environment: a mapping, or its JSON text; null
            for none. Empty if there is no such column.
        environment_by_source: Environment by data source, for rows that name no environment. Example: ``{sums:
            sums.py:Calculator}``.
        max_prompt_tokens: Largest allowed length of a prompt, in tokens.
        overlong_prompts: What the run does with a longer prompt.
        shuffle: Use a new seeded order in each epoch. If False, each epoch has the order of the files.
        eval_max_prompts: Number of held-out prompts from the beginning of the files; 0 uses all.
        sampler: How the prompts are chosen (docs/sources.md). ``uniform`` takes each row once per epoch. ``weighted``
            takes sources by ``source_weights``. ``difficulty`` also prefers rows whose success rate is near a
            target. Your own class is ``file.py:Class`` or ``module:Class``.
        sampler_options: Further arguments of the sampler. Example: ``{target: 0.3}``.
        source_weights: Weight of each data source. A key is a name in the column ``data_source_key``. If empty, all
            weights are equal. Example: ``{gsm8k: 3, apps: 1}``.
    """

    train_files: list[str] = field(default_factory=list)
    eval_files: list[str] = field(default_factory=list)
    prompt_key: str = "prompt"
    ground_truth_key: str = "ground_truth"
    data_source_key: str = ""
    extra_keys: list[str] = field(default_factory=list)
    chat_template: bool = False
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    system_prompt: str = ""
    tools_key: str = ""
    images_key: str = ""
    environment_key: str = ""
    environment_options_key: str = ""
    environment_by_source: dict[str, str] = field(default_factory=dict)
    max_prompt_tokens: int = 1024
    overlong_prompts: OverlongPrompts = OverlongPrompts.error
    shuffle: bool = True
    eval_max_prompts: int = 0
    sampler: str = UNIFORM
    sampler_options: dict[str, Any] = field(default_factory=dict)
    source_weights: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("train_files", "eval_files"):
            if isinstance(getattr(self, name), str):
                raise ValueError(f"data.{name} must be a list of paths, got {getattr(self, name)!r}; write [path]")
        check_prompt_format("data", self)
        if self.images_key and not self.chat_template:
            raise ValueError(
                f"data.images_key is {self.images_key!r} but data.chat_template is false; images must be parts of "
                "messages, so set data.chat_template=true"
            )
        keys = ("prompt_key", "ground_truth_key", "data_source_key", "environment_key", "environment_options_key")
        for name in (*keys, "images_key"):
            check_key(f"data.{name}", getattr(self, name))
        for key in self.extra_keys:
            check_key("data.extra_keys", key or ".")
        check_bounds("data.", self, max_prompt_tokens=">= 1; 1024 is the default", eval_max_prompts=">= 0; 0 uses all")
        if self.overlong_prompts not in tuple(OverlongPrompts):
            raise ValueError(
                f"data.overlong_prompts must be error or filter, got {self.overlong_prompts!r}; "
                "filter leaves out long prompts and counts them"
            )
        self._check_sampler()

    def _check_sampler(self) -> None:
        for name in ("sampler_options", "source_weights"):
            if self.sampler == UNIFORM and getattr(self, name):
                raise ValueError(
                    f"data.{name}={getattr(self, name)} needs a sampler that uses it, got data.sampler={UNIFORM}; set "
                    "data.sampler to weighted, difficulty or your own class"
                )
        if bad := {name: weight for name, weight in self.source_weights.items() if not 0 < weight < math.inf}:
            raise ValueError(
                f"data.source_weights must be > 0, got {bad}; to leave out a source, remove its rows from the files"
            )
        for name in ("source_weights", "environment_by_source"):
            if getattr(self, name) and not self.data_source_key:
                raise ValueError(f"data.{name} needs data.data_source_key, the column with a row's source, got ''")

    @property
    def has_environments(self) -> bool:
        """True if a row of the data can choose its own environment, instead of the environment of the run."""
        return bool(self.environment_key or self.environment_by_source)

    @property
    def keys(self) -> list[str]:
        """Names of the columns that the options select. All rows must have these columns."""
        single = (self.prompt_key, self.ground_truth_key, self.data_source_key, self.tools_key)
        keys = [*single, self.images_key, self.environment_key, self.environment_options_key]
        return [key for key in keys if key]


def check_prompt_format(section: str, options: Any) -> None:
    """Check the prompt column and the chat template's options of one section of the configuration.

    ``section`` is the name of this section. ``options`` is an object with the section's options as attributes.

    Raises:
        ValueError: ``prompt_key`` is empty, or options contradict each other.
    """
    if not options.prompt_key:
        raise ValueError(f"{section}.prompt_key must name a column, got an empty string; 'prompt' is usual")
    for name in ("chat_template_kwargs", "system_prompt", "tools_key"):
        if (value := getattr(options, name)) and not options.chat_template:
            raise ValueError(
                f"{section}.{name} is set to {value!r} but {section}.chat_template is false; set "
                f"{section}.chat_template=true, or leave {section}.{name} out"
            )
    check_key(f"{section}.tools_key", options.tools_key)
    if "tools" in options.chat_template_kwargs and options.tools_key:
        raise ValueError(
            f"{section}.chat_template_kwargs has tools and {section}.tools_key is {options.tools_key!r}, expected one "
            "source of tools; leave one of them out"
        )


def check_key(option: str, key: str) -> None:
    """Check that ``key`` has the form of a column name, such as ``a`` or ``a.b``. An empty ``key`` is allowed, too.

    Raises `ValueError` if a part between dots is empty. The error names ``option``.
    """
    if key and not all(key.split(".")):
        raise ValueError(
            f"{option} must be a column name, got {key!r}; write a nested column as outer.inner, "
            "such as reward_model.ground_truth"
        )
