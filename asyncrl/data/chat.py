"""Reads chat messages and tool schemas from the columns of rows, and renders them with a chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.core.image_files import image_part, is_image, read_bytes, source_of

from .row_files import Rows
from .tokenizer import Tokenizer

IMAGE_MARK = "<image>"
"""Placeholder of an image in a message, if the images are in a separate column."""

Message = Mapping[str, Any]
"""A chat message, or the schema of a tool, in the format of OpenAI's API. msgpack can encode all values in it."""


def read_messages(
    rows: Rows, key: str, *, section: str = "data", system_prompt: str = "", has_images: bool = False
) -> list[tuple[Message, ...]]:
    """Return the chat messages of each row, from the column ``key``. A ``system_prompt`` is added as the first message.

    Each message has a role, and a text as its content. Only a message with tool calls may have no content. If
    ``has_images``, the content may also be a list of text and image parts. All other fields are kept for the chat
    template. ``section`` is the section of the options that an error message names: ``data`` or ``sft``.

    Raises:
        ValueError: a value is not a list of messages, or begins with a system message although ``system_prompt`` is
            set.
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
        messages = tuple(
            _message(item, f"{where}, message {index}", has_images=has_images) for index, item in enumerate(value)
        )
        if before and messages[0]["role"] == "system":
            raise ValueError(
                f"{where}, message 0 has role = 'system', expected no system message because {section}.system_prompt "
                f"is set; leave {section}.system_prompt empty, or remove this message from the row"
            )
        conversations.append((*before, *messages))
    return conversations


def _message(item: Any, where: str, *, has_images: bool) -> Message:
    if not isinstance(item, Mapping):
        raise ValueError(f"{where} is {short(item)}, expected a mapping with role and content; fix the row")
    message = {key: part for key, part in item.items() if part is not None}
    has_calls = isinstance(calls := message.get("tool_calls"), list) and len(calls) > 0
    if has_images and isinstance(message.get("content"), list):
        message["content"] = [_part(part, f"{where}, part {place}") for place, part in enumerate(message["content"])]
    for key in ("role", "content"):
        if key == "content" and has_images and isinstance(message.get(key), list):
            continue
        if not isinstance(message.get(key), str) and not (key == "content" and has_calls and key not in message):
            raise ValueError(
                f"{where} has {key} = {short(item.get(key))}, expected a string; only text messages are supported"
                + ("" if has_images else " with this model")
            )
    return message


def _part(part: Any, where: str) -> Message:
    """Return a content part as ``{type: text, text}`` or ``{type: image, image}``. Image files are not read here."""
    if is_image(part):
        return {"type": "image", "image": source_of(part)}
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    raise ValueError(f"{where} is {short(part)}, expected {{type: text, text}} or {{type: image, image}}; fix the row")


def fill_images(messages: Sequence[Message], images: Any, where: str) -> tuple[Message, ...]:
    """Return copies of a row's messages, with an entry of ``images`` in place of each placeholder ``<image>``.

    The entries are used in order. An entry is a path, bytes or base64 text. Image files are not read here. ``where``
    tells in error messages where the images are.

    Raises:
        ValueError: the number of placeholders is not the number of images.
    """
    if not isinstance(images, list):
        raise ValueError(f"{where} is {short(images)}, expected a list of images; fix the row")
    num_marks = sum(m["content"].count(IMAGE_MARK) for m in messages if isinstance(m.get("content"), str))
    if num_marks != len(images):
        raise ValueError(
            f"{where} has {len(images)} images for {num_marks} placeholders {IMAGE_MARK} in the messages, expected one "
            "placeholder per image; fix the row"
        )
    left, filled = iter(images), []
    for message in messages:
        content = message.get("content")
        if isinstance(content, str) and IMAGE_MARK in content:
            first, *others = content.split(IMAGE_MARK)
            parts = [{"type": "text", "text": first}]
            for text in others:
                parts += [{"type": "image", "image": next(left)}, {"type": "text", "text": text}]
            message = {**message, "content": [part for part in parts if part.get("text") != ""]}
        filled.append(message)
    return tuple(filled)


def images_of(messages: Sequence[Message]) -> list[Any]:
    """Return the images in the messages of a row, in the order of the messages. An image is a path, bytes or base64."""
    contents = (message.get("content") for message in messages)
    return [part["image"] for content in contents if isinstance(content, list) for part in content if is_image(part)]


def without_images(messages: Sequence[Message]) -> list[Message]:
    """Return copies of the messages for a chat template, with ``{"type": "image"}`` in place of each image part."""
    return [
        {**message, "content": [{"type": "image"} if is_image(part) else part for part in content]}
        if isinstance(content := message.get("content"), list)
        else message
        for message in messages
    ]


def with_loaded_images(messages: Sequence[Message], where: str) -> tuple[Message, ...]:
    """Read the image files of messages. Return copies of the messages in OpenAI's format, with images as data URLs.

    ``where`` tells in error messages where the messages are. Raises `ValueError` if an image is neither a file nor
    base64 text.
    """
    return tuple(
        {
            **message,
            "content": [
                image_part(read_bytes(part["image"], where, from_files=True)) if is_image(part) else part
                for part in content
            ],
        }
        if isinstance(content := message.get("content"), list)
        else message
        for message in messages
    )


def read_tools(rows: Rows, key: str) -> list[tuple[Message, ...]]:
    """Read the tool schemas of each row from the column ``key``. Return one tuple of dicts (OpenAI's format) per row.

    A value in the column is a list of schemas, or a JSON text of such a list. Null means no tools.

    Raises:
        ValueError: a value is not a list of function schemas with names, or two of the functions have the same name.
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
                raise ValueError(
                    f"{where}, tool {index} has the name {name!r} of an earlier tool, expected different names; "
                    "fix the row"
                )
            names.add(name)
        rows_of_tools.append(tuple(value or ()))
    return rows_of_tools


def check_template(section: str, tokenizer: Tokenizer) -> None:
    """Raise `ValueError` if the tokenizer has no chat template.

    The error names the option ``chat_template`` of ``section``, which is ``data`` or ``sft``.
    """
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
    """Render a conversation with the tokenizer's chat template. Return the text.

    Args:
        messages: Chat messages in OpenAI's format.
        where: Tells in error messages where the messages are: file, row and column.
        tokenizer: The tokenizer.
        template_kwargs: Further arguments of the template.
        add_generation_prompt: Whether the text ends with the tokens that begin an answer.
        tools: JSON schemas of the tools that the model may call.

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
    """Return a text for an error: the ``repr`` of a value, cut after 60 characters, and the value's type."""
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:60] + '…'} ({type(value).__name__})"
