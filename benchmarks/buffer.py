"""Measures the buffer's speed: ``python -m benchmarks.buffer [--quick] [--only disk small]``.

The last line of the output is JSON. Each figure is a median over several repetitions. If a figure compares the buffer
with another system, each repetition measures both systems. The comparison with TransferQueue needs the ``bench`` extra.
Without the extra, ``vs_transfer_queue`` is null.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.core.trajectory import Trajectory, TrajectoryGroup, Turn
from asyncrl.core.types import FinishReason, GroupSummary, Lease, Prompt
from benchmarks import buffer_peers
from benchmarks.buffer_admission import admission_figures
from benchmarks.buffer_raw import RawStore
from benchmarks.report import Target, print_report
from buffer import (
    BufferClient,
    BufferConfig,
    BufferProcess,
    ControlClient,
    Durability,
    LearnerClient,
    Ledger,
    StalenessRule,
    SyncBufferClient,
    WorkerClient,
    encoding,
)
from buffer.commands import Commit, Enqueue, LeaseGroups, PlanBatch, Put
from buffer.server import calm_collector

_BYTES_PER_TOKEN = 12
_WINDOW = 32
_FETCHED_AT_ONCE = 64
_SHORT_ROUNDS = 3
"""Factor on the number of repetitions of only 30 ms, because the ratios of such short repetitions vary by a quarter."""

Figures = dict[str, float | None]


def group_of(lease: Lease | None, num_bytes: int, *, num_samples: int = 8) -> TrajectoryGroup:
    """Return a trajectory group whose arrays have about ``num_bytes`` bytes.

    The group has the id of ``lease`` (a worker's right to generate a group). If ``lease`` is None, the id is 0.
    """
    num_tokens = num_bytes // _BYTES_PER_TOKEN
    lengths = np.full(num_samples, num_tokens // num_samples, dtype=np.int32)
    lengths[-1] += num_tokens - int(lengths.sum())
    version = 0 if lease is None else lease.engine_version
    prompt = Turn.given(np.arange(16, dtype=np.int32))
    answers = [
        Turn(
            token_ids=np.arange(length, dtype=np.int32),
            parent=0,
            sampled=True,
            logprobs=np.full(length, -1.0, dtype=np.float32),
            versions=np.full(length, version, dtype=np.int32),
            finish_reason=FinishReason.stop,
        )
        for length in lengths.tolist()
    ]
    return TrajectoryGroup.from_trajectories(
        [Trajectory(turns=(prompt, answer), reward=index / num_samples) for index, answer in enumerate(answers)],
        group_id=0 if lease is None else lease.prompt.group_id,
        attempt=0 if lease is None else lease.attempt,
    )


class Buffer:
    """A buffer server process and its clients.

    Args:
        groups_per_step: Prompt groups per learner step.
        window: Largest number of groups that are sent and not yet acknowledged.
        durability: Whether the server writes a group to disk before the server acknowledges the group.
    """

    def __init__(
        self, groups_per_step: int, *, window: int = _WINDOW, durability: Durability = Durability.memory
    ) -> None:
        self.size = groups_per_step
        self._logs = tempfile.TemporaryDirectory()
        config = BufferConfig(
            max_lag=0,
            queue_size=10 * groups_per_step,
            max_stored_bytes=8 * 1024**3,
            durability=durability,
            directory=self._logs.name,
        )
        self.process = BufferProcess(config, groups_per_step=groups_per_step, log_path=Path(self._logs.name) / "log")
        client = BufferClient(self.process.address)
        self.worker, self.control = WorkerClient(client, window=window), ControlClient(client)
        self.rank = SyncBufferClient(BufferClient(self.process.address))
        self.version = 0

    async def lease(self) -> list[Lease]:
        """Queue the prompts of one learner step, and return a lease (the right to generate a group) per prompt."""
        first = self.version * self.size
        ids = range(first, first + self.size)
        await self.control.enqueue([Prompt(group_id=i, prompt_ids=np.arange(16, dtype=np.int32)) for i in ids])
        leases: list[Lease] = []
        while len(leases) < self.size:
            leases += await self.worker.lease(self.version, self.size - len(leases))
        return leases

    async def finish(self) -> None:
        """Take the stored groups as one batch, and end the learner step. After that, the buffer is empty."""
        await self.control.plan(self.version)
        await self.control.commit(self.version)
        self.version += 1

    async def close(self) -> None:
        """Close the clients and stop the server."""
        await self.worker.close()
        self.rank.close()
        self.process.stop()
        self._logs.cleanup()


async def put_all(worker: WorkerClient, groups: list[TrajectoryGroup], window: int) -> None:
    """Send ``groups`` to the buffer, and wait until all are stored. At most ``window`` groups are sent at once."""
    left = iter(groups)

    async def put() -> None:
        for group in left:
            await worker.put(group)

    await asyncio.gather(*(put() for _ in range(window)))


async def buffer_round_s(buffer: Buffer, num_bytes: int) -> float:
    """Return how many seconds it takes to send the groups of one learner step to the buffer and to fetch them again."""
    groups = [group_of(lease, num_bytes) for lease in await buffer.lease()]
    began = time.perf_counter()
    await put_all(buffer.worker, groups, _WINDOW)
    for i in range(0, len(groups), _FETCHED_AT_ONCE):
        buffer.rank.fetch([group.group_id for group in groups[i : i + _FETCHED_AT_ONCE]])
    elapsed = time.perf_counter() - began
    await buffer.finish()
    return elapsed


def raw_round_s(raw: RawStore, number: int, num_bytes: int) -> float:
    """Return how many seconds it takes to send ``number`` groups through bare ZMQ sockets and to fetch them again.

    A group has ``num_bytes`` bytes.
    """
    frames = [encoding.group_frames(group_of(None, num_bytes)) for _ in range(number)]
    began = time.perf_counter()
    raw.put_all(frames, _WINDOW)
    for i in range(0, number, _FETCHED_AT_ONCE):
        raw.get(range(i, min(number, i + _FETCHED_AT_ONCE)))
    return time.perf_counter() - began


async def against_raw(num_bytes: int, number: int, rounds: int) -> tuple[float, float]:
    """Return a pair: the buffer's throughput divided by that of bare sockets, and the buffer's seconds per group.

    Both values are medians over ``rounds`` repetitions with ``number`` groups of ``num_bytes`` bytes.
    """
    buffer = Buffer(number)
    ratios, seconds = [], []
    with RawStore() as raw:
        for _ in range(rounds + 1):
            ours, bare = await buffer_round_s(buffer, num_bytes), raw_round_s(raw, number, num_bytes)
            ratios.append(bare / ours)
            seconds.append(ours / number)
    await buffer.close()
    return statistics.median(ratios[1:]), statistics.median(seconds[1:])


async def rows_per_s(number: int, rounds: int, *, window: int) -> float:
    """Return how many groups per second the buffer stores. Each group has 35 KB.

    At most ``window`` groups are sent at once. The result is the median over ``rounds`` repetitions.
    """
    buffer = Buffer(number, window=window)
    rates = []
    for _ in range(rounds + 1):
        groups = [group_of(lease, 35_000) for lease in await buffer.lease()]
        began = time.perf_counter()
        await put_all(buffer.worker, groups, window)
        rates.append(number / (time.perf_counter() - began))
        await buffer.finish()
    await buffer.close()
    return statistics.median(rates[1:])


async def disk_vs_memory(number: int, rounds: int) -> float:
    """Return the rate of stored groups with ``durability=disk``, divided by the rate with ``durability=memory``.

    Each group has 35 KB. The two rates are measured alternately.
    """
    buffers = [Buffer(number, durability=durability) for durability in (Durability.memory, Durability.disk)]
    ratios = []
    for _ in range(rounds + 1):
        seconds = []
        for buffer in buffers:
            groups = [group_of(lease, 35_000) for lease in await buffer.lease()]
            began = time.perf_counter()
            await put_all(buffer.worker, groups, _WINDOW)
            seconds.append(time.perf_counter() - began)
            await buffer.finish()
        ratios.append(seconds[0] / seconds[1])
    for buffer in buffers:
        await buffer.close()
    return statistics.median(ratios[1:])


async def single_round_s(buffer: Buffer, num_bytes: int) -> float:
    """Return how many seconds it takes to send a group of ``num_bytes`` bytes to the buffer and to fetch it again."""
    [lease] = await buffer.lease()
    group = group_of(lease, num_bytes, num_samples=64)
    began = time.perf_counter()
    await buffer.worker.put(group)
    buffer.rank.fetch([group.group_id])
    elapsed = time.perf_counter() - began
    await buffer.finish()
    return elapsed


async def against(other: Callable[[], float], num_bytes: int, rounds: int) -> float:
    """Return the time that another system needs to store and fetch one batch, divided by the buffer's time.

    ``other`` is a function that stores and fetches one batch with the other system, and returns the seconds.
    """
    buffer = Buffer(1)
    ratios = []
    for _ in range(rounds + 2):
        ours = await single_round_s(buffer, num_bytes)
        ratios.append(other() / ours)
    await buffer.close()
    return statistics.median(ratios[2:])


def peer_batch(num_bytes: int) -> buffer_peers.Batch:
    """Return a batch of about ``num_bytes`` bytes for Ray's queue and TransferQueue: arrays [64, L] by name."""
    length = num_bytes // _BYTES_PER_TOKEN // 64
    return {
        "response_ids": np.zeros((64, length), dtype=np.int32),
        "response_mask": np.ones((64, length), dtype=bool),
        "behavior_logprobs": np.zeros((64, length), dtype=np.float32),
        "versions": np.zeros((64, length), dtype=np.int32),
    }


async def against_peers(rounds: int) -> dict[str, float | None]:
    """Compare the buffer with Ray's queue and TransferQueue, with batches of 2.2 MB.

    Returns:
        Two ratios by name: the time of Ray's queue or of TransferQueue, divided by the time of the buffer.
        TransferQueue is measured with two settings, and the ratio uses the faster setting. If TransferQueue is not
        installed, its ratio is None.
    """
    num_bytes = 2_200_000
    batch = peer_batch(num_bytes)
    with buffer_peers.own_ray():
        vs_ray = await against(buffer_peers.ray_queue_round(batch), num_bytes, rounds)
    ratios = []
    for num_units in (1, 2):
        with buffer_peers.own_ray():
            round_s = buffer_peers.transfer_queue_round(batch, num_units)
            if round_s is not None:
                ratios.append(await against(round_s, num_bytes, rounds))
                buffer_peers.stop_transfer_queue()
    if not ratios:
        print("TransferQueue is not installed (pip install asyncrl[bench]); vs_transfer_queue is null", file=sys.stderr)
    return {"vs_ray_queue": vs_ray, "vs_transfer_queue": min(ratios, default=None)}


class LedgerLoad:
    """A ledger (the states of all groups) with ``outstanding`` groups. Each `step` replaces a quarter of the groups."""

    def __init__(self, outstanding: int) -> None:
        self._size = outstanding // 4
        self._ledger = Ledger(StalenessRule(max_lag=3, groups_per_step=self._size))
        self._next_id = 0
        self._leases: list[Any] = []
        self.fill(4 * self._size)

    def fill(self, number: int) -> tuple[int, float]:
        """Queue, lease and store ``number`` groups. Return a pair: the number of state changes, and the seconds."""
        ledger, version = self._ledger, self._ledger.learner_version
        began = time.perf_counter()
        ledger.apply(Enqueue(group_ids=tuple(range(self._next_id, self._next_id + number))))
        leases: list[Any] = []
        while len(leases) < number:
            leases += ledger.apply(LeaseGroups(engine_version=version, max_groups=32)).leases
        elapsed = time.perf_counter() - began
        self._next_id += number
        summaries = [self._summary(lease.group_id, version) for lease in leases]
        began = time.perf_counter()
        for summary in summaries:
            ledger.apply(Put(summary=summary))
        return 3 * number, elapsed + time.perf_counter() - began

    def step(self) -> tuple[int, float]:
        """Make one learner step, and add groups in place of the consumed batch.

        Return a pair: the number of state changes of groups, and the seconds.
        """
        version = self._ledger.learner_version
        began = time.perf_counter()
        self._ledger.apply(PlanBatch(version=version))
        self._ledger.apply(Commit(version=version))
        self._ledger.attempts.drain_finished()
        elapsed = time.perf_counter() - began
        transitions, fill_s = self.fill(self._size)
        return transitions + 2 * self._size, elapsed + fill_s

    @staticmethod
    def _summary(group_id: int, version: int) -> GroupSummary:
        return GroupSummary(
            group_id=group_id,
            attempt=0,
            num_prompt_tokens=16,
            response_lengths=(100, 120),
            num_tokens=220,
            oldest_version=version,
            newest_version=version,
            rewards=(0.0, 1.0),
        )


def ledger_figures(largest: int, rounds: int) -> dict[str, float]:
    """Measure how fast a ledger (the states of all groups) with ``largest`` groups changes the states.

    Returns:
        ``ledger_transitions_per_s``: state changes per second. ``ledger_cost_growth``: the time of a state change with
        ``largest`` groups, divided by the time with a thousand groups. The two times are measured alternately.
    """
    calm_collector()
    loads = {size: LedgerLoad(size) for size in (1000, largest)}
    seconds: dict[int, list[float]] = {size: [] for size in loads}
    for _ in range(rounds + 1):
        for size, load in loads.items():
            num_steps = max(1, 100_000 // size)
            done = [load.step() for _ in range(num_steps)]
            seconds[size].append(sum(s for _, s in done) / sum(n for n, _ in done))
    small, large = (statistics.median(values[1:]) for values in seconds.values())
    return {"ledger_transitions_per_s": 1 / large, "ledger_cost_growth": large / small}


async def slowest_producer_share(num_producers: int, num_consumers: int, duration_s: float) -> dict[str, float]:
    """Run workers and ranks at the same time for ``duration_s`` seconds. Workers store groups, and ranks fetch groups.

    Returns:
        ``slowest_producer_share``: number of groups from the slowest worker, divided by the mean over all workers.
        ``most_stored_share``: the largest number of bytes that the buffer stored, divided by ``max_stored_bytes``.
    """
    size, limit = 64, 256 * 1024**2
    config = BufferConfig(max_lag=4, queue_size=512, max_stored_bytes=limit)
    counts = [0] * num_producers
    most_stored, stop = 0, time.perf_counter() + duration_s
    version = 0
    with tempfile.TemporaryDirectory() as logs:
        process = BufferProcess(config, groups_per_step=size, log_path=Path(logs) / "log")
        producers = [WorkerClient(BufferClient(process.address)) for _ in range(num_producers)]
        consumers = [LearnerClient(BufferClient(process.address)) for _ in range(num_consumers)]
        control = ControlClient(BufferClient(process.address))

        advanced = asyncio.get_running_loop().create_future()

        async def produce(i: int) -> None:
            while True:
                wait = asyncio.ensure_future(producers[i].lease(version, 2))
                try:
                    await asyncio.wait({wait, advanced}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    wait.cancel()  # In the next iteration, the worker requests leases at the new version.
                if not wait.done():
                    continue
                for lease in wait.result():
                    await producers[i].put(group_of(lease, 35_000))
                    counts[i] += 1

        async def prompts() -> None:
            first = 0
            while True:
                ids = range(first, first + 256)
                await control.enqueue([Prompt(group_id=i, prompt_ids=np.arange(16, dtype=np.int32)) for i in ids])
                first += 256

        tasks = [asyncio.ensure_future(produce(i)) for i in range(num_producers)]
        tasks.append(asyncio.ensure_future(prompts()))
        while time.perf_counter() < stop:
            ids = [group.group_id for group in (await control.plan(version)).groups]
            await asyncio.gather(*(client.fetch(ids[i::num_consumers]) for i, client in enumerate(consumers)))
            most_stored = max(most_stored, (await control.stats()).stored_bytes)
            await control.commit(version)
            version += 1
            advanced.set_result(None)
            advanced = asyncio.get_running_loop().create_future()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for client in [*producers, *consumers, control]:
            await client.close()
        process.stop()
    mean = sum(counts) / num_producers
    return {"slowest_producer_share": min(counts) / mean, "most_stored_share": most_stored / limit}


TARGETS = {
    "payload_vs_raw_zmq": Target(at_least=0.7),
    "small_vs_raw_zmq": Target(at_least=0.55),
    "disk_vs_memory": Target(at_least=0.85),
    "vs_ray_queue": Target(at_least=1.5),
    "vs_transfer_queue": Target(at_least=4),
    "rows_per_s": Target(at_least=1500),
    "rows_windowed_per_s": Target(at_least=5000),
    "ledger_transitions_per_s": Target(at_least=50_000),
    "ledger_cost_growth": Target(at_most=1.3),
    "slowest_producer_share": Target(at_least=0.5),
    "saved_tokens_kept": Target(at_least=0.9),
}


async def ledger_section(quick: bool) -> Figures:
    """Measure the ledger (the states of all groups) without a server.

    The figures are those of `admission_figures` and `ledger_figures`.
    """
    figures = admission_figures(num_ticks=1000 if quick else 3000)
    return {**figures, **ledger_figures(100_000 if quick else 1_000_000, 3 if quick else 5)}


async def large_section(quick: bool) -> Figures:
    """Compare the throughput of the buffer with the throughput of bare sockets. Each group has 2 MB."""
    ratio, group_s = await against_raw(2_000_000, 32, _rounds(quick))
    return {"payload_vs_raw_zmq": ratio, "payload_gb_per_s": 2 * 2_000_000 / group_s / 1e9}


async def small_section(quick: bool) -> Figures:
    """Compare the throughput of the buffer with the throughput of bare sockets. Each group has 35 KB."""
    ratio, group_s = await against_raw(35_000, 512, _SHORT_ROUNDS * _rounds(quick))
    return {"small_vs_raw_zmq": ratio, "small_groups_per_s": 1 / group_s}


async def rows_section(quick: bool) -> Figures:
    """Measure how many groups per second the buffer stores. Each group has 35 KB.

    First, the groups are sent one by one. Then, up to `_WINDOW` groups are sent at once.
    """
    one = await rows_per_s(512, _rounds(quick), window=1)
    return {"rows_per_s": one, "rows_windowed_per_s": await rows_per_s(512, _rounds(quick), window=_WINDOW)}


async def disk_section(quick: bool) -> Figures:
    """Measure how much slower the buffer stores groups with ``durability=disk`` than with ``durability=memory``."""
    return {"disk_vs_memory": await disk_vs_memory(512, _SHORT_ROUNDS * _rounds(quick))}


async def fairness_section(quick: bool) -> Figures:
    """Measure whether the buffer serves 64 workers equally. All workers store groups at the same time."""
    return {**await slowest_producer_share(64, 8, 5.0 if quick else 15.0)}


async def peers_section(quick: bool) -> Figures:
    """Compare the speed of the buffer with the speed of Ray's queue and of TransferQueue."""
    return await against_peers(_rounds(quick))


def _rounds(quick: bool) -> int:
    return 3 if quick else 9


SECTIONS = {
    "ledger": ledger_section,
    "large": large_section,
    "small": small_section,
    "rows": rows_section,
    "disk": disk_section,
    "fairness": fairness_section,
    "peers": peers_section,
}


async def measure(names: Sequence[str], *, quick: bool) -> Figures:
    """Measure the sections with the given names (keys of `SECTIONS`); return the figures by name."""
    figures: Figures = {}
    for name in names:
        figures |= await SECTIONS[name](quick)
    return figures


def main() -> None:
    """Measure the replay buffer. Print a table, then the figures as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.buffer", description="Measure the replay buffer.")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, and the ledger at 10^5 groups")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=[*SECTIONS], help="measure these sections only")
    args = parser.parse_args()
    figures = asyncio.run(measure(args.only, quick=args.quick))
    targets = {name: target for name, target in TARGETS.items() if name in figures}
    baseline = "bare ZMQ sockets; ray.util.queue; TransferQueue"
    print_report("the replay buffer, put to fetch", {}, figures, targets, baseline=baseline)


if __name__ == "__main__":
    main()
