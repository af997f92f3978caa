"""The engine with one real SGLang server for all tests."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import sys
import textwrap
from collections import Counter
from dataclasses import replace
from functools import partial

import aiohttp
import numpy as np
import psutil
import pytest
import pytest_asyncio

from asyncrl.core.errors import AsyncRLError, DeadlineError, EngineError, RequestRefused, WorkerDiedError
from rollout_fleet.config import (
    SGLANG_RESERVED_POSITIONS,
    EngineDevice,
    RolloutFleetConfig,
    SamplingConfig,
    SGLangConfig,
)
from rollout_fleet.engines.engine import SampleRequest
from rollout_fleet.engines.sglang import DEATH_GRACE_S, SGLangEngine
from tests.support.engine_probes import (
    RunningServer,
    answer,
    assert_continues,
    assert_ends,
    folder_of,
    forward_logprobs,
    publish_weights,
    requests_of,
    server_processes,
    until_writing,
)
from tests.support.leftovers import left_in_shared_memory, shared_memory_of
from tests.support.offers import bare_offer
from tests.support.stranger import as_stranger, refusals

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(180),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif("not __import__('importlib.util').util.find_spec('sglang')", reason="SGLang is not installed"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model_path, tmp_path_factory):
    log_dir = tmp_path_factory.mktemp("logs")
    config = RolloutFleetConfig(sglang=SGLangConfig(samples_per_request=8), stop_timeout_s=1.0)
    engine = SGLangEngine(config, model_path=model_path, device=EngineDevice.cpu, rank=0, log_dir=str(log_dir), seed=0)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.stop()


@pytest.fixture
def publish(engine, model_path, tmp_path):
    """Return a function that publishes changed weights as the next version."""
    return partial(publish_weights, model_path, tmp_path, engine.version + 1)


def still_alive(processes, timeout=30):
    _, alive = psutil.wait_procs(processes, timeout=timeout)
    return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.long
async def test_an_aborted_sample_continues_as_if_it_had_not_been_aborted(engine, model_path):
    await assert_continues(engine, model_path, atol=1e-3)


@pytest.mark.long
async def test_logprobs_equal_a_forward_pass_under_the_version_that_each_token_names(engine, model_path, tmp_path):
    offers = [publish_weights(model_path, tmp_path, engine.version + 1 + k, 1.0 + 0.15 * k) for k in range(5)]
    paths = {0: model_path, **{offer.version: folder_of(offer) for offer in offers}}
    requests = requests_of(6, max_new_tokens=150, temperature=1.3, top_k=3)
    running = asyncio.create_task(answer(engine, requests))
    await until_writing(engine)
    for offer in offers:
        await engine.load_weights(offer)
        assert engine.version == offer.version
        await asyncio.sleep(0.05)  # the engine writes some tokens of this version
    num_checked, versions_in_one_response = 0, Counter()
    for request, sample in zip(requests, await running, strict=True):
        versions = sample.versions
        assert (np.diff(versions) >= 0).all()
        versions_in_one_response[len(set(versions.tolist()))] += 1
        for version in sorted(set(versions.tolist())):
            expected = forward_logprobs(paths[version], request, sample)
            np.testing.assert_allclose(sample.logprobs[versions == version], expected[versions == version], atol=1e-3)
            num_checked += int((versions == version).sum())
    assert num_checked == sum(len(sample.token_ids) for sample in running.result())
    assert max(versions_in_one_response) >= 2, "no response has tokens of two versions"


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.6, "top_p": 0.8}, {"top_k": 3}, {"min_p": 0.2}, {"temperature": 0.0}], ids=str
)
async def test_logprobs_are_those_of_the_sampling_temperature_before_truncation(engine, publish, sampling):
    offer = publish(1.2)
    await engine.load_weights(offer)
    requests = requests_of(3, **sampling)
    for request, sample in zip(requests, await answer(engine, requests), strict=True):
        expected = forward_logprobs(folder_of(offer), request, sample)
        if sampling.get("temperature") == 0.0:
            assert sample.logprobs.shape == expected.shape
        else:
            np.testing.assert_allclose(sample.logprobs, expected, atol=1e-3)


async def test_a_response_ends_with_the_end_of_sequence_exactly_if_its_finish_reason_is_stop(engine):
    assert_ends(await answer(engine, requests_of(1, num_samples=100)), least=5)


async def test_aborted_samples_return_their_tokens_and_other_samples_continue(engine):
    keep = requests_of(1, num_samples=20, name="keep", max_new_tokens=250, top_k=3)
    cut = requests_of(1, num_samples=40, name="cut", max_new_tokens=250, top_k=3)
    running = asyncio.create_task(answer(engine, [*cut, *keep]))
    await until_writing(engine)
    while not (load := await engine.read_load()).num_running:  # noqa: ASYNC110 - no event to wait for
        await asyncio.sleep(0.01)
    assert load.num_running + load.num_waiting <= 60
    assert 0 < load.cache_use <= 1
    await engine.abort([*(request.id for request in cut), "no-such-request"])
    samples = await running
    assert None not in {sample.finish_reason for sample in samples[40:]}
    aborted = [sample for sample in samples[:40] if sample.finish_reason is None]
    assert aborted
    assert sum(len(sample.token_ids) for sample in aborted) > 0
    assert max(len(sample.token_ids) for sample in aborted) < 250


async def test_an_abort_does_not_abort_ids_that_begin_with_the_aborted_id(engine):
    requests = [
        SampleRequest(id=name, prompt_ids=np.array([3, 4], dtype=np.int32), sampling=SamplingConfig(max_new_tokens=100))
        for name in ("7-1-1-0", "7-1-1-00", "7-1-1-0-1")
    ]
    running = asyncio.create_task(answer(engine, requests))
    await until_writing(engine)
    await engine.abort(["7-1-1-0"])
    _, second, third = await running
    assert second.finish_reason is not None
    assert third.finish_reason is not None


@pytest.mark.long
async def test_a_finished_sample_does_not_wait_for_other_samples_of_its_request(engine):
    short = requests_of(1, num_samples=4, name="short", max_new_tokens=2)
    long = requests_of(1, num_samples=4, name="long", max_new_tokens=400, top_k=3)
    order = [request.id.split("-")[0].rstrip("0123456789") async for request, _ in engine.generate([*long, *short])]
    assert sorted(order[:4]) == ["short"] * 4


async def test_a_refused_request_names_the_cause_and_the_server_continues(engine):
    (request,) = requests_of(1, num_samples=1, max_new_tokens=600)
    with pytest.raises(EngineError, match=r"sglang-0 answered POST /generate with .*context length"):
        await answer(engine, [request])
    with pytest.raises(EngineError, match="tokenized with another model"):
        await answer(engine, [replace(request, prompt_ids=request.prompt_ids + 90)])
    assert len((await answer(engine, requests_of(1)))[0].token_ids) > 0


async def test_a_prompt_can_use_all_positions_except_one_and_those_that_sglang_reserves(engine):
    (request,) = requests_of(1, num_samples=1, name="whole", max_new_tokens=1)
    longest = np.resize(request.prompt_ids, 512 - SGLANG_RESERVED_POSITIONS - 1)
    with pytest.raises(RequestRefused, match="refuses a request: Input length"):
        await answer(engine, [replace(request, id="longer", prompt_ids=np.append(longest, longest[0]))])
    assert not engine.has_failed
    assert len((await answer(engine, [replace(request, prompt_ids=longest)]))[0].token_ids) == 1


CHANGES = {"differs": lambda tensors: {**tensors, "model.norm.weight": tensors["model.norm.weight"] + 1e-6}}


@pytest_asyncio.fixture(loop_scope="module")
async def failing_engine(engine, model_path, tmp_path):
    """Yield a second engine on the shared server. A test can make this engine fail.

    After the test, the shared engine loads weights again.
    """
    failing = SGLangEngine(
        RolloutFleetConfig(load_timeout_s=30.0),
        model_path=model_path,
        device=EngineDevice.cpu,
        rank=0,
        log_dir="",
        seed=0,
        server=RunningServer(engine.server),
    )
    await failing.start()
    failing._version, failing._verified = engine.version, {engine.version}
    yield failing
    with contextlib.suppress(AsyncRLError):  # end the update that the failed load began
        await failing.client.call("POST", "/end_weight_update", {})
    await failing.stop()
    await engine.load_weights(publish_weights(model_path, tmp_path / "again", engine.version + 1))


async def assert_failed(engine, running, match):
    """Check that a failed engine answers neither running nor new requests."""
    for refused in (running, answer(engine, requests_of(1)), engine.wait_failed()):
        with pytest.raises(AsyncRLError, match=match):
            await asyncio.wait_for(refused, 30)


@pytest.mark.parametrize(
    ("how", "error", "match"),
    [
        ("differs", EngineError, "1 of 24 tensors differ, first model.norm.weight"),
        ("fails", EngineError, "rank 0 did not load .*FileNotFoundError"),
        ("hangs", DeadlineError, r"(?s)load_timeout_s = 0.3 s. Last lines of .*sglang-0.log"),
    ],
)
async def test_an_engine_never_answers_again_after_a_load_that_differs_fails_or_hangs(
    failing_engine, publish, monkeypatch, how, error, match
):
    call = failing_engine.client.call

    async def hang_in_the_update(method, path, *args, **options):
        if path == "/update_weights_from_tensor":
            await asyncio.sleep(60)
        return await call(method, path, *args, **options)

    if how == "hangs":
        monkeypatch.setattr(failing_engine.client, "call", hang_in_the_update)
        monkeypatch.setattr(failing_engine, "_config", RolloutFleetConfig(load_timeout_s=0.3))
    offer = bare_offer(failing_engine.version + 1) if how == "fails" else publish(change=CHANGES.get(how))
    running = asyncio.create_task(answer(failing_engine, requests_of(2, name="failing", max_new_tokens=400, top_k=3)))
    await until_writing(failing_engine)
    with pytest.raises(error, match=match):
        await failing_engine.load_weights(offer)
    await assert_failed(failing_engine, running, match)


@pytest.mark.long
async def test_no_prefix_computed_under_old_weights_is_used_after_an_update(engine, publish_next):
    """The radix cache is on. Groups with a long common prefix run during updates, and begin directly after updates."""
    assert "--disable-radix-cache" not in " ".join(server_processes(engine)[0].cmdline())
    await engine.load_weights(publish_next(1.0))
    first = engine.version
    shared = np.asarray([3 + position * 7 % 10 for position in range(150)], dtype=np.int32)

    def requests(name):
        options = SamplingConfig(max_new_tokens=120, temperature=1.2)
        prompts = [np.append(shared, [3 + index]).astype(np.int32) for index in range(4) for _ in range(4)]
        return [SampleRequest(id=f"{name}-{i}", prompt_ids=ids, sampling=options) for i, ids in enumerate(prompts)]

    asked, paths = [], {first: publish_next.paths[first]}
    for scale in (1.5, 0.6, 1.3):
        asked.append((batch := requests(f"v{engine.version}"), asyncio.create_task(answer(engine, batch))))
        await until_writing(engine)
        await engine.load_weights(publish_next(scale))
        paths[engine.version] = publish_next.paths[engine.version]
    asked.append((batch := requests("last"), asyncio.create_task(answer(engine, batch))))
    num_versions = Counter()
    for batch, running in asked:
        for request, sample in zip(batch, await running, strict=True):
            num_versions[len(set(sample.versions.tolist()))] += 1
            for version in sorted(set(sample.versions.tolist())):
                expected, of = forward_logprobs(paths[version], request, sample), sample.versions == version
                np.testing.assert_allclose(sample.logprobs[of], expected[of], atol=1e-3)
    assert max(num_versions) >= 2, "no response has tokens of two versions"


@pytest.fixture
def publish_next(engine, model_path, tmp_path):
    """Return a function that publishes the next version. Its attribute ``paths`` maps each version to its folder."""

    def publish(scale):
        offer = publish_weights(model_path, tmp_path, engine.version + 1, scale)
        publish.paths[offer.version] = folder_of(offer)
        return offer

    publish.paths = {}
    return publish


def signal_server(engine, signum):
    for process in server_processes(engine):
        process.send_signal(signum)


@pytest.mark.long
async def test_an_engine_survives_a_server_that_pauses_for_a_short_time(engine):
    running = asyncio.create_task(answer(engine, requests_of(2, name="paused", max_new_tokens=300, top_k=3)))
    await until_writing(engine)
    signal_server(engine, signal.SIGSTOP)
    aborting = asyncio.create_task(engine.abort(["paused-0-0"]))
    await asyncio.sleep(DEATH_GRACE_S + 0.5)
    signal_server(engine, signal.SIGCONT)
    await aborting
    assert len(await running) == 8


async def test_a_server_that_never_continues_is_detected_within_the_deadline(engine, failing_engine, monkeypatch):
    monkeypatch.setattr(failing_engine.silence, "timeout_s", 2.0)
    running = asyncio.create_task(answer(failing_engine, requests_of(2, name="silent", max_new_tokens=400, top_k=3)))
    await until_writing(failing_engine)
    signal_server(engine, signal.SIGSTOP)
    try:
        match = (
            r"(?s)sglang-0 produced no token of its 8 running .*did not answer a probe.*Last lines of .*sglang-0.log"
        )
        await assert_failed(failing_engine, running, match)
    finally:
        signal_server(engine, signal.SIGCONT)


async def test_a_server_listens_only_on_loopback_and_its_sockets_refuse_other_users(engine):
    sockets = [each for process in server_processes(engine) for each in process.net_connections("all")]
    ports = {each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN}
    assert ports == {"127.0.0.1"}
    paths = [each.laddr for each in sockets if each.family == socket.AF_UNIX and each.laddr]
    assert not [path for path, error in as_stranger(lambda: refusals(paths)).items() if not error]


async def test_a_server_answers_only_requests_with_the_key(engine):
    async with aiohttp.ClientSession(engine.server.url) as stranger, stranger.get("/model_info") as response:
        assert response.status == 401


async def test_a_killed_server_is_detected_immediately_and_leaves_no_files_or_processes(engine):
    processes = server_processes(engine)
    scratch = re.search(r"--config (\S+)/server.yaml", " ".join(processes[0].cmdline())).group(1)
    shared_memory = shared_memory_of(processes)
    assert left_in_shared_memory(shared_memory), "the server must have shared memory"
    port = int(engine.server.url.rsplit(":", 1)[1])
    running = asyncio.create_task(answer(engine, requests_of(4, max_new_tokens=400, top_k=3)))
    await until_writing(engine)
    processes[0].send_signal(signal.SIGKILL)
    with pytest.raises(
        WorkerDiedError, match=rf"sglang-0 died with exit status {128 + signal.SIGKILL}. Last lines of .*sglang-0.log"
    ):
        await asyncio.wait_for(engine.wait_failed(), 30)
    with pytest.raises(WorkerDiedError, match="sglang-0 died"):
        await asyncio.wait_for(running, 30)
    assert still_alive(processes) == []
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    assert not await asyncio.to_thread(os.path.exists, scratch)
    assert left_in_shared_memory(shared_memory) == []


async def test_a_dead_engine_can_be_stopped(engine):
    await asyncio.wait_for(engine.stop(), 30)
    await asyncio.wait_for(engine.stop(), 30)


OWNER = """
    import asyncio, sys
    from rollout_fleet.config import EngineDevice, RolloutFleetConfig
    from rollout_fleet.engines.sglang import SGLangEngine

    async def main():
        config = RolloutFleetConfig(stop_timeout_s=60)
        device, (model, logs) = EngineDevice.cpu, sys.argv[1:]
        engine = SGLangEngine(config, model_path=model, device=device, rank=5, log_dir=logs, seed=0)
        start = asyncio.create_task(engine.start())
        while engine.server.guard is None:
            await asyncio.sleep(0)
        print(engine.server.guard.pid, flush=True)
        await start
        print("up", flush=True)
        await engine.wait_failed()

    asyncio.run(main())
"""


@pytest.mark.parametrize(
    "num_processes",
    [
        pytest.param(1, id="starting"),
        pytest.param(3, id="all-started", marks=pytest.mark.slow),
        pytest.param(None, id="ready", marks=pytest.mark.slow),
    ],
)
async def test_no_server_process_remains_after_the_death_of_the_owner(model_path, tmp_path, num_processes):
    """The owner is killed when the server has ``num_processes`` processes.

    If ``num_processes`` is None, the owner is killed when the server is ready.
    """
    command = [sys.executable, "-c", textwrap.dedent(OWNER), model_path, str(tmp_path)]
    owner = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    guard = psutil.Process(int(await owner.stdout.readline()))
    if num_processes is None:
        assert await owner.stdout.readline() == b"up\n"
    else:
        while len(guard.children(recursive=True)) < num_processes:  # noqa: ASYNC110 - no event to wait for
            await asyncio.sleep(0.05)
    processes = [guard, *guard.children(recursive=True)]
    assert len(processes) >= 2
    owner.kill()
    await owner.wait()
    assert await asyncio.to_thread(still_alive, processes) == []
