"""Exports the groups in a buffer's checkpoint to a folder of parquet files, and reads such a folder.

The folder holds the following files. The export does not round the values of arrays.

- ``groups.parquet``: one row per unfinished group, with its prompt.
- ``turns.parquet``: one row per turn of a trajectory, with its tokens, log-probs and policy versions.
- ``trajectories.parquet``: one row per trajectory, with its reward.
- ``images.parquet``: one row per image column of a group.
- ``drops.parquet``: how many tokens and groups were dropped, by reason. Dropped groups have no trajectories here.
- ``export.json``: the learner version and the options of the buffer.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from asyncrl.core.trajectory import FINISH_REASONS, TURN_DTYPE, TrajectoryGroup
from asyncrl.core.types import Prompt

from .checkpoint_parts import LEDGER_PART, store_part
from .encoding import group_of, prompt_frames, prompt_of
from .frames import Frames
from .groups import Group, GroupState
from .journal import read_contents
from .ledger import Ledger
from .rule import StalenessRule
from .store_servers import number_of

FORMAT = 2
_GROUPS_AT_ONCE = 64
_LEASE_COLUMNS = ("attempt", "engine_version", "deadline", "planned_for", "num_uses", "is_complete")
_SCOPES = ("token", "turn", "trajectory", "image")
_GROUPS = pa.schema(
    [
        ("group_id", pa.int64()),
        ("state", pa.string()),
        ("attempt", pa.int64()),
        ("engine_version", pa.int64()),
        ("deadline", pa.int64()),
        ("planned_for", pa.int64()),
        ("num_uses", pa.int64()),
        ("is_complete", pa.bool_()),
        ("num_trajectories", pa.int64()),
        ("num_tokens", pa.int64()),
        ("oldest_version", pa.int64()),
        ("newest_version", pa.int64()),
        ("data_source", pa.string()),
        ("ground_truth", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("prompt", pa.list_(pa.binary())),
        ("columns", pa.string()),
    ]
)
_IMAGES = pa.schema([("group_id", pa.int64()), ("name", pa.string()), ("data", pa.binary())])
_DROPS = pa.schema([("reason", pa.string()), ("num_tokens", pa.int64()), ("num_groups", pa.int64())])


@dataclass(frozen=True, kw_only=True)
class ExportedGroup:
    """One unfinished group of a buffer.

    Attributes:
        prompt: Prompt of the group.
        state: ``queued``, ``leased``, ``stored`` or ``planned``.
        attempt: Number of the current or latest attempt; -1 before the first attempt.
        engine_version: u, the policy version of the engine when the group was leased, or of the oldest continued token.
        deadline: u + max_lag, the last learner version that may consume the group.
        planned_for: Learner version whose batch holds the group; -1 if no batch holds the group.
        num_uses: Number of learner steps that trained on the group.
        is_complete: Whether ``trajectories`` are finished and scored. If not, ``trajectories`` has the saved tokens.
        trajectories: The trajectories; None if the group has no tokens yet.
    """

    prompt: Prompt
    state: GroupState
    attempt: int = -1
    engine_version: int = 0
    deadline: int = 0
    planned_for: int = -1
    num_uses: int = 0
    is_complete: bool = False
    trajectories: TrajectoryGroup | None = None


@dataclass(frozen=True, kw_only=True)
class BufferContents:
    """The contents of a buffer, read from a checkpoint or an export.

    Attributes:
        learner_version: The ledger's version when the checkpoint was written.
        groups: The unfinished groups, sorted by id.
        tokens_dropped: Number of dropped policy tokens by reason, since the start of the run.
        groups_dropped: Number of dropped groups by reason.
    """

    learner_version: int
    max_lag: int
    groups_per_step: int
    groups: Sequence[ExportedGroup] = ()
    tokens_dropped: Mapping[str, int]
    groups_dropped: Mapping[str, int]


def read_part(part: Path) -> BufferContents:
    """Read the buffer's contents from a checkpoint. The files stay unchanged.

    ``part`` is the folder of the buffer's files in the checkpoint.

    Raises:
        ReplayBufferError: A file cannot be read.
        ValueError: A file has another format.
    """
    contents = read_contents(part / LEDGER_PART)
    owner, recovered = contents.values["owner"], contents.recovered
    rule = StalenessRule(max_lag=owner["max_lag"], groups_per_step=owner["groups_per_step"])
    ledger = Ledger(rule, num_stores=owner["num_stores"])
    if recovered.snapshot is not None:
        ledger.restore(recovered.snapshot)
    for command, outcome in recovered.commands:
        ledger.enact(command, outcome)
    frames = recovered.frames
    payloads: dict[int, Frames] = dict(frames.get("payload", {}))
    stores = [
        read_contents(part / store_part(number)).recovered.frames.get("payload", {})
        for number in range(len(ledger.groups.space.stores) if owner["is_elsewhere"] else 0)
        if list(part.glob(f"{store_part(number)}.*.log"))
    ]
    groups = []
    for group in sorted(ledger.groups, key=lambda group: group.group_id):
        if group.summary is not None and owner["is_elsewhere"]:
            number = number_of((group.group_id, group.result.attempt))
            payloads.update((group.group_id, store[number]) for store in stores if number in store)
        groups.append(_exported(group, frames.get("prompt", {}), payloads, frames.get("progress", {})))
    return BufferContents(
        learner_version=ledger.learner_version,
        max_lag=rule.max_lag,
        groups_per_step=rule.groups_per_step,
        groups=groups,
        tokens_dropped=dict(ledger.account.tokens_dropped),
        groups_dropped=dict(ledger.account.groups_dropped),
    )


def _exported(
    group: Group, prompts: Mapping[int, Frames], payloads: Mapping[int, Frames], prefixes: Mapping[int, Frames]
) -> ExportedGroup:
    is_complete = group.summary is not None
    held = payloads if is_complete else prefixes if group.prefix_bytes else {}
    return ExportedGroup(
        prompt=prompt_of(prompts[group.group_id]),
        state=group.state,
        attempt=group.attempt,
        engine_version=group.engine_version,
        deadline=group.deadline,
        planned_for=group.planned_for,
        num_uses=len(group.uses),
        is_complete=is_complete and group.group_id in held,
        trajectories=group_of(held[group.group_id]) if group.group_id in held else None,
    )


# Writing


def write_export(contents: BufferContents, folder: Path) -> None:
    """Write ``contents`` to a new or empty folder, as parquet files.

    Raises:
        ValueError: The folder is not empty, or a column has different types in two groups.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ValueError(f"{folder} must be an empty folder for an export, but has files; name another folder")
    kinds = _column_types(contents.groups)
    turns = pa.schema(
        [
            *(("group_id", pa.int64()), ("turn", pa.int64()), ("trajectory", pa.int64()), ("parent", pa.int64())),
            *(("sampled", pa.bool_()), ("finish_reason", pa.string())),
            *((name, pa.list_(kind)) for name, kind in kinds["token"].items()),
            *((f"turn.{name}", pa.list_(kind)) for name, kind in kinds["turn"].items()),
        ]
    )
    trajectories = pa.schema(
        [
            *(("group_id", pa.int64()), ("trajectory", pa.int64())),
            *((name, pa.list_(kind)) for name, kind in kinds["trajectory"].items()),
        ]
    )
    writers = [
        pq.ParquetWriter(folder / f"{name}.parquet", schema)
        for name, schema in (("groups", _GROUPS), ("turns", turns), ("trajectories", trajectories), ("images", _IMAGES))
    ]
    try:
        for start in range(0, len(contents.groups), _GROUPS_AT_ONCE):
            some = contents.groups[start : start + _GROUPS_AT_ONCE]
            with_tokens = [group.trajectories for group in some if group.trajectories is not None]
            tables = (
                pa.Table.from_pylist([_group_row(group) for group in some], _GROUPS),
                _joined((_turn_table(group, turns) for group in with_tokens), turns),
                _joined((_trajectory_table(group, trajectories) for group in with_tokens), trajectories),
                pa.Table.from_pylist([row for group in with_tokens for row in _image_rows(group)], _IMAGES),
            )
            for writer, table in zip(writers, tables, strict=True):
                writer.write_table(table)
    finally:
        for writer in writers:
            writer.close()
    reasons = sorted({*contents.tokens_dropped, *contents.groups_dropped})
    tokens, groups = contents.tokens_dropped, contents.groups_dropped
    drops = [{"reason": name, "num_tokens": tokens.get(name, 0), "num_groups": groups.get(name, 0)} for name in reasons]
    pq.write_table(pa.Table.from_pylist(drops, _DROPS), folder / "drops.parquet")
    values = {name: getattr(contents, name) for name in ("learner_version", "max_lag", "groups_per_step")}
    (folder / "export.json").write_text(json.dumps({"format": FORMAT, **values}, indent=1) + "\n")


def _scopes(group: TrajectoryGroup) -> dict[str, Mapping[str, np.ndarray]]:
    columns = (group.token_columns, group.turn_columns, group.trajectory_columns, group.image_columns)
    return dict(zip(_SCOPES, columns, strict=True))


def _column_types(groups: Iterable[ExportedGroup]) -> dict[str, dict[str, pa.DataType]]:
    kinds: dict[str, dict[str, pa.DataType]] = {scope: {} for scope in _SCOPES}
    for group in groups:
        if group.trajectories is None:
            continue
        for scope, columns in _scopes(group.trajectories).items():
            for name, column in columns.items():
                kind = pa.from_numpy_dtype(_storable(column).dtype)
                if scope != "image" and (known := kinds[scope].setdefault(name, kind)) != kind:
                    raise ValueError(
                        f"the {scope} column {name!r} has the type {kind} in group {group.prompt.group_id}, but "
                        f"{known} in an earlier group; an export needs one type per column"
                    )
    return kinds


def _storable(column: np.ndarray) -> np.ndarray:
    """Return a flat array of a type that parquet supports. A complex number becomes two floats."""
    flat = np.ascontiguousarray(column).reshape(-1)
    return flat.view(f"f{flat.itemsize // 2}") if flat.dtype.kind == "c" else flat


def _lists(column: np.ndarray, lengths: np.ndarray) -> pa.Array:
    """Divide a column into lists. List i contains the next ``lengths[i]`` rows of the column."""
    flat = _storable(column)
    per_row = len(flat) // len(column) if len(column) else 1
    offsets = np.concatenate([[0], np.cumsum(lengths)]) * per_row
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(flat))


def _table(schema: pa.Schema, columns: Mapping[str, Any], num_rows: int) -> pa.Table:
    """Make a table with the columns of ``schema``. A column that is not in ``columns`` is null in every row."""
    arrays = [columns.get(name, pa.nulls(num_rows, schema.field(name).type)) for name in schema.names]
    return pa.Table.from_arrays(arrays, schema=schema)


def _joined(tables: Iterable[pa.Table], schema: pa.Schema) -> pa.Table:
    return pa.concat_tables([schema.empty_table(), *tables]).combine_chunks()


def _turn_table(group: TrajectoryGroup, schema: pa.Schema) -> pa.Table:
    turns, ones = group.turns, np.ones(len(group.turns), dtype=np.int64)
    reasons = [str(FINISH_REASONS[reason]) if reason >= 0 else None for reason in turns["finish_reason"].tolist()]
    columns: dict[str, Any] = {
        "group_id": pa.array(ones * group.group_id),
        "turn": pa.array(np.arange(len(turns))),
        "trajectory": pa.array(turns["trajectory"].astype(np.int64)),
        "parent": pa.array(turns["parent"].astype(np.int64)),
        "sampled": pa.array(turns["sampled"].astype(bool)),
        "finish_reason": pa.array(reasons, pa.string()),
    }
    columns |= {name: _lists(column, turns["num_tokens"]) for name, column in group.token_columns.items()}
    columns |= {f"turn.{name}": _lists(column, ones) for name, column in group.turn_columns.items()}
    return _table(schema, columns, len(turns))


def _trajectory_table(group: TrajectoryGroup, schema: pa.Schema) -> pa.Table:
    number = len(group.trajectory_columns["rewards"])
    ones = np.ones(number, dtype=np.int64)
    columns: dict[str, Any] = {"group_id": pa.array(ones * group.group_id), "trajectory": pa.array(np.arange(number))}
    columns |= {name: _lists(column, ones) for name, column in group.trajectory_columns.items()}
    return _table(schema, columns, number)


def _image_rows(group: TrajectoryGroup) -> list[dict[str, Any]]:
    columns = group.image_columns.items()
    return [{"group_id": group.group_id, "name": name, "data": column.tobytes()} for name, column in columns]


def _group_row(group: ExportedGroup) -> dict[str, Any]:
    prompt, held = group.prompt, group.trajectories
    truth = prompt.ground_truth
    row = {
        "group_id": prompt.group_id,
        "state": str(group.state),
        "data_source": prompt.data_source,
        # Write the ground truth as readable text. The column ``prompt`` has the exact ground truth.
        "ground_truth": truth if truth is None or isinstance(truth, str) else json.dumps(truth, default=repr),
        "prompt_ids": prompt.prompt_ids.tolist(),
        "prompt": [bytes(frame) for frame in prompt_frames(prompt)],
        **{name: getattr(group, name) for name in _LEASE_COLUMNS},
    }
    if held is None:
        return row
    versions = held.token_columns["versions"]
    sampled = versions[versions >= 0]
    described = {
        scope: [(name, column.dtype.str, column.shape[scope != "image" :]) for name, column in columns.items()]
        for scope, columns in _scopes(held).items()
    }
    return row | {
        "num_trajectories": held.num_trajectories,
        "num_tokens": len(sampled),
        "oldest_version": int(sampled.min()) if len(sampled) else None,
        "newest_version": int(sampled.max()) if len(sampled) else None,
        "columns": json.dumps({"attempt": held.attempt, **described}),
    }


# Reading


def read_export(folder: Path) -> BufferContents:
    """Read the contents of a buffer from a folder that `write_export` wrote, and return the contents.

    The user may have removed rows from ``groups.parquet``. The groups of these rows are left out.

    Raises:
        ValueError: ``folder`` does not hold an export of this format, or rows of a group are missing.
    """
    try:
        values = json.loads((folder / "export.json").read_text())
        tables = {
            name: pq.read_table(folder / f"{name}.parquet")
            for name in ("groups", "turns", "trajectories", "images", "drops")
        }
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} is not a folder of 'asyncrl buffer export': {error}") from error
    if values.pop("format") != FORMAT:
        raise ValueError(f"the export in {folder} does not have the format {FORMAT}; export again with this release")
    rows_of = {name: _row_ranges(tables[name]) for name in ("turns", "trajectories", "images")}
    groups = []
    for row in tables["groups"].to_pylist():
        prompt = prompt_of(row["prompt"])
        parts = {name: tables[name].slice(*ranges.get(prompt.group_id, (0, 0))) for name, ranges in rows_of.items()}
        groups.append(
            ExportedGroup(
                prompt=prompt,
                state=GroupState(row["state"]),
                trajectories=None if row["columns"] is None else _trajectories(row, parts, folder),
                **{name: row[name] for name in _LEASE_COLUMNS},
            )
        )
    drops = tables["drops"].to_pylist()
    dropped = {
        name: {row["reason"]: row[f"num_{name}"] for row in drops if row[f"num_{name}"]}
        for name in ("tokens", "groups")
    }
    return BufferContents(**values, groups=groups, tokens_dropped=dropped["tokens"], groups_dropped=dropped["groups"])


def _row_ranges(table: pa.Table) -> dict[int, tuple[int, int]]:
    """Map each group id to a pair: the group's first row, and the group's number of rows. These rows are adjacent."""
    ids = table["group_id"].to_numpy()
    starts = np.flatnonzero(np.diff(ids, prepend=-1))
    lengths = np.diff([*starts, len(ids)])
    return {int(ids[start]): (int(start), int(length)) for start, length in zip(starts, lengths, strict=True)}


def _trajectories(row: Mapping[str, Any], parts: Mapping[str, pa.Table], folder: Path) -> TrajectoryGroup:
    described, turn_rows = json.loads(row["columns"]), parts["turns"]
    turns = np.zeros(turn_rows.num_rows, dtype=TURN_DTYPE)
    reasons = {str(reason): index for index, reason in enumerate(FINISH_REASONS)}
    turns["trajectory"], turns["parent"] = turn_rows["trajectory"].to_numpy(), turn_rows["parent"].to_numpy()
    turns["sampled"] = turn_rows["sampled"].to_numpy()
    turns["num_tokens"] = turn_rows["token_ids"].combine_chunks().value_lengths().to_numpy()
    turns["finish_reason"] = [reasons.get(reason, -1) for reason in turn_rows["finish_reason"].to_pylist()]
    images = {image["name"]: image["data"] for image in parts["images"].to_pylist()}

    def columns(scope: str, table: pa.Table, prefix: str = "") -> dict[str, np.ndarray]:
        return {
            name: _values(table[prefix + name]).view(dtype).reshape(-1, *shape)
            for name, dtype, shape in described[scope]
        }

    try:
        group = TrajectoryGroup(
            group_id=row["group_id"],
            attempt=described["attempt"],
            turns=turns,
            token_columns=columns("token", turn_rows),
            turn_columns=columns("turn", turn_rows, "turn."),
            trajectory_columns=columns("trajectory", parts["trajectories"]),
            image_columns={
                name: np.frombuffer(images[name], dtype).reshape(shape) for name, dtype, shape in described["image"]
            },
        )
        group.check()
    except (KeyError, ValueError) as error:
        raise ValueError(f"{folder}: the rows of group {row['group_id']} are inconsistent: {error}") from error
    return group


def _values(lists: pa.ChunkedArray) -> np.ndarray:
    return lists.combine_chunks().flatten().to_numpy(zero_copy_only=False)


def export_part(part: Path, folder: Path) -> BufferContents:
    """Read the buffer's contents from a checkpoint, and write them to parquet files in ``folder``. Return the contents.

    ``part`` is the folder of the buffer's files in the checkpoint. Raises the errors of `read_part` and `write_export`.
    """
    contents = read_part(part)
    write_export(contents, folder)
    return contents
