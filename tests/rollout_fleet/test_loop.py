from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import pytest

from asyncrl.core.errors import (
    DeadlineError,
    EngineError,
    ReplayBufferError,
    RewardError,
    WeightsError,
    WeightsGone,
    WorkerDiedError,
)
from rollout_fleet.config import OnRewardFailure, RolloutFleetConfig, SamplingConfig
from rollout_fleet.engines.scripted import ScriptedAnswer, ScriptedEngine
from rollout_fleet.inflight import InflightGroups
from rollout_fleet.metrics import FleetMeter
from rollout_fleet.rewards import REWARDS, WeightedRewards
from tests.support.offers import bare_offer
from tests.support.registries import undo_registrations
from tests.support.rollout import WRITTEN, make_loop, running_loop, update, writes

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("virtual_time")]


async def test_every_leased_group_is_generated_scored_and_stored(make_buffer):
    buffer = make_buffer(20)
    async with running_loop(buffer, samples_per_prompt=3) as (loop, _, _):
        await buffer.stored(20)
        counters = await loop.stop()
    assert sorted(group.group_id for group in buffer.groups) == list(range(20))
    assert all(group.rewards.tolist() == [1.0, 1.0, 1.0] for group in buffer.groups)
    assert all(group.summary.response_lengths == (1, 1, 1) for group in buffer.groups)
    assert counters.groups_finished == 20
    assert counters.tokens_generated == 60 == buffer.num_tokens
    assert counters.tokens_in_flight == 0


async def test_a_loop_that_was_stopped_before_its_start_never_runs(make_buffer):
    """If a worker restarts while the run stops, several parts of the run call `stop` of the worker's loop."""
    engine, buffer = ScriptedEngine(), make_buffer(4)
    await engine.start()
    loop = make_loop(buffer, engine)
    await loop.load_weights(bare_offer(0))
    for _ in range(3):
        assert (await asyncio.wait_for(loop.stop(), 5)).tokens_generated == 0
    await asyncio.wait_for(loop.wait_ended(), 5)
    assert (await asyncio.wait_for(loop.run(), 5)).tokens_generated == 0
    await engine.stop()


async def test_a_data_source_has_its_own_length_limit_and_its_groups_record_the_source(make_buffer):
    buffer, sources = make_buffer(4), []
    for group_id, prompt in buffer.prompts.items():
        buffer.prompts[group_id] = replace(prompt, data_source="short" if group_id % 2 else "long")
    put = buffer.put

    async def note(group, *, data_source, **given):
        sources.append((group.group_id, data_source))
        await put(group, **given)

    buffer.put = note
    config = {"sampling": SamplingConfig(max_new_tokens=5), "sampling_by_source": {"short": {"max_new_tokens": 2}}}

    def longest(request, version):
        return ScriptedAnswer(response=[WRITTEN] * request.sampling.max_new_tokens)

    async with running_loop(buffer, longest, **config) as (loop, _, _):
        await buffer.stored(4)
        await loop.stop()
    assert {group.group_id: {*group.summary.response_lengths} for group in buffer.groups} == {
        0: {5},
        1: {2},
        2: {5},
        3: {2},
    }
    assert sorted(sources) == [(0, "long"), (1, "short"), (2, "long"), (3, "short")]


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"temperature": 0.5}, r"sampling_by_source.short may set only the options .*, got \['temperature'\]"),
        ({"max_new_tokens": 6}, "max_new_tokens must be at most rollout_fleet.sampling.max_new_tokens=5"),
        ({"max_new_tokens": 0}, "max_new_tokens must be >= 1"),
    ],
)
def test_sampling_options_of_a_source_that_training_cannot_use_are_refused(own, message):
    with pytest.raises(ValueError, match=message):
        RolloutFleetConfig(sampling=SamplingConfig(max_new_tokens=5), sampling_by_source={"short": own})


async def test_a_loop_runs_at_most_groups_in_flight_groups(make_buffer):
    buffer = make_buffer(30)
    async with running_loop(buffer, writes(2), groups_in_flight=4) as (_, engine, _):
        await buffer.stored(30)
    assert engine.running_at_once == 4 * 2, "each group must have two samples"
    assert all(1 <= num_groups <= 4 for _, num_groups in buffer.leases_asked)


async def test_a_loop_never_requests_leases_for_zero_groups(make_buffer, monkeypatch):
    free, answers = InflightGroups.num_free.fget, iter([1, 0])  # one slot is free at the first read, none at the second
    monkeypatch.setattr(InflightGroups, "num_free", property(lambda groups: next(answers, free(groups))))
    buffer = make_buffer(2)
    async with running_loop(buffer):
        await buffer.stored(2)
    assert all(num_groups > 0 for _, num_groups in buffer.leases_asked)


async def test_groups_are_leased_at_the_new_version_directly_after_a_load(make_buffer):
    buffer = make_buffer(8, groups_per_step=4, max_lag=0)
    async with running_loop(buffer) as (loop, _, _):
        await buffer.stored(4)
        await buffer.commit()
        await asyncio.sleep(0.05)
        assert len(buffer.groups) == 4, "no other groups of version 0 may be admitted"
        await loop.load_weights(bare_offer(1))
        await buffer.stored(8)
    assert [group.summary.oldest_version for group in buffer.groups] == [0] * 4 + [1] * 4


async def test_tokens_after_a_load_have_the_new_version(make_buffer):
    buffer = make_buffer(1, groups_per_step=1, max_lag=2)
    async with running_loop(buffer, writes(20)) as (loop, _, _):
        await asyncio.sleep(0.08)
        await update(loop, buffer)
        await buffer.stored(1)
    versions = buffer.groups[0].versions[len(buffer.groups[0].prompt_ids) :][:20].tolist()
    assert versions == sorted(versions)
    assert set(versions) == {0, 1}


async def test_a_running_loop_loads_the_newest_offered_weights_and_reports_the_version(make_buffer):
    buffer = make_buffer(0, groups_per_step=1, max_lag=4)
    for _ in range(3):
        await buffer.advance()
    async with running_loop(buffer) as (loop, engine, _):
        engine.load_delay_s = 0.5
        await buffer.offer(bare_offer(1))
        await asyncio.sleep(0.1)
        for version in (2, 3):
            await buffer.offer(bare_offer(version))
        assert await buffer.served(0, 1) == (1, pytest.approx(0.5))
        assert await buffer.served(1, 1) == (3, pytest.approx(0.5))
        assert engine.version == 3
        assert len(loop.counters().load_s) == 3


@asynccontextmanager
async def first_is_gone(offer):
    if offer.version == 1:
        raise WeightsGone("policy version 1 was removed")
    yield offer


async def test_a_loop_skips_removed_weights_and_loads_newer_ones(make_buffer):
    buffer = make_buffer(0, groups_per_step=1, max_lag=4)
    await buffer.advance()

    async with running_loop(buffer, stage=first_is_gone) as (_, engine, run):
        await buffer.offer(bare_offer(1))
        await asyncio.sleep(0.1)
        assert (engine.version, run.done()) == (0, False)
        await buffer.advance()
        await buffer.offer(bare_offer(2))
        assert (await buffer.served(0, 1))[0] == 2


async def test_a_loop_ends_if_its_offered_weights_were_removed_and_no_newer_weights_come(make_buffer):
    buffer = make_buffer(2)
    async with running_loop(buffer, writes(200, 0.1), stage=first_is_gone, load_timeout_s=2.0) as (_, _, run):
        await buffer.offer(bare_offer(1))
        with pytest.raises(WeightsGone, match="policy version 1 was removed"):
            await asyncio.wait_for(run, 10)
    assert buffer.held == set()


async def test_a_learner_restart_longer_than_load_timeout_s_does_not_end_a_worker(make_buffer, monkeypatch):
    buffer = make_buffer(0, groups_per_step=1, max_lag=4)
    await buffer.advance()
    asked: asyncio.Queue[int] = asyncio.Queue()
    next_offer = buffer.next_offer

    async def noted(after):
        asked.put_nowait(after)
        return await next_offer(after)

    monkeypatch.setattr(buffer, "next_offer", noted)
    async with running_loop(buffer, stage=first_is_gone, load_timeout_s=0.2) as (_, engine, run):
        await buffer.offer(bare_offer(1))
        assert [await asked.get(), await asked.get()] == [0, 1]
        await buffer.withdraw_offers()
        assert await asyncio.wait_for(asked.get(), 5) == 0, "the loop must request a new offer"
        assert (engine.version, run.done()) == (0, False)
        await buffer.advance()
        await buffer.offer(bare_offer(2))
        assert (await buffer.served(0, 1))[0] == 2


async def test_a_failed_publish_ends_the_loop_and_the_error_names_the_version(make_buffer):
    buffer = make_buffer(2)
    async with running_loop(buffer, writes(200, 0.1)) as (_, _, run):
        await buffer.publish_failed("the publish of version 7 failed on rank 1: no space")
        with pytest.raises(WeightsError, match="version 7 failed on rank 1"):
            await asyncio.wait_for(run, 10)
    assert buffer.held == set()


async def test_a_load_that_fails_ends_the_loop_with_the_engines_error(make_buffer):
    buffer = make_buffer(2)
    async with running_loop(buffer, writes(200, 0.1)) as (_, engine, run):
        engine.load_error = "other weights"
        await buffer.offer(bare_offer(1))
        with pytest.raises(EngineError, match="other weights"):
            await asyncio.wait_for(run, 10)
    assert buffer.held == set()


async def test_a_stop_releases_every_lease_with_its_tokens(make_buffer):
    buffer = make_buffer(40)
    async with running_loop(buffer, writes(50, 0.005), groups_in_flight=8) as (loop, _, _):
        await asyncio.sleep(0.1)
        counters = await loop.stop()
    assert buffer.held == set()
    assert len(buffer.released) == 8
    assert {reason for _, _, reason in buffer.released} == {"stopped"}
    assert counters.tokens_generated > 0
    assert counters.tokens_generated == buffer.num_accounted
    assert counters.tokens_in_flight == 0


async def test_a_stop_waits_for_a_running_load_and_the_engine_stays_usable(make_buffer):
    buffer = make_buffer(2)
    async with running_loop(buffer, writes(300)) as (loop, engine, run):
        engine.load_delay_s = 0.5
        await buffer.offer(bare_offer(1))
        await asyncio.sleep(0.1)
        await loop.stop()
        await run
        assert (engine.version, engine.has_failed) == (1, False), "the engine must still answer held-out prompts"
    assert buffer.held == set()


async def test_a_stop_waits_for_a_hanging_load_only_until_its_deadline(make_buffer):
    buffer = make_buffer(2)
    async with running_loop(buffer, writes(300), stop_timeout_s=0.3) as (loop, engine, run):
        engine.load_delay_s = 60.0
        await buffer.offer(bare_offer(1))
        await asyncio.sleep(0.1)
        await asyncio.wait_for(loop.stop(), 5)
        await run
        assert engine.version == 0
    assert buffer.held == set()


async def test_a_revoked_group_is_aborted_and_its_tokens_reported(make_buffer):
    buffer = make_buffer(2)
    async with running_loop(buffer, writes(40)) as (loop, _, _):
        await asyncio.sleep(0.1)
        await buffer.revoke(1)
        await buffer.stored(1)
        counters = await loop.stop()
    (group_id, num_tokens, reason), *_ = buffer.released
    assert (group_id, reason) == (1, "revoked")
    assert 0 < num_tokens < 80
    assert counters.tokens_generated == buffer.num_accounted


async def test_a_group_that_the_buffer_refuses_is_counted_and_does_not_end_the_loop(make_buffer):
    buffer = make_buffer(3)
    async with running_loop(buffer, writes(10)) as (loop, _, run):
        await asyncio.sleep(0.03)
        await buffer.expire(0)
        await buffer.stored(3)
        assert not run.done()
        counters = await loop.stop()
    assert (counters.groups_refused, counters.groups_finished) == (1, 3)
    assert counters.tokens_generated == buffer.num_accounted
    assert counters.tokens_in_flight == 0


async def test_leases_are_renewed_while_their_groups_run(make_buffer):
    buffer = make_buffer(2)
    async with running_loop(buffer, writes(20), renew_every_s=0.02):
        await buffer.stored(2)
    assert buffer.renewals >= 4


async def test_the_death_of_the_engine_ends_the_loop_with_its_cause_and_releases_the_leases(make_buffer):
    buffer = make_buffer(6)
    async with running_loop(buffer, writes(500)) as (_, engine, run):
        await asyncio.sleep(0.05)
        engine.die("killed")
        with pytest.raises(WorkerDiedError, match="killed"):
            await asyncio.wait_for(run, 2)
    assert buffer.held == set()


def nan_reward(prompt, response_text):
    return float("nan")


def nan_for_the_first_prompt(prompt, response_text):
    return float("nan") if prompt.group_id == 0 else 1.0


async def test_a_group_whose_reward_fails_repeatedly_is_dropped_and_the_loop_continues(make_buffer, monkeypatch):
    undo_registrations(monkeypatch, REWARDS).register("not a number for the first prompt")(nan_for_the_first_prompt)
    buffer = make_buffer(5)
    async with running_loop(buffer, reward="not a number for the first prompt", max_attempts=3) as (loop, _, _):
        await buffer.stored(4)
        await buffer.dropped(1)
        counters = await loop.stop()
    assert sorted(group.group_id for group in buffer.groups) == [1, 2, 3, 4]
    assert buffer.released == [(0, 2, "reward")] * 3
    assert dict(buffer.ledger.account.groups_dropped) == {"reward": 1}
    assert counters.groups_failed == {"reward": 3}
    assert counters.tokens_generated == buffer.num_accounted == 14


async def test_the_option_drop_trajectory_drops_only_the_responses_whose_reward_failed(make_buffer, monkeypatch):
    failing = {0: 1, 1: 3}  # group id -> number of responses whose reward fails
    scored: list[int] = []

    def reward(prompt, response_text):
        scored.append(prompt.group_id)
        place = (scored.count(prompt.group_id) - 1) % 4
        return float("nan") if place < failing.get(prompt.group_id, 0) else 1.0

    def script(request, version):
        return ScriptedAnswer(response=[WRITTEN] * (2 + int(request.id.split("-")[2])))

    undo_registrations(monkeypatch, REWARDS).register("fails on some")(reward)
    buffer = make_buffer(3)
    options = {"on_reward_failure": OnRewardFailure.drop_trajectory, "max_attempts": 2, "samples_per_prompt": 4}
    async with running_loop(buffer, script, reward="fails on some", **options) as (loop, _, _):
        await buffer.stored(2)
        await buffer.dropped(1)
        counters = await loop.stop()
    assert {group.group_id: group.num_trajectories for group in buffer.groups} == {0: 3, 2: 4}
    assert counters.groups_failed == {"reward_trajectory": 1, "reward": 2}, "a group with one scored response must fail"
    assert dict(buffer.ledger.account.groups_dropped) == {"reward": 1}
    assert buffer.ledger.account.tokens_dropped == {"reward": 2 + 2 * (2 + 3 + 4 + 5)}
    assert counters.tokens_generated == buffer.num_accounted
    assert counters.tokens_in_flight == 0


async def test_evictions_do_not_count_as_failures(make_buffer, monkeypatch):
    scores = iter([float("nan"), *[1.0] * 3])
    undo_registrations(monkeypatch, REWARDS).register("bad once")(lambda prompt, response_text: next(scores))
    buffer = make_buffer(1)
    for _ in range(5):
        await buffer.lease(0, 1)
        await buffer.expire(0)
    async with running_loop(buffer, reward="bad once", max_attempts=2) as (loop, _, _):
        await buffer.stored(1)
        assert buffer.groups[0].attempt == 6
        assert loop.counters().groups_failed == {"reward": 1}


async def test_slots_that_become_free_at_the_same_time_are_leased_together(make_buffer):
    def script(request, version):
        group_id = int(request.id.split("-")[0])
        return ScriptedAnswer(response=[WRITTEN], token_delay_s=0.05 + 0.001 * (group_id % 8))

    buffer = make_buffer(40)
    async with running_loop(buffer, script, groups_in_flight=8):
        await buffer.stored(40)
    assert len(buffer.leases_asked) <= 15


async def test_an_idle_engine_gets_new_groups_immediately(make_buffer):
    buffer = make_buffer(24)
    began_s = asyncio.get_running_loop().time()
    async with running_loop(buffer, writes(2), groups_in_flight=8):
        await buffer.stored(24)
        took_s = asyncio.get_running_loop().time() - began_s
    assert took_s == pytest.approx(3 * 0.02), "the three batches must run without pauses"
    assert [num_groups for _, num_groups in buffer.leases_asked[:3]] == [8, 8, 8]


async def test_up_to_groups_in_flight_groups_can_be_scored_without_using_slots(make_buffer, monkeypatch):
    scored = asyncio.Event()
    score = WeightedRewards.score

    async def wait(self, prompt, texts, **options):
        await scored.wait()
        return await score(self, prompt, texts, **options)

    monkeypatch.setattr(WeightedRewards, "score", wait)
    buffer = make_buffer(12)
    async with running_loop(buffer, writes(2), groups_in_flight=3):
        await asyncio.sleep(1.0)
        assert len(buffer.held) == 2 * 3, "three groups are scored, and three run"
        scored.set()
        await buffer.stored(12)


async def test_a_reward_that_fails_for_many_groups_in_a_row_ends_the_loop(make_buffer, monkeypatch):
    undo_registrations(monkeypatch, REWARDS).register("never a number")(nan_reward)
    buffer = make_buffer(20)
    async with running_loop(buffer, reward="never a number", max_failures_in_a_row=7) as (loop, _, run):
        with pytest.raises(RewardError, match=r"returned nan; .*failure 7 in a row.*max_failures_in_a_row"):
            await asyncio.wait_for(run, 5)
        counters = loop.counters()
    assert counters.tokens_generated == buffer.num_accounted
    assert counters.tokens_in_flight == 0
    assert buffer.held == set()


async def test_a_group_that_the_engine_always_aborts_is_dropped_and_counted(make_buffer):
    def script(request, version):
        is_first = request.id.startswith("0-")
        return ScriptedAnswer(response=[14] * 30, cut_off=2 if is_first else -1)

    buffer = make_buffer(3)
    async with running_loop(buffer, script, max_attempts=4) as (loop, _, _):
        await buffer.stored(2)
        await buffer.dropped(1)
        counters = await loop.stop()
    assert sorted(group.group_id for group in buffer.groups) == [1, 2]
    assert dict(buffer.ledger.account.groups_dropped) == {"aborted": 1}
    assert buffer.ledger.account.tokens_dropped["aborted"] == 4 * 2 * 2
    assert counters.tokens_generated == buffer.num_accounted


async def test_a_failed_lease_renewal_is_repeated(make_buffer, monkeypatch):
    buffer = make_buffer(1)
    renew, num_failures = buffer.renew, 0

    async def fail_twice(leases):
        nonlocal num_failures
        num_failures += 1
        if num_failures <= 2:
            raise DeadlineError("the buffer did not answer")
        await renew(leases)

    monkeypatch.setattr(buffer, "renew", fail_twice)
    async with running_loop(buffer, writes(30), renew_every_s=0.02) as (_, _, run):
        await buffer.stored(1)
        assert not run.done()
    assert buffer.renewals >= 1


async def test_lease_renewals_that_always_fail_end_the_loop(make_buffer, monkeypatch):
    buffer = make_buffer(1)

    async def fail(leases):
        raise DeadlineError("the buffer did not answer")

    monkeypatch.setattr(buffer, "renew", fail)
    async with running_loop(buffer, writes(500), renew_every_s=0.02) as (_, _, run):
        with pytest.raises(DeadlineError, match="did not answer"):
            await asyncio.wait_for(run, 5)


async def test_each_second_of_a_loop_is_either_busy_or_waiting(make_buffer, monkeypatch):
    monkeypatch.setattr("rollout_fleet.loop.FleetMeter", partial(FleetMeter, time.monotonic))
    buffer = make_buffer(2, groups_per_step=2, max_lag=0)
    async with running_loop(buffer, writes(10)) as (loop, _, _):
        await buffer.stored(2)
        await asyncio.sleep(0.1)
        counters = loop.counters()
    assert (counters.busy_s, counters.wait_s) == (pytest.approx(0.1), pytest.approx(0.1))


async def test_no_group_runs_on_a_released_device_until_the_next_load(make_buffer):
    buffer = make_buffer(20)
    async with running_loop(buffer, writes(3), groups_in_flight=4) as (loop, engine, _):
        await buffer.stored(2)
        await loop.release_device()
        assert engine.released
        assert buffer.held == set()  # the loop must wait for its groups, not abort them
        assert buffer.released == []
        stored, asked = len(buffer.groups), len(buffer.leases_asked)
        await asyncio.sleep(0.05)
        assert (len(buffer.groups), len(buffer.leases_asked)) == (stored, asked)
        await loop.load_weights(bare_offer(0))
        await buffer.stored(20)
        for _ in range(3):  # release the device directly after a load, before any request
            await loop.load_weights(bare_offer(0))
            await loop.release_device()
        assert engine.released


async def test_several_releases_of_a_device_release_it_only_once(make_buffer):
    num_releases = []
    async with running_loop(make_buffer(20), writes(3)) as (loop, engine, _):
        release = engine.release_memory

        async def release_slowly():
            num_releases.append(1)
            await asyncio.sleep(0.02)
            await release()

        engine.release_memory = release_slowly
        await asyncio.gather(loop.release_device(), loop.release_device(1), loop.release_device(2))
        await loop.release_device(2)
    assert num_releases == [1]


async def test_a_restarting_learner_waits_for_a_running_load_and_engines_refuse_old_offers(make_buffer):
    buffer = make_buffer(20, max_lag=4)
    async with running_loop(buffer, writes(3)) as (loop, engine, run):
        await buffer.stored(2)
        engine.load_delay_s = 0.1
        loading = asyncio.create_task(loop.load_weights(bare_offer(1)))
        await asyncio.sleep(0.02)
        await loop.release_device(1)
        assert loading.done()
        assert engine.released
        with pytest.raises(WeightsGone, match=r"policy version 2 is from the old incarnation 0 of the learner"):
            await loop.load_weights(bare_offer(2))
        assert engine.released, "an old offer must not end the release"
        await asyncio.sleep(0.05)
        num_asked = len(buffer.leases_asked)
        assert not run.done()
        await loop.load_weights(replace(bare_offer(1), incarnation=1))
        assert not engine.released
        await asyncio.sleep(0.05)
        assert len(buffer.leases_asked) > num_asked


@pytest.mark.parametrize("dies", [False, True])
async def test_a_release_waits_for_the_first_load_unless_the_learner_restarts(make_buffer, dies):
    loop = make_loop(make_buffer(4), engine := ScriptedEngine())
    await engine.start()
    releasing = asyncio.create_task(loop.release_device())
    await asyncio.sleep(0.02)
    assert not engine.released
    if dies:
        await loop.release_device(1)
    else:
        await loop.load_weights(bare_offer(0))
    await asyncio.wait_for(releasing, 1)
    assert engine.released


async def test_a_release_after_a_learner_restart_also_waits_for_the_first_load(make_buffer):
    loop = make_loop(make_buffer(4), engine := ScriptedEngine())
    await engine.start()
    await loop.release_device(1)
    releasing = asyncio.create_task(loop.release_device())
    await asyncio.sleep(0.02)
    assert not releasing.done()
    await loop.load_weights(replace(bare_offer(0), incarnation=1))
    await asyncio.wait_for(releasing, 1)
    assert engine.released


async def test_a_group_that_exceeds_drain_timeout_s_is_aborted_and_continued_after_the_next_load(make_buffer):
    buffer = make_buffer(2, groups_per_step=1, max_lag=4)
    async with running_loop(buffer, writes(60), drain_timeout_s=0.1) as (loop, engine, run):
        await asyncio.sleep(0.05)  # wait until the groups have begun
        await loop.release_device()
        assert engine.released
        assert not buffer.groups
        await update(loop, buffer)
        await buffer.stored(2)
        assert not run.done()
        assert buffer.released == []
    assert buffer.num_tokens == 2 * 2 * 60


async def test_no_wait_is_counted_after_a_stop_during_the_withdrawal_of_a_lease_request(make_buffer):
    buffer = make_buffer(4)
    engine = ScriptedEngine()

    async def be_slow_to_withdraw(engine_version, max_groups):
        try:
            await asyncio.Event().wait()
        finally:
            asking.cancel()  # stops the loop
            await asyncio.sleep(0)

    buffer.lease = be_slow_to_withdraw
    loop = make_loop(buffer, engine, groups_in_flight=2)
    await engine.start()
    await loop.load_weights(bare_offer(0))
    asking = asyncio.create_task(loop._keep_leasing())
    await asyncio.sleep(0.05)
    await loop.load_weights(bare_offer(1))  # the load cancels the pending request for leases
    await asyncio.wait([asking])
    assert loop.counters().wait_s == loop.counters().wait_s


async def test_leases_granted_during_a_stop_are_released(make_buffer):
    buffer = make_buffer(4)
    grant = buffer.lease

    async def lease_while_being_stopped(engine_version, max_groups):
        leases = await grant(engine_version, max_groups)
        asking.cancel()
        return leases

    buffer.lease = lease_while_being_stopped
    engine = ScriptedEngine()
    await engine.start()
    loop = make_loop(buffer, engine, groups_in_flight=2)
    await loop.load_weights(bare_offer(0))
    asking = asyncio.create_task(loop._keep_leasing())
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert buffer.released == [(0, 0, "stopped"), (1, 0, "stopped")]
    assert buffer.held == set()


async def test_the_device_is_not_released_while_an_engine_ignores_aborts(make_buffer, monkeypatch, caplog):
    buffer = make_buffer(2, groups_per_step=1, max_lag=4)
    options = {"drain_timeout_s": 0.05, "load_timeout_s": 0.1, "stop_timeout_s": 0.1}
    async with running_loop(buffer, writes(60), **options) as (loop, engine, run):
        await asyncio.sleep(0.05)  # wait until the groups have begun

        async def ignore(request_ids):
            return

        with monkeypatch.context() as patched:
            patched.setattr(engine, "abort", ignore)
            with pytest.raises(DeadlineError, match=r"2 prompt groups did not finish within .* were not aborted"):
                await loop.release_device()
        assert "2 prompt groups were not aborted within 0.1 s" in caplog.text
        assert not engine.released
        await update(loop, buffer)
        await buffer.stored(2)
        assert not run.done()


@pytest.mark.parametrize("how", ["hangs", "fails"])
async def test_a_buffer_that_accepts_no_releases_does_not_block_a_stop(make_buffer, caplog, how):
    buffer = make_buffer(2)

    async def release(lease, **_):
        if how == "fails":
            raise ReplayBufferError("the buffer is gone")
        await asyncio.Event().wait()

    async with running_loop(buffer, writes(300), stop_timeout_s=0.1) as (loop, _, run):
        await asyncio.sleep(0.05)  # wait until the groups have begun
        buffer.release = release
        await asyncio.wait_for(loop.stop(), 5)
        counters = await run
    assert "prompt group 1, attempt 0, could not be given back" in caplog.text
    assert counters.groups_released == 0


async def test_leases_are_released_even_if_the_engine_fails_during_the_stop(make_buffer, monkeypatch, caplog):
    buffer = make_buffer(2)
    async with running_loop(buffer, writes(300)) as (loop, engine, run):
        await asyncio.sleep(0.05)  # wait until the groups have begun

        async def refuse(request_ids):
            raise EngineError("no aborts today")

        monkeypatch.setattr(engine, "abort", refuse)
        await loop.stop()
        await run
    assert "2 prompt groups are released as they are" in caplog.text
    assert buffer.held == set()
