"""The layout of a checkpoint file: which bytes of the file each learner rank writes.

If a tensor of the file is a contiguous part of a parameter, such as one expert of a layer's experts, the ranks copy the
tensor from their shards. All other tensors, such as weights with merged adapters, are computed from whole parameters.
For each layer, one rank receives the parameters from the other ranks and computes these tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from asyncrl.core.errors import WeightsError
from asyncrl.weights.manifest import DTYPES, AdaptedLayer, StoredTensor, safetensors_header

T = TypeVar("T")
ALIGNMENT = 16
_LAYER = re.compile(r"^.*?\blayers\.\d+\.")
_DTYPE_NAMES = {getattr(torch, dtype): name for name, dtype in DTYPES.items()}


class Part(Enum):
    """The content of a file: all weights (with merged adapters), only the frozen weights, or only the adapters."""

    whole = "whole"
    frozen = "frozen"
    adapters = "adapters"


class ModelShards(Protocol):
    """One rank's shards of a model. The learner implements this interface.

    Attributes:
        name: Name of the model's class, for messages.
        dtype: Dtype in which parameters are written, except adapters.
        group: A gloo group of all ranks, separate from the groups of training; None for a single rank.
    """

    name: str
    dtype: torch.dtype
    rank: int
    num_ranks: int
    group: dist.ProcessGroup | None
    has_adapters: bool

    def held(self, part: Part) -> dict[str, Tensor]:
        """Return this rank's shards of the model's parameters and persistent buffers, by name.

        ``part`` selects all weights, only the frozen weights, or only the adapters.
        """
        ...

    def converted(self, part: Part, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert whole (unsharded) weights to the tensors of a checkpoint. Returns the tensors by checkpoint name.

        ``weights`` has parameters and buffers by the names that `held` returns. ``part`` says whether the checkpoint
        contains all weights (with merged adapters), only the frozen weights, or only the adapters.
        """
        ...

    def adapted_layers(self, tensor_of: Mapping[str, str]) -> tuple[AdaptedLayer, ...]:
        """Return one description per linear layer that has a LoRA adapter.

        ``tensor_of`` maps names of parameters to names of tensors in the checkpoint. Raises `WeightsError` if
        ``tensor_of`` lacks the weight of such a layer.
        """
        ...

    def describe(self, folder: Path, part: Part) -> None:
        """Write the JSON files of a checkpoint to ``folder``, such as the model's configuration.

        ``part`` says whether the checkpoint contains all weights, only the frozen weights, or only the adapters.
        """
        ...

    def gather(self, value: T, kind: Any) -> list[T]:
        """Return the values of all ranks in rank order. This is a collective. ``kind`` is the type of ``value``."""
        ...


@dataclass(frozen=True, kw_only=True)
class Region:
    """A contiguous part of this rank's shard of a parameter, and the position to which this part is copied.

    The position is in the checkpoint file, or in the raw copy: memory for parameters from which tensors are computed.

    Attributes:
        name: Name of the parameter.
        parameter: The parameter. This rank holds one shard of it, or all values if it is not sharded.
        first: Index of the region's first value in the flattened shard. The region has ``num_values`` values.
        start: Position of the region's first byte in the file or in the raw copy.
        dtype: Dtype of the values there.
    """

    name: str
    parameter: Tensor
    first: int
    num_values: int
    start: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the region's values in the dtype ``dtype``."""
        return self.num_values * self.dtype.itemsize

    def values(self) -> Tensor:
        """Return the current values of the region, [num_values], in the dtype of the parameter."""
        local = self.parameter.detach()
        whole = local.to_local() if isinstance(local, DTensor) else local
        return whole.reshape(-1)[self.first : self.first + self.num_values]


class ModelLayout:
    """The layout of a file with the weights of a model, or with a part of these weights.

    All ranks have the same layout. Only ``regions``, ``raw_regions`` and `computed` (the tensors that a rank computes)
    differ. Adapters are written in their training dtype, because a smaller dtype would round small updates to zero.

    Args:
        shards: The model on this rank.
        part: What the file contains.

    Attributes:
        head: The safetensors header: all bytes of the file before its data.
        tensor_of: Names of tensors in the file, by name of the parameter. Only a parameter that is a whole tensor of
            the file has an entry.
        regions: The values that this rank writes to the file.
        raw_regions: The values that this rank writes to its *raw copy*: memory for the parameters from which tensors of
            the file are computed.
        num_bytes: Size of the file in bytes.
        num_raw_bytes: Size of the raw copy in bytes; 0 if no tensor is computed.

    Raises:
        WeightsError: a parameter is sharded over a dimension above 1, or a tensor needs parameters of several layers.
    """

    def __init__(self, shards: ModelShards, part: Part = Part.whole) -> None:
        self.part, self._shards = part, shards
        self._held = shards.held(part)
        meta = {
            name: _as_published(tensor, tensor.dtype if part is Part.adapters else shards.dtype)
            for name, tensor in self._held.items()
        }
        made = shards.converted(part, meta)
        # Put tensors with wide dtypes first, so that every tensor starts at a multiple of its item size.
        published = dict(sorted(made.items(), key=lambda item: (-item[1].element_size(), item[0])))
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
                continue
            if tensor.shape == self._held[source].shape:
                self.tensor_of[source] = stored.name
            first = int(tensor.storage_offset())
            self.regions += self._regions(source, first, tensor.numel(), stored.start, tensor.dtype)
        written = {published[t.name].untyped_storage()._cdata for t in self.tensors if t not in computed}
        self._plan_computed(computed, [name for storage, name in sources.items() if storage not in written])

    def _plan_computed(self, computed: Sequence[StoredTensor], needed: Sequence[str]) -> None:
        """Lay out this rank's raw copy, and group parameters and tensors by layer.

        The raw copy is memory for the whole (unsharded) parameters that ``needed`` names. The tensors ``computed`` are
        later computed from these parameters. Raises `WeightsError` if a tensor needs parameters of several layers.
        """
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
            self.num_raw_bytes += -(-raw.nbytes // ALIGNMENT) * ALIGNMENT
        for stored in computed:
            groups.setdefault(_layer_of(stored.name), ([], []))[1].append(stored)
        self._groups = [group for group in groups.values() if group[1]]
        for names, outputs in self._groups:
            made = self._shards.converted(self.part, {name: self._raw[name][1] for name in names})
            if missing := sorted({stored.name for stored in outputs} - made.keys()):
                raise WeightsError(f"{missing[0]} cannot be computed from the parameters of its layer: {names}")

    @property
    def device(self) -> torch.device:
        """Device of this rank's parameters."""
        return next(iter(self._held.values())).device

    @property
    def computed(self) -> list[StoredTensor]:
        """The tensors of the file that this rank computes from whole parameters."""
        return [stored for _, outputs in self._own_groups for stored in outputs]

    @property
    def _own_groups(self) -> list[tuple[list[str], list[StoredTensor]]]:
        return self._groups[self._shards.rank :: self._shards.num_ranks]

    def exchange(self, raw: Tensor) -> None:
        """Send parameter shards between the ranks, so that each rank has the whole parameters that `compute` needs.

        This is a collective. ``raw``, [bytes] uint8 on the CPU, is this rank's raw copy: the memory for these
        parameters, with this rank's shards already in it. The other shards are received into ``raw``.
        """
        rank, group = self._shards.rank, self._shards.group
        if self._spans is None:
            own = [(_layer_of(region.name), region.start, region.num_bytes) for region in self.raw_regions]
            self._spans = self._shards.gather(own, list[tuple[str, int, int]])
        owners = {_layer_of(names[0]): index % self._shards.num_ranks for index, (names, _) in enumerate(self._groups)}
        transfers: list[Any] = []
        for sender, spans in enumerate(self._spans):
            for layer, start, num_bytes in spans:
                owner, data = owners.get(layer, sender), raw[start : start + num_bytes]
                if rank == sender != owner:
                    transfers.append(dist.isend(data, group_dst=owner, group=group))
                elif rank == owner != sender:
                    transfers.append(dist.irecv(data, group_src=sender, group=group))
        for transfer in transfers:
            transfer.wait()

    def compute(self, raw: Tensor, place: Callable[[StoredTensor], Tensor]) -> None:
        """Compute the tensors that `computed` lists, and write the tensors to the file's memory.

        ``raw`` is the memory that `exchange` has filled, [bytes] uint8. The function ``place`` takes a tensor of the
        file and returns the tensor's memory in the file, [bytes] uint8.
        """
        for names, outputs in self._own_groups:
            whole = {}
            for name in names:
                start, meta = self._raw[name]
                whole[name] = raw[start : start + meta.nbytes].view(meta.dtype).view(meta.shape)
            made = self._shards.converted(self.part, whole)
            for stored in outputs:
                place(stored).view(dtype_of(stored)).copy_(made[stored.name].reshape(-1))

    def fill(self, data: Tensor, read: Callable[[Sequence[str]], dict[str, Tensor]]) -> None:
        """Write the whole file in one process, layer by layer.

        Args:
            data: The memory of the file, [bytes] uint8.
            read: Function that takes names, and returns whole parameters and buffers by name. It is called once per
                layer.

        Raises:
            WeightsError: a tensor of the file needs parameters of several layers.
        """
        layers: dict[str, list[str]] = {}
        for name in self._held:
            layers.setdefault(_layer_of(name), []).append(name)
        left = {stored.name: stored for stored in self.tensors}
        self.write_head(data)
        for names in layers.values():
            for name, tensor in self._shards.converted(self.part, read(names)).items():
                if stored := left.pop(name, None):
                    in_file(data)(stored).view(dtype_of(stored)).copy_(tensor.reshape(-1))
        if left:
            raise WeightsError(f"{min(left)} cannot be computed from the parameters of one layer")

    def write_head(self, data: Tensor) -> None:
        """Write the safetensors header at the beginning of ``data``, the memory of the file, [bytes] uint8."""
        data[: len(self.head)].copy_(torch.frombuffer(bytearray(self.head), dtype=torch.uint8))

    def _regions(self, name: str, first: int, num_values: int, start: int, dtype: torch.dtype) -> Iterator[Region]:
        """Yield this rank's regions of a contiguous part of a flattened parameter.

        ``first`` is the index of the part's first value, and the part has ``num_values`` values. ``start`` is the
        position of the part's first byte in the file, or in the raw copy (memory for whole parameters).
        """
        for own_first, held_first, size in self._own_values(name):
            begin, end = max(first, own_first), min(first + num_values, own_first + size)
            if begin < end:
                yield Region(
                    name=name,
                    parameter=self._held[name],
                    first=held_first + begin - own_first,
                    num_values=end - begin,
                    start=start + (begin - first) * dtype.itemsize,
                    dtype=dtype,
                )

    def _own_values(self, name: str) -> Iterator[tuple[int, int, int]]:
        """Yield the contiguous ranges of a flattened parameter that this rank writes.

        A range is a tuple: first index in the parameter, first index in this rank's shard, number of values.
        """
        parameter = self._held[name]
        if not isinstance(parameter, DTensor):
            if self._shards.rank == 0:
                yield 0, 0, parameter.numel()
            return
        mesh, placements = parameter.device_mesh, parameter.placements
        shape, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
        if tuple(shape[2:]) != tuple(parameter.shape[2:]):
            raise WeightsError(f"{name} is sharded as {placements}; only shards of dimension 0 or 1 can be published")
        # If several ranks have the same shard of the parameter, only the first of these ranks writes the shard.
        if any(mesh.get_local_rank(axis) for axis, kind in enumerate(placements) if kind.is_replicate()):
            return
        row, size = parameter.shape[1:].numel(), torch.Size(shape).numel()
        if tuple(shape[1:]) == tuple(parameter.shape[1:]):
            yield (offset[0] if offset else 0) * row, 0, size
            return
        part, skipped = torch.Size(shape[1:]).numel(), offset[1] * parameter.shape[2:].numel()
        for index in range(shape[0]):
            yield (offset[0] + index) * row + skipped, index * part, part


def in_file(data: Tensor) -> Callable[[StoredTensor], Tensor]:
    """Return a function that takes a stored tensor, and returns a view of the tensor's bytes, [bytes] uint8.

    ``data`` is the whole file, [bytes] uint8.
    """
    return lambda stored: data[stored.start : stored.start + stored.num_bytes]


def dtype_of(stored: StoredTensor) -> torch.dtype:
    """Return the torch dtype of a tensor in the file."""
    return getattr(torch, DTYPES[stored.dtype])


def _as_published(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    kept = dtype if isinstance(tensor, nn.Parameter) else tensor.dtype
    return torch.empty(tensor.shape, dtype=kept, device="meta")


def _layer_of(name: str) -> str:
    match = _LAYER.match(name)
    return match[0] if match else ""
