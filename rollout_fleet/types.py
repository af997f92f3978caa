"""What a rollout worker and its engine say to each other, and what an evaluation returns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from asyncrl.protocol.types import FinishReason

from .config import SamplingConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRequest:
    """One response for the engine to sample.

    A response that was begun before, by another worker or before a weight update, is continued by an ordinary request:
    its prompt ends with the tokens written so far.

    Attributes:
        id: Unique among the engine's running requests; holds no ``/``. Example: ``"4711-0-3-0"``.
        prompt_ids: [P] int32 token ids.
        sampling: How to sample; behaviour log-probs are taken under its temperature.
    """

    id: str
    prompt_ids: np.ndarray
    sampling: SamplingConfig


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
class EvaluationResult:
    """Rewards of held-out prompts.

    Attributes:
        rewards: One float per sample, prompt by prompt.
        mean_length: Mean response length in tokens; 0 without prompts.
        num_failed: Prompts whose reward failed; ``rewards`` leaves them out.
    """

    rewards: tuple[float, ...]
    mean_length: float
    num_failed: int = 0
