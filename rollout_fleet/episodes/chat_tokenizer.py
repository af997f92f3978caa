"""The tokenizer and chat template of a model folder. This module needs no tokenizers of transformers and no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

PLAIN_TEMPLATE = """\
{%- for tool in tools or [] %}{{ "<|tools|>" if loop.first }}{{ tool | tojson }}
{% if loop.last %}{{ eos_token }}{% endif %}{%- endfor %}
{%- for message in messages %}
{{- "<|" + message.role + "|>" }}
{{- "<think>" + message.reasoning_content + "</think>" if message.reasoning_content }}
{{- message.content or "" }}
{%- for call in message.tool_calls or [] %}
{{- "<tool_call>" + call.function | tojson + "</tool_call>" }}
{%- endfor %}
{{- eos_token }}
{%- endfor %}
{{- "<|assistant|>" if add_generation_prompt }}"""
"""Chat template for a model that has none. Each message becomes a marker of its role, its text, and the end token."""

PLAIN_ROLES = ("system", "user", "assistant", "tool")
_SPACE = "\u2581"  # SentencePiece writes a space in a token as this letter
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class ChatTokenizer:
    """The tokenizer of a model folder in Hugging Face layout.

    It has the methods of a transformers tokenizer that the library ``renderers`` calls.

    Attributes:
        name_or_path: The model name. ``renderers`` selects a renderer by this name. Example: ``"Qwen/Qwen3-8B"``.
        chat_template: The Jinja template; empty if the model has none.
        special_tokens: Maps the role of a special token to the token. Example: ``{"eos_token": "<eos>"}``.
        end_ids: The tokens at which engines end an answer, from the model's ``generation_config.json``.

    Raises:
        ValueError: the folder has no readable ``tokenizer.json``.
    """

    def __init__(self, model_path: str) -> None:
        folder = Path(model_path)
        file = folder / "tokenizer.json"
        try:
            self._fast = Tokenizer.from_file(str(file))
        except Exception as error:  # the library `tokenizers` raises only plain `Exception`
            raise ValueError(
                f"{file} must be a tokenizer of the tokenizers library, got {error}; save the model with "
                "AutoTokenizer.from_pretrained(MODEL).save_pretrained(FOLDER)"
            ) from error
        settings = _read_json(folder / "tokenizer_config.json")
        known = {**_read_json(folder / "special_tokens_map.json"), **settings}
        tokens = {name: known[name] for name in _SPECIAL if known.get(name)}
        self.special_tokens = {
            name: token["content"] if isinstance(token, Mapping) else token for name, token in tokens.items()
        }
        self.name_or_path = str(_read_json(folder / "config.json").get("_name_or_path") or model_path)
        self.chat_template = _read_template(folder, settings)
        self.eos_token_id = self._special_id("eos_token")
        self.unk_token_id = self._special_id("unk_token")
        self.end_ids = _ids_of(_read_json(folder / "generation_config.json").get("eos_token_id"))
        self.all_special_tokens = sorted(
            {token.content for token in self._fast.get_added_tokens_decoder().values() if token.special}
        )

    def __call__(self, text: str, **_: Any) -> dict[str, Any]:
        """Encode a text. Returns the ids of the tokens, and the character offsets of the tokens in the text."""
        encoding = self._fast.encode(text, add_special_tokens=False)
        return {"input_ids": encoding.ids, "offset_mapping": encoding.offsets}

    def __len__(self) -> int:
        return self._fast.get_vocab_size()

    def encode(self, text: str, **_: Any) -> list[int]:
        """Encode a text to token ids. The text of a special token becomes the token's id. No tokens are added."""
        return self._fast.encode(text, add_special_tokens=False).ids

    def encode_rest(self, text: str) -> list[int]:
        """Encode a text that follows other tokens, without the space that some tokenizers add at a text's start."""
        before = self.encode("\n")
        ids = self.encode("\n" + text)
        adds_space = str(self._fast.id_to_token(before[0]) if before else "").startswith(_SPACE)
        return ids[len(before) :] if adds_space and ids[: len(before)] == before else self.encode(text)

    def decode(self, token_ids: Sequence[int] | int, *, skip_special_tokens: bool = False, **_: Any) -> str:
        """Decode one token id, or a sequence of token ids, to text. Special tokens stay in the text by default."""
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self._fast.decode(ids, skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """Return the id of a token (a str), or a list of ids for a list of tokens.

        A token outside the vocabulary gives ``unk_token_id``, which may be None.
        """
        if isinstance(tokens, str):
            found = self._fast.token_to_id(tokens)
            return self.unk_token_id if found is None else found
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def get_vocab(self) -> dict[str, int]:
        """Return the vocabulary as a dict from each token's text to its id, including added tokens."""
        return self._fast.get_vocab()

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, tokenize: bool = True, tools: Any = None, **options: Any
    ) -> Any:
        """Render a conversation with the model's chat template. Returns token ids, or text if ``tokenize`` is false.

        Raises:
            ValueError: the template refuses the messages.
        """
        text = self.render(messages, tools=tools, **options)
        return self.encode(text) if tokenize else text

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **options: Any,
    ) -> str:
        """Render a conversation as text with the model's chat template.

        ``tools`` are the JSON schemas of the tools. ``add_generation_prompt`` appends the beginning of an assistant's
        message. Raises `ValueError` if the template refuses the messages.
        """
        import jinja2
        from transformers.utils.chat_template_utils import render_jinja_template

        conversation: Any = list(messages)
        schemas: Any = list(tools) if tools else None
        options.pop("return_dict", None)
        try:
            (text,), _ = render_jinja_template(
                [conversation],
                tools=schemas,
                chat_template=self.chat_template or PLAIN_TEMPLATE,
                add_generation_prompt=add_generation_prompt,
                **self.special_tokens,
                **options,
            )
        except (jinja2.exceptions.TemplateError, TypeError, KeyError, AttributeError) as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ValueError(f"the chat template refuses messages of the roles {roles}: {error}") from error
        return text

    def _special_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._fast.token_to_id(token)


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _ids_of(ids: Any) -> list[int]:
    return list(ids) if isinstance(ids, list) else [] if ids is None else [ids]


def _read_template(folder: Path, settings: Mapping[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template") or ""
    if isinstance(template, list):  # choose one, because the model has several named templates
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("tool_use") or named.get("default") or ""
    return template
