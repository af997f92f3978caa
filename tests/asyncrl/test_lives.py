"""The driver of a member: what it starts, ends and counts, on a body that obeys a script, in virtual time."""

import asyncio
import time

import pytest

from asyncrl.core.errors import ClusterDiedError, RewardError, WorkerDiedError
from asyncrl.run.lives import Lives
from rollout_fleet.member import Member, MemberLimits, MemberState

pytestmark = [pytest.mark.timeout(30), pytest.mark.usefixtures("virtual_time")]

LIMITS = MemberLimits(
    start_s=60, stop_s=10, drain_s=10, restarts=3, window_s=600, backoff_s=1.0, longest_backoff_s=60.0
)


class Body:
    """Serves until `die`; each start raises the next of ``begin_errors`` that is not None."""

    def __init__(self, *begin_errors):
        self.begin_errors = list(begin_errors)
        self.began_s, self.ended = [], []
        self.death = None
        self.said = []
        self.member = Member("engine-0", LIMITS, time.monotonic())
        self.lives = Lives(self.member, self, run_errors=(RewardError,), say=self.said.append)

    def serve(self):
        self.death = asyncio.get_running_loop().create_future()
        self.member.started(self.member.epoch)
        self.member.verified(self.member.epoch, 0)

    def die(self, error):
        self.death.set_exception(error)

    async def begin(self):
        self.began_s.append(time.monotonic())
        if self.begin_errors and (error := self.begin_errors.pop(0)) is not None:
            raise error
        self.serve()

    async def watch(self):
        await asyncio.shield(self.death)

    async def end(self, failure):
        self.ended.append(str(failure))


@pytest.fixture
async def watched():
    """Return a maker of bodies that serve and are watched."""
    made = []

    def make(*begin_errors):
        body = Body(*begin_errors)
        body.serve()
        body.lives.watch()
        made.append(body)
        return body

    yield make
    for body in made:
        await body.lives.close()


async def test_a_life_that_ends_is_ended_and_followed_by_another(watched):
    body = watched()
    await asyncio.sleep(0.1)
    body.die(WorkerDiedError("killed\nlast lines of its log"))
    await asyncio.sleep(1)
    assert (body.member.state, body.member.epoch) == (MemberState.ready, 1)
    assert body.ended == ["killed\nlast lines of its log"]
    assert body.said == ["engine-0 has ended, epoch 1 begins: killed", "engine-0 is back after 0.0 s"]


async def test_the_pause_before_each_start_grows_and_the_member_fails_by_its_last_error(watched):
    body = watched(OSError("no room"), OSError("no room"), OSError("still none"))
    await asyncio.sleep(0)
    body.die(WorkerDiedError("killed"))
    await asyncio.sleep(100)
    first, second, third = body.began_s
    assert (second - first, third - second) == (1.0, 2.0)
    assert body.member.state is MemberState.failed
    assert str(body.lives.failure) == "still none"
    assert len(body.ended) == 4, "each life that began was ended"


async def test_a_failed_call_ends_the_life_and_an_older_call_has_no_effect(watched):
    body = watched()
    await asyncio.sleep(0)
    epoch = body.member.epoch

    async def fails():
        raise OSError("gone")

    assert await body.lives.tried(epoch, asyncio.sleep(0, result=3)) == (3,)
    assert await body.lives.tried(epoch, fails()) is None
    await asyncio.sleep(1)
    assert (body.ended, body.member.epoch) == (["gone"], 1)
    await body.lives.declare(epoch, OSError("too late"))
    await asyncio.sleep(1)
    assert (body.ended, body.member.state) == (["gone"], MemberState.ready)
    assert await body.lives.tried(epoch, asyncio.Event().wait()) is None, "that life is over"


async def test_an_error_that_every_life_would_raise_is_raised_to_the_caller(watched):
    body = watched()

    async def fails():
        raise RewardError("wrong everywhere")

    with pytest.raises(RewardError, match="wrong everywhere"):
        await body.lives.tried(0, fails())
    assert body.ended == []


async def test_the_death_of_the_cluster_is_final(watched):
    body = watched(ClusterDiedError("gcs_server has died"))
    await asyncio.sleep(0)
    body.die(WorkerDiedError("killed"))
    await asyncio.sleep(1)
    assert body.member.state is MemberState.failed
    assert isinstance(body.lives.failure, ClusterDiedError)
    assert len(body.began_s) == 1


async def test_an_end_that_raises_is_reported_to_waiting_calls(watched):
    body = watched()
    await asyncio.sleep(0)

    async def end(failure):
        raise RuntimeError("a bug")

    body.end = end
    body.die(WorkerDiedError("killed"))
    await asyncio.wait_for(body.lives.until(lambda member: member.has_ended), 5)
    assert str(body.lives.failure) == "a bug"
