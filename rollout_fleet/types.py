"""What a rollout worker and its engine say to one another, and what the worker tells the controller."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from asyncrl.protocol.types import FinishReason

from .config import SamplingConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """One prompt group for the engine.

    Attributes:
        rid: Request id, of fixed width, unique among the engine's running requests. Example: ``"000000004711-000"``.
        prompt_ids: [P] int32 token ids.
        num_samples: G.
        sampling: How to sample; behaviour log-probs are taken under its temperature.
        prefixes: What is written of each sample already; empty to begin all of them. See `ContinuingEngine`.
    """

    rid: str
    prompt_ids: np.ndarray
    num_samples: int
    sampling: SamplingConfig
    prefixes: tuple[SampleOutput, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleOutput:
    """One sampled response of R tokens; the end-of-sequence token, where sampled, is its last.

    Attributes:
        token_ids: [R] int32.
        logprobs: [R] float32, log-prob under the sampling temperature, before top-p and top-k.
        versions: [R] int32, policy version that the engine reported for each token.
        finish_reason: None when the sample was aborted; then R may be 0.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish_reason: FinishReason | None


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupOutput:
    """The engine's answer to a `GenerationRequest`.

    Attributes:
        rid: That of the request.
        samples: What was asked for, and the baselines after it.
        num_baselines: Last samples that are scored and not trained on; see `GreedyBaselineEngine`.
    """

    rid: str
    samples: tuple[SampleOutput, ...]
    num_baselines: int = 0

    @property
    def trained(self) -> tuple[SampleOutput, ...]:
        """All samples but the baselines."""
        return self.samples[: len(self.samples) - self.num_baselines]

    @property
    def num_tokens(self) -> int:
        """Tokens to be accounted for, over all samples but the baselines."""
        return sum(len(sample.token_ids) for sample in self.trained)

    @property
    def aborted(self) -> bool:
        """Whether any sample was cut off by an abort."""
        return any(sample.finish_reason is None for sample in self.samples)


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetCounters:
    """What one rollout worker has done since it started.

    Attributes:
        tokens_generated: Policy tokens that the engine answered with, aborted samples included, evaluation and
            greedy baselines not.
        tokens_in_flight: Of these, the tokens neither stored nor released yet.
        groups_finished: Prompt groups stored in the buffer.
        groups_released: Prompt groups given back unfinished.
        groups_refused: Finished groups that the buffer refused because their lease had run out.
        busy_s: Time with at least one training request on the engine, weight loads taken off.
        wait_s: Time in which the engine had no training request because none was admitted.
        load_s: For each weight load, the seconds that generation stood still.
        reward_s: Time spent waiting for rewards, summed over groups.
    """

    tokens_generated: int
    tokens_in_flight: int
    groups_finished: int
    groups_released: int
    groups_refused: int
    busy_s: float
    wait_s: float
    load_s: tuple[float, ...]
    reward_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationResult:
    """Rewards of held-out prompts.

    Attributes:
        rewards: One float for each sample, prompt by prompt.
        mean_length: Mean response length in tokens; 0 without prompts.
    """

    rewards: tuple[float, ...]
    mean_length: float
