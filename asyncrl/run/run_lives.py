"""Reads and writes what runs store about their lives. A life is one process of ``asyncrl train``, with its own folder.

Importing this module does not load Ray or torch.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from asyncrl.core.host import files_below
from asyncrl.metrics import (
    LifeRecord,
    LifeState,
    history_folder,
    json_object,
    life_records,
    read_life,
    read_options,
    write_life,
)
from asyncrl.run.run_folder import is_in_use, shared_folder
from learner.checkpoint_folder import part_of, read_progress, saved_checkpoints


@dataclass(frozen=True, kw_only=True)
class SavedCheckpoint:
    """A checkpoint on disk.

    Attributes:
        version: Policy version of the checkpoint.
        num_bytes: Size of all parts. A file with several hard links counts once.
        missing: Names of incomplete parts. A run can continue from the checkpoint only if this list is empty.
    """

    path: Path
    version: int
    num_bytes: int
    missing: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Life:
    """One ``asyncrl train`` process of a run, read from its folder.

    Attributes:
        num_steps: Number of learner steps, including the steps of the earlier lives of the run.
        checkpoints: The checkpoints of this life that are on disk, oldest first.
        num_bytes: Size of the folder, including checkpoints. A file with several hard links counts once.
    """

    folder: Path
    record: LifeRecord
    state: LifeState
    num_steps: int
    total_steps: int
    checkpoints: Sequence[SavedCheckpoint]
    num_bytes: int


def begin_life(run_dir: Path, resumed: Path | None) -> None:
    """Write the record of a new life (one ``asyncrl train`` process) into its folder.

    ``resumed`` is the checkpoint from which the life continues; None for a new run.
    """
    record = LifeRecord(host=socket.gethostname(), began_s=time.time())
    if resumed is not None:
        before = history_folder(resumed, read_progress(resumed).life).resolve()
        record = replace(record, resumed=str(resumed.resolve()), before=str(before))
    write_life(run_dir, record)


def record_policy(run_dir: Path, policy: Path) -> None:
    """Write the folder of the initial policy into the record of a life. If the life has no record, do nothing."""
    if (record := read_life(run_dir)) is not None:
        write_life(run_dir, replace(record, policy=str(policy.resolve())))


def end_life(run_dir: Path, status: int) -> None:
    """Write the exit status of a life (one ``asyncrl train`` process) into its record.

    If the life has no record, do nothing.
    """
    if (record := read_life(run_dir)) is not None:
        write_life(run_dir, replace(record, ended_s=time.time(), status=status))


def find_runs(folder: Path) -> tuple[list[list[Life]], list[ValueError]]:
    """Return a pair: the runs below a folder in the order of their start, and one error per life with damaged files.

    A run is a list of its lives, oldest first. A life is one ``asyncrl train`` process. A life that continues from a
    checkpoint belongs to the run of the checkpoint. Several lives may continue from checkpoints of the same life. Lives
    with damaged files are left out.
    """
    lives: list[Life] = []
    damaged: list[ValueError] = []
    for path in life_records(folder):
        try:
            if (record := read_life(path)) is not None:
                lives.append(life_of(path, record))
        except ValueError as error:
            damaged.append(error)
    runs: dict[Path, list[Life]] = {}
    for life in sorted(lives, key=lambda life: life.record.began_s):
        run = runs.get(Path(life.record.before), []) if life.record.before else []
        runs[life.folder] = run
        run.append(life)
    unique = {id(run): run for run in runs.values()}.values()
    return sorted(unique, key=lambda run: run[0].record.began_s), damaged


def life_of(run_dir: Path, record: LifeRecord) -> Life:
    """Read the life (one ``asyncrl train`` process) in the folder ``run_dir``.

    ``record`` has the values in the folder's ``life.json``.
    """
    options = read_options(run_dir, "checkpoint.directory", "total_steps")
    own = options["checkpoint"]["directory"]
    checkpoints = [] if own and not Path(own).is_dir() else _checkpoints(Path(own) if own else run_dir / "checkpoints")
    return Life(
        folder=run_dir,
        record=record,
        state=_state(run_dir, record),
        num_steps=_num_steps(run_dir),
        total_steps=options["total_steps"],
        checkpoints=checkpoints,
        num_bytes=_num_bytes([run_dir]),
    )


def _state(run_dir: Path, record: LifeRecord) -> LifeState:
    if record.status is not None:
        return record.end
    if record.host != socket.gethostname():
        return LifeState.elsewhere
    return LifeState.running if is_in_use(shared_folder(run_dir)) else LifeState.killed


def _checkpoints(directory: Path) -> list[SavedCheckpoint]:
    found = []
    for path, progress in saved_checkpoints(directory).items():
        parts = {part: part_of(path, part) for part in progress.parts}
        one = SavedCheckpoint(
            path=path,
            version=int(path.name[1:]),
            num_bytes=_num_bytes([path, *parts.values()]),
            missing=[part for part, folder in parts.items() if not folder.is_dir()],
        )
        if path.is_dir():  # skip a checkpoint that a running training has just removed
            found.append(one)
    return found


def _num_bytes(folders: Sequence[Path]) -> int:
    files = [state for folder in folders for _, state in files_below(folder)]
    return sum({(file.st_dev, file.st_ino): file.st_size for file in files}.values())


def _num_steps(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    whole, _, _ = (path.read_text(errors="replace") if path.is_file() else "").rpartition("\n")
    return json_object(whole.rpartition("\n")[2], f"the last line of {path}", "step")["step"] + 1 if whole else 0
