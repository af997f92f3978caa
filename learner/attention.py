"""Causal attention over packed sequences, registered in transformers' attention registry.

On a GPU in half precision, attention calls a variable-length kernel (such as flash-attn) if one is usable. Otherwise
one call of torch's ``scaled_dot_product_attention`` (SDPA) computes several sequences of similar length, padded on the
right. The causal mask hides the padding, so the result is exact.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from .attention_kernels import call_kernel, takes_soft_cap
from .config import AttentionKernel
from .packing import on_device
from .ulysses import (
    gather_heads_scatter_seq,
    gather_seq_scatter_heads,
    get_ulysses_sequence_parallel_rank,
    get_ulysses_sequence_parallel_world_size,
    replicate_kv_heads,
    validate_ulysses_config,
)

ATTENTION_NAME = "asyncrl_packed"

MAX_PADDING = 0.25
"""Each sequence of a padded batch has at least the length ``longest * (1 - MAX_PADDING)``. ``longest`` is the length of
the batch's longest sequence. Shorter sequences are allowed if the batch has at most `FREE_PADDING_TOKENS` padding
tokens."""

TOKENS_PER_CALL = 200
"""One more SDPA call costs as much as padding and unpadding this many tokens (measured on a CPU)."""

FREE_PADDING_TOKENS = 128
"""A padded batch may always have up to this many padding tokens. They cost less than one more SDPA call (measured on a
CPU)."""


CAPPED_QUERIES = 512
"""Number of queries per block of attention with a soft cap. Only the scores of one block are in memory."""

BLOCK_QUERIES, MAX_BLOCK_QUERIES = 128, 1024
"""Smallest and largest number of queries per SDPA call with a sliding window or attention sinks. Between these limits,
the number of queries is the window size. Without a window, it is the padded length of the sequences."""
MAX_FLASH_DIM = 256
"""Largest head size of SDPA's FlashAttention on CUDA."""


@dataclass(frozen=True, kw_only=True)
class PaddedCalls:
    """The SDPA calls for a `PackedLayout`. Each call computes one batch of sequences, padded to the same length.

    Attributes:
        buckets: (number of sequences, padded length) of each call, in packed order.
        pad_index: [tokens of all calls, with padding] int64, the packed position to copy each token from; None if no
            tokens are padded or shared.
        unpad_index: [N] int64, position of each packed token among the tokens of all calls; None if no tokens are
            padded or shared.
    """

    buckets: tuple[tuple[int, int], ...]
    pad_index: Tensor | None
    unpad_index: Tensor | None


@dataclass(frozen=True, kw_only=True)
class PackedLayout:
    """Describes where the sequences of a micro-batch lie among the N packed tokens. All layers use the same layout.

    The host computes the index tensors and copies them to the device, so no layer waits for the device. Sequences can
    share prompt tokens. The *packed tokens* contain a shared token once. The *concatenated sequences* contain one copy
    of a shared token per sequence.

    Attributes:
        cu_seqlens: [number of sequences + 1] int32, start of each sequence in the concatenated sequences, then the end
            of the last.
        lengths: Number of tokens of each sequence.
        kernel: The attention kernel; never ``auto``.
        token_index: [sum of lengths] int64. For each token of each sequence, its position among the packed tokens.
            None if no tokens are shared.
        first_index: [N] int64. For each packed token, the position of its first copy in the concatenated sequences.
            None if no tokens are shared.
        host_token_index: A copy of ``token_index`` on the host.
    """

    cu_seqlens: Tensor
    lengths: tuple[int, ...]
    kernel: AttentionKernel = AttentionKernel.sdpa
    token_index: Tensor | None = None
    first_index: Tensor | None = None
    host_token_index: np.ndarray | None = None

    @cached_property
    def max_length(self) -> int:
        """Number of tokens of the longest sequence."""
        return max(self.lengths)

    @cached_property
    def padded(self) -> PaddedCalls:
        """The padded batches for torch's ``scaled_dot_product_attention`` (SDPA), one per call.

        Layers without a variable-length kernel use these batches. If the sequences are sorted from long to short, at
        most a quarter of the tokens in a batch are padding. This limit does not apply to a batch that has at most
        `FREE_PADDING_TOKENS` padding tokens.
        """
        sizes = np.asarray(self.lengths)
        starts = np.cumsum(sizes) - sizes
        buckets, pad, unpad, places = [], [], [], 0
        for first, last in _runs(self.lengths):
            longest = int(sizes[first])
            offsets = np.arange(longest)
            rows = starts[first:last, None] + np.minimum(offsets[None], sizes[first:last, None] - 1)
            real = offsets[None] < sizes[first:last, None]
            buckets.append((last - first, longest))
            pad.append(rows.reshape(-1))
            unpad.append(places + np.flatnonzero(real.reshape(-1)))
            places += rows.size
        pad_index, unpad_index, device = self.token_index, self.first_index, self.cu_seqlens.device
        if places != int(sizes.sum()):
            pad_index, unpad_index = (on_device(np.concatenate(x), device) for x in (pad, unpad))
            if self.token_index is not None and self.first_index is not None:
                pad_index, unpad_index = self.token_index[pad_index], unpad_index[self.first_index]
        return PaddedCalls(buckets=tuple(buckets), pad_index=pad_index, unpad_index=unpad_index)

    def cut(self, chunk: int) -> PackedLayout:
        """Return a layout in which each sequence is cut into sequences of ``chunk`` tokens.

        With this layout, attention does not cross the borders of chunks. The last chunk of a sequence may be shorter.
        """
        pieces = [min(chunk, length - start) for length in self.lengths for start in range(0, length, chunk)]
        return packed_layout(pieces, self.cu_seqlens.device, self.kernel, self.host_token_index)

    def positions(self) -> Tensor:
        """Return [N] int64: the position of each packed token in its own sequence, counted from 0."""
        places = np.concatenate([np.arange(length) for length in self.lengths])
        on_the_device = on_device(places, self.cu_seqlens.device)
        return on_the_device if self.first_index is None else on_the_device[self.first_index]


def packed_layout(
    lengths: Sequence[int],
    device: torch.device,
    kernel: AttentionKernel = AttentionKernel.sdpa,
    token_index: np.ndarray | None = None,
) -> PackedLayout:
    """Make the layout of sequences that are packed one after the other.

    Args:
        lengths: Number of tokens of each sequence, in packed order. Every order is valid. If the sequences are
            sorted from long to short, each padded batch holds sequences of similar length, and SDPA needs few calls.
        device: Device of the indices.
        kernel: The attention kernel; not ``auto``.
        token_index: [sum of lengths] int64. For each token of each sequence, its position among the packed tokens. A
            prompt token that several sequences share is packed once. None if no tokens are shared.
    """
    ends = np.concatenate((np.zeros(1, dtype=np.int32), np.cumsum(lengths, dtype=np.int32)))
    layout = PackedLayout(cu_seqlens=on_device(ends, device), lengths=tuple(map(int, lengths)), kernel=kernel)
    if token_index is None:
        return layout
    first = np.unique(token_index, return_index=True)[1]
    return replace(
        layout,
        token_index=on_device(token_index, device),
        first_index=on_device(first, device),
        host_token_index=token_index,
    )


def _runs(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Divide the sequences among padded batches. Return the range [first, last) of sequence indices of each batch."""
    tolerance, free = MAX_PADDING, FREE_PADDING_TOKENS
    if len(set(lengths)) * TOKENS_PER_CALL <= sum(lengths):
        tolerance, free = 0.0, 0
    runs, first, padding = [], 0, 0
    for index, length in enumerate(lengths):
        longest = lengths[first]
        padding += longest - length
        if length > longest or (padding > free and length < longest * (1 - tolerance)):
            runs.append((first, index))
            first, padding = index, 0
    return [*runs, (first, len(lengths))]


class _CheckpointedLayer(threading.local):
    """The state of `attention_kept`, separate per thread. On a GPU, the backward pass runs in another thread."""

    attend: Callable[[Callable[[], Tensor]], Tensor] | None = None


_layer = _CheckpointedLayer()


def attention_kept() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return two contexts for a layer with activation checkpointing: for the forward pass, and for its recomputation.

    Use this function as the ``context_fn`` of `torch.utils.checkpoint.checkpoint`. The first context keeps the inputs
    and output of attention, so attention and its collectives run only once. Attention with sinks still runs again.
    torch's selective checkpointing cannot do this, because it does not see kernels outside of torch's dispatcher.
    """
    outputs: deque[Tensor] = deque()

    def keep(attend: Callable[[], Tensor]) -> Tensor:
        # Without these hooks, activation checkpointing would drop the tensors that the backward pass needs.
        with saved_tensors_hooks(_alone, lambda tensor: tensor):
            out = attend()
        outputs.append(out.detach().requires_grad_(out.requires_grad))
        return out

    return _attending(keep), _attending(lambda _: outputs.popleft())


def _alone(tensor: Tensor) -> Tensor:
    """Return a copy of the tensor if it is a slice of a larger tensor. A slice would keep the larger tensor alive."""
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


@contextmanager
def _attending(attend: Callable[[Callable[[], Tensor]], Tensor]) -> Iterator[None]:
    before, _layer.attend = _layer.attend, attend
    try:
        yield
    finally:
        _layer.attend = before


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
    """Compute causal attention of packed sequences. A token attends only to tokens of its own sequence.

    Args:
        module: The attention layer.
        query: [1, H, N, D]. Under sequence parallelism, N counts only this rank's tokens, also in the result.
        key: [1, kv heads, N, D].
        value: [1, kv heads, N, Dv]; Dv may differ from D.
        attention_mask: Not used; the layout defines which tokens attend to each other.
        packed: Layout of the sequences of all ranks.
        scaling: Factor on the scores; None is D ** -0.5.
        dropout: Dropout of the attention weights.
        sliding_window: A token attends to this many tokens, including itself; None means no window.
        extra: Other arguments of the model. ``s_aux`` [H] are attention sinks (GPT-OSS). ``softcap`` c replaces each
            score s by c · tanh(s / c) (Gemma 2, arXiv 2408.00118).

    Returns:
        [1, N, H, Dv], and None instead of the attention weights.

    Raises:
        ValueError: the model has both sinks and a soft cap.
    """
    cap = extra.get("softcap")
    if cap is not None and extra.get("s_aux") is not None:
        raise ValueError(f"packed attention supports sinks or a soft cap, got both in {type(module).__name__}")
    options = {"scaling": scaling, "dropout": dropout, "cap": cap, "sinks": extra.get("s_aux")}
    attend = partial(attended, module, query, key, value, packed, sliding_window=sliding_window, **options)
    # With attention sinks, a layer with activation checkpointing computes its attention again in the backward pass.
    # Keeping the inputs of attention would need several times the memory, because sinks enlarge the keys and values.
    return attend() if _layer.attend is None or options["sinks"] is not None else _layer.attend(attend), None


def attended(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: PackedLayout,
    *,
    scaling: float | None,
    dropout: float,
    sliding_window: int | None,
    cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Compute a layer's attention over packed sequences. Returns the outputs at this rank's tokens, [1, N, H, D]."""
    window, chunk = _span(module, sliding_window)
    num_local = query.size(2)
    q, k, v = _all_tokens(query, key, value)
    q = _own_temperature(module, q, packed, num_local)
    if sinks is not None:
        sinks = sinks.chunk(get_ulysses_sequence_parallel_world_size())[get_ulysses_sequence_parallel_rank()]
    if chunk is not None and chunk < packed.max_length:
        packed = packed.cut(chunk)
    is_plain = dropout == 0.0 and sinks is None and (cap is None or takes_soft_cap(packed.kernel))
    if packed.kernel is not AttentionKernel.sdpa and is_plain:
        if packed.token_index is not None:
            # Copy a shared token into each of its sequences. Then q, k and v are [sum of lengths, heads, head size].
            q, k, v = (x.index_select(0, packed.token_index) for x in (q, k, v))
        spans = {"starts": packed.cu_seqlens, "longest": packed.max_length}
        out = call_kernel(packed.kernel, q, k, v, **spans, scale=scaling, window=window, soft_cap=cap)
        if packed.first_index is not None:  # all copies of a shared token have the same output, so keep one output
            out = out.index_select(0, packed.first_index)
    else:
        out = _bucketed(q, k, v, packed, scaling=scaling, dropout=dropout, window=window, sinks=sinks, cap=cap)
    return gather_heads_scatter_seq(out.unsqueeze(0), head_dim=2, seq_dim=1)


def _span(module: nn.Module, window: int | None) -> tuple[int | None, int | None]:
    """Return a pair: a layer's sliding window, and the size of its attention chunks, both in tokens.

    The first value is None if the layer has no window. The second value is None if the layer has no chunks. Some models
    pass these sizes only through the attention mask, which asyncrl does not use.
    """
    config = getattr(module, "config", None)
    types, index = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    kind = types[index] if types and index is not None and index < len(types) else None
    if kind == "sliding_attention" and window is None:
        window = getattr(config, "sliding_window", None)
    return window, getattr(config, "attention_chunk_size", None) if kind == "chunked_attention" else None


def _own_temperature(module: nn.Module, q: Tensor, packed: PackedLayout, num_local: int) -> Tensor:
    """Correct the scale of Llama 4's queries, [N, H, D], for packed sequences.

    Llama 4 scales a query by the query's position in the input row (arXiv 2501.19399). A packed row holds several
    sequences, so this function scales a query by the query's position in its sequence instead.
    """
    if not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
        return q

    def factor(places: Tensor) -> Tensor:
        scale, floor = (cast("float", getattr(module, name)) for name in ("attn_scale", "floor_scale"))
        return torch.log1p(torch.floor((places.float() + 1.0) / floor)) * scale + 1.0

    own = packed.positions()
    given = torch.arange(len(own), device=own.device) % num_local
    return (q * (factor(own) / factor(given))[:, None, None]).to(q.dtype)


def _all_tokens(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gather the tokens of all sequence-parallel ranks, and keep only this rank's heads.

    The inputs are [1, H, n, D] with all H heads of this rank's n tokens. The results are [N, heads, D] with this rank's
    heads of all N tokens.
    """
    sp_size, num_heads = get_ulysses_sequence_parallel_world_size(), query.size(1)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    if sp_size > 1:
        validate_ulysses_config(num_heads, sp_size)
        key, value = (replicate_kv_heads(x, 2, num_heads, sp_size) for x in (key, value))
        query, key, value = (gather_seq_scatter_heads(x, seq_dim=1, head_dim=2) for x in (query, key, value))
    return query[0], key[0], value[0]


def _bucketed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: PackedLayout,
    *,
    scaling: float | None,
    dropout: float,
    window: int | None,
    sinks: Tensor | None,
    cap: float | None,
) -> Tensor:
    num_tokens, num_heads, head_dim = q.size(0), q.size(1), v.size(2)
    scale = q.size(2) ** -0.5 if scaling is None else scaling
    calls = packed.padded
    if calls.pad_index is not None:
        q, k, v = (x.reshape(num_tokens, -1).index_select(0, calls.pad_index).view(-1, *x.shape[1:]) for x in (q, k, v))
    sizes = [count * length for count, length in calls.buckets]
    outputs = []
    for (count, length), *qkv in zip(calls.buckets, q.split(sizes), k.split(sizes), v.split(sizes), strict=True):
        batched = [x.view(count, length, *x.shape[1:]).transpose(1, 2) for x in qkv]
        span = window or length
        if cap is not None:
            out = _capped(*batched, scale=scale, dropout=dropout, window=span, cap=cap)
        elif sinks is not None or span < length:
            out = _windowed(*batched, scale=scale, dropout=dropout, window=span, sinks=sinks)
        else:
            if not takes_fewer_keys(q.device, q.dtype, q.size(2)):
                batched[1:] = _repeated(*batched)
            out = F.scaled_dot_product_attention(
                *batched, dropout_p=dropout, is_causal=True, scale=scale, enable_gqa=True
            )
        outputs.append(out.transpose(1, 2).reshape(count * length, num_heads * head_dim))
    merged = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    if calls.unpad_index is not None:
        merged = merged.index_select(0, calls.unpad_index)
    return merged.view(num_tokens, num_heads, head_dim)


def _windowed(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, dropout: float, window: int, sinks: Tensor | None
) -> Tensor:
    """Compute causal attention within a window.

    q is [count, H, L, D], k is [count, kv heads, L, D] and v is [count, kv heads, L, Dv]. The result is
    [count, H, L, Dv]. ``sinks`` are [H]. A block of queries reads only the blocks of keys that overlap the queries'
    windows, so no [L, L] mask is needed.
    """
    outputs = []
    k, v = _repeated(q, k, v)
    for queries, keys, values, seen in _blocks(q, k, v, window, min(max(window, BLOCK_QUERIES), MAX_BLOCK_QUERIES)):
        block, mask = [queries, keys, values], seen
        if sinks is not None:
            block, mask = _with_sinks(*block, mask=seen, sinks=sinks / scale)
        outputs.append(F.scaled_dot_product_attention(*block, attn_mask=mask, dropout_p=dropout, scale=scale))
    return torch.cat(outputs, dim=2)


def takes_fewer_keys(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether SDPA's fused causal kernels support fewer key heads than query heads on this device.

    On CUDA, only FlashAttention supports fewer key heads. FlashAttention needs half precision and a head size of at
    most `MAX_FLASH_DIM`. SDPA's other kernels would keep the attention weights of all pairs of tokens.
    """
    return device.type != "cuda" or (dtype is not torch.float32 and head_dim <= MAX_FLASH_DIM)


def _repeated(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    groups = q.size(1) // k.size(1)
    return k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)


def _capped(q: Tensor, k: Tensor, v: Tensor, *, scale: float, dropout: float, window: int, cap: float) -> Tensor:
    """Compute causal attention within a window. Each score s is replaced by c · tanh(s / c), where c is ``cap``.

    q is [count, H, L, D], k is [count, kv heads, L, D] and v is [count, kv heads, L, Dv]. The result is
    [count, H, L, Dv]. The forward pass computes blocks of `CAPPED_QUERIES` queries, one after the other. The backward
    pass recomputes each block. Therefore only the scores of one block are in memory.
    """
    k, v = _repeated(q, k, v)

    def attend(queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
        scores = torch.tanh((queries @ keys.transpose(2, 3)).float() * (scale / cap)) * cap
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).to(values.dtype)
        return F.dropout(weights, dropout) @ values

    blocks = _blocks(q, k, v, window, CAPPED_QUERIES)
    return torch.cat([checkpoint(attend, *block, use_reentrant=False) for block in blocks], dim=2)


def _blocks(
    q: Tensor, k: Tensor, v: Tensor, window: int, num_queries: int
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Yield for each block of queries: the queries, the keys and values in their windows, and the mask.

    The mask is [queries, keys] bool. If the windows cover at most two blocks of keys, these blocks are concatenated. A
    slice of all keys would need more memory, because the gradient of a slice is as large as all keys.
    """
    chunks = k.split(num_queries, dim=2), v.split(num_queries, dim=2)
    for index, queries in enumerate(q.split(num_queries, dim=2)):
        start, end = index * num_queries, index * num_queries + queries.size(2)
        first = max(0, start - window + 1) // num_queries * num_queries
        if start - first <= num_queries:
            keys, values = (torch.cat(parts[first // num_queries : index + 1], dim=2) for parts in chunks)
        else:
            keys, values = k[:, :, first:end], v[:, :, first:end]
        distance = torch.arange(start, end, device=q.device)[:, None] - torch.arange(first, end, device=q.device)[None]
        yield queries, keys, values, (distance >= 0) & (distance < window)


def _with_sinks(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor, sinks: Tensor) -> tuple[list[Tensor], Tensor]:
    """Add a sink to attention: one more key that all tokens read. Its score is the head's sink, and its value is zero.

    Queries and keys get eight more dimensions, because GPU kernels need a multiple of eight. The first new dimension
    is the sink in queries, 1 in the added key, and 0 in other keys. The other seven new dimensions are 0.

    q is [count, H, queries, D], k [count, H, L, D], v [count, H, L, Dv], and the mask [queries, L] bool. ``sinks`` [H]
    are divided by the scale of the scores.
    """
    count, _, length, _ = q.shape
    added = F.pad(sinks.to(q.dtype).view(1, -1, 1, 1).expand(count, -1, length, 1), (0, 7))
    sink_key = F.one_hot(torch.tensor(k.size(3), device=k.device), k.size(3) + 8).to(k.dtype)
    keys = torch.cat((F.pad(k, (0, 8)), sink_key.expand(count, k.size(1), 1, -1)), dim=2)
    return [torch.cat((q, added), dim=3), keys, F.pad(v, (0, 0, 0, 1))], F.pad(mask, (0, 1), value=True)


# Exclude attention from torch.compile. The SDPA calls differ between batches, so each batch would be compiled again.
AttentionInterface.register(ATTENTION_NAME, torch.compiler.disable(packed_attention))
