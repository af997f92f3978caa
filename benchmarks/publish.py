"""Measures the cost of a weight publish: ``python -m benchmarks.publish``.

The benchmark uses a model of 340 MB on two gloo ranks, and a real SGLang server on the CPU. Most figures are medians of
ratios. The two times of a ratio are measured one after the other in the same process. The benchmark writes to shared
memory and to the folder ``--directory``. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from asyncrl.weights.publish import WeightPublisher
from benchmarks import publish_collective, publish_delta
from benchmarks.publish_log import measure_log
from benchmarks.publish_steps import NUM_RANKS, measure_steps, run_ranks
from benchmarks.random_models import save_random_qwen3
from benchmarks.report import Target, print_report
from benchmarks.saved_weights import describe_model
from learner.config import Device, LearnerConfig
from learner.fsdp import local_tensor
from learner.model_shards import PretrainedShards
from learner.packed_model import PackedModel
from learner.roles import ACTOR
from rollout_fleet.config import EngineDevice, RolloutFleetConfig, SGLangConfig
from rollout_fleet.engines.sglang import SGLangEngine

NUM_RUNS = 7
TARGETS = {
    "ranks_blocked_memcpys": Target(at_most=2.0),
    "pause_vs_engine_load": Target(at_most=1.3),
    "shared_memory_vs_file": Target(at_most=0.5),
    "rank_memory_vs_model": Target(at_most=0.6),
    "controller_ms_per_publish_1000_engines": Target(at_most=50.0),
    "steps_per_s_with_publish": Target(at_least=0.95),
    "publish_memcpys_shared_memory": Target(),
    "publish_memcpys_file": Target(),
    **publish_collective.TARGETS,
    **publish_delta.TARGETS,
}
BASELINE = (
    "one memcpy of a rank's shard; steps that publish nothing; SGLang's own /update_weights_from_disk of the same "
    "bytes; the size of the model"
)


def save_model(directory: Path) -> str:
    """Save a random Qwen3 with 85 million parameters in float32; return the path of the model's folder."""
    ids = {"eos_token_id": 1, "bos_token_id": 2, "pad_token_id": 0}
    return save_random_qwen3(directory, layers=4, hidden=1024, mlp=3072, heads=8, head_dim=128, vocab_size=32000, **ids)


def rank_main(model_path: str, folders: list[str]) -> None:
    """Run one learner rank. The rank publishes weights to each of the folders, and prints the times as JSON."""
    torch.set_num_threads(1)
    config = LearnerConfig(device=Device.cpu, num_ranks=NUM_RANKS)
    model = PackedModel(config, ACTOR, model_path=model_path)
    shards = [local_tensor(parameter.detach()) for parameter in model.head.parameters()]
    copies = [torch.zeros_like(shard) for shard in shards]

    def copy() -> None:
        for place, shard in zip(copies, shards, strict=True):
            place.copy_(shard)

    copy()
    times: dict[str, list[float]] = {
        "memcpy": [],
        "blocked": [],
        **{f"publish_{index}": [] for index in range(len(folders))},
    }
    memory = []
    for index, folder in enumerate(folders):
        before = _status("VmRSS")
        _reset_peak()
        publisher = WeightPublisher(PretrainedShards.of(model), folder, keep=2)
        for version in range(NUM_RUNS + 1):
            # Wait until the files of the next version are prepared. In training, they are prepared when a step ends.
            publisher.ready.result()
            dist.barrier()
            memcpy_s = _timed(copy)
            dist.barrier()
            began = time.perf_counter()
            pending = publisher.publish(version)
            blocked_s = time.perf_counter() - began
            pending.result()
            publish_s = time.perf_counter() - began
            if version:
                times["memcpy"].append(memcpy_s)
                times["blocked"].append(blocked_s)
                times[f"publish_{index}"].append(publish_s)
        publisher.close()
        memory.append(_status("VmHWM") - before)
    # Report the memory only for the publishes to shared memory.
    # For a folder on a disk, the kernel's memory count of this rank also includes pages of other ranks.
    report = {"times": times, "memory": memory[0], "shard": sum(shard.nbytes for shard in shards)}
    sys.stdout.write(json.dumps(report) + "\n")
    dist.destroy_process_group()


def measure_ranks(model_path: str, folders: list[str]) -> dict[str, float]:
    """Measure how long the learner's ranks need for a publish. Return the figures of the slower rank by name.

    Times are divided by the time to copy the rank's shard once. The memory is divided by the model's bytes. ``folders``
    are a folder in shared memory and a folder on a disk.
    """
    reports = run_ranks("benchmarks.publish", "--rank", model_path, *folders)
    times = [report["times"] for report in reports]
    model_bytes = sum(report["shard"] for report in reports)

    def over_memcpy(name: str, part: slice) -> float:
        return max(
            statistics.median(a / b for a, b in zip(rank[name], rank["memcpy"][part], strict=True)) for rank in times
        )

    whole, first, second = slice(None), slice(0, NUM_RUNS), slice(NUM_RUNS, None)
    return {
        "ranks_blocked_memcpys": over_memcpy("blocked", whole),
        "publish_memcpys_shared_memory": over_memcpy("publish_0", first),
        "publish_memcpys_file": over_memcpy("publish_1", second),
        "rank_memory_vs_model": max(report["memory"] for report in reports) / model_bytes,
    }


async def measure_engine(model_path: str, folder: str, scratch: Path) -> dict[str, float]:
    """Return how long an engine pauses for a verified load of weights, divided by the time of SGLang's own load.

    ``folder`` is in shared memory and contains the model. ``scratch`` is a folder for other files.
    """
    config = RolloutFleetConfig(sglang=SGLangConfig(dtype="float32", max_total_tokens=4096))
    engine = SGLangEngine(config, model_path=model_path, device=EngineDevice.cpu, rank=0, log_dir=str(scratch), seed=0)
    offer = describe_model(folder).offer(scratch / "manifest.json", 1)
    await engine.start()
    try:
        verified, bare = [], []
        for run in range(NUM_RUNS + 1):
            ours = await engine.load_weights(offer)
            await engine.client.call("POST", "/pause_generation", {"mode": "retract"})
            began = time.perf_counter()
            await engine.client.call("POST", "/update_weights_from_disk", {"model_path": folder, "flush_cache": True})
            seconds = time.perf_counter() - began
            await engine.client.call("POST", "/continue_generation", {})
            if run:
                verified.append(ours)
                bare.append(seconds)
    finally:
        await engine.stop()
    return {"pause_vs_engine_load": statistics.median(verified) / statistics.median(bare)}


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _status(name: str) -> int:
    """Return a field of /proc/self/status in bytes, for example the peak memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def main() -> None:
    """Measure a publish on the learner's side and a load on the engine's side, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", default=".", help="folder on a disk for the figures of the file transport")
    parser.add_argument("--rank", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        rank_main(arguments.rank[0], arguments.rank[1:])
        return
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="asyncrl-bench-") as memory,
        tempfile.TemporaryDirectory(dir=arguments.directory, prefix="asyncrl-bench-") as disk,
    ):
        model_path = save_model(Path(disk, "model"))
        figures = measure_ranks(model_path, [memory + "/p", disk + "/p"])
        figures |= publish_collective.measure(model_path, Path(memory), NUM_RUNS)
        figures |= publish_delta.measure(model_path, Path(memory), NUM_RUNS)
        figures |= measure_steps(model_path, memory + "/s")
        in_memory = save_model(Path(memory, "model"))
        figures |= asyncio.run(measure_engine(model_path, in_memory, Path(disk)))
    figures |= measure_log()
    figures["shared_memory_vs_file"] = figures["publish_memcpys_shared_memory"] / figures["publish_memcpys_file"]
    print_report(f"{NUM_RANKS} gloo ranks and an SGLang server", {}, figures, TARGETS, baseline=BASELINE)


if __name__ == "__main__":
    main()
