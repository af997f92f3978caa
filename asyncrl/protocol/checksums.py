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
    checksums = {}
    for name, members in _fused_names(tensors).items():
        parts = [tensors[member] for member in members]
        checksums[name] = _digest(parts, zero_bytes=_padding_bytes(name, parts[0]))
    return checksums


def _fused_names(tensors: Mapping[str, Tensor]) -> dict[str, Sequence[str]]:
    """Engine parameter name to the Hugging Face names it is made of, in order."""
    names: dict[str, Sequence[str]] = {}
    for name in tensors:
        match = _PART.match(name)
        if match is None:
            names[name] = (name,)
            continue
        fused = next(fused for fused, parts in _FUSED.items() if match["part"] in parts)
        members = tuple(f"{match['module']}{part}{match['suffix']}" for part in _FUSED[fused])
        if all(member in tensors for member in members):
            names[f"{match['module']}{fused}{match['suffix']}"] = members
        else:
            names[name] = (name,)
    return names


def _padding_bytes(name: str, tensor: Tensor) -> int:
    if _VOCABULARY.search(name) is None:
        return 0
    missing_rows = -tensor.shape[0] % VOCABULARY_ROWS
    return missing_rows * (tensor.nbytes // tensor.shape[0])


def _digest(parts: Sequence[Tensor], *, zero_bytes: int) -> str:
    digest = hashlib.sha256()
    for part in parts:
        raw_bytes = part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        digest.update(raw_bytes.data)
    digest.update(bytes(zero_bytes))
    return digest.hexdigest()[:16]
