"""Rows of a parquet or jsonl file. Every error names the file, the row and the column."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

_INT_RANGE = (-(2**63), 2**64 - 1)
"""Integers that msgpack can carry to the reward function."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """The rows of one file.

    Attributes:
        path: The file, as the user wrote it.
        unit: ``row`` of a parquet file (counted from 0) or ``line`` of a jsonl file (counted from 1, as editors do).
        numbers: Row or line number of each entry of ``values``.
        values: One mapping from column name to value per row.
        digest: Hexadecimal digest of the file's bytes.
        section: Section of the options that name the file and its columns, for messages.
    """

    path: str
    unit: str
    numbers: Sequence[int]
    values: Sequence[Mapping[str, Any]]
    digest: str
    section: str = "data"

    def __len__(self) -> int:
        return len(self.values)

    def where(self, index: int) -> str:
        """Name a row for a message. Example: ``train.jsonl, line 3``."""
        return f"{self.path}, {self.unit} {self.numbers[index]}"

    def column(self, key: str) -> list[Any]:
        """The values under ``key``: a column of that name, else a path of names joined by dots.

        Raises:
            ValueError: a row has no such value.
        """
        return [self._value(index, key) for index in range(len(self))]

    def serializable_column(self, key: str) -> list[Any]:
        """The values under ``key``, all of which the wire can carry and none of which is null.

        Raises:
            ValueError: a value is missing, null, or of a type that msgpack has no form for (a date, a decimal).
        """
        values = self.column(key)
        for index, value in enumerate(values):
            if value is None:
                raise ValueError(
                    f"{self.where(index)}: column {key!r} is null, expected a value; fill it in, or drop the row"
                )
            if not _is_plain(value):
                raise ValueError(
                    f"{self.where(index)}: column {key!r} is {value!r} ({type(value).__name__}), expected strings, "
                    "numbers (64 bits), booleans, bytes, or lists and dicts of them; write it as a string"
                )
        return values

    def _value(self, index: int, key: str) -> Any:
        row = self.values[index]
        if key in row:
            return row[key]
        value: Any = row
        for name in key.split("."):
            if not isinstance(value, Mapping) or name not in value:
                found = sorted(value) if isinstance(value, Mapping) else f"a {type(value).__name__}"
                raise ValueError(
                    f"{self.where(index)}: no column {key!r}: {name!r} expected, found {found}; mend the row, "
                    f"or name another column in {self.section}.*_key"
                )
            value = value[name]
        return value


def read_rows(path: str, keys: Iterable[str], *, section: str = "data") -> Rows:
    """Read a file; of a parquet file only the columns that ``keys`` name.

    Args:
        path: Ends in ``.parquet`` or ``.jsonl``; ``~`` is the home directory.
        keys: Columns that will be asked for, dots reaching into nested ones.
        section: Section of the options that name the file and its columns, for messages.

    Raises:
        ValueError: the file is missing, empty, of another kind or broken, or lacks a column.
    """
    file = Path(path).expanduser()
    readers = {".parquet": _read_parquet, ".jsonl": _read_jsonl}
    reader = readers.get(file.suffix.lower())
    if reader is None:
        raise ValueError(f"{path}: file type {file.suffix or 'unknown'!r}, expected .parquet or .jsonl; convert it")
    if not file.is_file():
        raise ValueError(f"{path}: {_absence(file)}; check {section}.*_files")
    rows = replace(reader(path, file.read_bytes(), keys, section), section=section)
    if not len(rows):
        raise ValueError(f"{path}: the file holds no rows, expected at least one; remove it from {section}.*_files")
    return rows


def _absence(file: Path) -> str:
    if file.exists():
        return "not a file, expected a parquet or jsonl file"
    if file.parent.exists():
        return "no such file, expected a parquet or jsonl file"
    return f"no such file: not even the directory {file.parent} exists"


def _read_parquet(path: str, content: bytes, keys: Iterable[str], section: str) -> Rows:
    try:
        file = pq.ParquetFile(pa.BufferReader(content))
        names = file.schema_arrow.names
        columns = [_parquet_column(path, key, names, section) for key in keys]
        # Arrow's threads, where it starts any, now and then abort a process that ends soon after.
        values = file.read(columns=sorted(set(columns)), use_threads=False).to_pylist()
    except pa.ArrowException as error:
        raise ValueError(f"{path}: not a readable parquet file ({error}); write it again") from error
    return Rows(path=path, unit="row", numbers=range(len(values)), values=values, digest=_digest(content))


def _parquet_column(path: str, key: str, names: Sequence[str], section: str) -> str:
    for name in (key, key.split(".")[0]):
        if name in names:
            return name
    raise ValueError(f"{path}: no column {key!r}, found {sorted(names)}; name another one in {section}.*_key")


def _read_jsonl(path: str, content: bytes, keys: Iterable[str], section: str) -> Rows:
    del keys, section  # a line is read whole; a missing key is found row by row
    numbers, values = [], []
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number}: not JSON ({error}), expected one object per line; mend or drop the line"
            ) from error
        if not isinstance(value, dict):
            raise ValueError(
                f"{path}, line {number}: a {type(value).__name__}, expected an object such as "
                '{"prompt": …}; one object per line'
            )
        numbers.append(number)
        values.append(value)
    return Rows(path=path, unit="line", numbers=numbers, values=values, digest=_digest(content))


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(_is_plain(item) for item in value)
    if isinstance(value, int):
        return _INT_RANGE[0] <= value <= _INT_RANGE[1]
    return value is None or isinstance(value, str | float | bytes)
