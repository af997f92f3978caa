"""Measures the bytes, and the time until the announcement, if deltas (only changed values) or adapters are published.

`benchmarks.publish` calls this module.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import torch

from asyncrl.core.types import WeightOffer
from asyncrl.weights.carriers import PublishOptions
from asyncrl.weights.delta import write_delta
from asyncrl.weights.manifest import PIECE_BYTES, read_manifest
from asyncrl.weights.publish import WeightPublisher
from benchmarks.report import Target
from learner.config import Device, LearnerConfig, LoraConfig
from learner.fsdp import local_tensor
from learner.model_shards import PretrainedShards
from learner.packed_model import PackedModel
from learner.roles import ACTOR

SHARES = (0.01, 0.05)
"""Shares of the values that change in an update. The changed values are random, as in a run in bfloat16."""
INDEX_BYTES = 2
"""Bytes per changed value in an ideal encoding of positions. They store the gap to the next changed value."""
LORA = LoraConfig(rank=16)
TARGETS = {
    "delta_wire_vs_ideal": Target(at_most=1.2),
    "publish_memcpys_delta": Target(),
    "publish_memcpys_adapter": Target(),
    "adapter_wire_vs_model": Target(),
}


def measure(model_path: str, folder: Path, num_runs: int) -> dict[str, float]:
    """Measure one rank that publishes deltas and adapters into ``folder``; return the figures by name."""
    ratios = [
        wire_vs_ideal(folder, dtype, share, seed=seed)
        for dtype in (torch.bfloat16, torch.float32)
        for seed, share in enumerate(SHARES)
    ]
    delta_memcpys, _ = publish_memcpys(model_path, folder / "p", num_runs, full_every=num_runs + 1)
    adapter_memcpys, offer = publish_memcpys(model_path, folder / "a", num_runs, lora=LORA)
    frozen = read_manifest(offer).base
    assert frozen is not None, "a manifest of adapters has a base"
    return {
        "delta_wire_vs_ideal": max(ratios),
        "publish_memcpys_delta": delta_memcpys,
        "publish_memcpys_adapter": adapter_memcpys,
        "adapter_wire_vs_model": offer.num_bytes / frozen.num_bytes - 1,
    }


def wire_vs_ideal(folder: Path, dtype: torch.dtype, share: float, *, seed: int) -> float:
    """Return the bytes of a delta file (the changed values of a version), divided by the ideal number of bytes.

    In an ideal file, each changed value takes its own bytes plus `INDEX_BYTES` bytes. ``share`` is the fraction of the
    values that change.
    """
    generator = torch.Generator().manual_seed(seed)
    size = 2 * PIECE_BYTES // dtype.itemsize
    old = torch.randn(size, generator=generator).to(dtype)
    new = torch.where(torch.rand(size, generator=generator) < share, old * 1.05, old)
    num_changed = int((old != new).sum())
    spans = [(start, PIECE_BYTES, dtype.itemsize) for start in (0, PIECE_BYTES)]
    path = folder / "delta.bin"
    write_delta(path, 0, old.view(torch.uint8).numpy(), new.view(torch.uint8).numpy(), spans)
    return path.stat().st_size / (num_changed * (INDEX_BYTES + dtype.itemsize))


def publish_memcpys(
    model_path: str, folder: Path, num_runs: int, *, full_every: int = 1, lora: LoraConfig | None = None
) -> tuple[float, WeightOffer]:
    """Measure how long one rank needs to publish a version in float32.

    The rank publishes deltas if ``full_every`` is above 1, and adapters if ``lora`` is given.

    Returns:
        A pair: a ratio as the median over the versions, and the offer (the announcement) of the latest version. The
        ratio is the time until a version is announced, divided by the time to copy all weights once.
    """
    config = LearnerConfig(device=Device.cpu, lora=lora or LoraConfig())
    model = PackedModel(config, ACTOR, model_path=model_path)
    weights = [local_tensor(parameter.detach()) for parameter in model.head.parameters()]
    copies = [torch.zeros_like(weight) for weight in weights]
    publisher = WeightPublisher(
        PretrainedShards.of(model),
        str(folder),
        keep=2,
        options=PublishOptions(full_every=full_every, adapters=lora is not None),
    )
    offer = publisher.publish(0).result()
    ratios = []
    for version in range(1, num_runs + 1):
        for weight in weights:
            weight.view(-1)[version % 32 :: 32] *= 1.01
        # Wait until the files of the next version are prepared. In training, they are prepared when a step ends.
        publisher.ready.result()
        began_s = time.perf_counter()
        for place, weight in zip(copies, weights, strict=True):
            place.copy_(weight)
        memcpy_s = time.perf_counter() - began_s
        began_s = time.perf_counter()
        offer = publisher.publish(version).result()
        ratios.append((time.perf_counter() - began_s) / memcpy_s)
    publisher.close()
    assert offer is not None, "rank 0 gets an offer"
    return statistics.median(ratios), offer
