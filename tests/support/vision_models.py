"""A Qwen3-VL of 38 thousand parameters with its tokenizer, chat template and image processor, and small images."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image as Pillow
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForImageTextToText

SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
)
COLOURS = {"r": (230, 30, 30), "g": (30, 200, 60), "b": (40, 60, 220)}
"""The RGB value of each colour. The key is the right answer for the colour."""

CHAT_TEMPLATE = """\
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.content is string %}{{- m.content }}{%- else %}
{%- for part in m.content %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text }}
{%- endfor %}{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\\n' if add_generation_prompt }}"""

_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
_VISION = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 4096},
}


def write_vision_model(
    directory: Path, *, seed: int = 0, initializer_range: float = 0.2, family: str = "qwen3_vl", **text: Any
) -> str:
    """Save the model in ``directory``.

    The model's weights are large, so a wrong position or a lost image changes the results very much.
    """
    directory.mkdir(parents=True, exist_ok=True)
    ids = _write_tokenizer(directory)
    torch.manual_seed(seed)
    special = {"pad_token_id": ids["<|endoftext|>"], "bos_token_id": None, "eos_token_id": ids["<|im_end|>"]}
    config = AutoConfig.for_model(
        family,
        text_config={
            "vocab_size": len(ids),
            "tie_word_embeddings": True,
            "initializer_range": initializer_range,
            **special,
            **_TEXT,
            **text,
        },
        vision_config={**_VISION, "out_hidden_size": _TEXT["hidden_size"], "initializer_range": initializer_range},
        tie_word_embeddings=True,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        **special,
    )
    AutoModelForImageTextToText.from_config(config).save_pretrained(directory)
    (directory / "generation_config.json").write_text(json.dumps(special))
    (directory / "preprocessor_config.json").write_text(json.dumps(_PROCESSOR))
    video = {**_PROCESSOR, "video_processor_type": "Qwen3VLVideoProcessor"}
    video.pop("image_processor_type")
    (directory / "video_preprocessor_config.json").write_text(json.dumps(video))
    return str(directory)


def _write_tokenizer(directory: Path) -> dict[str, int]:
    """Write a tokenizer with one token per character. Returns the ids of all tokens."""
    characters = "\n .?abcdefghijklmnopqrstuvwxyz0123456789"
    ids = {token: index for index, token in enumerate([*SPECIAL, *characters])}
    tokenizer = Tokenizer(WordLevel(ids, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "processor_class": "Qwen3VLProcessor",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return ids


def picture(seed: int = 0, *, width: int = 16, height: int = 8) -> np.ndarray:
    """Return a random image, [height, width, 3] uint8."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def coloured(colour: str, seed: int = 0, *, width: int = 8, height: int = 8) -> np.ndarray:
    """Return an image in one of `COLOURS` with some noise, [height, width, 3] uint8."""
    noise = np.random.default_rng(seed).integers(-20, 21, (height, width, 3))
    return np.clip(np.array(COLOURS[colour]) + noise, 0, 255).astype(np.uint8)


def as_png(pixels: np.ndarray) -> bytes:
    """Return a PNG file of [height, width, 3] uint8."""
    file = io.BytesIO()
    Pillow.fromarray(pixels).save(file, "PNG")
    return file.getvalue()
