"""A fault of a worker ends only this worker, and the run continues with the other workers."""

import asyncio
import time

import pytest
from ray.exceptions import RaySystemError

from asyncrl.core.errors import (
    AccountError,
    ClusterDiedError,
    DeadlineError,
    EngineError,
    EngineLost,
    RequestRefused,
    RewardError,
    WeightsError,
    WorkerDiedError,
    WrongEpoch,
)
from tests.support.ray_cluster import raised_by_ray
from tests.support.scripted_workers import Workers

pytestmark = [pytest.mark.timeout(30), pytest.mark.usefixtures("virtual_time", "threads_take_no_time")]

TWO = "rollout_fleet.num_engines=2"
DEADLINE_S = 10.0
PROMPT_S = 1.5
"""The longest duration, in seconds, of a call of the training loops while one worker does not answer."""
FULL = OSError(28, "No space left on device: '/dev/shm/asyncrl-1/v00000003'")


@pytest.fixture
async def training_on(fleet_of):
    """Return a function that starts a fleet of two workers and a task of `fleet.run`, and returns both."""
    runs = []

    async def train(workers, *options):
        fleet = fleet_of(workers, TWO, f"buffer.request_timeout_s={DEADLINE_S:g}", *options)
        workers.load_first = lambda rank: asyncio.sleep(0.1)
        workers.takes_s = 1000.0
        await fleet.start()
        runs.append(asyncio.create_task(fleet.run()))
        await asyncio.sleep(1)
        assert (await fleet.counters()).tokens_generated == 200
        return fleet, runs[-1]

    yield train
    for run in runs:
        run.cancel()


@pytest.mark.long
@pytest.mark.parametrize("asked_after_s", [0.0, 4.0, 9.0])
@pytest.mark.parametrize("deadlines", [0.1, 0.5, 1.0, 1.25, 1.5, 2.5])
async def test_a_paused_worker_does_not_block_calls_of_the_fleet(training_on, deadlines, asked_after_s):
    workers = Workers()
    fleet, _ = await training_on(workers)
    await asyncio.sleep(asked_after_s)
    workers.stand_still(1, deadlines * DEADLINE_S)
    for _ in range(60):
        asked_s = time.monotonic()
        counts = await asyncio.wait_for(fleet.counters(), PROMPT_S)
        assert time.monotonic() - asked_s < PROMPT_S
        assert counts.tokens_generated >= 100 + 70
        await asyncio.sleep(0.5)
    assert fleet.engines() == ["0", "1"]
    assert workers.replaced in ([], [1])
    assert (workers.graves.buried == ["worker-1-0"]) == bool(workers.replaced)
    if deadlines < 1:
        assert workers.replaced == []
    if deadlines > 2:
        assert workers.replaced == [1]
    workers.takes_s = 0.1
    expected = 200 + (70 if workers.replaced else 0)
    assert (await asyncio.wait_for(fleet.drain(), 5)).tokens_generated == expected


async def test_a_worker_that_misses_the_deadline_of_one_call_is_replaced(training_on):
    workers = Workers()
    fleet, run = await training_on(workers)
    await asyncio.sleep(5)  # in these 5 s the workers answer the fleet's polls within the deadline
    workers.stand_still(1, 1.25 * DEADLINE_S)
    await fleet.counters()
    await asyncio.sleep(3 * DEADLINE_S)
    assert workers.replaced == [1]
    assert sum("rollout worker 1 has ended, epoch 1 begins" in words for words in workers.said) == 1
    assert not run.done()


async def test_a_worker_paused_in_an_evaluation_is_replaced_and_the_evaluation_ends(training_on):
    workers = Workers()
    fleet, run = await training_on(workers)
    workers.stand_still(1, 2.5 * DEADLINE_S)
    with pytest.raises(DeadlineError, match="rollout worker 1, which answers held-out prompts"):
        await asyncio.wait_for(fleet.answer("1", ["a"], version=0, num_samples=1), 2.5 * DEADLINE_S)
    await asyncio.sleep(2 * DEADLINE_S)
    assert (workers.replaced, fleet.engines(), run.done()) == ([1], ["0", "1"], False)


async def in_start(fleet, workers):
    workers.load_first = lambda rank: asyncio.sleep(60)
    return asyncio.create_task(fleet.start())


async def in_training(fleet, workers):
    await fleet.start()
    return asyncio.create_task(asyncio.sleep(0))


async def in_evaluation(fleet, workers):
    await fleet.start()
    workers.answer = lambda rank, prompts, version, num_samples: asyncio.sleep(40, result=[])
    answering = (fleet.answer(engine, ["a"], version=0, num_samples=1) for engine in ("0", "1"))
    return asyncio.ensure_future(asyncio.gather(*answering, return_exceptions=True))


async def in_checkpoint(fleet, workers):
    await fleet.start()
    return asyncio.create_task(fleet.counters())


async def in_stop(fleet, workers):
    await fleet.start()
    return asyncio.create_task(fleet.drain())


@pytest.mark.long
@pytest.mark.parametrize("stall_s", [1.0, 5.0, 1.5 * DEADLINE_S])
@pytest.mark.parametrize("phase", [in_start, in_training, in_evaluation, in_checkpoint, in_stop])
async def test_the_fleet_continues_or_fails_in_time_after_a_worker_stalls_in_any_phase(fleet_of, phase, stall_s):
    workers = Workers(takes_s=1000.0)
    workers.load_first = lambda rank: asyncio.sleep(0.1)
    fleet = fleet_of(workers, TWO, f"buffer.request_timeout_s={DEADLINE_S:g}")
    call = await phase(fleet, workers)
    await asyncio.sleep(0)
    workers.stand_still(1, stall_s)
    await asyncio.wait({call}, timeout=100)
    assert call.done()
    if call.exception() is not None:  # the run ends if the fleet does not start
        assert (phase, stall_s > DEADLINE_S) == (in_start, True)
        assert "waited 10 s for the rollout workers, which wait for the first weights" in str(call.exception())
        return
    run = asyncio.create_task(fleet.run())
    await asyncio.sleep(3 * DEADLINE_S)
    assert (fleet.engines(), run.done()) == (["0", "1"], False)
    assert len(workers.replaced) <= (stall_s > DEADLINE_S)
    assert (await asyncio.wait_for(fleet.drain(), 10)).tokens_generated >= 100 + 70
    run.cancel()


@pytest.mark.parametrize(
    "error",
    [RaySystemError("System error: the object store is gone"), OSError(5, "Input/output error"), KeyError("rank")],
)
async def test_a_worker_is_replaced_after_any_exception_of_a_call(training_on, error):
    workers = Workers()
    fleet, run = await training_on(workers)
    workers.die(1, error)
    await asyncio.sleep(DEADLINE_S)
    assert (workers.replaced, workers.graves.buried) == ([1], ["worker-1-0"])
    assert (fleet.engines(), run.done()) == (["0", "1"], False)


async def test_a_worker_that_fails_right_after_its_start_is_replaced_again(training_on):
    workers = Workers()
    fleet, run = await training_on(workers)
    replace_worker = workers.replace_worker

    def replace_and_fail_once(rank, **made_with):
        replace_worker(rank, **made_with)
        if len(workers.replaced) == 1:
            workers.run_errors[rank] = raised_by_ray(FULL)
            workers.lives[rank] = asyncio.Event()
            workers.lives[rank].set()

    workers.replace_worker = replace_and_fail_once
    workers.die(1, OSError(5, "Input/output error"))
    await asyncio.sleep(2 * DEADLINE_S)
    assert (workers.replaced, fleet.engines(), run.done()) == ([1, 1], ["0", "1"], False)


async def test_workers_are_replaced_if_ray_cancels_the_call_that_watches_them(training_on):
    workers = Workers()
    notes = asyncio.Event()

    async def wait_failed(rank):
        await notes.wait()
        raise asyncio.CancelledError

    workers.wait_failed = wait_failed
    fleet, run = await training_on(workers, "rollout_fleet.restarts=1")
    del workers.wait_failed
    notes.set()
    await asyncio.sleep(DEADLINE_S)
    assert (sorted(workers.replaced), fleet.engines(), run.done()) == ([0, 1], ["0", "1"], False)


async def test_a_failed_start_of_a_worker_is_repeated_up_to_the_limit(training_on):
    workers = Workers()
    _, run = await training_on(workers)
    failures = [OSError(24, "Too many open files"), RaySystemError("no memory"), raised_by_ray(FULL)]

    async def start(rank):
        if failures:
            raise failures.pop()
        return "worker-1-at-last"

    workers.start = start
    workers.takes_s = 0.1
    workers.die(1, OSError(5, "Input/output error"))
    await asyncio.sleep(5 * DEADLINE_S)
    assert len(workers.replaced) == 3, "rollout_fleet.restarts is 3"
    assert "the run continues with 1 of 2 rollout engines" in str(workers.said)
    assert not run.done() or run.exception() is None


async def test_the_pause_before_each_start_of_a_member_grows(training_on):
    workers, began_s = Workers(), []
    _, _ = await training_on(workers, "rollout_fleet.restart_backoff_s=1")

    async def start(rank):
        began_s.append(time.monotonic())
        raise OSError(24, "Too many open files")

    workers.start = start
    workers.die(1, OSError(5, "Input/output error"))
    await asyncio.sleep(5 * DEADLINE_S)
    first, second, third = began_s
    assert (second - first, third - second) == (pytest.approx(1), pytest.approx(2))


@pytest.mark.parametrize("place", ["start", "bury"])
async def test_an_error_that_a_restart_of_a_member_cannot_fix_ends_the_run(training_on, place):
    workers = Workers()
    _, run = await training_on(workers, "rollout_fleet.min_engines=2")

    async def fails(_):
        raise ClusterDiedError("gcs_server has died")

    if place == "start":
        workers.start = fails
    else:
        workers.graves.error = RuntimeError("a bug")
    workers.die(1, WorkerDiedError("killed"))
    with pytest.raises(EngineLost, match=r"gcs_server has died|a bug"):
        await asyncio.wait_for(run, 5)
    assert len(workers.replaced) == (place == "start")


LOCAL = [
    raised_by_ray(FULL),
    raised_by_ray(DeadlineError("buffer.lease: no answer from tcp://10.0.0.1:5 within 30.0 s")),
    raised_by_ray(DeadlineError("engine-1 was updating for longer than it may be")),
    raised_by_ray(WeightsError("version 3 has other bytes than were published")),
]


@pytest.mark.parametrize("error", LOCAL, ids=lambda error: type(error.cause).__name__)
async def test_a_failure_on_the_host_of_one_worker_replaces_only_that_worker(training_on, error):
    workers = Workers()
    workers.run_errors[1] = error
    _, run = await training_on(workers, "rollout_fleet.engine=sglang")
    workers.takes_s = 1.0
    await asyncio.sleep(0)
    workers.lives[1].set()
    await asyncio.sleep(5)
    assert (workers.replaced, workers.graves.buried) == ([1], []), "a worker that is alive must report its own tokens"
    assert not (run.done() and run.exception())


async def test_without_restarts_the_run_continues_without_a_worker_whose_disk_is_full(training_on):
    workers = Workers()
    workers.run_errors[1] = raised_by_ray(FULL)
    _, run = await training_on(workers, "rollout_fleet.restarts=0")
    workers.lives[1].set()
    await asyncio.sleep(5)
    assert not run.done()
    assert "the run continues with 1 of 2 rollout engines: rollout worker 1: [Errno 28] No space left" in str(
        workers.said
    )
    workers.run_errors[0] = raised_by_ray(FULL)
    workers.lives[0].set()
    with pytest.raises(EngineLost, match=r"0 of 2 rollout engines are left, .*min_engines is 1. .*No space left"):
        await asyncio.wait_for(run, 10)


async def test_a_worker_whose_weights_stay_damaged_is_replaced_up_to_the_limit(training_on):
    workers = Workers()
    fleet, _ = await training_on(workers)
    damaged = raised_by_ray(WeightsError("version 3 has other bytes than were published"))

    async def load_first(rank):
        raise damaged

    workers.load_first = load_first
    workers.run_errors[1] = damaged
    workers.lives[1].set()
    await asyncio.sleep(5 * DEADLINE_S)
    assert workers.replaced == [1, 1, 1], "rollout_fleet.restarts is 3"
    ended = [words for words in workers.said if "rollout worker 1 has ended, epoch" in words]
    assert len(ended) == 4
    assert all("version 3 has other bytes" in words for words in ended)
    assert "the run continues with 1 of 2 rollout engines" in str(workers.said)
    assert fleet.engines() == ["0"]


@pytest.mark.parametrize("kind", [RewardError, RequestRefused, AccountError, WrongEpoch])
async def test_an_error_that_every_worker_would_raise_ends_the_run_immediately(training_on, kind):
    workers = Workers()
    workers.run_errors[1] = raised_by_ray(kind("wrong everywhere"))
    _, run = await training_on(workers)
    workers.lives[1].set()
    with pytest.raises(kind, match="wrong everywhere"):
        await asyncio.wait_for(run, 5)
    assert workers.replaced == []


async def test_held_out_prompts_that_fail_on_one_host_go_to_the_other_engines(training_on):
    workers = Workers()
    fleet, run = await training_on(workers)

    async def answer(rank, prompts, version, num_samples):
        raise raised_by_ray(FULL)

    workers.answer = answer
    with pytest.raises(EngineLost, match=r"rollout worker 1 did not answer held-out prompts: .*No space left"):
        await fleet.answer("1", ["a"], version=0, num_samples=1)
    await asyncio.sleep(DEADLINE_S)
    assert (workers.replaced, run.done()) == ([], False), "the worker's loop must continue"


@pytest.mark.parametrize("fault", ["before", "meanwhile", "silent"])
async def test_a_dead_engine_does_not_prevent_the_release_of_the_device(training_on, fault):
    """If a worker does not release the device, the worker is killed before the learner uses the device."""
    workers = Workers()
    fleet, run = await training_on(workers, "placement.colocated=true", "rollout_fleet.drain_timeout_s=5")
    workers.takes_s = 1.0
    if fault == "before":
        workers.die(1, WorkerDiedError("killed"))
        await asyncio.sleep(1)
    if fault == "silent":
        workers.stand_still(1, 1000)
    releasing = asyncio.create_task(fleet.release_device())
    await asyncio.sleep(0.5)
    if fault == "meanwhile":
        workers.die(1, raised_by_ray(EngineLost("the engine of rank 1 failed")))
    await asyncio.wait_for(releasing, 100)
    assert workers.closed == [1]
    assert not (run.done() and run.exception())
    await asyncio.wait_for(fleet.release_device(), 100)
    num_before = len(workers.replaced)
    await asyncio.sleep(500)
    assert len(workers.replaced) == num_before, "no engine may start while the learner has the device"
    fleet.take_device()
    await asyncio.sleep(5)
    assert workers.replaced == [1]
    assert fleet.engines() == ["0", "1"]
    assert not (run.done() and run.exception())
    await asyncio.wait_for(fleet.release_device(), 100)
    assert workers.calls[-2:] == [(0, "release_device"), (1, "release_device")]


@pytest.mark.parametrize("has_weights", [True, False], ids=["with weights", "waits for the weights of new ranks"])
async def test_the_learner_waits_until_a_starting_engine_has_released_the_device(training_on, has_weights):
    workers = Workers()
    fleet, _ = await training_on(workers, "placement.colocated=true")
    starts = asyncio.Event()

    async def start(rank):
        await starts.wait()
        return f"worker-{rank}-1"

    async def never(rank, *_):
        await asyncio.Event().wait()

    workers.start, workers.takes_s = start, 1.0
    if not has_weights:
        workers.load_first = never
    workers.die(1, WorkerDiedError("killed"))
    await asyncio.sleep(10)
    releasing = asyncio.create_task(fleet.release_device())
    await asyncio.sleep(10)
    assert workers.replaced == [1]
    assert not releasing.done()
    starts.set()
    await asyncio.wait_for(releasing, 10)
    assert (1, "release_device") in workers.calls


async def test_a_starting_engine_that_does_not_release_the_device_is_killed_and_started_later(training_on):
    workers = Workers()
    fleet, run = await training_on(workers, "placement.colocated=true")

    async def never(rank, *_):
        await asyncio.Event().wait()

    async def fail(rank, incarnation):
        if rank == 1:
            raise raised_by_ray(EngineError("the server answered 500"))

    workers.load_first, workers.release_device, workers.takes_s = never, fail, 1.0
    workers.die(1, WorkerDiedError("killed"))
    await asyncio.sleep(10)
    await asyncio.wait_for(fleet.release_device(incarnation=1), 10)
    assert workers.closed == [1, 1]
    workers.load_first = lambda rank: asyncio.sleep(0.1)
    fleet.take_device()
    await asyncio.sleep(10)
    assert workers.replaced == [1, 1]
    assert fleet.engines() == ["0", "1"]
    assert not run.done()


async def test_time_in_which_the_learner_has_the_device_is_not_time_without_engines(training_on):
    workers = Workers()
    fleet, run = await training_on(workers, "placement.colocated=true", "rollout_fleet.no_engine_timeout_s=20")
    workers.takes_s = 1.0
    releasing = asyncio.create_task(fleet.release_device())
    for rank in (0, 1):
        workers.die(rank, WorkerDiedError("killed"))
    await asyncio.wait_for(releasing, 10)
    await asyncio.sleep(100)
    assert not run.done()
    fleet.take_device()
    await asyncio.sleep(10)
    assert fleet.engines() == ["0", "1"]
