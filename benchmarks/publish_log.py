"""Measures how much time a publish costs the controller if a thousand engines wait for each new version.

The buffer server is real. The engines are simulated by sockets in another process. The sockets send the messages of
rollout workers, but load nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from asyncrl.core.types import Prompt, WeightOffer
from benchmarks.buffer import group_of
from buffer import BufferClient, BufferConfig, BufferProcess, ControlClient, LearnerClient, WorkerClient
from buffer.encoding import Message, error_of, frames_of, parse_answers
from buffer.operations import Failure, Loaded, NextOffer, Offered
from buffer.records import Operation
from buffer.sockets import Channel, client_context

NUM_ENGINES = 1000
NUM_PUBLISHES = 20
START_TIMEOUT_S = 60.0


def measure_log(num_engines: int = NUM_ENGINES, num_publishes: int = NUM_PUBLISHES) -> dict[str, float]:
    """Return a dictionary with one figure: the controller's median milliseconds per publish.

    The time of a publish is the wall time to commit the learner step, plus the controller's CPU time until all engines
    have the version.
    """
    return asyncio.run(_measure(num_engines, num_publishes))


async def _measure(num_engines: int, num_publishes: int) -> dict[str, float]:
    with BufferProcess(BufferConfig(epoch="benchmark"), groups_per_step=1, log_path=Path(os.devnull)) as server:
        controller, others = ControlClient(BufferClient(server.address)), BufferClient(server.address)
        learner = LearnerClient(others)
        costs = []
        try:
            with _receivers(server.address, num_engines):
                async with asyncio.timeout(START_TIMEOUT_S):
                    await learner.offer(_offer(0))
                    await controller.served(-1, num_engines)
                for version in range(num_publishes):
                    await _store_batch(others, version)
                    await controller.plan(version)
                    await learner.offer(_offer(version + 1))
                    costs.append(await _publish(controller, version, num_engines))
        finally:
            for client in (controller, others):
                await client.close()
    return {f"controller_ms_per_publish_{num_engines}_engines": 1e3 * statistics.median(costs)}


async def _publish(controller: ControlClient, version: int, num_engines: int) -> float:
    """Do the controller's part of a publish: commit the step, and wait until all engines serve the version."""
    began_s, processor_s = time.perf_counter(), time.process_time()
    await controller.commit(version)
    commit_s = time.perf_counter() - began_s
    await controller.served(version, num_engines)
    return commit_s + time.process_time() - processor_s


def _offer(version: int) -> WeightOffer:
    return WeightOffer(version=version, manifest=f"/dev/shm/v{version:08d}/manifest.json", digest="0" * 32, num_bytes=1)


async def _store_batch(client: BufferClient, version: int) -> None:
    worker = WorkerClient(client)
    await ControlClient(client).enqueue([Prompt(group_id=version, prompt_ids=np.arange(3, dtype=np.int32))])
    [lease] = await worker.lease(version, 1)
    await worker.put(group_of(lease, 1000, num_samples=2))


@contextmanager
def _receivers(address: str, num_engines: int) -> Iterator[None]:
    command = [sys.executable, "-m", "benchmarks.publish_log", address, str(num_engines)]
    process = subprocess.Popen(command)
    try:
        yield
    finally:
        process.kill()
        process.wait()


class SimulatedReceiver:
    """Simulates a rollout worker: immediately reports each announced version as loaded, but loads nothing."""

    def __init__(self, address: str, number: int) -> None:
        socket: zmq.Socket[bytes] = client_context().socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, f"engine-{number}".encode())
        socket.connect(address)
        self._name = f"engine-{number}"
        self._ids = itertools.count(1)
        self._version = -1
        self._channel = Channel(socket, self._on_message)
        self._ask()

    def _ask(self) -> None:
        self._send(NextOffer(self._version + 1))

    def _on_message(self, frames: list[zmq.Frame]) -> None:
        for answer in parse_answers(frames):
            if isinstance(answer.body, Offered):
                self._version = answer.body.offer.version
                self._send(Loaded(version=self._version, seconds=0.0, engine=self._name))
                self._ask()
            elif isinstance(answer.body, Failure):
                raise error_of(answer.body)

    def _send(self, operation: Operation[Any]) -> None:
        self._channel.send(frames_of("benchmark", [Message(request_id=next(self._ids), body=operation)]))


async def _receive(address: str, num_engines: int) -> None:
    receivers = [SimulatedReceiver(address, number) for number in range(num_engines)]
    await asyncio.Event().wait()
    del receivers


def main() -> None:
    """Run the simulated engines in this process. `measure_log` has started the process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("num_engines", type=int)
    arguments = parser.parse_args()
    asyncio.run(_receive(arguments.address, arguments.num_engines))


if __name__ == "__main__":
    main()
