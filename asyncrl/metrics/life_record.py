"""Reads and writes the file ``life.json`` of an ``asyncrl train`` process, and reads its file ``config.yaml``.

Such a process is a *life* of a run. Each life has its own run folder, which contains both files. ``life.json`` says
when the life began and how it ended. ``config.yaml`` holds the options of the life.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import yaml

from asyncrl.core.host import files_below

from .run_records import read_json

_RECORD = "life.json"


class LifeState(StrEnum):
    """State of an ``asyncrl train`` process. It is ``killed`` after its supervisor was killed or its host crashed."""

    running = "running"
    finished = "finished"
    stopped = "stopped"
    failed = "failed"
    killed = "killed"
    elsewhere = "on another host"


_ENDS = {None: LifeState.killed, 0: LifeState.finished, 130: LifeState.stopped, 143: LifeState.stopped}
"""The state that each exit status stands for; None is a missing status. Every other status is a failure."""


@dataclass(frozen=True, kw_only=True)
class LifeRecord:
    """What ``life.json`` says about one ``asyncrl train`` process (a life of a run).

    Attributes:
        host: Name of the controller's host.
        began_s: Unix time of the start.
        resumed: Path of the checkpoint from which the process continued; empty for a new run.
        before: Run folder of the process that saved this checkpoint.
        ended_s: Unix time of the end; 0 while the process runs.
        status: Exit status; None while the process runs, and after its parent process was killed.
        policy: Folder of the initial policy; empty if the process continued from a checkpoint, and before the policy
            exists.
    """

    host: str
    began_s: float
    resumed: str = ""
    before: str = ""
    ended_s: float = 0.0
    status: int | None = None
    policy: str = ""

    @property
    def end(self) -> LifeState:
        """How this ``asyncrl train`` process ended. Valid only if the process no longer runs."""
        return _ENDS.get(self.status, LifeState.failed)

    @property
    def first_step(self) -> int:
        """Number of the first learner step of this process: the version of the resumed checkpoint, or 0."""
        return int(Path(self.resumed).name[1:]) if self.resumed else 0


def life_records(folder: Path) -> list[Path]:
    """Return the run folders in ``folder`` and below: all folders with a file ``life.json``, sorted."""
    return sorted(path.parent for path, _ in files_below(folder.resolve()) if path.name == _RECORD)


def write_life(run_dir: Path, record: LifeRecord) -> None:
    """Write ``record`` to the file ``life.json`` in a run folder, atomically."""
    (run_dir / f".{_RECORD}").write_text(json.dumps(asdict(record)))
    (run_dir / f".{_RECORD}").replace(run_dir / _RECORD)


def read_life(run_dir: Path) -> LifeRecord | None:
    """Return the content of ``life.json`` in a run folder; None if there is no such file.

    Raises `ValueError` if the file is damaged, or has a value that this version of asyncrl does not know.
    """
    values = read_json(run_dir / _RECORD, "began_s", "host")
    if values is None:
        return None
    if unknown := sorted(values.keys() - LifeRecord.__dataclass_fields__):
        raise ValueError(
            f"{run_dir / _RECORD} must hold only {', '.join(LifeRecord.__dataclass_fields__)}, got also "
            f"{', '.join(unknown)}; read the file with the version of asyncrl that wrote it"
        )
    return LifeRecord(**values)


def lives_until(run_dir: Path) -> Sequence[tuple[Path, LifeRecord]]:
    """Return (run folder, record) pairs of a run and of all runs that it continues, oldest first.

    A run continues the run whose checkpoint it resumed. The search ends at a folder without ``life.json``.
    """
    found: list[tuple[Path, LifeRecord]] = []
    folder: Path | None = run_dir.resolve()
    while folder is not None and (record := read_life(folder)) is not None:
        found.insert(0, (folder, record))
        folder = Path(record.before) if record.before else None
    return found


def read_options(run_dir: Path, *names: str) -> dict[str, Any]:
    """Return the options in the file ``config.yaml`` of a run folder, as nested dicts.

    ``names`` are the dotted names of options that the file must have. Example: ``buffer.max_lag``.

    Raises:
        ValueError: the file is missing or damaged, or lacks one of these options.
    """
    path = run_dir / "config.yaml"
    options: Any = None
    try:
        options = yaml.safe_load(path.read_text(errors="replace"))
        got = f"{options!r:.80}"
    except (OSError, yaml.YAMLError) as error:
        got = " ".join(str(error).split())
    with suppress(KeyError, TypeError):
        for name in names:
            reduce(getitem, name.split("."), options)
        return options
    raise ValueError(
        f"{path} must hold the options of the run as YAML, with {', '.join(names)}, got {got}; "
        "restore the file from a copy"
    )
