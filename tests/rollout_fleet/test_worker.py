"""The worker as one object, without Ray: its parts are wired and closed in the right order."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import numpy as np
import pyarrow.parquet as pq
import pytest

from asyncrl.protocol.errors import AsyncRLError, RewardError
from rollout_fleet.config import EngineKind, RolloutFleetConfig, SamplingConfig
from rollout_fleet.engines.scripted import ScriptedEngine
from rollout_fleet.evaluation import evaluate_prompts
from rollout_fleet.rewards import Scores
from rollout_fleet.worker import RolloutWorker
from tests.support.engine_probes import publish_weights
from tests.support.offers import bare_offer
from tests.support.rollout import digits

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def make_worker(model_path, tmp_path, monkeypatch):
    """Return a maker of workers on a buffer."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")

    def make(buffer, **options):
        return RolloutWorker(
            RolloutFleetConfig(**{"engine": EngineKind.transformers, **options}),
            model_path=model_path,
            samples_per_prompt=4,
            connect_buffer=lambda: buffer,
            log_dir=str(tmp_path),
            staging_dir=str(tmp_path / "staging"),
            sample_dir=str(tmp_path / "samples"),
            seed=0,
        )

    return make


async def test_a_worker_rolls_out_across_weight_loads_and_every_token_is_accounted_for(
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
    await buffer.stored(24)
    counters = await worker.stop()
    assert await run == counters
    assert buffer.closed
    assert counters.groups_finished == 24
    assert counters.tokens_generated == buffer.num_accounted
    assert counters.tokens_in_flight == 0
    assert len(counters.load_s) == 3
    for group in buffer.groups:
        assert group.num_trajectories == 4
        assert group.summary.oldest_version >= 0


async def test_after_a_drain_the_engine_still_evaluates_and_keeps_the_answers(
    make_worker, make_buffer, make_prompts, model_path, tmp_path
):
    buffer = make_buffer(4)
    worker = make_worker(buffer)
    await worker.start()
    await buffer.offer(publish_weights(model_path, tmp_path, 0))
    await worker.load_first()
    run = asyncio.create_task(worker.run())
    drained = await worker.drain()
    assert await run == drained
    greedy = SamplingConfig(temperature=0.0, max_new_tokens=5)
    result = await worker.evaluate(make_prompts(6), greedy, 2)
    again = await worker.evaluate(make_prompts(6), greedy, 2)
    await worker.stop()
    assert len(result.rewards) == 12
    kept = pq.read_table(tmp_path / "samples" / "greedy-v00000000-rollout0.parquet")
    np.testing.assert_allclose(kept["reward"].to_pylist(), result.rewards)
    assert kept["response"].to_pylist()[0] == kept["response"].to_pylist()[1]
    assert result == again
    assert 1 <= result.mean_length <= 5
    assert (await worker.counters()).tokens_generated == drained.tokens_generated


@asynccontextmanager
async def bare(offer):
    yield offer


async def serving(make_worker, buffer):
    """A worker on a scripted engine that serves version 0."""
    worker = make_worker(buffer, engine=EngineKind.scripted)
    worker._stager.staged = bare
    await worker.start()
    await buffer.offer(bare_offer(0))
    await worker.load_first()
    return worker


async def test_rewards_of_an_evaluation_stand_in_the_order_of_the_prompts(make_worker, make_buffer, make_prompts):
    worker = await serving(make_worker, make_buffer(1))
    worker._decode = lambda ids: str(ids[0] - 3)
    prompts = make_prompts(5)
    wrong = type(prompts[2])(group_id=2, prompt_ids=prompts[2].prompt_ids, ground_truth="x")
    result = await worker.evaluate([*prompts[:2], wrong, *prompts[3:]], SamplingConfig(), 1)
    await worker.stop()
    assert result.rewards == (1.0, 1.0, 0.0, 1.0, 1.0)
    assert result.mean_length == 1.0


async def test_evaluating_nothing_gives_nothing(make_worker, make_buffer):
    worker = await serving(make_worker, make_buffer(1))
    result = await worker.evaluate([], SamplingConfig(), 1)
    await worker.stop()
    assert (result.rewards, result.mean_length) == ((), 0.0)


async def test_a_worker_that_was_never_started_says_so_and_stops_cleanly(make_worker, make_buffer):
    worker = make_worker(make_buffer(1))
    with pytest.raises(AsyncRLError, match=r"rollout worker 0 is not started; await start\(\) first"):
        await worker.load_first()
    assert await worker.stop() is None


class FailingRewards:
    """Fails for some prompts, by group id."""

    def __init__(self, *failing):
        self.failing = failing

    async def score(self, prompt, texts):
        if prompt.group_id in self.failing:
            raise RewardError(f"reward of prompt group {prompt.group_id} raised")
        return Scores(total=np.ones(len(texts), dtype=np.float32), parts={})


async def test_an_evaluation_leaves_out_and_counts_prompts_whose_reward_fails(make_prompts, caplog):
    engine = ScriptedEngine()
    await engine.start()
    options = {"engine": engine, "decode": digits, "sampling": SamplingConfig(), "num_samples": 2}
    result = await evaluate_prompts(make_prompts(3), rewards=FailingRewards(1), **options)
    assert (result.rewards, result.num_failed, result.mean_length) == ((1.0, 1.0, 1.0, 1.0), 1, 1.0)
    assert "a held-out prompt is left out: reward of prompt group 1 raised" in caplog.text
    with pytest.raises(RewardError, match="reward of prompt group 1 raised"):
        await evaluate_prompts(make_prompts(2), rewards=FailingRewards(0, 1), **options)
