"""Groups that are cut off, saved with their leases, and continued: by another worker, or after a weight update."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import numpy as np
import pytest

from asyncrl.protocol.errors import EngineError, ReplayBufferError, StoreFull
from asyncrl.protocol.types import FinishReason, Lease, Prompt, WeightSnapshot
from rollout_fleet.config import RolloutFleetConfig, SamplingConfig, SaveProgress
from rollout_fleet.engines.continuing import ContinuingEngine
from rollout_fleet.engines.greedy_baseline import GreedyBaselineEngine
from rollout_fleet.engines.scripted import ScriptedAnswer, ScriptedEngine
from rollout_fleet.loop import RolloutLoop
from rollout_fleet.rewards.scorer import RewardScorer
from rollout_fleet.trajectory import to_prefixes, to_progress
from rollout_fleet.types import GenerationRequest, GroupOutput, SampleOutput

pytestmark = pytest.mark.timeout(60)

WRITTEN = 14
"""A token that no prompt of these tests holds."""


def writes_in_all(num_tokens: int, token_delay_s: float = 0.01):
    """A script whose samples have ``num_tokens`` tokens when they are finished, begun or continued."""

    def script(request: GenerationRequest, version: int) -> ScriptedAnswer:
        num_left = num_tokens - int(np.count_nonzero(request.prompt_ids == WRITTEN))
        assert request.sampling.max_new_tokens >= num_left
        return ScriptedAnswer(responses=[[WRITTEN] * num_left] * request.num_samples, token_delay_s=token_delay_s)

    return script


def sample(num_tokens: int, version: int, finish_reason: FinishReason | None = None) -> SampleOutput:
    return SampleOutput(
        token_ids=np.full(num_tokens, WRITTEN, dtype=np.int32),
        logprobs=np.full(num_tokens, -2.0, dtype=np.float32),
        versions=np.full(num_tokens, version, dtype=np.int32),
        finish_reason=finish_reason,
    )


def request(*prefixes: SampleOutput, max_new_tokens: int = 60) -> GenerationRequest:
    return GenerationRequest(
        rid="000000000007-001",
        prompt_ids=np.array([3, 4], dtype=np.int32),
        num_samples=len(prefixes),
        sampling=SamplingConfig(max_new_tokens=max_new_tokens),
        prefixes=prefixes,
    )


async def started(num_tokens: int, **options: float) -> tuple[ScriptedEngine, ContinuingEngine]:
    inner = ScriptedEngine(writes_in_all(num_tokens, **options))
    engine = ContinuingEngine(inner)
    await engine.start()
    await engine.load_weights(WeightSnapshot(version=3, path=""))
    return inner, engine


async def test_each_sample_goes_on_from_where_it_was_and_finished_ones_stay():
    inner, engine = await started(8)
    asked = request(sample(5, 1), sample(0, 1), sample(4, 2, FinishReason.stop))
    [output] = [output async for output in engine.generate([asked])]
    assert output.rid == asked.rid
    assert [s.token_ids.tolist() for s in output.samples] == [[WRITTEN] * 8, [WRITTEN] * 8, [WRITTEN] * 4]
    assert [s.versions.tolist() for s in output.samples] == [[1] * 5 + [3] * 3, [3] * 8, [2] * 4]
    assert [s.logprobs.tolist() for s in output.samples] == [[-2.0] * 5 + [-1.0] * 3, [-1.0] * 8, [-2.0] * 4]
    assert not output.aborted
    assert [(r.num_samples, r.sampling.max_new_tokens, len(r.prompt_ids)) for r in inner.requests] == [
        (1, 55, 7),
        (1, 60, 2),
    ]
    assert {len(r.rid) for r in inner.requests} == {16}, "engines match ids by prefix"


async def test_what_has_nothing_left_to_write_is_answered_without_the_engine():
    inner, engine = await started(8)
    asked = request(sample(6, 1), sample(2, 1, FinishReason.stop), max_new_tokens=6)
    [output] = [output async for output in engine.generate([asked])]
    assert [s.finish_reason for s in output.samples] == [FinishReason.length, FinishReason.stop]
    assert inner.requests == []


async def test_an_abort_cuts_every_continued_sample_off_and_keeps_what_was_written_before():
    _, engine = await started(50)

    async def answers():
        return [output async for output in engine.generate([request(sample(5, 1), sample(7, 1))])]

    answering = asyncio.create_task(answers())
    await asyncio.sleep(0.05)
    await engine.abort("000000000007-001")
    [output] = await asyncio.wait_for(answering, 5)
    assert output.aborted
    lengths = [len(s.token_ids) for s in output.samples]
    assert all(before < length < 50 for before, length in zip((5, 7), lengths, strict=True))
    assert output.samples[0].versions.tolist() == [1] * 5 + [3] * (lengths[0] - 5)


async def test_an_engine_that_cannot_continue_refuses_prefixes_by_name():
    inner, _ = await started(8)
    with pytest.raises(EngineError, match="000000000007-001 has prefixes"):
        await anext(aiter(inner.generate([request(sample(5, 1))])))


async def test_a_greedy_baseline_is_decoded_anew_and_never_saved():
    inner, continuing = await started(8)
    engine = GreedyBaselineEngine(continuing)
    [output] = [output async for output in engine.generate([request(sample(5, 1), sample(6, 1))])]
    assert [len(s.token_ids) for s in output.samples] == [8, 8, 8]
    assert output.num_baselines == 1
    assert sorted(len(r.prompt_ids) for r in inner.requests) == [2, 7, 8]
    prompt = Prompt(group_id=7, prompt_ids=np.array([3, 4], dtype=np.int32))
    lease = Lease(prompt=prompt, attempt=1, engine_version=1, deadline_version=2)
    assert to_progress(lease, output).num_trajectories == 2


def test_progress_comes_back_as_the_samples_that_it_was_made_of():
    prompt = Prompt(group_id=7, prompt_ids=np.array([3, 4], dtype=np.int32))
    lease = Lease(prompt=prompt, attempt=1, engine_version=1, deadline_version=2)
    samples = (sample(3, 1), sample(0, 1), sample(2, 4, FinishReason.stop))
    progress = to_progress(lease, GroupOutput(rid="x", samples=samples))
    assert progress.summary.num_tokens == 5
    for before, after in zip(samples, to_prefixes(progress, num_samples=3), strict=True):
        assert before.finish_reason is after.finish_reason
        for column in ("token_ids", "logprobs", "versions"):
            np.testing.assert_array_equal(getattr(before, column), getattr(after, column))
    with pytest.raises(ReplayBufferError, match="group 7 has 3 samples, this run takes 4"):
        to_prefixes(progress, num_samples=4)


@asynccontextmanager
async def running(buffer, num_tokens: int, *, version: int = 0, **options):
    """A loop on a scripted engine that continues; stopped at the end."""
    inner = ScriptedEngine(writes_in_all(num_tokens))
    engine = ContinuingEngine(inner)
    await engine.start()
    await engine.load_weights(WeightSnapshot(version=version, path=""))
    loop = RolloutLoop(
        RolloutFleetConfig(**options),
        engine=engine,
        buffer=buffer,
        scorer=RewardScorer("exact_match", num_processes=1, timeout_s=5.0),
        decode=lambda ids: "".join(map(str, ids)),
        samples_per_prompt=2,
    )
    run = asyncio.create_task(loop.run())
    try:
        yield loop, inner, run
    finally:
        await loop.stop()
        await asyncio.gather(run, return_exceptions=True)
        await engine.stop()


async def test_what_a_stopped_worker_has_written_is_continued_by_the_next(make_buffer):
    buffer = make_buffer(1)
    async with running(buffer, 40) as (loop, _, run):
        await asyncio.sleep(0.15)
        await loop.stop()
        first = await run
    assert 0 < first.tokens_generated < 80
    assert first.tokens_in_flight == 0
    assert buffer.progress[0].summary.num_tokens == first.tokens_generated
    assert {t.turns[1].finish_reason for t in buffer.progress[0].trajectories()} == {FinishReason.unfinished}
    buffer.learner_version = 1
    async with running(buffer, 40, version=1) as (loop, _, run):
        await buffer.stored(1)
        await loop.stop()
        second = await run
    [group] = buffer.groups
    assert group.attempt == 1
    assert group.summary.num_tokens == 80 == first.tokens_generated + second.tokens_generated
    assert np.count_nonzero(group.versions == 0) == first.tokens_generated
    assert (second.groups_finished, second.tokens_in_flight) == (1, 0)


async def test_progress_is_dropped_where_the_config_says_so(make_buffer):
    buffer = make_buffer(1)
    async with running(buffer, 40, save_progress=SaveProgress.never):
        await asyncio.sleep(0.1)
    assert buffer.progress == {}
    assert buffer.tokens_dropped > 0


async def test_at_an_update_what_runs_is_saved_and_goes_on_under_the_new_weights(make_buffer):
    buffer = make_buffer(3)
    async with running(buffer, 60, save_progress=SaveProgress.at_updates) as (loop, inner, run):
        saved = []
        for version in (1, 2):
            await asyncio.sleep(0.1)
            await loop.load_weights(WeightSnapshot(version=version, path=""))
            await asyncio.sleep(0.02)
            saved.append([buffer.progress[index].summary.num_tokens for index in range(3)])
        await buffer.stored(3)
        await loop.stop()
        counters = await run
    assert all(0 < before < after < 120 for before, after in zip(*saved, strict=True))
    assert counters.tokens_generated == 360 == buffer.num_tokens
    for group in buffer.groups:
        for versions in np.split(group.versions[len(group.prompt_ids) :], 2):
            assert versions.tolist() == sorted(versions)
            assert set(versions.tolist()) == {0, 1, 2}
    assert len(inner.requests) == 3 + 2 * 6


async def test_a_stop_or_a_revocation_while_weights_are_loaded_gives_cut_groups_back(make_buffer):
    buffer = make_buffer(3)
    async with running(buffer, 60, save_progress=SaveProgress.at_updates) as (loop, inner, run):
        await asyncio.sleep(0.1)
        inner._load_delay_s = 2.0
        loading = asyncio.create_task(loop.load_weights(WeightSnapshot(version=1, path="")))
        await asyncio.sleep(0.1)
        buffer.revoke(1)
        await asyncio.sleep(0.02)
        assert loop._parked
        await asyncio.wait_for(loop.stop(), 10)
        await loading
        counters = await run
    assert buffer.held == {}
    assert sorted(group_id for group_id, _, _ in buffer.released) == [0, 1, 2]
    assert counters.tokens_in_flight == 0
    assert counters.tokens_generated == buffer.tokens_dropped


async def test_an_abort_that_the_engine_ignored_is_repeated_until_the_group_is_cut_off(make_buffer, monkeypatch):
    buffer = make_buffer(1)
    async with running(buffer, 300, save_progress=SaveProgress.at_updates, stop_timeout_s=0.4) as (loop, inner, _):
        abort, asked = inner.abort, []

        async def ignore_once(rid: str) -> None:
            asked.append(rid)
            if len(asked) > 1:
                await abort(rid)

        monkeypatch.setattr(inner, "abort", ignore_once)
        await asyncio.sleep(0.1)
        await asyncio.wait_for(loop.load_weights(WeightSnapshot(version=1, path="")), 10)
        assert len(asked) == 2
        assert loop.counters().tokens_generated > 0


async def test_a_group_that_finds_no_room_for_its_progress_goes_on_all_the_same(make_buffer):
    buffer = make_buffer(2)

    async def refuse(lease, group):
        raise StoreFull("no room")

    buffer.save_progress = refuse
    async with running(buffer, 30, save_progress=SaveProgress.at_updates) as (loop, _, run):
        await asyncio.sleep(0.1)
        await loop.load_weights(WeightSnapshot(version=1, path=""))
        await buffer.stored(2)
        assert not run.done()
    assert buffer.num_tokens == 120
