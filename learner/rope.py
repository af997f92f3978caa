"""Rotary embeddings that depend on the longest sequence of a batch, and the length up to which they do not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_BY_LONGEST = frozenset({"longrope", "su", "dynamic"})
"""Types whose frequencies change, for all tokens at once, when the largest position exceeds the original length.

transformers compares the largest position of the whole call with that length (``dynamic_rope_update``), SGLang that of
the whole batch. A sequence beyond it has then no log-probs of its own: they depend on what it is computed with.
"""


def rope_limit(settings: Mapping[str, Any]) -> int | None:
    """Return the longest sequence whose log-probs depend on nothing else, in tokens; None: every length.

    Args:
        settings: The ``config.json`` of a model, of text alone. Example: Phi-3-mini-128k has 4096.
    """
    parameters = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    by_layer_type = [value for value in parameters.values() if isinstance(value, Mapping)]
    limits = []
    for one in (parameters, *by_layer_type):
        kind = one.get("rope_type") or one.get("type")
        if kind not in _BY_LONGEST:
            continue
        longest = settings.get("max_position_embeddings")
        original = settings.get("original_max_position_embeddings") or one.get("original_max_position_embeddings")
        limits.append(longest if kind == "dynamic" else original or longest)
    return min((limit for limit in limits if limit), default=None)
