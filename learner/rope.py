"""Finds the largest sequence length at which the learner computes the same log-probs as an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

_BY_LONGEST = frozenset({"longrope", "su", "dynamic"})
"""Rope types that change the frequencies of all tokens when the largest position exceeds the original length.
transformers uses the largest position of a call (``dynamic_rope_update``). SGLang uses the largest position of a batch.
The log-probs of a sequence that is longer than the original length therefore depend on the other sequences."""


class LengthLimit(NamedTuple):
    """The largest length at which the learner computes the same log-probs as an engine.

    Attributes:
        tokens: The largest length, in tokens.
        reason: What differs in longer sequences, as a part of an error message.
    """

    tokens: int
    reason: str


def length_limit(settings: Mapping[str, Any]) -> LengthLimit | None:
    """Return the smallest limit on the length of a sequence; None without a limit.

    ``settings`` is the ``config.json`` of a text model.
    """
    limits = {
        "its rotary embeddings depend on the longest sequence of a batch": rope_limit(settings),
        "its attention reads only the tokens that an indexer selects, but the learner's attention reads all tokens": (
            sparse_limit(settings)
        ),
    }
    known = [LengthLimit(tokens, reason) for reason, tokens in limits.items() if tokens is not None]
    return min(known, default=None)


def sparse_limit(settings: Mapping[str, Any]) -> int | None:
    """Return the largest length, in tokens, at which a model's sparse attention still reads all tokens.

    None means that the model's attention is not sparse. ``settings`` is the ``config.json`` of a text model. Example:
    DeepSeek-V3.2 gives 2048, its ``index_topk``.
    """
    if settings.get("index_topk"):
        return settings["index_topk"]
    # MiniMax M3's attention selects blocks of tokens. Its ``config.json`` may have a ``sparse_attention_config``.
    stored = settings.get("sparse_attention_config") or {}
    if not stored and "minimax_m3_sparse" not in (settings.get("layer_types") or ()):
        return None
    names = {"index_topk_blocks": "sparse_topk_blocks", "index_block_size": "sparse_block_size"}
    num_blocks, num_tokens = (settings.get(name, stored.get(old)) for name, old in names.items())
    return num_blocks * num_tokens if num_blocks and num_tokens else None


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
