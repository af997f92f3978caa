"""A rollout worker dies in the middle of a group, and another worker finishes the group."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import numpy as np

from asyncrl.core.trajectory import TrajectoryGroup
from asyncrl.core.types import FinishReason, Lease, Prompt
from buffer import BufferConfig, BufferProcess
from rollout_fleet.config import SaveProgress
from tests.support.buffer_groups import AnyRole
from tests.support.offers import bare_offer
from tests.support.rollout import WRITTEN, running_loop, writes
from tests.support.trajectories import make_group

NUM_TOKENS = 400
OPTIONS = {"save_progress": SaveProgress.at_updates, "groups_in_flight": 1}
WORKER = """
import asyncio, sys
from tests.asyncrl.test_partial_progress import until_killed
asyncio.run(until_killed(sys.argv[1]))
"""


async def until_killed(address: str) -> None:
    """Run a worker that loads two versions and reports each load. The test kills the worker before its samples end."""
    async with running_loop(AnyRole(address), writes(NUM_TOKENS, 0.1), **OPTIONS) as (loop, engine, run):
        for version in (1, 2):
            while len(engine.requests) < 2 * version:  # noqa: ASYNC110 - polls until the engine has both requests
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.25)  # wait until the engine has generated two tokens per sample
            await asyncio.to_thread(sys.stdin.readline)
            await loop.load_weights(bare_offer(version))
            sys.stdout.write(f"loaded {version}\n")
            sys.stdout.flush()
        await run


def finished(lease: Lease) -> TrajectoryGroup:
    return make_group(
        group_id=lease.prompt.group_id,
        attempt=lease.attempt,
        prompt_ids=lease.prompt.prompt_ids,
        response_ids=np.full(2, WRITTEN, dtype=np.int32),
        response_lengths=np.ones(2, dtype=np.int32),
        response_mask=np.ones(2, dtype=bool),
        logprobs=np.full(2, -1.0, dtype=np.float32),
        versions=np.full(2, lease.engine_version, dtype=np.int32),
        rewards=np.array([0.0, 1.0], dtype=np.float32),
        finish_reasons=(FinishReason.stop,) * 2,
    )


async def learn(control: AnyRole, version: int) -> None:
    """Make a learner step on a new group. The client ``control`` leases, finishes and stores the group."""
    prompt = Prompt(group_id=100 + version, prompt_ids=np.array([3], dtype=np.int32))
    await control.enqueue([prompt])
    [lease] = await control.lease(version, 1)
    await control.put(finished(lease))
    await control.plan(version)
    await control.commit(version)


async def until_leased(control: AnyRole, number: int) -> None:
    async with asyncio.timeout(60):
        while (await control.stats()).groups["leased"] != number:  # noqa: ASYNC110 - no event reports leases
            await asyncio.sleep(0.02)


async def test_another_worker_continues_a_group_from_the_saved_tokens_of_a_killed_worker(tmp_path: Path):
    config = BufferConfig(max_lag=3, heartbeat_s=0.25, lease_s=600.0)
    with BufferProcess(config, groups_per_step=1, log_path=tmp_path / "log") as server:
        control, second = AnyRole(server.address), AnyRole(server.address)
        dying = start_worker(server.address)
        try:
            await control.enqueue([Prompt(group_id=7, prompt_ids=np.array([3, 4], dtype=np.int32))])
            await until_leased(control, 1)
            for version in (1, 2):
                await learn(control, version - 1)
                await asyncio.to_thread(tell, dying, f"loaded {version}\n")
        finally:
            dying.kill()
            dying.wait()
        await until_leased(control, 0)
        saved = (await control.stats()).tokens_buffered
        async with running_loop(second, writes(NUM_TOKENS, 0.001), version=2, **OPTIONS) as (loop, _, _):
            plan = await asyncio.wait_for(control.plan(2), 30)
            [group] = await control.fetch([7])
            counters = await loop.stop()
        before, stats = await control.stats(), await control.commit(2)
        for client in (control, second):
            await client.close()

    assert [summary.group_id for summary in plan.groups] == [7]
    assert (group.attempt, group.summary.response_lengths) == (1, (NUM_TOKENS,) * 2)
    written = group.versions[len(group.prompt_ids) :]
    for versions in np.split(written, 2):
        assert versions.tolist() == sorted(versions)
        assert {0, 2} <= set(versions.tolist()) <= {0, 1, 2}  # perhaps version 1 sampled no token
    assert 0 < saved < 2 * NUM_TOKENS
    assert np.count_nonzero(written < 2) == saved, "the saved tokens must be of versions 0 and 1"
    assert counters.tokens_generated == 2 * NUM_TOKENS - saved
    assert (before.tokens_buffered, before.tokens_dropped) == (2 * NUM_TOKENS, {})
    assert (stats.tokens_trained, stats.tokens_buffered) == (2 * NUM_TOKENS + 4, 0)
    assert stats.lag_histogram == {0: 2, 2: 1}


def start_worker(address: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", WORKER, address]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def tell(process: subprocess.Popen[bytes], expected: str) -> None:
    """Make the worker process load the next version, and wait until it reports the load."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"go on\n")
    process.stdin.flush()
    assert process.stdout.readline().decode() == expected
