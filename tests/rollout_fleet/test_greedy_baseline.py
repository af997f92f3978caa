"""ReMax's baseline: one more greedy sample of each group, scored, masked out and in nobody's token account."""

import asyncio

import numpy as np
import pytest

from asyncrl.protocol.types import Lease, Prompt, WeightSnapshot
from rollout_fleet.config import SamplingConfig
from rollout_fleet.engines.greedy_baseline import GreedyBaselineEngine
from rollout_fleet.engines.scripted import ScriptedAnswer, ScriptedEngine
from rollout_fleet.trajectory import to_trajectory_group
from rollout_fleet.types import GenerationRequest

pytestmark = pytest.mark.timeout(30)


def request(index: int) -> GenerationRequest:
    return GenerationRequest(
        rid=f"{index:012d}-000",
        prompt_ids=np.array([3, 4], dtype=np.int32),
        num_samples=3,
        sampling=SamplingConfig(temperature=0.7, top_p=0.9, max_new_tokens=5),
    )


def script(asked: GenerationRequest, version: int) -> ScriptedAnswer:
    """Sampled responses are 5, 6, 7; the greedy one is 8 8. Every other group's greedy response is the later one."""
    if asked.sampling.temperature == 0:
        delay = 0.02 if int(asked.rid[1:12]) % 2 else 0.0
        return ScriptedAnswer(responses=[[8, 8]] * asked.num_samples, token_delay_s=delay)
    return ScriptedAnswer(responses=[[5], [6], [7]], token_delay_s=0.01)


async def started() -> tuple[ScriptedEngine, GreedyBaselineEngine]:
    inner = ScriptedEngine(script)
    engine = GreedyBaselineEngine(inner)
    await engine.start()
    return inner, engine


async def test_every_group_is_answered_with_its_greedy_sample_last():
    inner, engine = await started()
    outputs = {output.rid: output async for output in engine.generate([request(index) for index in range(6)])}
    assert sorted(outputs) == [f"{index:012d}-000" for index in range(6)]
    for output in outputs.values():
        assert [sample.token_ids.tolist() for sample in output.samples] == [[5], [6], [7], [8, 8]]
        assert (output.num_baselines, output.num_tokens) == (1, 3)
    greedy = [asked for asked in inner.requests if asked.sampling.temperature == 0]
    assert len(greedy) == 6
    assert {len(asked.rid) for asked in inner.requests} == {16}, "engines match ids by prefix"
    assert {(asked.num_samples, asked.sampling.top_p, asked.sampling.max_new_tokens) for asked in greedy} == {
        (1, 1.0, 5)
    }
    await engine.stop()


async def test_an_abort_cuts_both_off():
    _, engine = await started()

    async def answers():
        return [output async for output in engine.generate([request(1)])]

    answering = asyncio.create_task(answers())
    await asyncio.sleep(0.005)
    await engine.abort(request(1).rid)
    (output,) = await answering
    assert output.aborted
    assert len(output.samples[-1].token_ids) < 2
    await engine.stop()


async def test_weights_and_versions_are_the_inner_engines():
    inner, engine = await started()
    await engine.load_weights(WeightSnapshot(version=4, path=""))
    assert engine.version == inner.version == 4
    waiting = asyncio.create_task(engine.wait_failed())
    await asyncio.sleep(0)
    inner.die("test")
    with pytest.raises(Exception, match="test"):
        await waiting


async def test_the_baseline_is_stored_scored_and_masked_out_whole():
    _, engine = await started()
    (output,) = [output async for output in engine.generate([request(1)])]
    prompt = Prompt(group_id=1, prompt_ids=np.array([3, 4], dtype=np.int32))
    lease = Lease(prompt=prompt, attempt=0, engine_version=0, deadline_version=1)
    group = to_trajectory_group(lease, output, np.array([0.0, 1.0, 0.0, 1.0], dtype=np.float32))
    assert group.summary.response_lengths == (1, 1, 1, 2)
    assert [group.trained_mask(branch).any() for branch in group.branches] == [True, True, True, False]
    assert group.is_baseline.tolist() == [False, False, False, True]
    assert group.summary.num_tokens == 3
    assert group.summary.rewards == (0.0, 1.0, 0.0, 1.0)
    await engine.stop()
