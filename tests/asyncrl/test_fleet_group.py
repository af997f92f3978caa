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
from asyncrl.protocol.errors import DeadlineError
from rollout_fleet.metrics import FleetMeter

pytestmark = [pytest.mark.timeout(30), pytest.mark.usefixtures("virtual_time")]


class Workers:
    """Stands in for the worker group; its calls take ``takes_s``, and `counters` never answers where it ``hangs``."""

    def __init__(self, takes_s=0.5, hangs=False):
        self.takes_s = takes_s
        self.hangs = hangs

    @property
    def workers(self):
        return [SimpleNamespace(answer=SimpleNamespace(remote=self._answer))]

    async def _answer(self, prompts, version, num_samples):
        await asyncio.sleep(self.takes_s)
        return [(prompt, version, num_samples) for prompt in prompts]

    async def run(self):
        await asyncio.sleep(self.takes_s)

    async def start(self):
        pass

    async def load_first(self):
        await asyncio.sleep(self.takes_s)

    def execute_all_async(self, method):
        return []

    def shutdown(self):
        pass

    async def counters(self):
        await asyncio.sleep(60 if self.hangs else 0)
        meters = FleetMeter(), FleetMeter()
        for meter in meters:
            meter.failed("reward")
        meters[0].failed("aborted")
        return [meter.counters() for meter in meters]


@pytest.fixture
def fleet_of(monkeypatch, tmp_path):
    """Return a maker of a fleet with these workers."""

    def make(workers):
        monkeypatch.setattr(fleet_group, "RayWorkerGroup", lambda *_, **__: workers)
        monkeypatch.setattr(fleet_group, "PendingResult", lambda call: call)
        connection = SimpleNamespace(for_role=lambda role: SimpleNamespace(client=None))
        folders = dict.fromkeys(("logs", "snapshots", "staging", "samples", "checkpoints"), tmp_path)
        paths = RunPaths(**folders, trajectories=None)
        config = compose_run(["buffer.request_timeout_s=0.1", "rollout_fleet.load_timeout_s=0.1"])
        return FleetGroup(config, buffer=connection, paths=paths, pool=object())

    return make


async def test_held_out_answers_take_as_long_as_they_take_while_the_workers_answer(fleet_of):
    fleet = fleet_of(Workers())
    assert fleet.engines() == ["0"]
    assert await fleet.answer("0", ["a", "b"], version=4, num_samples=3) == [("a", 4, 3), ("b", 4, 3)]


async def test_a_start_waits_as_long_as_it_must_for_the_first_weights(fleet_of):
    await asyncio.wait_for(fleet_of(Workers(takes_s=500.0)).start(), 501.0)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda fleet: fleet.run(), "which generate"),
        (lambda fleet: fleet.start(), "which wait for the first weights"),
    ],
)
async def test_a_worker_that_hangs_is_found_by_its_silence(fleet_of, call, words):
    with pytest.raises(DeadlineError, match=rf"waited 0.1 s for the rollout workers, {words}; raise buffer.request"):
        await asyncio.wait_for(call(fleet_of(Workers(takes_s=60, hangs=True))), 5)


async def test_a_worker_that_hangs_in_an_evaluation_is_found_by_its_silence(fleet_of):
    with pytest.raises(DeadlineError, match=r"waited 0.1 s for rollout worker 0, which answers held-out prompts"):
        await fleet_of(Workers(takes_s=60, hangs=True)).answer("0", [object()], version=0, num_samples=1)


async def test_failed_attempts_are_added_up_over_the_engines(fleet_of):
    assert (await fleet_of(Workers()).counters()).groups_failed == {"reward": 2, "aborted": 1}


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
