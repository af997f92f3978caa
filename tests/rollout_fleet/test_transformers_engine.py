from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from asyncrl.core.errors import DeadlineError, EngineError, RequestRefused, WeightsError, WorkerDiedError
from asyncrl.core.types import FROZEN, FinishReason
from asyncrl.weights.carriers import PublishOptions
from asyncrl.weights.load import load_from
from asyncrl.weights.publish import WeightPublisher
from learner.config import Device, LearnerConfig, LoraConfig
from learner.lora import is_adapter
from learner.model_shards import PretrainedShards
from learner.packed_model import PackedModel
from learner.roles import ACTOR
from rollout_fleet.config import EngineDevice, RolloutFleetConfig, SamplingConfig, TransformersConfig
from rollout_fleet.engines import transformers as transformers_engine
from rollout_fleet.engines.engine import ModelFacts, RunningSample, SampleRequest
from rollout_fleet.engines.transformers import GenerationModel, StepRecorder, TransformersEngine
from tests.support.engine_probes import (
    answer,
    assert_continues,
    assert_ends,
    folder_of,
    forward_logprobs,
    publish_weights,
    requests_of,
    until_writing,
)
from tests.support.offers import bare_offer
from tests.support.tiny_models import VOCABULARY, save_tiny_model
from tests.support.whole_weights import save_whole


@pytest.fixture
def publish(model_path, tmp_path):
    """Return a function that publishes changed weights."""
    return partial(publish_weights, model_path, tmp_path)


@pytest.fixture
async def start(model_path):
    """Yield a function that makes and starts engines. The fixture stops the engines after the test."""
    engines = []

    async def make(seed=0, **options):
        config = RolloutFleetConfig(**options)
        engine = TransformersEngine(config, model_path=model_path, device=EngineDevice.cpu, rank=0, seed=seed)
        engines.append(engine)
        await engine.start()
        return engine

    yield make
    for engine in engines:
        await engine.stop()


@pytest.mark.long
@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.6, "top_p": 0.8}, {"top_k": 3}, {"min_p": 0.2}, {"temperature": 0.0}], ids=str
)
async def test_logprobs_equal_a_forward_pass_under_the_sampling_temperature(start, model_path, sampling):
    engine = await start()
    requests = requests_of(4, **sampling)
    for request, sample in zip(requests, await answer(engine, requests), strict=True):
        expected = forward_logprobs(model_path, request, sample)
        np.testing.assert_allclose(sample.logprobs, expected, atol=1e-5)


def model_of(family: str, folder: Path, eos_ids: Sequence[int] = ()) -> tuple[str, GenerationModel]:
    path = save_tiny_model(folder, family, initializer_range=0.3)
    facts = ModelFacts(vocab_size=VOCABULARY, eos_ids=tuple(eos_ids), pad_id=0, head_dim=16)
    model = GenerationModel(path, facts=facts, dtype="float32", device="cpu", seed=0)
    model.load()
    return path, model


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "cuts_cache", "may_pad"),
    [
        ("qwen3", True, True),
        ("gemma3_text", True, True),  # the attention window is shorter than a prompt
        ("gpt2", True, True),  # the position embeddings are learned
        ("deepseek_v3", True, True),
        ("lfm2", False, True),  # the cache contains the state of a convolution
        ("openai-gpt", False, True),  # the model has no cache
        ("recurrent_gemma", False, False),  # the model has a state outside of the cache
        ("llama4_text", True, False),  # the attention works in chunks of positions
    ],
)
def test_sharing_prompts_and_dropping_finished_rows_does_not_change_log_probs(tmp_path, family, cuts_cache, may_pad):
    path, model = model_of(family, tmp_path)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, VOCABULARY, length).astype(np.int32) for length in (2, 9, 14, 14)]
    requests = [
        SampleRequest(id=str(row), prompt_ids=prompts[row % 4], sampling=SamplingConfig(max_new_tokens=8 + row))
        for row in range(12)
    ]
    sizes = batch_sizes(model)
    samples = model.generate([RunningSample(request) for request in requests], 0)
    for request, sample in zip(requests, samples, strict=True):
        assert (len(sample.token_ids), sample.finish_reason) == (request.sampling.max_new_tokens, FinishReason.length)
        np.testing.assert_allclose(sample.logprobs, forward_logprobs(path, request, sample), atol=1e-4)
    assert (max(sizes) == len(requests)) == may_pad, f"the passes had {sizes} rows"
    assert (len(set(sizes)) > 3) == cuts_cache, f"the passes had {sizes} rows"
    assert len({tuple(sample.token_ids[:8].tolist()) for sample in samples}) > 9, "samples of one prompt must differ"


def batch_sizes(model):
    """Return a list. From now on, each forward pass appends its number of rows to the list."""
    sizes = []
    model.model.register_forward_pre_hook(
        lambda _, __, options: sizes.append(len(options["input_ids"])), with_kwargs=True
    )
    return sizes


def test_rows_are_dropped_after_an_end_token_at_their_length_limit_and_after_an_abort(tmp_path):
    path, model = model_of("qwen3", tmp_path, eos_ids=range(8))
    prompts = np.random.default_rng(1).integers(8, VOCABULARY, (64, 5)).astype(np.int32)
    requests = [
        SampleRequest(id=str(row), prompt_ids=prompt, sampling=SamplingConfig(max_new_tokens=40 if row % 4 else 9))
        for row, prompt in enumerate(prompts)
    ]
    running = [RunningSample(request) for request in requests]
    for sample in running[:5]:
        sample.is_aborted = True
    sizes = batch_sizes(model)
    samples = model.generate(running, 0)
    assert sizes[0] == 64
    assert min(sizes) < 16, f"the passes had {sizes} rows"
    reasons = [sample.finish_reason for sample in samples]
    assert {*reasons[5:]} == {FinishReason.stop, FinishReason.length}
    for request, sample, asked in zip(requests, samples, running, strict=True):
        is_eos = sample.token_ids < 8
        assert not is_eos[:-1].any()
        assert (sample.finish_reason is FinishReason.stop) == is_eos[-1]
        if asked.is_aborted:
            assert len(sample.token_ids) == 1
        elif not is_eos[-1]:
            assert len(sample.token_ids) == request.sampling.max_new_tokens
        np.testing.assert_allclose(sample.logprobs, forward_logprobs(path, request, sample), atol=1e-4)


def test_the_check_at_a_load_drops_rows_even_if_every_token_is_an_end_token(tmp_path, monkeypatch):
    dropped = []
    cut = DynamicCache.batch_select_indices
    monkeypatch.setattr(
        DynamicCache, "batch_select_indices", lambda cache, rows: dropped.append(len(rows)) or cut(cache, rows)
    )
    _, model = model_of("qwen3", tmp_path, eos_ids=range(VOCABULARY))
    assert dropped == [6, 2, 1], "rows of equal prompts must be dropped, then finished rows"
    dropped.clear()
    (sample,) = model.generate([RunningSample(*requests_of(1, 1, max_new_tokens=8))], 0)
    assert (len(sample.token_ids), sample.finish_reason, dropped) == (1, FinishReason.stop, [])


@pytest.mark.parametrize("family", ["gpt2", "lfm2"])
def test_a_sample_near_the_last_position_does_not_fail_in_a_batch_with_new_samples(tmp_path, family):
    path, model = model_of(family, tmp_path)
    rng = np.random.default_rng(0)
    # The dict maps prompt lengths to limits of new tokens. Two samples end at the model's last position, 256.
    lengths = {5: 100, 250: 6, 246: 10, 7: 100}
    requests = [
        SampleRequest(
            id=str(length),
            prompt_ids=rng.integers(1, VOCABULARY, length).astype(np.int32),
            sampling=SamplingConfig(max_new_tokens=left),
        )
        for length, left in lengths.items()
    ]
    for request, sample in zip(
        requests, model.generate([RunningSample(request) for request in requests], 0), strict=True
    ):
        assert len(sample.token_ids) == lengths[len(request.prompt_ids)]
        np.testing.assert_allclose(sample.logprobs, forward_logprobs(path, request, sample), atol=1e-4)


def test_a_model_is_refused_if_its_generated_log_probs_differ_from_its_forward_pass(tmp_path):
    with pytest.raises(EngineError, match="tokens that RwkvForCausalLM generates must be within"):
        model_of("rwkv", tmp_path)


async def test_tokens_after_a_load_have_the_new_version_and_its_log_probs(start, publish):
    engine = await start()
    for version, scale in ((1, 1.3), (2, 0.7)):
        offer = publish(version, scale)
        await engine.load_weights(offer)
        assert engine.version == version
        requests = requests_of(1)
        for request, sample in zip(requests, await answer(engine, requests), strict=True):
            assert set(sample.versions.tolist()) == {version}
            np.testing.assert_allclose(sample.logprobs, forward_logprobs(folder_of(offer), request, sample), atol=1e-5)


def test_a_load_fills_the_buffers_that_a_checkpoint_stores(tmp_path):
    """The router of DeepSeek-V3 has correction biases. In the model they are buffers, not parameters."""
    path, model = model_of("deepseek_v3", tmp_path / "model")

    def with_biases(tensors):
        return {n: torch.arange(4.0) if n.endswith("correction_bias") else t for n, t in tensors.items()}

    model.load_weights(publish_weights(path, tmp_path, 1, 0.7, alter=with_biases), timeout_s=30.0)
    buffers = [each for name, each in model.model.named_buffers() if name.endswith("correction_bias")]
    assert [each.tolist() for each in buffers] == [[0.0, 1.0, 2.0, 3.0]]


async def test_a_load_waits_for_the_running_batch_and_the_next_batch_has_the_new_version(start, publish):
    engine = await start(transformers=TransformersConfig(max_rows=4))
    requests = requests_of(2, max_new_tokens=200)
    running = asyncio.create_task(answer(engine, requests[:4]))
    await until_writing(engine)
    load = asyncio.create_task(engine.load_weights(publish(1)))
    waiting = asyncio.create_task(answer(engine, requests[4:]))
    before, _, after = await asyncio.gather(running, load, waiting)
    assert {version for sample in before for version in sample.versions.tolist()} == {0}
    assert {version for sample in after for version in sample.versions.tolist()} == {1}


async def test_the_deadline_of_a_load_excludes_the_wait_for_the_running_batch(start, publish, monkeypatch):
    engine = await start(load_timeout_s=0.5)
    outputs = await answer(engine, requests_of(1))
    begun = threading.Event()
    monkeypatch.setattr(engine.model, "generate", lambda *_: begun.set() or time.sleep(0.8) or outputs)
    monkeypatch.setattr(engine.model, "load_weights", lambda *_, **__: None)
    running = asyncio.create_task(answer(engine, requests_of(1)))
    await asyncio.to_thread(begun.wait, 30)
    assert await engine.load_weights(publish(1)) < 0.5, "the duration must exclude the wait for the batch"
    assert await running == outputs
    assert engine.version == 1


async def test_a_load_that_waits_for_a_silent_batch_fails_at_the_silence_deadline(start, publish, monkeypatch):
    engine = await start(silence_timeout_s=0.3)
    begun, stuck = threading.Event(), threading.Event()
    monkeypatch.setattr(engine.model, "generate", lambda *_: begun.set() or (stuck.wait(60) and []))
    running = asyncio.create_task(answer(engine, requests_of(1)))
    await asyncio.to_thread(begun.wait, 30)
    with pytest.raises(DeadlineError, match="produced no token"):
        await asyncio.wait_for(engine.load_weights(publish(1)), 30)
    stuck.set()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_load_that_hangs_fails_the_engine_and_the_error_names_the_option(start, publish, monkeypatch):
    engine = await start(load_timeout_s=0.1)
    stuck = threading.Event()
    monkeypatch.setattr(engine.model, "load_weights", lambda *_, **__: stuck.wait(60))
    want = r"transformers-0 did not load policy version 1 from .* within rollout_fleet.load_timeout_s = 0.1 s"
    for failed in (engine.load_weights(publish(1)), engine.wait_failed(), answer(engine, requests_of(1))):
        with pytest.raises(DeadlineError, match=want):
            await asyncio.wait_for(failed, 30)
    stuck.set()


async def test_a_response_ends_with_the_end_of_sequence_exactly_if_its_finish_reason_is_stop(start):
    engine = await start()
    assert_ends(await answer(engine, requests_of(1, num_samples=200)), least=10)


async def test_a_response_whose_last_allowed_token_is_an_end_token_has_finish_reason_stop(start):
    engine = await start()
    samples = await answer(engine, requests_of(1, num_samples=200, max_new_tokens=1))
    for sample in samples:
        assert sample.finish_reason is (FinishReason.stop if sample.token_ids.tolist() == [1] else FinishReason.length)


async def test_the_same_seed_gives_the_same_samples_and_another_seed_gives_other_samples(start):
    first, again, other = [await answer(await start(seed=seed), requests_of(2)) for seed in (5, 5, 6)]
    tokens = [[sample.token_ids.tolist() for sample in run] for run in (first, again, other)]
    assert tokens[0] == tokens[1] != tokens[2]


async def test_sampling_defaults_in_the_files_of_a_model_are_not_applied(model_path, tmp_path):
    shutil.copytree(model_path, tmp_path / "model")
    defaults = '{"eos_token_id": 1, "do_sample": true, "top_k": 1, "temperature": 0.1, "repetition_penalty": 3.0}'
    (tmp_path / "model" / "generation_config.json").write_text(defaults)
    engine = TransformersEngine(
        RolloutFleetConfig(), model_path=str(tmp_path / "model"), device=EngineDevice.cpu, rank=0, seed=0
    )
    await engine.start()
    try:
        samples = await answer(engine, requests_of(1, num_samples=100, max_new_tokens=1))
    finally:
        await engine.stop()
    assert len({int(sample.token_ids[0]) for sample in samples}) > 5


async def test_aborted_samples_are_cut_off_and_other_samples_of_the_batch_continue(start):
    engine = await start()
    engine.model.eos_ids = ()
    requests = requests_of(2, max_new_tokens=300)
    running = asyncio.create_task(answer(engine, requests))
    await until_writing(engine)
    await engine.abort([request.id for request in requests[4:]])
    samples = await running
    assert {len(sample.token_ids) for sample in samples[:4]} == {300}
    assert {sample.finish_reason for sample in samples[4:]} == {None}
    assert all(0 < len(sample.token_ids) < 300 for sample in samples[4:])
    assert all(len(sample.token_ids) == len(sample.logprobs) == len(sample.versions) for sample in samples[4:])


async def test_each_row_of_a_batch_ends_at_its_own_length_limit(start, monkeypatch):
    engine = await start()
    engine.model.eos_ids = ()
    sizes = record_batches(engine, monkeypatch)
    requests = [request for length in (1, 7, 30) for request in requests_of(1, 2, f"n{length}", max_new_tokens=length)]
    samples = await answer(engine, requests)
    assert [len(sample.token_ids) for sample in samples] == [1, 1, 7, 7, 30, 30]
    assert {sample.finish_reason for sample in samples} == {FinishReason.length}
    assert sizes == [6]


def record_batches(engine, monkeypatch):
    sizes = []
    generate = engine.model.generate

    def record(samples, version):
        sizes.append(len(samples))
        return generate(samples, version)

    monkeypatch.setattr(engine.model, "generate", record)
    return sizes


def test_an_aborted_row_ends_after_the_next_token():
    samples = [RunningSample(request) for request in requests_of(1, 3, max_new_tokens=9)]
    recorder = StepRecorder(samples, eos_ids=())
    stops = []
    for step in range(3):
        if step == 1:
            samples[1].is_aborted = samples[2].is_aborted = True
        recorder(torch.empty(0), torch.zeros(3, 5))
        stops.append(recorder.after_sampling(torch.zeros(3, 1, dtype=torch.int64)).tolist())
    assert stops == [[False, False, False], [False, True, True], [False, True, True]]
    outputs = recorder.outputs(4)
    assert [len(output.token_ids) for output in outputs] == [3, 2, 2]
    assert outputs[0].versions.tolist() == [4, 4, 4]
    np.testing.assert_allclose(outputs[0].logprobs, np.full(3, -np.log(5)), atol=1e-6)


async def test_each_sample_reports_its_first_token_once_and_before_its_answer(start):
    engine, told = await start(), []
    requests = [replace(r, on_first_token=partial(told.append, r.id)) for r in requests_of(2)]
    async for request, _ in engine.generate(requests):
        assert request.id in told
    assert sorted(told) == sorted(request.id for request in requests)


async def test_a_batch_has_at_most_max_rows_rows(start, monkeypatch):
    engine = await start(transformers=TransformersConfig(max_rows=8))
    sizes = record_batches(engine, monkeypatch)
    await answer(engine, requests_of(5))
    assert sizes == [8, 8, 4]


async def test_samples_with_different_temperatures_are_in_different_batches(start, monkeypatch):
    engine = await start()
    sizes = record_batches(engine, monkeypatch)
    await answer(engine, [*requests_of(1, 3), *requests_of(1, 2, "greedy", temperature=0.0)])
    assert sizes == [3, 2]


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("how", "change", "message"),
    [
        ("alter", lambda held: {name: held[name] for name in held if name != NORM}, f"1 tensor names, first {NORM}"),
        ("alter", lambda held: {**held, NORM: torch.ones(65)}, rf"{NORM} must be \(64,\), got \(65,\)"),
        ("change", lambda held: {**held, NORM: held[NORM] + 1e-6}, f"1 of 24 tensors differ, first {NORM}"),
    ],
)
async def test_an_engine_whose_weights_differ_from_the_published_weights_never_answers_again(
    start, publish, how, change, message
):
    engine = await start()
    with pytest.raises(WeightsError, match=message):
        await engine.load_weights(publish(1, **{how: change}))
    assert engine.version == 0
    with pytest.raises(WeightsError, match=message):
        await answer(engine, requests_of(1))
    with pytest.raises(WeightsError, match=message):
        await engine.wait_failed()


async def test_a_snapshot_without_a_model_is_refused(start, tmp_path):
    engine = await start()
    with pytest.raises(FileNotFoundError, match=r"/weights/v1/manifest.json"):
        await engine.load_weights(bare_offer(1))


async def test_a_failure_during_generation_fails_the_engine_and_the_error_names_it(start, monkeypatch):
    engine = await start()

    def fail(samples, version):
        raise MemoryError("out of memory")

    monkeypatch.setattr(engine.model, "generate", fail)
    with pytest.raises(WorkerDiedError, match=r"transformers-0 failed while generating 4 samples: MemoryError"):
        await answer(engine, requests_of(1))
    with pytest.raises(WorkerDiedError, match="out of memory"):
        await asyncio.wait_for(engine.wait_failed(), 30)
    with pytest.raises(WorkerDiedError, match="out of memory"):
        await answer(engine, requests_of(1))


async def test_a_sample_can_take_longer_than_the_silence_deadline(start, monkeypatch):
    engine = await start()
    outputs = await answer(engine, requests_of(1))
    monkeypatch.setattr(engine.silence, "timeout_s", 1.5)

    def generate_slowly(*_):
        for _ in range(20):
            time.sleep(0.1)
            engine.silence.token()
        return outputs

    monkeypatch.setattr(engine.model, "generate", generate_slowly)
    assert await answer(engine, requests_of(1)) == outputs


async def test_a_silent_engine_fails_and_the_error_names_the_option(start, monkeypatch):
    engine = await start(silence_timeout_s=0.2)
    stuck = threading.Event()
    monkeypatch.setattr(engine.model, "generate", lambda *_: stuck.wait(60) and [])
    with pytest.raises(DeadlineError, match=r"transformers-0 produced no token of its 4 .*silence_timeout_s = 0.2 s"):
        await asyncio.wait_for(answer(engine, requests_of(1)), 30)
    stuck.set()


async def test_generate_without_requests_yields_no_answers_and_the_engine_continues(start):
    engine = await start()
    assert [output async for output in engine.generate([])] == []
    assert len(await answer(engine, requests_of(1))) == 4


async def test_released_weights_use_no_memory_until_the_next_version_is_loaded(start, publish, model_path):
    engine = await start()
    held = sum(p.nbytes for p in engine.model.model.parameters())
    await engine.release_memory()
    await engine.release_memory()
    assert (sum(p.nbytes for p in engine.model.model.parameters()), held > 0) == (0, True)
    offer = publish(1, 1.3)
    await engine.load_weights(offer)
    assert sum(p.nbytes for p in engine.model.model.parameters()) == held
    requests = requests_of(1)
    for request, sample in zip(requests, await answer(engine, requests), strict=True):
        assert set(sample.versions.tolist()) == {1}
        np.testing.assert_allclose(sample.logprobs, forward_logprobs(folder_of(offer), request, sample), atol=1e-5)


async def test_memory_is_not_released_while_a_request_runs(start):
    engine = await start()
    running = asyncio.create_task(answer(engine, requests_of(4, max_new_tokens=30)))
    await asyncio.sleep(0)  # let the task begin its requests
    with pytest.raises(EngineError, match="while it generates 16 samples"):
        await engine.release_memory()
    await running


async def test_an_aborted_sample_continues_as_if_it_had_not_been_aborted(start, model_path):
    await assert_continues(await start(), model_path, atol=1e-5)


@pytest.mark.parametrize("released", [False, True], ids=["retained", "released"])
async def test_an_engine_loads_frozen_weights_once_and_then_only_adapters(
    released, start, publish, model_path, tmp_path, monkeypatch
):
    config = LearnerConfig(device=Device.cpu, lora=LoraConfig(rank=4))
    learner = PackedModel(config, ACTOR, model_path=model_path)
    publisher = WeightPublisher(
        PretrainedShards.of(learner), str(tmp_path / "published"), keep=2, options=PublishOptions(adapters=True)
    )
    engine, requests, loads = await start(), requests_of(3, temperature=0.7), []

    def load(offer, *arguments, **options):
        loads.append(offer.version)
        return load_from(offer, *arguments, **options)

    monkeypatch.setattr(transformers_engine, "load_from", load)
    try:
        for version in (1, 2):
            for name, parameter in learner.pretrained.named_parameters():
                if is_adapter(name):
                    parameter.data.normal_(0, 0.1)
            await engine.load_weights(publisher.publish(version).result())
            path = save_whole(tmp_path / f"v{version}", learner)
            for request, output in zip(requests, await answer(engine, requests), strict=True):
                assert set(output.versions.tolist()) == {version}
                np.testing.assert_allclose(output.logprobs, forward_logprobs(path, request, output), atol=1e-4)
            if released:
                await engine.release_memory()
        assert loads == ([FROZEN, FROZEN] if released else [FROZEN])
        full = publish(3, 1.5)
        await engine.load_weights(full)
        for request, output in zip(requests, await answer(engine, requests), strict=True):
            np.testing.assert_allclose(output.logprobs, forward_logprobs(folder_of(full), request, output), atol=1e-4)
    finally:
        publisher.close()


def decode(ids):
    """Return a text with one tag per token id, for example ``<5><7>``."""
    return "".join(f"<{token}>" for token in ids)


async def test_a_response_ends_at_the_stop_tokens_and_stop_texts_of_its_request(start, monkeypatch):
    engine = await start()
    (free,) = await answer(engine, requests_of(1, 1, temperature=0.0))
    ids = free.token_ids.tolist()

    monkeypatch.setattr(engine.model, "_decode", decode)
    stop = decode(ids[2:5])[1:-1]
    stops = [{"stop_token_ids": (ids[2],)}, {"stop": (stop,)}, {}]
    requests = [request for sampling in stops for request in requests_of(1, 1, temperature=0.0, **sampling)]
    by_token, by_text, unstopped = await answer(engine, requests)
    assert by_token.token_ids.tolist() == ids[: ids.index(ids[2]) + 1]
    assert by_text.token_ids.tolist() == next(ids[:n] for n in range(len(ids)) if stop in decode(ids[:n]))
    assert unstopped.token_ids.tolist() == ids
    assert {by_token.finish_reason, by_text.finish_reason} == {FinishReason.stop}


async def test_a_response_that_was_cut_off_inside_a_stop_text_ends_at_this_stop_text(start, monkeypatch):
    engine = await start()
    (free,) = await answer(engine, requests_of(1, 1, seed=7))
    ids = free.token_ids.tolist()

    monkeypatch.setattr(engine.model, "_decode", decode)
    (request,) = requests_of(1, 1, seed=7, stop=(decode(ids[:3])[1:-1],), max_new_tokens=10)
    prompt_ids = np.concatenate([request.prompt_ids, free.token_ids[:2]])
    (rest,) = await answer(engine, [replace(request, prompt_ids=prompt_ids, num_written=2)])
    assert len(ids) > 3
    assert (rest.token_ids.tolist(), rest.finish_reason) == (ids[2:3], FinishReason.stop)


async def test_a_reproducible_answer_continues_with_identical_bits_after_a_cut(start):
    engine = await start(transformers=TransformersConfig(reproducible=True))
    (request,) = requests_of(1, 1, seed=7)
    (whole,) = await answer(engine, [request])
    assert len(whole.token_ids) > 3
    for cut in (1, len(whole.token_ids) - 1):
        rest = replace(
            request,
            id=f"rest-{cut}",
            prompt_ids=np.concatenate([request.prompt_ids, whole.token_ids[:cut]]),
            sampling=replace(request.sampling, max_new_tokens=request.sampling.max_new_tokens - cut),
        )
        found = (await answer(engine, [*requests_of(2, 1), rest]))[-1]
        assert found.token_ids.tolist() == whole.token_ids[cut:].tolist()
        assert found.logprobs.tobytes() == whole.logprobs[cut:].tobytes()


async def test_a_seed_gives_the_same_response_in_any_batch(start):
    engine = await start()
    outputs = []
    for others in (1, 5):
        requests = [*requests_of(1, others), *requests_of(1, 1, seed=7), *requests_of(1, 1, seed=8)]
        outputs.append([output.token_ids.tolist() for output in await answer(engine, requests)][-2:])
    assert outputs[0] == outputs[1]
    assert outputs[0][0] != outputs[0][1]


async def test_a_schema_is_refused_by_an_engine_without_constrained_decoding(start):
    engine = await start()
    with pytest.raises(RequestRefused, match=r"JSON schema; use rollout_fleet\.eng"):
        await answer(engine, requests_of(1, 1, json_schema="{}"))
    assert len(await answer(engine, requests_of(1, 1))) == 1
