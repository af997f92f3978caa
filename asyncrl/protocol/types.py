"""The nouns of the system: what travels between rollout fleet, replay buffer, learner group and controller.

Arrays are numpy, so that the buffer and the fleet need no torch. Letters: P prompt tokens, G samples of a prompt
group, R response tokens of all samples of a group laid end to end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

import numpy as np


class FinishReason(StrEnum):
    """Why a sample ended; ``unfinished`` only in saved progress, where it did not."""

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
        group_id: See `Prompt`.
        attempt: See `Lease`.
        num_prompt_tokens: P.
        response_lengths: [G] ints, tokens after the prompt (policy's and environment's).
        num_tokens: Tokens the policy wrote, over all samples; the unit of the token account.
        oldest_version: Version of the group's oldest token.
        newest_version: Version of its newest token.
        rewards: [G] floats.
    """

    group_id: int
    attempt: int
    num_prompt_tokens: int
    response_lengths: tuple[int, ...]
    num_tokens: int
    oldest_version: int
    newest_version: int
    rewards: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class TrajectoryGroup:
    """G finished trajectories of one prompt, responses laid end to end.

    A greedy baseline (ReMax) is one more trajectory, the last, with nothing in its mask.

    Attributes:
        group_id: See `Prompt`.
        attempt: See `Lease`.
        prompt_ids: [P] int32, shared by all samples.
        response_ids: [R] int32.
        response_lengths: [G] int32, sums to R; every entry is at least 1.
        response_mask: [R] bool, True where the policy wrote the token.
        behavior_logprobs: [R] float32, log-prob at sampling, under the sampling temperature; 0 where masked out.
        versions: [R] int32, the policy version that the engine reported for the token; where masked out, that of
            the policy token before it.
        rewards: [G] float32.
        finish_reasons: G reasons.
    """

    group_id: int
    attempt: int
    prompt_ids: np.ndarray
    response_ids: np.ndarray
    response_lengths: np.ndarray
    response_mask: np.ndarray
    behavior_logprobs: np.ndarray
    versions: np.ndarray
    rewards: np.ndarray
    finish_reasons: tuple[FinishReason, ...]

    @property
    def num_samples(self) -> int:
        """G."""
        return len(self.response_lengths)

    @cached_property
    def summary(self) -> GroupSummary:
        """The metadata that travels in the header of a put."""
        return GroupSummary(
            group_id=self.group_id,
            attempt=self.attempt,
            num_prompt_tokens=len(self.prompt_ids),
            response_lengths=tuple(self.response_lengths.tolist()),
            num_tokens=int(np.count_nonzero(self.response_mask)),
            oldest_version=int(self.versions.min()),
            newest_version=int(self.versions.max()),
            rewards=tuple(self.rewards.tolist()),
        )


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
class WeightSnapshot:
    """Weights of one policy version, published by the learner and loaded by engines.

    Attributes:
        version: Learner steps contained in the weights.
        path: Directory in Hugging Face layout (``config.json``, ``model.safetensors``), readable on this host.
        checksums: Tensor name to hexadecimal digest, as the engine's own weight checker computes it; empty where
            the engine has none.
    """

    version: int
    path: str
    checksums: Mapping[str, str] = field(default_factory=dict)


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
