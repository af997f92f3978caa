"""Groups that are interrupted and saved. Another worker, or the same worker after a weight update, continues them."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from asyncrl.core.errors import EngineError, StoreFull, WorkerDiedError
from asyncrl.core.types import FinishReason
from rollout_fleet.config import SaveProgress
from rollout_fleet.rewards import WeightedRewards
from tests.support.offers import bare_offer
from tests.support.rollout import running_loop, update, writes

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("virtual_time")]


def writes_long_for_the_first_prompt(request, version):
    """Write responses of 40 tokens to the first prompt, and responses of one token to other prompts.

    If a response of the first prompt is continued, it also has 40 tokens in total.
    """
    return writes(40 if request.id.startswith("0-") else 1)(request, version)


async def test_the_next_worker_continues_the_groups_of_a_stopped_worker(make_buffer):
    buffer = make_buffer(2, groups_per_step=1, max_lag=1)
    async with running_loop(buffer, writes_long_for_the_first_prompt) as (loop, _, _):
        await buffer.stored(1)
        await buffer.commit()
        await asyncio.sleep(0.1)
        first = await loop.stop()
    assert 2 < first.tokens_generated < 82
    assert first.tokens_in_flight == 0
    assert buffer.progress[0].summary.num_tokens == first.tokens_generated - 2
    assert {t.turns[1].finish_reason for t in buffer.progress[0].trajectories()} == {FinishReason.unfinished}
    async with running_loop(buffer, writes_long_for_the_first_prompt, version=1) as (loop, _, _):
        await buffer.stored(2)
        second = await loop.stop()
    group = buffer.groups[1]
    assert (group.group_id, group.attempt) == (0, 1)
    assert group.summary.num_tokens == 80 == first.tokens_generated - 2 + second.tokens_generated
    assert np.count_nonzero(group.versions == 0) == first.tokens_generated - 2
    assert (second.groups_finished, second.tokens_in_flight) == (1, 0)
    assert buffer.num_accounted == 82


async def test_progress_is_dropped_with_save_progress_never(make_buffer):
    buffer = make_buffer(1)
    async with running_loop(buffer, writes(40), save_progress=SaveProgress.never):
        await asyncio.sleep(0.1)
    assert buffer.progress == {}
    assert buffer.ledger.account.tokens_dropped["stopped"] > 0


async def test_running_groups_are_saved_at_an_update_and_continue_with_the_new_weights(make_buffer):
    buffer = make_buffer(3, groups_per_step=1, max_lag=6)
    async with running_loop(buffer, writes(60), save_progress=SaveProgress.at_updates) as (loop, engine, _):
        saved = []
        for _ in range(2):
            await asyncio.sleep(0.1)
            await update(loop, buffer)
            await asyncio.sleep(0.02)
            saved.append([buffer.progress[index].summary.num_tokens for index in range(3)])
        await buffer.stored(3)
        counters = await loop.stop()
    assert all(0 < before < after < 120 for before, after in zip(*saved, strict=True))
    assert counters.tokens_generated == 360 == buffer.num_tokens
    for group in buffer.groups:
        for versions in np.split(group.versions[len(group.prompt_ids) :], 2):
            assert versions.tolist() == sorted(versions)
            assert set(versions.tolist()) == {0, 1, 2}
    assert len(engine.requests) == 3 * 6, "each of 6 samples needs 3 requests"


async def test_a_stop_or_a_revocation_during_a_load_releases_the_groups_that_were_cut_off(make_buffer):
    buffer = make_buffer(3)
    async with running_loop(buffer, writes(60), save_progress=SaveProgress.at_updates) as (loop, engine, run):
        await asyncio.sleep(0.1)
        engine.load_delay_s = 2.0
        loading = asyncio.create_task(loop.load_weights(bare_offer(1)))
        await asyncio.sleep(0.1)
        await buffer.revoke(1)
        await asyncio.sleep(0.02)
        assert not run.done()
        await asyncio.wait_for(loop.stop(), 10)
        await loading
        counters = await run
    assert buffer.held == set()
    assert {group_id for group_id, _, _ in buffer.released} == {0, 1, 2}
    assert counters.tokens_in_flight == 0
    assert counters.tokens_generated == buffer.num_accounted


async def test_an_ignored_abort_is_repeated_until_the_group_is_cut_off(make_buffer, monkeypatch):
    buffer = make_buffer(1)
    options = {"save_progress": SaveProgress.at_updates, "stop_timeout_s": 0.4}
    async with running_loop(buffer, writes(300), **options) as (loop, engine, _):
        abort, asked = engine.abort, []

        async def ignore_once(request_ids: list[str]) -> None:
            asked.append(request_ids)
            if len(asked) > 1:
                await abort(request_ids)

        monkeypatch.setattr(engine, "abort", ignore_once)
        await asyncio.sleep(0.1)
        await asyncio.wait_for(loop.load_weights(bare_offer(1)), 10)
        assert len(asked) == 2
        assert loop.counters().tokens_generated > 0


async def test_a_group_continues_even_if_the_buffer_is_full_and_cannot_save_its_progress(make_buffer):
    buffer = make_buffer(2, groups_per_step=1, max_lag=6)

    async def refuse(lease, group):
        raise StoreFull("no room")

    buffer.save_progress = refuse
    async with running_loop(buffer, writes(30), save_progress=SaveProgress.at_updates) as (loop, _, run):
        await asyncio.sleep(0.1)
        await update(loop, buffer)
        await buffer.stored(2)
        assert not run.done()
    assert buffer.num_tokens == 120


async def test_a_greedy_baseline_continues_after_an_update_and_its_tokens_are_not_counted(make_buffer):
    buffer = make_buffer(1, groups_per_step=1, max_lag=6)
    options = {"save_progress": SaveProgress.at_updates, "greedy_baseline": True}
    async with running_loop(buffer, writes(40), **options) as (loop, engine, _):
        await asyncio.sleep(0.1)
        await update(loop, buffer)
        await buffer.stored(1)
        counters = await loop.stop()
    [group] = buffer.groups
    assert group.summary.response_lengths == (40, 40, 40)
    assert group.is_baseline.tolist() == [False, False, True]
    assert counters.tokens_generated == 80 == buffer.num_tokens
    assert {request.sampling.temperature for request in engine.requests if request.id.split("-")[2] == "2"} == {0.0}


async def test_groups_that_were_aborted_for_a_failed_update_are_released(make_buffer):
    buffer = make_buffer(2)
    async with running_loop(buffer, writes(60), save_progress=SaveProgress.at_updates) as (loop, engine, run):
        await asyncio.sleep(0.1)
        engine.load_error = "other weights"
        with pytest.raises(EngineError, match="other weights"):
            await loop.load_weights(bare_offer(1))
        with pytest.raises(EngineError, match="other weights"):
            await run
        num_asked = len(engine.requests)
    assert num_asked == 4
    assert buffer.held == set()
    assert {reason for _, _, reason in buffer.released} == {"engine_failed"}
    assert [buffer.progress[index].summary.num_tokens > 0 for index in range(2)] == [True, True]


async def test_groups_are_handed_over_with_their_tokens(make_buffer):
    buffer = make_buffer(3)
    async with running_loop(buffer, writes(60, 0.01), groups_in_flight=3) as (loop, _, _):
        await asyncio.sleep(0.3)
        buffer.hand_on_requests.put_nowait([(1, 0), (2, 0), (7, 0)])  # the worker has no group 7
        await asyncio.sleep(0.1)
        assert sorted((group_id, reason) for group_id, _, reason in buffer.released) == [
            (1, "handed_on"),
            (2, "handed_on"),
        ]
        assert sorted(buffer.progress) == [1, 2]
        assert dict(buffer.ledger.account.tokens_dropped) == {}
        await buffer.stored(3)
        counters = await loop.stop()
    assert counters.tokens_generated == 3 * 2 * 60 == buffer.num_accounted


async def test_a_group_that_is_being_cut_off_for_an_update_can_be_handed_over(make_buffer):
    buffer = make_buffer(2, groups_per_step=1, max_lag=6)
    async with running_loop(buffer, writes(60), save_progress=SaveProgress.at_updates) as (loop, engine, _):
        await asyncio.sleep(0.1)
        aborts, may_abort, abort = asyncio.Event(), asyncio.Event(), engine.abort

        async def abort_later(request_ids):
            aborts.set()
            await may_abort.wait()
            await abort(request_ids)

        engine.abort = abort_later
        updating = asyncio.create_task(update(loop, buffer))
        await asyncio.sleep(0.05)
        assert aborts.is_set()
        buffer.hand_on_requests.put_nowait([(0, 0)])
        await asyncio.sleep(0.05)
        may_abort.set()
        await updating
        await buffer.stored(2)
        counters = await loop.stop()
    assert [(group_id, reason) for group_id, _, reason in buffer.released] == [(0, "handed_on")]
    assert counters.tokens_generated == 2 * 2 * 60 == buffer.num_accounted


async def test_a_leaving_worker_requests_no_groups_and_saves_its_tokens(make_buffer):
    buffer = make_buffer(6)
    async with running_loop(buffer, writes(40), groups_in_flight=2) as (loop, _, _):
        await asyncio.sleep(0.1)
        await loop.let_end()
        counters = await loop.stop()
    assert len(buffer.leases_asked) == 1
    assert (buffer.groups, buffer.held, counters.tokens_in_flight) == ([], set(), 0)
    assert sum(group.summary.num_tokens for group in buffer.progress.values()) == counters.tokens_generated > 0


async def test_without_saved_progress_a_leaving_worker_finishes_its_running_groups(make_buffer):
    buffer = make_buffer(6)
    options = {"save_progress": SaveProgress.never, "groups_in_flight": 2}
    async with running_loop(buffer, writes(40), **options) as (loop, _, _):
        await asyncio.sleep(0.1)
        await loop.let_end()
        counters = await loop.stop()
    assert (len(buffer.groups), counters.tokens_generated) == (2, 160)
    assert (buffer.held, buffer.released) == (set(), [])


async def test_a_leaving_worker_withdraws_its_waiting_lease_request(make_buffer):
    buffer = make_buffer(1)
    async with running_loop(buffer, writes(1)) as (loop, _, _):
        await buffer.stored(1)
        await asyncio.sleep(0.1)
        assert buffer.num_waiting == 1
        await loop.let_end()
        await asyncio.sleep(0.1)
        assert buffer.num_waiting == 0


@pytest.fixture
def slow_rewards(monkeypatch):
    """Make each reward take an hour. The fixture returns a function that makes rewards fast again."""
    score, is_slow = WeightedRewards.score, [True]

    async def hour_long(self, *arguments, **options):
        if is_slow[0]:
            await asyncio.sleep(3600)
        return await score(self, *arguments, **options)

    monkeypatch.setattr(WeightedRewards, "score", hour_long)
    return lambda: is_slow.__setitem__(0, False)


async def test_finished_groups_without_scores_are_saved_at_a_stop_and_scored_by_the_next_worker(
    slow_rewards, make_buffer
):
    buffer = make_buffer(3)
    async with running_loop(buffer, writes(20)) as (loop, _, _):
        await asyncio.sleep(5)
        first = await loop.stop()
    assert (first.tokens_generated, first.tokens_in_flight) == (3 * 2 * 20, 0)
    assert buffer.held == set()
    assert {group_id: group.summary.num_tokens for group_id, group in buffer.progress.items()} == {0: 40, 1: 40, 2: 40}
    slow_rewards()
    async with running_loop(buffer, writes(20)) as (loop, engine, _):
        await buffer.stored(3)
        second = await loop.stop()
    assert (second.tokens_generated, engine.requests) == (0, []), "finished samples must not be sampled again"
    assert sum(buffer.ledger.account.tokens_dropped.values()) == 0
    assert buffer.num_accounted == first.tokens_generated


async def test_groups_that_are_being_scored_during_an_engine_failure_are_saved(slow_rewards, make_buffer):
    buffer = make_buffer(2)
    async with running_loop(buffer, writes(20)) as (_, engine, run):
        await asyncio.sleep(5)
        engine.die("killed")
        with pytest.raises(WorkerDiedError, match="killed"):
            await run
    assert set(buffer.progress) == {0, 1}
    assert sum(buffer.ledger.account.tokens_dropped.values()) == 0


async def test_without_saved_progress_unscored_groups_are_dropped_and_their_tokens_counted(slow_rewards, make_buffer):
    buffer = make_buffer(2)
    async with running_loop(buffer, writes(20), save_progress=SaveProgress.never) as (loop, _, run):
        await asyncio.sleep(5)
        await loop.stop()
        await run
    assert buffer.progress == {}
    assert dict(buffer.ledger.account.tokens_dropped) == {"stopped": 80}
