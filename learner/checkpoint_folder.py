"""A folder of checkpoints on disk: which are whole, which is newest, what each says of itself. Loads no torch.

``v00000012/`` is the checkpoint of policy version 12. It is written as ``.v00000012.partial`` and renamed when it is
whole, so that a folder of that name is always a whole checkpoint, whenever a process died.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HUGGING_FACE = "huggingface"
"""Folder inside a checkpoint with configuration and tokenizer, for ``asyncrl export``."""

_NAME = re.compile(r"v(\d{8,})")
_PROGRESS = "progress.json"


@dataclass(frozen=True, kw_only=True)
class SavedProgress:
    """What a checkpoint says of itself.

    Attributes:
        version: Learner steps contained in the weights.
        num_updates: Optimizer updates made; the position in the schedule.
        num_ranks: Ranks that saved it.
        sp_size: Their sequence-parallel ranks.
        dtype: Type of the parameters while computing, and of exported weights.
        role: What the saved role needs to go on beside its model, as plain values. Example: its KL coefficient.
        lora: The options of the policy's adapters; empty where it has none.
        run: Whatever the controller needs to go on, as plain values; empty where nobody gave any.
    """

    version: int
    num_updates: int
    num_ranks: int
    sp_size: int
    dtype: str
    role: Mapping[str, Any] = field(default_factory=dict)
    lora: Mapping[str, Any] = field(default_factory=dict)
    run: Mapping[str, Any] = field(default_factory=dict)


def checkpoint_path(directory: Path, version: int) -> Path:
    """Where the checkpoint of a version is once it is whole."""
    return directory / f"v{version:08d}"


def partial_path(final: Path) -> Path:
    """Where a checkpoint is written."""
    return final.with_name(f".{final.name}.partial")


def unfinished_checkpoints(directory: Path) -> list[Path]:
    """What processes that died while saving left; nobody else may be saving there."""
    return sorted(directory.glob(".v*.partial"))


def write_progress(checkpoint: Path, progress: SavedProgress) -> None:
    """Write what the checkpoint says of itself."""
    (checkpoint / _PROGRESS).write_text(json.dumps(asdict(progress)))


def read_progress(checkpoint: Path) -> SavedProgress:
    """What a checkpoint says of itself; `ValueError` if there is none, or a broken one or of another version."""
    if not (checkpoint / _PROGRESS).is_file():
        raise ValueError(
            f"no checkpoint at {str(checkpoint)!r}: it lacks {_PROGRESS}; name a folder such as .../v00000012, or the "
            "folder that holds them"
        )
    try:
        return SavedProgress(**json.loads((checkpoint / _PROGRESS).read_text()))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{checkpoint / _PROGRESS} is not the record of a checkpoint of this version ({error}); name an "
            "older checkpoint"
        ) from error


def newest_checkpoint(path: Path) -> Path | None:
    """The newest whole checkpoint of a folder, the path itself where it is one, or None."""
    if (path / _PROGRESS).is_file():
        return path
    whole = whole_checkpoints(path)
    return whole[-1] if whole else None


def whole_checkpoints(directory: Path) -> list[Path]:
    """Whole checkpoints of a folder, oldest first."""
    for replaced in directory.glob(".v*.replaced"):  # the process died between the two renames of `put_in_place`
        final = directory / replaced.name.removeprefix(".").removesuffix(".replaced")
        if not final.exists():
            replaced.rename(final)
    found = [path for path in directory.glob("v*") if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name[1:]))


def put_in_place(final: Path) -> None:
    """Give a written checkpoint its name; one of the same version is there until the new one is."""
    replaced = final.with_name(f".{final.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if final.exists():
        final.rename(replaced)
    partial_path(final).rename(final)
    shutil.rmtree(replaced, ignore_errors=True)


def keep_newest(directory: Path, keep: int) -> None:
    """Remove all but the newest checkpoints; -1 keeps all. A removal that is interrupted leaves no half checkpoint."""
    for path in whole_checkpoints(directory)[:-keep] if keep > 0 else []:
        removed = path.with_name(f".{path.name}.removed")
        shutil.rmtree(removed, ignore_errors=True)
        path.rename(removed)
    for removed in directory.glob(".v*.removed"):
        shutil.rmtree(removed, ignore_errors=True)
