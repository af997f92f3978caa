"""The lives of runs on disk. A life is one process of ``asyncrl train`` in its folder; a resumed run has several.

Each folder has the record of its life, ``life.json``: the checkpoint that it continues, and how it ended. So a folder
of results tells which lives belong to one run. Loads neither Ray nor torch.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml

from asyncrl.run.run_folder import is_in_use, shared_folder
from learner.checkpoint_folder import missing_parts, named_checkpoints, part_of, read_progress

_RECORD = "life.json"


class LifeState(StrEnum):
    """The state of a life. A killed one did not end by itself: its supervisor was killed, or its host went down."""

    running = "running"
    finished = "finished"
    stopped = "stopped"
    failed = "failed"
    killed = "killed"
    elsewhere = "on another host"


_ENDS = {0: LifeState.finished, 130: LifeState.stopped, 143: LifeState.stopped}
"""States by exit status; every other status is a failure."""


@dataclass(frozen=True, kw_only=True)
class LifeRecord:
    """The record of a life.

    Attributes:
        host: Name of the host of its controller.
        began_s: Unix time of its start.
        resumed: The checkpoint that it continues; empty for a new run.
        ended_s: Unix time of its end; 0 before.
        status: Its exit status; None before its end, and if its supervisor was killed.
    """

    host: str
    began_s: float
    resumed: str = ""
    ended_s: float = 0.0
    status: int | None = None


@dataclass(frozen=True, kw_only=True)
class SavedCheckpoint:
    """A checkpoint on disk.

    Attributes:
        path: Its folder.
        version: Its policy version.
        num_bytes: Bytes of all its parts; a file with several links counts once.
        missing: Its parts that are not complete. A run does not resume from it then.
    """

    path: Path
    version: int
    num_bytes: int
    missing: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Life:
    """A life as its folder shows it.

    Attributes:
        folder: Its folder.
        record: Its record.
        state: Its state.
        num_steps: Learner steps of the run at the newest step of this life.
        total_steps: ``total_steps`` of its configuration.
        checkpoints: Its checkpoints on disk, oldest first.
        num_bytes: Bytes in its folder, checkpoints included; a file with several links counts once.
    """

    folder: Path
    record: LifeRecord
    state: LifeState
    num_steps: int
    total_steps: int
    checkpoints: Sequence[SavedCheckpoint]
    num_bytes: int


def begin_life(run_dir: Path, resumed: Path | None) -> None:
    """Write the record of a life that begins."""
    record = LifeRecord(
        host=socket.gethostname(), began_s=time.time(), resumed=str(resumed.resolve()) if resumed else ""
    )
    _write(run_dir, record)


def end_life(run_dir: Path, status: int) -> None:
    """Note the exit status of a life in its record; without effect if the life ended before it had a record."""
    if (record := _read(run_dir)) is not None:
        _write(run_dir, replace(record, ended_s=time.time(), status=status))


def _write(run_dir: Path, record: LifeRecord) -> None:
    (run_dir / f".{_RECORD}").write_text(json.dumps(asdict(record)))
    (run_dir / f".{_RECORD}").replace(run_dir / _RECORD)


def _read(run_dir: Path) -> LifeRecord | None:
    path = run_dir / _RECORD
    return LifeRecord(**json.loads(path.read_text())) if path.is_file() else None


def find_runs(folder: Path) -> list[list[Life]]:
    """The runs below a folder; each is a list of its lives, oldest first. The run that began last is the last.

    A life that continues a checkpoint of an earlier life belongs to its run. If two lives continue the same life, both
    belong to the run.
    """
    lives = {found.folder: found for found in sorted(_lives(folder), key=lambda life: life.record.began_s)}
    runs: dict[Path, list[Life]] = {}
    by_checkpoint = {str(one.path): life.folder for life in lives.values() for one in life.checkpoints}
    for path, life in lives.items():
        resumed = life.record.resumed
        before = by_checkpoint.get(resumed) or next((p for p in lives if resumed.startswith(f"{p}{os.sep}")), path)
        run = runs.get(before, [])
        runs[path] = run
        run.append(life)
    unique = {id(run): run for run in runs.values()}.values()
    return sorted(unique, key=lambda run: run[0].record.began_s)


def _lives(folder: Path) -> Iterator[Life]:
    for path in sorted(folder.resolve().glob("**/" + _RECORD)):
        if (record := _read(path.parent)) is not None:
            yield _life(path.parent, record)


def _life(run_dir: Path, record: LifeRecord) -> Life:
    options: Mapping[str, Any] = yaml.safe_load((run_dir / "config.yaml").read_text())
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
        return _ENDS.get(record.status, LifeState.failed)
    if record.host != socket.gethostname():
        return LifeState.elsewhere
    return LifeState.running if is_in_use(shared_folder(run_dir)) else LifeState.killed


def _checkpoints(directory: Path) -> list[SavedCheckpoint]:
    return [
        SavedCheckpoint(
            path=path,
            version=int(path.name[1:]),
            num_bytes=_num_bytes([path, *(part_of(path, part) for part in read_progress(path).parts)]),
            missing=missing_parts(path),
        )
        for path in named_checkpoints(directory)
    ]


def _num_bytes(folders: Sequence[Path]) -> int:
    files = [file.lstat() for folder in folders for file in folder.glob("**/*") if file.is_file()]
    return sum({(file.st_dev, file.st_ino): file.st_size for file in files}.values())


def _num_steps(run_dir: Path) -> int:
    """The newest step in ``metrics.jsonl``, plus one. The last line may be incomplete."""
    path = run_dir / "metrics.jsonl"
    whole, _, _ = (path.read_text() if path.is_file() else "").rpartition("\n")
    return json.loads(whole.rpartition("\n")[2])["step"] + 1 if whole else 0
