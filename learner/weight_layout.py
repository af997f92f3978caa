"""Where each part of a model's checkpoint file comes from: which bytes a rank writes, and what has to be computed.

A tensor of the checkpoint that is a contiguous part of a parameter, which covers fused experts, is written where it
belongs at once. Others (merged adapters, transposed or joined parameters) are computed by one rank each from a raw copy
of their parameters, which the ranks write in the same manner.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers.core_model_loading import revert_weight_conversion

from asyncrl.protocol.errors import WeightsError
from asyncrl.protocol.manifest import DTYPES, StoredTensor, safetensors_header

from .fsdp import local_tensor, stored_buffers
from .lora import merged_weights
from .packed_model import PackedModel

_LAYER = re.compile(r"^.*?\blayers\.\d+\.")
_DTYPE_NAMES = {getattr(torch, dtype): name for name, dtype in DTYPES.items()}
_ALIGNMENT = 16


@dataclass(frozen=True, kw_only=True)
class Region:
    """Where a contiguous part of this rank's shard of a parameter is written.

    Attributes:
        parameter: The shard, or all of it where it is not sharded.
        first: First value within the shard, flattened; ``num_values`` follow.
        start: First byte in the file.
        dtype: As which the values are written.
    """

    parameter: Tensor
    first: int
    num_values: int
    start: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return self.num_values * self.dtype.itemsize

    def values(self) -> Tensor:
        """The values now, as the parameter holds them."""
        return local_tensor(self.parameter.detach()).reshape(-1)[self.first : self.first + self.num_values]


class ModelLayout:
    """Which bytes of a model's checkpoint file this rank writes, and how the rest is computed.

    Attributes:
        head: Bytes of the file before its data.
        tensors: Every tensor of the file.
        regions: What this rank writes there.
        raw_regions: What this rank writes into the raw file.
        num_bytes: Of the file; ``num_raw_bytes`` of the raw file, 0 where nothing is to be computed.
    """

    def __init__(self, model: PackedModel) -> None:
        """Lay a plain or sharded model out. The same on every rank but for the regions.

        Raises:
            WeightsError: a parameter is sharded otherwise than by rows, or a conversion cannot be done by layers.
        """
        self._model = model
        held = {**dict(model.head.named_parameters()), **stored_buffers(model.head)}
        self._held = {name.removeprefix("pretrained."): tensor for name, tensor in held.items()}
        meta = {name: _as_published(tensor, model.compute_dtype) for name, tensor in self._held.items()}
        # Wide types first, so that every tensor starts at a multiple of its type's size; and alike on all ranks.
        published = dict(sorted(self._converted(meta).items(), key=lambda item: (-item[1].element_size(), item[0])))
        sizes = [(name, _DTYPE_NAMES[t.dtype], t.shape, t.nbytes) for name, t in published.items()]
        self.head, starts = safetensors_header(sizes)
        self.tensors = tuple(
            StoredTensor(name=name, dtype=dtype, shape=tuple(shape), file=0, start=start, num_bytes=num_bytes)
            for (name, dtype, shape, num_bytes), start in zip(sizes, starts, strict=True)
        )
        self.num_bytes = len(self.head) + sum(tensor.num_bytes for tensor in self.tensors)
        sources = {tensor.untyped_storage()._cdata: name for name, tensor in meta.items()}
        self.regions: list[Region] = []
        computed: list[StoredTensor] = []
        for stored in self.tensors:
            tensor = published[stored.name]
            source = sources.get(tensor.untyped_storage()._cdata)
            if source is None or not tensor.is_contiguous():
                computed.append(stored)
            else:
                begin = int(tensor.storage_offset())
                self.regions += self._regions(source, begin, tensor.numel(), stored.start, tensor.dtype)
        written = {published[t.name].untyped_storage()._cdata for t in self.tensors if t not in computed}
        self._plan_computed(computed, [name for storage, name in sources.items() if storage not in written])

    def _plan_computed(self, computed: Sequence[StoredTensor], needed: Sequence[str]) -> None:
        """Lay out the raw file: what ``computed`` is made of, whole, layer by layer."""
        self.raw_regions: list[Region] = []
        self._raw: dict[str, tuple[int, Tensor]] = {}
        self.num_raw_bytes = 0
        groups: dict[str, tuple[list[str], list[StoredTensor]]] = {}
        for name in needed:
            groups.setdefault(_layer_of(name), ([], []))[0].append(name)
            raw = _as_published(self._held[name], self._held[name].dtype)
            self._raw[name] = (self.num_raw_bytes, raw)
            self.raw_regions += self._regions(name, 0, raw.numel(), self.num_raw_bytes, raw.dtype)
            self.num_raw_bytes += -(-raw.nbytes // _ALIGNMENT) * _ALIGNMENT
        for stored in computed:
            groups.setdefault(_layer_of(stored.name), ([], []))[1].append(stored)
        self._groups = [group for group in groups.values() if group[1]]
        for names, outputs in self._groups:
            made = self._converted({name: self._raw[name][1] for name in names})
            if missing := sorted({stored.name for stored in outputs} - made.keys()):
                raise WeightsError(f"{missing[0]} cannot be computed from the parameters of its layer: {names}")

    def compute(self, raw: Tensor, data: Tensor, rank: int, num_ranks: int) -> list[StoredTensor]:
        """Compute this rank's part of the tensors that are no parts of parameters, and write them.

        Args:
            raw: [bytes] uint8, the raw file, written by all ranks.
            data: [bytes] uint8, the file.
            rank: Computes every ``num_ranks``-th layer.
            num_ranks: See ``rank``.
        """
        done = []
        for names, outputs in self._groups[rank::num_ranks]:
            whole = {}
            for name in names:
                start, meta = self._raw[name]
                whole[name] = raw[start : start + meta.nbytes].view(meta.dtype).view(meta.shape)
            made = self._converted(whole)
            for stored in outputs:
                place = data[stored.start : stored.start + stored.num_bytes]
                place.view(getattr(torch, DTYPES[stored.dtype])).copy_(made[stored.name].reshape(-1))
            done += outputs
        return done

    def _converted(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Whole weights by the names of parameters, as a checkpoint has them."""
        pretrained = self._model.pretrained
        return revert_weight_conversion(pretrained, merged_weights(pretrained, weights))

    def _regions(self, name: str, first: int, num_values: int, start: int, dtype: torch.dtype) -> Iterator[Region]:
        """This rank's part of a contiguous range of a parameter's values, which is written from ``start`` on."""
        own_first, own_size = _own_values(name, self._held[name])
        begin, end = max(first, own_first), min(first + num_values, own_first + own_size)
        if begin < end:
            yield Region(
                parameter=self._held[name],
                first=begin - own_first,
                num_values=end - begin,
                start=start + (begin - first) * dtype.itemsize,
                dtype=dtype,
            )


def item_bytes(stored: StoredTensor) -> int:
    """Bytes per value."""
    return getattr(torch, DTYPES[stored.dtype]).itemsize


def _as_published(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A parameter whole, without data, as ``dtype``; buffers keep their type."""
    kept = dtype if isinstance(tensor, nn.Parameter) else tensor.dtype
    return torch.empty(tensor.shape, dtype=kept, device="meta")


def _layer_of(name: str) -> str:
    match = _LAYER.match(name)
    return match[0] if match else ""


def _own_values(name: str, parameter: Tensor) -> tuple[int, int]:
    """First value and number of values, flattened, that this rank writes of a parameter; copies write nothing.

    Raises:
        WeightsError: its shards are not rows.
    """
    if not isinstance(parameter, DTensor):
        is_first = not dist.is_initialized() or dist.get_rank() == 0
        return 0, parameter.numel() if is_first else 0
    mesh, placements = parameter.device_mesh, parameter.placements
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    copies = [mesh.get_local_rank(axis) for axis, placement in enumerate(placements) if placement.is_replicate()]
    if tuple(shape[1:]) != tuple(parameter.shape[1:]):
        raise WeightsError(f"{name} is sharded as {placements}; weights are published from shards of dimension 0")
    if any(copies):
        return 0, 0
    row = parameter.shape[1:].numel()
    return (offset[0] if offset else 0) * row, int(torch.Size(shape).numel())
