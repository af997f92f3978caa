"""A worker whose engine fails releases its groups with their tokens, and another worker continues them."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, nullcontext

import pytest

from asyncrl.core.errors import DeadlineError, EngineLost, RequestRefused
from rollout_fleet import answering
from rollout_fleet import worker as worker_module
from rollout_fleet.config import EngineKind, RolloutFleetConfig
from rollout_fleet.engines.scripted import ScriptedAnswer, ScriptedEngine
from rollout_fleet.rewards import REWARDS
from rollout_fleet.worker import RolloutWorker
from tests.support.offers import bare_offer
from tests.support.registries import undo_registrations
from tests.support.rollout import InMemoryBuffer, make_prompts, writes

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("virtual_time")]


@pytest.fixture
def working(monkeypatch, tmp_path):
    """Return a function for ``async with`` that runs a rollout worker with a given buffer and engine."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(answering, "load_decoder", lambda path: str)
    monkeypatch.setattr(worker_module.WeightStager, "staged", lambda self, offer: nullcontext(offer))
    undo_registrations(monkeypatch, REWARDS).register("constant")(lambda prompt, response_text: 1.0)

    @asynccontextmanager
    async def work(buffer, engine, **options):
        monkeypatch.setattr(answering, "make_engine", lambda *_, **__: engine)
        worker = RolloutWorker(
            RolloutFleetConfig(**{"engine": EngineKind.scripted, "reward": "constant", **options}),
            model_path="",
            samples_per_prompt=2,
            connect_buffer=lambda name: buffer,
            log_dir=str(tmp_path),
            staging_dir=str(tmp_path / "staging"),
            seed=0,
            engine_seed=0,
        )
        await worker.start()
        await buffer.offer(bare_offer(buffer.ledger.learner_version))
        await worker.load_first()
        run = asyncio.create_task(worker.run())
        try:
            yield worker, run
        finally:
            await worker.stop()
            await asyncio.gather(run, return_exceptions=True)

    return work


def buffer_of(num_prompts):
    return InMemoryBuffer(make_prompts(num_prompts), groups_per_step=1, max_lag=8)


async def test_a_worker_ends_with_its_engine_and_another_worker_continues_its_groups(working, recorded):
    buffer, engine = buffer_of(4), ScriptedEngine(writes(40))
    async with working(buffer, engine) as (worker, run):
        await asyncio.sleep(0.2)
        failing = asyncio.create_task(worker.wait_failed())
        await asyncio.sleep(0)
        engine.die("killed")
        with pytest.raises(EngineLost, match="killed"):
            await asyncio.wait_for(run, 5)
        with pytest.raises(EngineLost, match="killed"):
            await asyncio.wait_for(failing, 5)
        assert buffer.held == set(), "the worker must release all leases"
        assert buffer.log.served(1) is None, "the failed worker must not hold up weight updates"
        first = await worker.stop()
    assert first.groups_failed == {"engine_failed": 4}
    assert first.tokens_in_flight == 0
    after = ScriptedEngine(writes(40))
    async with working(buffer, after) as (worker, run):
        await buffer.stored(4)
        second = await worker.drain()
        assert await run == second
    assert first.tokens_generated + second.tokens_generated == 4 * 2 * 40 == buffer.num_tokens == buffer.num_accounted
    assert min(len(request.prompt_ids) for request in after.requests) > 15, "prompts must include the prefix"
    (down,) = recorded().spans_of("down", "engine-0")
    assert (down.cause, down.is_open) == ("WorkerDiedError", False)


async def test_a_worker_returns_its_counters_even_if_its_engine_fails_to_stop(working, caplog):
    buffer, engine = buffer_of(2), ScriptedEngine(writes(100))
    async with working(buffer, engine) as (worker, _):
        await asyncio.sleep(0.2)

        async def failing_stop():
            raise OSError(5, "Input/output error")

        engine.stop = failing_stop
        counters = await worker.stop()
        assert counters.tokens_generated == buffer.num_accounted > 0
    assert "engine-0 was not stopped; its processes end with this one" in caplog.text


async def test_an_engine_failure_ends_its_worker_even_if_the_buffer_does_not_answer(working):
    buffer, engine = buffer_of(2), ScriptedEngine(writes(100))

    async def unheard():
        await asyncio.sleep(30)
        raise DeadlineError("buffer.fenced: no answer within 30.0 s")

    async with working(buffer, engine) as (worker, run):
        await asyncio.sleep(0.2)
        buffer.fenced = unheard
        engine.die("killed")
        with pytest.raises(EngineLost, match="killed"):
            await asyncio.wait_for(worker.wait_failed(), 60)
        assert run.done()


async def test_a_prompt_that_kills_engines_is_dropped_after_several_attempts(working):
    def script(request, version):
        return ScriptedAnswer(die="poisoned") if request.id.startswith("0-") else ScriptedAnswer(response=[5])

    buffer, options = buffer_of(3), {"max_attempts": 2, "groups_in_flight": 1}
    for _ in range(2):
        async with working(buffer, ScriptedEngine(script), **options) as (_, run):
            with pytest.raises(EngineLost, match="poisoned"):
                await asyncio.wait_for(run, 60)
    async with working(buffer, ScriptedEngine(script), **options):
        await buffer.stored(2)
    assert dict(buffer.ledger.account.groups_dropped) == {"engine_failed": 1}


async def test_a_full_disk_on_the_host_ends_the_loop_with_that_error(working, monkeypatch):
    @asynccontextmanager
    async def staged(_, offer):
        if offer.version > 0:
            raise OSError(28, "No space left on device")
        yield offer

    monkeypatch.setattr(worker_module.WeightStager, "staged", staged)
    buffer, engine = buffer_of(2), ScriptedEngine(writes(400))
    async with working(buffer, engine) as (_, run):
        await asyncio.sleep(0.2)
        await buffer.advance()
        await buffer.offer(bare_offer(1))
        with pytest.raises(OSError, match="No space left on device"):
            await asyncio.wait_for(run, 60)
    assert buffer.held == set(), "the worker must release all leases"


async def test_a_request_that_the_engine_refuses_ends_the_worker_with_that_error(working):
    buffer, engine = buffer_of(2), ScriptedEngine(lambda request, version: ScriptedAnswer(error="too long"))
    async with working(buffer, engine) as (_, run):
        with pytest.raises(RequestRefused, match="too long"):
            await asyncio.wait_for(run, 5)
    assert (buffer.held, buffer.num_tokens) == (set(), 0)
