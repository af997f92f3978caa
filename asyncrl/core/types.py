"""The records that the rollout fleet, the replay buffer, the learner group and the controller exchange.

Arrays are numpy arrays, because the buffer and the fleet do not load torch. P is the number of prompt tokens, and G the
number of trajectories of a prompt group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np


class FinishReason(StrEnum):
    """Why a sampled turn ended. ``unfinished`` occurs only in the saved prefix of a running group."""

    stop = "stop"
    length = "length"
    unfinished = "unfinished"


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One row of the prompt stream.

    Attributes:
        group_id: Index in the run's seeded prompt order; unique in the run. Example: 4711.
        prompt_ids: [P] int32 token ids.
        ground_truth: Expected answer, for the reward function; any msgpack value. Example: ``"54321"``.
        data_source: Name of the task, for the reward function. Example: ``"reverse"``.
        messages: The row's chat messages, in the form of OpenAI's API; empty for a row of plain text without an
            environment.
        tools: JSON schemas of the tools that the model may call, in the same form.
        environment: Name of the row's own environment; empty for the environment of the run.
        environment_options: Further options of the environment for this row.
    """

    group_id: int
    prompt_ids: np.ndarray
    ground_truth: Any = None
    data_source: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Mapping[str, Any], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    environment: str = ""
    environment_options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class AnsweredPrompt:
    """Rewards of the answers to one held-out prompt. One policy version sampled all answers.

    Attributes:
        sampled: Reward of each answer at the training temperature.
        response_lengths: Tokens of each answer; the greedy answer is last.
        num_truncated: Answers that reached the length limit.
        reward_failure: Why the reward function failed; empty if it succeeded. A failure leaves no rewards.
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
    """The permission of one worker to roll out one prompt group.

    Attributes:
        attempt: Number of the attempt, from 0. The buffer refuses a put of an older attempt.
        engine_version: The policy version that the worker's engine served at admission.
        deadline_version: ``engine_version`` + max_lag, the last learner version that may consume the group.
    """

    prompt: Prompt
    attempt: int
    engine_version: int
    deadline_version: int


@dataclass(frozen=True, kw_only=True)
class GroupSummary:
    """Metadata of a stored group for the ledger and the controller, without the tokens.

    Attributes:
        group_id: As in `Prompt`; ``attempt``: as in `Lease`.
        response_lengths: [G] ints, tokens after the prompt, of the policy and of the environment.
        num_tokens: Tokens that the policy wrote in all trajectories; the unit of the token account.
        oldest_version: Version of the group's oldest token; ``newest_version``: of its newest.
        rewards: [G] floats: outcome plus rewards of turns, per trajectory.
        branch_tokens: [G] ints, tokens of all branches of each trajectory, including the prompt of each branch. Empty
            if every trajectory has a single branch.
        num_branches: [G] ints, number of branches of each trajectory; empty if ``branch_tokens`` is empty.
        num_truncated: Trajectories with a turn that reached the length limit, without baselines.
        metrics: Name and mean of each metric of the trajectories, without baselines.
        has_unlike_turns: True if turns have rewards, and the trajectories differ in these rewards or have branches.
        digest: `receipts.token_digest` of the tokens that the policy wrote, without baselines.
        num_uses: Number of earlier learner steps that trained on the group.
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
    has_unlike_turns: bool = False
    digest: int = 0
    num_uses: int = 0
    data_source: str = ""

    @property
    def is_scored(self) -> bool:
        """Whether every reward of the group is finite. A reward model may return NaN or infinity."""
        return all(map(math.isfinite, self.rewards))

    @property
    def has_equal_rewards(self) -> bool:
        """Whether all trajectories of the group have the same total reward, and the same rewards of single turns."""
        return len(set(self.rewards)) == 1 and not self.has_unlike_turns


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Metadata of the batch of one learner step.

    Attributes:
        version: Learner version that consumes the batch; ``version + 1`` after the step.
    """

    version: int
    groups: Sequence[GroupSummary]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenAccount:
    """The token account: generated = trained + dropped + buffered + in_flight.

    At the first use of its group, a token counts as trained. Each further use counts in ``reused``, outside this sum.
    """

    generated: int
    trained: int
    dropped: int
    buffered: int
    in_flight: int
    reused: int = 0

    @property
    def balance(self) -> int:
        """Number of generated tokens that no other count of the account includes; 0 if the account balances."""
        return self.generated - self.trained - self.dropped - self.buffered - self.in_flight


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferStats:
    """Counts of the ledger at one moment.

    Attributes:
        learner_version: Learner version that will consume the next batch.
        groups: Groups by state: queued, leased, stored, planned, consumed, dropped. A consumed group that waits for a
            further use also counts as stored or planned.
        tokens_trained: Policy tokens of consumed groups, once per group.
        tokens_dropped: Policy tokens of dropped groups, abandoned attempts and refused puts, by reason.
        tokens_buffered: Policy tokens of stored and planned groups, and of saved prefixes.
        lag_histogram: Number of uses of groups by their lag in learner steps.
        puts_refused: Refused puts by reason (duplicate, expired, …).
        leases_waiting: Workers that wait for admission.
        mean_length_kept: Mean response length of consumed samples, in tokens.
        mean_length_dropped: Mean response length of dropped samples, in tokens; 0 if none were dropped.
        mean_length_dropped_by_reason: ``mean_length_dropped`` per reason for dropping whole groups.
        groups_dropped: Dropped groups by reason: a filter's name, or ``stale``.
        filtered_in_a_row: Finished groups that filters dropped since the last stored group.
        held_bytes: All bytes of the buffer: payloads, saved prefixes and prompts.
        disk_bytes: Bytes of payloads that are only on disk; 0 without ``buffer.max_memory_bytes``.
        tokens_reused: Policy tokens of consumed groups, once per use after the first.
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
    disk_bytes: int = 0
    tokens_reused: int = 0
    groups_reused: int = 0

    @property
    def num_tokens(self) -> int:
        """Number of policy tokens that the buffer knows: trained, dropped and buffered."""
        return self.tokens_trained + self.tokens_buffered + sum(self.tokens_dropped.values())


class Carrier(StrEnum):
    """How the bytes of an offered version reach an engine.

    - ``folder``: the engine's host reads the files of the version.
    - ``host_stream``: the engine's host receives the bytes first, and the engine loads them afterwards.
    - ``engine_stream``: the engine receives the bytes while it loads them.
    """

    folder = "folder"
    host_stream = "host_stream"
    engine_stream = "engine_stream"


OfferKind = Literal["full", "delta", "adapter"]
"""Content of a version: all bytes, the changes since another version, or adapters for frozen weights."""


FROZEN = -1
"""Version number of the frozen weights that adapters are added to. The frozen weights are not a policy version."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightOffer:
    """A policy version that engines may load.

    Attributes:
        version: Policy version, the number of learner steps that produced the weights.
        manifest: Path of the manifest, readable by the engine. For a streamed version: host and port of learner rank 0.
            Example: ``"10.0.0.5:41234"``.
        digest: Digest of the manifest's bytes, by `digest_of`.
        num_bytes: Bytes of all tensors; for an adapter, including the frozen weights. Deadlines depend on this number.
        kind: Content of the version. The engine's host converts a delta to a full version before loading.
        base_version: The version that a delta changes; `FROZEN` for an adapter, None for a full version.
        incarnation: Number of restarts of the learner from a checkpoint so far. The same version may have different
            weights in two incarnations.
        access: Secret key for the connection to the sender; empty for a version in files. ``repr`` does not show it.
    """

    version: int
    manifest: str
    digest: str
    num_bytes: int
    carrier: Carrier = Carrier.folder
    kind: OfferKind = "full"
    base_version: int | None = None
    incarnation: int = 0
    access: str = field(default="", repr=False)

    @property
    def name(self) -> str:
        """Name of the offered version for messages. Example: ``"policy version 7"``."""
        return "the frozen weights" if self.version == FROZEN else f"policy version {self.version}"
