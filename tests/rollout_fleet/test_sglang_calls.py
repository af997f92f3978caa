"""The calls of the SGLang engine to its server, and their order. In these tests, the server only records calls."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest

from asyncrl.core.errors import DeadlineError, EngineError, RequestRefused, WorkerDiedError
from asyncrl.core.types import FinishReason
from rollout_fleet.config import EngineDevice, OnUpdate, RolloutFleetConfig, SamplingConfig, SGLangConfig
from rollout_fleet.engines.engine import EngineLoad, SampleRequest
from rollout_fleet.engines.server_hooks import report_path
from rollout_fleet.engines.sglang import SGLangEngine, StreamedSample
from tests.support.offers import bare_offer

pytestmark = [pytest.mark.timeout(30), pytest.mark.usefixtures("virtual_time")]
LOAD = ["/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update", "/update_weight_version"]
SENT_WITH = {"/end_weight_update": ["/update_weight_version"]}
"""Maps a call to the calls that the engine sends before it has the answer to this call.

The engine sends `/continue_generation` after it has all answers.
"""


class RecordedServer:
    """Stands in for `SGLangServer` and `SGLangClient`. Records and answers every call immediately."""

    name = "sglang-0"
    url = "http://127.0.0.1:1"
    saves_memory = True
    tp_size = 2

    def __init__(self, folder):
        self.weight_order = folder / "weights.json"
        self.reports = [{"num_values": 3}, {"num_values": 3}]
        self.calls = []
        self.refused = self.unconfirmed = ""
        self.loads = []
        self.answers = asyncio.Event()
        self.answers.set()
        self.events = None

    async def start(self): ...

    async def stop(self): ...

    async def open(self): ...

    async def close(self): ...

    async def wait_exit(self):
        await asyncio.Event().wait()

    def log_tail(self):
        return "Last lines of sglang-0.log"

    async def call(self, method, path, body=None):
        self.calls.append((path, body))
        await self.answers.wait()
        if path == self.refused:
            raise EngineError(f"{path} was refused")
        if path == "/update_weights_from_tensor":
            order = json.loads(self.weight_order.read_text())["order"]
            for rank, report in enumerate(self.reports):
                report_path(self.weight_order, rank).write_text(json.dumps({"order": order, **report}))
        if path == self.unconfirmed:
            return None
        if path.startswith("/v1/loads"):
            return {"loads": self.loads}
        return {"success": True, "status": "ok", "new_version": (body or {}).get("new_version")}

    async def stream(self, path, body):
        self.calls.append((path, body))
        if self.events is None:
            await asyncio.Event().wait()
        for together in self.events:
            yield together

    @property
    def paths(self):
        return [path for path, _ in self.calls]


@pytest.fixture
async def server(tmp_path):
    return RecordedServer(tmp_path)


def new_engine(server, folder, *, vocab_size=50, **options):
    (folder / "config.json").write_text(json.dumps({"vocab_size": vocab_size, "eos_token_id": 1}))
    engine = SGLangEngine(
        RolloutFleetConfig(**{"sglang": SGLangConfig(samples_per_request=2), **options}),
        model_path=str(folder),
        device=EngineDevice.cuda,
        rank=0,
        log_dir="",
        seed=0,
        server=server,
    )
    engine.client = server
    return engine


@asynccontextmanager
async def started_engine(server, folder, **options):
    engine = new_engine(server, folder, **options)
    server.events = []
    await engine.start()
    server.events = None
    server.calls.clear()
    try:
        yield engine
    finally:
        await engine.stop()


@pytest.fixture
async def engine(server, tmp_path):
    async with started_engine(server, tmp_path) as engine:
        yield engine


def requests_of(num_requests):
    options, prompt = SamplingConfig(max_new_tokens=4), np.array([3, 4], dtype=np.int32)
    return [SampleRequest(id=f"7-0-{index}", prompt_ids=prompt, sampling=options) for index in range(num_requests)]


async def answers_of(engine, num_requests):
    return [answer async for answer in engine.generate(requests_of(num_requests))]


async def test_an_engine_generates_with_the_training_options_before_it_is_ready(server, tmp_path):
    sampling = SamplingConfig(temperature=0.7, top_p=0.9, max_new_tokens=4096)
    engine = new_engine(server, tmp_path, vocab_size=7, sampling=sampling)
    server.events = [[{"meta_info": {}}]]
    await engine.start()
    await engine.stop()
    bodies = [body for path, body in server.calls if path == "/generate"]
    assert [len(body["input_ids"][0]) for body in bodies] == [1, 16]
    for body in bodies:
        assert (body["return_logprob"], body["stream"]) == (True, True)
        assert max(max(ids) for ids in body["input_ids"]) < 7, "an unknown token id would kill the server"
        assert all(1 <= options["max_new_tokens"] <= 4 for options in body["sampling_params"])
        assert body["sampling_params"][0]["temperature"] == 0.7


@pytest.mark.parametrize(
    ("events", "error", "message"),
    [
        (None, DeadlineError, "sglang-0 did not generate within rollout_fleet.start_timeout_s = 0.5 s"),
        ([[{"error": {"message": "no kernel"}}]], EngineError, "sglang-0 cannot generate: .*no kernel"),
    ],
)
async def test_an_engine_that_does_not_generate_does_not_start(server, tmp_path, events, error, message):
    engine = new_engine(server, tmp_path, start_timeout_s=0.5)
    server.events = events
    with pytest.raises(error, match=message):
        await engine.start()
    await engine.stop()


@pytest.mark.parametrize(
    ("reports", "message"),
    [
        ([{"num_values": 3}, {"error": "one bit differs"}], "rank 1 did not load .*manifest.json. one bit differs"),
        ([{"num_values": 3}], "rank 1 did not report on .*manifest.json"),
        ([{"num_values": 3}, {"order": "older", "num_values": 3}], "rank 1 did not load .*is from an earlier load"),
    ],
)
async def test_an_engine_changes_its_version_only_after_every_rank_verified_the_weights(
    engine, server, reports, message
):
    server.reports = reports
    with pytest.raises(EngineError, match=message):
        await engine.load_weights(bare_offer(1))
    assert engine.version == 0
    assert server.paths == ["/pause_generation", *LOAD[:2]], "generation must not be continued"


@pytest.mark.parametrize("refused", ["/pause_generation", *LOAD, "/continue_generation"])
async def test_a_refused_call_at_any_step_of_a_load_fails_the_engine(engine, server, refused):
    server.refused = refused
    with pytest.raises(EngineError, match=f"{refused} was refused"):
        await engine.load_weights(bare_offer(1))
    with pytest.raises(EngineError, match=f"{refused} was refused"):
        await answers_of(engine, 1)
    assert server.paths[server.paths.index(refused) + 1 :] == SENT_WITH.get(refused, [])


@pytest.mark.parametrize("unconfirmed", ["/pause_generation", *LOAD, "/continue_generation"])
async def test_a_step_of_a_load_that_the_server_does_not_confirm_fails_the_engine(engine, server, unconfirmed):
    server.unconfirmed = unconfirmed
    with pytest.raises(EngineError, match=f"answered POST {unconfirmed} with None, expected"):
        await engine.load_weights(bare_offer(1))
    assert server.paths[server.paths.index(unconfirmed) + 1 :] == SENT_WITH.get(unconfirmed, [])
    with pytest.raises(EngineError, match=f"answered POST {unconfirmed} with None"):
        await engine.wait_failed()


@pytest.mark.parametrize(
    ("on_update", "mode", "flush_cache"), [(OnUpdate.recompute, "retract", True), (OnUpdate.keep, "in_place", False)]
)
async def test_an_update_recomputes_or_retains_the_kv_cache_of_running_samples(
    server, tmp_path, on_update, mode, flush_cache
):
    async with started_engine(server, tmp_path, sglang=SGLangConfig(on_update=on_update)) as engine:
        await engine.load_weights(bare_offer(1))
    calls = dict(server.calls)
    assert calls["/pause_generation"] == {"mode": mode}
    assert calls["/update_weights_from_tensor"]["flush_cache"] is flush_cache


async def test_a_load_calls_pause_update_verify_and_continue_in_this_order(engine, server):
    await engine.load_weights(bare_offer(1))
    assert engine.version == 1
    assert server.paths == ["/pause_generation", *LOAD, "/continue_generation"]
    load = dict(server.calls)["/update_weights_from_tensor"]
    assert (load["flush_cache"], len(load["serialized_named_tensors"])) == (True, 2)


async def test_an_engine_accepts_only_tokens_of_verified_versions(server, tmp_path):
    async with started_engine(server, tmp_path) as engine:
        await engine.load_weights(bare_offer(1))
        for version in ("0", "1", "2"):
            spans = [{"version": version, "start": 0, "end": 2}]
            server.events = [[chunk([5, 1], 2, reason="stop", spans=spans, version=version)]]
            if version == "2":
                with pytest.raises(EngineError, match="version"):
                    await answers_of(engine, 1)
            else:
                ((_, output),) = await answers_of(engine, 1)
                assert output.versions.tolist() == [int(version)] * 2


async def test_a_load_after_a_release_allocates_the_weights_before_the_kv_cache(engine, server):
    await engine.release_memory()
    server.calls.clear()
    await engine.load_weights(bare_offer(1))
    assert server.paths == [
        "/pause_generation",
        "/resume_memory_occupation",
        *LOAD,
        "/resume_memory_occupation",
        "/continue_generation",
    ]
    assert server.calls[1][1] == {"tags": ["weights"]}
    assert "kv_cache" in server.calls[6][1]["tags"]


async def test_the_engine_load_has_the_sum_of_all_ranks_and_the_fullest_cache(engine, server):
    counts = {"num_running_reqs": 3, "num_waiting_reqs": 2}
    server.loads = [{**counts, "token_usage": 0.25}, {**counts, "token_usage": 0.5}]
    assert await engine.read_load() == EngineLoad(num_running=6, num_waiting=4, cache_use=0.5)
    server.loads = [{"num_running_reqs": 3}]
    with pytest.raises(EngineError, match="answered GET /v1/loads with"):
        await engine.read_load()
    assert not engine.has_failed


async def test_an_abort_of_all_requests_is_one_call(engine, server):
    running = asyncio.create_task(answers_of(engine, 5))
    await asyncio.sleep(0)
    server.calls.clear()
    await engine.abort([f"7-0-{index}" for index in range(5)])
    assert [call for call in server.calls if call[0] == "/abort_request"] == [("/abort_request", {"abort_all": True})]
    running.cancel()


async def test_aborts_of_several_requests_are_sent_at_the_same_time(engine, server):
    running = asyncio.create_task(answers_of(engine, 5))
    await asyncio.sleep(0)
    server.answers.clear()
    aborting = asyncio.create_task(engine.abort(["7-0-1", "7-0-2", "unknown"]))
    await asyncio.sleep(0.01)
    bodies = [body["rid"] for path, body in server.calls if path == "/abort_request"]
    assert sorted(bodies) == ["7-0-1/", "7-0-2/"], "all abort calls must be sent at once"
    server.answers.set()
    await aborting
    running.cancel()


async def test_the_error_of_a_load_that_hangs_names_load_timeout_s(server, tmp_path):
    async with started_engine(server, tmp_path, silence_timeout_s=0.05, load_timeout_s=0.3) as engine:
        running = asyncio.create_task(answers_of(engine, 5))
        await asyncio.sleep(0)
        server.answers.clear()
        loading = asyncio.create_task(engine.load_weights(bare_offer(1)))
        await asyncio.sleep(0)
        aborting = asyncio.create_task(engine.abort(["7-0-1"]))
        want = "did not load policy version 1 from .*manifest.json within rollout_fleet.load_timeout_s = 0.3 s. Last"
        for failed in (aborting, loading, running, engine.wait_failed()):
            with pytest.raises(DeadlineError, match=want):
                await asyncio.wait_for(failed, 5)


async def test_the_deadline_of_a_load_grows_with_its_bytes(engine, server):
    server.answers.clear()
    began_s = asyncio.get_running_loop().time()
    with pytest.raises(DeadlineError, match=r"load_timeout_s = 60 s and 70 s for 7000 MB. Last lines"):
        await engine.load_weights(replace(bare_offer(1), num_bytes=7_000_000_000))
    assert asyncio.get_running_loop().time() - began_s == pytest.approx(130.0)


@pytest.mark.parametrize(
    ("call", "want"),
    [
        ("start", r"did not generate within rollout_fleet.start_timeout_s = 0.05 s. Last lines of sglang-0.log"),
        ("release_memory", r"did not release its memory within rollout_fleet.load_timeout_s = 0.05 s. Last lines of"),
    ],
)
async def test_the_error_of_a_call_that_hangs_names_the_option_of_its_deadline(server, tmp_path, call, want):
    async with started_engine(server, tmp_path, start_timeout_s=0.05, load_timeout_s=0.05) as engine:
        server.answers.clear()
        with pytest.raises(DeadlineError, match=want):
            await getattr(engine, call)()


async def test_samples_are_sent_in_requests_of_the_configured_size(engine, server):
    running = asyncio.create_task(answers_of(engine, 5))
    await asyncio.sleep(0.01)
    sent = [body["rid"] for path, body in server.calls if path == "/generate"]
    assert [len(ids) if isinstance(ids, list) else ids for ids in sent] == [2, 2, "7-0-4/"], (
        "a single sample must not be sent as a batch"
    )
    running.cancel()


async def test_a_cancelled_load_fails_the_engine(engine, server):
    server.answers.clear()
    loading = asyncio.create_task(engine.load_weights(bare_offer(1)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    for asked in (engine.wait_failed(), answers_of(engine, 1), engine.release_memory()):
        with pytest.raises(EngineError, match=r"policy version 1 was cancelled"):
            await asyncio.wait_for(asked, 5)


async def test_an_engine_that_was_never_started_raises_an_error_with_its_name(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 50}')
    options = {"model_path": str(tmp_path), "device": EngineDevice.cuda, "rank": 1, "log_dir": "", "seed": 0}
    engine = SGLangEngine(RolloutFleetConfig(), **options)
    with pytest.raises(EngineError, match="sglang-1 is not running; await start"):
        await answers_of(engine, 1)
    with pytest.raises(EngineError, match="sglang-1 was never started"):
        await engine.wait_failed()
    await engine.stop()


async def test_memory_is_not_released_while_samples_run(engine, server):
    running = asyncio.create_task(answers_of(engine, 1))
    await asyncio.sleep(0)
    with pytest.raises(EngineError, match=r"cannot release its memory while it generates \['7-0-0'\]"):
        await engine.release_memory()
    running.cancel()


async def test_a_server_without_a_memory_saver_logs_once_that_it_does_not_release_memory(engine, server, caplog):
    server.saves_memory = False
    await engine.release_memory()
    await engine.load_weights(bare_offer(1))
    await engine.release_memory()
    assert not [path for path in server.paths if "memory_occupation" in path]
    assert caplog.text.count("it has no memory saver and keeps its memory") == 1


def chunk(token_ids, num_so_far, *, triples=None, reason=None, spans=(), version="3"):
    triples = [[-0.5, token, None] for token in token_ids] if triples is None else triples
    return {
        "output_ids": token_ids,
        "meta_info": {
            "output_token_logprobs": triples,
            "completion_tokens": num_so_far,
            "finish_reason": reason and {"type": reason},
            "weight_version": version,
            "weight_versions": list(spans),
        },
    }


def span(start, end):
    return {"version": "0", "start": start, "end": end}


def finished(index, token_ids):
    return chunk(token_ids, len(token_ids), reason="stop", spans=[span(0, len(token_ids))]) | {"index": index}


async def test_samples_that_end_in_one_batch_of_events_are_answered_in_order(engine, server):
    server.events = [[finished(1, [5, 1]), finished(0, [1])]]
    answers = await answers_of(engine, 2)
    told = [(request.id, output.token_ids.tolist()) for request, output in answers]
    assert told == [("7-0-1", [5, 1]), ("7-0-0", [1])]
    (body,) = [body for path, body in server.calls if path == "/generate"]
    assert [ids.tolist() for ids in body["input_ids"]] == [[3, 4], [3, 4]]
    assert [options["max_new_tokens"] for options in body["sampling_params"]] == [4, 4]


async def test_a_continued_response_ends_at_a_stop_text_that_its_earlier_tokens_began(server, tmp_path, monkeypatch):
    sampling = SamplingConfig(max_new_tokens=4, stop=("5><6",))
    engine = new_engine(server, tmp_path, sampling=sampling)
    monkeypatch.setattr(engine, "decoder", lambda: lambda ids: "".join(f"<{token}>" for token in ids))
    server.events = []
    await engine.start()
    server.events = [[finished(0, [6, 7, 8])]]
    outputs = []
    for num_written in (0, 1):
        prompt_ids = np.array([3, 5], dtype=np.int32)
        request = SampleRequest(id="7-0-0", prompt_ids=prompt_ids, sampling=sampling, num_written=num_written)
        outputs += [output.token_ids.tolist() async for _, output in engine.generate([request])]
    await engine.stop()
    assert outputs == [[6, 7, 8], [6]]


@pytest.mark.parametrize(
    ("events", "want"),
    [
        ([[{"error": {"message": "too long"}}]], "answered POST /generate with {'message': 'too long'}"),
        ([[finished(0, [1])]], "gave no answer to 1 of 2 samples"),
        ([[finished(2, [1])]], "sent an unexpected event: IndexError"),
        ([[{"index": 0}]], "sent an unexpected event: KeyError"),
        ([[finished(0, [50])]], "sampled ids must be in 0..49, got 50..50"),
    ],
)
async def test_a_server_answer_that_violates_the_contract_raises_an_engine_error(engine, server, events, want):
    server.events = events
    with pytest.raises(EngineError, match=want):
        await answers_of(engine, 2)


async def test_a_failed_engine_returns_no_answers(engine, server):
    ready = asyncio.Event()

    async def stream(path, body):
        await ready.wait()
        yield [finished(0, [1]), finished(1, [1])]

    server.stream = stream
    running = asyncio.create_task(answers_of(engine, 2))
    await asyncio.sleep(0)
    engine.fail(EngineError("it holds other weights"))
    ready.set()
    with pytest.raises(EngineError, match="it holds other weights"):
        await running


def test_a_sample_has_the_tokens_of_all_chunks_and_the_versions_of_the_last_chunk():
    sample = StreamedSample(requests_of(1)[0], 3)
    assert sample.add(chunk([5], 1)) is None
    assert sample.add(chunk([6, 7], 3)) is None
    spans = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 4}]
    last = chunk([8], 4, reason="stop", spans=spans)
    last["meta_info"]["cached_tokens"] = 17
    output = sample.add(last)
    assert output.num_cached == 17
    assert output.token_ids.tolist() == [5, 6, 7, 8]
    assert output.versions.tolist() == [3, 3, 4, 4]
    assert output.finish_reason is FinishReason.stop


def test_tokens_that_an_abort_in_the_queue_repeats_are_counted_once():
    sample = StreamedSample(requests_of(1)[0], 3)
    sample.add(chunk([5, 6], 2))
    repeated = [[-0.5, 5, None], [-0.5, 6, None]]
    spans = [{"version": "3", "start": 0, "end": 2}]
    output = sample.add(chunk([6], 2, triples=repeated, reason="abort", spans=spans))
    assert output.token_ids.tolist() == [5, 6]
    assert output.versions.tolist() == [3, 3]
    assert output.finish_reason is None


@pytest.mark.parametrize(
    ("ids", "reason"), [([5, 1], "stop"), ([5, 9], "stop"), ([5, 2, 3], "stop"), ([5, 2], None), ([], None)]
)
async def test_a_sample_that_ends_in_the_step_of_its_abort_has_a_finish_reason(server, tmp_path, ids, reason):
    """The server reports an abort, but the sample had already ended. The engine must not continue the sample."""
    engine = new_engine(server, tmp_path, sglang=SGLangConfig(tokenizer=True))
    server.events = []
    await engine.start()
    engine.decoder = lambda: lambda token_ids: "".join(map(str, token_ids))
    spans = [{"version": "0", "start": 0, "end": len(ids)}]
    server.events = [[chunk(ids, len(ids), reason="abort", spans=spans)]]
    sampling = SamplingConfig(max_new_tokens=4, stop=("23",), stop_token_ids=(9,))
    request = replace(requests_of(1)[0], sampling=sampling)
    ((_, output),) = [answer async for answer in engine.generate([request])]
    assert (output.token_ids.tolist(), output.finish_reason) == (ids, reason)
    await engine.stop()


@pytest.mark.parametrize("wrong", [chunk([5], 3), chunk([5], 1, triples=[[-0.5, 6, None]])])
def test_a_chunk_with_missing_or_inconsistent_tokens_is_refused(wrong):
    with pytest.raises(ValueError, match=r"log-probs|output_ids"):
        StreamedSample(requests_of(1)[0], 3).add(wrong)


async def test_unfinished_samples_are_returned_as_aborted_when_the_server_dies(engine, server):
    async def stream(path, body):
        yield [chunk([5], 1, version="0") | {"index": 0}]
        yield [chunk([6, 7], 3, version="0") | {"index": 0}, finished(1, [4, 1])]
        raise WorkerDiedError("sglang-0 died")

    server.stream = stream
    answers = {}
    with pytest.raises(WorkerDiedError, match="sglang-0 died"):  # noqa: PT012 - keeps the answers before the error
        async for request, output in engine.generate(requests_of(2)):
            answers[request.id] = output
    assert answers["7-0-1"].finish_reason is FinishReason.stop
    partial = answers["7-0-0"]
    assert (partial.finish_reason, partial.token_ids.tolist(), partial.versions.tolist()) == (None, [5, 6, 7], [0] * 3)
    assert engine.has_failed


async def test_a_sample_that_the_server_loses_fails_the_engine_when_no_other_sample_runs(engine, server):
    async def stream(path, body):
        yield [chunk([5], 1, version="0") | {"index": 0}, finished(1, [4, 1])]
        await asyncio.Event().wait()

    server.stream = stream
    answers = []
    with pytest.raises(DeadlineError, match="answered 3 probes, but produced no token"):  # noqa: PT012
        async for request, output in engine.generate(requests_of(2)):
            answers.append((request.id, output.token_ids.tolist(), output.finish_reason))
    assert answers == [("7-0-1", [4, 1], FinishReason.stop), ("7-0-0", [5], None)]


@pytest.mark.parametrize(
    ("later", "kept"),
    [
        ([chunk([6], 2)], [5, 6]),
        ([chunk([6], 2, version="4")], [5]),  # the version of the second token can be 3 or 4
        ([chunk([6], 2, version="4"), chunk([7], 3, version="4")], [5]),
        ([chunk([6], 2), chunk([1], 3, reason="stop", spans=[{"version": "3", "start": 0, "end": 3}])], [5, 6]),
    ],
)
def test_an_unfinished_sample_keeps_only_tokens_with_a_certain_policy_version(later, kept):
    sample = StreamedSample(requests_of(1)[0], 3)
    sample.add(chunk([5], 1))
    for more in later:
        sample.add(more)
    output = sample.so_far()
    assert (output.token_ids.tolist(), output.versions.tolist()) == (kept, [3] * len(kept))
    assert output.finish_reason is None


async def test_a_refused_request_does_not_fail_the_engine(engine, server):
    server.events = [[{"error": {"message": "too long"}}]]
    with pytest.raises(RequestRefused, match="too long"):
        await answers_of(engine, 1)
    assert not engine.has_failed


async def test_the_server_gets_the_options_of_a_request_and_the_stop_tokens_of_the_model(server, tmp_path):
    engine = new_engine(server, tmp_path, sglang=SGLangConfig(tokenizer=True))
    own = SamplingConfig(stop=("END",), stop_token_ids=(9, 2), seed=5, json_schema="{}")
    for sampling in (own, SamplingConfig()):
        server.calls.clear()
        body = engine.request_body([SampleRequest(id="a", prompt_ids=np.array([3]), sampling=sampling)])
        sent = body["sampling_params"]
        assert {name: sent.get(name) for name in ("stop", "sampling_seed", "json_schema")} == (
            {"stop": ["END"], "sampling_seed": 5, "json_schema": "{}"}
            if sampling is own
            else dict.fromkeys(("stop", "sampling_seed", "json_schema"))
        )
        assert sent["stop_token_ids"] == sorted({*engine.facts.eos_ids, *sampling.stop_token_ids})


async def test_a_server_without_a_tokenizer_refuses_stop_texts_and_schemas(engine):
    for option in ({"stop": ("END",)}, {"json_schema": "{}"}):
        request = SampleRequest(id="a", prompt_ids=np.array([3]), sampling=SamplingConfig(**option))
        with pytest.raises(
            RequestRefused, match=rf"no tokenizer, .*{next(iter(option))}.*; set rollout_fleet.sglang.tok"
        ):
            await anext(engine.generate([request]))
