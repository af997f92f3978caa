"""Ulysses sequence parallelism (arXiv 2309.14509): several ranks compute the same sequences together.

sp is the number of these ranks. Outside attention, each rank holds N/sp of the N packed tokens and all H heads. Inside
attention, each rank holds all N tokens and H/sp heads. By default, functions use the process group of the innermost
`UlyssesShardingManager` context. Without a group, or with one rank, functions that exchange tokens return their input.
"""

from __future__ import annotations

import math
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from asyncrl.single_controller import DataProto, all_gather_data_proto

_group: ProcessGroup | None = None


def set_ulysses_sequence_parallel_group(group: ProcessGroup | None) -> None:
    """Set the process group that this module's functions use by default. None switches sequence parallelism off."""
    global _group
    _group = group


def get_ulysses_sequence_parallel_group() -> ProcessGroup | None:
    """Return the process group that this module's functions use by default, or None."""
    return _group


def get_ulysses_sequence_parallel_world_size(group: ProcessGroup | None = None) -> int:
    """Return the number of ranks in ``group``, or in the default group; 1 without a group."""
    group = group or _group
    return dist.get_world_size(group) if group is not None else 1


def get_ulysses_sequence_parallel_rank(group: ProcessGroup | None = None) -> int:
    """Return the index of this rank in ``group``, or in the default group; 0 without a group."""
    group = group or _group
    return dist.get_rank(group) if group is not None else 0


def validate_ulysses_config(num_heads: int, ulysses_sequence_size: int) -> None:
    """Check that ``ulysses_sequence_size`` divides ``num_heads``. Raises `ValueError` if it does not."""
    if ulysses_sequence_size < 1 or num_heads % ulysses_sequence_size:
        raise ValueError(
            f"learner.sp_size must divide the model's attention heads, got sp_size={ulysses_sequence_size} "
            f"for {num_heads} heads"
        )


def gather_seq_scatter_heads(
    x: Tensor, seq_dim: int, head_dim: int, unpadded_dim_size: int = 0, group: ProcessGroup | None = None
) -> Tensor:
    """Gather the tokens of all sp sequence-parallel ranks, and keep only this rank's heads (all-to-all).

    ``x`` has this rank's tokens and all heads. Example: [1, N/sp, H, D] with ``seq_dim`` 1 and ``head_dim`` 2 gives
    [1, N, H/sp, D]. H must be a multiple of sp. Tokens from ``unpadded_dim_size`` on are padding and are removed; 0
    removes no tokens.
    """
    group = _shared(group)
    if group is None:
        return x
    gathered = _SeqAllToAll.apply(group, x, head_dim, seq_dim)
    if unpadded_dim_size and gathered.size(seq_dim) > unpadded_dim_size:  # type: ignore[union-attr]
        return gathered.narrow(seq_dim, 0, unpadded_dim_size)  # type: ignore[union-attr]
    return gathered  # type: ignore[return-value]


def gather_heads_scatter_seq(x: Tensor, head_dim: int, seq_dim: int, group: ProcessGroup | None = None) -> Tensor:
    """Gather the heads of all sp sequence-parallel ranks, and keep only this rank's tokens (all-to-all).

    ``x`` has all tokens and this rank's heads. Example: [1, N, H/sp, D] with ``seq_dim`` 1 and ``head_dim`` 2 gives
    [1, N/sp, H, D]. The tokens are first padded at the end to a multiple of sp.
    """
    group = _shared(group)
    if group is None:
        return x
    return _SeqAllToAll.apply(group, _pad_end(x, seq_dim, dist.get_world_size(group)), seq_dim, head_dim)  # type: ignore[return-value]


def gather_outputs_and_unpad(
    x: Tensor,
    gather_dim: int,
    unpad_dim: int | None = None,
    padding_size: int = 0,
    grad_scaler: bool = True,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Return the tokens of all sequence-parallel ranks, in rank order.

    Args:
        x: This rank's tokens along ``gather_dim``. All ranks must have the same number of tokens.
        gather_dim: Dimension of the tokens.
        unpad_dim: Dimension to remove padding from; None keeps the padding.
        padding_size: Number of entries to remove from the end of ``unpad_dim``.
        grad_scaler: Multiply the gradient by sp, for a loss that is later averaged over the sequence-parallel ranks.
        group: The sequence-parallel ranks; None is the default group.
    """
    group = _shared(group)
    if group is None:
        return x
    gathered: Any = _Gather.apply(group, x, gather_dim, "scaled" if grad_scaler else "part")
    if unpad_dim is not None and padding_size:
        gathered = gathered.narrow(unpad_dim, 0, gathered.size(unpad_dim) - padding_size)
    return gathered


def gather_sequence(x: Tensor, dim: int, group: ProcessGroup | None = None) -> Tensor:
    """Return the tokens of all sequence-parallel ranks, in rank order, for a layer that mixes tokens.

    ``x`` holds this rank's tokens along ``dim``. All ranks must have the same number of tokens. The gradient of a token
    is the sum of the gradients from all ranks.
    """
    group = _shared(group)
    return x if group is None else _Gather.apply(group, x, dim, "sum")  # type: ignore[return-value]


def ulysses_pad(
    input_ids_rmpad: Tensor, position_ids_rmpad: Tensor | None = None, sp_size: int = 1, pad_value: int = 0
) -> tuple[Tensor, Tensor | None, int]:
    """Pad packed tokens [1, N] at the end with ``pad_value``, so that ``sp_size`` divides their number.

    Position ids are [1, N], or [axes, 1, N] for rotary embeddings with several axes. Other shapes raise `ValueError`.

    Returns:
        A triple: input ids and position ids, [1, ceil(N / sp) * sp], and the number of added tokens. The positions of
        the padding count from 0.
    """
    if position_ids_rmpad is not None and position_ids_rmpad.shape[-2:] != (1, input_ids_rmpad.size(-1)):
        raise ValueError(
            f"position_ids_rmpad must be [..., 1, N] for input ids of shape {tuple(input_ids_rmpad.shape)}, "
            f"got {tuple(position_ids_rmpad.shape)}"
        )
    padding = -input_ids_rmpad.size(-1) % sp_size
    if padding == 0:
        return input_ids_rmpad, position_ids_rmpad, 0
    if position_ids_rmpad is not None:
        counted = torch.arange(padding, device=position_ids_rmpad.device, dtype=position_ids_rmpad.dtype)
        added = counted.expand(*position_ids_rmpad.shape[:-1], padding)
        position_ids_rmpad = torch.cat((position_ids_rmpad, added), dim=-1)
    return F.pad(input_ids_rmpad, (0, padding), value=pad_value), position_ids_rmpad, padding


def ulysses_pad_and_slice_inputs(
    input_ids_rmpad: Tensor,
    position_ids_rmpad: Tensor | None = None,
    sp_size: int = 1,
    skip_position_ids_rmpad: bool = False,
) -> tuple[Tensor, Tensor | None, int]:
    """Pad packed tokens with `ulysses_pad`, and keep only this rank's tokens.

    Returns a triple: this rank's input ids and position ids, [1, ceil(N / sp)], and the number of added tokens. With
    ``skip_position_ids_rmpad``, the position ids are padded but not sliced.
    """
    input_ids, position_ids, padding = ulysses_pad(input_ids_rmpad, position_ids_rmpad, sp_size)
    if sp_size > 1:
        input_ids = slice_input_tensor(input_ids, dim=1, padding=False)
        if position_ids is not None and not skip_position_ids_rmpad:
            position_ids = slice_input_tensor(position_ids, dim=-1, padding=False)
    return input_ids, position_ids, padding


def slice_input_tensor(x: Tensor, dim: int, padding: bool = True, group: ProcessGroup | None = None) -> Tensor:
    """Return this rank's contiguous slice of ``x`` along ``dim``.

    With ``padding``, zeros are first added at the end of ``dim``, so that sp divides its size. Without ``padding``,
    `ValueError` is raised if sp does not divide the size.
    """
    num_ranks = get_ulysses_sequence_parallel_world_size(group)
    if padding:
        x = _pad_end(x, dim, num_ranks)
    if x.size(dim) % num_ranks:
        raise ValueError(f"dimension {dim} of {tuple(x.shape)} cannot be split over {num_ranks} ranks; pad it first")
    return x.chunk(num_ranks, dim=dim)[get_ulysses_sequence_parallel_rank(group)].contiguous()


def replicate_kv_heads(x: Tensor, head_dim: int, num_heads: int, sp_size: int) -> Tensor:
    """Repeat key or value heads, so that each sequence-parallel rank can get the heads that its query heads need.

    ``num_heads`` is the number of query heads, a multiple of the key-value heads and of ``sp_size``. The result has the
    smallest number of heads that is a multiple of both ``sp_size`` and the number of key-value heads.
    """
    num_kv_heads = x.size(head_dim)
    wanted = math.lcm(num_kv_heads, sp_size)
    if num_heads % wanted:
        wanted = num_heads
    return x if wanted == num_kv_heads else x.repeat_interleave(wanted // num_kv_heads, dim=head_dim)


class UlyssesShardingManager:
    """A context in which a model runs on sequences that are split over the sequence-parallel ranks.

    The context sets the default group of this module, and restores the previous group on exit. Contexts can be nested.
    `preprocess_data` and `postprocess_data` are for computations that do not split sequences themselves.

    Args:
        device_mesh: Mesh with an axis ``sp``. With None, the context and both methods have no effect.
    """

    def __init__(self, device_mesh: DeviceMesh | None) -> None:
        self.device_mesh = device_mesh
        self._mesh = None if device_mesh is None else device_mesh["sp"]
        self._group = None if self._mesh is None else self._mesh.get_group()
        self._before: list[ProcessGroup | None] = []

    def __enter__(self) -> UlyssesShardingManager:
        if self._mesh is not None:
            self._before.append(get_ulysses_sequence_parallel_group())
            set_ulysses_sequence_parallel_group(self._group)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._mesh is not None:
            set_ulysses_sequence_parallel_group(self._before.pop())

    def preprocess_data(self, data: DataProto) -> DataProto:
        """Gather the rows of all sequence-parallel ranks into ``data``, in place, in rank order. Return ``data``."""
        if self._mesh is None or self._mesh.size() == 1:
            return data
        all_gather_data_proto(data, self._group)
        return data

    def postprocess_data(self, data: DataProto) -> DataProto:
        """Undo `preprocess_data`: return only this rank's rows of ``data``. Each rank gets the same number of rows.

        The number of sequence-parallel ranks must divide the number of rows.
        """
        if self._mesh is None or self._mesh.size() == 1:
            return data
        return data.chunk(chunks=self._mesh.size())[self._mesh.get_local_rank()]


def _shared(group: ProcessGroup | None) -> ProcessGroup | None:
    group = group or _group
    return group if group is not None and dist.get_world_size(group) > 1 else None


def _pad_end(x: Tensor, dim: int, multiple: int) -> Tensor:
    padding = -x.size(dim) % multiple
    return F.pad(x, [0, 0] * (x.ndim - 1 - dim % x.ndim) + [0, padding]) if padding else x


def _all_to_all(x: Tensor, scatter_dim: int, gather_dim: int, group: ProcessGroup) -> Tensor:
    """Split dimension ``scatter_dim`` over the ranks, and concatenate the received slices along ``gather_dim``.

    A contiguous tensor is copied at most once if all dimensions before these two have size 1, as in [1, N, H, D].
    """
    num_ranks = dist.get_world_size(group)
    if x.size(scatter_dim) % num_ranks:
        raise ValueError(f"dimension {scatter_dim} of {tuple(x.shape)} cannot be split over {num_ranks} ranks")
    sent = x.unflatten(scatter_dim, (num_ranks, -1)).movedim(scatter_dim, 0)
    return _exchanged(sent, group).movedim(0, gather_dim).flatten(gather_dim, gather_dim + 1)


def _exchanged(parts: Tensor, group: ProcessGroup) -> Tensor:
    """Send entry i of the leading dimension to rank i. Entry i of the result is the entry received from rank i.

    The sent and the received tensor are contiguous. gloo fills a non-contiguous output incorrectly, without an error.
    """
    sent = parts.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received


class _SeqAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, x: Tensor, scatter_dim: int, gather_dim: int) -> Tensor:
        ctx.group, ctx.dims = group, (gather_dim, scatter_dim)
        return _all_to_all(x, scatter_dim, gather_dim, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return None, _all_to_all(grad_outputs[0], ctx.dims[0], ctx.dims[1], ctx.group), None, None


class _Gather(torch.autograd.Function):
    """Gathers the tokens of all ranks.

    In the backward pass, each rank gets a gradient of all tokens, and returns a gradient of its own tokens. The
    argument ``gradient`` selects the returned gradient:

    - ``part``: the gradient that this rank got.
    - ``scaled``: the gradient that this rank got, times the number of ranks.
    - ``sum``: the sum of the gradients that all ranks got.
    """

    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, x: Tensor, dim: int, gradient: str) -> Tensor:
        ctx.group, ctx.dim, ctx.gradient = group, dim, gradient
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim=dim)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        parts = grad_outputs[0].chunk(dist.get_world_size(ctx.group), dim=ctx.dim)
        if ctx.gradient == "sum":
            return None, _exchanged(torch.stack(parts), ctx.group).sum(0), None, None
        part = parts[dist.get_rank(ctx.group)]
        return None, part * len(parts) if ctx.gradient == "scaled" else part.contiguous(), None, None
