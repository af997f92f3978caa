"""Store servers that join from the hosts of rollout workers, and leave."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

import pytest

from asyncrl.core.errors import DeadlineError, ReplayBufferError, UnknownGroup, VersionTooOld, WireError
from asyncrl.core.types import Lease
from buffer import BufferConfig, Durability, StoresOn, make_keys
from buffer.client import ClientSocket
from buffer.commands import Put
from buffer.encoding import group_frames
from buffer.keys import BufferRole, client_keys
from buffer.operations import Fetch, PutPayload, Remove
from buffer.server import StoreServer
from buffer.sockets import folder_of, make_socket_folder, remove_socket_folder
from buffer.store_links import StoreLinks
from tests.support.buffer_groups import AnyRole, Running, prompt, rollout, running

ON_HOSTS = {"stores_on": StoresOn.hosts}


@dataclass
class Hosts:
    """A buffer with store servers on this event loop. Each store server acts as the store of another host."""

    run: Running
    control: AnyRole
    folder: str
    stores: dict[str, StoreServer] = field(default_factory=dict)

    async def join(self, host: str) -> int:
        number = len(self.stores)
        self.stores[host] = StoreServer(BufferConfig(socket_folder=self.folder, epoch="run"), number=number)
        return await self.control.add_store(self.stores[host].address, host)

    def worker(self, host: str, **options) -> AnyRole:
        return self.run.client(host=host, **options)

    async def held_by(self, host: str) -> dict[int, set[int]]:
        """Return a dict from group to attempts: the payloads in a host's store. Looks only for the groups 0 to 7."""
        link = self.control.store_link(self.stores[host].address)
        held: dict[int, set[int]] = {}
        for group_id, attempt in product(range(8), range(3)):
            with suppress(UnknownGroup):
                await link.call(Fetch((group_id,), (attempt,)))
                held.setdefault(group_id, set()).add(attempt)
        return held

    def restart(self, host: str, **options) -> None:
        """Restart the store of a host at the same address. A store without a journal is empty after the restart."""
        number = [*self.stores].index(host)
        self.stores[host].close()
        self.stores[host] = StoreServer(BufferConfig(socket_folder=self.folder, epoch="run", **options), number=number)


Step = Callable[[], Awaitable[None]]


async def _go_on() -> None:
    """Do nothing."""


def close(store: StoreServer) -> None:
    """Close a store of `Hosts`, and remove the folder of its socket."""
    store.close()
    remove_socket_folder(folder_of(store.address))


@asynccontextmanager
async def hosts(*names: str, groups_per_step: int = 2, **options) -> AsyncIterator[Hosts]:
    async with running(groups_per_step=groups_per_step, **ON_HOSTS, **options) as run:
        of = Hosts(run, run.client(), make_socket_folder())
        try:
            for name in names:
                await of.join(name)
            yield of
        finally:
            for store in of.stores.values():
                close(store)


async def test_a_group_stays_on_the_host_of_its_worker_until_its_batch_is_committed():
    async with hosts("a", "b", groups_per_step=4) as of:
        a, b = of.worker("a"), of.worker("b")
        await of.control.enqueue([prompt(i) for i in range(4)])
        first, second = await a.lease(0, 2), await b.lease(0, 2)
        await asyncio.gather(*(a.put(rollout(lease)) for lease in first), *(b.put(rollout(lease)) for lease in second))
        assert set(await of.held_by("a")) == {lease.prompt.group_id for lease in first}
        assert set(await of.held_by("b")) == {lease.prompt.group_id for lease in second}
        ids = [group.group_id for group in (await of.control.plan(0)).groups]
        fetched = await of.control.fetch(ids)
        assert [group.group_id for group in fetched] == ids
        await of.control.commit(0)
        async with asyncio.timeout(10):
            # wait, because the server answers the commit before the stores drop the groups
            while await of.held_by("a") or await of.held_by("b"):
                await of.control.stats()


async def test_a_group_goes_to_another_store_if_the_store_of_its_host_is_full():
    async with hosts("a", "b", max_stored_bytes=1500, max_lag=1) as of:
        a = of.worker("a")
        await of.control.enqueue([prompt(i) for i in range(2)])
        for lease in await a.lease(0, 2):
            await a.put(rollout(lease, num_tokens=50))
        assert (len(await of.held_by("a")), len(await of.held_by("b"))) == (1, 1)


async def test_a_store_is_requested_for_a_host_when_its_first_worker_enters():
    async with hosts() as of:
        waiting = asyncio.ensure_future(of.control.store_wanted(()))
        await of.control.stats()
        assert not waiting.done()
        await of.worker("a").enter()
        assert await waiting == "a"
        waiting = asyncio.ensure_future(of.control.store_wanted({"a"}))
        await of.worker("a").enter()
        await of.worker("b").enter()
        assert await waiting == "b"


async def test_a_put_waits_until_a_store_has_joined():
    async with hosts() as of:
        a = of.worker("a")
        await of.control.enqueue([prompt(0)])
        [lease] = await a.lease(0, 1)
        putting = asyncio.ensure_future(a.put(rollout(lease)))
        await of.control.stats()
        assert not putting.done()
        await of.join("a")
        await putting
        assert set(await of.held_by("a")) == {0}


async def test_the_groups_of_a_lost_store_are_generated_again_and_its_workers_use_other_stores():
    async with hosts("a", "b", max_lag=2) as of:
        a, b = of.worker("a"), of.worker("b")
        await of.control.enqueue([prompt(i) for i in range(4)])
        for lease in await a.lease(0, 3):
            await a.put(rollout(lease))
        [last] = await b.lease(0, 1)
        await b.put(rollout(last))
        assert [group.group_id for group in (await of.control.plan(0)).groups] == [0, 1]
        of.stores["a"].close()
        assert await of.control.drop_store(0) == 1
        assert await of.control.drop_store(0) == 0
        assert (await of.control.stats()).tokens_dropped == {"store_lost": 5}
        with pytest.raises(UnknownGroup, match=r"group 0 are lost: store 0 of host a at ipc://.* is lost"):
            await of.control.fetch([0, 1])
        [again] = await a.lease(0, 1)
        assert (again.prompt.group_id, again.attempt) == (2, 1)
        await a.put(rollout(again))
        assert set(await of.held_by("b")) == {2, 3}
        assert (await of.control.commit(0)).tokens_trained == 10, "a fetched batch must count as trained"


async def test_a_batch_whose_store_died_before_the_fetch_is_planned_again_from_other_groups():
    async with hosts("a", "b", max_lag=2) as of:
        a, b = of.worker("a"), of.worker("b")
        await of.control.enqueue([prompt(i) for i in range(6)])
        for lease in await a.lease(0, 1):
            await a.put(rollout(lease))
        for lease in await b.lease(0, 4):
            await b.put(rollout(lease))
        assert [group.group_id for group in (await of.control.plan(0)).groups] == [0, 1]
        assert [group.group_id for group in (await of.control.plan(1)).groups] == [2, 3]
        of.stores["a"].close()
        assert await of.control.drop_store(0) == 0, "a planned group must not be queued again"
        with pytest.raises(UnknownGroup, match=r"group 0 are lost: store 0 of host a"):
            await of.control.fetch([0, 1])
        await of.control.lose([0, 4, 99])
        assert (await of.control.stats()).tokens_dropped == {"store_lost": 5}, "only group 0 is lost"
        first = [group.group_id for group in (await of.control.plan(0)).groups]
        assert set(first) < {1, 2, 3, 4}
        assert [group.group_id for group in await of.control.fetch(first)] == first
        [again] = await a.lease(0, 1)
        assert (again.prompt.group_id, again.attempt) == (0, 1)
        await a.put(rollout(again))
        assert (await of.control.commit(0)).tokens_trained == 10
        await of.control.lose(first)  # these groups are consumed, so the late report has no effect
        second = [group.group_id for group in (await of.control.plan(1)).groups]
        assert set(second) < {0, 1, 2, 3, 4} - set(first)
        stats = await of.control.commit(1)
        assert (stats.tokens_trained, stats.tokens_dropped) == (20, {"store_lost": 5})


async def test_if_a_store_with_groups_of_two_batches_dies_each_batch_is_planned_once_more():
    """After two batches are planned, a store dies. It held one group of each batch.

    The learner reports only the lost group of the first batch.
    """
    async with hosts("a", "b", max_lag=3) as of:
        a, b = of.worker("a"), of.worker("b")
        await of.control.enqueue([prompt(i) for i in range(8)])
        for worker in (a, b, a, b, b, b):  # groups 0 and 2 are stored on host a
            [lease] = await worker.lease(0, 1)
            await worker.put(rollout(lease))
        for version in range(2):
            planned = [group.group_id for group in (await of.control.plan(version)).groups]
            assert planned == [2 * version, 2 * version + 1]
        of.stores["a"].close()
        await of.control.drop_store(0)
        await of.control.lose([0])
        for version in range(2):
            planned = [group.group_id for group in (await of.control.plan(version)).groups]
            assert {*planned} <= {1, 3, 4, 5}
            assert [group.group_id for group in await of.control.fetch(planned)] == planned
        assert (await of.control.stats()).tokens_dropped == {"store_lost": 10}


async def test_a_put_goes_to_another_store_if_its_store_is_dropped_during_the_transfer():
    async with hosts("a", "b") as of:
        a = of.worker("a", request_timeout_s=0.5)
        await of.control.enqueue([prompt(0)])
        [lease] = await a.lease(0, 1)
        of.stores["a"].close()
        putting = asyncio.ensure_future(a.put(rollout(lease)))
        while not of.run.server.service.ledger.groups[0].num_bytes:
            await of.control.stats()
        await of.control.drop_store(0)
        await putting
        assert set(await of.held_by("b")) == {0}


async def test_a_put_to_a_store_that_does_not_answer_ends_at_its_deadline():
    async with hosts("a") as of:
        a = of.worker("a", request_timeout_s=0.3)
        await of.control.enqueue([prompt(0)])
        [lease] = await a.lease(0, 1)
        of.stores["a"].close()
        with pytest.raises(DeadlineError, match="put"):
            await a.put(rollout(lease))


def hold_payloads(worker: AnyRole, monkeypatch, *, before: Step = _go_on, after: Step = _go_on) -> None:
    """Call ``before()`` before each transfer of a payload from the worker to a store, and ``after()`` after it."""
    send = worker.connection.call_with_payload

    async def call_with_payload(operation, *arguments, **options):
        is_payload = isinstance(operation, PutPayload)
        await (before() if is_payload else _go_on())
        answer = await send(operation, *arguments, **options)
        await (after() if is_payload else _go_on())
        return answer

    monkeypatch.setattr(worker.connection, "call_with_payload", call_with_payload)


async def test_a_worker_sends_a_payload_again_if_the_store_lost_it_before_the_put_is_reported(monkeypatch):
    async with hosts("a") as of:
        a = of.worker("a")
        await of.control.enqueue([prompt(0)])
        [lease] = await a.lease(0, 1)
        reserved_in, num_sent = of.run.server.service.ledger.groups.leases.reserved_in, 0

        async def restart_once() -> None:
            nonlocal num_sent
            num_sent += 1
            if num_sent == 1:
                assert reserved_in(0) == [(0, 0)]
                of.restart("a")
                while reserved_in(0):  # wait until the store reports that it is empty
                    await of.control.stats()

        hold_payloads(a, monkeypatch, after=restart_once)
        await a.put(rollout(lease))
        [group] = await of.control.fetch([0])
        assert (group.group_id, group.attempt, num_sent) == (0, 0, 2)
        assert (await of.control.stats()).tokens_dropped == {}


@asynccontextmanager
async def put_while_its_store_restarts(monkeypatch, when: str):
    """Put a group, and restart its store. ``when`` says at which moment: ``before`` or ``after`` the payload is sent.

    The worker reports the put to the ledger. Only then does the restarted store report which groups it lacks.
    """
    reconcile, answered, asked, reported = StoreLinks.reconcile, [], asyncio.Event(), asyncio.Event()

    async def answer(*arguments) -> tuple[int, ...]:
        missing = await reconcile(*arguments)
        answered.append(missing)
        if len(answered) > 1:  # the first answer was for the first start of the store
            asked.set()
            await reported.wait()
        return missing

    async def restart() -> None:
        of.restart("a")
        await asked.wait()

    monkeypatch.setattr(StoreLinks, "reconcile", answer)
    async with hosts("a") as of:
        a = of.worker("a")
        await of.control.enqueue([prompt(0)])
        [lease] = await a.lease(0, 1)
        hold_payloads(a, monkeypatch, **{when: restart})
        await a.put(rollout(lease))
        reported.set()
        yield of, a


async def test_a_payload_that_arrives_while_its_store_lists_its_groups_does_not_count_as_lost(monkeypatch):
    async with put_while_its_store_restarts(monkeypatch, "before") as (of, _):
        for _ in range(10):
            await of.control.stats()
        assert (await of.control.stats()).tokens_dropped == {}
        [group] = await of.control.fetch([0])
        assert (group.group_id, group.attempt) == (0, 0)


async def test_a_payload_that_is_lost_while_its_put_is_reported_is_generated_again(monkeypatch):
    async with put_while_its_store_restarts(monkeypatch, "after") as (of, a):
        [again] = await asyncio.wait_for(a.lease(0, 1), 20)
        assert (again.prompt.group_id, again.attempt) == (0, 1)
        assert (await of.control.stats()).tokens_dropped == {"store_lost": 5}


async def send_and_fall_silent(of: Hosts, worker: AnyRole, *, num_tokens: int = 50) -> Lease:
    """Let a worker send a payload to a store, and become silent before it reports the payload to the ledger."""
    [lease] = await worker.lease(0, 1)
    sent = asyncio.Event()

    async def stop() -> None:
        sent.set()
        await asyncio.Event().wait()

    with pytest.MonkeyPatch.context() as patch:
        hold_payloads(worker, patch, after=stop)
        putting = asyncio.ensure_future(worker.put(rollout(lease, num_tokens=num_tokens)))
        await sent.wait()
        putting.cancel()
    assert (await of.held_by("a"))[lease.prompt.group_id] == {lease.attempt}
    return lease


ENDS = ["expired", "silent", "buried", "released", "too old", "rewound"]


@pytest.mark.parametrize("end", ENDS)
async def test_a_store_drops_the_payload_of_an_attempt_that_ended(end: str):
    """The store has room for one payload. So it can store the next payload only if it drops the old payload."""
    times = {"lease_s": 0.5 if end == "expired" else 600.0, "heartbeat_s": 0.1 if end == "silent" else 5.0}
    async with hosts("a", groups_per_step=1, max_stored_bytes=1200, max_lag=2, **times) as of:
        a, other = of.worker("a"), of.worker("a")
        await of.control.enqueue([prompt(0)])
        lease = await send_and_fall_silent(of, a)
        if end == "buried":
            await of.control.bury(await a.enter())
        elif end == "silent":
            await a.connection.close()  # the server does not learn of this, and gets no heartbeats any more
        elif end == "released":
            await a.release(lease, num_tokens=50, reason="failed")
        elif end == "too old":
            old = replace(rollout(lease).summary, oldest_version=-1)
            with pytest.raises(VersionTooOld):
                of.run.server.service.ledger.apply(Put(summary=old))
        elif end == "rewound":
            await of.control.rewind(0, incarnation=1)
            other.connection.incarnation = 1
        [again] = await asyncio.wait_for(other.lease(0, 1), 20)
        assert (again.prompt.group_id, again.attempt) == (0, 1)
        await asyncio.wait_for(other.put(rollout(again, num_tokens=50)), 20)
        assert await of.held_by("a") == {0: {1}}
        assert [group.attempt for group in await of.control.fetch([0])] == [1]


async def test_a_store_drops_the_payload_of_an_ended_attempt_that_it_reported_as_missing():
    """While a worker sends a payload, the store reports to the ledger that it does not have the payload.

    Then the worker is declared dead, and its attempt ends.
    """
    async with hosts("a", groups_per_step=1, max_stored_bytes=1200) as of:
        a, other = of.worker("a"), of.worker("a")
        await of.control.enqueue([prompt(0)])
        await send_and_fall_silent(of, a)
        of.run.server.service.lose_from_store(0, [0], stored=[], reserved=[(0, 0)])
        await of.control.bury(await a.enter())
        [again] = await other.lease(0, 1)
        await asyncio.wait_for(other.put(rollout(again, num_tokens=50)), 20)
        assert (await of.held_by("a"))[0] == {1}


async def test_a_store_discards_a_payload_that_arrives_after_its_attempt_ended():
    async with hosts("a", groups_per_step=1, max_stored_bytes=1200) as of:
        a, other = of.worker("a"), of.worker("a")
        await of.control.enqueue([prompt(0)])
        lease = await send_and_fall_silent(of, a)
        address, late = of.stores["a"].address, group_frames(rollout(lease, num_tokens=50))
        await of.control.bury(await a.enter())
        await of.control.stats()
        sender = of.worker("a").connection
        await sender.call_with_payload(PutPayload(0, 0), late, (0, 0), link=sender.store_link(address))
        assert await of.held_by("a") == {}
        [again] = await other.lease(0, 1)
        await asyncio.wait_for(other.put(rollout(again, num_tokens=50)), 20)


async def test_a_restarted_store_learns_which_attempts_have_ended(monkeypatch, tmp_path: Path):
    reconcile, post, answered = StoreLinks.reconcile, ClientSocket.post, []

    async def noted(*arguments) -> tuple[int, ...]:
        answered.append(await reconcile(*arguments))
        return answered[-1]

    def lose_removals(link, operation, *arguments) -> None:
        if not isinstance(operation, Remove):
            post(link, operation, *arguments)

    monkeypatch.setattr(StoreLinks, "reconcile", noted)
    on_disk = {"durability": Durability.disk, "directory": str(tmp_path)}
    async with hosts("a", groups_per_step=1, max_stored_bytes=1200) as of, asyncio.timeout(60):
        a, other = of.worker("a"), of.worker("a")

        async def restart() -> None:
            num_answered = len(answered)
            of.restart("a", **on_disk)
            while len(answered) == num_answered:
                await of.control.stats()

        await restart()
        await of.control.enqueue([prompt(0)])
        await send_and_fall_silent(of, a)
        with monkeypatch.context() as patch:
            patch.setattr(ClientSocket, "post", lose_removals)
            await of.control.bury(await a.enter())
            await of.control.stats()
        assert (await of.held_by("a")).keys() == {0}
        await restart()
        assert await of.held_by("a") == {}
        [again] = await other.lease(0, 1)
        await asyncio.wait_for(other.put(rollout(again, num_tokens=50)), 20)
        await restart()
        assert (await of.held_by("a")).keys() == {0}, "the stored attempt must stay"


async def test_a_requeued_group_accepts_no_payload_of_its_earlier_attempts():
    async with hosts("a", groups_per_step=1, max_lag=2) as of:
        a = of.worker("a")
        await of.control.enqueue([prompt(0)])
        [lease] = await a.lease(0, 1)
        await a.put(rollout(lease))
        await of.control.plan(0)
        await of.control.commit(0)
        await of.control.rewind(0, incarnation=1)
        await of.control.enqueue([prompt(0)])
        sender, late = of.worker("a"), group_frames(rollout(lease))
        link = sender.connection.store_link(of.stores["a"].address)
        await sender.connection.call_with_payload(PutPayload(0, 0), late, (0, 0), link=link)
        assert await of.held_by("a") == {}
        sender.connection.incarnation = 1
        [again] = await sender.lease(0, 1)
        await sender.put(rollout(again))
        assert (await of.held_by("a"))[0] == {1}


async def test_a_fetch_refuses_a_payload_that_was_changed_after_its_digest_was_computed(monkeypatch):
    async with hosts("a") as of:
        a = of.worker("a")
        await of.control.enqueue([prompt(0)])
        [lease] = await a.lease(0, 1)
        send = a.connection.call_with_payload

        async def damage(operation, payload, *arguments, **options):
            if isinstance(operation, PutPayload):
                *whole, last = payload
                payload = [*whole, bytes(last)[:-1] + bytes([bytes(last)[-1] ^ 1])]
            return await send(operation, payload, *arguments, **options)

        monkeypatch.setattr(a.connection, "call_with_payload", damage)
        await a.put(rollout(lease))
        with pytest.raises(WireError, match=r"the bytes of group 0 from the store at .* do not have the digest"):
            await of.control.fetch([0])


async def test_a_restarted_ledger_knows_its_stores_and_its_lost_stores(tmp_path: Path):
    options = {"durability": Durability.disk, "directory": str(tmp_path), "epoch": "run"}
    stores: dict[str, StoreServer] = {}
    async with hosts("a", "b", **options) as of:
        a, stores = of.worker("a"), dict(of.stores)
        await of.control.enqueue([prompt(i) for i in range(2)])
        for lease in await a.lease(0, 2):
            await a.put(rollout(lease))
        await of.control.drop_store(1)
        of.stores.clear()
    try:
        async with running(**ON_HOSTS, **options) as run:
            again = run.client()
            assert [(s["host"], s["is_gone"]) for s in (await again.inspect())["stores"]] == [("a", False), ("b", True)]
            assert await again.add_store(stores["a"].address, "a") == 0
            assert [group.group_id for group in await again.fetch([0, 1])] == [0, 1]
    finally:
        for store in stores.values():
            close(store)


async def test_stores_can_join_only_if_the_buffer_has_stores_on_hosts():
    async with running() as run:
        with pytest.raises(ReplayBufferError, match=r"set buffer\.stores_on=hosts"):
            await run.client().add_store("tcp://127.0.0.1:1", "a")
    with pytest.raises(ValueError, match=r"buffer\.num_store_servers must be 0"):
        BufferConfig(**ON_HOSTS, num_store_servers=1)


async def test_a_store_server_works_without_the_secret_key_of_the_ledger(tmp_path: Path):
    make_keys(tmp_path / "all")
    there = tmp_path / "host"
    there.mkdir(mode=0o700)
    for name in ("store.json", "rollout.json"):
        (there / name).touch(mode=0o600)
        (there / name).write_text((tmp_path / "all" / name).read_text())

    def keys_of(role: BufferRole):
        return {"keys": client_keys(tmp_path / "all", role)}

    async with running(**ON_HOSTS, keys=str(tmp_path / "all"), epoch="run") as run:
        store = StoreServer(BufferConfig(keys=str(there), epoch="run"), number=0)
        control = run.client(**keys_of(BufferRole.controller))
        worker = run.client(host="a", **keys_of(BufferRole.rollout))
        assert await control.add_store(store.address, "a") == 0
        await control.enqueue([prompt(0)])
        [lease] = await worker.lease(0, 1)
        await worker.put(rollout(lease))
        [group] = await control.fetch([0])
        assert group.group_id == 0
        store.close()


async def test_a_ledger_that_restarts_after_a_rewind_has_the_same_groups(tmp_path: Path):
    options = {"durability": Durability.disk, "directory": str(tmp_path), "epoch": "run", "max_lag": 2}
    async with hosts("a", **options) as of:
        a = of.worker("a")
        await of.control.enqueue([prompt(i) for i in range(8)])
        for lease in await a.lease(0, 5):
            if lease.prompt.group_id != 4:
                await a.put(rollout(lease))
        for version in range(2):
            await of.control.plan(version)
        await of.control.commit(0)
        await of.control.rewind(0, incarnation=1)
        stats, store = await of.control.stats(), of.stores.pop("a")
    try:
        async with running(**ON_HOSTS, **options) as run:
            assert (await run.client().stats()).groups == stats.groups
    finally:
        close(store)
