"""After a fault in a weight update on a real SGLang server, the engine returns no token of unverified weights.

In each test, two engines load the same weights while requests run, and one update fails. The engine with
the failed update must end within its deadline, with an error that names the engine. The other engine continues.
"""

import asyncio
import contextlib
import itertools
import random
import re
import signal
import time
from functools import partial

import numpy as np
import pytest
import pytest_asyncio
from transformers import AutoModelForCausalLM

from asyncrl.core.errors import AsyncRLError
from rollout_fleet.config import EngineDevice, RolloutFleetConfig, SGLangConfig
from rollout_fleet.engines import sglang
from rollout_fleet.engines.sglang import SGLangEngine
from tests.support.engine_probes import (
    answer,
    folder_of,
    forward_by_versions,
    publish_weights,
    requests_of,
    server_processes,
    until_writing,
)
from tests.support.faulty_proxy import ANSWERS, FaultyProxy
from tests.support.learner_ranks import learner_ranks

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif("not __import__('importlib.util').util.find_spec('sglang')", reason="SGLang is not installed"),
]
STEPS = [
    "/pause_generation",
    "/begin_weight_update",
    "/update_weights_from_tensor",
    "/end_weight_update",
    "/update_weight_version",
    "/continue_generation",
]
TOGETHER = {"/end_weight_update": {"/update_weight_version"}}
"""Maps a call to further calls that the engine sends before it has the answer to this call."""
DEADLINE_S = 3.0
GRACE_S = 5.0
MAX_ENDS = 5
DEADLINE = rf"did not load policy version \d+ from .* within rollout_fleet.load_timeout_s = {DEADLINE_S:g} s"
SILENCE = r"produced no token of its \d+ running requests"
FAILURES = {
    "500": "answered POST {step} with 500: b'oops'",
    "garbage": "answered POST {step} with a body that is not JSON",
    "nothing": r"answered POST {step} with \{{\}}, expected",
    "truncated": "could not be reached for POST {step}",
    "stalls": DEADLINE,
    "SIGSTOP": f"{DEADLINE}|{SILENCE}",
    "SIGKILL": f"died with exit status {128 + signal.SIGKILL}",
}
SIGNALS = ["SIGSTOP", "SIGKILL"]
# There is no row for a signal after a call, because it would be the same as a signal before the next call.
# SIGKILL comes last, because the test must start the killed server again.
ROWS = [
    *itertools.product(STEPS, ["before", "during", "after"], ANSWERS),
    *itertools.product(STEPS, ["before", "during"], SIGNALS[:1]),
    *itertools.product(STEPS, ["during"], SIGNALS[1:]),
]
LOAD = "/update_weights_from_tensor"
HELD_ROWS = [*itertools.product(["engine", "rank 0", "rank 1"], ["before", "during"], SIGNALS)]
"""Rows of (process, moment, signal). The signal comes while a server loads weights that learner ranks send."""
_VERSIONS = itertools.count(1)


class Servers:
    """Two real SGLang servers. The second server has no faults.

    The tests make engines on the first server fail. If the first server was killed, it is started again.
    """

    def __init__(self, model_path, folder):
        self._model_path, self._folder = model_path, folder
        self._folders, self._models = {0: model_path}, {}
        self.owner = self._engine(0)
        self.other = self._engine(1)

    async def start(self):
        await asyncio.gather(self.owner.start(), self.other.start())

    async def stop(self):
        await asyncio.gather(self.owner.stop(), self.other.stop())

    @contextlib.asynccontextmanager
    async def failing_engine(self):
        """Yield another engine on the first server. The proxy between engine and server can make calls fail."""
        if self.owner.server.guard.returncode is not None:
            await self.owner.stop()
            self.owner = self._engine(0)
            await self.owner.start()
        proxy = FaultyProxy(self.owner.server)
        engine = self._engine(0, proxy)
        await engine.start()
        try:
            yield engine, proxy
        finally:
            await engine.stop()
            await proxy.stop()
            if self.owner.server.guard.returncode is None:
                await self._end_session()

    async def _end_session(self):
        """End the weight update that the failed load left open on the server.

        If SIGSTOP paused the server, the server possibly begins the update late. So the method tries several times.
        """
        post = partial(self.owner.client.call, "POST")
        for _ in range(MAX_ENDS):
            with contextlib.suppress(AsyncRLError):  # raised if no update is open
                await post("/end_weight_update", {})
            with contextlib.suppress(AsyncRLError):  # raised if an update is open again
                answers = [await post(path, {}) for path in ("/begin_weight_update", "/end_weight_update")]
                if all(answer["success"] for answer in answers):
                    await post("/continue_generation", {})  # the failed load paused generation
                    return
        raise AssertionError(f"the server still has an open weight update after {MAX_ENDS} attempts to end it")

    def publish(self, scale):
        """Publish changed weights as the next version."""
        offer = publish_weights(self._model_path, self._folder, next(_VERSIONS), scale)
        self._folders[offer.version] = folder_of(offer)
        return offer

    def model_of(self, version):
        if version not in self._models:
            self._models[version] = AutoModelForCausalLM.from_pretrained(self._folders[version], dtype="float32")
        return self._models[version]

    def _engine(self, rank, server=None):
        return SGLangEngine(
            RolloutFleetConfig(stop_timeout_s=1.0, sglang=SGLangConfig(max_total_tokens=8192)),
            model_path=self._model_path,
            device=EngineDevice.cpu,
            rank=rank,
            log_dir=str(self._folder),
            seed=rank,
            server=server,
        )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers(model_path, tmp_path_factory):
    both = Servers(model_path, tmp_path_factory.mktemp("servers"))
    try:
        await both.start()
        yield both
    finally:
        await both.stop()


def fault_of(servers, fault, seed):
    """Return the arguments of `FaultyProxy.fail` that produce the fault ``fault``."""
    if fault in ANSWERS:
        return {"answer": ANSWERS[fault]}
    delay_s = random.Random(seed).uniform(0, 0.02)

    async def send_signal():
        await asyncio.sleep(delay_s)  # the server begins to work on the call
        processes = server_processes(servers.owner)
        for process in processes[:1] if fault == "SIGKILL" else processes:  # the guard kills the other processes
            process.send_signal(signal.Signals[fault])

    return {"act": send_signal}


async def collect(engine, requests, accepted):
    async for request, sample in engine.generate(requests):
        accepted.append((request, sample))


async def failure_of(engine, offer, running):
    """Load an offer and wait until the engine fails. Check that the failed engine does not answer again."""
    with contextlib.suppress(AsyncRLError):
        await engine.load_weights(offer)
    with pytest.raises(AsyncRLError) as failure:
        await engine.wait_failed()
    with contextlib.suppress(AsyncRLError):  # ``running`` may end with or without an error
        await asyncio.wait_for(running, 10)
    for refused in (answer(engine, requests_of(1)), engine.load_weights(offer)):
        with pytest.raises(AsyncRLError, match=re.escape(str(failure.value)[:60])):
            await asyncio.wait_for(refused, 10)
    return str(failure.value)


async def load_under_load(engine, offer):
    """Load weights while requests run, and send more requests afterwards. Returns pairs of request and answer."""
    before, after = (requests_of(2, 2, max_new_tokens=60, temperature=1.2) for _ in range(2))
    running = asyncio.create_task(answer(engine, before))
    await until_writing(engine)
    await engine.load_weights(offer)
    answers = [*await running, *await answer(engine, after)]
    return [*zip([*before, *after], answers, strict=True)]


def check(accepted, model_of, seed):
    for request, sample in accepted:
        if not len(sample.token_ids):  # the sample ended before its first token
            assert sample.finish_reason is None
            continue
        expected = forward_by_versions(model_of, request, sample)
        np.testing.assert_allclose(sample.logprobs, expected, atol=1e-3, err_msg=f"seed {seed}: {sample.versions}")


@pytest.mark.parametrize(("step", "moment", "fault"), ROWS)
async def test_no_token_of_unverified_weights_is_accepted(servers, monkeypatch, step, moment, fault):
    if fault == "truncated":
        monkeypatch.setattr(sglang, "DEATH_GRACE_S", 0.2)
    seed, accepted = random.randrange(1 << 16), []
    async with servers.failing_engine() as (engine, proxy):
        await engine.load_weights(servers.publish(1.1))
        proxy.paths.clear()
        if fault in ("stalls", "SIGSTOP"):
            engine._config = RolloutFleetConfig(load_timeout_s=DEADLINE_S)
            engine.silence.timeout_s = DEADLINE_S
        short, long = requests_of(1, 2, max_new_tokens=4), requests_of(2, 2, max_new_tokens=400, top_k=3)
        running = asyncio.create_task(collect(engine, [*short, *long], accepted))
        await until_writing(engine)
        proxy.fail(step, moment, **fault_of(servers, fault, seed))
        offer, began_s = servers.publish(0.7), time.monotonic()
        try:
            message, goes_on = await asyncio.gather(
                failure_of(engine, offer, running), load_under_load(servers.other, offer)
            )
        finally:
            if fault == "SIGSTOP":
                for process in server_processes(servers.owner):
                    process.send_signal(signal.SIGCONT)
    took_s = time.monotonic() - began_s
    assert re.search(FAILURES[fault].format(step=step), message), f"seed {seed}: {message}"
    assert took_s < 3 * DEADLINE_S + GRACE_S
    before, made = STEPS[: STEPS.index(step) + 1], [path for path in proxy.paths if path in STEPS]
    assert list(dict.fromkeys(made))[: len(before)] == before
    # If a signal arrives late, the server has already answered, and the engine has made its next call.
    may_be_made = {*before, *TOGETHER.get(step, ())}
    assert set(made) <= may_be_made or (moment == "during" and fault.startswith("SIG")), f"too many calls: {made}"
    assert servers.other.version == offer.version
    assert offer.version in {version for _, sample in goes_on for version in sample.versions.tolist()}
    check([*accepted, *goes_on], servers.model_of, seed)


@pytest.mark.parametrize(("who", "moment", "fault"), HELD_ROWS)
async def test_an_engine_whose_weight_stream_fails_never_continues_with_unverified_weights(servers, who, moment, fault):
    seed, accepted, number = random.randrange(1 << 16), [], signal.Signals[fault]
    with learner_ranks(num_receivers=2, timeout_s=DEADLINE_S) as learner:
        async with servers.failing_engine() as (engine, proxy):
            await engine.load_weights(learner.offer(servers.publish(1.1)))
            engine._config = RolloutFleetConfig(load_timeout_s=DEADLINE_S)
            engine.silence.timeout_s = DEADLINE_S
            running = asyncio.create_task(collect(engine, requests_of(2, 2, max_new_tokens=400, top_k=3), accepted))
            await until_writing(engine)
            act = fault_of(servers, fault, seed)["act"]
            if who != "engine":
                rank = learner.ranks[int(who[-1])]

                async def act():
                    rank.signal(number)
                    if number is signal.SIGKILL:
                        await asyncio.to_thread(rank.wait_end)

            proxy.fail(LOAD, moment, act=act)
            offer, began_s, goes_on = learner.offer(servers.publish(0.7)), time.monotonic(), []
            try:
                if who == "engine":
                    message, goes_on = await asyncio.gather(
                        failure_of(engine, offer, running), load_under_load(servers.other, offer)
                    )
                elif message := await failure_or_nothing(engine, offer):
                    with contextlib.suppress(AsyncRLError):
                        await asyncio.wait_for(running, 10)
                else:
                    accepted += [*zip(after := requests_of(1, 2), await answer(engine, after), strict=True)]
            finally:
                running.cancel()
                if fault == "SIGSTOP":
                    for process in server_processes(servers.owner) if who == "engine" else ():
                        process.send_signal(signal.SIGCONT)
                    if who != "engine":
                        rank.signal(signal.SIGCONT)
    took_s = time.monotonic() - began_s
    assert took_s < 3 * DEADLINE_S + GRACE_S
    assert re.search(held_failure(who, moment, fault), message), f"seed {seed}: {message}"
    if who == "engine":
        assert servers.other.version == offer.version
    check([*accepted, *goes_on], servers.model_of, seed)


async def failure_or_nothing(engine, offer):
    """Load an offer. Returns the message of the error, or an empty string if the load succeeds."""
    try:
        await engine.load_weights(offer)
    except AsyncRLError as error:
        with pytest.raises(AsyncRLError, match=re.escape(str(error)[:60])):
            await engine.load_weights(offer)
        return str(error)
    return ""


def held_failure(who, moment, fault):
    """Return a pattern for the error message. If the load possibly succeeds, an empty message matches, too."""
    if who == "engine":
        return FAILURES[fault]
    gone = "is no longer sent: (nobody|another sender) listens at 127"
    lost = f"did not arrive from 127|was not received in 3 rounds|{gone}"
    return lost + f"|{DEADLINE}" if moment == "before" else lost + f"|{DEADLINE}|^$"
