"""The feed of prompts from the stream into the queue of a real buffer."""

import asyncio
from pathlib import Path

import pytest

from tests.asyncrl.test_controller import Prompts, make_controller
from tests.asyncrl.test_learner_restarts import LosingLearner, RewindingBuffer, RewindingFleet
from tests.support.buffer_groups import prompt, running

GROUPS_PER_STEP = 16
TIMEOUT_S = 1.0


class CountingStream(Prompts):
    """Prompts with ascending group ids."""

    position = 0

    def take(self, count):
        start, self.position = self.position, self.position + count
        return [prompt(i) for i in range(start, self.position)]

    def state(self):
        return {"position": self.position}


async def cancelled_after(work, seconds: float) -> None:
    """Run ``work`` for a short time, then cancel it."""
    task = asyncio.ensure_future(work)
    await asyncio.sleep(seconds)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.long
@pytest.mark.parametrize("num_replans", [1, 3])
async def test_a_replan_loses_no_prompt_that_waits_for_room_in_the_queue(tmp_path: Path, num_replans):
    async with running(groups_per_step=GROUPS_PER_STEP, max_lag=2, queue_size=4, request_timeout_s=TIMEOUT_S) as run:
        client, buffer = run.client(request_timeout_s=TIMEOUT_S), RewindingBuffer()
        buffer.enqueue = client.enqueue
        controller, *_ = make_controller(
            buffer=buffer,
            learner=LosingLearner(buffer, tmp_path, []),
            fleet=RewindingFleet(buffer),
            prompts=CountingStream(),
            steps=100_000,
            overrides=[f"algorithm.groups_per_step={GROUPS_PER_STEP}"],
        )
        for _ in range(num_replans):
            await cancelled_after(controller.train(), 0.2)
            await controller.replan()
            await asyncio.sleep(TIMEOUT_S)  # wait until the server has ended the cancelled requests
        training = asyncio.ensure_future(controller.train())
        leased: list[int] = []
        async with asyncio.timeout(20):
            while len(leased) < 2 * GROUPS_PER_STEP:
                leased += [lease.prompt.group_id for lease in await client.lease(0, 4)]
        training.cancel()
        await asyncio.gather(training, return_exceptions=True)
    assert sorted(leased) == list(range(len(leased)))
