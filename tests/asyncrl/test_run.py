"""The files that a run writes when a signal stops it."""

import asyncio
import io
import subprocess
import sys
from contextlib import asynccontextmanager
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from rich.console import Console

from asyncrl.cli.compose import compose_run
from asyncrl.core.errors import CheckpointError, ReplayBufferError, WorkerDiedError
from asyncrl.core.ports import FleetCounts
from asyncrl.metrics import TerminalView
from asyncrl.run import training
from asyncrl.run.node_folders import NodeFolders
from asyncrl.run.resume import RunState
from asyncrl.run.run import Run
from tests.asyncrl.test_controller import TOKENS_PER_STEP, ScriptedBuffer, ScriptedLearner, make_controller, train
from tests.asyncrl.test_metrics import make_record


class Learner:
    def __init__(self, error=None, seconds=0.0):
        self.error, self.seconds = error, seconds

    async def save_policy(self, directory):
        directory.mkdir()
        await asyncio.sleep(self.seconds)
        if self.error is not None:
            raise self.error


class FullDisk(ScriptedLearner):
    async def run_save(self, version):
        raise CheckpointError("no space left on device")


class SilentWatching:
    """A stand-in for `Watching` that does not show anything."""

    def examine(self, record):
        return record

    def step(self, record):
        pass


def make_training(run_dir, view, *overrides, learner=None, records=(), **others):
    """Return a `Training` that is not started yet. ``records`` are its records of earlier steps."""
    parts = dict.fromkeys(("buffer", "fleet", "prompts", "evaluator", "resumed")) | others
    return training.Training(
        compose_run([*overrides]),
        run_dir,
        **parts,
        learner=learner,
        writer=SimpleNamespace(steps=records, evaluations=[], write=lambda record: None),
        watching=SilentWatching(),
        nodes=NodeFolders(run_dir, {}, timeout_s=1.0),
        view=view,
        first=RunState(),
        count_restarts=dict,
        all_answer=lambda: True,
    )


async def keep(tmp_path, policy, *overrides, learner=ScriptedLearner):
    """Stop a training in its fourth step, and let it save its results.

    Returns the printed messages and the names of the written files.
    """
    buffer, saved = ScriptedBuffer(), []
    controller, _, fleet, records = make_controller(steps=1000, buffer=buffer, learner=learner(buffer, saved=saved))
    steps = asyncio.ensure_future(train(controller, fleet))
    async with buffer.committed:
        await buffer.committed.wait_for(lambda: buffer.version == 3)
    fleet.drain = lambda: counts_of(buffer)
    fleet.counters = fleet.drain
    output = io.StringIO()
    view = TerminalView(title="run", total_steps=3, console=Console(file=output, width=200))
    with patch.object(training, "Controller", lambda *_, **__: controller):
        stopped = make_training(tmp_path, view, "save_timeout_s=0.2", *overrides, learner=policy, records=records)
    await stopped.save_after_signal(steps, None)
    assert len(saved) == ("checkpoint.at_stop=false" not in overrides)
    return output.getvalue(), sorted(path.name for path in tmp_path.iterdir())


async def counts_of(buffer):
    return FleetCounts(tokens_generated=TOKENS_PER_STEP * buffer.version, tokens_in_flight=0)


@pytest.mark.usefixtures("virtual_time")
async def test_a_stopped_run_keeps_checkpoint_policy_summary_and_plot(tmp_path):
    said, found = await keep(tmp_path, Learner())
    assert said.strip().endswith(("saved /checkpoints/4", "saved /checkpoints/5"))
    assert found == ["policy", "reward.png", "summary.json"]
    assert (await keep(tmp_path, Learner(), "checkpoint.at_stop=false"))[0] == ""


@pytest.mark.usefixtures("virtual_time")
@pytest.mark.parametrize(
    ("learner", "words"),
    [
        (Learner(seconds=60.0), "policy and summary took longer than save_timeout_s=0.2 after the signal; raise this"),
        (Learner(WorkerDiedError("learner rank 0 died")), "writing policy and summary failed: learner rank 0 died"),
    ],
)
async def test_a_failed_write_of_the_policy_is_reported_and_leaves_no_incomplete_policy(tmp_path, learner, words):
    said, found = await keep(tmp_path, learner)
    assert words in said
    assert found == [".policy.partial"]


@pytest.mark.usefixtures("virtual_time")
async def test_a_failed_write_of_the_last_checkpoint_is_reported(tmp_path):
    said, found = await keep(tmp_path, Learner(), learner=FullDisk)
    assert "writing the checkpoint failed: no space left on device" in said
    assert found == []


@pytest.mark.parametrize(("save_progress", "hands_over"), [("at_stop", True), ("never", False)])
def test_the_buffer_requests_no_hand_over_if_progress_is_never_saved(tmp_path, save_progress, hands_over):
    view = TerminalView(title="run", total_steps=3, console=Console(file=io.StringIO()))
    config = compose_run([f"rollout_fleet.save_progress={save_progress}"])
    assert Run(config, tmp_path, (None, []), None, view, print).buffer_options().hand_over is hands_over


async def test_a_failed_write_of_the_profile_only_prints_a_message(tmp_path, monkeypatch):
    def explain(_):
        raise KeyError("lag")

    monkeypatch.setattr(training, "explain", explain)
    monkeypatch.setattr(training.record, "current", object)
    output = io.StringIO()
    view = TerminalView(title="run", total_steps=3, console=Console(file=output, width=200))
    assert await make_training(tmp_path, view).write_report() is None
    assert "the profile could not be written: KeyError('lag')" in output.getvalue()


@pytest.mark.usefixtures("virtual_time")
async def test_a_line_says_what_the_run_waits_for_while_no_step_finishes(tmp_path):
    output = io.StringIO()
    groups = {"queued": 4, "leased": 2, "stored": 1, "planned": 0}
    answers = [
        SimpleNamespace(groups=groups),
        ReplayBufferError("connection lost"),
        *[SimpleNamespace(groups=groups)] * 2,
    ]

    async def stats():
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        return answer

    view = TerminalView(title="run", total_steps=3, console=Console(file=output, width=400))
    fleet = SimpleNamespace(engines=lambda: ["engine-0"])
    evaluator = SimpleNamespace(evaluate_all=lambda version: asyncio.sleep(3600))
    late = make_training(tmp_path, view, fleet=fleet, buffer=SimpleNamespace(stats=stats), evaluator=evaluator)
    telling = asyncio.create_task(late.tell_late_steps())
    await asyncio.sleep(61)
    evaluating = asyncio.create_task(late.evaluate(3))
    await asyncio.sleep(238)  # the run prints a line after 60, 120 and 240 s
    late.step_finished(make_record(0))
    await asyncio.sleep(59)
    late.step_finished(make_record(1))
    await asyncio.sleep(125)  # 480 s after the start, the latest step is 122 s old
    telling.cancel()
    evaluating.cancel()
    lines = [line.partition("] ")[2] for line in output.getvalue().splitlines()]
    first, second, third, fourth = [line for line in lines if line.startswith("no learner step")]
    state = "prompt groups: 4 queued, 2 generating (engines: 1), 1 stored, 0 planned; a batch takes 32"
    assert first == f"no learner step has finished for 60 s: {state}"
    assert second == "no learner step has finished for 120 s: the buffer does not answer: connection lost"
    assert third == f"no learner step has finished for 240 s: {state}; policy version 3 is being evaluated"
    assert fourth == f"no learner step has finished for 122 s: {state}; policy version 3 is being evaluated"


async def test_the_start_of_an_evaluation_is_reported(tmp_path):
    output = io.StringIO()
    view = TerminalView(title="run", total_steps=3, console=Console(file=output, width=200))
    evaluator = SimpleNamespace(evaluate_all=lambda version: asyncio.sleep(3600))
    evaluated = make_training(tmp_path, view, evaluator=evaluator)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await evaluated.evaluate(2)
    assert output.getvalue().endswith("evaluating policy version 2 on the held-out prompts\n")


async def test_an_evaluation_begins_when_engines_serve_its_version(tmp_path):
    output, served = io.StringIO(), asyncio.Event()
    view = TerminalView(title="run", total_steps=3, console=Console(file=output, width=200))
    evaluator = SimpleNamespace(evaluate_pinned=lambda version, pinned: asyncio.sleep(3600))
    evaluated = make_training(tmp_path, view, evaluator=evaluator)

    async def pinned(known):
        await served.wait()
        return {"engine-0"}

    evaluating = asyncio.create_task(evaluated.evaluate(2, pinned))
    await asyncio.sleep(0.01)
    assert output.getvalue() == ""
    served.set()
    await asyncio.sleep(0.01)
    assert output.getvalue().endswith("evaluating policy version 2 on the held-out prompts\n")
    evaluating.cancel()


async def test_the_warm_start_of_a_failed_run_ends_before_ray(tmp_path, monkeypatch):
    ended = []

    @asynccontextmanager
    async def cluster(config, say):
        try:
            yield config
        finally:
            ended.append("Ray")

    class Warming:
        async def stop(self):
            ended.append("the warm start")

    def fail(*_):
        raise WorkerDiedError("a node died")

    monkeypatch.setattr("asyncrl.run.run.ray_cluster", cluster)
    monkeypatch.setattr("asyncrl.run.run.node_folders", fail)
    view = TerminalView(title="run", total_steps=3, console=Console(file=io.StringIO()))
    run = Run(compose_run([]), tmp_path, (None, []), Warming(), view, lambda fault: None)
    monkeypatch.setattr(run, "_start_buffer", lambda *_: None)
    with pytest.raises(WorkerDiedError, match="a node died"):
        await run.run()
    assert ended == ["the warm start", "Ray"]


def test_the_controller_loads_no_torch():
    code = "import sys, asyncrl.run.run; sys.exit('torch' in sys.modules or 'tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
