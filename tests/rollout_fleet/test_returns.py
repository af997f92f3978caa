"""Groups that a run of the rollout loop still holds when it ends: saved, given back, and renewed by nobody."""

from __future__ import annotations

import asyncio

import pytest

from asyncrl.core.errors import DeadlineError
from rollout_fleet.config import SaveProgress
from rollout_fleet.engines.scripted import ScriptedEngine
from rollout_fleet.rewards import WeightedRewards
from tests.support.offers import bare_offer
from tests.support.rollout import InMemoryBuffer, make_loop, make_prompts, running_loop, writes

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("virtual_time")]


class BufferWithOutages(InMemoryBuffer):
    """The buffer in memory, which a worker cannot reach while ``is_gone``.

    Attributes:
        renewed: Group id and attempt of every lease that was renewed while the buffer could be reached.
    """

    is_gone = False

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.renewed = []

    async def _reach(self):
        if self.is_gone:
            await asyncio.sleep(30)
            raise DeadlineError("buffer: no answer within 30.0 s")

    async def save_progress(self, lease, group):
        await self._reach()
        await super().save_progress(lease, group)

    async def release(self, lease, **options):
        await self._reach()
        return await super().release(lease, **options)

    async def put(self, group, **options):
        await self._reach()
        await super().put(group, **options)

    async def renew(self, leases):
        await self._reach()
        self.renewed += [(lease.prompt.group_id, lease.attempt) for lease in leases]
        await super().renew(leases)


async def engine_that(script):
    engine = ScriptedEngine(script)
    await engine.start()
    await engine.load_weights(bare_offer(0))
    return engine


async def test_groups_that_a_run_could_not_give_back_are_renewed_by_no_later_run():
    buffer = BufferWithOutages(make_prompts(3))
    engine = await engine_that(writes(200))
    loop = make_loop(buffer, engine, renew_every_s=1.0)
    run = asyncio.create_task(loop.run())
    await asyncio.sleep(0.5)
    buffer.is_gone = True
    engine.die("killed")
    with pytest.raises(Exception, match="killed"):
        await run
    first = {(0, 0), (1, 0), (2, 0)}
    assert buffer.held == first, "the buffer has heard nothing"
    await loop.use(await engine_that(writes(200)))
    run = asyncio.create_task(loop.run())
    await asyncio.sleep(1.5)
    for group_id in range(3):  # in the outage their leases run out
        await buffer.expire(group_id)
    buffer.is_gone = False
    await buffer.stored(3)
    await loop.stop()
    counters = await run
    assert first.isdisjoint(buffer.renewed)
    assert {group.attempt for group in buffer.groups} == {1}
    assert counters.tokens_in_flight == 0
    assert counters.tokens_generated == buffer.num_accounted
    assert sorted(group_id for group_id, _, _ in buffer.released) == [0, 1, 2], "each is given back once"


async def test_groups_that_could_not_be_given_back_go_back_when_the_buffer_answers_again():
    buffer = BufferWithOutages(make_prompts(3))
    engine = await engine_that(writes(200))
    loop = make_loop(buffer, engine, renew_every_s=1.0)
    run = asyncio.create_task(loop.run())
    await asyncio.sleep(0.5)
    buffer.is_gone = True
    engine.die("killed")
    with pytest.raises(Exception, match="killed"):
        await run
    buffer.is_gone = False
    await loop.use(await engine_that(writes(200)))
    run = asyncio.create_task(loop.run())
    await buffer.stored(3)
    await loop.stop()
    counters = await run
    assert {group.attempt for group in buffer.groups} == {1}, "no lease had to run out"
    assert counters.tokens_generated == 3 * 2 * 200 == buffer.num_accounted, "what was written went on"


async def test_groups_of_a_run_that_is_stopped_between_two_engines_are_given_back():
    buffer = BufferWithOutages(make_prompts(2))
    engine = await engine_that(writes(200))
    loop = make_loop(buffer, engine)
    run = asyncio.create_task(loop.run())
    await asyncio.sleep(0.5)
    buffer.is_gone = True
    engine.die("killed")
    with pytest.raises(Exception, match="killed"):
        await run
    buffer.is_gone = False
    await loop.stop()
    assert buffer.held == set()
    assert (await loop.run()).tokens_in_flight == 0


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
    buffer = BufferWithOutages(make_prompts(3))
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
    buffer = BufferWithOutages(make_prompts(2))
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
    buffer = BufferWithOutages(make_prompts(2))
    async with running_loop(buffer, writes(20), save_progress=SaveProgress.never) as (loop, _, run):
        await asyncio.sleep(5)
        await loop.stop()
        await run
    assert buffer.progress == {}
    assert dict(buffer.ledger.account.tokens_dropped) == {"stopped": 80}
