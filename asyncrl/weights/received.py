"""The policy versions that a host receives over the network. All engines of the host share each version.

The rollout workers of a host share one folder in the host's memory. A worker that wants a version locks the folder,
receives the version if the folder does not have it, and makes hard links to the version's files. So each byte crosses
the network once per host. If a worker dies, the kernel releases the worker's lock. A version is received into a
temporary folder, which is renamed when it is complete.

The shared folder keeps the newest version until the next version arrives, because slow workers and a delta may need
the newest version. The last remaining worker removes the shared folder when it ends.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import mmap
import os
import re
import shutil
import uuid
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np

from asyncrl.core.errors import DeadlineError, WeightsError
from asyncrl.core.host import make_private_folder, open_private
from asyncrl.core.remote import on_own_thread
from asyncrl.core.stacks import missed
from asyncrl.core.types import Carrier, WeightOffer
from asyncrl.weights.carriers import load_limit_s
from asyncrl.weights.delta import apply_delta
from asyncrl.weights.manifest import Manifest, digest_of, read_manifest, write_error

logger = logging.getLogger(__name__)

USERS = ".users"
"""Name of a folder on which each worker holds a shared lock, so that a worker finds out whether it is the last user."""
MANIFEST = "manifest.json"
_COPY_BYTES = 16 << 20
_UNFINISHED = re.compile(r"r[0-9a-f]{8}")
_ENTRY = re.compile(r"([0-9a-f]{8})-(\d{8})")


class ReceivedVersions:
    """One worker's access to the versions that its host has received.

    Args:
        folder: The folder of the host's workers; it is made if it does not exist. No other user may write to it.
        name: Name of the worker. Example: ``"engine-3"``.
        timeout_s: Time limit of a transfer, in seconds; one second per 100 MB is added.
    """

    def __init__(self, folder: Path, name: str, *, timeout_s: float) -> None:
        self._folder, self._name, self._timeout_s = folder, name, timeout_s
        self._users = -1
        self._alone: ReceivedVersions | None = None

    @asynccontextmanager
    async def version(self, offer: WeightOffer) -> AsyncIterator[WeightOffer]:
        """Receive an offered version if this host does not have it. Yields an offer that names the files on this host.

        The yielded offer is of a full version or an adapter. No other worker changes the folder of the version before
        the context ends. The manifest of an adapter names a second folder, which has the frozen weights. If another
        worker holds the lock for twice the time limit of a transfer, this worker receives into a separate folder.

        Raises the errors of `receive_weights`.
        """
        limit_s = 2 * load_limit_s(self._timeout_s, offer.num_bytes)
        locking = on_own_thread(self._locked)
        try:
            async with asyncio.timeout(limit_s):
                lock = await asyncio.wrap_future(locking)
        except BaseException as error:
            locking.add_done_callback(_release)
            if not isinstance(error, TimeoutError):
                raise
        else:
            try:
                self._close_alone()
                yield await self._found_or_received(offer)
            finally:
                os.close(lock)
            return
        logger.warning(
            "%s receives %s into a separate folder: another worker has locked %s for %.0f s",
            self._name,
            offer.name,
            self._folder,
            limit_s,
        )
        own = self._folder.with_name(f"{self._folder.name}-{self._name}")
        self._alone = self._alone or ReceivedVersions(own, self._name, timeout_s=self._timeout_s)
        async with self._alone.version(offer) as local:
            yield local

    def discard(self, offer: WeightOffer) -> None:
        """Delete the files of a version that an engine could not load. Hard links to the files stay valid."""
        with suppress(OSError):
            shutil.rmtree(self._entry(offer).rename(self._folder / f"r{uuid.uuid4().hex[:8]}"))

    def close(self) -> None:
        """End this worker's use of the folder, and remove the folder if no other worker uses it.

        May be called more than once.
        """
        self._close_alone()
        if self._users < 0:
            return
        with suppress(BlockingIOError, FileNotFoundError):
            lock = _flocked(self._folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                fcntl.flock(self._users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(self._folder, ignore_errors=True)
            finally:
                os.close(lock)
        os.close(self._users)
        self._users = -1

    def _close_alone(self) -> None:
        if self._alone is not None:
            self._alone.close()
            self._alone = None

    def _locked(self) -> int:
        """Wait until no other worker changes the folder, and lock the folder. Returns the descriptor with the lock."""
        while True:
            lock = _flocked(make_private_folder(self._folder), fcntl.LOCK_EX)
            try:
                if os.fstat(lock).st_ino == self._folder.stat().st_ino:
                    if self._users < 0:
                        self._users = _flocked(make_private_folder(self._folder / USERS), fcntl.LOCK_SH)
                    return lock
                os.close(lock)  # try again, because another worker has removed this folder
            except BaseException as error:
                os.close(lock)
                if not isinstance(error, FileNotFoundError):
                    raise

    # The caller of the following methods holds the lock on the shared folder.

    async def _found_or_received(self, offer: WeightOffer) -> WeightOffer:
        entry = self._entry(offer)
        if not _is_of(entry, offer.digest):
            base = self._make_room(entry, offer)
            received = await self._received(offer, base)
            if base is not None:
                shutil.rmtree(base, ignore_errors=True)
            received.rename(entry)
        local = replace(offer, manifest=str(entry / MANIFEST), carrier=Carrier.folder)
        return replace(local, kind="full", base_version=None) if offer.kind == "delta" else local

    def _entry(self, offer: WeightOffer) -> Path:
        learner = digest_of(f"{offer.manifest} {offer.access}".encode())[:8]
        return self._folder / f"{learner}-{offer.version:08d}"

    def _make_room(self, entry: Path, offer: WeightOffer) -> Path | None:
        """Remove incomplete versions, versions up to the version of ``offer``, and all versions of other learners.

        If ``offer`` is of a delta, keep the folder of its base version, and return this folder if it exists.
        """
        base = entry.with_name(f"{entry.name[:8]}-{offer.base_version:08d}") if offer.kind == "delta" else None
        for path in self._folder.iterdir():
            other = _ENTRY.fullmatch(path.name)
            is_old = other is not None and (other[1] != entry.name[:8] or path.name <= entry.name)
            if _UNFINISHED.fullmatch(path.name) or (is_old and path != base):
                shutil.rmtree(path, ignore_errors=True)
        return base if base is not None and base.is_dir() else None

    async def _received(self, offer: WeightOffer, base: Path | None) -> Path:
        from asyncrl.weights.stream import receive_weights  # import here, because this import loads torch

        holds = "" if base is None else digest_of((base / MANIFEST).read_bytes())
        local = await receive_weights(offer, self._folder, timeout_s=self._timeout_s, holds=holds)
        folder = Path(local.manifest).parent
        try:
            if local.kind == "adapter":
                await self._receive_frozen(offer, await asyncio.to_thread(read_manifest, local))
            elif local.kind == "delta":
                assert base is not None, "the ranks send a delta only to a host with the base version"
                await self._applied(local, base)
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            if local.kind != "delta" or not isinstance(error, WeightsError) or isinstance(error, DeadlineError):
                raise
            logger.warning("%s: %s; the host receives the full version instead", self._name, error)
        else:
            return folder
        shutil.rmtree(cast("Path", base), ignore_errors=True)
        return await self._received(offer, None)

    async def _applied(self, local: WeightOffer, base: Path) -> None:
        limit_s = load_limit_s(self._timeout_s, local.num_bytes)
        try:
            async with asyncio.timeout(limit_s):
                await asyncio.wrap_future(on_own_thread(partial(_apply, local, base)))
        except TimeoutError:
            raise missed(
                f"{self._name} did not apply the delta of policy version {local.version} within {limit_s:.0f} s "
                "(rollout_fleet.load_timeout_s plus one second per 100 MB)"
            ) from None

    async def _receive_frozen(self, offer: WeightOffer, manifest: Manifest) -> None:
        from asyncrl.weights.stream import receive_weights

        assert manifest.base is not None, "an adapter must have frozen weights"
        frozen = Path(manifest.base.manifest).parent
        if frozen.parent != self._folder:
            raise WeightsError(
                f"{offer.name} is an adapter of frozen weights in {frozen}, expected a folder directly inside "
                f"{self._folder}"
            )
        if _is_of(frozen, manifest.base.digest):
            return
        shutil.rmtree(frozen, ignore_errors=True)
        sent = replace(manifest.base, manifest=offer.manifest, carrier=offer.carrier, access=offer.access)
        received = await receive_weights(sent, self._folder, timeout_s=self._timeout_s)
        Path(received.manifest).parent.rename(frozen)


def _apply(local: WeightOffer, base: Path) -> None:
    """Apply a received delta to the base's data file, or to a copy if the file is in use."""
    manifest, folder = read_manifest(local), Path(local.manifest).parent
    assert manifest.delta is not None, "a delta"
    old, new = base / manifest.files[0], folder / manifest.files[0]
    if old.stat().st_nlink == 1:
        taken = base.rename(folder / "base")
        (taken / old.name).rename(new)
        shutil.rmtree(taken)
    else:
        copy_file(old, new)
    with os.fdopen(open_private(new, os.O_RDWR), "r+b") as file:
        apply_delta(manifest, np.frombuffer(mmap.mmap(file.fileno(), 0), dtype=np.uint8))
    for name in manifest.delta.files:
        (folder / name).unlink()


def copy_file(source: Path, target: Path) -> None:
    """Copy a file. An existing target is overwritten in place. A new target has mode 0600.

    Raises:
        FileNotFoundError: the source does not exist.
        WeightsError: the target cannot be written, for example because there is no room, or the target is a link.
    """
    with source.open("rb") as data:
        try:
            with os.fdopen(open_private(target, os.O_WRONLY | os.O_CREAT), "wb") as copied:
                shutil.copyfileobj(data, copied, _COPY_BYTES)
                copied.truncate()
        except OSError as error:
            remedy = "set weights.full_every=1 and weights.copy_to_memory=false in a directory with hard links"
            raise write_error(source.stat().st_size, target.parent, error, remedy) from error


def _is_of(folder: Path, digest: str) -> bool:
    """Return whether a folder has a manifest whose digest is ``digest``."""
    try:
        return digest_of((folder / MANIFEST).read_bytes()) == digest
    except (FileNotFoundError, NotADirectoryError):
        return False


def _flocked(folder: Path, operation: int) -> int:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, operation)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _release(locking: Future[int]) -> None:
    """Release the lock if the call ``locking`` of `_locked` has acquired the lock.

    `ReceivedVersions.version` no longer waits for this call, because the deadline has passed or the wait was cancelled.
    """
    if not locking.cancelled() and locking.exception() is None:
        os.close(locking.result())
