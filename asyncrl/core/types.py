"""The nouns of the system: what travels between rollout fleet, replay buffer, learner group and controller.

What an episode writes stands in `asyncrl.core.trajectory`. Arrays are numpy, so that the buffer and the fleet need
no torch. Letters: P prompt tokens, G trajectories of a prompt group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import numpy as np


class FinishReason(StrEnum):
    """Why a sampled turn ended; ``unfinished`` only in saved progress, where it did not."""

    stop = "stop"
    length = "length"
    unfinished = "unfinished"


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One row of the prompt stream.

    Attributes:
        group_id: Position in the run's seeded prompt order; unique in the run. Example: 4711.
        prompt_ids: [P] int32 token ids.
        ground_truth: What the reward function compares with; any msgpack value. Example: ``"54321"``.
        data_source: Names the reward function's task. Example: ``"reverse"``.
        extra: Further columns for the reward function.
    """

    group_id: int
    prompt_ids: np.ndarray
    ground_truth: Any = None
    data_source: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class AnsweredPrompt:
    """What the answers to a held-out prompt earned, all of them sampled under one policy version.

    Attributes:
        group_id: See `Prompt`.
        data_source: See `Prompt`.
        sampled: Reward of each answer at the training temperature.
        greedy: Reward of the greedy answer.
        response_lengths: Tokens of each answer, the greedy one last.
        num_truncated: Answers that hit the length limit.
        reward_failure: Why the reward failed; then there are no rewards. Empty where it did not.
    """

    group_id: int
    data_source: str = ""
    sampled: tuple[float, ...] = ()
    greedy: float | None = None
    response_lengths: tuple[int, ...] = ()
    num_truncated: int = 0
    reward_failure: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """The right, and the duty, to roll out one prompt group.

    Attributes:
        prompt: What to roll out.
        attempt: Fence: a put under an older attempt is refused. 0 is the first attempt.
        engine_version: u, the policy version that the worker's engine served at admission.
        deadline_version: u + max_lag, the last learner version that may consume the group.
    """

    prompt: Prompt
    attempt: int
    engine_version: int
    deadline_version: int


@dataclass(frozen=True, kw_only=True)
class GroupSummary:
    """What ledger and controller know of a stored group: metadata, never tokens.

    Attributes:
        group_id: See `Prompt`; ``attempt``: see `Lease`.
        num_prompt_tokens: P.
        response_lengths: [G] ints, tokens after the prompt (policy's and environment's).
        num_tokens: Tokens the policy wrote, over all samples; the unit of the token account.
        oldest_version: Version of the group's oldest token; ``newest_version``: of its newest.
        rewards: [G] floats, what each trajectory earned: its outcome and the rewards of its turns.
        branch_tokens: [G] ints, tokens of all branches of each trajectory, prompts included; empty where each is one
            branch below the prompt.
        num_branches: [G] ints, likewise.
        num_truncated: Trajectories with a turn that hit the length limit; baselines are not counted.
        metrics: Name and mean of each of the trajectories' metrics, sorted; baselines are left out.
    """

    group_id: int
    attempt: int
    num_prompt_tokens: int
    response_lengths: tuple[int, ...]
    num_tokens: int
    oldest_version: int
    newest_version: int
    rewards: tuple[float, ...]
    branch_tokens: tuple[int, ...] = ()
    num_branches: tuple[int, ...] = ()
    num_truncated: int = 0
    metrics: tuple[tuple[str, float], ...] = ()

    @property
    def is_scored(self) -> bool:
        """Whether every reward is a finite number. A reward model may fail to give one."""
        return all(map(math.isfinite, self.rewards))


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The batch of one learner step, as metadata.

    Attributes:
        version: Learner version that consumes the batch; the step takes it to ``version + 1``.
        groups: The B groups of the batch.
    """

    version: int
    groups: Sequence[GroupSummary]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenAccount:
    """Every token the policy wrote is somewhere: generated = trained + dropped + buffered + in_flight."""

    generated: int
    trained: int
    dropped: int
    buffered: int
    in_flight: int

    @property
    def balance(self) -> int:
        """Zero when every token is accounted for."""
        return self.generated - self.trained - self.dropped - self.buffered - self.in_flight


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferStats:
    """The ledger at one moment.

    Attributes:
        learner_version: Version that the next batch will be consumed at.
        groups: Groups by state: queued, leased, stored, planned, consumed, dropped.
        tokens_trained: Policy tokens of consumed groups.
        tokens_dropped: Policy tokens of dropped groups, abandoned attempts and refused puts, by reason.
        tokens_buffered: Policy tokens of stored and planned groups, and of prefixes handed on to a next attempt.
        lag_histogram: Realised lag (learner steps) to number of consumed groups.
        puts_refused: Refused puts by reason (duplicate, expired, …).
        stored_bytes: Payload bytes held.
        leases_waiting: Workers now waiting for admission.
        mean_length_kept: Mean response length of consumed samples, in tokens.
        mean_length_dropped: Mean response length of dropped samples, in tokens; 0 when none was dropped. Against
            ``mean_length_kept`` it is the length bias of dropping.
        mean_length_dropped_by_reason: The same for each reason of ``tokens_dropped`` that ended whole groups.
        groups_dropped: The dropped groups by reason: a filter's name, or ``stale``.
        filtered_in_a_row: Finished groups that filters have dropped since the last one that was stored.
        held_bytes: Bytes held in all: payloads, saved prefixes, prompts, and what waits to be queued.
    """

    learner_version: int
    groups: Mapping[str, int]
    tokens_trained: int
    tokens_dropped: Mapping[str, int]
    tokens_buffered: int
    lag_histogram: Mapping[int, int]
    puts_refused: Mapping[str, int]
    stored_bytes: int
    leases_waiting: int
    mean_length_kept: float
    mean_length_dropped: float
    mean_length_dropped_by_reason: Mapping[str, float] = field(default_factory=dict)
    groups_dropped: Mapping[str, int] = field(default_factory=dict)
    filtered_in_a_row: int = 0
    held_bytes: int = 0


COLLECTIVE_SCHEME = "gloo://"
"""Of what engines' hosts receive."""


ENGINE_SCHEME = "engine://"
"""Of what engines receive themselves, as they load."""


OfferKind = Literal["full", "delta", "adapter"]
"""What a version's data hold: every byte, what changed since another version, or what adapts frozen weights."""


FROZEN = -1
"""Stands for the version of the frozen weights below adapters, which are no policy version."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightOffer:
    """A policy version that engines may load.

    Attributes:
        version: Learner steps contained in the weights.
        manifest: Path of the manifest, readable where the engine runs; where it is received first, of whom. Example:
            ``"gloo://10.0.0.5:41234"``, or ``"engine://10.0.0.5:41234"``, see `asyncrl.weights.collective`.
        digest: Of the manifest's bytes, as `digest_of`.
        num_bytes: Bytes of all tensors, of an adapter also of the frozen weights; deadlines scale with it.
        kind: A delta becomes a full version on the engine's side before the engine loads it; an adapter is loaded, or
            merged into the frozen weights, by the engine.
        base_version: To which a delta applies; `FROZEN` for an adapter, None for a full version.
        incarnation: How often the learner had been started again from a checkpoint. The same version of two
            incarnations may be different weights.
        access: Keys of who sends the weights, see `ChannelAddress`, never shown; empty where they are read.
    """

    version: int
    manifest: str
    digest: str
    num_bytes: int
    kind: OfferKind = "full"
    base_version: int | None = None
    incarnation: int = 0
    access: str = field(default="", repr=False)

    @property
    def name(self) -> str:
        """For messages. Example: ``"policy version 7"``."""
        return "the frozen weights" if self.version == FROZEN else f"policy version {self.version}"

    @property
    def is_collective(self) -> bool:
        """Whether the weights have to be received before they can be read."""
        return self.manifest.startswith(COLLECTIVE_SCHEME)

    @property
    def is_sent_to_engines(self) -> bool:
        """Whether the ranks of an engine receive the weights as they load them."""
        return self.manifest.startswith(ENGINE_SCHEME)

    @property
    def sender(self) -> str:
        """Host and port of who sends the weights; empty where they are read."""
        return self.manifest.partition("://")[2]
