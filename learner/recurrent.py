"""Runs recurrent layers (linear attention, state spaces, convolutions) on packed sequences.

On packed tokens, a recurrent layer would carry the state of one sequence into the next sequence. Kernels that accept
sequence boundaries (flash-linear-attention, causal-conv1d) get the boundaries. Other implementations get right-padded
sequences.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .attention import PackedLayout, packed_layout
from .packing import on_device
from .ulysses import gather_sequence, get_ulysses_sequence_parallel_rank, get_ulysses_sequence_parallel_world_size

_WITHOUT_CONVOLUTION = ("MiniMaxLightningAttention",)
"""Recurrent layers without a convolution. All other recurrent layers are recognized by their convolution."""


@dataclass(frozen=True, kw_only=True)
class _Region:
    """The packed tokens that affect a rank's own tokens.

    Attributes:
        first: Packed position of the region's first token, the start of a sequence.
        last: Packed position after the region's last token.
        own: Position of the rank's first own token within the region.
        layout: The region's sequences; the last sequence ends with the rank's tokens.
    """

    first: int
    last: int
    own: int
    layout: PackedLayout


class RecurrentLayers:
    """Patches the recurrent layers of a Hugging Face model in place, so that they run on packed sequences.

    Create this object before the model is sharded.

    Attributes:
        layers: The model's recurrent layers, in order; empty for most models.
        takes_boundaries: Whether the layers' kernels get the sequence boundaries, as ``cu_seq_lens_q`` and ``seq_idx``.
            If False, the layers run on padded sequences.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layers = [module for module in model.modules() if _carries_state(module)]
        self.takes_boundaries = bool(self.layers) and all(_has_boundary_kernels(layer) for layer in self.layers)
        self._layout: PackedLayout | None = None
        self._planned: tuple[PackedLayout, _Region] | None = None
        for layer in self.layers:
            layer.forward = torch.compiler.disable(partial(self._forward, layer.forward))
        for parent in model.modules() if self.layers else ():
            if any(child in self.layers for child in parent.children()):
                parent.register_forward_pre_hook(self._follow, with_kwargs=True)

    @property
    def types(self) -> list[str]:
        """Names of the layers' classes, sorted, without duplicates."""
        return sorted({type(layer).__name__ for layer in self.layers})

    def use(self, layout: PackedLayout | None) -> None:
        """Set where the sequences of the next forward pass begin and end.

        With None, each layer runs its original ``forward``.
        """
        self._layout = layout

    def _follow(self, _parent: nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a decoder layer runs, set the layout to the layer's argument ``packed``.

        Activation checkpointing possibly runs a decoder layer again in the backward pass, after `use` has set the
        layout of the next micro-batch.
        """
        self._layout = kwargs.get("packed", self._layout)

    def _forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a layer on packed sequences. This method replaces the layer's ``forward``.

        ``forward`` is the layer's original method. ``args`` and ``kwargs`` are the model's arguments for the layer. The
        hidden states of this rank's tokens [1, n, h] are ``args[0]``, or ``hidden_states`` in ``kwargs``.
        """
        if self._layout is None:
            return forward(*args, **kwargs)
        hidden, others = (args[0], args[1:]) if args else (kwargs.pop("hidden_states"), ())
        region = self._region(self._layout, hidden.size(1))
        tokens = gather_sequence(hidden, dim=1)[0, region.first : region.last]

        def run(x: Tensor, **told: Tensor) -> Any:
            return forward(x, *others, **(kwargs | told))

        if self.takes_boundaries:
            out, rest = _with_boundaries(run, tokens, region.layout, forward)
        else:
            out, rest = _padded(run, tokens, region.layout)
        out = out[region.own :].unsqueeze(0)
        return out if rest is None else (out, *rest)

    def _region(self, layout: PackedLayout, num_local: int) -> _Region:
        if self._planned is None or self._planned[0] is not layout:
            self._planned = (layout, _region_of_rank(layout, num_local))
        return self._planned[1]


def _carries_state(module: nn.Module) -> bool:
    if type(module).__name__ in _WITHOUT_CONVOLUTION:
        return True
    return any(isinstance(child, nn.Conv1d) for child in module.children())


def _has_boundary_kernels(layer: nn.Module) -> bool:
    """Return whether the layer runs fast kernels that accept the boundaries of packed sequences."""
    module = sys.modules[type(layer).__module__]
    accepts = "seq_idx" in inspect.signature(type(layer).forward).parameters or hasattr(layer, "chunk_gated_delta_rule")
    return accepts and bool(getattr(module, "is_fast_path_available", False))


def _region_of_rank(layout: PackedLayout, num_local: int) -> _Region:
    if get_ulysses_sequence_parallel_world_size() == 1:
        return _Region(first=0, last=num_local, own=0, layout=layout)
    first = get_ulysses_sequence_parallel_rank() * num_local
    last, end, pieces, start_of_first = first + num_local, 0, [], None
    for length in layout.lengths:
        start, end = end, end + length
        if end > first and start < last:
            start_of_first = start if start_of_first is None else start_of_first
            pieces.append(min(end, last) - start)
    begin = start_of_first or 0
    return _Region(first=begin, last=last, own=first - begin, layout=packed_layout(pieces, layout.cu_seqlens.device))


def _with_boundaries(
    run: Callable[..., Any], tokens: Tensor, layout: PackedLayout, forward: Callable[..., Any]
) -> tuple[Tensor, tuple[Any, ...] | None]:
    sequence = np.repeat(np.arange(len(layout.lengths), dtype=np.int32), layout.lengths)
    index = on_device(sequence, tokens.device)
    said: dict[str, Tensor] = {"seq_idx": index.unsqueeze(0), "cu_seq_lens_q": layout.cu_seqlens}
    known = inspect.signature(forward).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        said = {name: value for name, value in said.items() if name in known}
    out, rest = _split(run(tokens.unsqueeze(0), **said))
    return out[0], rest


def _padded(run: Callable[..., Any], tokens: Tensor, layout: PackedLayout) -> tuple[Tensor, tuple[Any, ...] | None]:
    calls = layout.padded
    if calls.pad_index is not None:
        tokens = tokens.index_select(0, calls.pad_index)
    outputs, rest = [], None
    sizes = [count * length for count, length in calls.buckets]
    for (count, length), part in zip(calls.buckets, tokens.split(sizes), strict=True):
        out, rest = _split(run(part.view(count, length, -1)))
        outputs.append(out.reshape(count * length, -1))
    merged = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return (merged if calls.unpad_index is None else merged.index_select(0, calls.unpad_index)), rest


def _split(output: Any) -> tuple[Tensor, tuple[Any, ...] | None]:
    return (output[0], tuple(output[1:])) if isinstance(output, tuple) else (output, None)
