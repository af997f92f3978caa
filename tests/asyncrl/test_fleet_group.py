"""The fleet group with scripted workers: waits, members and summed counters."""

import asyncio
from pathlib import Path

import pytest
from ray.exceptions import RayError

from asyncrl.cli.compose import compose_run
from asyncrl.core import remote
from asyncrl.core.errors import DeadlineError, EngineLost, MembershipRefused, WorkerDiedError
from asyncrl.run.fleet_group import answered
from asyncrl.run.learner_group import AllOf
from rollout_fleet.membership import Action, FleetAnswer, FleetRequest
from tests.support.ray_cluster import raised_by_ray
from tests.support.scripted_workers import Workers

pytestmark = [pytest.mark.timeout(30), pytest.mark.usefixtures("virtual_time", "threads_take_no_time")]


TWO = "rollout_fleet.num_engines=2"
ELASTIC = "rollout_fleet.num_engines={min: 1, max: 3}"


@pytest.fixture
async def running(fleet_of):
    """Return a function that starts a fleet, begins `FleetGroup.run` and waits for ten seconds.

    The function returns the scripted workers, the fleet, and the task of `FleetGroup.run`.
    """
    runs = []

    async def run(takes_s, *options):
        workers = Workers(takes_s=takes_s)
        fleet = fleet_of(workers, *options)
        await fleet.start()
        runs.append(asyncio.create_task(fleet.run()))
        await asyncio.sleep(10)
        return workers, fleet, runs[-1]

    yield run
    for task in runs:
        task.cancel()


@pytest.fixture
async def started(fleet_of):
    """Return a function that starts an elastic fleet, begins `FleetGroup.run` and waits for twelve seconds.

    The function returns the scripted workers, the fleet, and the task of `FleetGroup.run`.
    """
    runs = []

    async def start(*options, is_full=False):
        workers = Workers(takes_s=0.1)
        if is_full:
            workers.fill()
        fleet = fleet_of(workers, *(options or (ELASTIC,)))
        await fleet.start()
        workers.takes_s = 1e4
        runs.append(asyncio.create_task(fleet.run()))
        await asyncio.sleep(12)
        return workers, fleet, runs[-1]

    yield start
    for task in runs:
        task.cancel()


async def test_held_out_answers_have_no_deadline_while_the_workers_answer_calls(fleet_of):
    fleet = fleet_of(Workers())
    await fleet.start()
    assert fleet.engines() == ["0"]
    assert await fleet.answer("0", ["a", "b"], version=4, num_samples=3) == [("a", 4, 3), ("b", 4, 3)]


async def test_a_start_waits_for_the_first_weights_without_a_deadline(fleet_of):
    await asyncio.wait_for(fleet_of(Workers(takes_s=500.0)).start(), 501.0)


async def test_a_worker_that_hangs_before_the_first_weights_ends_the_start(fleet_of):
    words = "waited 0.1 s for the rollout workers, which wait for the first weights; raise buffer.request"
    with pytest.raises(DeadlineError, match=words):
        await asyncio.wait_for(fleet_of(Workers(takes_s=60, hangs=True)).start(), 5)


async def test_each_start_of_an_engine_has_a_different_seed(fleet_of):
    seeds = []
    for version in (0, 40):  # a run that starts at version 40 continues from a checkpoint
        workers = Workers(takes_s=100.0)
        fleet = fleet_of(workers, TWO, version=version)
        await fleet.start()
        run = asyncio.create_task(fleet.run())
        for _ in range(2):
            await asyncio.sleep(20)
            workers.die(1, WorkerDiedError("it was killed"))
        await asyncio.sleep(20)
        run.cancel()
        seeds += workers.engine_seeds
    assert len(set(seeds)) == len(seeds) == 2 * 3
    assert all(0 <= seed < 2**31 for seed in seeds)  # SGLang passes the seed to numpy, which needs seeds below 2^32


async def test_a_dead_worker_is_reported_to_the_buffer_and_replaced_and_the_run_continues(running):
    workers, fleet, run = await running(100.0, TWO)
    workers.die(1, WorkerDiedError("worker of group 'rollout', rank 1 died"))
    await asyncio.sleep(50)
    assert not run.done()
    await asyncio.sleep(200)
    await run
    assert (workers.replaced, workers.graves.buried) == ([1], ["worker-1-0"])
    calls = [method for rank, method in workers.calls if rank == 1 and method != "wait_failed"]
    assert calls == ["start", "load_first", "run"] * 2
    assert "rollout worker 1 has ended, epoch 1 begins: worker of group 'rollout', rank 1 died" in workers.said
    counts = await fleet.counters()
    assert (counts.tokens_generated, counts.tokens_in_flight) == (100 + 70 + 100, 40 + 40)
    assert "no rollout engine is up; training waits" not in workers.said


@pytest.mark.parametrize(("end", "size"), [("drain", TWO), ("leave", "rollout_fleet.num_engines={min: 1, max: 2}")])
async def test_a_worker_that_ends_with_leases_is_reported_dead_with_its_own_token_count(running, end, size):
    workers, fleet, _ = await running(500.0, size)
    workers.keeps_leases.add(1)
    if end == "leave":
        await fleet.leave(1)
    counts = await fleet.drain()
    worker = f"worker-1-{workers.replaced.count(1)}"  # the worker's name ends with the count of its replacements
    assert (workers.graves.buried, workers.graves.known) == ([worker], [100])
    assert (counts.tokens_generated, counts.tokens_in_flight) == (100 + 70, 0)


async def test_a_worker_that_loses_its_engine_is_reported_dead_with_its_own_token_count(running):
    workers, fleet, _ = await running(500.0, TWO, "rollout_fleet.restarts=0")
    workers.keeps_leases.add(1)
    workers.die(1, EngineLost("the engine of rank 1 failed"))
    del workers.deaths[1]  # only the engine has failed, so the worker's process still answers calls
    await asyncio.sleep(100)
    assert (workers.graves.buried, workers.graves.known) == (["worker-1-0"], [100])
    counts = await fleet.drain()
    assert (counts.tokens_generated, counts.tokens_in_flight) == (100 + 70, 0)


async def test_a_worker_that_hangs_is_detected_by_its_silence_and_replaced(fleet_of):
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
        "training continues",
    ]


async def test_a_fleet_continues_without_failed_workers_until_too_few_are_left(running):
    workers, fleet, run = await running(500.0, TWO, "rollout_fleet.restarts=0")
    workers.die(1, WorkerDiedError("rank 1 died of its own"))
    await asyncio.sleep(10)
    assert not run.done()
    assert "the run continues with 1 of 2 rollout engines: rollout worker 1: rank 1 died of its own" in workers.said
    workers.takes_s = 1.0
    assert fleet.engines() == ["0"]
    workers.die(0, WorkerDiedError("rank 0 died of its own"))
    with pytest.raises(EngineLost, match=r"0 of 2 rollout engines are left, .*min_engines is 1. .* rank 0 died of"):
        await asyncio.wait_for(run, 10)
    assert (await fleet.drain()).tokens_generated == 140


async def test_messages_about_a_failed_worker_have_its_error_without_rays_traceback(running):
    workers, _, run = await running(500.0, TWO, "rollout_fleet.engine=sglang", "rollout_fleet.restarts=0")
    workers.die(1, raised_by_ray(EngineLost("sglang-1 died. Last lines of sglang-1.log:\na line")))
    await asyncio.sleep(10)
    headline = "rollout worker 1: sglang-1 died. Last lines of sglang-1.log:"
    assert f"the run continues with 1 of 2 rollout engines: {headline}" in workers.said
    workers.die(0, raised_by_ray(EngineLost("sglang-0 died. Last lines of sglang-0.log:\na line")))
    with pytest.raises(EngineLost) as caught:
        await asyncio.wait_for(run, 10)
    assert str(caught.value) == (
        "0 of 2 rollout engines are left, rollout_fleet.min_engines is 1. "
        "rollout worker 0: sglang-0 died. Last lines of sglang-0.log:\na line"
    )
    assert not any("ray::" in words for words in workers.said)


async def test_a_worker_that_hangs_in_an_evaluation_is_detected_by_its_silence(fleet_of):
    workers = Workers(takes_s=1)
    fleet = fleet_of(workers)
    await fleet.start()
    workers.takes_s, workers.hangs = 60, True
    with pytest.raises(DeadlineError, match=r"0\.1 s for rollout worker 0, .*held-out"):
        await fleet.answer("0", [object()], version=0, num_samples=1)


async def test_failed_attempts_are_summed_over_the_engines(fleet_of):
    fleet = fleet_of(Workers(), TWO)
    await fleet.start()
    assert (await fleet.counters()).groups_failed == {"reward": 2, "aborted": 1}


async def test_links_of_a_killed_worker_are_removed_when_the_fleet_stops(fleet_of, tmp_path):
    (tmp_path / ".staged" / "engine-0" / "v00000003").mkdir(parents=True)
    (tmp_path / "v00000003").mkdir()
    await fleet_of(Workers()).stop(1.0)
    assert [path.name for path in tmp_path.glob("*")] == ["v00000003"]


class Call(list):
    """A stand-in for a call to several workers: a list of the workers' names, and an awaitable that takes 60 s."""

    def __await__(self):
        return asyncio.sleep(60).__await__()


async def test_a_wait_for_several_worker_groups_names_all_late_workers(monkeypatch):
    monkeypatch.setattr(remote, "late_workers", lambda refs: f"late: {refs}, last lines of {Path('actor.log')}")
    with pytest.raises(DeadlineError, match=r"the learner's models; .*late: \['actor-0', 'critic-0'\], last lines of"):
        await remote.within(AllOf([Call(["actor-0"]), Call(["critic-0"])]), 0.05, "the learner's models", "an.option")


async def test_a_run_starts_with_the_minimum_of_engines_and_others_join_when_nodes_have_room(started):
    workers, fleet, _ = await started(ELASTIC, "placement.num_nodes=2", "placement.autoscale=true", is_full=True)
    assert fleet.engines() == ["0"]
    assert workers.said.count("rollout worker 1 waits for a place: Ray has not found a node with room yet") == 1
    assert fleet.describe().splitlines()[:2] == ["0: serves", "1: coming, pending"]
    workers.takes_s = 1.0
    workers.full.set()
    await asyncio.sleep(5)
    assert (fleet.engines(), workers.supplied) == (["0", "1", "2"], ["node-1", "node-2"])
    assert workers.made_with == {"model_path": "/models/of/node-2"}
    assert "rollout worker 2 has joined; 3 engines are present" in workers.said
    assert "no rollout engine is up; training waits" not in workers.said


async def test_engines_without_room_at_the_start_are_withdrawn_and_can_join_later(started):
    workers, fleet, _ = await started(is_full=True)
    workers.takes_s = 0.1
    assert "rollout worker 1 did not join: no node had room for rollout worker 1 within ray.start_time" in str(
        workers.said
    )
    with pytest.raises(MembershipRefused, match=r"1 of 1 engines .*no node had room .*start Ray on"):
        await fleet.join(1)
    workers.full.set()
    assert await fleet.join(2, node="node-b") == "joined: rollout worker 4, 5"
    assert (fleet.engines(), workers.supplied) == (["0", "4", "5"], ["node-b", "node-b"])
    with pytest.raises(MembershipRefused, match="allows 3 engines"):
        await fleet.join(1)


async def test_a_failed_join_is_answered_with_the_engines_error_without_rays_traceback(started):
    workers, fleet, _ = await started(is_full=True)
    workers.full.set()
    joining = asyncio.create_task(fleet.join(1))
    await asyncio.sleep(0.05)
    workers.die(3, raised_by_ray(EngineLost("sglang-3 ended with 1. Last lines of sglang-3.log:\na line")))
    with pytest.raises(MembershipRefused) as caught:
        await joining
    words = "sglang-3 ended with 1. Last lines of sglang-3.log:"
    assert str(caught.value) == f"1 of 1 engines did not join: {words}\na line"
    assert f"rollout worker 3 did not join: {words}" in workers.said
    assert not any("ray::" in said for said in workers.said)
    assert fleet.engines() == ["0"]


async def test_a_leaving_member_hands_over_its_groups_and_its_counters_remain(started):
    workers, fleet, run = await started()
    before = await fleet.counters()
    leaving = asyncio.create_task(fleet.leave(0))
    await asyncio.sleep(0.5)
    assert (fleet.engines(), fleet.describe().splitlines()[0]) == (["1", "2"], "0: leaving, draining")
    with pytest.raises(MembershipRefused, match="leaving already"):
        await fleet.leave(0)
    assert await leaving == "rollout worker 0 has left"
    assert (workers.closed, workers.graves.buried, workers.replaced) == ([0], [], [1, 2])
    assert (await fleet.counters()).tokens_generated == before.tokens_generated == 300
    assert await fleet.leave(2) == "rollout worker 2 has left"
    with pytest.raises(MembershipRefused, match=r"rollout worker 1 must stay: 0 engines"):
        await fleet.leave(1)
    with pytest.raises(EngineLost, match="rollout worker 0 has left"):
        await fleet.answer("0", [], version=0, num_samples=1)
    workers.takes_s = 1.0
    assert await fleet.join(1) == "joined: rollout worker 0"
    assert (await fleet.drain()).tokens_generated == 400
    assert not run.done()


async def test_two_joins_at_the_same_time_get_different_engines(started):
    workers, fleet, _ = await started("rollout_fleet.num_engines={min: 1, max: 4}")
    assert await fleet.leave(1) == "rollout worker 1 has left"
    assert await fleet.leave(2) == "rollout worker 2 has left"
    workers.takes_s = 1.0
    answers = await asyncio.gather(fleet.join(1), fleet.join(1), fleet.join(2), return_exceptions=True)
    assert answers[:2] == ["joined: rollout worker 4", "joined: rollout worker 5"]
    assert "allows 4 engines, and 4 are present, coming or leaving; got a request for 2 more" in str(answers[2])
    assert fleet.engines() == ["0", "3", "4", "5"]


async def test_a_request_completes_even_if_its_caller_disconnects(started):
    workers, fleet, _ = await started()
    leaving = asyncio.create_task(fleet.leave(1))
    await asyncio.sleep(0.5)
    leaving.cancel()
    await asyncio.sleep(5)
    assert (workers.closed, fleet.engines()) == ([1], ["0", "2"])
    assert fleet.describe().endswith("1 more engines can join")
    workers.takes_s = 1.0
    joining = asyncio.create_task(fleet.join(1))
    await asyncio.sleep(0.5)
    joining.cancel()
    await asyncio.sleep(5)
    assert fleet.engines() == ["0", "2", "3"]
    assert (await fleet.counters()).tokens_generated == 400


async def test_an_engine_that_leaves_during_an_evaluation_counts_once_and_returns_its_prompts(started, monkeypatch):
    _, fleet, _ = await started()
    answering = asyncio.create_task(fleet.answer("1", ["a"], version=0, num_samples=1))

    async def call(work, *arguments):  # to kill worker 1 takes 1 s, and the worker answers before it dies
        await asyncio.sleep(1.0)
        return work(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", call)
    assert await fleet.leave(1) == "rollout worker 1 has left"
    with pytest.raises(WorkerDiedError):
        await answering
    assert (await fleet.counters()).tokens_generated == 300


async def test_a_worker_that_dies_while_leaving_counts_as_left_and_is_reported_dead(started):
    workers, fleet, run = await started()
    leaving = asyncio.create_task(fleet.leave(1))
    await asyncio.sleep(0.5)
    workers.die(1, WorkerDiedError("rank 1 died of its own"))
    assert await leaving == "rollout worker 1 has left"
    await asyncio.sleep(1)
    assert (workers.replaced, workers.graves.buried, fleet.engines()) == ([1, 2], ["worker-1-1"], ["0", "2"])
    assert (await fleet.counters()).tokens_generated == 200 + 70
    assert not run.done()


async def test_a_worker_that_fails_to_leave_is_killed_and_reported_dead(started):
    workers, fleet, run = await started()

    async def leave(rank):
        raise DeadlineError("the loop did not end") if rank == 1 else RayError("the worker has a bug")

    workers.leave = leave
    for rank in (1, 2):
        assert await fleet.leave(rank) == f"rollout worker {rank} has left"
    assert (workers.closed, workers.graves.buried) == ([1, 2], ["worker-1-1", "worker-2-1"])
    assert (fleet.engines(), run.done()) == (["0"], False)


async def test_a_member_that_waits_for_room_is_withdrawn_by_leave_and_at_the_end_of_the_run(started):
    _, fleet, _ = await started(ELASTIC, "placement.num_nodes=2", "placement.autoscale=true", is_full=True)
    assert await fleet.leave(1) == "rollout worker 1 does not join"
    assert fleet.describe().endswith("1 more engines can join")
    counts = await asyncio.wait_for(fleet.drain(), 10)
    assert (counts.tokens_generated, fleet.describe().splitlines()[0]) == (100, "0: serves")
    with pytest.raises(MembershipRefused, match="the run is ending"):
        await fleet.join(1)


async def test_a_worker_of_a_dead_node_waits_for_another_node_without_a_deadline(started):
    workers, fleet, run = await started(TWO)
    workers.fill()
    workers.die(1, WorkerDiedError("rank 1 died: its node is dead"))
    await asyncio.sleep(30)
    assert (fleet.engines(), workers.graves.buried) == (["0"], ["worker-1-0"])
    assert "rollout worker 1 waits for a place: Ray has not found a node with room yet" in workers.said
    workers.takes_s = 1.0
    workers.full.set()
    await asyncio.sleep(10)
    assert (fleet.engines(), workers.made_with) == (["0", "1"], {"model_path": "/models/of/node-1"})
    assert not run.done()


async def test_training_without_engines_continues_after_a_join_or_ends_at_its_deadline(fleet_of):
    workers = Workers(takes_s=1.0)
    options = ("rollout_fleet.restarts=0", "rollout_fleet.no_engine_timeout_s=50", "rollout_fleet.engine=sglang")
    fleet = fleet_of(workers, "rollout_fleet.num_engines={min: 1, max: 1}", *options)
    await fleet.start()
    workers.takes_s = 1e4
    run = asyncio.create_task(fleet.run())
    for _ in range(2):
        await asyncio.sleep(10)
        workers.takes_s = 1.0
        workers.die(0, EngineLost("sglang-0 died"))
        await asyncio.sleep(40)
        assert not run.done()
        assert await fleet.join(1) == "joined: rollout worker 0"
        workers.takes_s = 1e4
    await asyncio.sleep(60)
    paused = [words for words in workers.said if "training" in words]
    assert paused == ["no rollout engine is up; training waits", "training continues"] * 2
    workers.die(0, EngineLost("sglang-0 died"))
    words = r"0 of 0 rollout engines are left, .*min_engines is 1. Training waited .*no_engine_timeout_s=50 s"
    with pytest.raises(EngineLost, match=words):
        await asyncio.wait_for(run, 51)


async def test_no_engine_joins_or_leaves_before_the_first_engines_are_ready(fleet_of):
    fleet = fleet_of(Workers(), ELASTIC)
    for asked in (fleet.join(1), fleet.leave(0)):
        with pytest.raises(MembershipRefused, match="the run is starting; repeat the command"):
            await asked


async def test_a_fleet_of_fixed_size_refuses_joins_and_leaves(fleet_of):
    fleet = fleet_of(Workers(), TWO)
    await fleet.start()
    for asked in (fleet.join(1), fleet.leave(0)):
        with pytest.raises(MembershipRefused, match=r"only an elastic fleet; .*num_engines=\{min: 2, max: 4\}"):
            await asked


class Broken:
    """A fleet that refuses every request to leave. Its `describe` raises an error."""

    def describe(self):
        raise KeyError("rank")

    async def leave(self, rank):
        raise MembershipRefused(f"rollout worker {rank} must stay")

    async def join(self, num_engines, *, node=""):
        return f"joined: {num_engines}"


@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        (FleetRequest(action=Action.join, num_engines=2), FleetAnswer(words="joined: 2")),
        (FleetRequest(action=Action.leave, member=4), FleetAnswer(words="rollout worker 4 must stay", is_refused=True)),
        (
            FleetRequest(action=Action.describe),
            FleetAnswer(words="KeyError('rank'); the run's logs/controller.log has the traceback", is_refused=True),
        ),
    ],
)
async def test_a_request_is_answered_with_its_result_refusal_or_failure(request_, answer):
    assert await answered(Broken(), request_, compose_run([])) == answer
