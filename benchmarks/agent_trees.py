"""Counts the tokens that the learner computes for trees of turns (episodes whose messages have several continuations).

The learner can compute the common tokens of branches once, or each branch separately. The trees come from a search
agent with parallel tools, a retry, a sub-agent and three drafts. The agent continues one of the drafts. It summarizes
its context when the context is half full. The episodes are objects of the fleet's class
`rollout_fleet.episodes.Episode`, with random tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from asyncrl.core.trajectory import ROOT, TrajectoryGroup
from asyncrl.core.types import FinishReason
from learner.packing import Packer
from learner.types import TokenSequence, group_sequences
from rollout_fleet.config import SamplingConfig
from rollout_fleet.engines.engine import SampleOutput
from rollout_fleet.episodes import PROMPT, Episode, EpisodeBudget

VOCABULARY = 32_000
SYSTEM_TOKENS, QUESTION_TOKENS = 448, 64
NUM_GROUPS, NUM_SAMPLES = 4, 8
MAX_CONTEXT = 8_192
MAX_TOKENS_PER_MICRO_BATCH = 16_384


@dataclass(frozen=True, kw_only=True)
class AgentLengths:
    """Sizes of the parts of an episode, as ranges (smallest, largest). All sizes except ``rounds`` are in tokens.

    Attributes:
        turn: A turn with reasoning and calls of tools.
        result: One result of a tool. The agent calls two tools at a time.
        summary: The summary of earlier turns. A new root (conversation) begins with the system message and the summary.
        rounds: How often the agent searches in one episode.
    """

    turn: tuple[int, int] = (60, 180)
    result: tuple[int, int] = (150, 500)
    summary: tuple[int, int] = (150, 300)
    rounds: tuple[int, int] = (5, 14)


class SearchAgent:
    """Plays one episode as a search agent. Random tokens replace the tokens that a policy would sample."""

    def __init__(self, name: str, prompt_ids: np.ndarray, lengths: AgentLengths, rng: np.random.Generator) -> None:
        budget = EpisodeBudget(max_turns=100, max_tokens=100_000, max_context=MAX_CONTEXT)
        self.episode = Episode(name, prompt_ids, budget)
        self._system = prompt_ids[:SYSTEM_TOKENS].tolist()
        self._lengths = lengths
        self._rng = rng

    def play(self) -> Episode:
        """Play the episode: search, summarize the context when the context is half full, write three drafts, answer."""
        turn = self._turn(PROMPT, [])
        for number in range(self._between(self._lengths.rounds)):
            results = self._results()
            if number == 2:  # Let a sub-agent search with its own history.
                self._turn(self._turn(ROOT, [*self._system, *self._tokens(self._lengths.summary)]), self._results())
            if len(self.episode.path(turn)) > MAX_CONTEXT // 2:
                turn = self._turn(ROOT, [*self._system, *self._tokens(self._lengths.summary)])
                continue
            if self._rng.random() < 0.1:  # Repeat the search. The new results replace the old results.
                self._turn(turn, results)
                results = self._results()
            turn = self._turn(turn, results)
        drafts = [self._turn(turn, self._results()[:50]) for _ in range(3)]
        self._turn(drafts[0], self._tokens((30, 60)))
        return self.episode

    def _turn(self, parent: int, new_tokens: Sequence[int]) -> int:
        length = self._between(self._lengths.turn)
        turn = self.episode.sample(parent, new_tokens, SamplingConfig(max_new_tokens=length))
        (request,) = self.episode.next_requests()
        output = SampleOutput(
            token_ids=self._rng.integers(0, VOCABULARY, length).astype(np.int32),
            logprobs=np.full(length, -1.0, dtype=np.float32),
            versions=np.zeros(length, dtype=np.int32),
            finish_reason=FinishReason.stop,
        )
        self.episode.take(request.id, output)
        return turn

    def _results(self) -> list[int]:
        return [*self._tokens(self._lengths.result), *self._tokens(self._lengths.result)]

    def _tokens(self, lengths: tuple[int, int]) -> list[int]:
        return self._rng.integers(0, VOCABULARY, self._between(lengths)).tolist()

    def _between(self, bounds: tuple[int, int]) -> int:
        return int(self._rng.integers(bounds[0], bounds[1] + 1))


def search_groups(
    *, num_groups: int = NUM_GROUPS, num_samples: int = NUM_SAMPLES, lengths: AgentLengths | None = None, seed: int = 0
) -> list[TrajectoryGroup]:
    """Return ``num_groups`` groups of ``num_samples`` episodes of the search agent, with random tokens.

    All prompts begin with the same `SYSTEM_TOKENS` tokens, which stand for a system message.
    """
    rng = np.random.default_rng(seed)
    system = rng.integers(0, VOCABULARY, SYSTEM_TOKENS)
    groups = []
    for group_id in range(num_groups):
        prompt_ids = np.concatenate([system, rng.integers(0, VOCABULARY, QUESTION_TOKENS)]).astype(np.int32)
        agents = [
            SearchAgent(f"{group_id}-0-{i}", prompt_ids, lengths or AgentLengths(), rng) for i in range(num_samples)
        ]
        trajectories = [agent.play().trajectory(0.0) for agent in agents]
        groups.append(TrajectoryGroup.from_trajectories(trajectories, group_id=group_id, attempt=0))
    return groups


def packed_tokens(sequences: Sequence[TokenSequence], *, share: bool) -> int:
    """Return the number of tokens that the learner's forward pass computes for the sequences.

    The sequences are packed as in the trainer. If ``share`` is true, tokens that sequences have in common are packed
    only once.
    """
    batches = Packer(max_tokens=MAX_TOKENS_PER_MICRO_BATCH, whole=False, share_prompts=share).pack(sequences)
    return sum(len(batch.input_ids) for batch in batches)


def tree_tokens(groups: Sequence[TrajectoryGroup]) -> Mapping[str, float]:
    """Count the tokens of the groups in several ways.

    Returns:
        Numbers of tokens by name. ``shared``: common tokens of branches are packed once. ``branches``: each branch (a
        path from the root to a leaf) is packed separately. ``turns``: each sampled turn is packed separately with its
        whole context, as in a trainer of single requests. ``distinct``: each token of the trees is counted once. Every
        packing needs at least this number of tokens. ``trained``: tokens in the loss. The result also has the number of
        branches (``num_branches``) and the number of turns (``num_turns``).
    """
    sequences = [sequence for group in groups for sequence in group_sequences(group)]
    sampled = [turn for sequence in sequences for turn in sequence.turns]
    return {
        "shared": packed_tokens(sequences, share=True),
        "branches": packed_tokens(sequences, share=False),
        "turns": sum(turn.stop for turn in sampled),
        "distinct": sum(len(group.token_ids) for group in groups),
        "num_branches": len(sequences),
        "num_turns": len(sampled),
        "trained": sum(int(sequence.loss_mask.sum()) for sequence in sequences),
    }
