"""Publishes policy versions: each learner rank copies its shards, and rank 0 offers the version to the engines.

Training waits only for the copy. A thread then converts and digests the bytes, gathers the digests of all ranks, and
writes the manifest. If a rank fails, the other ranks do not wait for this rank, and rank 0 reports the failure.
"""

from __future__ import annotations

import logging
import re
import shutil
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from asyncrl.core import receipts, record
from asyncrl.core.errors import WeightsError
from asyncrl.core.ports import WeightLog
from asyncrl.core.record import SpanKind
from asyncrl.core.types import FROZEN, Carrier, WeightOffer
from asyncrl.weights.carriers import PublishOptions
from asyncrl.weights.layout import ModelLayout, ModelShards, Part
from asyncrl.weights.manifest import Adapter, Delta, Manifest, digest_of
from asyncrl.weights.rounds import ChannelAddress
from asyncrl.weights.snapshot import DATA_FILE, RankPart, RankShare, delta_file
from asyncrl.weights.stream import WeightSender

logger = logging.getLogger(__name__)

ADAPTER_FILE = "adapter_model.safetensors"
FROZEN_FOLDER = "frozen"
_SNAPSHOT = re.compile(r"v(\d{8})")


class WeightPublisher:
    """The publisher of a model's policy versions on one learner rank. All ranks must call the methods together.

    The publisher publishes a version in full, as a delta to the previous version, or as the adapters alone. If an
    adapted weight is not a tensor of the checkpoint, the publisher merges the adapters even with ``options.adapters``.

    Args:
        shards: The model on this rank.
        directory: Folder of the versions, each in a folder such as ``v00000012``. With the carrier ``folder``, engines
            read this folder.
        keep: Number of versions to keep, including the new version; -1 keeps all. The publisher also keeps versions
            that the buffer may still offer, and the full version that the oldest remaining delta needs.
        options: How versions are published.
        log: On rank 0, the object that gets the offer of each version, and each failure; None without engines.

    Attributes:
        sender: Sends this rank's weights over the network; None with the carrier ``folder``.
        ready: Future of the files that are prepared for the next version.

    Raises:
        WeightsError: the ranks have different layouts.
        ValueError: the network interface of ``options`` does not exist.
    """

    def __init__(
        self,
        shards: ModelShards,
        directory: str,
        *,
        keep: int,
        options: PublishOptions | None = None,
        log: WeightLog | None = None,
    ) -> None:
        self._shards, self._directory, self._keep = shards, Path(directory), keep
        self._options = options or PublishOptions()
        self._is_first = shards.rank == 0
        self._log = log if self._is_first else None
        self._oldest = 0
        self._is_shown = False
        self._base: RankPart | None = None
        self._newest: WeightOffer | None = None
        self._descriptions: dict[Part, dict[str, bytes]] = {}
        self._layout = ModelLayout(shards)
        self._frozen: ModelLayout | None = None
        self._adapter: Adapter | None = None
        if self._options.adapters and shards.has_adapters:
            self._publish_adapters_alone()
        # The ranks may name tensors differently: rank 0 as in the checkpoint, other ranks as in the model class.
        heads = digest_of(self._layout.head + (b"" if self._frozen is None else self._frozen.head))
        if len(set(shards.gather(heads, str))) > 1:
            raise WeightsError(
                f"the ranks have different layouts of {shards.name}: its checkpoint names the tensors differently from "
                "the model's class; save the model once with the installed transformers, and start from that checkpoint"
            )
        self._is_elsewhere = False
        self.sender: WeightSender | None = None
        if self._options.carrier != Carrier.folder:
            if self._is_first:
                self.sender = WeightSender(self._options, rank=0, num_ranks=shards.num_ranks)
            place = (socket.gethostname(), None if self.sender is None else self.sender.address)
            host, address = shards.gather(place, tuple[str, ChannelAddress | None])[0]
            if self.sender is None:
                self.sender = WeightSender(self._options, rank=shards.rank, num_ranks=shards.num_ranks, address=address)
            self._is_elsewhere = place[0] != host
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="publish")
        self._count = 0
        self.ready: Future[list[RankPart]] = self._thread.submit(self._prepare)
        self._pending: Future[WeightOffer | None] | None = None

    def publish(self, version: int, *, then: Callable[[], None] = lambda: None) -> Future[WeightOffer | None]:
        """Copy the current weights, and publish them as ``version`` in the background.

        This method calls the function ``then`` after this rank has copied its weights. Rank 0 offers the version to the
        engines after ``then`` has returned on all ranks.

        Returns:
            A future with the version's offer on rank 0, and with None on the other ranks. The next call of this method
            waits for this future.

        Raises:
            WeightsError: the files could not be prepared, for example for lack of disk space, or publishing the
                previous version failed.
        """
        self.wait()
        try:
            parts = self.ready.result()
            for part in parts:
                part.write()
            then()
        except Exception as error:
            self._pending = self._thread.submit(self._finish, version, error)
            raise
        self._pending = self._thread.submit(self._finish, version, parts)
        self.ready = self._thread.submit(self._prepare)
        return self._pending

    def wait(self) -> None:
        """Wait until the version of the latest `publish` is offered. Raises `WeightsError` if publishing failed."""
        if self._pending is not None:
            self._pending.result()

    def close(self) -> None:
        """Wait until the latest version is published. Then remove the files that were prepared for the next version.

        On hosts other than rank 0's host, all files are removed.
        """
        self._thread.shutdown(wait=True)
        if self.ready.exception() is None:
            for part in self.ready.result():
                part.close()
                shutil.rmtree(part.folder, ignore_errors=True)
            if self._base is not None:
                self._base.close()
        if self.sender is not None:
            self.sender.close()
        if self._is_elsewhere:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _publish_adapters_alone(self) -> None:
        frozen = ModelLayout(self._shards, Part.frozen)
        try:
            layers = self._shards.adapted_layers(frozen.tensor_of)
        except WeightsError as error:
            logger.warning("adapters are merged before they are published: %s", error)
            return
        self._frozen, self._layout = frozen, ModelLayout(self._shards, Part.adapters)
        # Leave path and digest empty, because the frozen weights are published later, with the first version.
        self._adapter = Adapter(base=WeightOffer(version=FROZEN, manifest="", digest="", num_bytes=0), layers=layers)

    # The publish thread runs the following methods.

    def _prepare(self) -> list[RankPart]:
        with self._stage("prepare"):
            if self._is_first and self._keep > 0 and self._directory.is_dir():
                self._remove_old()
            self._count += 1
            folder, rank = self._directory / f".next-{self._count}", self._shards.rank
            is_full = (self._count - 1) % self._options.full_every == 0
            if self._frozen is not None:
                parts = [RankPart(self._layout, folder, rank, name=ADAPTER_FILE)]
                if self._count == 1:
                    parts.insert(0, RankPart(self._frozen, self._directory / f".{FROZEN_FOLDER}", rank))
            else:
                parts = [RankPart(self._layout, folder, rank, is_full=is_full)]
            if self._is_first:
                try:
                    for part in parts:
                        self._describe(part)
                except OSError as error:
                    raise WeightsError(f"the model's configuration cannot be written to {folder}: {error}") from error
            return parts

    def _remove_old(self) -> None:
        versions = sorted(path for path in self._directory.iterdir() if _SNAPSHOT.fullmatch(path.name))
        data_file = DATA_FILE if self._frozen is None else ADAPTER_FILE
        first_kept = max(0, len(versions) - self._keep)
        # Keep older versions that an engine may still need, and the full version before the oldest remaining delta.
        while first_kept > 0:
            first = versions[first_kept]
            is_needed = self._is_shown and first.name > _folder_name(self._oldest)
            if not is_needed and (self._options.full_every == 1 or (first / data_file).exists()):
                break
            first_kept -= 1
        for old in versions[:first_kept]:
            shutil.rmtree(old)

    def _describe(self, part: RankPart) -> None:
        if not part.is_full:
            return
        kind = part.layout.part
        if kind in self._descriptions:
            for name, content in self._descriptions[kind].items():
                (part.folder / name).write_bytes(content)
        else:
            self._shards.describe(part.folder, kind)
            self._descriptions[kind] = {path.name: path.read_bytes() for path in part.folder.glob("*.json")}

    def _finish(self, version: int, parts: list[RankPart] | Exception) -> WeightOffer | None:
        """Publish the copied version. If ``parts`` is an exception, report that this rank's copy failed.

        If a collective operation of the ranks fails, this method does not report the failure to the `WeightLog`,
        because the controller learns the cause from its calls to the ranks.
        """
        with record.span(SpanKind.publish, lane="/publish", version=version):
            with self._stage("digest", version):
                shares = self._gathered(version, parts)
            try:
                if failed := [f"rank {rank}: {share}" for rank, share in enumerate(shares) if isinstance(share, str)]:
                    raise WeightsError(f"the publish of version {version} failed on {'; on '.join(failed)}")
                if not self._is_first or isinstance(parts, Exception):
                    return None
                with self._stage("manifest", version):
                    offer = self._offer(version, parts, shares)
            except Exception as error:
                if self._log is not None:
                    what = f"the publish of version {version} failed: {type(error).__name__}: "
                    self._log.publish_failed(f"{'' if isinstance(error, WeightsError) else what}{error}")
                raise
            if self._log is not None:
                with self._stage("offer", version):
                    receipts.note(receipts.Act.published, version=version, digest=offer.digest)
                    self._oldest, self._is_shown = self._log.offer(offer), True
                if self.sender is not None:
                    self.sender.retire(self._oldest)
            return offer

    def _stage(self, name: str, version: int = record.NONE) -> record.OpenSpan:
        return record.span(SpanKind.publish_stage, lane="/publish", version=version, cause=name)

    def _gathered(self, version: int, parts: list[RankPart] | Exception) -> list[Any]:
        """Convert and digest this rank's bytes. Then gather the results of all ranks, one entry per rank.

        The entry of a rank that succeeded is its list of `RankShare` objects. The entry of a rank that failed is the
        text of the error. The entry of a rank that stopped because another rank had failed is None.
        """
        own: list[RankShare] | str | None = None
        if self._exchanged(parts):
            try:
                if isinstance(parts, Exception):
                    raise parts
                own = [self._share(version, part) for part in parts]
            except Exception as error:
                logger.exception("a publish failed")
                own = f"{type(error).__name__}: {error}"
        if self._shards.num_ranks == 1:
            return [own]
        gathered = self._shards.gather((own, self._oldest), tuple[list[RankShare] | str | None, int])
        # The buffer's answer to rank 0's latest offer contains the oldest version that engines may load.
        self._oldest = gathered[0][1]
        if self.sender is not None:
            self.sender.retire(self._oldest)
        # Only rank 0's host keeps the files of versions. A rank on another host sends its part from its memory.
        if self._is_elsewhere and not isinstance(parts, Exception):
            for part in parts:
                shutil.rmtree(part.folder, ignore_errors=True)
        return [share for share, _ in gathered]

    def _exchanged(self, parts: list[RankPart] | Exception) -> bool:
        """Send parameters to the ranks that compute with them. Returns False if another rank failed."""
        layout = self._frozen or self._layout
        if self._shards.group is None or not layout.num_raw_bytes:
            return True
        has_parts = not isinstance(parts, Exception)
        if not all(self._shards.gather(has_parts, bool)) or isinstance(parts, Exception):
            return not has_parts  # True if this rank failed: `_gathered` then sends the error to all ranks
        for part in parts:
            part.exchange()
        return True

    def _share(self, version: int, part: RankPart) -> RankShare:
        own = part.finish(self._base)
        if self.sender is not None:
            self.sender.hold(FROZEN if part.is_frozen else version, part.data, own.pieces, part.delta())
        is_base = self._options.full_every > 1 and not part.is_frozen
        part.close(keep_data=is_base)
        if is_base:
            if self._base is not None:
                self._base.close()
            self._base = part
        return own

    def _offer(self, version: int, parts: Sequence[RankPart], shares: Sequence[Sequence[RankShare]]) -> WeightOffer:
        offer: WeightOffer | None = None
        for part, own in zip(parts, zip(*shares, strict=True), strict=True):
            offer = self._write_manifest(FROZEN if part.is_frozen else version, part, own)
            if part.is_frozen:
                assert self._adapter is not None, "only a model with adapters has frozen weights"
                self._adapter = Adapter(base=offer, layers=self._adapter.layers)
            else:
                self._newest = offer
            if self.sender is not None:
                offer = self.sender.offer(offer, [len(share.pieces) for share in own])
        assert offer is not None, "each version has a data file"
        return offer

    def _write_manifest(self, version: int, part: RankPart, shares: Sequence[RankShare]) -> WeightOffer:
        target, delta = self._directory / _folder_name(version), None
        if not part.is_full:
            assert self._newest is not None, "the first version must be a full version"
            delta = Delta(
                base=self._newest,
                files=tuple(delta_file(rank) for rank in range(self._shards.num_ranks)),
                changes=tuple(change for share in shares for change in share.changes),
            )
        shutil.rmtree(target, ignore_errors=True)
        part.folder.rename(target)
        manifest = Manifest(
            directory=str(target),
            files=(part.name,),
            tensors=part.layout.tensors,
            pieces=tuple(piece for share in shares for piece in share.pieces),
            delta=delta,
            adapter=self._adapter if part.layout.part is Part.adapters else None,
        )
        return manifest.offer(target / "manifest.json", version)


def _folder_name(version: int) -> str:
    return FROZEN_FOLDER if version == FROZEN else f"v{version:08d}"
