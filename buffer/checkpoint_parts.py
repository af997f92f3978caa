"""Writes the buffer's checkpoint while training and generation continue.

A checkpoint is a folder such as ``v00000012/``. A *part* is the set of files that one server of the buffer writes into
this folder. The ledger's server writes the part ``journal``, and store server N writes the part ``storeN``. A part is a
journal that begins with a snapshot, so a server can open a part in the same way as its own journal. A server with a
journal on the same disk makes hard links to the journal's files. In other servers, a thread copies the frames (encoded
data). The folder is named ``.v00000012.partial`` until all parts are on the disk. If a store server fails, the
checkpoint lacks the part of this server.
"""

import asyncio
import logging
import shutil
from collections.abc import Awaitable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from asyncrl.core.errors import AsyncRLError, ReplayBufferError
from asyncrl.core.host import flush_to_disk, replace_folder

from . import commands, operations
from .encoding import Message
from .frames import Frames, in_memory, size_of
from .journal import AppendOnlyFile, Begin, Head, Journal, Recovered, Reference, read_contents
from .operations import Checkpointed
from .store_links import StoreLinks
from .waiting import Collaborators, PendingWrites

logger = logging.getLogger(__name__)

LEDGER_PART = "journal"
MARKS = "checkpoints"
"""Name of a value in the journal: the list of the keys (names) of the checkpoints that the ledger remembers."""


def store_part(number: int) -> str:
    """Return the name of a store server's files in a checkpoint. Example: ``store0``.

    The files of ``store0`` are ``store0.N.log`` and ``store0.N.frames`` in the checkpoint's folder.
    """
    return f"store{number}"


class PartWriter:
    """Writes the checkpoint files of one server of the buffer. ``journal`` is the server's journal, if it has one."""

    def __init__(self, journal: Journal | None) -> None:
        self._journal = journal
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def write(
        self,
        path: Path,
        *,
        values: Mapping[str, Any],
        snapshot: dict[str, Any] | None,
        frames: Iterable[tuple[str, int, Frames]],
    ) -> Awaitable[Checkpointed]:
        """Begin to write this server's files of a checkpoint: ``PATH.N.log`` and ``PATH.N.frames``.

        Returns an awaitable that is done when the files are on the disk. The awaitable raises `ReplayBufferError` if a
        file cannot be written. ``values`` and ``snapshot`` are plain values for the log. ``frames`` yields (kind, key,
        frames) for each prompt, saved prefix and payload. `Journal` describes the keys. Do not change the frames until
        the awaitable is done.
        """
        held = list(frames)
        number, references = self._linked(path)
        copied: list[tuple[int, Frames]] = []
        if not references:
            copied = [(place, parts) for place, (_, _, parts) in enumerate(held, start=1)]
            references = tuple((kind, key, place, ()) for place, (kind, key, _) in enumerate(held, start=1))
        begin = Begin(references=references, values=dict(values), snapshot=snapshot)
        kinds = [kind for kind, _, _ in held]
        summary = Checkpointed(
            num_groups=kinds.count("payload"),
            num_prefixes=kinds.count("progress"),
            num_bytes=sum(size_of(parts) for _, _, parts in held),
        )
        return asyncio.get_running_loop().run_in_executor(self._pool, _write_part, path, number, begin, copied, summary)

    def _linked(self, path: Path) -> tuple[int, tuple[Reference, ...]]:
        """Make hard links to the journal's files, so this server does not have to copy the journal's frames.

        Returns a pair: the number N of the next file ``PATH.N.log``, and references to the linked frames. Returns
        ``(1, ())`` if there is no journal, or if a link failed. The caller then copies the frames.
        """
        if self._journal is not None:
            try:
                return self._journal.link_to(path)
            except OSError as error:
                logger.info("the frames of a checkpoint are written again, because links failed: %s", error)
                for link in path.parent.glob(f"{path.name}.*"):
                    link.unlink()
        return 1, ()

    def close(self) -> None:
        """Wait until the current write is complete. Cancel the writes that have not begun."""
        self._pool.shutdown(cancel_futures=True)


def _write_part(
    path: Path, number: int, begin: Begin, copied: Iterable[tuple[int, Frames]], summary: Checkpointed
) -> Checkpointed:
    try:
        log, frames = (AppendOnlyFile(Path(f"{path}.{number}.{kind}")) for kind in ("log", "frames"))
        try:
            for place, held in copied:
                try:
                    parts = in_memory(held)
                except OSError as error:  # the checkpoint omits the group, so a resumed run generates the group again
                    logger.error("the checkpoint's part %s lacks the frames of a group: %s", path, error)
                    continue
                frames.append([(Head(references=(("", 0, place, tuple(map(len, parts))),)), parts)])
            log.append([(begin, ())])
        finally:
            log.close()
            frames.close()
        for file in path.parent.glob(f"{path.name}.*"):
            flush_to_disk(file)
    except OSError as error:
        raise ReplayBufferError(
            f"the checkpoint's part {path} cannot be written: {error.strerror}; check the disk and its permissions"
        ) from error
    return summary


class CheckpointRequests:
    """Writes the checkpoints of the ledger's server, and loads the state of an earlier server at the start.

    Args:
        shared: The ledger and other objects that all request handlers use.
        journal: The server's own journal; None if the server has no journal.
        links: Connections to the store servers; None if the ledger's server holds the trajectories.
    """

    def __init__(self, shared: Collaborators, *, journal: Journal | None, links: StoreLinks | None) -> None:
        self._config, self._ledger, self._store = shared.config, shared.ledger, shared.store
        self._journal, self._links = journal, links
        # ``_lineage`` is a name that stays the same when the run resumes.
        self._lineage = shared.config.lineage or shared.config.epoch
        # ``_owner`` holds the options that a later server must not change if it continues the journal or a checkpoint.
        self._owner = {**self._ledger.options, "is_elsewhere": self._store.is_elsewhere}
        self._writer = PartWriter(journal)
        self._pending = PendingWrites(shared.held())
        self._turn = asyncio.Lock()

    def continue_earlier(self) -> Recovered | None:
        """Read the state of an earlier server from the journal or from a checkpoint, and return the state.

        Returns None if the server has neither a journal nor a checkpoint. A new journal begins with a copy of the
        checkpoint. If the journal belongs to the run that the option ``earlier_epoch`` names, the resumed run becomes
        the journal's new owner.

        Raises:
            ReplayBufferError: The checkpoint cannot be read, prompts are lost, or the journal cannot be written.
            ValueError: The checkpoint needs other store servers, or the journal has another owner or other options.
        """
        config, journal = self._config, self._journal
        recovered = None if journal is None else self._with_prompts(journal.recover(), config.directory)
        found = None if journal is None else journal.read("owner")
        if config.checkpoint and found is None:
            contents = read_contents(Path(config.checkpoint) / LEDGER_PART)
            self._check_stores(contents.values["owner"], config.checkpoint)
            recovered = self._with_prompts(contents.recovered, config.checkpoint)
            if journal is not None:
                journal.begin_from(recovered)
        if journal is not None:
            owner = {"epoch": config.epoch, "lineage": self._lineage, **self._owner}
            if found is not None and config.earlier_epoch and found["epoch"] == config.earlier_epoch:
                self._check_stores(found, config.directory)
                journal.write("owner", owner)
            journal.claim(owner)
        return recovered

    def _with_prompts(self, recovered: Recovered, where: str) -> Recovered:
        if recovered.num_lost_prompts:
            raise ReplayBufferError(
                f"{where}/{LEDGER_PART} lacks the prompts of {recovered.num_lost_prompts} unfinished groups: its files "
                "are damaged; resume from an older checkpoint"
            )
        return recovered

    def _check_stores(self, owner: Mapping[str, Any], where: str) -> None:
        for name in ("num_stores", "is_elsewhere"):
            if owner[name] != (needed := self._owner[name]):
                raise ValueError(
                    f"{where} has {name}={owner[name]}, but this buffer has {needed}; resume with the "
                    "checkpoint's values of buffer.num_store_servers and buffer.stores_on"
                )

    def begin(self, request: Message) -> None:
        """Begin to write the checkpoint of a `Checkpoint` request. The server answers when the checkpoint is complete.

        If the client repeats the request, the repeated request waits for the same write.
        """
        self._pending.wait(request, lambda: self._write(request.body))

    def note_marks(self) -> None:
        """Write the names of the ledger's remembered checkpoints to the journal, so a resumed run can read them."""
        if self._journal is not None and self._journal.read(MARKS) != (keys := self._ledger.marks.keys()):
            self._journal.write(MARKS, keys)

    async def _write(self, checkpoint: commands.Checkpoint) -> Checkpointed:
        folder = Path(checkpoint.folder)
        partial = folder.with_name(f".{folder.name}.partial")
        try:
            async with self._turn:  # write only one checkpoint at a time, because two may have the same folder
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
                written = await self._parts(partial, checkpoint)
                await asyncio.to_thread(replace_folder, partial, folder)
        except OSError as error:
            raise ReplayBufferError(
                f"the checkpoint {folder} cannot be written: {error.strerror}; check the disk and its permissions"
            ) from error
        return written

    async def _parts(self, folder: Path, checkpoint: commands.Checkpoint) -> Checkpointed:
        """Write the ledger's files of a checkpoint, and wait until each store server has written its own files.

        The stores get the request `SavePart` before the ledger takes its snapshot. So a store writes every group of the
        snapshot, even if a later message makes the store drop the group.
        """
        stores: list[asyncio.Future[Checkpointed]] = []
        for number, link in () if self._links is None else self._links.connected():
            save = operations.SavePart(key=checkpoint.key, path=str(folder / store_part(number)))
            stores.append(asyncio.ensure_future(link.call(save)))
        await asyncio.sleep(0)  # let the tasks send `SavePart` to the stores before the ledger takes its snapshot
        values = {"lineage": self._lineage, "key": checkpoint.key, "owner": self._owner}
        snapshot, frames = self._ledger.snapshot(), self._store.frames()
        own = await self._writer.write(folder / LEDGER_PART, values=values, snapshot=snapshot, frames=frames)
        parts = await asyncio.gather(*map(_without_failure, stores))
        return Checkpointed(
            num_groups=own.num_groups + sum(part.num_groups for part in parts),
            num_prefixes=own.num_prefixes,
            num_bytes=own.num_bytes + sum(part.num_bytes for part in parts),
        )

    def close(self) -> None:
        """Cancel the checkpoint that is being written. Its incomplete folder (``.v00000012.partial``) stays."""
        self._pending.close()
        self._writer.close()


async def _without_failure(part: Awaitable[Checkpointed]) -> Checkpointed:
    """Wait for a store server's answer. Return an empty `Checkpointed` if the store server failed."""
    try:
        return await part
    except AsyncRLError as error:
        logger.warning("a store server did not write its part of a checkpoint: %s", error)
        return Checkpointed()
