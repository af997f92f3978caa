"""Real SGLang servers load published weights while requests run, and every token has the right version.

The test makes 30 weight updates with each of its parameter sets. It compares the log-prob of every sampled token with a
Hugging Face forward of the version that the engine reported for the token.
"""

import asyncio
import json
from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.core.types import Carrier
from asyncrl.weights.carriers import PublishOptions
from asyncrl.weights.publish import WeightPublisher
from asyncrl.weights.staging import WeightStager
from learner.config import Device, LearnerConfig, LoraConfig
from learner.fsdp import local_tensor
from learner.lora import is_adapter
from learner.model_shards import PretrainedShards
from learner.packed_model import PackedModel
from learner.roles import ACTOR
from rollout_fleet.config import EngineDevice, OnUpdate, RolloutFleetConfig, SGLangConfig
from rollout_fleet.engines.server_hooks import report_path
from rollout_fleet.engines.sglang import SGLangEngine
from tests.support.engine_probes import answer, forward_by_versions, requests_of
from tests.support.tiny_models import save_tiny_model
from tests.support.whole_weights import save_whole

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.skipif("not __import__('importlib.util').util.find_spec('sglang')", reason="SGLang is not installed"),
]
NUM_UPDATES = 30
NETWORK = PublishOptions(carrier=Carrier.host_stream, num_receivers=1, timeout_s=30.0, num_held=1)
INTO_ENGINES = replace(NETWORK, carrier=Carrier.engine_stream, num_receivers=2)
FOLDER = PublishOptions()
SHARED_PREFIX = np.asarray([3 + position * 7 % 10 for position in range(60)], dtype=np.int32)


CASES = {
    "two-tensor-parallel-ranks": ("llama", 2, "float32", OnUpdate.recompute, FOLDER),
    "tied": ("qwen3", 1, "float32", OnUpdate.recompute, FOLDER),
    "experts": ("qwen3_moe", 1, "float32", OnUpdate.recompute, FOLDER),
    "experts-on-two-ranks": ("qwen3_moe", 2, "float32", OnUpdate.recompute, FOLDER),
    "experts-of-mixtral": ("mixtral", 1, "float32", OnUpdate.recompute, FOLDER),
    "experts-deltas": ("qwen3_moe", 1, "float32", OnUpdate.recompute, PublishOptions(full_every=5)),
    "experts-adapters": ("qwen3_moe", 1, "float32", OnUpdate.recompute, PublishOptions(adapters=True)),
    "bfloat16": ("qwen2", 1, "bfloat16", OnUpdate.recompute, FOLDER),
    "loaded-in-threads": ("qwen3", 1, "float32", OnUpdate.recompute, FOLDER),
    "kept-kv-cache": ("qwen3", 1, "float32", OnUpdate.keep, FOLDER),
    "deltas": ("qwen3", 1, "float32", OnUpdate.recompute, PublishOptions(full_every=5)),
    "over-the-network": ("llama", 2, "float32", OnUpdate.recompute, NETWORK),
    "adapters-alone": ("llama", 2, "float32", OnUpdate.recompute, PublishOptions(adapters=True)),
    "into-two-ranks-of-an-engine": ("llama", 2, "float32", OnUpdate.recompute, INTO_ENGINES),
    "into-an-engine-tied": ("qwen3", 1, "float32", OnUpdate.recompute, INTO_ENGINES),
    "into-an-engine-experts": ("qwen3_moe", 1, "float32", OnUpdate.recompute, INTO_ENGINES),
    "into-an-engine-bfloat16": ("qwen2", 1, "bfloat16", OnUpdate.recompute, INTO_ENGINES),
}
"""Family of the model, tensor-parallel size, dtype, option ``on_update`` and publish options of each case."""
IN_CI = ("tied", "over-the-network", "into-an-engine-tied")
"""The cases that are not slow: one per carrier."""


@pytest.mark.parametrize(
    ("family", "tp_size", "dtype", "on_update", "options"),
    [
        pytest.param(*case, id=name, marks=pytest.mark.long if name in IN_CI else pytest.mark.slow)
        for name, case in CASES.items()
    ],
)
async def test_every_token_was_sampled_with_the_policy_version_that_it_reports(
    family, tp_size, dtype, on_update, options, tmp_path, monkeypatch, request
):
    if "loaded-in-threads" in request.node.callspec.id:
        monkeypatch.setenv("SGLANG_EXTERNAL_MODEL_PACKAGE", "tests.support.threaded_models")
    # On a CPU, an engine pads smaller experts to 32 values per rank. Experts of 64 values need no padding.
    wide = {"moe_intermediate_size": 64} if family == "qwen3_moe" and tp_size > 1 else {}
    path = save_tiny_model(tmp_path / "model", family, initializer_range=0.1, **wide)
    lora = LoraConfig(rank=4 if options.adapters else 0)
    learner = PackedModel(LearnerConfig(device=Device.cpu, dtype=dtype, lora=lora), ACTOR, model_path=path)
    publisher = WeightPublisher(PretrainedShards.of(learner), str(tmp_path / "published"), keep=2, options=options)
    stager = WeightStager("engine-0", memory=tmp_path / "memory", copies=options.full_every > 1, timeout_s=30.0)
    config = RolloutFleetConfig(
        stop_timeout_s=1.0,
        sglang=SGLangConfig(
            tp_size=tp_size, dtype=dtype, max_total_tokens=8192, max_running_requests=16, on_update=on_update
        ),
    )
    engine = SGLangEngine(config, model_path=path, device=EngineDevice.cpu, rank=0, log_dir=str(tmp_path), seed=0)
    try:
        await engine.start()
        publisher.publish(0).result()
        folders = {0: save_whole(tmp_path / "v0", learner)}
        batches = [prefixed_requests(f"b{index}") for index in range(6)]
        asked = [(batch, asyncio.create_task(answer(engine, batch))) for batch in batches[:3]]
        for version in range(1, NUM_UPDATES + 1):
            perturb(learner, version)
            offer = publisher.publish(version).result()
            folders[version] = save_whole(tmp_path / f"v{version}", learner)
            async with stager.staged(offer) as local:
                await engine.load_weights(local)
            if version % 10 == 0:
                batch = batches[2 + version // 10]
                asked.append((batch, asyncio.create_task(answer(engine, batch))))
            await asyncio.sleep(0.05)
        reports = [json.loads(report_path(engine.server.weight_order, rank).read_text()) for rank in range(tp_size)]
        answered = [
            (asked_for, sample) for batch, task in asked for asked_for, sample in zip(batch, await task, strict=True)
        ]
    finally:
        await engine.stop()
        stager.close()
        publisher.close()
    # Each rank has two layers with four experts. Each expert has three tensors.
    num_fused = 2 * 3 * 4 if family in ("qwen3_moe", "mixtral") else 0
    assert [report["num_fused"] for report in reports] == [num_fused] * tp_size
    num_tokens = check(answered, folders, dtype, keeps=on_update is OnUpdate.keep)
    assert len(num_tokens) >= 3, f"tokens of fewer than three versions: {num_tokens}"


def prefixed_requests(name):
    """Return requests for two samples of each of four prompts. The prompts have a common prefix."""
    requests = requests_of(4, 2, name, max_new_tokens=120, temperature=1.2)
    return [replace(request, prompt_ids=np.append(SHARED_PREFIX, request.prompt_ids)) for request in requests]


def perturb(learner, seed):
    """Change about a third of the weights by about 10%. Add random values to adapters, which are 0 at first."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in learner.pretrained.named_parameters():
        values = local_tensor(parameter.data)
        if is_adapter(name):
            values.add_(0.05 * torch.randn(values.shape, generator=generator))
        elif parameter.requires_grad:
            places = torch.rand(values.shape, generator=generator) < 0.3
            values.mul_(1 + 0.1 * places * torch.randn(values.shape, generator=generator))


def check(answered, folders, dtype, *, keeps):
    """Compare the log-probs of all answers with a Hugging Face forward. Returns the number of tokens per version."""
    num_tokens, atol = Counter(), 0.1 if dtype == "bfloat16" else 1e-4

    @cache
    def model_of(version):
        return AutoModelForCausalLM.from_pretrained(folders[version], dtype=getattr(torch, dtype))

    for request, sample in answered:
        expected = forward_by_versions(model_of, request, sample, keeps=keeps)
        np.testing.assert_allclose(sample.logprobs, expected, atol=atol, err_msg=str(sample.versions))
        num_tokens.update(sample.versions.tolist())
    return num_tokens
