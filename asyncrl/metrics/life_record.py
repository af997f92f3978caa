"""The file ``life.json`` of a life of a run. A life is one ``asyncrl train`` process, with its own run folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

_RECORD = "life.json"


class LifeState(StrEnum):
    """The state of a life. ``killed`` means that the life's supervisor was killed, or that its host crashed."""

    running = "running"
    finished = "finished"
    stopped = "stopped"
    failed = "failed"
    killed = "killed"
    elsewhere = "on another host"


_ENDS = {None: LifeState.killed, 0: LifeState.finished, 130: LifeState.stopped, 143: LifeState.stopped}
"""States of ended lives, by exit status. Every other status is a failure."""


@dataclass(frozen=True, kw_only=True)
class LifeRecord:
    """The record of a life.

    Attributes:
        host: Name of the controller's host.
        began_s: Unix time of the start.
        resumed: The checkpoint that the life continues; empty for a new run.
        before: Folder of the life that saved this checkpoint.
        ended_s: Unix time of the end; 0 while the life runs.
        status: Exit status; None while the life runs, and after its supervisor was killed.
    """

    host: str
    began_s: float
    resumed: str = ""
    before: str = ""
    ended_s: float = 0.0
    status: int | None = None

    @property
    def end(self) -> LifeState:
        """How the life ended. Valid only if the life no longer runs."""
        return _ENDS.get(self.status, LifeState.failed)

    @property
    def first_step(self) -> int:
        """The first learner step of the life: the version of the resumed checkpoint, or 0."""
        return int(Path(self.resumed).name[1:]) if self.resumed else 0


def life_records(folder: Path) -> list[Path]:
    """Return the folders below ``folder`` that have the record of a life."""
    return [path.parent for path in sorted(folder.resolve().glob("**/" + _RECORD))]


def write_life(run_dir: Path, record: LifeRecord) -> None:
    """Write the record of a life."""
    (run_dir / f".{_RECORD}").write_text(json.dumps(asdict(record)))
    (run_dir / f".{_RECORD}").replace(run_dir / _RECORD)


def read_life(run_dir: Path) -> LifeRecord | None:
    """Read the record of a life; None if the folder has none."""
    path = run_dir / _RECORD
    return LifeRecord(**json.loads(path.read_text())) if path.is_file() else None


def lives_until(run_dir: Path) -> Sequence[tuple[Path, LifeRecord]]:
    """Return the life in a folder and all lives before it, oldest first. The search ends at a missing folder."""
    found: list[tuple[Path, LifeRecord]] = []
    folder: Path | None = run_dir.resolve()
    while folder is not None and (record := read_life(folder)) is not None:
        found.insert(0, (folder, record))
        folder = Path(record.before) if record.before else None
    return found
