"""The stores on the hosts of rollout workers: on which hosts they start, and what happens when a store dies."""

import asyncio
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, ActorUnschedulableError, RaySystemError

from asyncrl.config import PlacementConfig, RunConfig, keeps_stores_on_hosts, num_store_servers
from asyncrl.core.errors import DeadlineError, WorkerDiedError
from asyncrl.run import host_stores
from asyncrl.run.host_stores import HostStores, config_of_node
from buffer import BufferConfig, StoresOn
from rollout_fleet.config import RolloutFleetConfig
from tests.support.ray_cluster import raised_by_ray

pytestmark = [pytest.mark.timeout(30), pytest.mark.usefixtures("virtual_time")]


class Control:
    """Stands in for the controller's client. ``hosts`` is a queue, into which a test puts the hosts of new workers."""

    def __init__(self) -> None:
        self.hosts: asyncio.Queue[str] = asyncio.Queue()
        self.stores: list[tuple[str, str]] = []
        self.dropped: asyncio.Queue[int] = asyncio.Queue()
        self.is_closed = False

    async def store_wanted(self, known) -> str:
        while (host := await self.hosts.get()) in known:
            pass
        return host

    async def add_store(self, address: str, host: str) -> int:
        self.stores.append((address, host))
        return len(self.stores) - 1

    async def drop_store(self, store: int) -> int:
        self.dropped.put_nowait(store)
        return 3

    async def close(self) -> None:
        self.is_closed = True


class Actor:
    """Stands in for the actor of a `NodeStore`. ``events`` is a queue of restarts of the store, or of a final error."""

    def __init__(self, host: str, number: int) -> None:
        self.host, self.number = host, number
        self.events: asyncio.Queue = asyncio.Queue()
        self.was_stopped = False
        for name in ("start", "next_restart", "stop"):
            call = getattr(self, f"_{name}")
            setattr(self, name, SimpleNamespace(remote=lambda call=call: asyncio.ensure_future(call())))

    async def _start(self) -> str:
        return f"tcp://{self.host}:{self.number}"

    async def _next_restart(self) -> str:
        event = await self.events.get()
        if isinstance(event, Exception):
            raise event
        return event

    async def _stop(self) -> None:
        self.was_stopped = True


class Placed:
    def __init__(self, monkeypatch) -> None:
        self.control, self.actors, self.said, self.killed, self.dead_nodes = Control(), {}, [], [], set()
        monkeypatch.setattr(host_stores.ray, "kill", self.killed.append)
        self.stores = HostStores(self.control, make=self._make, start_timeout_s=10.0, restarts=1, say=self.said.append)

    def _make(self, node_id: str, number: int) -> Actor:
        if node_id in self.dead_nodes:
            raise ActorUnschedulableError("the node does not exist any more")
        self.actors[node_id] = Actor(node_id, number)
        return self.actors[node_id]

    async def enter(self, *hosts: str) -> None:
        for host in hosts:
            self.control.hosts.put_nowait(host)
        await asyncio.sleep(0.1)


@pytest.fixture
async def placed(monkeypatch):
    placed = Placed(monkeypatch)
    placed.watching = asyncio.ensure_future(placed.stores.watch())
    yield placed
    placed.watching.cancel()
    await asyncio.gather(placed.watching, return_exceptions=True)


async def test_each_host_with_workers_gets_one_store_even_if_it_joins_later(placed):
    await placed.enter("a", "b", "a")
    await placed.enter("c")
    assert placed.control.stores == [("tcp://a:0", "a"), ("tcp://b:1", "b"), ("tcp://c:2", "c")]


async def test_a_restart_of_a_store_server_is_counted_and_reported(placed):
    await placed.enter("a")
    placed.actors["a"].events.put_nowait("store server 0 died; it was started again")
    await asyncio.sleep(0.1)
    assert placed.stores.num_restarts == 1
    assert placed.said[-1] == "store server 0 died; it was started again"
    assert placed.control.dropped.empty()


async def test_a_store_of_a_dead_node_is_dropped_and_the_run_continues_even_without_stores(placed):
    await placed.enter("a", "b")
    for number, host in enumerate("ab"):
        placed.dead_nodes.add(host)
        placed.actors[host].events.put_nowait(ActorDiedError())
        assert await placed.control.dropped.get() == number
    await asyncio.sleep(0.1)
    words = "store server 1 is gone, 3 groups are generated again: its actor or its node has died"
    assert words in placed.said
    assert not placed.watching.done()


async def test_a_store_whose_actor_died_is_restarted_up_to_the_limit(placed):
    await placed.enter("a")
    for number in range(2):
        placed.actors["a"].events.put_nowait(ActorDiedError())
        assert await placed.control.dropped.get() == number
        await asyncio.sleep(0.1)
    await placed.enter("a", "b")
    assert [host for _, host in placed.control.stores] == ["a", "a", "b"]


async def test_a_store_without_restarts_is_dropped_and_the_loss_of_the_last_store_ends_the_run(placed):
    await placed.enter("a", "b")
    placed.actors["a"].events.put_nowait(raised_by_ray(WorkerDiedError("buffer.restarts=3 are used up: it died\nlog")))
    await asyncio.sleep(0.1)
    assert placed.said[-1].endswith("3 groups are generated again: buffer.restarts=3 are used up: it died")
    placed.actors["b"].events.put_nowait(raised_by_ray(WorkerDiedError("store server 1 died")))
    with pytest.raises(ExceptionGroup) as caught:
        await placed.watching
    assert caught.group_contains(WorkerDiedError, match=r"no store server .*: store server 1 died")


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), RaySystemError("no memory"), KeyError("store")])
async def test_any_error_of_a_store_ends_only_this_store(placed, error):
    await placed.enter("a", "b")
    placed.actors["a"].events.put_nowait(error)
    assert await placed.control.dropped.get() == 0
    await asyncio.sleep(0.1)
    assert not placed.watching.done()
    assert [host for _, host in placed.control.stores] == ["a", "b", "a"], "another store must be started on the host"
    placed.actors["b"].events.put_nowait("store server 1 was started again")
    await asyncio.sleep(0.1)
    assert placed.said[-1] == "store server 1 was started again"


async def test_a_dead_store_is_dropped_as_soon_as_a_silent_buffer_answers_again(placed):
    await placed.enter("a", "b")
    drop, failures = placed.control.drop_store, [DeadlineError("no answer within 30.0 s")] * 2

    async def drop_late(store):
        if failures:
            raise failures.pop()
        return await drop(store)

    placed.control.drop_store = drop_late
    placed.actors["a"].events.put_nowait(raised_by_ray(WorkerDiedError("store server 0 died")))
    assert await placed.control.dropped.get() == 0
    assert (failures, placed.watching.done()) == ([], False)


async def test_stores_are_stopped_and_killed_at_the_end(placed):
    await placed.enter("a", "b")
    placed.watching.cancel()
    await asyncio.gather(placed.watching, return_exceptions=True)
    await placed.stores.stop()
    assert [actor.was_stopped for actor in placed.actors.values()] == [True, True]
    assert placed.killed == list(placed.actors.values())
    assert placed.control.is_closed


@pytest.mark.parametrize(
    ("host", "advertised", "expected"),
    [
        ("127.0.0.1", "", ("127.0.0.1", "")),
        ("10.0.0.1", "", ("10.0.0.2", "")),
        ("eth0", "", ("eth0", "")),
        ("10.0.0.1", "192.0.2.1", ("10.0.0.2", "")),
        ("eth0", "192.0.2.1", ("eth0", "10.0.0.2")),
    ],
)
def test_a_store_listens_on_the_address_of_its_node(host: str, advertised: str, expected: tuple[str, str]):
    config = BufferConfig(host=host, advertised_host=advertised, port=5555, epoch="run", stores_on=StoresOn.hosts)
    own = config_of_node(config, "10.0.0.2")
    assert (own.host, own.advertised_host) == expected
    assert (own.port, own.epoch) == (0, "run")


def test_runs_on_several_nodes_have_stores_on_hosts_by_default():
    several = PlacementConfig(num_nodes=2)
    assert not keeps_stores_on_hosts(RunConfig())
    assert keeps_stores_on_hosts(RunConfig(placement=several))
    assert keeps_stores_on_hosts(RunConfig(buffer=BufferConfig(stores_on=StoresOn.hosts)))
    assert not keeps_stores_on_hosts(RunConfig(placement=several, buffer=BufferConfig(num_store_servers=2)))
    assert not keeps_stores_on_hosts(RunConfig(placement=several, buffer=BufferConfig(stores_on=StoresOn.ledger)))


@pytest.mark.parametrize(
    ("placement", "buffer", "most"),
    [
        ({"num_nodes": 1}, BufferConfig(), 0),
        ({"num_nodes": 1}, BufferConfig(num_store_servers=3), 3),
        ({"num_nodes": 1}, BufferConfig(stores_on=StoresOn.hosts), 1),
        ({"num_nodes": 2}, BufferConfig(), 9),  # the run needs two nodes, and uses all nodes of the cluster
        ({"num_nodes": 5, "engines_per_node": 2}, BufferConfig(), 5),
    ],
)
def test_the_number_of_stores_includes_every_host_that_can_have_an_engine(placement, buffer, most):
    fleet = RolloutFleetConfig(num_engines=9)
    run = RunConfig(placement=PlacementConfig(**placement), buffer=buffer, rollout_fleet=fleet)
    assert num_store_servers(run) == most
