"""How the tests of both real engines ask, publish, and recompute what the engine should have answered."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from asyncrl.protocol.checksums import weight_checksums
from asyncrl.protocol.types import WeightSnapshot
from rollout_fleet.config import SamplingConfig
from rollout_fleet.engines.continuing import ContinuingEngine
from rollout_fleet.types import GenerationRequest, SampleOutput


def requests_of(num_groups, num_samples=4, first=0, **sampling):
    """Groups with prompts of 2, 3, ... tokens, numbered from ``first``."""
    options = {"max_new_tokens": 12, **sampling}
    return [
        GenerationRequest(
            rid=f"{first + group:012d}-000",
            prompt_ids=np.asarray([3 + (group + position) % 10 for position in range(2 + group)], dtype=np.int32),
            num_samples=num_samples,
            sampling=SamplingConfig(**options),
        )
        for group in range(num_groups)
    ]


async def answer(engine, requests):
    """The engine's answers, in the order of the requests."""
    outputs = {output.rid: output async for output in engine.generate(requests)}
    return [outputs[request.rid] for request in requests]


@torch.inference_mode()
def forward_logprobs(path, request, sample):
    """[R] log-probs of the sampled tokens by a plain forward pass in float32."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype="float32")
    ids = torch.tensor([[*request.prompt_ids.tolist(), *sample.token_ids.tolist()]])
    logits = model(ids).logits[0, len(request.prompt_ids) - 1 : -1] / (request.sampling.temperature or 1.0)
    return logits.log_softmax(-1).gather(1, torch.tensor(sample.token_ids, dtype=torch.int64)[:, None])[:, 0].numpy()


async def assert_continues(engine, model_path, atol):
    """What was cut off after two tokens is continued to what it would have been, greedily."""
    engine = ContinuingEngine(engine)
    requests = requests_of(3, temperature=0.0)
    whole = await answer(engine, requests)
    begun = [
        replace(request, rid=f"{100 + i:012d}-000", prefixes=tuple(_begun(sample) for sample in output.samples))
        for i, (request, output) in enumerate(zip(requests, whole, strict=True))
    ]
    for request, before, after in zip(begun, whole, await answer(engine, begun), strict=True):
        for expected, sample in zip(before.samples, after.samples, strict=True):
            assert sample.token_ids.tolist() == expected.token_ids.tolist()
            assert sample.finish_reason is expected.finish_reason
            np.testing.assert_allclose(sample.logprobs, forward_logprobs(model_path, request, sample), atol=atol)


def _begun(sample):
    return SampleOutput(
        token_ids=sample.token_ids[:2],
        logprobs=sample.logprobs[:2],
        versions=sample.versions[:2],
        finish_reason=sample.finish_reason if len(sample.token_ids) <= 2 else None,
    )


def publish_weights(model_path, directory, version, scale=1.0, *, change=None):
    """Write the model's tensors times ``scale`` as a snapshot; ``change`` spoils them after they were digested."""
    target = Path(directory) / f"v{version}"
    shutil.copytree(model_path, target)
    tensors = {name: tensor * scale for name, tensor in load_file(target / "model.safetensors").items()}
    checksums = weight_checksums(tensors)
    if change is not None:
        tensors = change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return WeightSnapshot(version=version, path=str(target), checksums=checksums)
