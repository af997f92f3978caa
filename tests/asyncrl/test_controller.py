"""The controller's loops with a scripted buffer, learner and fleet: waits, overlap, and the end of a run."""

import asyncio
import math
import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from asyncrl.cli.compose import compose_run
from asyncrl.core.errors import AccountError, CheckpointError, ReplayBufferError, WorkerDiedError, root_cause
from asyncrl.core.ports import FleetCounts
from asyncrl.core.types import BufferStats, GroupSummary, Plan
from asyncrl.run.controller import Controller
from asyncrl.run.resume import RunState
from tests.support.checkpoints import save
from tests.support.offers import OffersInMemory, bare_offer

pytestmark = pytest.mark.usefixtures("virtual_time")
TOKENS_PER_STEP = 10


class ScriptedBuffer(OffersInMemory):
    """A scripted buffer. Like the real ledger, it can plan one version ahead of the latest commit.

    ``slow_parts`` maps the version of a slow checkpoint to a step. The buffer completes its files of this checkpoint
    only after the commit of the step.
    """

    def __init__(self, trained_per_step=TOKENS_PER_STEP, version=0, earlier=None, slow_parts=()):
        super().__init__(version)
        self.slow_parts = dict(slow_parts)
        self.earlier = earlier
        self.parts = []
        self.version = version
        self.first_version = version
        self.committed = asyncio.Condition()
        self.events = []
        self.trained_per_step = trained_per_step

    async def enqueue(self, prompts, *, wants_outcomes=False):
        await asyncio.sleep(3600)

    async def plan(self, version):
        assert version <= self.version + 1, "the ledger must refuse to plan further ahead"
        self.events.append(("plan", version))
        group = GroupSummary(
            group_id=version,
            attempt=0,
            num_prompt_tokens=3,
            response_lengths=(4, 6),
            num_tokens=10,
            oldest_version=max(0, version - 1),
            newest_version=version,
            rewards=(0.0, 1.0),
            num_truncated=1,
            metrics=(("reward.format", 0.5 * (version % 2)),),
        )
        return Plan(version=version, groups=[group])

    async def commit(self, version):
        async with self.committed:
            assert version == self.version
            self.version += 1
            self.events.append(("commit", version))
            self.committed.notify_all()
        await self.commit_offers(self.version)
        return await self.stats()

    async def finished(self):
        return [(0, self.version)]

    async def checkpoint(self, folder, version, *, key):
        async with self.committed:
            await self.committed.wait_for(lambda: self.version > self.slow_parts.get(version, -1))
        self.events.append(("buffer saved", version))
        self.parts.append((str(folder), version, key))

    async def stats(self):
        num_steps, earlier = self.version - self.first_version, self.earlier
        lags = Counter({0: 1, 1: num_steps - 1} if num_steps else {})
        return BufferStats(
            learner_version=self.version,
            groups=Counter(),
            tokens_trained=num_steps * self.trained_per_step + (earlier.tokens_trained if earlier else 0),
            tokens_dropped=earlier.tokens_dropped if earlier else {},
            tokens_buffered=0,
            lag_histogram=lags + Counter(earlier.lag_histogram if earlier else {}),
            puts_refused={},
            stored_bytes=0,
            leases_waiting=0,
            mean_length_kept=5.0,
            mean_length_dropped=0.0,
        )


class ScriptedLearner:
    """A learner with short sequential updates. The learner can die in an update."""

    checkpoints = Path("/checkpoints")

    def __init__(self, buffer, dies_at=None, full_at=None, saved=None, unpublished=None):
        self.buffer = buffer
        self.events = buffer.events
        self.unpublished = unpublished
        self.background = set()
        self.saved = [] if saved is None else saved
        self.full_at = full_at
        self.dies_at = dies_at
        self.turn = asyncio.Lock()
        self.spans = []

    async def scored(self, plan):
        return plan

    def step_critic(self, plan):
        values = asyncio.get_running_loop().create_future()
        values.set_result({"critic.value_loss": 0.5})
        return values

    def step(self, plan):
        self.events.append(("update queued", plan.version))
        return asyncio.ensure_future(self.run_update(plan.version))

    async def run_update(self, version):
        async with self.turn:
            await asyncio.sleep(0.01)
            if version == self.dies_at:
                raise WorkerDiedError("learner rank 0 on node 127.0.0.1 died")
            self.events.append(("updated", version))
            self.spans.append((time.time() - 0.5, time.time()))
            return {"started_at": self.spans[-1][0], "ended_at": self.spans[-1][1], "loss": 0.25}

    def publish(self, version):
        return asyncio.ensure_future(self.run_publish(version))

    async def run_publish(self, version):
        async with self.turn:
            self.background.add(asyncio.ensure_future(self._offer(version)))

    async def _offer(self, version):
        await asyncio.sleep(0.002)
        if version == self.unpublished:
            await self.buffer.publish_failed(f"the publish of version {version} failed on rank 1: no space")
        else:
            await self.buffer.offer(bare_offer(version))

    async def finish_publish(self):
        await asyncio.gather(*self.background)

    def save(self, version, run, *, wait, parts=()):
        self.events.append(("save queued", version))
        self.saved.append((version, run, wait))
        return asyncio.ensure_future(self.run_save(version))

    async def run_save(self, version):
        if version == self.full_at:
            raise CheckpointError("no space left on device")
        return f"/checkpoints/{version}"


class ScriptedFleet:
    """A fleet that skips versions, because it loads weights slowly."""

    def __init__(self, buffer, load_s=0.03):
        self.tokens_generated = 60
        self.buffer = buffer
        self.loaded = []
        self.load_s = load_s

    async def run(self):
        version = self.buffer.version
        while True:
            version = (await self.buffer.next_offer(version)).version
            await asyncio.sleep(self.load_s)
            self.loaded.append(version)
            await self.buffer.loaded(version, self.load_s)

    def engines(self):
        return ["0"]

    async def counters(self):
        return FleetCounts(tokens_generated=self.tokens_generated, tokens_in_flight=0)

    async def drain(self):
        return await self.counters()


class Prompts:
    wants_outcomes = False
    num_repeats = 0

    def note(self, groups):
        assert not groups

    def take(self, count):
        return []

    def state(self):
        return {"position": 99}

    def repeat_unfinished(self, finished):
        self.num_repeats += 1


def make_controller(
    *,
    buffer=None,
    dies_at=None,
    full_at=None,
    load_s=0.03,
    steps=6,
    overrides=(),
    resumed=None,
    earlier=None,
    saved=None,
    evaluate=None,
    unpublished=None,
    learner=None,
    fleet=None,
    prompts=None,
):
    buffer = buffer or ScriptedBuffer(version=resumed.version if resumed else 0)
    fleet = fleet or ScriptedFleet(buffer, load_s)
    records = []
    controller = Controller(
        compose_run([f"total_steps={steps}", *overrides]),
        buffer=buffer,
        learner=learner or ScriptedLearner(buffer, dies_at, full_at, saved, unpublished),
        fleet=fleet,
        prompts=prompts or Prompts(),
        on_step=records.append,
        evaluate=evaluate,
        resumed=resumed,
        earlier=earlier,
    )
    return controller, buffer, fleet, records


async def train(controller, fleet):
    """Train while the fleet's loop `run` loads the weights."""
    running = asyncio.ensure_future(fleet.run())
    try:
        await asyncio.wait_for(controller.train(), 10)
    finally:
        running.cancel()


async def test_training_consumes_every_version_once_and_ends_with_the_last_weights_on_the_fleet():
    controller, buffer, fleet, records = make_controller()
    await train(controller, fleet)
    result = await controller.account()
    assert [version for what, version in buffer.events if what == "commit"] == list(range(6))
    assert [record.step for record in records] == list(range(6))
    assert result.policy_version == 6
    assert fleet.loaded[-1] == 6
    assert result.tokens.balance == 0
    assert result.max_lag_realised == 1


async def test_the_next_update_is_queued_on_the_ranks_before_the_current_update_is_committed():
    controller, buffer, fleet, _ = make_controller()
    await train(controller, fleet)
    for version in range(5):
        assert buffer.events.index(("update queued", version + 1)) < buffer.events.index(("commit", version))


class UnsureLearner(ScriptedLearner):
    """A learner that adds a group without a score to each plan, as if the reward model had returned no number.

    The added group is a copy of the planned group with other response lengths.
    """

    async def scored(self, plan):
        (known,) = plan.groups
        unscored = replace(
            known, rewards=(math.nan,) * len(known.rewards), response_lengths=(900,) * len(known.rewards)
        )
        return replace(plan, groups=[known, unscored])


async def test_a_group_without_a_score_is_counted_and_excluded_from_the_means():
    buffer = ScriptedBuffer()
    _, _, _, expected = await finished(make_controller(steps=2))
    _, _, _, records = await finished(make_controller(buffer=buffer, learner=UnsureLearner(buffer), steps=2))
    for record, plain in zip(records, expected, strict=True):
        assert (record.unscored_groups, plain.unscored_groups) == (1, 0)
        for name in ("reward", "reward_std", "equal_reward_groups", "response_length", "samples_per_group"):
            assert getattr(record, name) == getattr(plain, name), name


async def finished(parts):
    controller, _, fleet, _ = parts
    await train(controller, fleet)
    return parts


async def test_weights_are_published_every_n_steps_and_after_the_last_step():
    controller, _, fleet, _ = make_controller(load_s=0.0, steps=7, overrides=["weights.publish_every=3"])
    await train(controller, fleet)
    assert fleet.loaded == [3, 6, 7]


async def test_slow_engines_skip_versions_and_never_go_back():
    controller, _, fleet, records = make_controller(load_s=0.05)
    await train(controller, fleet)
    assert len(fleet.loaded) < 6
    assert fleet.loaded == sorted(fleet.loaded)
    assert {record.publish_s for record in records if record.engine_version} <= {0.05}


async def test_no_step_waits_for_engines_that_load_weights_slowly():
    controller, _, fleet, records = make_controller(load_s=3.0)
    await train(controller, fleet)
    assert [record.engine_version for record in records] == [0] * 6
    assert fleet.loaded == [1, 6]


async def test_a_failed_publish_of_the_last_version_ends_training_with_an_error():
    controller, _, fleet, _ = make_controller(unpublished=6)
    with pytest.raises(BaseExceptionGroup) as caught:
        await train(controller, fleet)
    assert "the publish of version 6 failed on rank 1: no space" in str(root_cause(caught.value))


async def test_a_dead_learner_rank_ends_training_with_its_own_error():
    controller, _, fleet, _ = make_controller(dies_at=2)
    with pytest.raises(BaseExceptionGroup) as caught:
        await train(controller, fleet)
    assert isinstance(root_cause(caught.value), WorkerDiedError)
    assert "learner rank 0" in str(root_cause(caught.value))


async def test_a_lost_token_is_an_error_with_the_number_of_lost_tokens():
    controller, _, fleet, _ = make_controller(buffer=ScriptedBuffer(trained_per_step=9))
    await train(controller, fleet)
    with pytest.raises(AccountError, match="6 are not"):
        await controller.account()


async def test_the_record_of_a_step_has_the_figures_of_its_batch():
    controller, _, fleet, records = make_controller()
    await train(controller, fleet)
    assert {record.samples_per_group for record in records} == {2.0}
    assert (await controller.account()).samples_per_group == 2.0
    record = records[3]
    assert (record.reward, record.lag_mean, record.lag_max, record.response_length) == (0.5, 1.0, 1, 5.0)
    assert (record.reward_std, record.equal_reward_groups, record.truncated_samples) == (0.5, 0.0, 0.5)
    assert (record.flat()["reward.format"], records[2].flat()["reward.format"]) == (0.5, 0.0)
    assert record.learner_tokens_per_s == pytest.approx(10 / 0.5, rel=1e-3)
    assert record.flat()["learner.loss"] == 0.25
    assert record.flat()["learner.critic.value_loss"] == 0.5


class GrowingFleet(ScriptedFleet):
    """A fleet that generates 10 tokens before each call of `counters`."""

    async def counters(self):
        self.tokens_generated += 10
        return await super().counters()


async def test_fleet_rates_times_step_seconds_sum_to_the_generated_tokens():
    buffer = ScriptedBuffer()
    _, _, _, records = await finished(make_controller(buffer=buffer, fleet=GrowingFleet(buffer)))
    durations = [after - before for before, after in pairwise([0.0, *(record.time_s for record in records)])]
    tokens = [r.rollout_tokens_per_s * duration_s for r, duration_s in zip(records, durations, strict=True)]
    assert sum(tokens) == pytest.approx(records[-1].generated_tokens)


class BufferOfShortGroups(ScriptedBuffer):
    """A buffer whose batches have a complete group of four samples and an incomplete group.

    The incomplete group has three samples at even versions, and two samples at odd versions.
    """

    async def plan(self, version):
        [whole] = (await super().plan(version)).groups
        whole = replace(whole, response_lengths=(1, 2, 3, 4), rewards=(0.0, 1.0, 0.0, 1.0))
        lengths = (4, 6) if version % 2 else (2, 3, 5)
        short = replace(whole, group_id=version + 100, response_lengths=lengths, rewards=(1.0,) * len(lengths))
        return Plan(version=version, groups=[whole, short])


async def test_incomplete_groups_lower_the_mean_number_of_samples_per_group():
    buffer = BufferOfShortGroups()
    controller, _, fleet, records = make_controller(buffer=buffer, steps=3)
    await train(controller, fleet)
    fleet.tokens_generated = 3 * TOKENS_PER_STEP
    assert [record.samples_per_group for record in records] == [3.5, 3.0, 3.5]
    assert records[0].reward == pytest.approx(5 / 7), "the mean must be over samples, not over groups"
    assert (await controller.account()).samples_per_group == pytest.approx((7 + 6 + 7) / 6)


@pytest.mark.parametrize(("publish_every", "first"), [(1, 3), (2, 4)])
async def test_the_pinned_engine_keeps_its_version_during_an_evaluation_while_training_continues(publish_every, first):
    evaluated = []

    async def evaluate(version, pinned):
        assert await pinned(()) == {"0"}
        num_loaded, num_steps = len(fleet.loaded), len(records)
        assert fleet.loaded[-1] == version
        await asyncio.sleep(0.05)
        assert len(fleet.loaded) == num_loaded, "the pinned engine must keep its weights"
        assert len(records) > num_steps, "training must continue"
        evaluated.append(version)

    controller, buffer, fleet, records = make_controller(
        load_s=0.0,
        steps=30,
        overrides=["evaluation.every_steps=3", f"weights.publish_every={publish_every}"],
        evaluate=evaluate,
    )
    await train(controller, fleet)
    assert evaluated[0] == first
    assert evaluated == sorted(set(evaluated)), "versions that are published during an evaluation must be skipped"
    assert len(evaluated) > 2
    assert all(version < 30 for version in evaluated), "the last version must be evaluated after training"
    assert buffer.pins == [*evaluated, None]
    assert fleet.loaded[-1] == 30


async def test_both_parts_of_a_checkpoint_are_queued_between_two_updates():
    saved = []
    controller, buffer, fleet, _ = make_controller(overrides=["checkpoint.every_steps=2"], steps=5, saved=saved)
    await train(controller, fleet)
    assert [(version, wait) for version, _, wait in saved] == [(2, False), (4, False), (5, True)]
    for version, run, _ in saved:
        state = RunState.from_dict(run)
        assert buffer.events.index(("update queued", version - 1)) < buffer.events.index(("save queued", version))
        if version < 5:
            assert buffer.events.index(("save queued", version)) < buffer.events.index(("update queued", version))
        assert buffer.events.index(("buffer saved", version)) < buffer.events.index(("save queued", version))
        assert (f"/checkpoints/buffer/v{version:08d}", version, state.key) in buffer.parts
        assert (state.version, state.prompts, state.tokens_generated) == (version, {"position": 99}, 60)
        assert state.options["algorithm.groups_per_step"] == "32"
    assert len({key for *_, key in buffer.parts}) == 3


async def test_a_checkpoint_waits_while_the_buffer_writes_two_others(caplog):
    """The buffer completes its files of the first and the second checkpoint only after step 9."""
    saved = []
    buffer = ScriptedBuffer(slow_parts={1: 9, 2: 9})
    controller, _, fleet, _ = make_controller(
        buffer=buffer, overrides=["checkpoint.every_steps=1"], steps=14, saved=saved
    )
    await train(controller, fleet)
    versions = [version for version, _, _ in saved]
    assert versions[:2] == [1, 2]
    assert 9 < versions[2] < 14, "the third checkpoint must be saved after step 9"
    assert versions[-1] == 14
    (warning,) = [record.message for record in caplog.records if "checkpoint" in record.message]
    assert "the checkpoint of step 3 waits: the buffer still writes its parts of two earlier checkpoints" in warning


async def test_a_resumed_run_continues_the_version_and_the_account_of_its_checkpoint():
    before = RunState(version=3, prompts={"position": 5}, tokens_generated=50, lineage="life 1")
    totals = await ScriptedBuffer().stats()
    lost = {"stale": 4, "resume": 16}
    earlier = replace(totals, tokens_trained=30, tokens_dropped=lost, lag_histogram={0: 2, 2: 1})
    saved = []
    controller, buffer, fleet, records = make_controller(
        buffer=ScriptedBuffer(version=3, trained_per_step=20, earlier=earlier),
        resumed=before,
        earlier=earlier,
        overrides=["checkpoint.every_steps=6"],
        saved=saved,
    )
    await train(controller, fleet)
    result = await controller.account()
    assert (result.max_lag_realised, result.max_lag_before) == (1, 2)
    assert [version for what, version in buffer.events if what == "commit"] == [3, 4, 5]
    assert [record.step for record in records] == [3, 4, 5]
    assert min(fleet.loaded) > 3
    assert result.tokens.generated == 50 + 60
    assert result.tokens.trained == 30 + 60
    assert result.tokens_dropped == {"stale": 4, "resume": 16}
    assert result.tokens.balance == 0
    assert result.lag_histogram == {0: 3, 1: 2, 2: 1}
    again = RunState.from_dict(saved[-1][1])
    assert (again.tokens_generated, again.lineage) == (110, "life 1")


async def test_a_stopped_training_commits_reports_and_saves_its_queued_steps():
    saved = []
    controller, buffer, fleet, records = make_controller(steps=1000, saved=saved)
    training = asyncio.ensure_future(controller.train())
    async with buffer.committed:
        await buffer.committed.wait_for(lambda: buffer.version == 3)
    controller.stop()
    await asyncio.wait_for(training, 10)
    fleet.tokens_generated = buffer.version * TOKENS_PER_STEP
    queued = [version for what, version in buffer.events if what == "update queued"]
    assert [version for what, version in buffer.events if what == "commit"] == queued
    assert [record.step for record in records] == queued
    assert 3 <= len(queued) <= 5
    assert await controller.save_stopped() == f"/checkpoints/{len(queued)}"
    ((version, state, waits),) = saved
    assert (version, state["version"], waits) == (len(queued), len(queued), True)
    assert (await controller.account()).policy_version == len(queued)
    assert controller.is_stopped
    assert not controller.has_all_steps


async def test_a_training_stopped_before_its_first_batch_ends_and_saves_its_initial_version():
    saved = []
    buffer = ScriptedBuffer()
    buffer.plan = lambda version: asyncio.sleep(3600)
    controller, _, fleet, records = make_controller(buffer=buffer, saved=saved)
    training = asyncio.ensure_future(train(controller, fleet))
    await asyncio.sleep(0.1)
    controller.stop()
    await asyncio.wait_for(training, 1)
    fleet.tokens_generated = 0
    assert await controller.save_stopped() == "/checkpoints/0"
    assert (records, saved[0][0]) == ([], 0)


async def test_a_requested_checkpoint_is_saved_with_the_next_step_and_reported_when_complete(tmp_path):
    class Writer(ScriptedLearner):
        """A learner that completes a checkpoint on disk about two steps after the controller has requested it."""

        async def run_save(self, version):
            folder = tmp_path / f"v{version:08d}"
            asyncio.get_running_loop().call_later(0.02, save, tmp_path, version)
            return str(folder)

    buffer, saved = ScriptedBuffer(), []
    controller, _, fleet, records = make_controller(steps=20, buffer=buffer, learner=Writer(buffer, saved=saved))
    asking = asyncio.ensure_future(controller.checkpoint())
    training = asyncio.ensure_future(train(controller, fleet))
    folder = await asyncio.wait_for(asking, 10)
    assert folder.is_dir()
    ((version, _, waits),) = saved
    assert (folder.name, waits) == (f"v{version:08d}", False)
    assert len(records) < 20, "training must not wait for the checkpoint"
    await training
    assert len(saved) == 1


async def test_a_checkpoint_that_cannot_be_written_ends_the_run():
    controller, _, fleet, _ = make_controller(overrides=["checkpoint.every_steps=2"], full_at=4)
    with pytest.raises(BaseExceptionGroup) as caught:
        await train(controller, fleet)
    assert "no space left" in str(root_cause(caught.value))


async def test_a_buffer_that_cannot_write_its_part_of_a_checkpoint_ends_the_run():
    class FullDisk(ScriptedBuffer):
        async def checkpoint(self, folder, version, *, key):
            raise ReplayBufferError("no space left on device")

    controller, _, fleet, _ = make_controller(buffer=FullDisk(), overrides=["checkpoint.every_steps=2"])
    with pytest.raises(BaseExceptionGroup) as caught:
        await train(controller, fleet)
    assert "no space left" in str(root_cause(caught.value))
