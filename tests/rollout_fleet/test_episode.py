"""Episodes with an engine that computes each token from its context, so a wrong context is detected."""

from __future__ import annotations

import zlib
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.core.errors import EpisodeOverflow
from asyncrl.core.trajectory import ROOT, Trajectory, TrajectoryGroup
from asyncrl.core.types import FinishReason
from rollout_fleet.config import SamplingConfig
from rollout_fleet.engines.engine import SampleOutput
from rollout_fleet.episodes import PROMPT, Episode, EpisodeBudget

PROMPT_IDS = np.array([7, 8], dtype=np.int32)
AMPLE = EpisodeBudget(max_turns=1000, max_tokens=100_000, max_context=10_000)


def next_token(context: np.ndarray) -> tuple[int, float, bool]:
    """Return three values: the token that follows a context, its log-prob, and whether the token ends the turn."""
    number = zlib.crc32(np.ascontiguousarray(context, dtype=np.int32).tobytes())
    return number % 50, -float(number % 97 + 1), number % 5 == 0


class Died(Exception):
    """Raised when the test's engine dies."""


@dataclass
class Engine:
    """An engine that writes at most ``most_at_once`` tokens per request and then aborts the request.

    The engine dies after ``dies_after`` tokens. ``written`` maps each context to the policy versions of the
    tokens that were sampled after this context.
    """

    version: int = 0
    most_at_once: int = 1000
    dies_after: int = 1 << 30
    written: dict[bytes, set[int]] = field(default_factory=dict)
    num_written: int = 0

    def finish(self, episode: Episode) -> None:
        """Answer the episode's requests until all turns are finished."""
        while requests := episode.next_requests():
            for request in requests:
                episode.take(request.id, self.answer(request.prompt_ids, request.sampling.max_new_tokens))
                if not self.dies_after:
                    raise Died

    def answer(self, context: np.ndarray, max_new_tokens: int) -> SampleOutput:
        assert max_new_tokens >= 1
        ids, logprobs, reason = [], [], None
        while reason is None and len(ids) < self.most_at_once and self.dies_after:
            token, logprob, ends = next_token(context)
            self.written.setdefault(context.tobytes(), set()).add(self.version)
            self.num_written += 1
            context = np.append(context, token).astype(np.int32)
            ids.append(token)
            logprobs.append(logprob)
            reason = FinishReason.stop if ends else FinishReason.length if len(ids) == max_new_tokens else None
            self.dies_after -= 1
        return SampleOutput(
            token_ids=np.array(ids, dtype=np.int32),
            logprobs=np.array(logprobs, dtype=np.float32),
            versions=np.full(len(ids), self.version, dtype=np.int32),
            finish_reason=reason,
        )


@dataclass
class Environment:
    """A fake environment that runs a list of steps on an episode.

    A step is a tuple of four values: its kind, a number that chooses the parent turn, the tokens to send, and the
    largest number of tokens to sample. A step of the kind ``wait`` finishes all running turns. Afterwards these turns
    can be parents. ``paths`` maps each turn to all tokens from the root to the end of the turn.
    """

    episode: Episode
    engine: Engine
    parents: list[int] = field(default_factory=lambda: [PROMPT, ROOT])
    paths: dict[int, list[int]] = field(default_factory=lambda: {PROMPT: PROMPT_IDS.tolist(), ROOT: []})
    asked: list[int] = field(default_factory=list)
    num_overflows: int = 0

    def run(self, program):
        for kind, choice, tokens, most in program:
            parent = self.parents[choice % len(self.parents)]
            if kind == "wait":
                self.wait()
            elif kind == "give" and tokens:
                self.give(parent, tokens)
            elif kind == "sample" and (tokens or parent != ROOT):
                self.sample(parent, tokens, most)
        self.wait()

    def give(self, parent, tokens):
        before = self.episode.progress()
        try:
            turn = self.episode.give(parent, tokens)
        except EpisodeOverflow:
            self.num_overflows += 1
            assert same(before, self.episode.progress()), "a refused request must not change the forest"
        else:
            self.paths[turn] = [*self.paths[parent], *tokens]
            self.parents.append(turn)

    def sample(self, parent, tokens, most):
        before = self.episode.progress()
        try:
            turn = self.episode.sample(parent, tokens, SamplingConfig(max_new_tokens=most))
        except EpisodeOverflow:
            self.num_overflows += 1
            assert same(before, self.episode.progress()), "a refused request must not change the forest"
        else:
            self.paths[turn] = [*self.paths[parent], *tokens]
            self.asked.append(turn)

    def wait(self):
        for request in self.episode.next_requests():
            turn = int(request.id.split("-")[1])
            so_far = self.episode.turn(turn).token_ids.tolist()
            assert request.prompt_ids.tolist() == [*self.paths[turn], *so_far], (
                "the prompt must be the path and new tokens"
            )
            self.episode.take(request.id, self.engine.answer(request.prompt_ids, request.sampling.max_new_tokens))
            if not self.engine.dies_after:
                raise Died
        self.engine.finish(self.episode)
        for turn in self.asked:
            self.paths[turn] += self.episode.turn(turn).token_ids.tolist()
            self.parents.append(turn)
            assert self.episode.path(turn).tolist() == self.paths[turn]
        self.asked.clear()


def same(one: Trajectory, other: Trajectory) -> bool:
    return [(turn.parent, turn.token_ids.tolist(), turn.finish_reason) for turn in one.turns] == [
        (turn.parent, turn.token_ids.tolist(), turn.finish_reason) for turn in other.turns
    ]


def as_stored(trajectory: Trajectory) -> Trajectory | None:
    """Convert a trajectory to a group's columns and back. Returns None if the trajectory has no sampled tokens."""
    if not any(turn.sampled for turn in trajectory.turns):
        return None
    group = TrajectoryGroup.from_trajectories([trajectory], group_id=4, attempt=0)
    return group.trajectories()[0]


def check(episode: Episode, engine: Engine) -> None:
    """Check that each token is trained exactly once, with the same preceding tokens as when it was sampled."""
    trajectory = episode.trajectory(1.0)
    if not any(turn.sampled for turn in trajectory.turns):
        assert episode.num_tokens == 0
        return
    group = TrajectoryGroup.from_trajectories([trajectory], group_id=4, attempt=0)
    assert group.summary.num_tokens == episode.num_tokens
    num_trained = 0
    for branch in group.branches:
        ids, logprobs, versions = (group.along(branch, name) for name in ("token_ids", "logprobs", "versions"))
        for place in np.flatnonzero(group.trained_mask(branch)).tolist():
            token, logprob, _ = next_token(ids[:place])
            assert (ids[place], logprobs[place]) == (token, logprob)
            assert int(versions[place]) in engine.written[ids[:place].tobytes()]
            num_trained += 1
    assert num_trained == episode.num_tokens


tokens = st.lists(st.integers(0, 3), max_size=3)
steps = st.tuples(st.sampled_from(["give", "sample", "sample", "wait"]), st.integers(0, 9), tokens, st.integers(1, 9))
programs = st.lists(steps, max_size=20)


@given(programs, st.integers(1, 4))
def test_every_trained_token_has_the_context_in_which_it_was_sampled(program, most_at_once):
    episode, engine = Episode("e", PROMPT_IDS, AMPLE), Engine(most_at_once=most_at_once)
    Environment(episode, engine).run(program)
    check(episode, engine)
    assert engine.num_written == episode.num_tokens


@given(
    programs,
    st.builds(
        EpisodeBudget,
        max_turns=st.integers(0, 4),
        max_tokens=st.integers(0, 20),
        max_context=st.integers(2, 20),
        max_tree_tokens=st.integers(0, 40),
    ),
)
def test_an_episode_never_exceeds_its_budget(program, budget):
    episode, engine = Episode("e", PROMPT_IDS, budget), Engine(most_at_once=3)
    environment = Environment(episode, engine)
    environment.run(program)
    check(episode, engine)
    turns = episode.trajectory(0.0).turns
    assert len(episode.sampled) == sum(turn.sampled for turn in turns) <= budget.max_turns
    assert episode.num_tokens <= budget.max_tokens
    given = [turn for turn in environment.paths if turn > PROMPT and not episode.turn(turn).sampled]
    kept = episode.trajectory(0.0, turn_rewards=dict.fromkeys(given, 1.0))
    stored = as_stored(kept)
    if stored is None:
        return
    group = TrajectoryGroup.from_trajectories([kept], group_id=4, attempt=0)
    lengths = [len(group.along(branch, "token_ids")) for branch in group.branches]
    assert max(lengths) <= budget.max_context
    assert not budget.max_tree_tokens or sum(lengths) <= budget.max_tree_tokens


@given(programs, st.lists(st.integers(1, 12), max_size=5), st.integers(1, 4))
def test_a_replayed_episode_equals_an_uninterrupted_one_and_samples_no_token_twice(program, lives, most_at_once):
    whole, engine = Episode("e", PROMPT_IDS, AMPLE), Engine()
    Environment(whole, engine).run(program)
    engine, recorded = Engine(most_at_once=most_at_once), None
    for dies_after in [*lives, 1 << 30]:
        engine.version += 1
        engine.dies_after = dies_after
        episode = Episode("e", PROMPT_IDS, AMPLE, recorded=recorded)
        try:
            Environment(episode, engine).run(program)
        except Died:
            recorded = as_stored(episode.progress())
        else:
            break
        assert sum(len(turn.token_ids) for turn in episode.progress().turns if turn.sampled) == engine.num_written
    assert (episode.num_dropped, episode.num_waiting) == (0, 0)
    assert engine.num_written == episode.num_tokens == whole.num_tokens
    check(episode, engine)
    assert sorted(paths_of(episode)) == sorted(paths_of(whole))


def paths_of(episode: Episode) -> list[list[int]]:
    turns = episode.trajectory(0.0).turns
    paths: list[list[int]] = []
    for turn in turns:
        paths.append([*(paths[turn.parent] if turn.parent != ROOT else []), *turn.token_ids.tolist()])
    return paths


@given(programs, programs, st.integers(1, 40))
def test_every_recorded_token_is_counted_as_replayed_dropped_or_waiting(before, after, dies_after):
    engine = Engine(dies_after=dies_after)
    first = Episode("e", PROMPT_IDS, AMPLE)
    with suppress(Died):
        Environment(first, engine).run(before)
    engine.dies_after = 1 << 30
    num_recorded = engine.num_written
    engine.version += 1
    second = Episode("e", PROMPT_IDS, AMPLE, recorded=as_stored(first.progress()))
    Environment(second, engine).run(after)
    check(second, engine)
    assert second.num_replayed + second.num_dropped + second.num_waiting == num_recorded
    assert second.num_tokens == second.num_replayed + engine.num_written - num_recorded


def sample_whole(episode: Episode, parent: int, new_tokens: list[int]) -> int:
    turn = episode.sample(parent, new_tokens, SamplingConfig(max_new_tokens=4))
    Engine().finish(episode)
    return turn


def test_siblings_share_their_given_turn_and_a_new_root_does_not_contain_the_prompt():
    episode = Episode("4-0-1", PROMPT_IDS, AMPLE)
    call = sample_whole(episode, PROMPT, [])
    first, second = (sample_whole(episode, call, [30, 31]) for _ in range(2))
    again = sample_whole(episode, ROOT, [9])
    assert first != second
    assert episode.turn(first).parent == episode.turn(second).parent == episode.give(call, [30, 31])
    assert episode.path(again)[0] == 9
    turns = episode.trajectory(2.0, turn_rewards={second: 0.5}, metrics={"calls": 1.0}).turns
    assert [turn.sampled for turn in turns] == [False, True, False, True, True, False, True]
    assert [turn.parent for turn in turns] == [ROOT, 0, 1, 2, 2, ROOT, 5]
    assert episode.trajectory(2.0, turn_rewards={second: 0.5}).turn_rewards == {4: 0.5}


def test_a_trajectory_contains_a_given_leaf_turn_only_if_it_has_a_reward():
    episode = Episode("e", PROMPT_IDS, AMPLE)
    call = sample_whole(episode, PROMPT, [])
    result = episode.give(call, [30])
    assert len(episode.trajectory(0.0).turns) == 2
    assert episode.trajectory(0.0, turn_rewards={result: 1.0}).turn_rewards == {2: 1.0}


def test_a_changed_request_drops_the_recorded_turns_after_it_only_in_its_branch():
    first = Episode("e", PROMPT_IDS, AMPLE)
    left, right = (sample_whole(first, PROMPT, [token]) for token in (1, 2))
    for parent in (left, right):
        sample_whole(first, sample_whole(first, parent, [3]), [4])
    second = Episode("e", PROMPT_IDS, AMPLE, recorded=as_stored(first.progress()))
    left, right = (second.sample(PROMPT, [token], SamplingConfig(max_new_tokens=4)) for token in (1, 2))
    assert second.running == [], "the record must answer both turns"
    other = second.sample(left, [5], SamplingConfig(max_new_tokens=4))
    dropped = second.num_dropped
    assert (second.running, dropped > 0, second.num_waiting > 0) == ([other], True, True)
    Engine().finish(second)
    late = second.sample(left, [3], SamplingConfig(max_new_tokens=4))
    assert second.running == [late], "a dropped turn must be sampled again"
    Engine().finish(second)
    follow = second.sample(second.sample(right, [3], SamplingConfig(max_new_tokens=4)), [4], SamplingConfig())
    assert (second.running, second.num_dropped, second.num_waiting) == ([], dropped, 0)
    assert second.turn(follow).finish_reason is not None


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (EpisodeBudget(max_turns=1, max_tokens=99, max_context=99), "episode 4-0-1 has used 1 of max_turns = 1"),
        (EpisodeBudget(max_turns=9, max_tokens=4, max_context=99), "used 4 of max_tokens = 4"),
        (EpisodeBudget(max_turns=9, max_tokens=99, max_context=7), "used 7 of max_context = 7"),
        (
            EpisodeBudget(max_turns=9, max_tokens=99, max_context=99, max_tree_tokens=12),
            "used 13 of max_tree_tokens = 12",  # the path of the running turn has 6 tokens, the new path 7
        ),
    ],
)
def test_a_request_that_exceeds_the_budget_is_refused_before_it_is_sent(budget, message):
    episode = Episode("4-0-1", PROMPT_IDS, budget)
    episode.sample(PROMPT, [], SamplingConfig(max_new_tokens=4))
    with pytest.raises(EpisodeOverflow, match=message):
        episode.sample(PROMPT, [1, 2, 3, 4, 5], SamplingConfig(max_new_tokens=4))
    assert len(episode.next_requests()) == 1


def test_a_given_turn_that_exceeds_the_budget_is_refused():
    episode = Episode("4-0-1", PROMPT_IDS, EpisodeBudget(max_turns=9, max_tokens=99, max_context=7))
    with pytest.raises(EpisodeOverflow, match="episode 4-0-1 would use 8 of max_context = 7"):
        episode.give(PROMPT, [1] * 6)
    assert episode.give(PROMPT, [1] * 5) == episode.give(PROMPT, [1] * 5)
    budget = EpisodeBudget(max_turns=9, max_tokens=99, max_context=99, max_tree_tokens=10)
    episode = Episode("4-0-1", PROMPT_IDS, budget)
    first = episode.give(PROMPT, [1, 2])
    assert episode.give(first, [3, 4]) == 2  # the only path now has 6 tokens
    with pytest.raises(EpisodeOverflow, match="would use 11 of max_tree_tokens = 10"):
        episode.give(first, [5])
    assert episode.give(PROMPT, [5, 5]) == 3


def test_a_single_path_can_use_the_token_budget_of_the_whole_tree():
    episode, engine = Episode("e", PROMPT_IDS, replace(AMPLE, max_tree_tokens=24)), Engine()
    parent = PROMPT
    while len(episode.path(parent)) < 24:
        parent = episode.sample(parent, [], SamplingConfig(max_new_tokens=4))
        engine.finish(episode)
    with pytest.raises(EpisodeOverflow, match="used 24 of max_tree_tokens = 24"):
        episode.sample(parent, [], SamplingConfig(max_new_tokens=4))


def test_an_episode_refuses_invalid_calls_with_its_name():
    episode = Episode("4-0-1", PROMPT_IDS, AMPLE)
    running = episode.sample(PROMPT, [], SamplingConfig(max_new_tokens=4))
    for call, message in (
        (lambda: episode.give(PROMPT, []), "episode 4-0-1: a given turn needs at least one token"),
        (lambda: episode.sample(ROOT, [], SamplingConfig()), "a new sequence needs at least one token"),
        (lambda: episode.give(running, [1]), "turn 1 is still running; wait for its answer first"),
        (lambda: episode.give(7, [1]), "turn 7 was neither given nor sampled"),
        (lambda: episode.trajectory(0.0), r"turns \[1\] are still running; let them finish first"),
        (lambda: Episode("e", PROMPT_IDS[:1], AMPLE, recorded=episode.progress()), "belong to another prompt"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
