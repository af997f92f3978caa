"""Chat messages and tool schemas in the columns of rows, and their rendering by a chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .row_files import Rows
from .tokenizer import Tokenizer

Message = Mapping[str, Any]
"""A message or a tool's schema in the form of OpenAI's API, of msgpack values."""


def read_messages(rows: Rows, key: str, *, section: str = "data", system_prompt: str = "") -> list[tuple[Message, ...]]:
    """Return the messages of each row, with the ``system_prompt`` before them if there is one.

    Each message has a role. Its content is text; only a message with tool calls may have none. Other fields, such as
    ``tool_call_id`` or ``reasoning_content``, are kept for the template.

    Raises:
        ValueError: a value is not a list of messages, or has a system message of its own beside ``system_prompt``.
    """
    before = ({"role": "system", "content": system_prompt},) if system_prompt else ()
    conversations = []
    for row, value in enumerate(rows.structures(key)):
        where = f"{rows.where(row)}: column {key!r}"
        if not isinstance(value, list) or not value:
            remedy = f"set {section}.chat_template=false for plain prompts" if isinstance(value, str) else "fix the row"
            raise ValueError(
                f"{where} is {short(value)}, expected a list of {{role, content}} messages ({section}.chat_template is "
                f"true); {remedy}"
            )
        messages = tuple(_message(item, f"{where}, message {index}") for index, item in enumerate(value))
        if before and messages[0]["role"] == "system":
            raise ValueError(
                f"{where}, message 0 has role = 'system', expected none with {section}.system_prompt: the conversation "
                f"would begin with two; leave {section}.system_prompt empty, or remove the row's"
            )
        conversations.append((*before, *messages))
    return conversations


def _message(item: Any, where: str) -> Message:
    if not isinstance(item, Mapping):
        raise ValueError(f"{where} is {short(item)}, expected a mapping with role and content; fix the row")
    message = {key: part for key, part in item.items() if part is not None}
    has_calls = isinstance(calls := message.get("tool_calls"), list) and len(calls) > 0
    for key in ("role", "content"):
        if not isinstance(message.get(key), str) and not (key == "content" and has_calls and key not in message):
            raise ValueError(
                f"{where} has {key} = {short(item.get(key))}, expected a string; only text messages are supported"
            )
    return message


def read_tools(rows: Rows, key: str) -> list[tuple[Message, ...]]:
    """Return the tool schemas of each row: a list, or its JSON text; null stands for no tools.

    Raises:
        ValueError: a value is not a list of function schemas with names, or names a function twice.
    """
    rows_of_tools = []
    for row, value in enumerate(rows.structures(key, is_json=True)):
        where, names = f"{rows.where(row)}: column {key!r}", set[str]()
        if not isinstance(value, list | None):
            raise ValueError(f"{where} is {short(value)}, expected a list of tool schemas, or its JSON; fix the row")
        for index, tool in enumerate(value or ()):
            function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
            name = function.get("name") if isinstance(function, Mapping) else None
            if not isinstance(name, str) or not name:
                raise ValueError(
                    f"{where}, tool {index} is {short(tool)}, expected a schema such as "
                    '{"type": "function", "function": {"name": "add", "parameters": {…}}}; fix the row'
                )
            if name in names:
                raise ValueError(f"{where}, tool {index} is a second tool {name!r}, expected one per name; fix the row")
            names.add(name)
        rows_of_tools.append(tuple(value or ()))
    return rows_of_tools


def check_template(section: str, tokenizer: Tokenizer) -> None:
    """Check that the tokenizer has a chat template. Raises `ValueError`."""
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"{section}.chat_template is true but the tokenizer of {getattr(tokenizer, 'name_or_path', '')!r} has no "
            f"template; use an instruct model's tokenizer, or plain strings with {section}.chat_template=false"
        )


def render_chat(
    messages: Sequence[Message],
    where: str,
    tokenizer: Tokenizer,
    template_kwargs: Mapping[str, Any],
    *,
    add_generation_prompt: bool,
    tools: Sequence[Message] = (),
) -> str:
    """Render one conversation with its tools to text; ``where`` names its file, row and column in errors.

    Raises:
        ValueError: the template refuses the conversation.
    """
    kwargs = {**template_kwargs, **({"tools": list(tools)} if tools else {})}
    try:
        return tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=add_generation_prompt, **kwargs
        )
    except Exception as error:
        raise ValueError(
            f"{where}: the chat template refuses the messages ({error}), expected roles in an order that the template "
            "supports; fix the row"
        ) from error


def short(value: Any) -> str:
    """Return a value and its type for a message, at most about 60 characters."""
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:60] + '…'} ({type(value).__name__})"
