"""What must survive the server: the ledger's last snapshot, the operations since, prompts and payloads, in SQLite.

WAL mode with ``synchronous = NORMAL``: a committed transaction survives the death of the process at any point; a power
failure may lose the last ones, and leaves the file consistent. An operation is written before it is applied, so that
nothing is acknowledged that is not stored.
"""

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack

from asyncrl.protocol.errors import ReplayBufferError

FORMAT = 2
_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS operations (number INTEGER PRIMARY KEY AUTOINCREMENT, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS frames (kind TEXT, group_id INTEGER, body BLOB NOT NULL, PRIMARY KEY (kind, group_id));
"""

Frames = Sequence[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovered:
    """What a journal holds when a server opens it.

    Attributes:
        snapshot: The ledger's last snapshot; None in a new journal.
        operations: Name and arguments of what was done since, in order.
        frames: Kind (``prompt``, ``payload``, ``progress``) to group id to frames.
    """

    snapshot: Mapping[str, Any] | None
    operations: Sequence[tuple[str, Sequence[Any]]]
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

    def recover(self) -> Recovered:
        """Everything the file holds."""
        rows = self._database.execute("SELECT body FROM operations ORDER BY number")
        operations = [tuple(msgpack.unpackb(body, strict_map_key=False)) for (body,) in rows]
        frames: dict[str, dict[int, Frames]] = {}
        for kind, group_id, body in self._database.execute("SELECT kind, group_id, body FROM frames"):
            frames.setdefault(kind, {})[group_id] = msgpack.unpackb(body)
        return Recovered(snapshot=self.read("snapshot"), operations=operations, frames=frames)

    def record(
        self, name: str, arguments: Sequence[Any], frames: Mapping[tuple[str, int], Frames] | None = None
    ) -> None:
        """Write one operation and the frames that belong to it, in one transaction.

        Raises:
            ReplayBufferError: the disk is full; nothing of it is written.
        """
        with self._transaction():
            for (kind, group_id), parts in (frames or {}).items():
                body = msgpack.packb([bytes(part) for part in parts])
                self._database.execute("INSERT OR REPLACE INTO frames VALUES (?, ?, ?)", [kind, group_id, body])
            self._database.execute("INSERT INTO operations (body) VALUES (?)", [msgpack.packb([name, arguments])])

    def compact(self, snapshot: Mapping[str, Any], *, forget: Iterable[int]) -> None:
        """Put a snapshot in the place of all operations, and drop the frames of finished groups.

        Raises:
            ReplayBufferError: the disk is full; the operations stand as they were.
        """
        with self._transaction():
            self._write("snapshot", snapshot)
            self._database.execute("DELETE FROM operations")
            self._database.executemany("DELETE FROM frames WHERE group_id = ?", [[group_id] for group_id in forget])

    def keep(self, kind: str, key: int, parts: Frames) -> None:
        """Write frames that belong to no operation.

        Raises:
            ReplayBufferError: the disk is full; nothing is written.
        """
        with self._transaction():
            body = msgpack.packb([bytes(part) for part in parts])
            self._database.execute("INSERT OR REPLACE INTO frames VALUES (?, ?, ?)", [kind, key, body])

    def discard(self, kind: str, key: int) -> None:
        """Drop frames."""
        with self._transaction():
            self._database.execute("DELETE FROM frames WHERE kind = ? AND group_id = ?", [kind, key])

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def _transaction(self) -> "_Transaction":
        return _Transaction(self._database, self._path)


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
