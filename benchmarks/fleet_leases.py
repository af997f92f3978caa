"""Measures the time from a commit (the end of a learner step) until waiting workers get leases for the next step.

A lease permits a worker to generate a group. The buffer is the real server in its own process, and the controller uses
the real client. The workers are sockets in two more processes. Each socket sends the messages of a rollout worker, but
generates nothing. With ``max_lag`` 0, no group of the next step may begin before the commit. The time includes the
message that announces the new version.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from asyncrl.core.types import Lease, Prompt, WeightOffer
from benchmarks.buffer import group_of
from buffer import BufferClient, BufferConfig, BufferProcess, ControlClient, LearnerClient, commands, operations
from buffer.encoding import Message, error_of, frames_of, group_frames, parse_answers
from buffer.records import Operation
from buffer.sockets import Channel, client_context

NUM_WORKERS = 1000
NUM_PROCESSES = 2
NUM_STEPS = 20
WARM_UP_STEPS = 3
EPOCH = "benchmark"
START_TIMEOUT_S = 60.0
SETTLE_S = 0.2
"""Seconds before each commit, so that all messages of the previous step arrive."""


def measure_leases(groups_per_step: int, *, num_workers: int = NUM_WORKERS, num_steps: int = NUM_STEPS) -> list[float]:
    """Return the seconds from a commit (the end of a learner step) until a worker gets a new group.

    The list has one value for each group of each measured step.
    """
    return asyncio.run(_measure(groups_per_step, num_workers, num_steps))


async def _measure(groups_per_step: int, num_workers: int, num_steps: int) -> list[float]:
    config = BufferConfig(epoch=EPOCH, max_lag=0, heartbeat_s=120.0, request_timeout_s=120.0, queue_size=100_000)
    with BufferProcess(config, groups_per_step=groups_per_step, log_path=Path(os.devnull)) as server:
        connection = BufferClient(server.address, request_timeout_s=120.0)
        client, learner = ControlClient(connection), LearnerClient(connection)
        try:
            with _workers(server.address, num_workers) as processes:
                async with asyncio.timeout(START_TIMEOUT_S):
                    await learner.offer(_offer(0))
                    await client.served(-1, num_workers)
                committed = await _train(client, learner, groups_per_step, num_steps)
                outputs = [await asyncio.to_thread(_end, process) for process in processes]
        finally:
            await client.close()
    waits = []
    for line in "".join(outputs).splitlines():
        version, heard_ns = map(int, line.split())
        if version - 1 in committed:
            waits.append((heard_ns - committed[version - 1]) / 1e9)
    expected = len(committed) * groups_per_step
    if len(waits) != expected:
        raise RuntimeError(f"workers received {len(waits)} leases, expected {expected}; the measurement is invalid")
    return waits


async def _train(client: ControlClient, learner: LearnerClient, groups_per_step: int, num_steps: int) -> dict[int, int]:
    """Make the learner steps. Return the time of each commit (the end of a step) in nanoseconds, by version.

    The warm-up steps are left out.
    """
    prompt_ids = np.arange(16, dtype=np.int32)
    committed = {}
    for version in range(num_steps + 1):
        first = version * groups_per_step
        prompts = [Prompt(group_id=first + number, prompt_ids=prompt_ids) for number in range(groups_per_step)]
        await client.enqueue(prompts)
        await asyncio.sleep(SETTLE_S)
        if version:
            committed[version - 1] = time.monotonic_ns()
            await client.commit(version - 1)
        await client.plan(version)
        await learner.offer(_offer(version + 1))
    return {version: at for version, at in committed.items() if version >= WARM_UP_STEPS}


def _offer(version: int) -> WeightOffer:
    return WeightOffer(version=version, manifest=f"/dev/shm/v{version:08d}/manifest.json", digest="0" * 32, num_bytes=1)


@contextmanager
def _workers(address: str, num_workers: int) -> Iterator[list[subprocess.Popen[str]]]:
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.fleet_leases", address, str(first), str(num_workers // NUM_PROCESSES)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for first in range(0, num_workers, num_workers // NUM_PROCESSES)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _end(process: subprocess.Popen[str]) -> str:
    process.send_signal(signal.SIGTERM)
    return process.communicate(timeout=30)[0]


class SimulatedWorker:
    """Simulates a rollout worker: sends the messages of a worker, but generates nothing.

    The simulated worker leases one group at a time, and immediately stores a fixed result for the group.
    """

    def __init__(self, address: str, number: int, heard: list[tuple[int, int]]) -> None:
        socket: zmq.Socket[bytes] = client_context().socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, f"worker-{number:05d}".encode())
        socket.connect(address)
        self._name = f"engine-{number}"
        self._heard = heard
        self._ids = itertools.count(1)
        self._version = -1
        self._lease_id = 0
        self._channel = Channel(socket, self._on_message)
        self._send(self._request(operations.Hello(produces=True)), self._next_offer())

    def _next_offer(self) -> Message:
        return self._request(operations.NextOffer(self._version + 1))

    def _request(self, operation: Operation[Any], payload: Sequence[Any] = ()) -> Message:
        return Message(request_id=next(self._ids), body=operation, payload=payload)

    def _send(self, *requests: Message) -> None:
        self._channel.send(frames_of(EPOCH, requests))

    def _ask(self) -> Message:
        request = self._request(commands.LeaseGroups(engine_version=self._version, max_groups=1))
        self._lease_id = request.request_id
        return request

    def _on_message(self, frames: list[zmq.Frame]) -> None:
        for answer in parse_answers(frames):
            match answer.body:
                case operations.Offered(offer=offer):
                    self._load(offer.version)
                case commands.Leased(leases=leases):
                    self._on_leases(answer.request_id, leases)
                case operations.Failure() as failure:
                    raise error_of(failure)

    def _load(self, version: int) -> None:
        """Report ``version`` as loaded, and request leases at this version.

        If a request for leases at the previous version is pending, cancel the request.
        """
        before, self._version = self._lease_id, version
        taken_back = [self._request(operations.Cancel(before))] if before else []
        loaded = self._request(operations.Loaded(version=version, seconds=0.0, engine=self._name))
        self._send(*taken_back, loaded, self._ask(), self._next_offer())

    def _on_leases(self, request_id: int, leases: Sequence[commands.LeasedGroup]) -> None:
        if request_id != self._lease_id:
            return
        self._lease_id = 0
        puts = []
        for lease in leases:
            self._heard.append((lease.engine_version, time.monotonic_ns()))
            puts.append(self._put(*lease.key, lease.engine_version))
        self._send(*puts, self._ask())

    def _put(self, group_id: int, attempt: int, version: int) -> Message:
        versions = {"oldest_version": version, "newest_version": version}
        return self._request(
            commands.Put(summary=replace(_SUMMARY, group_id=group_id, attempt=attempt, **versions)), _FRAMES
        )


_LEASE = Lease(
    prompt=Prompt(group_id=0, prompt_ids=np.arange(16, dtype=np.int32)), attempt=0, engine_version=0, deadline_version=0
)
_GROUP = group_of(_LEASE, 1000, num_samples=2)
_SUMMARY, _FRAMES = _GROUP.summary, group_frames(_GROUP)


async def _work(address: str, first: int, number: int) -> None:
    heard: list[tuple[int, int]] = []
    workers = [SimulatedWorker(address, index, heard) for index in range(first, first + number)]
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    sys.stdout.writelines(f"{version} {heard_ns}\n" for version, heard_ns in heard)
    sys.stdout.flush()
    del workers


def main() -> None:
    """Run some of the simulated workers in this process. `measure_leases` has started the process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("first", type=int)
    parser.add_argument("number", type=int)
    arguments = parser.parse_args()
    asyncio.run(_work(arguments.address, arguments.first, arguments.number))


if __name__ == "__main__":
    main()
