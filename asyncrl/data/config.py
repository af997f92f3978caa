"""Options of the prompt data."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from asyncrl.core.errors import check_bounds


class OverlongPrompts(StrEnum):
    """What happens to a prompt longer than ``max_prompt_tokens``: an error, or leave it out and count it."""

    error = "error"
    filter = "filter"


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The files and columns of prompts. Dots in a key name a nested column: ``reward_model.ground_truth``.

    Attributes:
        train_files: Parquet or jsonl files, read as one data set in this order.
        eval_files: Files of held-out prompts with the same columns.
        prompt_key: Column of the prompt: a string, or with ``chat_template`` a list of {role, content} messages.
        ground_truth_key: Column of the expected answer for the reward function; empty without one.
        data_source_key: Column of the task's name for the reward function; empty without one.
        extra_keys: Further columns for the reward function.
        chat_template: Render the messages with the tokenizer's chat template and a generation prompt.
        chat_template_kwargs: Further arguments of the template. Example: ``{"enable_thinking": false}``.
        max_prompt_tokens: Longest prompt, in tokens.
        overlong_prompts: What happens to a longer prompt.
        shuffle: Use a new seeded order in each epoch. False: the order of the files in each epoch.
        eval_max_prompts: Number of held-out prompts from the beginning of the files; 0 uses all.
    """

    train_files: list[str] = field(default_factory=list)
    eval_files: list[str] = field(default_factory=list)
    prompt_key: str = "prompt"
    ground_truth_key: str = "ground_truth"
    data_source_key: str = ""
    extra_keys: list[str] = field(default_factory=list)
    chat_template: bool = False
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    max_prompt_tokens: int = 1024
    overlong_prompts: OverlongPrompts = OverlongPrompts.error
    shuffle: bool = True
    eval_max_prompts: int = 0

    def __post_init__(self) -> None:
        for name in ("train_files", "eval_files"):
            if isinstance(getattr(self, name), str):
                raise ValueError(f"data.{name} must be a list of paths, got {getattr(self, name)!r}; write [path]")
        check_prompt_format("data", self)
        for name in ("prompt_key", "ground_truth_key", "data_source_key"):
            _check_key(f"data.{name}", getattr(self, name))
        for key in self.extra_keys:
            _check_key("data.extra_keys", key or ".")
        check_bounds("data.", self, max_prompt_tokens=">= 1; 1024 is the default", eval_max_prompts=">= 0; 0 uses all")
        if self.overlong_prompts not in tuple(OverlongPrompts):
            raise ValueError(
                f"data.overlong_prompts must be error or filter, got {self.overlong_prompts!r}; "
                "filter leaves out long prompts and counts them"
            )


def check_prompt_format(section: str, options: Any) -> None:
    """Check ``prompt_key`` and ``chat_template_kwargs`` of the section of options. Raises `ValueError`."""
    if not options.prompt_key:
        raise ValueError(f"{section}.prompt_key must name a column, got an empty string; 'prompt' is usual")
    if options.chat_template_kwargs and not options.chat_template:
        raise ValueError(
            f"{section}.chat_template_kwargs is set to {dict(options.chat_template_kwargs)} but "
            f"{section}.chat_template is false; set {section}.chat_template=true, or leave the arguments out"
        )


def _check_key(option: str, key: str) -> None:
    if key and not all(key.split(".")):
        raise ValueError(
            f"{option} must be a column name, got {key!r}; write a nested column as outer.inner, "
            "such as reward_model.ground_truth"
        )
