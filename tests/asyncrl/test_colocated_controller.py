"""Taking turns against scripted parts: what happens in which order, and that nobody works in another's turn."""

import pytest

from asyncrl.checks import check_options
from asyncrl.cli.compose import compose_run
from asyncrl.run.controller import ColocatedController
from tests.asyncrl.test_controller import Prompts, ScriptedBuffer, ScriptedFleet, ScriptedLearner, train


class Learner(ScriptedLearner):
    async def rollout_mode(self, version):
        self.events.append(("rollout mode", version))
        await self._offer(version)

    async def trainer_mode(self):
        self.events.append(("trainer mode", None))


class Fleet(ScriptedFleet):
    async def release_device(self):
        assert self.buffer.version == 0 or self.loaded[-1] == self.buffer.version
        self.buffer.events.append(("release", None))


async def test_pools_take_turns_step_by_step():
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
    want = []
    for step in range(3):
        saved = [("save queued", step + 1)] if step > 0 else []
        want += [("plan", step), ("release", None), ("trainer mode", None), ("update queued", step), ("updated", step)]
        want += [*saved, ("rollout mode", step + 1), ("commit", step)]
    assert buffer.events == want
    assert fleet.loaded == [1, 2, 3]
    assert [record.engine_version for record in records] == [1, 2, 3]
    assert buffer.version == 3


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
