"""Reads the sizes of a model from its folder in Hugging Face layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def model_settings(path: str) -> dict[str, Any]:
    """Read the ``config.json`` in a model folder as a dict.

    For a multimodal model, values in ``text_config`` replace values of the same name. The function adds the default
    values that transformers leaves out of ``text_config``. It renames GPT-2's ``n_positions`` to
    ``max_position_embeddings``, the name in other models.
    """
    settings = json.loads(Path(path, "config.json").read_text())
    text = settings.get("text_config", {})
    settings = {**_completed(text), **settings, **text}
    return {"max_position_embeddings": settings["n_positions"], **settings} if "n_positions" in settings else settings


def _completed(text_config: dict[str, Any]) -> dict[str, Any]:
    if "model_type" not in text_config:
        return {}
    from transformers import CONFIG_MAPPING  # takes a second

    kind = text_config["model_type"]
    return CONFIG_MAPPING[kind].from_dict(dict(text_config)).to_dict() if kind in CONFIG_MAPPING else {}


def model_bytes(path: str) -> int:
    """Return the total size of the weight files in a model folder, in bytes."""
    folder = Path(path)
    return sum(file.stat().st_size for kind in ("*.safetensors", "*.bin") for file in folder.glob(kind))
