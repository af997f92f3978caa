"""Rewards of held-out prompts on one engine. Their tokens are not trained on and not in the token account."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from asyncrl.core.errors import EngineError, RewardError
from asyncrl.core.types import AnsweredPrompt, FinishReason, Prompt

from .config import SamplingConfig
from .engines.engine import Engine, SampleOutput, SampleRequest
from .rewards import Rollout, Scores, WeightedRewards
from .sample_log import Decode, SampleLog

logger = logging.getLogger(__name__)

_ROUNDS = 2
"""Attempts at a prompt whose tokens mix policy versions, before it is left to another engine."""


class HeldOutAnswers:
    """Answers held-out prompts on one engine, by ``sampling`` and greedily, and scores the answers.

    ``log`` keeps all answers for reading.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        rewards: WeightedRewards,
        decode: Decode,
        sampling: SamplingConfig,
        log: SampleLog | None = None,
    ) -> None:
        self._engine = engine
        self._rewards = rewards
        self._decode = decode
        self._sampling = sampling
        self._greedy = sampling.greedy()
        self._log = log
        self._num_rounds = 0

    async def answer(self, prompts: Sequence[Prompt], *, version: int, num_samples: int) -> list[AnsweredPrompt]:
        """Answer prompts with distinct group ids; several calls may run at a time.

        Each prompt gets ``num_samples`` samples and a greedy answer. Returns one entry per prompt whose tokens were all
        sampled under ``version``; the entry of a prompt whose reward fails has the failure. The other prompts are left
        out, because the engine serves another version.

        Raises `EngineError` if the engine serves another version from the beginning; or as `Engine.generate`.
        """
        if self._engine.version != version:
            raise EngineError(f"the engine serves policy version {self._engine.version}, not {version}")
        answered: list[AnsweredPrompt] = []
        left = list(prompts)
        for _ in range(_ROUNDS):
            if left and self._engine.version == version:
                outputs = await self._sample(left, [self._sampling] * num_samples + [self._greedy])
                mixed = {
                    group_id
                    for group_id, samples in outputs.items()
                    if any(one.finish_reason is None or np.any(one.versions != version) for one in samples)
                }
                answered += await self._score([one for one in left if one.group_id not in mixed], outputs, version)
                left = [prompt for prompt in left if prompt.group_id in mixed]
        if left:
            logger.warning(
                "%d held-out prompts mix policy versions with %d; another engine answers them", len(left), version
            )
        return answered

    async def _sample(self, prompts: Sequence[Prompt], each: Sequence[SamplingConfig]) -> dict[int, list[SampleOutput]]:
        """The answers to each prompt by its group id, the greedy one last."""
        self._num_rounds += 1
        requests = [
            SampleRequest(
                id=f"evaluation-{self._num_rounds}-{prompt.group_id}-{index}",
                prompt_ids=prompt.prompt_ids,
                sampling=sampling,
            )
            for prompt in prompts
            for index, sampling in enumerate(each)
        ]
        outputs = {request.id: output async for request, output in self._engine.generate(requests)}
        ids = iter(requests)
        return {prompt.group_id: [outputs[next(ids).id] for _ in each] for prompt in prompts}

    async def _score(
        self, prompts: Sequence[Prompt], outputs: Mapping[int, list[SampleOutput]], version: int
    ) -> list[AnsweredPrompt]:
        texts = [[self._decode(one.token_ids.tolist()) for one in outputs[prompt.group_id]] for prompt in prompts]
        rollouts = [
            list(map(rollout_of, texts_of, outputs[prompt.group_id]))
            for prompt, texts_of in zip(prompts, texts, strict=True)
        ]
        scores = await asyncio.gather(*map(self._rewards.score, prompts, rollouts), return_exceptions=True)
        answered: list[AnsweredPrompt] = []
        kept: list[dict[str, Any]] = []
        for prompt, its_texts, earned in zip(prompts, texts, scores, strict=True):
            samples = outputs[prompt.group_id]
            if isinstance(earned, RewardError):
                logger.warning("a held-out prompt is left out: %s", earned)
                answered.append(_entry(prompt, samples, reward_failure=str(earned)))
            elif isinstance(earned, BaseException):
                raise earned
            else:
                answered.append(_entry(prompt, samples, earned))
                kept += self._log.rows(prompt, samples, its_texts, earned) if self._log is not None else []
        if self._log is not None and kept:
            await self._log.keep_answers(version, kept, per_prompt=len(texts[0]))
        return answered


def rollout_of(text: str, sample: SampleOutput) -> Rollout:
    """A single answer as reward functions see it."""
    is_truncated = sample.finish_reason is FinishReason.length
    return Rollout.answer(text, num_tokens=len(sample.token_ids), is_truncated=is_truncated)


def _entry(
    prompt: Prompt, samples: Sequence[SampleOutput], scores: Scores | None = None, reward_failure: str = ""
) -> AnsweredPrompt:
    rewards = scores.sums.tolist() if scores is not None else []
    return AnsweredPrompt(
        group_id=prompt.group_id,
        data_source=prompt.data_source,
        sampled=tuple(rewards[:-1]),
        greedy=rewards[-1] if rewards else None,
        response_lengths=tuple(len(sample.token_ids) for sample in samples),
        num_truncated=sum(sample.finish_reason is FinishReason.length for sample in samples),
        reward_failure=reward_failure,
    )
