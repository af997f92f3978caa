"""Causal attention over packed sequences, entered through transformers' attention registry.

No token sees another sequence. On a GPU in half precision it is torch's variable-length kernel. Elsewhere sequences of
equal or like length go through one SDPA call, padded on the right: under a causal mask no real token sees the
padding, so the result is exact, and many short sequences cost one call instead of one each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from .ulysses import (
    gather_heads_scatter_seq,
    gather_seq_scatter_heads,
    get_ulysses_sequence_parallel_world_size,
    replicate_kv_heads,
    validate_ulysses_config,
)

ATTENTION_NAME = "asyncrl_packed"
"""Name of the packed attention in transformers' registry."""

MAX_PADDING = 0.25
"""A batch of padded sequences holds sequences at least this close to its longest: length >= longest * (1 - x)."""

TOKENS_PER_CALL = 200
"""One more SDPA call costs as much as moving this many tokens to padded places and back (measured on a CPU)."""

FREE_PADDING_TOKENS = 128
"""Padding in all that costs less than one more SDPA call (measured on a CPU); up to it, any lengths share a batch."""


@dataclass(frozen=True, kw_only=True)
class PackedLayout:
    """Where the sequences of a micro-batch lie; built once, used by every layer.

    Attributes:
        buckets: (number of sequences, padded length) of every SDPA call, in packed order.
        pad_index: [padded tokens] int64, packed token of every padded place; None when nothing is padded.
        unpad_index: [N] int64, padded place of every packed token; None when nothing is padded.
        cu_seqlens: [number of sequences + 1] int32, starts and end of the sequences.
        max_length: Tokens of the longest sequence.
    """

    buckets: tuple[tuple[int, int], ...]
    pad_index: Tensor | None
    unpad_index: Tensor | None
    cu_seqlens: Tensor
    max_length: int


def packed_layout(lengths: Sequence[int], device: torch.device) -> PackedLayout:
    """Plan the attention calls for sequences laid end to end.

    Args:
        lengths: Tokens of every sequence, longest first.
        device: Where the indices are needed.

    Returns:
        A layout whose padded batches waste at most a quarter of their places, or `FREE_PADDING_TOKENS`.
    """
    sizes = np.asarray(lengths)
    starts = np.cumsum(sizes) - sizes
    buckets, pad, unpad, places = [], [], [], 0
    for first, last in _runs(lengths):
        longest = int(sizes[first])
        offsets = np.arange(longest)
        rows = starts[first:last, None] + np.minimum(offsets[None], sizes[first:last, None] - 1)
        real = offsets[None] < sizes[first:last, None]
        buckets.append((last - first, longest))
        pad.append(rows.reshape(-1))
        unpad.append(places + np.flatnonzero(real.reshape(-1)))
        places += rows.size
    whole = places == int(sizes.sum())
    return PackedLayout(
        buckets=tuple(buckets),
        pad_index=None if whole else torch.from_numpy(np.concatenate(pad)).to(device),
        unpad_index=None if whole else torch.from_numpy(np.concatenate(unpad)).to(device),
        cu_seqlens=torch.from_numpy(np.append(starts, sizes.sum()).astype(np.int32)).to(device),
        max_length=int(sizes[0]),
    )


def _runs(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Split descending lengths into [first, last) runs that share a batch, without padding where that is cheaper."""
    tolerance, free = MAX_PADDING, FREE_PADDING_TOKENS
    if len(set(lengths)) * TOKENS_PER_CALL <= sum(lengths):
        tolerance, free = 0.0, 0
    runs, first, padding = [], 0, 0
    for index, length in enumerate(lengths):
        longest = lengths[first]
        padding += longest - length
        if padding > free and length < longest * (1 - tolerance):
            runs.append((first, index))
            first, padding = index, 0
    return [*runs, (first, len(lengths))]


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: PackedLayout,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """Attend within each packed sequence.

    Args:
        module: The attention layer; unused.
        query: [1, H, N, D]; under sequence parallelism N is this rank's part of the tokens, here and in the result.
        key: [1, kv heads, N, D].
        value: [1, kv heads, N, D].
        attention_mask: None; the layout says who sees whom.
        packed: Layout of all tokens.
        scaling: Factor on the scores; None is D ** -0.5.
        dropout: Dropout of the attention weights.
        sliding_window: A token sees this many tokens, itself included; None sees all before it.
        extra: What the model passes besides; ``softcap`` and ``s_aux`` change the scores and are refused.

    Returns:
        [1, N, H, D], and None for the weights.

    Raises:
        ValueError: the model needs an attention that this one is not.
    """
    for name in ("softcap", "s_aux"):
        if extra.get(name) is not None:
            raise ValueError(f"packed attention does not know {name}, which {type(module).__name__} needs")
    q, k, v = (x.transpose(1, 2) for x in _all_tokens(query, key, value))
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and dropout == 0.0:
        out = _varlen(q[0], k[0], v[0], packed, scaling, sliding_window)
    else:
        out = _bucketed(q[0], k[0], v[0], packed, scaling, dropout, sliding_window)
    return gather_heads_scatter_seq(out.unsqueeze(0), head_dim=2, seq_dim=1), None


def _all_tokens(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[1, heads, tokens, D] of this rank's tokens to all tokens with this rank's heads, under sequence parallelism."""
    sp_size, num_heads = get_ulysses_sequence_parallel_world_size(), query.size(1)
    if sp_size == 1:
        return query, key, value
    validate_ulysses_config(num_heads, sp_size)
    key, value = (replicate_kv_heads(x, 1, num_heads, sp_size) for x in (key, value))
    query, key, value = (gather_seq_scatter_heads(x, seq_dim=2, head_dim=1) for x in (query, key, value))
    return query, key, value


def _bucketed(
    q: Tensor, k: Tensor, v: Tensor, packed: PackedLayout, scaling: float | None, dropout: float, window: int | None
) -> Tensor:
    """[N, H, D] attention by one SDPA call a bucket."""
    num_tokens, num_heads, head_dim = q.shape
    if packed.pad_index is not None:
        q, k, v = (
            x.reshape(num_tokens, -1).index_select(0, packed.pad_index).view(-1, *x.shape[1:]) for x in (q, k, v)
        )
    sizes = [count * length for count, length in packed.buckets]
    outputs = []
    for (count, length), *qkv in zip(packed.buckets, q.split(sizes), k.split(sizes), v.split(sizes), strict=True):
        batched = (x.view(count, length, *x.shape[1:]).transpose(1, 2) for x in qkv)
        mask = _band(length, window, q.device) if window is not None and window < length else None
        out = F.scaled_dot_product_attention(
            *batched, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scaling, enable_gqa=True
        )
        outputs.append(out.transpose(1, 2).reshape(count * length, num_heads * head_dim))
    merged = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    if packed.unpad_index is not None:
        merged = merged.index_select(0, packed.unpad_index)
    return merged.view(num_tokens, num_heads, head_dim)


def _band(length: int, window: int, device: torch.device) -> Tensor:
    """[length, length] bool, True where a token sees another: itself and the ``window - 1`` before it."""
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)[None]
    return (distance >= 0) & (distance < window)


def _varlen(q: Tensor, k: Tensor, v: Tensor, packed: PackedLayout, scaling: float | None, window: int | None) -> Tensor:
    """[N, H, D] attention by torch's variable-length kernel."""
    from torch.nn.attention.varlen import varlen_attn  # only there with CUDA support

    span = (-1, 0) if window is None else (window - 1, 0)
    starts, longest = packed.cu_seqlens, packed.max_length
    out = varlen_attn(q, k, v, starts, starts, longest, longest, window_size=span, scale=scaling, enable_gqa=True)
    assert isinstance(out, Tensor)
    return out


# Its calls differ from batch to batch: traced, they would be compiled anew each time. Compiled layers call it as it is.
AttentionInterface.register(ATTENTION_NAME, torch.compiler.disable(packed_attention))
