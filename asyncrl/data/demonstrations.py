"""Reads examples for supervised fine-tuning, and converts each one to token ids and a mask of the learned tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .chat import Message, check_template, read_messages, read_tools, render_chat
from .row_files import Rows, read_rows
from .tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Demonstration:
    """One tokenized example.

    Attributes:
        token_ids: [T] int32.
        learned: [T] bool, True for each token in the loss: the tokens of the assistant, including the end token of an
            answer. The first token of the example is never in the loss.
        where: File and row of the example, for error messages.
    """

    token_ids: np.ndarray
    learned: np.ndarray
    where: str


@dataclass(frozen=True, kw_only=True)
class DemonstrationFormat:
    """The options that define how an example is read from a row. `asyncrl.config.WarmStartConfig` explains them."""

    prompt_key: str
    response_key: str
    chat_template: bool = False
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    system_prompt: str = ""
    tools_key: str = ""


def load_demonstrations(files: Sequence[str], form: DemonstrationFormat, tokenizer: Any) -> list[Demonstration]:
    """Read parquet or jsonl files, and tokenize each row as an example for supervised fine-tuning.

    A plain row becomes prompt, response and end-of-sequence token. The loss includes the response and the
    end-of-sequence token. A conversation is rendered without and with each assistant message. The loss includes the
    text that the message adds. This text and the other text are tokenized separately, as in generation. ``tokenizer``
    is the policy's Hugging Face tokenizer.

    Raises:
        ValueError: a file, row or column does not match ``form``.
    """
    if form.chat_template:
        check_template("sft", tokenizer)
    if not form.chat_template and tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer of {tokenizer.name_or_path!r} has no end-of-sequence token, but each plain response must "
            "end with this token; set eos_token in its tokenizer_config.json"
        )
    keys = [key for key in (form.prompt_key, form.response_key, form.tools_key) if key]
    demonstrations: list[Demonstration] = []
    for name in files:
        rows = read_rows(name, keys, section="sft")
        if form.chat_template:
            stretches = _conversations(rows, form, tokenizer)
        else:
            texts = {key: _strings(rows, key) for key in (form.prompt_key, form.response_key)}
            prompts = tokenizer(texts[form.prompt_key], add_special_tokens=True)["input_ids"]
            responses = tokenizer(texts[form.response_key], add_special_tokens=False)["input_ids"]
            ends = [[*response, tokenizer.eos_token_id] for response in responses]
            stretches = [[(ids, False), (end, True)] for ids, end in zip(prompts, ends, strict=True)]
        demonstrations += [_demonstration(parts, rows.where(row)) for row, parts in enumerate(stretches)]
    return demonstrations


_Stretch = tuple[Sequence[int], bool]
"""A piece of an example: token ids, and whether the loss includes these tokens."""


def _demonstration(parts: Sequence[_Stretch], where: str) -> Demonstration:
    token_ids = np.concatenate([np.asarray(ids, dtype=np.int32) for ids, _ in parts])
    learned = np.concatenate([np.full(len(ids), is_learned) for ids, is_learned in parts])
    learned[:1] = False  # exclude the first token, because the model cannot predict it
    if not learned.any():
        raise ValueError(f"{where}: the loss must include a token after the first token, got none; remove the row")
    return Demonstration(token_ids=token_ids, learned=learned, where=where)


def _conversations(rows: Rows, form: DemonstrationFormat, tokenizer: Tokenizer) -> Iterator[list[_Stretch]]:
    answers = _strings(rows, form.response_key) if form.response_key else [None] * len(rows)
    tools = read_tools(rows, form.tools_key) if form.tools_key else [()] * len(rows)
    conversations = read_messages(rows, form.prompt_key, section="sft", system_prompt=form.system_prompt)
    for row, (messages, answer) in enumerate(zip(conversations, answers, strict=True)):
        where = f"{rows.where(row)}: column {form.prompt_key!r}"
        if answer is not None:
            messages = (*messages, {"role": "assistant", "content": answer})
        stretches = _stretches(messages, where, form, tokenizer, tools[row])
        ids = tokenizer([text for text, _ in stretches], add_special_tokens=False)["input_ids"]
        yield [(part, is_learned) for part, (_, is_learned) in zip(ids, stretches, strict=True)]


def _stretches(
    messages: Sequence[Message],
    where: str,
    form: DemonstrationFormat,
    tokenizer: Tokenizer,
    tools: Sequence[Message],
) -> list[tuple[str, bool]]:
    """Render a conversation up to its last assistant message.

    Returns a list of pairs (text, is_learned). is_learned is True for the texts of assistant messages. It is False for
    the text before and between them.
    """
    kwargs = dict(form.chat_template_kwargs)
    done, stretches = "", []
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        asked = render_chat(messages[:turn], where, tokenizer, kwargs, add_generation_prompt=True, tools=tools)
        answered = render_chat(messages[: turn + 1], where, tokenizer, kwargs, add_generation_prompt=False, tools=tools)
        if not (asked.startswith(done) and answered.startswith(asked)):
            raise ValueError(
                f"{where}: the chat template changes earlier text when message {turn} is added, so the learned tokens "
                "are unknown; split the conversation into one row per answer, or change sft.chat_template_kwargs"
            )
        stretches += [(asked[len(done) :], False), (answered[len(asked) :], True)]
        done = answered
    if not stretches:
        raise ValueError(f"{where} has no assistant message to learn; set sft.response_key, or fix the row")
    return stretches


def _strings(rows: Rows, key: str) -> list[str]:
    values = rows.column(key)
    for row, value in enumerate(values):
        if not isinstance(value, str):
            raise ValueError(
                f"{rows.where(row)}: column {key!r} is {value!r} ({type(value).__name__}), expected a string; convert "
                "it to a string, or set sft.chat_template=true for messages"
            )
    return values
