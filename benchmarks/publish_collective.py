"""Measures a publish from the memory of two gloo ranks to two receivers. All processes run on this host.

``collective``: the ranks send the version over loopback to two simulated hosts with two workers each. Each simulated
    host is a folder in shared memory. Its workers use only this folder.
``collective_engine``: each receiver reads the version from the network tensor by tensor, as a rank of an engine does.
    The receiver verifies all bytes, but has no model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.core.types import Carrier, WeightOffer
from asyncrl.weights.carriers import PublishOptions
from asyncrl.weights.load import open_weights
from asyncrl.weights.publish import WeightPublisher
from asyncrl.weights.staging import WeightStager
from asyncrl.weights.stream import WeightGroup
from benchmarks.report import Target
from learner.config import Device, LearnerConfig
from learner.fsdp import local_tensor
from learner.model_shards import PretrainedShards
from learner.packed_model import PackedModel
from learner.roles import ACTOR

NUM_RANKS = 2
NUM_RECEIVERS = 2
WORKERS_PER_HOST = 2
TIMEOUT_S = 60.0
CARRIERS = {
    "collective": Carrier.host_stream,
    "collective_engine": Carrier.engine_stream,
}
TARGETS = {
    **{f"publish_memcpys_{way}": Target() for way in CARRIERS},
    "network_bytes_per_host_per_published_byte": Target(at_most=1.05),
    "host_memory_per_published_byte": Target(at_most=1.05),
}


def rank_main(way: str, model_path: str, folder: str) -> None:
    """Run one learner rank. For each line of stdin, publish one version and print one line of JSON.

    A printed line has the seconds to copy the shard, the seconds of the publish, and the offer (the message that
    announces the version). ``way`` is a key of `CARRIERS`.
    """
    torch.set_num_threads(1)
    model = PackedModel(LearnerConfig(device=Device.cpu, num_ranks=NUM_RANKS), ACTOR, model_path=model_path)
    options = PublishOptions(carrier=CARRIERS[way], num_receivers=NUM_RECEIVERS, timeout_s=TIMEOUT_S, num_held=1)
    publisher = WeightPublisher(PretrainedShards.of(model), folder, keep=1, options=options)
    shards = [local_tensor(parameter.detach()) for parameter in model.head.parameters()]
    copies = [torch.zeros_like(shard) for shard in shards]
    for version, _ in enumerate(sys.stdin):
        # Wait until the files of the next version are prepared. In training, they are prepared when a step ends.
        publisher.ready.result()
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
    """Measure how long all receivers wait for a version, and how many bytes they receive; return figures by name.

    The times are divided by the time that the slower rank needs to copy its shard once. ``scratch`` is a folder in
    shared memory.
    """
    figures: dict[str, float] = {}
    for way in CARRIERS:
        runs = _measure(way, model_path, scratch / way, num_runs)
        figures[f"publish_memcpys_{way}"] = statistics.median(run[0] for run in runs)
        if CARRIERS[way] == Carrier.host_stream:
            figures["network_bytes_per_host_per_published_byte"] = max(run[1] for run in runs)
            figures["host_memory_per_published_byte"] = max(run[2] for run in runs)
    return figures


def _measure(way: str, model_path: str, scratch: Path, num_runs: int) -> list[tuple[float, float, float]]:
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
        with closing(_Hosts(scratch / "received")) as hosts:
            return [_publish_and_receive(ranks, hosts) for _ in range(num_runs + 1)][1:]
    finally:
        for rank in ranks:
            rank.communicate()


class _Hosts:
    """Two simulated hosts. A host is a folder in shared memory, and has two workers.

    Attributes:
        num_bytes: Bytes that the workers received from the network.
    """

    def __init__(self, folder: Path) -> None:
        self._folders = [folder / f"host-{number}" for number in range(NUM_RECEIVERS)]
        self._workers = [
            WeightStager(f"engine-{number}", memory=memory, copies=False, timeout_s=TIMEOUT_S)
            for memory in self._folders
            for number in range(WORKERS_PER_HOST)
        ]
        self.num_bytes, receive = 0, WeightGroup.receive

        def counted(group: WeightGroup, data: Tensor, *arguments: Any) -> Callable[[], None]:
            self.num_bytes += data.nbytes
            return receive(group, data, *arguments)

        self._patch = patch.object(WeightGroup, "receive", counted)
        self._patch.start()

    async def stage(self, offer: WeightOffer) -> tuple[float, int]:
        """Let all workers receive the version that ``offer`` announces.

        Returns:
            A pair: the value of `time.perf_counter` at the end, and the bytes of weights on the host with more bytes.
        """
        async with AsyncExitStack() as stack:
            await asyncio.gather(*(stack.enter_async_context(worker.staged(offer)) for worker in self._workers))
            return time.perf_counter(), max(map(_bytes_in, self._folders))

    def close(self) -> None:
        """Close the workers. The workers remove the folders that represent the memory of the hosts."""
        self._patch.stop()
        for worker in self._workers:
            worker.close()


def _bytes_in(folder: Path) -> int:
    """Return the allocated bytes of the safetensors files below a folder. Hard links to one file are counted once."""
    return sum(
        {
            found.st_ino: found.st_blocks * 512 for path in folder.rglob("*.safetensors") if (found := path.stat())
        }.values()
    )


def _publish_and_receive(ranks: list[subprocess.Popen[str]], hosts: _Hosts) -> tuple[float, float, float]:
    """Publish one version, and wait until all receivers have the version.

    Returns:
        Three ratios: the time divided by the time of one memcpy, the bytes that one host receives per published byte,
        and the bytes in one host's memory per published byte.
    """
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write("\n")
        rank.stdin.flush()
    lines = [json.loads(rank.stdout.readline()) for rank in ranks if rank.stdout is not None]
    offer = WeightOffer(**lines[0][2])
    began_bytes, num_bytes, offered_s = hosts.num_bytes, 0, time.perf_counter()
    if offer.carrier == Carrier.host_stream:
        received_s, num_bytes = asyncio.run(hosts.stage(offer))
    else:
        asyncio.run(_read_in_engines(offer))
        received_s = time.perf_counter()
    memcpys = (lines[0][1] + received_s - offered_s) / max(line[0] for line in lines)
    return (
        memcpys,
        (hosts.num_bytes - began_bytes) / NUM_RECEIVERS / offer.num_bytes,
        num_bytes / offer.num_bytes,
    )


async def _read_in_engines(offer: WeightOffer) -> None:
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
