"""Trajectories as trees of turns, and prompt groups of trajectories as arrays (columns).

A *turn* is a sequence of tokens that the policy sampled, or that came from a prompt, a tool or an environment. Turns
form a tree: the parent of a turn is the turn before this turn. A *branch* is the path from a root to a leaf. The
smallest tree has two turns: a prompt and one sampled turn.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise, repeat

import numpy as np

from asyncrl.core.images import IMAGE_ROWS, POSITIONS, GroupImages, PlacedImage, group_columns
from asyncrl.core.receipts import DIGEST_BITS, token_digest
from asyncrl.core.types import FinishReason, GroupSummary

SHARED = -1  # trajectory index of the prompt's turn, which belongs to all trajectories of the group
ROOT = -1  # parent index of a turn that is the root of a tree
UNVERSIONED = -1  # version of a token that the policy did not sample

TURN_DTYPE = np.dtype([(name, "<i4") for name in ("trajectory", "parent", "num_tokens", "sampled", "finish_reason")])
"""Structured dtype that describes one turn of a prompt group.

- trajectory: index of the turn's trajectory, or `SHARED`.
- parent: index of the previous turn, or `ROOT`.
- num_tokens: length in tokens.
- sampled: 1 if the policy sampled the turn.
- finish_reason: index in the members of `FinishReason`; -1 without a finish reason.
"""
_TURN = struct.Struct("<5i")


FINISH_REASONS = tuple(FinishReason)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A sequence of tokens that the policy sampled, or that came from a prompt, a tool or an environment.

    Attributes:
        token_ids: [T] int32.
        parent: Index of the previous turn in `Trajectory.turns`; -1 if there is none.
        sampled: Whether the policy sampled the tokens.
        logprobs: [T] float32, behavior log-probs at the sampling temperature; 0 at tokens that were not sampled.
        versions: [T] int32, policy version of each token as the engine reported it; -1 where not sampled.
        columns: Further [T, …] numeric arrays by name. Example: ``routed_experts`` [T, layers, top-k] int16.
        images: The images in the tokens, in order; only for turns that were not sampled.
    """

    token_ids: np.ndarray
    parent: int = ROOT
    sampled: bool = False
    logprobs: np.ndarray
    versions: np.ndarray
    finish_reason: FinishReason | None = None
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    images: tuple[PlacedImage, ...] = ()

    @classmethod
    def given(cls, token_ids: np.ndarray, *, parent: int = ROOT, images: tuple[PlacedImage, ...] = ()) -> Turn:
        """Return a turn that the policy did not sample: a prompt, a tool result, an observation.

        Args:
            token_ids: [T] int32.
            parent: Index of the turn before this turn in the trajectory; -1 for a first turn.
            images: The images in the turn, with the index of each image's first token.
        """
        return cls(
            token_ids=token_ids,
            parent=parent,
            logprobs=np.zeros(len(token_ids), dtype=np.float32),
            versions=np.full(len(token_ids), UNVERSIONED, dtype=np.int32),
            images=images,
        )

    def is_same_prompt(self, other: Turn) -> bool:
        """Return whether this turn and ``other`` have the same tokens and the same images."""
        pairs = zip(self.images, other.images, strict=False)
        return (
            np.array_equal(self.token_ids, other.token_ids)
            and len(self.images) == len(other.images)
            and all(own.image.digest == its.image.digest for own, its in pairs)
        )


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One rollout of a prompt: a tree of turns, and its rewards.

    Attributes:
        turns: The turns, each one after its parent. The first turn is the prompt, which all trajectories of a group
            share.
        reward: Reward of the whole trajectory.
        turn_rewards: Additional rewards of single turns, by index in ``turns``.
        metrics: Numbers to report in the run's metrics, by name.
        baseline: True for ReMax's greedy answer (arXiv 2310.10505). The learner does not train on this trajectory.
    """

    turns: tuple[Turn, ...]
    reward: float
    turn_rewards: Mapping[int, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    baseline: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Branch:
    """A path from a root of a tree of turns to a leaf. The tokens of the path are one input sequence of the policy.

    Attributes:
        trajectory: Index of the trajectory in its group.
        turns: Indices of the turns in the group, from the root to the leaf.
        trained: The sampled turns that are not in an earlier branch. The loss mask includes only these turns. The set
            is empty for ReMax's greedy answer, because the learner does not train on this answer.
    """

    trajectory: int
    turns: tuple[int, ...]
    trained: frozenset[int]


@dataclass(frozen=True, kw_only=True)
class TrajectoryGroup:
    """G trajectories of one prompt, as arrays. M is the number of turns, and N is the number of tokens in all turns.

    The prompt is one of the turns.

    Attributes:
        group_id: The prompt's index in the run's prompt order.
        attempt: Number of earlier attempts to generate the group.
        turns: [M] of `TURN_DTYPE`. The turns of a trajectory are adjacent, parents before children.
        token_columns: [N, …] arrays by name. Required: ``token_ids`` int32, ``logprobs`` float32 (0 where not sampled)
            and ``versions`` int32 (-1 where not sampled).
        trajectory_columns: [G, …] arrays by name. Required: ``rewards`` float32. If a trajectory is ReMax's greedy
            answer, ``baseline`` bool is also required.
        turn_columns: [M, …] arrays by name. Example: ``turn_rewards`` float32.
        image_columns: The distinct images of the group; empty without images.
    """

    group_id: int
    attempt: int
    turns: np.ndarray
    token_columns: Mapping[str, np.ndarray]
    trajectory_columns: Mapping[str, np.ndarray]
    turn_columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    image_columns: Mapping[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def from_trajectories(cls, trajectories: Sequence[Trajectory], *, group_id: int, attempt: int) -> TrajectoryGroup:
        """Convert a prompt's trajectories to a group. ``attempt`` is the number of earlier attempts at the prompt.

        Raises `ValueError` if there is no trajectory, the prompts differ, or a trajectory lacks a turn with a reward.
        """
        if not trajectories:
            raise ValueError(f"prompt group {group_id} has no trajectories; it needs at least one")
        prompt = trajectories[0].turns[0]
        skeleton = [_skeleton_of(prompt, SHARED, ROOT)]
        turns, earned = [prompt], [np.nan]  # NaN means that the turn has no reward
        is_earned = any(trajectory.turn_rewards for trajectory in trajectories)
        for index, trajectory in enumerate(trajectories):
            own = trajectory.turns[0]
            if own is not prompt and not own.is_same_prompt(prompt):
                which = f"trajectory {index} of prompt group {group_id}"
                raise ValueError(f"{which} must begin with the prompt of trajectory 0, got another prompt")
            if strange := {*trajectory.turn_rewards} - {*range(1, len(trajectory.turns))}:
                raise ValueError(
                    f"trajectory {index} of prompt group {group_id} has rewards of turns {sorted(strange)}, expected "
                    f"turns from 1 to {len(trajectory.turns) - 1}; the prompt, turn 0, has no reward"
                )
            offset = len(turns) - 1
            for place, turn in enumerate(trajectory.turns[1:], 1):
                skeleton.append(_skeleton_of(turn, index, turn.parent + offset if turn.parent > 0 else turn.parent))
                turns.append(turn)
                earned.append(trajectory.turn_rewards.get(place, np.nan))
        trajectory_columns = {"rewards": np.array([each.reward for each in trajectories], dtype=np.float32)}
        if any(each.baseline for each in trajectories):
            trajectory_columns["baseline"] = np.array([each.baseline for each in trajectories])
        for name in sorted({name for each in trajectories for name in each.metrics}):
            values = [each.metrics.get(name, np.nan) for each in trajectories]
            trajectory_columns[_METRICS + name] = np.array(values, dtype=np.float32)
        token_columns, image_columns = _token_columns(turns), {}
        if any(turn.images for turn in turns):
            parents = [parent for _, parent, _, _, _ in skeleton]
            lengths = [len(turn.token_ids) for turn in turns]
            image_columns, own_columns = group_columns(lengths, parents, [turn.images for turn in turns])
            token_columns |= own_columns
        group = cls(
            group_id=group_id,
            attempt=attempt,
            turns=np.array(skeleton, dtype=TURN_DTYPE),
            token_columns=token_columns,
            trajectory_columns=trajectory_columns,
            turn_columns={"turn_rewards": np.array(earned, dtype=np.float32)} if is_earned else {},
            image_columns=image_columns,
        )
        group.check()
        _ = group.summary  # compute the summary now, while the arrays are in the CPU cache; `put` uses it later
        return group

    def check(self) -> None:
        """Check the dtypes and lengths of all columns. Also check that the turns form trees and begin with the prompt.

        Raises:
            ValueError: a column or a turn is wrong. The message names the column or turn.
        """
        token, trajectory = self.token_columns, self.trajectory_columns
        for columns, needed in ((token, _TOKEN_COLUMNS), (trajectory, _TRAJECTORY_COLUMNS)):
            for name, dtype in needed.items():
                column = columns.get(name)
                if column is None or column.dtype != dtype or column.ndim != 1:
                    got = "none" if column is None else column.dtype
                    raise ValueError(f"{self._where}: column {name!r} must be one-dimensional {dtype}, got {got}")
        num_tokens, num_trajectories = len(token["token_ids"]), len(trajectory["rewards"])
        self._check_rows("token", token, num_tokens)
        self._check_rows("turn", self.turn_columns, len(self.turns))
        self._check_rows("trajectory", trajectory, num_trajectories)
        if self.images is not None:
            self.images.check(self._where)
            for name, trailing in ((IMAGE_ROWS, ()), (POSITIONS, (3,))):
                column = token.get(name)
                if column is None or column.dtype != np.dtype("<i4") or column.shape[1:] != trailing:
                    raise ValueError(
                        f"{self._where}: a group with images needs the token column {name!r}, int32 [N, {trailing}]"
                    )
            rows, num_rows = token[IMAGE_ROWS], self.images.first_rows[-1]
            if len(rows) and not -1 <= int(rows.min()) <= int(rows.max()) < num_rows:
                raise ValueError(f"{self._where}: {IMAGE_ROWS} must be in -1..{num_rows - 1}")
        if not self._is_flat(num_tokens, num_trajectories):
            self._check_tree()

    @cached_property
    def images(self) -> GroupImages | None:
        """The distinct images of the group; None if the group has no images."""
        return GroupImages(self.image_columns) if self.image_columns else None

    @property
    def _where(self) -> str:
        return f"prompt group {self.group_id}"

    def _check_rows(self, scope: str, columns: Mapping[str, np.ndarray], length: int) -> None:
        for name, values in columns.items():
            if values.ndim == 0 or len(values) != length:
                raise ValueError(f"{self._where}: {scope} column {name!r} must have {length} rows, got {values.shape}")

    def _is_flat(self, num_tokens: int, num_trajectories: int) -> bool:
        """Check quickly whether this is a valid group with one sampled turn per trajectory, the usual case."""
        if len(self.turns) != num_trajectories + 1:
            return False
        trajectories, parents, lengths, sampled, reasons = zip(*self._rows, strict=True)
        return (
            (trajectories, parents, sampled) == _flat_skeleton(num_trajectories)
            and min(lengths) >= 0
            and lengths[0] < sum(lengths) == num_tokens
            and min(reasons) >= -1
            and max(reasons) < len(FINISH_REASONS)
        )

    def _check_tree(self) -> None:
        where = self._where
        rows, num_trajectories, total, last = self._rows, self.num_trajectories, 0, SHARED
        num_reasons = len(FINISH_REASONS)
        if not rows or rows[0][0] != SHARED or rows[0][3]:
            raise ValueError(f"{where}: the first turn must be the shared prompt, which is not sampled")
        for index, (trajectory, parent, num_tokens, sampled, reason) in enumerate(rows):
            total += num_tokens
            is_same_tree = parent == ROOT or (0 <= parent < index and rows[parent][0] in (SHARED, trajectory))
            in_order = last <= trajectory < num_trajectories and (trajectory != SHARED or index == 0)
            if not (is_same_tree and in_order) or num_tokens < 0 or not -1 <= reason < num_reasons:
                raise ValueError(f"{where}: turn {index} does not fit into the tree: {self.turns[index]}")
            if sampled not in (0, 1) or (sampled and parent == ROOT):
                raise ValueError(f"{where}: sampled turn {index} must have a parent, got none")
            last = trajectory
        if total != len(self.token_ids):
            raise ValueError(f"{where}: the turns have {total} tokens, but the columns have {len(self.token_ids)}")
        if missing := {*range(num_trajectories)} - {row[0] for row in rows}:
            raise ValueError(
                f"{where}: trajectory {min(missing)} must have a turn after the prompt; leave this trajectory out"
            )
        if not any(row[3] and row[2] for row in rows):
            raise ValueError(f"{where}: must have at least one sampled token, got none")

    @property
    def num_trajectories(self) -> int:
        """Number of trajectories, G."""
        return len(self.trajectory_columns["rewards"])

    @property
    def token_ids(self) -> np.ndarray:
        """Token ids of all turns, [N] int32."""
        return self.token_columns["token_ids"]

    @property
    def logprobs(self) -> np.ndarray:
        """Log-probs of the tokens when they were sampled, [N] float32; 0 for tokens that were not sampled."""
        return self.token_columns["logprobs"]

    @property
    def versions(self) -> np.ndarray:
        """Policy version that sampled each token, [N] int32; -1 for tokens that were not sampled."""
        return self.token_columns["versions"]

    @property
    def rewards(self) -> np.ndarray:
        """Reward of each trajectory's outcome, [G] float32, without the rewards of single turns."""
        return self.trajectory_columns["rewards"]

    @property
    def prompt_ids(self) -> np.ndarray:
        """Token ids of the shared prompt, [P] int32."""
        return self.token_ids[: self.turns["num_tokens"][0]]

    @cached_property
    def is_baseline(self) -> np.ndarray:
        """[G] bool. True for ReMax's greedy answer (the learner does not train on it), False for other trajectories."""
        return self.trajectory_columns.get("baseline", np.zeros(self.num_trajectories, dtype=bool))

    @property
    def policy_versions(self) -> np.ndarray:
        """Policy version of each sampled token, [n] int32, without the tokens of ReMax's greedy answer."""
        # The prompt's turn has the trajectory index -1 (`SHARED`), which selects the appended value False.
        is_left_out = np.append(self.is_baseline, False)[self.turns["trajectory"]]
        versions = self.versions[~np.repeat(is_left_out, self.turns["num_tokens"])]
        return versions[versions != UNVERSIONED]

    @cached_property
    def branches(self) -> tuple[Branch, ...]:
        """All paths from a root to a leaf, in the turn trees of all trajectories. A path is one input of the model.

        Each sampled turn is in the loss of exactly one path. Turns of ReMax's greedy answer are in no loss.
        """
        if self._is_flat(len(self.token_ids), self.num_trajectories) and not self.is_baseline.any():
            return _flat_branches(self.num_trajectories)
        parents, sampled = self.turns["parent"].tolist(), self.turns["sampled"].tolist()
        inner, seen, branches = set(parents), set[int](), []
        for leaf, trajectory in enumerate(self.turns["trajectory"].tolist()):
            if leaf in inner or trajectory == SHARED:
                continue
            path = [leaf]
            while parents[path[-1]] != ROOT:
                path.append(parents[path[-1]])
            new = {turn for turn in path if sampled[turn] and turn not in seen}
            seen |= new
            trained = frozenset[int]() if self.is_baseline[trajectory] else frozenset(new)
            branches.append(Branch(trajectory=trajectory, turns=tuple(reversed(path)), trained=trained))
        return tuple(branches)

    def along(self, branch: Branch, name: str) -> np.ndarray:
        """Return the values of the token column ``name`` for the T tokens of a branch, [T, …].

        A branch is a path of turns, the input of one forward pass.
        """
        return self.along_each([branch], name)[0]

    def along_each(self, branches: Sequence[Branch], name: str) -> list[np.ndarray]:
        """Return the values of the token column ``name`` for each branch: a list of arrays [T, …], views of one array.

        A branch is a path of turns, the input of one forward pass with T tokens.
        """
        column, ends, lengths = self.token_columns[name], self._ends, self._lengths
        spans = [column[ends[turn] - lengths[turn] : ends[turn]] for branch in branches for turn in branch.turns]
        return self._apart(np.concatenate(spans), branches)

    def trained_mask(self, branch: Branch) -> np.ndarray:
        """Return the loss mask of a branch (a path of turns), [T] bool: True at the tokens in the branch's loss."""
        return self.trained_masks([branch])[0]

    def trained_masks(self, branches: Sequence[Branch]) -> list[np.ndarray]:
        """Return the loss mask of each branch: a list of arrays [T] bool, views of one array.

        A branch is a path of turns. Its mask is True at the tokens that are in the loss of this branch.
        """
        is_trained = [turn in branch.trained for branch in branches for turn in branch.turns]
        lengths = [self._lengths[turn] for branch in branches for turn in branch.turns]
        return self._apart(np.repeat(is_trained, lengths), branches)

    def _apart(self, joined: np.ndarray, branches: Sequence[Branch]) -> list[np.ndarray]:
        lengths = self._lengths
        ends = [*accumulate([sum([lengths[turn] for turn in branch.turns]) for branch in branches])]
        return [joined[start:end] for start, end in pairwise([0, *ends])]

    @cached_property
    def turn_sums(self) -> np.ndarray:
        """Sum of the turn rewards per trajectory, [G] float32."""
        sums = np.zeros(self.num_trajectories, dtype=np.float32)
        if "turn_rewards" in self.turn_columns:
            np.add.at(sums, self.turns["trajectory"][1:], np.nan_to_num(self.turn_columns["turn_rewards"][1:]))
        return sums

    def rewards_along(self, branch: Branch) -> np.ndarray | None:
        """Return the turn rewards for the T tokens of a branch, [T] float32; None if no turn of the group has a reward.

        A branch is a path of turns. If a turn is in the loss of this branch, its reward is at the turn's last token.
        All other values are 0.
        """
        if "turn_rewards" not in self.turn_columns:
            return None
        earned = np.nan_to_num(self.turn_columns["turn_rewards"])
        rewards, end = np.zeros(sum(self._lengths[turn] for turn in branch.turns), dtype=np.float32), 0
        for turn in branch.turns:
            end += self._lengths[turn]
            if turn in branch.trained and self._lengths[turn]:
                rewards[end - 1] = earned[turn]
        return rewards

    @cached_property
    def previous_turns(self) -> list[int]:
        """For each of the M turns, the index of the turn's nearest sampled ancestor in the tree, or `ROOT`."""
        previous: list[int] = []
        for _, parent, _, _, _ in self._rows:
            is_given = parent != ROOT and not self._rows[parent][3]
            previous.append(previous[parent] if is_given else parent)
        return previous

    @cached_property
    def earned(self) -> list[float]:
        """Reward of each sampled turn, plus the rewards of the tool and environment turns after it, [M] float.

        The value of a turn that was not sampled is 0: its reward is added to the value of its nearest sampled ancestor,
        if there is one.
        """
        earned = [0.0] * len(self.turns)
        if "turn_rewards" in self.turn_columns:
            for turn, reward in enumerate(np.nan_to_num(self.turn_columns["turn_rewards"]).tolist()):
                earner = turn if self._rows[turn][3] else self.previous_turns[turn]
                if earner != ROOT:
                    earned[earner] += reward
        return earned

    def is_truncated(self, branch: Branch) -> bool:
        """Return whether the last turn of the branch (a path of turns) ended at the length limit."""
        return self.turns["finish_reason"][branch.turns[-1]] == _TRUNCATED

    def trajectories(self) -> list[Trajectory]:
        """Convert the columns back to G `Trajectory` objects, the inverse of `from_trajectories`."""
        rows, first = self.turns.tolist(), {}
        turns: list[list[Turn]] = [[self._turn(0, ROOT)] for _ in range(self.num_trajectories)]
        for index, (trajectory, parent, _, _, _) in enumerate(rows[1:], start=1):
            offset = first.setdefault(trajectory, index) - 1
            turns[trajectory].append(self._turn(index, parent - offset if parent > 0 else parent))
        earned = self.turn_columns.get("turn_rewards", np.full(len(rows), np.nan, dtype=np.float32))
        reported = {name: column for name, column in self.trajectory_columns.items() if name.startswith(_METRICS)}
        return [
            Trajectory(
                turns=tuple(turns[index]),
                reward=float(self.rewards[index]),
                turn_rewards={
                    place: float(earned[first[index] + place - 1])
                    for place in range(1, len(turns[index]))
                    if not np.isnan(earned[first[index] + place - 1])
                },
                metrics={
                    name.removeprefix(_METRICS): float(column[index])
                    for name, column in reported.items()
                    if not np.isnan(column[index])
                },
                baseline=bool(self.is_baseline[index]),
            )
            for index in range(self.num_trajectories)
        ]

    def _turn(self, index: int, parent: int) -> Turn:
        _, _, num_tokens, sampled, reason = self.turns[index].tolist()
        span = slice(self._ends[index] - num_tokens, self._ends[index])
        return Turn(
            token_ids=self.token_ids[span],
            parent=parent,
            sampled=bool(sampled),
            logprobs=self.logprobs[span],
            versions=self.versions[span],
            finish_reason=FINISH_REASONS[reason] if reason >= 0 else None,
            columns={name: values[span] for name, values in self.token_columns.items() if name not in _MADE},
            images=self.images.placed(self.token_columns[IMAGE_ROWS][span]) if self.images is not None else (),
        )

    @cached_property
    def _rows(self) -> list[tuple[int, int, int, int, int]]:
        """The turns as tuples of Python numbers. It would be ten times slower to read single rows of the array."""
        return [*_TURN.iter_unpack(self.turns.tobytes())]

    @cached_property
    def _lengths(self) -> list[int]:
        return [row[2] for row in self._rows]

    @cached_property
    def _ends(self) -> list[int]:
        return np.cumsum(self.turns["num_tokens"]).tolist()

    @property
    def oldest_version(self) -> int:
        """The oldest policy version that sampled a token of the group, including tokens of ReMax's greedy answer."""
        return int(np.minimum.reduce(self.versions.view(np.uint32)))  # as uint32, `UNVERSIONED` is the largest value

    @cached_property
    def summary(self) -> GroupSummary:
        """The group's metadata without tokens: lengths, rewards, oldest and newest version."""
        lengths, branch_tokens, num_branches = self._counts()
        sampled = [row for row in self._rows[1:] if row[3]]
        if "baseline" in self.trajectory_columns:
            sampled = [row for row in sampled if not self.is_baseline[row[0]]]
        rewards = self.rewards + self.turn_sums if "turn_rewards" in self.turn_columns else self.rewards
        cut = {row[0] for row in self._rows if row[4] == _TRUNCATED}
        reported = [name for name in sorted(self.trajectory_columns) if name.startswith(_METRICS)]
        known = {name: self.trajectory_columns[name][~self.is_baseline] for name in reported}
        known = {name: values[~np.isnan(values)] for name, values in known.items()}
        metrics = tuple((name.removeprefix(_METRICS), float(v.mean())) for name, v in known.items() if len(v))
        digests = (
            token_digest(self.group_id, row[0], self.token_ids[end - row[2] : end])
            for row, end in zip(self._rows, self._ends, strict=True)
            if row[3] and not self.is_baseline[row[0]]
        )
        return GroupSummary(
            group_id=self.group_id,
            attempt=self.attempt,
            num_prompt_tokens=self._rows[0][2],
            response_lengths=lengths,
            num_tokens=sum([row[2] for row in sampled]),
            oldest_version=self.oldest_version,
            newest_version=int(np.maximum.reduce(self.versions)),
            rewards=tuple(rewards.tolist()),
            branch_tokens=branch_tokens,
            num_branches=num_branches,
            num_truncated=sum(not self.is_baseline[trajectory] for trajectory in cut),
            metrics=metrics,
            has_unlike_turns=self._has_unlike_turns,
            digest=sum(digests) % (1 << DIGEST_BITS),
        )

    @property
    def _has_unlike_turns(self) -> bool:
        if not any(self.earned):
            return False
        chains = [list[float]() for _ in range(self.num_trajectories)]
        last = [ROOT] * self.num_trajectories
        for turn, (trajectory, _, _, sampled, _) in enumerate(self._rows):
            if sampled and self.previous_turns[turn] != last[trajectory]:
                return True
            if sampled:
                chains[trajectory].append(self.earned[turn])
                last[trajectory] = turn
        return any(chain != chains[0] for chain in chains)

    def _counts(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Return three tuples of G numbers: how many tokens after the prompt, tokens in all branches, and branches.

        The second and the third tuple are empty if each trajectory has a single branch.
        """
        trajectories, parents, own_lengths, _, _ = zip(*self._rows, strict=True)
        if trajectories[1:] == (*range(self.num_trajectories),) and not any(parents[1:]):
            return own_lengths[1:], (), ()  # each trajectory has a single turn
        lengths = [0] * self.num_trajectories
        for trajectory, num_tokens in zip(self.turns["trajectory"].tolist()[1:], self._lengths[1:], strict=True):
            lengths[trajectory] += num_tokens
        branch_tokens, num_branches = [0] * self.num_trajectories, [0] * self.num_trajectories
        for branch in self.branches:
            branch_tokens[branch.trajectory] += sum(self._lengths[turn] for turn in branch.turns)
            num_branches[branch.trajectory] += 1
        is_plain = branch_tokens == [self._lengths[0] + length for length in lengths] and set(num_branches) == {1}
        return (tuple(lengths), (), ()) if is_plain else (tuple(lengths), tuple(branch_tokens), tuple(num_branches))


@lru_cache(maxsize=64)
def _flat_skeleton(num_trajectories: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    return (
        (SHARED, *range(num_trajectories)),
        (ROOT, *repeat(0, num_trajectories)),
        (0, *repeat(1, num_trajectories)),
    )


@lru_cache(maxsize=64)
def _flat_branches(num_trajectories: int) -> tuple[Branch, ...]:
    return tuple(
        Branch(trajectory=index, turns=(0, index + 1), trained=frozenset([index + 1]))
        for index in range(num_trajectories)
    )


_METRICS = "metrics/"
_TRUNCATED = FINISH_REASONS.index(FinishReason.length)
_TOKEN_COLUMNS = {"token_ids": np.dtype("<i4"), "logprobs": np.dtype("<f4"), "versions": np.dtype("<i4")}
_TRAJECTORY_COLUMNS = {"rewards": np.dtype("<f4")}
_MADE = {*_TOKEN_COLUMNS, IMAGE_ROWS, POSITIONS}
"""Names of the token columns whose values do not come from `Turn.columns`."""


def _skeleton_of(turn: Turn, trajectory: int, parent: int) -> tuple[int, int, int, int, int]:
    reason = -1 if turn.finish_reason is None else FINISH_REASONS.index(turn.finish_reason)
    return trajectory, parent, len(turn.token_ids), int(turn.sampled), reason


def _token_columns(turns: Sequence[Turn]) -> dict[str, np.ndarray]:
    """Concatenate the token columns of all turns. Use zeros where a turn lacks a column."""
    columns = {
        name: np.concatenate([getattr(turn, name) for turn in turns], dtype=dtype)
        for name, dtype in _TOKEN_COLUMNS.items()
    }
    samples = {name: values for turn in turns for name, values in turn.columns.items()}
    for name, sample in sorted(samples.items()):
        columns[name] = np.zeros((len(columns["token_ids"]), *sample.shape[1:]), dtype=sample.dtype)
        end = 0
        for turn in turns:
            end += len(turn.token_ids)
            if name in turn.columns:
                columns[name][end - len(turn.token_ids) : end] = turn.columns[name]
    return columns
