"""Rewards of held-out prompts on one engine. Outside the token account: nothing of it is trained on."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from asyncrl.protocol.errors import RewardError
from asyncrl.protocol.types import Prompt

from .config import SamplingConfig
from .engines.engine import Engine, SampleOutput, SampleRequest
from .engines.model_files import Decode
from .metrics import EvaluationResult
from .rewards import RewardProcesses

logger = logging.getLogger(__name__)


async def evaluate_prompts(
    prompts: Sequence[Prompt],
    *,
    engine: Engine,
    rewards: RewardProcesses,
    decode: Decode,
    sampling: SamplingConfig,
    num_samples: int,
) -> EvaluationResult:
    """Score ``num_samples`` responses per prompt. Raises `AsyncRLError` if the engine fails, or every reward does."""
    requests = {
        (prompt, sample): SampleRequest(
            id=f"evaluation-{prompt}-{sample}", prompt_ids=prompts[prompt].prompt_ids, sampling=sampling
        )
        for prompt in range(len(prompts))
        for sample in range(num_samples)
    }
    outputs: dict[str, SampleOutput] = {}
    async for request, output in engine.generate(list(requests.values())):
        outputs[request.id] = output
    scores: list[float] = []
    failures: list[RewardError] = []
    for index, prompt in enumerate(prompts):
        samples = [outputs[requests[index, sample].id] for sample in range(num_samples)]
        texts = [decode(sample.token_ids.tolist()) for sample in samples]
        try:
            scores += (await rewards.score(prompt, texts)).tolist()
        except RewardError as error:
            failures.append(error)
            logger.warning("a held-out prompt is left out: %s", error)
    if failures and not scores:
        raise failures[-1]
    lengths = [len(output.token_ids) for output in outputs.values()]
    return EvaluationResult(
        rewards=tuple(scores),
        mean_length=sum(lengths) / len(lengths) if lengths else 0.0,
        num_failed=len(failures),
    )
