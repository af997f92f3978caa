"""Brings offered weights to the host of an engine while the engine generates. The engine pauses only for the load.

- A full version or an adapter in a folder is hard-linked, so that the learner may remove its own link.
- A delta in a folder is applied to a copy of the engine's version in host memory, the *image*. A full version is copied
  to the image if the stager's option ``copies`` is True, or if hard links are impossible.
- A version that is sent to hosts over the network is received into host memory, once for all engines of the host, and
  hard-linked.
- A version that is sent directly to engines is not staged, because it has no files.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from copy import copy
from dataclasses import replace
from pathlib import Path

import numpy as np

from asyncrl.core.errors import WeightsError, WeightsGone
from asyncrl.core.host import NotPrivate, check_owned, make_private_folder, open_private
from asyncrl.core.stacks import missed
from asyncrl.core.types import Carrier, WeightOffer
from asyncrl.weights.carriers import load_limit_s
from asyncrl.weights.delta import apply_delta
from asyncrl.weights.manifest import Manifest, read_manifest, write_error
from asyncrl.weights.received import ReceivedVersions, copy_file

logger = logging.getLogger(__name__)

LINKS = ".staged"
"""Name of the folder with hard links to versions. It is next to the published versions, with one folder per engine."""


class WeightStager:
    """Copies or links the files of offered weight versions for one engine.

    Args:
        name: Name that is unique in the run. Example: ``"engine-3"``.
        memory: Folder in the host's memory; it is made if it does not exist. No other user may write to it.
        copies: Whether full versions are copied to ``memory`` instead of linked. Must be True if there are deltas.
        timeout_s: Time limit for staging a version, in seconds; one second per 100 MB is added.

    Attributes:
        received: The versions that the engines of this host received over the network.
    """

    def __init__(self, name: str, *, memory: Path, copies: bool, timeout_s: float) -> None:
        self._name = name
        self._life = 0
        self._memory = memory
        self._image = memory / name
        self._copies = copies
        self._timeout_s = timeout_s
        self._links: Path | None = None
        # `_held` is the manifest digest of the weights in the image (a copy of weights in the memory of the host).
        self._held = ""
        self.received = ReceivedVersions(memory / "received", name, timeout_s=timeout_s)

    @asynccontextmanager
    async def staged(self, offer: WeightOffer) -> AsyncIterator[WeightOffer]:
        """Bring the files of an offered version to this host (staging). Yields an offer that names the local files.

        The yielded offer is of a full version or an adapter. A version of an engine stream has no files, so its offer
        is yielded unchanged. A thread stages the files. After a missed deadline or a cancellation, this thread still
        runs. It removes its folders when it ends, and the next version uses other folders.

        Raises:
            WeightsGone: the version was removed before it was staged. Request the newest version.
            WeightsError: the version is damaged, there is no room, or another user may write to a folder of the stager.
            DeadlineError: the version was not staged in time.
        """
        local = offer
        try:
            make_private_folder(self._memory)
            if offer.carrier == Carrier.host_stream:
                local = await self._linked_on_host(offer)
            elif offer.carrier != Carrier.engine_stream:
                local = await self._staged_in_time(offer)
        except NotPrivate as error:
            raise WeightsError(f"{self._name} did not stage {offer.name}: {error}") from error
        try:
            yield local
        except Exception:
            if offer.carrier == Carrier.host_stream:  # discard the received bytes, which may be damaged
                self.received.discard(offer)
            raise
        finally:
            self._remove_links()

    async def _staged_in_time(self, offer: WeightOffer) -> WeightOffer:
        """Stage a version in a thread, and return an offer that names the staged files.

        The thread works on a copy of this stager. If the thread ends before the deadline, this stager gets the
        attributes of the copy. Otherwise, `DeadlineError` is raised.
        """
        limit_s = load_limit_s(self._timeout_s, offer.num_bytes)
        of_thread = copy(self)
        working = asyncio.ensure_future(asyncio.to_thread(of_thread.stage, offer))
        try:
            async with asyncio.timeout(limit_s):
                return await asyncio.shield(working)
        except TimeoutError:
            raise missed(
                f"{self._name} did not stage policy version {offer.version} from {offer.manifest} within {limit_s:.0f} "
                "s (rollout_fleet.load_timeout_s plus one second per 100 MB)"
            ) from None
        finally:
            if working.done():
                vars(self).update(vars(of_thread))
            else:
                self._leave_behind(of_thread, working)

    def _leave_behind(self, of_thread: WeightStager, working: asyncio.Future[WeightOffer]) -> None:
        """Use new folders, because a thread that missed its deadline still writes into the old folders."""
        self._life += 1
        self._image = self._image.with_name(f"{self._name}.{self._life}")
        self._links, self._held = None, ""

        def remove(done: asyncio.Future[WeightOffer]) -> None:
            if not done.cancelled() and (error := done.exception()) is not None:
                logger.warning("%s: staging failed after its deadline: %s", self._name, error)
            of_thread.close()

        working.add_done_callback(remove)

    async def _linked_on_host(self, offer: WeightOffer) -> WeightOffer:
        async with self.received.version(offer) as shared:
            try:
                return await asyncio.to_thread(self._links_of, shared)
            except FileNotFoundError as error:
                raise WeightsGone(f"another engine failed to load {offer.name} and removed it: {error}") from error
            except OSError as error:
                raise WeightsError(
                    f"{self._name} cannot link {offer.name} in {self._memory}: {error}; weights.transport=collective "
                    "needs a file system with hard links there"
                ) from error

    def stage(self, offer: WeightOffer) -> WeightOffer:
        """Link or copy the files of an offered version in a folder, without a deadline.

        Returns an offer that names the links or copies. Raises `WeightsGone` or `WeightsError` in the same cases as
        `staged`.
        """
        try:
            if offer.kind != "delta" and not self._copies and (local := self._linked(offer)):
                return local
            if offer.kind == "adapter":
                return self._adapter_in_memory(offer)
            try:
                return self._in_memory(offer)
            except WeightsError as error:
                if offer.kind == "full":
                    raise
                logger.warning("%s: %s; the engine continues from the latest full version", self._name, error)
                self._held = ""
                return self._in_memory(offer)
        except FileNotFoundError as error:
            raise WeightsGone(
                f"policy version {offer.version} was removed before {self._name} staged it: {error}"
            ) from error

    def close(self) -> None:
        """Remove all links and copies of this engine."""
        self._held = ""
        self._remove_links()
        if self._links is not None:
            with suppress(OSError):  # ignore the error: the folder is not empty if another engine still runs
                self._links.parent.rmdir()
        shutil.rmtree(self._image, ignore_errors=True)
        self.received.close()

    def _remove_links(self) -> None:
        if self._links is not None:
            shutil.rmtree(self._links, ignore_errors=True)

    def _linked(self, offer: WeightOffer) -> WeightOffer | None:
        """Link the files of a version. Return None if links are impossible or unsafe."""
        try:
            return self._links_of(offer)
        except FileNotFoundError:
            raise
        except (NotPrivate, OSError) as error:
            source = Path(offer.manifest).parent
            logger.warning("%s: copies %s to memory, since it cannot be linked: %s", self._name, source, error)
            self._copies = True
            return None

    def _links_of(self, offer: WeightOffer) -> WeightOffer:
        manifest, source = read_manifest(offer), Path(offer.manifest)
        if Path(manifest.directory) != source.parent:
            return offer
        folders = {source.parent: manifest.files}
        if manifest.base is not None and offer.kind != "full":
            folders[Path(manifest.base.manifest).parent] = read_manifest(manifest.base).files
        check_owned(source.parent.parent)
        self._links = make_private_folder(source.parent.parent / LINKS) / self._image.name
        self._remove_links()  # remove links of a dead engine with the same name
        for folder, files in folders.items():
            target = make_private_folder(self._links / folder.name)
            for name in (*files, source.name):
                os.link(folder / name, target / name)
        return replace(offer, manifest=str(self._links / source.parent.name / source.name))

    def _adapter_in_memory(self, offer: WeightOffer) -> WeightOffer:
        manifest, source = read_manifest(offer), Path(offer.manifest)
        assert manifest.base is not None, "an adapter must have frozen weights"
        frozen = Path(manifest.base.manifest)
        if manifest.base.digest != self._held:
            self._held = ""
            self._copy(read_manifest(manifest.base), self._image / frozen.parent.name)
            _copy_manifest(frozen, self._image / frozen.parent.name / frozen.name)
            self._held = manifest.base.digest
        target = self._links = self._image / source.parent.name
        self._remove_links()
        self._copy(manifest, target)
        _copy_manifest(source, target / source.name)
        return replace(offer, manifest=str(target / source.name))

    def _in_memory(self, offer: WeightOffer) -> WeightOffer:
        """Change the image (the copy of weights in host memory) to the offered version.

        Deltas are applied to the version in the image, or to a full version that is copied into the image first.
        """
        steps = [(offer, read_manifest(offer))]
        while (delta := steps[-1][1].delta) is not None and delta.base.digest != self._held:
            steps.append((delta.base, read_manifest(delta.base)))
        for step, manifest in reversed(steps):
            self._held = ""
            if step.kind == "full":
                self._copy(manifest, self._image)
            else:
                with os.fdopen(open_private(self._image / manifest.files[0], os.O_RDWR), "r+b") as file:
                    apply_delta(manifest, np.frombuffer(mmap.mmap(file.fileno(), 0), dtype=np.uint8))
            self._held = step.digest
        local = self._image / "manifest.json"
        _copy_manifest(Path(offer.manifest), local)
        return replace(offer, manifest=str(local), kind="full", base_version=None)

    def _copy(self, manifest: Manifest, folder: Path) -> None:
        """Copy a version's data files to ``folder``. Old files are overwritten in place, which reuses their memory."""
        make_private_folder(folder)
        for name in manifest.files:
            copy_file(Path(manifest.directory, name), folder / name)


def _copy_manifest(source: Path, target: Path) -> None:
    content = source.read_bytes()
    try:
        with os.fdopen(open_private(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
            file.write(content)
    except OSError as error:
        raise write_error(len(content), target.parent, error) from error
