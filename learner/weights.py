"""The learner's side of a publish: each rank writes its own shards into one file, and digests them.

`WeightPublisher.publish` makes one copy of the shards into memory that was made ready before. Conversion, digests and
the manifest follow in a thread, over a process group of their own; rank 0 offers the result to the engines. A rank that
fails says so to the others, so that none waits for it, and rank 0 reports it.

Between two full versions, only what changed may be published: each rank then copies its shards into memory of its own,
and writes the difference to the version before, which it has kept. Of a policy with adapters, the frozen weights are
published once, and each version holds the adapters alone.

With `LendOptions` no file holds the weights: each rank keeps its part on its own device, and engines map it.
"""

from __future__ import annotations

import logging
import re
import shutil
import socket
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch.distributed as dist

from asyncrl.core import record
from asyncrl.core.errors import WeightsError
from asyncrl.core.ports import WeightLog
from asyncrl.core.record import SpanKind
from asyncrl.core.types import FROZEN, WeightOffer
from asyncrl.weights.channel import ChannelAddress
from asyncrl.weights.collective import WeightSender
from asyncrl.weights.manifest import AdaptedLayer, Adapter, Delta, Manifest, digest_of
from asyncrl.weights.rounds import CollectiveOptions

from .fsdp import local_tensor
from .lent_weights import LendOptions, LentBuffers, LentModel, buffer_bytes, segments_of
from .lora import adapted_layers, has_adapters, write_adapter_config
from .model_folder import write_description
from .packed_model import PackedModel
from .plain_values import gather_values
from .weight_files import DATA_FILE, ModelFiles, RankShare, delta_file
from .weight_layout import ModelLayout, Part, reshard

logger = logging.getLogger(__name__)

ADAPTER_FILE = "adapter_model.safetensors"
FROZEN_FOLDER = "frozen"
VersionPart: TypeAlias = ModelFiles | LentModel
"""This rank's part of a version: in files, or in memory that it lends."""
_SNAPSHOT = re.compile(r"v(\d{8})")


class WeightPublisher:
    """Publishes the weights of a model, version after version. Every method is a collective.

    Args:
        model: What is published.
        directory: Holds ``v00000012/`` for version 12; readable by every engine.
        keep: Versions kept, the new one included, with those that engines may still be offered, and the full version on
            which the oldest is based; -1 keeps all. An engine that still reads an older one has a link to it.
        full_every: Of so many versions one is full, and the others hold what changed since the one before.
        adapters: Publish the adapters alone where the model has any, and the frozen weights once, with the first
            version. Merged weights are published where an adapted weight is not a tensor of the checkpoint as it is.
        collective: Sends the weights to the hosts of the engines, or to the engines, which read no folder of this host
            then.
        lend: Keeps the weights in memory of the ranks, which engines of the host map; the folder describes them.
        log: Hears of each version, and of a failure, on rank 0; None tells only who waits for the result.
    """

    def __init__(
        self,
        model: PackedModel,
        directory: str,
        *,
        keep: int,
        full_every: int = 1,
        adapters: bool = False,
        collective: CollectiveOptions | None = None,
        lend: LendOptions | None = None,
        log: WeightLog | None = None,
    ) -> None:
        self._model = model
        self._directory = Path(directory)
        self._keep = keep
        self._full_every = full_every
        self._log = log if model.mesh.rank == 0 else None
        self._needed: str | None = None
        self._oldest = 0
        self._base: ModelFiles | None = None
        self._newest: WeightOffer | None = None
        self._descriptions: dict[str, dict[str, bytes]] = {}
        reshard(model.head)
        self._frozen = _FrozenPart.of(model) if adapters and has_adapters(model.pretrained) else None
        self._layout = ModelLayout(
            model.pretrained, model.compute_dtype, Part.whole if self._frozen is None else Part.adapters
        )
        self._is_first, self._num_ranks = model.mesh.rank == 0, model.mesh.num_ranks
        # In the background, beside the collectives of the next update.
        self._group: dist.ProcessGroup | None = None
        if self._num_ranks > 1:
            self._group = cast("dist.ProcessGroup", dist.new_group(backend="gloo", timeout=model.mesh.timeout))
        self._check_alike()
        self._is_elsewhere = False
        self._sender = None if collective is None else self._make_sender(collective)
        self._lent = None if lend is None else self._lent_buffers(lend)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="publish")
        self._count = 0
        self._ready: Future[list[VersionPart]] = self._thread.submit(self._prepare)
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
            for part in files:
                part.write()
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
            for part in self._ready.result():
                part.close()
                shutil.rmtree(part.folder, ignore_errors=True)
            if self._base is not None:
                self._base.close()
        if self._sender is not None:
            self._sender.close()
        if self._lent is not None:
            self._lent.close()
        if self._is_elsewhere:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _lent_buffers(self, options: LendOptions) -> LentBuffers:
        """This rank's buffers, on the device of its parameters."""
        device = next(local_tensor(parameter) for parameter in self._model.pretrained.parameters()).device
        segments = segments_of(self._layout, self._model.mesh.rank, self._num_ranks)
        return LentBuffers(options, buffer_bytes(segments), device, whole_bytes=self._layout.num_bytes)

    def _check_alike(self) -> None:
        """All ranks must mean the same bytes: those that hold no whole weights convert by the model's class alone."""
        frozen = b"" if self._frozen is None else self._frozen.layout.head
        digests = gather_values(digest_of(self._layout.head + frozen), str, self._group)
        if len(set(digests)) > 1:
            raise WeightsError(
                f"the ranks lay {type(self._model.pretrained).__name__} out differently: its checkpoint's names follow "
                "from the files, not from its class; save the model once with the transformers in use, and start there"
            )

    def _make_sender(self, options: CollectiveOptions) -> WeightSender:
        """This rank's part of the transport between hosts; each rank needs a folder that its own host's ranks share.

        Raises:
            ValueError: there is no such interface.
        """
        sender = WeightSender(options, rank=0, num_ranks=self._num_ranks) if self._is_first else None
        place = (socket.gethostname(), None if sender is None else sender.address)
        places = gather_values(place, tuple[str, ChannelAddress | None], self._group)
        self._is_elsewhere = place[0] != places[0][0]
        if sender is None:
            rank = self._model.mesh.rank
            sender = WeightSender(options, rank=rank, num_ranks=self._num_ranks, address=places[0][1])
        return sender

    def _prepare(self) -> list[VersionPart]:
        """Remove versions that are no longer kept, and make the files of the next one ready to be written."""
        with self._stage("prepare"):
            return self._made_ready()

    def _made_ready(self) -> list[VersionPart]:
        if self._is_first and self._keep > 0 and self._directory.is_dir():
            versions = sorted(path for path in self._directory.iterdir() if _SNAPSHOT.fullmatch(path.name))
            first_kept = max(0, len(versions) - self._keep)
            while first_kept > 0 and not self._can_be_first(versions[first_kept]):
                first_kept -= 1
            for old in versions[:first_kept]:
                shutil.rmtree(old)
        is_full = self._count % self._full_every == 0
        self._count += 1
        next_one = self._directory / f".next-{self._count}"
        files: list[VersionPart]
        if self._lent is not None:
            buffer = self._lent.take(shown=self._oldest)
            rank = self._model.mesh.rank
            files = [LentModel(self._layout, next_one, buffer, rank=rank, num_ranks=self._num_ranks)]
        elif self._frozen is None:
            files = [ModelFiles(self._layout, next_one, is_full=is_full)]
        else:
            files = [ModelFiles(self._layout, next_one, name=ADAPTER_FILE)]
            if self._count == 1:
                files.insert(0, ModelFiles(self._frozen.layout, self._directory / f".{FROZEN_FOLDER}"))
        if self._is_first:
            try:
                for part in files:
                    self._describe(part)
            except OSError as error:
                raise WeightsError(f"the model's configuration cannot be written to {next_one}: {error}") from error
        return files

    def _describe(self, files: VersionPart) -> None:
        """Write the JSON files beside the weights, which are the same for every version."""
        if not files.is_full:
            return
        known = self._descriptions.get(files.name)
        if known is not None:
            for name, content in known.items():
                (files.folder / name).write_bytes(content)
            return
        if self._frozen is not None and not files.is_frozen:
            write_adapter_config(files.folder, self._model.pretrained)
        else:
            write_description(files.folder, self._model.pretrained, self._model.compute_dtype)
        self._descriptions[files.name] = {path.name: path.read_bytes() for path in files.folder.glob("*.json")}

    @property
    def _data_file(self) -> str:
        return DATA_FILE if self._frozen is None else ADAPTER_FILE

    def _can_be_first(self, version: Path) -> bool:
        """Whether no older version is needed: by the engines, or as the base of this one."""
        is_full = self._full_every == 1 or (version / self._data_file).exists()
        return (self._needed is None or version.name <= self._needed) and is_full

    def _finish(self, version: int, files: Sequence[VersionPart] | Exception) -> WeightOffer | None:
        """Publish what was copied, or that it was not; rank 0 tells the log.

        It does not tell of a collective that fails: its cause, such as a dead rank, shows at the calls on the ranks.
        """
        with record.span(SpanKind.publish, lane="/publish", version=version):
            return self._publish_copied(version, files)

    def _publish_copied(self, version: int, files: Sequence[VersionPart] | Exception) -> WeightOffer | None:
        with self._stage("digest", version):
            shares = self._gathered(version, files)
        try:
            if failed := [f"rank {rank}: {share}" for rank, share in enumerate(shares) if isinstance(share, str)]:
                raise WeightsError(f"the publish of version {version} failed on {'; on '.join(failed)}")
            if not self._is_first or isinstance(files, Exception):
                return None
            with self._stage("manifest", version):
                offer = self._offers(version, files, shares)
        except Exception as error:
            if self._log is not None:
                what = f"the publish of version {version} failed: {type(error).__name__}: "
                self._log.publish_failed(f"{'' if isinstance(error, WeightsError) else what}{error}")
            raise
        if self._log is not None:
            with self._stage("offer", version):
                self._oldest = self._log.offer(offer)
            self._needed = _folder_name(self._oldest)
            if self._sender is not None:
                self._sender.retire(self._oldest)
        return offer

    def _stage(self, name: str, version: int = record.NONE) -> record.OpenSpan:
        return record.span(SpanKind.publish_stage, lane="/publish", version=version, cause=name)

    def _gathered(self, version: int, files: Sequence[VersionPart] | Exception) -> list[Any]:
        """Compute what is left and digest this rank's part; returns each rank's shares, or why it has none."""
        is_whole = self._exchanged(files)
        try:
            if isinstance(files, Exception):
                raise files
            own: Any = [self._share(version, part) for part in files] if is_whole else None
        except Exception as error:
            logger.exception("a publish failed")
            own = f"{type(error).__name__}: {error}"
        shares: list[Any] = [own]
        if self._group is not None:
            kind = tuple[list[RankShare] | str | None, int]
            gathered: list[Any] = gather_values((own, self._oldest), kind, self._group)
            shares, self._oldest = [share for share, _ in gathered], gathered[0][1]  # rank 0 hears of it
            if self._sender is not None:
                self._sender.retire(self._oldest)
        if self._is_elsewhere and not isinstance(files, Exception):  # what is held there needs no name
            for part in files:
                shutil.rmtree(part.folder, ignore_errors=True)
        return shares

    def _exchanged(self, files: Sequence[VersionPart] | Exception) -> bool:
        """Bring what tensors are computed from to the ranks that compute them; False where a rank has nothing."""
        layouts = [self._layout] if self._frozen is None else [self._frozen.layout]
        if self._group is None or not any(layout.num_raw_bytes for layout in layouts):
            return True
        have = gather_values(not isinstance(files, Exception), bool, self._group)
        if not all(have) or isinstance(files, Exception):
            return False
        for part in files:
            part.exchange(self._group)
        return True

    def _share(self, version: int, files: VersionPart) -> RankShare:
        """Finish this rank's part of one file, and hold it for those who will ask for it."""
        if isinstance(files, LentModel):
            own = files.finish(version)
            files.close()
            return own
        own = files.finish(self._model.mesh.rank, self._num_ranks, self._base)
        if self._sender is not None:
            delta = None if files.is_full else files.delta(self._model.mesh.rank)
            self._sender.hold(FROZEN if files.is_frozen else version, files.data, own.pieces, delta)
        has_deltas = self._full_every > 1 and not files.is_frozen
        files.close(keep_data=has_deltas)
        if has_deltas:
            if self._base is not None:
                self._base.close()
            self._base = files
        return own

    def _offers(self, version: int, files: Sequence[VersionPart], shares: Sequence[Sequence[RankShare]]) -> WeightOffer:
        """Put the files in place on rank 0, the frozen weights first; returns the offer of the version."""
        offer: WeightOffer | None = None
        for index, part in enumerate(files):
            own = [share[index] for share in shares]
            offer = self._offer(FROZEN if part.is_frozen else version, part, own)
            if part.is_frozen and self._frozen is not None:
                self._frozen.offer = offer
            else:
                self._newest = offer
            if self._sender is not None:
                offer = self._sender.offer(offer, [len(share.pieces) for share in own])
        assert offer is not None, "a version has files"
        return offer

    def _offer(self, version: int, files: VersionPart, shares: Sequence[RankShare]) -> WeightOffer:
        """Put the files of one rank after the other in place, and write the manifest."""
        target, delta, adapter = self._directory / _folder_name(version), None, None
        if not files.is_full:
            assert self._newest is not None, "the first version is full"
            delta = Delta(
                base=self._newest,
                files=tuple(delta_file(rank) for rank in range(self._num_ranks)),
                changes=tuple(change for share in shares for change in share.changes),
            )
        elif self._frozen is not None and not files.is_frozen:
            adapter = self._frozen.adapter()
        shutil.rmtree(target, ignore_errors=True)
        files.folder.rename(target)
        manifest = Manifest(
            directory=str(target),
            files=(files.name,),
            tensors=files.layout.tensors,
            pieces=tuple(piece for share in shares for piece in share.pieces),
            delta=delta,
            adapter=adapter,
            lent=tuple(share.lent for share in shares if share.lent is not None),
        )
        return manifest.offer(target / "manifest.json", version)


class _FrozenPart:
    """What lies below adapters, and how they apply to it.

    Attributes:
        layout: Of the frozen weights.
        layers: Which are adapted, and how.
        offer: Of the frozen weights, on rank 0, once they are published.
    """

    def __init__(self, layout: ModelLayout, layers: tuple[AdaptedLayer, ...]) -> None:
        self.layout, self.layers = layout, layers
        self.offer: WeightOffer | None = None

    @classmethod
    def of(cls, model: PackedModel) -> _FrozenPart | None:
        """None, and a warning, where adapters have to be merged before they are published."""
        layout = ModelLayout(model.pretrained, model.compute_dtype, Part.frozen)
        try:
            return cls(layout, adapted_layers(model.pretrained, layout.tensor_of))
        except WeightsError as error:
            logger.warning("adapters are merged before they are published: %s", error)
            return None

    def adapter(self) -> Adapter:
        """What a version's manifest says of the frozen weights."""
        assert self.offer is not None, "the frozen weights are published with the first version"
        return Adapter(base=self.offer, layers=self.layers)


def _folder_name(version: int) -> str:
    return FROZEN_FOLDER if version == FROZEN else f"v{version:08d}"
