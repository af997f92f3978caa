"""The code that all engines share: checks of prompts and answers, and the detection of a silent engine."""

import asyncio
from contextlib import nullcontext

import numpy as np
import pytest

from asyncrl.core.errors import DeadlineError, EngineError, RequestRefused
from asyncrl.core.trajectory import Trajectory, TrajectoryGroup, Turn
from asyncrl.core.types import FinishReason
from rollout_fleet.config import SamplingConfig
from rollout_fleet.engines.engine import SampleOutput, SampleRequest, SilenceWatch, check_output, check_prompt
from rollout_fleet.engines.scripted import ScriptedAnswer, ScriptedEngine
from rollout_fleet.episodes import PROMPT, Episode, EpisodeBudget

pytestmark = [pytest.mark.timeout(30), pytest.mark.usefixtures("virtual_time")]


def request_of(prompt_ids):
    return SampleRequest(id="r-0", prompt_ids=np.asarray(prompt_ids, dtype=np.int32), sampling=SamplingConfig())


def sample_of(token_ids=(3, 1), logprobs=(-0.5, -0.1), versions=(4, 4), finish_reason=FinishReason.stop):
    return SampleOutput(
        token_ids=np.asarray(token_ids, dtype=np.int32),
        logprobs=np.asarray(logprobs, dtype=np.float32),
        versions=np.asarray(versions, dtype=np.int32),
        finish_reason=finish_reason,
    )


def check(sample):
    check_output(sample, request_of([3]), vocab_size=10, loaded_versions={4, 5})


def test_a_valid_answer_passes_the_checks():
    check(sample_of())
    check(sample_of(versions=(4, 5)))


def test_an_aborted_answer_can_be_empty():
    check(sample_of((), (), (), finish_reason=None))


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (sample_of(logprobs=(-0.5,)), r"must agree in length, got \(2, 1, 2\)"),
        (sample_of((), (), ()), r"finished the response \(stop\) without a token"),
        (sample_of((3, 10)), r"sampled ids must be in 0..9, got 3..10"),
        (sample_of((-1, 3)), r"sampled ids must be in 0..9, got -1..3"),
        (sample_of(logprobs=(-0.5, 0.2)), "log-probs must be finite numbers <= 0, got -0.5 to 0.2"),
        (sample_of(logprobs=(-0.5, float("nan"))), "log-probs must be finite numbers <= 0"),
        (sample_of(logprobs=(-0.5, float("-inf"))), "log-probs must be finite numbers <= 0"),
        (sample_of(versions=(4, 6)), r"policy versions \[6\], which it never loaded and verified"),
        (sample_of(versions=(-1, 4)), r"policy versions \[-1\], which it never loaded and verified"),
    ],
)
def test_an_answer_that_violates_the_engine_contract_is_refused(sample, message):
    with pytest.raises(EngineError, match=message):
        check(sample)


@pytest.mark.parametrize(
    ("ids", "message"), [([], "empty prompt"), ([3, 10], r"0..9, got 3..10"), ([-1], r"got -1..-1")]
)
def test_a_prompt_that_would_kill_an_engine_is_refused(ids, message):
    with pytest.raises(EngineError, match=message):
        check_prompt(request_of(ids), 10)


@pytest.mark.parametrize(("ids", "is_refused"), [([0, 9], False), ([-1], True), ([10], True), ([2**32 + 5], True)])
@pytest.mark.parametrize("stride", [1, 2])
def test_token_ids_of_any_dtype_and_layout_are_checked(ids, is_refused, stride):
    prompt_ids = np.repeat(np.asarray(ids, dtype=np.int64), stride)[::stride]
    request = SampleRequest(id="a", prompt_ids=prompt_ids, sampling=SamplingConfig())
    with pytest.raises(EngineError, match=r"0\.\.9") if is_refused else nullcontext():
        check_prompt(request, 10)


def test_a_trajectory_concatenates_the_samples():
    prompt = Turn.given(np.asarray([3, 4], dtype=np.int32))
    long = sample_of((5, 6, 7), (-1.0, -2.0, -3.0), (4, 4, 5), FinishReason.length)
    trajectories = [
        Trajectory(turns=(prompt, sample.turn(parent=0)), reward=reward)
        for sample, reward in ((sample_of(), 1.0), (long, 0.0))
    ]
    group = TrajectoryGroup.from_trajectories(trajectories, group_id=9, attempt=2)
    assert (group.group_id, group.attempt) == (9, 2)
    assert group.token_ids.tolist() == [3, 4, 3, 1, 5, 6, 7]
    assert group.summary.response_lengths == (2, 3)
    assert group.logprobs.tolist() == pytest.approx([0.0, 0.0, -0.5, -0.1, -1.0, -2.0, -3.0])
    assert group.versions.tolist() == [-1, -1, 4, 4, 4, 4, 5]
    assert [group.trained_mask(branch).tolist() for branch in group.branches] == [
        [False, False, True, True],
        [False, False, True, True, True],
    ]
    assert [group.is_truncated(branch) for branch in group.branches] == [False, True]
    assert group.summary.num_truncated == 1
    assert (group.summary.oldest_version, group.summary.newest_version, group.summary.num_tokens) == (4, 5, 5)


async def answers() -> None:
    return


async def hangs() -> None:
    await asyncio.Event().wait()


async def refuses() -> None:
    raise EngineError("refused")


async def test_an_engine_without_running_requests_is_not_silent():
    watch = SilenceWatch("engine", timeout_s=0.05, probe=hangs)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(watch.wait(), 0.3)


async def test_tokens_of_any_request_show_that_an_engine_is_alive():
    watch = SilenceWatch("engine", timeout_s=0.4, probe=hangs)
    waiting = asyncio.create_task(watch.wait())
    with watch.running(1):
        for _ in range(10):
            await asyncio.sleep(0.1)
            watch.token()
    assert not waiting.done()
    waiting.cancel()


@pytest.mark.parametrize(("probe", "what"), [(hangs, "did not answer a probe"), (refuses, "probe failed: refused")])
async def test_a_silent_engine_that_does_not_answer_a_probe_fails_within_the_deadline(probe, what):
    watch = SilenceWatch("engine", timeout_s=0.2, probe=probe)
    with watch.running(3), pytest.raises(DeadlineError, match=f"no token of its 3 running requests.*{what}"):
        await asyncio.wait_for(watch.wait(), 5)


async def test_an_engine_that_answers_probes_but_produces_no_tokens_fails():
    watch = SilenceWatch("engine", timeout_s=0.1, probe=answers)
    with watch.running(1), pytest.raises(DeadlineError, match="answered 3 probes, but produced no token"):
        await asyncio.wait_for(watch.wait(), 5)


async def test_an_intended_pause_does_not_count_as_silence():
    watch = SilenceWatch("engine", timeout_s=0.1, probe=hangs)
    waiting = asyncio.create_task(watch.wait())
    with watch.running(1), watch.paused():
        await asyncio.sleep(0.4)
        assert not waiting.done()
    waiting.cancel()


async def test_the_scripted_engine_ends_a_response_at_stop_tokens_and_stop_texts():
    engine = ScriptedEngine(lambda *_: ScriptedAnswer(response=[3, 4, 5, 6]), decode=lambda ids: "".join(map(str, ids)))
    await engine.start()
    for sampling, expected in (
        (SamplingConfig(stop_token_ids=(4, 5)), [3, 4]),
        (SamplingConfig(stop=("45",)), [3, 4, 5]),
        (SamplingConfig(), [3, 4, 5, 6]),
    ):
        request = SampleRequest(id="a", prompt_ids=np.array([3]), sampling=sampling)
        ((_, output),) = [answer async for answer in engine.generate([request])]
        assert (output.token_ids.tolist(), output.finish_reason) == (expected, FinishReason.stop)
    blind = ScriptedEngine()
    await blind.start()
    request = SampleRequest(id="a", prompt_ids=np.array([3]), sampling=SamplingConfig(stop=("x",)))
    with pytest.raises(RequestRefused, match="needs `decode` for stop texts"):
        await anext(blind.generate([request]))


@pytest.mark.parametrize("cuts", [(1,), (2,), (3,), (2, 1), (0, 3), (4,)], ids=str)
async def test_a_response_ends_at_a_stop_text_that_was_sampled_in_several_requests(cuts):
    cut_offs = iter([*cuts, -1])

    def goes_on(request, version):
        written = len(request.prompt_ids) - 2
        return ScriptedAnswer(response=range(10 + written, 20), cut_off=next(cut_offs))

    engine = ScriptedEngine(goes_on, decode=lambda ids: "".join(f"<{token}>" for token in ids))
    await engine.start()
    budget = EpisodeBudget(max_turns=1, max_tokens=12, max_context=14)
    episode = Episode("0-0-0", np.asarray([1, 2], dtype=np.int32), budget)
    turn = episode.sample(PROMPT, (), SamplingConfig(max_new_tokens=12, stop=("11><12><13", "17")))
    while requests := episode.next_requests():
        async for request, output in engine.generate(requests):
            episode.take(request.id, output)
    answer = episode.turn(turn)
    assert (answer.token_ids.tolist(), answer.finish_reason) == ([10, 11, 12, 13], FinishReason.stop)
    assert len(answer.logprobs) == len(answer.versions) == 4


async def test_an_aborted_sample_with_a_schema_returns_no_tokens(monkeypatch):
    engine = ScriptedEngine(lambda *_: ScriptedAnswer(response=[3, 4, 5], cut_off=2))
    monkeypatch.setattr(engine, "_check_sampling", lambda _: None)
    await engine.start()
    for schema, expected in (("{}", []), ("", [3, 4])):
        request = SampleRequest(id="a", prompt_ids=np.array([3]), sampling=SamplingConfig(json_schema=schema))
        ((_, output),) = [answer async for answer in engine.generate([request])]
        assert (output.token_ids.tolist(), output.finish_reason) == (expected, None)
