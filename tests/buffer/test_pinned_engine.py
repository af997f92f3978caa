"""A fast engine that stays at an old version gets no leases. It must not delay slower engines."""

import asyncio
import itertools
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from asyncrl.core.types import WeightOffer
from buffer import BufferConfig
from buffer.server import BufferServer
from rollout_fleet.answering import AnsweringParts
from rollout_fleet.config import EngineKind, RolloutFleetConfig
from rollout_fleet.engines.scripted import ScriptedAnswer, ScriptedEngine
from rollout_fleet.loop import RolloutLoop
from rollout_fleet.rewards import WeightedRewards
from tests.support.buffer_groups import AnyRole, prompt

GROUPS_PER_STEP = 4
PINNED_FROM = 3


def offer(version: int) -> WeightOffer:
    return WeightOffer(version=version, manifest=f"/v{version}", digest="", num_bytes=0)


@asynccontextmanager
async def staged_until_pinned(offered: WeightOffer):
    """Stage versions up to `PINNED_FROM`. The staging of later versions hangs.

    So the worker keeps requesting leases at the old version.
    """
    if offered.version > PINNED_FROM:
        await asyncio.Event().wait()
    yield offered


async def start_loop(stack: AsyncExitStack, address: str, delay_s: float, *, is_pinned: bool) -> None:
    config = RolloutFleetConfig(engine=EngineKind.scripted, groups_in_flight=4, reward="exact_match", renew_every_s=5.0)

    engine = ScriptedEngine(lambda request, version: ScriptedAnswer(response=[7] * 20, token_delay_s=delay_s))
    await engine.start()
    stack.push_async_callback(engine.stop)
    client = AnyRole(address)
    stack.push_async_callback(client.close)
    loop = RolloutLoop(
        config,
        AnsweringParts(engine=engine, rewards=WeightedRewards(config), decode=str),
        name=f"engine-{delay_s}",
        buffer=client,
        samples_per_prompt=2,
        **({"stage": staged_until_pinned} if is_pinned else {}),
    )
    await loop.load_next(-1)
    running = asyncio.create_task(loop.run())
    stack.callback(running.cancel)


@pytest.mark.long
async def test_a_fast_engine_that_keeps_an_old_version_does_not_stop_a_slower_one():
    async with AsyncExitStack() as stack:
        server = BufferServer(BufferConfig(max_lag=1), groups_per_step=GROUPS_PER_STEP)
        stack.callback(server.close)
        control = AnyRole(server.address)
        stack.push_async_callback(control.close)
        await control.offer(offer(0))
        await start_loop(stack, server.address, 0.005, is_pinned=True)
        await start_loop(stack, server.address, 0.015, is_pinned=False)
        async with asyncio.timeout(30):  # the slow engine needs 0.3 s for a step of 4 groups
            for version in itertools.count():
                first = version * GROUPS_PER_STEP
                await control.enqueue([prompt(first + number) for number in range(2 * GROUPS_PER_STEP)])
                await control.plan(version)
                await control.offer(offer(version + 1))
                await control.commit(version)
                if version == PINNED_FROM + 20:
                    return
