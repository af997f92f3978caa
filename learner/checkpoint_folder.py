"""Finds, renames and removes the checkpoints in a folder, and stores the `SavedProgress` of each checkpoint.

``v00000012/`` is the checkpoint of policy version 12. A save writes ``.v00000012.partial`` and renames this folder at
the end, so a folder with the final name has all its files. The *parts* of a checkpoint are in other folders: for
example, ``critic/v00000012/`` holds the critic's state. A checkpoint is complete if all these folders have final names.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.core.host import REPLACED

HUGGING_FACE = "huggingface"
"""Name of the folder inside a checkpoint with the model's configuration and tokenizer."""

CRITIC = "critic"
"""Name of the folder of the critic's checkpoints, next to the policy's checkpoints."""

_NAME = re.compile(r"v(\d{8,})")
_PROGRESS = "progress.json"


@dataclass(frozen=True, kw_only=True)
class SavedProgress:
    """The values other than tensors that a run needs to resume from a checkpoint. They are stored as JSON.

    Attributes:
        version: Policy version of the weights.
        num_updates: Number of optimizer updates before the save.
        num_ranks: Number of ranks that saved the checkpoint.
        sp_size: Sequence-parallel size of the ranks that saved the checkpoint.
        dtype: Dtype of the learner's computation.
        role: Values that the worker of the checkpoint's model needs to resume, such as the actor's KL coefficient.
        lora: Options of the policy's adapters; empty without adapters.
        run: Values that the run's controller needs to resume; empty if the caller passed no values.
        life: Path of the run folder of the ``asyncrl train`` process that saved the checkpoint. This folder has the
            metrics of the steps before the checkpoint. Empty if the caller passed no path.
        parts: Names of the folders that hold other state of the checkpoint. Example: ``["buffer", "critic"]``.
    """

    version: int
    num_updates: int
    num_ranks: int
    sp_size: int
    dtype: str
    role: Mapping[str, Any] = field(default_factory=dict)
    lora: Mapping[str, Any] = field(default_factory=dict)
    run: Mapping[str, Any] = field(default_factory=dict)
    life: str = ""
    parts: Sequence[str] = ()


def checkpoint_path(directory: Path, version: int) -> Path:
    """Return the final path of a policy version's checkpoint. Example: ``c/v00000012`` in folder ``c``."""
    return directory / f"v{version:08d}"


def partial_path(final: Path) -> Path:
    """Return the path of the temporary folder that a save writes, and later renames to ``final``."""
    return final.with_name(f".{final.name}.partial")


def unfinished_checkpoints(directory: Path) -> list[Path]:
    """Return the paths of partly written checkpoints. A process that dies during a save leaves such a folder.

    Call this function only while no process saves to the folder.
    """
    return sorted(directory.glob(".v*.partial"))


def write_progress(checkpoint: Path, progress: SavedProgress) -> None:
    """Write ``progress`` into the checkpoint's folder, as JSON."""
    (checkpoint / _PROGRESS).write_text(json.dumps(asdict(progress)))


def read_progress(checkpoint: Path) -> SavedProgress:
    """Return the `SavedProgress` of a checkpoint.

    Raises `ValueError` if the checkpoint's ``progress.json`` is missing, damaged, or from another version of asyncrl.
    """
    try:
        return SavedProgress(**json.loads((checkpoint / _PROGRESS).read_text()))
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(
            f"no checkpoint at {str(checkpoint)!r}: {_PROGRESS} is missing; name a checkpoint, such as "
            ".../v00000012, or the folder that contains the checkpoints; remove a damaged checkpoint from its folder"
        ) from None
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{checkpoint / _PROGRESS} is damaged, or another version of asyncrl saved it ({error}); name another "
            "checkpoint"
        ) from error


def newest_checkpoint(path: Path) -> Path | None:
    """Return the path of the newest complete checkpoint in the folder ``path``.

    If the folder has no complete checkpoint, return None. If ``path`` is itself a checkpoint, return ``path``, even if
    this checkpoint is not complete.
    """
    if (path / _PROGRESS).is_file():
        return path
    whole = whole_checkpoints(path)
    return whole[-1] if whole else None


def whole_checkpoints(directory: Path) -> list[Path]:
    """Return the paths of a folder's complete checkpoints, oldest first.

    A checkpoint is complete if all of its folders exist. A run with a critic also saves a folder with the critic's
    state, for example.
    """
    return [path for path, progress in saved_checkpoints(directory).items() if not _missing(path, progress)]


def saved_checkpoints(directory: Path) -> dict[Path, SavedProgress]:
    """Return the `SavedProgress` of each checkpoint in a folder, by the checkpoint's path, oldest first.

    A running training may remove checkpoints during the call. The result leaves such checkpoints out. Raises the errors
    of `read_progress` for the other checkpoints.
    """
    found = {}
    for path in named_checkpoints(directory):
        try:
            found[path] = read_progress(path)
        except ValueError:
            if path.exists():
                raise
    return found


def missing_parts(checkpoint: Path) -> list[str]:
    """Return the names of a checkpoint's missing folders. Example: ``["critic"]`` if the critic's state is missing.

    A folder that does not have its final name yet is also in the result. Raises the errors of `read_progress`.
    """
    return _missing(checkpoint, read_progress(checkpoint))


def _missing(checkpoint: Path, progress: SavedProgress) -> list[str]:
    return [part for part in progress.parts if not part_of(checkpoint, part).is_dir()]


def part_of(checkpoint: Path, part: str) -> Path:
    """Return the folder that holds a part of a checkpoint, such as the critic's state.

    Example: for ``c/v00000012`` and the part ``critic``, the folder is ``c/critic/v00000012``.
    """
    return checkpoint.parent / part / checkpoint.name


def named_checkpoints(directory: Path) -> list[Path]:
    """Return the paths of a folder's checkpoints that have final names, oldest first.

    A returned folder has all its files, but the folder of another part of the checkpoint may be missing (see
    `part_of`). If `replace_folder` was interrupted after it had renamed a checkpoint, this function gives the
    checkpoint its final name back.
    """
    for replaced in directory.glob(f".v*{REPLACED}"):  # a process that died in `replace_folder` has left this folder
        final = directory / replaced.name.removeprefix(".").removesuffix(REPLACED)
        if not final.exists():
            with suppress(OSError):  # another process runs `replace_folder` now, or the folder is read-only
                replaced.rename(final)
    found = [path for path in directory.glob("v*") if _NAME.fullmatch(path.name)]
    return sorted(found, key=_version)


def _version(checkpoint: Path) -> int:
    return int(checkpoint.name[1:])


def lineage_of(checkpoint: Path) -> str:
    """Return the random name of the run that saved a checkpoint. A resumed run keeps its name.

    The name is empty if no run saved the checkpoint. Raises the errors of `read_progress`.
    """
    return read_progress(checkpoint).run.get("lineage", "")


def keep_newest(newest: Path, keep: int) -> None:
    """Remove old checkpoints of the run that saved the checkpoint ``newest``.

    Of the complete checkpoints, ``newest`` and the ``keep - 1`` checkpoints before ``newest`` stay. If ``keep`` is
    -1, all checkpoints stay. Checkpoints of other runs stay. Checkpoints with a later version than ``newest`` stay too;
    they exist if the run returned to an earlier version. If a removal is interrupted, the next call completes it.
    """
    directory, lineage = newest.parent, lineage_of(newest)
    named = named_checkpoints(directory)
    others = {path.name for path in named if lineage_of(path) != lineage}
    past = [path for path in named if path.name not in others and _version(path) <= _version(newest)]
    whole = [path for path in past if not missing_parts(path)]
    if keep > 0 and len(whole) > keep:
        parts = sorted({part for path in named for part in read_progress(path).parts})
        for folder in (directory, *(directory / part for part in parts)):
            for path in named_checkpoints(folder):
                if _version(path) < _version(whole[-keep]) and path.name not in others:
                    removed = path.with_name(f".{path.name}.removed")
                    shutil.rmtree(removed, ignore_errors=True)
                    path.rename(removed)
    for removed in (*directory.glob(".v*.removed"), *directory.glob("*/.v*.removed")):
        shutil.rmtree(removed, ignore_errors=True)
