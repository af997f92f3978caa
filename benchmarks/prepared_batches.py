"""Measures how much time a rank saves if it prepares the next batch during a step.

Run as ``python -m benchmarks.prepared_batches [--quick]``.

One rank makes learner steps on groups that it fetches from a real buffer server. In every second run, the benchmark
announces all steps before the first step begins, so the rank prepares the next batch during a step. In the other runs,
the benchmark announces no step. A figure is a ratio of wall times, as the median over pairs of runs. The last line of
the output is JSON.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from asyncrl.core.trajectory import Trajectory, TrajectoryGroup, Turn
from asyncrl.core.types import FinishReason, Lease, Prompt
from benchmarks.random_models import save_random_qwen3
from benchmarks.report import Target, print_report
from buffer import BufferClient, BufferConfig, BufferProcess, ControlClient, SyncBufferClient, WorkerClient
from learner.config import AlgorithmConfig, Device, LearnerConfig
from learner.types import GroupShare, RankBatch
from learner.verl_api import ActorWorker

VOCABULARY, NUM_SAMPLES = 1000, 8


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The times of a run in seconds, summed over all steps except the first.

    Attributes:
        waited_s: Time in which the rank waits for batches.
        prepared_s: Time in which the rank prepares batches.
        total_s: Time of waiting and training.
    """

    waited_s: float
    prepared_s: float
    total_s: float


def group_of(lease: Lease, length: int) -> TrajectoryGroup:
    """Return a finished group for a lease (the right to generate a group): random answers of ``length`` tokens.

    The answers have different rewards.
    """
    rng = np.random.default_rng(lease.prompt.group_id)
    prompt = Turn.given(lease.prompt.prompt_ids)
    answers = [
        Turn(
            token_ids=rng.integers(0, VOCABULARY, length).astype(np.int32),
            parent=0,
            sampled=True,
            logprobs=np.full(length, -7.0, dtype=np.float32),
            versions=np.full(length, lease.engine_version, dtype=np.int32),
            finish_reason=FinishReason.stop,
        )
        for _ in range(NUM_SAMPLES)
    ]
    trajectories = [Trajectory(turns=(prompt, answer), reward=float(index)) for index, answer in enumerate(answers)]
    return TrajectoryGroup.from_trajectories(trajectories, group_id=lease.prompt.group_id, attempt=lease.attempt)


async def store(address: str, num_groups: int, length: int) -> list[int]:
    """Store ``num_groups`` random groups in the buffer at ``address``; return the ids of the groups."""
    client = BufferClient(address)
    worker, control = WorkerClient(client), ControlClient(client)
    prompt = np.arange(256, dtype=np.int32)
    await control.enqueue([Prompt(group_id=i, prompt_ids=prompt + i % 500) for i in range(num_groups)])
    leases: list[Lease] = []
    while len(leases) < num_groups:
        leases += await worker.lease(0, num_groups - len(leases))
    for lease in leases:
        await worker.put(group_of(lease, length))
    await worker.close()
    return [lease.prompt.group_id for lease in leases]


def run_steps(worker: ActorWorker, steps: Sequence[Sequence[int]], *, first: int, announces: bool) -> Steps:
    """Make one learner step for each list of group ids in ``steps``; return the times of all steps except the first.

    ``first`` is the number of the first step. If ``announces`` is true, all steps are announced before the first step
    begins.
    """
    rewards = np.arange(NUM_SAMPLES, dtype=np.float32)
    batches = [
        RankBatch(
            version=first + step,
            shares=tuple(
                GroupShare(group_id=group, samples=tuple(range(NUM_SAMPLES)), rewards=rewards, mini_batch=0)
                for group in groups
            ),
            max_lag=10**9,
        )
        for step, groups in enumerate(steps)
    ]
    for batch in batches if announces else ():
        worker.announce(batch)
    # Leave out the first step, because its batch cannot be prepared during an earlier step.
    metrics = [worker.step(batch) for batch in batches][1:]
    waited, prepared, trained = (sum(each[name] for each in metrics) for name in ("fetch_s", "prepare_s", "train_s"))
    return Steps(waited_s=waited, prepared_s=prepared, total_s=waited + trained)


def measure(groups_per_step: int, length: int, num_steps: int, rounds: int) -> dict[str, float]:
    """Make ``rounds`` pairs of runs, and return the figures by name.

    In the first run of a pair, no step is announced. In the second run, all steps are announced.
    """
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
    num_groups = groups_per_step * num_steps
    with tempfile.TemporaryDirectory() as folder:
        config = BufferConfig(max_lag=num_steps, queue_size=num_groups, max_stored_bytes=4 << 30, directory=folder)
        server = BufferProcess(config, groups_per_step=groups_per_step, log_path=Path(folder) / "log")
        try:
            ids = asyncio.run(store(server.address, num_groups, length))
            steps = [ids[start : start + groups_per_step] for start in range(0, num_groups, groups_per_step)]
            model = save_random_qwen3(
                f"{folder}/model", layers=2, hidden=64, mlp=128, heads=4, head_dim=16, vocab_size=VOCABULARY
            )
            worker = ActorWorker(
                LearnerConfig(device=Device.cpu),
                AlgorithmConfig(groups_per_step=groups_per_step, samples_per_prompt=NUM_SAMPLES),
                model_path=model,
                total_steps=10_000,
                connect_buffer=lambda: SyncBufferClient(BufferClient(server.address)),
            )
            worker.init_model()
            pairs = []
            for index in range(2 * rounds):
                first, announces = index * num_steps, bool(index % 2)
                pairs.append(run_steps(worker, steps, first=first, announces=announces))
            worker.stop()
        finally:
            server.stop()
    each = list(zip(pairs[::2], pairs[1::2], strict=True))
    return {
        "prepare_hidden_share": statistics.median(1 - ahead.waited_s / own.waited_s for own, ahead in each),
        "step_vs_unprepared": statistics.median(ahead.total_s / own.total_s for own, ahead in each),
        "prepare_share_of_step": statistics.median(own.waited_s / own.total_s for own, _ in each),
    }


TARGETS = {"prepare_hidden_share": Target(at_least=0.9), "step_vs_unprepared": Target(at_most=1.02)}


def main() -> None:
    """Measure how much time the prepared batches save. Print a table, then the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    args = parser.parse_args()
    torch.set_num_threads(1)
    figures = measure(groups_per_step=16, length=128, num_steps=5, rounds=2 if args.quick else 5)
    rows = {name: f"{value:.3f}" for name, value in figures.items()}
    print_report("learner steps of 128 samples", rows, figures, TARGETS, baseline="the same steps, not announced")


if __name__ == "__main__":
    main()
