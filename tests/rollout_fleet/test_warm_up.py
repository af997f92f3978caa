"""An engine generates before it is ready, and has one deadline for that and for coming up."""

import asyncio
import json

import pytest

from asyncrl.core.errors import DeadlineError, EngineError
from rollout_fleet.config import EngineDevice, RolloutFleetConfig, SamplingConfig
from rollout_fleet.engines.sglang import SGLangEngine
from rollout_fleet.engines.sglang_server import SGLangServer


class Client:
    """Takes the place of `SGLangClient`; answers each request with ``events``, after ``delay_s``."""

    def __init__(self, events=(), delay_s=0.0):
        self.bodies = []
        self._events = list(events)
        self._delay_s = delay_s

    async def open(self):
        pass

    async def close(self):
        pass

    async def call(self, method, path, body=None):
        return {}

    async def stream(self, path, body):
        self.bodies.append(body)
        await asyncio.sleep(self._delay_s)
        yield self._events


@pytest.fixture
def make_engine(tmp_path, monkeypatch):
    async def start(server):
        await asyncio.sleep(0.2)

    monkeypatch.setattr(SGLangServer, "start", start)

    def make(client, *, vocab_size=7, start_timeout_s=20.0):
        (tmp_path / "config.json").write_text(json.dumps({"vocab_size": vocab_size, "eos_token_id": 1}))
        config = RolloutFleetConfig(
            start_timeout_s=start_timeout_s, sampling=SamplingConfig(temperature=0.7, top_p=0.9, max_new_tokens=4096)
        )
        engine = SGLangEngine(
            config, model_path=str(tmp_path), device=EngineDevice.cuda, rank=0, log_dir=str(tmp_path), seed=0
        )
        engine._client = client
        return engine

    return make


async def test_an_engine_generates_as_training_does_before_it_is_ready(make_engine):
    client = Client([{"meta_info": {}}])
    engine = make_engine(client)
    await engine.start()
    await engine.stop()
    assert [len(body["input_ids"][0]) for body in client.bodies] == [1, 16]
    for body in client.bodies:
        assert body["return_logprob"] is True
        assert body["stream"] is True
        assert max(max(ids) for ids in body["input_ids"]) < 7, "an id outside the vocabulary kills the server"
        assert all(1 <= options["max_new_tokens"] <= 4 for options in body["sampling_params"])
        assert body["sampling_params"][0]["temperature"] == 0.7


async def test_a_slow_warm_up_is_not_silence_but_ends_with_the_start_deadline(make_engine):
    engine = make_engine(Client(delay_s=60.0), start_timeout_s=0.5)
    message = "sglang-0 did not generate within rollout_fleet.start_timeout_s = 0.5 s"
    async with asyncio.timeout(10.0):
        with pytest.raises(DeadlineError, match=message):
            await engine.start()
    await engine.stop()


async def test_an_engine_that_cannot_generate_does_not_start(make_engine):
    engine = make_engine(Client([{"error": {"message": "no kernel image is available"}}]))
    with pytest.raises(EngineError, match=r"sglang-0 cannot generate: .*no kernel image"):
        await engine.start()
    await engine.stop()
