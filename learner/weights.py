"""The learner's side of a publish: each rank writes its own shards into one file, and digests them.

`WeightPublisher.publish` makes one copy of the shards into memory that was made ready before. Conversion, digests and
the manifest follow in a thread, over a process group of their own; a worker's `publish_weights` waits for them so far.

A tensor of the checkpoint that is a contiguous part of a parameter, which covers fused experts, is written where it
belongs at once. Others (merged adapters, transposed or joined parameters) are computed by one rank each from a raw copy
of their parameters, which the ranks write in the same manner.
"""

from __future__ import annotations

import copy
import mmap
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from asyncrl.protocol.collective import CollectiveOptions, WeightSender
from asyncrl.protocol.errors import WeightsError
from asyncrl.protocol.manifest import (
    DIGEST_THREADS,
    DTYPES,
    Manifest,
    Piece,
    StoredTensor,
    WeightOffer,
    digest_of,
    pieces_of,
    safetensors_header,
)

from .fsdp import local_tensor, stored_buffers, whole_tensors
from .lora import merged_weights
from .packed_model import PackedModel

DATA_FILE = "model.safetensors"
BUCKET_BYTES = 64 << 20
"""Page-locked bytes through which parameters leave a GPU, twice."""
_RAW_FILE = "raw"
_SNAPSHOT = re.compile(r"v(\d{8})")
_LAYER = re.compile(r"^.*?\blayers\.\d+\.")
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14, which Python 3.11 does not name
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


class WritableFile:
    """A file of known size, mapped, of which this rank writes some ranges; made ready before it is needed."""

    def __init__(self, path: Path, num_bytes: int, regions: Sequence[Region]) -> None:
        """Make the file, or open the one that another rank made; reserve and touch this rank's ranges.

        Raises:
            WeightsError: there is no room.
        """
        self.path = path
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            os.ftruncate(descriptor, num_bytes)
            for region in regions:
                os.posix_fallocate(descriptor, region.start, region.num_bytes)
            self._mapping = mmap.mmap(descriptor, num_bytes)
        except OSError as error:
            raise WeightsError(
                f"no room for {num_bytes} bytes of weights in {path.parent}: {error}; free some, or set "
                "weights.transport=file and weights.directory"
            ) from error
        finally:
            os.close(descriptor)
        self.data = torch.frombuffer(self._mapping, dtype=torch.uint8)
        page = mmap.PAGESIZE
        for region in regions:
            first, last = region.start // page * page, -(-(region.start + region.num_bytes) // page) * page
            with suppress(OSError, ValueError):  # older kernels touch the pages when they are written
                self._mapping.madvise(_POPULATE_WRITE, first, min(last, num_bytes) - first)

    def write(self, regions: Sequence[Region]) -> None:
        """Copy the parameters' values; on a GPU through two page-locked buckets."""
        on_gpu = [region for region in regions if region.parameter.device.type == "cuda"]
        for region in regions:
            if region.parameter.device.type != "cuda":
                self._place(region).copy_(region.values())
        if on_gpu:
            self._write_from_gpu(on_gpu)

    def _write_from_gpu(self, regions: Sequence[Region]) -> None:
        chunks = [
            (region, first, min(region.num_values - first, BUCKET_BYTES // region.dtype.itemsize))
            for region in regions
            for first in range(0, region.num_values, BUCKET_BYTES // region.dtype.itemsize)
        ]
        buckets = [torch.empty(BUCKET_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        waiting: tuple[Tensor, Tensor, Any] | None = None
        for index, (region, first, size) in enumerate(chunks):
            bucket = buckets[index % 2][: size * region.dtype.itemsize].view(region.dtype)
            bucket.copy_(region.values()[first : first + size], non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
            if waiting is not None:
                self._empty(*waiting)
            waiting = self._place(region)[first : first + size], bucket, copied
        if waiting is not None:
            self._empty(*waiting)

    @staticmethod
    def _empty(place: Tensor, bucket: Tensor, copied: Any) -> None:
        copied.synchronize()
        place.copy_(bucket)

    def _place(self, region: Region) -> Tensor:
        return self.data[region.start : region.start + region.num_bytes].view(region.dtype)

    def close(self) -> None:
        """Give the memory of the mapping back; the file stays."""
        self.data = torch.empty(0, dtype=torch.uint8)
        with suppress(BufferError):  # a view of it is still referred to, and keeps it
            self._mapping.close()


class WeightPublisher:
    """Publishes the weights of a model, version after version. Every method is a collective.

    Args:
        model: What is published.
        directory: Holds ``v00000012/`` for version 12; readable by every engine.
        keep: Versions kept, the new one included; -1 keeps all. An engine must have loaded a version, or a newer one,
            before ``keep`` newer ones are written.
        collective: Send the weights to the hosts of the engines, which read no folder of this host then.
    """

    def __init__(
        self, model: PackedModel, directory: str, *, keep: int, collective: CollectiveOptions | None = None
    ) -> None:
        self._model = model
        self._directory = Path(directory)
        self._keep = keep
        for module in model.head.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # its parameters are the shards from here on
        self._layout = ModelLayout(model)
        self._is_first, self._num_ranks = model.mesh.rank == 0, model.mesh.num_ranks
        # In the background, beside the collectives of the next update.
        self._group: dist.ProcessGroup | None = None
        if self._num_ranks > 1:
            self._group = cast("dist.ProcessGroup", dist.new_group(backend="gloo", timeout=model.mesh.timeout))
        self._check_alike()
        self._is_elsewhere = False
        self._sender = None if collective is None else self._make_sender(collective)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="publish")
        self._count = 0
        self._ready: Future[ModelFiles] = self._thread.submit(self._prepare)
        self._pending: Future[WeightOffer | None] | None = None

    def publish(self, version: int) -> Future[WeightOffer | None]:
        """Copy the weights as they are now, and publish them as ``version`` in the background.

        Returns:
            The offer, on rank 0; None on the others. At most one version is on its way: the next call waits for it.

        Raises:
            WeightsError: there is no room, or the version before failed.
        """
        if self._pending is not None:
            self._pending.result()
        files = self._ready.result()
        files.write()
        self._pending = self._thread.submit(self._finish, version, files)
        self._ready = self._thread.submit(self._prepare)
        return self._pending

    def close(self) -> None:
        """Wait for the version that is on its way; what was sent to engines can be received no more."""
        self._thread.shutdown(wait=True)
        if self._sender is not None:
            self._sender.close()
        if self._is_elsewhere:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _check_alike(self) -> None:
        """All ranks must mean the same bytes: those that hold no whole weights convert by the model's class alone."""
        digests: list[Any] = [None] * self._num_ranks
        if self._group is not None:
            dist.all_gather_object(digests, digest_of(self._layout.head), group=self._group)
        if len(set(digests)) > 1:
            raise WeightsError(
                f"the ranks lay {type(self._model.pretrained).__name__} out differently: its checkpoint's names follow "
                "from the files, not from its class; save the model once with the transformers in use, and start there"
            )

    def _make_sender(self, options: CollectiveOptions) -> WeightSender:
        """This rank's part of the transport between hosts; each rank needs a folder that its own host's ranks share.

        Raises:
            ValueError: there is no such interface.
            WeightsError: the ranks are on several hosts, and tensors are to be computed from shards of all.
        """
        sender = WeightSender(options, rank=0, num_ranks=self._num_ranks) if self._is_first else None
        place = (socket.gethostname(), "" if sender is None else sender.address)
        places: list[Any] = [place]
        if self._group is not None:
            places = [None] * self._num_ranks
            dist.all_gather_object(places, place, group=self._group)
        self._is_elsewhere = place[0] != places[0][0]
        if self._layout.num_raw_bytes and len(hosts := {host for host, _ in places}) > 1:
            raise WeightsError(
                "weights.transport=collective needs all learner ranks on one host where published tensors are no parts "
                f"of parameters (adapters, parameters that are joined or transposed), got {sorted(hosts)}; set "
                "weights.transport=file and a weights.directory that the hosts share"
            )
        if sender is None:
            rank = self._model.mesh.rank
            sender = WeightSender(options, rank=rank, num_ranks=self._num_ranks, address=places[0][1])
        return sender

    def _prepare(self) -> ModelFiles:
        """Remove versions that are no longer kept, and make the files of the next one ready to be written."""
        if self._is_first and self._keep > 0 and self._directory.is_dir():
            versions = sorted(path for path in self._directory.iterdir() if _SNAPSHOT.fullmatch(path.name))
            for old in versions[: -self._keep]:
                shutil.rmtree(old)
        self._count += 1
        return ModelFiles(self._layout, self._directory / f".next-{self._count}")

    def _finish(self, version: int, files: ModelFiles) -> WeightOffer | None:
        """Compute what is left, digest this rank's part, and gather the manifest on rank 0."""
        if self._group is not None and self._layout.num_raw_bytes:
            dist.barrier(self._group)
        pieces = files.finish(self._model.mesh.rank, self._num_ranks)
        if self._sender is not None:
            self._sender.hold(version, files.data, pieces)
        parts: list[Any] = [pieces]
        if self._group is not None:
            parts = [None] * self._num_ranks
            dist.gather_object(pieces, parts if self._is_first else None, group=self._group, group_dst=0)
        files.close()
        if self._is_elsewhere:
            shutil.rmtree(files.folder, ignore_errors=True)
        if not self._is_first:
            return None
        target = self._directory / f"v{version:08d}"
        write_description(files.folder, self._model.pretrained, self._model.compute_dtype)
        shutil.rmtree(target, ignore_errors=True)
        files.folder.rename(target)
        manifest = Manifest(
            directory=str(target),
            files=(DATA_FILE,),
            tensors=self._layout.tensors,
            pieces=tuple(piece for part in parts for piece in part),
        )
        offer = manifest.offer(target / "manifest.json", version)
        return offer if self._sender is None else self._sender.offer(offer, [len(part) for part in parts])


class ModelFiles:
    """The data file of one version, and its raw file where tensors are to be computed."""

    def __init__(self, layout: ModelLayout, folder: Path) -> None:
        self.folder = folder
        self._layout = layout
        folder.mkdir(parents=True, exist_ok=True)
        self._data = WritableFile(folder / DATA_FILE, layout.num_bytes, layout.regions)
        self._raw = None
        if layout.num_raw_bytes:
            self._raw = WritableFile(folder / _RAW_FILE, layout.num_raw_bytes, layout.raw_regions)

    @property
    def data(self) -> Tensor:
        """[bytes] uint8 of the data file; what this rank wrote of it stays while someone refers to it."""
        return self._data.data

    def write(self) -> None:
        """Copy this rank's shards."""
        self._data.write(self._layout.regions)
        if self._raw is not None:
            self._raw.write(self._layout.raw_regions)

    def finish(self, rank: int, num_ranks: int) -> list[Piece]:
        """Compute this rank's part of the rest, once all ranks have written; returns the digests of its part."""
        parts = [(region.start, region.num_bytes) for region in self._layout.regions]
        if self._raw is not None:
            done = self._layout.compute(self._raw.data, self._data.data, rank, num_ranks)
            parts += [(stored.start, stored.num_bytes) for stored in done]
        if rank == 0:
            self._data.data[: len(self._layout.head)].copy_(
                torch.frombuffer(bytearray(self._layout.head), dtype=torch.uint8)
            )
        data = self._data.data.numpy()
        with ThreadPoolExecutor(DIGEST_THREADS) as threads:
            return [
                piece
                for pieces in threads.map(lambda part: pieces_of(0, part[0], part[1], data), parts)
                for piece in pieces
            ]

    def close(self) -> None:
        """Unmap the files."""
        self._data.close()
        if self._raw is not None:
            self._raw.close()
            with suppress(FileNotFoundError):
                self._raw.path.unlink()


def gather_weights(trainer: PackedModel) -> dict[str, Tensor] | None:
    """Collect the whole weights of a plain or sharded model. A collective: every rank calls it.

    Returns:
        On rank 0, checkpoint name to CPU tensor in the computing type, tied tensors once and adapters merged; None on
        the others.
    """
    is_first = trainer.mesh.rank == 0
    weights: dict[str, Tensor] = {}
    for name, tensor in whole_tensors(trainer.head):
        if is_first:
            whole = tensor.to(device="cpu", dtype=trainer.compute_dtype, copy=True)
            weights[name.removeprefix("pretrained.")] = whole
    if not is_first:
        return None
    for name, buffer in stored_buffers(trainer.head).items():
        weights[name.removeprefix("pretrained.")] = buffer.detach().cpu().clone()
    return revert_weight_conversion(trainer.pretrained, merged_weights(trainer.pretrained, weights))


def write_model(directory: Path, model: PreTrainedModel, weights: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Write a model that `from_pretrained` and the engines load; the directory appears whole or not at all.

    A directory that is there already is replaced. ``weights`` maps checkpoint names to CPU tensors; ``dtype`` is the
    type named in the configuration, which is the model's.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    partial.chmod(0o755)
    save_file(
        {name: tensor.contiguous() for name, tensor in weights.items()}, partial / "model.safetensors", {"format": "pt"}
    )
    write_description(partial, model, dtype)
    shutil.rmtree(directory, ignore_errors=True)
    partial.rename(directory)


def write_description(directory: Path, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Write the JSON files beside the weights; ``dtype`` is theirs, whatever the model's is."""
    config = copy.deepcopy(model.config)  # written in a thread while the model is used
    config.dtype = dtype
    config.save_pretrained(directory)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(directory)


def copy_tokenizer(source: str, directory: Path) -> None:
    """Copy the tokenizer's files, whatever its kind, from one model directory to another."""
    for file in sorted(Path(source).iterdir()):
        known = file.name.startswith(
            ("tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "chat_template")
        )
        if file.is_file() and (known or file.suffix == ".jinja" or file.name.endswith("tokenizer.py")):
            shutil.copy2(file, directory / file.name)


def save_policy(trainer: PackedModel, directory: str) -> None:
    """Write model and tokenizer so that ``from_pretrained`` loads both. A collective: every rank calls it.

    The directory is created or replaced; the tokenizer comes from the one that the model was loaded from.
    """
    weights = gather_weights(trainer)
    if weights is not None:
        write_model(Path(directory), trainer.pretrained, weights, trainer.compute_dtype)
        copy_tokenizer(trainer.model_path, Path(directory))
