"""Generates answers to held-out prompts (prompts only for evaluation) on one engine, and scores these answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncrl.core.errors import EngineError, RewardError
from asyncrl.core.image_files import prompt_images
from asyncrl.core.images import PlacedImage
from asyncrl.core.types import AnsweredPrompt, FinishReason, Prompt

from .answering import AnsweringParts
from .config import SamplingConfig
from .engines.engine import SampleOutput, SampleRequest
from .episodes.episode import Episode
from .episodes.episode_run import DirectRun, Player
from .rewards import Rollout, Scores

logger = logging.getLogger(__name__)

_ROUNDS = 2
"""One engine answers a prompt up to this number of times, until all tokens of the answers have the right version.

After that, another engine must answer the prompt.
"""


@dataclass(frozen=True, kw_only=True)
class _Answer:
    sample: SampleOutput
    rollout: Rollout
    failure: str = ""

    def is_of(self, version: int) -> bool:
        """Return whether the answer is finished, and all its tokens have this policy version."""
        return self.sample.finish_reason is not None and not np.any(self.sample.versions != version)


class HeldOutAnswers:
    """Generates sampled and greedy answers to held-out prompts on one engine, and scores these answers.

    ``sampling`` is a function that returns the sampling options for a data source. If ``parts.samples`` is not None, it
    saves all answers to files.
    """

    def __init__(self, parts: AnsweringParts, *, sampling: Callable[[str], SamplingConfig]) -> None:
        self._engine, self._rewards, self._decode = parts.engine, parts.rewards, parts.decode
        self._player, self._images, self._log = parts.player, parts.images, parts.samples
        self._sampling = sampling
        self._num_rounds = 0

    async def answer(self, prompts: Sequence[Prompt], *, version: int, num_samples: int) -> list[AnsweredPrompt]:
        """Sample ``num_samples`` answers and one greedy answer to each prompt, and compute their rewards.

        Returns one entry with rewards per answered prompt; an entry may report a failed reward instead. A prompt is
        left out if a token of its answers has another policy version than ``version``. This happens if the engine loads
        new weights meanwhile. The prompts must have distinct group ids. Several calls may run at the same time.

        Raises `EngineError` if the engine does not serve ``version`` at the beginning. Errors of `Engine.generate` are
        raised too.
        """
        if self._engine.version != version:
            raise EngineError(f"the engine serves policy version {self._engine.version}, not {version}")
        answered: list[AnsweredPrompt] = []
        left = list(prompts)
        for _ in range(_ROUNDS):
            if left and self._engine.version == version:
                outputs = await self._sample(left, num_samples)
                mixed = {
                    group_id
                    for group_id, answers in outputs.items()
                    if any(not one.failure and not one.is_of(version) for one in answers)
                }
                answered += await self._score([one for one in left if one.group_id not in mixed], outputs, version)
                left = [prompt for prompt in left if prompt.group_id in mixed]
        if left:
            logger.warning(
                "%d held-out prompts mix policy versions with %d; another engine answers them", len(left), version
            )
        return answered

    async def _sample(self, prompts: Sequence[Prompt], num_samples: int) -> dict[int, list[_Answer]]:
        self._num_rounds += 1

        def each(prompt: Prompt) -> list[SamplingConfig]:
            sampling = self._sampling(prompt.data_source)
            return [sampling] * num_samples + [sampling.greedy()]

        player = self._player
        images = {prompt.group_id: await prompt_images(self._images, prompt) for prompt in prompts}
        played = [prompt for prompt in prompts if player is not None and player.plays(prompt)]
        single = [prompt for prompt in prompts if player is None or not player.plays(prompt)]
        requests = [
            SampleRequest(
                id=f"evaluation-{self._num_rounds}-{prompt.group_id}-{index}",
                prompt_ids=prompt.prompt_ids,
                sampling=sampling,
                images=images[prompt.group_id],
            )
            for prompt in single
            for index, sampling in enumerate(each(prompt))
        ]
        episodes = [
            self._play(player, prompt, index, sampling, images[prompt.group_id])
            for prompt in played
            for index, sampling in enumerate(each(prompt))
            if player is not None
        ]
        playing = asyncio.gather(*episodes)
        try:
            outputs = {request.id: output async for request, output in self._engine.generate(requests)}
            answers = iter([*[self._single(outputs[request.id]) for request in requests], *await playing])
        finally:
            playing.cancel()
        return {prompt.group_id: [next(answers) for _ in range(num_samples + 1)] for prompt in (*single, *played)}

    def _single(self, sample: SampleOutput) -> _Answer:
        text = self._decode(sample.token_ids.tolist())
        is_truncated = sample.finish_reason is FinishReason.length
        rollout = Rollout.answer(text, num_tokens=len(sample.token_ids), is_truncated=is_truncated)
        return _Answer(sample=sample, rollout=rollout)

    async def _play(
        self,
        player: Player,
        prompt: Prompt,
        index: int,
        sampling: SamplingConfig,
        images: tuple[PlacedImage, ...],
    ) -> _Answer:
        name = f"evaluation-{self._num_rounds}-{prompt.group_id}-{index}"
        episode = Episode(name, prompt.prompt_ids, player.budget, images=images)
        run = DirectRun(episode, self._engine)
        try:
            await player.play(prompt, run, sampling=sampling, index=index)
        finally:
            await run.close()
        if self._engine.has_failed:
            await self._engine.wait_failed()
        failure = "" if run.failure is None or player.scores(run.failure) else str(run.failure)
        if episode.answer is None and not failure:
            failure = f"the environment of held-out prompt {prompt.group_id} ended without a turn of the policy"
        return _Answer(sample=run.sampled(), rollout=run.rollout(self._decode), failure=failure)

    async def _score(
        self, prompts: Sequence[Prompt], outputs: Mapping[int, list[_Answer]], version: int
    ) -> list[AnsweredPrompt]:
        async def score(prompt: Prompt) -> Scores:
            answers = outputs[prompt.group_id]
            if failed := next((one.failure for one in answers if one.failure), ""):
                raise RewardError(failed)
            return await self._rewards.score(prompt, [one.rollout for one in answers])

        scores = await asyncio.gather(*map(score, prompts), return_exceptions=True)
        answered: list[AnsweredPrompt] = []
        kept: list[dict[str, Any]] = []
        for prompt, earned in zip(prompts, scores, strict=True):
            samples = [one.sample for one in outputs[prompt.group_id]]
            texts = [one.rollout.text for one in outputs[prompt.group_id]]
            if isinstance(earned, RewardError):
                logger.warning("a held-out prompt is left out: %s", earned)
                answered.append(_entry(prompt, samples, reward_failure=str(earned)))
            elif isinstance(earned, BaseException):
                raise earned
            else:
                answered.append(_entry(prompt, samples, earned))
                kept += self._log.rows(prompt, samples, texts, earned) if self._log is not None else []
        if self._log is not None and kept:
            await self._log.keep_answers(version, kept, per_prompt=len(outputs[prompts[0].group_id]))
        return answered


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
