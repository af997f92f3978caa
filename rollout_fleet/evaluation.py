"""Rewards of held-out prompts on one engine. Outside the token account: nothing of it is trained on."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.protocol.types import Prompt

from .config import SamplingConfig
from .decoding import Decode
from .engines.base import Engine
from .rewards.scorer import RewardScorer
from .types import EvaluationResult, GenerationRequest


async def evaluate_prompts(
    prompts: Sequence[Prompt],
    *,
    engine: Engine,
    scorer: RewardScorer,
    decode: Decode,
    sampling: SamplingConfig,
    num_samples: int,
) -> EvaluationResult:
    """Sample ``num_samples`` responses of each prompt and score them.

    Raises:
        AsyncRLError: the engine or the reward failed.
    """
    requests = {
        f"eval{index:08d}-000": GenerationRequest(
            rid=f"eval{index:08d}-000", prompt_ids=prompt.prompt_ids, num_samples=num_samples, sampling=sampling
        )
        for index, prompt in enumerate(prompts)
    }
    outputs = {output.rid: output async for output in engine.generate(list(requests.values()))}
    rewards: list[float] = []
    lengths: list[int] = []
    for rid, prompt in zip(requests, prompts, strict=True):
        samples = outputs[rid].samples
        lengths += [len(sample.token_ids) for sample in samples]
        texts = [decode(sample.token_ids.tolist()) for sample in samples]
        rewards += (await scorer.score(prompt, texts)).tolist()
    return EvaluationResult(rewards=tuple(rewards), mean_length=sum(lengths) / len(lengths) if lengths else 0.0)
