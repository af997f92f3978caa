"""The fleet's group against scripted workers: how long it waits, for whom, and what it adds up."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from asyncrl.cli.compose import compose_run
from asyncrl.controller import fleet_group
from asyncrl.controller.cluster import AllOf
from asyncrl.controller.fleet_group import FleetGroup
from asyncrl.controller.run_folder import RunPaths
from asyncrl.protocol import remote
from asyncrl.protocol.errors import DeadlineError, EngineLost, RewardError, WorkerDiedError
from rollout_fleet.metrics import FleetMeter

pytestmark = [pytest.mark.timeout(30), pytest.mark.usefixtures("virtual_time")]


class Workers:
    """Stands in for the worker group; its calls take ``takes_s``, and `counters` never answers where it ``hangs``.

    Attributes:
        deaths: By rank, what ends the worker's life.
        replaced: Ranks, in the order in which their workers were replaced.
        calls: Rank and method of every call but `counters`.
    """

    def __init__(self, takes_s=0.5, hangs=False):
        self.takes_s = takes_s
        self.hangs = hangs
        self.deaths = {}
        self.replaced = []
        self.calls = []
        self.run_error = None
        self.said = []

    def execute_rank_async(self, rank, method, *arguments):
        if method != "counters":
            self.calls.append((rank, method))
        return self._unless_dead(self.death_of(rank), getattr(self, method)(rank, *arguments))

    def death_of(self, rank):
        return self.deaths.setdefault(rank, asyncio.get_running_loop().create_future())

    def die(self, rank, error):
        self.death_of(rank).set_exception(error)

    def replace_worker(self, rank):
        self.replaced.append(rank)
        self.deaths.pop(rank, None)
        self.hangs = False

    async def _unless_dead(self, death, work):
        task = asyncio.ensure_future(work)
        await asyncio.wait({death, task}, return_when=asyncio.FIRST_COMPLETED)
        if death.done():
            task.cancel()
            raise death.exception()
        return task.result()

    async def answer(self, rank, prompts, version, num_samples):
        await asyncio.sleep(self.takes_s)
        return [(prompt, version, num_samples) for prompt in prompts]

    async def run(self, rank):
        await asyncio.sleep(self.takes_s)
        if self.run_error is not None:
            raise self.run_error
        return FleetMeter().counters()

    async def start(self, rank):
        return f"worker-{rank}-{self.replaced.count(rank)}"

    async def load_first(self, rank):
        await asyncio.sleep(self.takes_s)

    async def next_note(self, rank, num_heard):
        await asyncio.Event().wait()

    def execute_all_async(self, method):
        return []

    def shutdown(self):
        pass

    async def drain(self, rank):
        return await self.counters(rank)

    async def stop(self, rank):
        return await self.counters(rank)

    async def counters(self, rank):
        await asyncio.sleep(60 if self.hangs else 0)
        meter = FleetMeter()
        meter.generated(100)
        meter.stored(60)
        meter.failed("reward")
        if rank == 0:
            meter.failed("aborted")
        return meter.counters()


class Graves:
    """The calls of a controller's client that a fleet needs; every dead worker had generated 70 tokens."""

    def __init__(self):
        self.buried = []

    async def bury(self, worker):
        self.buried.append(worker)
        return 70

    async def close(self):
        pass


@pytest.fixture
def fleet_of(monkeypatch, tmp_path):
    """Return a maker of a fleet with these workers."""

    def make(workers, *options):
        monkeypatch.setattr(fleet_group, "RayWorkerGroup", lambda *_, **__: workers)
        workers.graves = Graves()
        role = SimpleNamespace(client=None)
        connection = SimpleNamespace(for_role=lambda _: role, client=lambda: workers.graves)
        folders = dict.fromkeys(("logs", "snapshots", "staging", "samples", "tokens", "checkpoints"), tmp_path)
        paths = RunPaths(**folders, trajectories=None)
        options = ["buffer.request_timeout_s=0.1", "rollout_fleet.load_timeout_s=0.1", *options]
        return FleetGroup(compose_run(options), buffer=connection, paths=paths, pool=object(), say=workers.said.append)

    return make


@pytest.fixture(autouse=True)
def threads_take_no_time(monkeypatch):
    async def call(work, *arguments):
        return work(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", call)


TWO = "rollout_fleet.num_engines=2"


async def test_held_out_answers_take_as_long_as_they_take_while_the_workers_answer(fleet_of):
    fleet = fleet_of(Workers())
    await fleet.start()
    assert fleet.engines() == ["0"]
    assert await fleet.answer("0", ["a", "b"], version=4, num_samples=3) == [("a", 4, 3), ("b", 4, 3)]


async def test_a_start_waits_as_long_as_it_must_for_the_first_weights(fleet_of):
    await asyncio.wait_for(fleet_of(Workers(takes_s=500.0)).start(), 501.0)


async def test_a_worker_that_hangs_before_the_first_weights_ends_the_start(fleet_of):
    words = "waited 0.1 s for the rollout workers, which wait for the first weights; raise buffer.request"
    with pytest.raises(DeadlineError, match=words):
        await asyncio.wait_for(fleet_of(Workers(takes_s=60, hangs=True)).start(), 5)


async def test_a_worker_that_dies_is_buried_and_replaced_and_the_run_goes_on(fleet_of):
    workers = Workers(takes_s=100.0)
    fleet = fleet_of(workers, TWO)
    await fleet.start()
    run = asyncio.create_task(fleet.run())
    await asyncio.sleep(10)
    workers.die(1, WorkerDiedError("worker of group 'rollout', rank 1 died"))
    await asyncio.sleep(50)
    assert not run.done()
    await asyncio.sleep(200)
    await run
    assert (workers.replaced, workers.graves.buried) == ([1], ["worker-1-0"])
    calls = [method for rank, method in workers.calls if rank == 1 and method != "next_note"]
    assert calls == ["start", "load_first", "run"] * 2
    assert "rollout worker 1 has ended, epoch 1 begins: worker of group 'rollout', rank 1 died" in workers.said
    counts = await fleet.counters()
    assert (counts.tokens_generated, counts.tokens_in_flight) == (100 + 70 + 100, 40 + 40)
    assert "no rollout engine is up; training waits" not in workers.said


async def test_a_worker_that_hangs_is_found_by_its_silence_and_replaced(fleet_of):
    workers = Workers(takes_s=50.0)
    fleet = fleet_of(workers)
    await fleet.start()
    run = asyncio.create_task(fleet.run())
    await asyncio.sleep(1)
    workers.hangs = True
    await run
    assert workers.replaced == [0]
    assert [words for words in workers.said if "training" in words] == [
        "no rollout engine is up; training waits",
        "training goes on",
    ]


async def test_a_fleet_goes_on_without_a_worker_that_has_failed_for_good_until_too_few_are_left(fleet_of):
    workers = Workers(takes_s=500.0)
    fleet = fleet_of(workers, TWO, "rollout_fleet.restarts=0")
    await fleet.start()
    run = asyncio.create_task(fleet.run())
    await asyncio.sleep(10)
    workers.die(1, WorkerDiedError("rank 1 died of its own"))
    await asyncio.sleep(10)
    assert not run.done()
    assert "the run goes on with 1 of 2 rollout engines: rollout worker 1: rank 1 died of its own" in workers.said
    workers.takes_s = 1.0
    assert fleet.engines() == ["0"]
    workers.die(0, WorkerDiedError("rank 0 died of its own"))
    with pytest.raises(EngineLost, match=r"0 of 2 rollout engines are left, .*min_engines is 1. .* rank 0 died of"):
        await asyncio.wait_for(run, 10)
    assert (await fleet.drain()).tokens_generated == 140


async def test_an_engine_that_its_worker_gave_up_is_not_tried_by_another_worker(fleet_of):
    workers = Workers(takes_s=500.0)
    fleet = fleet_of(workers, "rollout_fleet.engine=sglang")
    await fleet.start()
    run = asyncio.create_task(fleet.run())
    await asyncio.sleep(10)
    workers.die(0, EngineLost("sglang-0 died"))
    with pytest.raises(EngineLost, match="sglang-0 died"):
        await asyncio.wait_for(run, 10)
    assert workers.replaced == []


async def test_what_no_other_worker_could_do_better_ends_the_run(fleet_of):
    workers = Workers(takes_s=5.0)
    workers.run_error = RewardError("the reward raised 64 times in a row")
    fleet = fleet_of(workers)
    await fleet.start()
    with pytest.raises(RewardError, match="64 times in a row"):
        await asyncio.wait_for(fleet.run(), 10)
    assert workers.replaced == []


async def test_a_worker_that_hangs_in_an_evaluation_is_found_by_its_silence(fleet_of):
    workers = Workers(takes_s=1)
    fleet = fleet_of(workers)
    await fleet.start()
    workers.takes_s, workers.hangs = 60, True
    with pytest.raises(DeadlineError, match=r"waited 0.1 s for rollout worker 0, which answers held-out prompts"):
        await fleet.answer("0", [object()], version=0, num_samples=1)


async def test_failed_attempts_are_added_up_over_the_engines(fleet_of):
    fleet = fleet_of(Workers(), TWO)
    await fleet.start()
    assert (await fleet.counters()).groups_failed == {"reward": 2, "aborted": 1}


async def test_what_a_killed_worker_has_linked_goes_when_the_fleet_stops(fleet_of, tmp_path):
    (tmp_path / ".staged" / "engine-0" / "v00000003").mkdir(parents=True)
    (tmp_path / "v00000003").mkdir()
    await fleet_of(Workers()).stop(1.0)
    assert [path.name for path in tmp_path.glob("*")] == ["v00000003"]


class Call(list):
    """References to results that never come."""

    def __await__(self):
        return asyncio.sleep(60).__await__()


async def test_a_wait_for_several_groups_names_all_that_are_late(monkeypatch):
    monkeypatch.setattr(remote, "late_workers", lambda refs: f"late: {refs}, last lines of {Path('actor.log')}")
    with pytest.raises(DeadlineError, match=r"the learner's models; .*late: \['actor-0', 'critic-0'\], last lines of"):
        await remote.within(AllOf([Call(["actor-0"]), Call(["critic-0"])]), 0.05, "the learner's models", "an.option")
