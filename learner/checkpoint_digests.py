"""Digests of a checkpoint's files, to detect changed bytes.

torch.distributed.checkpoint (DCP) and ``torch.load`` detect a missing or shortened file, but not changed bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import xxhash
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.futures import Future

from asyncrl.core.errors import CheckpointError

_CHUNK_BYTES = 1 << 22


class DigestingWriter(FileSystemWriter):
    """Writes the shards of a rank in DCP's format, and then the file ``digests_RANK.json``.

    ``others`` are files that the rank has already written. ``digests_RANK.json`` has the xxh3 digest of each file with
    shards and of each file in ``others``.
    """

    def __init__(self, path: Path, rank: int, others: Iterable[Path]) -> None:
        super().__init__(path)
        self._others = [other.name for other in others]
        self._digests = path / f"digests_{rank}.json"

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        """Write this rank's shards, and then the file of digests. Return the future that DCP makes for the shards."""
        written = super().write_data(plan, planner)
        names = sorted({*self._others, *(result.storage_data.relative_path for result in written.wait())})
        self._digests.write_text(json.dumps({name: _digest_of(self._digests.with_name(name)) for name in names}))
        return written


def check_digests(checkpoint: Path, num_saved: int, *, names: str = "*", rank: int = 0, num_ranks: int = 1) -> bool:
    """Compare a checkpoint's files with the digests that were saved with them.

    If several ranks call this function, each rank compares some of the files.

    Args:
        checkpoint: Folder of the checkpoint.
        num_saved: Number of ranks that saved the checkpoint.
        names: Pattern of the files to compare. Example: ``*.distcp``.
        rank: Number of this rank, 0..num_ranks - 1.
        num_ranks: Number of ranks that call this function together.

    Returns:
        Whether the checkpoint has digests. Checkpoints of earlier versions of asyncrl have no digests.

    Raises:
        CheckpointError: a file was changed, or a file of digests is missing.
        OSError: a file cannot be read.
    """
    files = [checkpoint / f"digests_{saved}.json" for saved in range(num_saved)]
    if not any(file.exists() for file in files):
        return False
    for file in files[rank::num_ranks]:
        if not file.exists():
            raise CheckpointError(f"{file} is missing")
        for name, expected in json.loads(file.read_text()).items():
            if fnmatch(name, names) and (found := _digest_of(checkpoint / name)) != expected:
                raise CheckpointError(f"{name} is damaged: its digest was {expected} when it was saved, but is {found}")
    return True


def _digest_of(file: Path) -> str:
    digest = xxhash.xxh3_128()
    with file.open("rb") as content:
        while chunk := content.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
