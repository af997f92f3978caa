"""Trees of turns, and the columns that store them: which tokens are trained or shared, and which trees are refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.core.trajectory import Trajectory, TrajectoryGroup, Turn
from asyncrl.core.types import FinishReason

PROMPT = Turn.given(np.array([1, 2, 3], dtype=np.int32))


def sampled(
    first: int, length: int, parent: int, *, version: int = 5, reason: FinishReason = FinishReason.stop
) -> Turn:
    return Turn(
        token_ids=np.arange(first, first + length, dtype=np.int32),
        parent=parent,
        sampled=True,
        logprobs=-np.arange(1, length + 1, dtype=np.float32),
        versions=np.full(length, version, dtype=np.int32),
        finish_reason=reason,
    )


def observed(first: int, length: int, parent: int) -> Turn:
    return Turn.given(np.arange(first, first + length, dtype=np.int32), parent=parent)


def group_of(*trajectories: Trajectory) -> TrajectoryGroup:
    return TrajectoryGroup.from_trajectories(trajectories, group_id=7, attempt=2)


def test_a_prompt_and_one_sampled_turn_are_the_smallest_tree() -> None:
    group = group_of(
        Trajectory(turns=(PROMPT, sampled(10, 2, 0)), reward=1.0),
        Trajectory(turns=(PROMPT, sampled(20, 3, 0, version=6, reason=FinishReason.length)), reward=0.5),
    )
    assert group.token_ids.tolist() == [1, 2, 3, 10, 11, 20, 21, 22]
    assert group.versions.tolist() == [-1, -1, -1, 5, 5, 6, 6, 6]
    assert [group.along(b, "token_ids").tolist() for b in group.branches] == [[1, 2, 3, 10, 11], [1, 2, 3, 20, 21, 22]]
    assert [group.trained_mask(b).sum() for b in group.branches] == [2, 3]
    assert [group.is_truncated(b) for b in group.branches] == [False, True]
    summary = group.summary
    assert (summary.num_prompt_tokens, summary.response_lengths, summary.num_tokens) == (3, (2, 3), 5)
    assert (summary.oldest_version, summary.newest_version, summary.rewards) == (5, 6, (1.0, 0.5))


def test_every_sampled_turn_is_trained_exactly_once_in_any_tree() -> None:
    # The tree has three branches: prompt-a-tool-b, prompt-a-tool-c, and r-d from a new root. Two branches share turn a.
    tree = Trajectory(
        turns=(
            PROMPT,
            sampled(10, 2, 0),
            observed(20, 3, 1),
            sampled(30, 1, 2),
            sampled(40, 2, 2),
            observed(50, 2, -1),
            sampled(60, 4, 5),
        ),
        reward=1.0,
    )
    group = group_of(tree, Trajectory(turns=(PROMPT, sampled(90, 1, 0)), reward=0.0))
    paths = [group.along(branch, "token_ids").tolist() for branch in group.branches]
    assert paths == [
        [1, 2, 3, 10, 11, 20, 21, 22, 30],
        [1, 2, 3, 10, 11, 20, 21, 22, 40, 41],
        [50, 51, 60, 61, 62, 63],
        [1, 2, 3, 90],
    ]
    trained = [np.array(path)[group.trained_mask(b)].tolist() for path, b in zip(paths, group.branches, strict=True)]
    assert trained == [[10, 11, 30], [40, 41], [60, 61, 62, 63], [90]]
    assert [branch.trajectory for branch in group.branches] == [0, 0, 0, 1]
    assert group.summary.num_tokens == 2 + 1 + 2 + 4 + 1
    assert group.summary.response_lengths == (14, 1)


def test_a_baseline_is_never_trained() -> None:
    group = group_of(
        Trajectory(turns=(PROMPT, sampled(10, 2, 0)), reward=1.0),
        Trajectory(turns=(PROMPT, sampled(20, 3, 0, version=4)), reward=0.5, baseline=True),
    )
    assert [group.trained_mask(branch).sum() for branch in group.branches] == [2, 0]
    assert group.summary.num_tokens == 2
    assert group.summary.oldest_version == 4, "a greedy rollout must count for the oldest version of the group"


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    """Return a random forest of turns. The prompt is the first root."""
    turns = [PROMPT]
    for index in range(1, draw(st.integers(2, 7))):
        parent = draw(st.integers(-1, index - 1))
        length = draw(st.integers(1, 4))
        is_sampled = parent >= 0 and (index == 1 or draw(st.booleans()))
        turns.append(sampled(10 * index, length, parent) if is_sampled else observed(10 * index, length, parent))
    if not any(turn.sampled for turn in turns):
        turns.append(sampled(99, 1, 0))
    rewards = draw(st.dictionaries(st.integers(1, len(turns) - 1), st.sampled_from([0.25, -1.0])))
    metrics = draw(st.dictionaries(st.sampled_from(["tools", "depth"]), st.sampled_from([1.0, 2.0])))
    return Trajectory(turns=tuple(turns), reward=0.5, turn_rewards=rewards, metrics=metrics)


def plain(trajectory: Trajectory) -> tuple:
    turns = [
        (t.token_ids.tolist(), t.parent, t.sampled, t.logprobs.tolist(), t.versions.tolist(), t.finish_reason)
        for t in trajectory.turns
    ]
    return turns, trajectory.reward, dict(trajectory.turn_rewards), dict(trajectory.metrics), trajectory.baseline


@given(st.lists(trajectories(), min_size=1, max_size=4))
def test_columns_and_trees_convert_to_each_other(trees: list[Trajectory]) -> None:
    group = group_of(*trees)
    assert [plain(tree) for tree in group.trajectories()] == [plain(tree) for tree in trees]
    trained = sum(int(group.trained_mask(branch).sum()) for branch in group.branches)
    assert trained == sum(len(turn.token_ids) for tree in trees for turn in tree.turns if turn.sampled)
    assert trained == group.summary.num_tokens


def test_an_additional_column_is_stored_and_is_zero_in_other_turns() -> None:
    experts = np.arange(12, dtype=np.int16).reshape(2, 3, 2)
    answer = replace(sampled(10, 2, 0), columns={"routed_experts": experts})
    group = group_of(Trajectory(turns=(PROMPT, answer), reward=1.0))
    along = group.along(group.branches[0], "routed_experts")
    assert along.shape == (5, 3, 2)
    assert along.dtype == np.int16
    np.testing.assert_array_equal(along[3:], experts)
    assert not along[:3].any()
    np.testing.assert_array_equal(group.trajectories()[0].turns[1].columns["routed_experts"], experts)


@pytest.mark.parametrize(
    ("trees", "message"),
    [
        ((), "has no trajectories"),
        ((Trajectory(turns=(PROMPT, observed(10, 1, 0)), reward=0.0),), "must have at least one sampled token"),
        (
            (Trajectory(turns=(PROMPT, sampled(10, 1, 0)), reward=0.0), Trajectory(turns=(PROMPT,), reward=0.0)),
            "trajectory 1 must have a turn after the prompt",
        ),
        (
            (Trajectory(turns=(PROMPT, sampled(10, 1, 0)), reward=0.0, turn_rewards={0: 3.0, 1: 0.5, 2: 1.0}),),
            r"trajectory 0 .* has rewards of turns \[0, 2\], expected turns from 1 to 1",
        ),
        ((Trajectory(turns=(PROMPT, sampled(10, 1, 2), sampled(11, 1, 0)), reward=0.0),), "turn 1 does not fit"),
        ((Trajectory(turns=(PROMPT, sampled(10, 1, -1)), reward=0.0),), "turn 1 must have a parent"),
        ((Trajectory(turns=(sampled(1, 2, -1), sampled(10, 1, 0)), reward=0.0),), "shared prompt"),
        (
            (
                Trajectory(turns=(PROMPT, sampled(10, 1, 0)), reward=0.0),
                Trajectory(turns=(observed(7, 3, -1), sampled(10, 1, 0)), reward=0.0),
            ),
            "got another prompt",
        ),
    ],
)
def test_invalid_trees_are_refused_with_the_reason(trees: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        group_of(*trees)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda g: {"token_columns": {**g.token_columns, "logprobs": g.logprobs[1:]}}, "'logprobs' must have 5 rows"),
        (
            lambda g: {"token_columns": {"token_ids": g.token_ids}},
            "'logprobs' must be one-dimensional float32, got none",
        ),
        (lambda g: {"trajectory_columns": {"rewards": g.rewards.astype(np.float64)}}, "float32, got float64"),
        (lambda g: {"turns": g.turns[:1]}, "the turns have 3 tokens, but the columns have 5"),
        (lambda g: {"turn_columns": {"turn_rewards": np.zeros(9, np.float32)}}, "turn column 'turn_rewards'"),
    ],
)
def test_columns_that_do_not_match_are_refused(change, message: str) -> None:
    group = group_of(Trajectory(turns=(PROMPT, sampled(10, 2, 0)), reward=1.0))
    with pytest.raises(ValueError, match=message):
        replace(group, **change(group)).check()


def test_the_example_of_a_tree_in_the_documentation_is_correct() -> None:
    page = (Path(__file__).parents[2] / "docs" / "trajectories.md").read_text()
    tree, _ = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)  # the second block needs a file
    exec(compile(tree, "docs/trajectories.md", "exec"), {})
