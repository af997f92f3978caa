"""What must survive the server: the ledger's last snapshot, the commands since with their outcomes, and frames.

An SQLite file in WAL mode with ``synchronous = NORMAL``: a committed transaction survives the death of the process at
any point; a power failure may lose the last ones, and leaves the file consistent. A command is written before it takes
effect, so that nothing is acknowledged that is not stored.
"""

import logging
import sqlite3
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from inspect import isclass
from pathlib import Path
from typing import Any

import msgpack

from asyncrl.protocol.errors import ReplayBufferError
from asyncrl.protocol.types import GroupSummary

from . import commands
from .commands import Command, Frames, Outcome, PutOutcome, PutResult
from .groups import record_from, values_of

logger = logging.getLogger(__name__)

_CHECKPOINT_BYTES = 64 * 1024**2
FORMAT = 3
_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS commands (number INTEGER PRIMARY KEY AUTOINCREMENT, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS frames (kind TEXT, group_id INTEGER, body BLOB NOT NULL, PRIMARY KEY (kind, group_id));
"""

_EXT_RECORD = 1
_RECORDS = {
    name: kind for name, kind in vars(commands).items() if isclass(kind) and hasattr(kind, "__dataclass_fields__")
}
_RECORDS["GroupSummary"] = GroupSummary


def pack(value: Any) -> Any:
    """Plain values and the records of `buffer.commands` as bytes."""
    return msgpack.packb(value, default=_to_ext)


def _to_ext(record: Any) -> msgpack.ExtType:
    return msgpack.ExtType(_EXT_RECORD, pack([type(record).__name__, *values_of(record)]))


def unpack(data: bytes) -> Any:
    """What `pack` was given; lists come back as tuples."""
    return msgpack.unpackb(data, strict_map_key=False, use_list=False, ext_hook=_from_ext)


def _from_ext(code: int, data: bytes) -> Any:
    name, *values = unpack(data)
    kind = _RECORDS[name]
    if kind is PutOutcome:
        values[0] = PutResult(values[0])
    return record_from(kind, values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovered:
    """What a journal holds when a server opens it.

    Attributes:
        snapshot: The ledger's last snapshot; None in a new journal.
        commands: What was done since, in order, with its outcome.
        frames: Kind (``prompt``, ``payload``, ``progress``) to group id to frames.
    """

    snapshot: Mapping[str, Any] | None
    commands: Sequence[tuple[Command[Any], Outcome]]
    frames: Mapping[str, Mapping[int, Frames]] = field(default_factory=dict)


class Journal:
    """An SQLite file.

    Args:
        path: The file; made if missing.
        max_bytes: Largest size of the file; 0 leaves it to the disk.

    Raises:
        ReplayBufferError: the file cannot be opened, or is none of SQLite's.
        ValueError: it was written by another format of the journal.
    """

    def __init__(self, path: Path, *, max_bytes: int = 0) -> None:
        self._path = path
        self._unmoved_bytes = 0
        self._checkpoint: threading.Thread | None = None
        try:
            self._database = self._open(max_bytes)
        except sqlite3.Error as error:
            raise ReplayBufferError(
                f"{path} cannot be opened: {error}; look at the disk and its permissions"
            ) from error
        found = self.read("format")
        if found is None:
            self.write("format", FORMAT)
        elif found != FORMAT:
            raise ValueError(f"{path} is a journal of format {found}, expected {FORMAT}; use the release that wrote it")

    def _open(self, max_bytes: int) -> sqlite3.Connection:
        database = sqlite3.connect(self._path, isolation_level=None)
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        database.execute("PRAGMA wal_autocheckpoint = 0")  # done on a thread, because it waits for the disk
        if max_bytes:
            page_bytes = database.execute("PRAGMA page_size").fetchone()[0]
            database.execute(f"PRAGMA max_page_count = {max(1, max_bytes // page_bytes)}")
        database.executescript(_SCHEMA)
        return database

    def read(self, name: str) -> Any:
        """A remembered value, or None."""
        row = self._database.execute("SELECT value FROM meta WHERE name = ?", [name]).fetchone()
        return None if row is None else msgpack.unpackb(row[0], strict_map_key=False)

    def write(self, name: str, value: Any) -> None:
        """Remember a value.

        Raises:
            ReplayBufferError: the disk is full.
        """
        with self._transaction():
            self._write(name, value)

    def _write(self, name: str, value: Any) -> None:
        self._database.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", [name, msgpack.packb(value)])

    def claim(self, owner: Mapping[str, Any]) -> None:
        """Write down in a new journal whose it is; refuse one of another run or of other options.

        Args:
            owner: Name to plain value. Example: ``{"run": "4f1c", "max_lag": 2}``.

        Raises:
            ValueError: the journal has another value; the message names it.
        """
        found = self.read("owner")
        if found is None:
            self.write("owner", dict(owner))
            return
        for name, expected in owner.items():
            if found.get(name) != expected:
                raise ValueError(
                    f"{self._path} was written with {name}={found.get(name)!r}, this server has {expected!r}; start it "
                    "with what the journal was written under, or give a new run another buffer.directory"
                )

    def recover(self) -> Recovered:
        """Everything the file holds."""
        rows = self._database.execute("SELECT body FROM commands ORDER BY number")
        done = [unpack(body) for (body,) in rows]
        frames: dict[str, dict[int, Frames]] = {}
        for kind, group_id, body in self._database.execute("SELECT kind, group_id, body FROM frames"):
            frames.setdefault(kind, {})[group_id] = msgpack.unpackb(body)
        return Recovered(snapshot=self.read("snapshot"), commands=done, frames=frames)

    def record(self, command: Command[Any], outcome: Outcome, frames: Mapping[tuple[str, int], Frames]) -> None:
        """Write one command, its outcome and the frames that belong to it, in one transaction.

        Raises:
            ReplayBufferError: the disk is full; nothing of it is written.
        """
        with self._transaction():
            for (kind, group_id), parts in frames.items():
                self._keep(kind, group_id, parts)
            self._database.execute("INSERT INTO commands (body) VALUES (?)", [pack((command, outcome))])

    def compact(self, snapshot: Mapping[str, Any], *, forget: Iterable[int]) -> None:
        """Put a snapshot in the place of all commands, and drop the frames of finished groups.

        Raises:
            ReplayBufferError: the disk is full; the commands stand as they were.
        """
        with self._transaction():
            self._write("snapshot", snapshot)
            self._database.execute("DELETE FROM commands")
            self._database.executemany("DELETE FROM frames WHERE group_id = ?", [[group_id] for group_id in forget])

    def keep(self, kind: str, key: int, parts: Frames) -> None:
        """Write frames that belong to no command.

        Raises:
            ReplayBufferError: the disk is full; nothing is written.
        """
        with self._transaction():
            self._keep(kind, key, parts)

    def _keep(self, kind: str, key: int, parts: Frames) -> None:
        body: Any = msgpack.packb([bytes(part) for part in parts])
        self._database.execute("INSERT OR REPLACE INTO frames VALUES (?, ?, ?)", [kind, key, body])
        self._checkpoint_if_due(len(body))

    def discard(self, kind: str, key: int) -> None:
        """Drop frames."""
        with self._transaction():
            self._database.execute("DELETE FROM frames WHERE kind = ? AND group_id = ?", [kind, key])

    def _checkpoint_if_due(self, num_bytes: int) -> None:
        """Have what was written since the last checkpoint moved into the database, off the loop."""
        self._unmoved_bytes += num_bytes
        if self._unmoved_bytes < _CHECKPOINT_BYTES or (self._checkpoint is not None and self._checkpoint.is_alive()):
            return
        self._unmoved_bytes = 0
        self._checkpoint = threading.Thread(target=_checkpoint, args=[self._path], name="checkpoint", daemon=True)
        self._checkpoint.start()

    def close(self) -> None:
        """Close the file."""
        if self._checkpoint is not None:
            self._checkpoint.join()
        self._database.close()

    def _transaction(self) -> "_Transaction":
        return _Transaction(self._database, self._path)


def _checkpoint(path: Path) -> None:
    """Move committed pages into the database file; the writer goes on meanwhile."""
    try:
        with closing(sqlite3.connect(path)) as database:
            database.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
    except sqlite3.Error as error:
        logger.warning("%s: a checkpoint failed (%s); the next one moves its pages", path, error)


class _Transaction:
    """BEGIN … COMMIT, undone as a whole where SQLite cannot write."""

    def __init__(self, database: sqlite3.Connection, path: Path) -> None:
        self._database = database
        self._path = path

    def __enter__(self) -> None:
        try:
            self._database.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as failed:
            raise self._error(failed) from failed

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        try:
            if error is None:
                self._database.execute("COMMIT")
        except sqlite3.OperationalError as failed:
            error = failed
        if error is None:
            return
        if self._database.in_transaction:
            self._database.execute("ROLLBACK")
        if isinstance(error, sqlite3.OperationalError):
            raise self._error(error) from error

    def _error(self, failed: sqlite3.OperationalError) -> ReplayBufferError:
        return ReplayBufferError(f"{self._path} cannot be written: {failed}; nothing was stored")
