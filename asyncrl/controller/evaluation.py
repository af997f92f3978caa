"""Held-out evaluation on the fleet: the engines that train also answer, at the version they serve."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from asyncrl.config import RunConfig
from asyncrl.metrics import Evaluation
from asyncrl.protocol.types import Prompt
from rollout_fleet.config import SamplingConfig


class EvaluationFleet(Protocol):
    """What evaluation needs of the rollout fleet."""

    async def evaluate(self, prompts: Sequence[Prompt], sampling: SamplingConfig, num_samples: int) -> list[float]:
        """Rewards of ``num_samples`` answers to each prompt, in any order."""
        ...


async def evaluate(
    fleet: EvaluationFleet, prompts: Sequence[Prompt], config: RunConfig, *, policy_version: int
) -> Evaluation:
    """Evaluate held-out prompts, sampled as in training and greedily.

    Args:
        fleet: Engines, all serving ``policy_version``, with no training rollouts running.
        prompts: Held-out prompts.
        config: The run; gives sampling parameters and the number of samples.
        policy_version: Version that the engines serve.
    """
    sampling = config.rollout_fleet.sampling
    sampled = await fleet.evaluate(prompts, sampling, config.evaluation.num_samples)
    greedy = await fleet.evaluate(prompts, dataclasses.replace(sampling, temperature=0.0), 1)
    return Evaluation(
        sampled=sum(sampled) / len(sampled),
        greedy=sum(greedy) / len(greedy),
        num_prompts=len(prompts),
        policy_version=policy_version,
    )
