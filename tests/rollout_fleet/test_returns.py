"""Groups that a rollout loop still holds when it ends are saved and given back."""

from __future__ import annotations

import asyncio

import pytest

from rollout_fleet.config import SaveProgress
from rollout_fleet.engines.scripted import ScriptedEngine
from rollout_fleet.rewards import WeightedRewards
from tests.support.offers import bare_offer
from tests.support.rollout import InMemoryBuffer, make_loop, make_prompts, running_loop, writes

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("virtual_time")]


async def engine_that(script):
    engine = ScriptedEngine(script)
    await engine.start()
    await engine.load_weights(bare_offer(0))
    return engine


@pytest.fixture
def slow_rewards(monkeypatch):
    """Rewards that take an hour, until the test calls what this returns."""
    score, is_slow = WeightedRewards.score, [True]

    async def hour_long(self, *arguments, **options):
        if is_slow[0]:
            await asyncio.sleep(3600)
        return await score(self, *arguments, **options)

    monkeypatch.setattr(WeightedRewards, "score", hour_long)
    return lambda: is_slow.__setitem__(0, False)


async def test_finished_groups_that_are_still_scored_at_a_stop_are_saved_and_scored_by_the_next_worker(slow_rewards):
    buffer = InMemoryBuffer(make_prompts(3))
    async with running_loop(buffer, writes(20)) as (loop, _, run):
        await asyncio.sleep(5)
        await loop.stop()
        first = await run
    assert (first.tokens_generated, first.tokens_in_flight) == (3 * 2 * 20, 0)
    assert buffer.held == set()
    assert {group_id: group.summary.num_tokens for group_id, group in buffer.progress.items()} == {0: 40, 1: 40, 2: 40}
    slow_rewards()
    async with running_loop(buffer, writes(20)) as (loop, engine, run):
        await buffer.stored(3)
        await loop.stop()
        second = await run
    assert (second.tokens_generated, engine.requests) == (0, []), "nothing is sampled again"
    assert sum(buffer.ledger.account.tokens_dropped.values()) == 0
    assert buffer.num_accounted == first.tokens_generated


async def test_groups_whose_engine_fails_while_they_are_scored_are_saved_too(slow_rewards):
    buffer = InMemoryBuffer(make_prompts(2))
    engine = await engine_that(writes(20))
    loop = make_loop(buffer, engine)
    run = asyncio.create_task(loop.run())
    await asyncio.sleep(5)
    engine.die("killed")
    with pytest.raises(Exception, match="killed"):
        await run
    assert set(buffer.progress) == {0, 1}
    assert sum(buffer.ledger.account.tokens_dropped.values()) == 0


async def test_where_nothing_is_saved_finished_groups_are_dropped_with_their_tokens_counted(slow_rewards):
    buffer = InMemoryBuffer(make_prompts(2))
    async with running_loop(buffer, writes(20), save_progress=SaveProgress.never) as (loop, _, run):
        await asyncio.sleep(5)
        await loop.stop()
        await run
    assert buffer.progress == {}
    assert dict(buffer.ledger.account.tokens_dropped) == {"stopped": 80}
