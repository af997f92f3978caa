"""Exported groups have the same bits as the groups in the buffer, for every kind of checkpoint."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.core.errors import ReplayBufferError
from asyncrl.core.trajectory import ROOT, SHARED, TURN_DTYPE, TrajectoryGroup
from buffer.exports import BufferContents, ExportedGroup, export_part, read_export, read_part, write_export
from buffer.groups import GroupState
from tests.buffer.test_checkpoints import KINDS, first_life, options_of
from tests.buffer.test_encoding import grouped
from tests.support.buffer_groups import chat_prompt, prompt, running

SCOPES = ("token_columns", "turn_columns", "trajectory_columns", "image_columns")
DTYPES = ("?", "i1", "u2", "i4", "u8", "f2", "f4", "f8", "c8", "c16")


def column(rng: np.random.Generator, dtype: str, *shape: int) -> np.ndarray:
    """Return values with random bits, including NaN with any mantissa, -0.0 and infinities."""
    if dtype == "?":
        return rng.integers(0, 2, shape).astype(bool)
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(rng.bytes(size), dtype).reshape(shape)


def group_of_seed(seed: int, group_id: int) -> TrajectoryGroup:
    """Return a group of random trees with random columns. The seed decides which columns the group has."""
    rng = np.random.default_rng([seed, group_id])
    rows = [(SHARED, ROOT, int(rng.integers(0, 4)), 0, -1)]
    num_trajectories = int(rng.integers(1, 4))
    for trajectory in range(num_trajectories):
        first = len(rows)
        rows.append((trajectory, 0, int(rng.integers(1, 5)), 1, 0))  # every group has a sampled token
        for _ in range(rng.integers(0, 3)):
            parent = int(rng.choice([0, *range(first, len(rows))]))
            sampled = int(rng.integers(0, 2))
            rows.append((trajectory, parent, int(rng.integers(0, 5)), sampled, int(rng.integers(-1, 3))))
    turns = np.array(rows, dtype=TURN_DTYPE)
    num_tokens = int(turns["num_tokens"].sum())
    tokens = {
        "token_ids": column(rng, "i4", num_tokens),
        "logprobs": column(rng, "f4", num_tokens),
        "versions": column(rng, "i4", num_tokens),
    }
    columns: tuple[dict[str, np.ndarray], ...] = (tokens, {}, {"rewards": column(rng, "f4", num_trajectories)}, {})
    for scope, length in zip(columns, (num_tokens, len(turns), num_trajectories), strict=False):
        for dtype in DTYPES:
            if rng.random() < 0.3:
                scope[f"own {dtype}"] = column(rng, dtype, length, *rng.integers(1, 4, rng.integers(0, 3)).tolist())
    token, turn, trajectory, image = columns
    group = TrajectoryGroup(
        group_id=group_id,
        attempt=int(rng.integers(0, 9)),
        turns=turns,
        token_columns=token,
        turn_columns=turn,
        trajectory_columns=trajectory,
        image_columns=image,
    )
    group.check()
    return group


def contents_of(*groups: ExportedGroup) -> BufferContents:
    dropped = {"tokens_dropped": {"stale": 7, "lost": 2}, "groups_dropped": {"stale": 1, "equal_rewards": 3}}
    return BufferContents(learner_version=4, max_lag=2, groups_per_step=3, groups=groups, **dropped)


def check_same(got: BufferContents, sent: BufferContents) -> None:
    for name in ("learner_version", "max_lag", "groups_per_step", "tokens_dropped", "groups_dropped"):
        assert getattr(got, name) == getattr(sent, name)
    assert len(got.groups) == len(sent.groups)
    for one, other in zip(got.groups, sent.groups, strict=True):
        check_same_group(one, other)


def check_same_group(got: ExportedGroup, sent: ExportedGroup) -> None:
    for name in ("state", "attempt", "engine_version", "deadline", "planned_for", "is_complete"):
        assert getattr(got, name) == getattr(sent, name)
    assert got.prompt.prompt_ids.tobytes() == sent.prompt.prompt_ids.tobytes()
    for name in ("group_id", "ground_truth", "data_source", "extra", "messages", "tools", "environment_options"):
        assert getattr(got.prompt, name) == getattr(sent.prompt, name)
    if sent.trajectories is None:
        assert got.trajectories is None
        return
    assert got.trajectories is not None
    for name in ("group_id", "attempt"):
        assert getattr(got.trajectories, name) == getattr(sent.trajectories, name)
    assert got.trajectories.turns.tobytes() == sent.trajectories.turns.tobytes()
    for scope in SCOPES:
        own, its = getattr(got.trajectories, scope), getattr(sent.trajectories, scope)
        assert list(own) == list(its)
        for name in its:
            assert (own[name].dtype, own[name].shape) == (its[name].dtype, its[name].shape)
            assert own[name].tobytes() == its[name].tobytes(), f"{scope} {name}"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), has_tokens=st.lists(st.booleans(), max_size=4))
def test_any_exported_groups_are_read_with_the_same_bits(seed: int, has_tokens: list[bool], tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    groups = [
        ExportedGroup(
            prompt=chat_prompt(number) if number % 2 else prompt(number),
            state=list(GroupState)[(seed + number) % 4],
            attempt=number - 1,
            engine_version=seed % 7,
            deadline=seed % 7 + 2,
            planned_for=number if seed % 2 else -1,
            is_complete=held and number % 3 == 0,
            trajectories=group_of_seed(seed, number) if held else None,
        )
        for number, held in enumerate(has_tokens)
    ]
    sent = contents_of(*groups)
    write_export(sent, folder)
    check_same(read_export(folder), sent)


def test_many_exported_groups_with_images_are_read_with_the_same_bits(tmp_path: Path):
    groups = []
    for number in range(130):  # the export writes these groups in several batches
        held = grouped() if number == 5 else group_of_seed(1, number)
        groups.append(ExportedGroup(prompt=prompt(number), state=GroupState.stored, trajectories=held))
    sent = contents_of(*groups)
    write_export(sent, tmp_path)
    check_same(read_export(tmp_path), sent)


@pytest.mark.parametrize("kind", KINDS)
async def test_an_export_has_the_groups_and_prefixes_of_its_checkpoint(kind: str, tmp_path: Path):
    part = tmp_path / "checkpoints" / "v00000001"
    async with running(**options_of(kind, tmp_path / "first")) as run:
        client = run.client()
        await first_life(client, part)
        [fetched] = await client.fetch([3])
    exported = export_part(part, tmp_path / "export")
    check_same(read_export(tmp_path / "export"), exported)
    assert (exported.learner_version, exported.max_lag, exported.groups_per_step) == (0, 2, 2)
    states = [str(group.state) for group in exported.groups]
    assert states == [*["planned"] * 2, *["stored"] * 2, "queued", "leased", *["queued"] * 4]
    has_tokens = [group.trajectories is not None for group in exported.groups]
    assert has_tokens == [True] * 5 + [False] * 5
    assert [group.is_complete for group in exported.groups] == [True] * 4 + [False] * 6
    assert [group.planned_for for group in exported.groups[:4]] == [0, 0, -1, -1]
    three = exported.groups[3].trajectories
    assert three is not None
    assert three.token_columns["token_ids"].tobytes() == fetched.token_columns["token_ids"].tobytes()
    rows = pq.read_table(tmp_path / "export" / "groups.parquet").to_pylist()
    assert [row["num_tokens"] for row in rows[:5]] == [5, 5, 5, 40_005, 4]
    assert rows[2]["oldest_version"] == 0
    assert rows[2]["ground_truth"] == "x"


def test_an_export_can_be_read_after_another_tool_has_removed_groups(tmp_path: Path):
    groups = [
        ExportedGroup(prompt=prompt(number), state=GroupState.stored, trajectories=group_of_seed(3, number))
        for number in range(6)
    ]
    write_export(contents_of(*groups), tmp_path)
    path = tmp_path / "groups.parquet"
    table = pq.read_table(path)
    pq.write_table(table.filter(np.array(table["group_id"].to_pylist()) >= 4), path)
    kept = read_export(tmp_path)
    assert [group.prompt.group_id for group in kept.groups] == [4, 5]
    for got, sent in zip(kept.groups, groups[4:], strict=True):
        check_same_group(got, sent)


def test_errors_of_exports_name_the_wrong_folder_column_or_group(tmp_path: Path):
    group = ExportedGroup(prompt=prompt(0), state=GroupState.stored, trajectories=grouped())
    write_export(contents_of(group), tmp_path / "first")
    with pytest.raises(ValueError, match=r"first must be an empty folder"):
        write_export(contents_of(group), tmp_path / "first")
    with pytest.raises(ValueError, match=r"nothing is not a folder of 'asyncrl buffer export'"):
        read_export(tmp_path / "nothing")
    with pytest.raises(ReplayBufferError, match="holds no complete log"):
        read_part(tmp_path / "nothing")
    wide = grouped()
    columns = {**wide.token_columns, "routed_experts": wide.token_columns["routed_experts"].astype(np.int32)}
    other = TrajectoryGroup(
        group_id=1,
        attempt=0,
        turns=wide.turns,
        token_columns=columns,
        trajectory_columns=wide.trajectory_columns,
        turn_columns=wide.turn_columns,
        image_columns=wide.image_columns,
    )
    clash = ExportedGroup(prompt=prompt(1), state=GroupState.stored, trajectories=other)
    with pytest.raises(ValueError, match=r"token column 'routed_experts' has the type int32 in group 1, but int16"):
        write_export(contents_of(group, clash), tmp_path / "second")
    turns = tmp_path / "first" / "turns.parquet"
    table = pq.read_table(turns)
    pq.write_table(table.slice(0, table.num_rows - 1), turns)
    with pytest.raises(ValueError, match=r"rows of group 0 are inconsistent"):
        read_export(tmp_path / "first")
