"""Where each part of a model's checkpoint file comes from: which bytes a rank writes, and what has to be computed.

A tensor of the checkpoint that is a contiguous part of a parameter, which covers fused experts, is written where it
belongs at once. Others (merged adapters, transposed or joined parameters) are computed layer by layer, each by one
rank, which the others send their parts of its parameters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from asyncrl.core.errors import WeightsError
from asyncrl.weights.manifest import DTYPES, StoredTensor, safetensors_header

from .fsdp import local_tensor, stored_buffers
from .lora import adapter_weights, frozen_weights, is_adapter, merged_weights, plain_name
from .plain_values import gather_values

_LAYER = re.compile(r"^.*?\blayers\.\d+\.")
_DTYPE_NAMES = {getattr(torch, dtype): name for name, dtype in DTYPES.items()}
_ALIGNMENT = 16


class Part(Enum):
    """What a file holds of a model: all of it, adapters merged; what lies below the adapters; the adapters alone."""

    whole = "whole"
    frozen = "frozen"
    adapters = "adapters"


@dataclass(frozen=True, kw_only=True)
class Region:
    """Where a contiguous part of this rank's shard of a parameter is written.

    Attributes:
        name: Of the parameter.
        parameter: The shard, or all of it where it is not sharded.
        first: First value within the shard, flattened; ``num_values`` follow.
        start: First byte in the file.
        dtype: As which the values are written.
    """

    name: str
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
        part: Of the model.
        head: Bytes of the file before its data.
        tensors: Every tensor of the file.
        tensor_of: Parameter, as it is named without adapters, to the tensor that it is as it stands; others have none.
        regions: What this rank writes there.
        raw_regions: What this rank writes into its raw copy.
        num_bytes: Of the file; ``num_raw_bytes`` of the raw copy, 0 where nothing is to be computed.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, part: Part = Part.whole) -> None:
        """Lay a plain or sharded model out, or a part of it. The same on every rank but for the regions.

        Parameters are written as ``dtype``, adapters alone as they are trained.

        Raises:
            WeightsError: a parameter is sharded otherwise than by rows, or a conversion cannot be done by layers.
        """
        self.part, self._model = part, model
        self._held = {
            name: tensor
            for name, tensor in (*model.named_parameters(), *stored_buffers(model).items())
            if part is Part.whole or is_adapter(name) is (part is Part.adapters)
        }
        # In a smaller type, small updates of adapters would be rounded away before they are merged.
        meta = {
            name: _as_published(tensor, tensor.dtype if part is Part.adapters else dtype)
            for name, tensor in self._held.items()
        }
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
        self.tensor_of: dict[str, str] = {}
        computed: list[StoredTensor] = []
        for stored in self.tensors:
            tensor = published[stored.name]
            source = sources.get(tensor.untyped_storage()._cdata)
            if source is None or not tensor.is_contiguous():
                computed.append(stored)
            else:
                begin = int(tensor.storage_offset())
                if tensor.shape == self._held[source].shape:
                    self.tensor_of[plain_name(source)] = stored.name
                self.regions += self._regions(source, begin, tensor.numel(), stored.start, tensor.dtype)
        written = {published[t.name].untyped_storage()._cdata for t in self.tensors if t not in computed}
        self._plan_computed(computed, [name for storage, name in sources.items() if storage not in written])

    def _plan_computed(self, computed: Sequence[StoredTensor], needed: Sequence[str]) -> None:
        """Lay out the raw copy: what ``computed`` is made of, whole, layer by layer."""
        self.raw_regions: list[Region] = []
        self._raw: dict[str, tuple[int, Tensor]] = {}
        self._spans: list[list[tuple[str, int, int]]] | None = None
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

    def exchange(self, raw: Tensor, group: dist.ProcessGroup) -> None:
        """Send what this rank holds of the raw copy to the ranks that compute with it, and receive their parts.

        A collective of all ranks, on the CPU. ``raw``, [bytes] uint8, is this rank's own copy.
        """
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        if self._spans is None:
            own = [(_layer_of(region.name), region.start, region.num_bytes) for region in self.raw_regions]
            self._spans = gather_values(own, list[tuple[str, int, int]], group)
        owners = {_layer_of(names[0]): index % size for index, (names, _) in enumerate(self._groups)}
        transfers: list[Any] = []
        for sender, spans in enumerate(self._spans):
            for layer, start, num_bytes in spans:
                owner, part = owners.get(layer, sender), raw[start : start + num_bytes]
                if rank == sender != owner:
                    transfers.append(dist.isend(part, group_dst=owner, group=group))
                elif rank == owner != sender:
                    transfers.append(dist.irecv(part, group_src=sender, group=group))
        for transfer in transfers:
            transfer.wait()

    def computed_by(self, rank: int, num_ranks: int) -> list[StoredTensor]:
        """The tensors that `compute` makes on a rank."""
        return [stored for _, outputs in self._groups[rank::num_ranks] for stored in outputs]

    def compute(
        self, raw: Tensor, place: Callable[[StoredTensor], Tensor], rank: int, num_ranks: int
    ) -> list[StoredTensor]:
        """Compute this rank's part of the tensors that are no parts of parameters, and write them.

        Args:
            raw: [bytes] uint8, this rank's raw copy, after `exchange`.
            place: Returns [bytes] uint8 in which a tensor is to stand; `in_file` for those of a whole file.
            rank: Computes every ``num_ranks``-th layer.
            num_ranks: See ``rank``.
        """
        for names, outputs in self._groups[rank::num_ranks]:
            whole = {}
            for name in names:
                start, meta = self._raw[name]
                whole[name] = raw[start : start + meta.nbytes].view(meta.dtype).view(meta.shape)
            made = self._converted(whole)
            for stored in outputs:
                value = made[stored.name].reshape(-1)
                place(stored).view(_dtype_of(stored)).copy_(value)
        return self.computed_by(rank, num_ranks)

    def fill(self, data: Tensor, read: Callable[[Sequence[str]], dict[str, Tensor]]) -> None:
        """Write the whole file without ranks, layer by layer.

        Args:
            data: [bytes] uint8, the file.
            read: Returns whole parameters and buffers by their names; called once per layer.

        Raises:
            WeightsError: a tensor of the file cannot be made of what one layer holds.
        """
        layers: dict[str, list[str]] = {}
        for name in self._held:
            layers.setdefault(_layer_of(name), []).append(name)
        left = {stored.name: stored for stored in self.tensors}
        data[: len(self.head)].copy_(torch.frombuffer(bytearray(self.head), dtype=torch.uint8))
        for names in layers.values():
            for name, tensor in self._converted(read(names)).items():
                if stored := left.pop(name, None):
                    in_file(data)(stored).view(_dtype_of(stored)).copy_(tensor.reshape(-1))
        if left:
            raise WeightsError(f"{min(left)} cannot be computed from the parameters of one layer")

    def _converted(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Whole weights by the names of parameters, as a file has them."""
        if self.part is Part.adapters:
            return adapter_weights(self._model, weights)
        is_whole = self.part is Part.whole
        plain = merged_weights(self._model, weights) if is_whole else frozen_weights(weights)
        return revert_weight_conversion(self._model, plain)

    def _regions(self, name: str, first: int, num_values: int, start: int, dtype: torch.dtype) -> Iterator[Region]:
        """This rank's part of a contiguous range of a parameter's values, which is written from ``start`` on."""
        own_first, own_size = _own_values(name, self._held[name])
        begin, end = max(first, own_first), min(first + num_values, own_first + own_size)
        if begin < end:
            yield Region(
                name=name,
                parameter=self._held[name],
                first=begin - own_first,
                num_values=end - begin,
                start=start + (begin - first) * dtype.itemsize,
                dtype=dtype,
            )


def reshard(model: nn.Module) -> None:
    """Drop what is gathered, if anything is: from here on the parameters are the shards, of which a layout is made."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def item_bytes(stored: StoredTensor) -> int:
    """Bytes per value."""
    return _dtype_of(stored).itemsize


def in_file(data: Tensor) -> Callable[[StoredTensor], Tensor]:
    """Where each tensor stands in a whole file, [bytes] uint8."""
    return lambda stored: data[stored.start : stored.start + stored.num_bytes]


def _dtype_of(stored: StoredTensor) -> torch.dtype:
    return getattr(torch, DTYPES[stored.dtype])


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
