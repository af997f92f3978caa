"""An episode: one rollout as a forest of turns.

The class `Episode` makes requests to the engine, limits turns and tokens, and replays the turns of an earlier attempt.

::

    prompt (0) ──sample──▶ call (1) ──give──▶ result (2) ─┬─sample──▶ answer (3)
                                                          └─sample──▶ answer (4)      a sibling
    summary (5) ──sample──▶ answer (6)                                                a new root: sample(ROOT, …)

The states of a sampled turn. A new turn begins as *running*. A *recorded* turn has tokens that an earlier attempt at
the prompt group sampled. `sample` continues a recorded turn; a complete turn becomes *finished* immediately::

    recorded ──sample──▶ running ──take──▶ finished
        │                   └──abandon or refuse──▶ dropped
        └──forget, or sample with a request that differs from the earlier attempt──▶ dropped

`next_requests` makes a request for a running turn. After an abort it makes a new request for the same turn. The prompt
of the new request ends with the turn's tokens so far.

Turns are named by index. A parent's index is below the indices of its children. The path to a turn is its ancestors,
from the root on. The engine's prompt for a turn is exactly the tokens on this path, never decoded and encoded again.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from asyncrl.core.errors import EpisodeOverflow
from asyncrl.core.images import PlacedImage, moved
from asyncrl.core.trajectory import ROOT, Trajectory, Turn
from asyncrl.core.types import FinishReason
from rollout_fleet.config import SamplingConfig
from rollout_fleet.engines.engine import SampleOutput, SampleRequest

PROMPT = 0
"""Index of turn 0, the prompt."""


@dataclass(frozen=True, kw_only=True)
class EpisodeBudget:
    """The limits of one episode. For a turn that is being sampled, its maximum length is counted.

    Attributes:
        max_turns: Largest number of sampled turns. Example: 32.
        max_tokens: Largest number of sampled tokens of all turns.
        max_context: Largest number of tokens on a path, from a root to the end of a turn; at most the model's context
            length.
        max_tree_tokens: Largest number of tokens on all paths to leaves together. Tokens that paths share are counted
            once per path. A limit of at most one micro-batch lets the learner train on all paths together. 0: no limit.
    """

    max_turns: int
    max_tokens: int
    max_context: int
    max_tree_tokens: int = 0


@dataclass(kw_only=True, slots=True)
class _Node:
    """A turn in the forest.

    Attributes:
        turn: The turn. A sampled turn has no finish reason until it is finished.
        depth: Number of tokens on the path to this turn, including its own tokens.
        is_live: Whether the turn is in use: given or requested in this attempt, and not dropped. A turn of an earlier
            attempt is not live before its replay.
        sampling: Sampling options of the turn; None for given turns, and for turns that this attempt has not requested.
            ``max_new_tokens`` limits the whole turn, also if the turn continues after an abort.
    """

    turn: Turn
    depth: int
    is_live: bool
    is_dropped: bool = False
    sampling: SamplingConfig | None = None

    @property
    def is_running(self) -> bool:
        return self.turn.sampled and self.is_live and self.turn.finish_reason is None

    @property
    def reserved_depth(self) -> int:
        """Number of tokens on the path up to the turn's end, if the turn reaches its maximum length."""
        left = self.sampling.max_new_tokens - len(self.turn.token_ids) if self.is_running and self.sampling else 0
        return self.depth + left


class Episode:
    """One rollout of a prompt, turn by turn. The learner trains on exactly the sampled tokens.

    If an earlier attempt was cut off, ``recorded`` has the turns of that attempt. The environment runs again, and
    `sample` returns the recorded turns. A request that differs from the earlier attempt ends this replay for the turns
    below the request's ``parent``. ``images`` are the prompt's images.

    Attributes:
        name: Prefix of the ids of requests; without ``/``. Example: ``"4711-0-3"`` (group, attempt, sample).
        num_replayed: Number of recorded tokens that requests of this attempt have reused.
        num_dropped: Number of dropped tokens: recorded tokens that will not be replayed, and tokens of turns that were
            abandoned or refused.

    Raises:
        ValueError: ``recorded`` belongs to another prompt.
    """

    def __init__(
        self,
        name: str,
        prompt_ids: np.ndarray,
        budget: EpisodeBudget,
        *,
        recorded: Trajectory | None = None,
        images: tuple[PlacedImage, ...] = (),
    ) -> None:
        self.name = name
        self.num_replayed = 0
        self.num_dropped = 0
        self._budget = budget
        self._nodes: list[_Node] = []
        self._given: dict[tuple[int, bytes, tuple[str, ...]], int] = {}
        self._running: set[int] = set()
        self._outstanding: dict[str, int] = {}
        self._num_requests = 0
        prompt = Turn.given(_int32(prompt_ids), images=images)
        for turn in recorded.turns if recorded is not None else (prompt,):
            if turn.finish_reason is FinishReason.unfinished:
                turn = replace(turn, finish_reason=None)
            self._append(turn, is_live=False)
        if not self.turn(PROMPT).is_same_prompt(prompt):
            raise ValueError(
                f"episode {name}: the recorded turns belong to another prompt; replay them with their own prompt"
            )
        self._nodes[PROMPT].is_live = True

    @property
    def num_tokens(self) -> int:
        """Number of sampled tokens so far, including tokens of an earlier attempt that were replayed."""
        return sum(len(node.turn.token_ids) for node in self._nodes if node.turn.sampled and node.is_live)

    @property
    def num_held(self) -> int:
        """Number of all sampled tokens in the episode: `num_tokens` plus `num_waiting` plus ``num_dropped``."""
        return self.num_tokens + self.num_waiting + self.num_dropped

    @property
    def num_waiting(self) -> int:
        """Number of sampled tokens that were recorded in an earlier attempt and have not been replayed yet."""
        return sum(len(node.turn.token_ids) for node in self._nodes if self._waits(node))

    @property
    def running(self) -> list[int]:
        """Indices of the turns that are being sampled, in ascending order."""
        return sorted(self._running)

    @property
    def num_running(self) -> int:
        """Number of turns that are being sampled."""
        return len(self._running)

    @property
    def sampled(self) -> list[int]:
        """Indices of the turns that the policy has sampled or is sampling, in ascending order."""
        return [index for index, node in enumerate(self._nodes) if node.turn.sampled and node.is_live]

    @property
    def live(self) -> list[int]:
        """Indices of all turns of this attempt that are not dropped (`is_known`), in ascending order.

        A turn comes after its parent. Turns of an earlier attempt are missing until they are replayed.
        """
        return [index for index, node in enumerate(self._nodes) if node.is_live]

    @property
    def answer(self) -> Turn | None:
        """The last turn (highest index) that the policy has sampled or is sampling; None if there is none yet."""
        turns = self.sampled
        return self.turn(turns[-1]) if turns else None

    def is_known(self, index: int) -> bool:
        """Return whether this attempt has given, sampled or replayed the turn ``index``, and has not dropped it."""
        return 0 <= index < len(self._nodes) and self._nodes[index].is_live

    def forget(self) -> None:
        """Drop all turns that were recorded in an earlier attempt and have not been replayed yet."""
        for node in filter(self._waits, self._nodes):
            node.is_dropped = True
            self.num_dropped += len(node.turn.token_ids)

    def turn(self, index: int) -> Turn:
        """Return the turn with this index. A turn that is being sampled, or was given, has no finish reason."""
        return self._nodes[index].turn

    def path(self, index: int) -> np.ndarray:
        """Return [T] int32, all token ids from the start of the sequence to the end of the turn ``index``.

        The result is empty for `ROOT`, the position before the first turn.
        """
        parts: list[np.ndarray] = []
        while index != ROOT:
            parts.append(self._nodes[index].turn.token_ids)
            index = self._nodes[index].turn.parent
        parts = [part for part in parts[::-1] if len(part)]
        if len(parts) == 1:  # do not copy, so that requests for the same prompt share one array
            return parts[0]
        return np.concatenate(parts, dtype=np.int32) if parts else np.empty(0, dtype=np.int32)

    def images(self, index: int) -> tuple[PlacedImage, ...]:
        """Return the images on the path to the turn ``index``. Their offsets are positions in the result of `path`."""
        images: list[PlacedImage] = []
        while index != ROOT:
            node = self._nodes[index]
            images[:0] = moved(node.turn.images, node.depth - len(node.turn.token_ids))
            index = node.turn.parent
        return tuple(images)

    def give(self, parent: int, tokens: Sequence[int] | np.ndarray, *, images: tuple[PlacedImage, ...] = ()) -> int:
        """Append a turn of tokens that the policy did not sample, such as a tool's result. Returns the turn's index.

        ``parent`` is the index of the turn before the tokens, or `ROOT` to begin a new path. Equal tokens with equal
        images after the same parent are one turn.

        Raises:
            EpisodeOverflow: the path to the turn, or all paths together, would have more tokens than the budget allows.
                The episode does not change.
            ValueError: there are no tokens, or ``parent`` is still being sampled or is not a turn in use (`is_known`).
        """
        self._check_parent(parent)
        ids = _int32(tokens)
        if not len(ids):
            raise ValueError(f"episode {self.name}: a given turn needs at least one token")
        index = self._given.get(_given_key(parent, ids, images))
        if index is None or not self._nodes[index].is_live:
            depth = self.depth(parent) + len(ids)
            used = {"max_context": depth, "max_tree_tokens": self._other_paths(parent) + depth}
            for what, most in self._limits.items():
                if what in used and used[what] > most:
                    raise EpisodeOverflow(f"episode {self.name} would use {used[what]} of {what} = {most}")
        if index is None:
            index = self._append(Turn.given(ids, parent=parent, images=images), is_live=True)
        self._nodes[index].is_live = True
        return index

    def sample(
        self,
        parent: int,
        new_tokens: Sequence[int] | np.ndarray,
        sampling: SamplingConfig,
        *,
        images: tuple[PlacedImage, ...] = (),
    ) -> int:
        """Request a turn that the policy samples after ``new_tokens``. Returns the index of this turn.

        The ``new_tokens`` follow ``parent``, which is the index of a turn, or `ROOT`. ``images`` belong to the
        placeholders in ``new_tokens``. Equal requests get separate turns.

        The request reuses a turn that an earlier attempt recorded after the same ``parent``, tokens and images. This
        turn may already be finished. It must not be too long for ``sampling`` and the budget.
        Without such a turn, this attempt differs from the earlier attempt. So the recorded turns below ``parent`` that
        are not replayed yet are dropped. If ``parent`` is `ROOT`, only those below ``new_tokens`` are dropped.

        Raises:
            EpisodeOverflow: a limit of `EpisodeBudget` is used up. The episode does not change.
            ValueError: ``parent`` is being sampled or is not a turn in use (`is_known`). Or ``parent`` is `ROOT` and
                ``new_tokens`` is empty.
        """
        most = self.check_room(parent, new_tokens, sampling, images=images)
        context = self.give(parent, new_tokens, images=images) if len(new_tokens) else parent
        recorded = (
            (index, node)
            for index, node in enumerate(self._nodes)
            if node.turn.parent == context and self._waits(node) and len(node.turn.token_ids) <= most
        )
        index, node = next(recorded, (-1, None))
        if node is None:
            self._drop_others(parent, context)
            nothing = Turn.given(np.empty(0, dtype=np.int32), parent=context)
            index = self._append(replace(nothing, sampled=True), is_live=True)
            node = self._nodes[index]
        node.is_live = True
        self.num_replayed += len(node.turn.token_ids)
        node.sampling = _at_most(sampling, most)
        self._running.add(index)
        self._end_if_full(index)
        return index

    def check_room(
        self,
        parent: int,
        new_tokens: Sequence[int] | np.ndarray,
        sampling: SamplingConfig,
        *,
        images: tuple[PlacedImage, ...] = (),
        num_turns: int = 1,
    ) -> int:
        """Check that the budget has room for ``num_turns`` calls of `sample` with these arguments.

        The turns of these calls run in parallel. Returns the largest number of tokens that the first turn may have.
        Raises the errors of `sample`.
        """
        self._check_parent(parent)
        depth = self.depth(parent) + len(new_tokens)
        if depth == 0:
            raise ValueError(f"episode {self.name}: a new sequence needs at least one token")
        known = self._given.get(_given_key(parent, _int32(new_tokens), images))
        above = parent if known is None or not self._nodes[known].is_live else known
        return self._room(depth, above, sampling.max_new_tokens, num_turns)

    def next_requests(self) -> list[SampleRequest]:
        """Make a request for each running turn that has no unanswered request.

        The caller must send these requests to the engine. Then the caller passes each answer to `take`, and the id of
        each refused request to `refuse`.
        """
        requests = []
        for index in sorted(self._running.difference(self._outstanding.values())):
            node = self._nodes[index]
            assert node.sampling is not None
            num_left = node.sampling.max_new_tokens - len(node.turn.token_ids)
            request = SampleRequest(
                id=f"{self.name}-{index}-{self._num_requests}",
                prompt_ids=self.path(index),
                sampling=_at_most(node.sampling, num_left),
                images=self.images(index),
                num_written=len(node.turn.token_ids),
            )
            self._num_requests += 1
            self._outstanding[request.id] = index
            requests.append(request)
        return requests

    def turn_of(self, request_id: str) -> int:
        """Return the index of the turn that the unanswered request ``request_id`` samples."""
        return self._outstanding[request_id]

    def take(self, request_id: str, output: SampleOutput) -> int:
        """Append the tokens of the engine's answer to the turn of its request, and return the turn's index.

        After an abort, a turn stays running if it is shorter than its maximum length. The tokens of a dropped turn are
        discarded, and ``num_dropped`` counts them.
        """
        index = self._outstanding.pop(request_id)
        node = self._nodes[index]
        if node.is_dropped:
            self.num_dropped += len(output.token_ids)
            return index
        before = node.turn
        node.turn = replace(
            before,
            token_ids=np.concatenate([before.token_ids, output.token_ids], dtype=np.int32),
            logprobs=np.concatenate([before.logprobs, output.logprobs], dtype=np.float32),
            versions=np.concatenate([before.versions, output.versions], dtype=np.int32),
            finish_reason=output.finish_reason,
            columns={},
        )
        node.depth += len(output.token_ids)
        self._end_if_full(index)
        return index

    def refuse(self, request_id: str) -> int:
        """Drop the turn whose request the engine refused, and return the turn's index."""
        index = self._outstanding.pop(request_id)
        self._abandon([index])
        return index

    def abandon(self) -> None:
        """Drop all turns that are being sampled. Tokens that arrive for them later are added to ``num_dropped``."""
        self._abandon(self.running)

    def trajectory(
        self,
        reward: float,
        *,
        turn_rewards: Mapping[int, float] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> Trajectory:
        """Return the finished episode as a trajectory with the reward ``reward``. The learner trains on trajectories.

        ``turn_rewards`` maps indices of turns to additional rewards. The trajectory omits dropped turns. It omits turns
        that an earlier attempt sampled and this attempt did not request again. It also omits given turns that have no
        reward and lead to no sampled turn. So a turn's index in the trajectory may differ from its index here.

        Raises:
            ValueError: a turn is still running.
        """
        if self.running:
            raise ValueError(f"episode {self.name}: turns {self.running} are still running; let them finish first")
        earned = turn_rewards or {}
        turns, places = self._subforest([*self.sampled, *earned])
        return Trajectory(
            turns=turns,
            reward=reward,
            turn_rewards={places[index]: value for index, value in earned.items()},
            metrics=metrics or {},
        )

    def progress(self) -> Trajectory:
        """Return the turns to save for a later attempt at the group, as a trajectory with reward 0.

        The trajectory includes unfinished turns that have tokens. It also includes turns that an earlier attempt
        sampled and this attempt has not requested again yet. It omits dropped turns.
        """
        kept = (node.turn.sampled and not node.is_dropped and len(node.turn.token_ids) > 0 for node in self._nodes)
        turns, _ = self._subforest([index for index, is_kept in enumerate(kept) if is_kept])
        return Trajectory(turns=turns, reward=0.0)

    def _abandon(self, indices: Sequence[int]) -> None:
        for index in indices:
            node = self._nodes[index]
            self._running.discard(index)
            node.is_live, node.is_dropped = False, True
            self.num_dropped += len(node.turn.token_ids)

    def _append(self, turn: Turn, *, is_live: bool) -> int:
        depth = len(turn.token_ids) + (0 if turn.parent == ROOT else self._nodes[turn.parent].depth)
        self._nodes.append(_Node(turn=turn, depth=depth, is_live=is_live))
        index = len(self._nodes) - 1
        if not turn.sampled:
            self._given[_given_key(turn.parent, turn.token_ids, turn.images)] = index
        return index

    def _check_parent(self, parent: int) -> None:
        if parent == ROOT:
            return
        if not 0 <= parent < len(self._nodes) or not self._nodes[parent].is_live:
            raise ValueError(f"episode {self.name}: turn {parent} was neither given nor sampled")
        if self._nodes[parent].is_running:
            raise ValueError(f"episode {self.name}: turn {parent} is still running; wait for its answer first")

    def depth(self, index: int) -> int:
        """Return the number of tokens from the start of the sequence to the end of a turn; 0 for `ROOT`."""
        return 0 if index == ROOT else self._nodes[index].depth

    @property
    def _limits(self) -> dict[str, int]:
        limits = {field.name: getattr(self._budget, field.name) for field in fields(self._budget)}
        return limits if limits["max_tree_tokens"] else {**limits, "max_tree_tokens": sys.maxsize}

    def _other_paths(self, extended: int) -> int:
        """Return the sum of the lengths of all branches, in tokens, without the branch that ends at ``extended``.

        A branch is the path from a root to a leaf (a turn without children). For a running turn, its maximum length is
        counted. If the turn ``extended`` is not a leaf, no branch is left out.
        """
        live = {index: node for index, node in enumerate(self._nodes) if node.is_live and index != PROMPT}
        inner = {node.turn.parent for node in live.values()}
        return sum(node.reserved_depth for index, node in live.items() if index not in inner and index != extended)

    def _room(self, depth: int, above: int, longest: int, num_turns: int) -> int:
        """Return the maximum length of a new turn after the turn ``above``, at most ``longest`` tokens.

        ``depth`` is the number of tokens on the path before the new turn. Raises `EpisodeOverflow` if the budget has no
        room for ``num_turns`` such turns. The last turn needs room for one token. Each other turn needs room for the
        returned number of tokens.
        """
        asked = [node for node in self._nodes if node.sampling is not None]
        spent = sum(
            node.sampling.max_new_tokens if node.is_running and node.sampling else len(node.turn.token_ids)
            for node in asked
        )
        used = {
            "max_turns": len(asked),
            "max_tokens": spent,
            "max_context": depth,
            "max_tree_tokens": self._other_paths(above) + depth,
        }
        limits = self._limits
        for what, most in limits.items():
            if used[what] >= most:
                raise EpisodeOverflow(f"episode {self.name} has used {used[what]} of {what} = {most}")
        most = min(longest, *(limits[what] - used[what] for what in ("max_tokens", "max_context", "max_tree_tokens")))
        others = num_turns - 1
        reserved = {"max_turns": others, "max_tokens": others * most, "max_tree_tokens": others * (depth + most)}
        for what, num_reserved in reserved.items():
            if used[what] + num_reserved >= limits[what]:
                raise EpisodeOverflow(
                    f"episode {self.name} has used {used[what]} of {what} = {limits[what]}, and has no room for "
                    f"{num_turns} answers: {others} of them may use {num_reserved} in total, and the last one needs 1"
                )
        return most

    def _waits(self, node: _Node) -> bool:
        return node.turn.sampled and not node.is_live and not node.is_dropped

    def _drop_others(self, parent: int, context: int) -> None:
        for node in filter(self._waits, self._nodes):
            above = node.turn.parent
            while above not in (ROOT, context) and not (self._nodes[above].turn.sampled or self._nodes[above].is_live):
                above = self._nodes[above].turn.parent
            if above != ROOT and (above in (parent, context) or self._nodes[above].is_dropped):
                node.is_dropped = True
                self.num_dropped += len(node.turn.token_ids)

    def _end_if_full(self, index: int) -> None:
        node = self._nodes[index]
        assert node.sampling is not None
        if node.turn.finish_reason is None and len(node.turn.token_ids) >= node.sampling.max_new_tokens:
            node.turn = replace(node.turn, finish_reason=FinishReason.length)
        if node.turn.finish_reason is not None:
            self._running.discard(index)

    def _subforest(self, indices: Sequence[int]) -> tuple[tuple[Turn, ...], dict[int, int]]:
        """Return a pair: the turns ``indices`` with their ancestors and the prompt, and a dict from old to new indices.

        The prompt is always the first turn.
        """
        kept = {PROMPT}
        for index in indices:
            while index != ROOT and index not in kept:
                kept.add(index)
                index = self._nodes[index].turn.parent
        places = {index: place for place, index in enumerate(sorted(kept))}
        turns = []
        for index in places:
            turn = self._nodes[index].turn
            reason = turn.finish_reason or (FinishReason.unfinished if turn.sampled else None)
            turns.append(replace(turn, parent=places.get(turn.parent, ROOT), finish_reason=reason))
        return tuple(turns), places


def _at_most(sampling: SamplingConfig, max_new_tokens: int) -> SamplingConfig:
    return sampling if sampling.max_new_tokens == max_new_tokens else replace(sampling, max_new_tokens=max_new_tokens)


def _given_key(parent: int, token_ids: np.ndarray, images: Sequence[PlacedImage]) -> tuple[int, bytes, tuple[str, ...]]:
    return parent, token_ids.tobytes(), tuple(placed.image.digest for placed in images)


def _int32(tokens: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.asarray(tokens, dtype=np.int32)
