"""Colocated training with a scripted learner and fleet: the order of events, and never two users of the device."""

import asyncio

import pytest

from asyncrl.checks import check_options
from asyncrl.cli.compose import compose_run
from asyncrl.run.controller import ColocatedController
from asyncrl.run.learner_restarts import LearnerRestarts
from tests.asyncrl.test_controller import Prompts, ScriptedBuffer, ScriptedFleet, ScriptedLearner, train
from tests.asyncrl.test_learner_restarts import MortalLearner, RewindingBuffer


class Learner(ScriptedLearner):
    async def rollout_mode(self, version):
        self.events.append(("rollout mode", version))
        await self._offer(version)

    async def trainer_mode(self):
        self.events.append(("trainer mode", None))


class Fleet(ScriptedFleet):
    async def release_device(self, incarnation=None):
        assert self.buffer.version == 0 or self.loaded[-1] == self.buffer.version
        self.buffer.events.append(("release", incarnation))

    def take_device(self):
        self.buffer.events.append(("take", None))


async def test_colocated_pools_alternate_in_each_step():
    buffer, records = ScriptedBuffer(), []
    fleet = Fleet(buffer, load_s=0.01)
    turns = ColocatedController(
        compose_run(["total_steps=3", "checkpoint.every_steps=2"]),
        buffer=buffer,
        learner=Learner(buffer),
        fleet=fleet,
        prompts=Prompts(),
        on_step=records.append,
    )
    await train(turns, fleet)
    want = [("take", None)]
    for step in range(3):
        saved = [("buffer saved", step + 1), ("save queued", step + 1)] if step > 0 else []
        want += [("plan", step), ("release", None), ("trainer mode", None), ("update queued", step), ("updated", step)]
        want += [*saved, ("rollout mode", step + 1), ("take", None), ("commit", step)]
    assert buffer.events == want
    assert fleet.loaded == [1, 2, 3]
    assert [record.engine_version for record in records] == [1, 2, 3]
    assert buffer.version == 3


class PatientFleet(Fleet):
    async def release_device(self, incarnation=None):
        self.buffer.events.append(("release", incarnation))


@pytest.mark.parametrize("when", ["plan", "update queued"])
async def test_colocated_training_stops_between_steps_and_saves_while_the_learner_has_the_device(when):
    buffer, records, saved = ScriptedBuffer(), [], []
    fleet = PatientFleet(buffer, load_s=0.01)
    learner = Learner(buffer, saved=saved)
    turns = ColocatedController(
        compose_run(["total_steps=100"]),
        buffer=buffer,
        learner=learner,
        fleet=fleet,
        prompts=Prompts(),
        on_step=records.append,
    )
    plan, step = buffer.plan, learner.step

    async def planned(version):
        if version == 2 and when == "plan":
            turns.stop()
            await asyncio.sleep(3600)
        return await plan(version)

    def stepped(batch):
        if batch.version == 1 and when == "update queued":
            turns.stop()
        return step(batch)

    buffer.plan, learner.step = planned, stepped
    await train(turns, fleet)
    fleet.tokens_generated = 20
    assert await turns.save_stopped() == "/checkpoints/2"
    assert [record.step for record in records] == [0, 1]
    last = buffer.events[-4:]
    assert last == [("release", None), ("trainer mode", None), ("buffer saved", 2), ("save queued", 2)]
    assert (("rollout mode", 2) in buffer.events) == (when == "plan")


class SharedDevice:
    """A device that records which component uses it. Two users at the same time are an error."""

    def __init__(self):
        self.user, self.turns = "engines", []

    def take(self, user, *, free_of):
        assert self.user != free_of, f"{user} took the device, which {free_of} used in {self.turns}"
        self.user = user
        self.turns.append(user)


class DyingLearner(MortalLearner):
    """A learner that dies in a given call during one step."""

    def __init__(self, buffer, folder, device, dies_in):
        super().__init__(buffer, folder, [])
        self.device, self.dies_in = device, dies_in

    def _reach(self, place):
        if place == self.dies_in:
            self.dies_in = None
            raise self.error

    async def trainer_mode(self):
        self.device.take("learner", free_of="engines")
        self._reach(("trainer_mode", self.buffer.version))

    async def run_update(self, version):
        self._reach(("update", version))
        return await super().run_update(version)

    async def rollout_mode(self, version):
        self._reach(("before the offer", version))
        self.device.user = None
        await self._offer(version)
        self._reach(("after the offer", version))

    async def end(self):
        await super().end()
        self.device.user = None if self.device.user == "learner" else self.device.user

    async def begin_again(self, checkpoint, version, *, incarnation):
        self.device.take("learner", free_of="engines")
        self.device.user = None
        await super().begin_again(checkpoint, version, incarnation=incarnation)


class TakingFleet(ScriptedFleet):
    """A fleet whose engines take the device when they load an offer, and release it on request."""

    def __init__(self, buffer, device, learner):
        super().__init__(buffer, 0.001)
        self.device, self.learner, self.releases = device, learner, []

    async def run(self, version=0):
        self.loading = asyncio.current_task()
        while True:
            version = (await self.buffer.next_offer(version)).version
            self.device.take("engines", free_of="learner")
            await asyncio.sleep(0.001)
            await self.buffer.loaded(version, 0.001)

    async def release_device(self, incarnation=None):
        self.releases.append(incarnation)
        if self.learner.dies_in == ("release", self.buffer.version):
            self.learner.dies_in = None
            raise self.learner.error
        if incarnation is not None:
            self.loading.cancel()
            self.loading = asyncio.ensure_future(self.run(-1))
        self.device.user = None

    def take_device(self):
        assert self.device.user != "learner"


@pytest.mark.long
@pytest.mark.parametrize(
    "dies_in",
    [
        ("release", 3),
        ("trainer_mode", 3),
        ("update", 3),
        ("before the offer", 4),
        ("after the offer", 4),
        ("update", 5),
    ],
)
async def test_a_dead_colocated_learner_starts_again_after_the_engines_released_the_devices(
    tmp_path, virtual_time, dies_in
):
    overrides = ["total_steps=6", "checkpoint.every_steps=2", "placement.colocated=true"]
    buffer, device, records = RewindingBuffer(), SharedDevice(), []
    learner = DyingLearner(buffer, tmp_path, device, dies_in)
    fleet = TakingFleet(buffer, device, learner)
    turns = ColocatedController(
        compose_run(overrides), buffer=buffer, learner=learner, fleet=fleet, prompts=Prompts(), on_step=records.append
    )
    restarts = LearnerRestarts(
        compose_run(overrides),
        controller=turns,
        learner=learner,
        prompts=Prompts(),
        resumed=None,
        say=lambda _: None,
    )
    fleet.loading = asyncio.ensure_future(fleet.run())
    try:
        await asyncio.wait_for(restarts.through(turns.train), 60)
    finally:
        fleet.loading.cancel()
    back_to = 4 if (dies_in[1] > 3 and dies_in[0] != "update") or dies_in[1] == 5 else 2
    assert learner.lives == [(f"v{back_to:08d}", 1)]
    assert [number for number in fleet.releases if number is not None] == [1]
    assert [record.step for record in records][-1] == 5
    assert sorted({record.step for record in records}) == list(range(6))
    assert (await turns.account()).tokens.balance == 0


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["rollout_fleet.num_engines={min: 1, max: 2}"],
            "num_engines must be a number with placement.co",
        ),
        (["rollout_fleet.num_engines=2"], "learner.num_ranks must equal rollout_fleet.num_engines"),
        (["rollout_fleet.device=cuda"], "learner.device and rollout_fleet.device must be the same"),
    ],
)
def test_pools_that_cannot_share_devices_are_refused_by_name(overrides, words):
    with pytest.raises(ValueError, match=words):
        check_options(compose_run(["placement.colocated=true", *overrides]))
