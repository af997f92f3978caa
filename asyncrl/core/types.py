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
    """The reason why the generation of a turn ended. Only saved groups of a worker have turns with ``unfinished``."""

    stop = "stop"
    length = "length"
    unfinished = "unfinished"


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One prompt of the run: tokens for the policy, and data for the reward function and the environment.

    Attributes:
        group_id: Index in the run's seeded prompt order; unique in the run. Example: 4711.
        prompt_ids: [P] int32 token ids.
        ground_truth: Expected answer, for the reward function; any msgpack value. Example: ``"54321"``.
        data_source: Name of the task or data set. Example: ``"reverse"``.
        extra: Further values for the reward function, by name.
        messages: Chat messages of the prompt, in the form of OpenAI's API; empty if the prompt is plain text and has
            no environment.
        tools: JSON schemas of the tools that the model may call, in the form of OpenAI's API.
        environment: Name of the prompt's own environment; empty for the environment of the run.
        environment_options: Options of the environment for this prompt, in addition to the options of the run.
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
        greedy: Reward of the greedy answer; None without a greedy answer.
        response_lengths: Number of tokens of each answer; the greedy answer comes last.
        num_truncated: Number of answers that reached the length limit.
        reward_failure: Why the reward function failed; empty if it succeeded. After a failure there are no rewards.
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
    """The permission of one rollout worker to generate the trajectories of one prompt.

    Attributes:
        attempt: How many leases for the same prompt were granted before. The buffer refuses results of older attempts.
        engine_version: The policy version that the worker's engine served when the lease was granted.
        deadline_version: ``engine_version`` + ``buffer.max_lag``: the latest learner version that may train on the
            group.
    """

    prompt: Prompt
    attempt: int
    engine_version: int
    deadline_version: int


@dataclass(frozen=True, kw_only=True)
class GroupSummary:
    """Describes a finished group (G trajectories of one prompt) without its tokens, for the buffer and the controller.

    Attributes:
        group_id: The prompt's index in the run's prompt order.
        attempt: How many leases for this prompt were granted before the lease that produced the group.
        response_lengths: [G] ints, number of tokens after the prompt, from the policy and from the environment.
        num_tokens: Number of tokens that the policy sampled, except the tokens of ReMax's greedy answer.
        oldest_version: Policy version of the group's oldest token.
        newest_version: Policy version of the group's newest token.
        rewards: [G] floats: per trajectory, the reward of the outcome plus the rewards of its turns.
        branch_tokens: [G] ints, number of tokens in all branches (root-to-leaf paths of turns) of each trajectory,
            with the prompt in each branch. Empty if every trajectory has a single branch.
        num_branches: [G] ints, number of branches of each trajectory; empty if ``branch_tokens`` is empty.
        num_truncated: Number of trajectories with a turn that reached the length limit, except ReMax's greedy answer.
        metrics: One pair per reported metric: the name, and the mean over all trajectories except ReMax's greedy
            answer.
        has_unlike_turns: True if turns have rewards, and the trajectories differ in these rewards or have branches.
        digest: `receipts.token_digest` of the tokens that ``num_tokens`` counts.
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
        """True if every reward of the group is finite. A reward model can return NaN or infinity."""
        return all(map(math.isfinite, self.rewards))

    @property
    def has_equal_rewards(self) -> bool:
        """True if all trajectories of the group have the same total reward, and the same rewards of single turns."""
        return len(set(self.rewards)) == 1 and not self.has_unlike_turns


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The batch of one learner step, without its tokens.

    Attributes:
        version: Number of learner steps before this one. The step turns version ``version`` into ``version + 1``.
        groups: The prompt groups in the batch.
    """

    version: int
    groups: Sequence[GroupSummary]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenAccount:
    """Counts of the sampled tokens of a run: generated = trained + dropped + buffered + in_flight.

    A token is in flight until its worker stores or gives up the token's group. The token counts as trained after the
    learner first trains on the group. Further uses of the group count only in ``reused``, which is not in the sum.
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
    """Counts of the replay buffer at one moment. Policy tokens are tokens that the policy sampled.

    Attributes:
        learner_version: Number of finished learner steps.
        groups: Number of groups by state: queued (waits for a worker), leased (a worker generates the group), stored,
            planned (in a batch), consumed (trained on), dropped. A consumed group that waits for another use is also
            stored or planned.
        tokens_trained: Policy tokens of consumed groups, once per group.
        tokens_dropped: Policy tokens of dropped groups, abandoned attempts and refused groups, by reason.
        tokens_buffered: Policy tokens of stored and planned groups, and of saved unfinished groups.
        lag_histogram: How many times a group was trained on, by the group's lag in learner steps.
        puts_refused: Number of finished groups that the buffer refused, by reason (duplicate, expired, …).
        stored_bytes: Bytes of stored trajectories.
        leases_waiting: Number of workers that wait for permission to generate groups.
        mean_length_kept: Mean response length of consumed samples, in tokens.
        mean_length_dropped: Mean response length of dropped samples, in tokens; 0 if none were dropped.
        mean_length_dropped_by_reason: ``mean_length_dropped`` per reason for dropping whole groups.
        groups_dropped: Number of dropped groups by reason: a filter's name, or ``stale``.
        filtered_in_a_row: Number of finished groups that filters dropped after the latest stored group.
        held_bytes: All bytes of the buffer: trajectories, saved unfinished groups and prompts.
        disk_bytes: Bytes of trajectories that are only on disk; 0 without ``buffer.max_memory_bytes``.
        tokens_reused: Policy tokens of consumed groups, once for each use after the first.
        groups_reused: Number of uses of groups after their first use.
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
    """How the bytes of a published policy version reach an engine.

    - ``folder``: the version is in files, which the engine's host reads.
    - ``host_stream``: the learner sends the bytes to the engine's host. The engine loads the bytes afterwards.
    - ``engine_stream``: the learner sends the bytes to the engine. The engine loads the bytes while they arrive.
    """

    folder = "folder"
    host_stream = "host_stream"
    engine_stream = "engine_stream"


OfferKind = Literal["full", "delta", "adapter"]
"""What a published version holds: all weights, the changes since another version, or LoRA adapters."""


FROZEN = -1
"""Version number of the frozen weights that LoRA adapters are added to. These weights are not a policy version."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightOffer:
    """Tells engines where to load a policy version.

    Attributes:
        version: Policy version: the number of learner steps that produced the weights.
        manifest: Path of the manifest (the file that lists the version's tensors), readable by the engine. For a
            streamed version: host and port of learner rank 0. Example: ``"10.0.0.5:41234"``.
        digest: Digest of the manifest's bytes, by `digest_of`.
        num_bytes: Number of bytes of all tensors. With adapters, the number includes the frozen weights. The deadlines
            of loading depend on this number.
        carrier: How the bytes reach the engine.
        kind: What the version holds. The engine's host turns a delta into a full version before loading.
        base_version: The version that a delta changes; `FROZEN` for adapters, None for a full version.
        incarnation: Number of restarts of the learner from a checkpoint so far. The same version may have different
            weights in two incarnations.
        access: Secret key for the connection to learner rank 0; empty for a version in files. ``repr`` hides the key.
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
