"""After the death of a learner rank: the step at which training restarts, and the limit of restarts."""

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from ray.exceptions import RaySystemError

from asyncrl.cli.compose import compose_run
from asyncrl.core.errors import BatchLost, LearnerDiedError, ReplayBufferError, WorkerDiedError
from asyncrl.run.learner_restarts import LearnerRestarts, death_in
from asyncrl.run.resume import Resumed, RunState
from asyncrl.run.run_folder import remove_published
from learner.checkpoint_folder import SavedProgress, write_progress
from tests.asyncrl.test_controller import (
    Prompts,
    ScriptedBuffer,
    ScriptedFleet,
    ScriptedLearner,
    make_controller,
)
from tests.support.offers import bare_offer

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("virtual_time")]


class RewindingBuffer(ScriptedBuffer):
    """A buffer that can go back to the version of a checkpoint. It drops the tokens of the undone steps."""

    def __init__(self) -> None:
        super().__init__()
        self.rewinds: list[tuple[int, int, int]] = []
        self.lost: list[list[int]] = []

    async def lose(self, group_ids):
        self.lost.append(list(group_ids))

    async def rewind(self, version, *, incarnation):
        assert version <= self.version
        self.rewinds.append((version, incarnation, self.version))
        self.version = self.learner_version = version
        self.log.__init__()


class MortalLearner(ScriptedLearner):
    """A learner that saves checkpoints to a folder. Its ranks die at each version in ``deaths``."""

    def __init__(self, buffer, folder: Path, deaths: list[int], error: Exception | None = None) -> None:
        super().__init__(buffer)
        self.checkpoints = folder
        self.deaths = deaths
        self.error = error or LearnerDiedError("worker of group 'learner', rank 1 died.\nLast lines of learner-1.log")
        self.lives: list[tuple[str, int]] = []
        self.is_dead = False

    def step(self, plan):
        return _unwatched(super().step(plan))

    def save(self, version, run, *, wait, parts=()):
        return _unwatched(super().save(version, run, wait=wait))

    async def run_update(self, version):
        await self._live(version)
        return await super().run_update(version)

    async def _live(self, version=None):
        """Raise ``error`` if ``version`` is the first value of ``deaths``, or if the learner is already dead.

        `begin_again` makes the learner live again.
        """
        async with self.turn:
            if self.deaths and version == self.deaths[0]:
                self.deaths.pop(0)
                self.is_dead = True
            if self.is_dead:
                raise self.error

    async def run_save(self, version):
        await self._live()
        async with self.turn:
            [run] = [run for saved, run, _ in self.saved if saved == version][-1:]
            checkpoint = self.checkpoints / f"v{version:08d}"
            checkpoint.mkdir(parents=True, exist_ok=True)
            options = {"num_updates": version, "num_ranks": 1, "sp_size": 1, "dtype": "float32"}
            write_progress(checkpoint, SavedProgress(version=version, run=run, **options))
        return str(checkpoint)

    async def end(self):
        self.turn = asyncio.Lock()

    async def begin_again(self, checkpoint, version, *, incarnation):
        self.lives.append((checkpoint.name, incarnation))
        self.is_dead = False
        await self.buffer.offer(bare_offer(version))


def _unwatched(call):
    """Retrieve the exception of ``call``, so that asyncio logs no warning. No task awaits calls to a dead learner."""
    call.add_done_callback(lambda done: done.cancelled() or done.exception())
    return call


class RewindingFleet(ScriptedFleet):
    """Engines that load all offered versions again each time the learner goes back to a checkpoint."""

    async def run(self):
        num_rewinds, version = 0, 0
        while True:
            version = (await self.buffer.next_offer(version)).version
            await asyncio.sleep(self.load_s)
            self.loaded.append(version)
            await self.buffer.loaded(version, self.load_s)
            if len(self.buffer.rewinds) != num_rewinds:
                num_rewinds, version = len(self.buffer.rewinds), -1


class Run:
    """A run of six steps with a checkpoint every two steps. The learner dies at the versions ``deaths``."""

    def __init__(
        self, folder: Path, deaths: list[int], *overrides: str, error=None, resumed=None, make_learner=None
    ) -> None:
        overrides = ("total_steps=6", "checkpoint.every_steps=2", *overrides)
        self.buffer = RewindingBuffer()
        make_learner = make_learner or partial(MortalLearner, folder=folder, deaths=deaths, error=error)
        self.learner = make_learner(self.buffer)
        self.fleet = RewindingFleet(self.buffer, 0.0)
        self.controller, *_, self.records = make_controller(
            buffer=self.buffer, learner=self.learner, fleet=self.fleet, overrides=overrides
        )
        self.said: list[str] = []
        self.prompts = Prompts()
        self.restarts = LearnerRestarts(
            compose_run(overrides),
            controller=self.controller,
            learner=self.learner,
            prompts=self.prompts,
            resumed=resumed,
            say=self.said.append,
        )

    async def train(self) -> None:
        running = asyncio.ensure_future(self.fleet.run())
        try:
            await asyncio.wait_for(self.restarts.through(self.controller.train), 60)
        finally:
            running.cancel()


async def test_a_run_continues_from_the_newest_checkpoint_after_the_learner_dies(tmp_path: Path):
    run = Run(tmp_path, [3])
    await run.train()
    assert run.learner.lives == [("v00000002", 1)]
    assert [rewind[:2] for rewind in run.buffer.rewinds] == [(2, 1)]
    assert [record.step for record in run.records] == [0, 1, 2, 2, 3, 4, 5]
    assert run.records[-1].time_s > run.records[2].time_s
    assert run.restarts.faults.num_restarts == 1
    said = "the learner starts again from the newest checkpoint (restart 1 of learner.restarts=1): "
    assert run.said[0] == f"{said}worker of group 'learner', rank 1 died."
    assert run.prompts.num_repeats == 1
    assert "the learner continues from version 2 (" in run.said[1]
    result = await run.controller.account()
    assert (result.policy_version, result.tokens.balance) == (6, 0)
    last = RunState.from_dict(run.learner.saved[-1][1])
    assert last.version == 6


async def test_a_step_in_a_checkpoint_that_the_ledger_lacks_is_committed_before_the_rewind(tmp_path: Path):
    run = Run(tmp_path, [])
    run.buffer.version = run.buffer.learner_version = 3
    assert await run.controller.rewind(RunState(version=4), incarnation=1) == [(0, 4)]
    assert ("commit", 3) in run.buffer.events
    assert run.buffer.rewinds == [(4, 1, 4)]


class LosingLearner(MortalLearner):
    """A learner that loses the batch of each version in ``losses``: its ranks do not find the batch in the buffer.

    Calls that are queued after a lost batch raise `BatchLost` too.
    """

    def __init__(self, buffer, folder: Path, losses: list[int], *, names=(7,)) -> None:
        super().__init__(buffer, folder, [])
        self.losses, self.names = losses, names
        self.version = 0
        self.made: list[int] = []

    async def _live(self, version=None):
        async with self.turn:
            if self.losses and version == self.losses[0]:
                self.losses.pop(0)
                raise BatchLost(f"the batch of step {version} is lost")
            if version is not None and version > self.version:
                raise BatchLost(f"the step of version {version} is dropped after a lost batch")
            if version is not None:
                self.version = version + 1
                self.made.append(version)

    async def run_publish(self, version):
        async with self.turn:
            if version > self.version:
                raise BatchLost(f"version {version} was not made")
        await super().run_publish(version)

    def publish(self, version):
        return _unwatched(super().publish(version))

    async def withdraw(self):
        async with self.turn:
            return list(self.names)


def losing(folder: Path, losses: list[int], *overrides: str, **options) -> Run:
    return Run(folder, [], *overrides, make_learner=partial(LosingLearner, folder=folder, losses=losses, **options))


@pytest.mark.parametrize("losses", [[0], [3], [2, 2, 2, 5]])
async def test_a_lost_batch_is_planned_again_and_every_step_is_made_once(tmp_path: Path, losses):
    run = losing(tmp_path, list(losses))
    await run.train()
    assert run.learner.made == [record.step for record in run.records] == list(range(6))
    assert run.buffer.lost == [[7]] * len(losses)
    assert (run.buffer.rewinds, run.learner.lives) == ([], []), "neither buffer nor learner may go back to a checkpoint"
    assert (run.restarts.faults.num_restarts, run.restarts.num_replans) == (0, len(losses))
    assert run.said[-1] == f"1 groups of step {losses[-1]} were lost with their store; its batch is planned again"
    assert run.fleet.loaded[-1] == 6
    assert (await run.controller.account()).tokens.balance == 0


@pytest.mark.parametrize(("num_losses", "names"), [(4, (7,)), (1, ())])
async def test_a_batch_lost_repeatedly_or_without_known_groups_counts_as_a_learner_death(
    tmp_path: Path, num_losses, names
):
    run = losing(tmp_path, [4] * num_losses, names=names)
    await run.train()
    assert run.learner.lives == [("v00000004", 1)]
    assert run.restarts.num_replans == num_losses - 1


async def test_a_batch_that_the_reward_model_lost_is_planned_again_after_the_earlier_steps(tmp_path: Path):
    run = losing(tmp_path, [])
    scored, losses = run.learner.scored, [4]

    async def lose_once(plan):
        if plan.version in losses:
            losses.remove(plan.version)
            raise BatchLost("the batch of step 4 is lost")
        return await scored(plan)

    run.learner.scored = lose_once
    await run.train()
    assert run.learner.made == [record.step for record in run.records] == list(range(6))
    assert run.restarts.num_replans == 1


async def test_with_shared_devices_a_lost_batch_counts_as_a_death(tmp_path: Path):
    run = losing(tmp_path, [4], "placement.colocated=true")
    await run.train()
    assert len(run.learner.lives) == 1
    assert (run.restarts.faults.num_restarts, run.restarts.num_replans) == (1, 0)


async def test_a_learner_can_die_and_restart_twice(tmp_path: Path):
    run = Run(tmp_path, [3, 5], "learner.restarts=3")
    await run.train()
    assert run.learner.lives == [("v00000002", 1), ("v00000004", 2)]


async def test_a_failed_restart_of_the_learner_is_repeated_up_to_the_limit(tmp_path: Path):
    run = Run(tmp_path, [3], "learner.restarts=3")
    begin, failures = run.learner.begin_again, [OSError(24, "Too many open files"), RaySystemError("no memory")]

    async def begin_again(*arguments, **options):
        if failures:
            raise failures.pop()
        await begin(*arguments, **options)

    run.learner.begin_again = begin_again
    await run.train()
    assert run.learner.lives == [("v00000002", 3)]
    failures += [OSError(24, "Too many open files")] * 4
    run = Run(tmp_path / "other", [3], "learner.restarts=2")
    run.learner.begin_again = begin_again
    words = r"learner.restarts=2 are used up: the learner did not start again: OSError\(24, 'Too many open files'\)"
    with pytest.raises(LearnerDiedError, match=words):
        await run.train()


@pytest.mark.parametrize(
    ("deaths", "overrides", "words"),
    [
        ([3, 3], [], r"learner.restarts=1 are used up: .* rank 1 died\.\nLast lines of learner-1.log"),
        ([3], ["learner.restarts=0"], r"rank 1 died\.\nLast lines"),
        (
            [1],
            [],
            r"no checkpoint to restart .* from; checkpoint.every_steps=2 has not written one yet: .* rank 1 died",
        ),
        (
            [1],
            ["checkpoint.every_steps=0"],
            r"the run has no checkpoint to restart the learner from; set checkpoint.every_steps: .* rank 1 died",
        ),
    ],
)
async def test_a_dead_learner_that_cannot_restart_ends_the_run_with_a_remedy(tmp_path: Path, deaths, overrides, words):
    run = Run(tmp_path, deaths, *overrides)
    with pytest.raises(LearnerDiedError, match=words):
        await run.train()


async def test_an_error_that_is_not_the_death_of_a_learner_rank_ends_the_run(tmp_path: Path):
    run = Run(tmp_path, [3], error=ValueError("the loss is not a number"))
    with pytest.raises(ExceptionGroup) as caught:
        await run.train()
    assert caught.group_contains(ValueError, match="not a number")
    assert run.learner.lives == []


async def test_a_resumed_run_without_own_checkpoints_returns_to_the_checkpoint_of_its_start(tmp_path: Path):
    before = Resumed(checkpoint=tmp_path / "before" / "v00000000", state=RunState())
    run = Run(tmp_path / "own", [1], resumed=before)
    await run.train()
    assert run.learner.lives == [("v00000000", 1)]


def test_the_death_of_a_rank_is_distinguished_from_other_faults():
    death, other = LearnerDiedError("rank 0"), ReplayBufferError("the disk is full")
    assert death_in(death) is death
    assert death_in(ExceptionGroup("", [ExceptionGroup("", [death])])) is death
    assert death_in(ExceptionGroup("", [death, other])) is None
    lost = BatchLost("the batch of step 4")
    assert death_in(ExceptionGroup("", [ExceptionGroup("", [lost])])) is lost
    assert death_in(ExceptionGroup("", [lost, death])) is death, "the death must count, not the lost batch"
    assert death_in(ExceptionGroup("", [lost, other])) is None
    assert death_in(WorkerDiedError("rollout rank 0")) is None


async def test_a_checkpoint_of_another_run_in_the_same_folder_is_not_used(tmp_path: Path):
    run = Run(tmp_path, [3])
    foreign = replace(RunState(), version=2, tokens_generated=7)
    save = run.learner.run_save

    async def save_foreign(version):
        path = await save(version)
        progress = {"num_updates": 2, "num_ranks": 1, "sp_size": 1, "dtype": "float32"}
        write_progress(Path(path), SavedProgress(version=version, run=foreign.to_dict(), **progress))
        return path

    run.learner.run_save = save_foreign
    with pytest.raises(LearnerDiedError, match="no checkpoint to restart the learner from"):
        await run.train()


def test_weights_of_lost_versions_are_removed_and_older_weights_remain(tmp_path: Path):
    for name in ("v00000004", "v00000005", "v00000012", ".next-7", ".staged"):
        (tmp_path / name).mkdir()
    remove_published(tmp_path, after=4)
    assert {path.name for path in tmp_path.iterdir()} == {"v00000004", ".staged"}
    remove_published(tmp_path / "absent", after=4)
