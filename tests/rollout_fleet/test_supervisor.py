"""A worker whose engines die: fenced, replaced, caught up; what was begun goes on, and every token is accounted for."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from asyncrl.core.errors import DeadlineError, EngineLost, RequestRefused, WorkerDiedError
from rollout_fleet import worker as worker_module
from rollout_fleet.config import EngineKind, RolloutFleetConfig, SamplingConfig
from rollout_fleet.engines.scripted import ScriptedAnswer, ScriptedEngine
from rollout_fleet.member import MemberState
from rollout_fleet.worker import RolloutWorker
from tests.support.offers import bare_offer
from tests.support.rollout import InMemoryBuffer, make_prompts, writes

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("virtual_time")]


class Engines(list):
    """Every scripted engine that a worker makes, the newest last; ``starts`` are the seconds that each takes."""

    def __init__(self, script, starts=()):
        super().__init__()
        self.script = script
        self.starts = list(starts)

    def make(self, *_, **__):
        engine = ScriptedEngine(self.script)
        self.append(engine)
        begin, delay = engine.start, self.starts.pop(0) if self.starts else 0.0

        async def start():
            await asyncio.sleep(abs(delay))
            if delay < 0:
                raise WorkerDiedError(f"engine {len(self) - 1} did not come up")
            await begin()

        engine.start = start
        return engine


@asynccontextmanager
async def working(monkeypatch, tmp_path, buffer, engines, **options):
    """A worker that runs on these engines."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(worker_module, "make_engine", engines.make)
    monkeypatch.setattr(worker_module, "load_decoder", lambda path: str)
    worker = RolloutWorker(
        RolloutFleetConfig(**{"engine": EngineKind.scripted, "reward": "constant", **options}),
        model_path="",
        samples_per_prompt=2,
        connect_buffer=lambda name: buffer,
        log_dir=str(tmp_path),
        staging_dir=str(tmp_path / "staging"),
        seed=0,
    )
    worker._stager.staged = bare
    await worker.start()
    await buffer.offer(bare_offer(buffer.ledger.learner_version))
    await worker.load_first()
    run = asyncio.create_task(worker.run())
    try:
        yield worker, run
    finally:
        await worker.stop()
        await asyncio.gather(run, return_exceptions=True)


@asynccontextmanager
async def bare(offer):
    yield offer


@pytest.fixture(autouse=True)
def constant_reward(monkeypatch):
    from rollout_fleet.rewards import REWARDS

    monkeypatch.setitem(REWARDS._entries, "constant", lambda prompt, response_text: 1.0)


def buffer_of(num_prompts):
    return InMemoryBuffer(make_prompts(num_prompts), groups_per_step=1, max_lag=8)


async def test_a_dead_engine_is_replaced_and_its_groups_go_on_where_they_were(monkeypatch, tmp_path, recorded):
    buffer, engines = buffer_of(4), Engines(writes(40))
    async with working(monkeypatch, tmp_path, buffer, engines) as (worker, run):
        await asyncio.sleep(0.2)
        engines[0].die("killed")
        await buffer.stored(4)
        counters = await worker.drain()
        assert await run == counters
    assert len(engines) == 2
    assert counters.groups_failed == {"engine_failed": 4}
    assert counters.tokens_generated == 4 * 2 * 40 == buffer.num_tokens == buffer.num_accounted
    assert counters.tokens_in_flight == 0
    continued = [len(request.prompt_ids) for request in engines[1].requests]
    assert min(continued) > 15, "the prefix that was written is part of the prompt"
    (down,) = recorded().spans_of("down", "engine-0")
    assert (down.cause, down.is_open) == ("WorkerDiedError", False)


async def test_nothing_is_leased_until_the_new_engine_serves_verified_weights(monkeypatch, tmp_path):
    buffer, engines = buffer_of(2), Engines(writes(400), starts=[0, 30])
    async with working(monkeypatch, tmp_path, buffer, engines) as (worker, _):
        await asyncio.sleep(0.2)
        engines[0].die("killed")
        await asyncio.sleep(20)
        asked = len(buffer.leases_asked)
        assert worker._supervisor.member.state is MemberState.starting
        assert buffer.log._serving == {}, "nobody waits for it meanwhile"
        await buffer.stored(2)
        assert len(buffer.leases_asked) > asked


async def test_a_new_engine_takes_the_newest_weights_before_it_answers(monkeypatch, tmp_path):
    buffer, engines = buffer_of(2), Engines(writes(100), starts=[0, 5])
    async with working(monkeypatch, tmp_path, buffer, engines):
        await asyncio.sleep(0.2)
        for _ in range(3):
            await buffer.advance()
        engines[0].die("killed")
        await asyncio.sleep(1)
        for version in (1, 2, 3):
            await buffer.offer(bare_offer(version))
        await buffer.stored(2)
    assert engines[1].version == 3
    for group in buffer.groups:
        assert set(group.versions[group.versions >= 0].tolist()) == {0, 3}


async def test_an_engine_that_fails_an_activation_is_replaced(monkeypatch, tmp_path):
    buffer, engines = buffer_of(2), Engines(writes(100))
    async with working(monkeypatch, tmp_path, buffer, engines) as (_, run):
        await asyncio.sleep(0.2)
        engines[0].load_error = "other weights"
        await buffer.advance()
        await buffer.offer(bare_offer(1))
        await buffer.stored(2)
        assert not run.done()
    assert [engine.version for engine in engines] == [0, 1]


async def test_an_engine_that_keeps_failing_ends_the_worker_with_its_last_failure(monkeypatch, tmp_path):
    buffer, engines = buffer_of(2), Engines(writes(100), starts=[0, -1, -1, -1])
    async with working(monkeypatch, tmp_path, buffer, engines) as (worker, run):
        await asyncio.sleep(0.2)
        engines[0].die("killed")
        with pytest.raises(EngineLost, match="engine 3 did not come up"):
            await asyncio.wait_for(run, 60)
        assert worker._supervisor.member.state is MemberState.failed
    assert len(engines) == 4
    assert buffer.held == set()


async def test_without_restarts_the_first_failure_ends_the_worker(monkeypatch, tmp_path):
    buffer, engines = buffer_of(2), Engines(writes(100))
    async with working(monkeypatch, tmp_path, buffer, engines, restarts=0) as (_, run):
        await asyncio.sleep(0.2)
        engines[0].die("killed")
        with pytest.raises(EngineLost, match="killed"):
            await asyncio.wait_for(run, 60)
    assert len(engines) == 1


async def test_a_start_that_takes_too_long_is_given_up_and_tried_again(monkeypatch, tmp_path):
    buffer, engines = buffer_of(1), Engines(writes(50), starts=[0, 10_000, 1])
    async with working(monkeypatch, tmp_path, buffer, engines):
        await asyncio.sleep(0.2)
        engines[0].die("killed")
        await asyncio.wait_for(buffer.stored(0), 1)
        while not buffer.groups:  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(1)
    assert len(engines) == 3


async def test_an_engine_whose_stop_raises_is_stopped_again_and_replaced(monkeypatch, tmp_path):
    buffer, engines = buffer_of(2), Engines(writes(100))
    async with working(monkeypatch, tmp_path, buffer, engines) as (_, run):
        await asyncio.sleep(0.2)
        stop, errors = engines[0].stop, [OSError(5, "Input/output error"), KeyError("pid")]

        async def failing_stop():
            if errors:
                raise errors.pop()
            await stop()

        engines[0].stop = failing_stop
        engines[0].die("killed")
        await asyncio.wait_for(buffer.stored(2), 60)
        assert not run.done()
    assert (len(engines), errors) == (2, [])


async def test_an_engine_that_can_never_be_stopped_ends_the_worker_by_name(monkeypatch, tmp_path):
    buffer, engines = buffer_of(2), Engines(writes(100))
    async with working(monkeypatch, tmp_path, buffer, engines) as (_, run):
        await asyncio.sleep(0.2)
        stop, is_broken = engines[0].stop, True

        async def failing_stop():
            if is_broken:
                raise OSError(5, "Input/output error")
            await stop()

        engines[0].stop = failing_stop
        engines[0].die("killed")
        with pytest.raises(EngineLost, match="killed"):
            await asyncio.wait_for(run, 60)
        is_broken = False
    assert len(engines) == 1, "two engines never share a device"


async def test_an_exception_while_an_engine_is_replaced_ends_the_worker_and_not_its_supervision(monkeypatch, tmp_path):
    buffer, engines = buffer_of(2), Engines(writes(100))
    async with working(monkeypatch, tmp_path, buffer, engines) as (worker, run):
        await asyncio.sleep(0.2)

        async def use(engine):
            raise RuntimeError("the loop has a bug")

        worker._loop.use = use
        engines[0].die("killed")
        with pytest.raises(EngineLost, match="the loop has a bug"):
            await asyncio.wait_for(run, 60)


async def test_an_engine_that_fails_while_the_buffer_is_gone_is_stopped_in_time_and_replaced(monkeypatch, tmp_path):
    buffer, engines = buffer_of(2), Engines(writes(100))
    fenced = buffer.fenced

    async def unheard():
        await asyncio.sleep(30)
        raise DeadlineError("buffer.fenced: no answer within 30.0 s")

    async with working(monkeypatch, tmp_path, buffer, engines) as (_, run):
        await asyncio.sleep(0.2)
        buffer.fenced = unheard
        engines[0].die("killed")
        await asyncio.sleep(35)
        buffer.fenced = fenced
        await asyncio.wait_for(buffer.stored(2), 60)
        assert not run.done()
    assert len(engines) == 2


async def test_no_room_on_the_workers_host_ends_its_loop_with_that_error(monkeypatch, tmp_path):
    buffer, engines = buffer_of(2), Engines(writes(400))
    async with working(monkeypatch, tmp_path, buffer, engines) as (worker, run):
        await asyncio.sleep(0.2)

        @asynccontextmanager
        async def full(offer):
            raise OSError(28, "No space left on device")
            yield offer

        worker._loop._stage = full
        await buffer.advance()
        await buffer.offer(bare_offer(1))
        with pytest.raises(OSError, match="No space left on device"):
            await asyncio.wait_for(run, 60)
    assert buffer.held == set(), "all leases went back"


async def test_a_worker_is_stopped_while_its_engine_is_replaced(monkeypatch, tmp_path):
    buffer, engines = buffer_of(2), Engines(writes(100), starts=[0, 10_000])
    async with working(monkeypatch, tmp_path, buffer, engines) as (worker, run):
        await asyncio.sleep(0.2)
        engines[0].die("killed")
        await asyncio.sleep(5)
        counters = await asyncio.wait_for(worker.stop(), 5)
        assert await run == counters
    assert counters.tokens_generated == buffer.num_accounted
    assert buffer.held == set()


async def test_a_prompt_that_kills_engines_is_dropped_after_some_attempts(monkeypatch, tmp_path):
    def script(request, version):
        return ScriptedAnswer(die="poisoned") if request.id.startswith("0-") else ScriptedAnswer(response=[5])

    buffer, engines = buffer_of(3), Engines(script)
    options = {"max_attempts": 2, "restarts": 5, "groups_in_flight": 1}
    async with working(monkeypatch, tmp_path, buffer, engines, **options):
        await buffer.stored(2)
    assert dict(buffer.ledger.account.groups_dropped) == {"engine_failed": 1}
    assert len(engines) == 3


async def test_a_request_that_every_engine_would_refuse_ends_the_worker_and_restarts_nothing(monkeypatch, tmp_path):
    buffer, engines = buffer_of(2), Engines(lambda request, version: ScriptedAnswer(error="too long"))
    async with working(monkeypatch, tmp_path, buffer, engines) as (_, run):
        with pytest.raises(RequestRefused, match="too long"):
            await asyncio.wait_for(run, 5)
    assert len(engines) == 1


async def test_held_out_prompts_are_answered_once_the_engine_is_back(monkeypatch, tmp_path):
    buffer, engines = buffer_of(1), Engines(writes(20), starts=[0, 5])
    options = {"sampling": SamplingConfig(max_new_tokens=500)}
    async with working(monkeypatch, tmp_path, buffer, engines, **options) as (worker, _):
        await worker.drain()
        engines[0].die("killed")
        await asyncio.sleep(0.1)
        answered = await worker.answer(make_prompts(3), 0, 1)
        assert [one.group_id for one in answered] == [0, 1, 2]
    assert len(engines) == 2
