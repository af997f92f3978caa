"""Rewards of held-out prompts on one engine. Outside the token account: nothing of it is trained on."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from asyncrl.protocol.errors import RewardError
from asyncrl.protocol.types import Prompt

from .config import SamplingConfig
from .engines.engine import Engine, SampleOutput, SampleRequest
from .engines.model_files import Decode
from .metrics import EvaluationResult
from .rewards import WeightedRewards
from .sample_log import SampleKind, SampleLog

logger = logging.getLogger(__name__)


async def evaluate_prompts(
    prompts: Sequence[Prompt],
    *,
    engine: Engine,
    rewards: WeightedRewards,
    decode: Decode,
    sampling: SamplingConfig,
    num_samples: int,
    log: SampleLog | None = None,
) -> EvaluationResult:
    """Score ``num_samples`` responses per prompt, and keep them in ``log``.

    Raises `AsyncRLError` if the engine fails, or every reward does.
    """
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
    rows: list[dict[str, Any]] = []
    version = engine.version
    for index, prompt in enumerate(prompts):
        samples = [outputs[requests[index, sample].id] for sample in range(num_samples)]
        texts = [decode(sample.token_ids.tolist()) for sample in samples]
        try:
            earned = await rewards.score(prompt, texts)
        except RewardError as error:
            failures.append(error)
            logger.warning("a held-out prompt is left out: %s", error)
        else:
            scores += earned.total.tolist()
            rows += log.rows(prompt, samples, texts, earned) if log is not None else []
    if failures and not scores:
        raise failures[-1]
    if log is not None and rows:
        await log.write(SampleKind.sampled if sampling.temperature else SampleKind.greedy, version, rows)
    lengths = [len(output.token_ids) for output in outputs.values()]
    return EvaluationResult(
        rewards=tuple(scores),
        mean_length=sum(lengths) / len(lengths) if lengths else 0.0,
        num_failed=len(failures),
    )
