"""Finds the sequence length up to which a model's rotary embeddings do not depend on other sequences of the batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_BY_LONGEST = frozenset({"longrope", "su", "dynamic"})
"""Rope types that change the frequencies of all tokens when the largest position exceeds the original length.
transformers uses the largest position of a call (``dynamic_rope_update``). SGLang uses the largest position of a batch.
The log-probs of a sequence that is longer than the original length therefore depend on the other sequences."""


def rope_limit(settings: Mapping[str, Any]) -> int | None:
    """Return the largest length, in tokens, at which log-probs do not depend on other sequences of the batch.

    None means no limit. ``settings`` is the ``config.json`` of a text model. Example: Phi-3-mini-128k gives 4096.
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
