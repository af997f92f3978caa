"""A publish from the memory of two gloo ranks to two receivers on this host.

``collective``: over loopback into memory of the host. ``collective_engine``: over loopback, tensor by tensor, as the
ranks of engines receive, read whole and verified, into no model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from asyncrl.core.types import Carrier, WeightOffer
from asyncrl.weights.carriers import PublishOptions
from asyncrl.weights.load import open_weights
from asyncrl.weights.publish import WeightPublisher
from asyncrl.weights.stream import receive_weights
from benchmarks.report import Target
from learner.config import Device, LearnerConfig
from learner.fsdp import local_tensor
from learner.model_shards import PretrainedShards
from learner.packed_model import PackedModel
from learner.roles import ACTOR

NUM_RANKS = 2
NUM_RECEIVERS = 2
TIMEOUT_S = 60.0
CARRIERS = {
    "collective": Carrier.host_stream,
    "collective_engine": Carrier.engine_stream,
}
TARGETS = {f"publish_memcpys_{way}": Target() for way in CARRIERS}


def rank_main(way: str, model_path: str, folder: str) -> None:
    """Run one learner rank, which publishes one version per input line and prints its times and the offer."""
    torch.set_num_threads(1)
    model = PackedModel(LearnerConfig(device=Device.cpu, num_ranks=NUM_RANKS), ACTOR, model_path=model_path)
    options = PublishOptions(carrier=CARRIERS[way], num_receivers=NUM_RECEIVERS, timeout_s=TIMEOUT_S, num_held=1)
    publisher = WeightPublisher(PretrainedShards.of(model), folder, keep=1, options=options)
    shards = [local_tensor(parameter.detach()) for parameter in model.head.parameters()]
    copies = [torch.zeros_like(shard) for shard in shards]
    for version, _ in enumerate(sys.stdin):
        publisher._ready.result()  # in training the next file is ready before a step ends
        dist.barrier()
        began_s = time.perf_counter()
        for place, shard in zip(copies, shards, strict=True):
            place.copy_(shard)
        memcpy_s = time.perf_counter() - began_s
        began_s = time.perf_counter()
        offer = publisher.publish(version).result()
        publish_s = time.perf_counter() - began_s
        offered = None if offer is None else asdict(offer)
        sys.stdout.write(json.dumps([memcpy_s, publish_s, offered]) + "\n")
        sys.stdout.flush()
    publisher.close()
    dist.destroy_process_group()


def measure(model_path: str, scratch: Path, num_runs: int) -> dict[str, float]:
    """Return the time until two receivers have the version, in memcpys of the larger shard; ``scratch`` is memory."""
    return {f"publish_memcpys_{way}": _measure(way, model_path, scratch / way, num_runs) for way in CARRIERS}


def _measure(way: str, model_path: str, scratch: Path, num_runs: int) -> float:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"WORLD_SIZE": str(NUM_RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-m", "benchmarks.publish_collective", way, model_path, str(scratch / "sent")]
    ranks = [
        subprocess.Popen(
            command,
            env={**os.environ, **common, "OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(NUM_RANKS)
    ]
    try:
        ratios = [_publish_and_receive(ranks, scratch / "received") for _ in range(num_runs + 1)]
    finally:
        for rank in ranks:
            rank.communicate()
    return statistics.median(ratios[1:])


def _publish_and_receive(ranks: list[subprocess.Popen[str]], folder: Path) -> float:
    """Publish one version; return its time in memcpys."""
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write("\n")
        rank.stdin.flush()
    lines = [json.loads(rank.stdout.readline()) for rank in ranks if rank.stdout is not None]
    offered_s = time.perf_counter()
    asyncio.run(_receive(WeightOffer(**lines[0][2]), folder))
    received_s = time.perf_counter() - offered_s
    shutil.rmtree(folder, ignore_errors=True)
    return (lines[0][1] + received_s) / max(line[0] for line in lines)


async def _receive(offer: WeightOffer, folder: Path) -> None:
    if offer.carrier == Carrier.host_stream:
        await asyncio.gather(*(receive_weights(offer, folder, timeout_s=TIMEOUT_S) for _ in range(NUM_RECEIVERS)))
    else:
        await asyncio.gather(*(asyncio.to_thread(_read_whole, offer) for _ in range(NUM_RECEIVERS)))


def _read_whole(offer: WeightOffer) -> None:
    with closing(open_weights(offer, torch.device("cpu"), timeout_s=TIMEOUT_S)) as weights:
        for _ in weights.tensors():
            pass
        weights.verify()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=CARRIERS)
    parser.add_argument("model_path")
    parser.add_argument("folder")
    arguments = parser.parse_args()
    rank_main(arguments.way, arguments.model_path, arguments.folder)
