"""A run whose Ray does not start, is stopped meanwhile, or loses a part."""

import asyncio
import threading

import pytest

from asyncrl.cli.compose import compose_run
from asyncrl.core.errors import ClusterDiedError, WorkerDiedError
from asyncrl.run import cluster, run


@pytest.mark.parametrize(
    ("overrides", "where"), [([], "on this machine"), (["ray.address=10.0.0.1:6379"], "at ray.address=10.0.0.1:6379")]
)
async def test_a_ray_that_does_not_start_is_a_named_error(monkeypatch, overrides, where):
    def fail(**options):
        raise Exception("The current node timed out during startup.")

    stopped = []
    monkeypatch.setattr(cluster.ray, "init", fail)
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: stopped.append(True))
    with pytest.raises(ClusterDiedError, match=f"^Ray {where} did not come up: The current node timed out"):
        async with cluster.ray_cluster(compose_run(overrides)):
            pass
    assert stopped


async def test_a_stop_while_ray_starts_waits_for_it_before_it_is_shut_down(monkeypatch):
    """Ray that is shut down while it starts ends the whole process, with a status of its own."""
    starting, may_end, events = threading.Event(), threading.Event(), []

    def start(**options):
        starting.set()
        may_end.wait(30)
        events.append("up")

    async def enter():
        async with cluster.ray_cluster(compose_run([])):
            raise AssertionError("it was stopped before that")

    monkeypatch.setattr(cluster.ray, "init", start)
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: events.append("shut down"))
    entering = asyncio.create_task(enter())
    await asyncio.to_thread(starting.wait)
    entering.cancel()
    done, _ = await asyncio.wait([entering], timeout=0.1)
    assert not done
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await entering
    assert events == ["up", "shut down"]


async def test_a_part_that_dies_cancels_the_work_and_its_error_is_raised():
    begun, ended = asyncio.Event(), asyncio.Event()

    async def work():
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def watch():
        await begun.wait()
        raise WorkerDiedError("the buffer server died")

    with pytest.raises(WorkerDiedError, match="the buffer server died"):
        await run.unless(work(), [watch()])
    assert ended.is_set()
