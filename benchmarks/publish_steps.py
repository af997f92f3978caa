"""Compares the speed of training steps during a publish with the speed of training steps without a publish.

`benchmarks.publish` calls this module. Two gloo ranks share one core, and their publisher threads share a second core.
No engine runs.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from asyncrl.weights.publish import WeightPublisher
from learner.config import AlgorithmConfig, Device, LearnerConfig, OptimizerConfig
from learner.losses import policy_objective
from learner.model_shards import PretrainedShards
from learner.trainer import Trainer
from learner.types import TokenSequence

NUM_RANKS = 2
NUM_STEPS = 5
NUM_SEQUENCES, NUM_TOKENS = 6, 64
"""Sequences per rank and step, and tokens per sequence. Real steps are much larger."""


def measure_steps(model_path: str, folder: str) -> dict[str, float]:
    """Return the steps per second during publishes, divided by the steps per second without a publish.

    The result is the smaller ratio of the two ranks.
    """
    reports = run_ranks("benchmarks.publish_steps", model_path, folder)
    ratios = [statistics.median(r["without_s"]) / statistics.median(r["with_s"]) for r in reports]
    return {"steps_per_s_with_publish": min(ratios)}


def run_ranks(module: str, *arguments: str) -> list[Any]:
    """Run a Python module as two gloo ranks; return the parsed JSON of the last line that each rank prints."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {
        "WORLD_SIZE": str(NUM_RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", module, *arguments]
    ranks = [
        subprocess.Popen(
            command, env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=subprocess.PIPE
        )
        for rank in range(NUM_RANKS)
    ]
    return [json.loads(rank.communicate()[0].splitlines()[-1]) for rank in ranks]


def rank_main(model_path: str, folder: str) -> None:
    """Run one rank. It alternately makes a step with a publish and a step without one. Print all seconds as JSON."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:1])
    torch.set_num_threads(1)
    config = LearnerConfig(device=Device.cpu, num_ranks=NUM_RANKS, optimizer=OptimizerConfig(lr=1e-6))
    trainer, objective = Trainer(config, model_path=model_path, total_updates=1000), policy_objective(AlgorithmConfig())
    publisher = WeightPublisher(PretrainedShards.of(trainer), folder, keep=2)
    # Pin the publisher's thread to the last core. The threads that it starts inherit the core.
    publisher._thread.submit(os.sched_setaffinity, 0, cores[-1:]).result()
    sequences = _sequences(trainer.mesh.rank)
    times: dict[str, list[float]] = {"without_s": [], "with_s": []}
    for step in range(NUM_STEPS + 1):
        for name in times if step % 2 else reversed(times):
            publisher.wait()
            dist.barrier()
            began_s = time.perf_counter()
            if name == "with_s":
                publisher.publish(step)
            trainer.update(sequences, objective)
            if step:  # Do not record step 0, which is a warm-up.
                times[name].append(time.perf_counter() - began_s)
    publisher.close()
    sys.stdout.write(json.dumps(times) + "\n")
    dist.destroy_process_group()


def _sequences(rank: int) -> list[TokenSequence]:
    rng = np.random.default_rng(rank)
    return [
        TokenSequence(
            input_ids=rng.integers(3, 1000, NUM_TOKENS).astype(np.int32),
            loss_mask=np.arange(NUM_TOKENS) >= NUM_TOKENS // 4,
            columns={
                "behavior_logprobs": np.full(NUM_TOKENS, -3.0, dtype=np.float32),
                "advantages": np.full(NUM_TOKENS, rng.normal(), dtype=np.float32),
            },
        )
        for _ in range(NUM_SEQUENCES)
    ]


if __name__ == "__main__":
    rank_main(*sys.argv[1:])
