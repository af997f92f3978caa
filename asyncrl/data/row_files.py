"""Reads the rows of parquet and jsonl files. Errors name the file, the row and the column."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgpack
import pyarrow as pa
import pyarrow.parquet as pq

_INT_RANGE = (-(2**63), 2**64 - 1)
"""Smallest and largest integer that msgpack can encode. Rows are sent to the reward function as msgpack."""

_MAX_LEVELS = 100
_PLAIN = "strings, numbers (64 bits), booleans, bytes, or lists and dicts of them"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """The rows of one parquet or jsonl file.

    Attributes:
        path: Path of the file.
        unit: ``row`` for a parquet file, ``line`` for a jsonl file.
        numbers: Position of each entry of ``values`` in the file, for error messages. Rows count from 0, lines from 1.
        values: One mapping per row, from column names to values.
        digest: Hexadecimal digest of the file's bytes.
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
        """Return the file and the number of the row at ``index``, for an error message, as ``train.jsonl, line 3``."""
        return f"{self.path}, {self.unit} {self.numbers[index]}"

    def column(self, key: str) -> list[Any]:
        """Return the values of the column ``key``, one per row.

        The key ``outer.inner`` names the field ``inner`` of the column ``outer``.

        Raises:
            ValueError: a row does not have this column.
        """
        return [self._value(index, key) for index in range(len(self))]

    def serializable_column(self, key: str) -> list[Any]:
        """Return the same values as `column`, after a check that msgpack can encode them.

        Raises:
            ValueError: a value is missing or null, or msgpack cannot encode a value, such as a date.
        """
        values = self.column(key)
        if None in values:
            where = self.where(values.index(None))
            raise ValueError(f"{where}: column {key!r} is null, expected a value; add it, or remove the row")
        return self._serializable(key, values)

    def optional_column(self, key: str) -> list[Any]:
        """Return the same values as `serializable_column`, but with None for rows without a value."""
        return self._serializable(key, [self._value(index, key, is_optional=True) for index in range(len(self))])

    def _serializable(self, key: str, values: list[Any]) -> list[Any]:
        for index, value in enumerate(values):
            if value is not None and not _is_plain(value):
                raise ValueError(
                    f"{self.where(index)}: column {key!r} is {value!r} ({type(value).__name__}), expected {_PLAIN}; "
                    "convert it to a string"
                )
        return values

    def structures(self, key: str, *, is_json: bool = False) -> list[Any]:
        """Return the values of a column of lists and mappings, one per row. Checks that msgpack can encode all values.

        Parquet stores null for a missing field of a mapping. Therefore the method removes null fields from mappings of
        parquet files. If ``is_json``, the method decodes strings as JSON and keeps null fields in the decoded values.
        To save memory, rows with equal values share one object.

        Raises:
            ValueError: a value is missing or not JSON, or msgpack cannot encode it.
        """
        known: dict[bytes, Any] = {}
        values = []
        for index, value in enumerate(self.column(key)):
            where = f"{self.where(index)}: column {key!r}"
            if is_json and isinstance(value, str):
                try:
                    value = _parsed(value)
                except ValueError as error:
                    raise ValueError(f"{where} is {value!r:.60}, expected JSON ({error}); fix the row") from error
            elif self.unit == "row":
                value = _without_nulls(value)
            if not _is_plain(value):
                raise ValueError(f"{where} is {value!r:.60}, expected {_PLAIN}; convert it to a string")
            values.append(known.setdefault(msgpack.packb(value), value))  # type: ignore[arg-type]
        return values

    def _value(self, index: int, key: str, *, is_optional: bool = False) -> Any:
        row = self.values[index]
        if key in row:
            return row[key]
        value: Any = row
        for name in key.split("."):
            if not isinstance(value, Mapping) or name not in value:
                if is_optional:
                    return None
                found = sorted(value) if isinstance(value, Mapping) else f"a {type(value).__name__}"
                raise ValueError(
                    f"{self.where(index)}: no column {key!r}: {name!r} expected, found {found}; fix the row, "
                    f"or set another column in {self.section}.*_key"
                )
            value = value[name]
        return value


def read_rows(path: str, keys: Iterable[str], *, optional: Iterable[str] = (), section: str = "data") -> Rows:
    """Read all rows of a parquet or jsonl file into memory.

    From a parquet file, the function reads only the columns of ``keys`` and ``optional``.

    Args:
        path: Path with the suffix ``.parquet`` or ``.jsonl``; ``~`` is the home directory.
        keys: Required columns; dots separate the names of nested columns.
        optional: Further columns, which the file or some rows may lack.
        section: Section of the options that error messages name: ``data`` or ``sft``.

    Raises:
        ValueError: the file is missing, empty, damaged or of another type, or a parquet file lacks a column.
    """
    file = Path(path).expanduser()
    if (suffix := file.suffix.lower()) not in (".parquet", ".jsonl"):
        raise ValueError(f"{path}: file type {file.suffix or 'unknown'!r}, expected .parquet or .jsonl; convert it")
    if not file.is_file():
        got = "not a file" if file.exists() else "no such file"
        missing = "" if file.parent.exists() else f" (the directory {file.parent} does not exist)"
        raise ValueError(f"{path}: {got}, expected a parquet or jsonl file{missing}; check {section}.*_files")
    content = file.read_bytes()
    is_parquet = suffix == ".parquet"
    rows = _read_parquet(path, content, keys, optional, section) if is_parquet else _read_jsonl(path, content)
    if not len(rows):
        raise ValueError(f"{path}: the file has no rows, expected at least one; remove it from {section}.*_files")
    return replace(rows, section=section)


def _read_parquet(path: str, content: bytes, keys: Iterable[str], optional: Iterable[str], section: str) -> Rows:
    try:
        file = pq.ParquetFile(pa.BufferReader(content))
        names = file.schema_arrow.names
        required = [*keys]
        known = {key: {key, key.split(".")[0]}.intersection(names) for key in (*required, *optional)}
        if missing := [key for key in required if not known[key]]:
            found = f"no column {missing[0]!r}, found {sorted(names)}"
            raise ValueError(f"{path}: {found}; set another column in {section}.*_key")
        # Read without threads: Arrow's threads sometimes abort a process that exits soon after the read.
        values = file.read(columns=sorted(set().union(*known.values())), use_threads=False).to_pylist()
    except pa.ArrowException as error:
        raise ValueError(f"{path}: not a readable parquet file ({error}); write it again") from error
    return Rows(path=path, unit="row", numbers=range(len(values)), values=values, digest=_digest(content))


def _read_jsonl(path: str, content: bytes) -> Rows:
    numbers, values = [], []
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            value = _parsed(line)
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number}: not JSON ({error}), expected one object per line; fix or remove the line"
            ) from error
        if not isinstance(value, dict):
            raise ValueError(
                f"{path}, line {number}: a {type(value).__name__}, expected an object such as "
                '{"prompt": …}; write one object per line'
            )
        numbers.append(number)
        values.append(value)
    return Rows(path=path, unit="line", numbers=numbers, values=values, digest=_digest(content))


def _parsed(text: str | bytes) -> Any:
    """Parse JSON.

    Raises `ValueError` if the text is not JSON, or has more than ``_MAX_LEVELS`` levels of lists and objects. Half of a
    surrogate pair, which is not valid Unicode, also raises `ValueError`.
    """
    too_deep = f"it has more than {_MAX_LEVELS} levels of lists and objects"
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError(too_deep) from error
    if _is_deep(value):
        raise ValueError(too_deep)
    escape = b"\\u" if isinstance(text, bytes) else "\\u"
    if not text.isascii() or escape in text:  # type: ignore[operator]
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = str(error.object)[error.start]
            raise ValueError(f"{half!r} is half of a surrogate pair, and not valid Unicode") from error
    return value


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_MAX_LEVELS):
        parts = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, (dict, list))]
        level = [one for part in parts for one in part if isinstance(one, (dict, list))]
        if not level:
            return False
    return True


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


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
