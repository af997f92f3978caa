"""Taking turns against scripted parts: what happens in which order, and that nobody works in another's turn."""

import asyncio

import pytest

from asyncrl.cli.compose import compose_run
from asyncrl.config import check_options
from asyncrl.controller.controller import ColocatedController
from tests.asyncrl.test_controller import Prompts, ScriptedBuffer, ScriptedFleet, ScriptedLearner


class Learner(ScriptedLearner):
    async def rollout_mode(self, version):
        self.events.append(("rollout mode", version))
        return await self._publish(version)

    async def trainer_mode(self):
        self.events.append(("trainer mode", None))


class Fleet(ScriptedFleet):
    def __init__(self, events):
        super().__init__(load_s=0.0)
        self.events = events

    async def release_device(self):
        self.events.append(("release", None))

    async def load(self, snapshot):
        self.events.append(("load", snapshot.version))
        return await super().load(snapshot)


async def test_pools_take_turns_step_by_step():
    buffer, records = ScriptedBuffer(), []
    turns = ColocatedController(
        compose_run(["total_steps=3", "checkpoint.every_steps=2"]),
        buffer=buffer,
        learner=Learner(buffer.events),
        fleet=Fleet(buffer.events),
        prompts=Prompts(),
        on_step=records.append,
    )
    await asyncio.wait_for(turns.train(), 10)
    want = []
    for step in range(3):
        saved = [("save queued", step + 1)] if step > 0 else []
        want += [("plan", step), ("release", None), ("trainer mode", None), ("update queued", step), ("updated", step)]
        want += [*saved, ("rollout mode", step + 1), ("commit", step), ("load", step + 1)]
    assert buffer.events == want
    assert [record.engine_version for record in records] == [1, 2, 3]
    assert buffer.version == 3


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["rollout_fleet.num_engines=2"], "learner.num_ranks must equal rollout_fleet.num_engines"),
        (["rollout_fleet.device=cuda"], "learner.device and rollout_fleet.device must be the same"),
    ],
)
def test_pools_that_cannot_share_devices_are_refused_by_name(overrides, words):
    with pytest.raises(ValueError, match=words):
        check_options(compose_run(["placement.colocated=true", *overrides]))
