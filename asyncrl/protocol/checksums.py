"""Digests by which a loaded weight update is checked against the published one, tensor by tensor.

The digest is the one SGLang's ``/weights_checker`` computes for a model in host memory: the first eight bytes of a
tensor's SHA-256, in hexadecimal. SGLang fuses projections and pads vocabularies, so the names here are its names.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

VOCABULARY_ROWS = 64  # SGLang pads embedding and head to a multiple of this many rows, with zeros.
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_PART = re.compile(r"^(?P<module>.*\.)(?P<part>q_proj|k_proj|v_proj|gate_proj|up_proj)(?P<suffix>\.\w+)$")
_VOCABULARY = re.compile(r"(^|\.)(embed_tokens|lm_head)\.(weight|bias)$")


def weight_checksums(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Digest a model's weights under the names and layout of an unsharded SGLang engine of the same dtype.

    Args:
        tensors: Hugging Face parameter name to tensor, of the dtype the engine serves, on any device.

    Returns:
        Engine parameter name to 16 hexadecimal digits. ``q_proj``, ``k_proj`` and ``v_proj`` appear as one
        ``qkv_proj`` (laid end to end along dim 0), ``gate_proj`` and ``up_proj`` as ``gate_up_proj``; embedding and
        head are zero-padded to a multiple of 64 rows. Example: ``{"model.norm.weight": "2f20cd03c9cd392a"}``.
    """
    return {name: _digest(name, [tensors[part] for part in parts]) for name, parts in _fused_names(tensors).items()}


def _fused_names(tensors: Mapping[str, Tensor]) -> dict[str, Sequence[str]]:
    """Engine parameter name to the Hugging Face names it is made of, in order."""
    names: dict[str, Sequence[str]] = {}
    for name in tensors:
        fused, members = name, (name,)
        if match := _PART.match(name):
            fused = next(fused for fused, parts in _FUSED.items() if match["part"] in parts)
            members = tuple(f"{match['module']}{part}{match['suffix']}" for part in _FUSED[fused])
            fused = f"{match['module']}{fused}{match['suffix']}"
        is_whole = all(member in tensors for member in members)
        names[fused if is_whole else name] = members if is_whole else (name,)
    return names


def _digest(name: str, parts: Sequence[Tensor]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        raw_bytes = part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        digest.update(raw_bytes.data)
    if _VOCABULARY.search(name) is not None:
        num_rows = parts[0].shape[0]
        digest.update(bytes(-num_rows % VOCABULARY_ROWS * (parts[0].nbytes // num_rows)))
    return digest.hexdigest()[:16]
