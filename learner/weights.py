"""The learner's side of a publish: each rank writes its own shards into one file, and digests them.

`WeightPublisher.publish` makes one copy of the shards into memory that was made ready before. Conversion, digests and
the manifest follow in a thread, over a process group of their own; rank 0 offers the result to the engines. A rank that
fails says so to the others, so that none waits for it, and rank 0 reports it.

Between two full versions, only what changed may be published: each rank then copies its shards into memory of its own,
and writes the difference to the version before, which it has kept.
"""

from __future__ import annotations

import copy
import ctypes
import logging
import mmap
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from asyncrl.protocol import record
from asyncrl.protocol.collective import CollectiveOptions, WeightSender
from asyncrl.protocol.delta import write_delta
from asyncrl.protocol.errors import WeightsError
from asyncrl.protocol.manifest import (
    DIGEST_THREADS,
    Change,
    Delta,
    Manifest,
    Piece,
    WeightOffer,
    digest_of,
    pieces_of,
)
from asyncrl.protocol.ports import WeightLog
from asyncrl.protocol.record import SpanKind

from .fsdp import stored_buffers, whole_tensors
from .lora import merged_weights
from .packed_model import PackedModel
from .weight_layout import ModelLayout, Region, item_bytes

logger = logging.getLogger(__name__)

DATA_FILE = "model.safetensors"
BUCKET_BYTES = 64 << 20
"""Page-locked bytes through which parameters leave a GPU, twice."""
_RAW_FILE = "raw"
_SNAPSHOT = re.compile(r"v(\d{8})")
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14; older kernels touch the pages when they are written
_madvise = ctypes.CDLL(None).madvise  # mmap's own holds the interpreter's lock: for 0.6 s per GB, while a rank computes
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class WritableFile:
    """A file of known size, mapped, of which this rank writes some ranges; made ready before it is needed."""

    def __init__(self, path: Path | None, num_bytes: int, regions: Sequence[Region]) -> None:
        """Make the file, or open the one that another rank made; reserve and touch this rank's ranges.

        Without a path it is memory of this process.

        Raises:
            WeightsError: there is no room.
        """
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644) if path else os.memfd_create("weights")
        try:
            os.ftruncate(self._descriptor, num_bytes)
            for region in regions:
                os.posix_fallocate(self._descriptor, region.start, region.num_bytes)
            mapping = mmap.mmap(self._descriptor, num_bytes)
        except OSError as error:
            os.close(self._descriptor)
            where = path.parent if path else "memory"
            raise WeightsError(
                f"no room for {num_bytes} bytes of weights in {where}: {error}; free some, or set "
                "weights.transport=file and weights.directory"
            ) from error
        self.data = torch.frombuffer(mapping, dtype=torch.uint8)
        page = mmap.PAGESIZE
        for region in regions:
            first, last = region.start // page * page, -(-(region.start + region.num_bytes) // page) * page
            _madvise(self.data.data_ptr() + first, min(last, num_bytes) - first, _POPULATE_WRITE)

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

    def sync(self) -> None:
        """Wait until the file system holds what was written; nothing to wait for where the file lies in memory.

        A host that shares a directory sees mapped writes of another one only after this.
        """
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Give the mapping back, once no view of it is left; the file stays. May be called more than once."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        _madvise(self.data.data_ptr(), self.data.nbytes, mmap.MADV_DONTNEED)  # which leaves little to unmap
        self.data = torch.empty(0, dtype=torch.uint8)


class WeightPublisher:
    """Publishes the weights of a model, version after version. Every method is a collective.

    Args:
        model: What is published.
        directory: Holds ``v00000012/`` for version 12; readable by every engine.
        keep: Versions kept, the new one included, with those that engines may still be offered, and the full version on
            which the oldest is based; -1 keeps all. An engine that still reads an older one has a link to it.
        full_every: Of so many versions one is full, and the others hold what changed since the one before.
        collective: Sends the weights to the hosts of the engines, which read no folder of this host then.
        log: Hears of each version, and of a failure, on rank 0; None tells only who waits for the result.
    """

    def __init__(
        self,
        model: PackedModel,
        directory: str,
        *,
        keep: int,
        full_every: int = 1,
        collective: CollectiveOptions | None = None,
        log: WeightLog | None = None,
    ) -> None:
        self._model = model
        self._directory = Path(directory)
        self._keep = keep
        self._full_every = full_every
        self._log = log if model.mesh.rank == 0 else None
        self._needed: str | None = None
        self._base: ModelFiles | None = None
        self._newest: WeightOffer | None = None
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
        self.wait()
        try:
            files = self._ready.result()
            files.write()
        except Exception as error:
            self._pending = self._thread.submit(self._finish, version, error)
            raise
        self._pending = self._thread.submit(self._finish, version, files)
        self._ready = self._thread.submit(self._prepare)
        return self._pending

    def wait(self) -> None:
        """Wait until the version that is on its way is offered. Raises `WeightsError` if it could not be published."""
        if self._pending is not None:
            self._pending.result()

    def close(self) -> None:
        """Wait for the version that is on its way; the files made ready for the next one go."""
        self._thread.shutdown(wait=True)
        if self._ready.exception() is None:
            self._ready.result().close()
            if self._base is not None:
                self._base.close()
            shutil.rmtree(self._ready.result().folder, ignore_errors=True)
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
        with self._stage("prepare"):
            return self._made_ready()

    def _made_ready(self) -> ModelFiles:
        if self._is_first and self._keep > 0 and self._directory.is_dir():
            versions = sorted(path for path in self._directory.iterdir() if _SNAPSHOT.fullmatch(path.name))
            first_kept = max(0, len(versions) - self._keep)
            while first_kept > 0 and not self._can_be_first(versions[first_kept]):
                first_kept -= 1
            for old in versions[:first_kept]:
                shutil.rmtree(old)
        is_full = self._count % self._full_every == 0
        self._count += 1
        return ModelFiles(self._layout, self._directory / f".next-{self._count}", is_full=is_full)

    def _can_be_first(self, version: Path) -> bool:
        """Whether no older version is needed: by the engines, or as the base of this one."""
        return (self._needed is None or version.name <= self._needed) and (version / DATA_FILE).exists()

    def _finish(self, version: int, files: ModelFiles | Exception) -> WeightOffer | None:
        """Publish what was copied, or that it was not; rank 0 tells the log.

        It does not tell of a collective that fails: its cause, such as a dead rank, shows at the calls on the ranks.
        """
        with record.span(SpanKind.publish, lane="/publish", version=version):
            return self._publish_copied(version, files)

    def _publish_copied(self, version: int, files: ModelFiles | Exception) -> WeightOffer | None:
        with self._stage("digest", version):
            shares = self._gathered(version, files)
        try:
            if failed := [f"rank {rank}: {share}" for rank, share in enumerate(shares) if isinstance(share, str)]:
                raise WeightsError(f"the publish of version {version} failed on {'; on '.join(failed)}")
            if not self._is_first or isinstance(files, Exception):
                return None
            with self._stage("manifest", version):
                self._newest = offer = self._offer(version, files, shares)
            if self._sender is not None:
                offer = self._sender.offer(offer, [len(share.pieces) for share in shares])
        except Exception as error:
            if self._log is not None:
                what = f"the publish of version {version} failed: {type(error).__name__}: "
                self._log.publish_failed(f"{'' if isinstance(error, WeightsError) else what}{error}")
            raise
        if self._log is not None:
            with self._stage("offer", version):
                oldest = self._log.offer(offer)
            self._needed = _folder_name(oldest)
            if self._sender is not None:
                self._sender.retire(oldest)
        return offer

    def _stage(self, name: str, version: int = record.NONE) -> record.OpenSpan:
        return record.span(SpanKind.publish_stage, lane="/publish", version=version, cause=name)

    def _gathered(self, version: int, files: ModelFiles | Exception) -> list[Any]:
        """Compute what is left and digest this rank's part; returns each rank's share, or why it has none."""
        if self._group is not None and self._layout.num_raw_bytes:
            dist.barrier(self._group)
        try:
            if isinstance(files, Exception):
                raise files
            own: Any = files.finish(self._model.mesh.rank, self._num_ranks, self._base)
            if self._sender is not None:
                self._sender.hold(version, files.data, own.pieces)
            self._keep_as_base(files)
        except Exception as error:
            logger.exception("a publish failed")
            own = f"{type(error).__name__}: {error}"
        shares: list[Any] = [own]
        if self._group is not None:
            shares = [None] * self._num_ranks
            dist.all_gather_object(shares, own, group=self._group)
        if self._is_elsewhere and isinstance(files, ModelFiles):  # what is held there needs no name
            shutil.rmtree(files.folder, ignore_errors=True)
        return shares

    def _keep_as_base(self, files: ModelFiles) -> None:
        """Close what is not needed to find out what the next version changes."""
        has_deltas = self._full_every > 1
        files.close(keep_data=has_deltas)
        if self._base is not None:
            self._base.close()
        self._base = files if has_deltas else None

    def _offer(self, version: int, files: ModelFiles, shares: Sequence[_Share]) -> WeightOffer:
        """Put the files in place, and write the manifest."""
        target, delta = self._directory / _folder_name(version), None
        if files.is_full:
            write_description(files.folder, self._model.pretrained, self._model.compute_dtype)
        else:
            assert self._newest is not None, "the first version is full"
            delta = Delta(
                base=self._newest,
                files=tuple(_delta_file(rank) for rank in range(self._num_ranks)),
                changes=tuple(change for share in shares for change in share.changes),
            )
        shutil.rmtree(target, ignore_errors=True)
        files.folder.rename(target)
        manifest = Manifest(
            directory=str(target),
            files=(DATA_FILE,),
            tensors=self._layout.tensors,
            pieces=tuple(piece for share in shares for piece in share.pieces),
            delta=delta,
        )
        return manifest.offer(target / "manifest.json", version)


def _folder_name(version: int) -> str:
    return f"v{version:08d}"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Share:
    """What one rank wrote of a version."""

    pieces: list[Piece]
    changes: list[Change]


def _delta_file(rank: int) -> str:
    return f"delta-{rank:05d}.bin"


class ModelFiles:
    """The data file of one version, and its raw file where tensors are to be computed.

    Of a version that is not full, each rank has its part of the data file in memory, and a delta file in the folder.
    """

    def __init__(self, layout: ModelLayout, folder: Path, *, is_full: bool = True) -> None:
        self.folder = folder
        self.is_full = is_full
        self._layout = layout
        folder.mkdir(parents=True, exist_ok=True)
        self._data = WritableFile(folder / DATA_FILE if is_full else None, layout.num_bytes, layout.regions)
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

    def finish(self, rank: int, num_ranks: int, base: ModelFiles | None = None) -> _Share:
        """Compute this rank's part of the rest, once all ranks have written; digest its part, and compare it with base.

        It has then reached the file system, and may be offered to other hosts.
        """
        parts = [(region.start, region.num_bytes, region.dtype.itemsize) for region in self._layout.regions]
        if self._raw is not None:
            done = self._layout.compute(self._raw.data, self._data.data, rank, num_ranks)
            parts += [(stored.start, stored.num_bytes, item_bytes(stored)) for stored in done]
        if rank == 0:
            self._data.data[: len(self._layout.head)].copy_(
                torch.frombuffer(bytearray(self._layout.head), dtype=torch.uint8)
            )
        data = self._data.data.numpy()
        with ThreadPoolExecutor(DIGEST_THREADS + 1) as threads:
            synced = threads.submit(self._data.sync)
            digested = list(threads.map(lambda part: pieces_of(0, part[0], part[1], data), parts))
            synced.result()
        changes = []
        if not self.is_full:
            assert base is not None, "the first version is full"
            spans = [
                (piece.start, piece.num_bytes, part[2])
                for part, pieces in zip(parts, digested, strict=True)
                for piece in pieces
            ]
            changes = write_delta(self.folder / _delta_file(rank), rank, base.data.numpy(), data, spans)
        return _Share(pieces=[piece for pieces in digested for piece in pieces], changes=changes)

    def close(self, *, keep_data: bool = False) -> None:
        """Unmap the files; the data file only if it is not to be kept as the base of the next version."""
        if not keep_data:
            self._data.close()
        if self._raw is not None:
            self._raw.close()
            with suppress(FileNotFoundError):
                (self.folder / _RAW_FILE).unlink()


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
