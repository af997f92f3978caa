"""Writes receipts to the run's folder ``receipts/``. A receipt is a JSON line about an action (`Act`) of a process.

A process calls `start` once, and then `note` for each action, such as loading new weights. ``asyncrl audit`` compares
the lines of all processes.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
from collections import Counter
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)

FOLDER = "receipts"
DIGEST_BITS = 62
"""Number of bits of `token_digest`. Sums of digests are taken modulo 2**`DIGEST_BITS`."""


class Act(StrEnum):
    """The kinds of actions that processes of a run record in receipts.

    - ``published``: learner rank 0 offers a policy version to the engines. The receipt has the manifest's digest.
    - ``loaded``: an engine has loaded a version, and has checked its bytes against the digests in the manifest.
    - ``sampled``: a rollout worker stores a prompt group with the tokens that its engine has sampled.
    - ``planned``: the controller sends the batch of a learner step to the learner's ranks.
    - ``trained``: a data-parallel rank has finished a learner step on its part of the batch.
    - ``committed``: the controller has recorded that a learner step is finished.
    """

    published = "published"
    loaded = "loaded"
    sampled = "sampled"
    planned = "planned"
    trained = "trained"
    committed = "committed"


_path: Path | None = None
_lock = threading.Lock()
_unwritten: list[bytes] = []


def start(run_dir: Path, process: str) -> None:
    """Enable `note` in this process. Later calls of `note` append lines to a file in the run's folder ``run_dir``.

    The file has the name of the process, ``process``. The first line creates the file.
    """
    global _path
    _path = run_dir / FOLDER / f"{process}.jsonl"


def stop() -> None:
    """Disable `note` in this process, and discard lines that could not be written."""
    global _path
    _path = None
    _unwritten.clear()


def note(act: Act, **values: Any) -> None:
    """Append a JSON line with ``act`` and ``values`` to the file of this process. Before `start`, do nothing.

    If the write fails, the function logs an error, and the next call tries to write the line again.
    """
    if (path := _path) is None:
        return
    line = json.dumps({"act": act, **values}, separators=(",", ":")).encode() + b"\n"
    with _lock:
        _unwritten.append(line)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _append(path, b"".join(_unwritten))
            _unwritten.clear()
        except OSError as error:
            logger.error("the receipt %r is not written to %s: %s", act, path, error.strerror)


def _append(path: Path, lines: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if (written := os.write(descriptor, lines)) < len(lines):  # the disk is full: remove the incomplete line
            os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(descriptor)


def counts_of(versions: np.ndarray) -> dict[str, int]:
    """Return the number of sampled tokens of each policy version.

    The keys of the result are the versions as decimal strings, because keys in JSON are strings.

    ``versions``: [T] int32, the version that sampled each token; -1 for a token that was not sampled.
    """
    return {str(version): count for version, count in sorted(Counter(versions[versions >= 0].tolist()).items())}


def token_digest(group_id: int, trajectory: int, token_ids: np.ndarray) -> int:
    """Return a digest of the tokens that the policy sampled in one turn of a trajectory: an int below 2**62.

    The digest depends on the group, the trajectory, the tokens and the order of the tokens (SplitMix64, Steele et al.,
    OOPSLA 2014). The digest of several turns is the sum of the turns' digests, modulo 2**62. ``trajectory`` is the
    index of the trajectory in the group. ``token_ids``: [T] int32.
    """
    owner = (group_id << 16 ^ trajectory) * 0x9E3779B97F4A7C15 & (1 << 64) - 1
    mixed = np.arange(len(token_ids), dtype=np.uint64) << np.uint64(32) | token_ids.astype(np.uint32)
    mixed += np.uint64(owner)
    mixed = (mixed ^ mixed >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ mixed >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return int((mixed ^ mixed >> np.uint64(31)).sum(dtype=np.uint64)) % (1 << DIGEST_BITS)
