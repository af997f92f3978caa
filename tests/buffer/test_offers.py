"""The log of weight offers: the version that each engine should load, and the version that each engine serves."""

import asyncio
from dataclasses import replace

import pytest

from asyncrl.core.errors import VersionTooNew, WeightsError, WeightsGone, WireError
from buffer import BufferClient, BufferConfig, SyncBufferClient
from buffer.commands import Enqueue, Leased, LeaseGroups
from buffer.encoding import Message
from buffer.offers import OfferLog
from buffer.operations import NextOffer, Offer, Offered, Pin
from buffer.service import BufferService
from tests.support.buffer_groups import AnyRole, fall_silent, prompt, rollout, running
from tests.support.offers import bare_offer

ENGINES = [bytes([number]) for number in range(3)]


def log_of(*versions: int) -> OfferLog:
    log = OfferLog()
    for version in versions:
        log.append(bare_offer(version))
    return log


def shown(log: OfferLog, learner_version: int, engine: bytes = b"", at_least: int = 0) -> int | None:
    offer = log.next_for(engine, at_least, learner_version)
    return None if offer is None else offer.version


async def commit_step(control: AnyRole, version: int) -> None:
    await control.enqueue([prompt(100 + version)])
    [lease] = await control.lease(version, 1)
    await control.put(rollout(lease))
    await control.plan(version)
    await control.commit(version)


def test_the_log_offers_the_newest_committed_version_and_forgets_older_versions():
    log = log_of(0, 1, 2, 4)
    assert [shown(log, version) for version in (0, 1, 3, 4)] == [0, 1, 2, 4]
    assert log.oldest() == 4
    assert shown(OfferLog(), 9) is None
    assert shown(log_of(3), 2) is None


def test_the_first_engines_keep_the_pinned_version_and_the_others_load_newer_versions():
    log = log_of(0)
    log.pin(2, 2)
    assert [shown(log, 1, engine) for engine in ENGINES] == [0, 0, 0], "the pinned version has not been offered yet"
    for version in (1, 2, 3, 4):
        log.append(bare_offer(version))
    assert [shown(log, 4, engine, at_least=1) for engine in ENGINES] == [2, 2, 4]
    assert log.oldest() == 2, "the log must keep version 2 for the pinned engines"
    for engine in ENGINES[:2]:
        assert shown(log, 4, engine, at_least=1) == 2, "a repeated request must get the same version"
        log.loaded(engine, 2, name=str(engine[0]))
        assert shown(log, 9, engine, at_least=3) is None
    assert log.pinned() == ["0", "1"]
    assert log.oldest() == 4, "every pinned engine serves version 2 already"
    log.unpin()
    assert [shown(log, 4, engine, at_least=3) for engine in ENGINES[:2]] == [4, 4]


def test_another_engine_replaces_a_lost_pinned_engine_while_the_version_is_offered():
    log = log_of(0)
    log.pin(1, 1)
    log.append(bare_offer(1))
    log.append(bare_offer(2))
    assert shown(log, 2, ENGINES[0]) == 1
    log.forget(ENGINES[0])
    assert shown(log, 2, ENGINES[1]) == 1
    log.loaded(ENGINES[1], 1, name="one")
    assert shown(log, 2, ENGINES[2]) == 2
    assert log.pinned() == ["one"]
    assert shown(log, 2, ENGINES[1], at_least=0) == 2, "a restarted engine must get the newest version"
    log.loaded(ENGINES[1], 2, name="one")
    assert log.pinned() == []


def test_a_second_offer_of_a_version_replaces_the_first_offer():
    log = log_of(1)
    again = replace(bare_offer(1), manifest="again")
    log.append(again)
    assert log.next_for(b"", 0, 1) == again


def test_the_log_stores_the_current_offer_and_a_limited_number_of_newer_offers():
    log = log_of(0)
    assert shown(log, 0) == 0
    for version in range(1, 1000):
        log.append(bare_offer(version))
    assert shown(log, 936) == 0, "the log must keep 64 versions"
    assert shown(log, 937) == 937
    assert shown(log, 999) == 999


def test_the_log_returns_the_oldest_served_version_when_enough_engines_have_loaded():
    log = OfferLog()
    assert log.served(0) is None
    for engine, version, took_s in zip(ENGINES, (4, 5, 4), (1.0, 9.0, 2.0), strict=True):
        assert log.served(3) is None
        log.loaded(engine, version, took_s)
    assert log.served(3) == (4, 2.0)
    assert log.served(4) is None
    log.loaded(ENGINES[0], 4, 7.0)  # a repeated report has no effect
    assert log.served(3) == (4, 2.0)
    log.loaded(ENGINES[2], 6, 3.0)
    log.forget(ENGINES[0])
    assert log.served(2) == (5, 9.0)
    log.forget(ENGINES[0])
    log.forget(ENGINES[1])
    assert log.served(1) == (6, 3.0)


async def test_an_engine_is_offered_weights_after_their_commit_and_skips_to_the_newest_version():
    async with running(groups_per_step=1, max_lag=2) as run:
        worker, laggard, control = run.client(), run.client(), run.client()
        rank = SyncBufferClient(BufferClient(run.server.address, request_timeout_s=5.0))
        assert await asyncio.to_thread(rank.offer, bare_offer(0)) == 0
        assert await worker.next_offer(-1) == await laggard.next_offer(-1) == bare_offer(0)
        waiting = asyncio.ensure_future(worker.next_offer(0))
        await asyncio.to_thread(rank.offer, bare_offer(1))
        await control.stats()
        assert not waiting.done(), "an offer must wait for the commit of its step"
        await commit_step(control, 0)
        assert await asyncio.wait_for(waiting, 5) == bare_offer(1)
        await commit_step(control, 1)
        assert await asyncio.to_thread(rank.offer, bare_offer(2)) == 2
        assert (await laggard.next_offer(0)).version == 2
        rank.close()


async def test_a_pinned_engine_gets_no_newer_version_until_the_controller_unpins_it():
    async with running(groups_per_step=1, max_lag=4) as run:
        control = run.client()
        pinned, other = run.client(name="3"), run.client(name="5")
        waiting = asyncio.ensure_future(control.pin(1, 1))
        await control.stats()
        for version in range(3):
            await control.offer(bare_offer(version))
            await commit_step(control, version)
        assert (await pinned.next_offer(-1)).version == 1
        assert (await other.next_offer(-1)).version == 2
        assert not waiting.done(), "no engine serves the pinned version yet"
        await pinned.loaded(1, 0.5)
        assert await asyncio.wait_for(waiting, 5) == {"3"}
        gone = asyncio.ensure_future(control.pin(1, 1, {"3"}))
        next_offer = asyncio.ensure_future(pinned.next_offer(1))
        await control.stats()
        assert not next_offer.done()
        await control.unpin()
        assert (await asyncio.wait_for(next_offer, 5)).version == 2
        await pinned.loaded(2, 0.5)
        assert await asyncio.wait_for(gone, 5) == set()


async def test_a_pin_raises_weights_gone_if_no_engine_can_serve_its_version():
    async with running(groups_per_step=1, max_lag=4, heartbeat_s=0.1) as run:
        control, worker, other = run.client(), run.client(name="0"), run.client(name="1")
        waiting = asyncio.ensure_future(control.pin(1, 1))
        for version in range(2):
            await control.offer(bare_offer(version))
            await commit_step(control, version)
        await worker.next_offer(0)
        await worker.loaded(1, 0.0)
        assert await waiting == {"0"}
        await control.offer(bare_offer(2))
        assert (await other.next_offer(0)).version == 2
        waiting = asyncio.ensure_future(control.pin(1, 1, {"0"}))
        await worker.close()
        with pytest.raises(WeightsGone, match="policy version 1 is no longer offered"):
            await asyncio.wait_for(waiting, 5)


async def test_the_controller_gets_one_answer_for_each_version_that_all_engines_serve():
    async with running(groups_per_step=1, max_lag=4) as run:
        control, workers = run.client(), [run.client() for _ in range(3)]
        for version in range(2):
            await control.offer(bare_offer(version))
            waiting = asyncio.ensure_future(control.served(version - 1, 3))
            for number, worker in enumerate(workers):
                await control.stats()
                assert not waiting.done()
                offer = await worker.next_offer(version - 1)
                await worker.loaded(offer.version, 0.5 + number)
            assert await asyncio.wait_for(waiting, 5) == (version, 2.5)
            await commit_step(control, version)


async def test_served_ignores_engines_that_left_or_are_silent_until_their_next_heartbeat():
    async with running(groups_per_step=1, max_lag=4, heartbeat_s=0.1) as run:
        control, leaver, hung, worker = (run.client() for _ in range(4))
        await control.offer(bare_offer(0))
        for each in (leaver, hung, worker):
            await each.next_offer(-1)
            await each.loaded(0, 0.0)
        await commit_step(control, 0)
        await worker.loaded(1, 0.0)
        with pytest.MonkeyPatch.context() as silence:
            fall_silent(hung, silence)
            waiting = asyncio.ensure_future(control.served(0, 1))
            await leaver.close()
            assert (await asyncio.wait_for(waiting, 5))[0] == 1
        async with asyncio.timeout(20):
            while (await control.served(-1, 2))[0] != 0:  # until `hung` sends its next heartbeat
                pass


async def test_a_failed_publish_raises_an_error_in_engines_and_controller():
    async with running(groups_per_step=1) as run:
        worker, control = run.client(), run.client()
        rank = SyncBufferClient(BufferClient(run.server.address, request_timeout_s=5.0))
        waiting = [asyncio.ensure_future(call) for call in (worker.next_offer(-1), control.served(-1, 1))]
        await asyncio.gather(worker.stats(), control.stats())
        await asyncio.to_thread(rank.publish_failed, "the publish of version 7 failed on rank 1: " + "x" * 30_000)
        for call in (*waiting, worker.next_offer(-1), control.served(-1, 1)):
            with pytest.raises(WeightsError, match=r"version 7 failed on rank 1: x"):
                await call
        await commit_step(control, 0)
        rank.close()


async def test_clients_wait_for_weights_longer_than_the_servers_request_timeout():
    async with running(request_timeout_s=0.2) as run:
        worker, control = run.client(), run.client()
        waiting = [asyncio.ensure_future(call) for call in (worker.next_offer(-1), control.served(-1, 1))]
        await asyncio.sleep(0.5)
        await control.offer(bare_offer(0))
        assert await asyncio.wait_for(waiting[0], 5) == bare_offer(0)
        await worker.loaded(0, 0.25)
        assert await asyncio.wait_for(waiting[1], 5) == (0, 0.25)


async def test_invalid_offers_pins_versions_and_load_times_are_refused():
    async with running() as run:
        client = run.client()
        with pytest.raises(VersionTooNew):
            await client.loaded(3, 0.0)
        with pytest.raises(WireError, match=r"Expected `float` >= 0.0"):
            await client.loaded(0, float("nan"))
        for known in ("3", (3,)):
            with pytest.raises(WireError, match=r"Expected `(array|str)`, got `(str|int)`"):
                await client.connection.link.call(Pin(0, 1, known))
        with pytest.raises(WireError, match="missing required field `digest`"):
            await client.connection.link.call(Offer(offer={"version": 0, "manifest": ""}))


async def test_the_first_workers_can_lease_before_the_last_workers_get_a_new_offer():
    told: list[bytes] = []
    leased: list[bytes] = []
    all_told = asyncio.Event()

    def send(client: bytes, message: Message) -> None:
        if isinstance(message.body, Leased):
            leased.append(client)
        if isinstance(message.body, Offered):
            told.append(client)
            if len(told) == len(workers):
                all_told.set()

    workers = [b"worker-%d" % number for number in range(200)]
    service = BufferService(BufferConfig(), groups_per_step=1, send=send)
    service.handle(Message(client=b"control", request_id=1, body=Enqueue((1,), (0,))))
    for worker in workers:
        service.handle(Message(client=worker, request_id=1, body=NextOffer(0)))
    service.handle(Message(client=b"learner", request_id=1, body=Offer(offer=bare_offer(0))))
    assert 0 < len(told) < len(workers)
    lease = LeaseGroups(engine_version=0, max_groups=1)
    service.handle(Message(client=told[0], request_id=2, body=lease))
    service.settle()
    assert leased == [workers[0]]
    await all_told.wait()
    assert told == workers
    service.close()
