"""The tasks of ``asyncrl check-gpu`` with an engine: log-probs, weight updates, and release of the GPU memory."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncrl.core.errors import AsyncRLError
from asyncrl.core.types import Carrier, WeightOffer
from asyncrl.gpu_check.tasks import EngineTest, Setup
from asyncrl.weights.carriers import Backend, PublishOptions
from asyncrl.weights.manifest import read_manifest
from asyncrl.weights.publish import WeightPublisher
from asyncrl.weights.staging import WeightStager
from learner.config import Device, Dtype, LearnerConfig
from learner.fsdp import local_tensor
from learner.model_shards import PretrainedShards
from learner.packed_model import PackedModel
from learner.roles import ACTOR
from learner.types import TokenSequence
from rollout_fleet.config import EngineDevice, RolloutFleetConfig, SamplingConfig, SGLangConfig
from rollout_fleet.engines.engine import SampleOutput, SampleRequest, read_model_facts
from rollout_fleet.engines.sglang import SGLangEngine
from rollout_fleet.engines.sglang_server import SGLangServer

NUM_VERSIONS = 5
NUM_CYCLES = 10
NUM_SAMPLES = 16
_SHARED_GPU = ["--mem-fraction-static", "0.35"]


class _Pair:
    """A learner and an engine of the same model. If possible, the engine has a separate GPU."""

    def __init__(
        self, setup: Setup, model: str, tp_size: int, *, dtype: str = "", fp32_head: bool | None = None
    ) -> None:
        self.setup, self.tp_size = setup, tp_size
        dtype = dtype or setup.dtype
        config = LearnerConfig(device=Device(setup.device), dtype=Dtype(dtype), max_tokens_per_micro_batch=4096)
        self.learner = PackedModel(config, ACTOR, model_path=model)
        self.is_alone = setup.device == "cuda" and setup.num_gpus > tp_size
        if self.is_alone:  # give the engine the GPUs after the first GPU, which the learner already uses
            visible = (os.environ.get("CUDA_VISIBLE_DEVICES") or "").split(",")
            devices = visible if len(visible) > tp_size else [str(number) for number in range(setup.num_gpus)]
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices[1 : 1 + tp_size])
        sglang = SGLangConfig(
            tp_size=tp_size,
            dtype=dtype,
            max_running_requests=NUM_SAMPLES,
            max_total_tokens=NUM_SAMPLES * 1024,
            memory_saver=setup.device == "cuda",
            extra_args=[] if setup.device == "cpu" or self.is_alone else _SHARED_GPU,
        )
        fleet = RolloutFleetConfig(sglang=sglang, start_timeout_s=setup.timeout_s)
        options: dict[str, Any] = {"model_path": model, "device": EngineDevice(setup.device), "rank": 0, "seed": 0}
        options["log_dir"] = setup.folder
        server = SGLangServer(fleet, **options, head_dim=read_model_facts(model).head_dim, fp32_head=fp32_head)
        self.engine = SGLangEngine(fleet, **options, server=server)
        self.version = 0
        self._count = 0

    async def sample(self) -> list[tuple[SampleRequest, SampleOutput]]:
        rng, sizes = np.random.default_rng(self._count), self.setup.sizes
        self._count += 1
        low = sizes.vocabulary // 2
        prompts = [rng.integers(low, sizes.vocabulary, 16).astype(np.int32) for _ in range(NUM_SAMPLES)]
        sampling = SamplingConfig(max_new_tokens=sizes.num_new_tokens, temperature=1.0)
        requests = [
            SampleRequest(id=f"check{self._count}-{index}", prompt_ids=prompt, sampling=sampling)
            for index, prompt in enumerate(prompts)
        ]
        return [answer async for answer in self.engine.generate(requests)]

    def gap(self, answers: Sequence[tuple[SampleRequest, SampleOutput]]) -> dict[str, float]:
        """Return the differences between the log-probs of engine and learner, for tokens of the current version."""
        sequences, engine = [], []
        for request, output in answers:
            is_current = output.versions == self.version
            ids = np.concatenate((request.prompt_ids, output.token_ids))
            mask = np.concatenate((np.zeros(len(request.prompt_ids), dtype=bool), is_current))
            sequences.append(TokenSequence(input_ids=ids, loss_mask=mask, columns={}))
            engine.append(output.logprobs[is_current])
        scores = self.learner.scores(sequences)
        learner = np.concatenate([score[s.loss_mask] for score, s in zip(scores, sequences, strict=True)])
        differences = np.abs(learner - np.concatenate(engine))
        return {"mean": float(differences.mean()), "max": float(differences.max()), "num_tokens": len(differences)}

    def change(self) -> None:
        torch.manual_seed(self.version)
        with torch.no_grad():
            for parameter in self.learner.pretrained.parameters():
                local_tensor(parameter).mul_(1 + 0.01 * torch.randn_like(local_tensor(parameter)))


async def serving(
    setup: Setup, *, model: str, tp_size: int, backends: dict[str, Backend]
) -> AsyncIterator[dict[str, Any]]:
    """Start one engine. Test its log-probs, its weight updates, and how it releases its device.

    The last test damages one byte of a published version. The engine must then refuse to load the version.

    ``backends`` maps each tested carrier (a way to transfer weights) to its backend, by name. Yields one mapping of
    measurements per test. The key ``what`` has the `EngineTest`.
    """
    pair, began = _Pair(setup, model, tp_size), time.perf_counter()
    memory = Path(setup.folder, "memory")
    try:
        await pair.engine.start()
        yield {"what": EngineTest.start, "seconds": time.perf_counter() - began}
        began = time.perf_counter()
        answers = await pair.sample()
        num_tokens = sum(len(output.token_ids) for _, output in answers)
        tokens_per_s = num_tokens / (time.perf_counter() - began)
        yield {"what": EngineTest.logprobs, "tokens_per_s": tokens_per_s, **pair.gap(answers)}
        for carrier, backend in backends.items():
            figures = await _updates(pair, Carrier(carrier), backend, memory)
            yield {"what": EngineTest.weights, "carrier": carrier, **figures}
        yield {"what": EngineTest.release, **await _release(pair, memory)}
        yield {"what": EngineTest.damage, **await _damage(pair, memory)}
    finally:
        await pair.engine.stop()


async def output_layer(setup: Setup, *, model: str, fp32_head: bool) -> AsyncIterator[dict[str, Any]]:
    """Compare log-probs of learner and engine in bfloat16. Yields their mean and largest difference, in nats.

    ``fp32_head`` selects the engine's float32 output layer.
    """
    pair = _Pair(setup, model, 1, dtype="bfloat16", fp32_head=fp32_head)
    try:
        await pair.engine.start()
        yield pair.gap(await pair.sample())
    finally:
        await pair.engine.stop()


def _publisher(pair: _Pair, name: str, carrier: Carrier = Carrier.folder, backend: Backend = "gloo") -> WeightPublisher:
    options = PublishOptions(
        carrier=carrier,
        timeout_s=60.0,
        num_receivers=pair.tp_size if carrier is Carrier.engine_stream else 1,
        backend=backend,
    )
    folder = str(Path(pair.setup.folder, f"published-{name}-tp{pair.tp_size}"))
    return WeightPublisher(PretrainedShards.of(pair.learner), folder, keep=2, options=options)


async def _updates(pair: _Pair, carrier: Carrier, backend: Backend, memory: Path) -> dict[str, Any]:
    """Publish versions while samples run. The log-probs of the engine must match those of the learner."""
    publisher = _publisher(pair, carrier.value, carrier, backend)
    stager = WeightStager(f"check-{carrier.value}", memory=memory, copies=False, timeout_s=60.0)
    pauses, seconds, num_bytes = [], [], 0
    try:
        running = asyncio.create_task(pair.sample())
        for _ in range(NUM_VERSIONS):
            pair.version += 1
            pair.change()
            began = time.perf_counter()
            offer = await asyncio.wrap_future(publisher.publish(pair.version))
            assert offer is not None
            async with stager.staged(offer) as local:
                pauses.append(await pair.engine.load_weights(local))
            seconds.append(time.perf_counter() - began)
            num_bytes = offer.num_bytes
        versions = [set(output.versions.tolist()) for _, output in await running]
        gap = pair.gap(await pair.sample())
    finally:
        stager.close()
        publisher.close()
    return {
        "pause_s": float(np.median(pauses)),
        "seconds": float(np.median(seconds)),
        "gb_per_s": num_bytes / float(np.median(seconds)) / 1e9,
        "versions_per_sample": float(np.mean([len(one) for one in versions])),
        **gap,
    }


async def _release(pair: _Pair, memory: Path) -> dict[str, Any]:
    publisher = _publisher(pair, "release")
    stager = WeightStager("check-release", memory=memory, copies=False, timeout_s=60.0)
    seconds, freed = [], []
    try:
        for _ in range(NUM_CYCLES):
            pair.version += 1
            pair.change()
            offer = await asyncio.wrap_future(publisher.publish(pair.version))
            assert offer is not None
            began, before = time.perf_counter(), _free_bytes(pair)
            await pair.engine.release_memory()
            freed.append(_free_bytes(pair) - before)
            async with stager.staged(offer) as local:
                await pair.engine.load_weights(local)
            seconds.append(time.perf_counter() - began)
        gap = pair.gap(await pair.sample())
    finally:
        stager.close()
        publisher.close()
    return {"seconds": float(np.median(seconds)), "freed_bytes": int(np.median(freed)), "cycles": NUM_CYCLES, **gap}


def _free_bytes(pair: _Pair) -> int:
    """Return the free bytes of a GPU that learner and engine share; otherwise 0."""
    is_shared = pair.setup.device == "cuda" and not pair.is_alone
    return torch.cuda.mem_get_info()[0] if is_shared else 0


async def _damage(pair: _Pair, memory: Path) -> dict[str, Any]:
    """Change one byte of a published version. The engine must refuse the version, and cannot be used afterwards."""
    publisher = _publisher(pair, "damage")
    stager = WeightStager("check-damage", memory=memory, copies=False, timeout_s=60.0)
    try:
        pair.version += 1
        offer = await asyncio.wrap_future(publisher.publish(pair.version))
        assert offer is not None
        _damage_a_byte(offer)
        try:
            async with stager.staged(offer) as local:
                await pair.engine.load_weights(local)
        except AsyncRLError as error:
            return {"refused": str(error).splitlines()[0][:200]}
        return {"refused": ""}
    finally:
        stager.close()
        publisher.close()


def _damage_a_byte(offer: WeightOffer) -> None:
    manifest = read_manifest(offer)
    place = manifest.tensors[-1].start
    with Path(manifest.directory, manifest.files[0]).open("r+b") as data:
        data.seek(place)
        byte = data.read(1)[0]
        data.seek(place)
        data.write(bytes([byte ^ 1]))
