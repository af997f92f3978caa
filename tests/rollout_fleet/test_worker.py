"""The rollout worker as an object without Ray. The tests check how its parts work together and how they are closed."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from asyncrl.core.errors import AsyncRLError, EngineError, RewardError
from rollout_fleet.answering import AnsweringParts
from rollout_fleet.config import EngineKind, RolloutFleetConfig, SamplingConfig
from rollout_fleet.engines.scripted import ScriptedAnswer, ScriptedEngine
from rollout_fleet.engines.transformers import TransformersEngine
from rollout_fleet.evaluation import HeldOutAnswers
from rollout_fleet.rewards import Scores
from rollout_fleet.worker import RolloutWorker
from tests.support.engine_probes import publish_weights
from tests.support.offers import bare_offer
from tests.support.rollout import digits


@pytest.fixture
def make_worker(model_path, tmp_path, monkeypatch):
    """Return a function that makes rollout workers for a given buffer."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")

    def make(buffer, **options):
        return RolloutWorker(
            RolloutFleetConfig(**{"engine": EngineKind.transformers, **options}),
            model_path=model_path,
            samples_per_prompt=4,
            connect_buffer=lambda name: buffer,
            log_dir=str(tmp_path),
            staging_dir=str(tmp_path / "staging"),
            sample_dir=str(tmp_path / "samples"),
            seed=0,
            engine_seed=0,
        )

    return make


async def test_a_worker_generates_across_weight_loads_and_every_token_is_counted(
    make_worker, make_buffer, model_path, tmp_path
):
    buffer = make_buffer(24, groups_per_step=8, max_lag=1)
    worker = make_worker(buffer, sampling=SamplingConfig(max_new_tokens=8))
    await worker.start()
    await buffer.offer(publish_weights(model_path, tmp_path, 0))
    await worker.load_first()
    assert await buffer.served(-1, 1) > (0, 0.0)
    run = asyncio.create_task(worker.run())
    for version in (1, 2):
        await buffer.stored(8 * version)
        await buffer.commit()
        await buffer.offer(publish_weights(model_path, tmp_path, version))
        assert (await buffer.served(version - 1, 1))[0] == version, "the worker must load this version"
    await buffer.stored(24)
    counters = await worker.stop()
    assert await run == counters
    assert buffer.closed
    assert counters.groups_finished == 24
    assert counters.tokens_generated == buffer.num_accounted
    assert counters.tokens_in_flight == 0
    assert len(counters.load_s) == 3
    assert {group.num_trajectories for group in buffer.groups} == {4}
    versions = {int(version) for group in buffer.groups for version in group.versions if version >= 0}
    assert min(versions) == 0
    assert versions <= {0, 1, 2}


async def test_a_drained_worker_still_answers_held_out_prompts_and_stores_the_answers(
    make_worker, make_buffer, make_prompts, model_path, tmp_path
):
    buffer = make_buffer(4)
    worker = make_worker(buffer, sampling=SamplingConfig(max_new_tokens=5))
    await worker.start()
    await buffer.offer(publish_weights(model_path, tmp_path, 0))
    await worker.load_first()
    run = asyncio.create_task(worker.run())
    drained = await worker.drain()
    assert await run == drained
    answered = await worker.answer(make_prompts(6), 0, 2)
    again = await worker.answer(make_prompts(6), 0, 0)
    with pytest.raises(EngineError, match="serves policy version 0, not 3"):
        await worker.answer(make_prompts(1), 3, 2)
    await worker.stop()
    assert [(one.group_id, len(one.sampled), len(one.response_lengths)) for one in answered] == [
        (index, 2, 3) for index in range(6)
    ]
    assert [one.greedy for one in again] == [one.greedy for one in answered]
    assert all(1 <= length <= 5 for one in answered for length in one.response_lengths)
    kept = {
        kind: pq.read_table(tmp_path / "samples" / f"{kind}-v00000000-rollout0-00001.parquet")
        for kind in ("sampled", "greedy")
    }
    assert kept["sampled"]["group_id"].to_pylist() == [index for index in range(6) for _ in range(2)]
    np.testing.assert_allclose(kept["greedy"]["reward"].to_pylist(), [one.greedy for one in answered])
    assert (tmp_path / "samples" / "greedy-v00000000-rollout0-00002.parquet").exists()
    assert (await worker.counters()).tokens_generated == drained.tokens_generated


async def test_the_device_is_released_even_if_an_abandoned_evaluation_still_runs(
    make_worker, make_buffer, make_prompts, model_path, tmp_path, monkeypatch
):
    """In a colocated run, a signal or the death of a learner rank can end an evaluation before all answers arrive."""
    begun, engines, generate = asyncio.Event(), [], TransformersEngine.generate

    def generated(engine, requests):
        engines.append(engine)
        begun.set()
        return generate(engine, requests)

    buffer = make_buffer(0)
    worker = make_worker(buffer, sampling=SamplingConfig(max_new_tokens=100))
    await worker.start()
    await buffer.offer(publish_weights(model_path, tmp_path, 0))
    await worker.load_first()
    monkeypatch.setattr(TransformersEngine, "generate", generated)
    answering = asyncio.create_task(worker.answer(make_prompts(4), 0, 2))
    async with asyncio.timeout(10):
        await begun.wait()
        await worker.release_device()
    with pytest.raises(EngineError, match=r"released its device .* evaluation of policy version 0"):
        await answering
    assert not engines[0].has_failed
    await worker.stop()


async def test_a_part_whose_close_fails_does_not_prevent_the_close_of_the_other_parts():
    closed = []

    def part(name: str) -> Any:
        async def close():
            closed.append(name)
            raise OSError(f"{name} does not close")

        return SimpleNamespace(stop=close, close=close)

    parts = {name: part(name) for name in ("engine", "rewards", "judge", "player")}
    with pytest.raises(OSError, match="does not close"):
        await AnsweringParts(decode=str, **parts).close()
    assert closed == ["engine", "rewards", "judge", "player"]


async def test_a_worker_that_was_never_started_raises_an_error_and_can_be_stopped(make_worker, make_buffer):
    worker = make_worker(make_buffer(1))
    with pytest.raises(AsyncRLError, match=r"rollout worker 0 is not started; await start\(\) first"):
        await worker.load_first()
    assert await worker.stop() is None


class FailingRewards:
    """A reward that fails for the groups with the ids ``failing``."""

    def __init__(self, *failing):
        self.failing = failing

    async def score(self, prompt, texts):
        if prompt.group_id in self.failing:
            raise RewardError(f"reward of prompt group {prompt.group_id} raised")
        return Scores(total=np.ones(len(texts), dtype=np.float32), parts={})


def held_out(engine, *failing_rewards):
    return HeldOutAnswers(
        AnsweringParts(engine=engine, rewards=FailingRewards(*failing_rewards), decode=digits),
        sampling=lambda source: SamplingConfig(),
    )


async def test_a_held_out_prompt_whose_reward_fails_is_logged_and_other_prompts_are_answered(make_prompts, caplog):
    engine = ScriptedEngine()
    await engine.start()
    answered = await held_out(engine, 1).answer(make_prompts(3), version=0, num_samples=2)
    assert [(one.sampled, one.greedy) for one in answered] == [((1.0, 1.0), 1.0), ((), None), ((1.0, 1.0), 1.0)]
    assert answered[1].reward_failure == "reward of prompt group 1 raised"
    assert "a held-out prompt is left out: reward of prompt group 1 raised" in caplog.text


async def test_an_answer_that_mixes_policy_versions_is_rejected_and_an_aborted_one_is_repeated(make_prompts):
    """The scripted engine loads weights between two tokens of a sample, like a real server."""
    engine = ScriptedEngine(lambda request, version: ScriptedAnswer(response=[3, 3], token_delay_s=0.4))
    await engine.start()
    await engine.load_weights(bare_offer(4))
    call = asyncio.ensure_future(held_out(engine).answer(make_prompts(2), version=4, num_samples=1))
    await asyncio.sleep(0.6)
    await engine.load_weights(bare_offer(5))
    assert await call == [], "an answer with two versions must be rejected"
    assert len(engine.requests) == 4, "the engine has a newer version, so no request may be repeated"

    call = asyncio.ensure_future(held_out(engine).answer(make_prompts(2), version=5, num_samples=1))
    await asyncio.sleep(0.2)
    await engine.abort([request.id for request in engine.requests[-2:]])
    assert sorted(one.group_id for one in await call) == [0, 1], "aborted requests must be repeated"
